/* Faults that strike packets (wire_fault.h). All chance comes from one seed and the order of the packets. */
#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/timerfd.h>
#include <unistd.h>
#include "base/fork.h"
#include "verbs/engine.h"
#include "verbs/path.h"
#include "verbs/wire_fault.h"

enum { KEPT_MAX = 256 };
enum side { SIDE_OUT = 1, SIDE_IN = 2 };

struct rules {
	double drop, duplicate, reorder, corrupt, delay, dscp_rate;
	uint64_t delay_ns, slow_ns;
	uint32_t mtu;
	int dscp;                       /* -1: none */
	bool dead, unroute;
	union tp_addr unroute_to;
	int sides;
	uint64_t seed;
};
struct kept { struct kept *next; uint64_t when_ns; struct tp_endpoint *endpoint; uint32_t sender; struct tp_route route; uint32_t bytes; uint8_t data[]; };

static struct tp_param params[] = {
	{ .name = "TELPHER_VERBS_FAULT", .kind = TP_PARAM_STRING,
		.doc = "Faults on demand, a list: drop=0.01, mtu=1500, dead, memlock=64K, seed=7, …; telpher-verbs(1) has them all" },
};
TP_PARAM_TABLE("verbs", params)

_Atomic bool tp_fault_wire_any, tp_fault_wire_out;
static struct rules rules;
static _Atomic uint64_t slow_ns;    /* of the rules: asked for outside of the lock */
static uint64_t chance;
static struct kept *kept, **kept_end = &kept;
static int kept_count;
static uint64_t kept_first_ns;
static int kept_fd = -1;            /* a timer: when the first of those kept is due */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* ---- reading ---- */

static bool read_rate(const char *text, double *out)
{
	char *end;
	*out = strtod(text, &end);
	return end != text && *end == 0 && *out >= 0 && *out <= 1;
}

static bool read_time(const char *text, uint64_t *out)
{
	char *end;
	double value = strtod(text, &end);
	double unit = !strcmp(end, "us") ? 1e3 : !strcmp(end, "ms") ? 1e6 : !strcmp(end, "s") ? 1e9 : 0;
	*out = (uint64_t)(value * unit);
	return end != text && unit > 0 && value >= 0 && value * unit < 1e11;
}

static bool read_uint(const char *text, uint64_t most, uint64_t *out)
{
	char *end;
	*out = strtoull(text, &end, 0);
	return end != text && *end == 0 && *out <= most;
}

/* "rate:rest": cuts text at the colon. */
static char *cut(char *text)
{
	char *colon = strchr(text, ':');
	if (colon)
		*colon++ = 0;
	return colon;
}

static bool read_address(const char *text, union tp_addr *out)
{
	memset(out, 0, sizeof(*out));
	if (inet_pton(AF_INET, text, &out->v4.sin_addr) == 1) {
		out->sa.sa_family = AF_INET;
		return true;
	}
	out->sa.sa_family = AF_INET6;
	return inet_pton(AF_INET6, text, &out->v6.sin6_addr) == 1;
}

static bool read_rule(struct rules *r, const char *name, char *value)
{
	uint64_t number = 0;
	char *more = NULL;
	if (!strcmp(name, "drop"))
		return read_rate(value, &r->drop);
	if (!strcmp(name, "duplicate"))
		return read_rate(value, &r->duplicate);
	if (!strcmp(name, "reorder"))
		return read_rate(value, &r->reorder);
	if (!strcmp(name, "corrupt"))
		return read_rate(value, &r->corrupt);
	if (!strcmp(name, "delay"))
		return (more = cut(value)) && read_rate(value, &r->delay) && read_time(more, &r->delay_ns);
	if (!strcmp(name, "slow"))
		return read_time(value, &r->slow_ns);
	if (!strcmp(name, "unroute"))
		return r->unroute = read_address(value, &r->unroute_to);
	if (!strcmp(name, "dead"))
		return r->dead = *value == 0;
	if (!strcmp(name, "mtu") && read_uint(value, 65535, &number))
		return (r->mtu = (uint32_t)number) > 0;
	if (!strcmp(name, "dscp") && (more = cut(value)) && read_uint(value, 63, &number)) {
		r->dscp = (int)number;
		return read_rate(more, &r->dscp_rate);
	}
	if (!strcmp(name, "seed"))
		return read_uint(value, UINT64_MAX, &r->seed);
	if (!strcmp(name, "side")) {
		r->sides = !strcmp(value, "out") ? SIDE_OUT : !strcmp(value, "in") ? SIDE_IN : !strcmp(value, "both") ? SIDE_OUT | SIDE_IN : 0;
		return r->sides != 0;
	}
	return false;
}

static void set_alarm(uint64_t when_ns)
{
	struct itimerspec at = { .it_value = { (time_t)(when_ns / 1000000000u), (long)(when_ns % 1000000000u) } };
	if (kept_fd >= 0)
		timerfd_settime(kept_fd, TFD_TIMER_ABSTIME, &at, NULL);
}

static int ring(int fd, void *arg)
{
	uint64_t count;
	(void)arg;
	if (read(fd, &count, sizeof(count)) < 0)
		return 0;
	tp_fault_flush();
	return 1;
}

/* A forked child keeps the rules: neither its parent's timer nor the packets that wait for it. */
static void fork_child(void)
{
	pthread_mutex_init(&lock, NULL);
	if (kept_fd >= 0)
		close(kept_fd);
	kept_fd = -1;
	kept = NULL;
	kept_end = &kept;
	kept_count = 0;
}
TP_FORK_HOOK(TP_FORK_BASE, NULL, NULL, fork_child)

static int start_alarm(void)
{
	if (kept_fd >= 0)
		return 0;
	int fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
	if (fd < 0)
		return TP_CARD_FAIL(errno, "no timer for packets that are to be late: %s", strerror(errno));
	kept_fd = fd;
	return tp_progress_watch(fd, ring, NULL);
}

int tp_fault_wire_set(const char *text)
{
	struct rules r = { .dscp = -1, .sides = SIDE_OUT, .seed = 1 };
	char *copy = strdup(text ? text : ""), *save = NULL;
	if (!copy)
		return TP_CARD_FAIL(ENOMEM, "no memory for the faults \"%s\"", text);
	bool none = *copy == 0 || !strcmp(copy, "none");
	for (char *rule = none ? NULL : strtok_r(copy, ", ", &save); rule; rule = strtok_r(NULL, ", ", &save)) {
		char *value = strchr(rule, '=');
		static char empty[1];
		if (value)
			*value++ = 0;
		if (!read_rule(&r, rule, value ? value : empty)) {
			TP_WARN("the fault \"%s%s%s\" can't be read: drop=, duplicate=, reorder=, corrupt= RATE (0 to 1), delay=RATE:TIME, dscp=DSCP:RATE, "
				"mtu=BYTES, slow=TIME, unroute=ADDRESS, dead, side=in|out|both, seed=NUMBER", rule, value ? "=" : "", value ? value : "");
			free(copy);
			return EINVAL;
		}
	}
	free(copy);
	int error = r.delay > 0 || r.reorder > 0 ? start_alarm() : 0;
	if (error)
		return error;
	pthread_mutex_lock(&lock);
	rules = r;
	atomic_store_explicit(&slow_ns, r.slow_ns, memory_order_relaxed);
	chance = r.seed * 0x9e3779b97f4a7c15u + 1;
	pthread_mutex_unlock(&lock);
	atomic_store_explicit(&tp_fault_wire_any, !none, memory_order_relaxed);
	atomic_store_explicit(&tp_fault_wire_out, !none && (r.sides & SIDE_OUT), memory_order_relaxed);
	tp_path_watch();
	return 0;
}

/* ---- striking ---- */

/* splitmix64 */
static uint64_t draw(void)
{
	uint64_t z = chance += 0x9e3779b97f4a7c15u;
	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
	z = (z ^ z >> 27) * 0x94d049bb133111ebu;
	return z ^ z >> 31;
}
static bool happens(double rate) { return rate > 0 && (double)(draw() >> 11) * 0x1p-53 < rate; }

static bool is_unrouted(const union tp_addr *from, const union tp_addr *to)
{
	return rules.unroute && (tp_wire_same_host(&rules.unroute_to, to) || tp_wire_same_host(&rules.unroute_to, from));
}

static bool is_lost(const struct tp_fault_packet *packet)
{
	uint32_t ip_bytes = packet->bytes + 8 + (packet->to->sa.sa_family == AF_INET6 ? 40 : 20);
	return rules.dead || is_unrouted(packet->from, packet->to) ||
		(rules.mtu && ip_bytes > rules.mtu) || (rules.dscp >= 0 && packet->tos >> 2 == rules.dscp && happens(rules.dscp_rate)) ||
		happens(rules.drop);
}

static bool keep(const struct tp_fault_packet *packet, struct tp_endpoint *endpoint, uint32_t sender, const struct tp_route *route, uint64_t delay_ns)
{
	/* In a forked child the rules are older than the timer. */
	struct kept *k = kept_count < KEPT_MAX && start_alarm() == 0 ? malloc(sizeof(*k) + packet->bytes) : NULL;
	if (!k)
		return false;
	*k = (struct kept){ .when_ns = tp_clock_ns() + delay_ns, .endpoint = endpoint, .sender = sender, .route = *route, .bytes = packet->bytes };
	memcpy(k->data, packet->data, packet->bytes);
	*kept_end = k;
	kept_end = &k->next;
	if (kept_count++ == 0 || k->when_ns < kept_first_ns) {
		kept_first_ns = k->when_ns;
		set_alarm(kept_first_ns);
	}
	return true;
}

int tp_fault_packet(struct tp_fault_packet *packet, struct tp_endpoint *endpoint, uint32_t sender, const struct tp_route *route)
{
	int copies = 1;
	pthread_mutex_lock(&lock);
	if (rules.sides & (packet->out ? SIDE_OUT : SIDE_IN)) {
		if (is_lost(packet))
			copies = 0;
		else if (happens(rules.corrupt))
			packet->data[draw() % packet->bytes] ^= (uint8_t)(1u << draw() % 8);
		if (copies && happens(rules.duplicate))
			copies = 2;
		if (copies && route && happens(rules.delay) && keep(packet, endpoint, sender, route, rules.delay_ns))
			copies = 0;
		/* Behind those that come next. */
		if (copies && route && happens(rules.reorder) && keep(packet, endpoint, sender, route, 30000))
			copies = 0;
	}
	pthread_mutex_unlock(&lock);
	return copies;
}

struct tp_fault_toll tp_fault_stream(const struct tp_fault_stream *stream)
{
	enum { DRAWS_MAX = 4096 };
	struct tp_fault_toll toll = { 0 };
	uint32_t draws = TP_MIN(stream->packets, (uint32_t)DRAWS_MAX);
	pthread_mutex_lock(&lock);
	if (rules.sides & (stream->out ? SIDE_OUT : SIDE_IN)) {
		const struct tp_fault_packet packet = { .from = stream->from, .to = stream->to, .tos = stream->tos, .bytes = stream->bytes, .out = stream->out };
		uint32_t ip_bytes = stream->bytes + 8 + (stream->to->sa.sa_family == AF_INET6 ? 40 : 20);
		toll.never = rules.dead || is_unrouted(stream->from, stream->to) || (rules.mtu && ip_bytes > rules.mtu);
		for (uint32_t i = 0; i < draws && !toll.never; i++) {
			toll.last_lost = is_lost(&packet) || happens(rules.corrupt);
			toll.lost += toll.last_lost;
			if (happens(rules.delay))
				toll.delay_ns += rules.delay_ns;
		}
		if (draws)
			toll.lost = (uint32_t)((uint64_t)toll.lost * stream->packets / draws);
	}
	pthread_mutex_unlock(&lock);
	return toll;
}

void tp_fault_flush(void)
{
	uint64_t next = 0, now = tp_clock_ns();
	struct kept *due = NULL, **due_end = &due;
	pthread_mutex_lock(&lock);
	for (struct kept **at = &kept; *at;) {
		struct kept *k = *at;
		if (k->when_ns > now) {
			next = next ? TP_MIN(next, k->when_ns) : k->when_ns;
			at = &k->next;
			continue;
		}
		*at = k->next;
		k->next = NULL;
		*due_end = k;
		due_end = &k->next;
		kept_count--;
	}
	kept_end = &kept;
	while (*kept_end)
		kept_end = &(*kept_end)->next;
	kept_first_ns = next;
	if (next)
		set_alarm(next);
	pthread_mutex_unlock(&lock);
	while (due) {
		struct kept *k = due;
		int error;
		due = k->next;
		tp_endpoint_send(k->endpoint, k->sender, &k->route, &(struct tp_frame){ .data = k->data, .bytes = k->bytes }, 1, &error);
		free(k);
	}
}

uint64_t tp_fault_slow_ns(void) { return tp_fault_wire() ? atomic_load_explicit(&slow_ns, memory_order_relaxed) : 0; }

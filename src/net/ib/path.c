/* Judging and leaving paths; see ib.h for the idea. Called when something looks wrong and a few times a second while a
 * connection waits, always by the connection's owner. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "base/text.h"
#include "net/ib/ib.h"

#define STALL_MS 300                /* without a completion: life signs and a write of no bytes */
#define PROBES_MAX 12               /* of these at a time */
#define ROUND_MS 40                 /* a life sign's way and back is worth so much of the time that a path has, however long it took */
#define PORT_LOOK_MS 200            /* while stalled: the port is asked, for drivers whose events don't come */
#define FAIL_GRACE_MS 300           /* a path that fails because the peer has ended is the peer's end, not the path's */
#define SWITCH_MS 1500              /* without any sign of the peer's host while a path is left */
#define REVIVE_MS 500               /* first attempt to revive a path; doubled with each failure */
#define REVIVE_MAX_MS 16000
#define TOLD_MS 1000
#define FRUITLESS_SWITCHES 8        /* without progress: what can't be sent on any path */
#define SLOW_TIMES 4                /* what a write of no bytes took before, times this, is no sign of death */
#define SLOW_MAX_MS 10000
#define SLOWEST_BYTES_PER_MS 8000   /* what a path moves that isn't dead */

void tp_ib_path_failed(struct tp_ib_comm *comm, struct tp_ib_path *path, const char *format, ...)
{
	va_list args;
	char why[sizeof(path->why)];

	if (path->state == TP_IB_PATH_DEAD || path->state == TP_IB_PATH_NONE) return;
	/* Not in place: the old reason may be part of the new one. */
	va_start(args, format);
	vsnprintf(why, sizeof(why), format, args);
	va_end(args);
	memcpy(path->why, why, sizeof(why));
	path->failures++;
	path->state = TP_IB_PATH_DEAD;
	path->since_ms = tp_clock_ms();
	path->next_ms = path->since_ms + (uint64_t)TP_MIN(REVIVE_MS << TP_MIN(path->failures - 1, 5u), REVIVE_MAX_MS);
	/* Closed later: the caller may be taking its completions. One in use is when its way is left, behind what it still has. */
	comm->to_close = true;
}

static void close_dead(struct tp_ib_comm *comm)
{
	comm->to_close = false;
	for (int p = 0; p < comm->npaths; p++)
		if (comm->paths[p].at < 0 && comm->paths[p].state == TP_IB_PATH_DEAD) tp_ib_qps_close(comm, &comm->paths[p]);
}

static bool usable(const struct tp_ib_path *path) { return path->state == TP_IB_PATH_LIVE; }

/* Is there any to go on over, beside those in use? Of these one that is in good health can be set up afresh. */
static bool has_other(const struct tp_ib_comm *comm)
{
	for (int i = 0; i < comm->nused; i++)
		if (usable(comm->used[i])) return true;
	for (int p = 0; p < comm->npaths; p++)
		if (comm->paths[p].at < 0 && usable(&comm->paths[p])) return true;
	return false;
}

struct tp_ib_path *tp_ib_culprit(const struct tp_ib_comm *comm)
{
	for (int i = 0; i < comm->nused; i++)
		if (!usable(comm->used[i])) return comm->used[i];
	return NULL;
}

static uint64_t now_or(uint64_t *since)
{
	uint64_t now = tp_clock_ms();
	if (*since == 0) *since = now;
	return now;
}

/* Life signs are answered in order: one is through when there are as many answers. */
static void ping(struct tp_ib_comm *comm, uint64_t now)
{
	struct tp_ib_record record;

	tp_ib_record_start(&record, TP_IB_PING);
	comm->ping_ms = now;
	if (tp_ib_control_send(&comm->control, &record) == 0) comm->pings++;
}

/* How many of those sent since there were `before` are answered. */
static uint32_t answered_since(const struct tp_ib_comm *comm, uint32_t before)
{
	uint32_t answered = atomic_load_explicit(&comm->control.pongs, memory_order_relaxed) - before;

	return (int32_t)answered > 0 ? answered : 0;
}

/* ---- leaving ---- */

static uint32_t dead_mask(const struct tp_ib_comm *comm)
{
	return ((1u << TP_IB_MAX_PATHS) - 1) & ~tp_ib_live_mask(comm);
}

void tp_ib_report(const struct tp_ib_comm *comm, struct tp_ib_wire_switch *out)
{
	out->below = comm->below;
	for (uint64_t n = comm->below; n < comm->head; n++)
		if (comm->messages[n % TP_IB_RING].done) out->ahead |= 1ull << (n - comm->below);
}

static bool peer_has(const struct tp_ib_wire_switch *report, uint64_t n)
{
	return n < report->below || (n - report->below < 64 && (report->ahead >> (n - report->below) & 1));
}

/* Why the way in use is left; "" where it is done willingly. */
static const char *reason(const struct tp_ib_comm *comm)
{
	for (int i = 0; i < comm->nused; i++)
		if (comm->used[i]->why[0]) return comm->used[i]->why;
	return "";
}

/* A path that stands by over the same two ports as one that failed in use would only be found dead later. */
static void fail_twins(struct tp_ib_comm *comm, const struct tp_ib_path *failed)
{
	for (int p = 0; p < comm->npaths; p++) {
		struct tp_ib_path *path = &comm->paths[p];
		if (path->at < 0 && usable(path) && path->port == failed->port && memcmp(path->remote.gid, failed->remote.gid, sizeof(failed->remote.gid)) == 0
			&& path->remote.port == failed->remote.port && strcmp(path->remote.device, failed->remote.device) == 0)
			tp_ib_path_failed(comm, path, "it leads over the same ports as one that failed");
	}
}

/* The paths in use are closed, for good or, those in good health, to be set up afresh at once. */
static void close_used(struct tp_ib_comm *comm)
{
	for (int i = 0; i < comm->nused; i++) {
		struct tp_ib_path *path = comm->used[i];
		/* Before it is closed: what is flushed then is no news. */
		if (usable(path)) path->next_ms = tp_clock_ms();
		path->state = TP_IB_PATH_DEAD;
		path->since_ms = tp_clock_ms();
		path->probing = false;
	}
	for (int i = 0; i < comm->nused; i++) tp_ib_qps_close(comm, comm->used[i]);
}

/* Moves to the peer what this side knows, with the old paths closed for good. */
ncclResult_t tp_ib_leave(struct tp_ib_comm *comm, bool willingly)
{
	struct tp_ib_record record;

	for (int i = 0; i < comm->nused; i++) {
		if (usable(comm->used[i]) && willingly) comm->used[i]->why[0] = 0;
		if (!usable(comm->used[i])) fail_twins(comm, comm->used[i]);
	}
	tp_ib_record_start(&record, TP_IB_SWITCH);
	record.as.change.epoch = comm->epoch + 1;
	/* What the peer is told, however that changes until it answers: both choose from the same two masks. */
	comm->told_dead = record.as.change.dead = dead_mask(comm);
	snprintf(record.as.change.why, sizeof(record.as.change.why), "%.255s", reason(comm));
	comm->switching = true;
	comm->willingly = willingly;
	comm->switch_ms = tp_clock_ms();
	comm->silent_ms = 0;
	comm->pongs_at_switch = atomic_load_explicit(&comm->control.pongs, memory_order_relaxed);
	comm->resending = false;
	close_used(comm);
	tp_ib_report(comm, &record.as.change);
	int error = tp_ib_control_send(&comm->control, &record);
	if (error && !atomic_load_explicit(&comm->control.closed, memory_order_acquire))
		return tp_ib_fail(comm, ncclRemoteError, "a path has failed (%s), and the peer can't be told over TCP: %s", reason(comm), strerror(error));
	return ncclSuccess;
}

void tp_ib_resend(struct tp_ib_comm *comm)
{
	for (; comm->resend < comm->head; comm->resend++) {
		if (comm->messages[comm->resend % TP_IB_RING].done) continue;
		if (!tp_ib_queues_have_room(comm)) return;
		tp_ib_send_message(comm, comm->resend);
	}
	comm->resending = false;
}

/* What is through here and not there can't be sent again: its memory is the program's by now. */
static ncclResult_t check_report(struct tp_ib_comm *comm)
{
	const struct tp_ib_wire_switch *report = &comm->peer_switch;

	if (report->below > comm->head)
		return tp_ib_fail(comm, ncclInternalError, "the receiver says that it has %llu messages of %llu", (unsigned long long)report->below, (unsigned long long)comm->head);
	for (uint64_t n = TP_MIN(report->below, comm->below); n < comm->head; n++) {
		bool through = n < comm->below || comm->messages[n % TP_IB_RING].done;
		if (through && !peer_has(report, n))
			return tp_ib_fail(comm, ncclInternalError, "message %llu was acknowledged, but the receiver doesn't have it: it is lost. Do the cards keep to the rules?", (unsigned long long)n);
	}
	return ncclSuccess;
}

static ncclResult_t resume_sender(struct tp_ib_comm *comm)
{
	uint64_t resent = 0;

	TP_TRY(check_report(comm));
	for (uint64_t n = comm->below; n < comm->head; n++) {
		if (comm->messages[n % TP_IB_RING].done) continue;
		if (peer_has(&comm->peer_switch, n)) tp_ib_message_done(comm, n);
		else resent++;
	}
	comm->resend = comm->below;
	comm->resending = true;
	tp_ib_resend(comm);
	TP_INFO(TP_NET, "NET/IB : rank %d -> rank %d : %llu messages are sent again", comm->from, comm->to, (unsigned long long)resent);
	return comm->error;
}

static void resume_receiver(struct tp_ib_comm *comm)
{
	int first;

	for (uint64_t n = comm->below; n < comm->head; n++) {
		struct tp_ib_message *m = &comm->messages[n % TP_IB_RING];
		if (m->done) continue;
		m->left = (uint32_t)tp_ib_ends(comm, n, &first);
		tp_ib_announce(comm, n);
	}
	tp_ib_expect(comm);
}

bool tp_ib_port_may_warn(struct tp_ib_port *port)
{
	uint64_t now = tp_clock_ms(), last = atomic_load_explicit(&port->told_ms, memory_order_relaxed);

	if (last && now - last <= TOLD_MS) return false;
	atomic_store_explicit(&port->told_ms, now, memory_order_relaxed);
	return true;
}

/* A warning for the first connection that leaves a port; the others' would say the same. */
static void tell_of_switch(const struct tp_ib_comm *comm, const struct tp_ib_path *old, const char *from)
{
	const char *why = old->why[0] ? old->why : comm->peer_switch.why;
	char next[256];

	tp_ib_used_text(comm, next, sizeof(next));
	if (!why[0]) {
		TP_INFO(TP_NET, "NET/IB : %s is left for %s, which lives again", from, next);
	} else if (tp_ib_port_may_warn(old->port)) {
		TP_WARN("NET/IB : %s is left (%s); going on over %s, and so do other connections", from, why, next);
	} else {
		TP_INFO(TP_NET, "NET/IB : %s is left (%s); going on over %s", from, why, next);
	}
}

/* Neither side has another path: the one that failed is kept as the one in use, which no_path names, and all others are set up
 * afresh, as only those are that aren't in use. */
static void stand_on(struct tp_ib_comm *comm, struct tp_ib_path *path)
{
	if (!path->why[0]) snprintf(path->why, sizeof(path->why), "%s", comm->peer_switch.why);
	for (int p = 0; p < comm->npaths && comm->willingly; p++)
		if (comm->paths[p].at < 0 && comm->paths[p].port) {
			path = &comm->paths[p];
			tp_ib_path_failed(comm, path, "it failed while it was taken back");
			break;
		}
	tp_ib_use(comm, path->way, 1u << (path - comm->paths));
}

/* Of the paths that were in use the one that was the reason. */
static struct tp_ib_path *left_for(const struct tp_ib_comm *comm)
{
	for (int i = 0; i < comm->nused; i++)
		if (comm->used[i]->why[0]) return comm->used[i];
	for (int i = 0; i < comm->nused; i++)
		if (comm->peer_switch.dead >> (comm->used[i] - comm->paths) & 1) return comm->used[i];
	return comm->used[0];
}

/* A receiver always has receives outstanding, so it can't tell. */
static bool is_fruitless(struct tp_ib_comm *comm)
{
	if (!comm->sending || comm->willingly || comm->below >= comm->head) return false;
	comm->fruitless = comm->below == comm->switch_below ? comm->fruitless + 1 : 0;
	comm->switch_below = comm->below;
	return comm->fruitless >= FRUITLESS_SWITCHES;
}

/* Both have left: the same next paths on both sides, from what both said. */
static ncclResult_t arrive(struct tp_ib_comm *comm)
{
	uint32_t dead = comm->peer_switch.dead | comm->told_dead;
	struct tp_ib_path *old = left_for(comm);
	char from[512];
	int worth, next;

	for (int i = 0; i < comm->nused; i++) dead |= 1u << (comm->used[i] - comm->paths);
	next = tp_ib_best_way(comm, ~dead, &worth);
	tp_ib_name(comm, old, 0, from, sizeof(from));
	comm->epoch++;
	comm->switching = false;
	if (worth == 0) {
		stand_on(comm, old);
		return ncclSuccess;
	}
	comm->switches++;
	if (is_fruitless(comm)) return tp_ib_fail(comm, ncclSystemError, "message %llu fails on every path: %s", (unsigned long long)comm->below, old->why);
	tp_ib_use(comm, next, ~dead);
	comm->failing_ms = 0;
	tell_of_switch(comm, old, from);
	if (comm->sending) return resume_sender(comm);
	resume_receiver(comm);
	return comm->error;
}

static ncclResult_t peer_left(struct tp_ib_comm *comm, struct tp_ib_wire_switch *change)
{
	const char *wrong = tp_ib_wire_check_switch(change);
	bool willingly = true;

	if (wrong || change->epoch != comm->epoch + 1)
		return tp_ib_fail(comm, ncclInternalError, "the peer left a path in a way that makes no sense (%s; epoch %u after %u)", wrong ? wrong : "epoch", change->epoch, comm->epoch);
	comm->peer_switch = *change;
	/* Paths that both have tried are there, also where this side hasn't come by since. */
	for (int p = 0; p < comm->npaths; p++)
		if (comm->paths[p].state == TP_IB_PATH_PROVEN && comm->paths[p].peer_proven) tp_ib_lives_again(comm, &comm->paths[p]);
	if (comm->switching) return arrive(comm);
	for (int i = 0; i < comm->nused; i++) {
		struct tp_ib_path *path = comm->used[i];
		bool dead = change->dead >> (path - comm->paths) & 1;
		if (usable(path) && dead && change->why[0]) snprintf(path->why, sizeof(path->why), "%.64s says: %.255s", comm->peer_host, change->why);
		willingly &= usable(path) && !dead;
	}
	TP_TRY(tp_ib_leave(comm, willingly));
	return arrive(comm);
}

/* The peer answers when its program comes by, which may take any time: only one whose host is silent too is given up. As in
 * judge_stall time in which this side didn't look doesn't count. */
static ncclResult_t wait_for_peer(struct tp_ib_comm *comm)
{
	uint64_t now = tp_clock_ms();
	uint32_t pongs = atomic_load_explicit(&comm->control.pongs, memory_order_relaxed);

	comm->silent_ms += TP_MIN(now - comm->switch_ms, 2u * STALL_MS);
	comm->switch_ms = now;
	if (pongs != comm->pongs_at_switch) comm->silent_ms = 0;
	comm->pongs_at_switch = pongs;
	if (now - comm->ping_ms >= STALL_MS) ping(comm, now);
	else if (comm->silent_ms >= SWITCH_MS && (int32_t)(comm->pings - pongs) >= 3 && tp_ib_control_unacknowledged(&comm->control) > 0)
		return tp_ib_fail(comm, ncclRemoteError, "a path was left (%s), and the peer's host has not answered over TCP for %d ms", reason(comm), SWITCH_MS);
	return ncclSuccess;
}

/* ---- judging ---- */

static ncclResult_t take_records(struct tp_ib_comm *comm)
{
	struct tp_ib_note record;

	while (comm->error == ncclSuccess && tp_ib_control_take(&comm->control, &record)) {
		switch (record.head.type) {
		case TP_IB_SWITCH:
			TP_TRY(peer_left(comm, &record.as.change));
			break;
		case TP_IB_REVIVE: case TP_IB_CONNECTED: case TP_IB_PROVEN:
			TP_TRY(tp_ib_peer_revives(comm, record.head.type, &record.as.revive));
			break;
		case TP_IB_WANT:
			TP_TRY(tp_ib_peer_wants(comm, &record.as.revive));
			break;
		case TP_IB_LEAVING:
			comm->peer_left |= !comm->sending;
			for (uint64_t n = comm->below, head = comm->head; n < head && comm->sending; n++)
				if (!comm->messages[n % TP_IB_RING].done && peer_has(&record.as.change, n)) tp_ib_message_done(comm, n);
			break;
		case TP_IB_GOODBYE:
			tp_text_clean(record.as.text.text, sizeof(record.as.text.text));
			return tp_ib_fail(comm, ncclRemoteError, "%s says: %s", comm->peer_host, record.as.text.text);
		default:
			return tp_ib_fail(comm, ncclInternalError, "the peer sent record %u, which doesn't belong here", record.head.type);
		}
	}
	return comm->error;
}

/* A message that is under way may take its time: until it is through nothing else completes. */
static uint64_t patience_ms(const struct tp_ib_comm *comm, const struct tp_ib_path *path)
{
	const struct tp_ib_message *m = &comm->messages[comm->below % TP_IB_RING];
	size_t bytes = 0;

	for (int r = 0; r < m->n; r++) bytes += comm->sending ? (m->requests[r] ? m->requests[r]->bytes : 0) : m->capacity[r];
	return (uint64_t)comm->params.path_timeout_ms + bytes / SLOWEST_BYTES_PER_MS + TP_MIN(SLOW_TIMES * path->slowest_ms, (uint64_t)SLOW_MAX_MS);
}

/* It got through. How long that took is what this path may take again: on a machine with far more threads than processors a card
 * made of threads is slow, and not dead. */
static void end_probing(struct tp_ib_path *path, uint64_t now)
{
	if (path->probing) path->slowest_ms = TP_MAX(now - path->probed_ms, path->slowest_ms / 2);
	path->probing = false;
}

/* The write of no bytes that tells a path that is dead from a peer that is slow. More of these, because what gets lost is found
 * missing when the next one comes; the queue pair's own timer may take seconds. */
static void probe(struct tp_ib_comm *comm, struct tp_ib_path *path, uint64_t now)
{
	path->probe_ms = now;
	for (int q = 0; q < comm->nqps && path->probes < PROBES_MAX * comm->nqps; q++)
		if (!tp_ib_post_probe(comm, path, q)) return;
}

/* Silence is counted in life signs, one after the other: what keeps these (this thread, which sends the next one when it comes by, the two that answer and
 * hear them, a machine that is busy or stands still) keeps a card that is made of threads too. Such a path is late, and not dead. */
static void count_round(struct tp_ib_comm *comm, struct tp_ib_path *path, uint64_t now)
{
	uint32_t pongs = atomic_load_explicit(&comm->control.pongs, memory_order_relaxed);

	if (now - path->round_ms < ROUND_MS / 2 || (int32_t)(comm->pings - pongs) > 0) return;
	/* One that couldn't be sent has no answer. */
	if (pongs != path->pongs_at_round) path->silent_ms += TP_MIN(now - path->round_ms, (uint64_t)ROUND_MS);
	path->pongs_at_round = pongs;
	path->round_ms = now;
	ping(comm, now);
}

static void judge_stall(struct tp_ib_comm *comm, struct tp_ib_path *path)
{
	uint64_t now = now_or(&path->moved_ms), timeout = patience_ms(comm, path);
	uint64_t every = TP_MIN(TP_MAX((uint64_t)comm->params.path_timeout_ms / 8, 20u), STALL_MS);

	if (comm->below == comm->head || now - path->moved_ms < STALL_MS) {
		end_probing(path, now);
		return;
	}
	if (!path->probing) {
		path->probing = true;
		path->look_ms = path->probed_ms = path->round_ms = now;
		path->watched_ms = path->silent_ms = path->answered_ms = 0;
		path->pongs_at_round = path->pongs_at_look = atomic_load_explicit(&comm->control.pongs, memory_order_relaxed);
		ping(comm, now);
		probe(comm, path, now);
		return;
	}
	/* How often this side looks must not matter, but time in which it didn't look at all says nothing of the path. */
	path->watched_ms += TP_MIN(now - path->look_ms, 2 * every);
	path->look_ms = now;
	uint32_t pongs = atomic_load_explicit(&comm->control.pongs, memory_order_relaxed);
	if (pongs != path->pongs_at_look) path->answered_ms = path->watched_ms;
	path->pongs_at_look = pongs;
	count_round(comm, path, now);
	if (now - path->probe_ms >= every) probe(comm, path, now);
	if (path->probes == 0) {
		/* The peer takes its time. */
		end_probing(path, now);
		path->moved_ms = now;
		return;
	}
	bool silent = path->silent_ms >= timeout;
	bool gone = path->watched_ms - path->answered_ms >= timeout + timeout / 2 && (int32_t)(comm->pings - pongs) > 0 && tp_ib_control_unacknowledged(&comm->control) > 0;
	if (!silent && !gone) return;
	/* Not on what was so before this thread lost its processor. */
	if (tp_ib_poll_path(comm, path) > 0) path->moved_ms = 0;
	else if (silent)
		tp_ib_path_failed(comm, path, "nothing got through for %llu ms, not even a write of no bytes, although the peer answers over TCP: is a cable or port down, do packets get lost, "
			"can the two addresses reach each other (NCCL_IB_GID_INDEX), is the MTU right along the way?", (unsigned long long)(now - path->moved_ms));
	else
		tp_ib_path_failed(comm, path, "nothing got through for %llu ms, and the peer's host doesn't answer over TCP either: it is down, or its network is",
			(unsigned long long)(now - path->moved_ms));
}

static void judge_ports(struct tp_ib_comm *comm)
{
	for (int p = 0; p < comm->npaths; p++) {
		struct tp_ib_path *path = &comm->paths[p];
		uint32_t fatal;

		if (!path->port || path->state == TP_IB_PATH_DEAD) continue;
		fatal = atomic_load_explicit(&path->port->context->fatal, memory_order_relaxed);
		if (fatal && comm->params.return_async) tp_ib_path_failed(comm, path, "device %s has failed: look at the kernel log (dmesg)", path->port->context->name);
		else if (atomic_load_explicit(&path->port->state, memory_order_relaxed) != IBV_PORT_ACTIVE && !tp_ib_port_is_active(path->port))
			tp_ib_path_failed(comm, path, "port %s of %s is %s: look at its cable and the switch", path->port->text, tp_host_name(),
				tp_verbs_port_state_name((int)atomic_load_explicit(&path->port->state, memory_order_relaxed)));
	}
}

/* May this one be had in a moment? */
static bool may_live(const struct tp_ib_path *path)
{
	if (path->state == TP_IB_PATH_NONE) return false;
	if (path->state != TP_IB_PATH_DEAD) return true;
	return !atomic_load_explicit(&path->port->context->fatal, memory_order_relaxed) &&
		atomic_load_explicit(&path->port->state, memory_order_relaxed) == IBV_PORT_ACTIVE;
}

/* *waits: another one is being revived, or can be tried. */
static ncclResult_t seek_path(struct tp_ib_comm *comm, uint64_t now, bool *waits)
{
	*waits = false;
	/* As in judge_stall time in which nobody looked doesn't count. */
	comm->sought_ms += TP_MIN(now - comm->seek_ms, 2u * STALL_MS);
	comm->seek_ms = now;
	if (!comm->params.failover || !comm->params.recovery || comm->sought_ms >= (uint64_t)comm->params.path_timeout_ms) return ncclSuccess;
	for (int p = 0; p < comm->npaths; p++) {
		if (comm->paths[p].at >= 0 || comm->paths[p].state == TP_IB_PATH_NONE) continue;
		TP_TRY(tp_ib_revive_step(comm, &comm->paths[p]));
		*waits |= may_live(&comm->paths[p]);
	}
	return ncclSuccess;
}

static void start_failing(struct tp_ib_comm *comm, uint64_t now)
{
	comm->failing_ms = comm->seek_ms = now;
	comm->sought_ms = 0;
	comm->failing_pings = comm->pings;
	ping(comm, now);
	for (int p = 0; p < comm->npaths; p++) comm->paths[p].next_ms = 0;
}

/* Nowhere to go, unless another path comes to life. A peer that ended takes its paths with it: then that is the news, which its
 * closed connection brings any moment; one that answers a life sign sent since hasn't ended. */
static ncclResult_t no_path(struct tp_ib_comm *comm)
{
	struct tp_ib_path *path = tp_ib_culprit(comm);
	char text[512], reach[512];
	uint64_t now = tp_clock_ms();
	bool waits;

	if (comm->failing_ms == 0) start_failing(comm, now);
	if (atomic_load_explicit(&comm->control.closed, memory_order_acquire)) return ncclSuccess;
	TP_TRY(seek_path(comm, now, &waits));
	if (comm->params.failover && has_other(comm)) return tp_ib_leave(comm, false);
	if (waits) return ncclSuccess;
	if (answered_since(comm, comm->failing_pings) == 0 && now - comm->failing_ms < FAIL_GRACE_MS) return ncclSuccess;
	bool ended = path->why[0] && strchr("?.", path->why[strlen(path->why) - 1]);
	const char *apart = tp_ib_apart(path, reach, sizeof(reach));
	/* The cause first: texts are cut on their way to other ranks. */
	return tp_ib_fail(comm, ncclRemoteError, "%s %s %.31s:%u has failed%s: %s%s%s%s It is %s", path->port->text, comm->sending ? "->" : "<-", path->remote.device, path->remote.port,
		comm->npaths > 1 && !comm->params.failover ? " (and NCCL_IB_RESILIENCY_PORT_FAILOVER=0)" : ", and there is no other path",
		apart ? apart : "", apart ? ". " : "", path->why, ended ? "" : ".",
		tp_ib_path_text(comm, path, 0, text, sizeof(text)));
}

ncclResult_t tp_ib_care(struct tp_ib_comm *comm)
{
	uint64_t now = tp_clock_ms();

	TP_TRY(comm->error);
	if (atomic_load_explicit(&comm->control.waiting, memory_order_acquire)) TP_TRY(take_records(comm));
	if (comm->cm) tp_ib_cm_look(comm);
	if (comm->to_close) close_dead(comm);
	if (comm->switching) return wait_for_peer(comm);
	if (!tp_ib_culprit(comm)) judge_ports(comm);
	for (int i = 0; i < comm->nused && !tp_ib_culprit(comm); i++) judge_stall(comm, comm->used[i]);
	if (tp_ib_culprit(comm)) return comm->params.failover && has_other(comm) ? tp_ib_leave(comm, false) : no_path(comm);
	if (now - comm->care_ms < PORT_LOOK_MS) return ncclSuccess;
	comm->care_ms = now;
	for (int i = 0; i < comm->nused; i++)
		if (comm->used[i]->probing) tp_ib_port_is_active(comm->used[i]->port);
	for (int p = 0; p < comm->npaths && comm->params.recovery; p++)
		if (comm->paths[p].at < 0 && comm->paths[p].port) TP_TRY(tp_ib_revive_step(comm, &comm->paths[p]));
	return comm->params.recovery ? tp_ib_take_back(comm) : ncclSuccess;
}

/* Links between hosts. A site calls another host's process when it first has something for it and keeps the connection; what
 * goes which way is said by the frames, so one connection serves both.
 *
 * A connection may break at any time without anybody's death, with frames on their way that are lost. So a link has no queue but
 * knows what its host has to hear: that it is watched, the event, the gathers of the turns that it may still be waiting for.
 * Every new connection begins by saying all of it, and whoever hears a thing twice takes no notice. A gather's copy is let go when
 * a later turn proves that all hosts have it.
 *
 * Events are flooded: a host that hears of one for the first time tells the hosts at distances 1, 2, 4, …, so some dead ones
 * on the way do not matter. Life signs: each host's speaker (its first process that has not left) asks the next two hosts' speakers
 * for a sign each 250 ms. Silence is counted in our own ticks that found nothing to read: while we don't run, the other's silence
 * means nothing. A sign says how late its sender's timers are: one who lacks a processor is given more time, and who lacks one
 * himself gives more. A connection that ends says nothing either; calling again does: a machine that answers that nobody listens
 * there has lost the process. So silence decides only where a machine is gone, the network is cut, or a child holds the dead
 * one's sockets open. A speaker that leaves in good order says so, and its host's next process is asked instead.
 *
 * What isn't found: both watchers of a host leave in good order, and it dies before the next one has heard from it, within
 * milliseconds. To that one it looks like a host that has left too, and is taken for it: else each shutdown would end with
 * deaths that were none. Whoever waits for that host is told by its own connection to it. */
#include "base/text.h"
#include "boot/internal.h"
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LATE_MS 100
#define LATE_WEIGHT 2               /* a watcher waits so many times longer for who is late */
#define SETTLE_MS 8000              /* until a newly asked speaker must have spoken */
#define START_MS 30000              /* the same at init, where processes may start slowly */
#define CALLS_MAX 64
#define WATCHED_HOSTS 2
#define STARVED_MS 30000
#define CALM_MS 1000                /* a connection that lasted so long is called again at once */
#define PAUSE_MAX_MS 200

enum { P_LIFE_TIMEOUT };
static struct tp_param mesh_params[] = {
	[P_LIFE_TIMEOUT] = { .name = "TELPHER_LIFE_TIMEOUT", .kind = TP_PARAM_INT, .fallback = "2400", .min = 0, .max = 3600000,
		.doc = "ms without a life sign after which another host is taken for dead; longer for one that says that it lacks processor time; 0: never" },
};
TP_PARAM_TABLE("boot", mesh_params)

static void call_host(struct tp_link *link);
static void watch_next_hosts(struct tp_site *site);

static int first_rank(const struct tp_site *site, int host)
{
	return tp_segment_host_ranks(site->seg)[tp_segment_host_first(site->seg)[host]];
}

/* The first rank of the host's next process after that of `rank`; -1: there is none. */
static int next_process(const struct tp_site *site, int host, int rank)
{
	const struct tp_boot_peer *peers = tp_segment_peers(site->seg);
	const int *first = tp_segment_host_first(site->seg), *ranks = tp_segment_host_ranks(site->seg);
	for (int i = first[host]; i < first[host + 1]; i++) {
		bool seen = ranks[i] <= rank;
		/* A process that has a rank up to this one has been tried. */
		for (int k = first[host]; k < i && !seen && ranks[k] <= rank; k++)
			seen = peers[ranks[k]].process_hash == peers[ranks[i]].process_hash;
		if (!seen) return ranks[i];
	}
	return -1;
}

static void drop_gather(struct tp_kept *kept)
{
	free(kept->data);
	*kept = (struct tp_kept){0};
}

static void drop_calls(struct tp_link *link)
{
	while (link->calls) {
		struct tp_pending *first = link->calls;
		link->calls = first->next;
		free(first);
	}
	link->ncalls = 0;
}

/* What was for a process that needs nothing more. */
static void drop_all(struct tp_link *link)
{
	drop_gather(&link->kept[0]);
	drop_gather(&link->kept[1]);
	drop_calls(link);
}

static bool has_something_to_say(const struct tp_link *link)
{
	return link->watched || link->owes_event || link->kept[0].data || link->kept[1].data || link->calls;
}

/* Not even handed to the kernel yet. */
static bool has_unsent(const struct tp_link *link)
{
	if (link->over) return false;
	for (int i = 0; i < 2; i++)
		if (link->kept[i].data && !link->kept[i].sent) return true;
	return link->owes_event && (!link->open || link->conn->broken || link->conn->out_have);
}

/* Nobody of that host can be reached any more. */
static void give_up_host(struct tp_link *link)
{
	struct tp_site *site = link->site;
	bool watched = link->watched;
	link->over = true;
	link->watched = false;
	if (link->conn) tp_conn_close(link->conn);
	link->conn = NULL;
	link->open = false;
	link->retry_ms = 0;
	link->owes_event = false;
	drop_all(link);
	pthread_cond_broadcast(&site->cond);
	if (watched && !site->closing) watch_next_hosts(site);
}

static void try_next_process(struct tp_link *link)
{
	int rank = next_process(link->site, link->host, link->rank);
	if (link->conn) tp_conn_close(link->conn);
	link->conn = NULL;
	link->open = link->heard = false;
	link->missed = 0;
	link->last_ms = tp_clock_ms();
	if (rank < 0) {
		give_up_host(link);
		return;
	}
	link->rank = rank;
	link->late_ms = 0;
	/* Gathers are between the hosts' first processes: one that has left needs none, and no other takes its place. */
	drop_gather(&link->kept[0]);
	drop_gather(&link->kept[1]);
	pthread_cond_broadcast(&link->site->cond);
	if (has_something_to_say(link)) call_host(link);
}

static void host_died(struct tp_link *link, const char *how)
{
	struct tp_site *site = link->site;
	int rank = link->rank;
	give_up_host(link);
	tp_watch_dead(site, rank, how);
}

static const char *take_event(struct tp_site *site, const void *data, size_t bytes)
{
	struct tp_wire_event wire;
	if (bytes != sizeof(wire)) return "sent an event of the wrong length";
	memcpy(&wire, data, sizeof(wire));
	if (wire.kind == TP_EVENT_NONE || wire.kind > TP_EVENT_MISMATCH || wire.result < 0 || wire.result >= ncclNumResults) return "sent an event that can't be";
	struct tp_event event = { .kind = (enum tp_event_kind)wire.kind, .rank = wire.rank, .result = (ncclResult_t)wire.result };
	memcpy(event.text, wire.text, sizeof(event.text));
	tp_text_clean(event.text, sizeof(event.text));
	tp_event_post(site, &event);
	return NULL;
}

static void send_event(struct tp_conn *conn, const struct tp_event *event)
{
	struct tp_wire_event wire = { .kind = (uint32_t)event->kind, .rank = event->rank, .result = (int32_t)event->result };
	memcpy(wire.text, event->text, sizeof(wire.text));
	tp_conn_send(conn, TP_FRAME_EVENT, &wire, sizeof(wire));
}

/* ---- links that we call */

static void send_gather(struct tp_link *link, struct tp_kept *kept)
{
	if (!kept->data) return;
	tp_conn_send(link->conn, TP_FRAME_GATHER, kept->data, kept->bytes);
	if (!link->conn->broken && link->conn->out_have == 0) kept->sent = true;
}

static void link_open(struct tp_conn *conn)
{
	struct tp_link *link = conn->owner;
	struct tp_site *site = link->site;
	struct tp_event event;
	uint32_t host = (uint32_t)site->seg->host;
	bool second_first = link->kept[0].data && link->kept[1].data && (int32_t)(link->kept[0].turn - link->kept[1].turn) > 0;
	link->open = true;
	link->missed = 0;
	link->opened_ms = link->last_ms = tp_clock_ms();     /* it has answered a challenge */
	conn->limit = sizeof(struct tp_wire_event) + 64;
	tp_conn_send(conn, TP_FRAME_HOST, &host, sizeof(host));
	if (link->watched) tp_conn_send(conn, TP_FRAME_WATCH, NULL, 0);
	if (tp_event_get(site->seg, &event)) send_event(conn, &event);
	send_gather(link, &link->kept[second_first]);
	send_gather(link, &link->kept[!second_first]);
	for (struct tp_pending *call = link->calls; call; call = call->next) tp_conn_send(conn, TP_FRAME_CALL, &call->call, sizeof(call->call));
	drop_calls(link);
	pthread_cond_broadcast(&site->cond);
}

static void link_flushed(struct tp_conn *conn)
{
	struct tp_link *link = conn->owner;
	link->kept[0].sent = link->kept[1].sent = true;
	pthread_cond_broadcast(&link->site->cond);
}

static const char *link_frame(struct tp_conn *conn, enum tp_wire_type type, const void *data, size_t bytes)
{
	struct tp_link *link = conn->owner;
	struct tp_site *site = link->site;
	uint32_t late_ms;
	link->last_ms = tp_clock_ms();
	link->missed = 0;
	switch (type) {
	case TP_FRAME_LIFE:
		if (bytes != sizeof(late_ms)) return "sent a life sign of the wrong length";
		memcpy(&late_ms, data, sizeof(late_ms));
		link->late_ms = TP_MIN(late_ms, STARVED_MS);
		if (!link->heard) {
			link->heard = true;
			pthread_cond_broadcast(&site->cond);
		}
		return NULL;
	case TP_FRAME_LEFT: try_next_process(link); return NULL;
	case TP_FRAME_EVENT: return take_event(site, data, bytes);
	default: return "sent a frame that is none of a host's answers";
	}
}

static void call_again(struct tp_link *link, bool was_open)
{
	uint64_t now = tp_clock_ms();
	if (was_open && now - link->opened_ms >= CALM_MS) link->pause_ms = 0;
	link->retry_ms = now + (was_open && link->pause_ms == 0 ? 1 : TP_MAX(link->pause_ms, 50));
	link->pause_ms = TP_MIN(link->pause_ms ? 2 * link->pause_ms : 50, PAUSE_MAX_MS);
	tp_service_poke(link->retry_ms);
}

static void link_closed(struct tp_conn *conn, enum tp_conn_end how, const char *why)
{
	struct tp_link *link = conn->owner;
	bool was_open = link->open;
	(void)why;
	link->conn = NULL;
	link->open = false;
	if (link->over) return;
	if (how == TP_END_REFUSED || how == TP_END_UNKNOWN || how == TP_END_FOREIGN) {
		/* Where it had spoken to us and has not said good-bye, this is the proof that it is gone. Another program may have got
		 * its port. */
		if (link->watched && link->heard) host_died(link, how == TP_END_UNKNOWN ? "closed the communicator after an error" : "died");
		else try_next_process(link);
		return;
	}
	if (has_something_to_say(link)) call_again(link, was_open);
}

static const struct tp_conn_ops link_ops = { .open = link_open, .frame = link_frame, .closed = link_closed, .flushed = link_flushed };

static void call_host(struct tp_link *link)
{
	struct tp_site *site = link->site;
	const union tp_addr *addr = &tp_segment_peers(site->seg)[link->rank].service;
	link->retry_ms = 0;
	ncclResult_t result = tp_conn_call(-1, addr, TP_WIRE_LINK, link->heard || link->rank != first_rank(site, link->host) ? 0 : TP_WIRE_HOLD,
		site->name, site->secret, tp_clock_ms() + TP_HANDSHAKE_MS, &link_ops, link, &link->conn);
	if (result != ncclSuccess) call_again(link, false);
}

static struct tp_link *get_link(struct tp_site *site, int host)
{
	for (struct tp_link *link = site->links; link; link = link->next)
		if (link->host == host) return link;
	struct tp_link *link = tp_alloc(1, sizeof(*link), "link between hosts");
	if (!link) return NULL;
	link->site = site;
	link->host = host;
	link->rank = first_rank(site, host);
	link->next = site->links;
	site->links = link;
	return link;
}

static void call_if_closed(struct tp_link *link)
{
	if (!link->open && !link->conn && !link->retry_ms) call_host(link);
}

ncclResult_t tp_mesh_gather(struct tp_site *site, int host, uint32_t turn, const void *data, size_t bytes)
{
	struct tp_link *link = get_link(site, host);
	if (!link) return ncclSystemError;
	struct tp_kept *kept = &link->kept[turn & 1];
	if (link->over) return ncclSuccess;
	drop_gather(kept);              /* of two turns before: nobody waits for it */
	void *copy = malloc(bytes);
	if (!copy) return TP_FAIL(ncclSystemError, "no memory for %zu bytes of an all-gather between hosts", bytes);
	memcpy(copy, data, bytes);
	*kept = (struct tp_kept){ .turn = turn, .bytes = bytes, .data = copy };
	if (link->open) send_gather(link, kept);
	else call_if_closed(link);
	return ncclSuccess;
}

void tp_mesh_forget_gathers(struct tp_site *site, uint32_t turn)
{
	for (struct tp_link *link = site->links; link; link = link->next)
		if (link->kept[turn & 1].data && link->kept[turn & 1].turn == turn) drop_gather(&link->kept[turn & 1]);
}

void tp_mesh_send_call(struct tp_site *site, int host, const struct tp_wire_call *call)
{
	struct tp_link *link = get_link(site, host);
	if (!link || link->over) return;
	if (link->open) {
		tp_conn_send(link->conn, TP_FRAME_CALL, call, sizeof(*call));
		return;
	}
	/* Calls are told again while the stall lasts: none is worth much. */
	struct tp_pending *entry = link->ncalls < CALLS_MAX ? malloc(sizeof(*entry)) : NULL;
	if (entry) {
		*entry = (struct tp_pending){ .next = link->calls, .call = *call };
		link->calls = entry;
		link->ncalls++;
	}
	call_if_closed(link);
}

void tp_mesh_flood(struct tp_site *site, const struct tp_event *event)
{
	for (int distance = 1; distance < site->seg->nhosts; distance *= 2) {
		struct tp_link *link = get_link(site, (site->seg->host + distance) % site->seg->nhosts);
		if (!link || link->over) continue;
		link->owes_event = true;
		if (link->open) send_event(link->conn, event);
		else call_if_closed(link);
	}
	/* Who watches us sits on the other side. */
	for (struct tp_conn *conn = site->incoming; conn; conn = conn->next_of_owner)
		if (conn->watcher) send_event(conn, event);
}

/* ---- links that call us */

static void unlink_incoming(struct tp_site *site, struct tp_conn *conn)
{
	for (struct tp_conn **at = &site->incoming; *at; at = &(*at)->next_of_owner)
		if (*at == conn) {
			*at = conn->next_of_owner;
			return;
		}
}

static void send_life(struct tp_site *site, struct tp_conn *conn) { tp_conn_send(conn, TP_FRAME_LIFE, &site->late_ms, sizeof(site->late_ms)); }

static const char *incoming_frame(struct tp_conn *conn, enum tp_wire_type type, const void *data, size_t bytes)
{
	struct tp_site *site = conn->owner;
	struct tp_wire_call call;
	uint32_t host;
	if (type == TP_FRAME_HOST && bytes == sizeof(host)) {
		memcpy(&host, data, sizeof(host));
		if (host >= (uint32_t)site->seg->nhosts || conn->tag >= 0) return "says that it is a host that can't be";
		conn->tag = (int)host;
		return NULL;
	}
	if (conn->tag < 0) return "has not said which host it is";
	switch (type) {
	case TP_FRAME_WATCH:
		conn->watcher = true;
		send_life(site, conn);
		if (!site->speaker) tp_mesh_start(site);
		return NULL;
	case TP_FRAME_EVENT: return take_event(site, data, bytes);
	case TP_FRAME_GATHER: return tp_gather_arrived(site, conn->tag, data, bytes);
	case TP_FRAME_CALL:
		if (bytes != sizeof(call)) return "sent a call of the wrong length";
		memcpy(&call, data, sizeof(call));
		tp_call_arrived(site, &call);
		return NULL;
	default: return "sent a frame that is none of a host's";
	}
}

static void incoming_closed(struct tp_conn *conn, enum tp_conn_end how, const char *why)
{
	(void)how;
	(void)why;
	unlink_incoming(conn->owner, conn);
}

static const struct tp_conn_ops incoming_ops = { .frame = incoming_frame, .closed = incoming_closed };

void tp_mesh_adopt(struct tp_site *site, struct tp_conn *conn)
{
	struct tp_event event;
	if (site->closing) {
		tp_conn_close(conn);
		return;
	}
	conn->owner = site;
	conn->ops = &incoming_ops;
	conn->tag = -1;
	conn->limit = sizeof(struct tp_wire_gather) + (size_t)site->seg->nranks * TP_BOOT_GATHER_MAX;
	conn->next_of_owner = site->incoming;
	site->incoming = conn;
	if (tp_event_get(site->seg, &event)) send_event(conn, &event);
}

/* ---- life signs */

static void watch_host(struct tp_link *link)
{
	if (link->watched) return;
	link->watched = true;
	link->last_ms = tp_clock_ms();
	link->missed = 0;
	if (link->open) tp_conn_send(link->conn, TP_FRAME_WATCH, NULL, 0);
	else call_if_closed(link);
}

/* The next two hosts that are still there. Two, because a watcher that leaves takes along what it knew: its host's other
 * watcher has heard of a departure or finds a death. */
static void watch_next_hosts(struct tp_site *site)
{
	int watched = 0;
	for (int step = 1; step < site->seg->nhosts && watched < WATCHED_HOSTS; step++) {
		struct tp_link *link = get_link(site, (site->seg->host + step) % site->seg->nhosts);
		if (!link || link->over) continue;
		watched++;
		watch_host(link);
	}
}

void tp_mesh_start(struct tp_site *site)
{
	if (site->speaker || site->seg->nhosts < 2) return;
	site->speaker = true;
	watch_next_hosts(site);
	site->tick_ms = tp_clock_ms() + TP_LIFE_TICK_MS;
	tp_service_poke(site->tick_ms);
}

static bool has_unread(const struct tp_link *link)
{
	int unread = 0;
	return link->conn && ioctl(link->conn->source.fd, FIONREAD, &unread) == 0 && unread > 0;
}

/* A virtual host (NCCL_HOSTID) of this machine: the kernel knows whether its process lives, however starved it is. */
static bool surely_lives(const struct tp_link *link)
{
	const struct tp_boot_peer *peer = &tp_segment_peers(link->site->seg)[link->rank];
	if (!tp_service_is_this_machine(&peer->service)) return false;
	struct pollfd ended = { .fd = (int)syscall(SYS_pidfd_open, peer->pid, 0), .events = POLLIN };
	if (ended.fd < 0) return false;
	bool lives = poll(&ended, 1, 0) == 0;
	close(ended.fd);
	return lives;
}

/* How long it may be silent. */
static uint64_t patience(const struct tp_link *link)
{
	const struct tp_site *site = link->site;
	uint64_t limit = (uint64_t)tp_param_int(&mesh_params[P_LIFE_TIMEOUT]);
	if (limit == 0) return UINT64_MAX;
	if (!link->heard) limit = TP_MAX(limit, site->settled ? SETTLE_MS : START_MS);
	return limit + (uint64_t)LATE_WEIGHT * TP_MAX(link->late_ms, site->late_ms);
}

static void judge(struct tp_link *link, uint64_t now_ms)
{
	char text[80];
	uint64_t limit = patience(link), silent = now_ms - link->last_ms;
	if (has_unread(link)) return;
	link->missed++;
	if (silent < limit || (uint64_t)link->missed * TP_LIFE_TICK_MS + TP_LIFE_TICK_MS < limit) return;
	if (silent < STARVED_MS && surely_lives(link)) return;
	snprintf(text, sizeof(text), "has been silent for %.1f s: dead, stopped or cut off", (double)silent / 1000);
	host_died(link, text);
}

void tp_mesh_tick(struct tp_site *site, uint64_t now_ms)
{
	uint64_t late = now_ms - site->tick_ms;
	/* A peak is remembered for some seconds. */
	site->late_ms -= (site->late_ms + 7) / 8;
	if (late >= LATE_MS) site->late_ms = (uint32_t)TP_MAX(site->late_ms, TP_MIN(late, STARVED_MS));
	for (struct tp_conn *conn = site->incoming; conn; conn = conn->next_of_owner)
		if (conn->watcher && conn->out_have == 0) send_life(site, conn);
	for (struct tp_link *link = site->links, *next; link; link = next) {
		next = link->next;
		if (link->watched) judge(link, now_ms);
	}
}

void tp_mesh_retry(struct tp_site *site, uint64_t now_ms)
{
	for (struct tp_link *link = site->links; link; link = link->next) {
		if (!link->retry_ms) continue;
		if (link->retry_ms <= now_ms) call_host(link);
		else tp_service_poke(link->retry_ms);
	}
}

bool tp_mesh_is_settled(const struct tp_site *site)
{
	if (!site->speaker) return true;
	for (const struct tp_link *link = site->links; link; link = link->next)
		if (link->watched && !link->heard) return false;
	return true;
}

bool tp_mesh_flushed(const struct tp_site *site)
{
	for (const struct tp_link *link = site->links; link; link = link->next)
		if (has_unsent(link)) return false;
	return true;
}

void tp_mesh_leave(struct tp_site *site, bool in_good_order)
{
	for (struct tp_link *link = site->links; link; link = link->next) link->watched = false;
	for (struct tp_conn *conn = site->incoming; conn && in_good_order; conn = conn->next_of_owner) tp_conn_send(conn, TP_FRAME_LEFT, NULL, 0);
}

void tp_mesh_close(struct tp_site *site)
{
	while (site->incoming) {
		struct tp_conn *conn = site->incoming;
		site->incoming = conn->next_of_owner;
		tp_conn_close_flushed(conn);
	}
	while (site->links) {
		struct tp_link *link = site->links;
		site->links = link->next;
		if (link->conn) tp_conn_close_flushed(link->conn);
		drop_all(link);
		free(link);
	}
}

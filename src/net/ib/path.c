/* Judging, leaving and reviving paths; see ib.h for the idea. Called when something looks wrong and a few times a second while a
 * connection waits, always by the connection's owner. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "net/ib/ib.h"

#define STALL_MS 300                /* without a completion: life signs and a write of no bytes */
#define PROBES_MAX 12               /* of these at a time */
#define PORT_LOOK_MS 200            /* while stalled: the port is asked, for drivers whose events don't come */
#define FAIL_GRACE_MS 300           /* a path that fails because the peer has ended is the peer's end, not the path's */
#define SWITCH_MS 1500              /* without any sign of the peer's host while a path is left */
#define REVIVE_MS 500               /* first look at a dead path; doubled with each failure */
#define REVIVE_MAX_MS 16000
#define ATTEMPT_MS 3000             /* for one attempt to revive */
#define TOLD_MS 1000
#define FORGET_MS 60000             /* a path that has lived so long is as good as one that never failed */
#define WANT_MS 1000                /* between two wishes to take a path back */
#define SLOW_TIMES 4                /* what a write of no bytes took before, times this, is no sign of death */
#define SLOW_MAX_MS 10000
#define SLOWEST_BYTES_PER_MS 8000   /* what a path moves that isn't dead */
#define SETTLED_MS 1000             /* a revived path that comes first is taken back after this */

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
	/* Closed later: the caller may be taking its completions. The active one is when it is left, behind what it still has. */
	comm->to_close = true;
}

static void close_dead(struct tp_ib_comm *comm)
{
	comm->to_close = false;
	for (int p = 0; p < comm->npaths; p++)
		if (p != comm->active && comm->paths[p].state == TP_IB_PATH_DEAD) tp_ib_qps_close(comm, &comm->paths[p]);
}

static bool usable(const struct tp_ib_path *path) { return path->state == TP_IB_PATH_LIVE; }

static int count_usable(const struct tp_ib_comm *comm)
{
	int n = 0;
	for (int p = 0; p < comm->npaths; p++) n += usable(&comm->paths[p]);
	return n;
}

static uint64_t now_or(uint64_t *since)
{
	uint64_t now = tp_clock_ms();
	if (*since == 0) *since = now;
	return now;
}

static void enter(struct tp_ib_path *path, enum tp_ib_path_state state)
{
	path->state = state;
	path->since_ms = tp_clock_ms();
}

/* Both have seen a write through. */
static void lives_again(struct tp_ib_comm *comm, struct tp_ib_path *path)
{
	enter(path, TP_IB_PATH_LIVE);
	path->why[0] = 0;
	TP_INFO(TP_NET, "NET/IB : rank %d %s rank %d : %s lives again", comm->sending ? comm->from : comm->to, comm->sending ? "->" : "<-",
		comm->sending ? comm->to : comm->from, path->port->text);
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

static uint32_t dead_mask(const struct tp_ib_comm *comm, bool without_active)
{
	uint32_t mask = 0;
	for (int p = 0; p < TP_IB_MAX_PATHS; p++)
		if (p >= comm->npaths || (!usable(&comm->paths[p]) && !(without_active && p == comm->active))) mask |= 1u << p;
	return mask;
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

/* Moves to the peer what this side knows, with the old path closed for good. */
static ncclResult_t leave(struct tp_ib_comm *comm, bool willingly)
{
	struct tp_ib_path *path = &comm->paths[comm->active];
	struct tp_ib_record record;

	tp_ib_record_start(&record, TP_IB_SWITCH);
	record.as.change.epoch = comm->epoch + 1;
	/* What the peer is told, however that changes until it answers: both choose from the same two masks. */
	comm->told_dead = record.as.change.dead = dead_mask(comm, willingly);
	snprintf(record.as.change.why, sizeof(record.as.change.why), "%.255s", path->why);
	comm->switching = true;
	comm->willingly = willingly;
	comm->switch_ms = tp_clock_ms();
	comm->silent_ms = 0;
	comm->pongs_at_probe = atomic_load_explicit(&comm->control.pongs, memory_order_relaxed);
	comm->probing = comm->resending = false;
	/* Before it is closed: what is flushed then is no news. */
	path->state = TP_IB_PATH_DEAD;
	path->since_ms = tp_clock_ms();
	tp_ib_qps_close(comm, path);
	if (willingly) path->next_ms = path->since_ms;
	tp_ib_report(comm, &record.as.change);
	int error = tp_ib_control_send(&comm->control, &record);
	if (error && !atomic_load_explicit(&comm->control.closed, memory_order_acquire))
		return tp_ib_fail(comm, ncclRemoteError, "a path has failed (%s), and the peer can't be told over TCP: %s", path->why, strerror(error));
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
	for (uint64_t n = comm->below; n < comm->head; n++) {
		struct tp_ib_message *m = &comm->messages[n % TP_IB_RING];
		if (m->done) continue;
		m->left = comm->split ? (uint32_t)comm->nqps : 1;
		tp_ib_announce(comm, n);
	}
	tp_ib_expect(comm, &comm->paths[comm->active]);
}

/* A warning for the first connection that leaves a port; the others' would say the same. */
static void tell_of_switch(const struct tp_ib_comm *comm, const struct tp_ib_path *old, const char *from)
{
	const char *why = old->why[0] ? old->why : comm->peer_switch.why;
	uint64_t now = tp_clock_ms(), last = atomic_load_explicit(&old->port->told_ms, memory_order_relaxed);
	const char *next = comm->paths[comm->active].port->text;

	if (!why[0]) {
		TP_INFO(TP_NET, "NET/IB : %s is left for %s, which lives again", from, next);
	} else if (last == 0 || now - last > TOLD_MS) {
		atomic_store_explicit(&old->port->told_ms, now, memory_order_relaxed);
		TP_WARN("NET/IB : %s is left (%s); going on over %s, and so do other connections", from, why, next);
	} else {
		TP_INFO(TP_NET, "NET/IB : %s is left (%s); going on over %s", from, why, next);
	}
}

/* A path that was left in good health is set up afresh, as only those are that aren't the active one. */
static void stand_on_another(struct tp_ib_comm *comm)
{
	for (int p = 0; p < comm->npaths; p++)
		if (p != comm->active && comm->paths[p].port) {
			tp_ib_path_failed(comm, &comm->paths[p], "it failed while it was taken back");
			comm->active = p;
			return;
		}
}

/* Both have left: the same next path on both sides, from what both said. */
static ncclResult_t arrive(struct tp_ib_comm *comm)
{
	uint32_t dead = comm->peer_switch.dead | comm->told_dead | 1u << comm->active;
	struct tp_ib_path *old = &comm->paths[comm->active];
	char from[512];
	int next = 0;

	while (next < comm->npaths && (dead >> next & 1)) next++;
	tp_ib_name(comm, old, 0, from, sizeof(from));
	comm->epoch++;
	comm->switching = false;
	comm->moved_ms = 0;
	if (next == comm->npaths) {
		/* Neither has one: no_path decides how long any is waited for. */
		if (!old->why[0]) snprintf(old->why, sizeof(old->why), "%s", comm->peer_switch.why);
		if (comm->willingly) stand_on_another(comm);
		return ncclSuccess;
	}
	comm->switches++;
	comm->active = next;
	comm->failing_ms = 0;
	tell_of_switch(comm, old, from);
	if (comm->sending) return resume_sender(comm);
	resume_receiver(comm);
	return comm->error;
}

static ncclResult_t peer_left(struct tp_ib_comm *comm, struct tp_ib_wire_switch *change)
{
	const char *wrong = tp_ib_wire_check_switch(change);

	if (wrong || change->epoch != comm->epoch + 1)
		return tp_ib_fail(comm, ncclInternalError, "the peer left a path in a way that makes no sense (%s; epoch %u after %u)", wrong ? wrong : "epoch", change->epoch, comm->epoch);
	comm->peer_switch = *change;
	/* Paths that both have tried are there, also where this side hasn't come by since. */
	for (int p = 0; p < comm->npaths; p++)
		if (comm->paths[p].state == TP_IB_PATH_PROVEN && comm->paths[p].peer_proven) lives_again(comm, &comm->paths[p]);
	if (!comm->switching) {
		struct tp_ib_path *path = &comm->paths[comm->active];
		if (path->state == TP_IB_PATH_LIVE && change->why[0]) snprintf(path->why, sizeof(path->why), "%.64s says: %.255s", comm->peer_host, change->why);
		TP_TRY(leave(comm, !(change->dead >> comm->active & 1) || path->state == TP_IB_PATH_LIVE));
	}
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
	if (pongs != comm->pongs_at_probe) comm->silent_ms = 0;
	comm->pongs_at_probe = pongs;
	if (now - comm->ping_ms >= STALL_MS) ping(comm, now);
	else if (comm->silent_ms >= SWITCH_MS && (int32_t)(comm->pings - pongs) >= 3 && tp_ib_control_unacknowledged(&comm->control) > 0)
		return tp_ib_fail(comm, ncclRemoteError, "a path was left (%s), and the peer's host has not answered over TCP for %d ms", comm->paths[comm->active].why, SWITCH_MS);
	return ncclSuccess;
}

/* ---- reviving ---- */

static ncclResult_t tell(struct tp_ib_comm *comm, enum tp_ib_record_type type, const struct tp_ib_path *path)
{
	struct tp_ib_record record;

	tp_ib_record_start(&record, type);
	record.as.revive = (struct tp_ib_wire_revive){ (uint32_t)(path - comm->paths), path->attempt, path->psn };
	tp_ib_control_send(&comm->control, &record);
	return ncclSuccess;
}

static ncclResult_t start_attempt(struct tp_ib_comm *comm, struct tp_ib_path *path, uint32_t attempt)
{
	path->attempt = attempt;
	path->peer_connected = path->peer_proven = false;
	path->probes = 0;
	tp_ib_qps_close(comm, path);
	if (tp_ib_qps_prepare(comm, path, true) != ncclSuccess) {
		path->next_ms = tp_clock_ms() + REVIVE_MAX_MS;
		return ncclSuccess;
	}
	enter(path, TP_IB_PATH_REVIVING);
	return tell(comm, TP_IB_REVIVE, path);
}

static bool post_probe(struct tp_ib_comm *comm, struct tp_ib_path *path, int q)
{
	struct ibv_send_wr wr = { .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED };

	if (path->qps[q].posted - path->qps[q].freed + 1 > comm->sq_depth) return true;
	wr.wr_id = tp_ib_wr_id(TP_IB_PROBE, path, q, 1, 0);
	wr.wr.rdma.remote_addr = comm->remote_block;
	wr.wr.rdma.rkey = path->remote.rkey;
	path->probes++;
	if (tp_ib_post(comm, path, q, &wr, 1)) return true;
	path->probes--;
	return false;
}

static ncclResult_t revive_step(struct tp_ib_comm *comm, struct tp_ib_path *path)
{
	uint64_t now = tp_clock_ms();

	if (path->state != TP_IB_PATH_DEAD && path->state != TP_IB_PATH_LIVE && now - path->since_ms > ATTEMPT_MS) {
		tp_ib_path_failed(comm, path, "it could not be revived");
		return ncclSuccess;
	}
	switch (path->state) {
	case TP_IB_PATH_DEAD:
		if (now < path->next_ms) return ncclSuccess;
		path->next_ms = now + REVIVE_MS;
		if (atomic_load_explicit(&path->port->context->fatal, memory_order_relaxed) || !tp_ib_port_is_active(path->port)) return ncclSuccess;
		return start_attempt(comm, path, TP_MAX(path->attempt, path->peer_attempt) + (path->peer_attempt <= path->attempt));
	case TP_IB_PATH_REVIVING:
		if (path->peer_attempt != path->attempt) return ncclSuccess;
		path->remote.psn = path->peer_psn;
		if (tp_ib_qps_connect(comm, path, true) != ncclSuccess) {
			tp_ib_path_failed(comm, path, "%s", path->why);
			return ncclSuccess;
		}
		enter(path, TP_IB_PATH_CONNECTED);
		TP_TRY(tell(comm, TP_IB_CONNECTED, path));
		/* fall through */
	case TP_IB_PATH_CONNECTED:
		if (!path->peer_connected) return ncclSuccess;
		for (int q = 0; q < comm->nqps; q++)
			if (!post_probe(comm, path, q)) return ncclSuccess;
		enter(path, TP_IB_PATH_PROBING);
		return ncclSuccess;
	case TP_IB_PATH_PROBING:
		tp_ib_poll_path(comm, path);
		if (path->state != TP_IB_PATH_PROBING || path->probes > 0) return ncclSuccess;
		enter(path, TP_IB_PATH_PROVEN);
		TP_TRY(tell(comm, TP_IB_PROVEN, path));
		/* fall through */
	case TP_IB_PATH_PROVEN:
		if (!path->peer_proven) return ncclSuccess;
		lives_again(comm, path);
		return ncclSuccess;
	case TP_IB_PATH_LIVE:
		if (path->failures > 0 && now - path->since_ms > FORGET_MS) path->failures = 0;
		return ncclSuccess;
	case TP_IB_PATH_NONE: return ncclSuccess;
	}
	return ncclSuccess;
}

static ncclResult_t peer_revives(struct tp_ib_comm *comm, int type, const struct tp_ib_wire_revive *revive)
{
	struct tp_ib_path *path = &comm->paths[TP_MIN(revive->path, TP_IB_MAX_PATHS - 1u)];
	const char *wrong = tp_ib_wire_check_revive(revive);

	if (wrong || path->state == TP_IB_PATH_NONE) return tp_ib_fail(comm, ncclInternalError, "the peer revives a path in a way that makes no sense (%s)", wrong ? wrong : "there is none");
	if (type == TP_IB_REVIVE) {
		path->peer_attempt = revive->attempt;
		path->peer_psn = revive->psn;
		/* It has found dead what stands by here, or is ahead of us. */
		if (path != &comm->paths[comm->active] && path->state != TP_IB_PATH_DEAD && path->attempt < revive->attempt) tp_ib_path_failed(comm, path, "the peer sets it up afresh");
		if (path != &comm->paths[comm->active] && path->state == TP_IB_PATH_DEAD) path->next_ms = 0;
	} else if (revive->attempt == path->attempt) {
		if (type == TP_IB_CONNECTED) path->peer_connected = true;
		else path->peer_proven = true;
	}
	return ncclSuccess;
}

/* The sender wants an earlier path back: it is left for that one only if it lives here too. */
static ncclResult_t peer_wants(struct tp_ib_comm *comm, const struct tp_ib_wire_revive *revive)
{
	struct tp_ib_path *path = &comm->paths[TP_MIN(revive->path, TP_IB_MAX_PATHS - 1u)], *active = &comm->paths[comm->active];
	const char *wrong = tp_ib_wire_check_revive(revive);

	if (wrong || path->state == TP_IB_PATH_NONE || comm->sending)
		return tp_ib_fail(comm, ncclInternalError, "the peer wants a path in a way that makes no sense (%s)", wrong ? wrong : "there is none");
	if (path->state == TP_IB_PATH_PROVEN && path->peer_proven) lives_again(comm, path);
	if (comm->switching || path == active || !usable(path) || !usable(active) || path->attempt != revive->attempt || !tp_ib_port_is_active(path->port)) return ncclSuccess;
	active->why[0] = 0;
	return leave(comm, true);
}

/* ---- judging ---- */

static ncclResult_t take_records(struct tp_ib_comm *comm)
{
	struct tp_ib_record record;

	while (comm->error == ncclSuccess && tp_ib_control_take(&comm->control, &record)) {
		switch (record.head.type) {
		case TP_IB_SWITCH:
			TP_TRY(peer_left(comm, &record.as.change));
			break;
		case TP_IB_REVIVE: case TP_IB_CONNECTED: case TP_IB_PROVEN:
			TP_TRY(peer_revives(comm, record.head.type, &record.as.revive));
			break;
		case TP_IB_WANT:
			TP_TRY(peer_wants(comm, &record.as.revive));
			break;
		case TP_IB_LEAVING:
			for (uint64_t n = comm->below, head = comm->head; n < head && comm->sending; n++)
				if (!comm->messages[n % TP_IB_RING].done && peer_has(&record.as.change, n)) tp_ib_message_done(comm, n);
			break;
		case TP_IB_GOODBYE:
			record.as.text.text[sizeof(record.as.text.text) - 1] = 0;
			return tp_ib_fail(comm, ncclRemoteError, "%s says: %s", comm->peer_host, record.as.text.text);
		default:
			return tp_ib_fail(comm, ncclInternalError, "the peer sent record %u, which doesn't belong here", record.head.type);
		}
	}
	return comm->error;
}

/* A message that is under way may take its time: until it is through nothing else completes. */
static uint64_t patience_ms(const struct tp_ib_comm *comm)
{
	const struct tp_ib_message *m = &comm->messages[comm->below % TP_IB_RING];
	size_t bytes = 0;

	for (int r = 0; r < m->n; r++) bytes += comm->sending ? (m->requests[r] ? m->requests[r]->bytes : 0) : m->capacity[r];
	return (uint64_t)comm->params.path_timeout_ms + bytes / SLOWEST_BYTES_PER_MS + TP_MIN(SLOW_TIMES * comm->slowest_ms, (uint64_t)SLOW_MAX_MS);
}

/* It got through. How long that took is what this path may take again: on a machine with far more threads than processors a card
 * made of threads is slow, and not dead. */
static void end_probing(struct tp_ib_comm *comm, uint64_t now)
{
	if (comm->probing) comm->slowest_ms = TP_MAX(now - comm->probed_ms, comm->slowest_ms / 2);
	comm->probing = false;
}

/* A life sign, and the write of no bytes that tells a path that is dead from a peer that is slow. More of these, because what gets
 * lost is found missing when the next one comes; the queue pair's own timer may take seconds. */
static void probe(struct tp_ib_comm *comm, struct tp_ib_path *path, uint64_t now)
{
	ping(comm, now);
	for (int q = 0; q < comm->nqps && path->probes < PROBES_MAX * comm->nqps; q++)
		if (!post_probe(comm, path, q)) return;
}

static void judge_stall(struct tp_ib_comm *comm, struct tp_ib_path *path)
{
	uint64_t now = now_or(&comm->moved_ms), timeout = patience_ms(comm);
	uint64_t every = TP_MIN(TP_MAX((uint64_t)comm->params.path_timeout_ms / 8, 20u), STALL_MS);
	uint32_t sent, answered;

	if (comm->below == comm->head || now - comm->moved_ms < STALL_MS) {
		end_probing(comm, now);
		return;
	}
	if (!comm->probing) {
		comm->probing = true;
		comm->probe_ms = comm->probed_ms = now;
		comm->watched_ms = 0;
		comm->pings_at_probe = comm->pings;
		probe(comm, path, now);
		return;
	}
	/* How often this side looks must not matter, but time in which it didn't look at all says nothing of the path. */
	comm->watched_ms += TP_MIN(now - comm->probe_ms, 2 * every);
	comm->probe_ms = now;
	if (now - comm->ping_ms >= every) probe(comm, path, now);
	if (path->probes == 0) {
		/* The peer takes its time. */
		end_probing(comm, now);
		comm->moved_ms = now;
		return;
	}
	if (comm->watched_ms < timeout) return;
	/* Not on what was so before this thread lost its processor. */
	if (tp_ib_poll_path(comm, path) > 0) {
		comm->moved_ms = 0;
		return;
	}
	/* Where even life signs are late it is the machines that are busy. */
	sent = comm->pings - comm->pings_at_probe;
	answered = answered_since(comm, comm->pings_at_probe);
	if (sent >= 3 && 4 * answered >= 3 * sent)
		tp_ib_path_failed(comm, path, "nothing got through for %llu ms, not even a write of no bytes, although the peer answers over TCP: is a cable or port down, do packets get lost, "
			"can the two addresses reach each other (NCCL_IB_GID_INDEX), is the MTU right along the way?", (unsigned long long)(now - comm->moved_ms));
	else if (comm->watched_ms >= timeout + timeout / 2 && answered == 0 && tp_ib_control_unacknowledged(&comm->control) > 0)
		tp_ib_path_failed(comm, path, "nothing got through for %llu ms, and the peer's host doesn't answer over TCP either: it is down, or its network is",
			(unsigned long long)(now - comm->moved_ms));
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
	if (!comm->params.failover || !comm->params.recovery || now - comm->failing_ms >= (uint64_t)comm->params.path_timeout_ms) return ncclSuccess;
	for (int p = 0; p < comm->npaths; p++) {
		if (p == comm->active || comm->paths[p].state == TP_IB_PATH_NONE) continue;
		TP_TRY(revive_step(comm, &comm->paths[p]));
		*waits |= may_live(&comm->paths[p]);
	}
	return ncclSuccess;
}

static void start_failing(struct tp_ib_comm *comm, uint64_t now)
{
	comm->failing_ms = now;
	comm->failing_pings = comm->pings;
	ping(comm, now);
	for (int p = 0; p < comm->npaths; p++) comm->paths[p].next_ms = 0;
}

/* Nowhere to go, unless another path comes to life. A peer that ended takes its paths with it: then that is the news, which its
 * closed connection brings any moment; one that answers a life sign sent since hasn't ended. */
static ncclResult_t no_path(struct tp_ib_comm *comm)
{
	struct tp_ib_path *path = &comm->paths[comm->active];
	char text[512];
	uint64_t now = tp_clock_ms();
	bool waits;

	if (comm->failing_ms == 0) start_failing(comm, now);
	if (atomic_load_explicit(&comm->control.closed, memory_order_acquire)) return ncclSuccess;
	TP_TRY(seek_path(comm, now, &waits));
	if (comm->params.failover && count_usable(comm) > 0) return leave(comm, false);
	if (waits) return ncclSuccess;
	if (answered_since(comm, comm->failing_pings) == 0 && now - comm->failing_ms < FAIL_GRACE_MS) return ncclSuccess;
	/* The cause first: texts are cut on their way to other ranks. */
	return tp_ib_fail(comm, ncclRemoteError, "%s %s %.31s:%u has failed%s: %s. It is %s", path->port->text, comm->sending ? "->" : "<-", path->remote.device, path->remote.port,
		comm->npaths > 1 && !comm->params.failover ? " (and NCCL_IB_RESILIENCY_PORT_FAILOVER=0)" : ", and there is no other path", path->why,
		tp_ib_path_text(comm, path, 0, text, sizeof(text)));
}

static ncclResult_t take_back(struct tp_ib_comm *comm)
{
	uint64_t now = tp_clock_ms();

	/* One side asks, and the other leaves where it has that path too: a path in good health is not closed for one that isn't. */
	for (int p = 0; p < comm->active && comm->sending; p++) {
		struct tp_ib_path *path = &comm->paths[p];
		if (!usable(path) || now - path->since_ms < (uint64_t)SETTLED_MS << TP_MIN(path->failures, 5u)) continue;
		if (now - comm->want_ms < WANT_MS) break;
		comm->want_ms = now;
		return tell(comm, TP_IB_WANT, path);
	}
	return ncclSuccess;
}

ncclResult_t tp_ib_care(struct tp_ib_comm *comm)
{
	uint64_t now = tp_clock_ms();
	struct tp_ib_path *path;

	TP_TRY(comm->error);
	if (atomic_load_explicit(&comm->control.waiting, memory_order_acquire)) TP_TRY(take_records(comm));
	if (comm->to_close) close_dead(comm);
	if (comm->switching) return wait_for_peer(comm);
	path = &comm->paths[comm->active];
	if (path->state == TP_IB_PATH_LIVE) judge_ports(comm);
	if (path->state == TP_IB_PATH_LIVE) judge_stall(comm, path);
	if (path->state == TP_IB_PATH_DEAD) {
		if (count_usable(comm) == 0 || !comm->params.failover) return no_path(comm);
		return leave(comm, false);
	}
	if (now - comm->care_ms < PORT_LOOK_MS) return ncclSuccess;
	comm->care_ms = now;
	if (comm->probing) tp_ib_port_is_active(path->port);
	for (int p = 0; p < comm->npaths && comm->params.recovery; p++)
		if (p != comm->active && comm->paths[p].port) TP_TRY(revive_step(comm, &comm->paths[p]));
	return comm->params.recovery ? take_back(comm) : ncclSuccess;
}

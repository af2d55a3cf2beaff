/* Taking paths back: one that isn't in use and is dead is set up afresh by both ends, tried, and stands by; a way that is better
 * than the one in use by then is taken. See ib.h for the idea. Called by the connection's owner. */
#include <errno.h>
#include <string.h>
#include "net/ib/ib.h"

#define REVIVE_MS 500               /* between two looks at a dead path's port */
#define REVIVE_MAX_MS 16000
#define ATTEMPT_MS 3000             /* for one attempt to revive */
#define FORGET_MS 60000             /* a path that has lived so long is as good as one that never failed */
#define WANT_MS 1000                /* between two wishes to take a way */
#define SETTLED_MS 1000             /* a revived path counts for one after this */

static void enter(struct tp_ib_path *path, enum tp_ib_path_state state)
{
	path->state = state;
	path->since_ms = tp_clock_ms();
}

void tp_ib_lives_again(struct tp_ib_comm *comm, struct tp_ib_path *path)
{
	enter(path, TP_IB_PATH_LIVE);
	path->why[0] = 0;
	TP_INFO(TP_NET, "NET/IB : rank %d %s rank %d : %s lives again", comm->sending ? comm->from : comm->to, comm->sending ? "->" : "<-",
		comm->sending ? comm->to : comm->from, path->port->text);
}

static ncclResult_t tell(struct tp_ib_comm *comm, enum tp_ib_record_type type, uint32_t which, uint32_t attempt, uint32_t psn)
{
	struct tp_ib_record record;

	tp_ib_record_start(&record, type);
	record.as.revive = (struct tp_ib_wire_revive){ which, attempt, psn };
	tp_ib_control_send(&comm->control, &record);
	return ncclSuccess;
}

static ncclResult_t tell_of(struct tp_ib_comm *comm, enum tp_ib_record_type type, const struct tp_ib_path *path)
{
	return tell(comm, type, (uint32_t)(path - comm->paths), path->attempt, path->psn);
}

static ncclResult_t start_attempt(struct tp_ib_comm *comm, struct tp_ib_path *path, uint32_t attempt)
{
	path->attempt = attempt;
	path->peer_connected = path->peer_proven = false;
	tp_ib_qps_close(comm, path);
	path->probes = 0;
	if (tp_ib_qps_prepare(comm, path, true) != ncclSuccess) {
		path->next_ms = tp_clock_ms() + REVIVE_MAX_MS;
		return ncclSuccess;
	}
	enter(path, TP_IB_PATH_REVIVING);
	/* By rdma_cm the acceptor is asked as soon as the connector hears of it. */
	if (comm->cm && !comm->sending) tp_ib_cm_begin(comm, path);
	return tell_of(comm, TP_IB_REVIVE, path);
}

bool tp_ib_post_probe(struct tp_ib_comm *comm, struct tp_ib_path *path, int q)
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

ncclResult_t tp_ib_revive_step(struct tp_ib_comm *comm, struct tp_ib_path *path)
{
	uint64_t now = tp_clock_ms();
	char text[704];

	if (path->state != TP_IB_PATH_DEAD && path->state != TP_IB_PATH_LIVE && now - path->since_ms > ATTEMPT_MS) {
		bool waits = comm->cm && path->state == TP_IB_PATH_REVIVING && tp_ib_cm_has_begun(comm, path);
		tp_ib_path_failed(comm, path, "it could not be revived%s%s", waits ? ": " : "", waits ? tp_ib_cm_waits_for(comm, path, text, sizeof(text)) : "");
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
		if (comm->cm) {
			if (!tp_ib_cm_has_begun(comm, path)) tp_ib_cm_begin(comm, path);
			if (path->state != TP_IB_PATH_REVIVING || !tp_ib_cm_is_up(comm, path)) return ncclSuccess;
		} else if (tp_ib_qps_connect(comm, path, true) != ncclSuccess) {
			tp_ib_path_failed(comm, path, "%s", path->why);
			return ncclSuccess;
		}
		enter(path, TP_IB_PATH_CONNECTED);
		TP_TRY(tell_of(comm, TP_IB_CONNECTED, path));
		/* fall through */
	case TP_IB_PATH_CONNECTED:
		if (!path->peer_connected) return ncclSuccess;
		for (int q = 0; q < comm->nqps; q++)
			if (!tp_ib_post_probe(comm, path, q)) return ncclSuccess;
		enter(path, TP_IB_PATH_PROBING);
		return ncclSuccess;
	case TP_IB_PATH_PROBING:
		tp_ib_poll_path(comm, path);
		if (path->state != TP_IB_PATH_PROBING || path->probes > 0) return ncclSuccess;
		enter(path, TP_IB_PATH_PROVEN);
		TP_TRY(tell_of(comm, TP_IB_PROVEN, path));
		/* fall through */
	case TP_IB_PATH_PROVEN:
		if (!path->peer_proven) return ncclSuccess;
		tp_ib_lives_again(comm, path);
		return ncclSuccess;
	case TP_IB_PATH_LIVE:
		if (path->failures > 0 && now - path->since_ms > FORGET_MS) path->failures = 0;
		return ncclSuccess;
	case TP_IB_PATH_NONE: return ncclSuccess;
	}
	return ncclSuccess;
}

ncclResult_t tp_ib_peer_revives(struct tp_ib_comm *comm, int type, const struct tp_ib_wire_revive *revive)
{
	struct tp_ib_path *path = &comm->paths[TP_MIN(revive->path, TP_IB_MAX_PATHS - 1u)];
	const char *wrong = tp_ib_wire_check_revive(revive);

	if (wrong || path->state == TP_IB_PATH_NONE) return tp_ib_fail(comm, ncclInternalError, "the peer revives a path in a way that makes no sense (%s)", wrong ? wrong : "there is none");
	if (type == TP_IB_REVIVE) {
		path->peer_attempt = revive->attempt;
		path->peer_psn = revive->psn;
		/* It has found dead what stands by here, or is ahead of us. */
		if (path->at < 0 && path->state != TP_IB_PATH_DEAD && path->attempt < revive->attempt) tp_ib_path_failed(comm, path, "the peer sets it up afresh");
		if (path->at < 0 && path->state == TP_IB_PATH_DEAD) path->next_ms = 0;
	} else if (revive->attempt == path->attempt) {
		if (type == TP_IB_CONNECTED) path->peer_connected = true;
		else path->peer_proven = true;
	}
	return ncclSuccess;
}

/* ---- a better way ---- */

static uint32_t used_mask(const struct tp_ib_comm *comm)
{
	uint32_t mask = 0;

	for (int i = 0; i < comm->nused; i++) mask |= 1u << (comm->used[i] - comm->paths);
	return mask;
}

/* Is there one among the paths of this mask, of which none is in use? */
static bool is_better(const struct tp_ib_comm *comm, uint32_t mask, int *way)
{
	int worth, current;

	*way = tp_ib_best_way(comm, mask, &worth);
	tp_ib_best_way(comm, used_mask(comm), &current);
	return worth > current;
}

ncclResult_t tp_ib_take_back(struct tp_ib_comm *comm)
{
	uint64_t now = tp_clock_ms();
	uint32_t mask = 0;
	int way;

	/* One side asks, and the other leaves where it has those paths too: a path in good health is not closed for one that isn't. */
	if (!comm->sending || now - comm->want_ms < WANT_MS) return ncclSuccess;
	for (int p = 0; p < comm->npaths; p++) {
		const struct tp_ib_path *path = &comm->paths[p];
		if (path->at >= 0 || path->state != TP_IB_PATH_LIVE || now - path->since_ms < (uint64_t)SETTLED_MS << TP_MIN(path->failures, 5u)) continue;
		mask |= 1u << p;
	}
	if (!is_better(comm, mask, &way)) return ncclSuccess;
	comm->want_ms = now;
	return tell(comm, TP_IB_WANT, (uint32_t)way, mask, 0);
}

ncclResult_t tp_ib_peer_wants(struct tp_ib_comm *comm, const struct tp_ib_wire_revive *revive)
{
	const char *wrong = tp_ib_wire_check_revive(revive);
	uint32_t mask = 0;
	int way;

	if (wrong || comm->sending) return tp_ib_fail(comm, ncclInternalError, "the peer wants a path in a way that makes no sense (%s)", wrong ? wrong : "it receives");
	if (comm->switching || tp_ib_culprit(comm)) return ncclSuccess;
	for (int p = 0; p < comm->npaths; p++) {
		struct tp_ib_path *path = &comm->paths[p];
		if (path->at >= 0 || !(revive->attempt >> p & 1)) continue;
		if (path->state == TP_IB_PATH_PROVEN && path->peer_proven) tp_ib_lives_again(comm, path);
		if (path->state == TP_IB_PATH_LIVE && tp_ib_port_is_active(path->port)) mask |= 1u << p;
	}
	return is_better(comm, mask, &way) ? tp_ib_leave(comm, true) : ncclSuccess;
}

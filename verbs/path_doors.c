/* Doors: what a QP shows to its peer, and how each keeps out of the other's memory.
 *
 * Who enters another process's memory writes down where (the keys in its own door, or `serving`), then looks whether it may;
 * who forbids it clears what allows it (the door, an epoch, a key), then looks whether anybody is inside, and waits. All four are
 * sequentially consistent, so one of the two sees the other. Nobody writes into another's record, so a dead peer's
 * record means nothing. */
#include <sched.h>
#include <string.h>
#include "verbs/internal.h"
#include "verbs/path.h"

#define STOPPED_NS 1000000000u

static _Atomic uint32_t epochs;

static uint32_t next_epoch(void)
{
	uint32_t epoch;
	while (!(epoch = atomic_fetch_add_explicit(&epochs, 1, memory_order_relaxed)))
		;
	return epoch;
}

uint64_t tp_path_ends(const union ibv_gid *own, const union ibv_gid *peer, int type)
{
	uint8_t all[2 * sizeof(*own)];
	bool swap = memcmp(own, peer, sizeof(*own)) > 0;
	memcpy(all, swap ? peer : own, sizeof(*own));
	memcpy(all + sizeof(*own), swap ? own : peer, sizeof(*peer));
	return tp_hash64(all, sizeof(all), (uint64_t)type);
}

#define SHOW(field, value) atomic_store_explicit(&door->field, (value), memory_order_relaxed)

void tp_path_named(struct tp_qp *qp)
{
	tp_path_start((int)tp_qpn_slot(qp->ibv.qp_num));
	if (!tp_path_own_yard)
		return;
	struct tp_path_door *door = &tp_path_own_yard->doors[TP_PATH_PLACE(qp->ibv.qp_num)];
	/* Release: pairs with the acquire of who looks for this QP (tp_path_reach). */
	atomic_store_explicit(&door->qpn, qp->ibv.qp_num, memory_order_release);
}

void tp_path_unnamed(struct tp_qp *qp)
{
	if (tp_path_own_yard)
		atomic_store_explicit(&tp_path_own_yard->doors[TP_PATH_PLACE(qp->ibv.qp_num)].qpn, 0, memory_order_release);
}

void tp_path_show_door(struct tp_path *path)
{
	struct tp_path_door *door = path->own;
	const struct tp_qp *qp = path->qp;
	bool plain = qp->ibv.qp_type == IBV_QPT_RC || qp->ibv.qp_type == IBV_QPT_UC;
	SHOW(access, qp->attr.qp_access_flags);
	SHOW(rd_atomic, qp->attr.max_dest_rd_atomic);
	SHOW(direct, plain && qp->established && tp_target_receives(qp));
}

void tp_path_open_door(struct tp_path *path)
{
	struct tp_path_door *door = path->own;
	struct tp_qp *qp = path->qp;
	SHOW(peer_qpn, qp->attr.dest_qp_num);
	SHOW(pd, qp->pd ? qp->pd->id : 0);
	SHOW(type, (uint8_t)qp->ibv.qp_type);
	SHOW(mtu, (uint8_t)qp->attr.path_mtu);
	SHOW(device, (uint8_t)qp->port->device->index);
	SHOW(port, qp->port->number);
	SHOW(ends, path->ends);
	SHOW(recv_psn, qp->recv_psn);
	tp_path_show_door(path);
	path->epoch = next_epoch();
	atomic_store_explicit(&door->open, path->epoch, memory_order_seq_cst);
}

/* Does the peer's door belong to our connection? Else what it says of where it is doesn't concern us. */
static bool is_ours(const struct tp_path *path)
{
	return atomic_load_explicit(&path->peer->peer_qpn, memory_order_relaxed) == path->qpn &&
		atomic_load_explicit(&path->peer->qpn, memory_order_relaxed) == path->qp->attr.dest_qp_num;
}

static bool is_inside(const struct tp_path *path, uint32_t epoch, bool any)
{
	if (atomic_load_explicit(&path->peer->serving, memory_order_seq_cst) == epoch)
		return true;
	for (int i = 0; any && i < TP_PATH_KEYS; i++)
		if (atomic_load_explicit(&path->peer->keys[i], memory_order_seq_cst))
			return true;
	return false;
}

struct patience { uint64_t began_ns; uint32_t turns; bool said; };

/* One turn of waiting for a peer; says who it is when that takes long. */
static void wait_a_turn(struct patience *patience, pid_t pid, const char *what)
{
	if (patience->turns++ < 100) {
		tp_clock_relax();
		return;
	}
	sched_yield();
	uint64_t now = tp_clock_ns();
	if (!patience->began_ns)
		patience->began_ns = now;
	if (!patience->said && now - patience->began_ns > STOPPED_NS) {
		patience->said = true;
		TP_WARN("%s waits for process %d, which is still copying there: has it been stopped? It goes on when that process does, or ends", what,
			(int)pid);
	}
}

/* Whoever waits here may be the one who would be told of it. */
static bool has_died(struct tp_path_link *link, uint32_t turns)
{
	return atomic_load_explicit(&link->dead, memory_order_relaxed) || (turns > 100 && tp_path_is_over(link));
}

void tp_path_new_epoch(struct tp_path *path, bool shut)
{
	uint32_t old = path->epoch;
	struct patience patience = { 0 };
	path->epoch = next_epoch();
	atomic_store_explicit(&path->own->open, shut ? 0 : path->epoch, memory_order_seq_cst);
	while (!has_died(path->link, patience.turns) && is_ours(path) && is_inside(path, old, shut))
		wait_a_turn(&patience, path->link->pid, "a queue pair that ends");
}

void tp_path_keep_out(uint32_t place)
{
	struct patience patience = { 0 };
	for (pid_t pid; (pid = tp_path_find_inside(place)) != 0;)
		wait_a_turn(&patience, pid, "a memory region that is deregistered");
}

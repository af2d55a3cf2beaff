/* Groups of warps that move what a feed gives them.
 *
 * A block's warps are divided into groups. A group's first warp controls: it looks for work whose links are ready, makes
 * addresses of it (struct tp_work), and publishes what was moved. In a large group it does nothing else: it finds the next work
 * while the others still move this one, and its fence waits for their stores while they already go on. In a small group it
 * moves too. Works are moved in the order in which they were taken, and a group waits for nothing else, so whatever is ready goes on.
 *
 * A feed F is a struct of static functions, called by a controlling warp as a whole:
 *   F::shared                          the block's shared memory, with struct tp_groups as `all`
 *   F::begin(sh, group, &control)      control.left: lanes that this group has
 *   F::look(sh, group, &control, w)    takes the next work of control.lane into work[w], where it is ready (true), and turns to another
 *                                      lane; counts control.left down as lanes end; sets all.stopped after a fault
 *   F::publish(sh, group, w)           work[w] was moved
 * A mover M has M::move (move.h). */
#ifndef TP_EXEC_CUDA_GROUPS_H
#define TP_EXEC_CUDA_GROUPS_H

#include "exec/cuda/block.h"
#include "exec/cuda/move.h"

enum { TP_GROUP_CONTROLLED = 4 };       /* a group of so many warps has one that only controls */

struct tp_group_shared { tp_work work[2]; uint32_t moved, pad; };
struct tp_groups {
	uint64_t at[2 * TP_DEV_ROOM];               /* addresses: [group][which work][operand] */
	tp_group_shared groups[TP_DEV_GROUPS];
	tp_dev_comm *comm;
	uint32_t ngroups, room;                     /* room: operands of a group, for one work */
	uint32_t stopped, gives_way;
};
/* The group that a thread is in. */
struct tp_group { int number, warps, thread; bool apart; };     /* thread: in the group; apart: its first warp only controls */
struct tp_control { uint32_t left, lane; unsigned turn; };

/* Chunk number n of a link: where its header and data are, and its flag, {n + 1, bytes}. */
TP_DEVICE uint64_t tp_link_slot(const tp_dev_link &l, uint32_t n) { return l.slots + (uint64_t)(n & l.mask) * l.stride; }
TP_DEVICE uint32_t *tp_link_flag(const tp_dev_link &l, uint32_t n) { return (uint32_t *)(l.flags + (uint64_t)(n & l.mask) * l.flag_stride); }

TP_DEVICE int tp_warp_thread() { return tp_thread() % TP_WARP; }
TP_DEVICE uint32_t tp_group_base(const tp_groups &all, int group, int which) { return (2u * (uint32_t)group + (uint32_t)which) * all.room; }
TP_DEVICE void tp_group_meet(const tp_group &g)
{
	tp_warp_sync();             /* a barrier takes warps as a whole */
	if (g.warps > 1) tp_group_sync(1 + g.number, g.warps * TP_WARP);
}

TP_DEVICE void tp_group_end(tp_groups &all, const tp_group &g, int which)
{
	if (tp_warp_thread() == 0) all.groups[g.number].work[which].flags = TP_WORK_END;
	tp_warp_sync();
}
TP_DEVICE bool tp_group_stopped(tp_groups &all, unsigned turn)
{
	if (!tp_warp_any(tp_block_load(&all.stopped) || tp_block_stopped(all.comm, turn))) return false;
	tp_block_set(&all.stopped, 1);
	return true;
}

/* Waits for work, where the warp that waits also moves. */
template <class F> TP_FAR void tp_group_wait(typename F::shared &sh, const tp_group &g, tp_control *c)
{
	for (c->turn = 0; c->left; c->turn++) {
		if (F::look(sh, g, c, 0)) return;
		if (tp_group_stopped(sh.all, c->turn)) break;
		tp_nap(c->turn / (c->left + 1), sh.all.gives_way);
	}
	tp_group_end(sh.all, g, 0);
}

/* A control warp's whole life: one work is moved by the others while the next one is looked for. */
template <class F> TP_FAR void tp_group_control(typename F::shared &sh, const tp_group &g, tp_control *c)
{
	const uint32_t *const count = &sh.all.groups[g.number].moved;
	uint32_t moved = tp_block_load(count);
	int next = 0;                       /* the work to be taken, or taken; the other one is being moved */
	bool have = false, busy = false;
	for (c->turn = 0;; c->turn++) {
		if (!have && c->left) have = F::look(sh, g, c, next);
		if (busy && tp_warp_all(tp_block_load(count) == moved)) {
			F::publish(sh, g, next ^ 1);
			busy = false;
			c->turn = 0;
		}
		if (!busy && have) {
			tp_group_meet(g);
			next ^= 1;
			moved += (uint32_t)g.warps - 1;
			busy = true;
			have = false;
			continue;
		}
		if (!busy && !c->left) break;
		if (tp_group_stopped(sh.all, c->turn)) {
			/* What was moved is still published: it may be what shows the peer that its call differs. */
			while (busy && !tp_warp_all(tp_block_load(count) == moved)) tp_nap(0, false);
			if (busy) F::publish(sh, g, next ^ 1);
			break;
		}
		tp_nap(c->turn / (c->left + 1), sh.all.gives_way);
	}
	tp_group_end(sh.all, g, next);
	tp_group_meet(g);
}

template <class F, class M> TP_DEVICE void tp_group_run(typename F::shared &sh, const tp_group &g, const tp_dev_reduce *reduce)
{
	const bool controls = g.thread < TP_WARP;
	tp_control control;
	if (controls) F::begin(sh, g, &control);
	if (controls && g.apart) {
		tp_group_control<F>(sh, g, &control);
		return;
	}
	const int skipped = g.apart ? TP_WARP : 0;
	for (int which = 0;; which ^= g.apart) {
		if (controls) tp_group_wait<F>(sh, g, &control);
		tp_group_meet(g);
		tp_group_shared &mine = sh.all.groups[g.number];
		if (mine.work[which].flags & TP_WORK_END) return;
		M::move(mine.work[which], sh.all.at + tp_group_base(sh.all, g.number, which), g.thread - skipped, g.warps * TP_WARP - skipped, reduce);
		if (g.apart) {
			tp_warp_sync();
			if (tp_warp_thread() == 0) tp_block_add(&mine.moved, 1);
		} else {
			tp_group_meet(g);
			if (controls) F::publish(sh, g, which);
		}
	}
}

/* Once a kernel; a barrier of the block comes after it. */
TP_DEVICE void tp_groups_begin(tp_groups &all, tp_dev_comm *comm)
{
	for (int i = tp_thread(); i < TP_DEV_GROUPS; i += tp_threads()) all.groups[i].moved = 0;
	if (tp_thread()) return;
	all.comm = comm;
	all.stopped = tp_load_relaxed(&comm->stop);
	all.gives_way = comm->shared_gpu;
}
/* All threads; all.ngroups and all.room are set. Barriers of the block come before and after it. */
template <class F, class M> TP_DEVICE void tp_groups_run(typename F::shared &sh, const tp_dev_reduce *reduce)
{
	const int warps = tp_threads() / TP_WARP, ngroups = (int)sh.all.ngroups;
	tp_group g;
	g.warps = warps / ngroups;
	g.number = tp_thread() / TP_WARP / g.warps;
	g.thread = tp_thread() - g.number * g.warps * TP_WARP;
	g.apart = g.warps >= TP_GROUP_CONTROLLED;
	if (g.number < ngroups) tp_group_run<F, M>(sh, g, reduce);
}

#endif

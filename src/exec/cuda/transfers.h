/* Groups of sends and receives. A block moves what its channel has of every transfer; a lane for each (peer, direction), so that
 * whatever the order of the peers' calls, nothing waits for anything but its own peer. Transfers of one lane follow each
 * other. A chunk's tag is the size of the whole transfer (its low 32 bits), so unequal sizes are seen. */
#ifndef TP_EXEC_CUDA_TRANSFERS_H
#define TP_EXEC_CUDA_TRANSFERS_H

#include "exec/cuda/lend.h"
#include "plan/geometry.h"

enum { TP_TRANSFER_LINE = 128, TP_TRANSFER_NONE = 0xffff };

struct tp_transfer_lane {
	tp_dev_link link;                           /* this channel's end, while the kernel runs */
	uint64_t home;                              /* and where it lies otherwise; 0: a copy */
	uint64_t at, end;                           /* of the transfer at hand: the rest of this channel's part */
	uint32_t transfer;                          /* or TP_TRANSFER_NONE: the lane is over */
	uint16_t lends, lent;                       /* the transfer at hand is lent, in large chunks; something was */
};
struct alignas(16) tp_transfers_shared {
	tp_groups all;
	tp_transfer_lane lanes[TP_DEV_TRANSFER_LANES];
	uint32_t nlanes, nchannels;
	const tp_dev_transfer *transfers;
};

/* This channel's part of a transfer; false: it has none. */
TP_DEVICE bool tp_transfer_part(const tp_dev_transfer &t, uint32_t nchannels, uint64_t *begin, uint64_t *end)
{
	const uint32_t channel = (uint32_t)tp_block(), place = channel >= t.base ? channel - t.base : channel + nchannels - t.base;
	if (place >= t.nparts) return false;
	tp_geometry_split split;
	const uint64_t lines = (t.bytes + TP_TRANSFER_LINE - 1) / TP_TRANSFER_LINE;
	if (lines >> 32) {
		split = { lines / t.nparts, lines % t.nparts };
	} else {
		split = { (uint32_t)lines / t.nparts, (uint32_t)lines % t.nparts };
	}
	uint64_t bytes;
	tp_geometry_part(split, t.bytes, TP_TRANSFER_LINE, place, begin, &bytes);
	*end = *begin + bytes;
	return true;
}
/* From transfer number + 1 on, along the links: the next that has a part here. */
TP_FAR void tp_transfer_find(const tp_dev_comm *comm, const tp_dev_transfer *transfers, uint32_t next, uint32_t nchannels, tp_transfer_lane *lane)
{
	lane->transfer = TP_TRANSFER_NONE;
	for (; next; next = transfers[next - 1].next) {
		const tp_dev_transfer &t = transfers[next - 1];
		if (!tp_transfer_part(t, nchannels, &lane->at, &lane->end)) continue;
		lane->transfer = next - 1;
		lane->lends = t.lend && tp_lend_stands(comm, t.lend, t.buf, t.bytes);
		return;
	}
}

struct tp_transfers_feed {
	typedef tp_transfers_shared shared;

	TP_METHOD void begin(const shared &sh, const tp_group &g, tp_control *c)
	{
		c->lane = (uint32_t)g.number;
		c->left = sh.nlanes > c->lane ? (sh.nlanes - c->lane + sh.all.ngroups - 1) / sh.all.ngroups : 0;
	}

	/* One thread. */
	TP_METHOD bool ready(const tp_transfer_lane &lane, const tp_dev_transfer &t)
	{
		const tp_dev_link &l = lane.link;
		if (lane.transfer == TP_TRANSFER_NONE) return false;
		if (!lane.home) return true;
		if (t.is_send) return l.next - l.head_seen <= l.mask || l.next - tp_load_relaxed((const uint32_t *)l.head) <= l.mask;
		return tp_load_relaxed(tp_link_flag(l, l.next)) == l.next + 1;
	}

	/* One thread: the next chunk as work. False: what came isn't what this rank receives. */
	TP_METHOD bool take(shared &sh, tp_transfer_lane &lane, const tp_dev_transfer &t, tp_work &work, uint64_t *at)
	{
		const uint64_t left = lane.end - lane.at;
		const uint32_t bytes = left < t.chunk_bytes ? (uint32_t)left : t.chunk_bytes;
		tp_dev_link &l = lane.link;
		const uint64_t slot = tp_link_slot(l, l.next);
		at[0] = lane.home ? t.is_send ? t.buf + lane.at : slot + 16 : t.from + lane.at;
		at[1] = lane.home && t.is_send ? slot + 16 : t.buf + lane.at;
		if (lane.home && t.is_send) {
			if (l.next - l.head_seen > l.mask) l.head_seen = tp_load_acquire((const uint32_t *)l.head);  /* pairs with publish */
		} else if (lane.home) {
			const uint32_t *flag = tp_link_flag(l, l.next);
			tp_load_acquire(flag);                  /* pairs with publish, or with the proxy */
			const uint32_t found = tp_load_relaxed(flag + 1), total = tp_load_relaxed((const uint32_t *)slot + 2);
			if (total != (uint32_t)t.bytes || found != bytes) {
				const bool whole = total != (uint32_t)t.bytes;
				tp_block_fault(sh.all.comm, TP_BLOCK_SIZE, l.peer, tp_block(), whole ? total : found, whole ? (uint32_t)t.bytes : bytes);
				return false;
			}
		}
		const bool lent = lane.lends && l.lends && bytes >= TP_DEV_LEND_BYTES;
		lane.lent |= lent;
		work.nsrc = work.to = work.ndst = 1;
		work.chunk_bytes = bytes;
		work.bytes = lent ? 0 : bytes;
		work.flags = TP_WORK_PLAIN | ((at[0] | at[1]) % 16 ? 0 : TP_WORK_ALIGNED) | (lent ? TP_WORK_LENT : 0);
		work.value = ++l.next;
		work.tag = (uint32_t)t.bytes;
		work.is_send = t.is_send;
		lane.at += bytes;
		return true;
	}

	TP_METHOD bool look(shared &sh, const tp_group &g, tp_control *c, int which)
	{
		tp_transfer_lane &lane = sh.lanes[c->lane];
		const tp_dev_transfer &t = sh.transfers[lane.transfer == TP_TRANSFER_NONE ? 0 : lane.transfer];
		const bool is_ready = tp_warp_any(tp_warp_thread() == 0 && ready(lane, t));
		bool taken = false;
		if (is_ready) {
			const uint32_t number = c->lane;
			bool fine = true, over = false;
			if (tp_warp_thread() == 0) {
				tp_work &work = sh.all.groups[g.number].work[which];
				fine = take(sh, lane, t, work, sh.all.at + tp_group_base(sh.all, g.number, which));
				work.step = number;
				if (lane.at == lane.end) tp_transfer_find(sh.all.comm, sh.transfers, t.next, sh.nchannels, &lane);
				over = lane.transfer == TP_TRANSFER_NONE;
			}
			taken = tp_warp_all(fine);
			if (!taken) tp_block_set(&sh.all.stopped, 1);
			if (tp_warp_any(over)) c->left--;
		}
		c->lane += sh.all.ngroups;
		if (c->lane >= sh.nlanes) c->lane = (uint32_t)g.number;
		return taken;
	}

	TP_METHOD void publish(shared &sh, const tp_group &g, int which)
	{
		const tp_work &work = sh.all.groups[g.number].work[which];
		const tp_transfer_lane &lane = sh.lanes[work.step];
		if (tp_warp_thread() == 0 && lane.home) {
			uint32_t *flag = (uint32_t *)lane.link.head;
			if (work.is_send) {
				const uint64_t *at = sh.all.at + tp_group_base(sh.all, g.number, which);
				uint32_t *header = (uint32_t *)(at[1] - 16);
				flag = tp_link_flag(lane.link, work.value - 1);
				tp_store_relaxed(header + 1, work.chunk_bytes);
				tp_store_relaxed(header + 2, work.tag);
				tp_store_relaxed(header + 3, 0);            /* TP_SLOT_INLINE */
				if (flag != header) tp_lend_flag(flag, work.chunk_bytes, work.tag, work.flags & TP_WORK_LENT ? at[0] : 0);
			}
			tp_fence();
			tp_store_relaxed(flag, work.value);             /* release, by the fence: pairs with take at the other end, or with the proxy */
		}
		tp_warp_sync();
	}
};

TP_DEVICE void tp_transfers_kernel(tp_transfers_shared &sh, const tp_dev_transfers_head &head, const tp_dev_transfer *transfers)
{
	tp_dev_comm *comm = (tp_dev_comm *)head.comm;
	tp_groups_begin(sh.all, comm);
	if (tp_thread() == 0) {
		sh.nlanes = 0;
		sh.nchannels = head.nchannels;
		sh.transfers = transfers;
		if (head.lends) tp_lend_begin(comm);
	}
	tp_block_sync();
	for (uint32_t i = (uint32_t)tp_thread(); i < head.ntransfers; i += (uint32_t)tp_threads()) {
		if (!transfers[i].is_first) continue;
		tp_transfer_lane lane;
		tp_transfer_find(comm, transfers, i + 1, head.nchannels, &lane);
		if (lane.transfer == TP_TRANSFER_NONE) continue;
		lane.lent = 0;
		lane.home = transfers[i].from ? 0 : transfers[i].links + (uint64_t)tp_block() * sizeof(tp_dev_link);
		if (lane.home) lane.link = *(const tp_dev_link *)lane.home;
		sh.lanes[tp_block_take(&sh.nlanes, 1)] = lane;
	}
	tp_block_sync();
	if (tp_thread() == 0) {
		sh.all.ngroups = sh.nlanes < 1 ? 1 : sh.nlanes < TP_DEV_GROUPS ? sh.nlanes : (uint32_t)TP_DEV_GROUPS;
		sh.all.room = 2;
	}
	const bool stopped = tp_block_load(&sh.all.stopped);        /* looked at by all before any goes on and finds a fault */
	tp_block_sync();
	if (!stopped) tp_groups_run<tp_transfers_feed, tp_mover_copy>(sh, nullptr);
	tp_block_sync();
	for (uint32_t i = (uint32_t)tp_thread(); i < sh.nlanes; i += (uint32_t)tp_threads()) {
		tp_dev_link *home = (tp_dev_link *)sh.lanes[i].home;
		if (!home) continue;
		if (sh.lanes[i].lent) tp_lend_await(sh.all, &sh.lanes[i].link);
		home->next = sh.lanes[i].link.next;
		home->head_seen = sh.lanes[i].link.head_seen;
	}
	if (head.lends) tp_lend_end(comm);
	tp_kernel_end(comm);
}

#endif

/* Groups of sends and receives between ranks that map each other's regions: lines of 128 bytes that carry their flags, pushed into
 * rings near the receiver, so that a message needs one way only, and nothing waits for a fence.
 *
 * A block has a lane for each (peer, direction), and a lane has warps of its own, so nothing waits for anything but its peer; a
 * lane's transfers follow each other, at both ends. A ring has slots of so many lines. A round, which is a slot or less, has a
 * number that counts on for ever (40 bits); it is the flag in the round's lines, together with the size of the transfer, so that
 * unequal sizes are seen. The receiver's warps meet after each round, and one thread says how far they have read; the sender
 * writes over a slot once that is known, and so waits only where it is a whole ring ahead.
 * Which warps of a lane move which lines is each end's own affair.
 *
 * What is larger still goes through pipes, where there are any (streams_pipes.h).
 *
 * For a large transfer the receiver offers its buffer (offers.h). Its first round goes by lines all the same: so unequal sizes are seen. Where the
 * buffer was offered, the rest counts as one round: the sender's warps store it there, and the first of them tells the receiver once all have. */
#ifndef TP_EXEC_CUDA_STREAMS_H
#define TP_EXEC_CUDA_STREAMS_H

#include "exec/cuda/lines.h"
#include "exec/cuda/offers.h"

enum { TP_STREAM_NONE = 0xffff, TP_STREAM_COUNT_BITS = 40, TP_STREAM_DEEP = TP_WARP == 1 ? 2 : 4 };

/* offered: does this receiver's offer of the transfer at hand stand? The first warp's word to the others. stored: warps of this sender that have
 * stored their share of an offered buffer, all transfers together; due: how many that will be. chunks, other_chunks: of the lane's pipe, as kernels before
 * left them, in the phase of transfers and in the other one. */
struct tp_stream_lane { uint64_t count; uint32_t seen, transfer, offered, stored, due, chunks, other_chunks, pad; };
struct tp_streams_shared {
	tp_stream_lane lanes[TP_DEV_STREAM_LANES];
	uint32_t nlanes, stopped;
};
/* A warp's view. */
struct tp_stream {
	tp_dev_comm *comm;
	char *slots;                        /* of the ring that this lane writes or reads */
	uint32_t *ack;                      /* sender: near; receiver: the peer's */
	uint64_t count;                     /* rounds so far */
	uint32_t seen, slot_units, warp, warps, barrier;
	int peer;
	bool gives_way, stopped;
};

/* 24 bits: sizes below 8 MB as they are; larger ones are larger than these. */
TP_DEVICE uint64_t tp_stream_size_bits(uint64_t bytes)
{ return (bytes >> 23 ? 0x800000 | ((bytes ^ bytes >> 23 ^ bytes >> 46) & 0x7fffff) : bytes) << TP_STREAM_COUNT_BITS; }
TP_DEVICE uint64_t tp_stream_flag(uint64_t count, uint64_t bytes) { return (count & ((1ull << TP_STREAM_COUNT_BITS) - 1)) | tp_stream_size_bits(bytes); }

/* The part of a transfer that a channel has, in units; false: none. */
TP_DEVICE bool tp_stream_part(const tp_dev_stream &t, uint32_t channel, uint32_t nchannels, uint32_t *begin, uint32_t *end)
{
	const uint32_t place = channel >= t.base ? channel - t.base : channel + nchannels - t.base;
	if (place >= t.nparts) return false;
	*begin = t.units_each * place + (place < t.units_more ? place : t.units_more);
	*end = *begin + t.units_each + (place < t.units_more);
	return true;
}
/* What a kernel's transfers may be: by lines alone; with offers for some; some through pipes too. */
enum tp_stream_ways { TP_STREAM_LINES, TP_STREAM_OFFERS, TP_STREAM_PIPES };
template <int WAYS>
TP_DEVICE bool tp_stream_is_piped(const tp_dev_streams_head &h, const tp_dev_stream &t) { return WAYS == TP_STREAM_PIPES && !t.from && t.bytes >= h.pipes_from; }
/* From number + 1 on along the chain: the next that has a part here, or TP_STREAM_NONE. */
template <int WAYS>
TP_DEVICE uint32_t tp_stream_find(const tp_dev_streams_head &h, const tp_dev_stream *all, uint32_t next, uint32_t channel)
{
	uint32_t begin, end;
	while (next && !tp_stream_is_piped<WAYS>(h, all[next - 1]) && !tp_stream_part(all[next - 1], channel, h.nchannels, &begin, &end)) next = all[next - 1].next;
	return next ? next - 1 : (uint32_t)TP_STREAM_NONE;
}

TP_DEVICE char *tp_stream_ring(const tp_dev_streams_head &h, int at, int from, uint32_t channel)
{
	const uint64_t bytes = 128 + (uint64_t)TP_DEV_STREAM_SLOTS * h.slot_units * 128;
	return (char *)h.rings[at] + ((uint64_t)(uint32_t)(from - (from > at)) * h.nchannels + channel) * bytes;
}

TP_DEVICE void tp_stream_push(char *at, const tp_four *v, uint64_t flag)
{
	TP_UNROLL
	for (int i = 0; i < tp_ll128::VECTORS; i++) {
		const bool last = tp_ll128::lane(i) == 7;
		tp_store_line(at + tp_ll128::lane(i) * 16, { v[i].x, v[i].y, last ? (uint32_t)flag : v[i].z, last ? (uint32_t)(flag >> 32) : v[i].w });
	}
}
TP_DEVICE bool tp_stream_look(const char *at, tp_four *v, uint64_t flag)
{
	bool ok = true;
	TP_UNROLL
	for (int i = tp_ll128::VECTORS - 1; i >= 0; i--) {
		v[i] = tp_load_line(at + tp_ll128::lane(i) * 16);
		if (tp_ll128::lane(i) == 7) ok = v[i].z == (uint32_t)flag && v[i].w == (uint32_t)(flag >> 32);
	}
	return ok;
}
/* A line that has come, of this round, but of a transfer of another size? */
TP_FAR void tp_stream_doubt(tp_dev_comm *comm, int peer, const char *at, uint64_t flag)
{
	const tp_four v = tp_load_line(at + 112);
	const uint64_t found = (uint64_t)v.z | (uint64_t)v.w << 32;
	if (found == flag || (found ^ flag) << (64 - TP_STREAM_COUNT_BITS)) return;
	tp_block_fault(comm, TP_BLOCK_SIZE, peer, tp_block(), (uint32_t)(found >> TP_STREAM_COUNT_BITS), (uint32_t)(flag >> TP_STREAM_COUNT_BITS));
}

/* Units a warp has at once, and this thread's among them. */
enum { TP_STREAM_AT_ONCE = TP_WARP / tp_ll128::LANES };
TP_DEVICE uint32_t tp_stream_seat() { return (uint32_t)tp_thread() % TP_WARP / tp_ll128::LANES; }

/* One round, at `slot`: `units` lines from `from` on, of which `left` bytes are there. whole: all of them, at aligned places. Not inlined:
 * what they need at once, and what a lane has to know, together are more registers than there are. */
struct tp_stream_round { char *slot, *user; uint64_t left, flag; uint32_t units, first, step; };

TP_DEVICE uint32_t tp_stream_left(uint64_t left, uint32_t unit)
{
	const uint64_t at = (uint64_t)unit * tp_ll128::BYTES;
	return at >= left ? 0 : left - at < tp_ll128::BYTES ? (uint32_t)(left - at) : (uint32_t)tp_ll128::BYTES;
}
template <int D, bool WHOLE>
TP_FAR void tp_stream_send_round(const tp_stream_round r)
{
	TP_NO_UNROLL
	for (uint32_t first = r.first; first < r.units; first += D * r.step) {
		uint32_t unit = first + tp_stream_seat();
		tp_four v[D][tp_ll128::VECTORS];
		/* Beyond the end the last unit is loaded, and not pushed. */
		TP_UNROLL
		for (int d = 0; d < D; d++) {
			const uint32_t u = unit + (uint32_t)d * r.step < r.units ? unit + (uint32_t)d * r.step : r.units - 1;
			tp_unit_load<tp_ll128>(r.user + u * tp_ll128::BYTES, WHOLE, WHOLE ? 0 : tp_stream_left(r.left, u), v[d]);
		}
		tp_lines_delay();
		tp_ll128::meet();
		TP_UNROLL
		for (int d = 0; d < D; d++) {
			const uint32_t u = unit + (uint32_t)d * r.step;
			if (u < r.units) tp_stream_push(r.slot + u * 128, v[d], r.flag);
		}
	}
}
/* False: it was stopped. */
template <int D, bool WHOLE>
TP_FAR bool tp_stream_take_round(const tp_stream_round r, tp_dev_comm *comm, int peer, bool gives_way)
{
	unsigned turn = 0;
	TP_NO_UNROLL
	for (uint32_t first = r.first; first < r.units; first += D * r.step) {
		const uint32_t unit = first + tp_stream_seat();
		tp_four v[D][tp_ll128::VECTORS];
		tp_lines_delay();
		for (;; turn++) {
			bool ok = true;
			tp_ll128::meet();
			TP_UNROLL
			for (int d = 0; d < D; d++) {
				const uint32_t u = unit + (uint32_t)d * r.step;
				if (u < r.units) ok &= tp_stream_look(r.slot + u * 128, v[d], r.flag);
			}
			if (tp_warp_all(ok)) break;
			if (turn % 64 == 62 && unit < r.units) tp_stream_doubt(comm, peer, r.slot + unit * 128, r.flag);
			if (tp_warp_any(tp_block_stopped(comm, turn))) return false;
			tp_nap(turn, gives_way);
		}
		TP_UNROLL
		for (int d = 0; d < D; d++) {
			const uint32_t u = unit + (uint32_t)d * r.step;
			if (u < r.units) tp_unit_store<tp_ll128>(r.user + u * tp_ll128::BYTES, WHOLE, WHOLE ? 0 : tp_stream_left(r.left, u), v[d]);
		}
	}
	return true;
}

TP_DEVICE tp_stream_round tp_stream_open(const tp_stream &s, const tp_dev_stream &t, uint32_t begin, uint32_t end, bool *whole)
{
	const uint32_t units = end - begin < s.slot_units ? end - begin : s.slot_units;
	const uint64_t at = (uint64_t)begin * tp_ll128::BYTES, left = at < t.bytes ? t.bytes - at : 0;
	*whole = t.buf % 8 == 0 && left >= units * (uint32_t)tp_ll128::BYTES;
	return { s.slots + (uint32_t)(s.count % TP_DEV_STREAM_SLOTS) * s.slot_units * 128, (char *)t.buf + at, left, tp_stream_flag(s.count, t.bytes), units,
		s.warp * TP_STREAM_AT_ONCE, s.warps * TP_STREAM_AT_ONCE };
}

/* A transfer's units [begin, end), round by round. */
TP_DEVICE void tp_stream_send(tp_stream &s, const tp_dev_stream &t, uint32_t begin, uint32_t end)
{
	TP_NO_UNROLL
	for (uint32_t u = begin; u < end; u += s.slot_units) {
		bool whole;
		s.count++;
		for (unsigned turn = 0; (int32_t)((uint32_t)s.count - s.seen) > TP_DEV_STREAM_SLOTS; turn++) {
			s.seen = tp_load_relaxed(s.ack);            /* stored by tp_stream_receive */
			if ((int32_t)((uint32_t)s.count - s.seen) <= TP_DEV_STREAM_SLOTS) break;
			if (tp_block_stopped(s.comm, turn)) s.stopped = true;
			if (s.stopped) break;
			tp_nap(turn, s.gives_way);
		}
		tp_warp_sync();
		if (tp_warp_any(s.stopped)) return;
		const tp_stream_round r = tp_stream_open(s, t, u, end, &whole);
		if (whole) tp_stream_send_round<TP_STREAM_DEEP, true>(r);
		else tp_stream_send_round<1, false>(r);
	}
}
TP_DEVICE void tp_stream_receive(tp_stream &s, const tp_dev_stream &t, uint32_t begin, uint32_t end)
{
	TP_NO_UNROLL
	for (uint32_t u = begin; u < end; u += s.slot_units) {
		bool whole;
		s.count++;
		const tp_stream_round r = tp_stream_open(s, t, u, end, &whole);
		if (s.stopped) ;
		else if (whole) s.stopped = !tp_stream_take_round<TP_STREAM_DEEP, true>(r, s.comm, s.peer, s.gives_way);
		else s.stopped = !tp_stream_take_round<1, false>(r, s.comm, s.peer, s.gives_way);
		tp_warp_sync();
		if (s.warps > 1) tp_group_sync((int)s.barrier, (int)s.warps * TP_WARP);
		/* What was read has arrived in registers, or its flag would not have been seen: nothing to wait for. A release here would wait for
		 * the stores to the user's buffer, which no peer looks at, once a round. */
		if (s.warp == 0 && (uint32_t)tp_thread() % TP_WARP == 0) tp_store_relaxed(s.ack, (uint32_t)s.count);    /* read by tp_stream_send */
	}
}
/* So many 16 bytes, both ends aligned, by `threads` threads. Beyond the end the last are loaded, and not stored: without branches between them all loads are
 * under way at once. */
TP_DEVICE void tp_stream_copy16(const char *from, char *to, uint64_t count, uint32_t thread, uint32_t threads)
{
	TP_NO_UNROLL
	for (uint64_t first = thread; first < count; first += TP_STREAM_DEEP * threads) {
		tp_four v[TP_STREAM_DEEP];
		TP_UNROLL
		for (int d = 0; d < TP_STREAM_DEEP; d++) {
			const uint64_t i = first + (uint32_t)d * threads;
			v[d] = tp_load_user16(from + (i < count ? i : count - 1) * 16);
		}
		TP_UNROLL
		for (int d = 0; d < TP_STREAM_DEEP; d++) {
			const uint64_t i = first + (uint32_t)d * threads;
			if (i < count) tp_store_user16(to + i * 16, v[d]);
		}
	}
}
/* Bytes of any alignment. */
TP_FAR void tp_stream_copy_bytes(const char *from, char *to, uint64_t bytes, uint32_t thread, uint32_t threads)
{
	const uint32_t odd = (uint32_t)((0 - (uintptr_t)to) & 15), head = odd < bytes ? odd : (uint32_t)bytes;
	if (head && thread == 0) tp_user_store(to, tp_user_load(from, head), head);
	from += head;
	to += head;
	bytes -= head;
	uint64_t done = 0;
	if ((uintptr_t)from % 16 == 0) {
		done = bytes / 16 * 16;
		tp_stream_copy16(from, to, bytes / 16, thread, threads);
	}
	TP_NO_UNROLL
	for (uint64_t i = done + (uint64_t)thread * 16; i < bytes; i += (uint64_t)threads * 16) {
		const uint32_t some = bytes - i < 16 ? (uint32_t)(bytes - i) : 16;
		const tp_four v = tp_user_load(from + i, some);
		if (some == 16) tp_store_user16(to + i, v);
		else tp_user_store(to + i, v, some);
	}
}
/* From one's own send to one's own receive. */
TP_DEVICE void tp_stream_copy(const tp_stream &s, const tp_dev_stream &t, uint32_t begin, uint32_t end)
{
	/* Two units are a multiple of 16 bytes. */
	const uint64_t at = (uint64_t)(begin & ~1u) * tp_ll128::BYTES, most = end == t.units ? t.bytes : (uint64_t)(end & ~1u) * tp_ll128::BYTES;
	const uint64_t last = most < t.bytes ? most : t.bytes;
	if (t.from == t.buf || at >= last) return;
	tp_stream_copy_bytes((const char *)t.from + at, (char *)t.buf + at, last - at, s.warp * TP_WARP + (uint32_t)tp_thread() % TP_WARP, s.warps * TP_WARP);
}

/* ---- registered buffers ---- */

enum { TP_STREAM_OFFER = 16, TP_STREAM_STORED = 32 };
/* … in a ring's first line. The sender's near one is s.ack's, its far one lies before s.slots; the receiver's the other way round. */

/* Of this thread: the first of its lane. */
TP_DEVICE bool tp_stream_first(const tp_stream &s) { return s.warp == 0 && (uint32_t)tp_thread() % TP_WARP == 0; }
TP_DEVICE void tp_stream_meet(const tp_stream &s)
{
	tp_warp_sync();
	if (s.warps > 1) tp_group_sync((int)s.barrier, (int)s.warps * TP_WARP);
}

/* Units [begin, end) of a transfer to the receiver's buffer, if it was offered. The stream is passed by value, or all of it would lie in memory
 * for the whole kernel. */
enum { TP_STREAM_NOT_OFFERED, TP_STREAM_STORED_ALL, TP_STREAM_STOPPED };
TP_FAR int tp_stream_send_straight(const tp_stream s, tp_stream_lane &lane, const tp_dev_streams_head &h, const tp_dev_stream &t, uint32_t begin, uint32_t end,
	uint64_t stamp)
{
	uint64_t offset;
	uint32_t index;
	for (unsigned turn = 0; !tp_warp_all(tp_offer_look((const char *)s.ack + TP_STREAM_OFFER, stamp, &offset, &index)); turn++) {
		tp_lines_delay();
		if (tp_warp_any(tp_block_stopped(s.comm, turn))) return TP_STREAM_STOPPED;
		tp_nap(turn, s.gives_way);
	}
	if (!index) return TP_STREAM_NOT_OFFERED;
	const uint64_t entry = tp_offer_entry(h.table, t.peer, index), at = (uint64_t)begin * tp_ll128::BYTES, last = (uint64_t)end * tp_ll128::BYTES;
	if (!entry) {
		if ((uint32_t)tp_thread() % TP_WARP == 0) tp_block_fault(s.comm, TP_BLOCK_BUFFER, t.peer, tp_block(), index, 0);
		return TP_STREAM_STOPPED;
	}
	tp_stream_copy_bytes((const char *)t.buf + at, (char *)(entry + offset) + at, (last < t.bytes ? last : t.bytes) - at,
		s.warp * TP_WARP + (uint32_t)tp_thread() % TP_WARP, s.warps * TP_WARP);
	/* No barrier: another warp may have been stopped before it got here. */
	tp_warp_sync();
	if ((uint32_t)tp_thread() % TP_WARP == 0) tp_block_add(&lane.stored, 1);
	if (!tp_stream_first(s)) return TP_STREAM_STORED_ALL;
	lane.due += s.warps;
	for (unsigned turn = 0; (int32_t)(tp_block_load(&lane.stored) - lane.due) < 0; turn++) {
		if (tp_block_stopped(s.comm, turn)) return TP_STREAM_STOPPED;
		tp_nap(turn, s.gives_way);
	}
	tp_fence();
	tp_store_release64((uint64_t *)(s.slots - 128 + TP_STREAM_STORED), stamp);          /* pairs with tp_stream_await_straight */
	return TP_STREAM_STORED_ALL;
}
/* What comes straight to this rank's buffer. False: this thread was stopped. */
TP_FAR bool tp_stream_await_straight(const tp_stream s, uint64_t stamp)
{
	bool stopped = s.stopped;
	if (tp_stream_first(s)) {
		tp_lines_delay();
		for (unsigned turn = 0; !stopped && tp_load_acquire64((const uint64_t *)(s.slots - 128 + TP_STREAM_STORED)) != stamp; turn++) {
			stopped = tp_block_stopped(s.comm, turn);
			tp_nap(turn, s.gives_way);
		}
	}
	tp_stream_meet(s);
	if (!tp_stream_first(s)) return !stopped;
	tp_store_relaxed(s.ack, (uint32_t)s.count + 1);
	if (!stopped) tp_offer_count(s.comm);
	return !stopped;
}

/* A large transfer's part: a round by lines, then the rest as the receiver's offer says. Apart from the others, whose registers it would take. */
struct tp_stream_state { uint64_t count; uint32_t seen; bool stopped; };
TP_FAR tp_stream_state tp_stream_move_large(const tp_stream stream, tp_stream_lane &lane, const tp_dev_streams_head &h, const tp_dev_stream &t, uint32_t begin,
	uint32_t end)
{
	tp_stream s = stream;
	const uint32_t rest = begin + s.slot_units;
	const uint64_t stamp = s.count + 1;
	bool straight = false;
	if (t.is_send) {
		tp_stream_send(s, t, begin, rest);
		const int how = tp_warp_any(s.stopped) ? (int)TP_STREAM_STOPPED : tp_stream_send_straight(s, lane, h, t, rest, end, stamp);
		s.stopped |= how == TP_STREAM_STOPPED;
		straight = how != TP_STREAM_NOT_OFFERED;
		if (!straight) tp_stream_send(s, t, rest, end);
	} else {
		if (tp_stream_first(s)) {
			const tp_dev_offer offer = { t.offset, t.index, 0 };
			lane.offered = tp_offer_stands(h.table, h.rank, offer, t.buf);
			tp_offer_make((char *)s.ack + TP_STREAM_OFFER, lane.offered, offer, 0, stamp);
		}
		tp_stream_receive(s, t, begin, rest);           /* its warps meet in it, so all see lane.offered */
		straight = lane.offered;
		if (straight) s.stopped |= !tp_stream_await_straight(s, stamp);
		else tp_stream_receive(s, t, rest, end);
	}
	/* One thread may have been stopped where the others weren't, and a warp goes on together or not at all. */
	return { s.count + straight, s.seen, tp_warp_any(s.stopped) };
}

TP_DEVICE uint64_t *tp_stream_counter(const tp_dev_streams_head &h, const tp_dev_stream &t, uint32_t channel)
{ return (uint64_t *)h.counters + ((uint32_t)t.peer * 2u + t.is_send) * h.nchannels + channel; }

#include "exec/cuda/streams_pipes.h"

/* pipes: of the block; NULL where no transfer goes through them. */
template <int WAYS>
TP_DEVICE void tp_stream_lane_run(tp_streams_shared &sh, const tp_dev_streams_head &h, const tp_dev_stream *all, uint32_t number, uint32_t warp,
	uint32_t warps, const tp_stream_pipe *pipes)
{
	const uint32_t channel = h.channels[tp_block()];
	const tp_stream_lane lane = sh.lanes[number];
	const tp_dev_stream *t = &all[lane.transfer];
	const bool copies = t->from != 0;
	uint32_t chunks = lane.chunks;
	tp_stream s = { (tp_dev_comm *)h.comm, nullptr, nullptr, lane.count, lane.seen, h.slot_units, warp, warps, 1 + number, t->peer,
		h.gives_way != 0, false };
	if (!copies) {
		char *near = tp_stream_ring(h, h.rank, t->peer, channel), *far = tp_stream_ring(h, t->peer, h.rank, channel);
		s.slots = (t->is_send ? far : near) + 128;
		s.ack = (uint32_t *)(t->is_send ? near : far);
	}
	for (;;) {
		uint32_t begin = 0, end = 0;
		const bool by_lines = tp_stream_part(*t, channel, h.nchannels, &begin, &end);
		if (copies) tp_stream_copy(s, *t, begin, end);
		else if (tp_stream_is_piped<WAYS>(h, *t)) {
			const tp_stream_pipe pipe = { pipes->args, pipes->block, pipes->stages + number * pipes->nstages * pipes->args->chunk, pipes->nstages, lane.chunks,
				lane.other_chunks };
			const tp_stream_piped after = tp_stream_move_piped(s, pipe, h, *t, by_lines, chunks);
			s.count = after.state.count;
			s.seen = after.state.seen;
			s.stopped = after.state.stopped;
			chunks += after.chunks;
		} else if (WAYS != TP_STREAM_LINES && h.table && t->bytes >= h.offers_from && end - begin > s.slot_units) {
			const tp_stream_state after = tp_stream_move_large(s, sh.lanes[number], h, *t, begin, end);
			s.count = after.count;
			s.seen = after.seen;
			s.stopped = after.stopped;
		} else if (t->is_send) tp_stream_send(s, *t, begin, end);
		else tp_stream_receive(s, *t, begin, end);
		const uint32_t next = tp_stream_find<WAYS>(h, all, t->next, channel);
		if (next == TP_STREAM_NONE) break;
		t = &all[next];
	}
	if (copies || warp || (uint32_t)tp_thread() % TP_WARP) return;
	*tp_stream_counter(h, *t, channel) = s.count;
	if (WAYS == TP_STREAM_PIPES) tp_pipe_counter(*pipes->args, 0, t->peer)[!t->is_send] = chunks;
}

/* Lanes for which there are transfers. Without offers and pipes it needs fewer registers. */
template <int WAYS>
TP_DEVICE void tp_streams_kernel(tp_streams_shared &sh, const tp_dev_streams_head &h, const tp_dev_stream *all, tp_stream_pipe *pipes)
{
	tp_dev_comm *comm = (tp_dev_comm *)h.comm;
	const uint32_t channel = h.channels[tp_block()];
	if (tp_thread() == 0) sh.nlanes = 0;
	tp_block_sync();
	for (uint32_t i = (uint32_t)tp_thread(); i < h.ntransfers; i += (uint32_t)tp_threads()) {
		if (!all[i].is_first) continue;
		const uint32_t transfer = tp_stream_find<WAYS>(h, all, i + 1, channel);
		if (transfer == TP_STREAM_NONE) continue;
		tp_stream_lane lane = { 0, 0, transfer, 0, 0, 0, 0, 0, 0 };
		if (!all[i].from) lane.count = *tp_stream_counter(h, all[i], channel);
		if (!all[i].from && all[i].is_send) lane.seen = tp_load_relaxed((const uint32_t *)tp_stream_ring(h, h.rank, all[i].peer, channel));
		if (WAYS == TP_STREAM_PIPES && !all[i].from) {
			lane.chunks = tp_pipe_counter(*pipes->args, 0, all[i].peer)[!all[i].is_send];
			lane.other_chunks = tp_pipe_counter(*pipes->args, 1, all[i].peer)[!all[i].is_send];
		}
		sh.lanes[tp_block_take(&sh.nlanes, 1)] = lane;
	}
	if (WAYS == TP_STREAM_PIPES) tp_stream_pipes_begin(*pipes->block);
	if (tp_thread() == tp_threads() - 1) sh.stopped = tp_load_relaxed(&comm->stop);
	tp_block_sync();
	const uint32_t nlanes = sh.nlanes, warps = (uint32_t)tp_threads() / TP_WARP / (nlanes ? nlanes : 1), warp = (uint32_t)tp_thread() / TP_WARP;
	if (WAYS == TP_STREAM_PIPES) pipes->nstages = pipes->args->stages / (nlanes ? nlanes : 1);
	if (warps && !sh.stopped && warp < warps * nlanes) tp_stream_lane_run<WAYS>(sh, h, all, warp / warps, warp % warps, warps, pipes);
	if (h.counts) tp_kernel_end(comm);
}

#endif

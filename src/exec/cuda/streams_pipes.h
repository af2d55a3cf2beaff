/* The part of streams.h, which includes it, that moves large transfers: their first units go by lines, on the channel where the transfer begins, so that unequal sizes
 * are seen even where one end takes the transfer for a small one; the rest goes through pipes (pipes_ring.h, phase 0), on all channels. So a lane's
 * transfers follow each other at both ends whichever way each goes, and no lane waits for anything but its peer.
 *
 * Of a lane's warps the first few have chunks in turn, one at a time from its load to its flag, as those of collectives have (pipes_move.h). Where offers are
 * made, the one of a transfer comes after all chunks of the one before have been read, and its stamp has bits of the size, so that no chunk of a
 * transfer of another size is stored there. */
#ifndef TP_EXEC_CUDA_STREAMS_PIPES_H
#define TP_EXEC_CUDA_STREAMS_PIPES_H

#include "exec/cuda/pipes_ring.h"

enum { TP_STREAM_WARPS = TP_DEV_THREADS / 32, TP_STREAM_BEFORE = TP_DEV_STREAM_PIPED_UNITS * TP_DEV_STREAM_UNIT };

/* Of a block. Each warp has a barrier of its own for bulk loads, and its parity. */
struct tp_stream_pipes {
	uint64_t loaded[TP_STREAM_WARPS];
	uint32_t parity[TP_STREAM_WARPS], stopped;
};
/* A lane's share of that; stages: chunks of shared memory, a warp each. first, other: the numbers of the last chunks of kernels before, in this
 * phase and the other one. */
struct tp_stream_pipe {
	const tp_pipe_args *args;
	tp_stream_pipes *block;
	char *stages;
	uint32_t nstages, first, other;
};
/* A warp's work at a transfer. number: of the last chunk before it. */
struct tp_stream_chunks { tp_pipe_part part; uint64_t stamp; uint32_t number, warp, warps; int peer; bool offers; };

/* Both ends cut a transfer for all channels alike. */
TP_DEVICE tp_pipe_part tp_stream_piped_part(const tp_pipe_args &a, const tp_dev_stream &t)
{
	const uint64_t rest = t.bytes - TP_STREAM_BEFORE, lines = (rest + 127) / 128, each = lines / a.nchannels;
	const tp_pipe k = tp_pipe_share(each, lines - each * a.nchannels, a.chunk);
	const uint64_t left = rest > k.begin ? rest - k.begin : 0, in = TP_STREAM_BEFORE + k.begin;
	return { t.buf + in, left < k.bytes ? left : k.bytes, k.chunks, (uint32_t)(t.bytes ^ t.bytes >> 32), { t.offset + in, t.index, 0 } };
}

/* Elements of a size that both places are aligned to. */
template <class T>
TP_DEVICE void tp_stream_copy_elements(const char *from, char *to, uint32_t bytes, uint32_t thread)
{
	enum { U = 8 };
	const uint32_t step = TP_WARP * sizeof(T);
	uint32_t i = thread * (uint32_t)sizeof(T);
	TP_NO_UNROLL
	for (; i + (U - 1) * step < bytes; i += U * step) {
		T v[U];
		TP_UNROLL
		for (int u = 0; u < U; u++) v[u] = *(const T *)(from + i + (uint32_t)u * step);
		TP_UNROLL
		for (int u = 0; u < U; u++) *(T *)(to + i + (uint32_t)u * step) = v[u];
	}
	TP_NO_UNROLL
	for (; i < bytes; i += step) *(T *)(to + i) = *(const T *)(from + i);
}
/* By a warp: what can't be copied in bulk. */
TP_FAR void tp_stream_copy_chunk(const char *from, char *to, uint32_t bytes)
{
	const uint32_t odd = (uint32_t)(uintptr_t)from | (uint32_t)(uintptr_t)to | bytes, thread = (uint32_t)tp_pipe_lane();
	if (odd % 8 == 0) tp_stream_copy_elements<uint64_t>(from, to, bytes, thread);
	else if (odd % 4 == 0) tp_stream_copy_elements<uint32_t>(from, to, bytes, thread);
	else if (odd % 2 == 0) tp_stream_copy_elements<uint16_t>(from, to, bytes, thread);
	else tp_stream_copy_elements<uint8_t>(from, to, bytes, thread);
}

/* A thread's, until there is room in the peer's ring for the chunk of that number. False: stop. */
TP_DEVICE bool tp_stream_await_room(const tp_stream_pipe &p, int peer, uint32_t number)
{
	const tp_pipe_args &a = *p.args;
	for (unsigned turn = 0;; turn++) {
		bool ok = true;
		/* A chunk of this kernel that had its place; before there is one, all of kernels before, in both phases. */
		if (number - p.first > a.slots) ok = tp_pipe_is_read(a, 0, peer, number - a.slots);
		else
			for (uint32_t d = 0; d < TP_PIPE_DEPTH; d++) ok &= tp_pipe_is_read(a, 0, peer, p.first - d) & tp_pipe_is_read(a, 1, peer, p.other - d);
		if (ok) return true;
		if (!tp_pipe_wait(&p.block->stopped, a, turn)) return false;
	}
}

/* Where the peer's buffer takes this part; 0: it goes to the ring. A buffer that this rank hasn't got, or not at such a place, isn't used. */
TP_DEVICE bool tp_stream_take_offer(const tp_stream_pipe &p, const tp_stream_chunks &w, uint64_t *straight)
{
	const tp_pipe_args &a = *p.args;
	uint64_t offset = 0;
	uint32_t index = 0;
	for (unsigned turn = 0; !tp_offer_look(tp_pipe_offer(a, a.rank, w.peer), w.stamp, &offset, &index); turn++)
		if (!tp_pipe_wait(&p.block->stopped, a, turn)) return false;
	const uint64_t entry = tp_offer_entry(a.table, w.peer, index);
	*straight = entry && (entry + offset) % 16 == 0 ? entry + offset : 0;
	return true;
}

/* False: it was stopped. */
TP_FAR bool tp_stream_push_chunks(const tp_stream_pipe p, const tp_stream_chunks w)
{
	const tp_pipe_args &a = *p.args;
	const bool first = tp_pipe_lane() == 0, aligned = w.part.at % 16 == 0;
	const uint32_t self = (uint32_t)tp_thread() / TP_WARP;
	uint64_t *const bar = &p.block->loaded[self], straight = 0;
	char *const stage = p.stages + w.warp * a.chunk;
	uint32_t parity = p.block->parity[self];
	if (w.warp >= w.part.chunks) return true;
	bool go = !w.offers || !first || tp_stream_take_offer(p, w, &straight);
	uint32_t next = tp_pipe_bytes(a, w.part, w.warp);
	if (tp_warp_any(!go)) return false;
	if (first && aligned && next % 16 == 0) tp_bulk_load(stage, tp_pipe_at(a, w.part, w.warp), next, bar);
	TP_NO_UNROLL
	for (uint32_t c = w.warp; c < w.part.chunks; c += w.warps) {
		const uint32_t bytes = next, number = w.number + c + 1;
		const bool bulk = aligned && bytes % 16 == 0;
		if (bulk && first) tp_bulk_loaded(bar, parity);
		parity ^= bulk;
		if (!bulk) {
			tp_stream_copy_chunk(tp_pipe_at(a, w.part, c), stage, bytes);
			tp_bulk_fence();
		}
		tp_warp_sync();
		go = !first || tp_stream_await_room(p, w.peer, number);
		if (tp_warp_any(!go)) return false;
		const bool to_buffer = straight && bytes % 16 == 0;
		if (first) {
			tp_bulk_store(to_buffer ? (char *)straight + (uint64_t)c * a.chunk : tp_pipe_slot(a, w.peer, a.rank, 0, number), stage, (bytes + 15) & ~15u);
			tp_bulk_commit();
			tp_bulk_read<0>();
		}
		tp_warp_sync();
		next = tp_pipe_bytes(a, w.part, c + w.warps);
		if (!first) continue;
		if (next && aligned && next % 16 == 0) tp_bulk_load(stage, tp_pipe_at(a, w.part, c + w.warps), next, bar);
		tp_bulk_stored<0>();
		tp_pipe_tell(a, 0, w.peer, number, w.part.tag, to_buffer);
	}
	if (first) p.block->parity[self] = parity;
	tp_warp_sync();
	return true;
}

/* False: it was stopped. */
TP_FAR bool tp_stream_collect_chunks(const tp_stream_pipe p, const tp_stream_chunks w)
{
	const tp_pipe_args &a = *p.args;
	const bool first = tp_pipe_lane() == 0, aligned = w.part.at % 16 == 0;
	const uint32_t self = (uint32_t)tp_thread() / TP_WARP;
	char *const stage = p.stages + w.warp * a.chunk;
	uint32_t parity = p.block->parity[self];
	bool straight = false, stopped = false;
	TP_NO_UNROLL
	for (uint32_t c = w.warp; c < w.part.chunks; c += w.warps) {
		const uint32_t number = w.number + c + 1, bytes = tp_pipe_bytes(a, w.part, c);
		const uint32_t came = first ? tp_pipe_await(&p.block->stopped, a, 0, w.peer, number, w.part.tag, TP_BLOCK_SIZE) : (uint32_t)TP_PIPE_CAME;
		stopped = tp_warp_any(came == TP_PIPE_STOP);
		if (stopped) break;
		const bool ring = tp_warp_all(came == TP_PIPE_CAME), bulk = ring && aligned && bytes % 16 == 0;
		const char *from = tp_pipe_slot(a, a.rank, w.peer, 0, number);
		char *to = (char *)tp_pipe_at(a, w.part, c);
		straight |= !ring;
		if (ring && !bulk) tp_stream_copy_chunk(from, to, bytes);
		tp_warp_sync();
		if (bulk && first) {
			tp_bulk_acquired();
			tp_bulk_load(stage, from, bytes, &p.block->loaded[self]);
			tp_bulk_loaded(&p.block->loaded[self], parity);
		}
		parity ^= bulk;
		if (!first) continue;
		tp_pipe_consumed(a, 0, w.peer, number);
		if (!bulk) continue;
		tp_bulk_store(to, stage, bytes);
		tp_bulk_commit();
		tp_bulk_read<0>();
	}
	tp_bulk_stored<0>();
	if (straight && first && w.warp == 0) tp_offer_count(tp_pipe_comm(a));
	if (first) p.block->parity[self] = parity;
	tp_warp_sync();
	return !stopped;
}

/* A large transfer. by_lines: its first units are this channel's. number: of the last chunk before it. chunks: that it has here. */
struct tp_stream_piped { tp_stream_state state; uint32_t chunks; };
TP_FAR tp_stream_piped tp_stream_move_piped(const tp_stream stream, const tp_stream_pipe p, const tp_dev_streams_head &h, const tp_dev_stream &t, bool by_lines,
	uint32_t number)
{
	const tp_pipe_args &a = *p.args;
	const tp_pipe_part part = tp_stream_piped_part(a, t);
	const bool offers = h.table && t.bytes >= h.offers_from && part.chunks;
	const uint64_t stamp = (number + 1) | (uint64_t)((part.tag ^ part.tag >> 16) & 0xffffu) << 32;
	uint32_t warps = t.is_send ? a.pushers : a.collectors;
	tp_stream s = stream;
	if (warps > p.nstages) warps = p.nstages;
	/* Threads copy without a stage. */
	if (!t.is_send && part.at % 16) warps = TP_PIPE_DEPTH;
	if (warps > s.warps) warps = s.warps;
	const tp_stream_chunks w = { part, stamp, number, s.warp, warps, t.peer, offers };
	if (!t.is_send && offers) {
		tp_stream_meet(s);
		if (tp_stream_first(s)) tp_offer_make(tp_pipe_offer(a, t.peer, a.rank), tp_offer_stands(a.table, a.rank, part.offer, part.at), part.offer, 0, stamp);
	}
	if (by_lines && t.is_send) tp_stream_send(s, t, 0, TP_DEV_STREAM_PIPED_UNITS);
	else if (by_lines) tp_stream_receive(s, t, 0, TP_DEV_STREAM_PIPED_UNITS);
	s.stopped = tp_warp_any(s.stopped);
	if (!s.stopped && s.warp < warps) s.stopped = !(t.is_send ? tp_stream_push_chunks(p, w) : tp_stream_collect_chunks(p, w));
	return { { s.count, s.seen, s.stopped }, part.chunks };
}

TP_DEVICE void tp_stream_pipes_begin(tp_stream_pipes &sh)
{
	TP_NO_UNROLL
	for (int i = tp_thread(); i < TP_STREAM_WARPS; i += tp_threads()) {
		tp_bulk_init(&sh.loaded[i]);
		sh.parity[i] = 0;
	}
	if (tp_thread() == 0) sh.stopped = 0;
}

#endif

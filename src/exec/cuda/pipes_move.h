/* Large messages: chunks without flags in them, pushed through shared memory by bulk copies into rings at the receiver (pipes_ring.h), so that links carry
 * data alone and no thread of the sender waits for its stores.
 *
 * A block's warps have parts of their own, and none waits for another but for its data:
 *   push     INPUT's slices, through shared memory, to those they belong to (phase 0)
 *   feed     what has come in phase 0, and one's own, to shared memory
 *   reduce   that to a tile there
 *   send     tiles to OUTPUT and to those who want the result (phase 1)
 *   collect  what has come (phase 1; phase 0 where nothing is reduced), through shared memory, to OUTPUT
 * All but reduce is done by bulk copies, which have more under way than threads could and leave them nothing to do. Each part has several warps, each
 * with chunks of its own, one at a time from its load to its flag: while one waits for its stores to arrive, which takes as long as the link is busy,
 * others' are under way, and no flag waits for a later chunk. The threads of a warp that pushes, feeds or sends have a peer each; a warp that
 * collects has one peer.
 *
 * Where nothing is reduced, receivers offer their buffers (offers.h), in the line of the heads. A chunk that is pushed in bulk to a buffer that was
 * offered goes there, and its flag says so in its lowest bit; the rest of the protocol is the same.
 *
 * No two ranks can wait for each other: a chunk of phase 0 waits for room, which an earlier chunk's reduction makes, which needs earlier
 * chunks of all; and whoever waits has published what it stored. In place nothing is written before it was read: what comes
 * to a place of OUTPUT in phase 1 is made of what was pushed from there. */
#ifndef TP_EXEC_CUDA_PIPES_MOVE_H
#define TP_EXEC_CUDA_PIPES_MOVE_H

#include "exec/cuda/pipes_ring.h"

struct tp_pipes_shared {
	tp_pipe_part push[TP_PIPE_PEERS], collect[TP_PIPE_PEERS], own;      /* own: INPUT's part that is reduced here */
	uint64_t loaded[TP_PIPE_PEERS][TP_PIPE_PUSHERS];    /* barriers of bulk loads: that are pushed, */
	uint64_t fed[TP_PIPE_DEPTH][TP_PIPE_RANKS], collected[TP_PIPE_COLLECTORS];          /* fed, collected */
	uint32_t sent[2][TP_PIPE_PEERS], received[2][TP_PIPE_PEERS];
	uint32_t seen[2][TP_PIPE_PUSHERS][TP_PIPE_PEERS][TP_PIPE_DEPTH];    /* of heads: each pushing or sending warp's view */
	uint32_t go[1 + TP_PIPE_COLLECTORS];        /* of each group: its first thread's word to the others */
	uint64_t straight[TP_PIPE_PUSHERS][TP_PIPE_PEERS];  /* where each peer's buffer takes this block's part, as each pushing warp knows it; 0: ring */
	uint32_t ready[TP_PIPE_DEPTH];              /* by each feeder: the chunk that it has fed last, and 1 */
	uint32_t made, freed[TP_PIPE_TILES];        /* chunks reduced to tiles; of each tile, chunks that have been sent from it */
	uint32_t stopped;
};

/* A group of warps. */
struct tp_pipe_group { int number, thread, warps; };

TP_DEVICE int tp_pipe_peer(const tp_pipe_args &a, int q) { int p = a.rank + 1 + q; return p < a.nranks ? p : p - a.nranks; }
TP_DEVICE bool tp_pipe_has(uint32_t mask, int rank) { return mask >> rank & 1; }
/* What goes to a peer. */
TP_DEVICE const tp_pipe_part &tp_pipe_sent(const tp_pipes_shared &sh, int phase, int q) { return phase ? sh.own : sh.push[q]; }

TP_DEVICE void tp_pipe_meet(const tp_pipe_group &g)
{
	tp_warp_sync();
	if (g.warps > 1) tp_group_sync(1 + g.number, g.warps * TP_WARP);
}

/* Where chunk c goes in a peer's own buffer, or NULL: to the ring. */
TP_DEVICE char *tp_pipe_straight(const tp_pipes_shared &sh, const tp_pipe_args &a, int number, int q, uint32_t c)
{
	if (!a.offers || !sh.straight[number][q]) return nullptr;
	const uint32_t bytes = tp_pipe_bytes(a, sh.push[q], c);
	return bytes && bytes % 16 == 0 ? (char *)sh.straight[number][q] + (uint64_t)c * a.chunk : nullptr;
}

/* Chunk c has arrived, as this warp's threads know, each of its peer. */
TP_DEVICE void tp_pipe_publish(const tp_pipes_shared &sh, const tp_pipe_args &a, int phase, int warp, uint32_t to, uint32_t c)
{
	TP_NO_UNROLL
	for (int q = tp_pipe_lane(); q < a.nranks - 1; q += TP_WARP) {
		const int p = tp_pipe_peer(a, q);
		const uint32_t number = sh.sent[phase][q] + c + 1;
		const tp_pipe_part &part = tp_pipe_sent(sh, phase, q);
		if (!tp_pipe_has(to, p) || c >= part.chunks) continue;
		const bool straight = phase == 0 && tp_pipe_straight(sh, a, warp, q, c);
		tp_pipe_tell(a, phase, p, number, part.tag, straight);
	}
}

/* The same as this warp has seen it. */
TP_DEVICE bool tp_pipe_was_read(tp_pipes_shared &sh, const tp_pipe_args &a, int phase, int warp, int q, uint32_t number)
{
	uint32_t *seen = &sh.seen[phase][warp][q][number % TP_PIPE_DEPTH];
	if ((int32_t)(number - *seen) <= 0) return true;
	*seen = tp_load_read(tp_pipe_head(a, a.rank, tp_pipe_peer(a, q), phase, number));        /* stored by tp_pipe_consumed */
	return (int32_t)(number - *seen) <= 0;
}

/* Until chunk c has room at all that it goes to. False: stop. */
TP_DEVICE bool tp_pipe_await_room(tp_pipes_shared &sh, const tp_pipe_args &a, int phase, int number, uint32_t to, uint32_t c)
{
	for (unsigned turn = 0;; turn++) {
		bool ok = true;
		TP_NO_UNROLL
		for (int q = tp_pipe_lane(); q < a.nranks - 1; q += TP_WARP) {
			const int p = tp_pipe_peer(a, q);
			const uint32_t sent = sh.sent[phase][q];
			if (!tp_pipe_has(to, p) || c >= tp_pipe_sent(sh, phase, q).chunks) continue;
			/* A chunk of this kernel that had its place; before there is one, all of kernels before, in both phases. */
			if (c >= a.slots) ok &= tp_pipe_was_read(sh, a, phase, number, q, sent + c + 1 - a.slots);
			else
				for (uint32_t d = 0; d < TP_PIPE_DEPTH; d++)
					ok &= tp_pipe_was_read(sh, a, phase, number, q, sent - d) & tp_pipe_is_read(a, phase ^ 1, p, sh.sent[phase ^ 1][q] - d);
		}
		if (tp_warp_all(ok)) return true;
		if (tp_warp_any(!tp_pipe_wait(&sh.stopped, a, turn))) return false;
	}
}

/* ---- push ---- */

TP_DEVICE char *tp_pipe_stage(const tp_pipe_args &a, char *stages, int q, int number)
{ return stages + ((a.fans ? 0u : (uint32_t)q * a.pushers) + (uint32_t)number) * a.chunk; }

/* Which chunks are loaded in bulk: from the first on, as long as they are whole. */
TP_DEVICE bool tp_pipe_is_bulk(const tp_pipe_args &a, uint32_t bytes) { return a.aligned && bytes && bytes % 16 == 0; }

/* One load serves all peers (a.fans) or each has its own. */
TP_DEVICE bool tp_pipe_loads(const tp_pipe_args &a, int q) { return a.fans ? q == 0 : tp_pipe_has(a.push_to, tp_pipe_peer(a, q)); }

TP_DEVICE void tp_pipe_fetch(tp_pipes_shared &sh, const tp_pipe_args &a, char *stages, int number, uint32_t c)
{
	TP_NO_UNROLL
	for (int q = tp_pipe_lane(); q < a.nranks - 1; q += TP_WARP) {
		if (!tp_pipe_loads(a, q)) continue;
		const uint32_t bytes = tp_pipe_bytes(a, sh.push[q], c);
		if (tp_pipe_is_bulk(a, bytes)) tp_bulk_load(tp_pipe_stage(a, stages, q, number), tp_pipe_at(a, sh.push[q], c), bytes, &sh.loaded[q][number]);
	}
}

/* Until a chunk's bulk loads have come. False: some of it isn't loaded in bulk. */
TP_DEVICE bool tp_pipe_loaded(tp_pipes_shared &sh, const tp_pipe_args &a, int number, uint32_t c, uint32_t parity)
{
	bool all = true;
	TP_NO_UNROLL
	for (int q = a.fans ? 0 : tp_pipe_lane(); q < (a.fans ? 1 : a.nranks - 1); q += TP_WARP) {
		if (!tp_pipe_loads(a, q)) continue;
		const uint32_t bytes = tp_pipe_bytes(a, sh.push[q], c);
		const bool bulk = tp_pipe_is_bulk(a, bytes);
		if (bulk) tp_bulk_loaded(&sh.loaded[q][number], parity);
		all &= bulk || !bytes;
	}
	return all;
}

/* What can't be loaded in bulk is loaded by the warp, what is to be scaled is scaled by it. */
template <class R>
TP_FAR void tp_pipe_finish(tp_pipes_shared &sh, const tp_pipe_args &a, const R &reduction, char *stages, int number, uint32_t c)
{
	TP_NO_UNROLL
	for (int q = 0; q < a.nranks - 1; q++) {
		if (!tp_pipe_loads(a, q)) continue;
		const uint32_t bytes = tp_pipe_bytes(a, sh.push[q], c);
		const bool bulk = tp_pipe_is_bulk(a, bytes);
		const char *from = tp_pipe_at(a, sh.push[q], c);
		char *stage = tp_pipe_stage(a, stages, q, number);
		if (bulk && !reduction.scales()) continue;
		TP_NO_UNROLL
		for (uint32_t i = (uint32_t)tp_pipe_lane() * 16; i < bytes; i += TP_WARP * 16) {
			tp_four v = bulk ? *(const tp_four *)(stage + i) : tp_user_load(from + i, bytes - i < 16 ? bytes - i : 16);
			if (reduction.scales()) v = reduction.scale(v);
			*(tp_four *)(stage + i) = v;
		}
	}
	tp_bulk_fence();
}

/* Until all that this rank pushes to have said where. A buffer that this rank hasn't got, or not at such a place, isn't used. False: stop. */
TP_FAR bool tp_pipe_take_offers(tp_pipes_shared &sh, const tp_pipe_args &a, int number)
{
	bool ok = true;
	TP_NO_UNROLL
	for (int q = tp_pipe_lane(); q < a.nranks - 1; q += TP_WARP) {
		const int p = tp_pipe_peer(a, q);
		uint64_t offset = 0;
		uint32_t index = 0;
		if (!tp_pipe_has(a.push_to, p)) continue;
		for (unsigned turn = 0; ok && !tp_offer_look(tp_pipe_offer(a, a.rank, p), sh.sent[0][q] + 1, &offset, &index); turn++) ok = tp_pipe_wait(&sh.stopped, a, turn);
		const uint64_t entry = ok ? tp_offer_entry(a.table, p, index) : 0;
		sh.straight[number][q] = entry && (entry + offset) % 16 == 0 ? entry + offset : 0;
	}
	tp_warp_sync();
	return tp_warp_all(ok);
}

/* Pushing warp `number`: every chunk of a.pushers from there on. chunks: of the peer with most. */
template <class R>
TP_DEVICE void tp_pipe_push(tp_pipes_shared &sh, const tp_pipe_args &a, const R &reduction, char *stages, int number, uint32_t chunks)
{
	uint32_t parity = 0;
	if (!a.push_to || (uint32_t)number >= chunks) return;
	tp_pipe_fetch(sh, a, stages, number, (uint32_t)number);
	if (a.offers && !tp_pipe_take_offers(sh, a, number)) {
		/* The block mustn't end while its memory is loaded to. */
		tp_pipe_loaded(sh, a, number, (uint32_t)number, 0);
		return;
	}
	TP_NO_UNROLL
	for (uint32_t c = (uint32_t)number; c < chunks; c += a.pushers, parity ^= 1) {
		const bool all_bulk = tp_pipe_loaded(sh, a, number, c, parity);
		tp_warp_sync();
		if (tp_warp_any(!all_bulk) || reduction.scales()) tp_pipe_finish(sh, a, reduction, stages, number, c);
		tp_warp_sync();
		if (!tp_pipe_await_room(sh, a, 0, number, a.push_to, c)) return;
		TP_NO_UNROLL
		for (int q = tp_pipe_lane(); q < a.nranks - 1; q += TP_WARP) {
			const int p = tp_pipe_peer(a, q);
			if (!tp_pipe_has(a.push_to, p)) continue;
			const uint32_t bytes = (tp_pipe_bytes(a, sh.push[q], c) + 15) & ~15u;
			char *straight = tp_pipe_straight(sh, a, number, q, c);
			if (bytes) tp_bulk_store(straight ? straight : tp_pipe_slot(a, p, a.rank, 0, sh.sent[0][q] + c + 1), tp_pipe_stage(a, stages, q, number), bytes);
		}
		tp_bulk_commit();
		tp_bulk_read<0>();
		tp_warp_sync();
		tp_pipe_fetch(sh, a, stages, number, c + a.pushers);
		tp_bulk_stored<0>();
		tp_pipe_publish(sh, a, 0, number, a.push_to, c);
	}
}

/* Where what is reduced here goes. */
TP_DEVICE char *tp_pipe_result(const tp_pipe_args &a, const tp_pipe &k)
{ return (char *)a.output + (uint64_t)(uint32_t)(a.gathers ? a.slice_of[a.rank] : 0) * a.out_stride + k.begin; }

#include "exec/cuda/pipes_reduce.h"

/* ---- send ---- */

/* Sending warp `number`: what is reduced to the tile of that number. */
TP_FAR void tp_pipe_send(tp_pipes_shared &sh, const tp_pipe_args &a, const tp_pipe &k, char *tiles, int number)
{
	const char *tile = tiles + (uint32_t)number * a.chunk;
	char *out = tp_pipe_result(a, k);
	TP_NO_UNROLL
	for (uint32_t c = (uint32_t)number; a.sources && c < k.chunks; c += a.tiles) {
		for (unsigned turn = 0; tp_warp_any(tp_block_load(&sh.made) <= c); turn++)
			if (tp_warp_any(!tp_pipe_wait(&sh.stopped, a, turn))) return;
		if (!tp_pipe_await_room(sh, a, 1, number, a.send_to, c)) return;
		const uint32_t bytes = tp_pipe_bytes(a, sh.own, c), whole = (bytes + 15) & ~15u;
		TP_NO_UNROLL
		for (int q = tp_pipe_lane(); q < a.nranks - 1; q += TP_WARP) {
			const int p = tp_pipe_peer(a, q);
			if (bytes && tp_pipe_has(a.send_to, p)) tp_bulk_store(tp_pipe_slot(a, p, a.rank, 1, sh.sent[1][q] + c + 1), tile, whole);
		}
		if (tp_pipe_lane() == 0 && a.stores && tp_pipe_is_bulk(a, bytes)) tp_bulk_store(out + (uint64_t)c * a.chunk, tile, bytes);
		tp_bulk_commit();
		tp_bulk_read<0>();
		tp_warp_sync();
		if (tp_pipe_lane() == 0) tp_block_set(&sh.freed[number], c / a.tiles + 1);     /* seen by tp_pipe_reduce */
		if (!a.send_to) continue;
		tp_bulk_stored<0>();
		tp_pipe_publish(sh, a, 1, number, a.send_to, c);
	}
	tp_bulk_stored<0>();
}

/* ---- collect ---- */

/* What is offered to a peer: this part's place. */
TP_DEVICE void tp_pipe_make_offer(const tp_pipes_shared &sh, const tp_pipe_args &a, int phase, int q)
{
	const tp_pipe_part &part = sh.collect[q];
	tp_offer_make(tp_pipe_offer(a, tp_pipe_peer(a, q), a.rank), tp_offer_stands(a.table, a.rank, part.offer, part.at), part.offer, 0, sh.received[phase][q] + 1);
}

/* By a group of warps, chunk by chunk: what isn't aligned. */
TP_FAR void tp_pipe_collect(tp_pipes_shared &sh, const tp_pipe_args &a, int phase, int q, const tp_pipe_group &g)
{
	const tp_pipe_part &part = sh.collect[q];
	bool straight = false;
	if (a.offers && g.thread == 0) tp_pipe_make_offer(sh, a, phase, q);
	TP_NO_UNROLL
	for (uint32_t c = 0; c < part.chunks; c++) {
		if (g.thread == 0) sh.go[g.number] = tp_pipe_await(&sh.stopped, a, phase, tp_pipe_peer(a, q), sh.received[phase][q] + c + 1, part.tag, TP_BLOCK_TAG);
		tp_pipe_meet(g);
		const uint32_t came = sh.go[g.number];
		if (came == TP_PIPE_STOP) return;
		straight |= came == TP_PIPE_CAME_STRAIGHT;
		if (came == TP_PIPE_CAME)
			tp_pipe_copy<6, true>(tp_pipe_slot(a, a.rank, tp_pipe_peer(a, q), phase, sh.received[phase][q] + c + 1), (char *)tp_pipe_at(a, part, c),
				tp_pipe_bytes(a, part, c), a.aligned, g.thread, g.warps * TP_WARP);
		tp_pipe_meet(g);
		if (g.thread == 0) tp_pipe_consumed(a, phase, tp_pipe_peer(a, q), sh.received[phase][q] + c + 1);
	}
	if (straight && g.thread == 0) tp_offer_count(tp_pipe_comm(a));
}

/* By warp `number` of a.collectors, in bulk: every a.collectors'th chunk. The chunk is free as soon as it is in `stage`. */
TP_FAR void tp_pipe_collect_bulk(tp_pipes_shared &sh, const tp_pipe_args &a, int phase, int q, char *stage, int number)
{
	const tp_pipe_part &part = sh.collect[q];
	const int index = q * a.collectors + number;
	const bool first = tp_pipe_lane() == 0;
	const tp_pipe_group g = { 1 + index, tp_pipe_lane(), 1 };
	uint32_t parity = 0;
	bool straight = false;
	if (a.offers && first && number == 0) tp_pipe_make_offer(sh, a, phase, q);
	TP_NO_UNROLL
	for (uint32_t c = (uint32_t)number; c < part.chunks; c += a.collectors) {
		if (first) sh.go[g.number] = tp_pipe_await(&sh.stopped, a, phase, tp_pipe_peer(a, q), sh.received[phase][q] + c + 1, part.tag, TP_BLOCK_TAG);
		tp_pipe_meet(g);
		const uint32_t came = sh.go[g.number], bytes = tp_pipe_bytes(a, part, c);
		const char *from = tp_pipe_slot(a, a.rank, tp_pipe_peer(a, q), phase, sh.received[phase][q] + c + 1);
		char *to = (char *)tp_pipe_at(a, part, c);
		const bool bulk = came == TP_PIPE_CAME && tp_pipe_is_bulk(a, bytes);
		if (came == TP_PIPE_STOP) break;
		straight |= came == TP_PIPE_CAME_STRAIGHT;
		if (bulk && first) {
			tp_bulk_acquired();
			tp_bulk_load(stage, from, bytes, &sh.collected[index]);
			tp_bulk_loaded(&sh.collected[index], parity);
		}
		parity ^= bulk;
		if (came == TP_PIPE_CAME && !bulk) tp_pipe_copy_some(from, to, bytes, true, tp_pipe_lane(), TP_WARP);
		tp_pipe_meet(g);
		if (!first) continue;
		tp_pipe_consumed(a, phase, tp_pipe_peer(a, q), sh.received[phase][q] + c + 1);
		if (!bulk) continue;
		tp_bulk_store(to, stage, bytes);
		tp_bulk_commit();
		tp_bulk_read<0>();
	}
	tp_bulk_stored<0>();
	if (straight && first && number == 0) tp_offer_count(tp_pipe_comm(a));
}

/* What a rank gives to itself: `slices` of them, from INPUT to OUTPUT. */
TP_FAR void tp_pipe_keep(const tp_pipe_args &a, const tp_pipe &k, int slices, int thread, int threads)
{
	TP_NO_UNROLL
	for (int s = 0; s < slices; s++) {
		const int slice = slices > 1 ? s : a.keep_slice, place = slices > 1 ? s : a.keep_place;
		const char *from = (const char *)a.input + (uint64_t)(uint32_t)slice * a.in_stride;
		char *to = (char *)a.output + (uint64_t)(uint32_t)place * a.out_stride;
		uint64_t end = a.total_bytes - (uint64_t)(uint32_t)slice * a.in_stride, first = (uint64_t)(uint32_t)slice * a.in_stride;
		end = first >= a.total_bytes ? 0 : end < a.slice_bytes ? end : a.slice_bytes;
		if (from == to || k.begin >= end) continue;
		const uint64_t left = end - k.begin;
		tp_pipe_copy<4, false>(from + k.begin, to + k.begin, left < k.bytes ? left : k.bytes, a.aligned, thread, threads);
	}
}

/* ---- kernels ---- */

/* Of a slice; slices end at total_bytes. */
TP_DEVICE tp_pipe_part tp_pipe_slice(const tp_pipe_args &a, const tp_pipe &k, uint64_t base, int slice, int place, uint64_t stride)
{
	const uint64_t first = (uint64_t)(uint32_t)slice * a.in_stride, offset = (uint64_t)(uint32_t)place * stride + k.begin;
	uint64_t end = first >= a.total_bytes ? 0 : a.total_bytes - first;
	if (end > a.slice_bytes) end = a.slice_bytes;
	const uint64_t left = end > k.begin ? end - k.begin : 0;
	return { base + offset, left < k.bytes ? left : k.bytes, k.chunks, a.tag, { a.offer.offset + offset, a.offer.index, 0 } };
}

/* Counters, heads, barriers. The block meets after it. */
TP_DEVICE void tp_pipe_open(tp_pipes_shared &sh, const tp_pipe_args &a)
{
	TP_NO_UNROLL
	for (int i = tp_thread(); i < 2 * (a.nranks - 1); i += tp_threads()) {
		const int phase = i % 2, q = i / 2;
		const uint32_t *counter = tp_pipe_counter(a, phase, tp_pipe_peer(a, q));
		sh.sent[phase][q] = counter[0];
		sh.received[phase][q] = counter[1];
		TP_NO_UNROLL
		for (uint32_t head = 0; head < TP_PIPE_DEPTH; head++) {
			const uint32_t seen = tp_load_read(tp_pipe_head(a, a.rank, tp_pipe_peer(a, q), phase, head));
			TP_NO_UNROLL
			for (int w = 0; w < TP_PIPE_PUSHERS; w++) sh.seen[phase][w][q][head] = seen;
		}
	}
	TP_NO_UNROLL
	for (int i = tp_thread(); i < TP_PIPE_PEERS * TP_PIPE_PUSHERS; i += tp_threads()) tp_bulk_init(&sh.loaded[i / TP_PIPE_PUSHERS][i % TP_PIPE_PUSHERS]);
	TP_NO_UNROLL
	for (int i = tp_thread(); i < TP_PIPE_DEPTH * TP_PIPE_RANKS; i += tp_threads()) tp_bulk_init(&sh.fed[i / TP_PIPE_RANKS][i % TP_PIPE_RANKS]);
	TP_NO_UNROLL
	for (int i = tp_thread(); i < TP_PIPE_COLLECTORS; i += tp_threads()) tp_bulk_init(&sh.collected[i]);
	if (tp_thread() == 0) {
		sh.made = 0;
		TP_UNROLL
		for (int d = 0; d < TP_PIPE_DEPTH; d++) sh.ready[d] = 0;
		TP_UNROLL
		for (int t = 0; t < TP_PIPE_TILES; t++) sh.freed[t] = 0;
		sh.stopped = tp_load_relaxed(&tp_pipe_comm(a)->stop);
	}
}
/* A collective's. moves: nothing is reduced, and what comes from a peer goes to its place. */
TP_DEVICE tp_pipe tp_pipe_begin(tp_pipes_shared &sh, const tp_pipe_args &a, bool moves)
{
	const tp_pipe k = tp_pipe_share(a.lines_each, a.lines_more, a.chunk);
	tp_pipe_open(sh, a);
	TP_NO_UNROLL
	for (int q = tp_thread(); q < a.nranks - 1; q += tp_threads()) {
		const int p = tp_pipe_peer(a, q), slice = a.slice_of[p], from = a.fans ? 0 : slice;
		sh.push[q] = tp_pipe_slice(a, k, a.input, from, from, a.in_stride);
		sh.collect[q] = tp_pipe_slice(a, k, a.output, moves ? 0 : slice, moves ? p : slice, a.out_stride);
	}
	if (tp_thread() == 0) sh.own = tp_pipe_slice(a, k, a.input, a.slice_of[a.rank], a.slice_of[a.rank], a.in_stride);
	tp_block_sync();
	return k;
}

/* sent, received: ranks that this one pushed or sent to, and heard from, in a phase. */
TP_DEVICE void tp_pipe_end(tp_pipes_shared &sh, const tp_pipe_args &a, const uint32_t *sent, const uint32_t *received)
{
	tp_block_sync();
	TP_NO_UNROLL
	for (int i = tp_thread(); i < 2 * (a.nranks - 1); i += tp_threads()) {
		const int phase = i % 2, q = i / 2, p = tp_pipe_peer(a, q);
		uint32_t *counter = tp_pipe_counter(a, phase, tp_pipe_peer(a, q));
		if (tp_pipe_has(sent[phase], p)) counter[0] = sh.sent[phase][q] + tp_pipe_sent(sh, phase, q).chunks;
		if (tp_pipe_has(received[phase], p)) counter[1] = sh.received[phase][q] + (a.sources && phase == 0 ? sh.own : sh.collect[q]).chunks;
	}
	if (a.counts) tp_kernel_end(tp_pipe_comm(a));
}

/* Warp `warp` of those that serve a peer, in bulk or together. */
TP_DEVICE void tp_pipe_run_collectors(tp_pipes_shared &sh, const tp_pipe_args &a, int phase, int q, char *stages, int warp)
{
	if (q >= a.nranks - 1 || !tp_pipe_has(a.collect_from, tp_pipe_peer(a, q))) return;
	if (a.collectors) {
		tp_pipe_collect_bulk(sh, a, phase, q, stages + (uint32_t)(q * a.collectors + warp) * a.chunk, warp);
	} else {
		const tp_pipe_group g = { 1 + q, warp * TP_WARP + tp_pipe_lane(), a.collect_warps };
		tp_pipe_collect(sh, a, phase, q, g);
	}
}

/* Warps: a.pushers, a.feeders, a.tiles that send, a.reduce_warps, then those that collect, for each peer. Shared memory: stages of pushers and
 * feeders, tiles, stages of collectors. */
template <class R>
TP_DEVICE void tp_pipes_run(tp_pipes_shared &sh, char *memory, const tp_pipe_args &a)
{
	const R reduction(a.reduce);
	const tp_pipe k = tp_pipe_begin(sh, a, false);
	const int warp = tp_thread() / TP_WARP, senders = a.pushers + a.feeders, reducers = senders + a.tiles, collectors = reducers + a.reduce_warps;
	char *feeds = memory + (uint32_t)(a.nranks - 1) * a.pushers * a.chunk, *tiles = feeds + (uint32_t)a.nranks * a.feeders * a.chunk;
	if (warp < a.pushers) {
		tp_pipe_push(sh, a, reduction, memory, warp, k.chunks);
	} else if (warp < senders) {
		tp_pipe_feed(sh, a, feeds, warp - a.pushers);
	} else if (warp < reducers) {
		tp_pipe_send(sh, a, k, tiles, warp - senders);
	} else if (warp < collectors) {
		const tp_pipe_group g = { 0, tp_thread() - reducers * TP_WARP, a.reduce_warps };
		if (a.sources) tp_pipe_reduce(sh, a, k, reduction, feeds, tiles, g);
		else if (a.keeps) tp_pipe_keep(a, k, a.keeps, g.thread, g.warps * TP_WARP);
	} else {
		const int each = a.collectors ? a.collectors : a.collect_warps, i = warp - collectors;
		if (each) tp_pipe_run_collectors(sh, a, 1, i / each, tiles + a.tiles * a.chunk, i % each);
	}
	const uint32_t sent[2] = { a.push_to, a.send_to }, received[2] = { a.sources, a.collect_from };
	tp_pipe_end(sh, a, sent, received);
}

/* What only moves, after the beginning. Warps: a.pushers, those that collect, for each peer, and the rest for what a rank keeps. Shared memory:
 * stages of pushers, of collectors. */
TP_DEVICE void tp_pipes_move(tp_pipes_shared &sh, char *memory, const tp_pipe_args &a, const tp_pipe &k)
{
	const int warp = tp_thread() / TP_WARP, each = a.collectors ? a.collectors : a.collect_warps, i = warp - a.pushers, keepers = each * (a.nranks - 1);
	if (warp < a.pushers) tp_pipe_push(sh, a, tp_raw(), memory, warp, k.chunks);
	else if (i < keepers) tp_pipe_run_collectors(sh, a, 0, i / each, memory + (uint32_t)(a.fans ? 1 : a.nranks - 1) * a.pushers * a.chunk, i % each);
	else if (a.keeps) tp_pipe_keep(a, k, 1, (i - keepers) * TP_WARP + tp_pipe_lane(), tp_threads() - (a.pushers + keepers) * TP_WARP);
	const uint32_t sent[2] = { a.push_to, 0 }, received[2] = { a.collect_from, 0 };
	tp_pipe_end(sh, a, sent, received);
}
TP_DEVICE void tp_pipes_run_move(tp_pipes_shared &sh, char *memory, const tp_pipe_args &a) { tp_pipes_move(sh, memory, a, tp_pipe_begin(sh, a, true)); }

#endif

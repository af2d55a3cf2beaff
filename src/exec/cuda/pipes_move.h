/* Large messages: chunks without flags in them, pushed through shared memory by bulk copies, so that links carry data alone and no
 * thread of the sender waits for its stores. Each (peer, block) has two pipes here, one a phase: a ring of chunks that the peer writes, a flag for
 * each, and, in the sender's memory, how far the receiver has read.
 *
 * A block's warps have parts of their own, and none waits for another but for its data:
 *   push     INPUT's slices, stage by stage, to those they belong to (phase 0)
 *   reduce   what has come in phase 0, and one's own, to a tile in shared memory and to OUTPUT
 *   send     tiles to those who want the result (phase 1)
 *   collect  what has come (phase 1; phase 0 where nothing is reduced) to OUTPUT, a group of warps for each peer
 * The threads of a pushing or sending warp have a peer each.
 *
 * A chunk's number counts on for ever, kernel after kernel, so that no kernel has to meet another; it is the chunk's flag, beside the
 * call's tag. A flag is stored once the chunk's bulk copy has arrived. 32 bits are enough, as each flag is compared with the one number that
 * is due, and the reader is never a ring ahead.
 *
 * No two ranks can wait for each other: a chunk of phase 0 waits for room, which an earlier chunk's reduction makes, which needs earlier
 * chunks of all; whoever has to wait first publishes all that has been stored. In place nothing is written before it was read: what comes
 * to a place of OUTPUT in phase 1 is made of what was pushed from there. */
#ifndef TP_EXEC_CUDA_PIPES_MOVE_H
#define TP_EXEC_CUDA_PIPES_MOVE_H

#include "exec/cuda/lines_move.h"
#include "exec/cuda/pipes.h"

enum { TP_PIPE_LAG = 3 };           /* stores of a thread that are under way while it goes on */

struct tp_pipes_shared {
	uint64_t loaded[TP_PIPE_PEERS][TP_PIPE_STAGES];     /* barriers of bulk loads */
	uint64_t source[TP_PIPE_RANKS];             /* of the chunk that is reduced: where each rank's is */
	uint32_t sent[2][TP_PIPE_PEERS], seen[2][TP_PIPE_PEERS], received[2][TP_PIPE_PEERS];
	uint32_t go[1 + TP_PIPE_RANKS];             /* of each group: its first thread's word to the others */
	uint32_t made, freed;                       /* tiles: reduced; sent */
	uint32_t stopped;
};

/* This block's part of each slice. */
struct tp_pipe { uint64_t begin, bytes; uint32_t chunks; };
/* A group of warps. */
struct tp_pipe_group { int number, thread, warps; };

TP_DEVICE int tp_pipe_lane() { return tp_thread() % TP_WARP; }
TP_DEVICE int tp_pipe_peer(const tp_pipe_args &a, int q) { int p = a.rank + 1 + q; return p < a.nranks ? p : p - a.nranks; }
TP_DEVICE bool tp_pipe_has(uint32_t mask, int rank) { return mask >> rank & 1; }
TP_DEVICE tp_dev_comm *tp_pipe_comm(const tp_pipe_args &a) { return (tp_dev_comm *)a.comm; }
/* Two pipes: heads (one a phase), then flags of each phase, each in a line, then chunks of each. */
TP_DEVICE char *tp_pipe_place(const tp_pipe_args &a, int at, int from)
{ return (char *)a.rings[at] + ((uint64_t)(uint32_t)(from - (from > at)) * a.nchannels + (uint32_t)tp_block()) * a.pipe_bytes; }
TP_DEVICE uint32_t *tp_pipe_head(const tp_pipe_args &a, int sender, int receiver, int phase) { return (uint32_t *)tp_pipe_place(a, sender, receiver) + phase; }
TP_DEVICE uint64_t *tp_pipe_flag(const tp_pipe_args &a, int receiver, int sender, int phase, uint32_t number)
{ return (uint64_t *)(tp_pipe_place(a, receiver, sender) + 128 + phase * 128) + number % TP_PIPE_SLOTS; }
TP_DEVICE char *tp_pipe_slot(const tp_pipe_args &a, int receiver, int sender, int phase, uint32_t number)
{ return tp_pipe_place(a, receiver, sender) + 384 + ((uint32_t)phase * TP_PIPE_SLOTS + number % TP_PIPE_SLOTS) * a.chunk; }

/* Bytes of a chunk of a slice; slices end at total_bytes. */
TP_DEVICE uint32_t tp_pipe_bytes(const tp_pipe_args &a, const tp_pipe &k, int slice, uint32_t c)
{
	const uint64_t in = (uint64_t)c * a.chunk, at = k.begin + in, first = (uint64_t)(uint32_t)slice * a.in_stride;
	uint64_t end = first >= a.total_bytes ? 0 : a.total_bytes - first;
	if (end > a.slice_bytes) end = a.slice_bytes;
	uint64_t n = end > at ? end - at : 0;
	if (n > k.bytes - in) n = k.bytes - in;
	return n < a.chunk ? (uint32_t)n : a.chunk;
}

/* A turn in vain. False: stop. */
TP_DEVICE bool tp_pipe_wait(tp_pipes_shared &sh, const tp_pipe_args &a, unsigned turn)
{
	tp_lines_delay();
	if (tp_block_load(&sh.stopped)) return false;
	if (tp_block_stopped(tp_pipe_comm(a), turn)) {
		tp_block_set(&sh.stopped, 1);
		return false;
	}
	tp_nap(turn, a.gives_way);
	return true;
}

TP_DEVICE void tp_pipe_meet(const tp_pipe_group &g)
{
	tp_warp_sync();
	if (g.warps > 1) tp_group_sync(1 + g.number, g.warps * TP_WARP);
}

/* Flags of the chunks from *published on, up to `end`: they have arrived. */
TP_DEVICE void tp_pipe_publish(tp_pipes_shared &sh, const tp_pipe_args &a, int phase, uint32_t to, uint32_t *published, uint32_t end)
{
	TP_NO_UNROLL
	for (; *published < end; ++*published) {
		TP_NO_UNROLL
		for (int q = tp_pipe_lane(); q < a.nranks - 1; q += TP_WARP) {
			const int p = tp_pipe_peer(a, q);
			if (!tp_pipe_has(to, p)) continue;
			const uint32_t number = sh.sent[phase][q] + *published + 1;
			tp_store_release64(tp_pipe_flag(a, p, a.rank, phase, number), number | (uint64_t)a.tag << 32);      /* pairs with tp_pipe_await */
		}
	}
}

/* Until chunk c has room at all that it goes to. False: stop. */
TP_DEVICE bool tp_pipe_await_room(tp_pipes_shared &sh, const tp_pipe_args &a, int phase, uint32_t to, uint32_t c, uint32_t *published)
{
	for (unsigned turn = 0;; turn++) {
		bool ok = true;
		TP_NO_UNROLL
		for (int q = tp_pipe_lane(); q < a.nranks - 1; q += TP_WARP) {
			const int p = tp_pipe_peer(a, q);
			if (!tp_pipe_has(to, p) || (int32_t)(sh.sent[phase][q] + c + 1 - sh.seen[phase][q]) <= TP_PIPE_SLOTS) continue;
			sh.seen[phase][q] = tp_load_relaxed(tp_pipe_head(a, a.rank, p, phase));      /* stored by tp_pipe_consumed */
			ok &= (int32_t)(sh.sent[phase][q] + c + 1 - sh.seen[phase][q]) <= TP_PIPE_SLOTS;
		}
		if (tp_warp_all(ok)) return true;
		if (turn == 0) {
			tp_bulk_stored<0>();
			tp_pipe_publish(sh, a, phase, to, published, c);
		}
		if (tp_warp_any(!tp_pipe_wait(sh, a, turn))) return false;
	}
}

/* A thread's, until chunk c has come from a peer. False: stop. */
TP_DEVICE bool tp_pipe_await(tp_pipes_shared &sh, const tp_pipe_args &a, int phase, int q, uint32_t c)
{
	const int p = tp_pipe_peer(a, q);
	const uint32_t number = sh.received[phase][q] + c + 1;
	const uint64_t *flag = tp_pipe_flag(a, a.rank, p, phase, number);
	tp_lines_delay();
	for (unsigned turn = 0;; turn++) {
		const uint64_t found = tp_load_acquire64(flag);
		if ((uint32_t)found == number) {
			if (found >> 32 == a.tag) return true;
			tp_block_fault(tp_pipe_comm(a), TP_BLOCK_TAG, p, tp_block(), (uint32_t)(found >> 32), a.tag);
			tp_block_set(&sh.stopped, 1);
			return false;
		}
		if (!tp_pipe_wait(sh, a, turn)) return false;
	}
}
/* Chunk c of a peer has been read. What was read is in registers: no order is needed but that of the barrier before this. */
TP_DEVICE void tp_pipe_consumed(tp_pipes_shared &sh, const tp_pipe_args &a, int phase, int q, uint32_t c)
{ tp_store_relaxed(tp_pipe_head(a, tp_pipe_peer(a, q), a.rank, phase), sh.received[phase][q] + c + 1); }

/* ---- push ---- */

TP_DEVICE const char *tp_pipe_input(const tp_pipe_args &a, const tp_pipe &k, int slice, uint32_t c)
{ return (const char *)a.input + (uint64_t)(uint32_t)slice * a.in_stride + k.begin + (uint64_t)c * a.chunk; }
TP_DEVICE char *tp_pipe_stage(const tp_pipe_args &a, char *stages, int q, uint32_t c) { return stages + ((uint32_t)q * a.stages + c % a.stages) * a.chunk; }

/* Which chunks are loaded in bulk: from the first on, as long as they are whole. */
TP_DEVICE bool tp_pipe_is_bulk(const tp_pipe_args &a, uint32_t bytes) { return a.aligned && bytes && bytes % 16 == 0; }

/* One load serves all peers (a.fans) or each has its own. */
TP_DEVICE bool tp_pipe_loads(const tp_pipe_args &a, int q) { return a.fans ? q == 0 : tp_pipe_has(a.push_to, tp_pipe_peer(a, q)); }
TP_DEVICE int tp_pipe_push_slice(const tp_pipe_args &a, int q) { return a.fans ? 0 : a.slice_of[tp_pipe_peer(a, q)]; }

TP_DEVICE void tp_pipe_fetch(tp_pipes_shared &sh, const tp_pipe_args &a, const tp_pipe &k, char *stages, uint32_t c)
{
	if (c >= k.chunks) return;
	TP_NO_UNROLL
	for (int q = tp_pipe_lane(); q < a.nranks - 1; q += TP_WARP) {
		if (!tp_pipe_loads(a, q)) continue;
		const int slice = tp_pipe_push_slice(a, q);
		const uint32_t bytes = tp_pipe_bytes(a, k, slice, c);
		if (tp_pipe_is_bulk(a, bytes)) tp_bulk_load(tp_pipe_stage(a, stages, q, c), tp_pipe_input(a, k, slice, c), bytes, &sh.loaded[q][c % a.stages]);
	}
}

/* Until a chunk's bulk loads have come. False: some of it isn't loaded in bulk. */
TP_DEVICE bool tp_pipe_loaded(tp_pipes_shared &sh, const tp_pipe_args &a, const tp_pipe &k, uint32_t c)
{
	bool all = true;
	if (c >= k.chunks) return all;
	TP_NO_UNROLL
	for (int q = a.fans ? 0 : tp_pipe_lane(); q < (a.fans ? 1 : a.nranks - 1); q += TP_WARP) {
		if (!tp_pipe_loads(a, q)) continue;
		const bool bulk = tp_pipe_is_bulk(a, tp_pipe_bytes(a, k, tp_pipe_push_slice(a, q), c));
		if (bulk) tp_bulk_loaded(&sh.loaded[q][c % a.stages], c / a.stages % 2);
		all &= bulk;
	}
	return all;
}

/* What can't be loaded in bulk is loaded by the warp, what is to be scaled is scaled by it. */
template <class R>
TP_FAR void tp_pipe_finish(const tp_pipe_args &a, const tp_pipe &k, const R &reduction, char *stages, uint32_t c)
{
	TP_NO_UNROLL
	for (int q = 0; q < a.nranks - 1; q++) {
		if (!tp_pipe_loads(a, q)) continue;
		const int slice = tp_pipe_push_slice(a, q);
		const uint32_t bytes = tp_pipe_bytes(a, k, slice, c);
		const bool bulk = tp_pipe_is_bulk(a, bytes);
		const char *from = tp_pipe_input(a, k, slice, c);
		char *stage = tp_pipe_stage(a, stages, q, c);
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

template <class R>
TP_DEVICE void tp_pipe_push(tp_pipes_shared &sh, const tp_pipe_args &a, const tp_pipe &k, const R &reduction, char *stages)
{
	const uint32_t ahead = a.stages - 1;
	uint32_t published = 0;
	if (!a.push_to) return;
	TP_NO_UNROLL
	for (uint32_t c = 0; c < ahead; c++) tp_pipe_fetch(sh, a, k, stages, c);
	TP_NO_UNROLL
	for (uint32_t c = 0; c < k.chunks; c++) {
		const bool all_bulk = tp_pipe_loaded(sh, a, k, c);
		tp_warp_sync();
		if (tp_warp_any(!all_bulk) || reduction.scales()) tp_pipe_finish(a, k, reduction, stages, c);
		tp_warp_sync();
		if (!tp_pipe_await_room(sh, a, 0, a.push_to, c, &published)) {
			/* Loads that are under way come before the memory that they go to is another block's. */
			TP_NO_UNROLL
			for (uint32_t d = c + 1; d < c + ahead; d++) tp_pipe_loaded(sh, a, k, d);
			break;
		}
		TP_NO_UNROLL
		for (int q = tp_pipe_lane(); q < a.nranks - 1; q += TP_WARP) {
			const int p = tp_pipe_peer(a, q);
			if (!tp_pipe_has(a.push_to, p)) continue;
			const uint32_t bytes = (tp_pipe_bytes(a, k, tp_pipe_push_slice(a, q), c) + 15) & ~15u;
			if (bytes) tp_bulk_store(tp_pipe_slot(a, p, a.rank, 0, sh.sent[0][q] + c + 1), tp_pipe_stage(a, stages, a.fans ? 0 : q, c), bytes);
		}
		tp_bulk_commit();
		tp_bulk_read<1>();
		tp_warp_sync();
		tp_pipe_fetch(sh, a, k, stages, c + ahead);
		if (c < TP_PIPE_LAG) continue;
		tp_bulk_stored<TP_PIPE_LAG>();
		tp_pipe_publish(sh, a, 0, a.push_to, &published, c + 1 - TP_PIPE_LAG);
	}
	tp_bulk_stored<0>();
	if (!tp_warp_any(tp_block_load(&sh.stopped))) tp_pipe_publish(sh, a, 0, a.push_to, &published, k.chunks);
}

/* ---- reduce ---- */

/* Where it isn't a reduction: what comes from one source. */
struct tp_pipe_plain {
	struct acc { tp_four v; };
	TP_OF_OBJECT explicit tp_pipe_plain(const tp_dev_reduce &) { }
	TP_OF_OBJECT bool scales() const { return false; }
	TP_OF_OBJECT tp_four scale(tp_four v) const { return v; }
	TP_OF_OBJECT void first(acc &sum, const tp_four &v) const { sum.v = v; }
	TP_OF_OBJECT void more(acc &, const tp_four &) const { }
	TP_OF_OBJECT tp_four last(acc &sum) const { return sum.v; }
};

/* One chunk: all sources in rank order, four under way at once. */
template <class R>
TP_DEVICE void tp_pipe_reduce_chunk(tp_pipes_shared &sh, const tp_pipe_args &a, const R &reduction, char *tile, char *out, uint32_t bytes, int thread,
	int threads)
{
	const uint32_t sources = a.sources;
	TP_NO_UNROLL
	for (uint32_t i = (uint32_t)thread * 16; i < bytes; i += (uint32_t)threads * 16) {
		const uint32_t left = bytes - i < 16 ? bytes - i : 16;
		const bool whole = a.aligned && left == 16;
		typename R::acc sum;
		TP_NO_UNROLL
		for (int first = 0; first < a.nranks; first += 4) {
			tp_four v[4];
			TP_UNROLL
			for (int s = 0; s < 4; s++) {
				const int p = first + s;
				if (p >= a.nranks || !tp_pipe_has(sources, p)) continue;
				const char *from = (const char *)sh.source[p] + i;
				if (p != a.rank) v[s] = tp_load16(from);
				else v[s] = whole ? tp_load_user16(from) : tp_user_load(from, left);
			}
			TP_UNROLL
			for (int s = 0; s < 4; s++) {
				const int p = first + s;
				if (p >= a.nranks || !tp_pipe_has(sources, p)) continue;
				if (p == a.rank && reduction.scales()) v[s] = reduction.scale(v[s]);
				if (sources & ((1u << p) - 1)) reduction.more(sum, v[s]);
				else reduction.first(sum, v[s]);
			}
		}
		const tp_four result = reduction.last(sum);
		if (a.send_to) *(tp_four *)(tile + i) = result;
		if (whole) tp_store_user16(out + i, result);
		else tp_user_store(out + i, result, left);
	}
}

template <class R>
TP_DEVICE void tp_pipe_reduce(tp_pipes_shared &sh, const tp_pipe_args &a, const tp_pipe &k, const R &reduction, char *tiles, const tp_pipe_group &g)
{
	const int slice = a.slice_of[a.rank];
	char *to = (char *)a.output + (uint64_t)(uint32_t)(a.gathers ? slice : 0) * a.out_stride + k.begin;
	TP_NO_UNROLL
	for (uint32_t c = 0; c < k.chunks; c++) {
		if (g.thread < TP_WARP) {
			bool go = true;
			TP_NO_UNROLL
			for (int q = tp_pipe_lane(); q < a.nranks - 1; q += TP_WARP) {
				const int p = tp_pipe_peer(a, q);
				if (!tp_pipe_has(a.sources, p)) continue;
				go = go && tp_pipe_await(sh, a, 0, q, c);
				sh.source[p] = (uint64_t)(uintptr_t)tp_pipe_slot(a, a.rank, p, 0, sh.received[0][q] + c + 1);
			}
			for (unsigned turn = 0; go && a.send_to && c - tp_block_load(&sh.freed) >= a.tiles; turn++) go = tp_pipe_wait(sh, a, turn);
			go = tp_warp_all(go);
			if (tp_pipe_lane() == 0) {
				sh.source[a.rank] = (uint64_t)(uintptr_t)tp_pipe_input(a, k, slice, c);
				sh.go[g.number] = go;
			}
		}
		tp_pipe_meet(g);
		if (!sh.go[g.number]) return;
		tp_pipe_reduce_chunk(sh, a, reduction, tiles + c % a.tiles * a.chunk, to + (uint64_t)c * a.chunk, tp_pipe_bytes(a, k, slice, c), g.thread,
			g.warps * TP_WARP);
		tp_bulk_fence();
		tp_pipe_meet(g);
		if (g.thread >= TP_WARP) continue;
		if (tp_pipe_lane() == 0) tp_block_set(&sh.made, c + 1);     /* seen by tp_pipe_send */
		TP_NO_UNROLL
		for (int q = tp_pipe_lane(); q < a.nranks - 1; q += TP_WARP)
			if (tp_pipe_has(a.sources, tp_pipe_peer(a, q))) tp_pipe_consumed(sh, a, 0, q, c);
	}
}

/* ---- send ---- */

TP_FAR void tp_pipe_send(tp_pipes_shared &sh, const tp_pipe_args &a, const tp_pipe &k, char *tiles)
{
	const int slice = a.slice_of[a.rank];
	uint32_t published = 0;
	TP_NO_UNROLL
	for (uint32_t c = 0; c < k.chunks; c++) {
		bool go = true;
		for (unsigned turn = 0; go && tp_warp_any(tp_block_load(&sh.made) <= c); turn++) {
			if (turn == 0) {
				tp_bulk_stored<0>();
				tp_warp_sync();
				if (tp_pipe_lane() == 0) tp_block_set(&sh.freed, c);
				tp_pipe_publish(sh, a, 1, a.send_to, &published, c);
			}
			go = tp_warp_all(tp_pipe_wait(sh, a, turn));
		}
		if (!go || !tp_pipe_await_room(sh, a, 1, a.send_to, c, &published)) break;
		const uint32_t bytes = (tp_pipe_bytes(a, k, slice, c) + 15) & ~15u;
		TP_NO_UNROLL
		for (int q = tp_pipe_lane(); q < a.nranks - 1; q += TP_WARP) {
			const int p = tp_pipe_peer(a, q);
			if (bytes && tp_pipe_has(a.send_to, p)) tp_bulk_store(tp_pipe_slot(a, p, a.rank, 1, sh.sent[1][q] + c + 1), tiles + c % a.tiles * a.chunk, bytes);
		}
		tp_bulk_commit();
		tp_bulk_read<1>();
		tp_warp_sync();
		if (tp_pipe_lane() == 0) tp_block_set(&sh.freed, c);        /* seen by tp_pipe_reduce */
		if (c < TP_PIPE_LAG) continue;
		tp_bulk_stored<TP_PIPE_LAG>();
		tp_pipe_publish(sh, a, 1, a.send_to, &published, c + 1 - TP_PIPE_LAG);
	}
	tp_bulk_stored<0>();
	if (!tp_warp_any(tp_block_load(&sh.stopped))) tp_pipe_publish(sh, a, 1, a.send_to, &published, k.chunks);
}

/* ---- collect ---- */

/* Copies of one's own memory, 16 bytes at a time where both are aligned. */
template <int U>
TP_DEVICE void tp_pipe_copy(const char *from, char *to, uint64_t bytes, bool aligned, bool near, int thread, int threads)
{
	const uint64_t step = (uint64_t)threads * 16;
	TP_NO_UNROLL
	for (uint64_t i = (uint64_t)thread * 16; i < bytes; i += U * step) {
		tp_four v[U];
		TP_UNROLL
		for (int u = 0; u < U; u++) {
			const uint64_t at = i + u * step;
			if (at >= bytes) continue;
			if (near) v[u] = tp_load16(from + at);
			else v[u] = aligned && bytes - at >= 16 ? tp_load_user16(from + at) : tp_user_load(from + at, bytes - at < 16 ? (uint32_t)(bytes - at) : 16);
		}
		TP_UNROLL
		for (int u = 0; u < U; u++) {
			const uint64_t at = i + u * step;
			if (at >= bytes) continue;
			if (aligned && bytes - at >= 16) tp_store_user16(to + at, v[u]);
			else tp_user_store(to + at, v[u], bytes - at < 16 ? (uint32_t)(bytes - at) : 16);
		}
	}
}

/* place: of the peer's slice in OUTPUT; slice: whose length it has. */
TP_FAR void tp_pipe_collect(tp_pipes_shared &sh, const tp_pipe_args &a, const tp_pipe &k, int phase, int q, int place, int slice, const tp_pipe_group &g)
{
	const int p = tp_pipe_peer(a, q);
	char *to = (char *)a.output + (uint64_t)(uint32_t)place * a.out_stride + k.begin;
	TP_NO_UNROLL
	for (uint32_t c = 0; c < k.chunks; c++) {
		if (g.thread == 0) sh.go[g.number] = tp_pipe_await(sh, a, phase, q, c);
		tp_pipe_meet(g);
		if (!sh.go[g.number]) return;
		tp_pipe_copy<8>(tp_pipe_slot(a, a.rank, p, phase, sh.received[phase][q] + c + 1), to + (uint64_t)c * a.chunk, tp_pipe_bytes(a, k, slice, c),
			a.aligned, true, g.thread, g.warps * TP_WARP);
		tp_pipe_meet(g);
		if (g.thread == 0) tp_pipe_consumed(sh, a, phase, q, c);
	}
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
		tp_pipe_copy<8>(from + k.begin, to + k.begin, left < k.bytes ? left : k.bytes, a.aligned, false, thread, threads);
	}
}

/* ---- kernels ---- */

TP_DEVICE uint32_t *tp_pipe_counter(const tp_pipe_args &a, int phase, int q)
{ return (uint32_t *)a.counters + ((uint32_t)tp_block() * 2 + (uint32_t)phase) * 2 * TP_PIPE_RANKS + (uint32_t)tp_pipe_peer(a, q) * 2; }

TP_DEVICE tp_pipe tp_pipe_begin(tp_pipes_shared &sh, const tp_pipe_args &a)
{
	const uint64_t b = (uint64_t)(uint32_t)tp_block(), more = b < a.lines_more;
	tp_pipe k;
	k.begin = (a.lines_each * b + (more ? b : a.lines_more)) * 128;
	k.bytes = (a.lines_each + more) * 128;
	k.chunks = (uint32_t)((k.bytes + a.chunk - 1) / a.chunk);
	TP_NO_UNROLL
	for (int i = tp_thread(); i < 2 * (a.nranks - 1); i += tp_threads()) {
		const int phase = i % 2, q = i / 2;
		const uint32_t *counter = tp_pipe_counter(a, phase, q);
		sh.sent[phase][q] = counter[0];
		sh.received[phase][q] = counter[1];
		sh.seen[phase][q] = tp_load_relaxed(tp_pipe_head(a, a.rank, tp_pipe_peer(a, q), phase));
	}
	TP_NO_UNROLL
	for (int i = tp_thread(); i < TP_PIPE_PEERS * TP_PIPE_STAGES; i += tp_threads()) tp_bulk_init(&sh.loaded[i / TP_PIPE_STAGES][i % TP_PIPE_STAGES]);
	if (tp_thread() == 0) {
		sh.made = sh.freed = 0;
		sh.stopped = tp_load_relaxed(&tp_pipe_comm(a)->stop);
	}
	tp_block_sync();
	return k;
}

/* sent, received: ranks that this one pushed or sent to, and heard from, in a phase. */
TP_DEVICE void tp_pipe_end(tp_pipes_shared &sh, const tp_pipe_args &a, const tp_pipe &k, const uint32_t *sent, const uint32_t *received)
{
	tp_block_sync();
	TP_NO_UNROLL
	for (int i = tp_thread(); i < 2 * (a.nranks - 1); i += tp_threads()) {
		const int phase = i % 2, q = i / 2, p = tp_pipe_peer(a, q);
		uint32_t *counter = tp_pipe_counter(a, phase, q);
		if (tp_pipe_has(sent[phase], p)) counter[0] = sh.sent[phase][q] + k.chunks;
		if (tp_pipe_has(received[phase], p)) counter[1] = sh.received[phase][q] + k.chunks;
	}
	if (a.counts) tp_kernel_end(tp_pipe_comm(a));
}

/* Push, reduce, send, collect: one warp, a.reduce_warps, one, a.collect_warps for each peer. */
template <class R>
TP_DEVICE void tp_pipes_run(tp_pipes_shared &sh, char *memory, const tp_pipe_args &a)
{
	const R reduction(a.reduce);
	const tp_pipe k = tp_pipe_begin(sh, a);
	const int warp = tp_thread() / TP_WARP;
	char *tiles = memory + (uint32_t)(a.nranks - 1) * a.stages * a.chunk;
	if (warp == 0) {
		tp_pipe_push(sh, a, k, reduction, memory);
	} else if (warp == 1) {
		if (a.send_to) tp_pipe_send(sh, a, k, tiles);
	} else if (warp < 2 + a.reduce_warps) {
		const tp_pipe_group g = { 0, tp_thread() - 2 * TP_WARP, a.reduce_warps };
		if (a.sources) tp_pipe_reduce(sh, a, k, reduction, tiles, g);
		else if (a.keeps) tp_pipe_keep(a, k, a.keeps, g.thread, g.warps * TP_WARP);
	} else {
		const int at = warp - 2 - a.reduce_warps, q = at / a.collect_warps;
		if (q < a.nranks - 1 && tp_pipe_has(a.collect_from, tp_pipe_peer(a, q))) {
			const int slice = a.slice_of[tp_pipe_peer(a, q)];
			const tp_pipe_group g = { 1 + q, tp_thread() - (2 + a.reduce_warps + q * a.collect_warps) * TP_WARP, a.collect_warps };
			tp_pipe_collect(sh, a, k, 1, q, slice, slice, g);
		}
	}
	const uint32_t sent[2] = { a.push_to, a.send_to }, received[2] = { a.sources, a.collect_from };
	tp_pipe_end(sh, a, k, sent, received);
}

/* Push and collect: one warp, a.collect_warps for each peer and for what a rank keeps. */
TP_DEVICE void tp_pipes_run_move(tp_pipes_shared &sh, char *memory, const tp_pipe_args &a)
{
	const tp_pipe k = tp_pipe_begin(sh, a);
	const int warp = tp_thread() / TP_WARP;
	if (warp == 0) {
		tp_pipe_push(sh, a, k, tp_raw(), memory);
	} else {
		const int at = warp - 1, i = at / a.collect_warps, thread = tp_thread() - (1 + i * a.collect_warps) * TP_WARP;
		const tp_pipe_group g = { i, thread, a.collect_warps };
		if (i == a.nranks - 1 && a.keeps) tp_pipe_keep(a, k, 1, thread, a.collect_warps * TP_WARP);
		else if (i < a.nranks - 1 && tp_pipe_has(a.collect_from, tp_pipe_peer(a, i))) tp_pipe_collect(sh, a, k, 0, i, tp_pipe_peer(a, i), 0, g);
	}
	const uint32_t sent[2] = { a.push_to, 0 }, received[2] = { a.collect_from, 0 };
	tp_pipe_end(sh, a, k, sent, received);
}

#endif

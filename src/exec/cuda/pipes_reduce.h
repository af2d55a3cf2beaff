/* The part of pipes_move.h, which includes it, that reduces: what has come of a chunk, and one's own, to a tile and to OUTPUT. */
#ifndef TP_EXEC_CUDA_PIPES_REDUCE_H
#define TP_EXEC_CUDA_PIPES_REDUCE_H

/* Where it isn't a reduction: what comes from one source. */
struct tp_pipe_plain {
	enum { DEPTH = 4 };
	struct acc { tp_four v; };
	TP_OF_OBJECT explicit tp_pipe_plain(const tp_dev_reduce &) { }
	TP_OF_OBJECT bool scales() const { return false; }
	TP_OF_OBJECT tp_four scale(tp_four v) const { return v; }
	TP_OF_OBJECT void first(acc &sum, const tp_four &v) const { sum.v = v; }
	TP_OF_OBJECT void more(acc &, const tp_four &) const { }
	TP_OF_OBJECT tp_four last(acc &sum) const { return sum.v; }
};

/* What a chunk is made of: where each rank's is (NULL: none), and what becomes of the sum. */
template <int S> struct tp_pipe_chunk { const char *from[S]; int own; char *tile, *out; };

/* D vectors of a chunk, `step` bytes apart, all of them there and aligned: all sources in rank order. Nothing here may call a function or look
 * at arguments, or loads would wait for each other. */
template <int D, int S, class R>
TP_DEVICE void tp_pipe_reduce_vectors(const tp_pipe_chunk<S> &chunk, const R &reduction, uint32_t i, uint32_t step)
{
	tp_four v[D][S];
	typename R::acc sum[D];
	bool begun = false;
	TP_UNROLL
	for (int s = 0; s < S; s++) {
		if (!chunk.from[s]) continue;
		TP_UNROLL
		for (int d = 0; d < D; d++) v[d][s] = tp_load16(chunk.from[s] + i + (uint32_t)d * step);
	}
	TP_UNROLL
	for (int s = 0; s < S; s++) {
		if (!chunk.from[s]) continue;
		TP_UNROLL
		for (int d = 0; d < D; d++) {
			if (s == chunk.own && reduction.scales()) v[d][s] = reduction.scale(v[d][s]);
			if (begun) reduction.more(sum[d], v[d][s]);
			else reduction.first(sum[d], v[d][s]);
		}
		begun = true;
	}
	TP_UNROLL
	for (int d = 0; d < D; d++) {
		const uint32_t at = i + (uint32_t)d * step;
		const tp_four result = reduction.last(sum[d]);
		if (chunk.tile) *(tp_four *)(chunk.tile + at) = result;
		if (chunk.out) tp_store_user16(chunk.out + at, result);
	}
}

/* As many loads are under way in a thread as fit into registers: what a chunk takes is mostly waiting for them. */
template <int D, int S, class R>
TP_DEVICE void tp_pipe_reduce_whole(const tp_pipes_shared &sh, const tp_pipe_args &a, const R &reduction, char *tile, char *out, uint32_t bytes, int thread,
	int threads)
{
	const uint32_t step = (uint32_t)threads * 16;
	uint32_t i = (uint32_t)thread * 16;
	tp_pipe_chunk<S> chunk;
	TP_UNROLL
	for (int s = 0; s < S; s++) chunk.from[s] = s < a.nranks && tp_pipe_has(a.sources, s) ? (const char *)sh.source[s] : nullptr;
	chunk.own = a.rank;
	chunk.tile = a.send_to ? tile : nullptr;
	chunk.out = a.stores ? out : nullptr;
	TP_NO_UNROLL
	for (; i + (D - 1) * step < bytes; i += D * step) tp_pipe_reduce_vectors<D>(chunk, reduction, i, step);
	if constexpr (D > 1) {
		TP_NO_UNROLL
		for (; i < bytes; i += step) tp_pipe_reduce_vectors<1>(chunk, reduction, i, step);
	}
}

/* Of any bytes from anywhere. */
template <class R>
TP_FAR void tp_pipe_reduce_some(const tp_pipes_shared &sh, const tp_pipe_args &a, const R &reduction, char *tile, char *out, uint32_t bytes, int thread,
	int threads)
{
	TP_NO_UNROLL
	for (uint32_t i = (uint32_t)thread * 16; i < bytes; i += (uint32_t)threads * 16) {
		const uint32_t n = bytes - i < 16 ? bytes - i : 16;
		typename R::acc sum;
		bool begun = false;
		TP_NO_UNROLL
		for (int p = 0; p < a.nranks; p++) {
			if (!tp_pipe_has(a.sources, p)) continue;
			const char *from = (const char *)sh.source[p] + i;
			tp_four v = p == a.rank ? tp_user_load(from, n) : tp_load16(from);
			if (p == a.rank && reduction.scales()) v = reduction.scale(v);
			if (begun) reduction.more(sum, v);
			else reduction.first(sum, v);
			begun = true;
		}
		const tp_four result = reduction.last(sum);
		if (a.send_to) *(tp_four *)(tile + i) = result;
		if (a.stores) tp_user_store(out + i, result, n);
	}
}

/* Not inlined: it needs all registers that there are. Up to S ranks. */
template <int D, int S, class R>
TP_FAR void tp_pipe_reduce(tp_pipes_shared &sh, const tp_pipe_args &a, const tp_pipe &k, const R &reduction, char *tiles, const tp_pipe_group &g)
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
				go = go && tp_pipe_await(sh, a, 0, q, c) != TP_PIPE_STOP;
				sh.source[p] = (uint64_t)(uintptr_t)tp_pipe_slot(a, a.rank, p, 0, sh.received[0][q] + c + 1);
			}
			for (unsigned turn = 0; go && a.send_to && tp_block_load(&sh.freed[c % a.tiles]) < c / a.tiles; turn++) go = tp_pipe_wait(sh, a, turn);
			go = tp_warp_all(go);
			if (tp_pipe_lane() == 0) {
				sh.source[a.rank] = (uint64_t)(uintptr_t)tp_pipe_input(a, k, slice, c);
				sh.go[g.number] = go;
			}
		}
		tp_pipe_meet(g);
		if (!sh.go[g.number]) return;
		char *const tile = tiles + (a.send_to ? c % a.tiles * a.chunk : 0), *const out = to + (uint64_t)c * a.chunk;
		const uint32_t bytes = tp_pipe_bytes(a, k, slice, c);
		if (a.aligned && bytes % 16 == 0) tp_pipe_reduce_whole<D, S>(sh, a, reduction, tile, out, bytes, g.thread, g.warps * TP_WARP);
		else tp_pipe_reduce_some(sh, a, reduction, tile, out, bytes, g.thread, g.warps * TP_WARP);
		tp_bulk_fence();
		tp_pipe_meet(g);
		if (g.thread >= TP_WARP) continue;
		if (tp_pipe_lane() == 0) tp_block_set(&sh.made, c + 1);     /* seen by tp_pipe_send */
		TP_NO_UNROLL
		for (int q = tp_pipe_lane(); q < a.nranks - 1; q += TP_WARP)
			if (tp_pipe_has(a.sources, tp_pipe_peer(a, q))) tp_pipe_consumed(sh, a, 0, q, c);
	}
}

#endif

/* Two shots on memory that all ranks have mapped: meet, reduce one's own slice straight from everybody's INPUT, store the result to
 * everybody's OUTPUT, meet. Nothing is staged, so each byte crosses a link as often as it must.
 *
 * A thread reads and writes the same places of all buffers, so in place nothing is written before it was read: no other rank
 * touches this rank's slice. The first meeting says that all inputs are there and all outputs may be written, the second that all
 * have read and written. */
#ifndef TP_EXEC_CUDA_WINDOW_H
#define TP_EXEC_CUDA_WINDOW_H

#include "exec/cuda/lines.h"
#include "exec/cuda/lines_move.h"

TP_DEVICE uint64_t tp_window_base(uint64_t bases, int rank, uint64_t offset) { return ((const uint64_t *)bases)[rank] + offset; }

/* One vector's reduction, bytes < 16 only at the slice's end, to any place. */
template <class R>
TP_DEVICE void tp_window_some(const tp_fused_args &a, const R &reduction, const uint64_t *in, const uint64_t *out, uint64_t at, uint32_t bytes)
{
	typename R::acc sum;
	TP_NO_UNROLL
	for (int p = 0; p < a.nranks; p++) {
		tp_four v = tp_user_load((const char *)in[p] + at, bytes);
		if (reduction.scales()) v = reduction.scale(v);
		if (p == 0) reduction.first(sum, v);
		else reduction.more(sum, v);
	}
	tp_four result = reduction.last(sum);
	if (!a.gathers) tp_user_store((char *)a.output + (at - (uint64_t)a.rank * a.in_stride), result, bytes);
	else
		for (int p = 0; p < a.nranks; p++) tp_user_store((char *)out[p] + at, result, bytes);
}

struct tp_window_places { uint64_t in[TP_DEV_MAX_LOCAL], out[TP_DEV_MAX_LOCAL]; uint32_t differ; };

template <class R>
TP_DEVICE void tp_window_run(const tp_fused_args &a, tp_window_places &places)
{
	enum { DEPTH = R::DEPTH };          /* vectors under way in a thread */
	const R reduction(a.reduce);
	tp_lines k = tp_lines_begin_gates(a);
	for (int p = tp_thread(); p < a.nranks; p += tp_threads()) {
		places.in[p] = tp_window_base(a.in_bases, p, a.in_offset);
		places.out[p] = a.gathers ? tp_window_base(a.out_bases, p, a.out_offset) : 0;
	}
	if (tp_thread() == 0) tp_block_set(&places.differ, 0);
	tp_lines_barrier(a, k, &places.differ);
	/* Then nothing is where it should be: nobody writes. */
	if (tp_block_load(&places.differ)) k.stopped = true;
	const uint32_t left = tp_lines_left(a, a.rank, 0), vectors = a.aligned ? left / 16 : 0;
	const uint64_t slice = (uint64_t)a.rank * a.in_stride;
	const uint32_t step = (uint32_t)(tp_threads() * tp_blocks()), mine = (uint32_t)(tp_block() * tp_threads() + tp_thread());
	TP_NO_UNROLL
	for (uint32_t first = mine; first < vectors && !k.stopped; first += step * DEPTH) {
		typename R::acc sum[DEPTH];
		TP_NO_UNROLL
		for (int p = 0; p < a.nranks; p++) {
			const char *from = (const char *)places.in[p] + slice;
			tp_four v[DEPTH];
			TP_UNROLL
			for (int d = 0; d < DEPTH; d++)
				if (first + (uint32_t)d * step < vectors) v[d] = tp_load16(from + (uint64_t)(first + (uint32_t)d * step) * 16);
			TP_UNROLL
			for (int d = 0; d < DEPTH; d++) {
				if (first + (uint32_t)d * step >= vectors) continue;
				if (reduction.scales()) v[d] = reduction.scale(v[d]);
				if (p == 0) reduction.first(sum[d], v[d]);
				else reduction.more(sum[d], v[d]);
			}
		}
		tp_four result[DEPTH];
		TP_UNROLL
		for (int d = 0; d < DEPTH; d++)
			if (first + (uint32_t)d * step < vectors) result[d] = reduction.last(sum[d]);
		TP_NO_UNROLL
		for (int i = 0; i < (a.gathers ? a.nranks : 1); i++) {
			char *to = a.gathers ? (char *)places.out[tp_lines_peer(a, i)] + slice : (char *)a.output;
			TP_UNROLL
			for (int d = 0; d < DEPTH; d++)
				if (first + (uint32_t)d * step < vectors) tp_store16(to + (uint64_t)(first + (uint32_t)d * step) * 16, result[d]);
		}
	}
	/* The end, or all where this rank's own output lies anywhere. */
	TP_NO_UNROLL
	for (uint32_t at = (vectors + mine) * 16; at < left && !k.stopped; at += step * 16)
		tp_window_some<R>(a, reduction, places.in, places.out, slice + at, left - at < 16 ? left - at : 16);
	tp_lines_barrier(a, k);
	tp_lines_end(a, k);
}

#endif

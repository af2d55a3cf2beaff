/* Movers: one value made of n sources, given to m destinations, by a group of threads. What is aligned to 16 bytes goes 16 bytes at a
 * time, with so many loads under way in each thread as cover the way to memory; what isn't goes piece by piece, and costs
 * only the accesses that are not aligned. */
#ifndef TP_EXEC_CUDA_MOVE_H
#define TP_EXEC_CUDA_MOVE_H

#include "exec/cuda/reduce.h"

enum {
	TP_WORK_ALIGNED = 1,        /* all addresses are multiples of 16 */
	TP_WORK_PLAIN = 2,          /* one source that is copied as it is */
	TP_WORK_RAW = 4,            /* sources with TP_RAW are multiplied first */
	TP_WORK_FINAL = 8,          /* the result is multiplied or divided */
	TP_WORK_END = 16,           /* no work: there is none any more */
	TP_WORK_LENT = 32           /* for who publishes it: what it would copy into links' slots stays where it is (lend.h) */
};
/* In the address of a source (never in use there): it is raw INPUT. */
#define TP_RAW (1ull << 63)

/* What a group is to move: at[0, nsrc) to at[to, to + ndst). */
struct tp_work {
	uint32_t nsrc, to, ndst, flags;
	uint32_t bytes;
	uint32_t step, chunk_bytes;             /* for who publishes it: steps; */
	uint32_t value, tag, is_send;           /* transfers; steps, value: the operand that is lent */
};

/* Up to 16 bytes at any address. */
TP_FAR tp_four tp_load_any(uint64_t at, uint32_t bytes)
{
	uint32_t word[4] = { 0, 0, 0, 0 };
	if (at % 4 == 0 && bytes == 16) {
		TP_UNROLL
		for (int i = 0; i < 4; i++) word[i] = ((const uint32_t *)at)[i];
	} else if (at % 2 == 0 && bytes % 2 == 0) {
		TP_UNROLL
		for (uint32_t i = 0; i < 8; i++)
			if (2 * i < bytes) word[i / 2] |= (uint32_t)((const uint16_t *)at)[i] << (i % 2 * 16);
	} else {
		TP_UNROLL
		for (uint32_t i = 0; i < 16; i++)
			if (i < bytes) word[i / 4] |= (uint32_t)((const uint8_t *)at)[i] << (i % 4 * 8);
	}
	return tp_four{ word[0], word[1], word[2], word[3] };
}
TP_FAR void tp_store_any(uint64_t at, tp_four v, uint32_t bytes)
{
	uint32_t word[4] = { v.x, v.y, v.z, v.w };
	if (at % 4 == 0 && bytes == 16) {
		TP_UNROLL
		for (int i = 0; i < 4; i++) ((uint32_t *)at)[i] = word[i];
	} else if (at % 2 == 0 && bytes % 2 == 0) {
		TP_UNROLL
		for (uint32_t i = 0; i < 8; i++)
			if (2 * i < bytes) ((uint16_t *)at)[i] = (uint16_t)(word[i / 2] >> (i % 2 * 16));
	} else {
		TP_UNROLL
		for (uint32_t i = 0; i < 16; i++)
			if (i < bytes) ((uint8_t *)at)[i] = (uint8_t)(word[i / 4] >> (i % 4 * 8));
	}
}
TP_DEVICE tp_four tp_load_some(uint64_t at, uint32_t bytes) { return at % 16 || bytes < 16 ? tp_load_any(at, bytes) : tp_load16((const void *)at); }
TP_DEVICE void tp_store_some(uint64_t at, tp_four v, uint32_t bytes)
{
	if (at % 16 || bytes < 16) tp_store_any(at, v, bytes);
	else tp_store16((void *)at, v);
}

/* Copies 16 bytes at a time from `begin` on, a multiple of 16; all addresses at any alignment. */
TP_FAR void tp_copy_some(const tp_work &w, const uint64_t *at, uint32_t begin, int thread, int threads)
{
	TP_NO_UNROLL
	for (uint32_t i = begin + 16u * (uint32_t)thread; i < w.bytes; i += 16u * (uint32_t)threads) {
		uint32_t n = w.bytes - i < 16 ? w.bytes - i : 16;
		tp_four v = tp_load_some(at[0] + i, n);
		TP_NO_UNROLL
		for (uint32_t d = 0; d < w.ndst; d++) tp_store_some(at[w.to + d] + i, v, n);
	}
}

/* Whole 16 bytes, aligned. A warp's U pieces lie next to each other, so that their addresses differ by constants; what remains
 * after rounds of all warps is shared out evenly. */
template <int U> TP_DEVICE void tp_copy_lines(const tp_work &w, const uint64_t *at, int thread, int threads)
{
	enum { PIECE = 16 * TP_WARP };
	const uint32_t each = 16u * (uint32_t)threads, end = w.bytes & ~15u, ndst = w.ndst, whole = end - end % (U * each);
	uint32_t i = (uint32_t)(thread / TP_WARP * U * PIECE + thread % TP_WARP * 16);
	TP_NO_UNROLL
	for (; i < whole; i += U * each) {
		tp_four v[U];
		const uint64_t from = at[0] + i;
		TP_UNROLL
		for (int u = 0; u < U; u++) v[u] = tp_load16((const void *)(from + u * PIECE));
		TP_NO_UNROLL
		for (uint32_t d = 0; d < ndst; d++) {
			const uint64_t to = at[w.to + d] + i;
			TP_UNROLL
			for (int u = 0; u < U; u++) tp_store16((void *)(to + u * PIECE), v[u]);
		}
	}
	i = whole + 16u * (uint32_t)thread;
	if (i >= end) return;
	tp_four v[U];
	TP_UNROLL
	for (int u = 0; u < U; u++) v[u] = tp_load16((const void *)(at[0] + (i + u * each < end ? i + u * each : i)));
	TP_NO_UNROLL
	for (uint32_t d = 0; d < ndst; d++) {
		TP_UNROLL
		for (int u = 0; u < U; u++)
			if (u == 0 || i + u * each < end) tp_store16((void *)(at[w.to + d] + i + u * each), v[u]);
	}
}

TP_DEVICE void tp_copy(const tp_work &w, const uint64_t *at, int thread, int threads)
{
	uint32_t begin = 0;
	if (w.flags & TP_WORK_ALIGNED) {
		tp_copy_lines<4>(w, at, thread, threads);
		begin = w.bytes & ~15u;
	}
	if (begin < w.bytes) tp_copy_some(w, at, begin, thread, threads);
}

template <class T, class O, int NSRC, int U> TP_DEVICE void tp_reduce_pieces(tp_four (*v)[U])
{
	TP_UNROLL
	for (int u = 0; u < U; u++) {
		typename T::acc a[T::N];
		T::load(v[0][u], a);
		TP_UNROLL
		for (int s = 1; s < NSRC; s++) tp_reduce_more<T, O>(a, v[s][u]);
		v[0][u] = T::store(a);
	}
}

/* The same for NSRC sources, unscaled. */
template <class T, class O, int NSRC, int U> TP_DEVICE void tp_reduce_lines(const tp_work &w, const uint64_t *at, int thread, int threads)
{
	enum { PIECE = 16 * TP_WARP };
	const uint32_t each = 16u * (uint32_t)threads, end = w.bytes & ~15u, ndst = w.ndst, whole = end - end % (U * each);
	uint32_t i = (uint32_t)(thread / TP_WARP * U * PIECE + thread % TP_WARP * 16);
	tp_four v[NSRC][U];
	TP_NO_UNROLL
	for (; i < whole; i += U * each) {
		TP_UNROLL
		for (int s = 0; s < NSRC; s++) {
			const uint64_t from = at[s] + i;
			TP_UNROLL
			for (int u = 0; u < U; u++) v[s][u] = tp_load16((const void *)(from + u * PIECE));
		}
		tp_reduce_pieces<T, O, NSRC, U>(v);
		TP_NO_UNROLL
		for (uint32_t d = 0; d < ndst; d++) {
			const uint64_t to = at[w.to + d] + i;
			TP_UNROLL
			for (int u = 0; u < U; u++) tp_store16((void *)(to + u * PIECE), v[0][u]);
		}
	}
	i = whole + 16u * (uint32_t)thread;
	if (i >= end) return;
	TP_UNROLL
	for (int s = 0; s < NSRC; s++) {
		TP_UNROLL
		for (int u = 0; u < U; u++) v[s][u] = tp_load16((const void *)(at[s] + (i + u * each < end ? i + u * each : i)));
	}
	tp_reduce_pieces<T, O, NSRC, U>(v);
	TP_NO_UNROLL
	for (uint32_t d = 0; d < ndst; d++) {
		TP_UNROLL
		for (int u = 0; u < U; u++)
			if (u == 0 || i + u * each < end) tp_store16((void *)(at[w.to + d] + i + u * each), v[0][u]);
	}
}

/* Any number of sources, any alignment, scaled or not. Four sources' loads are under way at once. */
template <class T, class O> TP_FAR void tp_reduce_some(const tp_work &w, const uint64_t *at, uint32_t begin, int thread, int threads,
	const tp_dev_reduce &r)
{
	const bool scales = O::SCALES && (w.flags & (TP_WORK_RAW | TP_WORK_FINAL));
	tp_scaling<T> scaling = {};
	if (scales) tp_scaling_get<T>(r, &scaling);
	TP_NO_UNROLL
	for (uint32_t i = begin + 16u * (uint32_t)thread; i < w.bytes; i += 16u * (uint32_t)threads) {
		const uint32_t n = w.bytes - i < 16 ? w.bytes - i : 16;
		typename T::acc a[T::N];
		TP_NO_UNROLL
		for (uint32_t s = 0; s < w.nsrc; s += 4) {
			tp_four v[4];
			TP_UNROLL
			for (uint32_t k = 0; k < 4; k++)
				if (s + k < w.nsrc) v[k] = tp_load_some((at[s + k] & ~TP_RAW) + i, n);
			TP_UNROLL
			for (uint32_t k = 0; k < 4; k++) {
				if (s + k >= w.nsrc) break;
				if (scales && at[s + k] & TP_RAW) {
					typename T::acc b[T::N];
					T::load(v[k], b);
					tp_scale_before<T>(scaling, b);
					TP_UNROLL
					for (int e = 0; e < T::N; e++) a[e] = s + k ? O::template apply<typename T::acc>(a[e], b[e]) : b[e];
				} else if (s + k) {
					tp_reduce_more<T, O>(a, v[k]);
				} else {
					T::load(v[k], a);
				}
			}
		}
		if (scales && w.flags & TP_WORK_FINAL) tp_scale_after<T>(scaling, a);
		const tp_four v = T::store(a);
		TP_NO_UNROLL
		for (uint32_t d = 0; d < w.ndst; d++) tp_store_some(at[w.to + d] + i, v, n);
	}
}

template <class T, class O> TP_DEVICE void tp_reduce(const tp_work &w, const uint64_t *at, int thread, int threads, const tp_dev_reduce &r)
{
	/* Bytes become four times as many registers while they are reduced. Two sources, as rings have, get the most. */
	enum { U = T::SIZE == 1 ? 2 : 4, FEW = T::SIZE == 1 ? 1 : 2 };
	uint32_t begin = 0;
	if ((w.flags & (TP_WORK_ALIGNED | TP_WORK_RAW | TP_WORK_FINAL)) == TP_WORK_ALIGNED && w.nsrc <= 4 && w.nsrc > 1) {
		if (w.nsrc == 2) tp_reduce_lines<T, O, 2, U>(w, at, thread, threads);
		else if (w.nsrc == 3) tp_reduce_lines<T, O, 3, FEW>(w, at, thread, threads);
		else tp_reduce_lines<T, O, 4, FEW>(w, at, thread, threads);
		begin = w.bytes & ~15u;
	}
	if (begin < w.bytes) tp_reduce_some<T, O>(w, at, begin, thread, threads, r);
}

/* How a steps kernel moves. */
template <class T, class O> struct tp_mover {
	TP_METHOD void move(const tp_work &w, const uint64_t *at, int thread, int threads, const tp_dev_reduce *r)
	{
		TP_HIDE(thread);
		TP_HIDE(threads);
		if (w.flags & TP_WORK_PLAIN) tp_copy(w, at, thread, threads);
		else tp_reduce<T, O>(w, at, thread, threads, *r);
	}
};
struct tp_mover_copy {
	TP_METHOD void move(const tp_work &w, const uint64_t *at, int thread, int threads, const tp_dev_reduce *)
	{
		TP_HIDE(thread);
		TP_HIDE(threads);
		tp_copy(w, at, thread, threads);
	}
};

#endif

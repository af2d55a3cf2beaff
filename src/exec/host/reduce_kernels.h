/* The kernels of one instruction set. Its file defines TP_WIDE (bytes of a vector, a literal), TP_TABLE (the table's name)
 *, and
 * includes this once, under its target. Where the processor has better than what compilers make of vector code, it says so:
 * TP_NATIVE_W, TP_MASK_W, TP_HALF_W are TP_WIDE and TP_NATIVE the integer vector. NATIVE: tp_words_*,
 * tp_bytes_* move 16- and 8-bit elements to and from 32-bit lanes (whose upper bits are 0 on the way out); tp_float_min and
 * _max may do as they like with NaN. MASK: tp_unless_nan. HALF: tp_half_* convert, tp_e5m2_load widens, tp_e4m3_load widens
 * the bits moved into a half. Otherwise these are 0.
 *
 * One pass over memory, whatever the number of sources: a block of four vectors is gathered from all sources in
 * registers, then stored. The last vector of a buffer overlaps the one before it instead of being cut in pieces; it is
 * computed before anything is stored, so that dst may be one of the sources. */

#include <stdint.h>
#include <string.h>
#include "exec/host/reduce.h"

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif !defined(__STRICT_ANSI__)
#error "build with -std=c17: a multiply and an add must stay two operations, or instruction sets would disagree"
#endif

#define TP_INLINE static inline __attribute__((always_inline, unused))
#define TP_PASTE_(a, b) a##b
#define TP_PASTE(a, b) TP_PASTE_(a, b)

#if TP_WIDE == 16
#define TP_W 0
#include "exec/host/reduce_lanes.h"
#undef TP_W
#endif
#define TP_W TP_WIDE
#include "exec/host/reduce_lanes.h"
#undef TP_W

/* One vector of results. lanes: the type that is loaded and stored; acc: the type that is added up; elem: of acc. */
#define TP_VALUE(lanes, acc, elem, op, width) \
TP_INLINE acc##_##width op##_##lanes##_value_##width(const void *const *src, int nsrc, size_t at, \
	const struct tp_reduce_scale *k) \
{ \
	acc##_##width v = load_##lanes##_##width((const char *)src[0] + at); \
	if (k != NULL && (k->raw_mask & 1)) \
		v = v * TP_PRE_##elem(k); \
	for (int s = 1; s < nsrc; s++) { \
		acc##_##width more = load_##lanes##_##width((const char *)src[s] + at); \
		if (k != NULL && s < 64 && (k->raw_mask >> s & 1)) \
			more = more * TP_PRE_##elem(k); \
		v = op##_##acc##_##width(v, more); \
	} \
	return k != NULL ? v * TP_POST_##elem(k) : v; \
}

#define TP_PRE_uint8_t(k) ((uint8_t)(k)->pre_integer)
#define TP_PRE_uint32_t(k) ((uint32_t)(k)->pre_integer)
#define TP_PRE_uint64_t(k) ((k)->pre_integer)
#define TP_PRE_float(k) ((float)(k)->pre)
#define TP_PRE_double(k) ((k)->pre)
#define TP_POST_uint8_t(k) ((uint8_t)1)
#define TP_POST_uint32_t(k) ((uint32_t)1)
#define TP_POST_uint64_t(k) ((uint64_t)1)
#define TP_POST_float(k) ((float)(k)->post)
#define TP_POST_double(k) ((k)->post)
/* plain kernels of signed elements are never scaled */
#define TP_PRE_int8_t(k) ((int8_t)1)
#define TP_PRE_int32_t(k) ((int32_t)1)
#define TP_PRE_int64_t(k) ((int64_t)1)
#define TP_POST_int8_t(k) ((int8_t)1)
#define TP_POST_int32_t(k) ((int32_t)1)
#define TP_POST_int64_t(k) ((int64_t)1)

/* All that vectors of one width can do of a buffer; false where it is smaller than one vector. */
#define TP_SPAN(lanes, acc, elem, op, size, width) \
TP_INLINE bool op##_##lanes##_span_##width(char *dst, const void *const *src, int nsrc, size_t bytes, \
	const struct tp_reduce_scale *k) \
{ \
	const size_t step = sizeof(acc##_##width) / sizeof(elem) * (size); \
	if (bytes < step) \
		return false; \
	size_t last = bytes - step, at = 0; \
	acc##_##width tail = op##_##lanes##_value_##width(src, nsrc, last, k); \
	if (k == NULL) { \
		for (; at + 4 * step <= bytes; at += 4 * step) { \
			const char *s0 = (const char *)src[0] + at; \
			acc##_##width v0 = load_##lanes##_##width(s0), v1 = load_##lanes##_##width(s0 + step); \
			acc##_##width v2 = load_##lanes##_##width(s0 + 2 * step), v3 = load_##lanes##_##width(s0 + 3 * step); \
			for (int s = 1; s < nsrc; s++) { \
				const char *from = (const char *)src[s] + at; \
				v0 = op##_##acc##_##width(v0, load_##lanes##_##width(from)); \
				v1 = op##_##acc##_##width(v1, load_##lanes##_##width(from + step)); \
				v2 = op##_##acc##_##width(v2, load_##lanes##_##width(from + 2 * step)); \
				v3 = op##_##acc##_##width(v3, load_##lanes##_##width(from + 3 * step)); \
			} \
			store_##lanes##_##width(dst + at, v0); \
			store_##lanes##_##width(dst + at + step, v1); \
			store_##lanes##_##width(dst + at + 2 * step, v2); \
			store_##lanes##_##width(dst + at + 3 * step, v3); \
		} \
	} \
	for (; at < last; at += step) \
		store_##lanes##_##width(dst + at, op##_##lanes##_value_##width(src, nsrc, at, k)); \
	store_##lanes##_##width(dst + last, tail); \
	return true; \
}

/* Wider sets leave what is smaller than a vector to the 16-byte kernels (TP_REDUCE_WIDE_LEAST). */
#if TP_WIDE == 16
#define TP_SINGLES(lanes, acc, elem, op) TP_VALUE(lanes, acc, elem, op, 0)
#define TP_REST(lanes, op, size, nsrc) \
	for (size_t at = 0; at < bytes; at += (size)) \
		store_##lanes##_0(dst + at, op##_##lanes##_value_0(src, nsrc, at, k));
#else
#define TP_SINGLES(lanes, acc, elem, op)
#define TP_REST(lanes, op, size, nsrc)
#endif

#define TP_WHOLE_(lanes, acc, elem, op, size, wide) \
TP_SINGLES(lanes, acc, elem, op) \
TP_VALUE(lanes, acc, elem, op, wide) \
TP_SPAN(lanes, acc, elem, op, size, wide) \
TP_INLINE void op##_##lanes##_whole(char *dst, const void *const *src, int nsrc, size_t bytes, const struct tp_reduce_scale *k) \
{ \
	if (op##_##lanes##_span_##wide(dst, src, nsrc, bytes, k)) \
		return; \
	TP_REST(lanes, op, size, nsrc) \
} \
static void op##_##lanes##_plain(char *dst, const void *const *src, int nsrc, size_t bytes, const struct tp_reduce_scale *scale) \
{ \
	(void)scale; \
	if (nsrc == 2 && TP_IS_##op) \
		op##_##lanes##_whole(dst, src, 2, bytes, NULL); \
	else \
		op##_##lanes##_whole(dst, src, nsrc, bytes, NULL); \
}
#define TP_WHOLE(lanes, acc, elem, op, size, wide) TP_WHOLE_(lanes, acc, elem, op, size, wide)

/* Sums of two have code of their own. */
#define TP_IS_sum 1
#define TP_IS_prod 0
#define TP_IS_max 0
#define TP_IS_min 0

#define TP_SCALED(lanes) \
static void sum_##lanes##_scaled(char *dst, const void *const *src, int nsrc, size_t bytes, const struct tp_reduce_scale *scale) \
{ \
	const struct tp_reduce_scale k = *scale; \
	sum_##lanes##_whole(dst, src, nsrc, bytes, &k); \
}

#define TP_ALL_OPS(lanes, acc, elem, size) \
TP_WHOLE(lanes, acc, elem, sum, size, TP_WIDE) \
TP_WHOLE(lanes, acc, elem, prod, size, TP_WIDE) \
TP_WHOLE(lanes, acc, elem, max, size, TP_WIDE) \
TP_WHOLE(lanes, acc, elem, min, size, TP_WIDE) \
TP_SCALED(lanes)

/* Sums and products of signed integers are those of unsigned ones, which wrap. */
#define TP_ORDER_OPS(lanes, acc, elem, size) \
TP_WHOLE(lanes, acc, elem, max, size, TP_WIDE) \
TP_WHOLE(lanes, acc, elem, min, size, TP_WIDE)

TP_ALL_OPS(u8, u8, uint8_t, 1)
TP_ALL_OPS(u32, u32, uint32_t, 4)
TP_ALL_OPS(u64, u64, uint64_t, 8)
TP_ORDER_OPS(i8, i8, int8_t, 1)
TP_ORDER_OPS(i32, i32, int32_t, 4)
TP_ORDER_OPS(i64, i64, int64_t, 8)
TP_ALL_OPS(f16, f32, float, 2)
TP_ALL_OPS(f32, f32, float, 4)
TP_ALL_OPS(f64, f64, double, 8)
TP_ALL_OPS(bf16, f32, float, 2)
TP_ALL_OPS(e4m3, f32, float, 1)
TP_ALL_OPS(e5m2, f32, float, 1)

/* Through a floating type that is so much wider than the elements that the rounded quotient never reaches the next
 * integer. A divisor that such a type can't hold exactly is larger than any element. */
#define TP_DIVIDE(lanes, elem, through) \
static void divide_##lanes(char *at, size_t bytes, int64_t divisor) \
{ \
	const through by = (through)divisor; \
	for (size_t i = 0; i < bytes; i += sizeof(elem)) { \
		elem v; \
		memcpy(&v, at + i, sizeof(v)); \
		v = (elem)((through)v / by); \
		memcpy(at + i, &v, sizeof(v)); \
	} \
}

TP_DIVIDE(i8, int8_t, float)
TP_DIVIDE(u8, uint8_t, float)
TP_DIVIDE(i32, int32_t, double)
TP_DIVIDE(u32, uint32_t, double)
TP_DIVIDE(i64, int64_t, int64_t)
TP_DIVIDE(u64, uint64_t, uint64_t)

#define TP_ROW(bits, order) { sum_##bits##_plain, prod_##bits##_plain, max_##order##_plain, min_##order##_plain }

const struct tp_reduce_kernels TP_TABLE = {
	.plain = {
		[ncclInt8] = TP_ROW(u8, i8), [ncclUint8] = TP_ROW(u8, u8),
		[ncclInt32] = TP_ROW(u32, i32), [ncclUint32] = TP_ROW(u32, u32),
		[ncclInt64] = TP_ROW(u64, i64), [ncclUint64] = TP_ROW(u64, u64),
		[ncclFloat16] = TP_ROW(f16, f16), [ncclFloat32] = TP_ROW(f32, f32), [ncclFloat64] = TP_ROW(f64, f64),
		[ncclBfloat16] = TP_ROW(bf16, bf16),
		[ncclFloat8e4m3] = TP_ROW(e4m3, e4m3), [ncclFloat8e5m2] = TP_ROW(e5m2, e5m2),
	},
	.divide = {
		[ncclInt8] = divide_i8, [ncclUint8] = divide_u8, [ncclInt32] = divide_i32, [ncclUint32] = divide_u32,
		[ncclInt64] = divide_i64, [ncclUint64] = divide_u64,
	},
	.scaled = {
		[ncclInt8] = sum_u8_scaled, [ncclUint8] = sum_u8_scaled,
		[ncclInt32] = sum_u32_scaled, [ncclUint32] = sum_u32_scaled,
		[ncclInt64] = sum_u64_scaled, [ncclUint64] = sum_u64_scaled,
		[ncclFloat16] = sum_f16_scaled, [ncclFloat32] = sum_f32_scaled, [ncclFloat64] = sum_f64_scaled,
		[ncclBfloat16] = sum_bf16_scaled,
		[ncclFloat8e4m3] = sum_e4m3_scaled, [ncclFloat8e5m2] = sum_e5m2_scaled,
	},
};

/* The arithmetic of kernels: 16 bytes of elements at a time, as struct tp_reduce (exec.h) says it and with the host executor's
 * bits (host/reduce_lanes.h). A type T gives
 *   T::acc      what is added up in; T::N elements in 16 bytes
 *   T::load     16 bytes to T::acc[T::N]
 *   T::store    and back, rounded once, a NaN as the type's one NaN
 * and an operation O gives O::apply(a, b), a being the earlier source. T::ROUNDS: a source that is scaled is rounded before it is
 * reduced, for other ranks get it through a slot.
 *
 * Whoever compiles this must keep a multiplication and an addition two operations (nvcc -fmad=false, g++ -ffp-contract=off). */
#ifndef TP_EXEC_CUDA_REDUCE_H
#define TP_EXEC_CUDA_REDUCE_H

#include "exec/cuda/shim.h"

/* All (type, operation) pairs that have kernels of their own, by file: X(type, op). */
#define TP_REDUCTIONS_ALL_OPS(X, type) X(type, sum) X(type, prod) X(type, max) X(type, min)
#define TP_REDUCTIONS_INTEGERS(X) \
	TP_REDUCTIONS_ALL_OPS(X, u8) X(i8, max) X(i8, min) TP_REDUCTIONS_ALL_OPS(X, u32) X(i32, max) X(i32, min) \
	TP_REDUCTIONS_ALL_OPS(X, u64) X(i64, max) X(i64, min)
#define TP_REDUCTIONS_FLOATS(X) TP_REDUCTIONS_ALL_OPS(X, f32) TP_REDUCTIONS_ALL_OPS(X, f64)
#define TP_REDUCTIONS_HALVES(X) TP_REDUCTIONS_ALL_OPS(X, f16) TP_REDUCTIONS_ALL_OPS(X, bf16)
#define TP_REDUCTIONS_QUARTERS(X) TP_REDUCTIONS_ALL_OPS(X, e4m3) TP_REDUCTIONS_ALL_OPS(X, e5m2)

template <class To, class From> TP_DEVICE To tp_bits(From v)
{
	static_assert(sizeof(To) == sizeof(From), "bits of another size");
	To to;
	__builtin_memcpy(&to, &v, sizeof(to));
	return to;
}

/* ---- small floats as bits ---- */

/* To float: the exponent is moved to float's bias; with an exponent of zero the subtraction gives the value exactly. */
TP_DEVICE float tp_widen(uint32_t magnitude, uint32_t sign, uint32_t shift, uint32_t bias)
{
	uint32_t least = (bias + 1) << 23, moved = (magnitude << shift) + (bias << 23);
	float tiny = tp_bits<float>(moved + (1u << 23)) - tp_bits<float>(least);
	return tp_bits<float>((moved < least ? tp_bits<uint32_t>(tiny) : moved) | sign);
}

/* Float to a small float without its sign, to nearest even; `most` and all above become `most`. Adding a power of two whose last
 * place is the small type's does the rounding. */
TP_DEVICE uint32_t tp_narrow(float magnitude, uint32_t shift, uint32_t bias, uint32_t most)
{
	uint32_t least = (bias + 1) << 23;
	float kept = magnitude < tp_bits<float>(most) ? magnitude : tp_bits<float>(most);
	uint32_t exponent = tp_bits<uint32_t>(kept) & 0x7f800000;
	if (exponent < least) exponent = least;
	uint32_t unit = exponent + (shift << 23);
	return ((exponent - least) >> shift) + tp_bits<uint32_t>(kept + tp_bits<float>(unit)) - unit;
}

TP_DEVICE float tp_e5m2_widen(uint32_t bits)
{
	uint32_t magnitude = bits & 0x7f, special = magnitude >= 0x7c ? 112u << 23 : 0;
	return tp_bits<float>(tp_bits<uint32_t>(tp_widen(magnitude, (bits & 0x80) << 24, 21, 112)) + special);
}
TP_DEVICE float tp_e4m3_widen(uint32_t bits)
{
	uint32_t magnitude = bits & 0x7f;
	return magnitude == 0x7f ? tp_bits<float>(0x7fffffffu) : tp_widen(magnitude, (bits & 0x80) << 24, 20, 120);
}
TP_DEVICE uint32_t tp_e5m2_narrow(float v)
{
	uint32_t bits = tp_bits<uint32_t>(v);
	return v != v ? 0x7f : tp_narrow(tp_bits<float>(bits & 0x7fffffff), 21, 112, 0x47600000) | (bits >> 24 & 0x80);
}
TP_DEVICE uint32_t tp_e4m3_narrow(float v)
{
	uint32_t bits = tp_bits<uint32_t>(v);
	return v != v ? 0x7f : tp_narrow(tp_bits<float>(bits & 0x7fffffff), 20, 120, 0x43e00000) | (bits >> 24 & 0x80);
}

/* Two halves of a word, the lower first. The processor's conversions give the same bits: to nearest even, one NaN. */
#ifdef __CUDA_ARCH__
TP_DEVICE void tp_f16_widen(uint32_t word, float *low, float *high)
{
	asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(*low), "=f"(*high) : "r"(word));
}
TP_DEVICE uint32_t tp_f16_narrow(float low, float high)
{
	uint32_t word;
	asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
	return word;
}
TP_DEVICE uint32_t tp_bf16_narrow(float low, float high)
{
	uint32_t word;
	asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
	return word;
}
#else
TP_DEVICE float tp_f16_widen_one(uint32_t bits)
{
	uint32_t magnitude = bits & 0x7fff, special = magnitude >= 0x7c00 ? 112u << 23 : 0;
	return tp_bits<float>(tp_bits<uint32_t>(tp_widen(magnitude, (bits & 0x8000) << 16, 13, 112)) + special);
}
TP_DEVICE uint32_t tp_f16_narrow_one(float v)
{
	uint32_t bits = tp_bits<uint32_t>(v);
	return v != v ? 0x7fff : tp_narrow(tp_bits<float>(bits & 0x7fffffff), 13, 112, 0x47800000) | (bits >> 16 & 0x8000);
}
TP_DEVICE uint32_t tp_bf16_narrow_one(float v)
{
	uint32_t bits = tp_bits<uint32_t>(v);
	return v != v ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
TP_DEVICE void tp_f16_widen(uint32_t word, float *low, float *high)
{
	*low = tp_f16_widen_one(word & 0xffff);
	*high = tp_f16_widen_one(word >> 16);
}
TP_DEVICE uint32_t tp_f16_narrow(float low, float high) { return tp_f16_narrow_one(low) | tp_f16_narrow_one(high) << 16; }
TP_DEVICE uint32_t tp_bf16_narrow(float low, float high) { return tp_bf16_narrow_one(low) | tp_bf16_narrow_one(high) << 16; }
#endif

/* ---- types ---- */

template <class Elem, class Acc> struct tp_type_integer {
	typedef Acc acc;
	enum { SIZE = sizeof(Elem), N = 16 / sizeof(Elem), ROUNDS = 0, FLOATS = 0 };
	TP_METHOD acc scalar(const void *p) { return (acc)*(const Elem *)p; }
	/* Of a sum, which is wrapped to the element's width. */
	TP_METHOD acc divide(acc v, bool is_signed, int64_t by)
	{
		if (sizeof(Elem) == 8) return (acc)(is_signed ? (uint64_t)((int64_t)v / by) : (uint64_t)v / (uint64_t)by);
		int32_t s = sizeof(Elem) == 1 ? (int8_t)v : (int32_t)v;
		uint32_t u = (uint32_t)v & (sizeof(Elem) == 1 ? 0xffu : 0xffffffffu);
		if (by > 0x7fffffff) return (acc)(is_signed ? (uint32_t)(int32_t)(s / by) : (uint32_t)(u / (uint64_t)by));
		return (acc)(is_signed ? (uint32_t)(s / (int32_t)by) : u / (uint32_t)by);
	}
};

template <class Elem> struct tp_type_bytes : tp_type_integer<Elem, Elem> {
	TP_METHOD void load(const tp_four &v, Elem *a)
	{
		TP_UNROLL
		for (int i = 0; i < 4; i++) {
			a[i] = (Elem)(v.x >> 8 * i);
			a[4 + i] = (Elem)(v.y >> 8 * i);
			a[8 + i] = (Elem)(v.z >> 8 * i);
			a[12 + i] = (Elem)(v.w >> 8 * i);
		}
	}
	TP_METHOD uint32_t word(const Elem *a)
	{ return (uint32_t)(uint8_t)a[0] | (uint32_t)(uint8_t)a[1] << 8 | (uint32_t)(uint8_t)a[2] << 16 | (uint32_t)(uint8_t)a[3] << 24; }
	TP_METHOD tp_four store(const Elem *a) { return tp_four{ word(a), word(a + 4), word(a + 8), word(a + 12) }; }
};
template <class Elem> struct tp_type_words : tp_type_integer<Elem, Elem> {
	TP_METHOD void load(const tp_four &v, Elem *a) { a[0] = (Elem)v.x; a[1] = (Elem)v.y; a[2] = (Elem)v.z; a[3] = (Elem)v.w; }
	TP_METHOD tp_four store(const Elem *a) { return tp_four{ (uint32_t)a[0], (uint32_t)a[1], (uint32_t)a[2], (uint32_t)a[3] }; }
};
template <class Elem> struct tp_type_longs : tp_type_integer<Elem, Elem> {
	TP_METHOD void load(const tp_four &v, Elem *a)
	{
		a[0] = (Elem)((uint64_t)v.x | (uint64_t)v.y << 32);
		a[1] = (Elem)((uint64_t)v.z | (uint64_t)v.w << 32);
	}
	TP_METHOD tp_four store(const Elem *a)
	{ return tp_four{ (uint32_t)(uint64_t)a[0], (uint32_t)((uint64_t)a[0] >> 32), (uint32_t)(uint64_t)a[1], (uint32_t)((uint64_t)a[1] >> 32) }; }
};
struct tp_type_u8 : tp_type_bytes<uint8_t> { };
struct tp_type_i8 : tp_type_bytes<int8_t> { };
struct tp_type_u32 : tp_type_words<uint32_t> { };
struct tp_type_i32 : tp_type_words<int32_t> { };
struct tp_type_u64 : tp_type_longs<uint64_t> { };
struct tp_type_i64 : tp_type_longs<int64_t> { };

template <class Acc> struct tp_type_float {
	typedef Acc acc;
	TP_METHOD acc divide(acc v, bool, int64_t) { return v; }
};
struct tp_type_f32 : tp_type_float<float> {
	enum { SIZE = 4, N = 4, ROUNDS = 0, FLOATS = 1 };
	TP_METHOD float scalar(const void *p) { return *(const float *)p; }
	TP_METHOD uint32_t settle(float v) { return v != v ? 0x7fffffff : tp_bits<uint32_t>(v); }
	TP_METHOD void load(const tp_four &v, float *a)
	{ a[0] = tp_bits<float>(v.x); a[1] = tp_bits<float>(v.y); a[2] = tp_bits<float>(v.z); a[3] = tp_bits<float>(v.w); }
	TP_METHOD tp_four store(const float *a) { return tp_four{ settle(a[0]), settle(a[1]), settle(a[2]), settle(a[3]) }; }
};
struct tp_type_f64 : tp_type_float<double> {
	enum { SIZE = 8, N = 2, ROUNDS = 0, FLOATS = 1 };
	TP_METHOD double scalar(const void *p) { return *(const double *)p; }
	TP_METHOD uint64_t settle(double v) { return v != v ? 0x7fffffffffffffffull : tp_bits<uint64_t>(v); }
	TP_METHOD void load(const tp_four &v, double *a)
	{
		a[0] = tp_bits<double>((uint64_t)v.x | (uint64_t)v.y << 32);
		a[1] = tp_bits<double>((uint64_t)v.z | (uint64_t)v.w << 32);
	}
	TP_METHOD tp_four store(const double *a)
	{
		uint64_t x = settle(a[0]), y = settle(a[1]);
		return tp_four{ (uint32_t)x, (uint32_t)(x >> 32), (uint32_t)y, (uint32_t)(y >> 32) };
	}
};
struct tp_type_f16 : tp_type_float<float> {
	enum { SIZE = 2, N = 8, ROUNDS = 1, FLOATS = 1 };
	TP_METHOD float scalar(const void *p)
	{
		float low, high;
		tp_f16_widen(*(const uint16_t *)p, &low, &high);
		return low;
	}
	TP_METHOD void load(const tp_four &v, float *a)
	{
		tp_f16_widen(v.x, a, a + 1);
		tp_f16_widen(v.y, a + 2, a + 3);
		tp_f16_widen(v.z, a + 4, a + 5);
		tp_f16_widen(v.w, a + 6, a + 7);
	}
	TP_METHOD tp_four store(const float *a)
	{ return tp_four{ tp_f16_narrow(a[0], a[1]), tp_f16_narrow(a[2], a[3]), tp_f16_narrow(a[4], a[5]), tp_f16_narrow(a[6], a[7]) }; }
};
struct tp_type_bf16 : tp_type_float<float> {
	enum { SIZE = 2, N = 8, ROUNDS = 1, FLOATS = 1 };
	TP_METHOD float scalar(const void *p) { return tp_bits<float>((uint32_t)*(const uint16_t *)p << 16); }
	TP_METHOD void split(uint32_t word, float *a) { a[0] = tp_bits<float>(word << 16); a[1] = tp_bits<float>(word & 0xffff0000u); }
	TP_METHOD void load(const tp_four &v, float *a) { split(v.x, a); split(v.y, a + 2); split(v.z, a + 4); split(v.w, a + 6); }
	TP_METHOD tp_four store(const float *a)
	{ return tp_four{ tp_bf16_narrow(a[0], a[1]), tp_bf16_narrow(a[2], a[3]), tp_bf16_narrow(a[4], a[5]), tp_bf16_narrow(a[6], a[7]) }; }
};

/* Four 8-bit floats of a word. The processor converts pairs since sm_89. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define TP_QUARTER(type) \
TP_DEVICE void tp_##type##_widen_word(uint32_t word, float *a) \
{ \
	uint32_t low, high; \
	asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2." #type "x2 %0, l; cvt.rn.f16x2." #type "x2 %1, h;}" : "=r"(low), "=r"(high) : "r"(word)); \
	tp_f16_widen(low, a, a + 1); \
	tp_f16_widen(high, a + 2, a + 3); \
} \
TP_DEVICE uint32_t tp_##type##_narrow_word(const float *a) \
{ \
	uint32_t word; \
	asm("{.reg .b16 l, h; cvt.rn.satfinite." #type "x2.f32 l, %2, %1; cvt.rn.satfinite." #type "x2.f32 h, %4, %3; mov.b32 %0, {l, h};}" \
		: "=r"(word) : "f"(a[0]), "f"(a[1]), "f"(a[2]), "f"(a[3])); \
	return word; \
}
#else
#define TP_QUARTER(type) \
TP_DEVICE void tp_##type##_widen_word(uint32_t word, float *a) \
{ \
	TP_UNROLL \
	for (int i = 0; i < 4; i++) a[i] = tp_##type##_widen(word >> 8 * i & 0xff); \
} \
TP_DEVICE uint32_t tp_##type##_narrow_word(const float *a) \
{ return tp_##type##_narrow(a[0]) | tp_##type##_narrow(a[1]) << 8 | tp_##type##_narrow(a[2]) << 16 | tp_##type##_narrow(a[3]) << 24; }
#endif
TP_QUARTER(e4m3)
TP_QUARTER(e5m2)
#define TP_QUARTER_TYPE(type) \
struct tp_type_##type : tp_type_float<float> { \
	enum { SIZE = 1, N = 16, ROUNDS = 1, FLOATS = 1 }; \
	TP_METHOD float scalar(const void *p) { return tp_##type##_widen(*(const uint8_t *)p); } \
	TP_METHOD void load(const tp_four &v, float *a) \
	{ \
		tp_##type##_widen_word(v.x, a); \
		tp_##type##_widen_word(v.y, a + 4); \
		tp_##type##_widen_word(v.z, a + 8); \
		tp_##type##_widen_word(v.w, a + 12); \
	} \
	TP_METHOD tp_four store(const float *a) \
	{ \
		return tp_four{ tp_##type##_narrow_word(a), tp_##type##_narrow_word(a + 4), tp_##type##_narrow_word(a + 8), \
			tp_##type##_narrow_word(a + 12) }; \
	} \
};
TP_QUARTER_TYPE(e4m3)
TP_QUARTER_TYPE(e5m2)

/* ---- operations ---- */

struct tp_op_sum {
	enum { SCALES = 1 };
	template <class A> TP_METHOD A apply(A a, A b) { return (A)(a + b); }
};
struct tp_op_prod {
	enum { SCALES = 0 };
	template <class A> TP_METHOD A apply(A a, A b) { return (A)(a * b); }
};
/* b is taken where it is better or a NaN; a NaN in a fails both comparisons and stays. */
struct tp_op_max {
	enum { SCALES = 0 };
	template <class A> TP_METHOD A apply(A a, A b) { return b > a || b != b ? b : a; }
};
struct tp_op_min {
	enum { SCALES = 0 };
	template <class A> TP_METHOD A apply(A a, A b) { return b < a || b != b ? b : a; }
};

/* ---- scaling ---- */

template <class T> struct tp_scaling {
	bool pre, post, is_signed;
	typename T::acc before, after;
	int64_t divisor;
};
/* device_scalar is read here: once a kernel, by every thread. */
template <class T> TP_DEVICE void tp_scaling_get(const tp_dev_reduce &r, tp_scaling<T> *out)
{
	out->pre = r.pre != 0;
	out->post = r.post != 0;
	out->is_signed = r.post == TP_DEV_POST_SIGNED;
	out->before = T::FLOATS ? (typename T::acc)r.pre_scale : (typename T::acc)r.pre_integer;
	if (out->pre && r.device_scalar) out->before = T::scalar((const void *)r.device_scalar);
	out->after = (typename T::acc)(T::FLOATS ? r.post_scale : 1);
	out->divisor = r.post_divisor;
}
/* A raw source, before it is reduced. */
template <class T> TP_DEVICE void tp_scale_before(const tp_scaling<T> &s, typename T::acc *a)
{
	TP_UNROLL
	for (int i = 0; i < T::N; i++) a[i] = (typename T::acc)(a[i] * s.before);
	if (T::ROUNDS) T::load(T::store(a), a);
}
/* A final value. */
template <class T> TP_DEVICE void tp_scale_after(const tp_scaling<T> &s, typename T::acc *a)
{
	TP_UNROLL
	for (int i = 0; i < T::N; i++) a[i] = T::FLOATS ? (typename T::acc)(a[i] * s.after) : s.divisor > 1 ? T::divide(a[i], s.is_signed, s.divisor) : a[i];
}
/* a = a op the 16 bytes of a later source. */
template <class T, class O> TP_DEVICE void tp_reduce_more(typename T::acc *a, const tp_four &v)
{
	typename T::acc b[T::N];
	T::load(v, b);
	TP_UNROLL
	for (int i = 0; i < T::N; i++) a[i] = O::template apply<typename T::acc>(a[i], b[i]);
}

#endif

/* One vector's worth of arithmetic, for vectors of TP_W bytes (0: a single element). Included once for each width that an
 * instruction set uses; everything here is named <what>_<TP_W>. No include guard, on purpose.
 *
 * The same source gives every width, and each lane sees the same operations in the same order, which is what makes the
 * instruction sets agree bit for bit. Small floats live in float lanes between load and store. A NaN leaves as the one
 * NaN of its type (all ones but for the sign): payloads would otherwise depend on how a compiler ordered operands.
 * Memory is touched by memcpy: any alignment. */

#define TP_N(name) TP_PASTE(name, TP_W)
#define TP_VECTOR(elem, share) elem __attribute__((vector_size(TP_W ? TP_W / (share) : sizeof(elem))))

typedef TP_VECTOR(uint8_t, 1) TP_N(u8_);
typedef TP_VECTOR(int8_t, 1) TP_N(i8_);
typedef TP_VECTOR(uint32_t, 1) TP_N(u32_);
typedef TP_VECTOR(int32_t, 1) TP_N(i32_);
typedef TP_VECTOR(uint64_t, 1) TP_N(u64_);
typedef TP_VECTOR(int64_t, 1) TP_N(i64_);
typedef TP_VECTOR(float, 1) TP_N(f32_);
typedef TP_VECTOR(double, 1) TP_N(f64_);
typedef TP_VECTOR(uint16_t, 2) TP_N(half_lanes_);
typedef TP_VECTOR(uint8_t, 4) TP_N(byte_lanes_);

#define TP_U32 TP_N(u32_)
#define TP_I32 TP_N(i32_)
#define TP_F32 TP_N(f32_)
#define TP_U64 TP_N(u64_)
#define TP_F64 TP_N(f64_)

/* mask ? yes : no, lane by lane */
TP_INLINE TP_U32 TP_N(select_)(TP_I32 mask, TP_U32 yes, TP_U32 no)
{
	return (yes & (TP_U32)mask) | (no & ~(TP_U32)mask);
}

#if TP_W && TP_W == TP_NATIVE_W
TP_INLINE TP_F32 TP_N(least_)(TP_F32 a, TP_F32 b) { return (TP_F32)tp_float_min(a, b); }
TP_INLINE TP_F32 TP_N(most_)(TP_F32 a, TP_F32 b) { return (TP_F32)tp_float_max(a, b); }
#else
TP_INLINE TP_F32 TP_N(least_)(TP_F32 a, TP_F32 b) { return (TP_F32)TP_N(select_)((TP_I32)(a < b), (TP_U32)a, (TP_U32)b); }
TP_INLINE TP_F32 TP_N(most_)(TP_F32 a, TP_F32 b) { return (TP_F32)TP_N(select_)((TP_I32)(a > b), (TP_U32)a, (TP_U32)b); }
#endif

/* v is a NaN ? nan : bits */
#if TP_W && TP_W == TP_MASK_W
TP_INLINE TP_U32 TP_N(unless_nan_)(TP_F32 v, TP_U32 bits, uint32_t nan) { return (TP_U32)tp_unless_nan(v, (TP_NATIVE)bits, nan); }
#else
TP_INLINE TP_U32 TP_N(unless_nan_)(TP_F32 v, TP_U32 bits, uint32_t nan)
{
	return TP_N(select_)((TP_I32)(v != v), nan - (TP_U32){ 0 }, bits);
}
#endif

/* Whole elements, moved as they are. */
#define TP_PLAIN(type) \
TP_INLINE TP_N(type##_) TP_N(load_##type##_)(const char *from) \
{ \
	TP_N(type##_) v; \
	memcpy(&v, from, sizeof(v)); \
	return v; \
} \
TP_INLINE TP_N(type##_) TP_N(sum_##type##_)(TP_N(type##_) a, TP_N(type##_) b) { return a + b; } \
TP_INLINE TP_N(type##_) TP_N(prod_##type##_)(TP_N(type##_) a, TP_N(type##_) b) { return a * b; }

#define TP_INTEGER(type) \
TP_PLAIN(type) \
TP_INLINE void TP_N(store_##type##_)(char *to, TP_N(type##_) v) { memcpy(to, &v, sizeof(v)); } \
TP_INLINE TP_N(type##_) TP_N(max_##type##_)(TP_N(type##_) a, TP_N(type##_) b) \
{ \
	TP_N(type##_) take = (TP_N(type##_))(b > a); \
	return (b & take) | (a & ~take); \
} \
TP_INLINE TP_N(type##_) TP_N(min_##type##_)(TP_N(type##_) a, TP_N(type##_) b) \
{ \
	TP_N(type##_) take = (TP_N(type##_))(b < a); \
	return (b & take) | (a & ~take); \
}

/* b is taken where it is better or a NaN; a NaN in a fails both comparisons and stays. */
#define TP_FLOAT(type, bits) \
TP_PLAIN(type) \
TP_INLINE void TP_N(store_##type##_)(char *to, TP_N(type##_) v) \
{ \
	v = TP_N(settle_##type##_)(v); \
	memcpy(to, &v, sizeof(v)); \
} \
TP_INLINE TP_N(type##_) TP_N(max_##type##_)(TP_N(type##_) a, TP_N(type##_) b) \
{ \
	TP_N(bits##_) take = (TP_N(bits##_))((b > a) | (b != b)); \
	return (TP_N(type##_))(((TP_N(bits##_))b & take) | ((TP_N(bits##_))a & ~take)); \
} \
TP_INLINE TP_N(type##_) TP_N(min_##type##_)(TP_N(type##_) a, TP_N(type##_) b) \
{ \
	TP_N(bits##_) take = (TP_N(bits##_))((b < a) | (b != b)); \
	return (TP_N(type##_))(((TP_N(bits##_))b & take) | ((TP_N(bits##_))a & ~take)); \
}

TP_INTEGER(u8)
TP_INTEGER(i8)
TP_INTEGER(u32)
TP_INTEGER(i32)
TP_INTEGER(u64)
TP_INTEGER(i64)

TP_INLINE TP_F32 TP_N(settle_f32_)(TP_F32 v) { return (TP_F32)TP_N(unless_nan_)(v, (TP_U32)v, 0x7fffffff); }
TP_INLINE TP_F64 TP_N(settle_f64_)(TP_F64 v)
{
	TP_U64 nan = (TP_U64)(v != v);
	return (TP_F64)(((TP_U64)v & ~nan) | (nan >> 1));
}

TP_FLOAT(f32, u32)
TP_FLOAT(f64, u64)

/* Small floats to float: the exponent is moved to float's bias; with an exponent of zero the value is mantissa * 2^k,
 * which the subtraction of the smallest normal number gives exactly (also where denormals are flushed). */
TP_INLINE TP_F32 TP_N(widen_)(TP_U32 magnitude, TP_U32 sign, uint32_t shift, uint32_t bias)
{
	uint32_t least = (bias + 1) << 23;
	TP_U32 moved = (magnitude << shift) + (bias << 23);
	TP_F32 tiny = (TP_F32)(moved + (1u << 23)) - (TP_F32)(least - (TP_U32){ 0 });
	TP_I32 subnormal = (TP_I32)(moved < least);
	return (TP_F32)(TP_N(select_)(subnormal, (TP_U32)tiny, moved) | sign);
}

/* Float to small float, to nearest even, in the low bits of each lane, without sign; `most` (a float) and all above become
 * `most`. Adding a power of two whose last place is the small type's last place at this exponent does the rounding; what
 * it adds to the bits is the mantissa with its leading one, which counts as one more exponent, as the encoding wants it. */
TP_INLINE TP_U32 TP_N(narrow_)(TP_F32 magnitude, uint32_t shift, uint32_t bias, uint32_t most)
{
	const uint32_t least = (bias + 1) << 23;
	TP_F32 kept = TP_N(least_)(magnitude, (TP_F32)(most - (TP_U32){ 0 }));
	TP_F32 power = (TP_F32)((TP_U32)kept & 0x7f800000);
	TP_U32 exponent = (TP_U32)TP_N(most_)(power, (TP_F32)(least - (TP_U32){ 0 }));
	TP_U32 unit = exponent + (shift << 23);
	return ((exponent - least) >> shift) + (TP_U32)(kept + (TP_F32)unit) - unit;
}

#if TP_W && TP_W == TP_NATIVE_W
TP_INLINE TP_U32 TP_N(load_words_)(const char *from) { return (TP_U32)tp_words_load(from); }
TP_INLINE void TP_N(store_words_)(char *to, TP_U32 bits) { tp_words_store(to, (TP_NATIVE)bits); }
#else
TP_INLINE TP_U32 TP_N(load_words_)(const char *from)
{
	TP_N(half_lanes_) v;
	memcpy(&v, from, sizeof(v));
	return __builtin_convertvector(v, TP_U32);
}

TP_INLINE void TP_N(store_words_)(char *to, TP_U32 bits)
{
	TP_N(half_lanes_) v = __builtin_convertvector(bits, TP_N(half_lanes_));
	memcpy(to, &v, sizeof(v));
}
#endif

TP_INLINE TP_F32 TP_N(load_bf16_)(const char *from) { return (TP_F32)(TP_N(load_words_)(from) << 16); }

TP_INLINE void TP_N(store_bf16_)(char *to, TP_F32 v)
{
	TP_U32 bits = (TP_U32)v;
	TP_U32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
	TP_N(store_words_)(to, TP_N(unless_nan_)(v, rounded, 0x7fff));
}

#if TP_W && TP_W == TP_HALF_W
TP_INLINE TP_F32 TP_N(load_f16_)(const char *from) { return (TP_F32)tp_half_load(from); }
TP_INLINE void TP_N(store_f16_)(char *to, TP_F32 v) { tp_half_store(to, TP_N(settle_f32_)(v)); }
#else
TP_INLINE TP_F32 TP_N(load_f16_)(const char *from)
{
	TP_U32 bits = TP_N(load_words_)(from);
	TP_U32 magnitude = bits & 0x7fff, sign = (bits & 0x8000) << 16;
	/* infinities and NaN: on to float's largest exponent */
	TP_U32 special = (TP_U32)(magnitude >= 0x7c00) & (112u << 23);
	return (TP_F32)((TP_U32)TP_N(widen_)(magnitude, sign, 13, 112) + special);
}

TP_INLINE void TP_N(store_f16_)(char *to, TP_F32 v)
{
	TP_U32 bits = (TP_U32)v;
	TP_U32 small = TP_N(narrow_)((TP_F32)(bits & 0x7fffffff), 13, 112, 0x47800000) | ((bits >> 16) & 0x8000);
	TP_N(store_words_)(to, TP_N(unless_nan_)(v, small, 0x7fff));
}
#endif

#if TP_W && TP_W == TP_NATIVE_W
TP_INLINE TP_U32 TP_N(load_bytes_)(const char *from) { return (TP_U32)tp_bytes_load(from); }
TP_INLINE void TP_N(store_bytes_)(char *to, TP_U32 bits) { tp_bytes_store(to, (TP_NATIVE)bits); }
#else
TP_INLINE TP_U32 TP_N(load_bytes_)(const char *from)
{
	TP_N(byte_lanes_) v;
	memcpy(&v, from, sizeof(v));
	return __builtin_convertvector(v, TP_U32);
}

TP_INLINE void TP_N(store_bytes_)(char *to, TP_U32 bits)
{
	TP_N(byte_lanes_) v = __builtin_convertvector(bits, TP_N(byte_lanes_));
	memcpy(to, &v, sizeof(v));
}
#endif

/* e5m2 is the upper half of a half; e4m3, moved into one, is 2^8 too small, and its NaN comes out as 480. */
#if TP_W && TP_W == TP_HALF_W
TP_INLINE TP_F32 TP_N(load_e5m2_)(const char *from) { return (TP_F32)tp_e5m2_load(from); }

TP_INLINE TP_F32 TP_N(load_e4m3_)(const char *from)
{
	TP_F32 v = (TP_F32)tp_e4m3_load(from) * 256.0f;
	TP_U32 nan = (TP_U32)(((TP_U32)v & 0x7fffffff) == 0x43f00000);
	return (TP_F32)((TP_U32)v | (nan >> 1));
}
#else
TP_INLINE TP_F32 TP_N(load_e5m2_)(const char *from)
{
	TP_U32 bits = TP_N(load_bytes_)(from);
	TP_U32 magnitude = bits & 0x7f, sign = (bits & 0x80) << 24;
	TP_U32 special = (TP_U32)(magnitude >= 0x7c) & (112u << 23);
	return (TP_F32)((TP_U32)TP_N(widen_)(magnitude, sign, 21, 112) + special);
}

/* e4m3 has no infinity and one NaN, all ones. */
TP_INLINE TP_F32 TP_N(load_e4m3_)(const char *from)
{
	TP_U32 bits = TP_N(load_bytes_)(from);
	TP_U32 magnitude = bits & 0x7f, sign = (bits & 0x80) << 24;
	TP_U32 nan = (TP_U32)(magnitude == 0x7f) & 0x7fffffff;
	return (TP_F32)((TP_U32)TP_N(widen_)(magnitude, sign, 20, 120) | nan);
}
#endif

TP_INLINE void TP_N(store_e5m2_)(char *to, TP_F32 v)
{
	TP_U32 bits = (TP_U32)v;
	TP_U32 small = TP_N(narrow_)((TP_F32)(bits & 0x7fffffff), 21, 112, 0x47600000) | ((bits >> 24) & 0x80);
	TP_N(store_bytes_)(to, TP_N(unless_nan_)(v, small, 0x7f));
}

TP_INLINE void TP_N(store_e4m3_)(char *to, TP_F32 v)
{
	TP_U32 bits = (TP_U32)v;
	TP_U32 small = TP_N(narrow_)((TP_F32)(bits & 0x7fffffff), 20, 120, 0x43e00000) | ((bits >> 24) & 0x80);
	TP_N(store_bytes_)(to, TP_N(unless_nan_)(v, small, 0x7f));
}

#undef TP_PLAIN
#undef TP_INTEGER
#undef TP_FLOAT
#undef TP_U32
#undef TP_I32
#undef TP_F32
#undef TP_U64
#undef TP_F64
#undef TP_VECTOR
#undef TP_N

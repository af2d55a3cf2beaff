#include "exec/helper_reduce.h"
#include <math.h>
#include <string.h>

uint64_t reduce_draw(uint64_t *state)
{
	*state += 0x9e3779b97f4a7c15u;
	uint64_t z = *state;
	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
	return z ^ (z >> 31);
}

struct format { int bits, mantissa, bias; double most; };

static struct format format_of(ncclDataType_t type)
{
	switch (type) {
	case ncclFloat16:
		return (struct format){ 16, 10, 15, 65504 };
	case ncclBfloat16:
		return (struct format){ 16, 7, 127, 0x1.fep127 };
	case ncclFloat8e4m3:
		return (struct format){ 8, 3, 7, 448 };
	default:
		return (struct format){ 8, 2, 15, 57344 };
	}
}

static uint32_t load_bits(const void *element, int bits)
{
	uint8_t b;
	uint16_t w;
	if (bits == 8) {
		memcpy(&b, element, 1);
		return b;
	}
	memcpy(&w, element, 2);
	return w;
}

static void store_bits(void *element, int bits, uint32_t value)
{
	uint8_t b = (uint8_t)value;
	uint16_t w = (uint16_t)value;
	memcpy(element, bits == 8 ? (void *)&b : (void *)&w, (size_t)bits / 8);
}

double reduce_decode(ncclDataType_t type, const void *element)
{
	float f;
	double d;
	if (type == ncclFloat32) {
		memcpy(&f, element, 4);
		return f;
	}
	if (type == ncclFloat64) {
		memcpy(&d, element, 8);
		return d;
	}
	struct format m = format_of(type);
	uint32_t bits = load_bits(element, m.bits);
	double sign = bits >> (m.bits - 1) ? -1 : 1;
	int exponent = (int)(bits & ((1u << (m.bits - 1)) - 1)) >> m.mantissa;
	int fraction = (int)(bits & ((1u << m.mantissa) - 1));
	int top = (1 << (m.bits - 1 - m.mantissa)) - 1;
	if (type == ncclFloat8e4m3) {
		if (exponent == top && fraction == 7)
			return NAN;
	} else if (exponent == top) {
		return fraction ? NAN : sign * INFINITY;
	}
	if (exponent == 0)
		return sign * ldexp(fraction, 1 - m.bias - m.mantissa);
	return sign * ldexp(fraction + (1 << m.mantissa), exponent - m.bias - m.mantissa);
}

void reduce_encode(ncclDataType_t type, double value, void *element)
{
	const uint64_t nan64 = 0x7fffffffffffffff;
	const uint32_t nan32 = 0x7fffffff;
	if (type == ncclFloat32) {
		float f = (float)value;
		memcpy(element, isnan(value) ? (const void *)&nan32 : (const void *)&f, 4);
		return;
	}
	if (type == ncclFloat64) {
		memcpy(element, isnan(value) ? (const void *)&nan64 : (const void *)&value, 8);
		return;
	}
	struct format m = format_of(type);
	uint32_t sign = signbit(value) ? 1u << (m.bits - 1) : 0;
	if (isnan(value)) {
		store_bits(element, m.bits, (1u << (m.bits - 1)) - 1);
		return;
	}
	double magnitude = fabs(value);
	/* the spacing of the type at this magnitude; nearbyint rounds to nearest even */
	int exponent = 1 - m.bias;
	if (magnitude > 0 && isfinite(magnitude) && ilogb(magnitude) > exponent)
		exponent = ilogb(magnitude);
	double unit = ldexp(1, exponent - m.mantissa);
	double rounded = isfinite(magnitude) ? nearbyint(magnitude / unit) * unit : magnitude;
	if (rounded > m.most) {
		if (m.bits == 8) {
			rounded = m.most;
		} else {
			store_bits(element, m.bits, sign | (type == ncclFloat16 ? 0x7c00u : 0x7f80u));
			return;
		}
	}
	uint32_t bits = 0;
	if (rounded >= ldexp(1, 1 - m.bias)) {
		exponent = ilogb(rounded);
		bits = (uint32_t)(exponent + m.bias) << m.mantissa;
		bits |= (uint32_t)ldexp(rounded - ldexp(1, exponent), m.mantissa - exponent);
	} else {
		bits = (uint32_t)ldexp(rounded, m.bias - 1 + m.mantissa);
	}
	store_bits(element, m.bits, sign | bits);
}

static double fold_double(ncclRedOp_t op, double a, double b, bool single)
{
	switch (op) {
	case ncclSum:
		return single ? (double)((float)a + (float)b) : a + b;
	case ncclProd:
		return single ? (double)((float)a * (float)b) : a * b;
	case ncclMax:
		return isnan(a) || isnan(b) ? NAN : b > a ? b : a;
	default:
		return isnan(a) || isnan(b) ? NAN : b < a ? b : a;
	}
}

static double scale_double(double a, double by, bool single)
{
	return single ? (double)((float)a * (float)by) : a * by;
}

static void reference_float(const struct tp_reduce *r, bool final, char *dst, const void *const *src, int nsrc, uint64_t raw_mask,
	size_t at)
{
	const bool single = r->type != ncclFloat64;
	double sum = 0;
	for (int s = 0; s < nsrc; s++) {
		double v = reduce_decode(r->type, (const char *)src[s] + at);
		if (r->pre && s < 64 && (raw_mask >> s & 1))
			v = scale_double(v, r->pre_scale, single);
		sum = s == 0 ? v : fold_double(r->op, sum, v, single);
	}
	if (final && r->post)
		sum = scale_double(sum, r->post_scale, single);
	reduce_encode(r->type, sum, dst + at);
}

/* wide: int64_t or uint64_t, as the element is signed or not */
#define REFERENCE_INTEGER(elem, wide) do { \
	elem sum = 0, v; \
	for (int s = 0; s < nsrc; s++) { \
		memcpy(&v, (const char *)src[s] + at, sizeof(v)); \
		if (r->pre && s < 64 && (raw_mask >> s & 1)) \
			v = (elem)((uint64_t)v * (uint64_t)r->pre_integer); \
		if (s == 0) \
			sum = v; \
		else if (r->op == ncclSum) \
			sum = (elem)((uint64_t)sum + (uint64_t)v); \
		else if (r->op == ncclProd) \
			sum = (elem)((uint64_t)sum * (uint64_t)v); \
		else if (r->op == ncclMax ? v > sum : v < sum) \
			sum = v; \
	} \
	if (final && r->post) \
		sum = (elem)((wide)sum / (wide)r->post_divisor); \
	memcpy((char *)dst + at, &sum, sizeof(sum)); \
} while (0)

void reduce_reference(const struct tp_reduce *r, bool final, void *dst, const void *const *src, int nsrc, uint64_t raw_mask,
	size_t bytes)
{
	const size_t size = reduce_type_bytes(r->type);
	if (nsrc == 1 && !(final && r->post) && !(r->pre && raw_mask)) {
		memmove(dst, src[0], bytes);
		return;
	}
	for (size_t at = 0; at < bytes; at += size) {
		switch (r->type) {
		case ncclInt8:
			REFERENCE_INTEGER(int8_t, int64_t);
			break;
		case ncclUint8:
			REFERENCE_INTEGER(uint8_t, uint64_t);
			break;
		case ncclInt32:
			REFERENCE_INTEGER(int32_t, int64_t);
			break;
		case ncclUint32:
			REFERENCE_INTEGER(uint32_t, uint64_t);
			break;
		case ncclInt64:
			REFERENCE_INTEGER(int64_t, int64_t);
			break;
		case ncclUint64:
			REFERENCE_INTEGER(uint64_t, uint64_t);
			break;
		default:
			reference_float(r, final, dst, src, nsrc, raw_mask, at);
		}
	}
}

size_t reduce_type_bytes(ncclDataType_t type)
{
	static const size_t bytes[] = { 1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1 };
	return bytes[type];
}

void reduce_fill(ncclDataType_t type, void *to, size_t bytes, bool wild, uint64_t *state)
{
	static const double special[] = { 0.0, -0.0, INFINITY, -INFINITY, NAN, 1, -1, 448, 57344, 65504, 65519.99, 0x1p-24, 0x1p-9,
		0x1p-149, 3.4028234e38, 0x1p-126, 0x1p-14 };
	const size_t size = reduce_type_bytes(type);
	for (size_t at = 0; at < bytes; at += size) {
		uint64_t bits = reduce_draw(state);
		uint64_t kind = reduce_draw(state);
		if (type <= ncclUint64 || (wild && kind % 4 != 0)) {
			memcpy((char *)to + at, &bits, size);
			continue;
		}
		double value = wild ? special[(kind >> 8) % TP_ARRAY_LEN(special)] : (double)(int64_t)(bits >> 40) / 0x1p20 - 8;
		reduce_encode(type, value, (char *)to + at);
	}
}

/* Test data for `telpher perf`, and what each element must be afterwards, worked out from the definition of the collective
 * with code that shares nothing with the library's arithmetic. */
#include "perf.h"

#include <math.h>
#include <string.h>

static const struct { const char *name; uint8_t bytes, exponent_bits, mantissa_bits; bool is_signed, is_float; } types[ncclNumTypes] = {
	[ncclInt8] = { "int8", 1, 0, 0, true, false },          [ncclUint8] = { "uint8", 1, 0, 0, false, false },
	[ncclInt32] = { "int32", 4, 0, 0, true, false },        [ncclUint32] = { "uint32", 4, 0, 0, false, false },
	[ncclInt64] = { "int64", 8, 0, 0, true, false },        [ncclUint64] = { "uint64", 8, 0, 0, false, false },
	[ncclFloat16] = { "half", 2, 5, 10, true, true },       [ncclFloat32] = { "float", 4, 8, 23, true, true },
	[ncclFloat64] = { "double", 8, 11, 52, true, true },    [ncclBfloat16] = { "bfloat16", 2, 8, 7, true, true },
	[ncclFloat8e4m3] = { "f8e4m3", 1, 4, 3, true, true },   [ncclFloat8e5m2] = { "f8e5m2", 1, 5, 2, true, true },
};

size_t perf_type_bytes(int type) { return types[type].bytes; }
const char *perf_type_name(int type) { return types[type].name; }

const char *perf_op_name(int op)
{
	static const char *const names[PERF_NOPS] = { "sum", "prod", "max", "min", "avg", "mulsum" };
	return names[op];
}

static uint64_t mix(uint64_t x)
{
	x ^= x >> 31; x *= 0x7fb5d329728ea185u;
	x ^= x >> 27; x *= 0x81dadef4bc2dd44du;
	return x ^ (x >> 33);
}

static uint64_t noise(uint64_t seed, int rank, size_t index) { return mix(seed * 0x9e3779b97f4a7c15u + mix(index * 131 + (unsigned)rank + 1)); }

/* Small floats, exactly: finite values of the size used here only. */
static uint32_t encode_small(int type, double value)
{
	int e, mantissa = types[type].mantissa_bits, bias = (1 << (types[type].exponent_bits - 1)) - 1;
	uint32_t sign = signbit(value) ? 1u << (types[type].exponent_bits + mantissa) : 0;
	double m = frexp(fabs(value), &e);      /* m in [0.5, 1) */
	if (m == 0) return sign;
	return sign | ((uint32_t)(e - 1 + bias) << mantissa) | (uint32_t)nearbyint(ldexp(m * 2 - 1, mantissa));
}

static double decode_small(int type, uint32_t bits)
{
	int mantissa = types[type].mantissa_bits, bias = (1 << (types[type].exponent_bits - 1)) - 1;
	int e = (int)(bits >> mantissa) & ((1 << types[type].exponent_bits) - 1);
	double m = (double)(bits & ((1u << mantissa) - 1)) / (1 << mantissa);
	double value = e ? ldexp(1 + m, e - bias) : ldexp(m, 1 - bias);
	return bits >> (types[type].exponent_bits + mantissa) & 1 ? -value : value;
}

static void put(int type, void *buf, size_t i, double value)
{
	switch (type) {
	case ncclInt8: ((int8_t *)buf)[i] = (int8_t)(int64_t)value; break;
	case ncclUint8: ((uint8_t *)buf)[i] = (uint8_t)(int64_t)value; break;
	case ncclInt32: ((int32_t *)buf)[i] = (int32_t)value; break;
	case ncclUint32: ((uint32_t *)buf)[i] = (uint32_t)value; break;
	case ncclInt64: ((int64_t *)buf)[i] = (int64_t)value; break;
	case ncclUint64: ((uint64_t *)buf)[i] = (uint64_t)value; break;
	case ncclFloat32: ((float *)buf)[i] = (float)value; break;
	case ncclFloat64: ((double *)buf)[i] = value; break;
	case ncclFloat16: case ncclBfloat16: ((uint16_t *)buf)[i] = (uint16_t)encode_small(type, value); break;
	default: ((uint8_t *)buf)[i] = (uint8_t)encode_small(type, value); break;
	}
}

static double get(int type, const void *buf, size_t i)
{
	switch (type) {
	case ncclInt8: return ((const int8_t *)buf)[i];
	case ncclUint8: return ((const uint8_t *)buf)[i];
	case ncclInt32: return ((const int32_t *)buf)[i];
	case ncclUint32: return ((const uint32_t *)buf)[i];
	case ncclInt64: return (double)((const int64_t *)buf)[i];
	case ncclUint64: return (double)((const uint64_t *)buf)[i];
	case ncclFloat32: return ((const float *)buf)[i];
	case ncclFloat64: return ((const double *)buf)[i];
	case ncclFloat16: case ncclBfloat16: return decode_small(type, ((const uint16_t *)buf)[i]);
	default: return decode_small(type, ((const uint8_t *)buf)[i]);
	}
}

double perf_scalar(int rank) { return rank % 2 + 1; }
void perf_encode_scalar(int type, int rank, void *out) { put(type, out, 0, perf_scalar(rank)); }

/* How many ranks may contribute something to one element, so that its sum (of mulsum too) is exact in the type. */
static int most_contributors(int type)
{
	if (!types[type].is_float) return types[type].bytes == 1 ? 32 : 64;
	return types[type].mantissa_bits < 6 ? 1 << types[type].mantissa_bits : 64;
}

/* What rank contributes to element index of a reduction. Where there are too many ranks for an exact sum, all but some
 * contribute 0, other ones to each element. */
static double contribution(int type, int op, int rank, int nranks, size_t index, uint64_t seed)
{
	uint64_t h = noise(seed, rank, index);
	bool narrow = types[type].bytes == 1;
	switch (op) {
	case ncclProd: {
		double value = rank < 4 && h % 4 == 0 ? 2 : 1;
		return types[type].is_signed && (h >> 8) % 2 ? -value : value;
	}
	case ncclMax: case ncclMin: {
		double value = (double)(h % 8);
		return types[type].is_signed ? value - 4 : value;
	}
	default:
		if (((size_t)rank + index + seed) % (size_t)nranks >= (size_t)most_contributors(type)) return 0;
		if (!types[type].is_signed) return (double)(h % (narrow ? 2 : 5));
		return narrow ? (double)(h % 3) - 1 : (double)(h % 5) - 2;
	}
}

static bool moves_only(const struct perf_options *o) { return !perf_colls[o->coll].reduces; }

/* Element i of the data that moves unreduced: any bits, from who sent it and where it lay in the sender's buffer. */
static uint64_t pattern(int rank, size_t index, uint64_t seed) { return noise(seed ^ 0x5bd1e995, rank, index); }

void perf_fill(const struct perf_options *o, int type, int op, int rank, int nranks, void *buf, size_t nblocks, size_t count, uint64_t seed)
{
	size_t bytes = types[type].bytes;
	for (size_t i = 0; i < nblocks * count; i++) {
		if (moves_only(o)) {
			uint64_t bits = pattern(rank, i, seed);
			memcpy((char *)buf + i * bytes, &bits, bytes);
		} else {
			put(type, buf, i, contribution(type, op, rank, nranks, i, seed));
		}
	}
}

bool perf_receives(enum perf_coll coll, int root, int rank)
{
	return (coll != PERF_REDUCE && coll != PERF_GATHER) || rank == root;
}

/* Whether a reduced element is right. Nothing but the exact value will do, except that each addition of an average's parts
 * may round. */
static bool is_reduced_right(int type, int op, int nranks, size_t index, uint64_t seed, const void *buf, size_t at)
{
	double want = op == ncclProd ? 1 : op == ncclMax ? -INFINITY : op == ncclMin ? INFINITY : 0, magnitude = 0;
	int additions = 0;
	for (int r = 0; r < nranks; r++) {
		double value = contribution(type, op, r, nranks, index, seed);
		if (op == PERF_MUL_SUM) value *= perf_scalar(r);
		if (op == ncclProd) want *= value;
		else if (op == ncclMax) want = fmax(want, value);
		else if (op == ncclMin) want = fmin(want, value);
		else want += value;
		magnitude += fabs(value);
		additions += value != 0;
	}
	if (op == ncclAvg) {
		want /= nranks;
		magnitude /= nranks;
		if (!types[type].is_float) want = trunc(want);
	}
	double got = get(type, buf, at);
	if (!types[type].is_float) {
		unsigned char bytes[8] = { 0 };
		put(type, bytes, 0, want);          /* wraps as the type does */
		return get(type, bytes, 0) == got;
	}
	if (op != ncclAvg) return got == want;
	/* Half a unit in the last place each, of a sum or of the smallest numbers; and the quotient's own. */
	int mantissa = types[type].mantissa_bits, smallest = 2 - (1 << (types[type].exponent_bits - 1)) - mantissa;
	double rounding = ldexp(magnitude, -mantissa - 1) + ldexp(0.5, smallest);
	return fabs(got - want) <= (additions + 1) * rounding;
}

int64_t perf_wrong(const struct perf_options *o, int type, int op, int root, int rank, int nranks, const void *buf, size_t count, uint64_t seed)
{
	const struct perf_coll_info *info = &perf_colls[o->coll];
	size_t bytes = types[type].bytes, blocks = info->recv_is_large ? (size_t)nranks : 1;
	int64_t wrong = 0;
	for (size_t b = 0; b < blocks; b++) {
		for (size_t i = 0; i < count; i++) {
			size_t at = b * count + i;
			if (info->reduces) {
				size_t index = o->coll == PERF_REDUCE_SCATTER ? (size_t)rank * count + i : i;
				wrong += !is_reduced_right(type, op, nranks, index, seed, buf, at);
				continue;
			}
			int from = 0;
			size_t index = i;
			switch (o->coll) {
			case PERF_BROADCAST: from = root; break;
			case PERF_SCATTER: from = root; index = (size_t)rank * count + i; break;
			case PERF_SEND_RECV: from = (rank + nranks - 1) % nranks; break;
			case PERF_ALL_TO_ALL: from = (int)b; index = (size_t)rank * count + i; break;
			default: from = (int)b; break;
			}
			uint64_t bits = pattern(from, index, seed);
			wrong += memcmp((const char *)buf + at * bytes, &bits, bytes) != 0;
		}
	}
	return wrong;
}

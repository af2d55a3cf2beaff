/* Names and sizes of NCCL's types, operations and results; memory; a hash. */
#include <stdlib.h>
#include <string.h>
#include "base/internal.h"

static const struct { const char *name; size_t bytes; } types[] = {
	[ncclInt8] = { "int8", 1 }, [ncclUint8] = { "uint8", 1 }, [ncclInt32] = { "int32", 4 }, [ncclUint32] = { "uint32", 4 },
	[ncclInt64] = { "int64", 8 }, [ncclUint64] = { "uint64", 8 }, [ncclFloat16] = { "half", 2 }, [ncclFloat32] = { "float", 4 },
	[ncclFloat64] = { "double", 8 }, [ncclBfloat16] = { "bfloat16", 2 }, [ncclFloat8e4m3] = { "f8e4m3", 1 }, [ncclFloat8e5m2] = { "f8e5m2", 1 },
};
static const char *const ops[] = {
	[ncclSum] = "sum", [ncclProd] = "prod", [ncclMax] = "max", [ncclMin] = "min", [ncclAvg] = "avg",
};
static const char *const results[] = {
	[ncclSuccess] = "ncclSuccess", [ncclUnhandledCudaError] = "ncclUnhandledCudaError", [ncclSystemError] = "ncclSystemError",
	[ncclInternalError] = "ncclInternalError", [ncclInvalidArgument] = "ncclInvalidArgument", [ncclInvalidUsage] = "ncclInvalidUsage",
	[ncclRemoteError] = "ncclRemoteError", [ncclInProgress] = "ncclInProgress",
};

size_t tp_type_bytes(ncclDataType_t type) { return (unsigned)type < TP_ARRAY_LEN(types) ? types[type].bytes : 0; }
const char *tp_type_name(ncclDataType_t type) { return (unsigned)type < TP_ARRAY_LEN(types) ? types[type].name : "unknown type"; }

const char *tp_op_name(ncclRedOp_t op)
{
	if ((unsigned)op < TP_ARRAY_LEN(ops))
		return ops[op];
	return (int)op >= (int)ncclNumOps ? "mulsum" : "unknown operation";
}

const char *tp_result_name(ncclResult_t result) { return (unsigned)result < TP_ARRAY_LEN(results) ? results[result] : "unknown result"; }

void *tp_alloc(size_t count, size_t bytes, const char *what)
{
	size_t total;
	void *memory = __builtin_mul_overflow(count, bytes, &total) ? NULL : calloc(1, total ? total : 1);
	if (!memory)
		TP_WARN("out of memory: %s needs %zu x %zu bytes", what, count, bytes);
	return memory;
}

/* Multiplies to 128 bits and folds: every input bit reaches every output bit. */
static uint64_t mix(uint64_t a, uint64_t b)
{
	unsigned __int128 product = (unsigned __int128)a * b;
	return (uint64_t)product ^ (uint64_t)(product >> 64);
}

uint64_t tp_hash64(const void *data, size_t bytes, uint64_t seed)
{
	/* Odd constants with about as many ones as zeros: fractions of the square roots of 2, 3 and 5. */
	static const uint64_t k0 = 0x6a09e667f3bcc909u, k1 = 0xbb67ae8584caa73bu, k2 = 0x3c6ef372fe94f82bu;
	const uint8_t *p = data;
	uint64_t hash = mix(seed ^ k0, k1 ^ bytes), word;
	for (size_t left = bytes; left >= 8; left -= 8, p += 8) {
		memcpy(&word, p, 8);
		hash = mix(hash ^ word ^ k1, k2 + (hash << 1 | hash >> 63));
	}
	if (bytes % 8) {
		word = 0;
		memcpy(&word, p, bytes % 8);
		hash = mix(hash ^ word ^ k2, k0 + (hash << 1 | hash >> 63));
	}
	hash ^= hash >> 32;
	hash *= k1;
	return hash ^ hash >> 29;
}

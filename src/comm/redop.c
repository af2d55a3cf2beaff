/* PreMulSum operators: a scalar by which a rank's input is multiplied before it is summed. Their numbers are unique in the
 * process, so that one communicator's operator means nothing to another. */
#include <math.h>
#include <string.h>

#include "comm/internal.h"

/* Number of an operator: ncclNumOps + slot + TP_REDOPS * generation, below 2^31. */
#define GENERATIONS (0x7fffff00u / TP_REDOPS)
static _Atomic uint32_t last_generation;

/* Not ldexp, which would have the library need libm. exponent: that of a normal double. */
static double power_of_two(int exponent)
{
	uint64_t bits = (uint64_t)(exponent + 1023) << 52;
	double value;
	memcpy(&value, &bits, sizeof(value));
	return value;
}

static double small_float(uint32_t bits, int exponent_bits, int mantissa_bits, bool has_infinity)
{
	uint32_t sign = bits >> (exponent_bits + mantissa_bits) & 1;
	uint32_t exponent = bits >> mantissa_bits & ((1u << exponent_bits) - 1), mantissa = bits & ((1u << mantissa_bits) - 1);
	int bias = (1 << (exponent_bits - 1)) - 1;
	uint32_t top = (1u << exponent_bits) - 1;
	double value;
	if (exponent == top && has_infinity) value = mantissa ? NAN : INFINITY;
	else if (exponent == top && mantissa == (1u << mantissa_bits) - 1 && !has_infinity) value = NAN;
	else if (exponent == 0) value = mantissa * power_of_two(1 - bias - mantissa_bits);
	else value = (mantissa + (1u << mantissa_bits)) * power_of_two((int)exponent - bias - mantissa_bits);
	return sign ? -value : value;
}

/* The scalar as a number (floats) or an integer. */
void tp_redop_read_scalar(const void *scalar, struct tp_reduce *reduce)
{
	union { int8_t i8; uint8_t u8; int32_t i32; uint32_t u32; int64_t i64; uint64_t u64; uint16_t u16; float f; double d; } v;
	memset(&v, 0, sizeof(v));
	memcpy(&v, scalar, tp_type_bytes(reduce->type));
	reduce->pre_scale = 1;
	reduce->pre_integer = 1;
	switch (reduce->type) {
	case ncclInt8: reduce->pre_integer = v.i8; break;
	case ncclUint8: reduce->pre_integer = v.u8; break;
	case ncclInt32: reduce->pre_integer = v.i32; break;
	case ncclUint32: reduce->pre_integer = v.u32; break;
	case ncclInt64: case ncclUint64: reduce->pre_integer = v.i64; break;
	case ncclFloat16: reduce->pre_scale = small_float(v.u16, 5, 10, true); break;
	case ncclFloat32: reduce->pre_scale = v.f; break;
	case ncclFloat64: reduce->pre_scale = v.d; break;
	case ncclBfloat16: reduce->pre_scale = small_float(v.u16, 8, 7, true); break;
	case ncclFloat8e4m3: reduce->pre_scale = small_float(v.u8, 4, 3, false); break;
	case ncclFloat8e5m2: reduce->pre_scale = small_float(v.u8, 5, 2, true); break;
	default: break;
	}
}

ncclResult_t tp_redop_create(ncclRedOp_t *op, const void *scalar, ncclDataType_t type, ncclScalarResidence_t residence,
	ncclComm_t comm)
{
	static const char name[] = "ncclRedOpCreatePreMulSum";
	if (!op || !scalar) return TP_FAIL(ncclInvalidArgument, "%s: %s is NULL", name, op ? "scalar" : "op");
	if (!tp_type_bytes(type)) return TP_FAIL(ncclInvalidArgument, "%s: there is no datatype %d", name, (int)type);
	if (residence != ncclScalarDevice && residence != ncclScalarHostImmediate)
		return TP_FAIL(ncclInvalidArgument, "%s: there is no residence %d", name, (int)residence);
	TP_TRY(tp_comm_enter(comm, name));
	ncclResult_t result = tp_comm_may_call(comm, name);
	pthread_mutex_lock(&comm->choice_lock);
	uint32_t slot = 0;
	while (slot < TP_REDOPS && comm->redops[slot].used) slot++;
	if (result == ncclSuccess && slot == TP_REDOPS)
		result = TP_FAIL(ncclInvalidUsage, "%s: communicator %p already has %d operators; destroy those no longer needed", name,
			(void *)comm, TP_REDOPS);
	if (result == ncclSuccess) {
		struct tp_redop *r = &comm->redops[slot];
		*r = (struct tp_redop){ .used = true, .type = type, .on_device = residence == ncclScalarDevice, .scalar = scalar };
		r->generation = atomic_fetch_add_explicit(&last_generation, 1, memory_order_relaxed) % GENERATIONS;
		if (!r->on_device) memcpy(r->value, scalar, tp_type_bytes(type));
		*op = (ncclRedOp_t)(ncclNumOps + slot + TP_REDOPS * r->generation);
	}
	pthread_mutex_unlock(&comm->choice_lock);
	tp_comm_leave(comm);
	return result;
}

/* With choice_lock held. */
static struct tp_redop *find_locked(struct ncclComm *comm, ncclRedOp_t op)
{
	if ((int)op < ncclNumOps) return NULL;
	uint32_t number = (uint32_t)op - ncclNumOps;
	struct tp_redop *r = &comm->redops[number % TP_REDOPS];
	return r->used && r->generation == number / TP_REDOPS ? r : NULL;
}

ncclResult_t tp_redop_destroy(ncclRedOp_t op, ncclComm_t comm)
{
	static const char name[] = "ncclRedOpDestroy";
	if ((int)op >= 0 && op < ncclNumOps) return TP_FAIL(ncclInvalidArgument, "%s: operator %d is built in", name, (int)op);
	TP_TRY(tp_comm_enter(comm, name));
	pthread_mutex_lock(&comm->choice_lock);
	struct tp_redop *r = find_locked(comm, op);
	ncclResult_t result = ncclSuccess;
	if (r) r->used = false;
	else result = TP_FAIL(ncclInvalidArgument, "%s: communicator %p has no operator %d", name, (void *)comm, (int)op);
	pthread_mutex_unlock(&comm->choice_lock);
	tp_comm_leave(comm);
	return result;
}

ncclResult_t tp_redop_fill(struct ncclComm *comm, ncclRedOp_t op, ncclDataType_t type, struct tp_reduce *reduce,
	const void **device_scalar)
{
	*reduce = (struct tp_reduce){ .type = type, .op = op, .pre_scale = 1, .post_scale = 1, .post_divisor = 1, .pre_integer = 1 };
	*device_scalar = NULL;
	if (op == ncclAvg) tp_reduce_fill_avg(reduce, comm->nranks);
	if (op < ncclNumOps) return ncclSuccess;
	pthread_mutex_lock(&comm->choice_lock);
	struct tp_redop *r = find_locked(comm, op);
	ncclResult_t result = ncclSuccess;
	if (!r)
		result = TP_FAIL(ncclInvalidArgument, "communicator %p has no operator %d: another communicator's, or destroyed", (void *)comm,
			(int)op);
	else if (r->type != type)
		result = TP_FAIL(ncclInvalidArgument, "operator %d was made for %s, not for %s", (int)op, tp_type_name(r->type),
			tp_type_name(type));
	else {
		reduce->op = ncclSum;
		reduce->pre = true;
		if (r->on_device) *device_scalar = r->scalar;
		else tp_redop_read_scalar(r->value, reduce);
	}
	pthread_mutex_unlock(&comm->choice_lock);
	return result;
}

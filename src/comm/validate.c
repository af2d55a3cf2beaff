/* What a call must be, before anything is done about it. */
#include <stdint.h>

#include "comm/internal.h"

/* NCCL's in-place form of each collective: where the one buffer lies in the other, in blocks of the call's count. */
void tp_call_spans(const struct tp_comm_call *call, size_t *send_bytes, size_t *recv_bytes, ptrdiff_t *in_place)
{
	const struct ncclComm *comm = call->comm;
	size_t block = call->count * tp_type_bytes(call->type), all = block * (size_t)comm->nranks;
	bool root = call->root == comm->rank;
	*in_place = 0;
	*send_bytes = *recv_bytes = block;
	switch (call->coll) {
	case TP_ALL_REDUCE:
		break;
	case TP_REDUCE:
		if (!root) *recv_bytes = 0;
		break;
	case TP_BROADCAST:
		if (!root) *send_bytes = 0;
		break;
	case TP_ALL_GATHER:
		*recv_bytes = all;
		*in_place = (ptrdiff_t)(block * (size_t)comm->rank);
		break;
	case TP_REDUCE_SCATTER:
		*send_bytes = all;
		*in_place = -(ptrdiff_t)(block * (size_t)comm->rank);
		break;
	case TP_ALL_TO_ALL:
		/* As with NCCL, equal buffers are taken and what they hold afterwards is undefined: programs do so to measure. */
		*send_bytes = *recv_bytes = all;
		break;
	case TP_GATHER:
		*recv_bytes = root ? all : 0;
		*in_place = (ptrdiff_t)(block * (size_t)comm->rank);
		break;
	case TP_SCATTER:
		*send_bytes = root ? all : 0;
		*in_place = -(ptrdiff_t)(block * (size_t)comm->rank);
		break;
	default:
		if (call->is_send) *recv_bytes = 0;
		else *send_bytes = 0;
		break;
	}
}

static ncclResult_t validate_buffers(const struct tp_comm_call *call)
{
	size_t send_bytes, recv_bytes;
	ptrdiff_t in_place;
	tp_call_spans(call, &send_bytes, &recv_bytes, &in_place);
	if (send_bytes && !call->send) return TP_FAIL(ncclInvalidArgument, "%s: sendbuff is NULL", call->name);
	if (recv_bytes && !call->recv) return TP_FAIL(ncclInvalidArgument, "%s: recvbuff is NULL", call->name);
	if (!send_bytes || !recv_bytes) return ncclSuccess;
	uintptr_t send = (uintptr_t)call->send, recv = (uintptr_t)call->recv;
	if (send + send_bytes <= recv || recv + recv_bytes <= send) return ncclSuccess;
	if ((ptrdiff_t)(send - recv) == in_place) return ncclSuccess;
	return TP_FAIL(ncclInvalidArgument, "%s: sendbuff %p (%zu bytes) and recvbuff %p (%zu bytes) overlap but are not in place: that "
		"would be sendbuff == recvbuff %+td bytes", call->name, call->send, send_bytes, call->recv, recv_bytes, in_place);
}

static bool has_op(uint8_t coll) { return coll == TP_ALL_REDUCE || coll == TP_REDUCE || coll == TP_REDUCE_SCATTER; }

ncclResult_t tp_validate_call(const struct tp_comm_call *call)
{
	const struct ncclComm *comm = call->comm;
	size_t size = tp_type_bytes(call->type);
	if (!size)
		return TP_FAIL(ncclInvalidArgument, "%s: there is no datatype %d; they go from 0 to %d", call->name, (int)call->type,
			ncclNumTypes - 1);
	if (has_op(call->coll) && ((int)call->op < 0 || call->op > ncclMaxRedOp))
		return TP_FAIL(ncclInvalidArgument, "%s: there is no operator %d", call->name, (int)call->op);
	bool rooted = call->coll == TP_BROADCAST || call->coll == TP_REDUCE || call->coll == TP_GATHER || call->coll == TP_SCATTER;
	if ((rooted || call->coll == TP_SEND_RECV) && (call->root < 0 || call->root >= comm->nranks))
		return TP_FAIL(ncclInvalidArgument, "%s: %s is %d; it must be in [0, %d)", call->name, rooted ? "root" : "peer", call->root,
			comm->nranks);
	if (call->count > (size_t)PTRDIFF_MAX / size / (size_t)comm->nranks)
		return TP_FAIL(ncclInvalidArgument, "%s: count %zu of %s for %d ranks is more than memory can hold", call->name, call->count,
			tp_type_name(call->type), comm->nranks);
	return validate_buffers(call);
}

/* Bytes of one block, as plans count them. */
size_t tp_call_block_bytes(const struct tp_comm_call *call) { return call->count * tp_type_bytes(call->type); }

/* Equal on all ranks that make the same call; never 0. */
uint32_t tp_call_hash(uint8_t coll, size_t count, int type, int op, int root)
{
	uint64_t h = count * 0x9e3779b97f4a7c15u;
	h = (h ^ (h >> 29) ^ ((uint64_t)coll << 56 | (uint64_t)(uint8_t)type << 48 | (uint64_t)(uint8_t)op << 40 | (uint32_t)root))
		* 0xbf58476d1ce4e5b9u;
	h = (h ^ (h >> 32)) * 0x94d049bb133111ebu;
	return (uint32_t)(h >> 32) | 1;
}

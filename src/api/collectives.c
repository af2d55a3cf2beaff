/* Entry points of the data path: arguments into a struct tp_comm_call, no more. */
#include "api/api.h"

TP_API(ncclResult_t, ncclAllReduce, (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op,
	ncclComm_t comm, cudaStream_t stream))
{
	struct tp_comm_call call = { "AllReduce", sendbuff, recvbuff, count, datatype, op, -1, TP_ALL_REDUCE, false, comm, stream };
	return tp_comm_call(&call);
}

TP_API(ncclResult_t, ncclReduce, (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, int root,
	ncclComm_t comm, cudaStream_t stream))
{
	struct tp_comm_call call = { "Reduce", sendbuff, recvbuff, count, datatype, op, root, TP_REDUCE, false, comm, stream };
	return tp_comm_call(&call);
}

TP_API(ncclResult_t, ncclBroadcast, (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root,
	ncclComm_t comm, cudaStream_t stream))
{
	struct tp_comm_call call = { "Broadcast", sendbuff, recvbuff, count, datatype, ncclSum, root, TP_BROADCAST, false, comm, stream };
	return tp_comm_call(&call);
}

TP_API(ncclResult_t, ncclBcast, (void *buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream))
{
	struct tp_comm_call call = { "Broadcast", buff, buff, count, datatype, ncclSum, root, TP_BROADCAST, false, comm, stream };
	return tp_comm_call(&call);
}

TP_API(ncclResult_t, ncclAllGather, (const void *sendbuff, void *recvbuff, size_t sendcount, ncclDataType_t datatype,
	ncclComm_t comm, cudaStream_t stream))
{
	struct tp_comm_call call = { "AllGather", sendbuff, recvbuff, sendcount, datatype, ncclSum, -1, TP_ALL_GATHER, false, comm, stream };
	return tp_comm_call(&call);
}

TP_API(ncclResult_t, ncclReduceScatter, (const void *sendbuff, void *recvbuff, size_t recvcount, ncclDataType_t datatype,
	ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream))
{
	struct tp_comm_call call = { "ReduceScatter", sendbuff, recvbuff, recvcount, datatype, op, -1, TP_REDUCE_SCATTER, false, comm, stream };
	return tp_comm_call(&call);
}

TP_API(ncclResult_t, ncclAlltoAll, (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclComm_t comm,
	cudaStream_t stream))
{
	struct tp_comm_call call = { "AlltoAll", sendbuff, recvbuff, count, datatype, ncclSum, -1, TP_ALL_TO_ALL, false, comm, stream };
	return tp_comm_call(&call);
}

TP_API(ncclResult_t, ncclGather, (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root,
	ncclComm_t comm, cudaStream_t stream))
{
	struct tp_comm_call call = { "Gather", sendbuff, recvbuff, count, datatype, ncclSum, root, TP_GATHER, false, comm, stream };
	return tp_comm_call(&call);
}

TP_API(ncclResult_t, ncclScatter, (const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root,
	ncclComm_t comm, cudaStream_t stream))
{
	struct tp_comm_call call = { "Scatter", sendbuff, recvbuff, count, datatype, ncclSum, root, TP_SCATTER, false, comm, stream };
	return tp_comm_call(&call);
}

TP_API(ncclResult_t, ncclSend, (const void *sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
	cudaStream_t stream))
{
	struct tp_comm_call call = { "Send", sendbuff, NULL, count, datatype, ncclSum, peer, TP_SEND_RECV, true, comm, stream };
	return tp_comm_call(&call);
}

TP_API(ncclResult_t, ncclRecv, (void *recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
	cudaStream_t stream))
{
	struct tp_comm_call call = { "Recv", NULL, recvbuff, count, datatype, ncclSum, peer, TP_SEND_RECV, false, comm, stream };
	return tp_comm_call(&call);
}

TP_API(ncclResult_t, ncclGroupStart, (void)) { return tp_group_start(); }
TP_API(ncclResult_t, ncclGroupEnd, (void)) { return tp_group_end(); }
TP_API(ncclResult_t, ncclGroupSimulateEnd, (ncclSimInfo_t *simInfo)) { return tp_group_simulate_end(simInfo); }

TP_API(ncclResult_t, ncclRedOpCreatePreMulSum, (ncclRedOp_t *op, void *scalar, ncclDataType_t datatype,
	ncclScalarResidence_t residence, ncclComm_t comm))
{
	return tp_redop_create(op, scalar, datatype, residence, comm);
}

TP_API(ncclResult_t, ncclRedOpDestroy, (ncclRedOp_t op, ncclComm_t comm)) { return tp_redop_destroy(op, comm); }

/* SPDX-License-Identifier: Apache-2.0
 * Telpher's text of NCCL's interface, binary compatible with NCCL 2.28.9. It needs no CUDA: cudaStream_t is declared here
 * as the opaque pointer that it is, alike whether cuda_runtime.h is included before, after or not at all.
 *
 * Ranks are GPUs where the machine has any, else processes with host memory; TELPHER_DEVICE=host|cuda decides, for a process and
 * alike on all ranks.
 * GPU ranks: a rank's device is that of the calling thread's CUDA context when its communicator is made. Buffers are memory that
 * this device reaches, streams are CUDA's; calls return when the work is in the stream, and may be captured in CUDA graphs. Several
 * ranks may share a GPU; those of one process then each need a non-blocking stream of their own (ncclInvalidUsage says so).
 * Host ranks: buffers are plain memory of the calling process, and a stream is one that telpher_stream_create (telpher.h)
 * made. With a NULL stream, or CUDA's 0x1 and 0x2, a call returns when its operation is done (on a non-blocking
 * communicator: ncclInProgress, then ncclCommGetAsyncError until ncclSuccess).
 *
 * Every call returns ncclSuccess, or an error whose reason ncclGetLastError gives in a sentence. Outputs are set only on
 * success. Each call exists twice: ncclX (weak), which a profiler may override, and pncclX.
 *
 * Counts are in elements of `datatype`, never bytes. Buffers belong to the caller, who keeps them, and doesn't touch them,
 * until the operation is done. Operations of one communicator are totally ordered: every rank must issue the same
 * collectives in the same order; where ranks disagree, each gets ncclInvalidUsage naming two of them and their calls.
 *
 * The host side of NCCL's device interface (ncclDevCommCreate, ncclTeamWorld, …: nccl_device.h) is exported too; those
 * calls fail with ncclInvalidUsage, and those that return a structure return zeros. */
#ifndef NCCL_H_
#define NCCL_H_

#include <limits.h>
#include <stddef.h>
#include <stdint.h>

#define NCCL_MAJOR 2
#define NCCL_MINOR 28
#define NCCL_PATCH 9
#define NCCL_SUFFIX ""
#define NCCL_VERSION_CODE 22809
#define NCCL_VERSION(X, Y, Z) \
	(((X) <= 2 && (Y) <= 8) ? (X) * 1000 + (Y) * 100 + (Z) : (X) * 10000 + (Y) * 100 + (Z))

#ifdef __cplusplus
extern "C" {
#endif

#if !defined(__DRIVER_TYPES_H__) && !defined(__CUDA_RUNTIME_H__)
typedef struct CUstream_st *cudaStream_t;
#endif

/* One rank's end of a communicator. */
typedef struct ncclComm *ncclComm_t;
/* Memory registered for GPUs' one-sided access. */
typedef struct ncclWindow_vidmem *ncclWindow_t;
#define NCCL_COMM_NULL NULL

/* What the ranks of a new communicator find each other by. Opaque; copy it to every rank by any means. It carries a secret:
 * whoever has it may join. */
#define NCCL_UNIQUE_ID_BYTES 128
typedef struct { char internal[NCCL_UNIQUE_ID_BYTES]; } ncclUniqueId;

typedef enum {
	ncclSuccess = 0,
	ncclUnhandledCudaError = 1, /* a CUDA call failed */
	ncclSystemError = 2,        /* the system refused: no memory, no descriptors, no network */
	ncclInternalError = 3,      /* a fault in the library, or the communicator was aborted here */
	ncclInvalidArgument = 4,    /* a single argument is wrong */
	ncclInvalidUsage = 5,       /* arguments that don't go together, on this rank or across ranks */
	ncclRemoteError = 6,        /* another rank died, failed or aborted; ncclGetLastError names it */
	ncclInProgress = 7,         /* not an error: non-blocking, and not done yet */
	ncclNumResults = 8
} ncclResult_t;

typedef enum { ncclNumOps_dummy = 5 } ncclRedOp_dummy_t;
typedef enum {
	ncclSum = 0,
	ncclProd = 1,
	ncclMax = 2,
	ncclMin = 3,
	ncclAvg = 4,
	ncclNumOps = 5,
	/* Operators made by ncclRedOpCreatePreMulSum have values from ncclNumOps up. */
	ncclMaxRedOp = 0x7fffffff >> (32 - 8 * sizeof(ncclRedOp_dummy_t))
} ncclRedOp_t;

typedef enum {
	ncclInt8 = 0, ncclChar = 0,
	ncclUint8 = 1,
	ncclInt32 = 2, ncclInt = 2,
	ncclUint32 = 3,
	ncclInt64 = 4,
	ncclUint64 = 5,
	ncclFloat16 = 6, ncclHalf = 6,
	ncclFloat32 = 7, ncclFloat = 7,
	ncclFloat64 = 8, ncclDouble = 8,
	ncclBfloat16 = 9,
	ncclFloat8e4m3 = 10,
	ncclFloat8e5m2 = 11,
	ncclNumTypes = 12
} ncclDataType_t;

typedef enum {
	ncclScalarDevice = 0,        /* the scalar is read when the collective runs */
	ncclScalarHostImmediate = 1  /* the scalar is read before ncclRedOpCreatePreMulSum returns */
} ncclScalarResidence_t;

#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_CONFIG_UNDEF_PTR NULL
#define NCCL_SPLIT_NOCOLOR -1
#define NCCL_UNDEF_FLOAT -1.0f

/* Flags. */
#define NCCL_WIN_DEFAULT 0x00
#define NCCL_WIN_COLL_SYMMETRIC 0x01
#define NCCL_WIN_REQUIRED_ALIGNMENT 4096
#define NCCL_CTA_POLICY_DEFAULT 0x00
#define NCCL_CTA_POLICY_EFFICIENCY 0x01
#define NCCL_CTA_POLICY_ZERO 0x02
#define NCCL_SHRINK_DEFAULT 0x00
#define NCCL_SHRINK_ABORT 0x01
#define NCCL_REVOKE_DEFAULT 0x00

/* Settings of a communicator */
/* How a communicator is to be. Start from NCCL_CONFIG_INITIALIZER and set what matters. Offsets and sizes are ABI: a caller
 * built with an older header passes a smaller size and an older version, and fields younger than that version are ignored.
 * A value outside its range is ncclInvalidArgument. */
typedef struct ncclConfig_v22800 {
	size_t size;                /* sizeof of the caller's own ncclConfig_t */
	unsigned int magic;         /* 0xcafebeef */
	unsigned int version;       /* the caller's NCCL_VERSION_CODE */
	int blocking;               /* 2.14: 1 (default) or 0 */
	int cgaClusterSize;         /* 2.17: 0 to 8; accepted, without effect */
	int minCTAs;                /* 2.17: GPU ranks: thread blocks of a kernel, at least (where the GPU can hold them) … */
	int maxCTAs;                /* 2.17: … and at most */
	const char *netName;        /* 2.17: the network transport to use, by name */
	int splitShare;             /* 2.18: 0 or 1; accepted, a split always has resources of its own */
	int trafficClass;           /* 2.26 */
	const char *commName;       /* 2.27: for logs; copied */
	int collnetEnable;          /* 2.27: 0 or 1 */
	int CTAPolicy;              /* 2.27: NCCL_CTA_POLICY_*; ZERO: GPU ranks: copy engines move what they can of windows */
	int shrinkShare;            /* 2.27: 0 or 1; as splitShare */
	int nvlsCTAs;               /* 2.27: accepted, without effect */
	int nChannelsPerNetPeer;    /* 2.28: accepted, without effect */
	int nvlinkCentricSched;     /* 2.28: 0 or 1; accepted, without effect */
} ncclConfig_t;

#define NCCL_CONFIG_INITIALIZER { \
	sizeof(ncclConfig_t), 0xcafebeef, NCCL_VERSION(NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH), \
	NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, \
	NCCL_CONFIG_UNDEF_PTR, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_PTR, \
	NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, \
	NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT }

/* A prediction of a group's time */
/* What ncclGroupSimulateEnd tells. Start from NCCL_SIM_INFO_INITIALIZER. */
typedef struct ncclSimInfo_v22200 {
	size_t size;
	unsigned int magic;         /* 0x74685283 */
	unsigned int version;
	float estimatedTime;        /* us */
} ncclSimInfo_t;

#define NCCL_SIM_INFO_INITIALIZER { \
	sizeof(ncclSimInfo_t), 0x74685283, NCCL_VERSION(NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH), NCCL_UNDEF_FLOAT }

#define TP_NCCL_CALL_(ret, name, args) ret name args; ret p##name args;

/* Which interface this library has */
/* *version = 22809: the version whose interface this is. ncclInvalidArgument: version is NULL. */
TP_NCCL_CALL_(ncclResult_t, ncclGetVersion, (int *version))

/* What went wrong */
/* A sentence for a result; never NULL, static. */
TP_NCCL_CALL_(const char *, ncclGetErrorString, (ncclResult_t result))
/* The text of the last error of this process (of any communicator; comm may be NULL). Never NULL; valid until the next error. */
TP_NCCL_CALL_(const char *, ncclGetLastError, (ncclComm_t comm))

/* Read the log's settings again */
/* Reads NCCL_DEBUG and its family anew. */
TP_NCCL_CALL_(void, ncclResetDebugInit, (void))

/* Make the id by which the ranks of a communicator meet */
/* A new id, whose root is a thread of this process. With NCCL_COMM_ID=host:port set, every rank gets the same id, without talking.
 * ncclSystemError: no usable interface (NCCL_SOCKET_IFNAME). */
TP_NCCL_CALL_(ncclResult_t, ncclGetUniqueId, (ncclUniqueId *uniqueId))

/* Join a communicator */
/* Joins as `rank` of nranks; returns when all have joined. Collective. In a group, the join is made at ncclGroupEnd.
 * ncclInvalidArgument: rank not in [0, nranks). ncclSystemError or ncclRemoteError: a rank never came (TELPHER_INIT_TIMEOUT), or differs
 * in version, device kind or settings; the text names it. */
TP_NCCL_CALL_(ncclResult_t, ncclCommInitRank, (ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank))
/* The same with a configuration (NULL: defaults). config->blocking = 0: returns ncclInProgress at once with *comm set; poll
 * ncclCommGetAsyncError until it is not ncclInProgress. */
TP_NCCL_CALL_(ncclResult_t, ncclCommInitRankConfig,
	(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank, ncclConfig_t *config))
/* The same with nId ids ([nId], from nId different processes), whose roots share the work of a large start. */
TP_NCCL_CALL_(ncclResult_t, ncclCommInitRankScalable,
	(ncclComm_t *newcomm, int nranks, int myrank, int nId, ncclUniqueId *commIds, ncclConfig_t *config))

/* Make a communicator whose ranks all belong to one thread */
/* A communicator of ndev ranks that all belong to this thread: comms[ndev], comms[i] being rank i on device devlist[i] (NULL: i).
 * Host ranks take any device numbers >= 0, each once. GPU ranks may name a device several times: these ranks share it. */
TP_NCCL_CALL_(ncclResult_t, ncclCommInitAll, (ncclComm_t *comms, int ndev, const int *devlist))

/* Make communicators of the parts of another */
/* Collective over comm. Ranks of one color (>= 0) form a new communicator, ordered by (key, rank in comm). NCCL_SPLIT_NOCOLOR: takes part,
 * gets *newcomm = NULL. config NULL: comm's own. comm stays as it is. */
TP_NCCL_CALL_(ncclResult_t, ncclCommSplit, (ncclComm_t comm, int color, int key, ncclComm_t *newcomm, ncclConfig_t *config))

/* Go on without some ranks of a communicator */
/* Called by the ranks that stay, all with the same list excludeRanksList[excludeRanksCount]: a new communicator of these, in the old order.
 * The excluded ones don't call, and may be dead. NCCL_SHRINK_ABORT: first ends what is outstanding on comm, on all ranks; without it, outstanding operations are an error.
 * ncclInvalidArgument: a rank outside, twice, or the caller itself in the list. */
TP_NCCL_CALL_(ncclResult_t, ncclCommShrink, (ncclComm_t comm, int *excludeRanksList, int excludeRanksCount,
	ncclComm_t *newcomm, ncclConfig_t *config, int shrinkFlags))

/* End a communicator */
/* Waits until all operations of comm are done and all data is out. After it, only the queries, ncclCommDestroy and ncclCommAbort are allowed. */
TP_NCCL_CALL_(ncclResult_t, ncclCommFinalize, (ncclComm_t comm))
/* Finalizes if need be, then frees comm. Waits for nobody. NULL is accepted. Any later use of comm is ncclInvalidArgument. */
TP_NCCL_CALL_(ncclResult_t, ncclCommDestroy, (ncclComm_t comm))
/* Ends what is outstanding on comm and frees it; may be called while other threads are inside a call on comm: these return
 * ncclInternalError within a second. The other ranks' calls fail with ncclRemoteError, naming this rank. NULL is accepted. */
TP_NCCL_CALL_(ncclResult_t, ncclCommAbort, (ncclComm_t comm))
/* Ends what is outstanding on comm, on all ranks, and refuses new operations; comm may still be shrunk, and must be destroyed.
 * revokeFlags must be NCCL_REVOKE_DEFAULT. */
TP_NCCL_CALL_(ncclResult_t, ncclCommRevoke, (ncclComm_t comm, int revokeFlags))

/* Ask how a communicator is */
/* *asyncError: ncclSuccess, ncclInProgress (non-blocking, not done), or the error that comm is in for good. Looks for deaths of peers too. */
TP_NCCL_CALL_(ncclResult_t, ncclCommGetAsyncError, (ncclComm_t comm, ncclResult_t *asyncError))

/* Ask which rank of what this is */
/* *count: the number of ranks. */
TP_NCCL_CALL_(ncclResult_t, ncclCommCount, (const ncclComm_t comm, int *count))
/* *device: the device; host ranks: the number given to ncclCommInitAll, else the local rank that the launcher gave, else 0. */
TP_NCCL_CALL_(ncclResult_t, ncclCommCuDevice, (const ncclComm_t comm, int *device))
/* *rank: this rank, in [0, count). */
TP_NCCL_CALL_(ncclResult_t, ncclCommUserRank, (const ncclComm_t comm, int *rank))

/* Announce a buffer that will be used often */
/* Announces that a buffer will be used often: GPU ranks of a host map it into each other, where its memory can be shared; calls don't use that
 * mapping yet (windows they do). Host ranks gain nothing; accepted. *handle is set, and goes back to
 * ncclCommDeregister. Nothing that uses the buffer may be outstanding then. */
TP_NCCL_CALL_(ncclResult_t, ncclCommRegister, (const ncclComm_t comm, void *buff, size_t size, void **handle))
/* Undoes ncclCommRegister. NULL is accepted. */
TP_NCCL_CALL_(ncclResult_t, ncclCommDeregister, (const ncclComm_t comm, void *handle))

/* Register memory for GPUs' one-sided access */
/* Collective over comm, all ranks with the same size: *win: a window of this rank's buff[size], mapped by the ranks of its host where all their
 * GPUs reach each other. winFlags: NCCL_WIN_DEFAULT, or NCCL_WIN_COLL_SYMMETRIC, which promises that calls use the same offsets on all ranks:
 * then large all-reduces and reduce-scatters inside a host work on the windows themselves (where the offsets differ after all, such a call is
 * ncclInvalidUsage, later, which names them). Memory that is to be mapped must be
 * ncclMemAlloc's or cudaMalloc's, else ncclInvalidArgument. Host ranks: ncclInvalidUsage. */
TP_NCCL_CALL_(ncclResult_t, ncclCommWindowRegister,
	(ncclComm_t comm, void *buff, size_t size, ncclWindow_t *win, int winFlags))
/* Undoes it; not collective. Nothing that uses the window may be outstanding on any rank. NULL is accepted. ncclInvalidArgument: not a window of comm. */
TP_NCCL_CALL_(ncclResult_t, ncclCommWindowDeregister, (ncclComm_t comm, ncclWindow_t win))

/* Allocate and free memory for buffers */
/* *ptr: size bytes of what the ranks of this process use (TELPHER_DEVICE): memory of the calling thread's GPU that other processes can map, or host
 * memory; zeroed, aligned to a page at least. Size 0 gives NULL. */
TP_NCCL_CALL_(ncclResult_t, ncclMemAlloc, (void **ptr, size_t size))
/* Frees it. NULL is accepted. A pointer that ncclMemAlloc did not return is ncclInvalidArgument. */
TP_NCCL_CALL_(ncclResult_t, ncclMemFree, (void *ptr))

/* Make an operator that scales, then sums */
/* *op: an operator for comm that multiplies each rank's input by *scalar (one element of `datatype`, this rank's own), then sums. Only for
 * that communicator and type. Residence: when the scalar is read; ncclScalarDevice needs it valid until the operations are done. */
TP_NCCL_CALL_(ncclResult_t, ncclRedOpCreatePreMulSum,
	(ncclRedOp_t *op, void *scalar, ncclDataType_t datatype, ncclScalarResidence_t residence, ncclComm_t comm))
/* Forgets an operator; operations under way keep what they read. A built-in or unknown op is ncclInvalidArgument. */
TP_NCCL_CALL_(ncclResult_t, ncclRedOpDestroy, (ncclRedOp_t op, ncclComm_t comm))

/* Reduce the buffers of all ranks */
/* recvbuff[i] = op over all ranks of sendbuff[i], i in [0, count). In place: sendbuff == recvbuff. Results are bit-identical on all ranks and
 * from run to run. ncclAvg: the sum times 1/ranks (integers: the quotient, truncated). half, bfloat16 and fp8 are accumulated in float. */
TP_NCCL_CALL_(ncclResult_t, ncclAllReduce, (const void *sendbuff, void *recvbuff, size_t count,
	ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream))
/* The same, but only the root's recvbuff is written (others may pass NULL). */
TP_NCCL_CALL_(ncclResult_t, ncclReduce, (const void *sendbuff, void *recvbuff, size_t count,
	ncclDataType_t datatype, ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream))

/* Copy one rank's buffer to all ranks */
/* recvbuff[count] on every rank = the root's sendbuff[count] (read only there). In place: sendbuff == recvbuff. */
TP_NCCL_CALL_(ncclResult_t, ncclBroadcast, (const void *sendbuff, void *recvbuff, size_t count,
	ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream))
/* ncclBroadcast in place. */
TP_NCCL_CALL_(ncclResult_t, ncclBcast, (void *buff, size_t count, ncclDataType_t datatype, int root,
	ncclComm_t comm, cudaStream_t stream))

/* Collect every rank's block on all ranks */
/* recvbuff[r * sendcount + i] = rank r's sendbuff[i]. recvbuff holds ranks * sendcount elements.
 * In place: sendbuff == recvbuff + rank * sendcount. */
TP_NCCL_CALL_(ncclResult_t, ncclAllGather, (const void *sendbuff, void *recvbuff, size_t sendcount,
	ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream))

/* Reduce, and leave one block of the result on each rank */
/* recvbuff[i] = op over all ranks of sendbuff[rank * recvcount + i]. sendbuff holds ranks * recvcount elements.
 * In place: recvbuff == sendbuff + rank * recvcount. */
TP_NCCL_CALL_(ncclResult_t, ncclReduceScatter, (const void *sendbuff, void *recvbuff, size_t recvcount,
	ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream))

/* Exchange a block between each two ranks */
/* recvbuff[r * count + i] = rank r's sendbuff[own rank * count + i]. Both hold ranks * count elements.
 * Equal buffers are taken, but what they hold afterwards is undefined. */
TP_NCCL_CALL_(ncclResult_t, ncclAlltoAll, (const void *sendbuff, void *recvbuff, size_t count,
	ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream))

/* Collect every rank's block on one, or deal them out from it */
/* On the root, recvbuff[r * count + i] = rank r's sendbuff[i] (ranks * count elements; others may pass NULL).
 * In place on the root: sendbuff == recvbuff + root * count. */
TP_NCCL_CALL_(ncclResult_t, ncclGather, (const void *sendbuff, void *recvbuff, size_t count,
	ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream))
/* recvbuff[i] = the root's sendbuff[own rank * count + i] (ranks * count elements there; others may pass NULL).
 * In place on the root: recvbuff == sendbuff + root * count. */
TP_NCCL_CALL_(ncclResult_t, ncclScatter, (const void *sendbuff, void *recvbuff, size_t count,
	ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream))

/* Send to one rank, receive from one */
/* Sends sendbuff[count] to rank peer (itself too, in a group), which must receive as many bytes. The k-th send from a to b meets the k-th receive.
 * Outside a group it is done when the peer has taken the data: sends and receives that need each other belong in one group. */
TP_NCCL_CALL_(ncclResult_t, ncclSend, (const void *sendbuff, size_t count, ncclDataType_t datatype, int peer,
	ncclComm_t comm, cudaStream_t stream))
/* Receives recvbuff[count] from rank peer. */
TP_NCCL_CALL_(ncclResult_t, ncclRecv, (void *recvbuff, size_t count, ncclDataType_t datatype, int peer,
	ncclComm_t comm, cudaStream_t stream))

/* Start several calls together */
/* Begins a group of this thread (they nest): calls up to the outermost ncclGroupEnd are only noted, then started together, so that one thread
 * can serve several ranks, and sends and receives need no order. Sends and receives of a communicator run together, after its collectives. */
TP_NCCL_CALL_(ncclResult_t, ncclGroupStart, (void))
/* Starts the group and, where a call would have waited, waits for all of them. After an error in the group: that error, and nothing was started.
 * Blocking and non-blocking communicators don't go together in one group (ncclInvalidArgument). */
TP_NCCL_CALL_(ncclResult_t, ncclGroupEnd, (void))
/* Ends the group without running it: simInfo->estimatedTime = the predicted time in us, by the cost model of `telpher explain`. */
TP_NCCL_CALL_(ncclResult_t, ncclGroupSimulateEnd, (ncclSimInfo_t *simInfo))

#undef TP_NCCL_CALL_

#ifdef __cplusplus
}
#endif
#endif

/* SPDX-License-Identifier: Apache-2.0
 * Telpher's text of NCCL's interface, binary compatible with NCCL 2.28.9. It needs no CUDA: where cuda_runtime.h
 * is not included first, cudaStream_t is declared here as the opaque pointer that it is. */
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

typedef struct ncclComm *ncclComm_t;
typedef struct ncclWindow_vidmem *ncclWindow_t;
#define NCCL_COMM_NULL NULL

#define NCCL_UNIQUE_ID_BYTES 128
typedef struct { char internal[NCCL_UNIQUE_ID_BYTES]; } ncclUniqueId;

typedef enum {
	ncclSuccess = 0,
	ncclUnhandledCudaError = 1,
	ncclSystemError = 2,
	ncclInternalError = 3,
	ncclInvalidArgument = 4,
	ncclInvalidUsage = 5,
	ncclRemoteError = 6,
	ncclInProgress = 7,
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
	ncclMaxRedOp = 0x7fffffff
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
#define NCCL_WIN_DEFAULT 0x00
#define NCCL_WIN_COLL_SYMMETRIC 0x01
#define NCCL_WIN_REQUIRED_ALIGNMENT 4096
#define NCCL_CTA_POLICY_DEFAULT 0x00
#define NCCL_CTA_POLICY_EFFICIENCY 0x01
#define NCCL_CTA_POLICY_ZERO 0x02
#define NCCL_SHRINK_DEFAULT 0x00
#define NCCL_SHRINK_ABORT 0x01
#define NCCL_REVOKE_DEFAULT 0x00

/* Offsets and sizes are ABI: a caller built with an older header passes a smaller size and an older version. */
typedef struct ncclConfig_v22800 {
	size_t size;                /* sizeof of the caller's own ncclConfig_t */
	unsigned int magic;         /* 0xcafebeef */
	unsigned int version;       /* the caller's NCCL_VERSION_CODE */
	int blocking;               /* 2.14: 1 (default) or 0 */
	int cgaClusterSize;         /* 2.17 */
	int minCTAs;                /* 2.17 */
	int maxCTAs;                /* 2.17 */
	const char *netName;        /* 2.17: the network transport to use, by name */
	int splitShare;             /* 2.18 */
	int trafficClass;           /* 2.26 */
	const char *commName;       /* 2.27 */
	int collnetEnable;          /* 2.27 */
	int CTAPolicy;              /* 2.27 */
	int shrinkShare;            /* 2.27 */
	int nvlsCTAs;               /* 2.27 */
	int nChannelsPerNetPeer;    /* 2.28 */
	int nvlinkCentricSched;     /* 2.28 */
} ncclConfig_t;

#define NCCL_CONFIG_INITIALIZER { \
	sizeof(ncclConfig_t), 0xcafebeef, NCCL_VERSION(NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH), \
	NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, \
	NCCL_CONFIG_UNDEF_PTR, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_PTR, \
	NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, \
	NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT }

typedef struct ncclSimInfo_v22200 {
	size_t size;
	unsigned int magic;         /* 0x74685283 */
	unsigned int version;
	float estimatedTime;        /* us */
} ncclSimInfo_t;

#define NCCL_SIM_INFO_INITIALIZER { \
	sizeof(ncclSimInfo_t), 0x74685283, NCCL_VERSION(NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH), NCCL_UNDEF_FLOAT }

#define TP_NCCL_CALL_(ret, name, args) ret name args; ret p##name args;

/* Each call exists twice: ncclX, which a profiler may override, and pncclX. */
TP_NCCL_CALL_(ncclResult_t, ncclGetVersion, (int *version))
TP_NCCL_CALL_(const char *, ncclGetErrorString, (ncclResult_t result))
TP_NCCL_CALL_(const char *, ncclGetLastError, (ncclComm_t comm))
TP_NCCL_CALL_(void, ncclResetDebugInit, (void))
TP_NCCL_CALL_(ncclResult_t, ncclGetUniqueId, (ncclUniqueId *uniqueId))
TP_NCCL_CALL_(ncclResult_t, ncclCommInitRank, (ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank))
TP_NCCL_CALL_(ncclResult_t, ncclCommInitRankConfig,
	(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank, ncclConfig_t *config))
TP_NCCL_CALL_(ncclResult_t, ncclCommInitRankScalable,
	(ncclComm_t *newcomm, int nranks, int myrank, int nId, ncclUniqueId *commIds, ncclConfig_t *config))
TP_NCCL_CALL_(ncclResult_t, ncclCommInitAll, (ncclComm_t *comms, int ndev, const int *devlist))
TP_NCCL_CALL_(ncclResult_t, ncclCommSplit, (ncclComm_t comm, int color, int key, ncclComm_t *newcomm, ncclConfig_t *config))
TP_NCCL_CALL_(ncclResult_t, ncclCommShrink, (ncclComm_t comm, int *excludeRanksList, int excludeRanksCount,
	ncclComm_t *newcomm, ncclConfig_t *config, int shrinkFlags))
TP_NCCL_CALL_(ncclResult_t, ncclCommFinalize, (ncclComm_t comm))
TP_NCCL_CALL_(ncclResult_t, ncclCommDestroy, (ncclComm_t comm))
TP_NCCL_CALL_(ncclResult_t, ncclCommAbort, (ncclComm_t comm))
TP_NCCL_CALL_(ncclResult_t, ncclCommRevoke, (ncclComm_t comm, int revokeFlags))
TP_NCCL_CALL_(ncclResult_t, ncclCommGetAsyncError, (ncclComm_t comm, ncclResult_t *asyncError))
TP_NCCL_CALL_(ncclResult_t, ncclCommCount, (const ncclComm_t comm, int *count))
TP_NCCL_CALL_(ncclResult_t, ncclCommCuDevice, (const ncclComm_t comm, int *device))
TP_NCCL_CALL_(ncclResult_t, ncclCommUserRank, (const ncclComm_t comm, int *rank))
TP_NCCL_CALL_(ncclResult_t, ncclCommRegister, (const ncclComm_t comm, void *buff, size_t size, void **handle))
TP_NCCL_CALL_(ncclResult_t, ncclCommDeregister, (const ncclComm_t comm, void *handle))
TP_NCCL_CALL_(ncclResult_t, ncclCommWindowRegister,
	(ncclComm_t comm, void *buff, size_t size, ncclWindow_t *win, int winFlags))
TP_NCCL_CALL_(ncclResult_t, ncclCommWindowDeregister, (ncclComm_t comm, ncclWindow_t win))
TP_NCCL_CALL_(ncclResult_t, ncclMemAlloc, (void **ptr, size_t size))
TP_NCCL_CALL_(ncclResult_t, ncclMemFree, (void *ptr))
TP_NCCL_CALL_(ncclResult_t, ncclRedOpCreatePreMulSum,
	(ncclRedOp_t *op, void *scalar, ncclDataType_t datatype, ncclScalarResidence_t residence, ncclComm_t comm))
TP_NCCL_CALL_(ncclResult_t, ncclRedOpDestroy, (ncclRedOp_t op, ncclComm_t comm))
TP_NCCL_CALL_(ncclResult_t, ncclAllReduce, (const void *sendbuff, void *recvbuff, size_t count,
	ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream))
TP_NCCL_CALL_(ncclResult_t, ncclReduce, (const void *sendbuff, void *recvbuff, size_t count,
	ncclDataType_t datatype, ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream))
TP_NCCL_CALL_(ncclResult_t, ncclBroadcast, (const void *sendbuff, void *recvbuff, size_t count,
	ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream))
TP_NCCL_CALL_(ncclResult_t, ncclBcast, (void *buff, size_t count, ncclDataType_t datatype, int root,
	ncclComm_t comm, cudaStream_t stream))
TP_NCCL_CALL_(ncclResult_t, ncclAllGather, (const void *sendbuff, void *recvbuff, size_t sendcount,
	ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream))
TP_NCCL_CALL_(ncclResult_t, ncclReduceScatter, (const void *sendbuff, void *recvbuff, size_t recvcount,
	ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream))
TP_NCCL_CALL_(ncclResult_t, ncclAlltoAll, (const void *sendbuff, void *recvbuff, size_t count,
	ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream))
TP_NCCL_CALL_(ncclResult_t, ncclGather, (const void *sendbuff, void *recvbuff, size_t count,
	ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream))
TP_NCCL_CALL_(ncclResult_t, ncclScatter, (const void *sendbuff, void *recvbuff, size_t count,
	ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream))
TP_NCCL_CALL_(ncclResult_t, ncclSend, (const void *sendbuff, size_t count, ncclDataType_t datatype, int peer,
	ncclComm_t comm, cudaStream_t stream))
TP_NCCL_CALL_(ncclResult_t, ncclRecv, (void *recvbuff, size_t count, ncclDataType_t datatype, int peer,
	ncclComm_t comm, cudaStream_t stream))
TP_NCCL_CALL_(ncclResult_t, ncclGroupStart, (void))
TP_NCCL_CALL_(ncclResult_t, ncclGroupEnd, (void))
TP_NCCL_CALL_(ncclResult_t, ncclGroupSimulateEnd, (ncclSimInfo_t *simInfo))

#undef TP_NCCL_CALL_

#ifdef __cplusplus
}
#endif
#endif

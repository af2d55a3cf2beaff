/* Entry points of a communicator's life, of memory, and of the library itself. */
#include "api/api.h"
#include "boot/boot.h"

TP_API(ncclResult_t, ncclGetVersion, (int *version))
{
	if (!version) return TP_FAIL(ncclInvalidArgument, "ncclGetVersion: version is NULL");
	*version = NCCL_VERSION_CODE;
	return ncclSuccess;
}

TP_API(const char *, ncclGetErrorString, (ncclResult_t result))
{
	switch ((int)result) {
	case ncclSuccess: return "no error";
	case ncclUnhandledCudaError: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
	case ncclSystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
	case ncclInternalError: return "internal error - please report this issue to the Telpher developers";
	case ncclInvalidArgument: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
	case ncclInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
	case ncclRemoteError: return "remote process exited or there was a network error";
	case ncclInProgress: return "operation in progress";
	default: return "unknown result code";
	}
}

TP_API(const char *, ncclGetLastError, (ncclComm_t comm))
{
	(void)comm;
	return tp_log_last_error();
}

/* The original exports both. */
TP_API_EXPORT void ncclResetDebugInitInternal(void);
TP_API_EXPORT void ncclResetDebugInitInternal(void)
{
	tp_log_reset();
	tp_comm_reset_tracing();
}

TP_API(void, ncclResetDebugInit, (void)) { ncclResetDebugInitInternal(); }

TP_API(ncclResult_t, ncclGetUniqueId, (ncclUniqueId *uniqueId))
{
	if (!uniqueId) return TP_FAIL(ncclInvalidArgument, "ncclGetUniqueId: uniqueId is NULL");
	return tp_boot_unique_id(uniqueId);
}

TP_API(ncclResult_t, ncclCommInitRank, (ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank))
{
	return tp_comm_init_rank("ncclCommInitRank", comm, nranks, rank, 1, &commId, NULL);
}

TP_API(ncclResult_t, ncclCommInitRankConfig, (ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank, ncclConfig_t *config))
{
	return tp_comm_init_rank("ncclCommInitRankConfig", comm, nranks, rank, 1, &commId, config);
}

TP_API(ncclResult_t, ncclCommInitRankScalable, (ncclComm_t *newcomm, int nranks, int myrank, int nId, ncclUniqueId *commIds,
	ncclConfig_t *config))
{
	return tp_comm_init_rank("ncclCommInitRankScalable", newcomm, nranks, myrank, nId, commIds, config);
}

TP_API(ncclResult_t, ncclCommInitAll, (ncclComm_t *comms, int ndev, const int *devlist))
{
	return tp_comm_init_all(comms, ndev, devlist);
}

TP_API(ncclResult_t, ncclCommSplit, (ncclComm_t comm, int color, int key, ncclComm_t *newcomm, ncclConfig_t *config))
{
	return tp_comm_split(comm, color, key, newcomm, config);
}

TP_API(ncclResult_t, ncclCommShrink, (ncclComm_t comm, int *excludeRanksList, int excludeRanksCount, ncclComm_t *newcomm,
	ncclConfig_t *config, int shrinkFlags))
{
	return tp_comm_shrink(comm, excludeRanksList, excludeRanksCount, newcomm, config, shrinkFlags);
}

TP_API(ncclResult_t, ncclCommFinalize, (ncclComm_t comm)) { return tp_comm_finalize(comm); }
TP_API(ncclResult_t, ncclCommDestroy, (ncclComm_t comm)) { return tp_comm_destroy(comm); }
TP_API(ncclResult_t, ncclCommAbort, (ncclComm_t comm)) { return tp_comm_abort(comm); }
TP_API(ncclResult_t, ncclCommRevoke, (ncclComm_t comm, int revokeFlags)) { return tp_comm_revoke(comm, revokeFlags); }

TP_API(ncclResult_t, ncclCommGetAsyncError, (ncclComm_t comm, ncclResult_t *asyncError)) { return tp_comm_async_error(comm, asyncError); }
TP_API(ncclResult_t, ncclCommCount, (const ncclComm_t comm, int *count)) { return tp_comm_count(comm, count); }
TP_API(ncclResult_t, ncclCommCuDevice, (const ncclComm_t comm, int *device)) { return tp_comm_device(comm, device); }
TP_API(ncclResult_t, ncclCommUserRank, (const ncclComm_t comm, int *rank)) { return tp_comm_rank(comm, rank); }

TP_API(ncclResult_t, ncclMemAlloc, (void **ptr, size_t size)) { return tp_memory_alloc(ptr, size); }
TP_API(ncclResult_t, ncclMemFree, (void *ptr)) { return tp_memory_free(ptr); }

TP_API(ncclResult_t, ncclCommRegister, (const ncclComm_t comm, void *buff, size_t size, void **handle))
{
	return tp_memory_register(comm, buff, size, handle);
}

TP_API(ncclResult_t, ncclCommDeregister, (const ncclComm_t comm, void *handle)) { return tp_memory_deregister(comm, handle); }

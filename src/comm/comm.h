/* The communicator: one rank's end of it, its life, its calls, groups, streams.
 *
 * The entry points (api/) only unpack their arguments and come here. Functions named tp_comm_* check the communicator
 * themselves and may be called with anything. */
#ifndef TP_COMM_COMM_H
#define TP_COMM_COMM_H

#include "base/base.h"
#include "plan/plan.h"

/* One call of the data path. peer and root share `root`: send/recv set coll to TP_SEND_RECV. */
struct tp_comm_call {
	const char *name;           /* "AllReduce": for the log */
	const void *send;
	void *recv;
	size_t count;
	ncclDataType_t type;
	ncclRedOp_t op;             /* ncclSum where the collective has none */
	int root;                   /* -1 where there is none; the peer of a send or receive */
	uint8_t coll;               /* enum tp_coll */
	bool is_send;               /* TP_SEND_RECV */
	ncclComm_t comm;
	cudaStream_t stream;
};
ncclResult_t tp_comm_call(const struct tp_comm_call *call);

/* Life. name is the entry point's, for the log ("ncclCommInitRank"). */
ncclResult_t tp_comm_init_rank(const char *name, ncclComm_t *out, int nranks, int rank, int nids, const ncclUniqueId *ids,
	const ncclConfig_t *config);
ncclResult_t tp_comm_init_all(ncclComm_t *comms, int ndev, const int *devlist);
ncclResult_t tp_comm_split(ncclComm_t parent, int color, int key, ncclComm_t *out, const ncclConfig_t *config);
ncclResult_t tp_comm_shrink(ncclComm_t parent, const int *exclude, int nexclude, ncclComm_t *out, const ncclConfig_t *config,
	int flags);
ncclResult_t tp_comm_finalize(ncclComm_t comm);
ncclResult_t tp_comm_destroy(ncclComm_t comm);
ncclResult_t tp_comm_abort(ncclComm_t comm);
ncclResult_t tp_comm_revoke(ncclComm_t comm, int flags);

/* Queries. */
ncclResult_t tp_comm_async_error(ncclComm_t comm, ncclResult_t *out);
ncclResult_t tp_comm_count(ncclComm_t comm, int *out);
ncclResult_t tp_comm_device(ncclComm_t comm, int *out);
ncclResult_t tp_comm_rank(ncclComm_t comm, int *out);
ncclResult_t tp_comm_check(ncclComm_t comm, const char *name);
ncclResult_t tp_comm_path(ncclComm_t comm, int from, int to, char *text, size_t text_bytes);
ncclResult_t tp_comm_paths(ncclComm_t comm, int from, char *text, size_t *bytes);
/* Reads anew which lines are wanted (ncclResetDebugInit). */
void tp_comm_reset_tracing(void);

/* Groups of the calling thread. */
ncclResult_t tp_group_start(void);
ncclResult_t tp_group_end(void);
ncclResult_t tp_group_simulate_end(ncclSimInfo_t *info);

/* Operators. */
ncclResult_t tp_redop_create(ncclRedOp_t *op, const void *scalar, ncclDataType_t type, ncclScalarResidence_t residence,
	ncclComm_t comm);
ncclResult_t tp_redop_destroy(ncclRedOp_t op, ncclComm_t comm);

/* Memory. */
ncclResult_t tp_memory_alloc(void **out, size_t bytes);
ncclResult_t tp_memory_free(void *memory);
ncclResult_t tp_memory_register(ncclComm_t comm, void *buffer, size_t bytes, void **handle);
ncclResult_t tp_memory_deregister(ncclComm_t comm, void *handle);
ncclResult_t tp_comm_window_register(ncclComm_t comm, void *buffer, size_t bytes, ncclWindow_t *out, int flags);
ncclResult_t tp_comm_window_deregister(ncclComm_t comm, ncclWindow_t window);

/* Host streams. */
ncclResult_t tp_stream_create(cudaStream_t *out);
ncclResult_t tp_stream_destroy(cudaStream_t stream);
ncclResult_t tp_stream_synchronize(cudaStream_t stream);
ncclResult_t tp_stream_query(cudaStream_t stream);

/* What the environment says (rank.c). launcher is static text. */
struct tp_rank_env { int rank, nranks, local_rank, local_nranks; const char *launcher; };
ncclResult_t tp_rank_from_environment(struct tp_rank_env *out);
ncclResult_t tp_rank_unique_id(struct tp_rank_env *rank, ncclUniqueId *id);

/* What ranks of this process are (device.c): TELPHER_DEVICE, and what the machine has. */
enum tp_device_kind { TP_DEVICE_HOST, TP_DEVICE_CUDA };
ncclResult_t tp_device_kind(enum tp_device_kind *out);

#endif

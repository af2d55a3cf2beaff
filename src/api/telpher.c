/* Entry points of telpher.h; their version is in libnccl.map. */
#include "api/api.h"
#include "telpher.h"

TP_API_EXPORT const char *telpher_version(void) { return TELPHER_VERSION; }

TP_API_EXPORT ncclResult_t telpher_stream_create(cudaStream_t *stream) { return tp_stream_create(stream); }
TP_API_EXPORT ncclResult_t telpher_stream_destroy(cudaStream_t stream) { return tp_stream_destroy(stream); }
TP_API_EXPORT ncclResult_t telpher_stream_synchronize(cudaStream_t stream) { return tp_stream_synchronize(stream); }
TP_API_EXPORT ncclResult_t telpher_stream_query(cudaStream_t stream) { return tp_stream_query(stream); }

static telpher_rank_t as_public(const struct tp_rank_env *found)
{
	return (telpher_rank_t){ found->rank, found->nranks, found->local_rank, found->local_nranks, found->launcher };
}

TP_API_EXPORT ncclResult_t telpher_rank_from_environment(telpher_rank_t *out)
{
	struct tp_rank_env found;
	TP_TRY(tp_rank_from_environment(out ? &found : NULL));
	*out = as_public(&found);
	return ncclSuccess;
}

TP_API_EXPORT ncclResult_t telpher_unique_id_from_environment(telpher_rank_t *rank, ncclUniqueId *id)
{
	struct tp_rank_env found;
	TP_TRY(tp_rank_unique_id(rank ? &found : NULL, id));
	*rank = as_public(&found);
	return ncclSuccess;
}

TP_API_EXPORT ncclResult_t telpher_comm_init_from_environment(ncclComm_t *comm, ncclConfig_t *config)
{
	struct tp_rank_env rank;
	ncclUniqueId id;
	TP_TRY(tp_rank_unique_id(&rank, &id));
	return tp_comm_init_rank("telpher_comm_init_from_environment", comm, rank.nranks, rank.rank, 1, &id, config);
}

TP_API_EXPORT ncclResult_t telpher_comm_path(ncclComm_t comm, int from, int to, char *text, size_t text_bytes)
{
	return tp_comm_path(comm, from, to, text, text_bytes);
}

TP_API_EXPORT ncclResult_t telpher_comm_paths(ncclComm_t comm, int from, char *text, size_t *bytes)
{
	return tp_comm_paths(comm, from, text, bytes);
}

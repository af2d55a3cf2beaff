/* Memory and requests as NCCL's interface has them; see plugin.h. A request of ours knows how many sizes NCCL has room for. */
#include <stdlib.h>
#include "plugin/plugin.h"

ncclResult_t tp_export_reg(void *handle, void *data, size_t bytes, int type, void **mhandle)
{
	struct tp_export_comm *comm = handle;

	if (type != TP_ABI_PTR_HOST && (type != TP_ABI_PTR_CUDA || !(comm->memory & TP_NET_CUDA)))
		return TP_FAIL(ncclInvalidArgument, "NET/Telpher : memory of type %d can't be registered here, only host memory (%d)%s", type, TP_ABI_PTR_HOST,
			comm->memory & TP_NET_CUDA ? " and GPU memory (2)" : "");
	return tp_export_ops()->reg_memory(comm->inner, data, bytes, (enum tp_net_memory)type, mhandle);
}

ncclResult_t tp_export_reg_dmabuf(void *handle, void *data, size_t bytes, int type, uint64_t offset, int fd, void **mhandle)
{
	struct tp_export_comm *comm = handle;

	if (!(comm->memory & TP_NET_DMABUF) || !tp_export_ops()->reg_dmabuf)
		return TP_FAIL(ncclInvalidUsage, "NET/Telpher : this device takes no DMA-BUF (memory of type %d)", type);
	return tp_export_ops()->reg_dmabuf(comm->inner, data, bytes, offset, fd, mhandle);
}

static bool names(const struct tp_export_request *r, const void *mhandle)
{
	for (int k = 0; r->busy && k < r->n; k++)
		if (r->mhandles[k] == mhandle) return true;
	return false;
}

/* A card may still read or write what an outstanding request names. */
static bool is_used(const struct tp_export_comm *comm, const void *mhandle)
{
	for (int i = 0; i < TP_NET_MAX_REQUESTS; i++)
		if (names(&comm->requests[i], mhandle) || names(&comm->flushes[i], mhandle)) return true;
	return false;
}

static bool keep_for_later(struct tp_export_comm *comm, void *mhandle)
{
	if (comm->nlate == comm->size_late) {
		int size = comm->size_late ? 2 * comm->size_late : 8;
		void **more = realloc(comm->late, (size_t)size * sizeof(*more));
		if (!more) return false;
		comm->late = more;
		comm->size_late = size;
	}
	comm->late[comm->nlate++] = mhandle;
	return true;
}

ncclResult_t tp_export_dereg(void *handle, void *mhandle)
{
	struct tp_export_comm *comm = handle;

	if (is_used(comm, mhandle) && keep_for_later(comm, mhandle)) return ncclSuccess;
	return tp_export_ops()->dereg_memory(comm->inner, mhandle);
}

static ncclResult_t dereg_late(struct tp_export_comm *comm)
{
	int kept = 0;
	ncclResult_t result = ncclSuccess;

	for (int i = 0; i < comm->nlate; i++) {
		if (is_used(comm, comm->late[i])) {
			comm->late[kept++] = comm->late[i];
			continue;
		}
		ncclResult_t one = tp_export_ops()->dereg_memory(comm->inner, comm->late[i]);
		if (result == ncclSuccess) result = one;
	}
	comm->nlate = kept;
	return result;
}

static struct tp_export_request *new_request(struct tp_export_comm *comm, struct tp_export_request requests[TP_NET_MAX_REQUESTS], int n)
{
	for (int i = 0; i < TP_NET_MAX_REQUESTS; i++) {
		struct tp_export_request *r = &requests[comm->next++ % TP_NET_MAX_REQUESTS];
		if (r->busy) continue;
		r->comm = comm;
		r->n = n;
		r->inner = NULL;
		return r;
	}
	return NULL;
}

static void give_out(struct tp_export_request *request, void **mhandles, void **out)
{
	if (!request->inner) return;
	for (int i = 0; i < request->n; i++) request->mhandles[i] = mhandles[i];
	request->busy = true;
	*out = request;
}

ncclResult_t tp_export_isend(void *handle, void *data, size_t bytes, int tag, void *mhandle, void **out)
{
	struct tp_export_comm *comm = handle;
	struct tp_export_request *request = new_request(comm, comm->requests, 1);

	*out = NULL;
	if (!request) return ncclSuccess;
	TP_TRY(tp_export_ops()->isend(comm->inner, data, bytes, tag, mhandle, &request->inner));
	give_out(request, &mhandle, out);
	return ncclSuccess;
}

ncclResult_t tp_export_irecv(void *handle, int n, void **data, const size_t *bytes, const int *tags, void **mhandles, void **out)
{
	struct tp_export_comm *comm = handle;
	struct tp_export_request *request = new_request(comm, comm->requests, n);

	*out = NULL;
	if (!request) return ncclSuccess;
	TP_TRY(tp_export_ops()->irecv(comm->inner, n, data, bytes, tags, mhandles, &request->inner));
	give_out(request, mhandles, out);
	return ncclSuccess;
}

/* Host memory that a completion speaks of is there; NCCL asks for the GPU's, where the GPU needs it. */
ncclResult_t tp_export_iflush(void *handle, int n, void **data, int *bytes, void **mhandles, void **out)
{
	struct tp_export_comm *comm = handle;
	const struct tp_net_ops *ops = tp_export_ops();
	size_t sizes[TP_NET_MAX_RECVS];
	struct tp_export_request *request;

	*out = NULL;
	if (!ops->iflush || !(comm->memory & (TP_NET_CUDA | TP_NET_DMABUF))) return ncclSuccess;
	if (n < 1 || n > TP_NET_MAX_RECVS) return TP_FAIL(ncclInvalidArgument, "NET/Telpher : a flush of %d receives", n);
	for (int i = 0; i < n; i++) sizes[i] = bytes[i] > 0 ? (size_t)bytes[i] : 0;
	request = new_request(comm, comm->flushes, n);
	/* None would mean that all is there already. */
	if (!request) return TP_FAIL(ncclInternalError, "NET/Telpher : a flush while %d are under way", TP_NET_MAX_REQUESTS);
	TP_TRY(ops->iflush(comm->inner, n, data, sizes, mhandles, &request->inner));
	give_out(request, mhandles, out);
	return ncclSuccess;
}

ncclResult_t tp_export_test(void *handle, int *done, int *sizes)
{
	struct tp_export_request *request = handle;
	size_t got[TP_NET_MAX_RECVS] = { 0 };
	bool finished = false;

	*done = 0;
	TP_TRY(tp_export_ops()->test(request->inner, &finished, got));
	if (!finished) return ncclSuccess;
	for (int i = 0; i < request->n && sizes; i++) sizes[i] = (int)got[i];
	request->busy = false;
	*done = 1;
	return request->comm->nlate ? dereg_late(request->comm) : ncclSuccess;
}

static ncclResult_t close_comm(struct tp_export_comm *comm)
{
	const struct tp_net_ops *ops = tp_export_ops();
	ncclResult_t result = comm->sending ? ops->close_send(comm->inner) : ops->close_recv(comm->inner);

	for (int i = 0; i < comm->nlate; i++) {
		ncclResult_t one = ops->dereg_memory(NULL, comm->late[i]);
		if (result == ncclSuccess) result = one;
	}
	free(comm->late);
	free(comm);
	return result;
}

ncclResult_t tp_export_close_send(void *comm) { return comm ? close_comm(comm) : ncclSuccess; }
ncclResult_t tp_export_close_recv(void *comm) { return comm ? close_comm(comm) : ncclSuccess; }

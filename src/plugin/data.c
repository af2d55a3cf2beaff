/* Memory and requests as NCCL's interface has them; see plugin.h. A request of ours knows how many sizes NCCL has room for. */
#include <stdlib.h>
#include "plugin/plugin.h"

ncclResult_t tp_export_reg(void *handle, void *data, size_t bytes, int type, void **mhandle)
{
	struct tp_export_comm *comm = handle;

	if (type != TP_ABI_PTR_HOST) return TP_FAIL(ncclInvalidArgument, "NET/Telpher : memory of type %d can't be registered, only host memory (%d)", type, TP_ABI_PTR_HOST);
	return tp_export_ops()->reg_memory(comm->inner, data, bytes, TP_NET_HOST, mhandle);
}

ncclResult_t tp_export_dereg(void *handle, void *mhandle)
{
	struct tp_export_comm *comm = handle;

	return tp_export_ops()->dereg_memory(comm->inner, mhandle);
}

static struct tp_export_request *new_request(struct tp_export_comm *comm, int n)
{
	for (int i = 0; i < TP_NET_MAX_REQUESTS; i++) {
		struct tp_export_request *r = &comm->requests[comm->next++ % TP_NET_MAX_REQUESTS];
		if (r->busy) continue;
		r->comm = comm;
		r->n = n;
		r->inner = NULL;
		return r;
	}
	return NULL;
}

static void give_out(struct tp_export_request *request, void **out)
{
	if (!request->inner) return;
	request->busy = true;
	*out = request;
}

ncclResult_t tp_export_isend(void *handle, void *data, size_t bytes, int tag, void *mhandle, void **out)
{
	struct tp_export_comm *comm = handle;
	struct tp_export_request *request = new_request(comm, 1);

	*out = NULL;
	if (!request) return ncclSuccess;
	TP_TRY(tp_export_ops()->isend(comm->inner, data, bytes, tag, mhandle, &request->inner));
	give_out(request, out);
	return ncclSuccess;
}

ncclResult_t tp_export_irecv(void *handle, int n, void **data, const size_t *bytes, const int *tags, void **mhandles, void **out)
{
	struct tp_export_comm *comm = handle;
	struct tp_export_request *request = new_request(comm, n);

	*out = NULL;
	if (!request) return ncclSuccess;
	TP_TRY(tp_export_ops()->irecv(comm->inner, n, data, bytes, tags, mhandles, &request->inner));
	give_out(request, out);
	return ncclSuccess;
}

/* Host memory that a completion speaks of is there. */
ncclResult_t tp_export_iflush(void *comm, int n, void **data, int *bytes, void **mhandles, void **out)
{
	(void)comm, (void)n, (void)data, (void)bytes, (void)mhandles;
	*out = NULL;
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
	return ncclSuccess;
}

ncclResult_t tp_export_close_send(void *handle)
{
	struct tp_export_comm *comm = handle;
	ncclResult_t result;

	if (!comm) return ncclSuccess;
	result = tp_export_ops()->close_send(comm->inner);
	free(comm);
	return result;
}

ncclResult_t tp_export_close_recv(void *handle)
{
	struct tp_export_comm *comm = handle;
	ncclResult_t result;

	if (!comm) return ncclSuccess;
	result = tp_export_ops()->close_recv(comm->inner);
	free(comm);
	return result;
}

/* The IB transport's table of operations; see ib.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "net/ib/ib.h"

static ncclResult_t ib_devices(int *count)
{
	*count = tp_ib_port_count();
	return ncclSuccess;
}

static ncclResult_t ib_properties(int dev, struct tp_net_properties *out)
{
	struct tp_ib_port *port = tp_ib_port(dev);
	struct tp_net_properties p = { .memory = TP_NET_HOST, .max_recvs = TP_NET_MAX_RECVS };

	if (!port) return TP_FAIL(ncclInternalError, "NET/IB : there is no device %d", dev);
	snprintf(p.name, sizeof(p.name), "%.31s", port->context->name);
	snprintf(p.pci_path, sizeof(p.pci_path), "%s", port->context->pci_path);
	p.guid = port->context->guid;
	p.speed_mbps = port->mbps;
	p.port = port->number;
	p.max_comms = (uint32_t)TP_MIN(port->context->attr.max_qp, 1 << 20);
	*out = p;
	return ncclSuccess;
}

static ncclResult_t ib_dereg_memory(void *handle, void *mhandle)
{
	struct tp_ib_memory *memory = mhandle;
	ncclResult_t result = ncclSuccess;

	(void)handle;
	for (int p = 0; memory && p < TP_IB_MAX_PATHS; p++) {
		if (!memory->nodes[p]) continue;
		ncclResult_t one = tp_ib_reg_put(memory->contexts[p], memory->nodes[p]);
		if (result == ncclSuccess) result = one;
	}
	free(memory);
	return result;
}

/* On all paths, so that a message can go on over another at once. */
static ncclResult_t ib_reg_memory(void *handle, void *data, size_t bytes, enum tp_net_memory kind, void **mhandle)
{
	struct tp_ib_comm *comm = handle;
	struct tp_ib_memory *memory;

	if (kind != TP_NET_HOST) return TP_FAIL(ncclInternalError, "NET/IB : only host memory can be registered");
	memory = tp_alloc(1, sizeof(*memory), "a registration");
	if (!memory) return ncclSystemError;
	for (int p = 0; p < comm->npaths; p++) {
		if (!comm->paths[p].port) continue;
		memory->contexts[p] = comm->paths[p].port->context;
		ncclResult_t result = tp_ib_reg_get(comm->paths[p].port->context, data, bytes, &memory->nodes[p], &memory->mrs[p]);
		if (result == ncclSuccess) continue;
		ib_dereg_memory(comm, memory);
		return result;
	}
	*mhandle = memory;
	return ncclSuccess;
}

static ncclResult_t ib_reg_dmabuf(void *comm, void *data, size_t bytes, uint64_t offset, int fd, void **mhandle)
{
	(void)comm, (void)data, (void)bytes, (void)offset, (void)fd, (void)mhandle;
	return TP_FAIL(ncclInternalError, "NET/IB : a DMA-BUF can't be registered");
}

/* Host memory that a completion speaks of is there. */
static ncclResult_t ib_iflush(void *comm, int n, void *const *data, const size_t *bytes, void *const *mhandles, void **request)
{
	(void)comm, (void)n, (void)data, (void)bytes, (void)mhandles;
	*request = NULL;
	return ncclSuccess;
}

static void ib_leaving(void *handle)
{
	struct tp_ib_comm *comm = handle;

	comm->leaving = true;
}

const struct tp_net_ops tp_net_ib = {
	.name = "IB",
	.spreads = true,
	.present = tp_ib_present,
	.init = tp_ib_init,
	.devices = ib_devices,
	.properties = ib_properties,
	.listen = tp_ib_listen,
	.connect = tp_ib_connect,
	.cancel_connect = tp_ib_cancel_connect,
	.accept = tp_ib_accept,
	.reg_memory = ib_reg_memory,
	.reg_dmabuf = ib_reg_dmabuf,
	.dereg_memory = ib_dereg_memory,
	.isend = tp_ib_isend,
	.irecv = tp_ib_irecv,
	.iflush = ib_iflush,
	.test = tp_ib_test,
	.poll_fds = tp_ib_poll_fds,
	.poll_connect_fds = tp_ib_poll_connect_fds,
	.poll_listen_fds = tp_ib_poll_listen_fds,
	.leaving = ib_leaving,
	.close_send = tp_ib_close,
	.close_recv = tp_ib_close,
	.close_listen = tp_ib_close_listen,
};

/* The IB transport's table of operations; see ib.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "net/ib/ib.h"

static ncclResult_t ib_devices(int *count)
{
	*count = tp_ib_device_count();
	return ncclSuccess;
}

/* The GID of the first port that has one to use, and how many more there are. */
static void describe_address(const struct tp_ib_device *device, char out[96])
{
	struct tp_ib_gid_choice gid, first = { 0 };
	int count = 0;

	out[0] = 0;
	for (int i = 0; i < device->nports; i++)
		if (tp_ib_port_has_gid(device->ports[i], &gid) && count++ == 0) first = gid;
	char by[16] = "";
	struct tp_ib_params params;

	tp_ib_params_read(&params);
	if (params.connect == TP_IB_BY_RDMA_CM) snprintf(by, sizeof(by), ", rdma_cm");
	if (count == 1) snprintf(out, 96, "GID %d %s %s%s", first.index, first.text, tp_ib_gid_type_name(first.type), by);
	if (count > 1) snprintf(out, 96, "GID %d %s %s%s, and %d more", first.index, first.text, tp_ib_gid_type_name(first.type), by, count - 1);
}

/* Of the first port that has an address: the part of it that ports of one network share (see meet.c). */
static uint64_t network_of(const struct tp_ib_device *device)
{
	struct tp_ib_gid_choice gid;
	struct tp_ib_params params;

	tp_ib_params_read(&params);
	for (int i = 0; i < device->nports; i++) {
		if (!tp_ib_port_has_gid(device->ports[i], &gid)) continue;
		int bits = tp_ib_gid_network_bits(gid.raw, params.subnet_bits);
		for (int b = bits; b < 128; b++) gid.raw[b / 8] &= (uint8_t)~(0x80 >> b % 8);
		return tp_hash64(gid.raw, sizeof(gid.raw), (uint64_t)device->ports[i]->attr.link_layer) | 1;
	}
	return 0;
}

static ncclResult_t ib_properties(int dev, struct tp_net_properties *out)
{
	const struct tp_ib_device *device = tp_ib_device(dev);
	const struct tp_ib_port *first = device ? device->ports[0] : NULL;
	struct tp_net_properties p = { .memory = TP_NET_HOST | TP_NET_CUDA | TP_NET_DMABUF, .max_recvs = TP_NET_MAX_RECVS, .max_comms = 1 << 20,
		.max_parts = TP_NET_MAX_PARTS };

	if (!device) return TP_FAIL(ncclInternalError, "NET/IB : there is no device %d", dev);
	/* Its place, number and port are the first one's. How it reaches GPU memory may say another place. */
	tp_ib_gpu_memory(first->context);
	snprintf(p.name, sizeof(p.name), "%s", device->name);
	snprintf(p.pci_path, sizeof(p.pci_path), "%s", first->context->pci_path);
	describe_address(device, p.address);
	p.network = network_of(device);
	p.guid = first->context->guid;
	p.port = first->number;
	p.speed_mbps = device->mbps;
	p.software = tp_ib_on_software();
	p.max_bytes = first->attr.max_msg_sz;
	for (int i = 0; i < device->nports; i++) {
		p.max_bytes = TP_MIN(p.max_bytes, (size_t)device->ports[i]->attr.max_msg_sz);
		p.max_comms = TP_MIN(p.max_comms, (uint32_t)TP_MAX(device->ports[i]->context->attr.max_qp, 1));
		p.memory &= TP_NET_HOST | tp_ib_gpu_memory(device->ports[i]->context);
		p.data_direct |= device->ports[i]->context->data_direct;
		if (!p.no_gpu_memory[0]) snprintf(p.no_gpu_memory, sizeof(p.no_gpu_memory), "%s", device->ports[i]->context->no_gpu_memory);
	}
	/* A message may have to go another way, over any of them. */
	for (int i = 0; i < tp_ib_port_count(); i++) p.max_parts = TP_MIN(p.max_parts, (uint32_t)TP_MAX(tp_ib_port(i)->context->attr.max_sge, 1));
	*out = p;
	return ncclSuccess;
}

static ncclResult_t ib_dereg_memory(void *handle, void *mhandle)
{
	struct tp_ib_memory *memory = mhandle;
	ncclResult_t result = ncclSuccess;

	(void)handle;
	for (int c = 0; memory && c < TP_IB_MAX_KEYS; c++) {
		if (!memory->nodes[c]) continue;
		ncclResult_t one = tp_ib_reg_put(memory->contexts[c], memory->nodes[c]);
		if (result == ncclSuccess) result = one;
	}
	free(memory);
	return result;
}

/* On all cards of its paths, so that a message can go over any of them at once. */
static ncclResult_t reg_source(struct tp_ib_comm *comm, const struct tp_ib_source *source, void *data, size_t bytes, void **mhandle)
{
	struct tp_ib_memory *memory;

	memory = tp_alloc(1, sizeof(*memory), "a registration");
	if (!memory) return ncclSystemError;
	for (int c = 0; c < comm->ncontexts; c++) {
		memory->contexts[c] = comm->contexts[c];
		ncclResult_t result = tp_ib_reg_get_of(comm->contexts[c], source, data, bytes, &memory->nodes[c], &memory->mrs[c]);
		if (result == ncclSuccess) continue;
		ib_dereg_memory(comm, memory);
		return result;
	}
	*mhandle = memory;
	return ncclSuccess;
}

static ncclResult_t ib_reg_memory(void *comm, void *data, size_t bytes, enum tp_net_memory kind, void **mhandle)
{
	if (kind == TP_NET_DMABUF) return TP_FAIL(ncclInternalError, "NET/IB : a DMA-BUF is registered by its descriptor");
	return reg_source(comm, &(struct tp_ib_source){ .kind = kind, .fd = -1 }, data, bytes, mhandle);
}

static ncclResult_t ib_reg_dmabuf(void *handle, void *data, size_t bytes, uint64_t offset, int fd, void **mhandle)
{
	struct tp_ib_comm *comm = handle;

	for (int c = 0; c < comm->ncontexts; c++)
		if (!comm->contexts[c]->verbs->reg_dmabuf_mr)
			return TP_FAIL(ncclInvalidUsage, "NET/IB : %s : %s has no ibv_reg_dmabuf_mr (rdma-core 34 or later has)", comm->contexts[c]->name, comm->contexts[c]->verbs->file);
	return reg_source(comm, &(struct tp_ib_source){ .kind = TP_NET_DMABUF, .fd = fd, .offset = offset }, data, bytes, mhandle);
}

static ncclResult_t ib_reg_held(void *comm, const struct tp_net_gpu_memory *memory, void **mhandle)
{
	const struct tp_ib_source source = { .kind = memory->kind, .fd = memory->fd, .offset = memory->offset, .id = memory->id };

	return reg_source(comm, &source, memory->data, memory->bytes, mhandle);
}

static void ib_leaving(void *handle)
{
	struct tp_ib_comm *comm = handle;

	comm->leaving = true;
}

static bool ib_has_left(void *handle) { return ((const struct tp_ib_comm *)handle)->peer_left; }

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
	.isendv = tp_ib_isendv,
	.irecv = tp_ib_irecv,
	.hold_memory = tp_ib_hold_memory,
	.drop_memory = tp_ib_drop_memory,
	.reg_held = ib_reg_held,
	.iflush = tp_ib_iflush,
	.test = tp_ib_test,
	.poll_fds = tp_ib_poll_fds,
	.poll_connect_fds = tp_ib_poll_connect_fds,
	.poll_listen_fds = tp_ib_poll_listen_fds,
	.leaving = ib_leaving,
	.has_left = ib_has_left,
	.close_send = tp_ib_close,
	.close_recv = tp_ib_close,
	.close_listen = tp_ib_close_listen,
};

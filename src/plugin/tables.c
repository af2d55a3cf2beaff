/* What is exported: a table of functions a version of the interface, under the name that NCCL looks for; see plugin.h. */
#include "plugin/plugin.h"

#define EXPORTED __attribute__((visibility("default")))

static ncclResult_t init_v9(tp_abi_logger log) { return tp_export_start(log); }

static ncclResult_t init_v10(tp_abi_logger log, tp_abi_profiler profiler)
{
	(void)profiler;
	return tp_export_start(log);
}

static ncclResult_t init_v11(void **context, uint64_t comm_id, struct tp_abi_config *config, tp_abi_logger log, tp_abi_profiler profiler)
{
	struct tp_export_context *made;

	(void)comm_id, (void)config, (void)profiler;
	TP_TRY(tp_export_start(log));
	TP_TRY(tp_export_context_create(&made));
	*context = made;
	return ncclSuccess;
}

static ncclResult_t finalize(void *context) { return tp_export_context_destroy(context); }

/* What NCCL is about to do: nothing here depends on it. */
static ncclResult_t set_attributes(void *context, struct tp_abi_attributes *attributes)
{
	(void)context, (void)attributes;
	return ncclSuccess;
}

static ncclResult_t properties_v8(int dev, struct tp_abi_properties_v8 *out)
{
	struct tp_abi_properties_v11 p;

	TP_TRY(tp_export_properties(dev, &p));
	*out = (struct tp_abi_properties_v8){ .name = p.name, .pci_path = p.pci_path, .guid = p.guid, .memory = p.memory, .speed_mbps = p.speed_mbps, .port = p.port,
		.latency_us = p.latency_us, .max_comms = p.max_comms, .max_recvs = p.max_recvs, .device_type = p.device_type };
	return ncclSuccess;
}

static ncclResult_t properties_v9(int dev, struct tp_abi_properties_v9 *out)
{
	struct tp_abi_properties_v11 p;

	TP_TRY(tp_export_properties(dev, &p));
	*out = (struct tp_abi_properties_v9){ .name = p.name, .pci_path = p.pci_path, .guid = p.guid, .memory = p.memory, .speed_mbps = p.speed_mbps, .port = p.port,
		.latency_us = p.latency_us, .max_comms = p.max_comms, .max_recvs = p.max_recvs, .device_type = p.device_type, .parts = p.parts,
		.max_p2p_bytes = p.max_p2p_bytes, .max_coll_bytes = p.max_coll_bytes };
	return ncclSuccess;
}

static ncclResult_t listen_v9(int dev, void *handle, void **listener) { return tp_export_listen(NULL, dev, handle, listener); }
static ncclResult_t listen_v11(void *context, int dev, void *handle, void **listener) { return tp_export_listen(context, dev, handle, listener); }

static ncclResult_t connect_v9(int dev, void *handle, void **send_comm, struct tp_abi_device_handle **device)
{
	(void)device;
	return tp_export_connect(NULL, dev, handle, send_comm);
}

static ncclResult_t connect_v10(int dev, struct tp_abi_config *config, void *handle, void **send_comm, struct tp_abi_device_handle **device)
{
	(void)config, (void)device;
	return tp_export_connect(NULL, dev, handle, send_comm);
}

static ncclResult_t connect_v11(void *context, int dev, void *handle, void **send_comm, struct tp_abi_device_handle **device)
{
	(void)device;
	return tp_export_connect(context, dev, handle, send_comm);
}

static ncclResult_t accept_any(void *listener, void **recv_comm, struct tp_abi_device_handle **device)
{
	(void)device;
	return tp_export_accept(listener, recv_comm);
}

static ncclResult_t isend_v8(void *comm, void *data, int bytes, int tag, void *mhandle, void **request)
{
	if (bytes < 0) return TP_FAIL(ncclInvalidArgument, "NET/Telpher : a message of %d bytes", bytes);
	return tp_export_isend(comm, data, (size_t)bytes, tag, mhandle, request);
}

static ncclResult_t isend_v10(void *comm, void *data, size_t bytes, int tag, void *mhandle, void *event, void **request)
{
	(void)event;
	return tp_export_isend(comm, data, bytes, tag, mhandle, request);
}

static ncclResult_t irecv_v8(void *comm, int n, void **data, int *bytes, int *tags, void **mhandles, void **request)
{
	size_t sizes[TP_NET_MAX_RECVS];

	for (int i = 0; i < n && i < TP_NET_MAX_RECVS; i++) {
		if (bytes[i] < 0) return TP_FAIL(ncclInvalidArgument, "NET/Telpher : a receive of %d bytes", bytes[i]);
		sizes[i] = (size_t)bytes[i];
	}
	return tp_export_irecv(comm, n, data, sizes, tags, mhandles, request);
}

static ncclResult_t irecv_v9(void *comm, int n, void **data, size_t *bytes, int *tags, void **mhandles, void **request)
{
	return tp_export_irecv(comm, n, data, bytes, tags, mhandles, request);
}

static ncclResult_t irecv_v10(void *comm, int n, void **data, size_t *bytes, int *tags, void **mhandles, void **events, void **request)
{
	(void)events;
	return tp_export_irecv(comm, n, data, bytes, tags, mhandles, request);
}

#define COMMON \
	.name = "Telpher", \
	.devices = tp_export_devices, \
	.accept = accept_any, \
	.reg_mr = tp_export_reg, \
	.reg_mr_dmabuf = tp_export_reg_dmabuf, \
	.dereg_mr = tp_export_dereg, \
	.iflush = tp_export_iflush, \
	.test = tp_export_test, \
	.close_send = tp_export_close_send, \
	.close_recv = tp_export_close_recv, \
	.close_listen = tp_export_close_listen

extern EXPORTED const struct tp_abi_v8 ncclNetPlugin_v8;
extern EXPORTED const struct tp_abi_v9 ncclNetPlugin_v9;
extern EXPORTED const struct tp_abi_v10 ncclNetPlugin_v10;
extern EXPORTED const struct tp_abi_v11 ncclNetPlugin_v11;

const struct tp_abi_v8 ncclNetPlugin_v8 = { COMMON, .init = init_v9, .properties = properties_v8, .listen = listen_v9, .connect = connect_v9, .isend = isend_v8, .irecv = irecv_v8 };
const struct tp_abi_v9 ncclNetPlugin_v9 = { COMMON, .init = init_v9, .properties = properties_v9, .listen = listen_v9, .connect = connect_v9, .isend = tp_export_isend,
	.irecv = irecv_v9 };
const struct tp_abi_v10 ncclNetPlugin_v10 = { COMMON, .init = init_v10, .properties = properties_v9, .listen = listen_v9, .connect = connect_v10, .isend = isend_v10,
	.irecv = irecv_v10 };
const struct tp_abi_v11 ncclNetPlugin_v11 = { COMMON, .init = init_v11, .properties = tp_export_properties, .listen = listen_v11, .connect = connect_v11, .isend = isend_v10,
	.irecv = irecv_v10, .finalize = finalize, .set_attributes = set_attributes };

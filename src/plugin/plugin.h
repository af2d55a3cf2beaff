/* libnccl-net-telpher.so: our network transports as a NET plug-in of NCCL's (interfaces v8 to v11), so that the original NCCL runs on
 * them: NCCL_NET_PLUGIN=telpher, with this library on the library path.
 *
 * Beneath is the IB transport, or, where it can't be used, sockets; all connections of a process use the same one. NCCL's handle of 128
 * bytes carries the transport's own, which network it is of, and a secret made for this one listener, by which the transport proves
 * that both ends belong together. Memory is the host's, and the GPU's where the transport's card reaches that (GPUDirect): NCCL decides by the same distances as
 * with its own, and flushes what it received.
 *
 *   start      which network, devices, the logger     connect    listen, connect, accept, contexts
 *   data       memory, requests, the end              tables     what is exported
 *
 * NCCL calls from several threads, though never from two for the same connection at a time, registration apart, which the transports
 * allow beside all else. */
#ifndef TP_PLUGIN_PLUGIN_H
#define TP_PLUGIN_PLUGIN_H

#include "net/net.h"
#include "net/plugin/abi.h"

#define TP_EXPORT_MAX_DEVICES 64
#define TP_EXPORT_MAX_BYTES ((size_t)1 << 30)       /* sizes come back as int */

/* ---- start ---- */
/* Chooses the network at the first call; the log goes to log from now on. */
ncclResult_t tp_export_start(tp_abi_logger log);
const struct tp_net_ops *tp_export_ops(void);       /* after a start */
ncclResult_t tp_export_devices(int *count);
uint32_t tp_export_memory(int dev);                 /* enum tp_net_memory bits */
ncclResult_t tp_export_properties(int dev, struct tp_abi_properties_v11 *out);

/* ---- connect ---- */
struct tp_export_context;
ncclResult_t tp_export_context_create(struct tp_export_context **out);
ncclResult_t tp_export_context_destroy(struct tp_export_context *context);
/* context: NULL before v11, where nothing tells that a communicator has ended. */
ncclResult_t tp_export_listen(struct tp_export_context *context, int dev, void *handle, void **listener);
ncclResult_t tp_export_connect(struct tp_export_context *context, int dev, void *handle, void **send_comm);
ncclResult_t tp_export_accept(void *listener, void **recv_comm);
ncclResult_t tp_export_close_listen(void *listener);

/* ---- data ---- */
struct tp_export_comm;
struct tp_export_request {
	struct tp_export_comm *comm;
	bool busy;
	int n;                          /* sizes that come of it; handles that it holds */
	void *inner, *mhandles[TP_NET_MAX_RECVS];
};
struct tp_export_comm {
	void *inner;
	bool sending;
	uint32_t memory;                /* enum tp_net_memory bits that its device takes */
	uint32_t next;
	void **late;                    /* given back by NCCL while a request that names them was outstanding: undone when it is done, or at the end */
	int nlate, size_late;
	struct tp_export_request requests[TP_NET_MAX_REQUESTS], flushes[TP_NET_MAX_REQUESTS];
};
ncclResult_t tp_export_reg(void *comm, void *data, size_t bytes, int type, void **mhandle);
ncclResult_t tp_export_reg_dmabuf(void *comm, void *data, size_t bytes, int type, uint64_t offset, int fd, void **mhandle);
ncclResult_t tp_export_dereg(void *comm, void *mhandle);
ncclResult_t tp_export_isend(void *comm, void *data, size_t bytes, int tag, void *mhandle, void **request);
ncclResult_t tp_export_irecv(void *comm, int n, void **data, const size_t *bytes, const int *tags, void **mhandles, void **request);
ncclResult_t tp_export_iflush(void *comm, int n, void **data, int *bytes, void **mhandles, void **request);
ncclResult_t tp_export_test(void *request, int *done, int *sizes);
ncclResult_t tp_export_close_send(void *comm);
ncclResult_t tp_export_close_recv(void *comm);

#endif

/* NCCL's interface of NET plug-ins, versions 8 to 11, as declared for ours: a plug-in exports a table named ncclNetPlugin_vN. The
 * loader (net/plugin) calls such tables, src/plugin offers them. Each version's layout is its own; names are ours. */
#ifndef TP_NET_PLUGIN_ABI_H
#define TP_NET_PLUGIN_ABI_H

#include <stddef.h>
#include <stdint.h>
#include "nccl.h"

#define TP_ABI_HANDLE_BYTES 128
#define TP_ABI_MAX_REQUESTS 32              /* outstanding a connection */
#define TP_ABI_MAX_VDEVS 4
#define TP_ABI_MAX_BYTES ((size_t)1 << 40)  /* "no limit" of maxP2pBytes */
#define TP_ABI_FIRST 8
#define TP_ABI_LAST 11

enum { TP_ABI_PTR_HOST = 1, TP_ABI_PTR_CUDA = 2, TP_ABI_PTR_DMABUF = 4 };
enum { TP_ABI_DEVICE_HOST = 0, TP_ABI_DEVICE_UNPACK = 1 };     /* who unpacks what arrives: a GPU kernel does in UNPACK */
enum { TP_ABI_TRAFFIC_CLASS_UNSET = -1 };

/* level and flags: enum tp_log_level and tp_subsys have the same numbers. */
typedef void (*tp_abi_logger)(int level, unsigned long flags, const char *file, int line, const char *format, ...);
typedef ncclResult_t (*tp_abi_profiler)(void **event, int type, void *parent, int64_t plugin, void *data);

struct tp_abi_device_handle { int type, version; void *handle; size_t bytes; int needs_proxy; };
struct tp_abi_vdevice { int ndevs; int devs[TP_ABI_MAX_VDEVS]; };
struct tp_abi_config { int traffic_class; };
struct tp_abi_comm_attributes { int32_t max_peers, min_peers, max_flows, min_flows; };
struct tp_abi_attributes { struct tp_abi_comm_attributes send, recv; uint32_t op, algo, proto; };

struct tp_abi_properties_v8 {
	char *name, *pci_path;
	uint64_t guid;
	int memory;                             /* TP_ABI_PTR_* */
	int reg_is_global;
	int speed_mbps, port;
	float latency_us;
	int max_comms, max_recvs;
	int device_type, device_version;
};

struct tp_abi_properties_v9 {               /* of v10 too */
	char *name, *pci_path;
	uint64_t guid;
	int memory;
	int reg_is_global, force_flush;
	int speed_mbps, port;
	float latency_us;
	int max_comms, max_recvs;
	int device_type, device_version;
	struct tp_abi_vdevice parts;
	size_t max_p2p_bytes, max_coll_bytes;
};

struct tp_abi_properties_v11 {
	char *name, *pci_path;
	uint64_t guid;
	int memory;
	int reg_is_global, force_flush;
	int speed_mbps, port;
	float latency_us;
	int max_comms, max_recvs;
	int device_type, device_version;
	struct tp_abi_vdevice parts;
	size_t max_p2p_bytes, max_coll_bytes;
	int max_multi_requests;
};

/* What all four have in common; the places differ. */
#define TP_ABI_ACCEPT ncclResult_t (*accept)(void *listener, void **recv_comm, struct tp_abi_device_handle **device)
#define TP_ABI_REG_MR ncclResult_t (*reg_mr)(void *comm, void *data, size_t bytes, int type, void **mhandle)
#define TP_ABI_REG_DMABUF ncclResult_t (*reg_mr_dmabuf)(void *comm, void *data, size_t bytes, int type, uint64_t offset, int fd, void **mhandle)
#define TP_ABI_DEREG_MR ncclResult_t (*dereg_mr)(void *comm, void *mhandle)
#define TP_ABI_IFLUSH ncclResult_t (*iflush)(void *recv_comm, int n, void **data, int *bytes, void **mhandles, void **request)
#define TP_ABI_REST \
	ncclResult_t (*test)(void *request, int *done, int *sizes); \
	ncclResult_t (*close_send)(void *send_comm); \
	ncclResult_t (*close_recv)(void *recv_comm); \
	ncclResult_t (*close_listen)(void *listener); \
	ncclResult_t (*get_device_mr)(void *comm, void *mhandle, void **device_mhandle); \
	ncclResult_t (*irecv_consumed)(void *recv_comm, int n, void *request)

struct tp_abi_v8 {
	const char *name;
	ncclResult_t (*init)(tp_abi_logger log);
	ncclResult_t (*devices)(int *count);
	ncclResult_t (*properties)(int dev, struct tp_abi_properties_v8 *out);
	ncclResult_t (*listen)(int dev, void *handle, void **listener);
	ncclResult_t (*connect)(int dev, void *handle, void **send_comm, struct tp_abi_device_handle **device);
	TP_ABI_ACCEPT;
	TP_ABI_REG_MR;
	TP_ABI_REG_DMABUF;
	TP_ABI_DEREG_MR;
	ncclResult_t (*isend)(void *send_comm, void *data, int bytes, int tag, void *mhandle, void **request);
	ncclResult_t (*irecv)(void *recv_comm, int n, void **data, int *bytes, int *tags, void **mhandles, void **request);
	TP_ABI_IFLUSH;
	TP_ABI_REST;
};

struct tp_abi_v9 {
	const char *name;
	ncclResult_t (*init)(tp_abi_logger log);
	ncclResult_t (*devices)(int *count);
	ncclResult_t (*properties)(int dev, struct tp_abi_properties_v9 *out);
	ncclResult_t (*listen)(int dev, void *handle, void **listener);
	ncclResult_t (*connect)(int dev, void *handle, void **send_comm, struct tp_abi_device_handle **device);
	TP_ABI_ACCEPT;
	TP_ABI_REG_MR;
	TP_ABI_REG_DMABUF;
	TP_ABI_DEREG_MR;
	ncclResult_t (*isend)(void *send_comm, void *data, size_t bytes, int tag, void *mhandle, void **request);
	ncclResult_t (*irecv)(void *recv_comm, int n, void **data, size_t *bytes, int *tags, void **mhandles, void **request);
	TP_ABI_IFLUSH;
	TP_ABI_REST;
	ncclResult_t (*make_vdevice)(int *dev, struct tp_abi_vdevice *parts);
};

struct tp_abi_v10 {
	const char *name;
	ncclResult_t (*init)(tp_abi_logger log, tp_abi_profiler profiler);
	ncclResult_t (*devices)(int *count);
	ncclResult_t (*properties)(int dev, struct tp_abi_properties_v9 *out);
	ncclResult_t (*listen)(int dev, void *handle, void **listener);
	ncclResult_t (*connect)(int dev, struct tp_abi_config *config, void *handle, void **send_comm, struct tp_abi_device_handle **device);
	TP_ABI_ACCEPT;
	TP_ABI_REG_MR;
	TP_ABI_REG_DMABUF;
	TP_ABI_DEREG_MR;
	ncclResult_t (*isend)(void *send_comm, void *data, size_t bytes, int tag, void *mhandle, void *event, void **request);
	ncclResult_t (*irecv)(void *recv_comm, int n, void **data, size_t *bytes, int *tags, void **mhandles, void **events, void **request);
	TP_ABI_IFLUSH;
	TP_ABI_REST;
	ncclResult_t (*make_vdevice)(int *dev, struct tp_abi_vdevice *parts);
};

struct tp_abi_v11 {
	const char *name;
	ncclResult_t (*init)(void **context, uint64_t comm_id, struct tp_abi_config *config, tp_abi_logger log, tp_abi_profiler profiler);
	ncclResult_t (*devices)(int *count);
	ncclResult_t (*properties)(int dev, struct tp_abi_properties_v11 *out);
	ncclResult_t (*listen)(void *context, int dev, void *handle, void **listener);
	ncclResult_t (*connect)(void *context, int dev, void *handle, void **send_comm, struct tp_abi_device_handle **device);
	TP_ABI_ACCEPT;
	TP_ABI_REG_MR;
	TP_ABI_REG_DMABUF;
	TP_ABI_DEREG_MR;
	ncclResult_t (*isend)(void *send_comm, void *data, size_t bytes, int tag, void *mhandle, void *event, void **request);
	ncclResult_t (*irecv)(void *recv_comm, int n, void **data, size_t *bytes, int *tags, void **mhandles, void **events, void **request);
	TP_ABI_IFLUSH;
	TP_ABI_REST;
	ncclResult_t (*make_vdevice)(int *dev, struct tp_abi_vdevice *parts);
	ncclResult_t (*finalize)(void *context);
	ncclResult_t (*set_attributes)(void *context, struct tp_abi_attributes *attributes);
};

/* As others compile it, on 64-bit machines. */
_Static_assert(sizeof(struct tp_abi_properties_v8) == 64 && offsetof(struct tp_abi_properties_v8, max_recvs) == 48, "properties v8");
_Static_assert(sizeof(struct tp_abi_properties_v9) == 104 && offsetof(struct tp_abi_properties_v9, parts) == 64
	&& offsetof(struct tp_abi_properties_v9, max_p2p_bytes) == 88, "properties v9");
_Static_assert(sizeof(struct tp_abi_properties_v11) == 112 && offsetof(struct tp_abi_properties_v11, max_multi_requests) == 104, "properties v11");
_Static_assert(sizeof(struct tp_abi_v8) == 152 && offsetof(struct tp_abi_v8, isend) == 80 && offsetof(struct tp_abi_v8, test) == 104, "table v8");
_Static_assert(sizeof(struct tp_abi_v9) == 160 && sizeof(struct tp_abi_v10) == 160 && offsetof(struct tp_abi_v10, make_vdevice) == 152, "tables v9, v10");
_Static_assert(sizeof(struct tp_abi_v11) == 176 && offsetof(struct tp_abi_v11, finalize) == 160, "table v11");
_Static_assert(sizeof(struct tp_abi_attributes) == 44 && sizeof(struct tp_abi_device_handle) == 32, "small ones");

#endif

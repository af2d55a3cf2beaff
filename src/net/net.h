/* Network transports behind one table of operations, shaped so that NCCL's net plugin interface maps onto it both ways.
 * All calls are non-blocking: ncclInProgress is not an error but "call again". A comm handle belongs to one thread at a
 * time (the holder of the rank's run lock). */
#ifndef TP_NET_NET_H
#define TP_NET_NET_H

#include <sys/uio.h>
#include "base/base.h"

#define TP_NET_HANDLE_BYTES 128
#define TP_NET_MAX_RECVS 8
#define TP_NET_MAX_REQUESTS 32          /* outstanding a connection */
#define TP_NET_MAX_PARTS 3

enum tp_net_memory { TP_NET_HOST = 1, TP_NET_CUDA = 2, TP_NET_DMABUF = 4 };

struct tp_net_properties {
	char name[128];                     /* "eth0", "mlx5_0", "mlx5_0+mlx5_1" */
	char pci_path[128];                 /* "" where there is none */
	char address[96];                   /* where peers reach it, in words: "GID 3 ::ffff:192.0.2.6 RoCE v2"; "": no more than its name says */
	uint64_t guid;
	uint32_t memory;                    /* enum tp_net_memory bits that reg_memory takes */
	char no_gpu_memory[128];            /* where that is host memory alone: the reason; "": none is known */
	bool data_direct;                   /* DMA-BUFs are to be made for PCIe, past what joins the GPU to the processor */
	uint32_t speed_mbps, port, max_comms, max_recvs;
	uint32_t max_parts;                 /* of a message that isendv takes; 0: there is none */
	float latency_us;
	bool software;                      /* an RDMA card that is a program: it pins nothing */
	size_t max_bytes;                   /* of a message; 0: no limit */
	uint64_t network;                   /* equal for devices, of whatever host, that reach each other without a router; 0: not known */
};

/* Device memory for a registration. */
struct tp_net_gpu_memory {
	void *data;
	size_t bytes;
	enum tp_net_memory kind;            /* TP_NET_CUDA: by its address; TP_NET_DMABUF */
	int fd;                             /* a DMA-BUF; -1: there is none, or none any more */
	uint64_t offset;                    /* of the data in it */
	uint64_t id;                        /* of the allocation: CUDA gives no two of a process the same, whatever their addresses; 0: not known */
};

/* How a connection proves that it belongs: the communicator's secret and what the link is. */
struct tp_net_hello {
	uint8_t secret[TP_SECRET_BYTES];    /* never sent */
	uint64_t comm_hash;
	int32_t from, to;
	uint8_t channel, lane_class;
	/* Of the sending end, never sent: a message whose tag the receiver doesn't want yet has no room now (isend); else it is an error. */
	bool any_order;
	/* Of what accept expects, never sent: both ends have agreed on devices, so that the connection ends at the listener's if the network allows it. */
	bool stays;
};

struct tp_net_ops {
	const char *name;                   /* "Socket", "IB": as in "Using network …" and NCCL_NET */
	bool spreads;                       /* every device leads to every peer: links take turns with them */
	bool any_memory;                    /* isendv takes memory that isn't registered */
	/* Is there anything for it here? Says nothing; why gets the reason. asked: by its name. NULL: always. */
	bool (*present)(bool asked, char *why, size_t bytes);
	ncclResult_t (*init)(void);         /* ncclSuccess with devices() > 0, or an error whose reason is in tp_net_why_not */
	ncclResult_t (*devices)(int *count);
	ncclResult_t (*properties)(int dev, struct tp_net_properties *out);
	ncclResult_t (*listen)(int dev, void *handle /* [TP_NET_HANDLE_BYTES] */, void **listener);
	/* *send_comm stays NULL while the connection is under way; call again with the same state. */
	ncclResult_t (*connect)(int dev, const void *handle, const struct tp_net_hello *hello, void **state, void **send_comm);
	/* Gives up a connection that is under way (state as connect left it, *send_comm still NULL). NULL: nothing to free. */
	void (*cancel_connect)(void *state);
	/* One listener serves all links of a rank: hello is filled in for whoever came, and proven. expect gives the secret and
	 * comm_hash. *recv_comm stays NULL where nobody is there yet. */
	ncclResult_t (*accept)(void *listener, const struct tp_net_hello *expect, struct tp_net_hello *who, void **recv_comm);
	ncclResult_t (*reg_memory)(void *comm, void *data, size_t bytes, enum tp_net_memory kind, void **mhandle);
	ncclResult_t (*reg_dmabuf)(void *comm, void *data, size_t bytes, uint64_t offset, int fd, void **mhandle);
	/* GPU memory that connections over this device will use parts of, before there are any: registered until it is dropped, so that what can't
	 * be registered is known early, and the parts cost little. NULL where a transport can't. */
	ncclResult_t (*hold_memory)(int dev, const struct tp_net_gpu_memory *memory, void **held);
	void (*drop_memory)(void *held);
	/* As reg_memory and reg_dmabuf, of what is held, or a part: where all of a connection's cards hold it, nothing is registered and no DMA-BUF is needed. NULL where
	 * a transport can't hold. */
	ncclResult_t (*reg_held)(void *comm, const struct tp_net_gpu_memory *memory, void **mhandle);
	/* comm: NULL where it is closed already, which is right where data may still be under way. */
	ncclResult_t (*dereg_memory)(void *comm, void *mhandle);
	/* *request NULL: no room now. The tag must match; a receive may be larger than the send. */
	ncclResult_t (*isend)(void *send_comm, const void *data, size_t bytes, int tag, void *mhandle, void **request);
	/* As isend, of parts that arrive as one message: [n <= TP_NET_MAX_PARTS]; a handle for each. Copied: the array, not the memory. NULL where a
	 * transport can't. */
	ncclResult_t (*isendv)(void *send_comm, const struct iovec *parts, int n, int tag, void *const *mhandles, void **request);
	ncclResult_t (*irecv)(void *recv_comm, int n, void *const *data, const size_t *bytes, const int *tags,
		void *const *mhandles, void **request);
	/* What was received into GPU memory is there for kernels once it is over. *request NULL: it is so already. n 0: makes what flushes need. */
	ncclResult_t (*iflush)(void *recv_comm, int n, void *const *data, const size_t *bytes, void *const *mhandles, void **request);
	/* sizes: [n] bytes received. A peer that went away is ncclRemoteError. */
	ncclResult_t (*test)(void *request, bool *done, size_t *sizes);
	/* The descriptors whose readiness can move this comm on: for sleeping. events: EPOLLIN/EPOLLOUT each wants now. */
	int (*poll_fds)(void *comm, int *fds, uint32_t *events, int max);
	/* The same for a connect under way and for a listener; NULL where a transport can't. */
	int (*poll_connect_fds)(void *state, int *fds, uint32_t *events, int max);
	int (*poll_listen_fds)(void *listener, int *fds, uint32_t *events, int max);
	/* The end is near: from now on a peer that has gone is no news (no WARN). NULL where a transport has no need of it. */
	void (*leaving)(void *send_comm);
	/* Where test says ncclRemoteError: has the sender ended in good order, with all through that it had sent? NULL: nobody knows. */
	bool (*has_left)(void *recv_comm);
	ncclResult_t (*close_send)(void *send_comm);
	ncclResult_t (*close_recv)(void *recv_comm);
	ncclResult_t (*close_listen)(void *listener);
};

/* close_*: safe with requests outstanding; what wasn't sent by then is lost. */
extern const struct tp_net_ops tp_net_socket;
extern const struct tp_net_ops tp_net_ib;                   /* where it is built (TELPHER_IB) */
/* Beside these: other people's (net/plugin/plugin.h), which come first.
 *
 * By NCCL_NET (an unknown or unusable name is an error that lists what there is and why each isn't usable), a
 * communicator's netName, or the best one. */
ncclResult_t tp_net_choose(const char *name, const struct tp_net_ops **out);
/* "Using network Socket": once a communicator, at its init. */
void tp_net_log_using(const struct tp_net_ops *ops);
bool tp_net_is_forced(void);                                /* by NCCL_NET */
const char *tp_net_why_not_named(const char *name);
const char *tp_net_why_not(const struct tp_net_ops *ops);   /* why init failed; NULL where it didn't */

#endif

/* What the parts of links share: links.c finds and keeps ends, shm.c lays out the host's segment, cma.c reads another
 * process's memory, net.c (by net_link.h's contract below) moves net links. Nothing here is for other folders. */
#ifndef TP_LINK_INTERNAL_H
#define TP_LINK_INTERNAL_H

#include <pthread.h>
#include "link/link.h"
#include "mem/mem.h"

/* ---- net: the proxy's side, in net.c ----
 * A net end has a private ring of its own with the same slots as a shared one; claim, publish, peek and release work on it
 * unchanged. For a sending end the proxy plays the receiver of the ring (it reads slots in order and stores *head once a
 * slot may be used again), for a receiving end it plays the sender (it fills slots, publishes seq with release, loads
 * *head with acquire). All of it runs in tp_links_progress, under the rank's run lock: no other thread touches a ring. With GPU
 * ranks a kernel holds the other end: what it has published the proxy learns from the slots' sequence numbers.
 * A slot travels as {bytes, tag, kind} and its data; the kind is TP_SLOT_INLINE, but for the goodbye (net_link.h). */
struct tp_net_links;

struct tp_net_links_options {
	const char *net_name;       /* or NULL: NCCL_NET or the best transport */
	int nchannels;
	const struct tp_gpu *gpu;   /* rings in pinned host memory, for its kernels; NULL: ordinary memory */
	int cross_nic;              /* enum tp_cross_nic */
};
/* Collective over the communicator: chooses the transport, listens, gathers the handles. Only called where some pair needs
 * it (several hosts, or NCCL_SHM_DISABLE). An error leaves nothing behind. */
ncclResult_t tp_net_links_create(struct tp_boot *boot, const struct tp_net_links_options *options, struct tp_net_links **out);
/* Fills a zeroed link: slots, stride, capacity, mask, head, kind TP_LINK_NET, by_ref 0, same_process 0, peer, peer_pid, peer_bell NULL,
 * net. `from` or `to` is this rank. Starts connecting (or expecting); returns at once. Logs NCCL's line
 * "Channel 00/0 : 0[0] -> 1[1] [send] via NET/Socket/0" (INFO, NET) when it opens. links_lock: GPU ranks: what the engine moves links with; taken inside, after
 * CUDA has given memory. NULL: host ranks. */
ncclResult_t tp_net_links_open(struct tp_net_links *nets, pthread_mutex_t *links_lock, int channel, int lane_class, int from, int to, struct tp_link *link);
/* GPU ranks: where kernels find slots, flags and head. */
void tp_net_ring_places(const struct tp_link *link, struct tp_device_link *out);
/* tp_links_set_gdr */
ncclResult_t tp_net_gdr_set(struct tp_net_links *nets, struct tp_links_gdr *devs, int ndevs);
/* Ready: connected. Claim and publish (peek) are allowed before; they fill (find empty) the ring. */
bool tp_net_link_is_ready(const struct tp_link *link);
/* A receiving end whose sender has left in good order gets nothing more: ncclRemoteError that names it, for whoever finds
 * out that a program waits there. ncclSuccess otherwise. */
ncclResult_t tp_net_link_check(const struct tp_link *link);
ncclResult_t tp_net_links_progress(struct tp_net_links *nets, bool *moved);
bool tp_net_links_need_progress(const struct tp_net_links *nets);
int tp_net_links_poll_fds(struct tp_net_links *nets, int *fds, uint32_t *events, int max);
/* "NET/Socket/0": this rank's first device. */
const char *tp_net_links_via(const struct tp_net_links *nets);
const char *tp_net_links_via_of(const struct tp_net_links *nets, int from, int to);     /* by the sender's device on channel 0 */
const struct tp_net_ops *tp_net_links_ops(const struct tp_net_links *nets, int *dev);
/* See tp_links_may_seat and those that follow it. */
bool tp_net_links_may_seat(const struct tp_net_links *nets);
ncclResult_t tp_net_links_seat(struct tp_net_links *nets, const struct tp_link_seats *wanted);
const struct tp_link_seat *tp_net_links_seats(const struct tp_net_links *nets, int rank, int *count);
bool tp_net_links_meet(const struct tp_net_links *nets, int channel, int from, int to, const struct tp_link_seat **sender, const struct tp_link_seat **receiver);
/* The largest chunk that a net slot holds, the same for all net links, agreed. */
size_t tp_net_links_capacity(const struct tp_net_links *nets);
ncclResult_t tp_net_links_register(struct tp_net_links *nets, void *memory, size_t bytes, struct tp_net_buffer **out);
void tp_net_links_deregister(struct tp_net_links *nets, struct tp_net_buffer *buffer);
void tp_net_links_recall(struct tp_net_links *nets);
/* GPU ranks. links_lock is taken inside, for no call of CUDA's may be made with it that needn't be: the engine moves links with it. */
ncclResult_t tp_net_loans_register(struct tp_net_links *nets, pthread_mutex_t *links_lock, void *memory, size_t bytes, struct tp_net_buffer **out);
void tp_net_loans_deregister(struct tp_net_links *nets, pthread_mutex_t *links_lock, struct tp_net_buffer *buffer);
/* No kernel lends that may have found what is gone: that is given back, unless some of it is on its way. retire: so is all, whatever is registered. */
void tp_net_loans_settle(struct tp_net_links *nets, pthread_mutex_t *links_lock, bool (*lends)(void *arg), void *arg);
void tp_net_loans_retire(struct tp_net_links *nets, pthread_mutex_t *links_lock);
uint64_t tp_net_loans_table(const struct tp_net_links *nets);
bool tp_net_loans_find(struct tp_net_links *nets, const void *memory, size_t bytes, struct tp_link_loan *range, uint32_t *index);
void tp_net_loans_count(const struct tp_net_links *nets, struct tp_links_loans *out);
/* Releases one end's ring and connection; then, after all ends, the rest. */
void tp_net_links_close(struct tp_net_links *nets, struct tp_link *link);
void tp_net_links_destroy(struct tp_net_links *nets);

/* ---- shm: the place of each ring in the host's segment ---- */
struct tp_shm_shape {
	int nlocal, nchannels;
	uint32_t nslots;            /* a power of two */
	size_t capacity;            /* of a slot's data */
	size_t stride;              /* of a slot */
	size_t link_bytes;          /* head line and slots */
	size_t segment_bytes;
};
/* From numbers that all ranks agree on (largest: of any host's ranks, so that every host has the same capacity). */
void tp_shm_shape_fit(int nlocal, int largest_nlocal, int nchannels, struct tp_shm_shape *out);
/* Where the ring (channel, class, from, to: places on this host) begins: its head line, then its slots. */
size_t tp_shm_shape_place(const struct tp_shm_shape *shape, int channel, int lane_class, int from, int to);
/* Makes an end of the ring at that place; whose end it is the caller fills in. */
void tp_shm_link_fill(const struct tp_shm_shape *shape, unsigned char *segment, size_t place, struct tp_link *link);

/* ---- cma: references into another process ---- */
/* Collective over the communicator: every rank reads a nonce from its neighbours on the host. *works: everywhere. why: what
 * the first rank that can't found, empty where all can; same on all ranks of a host. */
struct tp_cma { bool works; char why[96]; };
ncclResult_t tp_cma_agree(struct tp_boot *boot, bool wanted, struct tp_cma *out);

/* ---- gpu: rings in device memory or pinned host memory, in gpu_shape.c, gpu_agree.c and gpu.c ----
 * Each rank has an arena: the rings that it receives from, the heads of the rings that it sends to, and its region. It lies
 * in the rank's device memory and, where some pair of a host can't reach each other, a second one of the same shape in the
 * host's pinned segment. Where something lies in an arena is a formula that all ranks compute alike. */
#define TP_GPU_LOCAL_MAX 64
struct tp_gpu_shape {
	int nlocal, nchannels;
	uint32_t nslots, wide_nslots;       /* powers of two */
	size_t capacity, wide_capacity;     /* of a slot's data */
	size_t stride, wide_stride;
	size_t heads, wide, rings, region;  /* where in an arena; the board is at its beginning */
	size_t bytes;
	/* [nchannels * nlocal]: whom a place sends its wide ring on a channel; NULL: the next place. Not the shape's own. */
	const uint8_t *next;
};
/* budget: for one arena without region. From numbers that all ranks agree on. */
void tp_gpu_shape_fit(int nlocal, int largest_nlocal, int nchannels, size_t budget, size_t region_bytes, struct tp_gpu_shape *out);
struct tp_gpu_ring { size_t place; uint32_t nslots; size_t stride, capacity; };
/* The ring (channel, class, from, to: places on this host) in the arena of `to`. */
struct tp_gpu_ring tp_gpu_shape_ring(const struct tp_gpu_shape *shape, int channel, int lane_class, int from, int to);
/* Its head in the arena of `from`. */
size_t tp_gpu_shape_head(const struct tp_gpu_shape *shape, int channel, int lane_class, int to);

/* Why a pair of GPUs of a host doesn't use peer access, as seen from one of them. */
enum tp_gpu_refusal { TP_GPU_TAKEN, TP_GPU_DISABLED, TP_GPU_TOO_FAR, TP_GPU_DISTANCE_UNKNOWN, TP_GPU_NO_ACCESS, TP_GPU_NOT_SHARED, TP_GPU_NOT_MAPPED, TP_GPU_BAD_DATA };

/* What every rank knows of every other. */
struct tp_gpu_card {
	int32_t nchannels, p2p_disabled, shm_disabled, level, vmm, shares;   /* shares: with other processes */
	uint64_t region_bytes, arena_bytes;
	uint8_t uuid[16];
	char bus_id[32];
	uint8_t refusal[TP_GPU_LOCAL_MAX];  /* by place on its host; enum tp_gpu_refusal */
};

struct tp_gpu_links {
	const struct tp_gpu *gpu;
	struct tp_gpu_card *cards;          /* [nranks] */
	struct tp_gpu_shape shape;
	bool any_refused, host_refused;     /* some pair of any host; of this host */
	uint8_t *next;                      /* the shape's */
	struct tp_gpu_memory arena;         /* device memory; ptr NULL: no use for it */
	struct tp_mem_map *maps;            /* [nlocal]: where this rank's kernels see the arenas */
	struct tp_gpu_memory segment;       /* pinned: [nlocal] arenas; ptr NULL: not needed */
};
bool tp_gpu_links_reach(const struct tp_links *links, int from, int to);     /* by peer access; agreed */
ncclResult_t tp_gpu_links_create(struct tp_links *links, const struct tp_links_options *options);
void tp_gpu_links_destroy(struct tp_links *links);
void tp_gpu_links_path(const struct tp_links *links, int from, int to, struct tp_link_path *out);
/* gpu_agree.c: fills cards (refusals too), allocates the arena, maps those of others and proves that data gets through. */
ncclResult_t tp_gpu_links_agree(struct tp_links *links, const struct tp_links_options *options);

struct tp_links {
	struct tp_boot *boot;
	int nchannels;
	bool shm_disabled;          /* agreed: local pairs use net links */
	struct tp_cma cma;
	struct tp_shm_shape shape;
	unsigned char *segment;     /* NULL: no two ranks on this host, or shm_disabled */
	struct tp_net_links *nets;  /* NULL: no pair needs it */
	struct tp_gpu_links *gpu;   /* NULL: host ranks */
	pthread_mutex_t lock;       /* GPU ranks: callers add links while the engine thread moves them */
	/* [peer * 2 + receiving] -> [channel * TP_LINK_CLASSES + class]; made at first use. */
	struct tp_link ***ends;
};

#endif

/* A link carries chunks one way between two ranks: a ring of slots. An executor sees only slots; what is behind them:
 *   shm  the ring lies in the segment that the ranks of a host share, at a place that both compute: no connection phase;
 *        chunks above inline_bytes may travel by reference, read with process_vm_readv (or plainly within a process);
 *   net  two private rings, moved by the proxy (net.c) through a network transport;
 *   self a private ring between two lanes of one rank;
 *   p2p  between GPUs: the ring lies in the receiver's device memory, which the sender's kernel has mapped.
 * A slot is published by storing its sequence number last (release), which the receiver's poll acquires: for small chunks
 * header and data are one cache line, one transfer. The receiver gives slots back by storing `head` (release), which the
 * sender loads (acquire) only when its cached copy says that the ring is full. */
#ifndef TP_LINK_LINK_H
#define TP_LINK_LINK_H

#include "boot/boot.h"
#include "net/net.h"

#define TP_LINK_CLASSES 4       /* as plan/plan.h has it (a different value there would not compile) */

enum tp_slot_kind { TP_SLOT_INLINE, TP_SLOT_REF, TP_SLOT_LENT };

struct tp_slot {
	_Atomic uint32_t seq;       /* the chunk's number on this link plus one; 0: never used */
	uint32_t bytes;             /* of the chunk */
	uint32_t tag;               /* hash of the call: a mismatched call is seen at once, not as garbage */
	uint32_t kind;
	unsigned char data[];       /* INLINE: the chunk; REF: struct tp_slot_ref, the executor's own behind it; LENT: struct tp_slot_lent */
};
struct tp_slot_ref { uint64_t addr; };
/* Of a net link's sending end: the chunk is the first bytes, which lie here, and behind them memory that is sent from where it lies. It comes out
 * as INLINE at the other end. */
struct tp_slot_lent { unsigned char first[8]; uint64_t addr; void *grant; uint32_t first_bytes, pad; };

enum tp_link_kind { TP_LINK_SHM, TP_LINK_NET, TP_LINK_SELF, TP_LINK_P2P_DEVICE };

/* One end of a link. The same struct serves sender and receiver; each uses its own fields and none of the other's. */
struct tp_link {
	unsigned char *slots;
	size_t stride, capacity;            /* of a slot; of its data */
	uint32_t mask;                      /* number of slots - 1 */
	uint32_t next;                      /* chunks sent (or received) so far */
	uint32_t head_seen;                 /* sender: chunks known to be consumed */
	_Atomic uint32_t *head;             /* receiver stores, sender loads */
	uint8_t kind;                       /* enum tp_link_kind */
	uint8_t same_process;               /* a reference can be read plainly */
	uint8_t by_ref;                     /* references allowed: agreed at init */
	int32_t peer;                       /* rank at the other end */
	pid_t peer_pid;
	struct tp_bell *peer_bell;          /* NULL: net and self */
	struct tp_link_net *net;            /* the proxy's state; NULL: others */
};

/* Sender: the next slot, or NULL where the ring is full. */
static inline struct tp_slot *tp_link_claim(struct tp_link *l)
{
	if (__builtin_expect(l->next - l->head_seen > l->mask, 0)) {
		l->head_seen = atomic_load_explicit(l->head, memory_order_acquire);     /* pairs with tp_link_release */
		if (l->next - l->head_seen > l->mask) return NULL;
	}
	return (struct tp_slot *)(l->slots + (size_t)(l->next & l->mask) * l->stride);
}
/* Sender: header fields but seq and data are written; publish. */
static inline void tp_link_publish(struct tp_link *l, struct tp_slot *slot)
{
	l->next++;
	atomic_store_explicit(&slot->seq, l->next, memory_order_release);           /* pairs with tp_link_peek */
	if (l->peer_bell) tp_bell_ring(l->peer_bell);
}
/* Receiver: the next full slot, or NULL. */
static inline struct tp_slot *tp_link_peek(struct tp_link *l)
{
	struct tp_slot *slot = (struct tp_slot *)(l->slots + (size_t)(l->next & l->mask) * l->stride);
	return atomic_load_explicit(&slot->seq, memory_order_acquire) == l->next + 1 ? slot : NULL;
}
/* Receiver: done with the slot (and with the memory that it refers to). */
static inline void tp_link_release(struct tp_link *l)
{
	l->next++;
	atomic_store_explicit(l->head, l->next, memory_order_release);
	if (l->peer_bell) tp_bell_ring(l->peer_bell);
}
/* Sender: has everything sent been consumed? (References may be reused then.) */
static inline bool tp_link_drained(struct tp_link *l)
{
	if (l->next == l->head_seen) return true;
	l->head_seen = atomic_load_explicit(l->head, memory_order_acquire);
	return l->next == l->head_seen;
}

/* A private ring between two lanes of one rank; references are read plainly. Freed by its sender's end. */
ncclResult_t tp_link_self_create(size_t capacity, uint32_t nslots, int rank, struct tp_link *sender, struct tp_link *receiver);
void tp_link_self_destroy(struct tp_link *sender);
/* Reads what a reference from another process points to. A peer that is gone is ncclRemoteError. */
ncclResult_t tp_link_read(const struct tp_link *link, void *dst, uint64_t addr, size_t bytes);

/* May the next chunk be LENT, from this memory? For a net link's sending end; if so it must be. *grant: for the slot. The memory must stay as it is
 * until the slot is given back (tp_link_drained), as that of a reference. */
bool tp_link_lend(struct tp_link *link, const void *memory, size_t bytes, void **grant);

/* Makes it ready to be lent, for who decides by that where a chunk is made; false: it can't be. What the program registered may be registered with the
 * network now; of other memory it is said, once, that it is copied. */
bool tp_link_prepare_loan(struct tp_link *link, const void *memory, size_t bytes);

/* All links of one rank of one communicator. */
struct tp_links;
struct tp_gpu;
struct tp_links_options {
	int nchannels;
	bool allow_by_ref;                  /* process_vm_readv may be used where it works; agreed at init inside create */
	const char *net_name;               /* or NULL */
	const struct tp_gpu *gpu;           /* GPU ranks: the links' memory is for its kernels; NULL: host ranks */
	size_t region_bytes;                /* GPU ranks: see tp_links_region; equal on all ranks */
	bool carries_large;                 /* GPU ranks: what is large goes through the region, and links need less; equal on all ranks */
	int cross_nic;                      /* enum tp_cross_nic; the strictest of all ranks' counts */
};
/* Collective over the communicator: shares the host's segment, agrees on references, gathers net handles. */
ncclResult_t tp_links_create(struct tp_boot *boot, const struct tp_links_options *options, struct tp_links **out);
/* An end of link (channel, lane_class) from rank `from` to rank `to`, one of which is ours; made at first use and kept.
 * shm links are ready at once; a net link becomes ready by tp_links_progress. (Both ends of a self link would be ours: see
 * tp_link_self_create.) */
ncclResult_t tp_links_get(struct tp_links *links, int channel, int lane_class, int from, int to, struct tp_link **out);
/* GPU ranks: the same end as a kernel sees it; addresses are those of this rank's context. The slots are struct tp_slot, 128-byte
 * aligned, data behind the header. A sender polls head in memory near it (its own device's, or pinned host memory) and
 * stores to slots, which lie near the receiver; a receiver polls slots near it and stores head. The kernel keeps `next` and
 * the head seen last itself, in device memory.
 *   P2P  between GPUs of a host that reach each other (or one GPU): device memory, mapped by fd, IPC, or as it is
 *   SHM  between others of a host: pinned host memory in the shared segment
 *   NET  moved by the proxy, tp_links_progress: slots in pinned host memory, or in device memory that the network card reaches
 * The numbers of full slots and their sizes (struct tp_slot's seq and bytes) are polled and published at `flags`, a slot's every flag_stride bytes:
 * in the slots themselves, but for slots in device memory that a proxy minds, which the host can't see: then in pinned host memory, where a sender's flag
 * is a slot's whole header, and may say LENT (see tp_links_find_loan).
 * GPU ranks: tp_links_progress, _need_progress and _poll_fds may be called by one thread while another gets ends, registers or deregisters. */
struct tp_device_link { uint64_t slots, head, flags; uint32_t stride, flag_stride, mask, capacity, kind; int32_t peer; bool lends; };
ncclResult_t tp_links_get_device(struct tp_links *links, int channel, int lane_class, int from, int to, struct tp_device_link *out);
/* GPU ranks, after create and before the first end: network cards at GPU memory. By device of the transport what the topology allows: slots that the
 * card writes (receive) or reads (send) lie in device memory then; flush: what was written is flushed before kernels see it. What a device turns
 * out unable to do is taken back, with the reason in why. */
struct tp_links_gdr { bool receive, send, flush; char why[200]; };
ncclResult_t tp_links_set_gdr(struct tp_links *links, struct tp_links_gdr *devs, int ndevs);
/* GPU ranks: region_bytes of zeros near each rank of this host, for the executor's fused kernels: where this rank's kernels
 * see the one of `rank` (its own too). NULL: another host's. Device memory where all pairs of the host reach each other,
 * pinned host memory otherwise, where that isn't refused (NCCL_SHM_DISABLE: NULL). 128-byte aligned. */
void *tp_links_region(struct tp_links *links, int rank);
/* For a receiver that waits where nothing has come: a sender on another host that has left in good order sends nothing more,
 * which is ncclRemoteError; ncclSuccess otherwise. */
ncclResult_t tp_link_check(const struct tp_link *link);
/* Moves net links (connects, accepts, sends, receives). *moved: something happened. An error names the peer. */
ncclResult_t tp_links_progress(struct tp_links *links, bool *moved);
bool tp_links_need_progress(const struct tp_links *links);      /* any net link with work outstanding */
/* The network descriptors to sleep on while net work is outstanding (at most max); see tp_net_ops.poll_fds. */
int tp_links_poll_fds(struct tp_links *links, int *fds, uint32_t *events, int max);
/* What path a pair uses and why not a better one, for the log and the path report. text: one line. */
struct tp_link_path { const char *via; char text[160]; };       /* via: "SHM/CMA", "SHM", "P2P/CUMEM", "NET/Socket/0", "SELF" */
ncclResult_t tp_links_path(struct tp_links *links, int from, int to, struct tp_link_path *out);
/* [memory, memory + bytes) may be lent from now on, where it needs that (transports register it, and what can't be is copied, with a warning). Ranges may
 * overlap and repeat. Host ranks: with the run lock. GPU ranks: from any thread; memory that the network can't read is nothing to it. */
struct tp_net_buffer;
ncclResult_t tp_links_register(struct tp_links *links, void *memory, size_t bytes, struct tp_net_buffer **out);
/* No operation that uses it may be running. (GPU ranks: one that is, is served; it stays registered with the network until tp_links_settle.) */
void tp_links_deregister(struct tp_links *links, struct tp_net_buffer *buffer);
/* GPU ranks: what was deregistered is given back, unless some kernel may lend what it has found before (asked with a lock of the links': it calls nothing). After each
 * deregister, and from then on whenever the links are moved. */
void tp_links_settle(struct tp_links *links, bool (*lends)(void *arg), void *arg);
/* An operation ends before its chunks are through: connections that have something on loan are closed, so that nobody reads that memory any more.
 * For good: the links are of no use afterwards. */
void tp_links_recall(struct tp_links *links);
/* And nothing stays registered: the communicator is closed, and its links wait for what is left of its kernels. */
void tp_links_retire(struct tp_links *links);
/* GPU ranks: kernels publish LENT slots on links that lend: the slot's header as ever (what can't be lent is copied there), and its flag a header that says
 * LENT and where all of the data are, which stay as they are until the slot is given back. Is this memory for it, by registration? *range: it is as long as all of it is the same allocation. *index: of its entry in the table in device
 * memory, which is {0, 0} once it is deregistered: what kernels of captured graphs look at. What is lent that can't be any more is copied late. */
#define TP_LINK_LOANS 1024
struct tp_link_loan { uint64_t begin, end; };
uint64_t tp_links_loan_table(const struct tp_links *links);     /* the device's address; 0: nothing is ever lent */
bool tp_links_find_loan(struct tp_links *links, const void *memory, size_t bytes, struct tp_link_loan *range, uint32_t *index);
struct tp_links_loans { uint64_t chunks, bytes, copied; };      /* lent so far; copied: chunks besides, that were lent by kernels and couldn't be */
void tp_links_loans(struct tp_links *links, struct tp_links_loans *out);
size_t tp_links_inline_capacity(const struct tp_links *links, bool across);    /* the largest chunk that a slot holds */
/* GPU ranks: links of class 0 from each place on a host to the next (the last one's next is the first) hold larger chunks, for
 * rings: a plan whose links inside hosts are all of these (TP_ALGO_RING) may use chunks of this size. Equal on all ranks. Any other
 * plan keeps to tp_links_inline_capacity, whatever struct tp_device_link says of one link: ranks would disagree. */
size_t tp_links_ring_capacity(const struct tp_links *links);
/* Before any end is asked for, on all ranks alike: rings go in other orders than that of places, as in struct tp_layout, whose rule for channels
 * this is; what is said above of the next place is then true of the next rank in the channel's order (on this host, the last one's is the first). */
ncclResult_t tp_links_set_ring_orders(struct tp_links *links, int norders, const int *orders);
/* GPU ranks: do the GPUs of two ranks of one host load and store each other's memory? Agreed; a rank with itself: true. */
bool tp_links_reaches(const struct tp_links *links, int a, int b);
bool tp_links_have_net(const struct tp_links *links);           /* some pair of this rank's communicator uses the network */
/* The transport in use and this rank's first device of it; NULL: no pair uses the network. */
const struct tp_net_ops *tp_links_net(const struct tp_links *links, int *dev);

/* ---- Which devices network links use ---- */

enum tp_cross_nic { TP_CROSS_NEVER, TP_CROSS_ALWAYS, TP_CROSS_TRY_NOT };        /* NCCL_CROSS_NIC's values */
#define TP_LINK_SEATS_MAX 16
#define TP_LINK_RINGS_MAX 32
/* Devices of this rank, by the transport's numbers, nearest first: channel c sends by devs[c % near], unless a ring says otherwise. Those behind are for peers' rails
 * (NCCL_CROSS_NIC=0). rails: alike on all hosts; -1: none. */
struct tp_link_seats {
	int near, count, devs[TP_LINK_SEATS_MAX], rails[TP_LINK_SEATS_MAX];
	/* Of each channel, which take turns with these: the place in devs, counted from 1, of the device by which this rank's host sends to the next, or receives
	 * from the one before, where this rank is its end. 0: it isn't, or it is by turns. */
	int nrings;
	uint8_t out[TP_LINK_RINGS_MAX], in[TP_LINK_RINGS_MAX];
};
/* A device as all ranks know it. */
struct tp_link_seat {
	int32_t dev, rail, port;
	float gbps, latency_us;             /* 0: not known */
	uint64_t network;                   /* see tp_net_properties */
	char name[32], address[96];
	unsigned char handle[TP_NET_HANDLE_BYTES];
};
/* Has some rank several devices that lead to all peers? Agreed: then all call tp_links_seat, or none does, and channels take turns. */
bool tp_links_may_seat(const struct tp_links *links);
/* Collective, before any end of a link is asked for. */
ncclResult_t tp_links_seat(struct tp_links *links, const struct tp_link_seats *wanted);
/* [count] that a rank sends by; NULL: nobody was seated. */
const struct tp_link_seat *tp_links_seats(const struct tp_links *links, int rank, int *count);
/* What the two ends of a link use; false: nobody was seated. Where the network of the receiver's doesn't lead to the sender's the transport takes
 * another, if it can. */
bool tp_links_meet(const struct tp_links *links, int channel, int from, int to, const struct tp_link_seat **sender, const struct tp_link_seat **receiver);

int tp_links_channels(const struct tp_links *links);
bool tp_links_by_ref(const struct tp_links *links);             /* agreed: references inside the host */
void tp_links_destroy(struct tp_links *links);

#endif

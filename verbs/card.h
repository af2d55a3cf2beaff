/* The objects of the software card. Each embeds the public structure of <infiniband/verbs.h> as its first member, so that a
 * pointer from the application is a pointer to ours. See README.md for the order of locks. */
#ifndef TP_VERBS_CARD_H
#define TP_VERBS_CARD_H

#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdatomic.h>
#include "base/base.h"

#define TP_CARD_DEVICES 16          /* at most */
#define TP_CARD_PORTS 4             /* a device, at most */
#define TP_CARD_GIDS 256            /* a port, at most */
#define TP_CARD_QP_WR 32768
#define TP_CARD_SGE 32
#define TP_CARD_INLINE 1024
#define TP_CARD_CQE (1 << 22)
#define TP_CARD_RD_ATOMIC 128
#define TP_CARD_MSG_BYTES (1u << 31)
#define TP_CARD_PKEY 0xffff
#define TP_CARD_QKEY_GSI 0x80010000u
#define TP_CARD_KEY_SLOTS_LOG 17    /* memory keys: 17 bits of place, 15 random ones */
#define TP_CARD_QP_SLOTS_LOG 16     /* QP numbers: the process's 8 bits (engine.h), then 16 */

struct tp_context;
struct tp_qp;
struct tp_carrier;
struct tp_mcast;
struct tp_timer;

/* Calls of the verbs give errno values; whoever finds the error says what it is: `return TP_CARD_FAIL(EINVAL, "…", …)`. */
#define TP_CARD_FAIL(error, ...) (TP_WARN(__VA_ARGS__), (error))

/* ---- things with numbers (index.c) ---- */

/* A number's place: readers pin it, whoever takes the thing away waits for them. */
struct tp_index_slot { _Atomic(void *) thing; _Atomic uint32_t users; uint64_t free_from_ms; };
struct tp_index {
	pthread_mutex_t lock;           /* of those who add and remove */
	uint32_t count, mask;           /* mask: 2^n - 1 places */
	struct tp_index_slot *_Atomic slots;        /* made at the first use, stored with release for tp_index_get's acquire */
};
/* Gives thing a random free place (not below first) and sets its number, base + place, before others can find it. 0, or ENOMEM
 * where all are taken. A place that was freed rests 10 s if another is free. */
int tp_index_add(struct tp_index *index, uint32_t first, void *thing, uint32_t base, uint32_t *number);
/* The thing at a place, pinned; NULL where there is none. */
void *tp_index_get(struct tp_index *index, uint32_t place);
void tp_index_put(struct tp_index *index, uint32_t place);
/* Takes it away and waits until it isn't pinned. */
void tp_index_remove(struct tp_index *index, uint32_t place);
void tp_index_forget(struct tp_index *index);   /* in a forked child */

/* ---- devices and ports (device.c, gid.c, counters.c) ---- */

struct tp_gid {
	union ibv_gid gid;
	enum ibv_gid_type type;
	uint32_t ifindex;
	char ifname[16];
	union tp_addr addr;             /* the address behind it, port 0; ss_family 0: none (a removed entry) */
	uint8_t mac[6];
};

/* Names and order are in counters.c; mlx5's names where mlx5 has such a counter. */
enum tp_counter {
	TP_CNT_PORT_XMIT_DATA, TP_CNT_PORT_RCV_DATA, TP_CNT_PORT_XMIT_PACKETS, TP_CNT_PORT_RCV_PACKETS,
	TP_CNT_UNICAST_XMIT, TP_CNT_UNICAST_RCV, TP_CNT_MULTICAST_XMIT, TP_CNT_MULTICAST_RCV,
	TP_CNT_PORT_RCV_ERRORS, TP_CNT_PORT_XMIT_DISCARDS, TP_CNT_PORT_XMIT_WAIT, TP_CNT_LINK_DOWNED,
	TP_CNT_HW_FIRST,
	TP_CNT_DUPLICATE_REQUEST = TP_CNT_HW_FIRST, TP_CNT_IMPLIED_NAK_SEQ_ERR, TP_CNT_LOCAL_ACK_TIMEOUT_ERR,
	TP_CNT_NP_CNP_SENT, TP_CNT_NP_ECN_MARKED, TP_CNT_OUT_OF_BUFFER, TP_CNT_OUT_OF_SEQUENCE, TP_CNT_PACKET_SEQ_ERR,
	TP_CNT_REQ_CQE_ERROR, TP_CNT_REQ_CQE_FLUSH_ERROR, TP_CNT_REQ_REMOTE_ACCESS_ERRORS, TP_CNT_REQ_REMOTE_INVALID_REQUEST,
	TP_CNT_RESP_CQE_ERROR, TP_CNT_RESP_CQE_FLUSH_ERROR, TP_CNT_RESP_LOCAL_LENGTH_ERROR, TP_CNT_RESP_REMOTE_ACCESS_ERRORS,
	TP_CNT_RNR_NAK_RETRY_ERR, TP_CNT_ROCE_ADP_RETRANS, TP_CNT_ROCE_SLOW_RESTART, TP_CNT_RP_CNP_HANDLED, TP_CNT_RP_CNP_IGNORED,
	TP_CNT_RX_ATOMIC_REQUESTS, TP_CNT_RX_ICRC_ENCAPSULATED, TP_CNT_RX_READ_REQUESTS, TP_CNT_RX_WRITE_REQUESTS,
	TP_CNT_COUNT
};
const char *tp_counter_name(enum tp_counter counter);
/* counters_share.c: this process's figures of a port (device from 0, port from 1), which others can read; NULL without memory. */
_Atomic uint64_t *tp_counters_of(int device, int port);

struct tp_port {
	struct tp_device *device;
	uint8_t number;                 /* from 1 */
	char ifname[64];                /* the interfaces that feed its GIDs ("": chosen) */
	_Atomic int state;              /* enum ibv_port_state */
	enum ibv_mtu mtu;               /* of the slowest interface */
	uint32_t rate_gbps;
	pthread_rwlock_t gid_lock;
	struct tp_gid *gids;            /* an index keeps its meaning; a removed entry is all zeros */
	int ngids;
	int gid_table_len;              /* what the port shows: 1 in mode "one", else TP_CARD_GIDS */
	_Atomic uint64_t *counters;     /* TP_CNT_COUNT */
};
static inline void tp_counter_add(struct tp_port *port, enum tp_counter counter, uint64_t amount)
{
	if (port)       /* a QP that never left RESET has none */
		atomic_fetch_add_explicit(&port->counters[counter], amount, memory_order_relaxed);
}

/* The port's figures: sums over all processes of this user (and network namespace). */
void tp_counters_read(struct tp_port *port, uint64_t sums[TP_CNT_COUNT]);

struct tp_device {
	struct ibv_device ibv;
	char ops[128];                  /* providers' libraries read a table of operations behind ibv_device: zeros, "not yours" */
	int index;
	int nports;
	uint64_t guid;                  /* network order */
	struct tp_port ports[TP_CARD_PORTS];
	char pci[16];                   /* "0000:c1:00.0" */
	int numa;
};

/* All devices, made at the first call from the parameters; they live as long as the process. */
int tp_card_devices(struct tp_device **devices);
struct tp_port *tp_card_port(struct ibv_context *context, uint32_t number);    /* NULL: no such port */
/* A copy of the entry; false where there is none (or an empty one). */
bool tp_port_gid(struct tp_port *port, uint32_t index, struct tp_gid *out);
/* The index of the entry that equals gid and type (type < 0: any); -1 where none does. */
int tp_port_find_gid(struct tp_port *port, const union ibv_gid *gid, int type);
/* Reads the interfaces anew; entries that vanish become zeros, new ones are added; raises GID_CHANGE, PORT_ERR, PORT_ACTIVE. */
void tp_port_refresh(struct tp_port *port);
/* The address of a GID with port: IPv4-mapped or IPv6 (link-local: with scope). */
void tp_gid_to_addr(const union ibv_gid *gid, uint32_t scope, uint16_t port, union tp_addr *out);
void tp_gid_from_addr(const union tp_addr *addr, union ibv_gid *gid);

/* ---- context and events (context.c, event.c) ---- */

struct tp_event {
	struct tp_event *next;
	struct ibv_async_event event;
	uint32_t *reported;             /* the object's count of events handed out; NULL for a port's */
};

struct tp_context {
	void *newer[16];                /* entries of newer headers would lie here; sz never reaches them */
	struct verbs_context verbs;     /* the application sees verbs.context */
	struct tp_context *next;        /* all open ones, under tp_card_lock */
	pthread_mutex_t event_lock;
	pthread_cond_t event_cond;
	struct tp_event *events, **events_end;     /* queued; async_fd is an eventfd (semaphore) that counts them */
	_Atomic int objects;            /* alive on it */
	uint32_t generation;            /* of the process that opened it: a forked child's calls fail */
};
static inline struct tp_context *tp_context_of(struct ibv_context *context)
{
	return (struct tp_context *)((char *)context - offsetof(struct tp_context, verbs) - offsetof(struct verbs_context, context));
}
static inline struct tp_device *tp_device_of(struct ibv_context *context) { return (struct tp_device *)context->device; }

/* Queue an event. The object must stay alive until it was queued (hold its lock or a reference). */
void tp_event_qp(struct tp_qp *qp, enum ibv_event_type type);
struct tp_srq;
struct tp_cq;
void tp_event_srq(struct tp_srq *srq, enum ibv_event_type type);
void tp_event_cq(struct tp_cq *cq, enum ibv_event_type type);
void tp_event_port(struct tp_port *port, enum ibv_event_type type);    /* on every context of the device */

/* ---- protection domains (pd.c) ---- */

struct tp_td { struct ibv_td ibv; _Atomic int users; };
struct tp_pd {
	struct ibv_pd ibv;
	uint32_t id;                    /* never used twice: what keys and QPs are compared by */
	_Atomic int users;
	struct tp_pd *parent;           /* of a parent domain: the real one (then id is the real one's) */
	struct tp_td *td;
};
struct tp_xrcd { struct ibv_xrcd ibv; uint32_t id; _Atomic int users; struct tp_xrcd *next; uint64_t dev, ino; bool named; int refs; };

/* ---- memory keys (key.c), regions (mr.c) and windows (mw.c) ---- */

enum tp_key_kind { TP_KEY_FREE, TP_KEY_MR, TP_KEY_MW1, TP_KEY_MW2 };

/* One place of the table; a key is place and random bits: (random << 25 | place << 8 | tag). The table is one shared segment
 * (tp_key_fd), which a peer on the same machine may map to check its own requests; it never writes there except `peers`. */
struct tp_key {
	_Atomic uint32_t key;           /* 0: not valid now. Set last (release), cleared first (seq_cst) */
	uint32_t kind;
	uint32_t pd;                    /* tp_pd.id */
	uint32_t access;                /* IBV_ACCESS_* */
	uint64_t iova, length;          /* as remote and local requests name it */
	uint64_t addr;                  /* where iova lies in this process */
	_Atomic uint32_t users;         /* inside now, of this process */
	_Atomic uint32_t windows;       /* MR: bound to it */
	uint32_t qpn;                   /* MW2: bound to this QP */
	uint32_t parent;                /* MW: place of its MR */
	uint32_t flags;
	uint32_t region;                /* SHARED: its place in what this process shows of its memory (path.h); DEVICE: its MR's place (gpu.h) */
};
#define TP_KEY_NULL 1u              /* reads give zeros, writes vanish */
#define TP_KEY_CHECKED 2u           /* on demand: pages may be missing, copy by way of the kernel */
#define TP_KEY_SHARED 4u            /* born shared: peers of this machine may map it */
#define TP_KEY_APART 8u             /* only this process reaches it, by the tp_grip functions: nobody copies it straight */
#define TP_KEY_DEVICE 16u           /* a GPU's, and so APART: its address means nothing to a processor */

struct tp_grip { struct tp_key *key; uint8_t *addr; uint32_t flags; };

/* Checks key, domain (pd), range and rights, and pins the region. 0; EINVAL: no such key; EPERM: other domain or right;
 * ERANGE: out of bounds. A length of 0 is never checked by callers: they don't call. */
int tp_key_enter(uint32_t key, uint32_t pd, uint32_t qpn, uint64_t addr, uint64_t length, uint32_t access, struct tp_grip *grip);
void tp_key_leave(const struct tp_grip *grip);
/* Copies into or out of pinned memory: EFAULT where pages are missing. The last bytes are stored last, with release. */
int tp_grip_write(const struct tp_grip *grip, uint64_t offset, const void *from, size_t bytes);
int tp_grip_read(const struct tp_grip *grip, uint64_t offset, void *to, size_t bytes);
/* Host memory alone, the last bytes last. */
void tp_key_copy(uint8_t *to, const uint8_t *from, size_t bytes);

/* For the keepers of regions: a place with a fresh key, not valid yet (key 0) until published. */
struct tp_key *tp_key_alloc(enum tp_key_kind kind, uint32_t *value);
void tp_key_publish(struct tp_key *key, uint32_t value);
/* Makes it invalid and waits until nobody is inside. */
void tp_key_revoke(struct tp_key *key);
/* Waits until no other process is inside the region at a place either; set by tp_path. May be NULL. */
extern void (*tp_key_peers_hook)(uint32_t place);
void tp_key_free(struct tp_key *key);
struct tp_key *tp_key_at(uint32_t value);       /* the place alone; NULL where the number can't be one */
int tp_key_fd(size_t *bytes);
#define TP_KEY_PLACE(value) (((value) >> 8) & ((1u << TP_CARD_KEY_SLOTS_LOG) - 1))

struct tp_gpu_range;
struct tp_mr {
	struct ibv_mr ibv;
	struct tp_key *key;
	struct tp_gpu_range *gpu;       /* of device memory */
	bool dma_buf;
	void *mapped;                   /* a DMA-BUF that is mapped here */
	size_t mapped_bytes;
};
/* What a DMA-BUF is to this process (dma_buf.c): device memory at iova, or pages that are mapped here. 0, or an errno, logged. */
struct tp_dma_buf { void *addr, *mapped; size_t mapped_bytes; struct tp_gpu_range *gpu; };
int tp_dma_buf_open(int fd, uint64_t offset, size_t length, uint64_t iova, bool write, struct tp_dma_buf *out);
void tp_dma_buf_close(struct tp_dma_buf *found);
struct tp_mw { struct ibv_mw ibv; struct tp_key *key; bool bound; };

/* Binds or invalidates a window, as a work request of qp; lock of qp held or its run owned. An ibv_wc_status. */
struct tp_wqe;
enum ibv_wc_status tp_mw_bind(struct tp_qp *qp, const struct tp_wqe *wqe);
enum ibv_wc_status tp_mw_invalidate_local(struct tp_qp *qp, uint32_t rkey);
/* SEND with invalidate, at the target; 0 or EINVAL. */
int tp_mw_invalidate_remote(struct tp_qp *qp, uint32_t rkey);

/* ---- completion queues (cq.c, cq_ex.c, channel.c) ---- */

struct tp_cq;
struct tp_channel {
	struct ibv_comp_channel ibv;
	pthread_mutex_t lock;           /* guards all below, and each CQ's place in the list */
	struct tp_cq *first, **last;    /* CQs with events, one entry an event (cq->queued counts) */
	int users;
};

struct tp_cqe {
	struct ibv_wc wc;
	struct tp_qp *qp;               /* alive while the entry is in the queue: a QP takes its entries away when destroyed */
	uint32_t frees;                 /* send: the count of slots that are free once this was polled; else RQ slots: 1 */
	bool is_recv;
	uint64_t when_ns;
};

struct tp_cq {
	union { struct ibv_cq ibv; struct ibv_cq_ex ex; };
	pthread_mutex_t lock;
	pthread_mutex_t poll_lock;      /* CQ-ex: from start_poll to end_poll; never taken with lock held */
	struct tp_cqe *ring;
	uint32_t size;                  /* a power of two, above ibv.cqe */
	_Atomic uint32_t head, tail;    /* head: produced; tail: polled */
	bool overrun, ignore_overrun, stamped;
	int armed;                      /* 0, 1: any, 2: solicited only */
	uint32_t reported_comp, reported_async;   /* events handed out; under channel and event locks */
	uint32_t queued;                /* events in the channel */
	struct tp_cq *next_event;
	_Atomic int users;
	struct tp_cqe current;          /* CQ-ex: between start_poll and end_poll */
	uint64_t wc_flags;
	uint16_t moderate_count, moderate_period;
	struct tp_pd *parent;
};

/* Appends. Raises CQ_ERR once where there is no room (false then), else wakes the channel if armed. */
bool tp_cq_push(struct tp_cq *cq, const struct tp_cqe *cqe, bool solicited);
void tp_cq_purge(struct tp_cq *cq, struct tp_qp *qp);

/* ---- address handles (ah.c) ---- */

/* An address vector, resolved: what a packet needs to find its way. */
struct tp_av {
	union ibv_gid dgid;
	union ibv_gid sgid;
	uint8_t sgid_index, port, traffic_class, hop_limit, sl;
	uint8_t static_rate;
	uint32_t flow_label;
	enum ibv_gid_type type;         /* of the source GID */
	union tp_addr from, to;         /* to: port 4791 */
};
struct tp_ah { struct ibv_ah ibv; struct tp_av av; };
/* 0 or an errno: EINVAL (no such port or GID, no GRH). */
int tp_av_resolve(struct ibv_context *context, const struct ibv_ah_attr *attr, uint8_t port, struct tp_av *out);

/* ---- work queues (wq.c) ---- */

/* A send request, copied when posted. It lies in the queue until its completion was polled. */
struct tp_wqe {
	uint64_t wr_id;
	uint32_t opcode;                /* enum ibv_wr_opcode */
	uint32_t flags;                 /* IBV_SEND_* ; SIGNALED also by sq_sig_all */
	uint32_t imm;                   /* as given (network order), or the rkey to invalidate */
	uint32_t length;                /* bytes, all segments */
	uint32_t num_sge;               /* 0 with inline data */
	uint32_t inline_bytes;
	union {
		struct { uint64_t addr; uint32_t rkey; } rdma;
		struct { uint64_t addr, compare_add, swap; uint32_t rkey; } atomic;
		struct { struct tp_av av; uint32_t qpn, qkey; } ud;
		struct { struct tp_mw *mw; uint32_t rkey; struct ibv_mw_bind_info info; } bind;
	};
	uint32_t srqn;                  /* XRC */
	uint64_t posted_ns;             /* only where something times it */
	uint64_t carrier[4];            /* the carrier's own notes (PSNs, retries) */
	struct ibv_sge sge[];           /* max_send_sge, then max_inline bytes (tp_wqe_inline) */
};

/* Counters run on (modulo 2^32); a slot is counter & mask. tail <= done <= exec <= head, head - tail <= max_wr. */
struct tp_sq {
	uint8_t *slots;
	uint32_t stride, mask, max_wr, max_sge, max_inline;
	uint32_t head;                  /* posted */
	uint32_t exec;                  /* the carrier has begun those before */
	uint32_t done;                  /* completed */
	_Atomic uint32_t tail;          /* polled, so free; the poller stores (release), the poster loads (acquire) */
};
static inline struct tp_wqe *tp_sq_at(struct tp_sq *sq, uint32_t counter)
{
	return (struct tp_wqe *)(void *)(sq->slots + (size_t)(counter & sq->mask) * sq->stride);
}
static inline uint8_t *tp_wqe_inline(struct tp_sq *sq, struct tp_wqe *wqe) { return (uint8_t *)(wqe->sge + sq->max_sge); }

struct tp_rwqe {
	uint64_t wr_id;
	uint32_t num_sge;
	uint32_t length;
	struct ibv_sge sge[];
};

struct tp_rq {
	pthread_mutex_t lock;
	uint8_t *slots;
	uint32_t stride, mask, max_wr, max_sge;
	_Atomic uint32_t head;          /* posted */
	uint32_t taken;                 /* a message has it, or had */
	_Atomic uint32_t tail;          /* free: polled (RQ) or taken (SRQ) */
};

struct tp_srq {
	struct ibv_srq ibv;
	struct tp_rq rq;
	uint32_t number;                /* XRC's and query's */
	enum ibv_srq_type type;
	uint32_t limit;                 /* 0: no event wanted */
	bool failed;
	uint32_t reported;
	struct tp_pd *pd;
	struct tp_xrcd *xrcd;
	struct tp_cq *cq;
	_Atomic int users;              /* QPs */
};
/* By number, with a reference (tp_srq_put). */
struct tp_srq *tp_srq_get(uint32_t number);
void tp_srq_put(struct tp_srq *srq);

/* ---- queue pairs (qp.c, qp_state.c, post.c, qp_ex.c) ---- */

/* The receive that a message is being placed into. */
struct tp_recv {
	bool taken;                     /* else the rest means nothing */
	bool spoiled;                   /* the last one ended with an error of its own */
	uint64_t wr_id;
	uint32_t num_sge, length;
	struct tp_srq *srq;             /* whence, NULL: the QP's own queue */
	uint32_t pd;                    /* the domain that its keys belong to */
	struct ibv_sge sge[TP_CARD_SGE];
};

struct tp_qp {
	union { struct ibv_qp ibv; struct ibv_qp_ex ex; };
	void *newer[8];                 /* ibv_qp_ex's later entries */
	pthread_mutex_t lock;           /* guards all below but rq */
	pthread_cond_t idle;            /* running fell to false */
	struct tp_pd *pd;
	struct tp_port *port;
	struct tp_cq *send_cq, *recv_cq;
	struct tp_srq *srq;
	struct tp_xrcd *xrcd;
	bool sq_sig_all, extended;
	uint64_t send_ops;
	uint32_t create_flags;
	struct tp_sq sq;
	struct tp_rq rq;                /* unused (max_wr 0) with an SRQ */
	struct tp_recv recv;            /* the message that is coming in */
	struct ibv_qp_attr attr;        /* as modified */
	_Atomic int state;              /* enum ibv_qp_state; written under lock; ibv.state follows */
	struct tp_av av;                /* connected types, from RTR on */
	const struct tp_carrier *carrier;
	void *carrier_data;             /* the carrier's own, made by attach, freed by detach */
	bool running, again;            /* the send queue is being run; there is more to do */
	bool stopped;                   /* the carrier was told to stop */
	bool established;               /* COMM_EST was raised, or RTS reached */
	bool drained_event;             /* SQD: the event is wanted and not raised yet */
	bool last_wqe;                  /* LAST_WQE_REACHED was raised */
	uint32_t reported;              /* async events handed out; under the context's event_lock */
	uint32_t send_psn, recv_psn;    /* next */
	struct tp_qp *real;             /* of a handle that ibv_open_qp gave: the QP itself; else NULL */
	int handles;                    /* such handles and the QP's own (XRC) */
	/* QP-ex: between wr_start and wr_complete; guarded by post_lock, which is taken before lock. The requests are built in slots
	 * from sq.head on, which nobody sees before wr_complete. Without QP-ex post_lock isn't used. */
	pthread_mutex_t post_lock;
	struct { uint32_t count; struct tp_wqe *wqe; int error; } batch;
	struct tp_mcast *mcast;         /* groups attached */
	struct tp_timer *timer;         /* the carrier's (engine.h) */
};

/* By number, with a reference; NULL where there is none. */
struct tp_qp *tp_qp_get(uint32_t qpn);
void tp_qp_put(struct tp_qp *qp);
/* Moves to ERR (or SQE) because of an error; flushes. The lock is held. event < 0: none. */
void tp_qp_fail_locked(struct tp_qp *qp, enum ibv_qp_state state, int event);
/* Runs the send queue; one thread at a time, others only leave a note. The lock is held, and let go of meanwhile. */
void tp_qp_run_locked(struct tp_qp *qp);
/* The QP with that number, if its carrier is at work: what it waited for has come. */
void tp_qp_run_again(uint32_t qpn);

/* ---- the process (card.c) ---- */

extern pthread_mutex_t tp_card_lock;    /* list of contexts, XRC domains, tables of numbers */
extern _Atomic uint32_t tp_card_generation;     /* one more in a forked child */

#endif

/* Between objects and what carries them: carriers, the target's side, completions, timers and the progress thread.
 *
 * A carrier sees a QP's send queue and nothing else of the objects; whatever it brings to another QP goes through the target
 * functions, so that rights, receives, completions and errors have one meaning. Names with _locked: the caller holds the lock
 * of the (first) QP. */
#ifndef TP_VERBS_ENGINE_H
#define TP_VERBS_ENGINE_H

#include <sys/uio.h>
#include "verbs/card.h"

/* ---- carriers ---- */

struct tp_span;
struct tp_carrier {
	const char *name;               /* "self", "path", "wire": shown per QP */
	/* Connected types at INIT->RTR (qp->av, attr are set), UD at INIT->RTR too. 0 or an errno, then the QP stays in INIT. */
	int (*attach)(struct tp_qp *qp);
	/* Executes what is posted from sq.exec on, in order, as far as it can now; called after each post, on RTS, when a timer
	 * or a packet calls for it. Holds the lock, may let go of it (sq.exec, the queue's requests and the attachment stay: see
	 * tp_qp_run_locked). Ends at once when qp->state is not one that sends (tp_qp_sends). */
	void (*run)(struct tp_qp *qp);
	/* The QP leaves for ERR, SQE or RESET, or is destroyed: nothing more may be sent or completed for what was begun, no timer
	 * may come later. In ERR the carrier may still answer. Lock held; never called while run is in progress. */
	void (*stop)(struct tp_qp *qp);
	void (*detach)(struct tp_qp *qp);   /* RESET or destroyed, after stop: frees carrier_data */
	/* Work of the carrier's own that a poller can do: incoming packets. Returns how much was done. May be NULL. */
	int (*progress)(void);
	bool loopback;                  /* reaches this process only */
	void (*changed)(struct tp_qp *qp);  /* its attributes or state were modified, lock held. May be NULL */
};
/* Who carries this QP (lock held, at RTR): this process, the short way, or the wire; why goes to the log (INFO, NET). */
const struct tp_carrier *tp_engine_choose(struct tp_qp *qp);
extern const struct tp_carrier tp_self;         /* self.c */
extern const struct tp_carrier tp_wire;         /* the wire */
extern const struct tp_carrier tp_path;         /* the short way */
extern const struct tp_carrier tp_datagrams;    /* ud_send.c: all UD QPs */
/* Set by the wire when it is there (before the first QP); NULL: only this process can be reached. */
extern const struct tp_carrier *tp_engine_wire;
/* UD: takes one datagram to av.to, unicast or multicast (what can't be sent is lost, as any datagram may be); the QP's lock is not
 * held, its run is owned. false: it must wait, until *until_ns at most; the QP is run again. What was taken leaves at the latest
 * with the flush, which this thread owes before it does anything else on the wire. */
extern bool (*tp_engine_wire_datagram)(struct tp_qp *qp, const struct tp_wqe *wqe, const struct tp_span *spans, int count, uint32_t psn,
	uint64_t *until_ns);
extern void (*tp_engine_wire_flush)(void);
/* A UD QP leaves INIT: datagrams to its port's addresses are heard from now on. 0 or an errno, logged. May be NULL. */
extern int (*tp_engine_wire_listen)(struct tp_port *port);
extern bool tp_engine_path_always;          /* QPs of this process reach each other by tp_path (tests) */
extern bool tp_engine_wire_always;          /* nothing is local: QPs of this process too reach each other by the wire */
/* The wire's answer to tp_engine_slot; NULL: 1. */
extern int (*tp_engine_wire_slot)(void);
/* Does a GID of this process have that address and RoCE version, and is qpn of this process? */
bool tp_engine_is_local(const struct tp_av *av, uint32_t qpn);

/* True in the states in which send requests are executed. */
static inline bool tp_qp_sends(const struct tp_qp *qp)
{
	int state = atomic_load_explicit(&qp->state, memory_order_relaxed);
	return state == IBV_QPS_RTS;
}

/* ---- the initiator's side: what a carrier reports ---- */

/* The request at sq.done ended (they end in order). Success: a completion if it is signaled. Else always one, then the QP goes
 * to ERR (RC, XRC) or SQE (UC, UD) and all that follow are flushed. byte_len: reads, atomics. */
void tp_sq_complete_locked(struct tp_qp *qp, enum ibv_wc_status status, uint32_t byte_len);
enum ibv_wc_opcode tp_wqe_wc_opcode(uint32_t opcode);
/* The request's data as memory: pins each segment (grips, at most max). Returns their count; -1: a key, bound or right is
 * wrong (LOC_PROT_ERR), nothing is pinned. access: what is needed of the local key (0 or IBV_ACCESS_LOCAL_WRITE). */
struct tp_span { struct tp_grip grip; uint32_t bytes; };
int tp_sge_enter(uint32_t pd, const struct ibv_sge *sge, uint32_t num_sge, uint32_t access, struct tp_span *spans);
void tp_span_leave(struct tp_span *spans, int count);
/* The wqe's outgoing bytes: its segments, or its inline data as one span without grip. */
int tp_wqe_enter(struct tp_qp *qp, struct tp_wqe *wqe, uint32_t access, struct tp_span *spans);
/* Copies bytes at offset of the spans' whole; EFAULT where pages are missing. */
int tp_span_read(const struct tp_span *spans, int count, uint64_t offset, void *to, size_t bytes);
int tp_span_write(const struct tp_span *spans, int count, uint64_t offset, const void *from, size_t bytes);
/* tp_span_read for one packet after the other: of a GPU's memory, a copy of which takes microseconds, more is read at once, up to so many
 * bytes from offset on that will be wanted (more) before tp_ahead_end. */
struct tp_ahead { uint8_t *data; uint64_t offset; size_t bytes; };
int tp_ahead_read(struct tp_ahead *ahead, const struct tp_span *spans, int count, uint64_t offset, void *to, size_t bytes, uint64_t more);
void tp_ahead_end(struct tp_ahead *ahead);
/* From spans to spans; *source: the missing pages are the source's. */
int tp_span_move(const struct tp_span *to, int to_count, uint64_t offset, const struct tp_span *from, int from_count, bool *source);

/* ---- the target's side ---- */

/* What the target says to a request; the AETH's meanings. */
enum tp_reply {
	TP_REPLY_ACK,
	TP_REPLY_RNR,                   /* no receive: attr.min_rnr_timer says how long to wait */
	TP_REPLY_SEQUENCE,              /* the wire's alone */
	TP_REPLY_INVALID_REQUEST,
	TP_REPLY_REMOTE_ACCESS,
	TP_REPLY_REMOTE_OPERATION,
	TP_REPLY_SILENT,                /* no such QP, or not in a state that receives: as if nobody were there */
};
/* The initiator's status for a reply other than ACK, RNR, SEQUENCE, SILENT. */
enum ibv_wc_status tp_reply_status(enum tp_reply reply);
/* May this target receive now (RTR, RTS, SQD, SQE)? */
bool tp_target_receives(const struct tp_qp *qp);
/* RC and XRC: after a reply that ends the connection the target goes to ERR with the right event, and raises the completion
 * with an error of a receive that was begun. Calls itself nothing for UC and UD: they drop. */
void tp_target_refuse_locked(struct tp_qp *qp, enum tp_reply reply);

/* Receives that are posted and not taken, in the QP's queue or its SRQ. No lock is needed. */
uint32_t tp_target_receives_posted(struct tp_qp *qp);
/* A message comes in: takes a receive from the QP's queue, SRQ, or the XRC SRQ srqn, into qp->recv. */
enum tp_reply tp_target_begin_locked(struct tp_qp *qp, uint32_t srqn);
/* Places bytes at offset of the receive; INVALID_REQUEST: it is longer than the receive (target's completion: LOC_LEN_ERR);
 * REMOTE_OPERATION: the receive's key or memory is wrong (LOC_PROT_ERR). */
enum tp_reply tp_target_place_locked(struct tp_qp *qp, uint64_t offset, const void *from, size_t bytes);
/* The same from pinned memory, all of it. */
enum tp_reply tp_target_place_spans_locked(struct tp_qp *qp, uint64_t offset, const struct tp_span *spans, int count);
/* The message is whole: the receive's completion. imm (network order) with WITH_IMM, rkey with WITH_INV. */
struct tp_arrival {
	enum ibv_wc_opcode opcode;      /* IBV_WC_RECV, IBV_WC_RECV_RDMA_WITH_IMM */
	uint32_t byte_len, imm, wc_flags;
	uint32_t src_qp;
	uint8_t sl;
	bool solicited;
};
enum tp_reply tp_target_finish_locked(struct tp_qp *qp, const struct tp_arrival *arrival);
/* The completion with an error of the receive that was begun (if one was). */
void tp_target_spoil_locked(struct tp_qp *qp, enum ibv_wc_status status);

/* RDMA: checks the QP's and the key's rights, pins. bytes 0: nothing is checked, the grip is empty. srqn: XRC's, whose domain
 * then counts; else 0. */
enum tp_reply tp_target_write_enter_locked(struct tp_qp *qp, uint32_t srqn, uint32_t rkey, uint64_t addr, uint64_t bytes, struct tp_grip *grip);
enum tp_reply tp_target_read_enter_locked(struct tp_qp *qp, uint32_t srqn, uint32_t rkey, uint64_t addr, uint64_t bytes, struct tp_grip *grip);
/* One CPU instruction; result: what was there before. Misaligned: INVALID_REQUEST. opcode: enum ibv_wr_opcode. */
struct tp_atomic { uint32_t opcode, rkey; uint64_t addr, compare_add, swap; };
enum tp_reply tp_target_atomic_locked(struct tp_qp *qp, uint32_t srqn, const struct tp_atomic *atomic, uint64_t *result);
/* First packet of a QP in RTR: COMM_EST. */
void tp_target_established_locked(struct tp_qp *qp);

/* A datagram, whole: 40 bytes of GRH (IPv4: the header in the last 20) are placed before it. Checks the Q_Key, drops what has
 * no receive or doesn't fit. Takes the lock itself. */
struct tp_datagram {
	const uint8_t *grh;             /* 40 bytes */
	const struct tp_span *spans;    /* the payload */
	int nspans;
	uint32_t bytes, src_qp, qkey, imm;
	uint32_t dest_qp;
	bool has_imm, solicited;
	uint8_t sl;
	/* Where nobody has looked yet whether it is the target's: its port must have this GID. Else NULL. */
	const union ibv_gid *dgid;
	enum ibv_gid_type gid_type;
};
void tp_target_datagram(struct tp_qp *qp, const struct tp_datagram *datagram);
/* To each QP of this process that is attached to the group on the port, but not the sender where it opted out. */
void tp_target_multicast(struct tp_port *port, const union ibv_gid *group, struct tp_qp *sender, const struct tp_datagram *datagram);
/* Joined or left by the first or last QP (the wire joins the IP group). Set by the wire; may be NULL. */
extern void (*tp_engine_group_hook)(struct tp_port *port, const union ibv_gid *group, bool join);
/* What a datagram's completion has as its service level on RoCE, as mlx5 does and UCX reads it: 8 with a UDP header, and the kind
 * of the layer-3 header: 0 GRH, 1 IPv6, 2 IPv4. */
static inline uint8_t tp_engine_packet_kind(const struct tp_av *av)
{
	return av->type == IBV_GID_TYPE_ROCE_V1 ? 0 : av->to.sa.sa_family == AF_INET6 ? 9 : 10;
}
/* The 40 bytes for a datagram from av's addresses (bytes: the UDP payload's, for the length fields). */
void tp_engine_make_grh(const struct tp_av *av, uint32_t bytes, uint8_t grh[40]);

/* ---- times and sizes ---- */

/* How long an RNR timer code (0 to 31) says to wait; how long an initiator tries to reach a silent target (timeout, retry_cnt;
 * 0: for ever). */
uint64_t tp_rnr_delay_ns(uint8_t code);
uint64_t tp_retry_limit_ns(uint8_t timeout, uint8_t retry_cnt);
static inline uint32_t tp_mtu_bytes(enum ibv_mtu mtu) { return 128u << mtu; }
/* Packets of a message: at least one. */
static inline uint32_t tp_packets(uint64_t bytes, enum ibv_mtu mtu) { return bytes ? (uint32_t)tp_div_up(bytes, tp_mtu_bytes(mtu)) : 1; }

/* ---- QP numbers ---- */

/* The process's part of its QP numbers (the top 8 bits), asked for at the first QP; the keeper of port 4791 gives it. Negative:
 * an errno. Until a wire is there: 1. */
int tp_engine_slot(void);
/* Is qpn one of this process's? */
static inline uint32_t tp_qpn_slot(uint32_t qpn) { return qpn >> TP_CARD_QP_SLOTS_LOG; }

/* ---- timers (timer.c) and the progress thread (progress.c) ---- */

/* One timer; armed again and again. The function runs on the progress thread or on a poller, with no lock held, and finds the
 * QP by a reference that the timer holds while armed. */
struct tp_timer;
struct tp_timer *tp_timer_new(void (*fire)(struct tp_qp *qp), struct tp_qp *qp);
void tp_timer_arm(struct tp_timer *timer, uint64_t when_ns);    /* replaces an earlier time; 0 disarms */
void tp_timer_free(struct tp_timer *timer);     /* afterwards it doesn't fire; may be called under the QP's lock */

/* A descriptor that the thread watches: ready runs with no lock held and returns how much it did; -1: another thread is at it. The thread exists from the
 * first timer or descriptor on, with all signals blocked; it sleeps while pollers hold the lease. */
int tp_progress_watch(int fd, int (*ready)(int fd, void *arg), void *arg);
/* The same for the end of a connection on which somebody else reads. */
int tp_progress_watch_end(int fd, int (*ready)(int fd, void *arg), void *arg);
void tp_progress_unwatch(int fd);
/* A poller found nothing: does what the thread would do, renews the lease. Cheap when there is nothing. */
void tp_progress_poll(void);
/* A completion queue was armed: its program is about to sleep, so the lease ends and the thread takes over. */
void tp_progress_arm(void);
/* The wire has something to do at that time, in its progress(), should nobody poll: the thread sees to it. One time a process, the
 * earliest counts; 0: nothing. */
void tp_progress_expect(uint64_t when_ns);
/* Has that time come? */
bool tp_progress_expected(void);
/* True while a poller has been here within the last lease: the thread leaves descriptors alone. */
bool tp_progress_leased(void);

#endif

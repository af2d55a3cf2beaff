/* What the wire keeps for each QP, and the parts of the protocol among themselves. All under the QP's lock.
 *
 *   carrier.c     packets in: found their QP, checked, handed on; tp_wire's operations
 *   burst.c       packets out: built, given their ICRC, sent in segmented pieces
 *   rc_request.c  the initiator: sends requests in a window, goes back on loss
 *   rc_response.c the initiator: acknowledgements and what READs and atomics fetch
 *   rc_early.c    packets that came before their turn
 *   rc_hold.c     acknowledgements that wait for a request of ours to go with
 *   rc_serve.c    the responder: requests in order, answers, duplicates; calls the objects' target side (engine.h)
 *   uc.c          UC's sender waits for a word of what arrived
 *   last.c        answers of connections that are gone
 *   flow.c        how much may be under way to one receiving socket
 *   datagram.c    UD */
#ifndef TP_VERBS_RC_H
#define TP_VERBS_RC_H

#include "verbs/engine.h"
#include "verbs/flow.h"
#include "verbs/port.h"
#include "verbs/wire.h"

#define TP_RC_ANSWERS 256u          /* READ and atomic answers that wait; above TP_CARD_RD_ATOMIC */
#define TP_RC_READ_BYTES (32u << 10)    /* a READ is asked for in pieces of so many bytes, */
#define TP_RC_READ_PACKETS 64u          /* and at most so many packets */
#define TP_RC_WINDOW_FIRST 32u      /* packets */
#define TP_RC_WINDOW_MIN 4u
#define TP_UC_WINDOW_BYTES (256u << 10)
#define TP_RC_PROBE_MIN_NS 1000000u


/* An answer that waits for its turn: the data of a READ, or the result of an atomic. */
struct tp_answer {
	bool atomic, again;             /* again: of a READ that was asked for once more */
	uint32_t psn, msn;
	uint32_t packets;               /* of the whole READ */
	uint32_t next;                  /* the packet to send */
	uint64_t addr, value;
	uint32_t rkey, length;
};
struct tp_atomic_done { uint32_t psn; uint64_t value; bool valid; };

enum tp_rc_message { TP_RC_NONE, TP_RC_SEND, TP_RC_WRITE, TP_RC_SKIP /* UC: the rest of one that is lost */ };

struct tp_rc {
	struct tp_endpoint *endpoint;
	uint32_t sender;
	struct tp_route route;
	struct tp_icrc out, in;         /* in: for the source port seen last */
	uint16_t in_port;
	uint8_t transport;
	uint32_t mtu;
	struct tp_timer *timer;
	uint64_t cnp_sent_ns;
	uint64_t served_ns;             /* when packets came last; 0: never */
	struct tp_rc *older, *newer;    /* all connections of the wire, for the end of the process (carrier.c) */
	uint32_t qpn;
	bool same_host;                 /* the peer's address is ours too */
	bool warned;                    /* of packets that can't be sent */

	/* The initiator. PSNs: una <= next <= top. */
	bool started;                   /* those are set */
	uint32_t una;                   /* not acknowledged yet */
	uint32_t next;                  /* to send */
	uint32_t top;                   /* never sent yet */
	uint32_t current;               /* count of the request that next lies in */
	uint32_t window, window_part;   /* packets; what it grew since the last whole one */
	uint32_t recover;               /* losses of packets before this PSN are one and the same */
	struct tp_flow *flow;
	int64_t flow_bytes;             /* of ours in flow */
	uint32_t repeated;              /* packets sent since the last word from there and taken for lost: they may lie there all the same */
	uint32_t unasked;               /* packets since one asked for an acknowledgement */
	uint32_t read_ends[TP_CARD_RD_ATOMIC], reads_first, reads_count;   /* ends (PSN) of READs and atomics under way */
	uint64_t progress_ns;           /* when una moved, or the first packet went out: the timeout's start */
	uint64_t probe_ns;              /* when to ask again */
	uint32_t probes;                /* in a row */
	uint64_t wants_ns;              /* it would have asked then, but another connection had just asked the same process; 0: no */
	uint64_t late_ns;               /* how much later than wanted this process got a processor for it, since una moved */
	uint32_t put_off;               /* times that it wasn't given up because packets were still being read */
	uint64_t rnr_until_ns;          /* 0: not waiting */
	uint32_t rnr_tries;
	uint64_t blocked_until_ns;      /* the socket was full */
	uint32_t back_psn;              /* what was found lost last, and when */
	uint64_t back_ns;
	bool paced, credited;           /* UC: the peer is waited for; it is known to say what arrived */
	uint32_t paced_psn;             /* UC: it has arrived, or was lost, before this */
	bool paced_held;                /* UC: no word came, a packet asked once more, and no other goes meanwhile */
	uint64_t paced_ns;              /* waits for a word since; 0: it doesn't */
	uint64_t idle_ns;               /* UC: when the last of what was posted was sent */
	uint32_t paced_vain;            /* waits without one, in a row */
	bool repairing;                 /* what is lost alone is on its way: of what was sent behind it about half has arrived */
	bool peer_keeps;                /* what comes early: only what is lost is sent again */
	uint32_t acked;                 /* acknowledged to here, whatever data is missing before */
	struct tp_early *early_answers;
	uint64_t rtt_ns, timed_ns;
	uint32_t timed_psn;
	bool timing;
	/* Requests that take a receive there, counted: begun, ended, and how many may be begun, as the other side said last. */
	uint32_t takes_begun, takes_ended, takes_most;
	bool limited;                   /* it said so */
	enum ibv_wc_status failed;      /* the request at failed_at ends so once those before it ended */
	uint32_t failed_at;

	/* The responder; the next PSN is qp->recv_psn. */
	uint32_t msn;
	bool refused;                   /* a NAK was sent for the PSN that is expected, */
	bool refused_gap;               /* because of a gap */
	uint32_t gap_psn;               /* the last packet that came too early */
	uint32_t gap_packets;           /* that came since the gap was last told */
	struct tp_early *early;
	uint32_t unanswered;            /* packets served since an acknowledgement */
	bool ack_due;
	uint64_t held_ns;               /* the acknowledgement that is due waits until then; 0: it doesn't */
	uint32_t held_batches;          /* that it has to answer for */
	bool hold_listed;
	uint32_t hold_penalty, hold_failures;       /* so many aren't held; how often in a row holding was in vain */
	uint8_t nak;                    /* syndrome to send, 0: none */
	uint8_t last_word;              /* the NAK that ended the connection, repeated when its request comes again */
	uint32_t last_psn;
	enum tp_rc_message message;
	uint32_t srqn, rkey, length, offset;
	uint64_t addr;
	struct tp_answer answers[TP_RC_ANSWERS];
	uint32_t answers_first, answers_count;
	uint64_t answer_ns;             /* when to go on with them; 0: none waits */
	struct tp_atomic_done atomics[TP_CARD_RD_ATOMIC];
	uint32_t atomics_next;
};
static inline struct tp_rc *tp_rc_of(struct tp_qp *qp) { return qp->carrier_data; }

/* ---- burst.c: packets built one behind the other, sent together ---- */

struct tp_burst {
	struct tp_port *port;
	struct tp_endpoint *endpoint;
	uint32_t sender;
	const struct tp_route *route;
	const struct tp_icrc *icrc;
	uint8_t *data;
	uint32_t used;
	struct tp_frame frames[TP_PORT_FRAMES];
	uint32_t psns[TP_PORT_FRAMES];      /* of each frame's first packet */
	uint32_t packets[TP_PORT_FRAMES];
	int count;
	bool closed;                        /* the last frame had its short packet */
	bool whole;                         /* each packet alone */
	uint32_t lost_psn;                  /* first of the packets that didn't go out */
	int error;                          /* 0: all went out; EAGAIN; others */
};
/* Starts in this thread's buffer; NULL: no memory. Nothing else may start one before the last flush. */
struct tp_burst *tp_burst_start(struct tp_port *port, struct tp_endpoint *endpoint, uint32_t sender, const struct tp_route *route,
	const struct tp_icrc *icrc);
/* The place for a packet's payload (bytes of packet) after its headers were written; flushes first where there is no room. */
uint8_t *tp_burst_packet(struct tp_burst *burst, const struct tp_packet *packet);
/* The payload is there: pads, adds the ICRC. */
void tp_burst_commit(struct tp_burst *burst, const struct tp_packet *packet);
/* Sends all; false: not all went out (error, lost_psn). */
bool tp_burst_flush(struct tp_burst *burst);
/* One small packet, at once; false: it wasn't sent, and may be later. */
bool tp_burst_send_one(struct tp_qp *qp, const struct tp_packet *packet);

/* ---- rc_request.c ---- */
void tp_rc_fire(struct tp_qp *qp);
void tp_rc_arm(struct tp_qp *qp);
/* Sends again from psn on (not before una). loss: the window shrinks. */
void tp_rc_go_back(struct tp_qp *qp, uint32_t psn, bool loss);
/* Sends once more the one packet, or piece of a READ, at psn; false: that can't be done now. */
bool tp_rc_send_again(struct tp_qp *qp, uint32_t psn);
/* A loss at psn: the window shrinks, once for all losses of a window. */
void tp_rc_lost(struct tp_rc *rc, uint32_t psn);
/* Sends what the window allows now, also when the queue is being drained. */
void tp_rc_push(struct tp_qp *qp);
/* Completes what has ended. */
void tp_rc_complete(struct tp_qp *qp);
/* The request at count ends with status, those before it first. */
void tp_rc_fail_at(struct tp_qp *qp, uint32_t count, enum ibv_wc_status status);
void tp_rc_congested(struct tp_qp *qp);
/* Packets that are under way, as good as we know. */
uint32_t tp_rc_under_way(const struct tp_rc *rc);
/* Counts them in the flow, after a change. */
void tp_rc_set_flow(struct tp_rc *rc);
/* A request's PSNs: first, and how many (0: it sends nothing). */
static inline uint32_t tp_wqe_psn(const struct tp_wqe *wqe) { return (uint32_t)wqe->carrier[0]; }
static inline uint32_t tp_wqe_packets(const struct tp_wqe *wqe) { return (uint32_t)wqe->carrier[1]; }
/* Of a READ: packets that have come; of an atomic: 1 when answered. */
static inline uint32_t tp_wqe_received(const struct tp_wqe *wqe) { return (uint32_t)wqe->carrier[2]; }
/* The count of requests that take a receive, up to and with this one. */
static inline uint32_t tp_wqe_takes(const struct tp_wqe *wqe) { return (uint32_t)wqe->carrier[3]; }
static inline bool tp_wqe_fetches(const struct tp_wqe *wqe)
{
	return wqe->opcode == IBV_WR_RDMA_READ || wqe->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || wqe->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

/* ---- uc.c ---- */
/* Packets up to psn have arrived. */
void tp_uc_credit(struct tp_qp *qp, uint32_t psn);
/* What could be sent was. */
void tp_uc_pushed(struct tp_qp *qp);
/* When it has waited long enough for a word; 0: it doesn't wait. And then. */
uint64_t tp_uc_waits_until(struct tp_qp *qp);
void tp_uc_unanswered(struct tp_qp *qp, uint64_t now);

/* ---- rc_response.c ---- */
void tp_rc_answered(struct tp_qp *qp, const struct tp_packet *packet);

/* ---- rc_serve.c ---- */
void tp_rc_request(struct tp_qp *qp, const struct tp_packet *packet);
/* Sends the answers and acknowledgements that are due. */
void tp_rc_answer(struct tp_qp *qp);
/* The acknowledgement that is due, for somebody else to send: false where there is none, or not only that. */
bool tp_rc_take_ack(struct tp_qp *qp, struct tp_packet *packet);
/* The connection ends: what it owes is sent, as far as that is possible at once. */
void tp_rc_answer_all(struct tp_qp *qp);
/* A congested network marked a packet: tells the sender, at most every 50 us. */
void tp_rc_notify(struct tp_qp *qp);

/* ---- rc_early.c ---- */
struct tp_early;
/* Keeps a copy, if it is near enough to what is expected and there is room. */
void tp_early_keep(struct tp_early **early, const struct tp_packet *packet, uint32_t expected);
/* The packet kept, NULL: none. It goes by tp_early_pass. */
const struct tp_packet *tp_early_at(struct tp_early *early, uint32_t psn);
/* Those from from to before to aren't wanted any more. */
void tp_early_pass(struct tp_early *early, uint32_t from, uint32_t to);
bool tp_early_any(const struct tp_early *early);
void tp_early_free(struct tp_early **early);

/* ---- rc_hold.c ---- */
/* After a batch of so many packets: true where the acknowledgement that is due had better wait. */
bool tp_rc_hold(struct tp_qp *qp, uint32_t packets);
/* It left with a request. */
void tp_rc_hold_paid(struct tp_rc *rc);
/* From now on none is held: the process ends. */
void tp_rc_hold_end(void);
/* Sends those that have waited long enough. No lock held. */
void tp_rc_flush_held(uint64_t now);
void tp_rc_hold_forget(void);       /* in a forked child */

void tp_uc_request(struct tp_qp *qp, const struct tp_packet *packet);

/* ---- datagram.c ---- */
void tp_ud_arrive(const struct tp_ingress *ingress, const struct tp_packet *packet);
void tp_ud_init(void);

/* ---- carrier.c ---- */
/* The progress thread serves the endpoint from now on. */
int tp_wire_watch(struct tp_endpoint *endpoint);
/* icrc_check.c: is the ICRC of a packet that came in right, for its addresses? */
bool tp_wire_icrc_fits(const struct tp_icrc *icrc, const struct tp_ingress *in);
/* One packet that came in. */
void tp_wire_take(const struct tp_ingress *in);
/* Takes in what has come, of all endpoints; false: there may be more, or another thread is at it. No lock held. */
bool tp_wire_catch_up(void);
void tp_wire_forget(void);          /* in a forked child */
/* Opens the endpoint of an address and has it watched. */
int tp_wire_open(const union tp_addr *addr, struct tp_endpoint **out);

#endif

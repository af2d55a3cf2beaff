/* The short way between processes of one machine and user: what both ends agree on, and the parts of the carrier (tp_path).
 *
 *   path_join.c    who is reached: two processes come to a link          path_meet.c   listener, handshake, probes
 *   path_link.c    links, their QPs and their end; the yard
 *   path_bell.c    who looks into the rings: pollers under a lease, else this process's thread, which peers wake
 *   path_ring.c    requests and answers in shared memory
 *   path.c         the initiator: takes requests from the send queue, chooses a mechanism for each
 *   path_request.c the initiator: a request, and its data's way, into the ring
 *   path_direct.c  the initiator: straight into and out of the target's memory
 *   path_map.c     memory that was born shared: found when registered, mapped by peers
 *   path_trace.c   faults, and packets as they would be on a wire
 *   path_serve.c   the target: requests that came by the ring
 *   path_doors.c   what a QP shows to its peer, and how both keep out of each other's memory once it was closed
 *   path_datagram.c  UD: datagrams by the ring, which need no connection and get no answer
 *
 * Every process has a *yard*, a segment that its peers map: for each of its QPs a *door* with what an initiator must know to act
 * on its own, and the words in which the QP says whose memory it is in now. A peer checks rights in the table of keys (key.c),
 * which it maps too. What it can't decide or do alone goes as a request through the ring: the target then finds the error, or
 * does the work, by the functions that all carriers use. A *link* joins two processes: a segment with a ring each way.
 *
 * Peers are of one user and trusted not to be malicious, but never not to err. */
#ifndef TP_VERBS_PATH_H
#define TP_VERBS_PATH_H

#include <sys/uio.h>
#include "verbs/engine.h"
#include "verbs/port.h"

#define TP_PATH_MAGIC 0x54505031u
#define TP_PATH_VERSION 3u
#define TP_PATH_RING_BYTES (128u << 10)
#define TP_PATH_ANSWERS 2048u       /* as many as requests can be in a ring */
#define TP_PATH_INLINE 8192u        /* data that goes through the ring; more is copied once, from memory to memory */
#define TP_PATH_KEYS 16             /* regions of the peer that a QP can be in at a time */
#define TP_PATH_REGIONS 1024        /* shared ones that a process shows */
#define TP_PATH_SLOTS 256           /* processes that share a port (share.h) */
#define TP_PATH_PLACE(qpn) ((qpn) & ((1u << TP_CARD_QP_SLOTS_LOG) - 1))

/* Why a pair of processes goes by the wire: shown in the log and by `telpher verbs pairs`. */
enum tp_path_reason {
	TP_PATH_TAKEN, TP_PATH_OTHER_HOST, TP_PATH_OTHER_NETNS, TP_PATH_OTHER_UID, TP_PATH_NOT_DUMPABLE, TP_PATH_CMA_REFUSED,
	TP_PATH_SWITCHED_OFF, TP_PATH_OTHER_VERSION, TP_PATH_NOBODY, TP_PATH_NO_ANSWER, TP_PATH_OTHER_PIDNS, TP_PATH_NO_MEMORY, TP_PATH_FAULTS,
	TP_PATH_REASONS
};
const char *tp_path_reason_text(enum tp_path_reason reason);

/* ---- the yard ---- */

/* A QP's door. Its owner writes all but recv_psn. */
struct tp_path_door {
	_Atomic uint32_t open;          /* 0: closed; else the owner's epoch: requests of another one are void. Set last, cleared first */
	_Atomic uint32_t qpn;           /* from the QP's making on */
	_Atomic uint32_t peer_qpn, pd, access;      /* access: qp_access_flags */
	_Atomic uint8_t type, mtu, rd_atomic;       /* rd_atomic: max_dest_rd_atomic */
	_Atomic uint8_t direct;         /* the peer may act alone: RC or UC, and the connection is established */
	_Atomic uint8_t device, port;
	_Atomic uint64_t ends;          /* of the two GIDs and the RoCE version: tp_path_ends */
	_Alignas(64) _Atomic uint32_t recv_psn;     /* expected next; the peer, or the owner for it, moves it on */
	_Alignas(64) _Atomic uint32_t keys[TP_PATH_KEYS];   /* the peer's regions that the owner, as initiator, is in now */
	_Alignas(64) _Atomic uint32_t serving;      /* the owner, as target, is in the peer's memory for its request of that epoch */
};
struct tp_path_region {
	_Atomic uint64_t dev, ino;      /* ino 0: free. Set last */
	uint64_t start, offset, length; /* start: the mapping's address; offset: of start, in the file */
	char path[216];                 /* a name under which the peer can open it */
};
struct tp_path_yard {
	uint32_t magic, version;
	_Alignas(64) _Atomic uint32_t bell;         /* 1: the owner's thread sleeps, whoever puts something into a ring wakes it */
	_Alignas(64) _Atomic uint32_t watched;      /* the owner captures or has faults: all goes through the ring */
	_Alignas(64) struct tp_path_region regions[TP_PATH_REGIONS];
	struct tp_path_door doors[1u << TP_CARD_QP_SLOTS_LOG];
};

/* ---- a link's segment ---- */

enum tp_path_form {
	TP_PATH_NO_DATA,
	TP_PATH_HERE,                   /* the data follow the request */
	TP_PATH_THERE                   /* spans follow: the target copies from (READ: to) the initiator's memory */
};
struct tp_path_request {
	uint32_t bytes;                 /* with what follows, a multiple of 64; 0: the rest of the ring is unused */
	uint8_t opcode, form, type, mtu;
	uint32_t dest_qpn, src_qpn;
	uint32_t epoch, seq;            /* of the initiator; seq: the request's count in its send queue */
	uint32_t psn, imm, length;
	uint32_t srqn, rkey;
	uint8_t flags;                  /* TP_PATH_SOLICITED, TP_PATH_PLACED */
	uint8_t pad;
	uint16_t spans;
	uint64_t addr;
	uint32_t after;                 /* how many of the other side's requests had been served: their answers are read first */
	uint32_t unused;
};
#define TP_PATH_SOLICITED 1u
#define TP_PATH_PLACED 2u           /* WRITE_WITH_IMM: the data are there already */
#define TP_PATH_FATED 4u            /* it was late once: the target's faults have struck it */
_Static_assert(sizeof(struct tp_path_request) == 64, "a request");
#define TP_PATH_HEAD_BYTES 64u
struct tp_path_operands { uint64_t compare_add, swap; };        /* follow an atomic */
struct tp_path_span { uint64_t addr, bytes; };
/* Follows a datagram's head, before its payload: what the receive begins with, and whose port it is for. Its Q_Key is in rkey. */
struct tp_path_datagram {
	uint8_t grh[40];
	union ibv_gid dgid;
	uint8_t gid_type, kind;         /* kind: the completion's sl */
	uint8_t pad[6];
};
_Static_assert(sizeof(struct tp_path_datagram) == 64, "what a datagram is");

/* Ends `covers` requests of one QP, up to and with seq. */
/* Beside tp_reply: the initiator's memory is missing; a fault of the target's delays it by `value` ns. */
enum { TP_PATH_REPLY_LOCAL = 16, TP_PATH_REPLY_LATER };
struct tp_path_answer {
	uint32_t qpn, epoch, seq, covers;
	uint8_t reply, rnr_timer;
	uint8_t single;                 /* it has a value, or data: the next success doesn't join it */
	uint8_t pad[5];
	uint64_t value;
};

struct tp_path_lane {               /* from one side to the other */
	_Alignas(64) _Atomic uint64_t tail;         /* bytes of requests written */
	_Atomic uint64_t answers_tail;
	_Atomic uint32_t starved;                   /* the writer waits for room */
	_Atomic uint32_t nudges;                    /* counts such waits of the other side's that are over */
	_Alignas(64) _Atomic uint64_t head;         /* the reader's */
	_Alignas(64) uint8_t data[TP_PATH_RING_BYTES];
	struct tp_path_answer answers[TP_PATH_ANSWERS];
};
struct tp_path_segment {
	uint32_t magic, version;
	_Atomic uint32_t verdict;       /* 0: not yet; 1: taken; 1 + reason: the wire. Whoever decides first decides for both */
	struct tp_path_lane lanes[2];   /* [0]: from the one that connected */
};

/* ---- links (path_link.c, path_join.c) ---- */

struct tp_path;
struct tp_path_mapping;
/* A QP that found no room in a ring. Under the link's lock. */
struct tp_path_waiter { struct tp_path_waiter *next; uint32_t qpn; bool listed; };
struct tp_path_link {
	struct tp_path_link *_Atomic next;
	int slot;
	pid_t pid;
	uint64_t process;               /* its tp_process_hash */
	int socket, pidfd;              /* -1: none (a link to this process itself; pidfd: a kernel without) */
	_Atomic bool dead, registered, unwatched;   /* its descriptors are watched; no more */
	bool buried;                    /* the reader's: its QPs' requests have ended */
	_Atomic int users;              /* QPs */
	int error;                      /* errno of a probe that failed */
	uint32_t dumpable;
	struct tp_path_segment *segment;
	struct tp_path_lane *out, *in;
	struct tp_path_yard *yard;      /* the peer's, as is */
	struct tp_key *keys;
	struct tp_path *first;          /* QPs attached; under the links' lock */
	pthread_mutex_t lock;           /* of what follows: requests going out */
	uint64_t tail, head_seen;
	_Atomic uint32_t unanswered;
	struct tp_path_waiter *waiting, *waiting_last;  /* waiting_count of them */
	_Atomic uint32_t waiting_count;
	_Atomic uint64_t stuck_at;      /* 1 + where the peer's reading stood when a datagram had waited long enough; 0: nowhere */
	/* The reader's alone. */
	uint64_t head, answers_head, answers_tail;
	uint32_t nudges, answered;      /* answered: of our requests */
	uint32_t to_rerun;              /* of those that wait for room, how many are to try again now */
	bool held;                      /* the next request waits for answers: until they come there is nothing to read */
	_Atomic uint32_t served;        /* of the peer's; whoever writes a request looks at it */
	pthread_mutex_t map_lock;
	struct tp_path_mapping *mappings;
	_Atomic uint32_t map_generation;
	_Atomic uint64_t direct_ops, ring_ops, mapped_ops;
};

/* At the first QP of a process: others find it from now on. */
void tp_path_start(int slot);
/* Is the short way taken to the QP that qp is about to be connected to? The link then has one user more. */
enum tp_path_reason tp_path_reach(struct tp_qp *qp, struct tp_path_link **link);
/* The same for datagrams to a QP of a slot; join: waits for the other process where the two haven't met. */
enum tp_path_reason tp_path_reach_slot(int slot, bool join, struct tp_path_link **link);
bool tp_path_is_here(const struct tp_av *av);        /* Is that address this machine's? */
void tp_path_release(struct tp_path_link *link);
/* Under the reader's lock (path_bell.c): the first of all links, and those that are over freed. */
struct tp_path_link *tp_path_first_link(void);
void tp_path_sweep(void);
bool tp_path_any(void);
/* The peer is taken for gone. */
void tp_path_lose(struct tp_path_link *link);
bool tp_path_is_over(struct tp_path_link *link);        /* asks the kernel */
extern struct tp_path_yard *tp_path_own_yard;      /* NULL: none yet */
struct tp_path_yard *tp_path_make_yard(void);      /* NULL: no memory, logged */
void tp_path_add_user(struct tp_path_link *link, struct tp_path *path);
void tp_path_drop_user(struct tp_path_link *link, struct tp_path *path);
/* The process that is inside the region at a place of the key table now; 0: none. */
pid_t tp_path_find_inside(uint32_t place);
/* Numbers of a link's QPs, from the count-th on. */
int tp_path_users(struct tp_path_link *link, uint32_t after, uint32_t *qpns, int max);
/* For `telpher verbs pairs`: asks the process of a slot for its links; writes lines to out. */
struct tp_path_pair { int32_t slot, pid, peer_slot, peer_pid, reason, qps; uint64_t direct, ring, mapped; };
int tp_path_ask(int slot, struct tp_path_pair *pairs, int max);

/* ---- the attachment of a QP ---- */

struct tp_path {
	struct tp_qp *qp;
	uint32_t qpn;
	struct tp_path_link *link;
	struct tp_path_door *own, *peer;
	struct tp_timer *timer;
	struct tp_path *next;           /* of the link's list */
	struct tp_path_waiter waiter;
	uint64_t ends;
	uint32_t epoch;
	uint32_t in_flight;             /* requests in the ring, not answered */
	uint32_t answered;              /* counts answers: has anything happened? */
	uint32_t answered_seen;
	bool back;                      /* go back to back_to when nothing is in flight */
	uint32_t back_to;
	uint32_t back_psn;
	uint64_t wait_until_ns;
	uint64_t give_up_ns;
	uint64_t limit_at_ns;           /* timed: when to look whether what is in flight was answered */
	uint64_t unserved_ns;           /* since when nothing was */
	bool silent, timed, told;
	uint8_t put_off;                /* times that it wasn't judged because we ourselves were late to look */
	bool fated, fated_there;        /* the faults' dice were thrown for the request at sq.exec: here, at the target */
	uint32_t msn, served;           /* requests that ended, as initiator and as target: for captures */
	uint8_t rnr_tried;
	uint8_t *bounce;                /* one request's data while it is in flight */
	bool bounce_read;
	_Atomic uint64_t *peer_counters;        /* of the port that its packets would come in at; NULL: not known */
	struct tp_path_view { uint32_t index, generation; uint64_t ino, offset, length; uint8_t *base; } view;  /* the peer's shared region used last */
};
static inline struct tp_path *tp_path_of(struct tp_qp *qp) { return qp->carrier_data; }

/* ---- path_ring.c ---- */
/* Room for a request of bytes (head and what follows) in the ring, link->lock held until tp_path_commit; NULL: none now. */
struct tp_path_request *tp_path_reserve(struct tp_path_link *link, uint32_t bytes);
void tp_path_commit(struct tp_path_link *link, uint32_t bytes);
void tp_path_commit_datagram(struct tp_path_link *link, uint32_t bytes);        /* which gets no answer */
void tp_path_abandon(struct tp_path_link *link);
/* The waiter's QP is run again when there is room for a request of bytes; true: there is. */
bool tp_path_await_room(struct tp_path_link *link, struct tp_path_waiter *waiter, uint32_t bytes);
void tp_path_forget_room(struct tp_path_link *link, struct tp_path_waiter *waiter);
/* Those that wait are run again, some at a time: the rest when the rings are read next. */
void tp_path_rerun(struct tp_path_link *link);
/* Reads what has come; returns how much was done. Reader's lock held. */
int tp_path_read(struct tp_path_link *link);
bool tp_path_has_input(struct tp_path_link *link);

/* ---- path_bell.c ---- */
int tp_path_poll(void);             /* a poller found nothing */
void tp_path_arm(void);             /* a program is about to sleep */
void tp_path_ring_bell(struct tp_path_link *link);
int tp_path_start_thread(void);
void tp_path_kick(void);
void tp_path_bell_forget(void);

/* ---- path_doors.c ---- */
/* Equal on both sides. */
uint64_t tp_path_ends(const union ibv_gid *own, const union ibv_gid *peer, int type);
void tp_path_named(struct tp_qp *qp);       /* a QP was made (or goes: number 0) */
void tp_path_unnamed(struct tp_qp *qp);
void tp_path_open_door(struct tp_path *path);
void tp_path_show_door(struct tp_path *path);       /* attributes changed */
/* No request of before is served any more, nobody is in our memory for it; shut: nor comes in directly. */
void tp_path_new_epoch(struct tp_path *path, bool shut);
/* Has a peer this region in use? Waits until none has. (key.c calls it.) */
void tp_path_keep_out(uint32_t place);

/* ---- path_direct.c ---- */
/* Does what can be done without the target from sq.exec on; returns how many requests ended. Lets go of the lock for much data. */
uint32_t tp_path_direct(struct tp_qp *qp);
/* Data of a WRITE_WITH_IMM, ahead of its request; false: they go with it. */
bool tp_path_place(struct tp_qp *qp, struct tp_wqe *wqe);
/* All of it between this process (local) and another (from address remote on); 0 or an errno. */
int tp_path_copy(pid_t pid, bool write, const struct iovec *local, int locals, const struct iovec *remote, int remotes);

/* ---- path_map.c ---- */
/* The peer's memory at addr, mapped here; NULL: it isn't shared, or can't be mapped. key: checked, and entered. */
uint8_t *tp_path_map(struct tp_path *path, const struct tp_key *key, uint64_t addr, uint64_t bytes);
void tp_path_unmap_all(struct tp_path_link *link);
/* What a key's `region` is: where the yard shows the shared file that the memory lies in; 0: it lies in none. */
uint32_t tp_path_show_region(uint64_t addr, uint64_t length);
void tp_path_hide_region(uint32_t region);
void tp_path_map_forget(void);

/* ---- path_datagram.c ---- */
enum tp_path_sent { TP_PATH_GONE, TP_PATH_WAITS, TP_PATH_ELSEWHERE };
/* Out: the datagram has gone (or was lost: it may be); it waits, and the QP is run again; it takes another way. */
struct tp_ud;
enum tp_path_sent tp_path_send_datagram(struct tp_qp *qp, const struct tp_wqe *wqe, const struct tp_span *spans, int count);
/* It waits no more. */
void tp_path_stop_waiting(struct tp_ud *ud);
/* In, from the ring. */
void tp_path_take_datagram(const struct tp_path_request *request, const uint8_t *data);

/* ---- path_trace.c ---- */
/* Does one of the two processes capture, or have faults? Then everything goes through the ring (datagrams: by the wire). */
bool tp_path_is_watched(const struct tp_path_link *link);
/* This process began or ended that: its peers learn of it. */
void tp_path_watch(void);
/* What the packets of a request and its answer would meet; out: this process is the initiator. */
struct tp_path_fate { bool never, lost; uint64_t delay_ns; };
struct tp_path_fate tp_path_fate(struct tp_qp *qp, bool out, const struct tp_path_request *request);
void tp_path_be_slow(void);
/* Into the capture, if there is one. */
void tp_path_trace_request(struct tp_qp *qp, bool out, const struct tp_path_request *request, const struct tp_path_operands *operands,
	const struct tp_span *spans, int count);
struct tp_path_outcome { uint32_t opcode, length, psn, msn; uint8_t reply, rnr_timer; uint64_t value; };
void tp_path_trace_answer(struct tp_qp *qp, bool out, const struct tp_path_outcome *outcome, const struct tp_span *spans, int count);

/* ---- path_serve.c ---- */
void tp_path_serve(struct tp_path_link *link, const struct tp_path_request *request, const uint8_t *data, struct tp_path_answer *answer);

/* ---- path_request.c ---- */
static inline bool tp_path_is_atomic(uint32_t opcode) { return opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD; }
static inline bool tp_path_fetches(uint32_t opcode) { return tp_path_is_atomic(opcode) || opcode == IBV_WR_RDMA_READ; }
/* Puts the request at sq.exec into the ring, or ends it; false: nothing more can be done now. */
bool tp_path_request(struct tp_qp *qp, struct tp_wqe *wqe);
/* Ends the request at sq.exec, which is the oldest. */
void tp_path_complete_at_once(struct tp_qp *qp, enum ibv_wc_status status);
void tp_path_drop_bounce(struct tp_path *path);

/* ---- path.c ---- */
/* Something is in flight: the time is watched until it is answered. */
void tp_path_watch_time(struct tp_qp *qp);
void tp_path_answered(struct tp_path_link *link, const struct tp_path_answer *answer);
void tp_path_peer_died(struct tp_path_link *link);

#endif

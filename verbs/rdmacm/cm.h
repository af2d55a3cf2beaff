/* What the files of librdmacm.so.1 share. One lock guards everything; nothing waits for another process while it is held.
 *
 * Our thread touches nothing that is the program's, for that may be gone at any moment: of an id neither the queue pair nor the
 * channel that its public part names. What the peer says becomes an event, and a queue pair moves when the program fetches it
 * (cm_fetch_locked) or calls us, as with the kernel's manager; even then it is found by its number, and held meanwhile. */
#ifndef TP_VERBS_RDMACM_CM_H
#define TP_VERBS_RDMACM_CM_H

#include <arpa/inet.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <stdatomic.h>
#include "verbs/cm_name.h"

enum cm_state {
	CM_IDLE, CM_BOUND, CM_LISTENING, CM_REQUESTED /* REQ sent */, CM_PENDING /* REQ came, not answered */, CM_ANSWERED /* REP sent */,
	CM_RESPONDED /* REP came, the program has yet to establish */, CM_ESTABLISHED, CM_LEAVING /* DREQ sent */, CM_DONE
};

/* Where a message goes: over the machine's bus to a process or whoever holds a port, or by the wire to a host's QP 1. */
struct cm_target {
	bool wire;
	struct tp_cm_name name;         /* bus */
	pid_t pid;                      /* bus: of whom it came from; 0: not known */
	union ibv_gid own, peer;        /* wire */
	uint8_t tos;
};

struct cm_id {
	struct rdma_cm_id pub;
	struct cm_id *next;
	struct cm_channel *channel;     /* pub.channel is the program's to read; NULL: it was destroyed */
	enum cm_state state;
	bool failed;                    /* CONNECT_ERROR was its last event */
	bool sync;                      /* made without a channel: calls wait for their event */
	bool ud;
	uint32_t local_id, remote_id;
	uint64_t transaction, peer_guid /* of a request that came: the card it came from */;
	struct cm_target peer;
	int port_fd;                    /* holds the port; -1: none */
	uint64_t held_ms;               /* since when */
	uint8_t sgid_index, tos, mtu, ack_timeout;
	uint32_t qpn;                   /* of pub.qp when the program called last */
	uint32_t remote_qpn, psn, remote_psn, qkey;
	uint8_t responder_resources, initiator_depth, retry_count, rnr_retry_count;
	struct cm_id *listener;
	uint8_t message[TP_MAD_BYTES];  /* the last one: sent again where no answer comes */
	uint64_t resend_ms, give_up_ms; /* 0: not waiting */
	uint64_t patience_ms;           /* until then a port that nobody listens on is asked again */
	uint32_t given, acked;          /* events */
	int backlog;                    /* of a listener: requests that wait to be fetched, at most */
	bool parting;                   /* a copy of one that the program has destroyed: its peer has yet to hear of it */
	struct cm_group *groups;        /* group.c: joined */
	struct rdma_addrinfo *resolved; /* newer.c */
	struct ibv_qp_init_attr *for_requests;      /* an endpoint that listens: what its connections' QPs are made from */
};

struct cm_event {
	struct rdma_cm_event pub;
	struct cm_event *next;
	struct cm_id *owner;            /* whose count of events it is in */
	uint8_t private_data[256];
};

struct cm_channel { struct rdma_event_channel pub; struct cm_event *first, **last; };

extern pthread_mutex_t cm_lock;
extern struct cm_id *cm_ids;        /* all of them */
static inline struct cm_id *cm_of(struct rdma_cm_id *id) { return (struct cm_id *)id; }
static inline int cm_fail(int error) { return errno = error, -1; }

/* libibverbs.so.1's (gsi.h, log.h) */
extern void tp_card_inner_warn(const char *text);
extern bool tp_card_inner_wire_always(void);
extern struct ibv_qp *tp_card_inner_qp_hold(uint32_t qpn);
extern void tp_card_inner_qp_let_go(struct ibv_qp *qp);
extern void tp_card_inner_gsi_catch_up(void);
extern int tp_card_inner_gsi_listen(const union ibv_gid *own);
extern int tp_card_inner_gsi_send(const union ibv_gid *from, const union ibv_gid *to, uint8_t tos, const uint8_t *mad);
extern int tp_card_inner_gsi_take(const void *parcel, size_t bytes, uint8_t *mad, union ibv_gid *from, union ibv_gid *to);

/* bus.c */
int cm_bus_start(void);             /* the process's socket and thread; 0 or an errno */
uint32_t cm_bus_number(void);       /* a fresh number of a connection: it leads back to this process */
int cm_bus_hold(uint16_t space, uint16_t number, int *fd);  /* EADDRINUSE where another holds the port */
void cm_bus_release(int fd);
/* Bus or wire. ECONNREFUSED: nobody is there (bus). */
int cm_bus_send(const struct cm_target *target, const uint8_t mad[TP_MAD_BYTES]);
void cm_bus_wake(void);             /* a timer was set */
void cm_bus_watch_locked(pid_t pid);        /* cm_ended_locked is called when that process ends */
void cm_bus_forget(void);
uint64_t cm_now_ms(void);

/* Milliseconds: a message is sent again after RESEND, then after twice that, … MAX_RESEND, for GIVE_UP in all; a parting one for PART. */
enum { CM_RESEND_MS = 100, CM_MAX_RESEND_MS = 4000, CM_GIVE_UP_MS = 60000, CM_PART_MS = 10000 };
/* Programs (perftest) close a listener, open it again and expect a peer that they let go of a moment before to come after that.
 * So who finds nobody listening tries again for as long before it says so. */
enum { CM_PATIENCE_MS = 400, CM_AGAIN_MS = 10 };

/* connect.c */
static inline uint16_t cm_port_of(const struct sockaddr_storage *addr) { return ntohs(((const struct sockaddr_in *)(const void *)addr)->sin_port); }
/* Builds the message that is the id's last one, and sends nothing. awaits: it is sent again until an answer comes. */
void cm_say_locked(struct cm_id *id, struct tp_cm_mad *mad, bool awaits);
/* The connection is over (or never was): the program gets the event. */
void cm_gone_locked(struct cm_id *id, enum rdma_cm_event_type type, int status);
void cm_leave_locked(struct cm_id *id);     /* destroyed: the peer is told */
/* Does what an event means for its id's QP, in the program's call; false: nobody is to hear of the event. */
bool cm_fetch_locked(struct cm_event *event);

/* hear.c, called by the bus with the lock held */
void cm_arrive_locked(const struct tp_cm_mad *mad, int port_fd, const struct cm_target *from);
void cm_established_locked(struct cm_id *id);      /* the peer took our answer: its RTU came, or its data */
/* Sends again, gives up; returns when to call next (0: never). */
uint64_t cm_timers_locked(uint64_t now_ms);
void cm_ended_locked(pid_t pid);    /* a peer's process has ended, whatever it was: its connections have */
void cm_reap_locked(void);          /* frees parting ones that have ended */
bool cm_parting_locked(void);       /* are there any? */

/* id.c */
struct cm_id *cm_new(struct rdma_event_channel *channel, void *context, enum rdma_port_space space);
/* Queues an event on the id's channel; private data is copied. */
void cm_raise_locked(struct cm_id *id, struct cm_id *listener, enum rdma_cm_event_type type, int status, const struct rdma_conn_param *conn,
	const struct rdma_ud_param *ud);
/* MULTICAST_JOIN, which gives the join's context where others give private data. */
void cm_raise_joined_locked(struct cm_id *id, const struct rdma_ud_param *ud, void *context);
/* One that the program wrote. */
void cm_raise_written_locked(struct cm_id *id, enum rdma_cm_event_type type, int status, uint64_t arg);
/* A sync id: waits for the event that the call led to. */
int cm_complete(struct cm_id *id);
int cm_qp_to(struct cm_id *id, enum ibv_qp_state state);    /* ENOENT: it is gone */

/* group.c */
void cm_forget_groups(struct cm_id *id);

/* device.c */
/* The device, port and index of a GID (an address's, in the last bytes); NULL, errno. Opened once, for good. */
struct ibv_context *cm_device_of(const union ibv_gid *gid, uint8_t *port, uint8_t *index);
/* The first GID there is. */
struct ibv_context *cm_device_any(union ibv_gid *gid, uint8_t *port, uint8_t *index);
struct ibv_context **cm_devices(int *count);
void cm_gid_of(const struct sockaddr *addr, union ibv_gid *gid);
struct ibv_pd *cm_device_pd(struct ibv_context *verbs);
void cm_device_forget(void);        /* in a forked child, as cm_bus_forget */

#endif

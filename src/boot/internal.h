/* The inside of the bootstrap. One lock (tp_service_lock) guards everything here but the segment itself; unless a function
 * says otherwise its caller holds it. The service thread lets go of it only while it sleeps in epoll and while it calls other
 * folders. Objects: a *conn* is one proven connection, a *root* an id that is served here, a *joiner* one rank inside
 * tp_boot_open, a *site* this process's share of one communicator, a *link* the way from a site to another host. */
#ifndef TP_BOOT_INTERNAL_H
#define TP_BOOT_INTERNAL_H

#include <pthread.h>
#include "boot/boot.h"
#include "boot/segment.h"
#include "boot/wire.h"

#define TP_BOOT_SLICE_MS 100            /* how often a wait looks at its abort flag */
#define TP_HANDSHAKE_MS 10000
#define TP_LIFE_TICK_MS 250             /* between two life signs */
#define TP_UNPROVEN_MAX 2048            /* connections that have proven nothing yet */

/* ---- service.c */
enum tp_source_kind { TP_SOURCE_WAKE, TP_SOURCE_LISTENER, TP_SOURCE_CONN, TP_SOURCE_PIDFD, TP_SOURCE_WATCH };
struct tp_source { enum tp_source_kind kind; int fd; };
struct tp_listener {
	struct tp_source source;
	bool is_unix;
	struct tp_listener *next;
};

struct tp_service {
	pthread_cond_t stopped, watch_idle;
	bool running, finished;
	bool abandoned;                     /* the process ends: nobody joins the thread */
	pthread_t thread;
	uint32_t generation;                /* a forked child has another one */
	int users;                          /* roots, joiners, sites, watches: at zero the thread ends */
	int epoll, wake, spare_fd;
	union tp_addr addr;
	uint64_t process_hash;
	uint64_t next_ms;                   /* when a timer is due */
	struct tp_listener *listeners, *dead_listeners;
	struct tp_conn *conns, *oldest;
	int unproven;
	struct tp_conn *dead_conns;
	struct tp_root *roots;
	struct tp_site *sites, *dead_sites;
	struct tp_joiner *joiners;
};
extern struct tp_service tp_service;
extern pthread_mutex_t tp_service_mutex;

void tp_service_lock(void);
void tp_service_unlock(void);
ncclResult_t tp_service_use(void);      /* one more user; starts the thread */
void tp_service_unuse(void);            /* one less; by the last one outside the thread: waits for the thread's end */
bool tp_service_is_mine(void);          /* on the service thread */
void tp_service_poke(uint64_t when_ms); /* a timer is due then */
ncclResult_t tp_service_add(struct tp_source *source, uint32_t events);
void tp_service_change(struct tp_source *source, uint32_t events);
void tp_service_remove(struct tp_source *source);
ncclResult_t tp_service_listen(int fd, bool is_unix, struct tp_listener **out);     /* owns fd from then on */
void tp_service_unlisten(struct tp_listener *listener);
/* Room for `more` descriptors: raises the soft limit, or says what is needed. */
ncclResult_t tp_service_need_fds(int more);
void tp_service_init_cond(pthread_cond_t *cond);
void tp_service_wait(pthread_cond_t *cond, uint64_t until_ms);
bool tp_service_is_here(const union tp_addr *addr);              /* this process's listener */
bool tp_service_is_this_machine(const union tp_addr *addr);      /* the same, whatever the port */
bool tp_service_is_loopback(const union tp_addr *addr);
/* The side to connect from, where NCCL_SOCKET_IFNAME asks for one; NULL otherwise. */
const union tp_addr *tp_service_from(const union tp_addr *to, union tp_addr *space);

/* ---- conn.c, handshake.c */
enum tp_conn_state { TP_CONN_CONNECTING, TP_CONN_HELLO, TP_CONN_HELD, TP_CONN_CHALLENGE, TP_CONN_PROOF, TP_CONN_OPEN, TP_CONN_CLOSED };
enum tp_conn_end { TP_END_BROKEN, TP_END_REFUSED, TP_END_UNKNOWN, TP_END_FOREIGN, TP_END_SILENT };
struct tp_conn;
struct tp_conn_ops {
	void (*open)(struct tp_conn *conn);
	/* NULL, or what is wrong with the frame: the connection is dropped. */
	const char *(*frame)(struct tp_conn *conn, enum tp_wire_type type, const void *data, size_t bytes);
	void (*descriptor)(struct tp_conn *conn, int fd);   /* after a frame handler set want_fd */
	void (*flushed)(struct tp_conn *conn);              /* what was queued is out */
	/* Not called after tp_conn_close. why: one sentence without a subject ("refused the connection"). */
	void (*closed)(struct tp_conn *conn, enum tp_conn_end end, const char *why);
};
struct tp_conn {
	struct tp_source source;
	enum tp_conn_state state;
	bool caller, is_unix, want_fd, broken, counted;
	uint32_t events;
	union tp_addr peer;
	struct tp_wire_hello hello;
	uint8_t nonce[TP_WIRE_NONCE];       /* the service's */
	uint8_t secret[TP_SECRET_BYTES];
	uint8_t keys[2][TP_SECRET_BYTES];
	uint64_t sent, received;            /* frames */
	size_t limit;                       /* of a frame's payload */
	uint64_t deadline_ms;               /* 0: none */
	uint8_t head[96];
	struct tp_wire_frame frame;
	size_t have, need;
	uint8_t *payload;                   /* NULL: reading a head */
	uint8_t *out;
	size_t out_at, out_have, out_room;
	const struct tp_conn_ops *ops;
	void *owner;
	int tag;                            /* the owner's */
	bool watcher;                       /* mesh.c: it wants life signs */
	struct tp_conn *next, *prev, *next_of_owner;
};
/* Starts to call a service; what comes of it is told to ops. fd < 0: over TCP to addr. */
ncclResult_t tp_conn_call(int fd, const union tp_addr *addr, enum tp_wire_kind kind, uint8_t flags, uint64_t name,
	const uint8_t secret[TP_SECRET_BYTES], uint64_t deadline_ms, const struct tp_conn_ops *ops, void *owner, struct tp_conn **out);
void tp_conn_accept(struct tp_listener *listener);
void tp_conn_event(struct tp_conn *conn, uint32_t events);
void tp_conn_send(struct tp_conn *conn, enum tp_wire_type type, const void *payload, size_t bytes);
void tp_conn_send_fail(struct tp_conn *conn, ncclResult_t result, const char *text);
void tp_conn_send_fd(struct tp_conn *conn, int fd);
void tp_conn_close(struct tp_conn *conn);           /* without a call back */
void tp_conn_close_flushed(struct tp_conn *conn);   /* when what is queued is sent, 2 s at most; ops are forgotten */
void tp_conn_close_all_of(const void *owner);       /* an owner that goes away; without a call back */
void tp_conn_wake_held(uint64_t name);              /* an id is known from now on */
void tp_conn_tick(uint64_t now_ms);
void tp_conn_free_dead(void);
const char *tp_conn_peer(const struct tp_conn *conn, char text[TP_ADDR_TEXT]);
void tp_conn_stranger(const struct tp_conn *conn, const char *what);

/* ---- id.c */
#define TP_ID_MAGIC "TPLR-ID"
#define TP_ID_VERSION 1
enum { TP_ID_DERIVED = 1, TP_ID_ENV = 2 };
struct tp_id {
	uint64_t name;
	uint32_t flags;
	union tp_addr root;
	uint8_t secret[TP_SECRET_BYTES];
};
ncclResult_t tp_id_parse(const ncclUniqueId *id, struct tp_id *out);
void tp_id_write(const struct tp_id *in, ncclUniqueId *out);
uint64_t tp_id_name(const uint8_t secret[TP_SECRET_BYTES]);

/* ---- root.c, root_seats.c, root_groups.c */
struct tp_root;
/* A rank of this process, on its way to a root that is also here. Otherwise `conn` goes to the root. */
struct tp_joiner {
	struct tp_wire_join join;
	struct tp_id id, first;
	struct tp_conn *conn;
	struct tp_root *root;               /* the root is in this process */
	uint64_t deadline_ms, retry_ms, refused_since_ms, sent_ns;
	bool seated, ready, go;
	struct tp_wire_seat seat;
	void *table;                        /* for a host's first rank */
	ncclResult_t result;
	char text[TP_WIRE_TEXT];
	pthread_cond_t cond;
	struct tp_joiner *next;
};
ncclResult_t tp_root_serve(const struct tp_id *id, struct tp_root **out);   /* finds or makes */
struct tp_root *tp_root_find(uint64_t name, const uint8_t **secret);
void tp_root_adopt(struct tp_root *root, struct tp_conn *conn);             /* an incoming, proven connection */
void tp_root_join_here(struct tp_root *root, struct tp_joiner *joiner);
void tp_root_ready_here(struct tp_root *root, struct tp_joiner *joiner);
void tp_root_done_here(struct tp_root *root, struct tp_joiner *joiner);
void tp_root_leave_here(struct tp_root *root, struct tp_joiner *joiner, const char *why);
void tp_root_tick(uint64_t now_ms);
void tp_root_trim(void);
void tp_root_free_all(void);

/* ---- join.c (takes the lock itself) */
ncclResult_t tp_join_start(struct tp_joiner *joiner);
ncclResult_t tp_join_wait(struct tp_joiner *joiner, const bool *flag, _Atomic uint32_t *abort);
void tp_join_tell(struct tp_joiner *joiner, enum tp_wire_type type);
void tp_join_fail(struct tp_joiner *joiner, ncclResult_t result, const char *text);
void tp_join_end(struct tp_joiner *joiner);
void tp_join_tick(uint64_t now_ms);             /* lock held */

/* ---- site.c */
struct tp_share {
	uint32_t index;
	enum { TP_SHARE_ASKED, TP_SHARE_HERE, TP_SHARE_FAILED } state;
	int fd;
	size_t bytes;
	int served;
	void *base;
	struct tp_conn *conn;               /* on its way */
	struct tp_conn *waiting;            /* at the leader: who asked too early */
	char text[512];
	struct tp_share *next;
};
struct tp_link {
	struct tp_site *site;
	int host;
	int rank;                           /* whose process is called */
	struct tp_conn *conn;
	bool open, watched, heard, over;
	bool owes_event;                    /* the event is to be told there, again on each new connection */
	uint64_t last_ms, opened_ms, retry_ms, pause_ms;
	uint32_t late_ms;                   /* how late the other's timers are, as it says */
	int missed;
	/* Gathers of the last two turns. sent: handed to the kernel, once. */
	struct tp_kept { uint32_t turn; bool sent; size_t bytes; void *data; } kept[2];
	struct tp_pending { struct tp_pending *next; struct tp_wire_call call; } *calls;    /* until it is open */
	int ncalls;
	struct tp_link *next;
};
struct tp_site {
	uint64_t name;
	uint8_t secret[TP_SECRET_BYTES], session[16];
	int users;                          /* ranks of this process */
	int proc;                           /* our place in the host's processes */
	int rank;                           /* our lowest rank */
	int leader_rank, leader_pid;
	int lock_fd;                        /* of the control segment, -1: no lock; closed with its share */
	bool leader, closing, speaker;
	bool settled;                       /* its communicator has been complete */
	struct tp_segment *seg;
	struct tp_share *shares;
	struct tp_listener *listener;       /* leader: gives out segments */
	pthread_cond_t cond;
	struct tp_source pidfd;             /* of the next living process of the host */
	int watching;                       /* its place, -1: none */
	struct tp_link *links;
	struct tp_conn *incoming;
	uint64_t tick_ms, close_ms;
	uint32_t late_ms;                   /* how late our ticks have been lately */
	_Atomic uint32_t gather_done;
	_Atomic uint32_t rounds[2];         /* bits: rounds of the exchange that have arrived */
	_Atomic uint32_t rounds_word;       /* futex: changes with rounds */
	struct tp_site *next;
};
struct tp_boot_inside {
	struct tp_boot boot;
	struct tp_site *site;
	uint32_t generation;
	uint32_t gathers, shares;
	uint64_t asked_ms;
	_Atomic uint32_t never;             /* abort flag of who gave none */
};
struct tp_site *tp_site_find(uint64_t name, const uint8_t **secret);
/* The first rank of the process to come makes the site; takes the lock itself. */
ncclResult_t tp_site_open(struct tp_joiner *joiner, _Atomic uint32_t *abort, struct tp_site **out);
void tp_site_close(struct tp_site *site);
void tp_site_adopt_segment(struct tp_site *site, struct tp_conn *conn);
void tp_site_tick(uint64_t now_ms);
void tp_site_free_dead(void);
ncclResult_t tp_site_share(struct tp_site *site, uint32_t index, size_t bytes, const char *what, bool make,
	struct tp_joiner *joiner, _Atomic uint32_t *abort, uint64_t deadline_ms, void **base);

/* ---- watch.c: who of the host lives */
void tp_watch_hold(struct tp_site *site);       /* shows that this process has the segment */
void tp_watch_start(struct tp_site *site);
void tp_watch_look(struct tp_site *site);       /* now and then */
void tp_watch_stop(struct tp_site *site);
void tp_watch_event(struct tp_source *pidfd);
void tp_watch_dead(struct tp_site *site, int rank, const char *how);

/* ---- mesh.c: links between hosts */
void tp_mesh_adopt(struct tp_site *site, struct tp_conn *conn);
void tp_mesh_start(struct tp_site *site);       /* begins to speak for its host */
ncclResult_t tp_mesh_gather(struct tp_site *site, int host, uint32_t turn, const void *data, size_t bytes);
void tp_mesh_forget_gathers(struct tp_site *site, uint32_t turn);       /* all hosts have them */
void tp_mesh_send_call(struct tp_site *site, int host, const struct tp_wire_call *call);
void tp_mesh_flood(struct tp_site *site, const struct tp_event *event);
void tp_mesh_tick(struct tp_site *site, uint64_t now_ms);
void tp_mesh_retry(struct tp_site *site, uint64_t now_ms);
bool tp_mesh_is_settled(const struct tp_site *site);
bool tp_mesh_flushed(const struct tp_site *site);        /* all that others wait for has been handed to the kernel */
void tp_mesh_leave(struct tp_site *site, bool in_good_order);
void tp_mesh_close(struct tp_site *site);

/* ---- event.c */
/* The first event wins; true: it was this one. */
bool tp_event_set(struct tp_segment *seg, const struct tp_event *event);
bool tp_event_get(struct tp_segment *seg, struct tp_event *out);
void tp_event_post(struct tp_site *site, const struct tp_event *event);    /* here, and to all hosts where it is the first */
/* What a wait in boot reports; ncclSuccess where nothing happened. No lock. */
ncclResult_t tp_event_check(const struct tp_boot *boot, const char *what);

/* ---- calls.c */
void tp_call_arrived(struct tp_site *site, const struct tp_wire_call *call);

/* ---- gather.c */
const char *tp_gather_arrived(struct tp_site *site, int from_host, const void *data, size_t bytes);

#endif

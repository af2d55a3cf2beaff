/* The IB transport: RDMA over libibverbs (net/verbs_dl.h), on hardware or on Telpher's software card.
 *
 * A connection carries messages one way, as NCCL's does: the receiver writes where it wants message n into the sender's *FIFO*
 * (address, size, keys, tag, number: one RDMA WRITE into place n % TP_IB_RING), the sender writes the data there, split over queue
 * pairs, and ends each with WRITE_WITH_IMM, whose immediate is the message's size. Receives for these are posted ahead, before the
 * peer is told the queue pair's number. Only that write makes a completion at the receiver, so data is never waited for by looking at it.
 *
 * A connection has *paths*: a local port, a remote port, and queue pairs between them. Paths over the ports of one device (one, or
 * several that are merged) are a *way*: its paths are used together, messages take turns with all their queue pairs, and large ones
 * are cut over the paths. One way is in use, the others stand by; a merged device is a way twice, so that one port's death leaves
 * the same device's other ports.
 * The TCP connection over which the two ends met stays open as *control*: it answers life signs (a thread of ours does, whatever
 * the application is doing) and lets the two ends agree to leave a way when one of its paths has failed. To leave it each end moves
 * its queue pairs to ERROR, so that nothing can arrive there any more, takes what had completed, and says which messages it has:
 * from then on the paths in use are those of another way that live at both ends, the receiver writes its FIFO entries anew, and the
 * sender sends exactly the messages that the receiver doesn't have. A path that isn't in use is set up afresh and tried with a write
 * of no bytes; once both ends have seen one through, it stands by again; a way that has more paths by then, or comes first, is taken.
 *
 * How a path is known to be dead: a completion with an error; a port that is not ACTIVE; or nothing completing for
 * TELPHER_IB_PATH_TIMEOUT although a write of no bytes was posted and the peer has answered life signs meanwhile (the queue
 * pair's own time is half a minute). Where no other path is left, that is the error, which names it.
 *
 *   params      NCCL_IB_* and our own            hca         NCCL_IB_HCA's syntax
 *   device      contexts and ports               merge       which ports make one device
 *   gid         which address of a port is used
 *   gpu         how a card reaches GPU memory        flush    what it wrote there, seen by kernels
 *   reg         the registration cache           watch       the thread: async events, life signs
 *   wire        records of the control           control     sending and taking them
 *   meet        listen, connect, accept          comm        a connection's memory, paths, end
 *   cm          queue pairs connected by rdma_cm
 *   qp          queue pairs and their states     send, recv, progress   data
 *   path        judging and leaving paths        revive      taking them back
 *   explain     what is said when something fails
 *
 * A connection belongs to one thread at a time (the holder of the run lock); the watch thread touches only struct
 * tp_ib_control (under its lock) and the atomic fields of contexts and ports. */
#ifndef TP_NET_IB_IB_H
#define TP_NET_IB_IB_H

#include <pthread.h>
#include <stdatomic.h>
#include "net/net.h"
#include "net/verbs_dl.h"
#include "net/ib/wire.h"

#define TP_IB_MAX_PORTS 32
#define TP_IB_RNR_TIMER 12                  /* 0.64 ms; receives are posted ahead, so it hardly matters */
#define TP_IB_RING 64                       /* FIFO places: twice what can be outstanding, so no entry meets an older one */
_Static_assert(TP_IB_RING >= 2 * TP_NET_MAX_REQUESTS, "a FIFO place must be free before it is used again");

struct tp_ib_params {
	int disable, gid_index, roce_version, timeout, retry_cnt, sl, tc, fifo_tc, pkey, qps, split, adaptive, relaxed, use_inline, flid_gid_index, return_async;
	int subnet_bits, data_direct;
	int merge, merge_vfs, merge_level, ece;
	int connect;                            /* enum tp_ib_connect */
	int failover, recovery, modify_retry_all, modify_retries, modify_retry_ms, max_paths, path_timeout_ms;
	int64_t ar_threshold;
	int addr_family;                        /* AF_INET, AF_INET6; 0: whichever there is, IPv4 first */
	const char *hca, *addr_range, *force_merge;
};
void tp_ib_params_read(struct tp_ib_params *out);

/* ---- NCCL_IB_HCA ---- */
enum { TP_IB_HCA_ITEMS = 64 };
struct tp_ib_hca_list {
	bool exclude, exact;
	int count;
	struct { char name[64]; int port; } items[TP_IB_HCA_ITEMS];    /* port -1: any */
};
/* "^", "=", "^=", then name[:port],…; NULL or empty: all. false: it can't be read; what is wrong is in why. */
bool tp_ib_hca_parse(const char *text, struct tp_ib_hca_list *out, char *why, size_t bytes);
/* Is this device meant by that item, whatever its port? */
bool tp_ib_hca_names(const struct tp_ib_hca_list *list, int item, const char *device);
bool tp_ib_hca_allows(const struct tp_ib_hca_list *list, const char *device, int port);
/* Where a port stands in the list that allows it: those that one item allows, and all where there is none or it excludes, are equal. */
int tp_ib_hca_place(const struct tp_ib_hca_list *list, const char *device, int port);
/* Does it name Telpher's card (a name that begins with "telpher")? */
bool tp_ib_hca_asks_for_card(const struct tp_ib_hca_list *list);

/* ---- devices ---- */
struct tp_ib_mr_node;
struct tp_ib_cache { pthread_mutex_t lock; struct tp_ib_mr_node *root; uint32_t seed; size_t count; };

struct tp_ib_context {                      /* an open device; its ports share it */
	const struct tp_verbs *verbs;
	struct ibv_context *ibv;
	struct ibv_device_attr attr;
	struct ibv_pd *pd;
	char name[64], pci_path[128];
	int numa;                               /* -1: not known */
	uint64_t guid;
	bool relaxed;                           /* relaxed ordering is asked for and there */
	struct tp_ib_cache cache;
	_Atomic uint32_t fatal;                 /* enum ibv_event_type + 1 of the event that ended it; 0: none */
	bool gpu_asked;                         /* what follows is known; under the cache's lock */
	uint32_t gpu_memory;                    /* TP_NET_CUDA, TP_NET_DMABUF */
	char no_gpu_memory[128];
	bool data_direct;
};

struct tp_ib_gid_choice { int index; uint8_t raw[16]; int type; char text[48]; };    /* type: of enum tp_ib_gid_type */

struct tp_ib_port {
	struct tp_ib_context *context;
	uint8_t number;
	struct ibv_port_attr attr;              /* as of init */
	uint32_t mbps;
	int device, place;                      /* whose port it is, and which of it */
	_Atomic uint32_t state;                 /* enum ibv_port_state; kept by the watch thread */
	_Atomic uint64_t told_ms;               /* when a warning said that it isn't used */
	_Atomic uint32_t told_gid;              /* a warning said that it has no address to use */
	char text[80];                          /* "mlx5_0:1" */
};

/* What the transport shows as one device: a port, or several that are merged. */
struct tp_ib_device {
	int nports;
	struct tp_ib_port *ports[TP_IB_MAX_MERGED];
	uint32_t mbps;                          /* of all */
	char name[128], text[160];              /* "mlx5_0+mlx5_1", "mlx5_0:1+mlx5_1:1" */
};

/* NCCL_NET_MERGE_LEVEL's values, from the nearest. */
enum tp_ib_distance { TP_IB_LOC, TP_IB_PORT, TP_IB_PIX, TP_IB_PXB, TP_IB_P2C, TP_IB_PXN, TP_IB_PHB, TP_IB_SYS };
/* How far two ports are apart: PORT: of one card. vfs: so are virtual functions of one card. */
enum tp_ib_distance tp_ib_port_distance(const struct tp_ib_port *a, const struct tp_ib_port *b, bool vfs);
/* Makes devices of these ports, in their order: [count] have room. How many. */
int tp_ib_merge(const struct tp_ib_params *params, struct tp_ib_port *ports, int count, struct tp_ib_device *out);

/* Opens the library and its devices; once. False: why says the reason. asked: by name (NCCL_NET=IB). */
bool tp_ib_present(bool asked, char *why, size_t bytes);
ncclResult_t tp_ib_init(void);
int tp_ib_port_count(void);
struct tp_ib_port *tp_ib_port(int index);
int tp_ib_device_count(void);
struct tp_ib_device *tp_ib_device(int index);
bool tp_ib_on_software(void);
void tp_ib_forget_devices(void);            /* tests: closes all; no connection may be open */
void tp_ib_forget_after_fork(void);         /* in the child: devices are opened anew at the next use */
/* Asks the device; keeps state up to date where events don't come. */
bool tp_ib_port_is_active(struct tp_ib_port *port);

/* ---- addresses ---- */
enum tp_ib_gid_type { TP_IB_GID_IB, TP_IB_GID_ROCE_V1, TP_IB_GID_ROCE_V2, TP_IB_GID_UNKNOWN };
struct tp_ib_gid { int index; uint8_t raw[16]; enum tp_ib_gid_type type; };
struct tp_ib_gid_wish { int index; int version; int family; uint8_t range[16]; int range_bits; bool ethernet; const char *range_text; };
/* Chooses among a port's GIDs. -1: none will do, why says what there is and what was wanted. *doubt: "" or what is odd about it. */
int tp_ib_gid_choose(const struct tp_ib_gid *gids, int count, const struct tp_ib_gid_wish *wish, char *why, size_t bytes, char *doubt, size_t doubt_bytes);
/* "192.0.2.0/24", "2001:db8::/32" as 16 bytes and bits of a GID; false: it can't be read. */
bool tp_ib_gid_range(const char *text, uint8_t range[16], int *bits, int *family);
const char *tp_ib_gid_format(const uint8_t raw[16], char text[48]);
const char *tp_ib_gid_type_name(int type);
/* Is this address in the port's table, at whatever index? */
bool tp_ib_port_still_has(struct tp_ib_port *port, const uint8_t raw[16]);
/* Reads the port's table and chooses. */
ncclResult_t tp_ib_port_gid(struct tp_ib_port *port, struct tp_ib_gid_choice *out);
/* The same, and false where there is none: said once a port, as a warning, since the others do without it. */
bool tp_ib_port_has_gid(struct tp_ib_port *port, struct tp_ib_gid_choice *out);
/* Why a packet from one can't get to the other: NULL where nothing speaks against it. text: room for words. */
const char *tp_ib_gid_unreachable(const uint8_t from[16], int from_type, const uint8_t to[16], int to_type, bool ethernet, char *text, size_t bytes);
/* How many leading bits two GIDs have in common whose ports reach each other without a router: of an IPv4 address NCCL_IB_SUBNET_PREFIX_LEN. */
static inline int tp_ib_gid_network_bits(const uint8_t raw[16], int subnet_bits) { return raw[10] == 0xff && raw[11] == 0xff ? 96 + subnet_bits : 64; }
/* How many leading bits two GIDs share: the more, the nearer. */
int tp_ib_gid_common_bits(const uint8_t a[16], const uint8_t b[16]);

/* ---- memory ---- */
/* A registration that covers [data, data + bytes), from the cache or new. Each get is undone by one put. */
ncclResult_t tp_ib_reg_get(struct tp_ib_context *context, void *data, size_t bytes, struct tp_ib_mr_node **node, struct ibv_mr **mr);
/* What memory is, for a registration: the host's, the GPU's by its address, or a DMA-BUF (fd; offset: of the data in it) of the latter. id: as in struct
 * tp_net_gpu_memory; registrations of others are never found for it. 0: the host's memory, or nobody says. */
struct tp_ib_source { enum tp_net_memory kind; int fd; uint64_t offset, id; };
ncclResult_t tp_ib_reg_get_of(struct tp_ib_context *context, const struct tp_ib_source *source, void *data, size_t bytes, struct tp_ib_mr_node **node, struct ibv_mr **mr);
ncclResult_t tp_ib_reg_put(struct tp_ib_context *context, struct tp_ib_mr_node *node);
size_t tp_ib_reg_count(struct tp_ib_context *context);
/* What to do where a card's object can't be made for want of memory; "" of another error. */
const char *tp_ib_memlock_hint(int error, char *text, size_t bytes);
ncclResult_t tp_ib_reg_failed(const struct tp_ib_context *context, size_t bytes, const char *what, int error);     /* logs */

/* Knows its cards, those of the connection: it may outlive it. */
struct tp_ib_memory {
	struct tp_ib_context *contexts[TP_IB_MAX_KEYS];
	struct tp_ib_mr_node *nodes[TP_IB_MAX_KEYS];
	struct ibv_mr *mrs[TP_IB_MAX_KEYS];
};

/* ---- GPU memory ---- */
/* TP_NET_CUDA, TP_NET_DMABUF: how this card reaches it; 0: not at all, context->no_gpu_memory says why. Asked once. */
uint32_t tp_ib_gpu_memory(struct tp_ib_context *context);
bool tp_ib_peermem_is_loaded(const char *root);             /* root: where /sys is; "": the machine's */
/* A function of the card beside the GPU, past the root complex (mlx5's data direct): where it is in the machine. false: there is none. */
bool tp_ib_data_direct(struct tp_ib_context *context, char *pci_path, size_t bytes);
struct ibv_mr *tp_ib_data_direct_register(struct ibv_pd *pd, uint64_t offset, size_t bytes, uint64_t iova, int fd, int access);
ncclResult_t tp_ib_hold_memory(int dev, const struct tp_net_gpu_memory *memory, void **held);
void tp_ib_drop_memory(void *held);

/* ---- control ---- */
enum { TP_IB_INBOX = 32 };
struct tp_ib_control {
	int fd;
	uint32_t id;                            /* in the watch thread's table */
	pthread_mutex_t lock;
	size_t have;                            /* bytes of a record that isn't whole yet */
	unsigned char buffer[TP_IB_RECORD_MAX];
	struct tp_ib_note inbox[TP_IB_INBOX];
	uint32_t first, count;
	_Atomic uint32_t waiting;               /* records in the inbox: a look without the lock */
	_Atomic uint32_t pongs;
	_Atomic uint32_t closed;                /* the peer's end is gone; 2: it sent what no peer sends */
	uint32_t forks;
	struct tp_ib_control *next;
};
ncclResult_t tp_ib_watch_start(void);
void tp_ib_watch_port(struct tp_ib_context *context);       /* the context's events are read from now on */
void tp_ib_watch_stop(void);                                /* tests: with forget_devices */
int tp_ib_ready_fd(void);                   /* a descriptor that is always readable */
ncclResult_t tp_ib_control_add(struct tp_ib_control *control, int fd);      /* takes fd over */
void tp_ib_control_remove(struct tp_ib_control *control);
/* Made by a parent of this process, whose connection it stays. */
bool tp_ib_control_is_inherited(const struct tp_ib_control *control);
/* 0 or errno: the peer will hear of it by the closed connection if it can't be sent. */
int tp_ib_control_send(struct tp_ib_control *control, const struct tp_ib_record *record);
bool tp_ib_control_take(struct tp_ib_control *control, struct tp_ib_note *out);
/* Bytes that the peer's kernel hasn't acknowledged. */
int tp_ib_control_unacknowledged(const struct tp_ib_control *control);

/* ---- connections ---- */
struct tp_ib_comm;

enum tp_ib_kind { TP_IB_DATA = 1, TP_IB_FIFO, TP_IB_RECEIVE, TP_IB_PROBE };

struct tp_ib_qp {
	struct ibv_qp *ibv;
	uint32_t posted, freed;                 /* of the send queue: handed in, known to be over */
	uint32_t receives;                      /* posted and not completed */
	uint32_t since_signal;                  /* FIFO writes since the last that completes */
	uint64_t next;                          /* receiver: no message below has an end still to come here */
};

enum tp_ib_path_state { TP_IB_PATH_NONE, TP_IB_PATH_LIVE, TP_IB_PATH_DEAD, TP_IB_PATH_REVIVING, TP_IB_PATH_CONNECTED, TP_IB_PATH_PROBING, TP_IB_PATH_PROVEN };

struct tp_ib_path {
	struct tp_ib_port *port;
	enum tp_ib_path_state state;
	int way;
	int key;                                /* its card's place in comm->contexts */
	int at;                                 /* its place in comm->used; -1: it isn't in use */
	struct tp_ib_gid_choice gid;
	struct ibv_cq *cq;
	struct ibv_mr *mr;                      /* of the connection's block */
	struct tp_ib_qp *qps;                   /* [nqps] */
	struct tp_ib_wire_path remote;
	int mtu;
	uint32_t generation;                    /* completions of older ones are no longer ours */
	uint32_t attempt, peer_attempt;         /* of reviving */
	struct ibv_ece ece;                     /* offered, then agreed; vendor_id 0: none */
	uint32_t psn, peer_psn;                 /* of the queue pairs as they are now, or will be */
	bool peer_connected, peer_proven;
	bool open;                              /* its queue pairs aren't in ERROR, or not all that they had was taken */
	int probes;                             /* writes of no bytes under way */
	uint32_t failures;                      /* since it last proved itself for long */
	uint64_t next_ms, since_ms;             /* when to try again; since when it is in its state */
	uint32_t unacked_events;
	/* stalls, where it is in use */
	uint64_t moved_ms, look_ms, probe_ms, probed_ms, watched_ms;   /* last completion; last look, last probe, first probe; how long it has been looked after since */
	uint64_t round_ms, silent_ms;           /* last life sign; how long nothing has got through while they did */
	uint64_t slowest_ms;                    /* the longest that a probe took lately */
	uint64_t answered_ms;                   /* of what it was watched, when the peer last answered */
	uint32_t pongs_at_round, pongs_at_look;
	bool probing;
	char why[800];                          /* DEAD: the reason */
};

struct tp_ib_request {
	struct tp_ib_comm *comm;
	bool busy, done;
	bool is_flush;                          /* its completions come in flush.c */
	uint64_t message;
	int n;                                  /* receives of a group */
	size_t bytes;                           /* of a send */
	size_t sizes[TP_NET_MAX_RECVS];
	int nparts;
	struct iovec parts[TP_NET_MAX_PARTS];
	struct tp_ib_memory *memory[TP_NET_MAX_PARTS];
};

struct tp_ib_message {                      /* by number % TP_IB_RING */
	int n;
	bool done;                              /* through */
	bool large;                             /* cut over the paths in use */
	uint32_t left;                          /* ends (completions) that are still to come */
	uint64_t imm;                           /* receiver: the size that came */
	struct tp_ib_request *requests[TP_NET_MAX_RECVS];      /* receiver: [0] only */
	struct tp_ib_fifo entries[TP_NET_MAX_RECVS];           /* sender: as the receiver wrote them */
	size_t capacity[TP_NET_MAX_RECVS];      /* receiver */
};

/* The registered memory of a connection, the same layout on both sides. */
struct tp_ib_block {
	struct tp_ib_fifo fifo[TP_IB_RING][TP_NET_MAX_RECVS];  /* sender: written by the receiver; receiver: what it writes from */
	uint32_t sizes[TP_IB_RING][TP_NET_MAX_RECVS];          /* sender: what it writes from; receiver: written by the sender */
};

struct tp_ib_flush;
struct tp_ib_cm;
struct tp_ib_comm {
	bool sending;
	struct tp_ib_cm *cm;                    /* NULL: its queue pairs are connected by what META says */
	struct tp_ib_flush *flush;              /* receiver of GPU memory; NULL: no flush was wanted */
	int nqps, npaths, active;               /* queue pairs a path; active: the way in use */
	int nways, nused, ncontexts;
	uint32_t max_bytes;                     /* of a message: what all ports in use take */
	struct tp_ib_path *used[TP_IB_MAX_MERGED];              /* those of it that live */
	struct tp_ib_context *contexts[TP_IB_MAX_KEYS];         /* cards of its paths */
	struct ibv_comp_channel *channels[TP_IB_MAX_KEYS];      /* by card: for all its paths */
	uint32_t home;                          /* ways over the connector's own device, by bit */
	uint32_t next_request;
	bool split, any_order;                  /* any_order: of tp_net_hello */
	int adaptive;
	struct tp_ib_params params;
	struct tp_ib_path paths[TP_IB_MAX_PATHS];
	struct tp_ib_control control;
	struct tp_ib_block *block;
	uint64_t remote_block;
	int32_t from, to;
	char peer[TP_ADDR_TEXT], peer_host[64];
	uint32_t sq_depth, rq_depth;
	uint64_t head;                          /* messages begun: sent (whole groups), or receives posted */
	uint64_t below;                         /* all messages below are done */
	struct tp_ib_message messages[TP_IB_RING];
	struct tp_ib_request requests[TP_NET_MAX_REQUESTS];
	ncclResult_t error;                     /* the first; it stays */
	/* stalls */
	uint32_t looks;
	uint64_t ping_ms, care_ms;
	uint32_t pongs_at_switch, pings, failing_pings;
	uint64_t silent_ms;                     /* how long the peer has been looked after while a way is left */
	bool leaving, peer_left, to_close;      /* peer_left: the sender, all that it had sent being through; to_close: a path that isn't in use has failed */
	uint64_t failing_ms;                    /* since when no path is left: the peer may turn out to have ended */
	uint64_t seek_ms, sought_ms;            /* the last look for another path then, and how long it has been looked for */
	/* leaving a path */
	uint32_t epoch;
	bool switching, willingly;
	uint32_t told_dead;                     /* what the peer was told */
	uint64_t switch_ms, want_ms;
	bool resending;                         /* sender: from this message on they wait to be sent again */
	uint64_t resend;
	struct tp_ib_wire_switch peer_switch;
	uint32_t switches;                      /* for tests and the log */
	/* sender: what fails on every path is no path's fault */
	uint64_t switch_below;                  /* the oldest message at the last switch */
	uint32_t fruitless;                     /* switches since it was another */
};

ncclResult_t tp_ib_comm_create(bool sending, const struct tp_net_hello *who, int nqps, struct tp_ib_comm **out);
void tp_ib_comm_destroy(struct tp_ib_comm *comm);
/* Has it room for one more path over this port? */
bool tp_ib_comm_has_room(const struct tp_ib_comm *comm, const struct tp_ib_port *port);
/* Adds a path over this port to a way; its queue pairs are in INIT with their receives posted. port NULL: one that isn't there. */
ncclResult_t tp_ib_comm_add_path(struct tp_ib_comm *comm, int way, struct tp_ib_port *port, const struct tp_ib_gid_choice *gid);
/* The names of all ports of this side, for messages about two sides that differ. */
void tp_ib_describe_set(char *out, size_t bytes);
void tp_ib_comm_describe(struct tp_ib_comm *comm, struct tp_ib_wire_meta *out);
/* What the peer says of itself; checked already (tp_ib_wire_check_meta). Connects all paths; tp_ib_comm_connected comes next. */
ncclResult_t tp_ib_comm_learn(struct tp_ib_comm *comm, const struct tp_ib_wire_meta *peer);
/* By rdma_cm learn only begins: one more step, until all paths have come or are given up. */
void tp_ib_comm_connecting(struct tp_ib_comm *comm, bool *over);
/* What came of it: the way in use, or an error where there is none. */
ncclResult_t tp_ib_comm_connected(struct tp_ib_comm *comm, const struct tp_ib_wire_meta *peer);
/* Acceptor: the connector's READY, which says what is used. */
ncclResult_t tp_ib_comm_settle(struct tp_ib_comm *comm, const struct tp_ib_wire_revive *ready);
/* Of the paths in this mask: the best way, and what it is worth (0: there is none). Both ends find the same. */
int tp_ib_best_way(const struct tp_ib_comm *comm, uint32_t mask, int *worth);
/* Its paths in this mask are used from now on, in the order in which they are numbered. */
void tp_ib_use(struct tp_ib_comm *comm, int way, uint32_t mask);
uint32_t tp_ib_live_mask(const struct tp_ib_comm *comm);
ncclResult_t tp_ib_close(void *comm);

/* ---- queue pairs ---- */
ncclResult_t tp_ib_qps_create(struct tp_ib_comm *comm, struct tp_ib_path *path);
void tp_ib_qps_destroy(struct tp_ib_comm *comm, struct tp_ib_path *path);
/* To INIT (from RESET or anew), with all receives posted. Where quiet nothing is tried again: the caller has the run lock. */
ncclResult_t tp_ib_qps_prepare(struct tp_ib_comm *comm, struct tp_ib_path *path, bool quiet);
/* To RTR and RTS. Where quiet the same, and the reason goes to path->why instead of the log. */
ncclResult_t tp_ib_qps_connect(struct tp_ib_comm *comm, struct tp_ib_path *path, bool quiet);
/* To ERROR, and takes all that completes until nothing is outstanding, as far as the card delivers it. */
void tp_ib_qps_close(struct tp_ib_comm *comm, struct tp_ib_path *path);
/* One of them, quietly; 0 or errno. */
int tp_ib_qp_modify(const struct tp_ib_comm *comm, const struct tp_ib_path *path, int q, struct ibv_qp_attr *attr, int mask);
/* What both cards can beyond the standard: before RTR what the peer says, behind it what is left. */
void tp_ib_qp_set_ece(const struct tp_ib_comm *comm, struct tp_ib_path *path, int q, uint32_t vendor, uint32_t options);
struct ibv_ece tp_ib_qp_query_ece(const struct tp_ib_comm *comm, const struct tp_ib_path *path, int q);
void tp_ib_qp_fill(struct tp_ib_comm *comm, struct tp_ib_path *path, int q);
uint64_t tp_ib_wr_id(enum tp_ib_kind kind, const struct tp_ib_path *path, int q, int count, uint64_t message);
/* Posts; a refusal fails the path. */
bool tp_ib_post(struct tp_ib_comm *comm, struct tp_ib_path *path, int q, struct ibv_send_wr *wr, int count);

/* ---- data ---- */
ncclResult_t tp_ib_isendv(void *comm, const struct iovec *parts, int n, int tag, void *const *mhandles, void **request);
ncclResult_t tp_ib_isend(void *comm, const void *data, size_t bytes, int tag, void *mhandle, void **request);
ncclResult_t tp_ib_irecv(void *comm, int n, void *const *data, const size_t *bytes, const int *tags, void *const *mhandles, void **request);
ncclResult_t tp_ib_test(void *request, bool *done, size_t *sizes);
int tp_ib_poll_fds(void *comm, int *fds, uint32_t *events, int max);
/* What was received into GPU memory over the paths in use is there for kernels: a READ of the same card, which pushes its writes before it. */
ncclResult_t tp_ib_iflush(void *comm, int n, void *const *data, const size_t *bytes, void *const *mhandles, void **request);
ncclResult_t tp_ib_test_flush(struct tp_ib_request *request, bool *done);
bool tp_ib_flush_is_under_way(const struct tp_ib_comm *comm);
void tp_ib_flush_destroy(struct tp_ib_comm *comm);
void tp_ib_send_message(struct tp_ib_comm *comm, uint64_t number);
bool tp_ib_queues_have_room(const struct tp_ib_comm *comm);
/* Sends again what waits for that, as far as there is room. */
void tp_ib_resend(struct tp_ib_comm *comm);
/* The peer's end of the control connection is closed, and all that it sent before is taken: what that means. */
ncclResult_t tp_ib_peer_gone(struct tp_ib_comm *comm);
void tp_ib_announce(struct tp_ib_comm *comm, uint64_t number);
/* Queue pairs in use are numbered through, path by path in turn. */
static inline int tp_ib_qps_in_use(const struct tp_ib_comm *comm) { return comm->nused * comm->nqps; }
static inline struct tp_ib_path *tp_ib_path_at(const struct tp_ib_comm *comm, int g, int *q)
{
	*q = g / comm->nused;
	return comm->used[g % comm->nused];
}
/* A message has ends at so many of them, from this one on; the same at both ends of the connection. */
int tp_ib_ends(const struct tp_ib_comm *comm, uint64_t number, int *first);
/* Is a receive of so many bytes cut over the paths? */
bool tp_ib_is_large(size_t bytes);
/* Receiver: the end of a message came in at queue pair q. Sender: one end of it is through. */
void tp_ib_arrived(struct tp_ib_comm *comm, const struct tp_ib_path *path, int q, uint32_t imm);
void tp_ib_sent(struct tp_ib_comm *comm, uint64_t number);
/* Receiver: at the paths in use any message may end that isn't done. */
void tp_ib_expect(struct tp_ib_comm *comm);
void tp_ib_message_done(struct tp_ib_comm *comm, uint64_t number);
struct tp_ib_request *tp_ib_new_request(struct tp_ib_comm *comm);
/* Takes what has completed on a path; on all that are in use. */
int tp_ib_poll_path(struct tp_ib_comm *comm, struct tp_ib_path *path);
void tp_ib_poll_used(struct tp_ib_comm *comm);
ncclResult_t tp_ib_progress(struct tp_ib_comm *comm);

/* ---- paths ---- */
/* What one connection says of a port, others would say in the same second. */
bool tp_ib_port_may_warn(struct tp_ib_port *port);
/* Something is wrong with this path; what follows is decided by tp_ib_care. */
void tp_ib_path_failed(struct tp_ib_comm *comm, struct tp_ib_path *path, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* The first path in use that has failed; NULL: none has. */
struct tp_ib_path *tp_ib_culprit(const struct tp_ib_comm *comm);
/* Leaves the way in use: closes it here, tells the peer. Willingly: none of its paths has failed. */
ncclResult_t tp_ib_leave(struct tp_ib_comm *comm, bool willingly);
/* Which messages are through here. */
void tp_ib_report(const struct tp_ib_comm *comm, struct tp_ib_wire_switch *out);
/* Takes records, watches for stalls, leaves and revives paths. */
ncclResult_t tp_ib_care(struct tp_ib_comm *comm);

/* ---- reviving ---- */
/* One step for a path that isn't in use: set up afresh, connected, tried, live. */
ncclResult_t tp_ib_revive_step(struct tp_ib_comm *comm, struct tp_ib_path *path);
/* Both ends have seen a write through. */
void tp_ib_lives_again(struct tp_ib_comm *comm, struct tp_ib_path *path);
bool tp_ib_post_probe(struct tp_ib_comm *comm, struct tp_ib_path *path, int q);
ncclResult_t tp_ib_peer_revives(struct tp_ib_comm *comm, int type, const struct tp_ib_wire_revive *revive);
/* A better way than the one in use: the sender asks for it, the receiver leaves for it. */
ncclResult_t tp_ib_take_back(struct tp_ib_comm *comm);
ncclResult_t tp_ib_peer_wants(struct tp_ib_comm *comm, const struct tp_ib_wire_revive *revive);

/* ---- rdma_cm ---- */
/* Opens librdmacm where connections by it are asked for, and sees whether it can be used with these ports. false: why. */
bool tp_ib_cm_present(const struct tp_verbs *verbs, char *why, size_t bytes);
/* Before the peer is told of this end: its channel; of the acceptor a listener of its own. */
ncclResult_t tp_ib_cm_create(struct tp_ib_comm *comm);
void tp_ib_cm_destroy(struct tp_ib_comm *comm);
/* In a forked child: what is the parent's stays. */
void tp_ib_cm_abandon(struct tp_ib_comm *comm);
void tp_ib_cm_describe(const struct tp_ib_comm *comm, struct tp_ib_wire_meta *out);
void tp_ib_cm_learn(struct tp_ib_comm *comm, const struct tp_ib_wire_meta *peer);
/* This path's queue pairs, which are in INIT, are connected from now on: the connector asks, the acceptor answers. A failure is the path's. */
void tp_ib_cm_begin(struct tp_ib_comm *comm, struct tp_ib_path *path);
bool tp_ib_cm_has_begun(const struct tp_ib_comm *comm, const struct tp_ib_path *path);
bool tp_ib_cm_is_up(const struct tp_ib_comm *comm, const struct tp_ib_path *path);
/* Takes events. */
void tp_ib_cm_step(struct tp_ib_comm *comm);
/* The same, of a connection that is there: what has been lost is a failure, unless the peer says more of it. */
void tp_ib_cm_look(struct tp_ib_comm *comm);
/* Its ids are given back: the peer's connection manager hears of it. */
void tp_ib_cm_drop(struct tp_ib_comm *comm, struct tp_ib_path *path);
/* What it waits for, in words. */
const char *tp_ib_cm_waits_for(const struct tp_ib_comm *comm, const struct tp_ib_path *path, char *text, size_t bytes);
int tp_ib_cm_fd(const struct tp_ib_comm *comm);             /* readable where there are events */

/* ---- words ---- */
/* "rank 1 -> rank 2, host (mlx5_0:1, GID …, QP 17) -> other (…)"; path_text: without the ranks. */
const char *tp_ib_name(const struct tp_ib_comm *comm, const struct tp_ib_path *path, int q, char *text, size_t bytes);
/* The local ports in use: "mlx5_0:1+mlx5_1:1". */
const char *tp_ib_used_text(const struct tp_ib_comm *comm, char *text, size_t bytes);
const char *tp_ib_path_text(const struct tp_ib_comm *comm, const struct tp_ib_path *path, int q, char *text, size_t bytes);
/* Why nothing can go from this path's address to the peer's and what to do, as far as addresses and the kernel's routes tell; NULL: they don't. */
const char *tp_ib_apart(const struct tp_ib_path *path, char *text, size_t bytes);
void tp_ib_explain(struct tp_ib_comm *comm, struct tp_ib_path *path, const struct ibv_wc *wc, char *text, size_t bytes);
ncclResult_t tp_ib_fail(struct tp_ib_comm *comm, ncclResult_t result, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* ---- meeting ---- */
ncclResult_t tp_ib_listen(int dev, void *handle, void **listener);
ncclResult_t tp_ib_connect(int dev, const void *handle, const struct tp_net_hello *hello, void **state, void **send_comm);
void tp_ib_cancel_connect(void *state);
ncclResult_t tp_ib_accept(void *listener, const struct tp_net_hello *expect, struct tp_net_hello *who, void **recv_comm);
ncclResult_t tp_ib_close_listen(void *listener);
/* Paths of a connection between two ends that are as this one is, over this device. */
int tp_ib_count_paths(const struct tp_ib_params *params, int dev);
int tp_ib_poll_connect_fds(void *state, int *fds, uint32_t *events, int max);
int tp_ib_poll_listen_fds(void *listener, int *fds, uint32_t *events, int max);

#endif

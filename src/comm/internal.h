/* What the files of comm/ share: the communicator, its operations, their queue.
 *
 * Operations of a communicator are totally ordered: each call becomes a struct tp_op at the end of the communicator's
 * queue, and whoever holds the run lock (engine.h) runs the first of them. A call that waits runs it itself. An operation
 * on a stream also waits until it is the first of that stream, so several communicators can share one.
 *
 * Locks, in this order: tp_order_lock (streams, and that the orders of streams and queues agree), comm->queue_lock,
 * comm->choice_lock. The run lock is taken before any of them, never inside; so is a GPU rank's launch lock, which is never held
 * together with the run lock. */
#ifndef TP_COMM_INTERNAL_H
#define TP_COMM_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include "comm/comm.h"
#include "exec/exec.h"
#include "watch/watch.h"

#define TP_COMM_MAGIC 0x7e1f4e72c0330a11u
#define TP_CONFIG_MAGIC 0xcafebeefu
#define TP_LINE_BYTES 64            /* chunks are multiples of it */
#define TP_P2P_TAG 0x5e2dc0deu      /* sends and receives: no rank knows the whole group, so there is no call to hash */
#define TP_STALL_NS 200000000u      /* a wait this long looks for mismatched calls and the dead */

#define tp_likely(x) __builtin_expect(!!(x), 1)
#define tp_unlikely(x) __builtin_expect(!!(x), 0)

/* Streams that mean "the call returns when it is done": NULL, cudaStreamLegacy, cudaStreamPerThread. */
static inline bool tp_stream_is_sync(cudaStream_t stream) { return (uintptr_t)stream <= 2; }

/* Why a call may not take the shortest way; 0: it may. */
enum tp_gate {
	TP_GATE_INIT = 1,           /* not joined yet */
	TP_GATE_ERROR = 2,          /* in error for good */
	TP_GATE_FINALIZED = 4,
	TP_GATE_ABORTED = 8,        /* being aborted or destroyed */
	TP_GATE_REVOKED = 16,
	TP_GATE_NONBLOCKING = 32,
	TP_GATE_TRACING = 64,       /* each call is logged (NCCL_DEBUG_SUBSYS=COLL) */
	TP_GATE_CLOSED = 128,       /* free: the handle means nothing */
	TP_GATE_GPU = 256,          /* a GPU rank: calls go the way of gpu_call.c */
	TP_GATE_FORKED = 512        /* in a forked child: the parent's */
};
#define TP_GATE_REFUSES (TP_GATE_INIT | TP_GATE_ERROR | TP_GATE_FINALIZED | TP_GATE_ABORTED | TP_GATE_REVOKED | TP_GATE_CLOSED | TP_GATE_FORKED)

struct tp_config {              /* ncclConfig_t with everything decided */
	bool blocking;
	char net_name[64];          /* "" : by NCCL_NET */
	char comm_name[64];
	int split_share, shrink_share, traffic_class;
	int cga, min_ctas, max_ctas, collnet, cta_policy, nvls_ctas, channels_per_net_peer, nvlink_sched;
};

/* Waits of one caller for several operations. Lives on the caller's stack: nobody touches it after pending fell to 0. */
struct tp_batch {
	_Atomic int pending;
	_Atomic int error;          /* the first ncclResult_t that wasn't success */
};

struct tp_stream;
struct tp_op;
struct tp_stream_place { struct tp_stream *stream; struct tp_op *op; struct tp_stream_place *next; uint64_t number; };

struct tp_op {
	struct tp_op *next;
	struct ncclComm *comm;
	struct tp_batch *batch;             /* NULL: nobody waits */
	bool waits;                         /* the call returns when it is done (or is in progress until then) */
	bool counted;                       /* in comm->unfinished: non-blocking, ncclCommGetAsyncError reports it */
	struct tp_exec_call call;
	struct tp_call record;
	struct tp_exec_op *running;
	struct tp_flight_record *flight;
	uint64_t flight_seq;
	bool started;
	bool staged;                        /* scaled before the reduction: no references */
	bool remember;                      /* may become the communicator's last call (fast path) */
	const void *device_scalar;          /* PreMulSum: read when the operation starts */
	struct tp_exec_transfer *transfers; /* owned */
	struct tp_plan *own_plan;           /* owned */
	double predicted_us;
	uint64_t begun_ns;                  /* 0: nobody watches how long it takes */
	struct tp_stream_place place;       /* of the first stream */
	struct tp_stream_place *more_places;/* of further streams (a group's sends and receives): [nplaces - 1], owned */
	int nplaces;
	cudaStream_t stream;                /* GPU ranks: the stream, … */
	cudaStream_t *streams;              /* … or, where nstreams > 1, all of a group's sends and receives: the group's */
	int nstreams;
};

/* The last call of each collective, ready to run again. */
struct tp_last_call {
	size_t count;
	int type, op, root;
	bool usable;
	ptrdiff_t in_place;                 /* send - recv where the call is in place */
	size_t send_bytes, recv_bytes;      /* whole buffers; 0: not used on this rank */
	uint32_t hash;
	struct tp_exec_call call;
	struct tp_call record;
};

struct tp_plan_entry { struct tp_plan_entry *next; uint8_t coll, algo; int root, nchannels; struct tp_plan *plan; };
struct tp_choice_entry {
	bool used;
	uint8_t coll;
	bool staged;
	int root;
	size_t block_bytes;
	size_t chunk_bytes, ref_bytes;
	double us;
	const struct tp_plan *plan;
};
#define TP_CHOICES 256

struct tp_redop {
	bool used;
	uint32_t generation;
	ncclDataType_t type;
	bool on_device;                     /* read when the operation starts */
	const void *scalar;
	unsigned char value[8];
};
#define TP_REDOPS 256

struct tp_gpu_rank;
struct group_comm;

struct ncclComm {
	_Atomic uint64_t magic;
	_Atomic uint32_t gate;
	/* What the fast path needs, together. */
	int rank, nranks, device;
	_Atomic uint32_t queued;            /* operations in the queue or running */
	uint32_t alarm_seen;                /* with the run lock */
	_Atomic uint32_t *alarm;
	struct tp_exec *exec;               /* host ranks */
	struct tp_gpu_rank *gpu;            /* GPU ranks (gpu.h); goes with the launch lock */
	struct tp_boot *boot;
	_Atomic uint64_t seq;               /* of the last collective; written with the run lock (GPU ranks: launch lock) */
	struct tp_runnable runnable;
	struct tp_last_call last[TP_NCOLLS];    /* with the run lock */

	struct tp_flight *flight;
	struct tp_links *links;
	struct tp_comm_pace *pace;          /* with the run lock; NULL: not watched */
	struct tp_comm_topo *topo;          /* what is known of the machines; NULL while it joins */
	struct tp_layout *layout;
	struct tp_cost_model model;
	struct tp_ways *ways;               /* what the machines make of it, agreed (ways.h) */
	bool crowded;                       /* the machine has more ranks than processors for them */
	char algo_filter[512];              /* agreed */
	int nchannels;
	size_t p2p_chunk_bytes;
	struct tp_config config;
	uint64_t stalled_since_ns;
	uint32_t splits;                    /* derived communicators so far: part of their ids */

	pthread_mutex_t launch_lock;        /* GPU ranks: whoever launches, with everything that belongs to it */
	pthread_mutex_t queue_lock;
	struct tp_op *head, *tail, *spare;
	_Atomic(struct group_comm *) spare_group;       /* group.c's */
	struct tp_op *current;              /* with the run lock */

	pthread_mutex_t choice_lock;
	struct tp_choice_entry choices[TP_CHOICES];
	struct tp_plan_entry *plans;
	struct tp_redop redops[TP_REDOPS];

	_Atomic int inside;                 /* threads in a call; abort and destroy wait for 0 */
	_Atomic int unfinished;             /* non-blocking operations outstanding */
	_Atomic int error;                  /* ncclResult_t, for good */
	_Atomic int state;                  /* ncclResult_t of non-blocking init and finalize: ncclInProgress, … */
	_Atomic uint32_t abort_flag;        /* of a communicator that is still joining */
	pthread_t thread;                   /* non-blocking init or finalize */
	_Atomic(struct tp_turn *) last_turn;    /* job.c: of the last job in which its ranks meet */
	bool has_thread;
	char error_text[512];
	struct ncclComm *next_free, *next_all;
	_Atomic uint64_t magic_end;
};

extern pthread_mutex_t tp_order_lock;

static inline uint64_t tp_comm_seq(const struct ncclComm *comm) { return atomic_load_explicit(&comm->seq, memory_order_relaxed); }
static inline void tp_comm_set_seq(struct ncclComm *comm, uint64_t seq) { atomic_store_explicit(&comm->seq, seq, memory_order_relaxed); }

/* comm.c */
struct ncclComm *tp_comm_new(void);
void tp_comm_free(struct ncclComm *comm);
/* Counts this thread in; an error if the handle means nothing. tp_comm_leave after. */
ncclResult_t tp_comm_enter(struct ncclComm *comm, const char *name);
/* True: this is a forked child, comm was its parent's, and means nothing here from now on. */
bool tp_comm_forget_forked(struct ncclComm *comm);
void tp_comm_leave(struct ncclComm *comm);
/* ncclSuccess if calls that need a working communicator may go on. */
ncclResult_t tp_comm_may_call(struct ncclComm *comm, const char *name);
/* Puts it in error for good (the first one counts); text for ncclGetLastError of later calls. */
void tp_comm_set_error(struct ncclComm *comm, ncclResult_t result);
/* Looks whether an event concerns us (run lock held, or nobody runs). */
void tp_comm_look_for_events(struct ncclComm *comm);

/* config.c */
ncclResult_t tp_config_read(const ncclConfig_t *config, const struct tp_config *parent, struct tp_config *out);

/* agree.c */
ncclResult_t tp_agree_settings(struct ncclComm *comm, enum tp_device_kind kind);
ncclResult_t tp_agree_model(struct ncclComm *comm);
/* cores.c: fills in this rank's record; all[stride * rank] are those of all ranks. */
struct tp_cores_place { uint64_t machine, mask[TP_CPU_WORDS]; int32_t count; };
void tp_cores_fill(struct tp_cores_place *out);
ncclResult_t tp_cores_judge(struct ncclComm *comm, const void *all, size_t stride);

/* choice.c: what runs a call. Kept until the communicator is freed. staged: scaled before the reduction; GPU ranks: the buffers lie in
 * windows. */
ncclResult_t tp_choice_find(struct ncclComm *comm, enum tp_coll coll, int root, size_t block_bytes, bool staged,
	struct tp_choice_entry *out);
void tp_choice_free_all(struct ncclComm *comm);

/* queue.c */
struct tp_op *tp_op_new(struct ncclComm *comm);
void tp_op_free(struct tp_op *op);
/* Appends ops (linked by next, of any communicators) in their order and runs or submits them; returns when those with a
 * batch are done. sync: the caller waits. */
struct tp_issue { struct ncclComm *comm; struct tp_op *first, *last; bool sync; struct tp_issue *next; };
ncclResult_t tp_issue_all(struct tp_issue *issues);
void tp_comm_init_runnable(struct ncclComm *comm);
/* Ends everything outstanding with the error the communicator is in (run lock taken inside). */
void tp_comm_drop_all(struct ncclComm *comm);
/* Returns when nothing is outstanding and net links have nothing left to move. */
ncclResult_t tp_comm_drain(struct ncclComm *comm);
void tp_comm_lock_run(struct ncclComm *comm);
/* Looks for two ranks whose last calls differ, for so long; true: found, and the communicator is in error. Run lock held. */
bool tp_comm_seek_mismatch(struct ncclComm *comm, uint64_t budget_ms);
/* A wait has lasted long: the same, once, and whether somebody has left. Run lock held. */
void tp_comm_seek_stall(struct ncclComm *comm, uint64_t waited_ms);

/* pace.c: watches how long collectives of host ranks take, where all ranks want it (TELPHER_WATCH). Run lock held. */
struct tp_comm_pace;
int tp_comm_watch_level(void);          /* TELPHER_WATCH */
/* Before the ranks agree: what this rank wants and has the memory for; the least of all ranks is what they agree on. 0: nothing. */
int tp_comm_pace_open(struct ncclComm *comm);
void tp_comm_pace_agree(struct ncclComm *comm, int level);
void tp_comm_pace_close(struct ncclComm *comm);
/* op is about to run: sets op->begun_ns where it is watched. */
void tp_comm_pace_begin(const struct ncclComm *comm, struct tp_op *op);
/* What ran for op is done, and op->running is nothing. *done: nothing else is to run; otherwise op->running is what its ranks do next. */
ncclResult_t tp_comm_pace_go_on(struct ncclComm *comm, struct tp_op *op, bool *done);
/* What runs for a watched op was looked at, and nothing of it could be moved. */
void tp_comm_pace_waits(struct ncclComm *comm);

/* fast.c: what a wait does now and then while it spins; ends it by an error. */
ncclResult_t tp_comm_poll_wait(void *comm, uint64_t waited_ns);
ncclResult_t tp_comm_explain(struct ncclComm *comm, ncclResult_t found, uint64_t seq, uint64_t budget_ms);

/* validate.c */
ncclResult_t tp_validate_call(const struct tp_comm_call *call);
void tp_call_spans(const struct tp_comm_call *call, size_t *send_bytes, size_t *recv_bytes, ptrdiff_t *in_place);
size_t tp_call_block_bytes(const struct tp_comm_call *call);
uint32_t tp_call_hash(uint8_t coll, size_t count, int type, int op, int root);

/* redop.c */
ncclResult_t tp_redop_fill(struct ncclComm *comm, ncclRedOp_t op, ncclDataType_t type, struct tp_reduce *reduce,
	const void **device_scalar);
void tp_redop_read_scalar(const void *scalar, struct tp_reduce *reduce);

/* stream.c, all with tp_order_lock held */
ncclResult_t tp_stream_find(cudaStream_t stream, const char *name, struct tp_stream **out);
void tp_stream_append(struct tp_stream_place *place);
bool tp_stream_op_is_first(struct tp_op *op);
/* Takes op out of its streams and wakes what was waiting behind it. */
void tp_stream_op_done(struct tp_op *op, ncclResult_t result);

/* group.c */
struct tp_job;
extern _Thread_local int tp_group_depth __attribute__((tls_model("initial-exec")));
/* Notes a call in this thread's group. */
ncclResult_t tp_group_add_op(struct ncclComm *comm, struct tp_op *op);
/* stream: a struct tp_stream, NULL where the caller waits; GPU ranks: CUDA's handle. */
ncclResult_t tp_group_add_transfer(struct ncclComm *comm, const struct tp_exec_transfer *transfer, void *stream);
void tp_group_free_spare(struct ncclComm *comm);        /* what it keeps for its next group */
/* Remembers an error of a call in the group; returns it. */
ncclResult_t tp_group_note(ncclResult_t result);

/* job.c: what blocks (init, split, finalize, destroy), run by the caller, by a group's end, or in the background. */
struct tp_job {
	ncclResult_t (*run)(struct tp_job *job);
	void (*discard)(struct tp_job *job);    /* frees it, run or not; result is what run returned */
	struct ncclComm *comm;                  /* the communicator whose state it is */
	struct ncclComm *meets;                 /* whose ranks meet in it; NULL: in no communicator that there is */
	bool blocking, started;
	ncclResult_t result;
	pthread_t thread;
	struct tp_job *next;
	struct tp_turn *turn, *before;          /* job.c's */
};
/* Runs it as the calling situation wants: now, at the group's end, or in the background (ncclInProgress). */
ncclResult_t tp_job_submit(struct tp_job *job);
ncclResult_t tp_jobs_run(struct tp_job *jobs, bool blocking);
ncclResult_t tp_group_add_job(struct tp_job *job);
void tp_job_end_turn(struct tp_job *job);       /* whether it was run or not: of those in which the same ranks meet the next may begin */
void tp_jobs_forget(struct ncclComm *comm);     /* the communicator is over, and so are its jobs */

/* memory.c */
void tp_memory_forget_comm(const struct ncclComm *comm);

/* close.c: frees everything that init made; nobody else may be inside. */
void tp_comm_tear_down(struct ncclComm *comm);
ncclResult_t tp_comm_stop(struct ncclComm *comm, const char *why);

/* init.c */
struct tp_init_args {
	const char *name;
	int nranks, rank, nids;
	const ncclUniqueId *ids;
	enum tp_device_kind kind;
	ncclComm_t *out;
	bool joined;                            /* the job ran */
};
/* gpu: of this rank, taken over; NULL: a host rank. */
ncclResult_t tp_init_handle(const struct tp_config *config, int device, struct tp_gpu_rank *gpu, struct ncclComm **out);
ncclResult_t tp_init_join(struct ncclComm *comm, const struct tp_init_args *args);
void tp_init_failed(struct ncclComm *comm, ncclResult_t result);

/* topo.c: the machine. Collective; fails only where the exchange does, never for what can't be found out. */
struct tp_comm_topo;
ncclResult_t tp_comm_topo_open(struct ncclComm *comm);
void tp_comm_topo_close(struct ncclComm *comm);
/* Adds what the topology says to a path whose via and why are filled in. */
void tp_comm_topo_describe(const struct ncclComm *comm, int from, int to, struct tp_watch_path *path);
/* Of a path that was described: its channels, where they differ (how many; 0: all are alike), and every better kind that it isn't. link: what
 * the link said of it. */
#define TP_REFUSALS_MAX 4
int tp_comm_topo_channels(const struct ncclComm *comm, const struct tp_watch_path *path, struct tp_watch_channel *out, int max);
int tp_comm_topo_refusals(const struct ncclComm *comm, const struct tp_watch_path *path, const char *link, struct tp_watch_refusal list[TP_REFUSALS_MAX]);
/* How the network reaches a rank: "mlx5_0, GID 3 ::ffff:192.0.2.6 RoCE v2"; false: nobody says so. */
bool tp_comm_topo_address(const struct ncclComm *comm, int rank, char *text, size_t bytes);
/* The same of both ends of a pair, on channel 0: "mlx5_0, GID 3 … -> mlx5_0, GID 3 …". */
bool tp_comm_topo_meeting(const struct ncclComm *comm, int from, int to, char *text, size_t bytes);
/* What TELPHER_EXPECT says of the machine, looked at by the first rank of each host; of GPUs' paths, by each rank. */
ncclResult_t tp_comm_topo_expect(const struct ncclComm *comm);

/* orders.c: collective. */
ncclResult_t tp_comm_order_rings(struct ncclComm *comm);
/* ways_agree.c: collective; the rings have their orders. */
ncclResult_t tp_comm_open_ways(struct ncclComm *comm);

/* report.c */
ncclResult_t tp_report_check(struct ncclComm *comm);
ncclResult_t tp_report_path(struct ncclComm *comm, int from, int to, struct tp_watch_path *out);
void tp_report_paths(struct ncclComm *comm);
/* The paths from one rank, or (from -1) of all, as JSON; the caller frees *text. */
ncclResult_t tp_report_json(struct ncclComm *comm, int from, char **text, size_t *bytes);

/* meet.c: the unique id of a job whose ranks are all on this machine. */
ncclResult_t tp_meet_on_this_machine(const char *job, int rank, int nranks, int timeout_ms, ncclUniqueId *id);

#endif

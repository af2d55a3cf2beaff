/* What the files gpu_*.c share: a communicator's end on a GPU.
 *
 * A call of GPU ranks doesn't wait and has no queue: it is checked, its plan found, and its kernels launched on the caller's
 * stream, all by the caller, under the rank's launch lock. What follows is the GPU's: streams order the kernels, and events
 * order the streams (gpu_order.c). Two threads of ours look on: the watcher (gpu_watch.c), for deaths, mismatched calls and
 * kernels' complaints, and, where ranks are on several hosts, the engine, which moves the network's slots.
 *
 * Whoever waits inside CUDA may hold locks of the driver's while a kernel spins, so what ends kernels (tp_gpu_rank_abort) and what finds
 * out that they must end (the watcher) never calls CUDA and never takes the launch lock. */
#ifndef TP_COMM_GPU_H
#define TP_COMM_GPU_H

#include "comm/internal.h"
#include "exec/cuda.h"
#include "mem/mem.h"

#define TP_GPU_LINE_BYTES 128           /* parts and chunks are multiples of it: a line of LL128, a transaction of the memory */
#define TP_GPU_CALLS 64                 /* calls remembered; a power of two */
#define TP_GPU_CAPTURES 8               /* captures under way that a communicator knows */

/* Which stream: a handle may be used again after its stream is destroyed, a number never is. */
struct tp_gpu_stream { CUstream handle; unsigned long long id; };
#define TP_GPU_LEGACY_ID (~0ull)

/* What a communicator has in a capture under way. */
struct tp_gpu_capture {
	unsigned long long id;              /* 0: free */
	uint64_t used;                      /* to find the one that was used least recently */
	CUgraph graph;
	CUgraphNode last;                   /* of the last operation, */
	CUstream stream;                    /* and its stream */
	CUgraphNode record;                 /* records `done` after all of them; NULL: none (no mixing) */
	struct tp_gpu_held *held;
};

/* What the host node of a captured launch knows; it lives as long as the graph. */
struct tp_gpu_wake { struct tp_gpu_wake *next; struct tp_gpu_rank *rank; uint64_t kernels; };
/* What a graph holds: a user object of CUDA's, so we hear when the last copy of the graph is gone. */
struct tp_gpu_use;
struct tp_gpu_held { struct tp_gpu_rank *rank; struct tp_gpu_wake *wakes; struct tp_gpu_use *uses; uint32_t waited_ms; };

struct tp_gpu_call {                    /* a call that was made, ready to be made again */
	bool used, windows;
	uint8_t coll;
	int type, op, root;
	size_t count;
	ptrdiff_t in_place;
	size_t send_bytes, recv_bytes;
	struct tp_exec_call call;
	struct tp_call record;
	struct tp_cuda_ready *ready;        /* owned; NULL: launches are made anew */
};

/* A stream, or (captured) what it is in one capture: id is the capture's then. */
struct tp_gpu_name { CUstream handle; unsigned long long id; bool captured; };
/* gpu_used.c's: the streams that a rank uses. What other ranks see changes with the lock there, but for the two words. */
struct tp_gpu_streams {
	struct tp_gpu_rank *next_rank;      /* of those that are listed */
	int rank;
	bool listed;
	bool moved;                         /* streams were left since `latest` was recorded */
	_Atomic bool holds, busy;           /* `checked` is still this rank's; a call has begun */
	struct tp_gpu_name checked, checked_captured;   /* the last streams that were found fit */
	struct tp_gpu_taken *taken;
	int ncaptured;                      /* of them */
	struct tp_gpu_mark *marks, *spare;  /* marks: the oldest first */
	CUevent latest, behind;             /* latest: rank->done, or behind */
	uint64_t calls;                     /* that weren't captured */
};

struct tp_gpu_rank {
	/* What every call looks at, together. */
	const struct tp_gpu *gpu;
	_Atomic(struct tp_cuda_exec *) exec;    /* read without the launch lock by who aborts */
	bool mixing;                        /* NCCL_GRAPH_MIXING_SUPPORT */
	bool check_pointers;                /* NCCL_CHECK_POINTERS */
	bool strict;                        /* other ranks of this communicator in this process use this GPU */
	bool shared;                        /* or in other processes */
	bool counts;                        /* kernels are counted when they are done: net links */
	bool paced;                         /* watched (pace): agreed */
	bool launched, captured;            /* with comm->launch_lock: there was an eager operation; there may be graphs */
	_Atomic bool launching;             /* gpu_close.c's */
	_Atomic int graphs;                 /* that hold operations of ours; the rank lives as long as they */
	_Atomic(struct tp_gpu_window *) windows;        /* written with comm->choice_lock */
	_Atomic(struct tp_gpu_use *) spent; /* registrations that were held by graphs that are gone */
	/* Kernels that were started, or will be before the engine hears more: counted where `counts`. */
	_Atomic uint64_t expected;
	_Atomic uint64_t launches;          /* calls of the executor; the watcher's clock of what is new */
	/* With comm->launch_lock. */
	CUevent done;                       /* the last operation, and all before it */
	struct tp_gpu_stream last;          /* where the last eager operation went; valid where `launched` */
	struct tp_gpu_streams streams;      /* strict */
	struct tp_gpu_call calls[TP_GPU_CALLS];
	CUevent join;                       /* passing: what other streams of a group have done so far */
	struct tp_gpu_capture captures[TP_GPU_CAPTURES];
	uint64_t capture_turn;
	struct tp_gpu_kept *kept;           /* registrations that graphs hold */
	struct tp_gpu_pace *pace;           /* NULL: there is nothing to watch with */

	struct tp_cuda_kernels *kernels;
	enum tp_cuda_pipes pipes;           /* agreed */
	pthread_t loader;                   /* loads them, while `loads` */
	bool loads;
	pthread_t asker;                    /* asks NVML about the GPU, while `asks` */
	bool asks;
	ncclResult_t load_result;
	int blocks;                         /* of the device's, promised to this rank */
	struct tp_mem *mem;
	uint64_t comm_hash;
	struct ncclComm *comm;              /* NULL once it was closed */
	struct tp_gpu_rank *next_open;      /* gpu_close.c's */
	struct tp_gpu_rank *next_watched;   /* with the watcher's lock, as what follows */
	uint64_t seen_launches, quiet_since_ms, asked_ms;
};

/* gpu_init.c */
/* The device of this rank: of the calling thread, or (ordinal >= 0) of that number. Before anybody is met. */
ncclResult_t tp_gpu_rank_new(int ordinal, struct tp_gpu_rank **out);
ncclResult_t tp_gpu_rank_like(const struct tp_gpu_rank *parent, struct tp_gpu_rank **out);
void tp_gpu_rank_free(struct tp_gpu_rank *rank);        /* nothing was made with others */
/* A GPU's first rank in this process: kernels begin to be loaded, and NVML to be asked, by threads, since the one takes about as long as meeting
 * the other ranks does, and the other 30 ms in a virtual machine, and nothing needs either until then. */
void tp_gpu_rank_begin(struct tp_gpu_rank *rank);
/* Kernels, and how many blocks (comm->nchannels). Collective. */
ncclResult_t tp_gpu_rank_agree(struct ncclComm *comm);
size_t tp_gpu_rank_region_bytes(const struct ncclComm *comm);
/* Links are there: the executor. Collective. */
ncclResult_t tp_gpu_rank_open(struct ncclComm *comm);
/* An error of CUDA as one message with the call, the device and the rank. */
ncclResult_t tp_gpu_rank_fail(const char *file, int line, const char *function, const struct ncclComm *comm, const char *what, CUresult error);
#define TP_GPU_FAIL(comm_, what_, error_) tp_gpu_rank_fail(__FILE__, __LINE__, __func__, comm_, what_, error_)
#define TP_GPU_TRY(comm_, call_) \
	do { \
		CUresult cuda_ = tp_cuda->call_; \
		if (tp_unlikely(cuda_ != CUDA_SUCCESS)) return TP_GPU_FAIL(comm_, #call_, cuda_); \
	} while (0)

/* gpu_budget.c: blocks of a device that living communicators of this process may use at once. */
struct tp_gpu_budget {                  /* what a rank tells the others */
	uint8_t uuid[16];
	uint64_t process;
	int32_t resident, available;        /* of the device; not promised yet in this process */
	int32_t least, most;                /* as configured */
	uint8_t mps, launch_blocking;
	uint8_t pipes[2];                   /* enum tp_cuda_pipes: with a GPU for each rank; on shared ones */
	uint8_t pad[4];
	char bus_id[16];
};
void tp_gpu_budget_fill(const struct ncclComm *comm, struct tp_gpu_budget *out);
/* From all ranks' words: the number of channels, the same everywhere; *sharers: ranks of this one's GPU, *in_process: those of its process too. */
ncclResult_t tp_gpu_budget_judge(const struct ncclComm *comm, const struct tp_gpu_budget *all, int *nchannels, int *sharers,
	int *in_process);
/* What all ranks have, by what is so on rank 0, whose table of sizes counts. */
enum tp_cuda_pipes tp_gpu_budget_pipes(const struct ncclComm *comm, const struct tp_gpu_budget *all);
void tp_gpu_budget_take(const struct tp_gpu *gpu, int blocks);
void tp_gpu_budget_give_back(const struct tp_gpu *gpu, int blocks);

/* gpu_call.c */
/* The same call again, no group, nothing special about the communicator. false: the long way. */
bool tp_gpu_call_again(const struct tp_comm_call *call, ncclResult_t *result);
/* NCCL_CHECK_POINTERS, after tp_validate_call. */
ncclResult_t tp_gpu_validate_call(const struct tp_comm_call *call);
/* Launches operations of these communicators, in their order, and frees them. */
ncclResult_t tp_gpu_issue_all(struct tp_issue *issues);
/* Channels and chunk of a choice, which the chooser leaves to the machine; and the algorithm, where the kernels want another. */
struct tp_ways_call;
void tp_gpu_fit_choice(const struct ncclComm *comm, const struct tp_ways_call *call, struct tp_choice *choice);
/* Where all ranks promise the same windows and offsets (NCCL_WIN_COLL_SYMMETRIC): notes them in the call. true: they do. */
bool tp_gpu_look_for_windows(const struct tp_comm_call *call, struct tp_exec_call *exec);
/* What of that the call board should know: whether it runs in them, and where. Returns whether. */
bool tp_gpu_note_windows(struct ncclComm *comm, const struct tp_exec_call *exec, struct tp_call *record);
static inline bool tp_gpu_find_windows(const struct tp_comm_call *call, struct tp_exec_call *exec)
{
	return tp_unlikely(atomic_load_explicit(&call->comm->gpu->windows, memory_order_relaxed) != NULL) && tp_gpu_look_for_windows(call, exec);
}

/* gpu_order.c, launch lock held, the GPU's context current */
struct tp_gpu_place {                   /* where a launch goes */
	const cudaStream_t *streams;        /* [count], each once; the kernels go to the first */
	int count;
	CUstream stream;                    /* the first */
	bool is_eager;                      /* known not to be captured, and its number is known */
	unsigned long long id;
	struct tp_gpu_capture *capture;     /* NULL: not captured */
};
/* Is this a stream that these ranks can use? */
ncclResult_t tp_gpu_order_check(struct ncclComm *comm, struct tp_gpu_place *place);
ncclResult_t tp_gpu_order_before(struct ncclComm *comm, struct tp_gpu_place *place);
ncclResult_t tp_gpu_order_after(struct ncclComm *comm, struct tp_gpu_place *place, uint64_t kernels);

/* gpu_used.c: ranks of a communicator that share a GPU in one process (strict), and whose streams are whose. Launch lock held. */
/* The same stream as that of the call before, and still this rank's. */
bool tp_gpu_used_again(struct tp_gpu_rank *rank, const struct tp_gpu_name *name);
/* It is this rank's from now on, or *other >= 0: another rank has work there that isn't done. first: of the streams of a call. */
ncclResult_t tp_gpu_used_take(struct ncclComm *comm, const struct tp_gpu_name *name, bool first, int *other);
void tp_gpu_used_several(struct tp_gpu_rank *rank);     /* the call has several: the next one looks at all of them, whichever its own is */
/* The call that was launched on `stream`, not captured; before `done` is recorded. The GPU's context is current, as for the next and free. */
ncclResult_t tp_gpu_used_record(struct ncclComm *comm, CUstream stream);
void tp_gpu_used_settle(struct tp_gpu_rank *rank);      /* graphs will record `done`: what is done by now isn't asked for any more */
/* There are no graphs any more. true: `done` can be what it was before them; false: a mark still has it. */
bool tp_gpu_used_forget_graphs(struct tp_gpu_rank *rank);
/* The call is over, whether it was launched or not. */
static inline void tp_gpu_used_end(struct tp_gpu_rank *rank)
{
	if (tp_unlikely(rank->strict)) atomic_store_explicit(&rank->streams.busy, false, memory_order_seq_cst);
}
void tp_gpu_used_close(struct tp_gpu_rank *rank);       /* no more calls; without the launch lock */
void tp_gpu_used_free(struct tp_gpu_rank *rank);

/* gpu_pace.c: watches how long collectives take. Open is collective, and before the last exchange of init: who is through with that may launch,
 * and fail, while others still wait. wanted: as that of pace.c; the least of all ranks' is what they agree on. */
struct tp_gpu_pace;
ncclResult_t tp_gpu_pace_open(struct ncclComm *comm);
int tp_gpu_pace_wanted(const struct ncclComm *comm);
void tp_gpu_pace_agree(struct ncclComm *comm, int wanted);
void tp_gpu_pace_free(struct tp_gpu_rank *rank);        /* the GPU's context current */
/* Around the launch of an announced call that isn't captured; begin true: this one is timed, and end belongs behind it. Launch lock held. */
bool tp_gpu_pace_begin(struct ncclComm *comm, CUstream stream, const struct tp_exec_call *call);
void tp_gpu_pace_end(struct ncclComm *comm, CUstream stream);

/* gpu_memory.c */
ncclResult_t tp_gpu_memory_alloc(size_t bytes, void **out);
ncclResult_t tp_gpu_memory_free(void *memory);
/* comm: entered. */
ncclResult_t tp_gpu_memory_register(struct ncclComm *comm, void *buffer, size_t bytes, void **handle);
ncclResult_t tp_gpu_memory_deregister(struct ncclComm *comm, void *handle);
void tp_gpu_memory_close(struct tp_gpu_rank *rank);
/* Registered buffers are offered to peers' kernels from now on. */
void tp_gpu_memory_offer(struct tp_gpu_rank *rank, struct tp_cuda_exec *exec);
/* What they were good for. */
void tp_gpu_memory_tell(struct tp_gpu_rank *rank, struct tp_links *links, int number);

/* gpu_register.c: what a capture receives into is registered as long as its graph lives. Launch lock held, but for spend, which is called when
 * the graph is gone, from any thread, and calls nothing of CUDA's. drop_spent: nothing of the rank may be outstanding but graphs that live;
 * deregisters: false where all of the rank's memory goes anyway. */
void tp_gpu_register_captured(struct ncclComm *comm, struct tp_gpu_held *held, const struct tp_exec_call *calls, int ncalls);
void tp_gpu_register_spend(struct tp_gpu_held *held);
void tp_gpu_register_drop_spent(struct tp_gpu_rank *rank, bool deregisters);

/* gpu_watch.c */
ncclResult_t tp_gpu_watch_add(struct ncclComm *comm);
void tp_gpu_watch_remove(struct ncclComm *comm);
void tp_gpu_watch_kick(void);           /* something was launched while the watcher slept for long */
/* Something was deregistered: given back now where no kernel runs, else by the engine. */
void tp_gpu_watch_settle(struct ncclComm *comm);
void tp_gpu_watch_wake(struct tp_gpu_rank *rank);       /* the engine, for the network's sake */
extern _Atomic bool tp_gpu_watch_dozes;
static inline void tp_gpu_watch_launched(void)
{
	if (tp_unlikely(atomic_load_explicit(&tp_gpu_watch_dozes, memory_order_relaxed))) tp_gpu_watch_kick();
}
/* What kernels have complained about, as an error of the communicator. Run lock held. */
void tp_gpu_watch_faults(struct ncclComm *comm);
void tp_gpu_watch_init_runnable(struct ncclComm *comm);
bool tp_gpu_watch_has(uint64_t comm_hash);      /* a rank of this process in that communicator is alive */

/* gpu_close.c */
/* Kernels end, with or without their result. From any thread. */
void tp_gpu_rank_abort(struct tp_gpu_rank *rank);
/* Until all that was launched is done; an error of the communicator ends it early. */
ncclResult_t tp_gpu_rank_drain(struct ncclComm *comm);
bool tp_gpu_rank_is_busy(struct ncclComm *comm);        /* something is outstanding */
/* Takes executor, links and boot out of the communicator and frees them as soon as nobody needs them. */
void tp_gpu_rank_close(struct ncclComm *comm);
void tp_gpu_rank_bury(void);            /* frees what was closed and is no longer needed */
void tp_gpu_rank_register(struct tp_gpu_rank *rank);    /* it can launch from now on */
/* Around launches. Where something is being freed, which waits for kernels, none begins; no word is written that other ranks write too. */
extern _Atomic bool tp_gpu_quiet;
void tp_gpu_launch_wait(struct tp_gpu_rank *rank);
static inline void tp_gpu_launch_begin(struct tp_gpu_rank *rank)
{
	atomic_store_explicit(&rank->launching, true, memory_order_seq_cst);        /* pairs with begin_quiet: one of the two sees the other */
	if (tp_unlikely(atomic_load_explicit(&tp_gpu_quiet, memory_order_seq_cst))) tp_gpu_launch_wait(rank);
}
static inline void tp_gpu_launch_end(struct tp_gpu_rank *rank) { atomic_store_explicit(&rank->launching, false, memory_order_release); }

#endif

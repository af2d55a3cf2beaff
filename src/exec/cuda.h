/* The CUDA executor: runs a rank's programs as kernels. One kernel a collective (several of a group in one kernel), one
 * block a channel; a plan whose shape is well known runs as a fused kernel.
 *
 * Nothing but kernel arguments is made at call time: programs lie in device memory since their plan was first seen, the
 * counters of links and the epochs of fused kernels live on the device, so a captured graph replays any number of times,
 * mixed with eager calls. Launches of one executor must be ordered, on the device, in the order of their calls: that is the
 * caller's task (comm/). Kernels of co-operating ranks wait for each other, so all of them must be resident: the caller
 * keeps to tp_cuda_kernels_resident. */
#ifndef TP_EXEC_CUDA_H
#define TP_EXEC_CUDA_H

#include "exec/exec.h"
#include "gpu/gpu.h"

/* All kernels, loaded into gpu's context; once a context, kept until the process ends. Loads everything that any communicator may launch: a later
 * load may wait for a kernel that spins. An error where this build has no kernels or none for this GPU. */
struct tp_cuda_kernels;
ncclResult_t tp_cuda_kernels_load(const struct tp_gpu *gpu, struct tp_cuda_kernels **out);
bool tp_cuda_kernels_built(void);                       /* was nvcc there when this library was built? */
/* Blocks of any of our kernels that fit the device at once (from registers, shared memory, threads; the least over kernels). Pipes, which take most of a
 * multiprocessor, count from the first communicator on whose ranks are so few that it may use them. */
int tp_cuda_kernels_resident(struct tp_cuda_kernels *kernels, int nranks);
/* What goes through pipes (exec/cuda/pipes.h), and so whether there are any: nothing; sends and receives; collectives that only move too; reductions and
 * broadcasts in two steps too. By the table of sizes (TELPHER_CUDA_TABLE), for ranks of one host with GPUs of their own, or that share them. Ranks agree on the
 * least of all. */
enum tp_cuda_pipes { TP_CUDA_PIPES_NONE, TP_CUDA_PIPES_TRANSFER, TP_CUDA_PIPES_MOVE, TP_CUDA_PIPES_ALL };
enum tp_cuda_pipes tp_cuda_pipes_wanted(const struct tp_cuda_kernels *kernels, int nranks, bool shared_gpu);

struct tp_cuda_exec;
struct tp_cuda_options {
	const struct tp_gpu *gpu;
	int nchannels;                  /* blocks at most; the links' number of channels; agreed */
	bool shared_gpu;                /* several ranks of the communicator on one GPU: waits give way to each other */
	bool no_ctas;                   /* collectives go by copy engines wherever they can (NCCL_CTA_POLICY_ZERO); rank 0's counts */
	bool counts;                    /* the engine needs to know when kernels are done (net links): tp_cuda_status.completed */
	enum tp_cuda_pipes pipes;       /* that the region has room for; agreed */
};
/* Bytes of the region (tp_links_options.region_bytes) for so many ranks of the largest host and channels. */
size_t tp_cuda_region_bytes(int nlocal_max, int nchannels, enum tp_cuda_pipes pipes);
/* Collective over the communicator. */
ncclResult_t tp_cuda_exec_create(struct tp_boot *boot, struct tp_links *links, const struct tp_cuda_options *options, struct tp_cuda_exec **out);
void tp_cuda_exec_destroy(struct tp_cuda_exec *exec);   /* no kernel of it may be running */

/* Gets a plan's programs to the device; no-op for one that was seen. May be called while the calling thread captures. */
ncclResult_t tp_cuda_exec_prepare(struct tp_cuda_exec *exec, const struct tp_plan *plan);
/* Kernels of these calls on a stream, in as few launches as possible, in this order. All calls but TP_SEND_RECV have a plan that
 * was prepared; TP_SEND_RECV has transfers and no plan: call->plan is NULL, call->ntransfers > 0. The current context is gpu's.
 * calls are not kept. Aborted or failed executors launch nothing: the status' error. */
ncclResult_t tp_cuda_exec_launch(struct tp_cuda_exec *exec, CUstream stream, const struct tp_exec_call *calls, int ncalls);
/* A call that is one kernel of little more than its buffers, kept to be launched again and again with others: *out, the caller's to free, or NULL where it
 * is more, or reaches windows. Later calls: the same in all but input and output. */
struct tp_cuda_ready;
ncclResult_t tp_cuda_exec_make_ready(const struct tp_cuda_exec *exec, const struct tp_exec_call *call, struct tp_cuda_ready **out);
ncclResult_t tp_cuda_exec_launch_ready(struct tp_cuda_exec *exec, CUstream stream, struct tp_cuda_ready *ready, const struct tp_exec_call *call);
/* Which algorithm the kernels want for a message, before there is a plan (windows: its buffers lie in such); false: no opinion. The same
 * on all ranks. */
bool tp_cuda_exec_suggest(const struct tp_cuda_exec *exec, enum tp_coll coll, size_t block_bytes, bool windows, enum tp_algo *out);
/* Ranks of one host that there are not: each with a GPU of its own and the memory of all others mapped. */
struct tp_cuda_foreseen {
	int nranks, sm;                 /* sm: the least compute capability, 90 for 9.0 */
	bool nvlink;                    /* all pairs are joined by it */
};
ncclResult_t tp_cuda_suggest_for(const struct tp_cuda_foreseen *ranks, enum tp_coll coll, size_t block_bytes, bool *wants, enum tp_algo *out);
/* What runs of an algorithm, as tp_cuda_exec_explain says it, but for "STEPS" where no kernel is made for it. in_windows: where all buffers lie in symmetric
 * windows, aligned to 16 bytes; NULL: the same. */
ncclResult_t tp_cuda_kernel_for(const struct tp_cuda_foreseen *ranks, enum tp_coll coll, enum tp_algo algo, size_t block_bytes, const char **kernel,
	const char **in_windows);
/* Does such a collective go by copy engines, where its output lies in a window that all ranks promise (NCCL_WIN_COLL_SYMMETRIC), as call->out_*
 * say then? The same on all ranks. */
bool tp_cuda_exec_copies(const struct tp_cuda_exec *exec, enum tp_coll coll, size_t block_bytes);
/* There will be windows. What can't be got for them is done without. With the launch lock. */
void tp_cuda_exec_expect_windows(struct tp_cuda_exec *exec);
/* The algorithm and protocol that a call will run as ("TWO_SHOT/LL128", 32 blocks), for logs and bench. */
const char *tp_cuda_exec_explain(struct tp_cuda_exec *exec, const struct tp_exec_call *call, int *blocks);

/* Will it run by kernels or copies that reach all ranks' windows? */
bool tp_cuda_exec_uses_windows(const struct tp_cuda_exec *exec, const struct tp_exec_call *call);

/* Registered buffers, as mem/mem.h has them: from now on receivers offer theirs, and large messages are stored there without a copy. All ranks of
 * the communicator or none; before the first launch. find: asked at launches; true where all ranks of the host have mapped the range. */
struct tp_cuda_buffers {
	void *mem;
	bool (*find)(void *mem, const void *ptr, size_t bytes, uint32_t *index, uint64_t *offset);
	const uint64_t *table;          /* tp_mem_table */
	uint32_t row;                   /* of how many entries */
};
void tp_cuda_exec_set_buffers(struct tp_cuda_exec *exec, const struct tp_cuda_buffers *buffers);
/* What this rank receives from each other by that call, or by each of its transfers: from so many bytes on it is worth being registered. UINT64_MAX:
 * never, for the call's kernels take no offers. */
uint64_t tp_cuda_exec_offers_from(const struct tp_cuda_exec *exec, const struct tp_exec_call *call);

/* What kernels say. */
enum tp_cuda_fault { TP_CUDA_FINE, TP_CUDA_ABORTED, TP_CUDA_TAG, TP_CUDA_SIZE, TP_CUDA_BUFFER, TP_CUDA_PLACE };
#define TP_CUDA_PLACE_TEXT "the buffers of rank %d lie elsewhere in its windows than this rank's, and NCCL_WIN_COLL_SYMMETRIC promises the same window and offset on all ranks"
struct tp_cuda_status {
	/* TAG, SIZE: peer's chunk on channel belongs to another call: found, expected; BUFFER: peer's buffer number found isn't mapped; PLACE: its buffers are
	 * elsewhere in its windows */
	enum tp_cuda_fault fault;
	int peer, channel;
	uint32_t found, expected;
	uint64_t launched, completed;   /* kernels; completed: where options.counts */
	uint32_t straight;              /* parts of messages (of a peer and block) that came straight into registered buffers; about */
};
void tp_cuda_exec_status(struct tp_cuda_exec *exec, struct tp_cuda_status *out);
/* Some kernel may have found a registered buffer that was there before this call, and lend it yet. No CUDA call. */
bool tp_cuda_exec_lends(struct tp_cuda_exec *exec);
/* Kernels that run or are still to start end at once, without their result. From any thread, no CUDA call. For good. */
void tp_cuda_exec_abort(struct tp_cuda_exec *exec);

#endif

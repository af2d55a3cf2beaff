/* What the parts of the CUDA executor's host side share.
 *   kernels.c   images to functions, one table a context
 *   exec.c      an executor's life, its status
 *   memory.c    device memory that is written once (programs, links), by a stream of our own
 *   program.c   plans to programs in device memory
 *   launch.c    calls to launches of the steps kernels
 *   transfers.c groups of sends and receives to launches
 * fused.h: which calls run as fused kernels. */
#ifndef TP_EXEC_CUDA_INTERNAL_H
#define TP_EXEC_CUDA_INTERNAL_H

#include <string.h>

#include "exec/cuda.h"
#include "exec/cuda/device.h"

/* ---- kernels.c ----
 * Kernels are named tp_<kind>_<type>_<op> and tp_<kind>_copy; TP_SEND_RECV has none of these (see transfers). A kind is in the
 * table in kernels.c; sums and products of signed integers are those of unsigned ones, which exist alone. */
enum tp_cuda_kind { TP_CUDA_STEPS, TP_CUDA_FUSED /* + enum tp_fused_kind */, TP_CUDA_NKINDS = TP_CUDA_FUSED + 8 };
enum { TP_CUDA_NOPS = 4 };          /* Sum, Prod, Max, Min: as ncclRedOp_t counts */
struct tp_cuda_kernels {
	const struct tp_gpu *gpu;
	CUfunction reduce[TP_CUDA_NKINDS][ncclNumTypes][TP_CUDA_NOPS];      /* NULL: the kind has none */
	CUfunction copy[TP_CUDA_NKINDS];
	CUfunction transfers, transfers_more;
	int resident;
	struct tp_cuda_kernels *next;
};
/* reduces: of this type and operation; else the copying one. */
static inline CUfunction tp_cuda_kernel(const struct tp_cuda_kernels *k, enum tp_cuda_kind kind, bool reduces, const struct tp_reduce *r)
{
	return reduces ? k->reduce[kind][r->type][r->op] : k->copy[kind];
}

/* ---- exec.c ---- */
struct tp_cuda_plan;
struct tp_cuda_arena;
enum { TP_CUDA_PLAN_BUCKETS = 64 };
struct tp_cuda_exec {
	struct tp_boot *boot;
	struct tp_links *links;
	const struct tp_gpu *gpu;
	struct tp_cuda_kernels *kernels;
	int nchannels;
	bool counts, shared_gpu;
	struct tp_gpu_memory comm_memory, status_memory;
	uint64_t comm;                              /* device's address of struct tp_dev_comm */
	volatile struct tp_dev_status *status;      /* the host's */
	_Atomic uint64_t launched;                  /* kernels */
	CUstream stream;                            /* our own, non-blocking: uploads */
	struct tp_cuda_arena *arena;
	struct tp_cuda_plan *plans[TP_CUDA_PLAN_BUCKETS];
	uint64_t *ends;                             /* [((peer * 2 + receiving) * TP_LINK_CLASSES + class) * nchannels + channel]: device addresses; 0: not yet */
	uint64_t *local_ends;                       /* [channel * TP_CUDA_MAX_LOCAL_LINKS * 2 + number * 2 + receiving]: rings between lanes */
};
/* struct tp_reduce as kernels get it. */
void tp_cuda_fill_reduce(const struct tp_exec_call *call, struct tp_dev_reduce *out);
/* cuLaunchKernel of one of our kernels, with the message of an error; counts it. blocks: 1 … nchannels. */
ncclResult_t tp_cuda_exec_run(struct tp_cuda_exec *exec, CUstream stream, CUfunction function, int blocks, const void *args);

/* ---- memory.c ---- */
/* Device memory that lives as long as the executor, zeroed, 128-byte aligned. */
ncclResult_t tp_cuda_arena_take(struct tp_cuda_exec *exec, size_t bytes, const char *what, uint64_t *out);
/* Waits until it is there; may be called while the calling thread captures and while kernels spin. */
ncclResult_t tp_cuda_exec_upload(struct tp_cuda_exec *exec, uint64_t to, const void *from, size_t bytes);
void tp_cuda_arena_free(struct tp_cuda_exec *exec);

/* ---- program.c ---- */
struct tp_cuda_plan {
	struct tp_cuda_plan *next;
	const struct tp_plan *plan;
	struct tp_plan_spec spec;
	const struct tp_program *source;
	bool reduces;
	uint64_t programs;                          /* device's address */
	uint32_t stride;
	size_t chunk_limit;                         /* what slots, rings and scratch memory allow: agreed */
	/* What the last call made of the geometry: for calls of the same size. */
	size_t fit_block, fit_chunk, fit_line;
	struct tp_dev_call fit;
};
ncclResult_t tp_cuda_find_plan(struct tp_cuda_exec *exec, const struct tp_plan *plan, struct tp_cuda_plan **out);   /* NULL: never prepared */
/* The device's end of a link, made at first use; all channels' of a (class, from, to) lie one after the other. */
ncclResult_t tp_cuda_link_end(struct tp_cuda_exec *exec, int channel, int lane_class, int from, int to, uint64_t *out);
void tp_cuda_plans_free(struct tp_cuda_exec *exec);

/* ---- transfers.c ---- */
ncclResult_t tp_cuda_transfers_launch(struct tp_cuda_exec *exec, CUstream stream, const struct tp_exec_call *call);

#endif

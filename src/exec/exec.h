/* The host executor: runs a rank's program on host memory. Lanes are small state machines; whoever runs the rank runs all
 * its ready lanes in turn. */
#ifndef TP_EXEC_EXEC_H
#define TP_EXEC_EXEC_H

#include "engine/engine.h"
#include "link/link.h"
#include "plan/plan.h"

/* The arithmetic (reduce.c): dst[i] = op over s of src[s][i], sources in order. Small floats (half, bfloat16, fp8) are
 * accumulated in float over all sources of the step and rounded once, to nearest even (fp8 e4m3 and e5m2: saturating to
 * the largest finite value, infinities too; NaN stays NaN). Integers wrap. min and max of floats: a NaN in any source
 * gives NaN; of equal values (+0 and -0) the earlier source's is kept. A NaN result is the type's one NaN, sign clear and
 * all other bits set, so results don't depend on the processor; one source without scaling is copied as it is.
 * A scaled source is multiplied in the accumulator's type and not rounded in between. Scaling goes with Sum only. */
struct tp_reduce {
	ncclDataType_t type;
	ncclRedOp_t op;             /* Sum, Prod, Max, Min */
	bool pre, post;             /* multiply chunks read from INPUT by pre_scale; final values by post_scale */
	double pre_scale;           /* PreMulSum's scalar, or 1/n for half and fp8 averages; integers: as integer */
	double post_scale;          /* averages: 1/n; integers divide by post_divisor (truncating towards zero) */
	int64_t post_divisor, pre_integer;
};
/* dst may be equal to any src (not overlap otherwise). nsrc >= 1; any alignment; bytes: whole elements, 0 too. raw_mask bit
 * s: source s is raw INPUT, to be pre-scaled where r->pre; sources from 64 on never are. final: the result is multiplied
 * or divided where r->post. */
void tp_reduce_run(const struct tp_reduce *r, bool final, void *dst, const void *const *src, int nsrc, uint64_t raw_mask,
	size_t bytes);
void tp_reduce_fill_avg(struct tp_reduce *r, int nranks);       /* op ncclAvg to Sum and the scales above; type must be set */

struct tp_exec_transfer { int peer; bool is_send; void *buf; size_t bytes; };

struct tp_exec_call {
	const struct tp_plan *plan;         /* with this rank's programs, one a channel */
	const void *input;
	void *output;
	size_t block_bytes, chunk_bytes;    /* chunk_bytes: the chooser's limit */
	size_t line_bytes;
	size_t ref_bytes;                   /* chunks of at least so much travel by reference, where they may; 0: the executor's own limit */
	struct tp_reduce reduce;            /* type always valid; op where the plan reduces */
	const void *device_scalar;          /* CUDA executor: PreMulSum's scalar (of reduce.type), read by the kernel; NULL: reduce.pre_* */
	/* CUDA executor: input and output lie in windows that all ranks of the host have mapped, at the same offsets on all ranks:
	 * where this rank's kernels see them (device memory, uint64_t [nranks]); 0: they don't. Windows' numbers are equal on all ranks. */
	uint64_t in_window, in_offset, out_window, out_offset;
	uint32_t in_window_id, out_window_id;
	/* The same for copy engines, which need the output only: for the host, [nranks], kept while the window is. NULL: not by copy engines. */
	const uint64_t *out_peers;
	uint32_t tag;                       /* of the call, in every slot */
	const struct tp_exec_transfer *transfers;   /* TP_SEND_RECV: [ntransfers], kept by the caller until the end */
	int ntransfers;
};

/* More than a few lines is not latency any more: the steps move it as well. */
#define TP_EXEC_FUSED_BYTES ((size_t)32 << 10)

struct tp_exec;             /* one rank's executor: links, scratch memory */
struct tp_exec_op;          /* one running operation */

ncclResult_t tp_exec_create(struct tp_boot *boot, struct tp_links *links, struct tp_exec **out);
void tp_exec_destroy(struct tp_exec *exec);
/* What the first tp_exec_start of a plan (not of sends and receives) would do, and might fail in. */
ncclResult_t tp_exec_prepare(struct tp_exec *exec, const struct tp_plan *plan);
/* Gets links and lanes ready; allocation-free once a plan has been seen. */
ncclResult_t tp_exec_start(struct tp_exec *exec, const struct tp_exec_call *call, struct tp_exec_op **out);
/* Advances; *done once finished (op is recycled then). Operations are run one after the other, in the order of their start.
 * An error names the peer and is final (tp_exec_cancel the operation; the links are of no use any more). A tag or size that
 * doesn't match is ncclInvalidUsage for the caller to explain (tp_boot_find_mismatch). */
ncclResult_t tp_exec_run(struct tp_exec *exec, struct tp_exec_op *op, bool *moved, bool *done);
/* Drops what is kept for a plan: before the plan is freed while the executor lives on. No operation of it may be running. */
void tp_exec_forget(struct tp_exec *exec, const struct tp_plan *plan);
/* Gives the operation up: nothing reads or writes its buffers afterwards, and no network does (connections on which some of it is lent are closed). */
void tp_exec_cancel(struct tp_exec *exec, struct tp_exec_op *op);
/* The fast path: a ONE_SHOT- or DIRECT-shaped plan whose message is small, run to its end right here (spins, then yields;
 * leaves it to the general path by *handled = false before anything was sent). poll is called now and then while it waits and
 * ends the wait by returning an error. */
ncclResult_t tp_exec_one_shot(struct tp_exec *exec, const struct tp_exec_call *call, bool crowded,
	ncclResult_t (*poll)(void *arg, uint64_t waited_ns), void *arg, bool *handled);

#endif

/* Calls to launches. Nothing but arguments is made here: this is the path that every operation of a program takes. */
#include <stdatomic.h>

#include "exec/cuda/internal.h"
#include "plan/geometry.h"

static ncclResult_t fail_stopped(struct tp_cuda_exec *exec)
{
	struct tp_cuda_status status;
	tp_cuda_exec_status(exec, &status);
	if (status.fault == TP_CUDA_ABORTED) return ncclInternalError;      /* who aborted has said why */
	if (status.fault == TP_CUDA_BUFFER)
		return TP_FAIL(ncclInvalidUsage, "rank %d: rank %d receives into its registered buffer %u, which isn't mapped here any more: a buffer was deregistered "
			"while it was in use", exec->boot->rank, status.peer, status.found);
	if (status.fault == TP_CUDA_PLACE) return TP_FAIL(ncclInvalidUsage, "rank %d: " TP_CUDA_PLACE_TEXT, exec->boot->rank, status.peer);
	return TP_FAIL(ncclInvalidUsage, "rank %d: what came from rank %d on channel %d belongs to another call than this rank's (%s 0x%08x, and 0x%08x was "
		"expected): the ranks' calls differ", exec->boot->rank, status.peer, status.channel, status.fault == TP_CUDA_SIZE ? "size" : "tag",
		status.found, status.expected);
}

ncclResult_t tp_cuda_exec_run_shared(struct tp_cuda_exec *exec, CUstream stream, CUfunction function, unsigned blocks, unsigned threads, unsigned shared,
	void *args)
{
	CUresult result = tp_cuda->LaunchKernel(function, blocks, 1, 1, threads, 1, 1, shared, stream, (void *[]){ args }, NULL);
	if (__builtin_expect(result != CUDA_SUCCESS, 0)) return tp_gpu_fail(__FILE__, __LINE__, __func__, exec->gpu, "LaunchKernel", result);
	atomic_store_explicit(&exec->launched, atomic_load_explicit(&exec->launched, memory_order_relaxed) + 1, memory_order_relaxed);
	return ncclSuccess;
}

ncclResult_t tp_cuda_exec_run(struct tp_cuda_exec *exec, CUstream stream, CUfunction function, unsigned blocks, unsigned threads, void *args)
{
	return tp_cuda_exec_run_shared(exec, stream, function, blocks, threads, 0, args);
}

static bool is_integer(ncclDataType_t type) { return type <= ncclUint64; }

void tp_cuda_fill_reduce(const struct tp_exec_call *call, struct tp_dev_reduce *out)
{
	const struct tp_reduce *r = &call->reduce;
	bool is_signed = r->type == ncclInt8 || r->type == ncclInt32 || r->type == ncclInt64;
	bool post = r->post && (!is_integer(r->type) || r->post_divisor > 1);
	*out = (struct tp_dev_reduce){ .pre = r->pre, .post = !post ? 0 : is_signed ? TP_DEV_POST_SIGNED : 1, .pre_scale = r->pre_scale,
		.post_scale = r->post_scale, .pre_integer = r->pre_integer, .post_divisor = r->post_divisor,
		.device_scalar = r->pre ? (uint64_t)(uintptr_t)call->device_scalar : 0 };
}

/* What depends on the message's size only. */
static void fit_geometry(const struct tp_exec_call *call, struct tp_cuda_plan *p)
{
	size_t limit = TP_MIN(call->chunk_bytes, p->chunk_limit), line = call->line_bytes;
	if (p->ring_limit && limit == p->chunk_limit) limit = p->ring_limit;
	if (p->fit_block == call->block_bytes && p->fit_chunk == limit && p->fit_line == line) return;
	struct tp_geometry_split split = tp_geometry_share(call->block_bytes, line, (uint32_t)p->spec.nchannels);
	p->fit = (struct tp_dev_call){ .programs = p->programs, .program_stride = p->stride, .block_bytes = call->block_bytes, .chunk_bytes = limit,
		.line_bytes = (uint32_t)line, .nchannels = (uint32_t)p->spec.nchannels, .part_lines = split.lines, .part_more = (uint32_t)split.more };
	for (int i = 0; i < 2; i++) {
		struct tp_geometry_cut cut = tp_geometry_rounds(split.lines + (i == 0), p->plan->pieces, limit, line);
		p->fit.parts[i] = (struct tp_dev_part){ cut.chunk_bytes, cut.last_chunk_bytes, cut.nrounds, 0 };
	}
	p->fit_block = call->block_bytes;
	p->fit_chunk = limit;
	p->fit_line = line;
}

static void fill_call(const struct tp_cuda_exec *exec, const struct tp_exec_call *call, struct tp_cuda_plan *p, struct tp_dev_call *out)
{
	fit_geometry(call, p);
	*out = p->fit;
	out->input = (uint64_t)(uintptr_t)call->input;
	out->output = (uint64_t)(uintptr_t)call->output;
	out->tag = call->tag;
	if (p->lends && p->fit.parts[0].chunk_bytes >= TP_DEV_LEND_BYTES) {
		struct tp_link_loan range;
		out->lend_input = (uint16_t)tp_cuda_find_loan(exec, call->input, call->block_bytes * p->plan->input_blocks, &range);
		out->lend_output = (uint16_t)tp_cuda_find_loan(exec, call->output, call->block_bytes * p->plan->output_blocks, &range);
	}
	if (p->reduces) tp_cuda_fill_reduce(call, &out->reduce);
}

static bool ranges_meet(const void *a, size_t a_bytes, const void *b, size_t b_bytes)
{
	uintptr_t x = (uintptr_t)a, y = (uintptr_t)b;
	return a && b && x < y + b_bytes && y < x + a_bytes;
}

/* Calls of one launch run one after the other on each channel, but a channel doesn't wait for another: what one call writes, no
 * other may touch. */
static bool calls_meet(const struct tp_exec_call *a, const struct tp_exec_call *b)
{
	size_t a_in = a->block_bytes * a->plan->input_blocks, a_out = a->block_bytes * a->plan->output_blocks;
	size_t b_in = b->block_bytes * b->plan->input_blocks, b_out = b->block_bytes * b->plan->output_blocks;
	return ranges_meet(a->output, a_out, b->input, b_in) || ranges_meet(a->output, a_out, b->output, b_out) ||
		ranges_meet(a->input, a_in, b->output, b_out);
}

static ncclResult_t find_prepared(struct tp_cuda_exec *exec, const struct tp_exec_call *call, struct tp_cuda_plan **out)
{
	*out = tp_cuda_find_plan(exec, call->plan);
	if (*out) return ncclSuccess;
	return TP_FAIL(ncclInternalError, "rank %d: a %s by %s was never prepared for the GPU", exec->boot->rank, tp_coll_name(call->plan->spec.coll),
		tp_algo_name(call->plan->spec.algo));
}

uint16_t tp_cuda_window_place(const struct tp_exec_call *call)
{
	const uint64_t many = 0x9e3779b97f4a7c15u;
	uint64_t place = call->in_window ? (call->in_offset ^ (uint64_t)call->in_window_id << 52) * many : 0;
	if (call->out_window || call->out_peers) place = (place ^ (place >> 32) ^ call->out_offset ^ (uint64_t)call->out_window_id << 52) * many;
	return (uint16_t)(place >> 48);
}

/* Windows first: they say themselves from which size on they are worth it. */
static bool fit_fused(const struct tp_cuda_exec *exec, const struct tp_exec_call *call, size_t from, struct tp_fused_launch *out)
{
	struct tp_fused_windows windows = { call->in_window, call->in_offset, call->out_window, call->out_offset, tp_cuda_window_place(call) };
	if (__builtin_expect(windows.in_bases != 0, 0) && tp_fused_fit_windows(&exec->fused, call, &windows, from, out)) return true;
	return tp_fused_fit(&exec->fused, call, from, out);
}

/* What is too large for lines; windows, which stage nothing, come first. */
static bool fit_pipes(const struct tp_cuda_exec *exec, const struct tp_exec_call *call, struct tp_pipe_launch *out)
{
	struct tp_fused_shape shape;
	struct tp_fused_launch fused;
	int protocol;
	if (!exec->fused.pipes.level || !tp_fused_find(&exec->fused, call, &shape, &protocol) || protocol != TP_FUSED_BY_PIPES) return false;
	if (call->in_window && fit_fused(exec, call, 0, &fused)) return false;
	tp_pipes_fit(&exec->fused, call, &shape, out);
	return true;
}

static ncclResult_t launch_pipes(struct tp_cuda_exec *exec, CUstream stream, const struct tp_exec_call *call, struct tp_pipe_launch *pipes)
{
	CUfunction function = tp_cuda_kernel(exec->kernels, TP_CUDA_FUSED + pipes->kind, pipes->reduces, &call->reduce);
	tp_cuda_pipe_offers(exec, call, pipes);
	return tp_cuda_exec_run_shared(exec, stream, function, pipes->blocks, TP_DEV_THREADS, pipes->shared, &pipes->args);
}

/* What a rank alone gives is what it gets, unless it is multiplied first. (An average of one is what it is.) */
static bool is_copy(const struct tp_cuda_exec *exec, const struct tp_exec_call *call) { return exec->boot->nranks == 1 && call->plan && !call->reduce.pre; }

static ncclResult_t launch_copy(struct tp_cuda_exec *exec, CUstream stream, const struct tp_exec_call *call)
{
	if (call->input == call->output || !call->block_bytes) return ncclSuccess;
	TP_CUDA_TRY(exec->gpu, MemcpyAsync((CUdeviceptr)(uintptr_t)call->output, (CUdeviceptr)(uintptr_t)call->input, call->block_bytes, stream));
	return ncclSuccess;
}

/* In as many pieces as it needs; `first` is the first one. */
static ncclResult_t launch_fused(struct tp_cuda_exec *exec, CUstream stream, const struct tp_exec_call *call, struct tp_fused_launch *first)
{
	CUfunction function = tp_cuda_kernel(exec->kernels, TP_CUDA_FUSED + first->kind, first->reduces, &call->reduce);
	for (size_t from = 0;;) {
		TP_TRY(tp_cuda_exec_run(exec, stream, function, first->blocks, first->threads, &first->args));
		from += first->bytes;
		if (from >= call->block_bytes) return ncclSuccess;
		fit_fused(exec, call, from, first);
	}
}

bool tp_cuda_exec_suggest(const struct tp_cuda_exec *exec, enum tp_coll coll, size_t block_bytes, bool windows, enum tp_algo *out)
{
	if (windows && tp_fused_has_windows(&exec->fused, coll, block_bytes)) {
		*out = coll == TP_ALL_REDUCE ? TP_ALGO_TWO_SHOT : TP_ALGO_DIRECT;
		return true;
	}
	if (windows && tp_cuda_exec_copies(exec, coll, block_bytes)) {
		*out = TP_ALGO_DIRECT;
		return true;
	}
	return tp_fused_suggest(&exec->fused, coll, block_bytes, out);
}

/* How a call runs, and what of that depends on more than the call's addresses. */
enum way { BY_TRANSFERS, BY_COPY, BY_COPIES, BY_PIPES, BY_STREAMS, BY_LINES, BY_STEPS };
struct fitted {
	struct tp_pipe_launch pipes;
	struct tp_fused_launch fused;
	struct tp_exec_call group;                  /* of BY_STREAMS */
	struct tp_exec_transfer transfers[2 * TP_DEV_STREAM_RANKS];
};

static enum way fit(const struct tp_cuda_exec *exec, const struct tp_exec_call *call, struct fitted *out)
{
	if (!call->plan) return BY_TRANSFERS;
	if (is_copy(exec, call)) return BY_COPY;
	if (tp_cuda_copies_take(call)) return BY_COPIES;
	if (fit_pipes(exec, call, &out->pipes)) return BY_PIPES;
	if (tp_cuda_streams_take(exec, call, out->transfers, &out->group)) return BY_STREAMS;
	return fit_fused(exec, call, 0, &out->fused) ? BY_LINES : BY_STEPS;
}

/* As many of the calls as one launch of a steps kernel can do; the first isn't fused. */
static ncclResult_t launch_steps(struct tp_cuda_exec *exec, CUstream stream, const struct tp_exec_call *calls, int ncalls, int *taken)
{
	struct fitted fitted;
	struct tp_dev_steps args;
	struct tp_cuda_plan *p;
	CUfunction function = NULL;
	unsigned blocks = 1;
	int n = 0;
	for (; n < ncalls && n < TP_DEV_MAX_CALLS; n++) {
		const struct tp_exec_call *call = &calls[n];
		if (n && fit(exec, call, &fitted) != BY_STEPS) break;
		TP_TRY(find_prepared(exec, call, &p));
		CUfunction its = tp_cuda_kernel(exec->kernels, TP_CUDA_STEPS, p->reduces, &call->reduce);
		if (n && its != function) break;
		int earlier = 0;
		while (earlier < n && !calls_meet(&calls[earlier], call)) earlier++;
		if (earlier < n) break;
		function = its;
		fill_call(exec, call, p, &args.calls[n]);
		blocks = TP_MAX(blocks, (unsigned)p->spec.nchannels);
	}
	args.comm = exec->comm;
	args.ncalls = (uint32_t)n;
	args.pad = 0;
	*taken = n;
	return tp_cuda_exec_run(exec, stream, function, blocks, TP_DEV_THREADS, &args);
}

/* A look in passing: the watcher and kernels write these at any time, and every spin looks again. */
static inline bool is_stopped(const struct tp_cuda_exec *exec)
{
	return __builtin_expect(__atomic_load_n(&exec->status->abort, __ATOMIC_RELAXED) || __atomic_load_n(&exec->status->fault, __ATOMIC_RELAXED), 0);
}

ncclResult_t tp_cuda_exec_launch(struct tp_cuda_exec *exec, CUstream stream, const struct tp_exec_call *calls, int ncalls)
{
	struct fitted f;
	if (is_stopped(exec)) return fail_stopped(exec);
	for (int i = 0, taken = 1; i < ncalls; i += taken, taken = 1) {
		const struct tp_exec_call *call = &calls[i];
		ncclResult_t result = ncclSuccess;
		switch (fit(exec, call, &f)) {
		case BY_TRANSFERS: result = tp_cuda_transfers_launch(exec, stream, call); break;
		case BY_COPY: result = launch_copy(exec, stream, call); break;
		case BY_COPIES: result = tp_cuda_copies_launch(exec, stream, call); break;
		case BY_PIPES: result = launch_pipes(exec, stream, call, &f.pipes); break;
		case BY_STREAMS: result = tp_cuda_transfers_launch(exec, stream, &f.group); break;
		case BY_LINES: result = launch_fused(exec, stream, call, &f.fused); break;
		case BY_STEPS: result = launch_steps(exec, stream, &calls[i], ncalls - i, &taken); break;
		}
		TP_TRY(result);
	}
	return ncclSuccess;
}

/* ---- calls again ---- */

struct tp_cuda_ready { CUfunction function; struct tp_fused_launch launch; };

ncclResult_t tp_cuda_exec_make_ready(const struct tp_cuda_exec *exec, const struct tp_exec_call *call, struct tp_cuda_ready **out)
{
	struct fitted f;
	*out = NULL;
	if (fit(exec, call, &f) != BY_LINES) return ncclSuccess;
	if (f.fused.kind == TP_FUSED_WINDOW || f.fused.bytes < call->block_bytes) return ncclSuccess;
	struct tp_cuda_ready *ready = tp_alloc(1, sizeof(*ready), "a call to be made again");
	if (!ready) return ncclSystemError;
	*ready = (struct tp_cuda_ready){ tp_cuda_kernel(exec->kernels, TP_CUDA_FUSED + f.fused.kind, f.fused.reduces, &call->reduce), f.fused };
	*out = ready;
	return ncclSuccess;
}

ncclResult_t tp_cuda_exec_launch_ready(struct tp_cuda_exec *exec, CUstream stream, struct tp_cuda_ready *ready, const struct tp_exec_call *call)
{
	if (is_stopped(exec)) return fail_stopped(exec);
	tp_fused_set_buffers(&ready->launch, call->input, call->output);
	return tp_cuda_exec_run(exec, stream, ready->function, ready->launch.blocks, ready->launch.threads, &ready->launch.args);
}

/* ---- what they would be ---- */

uint64_t tp_cuda_exec_offers_from(const struct tp_cuda_exec *exec, const struct tp_exec_call *call)
{
	struct fitted f;
	bool offers = false;
	if (!exec->buffers.table) return UINT64_MAX;
	switch (fit(exec, call, &f)) {
	case BY_TRANSFERS: offers = exec->streams.usable; break;
	case BY_PIPES: offers = f.pipes.kind == TP_FUSED_PUSH && f.pipes.args.collect_from; break;
	case BY_STREAMS: offers = true; break;
	default: break;
	}
	return offers ? exec->fused.table.offer : UINT64_MAX;
}

bool tp_cuda_exec_uses_windows(const struct tp_cuda_exec *exec, const struct tp_exec_call *call)
{
	struct tp_fused_launch fused;
	return call->plan && (tp_cuda_copies_take(call) || (call->in_window && fit_fused(exec, call, 0, &fused) && fused.kind == TP_FUSED_WINDOW));
}

const char *tp_cuda_exec_explain(struct tp_cuda_exec *exec, const struct tp_exec_call *call, int *blocks)
{
	static const char *const names[TP_NALGOS] = { [TP_ALGO_RING] = "RING/SIMPLE", [TP_ALGO_TREE] = "TREE/SIMPLE",
		[TP_ALGO_HALVING_DOUBLING] = "HALVING_DOUBLING/SIMPLE", [TP_ALGO_PAT] = "PAT/SIMPLE", [TP_ALGO_ONE_SHOT] = "ONE_SHOT/SIMPLE",
		[TP_ALGO_TWO_SHOT] = "TWO_SHOT/SIMPLE", [TP_ALGO_DIRECT] = "DIRECT/SIMPLE", [TP_ALGO_BRUCK] = "BRUCK/SIMPLE",
		[TP_ALGO_HIERARCHICAL] = "HIERARCHICAL/SIMPLE" };
	struct fitted f;
	switch (fit(exec, call, &f)) {
	case BY_TRANSFERS:
		*blocks = tp_cuda_transfers_blocks(exec, call);
		return !exec->streams.usable ? "SEND_RECV/SIMPLE" : tp_cuda_streams_are_piped(exec, call) ? "SEND_RECV/PIPE" : "SEND_RECV/LL128";
	case BY_COPY:
		*blocks = 0;
		return "COPY";
	case BY_COPIES:
		*blocks = 1;
		return tp_cuda_copies_name(exec, call);
	case BY_PIPES:
		*blocks = (int)f.pipes.blocks;
		return f.pipes.name;
	case BY_STREAMS:
		*blocks = tp_cuda_transfers_blocks(exec, &f.group);
		return tp_cuda_streams_are_piped(exec, &f.group) ? "DIRECT/PIPE" : "DIRECT/STREAM";
	case BY_LINES:
		*blocks = (int)f.fused.blocks;
		return f.fused.name;
	default:
		*blocks = call->plan->spec.nchannels;
		return names[call->plan->spec.algo];
	}
}

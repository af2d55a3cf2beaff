/* Collectives by copy engines (copies.h): what is copied where, and how a call becomes kernels and copies.
 *
 * A rank's copies go one after the other, to the next rank first, so that at any time each rank sends to one and hears from one: one
 * engine fills a link (391 to 394 GB/s between two H200; with all ranks sending there is no more to be had), and nobody's link is asked
 * for twice. The rank's own block crosses no link and goes beside them, on a stream of our own, or a branch of the graph. Spread over
 * more streams (TELPHER_COPY_STREAMS) the gaps between copies vanish, some 2 us each, for the price of a fork and a join, some 3 us:
 * a prediction, measured on no more than one GPU, by which only more than four ranks could gain.
 *
 * Where the calling stream isn't captured one call of the driver's takes all copies of a stream, and asks for copy engines, which the driver
 * would otherwise not always take for copies within a GPU. */
#include <stdio.h>

#include "exec/cuda/internal.h"

enum {
	FORK_BYTES = 4 << 20,           /* an own block of so much is worth a fork */
	MOST_KERNELS = 3, MOST_NODES = 16,
	SLICE = 512,                    /* slices of a broadcast are multiples of it */
};

enum { PARAM_STREAMS, PARAM_BATCH };
static struct tp_param params[] = {
	[PARAM_STREAMS] = { .name = "TELPHER_COPY_STREAMS", .kind = TP_PARAM_INT, .fallback = "1", .min = 1, .max = TP_COPIES_STREAMS,
		.doc = "GPUs: streams that a rank's copies are spread over where copy engines move a collective of windows" },
	[PARAM_BATCH] = { .name = "TELPHER_COPY_BATCH", .kind = TP_PARAM_BOOL, .fallback = "1", .max = 1,
		.doc = "GPUs: 1: the copies of such a collective are given to the driver at once where it takes them so (CUDA 13, not in captures); 0: one by one" },
};
TP_PARAM_TABLE("exec", params)

/* ---- life ---- */

size_t tp_cuda_copies_region_bytes(int nlocal)
{
	return nlocal < 2 ? 0 : tp_align_up((size_t)TP_COPIES_SIGNS * TP_DEV_MAX_LOCAL * 16, 4096);
}

ncclResult_t tp_cuda_copies_init(struct tp_cuda_exec *exec)
{
	struct tp_cuda_copies *c = &exec->copies;
	int n = exec->boot->nranks;
	if (!exec->fused.usable) return ncclSuccess;
	c->lines = tp_cuda_copies_at(n, exec->nchannels);
	c->spread = (int)tp_param_int(&params[PARAM_STREAMS]);
	c->batch = tp_cuda->MemcpyBatchAsync && tp_param_int(&params[PARAM_BATCH]);
	return tp_cuda_take_memory(exec, sizeof(uint64_t), "the epoch of copies", &c->epoch);
}

/* With the context. They have queues of their own: those of another priority than most. */
static CUresult create_streams(struct tp_cuda_copies *c)
{
	int least, greatest;
	CUresult result = tp_cuda->CtxGetStreamPriorityRange(&least, &greatest);
	if (result == CUDA_SUCCESS) result = tp_cuda->EventCreate(&c->fork, CU_EVENT_DISABLE_TIMING);
	for (int i = 0; i < c->spread && result == CUDA_SUCCESS; i++) {
		result = tp_cuda->StreamCreateWithPriority(&c->streams[i], CU_STREAM_NON_BLOCKING, greatest);
		if (result == CUDA_SUCCESS) result = tp_cuda->EventCreate(&c->joins[i], CU_EVENT_DISABLE_TIMING);
	}
	return result;
}

static void destroy_streams(struct tp_cuda_copies *c)
{
	for (int i = 0; i < TP_COPIES_STREAMS; i++) {
		if (c->streams[i]) tp_cuda->StreamDestroy(c->streams[i]);
		if (c->joins[i]) tp_cuda->EventDestroy(c->joins[i]);
		c->streams[i] = NULL;
		c->joins[i] = NULL;
	}
	if (c->fork) tp_cuda->EventDestroy(c->fork);
	c->fork = NULL;
	c->nstreams = 0;
}

void tp_cuda_exec_expect_windows(struct tp_cuda_exec *exec)
{
	struct tp_cuda_copies *c = &exec->copies;
	bool pushed;
	int mode;
	if (!exec->fused.usable || exec->shared_gpu || c->nstreams || tp_gpu_enter(exec->gpu, &pushed) != ncclSuccess) return;
	tp_gpu_relax(&mode);
	CUresult result = create_streams(c);
	if (result == CUDA_SUCCESS) {
		c->nstreams = c->spread;
	} else {
		TP_INFO(TP_INIT, "rank %d: no streams for copies (CUDA error %d): they go to the caller's", exec->boot->rank, (int)result);
		destroy_streams(c);
	}
	tp_gpu_unrelax(mode);
	tp_gpu_leave(pushed);
}

void tp_cuda_copies_close(struct tp_cuda_exec *exec)
{
	bool pushed;
	int mode;
	if (!exec->copies.fork || tp_gpu_enter(exec->gpu, &pushed) != ncclSuccess) return;
	tp_gpu_relax(&mode);
	destroy_streams(&exec->copies);
	tp_gpu_unrelax(mode);
	tp_gpu_leave(pushed);
}

/* ---- which calls ---- */

bool tp_cuda_exec_copies(const struct tp_cuda_exec *exec, enum tp_coll coll, size_t block_bytes) { return tp_fused_copies(&exec->fused, coll, block_bytes); }

/* A broadcast as a scatter and a gather. */
static bool has_slices(const struct tp_cuda_exec *exec, const struct tp_exec_call *call)
{
	return call->plan->spec.coll == TP_BROADCAST && exec->boot->nranks > 2 && call->block_bytes >= exec->fused.table.owners;
}

const char *tp_cuda_copies_name(const struct tp_cuda_exec *exec, const struct tp_exec_call *call)
{
	return has_slices(exec, call) ? "TWO_STEP/COPY" : "DIRECT/COPY";
}

/* ---- what is copied where ---- */

struct copies { int count; CUdeviceptr to[TP_DEV_MAX_LOCAL + 1], from[TP_DEV_MAX_LOCAL + 1]; size_t bytes[TP_DEV_MAX_LOCAL + 1]; };
struct signs { uint64_t tell, await; uint8_t tell_sign, await_sign; };
/* Kernels with copies between them; own: within this rank's memory, in any order with the others. */
struct work { int nkernels; struct signs signs[MOST_KERNELS]; struct copies copies[MOST_KERNELS - 1], own; };

static void add(struct copies *c, CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
	if (!bytes || to == from) return;
	c->to[c->count] = to;
	c->from[c->count] = from;
	c->bytes[c->count++] = bytes;
}

static void add_kernel(struct work *w, uint64_t tell, enum tp_copies_sign tell_sign, uint64_t await, enum tp_copies_sign await_sign)
{
	w->signs[w->nkernels++] = (struct signs){ tell, await, (uint8_t)tell_sign, (uint8_t)await_sign };
}

static void plan_all(const struct tp_cuda_exec *exec, const struct tp_exec_call *call, uint64_t others, struct work *w)
{
	int n = exec->boot->nranks, rank = exec->boot->rank;
	size_t b = call->block_bytes, at = (size_t)rank * b, stride = call->plan->spec.coll == TP_ALL_TO_ALL ? b : 0;
	CUdeviceptr in = (CUdeviceptr)(uintptr_t)call->input;
	add_kernel(w, others, TP_COPIES_READY, others, TP_COPIES_READY);
	for (int i = 1; i < n; i++) {
		int p = (rank + i) % n;
		add(&w->copies[0], call->out_peers[p] + call->out_offset + at, in + (size_t)p * stride, b);
	}
	add(&w->own, (CUdeviceptr)(uintptr_t)call->output + at, in + (size_t)rank * stride, b);
	add_kernel(w, others, TP_COPIES_DONE, others, TP_COPIES_DONE);
}

/* Slice s of a message, to a rank. */
static void add_slice(struct copies *c, const struct tp_exec_call *call, int to, CUdeviceptr from, size_t slice, int s)
{
	size_t begin = TP_MIN((size_t)s * slice, call->block_bytes), bytes = TP_MIN(slice, call->block_bytes - begin);
	add(c, call->out_peers[to] + call->out_offset + begin, from + begin, bytes);
}

static void plan_root(const struct tp_cuda_exec *exec, const struct tp_exec_call *call, uint64_t others, struct work *w)
{
	int n = exec->boot->nranks, root = exec->boot->rank;
	bool slices = has_slices(exec, call);
	CUdeviceptr in = (CUdeviceptr)(uintptr_t)call->input;
	size_t b = call->block_bytes, slice = slices ? tp_align_up(tp_div_up(b, (size_t)n), SLICE) : b;
	add_kernel(w, 0, TP_COPIES_READY, others, TP_COPIES_READY);
	for (int i = 1; i < n; i++) add_slice(&w->copies[0], call, (root + i) % n, in, slice, slices ? (root + i) % n : 0);
	if (slices) add_kernel(w, others, TP_COPIES_SCATTERED, 0, TP_COPIES_READY);
	for (int i = 1; i < n && slices; i++) add_slice(&w->copies[1], call, (root + i) % n, in, slice, root);
	add(&w->own, (CUdeviceptr)(uintptr_t)call->output, in, b);
	add_kernel(w, others, TP_COPIES_DONE, 0, TP_COPIES_READY);
}

static void plan_receiver(const struct tp_cuda_exec *exec, const struct tp_exec_call *call, uint64_t others, struct work *w)
{
	int n = exec->boot->nranks, rank = exec->boot->rank, root = call->plan->spec.root;
	uint64_t roots = 1ull << root;
	if (!has_slices(exec, call)) {
		add_kernel(w, roots, TP_COPIES_READY, roots, TP_COPIES_DONE);
		return;
	}
	size_t slice = tp_align_up(tp_div_up(call->block_bytes, (size_t)n), SLICE);
	add_kernel(w, roots, TP_COPIES_READY, roots, TP_COPIES_SCATTERED);
	for (int i = 1; i < n; i++)
		if ((rank + i) % n != root) add_slice(&w->copies[0], call, (rank + i) % n, (CUdeviceptr)(uintptr_t)call->output, slice, rank);
	add_kernel(w, others & ~roots, TP_COPIES_DONE, others, TP_COPIES_DONE);
}

static void plan_work(const struct tp_cuda_exec *exec, const struct tp_exec_call *call, struct work *w)
{
	int n = exec->boot->nranks, rank = exec->boot->rank;
	uint64_t others = (n == 64 ? UINT64_MAX : (1ull << n) - 1) & ~(1ull << rank);
	w->nkernels = w->copies[0].count = w->copies[1].count = w->own.count = 0;
	if (call->plan->spec.coll != TP_BROADCAST) plan_all(exec, call, others, w);
	else if (call->plan->spec.root == rank) plan_root(exec, call, others, w);
	else plan_receiver(exec, call, others, w);
}

/* ---- kernels and copies ---- */

static ncclResult_t run_kernel(struct tp_cuda_exec *exec, CUstream stream, const struct tp_exec_call *call, const struct signs *s, bool ends)
{
	struct tp_copies_args args = { .comm = exec->comm, .epoch = exec->copies.epoch, .lines = exec->copies.lines, .tell = s->tell, .await = s->await,
		.tag = call->tag, .place = tp_cuda_window_place(call), .tell_sign = s->tell_sign, .await_sign = s->await_sign, .rank = (int16_t)exec->boot->rank,
		.nranks = (int16_t)exec->boot->nranks, .ends = ends, .gives_way = exec->shared_gpu };
	return tp_cuda_exec_run(exec, stream, exec->kernels->copies, 1, exec->boot->nranks > 32 ? 64 : 32, &args);
}

static ncclResult_t copy_on(struct tp_cuda_exec *exec, CUstream stream, struct copies *c, int first, int count, bool batch)
{
	if (!count) return ncclSuccess;
	if (!batch) {
		for (int i = first; i < first + count; i++) TP_CUDA_TRY(exec->gpu, MemcpyAsync(c->to[i], c->from[i], c->bytes[i], stream));
		return ncclSuccess;
	}
	CUmemcpyAttributes attributes = { .srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, .flags = CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE };
	size_t start = 0;
	TP_CUDA_TRY(exec->gpu, MemcpyBatchAsync(c->to + first, c->from + first, c->bytes + first, (size_t)count, &attributes, &start, 1, stream));
	return ncclSuccess;
}

/* The calling stream of a call: what it may be used for. */
struct place {
	CUstream stream;
	bool captured, legacy, batch;
	bool forked;                    /* the own block is under way: on streams[0], or (captured) its node is `own` */
	CUgraphNode own;
};

static ncclResult_t wait_for(struct tp_cuda_exec *exec, CUstream stream, CUevent event, CUstream other)
{
	TP_CUDA_TRY(exec->gpu, EventRecord(event, other));
	TP_CUDA_TRY(exec->gpu, StreamWaitEvent(stream, event, CU_EVENT_WAIT_DEFAULT));
	return ncclSuccess;
}

/* Those of one stage: on the calling stream, or spread over it and ours. */
static ncclResult_t copy_all(struct tp_cuda_exec *exec, const struct place *at, struct copies *c)
{
	struct tp_cuda_copies *own = &exec->copies;
	int lanes = at->captured || !own->nstreams ? 1 : TP_MIN(own->nstreams, TP_MAX(c->count, 1)), done = 0;
	if (lanes == 1 && !(at->legacy && own->nstreams)) return copy_on(exec, at->stream, c, 0, c->count, at->batch);
	if (!c->count) return ncclSuccess;
	TP_CUDA_TRY(exec->gpu, EventRecord(own->fork, at->stream));
	for (int l = 0; l < lanes; l++) {
		int count = (c->count - done + lanes - l - 1) / (lanes - l);
		CUstream lane = l || at->legacy ? own->streams[l] : at->stream;
		if (lane != at->stream) TP_CUDA_TRY(exec->gpu, StreamWaitEvent(lane, own->fork, CU_EVENT_WAIT_DEFAULT));
		TP_TRY(copy_on(exec, lane, c, done, count, own->batch));
		done += count;
	}
	for (int l = at->legacy ? 0 : 1; l < lanes; l++) TP_TRY(wait_for(exec, at->stream, own->joins[l], own->streams[l]));
	return ncclSuccess;
}

static ncclResult_t read_nodes(struct tp_cuda_exec *exec, CUstream stream, CUgraphNode *nodes, size_t *count)
{
	CUstreamCaptureStatus status;
	cuuint64_t id;
	CUgraph graph;
	const CUgraphNode *found = NULL;
	const CUgraphEdgeData *edges;
	if (tp_cuda->StreamGetCaptureInfo_v3) TP_CUDA_TRY(exec->gpu, StreamGetCaptureInfo_v3(stream, &status, &id, &graph, &found, &edges, count));
	else TP_CUDA_TRY(exec->gpu, StreamGetCaptureInfo(stream, &status, &id, &graph, &found, count));
	for (size_t i = 0; i < *count && i < MOST_NODES; i++) nodes[i] = found[i];
	return ncclSuccess;
}

static ncclResult_t depend_on(struct tp_cuda_exec *exec, CUstream stream, CUgraphNode *nodes, size_t count, unsigned how)
{
	if (tp_cuda->StreamUpdateCaptureDependencies_v2) TP_CUDA_TRY(exec->gpu, StreamUpdateCaptureDependencies_v2(stream, nodes, NULL, count, how));
	else TP_CUDA_TRY(exec->gpu, StreamUpdateCaptureDependencies(stream, nodes, count, how));
	return ncclSuccess;
}

/* A branch of the graph: what follows is captured as if the copy weren't there, until join_own. */
static ncclResult_t branch_own(struct tp_cuda_exec *exec, struct place *at, struct copies *c)
{
	CUgraphNode before[MOST_NODES], now[MOST_NODES];
	size_t nbefore, nnow;
	TP_TRY(read_nodes(exec, at->stream, before, &nbefore));
	if (!nbefore || nbefore > MOST_NODES) return ncclSuccess;
	TP_TRY(copy_on(exec, at->stream, c, 0, c->count, false));
	TP_TRY(read_nodes(exec, at->stream, now, &nnow));
	if (nnow != 1) return TP_FAIL(ncclInternalError, "rank %d: a captured copy is %zu nodes", exec->boot->rank, nnow);
	at->own = now[0];
	at->forked = true;
	return depend_on(exec, at->stream, before, nbefore, CU_STREAM_SET_CAPTURE_DEPENDENCIES);
}

/* A large own block goes beside everything else: nobody else's comes near it. (Not where ranks share the GPU: a graph's branches have queues
 * too, and one rank's would wait behind another's.) */
static ncclResult_t fork_own(struct tp_cuda_exec *exec, struct place *at, struct copies *c)
{
	struct tp_cuda_copies *own = &exec->copies;
	if (!c->count || c->bytes[0] < FORK_BYTES || exec->shared_gpu) return ncclSuccess;
	if (at->captured) return branch_own(exec, at, c);
	if (!own->nstreams) return ncclSuccess;
	TP_TRY(wait_for(exec, own->streams[0], own->fork, at->stream));
	at->forked = true;
	return copy_on(exec, own->streams[0], c, 0, c->count, own->batch);
}

static ncclResult_t join_own(struct tp_cuda_exec *exec, struct place *at)
{
	if (!at->forked) return ncclSuccess;
	if (at->captured) return depend_on(exec, at->stream, &at->own, 1, CU_STREAM_ADD_CAPTURE_DEPENDENCIES);
	return wait_for(exec, at->stream, exec->copies.joins[0], exec->copies.streams[0]);
}

ncclResult_t tp_cuda_copies_launch(struct tp_cuda_exec *exec, CUstream stream, const struct tp_exec_call *call)
{
	struct place at = { .stream = stream, .legacy = (uintptr_t)stream <= 1 };
	CUstreamCaptureStatus status;
	struct work w;
	plan_work(exec, call, &w);
	TP_CUDA_TRY(exec->gpu, StreamIsCapturing(stream, &status));
	at.captured = status != CU_STREAM_CAPTURE_STATUS_NONE;
	at.batch = exec->copies.batch && !at.captured && !at.legacy;
	TP_TRY(fork_own(exec, &at, &w.own));
	struct copies *last = &w.copies[w.nkernels > 2];
	for (int i = 0; i < w.own.count && !at.forked; i++) add(last, w.own.to[i], w.own.from[i], w.own.bytes[i]);
	for (int k = 0; k < w.nkernels; k++) {
		if (k) TP_TRY(copy_all(exec, &at, &w.copies[k - 1]));
		if (k == w.nkernels - 1) TP_TRY(join_own(exec, &at));
		TP_TRY(run_kernel(exec, stream, call, &w.signs[k], k == w.nkernels - 1));
	}
	return ncclSuccess;
}

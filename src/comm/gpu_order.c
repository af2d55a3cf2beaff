/* The order of a communicator's operations on the device, across streams and graphs.
 *
 * Eager: `done` is recorded behind every operation, and the next one waits for it where it comes on another stream, or where
 * graphs hold operations of this communicator (they are launched without a call to us, so there may have been one). Why behind every operation,
 * when only a change of streams needs it: by then the old stream may have been destroyed, or others may be captured.
 *
 * Captured: operations of one capture depend on each other's nodes. The first also waits for `done` as it stands when the graph
 * is launched (an external wait), and one node records it again behind all of them: so a graph is one operation more in the
 * order. The capture isn't over when we see it last; so the recording node is made with the first operation, and
 * moves behind each later one. A graph holds the rank by a user object, which tells when its last copy is gone.
 *
 * An operation of a group may come on several streams: the first one gets the kernels, waits for the others before and is waited
 * for by them after. */
#include <stdlib.h>

#include "comm/gpu.h"

static bool is_legacy(CUstream stream) { return (uintptr_t)stream <= 1; }

/* NULL and the legacy stream are one, and the per-thread stream is each thread's own: by number they are told apart. A stream that
 * is being captured mustn't be asked for its number (that ends the capture). */
static ncclResult_t identify(const struct ncclComm *comm, CUstream stream, unsigned long long *id)
{
	if (is_legacy(stream)) *id = TP_GPU_LEGACY_ID;
	else TP_GPU_TRY(comm, StreamGetId(stream, id));
	return ncclSuccess;
}

static ncclResult_t refuse_legacy(const struct ncclComm *comm, const char *what)
{
	return TP_FAIL(ncclInvalidUsage, "comm %p rank %d: other ranks of this process use device %d too, so each needs a non-blocking stream of its own "
		"(cudaStreamCreateWithFlags, cudaStreamNonBlocking), not %s: kernels of ranks that share a stream would wait for each other for ever",
		(const void *)comm, comm->rank, comm->device, what);
}

struct info { CUstreamCaptureStatus status; cuuint64_t id; CUgraph graph; const CUgraphNode *nodes; size_t count; };

static ncclResult_t read_capture(const struct ncclComm *comm, CUstream stream, struct info *out)
{
	const CUgraphEdgeData *edges;
	*out = (struct info){ .status = CU_STREAM_CAPTURE_STATUS_NONE };
	if (tp_cuda->StreamGetCaptureInfo_v3)
		TP_GPU_TRY(comm, StreamGetCaptureInfo_v3(stream, &out->status, &out->id, &out->graph, &out->nodes, &edges, &out->count));
	else
		TP_GPU_TRY(comm, StreamGetCaptureInfo(stream, &out->status, &out->id, &out->graph, &out->nodes, &out->count));
	if (out->status != CU_STREAM_CAPTURE_STATUS_INVALIDATED) return ncclSuccess;
	return TP_FAIL(ncclInvalidUsage, "comm %p rank %d: the capture of stream %p has failed before (an operation that can't be captured?); end it",
		(const void *)comm, comm->rank, (void *)stream);
}

/* Two ranks of a communicator on one stream: the second's kernel would never start. */
static ncclResult_t take(struct ncclComm *comm, const struct tp_gpu_name *name, bool first)
{
	int other;
	TP_TRY(tp_gpu_used_take(comm, name, first, &other));
	if (other < 0) return ncclSuccess;
	return TP_FAIL(ncclInvalidUsage, "comm %p rank %d: stream %p is rank %d's of the same communicator, which has work there that isn't done; ranks that share "
		"a GPU need a non-blocking stream each, as kernels of one stream run one after the other and would wait for each other for ever", (void *)comm,
		comm->rank, (void *)name->handle, other);
}

/* Is it fit, and which one is it? A graph runs on the stream that it is launched on, not on the one that was captured, so that may be blocking. */
static ncclResult_t check_stream(struct ncclComm *comm, CUstream stream, struct tp_gpu_name *name)
{
	CUstreamCaptureStatus capturing;
	struct info info;
	if (is_legacy(stream)) return refuse_legacy(comm, "the default stream");
	if (stream == CU_STREAM_PER_THREAD) return refuse_legacy(comm, "the per-thread default stream");
	TP_GPU_TRY(comm, StreamIsCapturing(stream, &capturing));
	*name = (struct tp_gpu_name){ .handle = stream, .captured = capturing != CU_STREAM_CAPTURE_STATUS_NONE };
	if (!name->captured) return identify(comm, stream, &name->id);
	TP_TRY(read_capture(comm, stream, &info));
	name->id = info.id;
	return ncclSuccess;
}

ncclResult_t tp_gpu_order_check(struct ncclComm *comm, struct tp_gpu_place *place)
{
	struct tp_gpu_rank *rank = comm->gpu;
	if (tp_likely(!rank->strict)) return ncclSuccess;
	for (int i = 0; i < place->count; i++) {
		CUstream stream = (CUstream)place->streams[i];
		unsigned int flags = 0;
		struct tp_gpu_name name;
		TP_TRY(check_stream(comm, stream, &name));
		if (i == 0 && !name.captured) {
			place->is_eager = true;
			place->id = name.id;
		}
		if (place->count == 1 && tp_gpu_used_again(rank, &name)) return ncclSuccess;
		if (!name.captured) {
			TP_GPU_TRY(comm, StreamGetFlags(stream, &flags));
			if (!(flags & CU_STREAM_NON_BLOCKING)) return refuse_legacy(comm, "a blocking stream");
		}
		TP_TRY(take(comm, &name, i == 0));
	}
	if (place->count > 1) tp_gpu_used_several(rank);
	return ncclSuccess;
}

/* ---- captures ---- */

static void let_go(void *arg)
{
	struct tp_gpu_held *held = arg;
	struct tp_gpu_rank *rank = held->rank;
	while (held->wakes) {
		struct tp_gpu_wake *wake = held->wakes;
		held->wakes = wake->next;
		free(wake);
	}
	tp_gpu_register_spend(held);
	free(held);
	atomic_fetch_sub_explicit(&rank->graphs, 1, memory_order_release);      /* pairs with the look in gpu_close.c; the last touch */
}

/* From now on the graph, and whatever is instantiated from it, holds the rank. */
static ncclResult_t hold(const struct ncclComm *comm, CUgraph graph, struct tp_gpu_held **out)
{
	struct tp_gpu_rank *rank = comm->gpu;
	struct tp_gpu_held *held = tp_alloc(1, sizeof(*held), "a captured operation");
	if (!held) return ncclSystemError;
	held->rank = rank;
	CUuserObject object;
	CUresult error = tp_cuda->UserObjectCreate(&object, held, let_go, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC);
	if (error != CUDA_SUCCESS) {
		free(held);
		return TP_GPU_FAIL(comm, "UserObjectCreate", error);
	}
	atomic_fetch_add_explicit(&rank->graphs, 1, memory_order_relaxed);
	error = tp_cuda->GraphRetainUserObject(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE);
	if (error != CUDA_SUCCESS) {
		tp_cuda->UserObjectRelease(object, 1);
		return TP_GPU_FAIL(comm, "GraphRetainUserObject", error);
	}
	*out = held;
	return ncclSuccess;
}

static struct tp_gpu_capture *find_capture(struct tp_gpu_rank *rank, unsigned long long id, bool *known)
{
	struct tp_gpu_capture *oldest = &rank->captures[0];
	*known = true;
	for (int i = 0; i < TP_GPU_CAPTURES; i++) {
		struct tp_gpu_capture *c = &rank->captures[i];
		if (c->id == id) return c;
		if (c->used < oldest->used) oldest = c;
	}
	*known = false;
	return oldest;
}

/* Eager work from before the graph is launched comes before it. */
static ncclResult_t begin_capture(struct ncclComm *comm, struct tp_gpu_place *place, const struct info *info, struct tp_gpu_capture *capture)
{
	struct tp_gpu_rank *rank = comm->gpu;
	struct tp_gpu_held *held = NULL;
	TP_TRY(hold(comm, info->graph, &held));
	if (rank->strict && !rank->captured) tp_gpu_used_settle(rank);
	rank->captured = true;
	*capture = (struct tp_gpu_capture){ .id = info->id, .graph = info->graph, .held = held };
	if (!rank->mixing) return ncclSuccess;
	TP_GPU_TRY(comm, StreamWaitEvent(place->stream, rank->done, CU_EVENT_WAIT_EXTERNAL));
	return ncclSuccess;
}

static ncclResult_t depend_on(const struct ncclComm *comm, CUstream stream, CUgraphNode node)
{
	if (tp_cuda->StreamUpdateCaptureDependencies_v2)
		TP_GPU_TRY(comm, StreamUpdateCaptureDependencies_v2(stream, &node, NULL, 1, CU_STREAM_ADD_CAPTURE_DEPENDENCIES));
	else
		TP_GPU_TRY(comm, StreamUpdateCaptureDependencies(stream, &node, 1, CU_STREAM_ADD_CAPTURE_DEPENDENCIES));
	return ncclSuccess;
}

static ncclResult_t enter_capture(struct ncclComm *comm, struct tp_gpu_place *place, const struct info *info)
{
	struct tp_gpu_rank *rank = comm->gpu;
	bool known;
	struct tp_gpu_capture *capture = find_capture(rank, info->id, &known);
	if (!known) TP_TRY(begin_capture(comm, place, info, capture));
	else if (capture->last && capture->stream != place->stream) TP_TRY(depend_on(comm, place->stream, capture->last));
	capture->stream = place->stream;
	capture->used = ++rank->capture_turn;
	place->capture = capture;
	return ncclSuccess;
}

/* The engine moves the network's slots while kernels are outstanding, and a replay doesn't call us: a host node beside the kernels
 * tells it. */
static void wake_engine(void *arg)
{
	struct tp_gpu_wake *wake = arg;
	atomic_fetch_add_explicit(&wake->rank->expected, wake->kernels, memory_order_seq_cst);
	tp_gpu_watch_wake(wake->rank);
}

static ncclResult_t add_host_node(const struct ncclComm *comm, const struct tp_gpu_capture *capture, uint64_t kernels)
{
	struct tp_gpu_wake *wake = tp_alloc(1, sizeof(*wake), "a captured operation");
	if (!wake) return ncclSystemError;
	*wake = (struct tp_gpu_wake){ capture->held->wakes, comm->gpu, kernels };
	capture->held->wakes = wake;
	CUDA_HOST_NODE_PARAMS params = { wake_engine, wake };
	CUgraphNode node;
	TP_GPU_TRY(comm, GraphAddHostNode(&node, capture->graph, NULL, 0, &params));
	return ncclSuccess;
}

/* capture->last becomes the newest node of the stream. */
static ncclResult_t leave_capture(struct ncclComm *comm, struct tp_gpu_place *place)
{
	struct tp_gpu_capture *capture = place->capture;
	struct tp_gpu_rank *rank = comm->gpu;
	struct info info;
	TP_TRY(read_capture(comm, place->stream, &info));
	if (!info.count) return ncclSuccess;
	CUgraphNode before = capture->last, last = info.nodes[0];
	capture->last = last;
	if (!rank->mixing) return ncclSuccess;
	if (capture->record) {
		/* It follows the newest operation only: a graph that is a chain is launched faster. */
		if (before != last) {
			TP_GPU_TRY(comm, GraphRemoveDependencies(capture->graph, &before, &capture->record, 1));
			TP_GPU_TRY(comm, GraphAddDependencies(capture->graph, &last, &capture->record, 1));
		}
	} else {
		TP_GPU_TRY(comm, GraphAddEventRecordNode(&capture->record, capture->graph, &last, 1, rank->done));
	}
	return ncclSuccess;
}

/* ---- both ---- */

/* What else the group's other streams have been given comes before, and what they will be given, after. */
static ncclResult_t join_streams(struct ncclComm *comm, const struct tp_gpu_place *place)
{
	struct tp_gpu_rank *rank = comm->gpu;
	for (int i = 1; i < place->count; i++) {
		struct info info;
		TP_TRY(read_capture(comm, (CUstream)place->streams[i], &info));
		if ((info.status == CU_STREAM_CAPTURE_STATUS_ACTIVE) != (place->capture != NULL) || (place->capture && info.id != place->capture->id))
			return TP_FAIL(ncclInvalidUsage, "comm %p rank %d: the streams %p and %p of one group are not both captured, in one capture",
				(void *)comm, comm->rank, (void *)place->stream, (void *)place->streams[i]);
		TP_GPU_TRY(comm, EventRecord(rank->join, (CUstream)place->streams[i]));
		TP_GPU_TRY(comm, StreamWaitEvent(place->stream, rank->join, CU_EVENT_WAIT_DEFAULT));
	}
	return ncclSuccess;
}

static ncclResult_t fork_streams(struct ncclComm *comm, const struct tp_gpu_place *place)
{
	struct tp_gpu_rank *rank = comm->gpu;
	TP_GPU_TRY(comm, EventRecord(rank->join, place->stream));
	for (int i = 1; i < place->count; i++)
		TP_GPU_TRY(comm, StreamWaitEvent((CUstream)place->streams[i], rank->join, CU_EVENT_WAIT_DEFAULT));
	return ncclSuccess;
}

/* None any more: what they held is done, and nothing but eager calls records `done` until there is another. */
static bool has_graphs(struct tp_gpu_rank *rank)
{
	if (tp_likely(!rank->captured)) return false;
	if (atomic_load_explicit(&rank->graphs, memory_order_acquire) > 0) return rank->mixing;     /* pairs with let_go */
	rank->captured = rank->strict && !tp_gpu_used_forget_graphs(rank);
	return false;
}

static ncclResult_t enter_stream(struct ncclComm *comm, struct tp_gpu_place *place)
{
	struct tp_gpu_rank *rank = comm->gpu;
	if (!place->is_eager) TP_TRY(identify(comm, place->stream, &place->id));
	if (!has_graphs(rank) && tp_likely(!rank->launched || rank->last.id == place->id)) return ncclSuccess;
	TP_GPU_TRY(comm, StreamWaitEvent(place->stream, rank->done, CU_EVENT_WAIT_DEFAULT));
	return ncclSuccess;
}

ncclResult_t tp_gpu_order_before(struct ncclComm *comm, struct tp_gpu_place *place)
{
	struct info info;
	CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE;
	place->stream = (CUstream)place->streams[0];
	place->capture = NULL;
	if (!place->is_eager) TP_GPU_TRY(comm, StreamIsCapturing(place->stream, &capturing));
	if (tp_likely(capturing == CU_STREAM_CAPTURE_STATUS_NONE)) {
		TP_TRY(enter_stream(comm, place));
	} else {
		TP_TRY(read_capture(comm, place->stream, &info));
		TP_TRY(enter_capture(comm, place, &info));
	}
	if (tp_unlikely(place->count > 1)) TP_TRY(join_streams(comm, place));
	return ncclSuccess;
}

ncclResult_t tp_gpu_order_after(struct ncclComm *comm, struct tp_gpu_place *place, uint64_t kernels)
{
	struct tp_gpu_rank *rank = comm->gpu;
	if (tp_unlikely(place->capture != NULL)) {
		TP_TRY(leave_capture(comm, place));
		if (rank->counts && kernels) TP_TRY(add_host_node(comm, place->capture, kernels));
		return place->count > 1 ? fork_streams(comm, place) : ncclSuccess;
	}
	rank->last = (struct tp_gpu_stream){ place->stream, place->id };
	rank->launched = true;
	if (tp_unlikely(rank->strict)) TP_TRY(tp_gpu_used_record(comm, place->stream));
	TP_GPU_TRY(comm, EventRecord(rank->done, place->stream));
	return tp_unlikely(place->count > 1) ? fork_streams(comm, place) : ncclSuccess;
}

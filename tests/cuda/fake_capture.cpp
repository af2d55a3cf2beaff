/* Stream capture: operations become nodes of a graph. An event that was recorded in a capture carries its nodes, and a
 * stream that waits for it joins; at the end every joined stream's nodes must lie before the origin's. */
#include "fake.h"

#include <algorithm>
#include <unistd.h>

namespace fake {

std::vector<capture *> &captures = *new std::vector<capture *>;
namespace {
unsigned long long next_capture = 1;
thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

capture *find_capture(unsigned long long id)
{
	for (capture *c : captures)
		if (c->id == id) return c;
	return nullptr;
}

bool all_before(const std::vector<CUgraphNode> &nodes, const std::vector<CUgraphNode> &last)
{
	std::set<CUgraphNode> seen;
	std::vector<CUgraphNode> todo = last;
	while (!todo.empty()) {
		CUgraphNode n = todo.back();
		todo.pop_back();
		if (seen.insert(n).second) todo.insert(todo.end(), n->before.begin(), n->before.end());
	}
	return std::all_of(nodes.begin(), nodes.end(), [&](CUgraphNode n) { return seen.count(n) > 0; });
}

void join(std::vector<CUgraphNode> &to, const std::vector<CUgraphNode> &more)
{
	for (CUgraphNode n : more)
		if (std::find(to.begin(), to.end(), n) == to.end()) to.push_back(n);
}
}

CUresult invalidate(capture *c, CUresult error)
{
	c->invalid = true;
	return error;
}

CUresult unsafe()
{
	if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
	for (capture *c : captures) {
		bool mine = c->thread == gettid() && c->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
		bool anyone = thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL && c->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
		if (mine || anyone) return invalidate(c, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	}
	return CUDA_SUCCESS;
}

CUresult implicit(CUcontext context)
{
	for (capture *c : captures)
		for (CUstream s : c->streams)
			if (s->context == context && s->flags == CU_STREAM_DEFAULT) return invalidate(c, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
	return CUDA_SUCCESS;
}

CUresult capture_op(CUstream stream, op what)
{
	if (stream->capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	CUgraphNode node;
	FAKE_TRY(add_node(stream->capture->graph, stream->last.data(), stream->last.size(), std::move(what), &node));
	stream->last = { node };
	return CUDA_SUCCESS;
}

CUresult capture_record(CUevent event, CUstream stream, unsigned flags)
{
	if (stream->capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	if (flags == CU_EVENT_RECORD_EXTERNAL) {
		op what;
		what.type = CU_GRAPH_NODE_TYPE_EVENT_RECORD;
		what.context = stream->context;
		what.event = event;
		return capture_op(stream, std::move(what));
	}
	event->capture_id = stream->capture->id;
	event->nodes = stream->last;
	event->task = nullptr;
	return CUDA_SUCCESS;
}

CUresult capture_wait(CUstream stream, CUevent event, unsigned flags)
{
	capture *c = stream->capture;
	if (c && c->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	if (flags == CU_EVENT_WAIT_EXTERNAL) {
		if (!c) return CUDA_ERROR_INVALID_VALUE;
		op what;
		what.type = CU_GRAPH_NODE_TYPE_WAIT_EVENT;
		what.context = stream->context;
		what.event = event;
		return capture_op(stream, std::move(what));
	}
	capture *from = event->capture_id ? find_capture(event->capture_id) : nullptr;
	if (!from) return c ? invalidate(c, CUDA_ERROR_STREAM_CAPTURE_ISOLATION) : CUDA_ERROR_CAPTURED_EVENT;
	if (from->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	if (c && c != from) {
		invalidate(from, CUDA_ERROR_STREAM_CAPTURE_MERGE);
		return invalidate(c, CUDA_ERROR_STREAM_CAPTURE_MERGE);
	}
	if (stream == stream->context->legacy) return invalidate(from, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
	if (!c) {
		stream->capture = from;
		stream->last.clear();
		from->streams.push_back(stream);
	}
	join(stream->last, event->nodes);
	return CUDA_SUCCESS;
}

void capture_leave(CUstream stream)
{
	capture *c = stream->capture;
	c->invalid = true;
	c->streams.erase(std::find(c->streams.begin(), c->streams.end(), stream));
	stream->capture = nullptr;
}

}

using namespace fake;

CUresult cuStreamBeginCapture_v2(CUstream handle, CUstreamCaptureMode mode)
{
	FAKE_ENTER(cuStreamBeginCapture_v2);
	CUstream stream;
	FAKE_TRY(find_stream(handle, &stream));
	if (stream == stream->context->legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	if (mode < CU_STREAM_CAPTURE_MODE_GLOBAL || mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
	if (stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
	capture *c = new capture();
	c->id = next_capture++;
	c->graph = new CUgraph_st();
	handle_add(c->graph, GRAPH);
	c->mode = mode;
	c->thread = gettid();
	c->origin = stream;
	c->streams = { stream };
	stream->capture = c;
	stream->last.clear();
	captures.push_back(c);
	return CUDA_SUCCESS;
}

CUresult cuStreamEndCapture(CUstream handle, CUgraph *out)
{
	FAKE_ENTER(cuStreamEndCapture);
	CUstream stream;
	FAKE_TRY(find_stream(handle, &stream));
	capture *c = stream->capture;
	if (!c) return CUDA_ERROR_ILLEGAL_STATE;
	if (c->mode != CU_STREAM_CAPTURE_MODE_RELAXED && c->thread != gettid()) return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
	if (c->origin != stream) return invalidate(c, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
	CUresult result = c->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
	for (CUstream s : c->streams)
		if (result == CUDA_SUCCESS && s != stream && !all_before(s->last, stream->last)) result = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
	for (CUstream s : c->streams) {
		s->capture = nullptr;
		s->last.clear();
	}
	captures.erase(std::find(captures.begin(), captures.end(), c));
	CUgraph graph = c->graph;
	delete c;
	*out = result == CUDA_SUCCESS ? graph : nullptr;
	if (result == CUDA_SUCCESS) return CUDA_SUCCESS;
	held.unlock();
	cuGraphDestroy(graph);
	return result;
}

CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *out)
{
	FAKE_ENTER(cuStreamIsCapturing);
	CUstream stream;
	FAKE_TRY(find_stream(handle, &stream));
	if (stream == stream->context->legacy) FAKE_TRY(implicit(stream->context));
	*out = !stream->capture ? CU_STREAM_CAPTURE_STATUS_NONE
		: stream->capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
	return CUDA_SUCCESS;
}

/* The dependencies' memory is the stream's, until its next operation. */
CUresult cuStreamGetCaptureInfo_v2(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph, const CUgraphNode **dependencies,
	size_t *count)
{
	FAKE_ENTER(cuStreamGetCaptureInfo_v2);
	CUstream stream;
	FAKE_TRY(find_stream(handle, &stream));
	if (stream == stream->context->legacy) FAKE_TRY(implicit(stream->context));
	capture *c = stream->capture;
	*status = !c ? CU_STREAM_CAPTURE_STATUS_NONE : c->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
	if (*status != CU_STREAM_CAPTURE_STATUS_ACTIVE) return CUDA_SUCCESS;
	if (id) *id = c->id;
	if (graph) *graph = c->graph;
	if (dependencies) *dependencies = stream->last.data();
	if (count) *count = stream->last.size();
	return CUDA_SUCCESS;
}

CUresult cuStreamGetCaptureInfo_v3(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph, const CUgraphNode **dependencies,
	const CUgraphEdgeData **edges, size_t *count)
{
	if (edges) *edges = nullptr;
	return cuStreamGetCaptureInfo_v2(handle, status, id, graph, dependencies, count);
}

CUresult cuStreamUpdateCaptureDependencies(CUstream handle, CUgraphNode *dependencies, size_t count, unsigned int flags)
{
	FAKE_ENTER(cuStreamUpdateCaptureDependencies);
	CUstream stream;
	FAKE_TRY(find_stream(handle, &stream));
	if (!stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
	if (stream->capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	for (size_t i = 0; i < count; i++)
		if (dependencies[i]->graph != stream->capture->graph) return CUDA_ERROR_INVALID_VALUE;
	if (flags == CU_STREAM_SET_CAPTURE_DEPENDENCIES) stream->last.clear();
	join(stream->last, std::vector<CUgraphNode>(dependencies, dependencies + count));
	return CUDA_SUCCESS;
}

CUresult cuStreamUpdateCaptureDependencies_v2(CUstream stream, CUgraphNode *dependencies, const CUgraphEdgeData *edges, size_t count, unsigned int flags)
{
	return edges ? CUDA_ERROR_NOT_SUPPORTED : cuStreamUpdateCaptureDependencies(stream, dependencies, count, flags);
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
	FAKE_ENTER(cuThreadExchangeStreamCaptureMode);
	if (*mode < CU_STREAM_CAPTURE_MODE_GLOBAL || *mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
	std::swap(*mode, thread_mode);
	return CUDA_SUCCESS;
}

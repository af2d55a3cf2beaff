/* Graphs. At launch each node becomes a task; the stream goes on when all are done. Event nodes go by the order of launches, as records and waits
 * on streams do: a wait node waits for the event's last record at the launch, a record node is the last record from then on. A graph that is destroyed
 * while a launch of it runs holds its user objects until that has ended. */
#include "fake.h"

#include <algorithm>
#include <chrono>
#include <string.h>
#include <thread>

namespace fake {

CUresult add_node(CUgraph graph, const CUgraphNode *before, size_t count, op what, CUgraphNode *out)
{
	for (size_t i = 0; i < count; i++)
		if (before[i]->graph != graph) return CUDA_ERROR_INVALID_VALUE;
	graph->nodes.push_back(std::unique_ptr<CUgraphNode_st>(new CUgraphNode_st()));
	CUgraphNode node = graph->nodes.back().get();
	node->graph = graph;
	node->what = std::move(what);
	for (size_t i = 0; i < count; i++)
		if (std::find(node->before.begin(), node->before.end(), before[i]) == node->before.end()) node->before.push_back(before[i]);
	*out = node;
	return CUDA_SUCCESS;
}

namespace {

/* The driver calls the destructor of a user object on a thread of its own. */
void release(CUuserObject object, unsigned count)
{
	if (object->references < count) die("a user object released more often than retained");
	object->references -= count;
	if (object->references > 0) return;
	CUuserObject_st gone = *object;
	handle_remove(object, OBJECT);
	add_task(nullptr, {}, [gone] { gone.destroy(gone.ptr); }, 0);
}

void release_all(const std::map<CUuserObject, unsigned> &objects)
{
	for (auto &o : objects) release(o.first, o.second);
}

bool visit(CUgraphNode node, std::map<CUgraphNode, int> &state, std::vector<CUgraphNode> &order)
{
	if (state[node] == 1) return false;     /* a cycle */
	if (state[node] == 2) return true;
	state[node] = 1;
	for (CUgraphNode b : node->before)
		if (!visit(b, state, order)) return false;
	state[node] = 2;
	order.push_back(node);
	return true;
}

}
}

using namespace fake;

CUresult cuGraphCreate(CUgraph *out, unsigned int flags)
{
	FAKE_ENTER(cuGraphCreate);
	if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
	*out = new CUgraph_st();
	handle_add(*out, GRAPH);
	return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph graph)
{
	FAKE_ENTER(cuGraphDestroy);
	if (!handle_live(graph, GRAPH)) return CUDA_ERROR_INVALID_VALUE;
	release_all(graph->objects);
	graph->nodes.clear();
	graph->objects.clear();
	handle_remove(graph, GRAPH);
	return CUDA_SUCCESS;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph graph, unsigned long long flags)
{
	FAKE_ENTER(cuGraphInstantiateWithFlags);
	(void)flags;
	if (!handle_live(graph, GRAPH)) return CUDA_ERROR_INVALID_VALUE;
	std::map<CUgraphNode, int> state;
	std::vector<CUgraphNode> order;
	for (auto &node : graph->nodes)
		if (!visit(node.get(), state, order)) return CUDA_ERROR_INVALID_VALUE;
	CUgraphExec exec = new CUgraphExec_st();
	for (CUgraphNode node : order) {
		CUgraphExec_st::step step;
		step.what = node->what;
		for (CUgraphNode b : node->before) step.before.push_back((size_t)(std::find(order.begin(), order.end(), b) - order.begin()));
		exec->steps.push_back(step);
	}
	for (auto &o : graph->objects) {
		exec->objects[o.first] = o.second;
		o.first->references += o.second;
	}
	handle_add(exec, GRAPH_EXEC);
	*out = exec;
	return CUDA_SUCCESS;
}

CUresult cuGraphInstantiate_v2(CUgraphExec *out, CUgraph graph, CUgraphNode *bad, char *log, size_t log_bytes)
{
	if (bad) *bad = nullptr;
	if (log && log_bytes > 0) *log = 0;
	return cuGraphInstantiateWithFlags(out, graph, 0);
}

CUresult cuGraphExecDestroy(CUgraphExec exec)
{
	FAKE_ENTER(cuGraphExecDestroy);
	if (!handle_live(exec, GRAPH_EXEC)) return CUDA_ERROR_INVALID_VALUE;
	if (exec->last && !exec->last->done) {
		std::map<CUuserObject, unsigned> objects = exec->objects;
		add_task(nullptr, { exec->last }, [objects] { guard again(fake::lock); release_all(objects); }, 0);
	} else {
		release_all(exec->objects);
	}
	exec->objects.clear();
	exec->steps.clear();
	exec->last = nullptr;
	handle_remove(exec, GRAPH_EXEC);
	return CUDA_SUCCESS;
}

CUresult cuGraphLaunch(CUgraphExec exec, CUstream handle)
{
	FAKE_ENTER(cuGraphLaunch);
	CUstream stream;
	if (!handle_live(exec, GRAPH_EXEC)) return CUDA_ERROR_INVALID_VALUE;
	FAKE_TRY(find_stream(handle, &stream));
	if (stream->capture) return invalidate(stream->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	if (stream == stream->context->legacy) FAKE_TRY(implicit(stream->context));
	task_ref start = enqueue(stream, { exec->last }, nullptr, 0);
	std::vector<task_ref> tasks;
	for (const CUgraphExec_st::step &step : exec->steps) {
		std::vector<task_ref> before = { start };
		for (size_t b : step.before) before.push_back(tasks[b]);
		if (step.what.event && !handle_live(step.what.event, EVENT)) return CUDA_ERROR_INVALID_HANDLE;
		if (step.what.type == CU_GRAPH_NODE_TYPE_WAIT_EVENT) before.push_back(step.what.event->task);
		tasks.push_back(add_task(step.what.context ? step.what.context : stream->context, before, step.what.work, step.what.threads));
		if (step.what.type == CU_GRAPH_NODE_TYPE_EVENT_RECORD) {
			step.what.event->task = tasks.back();
			step.what.event->capture_id = 0;
		}
	}
	exec->last = enqueue(stream, tasks, nullptr, 0);
	task_ref last = exec->last;
	if (set.launch_blocking) wait_task(held, last);
	return CUDA_SUCCESS;
}

CUresult cuGraphUpload(CUgraphExec exec, CUstream handle)
{
	FAKE_ENTER(cuGraphUpload);
	CUstream stream;
	if (!handle_live(exec, GRAPH_EXEC)) return CUDA_ERROR_INVALID_VALUE;
	return find_stream(handle, &stream);
}

CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count)
{
	FAKE_ENTER(cuGraphGetNodes);
	if (!handle_live(graph, GRAPH)) return CUDA_ERROR_INVALID_VALUE;
	if (nodes)
		for (size_t i = 0; i < *count; i++) nodes[i] = i < graph->nodes.size() ? graph->nodes[i].get() : nullptr;
	if (!nodes || *count > graph->nodes.size()) *count = graph->nodes.size();
	return CUDA_SUCCESS;
}

CUresult cuGraphGetEdges(CUgraph graph, CUgraphNode *from, CUgraphNode *to, size_t *count)
{
	FAKE_ENTER(cuGraphGetEdges);
	if (!handle_live(graph, GRAPH)) return CUDA_ERROR_INVALID_VALUE;
	size_t n = 0;
	for (auto &node : graph->nodes)
		for (CUgraphNode b : node->before) {
			if (from && to && n < *count) {
				from[n] = b;
				to[n] = node.get();
			}
			n++;
		}
	if (!from || !to || *count > n) *count = n;
	return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType *out)
{
	FAKE_ENTER(cuGraphNodeGetType);
	*out = node->what.type;
	return CUDA_SUCCESS;
}

extern "C" FAKE_EXPORT CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS *out);
CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS *out)
{
	FAKE_ENTER(cuGraphKernelNodeGetParams_v2);
	if (node->what.type != CU_GRAPH_NODE_TYPE_KERNEL) return CUDA_ERROR_INVALID_VALUE;
	*out = node->what.kernel;
	return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetDependencies(CUgraphNode node, CUgraphNode *dependencies, size_t *count)
{
	FAKE_ENTER(cuGraphNodeGetDependencies);
	if (dependencies)
		for (size_t i = 0; i < *count; i++) dependencies[i] = i < node->before.size() ? node->before[i] : nullptr;
	if (!dependencies || *count > node->before.size()) *count = node->before.size();
	return CUDA_SUCCESS;
}

CUresult cuGraphAddDependencies(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, size_t count)
{
	FAKE_ENTER(cuGraphAddDependencies);
	for (size_t i = 0; i < count; i++) {
		if (from[i]->graph != graph || to[i]->graph != graph || from[i] == to[i]) return CUDA_ERROR_INVALID_VALUE;
		std::vector<CUgraphNode> &before = to[i]->before;
		if (std::find(before.begin(), before.end(), from[i]) != before.end()) return CUDA_ERROR_INVALID_VALUE;
		before.push_back(from[i]);
	}
	return CUDA_SUCCESS;
}

CUresult cuGraphRemoveDependencies(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, size_t count)
{
	FAKE_ENTER(cuGraphRemoveDependencies);
	for (size_t i = 0; i < count; i++) {
		std::vector<CUgraphNode> &before = to[i]->before;
		auto at = std::find(before.begin(), before.end(), from[i]);
		if (from[i]->graph != graph || to[i]->graph != graph || at == before.end()) return CUDA_ERROR_INVALID_VALUE;
		before.erase(at);
	}
	return CUDA_SUCCESS;
}

CUresult cuGraphDestroyNode(CUgraphNode gone)
{
	FAKE_ENTER(cuGraphDestroyNode);
	CUgraph graph = gone->graph;
	for (capture *c : captures)
		if (c->graph == graph)
			for (CUstream s : c->streams)
				if (std::find(s->last.begin(), s->last.end(), gone) != s->last.end())
					die("cuGraphDestroyNode: a capturing stream depends on the node");
	for (auto &node : graph->nodes) {
		auto found = std::find(node->before.begin(), node->before.end(), gone);
		if (found != node->before.end()) node->before.erase(found);
	}
	for (auto i = graph->nodes.begin(); i != graph->nodes.end(); ++i)
		if (i->get() == gone) {
			graph->nodes.erase(i);
			break;
		}
	return CUDA_SUCCESS;
}

static CUresult add(CUgraphNode *out, CUgraph graph, const CUgraphNode *before, size_t count, op what)
{
	CUcontext context;
	if (!handle_live(graph, GRAPH)) return CUDA_ERROR_INVALID_VALUE;
	FAKE_TRY(current(&context));
	if (!what.context) what.context = context;
	return add_node(graph, before, count, std::move(what), out);
}

CUresult cuGraphAddHostNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *before, size_t count, const CUDA_HOST_NODE_PARAMS *parameters)
{
	FAKE_ENTER(cuGraphAddHostNode);
	op what;
	what.type = CU_GRAPH_NODE_TYPE_HOST;
	CUDA_HOST_NODE_PARAMS host = what.host = *parameters;
	what.work = [host] {
		if (set.host_node_ms) std::this_thread::sleep_for(std::chrono::milliseconds(set.host_node_ms));
		host.fn(host.userData);
	};
	return add(out, graph, before, count, std::move(what));
}

CUresult cuGraphAddEmptyNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *before, size_t count)
{
	FAKE_ENTER(cuGraphAddEmptyNode);
	return add(out, graph, before, count, op());
}

static CUresult add_event(CUgraphNode *out, CUgraph graph, const CUgraphNode *before, size_t count, CUevent event, CUgraphNodeType type)
{
	if (!handle_live(event, EVENT)) return CUDA_ERROR_INVALID_HANDLE;
	op what;
	what.type = type;
	what.event = event;
	return add(out, graph, before, count, std::move(what));
}

CUresult cuGraphAddEventRecordNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *before, size_t count, CUevent event)
{
	FAKE_ENTER(cuGraphAddEventRecordNode);
	return add_event(out, graph, before, count, event, CU_GRAPH_NODE_TYPE_EVENT_RECORD);
}

CUresult cuGraphAddEventWaitNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *before, size_t count, CUevent event)
{
	FAKE_ENTER(cuGraphAddEventWaitNode);
	return add_event(out, graph, before, count, event, CU_GRAPH_NODE_TYPE_WAIT_EVENT);
}

CUresult cuUserObjectCreate(CUuserObject *out, void *ptr, CUhostFn destroy, unsigned int count, unsigned int flags)
{
	FAKE_ENTER(cuUserObjectCreate);
	if (flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC || !destroy || count == 0) return CUDA_ERROR_INVALID_VALUE;
	*out = new CUuserObject_st { ptr, destroy, count };
	handle_add(*out, OBJECT);
	return CUDA_SUCCESS;
}

CUresult cuUserObjectRelease(CUuserObject object, unsigned int count)
{
	FAKE_ENTER(cuUserObjectRelease);
	if (!handle_live(object, OBJECT) || count == 0) return CUDA_ERROR_INVALID_VALUE;
	release(object, count);
	return CUDA_SUCCESS;
}

CUresult cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned int count, unsigned int flags)
{
	FAKE_ENTER(cuGraphRetainUserObject);
	if (!handle_live(graph, GRAPH) || !handle_live(object, OBJECT) || count == 0) return CUDA_ERROR_INVALID_VALUE;
	if (flags != CU_GRAPH_USER_OBJECT_MOVE) object->references += count;
	graph->objects[object] += count;
	return CUDA_SUCCESS;
}

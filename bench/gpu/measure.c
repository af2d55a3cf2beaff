/* A rank's measurements. Whether results are right is found out first, and by all ranks together: whoever goes on alone waits for ever. */
#include <stdio.h>
#include <string.h>

#include "bench.h"

enum { CALLS_A_GRAPH = 20, SETS_MOST = 4096 };

struct run { struct rank *k; const struct cell *c; size_t count, element; };

/* Call i's buffers: the same ones each time, or (cold) others, as far as there is room. */
static struct buffers buffers_of(const struct run *r, int i)
{
	const struct rank *k = r->k;
	struct buffers b = r->c->registered ? k->registered : k->plain;
	size_t in = coll_in_bytes(r->c->coll, r->count * r->element, k->g->nranks), out = coll_out_bytes(r->c->coll, r->count * r->element, k->g->nranks);
	size_t each = ((in > out ? in : out) + 511) / 512 * 512, sets = k->room / each;
	if (sets > SETS_MOST) sets = SETS_MOST;
	/* Neighbours would share what the memory fetches at once. */
	size_t stride = sets ? k->room / sets / 512 * 512 : 0;
	size_t at = r->c->cold && sets ? (size_t)i % sets * stride : 0;
	return (struct buffers){ b.in + at, b.out + at };
}

/* By the rank `k`, which may be another than the caller. */
static void call(const struct run *r, struct rank *k, int i)
{
	struct run its = { k, r->c, r->count, r->element };
	struct buffers b = buffers_of(&its, i);
	MUST(coll_call(k->l, r->c->coll, &b, r->count, k->g->type, k->g->nranks, k->rank, k->comm, k->stream));
}

/* true: all ranks have what they should. */
static bool check_result(const struct run *r)
{
	struct rank *k = r->k;
	struct group *g = k->g;
	struct buffers b = buffers_of(r, 0);
	bool wrong = false;
	coll_fill(r->c->coll, &b, r->count, g->type, g->nranks, k->rank);
	look_begin(k);
	meet(k);
	call(r, k, 0);
	CUDA(StreamSynchronize(k->stream));
	meet(k);
	look_end(k, r->c);
	if (k->rank == g->spoiled) CUDA(MemsetD8(b.out, 0xee, r->element));
	CUDA(CtxSynchronize());
	g->times[k->rank].wrong = !coll_check(r->c->coll, &b, r->count, g->type, g->nranks, k->rank);
	meet(k);
	for (int p = 0; p < g->nranks; p++) wrong |= g->times[p].wrong;
	return !wrong;
}

/* From here to there, divided among so many calls. */
static void take_times(struct rank *k, int repeat, double host, int calls, struct rank_times *times)
{
	float ms;
	CUDA(StreamSynchronize(k->stream));
	if (repeat < 0) return;
	CUDA(EventElapsedTime(&ms, k->begin, k->end));
	times->device_us[repeat] = (double)ms * 1e3 / calls;
	times->host_us[repeat] = host / calls;
}

static CUgraph capture(const struct run *r, int first, int calls)
{
	struct rank *k = r->k;
	CUgraph graph;
	CUDA(StreamBeginCapture(k->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
	for (int i = 0; i < calls; i++) call(r, k, first + i);
	CUDA(StreamEndCapture(k->stream, &graph));
	return graph;
}

/* What the launch alone costs the host: the very kernel of a call, with its arguments, launched as often by all ranks at once, as it waits for its peers.
 * The communicator sees nothing of it, and the kernel nothing else. Of others' kernels nobody knows whether they allow it, and where there is a
 * network, somebody must be told of each. */
static void time_launches(const struct run *r, CUgraph graph, struct rank_times *times)
{
	struct rank *k = r->k;
	CUDA_KERNEL_NODE_PARAMS p;
	times->launches = k->l->telpher_version && !k->g->net && look_at_launch(graph, &p);
	meet(k);
	for (int i = 0; i < k->g->nranks; i++)
		if (!k->g->times[i].launches) return;
	CUfunction function = p.func ? p.func : (CUfunction)p.kern;
	for (int repeat = -1; repeat < r->c->repeats; repeat++) {
		for (int events = 0; events < 2; events++) {
			meet(k);
			double start = now_us();
			for (int i = 0; i < r->c->calls; i++) {
				CUDA(LaunchKernel(function, p.gridDimX, p.gridDimY, p.gridDimZ, p.blockDimX, p.blockDimY, p.blockDimZ, p.sharedMemBytes, k->stream,
					p.kernelParams, NULL));
				if (events) CUDA(EventRecord(k->fork, k->stream));
			}
			if (repeat >= 0) (events ? times->event_us : times->launch_us)[repeat] = (now_us() - start) / r->c->calls;
			CUDA(StreamSynchronize(k->stream));
		}
	}
	meet(k);
}

static void run_eager(const struct run *r, struct rank_times *times)
{
	struct rank *k = r->k;
	for (int repeat = -1; repeat < r->c->repeats; repeat++) {
		meet(k);
		CUDA(EventRecord(k->begin, k->stream));
		double start = now_us();
		for (int i = 0; i < r->c->calls; i++) call(r, k, i);
		double host = now_us() - start;
		CUDA(EventRecord(k->end, k->stream));
		take_times(k, repeat, host, r->c->calls, times);
	}
	/* What ran shows in a graph that nobody launches. Behind the measurement, for a communicator that has graphs does more. */
	meet(k);
	CUgraph graph = capture(r, 0, 1);
	look_at_graph(k, graph, 1, &times->ran);
	time_launches(r, graph, times);
	CUDA(GraphDestroy(graph));
}

/* All ranks' calls in one graph: ranks' streams go off from the first one's, and come back. The calling thread is rank 0's. */
static CUgraph capture_joint(const struct run *r, int calls)
{
	struct rank *first = r->k;
	const struct library *l = first->l;
	CUgraph graph;
	CUDA(StreamBeginCapture(first->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
	CUDA(EventRecord(first->fork, first->stream));
	for (int p = 1; p < first->g->nranks; p++) CUDA(StreamWaitEvent(here[p]->stream, first->fork, CU_EVENT_WAIT_DEFAULT));
	for (int i = 0; i < calls; i++) {
		must(first, l->ncclGroupStart(), "ncclGroupStart");
		for (int p = 0; p < first->g->nranks; p++) {
			CUDA(CtxSetCurrent(here[p]->context));
			call(r, here[p], i);
		}
		must(first, l->ncclGroupEnd(), "ncclGroupEnd");
	}
	for (int p = 1; p < first->g->nranks; p++) {
		CUDA(CtxSetCurrent(here[p]->context));
		CUDA(EventRecord(here[p]->fork, here[p]->stream));
		CUDA(StreamWaitEvent(first->stream, here[p]->fork, CU_EVENT_WAIT_DEFAULT));
	}
	CUDA(CtxSetCurrent(first->context));
	CUDA(StreamEndCapture(first->stream, &graph));
	return graph;
}

static void run_graph(const struct run *r, struct rank_times *times)
{
	struct rank *k = r->k;
	const bool joint = r->c->mode == JOINT;
	int calls = r->c->calls < CALLS_A_GRAPH ? r->c->calls : CALLS_A_GRAPH, launches = (r->c->calls + calls - 1) / calls, graphs = r->c->cold ? 2 : 1;
	CUgraphExec exec[2] = { NULL, NULL };
	meet(k);
	for (int g = 0; g < graphs && !(joint && k->rank); g++) {
		CUgraph graph = joint ? capture_joint(r, calls) : capture(r, g * calls, calls);
		look_at_graph(k, graph, joint ? calls * k->g->nranks : calls, &times->ran);
		CUDA(GraphInstantiate(&exec[g], graph, 0));
		CUDA(GraphDestroy(graph));
	}
	for (int repeat = -1; repeat < r->c->repeats; repeat++) {
		meet(k);
		if (joint && k->rank) continue;
		CUDA(EventRecord(k->begin, k->stream));
		double start = now_us();
		for (int i = 0; i < launches; i++) CUDA(GraphLaunch(exec[i % graphs], k->stream));
		double host = now_us() - start;
		CUDA(EventRecord(k->end, k->stream));
		take_times(k, repeat, host, launches * calls, times);
	}
	meet(k);
	for (int g = 0; g < graphs; g++)
		if (exec[g]) CUDA(GraphExecDestroy(exec[g]));
}

void measure(struct rank *k)
{
	const struct cell *c = &k->g->cell;
	struct rank_times *times = &k->g->times[k->rank];
	size_t element = k->g->type == ncclFloat32 ? 4 : 2;
	struct run r = { k, c, coll_count(c->coll, c->bytes, k->g->nranks, element), element };
	memset(times, 0, sizeof(*times));
	times->absent = (c->registered && atomic_load_explicit(&k->g->unregistered, memory_order_relaxed)) || !coll_exists(k->l, c->coll);
	meet(k);
	for (int p = 0; p < k->g->nranks; p++)
		if (k->g->times[p].absent) return;
	if (!check_result(&r)) return;
	if (c->mode == EAGER) run_eager(&r, times);
	else run_graph(&r, times);
	memcpy(times->ran.how, k->how[c->coll], HOW_NAME);
}

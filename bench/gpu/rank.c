#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "bench.h"

enum { CALLS_A_GRAPH = 20, SETS_MOST = 64 };
#define COLD_BYTES ((size_t)256 << 20)          /* more than any level-2 cache: buffers so far apart are cold again */

struct rank {
	struct group *g;
	const struct library *l;
	int rank;
	CUcontext context;
	CUstream stream;
	CUevent begin, end;
	ncclComm_t comm;
	size_t in_bytes, out_bytes;
	struct buffers plain, registered;       /* registered.in == 0: this library or memory can't */
	void *handles[2];
	ncclWindow_t windows[2];
};

double now_us(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

void word_wait(_Atomic uint32_t *word, uint32_t while_it_is)
{
	while (atomic_load_explicit(word, memory_order_acquire) == while_it_is)     /* pairs with word_raise */
		syscall(SYS_futex, word, FUTEX_WAIT, while_it_is, NULL, NULL, 0);
}

void word_raise(_Atomic uint32_t *word)
{
	atomic_fetch_add_explicit(word, 1, memory_order_release);
	syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static void meet(struct rank *k) { pthread_barrier_wait(&k->g->barrier); }

static void must(const struct rank *k, ncclResult_t result, const char *what)
{
	if (result == ncclSuccess) return;
	fprintf(stderr, "%s, rank %d of %d: %s: %s\n", k->l->name, k->rank, k->g->nranks, what, k->l->ncclGetErrorString(result));
	_Exit(1);
}
#define MUST(call) must(k, call, #call)

/* ---- life ---- */

static size_t free_bytes(void)
{
	size_t free_, total;
	CUDA(MemGetInfo(&free_, &total));
	return free_;
}

static void open_device(struct rank *k)
{
	struct group *g = k->g;
	double start = now_us();
	CUDA(DevicePrimaryCtxRetain(&k->context, k->rank % g->ndevices));
	CUDA(CtxSetCurrent(k->context));
	CUDA(StreamCreate(&k->stream, CU_STREAM_NON_BLOCKING));
	CUDA(EventCreate(&k->begin, CU_EVENT_DEFAULT));
	CUDA(EventCreate(&k->end, CU_EVENT_DEFAULT));
	g->cuda_ms[k->rank] = (now_us() - start) / 1e3;
	if (k->rank) return;
	CUDA(DeviceGetName(g->device_name, sizeof(g->device_name), 0));
	CUDA(DeviceGetAttribute(&g->sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 0));
}

static void open_comm(struct rank *k)
{
	struct group *g = k->g;
	if (k->rank == 0) {
		MUST(k->l->ncclGetVersion(&g->version));
		MUST(k->l->ncclGetUniqueId(&g->id));
	}
	meet(k);
	size_t before = free_bytes();
	meet(k);
	double start = now_us();
	MUST(k->l->ncclCommInitRank(&k->comm, g->nranks, g->id, k->rank));
	g->init_ms[k->rank] = (now_us() - start) / 1e3;
	meet(k);
	if (k->rank == 0) g->memory_bytes = (int64_t)before - (int64_t)free_bytes();
	meet(k);
}

static bool take(struct rank *k, int i, size_t bytes, CUdeviceptr *out)
{
	void *ptr = NULL;
	if (k->l->ncclMemAlloc(&ptr, bytes) != ncclSuccess) return false;
	*out = (CUdeviceptr)(uintptr_t)ptr;
	if (!k->g->buffers && k->l->ncclCommWindowRegister &&
		k->l->ncclCommWindowRegister(k->comm, ptr, bytes, &k->windows[i], NCCL_WIN_COLL_SYMMETRIC) == ncclSuccess) return true;
	return k->l->ncclCommRegister(k->comm, ptr, bytes, &k->handles[i]) == ncclSuccess;
}

static void open_buffers(struct rank *k)
{
	struct group *g = k->g;
	size_t room = g->most_bytes + (g->most_bytes < COLD_BYTES ? COLD_BYTES : 0);
	if (getenv("BENCH_GPU_TINY")) room = 2 * g->most_bytes;
	k->in_bytes = k->out_bytes = room;
	CUDA(MemAlloc(&k->plain.in, room));
	CUDA(MemAlloc(&k->plain.out, room));
	meet(k);
	if (g->registers && k->l->ncclMemAlloc && k->l->ncclCommRegister && take(k, 0, room, &k->registered.in) && take(k, 1, room, &k->registered.out)) return;
	k->registered = (struct buffers){ 0, 0 };
	atomic_store_explicit(&g->unregistered, true, memory_order_relaxed);       /* the ranks meet before anyone looks */
}

static void close_rank(struct rank *k)
{
	CUDA(StreamSynchronize(k->stream));
	meet(k);
	for (int i = 0; i < 2; i++) {
		if (k->windows[i]) k->l->ncclCommWindowDeregister(k->comm, k->windows[i]);
		if (k->handles[i]) k->l->ncclCommDeregister(k->comm, k->handles[i]);
	}
	double start = now_us();
	MUST(k->l->ncclCommDestroy(k->comm));
	k->g->destroy_ms[k->rank] = (now_us() - start) / 1e3;
	meet(k);
	CUDA(MemFree(k->plain.in));
	CUDA(MemFree(k->plain.out));
	if (k->registered.in) k->l->ncclMemFree((void *)(uintptr_t)k->registered.in);
	if (k->registered.out) k->l->ncclMemFree((void *)(uintptr_t)k->registered.out);
}

/* ---- measurements ---- */

/* Call i's buffers: the same ones each time, or (cold) others, as far as there is room. */
static struct buffers buffers_of(const struct rank *k, const struct cell *c, size_t count, size_t element, int i)
{
	struct buffers b = c->registered ? k->registered : k->plain;
	size_t in = coll_in_bytes(c->coll, count * element, k->g->nranks), out = coll_out_bytes(c->coll, count * element, k->g->nranks);
	size_t each = ((in > out ? in : out) + 511) / 512 * 512, sets = k->in_bytes / each;
	if (sets > SETS_MOST * 64) sets = SETS_MOST * 64;
	/* Neighbours would share what the memory fetches at once. */
	size_t stride = sets ? k->in_bytes / sets / 512 * 512 : 0;
	size_t at = c->cold && sets ? (size_t)i % sets * stride : 0;
	return (struct buffers){ b.in + at, b.out + at };
}

struct run { struct rank *k; const struct cell *c; size_t count, element; };

static void call(const struct run *r, int i)
{
	struct rank *k = r->k;
	struct buffers b = buffers_of(k, r->c, r->count, r->element, i);
	MUST(coll_call(k->l, r->c->coll, &b, r->count, k->g->type, k->g->nranks, k->rank, k->comm, k->stream));
}

/* Where one rank's is wrong, none goes on: false. */
static bool check_result(const struct run *r)
{
	const char *asked = getenv("BENCH_GPU_WRONG");
	struct rank *k = r->k;
	struct buffers b = buffers_of(k, r->c, r->count, r->element, 0);
	coll_fill(r->c->coll, &b, r->count, k->g->type, k->g->nranks, k->rank);
	meet(k);
	call(r, 0);
	CUDA(StreamSynchronize(k->stream));
	meet(k);
	k->g->times[k->rank].wrong = !coll_check(r->c->coll, &b, r->count, k->g->type, k->g->nranks, k->rank) || (asked && atoi(asked) == k->rank);
	meet(k);
	for (int rank = 0; rank < k->g->nranks; rank++)
		if (k->g->times[rank].wrong) return false;
	return true;
}

static void run_eager(const struct run *r, struct rank_times *times)
{
	struct rank *k = r->k;
	float ms;
	for (int repeat = -1; repeat < r->c->repeats; repeat++) {
		meet(k);
		CUDA(EventRecord(k->begin, k->stream));
		double start = now_us();
		for (int i = 0; i < r->c->calls; i++) call(r, i);
		double host = now_us() - start;
		CUDA(EventRecord(k->end, k->stream));
		CUDA(StreamSynchronize(k->stream));
		if (repeat < 0) continue;
		CUDA(EventElapsedTime(&ms, k->begin, k->end));
		times->device_us[repeat] = (double)ms * 1e3 / r->c->calls;
		times->host_us[repeat] = host / r->c->calls;
	}
}

static void count_blocks(CUgraph graph, int calls, struct rank_times *times)
{
	size_t count = 0;
	int blocks = 0, kernels = 0;
	if (!cuda_kernel_node) return;
	CUDA(GraphGetNodes(graph, NULL, &count));
	CUgraphNode *nodes = calloc(count + 1, sizeof(*nodes));
	CUDA(GraphGetNodes(graph, nodes, &count));
	for (size_t i = 0; i < count; i++) {
		CUgraphNodeType type;
		CUDA_KERNEL_NODE_PARAMS parameters;
		CUDA(GraphNodeGetType(nodes[i], &type));
		if (type != CU_GRAPH_NODE_TYPE_KERNEL || cuda_kernel_node(nodes[i], &parameters) != CUDA_SUCCESS) continue;
		int grid = (int)(parameters.gridDimX * parameters.gridDimY * parameters.gridDimZ);
		if (grid > blocks) blocks = grid;
		if (parameters.sharedMemBytes > times->shared) times->shared = parameters.sharedMemBytes;
		kernels++;
	}
	free(nodes);
	times->blocks = blocks;
	times->kernels = kernels / calls;
}

static void run_graph(const struct run *r, struct rank_times *times)
{
	struct rank *k = r->k;
	int calls = r->c->calls < CALLS_A_GRAPH ? r->c->calls : CALLS_A_GRAPH, launches = (r->c->calls + calls - 1) / calls, graphs = r->c->cold ? 2 : 1;
	CUgraph graph;
	CUgraphExec exec[2] = { NULL, NULL };
	float ms;
	meet(k);
	for (int g = 0; g < graphs; g++) {
		CUDA(StreamBeginCapture(k->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
		for (int i = 0; i < calls; i++) call(r, g * calls + i);
		CUDA(StreamEndCapture(k->stream, &graph));
		count_blocks(graph, calls, times);
		CUDA(GraphInstantiate(&exec[g], graph, 0));
		CUDA(GraphDestroy(graph));
	}
	for (int repeat = -1; repeat < r->c->repeats; repeat++) {
		meet(k);
		CUDA(EventRecord(k->begin, k->stream));
		double start = now_us();
		for (int i = 0; i < launches; i++) CUDA(GraphLaunch(exec[i % graphs], k->stream));
		double host = now_us() - start;
		CUDA(EventRecord(k->end, k->stream));
		CUDA(StreamSynchronize(k->stream));
		if (repeat < 0) continue;
		CUDA(EventElapsedTime(&ms, k->begin, k->end));
		times->device_us[repeat] = (double)ms * 1e3 / (launches * calls);
		times->host_us[repeat] = host / (launches * calls);
	}
	meet(k);
	for (int g = 0; g < graphs; g++) CUDA(GraphExecDestroy(exec[g]));
}

static void measure(struct rank *k)
{
	const struct cell *c = &k->g->cell;
	struct rank_times *times = &k->g->times[k->rank];
	size_t element = k->g->type == ncclFloat32 ? 4 : 2;
	struct run r = { k, c, coll_count(c->coll, c->bytes, k->g->nranks, element), element };
	memset(times, 0, sizeof(*times));
	if (c->registered && atomic_load_explicit(&k->g->unregistered, memory_order_relaxed)) {
		times->device_us[0] = -1;
		return;
	}
	if (!check_result(&r)) return;
	if (c->mode == EAGER) run_eager(&r, times);
	else run_graph(&r, times);
}

void rank_run(struct group *g, int rank)
{
	struct rank rank_ = { .g = g, .l = &g->library, .rank = rank }, *k = &rank_;
	open_device(k);
	open_comm(k);
	open_buffers(k);
	meet(k);
	for (uint32_t order = 0;; order++) {
		word_raise(&g->ended);
		word_wait(&g->order, order);
		if (g->quit) break;
		measure(k);
	}
	close_rank(k);
	word_raise(&g->ended);
}

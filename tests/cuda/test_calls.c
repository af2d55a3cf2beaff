/* What a call costs: which of the driver's functions it calls, and how many threads a communicator's init starts. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "cuda/helper_ops.h"

static _Atomic int threads_started;

/* The library's too, for the program's own functions come first. */
__attribute__((visibility("default")))
int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *arg)
{
	static int (*create)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
	if (!create) *(void **)&create = dlsym(RTLD_NEXT, "pthread_create");
	atomic_fetch_add(&threads_started, 1);
	return create(thread, attributes, run, arg);
}

static void no_threads_for_a_second_communicator(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	ncclComm_t again;
	ncclUniqueId id;
	int before = threads_started;
	REQUIRE(before > 0);
	REQUIRE_OK(ncclGetUniqueId(&id));
	REQUIRE_OK(ncclCommInitRank(&again, 1, id, 0));
	REQUIRE(threads_started == before);
	REQUIRE_OK(ncclCommDestroy(again));
}

static void only_a_gpus_first_communicator_starts_threads(void **state)
{
	(void)state;
	struct gpu_options o = { .nranks = 1 };
	assert_true(gpu_run(&o, no_threads_for_a_second_communicator, NULL));
}

/* The fake's multiprocessor has 228 KB, and two blocks, or one with pipes, of 208 KB; what is static is 1 KB a block, and 1 KB the driver's. */
static void asks_for(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	const long long wanted = *(const int *)g->arg;
	REQUIRE(gpu_count("carveout least") == wanted && gpu_count("carveout most") == wanted);
}

static void all_kernels_ask_for_what_all_of_them_need(void **state)
{
	(void)state;
	static const struct { const char *table, *more; int percent; } ways[] = { { "TELPHER_CUDA_TABLE=pipes=0", NULL, 3 },
		{ "TELPHER_CUDA_TABLE=reduce=16M,pipes=2", NULL, 100 }, { "TELPHER_CUDA_TABLE=pipes=0", "NCCL_L1_SHARED_MEMORY_CARVEOUT=40", 40 },
		{ "TELPHER_CUDA_TABLE=pipes=0", "NCCL_L1_SHARED_MEMORY_CARVEOUT=100", 100 } };
	for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++) {
		struct gpu_options o = { .nranks = 1, .env = { ways[i].table, ways[i].more } };
		assert_true(gpu_run(&o, asks_for, (void *)(uintptr_t)&ways[i].percent));
	}
}

/* A call after others like it: which functions of the driver, and how often. (The fake's cuEventRecord is that with flags.) */
typedef void (*call_once)(struct gpu_rank *g, CUdeviceptr at, CUstream stream);

static void reduce_all(struct gpu_rank *g, CUdeviceptr at, CUstream stream)
{
	struct ranks *r = g->r;
	REQUIRE_OK(ncclAllReduce(GPU_PTR(at), GPU_PTR(at), 100, ncclFloat32, ncclSum, g->comm, (cudaStream_t)stream));
}

static void gather_all(struct gpu_rank *g, CUdeviceptr at, CUstream stream)
{
	struct ranks *r = g->r;
	REQUIRE_OK(ncclAllGather(GPU_PTR(at), GPU_PTR(at + 1024), 100, ncclFloat32, g->comm, (cudaStream_t)stream));
}

static void reduce_all_in_a_group(struct gpu_rank *g, CUdeviceptr at, CUstream stream)
{
	struct ranks *r = g->r;
	REQUIRE_OK(ncclGroupStart());
	reduce_all(g, at, stream);
	REQUIRE_OK(ncclGroupEnd());
}

static void exchange(struct gpu_rank *g, CUdeviceptr at, CUstream stream)
{
	struct ranks *r = g->r;
	REQUIRE_OK(ncclGroupStart());
	REQUIRE_OK(ncclSend(GPU_PTR(at), 100, ncclFloat32, !r->rank, g->comm, (cudaStream_t)stream));
	REQUIRE_OK(ncclRecv(GPU_PTR(at + 1024), 100, ncclFloat32, !r->rank, g->comm, (cudaStream_t)stream));
	REQUIRE_OK(ncclGroupEnd());
}

static void count_calls(struct gpu_rank *g, CUstream stream, call_once call, const char *const *names)
{
	struct ranks *r = g->r;
	enum { ROUNDS = 20 };
	CUdeviceptr at = gpu_take(g, 4096, 0);
	long long all = 0;
	for (int i = 0; i < 3; i++) call(g, at, stream);
	CUDA_OK(StreamSynchronize(stream));
	ranks_barrier(r);
	long long before = gpu_count("calls"), each[8] = { 0 };
	for (int n = 0; names[n]; n++) each[n] = gpu_count(names[n]);
	for (int i = 0; i < ROUNDS; i++) call(g, at, stream);
	long long after = gpu_count("calls");
	for (int n = 0; names[n]; n++, all++) REQUIRE(gpu_count(names[n]) - each[n] == ROUNDS);
	REQUIRE(after - before == all * ROUNDS);
	CUDA_OK(StreamSynchronize(stream));
}

static const char *const five[] = { "cuCtxGetCurrent", "cuStreamIsCapturing", "cuStreamGetId", "cuLaunchKernel", "cuEventRecordWithFlags", NULL };

static void count_them(struct gpu_rank *g)
{
	static const char *const legacy[] = { "cuCtxGetCurrent", "cuStreamIsCapturing", "cuLaunchKernel", "cuEventRecordWithFlags", NULL };
	static const call_once calls[] = { reduce_all, gather_all, reduce_all_in_a_group, exchange };
	for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) count_calls(g, g->streams[1], calls[i], five);
	if (!g->arg) count_calls(g, NULL, reduce_all, legacy);
}

static void a_call_again_is_five_calls_of_the_driver(void **state)
{
	(void)state;
	static bool sharing = true;
	struct gpu_options processes = { .nranks = 2, .ndevices = 2 }, threads = { .nranks = 2, .threads = true };
	assert_true(gpu_run(&processes, count_them, NULL));
	assert_true(gpu_run(&threads, count_them, &sharing));
}

/* The graph goes, and calls on the stream are what they were. */
static void drop_and_count(struct gpu_rank *g, CUgraphExec graph, CUdeviceptr at, CUstream stream)
{
	struct ranks *r = g->r;
	CUdeviceptr vote = gpu_take(g, sizeof(int), 0);
	int waiting = 1;
	for (int i = 0; i < GPU_STREAMS; i++) gpu_sync(g, i);
	ranks_barrier(r);
	CUDA_OK(GraphExecDestroy(graph));
	/* CUDA says in its own time that it is gone, to each rank. */
	while (waiting) {
		reduce_all(g, at, stream);
		long long waits = gpu_count("cuStreamWaitEvent");
		reduce_all(g, at, stream);
		waiting = gpu_count("cuStreamWaitEvent") != waits;
		gpu_put(g, vote, &waiting, sizeof(waiting));
		REQUIRE_OK(ncclAllReduce(GPU_PTR(vote), GPU_PTR(vote), 1, ncclInt32, ncclMax, g->comm, (cudaStream_t)stream));
		gpu_get(g, &waiting, vote, sizeof(waiting));
	}
	ranks_barrier(r);
	count_calls(g, stream, reduce_all, five);
}

/* While there is a graph each eager call waits for it. */
static void count_around_a_graph(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	CUstream stream = g->streams[0];
	CUdeviceptr at = gpu_take(g, 4096, 0);
	long long waits = gpu_count("cuStreamWaitEvent");
	reduce_all(g, at, stream);
	ranks_barrier(r);
	CUDA_OK(StreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
	reduce_all(g, at, stream);
	CUgraphExec graph = gpu_end_capture(g, 0);
	CUDA_OK(GraphLaunch(graph, stream));
	for (int i = 0; i < 3; i++) reduce_all(g, at, g->streams[i % 3]);
	REQUIRE(gpu_count("cuStreamWaitEvent") >= waits + 4);
	drop_and_count(g, graph, at, stream);
}

/* A capture while another stream holds work, then eager calls elsewhere, and there they stay. */
static void count_where_calls_stay(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	CUdeviceptr at = gpu_take(g, 4096, 0);
	if (r->rank) usleep(50000);             /* so it does hold work */
	reduce_all(g, at, g->streams[1]);
	CUDA_OK(StreamBeginCapture(g->streams[2], CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
	reduce_all(g, at, g->streams[2]);
	CUgraphExec graph = gpu_end_capture(g, 2);
	reduce_all(g, at, g->streams[0]);
	drop_and_count(g, graph, at, g->streams[0]);
}

static void after_its_graphs_a_call_is_what_it_was_before(void **state)
{
	(void)state;
	struct gpu_options processes = { .nranks = 2, .ndevices = 2 }, threads = { .nranks = 2, .threads = true };
	assert_true(gpu_run(&processes, count_around_a_graph, NULL));
	assert_true(gpu_run(&threads, count_around_a_graph, NULL));
	assert_true(gpu_run(&threads, count_where_calls_stay, NULL));
}

/* Made again with buffers that lie otherwise: alone, in a group, in a capture. */
static void give_other_buffers(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	enum { COUNT = 33, ROOM = 512 };
	static const int places[][2] = { { 0, 0 }, { 0, 4 }, { 4, 0 }, { 4, 4 }, { 16, 32 }, { 12, 8 }, { 0, 0 } };
	CUstream stream = g->streams[0];
	CUdeviceptr in = gpu_take(g, ROOM, 0), out = gpu_take(g, ROOM, 0);
	float given[COUNT], got[COUNT];
	for (int way = 0; way < 3; way++) {
		for (size_t p = 0; p < sizeof(places) / sizeof(places[0]); p++) {
			CUdeviceptr from = in + (CUdeviceptr)places[p][0], to = out + (CUdeviceptr)places[p][1];
			for (int i = 0; i < COUNT; i++) given[i] = (float)(i + r->rank + 1000 * way + 100 * (int)p);
			gpu_put(g, from, given, sizeof(given));
			gpu_fill(g, to, 0xee, sizeof(got));
			if (way == 1) REQUIRE_OK(ncclGroupStart());
			if (way == 2) CUDA_OK(StreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
			REQUIRE_OK(ncclAllReduce(GPU_PTR(from), GPU_PTR(to), COUNT, ncclFloat32, ncclSum, g->comm, (cudaStream_t)stream));
			if (way == 1) REQUIRE_OK(ncclGroupEnd());
			if (way == 2) {
				CUgraphExec graph = gpu_end_capture(g, 0);
				CUDA_OK(GraphLaunch(graph, stream));
				gpu_sync(g, 0);
				CUDA_OK(GraphExecDestroy(graph));
			}
			gpu_get(g, got, to, sizeof(got));
			for (int i = 0; i < COUNT; i++)
				REQUIRE(got[i] == (float)(r->nranks * (i + 1000 * way + 100 * (int)p) + r->nranks * (r->nranks - 1) / 2));
		}
	}
}

static void a_call_again_takes_buffers_that_lie_otherwise(void **state)
{
	(void)state;
	for (int n = 1; n <= 3; n++) {
		struct gpu_options o = { .nranks = n, .threads = n > 1 };
		assert_true(gpu_run(&o, give_other_buffers, NULL));
	}
}

static void check_alone(struct gpu_rank *g, CUdeviceptr out, size_t count, float factor)
{
	struct ranks *r = g->r;
	float *got = malloc(count * sizeof(*got));
	REQUIRE(got != NULL);
	gpu_get(g, got, out, count * sizeof(*got));
	for (size_t i = 0; i < count; i++) REQUIRE(got[i] == factor * (float)i);
	free(got);
	gpu_fill(g, out, 0xee, count * sizeof(float));
}

static void call_alone(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	enum { MOST = 20000, COUNT = 1000 };
	cudaStream_t stream = (cudaStream_t)g->streams[0];
	CUdeviceptr in = gpu_take(g, MOST * 4, 0), out = gpu_take(g, MOST * 4, 0);
	float given[MOST], two = 2;
	ncclRedOp_t twice;
	for (int i = 0; i < MOST; i++) given[i] = (float)i;
	gpu_put(g, in, given, sizeof(given));
	REQUIRE_OK(ncclRedOpCreatePreMulSum(&twice, &two, ncclFloat32, ncclScalarHostImmediate, g->comm));
	const long long kernels = gpu_count("cuLaunchKernel");
	long long copies = gpu_count("cuMemcpyAsync");
	for (int i = 0; i < 3; i++) REQUIRE_OK(ncclAllReduce(GPU_PTR(in), GPU_PTR(in), COUNT, ncclFloat32, ncclAvg, g->comm, stream));
	REQUIRE(gpu_count("cuMemcpyAsync") == copies && gpu_count("cuLaunchKernel") == kernels);
	REQUIRE_OK(ncclAllGather(GPU_PTR(in), GPU_PTR(out), COUNT, ncclFloat32, g->comm, stream));
	REQUIRE(gpu_count("cuMemcpyAsync") == copies + 1 && gpu_count("cuLaunchKernel") == kernels);
	check_alone(g, out, COUNT, 1);
	/* Again, and of memory that a copy reaches and a kernel might not. */
	const void *from[] = { GPU_PTR(in), given };
	for (int i = 0; i < 4; i++) {
		copies = gpu_count("cuMemcpyAsync");
		REQUIRE_OK(ncclAllGather(from[i % 2], GPU_PTR(out + 4), MOST - 1, ncclFloat32, g->comm, stream));
		REQUIRE(gpu_count("cuMemcpyAsync") == copies + 1 && gpu_count("cuLaunchKernel") == kernels);
		check_alone(g, out + 4, MOST - 1, 1);
	}
	/* In a graph, which has a copy that nobody gives to the stream. */
	copies = gpu_count("cuMemcpyAsync");
	CUDA_OK(StreamBeginCapture(g->streams[0], CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
	REQUIRE_OK(ncclAllGather(GPU_PTR(in), GPU_PTR(out), COUNT, ncclFloat32, g->comm, stream));
	CUgraphExec graph = gpu_end_capture(g, 0);
	REQUIRE(gpu_count("cuMemcpyAsync") == copies + 1 && gpu_count("cuLaunchKernel") == kernels);
	CUDA_OK(GraphLaunch(graph, g->streams[0]));
	check_alone(g, out, COUNT, 1);
	CUDA_OK(GraphExecDestroy(graph));
	REQUIRE_OK(ncclReduceScatter(GPU_PTR(in), GPU_PTR(out), COUNT, ncclFloat32, twice, g->comm, stream));
	REQUIRE(gpu_count("cuLaunchKernel") == kernels + 1);
	check_alone(g, out, COUNT, 2);
	REQUIRE_OK(ncclRedOpDestroy(twice, g->comm));
}

static void a_rank_alone_copies(void **state)
{
	(void)state;
	struct gpu_options o = { .nranks = 1 };
	assert_true(gpu_run(&o, call_alone, NULL));
}

int main(void)
{
	gpu_need();
	if (!gpu_fake_here()) return 77;
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_call_again_is_five_calls_of_the_driver),
		cmocka_unit_test(after_its_graphs_a_call_is_what_it_was_before),
		cmocka_unit_test(a_call_again_takes_buffers_that_lie_otherwise),
		cmocka_unit_test(a_rank_alone_copies),
		cmocka_unit_test(all_kernels_ask_for_what_all_of_them_need),
		cmocka_unit_test(only_a_gpus_first_communicator_starts_threads),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

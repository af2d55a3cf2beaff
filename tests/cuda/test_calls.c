/* What a call costs: which of the driver's functions it calls, and how many threads a communicator's init starts. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>

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
static void count_calls(struct gpu_rank *g, CUstream stream, const char *const *names)
{
	struct ranks *r = g->r;
	enum { ROUNDS = 20 };
	CUdeviceptr at = gpu_take(g, 4096, 0);
	long long all = 0;
	for (int i = 0; i < 3; i++) REQUIRE_OK(ncclAllReduce(GPU_PTR(at), GPU_PTR(at), 100, ncclFloat32, ncclSum, g->comm, (cudaStream_t)stream));
	CUDA_OK(StreamSynchronize(stream));
	ranks_barrier(r);
	long long before = gpu_count("calls"), each[8] = { 0 };
	for (int n = 0; names[n]; n++) each[n] = gpu_count(names[n]);
	for (int i = 0; i < ROUNDS; i++) REQUIRE_OK(ncclAllReduce(GPU_PTR(at), GPU_PTR(at), 100, ncclFloat32, ncclSum, g->comm, (cudaStream_t)stream));
	long long after = gpu_count("calls");
	for (int n = 0; names[n]; n++, all++) REQUIRE(gpu_count(names[n]) - each[n] == ROUNDS);
	REQUIRE(after - before == all * ROUNDS);
	CUDA_OK(StreamSynchronize(stream));
}

static void count_them(struct gpu_rank *g)
{
	static const char *const stream[] = { "cuCtxGetCurrent", "cuStreamIsCapturing", "cuStreamGetId", "cuLaunchKernel", "cuEventRecordWithFlags", NULL };
	static const char *const legacy[] = { "cuCtxGetCurrent", "cuStreamIsCapturing", "cuLaunchKernel", "cuEventRecordWithFlags", NULL };
	count_calls(g, g->streams[1], stream);
	if (!g->arg) count_calls(g, NULL, legacy);
}

static void a_call_again_is_five_calls_of_the_driver(void **state)
{
	(void)state;
	static bool sharing = true;
	struct gpu_options processes = { .nranks = 2, .ndevices = 2 }, threads = { .nranks = 2, .threads = true };
	assert_true(gpu_run(&processes, count_them, NULL));
	assert_true(gpu_run(&threads, count_them, &sharing));
}

static void call_alone(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	enum { COUNT = 1000 };
	cudaStream_t stream = (cudaStream_t)g->streams[0];
	CUdeviceptr in = gpu_take(g, COUNT * 4, 0), out = gpu_take(g, COUNT * 4, 0);
	float given[COUNT], got[COUNT], two = 2;
	ncclRedOp_t twice;
	for (int i = 0; i < COUNT; i++) given[i] = (float)i;
	CUDA_OK(MemcpyHtoD(in, given, sizeof(given)));
	REQUIRE_OK(ncclRedOpCreatePreMulSum(&twice, &two, ncclFloat32, ncclScalarHostImmediate, g->comm));
	const long long kernels = gpu_count("cuLaunchKernel"), copies = gpu_count("cuMemcpyAsync");
	REQUIRE_OK(ncclAllReduce(GPU_PTR(in), GPU_PTR(in), COUNT, ncclFloat32, ncclAvg, g->comm, stream));
	REQUIRE(gpu_count("cuMemcpyAsync") == copies);
	REQUIRE_OK(ncclAllGather(GPU_PTR(in), GPU_PTR(out), COUNT, ncclFloat32, g->comm, stream));
	REQUIRE(gpu_count("cuMemcpyAsync") == copies + 1 && gpu_count("cuLaunchKernel") == kernels);
	CUDA_OK(StreamSynchronize(g->streams[0]));
	CUDA_OK(MemcpyDtoH(got, out, sizeof(got)));
	REQUIRE(!memcmp(got, given, sizeof(got)));
	REQUIRE_OK(ncclReduceScatter(GPU_PTR(in), GPU_PTR(out), COUNT, ncclFloat32, twice, g->comm, stream));
	REQUIRE(gpu_count("cuLaunchKernel") == kernels + 1);
	CUDA_OK(StreamSynchronize(g->streams[0]));
	CUDA_OK(MemcpyDtoH(got, out, sizeof(got)));
	for (int i = 0; i < COUNT; i++) REQUIRE(got[i] == 2 * given[i]);
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
		cmocka_unit_test(a_rank_alone_copies),
		cmocka_unit_test(all_kernels_ask_for_what_all_of_them_need),
		cmocka_unit_test(only_a_gpus_first_communicator_starts_threads),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

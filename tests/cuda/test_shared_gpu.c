/* Streams of ranks that share a GPU in one process: each has its own, for kernels of one stream run one after the other. */
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "cuda/helper_ops.h"

enum { COUNT = 1000, SHARERS = 2 };

/* Streams of both ranks, for both. */
static CUstream all[SHARERS][GPU_STREAMS];

static ncclResult_t sum_on(struct gpu_rank *g, CUdeviceptr at, CUstream stream)
{
	return ncclAllReduce(GPU_PTR(at), GPU_PTR(at), COUNT, ncclFloat32, ncclSum, g->comm, (cudaStream_t)stream);
}

static CUdeviceptr take_all(struct gpu_rank *g)
{
	for (int s = 0; s < GPU_STREAMS; s++) all[g->r->rank][s] = g->streams[s];
	ranks_barrier(g->r);
	return gpu_take(g, COUNT * 4, 0);
}

static void sync_all(struct gpu_rank *g)
{
	for (int s = 0; s < GPU_STREAMS; s++) gpu_sync(g, s);
	ranks_barrier(g->r);
}

/* Streams that would let ranks of one GPU wait for each other for ever, whoever used them before. */
static void bad_streams(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	CUstream blocking;
	CUdeviceptr buffer = gpu_take(g, 1 << 16, 0);
	void *p = GPU_PTR(buffer);
	CUDA_OK(StreamCreate(&blocking, CU_STREAM_DEFAULT));
	REQUIRE_IS(ncclAllReduce(p, p, COUNT, ncclFloat32, ncclSum, g->comm, NULL), ncclInvalidUsage);
	REQUIRE_IS(ncclAllReduce(p, p, COUNT, ncclFloat32, ncclSum, g->comm, (cudaStream_t)CU_STREAM_LEGACY), ncclInvalidUsage);
	REQUIRE_IS(ncclAllReduce(p, p, COUNT, ncclFloat32, ncclSum, g->comm, (cudaStream_t)blocking), ncclInvalidUsage);
	REQUIRE_OK(sum_on(g, buffer, g->streams[1]));
	gpu_sync(g, 1);
	ranks_barrier(r);
	CUDA_OK(StreamDestroy(blocking));
}

/* All streams that hold unfinished work of a rank are its own, the latest and others. Rank 0 has up to four calls on three; they wait for rank 1. */
static void with_work(struct gpu_rank *g, CUdeviceptr at)
{
	struct ranks *r = g->r;
	static const int order[] = { 0, 1, 0, 2 };
	for (int n = 1; n <= 4; n++) {
		for (int i = 0; i < n && r->rank == 0; i++) REQUIRE_OK(sum_on(g, at, all[0][order[i]]));
		ranks_barrier(r);
		for (int i = 0; i < n && r->rank == 1; i++) {
			/* Of what waits for calls to come, only the last is sure to wait still. */
			for (int s = 0; s < n && i == 0; s++) REQUIRE_IS(sum_on(g, at, all[0][order[s]]), ncclInvalidUsage);
			REQUIRE_IS(sum_on(g, at, all[0][order[n - 1]]), ncclInvalidUsage);
			REQUIRE_OK(sum_on(g, at, all[1][order[i]]));
		}
		sync_all(g);
	}
}

/* What is done is anybody's. */
static void without_work(struct gpu_rank *g, CUdeviceptr at)
{
	struct ranks *r = g->r;
	for (int turn = 0; turn < 8; turn++) {
		CUstream stream = all[(r->rank + turn) % 2][turn / 3 % GPU_STREAMS];
		for (int i = 0; i < 3; i++) REQUIRE_OK(sum_on(g, at, stream));
		CUDA_OK(StreamSynchronize(stream));
		ranks_barrier(r);
	}
}

static _Atomic bool released;
static void wait_for_release(void *unused)
{
	(void)unused;
	while (!released) usleep(1000);
}

/* The program's own work on a stream that a rank's is done on is nobody's. */
static void with_the_programs_work(struct gpu_rank *g, CUdeviceptr at)
{
	struct ranks *r = g->r;
	released = false;
	REQUIRE_OK(sum_on(g, at, g->streams[0]));
	sync_all(g);
	if (r->rank == 1) {
		CUDA_OK(LaunchHostFunc(all[0][0], wait_for_release, NULL));
		REQUIRE_OK(sum_on(g, at, all[0][0]));
	}
	ranks_barrier(r);
	if (r->rank == 0) REQUIRE_OK(sum_on(g, at, all[0][1]));
	released = true;
	sync_all(g);
}

/* A stream that was taken is the other's, also for a rank that made its last call there. */
static void taken(struct gpu_rank *g, CUdeviceptr at)
{
	struct ranks *r = g->r;
	for (int i = 0; i < 2; i++) REQUIRE_OK(sum_on(g, at, g->streams[1]));
	sync_all(g);
	if (r->rank == 1) REQUIRE_OK(sum_on(g, at, all[0][1]));
	ranks_barrier(r);
	if (r->rank == 0) {
		REQUIRE_IS(sum_on(g, at, all[0][1]), ncclInvalidUsage);
		REQUIRE_OK(sum_on(g, at, all[0][2]));
	}
	sync_all(g);
}

/* Of the streams of a group, those that later calls leave alone are nobody's once the group's work is done. */
static void after_a_group_on_several(struct gpu_rank *g, CUdeviceptr at)
{
	struct ranks *r = g->r;
	REQUIRE_OK(ncclGroupStart());
	for (int s = 0; s < 2; s++) REQUIRE_OK(sum_on(g, at, g->streams[s]));
	REQUIRE_OK(ncclGroupEnd());
	sync_all(g);
	if (r->rank == 0) REQUIRE_OK(sum_on(g, at, all[0][1]));
	ranks_barrier(r);
	if (r->rank == 1) REQUIRE_OK(sum_on(g, at, all[0][0]));
	sync_all(g);
}

/* Another capture of the same stream is another place. */
static void captures(struct gpu_rank *g, CUdeviceptr at)
{
	struct ranks *r = g->r;
	CUgraph graph;
	CUgraphExec exec = NULL;
	for (int turn = 0; turn < 2; turn++) {
		if (turn == r->rank) {
			CUDA_OK(StreamBeginCapture(all[0][0], CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
			REQUIRE_OK(sum_on(g, at, all[0][0]));
			CUDA_OK(StreamEndCapture(all[0][0], &graph));
			CUDA_OK(GraphInstantiate(&exec, graph, 0));
			CUDA_OK(GraphDestroy(graph));
		}
		ranks_barrier(r);
	}
	for (int i = 0; i < 3; i++) CUDA_OK(GraphLaunch(exec, g->streams[1]));
	sync_all(g);
	CUDA_OK(GraphExecDestroy(exec));
	ranks_barrier(r);
}

static void change_hands(struct gpu_rank *g)
{
	CUdeviceptr at = take_all(g);
	/* Without graphs, then with those that there were. */
	for (int i = 0; i < 2; i++) {
		with_work(g, at);
		without_work(g, at);
		with_the_programs_work(g, at);
		taken(g, at);
		after_a_group_on_several(g, at);
		captures(g, at);
	}
}

/* Both ranks' calls in one capture, by one thread. */
static void one_capture(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	ncclComm_t comms[2];
	int devices[2] = { 0, 0 };
	CUgraph graph;
	void *p = GPU_PTR(gpu_take(g, COUNT * 4, 0));
	REQUIRE_OK(ncclCommInitAll(comms, 2, devices));
	CUDA_OK(StreamBeginCapture(g->streams[1], CU_STREAM_CAPTURE_MODE_RELAXED));
	REQUIRE_OK(ncclAllReduce(p, p, COUNT, ncclFloat32, ncclSum, comms[0], GPU_STREAM(g, 1)));
	REQUIRE_IS(ncclAllReduce(p, p, COUNT, ncclFloat32, ncclSum, comms[1], GPU_STREAM(g, 1)), ncclInvalidUsage);
	REQUIRE_ERROR_HAS("rank 0's");
	CUDA_OK(StreamEndCapture(g->streams[1], &graph));
	CUDA_OK(GraphDestroy(graph));
	for (int i = 0; i < 2; i++) REQUIRE_OK(ncclCommDestroy(comms[i]));
}

static void streams_that_serialise_are_refused(void **state)
{
	(void)state;
	struct gpu_options o = { .nranks = SHARERS, .threads = true, .timeout_s = 60 };
	assert_true(gpu_run(&o, bad_streams, NULL));
}

static void a_stream_is_a_ranks_while_it_holds_its_unfinished_work(void **state)
{
	(void)state;
	struct gpu_options o = { .nranks = SHARERS, .threads = true, .timeout_s = 60 };
	assert_true(gpu_run(&o, change_hands, NULL));
}

static void a_stream_in_a_capture_is_one_ranks(void **state)
{
	(void)state;
	struct gpu_options o = { .nranks = 1, .no_comm = true, .timeout_s = 60 };
	assert_true(gpu_run(&o, one_capture, NULL));
}

static void use_once(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	REQUIRE_OK(sum_on(g, gpu_take(g, COUNT * 4, 0), g->streams[0]));
	gpu_sync(g, 0);
}

/* The log has a line with this. */
static bool log_says(const char *name, const char *what)
{
	char line[1024];
	bool found = false;
	FILE *file = fopen(name, "re");
	while (file && fgets(line, sizeof(line), file)) found |= strstr(line, what) != NULL;
	if (file) fclose(file);
	return found;
}

/* A stream for each rank, and our own. */
static void queues_that_are_too_few_for_all_streams_are_told(void **state)
{
	(void)state;
	static const struct { int nranks; const char *queues; bool warns; } ways[] = { { 3, "4", false }, { 4, "4", true }, { 4, "5", false }, { 2, "2", true } };
	char name[64], file[96], queues[64];
	snprintf(name, sizeof(name), "/tmp/test_shared_gpu.%d.log", (int)getpid());
	snprintf(file, sizeof(file), "NCCL_DEBUG_FILE=%s", name);
	for (size_t w = 0; w < sizeof(ways) / sizeof(ways[0]); w++) {
		snprintf(queues, sizeof(queues), "CUDA_DEVICE_MAX_CONNECTIONS=%s", ways[w].queues);
		struct gpu_options o = { .nranks = ways[w].nranks, .threads = true, .env = { queues, "NCCL_DEBUG=WARN", file } };
		bool right = gpu_run(&o, use_once, NULL), said = log_says(name, "Set CUDA_DEVICE_MAX_CONNECTIONS=32");
		unlink(name);
		assert_true(right);
		assert_int_equal(said, ways[w].warns);
	}
}

int main(int argc, char **argv)
{
	gpu_need();
	if (argc > 1) cmocka_set_test_filter(argv[1]);
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(streams_that_serialise_are_refused), cmocka_unit_test(a_stream_is_a_ranks_while_it_holds_its_unfinished_work),
		cmocka_unit_test(a_stream_in_a_capture_is_one_ranks), cmocka_unit_test(queues_that_are_too_few_for_all_streams_are_told),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Streams: a call's work comes after what its stream holds and before what follows; a communicator's calls keep their order over all
 * streams; two communicators' calls run beside each other. */
#include "cuda/helper_ops.h"

enum { WORDS = 1000 };

/* Device memory is written by a copy that the stream orders before the call, and read by one behind it, without any wait of the host. */
static void ordered_within(struct gpu_rank *g, cudaStream_t stream, CUstream handle)
{
	struct ranks *r = g->r;
	CUdeviceptr in = gpu_take(g, WORDS * 4, 0), out = gpu_take(g, WORDS * 4, 0);
	uint32_t *host = (uint32_t *)g->host, *back = host + WORDS;
	for (int round = 0; round < 20; round++) {
		for (size_t i = 0; i < WORDS; i++) host[i] = (uint32_t)i + (uint32_t)(round * r->nranks + r->rank);
		CUDA_OK(MemsetD8Async(out, 0xee, WORDS * 4, handle));
		CUDA_OK(MemcpyHtoDAsync(in, host, WORDS * 4, handle));
		REQUIRE_OK(ncclAllReduce(GPU_PTR(in), GPU_PTR(out), WORDS, ncclUint32, ncclMax, g->comm, stream));
		CUDA_OK(MemsetD8Async(in, 0xdd, WORDS * 4, handle));
		CUDA_OK(MemcpyDtoHAsync(back, out, WORDS * 4, handle));
		CUDA_OK(StreamSynchronize(handle));
		for (size_t i = 0; i < WORDS; i++) REQUIRE(back[i] == (uint32_t)i + (uint32_t)(round * r->nranks + r->nranks - 1));
	}
	gpu_reset(g);
}

static void every_kind_of_stream(struct gpu_rank *g)
{
	CUstream blocking;
	CUDA_OK(StreamCreate(&blocking, CU_STREAM_DEFAULT));
	ordered_within(g, GPU_STREAM(g, 1), g->streams[1]);
	ordered_within(g, (cudaStream_t)blocking, blocking);
	ordered_within(g, NULL, NULL);
	ordered_within(g, (cudaStream_t)CU_STREAM_LEGACY, CU_STREAM_LEGACY);
	ordered_within(g, (cudaStream_t)CU_STREAM_PER_THREAD, CU_STREAM_PER_THREAD);
	CUDA_OK(StreamDestroy(blocking));
}

/* Each call's input is the output of the one before, on another stream, with events between: the sum after n calls is nranks^n. */
static void from_stream_to_stream(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	CUdeviceptr buffer[2] = { gpu_take(g, WORDS * 8, 0), gpu_take(g, WORDS * 8, 0) };
	uint64_t words[WORDS], wanted = 1;
	CUevent event;
	CUDA_OK(EventCreate(&event, CU_EVENT_DISABLE_TIMING));
	for (size_t i = 0; i < WORDS; i++) words[i] = i;
	gpu_put(g, buffer[0], words, sizeof(words));
	int n = 30;
	for (int k = 0; k < n; k++) {
		int stream = k * 7 % 3;
		if (k) CUDA_OK(StreamWaitEvent(g->streams[stream], event, 0));
		REQUIRE_OK(ncclAllReduce(GPU_PTR(buffer[k % 2]), GPU_PTR(buffer[1 - k % 2]), WORDS, ncclUint64, ncclSum, g->comm, GPU_STREAM(g, stream)));
		CUDA_OK(EventRecord(event, g->streams[stream]));
		wanted *= (uint64_t)r->nranks;
	}
	for (int s = 0; s < GPU_STREAMS; s++) gpu_sync(g, s);
	gpu_get(g, words, buffer[n % 2], sizeof(words));
	for (size_t i = 0; i < WORDS; i++) REQUIRE(words[i] == i * wanted);
	CUDA_OK(EventDestroy(event));
	gpu_reset(g);
}

/* Calls that have nothing to do with each other but the communicator: no events, and all come out right. */
static void one_communicator_on_all_streams(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	struct gpu_op ops[30];
	for (int k = 0; k < 30; k++) {
		struct random random = { (uint64_t)k + 1000 };
		draw_op(&random, r->nranks, &ops[k]);
		ops[k].rank = r->rank;
		ops[k].nranks = r->nranks;
		if (ops[k].count > 2000) ops[k].count %= 2000;
		op_prepare(g, &ops[k]);
	}
	for (int k = 0; k < 30; k++) REQUIRE_OK(op_issue(&ops[k], g->comm, g->streams[k % GPU_STREAMS]));
	for (int s = 0; s < GPU_STREAMS; s++) gpu_sync(g, s);
	for (int k = 0; k < 30; k++) op_check(g, &ops[k]);
	gpu_reset(g);
}

/* Rank 0 is late on one communicator; the other's calls, on another stream, are done meanwhile. */
static void beside_each_other(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	ncclComm_t other;
	REQUIRE_OK(ncclCommSplit(g->comm, 0, r->rank, &other, NULL));
	struct gpu_op late = { .kind = ALL_REDUCE, .rank = r->rank, .nranks = r->nranks, .count = 50000, .type = ncclFloat32, .op = ncclSum, .seed = 1 }, o = late;
	op_prepare(g, &late);
	op_prepare(g, &o);
	if (r->rank) REQUIRE_OK(op_issue(&late, g->comm, g->streams[1]));
	for (int k = 0; k < 10; k++) {
		op_fill(g, &o, (uint64_t)k);
		REQUIRE_OK(op_issue(&o, other, g->streams[2]));
		gpu_sync(g, 2);
		op_check(g, &o);
	}
	if (r->rank) CUDA_IS(StreamQuery(g->streams[1]), r->nranks > 1 ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS);
	ranks_barrier(r);
	if (!r->rank) REQUIRE_OK(op_issue(&late, g->comm, g->streams[1]));
	gpu_sync(g, 1);
	op_check(g, &late);
	REQUIRE_OK(ncclCommDestroy(other));
	gpu_reset(g);
}

/* What an operator of the caller's own has for a factor: in host memory, read at once, or in device memory, read by the kernel. */
static void factors(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	CUdeviceptr in = gpu_take(g, WORDS * 4, 0), out = gpu_take(g, WORDS * 4, 0), factor = gpu_take(g, 4, 0);
	float values[WORDS], results[WORDS], sum = 0;
	for (int round = 0; round < 4; round++) {
		bool on_device = round % 2;
		float mine = (float)(r->rank + 1 + round);
		ncclRedOp_t op;
		for (size_t i = 0; i < WORDS; i++) values[i] = (float)(i % 50);
		gpu_put(g, in, values, sizeof(values));
		float given = on_device ? -5 : mine;
		REQUIRE_OK(ncclRedOpCreatePreMulSum(&op, on_device ? GPU_PTR(factor) : &given, ncclFloat32, on_device ? ncclScalarDevice : ncclScalarHostImmediate,
			g->comm));
		given = -7;
		/* The factor in device memory may come as late as the call's turn. */
		memcpy(g->host, &mine, 4);
		CUDA_OK(MemcpyHtoDAsync(factor, g->host, 4, g->streams[1]));
		REQUIRE_OK(ncclAllReduce(GPU_PTR(in), GPU_PTR(out), WORDS, ncclFloat32, op, g->comm, GPU_STREAM(g, 1)));
		REQUIRE_OK(ncclRedOpDestroy(op, g->comm));
		gpu_sync(g, 1);
		gpu_get(g, results, out, sizeof(results));
		sum = 0;
		for (int k = 0; k < r->nranks; k++) sum += (float)(k + 1 + round);
		for (size_t i = 0; i < WORDS; i++) REQUIRE(results[i] == sum * values[i]);
	}
	gpu_reset(g);
}

static void everywhere(gpu_body body)
{
	static const struct { int nranks; bool threads; int ndevices, nhosts; } ways[] = {
		{ 1, false, 1, 1 }, { 2, false, 1, 1 }, { 4, false, 2, 1 }, { 3, true, 3, 1 }, { 2, false, 1, 2 },
	};
	for (size_t w = 0; w < sizeof(ways) / sizeof(ways[0]); w++) {
		struct gpu_options o = { .nranks = ways[w].nranks, .threads = ways[w].threads, .ndevices = ways[w].ndevices, .nhosts = ways[w].nhosts };
		/* Threads on one GPU share its legacy stream. */
		if (ways[w].threads && !gpu_fake_here()) continue;
		assert_true(gpu_run(&o, body, NULL));
	}
}

static void work_is_ordered_by_its_stream_of_any_kind(void **state) { (void)state; everywhere(every_kind_of_stream); }
static void results_pass_from_stream_to_stream(void **state) { (void)state; everywhere(from_stream_to_stream); }
static void a_communicator_orders_its_calls_on_all_streams(void **state) { (void)state; everywhere(one_communicator_on_all_streams); }
static void communicators_run_beside_each_other(void **state) { (void)state; everywhere(beside_each_other); }
static void factors_lie_on_host_or_device(void **state) { (void)state; everywhere(factors); }

int main(void)
{
	gpu_need();
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(work_is_ordered_by_its_stream_of_any_kind), cmocka_unit_test(results_pass_from_stream_to_stream),
		cmocka_unit_test(a_communicator_orders_its_calls_on_all_streams), cmocka_unit_test(communicators_run_beside_each_other),
		cmocka_unit_test(factors_lie_on_host_or_device),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Memory of the library's own (ncclMemAlloc), registered and made a window, in collectives of GPU ranks. */
#include "cuda/helper_gpu.h"

/* Sums of rank + 1 everywhere, in place and not, from the window's beginning and not. */
static void sum_in_window(struct gpu_rank *g, void *window, size_t count, size_t offset, bool in_place)
{
	struct ranks *r = g->r;
	int32_t *in = (int32_t *)window + offset, *out = in_place ? in : in + count;
	int32_t *result = malloc(count * sizeof(*result));
	CUDA_OK(MemsetD32Async((CUdeviceptr)(uintptr_t)in, (unsigned)r->rank + 1, count, g->streams[0]));
	REQUIRE_OK(ncclAllReduce(in, out, count, ncclInt32, ncclSum, g->comm, GPU_STREAM(g, 0)));
	gpu_get(g, result, (CUdeviceptr)(uintptr_t)out, count * sizeof(*result));
	for (size_t k = 0; k < count; k++) REQUIRE(result[k] == r->nranks * (r->nranks + 1) / 2);
	CUDA_OK(MemsetD32Async((CUdeviceptr)(uintptr_t)in, (unsigned)r->rank + 1, count, g->streams[0]));
	size_t part = count / (size_t)r->nranks;
	REQUIRE_OK(ncclReduceScatter(in, out + (in_place ? part * (size_t)r->rank : 0), part, ncclInt32, ncclSum, g->comm, GPU_STREAM(g, 0)));
	gpu_get(g, result, (CUdeviceptr)(uintptr_t)(out + (in_place ? part * (size_t)r->rank : 0)), part * sizeof(*result));
	for (size_t k = 0; k < part; k++) REQUIRE(result[k] == r->nranks * (r->nranks + 1) / 2);
	free(result);
}

static void memory_and_windows(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	enum { BYTES = 4 << 20 };
	void *buffer, *handle, *none = &none;
	ncclWindow_t window = NULL;
	REQUIRE_OK(ncclMemAlloc(&none, 0));
	REQUIRE(!none);
	REQUIRE_OK(ncclMemAlloc(&buffer, BYTES));
	ranks_barrier(r);
	sum_in_window(g, buffer, 100000, 0, true);
	REQUIRE_OK(ncclCommRegister(g->comm, buffer, BYTES, &handle));
	REQUIRE_OK(ncclCommWindowRegister(g->comm, buffer, BYTES, &window, NCCL_WIN_COLL_SYMMETRIC));
	for (int i = 0; i < 2; i++) {
		sum_in_window(g, buffer, 5000, 0, i);
		sum_in_window(g, buffer, 400000, 0, i);
		sum_in_window(g, buffer, 400000, 4 * 77, i);
		sum_in_window(g, buffer, 400001, 1, i);
	}
	ranks_barrier(r);
	REQUIRE_OK(ncclCommWindowDeregister(g->comm, window));
	REQUIRE_IS(ncclCommWindowDeregister(g->comm, window), ncclInvalidArgument);
	sum_in_window(g, buffer, 400000, 0, true);
	REQUIRE_OK(ncclCommDeregister(g->comm, handle));
	ranks_barrier(r);
	REQUIRE_OK(ncclMemFree(buffer));
	ranks_barrier(r);
}

static void memory_of_the_librarys_own_registers_and_makes_windows(void **state)
{
	(void)state;
	gpu_everywhere(memory_and_windows, 2);
	struct gpu_options o = { .nranks = 4, .ndevices = 4 };
	assert_true(gpu_run(&o, memory_and_windows, NULL));
}

/* Windows promise the same of all ranks' inputs; where a reduce-scatter's result goes is each rank's own affair. */
static void scatter_to_anywhere(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	enum { BYTES = 1 << 20, PART = 30001 };
	void *buffer;
	ncclWindow_t window;
	uint8_t result[PART * 4 + 16];
	REQUIRE_OK(ncclMemAlloc(&buffer, BYTES));
	CUdeviceptr out = gpu_take(g, sizeof(result), 0);
	REQUIRE_OK(ncclCommWindowRegister(g->comm, buffer, BYTES, &window, NCCL_WIN_COLL_SYMMETRIC));
	static const struct { ncclDataType_t type; size_t bytes; } types[] = { { ncclUint8, 1 }, { ncclInt32, 4 } };
	for (int late = 0; late < r->nranks + 1; late++)
		for (int t = 0; t < 2; t++) {
			/* Of a row of calls each rank's is odd in another one, in the last all are. Blocks are whole vectors, or the window is of no use. */
			size_t count = PART / 16 * 16, skew = r->rank == late || late == r->nranks ? types[t].bytes : 0;
			gpu_fill(g, out, 0xee, sizeof(result));
			if (types[t].bytes == 1) CUDA_OK(MemsetD8Async((CUdeviceptr)(uintptr_t)buffer, (unsigned char)(r->rank + 1), count * (size_t)r->nranks, g->streams[0]));
			else CUDA_OK(MemsetD32Async((CUdeviceptr)(uintptr_t)buffer, (unsigned)r->rank + 1, count * (size_t)r->nranks, g->streams[0]));
			REQUIRE_OK(ncclReduceScatter(buffer, GPU_PTR(out + skew), count, types[t].type, ncclSum, g->comm, GPU_STREAM(g, 0)));
			gpu_get(g, result, out, count * types[t].bytes + 16);
			for (size_t i = 0; i < count * types[t].bytes + 16; i++) {
				bool inside = i >= skew && i < skew + count * types[t].bytes;
				REQUIRE(result[i] == (!inside ? 0xee : (i - skew) % types[t].bytes ? 0 : r->nranks * (r->nranks + 1) / 2));
			}
		}
	ranks_barrier(r);
	REQUIRE_OK(ncclCommWindowDeregister(g->comm, window));
	ranks_barrier(r);
	REQUIRE_OK(ncclMemFree(buffer));
	ranks_barrier(r);
	gpu_reset(g);
}

static void a_window_is_scattered_to_any_place_of_each_rank(void **state)
{
	(void)state;
	for (int n = 2; n <= 3; n++) {
		struct gpu_options o = { .nranks = n, .ndevices = n, .timeout_s = 60, .env = { "TELPHER_CUDA_TABLE=window=1K" } };
		assert_true(gpu_run(&o, scatter_to_anywhere, NULL));
	}
}

/* Who breaks a window's promise runs other kernels than the others: that is told, not waited for. In rank 0 the output is no window. */
static void await_error(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	ncclResult_t error = ncclSuccess;
	for (uint64_t end = ranks_now_ms() + ranks_patience_ms(20000); error == ncclSuccess; usleep(2000)) {
		REQUIRE_OK(ncclCommGetAsyncError(g->comm, &error));
		REQUIRE(ranks_now_ms() < end);
	}
	REQUIRE(error == ncclInvalidUsage || error == ncclRemoteError);
}

static void give_up(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	gpu_sync(g, 1);
	ranks_barrier(r);
	REQUIRE_OK(ncclCommAbort(g->comm));
	g->comm = NULL;
}

static void break_promise(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	enum { BYTES = 1 << 20, COUNT = 100000 };
	void *buffer;
	ncclWindow_t window;
	REQUIRE_OK(ncclMemAlloc(&buffer, BYTES));
	REQUIRE_OK(ncclCommWindowRegister(g->comm, buffer, BYTES, &window, NCCL_WIN_COLL_SYMMETRIC));
	REQUIRE_OK(ncclAllReduce(buffer, buffer, COUNT, ncclFloat32, ncclSum, g->comm, GPU_STREAM(g, 1)));
	gpu_sync(g, 1);
	REQUIRE_OK(ncclAllReduce(buffer, r->rank ? buffer : GPU_PTR(gpu_take(g, COUNT * 4, 0)), COUNT, ncclFloat32, ncclSum, g->comm, GPU_STREAM(g, 1)));
	await_error(g);
	REQUIRE_ERROR_HAS("not in windows");
	give_up(g);
}

static void a_broken_promise_of_windows_is_an_error(void **state)
{
	(void)state;
	struct gpu_options o = { .nranks = 2, .ndevices = 2, .timeout_s = 60, .env = { "TELPHER_CUDA_TABLE=window=1K" } };
	assert_true(gpu_run(&o, break_promise, NULL));
}

/* In windows all the same, but the last rank's elsewhere. */
enum elsewhere { INPUT, OUTPUT, SCATTERED, IN_OTHER_WINDOW, IN_A_GRAPH, COUNTS, ELSEWHERES };

static void lie_elsewhere(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	enum { BYTES = 1 << 20, COUNT = 20000, FAR = 524288 };
	const enum elsewhere how = *(const enum elsewhere *)g->arg;
	const bool odd = r->rank == r->nranks - 1;
	char *buffers[2];
	ncclWindow_t windows[2];
	for (int i = 0; i < 2; i++) {
		REQUIRE_OK(ncclMemAlloc((void **)&buffers[i], BYTES));
		REQUIRE_OK(ncclCommWindowRegister(g->comm, buffers[i], BYTES, &windows[i], NCCL_WIN_COLL_SYMMETRIC));
	}
	char *in = buffers[how == IN_OTHER_WINDOW && odd] + (odd && how != OUTPUT && how != IN_OTHER_WINDOW && how != COUNTS ? 4096 : 0);
	char *out = buffers[0] + FAR + (how == OUTPUT && odd ? 1234 * 16 : 0);
	/* Made once as it should be, so that it is a call again. */
	for (int turn = 0; turn < 2; turn++) {
		const size_t count = turn && odd && how == COUNTS ? COUNT - 16 : COUNT;
		CUgraphExec graph = NULL;
		if (turn && how == IN_A_GRAPH) CUDA_OK(StreamBeginCapture(g->streams[1], CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
		if (how == SCATTERED) REQUIRE_OK(ncclReduceScatter(turn ? in : buffers[0], GPU_PTR(gpu_take(g, COUNT * 4, 0)), COUNT, ncclFloat32, ncclSum, g->comm, GPU_STREAM(g, 1)));
		else REQUIRE_OK(ncclAllReduce(turn ? in : buffers[0], turn ? out : buffers[0] + FAR, count, ncclFloat32, ncclSum, g->comm, GPU_STREAM(g, 1)));
		if (turn && how == IN_A_GRAPH) CUDA_OK(GraphLaunch(graph = gpu_end_capture(g, 1), g->streams[1]));
		if (!turn) gpu_sync(g, 1);
	}
	await_error(g);
	switch (how) {
	case INPUT: case SCATTERED: case IN_A_GRAPH: REQUIRE_ERROR_HAS("rank 0's input lies at 0 of window 0, rank 1's at 4096 of window 0"); break;
	case OUTPUT: REQUIRE_ERROR_HAS("rank 0's output lies at 524288 of window 0, rank 1's at 544032 of window 0"); break;
	case IN_OTHER_WINDOW: REQUIRE_ERROR_HAS("rank 0's input lies at 0 of window 0, rank 1's at 0 of window 1"); break;
	default: REQUIRE_ERROR_HAS("count 19984");
	}
	give_up(g);
}

static void buffers_elsewhere_in_windows_than_promised_are_an_error(void **state)
{
	(void)state;
	for (enum elsewhere how = 0; how < ELSEWHERES; how++)
		for (int threads = 0; threads < 2; threads++) {
			struct gpu_options o = { .nranks = 2, .threads = threads, .ndevices = 2, .timeout_s = 60, .env = { "TELPHER_CUDA_TABLE=window=1K" } };
			assert_true(gpu_run(&o, lie_elsewhere, &how));
		}
}

/* A call again, at a place of the window where it doesn't run as the last one: ranks agree, whether a call is one again for them or in a group. */
static void call_at_another_place(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	enum { BYTES = 1 << 20, COUNT = 100000 };
	char *buffer;
	ncclWindow_t window;
	REQUIRE_OK(ncclMemAlloc((void **)&buffer, BYTES));
	REQUIRE_OK(ncclCommWindowRegister(g->comm, buffer, BYTES, &window, NCCL_WIN_COLL_SYMMETRIC));
	for (int i = 0; i < 2; i++) REQUIRE_OK(ncclAllReduce(buffer, buffer, COUNT, ncclFloat32, ncclSum, g->comm, GPU_STREAM(g, 1)));
	if (r->rank) REQUIRE_OK(ncclGroupStart());
	REQUIRE_OK(ncclAllReduce(buffer + 4, buffer + 4, COUNT, ncclFloat32, ncclSum, g->comm, GPU_STREAM(g, 1)));
	if (r->rank) REQUIRE_OK(ncclGroupEnd());
	gpu_sync(g, 1);
	ranks_barrier(r);
	/* A rank that waits compares the last calls before it looks who has left: were they not the same, it would say so. */
	if (r->rank) {
		REQUIRE_OK(ncclCommDestroy(g->comm));
		g->comm = NULL;
		ranks_barrier(r);
	} else {
		CUdeviceptr other = gpu_take(g, 1024, 0);
		ranks_barrier(r);
		REQUIRE_OK(ncclAllReduce(GPU_PTR(other), GPU_PTR(other), 256, ncclFloat32, ncclSum, g->comm, GPU_STREAM(g, 1)));
		await_error(g);
		REQUIRE_ERROR_HAS("has left the communicator after 3 calls");
		gpu_sync(g, 1);
		REQUIRE_OK(ncclCommAbort(g->comm));
		g->comm = NULL;
	}
	ranks_barrier(r);
	REQUIRE_OK(ncclMemFree(buffer));
	ranks_barrier(r);
}

static void a_call_again_elsewhere_in_a_window_is_the_same_call_on_all_ranks(void **state)
{
	(void)state;
	struct gpu_options o = { .nranks = 2, .ndevices = 2, .timeout_s = 60, .env = { "TELPHER_CUDA_TABLE=window=1K" } };
	assert_true(gpu_run(&o, call_at_another_place, NULL));
}

/* All ranks meet for each; in a group one after the other. */
static void windows_of_a_group(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	enum { WINDOWS = 4, BYTES = 1 << 16 };
	void *buffers[WINDOWS];
	ncclWindow_t windows[WINDOWS] = { NULL };
	for (int i = 0; i < WINDOWS; i++) REQUIRE_OK(ncclMemAlloc(&buffers[i], BYTES));
	for (int turn = 0; turn < 10; turn++) {
		REQUIRE_OK(ncclGroupStart());
		for (int i = 0; i < WINDOWS; i++) REQUIRE_OK(ncclCommWindowRegister(g->comm, buffers[i], BYTES, &windows[i], NCCL_WIN_COLL_SYMMETRIC));
		REQUIRE_OK(ncclGroupEnd());
		REQUIRE_OK(ncclAllReduce(buffers[turn % WINDOWS], buffers[(turn + 1) % WINDOWS], BYTES / 4, ncclInt32, ncclSum, g->comm, GPU_STREAM(g, 1)));
		gpu_sync(g, 1);
		ranks_barrier(r);
		for (int i = 0; i < WINDOWS; i++) REQUIRE_OK(ncclCommWindowDeregister(g->comm, windows[i]));
		ranks_barrier(r);
	}
	for (int i = 0; i < WINDOWS; i++) REQUIRE_OK(ncclMemFree(buffers[i]));
}

static void windows_may_be_made_in_a_group(void **state)
{
	(void)state;
	struct gpu_options o = { .nranks = 2, .ndevices = 2, .timeout_s = 60, .env = { "TELPHER_CUDA_TABLE=window=1K" } };
	assert_true(gpu_run(&o, windows_of_a_group, NULL));
}

static void count_memory(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	size_t before, after, total;
	gpu_fill(g, gpu_take(g, 4, 0), 0, 4);
	CUDA_OK(MemGetInfo(&before, &total));
	REQUIRE_OK(ncclCommInitRank(&g->comm, r->nranks, r->id, r->rank));
	CUdeviceptr one = gpu_take(g, 64 << 10, 0);
	REQUIRE_OK(ncclAllReduce(GPU_PTR(one), GPU_PTR(one), 16 << 10, ncclFloat, ncclSum, g->comm, GPU_STREAM(g, 1)));
	gpu_sync(g, 1);
	CUDA_OK(MemGetInfo(&after, &total));
	if (getenv("SHOW_MEMORY")) printf("%d ranks: %.1f MB\n", r->nranks, (double)(before - after) / (1 << 20));
	REQUIRE(before - after < (size_t)60 << 20);
}

/* As many channels as there can be, and pipes where they are used unasked. */
static void a_communicator_takes_less_than_60_mb_of_a_gpu(void **state)
{
	(void)state;
	for (int n = 2; n <= 4; n += 2) {
		struct gpu_options o = { .nranks = n, .ndevices = n, .no_comm = true, .env = { "FAKE_CUDA_SMS=132", "TELPHER_LL128=on" } };
		if (gpu_fake_here()) assert_true(gpu_run(&o, count_memory, NULL));
	}
}

int main(void)
{
	gpu_need();
	const struct CMUnitTest tests[] = { cmocka_unit_test(memory_of_the_librarys_own_registers_and_makes_windows),
		cmocka_unit_test(a_window_is_scattered_to_any_place_of_each_rank), cmocka_unit_test(a_broken_promise_of_windows_is_an_error),
		cmocka_unit_test(buffers_elsewhere_in_windows_than_promised_are_an_error),
		cmocka_unit_test(windows_may_be_made_in_a_group),
		cmocka_unit_test(a_call_again_elsewhere_in_a_window_is_the_same_call_on_all_ranks),
		cmocka_unit_test(a_communicator_takes_less_than_60_mb_of_a_gpu) };
	return cmocka_run_group_tests(tests, NULL, NULL);
}

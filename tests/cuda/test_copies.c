/* Collectives into symmetric windows by copy engines: results, order among streams, graphs and other collectives, and their ends. The rank's
 * whole pool is a window, so that operations drawn at random lie in it, at the same offsets on all ranks. */
#include "cuda/helper_ops.h"

#define ALL_SIZES "NCCL_CTA_POLICY=ZERO"
enum { PATIENCE_MS = 20000, N = 3 };

/* Calls of this process for copies that don't name their direction: the tests' own do. */
static long long copies_so_far(void) { return gpu_count("copies"); }
#define BY_COPIES(before) do { if (gpu_is_fake()) REQUIRE(copies_so_far() > (before)); } while (0)
#define NOT_BY_COPIES(before) do { if (gpu_is_fake()) REQUIRE(copies_so_far() == (before)); } while (0)

static ncclWindow_t open_window(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	ncclWindow_t window = NULL;
	ranks_barrier(r);
	REQUIRE_OK(ncclCommWindowRegister(g->comm, GPU_PTR(g->pool), g->pool_bytes, &window, NCCL_WIN_COLL_SYMMETRIC));
	REQUIRE(window);
	return window;
}

static struct gpu_op op_of(const struct gpu_rank *g, enum op_kind kind, size_t count, ncclDataType_t type, int seed)
{
	return (struct gpu_op){ .kind = kind, .rank = g->r->rank, .nranks = g->r->nranks, .count = count, .type = type, .seed = (uint64_t)seed };
}

static const enum op_kind kinds[N] = { ALL_GATHER, ALL_TO_ALL, BROADCAST };

/* ---- results ---- */

static void any_shape(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	static const size_t counts[] = { 0, 1, 3, 513, 30001 };
	open_window(g);
	for (int i = 0; i < 2 * N * 5; i++) {
		struct gpu_op o = op_of(g, kinds[i % N], counts[i / N % 5], i % 2 ? ncclUint8 : ncclFloat32, i);
		o.in_place = i >= N * 5 && o.kind != ALL_TO_ALL;
		o.root = i % r->nranks;
		o.skew_recv = i % 7;
		o.skew_send = i % 4;
		long long before = copies_so_far();
		op_run(g, &o, g->comm, i % GPU_STREAMS);
		if (o.count && r->nranks > 1 && o.kind != BROADCAST) BY_COPIES(before);
	}
	ranks_barrier(r);
}

/* A block of 4 MB and more that stays is copied beside the others, a broadcast goes in slices. */
static void large(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	open_window(g);
	for (int i = 0; i < N; i++) {
		struct gpu_op o = op_of(g, kinds[i], ((size_t)1 << 19) + 77, ncclFloat64, i + 3);
		o.root = r->nranks - 1;
		op_run(g, &o, g->comm, i);
	}
	ranks_barrier(r);
}

struct way { int nranks; bool threads; int ndevices; const char *env[3]; size_t pool_bytes; };

static void run_way(gpu_body body, const struct way *w)
{
	struct gpu_options o = { .nranks = w->nranks, .threads = w->threads, .ndevices = w->ndevices, .pool_bytes = w->pool_bytes,
		.env = { ALL_SIZES, w->env[0], w->env[1], w->env[2] } };
	assert_true(gpu_run(&o, body, NULL));
}

static void everywhere(gpu_body body)
{
	static const struct way ways[] = {
		{ 2, false, 1, { NULL }, 0 }, { 3, true, 1, { NULL }, 0 }, { 2, true, 2, { "TELPHER_COPY_BATCH=0" }, 0 },
		{ 4, false, 4, { "TELPHER_CUDA_TABLE=two_step_from=1", "TELPHER_COPY_STREAMS=2" }, 0 },
		{ 3, false, 3, { "FAKE_CUDA_VMM=0", "TELPHER_COPY_STREAMS=8", "TELPHER_COPY_BATCH=0" }, 0 },
	};
	for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++) run_way(body, &ways[i]);
}

static void blocks_of_any_size_and_place_arrive(void **state) { (void)state; everywhere(any_shape); }

static void large_blocks_arrive(void **state)
{
	static const struct way ways[] = { { 2, false, 2, { NULL }, 32 << 20 }, { 3, true, 3, { "TELPHER_COPY_STREAMS=2", "TELPHER_COPY_BATCH=0" }, 40 << 20 },
		{ 3, false, 1, { NULL }, 40 << 20 } };
	(void)state;
	for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++) run_way(large, &ways[i]);
}

/* ---- order ---- */

static struct gpu_op draw_one(struct gpu_rank *g, uint64_t seed)
{
	struct random random = { seed };
	struct gpu_op o;
	draw_op(&random, g->r->nranks, &o);
	if (seed % 3) {
		o.kind = kinds[seed % N];
		o.in_place = o.in_place && o.kind != ALL_TO_ALL;
	}
	o.rank = g->r->rank;
	o.nranks = g->r->nranks;
	o.count %= 2000;
	return o;
}

/* All in a row, on all streams, some in groups, with what goes other ways in between. */
static void mixed(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	const char *text = getenv("TELPHER_RANDOM_SEED");
	uint64_t seed = text ? strtoull(text, NULL, 0) : 0;
	enum { OPS = 40 };
	struct gpu_op ops[OPS];
	open_window(g);
	for (int round = 0; round < 2; round++) {
		for (int i = 0; i < OPS; i++) {
			ops[i] = draw_one(g, seed + (uint64_t)(round * 1000 + i * 7 + 1));
			op_prepare(g, &ops[i]);
		}
		for (int i = 0; i < OPS; i++) {
			if (i % 8 == 0) REQUIRE_OK(ncclGroupStart());
			REQUIRE_OK(op_issue(&ops[i], g->comm, g->streams[i % 16 < 8 ? 0 : i * 5 % GPU_STREAMS]));
			if (i % 8 == 4) REQUIRE_OK(ncclGroupEnd());
		}
		for (int s = 0; s < GPU_STREAMS; s++) gpu_sync(g, s);
		for (int i = 0; i < OPS; i++) op_check(g, &ops[i]);
		gpu_reset(g);
	}
	ranks_barrier(r);
}

static void calls_mix_with_all_others_in_order(void **state) { (void)state; everywhere(mixed); }

/* Two graphs, launched on two streams with eager calls between, with new data each time. */
static void replayed(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	enum { OPS = 6 };
	struct gpu_op ops[2][OPS], eager;
	CUgraphExec execs[2];
	open_window(g);
	for (int k = 0; k < 2; k++) {
		for (int i = 0; i < OPS; i++) {
			ops[k][i] = draw_one(g, (uint64_t)(k * 100 + i * 5 + 2));
			op_prepare(g, &ops[k][i]);
		}
	}
	eager = op_of(g, ALL_GATHER, 999, ncclInt32, 4);
	op_prepare(g, &eager);
	for (int k = 0; k < 2; k++) {
		ranks_barrier(r);
		CUDA_OK(StreamBeginCapture(g->streams[k], k ? CU_STREAM_CAPTURE_MODE_RELAXED : CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
		if (k) REQUIRE_OK(ncclGroupStart());
		for (int i = 0; i < OPS; i++) REQUIRE_OK(op_issue(&ops[k][i], g->comm, g->streams[k]));
		if (k) REQUIRE_OK(ncclGroupEnd());
		execs[k] = gpu_end_capture(g, k);
	}
	ranks_barrier(r);
	for (int turn = 0; turn < 4; turn++) {
		for (int i = 0; i < 2 * OPS; i++) op_fill(g, &ops[i % 2][i / 2], (uint64_t)(turn * 50 + i));
		op_fill(g, &eager, (uint64_t)turn);
		CUDA_OK(GraphLaunch(execs[turn % 2], g->streams[0]));
		REQUIRE_OK(op_issue(&eager, g->comm, g->streams[turn % GPU_STREAMS]));
		CUDA_OK(GraphLaunch(execs[1 - turn % 2], g->streams[1]));
		for (int s = 0; s < GPU_STREAMS; s++) gpu_sync(g, s);
		for (int i = 0; i < 2 * OPS; i++) op_check(g, &ops[i % 2][i / 2]);
		op_check(g, &eager);
	}
	for (int k = 0; k < 2; k++) CUDA_OK(GraphExecDestroy(execs[k]));
	ranks_barrier(r);
}

static void graphs_replay_them(void **state) { (void)state; everywhere(replayed); }

/* The own block is a branch of the graph. */
static void large_in_a_graph(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	struct gpu_op ops[2];
	open_window(g);
	for (int i = 0; i < 2; i++) {
		ops[i] = op_of(g, kinds[i], ((size_t)1 << 19) + 5, ncclInt64, 0);
		op_prepare(g, &ops[i]);
	}
	ranks_barrier(r);
	CUDA_OK(StreamBeginCapture(g->streams[1], CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
	for (int i = 0; i < 2; i++) REQUIRE_OK(op_issue(&ops[i], g->comm, g->streams[1]));
	CUgraphExec exec = gpu_end_capture(g, 1);
	for (int turn = 0; turn < 2; turn++) {
		for (int i = 0; i < 2; i++) op_fill(g, &ops[i], (uint64_t)(turn * 9 + i));
		CUDA_OK(GraphLaunch(exec, g->streams[2]));
		gpu_sync(g, 2);
		for (int i = 0; i < 2; i++) op_check(g, &ops[i]);
	}
	CUDA_OK(GraphExecDestroy(exec));
	ranks_barrier(r);
}

static void graphs_replay_large_blocks(void **state)
{
	static const struct way way = { 2, false, 2, { NULL }, 64 << 20 };
	(void)state;
	run_way(large_in_a_graph, &way);
}

static void default_streams(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	CUstream streams[3] = { NULL, CU_STREAM_LEGACY, CU_STREAM_PER_THREAD };
	open_window(g);
	for (int i = 0; i < 9; i++) {
		struct gpu_op o = op_of(g, kinds[i / 3], 5000, ncclInt32, i);
		op_prepare(g, &o);
		REQUIRE_OK(op_issue(&o, g->comm, streams[i % 3]));
		CUDA_OK(StreamSynchronize(streams[i % 3]));
		op_check(g, &o);
		gpu_reset(g);
	}
	ranks_barrier(r);
}

static void default_streams_are_as_good(void **state)
{
	static const struct way ways[] = { { 2, false, 1, { NULL }, 0 }, { 3, false, 3, { "TELPHER_COPY_STREAMS=2" }, 0 }, { 2, true, 2, { NULL }, 0 } };
	(void)state;
	for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++) {
		/* Threads on one GPU share its legacy stream. */
		if (!ways[i].threads || gpu_fake_here()) run_way(default_streams, &ways[i]);
	}
}

/* Ranks of one thread: nothing waits before all have been given their part. */
static void one_thread(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	enum { RANKS = 4, BYTES = 1 << 16, BLOCK = 3001 };
	ncclComm_t comms[RANKS];
	ncclWindow_t windows[RANKS];
	CUstream streams[RANKS];
	int devices[RANKS];
	void *buffers[RANKS];
	static unsigned char host[BYTES];
	for (int i = 0; i < RANKS; i++) {
		devices[i] = i % g->ndevices;
		gpu_context(devices[i]);
		CUDA_OK(StreamCreate(&streams[i], CU_STREAM_NON_BLOCKING));
		REQUIRE_OK(ncclMemAlloc(&buffers[i], BYTES));
	}
	REQUIRE_OK(ncclCommInitAll(comms, RANKS, devices));
	REQUIRE_OK(ncclGroupStart());
	for (int i = 0; i < RANKS; i++) REQUIRE_OK(ncclCommWindowRegister(comms[i], buffers[i], BYTES, &windows[i], NCCL_WIN_COLL_SYMMETRIC));
	REQUIRE_OK(ncclGroupEnd());
	long long before = copies_so_far();
	for (int turn = 0; turn < 3; turn++) {
		for (int i = 0; i < RANKS; i++) {
			gpu_context(devices[i]);
			CUDA_OK(MemsetD8Async((CUdeviceptr)(uintptr_t)buffers[i], (unsigned char)(0x10 * turn + i), BYTES, streams[i]));
		}
		REQUIRE_OK(ncclGroupStart());
		for (int i = 0; i < RANKS; i++) {
			char *at = buffers[i];
			REQUIRE_OK(ncclAllGather(at + (size_t)i * BLOCK, at, BLOCK, ncclUint8, comms[i], (cudaStream_t)streams[i]));
			REQUIRE_OK(ncclBroadcast(at + RANKS * BLOCK, at + RANKS * BLOCK, BLOCK, ncclUint8, turn, comms[i], (cudaStream_t)streams[i]));
		}
		REQUIRE_OK(ncclGroupEnd());
		for (int i = 0; i < RANKS; i++) {
			CUDA_OK(StreamSynchronize(streams[i]));
			CUDA_OK(MemcpyDtoH(host, (CUdeviceptr)(uintptr_t)buffers[i], BYTES));
			for (int k = 0; k < (RANKS + 1) * BLOCK; k++) REQUIRE(host[k] == 0x10 * turn + (k < RANKS * BLOCK ? k / BLOCK : turn));
			REQUIRE(host[(RANKS + 1) * BLOCK] == 0x10 * turn + i);
		}
	}
	BY_COPIES(before);
	for (int i = 0; i < RANKS; i++) REQUIRE_OK(ncclCommDestroy(comms[i]));
	for (int i = 0; i < RANKS; i++) REQUIRE_OK(ncclMemFree(buffers[i]));
}

static void one_thread_serves_all_ranks(void **state)
{
	(void)state;
	for (int ndevices = 1; ndevices <= 4; ndevices *= 2) {
		struct gpu_options o = { .nranks = 1, .ndevices = ndevices, .no_comm = true, .env = { ALL_SIZES } };
		assert_true(gpu_run(&o, one_thread, NULL));
	}
}

/* ---- which calls ---- */

static void chosen_by_size(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	struct gpu_op small = op_of(g, ALL_GATHER, 1000, ncclUint8, 1), large_one = op_of(g, ALL_GATHER, 10000, ncclUint8, 2), root = op_of(g, BROADCAST, 70000, ncclUint8, 3);
	ncclWindow_t window = open_window(g);
	long long before = copies_so_far();
	op_run(g, &small, g->comm, 0);
	root.count = 60000;
	op_run(g, &root, g->comm, 0);
	NOT_BY_COPIES(before);
	op_run(g, &large_one, g->comm, 1);
	BY_COPIES(before);
	before = copies_so_far();
	root.count = 70000;
	root.root = r->rank;            /* everybody's own, one after the other */
	for (root.root = 0; root.root < r->nranks; root.root++) op_run(g, &root, g->comm, 1);
	BY_COPIES(before);
	/* Other memory, and the window's once it is no window any more. */
	ranks_barrier(r);
	REQUIRE_OK(ncclCommWindowDeregister(g->comm, window));
	before = copies_so_far();
	op_run(g, &large_one, g->comm, 2);
	NOT_BY_COPIES(before);
	window = open_window(g);
	op_run(g, &large_one, g->comm, 2);
	BY_COPIES(before);
	ranks_barrier(r);
}

static void size_and_window_decide(void **state)
{
	struct gpu_options o = { .nranks = 2, .ndevices = 2, .env = { "TELPHER_CUDA_TABLE=copies=8K,copies_rooted=64K" } };
	(void)state;
	assert_true(gpu_run(&o, chosen_by_size, NULL));
}

static void asked_for(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
	config.CTAPolicy = NCCL_CTA_POLICY_ZERO;
	REQUIRE_OK(ncclCommInitRankConfig(&g->comm, r->nranks, r->id, r->rank, &config));
	struct gpu_op o = op_of(g, ALL_GATHER, 100, ncclUint8, 1);
	open_window(g);
	long long before = copies_so_far();
	op_run(g, &o, g->comm, 0);
	if (!getenv("NCCL_CTA_POLICY")) BY_COPIES(before);
	else NOT_BY_COPIES(before);
	ranks_barrier(r);
}

static void refused(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	REQUIRE_IS(ncclCommInitRank(&g->comm, r->nranks, r->id, r->rank), ncclInvalidUsage);
	REQUIRE_ERROR_HAS("NCCL_CTA_POLICY: 'ZERO|LITTLE' can't be read at 'LITTLE'");
	g->comm = NULL;
}

static void the_policy_asks_for_them(void **state)
{
	struct gpu_options o = { .nranks = 2, .no_comm = true };
	(void)state;
	assert_true(gpu_run(&o, asked_for, NULL));
	o.env[0] = "NCCL_CTA_POLICY=EFFICIENCY|0";
	assert_true(gpu_run(&o, asked_for, NULL));
	o.env[0] = "NCCL_CTA_POLICY=ZERO|LITTLE";
	assert_true(gpu_run(&o, refused, NULL));
}

/* ---- ends ---- */

static ncclResult_t wait_for_error(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	ncclResult_t state = ncclSuccess;
	uint64_t end = ranks_now_ms() + (uint64_t)ranks_patience_ms(PATIENCE_MS);
	while (state == ncclSuccess && ranks_now_ms() < end) {
		REQUIRE_OK(ncclCommGetAsyncError(g->comm, &state));
		usleep(1000);
	}
	return state;
}
#define SAYS(text) do { \
	if (!strstr(ncclGetLastError(g->comm), (text))) { \
		fprintf(stderr, "%s:%d: rank %d: '%s' isn't in: %s\n", __FILE__, __LINE__, r->rank, (text), ncclGetLastError(g->comm)); \
		_exit(9); \
	} \
} while (0)

static void give_up(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	gpu_sync(g, 1);
	ranks_barrier(r);
	REQUIRE_OK(ncclCommAbort(g->comm));
	g->comm = NULL;
}

static void places_differ(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	char *at = GPU_PTR(g->pool);
	open_window(g);
	ncclResult_t result = ncclAllGather(at, at + (r->rank ? 65536 : 131072), 100, ncclUint8, g->comm, GPU_STREAM(g, 1));
	REQUIRE(result == ncclSuccess || result == ncclInvalidUsage || result == ncclRemoteError);
	/* One sees it, the other may hear of that first. */
	result = wait_for_error(g);
	REQUIRE(result == ncclInvalidUsage || result == ncclRemoteError);
	/* Beside rank 0, whichever other one it was seen of. */
	SAYS("rank 0's output lies at 131072 of window 0, rank ");
	SAYS("'s at 65536 of window 0");
	give_up(g);
}

static void counts_differ(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	char *at = GPU_PTR(g->pool);
	open_window(g);
	ncclResult_t result = ncclAllGather(at, at + 65536, r->rank ? 1000 : 2000, ncclUint8, g->comm, GPU_STREAM(g, 1));
	REQUIRE(result == ncclSuccess || result == ncclInvalidUsage);
	REQUIRE_IS(wait_for_error(g), ncclInvalidUsage);
	SAYS("count 2000");
	SAYS("count 1000");
	give_up(g);
}

static void collectives_differ(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	char *at = GPU_PTR(g->pool);
	open_window(g);
	ncclResult_t result = r->rank ? ncclBroadcast(at, at, 1000, ncclUint8, 1, g->comm, GPU_STREAM(g, 1))
		: ncclAllReduce(at, at, 1000, ncclUint8, ncclSum, g->comm, GPU_STREAM(g, 1));
	REQUIRE(result == ncclSuccess || result == ncclInvalidUsage);
	REQUIRE_IS(wait_for_error(g), ncclInvalidUsage);
	SAYS("AllReduce");
	SAYS("Broadcast");
	give_up(g);
}

static void calls_that_differ_are_named(void **state)
{
	static const struct way ways[] = { { 2, false, 1, { NULL }, 0 }, { 3, true, 3, { NULL }, 0 } };
	(void)state;
	for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++) {
		run_way(places_differ, &ways[i]);
		run_way(i ? counts_differ : collectives_differ, &ways[i]);
	}
}

/* Rank 0 comes last, and never; nobody says that it is done who isn't. */
static void aborted_while_it_waits(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	char *at = GPU_PTR(g->pool);
	open_window(g);
	struct gpu_op o = op_of(g, ALL_GATHER, 700, ncclUint8, 1);
	op_run(g, &o, g->comm, 1);
	ranks_barrier(r);
	if (r->rank) {
		REQUIRE_OK(ncclAllGather(at, at + 65536, 1000, ncclUint8, g->comm, GPU_STREAM(g, 1)));
		REQUIRE_OK(ncclBroadcast(at, at, 1000, ncclUint8, r->nranks - 1, g->comm, GPU_STREAM(g, 2)));
		usleep(20000);
		CUDA_IS(StreamQuery(g->streams[1]), CUDA_ERROR_NOT_READY);
	}
	/* Before anybody aborts, which ends what the others wait for. */
	ranks_barrier(r);
	if (r->rank) {
		REQUIRE_OK(ncclCommAbort(g->comm));
		gpu_sync(g, 1);
		gpu_sync(g, 2);
	}
	ranks_barrier(r);
	if (!r->rank) {
		ncclResult_t result = ncclAllGather(at, at + 65536, 1000, ncclUint8, g->comm, GPU_STREAM(g, 1));
		REQUIRE(result == ncclSuccess || result == ncclRemoteError);
		REQUIRE_IS(wait_for_error(g), ncclRemoteError);
		gpu_sync(g, 1);
		REQUIRE_OK(ncclCommAbort(g->comm));
	}
	g->comm = NULL;
}

static void abort_ends_what_waits(void **state)
{
	static const struct way ways[] = { { 2, false, 1, { NULL }, 0 }, { 3, true, 1, { NULL }, 0 }, { 3, false, 3, { NULL }, 0 } };
	(void)state;
	for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++) run_way(aborted_while_it_waits, &ways[i]);
}

static void one_dies(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	char *at = GPU_PTR(g->pool);
	open_window(g);
	if (r->rank == 1) {
		while (r->shared->word[0] < r->nranks - 1) usleep(1000);
		kill(getpid(), SIGKILL);
	}
	REQUIRE_OK(ncclAllGather(at, at + 65536, 1000, ncclUint8, g->comm, GPU_STREAM(g, 1)));
	r->shared->word[0]++;
	REQUIRE_IS(wait_for_error(g), ncclRemoteError);
	SAYS("rank 1");
	gpu_sync(g, 1);
	REQUIRE_OK(ncclCommAbort(g->comm));
	g->comm = NULL;
}

static void a_peers_death_ends_them_and_is_told(void **state)
{
	struct gpu_options o = { .nranks = 3, .ndevices = 3, .may_die = 2, .env = { ALL_SIZES } };
	(void)state;
	assert_true(gpu_run(&o, one_dies, NULL));
}

static void a_copy_fails(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	char *at = GPU_PTR(g->pool), who[80];
	const char *batch = getenv("TELPHER_COPY_BATCH");
	open_window(g);
	ncclResult_t result = ncclSuccess;
	snprintf(who, sizeof(who), "rank %d: CUDA call cuMemcpy%s on device %d", r->rank, batch ? "Async" : "BatchAsync", g->device);
	for (int i = 0; i < 100 && result == ncclSuccess; i++) result = ncclAllGather(at, at + 65536, 1000, ncclUint8, g->comm, GPU_STREAM(g, 1));
	REQUIRE(result == ncclUnhandledCudaError || result == ncclRemoteError);
	if (result == ncclUnhandledCudaError) REQUIRE_ERROR_HAS(who);
	REQUIRE_ERROR_HAS("CUDA_ERROR_INVALID_VALUE");
	REQUIRE_IS(wait_for_error(g), result);
	give_up(g);
}

static void an_error_of_cuda_names_call_device_and_rank(void **state)
{
	struct gpu_options o = { .nranks = 2, .ndevices = 2, .env = { ALL_SIZES, "FAKE_CUDA_FAIL=cuMemcpyBatchAsync_v2:9:1" } };
	(void)state;
	if (!gpu_fake_here()) skip();
	assert_true(gpu_run(&o, a_copy_fails, NULL));
	o.env[1] = "FAKE_CUDA_FAIL=cuMemcpyAsync:9:1";
	o.env[2] = "TELPHER_COPY_BATCH=0";
	assert_true(gpu_run(&o, a_copy_fails, NULL));
}

int main(int argc, char **argv)
{
	gpu_need();
	if (argc > 1) cmocka_set_test_filter(argv[1]);
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(blocks_of_any_size_and_place_arrive), cmocka_unit_test(large_blocks_arrive), cmocka_unit_test(calls_mix_with_all_others_in_order),
		cmocka_unit_test(graphs_replay_them), cmocka_unit_test(graphs_replay_large_blocks), cmocka_unit_test(default_streams_are_as_good),
		cmocka_unit_test(one_thread_serves_all_ranks), cmocka_unit_test(size_and_window_decide), cmocka_unit_test(the_policy_asks_for_them),
		cmocka_unit_test(calls_that_differ_are_named), cmocka_unit_test(abort_ends_what_waits), cmocka_unit_test(a_peers_death_ends_them_and_is_told),
		cmocka_unit_test(an_error_of_cuda_names_call_device_and_rank),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

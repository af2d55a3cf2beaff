/* The lives of communicators of GPU ranks: kernels that would spin for ever end when a rank aborts, dies, or calls something else; new
 * communicators come from old ones; what ends leaves nothing behind that others need. */
#include <pthread.h>
#include <stdatomic.h>

#include "cuda/helper_ops.h"

enum { COUNT = 1000, PATIENCE_MS = 15000 };

/* The last error is the process's, so ranks that are threads may find each other's. */
#define SAYS(text) do { if (r->nranks == 1 || r->shared->pids[1]) REQUIRE_ERROR_HAS(text); } while (0)

static ncclComm_t join(struct gpu_rank *g, const ncclConfig_t *config)
{
	struct ranks *r = g->r;
	ncclComm_t comm = NULL;
	ncclUniqueId id;
	if (r->rank == 0) {
		REQUIRE_OK(ncclGetUniqueId(&id));
		memcpy(r->shared->bytes, &id, sizeof(id));
	}
	ranks_barrier(r);
	memcpy(&id, r->shared->bytes, sizeof(id));
	ncclResult_t result = ncclCommInitRankConfig(&comm, r->nranks, id, r->rank, (ncclConfig_t *)(uintptr_t)config);
	REQUIRE(result == ncclSuccess || result == ncclInProgress);
	ranks_barrier(r);
	return comm;
}

/* An all-reduce of all ranks of comm, checked. */
static void use(struct gpu_rank *g, ncclComm_t comm, int stream)
{
	struct ranks *r = g->r;
	struct gpu_op o = { .kind = ALL_REDUCE, .count = COUNT, .type = ncclFloat32, .op = ncclSum, .seed = 7 };
	REQUIRE_OK(ncclCommUserRank(comm, &o.rank));
	REQUIRE_OK(ncclCommCount(comm, &o.nranks));
	gpu_reset(g);
	op_run(g, &o, comm, stream);
}

static ncclResult_t launch(struct gpu_rank *g, ncclComm_t comm, size_t count, ncclRedOp_t op)
{
	gpu_reset(g);
	CUdeviceptr buffer = gpu_take(g, 1 << 20, 0);
	return ncclAllReduce(GPU_PTR(buffer), GPU_PTR(buffer), count, ncclFloat32, op, comm, GPU_STREAM(g, 1));
}

/* Until the communicator is in error; the error. */
static ncclResult_t wait_for_error(struct gpu_rank *g, ncclComm_t comm, int patience_ms)
{
	struct ranks *r = g->r;
	ncclResult_t error = ncclSuccess;
	uint64_t end = ranks_now_ms() + (uint64_t)ranks_patience_ms(patience_ms);
	while (error == ncclSuccess || error == ncclInProgress) {
		REQUIRE_OK(ncclCommGetAsyncError(comm, &error));
		REQUIRE(ranks_now_ms() < end);
		usleep(2000);
	}
	return error;
}

struct aborter { struct gpu_rank *g; ncclComm_t comm; };

static void *abort_soon(void *arg)
{
	struct aborter *a = arg;
	struct ranks *r = a->g->r;
	usleep(100000);
	REQUIRE_OK(ncclCommAbort(a->comm));
	return NULL;
}

/* ---- abort ---- */

static void abort_while_spinning(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	ncclComm_t comm = join(g, NULL);
	use(g, comm, 0);
	ranks_barrier(r);
	if (r->rank == 0) {
		pthread_t thread;
		struct aborter aborter = { g, comm };
		REQUIRE_OK(launch(g, comm, COUNT, ncclSum));
		REQUIRE(!pthread_create(&thread, NULL, abort_soon, &aborter));
		uint64_t start = ranks_now_ms();
		gpu_sync(g, 1);
		REQUIRE(ranks_now_ms() - start < (uint64_t)ranks_patience_ms(PATIENCE_MS));
		pthread_join(thread, NULL);
		REQUIRE_IS(launch(g, comm, COUNT, ncclSum), ncclInvalidArgument);
	} else {
		REQUIRE_IS(wait_for_error(g, comm, PATIENCE_MS), ncclRemoteError);
		SAYS("rank 0");
		REQUIRE_IS(launch(g, comm, COUNT, ncclSum), ncclRemoteError);
		REQUIRE_OK(ncclCommAbort(comm));
	}
	ranks_barrier(r);
	comm = join(g, NULL);
	use(g, comm, 2);
	REQUIRE_OK(ncclCommDestroy(comm));
}

static void abort_ends_kernels_that_spin(void **state)
{
	(void)state;
	gpu_everywhere(abort_while_spinning, 2);
}

/* ---- death ---- */

static void one_dies(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	use(g, g->comm, 0);
	ranks_barrier(r);
	if (r->rank == 1) {
		/* The others' kernels spin, or are about to. */
		while (atomic_load(&r->shared->word[0]) < r->nranks - 1) usleep(1000);
		kill(getpid(), SIGKILL);
	}
	REQUIRE_OK(launch(g, g->comm, COUNT, ncclSum));
	atomic_fetch_add(&r->shared->word[0], 1);
	uint64_t start = ranks_now_ms();
	gpu_sync(g, 1);
	REQUIRE(ranks_now_ms() - start < (uint64_t)ranks_patience_ms(PATIENCE_MS));
	REQUIRE_IS(wait_for_error(g, g->comm, PATIENCE_MS), ncclRemoteError);
	SAYS("rank 1");
	REQUIRE_OK(ncclCommAbort(g->comm));
	g->comm = NULL;
}

static void a_peers_death_ends_kernels_and_is_told(void **state)
{
	(void)state;
	for (int i = 0; i < 3; i++) {
		struct gpu_options o = { .nranks = 3, .ndevices = i == 1 ? 3 : 1, .nhosts = i == 2 ? 2 : 1, .may_die = 2 };
		assert_true(gpu_run(&o, one_dies, NULL));
	}
}

/* ---- calls that differ ---- */

static void counts_differ(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	use(g, g->comm, 0);
	ncclResult_t result = launch(g, g->comm, r->rank ? (size_t)COUNT : 2000, ncclSum);
	REQUIRE(result == ncclSuccess || result == ncclInvalidUsage);
	REQUIRE_IS(wait_for_error(g, g->comm, PATIENCE_MS), ncclInvalidUsage);
	SAYS("count 2000");
	SAYS("count 1000");
	gpu_sync(g, 1);
	ranks_barrier(r);
	REQUIRE_OK(ncclCommAbort(g->comm));
	g->comm = NULL;
}

static void collectives_differ(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	CUdeviceptr buffer = gpu_take(g, 1 << 16, 0);
	void *p = GPU_PTR(buffer);
	ncclResult_t result = r->rank ? ncclBroadcast(p, p, COUNT, ncclFloat32, 0, g->comm, GPU_STREAM(g, 1))
		: ncclAllReduce(p, p, COUNT, ncclFloat32, ncclSum, g->comm, GPU_STREAM(g, 1));
	REQUIRE(result == ncclSuccess || result == ncclInvalidUsage);
	REQUIRE_IS(wait_for_error(g, g->comm, PATIENCE_MS), ncclInvalidUsage);
	SAYS("AllReduce");
	SAYS("Broadcast");
	gpu_sync(g, 1);
	ranks_barrier(r);
	REQUIRE_OK(ncclCommAbort(g->comm));
	g->comm = NULL;
}

static void sizes_differ(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	const size_t *bytes = g->arg ? g->arg : (size_t[]){ 400, 800 };
	CUdeviceptr buffer = gpu_take(g, bytes[0] > bytes[1] ? bytes[0] : bytes[1], 0);
	ncclResult_t result = ncclSuccess;
	if (r->rank == 0) result = ncclSend(GPU_PTR(buffer), bytes[0], ncclInt8, 1, g->comm, GPU_STREAM(g, 1));
	else if (r->rank == 1) result = ncclRecv(GPU_PTR(buffer), bytes[1], ncclInt8, 0, g->comm, GPU_STREAM(g, 1));
	REQUIRE(result == ncclSuccess || result == (r->rank == 1 ? ncclInvalidUsage : ncclRemoteError));
	ncclResult_t wanted = wait_for_error(g, g->comm, PATIENCE_MS);
	REQUIRE(wanted == (r->rank == 1 ? ncclInvalidUsage : ncclRemoteError));
	gpu_sync(g, 1);
	ranks_barrier(r);
	REQUIRE_OK(ncclCommAbort(g->comm));
	g->comm = NULL;
}

static void one_never_calls_and_leaves(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	use(g, g->comm, 0);
	ranks_barrier(r);
	if (r->rank == 0) {
		/* It may hear of that before it calls. */
		ncclResult_t result = launch(g, g->comm, COUNT, ncclSum);
		REQUIRE(result == ncclSuccess || result == ncclRemoteError);
		REQUIRE_IS(wait_for_error(g, g->comm, PATIENCE_MS), ncclRemoteError);
		SAYS("left");
		gpu_sync(g, 1);
		REQUIRE_OK(ncclCommAbort(g->comm));
	} else {
		REQUIRE_OK(ncclCommDestroy(g->comm));
	}
	g->comm = NULL;
}

/* Large ones go through pipes; of some pairs one end alone thinks so. */
static void sizes_that_differ_are_seen_whichever_way_each_end_goes(void **state)
{
	(void)state;
	static const size_t bytes[][2] = { { 400, 12000 }, { 12000, 400 }, { 12000, 20000 }, { 400000, 12000 }, { 400000, 400004 }, { 0, 400000 }, { 400000, 0 },
		{ 1 << 24, 1 } };
	static const char *const tables[] = { "TELPHER_CUDA_TABLE=transfers=8K,pipes=2", "TELPHER_CUDA_TABLE=transfers=8K,offer=1,pipes=2" };
	for (size_t i = 0; i < 2 * sizeof(bytes) / sizeof(bytes[0]); i++) {
		struct gpu_options o = { .nranks = 2, .threads = i % 3 == 0, .pool_bytes = (size_t)17 << 20,
			.env = { "TELPHER_LL128=on", tables[i % 2] } };
		assert_true(gpu_run(&o, sizes_differ, (void *)(uintptr_t)bytes[i / 2]));
	}
}

static void calls_that_differ_are_named(void **state)
{
	(void)state;
	gpu_everywhere(counts_differ, 2);
	gpu_everywhere(collectives_differ, 3);
	gpu_everywhere(sizes_differ, 2);
}

static void a_rank_that_left_is_named(void **state)
{
	(void)state;
	struct gpu_options o = { .nranks = 2, .ndevices = 2 };
	assert_true(gpu_run(&o, one_never_calls_and_leaves, NULL));
}

/* ---- from old to new ---- */

static void split_and_use(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	ncclComm_t half, some;
	REQUIRE_OK(ncclCommSplit(g->comm, r->rank % 2, -r->rank, &half, NULL));
	use(g, half, 0);
	use(g, g->comm, 1);
	REQUIRE_OK(ncclCommSplit(g->comm, r->rank ? 3 : NCCL_SPLIT_NOCOLOR, 0, &some, NULL));
	REQUIRE(!some == (r->rank == 0));
	if (some) use(g, some, 2);
	REQUIRE_OK(ncclCommDestroy(half));
	use(g, g->comm, 0);
	if (some) REQUIRE_OK(ncclCommDestroy(some));
	ranks_barrier(r);
}

static void a_split_communicator_works_beside_its_parent(void **state)
{
	(void)state;
	gpu_everywhere(split_and_use, 4);
}

static void shrink_away_the_silent(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	ncclComm_t rest = NULL;
	int silent[1] = { r->nranks - 1 };
	use(g, g->comm, 0);
	ranks_barrier(r);
	if (r->rank != silent[0]) REQUIRE_OK(launch(g, g->comm, COUNT, ncclSum));
	ranks_barrier(r);
	if (r->rank != silent[0]) {
		REQUIRE_OK(ncclCommShrink(g->comm, silent, 1, &rest, NULL, NCCL_SHRINK_ABORT));
		gpu_sync(g, 1);
		use(g, rest, 2);
		REQUIRE_OK(ncclCommDestroy(rest));
	}
	ranks_barrier(r);
	REQUIRE_OK(ncclCommAbort(g->comm));
	g->comm = NULL;
}

static void what_spins_is_ended_and_the_rest_goes_on(void **state)
{
	(void)state;
	gpu_everywhere(shrink_away_the_silent, 3);
}

static void revoke_it(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	use(g, g->comm, 0);
	ranks_barrier(r);
	if (r->rank == 0) {
		REQUIRE_OK(launch(g, g->comm, COUNT, ncclSum));
		REQUIRE_OK(ncclCommRevoke(g->comm, NCCL_REVOKE_DEFAULT));
		gpu_sync(g, 1);
		REQUIRE_IS(launch(g, g->comm, COUNT, ncclSum), ncclInvalidUsage);
	} else {
		REQUIRE_IS(wait_for_error(g, g->comm, PATIENCE_MS), ncclRemoteError);
		SAYS("revoked");
	}
	ranks_barrier(r);
}

static void a_revoked_communicator_ends_and_refuses(void **state)
{
	(void)state;
	gpu_everywhere(revoke_it, 2);
}

/* ---- good ends ---- */

static void come_and_go(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	for (int i = 0; i < 8; i++) {
		ncclComm_t comm = join(g, NULL);
		for (int k = 0; k < 5; k++) REQUIRE_OK(launch(g, comm, (size_t)1 << (2 * k + i), ncclSum));
		/* Some are late; nobody waits, but for their own kernels. */
		if (r->rank == i % r->nranks) usleep(3000);
		if (i % 2) REQUIRE_OK(ncclCommFinalize(comm));
		REQUIRE_OK(ncclCommDestroy(comm));
		gpu_sync(g, 1);
	}
	ranks_barrier(r);
}

static void ranks_leave_when_they_like(void **state)
{
	(void)state;
	gpu_everywhere(come_and_go, 3);
}

static void destroy_before_the_graph(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	ncclComm_t comm = join(g, NULL);
	CUgraphExec exec;
	gpu_reset(g);
	CUdeviceptr buffer = gpu_take(g, 1 << 16, 0);
	CUDA_OK(StreamBeginCapture(g->streams[1], CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
	REQUIRE_OK(ncclAllReduce(GPU_PTR(buffer), GPU_PTR(buffer), COUNT, ncclFloat32, ncclSum, comm, GPU_STREAM(g, 1)));
	exec = gpu_end_capture(g, 1);
	CUDA_OK(GraphLaunch(exec, g->streams[1]));
	gpu_sync(g, 1);
	REQUIRE_OK(ncclCommDestroy(comm));
	ranks_barrier(r);
	CUDA_OK(GraphExecDestroy(exec));
	ranks_barrier(r);
	comm = join(g, NULL);
	use(g, comm, 0);
	REQUIRE_OK(ncclCommDestroy(comm));
}

static void a_graph_may_outlive_its_communicator(void **state)
{
	(void)state;
	gpu_everywhere(destroy_before_the_graph, 2);
}

/* ---- non-blocking ---- */

static void settle(struct gpu_rank *g, ncclComm_t comm)
{
	struct ranks *r = g->r;
	ncclResult_t state = ncclInProgress;
	uint64_t end = ranks_now_ms() + (uint64_t)ranks_patience_ms(20000);
	while (state == ncclInProgress) {
		REQUIRE_OK(ncclCommGetAsyncError(comm, &state));
		REQUIRE(ranks_now_ms() < end);
		usleep(500);
	}
	REQUIRE(state == ncclSuccess);
}

static void without_blocking(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
	config.blocking = 0;
	ncclComm_t comm = join(g, &config), half;
	settle(g, comm);
	ranks_barrier(r);
	use(g, comm, 0);
	ncclResult_t result = ncclCommSplit(comm, r->rank % 2, 0, &half, &config);
	REQUIRE(result == ncclSuccess || result == ncclInProgress);
	settle(g, half);
	use(g, half, 1);
	result = ncclCommFinalize(comm);
	REQUIRE(result == ncclSuccess || result == ncclInProgress);
	settle(g, comm);
	REQUIRE_OK(ncclCommDestroy(comm));
	REQUIRE_OK(ncclCommAbort(half));
	ranks_barrier(r);
}

static void nothing_blocks_that_need_not(void **state)
{
	(void)state;
	gpu_everywhere(without_blocking, 2);
}

/* ---- one thread, one GPU ---- */

static void all_of_one_thread(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	enum { N = 4 };
	ncclComm_t comms[N];
	CUstream streams[N];
	int devices[N], device;
	CUdeviceptr buffers[N];
	static float values[N][COUNT];
	for (int i = 0; i < N; i++) {
		devices[i] = i % g->ndevices;
		gpu_context(devices[i]);
		CUDA_OK(StreamCreate(&streams[i], CU_STREAM_NON_BLOCKING));
		CUDA_OK(MemAlloc(&buffers[i], sizeof(values[i])));
		for (int k = 0; k < COUNT; k++) values[i][k] = (float)(i + k);
		CUDA_OK(MemcpyHtoD(buffers[i], values[i], sizeof(values[i])));
	}
	gpu_context(0);
	REQUIRE_OK(ncclCommInitAll(comms, N, devices));
	for (int i = 0; i < N; i++) {
		REQUIRE_OK(ncclCommCuDevice(comms[i], &device));
		REQUIRE(device == devices[i]);
	}
	for (int turn = 0; turn < 3; turn++) {
		REQUIRE_OK(ncclGroupStart());
		for (int i = 0; i < N; i++)
			REQUIRE_OK(ncclAllReduce(GPU_PTR(buffers[i]), GPU_PTR(buffers[i]), COUNT, ncclFloat32, turn ? ncclMax : ncclSum, comms[i], (cudaStream_t)streams[i]));
		REQUIRE_OK(ncclGroupEnd());
	}
	for (int i = 0; i < N; i++) {
		CUDA_OK(StreamSynchronize(streams[i]));
		CUDA_OK(MemcpyDtoH(values[i], buffers[i], sizeof(values[i])));
		for (int k = 0; k < COUNT; k++) REQUIRE(values[i][k] == (float)(N * k + N * (N - 1) / 2));
	}
	for (int i = 0; i < N; i++) REQUIRE_OK(ncclCommDestroy(comms[i]));
}

static void one_thread_serves_all_ranks(void **state)
{
	(void)state;
	for (int ndevices = 1; ndevices <= 4; ndevices *= 2) {
		struct gpu_options o = { .nranks = 1, .ndevices = ndevices, .no_comm = true };
		assert_true(gpu_run(&o, all_of_one_thread, NULL));
	}
}

static void the_default_stream(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	struct gpu_op o = { .kind = ALL_REDUCE, .rank = r->rank, .nranks = r->nranks, .count = COUNT, .type = ncclInt32, .op = ncclSum, .seed = 3 };
	CUstream streams[3] = { NULL, CU_STREAM_LEGACY, CU_STREAM_PER_THREAD };
	for (int i = 0; i < 6; i++) {
		gpu_reset(g);
		op_prepare(g, &o);
		REQUIRE_OK(op_issue(&o, g->comm, streams[i % 3]));
		CUDA_OK(StreamSynchronize(streams[i % 3]));
		op_check(g, &o);
		use(g, g->comm, i % 3);
	}
}

static void ranks_with_gpus_or_processes_of_their_own_may_use_default_streams(void **state)
{
	(void)state;
	struct gpu_options o = { .nranks = 2 };
	assert_true(gpu_run(&o, the_default_stream, NULL));
	o.ndevices = 2;
	o.threads = true;
	assert_true(gpu_run(&o, the_default_stream, NULL));
}

static void refused_init(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	ncclComm_t comm;
	REQUIRE_IS(ncclCommInitRank(&comm, r->nranks, r->id, r->rank), ncclInvalidUsage);
	SAYS("CUDA_LAUNCH_BLOCKING");
}

static void blocking_launches_are_refused_at_init(void **state)
{
	(void)state;
	struct gpu_options o = { .nranks = 2, .threads = true, .no_comm = true, .env = { "CUDA_LAUNCH_BLOCKING=1" } };
	assert_true(gpu_run(&o, refused_init, NULL));
}

/* ---- errors of CUDA ---- */

static void a_launch_fails(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	char who[64];
	ncclResult_t result = ncclSuccess;
	snprintf(who, sizeof(who), "rank %d: CUDA call cuLaunchKernel on device %d", r->rank, g->device);
	for (int i = 0; i < 100 && result == ncclSuccess; i++) result = launch(g, g->comm, COUNT, ncclSum);
	/* Both count their own calls; the slower one may hear of the other's failure first. */
	REQUIRE(result == ncclUnhandledCudaError || result == ncclRemoteError);
	if (result == ncclUnhandledCudaError) REQUIRE_ERROR_HAS(who);
	REQUIRE_ERROR_HAS("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES");
	REQUIRE_IS(launch(g, g->comm, COUNT, ncclSum), result);
	REQUIRE_IS(wait_for_error(g, g->comm, PATIENCE_MS), result);
	gpu_sync(g, 1);
	REQUIRE_OK(ncclCommAbort(g->comm));
	g->comm = NULL;
}

static void ask_fake(void) { _exit(gpu_is_fake() ? 0 : 1); }

static void an_error_of_cuda_names_call_device_and_rank(void **state)
{
	(void)state;
	struct gpu_options o = { .nranks = 2, .ndevices = 2, .env = { "FAKE_CUDA_FAIL=cuLaunchKernel:20:701" } };
	if (!gpu_in_child(ask_fake, NULL)) skip();
	assert_true(gpu_run(&o, a_launch_fails, NULL));
}

int main(int argc, char **argv)
{
	gpu_need();
	if (argc > 1) cmocka_set_test_filter(argv[1]);
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(abort_ends_kernels_that_spin), cmocka_unit_test(a_peers_death_ends_kernels_and_is_told),
		cmocka_unit_test(calls_that_differ_are_named),
		cmocka_unit_test(sizes_that_differ_are_seen_whichever_way_each_end_goes), cmocka_unit_test(a_rank_that_left_is_named),
		cmocka_unit_test(a_split_communicator_works_beside_its_parent), cmocka_unit_test(what_spins_is_ended_and_the_rest_goes_on),
		cmocka_unit_test(a_revoked_communicator_ends_and_refuses), cmocka_unit_test(ranks_leave_when_they_like),
		cmocka_unit_test(a_graph_may_outlive_its_communicator), cmocka_unit_test(nothing_blocks_that_need_not),
		cmocka_unit_test(one_thread_serves_all_ranks), cmocka_unit_test(ranks_with_gpus_or_processes_of_their_own_may_use_default_streams),
		cmocka_unit_test(blocking_launches_are_refused_at_init), cmocka_unit_test(an_error_of_cuda_names_call_device_and_rank),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Registered buffers: large messages are stored there without a copy, whoever of the ranks has registered, and results are the same.
 *   test_cuda_registered [pattern of tests' names] */
#include <signal.h>

#include "cuda/helper_ops.h"

#define PIPES "TELPHER_CUDA_TABLE=offer=1,gather=0:0:0,pairs=0:0:0,rooted=0:0:0,pipes=2"
#define PIPED "TELPHER_CUDA_TABLE=offer=1,stream=1,transfers=4K,pipes=2"
#define STREAMS "TELPHER_CUDA_TABLE=offer=1,stream=1,pipes=0"

static char log_name[64];
/* Which ranks register, as bits; what they call. */
struct plan { unsigned mask; const enum op_kind *kinds; size_t nkinds; size_t most; };

static bool log_has(const struct ranks *r, const char *what)
{
	char name[96], line[1024], rank[32];
	bool found = false;
	snprintf(name, sizeof(name), "%s.%d", log_name, (int)getpid());
	snprintf(rank, sizeof(rank), "rank %d", r->rank);
	FILE *file = fopen(name, "re");
	while (file && fgets(line, sizeof(line), file)) {
		const char *at = strstr(line, rank);
		found |= at && (at[strlen(rank)] < '0' || at[strlen(rank)] > '9') && strstr(line, what);
	}
	if (file) fclose(file);
	return found;
}

static void await_log(const struct ranks *r, const char *what)
{
	for (uint64_t end = ranks_now_ms() + ranks_patience_ms(20000); !log_has(r, what);) {
		REQUIRE(ranks_now_ms() < end);
		usleep(1000);
	}
}

static void open_comm(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	REQUIRE_OK(ncclCommInitRank(&g->comm, r->nranks, r->id, r->rank));
}

/* The whole pool. NULL: this rank doesn't. */
static void *register_pool(struct gpu_rank *g, unsigned mask)
{
	struct ranks *r = g->r;
	void *handle = NULL;
	if (mask >> r->rank & 1) {
		REQUIRE_OK(ncclCommRegister(g->comm, GPU_PTR(g->pool), g->pool_bytes, &handle));
		REQUIRE(handle);
		await_log(r, "is mapped by all");
	}
	ranks_barrier(r);
	return handle;
}

static void close_comm(struct gpu_rank *g, bool straight)
{
	struct ranks *r = g->r;
	REQUIRE_OK(ncclCommDestroy(g->comm));
	g->comm = NULL;
	if (straight) await_log(r, "straight into its registered buffers");
	else REQUIRE(!log_has(r, "straight into its registered buffers"));
}

static void all_kinds(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	const struct plan *plan = g->arg;
	open_comm(g);
	void *handle = register_pool(g, plan->mask);
	const size_t counts[] = { 1, plan->most / 16 + 1, plan->most - 3, plan->most };
	for (size_t k = 0; k < plan->nkinds; k++)
		for (size_t c = 0; c < 4; c++)
			for (int variant = 0; variant < 3; variant++) {
				struct gpu_op o = { .kind = plan->kinds[k], .rank = r->rank, .nranks = r->nranks, .root = (int)((k + c) % (size_t)r->nranks), .count = counts[c],
					.type = variant == 1 ? ncclUint8 : ncclFloat32, .in_place = variant == 2 && plan->kinds[k] < ALL_TO_ALL, .seed = k * 100 + c,
					.skew_send = variant == 1 ? 3 : 0, .skew_recv = variant == 1 ? 5 : 0 };
				op_run(g, &o, g->comm, 1);
			}
	ranks_barrier(r);
	if (handle) REQUIRE_OK(ncclCommDeregister(g->comm, handle));
	close_comm(g, handle && r->nranks > 1);
}

static void run(const struct plan *plan, int nranks, bool threads, int ndevices, const char *table, const char *more)
{
	char file[96];
	snprintf(log_name, sizeof(log_name), "/tmp/test_registered.%d.%d", (int)getpid(), nranks + (threads ? 10 : 0));
	snprintf(file, sizeof(file), "NCCL_DEBUG_FILE=%s.%%p", log_name);
	struct gpu_options o = { .nranks = nranks, .threads = threads, .ndevices = ndevices, .no_comm = true, .pool_bytes = (size_t)8 << 20,
		.env = { table, file, more } };
	bool right = gpu_run(&o, all_kinds, (void *)(uintptr_t)plan);
	char command[160];
	snprintf(command, sizeof(command), "rm -f %s.*", log_name);
	assert_int_equal(system(command), 0);
	assert_true(right);
}

static const enum op_kind moving[] = { BROADCAST, ALL_GATHER, GATHER, SCATTER, ALL_TO_ALL };
static const enum op_kind streaming[] = { GATHER, SCATTER, TRANSFERS };
#define PLAN(mask_, kinds_, most_) (&(struct plan){ mask_, kinds_, sizeof(kinds_) / sizeof((kinds_)[0]), most_ })

static void pipes_store_into_registered_buffers_of_whoever_has_registered(void **state)
{
	(void)state;
	run(PLAN(3, moving, 60000), 2, false, 2, PIPES, NULL);
	run(PLAN(5, moving, 30000), 4, true, 1, PIPES, NULL);
	run(PLAN(6, moving, 30000), 3, false, 1, PIPES, NULL);
	run(PLAN(0xff, moving, 9000), 8, true, 4, PIPES, NULL);
}

static void sends_store_into_registered_buffers_of_whoever_has_registered(void **state)
{
	(void)state;
	run(PLAN(3, streaming, 60000), 2, false, 2, STREAMS, NULL);
	run(PLAN(5, streaming, 60000), 4, true, 1, STREAMS, NULL);
	run(PLAN(6, streaming, 60000), 3, false, 1, STREAMS, NULL);
}

static void large_sends_store_into_registered_buffers_through_pipes(void **state)
{
	(void)state;
	run(PLAN(3, streaming, 60000), 2, false, 2, PIPED, "NCCL_MAX_CTAS=1");
	run(PLAN(5, streaming, 60000), 4, true, 1, PIPED, NULL);
	run(PLAN(6, streaming, 60000), 3, false, 1, PIPED, "NCCL_MAX_CTAS=1");
	run(PLAN(0xff, streaming, 9000), 8, true, 4, PIPED, "NCCL_MAX_CTAS=2");
}

static void memory_that_is_shared_by_ipc_is_stored_to_as_well(void **state)
{
	(void)state;
	run(PLAN(3, moving, 60000), 2, false, 2, PIPES, "FAKE_CUDA_VMM=0");
	run(PLAN(3, streaming, 60000), 2, false, 2, STREAMS, "FAKE_CUDA_VMM=0");
}

/* ---- graphs ---- */

struct step { struct gpu_op op; CUgraphExec exec; };

static void capture(struct gpu_rank *g, struct step *s)
{
	struct ranks *r = g->r;
	op_prepare(g, &s->op);
	ranks_barrier(r);
	CUDA_OK(StreamBeginCapture(g->streams[1], CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
	REQUIRE_OK(op_issue(&s->op, g->comm, g->streams[1]));
	s->exec = gpu_end_capture(g, 1);
	ranks_barrier(r);
}

static void replay(struct gpu_rank *g, struct step *s, int nsteps, uint64_t seed)
{
	for (int round = 0; round < 3; round++)
		for (int i = 0; i < nsteps; i++) {
			op_fill(g, &s[i].op, seed + (uint64_t)round);
			CUDA_OK(GraphLaunch(s[i].exec, g->streams[1]));
			gpu_sync(g, 1);
			op_check(g, &s[i].op);
		}
	ranks_barrier(g->r);
}

/* What was captured while the buffer was registered is replayed after it no longer is, and after it is again. */
static void graphs_outlive(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	const struct plan *plan = g->arg;
	struct step steps[8];
	open_comm(g);
	void *handle = register_pool(g, plan->mask), *other = NULL;
	for (size_t k = 0; k < plan->nkinds; k++) {
		steps[k].op = (struct gpu_op){ .kind = plan->kinds[k], .rank = r->rank, .nranks = r->nranks, .root = 1, .count = plan->most, .type = ncclFloat32 };
		capture(g, &steps[k]);
	}
	replay(g, steps, (int)plan->nkinds, 10);
	if (handle) REQUIRE_OK(ncclCommDeregister(g->comm, handle));
	ranks_barrier(r);
	replay(g, steps, (int)plan->nkinds, 20);
	/* The number of the registration may be that of another range now. */
	if (handle) {
		REQUIRE_OK(ncclCommRegister(g->comm, GPU_PTR(g->pool + 4096), g->pool_bytes - 4096, &other));
		REQUIRE_OK(ncclCommRegister(g->comm, GPU_PTR(g->pool), g->pool_bytes, &handle));
	}
	replay(g, steps, (int)plan->nkinds, 30);
	for (size_t k = 0; k < plan->nkinds; k++) CUDA_OK(GraphExecDestroy(steps[k].exec));
	if (other) REQUIRE_OK(ncclCommDeregister(g->comm, other));
	ranks_barrier(r);
	close_comm(g, handle != NULL);
}

static void captured_graphs_outlive_registrations(void **state)
{
	(void)state;
	static const struct { const enum op_kind *kinds; size_t n; const char *table; } ways[] = { { moving, 5, PIPES }, { streaming, 3, STREAMS } };
	for (int w = 0; w < 2; w++)
		for (int threads = 0; threads < 2; threads++) {
			char file[96], command[160];
			struct plan plan = { threads ? 3 : 6, ways[w].kinds, ways[w].n, 40000 };
			snprintf(log_name, sizeof(log_name), "/tmp/test_registered.%d.g%d", (int)getpid(), w * 2 + threads);
			snprintf(file, sizeof(file), "NCCL_DEBUG_FILE=%s.%%p", log_name);
			struct gpu_options o = { .nranks = 3, .threads = threads, .ndevices = threads ? 1 : 3, .no_comm = true, .pool_bytes = (size_t)16 << 20,
				.env = { ways[w].table, file, "NCCL_GRAPH_REGISTER=0" } };
			bool right = gpu_run(&o, graphs_outlive, &plan);
			snprintf(command, sizeof(command), "rm -f %s.*", log_name);
			assert_int_equal(system(command), 0);
			assert_true(right);
		}
}

static void nothing_is_registered(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	void *handle;
	open_comm(g);
	REQUIRE_OK(ncclCommRegister(g->comm, GPU_PTR(g->pool), g->pool_bytes, &handle));
	REQUIRE(log_has(r, "without effect"));
	struct gpu_op o = { .kind = ALL_GATHER, .rank = r->rank, .nranks = r->nranks, .count = 40000, .type = ncclFloat32 };
	op_run(g, &o, g->comm, 1);
	REQUIRE_OK(ncclCommDeregister(g->comm, handle));
	close_comm(g, false);
}

static void local_registration_can_be_switched_off(void **state)
{
	(void)state;
	char file[96], command[160];
	snprintf(log_name, sizeof(log_name), "/tmp/test_registered.%d.off", (int)getpid());
	snprintf(file, sizeof(file), "NCCL_DEBUG_FILE=%s.%%p", log_name);
	struct gpu_options o = { .nranks = 2, .no_comm = true, .env = { PIPES, file, "NCCL_LOCAL_REGISTER=0" } };
	bool right = gpu_run(&o, nothing_is_registered, NULL);
	snprintf(command, sizeof(command), "rm -f %s.*", log_name);
	assert_int_equal(system(command), 0);
	assert_true(right);
}

/* Nobody registers; a capture of large buffers does. */
static void captured(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	const struct plan *plan = g->arg;
	struct step steps[8];
	open_comm(g);
	for (size_t k = 0; k < plan->nkinds; k++) {
		steps[k].op = (struct gpu_op){ .kind = plan->kinds[k], .rank = r->rank, .nranks = r->nranks, .root = 1, .count = plan->most, .type = ncclFloat32 };
		capture(g, &steps[k]);
	}
	replay(g, steps, (int)plan->nkinds, 10);
	for (size_t k = 0; k < plan->nkinds; k++) CUDA_OK(GraphExecDestroy(steps[k].exec));
	ranks_barrier(r);
	close_comm(g, true);
}

static void captures_register_what_they_receive_into(void **state)
{
	(void)state;
	static const enum op_kind gathers[] = { ALL_GATHER, ALL_TO_ALL }, rooted[] = { GATHER, SCATTER };
	static const struct plan plans[] = { { 0, gathers, 2, 100000 }, { 0, rooted, 2, 100000 } };
	for (int w = 0; w < 2; w++) {
		char file[96], command[160];
		snprintf(log_name, sizeof(log_name), "/tmp/test_registered.%d.c%d", (int)getpid(), w);
		snprintf(file, sizeof(file), "NCCL_DEBUG_FILE=%s.%%p", log_name);
		struct gpu_options o = { .nranks = 2, .ndevices = 2, .no_comm = true, .pool_bytes = (size_t)16 << 20, .env = { w ? STREAMS : PIPES, file } };
		bool right = gpu_run(&o, captured, (void *)(uintptr_t)&plans[w]);
		snprintf(command, sizeof(command), "rm -f %s.*", log_name);
		assert_int_equal(system(command), 0);
		assert_true(right);
	}
}

/* A graph ends while what it had registered is received into by another operation: an eager one, or another graph's. */
enum { LARGE = 400000, SMALL = 100, SMALLS = 10 };

static void transfer(struct gpu_rank *g, CUdeviceptr at, size_t bytes)
{
	struct ranks *r = g->r;
	if (r->rank) REQUIRE_OK(ncclRecv(GPU_PTR(at), bytes, ncclUint8, 0, g->comm, GPU_STREAM(g, 1)));
	else REQUIRE_OK(ncclSend(GPU_PTR(at), bytes, ncclUint8, 1, g->comm, GPU_STREAM(g, 1)));
}

static CUgraphExec capture_transfer(struct gpu_rank *g, CUdeviceptr at)
{
	CUDA_OK(StreamBeginCapture(g->streams[1], CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
	transfer(g, at, LARGE);
	return gpu_end_capture(g, 1);
}

static void graph_ends_early(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	bool others = *(const bool *)g->arg;
	unsigned char got[LARGE];
	ncclResult_t error;
	open_comm(g);
	CUdeviceptr large = gpu_take(g, LARGE, 0), small = gpu_take(g, SMALL, 0);
	CUgraphExec ends = capture_transfer(g, large), other = NULL;
	if (r->rank) await_log(r, "is mapped by all");
	if (others) other = capture_transfer(g, large);
	gpu_fill(g, large, r->rank ? 0 : 77, LARGE);
	ranks_barrier(r);
	for (int turn = 0; turn < 2; turn++) {
		if (turn != r->rank) {
			if (others) CUDA_OK(GraphLaunch(other, g->streams[1]));
			else transfer(g, large, LARGE);
			usleep(50000);                  /* the receiver's kernel begins; if it doesn't, all the better */
			CUDA_OK(GraphExecDestroy(ends));
			for (int i = 0; i < SMALLS; i++) {
				usleep(2000);
				transfer(g, small, SMALL);
			}
		}
		ranks_barrier(r);
		usleep(20000);
	}
	gpu_sync(g, 1);
	REQUIRE_OK(ncclCommGetAsyncError(g->comm, &error));
	REQUIRE_OK(error);
	gpu_get(g, got, large, LARGE);
	for (size_t i = 0; i < LARGE; i++) REQUIRE(got[i] == 77);
	if (others) CUDA_OK(GraphExecDestroy(other));
	ranks_barrier(r);
	close_comm(g, r->rank != 0);
}

static void what_a_graph_registered_stays_while_something_receives_into_it(void **state)
{
	(void)state;
	for (int w = 0; w < 2; w++) {
		char file[96], command[160];
		bool others = w;
		snprintf(log_name, sizeof(log_name), "/tmp/test_registered.%d.e%d", (int)getpid(), w);
		snprintf(file, sizeof(file), "NCCL_DEBUG_FILE=%s.%%p", log_name);
		struct gpu_options o = { .nranks = 2, .ndevices = 2, .no_comm = true, .env = { STREAMS, file } };
		bool right = gpu_run(&o, graph_ends_early, &others);
		snprintf(command, sizeof(command), "rm -f %s.*", log_name);
		assert_int_equal(system(command), 0);
		assert_true(right);
	}
}

/* A rank deregisters and dies while the other's kernel waits for it: letting the buffer go may wait for that kernel, so whoever does that mustn't be
 * who hears of deaths. */
static void dies_after_deregistering(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	ncclResult_t error = ncclSuccess;
	CUdeviceptr buffer = gpu_take(g, SMALL, 0);
	void *handle, *mapped;
	open_comm(g);
	REQUIRE_OK(ncclMemAlloc(&mapped, 1 << 20));
	if (!r->rank) {
		if (*(const bool *)g->arg) REQUIRE_OK(ncclCommRegister(g->comm, mapped, 1 << 20, &handle));
		else REQUIRE_OK(ncclCommRegister(g->comm, GPU_PTR(g->pool), g->pool_bytes, &handle));
		await_log(r, "is mapped by all");
	}
	ranks_barrier(r);
	if (r->rank) REQUIRE_OK(ncclAllReduce(GPU_PTR(buffer), GPU_PTR(buffer), SMALL, ncclUint8, ncclSum, g->comm, GPU_STREAM(g, 1)));
	ranks_barrier(r);
	if (!r->rank) {
		REQUIRE_OK(ncclCommDeregister(g->comm, handle));
		usleep(50000);
		kill(getpid(), SIGKILL);
	}
	for (uint64_t end = ranks_now_ms() + ranks_patience_ms(20000); error == ncclSuccess; usleep(2000)) {
		REQUIRE_OK(ncclCommGetAsyncError(g->comm, &error));
		REQUIRE(ranks_now_ms() < end);
	}
	REQUIRE_IS(error, ncclRemoteError);
	gpu_sync(g, 1);
	REQUIRE_OK(ncclCommAbort(g->comm));
	g->comm = NULL;
}

static void a_death_is_heard_while_a_buffer_cannot_be_let_go(void **state)
{
	(void)state;
	for (int w = 0; w < 2; w++) {
		char file[96], command[160];
		bool mapped = w;                /* and not by IPC */
		snprintf(log_name, sizeof(log_name), "/tmp/test_registered.%d.d%d", (int)getpid(), w);
		snprintf(file, sizeof(file), "NCCL_DEBUG_FILE=%s.%%p", log_name);
		struct gpu_options o = { .nranks = 2, .ndevices = 2, .no_comm = true, .may_die = 1, .timeout_s = 60,
			.env = { STREAMS, file, "FAKE_CUDA_UNMAP_WAITS=1" } };
		bool right = gpu_run(&o, dies_after_deregistering, &mapped);
		snprintf(command, sizeof(command), "rm -f %s.*", log_name);
		assert_int_equal(system(command), 0);
		assert_true(right);
	}
}

int main(int argc, char **argv)
{
	gpu_need();
	if (argc > 1) cmocka_set_test_filter(argv[1]);
	setenv("NCCL_DEBUG", "INFO", 1);
	setenv("NCCL_DEBUG_SUBSYS", "REG", 1);
	setenv("NCCL_MAX_CTAS", "2", 1);        /* large parts of small messages */
	setenv("TELPHER_LL128", "on", 1);
	setenv("NCCL_LEGACY_CUDA_REGISTER", "1", 1);
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(pipes_store_into_registered_buffers_of_whoever_has_registered),
		cmocka_unit_test(sends_store_into_registered_buffers_of_whoever_has_registered),
		cmocka_unit_test(large_sends_store_into_registered_buffers_through_pipes),
		cmocka_unit_test(memory_that_is_shared_by_ipc_is_stored_to_as_well),
		cmocka_unit_test(captured_graphs_outlive_registrations), cmocka_unit_test(captures_register_what_they_receive_into),
		cmocka_unit_test(what_a_graph_registered_stays_while_something_receives_into_it),
		cmocka_unit_test(local_registration_can_be_switched_off), cmocka_unit_test(a_death_is_heard_while_a_buffer_cannot_be_let_go),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Graph registration: what a captured call receives into is mapped by the peers while the graph lives, and let go after. */
#include "cuda/helper_ops.h"

enum { COUNT = 200000 };

/* Mappings of this process, or of all its ranks. */
static long long mappings(void) { return gpu_count("memory"); }

static void settle_at(struct gpu_rank *g, long long wanted)
{
	struct ranks *r = g->r;
	uint64_t end = ranks_now_ms() + (uint64_t)ranks_patience_ms(20000);
	while (mappings() != wanted && ranks_now_ms() < end) usleep(1000);
	REQUIRE(mappings() == wanted);
	ranks_barrier(r);
}

struct kind { const char *env; bool mapped, registers; const char *more; };

static void while_a_graph_lives(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	struct gpu_op ops[3] = { { .kind = ALL_GATHER, .count = COUNT }, { .kind = TRANSFERS, .count = COUNT }, { .kind = ALL_GATHER, .count = 100 } };
	const struct kind *kind = g->arg;
	CUgraphExec exec;
	CUdeviceptr pool = g->pool;
	void *mapped = NULL;
	if (kind->mapped) {
		REQUIRE_OK(ncclMemAlloc(&mapped, g->pool_bytes));
		g->pool = (CUdeviceptr)(uintptr_t)mapped;
	}
	for (int i = 0; i < 3; i++) {
		ops[i].rank = r->rank;
		ops[i].nranks = r->nranks;
		ops[i].type = ncclInt32;
		op_prepare(g, &ops[i]);
	}
	REQUIRE_OK(op_issue(&ops[2], g->comm, g->streams[1]));
	gpu_sync(g, 1);
	ranks_barrier(r);
	long long before = mappings();
	ranks_barrier(r);
	for (int turn = 0; turn < 2; turn++) {
		CUDA_OK(StreamBeginCapture(g->streams[1], turn ? CU_STREAM_CAPTURE_MODE_GLOBAL : CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
		for (int i = 0; i < 3; i++) REQUIRE_OK(op_issue(&ops[i], g->comm, g->streams[1]));
		exec = gpu_end_capture(g, 1);
		/* The pool is one allocation. */
		settle_at(g, before + (kind->registers ? r->nranks - 1 : 0));
		for (int i = 0; i < 3; i++) op_fill(g, &ops[i], (uint64_t)(turn * 10 + i));
		CUDA_OK(GraphLaunch(exec, g->streams[1]));
		gpu_sync(g, 1);
		for (int i = 0; i < 3; i++) op_check(g, &ops[i]);
		ranks_barrier(r);
		CUDA_OK(GraphExecDestroy(exec));
		/* The next call lets go; the graph's end is told by a thread of the driver's. */
		for (int k = 1; k <= 50; k++) {
			ranks_barrier(r);
			if (mappings() != before) r->shared->word[turn] = k;
			ranks_barrier(r);
			if (r->shared->word[turn] < k) break;
			usleep(2000);
			REQUIRE_OK(op_issue(&ops[2], g->comm, g->streams[1]));
			gpu_sync(g, 1);
		}
		settle_at(g, before);
	}
	g->pool = pool;
	if (mapped) REQUIRE_OK(ncclMemFree(mapped));
}

static void a_graph_registers_what_it_receives_into(void **state)
{
	(void)state;
	if (!gpu_fake_here()) skip();
	/* Without pipes the sends register, and without lines of 128 bytes these neither. */
	static const struct kind kinds[] = { { "NCCL_LEGACY_CUDA_REGISTER=1", false, true, NULL }, { NULL, true, true, NULL }, { NULL, false, false, NULL },
		{ "NCCL_GRAPH_REGISTER=0", true, false, NULL }, { "TELPHER_CUDA_TABLE=offer=8M,gather=0:0:0,pipes=2", true, false, NULL },
		{ "TELPHER_CUDA_TABLE=offer=256K,pipes=0", true, true, NULL }, { "TELPHER_CUDA_TABLE=offer=256K,pipes=0", true, false, "TELPHER_LL128=off" } };
	for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
		struct gpu_options o = { .nranks = 3, .ndevices = i % 2 ? 3 : 1, .pool_bytes = (size_t)16 << 20, .env = { kinds[i].env, kinds[i].more } };
		assert_true(gpu_run(&o, while_a_graph_lives, (void *)(uintptr_t)&kinds[i]));
	}
	struct kind plain = { "NCCL_LEGACY_CUDA_REGISTER=1", false, true, NULL };
	struct gpu_options o = { .nranks = 3, .ndevices = 3, .pool_bytes = (size_t)16 << 20, .env = { plain.env, "FAKE_CUDA_VMM=0" } };
	assert_true(gpu_run(&o, while_a_graph_lives, &plain));
}

/* The communicator ends first, or the graph is never launched. */
static void ends_in_any_order(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	for (int turn = 0; turn < 2; turn++) {
		ncclComm_t comm;
		CUgraph graph;
		struct gpu_op o = { .kind = ALL_GATHER, .count = COUNT, .type = ncclInt32, .rank = r->rank, .nranks = r->nranks };
		REQUIRE_OK(ncclCommSplit(g->comm, 0, r->rank, &comm, NULL));
		gpu_reset(g);
		op_prepare(g, &o);
		ranks_barrier(r);
		CUDA_OK(StreamBeginCapture(g->streams[1], CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
		REQUIRE_OK(op_issue(&o, comm, g->streams[1]));
		CUDA_OK(StreamEndCapture(g->streams[1], &graph));
		ranks_barrier(r);
		if (turn) CUDA_OK(GraphDestroy(graph));
		REQUIRE_OK(ncclCommDestroy(comm));
		if (!turn) CUDA_OK(GraphDestroy(graph));
		ranks_barrier(r);
	}
}

static void graph_and_communicator_end_in_any_order(void **state)
{
	(void)state;
	for (int i = 0; i < 2; i++) {
		struct gpu_options o = { .nranks = 2, .threads = i, .ndevices = 2, .pool_bytes = (size_t)8 << 20, .env = { "NCCL_LEGACY_CUDA_REGISTER=1" } };
		assert_true(gpu_run(&o, ends_in_any_order, NULL));
	}
}

int main(void)
{
	gpu_need();
	setenv("TELPHER_CUDA_TABLE", "offer=256K,gather=0:0:0,pipes=2", 1);
	setenv("TELPHER_LL128", "on", 1);
	const struct CMUnitTest tests[] = { cmocka_unit_test(a_graph_registers_what_it_receives_into), cmocka_unit_test(graph_and_communicator_end_in_any_order) };
	return cmocka_run_group_tests(tests, NULL, NULL);
}

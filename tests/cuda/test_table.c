/* The table of kernels by kind of machine, as communicators use it. */
#include "cuda/helper_gpu.h"

static char file[64];

static void write_table(const char *text)
{
	FILE *f = fopen(file, "w");
	assert_non_null(f);
	fputs(text, f);
	assert_int_equal(fclose(f), 0);
}

/* arg: do lines carry an all-reduce? The table says that they don't on "Fake GPU 0". */
static void reduce(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	int32_t result[64];
	const bool lines = *(bool *)g->arg;
	CUdeviceptr at = gpu_take(g, sizeof(result), 0);
	CUDA_OK(MemsetD32Async(at, 1, 64, g->streams[0]));
	REQUIRE_OK(ncclAllReduce(GPU_PTR(at), GPU_PTR(at), 64, ncclInt32, ncclSum, g->comm, GPU_STREAM(g, 0)));
	gpu_get(g, result, at, sizeof(result));
	for (int i = 0; i < 64; i++) REQUIRE(result[i] == r->nranks);
	REQUIRE((gpu_count("tp_ll_u32_sum") > 0) == lines);
	REQUIRE((gpu_count("tp_steps_u32_sum") > 0) == !lines);
}

static void run(int nranks, const char *kinds, bool lines)
{
	char table[96];
	snprintf(table, sizeof(table), "TELPHER_CUDA_TABLE=@%s", file);
	struct gpu_options o = { .nranks = nranks, .ndevices = nranks, .env = { table, kinds } };
	assert_true(gpu_run(&o, reduce, &lines));
}

static void a_files_rows_are_for_the_machines_that_they_name(void **state)
{
	(void)state;
	if (!gpu_fake_here()) skip();
	write_table("[gpu=\"Fake GPU\" ranks=3]\none_shot=0:0\ntwo_shot=0:0\n");
	run(2, "FAKE_CUDA_KINDS=1", true);
	run(3, "FAKE_CUDA_KINDS=1", false);
}

/* Ranks whose tables differed would wait for each other for ever. */
static void ranks_on_gpus_of_two_kinds_use_what_is_for_any(void **state)
{
	(void)state;
	if (!gpu_fake_here()) skip();
	write_table("[gpu=\"Fake GPU 0\"]\none_shot=0:0\ntwo_shot=0:0\n");
	run(2, "FAKE_CUDA_KINDS=2", true);
	write_table("[gpu=\"Fake GPU 1\"]\none_shot=0:0\ntwo_shot=0:0\n");
	run(2, "FAKE_CUDA_KINDS=2", true);
	write_table("one_shot=0:0\ntwo_shot=0:0\n[gpu=\"Fake GPU\"]\none_shot=1G:1G\n");
	run(2, "FAKE_CUDA_KINDS=2", false);
}

static void gather_by_pipes(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	CUdeviceptr in = gpu_take(g, 1 << 16, 0), out = gpu_take(g, (size_t)r->nranks << 16, 0);
	REQUIRE_OK(ncclAllGather(GPU_PTR(in), GPU_PTR(out), 1 << 14, ncclInt32, g->comm, GPU_STREAM(g, 0)));
	gpu_sync(g, 0);
	REQUIRE(gpu_count("tp_push_copy") > 0);
}

/* Kernels are loaded by the first communicator, for all there may be. */
static void a_row_that_is_not_for_two_ranks_has_its_kernels(void **state)
{
	(void)state;
	if (!gpu_fake_here()) skip();
	char table[96];
	snprintf(table, sizeof(table), "TELPHER_CUDA_TABLE=@%s", file);
	write_table("pipes=0\n[ranks=3]\ngather=0:0:0\npipes=2\n");
	struct gpu_options o = { .nranks = 3, .ndevices = 3, .env = { table, "TELPHER_LL128=on" } };
	assert_true(gpu_run(&o, gather_by_pipes, NULL));
}

int main(void)
{
	gpu_need();
	snprintf(file, sizeof(file), "/tmp/test_cuda_table.%d.rows", (int)getpid());
	const struct CMUnitTest tests[] = { cmocka_unit_test(a_files_rows_are_for_the_machines_that_they_name),
		cmocka_unit_test(ranks_on_gpus_of_two_kinds_use_what_is_for_any),
		cmocka_unit_test(a_row_that_is_not_for_two_ranks_has_its_kernels) };
	int failed = cmocka_run_group_tests(tests, NULL, NULL);
	unlink(file);
	return failed;
}

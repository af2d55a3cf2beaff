/* The watch over the pace inside a job: what ranks tell each other and measure behind their collectives changes no result, whatever the
 * collective, the algorithm and the ranks' places are, and ends with them. A table that predicts a thousandth of every time makes all of them
 * slow, so that the ranks measure again and again. */
#include "api/helper_ranks.h"

#define COUNT ((size_t)72 << 10)        /* floats of a block: enough to be watched */
#define CALLS 36                        /* two windows and a look */

static char table[64], log_file[64];
static char table_setting[96], log_setting[96];

static int make_files(void **state)
{
	(void)state;
	strcpy(table, "/tmp/telpher_pace_XXXXXX");
	strcpy(log_file, "/tmp/telpher_pace_log_XXXXXX");
	int fd = mkstemp(table), log = mkstemp(log_file);
	if (fd < 0 || log < 0) return -1;
	static const char *const algos[] = { "RING", "TREE", "HALVING_DOUBLING", "PAT", "ONE_SHOT", "TWO_SHOT", "DIRECT", "BRUCK", "HIERARCHICAL" };
	for (size_t i = 0; i < sizeof(algos) / sizeof(algos[0]); i++) dprintf(fd, "scale.%s 0.001\n", algos[i]);
	close(fd);
	close(log);
	snprintf(table_setting, sizeof(table_setting), "TELPHER_TUNE_FILE=%s", table);
	snprintf(log_setting, sizeof(log_setting), "NCCL_DEBUG_FILE=%s", log_file);
	return 0;
}

static int remove_files(void **state)
{
	(void)state;
	unlink(table);
	unlink(log_file);
	return 0;
}

static bool was_said(const char *what)
{
	char line[4096];
	bool found = false;
	FILE *in = fopen(log_file, "r");
	assert_non_null(in);
	while (fgets(line, sizeof(line), in)) found |= strstr(line, what) != NULL;
	fclose(in);
	return found;
}

struct buffers { float *in, *out; };

static struct buffers make_buffers(struct ranks *r)
{
	size_t most = COUNT * (size_t)r->nranks;
	struct buffers b = { malloc(most * sizeof(float)), malloc(most * sizeof(float)) };
	REQUIRE(b.in && b.out);
	for (size_t i = 0; i < most; i++) b.in[i] = (float)(r->rank + 1);
	return b;
}

static void check(struct ranks *r, const float *out, size_t count, int blocks)
{
	int sum = r->nranks * (r->nranks + 1) / 2;
	for (int b = 0; b < (blocks ? blocks : 1); b++)
		for (size_t i = 0; i < count; i += 997) REQUIRE(out[(size_t)b * count + i] == (float)(blocks ? b + 1 : sum));
}

static void all_collectives(struct ranks *r)
{
	struct buffers b = make_buffers(r);
	size_t part = COUNT / (size_t)r->nranks;
	/* Two windows, a look, two more, and another. */
	for (int i = 0; i < 25; i++) {
		REQUIRE_OK(ncclAllReduce(b.in, b.out, COUNT, ncclFloat32, ncclSum, r->comm, NULL));
		check(r, b.out, COUNT, 0);
		REQUIRE_OK(ncclAllGather(b.in, b.out, part, ncclFloat32, r->comm, NULL));
		check(r, b.out, part, r->nranks);
		REQUIRE_OK(ncclReduceScatter(b.in, b.out, part, ncclFloat32, ncclSum, r->comm, NULL));
		check(r, b.out, part, 0);
		REQUIRE_OK(ncclAlltoAll(b.in, b.out, part, ncclFloat32, r->comm, NULL));
		check(r, b.out, part, r->nranks);
		/* Between them what isn't watched. */
		REQUIRE_OK(ncclBroadcast(b.in, b.out, COUNT, ncclFloat32, i % r->nranks, r->comm, NULL));
		REQUIRE(b.out[COUNT - 1] == (float)(i % r->nranks + 1));
		REQUIRE_OK(ncclAllReduce(b.in, b.out, 1, ncclFloat32, ncclSum, r->comm, NULL));
	}
	free(b.in);
	free(b.out);
}

static void results_stay_right_within_a_host(void **state)
{
	(void)state;
	struct ranks_options options = { .nranks = 3, .env = { table_setting } };
	assert_true(ranks_run(&options, all_collectives, NULL));
}

static void and_between_hosts(void **state)
{
	(void)state;
	struct ranks_options options = { .nranks = 3, .nhosts = 3, .env = { table_setting, "NCCL_NET=Socket" } };
	assert_true(ranks_run(&options, all_collectives, NULL));
}

static void one_algorithm(struct ranks *r)
{
	struct buffers b = make_buffers(r);
	for (int i = 0; i < CALLS; i++) {
		REQUIRE_OK(ncclAllReduce(b.in, b.out, COUNT, ncclFloat32, ncclSum, r->comm, NULL));
		check(r, b.out, COUNT, 0);
	}
	free(b.in);
	free(b.out);
}

static void and_by_every_algorithm(void **state)
{
	(void)state;
	static const char *const algos[] = { "NCCL_ALGO=RING", "NCCL_ALGO=TREE", "NCCL_ALGO=HALVING_DOUBLING", "NCCL_ALGO=ONE_SHOT", "NCCL_ALGO=HIERARCHICAL" };
	for (size_t i = 0; i < sizeof(algos) / sizeof(algos[0]); i += SANITIZED ? 2 : 1) {
		struct ranks_options options = { .nranks = 4, .nhosts = 2, .threads = i == 2, .env = { table_setting, algos[i], "NCCL_NET=Socket" } };
		assert_true(ranks_run(&options, one_algorithm, NULL));
	}
}

static void on_streams(struct ranks *r)
{
	struct buffers b = make_buffers(r);
	cudaStream_t stream;
	REQUIRE_OK(telpher_stream_create(&stream));
	for (int i = 0; i < CALLS / 2 + 2; i++) {
		REQUIRE_OK(ncclGroupStart());
		REQUIRE_OK(ncclAllReduce(b.in, b.out, COUNT, ncclFloat32, ncclSum, r->comm, stream));
		REQUIRE_OK(ncclAllReduce(b.out, b.out, COUNT, ncclFloat32, ncclMax, r->comm, stream));
		REQUIRE_OK(ncclGroupEnd());
	}
	REQUIRE_OK(telpher_stream_synchronize(stream));
	check(r, b.out, COUNT, 0);
	REQUIRE_OK(telpher_stream_destroy(stream));
	free(b.in);
	free(b.out);
}

static void and_on_streams_and_in_groups(void **state)
{
	(void)state;
	struct ranks_options options = { .nranks = 2, .env = { table_setting } };
	assert_true(ranks_run(&options, on_streams, NULL));
}

static void one_aborts(struct ranks *r)
{
	struct buffers b = make_buffers(r);
	ncclResult_t result = ncclSuccess;
	for (int i = 0; i < 2000 && result == ncclSuccess; i++) {
		if (r->rank == 1 && i == *(int *)r->arg) break;
		result = ncclAllReduce(b.in, b.out, COUNT, ncclFloat32, ncclSum, r->comm, NULL);
	}
	if (r->rank != 1) REQUIRE(result == ncclRemoteError);
	REQUIRE_OK(ncclCommAbort(r->comm));
	r->comm = NULL;
	ranks_barrier(r);
	free(b.in);
	free(b.out);
}

static void an_abort_ends_whatever_they_are_at(void **state)
{
	(void)state;
	static int after[] = { 16, 32, 64 };
	for (size_t i = 0; i < sizeof(after) / sizeof(after[0]); i++) {
		struct ranks_options options = { .nranks = 3, .env = { table_setting } };
		assert_true(ranks_run(&options, one_aborts, &after[i]));
	}
}

static void a_slow_communicator_is_told_of(void **state)
{
	(void)state;
	struct ranks_options options = { .nranks = 2, .nhosts = 2, .env = { table_setting, log_setting, "NCCL_DEBUG=INFO", "NCCL_NET=Socket" } };
	assert_true(ranks_run(&options, all_collectives, NULL));
	/* A busy machine keeps it from being a warning. */
	assert_true(was_said("of its predicted speed"));
	assert_true(was_said("waiting for ranks that come late is left out"));
	assert_true(was_said("by NET/Socket/0"));
}

static void one_does_not_want_it(struct ranks *r)
{
	setenv("TELPHER_WATCH", r->rank == 1 ? "0" : "1", 1);
	REQUIRE_OK(ncclCommInitRank(&r->comm, r->nranks, r->id, r->rank));
	all_collectives(r);
	REQUIRE_OK(ncclCommDestroy(r->comm));
	r->comm = NULL;
}

/* What the test before this one is told of. */
static void one_rank_that_does_not_want_it_is_enough(void **state)
{
	(void)state;
	struct ranks_options options = { .nranks = 2, .nhosts = 2, .no_comm = true, .env = { table_setting, log_setting, "NCCL_DEBUG=INFO", "NCCL_NET=Socket" } };
	assert_true(ranks_run(&options, one_does_not_want_it, NULL));
	assert_false(was_said("of its predicted speed"));
}

#define WITH_FILES(test) cmocka_unit_test_setup_teardown(test, make_files, remove_files)

int main(void)
{
	setenv("TELPHER_WATCH", "1", 1);
	const struct CMUnitTest tests[] = {
		WITH_FILES(results_stay_right_within_a_host), WITH_FILES(and_between_hosts), WITH_FILES(and_by_every_algorithm), WITH_FILES(and_on_streams_and_in_groups),
		WITH_FILES(an_abort_ends_whatever_they_are_at), WITH_FILES(a_slow_communicator_is_told_of), WITH_FILES(one_rank_that_does_not_want_it_is_enough),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

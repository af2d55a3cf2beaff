/* The watch over the pace inside a job: what ranks tell each other and measure behind their collectives changes no result, whatever the
 * collective, the algorithm and the ranks' places are, and ends with them. A table that predicts a thousandth of every time makes all of them
 * slow, so that the ranks measure again and again: behind every call, here. */
#include <fcntl.h>
#include <sys/resource.h>
#include "api/helper_ranks.h"

#define COUNT ((size_t)72 << 10)        /* floats of a block: enough to be watched */
#define CALLS 84                        /* two windows and a look of six rounds */

static char table[64], log_file[64];
static char table_setting[96], log_setting[96];

static int write_table(const char *const *lines, size_t count)
{
	int fd = open(table, O_WRONLY | O_TRUNC | O_CLOEXEC);
	if (fd < 0) return -1;
	for (size_t i = 0; i < count; i++) dprintf(fd, "%s\n", lines[i]);
	return close(fd);
}

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

/* The last line that says so; "": none does. */
static const char *line_with(const char *what)
{
	static char found[4096];
	char line[4096];
	FILE *in = fopen(log_file, "r");
	assert_non_null(in);
	*found = 0;
	while (fgets(line, sizeof(line), in))
		if (strstr(line, what)) strcpy(found, line);
	fclose(in);
	return found;
}

static bool was_said(const char *what) { return *line_with(what) != 0; }

struct seen { int calls, compared, looks; };

/* As the watch says at its end; zeros: it says nothing. */
static struct seen what_it_saw(void)
{
	struct seen seen = { 0 };
	const char *at = strstr(line_with("the watch over the pace saw "), "saw ");
	if (at) assert_int_equal(sscanf(at, "saw %d large collectives, compared the ranks' times of them %d times, and measured pairs %d times", &seen.calls,
		&seen.compared, &seen.looks), 3);
	return seen;
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
	/* Two windows and a look of two ranks; or two more, and another. */
	int turns = r->arg ? *(int *)r->arg : 20;
	for (int i = 0; i < turns; i++) {
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
	for (size_t i = 0; i < sizeof(algos) / sizeof(algos[0]); i += SANITIZED ? 3 : 1) {
		struct ranks_options options = { .nranks = 4, .nhosts = 2, .threads = i == (SANITIZED ? 3 : 2), .env = { table_setting, algos[i], "NCCL_NET=Socket" } };
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
	static int after[] = { 17, 33, 36, 52 };
	for (size_t i = 0; i < sizeof(after) / sizeof(after[0]); i += SANITIZED ? 2 : 1) {
		struct ranks_options options = { .nranks = 3, .env = { table_setting } };
		assert_true(ranks_run(&options, one_aborts, &after[i]));
	}
}

static void a_slow_communicator_is_told_of(void **state)
{
	(void)state;
	struct ranks_options options = { .nranks = 2, .nhosts = 2, .env = { table_setting, log_setting, "NCCL_DEBUG=INFO", "NCCL_NET=Socket" } };
	int turns = 30;
	assert_true(ranks_run(&options, all_collectives, &turns));
	/* A busy machine keeps it from being a warning. */
	assert_true(was_said("of its predicted speed"));
	assert_true(was_said("waiting for ranks that come late is left out"));
	assert_true(was_said("by NET/Socket/0"));
}

static void many_calls(struct ranks *r)
{
	struct buffers b = make_buffers(r);
	for (int i = 0, calls = *(int *)r->arg; i < calls; i++) {
		REQUIRE_OK(ncclAllReduce(b.in, b.out, COUNT, ncclFloat32, ncclSum, r->comm, NULL));
		if (i % 16 == 0) check(r, b.out, COUNT, 0);
	}
	free(b.in);
	free(b.out);
}

/* A table that corrects algorithms says nothing of links. */
static void a_guess_is_no_measurement(void **state)
{
	(void)state;
	struct ranks_options options = { .nranks = 2, .env = { table_setting, log_setting, "NCCL_DEBUG=INFO" } };
	int calls = 120;
	assert_true(ranks_run(&options, many_calls, &calls));
	assert_true(what_it_saw().looks >= 1);
	assert_false(was_said("keeps running at"));
}

static double number_behind(const char *line, const char *what)
{
	const char *at = strstr(line, what);
	return at ? strtod(at + strlen(what), NULL) : 0;
}

/* By figures that nothing reaches all pairs are slow: whatever is said of the slowest, the others aren't slower. */
static void what_is_said_of_pairs_does_not_contradict_itself(void **state)
{
	(void)state;
	static const char *const lines[] = { "scale.RING 0.001", "scale.ONE_SHOT 0.001", "scale.TWO_SHOT 0.001", "scale.HALVING_DOUBLING 0.001", "scale.TREE 0.001",
		"scale.DIRECT 0.001", "inside.latency_us 0.001", "inside.us_per_byte 1e-9" };
	struct ranks_options options = { .nranks = 3, .env = { table_setting, log_setting, "NCCL_DEBUG=INFO" } };
	int calls = 190;                /* two looks */
	assert_int_equal(write_table(lines, sizeof(lines) / sizeof(lines[0])), 0);
	assert_true(ranks_run(&options, many_calls, &calls));
	const char *line = line_with("of its predicted speed");
	assert_true(*line);
	double own = number_behind(strstr(line, " by SHM"), ": "), others = number_behind(line, "while others like it make ");
	assert_true(own > 0 || strstr(line, "no rate that is sure"));
	assert_true(strstr(line, "and the others are like it") ? others == 0 : others >= own);
}

static void fill_descriptors(struct ranks *r, bool fill)
{
	static int taken[4096];
	static int count;
	struct rlimit limit = { 512, 512 };
	if (!fill) {
		while (count) close(taken[--count]);
		return;
	}
	REQUIRE(setrlimit(RLIMIT_NOFILE, &limit) == 0);
	for (int fd; count < 4096 && (fd = open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0;) taken[count++] = fd;
}

/* A job in a ring has one link to and one from each rank, and no descriptor is left for more. */
static void no_descriptor_is_left(struct ranks *r)
{
	struct buffers b = make_buffers(r);
	for (int i = 0; i < CALLS; i++) {
		if (r->rank == 3 && i == 10) fill_descriptors(r, true);
		REQUIRE_OK(ncclAllReduce(b.in, b.out, COUNT, ncclFloat32, ncclSum, r->comm, NULL));
		check(r, b.out, COUNT, 0);
	}
	fill_descriptors(r, false);
	free(b.in);
	free(b.out);
}

static void measuring_opens_nothing(void **state)
{
	(void)state;
	struct ranks_options options = { .nranks = 4, .nhosts = 4, .env = { table_setting, log_setting, "NCCL_DEBUG=INFO", "NCCL_NET=Socket", "NCCL_ALGO=RING" } };
	assert_true(ranks_run(&options, no_descriptor_is_left, NULL));
	struct seen seen = what_it_saw();
	assert_true(seen.calls == CALLS && seen.looks >= 1);
}

static void no_memory_is_left(struct ranks *r)
{
	struct buffers b = make_buffers(r);
	for (int i = 0; i < CALLS; i++) {
		struct rlimit none = { 1 << 20, RLIM_INFINITY };
		if (r->rank == 1 && i == 10) REQUIRE(setrlimit(RLIMIT_AS, &none) == 0);
		REQUIRE_OK(ncclAllReduce(b.in, b.out, COUNT, ncclFloat32, ncclSum, r->comm, NULL));
		check(r, b.out, COUNT, 0);
	}
	struct rlimit all = { RLIM_INFINITY, RLIM_INFINITY };
	REQUIRE(setrlimit(RLIMIT_AS, &all) == 0);
	free(b.in);
	free(b.out);
}

static void whoever_has_no_memory_for_it_keeps_all_from_it(void **state)
{
	(void)state;
	if (SANITIZED) skip();          /* the sanitizers need some now and then */
	struct ranks_options options = { .nranks = 3, .nhosts = 3, .env = { table_setting, log_setting, "NCCL_DEBUG=INFO", "NCCL_NET=Socket" } };
	assert_true(ranks_run(&options, no_memory_is_left, NULL));
	struct seen seen = what_it_saw();
	assert_true(seen.calls == CALLS && seen.compared >= 2 && seen.looks == 0);
}

/* As a job is that nobody has a table for. */
static void a_healthy_job_is_watched_and_hears_nothing(void **state)
{
	(void)state;
	int calls = 110;
	unsetenv("TELPHER_WATCH");
	for (int hosts = 1; hosts <= 2; hosts++) {
		struct ranks_options options = { .nranks = 4, .nhosts = hosts, .env = { log_setting, "NCCL_DEBUG=INFO", "NCCL_NET=Socket" } };
		assert_true(ranks_run(&options, many_calls, &calls));
		struct seen seen = what_it_saw();
		assert_true(seen.calls >= 110 && seen.compared >= 1);
		assert_false(was_said("keeps running at"));
	}
	setenv("TELPHER_WATCH", "2", 1);
}

static void one_does_not_want_it(struct ranks *r)
{
	setenv("TELPHER_WATCH", r->rank == 1 ? "0" : "2", 1);
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
	assert_int_equal(what_it_saw().calls, 0);
	assert_false(was_said("of its predicted speed"));
}

#define WITH_FILES(test) cmocka_unit_test_setup_teardown(test, make_files, remove_files)

int main(void)
{
	setenv("TELPHER_WATCH", "2", 1);
	const struct CMUnitTest tests[] = {
		WITH_FILES(results_stay_right_within_a_host), WITH_FILES(and_between_hosts), WITH_FILES(and_by_every_algorithm), WITH_FILES(and_on_streams_and_in_groups),
		WITH_FILES(an_abort_ends_whatever_they_are_at), WITH_FILES(a_slow_communicator_is_told_of), WITH_FILES(a_guess_is_no_measurement),
		WITH_FILES(what_is_said_of_pairs_does_not_contradict_itself), WITH_FILES(measuring_opens_nothing),
		WITH_FILES(whoever_has_no_memory_for_it_keeps_all_from_it), WITH_FILES(a_healthy_job_is_watched_and_hears_nothing),
		WITH_FILES(one_rank_that_does_not_want_it_is_enough),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

/* The watch over the pace of GPU ranks: one that is slow by figures that were measured is told of once, by the first rank, and nothing is said
 * where nobody knows what is slow. A table that predicts a thousandth of every time makes all slow. By default nothing is added to the user's stream. */
#include "cuda/helper_gpu.h"

#define COUNT ((size_t)256 << 10)       /* floats: what is watched from */
#define MOST_CALLS 800                  /* of one in sixteen two windows of sixteen are needed */

static char table[64], log_file[64], table_setting[96], log_setting[96];

static int make_files(void **state)
{
	(void)state;
	strcpy(table, "/tmp/telpher_gpu_pace_XXXXXX");
	strcpy(log_file, "/tmp/telpher_gpu_pace_log_XXXXXX");
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
	return unlink(table) | unlink(log_file);
}

static int lines_with(const char *what)
{
	char line[4096];
	int lines = 0;
	FILE *in = fopen(log_file, "r");
	assert_non_null(in);
	while (fgets(line, sizeof(line), in)) lines += strstr(line, what) != NULL;
	fclose(in);
	return lines;
}

static bool events_are_wanted = true;

static void reduces(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	float first;
	CUdeviceptr at = gpu_take(g, COUNT * sizeof(float), 0);
	int calls = *(int *)g->arg;
	gpu_fill(g, at, 0, COUNT * sizeof(float));
	REQUIRE_OK(ncclAllReduce(GPU_PTR(at), GPU_PTR(at), COUNT, ncclFloat32, ncclSum, g->comm, GPU_STREAM(g, 0)));
	gpu_sync(g, 0);
	long long events = gpu_count("events");
	for (int i = 0; i < calls; i++) {
		REQUIRE_OK(ncclAllReduce(GPU_PTR(at), GPU_PTR(at), COUNT, ncclFloat32, ncclSum, g->comm, GPU_STREAM(g, 0)));
		if (i % 8 == 7) gpu_sync(g, 0);
	}
	gpu_sync(g, 0);
	gpu_get(g, &first, at, sizeof(first));
	REQUIRE(first == 0);
	/* Who looks makes two, at one of the first calls; where that was the very first, they are counted before. */
	if (!events_are_wanted) REQUIRE(gpu_count("events") == events);
}

static int calls(void) { return SANITIZED ? 64 : MOST_CALLS; }      /* under sanitizers so many take a minute: then too few for a verdict */

/* The links' figures, as if somebody had measured them. */
static void add_figures(void)
{
	FILE *out = fopen(table, "a");
	assert_non_null(out);
	fprintf(out, "inside.latency_us 1.5\ninside.us_per_byte 1e-5\n");
	fclose(out);
}

static void run(int ncalls, bool threads, const char *watch)
{
	struct gpu_options options = { .nranks = 2, .ndevices = 2, .threads = threads, .timeout_s = 250, .env = { table_setting, log_setting, "NCCL_DEBUG=INFO", "NCCL_MAX_CTAS=2", watch } };
	assert_true(gpu_run(&options, reduces, &ncalls));
}

static void a_slow_communicator_is_told_of_once(void **state)
{
	(void)state;
	add_figures();
	run(calls(), false, "TELPHER_WATCH=2");
	if (SANITIZED) return;
	assert_int_equal(lines_with("keeps running at"), 1);
	assert_int_equal(lines_with("By the topology the slowest pair is rank "), 1);
	assert_int_equal(lines_with("AllReduce of 1048576 bytes a block by "), 1);
}

static void a_guess_is_no_warning(void **state)
{
	(void)state;
	run(calls(), false, "TELPHER_WATCH=2");
	assert_int_equal(lines_with("keeps running at"), 0);
	if (!SANITIZED) assert_int_equal(lines_with("The prediction may be wrong here"), 1);
}

static void nobody_looks_and_no_event_is_recorded_where_it_is_not_asked_for(void **state)
{
	(void)state;
	add_figures();
	events_are_wanted = false;
	run(calls(), true, NULL);
	events_are_wanted = true;
	assert_int_equal(lines_with("predicted speed"), 0);
}

#define WITH_FILES(test) cmocka_unit_test_setup_teardown(test, make_files, remove_files)

int main(void)
{
	gpu_need();
	const struct CMUnitTest tests[] = {
		WITH_FILES(a_slow_communicator_is_told_of_once), WITH_FILES(a_guess_is_no_warning),
		WITH_FILES(nobody_looks_and_no_event_is_recorded_where_it_is_not_asked_for),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

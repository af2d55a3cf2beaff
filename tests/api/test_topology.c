/* What communicators make of the machine: the file that is asked for, expectations of it, and that nothing about it that can't be read
 * keeps a job from running. */
#include "api/helper_ranks.h"

static char file[64];

static int make_file(void **state)
{
	(void)state;
	strcpy(file, "/tmp/telpher_topology_XXXXXX");
	int fd = mkstemp(file);
	return fd < 0 || close(fd) ? -1 : 0;
}

static int remove_file(void **state)
{
	(void)state;
	return unlink(file);
}

static void write_file(const char *text)
{
	FILE *out = fopen(file, "w");
	assert_non_null(out);
	fputs(text, out);
	fclose(out);
}

static char *read_file(const char *path)
{
	FILE *in = fopen(path, "r");
	char *text = calloc(1, 65536);
	assert_non_null(in);
	assert_true(fread(text, 1, 65535, in) > 0);
	fclose(in);
	return text;
}

static const char *setting(const char *name, const char *value)
{
	static char texts[4][160];
	static int next;
	char *text = texts[next++ % 4];
	snprintf(text, sizeof(texts[0]), "%s=%s", name, value);
	return text;
}

/* Works, and says something of each peer. */
static void works(struct ranks *r)
{
	float value = 1;
	char text[400];
	REQUIRE_OK(ncclAllReduce(&value, &value, 1, ncclFloat32, ncclSum, r->comm, NULL));
	REQUIRE(value == (float)r->nranks);
	REQUIRE_OK(telpher_comm_path(r->comm, r->rank, (r->rank + 1) % r->nranks, text, sizeof(text)));
	REQUIRE(text[0]);
}

static int count(const char *text, const char *what)
{
	int n = 0;
	for (const char *p = text; (p = strstr(p, what)); p++) n++;
	return n;
}

static void the_rank_that_is_asked_writes_its_host_with_all_ranks_of_it(void **state)
{
	(void)state;
	struct ranks_options options = { .nranks = 3, .env = { setting("NCCL_TOPO_DUMP_FILE", file), "NCCL_TOPO_DUMP_FILE_RANK=2" } };
	assert_true(ranks_run(&options, works, NULL));
	char *text = read_file(file);
	assert_int_equal(count(text, "<system"), 1);
	assert_int_equal(count(text, "<hostrank"), 3);
	assert_int_equal(count(text, "rank=\"2\""), 1);
	free(text);
}

static void on_two_hosts_the_file_has_the_writers_own(void **state)
{
	(void)state;
	struct ranks_options options = { .nranks = 4, .nhosts = 2, .env = { setting("NCCL_TOPO_DUMP_FILE", file) } };
	assert_true(ranks_run(&options, works, NULL));
	char *text = read_file(file);
	assert_int_equal(count(text, "<hostrank"), 2);
	assert_int_equal(count(text, "rank=\"1\""), 1);
	assert_true(count(text, "<net ") >= 1);
	free(text);
}

static void what_was_written_is_taken_in_the_next_run_too(void **state)
{
	(void)state;
	char again[80];
	snprintf(again, sizeof(again), "%s.again", file);
	struct ranks_options options = { .nranks = 2, .env = { setting("NCCL_TOPO_DUMP_FILE", file) } };
	assert_true(ranks_run(&options, works, NULL));
	options.env[1] = setting("NCCL_TOPO_FILE", file);
	options.env[0] = setting("NCCL_TOPO_DUMP_FILE", again);
	assert_true(ranks_run(&options, works, NULL));
	char *first = read_file(file), *second = read_file(again);
	unlink(again);
	assert_string_equal(first, second);
	free(first);
	free(second);
}

static void a_file_that_is_none_is_a_warning_and_the_job_runs(void **state)
{
	(void)state;
	write_file("<system><cpu");
	char dump[80];
	snprintf(dump, sizeof(dump), "%s.dump", file);
	struct ranks_options options = { .nranks = 2, .nhosts = 2, .env = { setting("NCCL_TOPO_FILE", file), setting("NCCL_TOPO_DUMP_FILE", dump) } };
	assert_true(ranks_run(&options, works, NULL));
	assert_int_not_equal(access(dump, F_OK), 0);
	options.env[0] = "NCCL_TOPO_FILE=/nowhere/at/all.xml";
	options.env[1] = "NCCL_TOPO_DUMP_FILE=/nowhere/at/all.xml";
	assert_true(ranks_run(&options, works, NULL));
}

static void refused(struct ranks *r)
{
	ncclComm_t comm = NULL;
	REQUIRE_IS(ncclCommInitRank(&comm, r->nranks, r->id, r->rank), ncclInvalidUsage);
	REQUIRE(!comm);
	REQUIRE_ERROR_HAS((const char *)r->arg);
	ranks_barrier(r);
}

static void joins(struct ranks *r)
{
	REQUIRE_OK(ncclCommInitRank(&r->comm, r->nranks, r->id, r->rank));
	works(r);
	REQUIRE_OK(ncclCommDestroy(r->comm));
	r->comm = NULL;
}

static void a_machine_that_is_not_as_expected_is_refused_by_all_ranks(void **state)
{
	(void)state;
	char found[] = "TELPHER_EXPECT: expected gpus=3, found 0 at the machine";
	struct ranks_options options = { .nranks = 3, .no_comm = true, .env = { "TELPHER_EXPECT=path=SHM gpus=3" } };
	assert_true(ranks_run(&options, refused, found));
	char nothing[] = "found nothing there to look at";
	options.env[0] = "TELPHER_EXPECT=gdr=on";
	assert_true(ranks_run(&options, refused, nothing));
}

static void warned(struct ranks *r)
{
	joins(r);
	/* The first of the host looks. */
	if (r->rank == 0) REQUIRE_ERROR_HAS((const char *)r->arg);
}

static void under_warn_the_job_runs_and_is_told(void **state)
{
	(void)state;
	char found[] = "TELPHER_EXPECT: expected gpus=3, found 0 at the machine";
	struct ranks_options options = { .nranks = 2, .no_comm = true, .env = { "TELPHER_EXPECT=gpus=3", "TELPHER_EXPECT_MODE=warn" } };
	assert_true(ranks_run(&options, warned, found));
}

static void a_file_of_expectations_is_read(void **state)
{
	(void)state;
	struct ranks_options options = { .nranks = 2, .no_comm = true, .env = { setting("TELPHER_EXPECT", file) } };
	write_file("# a good day\ngpus=0    # GPUs of the machine\nlocal=SHM\n");
	assert_true(ranks_run(&options, joins, NULL));
	char found[] = "expected gpus=1, found 0";
	write_file("gpus=1\n");
	assert_true(ranks_run(&options, refused, found));
}

static void unreadable(struct ranks *r)
{
	ncclComm_t comm = NULL;
	ncclResult_t result = ncclCommInitRank(&comm, r->nranks, r->id, r->rank);
	REQUIRE(result == ncclInvalidArgument || result == ncclRemoteError || result == ncclInvalidUsage);
	REQUIRE_ERROR_HAS((const char *)r->arg);
	ranks_barrier(r);
}

static void expectations_that_cannot_be_read_are_refused(void **state)
{
	(void)state;
	char none[] = "is no list (key=value …) and no file that can be read", key[] = "nothing can be expected of 'speed'";
	struct ranks_options options = { .nranks = 1, .no_comm = true, .env = { "TELPHER_EXPECT=/nowhere/at/all" } };
	assert_true(ranks_run(&options, unreadable, none));
	options.env[0] = "TELPHER_EXPECT=nics>=1 speed=high";
	assert_true(ranks_run(&options, unreadable, key));
}

static void ranks_that_are_threads_are_all_there(void **state)
{
	(void)state;
	struct ranks_options options = { .nranks = 4, .threads = true, .env = { setting("NCCL_TOPO_DUMP_FILE", file) } };
	assert_true(ranks_run(&options, works, NULL));
	char *text = read_file(file);
	assert_int_equal(count(text, "<hostrank"), 4);
	free(text);
}

static void the_report_has_what_the_topology_says(void **state)
{
	(void)state;
	struct ranks_options options = { .nranks = 2, .nhosts = 2, .env = { "NCCL_DEBUG=INFO", "NCCL_DEBUG_SUBSYS=GRAPH", setting("NCCL_DEBUG_FILE", file) } };
	assert_true(ranks_run(&options, works, NULL));
	char *text = read_file(file);
	assert_non_null(strstr(text, "topology"));
	assert_non_null(strstr(text, "GB/s"));
	assert_non_null(strstr(text, "NET/"));
	free(text);
}

#define WITH_FILE(test) cmocka_unit_test_setup_teardown(test, make_file, remove_file)

int main(void)
{
	const struct CMUnitTest tests[] = {
		WITH_FILE(the_rank_that_is_asked_writes_its_host_with_all_ranks_of_it), WITH_FILE(on_two_hosts_the_file_has_the_writers_own),
		WITH_FILE(what_was_written_is_taken_in_the_next_run_too), WITH_FILE(a_file_that_is_none_is_a_warning_and_the_job_runs),
		WITH_FILE(a_machine_that_is_not_as_expected_is_refused_by_all_ranks), WITH_FILE(under_warn_the_job_runs_and_is_told),
		WITH_FILE(a_file_of_expectations_is_read), WITH_FILE(expectations_that_cannot_be_read_are_refused),
		WITH_FILE(ranks_that_are_threads_are_all_there), WITH_FILE(the_report_has_what_the_topology_says),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

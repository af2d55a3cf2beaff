/* The path report for programs: text of a pair, JSON of all, the file that is asked for. */
#include "api/helper_ranks.h"

static char *paths_of(struct ranks *r, int from)
{
	size_t bytes = 0, again;
	REQUIRE_OK(telpher_comm_paths(r->comm, from, NULL, &bytes));
	REQUIRE(bytes > 2);
	char *text = malloc(bytes);
	REQUIRE(text);
	again = bytes;
	REQUIRE_OK(telpher_comm_paths(r->comm, from, text, &again));
	REQUIRE(again == bytes && strlen(text) + 1 == bytes);
	REQUIRE(text[0] == '{' && strcmp(text + bytes - 4, "]}\n") == 0);
	return text;
}

static int count(const char *text, const char *what)
{
	int n = 0;
	for (const char *p = text; (p = strstr(p, what)); p++) n++;
	return n;
}

static void all_pairs(struct ranks *r)
{
	char *text = paths_of(r, -1);
	REQUIRE(count(text, "\"from\":") == r->nranks * (r->nranks - 1));
	REQUIRE(count(text, "\"host_name\":") == r->nranks);
	REQUIRE(strstr(text, "\"ranks_are\":\"host processes\""));
	/* Two hosts of two: within one there is shared memory, between them not, for a reason. */
	REQUIRE(count(text, "\"via\":\"NET/Socket/0\"") == 8 && count(text, "\"kind\":\"SHM/CMA\",\"code\":\"other-host\"") == 8);
	REQUIRE(count(text, "\"kind\":\"NET/IB\",\"code\":\"forced\"") == 8);
	REQUIRE(count(text, "\"same_host\":true") == 4);
	free(text);
	text = paths_of(r, 1);
	REQUIRE(count(text, "\"from\":1,") == 3 && count(text, "\"from\":") == 3);
	free(text);
}

static void every_pair_is_there_with_what_it_refused(void **state)
{
	(void)state;
	struct ranks_options options = { .nranks = 4, .nhosts = 2, .env = { "NCCL_NET=Socket" } };
	assert_true(ranks_run(&options, all_pairs, NULL));
}

static void copied_twice(struct ranks *r)
{
	char *text = paths_of(r, 0);
	REQUIRE(strstr(text, "\"via\":\"NET/Socket/0\""));
	REQUIRE(strstr(text, "{\"kind\":\"SHM/CMA\",\"code\":\"disabled\",\"why\":\"NCCL_SHM_DISABLE=1 on some rank\"}"));
	free(text);
}

static void a_path_that_a_variable_forbids_is_told(void **state)
{
	(void)state;
	struct ranks_options options = { .nranks = 2, .env = { "NCCL_SHM_DISABLE=1", "NCCL_NET=Socket" } };
	assert_true(ranks_run(&options, copied_twice, NULL));
}

static void alone(struct ranks *r)
{
	char *text = paths_of(r, -1);
	REQUIRE(strstr(text, "\"paths\":[]}"));
	free(text);
}

static void one_rank_has_no_paths(void **state) { (void)state; assert_true(ranks_run_n(1, alone, NULL)); }

static void wrong(struct ranks *r)
{
	char text[64] = "before";
	size_t bytes = sizeof(text), needed = 0;
	REQUIRE_IS(telpher_comm_paths(r->comm, -1, text, NULL), ncclInvalidArgument);
	REQUIRE_IS(telpher_comm_paths(NULL, -1, text, &bytes), ncclInvalidArgument);
	REQUIRE_IS(telpher_comm_paths(r->comm, 2, text, &bytes), ncclInvalidArgument);
	REQUIRE_IS(telpher_comm_paths(r->comm, -2, text, &bytes), ncclInvalidArgument);
	REQUIRE(bytes == sizeof(text));
	REQUIRE_IS(telpher_comm_paths(r->comm, -1, text, &bytes), ncclInvalidArgument);
	REQUIRE_OK(telpher_comm_paths(r->comm, -1, NULL, &needed));
	REQUIRE(bytes == needed && strcmp(text, "before") == 0);
	REQUIRE_ERROR_HAS("there is room for 64");
	REQUIRE_IS(telpher_comm_path(r->comm, 0, 1, NULL, 9), ncclInvalidArgument);
	REQUIRE_IS(telpher_comm_path(r->comm, 0, 1, text, 0), ncclInvalidArgument);
	REQUIRE_IS(telpher_comm_path(r->comm, -1, 1, text, sizeof(text)), ncclInvalidArgument);
}

static void what_makes_no_sense_is_an_error_and_writes_nothing(void **state) { (void)state; assert_true(ranks_run_n(2, wrong, NULL)); }

static void names_the_link(struct ranks *r)
{
	char text[400], few[4];
	REQUIRE_OK(telpher_comm_path(r->comm, 0, 1, text, sizeof(text)));
	REQUIRE(strncmp(text, "NET/Socket/0: not SHM: ", 23) == 0);
	REQUIRE_OK(telpher_comm_path(r->comm, 1, 0, few, sizeof(few)));
	REQUIRE(strcmp(few, "NET") == 0);
}

static void the_text_of_a_pair_begins_with_its_link(void **state)
{
	(void)state;
	struct ranks_options options = { .nranks = 2, .nhosts = 2, .env = { "NCCL_NET=Socket" } };
	assert_true(ranks_run(&options, names_the_link, NULL));
}

static char file[64];

static void splits(struct ranks *r)
{
	ncclComm_t half = NULL;
	REQUIRE_OK(ncclCommSplit(r->comm, r->rank / 2, r->rank, &half, NULL));
	REQUIRE_OK(ncclCommDestroy(half));
}

static void each_communicator_adds_a_whole_line_to_the_file(void **state)
{
	(void)state;
	char setting[96], line[65536];
	int lines = 0, whole = 0;
	strcpy(file, "/tmp/telpher_paths_XXXXXX");
	int fd = mkstemp(file);
	assert_true(fd >= 0);
	close(fd);
	snprintf(setting, sizeof(setting), "TELPHER_PATHS_FILE=%s", file);
	struct ranks_options options = { .nranks = 4, .env = { setting } };
	assert_true(ranks_run(&options, splits, NULL));
	FILE *in = fopen(file, "r");
	assert_non_null(in);
	for (; fgets(line, sizeof(line), in); lines++)
		whole += line[0] == '{' && strcmp(line + strlen(line) - 4, "}]}\n") == 0 && count(line, "\"telpher\":") == 1;
	fclose(in);
	unlink(file);
	assert_int_equal(lines, 3);
	assert_int_equal(whole, 3);
}

static void works(struct ranks *r)
{
	float value = 1;
	REQUIRE_OK(ncclAllReduce(&value, &value, 1, ncclFloat32, ncclSum, r->comm, NULL));
	if (r->rank == 0) REQUIRE_ERROR_HAS("TELPHER_PATHS_FILE: /nowhere/at/all can't be written");
}

static void a_file_that_cannot_be_written_is_a_warning(void **state)
{
	(void)state;
	struct ranks_options options = { .nranks = 2, .env = { "TELPHER_PATHS_FILE=/nowhere/at/all" } };
	assert_true(ranks_run(&options, works, NULL));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_pair_is_there_with_what_it_refused), cmocka_unit_test(a_path_that_a_variable_forbids_is_told),
		cmocka_unit_test(one_rank_has_no_paths), cmocka_unit_test(what_makes_no_sense_is_an_error_and_writes_nothing),
		cmocka_unit_test(the_text_of_a_pair_begins_with_its_link), cmocka_unit_test(each_communicator_adds_a_whole_line_to_the_file),
		cmocka_unit_test(a_file_that_cannot_be_written_is_a_warning),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

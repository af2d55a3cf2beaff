#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "base/helper_base.h"
#include "sanitizers.h"

enum { P_NUMBER, P_SIZE, P_FLAG, P_TEXT, P_CHOICE, P_UNSET, P_SECRET };
static struct tp_param params[] = {
	[P_NUMBER] = { .name = "TELPHER_TEST_NUMBER", .kind = TP_PARAM_INT, .fallback = "7", .min = -2, .max = 100, .doc = "a number" },
	[P_SIZE] = { .name = "TELPHER_TEST_SIZE", .kind = TP_PARAM_BYTES, .fallback = "64K", .min = 0, .max = 1ll << 40, .doc = "a size" },
	[P_FLAG] = { .name = "TELPHER_TEST_FLAG", .kind = TP_PARAM_BOOL, .fallback = "1", .doc = "a flag" },
	[P_TEXT] = { .name = "TELPHER_TEST_TEXT", .kind = TP_PARAM_STRING, .fallback = "default", .doc = "a text" },
	[P_CHOICE] = { .name = "TELPHER_TEST_CHOICE", .kind = TP_PARAM_ENUM, .choices = "host|cuda|auto", .fallback = "auto", .doc = "a choice" },
	[P_UNSET] = { .name = "TELPHER_TEST_UNSET", .kind = TP_PARAM_STRING, .doc = "a text without default" },
	[P_SECRET] = { .name = "TELPHER_TEST_SECRET", .kind = TP_PARAM_STRING, .doc = "not for others" },
};
TP_PARAM_TABLE("test", params)

static int clean(void **s)
{
	(void)s;
	test_clean_environment();
	return 0;
}

static void defaults_hold_where_nothing_is_set(void **s)
{
	(void)s;
	assert_int_equal(tp_param_int(&params[P_NUMBER]), 7);
	assert_int_equal(tp_param_int(&params[P_SIZE]), 65536);
	assert_int_equal(tp_param_int(&params[P_FLAG]), 1);
	assert_int_equal(tp_param_int(&params[P_CHOICE]), 2);
	assert_string_equal(tp_param_string(&params[P_TEXT]), "default");
	assert_null(tp_param_string(&params[P_UNSET]));
	assert_false(tp_param_is_set(&params[P_NUMBER]));
	assert_int_equal(params[P_NUMBER].origin, TP_FROM_DEFAULT);
}

static void sizes_take_units(void **s)
{
	(void)s;
	static const struct { const char *text; int64_t bytes; } cases[] = {
		{ "0", 0 }, { "1", 1 }, { "1k", 1024 }, { "4M", 4 << 20 }, { "1G", 1 << 30 }, { "64KiB", 65536 }, { "64KB", 65536 }, { "0x10", 16 },
		{ "1T", 1ll << 40 },
	};
	for (size_t i = 0; i < TP_ARRAY_LEN(cases); i++) {
		test_set("TELPHER_TEST_SIZE", cases[i].text);
		assert_int_equal(tp_param_int(&params[P_SIZE]), cases[i].bytes);
		assert_true(tp_param_is_set(&params[P_SIZE]));
	}
}

static void flags_and_choices_are_words(void **s)
{
	(void)s;
	test_set("TELPHER_TEST_FLAG", "OFF");
	test_set("TELPHER_TEST_CHOICE", "Host");
	assert_int_equal(tp_param_int(&params[P_FLAG]), 0);
	assert_int_equal(tp_param_int(&params[P_CHOICE]), 0);
	test_set("TELPHER_TEST_FLAG", "yes");
	assert_int_equal(tp_param_int(&params[P_FLAG]), 1);
}

static void what_is_no_value_is_warned_of_and_the_default_holds(void **s)
{
	(void)s;
	static const struct { int param; const char *text; int64_t value; const char *warning; } cases[] = {
		{ P_NUMBER, "101", 7, "TELPHER_TEST_NUMBER=101: expected a whole number from -2 to 100; using 7" },
		{ P_NUMBER, "-3", 7, "expected a whole number from -2 to 100; using 7" },
		{ P_NUMBER, "1x", 7, "TELPHER_TEST_NUMBER=1x: expected" },
		{ P_NUMBER, "4K", 7, "TELPHER_TEST_NUMBER=4K: expected" },
		{ P_NUMBER, "99999999999999999999", 7, "expected a whole number" },
		{ P_SIZE, "9223372036854775807K", 65536, "expected a size" },
		{ P_SIZE, "-1", 65536, "expected a size" },
		{ P_SIZE, "K", 65536, "expected a size" },
		{ P_SIZE, "1Q", 65536, "expected a size" },
		{ P_FLAG, "2", 1, "TELPHER_TEST_FLAG=2: expected 0 or 1; using 1" },
		{ P_CHOICE, "gpu", 2, "TELPHER_TEST_CHOICE=gpu: expected one of host|cuda|auto; using auto" },
		{ P_CHOICE, "host|cuda", 2, "expected one of" },
	};
	for (size_t i = 0; i < TP_ARRAY_LEN(cases); i++) {
		struct tp_param *param = &params[cases[i].param];
		test_set(param->name, cases[i].text);
		assert_int_equal(tp_param_int(param), cases[i].value);
		assert_non_null(strstr(tp_log_last_error(), cases[i].warning));
		assert_int_equal(param->origin, TP_FROM_DEFAULT);
		test_set(param->name, NULL);
	}
}

static void a_bad_value_is_warned_of_once(void **s)
{
	(void)s;
	test_set("NCCL_DEBUG", "WARN");
	test_set("TELPHER_TEST_NUMBER", "many");
	test_capture_begin();
	for (int i = 0; i < 3; i++)
		tp_param_int(&params[P_NUMBER]);
	assert_int_equal(test_count(test_capture_end(), "TELPHER_TEST_NUMBER"), 1);
}

static void an_empty_number_is_unset_an_empty_text_is_a_text(void **s)
{
	(void)s;
	test_set("TELPHER_TEST_NUMBER", "");
	test_set("TELPHER_TEST_TEXT", "");
	assert_int_equal(tp_param_int(&params[P_NUMBER]), 7);
	assert_false(tp_param_is_set(&params[P_NUMBER]));
	assert_string_equal(tp_param_string(&params[P_TEXT]), "");
}

static void values_are_read_once(void **s)
{
	(void)s;
	test_set("TELPHER_TEST_NUMBER", "1");
	assert_int_equal(tp_param_int(&params[P_NUMBER]), 1);
	setenv("TELPHER_TEST_NUMBER", "2", 1);
	assert_int_equal(tp_param_int(&params[P_NUMBER]), 1);
	tp_param_reload();
	assert_int_equal(tp_param_int(&params[P_NUMBER]), 2);
}

static void a_value_outlives_its_variable(void **s)
{
	(void)s;
	test_set("TELPHER_TEST_TEXT", "kept");
	const char *text = tp_param_string(&params[P_TEXT]);
	test_set("TELPHER_TEST_TEXT", "other");
	assert_string_equal(tp_param_string(&params[P_TEXT]), "other");
	assert_string_equal(text, "kept");
}

static void the_environment_wins_over_the_file(void **s)
{
	(void)s;
	const char *path = test_file("TELPHER_TEST_NUMBER=11\nTELPHER_TEST_TEXT = from the file # not from here\n");
	test_set("NCCL_CONF_FILE", path);
	assert_int_equal(tp_param_int(&params[P_NUMBER]), 11);
	assert_int_equal(params[P_NUMBER].origin, TP_FROM_FILE);
	assert_string_equal(params[P_NUMBER].origin_file, path);
	assert_string_equal(tp_param_string(&params[P_TEXT]), "from the file");
	test_set("TELPHER_TEST_NUMBER", "12");
	assert_int_equal(tp_param_int(&params[P_NUMBER]), 12);
	assert_int_equal(params[P_NUMBER].origin, TP_FROM_ENVIRONMENT);
}

static void the_file_in_the_home_directory_is_read_unless_another_is_named(void **s)
{
	(void)s;
	char home[] = "/tmp/telpher-home-XXXXXX", path[64];
	assert_non_null(mkdtemp(home));
	snprintf(path, sizeof(path), "%s/.nccl.conf", home);
	FILE *f = fopen(path, "w");
	fputs("TELPHER_TEST_NUMBER=21\n", f);
	fclose(f);
	test_set("HOME", home);
	assert_int_equal(tp_param_int(&params[P_NUMBER]), 21);
	test_set("NCCL_CONF_FILE", test_file("TELPHER_TEST_SIZE=22\n"));
	assert_int_equal(tp_param_int(&params[P_NUMBER]), 7);
	assert_int_equal(tp_param_int(&params[P_SIZE]), 22);
	unlink(path);
	rmdir(home);
}

static void the_log_can_be_set_by_a_file(void **s)
{
	(void)s;
	test_set("NCCL_CONF_FILE", test_file("NCCL_DEBUG=INFO\nNCCL_DEBUG_SUBSYS=NET\n"));
	assert_true(tp_log_wants(TP_LOG_INFO, TP_NET));
	assert_false(tp_log_wants(TP_LOG_INFO, TP_INIT));
}

static void a_broken_file_is_warned_of_by_line_and_the_rest_holds(void **s)
{
	(void)s;
	test_set("NCCL_CONF_FILE", test_file("NCCL_DEBUG=WARN\nthis is no line\nTELPHER_TEST_NUMBER=3\n"));
	test_capture_begin();
	/* The log's own first line reads the file that it must complain of. */
	TP_WARN("first line");
	const char *out = test_capture_end();
	assert_int_equal(test_count(out, ":2: expected NAME=value"), 1);
	assert_int_equal(test_count(out, "WARN first line"), 1);
	assert_int_equal(tp_param_int(&params[P_NUMBER]), 3);
}

static void a_parameters_first_read_may_meet_a_broken_file(void **s)
{
	(void)s;
	test_set("NCCL_CONF_FILE", test_file("NCCL_DEBUG=WARN\n=\nTELPHER_TEST_NUMBER=3000\n"));
	test_capture_begin();
	assert_int_equal(tp_param_int(&params[P_NUMBER]), 7);
	const char *out = test_capture_end();
	assert_int_equal(test_count(out, ":2: expected NAME=value"), 1);
	assert_int_equal(test_count(out, "TELPHER_TEST_NUMBER=3000: expected"), 1);
}

static void a_named_file_that_is_not_there_is_warned_of(void **s)
{
	(void)s;
	test_set("NCCL_CONF_FILE", "/nonexistent/nccl.conf");
	tp_param_int(&params[P_NUMBER]);
	assert_string_equal(tp_log_last_error(), "can't read the configuration file /nonexistent/nccl.conf (NCCL_CONF_FILE): No such file or directory");
	test_set("NCCL_CONF_FILE", "/dev/zero");
	tp_param_int(&params[P_NUMBER]);
	assert_non_null(strstr(tp_log_last_error(), "/dev/zero isn't a plain file"));
}

static void *read_all(void *arg)
{
	pthread_barrier_wait(arg);
	for (size_t i = 0; i < TP_ARRAY_LEN(params); i++)
		tp_param_string(&params[i]);
	assert_int_equal(tp_param_int(&params[P_NUMBER]), 7);
	return NULL;
}

static void threads_may_meet_at_the_first_read(void **s)
{
	(void)s;
	for (int round = 0; round < 4; round++) {
		pthread_barrier_t barrier;
		pthread_t threads[4];
		pthread_barrier_init(&barrier, NULL, 4);
		test_set("NCCL_CONF_FILE", test_file("bad line\n"));
		test_set("TELPHER_TEST_NUMBER", "bad");
		for (int i = 0; i < 4; i++)
			pthread_create(&threads[i], NULL, read_all, &barrier);
		TP_INFO(TP_INIT, "meanwhile");
		for (int i = 0; i < 4; i++)
			pthread_join(threads[i], NULL);
		pthread_barrier_destroy(&barrier);
	}
}

static void parameters_are_found_by_name(void **s)
{
	(void)s;
	assert_ptr_equal(tp_param_find("TELPHER_TEST_NUMBER"), &params[P_NUMBER]);
	assert_null(tp_param_find("TELPHER_TEST_NOTHING"));
	assert_non_null(tp_param_find("NCCL_DEBUG"));
}

static void a_table_registers_once(void **s)
{
	(void)s;
	tp_param_register(&params_table);
	size_t times = 0;
	for (const struct tp_param_table *t = tp_param_first_table(); t; t = t->next)
		times += t == &params_table;
	assert_int_equal(times, 1);
}

static void every_default_is_a_value(void **s)
{
	(void)s;
	for (const struct tp_param_table *t = tp_param_first_table(); t; t = t->next) {
		for (size_t i = 0; i < t->count; i++) {
			int64_t number;
			if (t->params[i].fallback)
				assert_true(tp_param_parse(&t->params[i], t->params[i].fallback, &number));
			assert_non_null(t->params[i].doc);
		}
	}
}

static const char *report(void)
{
	test_capture_begin();
	tp_param_report_environment();
	return test_capture_end();
}

static void what_is_set_is_reported_with_its_origin(void **s)
{
	(void)s;
	test_set("NCCL_DEBUG", "INFO");
	test_set("TELPHER_TEST_NUMBER", "5");
	const char *path = test_file("TELPHER_TEST_TEXT=hello\n");
	test_set("NCCL_CONF_FILE", path);
	char expected[256];
	const char *out = report();
	assert_true(test_matches(out, "NCCL INFO TELPHER_TEST_NUMBER set by environment to 5\\.$"));
	snprintf(expected, sizeof(expected), "NCCL INFO TELPHER_TEST_TEXT set by %s to hello$", path);
	assert_true(test_matches(out, expected));
	assert_int_equal(test_count(out, "TELPHER_TEST_FLAG"), 0);
}

static void the_report_is_made_once(void **s)
{
	(void)s;
	test_set("NCCL_DEBUG", "INFO");
	assert_true(strlen(report()) > 0);
	assert_string_equal(report(), "");
}

static void secrets_are_not_reported(void **s)
{
	(void)s;
	test_set("NCCL_DEBUG", "INFO");
	test_set("TELPHER_TEST_SECRET", "hunter2");
	const char *out = report();
	assert_int_equal(test_count(out, "hunter2"), 0);
	assert_int_equal(test_count(out, "TELPHER_TEST_SECRET set by environment to (not shown)"), 1);
}

static void a_misspelt_name_is_warned_of_with_the_nearest(void **s)
{
	(void)s;
	test_set("NCCL_DEBUG", "WARN");
	test_set("TELPHER_TEST_NUMBRE", "5");
	test_set("TELPHER_XYZZY_QUUX", "5");
	test_set("NCCL_SOKCET_IFNAME", "lo");
	const char *out = report();
	assert_true(test_matches(out, "TELPHER_TEST_NUMBRE \\(environment\\) is unknown and has no effect; did you mean TELPHER_TEST_NUMBER\\?$"));
	assert_true(test_matches(out, "TELPHER_XYZZY_QUUX \\(environment\\) is unknown and has no effect; `telpher env`"));
	assert_true(test_matches(out, "NCCL_SOKCET_IFNAME \\(environment\\) is unknown.*did you mean NCCL_SOCKET_IFNAME\\?$"));
}

static void what_telpher_run_sets_is_known(void **s)
{
	(void)s;
	test_set("NCCL_DEBUG", "INFO");
	test_set("TELPHER_RANK", "0");
	test_set("TELPHER_LOCAL_NRANKS", "2");
	test_set("TELPHER_JOB", "c0ffee");
	const char *out = report();
	assert_int_equal(test_count(out, "unknown"), 0);
}

static void names_in_files_are_checked_too(void **s)
{
	(void)s;
	test_set("NCCL_DEBUG", "WARN");
	test_set("NCCL_CONF_FILE", test_file("TELPHER_TEST_NUMBR=5\n"));
	assert_true(test_matches(report(), "TELPHER_TEST_NUMBR \\(/tmp/telpher-test-.*\\) is unknown.*TELPHER_TEST_NUMBER\\?$"));
}

static void names_of_other_libraries_in_files_are_left_alone(void **s)
{
	(void)s;
	test_set("NCCL_DEBUG", "WARN");
	test_set("NCCL_CONF_FILE", test_file("TORCH_SYMM_MEM_DISABLE_MULTICAST=1\nNVSHMEM_DISABLE_NVLS=1\n"));
	assert_string_equal(report(), "");
}

static void a_known_name_without_effect_is_information_not_a_warning(void **s)
{
	(void)s;
	test_set("NCCL_NVLS_ENABLE", "0");
	test_set("NCCL_DEBUG", "WARN");
	assert_string_equal(report(), "");
	test_set("NCCL_DEBUG", "INFO");
	assert_int_equal(test_count(report(), "NCCL_NVLS_ENABLE (environment) has no effect here: NVLink multicast isn't used"), 1);
}

struct visited { enum tp_env_status status; const char *where, *text; int times; };

static void note_visit(void *arg, const char *name, const char *where, enum tp_env_status status, const char *text)
{
	struct visited *v = arg;
	if (strcmp(name, "NCCL_VERSION") == 0)
		fail_msg("NCCL_VERSION was visited");
	int k = strcmp(name, "TELPHER_TEST_TEXT") == 0 ? 0 : strcmp(name, "NCCL_NVLS_ENABLE") == 0 ? 1 : strcmp(name, "TELPHER_TEST_NUMBR") == 0 ? 2 :
		strcmp(name, "TELPHER_XYZZY_QUUX") == 0 ? 3 : -1;
	if (k < 0)
		return;
	v[k] = (struct visited){ status, strcmp(where, "environment") == 0 ? "environment" : "file", text, v[k].times + 1 };
}

static void names_that_are_set_are_visited_with_what_is_known_of_them(void **s)
{
	(void)s;
	test_set("TELPHER_TEST_TEXT", "x");
	test_set("NCCL_NVLS_ENABLE", "0");
	test_set("TELPHER_XYZZY_QUUX", "1");
	test_set("NCCL_VERSION", "2.28.9-1");
	test_set("NCCL_CONF_FILE", test_file("TELPHER_TEST_NUMBR=5\n"));
	struct visited v[4] = { 0 };
	tp_env_visit_set(note_visit, v);
	for (int k = 0; k < 4; k++) {
		assert_int_equal(v[k].times, 1);
		assert_string_equal(v[k].where, k == 2 ? "file" : "environment");
	}
	assert_int_equal(v[0].status, TP_ENV_HONOURED);
	assert_int_equal(v[1].status, TP_ENV_NO_EFFECT);
	assert_string_equal(v[1].text, "NVLink multicast isn't used");
	assert_int_equal(v[2].status, TP_ENV_UNKNOWN);
	assert_string_equal(v[2].text, "TELPHER_TEST_NUMBER");
	assert_int_equal(v[3].status, TP_ENV_UNKNOWN);
	assert_null(v[3].text);
}

static void variables_of_images_and_builds_are_left_alone(void **s)
{
	(void)s;
	test_set("NCCL_DEBUG", "WARN");
	test_set("NCCL_VERSION", "2.28.9-1");
	test_set("NCCL_ROOT_DIR", "/usr");
	test_set("NCCL_TESTS_SPLIT", "0");
	test_set("TELPHER_VERBS_DEVICES", "2");
	assert_string_equal(report(), "");
}

static void the_catalogue_is_sorted_and_knows_what_is_honoured(void **s)
{
	(void)s;
	size_t count;
	const struct tp_env_name *names = tp_env_names(&count);
	assert_true(count > 200);
	for (size_t i = 0; i < count; i++) {
		if (i > 0)
			assert_true(strcmp(names[i - 1].name, names[i].name) < 0);
		assert_int_equal(names[i].status == TP_ENV_HONOURED, tp_param_find(names[i].name) != NULL);
		assert_int_equal(names[i].why != NULL, names[i].status != TP_ENV_HONOURED);
	}
}

static void the_nearest_name_is_near(void **s)
{
	(void)s;
	static const char *const names[] = { "TELPHER_DEVICE", "TELPHER_EXPECT", "TELPHER_ISA" };
	assert_string_equal(tp_param_nearest("TELPHER_DEVCIE", names, 3), "TELPHER_DEVICE");
	assert_string_equal(tp_param_nearest("TELPHER_DEVICES", names, 3), "TELPHER_DEVICE");
	assert_string_equal(tp_param_nearest("TELPHER_IAS", names, 3), "TELPHER_ISA");
	assert_null(tp_param_nearest("TELPHER_SOMETHING_ELSE", names, 3));
	assert_null(tp_param_nearest("", names, 3));
	char longest[500];
	memset(longest, 'A', sizeof(longest));
	longest[499] = 0;
	assert_null(tp_param_nearest(longest, names, 3));
}

static void conf_first_line_of_a_name_counts_and_comments_and_blanks_do_not(void **s)
{
	(void)s;
	struct tp_conf conf = { 0 };
	const char *text = "# head\n\n  NCCL_A = 1 \nNCCL_B=x y\t# tail\r\nNCCL_A=2\nNCCL_C=\nNCCL_D=a=b";
	tp_conf_parse(&conf, text, strlen(text), "f");
	assert_int_equal(conf.count, 4);
	assert_int_equal(conf.nwarnings, 0);
	assert_string_equal(conf.entries[0].value, "1");
	assert_string_equal(conf.entries[1].value, "x y");
	assert_string_equal(conf.entries[2].value, "");
	assert_string_equal(conf.entries[3].value, "a=b");
	assert_int_equal(conf.entries[3].line, 7);
	tp_conf_free(&conf);
}

static void conf_bad_lines_are_left_out_with_a_warning_each(void **s)
{
	(void)s;
	struct tp_conf conf = { 0 };
	static const char text[] = "NCCL-A=1\n=1\nNCCL_A\nexport NCCL_B=1\nNCCL_C=1\0002\nNCCL_D=1\n";
	tp_conf_parse(&conf, text, sizeof(text) - 1, "f");
	assert_int_equal(conf.count, 1);
	assert_string_equal(conf.entries[0].name, "NCCL_D");
	assert_int_equal(conf.nwarnings, 5);
	assert_non_null(strstr(conf.warnings[0], "f:1: expected NAME=value"));
	tp_conf_free(&conf);
}

static void conf_has_limits(void **s)
{
	(void)s;
	struct tp_conf conf = { 0 };
	char line[64];
	for (int i = 0; i < 1100; i++) {
		int n = snprintf(line, sizeof(line), "NCCL_%d=1\n", i);
		tp_conf_parse(&conf, line, (size_t)n, "f");
	}
	assert_int_equal(conf.count, 1024);
	assert_int_equal(conf.nwarnings, TP_CONF_WARNINGS);
	tp_conf_free(&conf);
}

static void *read_until_told(void *arg)
{
	while (!atomic_load((_Atomic bool *)arg)) {
		size_t count;
		tp_param_reload();
		tp_param_int(&params[P_NUMBER]);
		tp_env_names(&count);
	}
	return NULL;
}

static void a_child_forked_while_others_read_parameters_can_read(void **s)
{
	(void)s;
	if (SANITIZED) skip();
	_Atomic bool stop = false;
	pthread_t thread;
	int bad = 0;
	pthread_create(&thread, NULL, read_until_told, (void *)&stop);
	for (int i = 0; i < 100 && !bad; i++) {
		pid_t child = fork();
		if (child == 0) {
			size_t count;
			alarm(60);
			tp_param_reload();
			tp_env_names(&count);
			_exit(tp_param_int(&params[P_NUMBER]) != 7);
		}
		waitpid(child, &bad, 0);
	}
	atomic_store(&stop, true);
	pthread_join(thread, NULL);
	assert_int_equal(bad, 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup(defaults_hold_where_nothing_is_set, clean),
		cmocka_unit_test_setup(sizes_take_units, clean),
		cmocka_unit_test_setup(flags_and_choices_are_words, clean),
		cmocka_unit_test_setup(what_is_no_value_is_warned_of_and_the_default_holds, clean),
		cmocka_unit_test_setup(a_bad_value_is_warned_of_once, clean),
		cmocka_unit_test_setup(an_empty_number_is_unset_an_empty_text_is_a_text, clean),
		cmocka_unit_test_setup(values_are_read_once, clean),
		cmocka_unit_test_setup(a_value_outlives_its_variable, clean),
		cmocka_unit_test_setup(the_environment_wins_over_the_file, clean),
		cmocka_unit_test_setup(the_file_in_the_home_directory_is_read_unless_another_is_named, clean),
		cmocka_unit_test_setup(the_log_can_be_set_by_a_file, clean),
		cmocka_unit_test_setup(a_broken_file_is_warned_of_by_line_and_the_rest_holds, clean),
		cmocka_unit_test_setup(a_parameters_first_read_may_meet_a_broken_file, clean),
		cmocka_unit_test_setup(a_named_file_that_is_not_there_is_warned_of, clean),
		cmocka_unit_test_setup(threads_may_meet_at_the_first_read, clean),
		cmocka_unit_test_setup(a_child_forked_while_others_read_parameters_can_read, clean),
		cmocka_unit_test_setup(parameters_are_found_by_name, clean),
		cmocka_unit_test_setup(a_table_registers_once, clean),
		cmocka_unit_test_setup(every_default_is_a_value, clean),
		cmocka_unit_test_setup(what_is_set_is_reported_with_its_origin, clean),
		cmocka_unit_test_setup(the_report_is_made_once, clean),
		cmocka_unit_test_setup(secrets_are_not_reported, clean),
		cmocka_unit_test_setup(a_misspelt_name_is_warned_of_with_the_nearest, clean),
		cmocka_unit_test_setup(what_telpher_run_sets_is_known, clean),
		cmocka_unit_test_setup(names_in_files_are_checked_too, clean),
		cmocka_unit_test_setup(names_of_other_libraries_in_files_are_left_alone, clean),
		cmocka_unit_test_setup(a_known_name_without_effect_is_information_not_a_warning, clean),
		cmocka_unit_test_setup(names_that_are_set_are_visited_with_what_is_known_of_them, clean),
		cmocka_unit_test_setup(variables_of_images_and_builds_are_left_alone, clean),
		cmocka_unit_test_setup(the_catalogue_is_sorted_and_knows_what_is_honoured, clean),
		cmocka_unit_test_setup(the_nearest_name_is_near, clean),
		cmocka_unit_test_setup(conf_first_line_of_a_name_counts_and_comments_and_blanks_do_not, clean),
		cmocka_unit_test_setup(conf_bad_lines_are_left_out_with_a_warning_each, clean),
		cmocka_unit_test_setup(conf_has_limits, clean),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "base/helper_base.h"
#include "sanitizers.h"

#define PREFIX "[^ :]+:[0-9]+:[0-9]+ \\[-?[0-9]+\\] "
#define STAMP "\\[[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}\\] "

static int clean(void **s)
{
	(void)s;
	test_clean_environment();
	tp_log_set_device(-1);
	return 0;
}

static void nothing_is_printed_by_default_but_errors_are_kept(void **s)
{
	(void)s;
	test_capture_begin();
	TP_INFO(TP_INIT, "quiet");
	ncclResult_t result = TP_FAIL(ncclInvalidArgument, "count is %d", -1);
	const char *out = test_capture_end();
	assert_string_equal(out, "");
	assert_int_equal(result, ncclInvalidArgument);
	assert_string_equal(tp_log_last_error(), "count is -1");
}

static void an_info_line_has_nccls_form(void **s)
{
	(void)s;
	test_set("NCCL_DEBUG", "INFO");
	tp_log_set_device(3);
	test_capture_begin();
	TP_INFO(TP_INIT, "Using network %s", "Socket");
	const char *out = test_capture_end();
	char expected[512];
	snprintf(expected, sizeof(expected), "%s:%d:%d [3] NCCL INFO Using network Socket\n", tp_host_name(), getpid(), getpid());
	assert_string_equal(out, expected);
}

static void a_warn_line_has_time_file_line_and_function(void **s)
{
	(void)s;
	test_set("NCCL_DEBUG", "WARN");
	test_capture_begin();
	TP_WARN("it broke");
	const char *out = test_capture_end();
	assert_true(test_matches(out, "^" STAMP PREFIX "[a-z/.]*base/test_log\\.c:[0-9]+ \\(a_warn_line_has_time_file_line_and_function\\) NCCL WARN it broke$"));
}

static void files_are_named_from_below_src(void **s)
{
	(void)s;
	assert_string_equal(tp_log_short_file("/home/somebody/telpher/src/base/log.c"), "base/log.c");
	assert_string_equal(tp_log_short_file("src/net/socket.c"), "net/socket.c");
	assert_string_equal(tp_log_short_file("/usr/src/telpher/src/net/socket.c"), "net/socket.c");
}

static void levels_are_read_without_case(void **s)
{
	(void)s;
	test_set("NCCL_DEBUG", "info");
	assert_true(tp_log_wants(TP_LOG_INFO, TP_INIT));
	assert_false(tp_log_wants(TP_LOG_TRACE, TP_INIT));
	test_set("NCCL_DEBUG", "Warn");
	assert_true(tp_log_wants(TP_LOG_WARN, TP_INIT));
	assert_false(tp_log_wants(TP_LOG_INFO, TP_INIT));
	test_set("NCCL_DEBUG", "TRACE");
	assert_true(tp_log_wants(TP_LOG_TRACE, TP_INIT));
}

static void a_level_that_does_not_exist_is_warned_of_once(void **s)
{
	(void)s;
	test_set("NCCL_DEBUG", "LOUD");
	test_capture_begin();
	for (int i = 0; i < 5; i++)
		TP_INFO(TP_INIT, "not wanted");
	const char *out = test_capture_end();
	assert_int_equal(test_count(out, "\n"), 1);
	assert_true(test_matches(out, STAMP PREFIX ".*NCCL WARN NCCL_DEBUG=LOUD is no log level"));
}

static void default_subsystems_are_init_bootstrap_and_env(void **s)
{
	(void)s;
	test_set("NCCL_DEBUG", "INFO");
	for (uint32_t bit = TP_INIT; bit <= TP_RAS; bit <<= 1)
		assert_int_equal(tp_log_wants(TP_LOG_INFO, bit), bit == TP_INIT || bit == TP_BOOTSTRAP || bit == TP_ENV);
}

static void subsystems_can_be_listed_or_taken_out(void **s)
{
	(void)s;
	test_set("NCCL_DEBUG", "INFO");
	test_set("NCCL_DEBUG_SUBSYS", "net,COLL");
	assert_true(tp_log_wants(TP_LOG_INFO, TP_NET) && tp_log_wants(TP_LOG_INFO, TP_COLL));
	assert_false(tp_log_wants(TP_LOG_INFO, TP_INIT));
	test_set("NCCL_DEBUG_SUBSYS", "^NET,COLL");
	assert_false(tp_log_wants(TP_LOG_INFO, TP_NET) || tp_log_wants(TP_LOG_INFO, TP_COLL));
	assert_true(tp_log_wants(TP_LOG_INFO, TP_INIT) && tp_log_wants(TP_LOG_INFO, TP_TUNING));
	test_set("NCCL_DEBUG_SUBSYS", "ALL");
	assert_true(tp_log_wants(TP_LOG_INFO, TP_RAS));
}

static void an_unknown_subsystem_is_warned_of(void **s)
{
	(void)s;
	test_set("NCCL_DEBUG", "WARN");
	test_set("NCCL_DEBUG_SUBSYS", "INIT,NETT");
	test_capture_begin();
	TP_INFO(TP_INIT, "x");
	assert_true(test_matches(test_capture_end(), "there is no subsystem 'NETT'"));
}

static void the_version_is_a_bare_line_below_info_and_a_full_one_at_info(void **s)
{
	(void)s;
	test_set("NCCL_DEBUG", "VERSION");
	test_capture_begin();
	tp_log_write(TP_LOG_VERSION, ~0u, __FILE__, __LINE__, __func__, "NCCL version 2.28.9");
	TP_WARN("not at this level");
	assert_string_equal(test_capture_end(), "NCCL version 2.28.9\n");
	test_set("NCCL_DEBUG", "INFO");
	test_capture_begin();
	tp_log_write(TP_LOG_VERSION, ~0u, __FILE__, __LINE__, __func__, "NCCL version 2.28.9");
	assert_true(test_matches(test_capture_end(), "^" PREFIX "NCCL INFO NCCL version 2.28.9$"));
}

static void the_file_name_knows_host_and_process(void **s)
{
	(void)s;
	char pattern[128], path[512], text[512];
	snprintf(pattern, sizeof(pattern), "/tmp/telpher-log-100%%%%-%%h-%%p");
	snprintf(path, sizeof(path), "/tmp/telpher-log-100%%-%s-%d", tp_host_name(), getpid());
	test_set("NCCL_DEBUG", "INFO");
	test_set("NCCL_DEBUG_FILE", pattern);
	test_capture_begin();
	TP_INFO(TP_INIT, "to the file");
	assert_string_equal(test_capture_end(), "");
	int fd = open(path, O_RDONLY);
	assert_true(fd >= 0);
	ssize_t n = read(fd, text, sizeof(text) - 1);
	close(fd);
	unlink(path);
	text[n > 0 ? n : 0] = 0;
	assert_true(test_matches(text, "^" PREFIX "NCCL INFO to the file$"));
}

static void a_file_that_cannot_be_opened_leaves_standard_output(void **s)
{
	(void)s;
	test_set("NCCL_DEBUG", "WARN");
	test_set("NCCL_DEBUG_FILE", "/nonexistent/dir/log");
	test_capture_begin();
	TP_WARN("still heard");
	const char *out = test_capture_end();
	assert_true(test_matches(out, "can't open /nonexistent/dir/log: No such file or directory"));
	assert_true(test_matches(out, "WARN still heard$"));
}

static void files_can_change_without_losing_descriptors(void **s)
{
	(void)s;
	const char *a = test_file(""), *b = test_file("");
	test_set("NCCL_DEBUG", "WARN");
	test_set("NCCL_DEBUG_FILE", a);
	TP_WARN("first");
	int before = test_open_fds();
	for (int i = 0; i < 10; i++) {
		test_set("NCCL_DEBUG_FILE", i % 3 == 0 ? b : i % 3 == 1 ? NULL : a);
		test_capture_begin();
		TP_WARN("line");
		assert_int_equal(strlen(test_capture_end()) > 0, i % 3 == 1);
	}
	assert_int_equal(test_open_fds(), before);
}

static void the_time_has_format_fraction_and_levels_of_its_own(void **s)
{
	(void)s;
	test_set("NCCL_DEBUG", "INFO");
	test_set("NCCL_DEBUG_TIMESTAMP_FORMAT", "<%H:%M:%S.%6f %%> ");
	test_set("NCCL_DEBUG_TIMESTAMP_LEVELS", "INFO");
	test_capture_begin();
	TP_INFO(TP_INIT, "timed");
	TP_WARN("untimed");
	const char *out = test_capture_end();
	assert_true(test_matches(out, "^<[0-9]{2}:[0-9]{2}:[0-9]{2}\\.[0-9]{6} %> " PREFIX "NCCL INFO timed$"));
	assert_true(test_matches(out, "^" PREFIX ".*WARN untimed$"));
	test_set("NCCL_DEBUG_TIMESTAMP_LEVELS", "^INFO");
	test_capture_begin();
	TP_INFO(TP_INIT, "untimed");
	TP_WARN("timed");
	out = test_capture_end();
	assert_true(test_matches(out, "^" PREFIX "NCCL INFO untimed$"));
	assert_true(test_matches(out, "^<.*> " PREFIX ".*WARN timed$"));
}

static void a_long_line_is_written_whole(void **s)
{
	(void)s;
	static char text[20001];
	memset(text, 'x', 20000);
	test_set("NCCL_DEBUG", "INFO");
	test_capture_begin();
	TP_INFO(TP_INIT, "%s|", text);
	const char *out = test_capture_end();
	assert_non_null(strstr(out, text));
	assert_string_equal(out + strlen(out) - 3, "x|\n");
}

static void a_line_that_just_fits_or_just_does_not_is_whole(void **s)
{
	(void)s;
	static char text[4096];
	test_set("NCCL_DEBUG", "INFO");
	for (int length = 1900; length < 2100; length++) {
		memset(text, 'y', sizeof(text));
		text[length] = 0;
		test_capture_begin();
		TP_INFO(TP_INIT, "%s", text);
		const char *out = test_capture_end();
		assert_int_equal(test_count(out, "y"), length);
		assert_int_equal(out[strlen(out) - 1], '\n');
	}
}

static void *write_lines(void *arg)
{
	for (int i = 0; i < 200; i++)
		TP_INFO(TP_INIT, "writer %d line %03d %s", *(int *)arg, i, "abcdefghijklmnopqrstuvwxyz.abcdefghijklmnopqrstuvwxyz.");
	return NULL;
}

static void lines_of_threads_and_processes_do_not_mix(void **s)
{
	(void)s;
	pthread_t threads[4];
	int ids[4];
	test_set("NCCL_DEBUG", "INFO");
	test_capture_begin();
	pid_t child = fork();
	for (int i = 0; i < 4; i++) {
		ids[i] = child == 0 ? 10 + i : i;
		pthread_create(&threads[i], NULL, write_lines, &ids[i]);
	}
	for (int i = 0; i < 4; i++)
		pthread_join(threads[i], NULL);
	if (child == 0)
		_exit(0);
	int status;
	waitpid(child, &status, 0);
	char *out = (char *)(uintptr_t)test_capture_end(), *rest;
	int lines = 0, n;
	for (char *line = strtok_r(out, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest), lines++) {
		int pid, tid, device, writer, number;
		char host[128];
		n = 0;
		assert_int_equal(sscanf(line, "%127[^:]:%d:%d [%d] NCCL INFO writer %d line %d %n", host, &pid, &tid, &device, &writer, &number, &n), 6);
		assert_string_equal(line + n, "abcdefghijklmnopqrstuvwxyz.abcdefghijklmnopqrstuvwxyz.");
	}
	assert_int_equal(lines, 8 * 200);
}

static void lines_keep_their_place_among_the_programs_output(void **s)
{
	(void)s;
	test_set("NCCL_DEBUG", "INFO");
	test_capture_begin();
	printf("before ");
	TP_INFO(TP_INIT, "ours");
	printf("after");
	assert_true(test_matches(test_capture_end(), "^before .*ours$"));
}

static void *fail_elsewhere(void *arg)
{
	(void)arg;
	TP_WARN("from another thread");
	return NULL;
}

static void the_last_error_belongs_to_the_process(void **s)
{
	(void)s;
	pthread_t thread;
	pthread_create(&thread, NULL, fail_elsewhere, NULL);
	pthread_join(thread, NULL);
	assert_string_equal(tp_log_last_error(), "from another thread");
}

static void the_last_error_is_cut_at_1023_bytes(void **s)
{
	(void)s;
	char text[3000];
	memset(text, 'z', sizeof(text) - 1);
	text[sizeof(text) - 1] = 0;
	TP_WARN("%s", text);
	assert_int_equal(strlen(tp_log_last_error()), 1023);
}

static void *read_and_write_errors(void *arg)
{
	char a[64];
	snprintf(a, sizeof(a), "%s", (const char *)arg);
	for (int i = 0; i < 200; i++) {
		TP_WARN("%s", a);
		const char *error = tp_log_last_error();
		assert_true(strcmp(error, "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa") == 0 || strcmp(error, "bbbbbbbbbbb") == 0);
	}
	return NULL;
}

static void the_last_error_is_never_a_mixture(void **s)
{
	(void)s;
	pthread_t a, b;
	pthread_create(&a, NULL, read_and_write_errors, "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa");
	pthread_create(&b, NULL, read_and_write_errors, "bbbbbbbbbbb");
	pthread_join(a, NULL);
	pthread_join(b, NULL);
}

static void a_note_is_an_info_line_where_warnings_go(void **s)
{
	(void)s;
	TP_WARN("the error");
	test_set("NCCL_DEBUG", "WARN");
	test_capture_begin();
	tp_log_note("explains it");
	assert_true(test_matches(test_capture_end(), "^" PREFIX "NCCL INFO explains it$"));
	assert_string_equal(tp_log_last_error(), "the error");
}

static void info_can_begin_at_the_first_warning(void **s)
{
	(void)s;
	test_set("NCCL_DEBUG", "WARN");
	test_set("NCCL_WARN_ENABLE_DEBUG_INFO", "1");
	assert_false(tp_log_wants(TP_LOG_INFO, TP_INIT));
	test_capture_begin();
	TP_WARN("now");
	test_capture_end();
	assert_true(tp_log_wants(TP_LOG_INFO, TP_INIT));
}

static void logging_leaves_errno_alone(void **s)
{
	(void)s;
	test_set("NCCL_DEBUG", "INFO");
	test_set("NCCL_DEBUG_FILE", "/nonexistent/dir/log");
	test_capture_begin();
	errno = EXDEV;
	TP_WARN("a");
	TP_INFO(TP_INIT, "b");
	int after = errno;
	test_capture_end();
	assert_int_equal(after, EXDEV);
}

static void errno_can_be_part_of_the_line(void **s)
{
	(void)s;
	test_set("NCCL_DEBUG", "WARN");
	test_capture_begin();
	errno = EXDEV;
	TP_WARN("%m");
	test_capture_end();
	assert_string_equal(tp_log_last_error(), strerror(EXDEV));
}

static void a_call_trace_has_nccls_form(void **s)
{
	(void)s;
	test_set("NCCL_DEBUG", "TRACE");
	test_set("NCCL_DEBUG_SUBSYS", "ALL");
	test_capture_begin();
	tp_log_write(TP_LOG_TRACE, TP_CALL, __FILE__, __LINE__, __func__, "ncclAllReduce(1)");
	tp_log_write(TP_LOG_TRACE, TP_NET, __FILE__, __LINE__, __func__, "step");
	const char *out = test_capture_end();
	assert_true(test_matches(out, "^[^ :]+:[0-9]+:[0-9]+ NCCL CALL ncclAllReduce\\(1\\)$"));
	assert_true(test_matches(out, "^" PREFIX "[0-9.]+ a_call_trace_has_nccls_form:[0-9]+ NCCL TRACE step$"));
}

static void *first_line(void *arg)
{
	pthread_barrier_wait(arg);
	TP_WARN("first");
	return NULL;
}

static void many_threads_may_log_the_first_line_at_once(void **s)
{
	(void)s;
	for (int round = 0; round < 20; round++) {
		pthread_t threads[4];
		pthread_barrier_t barrier;
		pthread_barrier_init(&barrier, NULL, 4);
		test_set("NCCL_DEBUG", round % 2 ? "LOUD" : "WARN");
		test_capture_begin();
		for (int i = 0; i < 4; i++)
			pthread_create(&threads[i], NULL, first_line, &barrier);
		for (int i = 0; i < 4; i++)
			pthread_join(threads[i], NULL);
		const char *out = test_capture_end();
		assert_int_equal(test_count(out, "WARN first\n"), 4);
		assert_int_equal(test_count(out, "is no log level"), round % 2);
		pthread_barrier_destroy(&barrier);
	}
}

static void *write_until_told(void *arg)
{
	while (!atomic_load((_Atomic bool *)arg))
		TP_WARN("from the parent's thread");
	return NULL;
}

static void a_child_forked_while_others_log_can_log(void **s)
{
	(void)s;
	if (SANITIZED) skip();
	_Atomic bool stop = false;
	pthread_t thread;
	test_set("NCCL_DEBUG", "WARN");
	test_capture_begin();
	pthread_create(&thread, NULL, write_until_told, (void *)&stop);
	int bad = 0;
	for (int i = 0; i < 30 && !bad; i++) {
		pid_t child = fork();
		if (child == 0) {
			alarm(60);
			TP_WARN("from the child");
			_exit(strcmp(tp_log_last_error(), "from the child") != 0);
		}
		int status;
		waitpid(child, &status, 0);
		bad = status;
	}
	atomic_store(&stop, true);
	pthread_join(thread, NULL);
	test_capture_end();
	assert_int_equal(bad, 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup(nothing_is_printed_by_default_but_errors_are_kept, clean),
		cmocka_unit_test_setup(an_info_line_has_nccls_form, clean),
		cmocka_unit_test_setup(a_warn_line_has_time_file_line_and_function, clean),
		cmocka_unit_test_setup(files_are_named_from_below_src, clean),
		cmocka_unit_test_setup(levels_are_read_without_case, clean),
		cmocka_unit_test_setup(a_level_that_does_not_exist_is_warned_of_once, clean),
		cmocka_unit_test_setup(default_subsystems_are_init_bootstrap_and_env, clean),
		cmocka_unit_test_setup(subsystems_can_be_listed_or_taken_out, clean),
		cmocka_unit_test_setup(an_unknown_subsystem_is_warned_of, clean),
		cmocka_unit_test_setup(the_version_is_a_bare_line_below_info_and_a_full_one_at_info, clean),
		cmocka_unit_test_setup(the_file_name_knows_host_and_process, clean),
		cmocka_unit_test_setup(a_file_that_cannot_be_opened_leaves_standard_output, clean),
		cmocka_unit_test_setup(files_can_change_without_losing_descriptors, clean),
		cmocka_unit_test_setup(the_time_has_format_fraction_and_levels_of_its_own, clean),
		cmocka_unit_test_setup(a_long_line_is_written_whole, clean),
		cmocka_unit_test_setup(a_line_that_just_fits_or_just_does_not_is_whole, clean),
		cmocka_unit_test_setup(lines_of_threads_and_processes_do_not_mix, clean),
		cmocka_unit_test_setup(lines_keep_their_place_among_the_programs_output, clean),
		cmocka_unit_test_setup(the_last_error_belongs_to_the_process, clean),
		cmocka_unit_test_setup(the_last_error_is_cut_at_1023_bytes, clean),
		cmocka_unit_test_setup(the_last_error_is_never_a_mixture, clean),
		cmocka_unit_test_setup(a_note_is_an_info_line_where_warnings_go, clean),
		cmocka_unit_test_setup(info_can_begin_at_the_first_warning, clean),
		cmocka_unit_test_setup(logging_leaves_errno_alone, clean),
		cmocka_unit_test_setup(errno_can_be_part_of_the_line, clean),
		cmocka_unit_test_setup(a_call_trace_has_nccls_form, clean),
		cmocka_unit_test_setup(a_child_forked_while_others_log_can_log, clean),
		cmocka_unit_test_setup(many_threads_may_log_the_first_line_at_once, clean),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

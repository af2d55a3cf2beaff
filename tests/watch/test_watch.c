#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "watch/watch.h"
#include "sanitizers.h"

static void set(const char *name, const char *value)
{
	if (value)
		setenv(name, value, 1);
	else
		unsetenv(name);
	tp_param_reload();
	tp_log_reset();
}

static int clean(void **s)
{
	(void)s;
	static const char *const names[] = { "TELPHER_EXPECT", "TELPHER_FLIGHT_RECORDS", "TELPHER_DUMP_ON_ERROR", "NCCL_DEBUG_FILE" };
	for (size_t i = 0; i < TP_ARRAY_LEN(names); i++)
		unsetenv(names[i]);
	set("NCCL_DEBUG", NULL);
	return 0;
}

static void add(struct tp_watch_paths *paths, int from, int to, bool same_host, const char *via, const char *why)
{
	struct tp_watch_path path = { .from = from, .to = to, .same_host = same_host };
	snprintf(path.via, sizeof(path.via), "%s", via);
	snprintf(path.why, sizeof(path.why), "%s", why);
	assert_int_equal(tp_watch_paths_add(paths, &path), ncclSuccess);
}

static struct tp_watch_paths *new_paths(void)
{
	struct tp_watch_paths *paths = NULL;
	assert_int_equal(tp_watch_paths_create(&paths), ncclSuccess);
	return paths;
}

/* The table as text; to be freed. */
static char *printed(const struct tp_watch_paths *paths)
{
	char *text = NULL;
	size_t bytes = 0;
	FILE *out = open_memstream(&text, &bytes);
	tp_watch_paths_print(paths, out);
	fclose(out);
	return text;
}

/* Two hosts of two ranks. */
static struct tp_watch_paths *two_hosts(void)
{
	struct tp_watch_paths *paths = new_paths();
	for (int from = 3; from >= 0; from--) {
		for (int to = 0; to < 4; to++) {
			if (from == to)
				add(paths, from, to, true, "SELF", "");
			else if (from / 2 == to / 2)
				add(paths, from, to, true, "SHM/CMA", "");
			else
				add(paths, from, to, false, "NET/Socket/0", "no InfiniBand device");
		}
	}
	return paths;
}

static void the_table_has_a_line_for_each_kind_of_path(void **s)
{
	(void)s;
	struct tp_watch_paths *paths = two_hosts();
	char *text = printed(paths);
	assert_string_equal(text,
		"path          pairs of ranks                        why not a better one\n"
		"SELF          0 1 2 3\n"
		"SHM/CMA       0-1 2-3\n"
		"NET/Socket/0  0-2 0-3 1-2 1-3                       no InfiniBand device\n");
	free(text);
	tp_watch_paths_destroy(paths);
}

static void what_the_topology_says_has_a_column(void **s)
{
	(void)s;
	struct tp_watch_paths *paths = new_paths();
	struct tp_watch_path near = { .from = 0, .to = 1, .same_host = true, .via = "P2P/CUMEM", .type = "NVL", .gbps = 370, .latency_us = 1.2f, .gdr = -1 };
	struct tp_watch_path far = { .from = 0, .to = 2, .via = "NET/IB/0", .why = "no GDR: why", .type = "NET", .device = "mlx5_0", .gbps = 50, .latency_us = 2, .gdr = 0 };
	assert_int_equal(tp_watch_paths_add(paths, &near), ncclSuccess);
	assert_int_equal(tp_watch_paths_add(paths, &far), ncclSuccess);
	char *text = printed(paths);
	assert_string_equal(text,
		"path       topology                        pairs of ranks                        why not a better one\n"
		"P2P/CUMEM  NVL 370 GB/s 1.2 us             0>1\n"
		"NET/IB/0   NET mlx5_0 50 GB/s 2 us no GDR  0>2                                   no GDR: why\n");
	free(text);
	tp_watch_paths_destroy(paths);
}

static void one_grammar_serves_all(void **s)
{
	(void)s;
	static const struct tp_expect_key keys[] = { { "nics", TP_EXPECT_LEAST, NULL, "" }, { "gdr", TP_EXPECT_WORD, "on|off", "" } };
	const char *list = " nics>=8, # a comment with path=SHM\ngdr=on|off path=SHM";
	struct tp_expect_item item;
	assert_int_equal(tp_expect_next(&list, "x", keys, 2, &item), ncclSuccess);
	assert_ptr_equal(item.key, &keys[0]);
	assert_true(tp_expect_holds(&item, 8) && tp_expect_holds(&item, 9) && !tp_expect_holds(&item, 7));
	assert_int_equal(tp_expect_next(&list, "x", keys, 2, &item), ncclSuccess);
	assert_ptr_equal(item.key, &keys[1]);
	assert_int_equal(tp_expect_next(&list, "x", keys, 2, &item), ncclSuccess);
	assert_true(tp_expect_is_own(item.key));
	assert_int_equal(tp_expect_next(&list, "x", keys, 2, &item), ncclSuccess);
	assert_null(item.key);
	static const char *const bad[] = { "nics=many", "gdr=maybe", "gdr>=on", "speed=1", "nics", "nics>8", "=8" };
	for (size_t i = 0; i < TP_ARRAY_LEN(bad); i++) {
		list = bad[i];
		assert_int_equal(tp_expect_next(&list, "x", keys, 2, &item), ncclInvalidArgument);
	}
}

static void under_warn_a_broken_expectation_is_no_error(void **s)
{
	(void)s;
	set("TELPHER_EXPECT_MODE", "warn");
	set("TELPHER_EXPECT", "net=IB");
	assert_int_equal(tp_watch_expect("net", "Socket", "the communicator", "no device"), ncclSuccess);
	assert_string_equal(tp_log_last_error(), "TELPHER_EXPECT: expected net=IB of the communicator, found Socket: no device");
	set("TELPHER_EXPECT_MODE", NULL);
}

static void directions_that_differ_are_told_apart(void **s)
{
	(void)s;
	struct tp_watch_paths *paths = new_paths();
	add(paths, 0, 1, true, "SHM", "CMA is forbidden to rank 0");
	add(paths, 1, 0, true, "SHM/CMA", "");
	char *text = printed(paths);
	assert_non_null(strstr(text, "SHM      0>1 "));
	assert_non_null(strstr(text, "SHM/CMA  1>0\n"));
	free(text);
	tp_watch_paths_destroy(paths);
}

static void a_pair_added_again_is_replaced(void **s)
{
	(void)s;
	struct tp_watch_paths *paths = new_paths();
	add(paths, 0, 1, true, "NET", "");
	add(paths, 0, 1, true, "SHM", "");
	assert_int_equal(tp_watch_paths_count(paths), 1);
	char *text = printed(paths);
	assert_null(strstr(text, "NET"));
	free(text);
	tp_watch_paths_destroy(paths);
}

static void hundreds_of_ranks_make_a_table_of_a_page(void **s)
{
	(void)s;
	struct tp_watch_paths *paths = new_paths();
	for (int from = 0; from < 300; from++)
		for (int to = 0; to < 300; to++)
			if (from != to)
				add(paths, from, to, true, "SHM", "");
	char *text = printed(paths);
	int lines = 0, longest = 0, length = 0;
	for (const char *p = text; *p; p++) {
		length = *p == '\n' ? 0 : length + 1;
		lines += *p == '\n';
		longest = TP_MAX(longest, length);
	}
	assert_in_range(lines, 3, 20);
	assert_in_range(longest, 1, 100);
	assert_non_null(strstr(text, "and 44786 more pairs\n"));
	free(text);
	tp_watch_paths_destroy(paths);
}

static void an_empty_table_is_a_heading(void **s)
{
	(void)s;
	struct tp_watch_paths *paths = new_paths();
	char *text = printed(paths);
	assert_non_null(strstr(text, "pairs of ranks"));
	free(text);
	tp_watch_paths_destroy(paths);
	tp_watch_paths_destroy(NULL);
}

static void texts_of_peers_are_cut_and_cleaned(void **s)
{
	(void)s;
	struct tp_watch_paths *paths = new_paths();
	struct tp_watch_path path = { .from = 0, .to = 1 };
	memset(path.via, 'v', sizeof(path.via));
	memset(path.why, '\033', sizeof(path.why));
	assert_int_equal(tp_watch_paths_add(paths, &path), ncclSuccess);
	char *text = printed(paths);
	assert_null(strchr(text, '\033'));
	free(text);
	tp_watch_paths_destroy(paths);
}

static void without_expectations_all_is_well(void **s)
{
	(void)s;
	struct tp_watch_paths *paths = two_hosts();
	assert_int_equal(tp_watch_expect_check(), ncclSuccess);
	assert_int_equal(tp_watch_expect("net", "Socket", "the communicator", NULL), ncclSuccess);
	assert_int_equal(tp_watch_expect_paths(paths), ncclSuccess);
	tp_watch_paths_destroy(paths);
}

static void expectations_that_are_met_are_silent(void **s)
{
	(void)s;
	static const char *const met[] = {
		"local=SHM", "local=shm/cma", "remote=NET", "remote=NET/Socket", "path=SHM|NET", "local=SHM,remote=NET/Socket/0,net=IB|socket", " local=SHM , net=Socket ",
	};
	struct tp_watch_paths *paths = two_hosts();
	for (size_t i = 0; i < TP_ARRAY_LEN(met); i++) {
		set("TELPHER_EXPECT", met[i]);
		assert_int_equal(tp_watch_expect_check(), ncclSuccess);
		assert_int_equal(tp_watch_expect_paths(paths), ncclSuccess);
		assert_int_equal(tp_watch_expect("net", "Socket", "the communicator", NULL), ncclSuccess);
	}
	tp_watch_paths_destroy(paths);
}

static void a_broken_expectation_says_what_was_found_and_why(void **s)
{
	(void)s;
	struct tp_watch_paths *paths = two_hosts();
	set("TELPHER_EXPECT", "path=SHM");
	assert_int_equal(tp_watch_expect_paths(paths), ncclInvalidUsage);
	assert_string_equal(tp_log_last_error(),
		"TELPHER_EXPECT: expected path=SHM, but rank 0 -> 2 goes via NET/Socket/0: no InfiniBand device (8 of 12 pairs aren't as expected)");
	set("TELPHER_EXPECT", "remote=NET/IB");
	assert_int_equal(tp_watch_expect_paths(paths), ncclInvalidUsage);
	assert_non_null(strstr(tp_log_last_error(), "expected remote=NET/IB, but rank 0 -> 2"));
	set("TELPHER_EXPECT", "net=IB");
	assert_int_equal(tp_watch_expect("net", "Socket", "the communicator", "no device"), ncclInvalidUsage);
	assert_string_equal(tp_log_last_error(), "TELPHER_EXPECT: expected net=IB of the communicator, found Socket: no device");
	set("TELPHER_EXPECT", "algo=RING|TREE");
	assert_int_equal(tp_watch_expect("algo", "ring", "all_reduce", NULL), ncclSuccess);
	assert_int_equal(tp_watch_expect("algo", "direct", "all_reduce", NULL), ncclInvalidUsage);
	tp_watch_paths_destroy(paths);
}

static void a_value_is_compared_by_whole_parts(void **s)
{
	(void)s;
	set("TELPHER_EXPECT", "net=IB");
	assert_int_equal(tp_watch_expect("net", "IBEXT", "x", NULL), ncclInvalidUsage);
	assert_int_equal(tp_watch_expect("net", "IB/mlx5_0", "x", NULL), ncclSuccess);
	assert_int_equal(tp_watch_expect("net", "I", "x", NULL), ncclInvalidUsage);
}

static void what_cannot_be_expected_is_refused(void **s)
{
	(void)s;
	static const char *const bad[] = { "paht=SHM", "path", "path=", "=SHM", "local=SHM,speed=9" };
	for (size_t i = 0; i < TP_ARRAY_LEN(bad); i++) {
		set("TELPHER_EXPECT", bad[i]);
		assert_int_equal(tp_watch_expect_check(), ncclInvalidArgument);
	}
	set("TELPHER_EXPECT", "");
	assert_int_equal(tp_watch_expect_check(), ncclSuccess);
}

static const char *func_name(int func) { return func == 0 ? "AllReduce" : "Broadcast"; }

static struct tp_flight *new_flight(void)
{
	struct tp_flight *flight = NULL;
	assert_int_equal(tp_flight_create(1, 4, 0xabc, func_name, &flight), ncclSuccess);
	return flight;
}

static void the_last_operations_are_remembered_in_order(void **s)
{
	(void)s;
	set("TELPHER_FLIGHT_RECORDS", "5");
	struct tp_flight *flight = new_flight();
	struct tp_flight_entry e[16];
	assert_int_equal(tp_flight_read(flight, e, 16), 0);
	uint64_t before = tp_clock_coarse_ns();
	for (uint64_t seq = 1; seq <= 20; seq++) {
		struct tp_flight_record *r = tp_flight_begin(flight, seq, 0, seq * 10, ncclFloat, ncclSum, -1);
		if (seq < 20)
			tp_flight_end(r, seq, seq == 19 ? ncclRemoteError : ncclSuccess);
	}
	assert_int_equal(tp_flight_read(flight, e, 16), 8);
	for (size_t i = 0; i < 8; i++) {
		assert_int_equal(e[i].seq, 13 + i);
		assert_int_equal(e[i].count, (13 + i) * 10);
		assert_int_equal(e[i].state, i < 7 ? TP_FLIGHT_DONE : TP_FLIGHT_RUNNING);
		assert_true(e[i].end_ns == 0 ? i == 7 : e[i].end_ns >= e[i].start_ns);
		assert_true(e[i].start_ns >= before && e[i].start_ns <= tp_clock_ns());
	}
	assert_int_equal(e[6].result, ncclRemoteError);
	assert_int_equal(tp_flight_read(flight, e, 2), 2);
	assert_int_equal(e[1].seq, 20);
	tp_flight_destroy(flight);
	tp_flight_destroy(NULL);
}

static void an_end_after_its_record_was_taken_over_changes_nothing(void **s)
{
	(void)s;
	set("TELPHER_FLIGHT_RECORDS", "1");
	struct tp_flight *flight = new_flight();
	struct tp_flight_entry e;
	struct tp_flight_record *old = tp_flight_begin(flight, 1, 0, 1, 0, 0, -1);
	tp_flight_begin(flight, 2, 0, 1, 0, 0, -1);
	tp_flight_end(old, 1, ncclSystemError);
	assert_int_equal(tp_flight_read(flight, &e, 1), 1);
	assert_int_equal(e.state, TP_FLIGHT_RUNNING);
	tp_flight_destroy(flight);
}

static _Atomic bool stop;

static void *record_operations(void *arg)
{
	struct tp_flight *flight = arg;
	for (uint64_t seq = 1; !atomic_load_explicit(&stop, memory_order_relaxed); seq++) {
		struct tp_flight_record *r = tp_flight_begin(flight, seq, (int)(seq % 7), seq * 3, (int)(seq % 12), (int)(seq % 5), (int)(seq % 1000));
		tp_flight_end(r, seq, ncclSuccess);
	}
	return NULL;
}

static void a_dump_beside_the_writer_sees_whole_records_only(void **s)
{
	(void)s;
	set("TELPHER_FLIGHT_RECORDS", "4");
	struct tp_flight *flight = new_flight();
	struct tp_flight_entry e[4];
	pthread_t thread;
	atomic_store(&stop, false);
	pthread_create(&thread, NULL, record_operations, flight);
	for (int round = 0, seen = 0; round < (SANITIZED ? 3000 : 20000) || seen == 0; round++) {
		size_t count = tp_flight_read(flight, e, 4);
		seen += (int)count;
		for (size_t i = 0; i < count; i++) {
			assert_int_equal(e[i].count, e[i].seq * 3);
			assert_int_equal(e[i].func, e[i].seq % 7);
			assert_int_equal(e[i].type, e[i].seq % 12);
			assert_int_equal(e[i].op, e[i].seq % 5);
			assert_int_equal(e[i].root, e[i].seq % 1000);
		}
	}
	atomic_store(&stop, true);
	pthread_join(thread, NULL);
	tp_flight_destroy(flight);
}

static void a_dump_goes_to_the_log_and_leaves_the_last_error(void **s)
{
	(void)s;
	char path[] = "/tmp/telpher-flight-XXXXXX", text[4096];
	int fd = mkstemp(path);
	struct tp_flight *flight = new_flight();
	for (uint64_t seq = 1; seq <= 10; seq++)
		tp_flight_end(tp_flight_begin(flight, seq, 0, 1024, ncclFloat, ncclSum, -1), seq, ncclSuccess);
	tp_flight_begin(flight, 11, 1, 7, ncclInt8, ncclMax, 2);
	set("NCCL_DEBUG", "WARN");
	set("NCCL_DEBUG_FILE", path);
	set("TELPHER_DUMP_ON_ERROR", "3");
	TP_WARN("the error");
	tp_flight_dump_on_error(flight, "rank 2 died");
	ssize_t n = read(fd, text, sizeof(text) - 1);
	text[n > 0 ? n : 0] = 0;
	assert_non_null(strstr(text, "NCCL INFO comm 0xabc rank 1 of 4: rank 2 died; its last 3 operations:\n"));
	assert_null(strstr(text, "#8 "));
	assert_non_null(strstr(text, "NCCL INFO comm 0xabc rank 1 #9 AllReduce: count 1024 float sum, begun "));
	assert_non_null(strstr(text, "#11 Broadcast: count 7 int8 max root/peer 2, begun "));
	assert_non_null(strstr(text, "s ago, not finished\n"));
	assert_string_equal(tp_log_last_error(), "the error");
	set("TELPHER_DUMP_ON_ERROR", "0");
	tp_flight_dump_on_error(flight, "quiet");
	assert_int_equal(read(fd, text, sizeof(text)), 0);
	close(fd);
	unlink(path);
	tp_flight_destroy(flight);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup(the_table_has_a_line_for_each_kind_of_path, clean),
		cmocka_unit_test_setup(what_the_topology_says_has_a_column, clean), cmocka_unit_test_setup(one_grammar_serves_all, clean), cmocka_unit_test_setup(under_warn_a_broken_expectation_is_no_error, clean),
		cmocka_unit_test_setup(directions_that_differ_are_told_apart, clean),
		cmocka_unit_test_setup(a_pair_added_again_is_replaced, clean),
		cmocka_unit_test_setup(hundreds_of_ranks_make_a_table_of_a_page, clean),
		cmocka_unit_test_setup(an_empty_table_is_a_heading, clean),
		cmocka_unit_test_setup(texts_of_peers_are_cut_and_cleaned, clean),
		cmocka_unit_test_setup(without_expectations_all_is_well, clean),
		cmocka_unit_test_setup(expectations_that_are_met_are_silent, clean),
		cmocka_unit_test_setup(a_broken_expectation_says_what_was_found_and_why, clean),
		cmocka_unit_test_setup(a_value_is_compared_by_whole_parts, clean),
		cmocka_unit_test_setup(what_cannot_be_expected_is_refused, clean),
		cmocka_unit_test_setup(the_last_operations_are_remembered_in_order, clean),
		cmocka_unit_test_setup(an_end_after_its_record_was_taken_over_changes_nothing, clean),
		cmocka_unit_test_setup(a_dump_beside_the_writer_sees_whole_records_only, clean),
		cmocka_unit_test_setup(a_dump_goes_to_the_log_and_leaves_the_last_error, clean),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

/* JSON as the path report writes it: well-formed whatever texts, numbers and locales there are. */
#include <locale.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "watch/watch.h"

static char *text;
static size_t bytes;

static FILE *begin(void)
{
	free(text);
	text = NULL;
	FILE *out = open_memstream(&text, &bytes);
	assert_non_null(out);
	return out;
}

static const char *string_of(const char *given)
{
	FILE *out = begin();
	tp_watch_json_string(out, given);
	fclose(out);
	return text;
}

static const char *number_of(double value)
{
	FILE *out = begin();
	tp_watch_json_number(out, value);
	fclose(out);
	return text;
}

static void texts_are_escaped(void **s)
{
	(void)s;
	assert_string_equal(string_of(""), "\"\"");
	assert_string_equal(string_of("say \"NCCL_NET\" \\ here"), "\"say \\\"NCCL_NET\\\" \\\\ here\"");
	assert_string_equal(string_of("a\nb\tc\001\177"), "\"a\\u000ab\\u0009c\\u0001\\u007f\"");
}

static void utf8_stays_and_what_is_none_is_replaced(void **s)
{
	(void)s;
	assert_string_equal(string_of("größer … 𝛼"), "\"größer … 𝛼\"");
	assert_string_equal(string_of("cut\xe2\x80"), "\"cut\\ufffd\\ufffd\"");
	assert_string_equal(string_of("\xff\xfe|\xc0\x80|\xed\xa0\x80|\xf5\x80\x80\x80"),
		"\"\\ufffd\\ufffd|\\ufffd\\ufffd|\\ufffd\\ufffd\\ufffd|\\ufffd\\ufffd\\ufffd\\ufffd\"");
	assert_string_equal(string_of("\xe2\x28\xa1"), "\"\\ufffd(\\ufffd\"");
}

static void numbers_are_plain_and_never_what_json_lacks(void **s)
{
	(void)s;
	assert_string_equal(number_of(0), "0");
	assert_string_equal(number_of(25), "25");
	assert_string_equal(number_of(1.25), "1.25");
	assert_string_equal(number_of(0.000001), "0.000001");
	assert_string_equal(number_of(0.05), "0.05");
	assert_string_equal(number_of(-17.5), "-17.5");
	assert_string_equal(number_of(123456789.000004), "123456789.000004");
	assert_string_equal(number_of(1e-9), "0");
	assert_string_equal(number_of((double)NAN), "null");
	assert_string_equal(number_of((double)INFINITY), "null");
	assert_string_equal(number_of(-1e300), "null");
}

static void a_locale_with_commas_changes_nothing(void **s)
{
	(void)s;
	static const char *const locales[] = { "de_DE.UTF-8", "fr_FR.UTF-8", "de_DE.utf8", "ru_RU.UTF-8" };
	for (size_t i = 0; i < TP_ARRAY_LEN(locales) && !setlocale(LC_NUMERIC, locales[i]); i++) ;
	assert_string_equal(number_of(1.5), "1.5");
	setlocale(LC_NUMERIC, "C");
}

static void a_path_has_what_is_known_and_null_for_the_rest(void **s)
{
	(void)s;
	struct tp_watch_path path = { .from = 0, .to = 1, .same_host = true, .via = "SHM", .gdr = -1 };
	FILE *out = begin();
	tp_watch_json_path(out, &path, NULL, 0, NULL, 0);
	fclose(out);
	assert_string_equal(text, "{\"from\":0,\"to\":1,\"same_host\":true,\"via\":\"SHM\",\"type\":null,\"device\":null,\"gdr\":null,\"bandwidth_gbs\":null,"
		"\"latency_us\":null,\"note\":null,\"refused\":[]}");
}

static void refusals_and_channels_are_lists(void **s)
{
	(void)s;
	struct tp_watch_path path = { .from = 2, .to = 3, .via = "NET/IB/0", .type = "NET", .device = "mlx5_0", .gbps = 100, .latency_us = 2, .gdr = 0, .devices = 2 };
	struct tp_watch_refusal refusals[] = { { "P2P", "other-host", "not P2P: hosts" }, { "GDR", "gpu-unable", "" } };
	struct tp_watch_channel channels[] = { { "mlx5_0", 50, 2 }, { "mlx5_1:2", 0, 0 } };
	FILE *out = begin();
	tp_watch_json_path(out, &path, refusals, 2, channels, 2);
	fclose(out);
	assert_non_null(strstr(text, "\"gdr\":false,\"bandwidth_gbs\":100,\"latency_us\":2,"));
	assert_non_null(strstr(text, "\"refused\":[{\"kind\":\"P2P\",\"code\":\"other-host\",\"why\":\"not P2P: hosts\"},{\"kind\":\"GDR\",\"code\":\"gpu-unable\",\"why\":null}]"));
	assert_non_null(strstr(text, "\"channels\":[{\"channel\":0,\"device\":\"mlx5_0\",\"bandwidth_gbs\":50,\"latency_us\":2},"
		"{\"channel\":1,\"device\":\"mlx5_1:2\",\"bandwidth_gbs\":null,\"latency_us\":null}]}"));
}

static void the_table_tells_how_many_devices_share_a_pair(void **s)
{
	(void)s;
	struct tp_watch_paths *paths;
	struct tp_watch_path path = { .from = 0, .to = 1, .via = "NET/IB/0", .type = "NET", .device = "mlx5_0", .gbps = 200, .gdr = 1, .devices = 4 };
	assert_int_equal(tp_watch_paths_create(&paths), ncclSuccess);
	assert_int_equal(tp_watch_paths_add(paths, &path), ncclSuccess);
	FILE *out = begin();
	tp_watch_paths_print(paths, out);
	fclose(out);
	assert_non_null(strstr(text, "NET mlx5_0 +3 200 GB/s GDR"));
	tp_watch_paths_destroy(paths);
}

/* The hosts' names are in each reason: so many hosts, so many kinds. */
static void thousands_of_kinds_of_path_make_a_table_that_ends(void **s)
{
	(void)s;
	struct tp_watch_paths *paths;
	assert_int_equal(tp_watch_paths_create(&paths), ncclSuccess);
	for (int from = 0; from < 200; from++) {
		for (int to = 0; to < 200; to++) {
			struct tp_watch_path path = { .from = from, .to = to, .via = "NET/IB/0", .gdr = -1 };
			snprintf(path.why, sizeof(path.why), "host%d and host%d are different hosts", from, to);
			if (from != to) assert_int_equal(tp_watch_paths_add(paths, &path), ncclSuccess);
		}
	}
	FILE *out = begin();
	tp_watch_paths_print(paths, out);
	fclose(out);
	int lines = 0;
	for (const char *c = text; *c; c++) lines += *c == '\n';
	assert_int_equal(lines, 514);
	assert_non_null(strstr(text, "and 39288 more kinds of path\n"));
	tp_watch_paths_destroy(paths);
}

static int end(void **s)
{
	(void)s;
	free(text);
	return 0;
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(texts_are_escaped), cmocka_unit_test(utf8_stays_and_what_is_none_is_replaced),
		cmocka_unit_test(numbers_are_plain_and_never_what_json_lacks), cmocka_unit_test(a_locale_with_commas_changes_nothing),
		cmocka_unit_test(a_path_has_what_is_known_and_null_for_the_rest), cmocka_unit_test(refusals_and_channels_are_lists),
		cmocka_unit_test(thousands_of_kinds_of_path_make_a_table_that_ends), cmocka_unit_test(the_table_tells_how_many_devices_share_a_pair),
	};
	return cmocka_run_group_tests(tests, NULL, end);
}

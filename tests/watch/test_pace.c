/* The pace: when ranks compare their times, and what they make of them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>
#include "watch/watch.h"

/* Adds operations until it is time to compare; how many it took. */
static int until_due(struct tp_pace *pace, double took_us, double predicted_us)
{
	for (int n = 1; n < 1 << 20; n++)
		if (tp_pace_add(pace, took_us, predicted_us)) return n;
	return -1;
}

/* A window in which all ranks took so long; what is judged of it. */
static bool judged(struct tp_pace *pace, double ratio)
{
	float least[TP_PACE_SAMPLES], median;
	until_due(pace, 100 * ratio, 100);
	tp_pace_window(pace, least);
	return tp_pace_judge(pace, least, 1, &median);
}

static void two_slow_windows_in_a_row_are_suspect(void **s)
{
	(void)s;
	struct tp_pace pace;
	tp_pace_begin(&pace, 16, 0);
	assert_false(judged(&pace, 3));
	assert_true(judged(&pace, 3));
	assert_true(judged(&pace, 3));
}

static void windows_that_took_no_time_are_not_suspect_yet(void **s)
{
	(void)s;
	struct tp_pace pace;
	float least[TP_PACE_SAMPLES], median;
	tp_pace_begin(&pace, 64, 3);
	for (int window = 1; window <= 7; window++) {
		assert_int_equal(until_due(&pace, 300, 100), 64);
		tp_pace_window(&pace, least);
		assert_int_equal(tp_pace_may_suspect(&pace, 0.5f), window >= 6);
		assert_int_equal(tp_pace_judge(&pace, least, 0.5f, &median), window >= 6);
	}
	/* And from the beginning, once one was good. */
	until_due(&pace, 100, 100);
	tp_pace_window(&pace, least);
	assert_false(tp_pace_judge(&pace, least, 100, &median));
	until_due(&pace, 300, 100);
	tp_pace_window(&pace, least);
	assert_false(tp_pace_judge(&pace, least, 100, &median));
	tp_pace_begin_anew(&pace);
	until_due(&pace, 300, 100);
	tp_pace_window(&pace, least);
	assert_false(tp_pace_may_suspect(&pace, 100));
}

static void one_slow_window_between_good_ones_is_nothing(void **s)
{
	(void)s;
	struct tp_pace pace;
	tp_pace_begin(&pace, 16, 0);
	for (int i = 0; i < 20; i++) assert_false(judged(&pace, i % 2 ? 3 : 1));
}

static void twice_the_time_is_allowed(void **s)
{
	(void)s;
	struct tp_pace pace;
	tp_pace_begin(&pace, 16, 0);
	for (int i = 0; i < 10; i++) assert_false(judged(&pace, 1.99));
}

static void comparing_becomes_rare_where_all_is_well_and_frequent_where_not(void **s)
{
	(void)s;
	struct tp_pace pace;
	float least[TP_PACE_SAMPLES], median;
	int most = 0;
	tp_pace_begin(&pace, 16, 0);
	for (int i = 0, before = 0; i < 12; i++) {
		int n = until_due(&pace, 50, 100);
		assert_true(n >= before);
		before = most = n;
		tp_pace_window(&pace, least);
		tp_pace_judge(&pace, least, 1, &median);
	}
	assert_int_equal(most, 512);
	judged(&pace, 5);
	assert_int_equal(until_due(&pace, 500, 100), 16);
}

static void the_wait_for_a_late_rank_is_no_slowness(void **s)
{
	(void)s;
	struct tp_pace ranks[3];
	for (int r = 0; r < 3; r++) tp_pace_begin(&ranks[r], 16, 0);
	for (int window = 0; window < 6; window++) {
		float least[TP_PACE_SAMPLES], own[TP_PACE_SAMPLES], median;
		bool due = false;
		/* Rank 2 always comes last: the others wait 900 us for it, and it for nobody. */
		while (!due)
			for (int r = 0; r < 3; r++) due = tp_pace_add(&ranks[r], r == 2 ? 110 : 1000, 100);
		tp_pace_window(&ranks[0], least);
		for (int r = 1; r < 3; r++) {
			tp_pace_window(&ranks[r], own);
			for (int i = 0; i < TP_PACE_SAMPLES; i++) least[i] = TP_MIN(least[i], own[i]);
		}
		for (int r = 0; r < 3; r++) {
			assert_false(tp_pace_judge(&ranks[r], least, 1, &median));
			assert_true(median > 1.05f && median < 1.15f);
		}
	}
}

static void whoever_alone_would_not_suspect_keeps_all_from_it(void **s)
{
	(void)s;
	struct tp_pace slow, quick;
	float least[TP_PACE_SAMPLES], median;
	tp_pace_begin(&slow, 16, 0);
	tp_pace_begin(&quick, 16, 0);
	for (int window = 0; window < 4; window++) {
		until_due(&slow, 900, 100);
		until_due(&quick, 100, 100);
		assert_int_equal(tp_pace_may_suspect(&slow, 1), window == 1);
		assert_false(tp_pace_may_suspect(&quick, 1));
		/* Suspected by one: it is judged by the least all the same. */
		tp_pace_window(window == 0 ? &slow : &quick, least);
		assert_false(tp_pace_judge(&slow, least, 1, &median));
		assert_false(tp_pace_judge(&quick, least, 1, &median));
	}
}

static void a_look_that_finds_nothing_makes_the_next_rarer(void **s)
{
	(void)s;
	struct tp_pace pace;
	int before = 0;
	tp_pace_begin(&pace, 16, 0);
	for (int look = 0; look < 4; look++) {
		int operations = 0;
		bool suspect = false;
		while (!suspect) {
			float least[TP_PACE_SAMPLES], median;
			operations += until_due(&pace, 900, 100);
			tp_pace_window(&pace, least);
			suspect = tp_pace_judge(&pace, least, 1, &median);
		}
		assert_true(operations > before);
		before = operations;
		tp_pace_put_off(&pace);
	}
	assert_true(before >= 16 * 16);
}

static void a_look_that_finds_something_is_followed_by_another_soon(void **s)
{
	(void)s;
	struct tp_pace pace;
	tp_pace_begin(&pace, 16, 0);
	judged(&pace, 4);
	assert_true(judged(&pace, 4));
	tp_pace_begin_anew(&pace);
	assert_false(judged(&pace, 4));
	assert_true(judged(&pace, 4));
}

static void times_and_predictions_of_any_size_are_taken(void **s)
{
	(void)s;
	struct tp_pace pace;
	float window[TP_PACE_SAMPLES];
	tp_pace_begin(&pace, 16, 0);
	tp_pace_add(&pace, 1e300, 1e-300);
	tp_pace_add(&pace, 0, 5);
	tp_pace_add(&pace, 5, 0);
	tp_pace_add(&pace, 5, -1);
	tp_pace_window(&pace, window);
	assert_true(window[0] == 1e6f && window[1] > 0 && window[2] == 1 && window[3] == 1 && window[4] == 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(two_slow_windows_in_a_row_are_suspect), cmocka_unit_test(windows_that_took_no_time_are_not_suspect_yet), cmocka_unit_test(one_slow_window_between_good_ones_is_nothing),
		cmocka_unit_test(twice_the_time_is_allowed), cmocka_unit_test(comparing_becomes_rare_where_all_is_well_and_frequent_where_not),
		cmocka_unit_test(the_wait_for_a_late_rank_is_no_slowness), cmocka_unit_test(whoever_alone_would_not_suspect_keeps_all_from_it),
		cmocka_unit_test(a_look_that_finds_nothing_makes_the_next_rarer), cmocka_unit_test(a_look_that_finds_something_is_followed_by_another_soon),
		cmocka_unit_test(times_and_predictions_of_any_size_are_taken),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

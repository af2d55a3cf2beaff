#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <cmocka.h>

#include "plan/helper_plan.h"

static void all_gather_is_right_for_1_to_64_ranks(void **state)
{
	(void)state;
	plans_check_all(TP_ALL_GATHER, TP_ALGO_PAT);
}

static void reduce_scatter_is_right_for_1_to_64_ranks(void **state)
{
	(void)state;
	plans_check_all(TP_REDUCE_SCATTER, TP_ALGO_PAT);
}

static void sends_each_piece_once_in_log_n_steps(void **state)
{
	(void)state;
	static const enum tp_coll colls[] = { TP_ALL_GATHER, TP_REDUCE_SCATTER };
	for (size_t c = 0; c < TP_ARRAY_LEN(colls); c++) {
		for (int n = 2; n <= 33; n++) {
			unsigned stages = 0;
			while (1 << stages < n) stages++;
			struct tp_layout *layout = plans_layout(n, ONE_DOMAIN);
			struct tp_plan *plan = plans_make_on(colls[c], TP_ALGO_PAT, layout, -1, 1);
			struct tp_check_report report = plans_check(plan);
			assert_int_equal(report.chunks_sent_max, n - 1);
			assert_true(report.depth <= stages + 1);
			assert_int_equal(plan->scratch_chunks, 0);
			tp_plan_free(plan);
			tp_layout_free(layout);
		}
	}
}

/* What sets it apart from halving and doubling: with two hosts, only one piece a rank takes the stage between them. */
static void fewer_chunks_cross_hosts_than_with_doubling(void **state)
{
	(void)state;
	struct tp_layout *layout = plans_layout(16, HALVES);
	struct tp_plan *pat = plans_make_on(TP_ALL_GATHER, TP_ALGO_PAT, layout, -1, 1);
	struct tp_plan *doubling = plans_make_on(TP_ALL_GATHER, TP_ALGO_HALVING_DOUBLING, layout, -1, 1);
	assert_true(plans_check(pat).chunks_crossing < plans_check(doubling).chunks_crossing);
	tp_plan_free(pat);
	tp_plan_free(doubling);
	tp_layout_free(layout);
}

static void refuses_all_reduce(void **state)
{
	(void)state;
	struct tp_layout *layout = plans_layout(4, ONE_DOMAIN);
	struct tp_plan_spec spec = { .coll = TP_ALL_REDUCE, .algo = TP_ALGO_PAT, .root = -1, .nchannels = 1, .layout = layout };
	assert_non_null(tp_plan_refuses(&spec));
	tp_layout_free(layout);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(all_gather_is_right_for_1_to_64_ranks),
		cmocka_unit_test(reduce_scatter_is_right_for_1_to_64_ranks),
		cmocka_unit_test(sends_each_piece_once_in_log_n_steps),
		cmocka_unit_test(fewer_chunks_cross_hosts_than_with_doubling),
		cmocka_unit_test(refuses_all_reduce),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

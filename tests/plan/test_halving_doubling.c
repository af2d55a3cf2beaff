#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <cmocka.h>

#include "plan/helper_plan.h"

static int stages_of(int n)
{
	int stages = 0;
	while (1 << stages < n) stages++;
	return stages;
}

static void all_reduce_is_right_for_1_to_64_ranks(void **state)
{
	(void)state;
	plans_check_all(TP_ALL_REDUCE, TP_ALGO_HALVING_DOUBLING);
}

static void reduce_scatter_is_right_for_1_to_64_ranks(void **state)
{
	(void)state;
	plans_check_all(TP_REDUCE_SCATTER, TP_ALGO_HALVING_DOUBLING);
}

static void all_gather_is_right_for_1_to_64_ranks(void **state)
{
	(void)state;
	plans_check_all(TP_ALL_GATHER, TP_ALGO_HALVING_DOUBLING);
}

/* 2(n-1) of n pieces leave each rank; a piece passes ceil(log2 n) ranks on the way in and on the way out. */
static void all_reduce_sends_what_theory_says(void **state)
{
	(void)state;
	for (int n = 2; n <= 33; n++) {
		struct tp_layout *layout = plans_layout(n, ONE_DOMAIN);
		struct tp_plan *plan = plans_make_on(TP_ALL_REDUCE, TP_ALGO_HALVING_DOUBLING, layout, -1, 1);
		struct tp_check_report report = plans_check(plan);
		assert_int_equal(plan->pieces, n);
		assert_int_equal(report.chunks_sent_max, 2 * (n - 1));
		assert_int_equal(report.chunks_sent_total, 2 * n * (n - 1));
		assert_true(report.depth <= 2u * (unsigned)stages_of(n) + 1);
		if ((n & (n - 1)) == 0) assert_int_equal(report.depth, 2 * stages_of(n) + 1);
		tp_plan_free(plan);
		tp_layout_free(layout);
	}
}

static void each_half_speaks_to_log_n_others(void **state)
{
	(void)state;
	for (int n = 2; n <= 64; n++) {
		struct tp_layout *layout = plans_layout(n, ONE_DOMAIN);
		struct tp_plan *plan = plans_make_on(TP_ALL_REDUCE, TP_ALGO_HALVING_DOUBLING, layout, -1, 1);
		for (uint32_t i = 0; i < plan->nprograms; i++) {
			const struct tp_program *p = &plan->programs[i];
			int out = 0;
			for (uint32_t l = 0; l < p->nlinks; l++) out += p->links[l].from == p->rank && p->links[l].to != p->rank;
			assert_int_equal(out, 2 * stages_of(n));
		}
		assert_int_equal(plan->scratch_chunks, 0);
		tp_plan_free(plan);
		tp_layout_free(layout);
	}
}

static void plans_in_sequence_do_not_meet(void **state)
{
	(void)state;
	struct tp_layout *layout = plans_layout(6, ONE_DOMAIN);
	const struct tp_plan *plans[] = {
		plans_make_on(TP_ALL_REDUCE, TP_ALGO_HALVING_DOUBLING, layout, -1, 1),
		plans_make_on(TP_REDUCE_SCATTER, TP_ALGO_HALVING_DOUBLING, layout, -1, 1),
		plans_make_on(TP_ALL_GATHER, TP_ALGO_PAT, layout, -1, 1),
		plans_make_on(TP_ALL_REDUCE, TP_ALGO_RING, layout, -1, 1),
		plans_make_on(TP_ALL_TO_ALL, TP_ALGO_BRUCK, layout, -1, 1),
		plans_make_on(TP_REDUCE_SCATTER, TP_ALGO_PAT, layout, -1, 1),
		plans_make_on(TP_ALL_REDUCE, TP_ALGO_HALVING_DOUBLING, layout, -1, 1),
	};
	for (int by_ref = 0; by_ref < 2; by_ref++) {
		struct tp_check_options options = { .slots = 2, .rounds = 2, .by_ref = by_ref };
		struct tp_check_report report;
		if (tp_check_sequence(plans, (int)TP_ARRAY_LEN(plans), &options, &report) != ncclSuccess) fail_msg("%s", report.text);
	}
	for (size_t i = 0; i < TP_ARRAY_LEN(plans); i++) tp_plan_free((struct tp_plan *)plans[i]);
	tp_layout_free(layout);
}

static void refuses_what_it_cannot_do(void **state)
{
	(void)state;
	struct tp_layout *layout = plans_layout(4, ONE_DOMAIN);
	struct tp_plan_spec spec = { .coll = TP_BROADCAST, .algo = TP_ALGO_HALVING_DOUBLING, .nchannels = 1, .layout = layout };
	struct tp_plan *plan = NULL;
	assert_non_null(tp_plan_refuses(&spec));
	assert_int_equal(tp_plan_create(&spec, 0, &plan), ncclInvalidUsage);
	assert_null(plan);
	tp_layout_free(layout);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(all_reduce_is_right_for_1_to_64_ranks),
		cmocka_unit_test(reduce_scatter_is_right_for_1_to_64_ranks),
		cmocka_unit_test(all_gather_is_right_for_1_to_64_ranks),
		cmocka_unit_test(all_reduce_sends_what_theory_says),
		cmocka_unit_test(each_half_speaks_to_log_n_others),
		cmocka_unit_test(plans_in_sequence_do_not_meet),
		cmocka_unit_test(refuses_what_it_cannot_do),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Layouts, the text of plans, and plans as things that are made and freed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "plan/helper_plan.h"

static void domains_are_numbered_by_their_lowest_rank_and_places_by_rank(void **state)
{
	(void)state;
	static const int domains[] = { 30, 10, 30, 20, 10, 30 }, domain[] = { 0, 1, 0, 2, 1, 0 }, place[] = { 0, 0, 1, 0, 1, 2 };
	struct tp_layout *layout;
	assert_int_equal(tp_layout_create(6, domains, &layout), ncclSuccess);
	assert_int_equal(layout->nranks, 6);
	assert_int_equal(layout->ndomains, 3);
	assert_memory_equal(layout->domain, domain, sizeof(domain));
	assert_memory_equal(layout->place, place, sizeof(place));
	assert_int_equal(layout->domain_size[0], 3);
	assert_int_equal(layout->domain_size[1], 2);
	assert_int_equal(layout->domain_size[2], 1);
	tp_layout_free(layout);
	assert_int_equal(tp_layout_create(0, domains, &layout), ncclInvalidArgument);
}

static void a_plan_outlives_the_layout_it_was_made_of(void **state)
{
	(void)state;
	struct tp_plan *plan = plans_make(TP_ALL_REDUCE, TP_ALGO_HIERARCHICAL, 6, UNEVEN, -1, 1);      /* frees the layout */
	assert_int_equal(plan->spec.layout->nranks, 6);
	plans_expect_right(plan, 2, 2);
	tp_plan_free(plan);
	tp_plan_free(NULL);
}

static void the_text_of_a_plan_tells_each_step(void **state)
{
	(void)state;
	struct tp_plan *plan = plans_make(TP_ALL_REDUCE, TP_ALGO_RING, 3, ONE_DOMAIN, -1, 1);
	char *text = tp_plan_text(plan);
	assert_non_null(text);
	assert_non_null(strstr(text, "AllReduce RING: 3 ranks in 1 domains, 1 channels, shape steps, 3 pieces a round, 0 scratch chunks\n"));
	assert_non_null(strstr(text,
		"  rank 1 channel 0 lane 0:\n"
		"    copy in[0] to 1=>2.0\n"
		"    reduce 0>1.0 in[2] to 1->2.0\n"
		"    reduce final 0>1.0 in[1] to out[1] 1=>2.0\n"
		"    copy 0>1.0 to out[0] 1=>2.0\n"
		"    copy 0>1.0 to out[2]\n"));
	free(text);
	tp_plan_free(plan);
}

static void every_name_is_known(void **state)
{
	(void)state;
	for (int coll = 0; coll < TP_NCOLLS; coll++) assert_string_not_equal(tp_coll_name((enum tp_coll)coll), "unknown");
	for (int algo = 0; algo < TP_NALGOS; algo++) assert_string_not_equal(tp_algo_name((enum tp_algo)algo), "unknown");
	assert_string_equal(tp_coll_name(TP_NCOLLS), "unknown");
	assert_string_equal(tp_algo_name(TP_NALGOS), "unknown");
}

/* A thousand processes each make their own program only; what one costs must not grow with what all do. */
static void a_rank_of_a_thousand_makes_only_its_own_steps(void **state)
{
	(void)state;
	struct tp_layout *layout = plans_layout(1024, TWELVE);
	static const struct { enum tp_algo algo; enum tp_coll coll; uint32_t most; } cases[] = {
		{ TP_ALGO_RING, TP_ALL_REDUCE, 2047 }, { TP_ALGO_TREE, TP_ALL_REDUCE, 4 }, { TP_ALGO_TWO_SHOT, TP_ALL_REDUCE, 2047 },
		{ TP_ALGO_ONE_SHOT, TP_ALL_REDUCE, 2 }, { TP_ALGO_DIRECT, TP_ALL_GATHER, 1024 }, { TP_ALGO_RING, TP_BROADCAST, 1 },
		{ TP_ALGO_HIERARCHICAL, TP_BROADCAST, 90 },
	};
	for (size_t i = 0; i < TP_ARRAY_LEN(cases); i++) {
		struct tp_plan_spec spec = { cases[i].coll, cases[i].algo, 0, 1, layout };
		struct tp_plan *plan;
		assert_int_equal(tp_plan_create(&spec, 700, &plan), ncclSuccess);
		assert_int_equal(plan->nprograms, 1);
		assert_true(plan->programs[0].nsteps <= cases[i].most);
		tp_plan_free(plan);
	}
	tp_layout_free(layout);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(domains_are_numbered_by_their_lowest_rank_and_places_by_rank),
		cmocka_unit_test(a_plan_outlives_the_layout_it_was_made_of), cmocka_unit_test(the_text_of_a_plan_tells_each_step),
		cmocka_unit_test(every_name_is_known), cmocka_unit_test(a_rank_of_a_thousand_makes_only_its_own_steps),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

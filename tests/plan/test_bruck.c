#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <cmocka.h>

#include "plan/helper_plan.h"

static void all_to_all_is_right_for_1_to_64_ranks(void **state)
{
	(void)state;
	plans_check_all(TP_ALL_TO_ALL, TP_ALGO_BRUCK);
}

/* Block i crosses as many stages as it has bits; a rank sends to ceil(log2 n) others only. */
static void a_block_takes_a_hop_a_bit(void **state)
{
	(void)state;
	for (int n = 2; n <= 33; n++) {
		unsigned hops = 0, stages = 0;
		while (1 << stages < n) stages++;
		for (int i = 1; i < n; i++) hops += (unsigned)__builtin_popcount((unsigned)i);
		struct tp_layout *layout = plans_layout(n, ONE_DOMAIN);
		struct tp_plan *plan = plans_make_on(TP_ALL_TO_ALL, TP_ALGO_BRUCK, layout, -1, 1);
		struct tp_check_report report = plans_check(plan);
		assert_int_equal(report.chunks_sent_max, hops);
		const struct tp_program *p = &plan->programs[0];
		unsigned peers = 0;
		for (uint32_t l = 0; l < p->nlinks; l++) peers += p->links[l].from == 0 && p->links[l].to != 0;
		assert_int_equal(peers, stages);
		tp_plan_free(plan);
		tp_layout_free(layout);
	}
}

static void does_all_to_all_only(void **state)
{
	(void)state;
	struct tp_layout *layout = plans_layout(4, ONE_DOMAIN);
	for (int coll = 0; coll < TP_SEND_RECV; coll++) {
		struct tp_plan_spec spec = { .coll = (enum tp_coll)coll, .algo = TP_ALGO_BRUCK, .nchannels = 1, .layout = layout };
		if (coll == TP_ALL_TO_ALL) assert_null(tp_plan_refuses(&spec));
		else assert_non_null(tp_plan_refuses(&spec));
	}
	tp_layout_free(layout);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(all_to_all_is_right_for_1_to_64_ranks),
		cmocka_unit_test(a_block_takes_a_hop_a_bit),
		cmocka_unit_test(does_all_to_all_only),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

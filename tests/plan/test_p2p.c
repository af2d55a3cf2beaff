/* Groups of sends and receives: whatever ranks send to whom, everything arrives, each transfer where it belongs. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "plan/helper_plan.h"

enum { RANKS = 9, ROOM = 64 };

struct group { struct tp_transfer transfers[RANKS][ROOM]; int counts[RANKS]; };

static void add(struct group *g, int rank, int peer, bool is_send)
{
	assert_true(g->counts[rank] < ROOM);
	g->transfers[rank][g->counts[rank]++] = (struct tp_transfer){ peer, is_send };
}

static struct tp_plan *plan_of(struct group *g, int nranks)
{
	struct tp_transfer *rows[RANKS];
	for (int r = 0; r < nranks; r++) rows[r] = g->transfers[r];
	return plans_p2p(nranks, rows, g->counts);
}

static void shuffle(struct group *g, int rank, struct plans_random *random)
{
	for (int i = g->counts[rank] - 1; i > 0; i--) {
		int j = (int)plans_random(random, (uint32_t)i + 1);
		struct tp_transfer swap = g->transfers[rank][i];
		g->transfers[rank][i] = g->transfers[rank][j];
		g->transfers[rank][j] = swap;
	}
}

static void random_matched_groups_arrive(void **state)
{
	(void)state;
	struct plans_random random = { 99 };
	for (int i = 0; i < 400; i++) {
		struct group g = { 0 };
		int nranks = 1 + (int)plans_random(&random, RANKS), count = (int)plans_random(&random, 30);
		for (int k = 0; k < count; k++) {
			int from = (int)plans_random(&random, (uint32_t)nranks), to = (int)plans_random(&random, (uint32_t)nranks);
			add(&g, from, to, true);
			add(&g, to, from, false);
		}
		for (int r = 0; r < nranks; r++) shuffle(&g, r, &random);       /* the calls of a group come in any order */
		struct tp_plan *plan = plan_of(&g, nranks);
		plans_expect_right(plan, 2, 1 + (uint32_t)i % 5);
		tp_plan_free(plan);
	}
}

static void all_to_all_as_a_group_arrives(void **state)
{
	(void)state;
	struct group g = { 0 };
	for (int r = 0; r < RANKS; r++)
		for (int p = 0; p < RANKS; p++) {
			add(&g, r, p, true);
			add(&g, r, p, false);
		}
	struct tp_plan *plan = plan_of(&g, RANKS);
	plans_expect_right(plan, 2, 4);
	for (int r = 0; r < RANKS; r++) {           /* everyone begins with another peer */
		const struct tp_program *p = &plan->programs[r];
		assert_int_equal(p->nlanes, 2 * RANKS);
		assert_int_equal(g.transfers[r][p->lanes[2].transfer].peer, (r + 1) % RANKS);
	}
	tp_plan_free(plan);
}

static void transfers_to_one_peer_follow_each_other_in_order(void **state)
{
	(void)state;
	struct group g = { 0 };
	for (int k = 0; k < 5; k++) {
		add(&g, 0, 1, true);
		add(&g, 1, 0, false);
		add(&g, 0, 0, true);
		add(&g, 0, 0, false);
	}
	struct tp_plan *plan = plan_of(&g, 2);
	plans_expect_right(plan, 2, 7);
	const struct tp_program *p = &plan->programs[0];
	assert_int_equal(p->nlanes, 15);
	for (int k = 0; k < 5; k++) {
		assert_int_equal(p->lanes[10 + k].transfer, 3 * k);
		assert_int_equal(p->lanes[10 + k].after, k ? 10 + k : 0);
	}
	tp_plan_free(plan);
}

static void without_the_order_the_checker_finds_them_on_one_link(void **state)
{
	(void)state;
	struct group g = { 0 };
	struct tp_check_options options = { .slots = 2, .rounds = 2 };
	struct tp_check_report report;
	for (int k = 0; k < 2; k++) {
		add(&g, 0, 1, true);
		add(&g, 1, 0, false);
	}
	struct tp_plan *plan = plan_of(&g, 2);
	plan->programs[1].lanes[1].after = 0;
	assert_int_equal(tp_check_plan(plan, &options, &report), ncclInternalError);
	assert_int_equal(report.fault, TP_CHECK_MALFORMED);
	assert_int_equal(report.rank, 1);
	assert_int_equal(report.lane, 1);
	tp_plan_free(plan);
}

static void a_receive_that_nobody_sends_waits_and_is_told(void **state)
{
	(void)state;
	struct group g = { 0 };
	struct tp_check_options options = { .slots = 2, .rounds = 1 };
	struct tp_check_report report;
	add(&g, 0, 1, true);
	add(&g, 1, 0, false);
	add(&g, 2, 1, false);
	struct tp_plan *plan = plan_of(&g, 3);
	assert_int_equal(tp_check_plan(plan, &options, &report), ncclInternalError);
	assert_int_equal(report.fault, TP_CHECK_DEADLOCK);
	assert_int_equal(report.rank, 2);
	assert_non_null(strstr(report.text, "rank 1, which has nothing left to give"));
	tp_plan_free(plan);
}

static void groups_and_collectives_may_follow_each_other(void **state)
{
	(void)state;
	struct group g = { 0 };
	for (int r = 0; r < 4; r++) {
		add(&g, r, (r + 1) % 4, true);
		add(&g, r, (r + 3) % 4, false);
	}
	struct tp_plan *group = plan_of(&g, 4), *ring = plans_make(TP_ALL_REDUCE, TP_ALGO_RING, 4, ONE_DOMAIN, -1, 1);
	const struct tp_plan *sequence[] = { group, ring, group, group, ring };
	struct tp_check_options options = { .slots = 2, .rounds = 3, .by_ref = true };
	struct tp_check_report report;
	assert_int_equal(tp_check_sequence(sequence, 5, &options, &report), ncclSuccess);
	tp_plan_free(group);
	tp_plan_free(ring);
}

static void nonsense_is_refused_with_names(void **state)
{
	(void)state;
	struct tp_transfer bad[] = { { 4, true } }, alone[] = { { 1, true }, { 1, true }, { 1, false } };
	struct tp_plan *plan = NULL;
	assert_int_equal(tp_plan_p2p(1, 4, bad, 1, &plan), ncclInvalidArgument);
	assert_non_null(strstr(tp_log_last_error(), "Rank 1 sends to rank 4, but there are 4 ranks"));
	assert_int_equal(tp_plan_p2p(1, 4, alone, 3, &plan), ncclInvalidUsage);
	assert_non_null(strstr(tp_log_last_error(), "Rank 1 sends to itself 2 times in this group and receives from itself 1 times"));
	assert_null(plan);
}

static void an_empty_group_is_an_empty_plan(void **state)
{
	(void)state;
	struct tp_plan *plan = NULL;
	assert_int_equal(tp_plan_p2p(0, 2, NULL, 0, &plan), ncclSuccess);
	assert_int_equal(plan->programs[0].nlanes, 0);
	tp_plan_free(plan);
}

static void a_pair_uses_one_link_that_both_know(void **state)
{
	(void)state;
	for (int rank = 1; rank <= 3; rank += 2) {
		struct tp_plan *plan;
		assert_int_equal(tp_plan_pair(rank, 1, 3, 2, &plan), ncclSuccess);
		const struct tp_program *program = &plan->programs[0];
		assert_true(plan->nprograms == 1 && program->rank == rank && program->channel == 0);
		assert_true(program->nsteps == 1 && program->nlinks == 1);
		assert_true(program->links[0].from == 1 && program->links[0].to == 3 && program->links[0].lane_class == 2 && !program->links[0].token);
		tp_plan_free(plan);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(random_matched_groups_arrive), cmocka_unit_test(all_to_all_as_a_group_arrives),
		cmocka_unit_test(transfers_to_one_peer_follow_each_other_in_order),
		cmocka_unit_test(without_the_order_the_checker_finds_them_on_one_link),
		cmocka_unit_test(a_receive_that_nobody_sends_waits_and_is_told),
		cmocka_unit_test(groups_and_collectives_may_follow_each_other), cmocka_unit_test(nonsense_is_refused_with_names),
		cmocka_unit_test(an_empty_group_is_an_empty_plan),
		cmocka_unit_test(a_pair_uses_one_link_that_both_know),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Every generator's plan is right for every number of ranks, on odd layouts, in place and not, with references and without,
 * with as few slots as executors use. (The logarithmic ones have files of their own.) */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "plan/helper_plan.h"

static bool has_root(enum tp_coll coll)
{
	return coll == TP_BROADCAST || coll == TP_REDUCE || coll == TP_GATHER || coll == TP_SCATTER;
}

/* All numbers that could be special, without spending the time on all 64. */
static int next_nranks(int n) { return n < 20 ? n + 1 : n < 24 ? 24 : n < 29 ? 29 : n < 32 ? 32 : n < 33 ? 33 : n < 47 ? 47 : n + (n < 63 ? 16 : 1); }

static void expect_algo_right(enum tp_algo algo)
{
	int proven = 0;
	for (int n = 1; n <= PLANS_MOST_RANKS; n = next_nranks(n)) {
		for (int kind = 0; kind < NLAYOUTS; kind++) {
			/* Only rings, trees and hierarchies look at the layout. */
			bool looks = algo == TP_ALGO_RING || algo == TP_ALGO_TREE || algo == TP_ALGO_HIERARCHICAL;
			if (kind && !looks) break;
			struct tp_layout *layout = plans_layout(n, (enum layout_kind)kind);
			for (int coll = 0; coll < TP_SEND_RECV; coll++) {
				for (int root = 0; root < (has_root((enum tp_coll)coll) ? n : 1); root++) {
					if (n > 8 && root && root != n / 2 && root != n - 1) continue;
					struct tp_plan_spec spec = { (enum tp_coll)coll, algo, root, 1, layout };
					struct tp_plan *plan = NULL;
					if (tp_plan_refuses(&spec)) continue;
					assert_int_equal(tp_plan_create(&spec, -1, &plan), ncclSuccess);
					plans_expect_right(plan, 2, n <= 16 ? 3 : 2);
					tp_plan_free(plan);
					proven++;
				}
			}
			tp_layout_free(layout);
		}
	}
	assert_true(proven > 20);
}

#define PROVES(name, algo) static void name(void **state) { (void)state; expect_algo_right(algo); }
PROVES(ring_is_right, TP_ALGO_RING)
PROVES(tree_is_right, TP_ALGO_TREE)
PROVES(one_shot_is_right, TP_ALGO_ONE_SHOT)
PROVES(two_shot_is_right, TP_ALGO_TWO_SHOT)
PROVES(direct_is_right, TP_ALGO_DIRECT)
PROVES(hierarchical_is_right, TP_ALGO_HIERARCHICAL)

/* Random within each domain; the domains one after the other. */
static int *random_orders(const struct tp_layout *layout, int norders)
{
	struct plans_random random = { (uint64_t)layout->nranks * 31 + (uint64_t)norders };
	int n = layout->nranks, *orders = calloc((size_t)(norders * n), sizeof(*orders));
	assert_non_null(orders);
	for (int o = 0; o < norders; o++) {
		int *order = orders + o * n, first = 0;
		for (int d = 0; d < layout->ndomains; d++) {
			int count = 0;
			for (int r = 0; r < n; r++)
				if (layout->domain[r] == d) order[first + count++] = r;
			for (int i = count - 1; i > 0; i--) {
				int k = (int)plans_random(&random, (uint32_t)i + 1), old = order[first + i];
				order[first + i] = order[first + k];
				order[first + k] = old;
			}
			first += count;
		}
	}
	return orders;
}

/* Of the links of all programs on a channel, each is from a rank to the next one in the order; a chain lacks one of them. */
static void expect_order(const struct tp_plan *plan, const struct tp_layout *layout, int norders, const int *orders)
{
	int n = layout->nranks;
	for (uint32_t i = 0; i < plan->nprograms; i++) {
		const struct tp_program *p = &plan->programs[i];
		const int *order = orders + p->channel % norders * n;
		for (uint32_t l = 0; l < p->nlinks; l++) {
			int at = 0, to = p->links[l].to;
			while (order[at] != p->links[l].from) at++;
			if (plan->spec.root < 0) {
				assert_int_equal(to, order[(at + 1) % n]);
				continue;
			}
			/* The root's domain is turned: its last one's next is its first, or the domains before and behind begin elsewhere. */
			bool same = layout->domain[to] == layout->domain[order[at]];
			int first = at;
			while (first > 0 && layout->domain[order[first - 1]] == layout->domain[order[at]]) first--;
			int size = layout->domain_size[layout->domain[order[at]]];
			if (same) assert_int_equal(to, order[first + (at - first + 1) % size]);
		}
	}
}

static void rings_go_in_the_orders_of_the_layout(void **state)
{
	(void)state;
	static const enum tp_coll colls[] = { TP_ALL_REDUCE, TP_ALL_GATHER, TP_REDUCE_SCATTER, TP_BROADCAST, TP_REDUCE };
	for (int n = 2; n <= 16; n = n < 8 ? n + 1 : 2 * n)
		for (int kind = 0; kind < NLAYOUTS; kind++)
			for (size_t c = 0; c < TP_ARRAY_LEN(colls); c++) {
				struct tp_layout *layout = plans_layout(n, (enum layout_kind)kind);
				int *orders = random_orders(layout, 3), crossed = 0;
				assert_int_equal(tp_layout_set_orders(layout, 3, orders), ncclSuccess);
				for (int root = has_root(colls[c]) ? 0 : n - 1; root < n; root += n > 4 ? 3 : 1) {
					struct tp_plan *plan = plans_make_on(colls[c], TP_ALGO_RING, layout, has_root(colls[c]) ? root : -1, 4);
					plans_expect_right(plan, 2, 2);
					expect_order(plan, layout, 3, orders);
					for (uint32_t i = 0; i < plan->nprograms; i++)
						for (uint32_t l = 0; l < plan->programs[i].nlinks; l++) {
							const struct tp_plan_link *link = &plan->programs[i].links[l];
							crossed += plan->programs[i].channel == 0 && link->from == plan->programs[i].rank && layout->domain[link->from] != layout->domain[link->to];
						}
					assert_true(crossed <= layout->ndomains);
					crossed = 0;
					tp_plan_free(plan);
				}
				free(orders);
				tp_layout_free(layout);
			}
}

static void what_is_no_order_is_refused(void **state)
{
	(void)state;
	struct tp_layout *layout = plans_layout(4, HALVES);
	static const int twice[] = { 0, 1, 2, 2 }, mixed[] = { 0, 2, 1, 3 }, beyond[] = { 0, 1, 2, 4 }, good[] = { 1, 0, 3, 2 };
	assert_int_equal(tp_layout_set_orders(layout, 1, good), ncclSuccess);
	assert_int_equal(tp_layout_set_orders(layout, 1, twice), ncclInvalidArgument);
	assert_int_equal(tp_layout_set_orders(layout, 1, mixed), ncclInvalidArgument);
	assert_int_equal(tp_layout_set_orders(layout, 1, beyond), ncclInvalidArgument);
	assert_int_equal(layout->norders, 1);
	assert_int_equal(layout->orders[0], 1);
	assert_int_equal(tp_layout_set_orders(layout, 0, NULL), ncclSuccess);
	assert_int_equal(layout->norders, 0);
	tp_layout_free(layout);
}

static void each_collective_has_a_generator_for_any_ranks(void **state)
{
	(void)state;
	for (int n = 1; n <= 64; n++) {
		struct tp_layout *layout = plans_layout(n, SCATTERED);
		for (int coll = 0; coll < TP_SEND_RECV; coll++) {
			int able = 0;
			for (int algo = 0; algo < TP_NALGOS; algo++) {
				struct tp_plan_spec spec = { (enum tp_coll)coll, (enum tp_algo)algo, n - 1, 2, layout };
				able += !tp_plan_refuses(&spec);
			}
			assert_true(able > 0);
		}
		tp_layout_free(layout);
	}
}

static void one_rank_gets_the_program_it_has_among_all(void **state)
{
	(void)state;
	for (int algo = 0; algo < TP_NALGOS; algo++) {
		struct tp_layout *layout = plans_layout(11, INTERLEAVED);
		for (int coll = 0; coll < TP_SEND_RECV; coll++) {
			struct tp_plan_spec spec = { (enum tp_coll)coll, (enum tp_algo)algo, 4, 2, layout };
			struct tp_plan *all, *one;
			if (tp_plan_refuses(&spec)) continue;
			assert_int_equal(tp_plan_create(&spec, -1, &all), ncclSuccess);
			for (int r = 0; r < 11; r++) {
				assert_int_equal(tp_plan_create(&spec, r, &one), ncclSuccess);
				assert_int_equal(one->nprograms, 2);
				for (int c = 0; c < 2; c++) {
					const struct tp_program *a = &all->programs[r * 2 + c], *b = &one->programs[c];
					assert_int_equal(b->rank, r);
					assert_int_equal(b->channel, c);
					assert_int_equal(a->noperands, b->noperands);
					assert_int_equal(a->nsteps, b->nsteps);
					for (uint32_t o = 0; o < a->noperands; o++) {
						assert_int_equal(a->operands[o].where, b->operands[o].where);
						assert_int_equal(a->operands[o].by_ref, b->operands[o].by_ref);
						assert_int_equal(a->operands[o].index, b->operands[o].index);
					}
					assert_memory_equal(a->steps, b->steps, a->nsteps * sizeof(*a->steps));
				}
				tp_plan_free(one);
			}
			tp_plan_free(all);
		}
		tp_layout_free(layout);
	}
}

static void several_channels_are_right(void **state)
{
	(void)state;
	for (int algo = 0; algo < TP_NALGOS; algo++) {
		struct tp_layout *layout = plans_layout(6, HALVES);
		struct tp_plan_spec spec = { TP_ALL_REDUCE, (enum tp_algo)algo, -1, 3, layout };
		if (!tp_plan_refuses(&spec)) {
			struct tp_plan *plan = plans_make(TP_ALL_REDUCE, (enum tp_algo)algo, 6, HALVES, -1, 3);
			assert_int_equal(plan->nprograms, 18);
			plans_expect_right(plan, 2, 3);
			tp_plan_free(plan);
		}
		tp_layout_free(layout);
	}
}

static void more_slots_are_right_too(void **state)
{
	(void)state;
	for (int algo = 0; algo < TP_NALGOS; algo++) {
		struct tp_layout *layout = plans_layout(9, UNEVEN);
		struct tp_plan_spec spec = { TP_REDUCE_SCATTER, (enum tp_algo)algo, -1, 1, layout };
		if (!tp_plan_refuses(&spec)) {
			struct tp_plan *plan = plans_make(TP_REDUCE_SCATTER, (enum tp_algo)algo, 9, UNEVEN, -1, 1);
			plans_expect_right(plan, 8, 5);
			tp_plan_free(plan);
		}
		tp_layout_free(layout);
	}
}

/* Ranks drift apart: any plan may follow any other on the same links. */
static void any_two_plans_may_follow_each_other(void **state)
{
	(void)state;
	struct tp_plan *plans[TP_SEND_RECV * TP_NALGOS];
	int nplans = 0;
	struct tp_layout *layout = plans_layout(6, UNEVEN);
	for (int coll = 0; coll < TP_SEND_RECV; coll++)
		for (int algo = 0; algo < TP_NALGOS; algo++) {
			struct tp_plan_spec spec = { (enum tp_coll)coll, (enum tp_algo)algo, coll % 6, 1, layout };
			if (tp_plan_refuses(&spec)) continue;
			assert_int_equal(tp_plan_create(&spec, -1, &plans[nplans++]), ncclSuccess);
		}
	tp_layout_free(layout);
	for (int i = 0; i < nplans; i++)
		for (int j = 0; j < nplans; j++) {
			const struct tp_plan *three[] = { plans[i], plans[j], plans[i] };
			struct tp_check_options options = { .slots = 2, .rounds = 2, .in_place = j & 1, .by_ref = true };
			struct tp_check_report report;
			if (tp_check_sequence(three, 3, &options, &report) != ncclSuccess)
				fail_msg("%s %s then %s %s: %s", tp_algo_name(plans[i]->spec.algo), tp_coll_name(plans[i]->spec.coll),
					tp_algo_name(plans[j]->spec.algo), tp_coll_name(plans[j]->spec.coll), report.text);
		}
	for (int i = 0; i < nplans; i++) tp_plan_free(plans[i]);
}

/* Marks a copy as a reference: is the plan still right, in place and not? */
static bool is_safe_by_ref(struct tp_plan *plan, struct tp_operand *o)
{
	bool safe = true;
	o->by_ref = 1;
	for (int in_place = 0; in_place < 2 && safe; in_place++) {
		struct tp_check_options options = { .slots = 2, .rounds = 3, .in_place = in_place, .by_ref = true };
		struct tp_check_report report;
		safe = tp_check_plan(plan, &options, &report) == ncclSuccess;
	}
	o->by_ref = 0;
	return safe;
}

static void every_reference_that_would_be_safe_is_declared(void **state)
{
	(void)state;
	struct tp_layout *layout = plans_layout(6, UNEVEN);
	for (int algo = 0; algo < TP_NALGOS; algo++)
		for (int coll = 0; coll < TP_SEND_RECV; coll++) {
			struct tp_plan_spec spec = { (enum tp_coll)coll, (enum tp_algo)algo, 2, 1, layout };
			struct tp_plan *plan;
			if (tp_plan_refuses(&spec)) continue;
			assert_int_equal(tp_plan_create(&spec, -1, &plan), ncclSuccess);
			for (uint32_t i = 0; i < plan->nprograms; i++) {
				struct tp_program *p = &plan->programs[i];
				for (uint32_t s = 0; s < p->nsteps; s++)
					for (uint32_t o = 0; o < p->steps[s].ndst; o++) {
						struct tp_operand *to = &p->operands[p->steps[s].first + p->steps[s].nsrc + o];
						if (to->where != TP_LINK || to->by_ref || p->links[to->index].token) continue;
						if (is_safe_by_ref(plan, to))
							fail_msg("%s %s: rank %d, step %u copies for no reason", tp_algo_name(spec.algo), tp_coll_name(spec.coll), p->rank, s);
					}
			}
			tp_plan_free(plan);
		}
	tp_layout_free(layout);
}

static void what_cannot_be_is_refused_with_a_reason(void **state)
{
	(void)state;
	struct tp_layout *one = plans_layout(4, ONE_DOMAIN), *lonely = plans_layout(2, HALVES);
	struct tp_plan *plan = NULL;
	const struct tp_plan_spec specs[] = {
		{ TP_ALL_REDUCE, TP_ALGO_HIERARCHICAL, -1, 1, one }, { TP_ALL_REDUCE, TP_ALGO_HIERARCHICAL, -1, 1, lonely },
		{ TP_ALL_TO_ALL, TP_ALGO_RING, -1, 1, one }, { TP_ALL_REDUCE, TP_ALGO_DIRECT, -1, 1, one },
		{ TP_BROADCAST, TP_ALGO_RING, 4, 1, one }, { TP_BROADCAST, TP_ALGO_RING, -1, 1, one },
		{ TP_ALL_REDUCE, TP_ALGO_RING, -1, 0, one }, { TP_SEND_RECV, TP_ALGO_DIRECT, -1, 1, one },
		{ TP_ALL_GATHER, TP_ALGO_TREE, -1, 1, one }, { TP_ALL_REDUCE, TP_NALGOS, -1, 1, one },
	};
	for (size_t i = 0; i < TP_ARRAY_LEN(specs); i++) {
		const char *why = tp_plan_refuses(&specs[i]);
		assert_non_null(why);
		assert_int_equal(tp_plan_create(&specs[i], -1, &plan), ncclInvalidUsage);
		assert_non_null(strstr(tp_log_last_error(), why));
		assert_null(plan);
	}
	struct tp_plan_spec right = { TP_ALL_REDUCE, TP_ALGO_RING, -1, 1, one };
	assert_int_equal(tp_plan_create(&right, 4, &plan), ncclInvalidArgument);
	tp_layout_free(one);
	tp_layout_free(lonely);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(ring_is_right), cmocka_unit_test(tree_is_right),
		cmocka_unit_test(one_shot_is_right), cmocka_unit_test(two_shot_is_right),
		cmocka_unit_test(direct_is_right), cmocka_unit_test(hierarchical_is_right),
		cmocka_unit_test(rings_go_in_the_orders_of_the_layout), cmocka_unit_test(what_is_no_order_is_refused),
		cmocka_unit_test(each_collective_has_a_generator_for_any_ranks),
		cmocka_unit_test(one_rank_gets_the_program_it_has_among_all), cmocka_unit_test(several_channels_are_right),
		cmocka_unit_test(more_slots_are_right_too), cmocka_unit_test(any_two_plans_may_follow_each_other),
		cmocka_unit_test(every_reference_that_would_be_safe_is_declared),
		cmocka_unit_test(what_cannot_be_is_refused_with_a_reason),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

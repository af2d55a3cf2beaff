/* What plans send, how much of it crosses domains, and how long their chains of steps are, against theory. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include "plan/helper_plan.h"

struct measured {
	struct tp_check_report report;
	double sent_max, sent_mean, crossing;   /* in messages (blocks, where the message is a block) */
};

static struct measured measure_root(enum tp_coll coll, enum tp_algo algo, int nranks, enum layout_kind kind, int root)
{
	struct tp_plan *plan = plans_make(coll, algo, nranks, kind, root, 1);
	struct tp_check_options options = { .slots = 2, .rounds = 1 };
	struct measured m;
	assert_int_equal(tp_check_plan(plan, &options, &m.report), ncclSuccess);
	m.sent_max = (double)m.report.chunks_sent_max / plan->pieces;
	m.sent_mean = (double)m.report.chunks_sent_total / plan->pieces / nranks;
	m.crossing = (double)m.report.chunks_crossing / plan->pieces;
	tp_plan_free(plan);
	return m;
}

static struct measured measure(enum tp_coll coll, enum tp_algo algo, int nranks, enum layout_kind kind)
{
	return measure_root(coll, algo, nranks, kind, 0);
}

static uint32_t log2_up(int n)
{
	uint32_t bits = 0;
	while (1 << bits < n) bits++;
	return bits;
}

#define assert_close(a, b) do { double d = (a) - (b); assert_true(d < 1e-9 && d > -1e-9); } while (0)

static void a_ring_sends_the_least_that_an_all_reduce_can(void **state)
{
	(void)state;
	for (int n = 2; n <= 64; n++) {
		struct measured m = measure(TP_ALL_REDUCE, TP_ALGO_RING, n, ONE_DOMAIN);
		assert_close(m.sent_max, 2.0 * (n - 1) / n);
		assert_close(m.sent_mean, 2.0 * (n - 1) / n);
		assert_int_equal(m.report.depth, 2 * n - 1);
		m = measure(TP_ALL_GATHER, TP_ALGO_RING, n, ONE_DOMAIN);
		assert_close(m.sent_max, n - 1);
		m = measure(TP_REDUCE_SCATTER, TP_ALGO_RING, n, ONE_DOMAIN);
		assert_close(m.sent_max, n - 1);
		m = measure(TP_BROADCAST, TP_ALGO_RING, n, ONE_DOMAIN);
		assert_close(m.sent_max, 1);
		assert_int_equal(m.report.depth, n);
	}
}

static void a_ring_leaves_each_domain_once(void **state)
{
	(void)state;
	for (int n = 6; n <= 60; n += 9) {
		for (int kind = HALVES; kind <= INTERLEAVED; kind++) {
			int domains = kind == HALVES ? 2 : 3;
			assert_close(measure(TP_ALL_REDUCE, TP_ALGO_RING, n, (enum layout_kind)kind).crossing, domains * 2.0 * (n - 1) / n);
			for (int root = 0; root < n; root++) {
				assert_close(measure_root(TP_BROADCAST, TP_ALGO_RING, n, (enum layout_kind)kind, root).crossing, domains - 1);
				assert_close(measure_root(TP_REDUCE, TP_ALGO_RING, n, (enum layout_kind)kind, root).crossing, domains - 1);
			}
		}
	}
}

static void double_trees_send_twice_the_data_at_logarithmic_depth(void **state)
{
	(void)state;
	for (int n = 2; n <= 64; n++) {
		struct measured m = measure(TP_ALL_REDUCE, TP_ALGO_TREE, n, ONE_DOMAIN);
		assert_close(m.sent_mean, 2.0 * (n - 1) / n);
		/* Up: a parent, down: two children, in one tree; a leaf's one parent in the other. */
		assert_true(m.sent_max <= 2.5);
		assert_true(m.report.depth <= 2 * log2_up(n) + 1);
	}
}

static void two_shot_sends_the_least_in_three_steps_and_one_shot_all_in_two(void **state)
{
	(void)state;
	for (int n = 2; n <= 64; n += 3) {
		struct measured m = measure(TP_ALL_REDUCE, TP_ALGO_TWO_SHOT, n, ONE_DOMAIN);
		assert_close(m.sent_max, 2.0 * (n - 1) / n);
		assert_int_equal(m.report.depth, 3);
		m = measure(TP_ALL_REDUCE, TP_ALGO_ONE_SHOT, n, ONE_DOMAIN);
		assert_close(m.sent_max, n - 1);
		assert_int_equal(m.report.depth, 2);
	}
}

static void direct_plans_send_each_byte_once(void **state)
{
	(void)state;
	static const enum tp_coll blocks_each[] = { TP_ALL_GATHER, TP_REDUCE_SCATTER, TP_ALL_TO_ALL };
	static const enum tp_coll blocks_total[] = { TP_GATHER, TP_SCATTER, TP_BROADCAST, TP_REDUCE };
	for (int n = 2; n <= 64; n += 3) {
		for (size_t i = 0; i < TP_ARRAY_LEN(blocks_each); i++)
			assert_close(measure(blocks_each[i], TP_ALGO_DIRECT, n, ONE_DOMAIN).sent_max, n - 1);
		for (size_t i = 0; i < TP_ARRAY_LEN(blocks_total); i++) {
			struct measured m = measure(blocks_total[i], TP_ALGO_DIRECT, n, ONE_DOMAIN);
			assert_close(m.sent_mean * n, n - 1);
			assert_int_equal(m.report.depth, 2);
		}
	}
}

/* Two domains of m ranks: what crosses is what two ranks with m times the links would send. */
static void hierarchies_cross_domains_no_more_than_they_must(void **state)
{
	(void)state;
	for (int m = 2; m <= 32; m++) {
		int n = 2 * m;
		assert_close(measure(TP_ALL_REDUCE, TP_ALGO_HIERARCHICAL, n, HALVES).crossing, 2);          /* either way */
		assert_close(measure(TP_ALL_GATHER, TP_ALGO_HIERARCHICAL, n, HALVES).crossing, n);          /* each block once */
		assert_close(measure(TP_REDUCE_SCATTER, TP_ALGO_HIERARCHICAL, n, HALVES).crossing, n);
		assert_close(measure(TP_BROADCAST, TP_ALGO_HIERARCHICAL, n, HALVES).crossing, 1);
		assert_close(measure(TP_REDUCE, TP_ALGO_HIERARCHICAL, n, HALVES).crossing, 1);
		assert_int_equal(measure(TP_ALL_REDUCE, TP_ALGO_HIERARCHICAL, n, HALVES).report.depth, 7);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_ring_sends_the_least_that_an_all_reduce_can), cmocka_unit_test(a_ring_leaves_each_domain_once),
		cmocka_unit_test(double_trees_send_twice_the_data_at_logarithmic_depth),
		cmocka_unit_test(two_shot_sends_the_least_in_three_steps_and_one_shot_all_in_two),
		cmocka_unit_test(direct_plans_send_each_byte_once), cmocka_unit_test(hierarchies_cross_domains_no_more_than_they_must),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "plan/filter.h"
#include "plan/helper_plan.h"

static struct tp_layout *one_host;      /* 8 ranks */
static struct tp_layout *two_hosts;     /* 8 ranks */
static struct tp_cost_model model;

static int set_up(void **state)
{
	(void)state;
	tp_cost_defaults(&model);
	model.cores_per_domain = 2;
	one_host = plans_layout(8, ONE_DOMAIN);
	two_hosts = plans_layout(8, HALVES);
	return 0;
}

static int tear_down(void **state)
{
	(void)state;
	tp_layout_free(one_host);
	tp_layout_free(two_hosts);
	return 0;
}

static ncclResult_t choose(enum tp_coll coll, size_t bytes, const char *filter, struct tp_choice *out)
{
	return tp_choose(one_host, coll, 0, bytes, false, &model, filter, out);
}

static enum tp_algo chosen(enum tp_coll coll, size_t bytes, const char *filter)
{
	struct tp_choice choice;
	assert_int_equal(choose(coll, bytes, filter, &choice), ncclSuccess);
	return choice.algo;
}

static void the_least_predicted_time_wins(void **state)
{
	(void)state;
	for (int coll = 0; coll < TP_SEND_RECV; coll++)
		for (size_t bytes = 1; bytes <= 1u << 28; bytes *= 16) {
			struct tp_choice choice;
			assert_int_equal(choose((enum tp_coll)coll, bytes, NULL, &choice), ncclSuccess);
			for (int a = 0; a < TP_NALGOS; a++) {
				const struct tp_candidate *c = &choice.candidates[a];
				assert_int_equal(c->algo, a);
				assert_true((c->us < 0) == (c->why_not != NULL));
				if (c->us >= 0) assert_true(choice.candidates[choice.algo].us <= c->us);
			}
			assert_true(choice.candidates[choice.algo].us >= 0);
			assert_int_equal(choice.chunk_bytes, choice.candidates[choice.algo].chunk_bytes);
			assert_int_equal(choice.nchannels, 1);
		}
}

static void small_messages_take_one_step_and_large_ones_do_not(void **state)
{
	(void)state;
	assert_int_equal(chosen(TP_ALL_REDUCE, 8, NULL), TP_ALGO_ONE_SHOT);
	assert_int_not_equal(chosen(TP_ALL_REDUCE, 64 << 20, NULL), TP_ALGO_ONE_SHOT);
}

static void the_same_arguments_give_the_same_choice(void **state)
{
	(void)state;
	for (int coll = 0; coll < TP_SEND_RECV; coll++)
		for (size_t bytes = 0; bytes < 1u << 26; bytes = bytes * 7 + 1) {
			struct tp_choice a, b;
			struct tp_layout *again = plans_layout(8, HALVES);
			memset(&a, 0, sizeof(a));
			memset(&b, 0xff, sizeof(b));
			assert_int_equal(tp_choose(two_hosts, (enum tp_coll)coll, 3, bytes, false, &model, NULL, &a), ncclSuccess);
			assert_int_equal(tp_choose(again, (enum tp_coll)coll, 3, bytes, false, &model, NULL, &b), ncclSuccess);
			assert_int_equal(a.algo, b.algo);
			assert_int_equal(a.chunk_bytes, b.chunk_bytes);
			tp_layout_free(again);
		}
}

/* What the chooser promises to executors: only plans that can be, and chunks that the links can carry. */
static void chunks_fit_the_links(void **state)
{
	(void)state;
	const struct tp_layout *layouts[] = { one_host, two_hosts };
	for (int l = 0; l < 2; l++)
		for (int staged = 0; staged < 2; staged++)
			for (int coll = 0; coll < TP_SEND_RECV; coll++)
				for (size_t bytes = 1; bytes <= 1u << 28; bytes *= 64) {
					struct tp_choice choice;
					assert_int_equal(tp_choose(layouts[l], (enum tp_coll)coll, 0, bytes, staged, &model, NULL, &choice), ncclSuccess);
					for (int a = 0; a < TP_NALGOS; a++) {
						if (choice.candidates[a].us < 0) continue;
						assert_true(choice.candidates[a].chunk_bytes > 0);
						if (l) assert_true(choice.candidates[a].chunk_bytes <= model.slot_bytes_across);
						if (staged) assert_true(choice.candidates[a].chunk_bytes <= model.slot_bytes_inside);
					}
				}
	struct tp_choice choice;
	model.by_ref_inside = false;
	assert_int_equal(choose(TP_ALL_GATHER, 1 << 24, NULL, &choice), ncclSuccess);
	assert_true(choice.chunk_bytes <= model.slot_bytes_inside);
	model.by_ref_inside = true;
	assert_int_equal(choose(TP_ALL_REDUCE, 1 << 24, "RING", &choice), ncclSuccess);
	assert_true(choice.chunk_bytes <= model.slot_bytes_inside);
	assert_int_equal(choose(TP_ALL_GATHER, 1 << 24, "DIRECT", &choice), ncclSuccess);
	assert_true(choice.chunk_bytes > model.slot_bytes_inside);
}

static void one_rank_needs_no_algorithm(void **state)
{
	(void)state;
	struct tp_layout *alone = plans_layout(1, ONE_DOMAIN);
	struct tp_choice choice;
	for (int coll = 0; coll < TP_SEND_RECV; coll++)
		assert_int_equal(tp_choose(alone, (enum tp_coll)coll, 0, 1 << 20, false, &model, NULL, &choice), ncclSuccess);
	tp_layout_free(alone);
}

static void a_list_allows_what_it_names(void **state)
{
	(void)state;
	assert_int_equal(chosen(TP_ALL_REDUCE, 8, "ring"), TP_ALGO_RING);
	assert_int_equal(chosen(TP_ALL_REDUCE, 8, "Tree"), TP_ALGO_TREE);
	assert_int_equal(chosen(TP_ALL_REDUCE, 8, " halving_doubling "), TP_ALGO_HALVING_DOUBLING);
	assert_int_equal(chosen(TP_ALL_REDUCE, 8, ""), TP_ALGO_ONE_SHOT);
}

static void a_caret_leaves_out_what_follows(void **state)
{
	(void)state;
	assert_int_not_equal(chosen(TP_ALL_REDUCE, 8, "^one_shot"), TP_ALGO_ONE_SHOT);
	enum tp_algo left = chosen(TP_ALL_REDUCE, 8, "^one_shot,two_shot,tree,halving_doubling");
	assert_int_equal(left, TP_ALGO_RING);
}

static void a_prefix_is_for_its_collective(void **state)
{
	(void)state;
	assert_int_equal(chosen(TP_ALL_REDUCE, 8, "allreduce:tree"), TP_ALGO_TREE);
	assert_int_equal(chosen(TP_ALL_GATHER, 8, "allreduce:tree"), TP_ALGO_DIRECT);
	assert_int_equal(chosen(TP_ALL_REDUCE, 8, "ring;ALLREDUCE:tree"), TP_ALGO_TREE);
	assert_int_equal(chosen(TP_ALL_GATHER, 8, "ring;AllReduce:tree"), TP_ALGO_RING);
	assert_int_equal(chosen(TP_ALL_REDUCE, 8, "AllReduce:tree;AllReduce:ring"), TP_ALGO_RING);
	assert_int_equal(chosen(TP_ALL_GATHER, 8, "ring;allreduce:^ring;allgather:pat"), TP_ALGO_PAT);
}

/* NCCL's own names that need what host memory has not are no error as long as something is left. */
static void names_of_other_machines_are_noted(void **state)
{
	(void)state;
	struct tp_filter filter;
	assert_int_equal(chosen(TP_ALL_REDUCE, 8, "NVLS,CollnetDirect,ring"), TP_ALGO_RING);
	assert_int_equal(tp_filter_parse_algo("nvlstree,ring", &filter), ncclSuccess);
	assert_true(filter.foreign != 0);
	assert_int_equal(tp_filter_parse_algo("^nvls", &filter), ncclSuccess);
	assert_int_equal(filter.foreign, 0);
	assert_int_equal(tp_choose_check_algo("NVLS,ring"), ncclSuccess);
}

static void nothing_left_is_an_error_with_reasons(void **state)
{
	(void)state;
	struct tp_choice choice;
	choice.algo = TP_NALGOS;
	assert_int_equal(choose(TP_BROADCAST, 8, "tree", &choice), ncclInvalidUsage);
	assert_int_equal(choice.algo, TP_NALGOS);
	const char *text = tp_log_last_error();
	assert_non_null(strstr(text, "no algorithm/protocol available for function Broadcast"));
	assert_non_null(strstr(text, "RING"));
	assert_non_null(strstr(text, "trees do all-reduce"));
	assert_int_equal(choose(TP_ALL_REDUCE, 8, "NVLS", &choice), ncclInvalidUsage);
	assert_int_equal(choose(TP_ALL_TO_ALL, 8, "alltoall:ring", &choice), ncclInvalidUsage);
}

/* As in NCCL, whose AlltoAll, Gather and Scatter are sends and receives. */
static void a_list_for_all_is_not_meant_for_what_it_cannot_do(void **state)
{
	(void)state;
	assert_int_equal(chosen(TP_ALL_TO_ALL, 8, "ring"), chosen(TP_ALL_TO_ALL, 8, NULL));
	assert_int_equal(chosen(TP_GATHER, 8, "tree"), chosen(TP_GATHER, 8, NULL));
	assert_int_equal(chosen(TP_ALL_TO_ALL, 8, "ring,bruck"), TP_ALGO_BRUCK);
}

static void unreadable_filters_are_errors_that_list_what_there_is(void **state)
{
	(void)state;
	static const struct { const char *text, *says; } bad[] = {
		{ "rnig", "HALVING_DOUBLING" }, { "ring,", "HALVING_DOUBLING" }, { ",", "HALVING_DOUBLING" }, { "^", "HALVING_DOUBLING" },
		{ "allreduce:", "HALVING_DOUBLING" }, { "allreduce:^^ring", "HALVING_DOUBLING" }, { "ring:tree:ring", "ReduceScatter" },
		{ "all_reduce:ring", "ReduceScatter" }, { ":ring", "ReduceScatter" }, { "allreduce:ring;tree", "first entry" },
		{ "ring;tree", "first entry" }, { "SendRecv:ring", "ReduceScatter" },
	};
	struct tp_choice choice;
	for (size_t i = 0; i < TP_ARRAY_LEN(bad); i++) {
		if (choose(TP_ALL_REDUCE, 8, bad[i].text, &choice) != ncclInvalidUsage) fail_msg("\"%s\" was taken", bad[i].text);
		assert_non_null(strstr(tp_log_last_error(), bad[i].says));
	}
}

static void protocols_are_checked_and_have_no_effect(void **state)
{
	(void)state;
	static const char *const good[] = { "LL", "simple", "^LL128", "allreduce:LL,LL128;broadcast:Simple", "" };
	for (size_t i = 0; i < TP_ARRAY_LEN(good); i++) assert_int_equal(tp_choose_check_proto(good[i]), ncclSuccess);
	assert_int_equal(tp_choose_check_proto(NULL), ncclSuccess);
	assert_int_equal(tp_choose_check_proto("LL256"), ncclInvalidUsage);
	assert_non_null(strstr(tp_log_last_error(), "LL128"));
}

static void bad_arguments_are_refused(void **state)
{
	(void)state;
	struct tp_choice choice;
	assert_int_equal(tp_choose(one_host, TP_BROADCAST, 8, 8, false, &model, NULL, &choice), ncclInvalidArgument);
	assert_int_equal(tp_choose(one_host, TP_BROADCAST, -1, 8, false, &model, NULL, &choice), ncclInvalidArgument);
	assert_int_equal(tp_choose(one_host, TP_SEND_RECV, 0, 8, false, &model, NULL, &choice), ncclInvalidArgument);
}

/* Whatever is chosen can be made and is right. */
static void choices_pass_the_checker(void **state)
{
	(void)state;
	for (int kind = 0; kind < NLAYOUTS; kind++)
		for (int coll = 0; coll < TP_SEND_RECV; coll++)
			for (size_t bytes = 8; bytes <= 1u << 24; bytes *= 128) {
				struct tp_layout *layout = plans_layout(7, kind);
				struct tp_choice choice;
				assert_int_equal(tp_choose(layout, (enum tp_coll)coll, 6, bytes, false, &model, NULL, &choice), ncclSuccess);
				struct tp_plan *plan = plans_make_on((enum tp_coll)coll, choice.algo, layout, 6, 1);
				plans_check(plan);
				tp_plan_free(plan);
				tp_layout_free(layout);
			}
}

static void a_message_gets_as_many_channels_as_it_is_worth(void **state)
{
	(void)state;
	assert_int_equal(tp_choose_channels(TP_ALGO_RING, TP_ALL_REDUCE, 8, 0, 32), 1);
	assert_int_equal(tp_choose_channels(TP_ALGO_RING, TP_ALL_REDUCE, 8, 16384, 32), 1);
	assert_int_equal(tp_choose_channels(TP_ALGO_RING, TP_ALL_REDUCE, 8, 16385, 32), 2);
	assert_int_equal(tp_choose_channels(TP_ALGO_ONE_SHOT, TP_ALL_REDUCE, 8, 16384, 32), 4);
	assert_int_equal(tp_choose_channels(TP_ALGO_DIRECT, TP_ALL_GATHER, 8, 16384, 32), 8);
	assert_int_equal(tp_choose_channels(TP_ALGO_DIRECT, TP_BROADCAST, 8, 16384, 32), 1);
	assert_int_equal(tp_choose_channels(TP_ALGO_TREE, TP_ALL_REDUCE, 8, 1 << 30, 32), 32);
	assert_int_equal(tp_choose_channels(TP_ALGO_TREE, TP_ALL_REDUCE, 8, 1 << 30, 24), 24);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(the_least_predicted_time_wins),
		cmocka_unit_test(small_messages_take_one_step_and_large_ones_do_not),
		cmocka_unit_test(the_same_arguments_give_the_same_choice),
		cmocka_unit_test(chunks_fit_the_links),
		cmocka_unit_test(one_rank_needs_no_algorithm),
		cmocka_unit_test(a_list_allows_what_it_names),
		cmocka_unit_test(a_caret_leaves_out_what_follows),
		cmocka_unit_test(a_prefix_is_for_its_collective),
		cmocka_unit_test(names_of_other_machines_are_noted),
		cmocka_unit_test(nothing_left_is_an_error_with_reasons),
		cmocka_unit_test(a_list_for_all_is_not_meant_for_what_it_cannot_do),
		cmocka_unit_test(unreadable_filters_are_errors_that_list_what_there_is),
		cmocka_unit_test(protocols_are_checked_and_have_no_effect),
		cmocka_unit_test(bad_arguments_are_refused),
		cmocka_unit_test(choices_pass_the_checker),
		cmocka_unit_test(a_message_gets_as_many_channels_as_it_is_worth),
	};
	return cmocka_run_group_tests(tests, set_up, tear_down);
}

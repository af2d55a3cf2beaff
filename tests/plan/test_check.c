/* The checker finds each planted fault, and names where. Plans are broken ones of generators, or small ones made by hand. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "plan/build.h"
#include "plan/helper_plan.h"

static struct tp_check_report check(const struct tp_plan *plan, bool in_place, bool by_ref)
{
	struct tp_check_options options = { .slots = 2, .rounds = 3, .in_place = in_place, .by_ref = by_ref };
	struct tp_check_report report;
	ncclResult_t result = tp_check_plan(plan, &options, &report);
	assert_int_equal(result, report.fault == TP_CHECK_OK ? ncclSuccess : ncclInternalError);
	return report;
}

static void expect_at(const struct tp_check_report *r, enum tp_check_fault fault, int rank, int lane, int step, const char *text)
{
	if (r->fault != fault || r->rank != rank || r->lane != lane || r->step != step || !strstr(r->text, text))
		fail_msg("expected fault %d at rank %d lane %d step %d with '%s', not fault %d at rank %d lane %d step %d: %s", fault, rank,
			lane, step, text, r->fault, r->rank, r->lane, r->step, r->text);
	assert_int_equal(r->channel, 0);
}

/* Checks, expects, frees. */
static void expect(struct tp_plan *plan, bool in_place, bool by_ref, enum tp_check_fault fault, int rank, int lane, int step,
	const char *text)
{
	struct tp_check_report report = check(plan, in_place, by_ref);
	expect_at(&report, fault, rank, lane, step, text);
	tp_plan_free(plan);
}

static struct tp_plan *all_reduce(enum tp_algo algo, int nranks) { return plans_make(TP_ALL_REDUCE, algo, nranks, ONE_DOMAIN, -1, 1); }

static void remove_operand(struct tp_plan *plan, struct tp_program *p, struct tp_step *s, int which)
{
	struct tp_operand *o = &p->operands[s->first];
	(void)plan;
	memmove(&o[which], &o[which + 1], (size_t)(s->nsrc + s->ndst - which - 1) * sizeof(*o));
	if (which < s->nsrc) s->nsrc--;
	else s->ndst--;
}

/* A plan by hand: `write` makes each rank's program. */
static struct tp_plan *by_hand(enum tp_coll coll, int nranks, uint32_t scratch, void (*write)(struct tp_builder *b, int rank))
{
	struct tp_plan *plan = calloc(1, sizeof(*plan));
	assert_non_null(plan);
	plan->spec = (struct tp_plan_spec){ coll, TP_ALGO_DIRECT, tp_coll_has_root(coll) ? 0 : -1, 1, plans_layout(nranks, ONE_DOMAIN) };
	plan->pieces = 1;
	plan->input_blocks = tp_coll_input_is_blocks(coll) ? (uint32_t)nranks : 1;
	plan->output_blocks = tp_coll_output_is_blocks(coll) ? (uint32_t)nranks : 1;
	plan->scratch_chunks = scratch;
	plan->programs = calloc((size_t)nranks, sizeof(*plan->programs));
	assert_non_null(plan->programs);
	for (int r = 0; r < nranks; r++) {
		struct tp_builder b;
		tp_build_begin(&b, r, 0);
		write(&b, r);
		assert_int_equal(tp_build_end(&b, &plan->programs[plan->nprograms++]), ncclSuccess);
	}
	return plan;
}

static void step(struct tp_builder *b, int lane) { tp_build_step(b, lane, 0); }

/* Faults in what travels. */

static void a_lost_send_leaves_its_receiver_waiting(void **state)
{
	(void)state;
	struct tp_plan *plan = plans_make(TP_ALL_GATHER, TP_ALGO_DIRECT, 4, ONE_DOMAIN, -1, 1);
	remove_operand(plan, &plan->programs[2], plans_step(plan, 2, 0, 0), 2);     /* INPUT; OUTPUT 2, to 3, to 0, to 1 */
	expect(plan, false, false, TP_CHECK_DEADLOCK, 3, 1, 0, "waits for ever for a chunk from rank 2, which has nothing left to give");
}

static void a_lost_send_in_mid_ring_shows_at_the_next_rank(void **state)
{
	(void)state;
	struct tp_plan *plan = all_reduce(TP_ALGO_RING, 4);
	struct tp_step *s = plans_step(plan, 2, 0, 1);
	remove_operand(plan, &plan->programs[2], s, s->nsrc + s->ndst - 1);
	expect(plan, false, false, TP_CHECK_WRONG_RESULT, 3, 0, 2, "reduces input chunk");
}

static void every_lost_operand_of_every_all_reduce_is_found(void **state)
{
	(void)state;
	for (int algo = 0; algo < TP_NALGOS; algo++) {
		struct tp_layout *layout = plans_layout(5, HALVES);
		struct tp_plan_spec spec = { TP_ALL_REDUCE, (enum tp_algo)algo, -1, 1, layout };
		struct tp_plan *whole, *broken;
		if (!tp_plan_refuses(&spec)) {
			assert_int_equal(tp_plan_create(&spec, -1, &whole), ncclSuccess);
			for (int rank = 0; rank < 5; rank++) {
				const struct tp_program *p = &whole->programs[rank];
				for (uint32_t s = 0; s < p->nsteps; s++)
					for (int o = 0; o < p->steps[s].nsrc + p->steps[s].ndst; o++) {
						assert_int_equal(tp_plan_create(&spec, -1, &broken), ncclSuccess);
						broken->shape = TP_SHAPE_STEPS;
						remove_operand(broken, &broken->programs[rank], &broken->programs[rank].steps[s], o);
						struct tp_check_report report = check(broken, false, false);
						if (report.fault == TP_CHECK_OK)
							fail_msg("%s: operand %d of step %u of rank %d is lost unnoticed", tp_algo_name(spec.algo), o, s, rank);
						tp_plan_free(broken);
					}
			}
			tp_plan_free(whole);
		}
		tp_layout_free(layout);
	}
}

static void a_doubled_contribution_is_named(void **state)
{
	(void)state;
	struct tp_plan *plan = all_reduce(TP_ALGO_ONE_SHOT, 4);
	plan->shape = TP_SHAPE_STEPS;
	plans_sources(plan, 1, 0, 1)[2] = (struct tp_operand){ TP_INPUT, 0, 0 };    /* again, where rank 2's belongs */
	expect(plan, false, false, TP_CHECK_TWICE, 1, 0, 1, "adds rank 1's contribution to chunk 0 twice");
}

static void doubled_send(struct tp_builder *b, int rank)
{
	int lane = tp_build_lane(b);
	step(b, lane);
	if (!rank) {
		tp_build_read(b, TP_INPUT, 0);
		tp_build_write(b, TP_OUTPUT, 0);
		tp_build_give(b, 1, 0, false);
		step(b, lane);
		tp_build_read(b, TP_INPUT, 0);
		tp_build_give(b, 1, 0, false);
	} else {
		tp_build_take(b, 0, 0);
		tp_build_write(b, TP_OUTPUT, 0);
	}
}

static void a_doubled_send_is_found(void **state)
{
	(void)state;
	struct tp_plan *plan = by_hand(TP_BROADCAST, 2, 0, doubled_send);
	expect(plan, false, false, TP_CHECK_WRONG_RESULT, 1, 0, 0, "leaves input chunk 0 of round 0");
}

static void a_doubled_send_of_one_round_is_left_in_the_link(void **state)
{
	(void)state;
	struct tp_plan *plan = by_hand(TP_BROADCAST, 2, 0, doubled_send);
	struct tp_check_options options = { .slots = 2, .rounds = 1 };
	struct tp_check_report report;
	assert_int_equal(tp_check_plan(plan, &options, &report), ncclInternalError);
	expect_at(&report, TP_CHECK_LEFT_FULL, 0, 0, 1, "gave rank 1 a chunk on link class 0 that it never takes");
	tp_plan_free(plan);
}

/* Waits. */

static void a_cycle_of_waits_is_told_rank_by_rank(void **state)
{
	(void)state;
	struct tp_plan *plan = all_reduce(TP_ALGO_ONE_SHOT, 3);
	plan->shape = TP_SHAPE_STEPS;
	for (int r = 0; r < 3; r++) {           /* first take, then give */
		struct tp_step give = *plans_step(plan, r, 0, 0);
		*plans_step(plan, r, 0, 0) = *plans_step(plan, r, 0, 1);
		*plans_step(plan, r, 0, 1) = give;
	}
	struct tp_check_report report = check(plan, false, false);
	expect_at(&report, TP_CHECK_DEADLOCK, 0, 0, 0, "waits for ever for a chunk from rank 1; rank 1 lane 0 step 0 waits");
	tp_plan_free(plan);
}

static void a_ring_that_takes_and_gives_at_once_needs_two_slots(void **state)
{
	(void)state;
	struct tp_plan *plan = all_reduce(TP_ALGO_RING, 4);
	struct tp_check_options options = { .slots = 1, .rounds = 3 };
	struct tp_check_report report;
	assert_int_equal(tp_check_plan(plan, &options, &report), ncclInternalError);
	assert_int_equal(report.fault, TP_CHECK_DEADLOCK);
	options.slots = 2;
	assert_int_equal(tp_check_plan(plan, &options, &report), ncclSuccess);
	tp_plan_free(plan);
}

/* Buffers. */

static void scratch_reused_too_early(struct tp_builder *b, int rank)
{
	int first = tp_build_lane(b), second = tp_build_lane(b), token = tp_build_local(b, true);
	(void)rank;
	step(b, first);
	tp_build_read(b, TP_INPUT, 0);
	tp_build_write(b, TP_SCRATCH, 0);
	tp_build_give_local(b, token);
	step(b, second);
	tp_build_read(b, TP_SCRATCH, 0);
	tp_build_take_local(b, token);
	tp_build_write(b, TP_OUTPUT, 0);
}

static void scratch_reused_in_the_next_round_too_early_is_a_race(void **state)
{
	(void)state;
	struct tp_plan *plan = by_hand(TP_BROADCAST, 1, 1, scratch_reused_too_early);
	struct tp_check_options options = { .slots = 2, .rounds = 1 };
	struct tp_check_report report;
	assert_int_equal(tp_check_plan(plan, &options, &report), ncclSuccess);
	expect(plan, false, false, TP_CHECK_RACE, 0, 1, 0, "reads a chunk of rank 0 that rank 0 lane 0 step 0 writes");
}

static void no_token_between_lanes(struct tp_builder *b, int rank)
{
	int first = tp_build_lane(b), second = tp_build_lane(b);
	(void)rank;
	step(b, first);
	tp_build_read(b, TP_INPUT, 0);
	tp_build_write(b, TP_SCRATCH, 0);
	step(b, second);
	tp_build_read(b, TP_SCRATCH, 0);
	tp_build_write(b, TP_OUTPUT, 0);
}

static void lanes_that_nothing_orders_race_however_the_run_went(void **state)
{
	(void)state;
	expect(by_hand(TP_BROADCAST, 1, 1, no_token_between_lanes), false, false, TP_CHECK_RACE, 0, 1, 0,
		"reads a chunk of rank 0 that rank 0 lane 0 step 0 writes, and nothing orders the two");
}

static void every_token_of_a_hierarchical_plan_is_needed(void **state)
{
	(void)state;
	int ntokens = 0;
	struct tp_plan *whole = plans_make(TP_ALL_REDUCE, TP_ALGO_HIERARCHICAL, 6, HALVES, -1, 1);
	for (uint32_t l = 0; l < whole->programs[4].nlinks; l++) {
		if (!whole->programs[4].links[l].token) continue;
		struct tp_plan *plan = plans_make(TP_ALL_REDUCE, TP_ALGO_HIERARCHICAL, 6, HALVES, -1, 1);
		struct tp_program *p = &plan->programs[4];
		for (uint32_t s = 0; s < p->nsteps; s++)
			for (int o = p->steps[s].nsrc + p->steps[s].ndst; o-- > 0;) {
				const struct tp_operand *operand = &p->operands[p->steps[s].first + (uint32_t)o];
				if (operand->where == TP_LINK && operand->index == (int32_t)l) remove_operand(plan, p, &p->steps[s], o);
			}
		p->links[l] = p->links[--p->nlinks];        /* its operands are gone; the last link moves here */
		for (uint32_t o = 0; o < p->noperands; o++)
			if (p->operands[o].where == TP_LINK && p->operands[o].index == (int32_t)p->nlinks) p->operands[o].index = (int32_t)l;
		struct tp_check_report report = check(plan, false, true);
		assert_true(report.fault == TP_CHECK_RACE || report.fault == TP_CHECK_UNDEFINED_READ);
		assert_int_equal(report.rank, 4);
		tp_plan_free(plan);
		ntokens++;
	}
	assert_true(ntokens > 2);
	tp_plan_free(whole);
}

static void an_unsafe_reference_is_found_in_place(void **state)
{
	(void)state;
	struct tp_plan *plan = all_reduce(TP_ALGO_ONE_SHOT, 3);
	plans_destinations(plan, 0, 0, 0)[1].by_ref = 1;        /* to rank 2, which may read late */
	assert_int_equal(check(plan, false, true).fault, TP_CHECK_OK);
	assert_int_equal(check(plan, true, false).fault, TP_CHECK_OK);
	struct tp_check_report report = check(plan, true, true);
	assert_int_equal(report.fault, TP_CHECK_RACE);
	assert_true(report.rank == 0 || report.rank == 2);
	assert_non_null(strstr(report.text, report.rank ? "rank 0" : "rank 2"));
	tp_plan_free(plan);
}

static void a_partial_sum_by_reference_that_is_overwritten(struct tp_builder *b, int rank)
{
	int lane = tp_build_lane(b);
	step(b, lane);
	if (rank) {
		tp_build_take(b, 0, 0);
		tp_build_write(b, TP_OUTPUT, 0);
		return;
	}
	tp_build_read(b, TP_INPUT, 0);
	tp_build_write(b, TP_SCRATCH, 0);
	tp_build_give(b, 1, 0, true);
	tp_build_write(b, TP_OUTPUT, 0);
}

static void a_reference_into_scratch_is_overtaken_by_the_next_round(void **state)
{
	(void)state;
	/* The reference is to INPUT, its single source; with a chunk of SCRATCH as the source it is to that. */
	struct tp_plan *plan = by_hand(TP_BROADCAST, 2, 1, a_partial_sum_by_reference_that_is_overwritten);
	assert_int_equal(check(plan, false, true).fault, TP_CHECK_OK);
	plans_step(plan, 0, 0, 0)->flags = TP_STEP_REDUCE;      /* now it is to the first destination */
	expect(plan, false, true, TP_CHECK_RACE, 1, 0, 0, "reads a chunk of rank 0 that rank 0 lane 0 step 0 writes");
}

static void input_read_after_its_result(struct tp_builder *b, int rank)
{
	int lane = tp_build_lane(b);
	(void)rank;
	step(b, lane);
	tp_build_read(b, TP_INPUT, 0);
	tp_build_write(b, TP_SCRATCH, 0);
	tp_build_step(b, lane, TP_STEP_REDUCE | TP_STEP_FINAL);
	tp_build_read(b, TP_SCRATCH, 0);
	tp_build_write(b, TP_OUTPUT, 0);
	tp_build_step(b, lane, TP_STEP_REDUCE | TP_STEP_FINAL);
	tp_build_read(b, TP_INPUT, 0);
	tp_build_write(b, TP_OUTPUT, 0);
}

static void input_that_is_gone_in_place_is_found(void **state)
{
	(void)state;
	struct tp_plan *plan = by_hand(TP_ALL_REDUCE, 1, 1, input_read_after_its_result);
	assert_int_equal(check(plan, false, false).fault, TP_CHECK_OK);
	struct tp_check_report report = check(plan, true, false);
	assert_int_not_equal(report.fault, TP_CHECK_OK);
	assert_int_equal(report.step, 2);
	tp_plan_free(plan);
}

static void reading_what_nobody_wrote_is_found(void **state)
{
	(void)state;
	struct tp_plan *plan = plans_make(TP_ALL_GATHER, TP_ALGO_RING, 3, ONE_DOMAIN, -1, 1);
	plans_sources(plan, 1, 0, 0)[0] = (struct tp_operand){ TP_OUTPUT, 0, 1 };
	expect(plan, false, false, TP_CHECK_UNDEFINED_READ, 1, 0, 0, "that nobody has written");
}

/* Results. */

static void another_order_of_reduction_is_found(void **state)
{
	(void)state;
	struct tp_plan *plan = all_reduce(TP_ALGO_ONE_SHOT, 4);
	struct tp_operand *sources = plans_sources(plan, 3, 0, 1), first = sources[0];
	sources[0] = sources[1];
	sources[1] = first;
	plan->shape = TP_SHAPE_STEPS;
	expect(plan, false, false, TP_CHECK_ORDER_DIFFERS, 3, 0, 1, "reduces output chunk 0 in another order");
}

static void a_shape_that_is_declared_wrongly_is_found(void **state)
{
	(void)state;
	struct tp_plan *one = all_reduce(TP_ALGO_ONE_SHOT, 4), *two = all_reduce(TP_ALGO_TWO_SHOT, 4), *ring = all_reduce(TP_ALGO_RING, 4);
	assert_int_equal(one->shape, TP_SHAPE_ONE_SHOT);
	assert_int_equal(two->shape, TP_SHAPE_TWO_SHOT);
	struct tp_operand *o = plans_destinations(two, 2, 1, 0), swap = o[1];
	o[1] = o[2];
	o[2] = swap;
	expect(two, false, false, TP_CHECK_SHAPE, 2, 1, 0, "isn't what two-shot code does");
	ring->shape = TP_SHAPE_ONE_SHOT;
	expect(ring, false, false, TP_CHECK_SHAPE, 0, 0, 0, "isn't what one-shot code does");
	swap = plans_sources(one, 1, 0, 1)[2];
	plans_sources(one, 1, 0, 1)[2] = plans_sources(one, 1, 0, 1)[3];
	plans_sources(one, 1, 0, 1)[3] = swap;
	expect(one, false, false, TP_CHECK_SHAPE, 1, 0, 1, "isn't what one-shot code does");
}

static void a_direct_shape_that_takes_before_it_gives_is_found(void **state)
{
	(void)state;
	struct tp_plan *gather = plans_make(TP_ALL_GATHER, TP_ALGO_DIRECT, 4, ONE_DOMAIN, -1, 1);
	struct tp_plan *ring = plans_make(TP_ALL_GATHER, TP_ALGO_RING, 4, ONE_DOMAIN, -1, 1);
	assert_int_equal(gather->shape, TP_SHAPE_DIRECT);
	tp_plan_free(gather);
	ring->shape = TP_SHAPE_DIRECT;
	expect(ring, false, false, TP_CHECK_SHAPE, 0, 0, 1, "isn't what direct code does");
}

static void a_result_that_no_step_marks_final_is_found(void **state)
{
	(void)state;
	struct tp_plan *plan = plans_make(TP_REDUCE_SCATTER, TP_ALGO_RING, 4, ONE_DOMAIN, -1, 1);
	plans_step(plan, 2, 0, 3)->flags = TP_STEP_REDUCE;
	expect(plan, false, false, TP_CHECK_NOT_FINAL, 2, 0, 3, "no step of its making is marked final");
}

static void final_before_all_contributions_are_in_is_found(void **state)
{
	(void)state;
	struct tp_plan *plan = plans_make(TP_REDUCE_SCATTER, TP_ALGO_RING, 4, ONE_DOMAIN, -1, 1);
	plans_step(plan, 2, 0, 2)->flags |= TP_STEP_FINAL;
	expect(plan, false, false, TP_CHECK_NOT_FINAL, 2, 0, 2, "is marked final, but rank");
}

static void a_chunk_in_the_wrong_place_is_found(void **state)
{
	(void)state;
	struct tp_plan *plan = plans_make(TP_ALL_TO_ALL, TP_ALGO_DIRECT, 4, ONE_DOMAIN, -1, 1);
	plans_sources(plan, 1, 0, 0)[0].index = 3;          /* of the chunk for rank 2 */
	expect(plan, false, false, TP_CHECK_WRONG_RESULT, 2, 1, 0, "leaves input chunk 3 of round 0");
}

/* Operations in sequence. */

static void a_rank_that_does_not_wait_for_its_references_is_too_fast(void **state)
{
	(void)state;
	struct tp_plan *plan = plans_make(TP_ALL_GATHER, TP_ALGO_DIRECT, 3, ONE_DOMAIN, -1, 1);
	const struct tp_plan *twice[] = { plan, plan };
	struct tp_check_options options = { .slots = 2, .rounds = 2, .by_ref = true };
	struct tp_check_report report;
	assert_int_equal(tp_check_sequence(twice, 2, &options, &report), ncclSuccess);
	options.ends_early = true;
	assert_int_equal(tp_check_sequence(twice, 2, &options, &report), ncclInternalError);
	assert_int_equal(report.fault, TP_CHECK_RACE);
	assert_non_null(strstr(report.text, "gone on to the next operation"));
	options.by_ref = false;
	assert_int_equal(tp_check_sequence(twice, 2, &options, &report), ncclSuccess);
	tp_plan_free(plan);
}

static void late_taker(struct tp_builder *b, int rank)
{
	int lane = tp_build_lane(b);
	step(b, lane);
	if (!rank) {
		tp_build_read(b, TP_INPUT, 0);
		tp_build_write(b, TP_OUTPUT, 0);
		return;
	}
	tp_build_take(b, 0, 0);
	tp_build_write(b, TP_OUTPUT, 0);
}

static void a_chunk_that_the_next_operation_gets_is_found(void **state)
{
	(void)state;
	struct tp_plan *more = by_hand(TP_BROADCAST, 2, 0, doubled_send), *less = by_hand(TP_BROADCAST, 2, 0, late_taker);
	const struct tp_plan *both[] = { more, less };
	struct tp_check_options options = { .slots = 2, .rounds = 1 };
	struct tp_check_report report;
	assert_int_equal(tp_check_sequence(both, 2, &options, &report), ncclInternalError);
	expect_at(&report, TP_CHECK_LEFT_FULL, 0, 0, 1, "operation 1 got it");
	tp_plan_free(more);
	tp_plan_free(less);
}

/* Form. */

static void malformed_programs_are_told_before_they_run(void **state)
{
	(void)state;
	struct tp_plan *p = all_reduce(TP_ALGO_RING, 3);
	plans_sources(p, 1, 0, 1)[1].index = 3;
	expect(p, false, false, TP_CHECK_MALFORMED, 1, 0, 1, "names chunk 3 of 3");
	p = all_reduce(TP_ALGO_RING, 3);
	plans_destinations(p, 1, 0, 2)[0].where = TP_INPUT;
	expect(p, false, false, TP_CHECK_MALFORMED, 1, 0, 2, "writes to INPUT");
	p = all_reduce(TP_ALGO_RING, 3);
	plans_destinations(p, 1, 0, 1)[0].by_ref = 1;
	expect(p, false, false, TP_CHECK_MALFORMED, 1, 0, 1, "its value lies in no buffer");
	p = plans_make(TP_REDUCE, TP_ALGO_DIRECT, 3, ONE_DOMAIN, 0, 1);
	plans_sources(p, 1, 0, 0)[0].where = TP_OUTPUT;
	expect(p, false, false, TP_CHECK_MALFORMED, 1, 0, 0, "uses OUTPUT, which only the root has");
	p = plans_make(TP_BROADCAST, TP_ALGO_DIRECT, 3, ONE_DOMAIN, 0, 1);
	plans_sources(p, 1, 0, 0)[0] = (struct tp_operand){ TP_INPUT, 0, 0 };
	expect(p, false, false, TP_CHECK_MALFORMED, 1, 0, 0, "reads INPUT, which only the root has");
	p = all_reduce(TP_ALGO_TWO_SHOT, 3);
	plans_destinations(p, 1, 0, 1)[0].index = plans_destinations(p, 1, 1, 0)[1].index;
	p->shape = TP_SHAPE_STEPS;
	expect(p, false, false, TP_CHECK_MALFORMED, 1, 1, 0, "that lane 0 uses too");
	p = all_reduce(TP_ALGO_RING, 3);
	p->programs[2].links[0].lane_class = TP_LINK_P2P;
	expect(p, false, false, TP_CHECK_MALFORMED, 2, 0, 0, "isn't for collectives");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_lost_send_leaves_its_receiver_waiting), cmocka_unit_test(a_lost_send_in_mid_ring_shows_at_the_next_rank),
		cmocka_unit_test(every_lost_operand_of_every_all_reduce_is_found), cmocka_unit_test(a_doubled_contribution_is_named),
		cmocka_unit_test(a_doubled_send_is_found), cmocka_unit_test(a_doubled_send_of_one_round_is_left_in_the_link),
		cmocka_unit_test(a_cycle_of_waits_is_told_rank_by_rank),
		cmocka_unit_test(a_ring_that_takes_and_gives_at_once_needs_two_slots),
		cmocka_unit_test(scratch_reused_in_the_next_round_too_early_is_a_race),
		cmocka_unit_test(lanes_that_nothing_orders_race_however_the_run_went),
		cmocka_unit_test(every_token_of_a_hierarchical_plan_is_needed), cmocka_unit_test(an_unsafe_reference_is_found_in_place),
		cmocka_unit_test(a_reference_into_scratch_is_overtaken_by_the_next_round),
		cmocka_unit_test(input_that_is_gone_in_place_is_found), cmocka_unit_test(reading_what_nobody_wrote_is_found),
		cmocka_unit_test(another_order_of_reduction_is_found), cmocka_unit_test(a_shape_that_is_declared_wrongly_is_found),
		cmocka_unit_test(a_direct_shape_that_takes_before_it_gives_is_found),
		cmocka_unit_test(a_result_that_no_step_marks_final_is_found),
		cmocka_unit_test(final_before_all_contributions_are_in_is_found), cmocka_unit_test(a_chunk_in_the_wrong_place_is_found),
		cmocka_unit_test(a_rank_that_does_not_wait_for_its_references_is_too_fast),
		cmocka_unit_test(a_chunk_that_the_next_operation_gets_is_found),
		cmocka_unit_test(malformed_programs_are_told_before_they_run),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

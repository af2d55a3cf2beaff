/* Measuring pairs, a turn at a time. A turn goes behind a call that everybody has just done: the ranks meet, by its own plan on its own links, then
 * those that have a part move a short message and a long one behind it. So a call waits for one turn at most, and between turns so many calls go by
 * that they cost a twenty-fifth of the time (TELPHER_WATCH=2: none go by).
 *
 * A pair's time is the taker's, from the short message to the end of the long one: when either of them came from the meeting is left out. That takes
 * nothing from the way back, which may have no link. Where the taker comes late, part of the long message has come already, and its time seems shorter
 * than it was: so a pair is never accused by that.
 *
 * Measuring opens nothing: pairs are those between which the call's plan has a link, of which both ends know by that plan. Whatever may fail, memory and
 * plans, is there before ranks agree to measure; whoever hasn't got it keeps all from it. */
#include <stdlib.h>
#include <string.h>

#include "comm/pace.h"

#define BYTES ((size_t)1 << 20)
#define SHORT_BYTES ((size_t)64)
#define FEWER_TURNS 3                   /* where a long message takes … */
#define LONG_US 50e3f                   /* … so long; … */
#define FEWEST_TURNS 2                  /* (a process that was stopped for a while is slow in one) … */
#define TOO_LONG_US 1e6f                /* … where it takes so long */
#define SHARE 25                        /* of the time, one part for measuring */
#define FIRST_REST 16
#define MOST_REST 1024

size_t tp_pace_bytes(void) { return BYTES; }

/* ---- Before */

/* The class of a link of channel 0 that the plan has between two ranks, the least; -1: none. Both ends' programs name it. */
static int class_of_link(const struct tp_plan *plan, int rank, int from, int to)
{
	int least = -1;
	for (uint32_t p = 0; p < plan->nprograms; p++) {
		const struct tp_program *program = &plan->programs[p];
		if (program->rank != rank || program->channel != 0) continue;
		for (uint32_t l = 0; l < program->nlinks; l++) {
			const struct tp_plan_link *link = &program->links[l];
			if (link->from == from && link->to == to && !link->token && (least < 0 || link->lane_class < least)) least = link->lane_class;
		}
	}
	return least;
}

bool tp_pace_prepare(struct ncclComm *comm, const struct tp_plan *plan)
{
	struct tp_comm_pace *pace = comm->pace;
	tp_pace_pair_up(comm, pace);
	pace->data = calloc(1, BYTES);
	if (!pace->data) return false;
	for (int i = 0; i < pace->nrounds; i++) {
		struct tp_pace_round *round = &pace->rounds[i];
		int lane_class = round->from < 0 ? -1 : class_of_link(plan, comm->rank, round->from, round->to);
		if (lane_class < 0) {
			round->from = round->to = -1;
			continue;
		}
		if (tp_plan_pair(comm->rank, round->from, round->to, lane_class, &round->plan) != ncclSuccess) return false;
		if (tp_exec_prepare(comm->exec, round->plan) != ncclSuccess) return false;
	}
	return true;
}

void tp_pace_release(struct ncclComm *comm)
{
	struct tp_comm_pace *pace = comm->pace;
	free(pace->data);
	pace->data = NULL;
	for (int i = 0; i < pace->nrounds; i++) {
		struct tp_pace_round *round = &pace->rounds[i];
		if (!round->plan) continue;
		if (comm->exec) tp_exec_forget(comm->exec, round->plan);
		tp_plan_free(round->plan);
		round->plan = NULL;
	}
	pace->nrounds = 0;
	pace->looking = false;
}

ncclResult_t tp_pace_begin_look(struct ncclComm *comm, struct tp_op *op)
{
	struct tp_comm_pace *pace = comm->pace;
	tp_pace_clear(pace, 0);
	for (int i = 0; i < pace->nrounds; i++) pace->in[i] = pace->rounds[i].from >= 0 ? -1 : 0;
	return tp_pace_ask(comm, op, TP_PACE_SHARE, ncclMin);
}

/* The distances come in order of how much they tell: the first of them are measured, whole ones. */
static void take_rounds(struct tp_comm_pace *pace, const float *answer)
{
	int used = 0;
	for (int i = 0, end; i < pace->nrounds; i = end) {
		int shared = 0;
		for (end = i; end < pace->nrounds && pace->rounds[end].distance == pace->rounds[i].distance; end++) shared += answer[end] < 0;
		if (used && used + shared > TP_PACE_USED) continue;
		for (int r = i; r < end; r++) pace->rounds[r].used = answer[r] < 0;
		used += shared;
	}
}

static int next_used(const struct tp_comm_pace *pace, int round)
{
	while (round < pace->nrounds && !pace->rounds[round].used) round++;
	return round;
}

/* ---- A turn */

ncclResult_t tp_pace_take_turn(struct ncclComm *comm, struct tp_op *op)
{
	struct tp_comm_pace *pace = comm->pace;
	pace->turn_ns = tp_clock_ns();
	tp_pace_clear(pace, TP_PACE_NONE);
	pace->in[0] = -pace->last_us;
	pace->in[1] = -pace->cost_us;
	pace->in[2] = pace->rest_ns ? (float)((double)(pace->turn_ns - pace->rest_ns) / 1e3) : 0;
	pace->last_us = 0;
	return tp_pace_ask(comm, op, TP_PACE_MEET, ncclMin);
}

static ncclResult_t start_part(struct ncclComm *comm, struct tp_op *op, enum tp_pace_stage stage)
{
	struct tp_comm_pace *pace = comm->pace;
	struct tp_exec_call call = { .plan = pace->rounds[pace->round].plan, .input = pace->data, .output = pace->data, .line_bytes = TP_LINE_BYTES,
		.block_bytes = stage == TP_PACE_MOVE ? BYTES : SHORT_BYTES, .chunk_bytes = comm->p2p_chunk_bytes, .tag = TP_P2P_TAG ^ 0x9aceu,
		.reduce = { .type = ncclUint8 } };
	pace->stage = stage;
	pace->part_ns = tp_clock_ns();
	return tp_exec_start(comm->exec, &call, &op->running);
}

static float part_us(const struct tp_comm_pace *pace) { return (float)((double)(tp_clock_ns() - pace->part_ns) / 1e3); }

static int compare(const void *left, const void *right)
{
	const float *a = left, *b = right;
	return (*a > *b) - (*a < *b);
}

/* Times of messages that may lie there already say nothing below it. */
static float at_least(float us) { return TP_MAX(us, 20); }

static void end_round(struct tp_comm_pace *pace)
{
	struct tp_pace_round *round = &pace->rounds[pace->round];
	int turns = pace->turn_of_round, middle = turns / 2;
	if (round->from >= 0 && turns > 0) {
		qsort(pace->short_us, (size_t)turns, sizeof(float), compare);
		qsort(pace->long_us, (size_t)turns, sizeof(float), compare);
		round->took_us = pace->long_us[0];
		round->typical_us = pace->long_us[middle];
		round->spread_us = pace->long_us[middle] - pace->long_us[0];
		round->unrest = at_least(pace->short_us[middle]) / at_least(pace->short_us[0]);
	}
	pace->turn_of_round = 0;
}

uint32_t tp_pace_rest(float cost_us, float elapsed_us, uint32_t calls)
{
	double each = calls > 0 ? (double)elapsed_us / calls : 0;
	if (each <= 0) return FIRST_REST;
	return (uint32_t)TP_MIN(TP_MAX(SHARE * (double)cost_us / each, 1), MOST_REST);
}

/* All have met. The answer says how long the last turn's messages took at most, what the turn cost and what passed since. */
static ncclResult_t after_meeting(struct ncclComm *comm, struct tp_op *op, const float *answer, bool *idle)
{
	struct tp_comm_pace *pace = comm->pace;
	int turns = pace->turn_of_round, distance = pace->rounds[pace->round].distance;
	float slowest_us = -answer[0];
	pace->rest = pace->hurry ? 0 : tp_pace_rest(-answer[1], answer[2], pace->rested);
	pace->rested = 0;
	if (turns == TP_PACE_TURNS || (turns >= FEWER_TURNS && slowest_us > LONG_US) || (turns >= FEWEST_TURNS && slowest_us > TOO_LONG_US)) {
		end_round(pace);
		int next = next_used(pace, pace->round + 1);
		if (next == pace->nrounds || pace->rounds[next].distance != distance) return tp_pace_sum_up(comm, op);
		pace->round = next;
	}
	if (pace->rounds[pace->round].plan) return start_part(comm, op, TP_PACE_GREET);
	pace->turn_of_round++;
	*idle = true;
	return ncclSuccess;
}

static void end_turn(struct tp_comm_pace *pace)
{
	pace->stage = TP_PACE_IDLE;
	pace->rest_ns = tp_clock_ns();
	pace->cost_us = (float)((double)(pace->rest_ns - pace->turn_ns) / 1e3);
}

static void start_look(struct tp_comm_pace *pace, const float *answer)
{
	take_rounds(pace, answer);
	pace->found = (struct tp_pace_found){ .from = -1, .to = -1 };
	pace->round = next_used(pace, 0);
	pace->looking = pace->round < pace->nrounds;
	pace->turn_of_round = 0;
	pace->rest = pace->hurry ? 0 : FIRST_REST;
	pace->rested = 0;
	pace->rest_ns = 0;
	pace->last_us = pace->cost_us = 0;
	pace->stage = TP_PACE_IDLE;
	pace->looks++;
}

ncclResult_t tp_pace_measure(struct ncclComm *comm, struct tp_op *op, const float *answer, bool *idle)
{
	struct tp_comm_pace *pace = comm->pace;
	bool summed = false;
	*idle = false;
	switch (pace->stage) {
	case TP_PACE_SHARE:
		start_look(pace, answer);
		*idle = true;
		return ncclSuccess;
	case TP_PACE_MEET:
		TP_TRY(after_meeting(comm, op, answer, idle));
		if (*idle) end_turn(pace);
		return ncclSuccess;
	case TP_PACE_GREET:
		pace->short_us[pace->turn_of_round] = part_us(pace);
		return start_part(comm, op, TP_PACE_MOVE);
	case TP_PACE_MOVE:
		pace->last_us = pace->long_us[pace->turn_of_round++] = part_us(pace);
		end_turn(pace);
		*idle = true;
		return ncclSuccess;
	default:
		TP_TRY(tp_pace_go_on_summing(comm, op, answer, &summed));
		if (!summed) return ncclSuccess;
		pace->round = next_used(pace, pace->round + 1);
		pace->looking = pace->round < pace->nrounds;
		end_turn(pace);
		*idle = true;
		return ncclSuccess;
	}
}

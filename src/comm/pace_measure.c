/* Measuring pairs, a turn at a time. A turn goes behind a call that everybody has just done: the ranks meet, by its own plan on its own links, then
 * those that have a part move a short message and a long one behind it. A call waits for one turn at most, whose meeting is a small call of the same
 * plan and whose long message has half of the call's bytes: so it takes longer by no more than it took anyway. (In looks after one that couldn't tell four
 * times as many, then sixteen, up to MOST_GROWN_BYTES: what a link takes grows with them, what threads wait for processors hardly does.) And between turns
 * so many calls go by that turns cost a fiftieth of the time, or up to a tenth where the job runs at a tenth of its speed. (TELPHER_WATCH=2: none go by, and messages are long.)
 *
 * A pair's time is the taker's, from the short message to the end of the long one: when either of them came from the meeting is left out. That takes
 * nothing from the way back, which may have no link. A taker that comes late finds messages there, and knows nothing: so the giver takes a nap first, and
 * only turns count in which the taker had to wait for the short message. Of these it knows what the long one can have taken at least and at most. At least:
 * what giver and taker waited for processors meanwhile may all have been in its way, and is taken off (they hear of it at the next meeting). At most: it may
 * have begun to come while the taker waited for a processor to take the short one. A pair is slow by what it took at least, and healthy by what it took at
 * most: so no scheduler is taken for a link. Over a network both sleep while they wait, for a thread that yields its processor counts as waiting for one.
 * Where the system doesn't count that, nobody is accused.
 *
 * Measuring opens nothing: pairs are those between which the call's plan has a link, of which both ends know by that plan. Whatever may fail, memory and
 * plans, is there before ranks agree to measure; whoever hasn't got it keeps all from it. */
#include <stdlib.h>
#include <string.h>

#include "comm/pace.h"

#define MOST_BYTES ((size_t)1 << 20)
#define MOST_GROWN_BYTES ((size_t)4 << 20)
#define LEAST_BYTES ((size_t)128 << 10)
#define PART 2                          /* of the call's bytes, one for the long message */
#define SHORT_BYTES ((size_t)64)
#define FEWER_TURNS 3                   /* where a long message takes … */
#define LONG_US 50e3f                   /* … so long; … */
#define FEWEST_TURNS 2                  /* (a process that was stopped for a while is slow in one) … */
#define TOO_LONG_US 1e6f                /* … where it takes so long */
#define SHARE 50                        /* of the time, one part for measuring; … */
#define LEAST_SHARE 10                  /* … one of so many, where that is less than what is lost anyway */
#define NAP_PART 4                      /* of the time since the call began */
#define LEAST_NAP_US 100
#define MOST_NAP_US 2000
#define FEWEST_COUNTED 2
#define FIRST_REST 16
#define MOST_REST 1024
#define MOST_PASSED 4096                /* calls too small for the turn that is due, until nobody waits for a larger one */

size_t tp_pace_bytes(size_t total_bytes, bool hurry, int grown)
{
	size_t bytes = hurry ? MOST_BYTES : TP_MIN(TP_MAX(total_bytes / PART, LEAST_BYTES), MOST_BYTES);
	return TP_MIN(bytes << 2 * grown, MOST_GROWN_BYTES);
}

bool tp_pace_may_grow(const struct tp_comm_pace *pace) { return pace->grown < TP_PACE_MOST_GROWN && pace->bytes < MOST_GROWN_BYTES; }

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
	pace->data = calloc(1, pace->grown ? MOST_GROWN_BYTES : MOST_BYTES);
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
	atomic_store_explicit(&comm->runnable.patient, false, memory_order_relaxed);
}

void tp_pace_begin_look(struct tp_comm_pace *pace, size_t total_bytes)
{
	pace->bytes = tp_pace_bytes(total_bytes, pace->hurry, pace->grown);
	pace->behind_bytes = total_bytes;
	pace->looking = true;
	pace->due = TP_PACE_SHARE;
	pace->rest = pace->rested = pace->passed = 0;
	pace->found = (struct tp_pace_found){ .from = -1, .to = -1 };
	pace->stage = TP_PACE_IDLE;
}

static ncclResult_t ask_of_parts(struct ncclComm *comm, struct tp_op *op)
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

/* Of the values told at a meeting, those from DELAYS on are what ranks waited for processors: of each the most of some ranks, of few ranks of one. */
enum { SLOWEST, COST, ELAPSED, COUNTED, DELAYS };
static int delay_of(int rank) { return DELAYS + rank % (TP_PACE_VALUES - DELAYS); }

static bool is_taker(const struct ncclComm *comm)
{
	const struct tp_pace_round *round = &comm->pace->rounds[comm->pace->round];
	return round->plan && round->to == comm->rank;
}

static ncclResult_t meet(struct ncclComm *comm, struct tp_op *op)
{
	struct tp_comm_pace *pace = comm->pace;
	pace->turn_ns = tp_clock_ns();
	tp_pace_clear(pace, TP_PACE_NONE);
	pace->in[SLOWEST] = -pace->last_us;
	pace->in[COST] = -pace->cost_us;
	pace->in[ELAPSED] = pace->rest_ns ? (float)((double)(pace->turn_ns - pace->rest_ns) / 1e3) : 0;
	if (is_taker(comm)) pace->in[COUNTED] = (float)pace->counted;
	pace->in[delay_of(comm->rank)] = -pace->last_delay_us;
	pace->last_us = pace->last_delay_us = 0;
	return tp_pace_ask(comm, op, TP_PACE_MEET, ncclMin);
}

ncclResult_t tp_pace_take_turn(struct ncclComm *comm, struct tp_op *op)
{
	struct tp_comm_pace *pace = comm->pace;
	enum tp_pace_stage due = pace->due;
	pace->due = TP_PACE_IDLE;
	if (due == TP_PACE_IDLE) return meet(comm, op);
	return due == TP_PACE_SHARE ? ask_of_parts(comm, op) : tp_pace_sum_up(comm, op, due);
}

bool tp_pace_waits(struct tp_comm_pace *pace, size_t total_bytes)
{
	if (++pace->rested <= pace->rest) return true;
	if (pace->due != TP_PACE_IDLE || total_bytes >= pace->behind_bytes) {
		pace->passed = 0;
		return false;
	}
	pace->looking = ++pace->passed < MOST_PASSED;
	return true;
}

static bool is_by_network(const struct ncclComm *comm, const struct tp_pace_round *round)
{
	enum tp_pace_class kind = tp_pace_class_of(comm, round->from, round->to);
	return kind == TP_PACE_MACHINE || kind == TP_PACE_REMOTE;
}

/* Where a descriptor announces all that comes, as sockets' do, a thread sleeps until then; others' announce some of it only, and sleep would be
 * counted as the link's. */
static bool may_sleep(const struct ncclComm *comm, const struct tp_pace_round *round)
{
	int dev = 0;
	const struct tp_net_ops *ops = is_by_network(comm, round) ? tp_links_net(comm->links, &dev) : NULL;
	return ops && strcmp(ops->name, "Socket") == 0;
}

/* A taker that comes late finds the message there, or part of it, and can't say how long it took. So the giver comes later. */
static void let_taker_be_first(const struct tp_op *op)
{
	uint64_t so_far_us = (tp_clock_ns() - op->begun_ns) / 1000;
	struct timespec nap = { 0, (long)TP_MIN(TP_MAX(so_far_us / NAP_PART, (uint64_t)LEAST_NAP_US), (uint64_t)MOST_NAP_US) * 1000 };
	nanosleep(&nap, NULL);
}

static ncclResult_t start_part(struct ncclComm *comm, struct tp_op *op, enum tp_pace_stage stage)
{
	struct tp_comm_pace *pace = comm->pace;
	struct tp_exec_call call = { .plan = pace->rounds[pace->round].plan, .input = pace->data, .output = pace->data, .line_bytes = TP_LINE_BYTES,
		.block_bytes = stage == TP_PACE_MOVE ? pace->bytes : SHORT_BYTES, .chunk_bytes = comm->p2p_chunk_bytes, .tag = TP_P2P_TAG ^ 0x9aceu,
		.reduce = { .type = ncclUint8 } };
	if (stage == TP_PACE_GREET) {
		bool sleeps = may_sleep(comm, &pace->rounds[pace->round]);
		if (!is_taker(comm)) let_taker_be_first(op);
		atomic_store_explicit(&comm->runnable.patient, sleeps, memory_order_relaxed);       /* (this thread's own hint) */
		tp_delay_begin(&pace->part_delay);
	}
	pace->waited = false;
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

/* Below it a time says more of how a message is taken. */
static float at_least(float us) { return TP_MAX(us, 20); }

float tp_pace_took_us(const float *least, int turns)
{
	/* In three of four turns, or both of two: what only one had may be chance, and so may be what only one hadn't. */
	return least[(turns - 1) / 3];
}

static void end_round(struct tp_comm_pace *pace)
{
	struct tp_pace_round *round = &pace->rounds[pace->round];
	int turns = pace->counted, middle = turns / 2;
	if (turns >= FEWEST_COUNTED) {
		qsort(pace->most_us, (size_t)turns, sizeof(float), compare);
		qsort(pace->least_us, (size_t)turns, sizeof(float), compare);
		round->took_us = tp_pace_took_us(pace->least_us, turns);
		round->typical_us = pace->most_us[middle];
		round->spread_us = pace->most_us[middle] - pace->most_us[0];
		round->unrest = at_least(pace->most_us[middle]) / at_least(pace->least_us[middle]);
	}
	pace->turn_of_round = pace->counted = 0;
	pace->counts = false;
}

bool tp_pace_has_enough(int turns, int least_counted, float slowest_us)
{
	int enough = slowest_us > TOO_LONG_US ? FEWEST_TURNS : slowest_us > LONG_US ? FEWER_TURNS : TP_PACE_ENOUGH;
	return turns == TP_PACE_TURNS || least_counted >= enough;
}

uint32_t tp_pace_rest(float cost_us, float elapsed_us, uint32_t calls, float slowness)
{
	double each = calls > 0 ? (double)elapsed_us / calls : 0, share = TP_MIN(TP_MAX(SHARE * 2 / (double)TP_MAX(slowness, 1), LEAST_SHARE), SHARE);
	if (each <= 0) return FIRST_REST;
	return (uint32_t)TP_MIN(TP_MAX(share * (double)cost_us / each, 1), MOST_REST);
}

/* All have met. The answer says how long the last turn's messages took at most, what the turn cost, what passed since, and for how long each
 * rank waited for a processor in it. */
static ncclResult_t after_meeting(struct ncclComm *comm, struct tp_op *op, const float *answer, bool *idle)
{
	struct tp_comm_pace *pace = comm->pace;
	int distance = pace->rounds[pace->round].distance;
	int least_counted = answer[COUNTED] < TP_PACE_TURNS ? (int)answer[COUNTED] : TP_PACE_TURNS;
	pace->rest = pace->hurry ? 0 : tp_pace_rest(-answer[COST], answer[ELAPSED], pace->rested, pace->median);
	pace->rested = 0;
	const struct tp_pace_round *round = &pace->rounds[pace->round];
	if (pace->counts) {
		int last = pace->counted - 1;
		/* The giver's waits; this one's own have been taken off. */
		pace->least_us[last] = TP_MAX(pace->least_us[last] + answer[delay_of(round->from)], 0);
	}
	if (pace->turn_of_round > 0 && tp_pace_has_enough(pace->turn_of_round, least_counted, -answer[SLOWEST])) {
		end_round(pace);
		int next = next_used(pace, pace->round + 1);
		if (next == pace->nrounds || pace->rounds[next].distance != distance) {
			pace->due = TP_PACE_EXTREMES;
			pace->rest = 0;
			*idle = true;
			return ncclSuccess;
		}
		pace->round = next;
	}
	pace->turn_of_round++;
	pace->counts = false;
	if (pace->rounds[pace->round].plan) return start_part(comm, op, TP_PACE_GREET);
	*idle = true;
	return ncclSuccess;
}

/* The long message has come, or gone. It began when the short one came, which this thread took after waiting for a processor, perhaps: so long ago at
 * most, and just now at least. */
static void end_message(struct tp_comm_pace *pace)
{
	pace->last_us = part_us(pace);
	pace->last_delay_us = tp_delay_us(&pace->part_delay);
	if (!pace->counts) return;
	float delay_us = pace->last_delay_us - pace->greet_delay_us;
	pace->most_us[pace->counted] = pace->last_us + pace->greet_delay_us;
	pace->least_us[pace->counted++] = pace->last_delay_us < TP_DELAY_UNKNOWN && pace->greet_delay_us < TP_DELAY_UNKNOWN ? TP_MAX(pace->last_us - delay_us, 0) : 0;
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
	pace->round = next_used(pace, 0);
	pace->looking = pace->round < pace->nrounds;
	pace->turn_of_round = pace->counted = 0;
	pace->counts = false;
	pace->rest = pace->hurry ? 0 : FIRST_REST;
	pace->rested = 0;
	pace->rest_ns = 0;
	pace->last_us = pace->cost_us = pace->last_delay_us = 0;
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
		pace->counts = is_taker(comm) && pace->waited;
		pace->greet_delay_us = tp_delay_us(&pace->part_delay);
		return start_part(comm, op, TP_PACE_MOVE);
	case TP_PACE_MOVE:
		end_message(pace);
		atomic_store_explicit(&comm->runnable.patient, false, memory_order_relaxed);
		end_turn(pace);
		*idle = true;
		return ncclSuccess;
	default:
		TP_TRY(tp_pace_go_on_summing(comm, answer, &summed));
		pace->stage = TP_PACE_IDLE;
		pace->rest = pace->rested = 0;
		*idle = true;
		if (!summed) return ncclSuccess;
		pace->round = next_used(pace, pace->round + 1);
		pace->looking = pace->round < pace->nrounds;
		return ncclSuccess;
	}
}

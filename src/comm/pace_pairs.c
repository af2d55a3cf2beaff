/* Which pair of ranks is slow? All ranks measure together: neighbours in the order of ranks, up and down, and where there are many hosts, the
 * first ranks of hosts farther apart. In each phase a rank gives or takes, never both, so that a pair's time is its own. The ranks meet before
 * each transfer, so nobody waits for somebody late; a first, short one makes connections; of the others the least counts. Where the receiver
 * goes on from the meeting after the sender, a turn seems shorter than it was: so a pair's least is held against another's median.
 *
 * A busy machine looks like a slow path. But what waiting for a processor adds differs from turn to turn, and does so for short messages too, while
 * a slow path takes its time every time: so each pair's spread is told with its time. */
#include <stdlib.h>
#include <string.h>

#include "comm/pace.h"
#include "comm/topo.h"

#define BYTES ((size_t)1 << 20)
#define SHORT_BYTES ((size_t)64)
#define TURNS (1 + TP_PACE_SHORT + TP_PACE_LONG)
#define LEAST_LONG 3                    /* long turns, where one takes … */
#define LONG_US 50e3f                   /* … so long; one, where it takes … */
#define TOO_LONG_US 1e6f                /* … so long */

size_t tp_pace_bytes(void) { return BYTES; }

bool tp_pace_prepare(struct tp_comm_pace *pace)
{
	if (!pace->data) pace->data = calloc(1, BYTES);
	return pace->data != NULL;
}

void tp_pace_release(struct tp_comm_pace *pace)
{
	free(pace->data);
	pace->data = NULL;
}

/* ---- Who with whom */

static void add_round(struct tp_comm_pace *pace, int rank, int from, int to)
{
	bool has_part = rank == from || rank == to;
	pace->rounds[pace->nrounds] = (struct tp_pace_round){ .from = has_part ? from : -1, .to = to, .took_us = TP_PACE_NONE };
}

/* In a ring of n, whoever gives in a phase takes in another: by turns, and whoever closes a ring of odd length in a phase of its own. */
static int phase_of(int giver, int last, int n) { return n % 2 && giver == last ? 2 : giver % 2; }

static void add_neighbours(const struct ncclComm *comm, struct tp_comm_pace *pace)
{
	int n = comm->nranks, rank = comm->rank, before = (rank + n - 1) % n, after = (rank + 1) % n;
	for (int down = 0; down < (n > 2 ? 2 : 1); down++) {
		int last = down ? 0 : n - 1, to = down ? before : after, from = down ? after : before;
		for (int phase = 0; phase < (n % 2 ? 3 : 2); phase++, pace->nrounds++) {
			add_round(pace, rank, -1, -1);
			if (phase_of(rank, last, n) == phase) add_round(pace, rank, rank, to);
			else if (phase_of(from, last, n) == phase) add_round(pace, rank, from, rank);
		}
	}
}

static int first_rank_of(const struct tp_boot *boot, int host)
{
	for (int r = 0; r < boot->nranks; r++)
		if (boot->peers[r].host == host && boot->peers[r].local == 0) return r;
	return -1;
}

/* Hosts h and h + distance: blocks of `distance` hosts give by turns, and whoever goes over the end in a phase of its own. */
static int host_phase(int host, int distance, int nhosts) { return host + distance >= nhosts ? 2 : host / distance % 2; }

static void add_hosts(const struct ncclComm *comm, struct tp_comm_pace *pace)
{
	const struct tp_boot *boot = comm->boot;
	int n = boot->nhosts, host = boot->host;
	for (int distance = 2; distance <= n / 2 && pace->nrounds + 3 <= TP_PACE_ROUNDS; distance *= 2) {
		int to = (host + distance) % n, from = (host + n - distance) % n;
		for (int phase = 0; phase < 3; phase++, pace->nrounds++) {
			add_round(pace, comm->rank, -1, -1);
			if (boot->local != 0) continue;
			if (host_phase(host, distance, n) == phase) add_round(pace, comm->rank, comm->rank, first_rank_of(boot, to));
			else if (host_phase(from, distance, n) == phase) add_round(pace, comm->rank, first_rank_of(boot, from), comm->rank);
		}
	}
}

static enum tp_pace_class class_of(const struct ncclComm *comm, int a, int b)
{
	const struct tp_boot_peer *x = &comm->boot->peers[a], *y = &comm->boot->peers[b];
	const struct tp_topo_card *p = &comm->topo->cards[a], *q = &comm->topo->cards[b];
	if (x->host != y->host) return p->machine == q->machine ? TP_PACE_MACHINE : TP_PACE_REMOTE;
	if (p->place.core >= 0 && p->place.core == q->place.core) return TP_PACE_CORE;
	if (p->place.cache >= 0 && p->place.cache == q->place.cache) return TP_PACE_CACHE;
	return p->place.numa >= 0 && p->place.numa == q->place.numa ? TP_PACE_NUMA : TP_PACE_APART;
}

void tp_pace_pair_up(const struct ncclComm *comm, struct tp_comm_pace *pace)
{
	pace->nrounds = 0;
	add_neighbours(comm, pace);
	add_hosts(comm, pace);
}

/* ---- Measuring */

static ncclResult_t meet(struct ncclComm *comm, struct tp_op *op)
{
	struct tp_comm_pace *pace = comm->pace;
	for (int v = 0; v < TP_PACE_VALUES; v++) pace->in[v] = TP_PACE_NONE;
	pace->in[0] = -pace->last_us;
	pace->last_us = 0;
	return tp_pace_ask(comm, op, TP_PACE_MEET);
}

static ncclResult_t move(struct ncclComm *comm, struct tp_op *op)
{
	struct tp_comm_pace *pace = comm->pace;
	const struct tp_pace_round *round = &pace->rounds[pace->round];
	bool gives = round->from == comm->rank;
	struct tp_transfer shape = { gives ? round->to : round->from, gives };
	tp_plan_free(pace->plan);
	pace->plan = NULL;
	TP_TRY(tp_plan_p2p(comm->rank, comm->nranks, &shape, 1, &pace->plan));
	/* On the collectives' links, which are empty now: on those of sends and receives something may lie that its receiver takes later. */
	for (uint32_t i = 0; i < pace->plan->programs[0].nlinks; i++) pace->plan->programs[0].links[i].lane_class = 0;
	pace->transfer = (struct tp_exec_transfer){ shape.peer, gives, pace->data, pace->turn_of_round > TP_PACE_SHORT ? BYTES : SHORT_BYTES };
	struct tp_exec_call call = { .plan = pace->plan, .line_bytes = TP_LINE_BYTES, .block_bytes = pace->transfer.bytes, .chunk_bytes = comm->p2p_chunk_bytes,
		.tag = TP_P2P_TAG ^ 0x9aceu, .transfers = &pace->transfer, .ntransfers = 1, .reduce = { .type = ncclUint8 } };
	pace->stage = TP_PACE_MOVE;
	pace->move_ns = tp_clock_ns();
	return tp_exec_start(comm->exec, &call, &op->running);
}

static void note_move(struct tp_comm_pace *pace)
{
	pace->last_us = (float)((double)(tp_clock_ns() - pace->move_ns) / 1e3);
	if (pace->turn_of_round) pace->times_us[pace->turn_of_round - 1] = pace->last_us;
}

static int compare(const void *left, const void *right)
{
	const float *a = left, *b = right;
	return (*a > *b) - (*a < *b);
}

/* The round's turns are over: nlong of them were long. */
static void end_round(struct tp_comm_pace *pace, int nlong)
{
	struct tp_pace_round *round = &pace->rounds[pace->round];
	float *quick = pace->times_us, *slow = pace->times_us + TP_PACE_SHORT;
	if (round->from < 0) return;
	qsort(quick, TP_PACE_SHORT, sizeof(*quick), compare);
	qsort(slow, (size_t)nlong, sizeof(*slow), compare);
	round->took_us = slow[0];
	round->typical_us = slow[nlong / 2];
	round->spread_us = TP_MAX(quick[TP_PACE_SHORT / 2] - quick[0], slow[nlong / 2] - slow[0]);
	round->unrest = quick[TP_PACE_SHORT / 2] / TP_MAX(quick[0], 1);
}

/* ---- Summing up */

static bool takes_in(const struct ncclComm *comm, const struct tp_pace_round *round) { return round->from >= 0 && round->to == comm->rank; }

static ncclResult_t sum_up(struct ncclComm *comm, struct tp_op *op)
{
	struct tp_comm_pace *pace = comm->pace;
	float *unrest = &pace->in[2 * TP_PACE_CLASSES];
	for (int v = 0; v < TP_PACE_VALUES; v++) pace->in[v] = TP_PACE_NONE;
	for (int i = 0; i < pace->nrounds; i++) {
		const struct tp_pace_round *round = &pace->rounds[i];
		if (!takes_in(comm, round)) continue;
		enum tp_pace_class kind = class_of(comm, round->from, round->to);
		float *best = &pace->in[kind], *worst = &pace->in[TP_PACE_CLASSES + kind];
		*best = TP_MIN(*best, round->typical_us);
		*worst = TP_MIN(*worst, -round->took_us);
		*unrest = TP_MIN(*unrest, -round->unrest);
	}
	return tp_pace_ask(comm, op, TP_PACE_SUM_UP);
}

/* The class in which one pair is farthest behind the others, or behind what was measured on a good day. */
static void choose_class(const struct ncclComm *comm, struct tp_pace_found *found, const float *answer)
{
	float most = 0;
	for (int c = 0; c < TP_PACE_CLASSES; c++) {
		float best = answer[c], worst = -answer[TP_PACE_CLASSES + c], expected = tp_pace_expected_us(comm, (enum tp_pace_class)c, BYTES);
		if (best >= TP_PACE_NONE) continue;
		float behind = worst / best;
		if (expected > 0) behind = TP_MAX(behind, worst / expected);
		if (behind <= most) continue;
		most = behind;
		*found = (struct tp_pace_found){ .kind = (enum tp_pace_class)c, .from = -1, .to = -1, .took_us = worst, .best_us = best, .expected_us = expected };
	}
	found->unrest = -answer[2 * TP_PACE_CLASSES];
}

/* This rank's own, if it is that slow. */
static const struct tp_pace_round *own_worst(const struct ncclComm *comm)
{
	const struct tp_comm_pace *pace = comm->pace;
	for (int i = 0; i < pace->nrounds; i++) {
		const struct tp_pace_round *round = &pace->rounds[i];
		if (takes_in(comm, round) && class_of(comm, round->from, round->to) == pace->found.kind && round->took_us >= pace->found.took_us) return round;
	}
	return NULL;
}

static ncclResult_t ask_of_worst(struct ncclComm *comm, struct tp_op *op, enum tp_pace_stage stage)
{
	struct tp_comm_pace *pace = comm->pace;
	const struct tp_pace_round *worst = own_worst(comm);
	for (int v = 0; v < TP_PACE_VALUES; v++) pace->in[v] = TP_PACE_NONE;
	if (stage == TP_PACE_CLAIM && worst) pace->in[0] = (float)comm->rank;
	if (stage == TP_PACE_NAME && worst && pace->found.to == comm->rank) {
		pace->in[0] = (float)worst->from;
		pace->in[1] = worst->spread_us;
	}
	return tp_pace_ask(comm, op, stage);
}

/* ---- The steps */

/* A whole number from 0 to below end, as another rank says; -1: it is none. */
static int index_of(float value, int end) { return value >= 0 && value < (float)end ? (int)value : -1; }

static ncclResult_t begin(struct ncclComm *comm, struct tp_op *op)
{
	struct tp_comm_pace *pace = comm->pace;
	pace->round = pace->turn_of_round = 0;
	pace->last_us = 0;
	pace->found = (struct tp_pace_found){ .from = -1 };
	tp_pace_pair_up(comm, pace);
	return meet(comm, op);
}

/* All have met; the answer's first value says how long the last transfer took at most. */
static ncclResult_t after_meeting(struct ncclComm *comm, struct tp_op *op, const float *answer)
{
	struct tp_comm_pace *pace = comm->pace;
	int nlong = pace->turn_of_round - 1 - TP_PACE_SHORT;
	if (pace->turn_of_round == TURNS || (nlong >= LEAST_LONG && -answer[0] > LONG_US) || (nlong > 0 && -answer[0] > TOO_LONG_US)) {
		end_round(pace, nlong);
		pace->turn_of_round = 0;
		if (++pace->round == pace->nrounds) return sum_up(comm, op);
	}
	if (pace->rounds[pace->round].from >= 0) return move(comm, op);
	pace->turn_of_round++;
	return meet(comm, op);
}

ncclResult_t tp_pace_measure(struct ncclComm *comm, struct tp_op *op, const float *answer, bool *done)
{
	struct tp_comm_pace *pace = comm->pace;
	struct tp_pace_found *found = &pace->found;
	*done = false;
	switch (pace->stage) {
	case TP_PACE_COMPARE:
		return begin(comm, op);
	case TP_PACE_MEET:
		return after_meeting(comm, op, answer);
	case TP_PACE_MOVE:
		note_move(pace);
		pace->turn_of_round++;
		return meet(comm, op);
	case TP_PACE_SUM_UP:
		choose_class(comm, found, answer);
		return ask_of_worst(comm, op, TP_PACE_CLAIM);
	case TP_PACE_CLAIM:
		found->to = index_of(answer[0], comm->nranks);
		return ask_of_worst(comm, op, TP_PACE_NAME);
	case TP_PACE_NAME:
		found->from = found->to < 0 ? -1 : index_of(answer[0], comm->nranks);
		found->spread_us = answer[1];
		*done = true;
		return ncclSuccess;
	default:
		return TP_FAIL(ncclInternalError, "comm %p rank %d: no step follows %d of a measurement", (void *)comm, comm->rank, (int)pace->stage);
	}
}

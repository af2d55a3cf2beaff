/* Which pair is the slowest? Of the rounds of one distance, the ranks tell each other by a few calls the best and the worst of each class, how the
 * pairs of the class in question lie between these, and who has the worst. What a pair is held against isn't the best, which may be chance, but a time
 * that a third of its like keep to, and two at least. */
#include "comm/pace.h"

enum { BEST = 0, WORST = TP_PACE_CLASSES, UNREST = 2 * TP_PACE_CLASSES };
_Static_assert(UNREST < TP_PACE_VALUES, "all extremes are told at once");

/* A time that this rank took, of the distance that is summed up? */
static bool counts(const struct ncclComm *comm, const struct tp_pace_round *round)
{
	const struct tp_comm_pace *pace = comm->pace;
	return round->used && round->distance == pace->rounds[pace->round].distance && round->from >= 0 && round->to == comm->rank &&
		round->took_us < TP_PACE_NONE;
}

static enum tp_pace_class class_of(const struct ncclComm *comm, const struct tp_pace_round *round)
{
	return tp_pace_class_of(comm, round->from, round->to);
}

static ncclResult_t ask_of_extremes(struct ncclComm *comm, struct tp_op *op)
{
	struct tp_comm_pace *pace = comm->pace;
	float *in = pace->in;
	tp_pace_clear(pace, TP_PACE_NONE);
	for (int i = 0; i < pace->nrounds; i++) {
		const struct tp_pace_round *round = &pace->rounds[i];
		if (!counts(comm, round)) continue;
		enum tp_pace_class kind = class_of(comm, round);
		in[BEST + kind] = TP_MIN(in[BEST + kind], round->typical_us);
		in[WORST + kind] = TP_MIN(in[WORST + kind], -round->took_us);
		in[UNREST] = TP_MIN(in[UNREST], -round->unrest);
	}
	return tp_pace_ask(comm, op, TP_PACE_EXTREMES, ncclMin);
}

/* The class in which one pair is farthest behind the best, or behind what was measured. */
static void choose_class(const struct ncclComm *comm, const float *answer)
{
	struct tp_comm_pace *pace = comm->pace;
	struct tp_pace_found *found = &pace->candidate;
	float most = -1;        /* on a busy machine none may take any time for sure */
	*found = (struct tp_pace_found){ .from = -1, .to = -1 };
	for (int c = 0; c < TP_PACE_CLASSES; c++) {
		float best = answer[BEST + c], worst = -answer[WORST + c];
		float expected = tp_pace_expected_us(comm, (enum tp_pace_class)c, pace->bytes * (size_t)pace->rounds[pace->round].sharing);
		if (best >= TP_PACE_NONE) continue;
		float behind = worst / TP_MAX(best, 1e-3f);
		if (expected > 0) behind = TP_MAX(behind, worst / expected);
		if (behind <= most) continue;
		most = behind;
		pace->best_us = best;
		*found = (struct tp_pace_found){ .kind = (enum tp_pace_class)c, .from = -1, .to = -1, .took_us = worst, .expected_us = expected };
	}
	found->unrest = answer[UNREST] < TP_PACE_NONE ? -answer[UNREST] : 0;
}

/* 2^(quarters/4). libm isn't needed for anything else. */
static double power(int quarters)
{
	static const double roots[4] = { 1, 1.189207115002721, 1.4142135623730951, 1.681792830507429 };
	return (double)(UINT64_C(1) << quarters / 4) * roots[quarters % 4];
}
_Static_assert(TP_PACE_BUCKETS < 256, "all bounds of buckets can be computed");

int tp_pace_bucket(float us, float best_us)
{
	double times = (double)TP_MAX(us, 1e-3f) / (double)TP_MAX(best_us, 1e-3f);
	int bucket = 0;
	while (bucket < TP_PACE_BUCKETS - 1 && times >= power(bucket + 1)) bucket++;
	return bucket;
}

float tp_pace_like_us(const float of[TP_PACE_BUCKETS], float best_us)
{
	float all = 0, sum = 0;
	for (int b = 0; b < TP_PACE_BUCKETS; b++) all += of[b];
	if (all < 2) return 0;
	float wanted = TP_MAX(all / 3, TP_MIN(2, all - 1));
	int b = 0;
	while (b < TP_PACE_BUCKETS - 1 && (sum += of[b]) < wanted) b++;
	return best_us * (float)power(b + 1);
}

static ncclResult_t ask_of_spread(struct ncclComm *comm, struct tp_op *op)
{
	struct tp_comm_pace *pace = comm->pace;
	tp_pace_clear(pace, 0);
	for (int i = 0; i < pace->nrounds; i++) {
		const struct tp_pace_round *round = &pace->rounds[i];
		if (counts(comm, round) && class_of(comm, round) == pace->candidate.kind) pace->in[tp_pace_bucket(round->typical_us, pace->best_us)] += 1;
	}
	return tp_pace_ask(comm, op, TP_PACE_SPREAD, ncclSum);
}

/* This rank's own, if it is that slow. */
static const struct tp_pace_round *own_worst(const struct ncclComm *comm)
{
	const struct tp_comm_pace *pace = comm->pace;
	for (int i = 0; i < pace->nrounds; i++) {
		const struct tp_pace_round *round = &pace->rounds[i];
		if (counts(comm, round) && class_of(comm, round) == pace->candidate.kind && round->took_us >= pace->candidate.took_us) return round;
	}
	return NULL;
}

/* What surroundings do to times is seen at pairs that are well: a sick one's times vary by its sickness too. */
static float healthy_spread_us(const struct ncclComm *comm)
{
	const struct tp_comm_pace *pace = comm->pace;
	float most = 0;
	for (int i = 0; i < pace->nrounds; i++) {
		const struct tp_pace_round *round = &pace->rounds[i];
		if (counts(comm, round) && class_of(comm, round) == pace->candidate.kind && !tp_pace_is_far_behind(round->took_us, pace->candidate.like_us))
			most = TP_MAX(most, round->spread_us);
	}
	return most;
}

static ncclResult_t ask_of_worst(struct ncclComm *comm, struct tp_op *op, enum tp_pace_stage stage)
{
	struct tp_comm_pace *pace = comm->pace;
	const struct tp_pace_round *worst = own_worst(comm);
	tp_pace_clear(pace, TP_PACE_NONE);
	if (stage == TP_PACE_CLAIM) {
		if (worst) pace->in[0] = (float)comm->rank;
		pace->in[1] = -healthy_spread_us(comm);
	}
	if (stage == TP_PACE_NAME && worst && pace->candidate.to == comm->rank) {
		pace->in[0] = (float)worst->from;
		pace->in[1] = -worst->spread_us;
	}
	return tp_pace_ask(comm, op, stage, ncclMin);
}

/* A whole number from 0 to below end, as another rank says; -1: it is none. */
static int index_of(float value, int end) { return value >= 0 && value < (float)end ? (int)value : -1; }

static float behind(const struct tp_pace_found *f)
{
	float like = f->like_us > 0 ? f->took_us / f->like_us : 1;
	return f->from < 0 ? 0 : f->expected_us > 0 ? TP_MAX(like, f->took_us / f->expected_us) : like;
}

ncclResult_t tp_pace_sum_up(struct ncclComm *comm, struct tp_op *op, enum tp_pace_stage stage)
{
	switch (stage) {
	case TP_PACE_EXTREMES: return ask_of_extremes(comm, op);
	case TP_PACE_SPREAD: return ask_of_spread(comm, op);
	default: return ask_of_worst(comm, op, stage);
	}
}

ncclResult_t tp_pace_go_on_summing(struct ncclComm *comm, const float *answer, bool *done)
{
	struct tp_comm_pace *pace = comm->pace;
	struct tp_pace_found *found = &pace->candidate;
	*done = false;
	switch (pace->stage) {
	case TP_PACE_EXTREMES:
		choose_class(comm, answer);
		pace->due = TP_PACE_SPREAD;
		return ncclSuccess;
	case TP_PACE_SPREAD:
		found->like_us = tp_pace_like_us(answer, pace->best_us);
		pace->due = TP_PACE_CLAIM;
		return ncclSuccess;
	case TP_PACE_CLAIM:
		found->to = index_of(answer[0], comm->nranks);
		found->spread_us = -answer[1];
		pace->due = TP_PACE_NAME;
		return ncclSuccess;
	case TP_PACE_NAME:
		found->from = found->to < 0 ? -1 : index_of(answer[0], comm->nranks);
		if (found->from >= 0) {
			found->from_host = comm->boot->peers[found->from].host;
			found->to_host = comm->boot->peers[found->to].host;
			found->own_spread_us = -answer[1];
			float unrest = TP_MAX(pace->found.unrest, found->unrest);
			if (pace->found.from < 0 || behind(found) > behind(&pace->found)) pace->found = *found;
			pace->found.unrest = unrest;
		}
		*done = true;
		return ncclSuccess;
	default:
		return TP_FAIL(ncclInternalError, "comm %p rank %d: no step follows %d of a measurement", (void *)comm, comm->rank, (int)pace->stage);
	}
}

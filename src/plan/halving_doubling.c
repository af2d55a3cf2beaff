/* Halving and doubling: reduce-scatter in ceil(log2 n) stages that each send half of what is left, all-gather in as many
 * that each send all there is; all-reduce is one after the other, 2(n-1)/n of the data per rank.
 *
 * For numbers that aren't powers of two the usual way folds the extra ranks into others, which costs two more stages and
 * the whole message twice over. Instead the ranks stand on a circle and the skips are the halves of n, rounded up: the
 * same number of stages, and exactly (n-1)/n of the data a half, for every n (J. L. Träff, "Optimal, Non-pipelined
 * Reduce-scatter and Allreduce Algorithms", 2024). For powers of two it is the well-known exchange in all but the names
 * of the partners.
 *
 * Partial sums lie in slots only, never in OUTPUT, so that in place is no special case; each piece is summed in one place
 * and copied from there, so that all ranks hold the same bits. References: raw INPUT is overwritten (in place) by the
 * result of its piece, which has been through the reader; results are never overwritten. */
#include "plan/stages.h"

static const char *refuses(const struct tp_plan_spec *spec)
{
	switch (spec->coll) {
	case TP_ALL_REDUCE: case TP_REDUCE_SCATTER: case TP_ALL_GATHER: return NULL;
	default: return "halving and doubling does all-reduce, reduce-scatter and all-gather";
	}
}

static void describe(const struct tp_plan_spec *spec, struct tp_plan *plan)
{
	if (spec->coll == TP_ALL_REDUCE) plan->pieces = (uint32_t)spec->layout->nranks;
}

static void generate(struct tp_builder *b, const struct tp_plan_spec *spec, int rank)
{
	struct tp_stages s;
	tp_stages_make(TP_STAGES_NEAR_FIRST, spec->layout->nranks, &s);
	if (spec->coll == TP_ALL_GATHER) {
		tp_stages_gather(b, &s, rank, 0, NULL);
	} else if (spec->coll == TP_REDUCE_SCATTER) {
		tp_stages_reduce(b, &s, rank, 0, 0, NULL);
	} else {
		struct tp_stages_join join = tp_stages_join(b, &s, 1);
		tp_stages_reduce(b, &s, rank, 0, rank, &join);
		tp_stages_gather(b, &s, rank, 1, &join);
	}
}

const struct tp_generator tp_generator_halving_doubling = { refuses, describe, generate };

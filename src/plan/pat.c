/* Parallel aggregated trees, after the algorithm of that name in NCCL 2.23: all-gather and reduce-scatter in ceil(log2 n)
 * stages, far ranks first. The stage that crosses half of the circle carries one piece, the one between neighbours half
 * of them: where neighbours are close, most of the data stays there, which is what sets it apart from halving and
 * doubling. For any number of ranks, and without scratch memory: pieces on their way lie in OUTPUT (all-gather) or in
 * slots (reduce-scatter). References as in halving_doubling.c. */
#include "plan/stages.h"

static const char *refuses(const struct tp_plan_spec *spec)
{
	if (spec->coll == TP_ALL_GATHER || spec->coll == TP_REDUCE_SCATTER) return NULL;
	return "parallel aggregated trees do all-gather and reduce-scatter";
}

static void generate(struct tp_builder *b, const struct tp_plan_spec *spec, int rank)
{
	struct tp_stages s;
	tp_stages_make(TP_STAGES_FAR_FIRST, spec->layout->nranks, &s);
	if (spec->coll == TP_ALL_GATHER) tp_stages_gather(b, &s, rank, 0, NULL);
	else tp_stages_reduce(b, &s, rank, 0, 0, NULL);
}

const struct tp_generator tp_generator_pat = { refuses, NULL, generate };

/* The algorithms, in the order of enum tp_algo. */
#include "plan/build.h"

static const struct tp_generator *const generators[TP_NALGOS] = {
	[TP_ALGO_RING] = &tp_generator_ring,
	[TP_ALGO_TREE] = &tp_generator_tree,
	[TP_ALGO_HALVING_DOUBLING] = &tp_generator_halving_doubling,
	[TP_ALGO_PAT] = &tp_generator_pat,
	[TP_ALGO_BRUCK] = &tp_generator_bruck,
	[TP_ALGO_ONE_SHOT] = &tp_generator_one_shot,
	[TP_ALGO_TWO_SHOT] = &tp_generator_two_shot,
	[TP_ALGO_DIRECT] = &tp_generator_direct,
	[TP_ALGO_HIERARCHICAL] = &tp_generator_hierarchical,
};

const struct tp_generator *tp_generator_of(enum tp_algo algo)
{
	return (unsigned)algo < TP_NALGOS ? generators[algo] : NULL;
}

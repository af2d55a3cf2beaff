/* The algorithms, in the order of enum tp_algo. */
#include "plan/build.h"

static const struct tp_generator *const generators[TP_NALGOS] = {
	[TP_ALGO_RING] = &tp_generator_ring,
};

const struct tp_generator *tp_generator_of(enum tp_algo algo)
{
	return (unsigned)algo < TP_NALGOS ? generators[algo] : NULL;
}

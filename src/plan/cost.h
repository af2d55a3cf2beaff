/* What the cost model knows of an algorithm: how often each kind of work is done in a round (internal to this folder). */
#ifndef TP_PLAN_COST_H
#define TP_PLAN_COST_H

#include "plan/build.h"

/* One rank's work in a round, in chunks; a mean over the ranks that have the same part. */
struct tp_cost_work {
	double steps;               /* that it runs */
	double refs;                /* sends of buffer chunks that may go by reference */
	double copies_out;          /* sends of buffer chunks that may not */
	double results_out;         /* sends of reductions: written by the reduction itself */
	double ref_takes;           /* receives of what may come by reference … */
	double takes;               /* … and of the rest that is put into a buffer or another slot (not reduced) */
	double ref_stored;          /* of ref_takes, how many are put into a buffer (the others are reduced) */
	double reduce_takes;        /* receives that are sources of reductions, those of ref_takes included */
	double reduces;             /* passes of reductions, in passes of two sources: what n sources cost is (n + 1) / 3 */
	double moves;               /* buffer to buffer, or into a slot between two lanes */
	double far_out, far_in;     /* of all sends and receives, how many cross a border of domains */
};

struct tp_cost_profile {
	struct tp_cost_work each;   /* any rank … */
	struct tp_cost_work root;   /* … but the root, where `rooted` */
	bool rooted;
	bool refs_only;             /* every send may go by reference, and no data between lanes: chunks may be larger than slots */
	bool lockstep;              /* a round's chain of hops isn't hidden behind other rounds */
	double pieces;
	double hops_inside, hops_across;    /* the longest chain of one round */
	double relays;              /* of these hops, how many add a chunk's work that the busiest rank doesn't do itself */
	double crossing;            /* chunks that leave (or enter) the busiest domain */
};

/* false: the algorithm can't do it. */
bool tp_cost_profile_of(const struct tp_plan_spec *spec, struct tp_cost_profile *out);
bool tp_cost_profile_hierarchical(const struct tp_plan_spec *spec, struct tp_cost_profile *out);
/* The time of a message, and the largest chunk that the links take. */
double tp_cost_time(const struct tp_cost_profile *p, const struct tp_plan_spec *spec, size_t block_bytes, size_t chunk_bytes,
	bool by_ref, const struct tp_cost_model *model);
size_t tp_cost_chunk_limit(const struct tp_cost_profile *p, const struct tp_layout *layout, bool by_ref,
	const struct tp_cost_model *model);

#endif

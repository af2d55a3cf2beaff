/* All pairs: every rank speaks to every other. Inside one machine, where all pairs are equally near, nothing takes fewer
 * steps, and with references nothing copies less: whoever needs bytes reads them where they lie.
 *
 * Sends start at the next rank, so that the ranks don't all speak to the same one at once; reductions take their sources
 * in rank order in one step, so that every rank computes the same expression.
 *
 * References. One-shot declares none: with INPUT and OUTPUT the same memory, a rank may be done while a slow one has yet
 * to read its input. Two-shot's piece p is overwritten only by its result, which its owner made after reading it. The
 * others never overwrite what they send (all-to-all has no in-place form). */
#include "plan/build.h"

enum { COMPLETES = TP_STEP_REDUCE | TP_STEP_FINAL };

/* Sources of a reduction over all ranks, in rank order; this rank's own is INPUT chunk `own`. */
static void take_all(struct tp_builder *b, int n, int rank, int32_t own, int lane_class)
{
	for (int p = 0; p < n; p++) {
		if (p == rank) tp_build_read(b, TP_INPUT, own);
		else tp_build_take(b, p, lane_class);
	}
}

static void give_all(struct tp_builder *b, int n, int rank, int lane_class, bool by_ref)
{
	for (int i = 1; i < n; i++) tp_build_give(b, (rank + i) % n, lane_class, by_ref);
}

/* A step a peer: INPUT chunk p to p. */
static void spread(struct tp_builder *b, int lane, int n, int rank)
{
	for (int i = 1; i < n; i++) {
		int peer = (rank + i) % n;
		tp_build_step(b, lane, 0);
		tp_build_read(b, TP_INPUT, peer);
		tp_build_give(b, peer, 0, true);
	}
}

/* A step a peer: what p sends to OUTPUT chunk p, in the order in which the peers get to this rank. */
static void collect(struct tp_builder *b, int lane, int n, int rank, int lane_class)
{
	for (int i = 1; i < n; i++) {
		int peer = (rank + n - i) % n;
		tp_build_step(b, lane, 0);
		tp_build_take(b, peer, lane_class);
		tp_build_write(b, TP_OUTPUT, peer);
	}
}

static void copy_own(struct tp_builder *b, int lane, int32_t from, int32_t to)
{
	tp_build_step(b, lane, 0);
	tp_build_read(b, TP_INPUT, from);
	tp_build_write(b, TP_OUTPUT, to);
}

static void take_whole(struct tp_builder *b, int root)
{
	tp_build_step(b, tp_build_lane(b), 0);
	tp_build_take(b, root, 0);
	tp_build_write(b, TP_OUTPUT, 0);
}

static void give_whole(struct tp_builder *b, int root)
{
	tp_build_step(b, tp_build_lane(b), 0);
	tp_build_read(b, TP_INPUT, 0);
	tp_build_give(b, root, 0, true);
}

static const char *direct_refuses(const struct tp_plan_spec *spec)
{
	return spec->coll == TP_ALL_REDUCE ? "all pairs reduce as one-shot or two-shot" : NULL;
}

static void generate_rooted(struct tp_builder *b, const struct tp_plan_spec *spec, int rank)
{
	int n = spec->layout->nranks, root = spec->root, lane;
	bool to_root = spec->coll == TP_REDUCE || spec->coll == TP_GATHER;
	if (rank != root) {
		if (to_root) give_whole(b, root);
		else take_whole(b, root);
		return;
	}
	lane = tp_build_lane(b);
	switch (spec->coll) {
	case TP_BROADCAST:
		copy_own(b, lane, 0, 0);
		give_all(b, n, rank, 0, true);
		break;
	case TP_REDUCE:
		tp_build_step(b, lane, COMPLETES);
		take_all(b, n, rank, 0, 0);
		tp_build_write(b, TP_OUTPUT, 0);
		break;
	case TP_GATHER:
		copy_own(b, lane, 0, rank);
		collect(b, lane, n, rank, 0);
		break;
	default:
		spread(b, lane, n, rank);
		copy_own(b, lane, rank, 0);
		break;
	}
}

static void direct_generate(struct tp_builder *b, const struct tp_plan_spec *spec, int rank)
{
	int n = spec->layout->nranks;
	if (tp_coll_has_root(spec->coll)) {
		generate_rooted(b, spec, rank);
		return;
	}
	int out = tp_build_lane(b), in = tp_build_lane(b);
	switch (spec->coll) {
	case TP_ALL_GATHER:
		copy_own(b, out, 0, rank);
		give_all(b, n, rank, 0, true);
		collect(b, in, n, rank, 0);
		break;
	case TP_REDUCE_SCATTER:
		spread(b, out, n, rank);
		tp_build_step(b, in, COMPLETES);
		take_all(b, n, rank, rank, 0);
		tp_build_write(b, TP_OUTPUT, 0);
		break;
	default:
		spread(b, out, n, rank);
		copy_own(b, out, rank, rank);
		collect(b, in, n, rank, 0);
		break;
	}
}

static const char *all_reduce_only(const struct tp_plan_spec *spec)
{
	return spec->coll == TP_ALL_REDUCE ? NULL : "it does all-reduce only; DIRECT is its like for the others";
}

static void one_shot_describe(const struct tp_plan_spec *spec, struct tp_plan *plan)
{
	(void)spec;
	plan->shape = TP_SHAPE_ONE_SHOT;
}

static void one_shot_generate(struct tp_builder *b, const struct tp_plan_spec *spec, int rank)
{
	int n = spec->layout->nranks, lane = tp_build_lane(b);
	tp_build_step(b, lane, 0);
	tp_build_read(b, TP_INPUT, 0);
	give_all(b, n, rank, 0, false);
	tp_build_step(b, lane, COMPLETES);
	take_all(b, n, rank, 0, 0);
	tp_build_write(b, TP_OUTPUT, 0);
}

static void two_shot_describe(const struct tp_plan_spec *spec, struct tp_plan *plan)
{
	plan->shape = TP_SHAPE_TWO_SHOT;
	plan->pieces = (uint32_t)spec->layout->nranks;
}

static void two_shot_generate(struct tp_builder *b, const struct tp_plan_spec *spec, int rank)
{
	int n = spec->layout->nranks;
	int out = tp_build_lane(b), own = tp_build_lane(b), in = tp_build_lane(b);
	spread(b, out, n, rank);
	tp_build_step(b, own, COMPLETES);
	take_all(b, n, rank, rank, 0);
	tp_build_write(b, TP_OUTPUT, rank);
	give_all(b, n, rank, 1, true);
	collect(b, in, n, rank, 1);
}

static void direct_describe(const struct tp_plan_spec *spec, struct tp_plan *plan)
{
	(void)spec;
	plan->shape = TP_SHAPE_DIRECT;
}

const struct tp_generator tp_generator_direct = { direct_refuses, direct_describe, direct_generate };
const struct tp_generator tp_generator_one_shot = { all_reduce_only, one_shot_describe, one_shot_generate };
const struct tp_generator tp_generator_two_shot = { all_reduce_only, two_shot_describe, two_shot_generate };

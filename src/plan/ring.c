/* Rings: rank r hears from r - 1 and speaks to r + 1. All-reduce, reduce-scatter and all-gather pass each piece around
 * once (twice); broadcast and reduce are chains that pipeline over the rounds. Each piece is reduced in one place, so all
 * ranks hold the same bits.
 *
 * References: raw INPUT is never overwritten before its piece has come full circle as a result, which is after the
 * neighbour has read it; results are never overwritten. What is reduced on the way lies in slots only. */
#include "plan/build.h"

enum { REDUCES = TP_STEP_REDUCE, COMPLETES = TP_STEP_REDUCE | TP_STEP_FINAL };

static const char *ring_refuses(const struct tp_plan_spec *spec)
{
	switch (spec->coll) {
	case TP_ALL_REDUCE: case TP_ALL_GATHER: case TP_REDUCE_SCATTER: case TP_BROADCAST: case TP_REDUCE: return NULL;
	default: return "a ring does all-reduce, all-gather, reduce-scatter, broadcast and reduce";
	}
}

static void ring_describe(const struct tp_plan_spec *spec, struct tp_plan *plan)
{
	if (spec->coll == TP_ALL_REDUCE) plan->pieces = (uint32_t)spec->layout->nranks;
}

/* Reduces piece after piece on the way round; the one of place `last` ends here, into OUTPUT chunk `into`. */
static void reduce_round(struct tp_builder *b, int lane, int n, int rank, int last, int into, bool pass_on)
{
	int before = (rank + n - 1) % n, after = (rank + 1) % n;
	tp_build_step(b, lane, 0);
	tp_build_read(b, TP_INPUT, (last + n - 1) % n);
	tp_build_give(b, after, 0, true);
	for (int k = 2; k < n; k++) {
		tp_build_step(b, lane, REDUCES);
		tp_build_take(b, before, 0);
		tp_build_read(b, TP_INPUT, (last + n - k) % n);
		tp_build_give(b, after, 0, false);
	}
	tp_build_step(b, lane, COMPLETES);
	tp_build_take(b, before, 0);
	tp_build_read(b, TP_INPUT, last);
	tp_build_write(b, TP_OUTPUT, into);
	if (pass_on) tp_build_give(b, after, 0, true);
}

/* Passes n - 1 results on; the first that comes is the one before `own`. */
static void gather_round(struct tp_builder *b, int lane, int n, int rank, int own)
{
	for (int k = 1; k < n; k++) {
		tp_build_step(b, lane, 0);
		tp_build_take(b, (rank + n - 1) % n, 0);
		tp_build_write(b, TP_OUTPUT, (own + n - k) % n);
		if (k < n - 1) tp_build_give(b, (rank + 1) % n, 0, true);
	}
}

static void chain_broadcast(struct tp_builder *b, int lane, int n, int rank, int root)
{
	tp_build_step(b, lane, 0);
	if (rank == root) tp_build_read(b, TP_INPUT, 0);
	else tp_build_take(b, (rank + n - 1) % n, 0);
	tp_build_write(b, TP_OUTPUT, 0);
	if ((rank + 1) % n != root) tp_build_give(b, (rank + 1) % n, 0, true);
}

static void chain_reduce(struct tp_builder *b, int lane, int n, int rank, int root)
{
	bool first = (rank + n - 1) % n == root;
	tp_build_step(b, lane, first ? 0 : rank == root ? COMPLETES : REDUCES);
	if (!first) tp_build_take(b, (rank + n - 1) % n, 0);
	tp_build_read(b, TP_INPUT, 0);
	if (rank == root) tp_build_write(b, TP_OUTPUT, 0);
	else tp_build_give(b, (rank + 1) % n, 0, first);
}

static void ring_generate(struct tp_builder *b, const struct tp_plan_spec *spec, int rank)
{
	int n = spec->layout->nranks, lane = tp_build_lane(b);
	switch (spec->coll) {
	case TP_ALL_REDUCE:
		reduce_round(b, lane, n, rank, rank, rank, true);
		gather_round(b, lane, n, rank, rank);
		break;
	case TP_REDUCE_SCATTER:
		reduce_round(b, lane, n, rank, rank, 0, false);
		break;
	case TP_ALL_GATHER:
		tp_build_step(b, lane, 0);
		tp_build_read(b, TP_INPUT, 0);
		tp_build_write(b, TP_OUTPUT, rank);
		tp_build_give(b, (rank + 1) % n, 0, true);
		gather_round(b, lane, n, rank, rank);
		break;
	case TP_BROADCAST: chain_broadcast(b, lane, n, rank, spec->root); break;
	default: chain_reduce(b, lane, n, rank, spec->root); break;
	}
}

const struct tp_generator tp_generator_ring = { ring_refuses, ring_describe, ring_generate };

/* Rings, the ranks in order of their domains, and within these as the layout says of the channel: each hears from the one before and speaks to the one after. All-reduce, reduce-scatter and all-gather pass each piece around
 * once (twice); broadcast and reduce are chains that pipeline over the rounds. Each piece is reduced in one place, so all
 * ranks hold the same bits.
 *
 * References: raw INPUT is never overwritten before its piece has come full circle as a result, which is after the
 * neighbour has read it; results are never overwritten. What is reduced on the way lies in slots only. */
#include <stdlib.h>
#include <string.h>

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

/* A rank's place in the ring; order[position] is a rank. */
struct ring { int lane, n, at, before, after; const int *order; };

/* The block of a rank in a buffer with a block a rank, or the piece of a position in an all-reduce. */
static int32_t chunk_of(const struct ring *g, bool blocks, int position)
{
	position = (position + g->n) % g->n;
	return blocks ? g->order[position] : position;
}

/* Reduces piece after piece on the way round; each ends at its own position, in OUTPUT chunk `into`. */
static void reduce_round(struct tp_builder *b, const struct ring *g, bool blocks, int into, bool pass_on)
{
	tp_build_step(b, g->lane, 0);
	tp_build_read(b, TP_INPUT, chunk_of(g, blocks, g->at - 1));
	tp_build_give(b, g->after, 0, true);
	for (int k = 2; k < g->n; k++) {
		tp_build_step(b, g->lane, REDUCES);
		tp_build_take(b, g->before, 0);
		tp_build_read(b, TP_INPUT, chunk_of(g, blocks, g->at - k));
		tp_build_give(b, g->after, 0, false);
	}
	tp_build_step(b, g->lane, COMPLETES);
	tp_build_take(b, g->before, 0);
	tp_build_read(b, TP_INPUT, chunk_of(g, blocks, g->at));
	tp_build_write(b, TP_OUTPUT, into);
	if (pass_on) tp_build_give(b, g->after, 0, true);
}

/* Passes the others' n - 1 chunks on; the first that comes is that of the position before. */
static void gather_round(struct tp_builder *b, const struct ring *g, bool blocks)
{
	for (int k = 1; k < g->n; k++) {
		tp_build_step(b, g->lane, 0);
		tp_build_take(b, g->before, 0);
		tp_build_write(b, TP_OUTPUT, chunk_of(g, blocks, g->at - k));
		if (k < g->n - 1) tp_build_give(b, g->after, 0, true);
	}
}

/* Turns the root's domain so that a chain begins (broadcast) or ends (reduce) with the root at that end of it: the chain
 * then comes to each domain once. */
static bool turn_domain(const struct tp_layout *layout, int root, bool root_first, int *order)
{
	int first = 0, size = layout->domain_size[layout->domain[root]], at = 0;
	for (int d = 0; d < layout->domain[root]; d++) first += layout->domain_size[d];
	while (order[first + at] != root) at++;
	int by = root_first ? at : at + 1, *old = tp_alloc((size_t)size, sizeof(*old), "the order of a plan's ranks");
	if (!old) return false;
	memcpy(old, order + first, (size_t)size * sizeof(*old));
	for (int i = 0; i < size; i++) order[first + i] = old[(i + by) % size];
	free(old);
	return true;
}

static void chain_broadcast(struct tp_builder *b, const struct ring *g, int rank, int root)
{
	tp_build_step(b, g->lane, 0);
	if (rank == root) tp_build_read(b, TP_INPUT, 0);
	else tp_build_take(b, g->before, 0);
	tp_build_write(b, TP_OUTPUT, 0);
	if (g->after != root) tp_build_give(b, g->after, 0, true);
}

static void chain_reduce(struct tp_builder *b, const struct ring *g, int rank, int root)
{
	bool first = g->before == root;
	tp_build_step(b, g->lane, first ? 0 : rank == root ? COMPLETES : REDUCES);
	if (!first) tp_build_take(b, g->before, 0);
	tp_build_read(b, TP_INPUT, 0);
	if (rank == root) tp_build_write(b, TP_OUTPUT, 0);
	else tp_build_give(b, g->after, 0, first);
}

static void ring_generate(struct tp_builder *b, const struct tp_plan_spec *spec, int rank)
{
	struct ring g = { .n = spec->layout->nranks };
	int *order = tp_build_ring_order(b, spec->layout, rank, &g.at);
	if (!order) return;
	if (tp_coll_has_root(spec->coll)) {
		if (!turn_domain(spec->layout, spec->root, spec->coll == TP_BROADCAST, order)) b->failed = true;
		for (g.at = 0; order[g.at] != rank; g.at++) { }
	}
	g.order = order;
	g.before = order[(g.at + g.n - 1) % g.n];
	g.after = order[(g.at + 1) % g.n];
	g.lane = tp_build_lane(b);
	switch (spec->coll) {
	case TP_ALL_REDUCE:
		reduce_round(b, &g, false, g.at, true);
		gather_round(b, &g, false);
		break;
	case TP_REDUCE_SCATTER:
		reduce_round(b, &g, true, 0, false);
		break;
	case TP_ALL_GATHER:
		tp_build_step(b, g.lane, 0);
		tp_build_read(b, TP_INPUT, 0);
		tp_build_write(b, TP_OUTPUT, rank);
		tp_build_give(b, g.after, 0, true);
		gather_round(b, &g, true);
		break;
	case TP_BROADCAST: chain_broadcast(b, &g, rank, spec->root); break;
	default: chain_reduce(b, &g, rank, spec->root); break;
	}
	free(order);
}

const struct tp_generator tp_generator_ring = { ring_refuses, ring_describe, ring_generate };

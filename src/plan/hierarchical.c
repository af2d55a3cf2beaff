/* Inside each domain, across the domains, inside again: made of the other generators, which run on a domain or on a rail
 * (the ranks of one place in all domains) as if it were all there is. Little crosses a border: each byte once per domain
 * it must reach, spread over all the rails.
 *
 * There are as many rails as the smallest domain has ranks. A rank in a higher place is an extra: where pieces are shared
 * out (all-reduce, broadcast, reduce) it owns none; where each rank has a block, its block is carried by the rail of
 * its place modulo the rails, in the slot place / rails.
 *
 *                 inside                    across             inside
 * all-reduce      reduce-scatter            all-reduce         all-gather
 * all-gather      extras' blocks to rails   all-gather         all-gather
 * reduce-scatter  reduce-scatter            reduce-scatter     extras' blocks from rails
 * broadcast       scatter (root's domain)   broadcast          all-gather
 * reduce          reduce-scatter            reduce             gather (root's domain)
 *
 * Each stage is a group of lanes; join.c orders them. What is complete for a domain isn't complete: only the stage across
 * has final steps. Partial sums that have no place in OUTPUT are named as SCRATCH here and become local links there.
 *
 * References stay what they are in the parts: INPUT is overwritten (in place) only by results that depend on its having
 * been read; results in OUTPUT are final. A partial sum in OUTPUT (all-reduce) is never given by reference but inside a
 * part that is itself safe in place. */
#include <stdlib.h>

#include "plan/build.h"

enum { FEW_DOMAINS = 8, FOLD_CLASS = 2, GATHER_CLASS = 1 };

struct hierarchy {
	struct tp_builder *b;
	const struct tp_plan_spec *spec;
	int rank, ndomains, nrails, nslots, domain, place, size;
	int pieces;                     /* of a segment */
	int *order, *first, *rail;      /* ranks by domain and place; where domains begin; the ranks of this rank's rail */
	struct tp_layout *inside, *across;
	int stage_lane[3];
};

/* What a stage's chunks are in the plan's terms. */
struct stage { const struct hierarchy *h; int domain, slot, piece; };

static void count_rails(const struct tp_layout *layout, int *nrails, int *nslots)
{
	int least = layout->nranks, most = 0;
	for (int d = 0; d < layout->ndomains; d++) {
		least = TP_MIN(least, layout->domain_size[d]);
		most = TP_MAX(most, layout->domain_size[d]);
	}
	*nrails = least;
	*nslots = (most + least - 1) / least;
}

/* The rank that has a place in a domain, -1: none. */
static int member(const struct hierarchy *h, int domain, int place)
{
	return place < h->spec->layout->domain_size[domain] ? h->order[h->first[domain] + place] : -1;
}

/* The rank whose block a rail carries in a slot. */
static int carried(const struct hierarchy *h, int domain, int rail, int slot)
{
	return rail < h->nrails ? member(h, domain, rail + slot * h->nrails) : -1;
}

static bool at(struct tp_operand *out, enum tp_where where, int32_t chunk)
{
	*out = (struct tp_operand){ (uint8_t)where, 0, chunk };
	return chunk >= 0;
}

static bool segment(const struct stage *s, enum tp_where where, int32_t rail, struct tp_operand *out)
{
	return rail < s->h->nrails && at(out, where, rail * s->h->pieces + s->piece);
}

/* Segments: reduce-scatter of a piece of each segment, the own one into OUTPUT. */
static bool segments_reduced(const void *arg, uint8_t where, int32_t index, struct tp_operand *out)
{
	const struct stage *s = arg;
	if (where == TP_INPUT) return segment(s, TP_INPUT, index, out);
	return segment(s, TP_OUTPUT, s->h->place, out);
}

/* … or out of the way, for a rail that leads to the root. */
static bool segments_reduced_aside(const void *arg, uint8_t where, int32_t index, struct tp_operand *out)
{
	const struct stage *s = arg;
	if (where == TP_INPUT) return segment(s, TP_INPUT, index, out);
	return s->h->place < s->h->nrails && at(out, TP_SCRATCH, 0);
}

/* The whole of the own segment, already in OUTPUT. */
static bool own_segment(const void *arg, uint8_t where, int32_t index, struct tp_operand *out)
{
	const struct hierarchy *h = ((const struct stage *)arg)->h;
	(void)where;
	return at(out, TP_OUTPUT, h->place * h->pieces + index);
}

/* All-gather of a piece of each segment, the own one already in OUTPUT. */
static bool segments_gathered(const void *arg, uint8_t where, int32_t index, struct tp_operand *out)
{
	const struct stage *s = arg;
	return segment(s, TP_OUTPUT, where == TP_INPUT ? s->h->place : index, out);
}

/* Broadcast: the root shares its segments out; its own goes to OUTPUT too. */
static bool segments_scattered(const void *arg, uint8_t where, int32_t index, struct tp_operand *out)
{
	const struct stage *s = arg;
	return segment(s, where, where == TP_INPUT ? index : s->h->place, out);
}

/* Reduce: the own segment goes from aside to OUTPUT, at the root, or aside again. */
static bool segment_to_root(const void *arg, uint8_t where, int32_t index, struct tp_operand *out)
{
	const struct stage *s = arg;
	(void)index;
	if (where == TP_INPUT) return at(out, TP_SCRATCH, 0);
	if (s->h->rank == s->h->spec->root) return segment(s, TP_OUTPUT, s->h->place, out);
	return at(out, TP_SCRATCH, 1);
}

static bool segments_to_root(const void *arg, uint8_t where, int32_t index, struct tp_operand *out)
{
	const struct stage *s = arg;
	if (where == TP_OUTPUT) return segment(s, TP_OUTPUT, index, out);
	if (s->h->place >= s->h->nrails) return false;
	return s->h->rank == s->h->spec->root ? segment(s, TP_OUTPUT, s->h->place, out) : at(out, TP_SCRATCH, 1);
}

/* All-gather along a rail, of the blocks in a slot; an extra's has been brought to OUTPUT. */
static bool blocks_along_rail(const void *arg, uint8_t where, int32_t index, struct tp_operand *out)
{
	const struct stage *s = arg;
	if (where == TP_INPUT && !s->slot) return at(out, TP_INPUT, 0);
	return at(out, TP_OUTPUT, carried(s->h, where == TP_INPUT ? s->h->domain : index, s->h->place, s->slot));
}

/* All-gather inside, of the blocks that the rails brought from one domain in one slot. */
static bool blocks_from_rails(const void *arg, uint8_t where, int32_t index, struct tp_operand *out)
{
	const struct stage *s = arg;
	return at(out, TP_OUTPUT, carried(s->h, s->domain, where == TP_INPUT ? s->h->place : index, s->slot));
}

/* Reduce-scatter inside, of the blocks that the rails carry to one domain in one slot. */
static bool blocks_to_rails(const void *arg, uint8_t where, int32_t index, struct tp_operand *out)
{
	const struct stage *s = arg;
	if (where == TP_INPUT) return at(out, TP_INPUT, carried(s->h, s->domain, index, s->slot));
	return carried(s->h, s->domain, s->h->place, s->slot) >= 0 && at(out, TP_SCRATCH, s->domain * s->h->nslots + s->slot);
}

/* Reduce-scatter along a rail; an extra's block is put aside. */
static bool blocks_reduced_along_rail(const void *arg, uint8_t where, int32_t index, struct tp_operand *out)
{
	const struct stage *s = arg;
	const struct hierarchy *h = s->h;
	if (where == TP_INPUT) return carried(h, index, h->place, s->slot) >= 0 && at(out, TP_SCRATCH, index * h->nslots + s->slot);
	return s->slot ? at(out, TP_SCRATCH, h->ndomains * h->nslots + s->slot) : at(out, TP_OUTPUT, 0);
}

typedef bool chunk_map(const void *arg, uint8_t where, int32_t index, struct tp_operand *out);

/* Runs a generator on the rank's domain, adding to the lanes of a stage. */
static void run_inside(struct hierarchy *h, int stage, enum tp_coll coll, int root_place, chunk_map *map, struct stage what,
	bool by_ref)
{
	struct tp_plan_spec spec = { coll, TP_ALGO_DIRECT, root_place, h->spec->nchannels, h->inside };
	struct tp_build_view view = { .ranks = h->order + h->first[h->domain], .lane_base = h->stage_lane[stage],
		.class_base = stage ? GATHER_CLASS : 0, .chunk = map, .arg = &what, .partial = true, .never_by_ref = !by_ref };
	what.h = h;
	tp_build_generate_view(h->b, &spec, h->place, &view);
}

static void run_across(struct hierarchy *h, chunk_map *map, struct stage what, bool by_ref)
{
	if (h->place >= h->nrails) return;
	struct tp_plan_spec spec = { h->spec->coll, tp_hierarchical_across(h->spec->coll, h->ndomains),
		tp_coll_has_root(h->spec->coll) ? h->spec->layout->domain[h->spec->root] : -1, h->spec->nchannels, h->across };
	struct tp_build_view view = { .ranks = h->rail, .lane_base = h->stage_lane[1], .chunk = map, .arg = &what,
		.never_by_ref = !by_ref };
	what.h = h;
	tp_build_generate_view(h->b, &spec, h->domain, &view);
}

static void begin_stage(struct hierarchy *h, int stage) { h->stage_lane[stage] = (int)h->b->nlanes; }

static void all_reduce(struct hierarchy *h)
{
	for (int q = 0; q < h->pieces; q++) {
		struct stage piece = { .piece = (h->domain + 1 + q) % h->pieces };      /* in the order in which the rails ask for them */
		run_inside(h, 0, TP_REDUCE_SCATTER, -1, segments_reduced, piece, true);
	}
	begin_stage(h, 1);
	run_across(h, own_segment, (struct stage){ 0 }, true);
	begin_stage(h, 2);
	for (int q = 0; q < h->pieces; q++) {
		struct stage piece = { .piece = (h->domain + q) % h->pieces };
		run_inside(h, 2, TP_ALL_GATHER, -1, segments_gathered, piece, true);
	}
}

static void broadcast(struct hierarchy *h)
{
	int root = h->spec->root;
	if (h->domain == h->spec->layout->domain[root])
		run_inside(h, 0, TP_SCATTER, h->spec->layout->place[root], segments_scattered, (struct stage){ 0 }, true);
	begin_stage(h, 1);
	run_across(h, own_segment, (struct stage){ 0 }, true);
	begin_stage(h, 2);
	run_inside(h, 2, TP_ALL_GATHER, -1, segments_gathered, (struct stage){ 0 }, true);
}

static void reduce(struct hierarchy *h)
{
	int root = h->spec->root;
	run_inside(h, 0, TP_REDUCE_SCATTER, -1, segments_reduced_aside, (struct stage){ 0 }, true);
	begin_stage(h, 1);
	run_across(h, segment_to_root, (struct stage){ 0 }, false);
	begin_stage(h, 2);
	if (h->domain == h->spec->layout->domain[root])
		run_inside(h, 2, TP_GATHER, h->spec->layout->place[root], segments_to_root, (struct stage){ 0 }, false);
}

/* Extras and their rails pass blocks on: a step at each end. */
static void pass_block(struct hierarchy *h, int lane, bool to_rail)
{
	struct tp_builder *b = h->b;
	if (h->place >= h->nrails) {
		int rail = member(h, h->domain, h->place % h->nrails);
		tp_build_step(b, lane, 0);
		if (to_rail) {
			tp_build_read(b, TP_INPUT, 0);
			tp_build_give(b, rail, FOLD_CLASS, true);
		} else {
			tp_build_take(b, rail, FOLD_CLASS);
			tp_build_write(b, TP_OUTPUT, 0);
		}
		return;
	}
	for (int slot = 1; slot < h->nslots; slot++) {
		int extra = carried(h, h->domain, h->place, slot);
		if (extra < 0) break;
		tp_build_step(b, lane, 0);
		if (to_rail) {
			tp_build_take(b, extra, FOLD_CLASS);
			tp_build_write(b, TP_OUTPUT, extra);
		} else {
			tp_build_read(b, TP_SCRATCH, h->ndomains * h->nslots + slot);
			tp_build_give(b, extra, FOLD_CLASS, false);
		}
	}
}

static void all_gather(struct hierarchy *h)
{
	pass_block(h, tp_build_lane(h->b), true);
	begin_stage(h, 1);
	for (int slot = 0; slot < h->nslots; slot++) run_across(h, blocks_along_rail, (struct stage){ .slot = slot }, true);
	begin_stage(h, 2);
	for (int slot = 0; slot < h->nslots; slot++)        /* in the order in which the rails bring them */
		for (int i = 0; i < h->ndomains; i++) {
			struct stage from = { .domain = (h->domain + h->ndomains - i) % h->ndomains, .slot = slot };
			run_inside(h, 2, TP_ALL_GATHER, -1, blocks_from_rails, from, true);
		}
}

static void reduce_scatter(struct hierarchy *h)
{
	for (int slot = 0; slot < h->nslots; slot++)
		for (int i = 1; i <= h->ndomains; i++) {
			struct stage to = { .domain = (h->domain + i) % h->ndomains, .slot = slot };
			run_inside(h, 0, TP_REDUCE_SCATTER, -1, blocks_to_rails, to, true);
		}
	begin_stage(h, 1);
	for (int slot = 0; slot < h->nslots; slot++) run_across(h, blocks_reduced_along_rail, (struct stage){ .slot = slot }, false);
	begin_stage(h, 2);
	pass_block(h, tp_build_lane(h->b), false);
}

enum tp_algo tp_hierarchical_across(enum tp_coll coll, int ndomains)
{
	bool few = ndomains <= FEW_DOMAINS;
	switch (coll) {
	case TP_ALL_REDUCE: return few ? TP_ALGO_TWO_SHOT : TP_ALGO_TREE;
	case TP_ALL_GATHER: case TP_REDUCE_SCATTER: return few ? TP_ALGO_DIRECT : TP_ALGO_RING;
	default: return TP_ALGO_RING;
	}
}

static const char *hierarchical_refuses(const struct tp_plan_spec *spec)
{
	const struct tp_layout *layout = spec->layout;
	if (layout->ndomains == 1) return "all ranks are in one domain";
	if (layout->ndomains == layout->nranks) return "each rank is a domain of its own";
	switch (spec->coll) {
	case TP_ALL_REDUCE: case TP_ALL_GATHER: case TP_REDUCE_SCATTER: case TP_BROADCAST: case TP_REDUCE: return NULL;
	default: return "every byte has one receiver, so going by way of others saves nothing across domains";
	}
}

/* The pieces that the stage across makes of a segment. */
static int segment_pieces(const struct tp_plan_spec *spec)
{
	enum tp_algo algo = tp_hierarchical_across(spec->coll, spec->layout->ndomains);
	if (spec->coll != TP_ALL_REDUCE) return 1;
	return algo == TP_ALGO_TWO_SHOT ? spec->layout->ndomains : 2;
}

static void hierarchical_describe(const struct tp_plan_spec *spec, struct tp_plan *plan)
{
	int nrails, nslots;
	count_rails(spec->layout, &nrails, &nslots);
	if (spec->coll != TP_ALL_GATHER && spec->coll != TP_REDUCE_SCATTER) plan->pieces = (uint32_t)(nrails * segment_pieces(spec));
}

static bool set_up(struct hierarchy *h)
{
	const struct tp_layout *layout = h->spec->layout;
	int position;
	count_rails(layout, &h->nrails, &h->nslots);
	h->ndomains = layout->ndomains;
	h->domain = layout->domain[h->rank];
	h->place = layout->place[h->rank];
	h->size = layout->domain_size[h->domain];
	h->pieces = segment_pieces(h->spec);
	h->order = tp_build_order(h->b, layout, h->rank, &position);
	int *zeros = tp_alloc((size_t)layout->nranks, sizeof(int), "a plan's domains");
	h->first = tp_alloc(2 * (size_t)h->ndomains, sizeof(int), "a plan's domains");
	if (h->order && zeros && h->first && tp_layout_create(h->size, zeros, &h->inside) == ncclSuccess) {
		h->rail = h->first + h->ndomains;
		for (int d = 1; d < h->ndomains; d++) h->first[d] = h->first[d - 1] + layout->domain_size[d - 1];
		for (int d = 0; d < h->ndomains; d++) h->rail[d] = member(h, d, h->place);
		for (int d = 0; d < h->ndomains; d++) zeros[d] = d;
		if (tp_layout_create(h->ndomains, zeros, &h->across) != ncclSuccess) h->b->failed = true;
	} else {
		h->b->failed = true;
	}
	free(zeros);
	return !h->b->failed;
}

static void hierarchical_generate(struct tp_builder *b, const struct tp_plan_spec *spec, int rank)
{
	struct hierarchy h = { .b = b, .spec = spec, .rank = rank };
	if (set_up(&h)) {
		switch (spec->coll) {
		case TP_ALL_REDUCE: all_reduce(&h); break;
		case TP_ALL_GATHER: all_gather(&h); break;
		case TP_REDUCE_SCATTER: reduce_scatter(&h); break;
		case TP_BROADCAST: broadcast(&h); break;
		default: reduce(&h); break;
		}
		uint32_t outputs = spec->coll == TP_ALL_GATHER ? (uint32_t)spec->layout->nranks : (uint32_t)(h.nrails * h.pieces);
		tp_build_join(b, h.stage_lane, 3, outputs, (uint32_t)((h.ndomains + 1) * h.nslots + 2));
	}
	free(h.order);
	free(h.first);
	tp_layout_free(h.inside);
	tp_layout_free(h.across);
}

const struct tp_generator tp_generator_hierarchical = { hierarchical_refuses, hierarchical_describe, hierarchical_generate };

#include <stdlib.h>
#include <string.h>

#include "plan/build.h"

bool tp_build_room(struct tp_builder *b, void **array, uint32_t count, uint32_t *room, size_t bytes)
{
	if (b->failed) return false;
	if (count < *room) return true;
	uint32_t more = *room ? *room * 2 : 16;
	void *grown = realloc(*array, more * bytes);
	if (!grown) {
		TP_WARN("Out of memory while making the plan of rank %d (%zu bytes)", b->rank, more * bytes);
		b->failed = true;
		return false;
	}
	*array = grown;
	*room = more;
	return true;
}

void tp_build_begin(struct tp_builder *b, int rank, int channel)
{
	*b = (struct tp_builder){ .rank = rank, .channel = channel, .open_lane = -1 };
}

static struct tp_step *open_step(struct tp_builder *b)
{
	struct tp_build_lane *lane = &b->lanes[b->open_lane];
	return &lane->steps[lane->nsteps - 1];
}

static void end_step(struct tp_builder *b)
{
	if (b->open_lane >= 0 && !b->failed) {
		struct tp_build_lane *lane = &b->lanes[b->open_lane];
		const struct tp_step *step = open_step(b);
		bool idle = !step->ndst && step->nsrc == 1 && lane->operands[step->first].where != TP_LINK;
		if (b->drop || idle) {
			lane->noperands = step->first;
			lane->nsteps--;
		}
	}
	b->open_lane = -1;
	b->drop = false;
}

int tp_build_lane(struct tp_builder *b)
{
	uint32_t lane = (uint32_t)(b->view.lane_base + b->next_lane++);
	while (b->nlanes <= lane) {
		if (!tp_build_room(b, (void **)&b->lanes, b->nlanes, &b->lanes_room, sizeof(*b->lanes))) break;
		b->lanes[b->nlanes++] = (struct tp_build_lane){ .transfer = -1 };
	}
	return (int)lane;
}

void tp_build_step(struct tp_builder *b, int lane, unsigned flags)
{
	end_step(b);
	if (b->failed) return;
	struct tp_build_lane *l = &b->lanes[lane];
	if (!tp_build_room(b, (void **)&l->steps, l->nsteps, &l->steps_room, sizeof(*l->steps))) return;
	if (b->view.partial) flags &= ~(unsigned)TP_STEP_FINAL;
	l->steps[l->nsteps++] = (struct tp_step){ .flags = (uint16_t)flags, .first = l->noperands };
	b->open_lane = lane;
}

static void add(struct tp_builder *b, bool source, struct tp_operand operand)
{
	if (b->failed) return;
	struct tp_build_lane *l = &b->lanes[b->open_lane];
	if (!tp_build_room(b, (void **)&l->operands, l->noperands, &l->operands_room, sizeof(*l->operands))) return;
	struct tp_step *step = open_step(b);
	if (!source) {
		l->operands[l->noperands++] = operand;
		step->ndst++;
		return;
	}
	/* A source that comes late (a join's token) goes before the destinations. */
	struct tp_operand *at = &l->operands[step->first + step->nsrc];
	memmove(at + 1, at, step->ndst * sizeof(*at));
	*at = operand;
	l->noperands++;
	step->nsrc++;
}

static uint32_t hash_link(const struct tp_plan_link *l)
{
	return ((uint32_t)l->from * 0x9e3779b1u ^ (uint32_t)l->to * 0x85ebca6bu ^ (uint32_t)l->lane_class * 0xc2b2ae35u) >> 7;
}

static bool grow_links(struct tp_builder *b)
{
	uint32_t room = b->links_room;
	if (!tp_build_room(b, (void **)&b->links, b->nlinks, &b->links_room, sizeof(*b->links))) return false;
	if (room == b->links_room) return true;
	free(b->link_hash);
	b->link_hash = tp_alloc(b->links_room * 2, sizeof(*b->link_hash), "a plan's links");
	if (!b->link_hash) { b->failed = true; return false; }
	for (uint32_t i = 0; i < b->nlinks; i++) {
		if (b->links[i].from == b->links[i].to) continue;
		uint32_t h = hash_link(&b->links[i]);
		while (b->link_hash[h & (b->links_room * 2 - 1)]) h++;
		b->link_hash[h & (b->links_room * 2 - 1)] = i + 1;
	}
	return true;
}

static int32_t find_link(struct tp_builder *b, int from, int to, int lane_class)
{
	struct tp_plan_link link = { .from = from, .to = to, .lane_class = (uint8_t)lane_class };
	if (!grow_links(b)) return 0;
	uint32_t h = hash_link(&link), mask = b->links_room * 2 - 1;
	for (; b->link_hash[h & mask]; h++) {
		const struct tp_plan_link *l = &b->links[b->link_hash[h & mask] - 1];
		if (l->from == from && l->to == to && l->lane_class == lane_class) return (int32_t)b->link_hash[h & mask] - 1;
	}
	b->link_hash[h & mask] = b->nlinks + 1;
	b->links[b->nlinks] = link;
	return (int32_t)b->nlinks++;
}

static int real_rank(const struct tp_builder *b, int rank) { return b->view.ranks ? b->view.ranks[rank] : rank; }

void tp_build_take(struct tp_builder *b, int from, int lane_class)
{
	int32_t link = find_link(b, real_rank(b, from), b->rank, b->view.class_base + lane_class);
	add(b, true, (struct tp_operand){ TP_LINK, 0, link });
}

void tp_build_give(struct tp_builder *b, int to, int lane_class, bool by_ref)
{
	int32_t link = find_link(b, b->rank, real_rank(b, to), b->view.class_base + lane_class);
	add(b, false, (struct tp_operand){ TP_LINK, by_ref && !b->view.never_by_ref, link });
}

/* Would the open step copy a chunk onto itself? A view may have made one of two chunks. */
static bool copies_itself(const struct tp_builder *b, const struct tp_operand *to)
{
	if (b->failed || !b->view.chunk) return false;
	const struct tp_build_lane *l = &b->lanes[b->open_lane];
	const struct tp_step *s = &l->steps[l->nsteps - 1];
	const struct tp_operand *from = &l->operands[s->first];
	return s->nsrc == 1 && !(s->flags & TP_STEP_FINAL) && from->where == to->where && from->index == to->index;
}

static void add_chunk(struct tp_builder *b, bool source, enum tp_where where, int32_t chunk)
{
	struct tp_operand operand = { (uint8_t)where, 0, chunk };
	if (b->view.chunk && !b->view.chunk(b->view.arg, (uint8_t)where, chunk, &operand)) b->drop = true;
	else if (source || !copies_itself(b, &operand)) add(b, source, operand);
}

void tp_build_read(struct tp_builder *b, enum tp_where where, int32_t chunk) { add_chunk(b, true, where, chunk); }
void tp_build_write(struct tp_builder *b, enum tp_where where, int32_t chunk) { add_chunk(b, false, where, chunk); }

int tp_build_local(struct tp_builder *b, bool token)
{
	if (!grow_links(b)) return 0;
	b->links[b->nlinks] = (struct tp_plan_link){ b->rank, b->rank, (uint8_t)b->nlocal++, token };
	return (int)b->nlinks++;
}

void tp_build_take_local(struct tp_builder *b, int link) { add(b, true, (struct tp_operand){ TP_LINK, 0, link }); }
void tp_build_give_local(struct tp_builder *b, int link) { add(b, false, (struct tp_operand){ TP_LINK, 0, link }); }
void tp_build_give_local_ref(struct tp_builder *b, int link) { add(b, false, (struct tp_operand){ TP_LINK, 1, link }); }

int *tp_build_order(struct tp_builder *b, const struct tp_layout *layout, int rank, int *at)
{
	int *order = tp_alloc((size_t)layout->nranks + (size_t)layout->ndomains, sizeof(*order), "the order of a plan's ranks");
	if (!order) {
		b->failed = true;
		return NULL;
	}
	int *first = order + layout->nranks;
	for (int d = 1; d < layout->ndomains; d++) first[d] = first[d - 1] + layout->domain_size[d - 1];
	for (int r = 0; r < layout->nranks; r++) order[first[layout->domain[r]] + layout->place[r]] = r;
	*at = first[layout->domain[rank]] + layout->place[rank];
	return order;
}

int *tp_build_ring_order(struct tp_builder *b, const struct tp_layout *layout, int rank, int *at)
{
	int *order = tp_build_order(b, layout, rank, at);
	if (!order || !layout->norders) return order;
	memcpy(order, layout->orders + (size_t)(b->channel % layout->norders) * (size_t)layout->nranks, (size_t)layout->nranks * sizeof(*order));
	for (*at = 0; order[*at] != rank; (*at)++) { }
	return order;
}

void tp_build_describe(const struct tp_plan_spec *spec, struct tp_plan *plan)
{
	int n = spec->layout->nranks;
	plan->spec = *spec;
	plan->shape = TP_SHAPE_STEPS;
	plan->pieces = 1;
	plan->scratch_chunks = 0;
	plan->input_blocks = tp_coll_input_is_blocks(spec->coll) ? (uint32_t)n : 1;
	plan->output_blocks = tp_coll_output_is_blocks(spec->coll) ? (uint32_t)n : 1;
	if (n > 1 && tp_generator_of(spec->algo)->describe) tp_generator_of(spec->algo)->describe(spec, plan);
}

void tp_build_generate(struct tp_builder *b, const struct tp_plan_spec *spec, int rank)
{
	if (spec->layout->nranks == 1) {
		int lane = tp_build_lane(b);
		tp_build_step(b, lane, tp_coll_reduces(spec->coll) ? TP_STEP_REDUCE | TP_STEP_FINAL : 0);
		tp_build_read(b, TP_INPUT, 0);
		tp_build_write(b, TP_OUTPUT, 0);
	} else {
		tp_generator_of(spec->algo)->generate(b, spec, rank);
	}
	end_step(b);
}

void tp_build_generate_view(struct tp_builder *b, const struct tp_plan_spec *spec, int rank, const struct tp_build_view *view)
{
	struct tp_build_view outer = b->view;
	int next_lane = b->next_lane;
	end_step(b);
	b->view = *view;
	b->next_lane = 0;
	tp_build_generate(b, spec, rank);
	b->view = outer;
	b->next_lane = TP_MAX(next_lane, (int)b->nlanes - outer.lane_base);
}

static void free_builder(struct tp_builder *b)
{
	for (uint32_t i = 0; i < b->nlanes; i++) {
		free(b->lanes[i].steps);
		free(b->lanes[i].operands);
	}
	free(b->lanes);
	free(b->links);
	free(b->link_hash);
}

/* Links that only dropped steps named are taken out, so that no executor connects them. */
static void drop_unused_links(struct tp_builder *b)
{
	if (!b->nlinks) return;
	uint32_t *number = b->link_hash, used = 0;      /* no longer needed as a hash; has room for all */
	memset(number, 0, b->nlinks * sizeof(*number));
	for (uint32_t i = 0; i < b->nlanes; i++)
		for (uint32_t o = 0; o < b->lanes[i].noperands; o++)
			if (b->lanes[i].operands[o].where == TP_LINK) number[b->lanes[i].operands[o].index] = 1;
	for (uint32_t l = 0; l < b->nlinks; l++) {
		if (!number[l]) continue;
		b->links[used] = b->links[l];
		number[l] = used++;
	}
	b->nlinks = used;
	for (uint32_t i = 0; i < b->nlanes; i++)
		for (uint32_t o = 0; o < b->lanes[i].noperands; o++) {
			struct tp_operand *operand = &b->lanes[i].operands[o];
			if (operand->where == TP_LINK) operand->index = (int32_t)number[operand->index];
		}
}

static ncclResult_t lay_out(struct tp_builder *b, struct tp_program *p)
{
	for (uint32_t i = 0; i < b->nlanes; i++) {
		p->nlanes += b->lanes[i].nsteps > 0;
		p->nsteps += b->lanes[i].nsteps;
		p->noperands += b->lanes[i].noperands;
	}
	drop_unused_links(b);
	p->nlinks = b->nlinks;
	p->lanes = tp_alloc(TP_MAX(p->nlanes, 1), sizeof(*p->lanes), "a plan's lanes");
	p->steps = tp_alloc(TP_MAX(p->nsteps, 1), sizeof(*p->steps), "a plan's steps");
	p->operands = tp_alloc(TP_MAX(p->noperands, 1), sizeof(*p->operands), "a plan's operands");
	p->links = tp_alloc(TP_MAX(p->nlinks, 1), sizeof(*p->links), "a plan's links");
	if (!p->lanes || !p->steps || !p->operands || !p->links) return ncclSystemError;
	uint32_t lane = 0, step = 0, operand = 0;
	for (uint32_t i = 0; i < b->nlanes; i++) {
		const struct tp_build_lane *l = &b->lanes[i];
		if (!l->nsteps) continue;
		p->lanes[lane++] = (struct tp_lane){ step, l->nsteps, l->transfer, l->after };
		for (uint32_t s = 0; s < l->nsteps; s++) {
			p->steps[step] = l->steps[s];
			p->steps[step++].first += operand;
		}
		memcpy(p->operands + operand, l->operands, l->noperands * sizeof(*l->operands));
		operand += l->noperands;
	}
	if (b->nlinks) memcpy(p->links, b->links, b->nlinks * sizeof(*b->links));
	return ncclSuccess;
}

ncclResult_t tp_build_end(struct tp_builder *b, struct tp_program *out)
{
	struct tp_program p = { .rank = b->rank, .channel = b->channel };
	end_step(b);
	ncclResult_t result = b->failed ? ncclSystemError : lay_out(b, &p);
	free_builder(b);
	if (result != ncclSuccess) tp_program_free(&p);
	else *out = p;
	return result;
}

void tp_program_free(struct tp_program *p)
{
	free(p->lanes);
	free(p->steps);
	free(p->operands);
	free(p->links);
}

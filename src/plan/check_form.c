/* What can be said of programs without running them: that every index is in its range, that each end of a link belongs to
 * one lane, that a reference has a chunk to refer to, and that a declared shape is that shape. */
#include <stdlib.h>

#include "plan/check.h"

struct form {
	struct tp_check *c;
	const struct tp_plan *plan;
	const struct tp_program *p;
	int lane, step;
	int *user[2];               /* per link, as source and as destination: the last lane that used it + 1 */
	uint32_t *last_step[2];     /* and its step + 1 */
};

#define MALFORMED(f, ...) tp_check_fail((f)->c, TP_CHECK_MALFORMED, (f)->p->rank, (f)->lane, (f)->step, -1, __VA_ARGS__)

static bool follows(const struct tp_program *p, int lane, int before)
{
	for (uint32_t after = p->lanes[lane].after; after; after = p->lanes[after - 1].after)
		if ((int)after - 1 == before) return true;
	return false;
}

static ncclResult_t check_link_operand(struct form *f, const struct tp_operand *o, bool source)
{
	if (o->index < 0 || (uint32_t)o->index >= f->p->nlinks) return MALFORMED(f, "names link %d of %u", o->index, f->p->nlinks);
	const struct tp_plan_link *l = &f->p->links[o->index];
	bool p2p = f->plan->spec.coll == TP_SEND_RECV;
	if (l->from < 0 || l->to < 0 || l->from >= f->c->nranks || l->to >= f->c->nranks)
		return MALFORMED(f, "uses a link from rank %d to rank %d of %d ranks", l->from, l->to, f->c->nranks);
	if ((source ? l->to : l->from) != f->p->rank)
		return MALFORMED(f, "%s a link from rank %d to rank %d", source ? "takes from" : "gives to", l->from, l->to);
	if (l->from != l->to && (p2p ? l->lane_class != TP_LINK_P2P : l->lane_class >= TP_LINK_P2P))
		return MALFORMED(f, "uses a link of class %d, which isn't for %s", l->lane_class, p2p ? "send and receive" : "collectives");
	if (l->token && l->from != l->to) return MALFORMED(f, "sends a token to rank %d: tokens are local", l->to);
	int *user = &f->user[source ? 0 : 1][o->index];
	uint32_t *last = &f->last_step[source ? 0 : 1][o->index];
	uint32_t here = f->p->lanes[f->lane].first_step + (uint32_t)f->step + 1;
	if (*user && *user != f->lane + 1 && !follows(f->p, f->lane, *user - 1))
		return MALFORMED(f, "uses an end of the link from rank %d to rank %d that lane %d uses too", l->from, l->to, *user - 1);
	if (*last == here) return MALFORMED(f, "uses the link from rank %d to rank %d twice", l->from, l->to);
	*user = f->lane + 1;
	*last = here;
	return ncclSuccess;
}

static ncclResult_t check_buffer_operand(struct form *f, const struct tp_operand *o, bool source)
{
	const struct tp_plan *plan = f->plan;
	uint32_t chunks = plan->scratch_chunks;
	if (o->where > TP_SCRATCH) return MALFORMED(f, "names place %d, which isn't one", o->where);
	if (o->where == TP_INPUT) {
		if (!source) return MALFORMED(f, "writes to INPUT");
		if (!tp_check_has_input(plan, f->p->rank)) return MALFORMED(f, "reads INPUT, which only the root has");
		chunks = plan->input_blocks * plan->pieces;
	} else if (o->where == TP_OUTPUT) {
		if (!tp_check_has_output(plan, f->p->rank)) return MALFORMED(f, "uses OUTPUT, which only the root has");
		chunks = plan->output_blocks * plan->pieces;
	}
	if (o->by_ref) return MALFORMED(f, "has a buffer operand marked by reference");
	if (o->index < 0 || (uint32_t)o->index >= chunks) return MALFORMED(f, "names chunk %d of %u", o->index, chunks);
	return ncclSuccess;
}

static ncclResult_t check_step(struct form *f, const struct tp_step *s)
{
	if ((uint64_t)s->first + s->nsrc + s->ndst > f->p->noperands) return MALFORMED(f, "has operands beyond the last");
	int values = 0, source_buffers = 0, output_buffers = 0, takers = 0, refs = 0;
	for (uint32_t i = 0; i < (uint32_t)s->nsrc + s->ndst; i++) {
		const struct tp_operand *o = &f->p->operands[s->first + i];
		bool source = i < s->nsrc, token;
		if (o->where == TP_LINK) TP_TRY(check_link_operand(f, o, source));
		else TP_TRY(check_buffer_operand(f, o, source));
		token = o->where == TP_LINK && f->p->links[o->index].token;
		if (source) {
			if (o->by_ref) return MALFORMED(f, "has a source marked by reference");
			values += !token;
			source_buffers += o->where != TP_LINK;
		} else {
			takers += !token;
			output_buffers += o->where != TP_LINK;
			refs += o->by_ref != 0;
		}
	}
	bool reduce = s->flags & TP_STEP_REDUCE;
	if ((s->flags & TP_STEP_FINAL) && !reduce) return MALFORMED(f, "is final, but reduces nothing");
	if (reduce ? values < 1 : values > 1) return MALFORMED(f, "makes one value of %d sources and %s", values,
		reduce ? "reduces" : "doesn't reduce");
	if (takers && !values) return MALFORMED(f, "gives a value but has none");
	if (refs && !output_buffers && (reduce || !source_buffers))
		return MALFORMED(f, "gives by reference, but its value lies in no buffer");
	return ncclSuccess;
}

static ncclResult_t check_program(struct form *f)
{
	const struct tp_program *p = f->p;
	uint32_t next = 0;
	for (f->lane = 0; f->lane < (int)p->nlanes; f->lane++) {
		const struct tp_lane *l = &p->lanes[f->lane];
		f->step = -1;
		if (l->first_step != next || !l->nsteps || l->nsteps > p->nsteps - next)
			return MALFORMED(f, "has steps %u to %u of %u", l->first_step, l->first_step + l->nsteps, p->nsteps);
		if ((l->transfer >= 0) != (f->plan->spec.coll == TP_SEND_RECV)) return MALFORMED(f, "moves transfer %d", l->transfer);
		if (l->after > (uint32_t)f->lane) return MALFORMED(f, "comes after lane %u", l->after - 1);
		next += l->nsteps;
		for (f->step = 0; f->step < (int)l->nsteps; f->step++) TP_TRY(check_step(f, &p->steps[l->first_step + (uint32_t)f->step]));
	}
	f->lane = f->step = -1;
	if (next != p->nsteps) return MALFORMED(f, "%u steps are in no lane", p->nsteps - next);
	for (uint32_t l = 0; l < p->nlinks; l++) {
		if (p->links[l].from != p->links[l].to || (f->user[0][l] && f->user[1][l])) continue;
		f->lane = TP_MAX(f->user[0][l], f->user[1][l]) - 1;
		return MALFORMED(f, "has a local link of which one end is unused");
	}
	return ncclSuccess;
}

ncclResult_t tp_check_form(struct tp_check *c, const struct tp_plan *plan)
{
	ncclResult_t result = ncclSuccess;
	for (int r = 0; r < c->nranks && result == ncclSuccess; r++) {
		const struct tp_program *p = &plan->programs[(uint32_t)r * (uint32_t)plan->spec.nchannels + (uint32_t)c->channel];
		struct form f = { .c = c, .plan = plan, .p = p, .lane = -1, .step = -1 };
		size_t room = TP_MAX(p->nlinks, 1);
		for (int i = 0; i < 2; i++) {
			f.user[i] = tp_alloc(room, sizeof(int), "the plan checker");
			f.last_step[i] = tp_alloc(room, sizeof(uint32_t), "the plan checker");
			if (!f.user[i] || !f.last_step[i]) result = ncclSystemError;
		}
		if (result == ncclSuccess && (p->rank != r || p->channel != c->channel))
			result = MALFORMED(&f, "stands where rank %d's program of channel %d belongs", r, c->channel);
		if (result == ncclSuccess) result = check_program(&f);
		for (int i = 0; i < 2; i++) {
			free(f.user[i]);
			free(f.last_step[i]);
		}
	}
	return result;
}

/* The shapes, operand by operand, as fused code performs them. */
struct shape {
	struct tp_check *c;
	const struct tp_program *p;
	int n, lane, step;
};

static bool is_buffer(const struct tp_operand *o, enum tp_where where, int32_t chunk)
{
	return o->where == where && o->index == chunk;
}

static bool is_link(const struct shape *s, const struct tp_operand *o, int from, int to, int lane_class)
{
	if (o->where != TP_LINK) return false;
	const struct tp_plan_link *l = &s->p->links[o->index];
	return l->from == from && l->to == to && l->lane_class == lane_class;
}

/* The step at hand, if it has these numbers of operands and these flags. */
static const struct tp_operand *step_like(const struct shape *s, int flags, int nsrc, int ndst)
{
	if (s->lane >= (int)s->p->nlanes || s->step >= (int)s->p->lanes[s->lane].nsteps) return NULL;
	const struct tp_step *step = &s->p->steps[s->p->lanes[s->lane].first_step + (uint32_t)s->step];
	if (step->flags != flags || step->nsrc != nsrc || step->ndst != ndst) return NULL;
	return &s->p->operands[step->first];
}

/* Input chunk to the next n - 1 ranks in one step (chunk >= 0), or to each of them its own in a step each. */
static bool gives_input(struct shape *s)
{
	const struct tp_operand *o = step_like(s, 0, 1, s->n - 1);
	if (!o || !is_buffer(o, TP_INPUT, 0)) return false;
	for (int i = 1; i < s->n; i++)
		if (!is_link(s, &o[i], s->p->rank, (s->p->rank + i) % s->n, 0)) return false;
	return true;
}

static bool reduces_all(struct shape *s, int32_t own, int ndst)
{
	const struct tp_operand *o = step_like(s, TP_STEP_REDUCE | TP_STEP_FINAL, s->n, ndst);
	for (int p = 0; o && p < s->n; p++) {
		if (p == s->p->rank ? !is_buffer(&o[p], TP_INPUT, own) : !is_link(s, &o[p], p, s->p->rank, 0)) return false;
	}
	return o && is_buffer(&o[s->n], TP_OUTPUT, own);
}

static bool is_one_shot(struct shape *s)
{
	if (s->p->nlanes != 1 || s->p->nsteps != 2) return false;
	s->step = 0;
	if (!gives_input(s)) return false;
	s->step = 1;
	return reduces_all(s, 0, 1);
}

static bool is_two_shot(struct shape *s)
{
	int rank = s->p->rank, n = s->n;
	if (s->p->nlanes != 3 || (int)s->p->nsteps != 2 * n - 1) return false;
	for (s->lane = 0, s->step = 0; s->step < n - 1; s->step++) {
		const struct tp_operand *o = step_like(s, 0, 1, 1);
		int peer = (rank + s->step + 1) % n;
		if (!o || !is_buffer(&o[0], TP_INPUT, peer) || !is_link(s, &o[1], rank, peer, 0)) return false;
	}
	s->lane = 1;
	s->step = 0;
	if (!reduces_all(s, rank, n)) return false;
	const struct tp_operand *own = step_like(s, TP_STEP_REDUCE | TP_STEP_FINAL, n, n);
	for (int i = 1; i < n; i++)
		if (!is_link(s, &own[n + i], rank, (rank + i) % n, 1)) return false;
	for (s->lane = 2, s->step = 0; s->step < n - 1; s->step++) {
		const struct tp_operand *o = step_like(s, 0, 1, 1);
		int peer = (rank + n - s->step - 1) % n;
		if (!o || !is_link(s, &o[0], peer, rank, 1) || !is_buffer(&o[1], TP_OUTPUT, peer)) return false;
	}
	return true;
}

/* What a step is to fused code: it gives a buffer chunk, or takes what links hold into OUTPUT; neither: it can't run it. */
static bool gives_or_takes(const struct shape *s, const struct tp_step *step, bool *takes)
{
	const struct tp_operand *o = &s->p->operands[step->first];
	int links_in = 0, links_out = 0;
	for (int i = 0; i < step->nsrc + step->ndst; i++) {
		if (o[i].where == TP_SCRATCH) return false;
		if (o[i].where != TP_LINK) continue;
		const struct tp_plan_link *l = &s->p->links[o[i].index];
		if (l->from == l->to || l->lane_class) return false;
		*(i < step->nsrc ? &links_in : &links_out) += 1;
	}
	*takes = links_in > 0;
	if (*takes) return !links_out && step->ndst == 1 && (step->nsrc == 1 || step->flags & TP_STEP_REDUCE);
	return step->nsrc == 1 && step->ndst && !step->flags;
}

static bool is_direct(struct shape *s)
{
	bool taking = false, takes;
	for (s->lane = 0; s->lane < (int)s->p->nlanes; s->lane++) {
		const struct tp_lane *lane = &s->p->lanes[s->lane];
		for (s->step = 0; s->step < (int)lane->nsteps; s->step++) {
			const struct tp_step *step = &s->p->steps[lane->first_step + (uint32_t)s->step];
			if (!gives_or_takes(s, step, &takes)) return false;
			if (taking && !takes)
				for (int i = 0; i < step->ndst; i++)
					if (s->p->operands[step->first + step->nsrc + (uint32_t)i].where == TP_LINK) return false;
			taking |= takes;
		}
	}
	s->lane = s->step = 0;
	return true;
}

ncclResult_t tp_check_shape(struct tp_check *c, const struct tp_plan *plan)
{
	if (plan->shape == TP_SHAPE_STEPS) return ncclSuccess;
	for (int r = 0; r < c->nranks; r++) {
		const struct tp_program *p = &plan->programs[(uint32_t)r * (uint32_t)plan->spec.nchannels + (uint32_t)c->channel];
		struct shape s = { .c = c, .p = p, .n = c->nranks };
		bool two = plan->shape == TP_SHAPE_TWO_SHOT, direct = plan->shape == TP_SHAPE_DIRECT;
		bool right = two ? is_two_shot(&s) : direct ? is_direct(&s) : is_one_shot(&s);
		if (!right || plan->pieces != (two ? (uint32_t)c->nranks : 1u))
			return tp_check_fail(c, TP_CHECK_SHAPE, r, s.lane, s.step, -1, "isn't what %s code does, as the plan declares",
				two ? "two-shot" : direct ? "direct" : "one-shot");
	}
	return ncclSuccess;
}

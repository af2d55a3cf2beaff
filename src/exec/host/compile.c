/* A rank's programs made ready to run: links looked up, chunk indices split into block and piece, operands sorted by what
 * is done with them. Done once a plan (send/recv plans: once an operation), so that running needs no look-up. */
#include <stdlib.h>
#include <string.h>

#include "exec/host/internal.h"

enum { TOKEN_SLOTS = 8 };

static ncclResult_t resolve_link(struct tp_exec *exec, struct tp_exec_plan *out, struct tp_exec_program *program,
	const struct tp_plan_link *link, struct tp_exec_end *ends)
{
	int rank = exec->boot->rank;
	ends[0].token = ends[1].token = link->token;
	if (link->from == link->to) {
		/* Data rings get their memory when the chunk size is known (tp_exec_op_begin). */
		if (link->token) {
			TP_TRY(tp_link_self_create(0, TOKEN_SLOTS, rank, &ends[0].own, &ends[1].own));
			ends[0].link = &ends[0].own;
			ends[1].link = &ends[1].own;
		} else {
			out->all_shm = false;
		}
		return ncclSuccess;
	}
	struct tp_exec_end *end = &ends[link->to == rank];
	TP_TRY(tp_links_get(exec->links, program->channel, link->lane_class, link->from, link->to, &end->link));
	end->net = end->link->kind == TP_LINK_NET;
	if (end->link->kind != TP_LINK_SHM) out->all_shm = false;
	return ncclSuccess;
}

static void place_operand(const struct tp_plan *plan, struct tp_exec_program *program, const struct tp_operand *from, bool source,
	struct tp_exec_operand *to)
{
	*to = (struct tp_exec_operand){ .where = from->where, .by_ref = from->by_ref };
	if (from->where == TP_LINK) {
		to->end = &program->ends[2 * from->index + source];
	} else if (from->where == TP_SCRATCH) {
		to->block = (uint32_t)from->index;
	} else {
		to->block = (uint32_t)from->index / plan->pieces;
		to->piece = (uint32_t)from->index % plan->pieces;
	}
}

static void size_step(struct tp_exec_step *step)
{
	step->size_from = TP_SIZE_NONE;
	for (int i = 0; i < step->nsrc + step->nbuf; i++) {
		const struct tp_exec_operand *o = i < step->nsrc ? &step->src[i] : &step->buf[i - step->nsrc];
		enum tp_exec_size from = o->where == TP_LINK ? TP_SIZE_SLOT : o->where == TP_SCRATCH ? TP_SIZE_SCRATCH : TP_SIZE_CHUNK;
		if (from == TP_SIZE_SCRATCH && i >= step->nsrc) continue;
		if (from >= step->size_from) continue;
		step->size_from = from;
		step->size_block = o->block;
		step->size_piece = o->piece;
	}
}

static struct tp_exec_operand *compile_step(const struct tp_plan *plan, struct tp_exec_program *program,
	const struct tp_program *from, const struct tp_step *s, struct tp_exec_step *to, struct tp_exec_operand *at)
{
	const struct tp_operand *operands = &from->operands[s->first];
	to->flags = s->flags;
	struct { struct tp_exec_operand **list; uint16_t *count; bool source, link, token; } kinds[] = {
		{ &to->src, &to->nsrc, true, false, false }, { &to->take, &to->ntake, true, true, true },
		{ &to->buf, &to->nbuf, false, false, false }, { &to->out, &to->nout, false, true, false },
		{ &to->give, &to->ngive, false, true, true },
	};
	for (size_t k = 0; k < TP_ARRAY_LEN(kinds); k++) {
		*kinds[k].list = at;
		*kinds[k].count = 0;
		for (int i = 0; i < s->nsrc + s->ndst; i++) {
			const struct tp_operand *o = &operands[i];
			bool source = i < s->nsrc, is_link = o->where == TP_LINK, token = is_link && from->links[o->index].token;
			if (source != kinds[k].source || token != kinds[k].token) continue;
			if (!source && is_link != kinds[k].link) continue;
			place_operand(plan, program, o, source, at++);
			++*kinds[k].count;
		}
	}
	size_step(to);
	return at;
}

static ncclResult_t compile_program(struct tp_exec *exec, struct tp_exec_plan *out, const struct tp_program *from,
	struct tp_exec_program *program)
{
	const struct tp_plan *plan = out->plan;
	program->channel = from->channel;
	program->nlanes = from->nlanes;
	program->nends = 2 * from->nlinks;
	program->lanes = tp_alloc(from->nlanes + 1, sizeof(*program->lanes), "lanes");
	program->steps = tp_alloc(from->nsteps + 1, sizeof(*program->steps), "steps");
	program->operands = tp_alloc(from->noperands + 1, sizeof(*program->operands), "operands");
	program->ends = tp_alloc(program->nends + 1, sizeof(*program->ends), "the ends of links");
	program->scratch_bytes = tp_alloc(plan->scratch_chunks + 1, sizeof(size_t), "scratch chunks");
	if (!program->lanes || !program->steps || !program->operands || !program->ends || !program->scratch_bytes)
		return ncclSystemError;
	for (uint32_t l = 0; l < from->nlinks; l++)
		TP_TRY(resolve_link(exec, out, program, &from->links[l], &program->ends[2 * l]));
	struct tp_exec_operand *at = program->operands;
	for (uint32_t s = 0; s < from->nsteps; s++) at = compile_step(plan, program, from, &from->steps[s], &program->steps[s], at);
	for (uint32_t l = 0; l < from->nlanes; l++) {
		program->lanes[l] = (struct tp_exec_lane){ .first = &program->steps[from->lanes[l].first_step],
			.end = &program->steps[from->lanes[l].first_step + from->lanes[l].nsteps], .program = program,
			.after = from->lanes[l].after ? &program->lanes[from->lanes[l].after - 1] : NULL, .transfer = from->lanes[l].transfer };
	}
	return ncclSuccess;
}

/* Room for what the largest step takes, here and not while it runs. */
static ncclResult_t grow_sources(struct tp_exec *exec, const struct tp_plan *plan)
{
	size_t most = 2;
	for (uint32_t p = 0; p < plan->nprograms; p++)
		for (uint32_t s = 0; s < plan->programs[p].nsteps; s++) most = TP_MAX(most, plan->programs[p].steps[s].nsrc);
	if (most <= exec->sources_room) return ncclSuccess;
	free(exec->sources);
	free(exec->addresses);
	exec->sources_room = 0;
	exec->sources = tp_alloc(most, sizeof(*exec->sources), "sources of a step");
	exec->addresses = tp_alloc(most, sizeof(*exec->addresses), "sources of a step");
	if (!exec->sources || !exec->addresses) return ncclSystemError;
	exec->sources_room = most;
	return ncclSuccess;
}

/* The fused one-shot needs the links of the one program in rank order. */
static ncclResult_t find_pairs(struct tp_exec *exec, struct tp_exec_plan *out, const struct tp_program *from)
{
	int n = exec->boot->nranks;
	if (out->plan->shape != TP_SHAPE_ONE_SHOT || out->nprograms != 1 || n < 2 || !out->all_shm) return ncclSuccess;
	out->sends = tp_alloc((size_t)n, sizeof(*out->sends), "links of a one-shot");
	out->receives = tp_alloc((size_t)n, sizeof(*out->receives), "links of a one-shot");
	if (!out->sends || !out->receives) return ncclSystemError;
	for (uint32_t l = 0; l < from->nlinks; l++) {
		const struct tp_plan_link *link = &from->links[l];
		if (link->from == link->to) continue;
		if (link->from == exec->boot->rank) out->sends[link->to] = out->programs[0].ends[2 * l].link;
		else out->receives[link->from] = out->programs[0].ends[2 * l + 1].link;
	}
	return ncclSuccess;
}

ncclResult_t tp_exec_compile(struct tp_exec *exec, const struct tp_plan *plan, struct tp_exec_plan **out)
{
	struct tp_exec_plan *p = tp_alloc(1, sizeof(*p), "a plan made ready");
	if (!p) return ncclSystemError;
	*p = (struct tp_exec_plan){ .plan = plan, .spec = plan->spec, .source = plan->programs, .pieces = plan->pieces, .all_shm = true,
		.p2p = plan->spec.coll == TP_SEND_RECV, .fit_line = 0,
		.reduces = plan->spec.coll == TP_ALL_REDUCE || plan->spec.coll == TP_REDUCE_SCATTER || plan->spec.coll == TP_REDUCE };
	ncclResult_t result = ncclSystemError;
	p->programs = tp_alloc(plan->nprograms + 1, sizeof(*p->programs), "programs");
	if (!p->programs) goto free_plan;
	const struct tp_program *only = NULL;
	for (uint32_t i = 0; i < plan->nprograms; i++) {
		if (plan->programs[i].rank != exec->boot->rank) continue;
		if (plan->programs[i].channel >= exec->nchannels) {
			result = TP_FAIL(ncclInternalError, "rank %d: a %s plan uses channel %d of %d", exec->boot->rank,
				tp_coll_name(plan->spec.coll), plan->programs[i].channel, exec->nchannels);
			goto free_plan;
		}
		only = &plan->programs[i];
		result = compile_program(exec, p, only, &p->programs[p->nprograms++]);
		if (result != ncclSuccess) goto free_plan;
		p->nlanes += only->nlanes;
	}
	if (!only) {
		result = TP_FAIL(ncclInternalError, "a %s plan has no program of rank %d", tp_coll_name(plan->spec.coll), exec->boot->rank);
		goto free_plan;
	}
	result = grow_sources(exec, plan);
	if (result == ncclSuccess) result = find_pairs(exec, p, only);
	if (result != ncclSuccess) goto free_plan;
	*out = p;
	return ncclSuccess;
free_plan:
	tp_exec_plan_free(p);
	return result;
}

void tp_exec_plan_free(struct tp_exec_plan *plan)
{
	for (uint32_t i = 0; i < plan->nprograms; i++) {
		struct tp_exec_program *program = &plan->programs[i];
		for (uint32_t e = 0; program->ends && e < program->nends; e++) {
			if (e % 2 == 0 && program->ends[e].link == &program->ends[e].own) tp_link_self_destroy(&program->ends[e].own);
			free(program->ends[e].staging);
		}
		free(program->lanes);
		free(program->steps);
		free(program->operands);
		free(program->ends);
		free(program->scratch_bytes);
	}
	free(plan->programs);
	free(plan->sends);
	free(plan->receives);
	free(plan);
}

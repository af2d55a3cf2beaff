/* Plans to programs in device memory: links looked up, chunk indices split into block and piece, operands sorted by what is done
 * with them. Done once a plan. */
#include <stdlib.h>

#include "exec/cuda/internal.h"

/* One channel's program while it is made: the parts of struct tp_dev_program in arrays of their own. */
struct making {
	struct tp_cuda_exec *exec;
	const struct tp_plan *plan;
	const struct tp_program *from;
	struct tp_dev_program head;
	struct tp_dev_lane *lanes;
	struct tp_dev_step *steps;
	struct tp_dev_operand *operands;
	uint64_t *links;
	/* Of a link of the plan: the numbers of its ends in the program; whether its sender may be lent registered buffers. */
	uint32_t *sends, *receives;
	bool *lends, any_lends;
};

static ncclResult_t find_links(struct making *m)
{
	int rank = m->exec->boot->rank, channel = m->from->channel, nlocal[2] = { 0 };
	for (uint32_t l = 0; l < m->from->nlinks; l++) {
		const struct tp_plan_link *link = &m->from->links[l];
		uint64_t *end = &m->links[m->head.nlinks];
		m->sends[l] = m->receives[l] = m->head.nlinks;
		if (link->from == link->to) {
			TP_TRY(tp_cuda_local_ends(m->exec, channel, link->token, nlocal[link->token != 0]++, &end[0], &end[1]));
			m->receives[l]++;
			m->head.nlinks += 2;
		} else if (link->from == rank || link->to == rank) {
			TP_TRY(tp_cuda_link_end(m->exec, channel, link->lane_class, link->from, link->to, end));
			m->lends[l] = tp_cuda_link_lends(m->exec, channel, link->lane_class, link->from, link->to);
			m->head.nlinks++;
		}
	}
	return ncclSuccess;
}

static void place_operand(struct making *m, const struct tp_operand *o, bool source)
{
	struct tp_dev_operand *to = &m->operands[m->head.noperands++];
	*to = (struct tp_dev_operand){ .where = o->where, .block = (uint32_t)o->index };
	if (o->where == TP_LINK) {
		to->block = source ? m->receives[o->index] : m->sends[o->index];
	} else if (o->where != TP_SCRATCH) {
		to->block = (uint32_t)o->index / m->plan->pieces;
		to->piece = (uint16_t)((uint32_t)o->index % m->plan->pieces);
	}
}

/* What says how large the step's chunk is: a buffer, or else what lies in scratch memory, or else what comes. */
static void size_step(const struct making *m, struct tp_dev_step *step)
{
	step->size_from = TP_DEV_SIZE_NONE;
	for (uint16_t i = 0; i < step->nsrc + step->nbuf; i++) {
		bool source = i < step->nsrc;
		uint16_t at = (uint16_t)(source ? i : i + step->ntake);
		uint16_t where = m->operands[step->first + at].where;
		enum tp_dev_size from = where == TP_LINK ? TP_DEV_SIZE_SLOT : where == TP_SCRATCH ? TP_DEV_SIZE_SCRATCH : TP_DEV_SIZE_CHUNK;
		if (from >= step->size_from || (from == TP_DEV_SIZE_SCRATCH && !source)) continue;
		step->size_from = (uint8_t)from;
		step->size_operand = at;
	}
}

static bool is_token(const struct making *m, const struct tp_operand *o) { return o->where == TP_LINK && m->from->links[o->index].token; }

/* What plan.h says a reference is to: the only source of data, a buffer, where the step doesn't reduce; else the first buffer that is written. False: nothing that
 * the program can have registered. */
static bool find_loan(const struct making *m, const struct tp_step *s, bool *source)
{
	const struct tp_operand *operands = &m->from->operands[s->first], *only = NULL, *first = NULL;
	int nsrc = 0;
	for (int i = 0; i < s->nsrc; i++) {
		if (is_token(m, &operands[i])) continue;
		only = &operands[i];
		nsrc++;
	}
	for (int i = s->nsrc; i < s->nsrc + s->ndst && !first; i++)
		if (operands[i].where != TP_LINK) first = &operands[i];
	*source = nsrc == 1 && only->where != TP_LINK && !(s->flags & TP_STEP_REDUCE);
	const struct tp_operand *loan = *source ? only : first;
	return loan && (loan->where == TP_INPUT || loan->where == TP_OUTPUT);
}

static void make_step(struct making *m, const struct tp_step *s)
{
	const struct tp_operand *operands = &m->from->operands[s->first];
	struct tp_dev_step *to = &m->steps[m->head.nsteps++];
	bool from_source, has_loan = find_loan(m, s, &from_source);
	*to = (struct tp_dev_step){ .first = m->head.noperands, .flags = (uint8_t)(s->flags | (has_loan && from_source ? TP_DEV_STEP_LENDS_SOURCE : 0)) };
	struct { uint16_t *count; bool source, link, token, lends; } kinds[] = {
		{ &to->nsrc, true, false, false, false }, { &to->ntake, true, true, true, false }, { &to->nbuf, false, false, false, false },
		{ &to->nout, false, true, false, false }, { &to->nlend, false, true, false, true }, { &to->ngive, false, true, true, false },
	};
	for (size_t k = 0; k < TP_ARRAY_LEN(kinds); k++) {
		for (int i = 0; i < s->nsrc + s->ndst; i++) {
			const struct tp_operand *o = &operands[i];
			bool source = i < s->nsrc, is_link = o->where == TP_LINK, token = is_token(m, o);
			bool lends = has_loan && !source && is_link && !token && o->by_ref && m->lends[o->index];
			if (source != kinds[k].source || token != kinds[k].token || lends != kinds[k].lends || (!source && is_link != kinds[k].link)) continue;
			place_operand(m, o, source);
			++*kinds[k].count;
		}
	}
	to->nout = (uint16_t)(to->nout + to->nlend);
	m->any_lends |= to->nlend > 0;
	size_step(m, to);
	m->head.room = TP_MAX(m->head.room, (uint32_t)s->nsrc + s->ndst);
}

static ncclResult_t make_lanes(struct making *m)
{
	const struct tp_program *from = m->from;
	for (uint32_t s = 0; s < from->nsteps; s++) make_step(m, &from->steps[s]);
	for (uint32_t l = 0; l < from->nlanes; l++)
		if (from->lanes[l].nsteps) m->lanes[m->head.nlanes++] = (struct tp_dev_lane){ from->lanes[l].first_step, from->lanes[l].nsteps };
	if (m->head.nlanes > TP_DEV_LANES || m->head.room > TP_DEV_ROOM || m->plan->pieces > UINT16_MAX)
		return TP_FAIL(ncclInvalidUsage, "rank %d: a %s by %s of %d ranks has %u lanes and steps of up to %u chunks in %u pieces: too large for the GPU, which "
			"holds %d and %d and %d; another NCCL_ALGO would do", m->exec->boot->rank, tp_coll_name(m->plan->spec.coll),
			tp_algo_name(m->plan->spec.algo), m->exec->boot->nranks, m->head.nlanes, m->head.room, m->plan->pieces, TP_DEV_LANES, TP_DEV_ROOM,
			UINT16_MAX);
	m->head.ngroups = (uint16_t)TP_MAX(TP_MIN(m->head.nlanes, TP_DEV_GROUPS), 1);
	while (m->head.ngroups > 1 && TP_DEV_ROOM / m->head.ngroups < (int)m->head.room) m->head.ngroups--;
	return ncclSuccess;
}

static ncclResult_t take_scratch(struct making *m, size_t chunk_limit)
{
	if (!m->plan->scratch_chunks) return ncclSuccess;
	m->head.scratch_at = (uint32_t)tp_align_up(m->plan->scratch_chunks * sizeof(uint32_t), 128);
	return tp_cuda_take_memory(m->exec, m->head.scratch_at + m->plan->scratch_chunks * tp_align_up(chunk_limit, 128), "scratch memory", &m->head.scratch);
}

/* The parts as one piece, as the kernel reads it. */
static unsigned char *join(struct making *m, uint32_t *bytes)
{
	struct { uint32_t *at; const void *from; size_t bytes; } parts[] = {
		{ &m->head.lanes_at, m->lanes, m->head.nlanes * sizeof(*m->lanes) }, { &m->head.steps_at, m->steps, m->head.nsteps * sizeof(*m->steps) },
		{ &m->head.operands_at, m->operands, m->head.noperands * sizeof(*m->operands) },
		{ &m->head.links_at, m->links, m->head.nlinks * sizeof(*m->links) },
	};
	size_t at = tp_align_up(sizeof(m->head), 16);
	for (size_t i = 0; i < TP_ARRAY_LEN(parts); i++) {
		*parts[i].at = (uint32_t)at;
		at += tp_align_up(parts[i].bytes, 16);
	}
	unsigned char *whole = tp_alloc(1, at, "a program for the GPU");
	if (!whole) return NULL;
	m->head.bytes = (uint32_t)at;
	memcpy(whole, &m->head, sizeof(m->head));
	for (size_t i = 0; i < TP_ARRAY_LEN(parts); i++) memcpy(whole + *parts[i].at, parts[i].from, parts[i].bytes);
	*bytes = (uint32_t)at;
	return whole;
}

static ncclResult_t make_program(struct tp_cuda_exec *exec, struct tp_cuda_plan *p, const struct tp_program *from, unsigned char **out,
	uint32_t *bytes)
{
	struct making m = { .exec = exec, .plan = p->plan, .from = from };
	m.head.pieces = p->plan->pieces;
	m.head.input_blocks = p->plan->input_blocks;
	m.head.output_blocks = p->plan->output_blocks;
	m.head.flags = p->reduces ? TP_DEV_PROGRAM_REDUCES : 0;
	m.lanes = tp_alloc(from->nlanes + 1, sizeof(*m.lanes), "lanes");
	m.steps = tp_alloc(from->nsteps + 1, sizeof(*m.steps), "steps");
	m.operands = tp_alloc(from->noperands + 1, sizeof(*m.operands), "operands");
	m.links = tp_alloc(2 * from->nlinks + 1, sizeof(*m.links), "the ends of links");
	m.sends = tp_alloc(2 * from->nlinks + 1, sizeof(*m.sends), "the ends of links");
	m.lends = tp_alloc(from->nlinks + 1, sizeof(*m.lends), "the ends of links");
	ncclResult_t result = ncclSystemError;
	if (m.lanes && m.steps && m.operands && m.links && m.sends && m.lends) {
		m.receives = m.sends + from->nlinks;
		result = find_links(&m);
		if (result == ncclSuccess) result = make_lanes(&m);
		if (result == ncclSuccess) result = take_scratch(&m, p->chunk_limit);
		if (result == ncclSuccess && !(*out = join(&m, bytes))) result = ncclSystemError;
	}
	free(m.lanes);
	free(m.steps);
	free(m.operands);
	free(m.links);
	free(m.sends);
	free(m.lends);
	p->lends |= m.any_lends;
	return result;
}

/* The largest chunk, from what all ranks agree on only: which plans join lanes by rings that hold data is known by their algorithm. */
static size_t limit_chunks(const struct tp_cuda_exec *exec, const struct tp_plan *plan)
{
	enum { SCRATCH_BYTES = 1 << 20 };
	size_t limit = exec->chunk_limit;
	bool joins = plan->spec.algo == TP_ALGO_HIERARCHICAL || plan->spec.algo == TP_ALGO_HALVING_DOUBLING || plan->spec.algo == TP_ALGO_PAT;
	if (joins) limit = TP_MIN(limit, (size_t)TP_CUDA_LOCAL_BYTES);
	if (plan->scratch_chunks) limit = TP_MIN(limit, TP_MAX(SCRATCH_BYTES / plan->scratch_chunks / 128 * 128, 128));
	return limit;
}

/* A ring's slots are larger than others. */
static size_t limit_ring(const struct tp_cuda_exec *exec)
{
	size_t limit = tp_links_ring_capacity(exec->links);
	if (exec->boot->nranks == exec->boot->nhosts && exec->boot->nranks > 1) return exec->chunk_limit;
	return tp_links_have_net(exec->links) ? TP_MIN(limit, tp_links_inline_capacity(exec->links, true)) : limit;
}

static ncclResult_t upload_programs(struct tp_cuda_exec *exec, struct tp_cuda_plan *p, const struct tp_program *from, int nchannels)
{
	unsigned char **programs = tp_alloc((size_t)nchannels, sizeof(*programs), "programs");
	uint32_t *bytes = tp_alloc((size_t)nchannels, sizeof(*bytes), "programs");
	ncclResult_t result = programs && bytes ? ncclSuccess : ncclSystemError;
	for (int c = 0; c < nchannels && result == ncclSuccess; c++) {
		result = make_program(exec, p, &from[c], &programs[c], &bytes[c]);
		if (result == ncclSuccess) p->stride = TP_MAX(p->stride, bytes[c]);
	}
	if (result == ncclSuccess) result = tp_cuda_take_memory(exec, (size_t)p->stride * (size_t)nchannels, "a plan's programs", &p->programs);
	for (int c = 0; c < nchannels && result == ncclSuccess; c++)
		result = tp_cuda_upload(exec, p->programs + (uint64_t)c * p->stride, programs[c], bytes[c]);
	/* Also after an error: staging memory is used again. */
	ncclResult_t waited = tp_cuda_upload_wait(exec);
	for (int c = 0; programs && c < nchannels; c++) free(programs[c]);
	free(programs);
	free(bytes);
	return result == ncclSuccess ? waited : result;
}

ncclResult_t tp_cuda_compile(struct tp_cuda_exec *exec, const struct tp_plan *plan, struct tp_cuda_plan **out)
{
	const struct tp_program *from = NULL;
	for (uint32_t i = 0; i < plan->nprograms && !from; i++)
		if (plan->programs[i].rank == exec->boot->rank) from = &plan->programs[i];
	if (!from || plan->spec.nchannels > exec->nchannels)
		return TP_FAIL(ncclInternalError, "rank %d: a %s plan of %d channels for an executor of %d has %s program of this rank", exec->boot->rank,
			tp_coll_name(plan->spec.coll), plan->spec.nchannels, exec->nchannels, from ? "a" : "no");
	struct tp_cuda_plan *p = tp_alloc(1, sizeof(*p), "a plan on the GPU");
	if (!p) return ncclSystemError;
	enum tp_coll coll = plan->spec.coll;
	*p = (struct tp_cuda_plan){ .plan = plan, .spec = plan->spec, .source = plan->programs,
		.reduces = coll == TP_ALL_REDUCE || coll == TP_REDUCE_SCATTER || coll == TP_REDUCE, .chunk_limit = limit_chunks(exec, plan) };
	if (plan->spec.algo == TP_ALGO_RING && exec->boot->nranks > 1) p->ring_limit = limit_ring(exec);
	ncclResult_t result = upload_programs(exec, p, from, plan->spec.nchannels);
	if (result != ncclSuccess) free(p);
	else *out = p;
	return result;
}

/* The greedy run of the checker: lanes go as far as they can, a chunk carries its contributions, a step moves its lane's
 * clock. See check.c for why one run is enough. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "plan/check.h"

static struct tp_check_memory *memory_of(const struct tp_check *c, int op, int rank)
{
	return &c->memory[(size_t)op * (size_t)c->nranks + (size_t)rank];
}

static void enqueue(struct tp_check *c, int32_t lane)
{
	if (lane < 0 || c->lanes[lane].queued || c->lanes[lane].done) return;
	c->lanes[lane].queued = true;
	c->queue[(c->queue_first + c->queue_count++) % c->nlanes] = lane;
}

/* Clock snapshots, shared by all chunks that one step gives. */
static int32_t keep_clock(struct tp_check *c, const int16_t *clock)
{
	if (!c->nfree_clocks) {
		int32_t room = c->clocks_room ? c->clocks_room * 2 : 256;
		int16_t *clocks = realloc(c->clocks, (size_t)room * c->nclock * sizeof(*clocks));
		if (clocks) c->clocks = clocks;
		int32_t *users = realloc(c->clock_users, (size_t)room * sizeof(*users));
		if (users) c->clock_users = users;
		int32_t *unused = realloc(c->free_clocks, (size_t)room * sizeof(*unused));
		if (unused) c->free_clocks = unused;
		if (!clocks || !users || !unused) {
			TP_WARN("Out of memory in the plan checker (%d clocks of %u)", room, c->nclock);
			return -1;
		}
		for (int32_t i = room; i-- > c->clocks_room;) c->free_clocks[c->nfree_clocks++] = i;
		c->clocks_room = room;
	}
	int32_t i = c->free_clocks[--c->nfree_clocks];
	memcpy(c->clocks + (size_t)i * c->nclock, clock, c->nclock * sizeof(*clock));
	c->clock_users[i] = 0;
	return i;
}

static void join(int16_t *restrict into, const int16_t *restrict from, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) into[i] = into[i] > from[i] ? into[i] : from[i];
}

static ncclResult_t step_fail(struct tp_check *c, const struct tp_check_lane *l, enum tp_check_fault fault, const char *what)
{
	return tp_check_fail(c, fault, l->rank, l->number, (int)l->step, (int)l->round, "%s", what);
}

/* Begins the plan that a rank has come to, its lanes' clocks at what the rank knew at the end of the last. */
static ncclResult_t begin_op(struct tp_check *c, int rank)
{
	struct tp_check_rank *r = &c->ranks[rank];
	struct tp_check_memory *m = memory_of(c, (int)r->op, rank);
	TP_TRY(tp_check_memory_begin(c, (int)r->op, rank));
	r->lanes_left = (uint32_t)m->nlanes;
	for (int32_t i = m->first_lane; i < m->first_lane + m->nlanes; i++) {
		memcpy(c->lanes[i].clock, r->end_clock, c->nclock * sizeof(int16_t));
		if (!c->lanes[i].lane->after) enqueue(c, i);
	}
	return ncclSuccess;
}

/* Ends plans as long as the rank has nothing left to do in them. */
static ncclResult_t end_op(struct tp_check *c, int rank)
{
	struct tp_check_rank *r = &c->ranks[rank];
	while (r->op < (uint32_t)c->nplans && !r->lanes_left && (!r->refs_out || c->options->ends_early)) {
		TP_TRY(tp_check_result(c, (int)r->op, rank));
		TP_TRY(tp_check_memory_end(c, (int)r->op, rank, r->end_clock));
		if (++r->op < (uint32_t)c->nplans) TP_TRY(begin_op(c, rank));
	}
	return ncclSuccess;
}

static ncclResult_t take_entry(struct tp_check *c, int32_t lane, struct tp_check_source *s)
{
	struct tp_check_lane *l = &c->lanes[lane];
	struct tp_check_link *link = &c->links[l->links[s->operand->index]];
	s->entry = link->entries[link->first];
	link->first = (link->first + 1) % c->options->slots;
	link->count--;
	if (s->entry.op != l->op)
		return tp_check_fail(c, TP_CHECK_LEFT_FULL, s->entry.lane >= 0 ? link->from : l->rank, s->entry.lane, s->entry.step,
			s->entry.round, "gave rank %d a chunk that operation %d didn't take, and operation %d got it", link->to,
			s->entry.op, l->op);
	join(l->clock, c->clocks + (size_t)s->entry.clock * c->nclock, c->nclock);
	if (!--c->clock_users[s->entry.clock]) c->free_clocks[c->nfree_clocks++] = s->entry.clock;
	if (link->sender >= 0) {
		enqueue(c, link->sender);
		link->sender = -1;
	}
	s->value = s->entry.value;
	return ncclSuccess;
}

/* The value that reading memory gives, for a buffer source or a chunk that came by reference. */
static ncclResult_t read_source(struct tp_check *c, const struct tp_check_lane *l, struct tp_check_source *s, uint32_t *depth)
{
	if (s->operand->where != TP_LINK) {
		uint32_t cell = tp_check_cell_of(c, l->op, l->rank, l, s->operand->where, s->operand->index, l->round);
		TP_TRY(tp_check_read_cell(c, l, l->op, l->rank, cell, &s->value, depth));
		if (s->operand->where != TP_INPUT || c->values[s->value].rank == l->rank) return ncclSuccess;
		return step_fail(c, l, TP_CHECK_WRONG_RESULT, "reads INPUT where another value has been put in its place");
	}
	*depth = TP_MAX(*depth, s->entry.depth);
	if (s->entry.cell < 0) return ncclSuccess;
	uint32_t value, ignored = 0;
	TP_TRY(tp_check_read_cell(c, l, l->op, s->entry.cell_rank, (uint32_t)s->entry.cell, &value, &ignored));
	if (value == s->entry.value) return ncclSuccess;
	return tp_check_fail(c, TP_CHECK_RACE, s->entry.cell_rank, s->entry.lane, s->entry.step, s->entry.round,
		"gave a chunk by reference that was overwritten before rank %d lane %d step %d read it", l->rank, l->number,
		(int)l->step);
}

static ncclResult_t reduce_sources(struct tp_check *c, const struct tp_check_lane *l, const struct tp_check_source *sources, int count,
	bool final, uint32_t *out)
{
	const struct tp_check_value *first = &c->values[sources[0].value];
	struct tp_check_value made = { .chunk = first->chunk, .round = first->round, .op = first->op, .rank = -1, .final = final };
	uint64_t hash = (uint64_t)count;
	for (int i = 0; i < count; i++) {
		const struct tp_check_value *v = &c->values[sources[i].value];
		hash = tp_check_mix(hash, v->hash);
		if (v->final) return step_fail(c, l, TP_CHECK_TWICE, "reduces what is final already");
		if (v->chunk == first->chunk && v->round == first->round && v->op == first->op) continue;
		return tp_check_fail(c, TP_CHECK_WRONG_RESULT, l->rank, l->number, (int)l->step, (int)l->round,
			"reduces input chunk %d of round %d with chunk %d of round %d", first->chunk, first->round, v->chunk, v->round);
	}
	made.hash = count == 1 ? first->hash : hash;
	uint32_t value = tp_check_new_value(c, made);
	if (!value) return ncclSystemError;
	uint64_t *set = tp_check_set(c, value);
	for (int i = 0; i < count; i++) {
		const uint64_t *more = tp_check_set(c, sources[i].value);
		for (uint32_t w = 0; w < c->words; w++) {
			if (set[w] & more[w])
				return tp_check_fail(c, TP_CHECK_TWICE, l->rank, l->number, (int)l->step, (int)l->round,
					"adds rank %d's contribution to chunk %d twice", (int)(w * 64) + __builtin_ctzll(set[w] & more[w]), made.chunk);
			set[w] |= more[w];
		}
	}
	for (int r = 0; final && r < c->nranks; r++) {
		if (set[r / 64] >> r % 64 & 1) continue;
		return tp_check_fail(c, TP_CHECK_NOT_FINAL, l->rank, l->number, (int)l->step, (int)l->round,
			"is marked final, but rank %d's contribution to chunk %d is missing", r, made.chunk);
	}
	*out = value;
	return ncclSuccess;
}

static ncclResult_t give_entry(struct tp_check *c, struct tp_check_lane *l, const struct tp_operand *o,
	const struct tp_check_entry *entry, int32_t ref_cell)
{
	struct tp_check_link *link = &c->links[l->links[o->index]];
	struct tp_check_entry *e = &link->entries[(link->first + link->count++) % c->options->slots];
	*e = *entry;
	e->cell = -1;
	if (o->by_ref && c->options->by_ref) {
		e->cell = ref_cell;
		e->cell_rank = l->rank;
		c->ranks[l->rank].refs_out++;
	}
	c->clock_users[e->clock]++;
	if (!l->op && !l->round && link->from != link->to) {
		c->sent[l->rank]++;
		const int *domain = c->plans[0]->spec.layout->domain;
		c->report->chunks_sent_total++;
		if (domain[link->from] != domain[link->to]) c->report->chunks_crossing++;
	}
	if (link->receiver >= 0) {
		enqueue(c, link->receiver);
		link->receiver = -1;
	}
	return ncclSuccess;
}

/* Puts the value of the step into buffers and links. Returns in *gave whether any link got it. */
static ncclResult_t put_value(struct tp_check *c, struct tp_check_lane *l, const struct tp_step *s, uint32_t value,
	uint32_t depth, int32_t source_cell)
{
	const struct tp_operand *o = &l->program->operands[s->first + s->nsrc];
	int32_t ref_cell = source_cell;
	bool links = false;
	for (int i = 0; i < s->ndst; i++) {
		links |= o[i].where == TP_LINK;
		if (o[i].where == TP_LINK) continue;
		uint32_t cell = tp_check_cell_of(c, l->op, l->rank, l, o[i].where, o[i].index, l->round);
		if (ref_cell < 0) ref_cell = (int32_t)cell;
		if (cell == (uint32_t)source_cell) continue;        /* a copy onto itself writes nothing */
		TP_TRY(tp_check_write_cell(c, l, l->op, cell, value, depth));
	}
	if (!links) return ncclSuccess;
	struct tp_check_entry entry = { .value = value, .depth = depth, .op = (uint16_t)l->op, .lane = (int16_t)l->number,
		.step = (int16_t)l->step, .round = (int16_t)l->round, .clock = keep_clock(c, l->clock) };
	if (entry.clock < 0) return ncclSystemError;
	for (int i = 0; i < s->ndst; i++)
		if (o[i].where == TP_LINK) TP_TRY(give_entry(c, l, &o[i], &entry, ref_cell));
	return ncclSuccess;
}

/* The references that the step has read count for their owners, who may be waiting to end their plans. */
static ncclResult_t settle_references(struct tp_check *c, const struct tp_check_lane *l, const struct tp_check_source *sources, int count)
{
	for (int i = 0; i < count; i++) {
		if (sources[i].operand->where != TP_LINK || sources[i].entry.cell < 0) continue;
		struct tp_check_rank *owner = &c->ranks[sources[i].entry.cell_rank];
		if (c->options->ends_early) continue;
		owner->refs_out--;
		join(owner->end_clock, l->clock, c->nclock);
		TP_TRY(end_op(c, sources[i].entry.cell_rank));
	}
	return ncclSuccess;
}

static ncclResult_t perform_step(struct tp_check *c, int32_t lane, const struct tp_step *s)
{
	struct tp_check_lane *l = &c->lanes[lane];
	struct tp_check_source *sources = c->sources;
	int count = 0;
	uint32_t depth = 0, value = 0;
	for (int i = 0; i < s->nsrc; i++) {
		struct tp_check_source *source = &sources[count];
		*source = (struct tp_check_source){ .operand = &l->program->operands[s->first + (uint32_t)i] };
		bool link = source->operand->where == TP_LINK;
		if (link) TP_TRY(take_entry(c, lane, source));
		if (!link || !c->links[l->links[source->operand->index]].token) count++;
		else depth = TP_MAX(depth, source->entry.depth);
	}
	if (++l->clock[l->clock_lane] == INT16_MAX) return step_fail(c, l, TP_CHECK_MALFORMED, "is one of too many to be checked");
	for (int i = 0; i < count; i++) TP_TRY(read_source(c, l, &sources[i], &depth));
	if (s->flags & TP_STEP_REDUCE)
		TP_TRY(reduce_sources(c, l, sources, count, s->flags & TP_STEP_FINAL, &value));
	else if (count)
		value = sources[0].value;
	int32_t source_cell = -1;
	if (count == 1 && !(s->flags & TP_STEP_REDUCE) && sources[0].operand->where != TP_LINK)
		source_cell = (int32_t)tp_check_cell_of(c, l->op, l->rank, l, sources[0].operand->where, sources[0].operand->index, l->round);
	depth++;
	if (!l->op && !l->round) c->report->depth = TP_MAX(c->report->depth, depth);
	TP_TRY(put_value(c, l, s, value, depth, source_cell));
	return settle_references(c, l, sources, count);
}

static bool step_ready(struct tp_check *c, int32_t lane, const struct tp_step *s)
{
	struct tp_check_lane *l = &c->lanes[lane];
	for (; l->ready < (uint32_t)s->nsrc + s->ndst; l->ready++) {
		const struct tp_operand *o = &l->program->operands[s->first + l->ready];
		if (o->where != TP_LINK) continue;
		struct tp_check_link *link = &c->links[l->links[o->index]];
		if (l->ready < s->nsrc && !link->count) {
			link->receiver = lane;
			return false;
		}
		if (l->ready >= s->nsrc && link->count == c->options->slots) {
			link->sender = lane;
			return false;
		}
	}
	return true;
}

static ncclResult_t lane_done(struct tp_check *c, int32_t lane)
{
	struct tp_check_lane *l = &c->lanes[lane];
	struct tp_check_memory *m = memory_of(c, l->op, l->rank);
	l->done = true;
	join(c->ranks[l->rank].end_clock, l->clock, c->nclock);
	for (int32_t i = m->first_lane; i < m->first_lane + m->nlanes; i++) {
		if (c->lanes[i].lane->after != (uint32_t)l->number + 1) continue;
		join(c->lanes[i].clock, l->clock, c->nclock);
		enqueue(c, i);
	}
	c->ranks[l->rank].lanes_left--;
	return end_op(c, l->rank);
}

static ncclResult_t run_lane(struct tp_check *c, int32_t lane)
{
	struct tp_check_lane *l = &c->lanes[lane];
	while (l->round < l->nrounds) {
		const struct tp_step *s = &l->program->steps[l->lane->first_step + l->step];
		if (!step_ready(c, lane, s)) return ncclSuccess;
		TP_TRY(perform_step(c, lane, s));
		l->ready = 0;
		if (++l->step < l->lane->nsteps) continue;
		l->step = 0;
		l->round++;
	}
	return lane_done(c, lane);
}

/* A lane of a rank, from its present operation on, that has yet to use one end of a link. */
static int32_t find_user(const struct tp_check *c, int rank, int32_t link, bool gives)
{
	for (uint32_t op = c->ranks[rank].op; op < (uint32_t)c->nplans; op++) {
		const struct tp_check_memory *m = memory_of(c, (int)op, rank);
		for (int32_t i = m->first_lane; i < m->first_lane + m->nlanes; i++) {
			const struct tp_check_lane *l = &c->lanes[i];
			if (l->done) continue;
			for (uint32_t s = l->lane->first_step; s < l->lane->first_step + l->lane->nsteps; s++) {
				const struct tp_step *step = &l->program->steps[s];
				const struct tp_operand *o = &l->program->operands[step->first + (gives ? step->nsrc : 0u)];
				for (int k = 0; k < (gives ? step->ndst : step->nsrc); k++)
					if (o[k].where == TP_LINK && l->links[o[k].index] == link) return i;
			}
		}
	}
	return -1;
}

static bool is_blocked(const struct tp_check *c, const struct tp_check_lane *l)
{
	return !l->done && (uint32_t)l->op == c->ranks[l->rank].op
		&& (!l->lane->after || c->lanes[memory_of(c, l->op, l->rank)->first_lane + (int32_t)l->lane->after - 1].done);
}

/* What a blocked lane waits for: *takes from, or gives to, that link. Returns the lane at the other end, -1: none is left. */
static int32_t waits_for(const struct tp_check *c, const struct tp_check_lane *l, const struct tp_check_link **link, bool *takes)
{
	const struct tp_step *s = &l->program->steps[l->lane->first_step + l->step];
	int32_t which = l->links[l->program->operands[s->first + l->ready].index];
	*link = &c->links[which];
	*takes = l->ready < s->nsrc;
	return find_user(c, *takes ? (*link)->from : (*link)->to, which, *takes);
}

static ncclResult_t fail_deadlock(struct tp_check *c)
{
	const struct tp_check_link *link;
	bool takes;
	int32_t worst = -1;
	for (int32_t i = 0; i < c->nlanes; i++) {
		if (!is_blocked(c, &c->lanes[i])) continue;
		if (worst < 0) worst = i;
		if (waits_for(c, &c->lanes[i], &link, &takes) >= 0) continue;
		worst = i;      /* the best of explanations: nobody will ever come */
		break;
	}
	if (worst < 0) return tp_check_fail(c, TP_CHECK_DEADLOCK, 0, -1, -1, -1, "references are never read");
	const struct tp_check_lane *l = &c->lanes[worst];
	char chain[200];
	int at = 0, hops = 0;
	int32_t next = worst;
	while (at < (int)sizeof(chain) - 1 && hops++ < 4) {
		const struct tp_check_lane *w = &c->lanes[next];
		if (!is_blocked(c, w)) break;
		next = waits_for(c, w, &link, &takes);
		int peer = takes ? link->from : link->to;
		if (hops > 1) at += snprintf(chain + at, sizeof(chain) - (size_t)at, "; rank %d lane %d step %u ", w->rank, w->number, w->step);
		if (at >= (int)sizeof(chain)) break;
		at += snprintf(chain + at, sizeof(chain) - (size_t)at, "waits for ever for a %s rank %d%s", takes ? "chunk from" : "free slot to",
			peer, next < 0 ? takes ? ", which has nothing left to give" : ", which takes nothing more" : "");
		if (next < 0) break;
	}
	return tp_check_fail(c, TP_CHECK_DEADLOCK, l->rank, l->number, (int)l->step, (int)l->round, "%s", chain);
}

static ncclResult_t check_left_full(struct tp_check *c)
{
	for (int32_t i = 0; i < c->nlinks; i++) {
		const struct tp_check_link *l = &c->links[i];
		if (!l->count) continue;
		const struct tp_check_entry *e = &l->entries[l->first];
		return tp_check_fail(c, TP_CHECK_LEFT_FULL, l->from, e->lane, e->step, e->round,
			"gave rank %d a chunk on link class %d that it never takes", l->to, l->lane_class);
	}
	return ncclSuccess;
}

ncclResult_t tp_check_run(struct tp_check *c)
{
	for (int r = 0; r < c->nranks; r++) {
		TP_TRY(begin_op(c, r));
		TP_TRY(end_op(c, r));
	}
	while (c->queue_count) {
		int32_t lane = c->queue[c->queue_first];
		c->queue_first = (c->queue_first + 1) % c->nlanes;
		c->queue_count--;
		c->lanes[lane].queued = false;
		TP_TRY(run_lane(c, lane));
	}
	for (int r = 0; r < c->nranks; r++)
		if (c->ranks[r].op < (uint32_t)c->nplans) return fail_deadlock(c);
	return check_left_full(c);
}

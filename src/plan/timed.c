/* A plan against the clock of the cost model: the programs of all ranks, step by step, each step taking what the model says
 * of its operands. A rank does one step at a time; ranks beyond the cores of their domain take turns on these; what leaves
 * a domain shares its wire. Always the step that can begin first is taken. Long messages are run for a few rounds and
 * continued at the pace of the later half of them. */
#include <stdlib.h>
#include <string.h>

#include "plan/cost.h"

#define SLOTS 8
#define ROUNDS 32
#define NEVER 1e300

struct chunk_times { double full[SLOTS], empty[SLOTS]; uint32_t sent, taken; bool ref[SLOTS]; };

struct lane_run {
	const struct tp_program *program;
	const struct tp_lane *lane;
	const int *links;           /* of the program */
	uint32_t step, round;
	double ready;
};

struct run {
	const struct tp_plan *plan;
	const struct tp_layout *layout;
	const struct tp_cost_model *model;
	double chunk;
	bool refs;
	uint32_t rounds;
	struct lane_run *lanes;
	uint32_t nlanes;
	struct chunk_times *links;
	const struct tp_plan_link **names;
	uint32_t nlinks;
	int *program_links;         /* all programs' link indices, end to end */
	double *rank_free, *core_free, *wire_free, end;
	int *core_rank, cores;
};

static bool same_link(const struct tp_plan_link *a, const struct tp_plan_link *b)
{
	return a->from == b->from && a->to == b->to && a->lane_class == b->lane_class && a->from != a->to;
}

static int number_link(struct run *r, const struct tp_plan_link *link)
{
	for (uint32_t i = 0; i < r->nlinks; i++)
		if (same_link(r->names[i], link)) return (int)i;
	r->names[r->nlinks] = link;
	return (int)r->nlinks++;
}

static bool set_up(struct run *r)
{
	size_t nlanes = 0, nlinks = 0, n = (size_t)r->layout->nranks, domains = (size_t)r->layout->ndomains;
	for (uint32_t i = 0; i < r->plan->nprograms; i++) {
		nlanes += r->plan->programs[i].nlanes;
		nlinks += r->plan->programs[i].nlinks;
	}
	r->cores = TP_MAX(r->model->cores_per_domain, 1);
	if ((size_t)r->cores > n) r->cores = (int)n;
	r->lanes = tp_alloc(nlanes + 1, sizeof(*r->lanes), "a timed run");
	r->links = tp_alloc(nlinks + 1, sizeof(*r->links), "a timed run");
	r->names = tp_alloc(nlinks + 1, sizeof(*r->names), "a timed run");
	r->program_links = tp_alloc(nlinks + 1, sizeof(*r->program_links), "a timed run");
	r->rank_free = tp_alloc(n, sizeof(double), "a timed run");
	r->wire_free = tp_alloc(domains, sizeof(double), "a timed run");
	r->core_free = tp_alloc(domains * (size_t)r->cores, sizeof(double), "a timed run");
	r->core_rank = tp_alloc(domains * (size_t)r->cores, sizeof(int), "a timed run");
	if (!r->lanes || !r->links || !r->names || !r->program_links || !r->rank_free || !r->wire_free || !r->core_free || !r->core_rank)
		return false;
	for (size_t i = 0; i < domains * (size_t)r->cores; i++) r->core_rank[i] = -1;
	int *links = r->program_links;
	for (uint32_t i = 0; i < r->plan->nprograms; i++) {
		const struct tp_program *p = &r->plan->programs[i];
		for (uint32_t l = 0; l < p->nlinks; l++) links[l] = number_link(r, &p->links[l]);
		for (uint32_t l = 0; l < p->nlanes; l++)
			r->lanes[r->nlanes++] = (struct lane_run){ .program = p, .lane = &p->lanes[l], .links = links };
		links += p->nlinks;
	}
	return true;
}

static bool is_far(const struct run *r, const struct tp_plan_link *l) { return r->layout->domain[l->from] != r->layout->domain[l->to]; }

static const struct tp_step *step_of(const struct lane_run *l) { return &l->program->steps[l->lane->first_step + l->step]; }

/* When the operands of the lane's next step are there; NEVER: not yet known. */
static double when_ready(const struct run *r, const struct lane_run *l)
{
	const struct tp_step *s = step_of(l);
	double at = l->ready;
	for (uint32_t i = 0; i < s->nsrc + (uint32_t)s->ndst; i++) {
		const struct tp_operand *o = &l->program->operands[s->first + i];
		if (o->where != TP_LINK) continue;
		const struct chunk_times *c = &r->links[l->links[o->index]];
		if (i < s->nsrc) {
			if (c->taken == c->sent) return NEVER;
			at = TP_MAX(at, c->full[c->taken % SLOTS]);
		} else {
			if (c->sent - c->taken == SLOTS) return NEVER;
			at = TP_MAX(at, c->empty[c->sent % SLOTS]);
		}
	}
	return at;
}

/* The core of the rank's domain on which it could go on first, and when. */
static int first_core(const struct run *r, int rank, double ready, double *at)
{
	int base = r->layout->domain[rank] * r->cores, best = base;
	if (r->layout->domain_size[r->layout->domain[rank]] <= r->cores) {
		*at = TP_MAX(ready, r->rank_free[rank]);
		return base + r->layout->place[rank];
	}
	double best_at = NEVER;
	for (int c = base; c < base + r->cores; c++) {
		double turn = r->core_rank[c] == rank || r->core_rank[c] < 0 ? 0 : r->model->switch_us;
		double start = TP_MAX(TP_MAX(ready, r->rank_free[rank]), r->core_free[c]) + turn;
		if (start >= best_at) continue;
		best_at = start;
		best = c;
	}
	*at = best_at;
	return best;
}

static double duration(const struct run *r, const struct lane_run *l)
{
	const struct tp_cost_model *m = r->model;
	const struct tp_step *s = step_of(l);
	int data = 0, written = 0, ends = 0, ref_sources = 0;
	double us = 0;
	for (uint32_t i = 0; i < s->nsrc + (uint32_t)s->ndst; i++) {
		const struct tp_operand *o = &l->program->operands[s->first + i];
		const struct tp_plan_link *link = o->where == TP_LINK ? &l->program->links[o->index] : NULL;
		ends += link != NULL;
		if (link && link->from == link->to && link->token) continue;
		bool far = link && is_far(r, link), near_ref = r->refs && o->by_ref && !far;
		if (far) us += m->across.step_us + r->chunk * m->across.us_per_byte / 2;
		if (i >= s->nsrc) {
			written += !near_ref;
			continue;
		}
		data++;
		if (!link) continue;
		const struct chunk_times *c = &r->links[l->links[o->index]];
		if (!c->ref[c->taken % SLOTS]) continue;
		us += m->ref_us + r->chunk * m->inside.us_per_byte;
		ref_sources++;
	}
	if (s->flags & TP_STEP_REDUCE && data > 1) {
		us += r->chunk * m->reduce_us_per_byte * (data + 1) / 3;
		written--;
	} else if (ref_sources) {
		written--;
	}
	return us + m->inside.step_us * (1 + ends) + r->chunk * m->copy_us_per_byte * TP_MAX(written, 0);
}

static void finish_links(struct run *r, struct lane_run *l, double end)
{
	const struct tp_step *s = step_of(l);
	for (uint32_t i = 0; i < s->nsrc + (uint32_t)s->ndst; i++) {
		const struct tp_operand *o = &l->program->operands[s->first + i];
		if (o->where != TP_LINK) continue;
		const struct tp_plan_link *link = &l->program->links[o->index];
		struct chunk_times *c = &r->links[l->links[o->index]];
		bool far = is_far(r, link), local = link->from == link->to;
		double there = end + (local ? 0 : far ? r->model->across.latency_us : r->model->inside.latency_us);
		if (i < s->nsrc) {
			if (c->ref[c->taken % SLOTS]) r->end = TP_MAX(r->end, there);
			c->empty[c->taken++ % SLOTS] = there;
			continue;
		}
		if (far) {
			double *wire = &r->wire_free[r->layout->domain[link->from]];
			*wire = TP_MAX(*wire, end) + r->chunk * r->model->across.us_per_byte;
			there = *wire + r->model->across.latency_us;
		}
		c->ref[c->sent % SLOTS] = r->refs && o->by_ref && !far && !local;
		c->full[c->sent++ % SLOTS] = there;
	}
}

/* The next step of all; false: there is none (all done, or a deadlock, which the caller sees by the rounds). */
static bool take_step(struct run *r)
{
	struct lane_run *next = NULL;
	double at = NEVER;
	int core = 0;
	for (uint32_t i = 0; i < r->nlanes; i++) {
		struct lane_run *l = &r->lanes[i];
		double start, ready = l->round < r->rounds ? when_ready(r, l) : NEVER;
		if (ready >= at) continue;
		int on = first_core(r, l->program->rank, ready, &start);
		if (start >= at) continue;
		at = start;
		next = l;
		core = on;
	}
	if (!next) return false;
	double end = at + duration(r, next);
	r->core_free[core] = r->rank_free[next->program->rank] = next->ready = end;
	r->core_rank[core] = next->program->rank;
	r->end = TP_MAX(r->end, end);
	finish_links(r, next, end);
	if (++next->step == next->lane->nsteps) {
		next->step = 0;
		next->round++;
	}
	return true;
}

static void tear_down(struct run *r)
{
	free(r->lanes);
	free(r->links);
	free(r->names);
	free(r->program_links);
	free(r->rank_free);
	free(r->wire_free);
	free(r->core_free);
	free(r->core_rank);
}

/* The time of some rounds. */
static ncclResult_t run_rounds(const struct tp_plan *plan, const struct tp_cost_model *model, double chunk, uint32_t rounds, double *us)
{
	struct run r = { .plan = plan, .layout = plan->spec.layout, .model = model, .chunk = chunk, .rounds = rounds };
	ncclResult_t result = ncclSuccess;
	r.refs = model->by_ref_inside && chunk > (double)model->inline_bytes;
	if (!set_up(&r)) {
		tear_down(&r);
		return ncclSystemError;
	}
	while (take_step(&r)) { }
	for (uint32_t i = 0; i < r.nlanes && result == ncclSuccess; i++)
		if (r.lanes[i].round < rounds)
			result = TP_FAIL(ncclInternalError, "%s %s stands still: rank %d waits for ever", tp_coll_name(plan->spec.coll),
				tp_algo_name(plan->spec.algo), r.lanes[i].program->rank);
	tear_down(&r);
	if (result == ncclSuccess) *us = r.end;
	return result;
}

ncclResult_t tp_cost_run(const struct tp_plan *plan, size_t block_bytes, size_t chunk_bytes, const struct tp_cost_model *model,
	double *us)
{
	double room = (double)plan->pieces * (double)TP_MAX(chunk_bytes, 1), block = (double)block_bytes, half, whole;
	double rounds = block > room ? (double)(size_t)((block + room - 1) / room) : 1, chunk = block / (rounds * plan->pieces);
	if (plan->nprograms != (uint32_t)plan->spec.layout->nranks)
		return TP_FAIL(ncclInvalidArgument, "A timed run needs the programs of all %d ranks on one channel, not %u", plan->spec.layout->nranks,
			plan->nprograms);
	TP_TRY(run_rounds(plan, model, chunk, rounds > ROUNDS ? ROUNDS : (uint32_t)rounds, &whole));
	if (rounds > ROUNDS) {
		TP_TRY(run_rounds(plan, model, chunk, ROUNDS / 2, &half));
		whole += (rounds - ROUNDS) * (whole - half) / (ROUNDS / 2);
	}
	*us = model->scale[plan->spec.algo] * (model->call_us + whole);
	return ncclSuccess;
}

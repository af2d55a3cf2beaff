#include <stdlib.h>

#include "plan/stages.h"

/* What a lane does with a piece. Backwards for reductions. */
struct event {
	int x;
	bool comes, goes;           /* over the link of the stage before; over this stage's link */
	int before, after;          /* lanes of this rank that have it before and after; -1: none */
};

struct schedule {
	struct event *events;       /* by lane, in order */
	int first[TP_MAX_STAGES + 2];
};

void tp_stages_make(enum tp_stages_kind kind, int nranks, struct tp_stages *out)
{
	struct tp_stages s = { .nranks = nranks, .kind = kind };
	while (1u << s.nstages < (unsigned)nranks) s.nstages++;
	int skip = nranks;
	for (int j = s.nstages - 1; j >= 0; j--) {
		skip = (skip + 1) / 2;
		s.skip[j] = kind == TP_STAGES_NEAR_FIRST ? skip : 1 << (s.nstages - 1 - j);
	}
	*out = s;
}

bool tp_stages_sends(const struct tp_stages *s, int stage, int x)
{
	int end = s->nranks;
	if (s->kind == TP_STAGES_NEAR_FIRST) {
		if (stage + 1 < s->nstages) end = s->skip[stage + 1];
		return x < s->skip[stage] && x + s->skip[stage] < end;
	}
	return x % (2 * s->skip[stage]) == 0 && x + s->skip[stage] < end;
}

static int next_stage(const struct tp_stages *s, int stage, int x)
{
	while (++stage < s->nstages)
		if (tp_stages_sends(s, stage, x)) return stage;
	return -1;
}

/* The pieces of each lane in turn, made from those of the lane before. */
static bool make_schedule(const struct tp_stages *s, struct schedule *out)
{
	size_t most = (size_t)s->nranks;
	struct event *now = tp_alloc(most, sizeof(*now), "a plan's stages"), *then = tp_alloc(most, sizeof(*then), "a plan's stages");
	out->events = tp_alloc(3 * most, sizeof(*out->events), "a plan's stages");
	int live = 1, nevents = 0;
	if (!now || !then || !out->events) goto failed;
	now[0] = (struct event){ .x = 0, .before = -1 };
	for (int j = 0; j <= s->nstages; j++) {
		int later = 0;
		out->first[j] = nevents;
		for (int i = 0; i < live; i++) {
			struct event e = now[i];
			e.goes = j < s->nstages && tp_stages_sends(s, j, e.x);
			e.after = next_stage(s, j, e.x);
			if (e.comes || e.goes || j == 0) {
				out->events[nevents++] = e;
				e.before = j;
			}
			if (e.goes) then[later++] = (struct event){ .x = e.x + s->skip[j], .comes = true, .before = -1 };
			if (e.after >= 0) then[later++] = (struct event){ .x = e.x, .before = e.before };
		}
		struct event *old = now;
		now = then;
		then = old;
		live = later;
	}
	out->first[s->nstages + 1] = nevents;
	free(now);
	free(then);
	return true;
failed:
	free(now);
	free(then);
	free(out->events);
	return false;
}

/* A link between two lanes of this rank, made at first use. */
static int between(struct tp_builder *b, int links[TP_MAX_STAGES + 1][TP_MAX_STAGES + 1], int from, int to, bool token)
{
	if (links[from][to] < 0) links[from][to] = tp_build_local(b, token);
	return links[from][to];
}

static void forget_links(int links[TP_MAX_STAGES + 1][TP_MAX_STAGES + 1])
{
	for (int i = 0; i <= TP_MAX_STAGES; i++)
		for (int j = 0; j <= TP_MAX_STAGES; j++) links[i][j] = -1;
}

/* The step works on a chunk that it doesn't touch (it lies in slots): where a view leaves that out, the step goes too. */
static void concerns(struct tp_builder *b, enum tp_where where, int32_t chunk)
{
	struct tp_operand unused;
	if (b->view.chunk && !b->view.chunk(b->view.arg, (uint8_t)where, chunk, &unused)) b->drop = true;
}

struct tp_stages_join tp_stages_join(struct tp_builder *b, const struct tp_stages *s, int gather_class)
{
	return (struct tp_stages_join){ gather_class, next_stage(s, 0, 0) >= 0 ? tp_build_local(b, true) : -1 };
}

void tp_stages_reduce(struct tp_builder *b, const struct tp_stages *s, int rank, int lane_class, int into,
	const struct tp_stages_join *join)
{
	struct schedule plan;
	int links[TP_MAX_STAGES + 1][TP_MAX_STAGES + 1], n = s->nranks;
	if (!make_schedule(s, &plan)) { b->failed = true; return; }
	forget_links(links);
	for (int j = s->nstages; j >= 0; j--) {
		int lane = tp_build_lane(b);
		for (int i = plan.first[j + 1] - 1; i >= plan.first[j]; i--) {
			const struct event *e = &plan.events[i];
			int piece = (rank + e->x) % n;
			bool last = !e->comes && e->before < 0, raw = !e->goes && e->after < 0;
			tp_build_step(b, lane, (raw ? 0 : TP_STEP_REDUCE) | (last ? TP_STEP_FINAL : 0));
			concerns(b, TP_INPUT, piece);
			if (e->after >= 0) tp_build_take_local(b, between(b, links, e->after, j, false));
			else tp_build_read(b, TP_INPUT, piece);
			if (e->goes) tp_build_take(b, (rank + n - s->skip[j]) % n, lane_class);
			if (e->comes) {
				tp_build_give(b, (rank + s->skip[j - 1]) % n, lane_class, raw);
			} else if (!last) {
				tp_build_give_local(b, between(b, links, j, e->before, false));
			} else {
				tp_build_write(b, TP_OUTPUT, into);
				if (!join) continue;
				tp_build_give(b, (rank + n - s->skip[0]) % n, join->gather_class, true);
				if (join->token >= 0) tp_build_give_local(b, join->token);
			}
		}
	}
	free(plan.events);
}

void tp_stages_gather(struct tp_builder *b, const struct tp_stages *s, int rank, int lane_class,
	const struct tp_stages_join *join)
{
	struct schedule plan;
	int links[TP_MAX_STAGES + 1][TP_MAX_STAGES + 1], n = s->nranks;
	if (!make_schedule(s, &plan)) { b->failed = true; return; }
	forget_links(links);
	for (int j = join ? 1 : 0; j <= s->nstages; j++) {
		int lane = tp_build_lane(b);
		for (int i = plan.first[j]; i < plan.first[j + 1]; i++) {
			const struct event *e = &plan.events[i];
			int piece = (rank + e->x) % n;
			tp_build_step(b, lane, 0);
			if (e->comes) tp_build_take(b, (rank + s->skip[j - 1]) % n, lane_class);
			else if (j == 0) tp_build_read(b, TP_INPUT, 0);
			else tp_build_read(b, TP_OUTPUT, piece);
			if (!e->comes && j > 0)
				tp_build_take_local(b, join && e->before == 0 ? join->token : between(b, links, e->before, j, true));
			if (e->comes || j == 0) tp_build_write(b, TP_OUTPUT, piece);
			if (e->goes) tp_build_give(b, (rank + n - s->skip[j]) % n, lane_class, true);
			if (e->after >= 0) tp_build_give_local(b, between(b, links, j, e->after, true));
		}
	}
	free(plan.events);
}

/* Joins the stages of a program that was made of other programs, a group of lanes each. What one stage writes and a later
 * one reads is ordered:
 *   OUTPUT by a token from the step that writes to the step that reads, so that the second stage follows piece by piece
 *   and, over the rounds, the first runs ahead. A lane that has waited for a later step of the other needs no more;
 *   SCRATCH by a local link in its place: it lies in the same spot in every round, so a stage that ran ahead would
 *   overwrite what is still to be read. */
#include <stdlib.h>
#include <string.h>

#include "plan/build.h"

struct writer { int lane; uint32_t step, operand; };    /* lane + 1; 0: nobody */

struct join {
	struct tp_builder *b;
	struct writer *writers[2];      /* of OUTPUT and of SCRATCH chunks */
	uint32_t *waited;               /* a lane: steps of it that the reading lane has waited for */
	int *token;                     /* a lane: its token link to the reading lane; where waited isn't 0 */
};

/* Adds an operand to a step that is there already. */
static void insert(struct tp_builder *b, int lane, uint32_t step, bool source, struct tp_operand operand)
{
	struct tp_build_lane *l = &b->lanes[lane];
	if (!tp_build_room(b, (void **)&l->operands, l->noperands, &l->operands_room, sizeof(*l->operands))) return;
	struct tp_step *s = &l->steps[step];
	uint32_t at = s->first + s->nsrc + (source ? 0u : s->ndst);
	memmove(&l->operands[at + 1], &l->operands[at], (l->noperands++ - at) * sizeof(*l->operands));
	l->operands[at] = operand;
	if (source) s->nsrc++;
	else s->ndst++;
	for (uint32_t i = step + 1; i < l->nsteps; i++) l->steps[i].first++;
}

static void join_step(struct join *j, int lane, uint32_t step)
{
	struct tp_builder *b = j->b;
	for (uint32_t i = 0; i < b->lanes[lane].steps[step].nsrc && !b->failed; i++) {
		struct tp_operand *o = &b->lanes[lane].operands[b->lanes[lane].steps[step].first + i];
		if (o->where != TP_OUTPUT && o->where != TP_SCRATCH) continue;
		const struct writer *w = &j->writers[o->where == TP_SCRATCH][o->index];
		if (!w->lane) continue;
		if (o->where == TP_SCRATCH) {
			int link = tp_build_local(b, false);
			struct tp_build_lane *from = &b->lanes[w->lane - 1];
			*o = (struct tp_operand){ TP_LINK, 0, link };
			from->operands[from->steps[w->step].first + w->operand] = *o;
		} else if (j->waited[w->lane - 1] <= w->step) {
			if (!j->waited[w->lane - 1]) j->token[w->lane - 1] = tp_build_local(b, true);
			struct tp_operand token = { TP_LINK, 0, j->token[w->lane - 1] };
			insert(b, w->lane - 1, w->step, false, token);
			insert(b, lane, step, true, token);
			j->waited[w->lane - 1] = w->step + 1;
		}
	}
}

static void note_writes(struct join *j, int lane)
{
	const struct tp_build_lane *l = &j->b->lanes[lane];
	for (uint32_t s = 0; s < l->nsteps; s++) {
		for (uint32_t i = l->steps[s].nsrc; i < (uint32_t)l->steps[s].nsrc + l->steps[s].ndst; i++) {
			const struct tp_operand *o = &l->operands[l->steps[s].first + i];
			if (o->where == TP_LINK) continue;
			j->writers[o->where == TP_SCRATCH][o->index] = (struct writer){ lane + 1, s, i };
		}
	}
}

void tp_build_join(struct tp_builder *b, const int *first_lane, int nstages, uint32_t output_chunks, uint32_t scratch_chunks)
{
	struct join j = { .b = b };
	if (b->failed) return;
	j.writers[0] = tp_alloc(TP_MAX(output_chunks, 1), sizeof(struct writer), "a plan's stages");
	j.writers[1] = tp_alloc(TP_MAX(scratch_chunks, 1), sizeof(struct writer), "a plan's stages");
	j.waited = tp_alloc(TP_MAX(b->nlanes, 1), sizeof(*j.waited), "a plan's stages");
	j.token = tp_alloc(TP_MAX(b->nlanes, 1), sizeof(*j.token), "a plan's stages");
	if (!j.writers[0] || !j.writers[1] || !j.waited || !j.token) b->failed = true;
	for (int stage = 0; stage < nstages && !b->failed; stage++) {
		int end = stage + 1 < nstages ? first_lane[stage + 1] : (int)b->nlanes;
		for (int lane = first_lane[stage]; lane < end; lane++) {
			memset(j.waited, 0, b->nlanes * sizeof(*j.waited));
			for (uint32_t s = 0; s < b->lanes[lane].nsteps; s++) join_step(&j, lane, s);
		}
		for (int lane = first_lane[stage]; lane < end; lane++) note_writes(&j, lane);
	}
	free(j.writers[0]);
	free(j.writers[1]);
	free(j.waited);
	free(j.token);
}

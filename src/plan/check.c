/* The checker. Programs that block only on bounded first-in-first-out links are deterministic: one greedy run, with as few
 * slots as executors use, decides for all timings whether they finish and what they compute. In that run every chunk
 * carries the set of contributions in it and a hash of the expression that made it (check_result.c says what must come
 * out), and every access to a buffer is compared with the others by vector clocks (check_memory.c), since the order in
 * which lanes and readers of references get to a buffer isn't decided by links alone.
 *
 * Free slots order nothing here: links may have more of them than this run has. Channels share neither links nor bytes, so
 * each is checked on its own. Plans in sequence share links; a rank begins the next plan when its own lanes are done and
 * all its references were read. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "plan/check.h"

ncclResult_t tp_check_fail(struct tp_check *c, enum tp_check_fault fault, int rank, int lane, int step, int round,
	const char *format, ...)
{
	struct tp_check_report *r = c->report;
	r->fault = fault;
	r->rank = rank;
	r->channel = c->channel;
	r->lane = lane;
	r->step = step;
	r->round = round;
	int at = snprintf(r->text, sizeof(r->text), "rank %d channel %d lane %d step %d round %d: ", rank, c->channel, lane, step, round);
	va_list args;
	va_start(args, format);
	vsnprintf(r->text + at, sizeof(r->text) - (size_t)at, format, args);
	va_end(args);
	return ncclInternalError;
}

static const struct tp_program *program_of(const struct tp_check *c, int op, int rank)
{
	return &c->plans[op]->programs[(size_t)rank * (size_t)c->plans[op]->spec.nchannels + (size_t)c->channel];
}

static ncclResult_t add_link(struct tp_check *c, const struct tp_plan_link *l, int32_t *out)
{
	bool local = l->from == l->to;
	int32_t *known = local ? NULL
		: &c->link_table[((size_t)l->lane_class * (size_t)c->nranks + (size_t)l->from) * (size_t)c->nranks + (size_t)l->to];
	if (known && *known) {
		*out = *known - 1;
		return ncclSuccess;
	}
	if (c->nlinks == c->links_room) {
		int32_t room = c->links_room ? c->links_room * 2 : 256;
		struct tp_check_link *links = realloc(c->links, (size_t)room * sizeof(*links));
		if (!links) return TP_FAIL(ncclSystemError, "Out of memory in the plan checker (%d links)", room);
		c->links = links;
		c->links_room = room;
	}
	c->links[c->nlinks] = (struct tp_check_link){ .from = l->from, .to = l->to, .lane_class = l->lane_class, .token = l->token,
		.sender = -1, .receiver = -1 };
	if (known) *known = c->nlinks + 1;
	*out = c->nlinks++;
	return ncclSuccess;
}

/* Lanes, links and clocks of all plans. The programs' form is known to be right. */
static void count_parts(struct tp_check *c, size_t *links, uint32_t *sources)
{
	*links = 0;
	*sources = 1;
	for (int op = 0; op < c->nplans; op++) {
		for (int r = 0; r < c->nranks; r++) {
			const struct tp_program *p = program_of(c, op, r);
			*links += p->nlinks;
			c->nlanes += (int32_t)p->nlanes;
			for (uint32_t s = 0; s < p->nsteps; s++) *sources = TP_MAX(*sources, p->steps[s].nsrc);
		}
	}
	for (int r = 0; r < c->nranks; r++) {
		uint32_t most = 0;
		for (int op = 0; op < c->nplans; op++) most = TP_MAX(most, program_of(c, op, r)->nlanes);
		c->ranks[r].clock_base = (int32_t)c->nclock;
		c->nclock += most;
	}
	c->nclock = TP_MAX(c->nclock, 1);
}

static ncclResult_t set_up_lanes(struct tp_check *c)
{
	int32_t lane = 0, *links = c->program_links;
	for (int op = 0; op < c->nplans; op++) {
		for (int r = 0; r < c->nranks; r++) {
			const struct tp_program *p = program_of(c, op, r);
			struct tp_check_memory *m = &c->memory[(size_t)op * (size_t)c->nranks + (size_t)r];
			m->first_lane = lane;
			m->nlanes = (int32_t)p->nlanes;
			for (uint32_t i = 0; i < p->nlinks; i++) TP_TRY(add_link(c, &p->links[i], &links[i]));
			for (uint32_t i = 0; i < p->nlanes; i++, lane++) {
				c->lanes[lane] = (struct tp_check_lane){ .program = p, .lane = &p->lanes[i], .links = links, .rank = r,
					.number = (int32_t)i, .clock_lane = c->ranks[r].clock_base + (int32_t)i, .op = op,
					.nrounds = c->options->rounds, .clock = c->lane_clocks + (size_t)lane * c->nclock };
				if (c->plans[op]->spec.coll == TP_SEND_RECV) c->lanes[lane].nrounds = tp_check_p2p_rounds(c, &c->lanes[lane]);
			}
			links += p->nlinks;
		}
	}
	c->entries = tp_alloc((size_t)TP_MAX(c->nlinks, 1) * c->options->slots, sizeof(*c->entries), "the plan checker");
	if (!c->entries) return ncclSystemError;
	for (int32_t i = 0; i < c->nlinks; i++) c->links[i].entries = c->entries + (size_t)i * c->options->slots;
	return ncclSuccess;
}

static ncclResult_t set_up(struct tp_check *c)
{
	size_t n = (size_t)c->nranks, nlinks, hashes = 0;
	uint32_t sources;
	c->words = (uint32_t)(n + 63) / 64;
	c->free_read = -1;
	c->ranks = tp_alloc(n, sizeof(*c->ranks), "the plan checker");
	c->memory = tp_alloc(n * (size_t)c->nplans, sizeof(*c->memory), "the plan checker");
	c->hash_base = tp_alloc((size_t)c->nplans, sizeof(*c->hash_base), "the plan checker");
	c->sent = tp_alloc(n, sizeof(*c->sent), "the plan checker");
	c->link_table = tp_alloc(TP_LINK_CLASSES * n * n, sizeof(*c->link_table), "the plan checker");
	if (!c->ranks || !c->memory || !c->hash_base || !c->sent || !c->link_table) return ncclSystemError;
	count_parts(c, &nlinks, &sources);
	for (int op = 0; op < c->nplans; op++) {
		c->hash_base[op] = hashes;
		hashes += (size_t)c->plans[op]->pieces * c->options->rounds;
	}
	size_t lanes = (size_t)TP_MAX(c->nlanes, 1);
	c->all_reduce_hash = tp_alloc(hashes, sizeof(*c->all_reduce_hash), "the plan checker");
	c->lanes = tp_alloc(lanes, sizeof(*c->lanes), "the plan checker");
	c->queue = tp_alloc(lanes, sizeof(*c->queue), "the plan checker");
	c->program_links = tp_alloc(TP_MAX(nlinks, 1), sizeof(*c->program_links), "the plan checker");
	c->lane_clocks = tp_alloc((lanes + n) * c->nclock, sizeof(*c->lane_clocks), "the plan checker");
	c->sources = tp_alloc(sources, sizeof(*c->sources), "the plan checker");
	if (!c->all_reduce_hash || !c->lanes || !c->queue || !c->program_links || !c->lane_clocks || !c->sources) return ncclSystemError;
	for (size_t r = 0; r < n; r++) c->ranks[r].end_clock = c->lane_clocks + (lanes + r) * c->nclock;
	/* Value 0 is what undefined memory holds. */
	if (tp_check_new_value(c, (struct tp_check_value){ .rank = -1 }) != 0 || !c->values_room) return ncclSystemError;
	return set_up_lanes(c);
}

static void tear_down(struct tp_check *c)
{
	for (size_t i = 0; c->memory && i < (size_t)c->nplans * (size_t)c->nranks; i++) free(c->memory[i].cells);
	void *const all[] = { c->ranks, c->memory, c->hash_base, c->sent, c->link_table, c->all_reduce_hash, c->lanes, c->queue,
		c->program_links, c->lane_clocks, c->sources, c->entries, c->links, c->values, c->sets, c->reads, c->clocks,
		c->clock_users, c->free_clocks };
	for (size_t i = 0; i < TP_ARRAY_LEN(all); i++) free(all[i]);
}

static ncclResult_t check_channel(struct tp_check *c, uint64_t *sent)
{
	for (int op = 0; op < c->nplans; op++) {
		TP_TRY(tp_check_form(c, c->plans[op]));
		TP_TRY(tp_check_shape(c, c->plans[op]));
	}
	TP_TRY(set_up(c));
	TP_TRY(tp_check_run(c));
	for (int r = 0; r < c->nranks; r++) sent[r] += c->sent[r];
	return ncclSuccess;
}

ncclResult_t tp_check_sequence(const struct tp_plan *const *plans, int nplans, const struct tp_check_options *options,
	struct tp_check_report *report)
{
	*report = (struct tp_check_report){ .rank = -1, .channel = -1, .lane = -1, .step = -1, .round = -1 };
	int n = plans[0]->spec.layout->nranks, nchannels = 1;
	for (int i = 0; i < nplans; i++) {
		if (plans[i]->spec.layout->nranks != n || plans[i]->nprograms != (uint32_t)(n * plans[i]->spec.nchannels))
			return TP_FAIL(ncclInvalidArgument, "Plan %d of %d to be checked has %u programs for %d channels of %d ranks", i, nplans,
				plans[i]->nprograms, plans[i]->spec.nchannels, n);
		nchannels = TP_MAX(nchannels, plans[i]->spec.nchannels);
	}
	if (options->slots < 1 || options->rounds < 1 || options->rounds > 1000)
		return TP_FAIL(ncclInvalidArgument, "A check of %u rounds with %u slots a link", options->rounds, options->slots);
	uint64_t *sent = tp_alloc((size_t)n, sizeof(*sent), "the plan checker");
	const struct tp_plan **having = tp_alloc((size_t)nplans, sizeof(*having), "the plan checker");
	ncclResult_t result = sent && having ? ncclSuccess : ncclSystemError;
	for (int channel = 0; channel < nchannels && result == ncclSuccess; channel++) {
		struct tp_check c = { .plans = having, .nranks = n, .channel = channel, .options = options, .report = report };
		for (int i = 0; i < nplans; i++)
			if (channel < plans[i]->spec.nchannels) having[c.nplans++] = plans[i];
		result = check_channel(&c, sent);
		tear_down(&c);
	}
	for (int r = 0; sent && r < n; r++) report->chunks_sent_max = TP_MAX(report->chunks_sent_max, sent[r]);
	free(having);
	free(sent);
	return result;
}

ncclResult_t tp_check_plan(const struct tp_plan *plan, const struct tp_check_options *options, struct tp_check_report *report)
{
	return tp_check_sequence(&plan, 1, options, report);
}

/* Plans and layouts: made, freed, printed. What a plan is: plan.h; how generators write programs: build.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "plan/build.h"

const char *tp_coll_name(enum tp_coll coll)
{
	static const char *const names[TP_NCOLLS] = {
		[TP_ALL_REDUCE] = "AllReduce", [TP_ALL_GATHER] = "AllGather", [TP_REDUCE_SCATTER] = "ReduceScatter",
		[TP_BROADCAST] = "Broadcast", [TP_REDUCE] = "Reduce", [TP_ALL_TO_ALL] = "AlltoAll", [TP_GATHER] = "Gather",
		[TP_SCATTER] = "Scatter", [TP_SEND_RECV] = "SendRecv",
	};
	return (unsigned)coll < TP_NCOLLS ? names[coll] : "unknown";
}

const char *tp_algo_name(enum tp_algo algo)
{
	static const char *const names[TP_NALGOS] = {
		[TP_ALGO_RING] = "RING", [TP_ALGO_TREE] = "TREE", [TP_ALGO_HALVING_DOUBLING] = "HALVING_DOUBLING",
		[TP_ALGO_PAT] = "PAT", [TP_ALGO_ONE_SHOT] = "ONE_SHOT", [TP_ALGO_TWO_SHOT] = "TWO_SHOT",
		[TP_ALGO_DIRECT] = "DIRECT", [TP_ALGO_BRUCK] = "BRUCK", [TP_ALGO_HIERARCHICAL] = "HIERARCHICAL",
	};
	return (unsigned)algo < TP_NALGOS ? names[algo] : "unknown";
}

/* One allocation: the struct, its three arrays and an array for its making. */
static struct tp_layout *new_layout(int nranks, int **label)
{
	struct tp_layout *layout = tp_alloc(1, sizeof(*layout) + 4 * (size_t)nranks * sizeof(int), "a layout");
	if (!layout) return NULL;
	int *domain = (int *)(layout + 1);
	*layout = (struct tp_layout){ .nranks = nranks, .domain = domain, .place = domain + nranks, .domain_size = domain + 2 * nranks };
	*label = domain + 3 * nranks;
	return layout;
}

ncclResult_t tp_layout_create(int nranks, const int *domain_of_rank, struct tp_layout **out)
{
	if (nranks < 1) return TP_FAIL(ncclInvalidArgument, "A layout needs at least one rank, not %d", nranks);
	int *label;
	struct tp_layout *layout = new_layout(nranks, &label);
	if (!layout) return ncclSystemError;
	int *domain = (int *)(layout + 1), *place = domain + nranks, *size = place + nranks;
	for (int r = 0; r < nranks; r++) {
		int d = r && domain_of_rank[r] == domain_of_rank[r - 1] ? domain[r - 1] : 0;
		while (d < layout->ndomains && label[d] != domain_of_rank[r]) d++;
		if (d == layout->ndomains) label[layout->ndomains++] = domain_of_rank[r];
		domain[r] = d;
		place[r] = size[d]++;
	}
	*out = layout;
	return ncclSuccess;
}

/* seen: [nranks], zeroed. */
static bool is_order(const struct tp_layout *layout, const int *order, bool *seen)
{
	for (int d = 0, at = 0; d < layout->ndomains; d++) {
		for (int end = at + layout->domain_size[d]; at < end; at++) {
			int r = order[at];
			if (r < 0 || r >= layout->nranks || seen[r] || layout->domain[r] != d) return false;
			seen[r] = true;
		}
	}
	return true;
}

ncclResult_t tp_layout_set_orders(struct tp_layout *layout, int norders, const int *orders)
{
	size_t n = (size_t)layout->nranks;
	int *copy = norders ? tp_alloc((size_t)norders * n, sizeof(*copy), "the orders of rings") : NULL;
	bool *seen = norders ? tp_alloc(n, sizeof(*seen), "the orders of rings") : NULL;
	ncclResult_t result = !norders || (copy && seen) ? ncclSuccess : ncclSystemError;
	for (int o = 0; o < norders && result == ncclSuccess; o++) {
		memset(seen, 0, n * sizeof(*seen));
		if (!is_order(layout, orders + (size_t)o * n, seen))
			result = TP_FAIL(ncclInvalidArgument, "order %d of %d for rings isn't one of the %d ranks, domain by domain", o, norders, layout->nranks);
	}
	free(seen);
	if (result != ncclSuccess) {
		free(copy);
		return result;
	}
	if (norders) memcpy(copy, orders, (size_t)norders * n * sizeof(*copy));
	free((void *)(uintptr_t)layout->orders);
	layout->orders = copy;
	layout->norders = norders;
	return ncclSuccess;
}

void tp_layout_free(struct tp_layout *layout)
{
	if (!layout) return;
	free((void *)(uintptr_t)layout->orders);
	free(layout);
}

const char *tp_plan_refuses(const struct tp_plan_spec *spec)
{
	if (!spec->layout || spec->layout->nranks < 1) return "there are no ranks";
	if (spec->nchannels < 1) return "there are no channels";
	if ((unsigned)spec->coll >= TP_SEND_RECV) return "it is no collective that a generator makes";
	if (tp_coll_has_root(spec->coll) && (spec->root < 0 || spec->root >= spec->layout->nranks))
		return "the root is not one of the ranks";
	const struct tp_generator *generator = tp_generator_of(spec->algo);
	if (!generator) return "there is no such algorithm";
	if (spec->layout->nranks == 1) return NULL;
	return generator->refuses(spec);
}

static ncclResult_t make_program(const struct tp_plan_spec *spec, int rank, int channel, struct tp_program *out)
{
	struct tp_builder b;
	tp_build_begin(&b, rank, channel);
	tp_build_generate(&b, spec, rank);
	return tp_build_end(&b, out);
}

/* The layout may go before the plan does: the plan keeps its own copy. */
static ncclResult_t keep_layout(struct tp_plan *plan)
{
	const struct tp_layout *from = plan->spec.layout;
	size_t n = (size_t)from->nranks;
	int *label;
	struct tp_layout *copy = new_layout(from->nranks, &label);
	if (!copy) return ncclSystemError;
	int *arrays = (int *)(copy + 1);
	copy->ndomains = from->ndomains;
	memcpy(arrays, from->domain, n * sizeof(int));
	memcpy(arrays + n, from->place, n * sizeof(int));
	memcpy(arrays + 2 * n, from->domain_size, (size_t)from->ndomains * sizeof(int));
	plan->spec.layout = copy;
	/* Only rings ask for them. */
	if (plan->spec.algo != TP_ALGO_RING || !from->norders) return ncclSuccess;
	size_t bytes = (size_t)from->norders * n * sizeof(int);
	int *orders = tp_alloc(bytes, 1, "the orders of rings");
	if (!orders) {
		tp_layout_free(copy);
		return ncclSystemError;
	}
	memcpy(orders, from->orders, bytes);
	copy->orders = orders;
	copy->norders = from->norders;
	return ncclSuccess;
}

ncclResult_t tp_plan_create(const struct tp_plan_spec *spec, int rank, struct tp_plan **out)
{
	const char *why = tp_plan_refuses(spec);
	if (why)
		return TP_FAIL(ncclInvalidUsage, "%s can't do %s among %d ranks: %s", tp_algo_name(spec->algo),
			tp_coll_name(spec->coll), spec->layout ? spec->layout->nranks : 0, why);
	int n = spec->layout->nranks;
	if (rank < -1 || rank >= n) return TP_FAIL(ncclInvalidArgument, "No rank %d among %d ranks", rank, n);
	struct tp_plan *plan = tp_alloc(1, sizeof(*plan), "a plan");
	if (!plan) return ncclSystemError;
	tp_build_describe(spec, plan);
	ncclResult_t result = keep_layout(plan);
	if (result != ncclSuccess) {
		free(plan);
		return result;
	}
	uint32_t nprograms = (uint32_t)(rank < 0 ? n : 1) * (uint32_t)spec->nchannels;
	plan->programs = tp_alloc(nprograms, sizeof(*plan->programs), "a plan's programs");
	if (!plan->programs) result = ncclSystemError;
	while (result == ncclSuccess && plan->nprograms < nprograms) {
		int which = (int)plan->nprograms / spec->nchannels, channel = (int)plan->nprograms % spec->nchannels;
		result = make_program(&plan->spec, rank < 0 ? which : rank, channel, &plan->programs[plan->nprograms]);
		if (result == ncclSuccess) plan->nprograms++;
	}
	if (result != ncclSuccess) tp_plan_free(plan);
	else *out = plan;
	return result;
}

void tp_plan_free(struct tp_plan *plan)
{
	if (!plan) return;
	for (uint32_t i = 0; i < plan->nprograms; i++) tp_program_free(&plan->programs[i]);
	free(plan->programs);
	tp_layout_free((struct tp_layout *)plan->spec.layout);
	free(plan);
}

static void print_operand(FILE *f, const struct tp_program *p, const struct tp_operand *o, bool source)
{
	static const char *const names[] = { "link", "in", "out", "scratch" };
	if (o->where != TP_LINK) {
		fprintf(f, " %s[%d]", names[o->where], o->index);
		return;
	}
	const struct tp_plan_link *l = &p->links[o->index];
	if (l->from == l->to) fprintf(f, " %s%d", l->token ? "token" : "local", l->lane_class);
	else fprintf(f, " %d%s%d.%d", l->from, source ? ">" : o->by_ref ? "=>" : "->", l->to, l->lane_class);
}

static void print_step(FILE *f, const struct tp_program *p, const struct tp_step *s)
{
	const struct tp_operand *o = &p->operands[s->first];
	fprintf(f, "    %s%s", s->flags & TP_STEP_REDUCE ? "reduce" : s->nsrc == 1 && s->ndst ? "copy" : "move",
		s->flags & TP_STEP_FINAL ? " final" : "");
	for (int i = 0; i < s->nsrc; i++) print_operand(f, p, &o[i], true);
	fprintf(f, " to");
	for (int i = 0; i < s->ndst; i++) print_operand(f, p, &o[s->nsrc + i], false);
	fputc('\n', f);
}

char *tp_plan_text(const struct tp_plan *plan)
{
	static const char *const shapes[] = { "steps", "one-shot", "two-shot", "direct" };
	char *text = NULL;
	size_t bytes;
	FILE *f = open_memstream(&text, &bytes);
	if (!f) return NULL;
	if (plan->spec.coll == TP_SEND_RECV) fprintf(f, "%s\n", tp_coll_name(plan->spec.coll));
	else fprintf(f, "%s %s: %d ranks in %d domains, %d channels, shape %s, %u pieces a round, %u scratch chunks\n",
		tp_coll_name(plan->spec.coll), tp_algo_name(plan->spec.algo), plan->spec.layout->nranks,
		plan->spec.layout->ndomains, plan->spec.nchannels, shapes[plan->shape], plan->pieces, plan->scratch_chunks);
	for (uint32_t i = 0; i < plan->nprograms; i++) {
		const struct tp_program *p = &plan->programs[i];
		for (uint32_t l = 0; l < p->nlanes; l++) {
			fprintf(f, "  rank %d channel %d lane %u:\n", p->rank, p->channel, l);
			for (uint32_t s = 0; s < p->lanes[l].nsteps; s++) print_step(f, p, &p->steps[p->lanes[l].first_step + s]);
		}
	}
	fclose(f);
	return text;
}

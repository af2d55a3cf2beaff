/* The profile of a hierarchical plan: that of its parts, each as often as hierarchical.c runs it. Domains are taken to be
 * even: where they aren't, as many chunks move, by fewer rails. */
#include <stdlib.h>

#include "plan/cost.h"

static void add_work(struct tp_cost_work *sum, const struct tp_cost_work *w, double times)
{
	sum->steps += times * w->steps;
	sum->refs += times * w->refs;
	sum->copies_out += times * w->copies_out;
	sum->results_out += times * w->results_out;
	sum->ref_takes += times * w->ref_takes;
	sum->takes += times * w->takes;
	sum->ref_stored += times * w->ref_stored;
	sum->reduce_takes += times * w->reduce_takes;
	sum->reduces += times * w->reduces;
	sum->moves += times * w->moves;
	sum->far_out += times * w->far_out;
	sum->far_in += times * w->far_in;
}

struct parts {
	struct tp_layout *inside, *across;
	double rails, slots, domains, size;
	struct tp_cost_profile *out;
};

/* A part inside a domain, its ranks' share of it `times` over; at_root: the part of one domain only. */
static void add_inside(struct parts *p, enum tp_coll coll, double times, bool at_root)
{
	struct tp_plan_spec spec = { coll, TP_ALGO_DIRECT, tp_coll_has_root(coll) ? 0 : -1, 1, p->inside };
	struct tp_cost_profile part;
	p->out->hops_inside++;
	if (p->inside->nranks == 1 || !tp_cost_profile_of(&spec, &part)) return;
	add_work(&p->out->each, &part.each, at_root ? times * (p->size - 1) / (p->size * p->domains - 1) : times);
	add_work(&p->out->root, part.rooted ? &part.root : &part.each, times);
}

static bool add_across(struct parts *p, enum tp_coll coll, double times)
{
	struct tp_plan_spec spec = { coll, tp_hierarchical_across(coll, (int)p->domains), tp_coll_has_root(coll) ? 0 : -1, 1, p->across };
	struct tp_cost_profile part;
	if (!tp_cost_profile_of(&spec, &part)) return false;
	if (part.rooted) {      /* the heads of all rails but the root's own are among the others */
		double others = p->size * p->domains - 1;
		add_work(&p->out->each, &part.each, times * p->rails * (p->domains - 1) / others);
		add_work(&p->out->each, &part.root, times * (p->rails - 1) / others);
		add_work(&p->out->root, &part.root, times);
	} else {
		add_work(&p->out->each, &part.each, times * p->rails / p->size);
	}
	p->out->hops_across = part.hops_across;
	p->out->relays = part.relays;
	p->out->lockstep = part.lockstep;
	p->out->crossing = part.crossing * times * p->rails;
	if (coll == TP_ALL_REDUCE) p->out->pieces = p->rails * part.pieces;
	return true;
}

static bool add_parts(struct parts *p, enum tp_coll coll)
{
	double share = p->rails / p->size, blocks = p->domains * p->slots * share;
	p->out->refs_only = true;
	switch (coll) {
	case TP_ALL_REDUCE:
		if (!add_across(p, coll, 1)) return false;
		add_inside(p, TP_REDUCE_SCATTER, share * p->out->pieces / p->rails, false);
		add_inside(p, TP_ALL_GATHER, share * p->out->pieces / p->rails, false);
		break;
	case TP_ALL_GATHER:
		if (!add_across(p, coll, p->slots)) return false;
		add_inside(p, TP_ALL_GATHER, blocks, false);
		break;
	case TP_REDUCE_SCATTER:
		p->out->refs_only = false;
		if (!add_across(p, coll, p->slots)) return false;
		add_inside(p, TP_REDUCE_SCATTER, blocks, false);
		break;
	case TP_BROADCAST:
		p->out->rooted = true;
		p->out->pieces = p->rails;
		if (!add_across(p, coll, 1)) return false;
		add_inside(p, TP_SCATTER, share, true);
		add_inside(p, TP_ALL_GATHER, share, false);
		break;
	default:
		p->out->rooted = true;
		p->out->refs_only = false;
		p->out->pieces = p->rails;
		if (!add_across(p, coll, 1)) return false;
		add_inside(p, TP_REDUCE_SCATTER, share, false);
		add_inside(p, TP_GATHER, share, true);
		break;
	}
	return true;
}

bool tp_cost_profile_hierarchical(const struct tp_plan_spec *spec, struct tp_cost_profile *out)
{
	const struct tp_layout *l = spec->layout;
	int least = l->nranks, most = 0;
	for (int d = 0; d < l->ndomains; d++) {
		least = TP_MIN(least, l->domain_size[d]);
		most = TP_MAX(most, l->domain_size[d]);
	}
	int *domain = tp_alloc((size_t)TP_MAX(most, l->ndomains), sizeof(*domain), "a hierarchical plan's cost");
	struct parts p = { .rails = least, .slots = (most + least - 1) / least, .domains = l->ndomains,
		.size = (double)l->nranks / l->ndomains, .out = out };
	bool ok = domain && tp_layout_create(most, domain, &p.inside) == ncclSuccess;
	for (int d = 0; ok && d < l->ndomains; d++) domain[d] = d;
	ok = ok && tp_layout_create(l->ndomains, domain, &p.across) == ncclSuccess && add_parts(&p, spec->coll);
	tp_layout_free(p.inside);
	tp_layout_free(p.across);
	free(domain);
	return ok;
}

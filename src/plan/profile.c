/* How often each algorithm does each kind of work in a round, in closed form, so that a choice costs microseconds however
 * many ranks there are; test_cost counts the same in the very programs. Crossings of domain borders are exact for rings
 * and skips, means for trees and all pairs. */
#include "plan/cost.h"
#include "plan/stages.h"

#define EXACT_RANKS 256         /* above, borders are sampled and stages estimated */

static int log2_up(int n)
{
	int bits = 0;
	while (1u << bits < (unsigned)n) bits++;
	return bits;
}

/* Of the pairs (r, r + skip), the share in different domains. */
static double far_share(const struct tp_layout *l, int skip)
{
	if (l->ndomains == 1) return 0;
	int stride = (l->nranks + EXACT_RANKS - 1) / EXACT_RANKS, far = 0, seen = 0;
	for (int r = 0; r < l->nranks; r += stride, seen++)
		far += l->domain[r] != l->domain[(r + skip) % l->nranks];
	return (double)far / seen;
}

/* Of all ordered pairs of ranks, the share in different domains. */
static double far_share_all(const struct tp_layout *l)
{
	double n = l->nranks, near = 0;
	for (int d = 0; d < l->ndomains; d++) near += (double)l->domain_size[d] * (l->domain_size[d] - 1);
	return l->nranks < 2 ? 0 : 1 - near / (n * (n - 1));
}

static double sends(const struct tp_cost_work *w) { return w->refs + w->copies_out + w->results_out; }

/* Every send crosses with this probability; as many come as go. */
static void cross_evenly(struct tp_cost_profile *p, const struct tp_layout *l, double far, double hops)
{
	p->each.far_out = p->each.far_in = far * sends(&p->each);
	p->crossing = p->each.far_out * l->nranks / l->ndomains;
	p->hops_across = far * hops;
	p->hops_inside = hops - p->hops_across;
}

static void ring_profile(const struct tp_plan_spec *spec, struct tp_cost_profile *p)
{
	double n = spec->layout->nranks, domains = spec->layout->ndomains;
	/* It comes to each domain once, and a chain never comes back. */
	double far = tp_coll_has_root(spec->coll) ? (domains - 1) / (n - 1) : domains > 1 ? domains / n : 0;
	p->refs_only = n == 2;
	p->lockstep = true;
	switch (spec->coll) {
	case TP_ALL_REDUCE:
		p->pieces = n;
		p->each = (struct tp_cost_work){ .steps = 2 * n - 1, .refs = n, .results_out = n - 2, .ref_takes = n,
			.ref_stored = n - 1, .reduce_takes = n - 1, .reduces = n - 1 };
		cross_evenly(p, spec->layout, far, 2 * (n - 1));
		break;
	case TP_REDUCE_SCATTER:
		p->each = (struct tp_cost_work){ .steps = n, .refs = 1, .results_out = n - 2, .ref_takes = 1,
			.reduce_takes = n - 1, .reduces = n - 1 };
		cross_evenly(p, spec->layout, far, n - 1);
		break;
	case TP_ALL_GATHER:
		p->refs_only = true;
		p->each = (struct tp_cost_work){ .steps = n, .refs = n - 1, .ref_takes = n - 1, .ref_stored = n - 1, .moves = 1 };
		cross_evenly(p, spec->layout, far, n - 1);
		break;
	case TP_BROADCAST:
		p->refs_only = p->rooted = true;
		p->lockstep = false;
		p->relays = n - 2;
		p->each = (struct tp_cost_work){ .steps = 1, .refs = (n - 2) / (n - 1), .ref_takes = 1, .ref_stored = 1 };
		cross_evenly(p, spec->layout, far, n - 1);
		p->crossing = domains > 1;
		p->root = (struct tp_cost_work){ .steps = 1, .refs = 1, .moves = 1, .far_out = far };
		break;
	default:
		p->rooted = true;
		p->lockstep = false;
		p->relays = n - 2;
		p->each = (struct tp_cost_work){ .steps = 1, .refs = 1 / (n - 1), .results_out = (n - 2) / (n - 1),
			.ref_takes = n > 2 ? 1 / (n - 1) : 0, .reduce_takes = (n - 2) / (n - 1), .reduces = (n - 2) / (n - 1) };
		cross_evenly(p, spec->layout, far, n - 1);
		p->crossing = domains > 1;
		p->root = (struct tp_cost_work){ .steps = 1, .ref_takes = n == 2, .reduce_takes = 1, .reduces = 1, .far_in = far };
		break;
	}
}

/* Positions follow the domains. Domains of a power of two are subtrees, and one or two edges lead out of each; the border
 * of others is crossed on about every level. */
static void tree_profile(const struct tp_plan_spec *spec, struct tp_cost_profile *p)
{
	double n = spec->layout->nranks, domains = spec->layout->ndomains, leaves = spec->layout->nranks / 2;
	double edges = 2 * (n - 1) / n, raw = 2 * leaves / n, depth = log2_up((int)n);
	p->pieces = 2;
	p->refs_only = n == 2;
	p->each = (struct tp_cost_work){ .steps = 2 * (2 * n - 1) / n, .refs = raw + edges, .results_out = edges - raw,
		.ref_takes = raw + edges, .ref_stored = edges, .reduce_takes = edges,
		.reduces = 2 * (n - 1 + 2 * (n - leaves)) / 3 / n };
	int size = (int)(n / domains);
	double border = (size & (size - 1)) == 0 && size * domains == n ? 1.5 : 1 + log2_up(size);
	double out = TP_MIN(border * (domains - 1), n - 1);
	p->each.far_out = p->each.far_in = 4 * out / n;
	p->crossing = 4 * out / domains;
	p->hops_across = domains > 1 ? 2 * TP_MIN(log2_up((int)domains) + 1, depth) : 0;
	p->hops_inside = 2 * depth - p->hops_across;
	p->relays = 2 * (depth - 1);
}

/* Leaves of the tree of the stages, and the steps in which the lanes handle all pieces. */
static void count_stages(const struct tp_stages *s, double *leaves, double *steps, double *brought)
{
	*leaves = s->nranks / 2;
	*steps = 1.5 * s->nranks;
	for (int j = 0; j < s->nstages; j++) brought[j] = 0;
	if (s->nranks > EXACT_RANKS) {
		for (int j = 0; j < s->nstages; j++)
			brought[j] = s->kind == TP_STAGES_NEAR_FIRST
				? (j + 1 < s->nstages ? s->skip[j + 1] : s->nranks) - s->skip[j]
				: (s->nranks + s->skip[j] - 1) / (2 * s->skip[j]);
		return;
	}
	*leaves = *steps = 0;
	for (int x = 0; x < s->nranks; x++) {
		int came = -1, went = 0, next = -1;
		for (int j = 0; j < s->nstages; j++) {
			int from = x - s->skip[j];
			if (from >= 0 && tp_stages_sends(s, j, from)) {
				came = j;
				brought[j]++;
			}
			if (!tp_stages_sends(s, j, x)) continue;
			if (!went++) next = j;
		}
		*leaves += !went;
		*steps += went + (x ? next != came + 1 : next != 0);
	}
}

static void stages_profile(const struct tp_plan_spec *spec, enum tp_stages_kind kind, struct tp_cost_profile *p)
{
	struct tp_stages s;
	double n = spec->layout->nranks, leaves, steps, brought[TP_MAX_STAGES], far = 0, far_hops = 0;
	tp_stages_make(kind, spec->layout->nranks, &s);
	count_stages(&s, &leaves, &steps, brought);
	for (int j = 0; j < s.nstages; j++) {
		double share = far_share(spec->layout, s.skip[j]);
		far += share * brought[j];
		far_hops += share;
	}
	bool reduces = spec->coll != TP_ALL_GATHER, gathers = spec->coll != TP_REDUCE_SCATTER;
	p->refs_only = !reduces || n == 2;
	if (reduces)
		p->each = (struct tp_cost_work){ .steps = steps, .refs = leaves, .results_out = n - 1 - leaves, .ref_takes = leaves,
			.reduce_takes = n - 1, .reduces = n - 1 };
	if (gathers) {
		p->each.steps += steps - reduces;
		p->each.refs += n - 1;
		p->each.ref_takes += n - 1;
		p->each.ref_stored += n - 1;
		p->each.moves += !reduces;
	}
	int halves = reduces + gathers;
	p->pieces = halves == 2 ? n : 1;
	p->each.far_out = p->each.far_in = halves * far;
	p->crossing = halves * far * n / spec->layout->ndomains;
	p->hops_across = halves * far_hops;
	p->hops_inside = halves * s.nstages - p->hops_across;
}

static void bruck_profile(const struct tp_plan_spec *spec, struct tp_cost_profile *p)
{
	double n = spec->layout->nranks, hops = 0, far = 0, far_hops = 0;
	int nstages = log2_up((int)n);
	for (int bit = 0; bit < nstages; bit++) {
		int skip = 1 << bit, period = 2 * skip, whole = (int)n / period, rest = (int)n % period;
		double crosses = (double)whole * skip + TP_MAX(rest - skip, 0), share = far_share(spec->layout, skip);
		hops += crosses;
		far += share * crosses;
		far_hops += share;
	}
	p->refs_only = hops == n - 1;
	p->each = (struct tp_cost_work){ .steps = 1 + 2 * hops, .refs = n - 1, .copies_out = hops - (n - 1), .ref_takes = n - 1,
		.ref_stored = n - 1, .takes = hops - (n - 1), .moves = 1, .far_out = far, .far_in = far };
	p->crossing = far * n / spec->layout->ndomains;
	p->hops_across = far_hops;
	p->hops_inside = nstages - far_hops;
}

static void all_pairs_profile(const struct tp_plan_spec *spec, struct tp_cost_profile *p)
{
	double n = spec->layout->nranks, far = far_share_all(spec->layout), hops = 1;
	p->refs_only = true;
	if (spec->algo == TP_ALGO_ONE_SHOT) {
		p->refs_only = false;
		p->lockstep = true;             /* one lane sends and receives */
		p->each = (struct tp_cost_work){ .steps = 2, .copies_out = n - 1, .reduce_takes = n - 1, .reduces = (n + 1) / 3 };
	} else if (spec->algo == TP_ALGO_TWO_SHOT) {
		p->pieces = n;
		hops = 2;
		p->each = (struct tp_cost_work){ .steps = 2 * n - 1, .refs = 2 * (n - 1), .ref_takes = 2 * (n - 1),
			.ref_stored = n - 1, .reduce_takes = n - 1, .reduces = (n + 1) / 3 };
	} else if (spec->coll == TP_ALL_GATHER) {
		p->each = (struct tp_cost_work){ .steps = n, .refs = n - 1, .ref_takes = n - 1, .ref_stored = n - 1, .moves = 1 };
	} else if (spec->coll == TP_REDUCE_SCATTER) {
		p->each = (struct tp_cost_work){ .steps = n, .refs = n - 1, .ref_takes = n - 1, .reduce_takes = n - 1,
			.reduces = (n + 1) / 3 };
	} else {
		p->each = (struct tp_cost_work){ .steps = 2 * n - 1, .refs = n - 1, .ref_takes = n - 1, .ref_stored = n - 1,
			.moves = 1 };
	}
	cross_evenly(p, spec->layout, far, hops);
	if (far > 0) {          /* somebody's chain crosses at every hop */
		p->hops_across = hops;
		p->hops_inside = 0;
	}
}

static void rooted_profile(const struct tp_plan_spec *spec, struct tp_cost_profile *p)
{
	const struct tp_layout *l = spec->layout;
	double n = l->nranks, outside = n - l->domain_size[l->domain[spec->root]];
	bool to_root = spec->coll == TP_REDUCE || spec->coll == TP_GATHER, reduces = spec->coll == TP_REDUCE;
	p->rooted = p->refs_only = true;
	if (to_root) {
		p->each = (struct tp_cost_work){ .steps = 1, .refs = 1, .far_out = outside / (n - 1) };
		p->root = (struct tp_cost_work){ .steps = reduces ? 1 : n, .ref_takes = n - 1, .ref_stored = reduces ? 0 : n - 1,
			.reduce_takes = reduces ? n - 1 : 0, .reduces = reduces ? (n + 1) / 3 : 0, .moves = !reduces, .far_in = outside };
	} else {
		p->each = (struct tp_cost_work){ .steps = 1, .ref_takes = 1, .ref_stored = 1, .far_in = outside / (n - 1) };
		p->root = (struct tp_cost_work){ .steps = spec->coll == TP_BROADCAST ? 1 : n, .refs = n - 1, .moves = 1,
			.far_out = outside };
	}
	p->crossing = outside;
	p->hops_across = outside > 0;
	p->hops_inside = outside == 0;
}

bool tp_cost_profile_of(const struct tp_plan_spec *spec, struct tp_cost_profile *out)
{
	struct tp_cost_profile p = { .pieces = 1 };
	if (tp_plan_refuses(spec)) return false;
	if (spec->layout->nranks == 1) {
		p.refs_only = true;
		p.each = (struct tp_cost_work){ .steps = 1, .moves = 1 };
		*out = p;
		return true;
	}
	switch (spec->algo) {
	case TP_ALGO_RING: ring_profile(spec, &p); break;
	case TP_ALGO_TREE: tree_profile(spec, &p); break;
	case TP_ALGO_HALVING_DOUBLING: stages_profile(spec, TP_STAGES_NEAR_FIRST, &p); break;
	case TP_ALGO_PAT: stages_profile(spec, TP_STAGES_FAR_FIRST, &p); break;
	case TP_ALGO_BRUCK: bruck_profile(spec, &p); break;
	case TP_ALGO_ONE_SHOT: case TP_ALGO_TWO_SHOT: all_pairs_profile(spec, &p); break;
	case TP_ALGO_DIRECT:
		if (tp_coll_has_root(spec->coll)) rooted_profile(spec, &p);
		else all_pairs_profile(spec, &p);
		break;
	case TP_ALGO_HIERARCHICAL:
		if (!tp_cost_profile_hierarchical(spec, &p)) return false;
		break;
	default: return false;
	}
	*out = p;
	return true;
}

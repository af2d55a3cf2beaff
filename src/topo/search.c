/* The channel search.
 *
 * NCCL's is one depth-first search over everything at once (NICs, GPUs, bandwidth from a fixed list, limits relaxed one after
 * another) cut off by a count of steps; what it doesn't reach in time it doesn't find, and where it finds nothing it takes the ranks in
 * order. Here the question is split:
 *   1. The machine becomes a packing problem: routes and what they take (search_model.c).
 *   2. Upper bounds say for every bandwidth how many channels there could be (search_bound.c). The bandwidths worth trying are those at
 *      which some link just holds a whole number of channels; NCCL's own are tried too. They are taken by falling bound, and the
 *      search ends as soon as none left could beat what was found: on a symmetric machine that is after the first.
 *   3. For one bandwidth, channels are packed, symmetric ways first (search_pack.c, search_walk.c). What was found is then widened until
 *      a link is full.
 * Done for each limit on the kinds of paths, nearer ones first; a farther kind must carry more to be taken. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "topo/search_model.h"

#define MAX_CANDIDATES 8192
#define BETTER 1.0005                   /* times, or it isn't */
#define FIRST_BUDGET 12000              /* hops looked at for one bandwidth; what is left of the whole goes to a second look */
#define SECOND_BUDGET 60000
#define WHOLE_BUDGET 1500000
#define SWEEP_BUDGET 4000               /* one of NCCL's bandwidths */
#define FIRST_LOOKS 3

struct candidate { double bw, total; int bound; };

struct search {
	const struct tp_problem *p;
	struct tp_pack *pack;
	struct candidate *candidates;
	int ncandidates;
	double *intra, *inter;          /* [nresources] */
	bool may_part;
	double bound;                   /* of all that was looked into */
	uint64_t budget;                /* hops in all */
	uint64_t stop_at;               /* hops, for this form and these kinds of paths */
	/* The best so far. */
	struct tp_wish wish;
	struct tp_packed best;
	double total, bw_intra, bw_inter;
	int most, cross_nic;
	bool tidying;                   /* as good is good enough */
};

static void add_candidate(struct search *s, const struct tp_bound *bound, const struct tp_wish *wish, double bw)
{
	if (s->ncandidates == MAX_CANDIDATES || bw > s->p->channel_max * (1 + 1e-9) || bw <= 1e-6) return;
	int n = tp_bound_channels(bound, bw, wish->most);
	if (n < 1 || n * bw <= s->total * BETTER) return;
	s->candidates[s->ncandidates++] = (struct candidate){ bw, n * bw, n };
}

/* Larger total first; of equal totals the bandwidth nearest to a channel's natural one, as a ratio. */
static double oddness(double bw, double unit) { return bw > unit ? bw / unit : unit / bw; }

static int by_total(const void *a, const void *b, void *arg)
{
	const struct candidate *x = a, *y = b;
	const struct tp_problem *p = arg;
	if (fabs(x->total - y->total) > 1e-6 * x->total) return x->total > y->total ? -1 : 1;
	double odd = oddness(x->bw, p->unit) - oddness(y->bw, p->unit);
	if (fabs(odd) > 1e-9) return odd < 0 ? -1 : 1;
	return x->bw > y->bw ? -1 : x->bw < y->bw;
}

enum { MAX_WEIGHTS = 8, MIXED = 8 };

static int list_weights(const struct tp_problem *p, float weights[MAX_WEIGHTS])
{
	int n = 0;
	size_t places = (size_t)(p->ngpus + p->nnets);
	weights[n++] = 1;
	for (size_t r = 0; r < places * places; r++)
		for (int32_t u = p->routes[r].first; u < p->routes[r].first + p->routes[r].nuses && n < MAX_WEIGHTS; u++) {
			int i = 0;
			while (i < n && weights[i] != p->uses[u].weight) i++;
			if (i == n) weights[n++] = p->uses[u].weight;
		}
	return n;
}

/* Where a link holds a whole number of channels, of one weight or of two mixed: capacity / (weight x k). Chains come in halves. */
static const double tried_by_nccl[] = { 90, 80, 72, 70, 60, 50, 48, 45, 42, 40, 30, 28, 24, 22, 20, 18, 15, 12, 11, 10, 9, 7, 6, 5, 4, 3, 2.4, 1.2,
	0.24, 0.12 };

static void list_candidates(struct search *s, const struct tp_bound *bound, const struct tp_wish *wish)
{
	const struct tp_problem *p = s->p;
	double share = tp_form_is_ring(wish->form) ? 1 : 0.5;
	float weights[MAX_WEIGHTS];
	int nweights = list_weights(p, weights);
	s->ncandidates = 0;
	for (int r = 0; r < p->nresources; r++) {
		bool seen = false;
		for (int q = 0; q < r && !seen; q++) seen = p->capacity[q] == p->capacity[r];
		for (int w = 0; w < nweights && !seen; w++) {
			for (int k = 1; k <= 2 * wish->most; k++) add_candidate(s, bound, wish, p->capacity[r] / (weights[w] * k * share));
			for (int k = 1; k <= MIXED * MIXED && w; k++)
				add_candidate(s, bound, wish, p->capacity[r] / ((1 + k / MIXED + weights[w] * (1 + k % MIXED)) * share));
		}
	}
	for (size_t i = 0; i < TP_ARRAY_LEN(tried_by_nccl); i++) add_candidate(s, bound, wish, tried_by_nccl[i]);
	qsort_r(s->candidates, (size_t)s->ncandidates, sizeof(*s->candidates), by_total, (void *)p);
	int kept = 0;
	for (int i = 0; i < s->ncandidates; i++)
		if (!kept || fabs(s->candidates[i].bw - s->candidates[kept - 1].bw) > 1e-7 * s->candidates[i].bw) s->candidates[kept++] = s->candidates[i];
	s->ncandidates = kept;
}

/* The widest that these channels can be. */
static double widen(const struct search *s, const struct tp_packed *found, enum tp_form form)
{
	double bw = s->p->channel_max;
	tp_packed_load(s->p, form, found, s->intra, s->inter);
	for (int r = 0; r < s->p->nresources; r++) {
		double load = s->intra[r] + s->inter[r];
		if (load > 1e-9 && s->p->capacity[r] / load < bw) bw = s->p->capacity[r] / load;
	}
	return bw;
}

/* Trees move twice within the domain what they move outside: the GPUs that aren't heads have room for it. */
static double widen_within(const struct search *s, double bw_inter)
{
	double bw = TP_MIN(2 * bw_inter, s->p->channel_max);
	for (int r = 0; r < s->p->nresources; r++)
		if (s->intra[r] > 1e-9) bw = TP_MIN(bw, (s->p->capacity[r] - s->inter[r] * bw_inter) / s->intra[r]);
	return TP_MAX(bw, bw_inter);
}

static void consider(struct search *s, const struct tp_packed *found, const struct tp_wish *wish)
{
	if (!found->n) return;
	double bw = widen(s, found, wish->form), within = bw;
	if (!tp_form_is_ring(wish->form) && tp_form_has_nets(wish->form)) within = widen_within(s, bw);
	double total = found->n * bw;
	double inside = total * within / bw, inside_before = s->best.n * s->bw_intra;
	bool same = s->best.n && total > s->total / BETTER && inside > inside_before * BETTER;
	bool tidier = s->tidying && total > s->total * (1 - 1e-5) && inside > inside_before * (1 - 1e-5);
	if (total <= s->total * BETTER && !same && !tidier) return;
	size_t gpus = (size_t)s->p->ngpus;
	s->best.n = found->n;
	memcpy(s->best.order, found->order, (size_t)found->n * gpus * sizeof(*found->order));
	memcpy(s->best.net_in, found->net_in, (size_t)found->n * sizeof(*found->net_in));
	memcpy(s->best.net_out, found->net_out, (size_t)found->n * sizeof(*found->net_out));
	s->total = TP_MAX(total, s->total);
	s->bw_inter = bw;
	s->bw_intra = within;
	s->wish = *wish;
}

static bool may_spend(const struct search *s) { return tp_pack_steps(s->pack) < s->stop_at; }

/* Packs n channels of bw; how many there were. */
static int attempt(struct search *s, struct tp_wish *wish, double bw, int n, uint64_t budget)
{
	uint64_t least = 8 * (uint64_t)s->p->ngpus * (uint64_t)s->p->ngpus * (uint64_t)n + 1;
	wish->bw = bw;
	const struct tp_packed *found = tp_pack_run(s->pack, wish, n, TP_MAX(budget, least));
	consider(s, found, wish);
	return found->n;
}

static int by_bw(const void *a, const void *b)
{
	const struct candidate *x = a, *y = b;
	return x->bw < y->bw ? -1 : x->bw > y->bw;
}

/* For each number of channels the largest bandwidth that they can have, which falls as there are more: so one that is just large
 * enough to beat what is known is tried first, and only where it can be had larger ones by halving. false: not one channel is to be had. */
static bool climb(struct search *s, struct tp_wish *wish, uint64_t budget)
{
	int high = s->ncandidates;
	qsort(s->candidates, (size_t)s->ncandidates, sizeof(*s->candidates), by_bw);
	for (int n = 1; n <= wish->most && high > 0 && may_spend(s); n++) {
		int low = 0, top;
		while (low < high && s->candidates[low].bw * n <= s->total * BETTER) low++;
		while (high > low && s->candidates[high - 1].bound < n) high--;
		if (low >= high) continue;
		int had = attempt(s, wish, s->candidates[low].bw, n, budget);
		if (!had && low == 0 && s->total <= 0) return false;
		if (had < n) continue;
		/* low is had, top isn't. */
		for (top = high; top - low > 1 && may_spend(s);) {
			int middle = low + (top - low) / 2;
			if (attempt(s, wish, s->candidates[middle].bw, n, budget) >= n) low = middle;
			else top = middle;
		}
		high = top;
	}
	return true;
}

/* NCCL's bandwidths once each, downwards: where bounds are loose this is what finds many channels early. */
static void sweep(struct search *s, struct tp_wish *wish, const struct tp_bound *bound)
{
	bool had = false;
	for (size_t i = 0; i < TP_ARRAY_LEN(tried_by_nccl) && may_spend(s); i++) {
		double bw = tried_by_nccl[i];
		int n = bw <= s->p->channel_max ? tp_bound_channels(bound, bw, wish->most) : 0;
		/* Half of one that is had is rarely better. */
		if (n < 1 || n * bw <= s->total * BETTER || (had && bw < 0.49 * s->bw_inter)) continue;
		had |= attempt(s, wish, bw, n, SWEEP_BUDGET) > 0;
	}
}

/* All bandwidths for one form and one limit of the paths' kinds. */
static ncclResult_t look(struct search *s, struct tp_wish wish)
{
	struct tp_bound *bound;
	TP_TRY(tp_bound_create(s->p, &wish, &bound));
	double most = TP_MIN(tp_bound_total(bound), s->p->channel_max * wish.most);
	s->bound = TP_MAX(s->bound, most);
	s->ncandidates = 0;
	if (most > s->total * BETTER) list_candidates(s, bound, &wish);
	/* A quarter of what is left: the others have their turn. */
	uint64_t spent = tp_pack_steps(s->pack);
	s->stop_at = spent + (spent < s->budget ? (s->budget - spent) / 4 : 0);
	/* Where the bound can be reached it mostly is at once. */
	for (int i = 0; i < s->ncandidates && i < FIRST_LOOKS && s->candidates[i].total > s->total * BETTER && may_spend(s); i++)
		attempt(s, &wish, s->candidates[i].bw, s->candidates[i].bound, FIRST_BUDGET);
	if (most > s->total * BETTER) sweep(s, &wish, bound);
	tp_bound_free(bound);
	if (most <= s->total * BETTER) return ncclSuccess;
	if (climb(s, &wish, FIRST_BUDGET) && most > s->total * BETTER) climb(s, &wish, SECOND_BUDGET);
	return ncclSuccess;
}

static int list_types(const struct tp_problem *p, bool inter, enum tp_topo_path_type types[TP_PATH_TYPES])
{
	bool there[TP_PATH_TYPES] = { false };
	int n = 0;
	for (int from = 0; from < p->ngpus; from++)
		for (int to = inter ? p->ngpus : 0; to < (inter ? p->ngpus + p->nnets : p->ngpus); to++)
			for (int way = 0; way < 2; way++) {
				const struct tp_route *route = way ? tp_route_of(p, to, from) : tp_route_of(p, from, to);
				if (route->nuses) there[route->type] = true;
			}
	for (int type = 0; type <= TP_PATH_NET; type++)
		if (there[type]) types[n++] = (enum tp_topo_path_type)type;
	if (!n) types[n++] = TP_PATH_LOC;
	return n;
}

/* Trees with NETs: what they carry outside is found; other numbers of channels, packed for more within, may carry more there. */
static void improve_within(struct search *s)
{
	static const double ratios[] = { 2, 1.75, 5.0 / 3, 1.5, 4.0 / 3, 1.25, 1.125 };
	struct tp_wish wish = s->wish;
	s->stop_at = tp_pack_steps(s->pack) + s->budget / 4;
	for (size_t r = 0; r < TP_ARRAY_LEN(ratios); r++)
		for (int n = 1; n <= s->most && may_spend(s); n++) {
			double bw = s->total / n;
			if (ratios[r] * s->total <= s->best.n * s->bw_intra * BETTER) return;
			if (bw * ratios[r] > s->p->channel_max) continue;
			wish.within = ratios[r];
			/* As large as it was but for the last digit, so that a full link is full and no more. */
			attempt(s, &wish, bw * (1 - 1e-6), n, FIRST_BUDGET / 4);
		}
}

/* The same total in fewer channels of a more natural bandwidth, where that can be had: each channel costs whoever runs it. */
static void tidy(struct search *s)
{
	struct tp_wish wish = s->wish;
	double total = s->total;
	int n = s->best.n;
	bool chain = !tp_form_is_ring(wish.form) && tp_form_has_nets(wish.form);
	wish.within = chain ? s->bw_intra / s->bw_inter : 0;
	s->stop_at = tp_pack_steps(s->pack) + s->budget / 8;
	s->tidying = true;
	for (int fewer = 1; fewer < n && s->best.n == n && may_spend(s); fewer++) {
		double bw = total / fewer;
		if (bw > s->p->channel_max || oddness(bw, s->p->unit) >= oddness(total / n, s->p->unit)) continue;
		attempt(s, &wish, bw * (1 - 1e-6), fewer, FIRST_BUDGET / 2);
	}
	s->tidying = false;
}

static ncclResult_t look_everywhere(struct search *s, bool ring)
{
	enum tp_topo_path_type intra[TP_PATH_TYPES], inter[TP_PATH_TYPES];
	bool nets = s->p->nnets > 0;
	int nintra = list_types(s->p, false, intra), ninter = nets ? list_types(s->p, true, inter) : 1;
	const enum tp_form chains[] = { TP_FORM_CHAIN_TWO_HEADS, TP_FORM_CHAIN_NETS };
	int crosses[2] = { s->cross_nic == 1 ? 1 : 0, 2 }, ncrosses = ring && nets && s->cross_nic == 2 && s->p->nnets > 1 ? 2 : 1;
	for (int e = 0; e < ninter; e++)
		for (int a = 0; a < nintra; a++) {
			struct tp_wish wish = { .type_intra = intra[a], .type_inter = nets ? inter[e] : TP_PATH_LOC, .most = s->most };
			for (int i = 0; i < (ring ? ncrosses : nets ? 2 : 1); i++) {
				wish.form = ring ? (nets ? TP_FORM_RING_NETS : TP_FORM_RING) : nets ? chains[i] : TP_FORM_CHAIN;
				wish.cross_nic = ring && nets ? crosses[i] : 0;
				TP_TRY(look(s, wish));
			}
		}
	if (!ring && nets && s->best.n) improve_within(s);
	if (s->best.n > 1 && oddness(s->total / s->best.n, s->p->unit) > 1.105) tidy(s);
	return ncclSuccess;
}

static void search_free(struct search *s)
{
	tp_pack_free(s->pack);
	free(s->candidates);
	free(s->intra);
	free(s->inter);
}

void tp_search_free(struct tp_search_result *result)
{
	free(result->packed.order);
	free(result->packed.net_in);
	free(result->packed.net_out);
}

static ncclResult_t search_alloc(struct search *s)
{
	size_t gpus = (size_t)s->p->ngpus + 1, n = (size_t)s->p->nresources + 1;
	s->candidates = tp_alloc(MAX_CANDIDATES, sizeof(*s->candidates), "channel search");
	s->intra = tp_alloc(n, sizeof(*s->intra), "channel search");
	s->inter = tp_alloc(n, sizeof(*s->inter), "channel search");
	s->best.order = tp_alloc(TP_CHANNELS_MAX * gpus, sizeof(*s->best.order), "channel search");
	s->best.net_in = tp_alloc(TP_CHANNELS_MAX, sizeof(*s->best.net_in), "channel search");
	s->best.net_out = tp_alloc(TP_CHANNELS_MAX, sizeof(*s->best.net_out), "channel search");
	if (!s->candidates || !s->intra || !s->inter || !s->best.order || !s->best.net_in || !s->best.net_out) return ncclSystemError;
	return tp_pack_create(s->p, s->may_part, &s->pack);
}

static ncclResult_t run_once(struct search *s, bool ring, struct tp_search_result *out)
{
	ncclResult_t result = search_alloc(s);
	if (result == ncclSuccess && (s->p->ngpus > 1 || s->p->nnets)) result = look_everywhere(s, ring);
	struct tp_search_result found = { s->best, s->wish.form, s->wish.cross_nic, s->bw_intra, s->bw_inter, s->bound, s->pack ? tp_pack_steps(s->pack) : 0 };
	search_free(s);
	if (result == ncclSuccess) *out = found;
	else tp_search_free(&found);
	return result;
}

static ncclResult_t run_above(const struct tp_problem *p, bool ring, int cross_nic, int most, double above, bool may_part, struct tp_search_result *out)
{
	/* What is promised of a large machine leaves more time. */
	const uint64_t again = may_part ? WHOLE_BUDGET / 2 : p->ngpus <= 8 ? WHOLE_BUDGET / 4 : 3 * WHOLE_BUDGET;
	struct search s = { .p = p, .most = most, .cross_nic = cross_nic, .may_part = may_part, .total = above, .budget = above > 0 ? again : WHOLE_BUDGET };
	return run_once(&s, ring, out);
}

ncclResult_t tp_search_run_above(const struct tp_problem *p, bool ring, int cross_nic, int most, double above, struct tp_search_result *out)
{
	return run_above(p, ring, cross_nic, most, above, true, out);
}

/* The better of two; the other is gone. */
static void keep_better(struct tp_search_result *best, struct tp_search_result *other)
{
	const bool better = other->packed.n > 0;
	other->bound = best->bound = TP_MAX(best->bound, other->bound);
	other->steps = best->steps += other->steps;
	tp_search_free(better ? best : other);
	if (better) *best = *other;
}

/* Where rings may end at GPUs that have little between them, that takes steps from those that don't: these have a search of their own behind it. */
ncclResult_t tp_search_run(const struct tp_problem *p, bool ring, int cross_nic, int most, struct tp_search_result *out)
{
	struct tp_search_result found, other;
	TP_TRY(run_above(p, ring, cross_nic, most, 0, true, &found));
	const double total = found.packed.n * found.bw_inter;
	ncclResult_t result = ncclSuccess;
	if (ring && cross_nic && p->nnets && total > 0 && total * BETTER < found.bound && tp_pack_is_uneven(p)) {
		result = run_above(p, ring, cross_nic, most, total, false, &other);
		if (result == ncclSuccess) keep_better(&found, &other);
	}
	if (result == ncclSuccess) *out = found;
	else tp_search_free(&found);
	return result;
}

/* What was found, in terms of the graph. */

static void farther(enum tp_topo_path_type *type, const struct tp_route *route)
{
	if (route->nuses && route->type > *type) *type = route->type;
}

static void note_types(const struct tp_problem *p, const struct tp_search_result *s, struct tp_channels *out)
{
	out->type_intra = out->type_inter = TP_PATH_LOC;
	for (int c = 0; c < s->packed.n; c++) {
		const int16_t *order = s->packed.order + (size_t)c * (size_t)p->ngpus;
		for (int i = 0; i < p->ngpus; i++) {
			if (i + 1 < p->ngpus || s->form == TP_FORM_RING) farther(&out->type_intra, tp_route_of(p, order[i], order[(i + 1) % p->ngpus]));
			if (!tp_form_has_nets(s->form)) continue;
			bool head = i == 0 || (i == 1 && s->form == TP_FORM_CHAIN_TWO_HEADS), tail = s->form == TP_FORM_RING_NETS ? i == p->ngpus - 1 : head;
			if (head) farther(&out->type_inter, tp_route_of(p, tp_net_place(p, s->packed.net_in[c]), order[i]));
			if (tail) farther(&out->type_inter, tp_route_of(p, order[i], tp_net_place(p, s->packed.net_out[c])));
		}
	}
}

static ncclResult_t alloc_channels(struct tp_channels *out, int nchannels, int ngpus)
{
	out->nchannels = nchannels;
	out->ngpus = ngpus;
	out->channels = tp_alloc((size_t)nchannels + 1, sizeof(*out->channels), "channels");
	for (int c = 0; c < nchannels && out->channels; c++) {
		out->channels[c].net_in = out->channels[c].net_out = -1;
		out->channels[c].gpus = tp_alloc((size_t)ngpus + 1, sizeof(*out->channels[c].gpus), "channels");
		if (!out->channels[c].gpus) return ncclSystemError;
	}
	return out->channels ? ncclSuccess : ncclSystemError;
}

static int32_t net_node(const struct tp_topo *topo, int net) { return net < 0 ? -1 : tp_topo_node_of(topo, TP_TOPO_NET, net)->index; }

static ncclResult_t hand_over_hops(const struct tp_topo *topo, const struct tp_problem *p, const int16_t *order, struct tp_channels *all, struct tp_channel *out)
{
	bool any = false;
	for (int i = 0; i + 1 < p->ngpus; i++) any |= tp_via(p, order[i], order[i + 1]) >= 0;
	if (!any) return ncclSuccess;
	all->by_net = true;
	out->nets = tp_alloc((size_t)p->ngpus, sizeof(*out->nets), "channels");
	if (!out->nets) return ncclSystemError;
	for (int i = 0; i < p->ngpus; i++)
		out->nets[i] = (struct tp_hop_nets){ i ? net_node(topo, tp_via(p, order[i], order[i - 1])) : -1,
			i + 1 < p->ngpus ? net_node(topo, tp_via(p, order[i], order[i + 1])) : -1 };
	return ncclSuccess;
}

static ncclResult_t hand_over(const struct tp_topo *topo, const struct tp_problem *p, const struct tp_search_result *s, struct tp_channels *out)
{
	TP_TRY(alloc_channels(out, s->packed.n, p->ngpus));
	out->same = true;
	for (int c = 0; c < s->packed.n; c++) {
		struct tp_channel *to = &out->channels[c];
		const int16_t *order = s->packed.order + (size_t)c * (size_t)p->ngpus;
		for (int i = 0; i < p->ngpus; i++) to->gpus[i] = tp_topo_node_of(topo, TP_TOPO_GPU, order[i])->index;
		if (tp_form_has_nets(s->form)) {
			to->net_in = net_node(topo, s->packed.net_in[c]);
			to->net_out = net_node(topo, s->packed.net_out[c]);
			out->latency_inter_us = TP_MAX(out->latency_inter_us, topo->nodes[to->net_in].net.latency_us);
		}
		TP_TRY(hand_over_hops(topo, p, order, out, to));
		if (c && (memcmp(to->gpus, out->channels[0].gpus, (size_t)p->ngpus * sizeof(*to->gpus)) || to->net_in != out->channels[0].net_in ||
			to->net_out != out->channels[0].net_out))
			out->same = false;
	}
	out->bw_intra = s->bw_intra;
	out->bw_inter = s->bw_inter;
	out->cross_nic = s->cross_nic;
	if (s->form == TP_FORM_CHAIN_TWO_HEADS) out->pattern = TP_PATTERN_BALANCED_TREE;
	note_types(p, s, out);
	return ncclSuccess;
}

/* One GPU, one host: nothing moves. Nothing found: plain order, so that whoever asked has something; tp_channels_explain says why. */
static ncclResult_t plain_order(const struct tp_topo *topo, const struct tp_problem *p, struct tp_channels *out)
{
	TP_TRY(alloc_channels(out, 1, p->ngpus));
	for (int i = 0; i < p->ngpus; i++) out->channels[0].gpus[i] = tp_topo_node_of(topo, TP_TOPO_GPU, i)->index;
	out->same = true;
	if (p->nnets) out->channels[0].net_in = out->channels[0].net_out = tp_topo_node_of(topo, TP_TOPO_NET, 0)->index;
	out->type_intra = p->ngpus > 1 ? TP_PATH_SYS : TP_PATH_LOC;
	out->type_inter = p->nnets ? TP_PATH_SYS : TP_PATH_LOC;
	out->bw_intra = out->bw_inter = p->ngpus > 1 || p->nnets ? 0.1 : tp_topo_constant("local");
	return ncclSuccess;
}

static ncclResult_t explain(const struct tp_topo *topo, const struct tp_topo_policy *policy, const struct tp_problem *p,
	const struct tp_search_result *s, struct tp_channels *out)
{
	size_t n = (size_t)p->nresources + 1;
	double *load = tp_alloc(n, sizeof(*load), "loads of links"), *inter = tp_alloc(n, sizeof(*inter), "loads of links");
	ncclResult_t result = load && inter ? ncclSuccess : ncclSystemError;
	if (result == ncclSuccess && s->packed.n) tp_packed_load(p, s->form, &s->packed, load, inter);
	for (int r = 0; r < p->nresources && result == ncclSuccess; r++)
		load[r] = (load[r] * out->bw_intra + inter[r] * out->bw_inter) / TP_MAX(p->capacity[r], 1e-9);
	if (result == ncclSuccess) result = tp_channels_explain(topo, policy, p, out, load);
	free(load);
	free(inter);
	return result;
}

static bool all_amd(const struct tp_topo *topo)
{
	for (int i = 0; i < topo->count[TP_TOPO_GPU]; i++)
		if (tp_topo_node_of(topo, TP_TOPO_GPU, i)->gpu.maker != TP_MAKER_AMD) return false;
	return true;
}

/* Both ways to reach GPUs that only a CPU joins are tried; NICs must carry more to be taken. *by_net is the problem's, and NULL where it isn't to be had. */
static ncclResult_t search_by_net(const struct tp_topo *topo, const struct tp_topo_policy *policy, bool ring, struct tp_search_result *best, struct tp_problem **by_net)
{
	struct tp_search_result s;
	*by_net = NULL;
	if (!policy->multi_host || policy->net_within == TP_OFF || (policy->net_within == TP_AUTO && !all_amd(topo))) return ncclSuccess;
	TP_TRY(tp_problem_create(topo, policy, true, by_net));
	bool better = false;
	ncclResult_t result = (*by_net)->nvia ? tp_search_run_above(*by_net, ring, policy->cross_nic, TP_CHANNELS_MAX, best->packed.n * best->bw_inter, &s) : ncclSuccess;
	if (result == ncclSuccess && (*by_net)->nvia) {
		better = s.packed.n > 0;
		keep_better(best, &s);
	}
	if (better) return ncclSuccess;
	tp_problem_free(*by_net);
	*by_net = NULL;
	return result;
}

static ncclResult_t run(const struct tp_topo *topo, const struct tp_topo_policy *policy, const struct tp_problem *direct, struct tp_channels *out)
{
	struct tp_search_result s;
	struct tp_problem *by_net;
	TP_TRY(tp_search_run(direct, out->pattern == TP_PATTERN_RING, policy->cross_nic, TP_CHANNELS_MAX, &s));
	/* Its failure takes nothing from what was found. */
	if (search_by_net(topo, policy, out->pattern == TP_PATTERN_RING, &s, &by_net) != ncclSuccess)
		TP_INFO(TP_GRAPH, "channels stay without ways by NICs between GPUs of one host, since these can't be searched for: %s", tp_log_last_error());
	const struct tp_problem *p = by_net ? by_net : direct;
	ncclResult_t result = s.packed.n ? hand_over(topo, p, &s, out) : plain_order(topo, p, out);
	out->bound = s.bound;
	out->steps = s.steps;
	if (result == ncclSuccess) result = explain(topo, policy, p, &s, out);
	tp_search_free(&s);
	tp_problem_free(by_net);
	return result;
}

ncclResult_t tp_channels_search(const struct tp_topo *topo, const struct tp_topo_policy *policy, enum tp_pattern pattern,
	struct tp_channels **out)
{
	struct tp_problem *p;
	if (!topo->count[TP_TOPO_GPU]) return TP_FAIL(ncclInvalidUsage, "channels over a machine without GPUs");
	TP_TRY(tp_problem_create(topo, policy, false, &p));
	struct tp_channels *channels = tp_alloc(1, sizeof(*channels), "channels");
	ncclResult_t result = channels ? ncclSuccess : ncclSystemError;
	if (channels) channels->pattern = pattern;
	if (result == ncclSuccess) result = pattern == TP_PATTERN_PAIRS ? tp_channels_pairs(topo, policy, p, channels) : run(topo, policy, p, channels);
	tp_problem_free(p);
	if (result == ncclSuccess) *out = channels;
	else tp_channels_free(channels);
	return result;
}

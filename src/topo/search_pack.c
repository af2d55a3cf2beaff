/* Packing channels of one bandwidth into what the routes have.
 *
 * Channels are added one after another: first those found before, repeated or turned round (on a symmetric machine that is
 * all there is to do), else by a depth-first walk (search_walk.c). When no more fit, some are taken out and others put in (ruin and
 * recreate), accepted unless there are fewer. All choices come from one generator with a fixed seed and all limits are counts of
 * hops looked at, so the same graph gives the same channels on every rank and every machine. */
#include <stdlib.h>
#include <string.h>

#include "topo/search_pack.h"

static bool packed_alloc(struct tp_packed *packed, size_t gpus)
{
	packed->order = tp_alloc(TP_CHANNELS_MAX * gpus, sizeof(*packed->order), "channels");
	packed->net_in = tp_alloc(TP_CHANNELS_MAX, sizeof(*packed->net_in), "channels");
	packed->net_out = tp_alloc(TP_CHANNELS_MAX, sizeof(*packed->net_out), "channels");
	return packed->order && packed->net_in && packed->net_out;
}

static void packed_free(struct tp_packed *packed)
{
	free(packed->order);
	free(packed->net_in);
	free(packed->net_out);
}

static void packed_copy(struct tp_packed *to, const struct tp_packed *from, size_t gpus)
{
	to->n = from->n;
	memcpy(to->order, from->order, (size_t)from->n * gpus * sizeof(*to->order));
	memcpy(to->net_in, from->net_in, (size_t)from->n * sizeof(*to->net_in));
	memcpy(to->net_out, from->net_out, (size_t)from->n * sizeof(*to->net_out));
}

void tp_pack_free(struct tp_pack *pack)
{
	if (!pack) return;
	free(pack->left);
	packed_free(&pack->now);
	packed_free(&pack->best);
	packed_free(&pack->kept);
	free(pack->candidates);
	free(pack->keys);
	free(pack->used);
	free(pack->walk);
	free(pack->net_keys);
	free(pack->net_gpus);
	free(pack->served);
	free(pack->nearest);
	free(pack->island);
	free(pack);
}

static bool alike(const struct tp_problem *p, const struct tp_route *a, const struct tp_route *b)
{
	double narrow[2] = { 1e18, 1e18 };
	for (int i = 0; i < 2; i++) {
		const struct tp_route *route = i ? b : a;
		for (int32_t u = route->first; u < route->first + route->nuses; u++)
			narrow[i] = TP_MIN(narrow[i], p->capacity[p->uses[u].resource] / p->uses[u].weight);
	}
	return a->type == b->type && narrow[0] == narrow[1];
}

bool tp_pack_is_uneven(const struct tp_problem *p)
{
	for (int a = 0; a < p->ngpus; a++)
		for (int b = 0; b < p->ngpus; b++)
			if (a != b && !alike(p, tp_route_of(p, a, b), tp_route_of(p, 0, 1))) return true;
	return false;
}

ncclResult_t tp_pack_create(const struct tp_problem *p, bool may_part, struct tp_pack **out)
{
	size_t gpus = (size_t)p->ngpus + 1;
	struct tp_pack *pack = tp_alloc(1, sizeof(*pack), "channel search");
	if (!pack) return ncclSystemError;
	pack->p = p;
	pack->left = tp_alloc((size_t)p->nresources + 1, sizeof(*pack->left), "channel search");
	pack->candidates = tp_alloc(gpus * gpus, sizeof(*pack->candidates), "channel search");
	pack->keys = tp_alloc(gpus, sizeof(*pack->keys), "channel search");
	pack->used = tp_alloc(gpus, sizeof(*pack->used), "channel search");
	pack->walk = tp_alloc(gpus, sizeof(*pack->walk), "channel search");
	pack->net_keys = tp_alloc((size_t)p->nnets + 1, sizeof(*pack->net_keys), "channel search");
	pack->net_gpus = tp_alloc((size_t)p->nnets + 1, sizeof(*pack->net_gpus), "channel search");
	pack->served = tp_alloc(gpus, sizeof(*pack->served), "channel search");
	pack->nearest = tp_alloc(gpus, sizeof(*pack->nearest), "channel search");
	pack->island = tp_alloc(gpus, sizeof(*pack->island), "channel search");
	if (pack->island && pack->served) pack->nislands = tp_problem_islands(p, pack->island, pack->served);
	for (int gpu = 0; gpu < p->ngpus && pack->nearest; gpu++) {
		pack->nearest[gpu] = TP_PATH_DIS;
		for (int other = 0; other < p->ngpus; other++) pack->nearest[gpu] = TP_MIN(pack->nearest[gpu], (int)tp_route_of(p, gpu, other)->type);
	}
	pack->may_part = may_part && tp_pack_is_uneven(p);
	bool ok = pack->nearest && pack->island && pack->net_keys && pack->net_gpus && pack->served && pack->left && pack->candidates && pack->keys && pack->used && pack->walk;
	if (ok && packed_alloc(&pack->now, gpus) && packed_alloc(&pack->best, gpus) && packed_alloc(&pack->kept, gpus)) {
		*out = pack;
		return ncclSuccess;
	}
	tp_pack_free(pack);
	return ncclSystemError;
}

uint64_t tp_pack_steps(const struct tp_pack *pack) { return pack->steps; }

/* One more channel, or two that are each other's way back. */

static bool add_turned(struct tp_pack *pack, int channel, bool turned)
{
	struct tp_packed *now = &pack->now;
	int16_t *order = tp_pack_order(now, pack, now->n);      /* free: there is room for one more */
	int gpus = pack->p->ngpus, in = now->net_in[channel], out = now->net_out[channel];
	for (int i = 0; i < gpus; i++) order[i] = tp_pack_order(now, pack, channel)[turned ? gpus - 1 - i : i];
	if (turned) in = now->net_out[channel], out = now->net_in[channel];
	if (!tp_pack_take_channel(pack, order, in, out)) return false;
	now->net_in[now->n] = (int16_t)in;
	now->net_out[now->n] = (int16_t)out;
	now->n++;
	return true;
}

/* Rings that may cross NICs in pairs: pairs stand first, so that c and c ^ 1 are partners, then those that don't cross. */
static bool has_pairs(const struct tp_pack *pack) { return pack->wish->form == TP_FORM_RING_NETS && pack->wish->cross_nic == 2; }

static bool crosses(const struct tp_pack *pack, const struct tp_packed *packed, int channel)
{
	return pack->p->port[packed->net_in[channel]] != pack->p->port[packed->net_out[channel]];
}

static int count_paired(const struct tp_pack *pack, const struct tp_packed *packed)
{
	int n = 0;
	while (n < packed->n && crosses(pack, packed, n)) n++;
	return n;
}

/* The last two are a new pair: before those that don't cross with them. */
static void settle_pair(struct tp_pack *pack)
{
	struct tp_packed *now = &pack->now;
	size_t row = (size_t)pack->p->ngpus * sizeof(*now->order);
	int at = count_paired(pack, now), behind = now->n - 2 - at;
	int16_t in[2], out[2];
	if (behind <= 0) return;
	memcpy(pack->candidates, tp_pack_order(now, pack, now->n - 2), 2 * row);      /* a walk's, and none is on */
	memmove(tp_pack_order(now, pack, at + 2), tp_pack_order(now, pack, at), (size_t)behind * row);
	memcpy(tp_pack_order(now, pack, at), pack->candidates, 2 * row);
	memcpy(in, &now->net_in[now->n - 2], sizeof(in));
	memcpy(out, &now->net_out[now->n - 2], sizeof(out));
	memmove(&now->net_in[at + 2], &now->net_in[at], (size_t)behind * sizeof(*in));
	memmove(&now->net_out[at + 2], &now->net_out[at], (size_t)behind * sizeof(*out));
	memcpy(&now->net_in[at], in, sizeof(in));
	memcpy(&now->net_out[at], out, sizeof(out));
}

static bool add_pair_again(struct tp_pack *pack)
{
	struct tp_packed *now = &pack->now;
	int paired = count_paired(pack, now);
	if (paired < 2 || now->n + 2 > pack->target || !add_turned(pack, paired - 2, false)) return false;
	if (add_turned(pack, paired - 1, false)) {
		settle_pair(pack);
		return true;
	}
	now->n--;
	tp_pack_give_channel(pack, tp_pack_order(now, pack, now->n), now->net_in[now->n], now->net_out[now->n]);
	return false;
}

/* The last few, again or turned. */
static bool add_again(struct tp_pack *pack)
{
	struct tp_packed *now = &pack->now;
	if (pack->variant == 2 || pack->variant == 3 || !tp_form_is_ring(pack->wish->form) || !now->n) return false;
	if (pack->variant >= TP_PACK_STEADY && tp_pack_draw(pack, 3)) return false;
	tp_pack_set_direction(pack, false);
	if (has_pairs(pack)) return add_pair_again(pack);
	for (int back = 1; back <= 4 && back <= now->n; back++)
		for (int turned = 0; turned < 2; turned++)
			if (add_turned(pack, now->n - back, turned ^ (pack->variant & 1))) return true;
	return false;
}

static bool add_plain(struct tp_pack *pack)
{
	int gpus = pack->p->ngpus;
	bool ring = pack->wish->form == TP_FORM_RING, both = ring && pack->variant % 2 == 1 && pack->now.n + 2 <= pack->target;
	for (int tries = both ? 2 : 1; tries > 0; tries--) {
		tp_pack_set_direction(pack, both && tries == 2);
		for (int i = 0; i < (ring ? 1 : gpus); i++) {
			int first = pack->variant >= TP_PACK_STEADY ? (int)tp_pack_draw(pack, (uint32_t)gpus) : ring ? 0 : (pack->now.n + i) % gpus;
			if (!tp_pack_walk(pack, first, -1, -1)) continue;
			tp_pack_append(pack, pack->walk, -1, -1, false);
			if (pack->back > 0 && ring) tp_pack_append(pack, pack->walk, -1, -1, true);
			return true;
		}
	}
	return false;
}

/* NETs or GPUs by what they have left, best first; at most `most`. */
struct ranked { double key; int16_t place; };

static void rank_in(struct ranked *list, int *n, int most, double key, int place)
{
	int i = *n < most ? (*n)++ : *n;
	if (i == most && (!most || list[most - 1].key <= key)) return;
	if (i == most) i--;
	for (; i > 0 && list[i - 1].key > key; i--) list[i] = list[i - 1];
	list[i] = (struct ranked){ key, (int16_t)place };
}

enum { STEADY_WALKS = 64, DRAWN_WALKS = 16 };      /* for one channel */
enum { MOST_NETS = 16, MOST_ENDS = 8 };

static double end_key(struct tp_pack *pack, int from, int to)
{
	const struct tp_route *route = tp_route_of(pack->p, from, to);
	if (!route->nuses || route->type > pack->wish->type_inter || !tp_pack_fits(pack, route, tp_form_is_ring(pack->wish->form) ? 1 : 0.5)) return 1e18;
	double slack = TP_MIN(tp_pack_slack(pack, route) / pack->wish->bw, 99), noise = 0;
	/* Mostly a small step aside, at times a leap over kinds of paths. */
	if (pack->variant >= TP_PACK_STEADY) noise = tp_pack_draw(pack, 4) ? tp_pack_draw(pack, 64) / 32.0 : tp_pack_draw(pack, 8) * 1e3;
	return route->type * 1e3 + 99 - slack + noise;
}

/* The GPU that a NET serves best, but for one (-1: none), and how well. */
static double best_end(struct tp_pack *pack, int net, bool out, int but, int *best_gpu)
{
	double best = 1e18;
	int at = tp_net_place(pack->p, net);
	for (int gpu = 0; gpu < pack->p->ngpus; gpu++) {
		/* Farther than the best so far: not worth a look, chance aside. */
		const struct tp_route *route = out ? tp_route_of(pack->p, gpu, at) : tp_route_of(pack->p, at, gpu);
		if (gpu == but || (pack->variant < TP_PACK_STEADY && route->type * 1e3 >= best)) continue;
		double key = end_key(pack, out ? gpu : at, out ? at : gpu);
		if (key >= best) continue;
		best = key;
		*best_gpu = gpu;
	}
	return best;
}

/* Of NETs as good as each other those first whose GPU is farthest from the others: at the end of a channel it needs one way less. Then those
 * whose GPU has most of them: pairs are made between the NETs of two GPUs, and who begins with the larger groups has the fewest left over. */
static int rank_nets(struct tp_pack *pack, bool out, struct ranked list[MOST_NETS])
{
	int n = 0, nnets = pack->p->nnets;
	memset(pack->served, 0, (size_t)pack->p->ngpus * sizeof(*pack->served));
	for (int net = 0; net < nnets; net++) {
		pack->net_keys[net] = best_end(pack, net, out, -1, &pack->net_gpus[net]);
		if (pack->net_keys[net] < 1e17) pack->served[pack->net_gpus[net]]++;
	}
	for (int net = 0; net < nnets; net++)
		if (pack->net_keys[net] < 1e17) {
			int gpu = pack->net_gpus[net];
			rank_in(list, &n, MOST_NETS, pack->net_keys[net] - 0.5 * pack->nearest[gpu] - 1e-3 * pack->served[gpu] + net * 1e-7, net);
		}
	return n;
}

static int rank_ends(struct tp_pack *pack, int net, bool out, struct ranked list[MOST_ENDS])
{
	int n = 0, at = tp_net_place(pack->p, net);
	for (int gpu = 0; gpu < pack->p->ngpus; gpu++) {
		double key = end_key(pack, out ? gpu : at, out ? at : gpu);
		if (key < 1e17) rank_in(list, &n, MOST_ENDS, key + ((gpu - net) % pack->p->ngpus + pack->p->ngpus) % pack->p->ngpus * 1e-6, gpu);
	}
	return n;
}

static bool try_ring_ends(struct tp_pack *pack, int in, int out, bool both)
{
	struct ranked firsts[MOST_ENDS], lasts[MOST_ENDS];
	int gpus = pack->p->ngpus, nfirst = rank_ends(pack, in, false, firsts), nlast = rank_ends(pack, out, true, lasts);
	tp_pack_set_direction(pack, both);
	for (int i = 0; i < nfirst; i++)
		for (int j = 0; j < nlast && pack->steps < pack->stop_at; j++) {
			if (gpus > 1 && firsts[i].place == lasts[j].place) continue;
			struct tp_ends ends = { firsts[i].place, -1, lasts[j].place };
			if (!tp_pack_take_nets(pack, ends, in, out)) continue;
			if (tp_pack_walk(pack, firsts[i].place, -1, lasts[j].place)) {
				tp_pack_append(pack, pack->walk, in, out, false);
				if (both) tp_pack_append(pack, pack->walk, in, out, true);
				return true;
			}
			tp_pack_give_nets(pack, ends, in, out);
		}
	return false;
}

/* A pair whose way back isn't its way there: where links aren't alike in both directions. */
static bool try_pair_apart(struct tp_pack *pack, int in, int out)
{
	struct tp_packed *now = &pack->now;
	if (!try_ring_ends(pack, in, out, false)) return false;
	if (try_ring_ends(pack, out, in, false)) return true;
	now->n--;
	tp_pack_set_direction(pack, false);
	tp_pack_give_channel(pack, tp_pack_order(now, pack, now->n), in, out);
	return false;
}

/* Partners whose GPUs are joined by little first, for what joins a ring's two ends is of no use to it; last those whose GPUs aren't joined at all, as what is
 * left of such a ring has the farther way to go. */
static void rank_partners(struct tp_pack *pack, int in, const struct ranked *outs, int nout, struct ranked list[MOST_NETS])
{
	int n = 0, first = -1;
	best_end(pack, in, false, -1, &first);
	for (int i = 0; i < nout; i++) {
		int last = -1;
		best_end(pack, outs[i].place, true, first, &last);
		const struct tp_route *route = first >= 0 && last >= 0 ? tp_route_of(pack->p, first, last) : NULL;
		bool joined = route && route->nuses && route->type <= pack->wish->type_intra;
		rank_in(list, &n, MOST_NETS, (joined ? TP_MIN(tp_pack_slack(pack, route) / pack->wish->bw, 99) : 100) + i * 1e-6, outs[i].place);
	}
}

static bool add_ring_nets(struct tp_pack *pack)
{
	struct ranked ins[MOST_NETS], outs[MOST_NETS], nearest[MOST_NETS];
	const struct tp_problem *p = pack->p;
	int nin = rank_nets(pack, false, ins), nout = rank_nets(pack, true, nearest);
	memcpy(outs, nearest, sizeof(outs));
	bool room = pack->now.n + 2 <= pack->target, pairs = has_pairs(pack);
	for (int i = 0; i < nin; i++) {
		int in = ins[i].place;
		if (pack->wish->cross_nic == 0) {
			if (room && pack->variant % 2 && try_ring_ends(pack, in, in, true)) return true;
			if (try_ring_ends(pack, in, in, false)) return true;
			continue;
		}
		if (pack->apart) rank_partners(pack, in, nearest, nout, outs);
		for (int j = 0; j < nout; j++) {
			int out = outs[j].place;
			/* Pairs: A to B and B to A, so that every host's NET B meets the next one's NET B. */
			if (pairs && (!room || p->port[in] == p->port[out])) continue;
			if (!try_ring_ends(pack, in, out, pairs) && !(pairs && try_pair_apart(pack, in, out))) continue;
			if (pairs) settle_pair(pack);
			return true;
		}
		if (pairs && try_ring_ends(pack, in, in, false)) return true;
	}
	return false;
}

static bool try_chain_heads(struct tp_pack *pack, int net, int first)
{
	struct ranked seconds[MOST_ENDS];
	bool two = pack->wish->form == TP_FORM_CHAIN_TWO_HEADS;
	int n = two ? rank_ends(pack, net, false, seconds) : 1;
	for (int i = 0; i < n && pack->steps < pack->stop_at; i++) {
		struct tp_ends heads = { first, two ? seconds[i].place : -1, -1 };
		if (heads.first == heads.second) continue;
		if (!tp_pack_take_nets(pack, heads, net, net)) continue;
		if (tp_pack_walk(pack, first, heads.second, -1)) {
			tp_pack_append(pack, pack->walk, net, net, false);
			return true;
		}
		tp_pack_give_nets(pack, heads, net, net);
	}
	return false;
}

static bool add_chain_nets(struct tp_pack *pack)
{
	struct ranked nets[MOST_NETS], firsts[MOST_ENDS];
	tp_pack_set_direction(pack, false);
	int n = rank_nets(pack, false, nets);
	for (int i = 0; i < n; i++) {
		int nfirst = rank_ends(pack, nets[i].place, false, firsts);
		for (int j = 0; j < nfirst; j++)
			if (try_chain_heads(pack, nets[i].place, firsts[j].place)) return true;
	}
	return false;
}

static void fill_up(struct tp_pack *pack)
{
	while (pack->now.n < pack->target && pack->steps < pack->stop_at) {
		if (add_again(pack)) continue;
		pack->walks = pack->variant < TP_PACK_STEADY ? STEADY_WALKS : DRAWN_WALKS;
		bool added = pack->wish->form == TP_FORM_RING_NETS ? add_ring_nets(pack)
			: tp_form_has_nets(pack->wish->form) ? add_chain_nets(pack) : add_plain(pack);
		if (!added) return;
	}
}

static void recount(struct tp_pack *pack)
{
	memcpy(pack->left, pack->p->capacity, (size_t)pack->p->nresources * sizeof(*pack->left));
	tp_pack_set_direction(pack, false);
	for (int c = 0; c < pack->now.n; c++) {
		int16_t *order = tp_pack_order(&pack->now, pack, c);
		/* They fitted once: the doubles' last bits aside, they fit. */
		for (int i = 0; i < tp_pack_hops(pack); i++) {
			int from = order[i], to = order[(i + 1) % pack->p->ngpus];
			tp_pack_charge(pack, tp_route_of(pack->p, from, to), pack->forward);
			if (pack->back > 0) tp_pack_charge(pack, tp_route_of(pack->p, to, from), pack->back);
		}
		struct tp_flow flows[4];
		for (int i = tp_pack_net_flows(pack, tp_pack_ends(pack, order), pack->now.net_in[c], pack->now.net_out[c], flows); i-- > 0;)
			if (flows[i].amount > 0) tp_pack_charge(pack, tp_route_of(pack->p, flows[i].from, flows[i].to), flows[i].amount);
	}
}

static void remove_some(struct tp_pack *pack)
{
	struct tp_packed *now = &pack->now;
	for (int gone = 1 + (int)tp_pack_draw(pack, 4); gone > 0 && now->n > 0; gone--) {
		int at = (int)tp_pack_draw(pack, (uint32_t)now->n), unit = has_pairs(pack) && crosses(pack, now, at) ? 2 : 1;
		at -= at % unit;
		int behind = now->n - at - unit;
		memmove(tp_pack_order(now, pack, at), tp_pack_order(now, pack, at + unit), (size_t)behind * (size_t)pack->p->ngpus * sizeof(*now->order));
		memmove(&now->net_in[at], &now->net_in[at + unit], (size_t)behind * sizeof(*now->net_in));
		memmove(&now->net_out[at], &now->net_out[at + unit], (size_t)behind * sizeof(*now->net_out));
		now->n -= unit;
	}
}

const struct tp_packed *tp_pack_run(struct tp_pack *pack, const struct tp_wish *wish, int target, uint64_t budget)
{
	size_t gpus = (size_t)pack->p->ngpus;
	bool apart = wish->form == TP_FORM_RING_NETS && wish->cross_nic && pack->may_part;
	pack->wish = wish;
	pack->target = TP_MIN(target, TP_CHANNELS_MAX);
	uint64_t end = pack->steps + budget;
	pack->seed = 20261129;
	pack->best.n = 0;
	for (int i = 0; i < TP_PACK_STEADY + apart && pack->best.n < pack->target; i++) {
		pack->apart = apart && i == 1;
		/* Each channel by what is left: none is repeated. */
		pack->variant = pack->apart ? 2 : apart && i ? i - 1 : i;
		/* The first way leaves the second its share. */
		pack->stop_at = end - (apart && !i ? budget / 2 : 0);
		pack->now.n = 0;
		recount(pack);
		fill_up(pack);
		if (pack->now.n > pack->best.n) packed_copy(&pack->best, &pack->now, gpus);
	}
	if (pack->best.n && pack->best.n < pack->target) packed_copy(&pack->kept, &pack->best, gpus);
	/* The last steady ways mostly fail, and dearly: the others have their share whatever those spent. */
	pack->stop_at = apart ? TP_MAX(end, pack->steps + budget / 2) : end;
	for (uint64_t round = 0; pack->best.n && pack->best.n < pack->target && pack->steps < pack->stop_at && round < budget; round++) {
		packed_copy(&pack->now, &pack->kept, gpus);
		remove_some(pack);
		recount(pack);
		pack->variant = TP_PACK_STEADY + (int)tp_pack_draw(pack, 2);
		pack->apart = apart && round % 2;
		fill_up(pack);
		if (pack->now.n >= pack->kept.n) packed_copy(&pack->kept, &pack->now, gpus);
		if (pack->now.n > pack->best.n) packed_copy(&pack->best, &pack->now, gpus);
	}
	return &pack->best;
}

void tp_packed_load(const struct tp_problem *p, enum tp_form form, const struct tp_packed *packed, double *intra, double *inter)
{
	struct tp_wish wish = { .form = form, .bw = 1 };
	struct tp_pack view = { .p = p, .wish = &wish };
	struct tp_flow flows[4];
	memset(intra, 0, (size_t)p->nresources * sizeof(*intra));
	memset(inter, 0, (size_t)p->nresources * sizeof(*inter));
	tp_pack_set_direction(&view, false);
	for (int c = 0; c < packed->n; c++) {
		const int16_t *order = packed->order + (size_t)c * (size_t)p->ngpus;
		view.left = intra;
		for (int i = 0; i < tp_pack_hops(&view); i++) {
			int from = order[i], to = order[(i + 1) % p->ngpus];
			tp_pack_charge(&view, tp_route_of(p, from, to), -view.forward);
			if (view.back > 0) tp_pack_charge(&view, tp_route_of(p, to, from), -view.back);
		}
		view.left = inter;
		for (int i = tp_pack_net_flows(&view, tp_pack_ends(&view, order), packed->net_in[c], packed->net_out[c], flows); i-- > 0;)
			if (flows[i].amount > 0) tp_pack_charge(&view, tp_route_of(p, flows[i].from, flows[i].to), -flows[i].amount);
	}
}

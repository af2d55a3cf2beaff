/* Packing channels of one bandwidth into what the routes have.
 *
 * Channels are added one after another: first those found before, repeated or turned round (on a symmetric machine that is
 * all there is to do), else by a depth-first walk that takes what it crosses and gives it back on its way home. A walk stops early
 * where a GPU not yet visited can no longer be entered or left. When no more fit, some are taken out and others put in (ruin and
 * recreate), accepted unless there are fewer. All choices come from one generator with a fixed seed and all limits are counts of
 * hops looked at, so the same graph gives the same channels on every rank and every machine. */
#include <stdlib.h>
#include <string.h>

#include "topo/search_model.h"

#define EPSILON 1e-6            /* of a channel: what sums of doubles may be off by */
#define WALK_HOPS 600           /* taken by one walk */
#define LOOK_AHEAD_GPUS 16      /* with more the look ahead costs more than it saves */

enum { STEADY_VARIANTS = 5 };

struct tp_pack {
	const struct tp_problem *p;
	const struct tp_wish *wish;
	double *left;                   /* [nresources] */
	struct tp_packed now, best, kept;
	int16_t *candidates;            /* [ngpus][ngpus], a row a depth */
	double *keys;                   /* [ngpus] */
	bool *used;                     /* [ngpus] */
	int16_t *walk;                  /* [ngpus] */
	double forward, back;           /* what a hop of this walk takes, of the channel's bandwidth */
	int last;                       /* where this walk must end; -1: anywhere */
	int hops;                       /* left to this walk */
	int target, variant;
	uint64_t steps, stop_at, seed;
};

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
	free(pack);
}

ncclResult_t tp_pack_create(const struct tp_problem *p, struct tp_pack **out)
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
	bool ok = pack->left && pack->candidates && pack->keys && pack->used && pack->walk;
	if (ok && packed_alloc(&pack->now, gpus) && packed_alloc(&pack->best, gpus) && packed_alloc(&pack->kept, gpus)) {
		*out = pack;
		return ncclSuccess;
	}
	tp_pack_free(pack);
	return ncclSystemError;
}

uint64_t tp_pack_steps(const struct tp_pack *pack) { return pack->steps; }

static uint32_t draw(struct tp_pack *pack, uint32_t below)
{
	pack->seed = pack->seed * 6364136223846793005u + 1442695040888963407u;
	return (uint32_t)((pack->seed >> 33) % below);
}

/* Taking and giving. amount is a part of a channel. */

static bool fits(struct tp_pack *pack, const struct tp_route *route, double amount)
{
	double bw = pack->wish->bw * amount;
	pack->steps++;
	for (int32_t u = route->first; u < route->first + route->nuses; u++)
		if (pack->left[pack->p->uses[u].resource] + EPSILON * bw < bw * pack->p->uses[u].weight) return false;
	return route->nuses > 0;
}

static void charge(struct tp_pack *pack, const struct tp_route *route, double amount)
{
	for (int32_t u = route->first; u < route->first + route->nuses; u++)
		pack->left[pack->p->uses[u].resource] -= pack->wish->bw * amount * pack->p->uses[u].weight;
}

static bool take(struct tp_pack *pack, int from, int to, double amount)
{
	const struct tp_route *route = tp_route_of(pack->p, from, to);
	enum tp_topo_path_type limit = from < pack->p->ngpus && to < pack->p->ngpus ? pack->wish->type_intra : pack->wish->type_inter;
	if (amount <= 0) return true;
	if (route->type > limit || !fits(pack, route, amount)) return false;
	charge(pack, route, amount);
	return true;
}

static void give(struct tp_pack *pack, int from, int to, double amount)
{
	if (amount > 0) charge(pack, tp_route_of(pack->p, from, to), -amount);
}

static bool take_hop(struct tp_pack *pack, int from, int to)
{
	if (!take(pack, from, to, pack->forward)) return false;
	if (take(pack, to, from, pack->back)) return true;
	give(pack, from, to, pack->forward);
	return false;
}

static void give_hop(struct tp_pack *pack, int from, int to)
{
	give(pack, from, to, pack->forward);
	give(pack, to, from, pack->back);
}

/* What NETs and a channel's ends exchange: up to four flows. */
struct flow { int from, to; double amount; };
struct ends { int first, second, last; };       /* GPUs that NETs may talk to */

static struct ends ends_of(const struct tp_pack *pack, const int16_t *order)
{
	int gpus = pack->p->ngpus;
	return (struct ends){ order[0], order[gpus > 1], order[gpus - 1] };
}

static int net_flows(const struct tp_pack *pack, struct ends ends, int net_in, int net_out, struct flow flows[4])
{
	const struct tp_problem *p = pack->p;
	if (!tp_form_has_nets(pack->wish->form)) return 0;
	int in = tp_net_place(p, net_in), out = tp_net_place(p, net_out), first = ends.first, last = ends.last;
	switch (pack->wish->form) {
	case TP_FORM_RING_NETS:
		flows[0] = (struct flow){ in, first, pack->forward };
		flows[1] = (struct flow){ last, out, pack->forward };
		/* Walked both ways at once: the second channel comes in where the first leaves. */
		flows[2] = (struct flow){ out, last, pack->back };
		flows[3] = (struct flow){ first, in, pack->back };
		return 4;
	case TP_FORM_CHAIN_NETS:
		flows[0] = (struct flow){ in, first, 1 };
		flows[1] = (struct flow){ first, in, 1 };
		return 2;
	default:
		flows[0] = (struct flow){ in, first, 0.5 };
		flows[1] = (struct flow){ first, in, 0.5 };
		flows[2] = (struct flow){ in, ends.second, 0.5 };
		flows[3] = (struct flow){ ends.second, in, 0.5 };
		return 4;
	}
}

static bool take_nets(struct tp_pack *pack, struct ends ends, int net_in, int net_out)
{
	struct flow flows[4];
	int n = net_flows(pack, ends, net_in, net_out, flows);
	for (int i = 0; i < n; i++) {
		if (take(pack, flows[i].from, flows[i].to, flows[i].amount)) continue;
		while (--i >= 0) give(pack, flows[i].from, flows[i].to, flows[i].amount);
		return false;
	}
	return true;
}

static void give_nets(struct tp_pack *pack, struct ends ends, int net_in, int net_out)
{
	struct flow flows[4];
	for (int i = net_flows(pack, ends, net_in, net_out, flows); i-- > 0;) give(pack, flows[i].from, flows[i].to, flows[i].amount);
}

/* Hops of a channel: between neighbours, and from the last to the first where it is a closed ring. */
static int hop_count(const struct tp_pack *pack)
{
	int gpus = pack->p->ngpus;
	return pack->wish->form == TP_FORM_RING && gpus > 1 ? gpus : gpus - 1;
}

static bool take_channel(struct tp_pack *pack, const int16_t *order, int net_in, int net_out)
{
	int hops = hop_count(pack), gpus = pack->p->ngpus;
	if (!take_nets(pack, ends_of(pack, order), net_in, net_out)) return false;
	for (int i = 0; i < hops; i++) {
		if (take_hop(pack, order[i], order[(i + 1) % gpus])) continue;
		while (--i >= 0) give_hop(pack, order[i], order[(i + 1) % gpus]);
		give_nets(pack, ends_of(pack, order), net_in, net_out);
		return false;
	}
	return true;
}

static void give_channel(struct tp_pack *pack, const int16_t *order, int net_in, int net_out)
{
	int hops = hop_count(pack), gpus = pack->p->ngpus;
	for (int i = 0; i < hops; i++) give_hop(pack, order[i], order[(i + 1) % gpus]);
	give_nets(pack, ends_of(pack, order), net_in, net_out);
}

static void set_direction(struct tp_pack *pack, bool both)
{
	double half = 0.5 * (pack->wish->within > 0 ? pack->wish->within : 1);
	pack->forward = tp_form_is_ring(pack->wish->form) ? 1 : half;
	pack->back = tp_form_is_ring(pack->wish->form) ? both : half;
}

static int16_t *order_of(struct tp_packed *packed, const struct tp_pack *pack, int channel) { return packed->order + (size_t)channel * (size_t)pack->p->ngpus; }

static void append(struct tp_pack *pack, const int16_t *order, int net_in, int net_out, bool turned)
{
	int gpus = pack->p->ngpus;
	int16_t *to = order_of(&pack->now, pack, pack->now.n);
	for (int i = 0; i < gpus; i++) to[i] = order[turned ? gpus - 1 - i : i];
	pack->now.net_in[pack->now.n] = (int16_t)(turned ? net_out : net_in);
	pack->now.net_out[pack->now.n] = (int16_t)(turned ? net_in : net_out);
	pack->now.n++;
}

/* The walk. */

static double slack_of(const struct tp_pack *pack, const struct tp_route *route)
{
	double least = 1e18;
	for (int32_t u = route->first; u < route->first + route->nuses; u++) {
		double left = pack->left[pack->p->uses[u].resource] / pack->p->uses[u].weight;
		if (left < least) least = left;
	}
	return least;
}

static int ways_on(struct tp_pack *pack, int gpu)
{
	int n = 0;
	for (int other = 0; other < pack->p->ngpus; other++) {
		const struct tp_route *route = tp_route_of(pack->p, gpu, other);
		n += !pack->used[other] && other != gpu && route->type <= pack->wish->type_intra && fits(pack, route, pack->forward);
	}
	return n;
}

/* Lower is tried first: a whole number of preference, then the order of the numbers from here on. */
static double key_of(struct tp_pack *pack, int from, int to)
{
	int gpus = pack->p->ngpus;
	const struct tp_route *route = tp_route_of(pack->p, from, to);
	double place = (double)((to - from + gpus) % gpus) / gpus, slack = slack_of(pack, route) / pack->wish->bw;
	if (slack > 99) slack = 99;
	switch (pack->variant) {
	case 0: return route->type * 1e4 + (99 - slack) * 64 + place;
	case 1: return place;
	case 2: return (99 - slack) * 64 + place;
	case 3: return route->type * 1e4 + ways_on(pack, to) + place;
	case 4: return route->type * 1e4 + place;
	default: return route->type * 8 + (99 - slack) * (double)draw(pack, 4) + (double)draw(pack, 1024) / 16;
	}
}

static int list_candidates(struct tp_pack *pack, int from, int at, int16_t *list)
{
	const struct tp_problem *p = pack->p;
	int n = 0;
	for (int to = 0; to < p->ngpus; to++) {
		const struct tp_route *route = tp_route_of(p, from, to), *back = tp_route_of(p, to, from);
		if (pack->used[to] || (to == pack->last && at < p->ngpus - 1)) continue;
		if (route->type > pack->wish->type_intra || !fits(pack, route, pack->forward)) continue;
		if (pack->back > 0 && (back->type > pack->wish->type_intra || !fits(pack, back, pack->back))) continue;
		double key = key_of(pack, from, to);
		int i = n++;
		for (; i > 0 && pack->keys[i - 1] > key; i--) {
			list[i] = list[i - 1];
			pack->keys[i] = pack->keys[i - 1];
		}
		list[i] = (int16_t)to;
		pack->keys[i] = key;
	}
	return n;
}

/* Whether each GPU still to come can be entered, from here or from another one to come, and all but one left. */
static bool hopeful(struct tp_pack *pack, int here)
{
	const struct tp_problem *p = pack->p;
	int dead_ends = 0, end = pack->last >= 0 ? pack->last : pack->wish->form == TP_FORM_RING ? pack->walk[0] : -1;
	for (int gpu = 0; gpu < p->ngpus; gpu++) {
		bool entered = false, left = false;
		if (pack->used[gpu]) continue;
		for (int other = 0; other < p->ngpus && !(entered && left); other++) {
			if (other == gpu || (pack->used[other] && other != here && other != end)) continue;
			const struct tp_route *in = tp_route_of(p, other, gpu), *out = tp_route_of(p, gpu, other);
			if (!entered && (!pack->used[other] || other == here)) entered = in->type <= pack->wish->type_intra && fits(pack, in, pack->forward);
			if (!left && (!pack->used[other] || other == end)) left = out->type <= pack->wish->type_intra && fits(pack, out, pack->forward);
		}
		dead_ends += !left && gpu != pack->last;
		if (!entered || dead_ends > (pack->last < 0 && end < 0)) return false;
	}
	return true;
}

/* walk[0 .. at - 1] stand and are paid for. */
static bool walk_on(struct tp_pack *pack, int at)
{
	const struct tp_problem *p = pack->p;
	int here = pack->walk[at - 1];
	if (at == p->ngpus) return pack->wish->form != TP_FORM_RING || p->ngpus == 1 || take_hop(pack, here, pack->walk[0]);
	if (p->ngpus <= LOOK_AHEAD_GPUS && !hopeful(pack, here)) return false;
	int16_t *list = pack->candidates + (size_t)at * (size_t)p->ngpus;
	int n = list_candidates(pack, here, at, list);
	for (int i = 0; i < n && pack->hops > 0 && pack->steps < pack->stop_at; i++) {
		int to = list[i];
		if (!take_hop(pack, here, to)) continue;
		pack->hops--;
		pack->used[to] = true;
		pack->walk[at] = (int16_t)to;
		if (walk_on(pack, at + 1)) return true;
		pack->used[to] = false;
		give_hop(pack, here, to);
	}
	return false;
}

/* Walks from first to last (-1: anywhere), which are paid for by the caller; second -1: any. */
static bool walk_from(struct tp_pack *pack, int first, int second, int last)
{
	int gpus = pack->p->ngpus, at = 1;
	memset(pack->used, 0, (size_t)gpus * sizeof(*pack->used));
	pack->walk[0] = (int16_t)first;
	pack->used[first] = true;
	pack->last = gpus > 1 ? last : -1;
	pack->hops = WALK_HOPS > 4 * gpus ? WALK_HOPS : 4 * gpus;
	if (second >= 0) {
		if (!take_hop(pack, first, second)) return false;
		pack->walk[at++] = (int16_t)second;
		pack->used[second] = true;
	}
	if (walk_on(pack, at)) return true;
	if (second >= 0) give_hop(pack, first, second);
	return false;
}

/* One more channel, or two that are each other's way back. */

static bool add_turned(struct tp_pack *pack, int channel, bool turned)
{
	struct tp_packed *now = &pack->now;
	int16_t *order = order_of(now, pack, now->n);      /* free: there is room for one more */
	int gpus = pack->p->ngpus, in = now->net_in[channel], out = now->net_out[channel];
	for (int i = 0; i < gpus; i++) order[i] = order_of(now, pack, channel)[turned ? gpus - 1 - i : i];
	if (turned) in = now->net_out[channel], out = now->net_in[channel];
	if (!take_channel(pack, order, in, out)) return false;
	now->net_in[now->n] = (int16_t)in;
	now->net_out[now->n] = (int16_t)out;
	now->n++;
	return true;
}

/* The last few, again or turned. Pairs of cross_nic 2 are repeated as pairs. */
static bool add_again(struct tp_pack *pack)
{
	struct tp_packed *now = &pack->now;
	bool pairs = pack->wish->form == TP_FORM_RING_NETS && pack->wish->cross_nic == 2;
	if (pack->variant == 2 || pack->variant == 3 || !tp_form_is_ring(pack->wish->form) || !now->n) return false;
	if (pack->variant >= STEADY_VARIANTS && draw(pack, 3)) return false;
	set_direction(pack, false);
	if (pairs) {
		if (now->n + 2 > pack->target || now->n % 2) return false;
		int at = now->n - 2;
		if (!add_turned(pack, at, false)) return false;
		if (add_turned(pack, at + 1, false)) return true;
		now->n--;
		give_channel(pack, order_of(now, pack, now->n), now->net_in[now->n], now->net_out[now->n]);
		return false;
	}
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
		set_direction(pack, both && tries == 2);
		for (int i = 0; i < (ring ? 1 : gpus); i++) {
			int first = pack->variant >= STEADY_VARIANTS ? (int)draw(pack, (uint32_t)gpus) : ring ? 0 : (pack->now.n + i) % gpus;
			if (!walk_from(pack, first, -1, -1)) continue;
			append(pack, pack->walk, -1, -1, false);
			if (pack->back > 0 && ring) append(pack, pack->walk, -1, -1, true);
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

enum { MOST_NETS = 12, MOST_ENDS = 8 };

static double end_key(struct tp_pack *pack, int from, int to)
{
	const struct tp_route *route = tp_route_of(pack->p, from, to);
	if (!route->nuses || route->type > pack->wish->type_inter || !fits(pack, route, tp_form_is_ring(pack->wish->form) ? 1 : 0.5)) return 1e18;
	double slack = TP_MIN(slack_of(pack, route) / pack->wish->bw, 99), noise = 0;
	/* Mostly a small step aside, at times a leap over kinds of paths. */
	if (pack->variant >= STEADY_VARIANTS) noise = draw(pack, 4) ? draw(pack, 64) / 32.0 : draw(pack, 8) * 1e3;
	return route->type * 1e3 + 99 - slack + noise;
}

static int rank_nets(struct tp_pack *pack, bool out, struct ranked list[MOST_NETS])
{
	int n = 0;
	for (int net = 0; net < pack->p->nnets; net++) {
		double best = 1e18;
		for (int gpu = 0; gpu < pack->p->ngpus; gpu++) {
			int at = tp_net_place(pack->p, net);
			double key = end_key(pack, out ? gpu : at, out ? at : gpu);
			if (key < best) best = key;
		}
		if (best < 1e17) rank_in(list, &n, MOST_NETS, best + net * 1e-6, net);
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
	set_direction(pack, both);
	for (int i = 0; i < nfirst; i++)
		for (int j = 0; j < nlast && pack->steps < pack->stop_at; j++) {
			if (gpus > 1 && firsts[i].place == lasts[j].place) continue;
			struct ends ends = { firsts[i].place, -1, lasts[j].place };
			if (!take_nets(pack, ends, in, out)) continue;
			if (walk_from(pack, firsts[i].place, -1, lasts[j].place)) {
				append(pack, pack->walk, in, out, false);
				if (both) append(pack, pack->walk, in, out, true);
				return true;
			}
			give_nets(pack, ends, in, out);
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
	set_direction(pack, false);
	give_channel(pack, order_of(now, pack, now->n), in, out);
	return false;
}

static bool add_ring_nets(struct tp_pack *pack)
{
	struct ranked ins[MOST_NETS], outs[MOST_NETS];
	const struct tp_problem *p = pack->p;
	int nin = rank_nets(pack, false, ins), nout = rank_nets(pack, true, outs);
	bool room = pack->now.n + 2 <= pack->target;
	for (int i = 0; i < nin; i++) {
		int in = ins[i].place;
		if (pack->wish->cross_nic == 0) {
			if (room && pack->variant % 2 && try_ring_ends(pack, in, in, true)) return true;
			if (try_ring_ends(pack, in, in, false)) return true;
			continue;
		}
		for (int j = 0; j < nout; j++) {
			int out = outs[j].place;
			/* Pairs: A to B and B to A, so that every host's NET B meets the next one's NET B. */
			if (pack->wish->cross_nic == 2 && (!room || p->port[in] == p->port[out])) continue;
			if (try_ring_ends(pack, in, out, pack->wish->cross_nic == 2)) return true;
			if (pack->wish->cross_nic == 2 && try_pair_apart(pack, in, out)) return true;
		}
		if (pack->wish->cross_nic == 2 && try_ring_ends(pack, in, in, false)) return true;
	}
	return false;
}

static bool try_chain_heads(struct tp_pack *pack, int net, int first)
{
	struct ranked seconds[MOST_ENDS];
	bool two = pack->wish->form == TP_FORM_CHAIN_TWO_HEADS;
	int n = two ? rank_ends(pack, net, false, seconds) : 1;
	for (int i = 0; i < n && pack->steps < pack->stop_at; i++) {
		struct ends heads = { first, two ? seconds[i].place : -1, -1 };
		if (heads.first == heads.second) continue;
		if (!take_nets(pack, heads, net, net)) continue;
		if (walk_from(pack, first, heads.second, -1)) {
			append(pack, pack->walk, net, net, false);
			return true;
		}
		give_nets(pack, heads, net, net);
	}
	return false;
}

static bool add_chain_nets(struct tp_pack *pack)
{
	struct ranked nets[MOST_NETS], firsts[MOST_ENDS];
	set_direction(pack, false);
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
		bool added = pack->wish->form == TP_FORM_RING_NETS ? add_ring_nets(pack)
			: tp_form_has_nets(pack->wish->form) ? add_chain_nets(pack) : add_plain(pack);
		if (!added) return;
	}
}

static void recount(struct tp_pack *pack)
{
	memcpy(pack->left, pack->p->capacity, (size_t)pack->p->nresources * sizeof(*pack->left));
	set_direction(pack, false);
	for (int c = 0; c < pack->now.n; c++) {
		int16_t *order = order_of(&pack->now, pack, c);
		/* They fitted once: the doubles' last bits aside, they fit. */
		for (int i = 0; i < hop_count(pack); i++) {
			int from = order[i], to = order[(i + 1) % pack->p->ngpus];
			charge(pack, tp_route_of(pack->p, from, to), pack->forward);
			if (pack->back > 0) charge(pack, tp_route_of(pack->p, to, from), pack->back);
		}
		struct flow flows[4];
		for (int i = net_flows(pack, ends_of(pack, order), pack->now.net_in[c], pack->now.net_out[c], flows); i-- > 0;)
			if (flows[i].amount > 0) charge(pack, tp_route_of(pack->p, flows[i].from, flows[i].to), flows[i].amount);
	}
}

static void remove_some(struct tp_pack *pack)
{
	struct tp_packed *now = &pack->now;
	bool pairs = pack->wish->form == TP_FORM_RING_NETS && pack->wish->cross_nic == 2 && now->n % 2 == 0;
	int unit = pairs ? 2 : 1, units = now->n / unit, gone = 1 + (int)draw(pack, (uint32_t)TP_MIN(units, 4));
	for (; gone > 0 && units > 0; gone--, units--) {
		int at = (int)draw(pack, (uint32_t)units) * unit, behind = now->n - at - unit;
		memmove(order_of(now, pack, at), order_of(now, pack, at + unit), (size_t)behind * (size_t)pack->p->ngpus * sizeof(*now->order));
		memmove(&now->net_in[at], &now->net_in[at + unit], (size_t)behind * sizeof(*now->net_in));
		memmove(&now->net_out[at], &now->net_out[at + unit], (size_t)behind * sizeof(*now->net_out));
		now->n -= unit;
	}
}

const struct tp_packed *tp_pack_run(struct tp_pack *pack, const struct tp_wish *wish, int target, uint64_t budget)
{
	size_t gpus = (size_t)pack->p->ngpus;
	pack->wish = wish;
	pack->target = TP_MIN(target, TP_CHANNELS_MAX);
	pack->stop_at = pack->steps + budget;
	pack->seed = 20261129;
	pack->best.n = 0;
	for (pack->variant = 0; pack->variant < STEADY_VARIANTS && pack->best.n < pack->target; pack->variant++) {
		pack->now.n = 0;
		recount(pack);
		fill_up(pack);
		if (pack->now.n > pack->best.n) packed_copy(&pack->best, &pack->now, gpus);
	}
	if (pack->best.n && pack->best.n < pack->target) packed_copy(&pack->kept, &pack->best, gpus);
	for (uint64_t round = 0; pack->best.n && pack->best.n < pack->target && pack->steps < pack->stop_at && round < budget; round++) {
		packed_copy(&pack->now, &pack->kept, gpus);
		remove_some(pack);
		recount(pack);
		pack->variant = STEADY_VARIANTS + (int)draw(pack, 2);
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
	struct flow flows[4];
	memset(intra, 0, (size_t)p->nresources * sizeof(*intra));
	memset(inter, 0, (size_t)p->nresources * sizeof(*inter));
	set_direction(&view, false);
	for (int c = 0; c < packed->n; c++) {
		const int16_t *order = packed->order + (size_t)c * (size_t)p->ngpus;
		view.left = intra;
		for (int i = 0; i < hop_count(&view); i++) {
			int from = order[i], to = order[(i + 1) % p->ngpus];
			charge(&view, tp_route_of(p, from, to), -view.forward);
			if (view.back > 0) charge(&view, tp_route_of(p, to, from), -view.back);
		}
		view.left = inter;
		for (int i = net_flows(&view, ends_of(&view, order), packed->net_in[c], packed->net_out[c], flows); i-- > 0;)
			if (flows[i].amount > 0) charge(&view, tp_route_of(p, flows[i].from, flows[i].to), -flows[i].amount);
	}
}

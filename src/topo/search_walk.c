/* What a channel takes of the resources and gives back, and the depth-first walk that finds an order of the GPUs for which all of it is
 * there: a hop takes what it crosses, and gives it back on the way home. The walk ends early where a GPU not yet visited can no longer
 * be entered or left, and after so many hops. */
#include <string.h>

#include "topo/search_pack.h"

#define WALK_HOPS 600           /* taken by one walk */
#define LOOK_AHEAD_GPUS 16      /* with more the look ahead costs more than it saves */

static bool take(struct tp_pack *pack, int from, int to, double amount)
{
	const struct tp_route *route = tp_route_of(pack->p, from, to);
	enum tp_topo_path_type limit = from < pack->p->ngpus && to < pack->p->ngpus ? pack->wish->type_intra : pack->wish->type_inter;
	if (amount <= 0) return true;
	if (route->type > limit || !tp_pack_fits(pack, route, amount)) return false;
	tp_pack_charge(pack, route, amount);
	return true;
}

static void give(struct tp_pack *pack, int from, int to, double amount)
{
	if (amount > 0) tp_pack_charge(pack, tp_route_of(pack->p, from, to), -amount);
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

int tp_pack_net_flows(const struct tp_pack *pack, struct tp_ends ends, int net_in, int net_out, struct tp_flow flows[4])
{
	const struct tp_problem *p = pack->p;
	if (!tp_form_has_nets(pack->wish->form)) return 0;
	int in = tp_net_place(p, net_in), out = tp_net_place(p, net_out), first = ends.first, last = ends.last;
	switch (pack->wish->form) {
	case TP_FORM_RING_NETS:
		flows[0] = (struct tp_flow){ in, first, pack->forward };
		flows[1] = (struct tp_flow){ last, out, pack->forward };
		/* Walked both ways at once: the second channel comes in where the first leaves. */
		flows[2] = (struct tp_flow){ out, last, pack->back };
		flows[3] = (struct tp_flow){ first, in, pack->back };
		return 4;
	case TP_FORM_CHAIN_NETS:
		flows[0] = (struct tp_flow){ in, first, 1 };
		flows[1] = (struct tp_flow){ first, in, 1 };
		return 2;
	default:
		flows[0] = (struct tp_flow){ in, first, 0.5 };
		flows[1] = (struct tp_flow){ first, in, 0.5 };
		flows[2] = (struct tp_flow){ in, ends.second, 0.5 };
		flows[3] = (struct tp_flow){ ends.second, in, 0.5 };
		return 4;
	}
}

bool tp_pack_take_nets(struct tp_pack *pack, struct tp_ends ends, int net_in, int net_out)
{
	struct tp_flow flows[4];
	int n = tp_pack_net_flows(pack, ends, net_in, net_out, flows);
	for (int i = 0; i < n; i++) {
		if (take(pack, flows[i].from, flows[i].to, flows[i].amount)) continue;
		while (--i >= 0) give(pack, flows[i].from, flows[i].to, flows[i].amount);
		return false;
	}
	return true;
}

void tp_pack_give_nets(struct tp_pack *pack, struct tp_ends ends, int net_in, int net_out)
{
	struct tp_flow flows[4];
	for (int i = tp_pack_net_flows(pack, ends, net_in, net_out, flows); i-- > 0;) give(pack, flows[i].from, flows[i].to, flows[i].amount);
}

bool tp_pack_take_channel(struct tp_pack *pack, const int16_t *order, int net_in, int net_out)
{
	int hops = tp_pack_hops(pack), gpus = pack->p->ngpus;
	if (!tp_pack_take_nets(pack, tp_pack_ends(pack, order), net_in, net_out)) return false;
	for (int i = 0; i < hops; i++) {
		if (take_hop(pack, order[i], order[(i + 1) % gpus])) continue;
		while (--i >= 0) give_hop(pack, order[i], order[(i + 1) % gpus]);
		tp_pack_give_nets(pack, tp_pack_ends(pack, order), net_in, net_out);
		return false;
	}
	return true;
}

void tp_pack_give_channel(struct tp_pack *pack, const int16_t *order, int net_in, int net_out)
{
	int hops = tp_pack_hops(pack), gpus = pack->p->ngpus;
	for (int i = 0; i < hops; i++) give_hop(pack, order[i], order[(i + 1) % gpus]);
	tp_pack_give_nets(pack, tp_pack_ends(pack, order), net_in, net_out);
}

void tp_pack_set_direction(struct tp_pack *pack, bool both)
{
	double half = 0.5 * (pack->wish->within > 0 ? pack->wish->within : 1);
	pack->forward = tp_form_is_ring(pack->wish->form) ? 1 : half;
	pack->back = tp_form_is_ring(pack->wish->form) ? both : half;
}

void tp_pack_append(struct tp_pack *pack, const int16_t *order, int net_in, int net_out, bool turned)
{
	int gpus = pack->p->ngpus;
	int16_t *to = tp_pack_order(&pack->now, pack, pack->now.n);
	for (int i = 0; i < gpus; i++) to[i] = order[turned ? gpus - 1 - i : i];
	pack->now.net_in[pack->now.n] = (int16_t)(turned ? net_out : net_in);
	pack->now.net_out[pack->now.n] = (int16_t)(turned ? net_in : net_out);
	pack->now.n++;
}

/* The walk. */

static int ways_on(struct tp_pack *pack, int gpu)
{
	int n = 0;
	for (int other = 0; other < pack->p->ngpus; other++) {
		const struct tp_route *route = tp_route_of(pack->p, gpu, other);
		n += !pack->used[other] && other != gpu && route->type <= pack->wish->type_intra && tp_pack_fits(pack, route, pack->forward);
	}
	return n;
}

/* Would this hop make the channel come to an island twice? It leaves one before it has been to all of it, or comes to its last one while others wait. */
static bool is_detour(const struct tp_pack *pack, int from, int to)
{
	const int *island = pack->island;
	int last = pack->last >= 0 ? island[pack->last] : -1;
	if (island[from] == island[to]) return false;
	for (int gpu = 0; gpu < pack->p->ngpus; gpu++) {
		if (pack->used[gpu] || gpu == pack->last) continue;
		if (island[gpu] == island[from] || (island[to] == last && island[gpu] != last)) return true;
	}
	return false;
}

/* Lower is tried first: a whole number of preference, then the order of the numbers from here on. */
static double key_of(struct tp_pack *pack, int from, int to)
{
	int gpus = pack->p->ngpus;
	const struct tp_route *route = tp_route_of(pack->p, from, to);
	double place = (double)((to - from + gpus) % gpus) / gpus, slack = tp_pack_slack(pack, route) / pack->wish->bw;
	if (slack > 99) slack = 99;
	/* Of ways as wide as each other the one whose other links have more left: what one channel leaves half full the next can't pass. */
	if (pack->apart && pack->nislands > 1) place += (is_detour(pack, from, to) ? 1e6 : 0) + (99 - tp_pack_mean_slack(pack, route)) / 2;
	switch (pack->variant) {
	case 0: return route->type * 1e4 + (99 - slack) * 64 + place;
	case 1: return place;
	case 2: return (99 - slack) * 64 + place;
	case 3: return route->type * 1e4 + ways_on(pack, to) + place;
	case 4: return route->type * 1e4 + place;
	default: return route->type * 8 + (99 - slack) * (double)tp_pack_draw(pack, 4) + (double)tp_pack_draw(pack, 1024) / 16;
	}
}

static int list_candidates(struct tp_pack *pack, int from, int at, int16_t *list)
{
	const struct tp_problem *p = pack->p;
	int n = 0;
	for (int to = 0; to < p->ngpus; to++) {
		const struct tp_route *route = tp_route_of(p, from, to), *back = tp_route_of(p, to, from);
		if (pack->used[to] || (to == pack->last && at < p->ngpus - 1)) continue;
		if (route->type > pack->wish->type_intra || !tp_pack_fits(pack, route, pack->forward)) continue;
		if (pack->back > 0 && (back->type > pack->wish->type_intra || !tp_pack_fits(pack, back, pack->back))) continue;
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
			if (!entered && (!pack->used[other] || other == here)) entered = in->type <= pack->wish->type_intra && tp_pack_fits(pack, in, pack->forward);
			if (!left && (!pack->used[other] || other == end)) left = out->type <= pack->wish->type_intra && tp_pack_fits(pack, out, pack->forward);
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

bool tp_pack_walk(struct tp_pack *pack, int first, int second, int last)
{
	int gpus = pack->p->ngpus, at = 1;
	if (--pack->walks < 0) return false;
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

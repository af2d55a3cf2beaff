/* Loads on the links of a graph, and the alphas and bandwidths that make times of them. A flow is laid over the path that the graph
 * says is used; what all flows ask of a link is added up, and the link that takes longest is the one that limits. That is exact for
 * messages long enough to keep all links busy; what short ones take is alpha's affair. */
#include "topo/cost.h"

#include <stdlib.h>
#include <string.h>

/* ---- Alphas ---- */

static const char *hop_constant(enum tp_topo_path_type type)
{
	switch (type) {
	case TP_PATH_LOC: case TP_PATH_NVL: return "hop.nvlink";
	case TP_PATH_NVB: case TP_PATH_C2C: return "hop.relay";
	case TP_PATH_PIX: case TP_PATH_PXB: return "hop.pcie";
	default: return "hop.host";
	}
}

static const char *net_constant(const struct tp_topo_node *net)
{
	switch (net->net.fabric) {
	case TP_FABRIC_IB: return "net.ib";
	case TP_FABRIC_ROCE: case TP_FABRIC_EFA: return "net.roce";
	case TP_FABRIC_ETHERNET: return "net.tcp";
	default: return net->net.gdr ? "net.roce" : "net.tcp";
	}
}

/* All GPUs wait for the slowest. */
static ncclResult_t plan_net(const struct tp_topo *topo, const struct tp_topo_policy *policy, const struct tp_rails *rails, double *out)
{
	double most = 0;
	for (int r = 0; r < rails->nrails; r++) {
		const struct tp_rail *rail = &rails->rails[r];
		struct tp_topo_gdr reads, writes;
		if (!rail->nnets) continue;
		const struct tp_topo_node *net = &topo->nodes[rail->nets[0]];
		double us = net->net.latency_us > 0 ? net->net.latency_us : tp_topo_constant(net_constant(net));
		TP_TRY(tp_topo_decide_gdr(topo, policy, rail->gpu, rail->nets[0], true, &reads));
		TP_TRY(tp_topo_decide_gdr(topo, policy, rail->gpu, rail->nets[0], false, &writes));
		if (reads.mode == TP_GDR_OFF || writes.mode == TP_GDR_OFF) us += tp_topo_constant("hop.host");
		most = TP_MAX(most, us);
	}
	*out = most;
	return ncclSuccess;
}

/* Samples of each alpha and each kind of wire, NET's alpha behind those of paths. */
enum { NET_ALPHA = TP_PATH_TYPES, FIRST_WIRE, KEYS = FIRST_WIRE + TP_WIRE_KINDS };

/* Several values of one link: the least is what it carries for sure. */
static void note_link(struct tp_topo_costs *costs, int32_t link, double yield)
{
	for (int i = 0; i < costs->nlinks; i++)
		if (costs->links[i].link == link) {
			costs->links[i].yield = TP_MIN(costs->links[i].yield, yield);
			return;
		}
	if (costs->nlinks == TP_COSTS_LINKS) return;
	costs->links[costs->nlinks].link = link;
	costs->links[costs->nlinks++].yield = yield;
}

static void sample(const struct tp_topo *topo, const struct tp_topo_value *v, double *values[KEYS], int counts[KEYS], struct tp_topo_costs *costs)
{
	const struct tp_topo_node *x = &topo->nodes[v->from], *y = &topo->nodes[v->to], *net = y->kind == TP_TOPO_NET ? y : x->kind == TP_TOPO_NET ? x : NULL;
	const struct tp_topo_path *path = tp_topo_path(topo, v->from, v->to);
	if (!net && (x->kind != TP_TOPO_GPU || y->kind != TP_TOPO_GPU || path->limit < 0)) return;
	int alpha = net ? NET_ALPHA : (int)path->type;
	if (v->alpha_us > 0) values[alpha][counts[alpha]++] = v->alpha_us;
	if (v->gbps <= 0) return;
	/* What goes to the network and back is the port's, however it gets there. */
	int32_t link = net ? -1 : path->links[path->limit];
	int wire = FIRST_WIRE + (net ? TP_WIRE_NET : (int)topo->links[link].kind);
	double yield = v->gbps / (net ? net->net.bw : path->bw);
	values[wire][counts[wire]++] = yield;
	if (!net) note_link(costs, link, yield);
}

static ncclResult_t take_measured(const struct tp_topo_values *found, const struct tp_topo *topo, struct tp_topo_costs *costs)
{
	double *values[KEYS];
	int counts[KEYS] = { 0 };
	if (!found->count) return ncclSuccess;
	double *room = tp_alloc((size_t)KEYS * (size_t)found->count, sizeof(*room), "measured values");
	if (!room) return ncclSystemError;
	for (int k = 0; k < KEYS; k++) values[k] = room + (size_t)k * (size_t)found->count;
	for (int i = 0; i < found->count; i++) sample(topo, &found->list[i], values, counts, costs);
	for (int k = 0; k < KEYS; k++) {
		if (!counts[k]) continue;
		double value = tp_median(values[k], counts[k]);
		if (k >= FIRST_WIRE) {
			costs->yield[k - FIRST_WIRE] = value;
			costs->yield_measured[k - FIRST_WIRE] = true;
		} else if (k == NET_ALPHA) {
			costs->net_us = value;
			costs->net_measured = true;
		} else {
			costs->hop_us[k] = value;
			costs->hop_measured[k] = true;
		}
	}
	free(room);
	return ncclSuccess;
}

double tp_topo_costs_yield(const struct tp_topo_costs *costs, const struct tp_topo *topo, int32_t link)
{
	for (int i = 0; i < costs->nlinks; i++)
		if (costs->links[i].link == link) return costs->links[i].yield;
	return costs->yield[topo->links[link].kind];
}

ncclResult_t tp_topo_costs_with(const struct tp_topo_values *values, const struct tp_topo *topo, const struct tp_topo_policy *policy, const struct tp_rails *rails,
	struct tp_topo_costs *out)
{
	struct tp_topo_costs costs = { .net_us = 0 };
	for (int t = 0; t < TP_PATH_TYPES; t++) costs.hop_us[t] = tp_topo_constant(hop_constant((enum tp_topo_path_type)t));
	for (int k = 0; k < TP_WIRE_KINDS; k++) costs.yield[k] = 1;
	if (rails) TP_TRY(plan_net(topo, policy, rails, &costs.net_us));
	TP_TRY(take_measured(values, topo, &costs));
	*out = costs;
	return ncclSuccess;
}

ncclResult_t tp_topo_costs_of(const struct tp_topo_doc *doc, const struct tp_topo *topo, const struct tp_topo_policy *policy, const struct tp_rails *rails,
	struct tp_topo_costs *out)
{
	struct tp_topo_values values;
	TP_TRY(tp_topo_values_of(doc, topo, NULL, &values));
	ncclResult_t result = tp_topo_costs_with(&values, topo, policy, rails, out);
	free(values.list);
	return result;
}

/* ---- Loads ---- */

struct flow { int32_t from, to; double amount; bool across; };
struct flows { struct flow *list; int count, room; };

ncclResult_t tp_topo_traffic_create(int ngpus, struct tp_topo_traffic *out)
{
	size_t n = (size_t)ngpus;
	double *room = tp_alloc(n * n + 2 * n, sizeof(*room), "traffic between GPUs");
	if (!room) return ncclSystemError;
	*out = (struct tp_topo_traffic){ ngpus, room, room + n * n, room + n * n + n };
	return ncclSuccess;
}

void tp_topo_traffic_free(struct tp_topo_traffic *traffic)
{
	free(traffic->pairs);
	memset(traffic, 0, sizeof(*traffic));
}

static ncclResult_t add_flow(struct flows *flows, int32_t from, int32_t to, double amount, bool across)
{
	if (amount <= 0 || from == to) return ncclSuccess;
	if (flows->count == flows->room) {
		int room = flows->room * 2 + 64;
		struct flow *moved = realloc(flows->list, (size_t)room * sizeof(*moved));
		if (!moved) return TP_FAIL(ncclSystemError, "out of memory for %d flows", room);
		flows->list = moved;
		flows->room = room;
	}
	flows->list[flows->count++] = (struct flow){ from, to, amount, across };
	return ncclSuccess;
}

static ncclResult_t flows_of(const struct tp_topo *topo, const struct tp_rails *rails, const struct tp_topo_traffic *t, struct flows *flows)
{
	for (int g = 0; g < t->ngpus; g++) {
		int32_t gpu = tp_topo_node_of(topo, TP_TOPO_GPU, g)->index;
		for (int p = 0; p < t->ngpus; p++)
			TP_TRY(add_flow(flows, gpu, tp_topo_node_of(topo, TP_TOPO_GPU, p)->index, t->pairs[g * t->ngpus + p], false));
		if (t->out[g] <= 0 && t->in[g] <= 0) continue;
		const struct tp_rail *rail = rails ? &rails->rails[g] : NULL;
		if (!rail || !rail->nnets) return TP_FAIL(ncclInvalidUsage, "%s reaches no port, and there are other hosts", topo->nodes[gpu].name);
		for (int n = 0; n < rail->nnets; n++) {
			TP_TRY(add_flow(flows, gpu, rail->nets[n], t->out[g] / rail->nnets, true));
			TP_TRY(add_flow(flows, rail->nets[n], gpu, t->in[g] / rail->nnets, true));
		}
	}
	return ncclSuccess;
}

struct link_load { double load; bool inside, across; };

/* Who sends most over the limiting link, and how far what is sent goes. */
static void describe(const struct tp_topo *topo, const struct tp_topo_costs *costs, const struct flows *flows, bool across, struct tp_topo_limit *limit)
{
	double most = 0, sum = 0, weighed = 0;
	for (int i = 0; i < flows->count; i++) {
		const struct flow *f = &flows->list[i];
		const struct tp_topo_path *path = tp_topo_path(topo, f->from, f->to);
		bool crosses = false;
		for (int32_t h = 0; h < path->nhops; h++) crosses |= path->links[h] == limit->link;
		limit->flows += crosses;
		if (f->across != across) continue;
		double us = !costs ? 0 : across ? costs->net_us : costs->hop_us[path->type];
		sum += f->amount;
		weighed += f->amount * us;
		limit->most_us = TP_MAX(limit->most_us, us);
		if (!crosses || f->amount <= most) continue;
		most = f->amount;
		limit->from = f->from;
		limit->to = f->to;
	}
	if (sum > 0) limit->mean_us = weighed / sum;
}

static ncclResult_t lay(const struct tp_topo *topo, const struct flow *f, struct link_load *loads)
{
	const struct tp_topo_path *path = tp_topo_path(topo, f->from, f->to);
	if (path->type >= TP_PATH_NET || path->bw <= 0)
		return TP_FAIL(ncclInvalidUsage, "no path joins %s and %s", topo->nodes[f->from].name, topo->nodes[f->to].name);
	for (int32_t h = 0; h < path->nhops; h++) {
		struct link_load *l = &loads[path->links[h]];
		l->load += f->amount;
		l->inside |= !f->across;
		l->across |= f->across;
	}
	return ncclSuccess;
}

static ncclResult_t find_limits(const struct tp_topo *topo, const struct tp_topo_costs *costs, const struct flows *flows, struct tp_topo_load *out)
{
	struct tp_topo_limit none = { .link = -1, .from = -1, .to = -1 };
	struct tp_topo_load found = { none, none };
	struct link_load *loads = tp_alloc((size_t)topo->nlinks + 1, sizeof(*loads), "loads of links");
	ncclResult_t result = loads ? ncclSuccess : ncclSystemError;
	for (int i = 0; i < flows->count && result == ncclSuccess; i++) result = lay(topo, &flows->list[i], loads);
	for (int32_t l = 0; l < topo->nlinks && result == ncclSuccess; l++) {
		const struct tp_topo_link *link = &topo->links[l];
		double us = loads[l].load > 0 ? loads[l].load / (1000 * link->bw * (costs ? tp_topo_costs_yield(costs, topo, l) : 1)) : 0;
		for (int side = 0; side < 2; side++) {
			struct tp_topo_limit *limit = side ? &found.across : &found.inside;
			/* Of links that are as long busy, whatever the rounding, the first. */
			if (!(side ? loads[l].across : loads[l].inside) || us <= limit->us * (1 + 1e-9)) continue;
			limit->us = us;
			limit->load = loads[l].load;
			limit->link = l;
		}
	}
	free(loads);
	TP_TRY(result);
	describe(topo, costs, flows, false, &found.inside);
	describe(topo, costs, flows, true, &found.across);
	*out = found;
	return ncclSuccess;
}

ncclResult_t tp_topo_load_find(const struct tp_topo *topo, const struct tp_rails *rails, const struct tp_topo_costs *costs,
	const struct tp_topo_traffic *traffic, struct tp_topo_load *out)
{
	struct flows flows = { .list = NULL };
	if (traffic->ngpus > topo->count[TP_TOPO_GPU] || (rails && rails->nrails != topo->count[TP_TOPO_GPU]))
		return TP_FAIL(ncclInvalidArgument, "traffic or rails of another machine than one of %d GPUs", topo->count[TP_TOPO_GPU]);
	ncclResult_t result = flows_of(topo, rails, traffic, &flows);
	if (result == ncclSuccess) result = find_limits(topo, costs, &flows, out);
	free(flows.list);
	return result;
}

/* ---- Channels ---- */

static ncclResult_t net_flows(const struct tp_channels *all, const struct tp_channel *c, struct flows *flows)
{
	bool ring = all->pattern == TP_PATTERN_RING, halved = all->pattern == TP_PATTERN_BALANCED_TREE && all->ngpus > 1;
	double bw = halved ? all->bw_inter / 2 : all->bw_inter;
	if (c->net_in < 0) return ncclSuccess;
	TP_TRY(add_flow(flows, c->net_in, c->gpus[0], bw, true));
	TP_TRY(add_flow(flows, ring ? c->gpus[all->ngpus - 1] : c->gpus[0], c->net_out, bw, true));
	if (!halved) return ncclSuccess;
	TP_TRY(add_flow(flows, c->net_in, c->gpus[1], bw, true));
	return add_flow(flows, c->gpus[1], c->net_out, bw, true);
}

/* From place i of a channel to the next or the one before: over their NICs where those are the way. */
static ncclResult_t hop_flow(const struct tp_channel *c, int i, int to, double bw, struct flows *flows)
{
	int32_t out = !c->nets ? -1 : to > i ? c->nets[i].next : c->nets[i].prev, in = !c->nets ? -1 : to > i ? c->nets[to].prev : c->nets[to].next;
	if (out < 0 || in < 0) return add_flow(flows, c->gpus[i], c->gpus[to], bw, false);
	TP_TRY(add_flow(flows, c->gpus[i], out, bw, false));
	return add_flow(flows, in, c->gpus[to], bw, false);
}

static ncclResult_t channel_flows(const struct tp_channels *all, const struct tp_channel *c, struct flows *flows)
{
	int n = all->ngpus;
	for (int i = 0; i + 1 < n && all->pattern != TP_PATTERN_PAIRS; i++) {
		bool ring = all->pattern == TP_PATTERN_RING;
		TP_TRY(hop_flow(c, i, i + 1, ring ? all->bw_intra : all->bw_intra / 2, flows));
		if (!ring) TP_TRY(hop_flow(c, i + 1, i, all->bw_intra / 2, flows));
	}
	if (all->pattern == TP_PATTERN_RING && n > 1 && c->net_in < 0) TP_TRY(add_flow(flows, c->gpus[n - 1], c->gpus[0], all->bw_intra, false));
	/* Its head has what all others send in equal parts, and sends each as much. */
	for (int i = 1; i < n && all->pattern == TP_PATTERN_PAIRS; i++) {
		TP_TRY(add_flow(flows, c->gpus[i], c->gpus[0], all->bw_intra / (n - 1), false));
		TP_TRY(add_flow(flows, c->gpus[0], c->gpus[i], all->bw_intra / (n - 1), false));
	}
	return net_flows(all, c, flows);
}

ncclResult_t tp_topo_channels_load(const struct tp_topo *topo, const struct tp_channels *channels, struct tp_topo_load *out)
{
	struct flows flows = { .list = NULL };
	ncclResult_t result = ncclSuccess;
	for (int c = 0; c < channels->nchannels && result == ncclSuccess; c++) result = channel_flows(channels, &channels->channels[c], &flows);
	if (result == ncclSuccess) result = find_limits(topo, NULL, &flows, out);
	free(flows.list);
	if (result != ncclSuccess) return result;
	out->inside.us *= 1000;
	out->across.us *= 1000;
	return ncclSuccess;
}

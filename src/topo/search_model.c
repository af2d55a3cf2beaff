/* The packing problem made out of a graph: one route a pair, the path that the policy chose, and what it takes of its links; by wish, between GPUs
 * that only a CPU joins, the way out of one's NIC and in by the other's. Three
 * ways take more than their bandwidth: peer traffic through an Intel root complex (6/5 of the PCIe links), writes of a NIC into GPUs
 * before Ampere (an eighth in the other direction, for the reads that order them), NVLink to a POWER CPU (both directions).
 * Links that the same routes take alike are one resource: a GPU's PCIe link, the switch behind it and the like. */
#include <stdlib.h>
#include <string.h>

#include "topo/search_model.h"

void tp_problem_free(struct tp_problem *p)
{
	if (!p) return;
	free(p->capacity);
	free(p->link);
	free(p->routes);
	free(p->uses);
	free(p->port);
	free(p->via);
	free(p);
}

static const struct tp_topo_node *place_node(const struct tp_topo *topo, int place)
{
	int ngpus = topo->count[TP_TOPO_GPU];
	return place < ngpus ? tp_topo_node_of(topo, TP_TOPO_GPU, place) : tp_topo_node_of(topo, TP_TOPO_NET, place - ngpus);
}

/* A path's links count this much; PCIe links of peer traffic through an Intel root complex more. */
static float pci_weight(const struct tp_topo *topo, const struct tp_topo_node *from, const struct tp_topo_path *path)
{
	if (path->type != TP_PATH_PHB || from->kind != TP_TOPO_GPU) return 1;
	for (int i = 0; i < path->nhops; i++) {
		const struct tp_topo_node *to = &topo->nodes[topo->links[path->links[i]].to];
		if (to->kind == TP_TOPO_CPU && to->cpu.arch == TP_ARCH_X86 && to->cpu.vendor == TP_VENDOR_INTEL)
			return (float)tp_topo_constant("intel.p2p-overhead");
	}
	return 1;
}

static float reverse_weight(const struct tp_topo_link *link, const struct tp_topo_node *from, const struct tp_topo_node *to, float weight)
{
	if (to->kind == TP_TOPO_GPU && to->gpu.maker == TP_MAKER_NVIDIA && to->gpu.sm < 80 && from->kind != TP_TOPO_GPU) return weight / 8;
	if (to->kind == TP_TOPO_CPU && to->cpu.arch == TP_ARCH_POWER && link->kind == TP_WIRE_NVL) return weight;
	return 0;
}

static void add_use(struct tp_problem *p, struct tp_route *route, int32_t resource, float weight)
{
	if (weight <= 0) return;
	for (int32_t i = route->first; i < route->first + route->nuses; i++)
		if (p->uses[i].resource == resource) {
			p->uses[i].weight += weight;
			return;
		}
	p->uses[route->first + route->nuses++] = (struct tp_use){ resource, weight };
}

/* What one path takes. */
static void add_path(const struct tp_topo *topo, struct tp_problem *p, struct tp_route *route, int from, int to)
{
	const struct tp_topo_node *a = place_node(topo, from);
	const struct tp_topo_path *path = tp_topo_path(topo, a->index, place_node(topo, to)->index);
	route->type = TP_MAX(route->type, path->type);
	route->nhops += path->nhops;
	float pci = pci_weight(topo, a, path);
	if (from >= p->ngpus) add_use(p, route, topo->nlinks + 2 * p->port[from - p->ngpus], 1);
	for (int i = 0; i < path->nhops; i++) {
		const struct tp_topo_link *link = &topo->links[path->links[i]];
		float weight = link->kind == TP_WIRE_PCI ? pci : 1;
		add_use(p, route, path->links[i], weight);
		if (link->reverse >= 0) add_use(p, route, link->reverse, reverse_weight(link, a, &topo->nodes[link->to], weight));
	}
	if (to >= p->ngpus) add_use(p, route, topo->nlinks + 2 * p->port[to - p->ngpus] + 1, 1);
}

static bool leads(const struct tp_topo *topo, int from, int to)
{
	const struct tp_topo_path *path = tp_topo_path(topo, place_node(topo, from)->index, place_node(topo, to)->index);
	return path->type < TP_PATH_NET && path->bw > 0 && path->nhops;
}

static void fill_route(const struct tp_topo *topo, struct tp_problem *p, int from, int to, int32_t *used)
{
	struct tp_route *route = &p->routes[(size_t)from * (size_t)(p->ngpus + p->nnets) + (size_t)to];
	bool by_net = from < p->ngpus && to < p->ngpus && tp_via(p, from, to) >= 0;
	*route = (struct tp_route){ .first = *used, .type = TP_PATH_DIS };
	if (!by_net && !leads(topo, from, to)) return;
	route->type = by_net ? TP_PATH_NET : TP_PATH_LOC;
	if (by_net) {
		add_path(topo, p, route, from, tp_net_place(p, tp_via(p, from, to)));
		add_path(topo, p, route, tp_net_place(p, tp_via(p, to, from)), to);
	} else {
		add_path(topo, p, route, from, to);
	}
	*used += route->nuses;
}

/* ---- GPUs of one host that reach each other by their NICs */

/* The NET by which a GPU reaches a peer: its own, in turn where it has several; -1: none that is nearer than the CPU. */
static int own_net(const struct tp_topo *topo, const struct tp_problem *p, int gpu, int peer)
{
	int32_t net = tp_topo_local_net(topo, place_node(topo, gpu)->index, peer);
	if (net < 0) return -1;
	int place = topo->nodes[net].ordinal + p->ngpus;
	bool near = tp_topo_path(topo, place_node(topo, gpu)->index, net)->type < TP_PATH_PXN && tp_topo_path(topo, net, place_node(topo, gpu)->index)->type < TP_PATH_PXN;
	return near && leads(topo, gpu, place) && leads(topo, place, gpu) ? topo->nodes[net].ordinal : -1;
}

/* What is known of two NETs' networks doesn't keep them apart. */
static bool may_meet(const struct tp_topo *topo, int one, int other)
{
	const struct tp_topo_node *a = tp_topo_node_of(topo, TP_TOPO_NET, one), *b = tp_topo_node_of(topo, TP_TOPO_NET, other);
	bool fabrics = !a->net.fabric || !b->net.fabric || a->net.fabric == b->net.fabric;
	return fabrics && (a->net.plane < 0 || b->net.plane < 0 || a->net.plane == b->net.plane);
}

static ncclResult_t choose_nets(const struct tp_topo *topo, struct tp_problem *p)
{
	p->via = tp_alloc((size_t)p->ngpus * (size_t)p->ngpus + 1, sizeof(*p->via), "ways over NICs");
	if (!p->via) return ncclSystemError;
	memset(p->via, -1, (size_t)p->ngpus * (size_t)p->ngpus * sizeof(*p->via));
	for (int a = 0; a < p->ngpus; a++)
		for (int b = 0; b < a; b++) {
			const struct tp_topo_node *x = place_node(topo, a), *y = place_node(topo, b);
			if (x->host != y->host || tp_topo_path(topo, x->index, y->index)->type < TP_PATH_PHB) continue;
			int one = own_net(topo, p, a, b), other = own_net(topo, p, b, a);
			if (one < 0 || other < 0 || p->port[one] == p->port[other] || !may_meet(topo, one, other)) continue;
			p->via[a * p->ngpus + b] = (int16_t)one;
			p->via[b * p->ngpus + a] = (int16_t)other;
			p->nvia++;
		}
	return ncclSuccess;
}

/* NETs of one port (one card seen twice) share its wire. */
static void number_ports(const struct tp_topo *topo, struct tp_problem *p)
{
	for (int i = 0; i < p->nnets; i++) {
		const struct tp_topo_node *net = tp_topo_node_of(topo, TP_TOPO_NET, i);
		p->port[i] = i;
		for (int j = 0; j < i && net->net.guid; j++) {
			const struct tp_topo_node *other = tp_topo_node_of(topo, TP_TOPO_NET, j);
			if (other->host == net->host && other->net.guid == net->net.guid && other->net.port == net->net.port) {
				p->port[i] = p->port[j];
				break;
			}
		}
	}
}

static void set_channel_limits(const struct tp_topo *topo, struct tp_problem *p)
{
	int sm = 0;
	for (int i = 0; i < p->ngpus; i++) {
		const struct tp_topo_node *gpu = tp_topo_node_of(topo, TP_TOPO_GPU, i);
		if (gpu->gpu.maker == TP_MAKER_NVIDIA && (!sm || gpu->gpu.sm < sm)) sm = gpu->gpu.sm;
	}
	p->unit = 20;
	for (int i = 0; i < topo->nlinks; i++) {
		const struct tp_topo_link *link = &topo->links[i];
		if (link->kind != TP_WIRE_NVL || topo->nodes[link->from].kind != TP_TOPO_GPU || link->count < 1 || link->bw <= 0) continue;
		p->unit = link->bw / link->count;
		break;
	}
	/* The fastest channel that NCCL tries on such GPUs. */
	p->channel_max = sm >= 100 ? 90 : sm >= 90 ? 60 : 40;
	if (p->channel_max < 1.5 * p->unit) p->channel_max = 1.5 * p->unit;
	for (int i = 0; i < p->nnets; i++) {
		double net = tp_topo_node_of(topo, TP_TOPO_NET, i)->net.bw;
		if (net > p->channel_max && net <= 2 * p->channel_max) p->channel_max = net;
	}
}

static uint64_t mix(uint64_t a)
{
	a ^= a >> 31;
	a *= 0x9e3779b97f4a7c15u;
	a ^= a >> 29;
	a *= 0xbf58476d1ce4e5b9u;
	return a ^ a >> 32;
}

/* Sums over a resource's routes: equal for resources that the same routes take alike, different for others but for one chance in
 * 2^64 a pair. */
static void sign_resources(const struct tp_problem *p, uint64_t *signs)
{
	size_t places = (size_t)(p->ngpus + p->nnets);
	for (size_t r = 0; r < places * places; r++)
		for (int32_t i = p->routes[r].first; i < p->routes[r].first + p->routes[r].nuses; i++) {
			uint32_t weight;
			memcpy(&weight, &p->uses[i].weight, sizeof(weight));
			signs[p->uses[i].resource] += mix(mix(r + 1) + weight) | 1;
		}
}

struct signed_resource { uint64_t sign; int32_t resource; };

static int by_sign(const void *a, const void *b)
{
	const struct signed_resource *x = a, *y = b;
	if (x->sign != y->sign) return x->sign < y->sign ? -1 : 1;
	return x->resource - y->resource;
}

ncclResult_t tp_problem_merge(struct tp_problem *p)
{
	size_t n = (size_t)p->nresources, places = (size_t)(p->ngpus + p->nnets);
	uint64_t *signs = tp_alloc(n + 1, sizeof(*signs), "signatures of links");
	struct signed_resource *sorted = tp_alloc(n + 1, sizeof(*sorted), "links by signature");
	int32_t *renamed = tp_alloc(n + 1, sizeof(*renamed), "numbers of links");
	if (!signs || !sorted || !renamed) {
		free(signs);
		free(sorted);
		free(renamed);
		return ncclSystemError;
	}
	sign_resources(p, signs);
	for (size_t i = 0; i < n; i++) sorted[i] = (struct signed_resource){ signs[i], (int32_t)i };
	qsort(sorted, n, sizeof(*sorted), by_sign);
	/* The first of each class takes the least capacity; then classes are numbered in the order of their first members. */
	int32_t *first = (int32_t *)signs;      /* twice as large as it need be, and done with */
	for (size_t i = 0, leader = 0; i < n; i++) {
		if (i && sorted[i].sign != sorted[i - 1].sign) leader = i;
		renamed[sorted[i].resource] = sorted[leader].resource;
	}
	for (size_t i = 0; i < n; i++) {
		size_t leader = (size_t)renamed[i];
		if (p->capacity[i] < p->capacity[leader]) {
			p->capacity[leader] = p->capacity[i];
			p->link[leader] = p->link[i];
		}
	}
	for (size_t i = 0; i < n; i++) first[i] = -1;
	int32_t count = 0;
	for (size_t r = 0; r < places * places; r++) {
		struct tp_route *route = &p->routes[r];
		int32_t kept = 0;
		for (int32_t i = 0; i < route->nuses; i++) {
			struct tp_use use = p->uses[route->first + i];
			if (renamed[use.resource] != use.resource) continue;
			if (first[use.resource] < 0) {
				first[use.resource] = count++;
			}
			p->uses[route->first + kept++] = (struct tp_use){ first[use.resource], use.weight };
		}
		route->nuses = kept;
	}
	double *capacity = tp_alloc((size_t)count + 1, sizeof(*capacity), "capacities");
	int32_t *link = tp_alloc((size_t)count + 1, sizeof(*link), "links");
	if (capacity && link) {
		for (size_t i = 0; i < n; i++)
			if (first[i] >= 0 && renamed[i] == (int32_t)i) {
				capacity[first[i]] = p->capacity[i];
				link[first[i]] = p->link[i];
			}
		free(p->capacity);
		free(p->link);
		p->capacity = capacity;
		p->link = link;
		p->nresources = count;
	}
	free(signs);
	free(sorted);
	free(renamed);
	if (capacity && link) return ncclSuccess;
	free(capacity);
	free(link);
	return ncclSystemError;
}

#define MAX_USES ((size_t)1 << 25)

static size_t most_uses(const struct tp_topo *topo, int from, int to)
{
	const struct tp_topo_path *path = tp_topo_path(topo, place_node(topo, from)->index, place_node(topo, to)->index);
	return 2 * (size_t)path->nhops + 2;
}

static ncclResult_t fill(const struct tp_topo *topo, struct tp_problem *p, bool by_net)
{
	size_t places = (size_t)(p->ngpus + p->nnets), uses = 0;
	p->port = tp_alloc((size_t)p->nnets + 1, sizeof(*p->port), "ports");
	if (!p->port) return ncclSystemError;
	number_ports(topo, p);
	if (by_net) TP_TRY(choose_nets(topo, p));
	for (int from = 0; from < (int)places; from++)
		for (int to = 0; to < (int)places; to++) {
			bool via = from < p->ngpus && to < p->ngpus && tp_via(p, from, to) >= 0;
			uses += via ? most_uses(topo, from, tp_net_place(p, tp_via(p, from, to))) + most_uses(topo, tp_net_place(p, tp_via(p, to, from)), to)
				: most_uses(topo, from, to);
		}
	if (uses > MAX_USES) return TP_FAIL(ncclInvalidUsage, "channels over %d GPUs and %d NICs whose paths have %zu links: that is no machine", p->ngpus, p->nnets, uses / 2);
	p->nresources = topo->nlinks + 2 * p->nnets;
	p->routes = tp_alloc(places * places + 1, sizeof(*p->routes), "routes");
	p->uses = tp_alloc(uses + 1, sizeof(*p->uses), "uses of links");
	p->capacity = tp_alloc((size_t)p->nresources + 1, sizeof(*p->capacity), "capacities");
	p->link = tp_alloc((size_t)p->nresources + 1, sizeof(*p->link), "links");
	if (!p->routes || !p->uses || !p->capacity || !p->link) return ncclSystemError;
	for (int i = 0; i < topo->nlinks; i++) {
		p->capacity[i] = topo->links[i].bw;
		p->link[i] = i;
	}
	for (int i = 0; i < p->nnets; i++)
		for (int way = 0; way < 2; way++) {
			p->capacity[topo->nlinks + 2 * i + way] = tp_topo_node_of(topo, TP_TOPO_NET, i)->net.bw;
			p->link[topo->nlinks + 2 * i + way] = -1;
		}
	int32_t used = 0;
	for (int from = 0; from < (int)places; from++)
		for (int to = 0; to < (int)places; to++) {
			if (from != to && (from < p->ngpus || to < p->ngpus)) fill_route(topo, p, from, to, &used);
			else p->routes[(size_t)from * places + (size_t)to] = (struct tp_route){ .first = used, .type = TP_PATH_DIS };
		}
	set_channel_limits(topo, p);
	return tp_problem_merge(p);
}

ncclResult_t tp_problem_create(const struct tp_topo *topo, const struct tp_topo_policy *policy, bool by_net, struct tp_problem **out)
{
	int ngpus = topo->count[TP_TOPO_GPU], nnets = policy->multi_host ? topo->count[TP_TOPO_NET] : 0;
	if (ngpus > TP_SEARCH_MAX_GPUS || nnets > TP_SEARCH_MAX_GPUS)
		return TP_FAIL(ncclInvalidUsage, "channels over %d GPUs and %d NICs: one domain may have %d of each", ngpus, nnets, TP_SEARCH_MAX_GPUS);
	struct tp_problem *p = tp_alloc(1, sizeof(*p), "channel search");
	if (!p) return ncclSystemError;
	p->ngpus = ngpus;
	p->nnets = nnets;
	ncclResult_t result = fill(topo, p, by_net && nnets > 1);
	if (result != ncclSuccess) {
		tp_problem_free(p);
		return result;
	}
	*out = p;
	return ncclSuccess;
}

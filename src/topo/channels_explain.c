/* Why channels carry no more than they do, in words: where nothing joins all GPUs, which GPU or link is in the way; where a worse kind
 * of path had to be taken, which link would have spared it; which GPU has less than its peers; which limiting link runs below
 * what it could. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "topo/search_model.h"

struct view {
	const struct tp_topo *topo;
	const struct tp_problem *p;
	struct tp_channels *channels;
	const char *what;               /* "ring", "tree" */
};

static const struct tp_topo_node *gpu_node(const struct view *v, int gpu) { return tp_topo_node_of(v->topo, TP_TOPO_GPU, gpu); }
static const char *gpu_name(const struct view *v, int gpu) { return gpu_node(v, gpu)->name; }

#define FOUND(v, ...) tp_finding_add(&(v)->channels->findings, &(v)->channels->nfindings, __VA_ARGS__)

static bool joined(const struct tp_problem *p, int a, int b, enum tp_topo_path_type limit)
{
	const struct tp_route *route = tp_route_of(p, a, b);
	return route->nuses && route->type <= limit;
}

static bool joined_with(const struct tp_problem *p, int a, int b, enum tp_topo_path_type limit, int extra_a, int extra_b)
{
	return joined(p, a, b, limit) || (a == extra_a && b == extra_b) || (a == extra_b && b == extra_a);
}

/* A cycle (path: a chain) through all GPUs over routes of this kind, with one pair more (extra_a, extra_b) allowed. Bounded: true and
 * false are both sure only where *hops isn't used up. */
static bool goes_round(const struct tp_problem *p, enum tp_topo_path_type limit, int16_t *order, bool *used, int at, int ea, int eb,
	bool closed, int *hops)
{
	int here = order[at - 1];
	if (at == p->ngpus) return !closed || joined_with(p, here, order[0], limit, ea, eb);
	for (int next = 0; next < p->ngpus; next++) {
		if (used[next] || !joined_with(p, here, next, limit, ea, eb)) continue;
		if (--*hops < 0) return false;
		used[next] = true;
		order[at] = (int16_t)next;
		if (goes_round(p, limit, order, used, at + 1, ea, eb, closed, hops)) return true;
		used[next] = false;
	}
	return false;
}

static bool try_with(const struct view *v, enum tp_topo_path_type limit, int a, int b)
{
	int16_t order[64];
	bool used[64] = { false };
	bool closed = v->channels->pattern == TP_PATTERN_RING && !v->p->nnets;
	/* A chain may have to start anywhere. */
	for (int start = 0; start < (closed ? 1 : v->p->ngpus); start++) {
		int hops = 4000;
		memset(used, 0, sizeof(used));
		order[0] = (int16_t)start;
		used[start] = true;
		if (goes_round(v->p, limit, order, used, 1, a, b, closed, &hops)) return true;
	}
	return false;
}

static int neighbours(const struct view *v, int gpu, enum tp_topo_path_type limit)
{
	int n = 0;
	for (int other = 0; other < v->p->ngpus; other++) n += other != gpu && joined(v->p, gpu, other, limit) && joined(v->p, other, gpu, limit);
	return n;
}

/* "0 1 2 3 | 4 5 6 7": the GPUs that NVLink joins, and how many such groups there are. */
static int list_groups(const struct view *v, char *text, size_t size)
{
	int groups = 0, group_of[TP_SEARCH_MAX_GPUS];
	size_t used = 0;
	text[0] = 0;
	for (int gpu = 0; gpu < v->p->ngpus; gpu++) group_of[gpu] = -1;
	for (int gpu = 0; gpu < v->p->ngpus; gpu++) {
		if (group_of[gpu] >= 0) continue;
		group_of[gpu] = groups;
		for (bool grew = true; grew;) {
			grew = false;
			for (int a = 0; a < v->p->ngpus; a++)
				for (int b = 0; b < v->p->ngpus && group_of[a] == groups; b++)
					if (group_of[b] < 0 && joined(v->p, a, b, TP_PATH_NVL) && joined(v->p, b, a, TP_PATH_NVL)) group_of[b] = groups, grew = true;
		}
		for (int a = 0; a < v->p->ngpus && used < size; a++)
			if (group_of[a] == groups) used += (size_t)snprintf(text + used, size - used, "%s%d", a > gpu ? " " : groups ? " | " : "", a);
		groups++;
	}
	return groups;
}

/* What joins GPUs directly, in their maker's word. */
static const char *wires(const struct view *v) { return gpu_node(v, 0)->gpu.maker == TP_MAKER_AMD ? "xGMI" : "NVLink"; }

/* The best link to add: one between two GPUs of which one has fewest neighbours. */
static ncclResult_t explain_type(const struct view *v)
{
	const struct tp_problem *p = v->p;
	int poor = 0, a = -1, b = -1, most = 0, best = 1 << 30;
	char groups[96], costs[160];
	for (int gpu = 0; gpu < p->ngpus; gpu++) {
		int n = neighbours(v, gpu, TP_PATH_NVL);
		if (n < neighbours(v, poor, TP_PATH_NVL)) poor = gpu;
		most = TP_MAX(most, n);
	}
	if (!most || v->channels->type_intra <= TP_PATH_NVB || p->ngpus > 64) return ncclSuccess;
	snprintf(costs, sizeof(costs), "the %ss take %s paths (%s), %.4g GB/s in all", v->what, tp_topo_path_name(v->channels->type_intra),
		tp_topo_path_meaning(v->channels->type_intra), v->channels->nchannels * v->channels->bw_intra);
	if (neighbours(v, poor, TP_PATH_NVL) == 0 && most > 1)
		return FOUND(v, TP_FOUND_MISSING_LINK, gpu_node(v, poor)->index, -1, "no %s stays on %s: %s has none that works, others reach %d GPUs by it; %s",
			v->what, wires(v), gpu_name(v, poor), most, costs);
	for (int x = 0; x < p->ngpus && !v->topo->count[TP_TOPO_NVS]; x++)
		for (int y = x + 1; y < p->ngpus; y++) {
			int have = neighbours(v, x, TP_PATH_NVL) + neighbours(v, y, TP_PATH_NVL);
			if (have >= best || joined(p, x, y, TP_PATH_NVL) || !try_with(v, TP_PATH_NVL, x, y)) continue;
			best = have;
			a = x;
			b = y;
		}
	if (a >= 0)
		return FOUND(v, TP_FOUND_MISSING_LINK, gpu_node(v, a)->index, gpu_node(v, b)->index,
			"no %s stays on %s: a link between %s and %s would let one; %s", v->what, wires(v), gpu_name(v, a), gpu_name(v, b), costs);
	if (list_groups(v, groups, sizeof(groups)) > 1)
		return FOUND(v, TP_FOUND_MISSING_LINK, -1, -1, "no %s stays on %s, which joins the GPUs in groups and none of these with another (%s); %s",
			v->what, wires(v), groups, costs);
	return FOUND(v, TP_FOUND_MISSING_LINK, gpu_node(v, poor)->index, -1, "no %s stays on %s: %s reaches %d GPUs by it, and no order uses each once; %s",
		v->what, wires(v), gpu_name(v, poor), neighbours(v, poor, TP_PATH_NVL), costs);
}

/* Nothing was found at all. */
static ncclResult_t explain_nothing(const struct view *v)
{
	const struct tp_problem *p = v->p;
	int before = v->channels->nfindings;
	for (int gpu = 0; gpu < p->ngpus && p->ngpus > 1; gpu++) {
		int out = 0, in = 0;
		for (int other = 0; other < p->ngpus; other++) {
			out += tp_route_of(p, gpu, other)->nuses > 0;
			in += tp_route_of(p, other, gpu)->nuses > 0;
		}
		if (out && in) continue;
		TP_TRY(FOUND(v, TP_FOUND_NO_PATTERN, gpu_node(v, gpu)->index, -1,
			"no %s passes all %d GPUs: no link with any bandwidth leads %s %s; one channel in plain order stands in", v->what, p->ngpus,
			out ? "to" : "from", gpu_name(v, gpu)));
	}
	if (v->channels->nfindings > before) return ncclSuccess;
	int reached = 0;
	for (int net = 0; net < p->nnets; net++)
		for (int gpu = 0; gpu < p->ngpus; gpu++) {
			int place = tp_net_place(p, net);
			reached += tp_route_of(p, gpu, place)->nuses > 0 && tp_route_of(p, place, gpu)->nuses > 0;
		}
	if (p->nnets && !reached)
		return FOUND(v, TP_FOUND_NO_PATTERN, -1, -1, "no %s leaves the machine: no link with any bandwidth joins a GPU and a NIC", v->what);
	for (int a = 0; a < p->ngpus; a++)
		for (int b = 0; b < p->ngpus; b++)
			if (a != b && !tp_route_of(p, a, b)->nuses)
				return FOUND(v, TP_FOUND_NO_PATTERN, gpu_node(v, a)->index, gpu_node(v, b)->index,
					"no %s passes all %d GPUs: %s can't reach %s, and no order goes round it; one channel in plain order stands in", v->what,
					p->ngpus, gpu_name(v, a), gpu_name(v, b));
	return FOUND(v, TP_FOUND_NO_PATTERN, -1, -1, "no %s passes all %d GPUs within what their links carry; one channel in plain order stands in",
		v->what, p->ngpus);
}

/* What a GPU's own links of one kind carry, and how many they are. */
static double own_bw(const struct view *v, int gpu, enum tp_topo_link_kind kind, int *count)
{
	const struct tp_topo_node *node = gpu_node(v, gpu);
	double bw = 0;
	*count = 0;
	for (int i = node->first_link; i < node->first_link + node->nlinks; i++) {
		if (v->topo->links[i].kind != kind) continue;
		bw += v->topo->links[i].bw;
		*count += v->topo->links[i].count;
	}
	return bw;
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return x < y ? -1 : x > y;
}

static ncclResult_t explain_uneven(const struct view *v, enum tp_topo_link_kind kind)
{
	double *bws = tp_alloc((size_t)v->p->ngpus, sizeof(*bws), "bandwidths of GPUs");
	if (!bws) return ncclSystemError;
	int count;
	for (int gpu = 0; gpu < v->p->ngpus; gpu++) bws[gpu] = own_bw(v, gpu, kind, &count);
	qsort(bws, (size_t)v->p->ngpus, sizeof(*bws), by_value);
	double usual = bws[v->p->ngpus / 2];
	int fewer = 0;
	while (bws[fewer] < 0.97 * usual) fewer++;
	free(bws);
	ncclResult_t result = ncclSuccess;
	/* More than a quarter: the machine is made so. */
	if (fewer > TP_MAX(v->p->ngpus / 4, 1)) return ncclSuccess;
	for (int gpu = 0; gpu < v->p->ngpus && result == ncclSuccess; gpu++) {
		double bw = own_bw(v, gpu, kind, &count);
		if (bw >= 0.97 * usual) continue;
		const char *kinds = kind == TP_WIRE_NVL ? "NVLinks" : "PCIe lanes";
		result = FOUND(v, TP_FOUND_UNEVEN, gpu_node(v, gpu)->index, -1,
			"%s has %.4g GB/s over %d %s where most have %.4g: every %s runs at its speed", gpu_name(v, gpu), bw, count, kinds, usual, v->what);
	}
	return result;
}

/* Links that are full and could be wider. */
static ncclResult_t explain_narrow(const struct view *v, const double *load)
{
	int said = 0;
	for (int r = 0; r < v->p->nresources && said < 4; r++) {
		if (load[r] < 0.999 || v->p->link[r] < 0) continue;
		const struct tp_topo_link *link = &v->topo->links[v->p->link[r]];
		if (link->full_bw <= link->bw * 1.02) continue;
		said++;
		TP_TRY(FOUND(v, TP_FOUND_NARROW, link->from, link->to, "the %ss are held to %.4g GB/s together by %s to %s, which runs at %.4g of its possible %.4g GB/s",
			v->what, v->channels->nchannels * v->channels->bw_inter, v->topo->nodes[link->from].name, v->topo->nodes[link->to].name,
			link->bw, link->full_bw));
	}
	return ncclSuccess;
}

ncclResult_t tp_channels_explain(const struct tp_topo *topo, const struct tp_topo_policy *policy, const struct tp_problem *p,
	struct tp_channels *channels, const double *load)
{
	struct view v = { topo, p, channels, channels->pattern == TP_PATTERN_RING ? "ring" : "tree" };
	bool found = false;
	for (int r = 0; r < p->nresources; r++) found |= load[r] > 0;
	if (policy->multi_host && !p->nnets)
		TP_TRY(FOUND(&v, TP_FOUND_NO_NIC, -1, -1, "the %ss stay on this machine: the topology has no NIC, and there are other machines", v.what));
	if (!found && (p->ngpus > 1 || p->nnets)) return explain_nothing(&v);
	if (p->ngpus < 2) return ncclSuccess;
	TP_TRY(explain_type(&v));
	TP_TRY(explain_uneven(&v, TP_WIRE_NVL));
	if (channels->type_intra > TP_PATH_NVB) TP_TRY(explain_uneven(&v, TP_WIRE_PCI));
	return explain_narrow(&v, load);
}

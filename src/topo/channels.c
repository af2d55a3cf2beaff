/* Channels once found: freed, checked, and those that need no search: every GPU to every other behind a switch. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "topo/search_model.h"

const char *tp_finding_code(enum tp_finding_kind kind)
{
	static const char *const codes[] = { "no-pattern", "missing-link", "uneven", "narrow", "nic-far", "nic-shared", "no-nic" };
	return (unsigned)kind < TP_ARRAY_LEN(codes) ? codes[kind] : "?";
}

ncclResult_t tp_finding_add(struct tp_finding **all, int *count, enum tp_finding_kind kind, int32_t node, int32_t peer, const char *format, ...)
{
	struct tp_finding *more = realloc(*all, (size_t)(*count + 1) * sizeof(**all));
	if (!more) return TP_FAIL(ncclSystemError, "out of memory for a finding about channels");
	*all = more;
	struct tp_finding *f = &more[(*count)++];
	*f = (struct tp_finding){ .kind = kind, .node = node, .peer = peer };
	va_list args;
	va_start(args, format);
	vsnprintf(f->text, sizeof(f->text), format, args);
	va_end(args);
	return ncclSuccess;
}

bool tp_channels_stand_in(const struct tp_channels *channels)
{
	for (int i = 0; i < channels->nfindings; i++)
		if (channels->findings[i].kind == TP_FOUND_NO_PATTERN) return true;
	return channels->nchannels == 0;
}

void tp_channels_free(struct tp_channels *channels)
{
	if (!channels) return;
	for (int c = 0; channels->channels && c < channels->nchannels; c++) {
		free(channels->channels[c].gpus);
		free(channels->channels[c].nets);
	}
	free(channels->channels);
	free(channels->findings);
	free(channels);
}

/* ---- Check ---- */

struct checker {
	const struct tp_topo *topo;
	const struct tp_problem *p;
	const struct tp_channels *channels;
	char *why;
};

static ncclResult_t refuse(const struct checker *k, const char *format, ...) __attribute__((format(printf, 2, 3)));
static ncclResult_t refuse(const struct checker *k, const char *format, ...)
{
	va_list args;
	va_start(args, format);
	vsnprintf(k->why, 256, format, args);
	va_end(args);
	return ncclInvalidUsage;
}

static bool is_a(const struct tp_topo *topo, int32_t node, enum tp_topo_kind kind)
{
	return node >= 0 && node < topo->nnodes && topo->nodes[node].kind == kind;
}

static ncclResult_t check_members(const struct checker *k, struct tp_packed *packed, bool *seen)
{
	const struct tp_channels *all = k->channels;
	for (int c = 0; c < all->nchannels; c++) {
		memset(seen, 0, (size_t)k->p->ngpus * sizeof(*seen));
		for (int i = 0; i < all->ngpus; i++) {
			if (!is_a(k->topo, all->channels[c].gpus[i], TP_TOPO_GPU)) return refuse(k, "channel %d: place %d is no GPU", c, i);
			int gpu = k->topo->nodes[all->channels[c].gpus[i]].ordinal;
			if (seen[gpu]) return refuse(k, "channel %d passes GPU %d twice", c, gpu);
			seen[gpu] = true;
			packed->order[(size_t)c * (size_t)all->ngpus + (size_t)i] = (int16_t)gpu;
		}
		int32_t in = all->channels[c].net_in, out = all->channels[c].net_out;
		if (!k->p->nnets) {
			if (in >= 0 || out >= 0) return refuse(k, "channel %d has a NIC, within one domain", c);
			continue;
		}
		if (!is_a(k->topo, in, TP_TOPO_NET) || !is_a(k->topo, out, TP_TOPO_NET)) return refuse(k, "channel %d has no NIC", c);
		packed->net_in[c] = (int16_t)k->topo->nodes[in].ordinal;
		packed->net_out[c] = (int16_t)k->topo->nodes[out].ordinal;
	}
	return ncclSuccess;
}

/* 0: out where it came in. 2: the same, or a partner that does the reverse. Trees never change. */
static ncclResult_t check_nets(const struct checker *k, const struct tp_packed *packed)
{
	const struct tp_channels *all = k->channels;
	for (int c = 0; c < all->nchannels && k->p->nnets; c++) {
		int in = packed->net_in[c], out = packed->net_out[c], partner = c ^ 1;
		if (k->p->port[in] == k->p->port[out]) continue;
		if (all->pattern != TP_PATTERN_RING || all->cross_nic == 0) return refuse(k, "channel %d comes in by one NIC and leaves by another", c);
		if (all->cross_nic == 1) continue;
		if (partner >= all->nchannels || packed->net_in[partner] != out || packed->net_out[partner] != in)
			return refuse(k, "channel %d crosses from a NIC to another and has no partner that goes back", c);
	}
	return ncclSuccess;
}

/* Those that exchange by NICs do so by the ones that the search takes, so that what these carry is known. */
static ncclResult_t check_hops(const struct checker *k, int c, const int16_t *order)
{
	const struct tp_problem *p = k->p;
	const struct tp_hop_nets *nets = k->channels->channels[c].nets;
	for (int i = 0; i < p->ngpus; i++) {
		int prev = i ? tp_via(p, order[i], order[i - 1]) : -1, next = i + 1 < p->ngpus ? tp_via(p, order[i], order[i + 1]) : -1;
		int32_t want[2] = { prev >= 0 ? tp_topo_node_of(k->topo, TP_TOPO_NET, prev)->index : -1, next >= 0 ? tp_topo_node_of(k->topo, TP_TOPO_NET, next)->index : -1 };
		for (int way = 0; way < 2; way++) {
			int32_t has = !nets ? -1 : way ? nets[i].next : nets[i].prev;
			if (has == want[way]) continue;
			return refuse(k, "channel %d: GPU %d exchanges with its %s by %s, and the way is by %s", c, order[i], way ? "next" : "previous",
				has < 0 ? "no NIC" : k->topo->nodes[has].name, want[way] < 0 ? "none" : k->topo->nodes[want[way]].name);
		}
	}
	return ncclSuccess;
}

static ncclResult_t check_routes(const struct checker *k, enum tp_form form, const struct tp_packed *packed)
{
	const struct tp_problem *p = k->p;
	for (int c = 0; c < packed->n; c++) {
		const int16_t *order = packed->order + (size_t)c * (size_t)p->ngpus;
		TP_TRY(check_hops(k, c, order));
		for (int i = 0; i < p->ngpus; i++) {
			int next = order[(i + 1) % p->ngpus];
			if (i + 1 == p->ngpus && (form != TP_FORM_RING || p->ngpus == 1)) break;
			const struct tp_route *route = tp_route_of(p, order[i], next);
			if (!route->nuses || route->type > k->channels->type_intra)
				return refuse(k, "channel %d: GPU %d to GPU %d is %s, and the channels claim %s", c, order[i], next,
					tp_topo_path_name(route->type), tp_topo_path_name(k->channels->type_intra));
		}
	}
	return ncclSuccess;
}

static ncclResult_t check_load(const struct checker *k, enum tp_form form, const struct tp_packed *packed)
{
	const struct tp_problem *p = k->p;
	ncclResult_t result = ncclSuccess;
	double *intra = tp_alloc((size_t)p->nresources + 1, sizeof(*intra), "loads of links");
	double *inter = tp_alloc((size_t)p->nresources + 1, sizeof(*inter), "loads of links");
	if (!intra || !inter) result = ncclSystemError;
	else tp_packed_load(p, form, packed, intra, inter);
	for (int r = 0; r < p->nresources && result == ncclSuccess; r++) {
		double load = intra[r] * k->channels->bw_intra + inter[r] * k->channels->bw_inter;
		if (load <= p->capacity[r] * (1 + 1e-5) + 1e-9) continue;
		const struct tp_topo_link *link = p->link[r] >= 0 ? &k->topo->links[p->link[r]] : NULL;
		result = refuse(k, "%s%s%s carries %.4g GB/s and has %.4g", link ? k->topo->nodes[link->from].name : "the port of a NIC",
			link ? " to " : "", link ? k->topo->nodes[link->to].name : "", load, p->capacity[r]);
	}
	free(intra);
	free(inter);
	return result;
}

static enum tp_form form_of(const struct tp_channels *channels, const struct tp_problem *p)
{
	switch (channels->pattern) {
	case TP_PATTERN_RING: return p->nnets ? TP_FORM_RING_NETS : TP_FORM_RING;
	case TP_PATTERN_BALANCED_TREE:
	case TP_PATTERN_SPLIT_TREE: return p->nnets ? TP_FORM_CHAIN_TWO_HEADS : TP_FORM_CHAIN;
	default: return p->nnets ? TP_FORM_CHAIN_NETS : TP_FORM_CHAIN;
	}
}

static ncclResult_t check_pairs(const struct checker *k)
{
	const struct tp_problem *p = k->p;
	double *load = tp_alloc((size_t)p->nresources + 1, sizeof(*load), "loads of links");
	if (!load) return ncclSystemError;
	ncclResult_t result = ncclSuccess;
	for (int a = 0; a < p->ngpus && k->channels->nchannels; a++)
		for (int b = 0; b < p->ngpus; b++) {
			const struct tp_route *route = tp_route_of(p, a, b);
			for (int32_t u = route->first; u < route->first + route->nuses; u++) load[p->uses[u].resource] += p->uses[u].weight;
		}
	for (int r = 0; r < p->nresources && result == ncclSuccess; r++)
		if (load[r] * k->channels->bw_intra > p->capacity[r] * (1 + 1e-5)) result = refuse(k, "all pairs at once want more than a link has");
	free(load);
	return result;
}

static ncclResult_t check_all(struct checker *k, struct tp_packed *packed, bool *seen)
{
	const struct tp_channels *all = k->channels;
	bool none = false;
	if (all->ngpus != k->p->ngpus) return refuse(k, "channels over %d GPUs on a machine of %d", all->ngpus, k->p->ngpus);
	TP_TRY(check_members(k, packed, seen));
	for (int i = 0; i < all->nfindings; i++) none |= all->findings[i].kind == TP_FOUND_NO_PATTERN;
	TP_TRY(check_nets(k, packed));
	if (none || (all->ngpus < 2 && !k->p->nnets)) return ncclSuccess;
	if (all->pattern == TP_PATTERN_PAIRS) return check_pairs(k);
	TP_TRY(check_routes(k, form_of(all, k->p), packed));
	return check_load(k, form_of(all, k->p), packed);
}

ncclResult_t tp_channels_check(const struct tp_topo *topo, const struct tp_topo_policy *policy, const struct tp_channels *channels,
	char why[256])
{
	struct tp_problem *p;
	why[0] = 0;
	TP_TRY(tp_problem_create(topo, policy, channels->by_net, &p));
	struct checker k = { topo, p, channels, why };
	size_t n = (size_t)channels->nchannels + 1, gpus = (size_t)TP_MAX(channels->ngpus, p->ngpus) + 1;
	struct tp_packed packed = { .n = channels->nchannels };
	packed.order = tp_alloc(n * gpus, sizeof(*packed.order), "channels");
	packed.net_in = tp_alloc(n, sizeof(*packed.net_in), "channels");
	packed.net_out = tp_alloc(n, sizeof(*packed.net_out), "channels");
	bool *seen = tp_alloc(gpus, sizeof(*seen), "channels");
	ncclResult_t result = packed.order && packed.net_in && packed.net_out && seen ? check_all(&k, &packed, seen) : ncclSystemError;
	free(packed.order);
	free(packed.net_in);
	free(packed.net_out);
	free(seen);
	tp_problem_free(p);
	return result;
}

/* ---- Pairs ---- */

/* GB/s of each pair while all are at it; 0 where some pair isn't joined over NVLink. */
static double pair_bw(const struct tp_problem *p, double *load)
{
	double bw = 1e18;
	for (int a = 0; a < p->ngpus; a++)
		for (int b = 0; b < p->ngpus; b++) {
			const struct tp_route *route = tp_route_of(p, a, b);
			if (a == b) continue;
			if (!route->nuses || route->type > TP_PATH_NVL) return 0;
			for (int32_t u = route->first; u < route->first + route->nuses; u++) load[p->uses[u].resource] += p->uses[u].weight;
		}
	for (int r = 0; r < p->nresources; r++)
		if (load[r] > 0) bw = TP_MIN(bw, p->capacity[r] / load[r]);
	return bw < 1e18 ? bw : 0;
}

static ncclResult_t fill_heads(const struct tp_topo *topo, const struct tp_rails *rails, struct tp_channels *channels)
{
	int n = topo->count[TP_TOPO_GPU];
	channels->channels = tp_alloc((size_t)n, sizeof(*channels->channels), "channels");
	if (!channels->channels) return ncclSystemError;
	for (; channels->nchannels < n; channels->nchannels++) {
		struct tp_channel *c = &channels->channels[channels->nchannels];
		const struct tp_rail *rail = rails ? &rails->rails[channels->nchannels] : NULL;
		c->gpus = tp_alloc((size_t)n, sizeof(*c->gpus), "channels");
		if (!c->gpus) return ncclSystemError;
		for (int i = 0; i < n; i++) c->gpus[i] = tp_topo_node_of(topo, TP_TOPO_GPU, (channels->nchannels + i) % n)->index;
		c->net_in = c->net_out = rail && rail->nnets ? rail->nets[0] : -1;
		if (!rail || !rail->nnets) continue;
		/* Its first NIC's alone: a channel has one. */
		double bw = tp_topo_path(topo, rail->gpu, rail->nets[0])->bw / rail->share;
		channels->type_inter = TP_MAX(channels->type_inter, rail->type);
		channels->bw_inter = channels->nchannels ? TP_MIN(channels->bw_inter, bw) : bw;
	}
	return ncclSuccess;
}

ncclResult_t tp_channels_pairs(const struct tp_topo *topo, const struct tp_topo_policy *policy, const struct tp_problem *p,
	struct tp_channels *channels)
{
	double *load = tp_alloc((size_t)p->nresources + 1, sizeof(*load), "loads of links");
	if (!load) return ncclSystemError;
	double bw = topo->count[TP_TOPO_NVS] && p->ngpus > 1 ? pair_bw(p, load) : 0;
	free(load);
	channels->ngpus = p->ngpus;
	if (bw <= 0) return ncclSuccess;
	channels->bw_intra = channels->bw_inter = channels->bound = bw;
	channels->type_intra = TP_PATH_NVL;
	if (!p->nnets) return fill_heads(topo, NULL, channels);
	struct tp_rails *rails;
	TP_TRY(tp_rails_assign(topo, policy, &rails));
	ncclResult_t result = fill_heads(topo, rails, channels);
	tp_rails_free(rails);
	return result;
}

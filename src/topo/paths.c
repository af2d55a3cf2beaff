/* What the wires allow: to each end (GPU, port, CPU, NVSwitch) the best way from every node, best being NCCL's order: nearer type,
 * then wider, then shorter; of equals, the first that is found from the end, widest links first. Types don't add up the way distances do (a
 * way over NVLink may be longer than one over PCIe and better), so labels are corrected until nothing improves. A label keeps the one it was made from: a way stays what it was when it was found. */
#include <stdlib.h>
#include <string.h>

#include "topo/build.h"
#include "topo/paths.h"

#define MAX_ENDS 1024               /* 40 MB a set of paths */
#define BLOCK_LABELS 4096

struct label {
	const struct label *before;
	double bw;
	int32_t link, hops, type;
};

struct tp_paths_block { struct tp_paths_block *next; size_t used, room; int32_t links[]; };

struct search {
	const struct tp_topo *topo;
	const struct tp_topo_policy *policy;
	int32_t base;
	const struct label **best;      /* [node]; NULL: not reached */
	int32_t *queue, *next;
	bool *queued;
	struct label *labels;           /* given out one after the other */
	size_t used, room;
};

int32_t *tp_paths_keep(struct tp_topo *topo, int32_t nhops)
{
	struct tp_topo_internal *in = topo->internal;
	if (!in->blocks || in->blocks->room - in->blocks->used < (size_t)nhops) {
		size_t room = TP_MAX((size_t)nhops, (size_t)BLOCK_LABELS);
		struct tp_paths_block *block = tp_alloc(1, sizeof(*block) + room * sizeof(block->links[0]), "paths");
		if (!block) return NULL;
		block->room = room;
		block->next = in->blocks;
		in->blocks = block;
	}
	int32_t *links = in->blocks->links + in->blocks->used;
	in->blocks->used += (size_t)nhops;
	return links;
}

void tp_topo_forget_paths(struct tp_topo *topo)
{
	struct tp_topo_internal *in = topo->internal;
	for (struct tp_paths_block *block = in->blocks, *next; block; block = next) {
		next = block->next;
		free(block);
	}
	free(in->wire);
	free(in->used);
	free(in->end_of);
	free(in->ends);
	*in = (struct tp_topo_internal){ .no_peer = in->no_peer, .nno_peer = in->nno_peer };
}

static int type_of_link(const struct tp_topo *topo, const struct tp_topo_link *link)
{
	enum tp_topo_kind from = topo->nodes[link->from].kind, to = topo->nodes[link->to].kind;
	if (from == TP_TOPO_PCI && to == TP_TOPO_PCI) return TP_PATH_PXB;
	switch (link->kind) {
	case TP_WIRE_NVL: return TP_PATH_NVL;
	case TP_WIRE_C2C: return TP_PATH_C2C;
	case TP_WIRE_PCI: return from == TP_TOPO_CPU || to == TP_TOPO_CPU ? TP_PATH_PHB : TP_PATH_PIX;
	case TP_WIRE_SYS: return TP_PATH_SYS;
	default: return TP_PATH_LOC;
	}
}

/* GPUs forward nothing but what another GPU sends over NVLink, and that one step only. */
static bool may_pass(const struct search *s, const struct label *at, const struct tp_topo_link *link)
{
	if (link->from == s->base || s->topo->nodes[link->from].kind != TP_TOPO_GPU) return true;
	return s->policy->nvb && link->kind == TP_WIRE_NVL && s->topo->nodes[link->to].kind == TP_TOPO_GPU && at->hops <= 1;
}

static bool is_better(const struct label *a, const struct label *than)
{
	if (!than || a->type != than->type) return !than || a->type < than->type;
	if (a->bw != than->bw) return a->bw > than->bw;
	return a->hops < than->hops;
}

/* The label at the far end of link, from which the link back leads to `at`. */
static struct label step(const struct search *s, const struct label *at, int32_t l)
{
	const struct tp_topo_link *link = &s->topo->links[l], *back = &s->topo->links[link->reverse];
	int type = type_of_link(s->topo, link);
	bool relayed = s->topo->nodes[link->from].kind == TP_TOPO_GPU && at->type == TP_PATH_NVL && type == TP_PATH_NVL && at->hops == 1;
	if (relayed) type = TP_PATH_NVB;
	return (struct label){ .before = at, .bw = TP_MIN(at->bw, back->bw), .link = link->reverse, .hops = at->hops + 1, .type = TP_MAX(at->type, type) };
}

static void search_to(struct search *s)
{
	const struct tp_topo *topo = s->topo;
	int32_t count = 1;
	s->used = 0;
	memset(s->best, 0, (size_t)topo->nnodes * sizeof(*s->best));
	s->labels[s->used] = (struct label){ .bw = tp_topo_constant("local"), .link = -1, .type = TP_PATH_LOC };
	s->best[s->base] = &s->labels[s->used++];
	s->queue[0] = s->base;
	while (count) {
		int32_t found = 0;
		for (int32_t q = 0; q < count; q++) {
			const struct tp_topo_node *node = &topo->nodes[s->queue[q]];
			const struct label *at = s->best[node->index];
			for (int32_t l = node->first_link; l < node->first_link + node->nlinks; l++) {
				int32_t to = topo->links[l].to;
				int32_t back = topo->links[l].reverse;
				if (back < 0 || topo->links[back].bw <= 0 || !may_pass(s, at, &topo->links[l])) continue;
				struct label label = step(s, at, l);
				/* The room is far more than any machine needs: only a file made to exhaust it gets there. */
				if (!is_better(&label, s->best[to]) || s->used == s->room) continue;
				s->labels[s->used] = label;
				s->best[to] = &s->labels[s->used++];
				if (!s->queued[to]) s->next[found++] = to;
				s->queued[to] = true;
			}
		}
		int32_t *swap = s->queue;
		s->queue = s->next;
		s->next = swap;
		count = found;
		for (int32_t q = 0; q < count; q++) s->queued[s->queue[q]] = false;
	}
}

int32_t tp_paths_limit(const struct tp_topo *topo, const int32_t *links, int32_t nhops)
{
	int32_t limit = -1;
	for (int32_t i = 0; i < nhops; i++)
		if (limit < 0 || topo->links[links[i]].bw < topo->links[links[limit]].bw) limit = i;
	return limit;
}

static ncclResult_t keep_path(struct tp_topo *topo, const struct label *label, struct tp_topo_path *out)
{
	*out = (struct tp_topo_path){ .type = TP_PATH_DIS, .limit = -1 };
	if (!label) return ncclSuccess;
	int32_t *links = tp_paths_keep(topo, label->hops);
	if (!links) return ncclSystemError;
	int32_t at = 0;
	for (const struct label *l = label; l->before; l = l->before) links[at++] = l->link;
	*out = (struct tp_topo_path){ .type = (enum tp_topo_path_type)label->type, .bw = label->bw, .nhops = label->hops, .links = links,
		.limit = tp_paths_limit(topo, links, label->hops) };
	return ncclSuccess;
}

static ncclResult_t choose_ends(struct tp_topo *topo)
{
	static const enum tp_topo_kind kinds[] = { TP_TOPO_GPU, TP_TOPO_NET, TP_TOPO_CPU, TP_TOPO_NVS };
	struct tp_topo_internal *in = topo->internal;
	int32_t nends = 0;
	for (size_t k = 0; k < TP_ARRAY_LEN(kinds); k++) nends += topo->count[kinds[k]];
	if (nends > MAX_ENDS)
		return TP_FAIL(ncclInvalidUsage, "%d GPUs, network ports, CPUs and switches in one description: paths are computed for at most %d; "
			"describe one host and repeat it", nends, MAX_ENDS);
	size_t n = (size_t)TP_MAX(nends, 1);
	in->end_of = tp_alloc((size_t)topo->nnodes, sizeof(*in->end_of), "paths");
	in->ends = tp_alloc(n, sizeof(*in->ends), "paths");
	in->wire = tp_alloc(n * n, sizeof(*in->wire), "paths");
	in->used = tp_alloc(n * n, sizeof(*in->used), "paths");
	if (!in->end_of || !in->ends || !in->wire || !in->used) return ncclSystemError;
	for (int32_t i = 0; i < topo->nnodes; i++) in->end_of[i] = -1;
	for (size_t k = 0; k < TP_ARRAY_LEN(kinds); k++) {
		for (int32_t i = 0; i < topo->count[kinds[k]]; i++) {
			in->end_of[topo->of_kind[kinds[k]][i]] = in->nends;
			in->ends[in->nends++] = topo->of_kind[kinds[k]][i];
		}
	}
	return ncclSuccess;
}

static ncclResult_t find_wire_paths(struct tp_topo *topo, const struct tp_topo_policy *policy)
{
	struct tp_topo_internal *in = topo->internal;
	size_t n = (size_t)topo->nnodes;
	struct search s = { .topo = topo, .policy = policy, .room = 16 * n + 4096 };
	s.best = tp_alloc(n, sizeof(*s.best), "paths");
	s.queue = tp_alloc(n, sizeof(*s.queue), "paths");
	s.next = tp_alloc(n, sizeof(*s.next), "paths");
	s.queued = tp_alloc(n, sizeof(*s.queued), "paths");
	s.labels = tp_alloc(s.room, sizeof(*s.labels), "paths");
	ncclResult_t result = s.best && s.queue && s.next && s.queued && s.labels ? ncclSuccess : ncclSystemError;
	for (int32_t e = 0; e < in->nends && result == ncclSuccess; e++) {
		s.base = in->ends[e];
		search_to(&s);
		for (int32_t f = 0; f < in->nends && result == ncclSuccess; f++)
			result = keep_path(topo, s.best[in->ends[f]], &in->wire[f * in->nends + e]);
	}
	free(s.best);
	free(s.queue);
	free(s.next);
	free(s.queued);
	free(s.labels);
	return result;
}

ncclResult_t tp_topo_compute_paths(struct tp_topo *topo, const struct tp_topo_policy *policy)
{
	tp_topo_forget_paths(topo);
	ncclResult_t result = choose_ends(topo);
	if (result == ncclSuccess) result = find_wire_paths(topo, policy);
	if (result == ncclSuccess) {
		size_t n = (size_t)topo->internal->nends;
		memcpy(topo->internal->used, topo->internal->wire, n * n * sizeof(*topo->internal->used));
		result = tp_paths_apply(topo, policy);
	}
	if (result != ncclSuccess) tp_topo_forget_paths(topo);
	return result;
}

static const struct tp_topo_path none = { .type = TP_PATH_DIS, .limit = -1 };

static const struct tp_topo_path *find(const struct tp_topo *topo, const struct tp_topo_path *set, int32_t from, int32_t to)
{
	const struct tp_topo_internal *in = topo->internal;
	if (!set || from < 0 || to < 0 || in->end_of[from] < 0 || in->end_of[to] < 0) return &none;
	return &set[in->end_of[from] * in->nends + in->end_of[to]];
}

const struct tp_topo_path *tp_topo_path(const struct tp_topo *topo, int32_t from, int32_t to)
{
	return find(topo, topo->internal->used, from, to);
}

const struct tp_topo_path *tp_topo_wire_path(const struct tp_topo *topo, int32_t from, int32_t to)
{
	return find(topo, topo->internal->wire, from, to);
}

/* From what was collected to the graph: two-level switches that are one made one, links in order, names, numbers, host ranks. */
#include <stdlib.h>
#include <string.h>

#include "topo/build.h"

/* Broadcom's PCIe switches show two levels of bridges although every port has the full bandwidth to every other: taken for two
 * switches they would look like a bottleneck. 0: none of them; else their PCIe generation. */
static int broadcom_generation(const struct tp_topo_pci *pci, int level)
{
	uint64_t id = (uint64_t)pci->vendor << 48 | (uint64_t)(pci->device & 0xffff) << 32 | (uint64_t)(pci->subsystem_vendor & 0xffff) << 16 |
		(pci->subsystem_device & 0xffff);
	if ((id & ~0xfffull) == 0x1000c0101000a000ull) return 4;
	return (id & ~0xfffull) == (0x1000c03010000000ull | (uint64_t)level * 0x1000) ? 5 : 0;
}

/* What hangs on `sub` moves to `above`; sub keeps no link. */
static void absorb(struct tp_topo *topo, int32_t above, int32_t sub)
{
	for (int32_t i = 0; i < topo->nlinks; i++) {
		struct tp_topo_link *link = &topo->links[i];
		if ((link->from == above && link->to == sub) || (link->from == sub && link->to == above)) link->count = -1;
		if (link->from == sub) link->from = above;
		if (link->to == sub) link->to = above;
	}
	int32_t kept = 0;
	for (int32_t i = 0; i < topo->nlinks; i++)
		if (topo->links[i].count != -1) topo->links[kept++] = topo->links[i];
	topo->nlinks = kept;
	for (int32_t i = 0; i < topo->nnodes; i++)
		if (topo->nodes[i].parent == sub) topo->nodes[i].parent = above;
}

static ncclResult_t flatten_switches(struct tp_topo *topo, bool *gone)
{
	for (int32_t s = 0; s < topo->nnodes; s++) {
		int generation = topo->nodes[s].kind == TP_TOPO_PCI && !gone[s] ? broadcom_generation(&topo->nodes[s].pci, 0) : 0;
		if (!generation) continue;
		/* Only one level is merged: what was below the absorbed ones is not looked at again. */
		int32_t end = topo->nnodes;
		bool *below = tp_alloc((size_t)end, sizeof(*below), "the switches of the machine");
		if (!below) return ncclSystemError;
		for (int32_t i = 0; i < end; i++)
			below[i] = topo->nodes[i].kind == TP_TOPO_PCI && !gone[i] && topo->nodes[i].parent == s &&
				broadcom_generation(&topo->nodes[i].pci, 1) == generation;
		for (int32_t i = 0; i < end; i++) {
			if (!below[i]) continue;
			absorb(topo, s, i);
			gone[i] = true;
		}
		free(below);
	}
	return ncclSuccess;
}

static ncclResult_t drop_gone(struct tp_builder *b, const bool *gone)
{
	struct tp_topo *topo = b->topo;
	int32_t *place = tp_alloc((size_t)topo->nnodes, sizeof(*place), "the graph of the machine"), kept = 0;
	if (!place) return ncclSystemError;
	for (int32_t i = 0; i < topo->nnodes; i++) {
		place[i] = gone[i] ? -1 : kept;
		if (gone[i]) continue;
		topo->nodes[kept] = topo->nodes[i];
		b->element[kept] = b->element[i];
		topo->nodes[kept].index = kept;
		kept++;
	}
	topo->nnodes = kept;
	for (int32_t i = 0; i < kept; i++) {
		struct tp_topo_node *node = &topo->nodes[i];
		if (node->parent >= 0) node->parent = place[node->parent];
		if (node->near_cpu >= 0) node->near_cpu = place[node->near_cpu];
	}
	for (int32_t i = 0; i < topo->nlinks; i++) {
		topo->links[i].from = place[topo->links[i].from];
		topo->links[i].to = place[topo->links[i].to];
	}
	free(place);
	return ncclSuccess;
}

/* qsort has no argument: what it needs is in the link itself while it sorts. */
struct sorted { struct tp_topo_link link; int32_t order, place; };

static int by_use(const void *a, const void *b)
{
	const struct sorted *x = a, *y = b;
	if (x->link.from != y->link.from) return x->link.from - y->link.from;
	if (x->order != y->order) return x->order - y->order;
	if (x->link.bw != y->link.bw) return x->link.bw > y->link.bw ? -1 : 1;
	return x->place - y->place;
}

static int32_t order_of(const struct tp_topo *topo, const struct tp_topo_link *link)
{
	switch (link->kind) {
	case TP_WIRE_NVL: return 0;
	case TP_WIRE_C2C: return 1;
	case TP_WIRE_SYS: return 4;
	default: return topo->nodes[link->from].parent == link->to ? 3 : 2;
	}
}

static ncclResult_t sort_links(struct tp_topo *topo)
{
	struct sorted *list = tp_alloc((size_t)topo->nlinks + 1, sizeof(*list), "the links of the machine");
	if (!list) return ncclSystemError;
	for (int32_t i = 0; i < topo->nlinks; i++)
		list[i] = (struct sorted){ topo->links[i], order_of(topo, &topo->links[i]), i };
	qsort(list, (size_t)topo->nlinks, sizeof(*list), by_use);
	for (int32_t i = 0; i < topo->nlinks; i++) {
		struct tp_topo_node *from = &topo->nodes[list[i].link.from];
		topo->links[i] = list[i].link;
		if (from->first_link < 0) from->first_link = i;
		from->nlinks++;
	}
	free(list);
	for (int32_t i = 0; i < topo->nnodes; i++)
		if (topo->nodes[i].first_link < 0) topo->nodes[i].first_link = 0;
	for (int32_t i = 0; i < topo->nlinks; i++) {
		struct tp_topo_link *link = &topo->links[i];
		const struct tp_topo_node *to = &topo->nodes[link->to];
		for (int32_t j = to->first_link; j < to->first_link + to->nlinks; j++)
			if (topo->links[j].to == link->from && topo->links[j].kind == link->kind) link->reverse = j;
	}
	return ncclSuccess;
}

static void name_node(const struct tp_topo *topo, const struct tp_element *e, struct tp_topo_node *node)
{
	char host[16] = "";
	const char *name = e && node->kind == TP_TOPO_NET ? tp_element_get(e, "name") : NULL;
	if (topo->nhosts > 1 && node->kind != TP_TOPO_NVS) snprintf(host, sizeof(host), "h%d/", node->host);
	switch (node->kind) {
	case TP_TOPO_GPU:
		if (node->gpu.part >= 0) snprintf(node->name, sizeof(node->name), "%sGPU %d.%d", host, node->gpu.dev, node->gpu.part);
		else snprintf(node->name, sizeof(node->name), "%sGPU %d", host, node->gpu.dev);
		break;
	case TP_TOPO_CPU: snprintf(node->name, sizeof(node->name), "%sCPU %d", host, node->cpu.numa); break;
	case TP_TOPO_NVS: snprintf(node->name, sizeof(node->name), "NVSwitch"); break;
	case TP_TOPO_PCI: snprintf(node->name, sizeof(node->name), "%sPCI %s", host, node->pci.bus_id); break;
	case TP_TOPO_NIC: snprintf(node->name, sizeof(node->name), "%sNIC %s", host, node->pci.bus_id[0] ? node->pci.bus_id : "virtual"); break;
	case TP_TOPO_NET:
		if (name && node->net.port > 1) snprintf(node->name, sizeof(node->name), "%s%.40s:%d", host, name, node->net.port);
		else if (name) snprintf(node->name, sizeof(node->name), "%s%.40s", host, name);
		else snprintf(node->name, sizeof(node->name), "%sNET %d", host, node->net.dev);
		break;
	default: break;
	}
}

static int number_of(const struct tp_topo_node *node)
{
	switch (node->kind) {
	case TP_TOPO_GPU: return node->gpu.rank >= 0 ? node->gpu.rank : (1 << 25) + node->gpu.dev;
	case TP_TOPO_NET: return node->net.dev;
	case TP_TOPO_CPU: return node->cpu.numa;
	default: return 0;
	}
}

/* GPUs by rank, else by number; ports and CPUs by number; hosts in turn; else as the description has them. */
static bool comes_before(const struct tp_topo_node *a, const struct tp_topo_node *b)
{
	bool ranks = a->kind == TP_TOPO_GPU && a->gpu.rank >= 0 && b->gpu.rank >= 0;
	if (!ranks && a->host != b->host) return a->host < b->host;
	if (number_of(a) != number_of(b)) return number_of(a) < number_of(b);
	return a->index < b->index;
}

static ncclResult_t number_nodes(struct tp_topo *topo)
{
	for (int k = 0; k < TP_TOPO_KINDS; k++) {
		int32_t *list = tp_alloc((size_t)topo->nnodes + 1, sizeof(*list), "the nodes of the machine"), count = 0;
		if (!list) return ncclSystemError;
		for (int32_t i = 0; i < topo->nnodes; i++) {
			const struct tp_topo_node *node = &topo->nodes[i];
			int32_t at = count;
			if ((int)node->kind != k) continue;
			for (; at > 0 && comes_before(node, &topo->nodes[list[at - 1]]); at--) list[at] = list[at - 1];
			list[at] = i;
			count++;
		}
		for (int32_t i = 0; i < count; i++) topo->nodes[list[i]].ordinal = i;
		topo->of_kind[k] = list;
		topo->count[k] = count;
	}
	return ncclSuccess;
}

static int bits_in_both(const uint64_t *a, const uint64_t *b)
{
	int bits = 0;
	for (int w = 0; w < TP_CPU_WORDS; w++) bits += __builtin_popcountll(a[w] & b[w]);
	return bits;
}

static bool holds_all(const uint64_t *outer, const uint64_t *inner)
{
	for (int w = 0; w < TP_CPU_WORDS; w++)
		if (inner[w] & ~outer[w]) return false;
	return true;
}

static const uint64_t *mask_of(const struct tp_topo_node *node)
{
	return node->kind == TP_TOPO_CPU ? node->cpu.mask : node->kind == TP_TOPO_CACHE ? node->cache.mask :
		node->kind == TP_TOPO_CORE ? node->core.mask : NULL;
}

static void place_host_rank(const struct tp_topo *topo, struct tp_topo_host_rank *rank)
{
	static const uint64_t none[TP_CPU_WORDS];
	int best = -1, smallest = INT32_MAX;
	bool anywhere = memcmp(rank->mask, none, sizeof(none)) == 0;
	rank->node = rank->cpu = -1;
	for (int32_t i = 0; i < topo->nnodes; i++) {
		const struct tp_topo_node *node = &topo->nodes[i];
		const uint64_t *mask = mask_of(node);
		if (!mask || node->host != rank->host) continue;
		int size = bits_in_both(mask, mask), common = bits_in_both(mask, rank->mask);
		if (node->kind == TP_TOPO_CPU && common > best) {
			best = common;
			rank->cpu = i;
		}
		if (!anywhere && size < smallest && holds_all(mask, rank->mask)) {
			smallest = size;
			rank->node = i;
		}
	}
}

#define MAX_PLACINGS (INT64_C(1) << 22)     /* looks at a node for a rank */

static ncclResult_t add_host_ranks(struct tp_builder *b)
{
	struct tp_topo *topo = b->topo;
	int32_t host = 0, room = 0;
	uint64_t hash;
	for (const struct tp_element *e = b->doc->root; e; e = tp_doc_walk(b->doc, e)) {
		int64_t rank;
		if (strcmp(e->name, "hostrank") != 0) continue;
		if (topo->nhost_ranks == room) {
			room = room ? room * 2 : 16;
			void *list = realloc(topo->host_ranks, (size_t)room * sizeof(*topo->host_ranks));
			if (!list) return TP_FAIL(ncclSystemError, "%s: no memory for %d host ranks", b->doc->name, room);
			topo->host_ranks = list;
		}
		if ((int64_t)(topo->nhost_ranks + 1) * topo->nnodes > MAX_PLACINGS)
			return TP_FAIL(ncclInvalidUsage, "%s:%d: more than %d host ranks among %d nodes, which no machine has", b->doc->name, e->line,
				(int)topo->nhost_ranks, (int)topo->nnodes);
		struct tp_topo_host_rank *r = &topo->host_ranks[topo->nhost_ranks];
		TP_TRY(tp_element_hex(b->doc, strcmp(e->parent->name, "cpu") == 0 ? e->parent : e, "host_hash", 0, &hash));
		for (host = 0; host < topo->nhosts - 1 && topo->host_hash[host] != hash; host++) ;
		TP_TRY(tp_element_int(b->doc, e, "rank", 0, 1 << 24, 0, &rank));
		*r = (struct tp_topo_host_rank){ .rank = (int32_t)rank, .host = host };
		TP_TRY(tp_element_mask(b->doc, e, "affinity", r->mask));
		place_host_rank(topo, r);
		topo->nhost_ranks++;
	}
	return ncclSuccess;
}

#define MAX_FORBIDDEN 4096

/* <nopeer target>: what the driver said of two GPUs. */
static ncclResult_t add_forbidden(struct tp_builder *b)
{
	struct tp_topo *topo = b->topo;
	struct tp_topo_internal *in = topo->internal;
	for (int32_t g = 0; g < topo->count[TP_TOPO_GPU]; g++) {
		int32_t gpu = topo->of_kind[TP_TOPO_GPU][g];
		for (const struct tp_element *e = b->element[gpu]->first; e; e = e->next) {
			int64_t bus;
			if (strcmp(e->name, "nopeer") != 0 || !tp_bus_id_parse(tp_element_get(e, "target"), &bus)) continue;
			int32_t peer = tp_build_find_bus(b, TP_TOPO_GPU, topo->nodes[gpu].host, bus);
			if (peer < 0) continue;
			if (in->nno_peer == MAX_FORBIDDEN) return TP_FAIL(ncclInvalidUsage, "%s:%d: more than %d <nopeer>", b->doc->name, e->line, MAX_FORBIDDEN);
			void *list = realloc(in->no_peer, (size_t)(in->nno_peer + 1) * sizeof(*in->no_peer));
			if (!list) return TP_FAIL(ncclSystemError, "%s: no memory for what the driver forbids", b->doc->name);
			in->no_peer = list;
			in->no_peer[in->nno_peer][0] = gpu;
			in->no_peer[in->nno_peer++][1] = peer;
		}
	}
	return ncclSuccess;
}

ncclResult_t tp_build_finish(struct tp_builder *b)
{
	struct tp_topo *topo = b->topo;
	bool *gone = tp_alloc((size_t)topo->nnodes + 1, sizeof(*gone), "the graph of the machine");
	if (!gone) return ncclSystemError;
	ncclResult_t result = flatten_switches(topo, gone);
	if (result == ncclSuccess) result = drop_gone(b, gone);
	free(gone);
	TP_TRY(result);
	TP_TRY(sort_links(topo));
	TP_TRY(number_nodes(topo));
	for (int32_t i = 0; i < topo->nnodes; i++) {
		struct tp_topo_node *node = &topo->nodes[i];
		name_node(topo, b->element[i], node);
		if (node->kind == TP_TOPO_CACHE) snprintf(node->name, sizeof(node->name), "L%d cache %d", node->cache.level, node->ordinal);
		if (node->kind == TP_TOPO_CORE) snprintf(node->name, sizeof(node->name), "core %d", node->ordinal);
	}
	TP_TRY(add_forbidden(b));
	return add_host_ranks(b);
}

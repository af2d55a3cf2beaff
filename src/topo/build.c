/* The graph from a description: first the tree (hosts, CPUs, bridges, GPUs, NICs, ports), then what crosses it. */
#include <stdlib.h>
#include <string.h>

#include "topo/build.h"

struct tp_topo_node *tp_build_node(struct tp_builder *b, enum tp_topo_kind kind, const struct tp_element *element, int32_t host, int32_t parent,
	int32_t near_cpu)
{
	struct tp_topo *topo = b->topo;
	if (topo->nnodes == TP_TOPO_MAX_NODES) {
		TP_WARN("%s:%d: more than %d nodes", b->doc->name, element ? element->line : 0, TP_TOPO_MAX_NODES);
		return NULL;
	}
	if (topo->nnodes == b->node_room) {
		int32_t room = b->node_room ? b->node_room * 2 : 64;
		void *nodes = realloc(topo->nodes, (size_t)room * sizeof(*topo->nodes));
		if (nodes) topo->nodes = nodes;
		void *elements = realloc(b->element, (size_t)room * sizeof(*b->element));
		if (elements) b->element = elements;
		void *domains = realloc(b->domain, (size_t)room * sizeof(*b->domain));
		if (domains) b->domain = domains;
		if (!nodes || !elements || !domains) {
			TP_WARN("%s: no memory for %d nodes", b->doc->name, room);
			return NULL;
		}
		b->node_room = room;
	}
	struct tp_topo_node *node = &topo->nodes[topo->nnodes];
	memset(node, 0, sizeof(*node));
	b->element[topo->nnodes] = element;
	b->domain[topo->nnodes][0] = 0;
	*node = (struct tp_topo_node){ .kind = kind, .index = topo->nnodes, .host = host, .parent = parent, .near_cpu = near_cpu, .first_link = -1 };
	node->pci.acs = node->pci.iommu_group = -1;
	topo->nnodes++;
	return node;
}

ncclResult_t tp_build_link(struct tp_builder *b, int32_t from, int32_t to, enum tp_topo_link_kind kind, int count, double bw, double full_bw)
{
	struct tp_topo *topo = b->topo;
	/* Links of one node are added together, so the one that is there is among the last; a bound keeps hostile files cheap. */
	for (int32_t i = topo->nlinks - 1; i >= 0 && i >= topo->nlinks - 1024; i--) {
		struct tp_topo_link *link = &topo->links[i];
		if (link->from != from || link->to != to || link->kind != kind) continue;
		link->count += count;
		link->bw += bw;
		link->full_bw += full_bw;
		return ncclSuccess;
	}
	if (topo->nlinks == TP_TOPO_MAX_LINKS) return TP_FAIL(ncclInvalidUsage, "%s: more than %d links", b->doc->name, TP_TOPO_MAX_LINKS);
	if (topo->nlinks == b->link_room) {
		int32_t room = b->link_room ? b->link_room * 2 : 128;
		void *links = realloc(topo->links, (size_t)room * sizeof(*topo->links));
		if (!links) return TP_FAIL(ncclSystemError, "%s: no memory for %d links", b->doc->name, room);
		topo->links = links;
		b->link_room = room;
	}
	topo->links[topo->nlinks++] = (struct tp_topo_link){ .from = from, .to = to, .reverse = -1, .kind = kind, .count = count, .bw = bw,
		.full_bw = full_bw };
	return ncclSuccess;
}

ncclResult_t tp_build_link_both(struct tp_builder *b, int32_t a, int32_t c, enum tp_topo_link_kind kind, int count, double bw, double full_bw)
{
	TP_TRY(tp_build_link(b, a, c, kind, count, bw, full_bw));
	return tp_build_link(b, c, a, kind, count, bw, full_bw);
}

int32_t tp_build_find_bus(const struct tp_builder *b, enum tp_topo_kind kind, int32_t host, int64_t bus)
{
	for (int32_t i = 0; i < b->topo->nnodes; i++) {
		const struct tp_topo_node *node = &b->topo->nodes[i];
		if (node->kind == kind && node->host == host && node->pci.bus == bus) return i;
	}
	return -1;
}

ncclResult_t tp_topo_build(const struct tp_topo_doc *doc, struct tp_topo **out)
{
	struct tp_builder b = { .doc = doc };
	if (strcmp(doc->root->name, "system") != 0)
		return TP_FAIL(ncclInvalidUsage, "%s: <%.40s> describes no machine", doc->name, doc->root->name);
	b.topo = tp_alloc(1, sizeof(*b.topo), "the graph of the machine");
	if (!b.topo) return ncclSystemError;
	b.topo->internal = tp_alloc(1, sizeof(*b.topo->internal), "the graph of the machine");
	const char *guest = tp_element_get(doc->root, "virtual");
	snprintf(b.topo->virtual_machine, sizeof(b.topo->virtual_machine), "%s", guest ? guest : "");
	ncclResult_t result = b.topo->internal ? tp_build_add_nodes(&b) : ncclSystemError;
	if (result == ncclSuccess) result = tp_build_add_links(&b);
	if (result == ncclSuccess) result = tp_build_finish(&b);
	free(b.element);
	free(b.domain);
	if (result != ncclSuccess) tp_topo_free(b.topo);
	else *out = b.topo;
	return result;
}

void tp_topo_free(struct tp_topo *topo)
{
	if (!topo) return;
	if (topo->internal) {
		tp_topo_forget_paths(topo);
		free(topo->internal->no_peer);
	}
	free(topo->internal);
	for (int k = 0; k < TP_TOPO_KINDS; k++) free(topo->of_kind[k]);
	free(topo->nodes);
	free(topo->links);
	free(topo->host_hash);
	free(topo->host_ranks);
	free(topo);
}

int32_t tp_topo_find_rank(const struct tp_topo *topo, int rank)
{
	for (int32_t i = 0; i < topo->count[TP_TOPO_GPU]; i++) {
		const struct tp_topo_node *gpu = tp_topo_node_of(topo, TP_TOPO_GPU, i);
		if (gpu->gpu.rank == rank && rank >= 0) return gpu->index;
	}
	for (int32_t i = 0; i < topo->nhost_ranks; i++)
		if (topo->host_ranks[i].rank == rank) return topo->host_ranks[i].node >= 0 ? topo->host_ranks[i].node : topo->host_ranks[i].cpu;
	return -1;
}

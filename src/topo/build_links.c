/* What crosses the tree: NVLink and xGMI, C2C, links inside a PCIe switch, and those between CPUs. */
#include <stdlib.h>
#include <string.h>

#include "topo/build.h"

double tp_topo_xgmi_bw(const char *gcn)
{
	const char *digits = gcn + strcspn(gcn, "0123456789");
	if (strncmp(digits, "90a", 3) == 0 || strncmp(digits, "910", 3) == 0) return tp_topo_constant("xgmi.mi200");
	if (strncmp(digits, "94", 2) == 0 || strncmp(digits, "95", 2) == 0) return tp_topo_constant("xgmi.mi300");
	return tp_topo_constant("xgmi");
}

enum target { TARGET_GPU, TARGET_SWITCH, TARGET_CPU };

static enum target target_of(const struct tp_element *e)
{
	const char *class = tp_element_get(e, "tclass"), *bus = tp_element_get(e, "target");
	if (class && strncmp(class, "0x03", 4) == 0) return TARGET_GPU;
	if (class && strncmp(class, "0x12", 4) == 0) return TARGET_GPU;
	if (class && strncmp(class, "0x068001", 8) == 0) return TARGET_CPU;
	if (class && strncmp(class, "0x068", 5) == 0) return TARGET_SWITCH;
	return strncmp(bus, "fffffff", 7) == 0 ? TARGET_SWITCH : TARGET_GPU;
}

/* One node for all switches of an NVLink domain: the one that the GPU names (ours always do), else the whole file is one: NCCL puts several
 * hosts into a file only where they are one domain. */
static ncclResult_t find_switch(struct tp_builder *b, const struct tp_element *gpu, int32_t host, int32_t *out)
{
	const char *domain = tp_element_get(gpu, "nvldomain");
	if (!domain) domain = "";
	for (int32_t i = 0; i < b->topo->nnodes; i++) {
		if (b->topo->nodes[i].kind != TP_TOPO_NVS || strncmp(b->domain[i], domain, TP_TOPO_NAME_BYTES - 1) != 0) continue;
		*out = i;
		return ncclSuccess;
	}
	struct tp_topo_node *node = tp_build_node(b, TP_TOPO_NVS, NULL, host, -1, -1);
	if (!node) return ncclSystemError;
	snprintf(b->domain[node->index], TP_TOPO_NAME_BYTES, "%s", domain);
	*out = node->index;
	return ncclSuccess;
}

static int32_t find_gpus(struct tp_builder *b, int32_t host, int64_t bus, int32_t *gpus, int32_t max)
{
	int32_t count = 0;
	b->looks += b->topo->nnodes;
	for (int32_t i = 0; i < b->topo->nnodes && count < max; i++) {
		const struct tp_topo_node *node = &b->topo->nodes[i];
		if (node->kind == TP_TOPO_GPU && node->host == host && node->pci.bus == bus) gpus[count++] = i;
	}
	return count;
}

static ncclResult_t add_nvlink(struct tp_builder *b, int32_t gpu, const struct tp_element *gpu_element, const struct tp_element *e)
{
	const struct tp_topo_node node = b->topo->nodes[gpu];
	int64_t count, bus;
	int32_t partitions[TP_TOPO_MAX_PARTS], targets[TP_TOPO_MAX_PARTS], to;
	TP_TRY(tp_element_int(b->doc, e, "count", 0, 1024, 1, &count));
	bool xgmi = strcmp(e->name, "xgmi") == 0;
	int32_t sharing = find_gpus(b, node.host, node.pci.bus, partitions, TP_TOPO_MAX_PARTS);
	double bw = (double)count * (xgmi ? tp_topo_xgmi_bw(node.gpu.gcn) : tp_topo_nvlink_bw(node.gpu.sm)) / TP_MAX(sharing, 1);
	/* Links that are all down carry nothing: no link. The faults say so. */
	if (count == 0) return ncclSuccess;
	b->topo->nodes[gpu].gpu.nvlinks += (int)count;
	switch (target_of(e)) {
	case TARGET_CPU:
		return tp_build_link_both(b, gpu, node.near_cpu, TP_WIRE_NVL, (int)count, bw, bw);
	case TARGET_SWITCH:
		TP_TRY(find_switch(b, gpu_element, node.host, &to));
		return tp_build_link_both(b, gpu, to, TP_WIRE_NVL, (int)count, bw, bw);
	case TARGET_GPU:
		break;
	}
	tp_bus_id_parse(tp_element_get(e, "target"), &bus);
	if (bus == node.pci.bus) {
		char where[TP_WHERE_BYTES];
		TP_WARN("%s leads from a GPU to itself: left out", tp_element_where(b->doc, e, where));
		return ncclSuccess;
	}
	/* A GPU that is not among ours is another's: its links aren't used here. */
	int32_t ntargets = find_gpus(b, node.host, bus, targets, TP_TOPO_MAX_PARTS);
	for (int32_t i = 0; i < ntargets; i++)
		TP_TRY(tp_build_link(b, gpu, targets[i], TP_WIRE_NVL, (int)count, bw / ntargets, bw / ntargets));
	return ncclSuccess;
}

static ncclResult_t add_c2c(struct tp_builder *b, int32_t gpu, const struct tp_element *e)
{
	int64_t count, bw;
	int32_t cpu = b->topo->nodes[gpu].near_cpu;
	TP_TRY(tp_element_int(b->doc, e, "count", 0, 1024, 0, &count));
	TP_TRY(tp_element_int(b->doc, e, "bw", 0, 100000000, 0, &bw));
	if (count == 0 || bw == 0) return ncclSuccess;
	/* As NVLink: each partition says what the whole GPU has. */
	int32_t partitions[TP_TOPO_MAX_PARTS], sharing = find_gpus(b, b->topo->nodes[gpu].host, b->topo->nodes[gpu].pci.bus, partitions, TP_TOPO_MAX_PARTS);
	double all = (double)(count * bw) / 1000 / TP_MAX(sharing, 1);
	return tp_build_link_both(b, gpu, cpu, TP_WIRE_C2C, (int)count, all, all);
}

static ncclResult_t add_pcilinks(struct tp_builder *b, int32_t pci, const struct tp_element *e)
{
	double local = tp_topo_constant("local");
	for (const struct tp_element *c = e->first; c; c = c->next) {
		int64_t bus;
		if (strcmp(c->name, "pcilink") != 0) continue;
		tp_bus_id_parse(tp_element_get(c, "target"), &bus);
		b->looks += b->topo->nnodes;
		int32_t to = tp_build_find_bus(b, TP_TOPO_PCI, b->topo->nodes[pci].host, bus);
		if (to >= 0 && to != pci) TP_TRY(tp_build_link_both(b, pci, to, TP_WIRE_LOCAL, 1, local, local));
	}
	return ncclSuccess;
}

static ncclResult_t join_cpus(struct tp_builder *b)
{
	struct tp_topo *topo = b->topo;
	for (int32_t i = 0; i < topo->nnodes; i++) {
		for (int32_t j = i + 1; j < topo->nnodes; j++) {
			const struct tp_topo_node *x = &topo->nodes[i], *y = &topo->nodes[j];
			if (x->kind != TP_TOPO_CPU || y->kind != TP_TOPO_CPU || x->host != y->host) continue;
			double bw = TP_MIN(x->cpu.inter_bw, y->cpu.inter_bw);
			TP_TRY(tp_build_link_both(b, i, j, TP_WIRE_SYS, 1, bw, bw));
		}
	}
	return ncclSuccess;
}

#define MAX_LOOKS (INT64_C(1) << 28)

ncclResult_t tp_build_add_links(struct tp_builder *b)
{
	for (int32_t i = 0; i < b->topo->nnodes; i++) {
		const struct tp_element *e = b->element[i];
		enum tp_topo_kind kind = b->topo->nodes[i].kind;
		if (b->looks > MAX_LOOKS) return TP_FAIL(ncclInvalidUsage, "%s:%d: more links between more devices than any machine has", b->doc->name, e->line);
		if (kind == TP_TOPO_PCI) TP_TRY(add_pcilinks(b, i, e));
		if (kind != TP_TOPO_GPU) continue;
		for (const struct tp_element *c = e->first; c; c = c->next) {
			if (strcmp(c->name, "nvlink") == 0 || strcmp(c->name, "xgmi") == 0) TP_TRY(add_nvlink(b, i, e, c));
			if (strcmp(c->name, "c2c") == 0) TP_TRY(add_c2c(b, i, c));
		}
	}
	return join_cpus(b);
}

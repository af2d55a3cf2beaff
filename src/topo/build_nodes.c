/* The tree of a description as nodes: a node and its link up for each bridge, GPU and NIC, a node a port. */
#include <stdlib.h>
#include <string.h>

#include "topo/build.h"

#define LARGEST_RANK (1 << 24)

/* Where in the tree the walk is. */
struct place { int32_t host, parent, cpu; };

static ncclResult_t add_host(struct tp_builder *b, const struct tp_element *e, int32_t *out)
{
	struct tp_topo *topo = b->topo;
	uint64_t hash;
	TP_TRY(tp_element_hex(b->doc, e, "host_hash", 0, &hash));
	for (int32_t h = 0; h < topo->nhosts; h++) {
		if (topo->host_hash[h] != hash) continue;
		*out = h;
		return ncclSuccess;
	}
	uint64_t *hashes = realloc(topo->host_hash, (size_t)(topo->nhosts + 1) * sizeof(*hashes));
	if (!hashes) return TP_FAIL(ncclSystemError, "%s: no memory for %d hosts", b->doc->name, topo->nhosts + 1);
	topo->host_hash = hashes;
	hashes[topo->nhosts] = hash;
	*out = topo->nhosts++;
	return ncclSuccess;
}

static ncclResult_t read_pci(const struct tp_builder *b, const struct tp_element *e, struct tp_topo_pci *out)
{
	static const struct { const char *name; size_t offset; } ids[] = {
		{ "class", offsetof(struct tp_topo_pci, class_code) }, { "vendor", offsetof(struct tp_topo_pci, vendor) },
		{ "device", offsetof(struct tp_topo_pci, device) }, { "subsystem_vendor", offsetof(struct tp_topo_pci, subsystem_vendor) },
		{ "subsystem_device", offsetof(struct tp_topo_pci, subsystem_device) },
	};
	int64_t width, max_width, acs, group, mps, mrrs, bar1;
	memset(out, 0, sizeof(*out));
	tp_bus_id_parse(tp_element_get(e, "busid"), &out->bus);
	snprintf(out->bus_id, sizeof(out->bus_id), "%s", tp_element_get(e, "busid"));
	for (size_t i = 0; i < TP_ARRAY_LEN(ids); i++) {
		const char *text = tp_element_get(e, ids[i].name);
		*(uint32_t *)((char *)out + ids[i].offset) = text ? (uint32_t)strtoul(text, NULL, 16) : 0;
	}
	TP_TRY(tp_element_int(b->doc, e, "link_width", -1, 255, 0, &width));
	TP_TRY(tp_element_int(b->doc, e, "max_link_width", -1, 255, 0, &max_width));
	TP_TRY(tp_element_int(b->doc, e, "acs", -1, 1, -1, &acs));
	TP_TRY(tp_element_int(b->doc, e, "iommu_group", -1, INT32_MAX, -1, &group));
	TP_TRY(tp_element_int(b->doc, e, "mps", 0, 65536, 0, &mps));
	TP_TRY(tp_element_int(b->doc, e, "mrrs", 0, 65536, 0, &mrrs));
	TP_TRY(tp_element_int(b->doc, e, "bar1", 0, INT64_MAX, 0, &bar1));
	out->speed = tp_pci_speed_parse(tp_element_get(e, "link_speed"));
	out->max_speed = tp_pci_speed_parse(tp_element_get(e, "max_link_speed"));
	/* Guests without a real link show 63 or 255. */
	out->width = width > 0 && width <= 32 ? (int)width : 0;
	out->max_width = max_width > 0 && max_width <= 32 ? (int)max_width : 0;
	out->acs = (int)acs;
	out->iommu_group = (int)group;
	out->mps = (int)mps;
	out->mrrs = (int)mrrs;
	out->bar1_bytes = bar1;
	return ncclSuccess;
}

static ncclResult_t link_up(struct tp_builder *b, int32_t node, int32_t parent)
{
	const struct tp_topo_pci *pci = &b->topo->nodes[node].pci;
	double bw = tp_topo_pcie_bw(pci->speed, pci->width);
	double full = tp_topo_pcie_bw(TP_MAX(pci->speed, pci->max_speed), TP_MAX(pci->width, pci->max_width));
	return tp_build_link_both(b, node, parent, TP_WIRE_PCI, pci->width, bw, TP_MAX(bw, full));
}

static int count_gpus(const struct tp_element *e)
{
	int count = 0;
	for (const struct tp_element *c = e->first; c; c = c->next) count += strcmp(c->name, "gpu") == 0;
	return count;
}

static ncclResult_t add_gpu(struct tp_builder *b, const struct tp_element *e, const struct tp_topo_pci *pci, struct place at)
{
	int64_t dev, rank, sm, gdr, part;
	TP_TRY(tp_element_int(b->doc, e, "dev", -1, 1 << 20, -1, &dev));
	TP_TRY(tp_element_int(b->doc, e, "rank", -1, LARGEST_RANK, -1, &rank));
	TP_TRY(tp_element_int(b->doc, e, "sm", 0, 100000, 0, &sm));
	TP_TRY(tp_element_int(b->doc, e, "mlopart", -1, 1024, -1, &part));
	TP_TRY(tp_element_int(b->doc, e, "gdr", 0, 255, 0, &gdr));
	struct tp_topo_node *node = tp_build_node(b, TP_TOPO_GPU, e, at.host, at.parent, at.cpu);
	if (!node) return ncclSystemError;
	const char *gcn = tp_element_get(e, "gcn");
	node->pci = *pci;
	node->gpu.dev = (int)dev;
	/* Alone on its device it is no part. */
	node->gpu.part = count_gpus(e->parent) > 1 ? (int)part : -1;
	node->gpu.rank = (int)rank;
	node->gpu.sm = (int)sm;
	node->gpu.gdr = gdr != 0;
	node->gpu.maker = pci->vendor == 0x1002 || (gcn && pci->vendor != 0x10de) ? TP_MAKER_AMD : TP_MAKER_NVIDIA;
	snprintf(node->gpu.gcn, sizeof(node->gpu.gcn), "%s", gcn ? gcn : "");
	return link_up(b, node->index, at.parent);
}

static enum tp_net_kind fabric_of(const char *name)
{
	static const struct { const char *name; enum tp_net_kind kind; } kinds[] = {
		{ "ib", TP_FABRIC_IB }, { "roce", TP_FABRIC_ROCE }, { "ethernet", TP_FABRIC_ETHERNET }, { "efa", TP_FABRIC_EFA },
	};
	for (size_t i = 0; name && i < TP_ARRAY_LEN(kinds); i++)
		if (strcmp(kinds[i].name, name) == 0) return kinds[i].kind;
	return TP_FABRIC_UNKNOWN;
}

static ncclResult_t add_port(struct tp_builder *b, const struct tp_element *e, int32_t nic, struct place at)
{
	int64_t dev, speed, port, connections, gdr, coll, gin, rail, plane, net;
	double latency;
	uint64_t guid;
	const struct tp_topo_doc *doc = b->doc;
	TP_TRY(tp_element_int(doc, e, "dev", -1, 1 << 20, -1, &dev));
	TP_TRY(tp_element_int(doc, e, "net", 0, 255, 1, &net));
	/* Without a number it is a part of a port that was merged, or another plugin's: not opened by anybody. */
	if (dev < 0 || !net) return ncclSuccess;
	TP_TRY(tp_element_int(doc, e, "speed", -1, INT32_MAX, 0, &speed));
	TP_TRY(tp_element_int(doc, e, "port", -1, 65535, 0, &port));
	TP_TRY(tp_element_int(doc, e, "maxconn", INT32_MIN, INT64_C(1) << 40, 64, &connections));
	TP_TRY(tp_element_int(doc, e, "gdr", 0, 255, 0, &gdr));
	TP_TRY(tp_element_int(doc, e, "coll", 0, 255, 0, &coll));
	TP_TRY(tp_element_int(doc, e, "gin", 0, 255, 0, &gin));
	TP_TRY(tp_element_int(doc, e, "rail", -1, 65535, -1, &rail));
	TP_TRY(tp_element_int(doc, e, "plane", -1, 65535, -1, &plane));
	TP_TRY(tp_element_real(doc, e, "latency", 0, 1e9, 0, &latency));
	TP_TRY(tp_element_hex(doc, e, "guid", 0, &guid));
	struct tp_topo_node *node = tp_build_node(b, TP_TOPO_NET, e, at.host, nic, at.cpu);
	if (!node) return ncclSystemError;
	node->net.dev = (int)dev;
	node->net.port = (int)port;
	node->net.guid = guid;
	node->net.bw = (speed > 0 ? (double)speed : tp_topo_constant("net.default")) / 8000;
	node->net.latency_us = latency;
	node->net.max_connections = (int)TP_MIN(connections, INT32_MAX);
	node->net.gdr = gdr != 0;
	node->net.coll = coll != 0;
	node->net.gin = gin != 0;
	node->net.rail = (int)rail;
	node->net.plane = (int)plane;
	node->net.fabric = fabric_of(tp_element_get(e, "fabric"));
	return tp_build_link_both(b, nic, node->index, TP_WIRE_NET, 1, node->net.bw, node->net.bw);
}

/* pci NULL: a NIC that is no PCI device, as virtual ones. */
static ncclResult_t add_nic(struct tp_builder *b, const struct tp_element *e, const struct tp_topo_pci *pci, struct place at)
{
	struct tp_topo_node *node = tp_build_node(b, TP_TOPO_NIC, e, at.host, at.parent, at.cpu);
	if (!node) return ncclSystemError;
	int32_t nic = node->index;
	if (pci) {
		node->pci = *pci;
		TP_TRY(link_up(b, nic, at.parent));
	} else {
		TP_TRY(tp_build_link_both(b, nic, at.parent, TP_WIRE_PCI, 0, tp_topo_constant("local"), tp_topo_constant("local")));
	}
	for (const struct tp_element *net = e->first; net; net = net->next)
		if (strcmp(net->name, "net") == 0) TP_TRY(add_port(b, net, nic, at));
	return ncclSuccess;
}

static ncclResult_t add_pci(struct tp_builder *b, const struct tp_element *e, struct place at)
{
	struct tp_topo_pci pci;
	const struct tp_element *nic = tp_element_child(e, "nic");
	int gpus = count_gpus(e);
	TP_TRY(read_pci(b, e, &pci));
	if (nic) return add_nic(b, nic, &pci, at);
	/* Several GPUs on one device (partitions) share its link: the device stays as a node between. */
	bool is_bridge = pci.class_code >> 8 == 0x0604 || tp_element_child(e, "pci") || gpus > 1;
	if (is_bridge) {
		struct tp_topo_node *node = tp_build_node(b, TP_TOPO_PCI, e, at.host, at.parent, at.cpu);
		if (!node) return ncclSystemError;
		node->pci = pci;
		int32_t up = at.parent;
		at.parent = node->index;
		TP_TRY(link_up(b, at.parent, up));
	}
	for (const struct tp_element *c = e->first; c; c = c->next) {
		if (strcmp(c->name, "pci") == 0) TP_TRY(add_pci(b, c, at));
		if (strcmp(c->name, "gpu") == 0) TP_TRY(add_gpu(b, c, &pci, at));
	}
	return ncclSuccess;
}

static ncclResult_t add_core(struct tp_builder *b, const struct tp_element *e, struct place at)
{
	double local = tp_topo_constant("local");
	int64_t level, bytes;
	bool is_cache = strcmp(e->name, "cache") == 0;
	TP_TRY(tp_element_int(b->doc, e, "level", 1, 5, 3, &level));
	TP_TRY(tp_element_int(b->doc, e, "bytes", 0, INT64_MAX, 0, &bytes));
	struct tp_topo_node *node = tp_build_node(b, is_cache ? TP_TOPO_CACHE : TP_TOPO_CORE, e, at.host, at.parent, at.cpu);
	if (!node) return ncclSystemError;
	if (is_cache) {
		node->cache.level = (int)level;
		node->cache.bytes = (size_t)bytes;
	}
	TP_TRY(tp_element_mask(b->doc, e, "affinity", is_cache ? node->cache.mask : node->core.mask));
	int32_t up = at.parent;
	at.parent = node->index;
	TP_TRY(tp_build_link_both(b, at.parent, up, TP_WIRE_LOCAL, 1, local, local));
	for (const struct tp_element *c = e->first; c; c = c->next)
		if (strcmp(c->name, "core") == 0) TP_TRY(add_core(b, c, at));
	return ncclSuccess;
}

static void read_cpu_kind(const struct tp_element *e, struct tp_topo_node *cpu, int family, int model)
{
	static const struct { const char *name; enum tp_cpu_vendor vendor; } vendors[] = {
		{ "GenuineIntel", TP_VENDOR_INTEL }, { "AuthenticAMD", TP_VENDOR_AMD }, { "CentaurHauls", TP_VENDOR_ZHAOXIN },
		{ "  Shanghai  ", TP_VENDOR_ZHAOXIN },
	};
	const char *arch = tp_element_get(e, "arch"), *vendor = tp_element_get(e, "vendor");
	cpu->cpu.arch = !arch ? TP_ARCH_UNKNOWN : strcmp(arch, "x86_64") == 0 ? TP_ARCH_X86 : strcmp(arch, "arm64") == 0 ? TP_ARCH_ARM :
		strcmp(arch, "ppc64") == 0 ? TP_ARCH_POWER : TP_ARCH_UNKNOWN;
	for (size_t i = 0; vendor && i < TP_ARRAY_LEN(vendors); i++)
		if (strcmp(vendors[i].name, vendor) == 0) cpu->cpu.vendor = vendors[i].vendor;
	/* Families above 15 were once written as base and extension joined instead of added: 0x8f for 0x17, 0xaf for 0x19. */
	cpu->cpu.family = family > 0x8f - 1 && (family & 0xf) == 0xf ? (family >> 4) + 0xf : family;
	cpu->cpu.model = model;
	cpu->cpu.inter_bw = tp_topo_inter_cpu_bw(cpu->cpu.arch, cpu->cpu.vendor, cpu->cpu.family, model);
}

static ncclResult_t add_cpu(struct tp_builder *b, const struct tp_element *e)
{
	struct place at = { .parent = -1, .cpu = -1 };
	int64_t numa, family, model;
	TP_TRY(add_host(b, e, &at.host));
	TP_TRY(tp_element_int(b->doc, e, "numaid", -1, 65535, -1, &numa));
	TP_TRY(tp_element_int(b->doc, e, "familyid", 0, 65535, 0, &family));
	TP_TRY(tp_element_int(b->doc, e, "modelid", 0, 65535, 0, &model));
	struct tp_topo_node *cpu = tp_build_node(b, TP_TOPO_CPU, e, at.host, -1, -1);
	if (!cpu) return ncclSystemError;
	cpu->near_cpu = at.cpu = at.parent = cpu->index;
	cpu->cpu.numa = (int)numa;
	TP_TRY(tp_element_mask(b->doc, e, "affinity", cpu->cpu.mask));
	read_cpu_kind(e, cpu, (int)family, (int)model);
	for (const struct tp_element *c = e->first; c; c = c->next) {
		if (strcmp(c->name, "pci") == 0) TP_TRY(add_pci(b, c, at));
		if (strcmp(c->name, "nic") == 0) TP_TRY(add_nic(b, c, NULL, at));
		if (strcmp(c->name, "cache") == 0 || strcmp(c->name, "core") == 0) TP_TRY(add_core(b, c, at));
	}
	return ncclSuccess;
}

ncclResult_t tp_build_add_nodes(struct tp_builder *b)
{
	for (const struct tp_element *e = b->doc->root->first; e; e = e->next)
		if (strcmp(e->name, "cpu") == 0) TP_TRY(add_cpu(b, e));
	if (!b->topo->count[TP_TOPO_CPU] && b->topo->nnodes == 0)
		return TP_FAIL(ncclInvalidUsage, "%s: <system> holds no <cpu>, so no machine", b->doc->name);
	return ncclSuccess;
}

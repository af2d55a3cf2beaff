/* What a process can say of its own place in a moment, without describing the machine; and how ranks get into a description that was
 * made without them. */
#include <stdlib.h>
#include <string.h>

#include "topo/discover.h"

#define CPUS "/sys/devices/system/cpu"
#define NODES "/sys/devices/system/node"
#define MAX_NODES 64

static bool holds(const uint64_t *outer, const uint64_t *inner)
{
	for (int w = 0; w < TP_CPU_WORDS; w++)
		if (inner[w] & ~outer[w]) return false;
	return true;
}

static int first_of(const uint64_t *mask)
{
	for (int w = 0; w < TP_CPU_WORDS; w++)
		if (mask[w]) return w * 64 + __builtin_ctzll(mask[w]);
	return -1;
}

/* The first processor of the set that a list names, where it holds all of own. */
static int32_t within(const char *list, const uint64_t *own)
{
	uint64_t mask[TP_CPU_WORDS];
	tp_sys_cpu_list(list, mask);
	return holds(mask, own) ? first_of(mask) : -1;
}

static int32_t find_numa(const struct tp_discovery *d, const uint64_t *own)
{
	char names[MAX_NODES][TP_TOPO_NAME_BYTES], text[1024];
	int count = tp_sys_list(d, names, MAX_NODES, NODES);
	for (int i = 0; i < count; i++) {
		int numa;
		char end;
		if (sscanf(names[i], "node%d%c", &numa, &end) != 1 || !tp_sys_text(d, text, sizeof(text), NODES "/%s/cpulist", names[i])) continue;
		if (within(text, own) >= 0) return numa;
	}
	return -1;
}

void tp_topo_place_of(const char *root, const uint64_t mask[TP_CPU_WORDS], struct tp_topo_place *out)
{
	struct tp_discovery d = { .root = root ? root : "" };
	char text[1024];
	int first = first_of(mask), count = 0;
	*out = (struct tp_topo_place){ -1, -1, -1 };
	if (first < 0) return;
	for (int w = 0; w < TP_CPU_WORDS; w++) count += __builtin_popcountll(mask[w]);
	out->numa = find_numa(&d, mask);
	/* No core has more threads. */
	if (count <= 8 && tp_sys_text(&d, text, sizeof(text), CPUS "/cpu%d/topology/thread_siblings_list", first)) out->core = within(text, mask);
	int cache = tp_discover_last_cache(&d, first);
	if (cache >= 0 && tp_sys_text(&d, text, sizeof(text), CPUS "/cpu%d/cache/index%d/shared_cpu_list", first, cache)) out->cache = within(text, mask);
}

bool tp_topo_cpus_near(const char *root, const char *bus_id, uint64_t mask[TP_CPU_WORDS])
{
	struct tp_discovery d = { .root = root ? root : "" };
	char text[4096];
	int64_t bus;
	uint64_t found[TP_CPU_WORDS];
	if (!tp_bus_id_parse(bus_id, &bus) || !tp_sys_text(&d, text, sizeof(text), "/sys/bus/pci/devices/%s/local_cpulist", bus_id)) return false;
	tp_sys_cpu_list(text, found);
	if (first_of(found) < 0) return false;
	memcpy(mask, found, sizeof(found));
	return true;
}

bool tp_topo_find_rdma(const char *root, char *name, size_t bytes)
{
	static const char folder[] = "/sys/class/infiniband";
	struct tp_discovery d = { .root = root ? root : "" };
	char devices[MAX_NODES][TP_TOPO_NAME_BYTES], ports[16][TP_TOPO_NAME_BYTES], text[64];
	int count = tp_sys_list(&d, devices, MAX_NODES, "%s", folder);
	for (int i = 0; i < count; i++) {
		if (!tp_sys_exists(&d, "%s/%s/device/vendor", folder, devices[i])) continue;
		int nports = tp_sys_list(&d, ports, (int)TP_ARRAY_LEN(ports), "%s/%s/ports", folder, devices[i]);
		for (int p = 0; p < nports; p++) {
			if (!tp_sys_text(&d, text, sizeof(text), "%s/%s/ports/%s/state", folder, devices[i], ports[p]) || atoi(text) != 4) continue;
			snprintf(name, bytes, "%s:%s", devices[i], ports[p]);
			return true;
		}
	}
	return false;
}

ncclResult_t tp_topo_doc_set_rank(struct tp_topo_doc *doc, const char *gpu_bus_id, int rank)
{
	int64_t wanted, bus;
	if (!tp_bus_id_parse(gpu_bus_id, &wanted)) return ncclSuccess;
	for (struct tp_element *e = doc->root; e; e = tp_doc_walk(doc, e)) {
		const char *id = e->parent && strcmp(e->name, "gpu") == 0 ? tp_element_get(e->parent, "busid") : NULL;
		if (!id || tp_element_get(e, "rank") || !tp_bus_id_parse(id, &bus) || bus != wanted) continue;
		return tp_doc_setf(doc, e, "rank", "%d", rank);
	}
	return ncclSuccess;
}

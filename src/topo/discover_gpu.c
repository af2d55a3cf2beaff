/* GPUs: their place from the PCIe tree, the rest from NVML or from AMD's driver. */
#include <stdlib.h>
#include <string.h>

#include "gpu/nvml.h"
#include "topo/discover.h"

#define NVIDIA 0x10de
#define AMD 0x1002

static bool is_gpu(const struct tp_discovery *d, const char *bus_id)
{
	int64_t class, vendor;
	if (!tp_sys_number(d, &class, "/sys/bus/pci/devices/%s/class", bus_id) || !tp_sys_number(d, &vendor, "/sys/bus/pci/devices/%s/vendor", bus_id)) return false;
	int64_t base = class >> 16, sub = class >> 8;
	return (vendor == NVIDIA && (sub == 0x0300 || sub == 0x0302)) || (vendor == AMD && (sub == 0x0302 || sub == 0x0380 || base == 0x12));
}

bool tp_discover_gdr(const struct tp_discovery *d, bool amd)
{
	char text[256];
	int major = 0, minor = 0;
	if (tp_sys_exists(d, "/sys/kernel/mm/memory_peers/%s/version", amd ? "amdkfd" : "nv_mem")) return true;
	if (!amd && (tp_sys_exists(d, "/sys/kernel/mm/memory_peers/nv_mem_nc/version") || tp_sys_exists(d, "/sys/module/nvidia_peermem"))) return true;
	/* RDMA drivers take DMA-BUFs since 5.12; NVIDIA's open kernel modules and AMD's driver give them. */
	bool kernel = tp_sys_text(d, text, sizeof(text), "/proc/sys/kernel/osrelease") && sscanf(text, "%d.%d", &major, &minor) == 2 &&
		(major > 5 || (major == 5 && minor >= 12));
	if (!kernel) return false;
	if (amd) return tp_sys_exists(d, "/sys/module/amdgpu");
	return tp_sys_text(d, text, sizeof(text), "/proc/driver/nvidia/version") && strstr(text, "Open Kernel Module");
}

static ncclResult_t add_link(struct tp_discovery *d, struct tp_element *gpu, const struct tp_nvml_link *link)
{
	struct tp_element *e = tp_doc_add(d->doc, gpu, "nvlink");
	if (!e) return ncclSystemError;
	TP_TRY(tp_doc_set(d->doc, e, "target", link->to_switch ? "fffffff:ffff:ff" : link->target));
	TP_TRY(tp_doc_setf(d->doc, e, "count", "%d", link->count));
	return tp_doc_set(d->doc, e, "tclass", link->to_switch ? "0x068000" : link->to_cpu ? "0x068001" : "0x030200");
}

#define MAX_PCI 4096

/* Every GPU's bus id; once, since there may be hundreds of devices and each is asked what it is. */
static ncclResult_t list_gpus(struct tp_discovery *d)
{
	if (d->gpus) return ncclSuccess;
	char (*names)[TP_TOPO_NAME_BYTES] = tp_alloc(MAX_PCI, sizeof(*names), "the machine's devices");
	if (!names) return ncclSystemError;
	int count = tp_sys_list(d, names, MAX_PCI, "/sys/bus/pci/devices");
	for (int i = 0; i < count; i++)
		if (is_gpu(d, names[i])) memmove(names[d->ngpus++], names[i], sizeof(names[i]));
	d->gpus = names;
	return ncclSuccess;
}

void tp_discover_end(struct tp_discovery *d)
{
	free(d->gpus);
	d->gpus = NULL;
}

/* GPUs that the driver doesn't let this one reach. */
static ncclResult_t add_forbidden(struct tp_discovery *d, const char *bus_id, struct tp_element *gpu)
{
	TP_TRY(list_gpus(d));
	for (int i = 0; i < d->ngpus; i++) {
		if (strcmp(d->gpus[i], bus_id) == 0 || !tp_nvml_forbids_peer(bus_id, d->gpus[i])) continue;
		struct tp_element *e = tp_doc_add(d->doc, gpu, "nopeer");
		if (!e) return ncclSystemError;
		TP_TRY(tp_doc_set(d->doc, e, "target", d->gpus[i]));
	}
	return ncclSuccess;
}

static ncclResult_t describe_nvidia(struct tp_discovery *d, const char *bus_id, struct tp_element *gpu)
{
	const struct tp_nvml_device *nvml = tp_nvml_find(bus_id);
	char host[32];
	bool switched = false;
	if (d->find->gpu_sm && d->find->gpu_bus_id && strcmp(d->find->gpu_bus_id, bus_id) == 0) TP_TRY(tp_doc_setf(d->doc, gpu, "sm", "%d", d->find->gpu_sm));
	/* NVML speaks of this machine; a machine made of files has none, unless a test brings one. */
	if (!nvml || nvml->index < 0 || nvml->sm < 0) return ncclSuccess;
	TP_TRY(tp_doc_setf(d->doc, gpu, "dev", "%d", nvml->index));
	TP_TRY(tp_doc_setf(d->doc, gpu, "sm", "%d", nvml->sm));
	for (int i = 0; i < nvml->nlinks; i++) {
		switched = switched || nvml->links[i].to_switch;
		TP_TRY(add_link(d, gpu, &nvml->links[i]));
	}
	snprintf(host, sizeof(host), "0x%llx", (unsigned long long)d->host_hash);
	if (switched) TP_TRY(tp_doc_set(d->doc, gpu, "nvldomain", nvml->domain[0] ? nvml->domain : host));
	TP_TRY(add_forbidden(d, bus_id, gpu));
	if (!nvml->c2c_count) return ncclSuccess;
	struct tp_element *c2c = tp_doc_add(d->doc, gpu, "c2c");
	if (!c2c) return ncclSystemError;
	TP_TRY(tp_doc_setf(d->doc, c2c, "bw", "%d", nvml->c2c_mbps));
	return tp_doc_setf(d->doc, c2c, "count", "%d", nvml->c2c_count);
}

ncclResult_t tp_discover_gpu(struct tp_discovery *d, const char *bus_id, int rank)
{
	struct tp_element *pci;
	int64_t vendor = 0;
	TP_TRY(tp_discover_pci(d, bus_id, &pci));
	if (tp_element_child(pci, "gpu")) return ncclSuccess;
	struct tp_element *gpu = tp_doc_add(d->doc, pci, "gpu");
	if (!gpu) return ncclSystemError;
	if (tp_element_get(pci, "vendor")) vendor = strtoll(tp_element_get(pci, "vendor"), NULL, 16);
	if (rank >= 0) TP_TRY(tp_doc_setf(d->doc, gpu, "rank", "%d", rank));
	bool told = d->find->gpu_gdr && d->find->gpu_bus_id && strcmp(d->find->gpu_bus_id, bus_id) == 0;
	TP_TRY(tp_doc_setf(d->doc, gpu, "gdr", "%d", told ? d->find->gpu_gdr > 0 : tp_discover_gdr(d, vendor == AMD)));
	return vendor == AMD ? tp_discover_amd(d, bus_id, gpu) : describe_nvidia(d, bus_id, gpu);
}

/* GPUs that no driver numbered are numbered in the order of their bus ids. */
static ncclResult_t number_the_rest(struct tp_discovery *d)
{
	int next = 0;
	for (const struct tp_element *e = d->doc->root; e; e = tp_doc_walk(d->doc, e)) {
		int64_t dev;
		if (strcmp(e->name, "gpu") != 0) continue;
		TP_TRY(tp_element_int(d->doc, e, "dev", -1, INT32_MAX, -1, &dev));
		if (dev >= next) next = (int)dev + 1;
	}
	for (struct tp_element *e = d->doc->root; e; e = tp_doc_walk(d->doc, e))
		if (strcmp(e->name, "gpu") == 0 && !tp_element_get(e, "dev")) TP_TRY(tp_doc_setf(d->doc, e, "dev", "%d", next++));
	return ncclSuccess;
}

ncclResult_t tp_discover_gpus(struct tp_discovery *d)
{
	if (d->find->gpu_bus_id) TP_TRY(tp_discover_gpu(d, d->find->gpu_bus_id, d->find->rank));
	if (d->find->all_gpus) {
		TP_TRY(list_gpus(d));
		for (int i = 0; i < d->ngpus; i++) TP_TRY(tp_discover_gpu(d, d->gpus[i], -1));
	}
	return number_the_rest(d);
}

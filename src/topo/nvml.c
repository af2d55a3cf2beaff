/* What NVML knows of one GPU: number, compute capability, where its NVLinks lead, C2C, the NVLink domain across hosts. Types and
 * numbers are NVML's. It is opened for each description and closed again: NVML counts its users. */
#include <dlfcn.h>
#include <string.h>

#include "topo/discover.h"

#define MAX_LINKS 18
enum { FINE = 0 };
enum { REMOTE_GPU = 0, REMOTE_CPU = 1, REMOTE_SWITCH = 2 };
enum { FIELD_C2C_COUNT = 170, FIELD_C2C_STATUS = 171, FIELD_C2C_BW = 172 };
enum { FABRIC_COMPLETED = 3 };

typedef struct nvml_device *nvml_device;
struct nvml_pci { char legacy[16]; unsigned int domain, bus, device, device_id, subsystem_id; char bus_id[32]; };
union nvml_value { double d; int i; unsigned int u; unsigned long ul; unsigned long long ull; long long ll; };
struct nvml_field { unsigned int field, scope; long long timestamp, latency; int type, result; union nvml_value value; };
struct nvml_fabric { unsigned char cluster[16]; int status; unsigned int clique; unsigned int state; };
_Static_assert(sizeof(struct nvml_pci) == 68, "as nvmlPciInfo_t");
_Static_assert(sizeof(struct nvml_field) == 40, "as nvmlFieldValue_t");
_Static_assert(sizeof(struct nvml_fabric) == 28, "as nvmlGpuFabricInfo_t");

struct nvml {
	void *library;
	int (*init)(void), (*shutdown)(void);
	int (*by_bus_id)(const char *bus_id, nvml_device *out);
	int (*index)(nvml_device device, unsigned int *out);
	int (*capability)(nvml_device device, int *major, int *minor);
	int (*link_state)(nvml_device device, unsigned int link, int *active);
	int (*link_remote)(nvml_device device, unsigned int link, struct nvml_pci *out);
	int (*link_remote_type)(nvml_device device, unsigned int link, int *out);
	int (*fields)(nvml_device device, int count, struct nvml_field *values);
	int (*fabric)(nvml_device device, struct nvml_fabric *out);
};

static bool open_nvml(struct nvml *n)
{
	struct tp_param *name = tp_param_find("TELPHER_NVML_LIBRARY");
	memset(n, 0, sizeof(*n));
	n->library = dlopen(name && tp_param_string(name) ? tp_param_string(name) : "libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
	if (!n->library) return false;
	*(void **)&n->init = dlsym(n->library, "nvmlInit_v2");
	*(void **)&n->shutdown = dlsym(n->library, "nvmlShutdown");
	*(void **)&n->by_bus_id = dlsym(n->library, "nvmlDeviceGetHandleByPciBusId_v2");
	*(void **)&n->index = dlsym(n->library, "nvmlDeviceGetIndex");
	*(void **)&n->capability = dlsym(n->library, "nvmlDeviceGetCudaComputeCapability");
	*(void **)&n->link_state = dlsym(n->library, "nvmlDeviceGetNvLinkState");
	*(void **)&n->link_remote = dlsym(n->library, "nvmlDeviceGetNvLinkRemotePciInfo_v2");
	*(void **)&n->link_remote_type = dlsym(n->library, "nvmlDeviceGetNvLinkRemoteDeviceType");
	*(void **)&n->fields = dlsym(n->library, "nvmlDeviceGetFieldValues");
	*(void **)&n->fabric = dlsym(n->library, "nvmlDeviceGetGpuFabricInfo");
	if (n->init && n->by_bus_id && n->index && n->capability && n->init() == FINE) return true;
	dlclose(n->library);
	return false;
}

static void close_nvml(struct nvml *n)
{
	if (n->shutdown) n->shutdown();
	dlclose(n->library);
}

static void add_link(struct tp_nvml_device *out, int type, const struct nvml_pci *pci)
{
	struct tp_nvml_link link = { .count = 1, .to_switch = type == REMOTE_SWITCH, .to_cpu = type == REMOTE_CPU };
	if (!link.to_switch) snprintf(link.target, sizeof(link.target), "%04x:%02x:%02x.0", pci->domain & 0xffff, pci->bus & 255, pci->device & 31);
	for (int i = 0; i < out->nlinks; i++) {
		if (out->links[i].to_switch != link.to_switch || strcmp(out->links[i].target, link.target) != 0) continue;
		out->links[i].count++;
		return;
	}
	if (out->nlinks < (int)TP_ARRAY_LEN(out->links)) out->links[out->nlinks++] = link;
}

static void find_links(const struct nvml *n, nvml_device device, struct tp_nvml_device *out)
{
	if (!n->link_state || !n->link_remote) return;
	for (unsigned int link = 0; link < MAX_LINKS; link++) {
		struct nvml_pci pci = { .domain = 0 };
		int active = 0, type = REMOTE_GPU;
		if (n->link_state(device, link, &active) != FINE || !active) continue;
		bool typed = n->link_remote_type && n->link_remote_type(device, link, &type) == FINE && type >= REMOTE_GPU && type <= REMOTE_SWITCH;
		bool placed = n->link_remote(device, link, &pci) == FINE;
		/* Before there were types, a switch showed by its class, which needs its device; a peer that can't be placed is one. */
		if (!typed) type = placed ? REMOTE_GPU : REMOTE_SWITCH;
		if (type == REMOTE_SWITCH || placed) add_link(out, type, &pci);
	}
}

static void find_c2c(const struct nvml *n, nvml_device device, struct tp_nvml_device *out)
{
	struct nvml_field count = { .field = FIELD_C2C_COUNT };
	if (!n->fields || n->fields(device, 1, &count) != FINE || count.result != FINE) return;
	for (unsigned int link = 0; link < count.value.u && link < 64; link++) {
		struct nvml_field values[2] = { { .field = FIELD_C2C_STATUS, .scope = link }, { .field = FIELD_C2C_BW, .scope = link } };
		if (n->fields(device, 2, values) != FINE || values[0].result != FINE || values[1].result != FINE || values[0].value.u != 1) continue;
		out->c2c_count++;
		out->c2c_mbps = (int)values[1].value.u;
	}
}

/* GPUs of several hosts behind the same NVLink switches: one cluster, one clique. */
static void find_domain(const struct nvml *n, nvml_device device, struct tp_nvml_device *out)
{
	static const unsigned char none[16];
	struct nvml_fabric fabric = { .status = -1 };
	if (!n->fabric || n->fabric(device, &fabric) != FINE || fabric.state != FABRIC_COMPLETED || memcmp(fabric.cluster, none, sizeof(none)) == 0) return;
	for (size_t i = 0; i < sizeof(fabric.cluster); i++) snprintf(out->domain + 2 * i, 3, "%02x", fabric.cluster[i]);
	snprintf(out->domain + 32, sizeof(out->domain) - 32, ".%u", fabric.clique);
}

bool tp_nvml_describe(const char *bus_id, struct tp_nvml_device *out)
{
	struct nvml n;
	nvml_device device;
	unsigned int index;
	int major, minor;
	memset(out, 0, sizeof(*out));
	if (!open_nvml(&n)) return false;
	bool found = n.by_bus_id(bus_id, &device) == FINE && n.index(device, &index) == FINE && n.capability(device, &major, &minor) == FINE;
	if (found) {
		out->index = (int)index;
		out->sm = major * 10 + minor;
		find_links(&n, device, out);
		find_c2c(&n, device, out);
		find_domain(&n, device, out);
	}
	close_nvml(&n);
	return found;
}

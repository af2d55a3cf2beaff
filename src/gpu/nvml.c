/* NVML by dlopen: NVLinks between devices, and the level of the PCI tree at which they meet. Types and numbers are NVML's. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "gpu/nvml.h"

static struct tp_param params[] = {
	{ .name = "TELPHER_NVML_LIBRARY", .kind = TP_PARAM_STRING, .fallback = "libnvidia-ml.so.1",
		.doc = "NVIDIA's management library, which knows how GPUs are joined (for reports and NCCL_P2P_LEVEL)" },
};
TP_PARAM_TABLE("gpu", params)

#define MAX_LINKS 18
enum { NVML_FINE = 0 };
enum { REMOTE_GPU = 0, REMOTE_SWITCH = 2 };
enum { LEVEL_INTERNAL = 0, LEVEL_SINGLE = 10, LEVEL_MULTIPLE = 20, LEVEL_HOSTBRIDGE = 30, LEVEL_NODE = 40, LEVEL_SYSTEM = 50 };
enum { CAN_READ = 0, CAN_WRITE = 1 };

typedef struct nvml_device *nvml_device;
struct nvml_pci {
	char legacy[16];
	unsigned int domain, bus, device, device_id, subsystem_id;
	char bus_id[32];
};
_Static_assert(sizeof(struct nvml_pci) == 68, "as nvmlPciInfo_t");

static struct {
	int (*init)(void);
	int (*by_bus_id)(const char *bus_id, nvml_device *out);
	int (*link_state)(nvml_device device, unsigned int link, int *active);
	int (*link_remote)(nvml_device device, unsigned int link, struct nvml_pci *out);
	int (*link_remote_type)(nvml_device device, unsigned int link, int *out);
	int (*common_ancestor)(nvml_device a, nvml_device b, int *level);
	int (*p2p_status)(nvml_device a, nvml_device b, int what, int *status);
} nvml;
static bool there;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void open_once(void)
{
	void *library = dlopen(tp_param_string(&params[0]), RTLD_NOW | RTLD_LOCAL);
	const char *why = library ? NULL : dlerror();
	if (library) {
		*(void **)&nvml.init = dlsym(library, "nvmlInit_v2");
		*(void **)&nvml.by_bus_id = dlsym(library, "nvmlDeviceGetHandleByPciBusId_v2");
		*(void **)&nvml.link_state = dlsym(library, "nvmlDeviceGetNvLinkState");
		*(void **)&nvml.link_remote = dlsym(library, "nvmlDeviceGetNvLinkRemotePciInfo_v2");
		*(void **)&nvml.link_remote_type = dlsym(library, "nvmlDeviceGetNvLinkRemoteDeviceType");
		*(void **)&nvml.common_ancestor = dlsym(library, "nvmlDeviceGetTopologyCommonAncestor");
		*(void **)&nvml.p2p_status = dlsym(library, "nvmlDeviceGetP2PStatus");
		there = nvml.init && nvml.by_bus_id && nvml.init() == NVML_FINE;
		if (!there) why = "nvmlInit fails";
	}
	if (!there) TP_INFO(TP_INIT, "NVML isn't there (%s): how GPUs are joined isn't known", why);
}

static bool find_two(const char *bus_id, const char *peer_bus_id, nvml_device *a, nvml_device *b)
{
	pthread_once(&once, open_once);
	return there && nvml.by_bus_id(bus_id, a) == NVML_FINE && nvml.by_bus_id(peer_bus_id, b) == NVML_FINE;
}

bool tp_nvml_forbids_peer(const char *bus_id, const char *peer_bus_id)
{
	nvml_device a, b;
	int reads, writes;
	return find_two(bus_id, peer_bus_id, &a, &b) && nvml.p2p_status && nvml.p2p_status(a, b, CAN_READ, &reads) == NVML_FINE &&
		nvml.p2p_status(a, b, CAN_WRITE, &writes) == NVML_FINE && (reads != 0 || writes != 0);
}

static bool is_at(const struct nvml_pci *pci, const char *bus_id)
{
	unsigned int domain, bus, device;
	return sscanf(bus_id, "%x:%x:%x", &domain, &bus, &device) == 3 && pci->domain == domain && pci->bus == bus && pci->device == device;
}

/* Active links of device that lead to peer; *switches: those that lead to a switch. */
static int count_links(nvml_device device, const char *peer_bus_id, int *switches)
{
	int direct = 0;
	*switches = 0;
	if (!nvml.link_state || !nvml.link_remote) return 0;
	for (unsigned int link = 0; link < MAX_LINKS; link++) {
		struct nvml_pci pci;
		int active = 0, type = REMOTE_GPU;
		if (nvml.link_state(device, link, &active) != NVML_FINE || !active) continue;
		if (nvml.link_remote_type && nvml.link_remote_type(device, link, &type) == NVML_FINE && type == REMOTE_SWITCH) ++*switches;
		else if (nvml.link_remote(device, link, &pci) == NVML_FINE && is_at(&pci, peer_bus_id)) direct++;
	}
	return direct;
}

/* Through switches every device reaches every other with what the narrower of the two has. */
static int nvlinks_between(nvml_device a, const char *bus_id, nvml_device b, const char *peer_bus_id)
{
	int switches_a, switches_b;
	int direct = count_links(a, peer_bus_id, &switches_a);
	if (direct || !switches_a) return direct;
	count_links(b, bus_id, &switches_b);
	return TP_MIN(switches_a, switches_b);
}

static enum tp_gpu_distance look(const char *bus_id, const char *peer_bus_id, int *nvlinks)
{
	nvml_device a, b;
	int level;
	*nvlinks = 0;
	if (!find_two(bus_id, peer_bus_id, &a, &b)) return TP_GPU_UNKNOWN;
	*nvlinks = nvlinks_between(a, bus_id, b, peer_bus_id);
	if (*nvlinks) return TP_GPU_NVL;
	if (!nvml.common_ancestor || nvml.common_ancestor(a, b, &level) != NVML_FINE) return TP_GPU_UNKNOWN;
	if (level <= LEVEL_SINGLE) return TP_GPU_PIX;
	if (level <= LEVEL_MULTIPLE) return TP_GPU_PXB;
	return level <= LEVEL_NODE ? TP_GPU_PHB : TP_GPU_SYS;
}

enum tp_gpu_distance tp_nvml_distance(const char *bus_id, const char *peer_bus_id)
{
	int nvlinks;
	return look(bus_id, peer_bus_id, &nvlinks);
}

void tp_nvml_path(const char *bus_id, const char *peer_bus_id, char *text, size_t bytes)
{
	static const char *const names[] = { "LOC", "NVL", "PIX", "PXB", "PHB", "SYS", "" };
	int nvlinks;
	enum tp_gpu_distance distance = look(bus_id, peer_bus_id, &nvlinks);
	if (distance == TP_GPU_NVL) snprintf(text, bytes, "NV%d", nvlinks);
	else snprintf(text, bytes, "%s", names[distance]);
}

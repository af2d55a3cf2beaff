/* NVML by dlopen. Types and numbers are NVML's. */
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "base/fork.h"
#include "gpu/nvml.h"

static struct tp_param params[] = {
	{ .name = "TELPHER_NVML_LIBRARY", .kind = TP_PARAM_STRING, .fallback = "libnvidia-ml.so.1",
		.doc = "NVIDIA's management library, which knows how GPUs are joined (for reports, the topology and NCCL_P2P_LEVEL)" },
};
TP_PARAM_TABLE("gpu", params)

#define MAX_LINKS 18
enum { FINE = 0 };
enum { REMOTE_GPU = 0, REMOTE_CPU = 1, REMOTE_SWITCH = 2 };
enum { FIELD_C2C_COUNT = 170, FIELD_C2C_STATUS = 171, FIELD_C2C_BW = 172 };
enum { FABRIC_COMPLETED = 3 };
enum { LEVEL_SINGLE = 10, LEVEL_MULTIPLE = 20, LEVEL_NODE = 40 };
enum { CAN_READ = 0, CAN_WRITE = 1 };

typedef struct nvml_device *nvml_device;
struct nvml_pci { char legacy[16]; unsigned int domain, bus, device, device_id, subsystem_id; char bus_id[32]; };
union nvml_value { double d; int i; unsigned int u; unsigned long ul; unsigned long long ull; long long ll; };
struct nvml_field { unsigned int field, scope; long long timestamp, latency; int type, result; union nvml_value value; };
struct nvml_fabric { unsigned char cluster[16]; int status; unsigned int clique; unsigned int state; };
_Static_assert(sizeof(struct nvml_pci) == 68, "as nvmlPciInfo_t");
_Static_assert(sizeof(struct nvml_field) == 40, "as nvmlFieldValue_t");
_Static_assert(sizeof(struct nvml_fabric) == 28, "as nvmlGpuFabricInfo_t");

static struct {
	int (*init)(void);
	int (*by_bus_id)(const char *bus_id, nvml_device *out);
	int (*index)(nvml_device device, unsigned int *out);
	int (*capability)(nvml_device device, int *major, int *minor);
	int (*link_state)(nvml_device device, unsigned int link, int *active);
	int (*link_remote)(nvml_device device, unsigned int link, struct nvml_pci *out);
	int (*link_remote_type)(nvml_device device, unsigned int link, int *out);
	int (*fields)(nvml_device device, int count, struct nvml_field *values);
	int (*fabric)(nvml_device device, struct nvml_fabric *out);
	int (*common_ancestor)(nvml_device a, nvml_device b, int *level);
	int (*p2p_status)(nvml_device a, nvml_device b, int what, int *status);
} nvml;

/* Devices that were asked; the list only grows, and is whole at any moment. */
struct known { const struct known *next; char bus_id[20]; bool found; struct tp_nvml_device device; };
static _Atomic(const struct known *) all_known;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
TP_FORK_RENEW(lock)                     /* NVML runs under it */
enum { NOT_TRIED, THERE, NOT_THERE };
static _Atomic int state;

static bool open_library(void)
{
	void *library = dlopen(tp_param_string(&params[0]), RTLD_NOW | RTLD_LOCAL);
	const char *why = library ? NULL : dlerror();
	if (library) {
		*(void **)&nvml.init = dlsym(library, "nvmlInit_v2");
		*(void **)&nvml.by_bus_id = dlsym(library, "nvmlDeviceGetHandleByPciBusId_v2");
		*(void **)&nvml.index = dlsym(library, "nvmlDeviceGetIndex");
		*(void **)&nvml.capability = dlsym(library, "nvmlDeviceGetCudaComputeCapability");
		*(void **)&nvml.link_state = dlsym(library, "nvmlDeviceGetNvLinkState");
		*(void **)&nvml.link_remote = dlsym(library, "nvmlDeviceGetNvLinkRemotePciInfo_v2");
		*(void **)&nvml.link_remote_type = dlsym(library, "nvmlDeviceGetNvLinkRemoteDeviceType");
		*(void **)&nvml.fields = dlsym(library, "nvmlDeviceGetFieldValues");
		*(void **)&nvml.fabric = dlsym(library, "nvmlDeviceGetGpuFabricInfo");
		*(void **)&nvml.common_ancestor = dlsym(library, "nvmlDeviceGetTopologyCommonAncestor");
		*(void **)&nvml.p2p_status = dlsym(library, "nvmlDeviceGetP2PStatus");
		if (nvml.init && nvml.by_bus_id && nvml.init() == FINE) return true;
		why = "nvmlInit fails";
	}
	TP_INFO(TP_INIT, "NVML isn't there (%s): how GPUs are joined isn't known", why);
	return false;
}

/* With the lock held. */
static bool is_there(void)
{
	int now = atomic_load_explicit(&state, memory_order_relaxed);
	if (now == NOT_TRIED) atomic_store_explicit(&state, now = open_library() ? THERE : NOT_THERE, memory_order_relaxed);
	return now == THERE;
}

/* ---- one device ---- */

static void add_link(struct tp_nvml_device *out, int type, const struct nvml_pci *pci, int count)
{
	struct tp_nvml_link link = { .count = count, .to_switch = type == REMOTE_SWITCH, .to_cpu = type == REMOTE_CPU };
	if (!link.to_switch) snprintf(link.target, sizeof(link.target), "%04x:%02x:%02x.0", pci->domain & 0xffff, pci->bus & 255, pci->device & 31);
	for (int i = 0; i < out->nlinks; i++) {
		if (out->links[i].to_switch != link.to_switch || strcmp(out->links[i].target, link.target) != 0) continue;
		out->links[i].count += count;
		return;
	}
	if (out->nlinks < (int)TP_ARRAY_LEN(out->links)) out->links[out->nlinks++] = link;
}

/* Where the first two links lead to a switch, so do all: on such machines nothing else is on the other end. */
static void find_links(nvml_device device, struct tp_nvml_device *out)
{
	int switches = 0, others = 0;
	if (!nvml.link_state || !nvml.link_remote) return;
	for (unsigned int link = 0; link < MAX_LINKS; link++) {
		struct nvml_pci pci = { .domain = 0 };
		int active = 0, type = REMOTE_GPU;
		if (nvml.link_state(device, link, &active) != FINE || !active) continue;
		if (switches >= 2 && !others) {
			add_link(out, REMOTE_SWITCH, &pci, 1);
			continue;
		}
		bool typed = nvml.link_remote_type && nvml.link_remote_type(device, link, &type) == FINE && type >= REMOTE_GPU && type <= REMOTE_SWITCH;
		bool placed = (!typed || type != REMOTE_SWITCH) && nvml.link_remote(device, link, &pci) == FINE;
		/* Before there were types, a switch showed by its class, which needs its device; a peer that can't be placed is one. */
		if (!typed) type = placed ? REMOTE_GPU : REMOTE_SWITCH;
		if (type == REMOTE_SWITCH) switches++;
		else others++;
		if (type == REMOTE_SWITCH || placed) add_link(out, type, &pci, 1);
	}
}

static void find_c2c(nvml_device device, struct tp_nvml_device *out)
{
	struct nvml_field count = { .field = FIELD_C2C_COUNT };
	if (!nvml.fields || nvml.fields(device, 1, &count) != FINE || count.result != FINE) return;
	for (unsigned int link = 0; link < count.value.u && link < 64; link++) {
		struct nvml_field values[2] = { { .field = FIELD_C2C_STATUS, .scope = link }, { .field = FIELD_C2C_BW, .scope = link } };
		if (nvml.fields(device, 2, values) != FINE || values[0].result != FINE || values[1].result != FINE || values[0].value.u != 1) continue;
		out->c2c_count++;
		out->c2c_mbps = (int)values[1].value.u;
	}
}

/* GPUs of several hosts behind the same NVLink switches: one cluster, one clique. */
static void find_domain(nvml_device device, struct tp_nvml_device *out)
{
	static const unsigned char none[16];
	struct nvml_fabric fabric = { .status = -1 };
	if (!nvml.fabric || nvml.fabric(device, &fabric) != FINE || fabric.state != FABRIC_COMPLETED || memcmp(fabric.cluster, none, sizeof(none)) == 0) return;
	for (size_t i = 0; i < sizeof(fabric.cluster); i++) snprintf(out->domain + 2 * i, 3, "%02x", fabric.cluster[i]);
	snprintf(out->domain + 32, sizeof(out->domain) - 32, ".%u", fabric.clique);
}

/* With the lock held. */
static bool describe(const char *bus_id, struct tp_nvml_device *out)
{
	nvml_device device;
	unsigned int index;
	int major, minor;
	*out = (struct tp_nvml_device){ .index = -1, .sm = -1 };
	if (!is_there() || nvml.by_bus_id(bus_id, &device) != FINE) return false;
	if (nvml.index && nvml.index(device, &index) == FINE) out->index = (int)index;
	if (nvml.capability && nvml.capability(device, &major, &minor) == FINE) out->sm = major * 10 + minor;
	find_links(device, out);
	find_c2c(device, out);
	find_domain(device, out);
	return true;
}

static const struct known *look_up(const char *bus_id)
{
	const struct known *k = atomic_load_explicit(&all_known, memory_order_acquire);     /* pairs with the store in tp_nvml_find */
	while (k && strcasecmp(k->bus_id, bus_id) != 0) k = k->next;
	return k;
}

const struct tp_nvml_device *tp_nvml_find(const char *bus_id)
{
	const struct known *known = look_up(bus_id);
	if (!known) {
		pthread_mutex_lock(&lock);
		struct known *made = (known = look_up(bus_id)) ? NULL : tp_alloc(1, sizeof(*made), "a device's description");
		if (made) {
			snprintf(made->bus_id, sizeof(made->bus_id), "%s", bus_id);
			made->found = describe(bus_id, &made->device);
			made->next = atomic_load_explicit(&all_known, memory_order_relaxed);
			atomic_store_explicit(&all_known, made, memory_order_release);
			known = made;
		}
		pthread_mutex_unlock(&lock);
	}
	return known && known->found ? &known->device : NULL;
}

/* ---- two devices ---- */

static bool find_two(const char *bus_id, const char *peer_bus_id, nvml_device *a, nvml_device *b)
{
	return is_there() && nvml.by_bus_id(bus_id, a) == FINE && nvml.by_bus_id(peer_bus_id, b) == FINE;
}

bool tp_nvml_forbids_peer(const char *bus_id, const char *peer_bus_id)
{
	nvml_device a, b;
	int reads, writes;
	pthread_mutex_lock(&lock);
	bool forbids = find_two(bus_id, peer_bus_id, &a, &b) && nvml.p2p_status && nvml.p2p_status(a, b, CAN_READ, &reads) == FINE &&
		nvml.p2p_status(a, b, CAN_WRITE, &writes) == FINE && (reads != 0 || writes != 0);
	pthread_mutex_unlock(&lock);
	return forbids;
}

/* Active links of device that lead to peer; *switches: those that lead to a switch. */
static int count_links(const char *bus_id, const char *peer_bus_id, int *switches)
{
	const struct tp_nvml_device *device = tp_nvml_find(bus_id);
	int direct = 0;
	*switches = 0;
	for (int i = 0; device && i < device->nlinks; i++) {
		const struct tp_nvml_link *link = &device->links[i];
		if (link->to_switch) *switches += link->count;
		else if (strcasecmp(link->target, peer_bus_id) == 0) direct += link->count;
	}
	return direct;
}

/* Through switches every device reaches every other with what the narrower of the two has. */
static int nvlinks_between(const char *bus_id, const char *peer_bus_id)
{
	int switches_a, switches_b;
	int direct = count_links(bus_id, peer_bus_id, &switches_a);
	if (direct || !switches_a) return direct;
	count_links(peer_bus_id, bus_id, &switches_b);
	return TP_MIN(switches_a, switches_b);
}

static enum tp_gpu_distance look(const char *bus_id, const char *peer_bus_id, int *nvlinks)
{
	nvml_device a, b;
	int level;
	*nvlinks = nvlinks_between(bus_id, peer_bus_id);
	if (*nvlinks) return TP_GPU_NVL;
	pthread_mutex_lock(&lock);
	bool known = find_two(bus_id, peer_bus_id, &a, &b) && nvml.common_ancestor && nvml.common_ancestor(a, b, &level) == FINE;
	pthread_mutex_unlock(&lock);
	if (!known) return TP_GPU_UNKNOWN;
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

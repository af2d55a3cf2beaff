/* Devices: which library, which devices and ports of it, opened once a process. Every port that is ACTIVE and allowed is used,
 * alone or merged with others (merge.c). Whoever has no RDMA hardware is not bothered: what is missing is a reason, logged nowhere but in INFO lines. */
#include <dirent.h>
#include <endian.h>
#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "net/ib/ib.h"

static struct {
	pthread_mutex_t lock;
	bool tried, asked;
	const struct tp_verbs *verbs;
	int ncontexts, nports;
	struct tp_ib_context *contexts[TP_IB_MAX_PORTS];
	struct tp_ib_port ports[TP_IB_MAX_PORTS];
	int ndevices;
	struct tp_ib_device devices[TP_IB_MAX_PORTS];
	char why[512];
} ib = { .lock = PTHREAD_MUTEX_INITIALIZER };

/* The kernel's own list: libibverbs shows only what user space may open. */
static void hardware_names(char *out, size_t bytes)
{
	DIR *dir = opendir("/sys/class/infiniband");
	struct dirent *entry;
	size_t used = 0;

	out[0] = 0;
	while (dir && (entry = readdir(dir)) != NULL && used < bytes)
		if (entry->d_name[0] != '.') used += (size_t)snprintf(out + used, bytes - used, "%s%s", used ? "," : "", entry->d_name);
	if (dir) closedir(dir);
}

static void read_pci_path(const char *name, char *out, size_t bytes)
{
	char path[PATH_MAX], *full;

	snprintf(path, sizeof(path), "/sys/class/infiniband/%s/device", name);
	full = realpath(path, NULL);
	snprintf(out, bytes, "%s", full ? full : "");
	free(full);
}

static int read_numa(const char *name)
{
	char path[PATH_MAX];
	int node = -1;

	snprintf(path, sizeof(path), "/sys/class/infiniband/%s/device/numa_node", name);
	FILE *file = fopen(path, "re");
	if (file && fscanf(file, "%d", &node) != 1) node = -1;
	if (file) fclose(file);
	return node;
}

static void warn_unopenable(const char *name, int error)
{
	TP_WARN("NET/IB : Unable to open device %s: %s. In a container /dev/infiniband must be there too: docker run --device=/dev/infiniband --ulimit memlock=-1, "
		"on Kubernetes an RDMA device plugin's resource; otherwise look at who may open /dev/infiniband/uverbs* (or leave it out by NCCL_IB_HCA)", name, strerror(error));
}

/* What speaks against devices and ports, one after the other. */
static void note_fault(char *seen, size_t bytes, const char *format, ...) __attribute__((format(printf, 3, 4)));
static void note_fault(char *seen, size_t bytes, const char *format, ...)
{
	size_t used = strlen(seen);
	va_list args;

	used += (size_t)snprintf(seen + used, bytes - used, "%s", used ? ", " : "");
	if (used >= bytes) return;
	va_start(args, format);
	vsnprintf(seen + used, bytes - used, format, args);
	va_end(args);
}

static struct tp_ib_context *open_context(const struct tp_ib_params *params, struct ibv_device *device, char *seen, size_t bytes)
{
	const struct tp_verbs *v = ib.verbs;
	struct tp_ib_context *context = tp_alloc(1, sizeof(*context), "an RDMA device");
	int error;

	if (!context) return NULL;
	snprintf(context->name, sizeof(context->name), "%s", v->get_device_name(device));
	context->verbs = v;
	pthread_mutex_init(&context->cache.lock, NULL);
	errno = 0;
	context->ibv = v->open_device(device);
	if (!context->ibv) {
		error = errno ? errno : EIO;
		warn_unopenable(context->name, error);
		note_fault(seen, bytes, "%s can't be opened: %s (in a container: docker run --device=/dev/infiniband)", context->name, strerror(error));
		goto free_context;
	}
	error = v->query_device(context->ibv, &context->attr);
	if (error) {
		TP_WARN("NET/IB : Unable to query device %s: %s", context->name, strerror(error));
		note_fault(seen, bytes, "%s can't be queried: %s", context->name, strerror(error));
		goto close_device;
	}
	context->pd = v->alloc_pd(context->ibv);
	if (!context->pd) {
		error = errno ? errno : ENOMEM;
		TP_WARN("NET/IB : %s : Call to ibv_alloc_pd failed: %s", context->name, strerror(error));
		note_fault(seen, bytes, "%s has no protection domain: %s", context->name, strerror(error));
		goto close_device;
	}
	context->guid = v->get_device_guid ? be64toh(v->get_device_guid(device)) : be64toh(context->attr.sys_image_guid);
	context->relaxed = params->relaxed == 1 || (params->relaxed == 2 && v->reg_mr_iova2 != NULL);
	read_pci_path(context->name, context->pci_path, sizeof(context->pci_path));
	context->numa = read_numa(context->name);
	return context;
close_device:
	v->close_device(context->ibv);
free_context:
	pthread_mutex_destroy(&context->cache.lock);
	free(context);
	return NULL;
}

static void close_context(struct tp_ib_context *context)
{
	if (context->pd) context->verbs->dealloc_pd(context->pd);
	context->verbs->close_device(context->ibv);
	pthread_mutex_destroy(&context->cache.lock);
	free(context);
}

/* What speaks against this port, or NULL. */
static const char *port_fault(const struct ibv_port_attr *attr, char *text, size_t bytes)
{
	if (attr->state != IBV_PORT_ACTIVE) {
		bool ethernet = attr->link_layer == IBV_LINK_LAYER_ETHERNET;
		snprintf(text, bytes, "is %s, not ACTIVE: %s", tp_verbs_port_state_name(attr->state), ethernet ? "is its interface up (ip link), is its cable in?"
			: attr->state == IBV_PORT_DOWN ? "look at its cable and the switch" : "does a subnet manager (opensm) run?");
		return text;
	}
	if (attr->link_layer != IBV_LINK_LAYER_INFINIBAND && attr->link_layer != IBV_LINK_LAYER_ETHERNET) return "is neither InfiniBand nor Ethernet";
	return NULL;
}

static void add_ports(struct tp_ib_context *context, const struct tp_ib_hca_list *list, char *seen, size_t bytes)
{
	for (int number = 1; number <= context->attr.phys_port_cnt && ib.nports < TP_IB_MAX_PORTS; number++) {
		struct tp_ib_port *port = &ib.ports[ib.nports];
		struct ibv_port_attr attr;
		uint32_t mbps;
		char text[128];
		const char *fault;
		int error;

		if (!tp_ib_hca_allows(list, context->name, number)) continue;
		error = tp_verbs_query_port(context->verbs, context->ibv, (uint8_t)number, &attr, &mbps);
		if (error) {
			TP_WARN("NET/IB : Unable to query port %s:%d: %s", context->name, number, strerror(error));
			note_fault(seen, bytes, "%s:%d can't be queried: %s", context->name, number, strerror(error));
			continue;
		}
		fault = port_fault(&attr, text, sizeof(text));
		if (fault) {
			TP_INFO(TP_INIT | TP_NET, "NET/IB : %s:%d %s", context->name, number, fault);
			note_fault(seen, bytes, "%s:%d %s", context->name, number, fault);
			continue;
		}
		*port = (struct tp_ib_port){ .context = context, .number = (uint8_t)number, .attr = attr, .mbps = mbps ? mbps : 10000, .state = (uint32_t)attr.state };
		snprintf(port->text, sizeof(port->text), "%.60s:%d", context->name, number);
		ib.nports++;
	}
}

/* As the list names them; else as the library lists the cards. */
static void sort_ports(const struct tp_ib_hca_list *list)
{
	int places[TP_IB_MAX_PORTS];

	for (int i = 0; i < ib.nports; i++) {
		struct tp_ib_port port = ib.ports[i];
		int place = tp_ib_hca_place(list, port.context->name, port.number), at = i;
		for (; at > 0 && places[at - 1] > place; at--) {
			ib.ports[at] = ib.ports[at - 1];
			places[at] = places[at - 1];
		}
		ib.ports[at] = port;
		places[at] = place;
	}
}

/* A list may be meant for many hosts, of which not all have each device; or a name is wrong. */
static void tell_unknown(const struct tp_ib_hca_list *list, struct ibv_device **devices, int count, const char *names)
{
	for (int item = 0; item < list->count; item++) {
		bool known = false;
		for (int i = 0; i < count && !known; i++) known = tp_ib_hca_names(list, item, ib.verbs->get_device_name(devices[i]));
		if (!known) TP_INFO(TP_INIT | TP_NET, "NET/IB : NCCL_IB_HCA: there is no device %s%s; there are: %s", list->items[item].name, list->exact ? "" : "…", names);
	}
}

static void find_ports(const struct tp_ib_params *params, const struct tp_ib_hca_list *list)
{
	int count = 0;
	char seen[400] = "", names[200] = "";
	struct ibv_device **devices = ib.verbs->get_device_list(&count);

	for (int i = 0; devices && i < count && ib.ncontexts < TP_IB_MAX_PORTS; i++) {
		const char *name = ib.verbs->get_device_name(devices[i]);
		bool any = false;
		int before = ib.nports;

		note_fault(names, sizeof(names), "%s", name);
		for (int port = 1; port <= 4 && !any; port++) any = tp_ib_hca_allows(list, name, port);
		struct tp_ib_context *context = any ? open_context(params, devices[i], seen, sizeof(seen)) : NULL;
		if (!context) continue;
		add_ports(context, list, seen, sizeof(seen));
		if (ib.nports == before) {
			close_context(context);
			continue;
		}
		ib.contexts[ib.ncontexts++] = context;
	}
	if (devices && ib.nports > 0) tell_unknown(list, devices, count, names);
	if (devices) ib.verbs->free_device_list(devices);
	sort_ports(list);
	if (ib.nports > 0) return;
	if (seen[0]) {
		snprintf(ib.why, sizeof(ib.why), "no port can be used: %s", seen);
		return;
	}
	if (count > 0) {
		snprintf(ib.why, sizeof(ib.why), "NCCL_IB_HCA=%.200s allows no port of the devices that there are: %s", params->hca ? params->hca : "", names);
		return;
	}
	hardware_names(names, sizeof(names));
	if (names[0]) snprintf(ib.why, sizeof(ib.why), "%s shows no device, but the kernel has %.100s: is /dev/infiniband missing in this container, or a provider "
		"(Debian: ibverbs-providers)?", ib.verbs->file, names);
	else snprintf(ib.why, sizeof(ib.why), "No device found by %s, nor does /sys/class/infiniband show one", ib.verbs->file);
}

/* The software card stands in for hardware only where somebody wants it to. */
static bool card_is_wanted(const struct tp_ib_hca_list *list)
{
	const char *note = getenv("TELPHER_VERBS_NOTE");

	return ib.asked || (note && *note) || tp_ib_hca_asks_for_card(list);
}

static void log_ports(void)
{
	char line[1024] = "";
	size_t used = 0;

	for (int i = 0; i < ib.ndevices && used < sizeof(line); i++)
		used += (size_t)snprintf(line + used, sizeof(line) - used, " [%d]%s/%s", i, ib.devices[i].text,
			ib.devices[i].ports[0]->attr.link_layer == IBV_LINK_LAYER_INFINIBAND ? "IB" : "RoCE");
	TP_INFO(TP_INIT | TP_NET, "NET/IB : Using%s%s %s", line, ib.verbs->software ? " (Telpher's software card)" : "", ib.contexts[0]->relaxed ? "[RO]" : "[no RO]");
}

static void close_all(void)
{
	for (int i = 0; i < ib.ncontexts; i++) close_context(ib.contexts[i]);
	ib.ncontexts = ib.nports = ib.ndevices = 0;
}

static void try_all(void)
{
	struct tp_ib_params params;
	struct tp_ib_hca_list list;
	char why[256];

	ib.tried = true;
	ib.why[0] = 0;
	tp_ib_params_read(&params);
	if (params.disable) {
		snprintf(ib.why, sizeof(ib.why), "it is switched off by NCCL_IB_DISABLE=1");
		return;
	}
	if (!tp_ib_hca_parse(params.hca, &list, why, sizeof(why))) {
		snprintf(ib.why, sizeof(ib.why), "NCCL_IB_HCA: %s", why);
		TP_WARN("NET/IB : %s", ib.why);
		return;
	}
	ib.verbs = tp_verbs_open(!tp_ib_hca_asks_for_card(&list) ? TP_VERBS_FOUND : params.connect == TP_IB_BY_RDMA_CM ? TP_VERBS_CARD_FIRST : TP_VERBS_CARD, ib.why, sizeof(ib.why));
	if (!ib.verbs) return;
	if (ib.verbs->software && !card_is_wanted(&list)) {
		snprintf(ib.why, sizeof(ib.why), "%s is Telpher's software card, which is used only where it is asked for: `telpher verbs run`, NCCL_NET=IB or "
			"NCCL_IB_HCA=telpher0", ib.verbs->file);
		return;
	}
	if (ib.verbs->fork_init) ib.verbs->fork_init();
	find_ports(&params, &list);
	/* Asked for by name, it is not to be had otherwise in silence. */
	if (ib.nports > 0 && params.connect == TP_IB_BY_RDMA_CM && !tp_ib_cm_present(ib.verbs, ib.why, sizeof(ib.why))) {
		TP_WARN("NET/IB : %s", ib.why);
		close_all();
		return;
	}
	ib.ndevices = tp_ib_merge(&params, ib.ports, ib.nports, ib.devices);
	if (ib.nports > 0) log_ports();
}

bool tp_ib_present(bool asked, char *why, size_t bytes)
{
	bool there;

	pthread_mutex_lock(&ib.lock);
	/* Asked for now, and not before: what was refused as unwanted is looked at again. */
	if (ib.tried && asked && !ib.asked && ib.nports == 0) ib.tried = false;
	ib.asked |= asked;
	if (!ib.tried) try_all();
	there = ib.nports > 0;
	snprintf(why, bytes, "%s", ib.why);
	pthread_mutex_unlock(&ib.lock);
	return there;
}

ncclResult_t tp_ib_init(void)
{
	char why[512];

	if (!tp_ib_present(false, why, sizeof(why))) return TP_FAIL(ncclInvalidUsage, "NET/IB : %s", why);
	TP_TRY(tp_ib_watch_start());
	pthread_mutex_lock(&ib.lock);
	for (int i = 0; i < ib.ncontexts; i++) tp_ib_watch_port(ib.contexts[i]);
	pthread_mutex_unlock(&ib.lock);
	return ncclSuccess;
}

int tp_ib_port_count(void) { return ib.nports; }

struct tp_ib_port *tp_ib_port(int index) { return index >= 0 && index < ib.nports ? &ib.ports[index] : NULL; }

int tp_ib_device_count(void) { return ib.ndevices; }

struct tp_ib_device *tp_ib_device(int index) { return index >= 0 && index < ib.ndevices ? &ib.devices[index] : NULL; }

bool tp_ib_on_software(void) { return ib.verbs && ib.verbs->software; }

void tp_ib_forget_devices(void)
{
	tp_ib_watch_stop();
	pthread_mutex_lock(&ib.lock);
	close_all();
	ib.tried = ib.asked = false;
	pthread_mutex_unlock(&ib.lock);
}

void tp_ib_forget_after_fork(void)
{
	/* Not closed: the devices are the parent's, and their library's locks may be held by a thread that this process doesn't have. */
	pthread_mutex_init(&ib.lock, NULL);
	ib.ncontexts = ib.nports = ib.ndevices = 0;
	ib.tried = false;
}

bool tp_ib_port_is_active(struct tp_ib_port *port)
{
	struct ibv_port_attr attr;
	uint32_t mbps;

	if (tp_verbs_query_port(port->context->verbs, port->context->ibv, port->number, &attr, &mbps) != 0) return false;
	atomic_store_explicit(&port->state, (uint32_t)attr.state, memory_order_relaxed);
	return attr.state == IBV_PORT_ACTIVE;
}

/* The card of this process: its devices, made once from the parameters, and what fork does to it.
 *
 * A forked child has none of our threads and shares the parent's sockets and key table. It must not use them: all the child
 * inherits is inert (calls on it fail, or only free memory), and what it opens anew is its own. */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "verbs/fault.h"
#include "verbs/gpu.h"
#include "verbs/internal.h"

pthread_mutex_t tp_card_lock = PTHREAD_MUTEX_INITIALIZER;
_Atomic uint32_t tp_card_generation = 1;

static struct tp_device *all_devices;
static int all_count;
static pthread_once_t devices_once = PTHREAD_ONCE_INIT;

/* The number of devices that text asks for: a count, or as many as it has names. */
static int count_devices(const char *text)
{
	char *end;
	long count = strtol(text, &end, 10);
	if (end != text && *end == 0) {
		if (count >= 0 && count <= TP_CARD_DEVICES)
			return (int)count;
		TP_WARN("TELPHER_VERBS_DEVICES is \"%s\": there can be 0 to %d devices; 1 is used", text, TP_CARD_DEVICES);
		return 1;
	}
	int names = 1;
	for (const char *p = text; *p; p++)
		names += *p == ',';
	if (names <= TP_CARD_DEVICES)
		return names;
	TP_WARN("TELPHER_VERBS_DEVICES names %d devices: there can be %d; the first %d are used", names, TP_CARD_DEVICES, TP_CARD_DEVICES);
	return TP_CARD_DEVICES;
}

static void name_device(struct tp_device *device, const char *text, int index)
{
	struct ibv_device *ibv = &device->ibv;
	char *end;
	if ((strtol(text, &end, 10), *end != 0) && tp_params_item(text, index, ibv->name, sizeof(ibv->name))) {
		for (char *p = ibv->name; *p; p++)
			if (!isalnum((unsigned char)*p) && !strchr("_-.", *p))
				*p = '_';
	} else {
		snprintf(ibv->name, sizeof(ibv->name), "telpher%d", index);
	}
	snprintf(ibv->dev_name, sizeof(ibv->dev_name), "uverbs%d", index);
	snprintf(ibv->dev_path, sizeof(ibv->dev_path), "/sys/class/infiniband_verbs/uverbs%d", index);
	snprintf(ibv->ibdev_path, sizeof(ibv->ibdev_path), "/sys/class/infiniband/%.64s", ibv->name);
	ibv->node_type = IBV_NODE_CA;
	ibv->transport_type = IBV_TRANSPORT_IB;
}

static void make_device(struct tp_device *device, const struct tp_card_params *params, int index, int count)
{
	char text[32];
	device->index = index;
	device->nports = params->ports;
	name_device(device, params->devices, index);
	uint64_t guid = tp_hash64(&index, sizeof(index), tp_host_hash());
	/* A locally administered EUI-64: its first byte's low bits are 2. */
	((uint8_t *)&guid)[0] = (uint8_t)((((uint8_t *)&guid)[0] & 0xfc) | 2);
	device->guid = guid;
	if (!tp_params_item(params->pci, index, device->pci, sizeof(device->pci)))
		snprintf(device->pci, sizeof(device->pci), "0000:%02x:00.0", 0xc0 + index);
	device->numa = tp_params_item(params->numa, index, text, sizeof(text)) ? atoi(text) : -1;
	for (int i = 0; i < device->nports; i++) {
		struct tp_port *port = &device->ports[i];
		port->device = device;
		port->number = (uint8_t)(i + 1);
		port->rate_gbps = (uint32_t)params->rate_gbps;
		port->counters = tp_counters_of(index, i + 1);
		pthread_rwlock_init(&port->gid_lock, NULL);
		tp_gid_fill(port, params, index * device->nports + i, count * device->nports);
	}
}

static void fork_child(void)
{
	atomic_fetch_add_explicit(&tp_card_generation, 1, memory_order_relaxed);
	pthread_mutex_init(&tp_card_lock, NULL);
	tp_key_forget();
	tp_gpu_forget();
	tp_qp_forget();
	tp_srq_forget();
	tp_progress_forget();
	tp_gid_watch_forget();
	tp_mw_forget();
	tp_mcast_forget();
	for (int i = 0; i < all_count; i++)
		for (int p = 0; p < all_devices[i].nports; p++)
			pthread_rwlock_init(&all_devices[i].ports[p].gid_lock, NULL);
}
static void fork_prepare(void) { pthread_mutex_lock(&tp_card_lock); }
static void fork_parent(void) { pthread_mutex_unlock(&tp_card_lock); }

static void make_devices(void)
{
	struct tp_card_params params;
	tp_params_read(&params);
	tp_fault_objects_from_environment();
	pthread_atfork(fork_prepare, fork_parent, fork_child);
	if (!params.hide_real)
		tp_real_warn();
	int count = count_devices(params.devices);
	struct tp_device *devices = count ? tp_alloc((size_t)count, sizeof(*devices), "the software card's devices") : NULL;
	if (!devices)
		return;
	for (int i = 0; i < count; i++)
		make_device(&devices[i], &params, i, count);
	all_devices = devices;
	all_count = count;
}

int tp_card_devices(struct tp_device **devices)
{
	pthread_once(&devices_once, make_devices);
	*devices = all_devices;
	return all_count;
}

struct tp_port *tp_card_port(struct ibv_context *context, uint32_t number)
{
	struct tp_device *device = tp_device_of(context);
	return number >= 1 && number <= (uint32_t)device->nports ? &device->ports[number - 1] : NULL;
}

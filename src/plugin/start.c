/* Which network is beneath, its devices, and the host's logger; see plugin.h. */
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include "plugin/plugin.h"

/* Their numbers are the same. */
_Static_assert((int)TP_NET_HOST == TP_ABI_PTR_HOST && (int)TP_NET_CUDA == TP_ABI_PTR_CUDA && (int)TP_NET_DMABUF == TP_ABI_PTR_DMABUF, "kinds of memory");

static struct tp_param export_params[] = {
	{ .name = "TELPHER_PLUGIN_NET", .kind = TP_PARAM_STRING,
		.doc = "network that libnccl-net-telpher.so gives NCCL, IB or Socket; init fails where it can't be used; unset: the best that can be" },
};
TP_PARAM_TABLE("plugin", export_params)

static const struct tp_net_ops *const networks[] = {
#ifdef TELPHER_IB
	&tp_net_ib,
#endif
	&tp_net_socket,
};

static struct {
	pthread_mutex_t lock;
	const struct tp_net_ops *ops;
	int ndevs;
	struct tp_net_properties properties[TP_EXPORT_MAX_DEVICES];     /* NCCL keeps pointers to names */
} plugin = { .lock = PTHREAD_MUTEX_INITIALIZER };

TP_FORK_RENEW(plugin.lock)                      /* opening a network may take long */

static _Atomic(tp_abi_logger) logger;           /* a function's address: nothing else is published with it */

/* Numbers of levels and subsystems are NCCL's own. */
static void to_logger(enum tp_log_level level, uint32_t subsys, const char *file, int line, const char *text)
{
	tp_abi_logger log = atomic_load_explicit(&logger, memory_order_relaxed);

	if (log) log((int)level, level == TP_LOG_WARN ? ~0ul : subsys, file, line, "%s", text);
}

const struct tp_net_ops *tp_export_ops(void) { return plugin.ops; }

static ncclResult_t take_devices(const struct tp_net_ops *ops)
{
	int count = 0;

	TP_TRY(ops->devices(&count));
	if (count < 1) return TP_FAIL(ncclInvalidUsage, "NET/Telpher : network %s has no device", ops->name);
	count = TP_MIN(count, TP_EXPORT_MAX_DEVICES);
	for (int dev = 0; dev < count; dev++) TP_TRY(ops->properties(dev, &plugin.properties[dev]));
	plugin.ndevs = count;
	plugin.ops = ops;
	TP_INFO(TP_INIT | TP_NET, "NET/Telpher : Using network %s", ops->name);
	return ncclSuccess;
}

static ncclResult_t choose_locked(void)
{
	const char *asked = tp_param_string(&export_params[0]);
	char why[512] = "it is unknown, or this library was built without it";

	for (size_t i = 0; i < TP_ARRAY_LEN(networks); i++) {
		const struct tp_net_ops *ops = networks[i];
		if (asked && *asked && strcasecmp(asked, ops->name) != 0) continue;
		if (ops->present && !ops->present(asked && *asked, why, sizeof(why))) {
			TP_INFO(TP_INIT | TP_NET, "NET/Telpher : network %s can't be used: %s", ops->name, why);
			continue;
		}
		if (ops->init() == ncclSuccess && take_devices(ops) == ncclSuccess) return ncclSuccess;
		snprintf(why, sizeof(why), "%.511s", tp_log_last_error());
	}
	if (asked && *asked) return TP_FAIL(ncclInvalidUsage, "TELPHER_PLUGIN_NET=%s: that network can't be used here: %s", asked, why);
	return TP_FAIL(ncclInvalidUsage, "NET/Telpher : no network can be used here: %s", why);
}

ncclResult_t tp_export_start(tp_abi_logger log)
{
	ncclResult_t result = ncclSuccess;

	atomic_store_explicit(&logger, log, memory_order_relaxed);
	if (log) tp_log_divert(to_logger);
	pthread_mutex_lock(&plugin.lock);
	if (!plugin.ops) result = choose_locked();
	pthread_mutex_unlock(&plugin.lock);
	return result;
}

ncclResult_t tp_export_devices(int *count)
{
	if (!plugin.ops) return TP_FAIL(ncclInternalError, "NET/Telpher : devices was called before init, or init failed");
	*count = plugin.ndevs;
	return ncclSuccess;
}

uint32_t tp_export_memory(int dev) { return plugin.properties[dev].memory; }

ncclResult_t tp_export_properties(int dev, struct tp_abi_properties_v11 *out)
{
	struct tp_net_properties *p = &plugin.properties[dev];

	if (!plugin.ops || dev < 0 || dev >= plugin.ndevs) return TP_FAIL(ncclInvalidArgument, "NET/Telpher : there is no device %d (there are %d)", dev, plugin.ndevs);
	*out = (struct tp_abi_properties_v11){ .name = p->name, .pci_path = p->pci_path[0] ? p->pci_path : NULL, .guid = p->guid, .memory = (int)p->memory & (TP_ABI_PTR_HOST | TP_ABI_PTR_CUDA | TP_ABI_PTR_DMABUF),
		.speed_mbps = (int)p->speed_mbps, .port = (int)p->port, .latency_us = p->latency_us, .max_comms = (int)TP_MIN(p->max_comms, (uint32_t)INT_MAX),
		.max_recvs = (int)p->max_recvs, .device_type = TP_ABI_DEVICE_HOST, .parts = { .ndevs = 1, .devs = { dev } }, .max_multi_requests = 1 };
	out->max_p2p_bytes = out->max_coll_bytes = p->max_bytes ? TP_MIN(p->max_bytes, TP_EXPORT_MAX_BYTES) : TP_EXPORT_MAX_BYTES;
	return ncclSuccess;
}

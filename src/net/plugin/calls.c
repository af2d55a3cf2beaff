/* One function a call, whatever the version of the plug-in's table, and what a plug-in says of itself, checked. */
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "net/plugin/plugin.h"

#define UNKNOWN_SPEED_MBPS 10000
#define MAX_SPEED_MBPS 100000000u

static _Thread_local bool quiet_now;
void tp_plug_be_quiet(bool quiet) { quiet_now = quiet; }

/* The plug-in's lines as if they were ours. */
static void log_line(int level, unsigned long flags, const char *file, int line, const char *format, ...) __attribute__((format(printf, 5, 6)));
static void log_line(int level, unsigned long flags, const char *file, int line, const char *format, ...)
{
	const struct tp_plug *plug = tp_plug_current();
	uint32_t subsys = (uint32_t)flags ? (uint32_t)flags : TP_NET;
	char text[2048];
	va_list args;

	if (level == TP_LOG_WARN && quiet_now) {
		level = TP_LOG_INFO;
		subsys = TP_NET;
	}
	if (level <= TP_LOG_NONE || level > TP_LOG_TRACE || !format) return;
	if (level != TP_LOG_WARN && !tp_log_wants((enum tp_log_level)level, subsys)) return;
	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	tp_log_write((enum tp_log_level)level, level == TP_LOG_WARN ? ~0u : subsys, file ? file : "?", line, plug ? plug->name : "plug-in", "%s", text);
}

/* Nobody profiles; plug-ins call it all the same. */
static ncclResult_t no_profiler(void **event, int type, void *parent, int64_t plugin, void *data)
{
	(void)event, (void)type, (void)parent, (void)plugin, (void)data;
	return ncclSuccess;
}

static struct tp_abi_config config = { .traffic_class = TP_ABI_TRAFFIC_CLASS_UNSET };

ncclResult_t tp_plug_failed(const struct tp_plug *plug, const char *function, const char *which, ncclResult_t result)
{
	if (result > ncclSuccess && result <= ncclRemoteError)
		return TP_FAIL(result, "NET/Plugin: %s (v%d, %s): %s%s%s gives %s", plug->name, plug->version, plug->file, function, *which ? " for " : "", which, tp_result_name(result));
	return TP_FAIL(ncclInternalError, "NET/Plugin: %s (v%d, %s): %s%s%s gives %d, which is no result of NCCL's", plug->name, plug->version, plug->file, function,
		*which ? " for " : "", which, (int)result);
}

/* Takes what the versions have in common; gives which needed one is missing. */
#define COMPLETE(table_) do { \
	plug->accept = (table_)->accept; \
	plug->reg_mr = (table_)->reg_mr; \
	plug->reg_mr_dmabuf = (table_)->reg_mr_dmabuf; \
	plug->dereg_mr = (table_)->dereg_mr; \
	plug->iflush = (table_)->iflush; \
	plug->test = (table_)->test; \
	plug->close_send = (table_)->close_send; \
	plug->close_recv = (table_)->close_recv; \
	plug->close_listen = (table_)->close_listen; \
	if (!(table_)->devices) return "devices"; \
	if (!(table_)->properties) return "getProperties"; \
	if (!(table_)->listen) return "listen"; \
	if (!(table_)->connect) return "connect"; \
	if (!(table_)->accept) return "accept"; \
	if (!(table_)->reg_mr) return "regMr"; \
	if (!(table_)->dereg_mr) return "deregMr"; \
	if (!(table_)->isend) return "isend"; \
	if (!(table_)->irecv) return "irecv"; \
	if (!(table_)->test) return "test"; \
	if (!(table_)->close_send) return "closeSend"; \
	if (!(table_)->close_recv) return "closeRecv"; \
	if (!(table_)->close_listen) return "closeListen"; \
} while (0)

static const char *missing_at_first(const char *name, bool init)
{
	if (!name || !name[0]) return "name";
	return init ? NULL : "init";
}

const char *tp_plug_bind(struct tp_plug *plug, const void *table, int version)
{
	plug->table.any = table;
	plug->version = version;
	switch (version) {
	case 8: return missing_at_first(plug->table.v8->name, plug->table.v8->init != NULL);
	case 9: return missing_at_first(plug->table.v9->name, plug->table.v9->init != NULL);
	case 10: return missing_at_first(plug->table.v10->name, plug->table.v10->init != NULL);
	default: return missing_at_first(plug->table.v11->name, plug->table.v11->init != NULL);
	}
}

static const char *complete(struct tp_plug *plug)
{
	switch (plug->version) {
	case 8: COMPLETE(plug->table.v8); break;
	case 9: COMPLETE(plug->table.v9); break;
	case 10: COMPLETE(plug->table.v10); break;
	default: COMPLETE(plug->table.v11); break;
	}
	return NULL;
}

static const char *name_now(const struct tp_plug *plug)
{
	switch (plug->version) {
	case 8: return plug->table.v8->name;
	case 9: return plug->table.v9->name;
	case 10: return plug->table.v10->name;
	default: return plug->table.v11->name;
	}
}

ncclResult_t tp_plug_complete(struct tp_plug *plug)
{
	const char *missing = complete(plug);

	if (!missing) {
		const char *name = name_now(plug);
		if (name && name[0] && !tp_plug_is_taken(name)) snprintf(plug->name, sizeof(plug->name), "%s", name);
		return ncclSuccess;
	}
	return TP_FAIL(ncclInvalidUsage, "NET/Plugin: %s (%s): the table ncclNetPlugin_v%d has no %s (NULL)", plug->name, plug->file, plug->version, missing);
}

ncclResult_t tp_plug_init(struct tp_plug *plug, uint64_t comm_id, void **context)
{
	ncclResult_t result;

	*context = NULL;
	switch (plug->version) {
	case 8: result = plug->table.v8->init(log_line); break;
	case 9: result = plug->table.v9->init(log_line); break;
	case 10: result = plug->table.v10->init(log_line, no_profiler); break;
	default: result = plug->table.v11->init(context, comm_id, &config, log_line, no_profiler); break;
	}
	return result == ncclSuccess ? ncclSuccess : tp_plug_failed(plug, "init", "", result);
}

void tp_plug_finalize(struct tp_plug *plug, void *context)
{
	ncclResult_t result;

	if (plug->version < 11 || !plug->table.v11->finalize) return;
	result = plug->table.v11->finalize(context);
	if (result != ncclSuccess) (void)tp_plug_failed(plug, "finalize", "", result);
}

static ncclResult_t get_properties(struct tp_plug *plug, int dev, struct tp_abi_properties_v11 *out)
{
	struct tp_abi_properties_v8 v8;
	struct tp_abi_properties_v9 v9;
	ncclResult_t result;
	char which[32];

	memset(out, 0, sizeof(*out));
	memset(&v8, 0, sizeof(v8));
	memset(&v9, 0, sizeof(v9));
	switch (plug->version) {
	case 8: result = plug->table.v8->properties(dev, &v8); break;
	case 9: result = plug->table.v9->properties(dev, &v9); break;
	case 10: result = plug->table.v10->properties(dev, &v9); break;
	default: result = plug->table.v11->properties(dev, out); break;
	}
	snprintf(which, sizeof(which), "device %d", dev);
	if (result != ncclSuccess) return tp_plug_failed(plug, "getProperties", which, result);
#define TAKE(from) do { \
	out->name = (from).name, out->pci_path = (from).pci_path, out->guid = (from).guid, out->memory = (from).memory; \
	out->speed_mbps = (from).speed_mbps, out->port = (from).port, out->latency_us = (from).latency_us; \
	out->max_comms = (from).max_comms, out->max_recvs = (from).max_recvs; \
	out->device_type = (from).device_type, out->device_version = (from).device_version; \
} while (0)
	if (plug->version == 8) {
		TAKE(v8);
		out->max_p2p_bytes = INT_MAX;
	} else if (plug->version < 11) {
		TAKE(v9);
		out->max_p2p_bytes = v9.max_p2p_bytes;
	}
#undef TAKE
	return ncclSuccess;
}

/* What can't be used at all is an error; what is odd is put right with a warning. */
static ncclResult_t check_properties(struct tp_plug *plug, int dev, const struct tp_abi_properties_v11 *in)
{
	struct tp_net_properties *p = &plug->properties[dev];

	memset(p, 0, sizeof(*p));
	snprintf(p->name, sizeof(p->name), "%.31s", in->name ? in->name : "");
	if (!p->name[0]) snprintf(p->name, sizeof(p->name), "%.20s%d", plug->name, dev);
	snprintf(p->pci_path, sizeof(p->pci_path), "%.127s", in->pci_path ? in->pci_path : "");
	if (in->device_type != TP_ABI_DEVICE_HOST)
		return TP_FAIL(ncclInvalidUsage, "NET/Plugin: %s: device %d (%s) is of type %d, whose data a GPU kernel has to unpack; only type 0 (host) can be used", plug->name,
			dev, p->name, in->device_type);
	if (!(in->memory & TP_ABI_PTR_HOST))
		return TP_FAIL(ncclInvalidUsage, "NET/Plugin: %s: device %d (%s) takes no host memory (ptrSupport 0x%x; 0x1 is host memory)", plug->name, dev, p->name,
			(unsigned)in->memory);
	if (in->max_recvs < 1)
		return TP_FAIL(ncclInvalidUsage, "NET/Plugin: %s: device %d (%s) takes %d receives at once (maxRecvs); 1 is the least", plug->name, dev, p->name, in->max_recvs);
	if (in->max_comms < 1)
		return TP_FAIL(ncclInvalidUsage, "NET/Plugin: %s: device %d (%s) takes %d connections (maxComms)", plug->name, dev, p->name, in->max_comms);
	if (in->max_p2p_bytes < 1)
		return TP_FAIL(ncclInvalidUsage, "NET/Plugin: %s: device %d (%s) takes messages of no byte (maxP2pBytes)", plug->name, dev, p->name);
	p->guid = in->guid;
	p->memory = (uint32_t)in->memory & (TP_NET_HOST | TP_NET_CUDA | TP_NET_DMABUF);
	if (!plug->reg_mr_dmabuf) p->memory &= ~(uint32_t)TP_NET_DMABUF;
	p->speed_mbps = (uint32_t)in->speed_mbps;
	if (in->speed_mbps < 1 || p->speed_mbps > MAX_SPEED_MBPS) {
		p->speed_mbps = UNKNOWN_SPEED_MBPS;
		TP_WARN("NET/Plugin: %s: device %d (%s) has a speed of %d Mb/s; %d are assumed", plug->name, dev, p->name, in->speed_mbps, UNKNOWN_SPEED_MBPS);
	}
	p->port = (uint32_t)TP_MAX(in->port, 0);
	p->latency_us = isfinite(in->latency_us) && in->latency_us >= 0 ? in->latency_us : 0;
	p->max_comms = (uint32_t)in->max_comms;
	p->max_recvs = (uint32_t)TP_MIN(in->max_recvs, TP_NET_MAX_RECVS);
	p->max_bytes = in->max_p2p_bytes;
	return ncclSuccess;
}

ncclResult_t tp_plug_devices(struct tp_plug *plug)
{
	struct tp_abi_properties_v11 properties;
	char line[512];
	size_t used = 0;
	int count = 0;
	ncclResult_t result;

	switch (plug->version) {
	case 8: result = plug->table.v8->devices(&count); break;
	case 9: result = plug->table.v9->devices(&count); break;
	case 10: result = plug->table.v10->devices(&count); break;
	default: result = plug->table.v11->devices(&count); break;
	}
	if (result != ncclSuccess) return tp_plug_failed(plug, "devices", "", result);
	if (count < 1) return TP_FAIL(ncclInvalidUsage, "NET/Plugin: %s (%s) has %d devices", plug->name, plug->file, count);
	if (count > TP_PLUG_MAX_DEVICES)
		return TP_FAIL(ncclInvalidUsage, "NET/Plugin: %s (%s) has %d devices; at most %d can be used", plug->name, plug->file, count, TP_PLUG_MAX_DEVICES);
	for (int dev = 0; dev < count; dev++) {
		TP_TRY(get_properties(plug, dev, &properties));
		TP_TRY(check_properties(plug, dev, &properties));
		if (used < sizeof(line)) used += (size_t)snprintf(line + used, sizeof(line) - used, " [%d]%s:%u", dev, plug->properties[dev].name, plug->properties[dev].port);
	}
	plug->ndevs = count;
	TP_INFO(TP_INIT | TP_NET, "NET/%s : Using%s", plug->name, line);
	return ncclSuccess;
}

ncclResult_t tp_plug_call_listen(struct tp_plug *plug, void *context, int dev, void *handle, void **listener)
{
	switch (plug->version) {
	case 8: return plug->table.v8->listen(dev, handle, listener);
	case 9: return plug->table.v9->listen(dev, handle, listener);
	case 10: return plug->table.v10->listen(dev, handle, listener);
	default: return plug->table.v11->listen(context, dev, handle, listener);
	}
}

ncclResult_t tp_plug_call_connect(struct tp_plug *plug, void *context, int dev, void *handle, void **send_comm, struct tp_abi_device_handle **device)
{
	switch (plug->version) {
	case 8: return plug->table.v8->connect(dev, handle, send_comm, device);
	case 9: return plug->table.v9->connect(dev, handle, send_comm, device);
	case 10: return plug->table.v10->connect(dev, &config, handle, send_comm, device);
	default: return plug->table.v11->connect(context, dev, handle, send_comm, device);
	}
}

/* Their interface knows no const. */
ncclResult_t tp_plug_call_isend(struct tp_plug *plug, void *comm, const void *data, size_t bytes, int tag, void *mhandle, void **request)
{
	void *from = (void *)(uintptr_t)data;

	switch (plug->version) {
	case 8: return plug->table.v8->isend(comm, from, (int)bytes, tag, mhandle, request);
	case 9: return plug->table.v9->isend(comm, from, bytes, tag, mhandle, request);
	case 10: return plug->table.v10->isend(comm, from, bytes, tag, mhandle, NULL, request);
	default: return plug->table.v11->isend(comm, from, bytes, tag, mhandle, NULL, request);
	}
}

/* They may keep none of the arrays, but may write to them. */
ncclResult_t tp_plug_call_irecv(struct tp_plug *plug, void *comm, int n, void *const *data, const size_t *bytes, const int *tags, void *const *mhandles,
	void **request)
{
	void *at[TP_NET_MAX_RECVS], *memory[TP_NET_MAX_RECVS], *events[TP_NET_MAX_RECVS] = { NULL };
	size_t sizes[TP_NET_MAX_RECVS];
	int small[TP_NET_MAX_RECVS], tag[TP_NET_MAX_RECVS];

	for (int i = 0; i < n; i++) {
		at[i] = data[i];
		memory[i] = mhandles ? mhandles[i] : NULL;
		sizes[i] = bytes[i];
		small[i] = (int)bytes[i];
		tag[i] = tags[i];
	}
	switch (plug->version) {
	case 8: return plug->table.v8->irecv(comm, n, at, small, tag, memory, request);
	case 9: return plug->table.v9->irecv(comm, n, at, sizes, tag, memory, request);
	case 10: return plug->table.v10->irecv(comm, n, at, sizes, tag, memory, events, request);
	default: return plug->table.v11->irecv(comm, n, at, sizes, tag, memory, events, request);
	}
}

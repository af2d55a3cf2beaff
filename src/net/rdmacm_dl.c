/* Opening librdmacm, and words for its events; see rdmacm_dl.h. */
#include <dlfcn.h>
#include <libgen.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/fork.h"
#include "net/rdmacm_dl.h"

static struct tp_param rdmacm_dl_params[] = {
	{ .name = "TELPHER_IB_RDMACM_LIB", .kind = TP_PARAM_STRING,
		.doc = "file to open as librdmacm, for TELPHER_IB_CONNECT=rdma_cm; unset: librdmacm.so.1, then librdmacm.so; beside the software card its own" },
};
TP_PARAM_TABLE("ib", rdmacm_dl_params)

static const struct { const char *name; size_t place; } symbols[] = {
#define NEEDED(field) { "rdma_" #field, offsetof(struct tp_rdmacm, field) }
	NEEDED(create_event_channel), NEEDED(destroy_event_channel), NEEDED(get_cm_event), NEEDED(ack_cm_event), NEEDED(create_id), NEEDED(destroy_id),
	NEEDED(set_option), NEEDED(bind_addr), NEEDED(listen), NEEDED(get_src_port), NEEDED(resolve_addr), NEEDED(resolve_route), NEEDED(connect), NEEDED(accept),
	NEEDED(reject), NEEDED(establish), NEEDED(init_qp_attr),
#undef NEEDED
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
TP_FORK_RENEW(lock)                    /* the loader runs under it, and what it loads */
static struct tp_rdmacm opened;         /* file is empty: not yet */

static bool open_file(const char *file, char *why, size_t bytes)
{
	void *library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
	struct tp_rdmacm r = { 0 };
	Dl_info info;

	if (!library) {
		const char *error = dlerror();
		snprintf(why, bytes, "%s", error ? error : file);
		return false;
	}
	for (size_t i = 0; i < TP_ARRAY_LEN(symbols); i++) {
		void *at = dlsym(library, symbols[i].name);
		if (!at) {
			snprintf(why, bytes, "%s has no %s: it is not librdmacm, or older than rdma-core 21 (Debian and Ubuntu: install a newer librdmacm1)", file, symbols[i].name);
			dlclose(library);
			return false;
		}
		memcpy((char *)&r + symbols[i].place, &at, sizeof(at));
	}
	snprintf(r.file, sizeof(r.file), "%s", dladdr(*(void **)&r.create_id, &info) && info.dli_fname ? info.dli_fname : file);
	opened = r;
	return true;
}

/* The software card's own lies beside it; no other can speak with it. */
static bool open_beside(const struct tp_verbs *verbs, char *why, size_t bytes)
{
	char path[PATH_MAX + 32], folder[PATH_MAX], reason[256];

	if (!realpath(verbs->file, folder)) {
		snprintf(why, bytes, "where %s lies can't be found out", verbs->file);
		return false;
	}
	snprintf(path, sizeof(path), "%s/librdmacm.so.1", dirname(folder));
	if (open_file(path, reason, sizeof(reason))) return true;
	snprintf(why, bytes, "the software card's librdmacm can't be opened (%s): was it built without librdmacm-dev, or is another libibverbs in this process? `telpher verbs run "
		"PROGRAM` keeps that out", reason);
	return false;
}

static bool open_found(char *why, size_t bytes)
{
	static const char *const files[] = { "librdmacm.so.1", "librdmacm.so" };

	for (size_t i = 0; i < TP_ARRAY_LEN(files); i++)
		if (open_file(files[i], why, bytes)) return true;
	snprintf(why, bytes, "librdmacm.so.1 can't be opened (in a container or on Debian and Ubuntu: install librdmacm1; TELPHER_IB_CONNECT=tcp does without)");
	return false;
}

const struct tp_rdmacm *tp_rdmacm_open(const struct tp_verbs *verbs, char *why, size_t bytes)
{
	const char *asked = tp_param_string(&rdmacm_dl_params[0]);

	pthread_mutex_lock(&lock);
	bool there = opened.file[0];
	if (!there && asked && *asked) there = open_file(asked, why, bytes);
	else if (!there) there = verbs->software ? open_beside(verbs, why, bytes) : open_found(why, bytes);
	pthread_mutex_unlock(&lock);
	return there ? &opened : NULL;
}

/* ---- words ---- */

#define GONE "its process has ended, or has closed the connection"
static const struct { const char *name, *advice; } events[] = {
	[RDMA_CM_EVENT_ADDR_RESOLVED] = { "RDMA_CM_EVENT_ADDR_RESOLVED", "" },
	[RDMA_CM_EVENT_ADDR_ERROR] = { "RDMA_CM_EVENT_ADDR_ERROR", "the kernel found no neighbour at the remote address, or no RDMA device has the local one: are both in one network or routed to each "
		"other (ping -I, ip route get), is the interface up?" },
	[RDMA_CM_EVENT_ROUTE_RESOLVED] = { "RDMA_CM_EVENT_ROUTE_RESOLVED", "" },
	[RDMA_CM_EVENT_ROUTE_ERROR] = { "RDMA_CM_EVENT_ROUTE_ERROR", "no way to the remote port is known: on InfiniBand the subnet manager has none (does it run? sminfo), on RoCE the interface has gone" },
	[RDMA_CM_EVENT_CONNECT_REQUEST] = { "RDMA_CM_EVENT_CONNECT_REQUEST", "" },
	[RDMA_CM_EVENT_CONNECT_RESPONSE] = { "RDMA_CM_EVENT_CONNECT_RESPONSE", "" },
	[RDMA_CM_EVENT_CONNECT_ERROR] = { "RDMA_CM_EVENT_CONNECT_ERROR", "the connection broke while it was made: a queue pair could not be moved, or the peer went on waiting in vain" },
	[RDMA_CM_EVENT_UNREACHABLE] = { "RDMA_CM_EVENT_UNREACHABLE", "the other side doesn't answer: is its port up, do packets of UDP port 4791 get there (firewall, VLAN, MTU), does its process live?" },
	[RDMA_CM_EVENT_REJECTED] = { "RDMA_CM_EVENT_REJECTED", "" },
	[RDMA_CM_EVENT_ESTABLISHED] = { "RDMA_CM_EVENT_ESTABLISHED", "" },
	[RDMA_CM_EVENT_DISCONNECTED] = { "RDMA_CM_EVENT_DISCONNECTED", "the peer's end of it is gone: " GONE },
	[RDMA_CM_EVENT_DEVICE_REMOVAL] = { "RDMA_CM_EVENT_DEVICE_REMOVAL", "the device was taken out of the system (hot-plug, driver reload, reset): look at the kernel log (dmesg)" },
	[RDMA_CM_EVENT_MULTICAST_JOIN] = { "RDMA_CM_EVENT_MULTICAST_JOIN", "" },
	[RDMA_CM_EVENT_MULTICAST_ERROR] = { "RDMA_CM_EVENT_MULTICAST_ERROR", "" },
	[RDMA_CM_EVENT_ADDR_CHANGE] = { "RDMA_CM_EVENT_ADDR_CHANGE", "the interface's hardware address has changed (a bond that failed over?), so that the connection's packets no longer arrive" },
	[RDMA_CM_EVENT_TIMEWAIT_EXIT] = { "RDMA_CM_EVENT_TIMEWAIT_EXIT", "the queue pair's number may be used again" },
};

/* Why a connect request is rejected: of InfiniBand's annex on communication management. */
static const struct { const char *name, *advice; } reasons[] = {
	[1] = { "no queue pair available", "the other card has none left" }, [2] = { "no end-to-end context available", NULL }, [3] = { "no resources available", "the other side's card or kernel has run out of something" },
	[4] = { "timeout", "the other side gave up waiting for an answer" }, [5] = { "unsupported request", "is it rdma_cm that answers there?" }, [6] = { "invalid communication ID", GONE },
	[7] = { "invalid communication instance", NULL }, [8] = { "invalid service ID", "nobody listens there any more: " GONE }, [9] = { "invalid transport service type", NULL },
	[10] = { "stale connection", "the other side takes this queue pair for one of a connection before; it is tried again with a later one" }, [11] = { "the RDC does not exist", NULL },
	[12] = { "primary remote port GID rejected", "the request came to another port than it was for" }, [13] = { "primary remote port LID rejected", "the other side's card doesn't have that address any more" },
	[14] = { "invalid primary SL", "NCCL_IB_SL" }, [15] = { "invalid primary traffic class", "NCCL_IB_TC" }, [16] = { "invalid primary hop limit", NULL }, [17] = { "invalid primary packet rate", NULL },
	[24] = { "port and connection manager redirection", NULL }, [25] = { "port redirection", NULL }, [26] = { "invalid path MTU", "is the MTU the same on both ends?" }, [27] = { "insufficient responder resources", NULL },
	[28] = { "consumer reject", "the program at the other end refuses it" }, [29] = { "RNR retry count rejected", NULL }, [30] = { "duplicate local communication ID", NULL },
	[31] = { "invalid class version", NULL }, [32] = { "invalid flow label", NULL }, [33] = { "invalid alternate flow label", NULL }, [35] = { "the vendor's option isn't supported", NULL },
};

const char *tp_rdmacm_event_name(int event)
{
	return event >= 0 && (size_t)event < TP_ARRAY_LEN(events) ? events[event].name : "an event that rdma_cma.h has no name for";
}

const char *tp_rdmacm_event_advice(int event, int status)
{
	if (event == RDMA_CM_EVENT_REJECTED)
		return status > 0 && (size_t)status < TP_ARRAY_LEN(reasons) && reasons[status].advice ? reasons[status].advice : "the other side's connection manager doesn't take it";
	return event >= 0 && (size_t)event < TP_ARRAY_LEN(events) ? events[event].advice : "look at the kernel log (dmesg)";
}

const char *tp_rdmacm_status_text(int event, int status, char text[96])
{
	const char *name = "?";

	if (event == RDMA_CM_EVENT_REJECTED && status > 0 && (size_t)status < TP_ARRAY_LEN(reasons) && reasons[status].name) name = reasons[status].name;
	else if (event != RDMA_CM_EVENT_REJECTED && status != 0) name = strerror(status < 0 ? -status : status);
	else if (status == 0) name = "no more is said";
	snprintf(text, 96, "%d (%s)", status, name);
	return text;
}

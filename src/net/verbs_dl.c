/* Opening libibverbs; see verbs_dl.h. */
#include <assert.h>
#include <dlfcn.h>
#include <libgen.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/fork.h"
#include "net/verbs_dl.h"

static struct tp_param verbs_dl_params[] = {
	{ .name = "NCCL_IBVERBS_LIB", .kind = TP_PARAM_STRING, .doc = "file to open as libibverbs; unset: libibverbs.so.1, then libibverbs.so" },
};
TP_PARAM_TABLE("ib", verbs_dl_params)

/* A symbol that only Telpher's card has. */
#define CARD_MARK "tp_card_inner_warn"

static const struct { const char *name, *version; size_t place; bool optional; } symbols[] = {
#define NEEDED(field, version_) { "ibv_" #field, version_, offsetof(struct tp_verbs, field), false }
#define WANTED(field, version_) { "ibv_" #field, version_, offsetof(struct tp_verbs, field), true }
	NEEDED(get_device_list, "IBVERBS_1.1"), NEEDED(free_device_list, "IBVERBS_1.1"), NEEDED(get_device_name, "IBVERBS_1.1"),
	NEEDED(open_device, "IBVERBS_1.1"), NEEDED(close_device, "IBVERBS_1.1"), NEEDED(get_async_event, "IBVERBS_1.1"),
	NEEDED(ack_async_event, "IBVERBS_1.1"), NEEDED(query_device, "IBVERBS_1.1"), NEEDED(query_gid, "IBVERBS_1.1"),
	{ "ibv_query_port", "IBVERBS_1.1", offsetof(struct tp_verbs, query_port_old), false },
	NEEDED(query_qp, "IBVERBS_1.1"), NEEDED(alloc_pd, "IBVERBS_1.1"), NEEDED(dealloc_pd, "IBVERBS_1.1"), NEEDED(reg_mr, "IBVERBS_1.1"),
	NEEDED(dereg_mr, "IBVERBS_1.1"), NEEDED(create_comp_channel, "IBVERBS_1.0"), NEEDED(destroy_comp_channel, "IBVERBS_1.0"),
	NEEDED(create_cq, "IBVERBS_1.1"), NEEDED(destroy_cq, "IBVERBS_1.1"), NEEDED(get_cq_event, "IBVERBS_1.1"),
	NEEDED(ack_cq_events, "IBVERBS_1.1"), NEEDED(create_qp, "IBVERBS_1.1"), NEEDED(modify_qp, "IBVERBS_1.1"),
	NEEDED(destroy_qp, "IBVERBS_1.1"), NEEDED(event_type_str, "IBVERBS_1.1"),
	WANTED(fork_init, "IBVERBS_1.1"), WANTED(get_device_guid, "IBVERBS_1.1"), WANTED(query_pkey, "IBVERBS_1.1"),
	WANTED(reg_mr_iova2, "IBVERBS_1.8"), WANTED(reg_dmabuf_mr, "IBVERBS_1.12"), WANTED(query_ece, "IBVERBS_1.10"), WANTED(set_ece, "IBVERBS_1.10"),
	{ "_ibv_query_gid_ex", "IBVERBS_1.11", offsetof(struct tp_verbs, query_gid_ex), true },
	{ "_ibv_query_gid_table", "IBVERBS_1.11", offsetof(struct tp_verbs, query_gid_table), true },
#undef NEEDED
#undef WANTED
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
TP_FORK_RENEW(lock)                    /* the loader runs under it, and what it loads */
static struct tp_verbs opened[2];       /* by enum tp_verbs_which; file is empty: not yet */

/* The table of an open library. false: it lacks what every one has; which symbol is in why. */
static bool fill(void *library, const char *file, struct tp_verbs *out, char *why, size_t bytes)
{
	struct tp_verbs v = { .software = dlsym(library, CARD_MARK) != NULL };
	Dl_info info;

	for (size_t i = 0; i < TP_ARRAY_LEN(symbols); i++) {
		void *at = dlvsym(library, symbols[i].name, symbols[i].version);
		if (!at && !symbols[i].optional) {
			snprintf(why, bytes, "%s has no %s (%s): it is too old or not libibverbs", file, symbols[i].name, symbols[i].version);
			return false;
		}
		memcpy((char *)&v + symbols[i].place, &at, sizeof(at));
	}
	snprintf(v.file, sizeof(v.file), "%s", dladdr(*(void **)&v.open_device, &info) && info.dli_fname ? info.dli_fname : file);
	*out = v;
	return true;
}

/* The loader's own words name the file already. */
static bool open_file(const char *file, struct tp_verbs *out, char *why, size_t bytes)
{
	void *library = dlopen(file, RTLD_NOW | RTLD_LOCAL);

	if (!library) {
		const char *error = dlerror();
		snprintf(why, bytes, "%s", error ? error : file);
		return false;
	}
	if (fill(library, file, out, why, bytes)) return true;
	dlclose(library);
	return false;
}

static bool open_found(char *why, size_t bytes)
{
	static const char *const files[] = { "libibverbs.so.1", "libibverbs.so" };
	const char *asked = tp_param_string(&verbs_dl_params[0]);

	if (opened[TP_VERBS_FOUND].file[0]) return true;
	if (asked && *asked) {
		size_t said = (size_t)snprintf(why, bytes, "NCCL_IBVERBS_LIB=%.200s: ", asked);
		return open_file(asked, &opened[TP_VERBS_FOUND], why + said, bytes - said);
	}
	for (size_t i = 0; i < TP_ARRAY_LEN(files); i++)
		if (open_file(files[i], &opened[TP_VERBS_FOUND], why, bytes)) return true;
	snprintf(why, bytes, "libibverbs.so.1 can't be opened (in a container or on Debian and Ubuntu: install libibverbs1 and ibverbs-providers)");
	return false;
}

/* lib/telpher/libnccl.so.2 and bin/telpher: the card is in lib/telpher-verbs. */
static bool open_beside(char *why, size_t bytes)
{
	static const char *const places[] = { "../telpher-verbs", "../lib/telpher-verbs", "telpher-verbs" };
	char path[PATH_MAX], folder[PATH_MAX];
	Dl_info info;

	if (!dladdr((void *)(uintptr_t)open_beside, &info) || !info.dli_fname || !realpath(info.dli_fname, folder)) {
		snprintf(why, bytes, "where this library lies can't be found out");
		return false;
	}
	char *at = dirname(folder);
	for (size_t i = 0; i < TP_ARRAY_LEN(places); i++)
		if (snprintf(path, sizeof(path), "%s/%s/libibverbs.so.1", at, places[i]) < (int)sizeof(path)
			&& open_file(path, &opened[TP_VERBS_CARD], why, bytes) && opened[TP_VERBS_CARD].software) return true;
	opened[TP_VERBS_CARD].file[0] = 0;
	snprintf(why, bytes, "Telpher's software card (libibverbs.so.1) is neither on the library path nor in %s/%s", at, places[0]);
	return false;
}

static bool is_loaded(const char *name)
{
	void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);

	if (library) dlclose(library);
	return library != NULL;
}

const struct tp_verbs *tp_verbs_open(enum tp_verbs_which which, char *why, size_t bytes)
{
	const struct tp_verbs *out = NULL;
	bool found;

	pthread_mutex_lock(&lock);
	if (which == TP_VERBS_CARD_FIRST) {
		const char *asked = tp_param_string(&verbs_dl_params[0]);
		which = TP_VERBS_CARD;
		/* One that is there already is found by its name, and costs nothing. */
		if (!opened[TP_VERBS_FOUND].file[0] && !opened[TP_VERBS_CARD].file[0] && !(asked && *asked) && !is_loaded("libibverbs.so.1")) open_beside(why, bytes);
	}
	if (which == TP_VERBS_CARD && opened[TP_VERBS_CARD].file[0]) {
		out = &opened[TP_VERBS_CARD];
	} else {
		found = open_found(why, bytes);
		if (found && (which == TP_VERBS_FOUND || opened[TP_VERBS_FOUND].software)) out = &opened[TP_VERBS_FOUND];
		else if (which == TP_VERBS_CARD && open_beside(why, bytes)) out = &opened[TP_VERBS_CARD];
	}
	pthread_mutex_unlock(&lock);
	return out;
}

static uint32_t speed_mbps(int active_speed, int active_width)
{
	/* Codes of the port's attributes: SDR, DDR, QDR, FDR10, FDR, EDR, HDR, NDR, XDR. */
	static const struct { int code; uint32_t mbps; } speeds[] = { { 1, 2500 }, { 2, 5000 }, { 4, 10000 }, { 8, 10000 }, { 16, 14000 }, { 32, 25000 },
		{ 64, 50000 }, { 128, 100000 }, { 256, 200000 } };
	static const struct { int code; uint32_t lanes; } widths[] = { { 1, 1 }, { 2, 4 }, { 4, 8 }, { 8, 12 }, { 16, 2 } };
	uint32_t mbps = 0, lanes = 0;

	for (size_t i = 0; i < TP_ARRAY_LEN(speeds); i++)
		if (speeds[i].code == active_speed) mbps = speeds[i].mbps;
	for (size_t i = 0; i < TP_ARRAY_LEN(widths); i++)
		if (widths[i].code == active_width) lanes = widths[i].lanes;
	return mbps * lanes;
}

/* Newer libraries' structure has another field behind those of the headers that we were built with, for speeds that 8 bits can't hold. */
enum { SPEED_EX_AT = (offsetof(struct ibv_port_attr, port_cap_flags2) + sizeof(uint16_t) + 3) / 4 * 4 };
union wide_port_attr { struct ibv_port_attr attr; uint8_t bytes[128]; };
static_assert(SPEED_EX_AT + sizeof(uint32_t) <= sizeof(union wide_port_attr), "active_speed_ex is in it");

int tp_verbs_query_port(const struct tp_verbs *verbs, struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr, uint32_t *mbps)
{
	struct verbs_context *vctx = verbs_get_ctx_op(context, query_port);
	union wide_port_attr wide = { .bytes = { 0 } };
	uint32_t speed;

	/* The exported function fills in what the structure held when it came into the library, which is less. */
	int error = vctx ? vctx->query_port(context, port, &wide.attr, sizeof(wide)) : verbs->query_port_old(context, port, &wide.attr);
	*attr = wide.attr;
	memcpy(&speed, wide.bytes + SPEED_EX_AT, sizeof(speed));
	*mbps = speed_mbps((int)(speed ? speed : attr->active_speed), attr->active_width);
	return error;
}

static const struct { const char *name, *advice; } statuses[] = {
	[IBV_WC_SUCCESS] = { "IBV_WC_SUCCESS", "nothing is wrong" },
	[IBV_WC_LOC_LEN_ERR] = { "IBV_WC_LOC_LEN_ERR", "a message was longer than the memory that was posted for it: do both ends run the same library?" },
	[IBV_WC_LOC_QP_OP_ERR] = { "IBV_WC_LOC_QP_OP_ERR", "the card refuses the request itself (more scatter entries or inline data than it takes)" },
	[IBV_WC_LOC_EEC_OP_ERR] = { "IBV_WC_LOC_EEC_OP_ERR", "an error of reliable datagrams, which aren't used" },
	[IBV_WC_LOC_PROT_ERR] = { "IBV_WC_LOC_PROT_ERR", "this side's card could not read or write its own memory: memory that was unmapped or given back while in use, or, with "
		"GPU memory, PCIe ACS or an IOMMU between card and GPU (lspci -vvv | grep ACSCtl should show ReqRedir- on every bridge between them; inside a virtual machine enable ATS)" },
	[IBV_WC_WR_FLUSH_ERR] = { "IBV_WC_WR_FLUSH_ERR", "the queue pair had already failed; the first error says why" },
	[IBV_WC_MW_BIND_ERR] = { "IBV_WC_MW_BIND_ERR", "a memory window could not be bound" },
	[IBV_WC_BAD_RESP_ERR] = { "IBV_WC_BAD_RESP_ERR", "the other side answered something that doesn't belong to the request" },
	[IBV_WC_LOC_ACCESS_ERR] = { "IBV_WC_LOC_ACCESS_ERR", "data came in for memory that this side may not write" },
	[IBV_WC_REM_INV_REQ_ERR] = { "IBV_WC_REM_INV_REQ_ERR", "the other side finds the request invalid: do both ends run the same library?" },
	[IBV_WC_REM_ACCESS_ERR] = { "IBV_WC_REM_ACCESS_ERR", "the other side refuses access to its memory: it was given back or unmapped there while in use, or its key is of another connection" },
	[IBV_WC_REM_OP_ERR] = { "IBV_WC_REM_OP_ERR", "the other side's card could not carry out the request: look at that host's kernel log (dmesg); with GPU memory, PCIe ACS or an IOMMU "
		"between its card and GPU" },
	[IBV_WC_RETRY_EXC_ERR] = { "IBV_WC_RETRY_EXC_ERR", "the other side does not answer: a cable or port is down, its process has ended, or packets are lost. On RoCE: do the two GIDs reach "
		"each other (ping; NCCL_IB_GID_INDEX), is the MTU right all the way, is the priority lossless at both ends and switches (NCCL_IB_TC, PFC)? NCCL_IB_TIMEOUT gives a slow fabric more time" },
	[IBV_WC_RNR_RETRY_EXC_ERR] = { "IBV_WC_RNR_RETRY_EXC_ERR", "the other side had no receive posted" },
	[IBV_WC_LOC_RDD_VIOL_ERR] = { "IBV_WC_LOC_RDD_VIOL_ERR", "an error of reliable datagrams, which aren't used" },
	[IBV_WC_REM_INV_RD_REQ_ERR] = { "IBV_WC_REM_INV_RD_REQ_ERR", "an error of reliable datagrams, which aren't used" },
	[IBV_WC_REM_ABORT_ERR] = { "IBV_WC_REM_ABORT_ERR", "the other side broke the operation off" },
	[IBV_WC_INV_EECN_ERR] = { "IBV_WC_INV_EECN_ERR", "an error of reliable datagrams, which aren't used" },
	[IBV_WC_INV_EEC_STATE_ERR] = { "IBV_WC_INV_EEC_STATE_ERR", "an error of reliable datagrams, which aren't used" },
	[IBV_WC_FATAL_ERR] = { "IBV_WC_FATAL_ERR", "the card has failed: look at the kernel log (dmesg)" },
	[IBV_WC_RESP_TIMEOUT_ERR] = { "IBV_WC_RESP_TIMEOUT_ERR", "the other side did not answer in time" },
	[IBV_WC_GENERAL_ERR] = { "IBV_WC_GENERAL_ERR", "the card gives no reason: look at the kernel log (dmesg)" },
};

const char *tp_verbs_status_name(int status)
{
	return status >= 0 && (size_t)status < TP_ARRAY_LEN(statuses) && statuses[status].name ? statuses[status].name : "a status that verbs.h has no name for";
}

const char *tp_verbs_status_advice(int status)
{
	return status >= 0 && (size_t)status < TP_ARRAY_LEN(statuses) && statuses[status].advice ? statuses[status].advice : "look at the kernel log (dmesg)";
}

const char *tp_verbs_port_state_name(int state)
{
	static const char *const names[] = { "NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER" };
	return state >= 0 && (size_t)state < TP_ARRAY_LEN(names) ? names[state] : "unknown";
}

int tp_verbs_mtu_bytes(int mtu)
{
	return mtu >= IBV_MTU_256 && mtu <= IBV_MTU_4096 ? 128 << mtu : 0;
}

/* NCCL's variables that change paths and decisions. Those that links obey too are registered by the folder of links; a program
 * without it (a test) has their defaults. */
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "gpu/gpu.h"
#include "topo/topo.h"

enum {
	P_GDR_LEVEL, P_GDR_READ, P_GDR_C2C, P_FORCE_FLUSH, P_FLUSH_DISABLE, P_PXN_DISABLE, P_PXN_C2C, P_NVB_DISABLE, P_CROSS_NIC,
	P_IGNORE_P2P, P_NETDEVS,
};
static struct tp_param policy_params[] = {
	[P_GDR_LEVEL] = { .name = "NCCL_NET_GDR_LEVEL", .kind = TP_PARAM_STRING,
		.doc = "farthest that a NIC may be from a GPU whose memory it reaches: LOC, PIX, PXB, P2C, PHB or SYS" },
	[P_GDR_READ] = { .name = "NCCL_NET_GDR_READ", .kind = TP_PARAM_INT, .fallback = "-2", .min = -2, .max = 1,
		.doc = "NICs read GPU memory when they send: 0 never, 1 always, else by the hardware" },
	[P_GDR_C2C] = { .name = "NCCL_NET_GDR_C2C", .kind = TP_PARAM_BOOL, .fallback = "1", .max = 1,
		.doc = "NICs of a CPU that is joined by C2C reach GPU memory through it" },
	[P_FORCE_FLUSH] = { .name = "NCCL_NET_FORCE_FLUSH", .kind = TP_PARAM_BOOL, .fallback = "0", .max = 1,
		.doc = "flush after each receive into GPU memory, whatever the GPU" },
	[P_FLUSH_DISABLE] = { .name = "NCCL_GDR_FLUSH_DISABLE", .kind = TP_PARAM_BOOL, .fallback = "0", .max = 1,
		.doc = "never flush after a receive into GPU memory" },
	[P_PXN_DISABLE] = { .name = "NCCL_PXN_DISABLE", .kind = TP_PARAM_BOOL, .fallback = "0", .max = 1,
		.doc = "don't send through another GPU's NIC" },
	[P_PXN_C2C] = { .name = "NCCL_PXN_C2C", .kind = TP_PARAM_BOOL, .fallback = "1", .max = 1,
		.doc = "the other GPU's NIC may be reached through its CPU by C2C" },
	[P_NVB_DISABLE] = { .name = "NCCL_NVB_DISABLE", .kind = TP_PARAM_BOOL, .fallback = "0", .max = 1,
		.doc = "don't pass a GPU on the way from one NVLink to another" },
	[P_CROSS_NIC] = { .name = "NCCL_CROSS_NIC", .kind = TP_PARAM_INT, .fallback = "2", .min = 0, .max = 2,
		.doc = "a ring may leave a machine by another NIC than it came, and links join NICs of different rails: 0 never, 1 always, 2 where it must" },
	[P_IGNORE_P2P] = { .name = "NCCL_IGNORE_DISABLED_P2P", .kind = TP_PARAM_INT, .fallback = "0", .min = 0, .max = 2,
		.doc = "what the driver says of peer access: 0 is heeded, 1 is heeded without a warning, 2 isn't heeded" },
	[P_NETDEVS] = { .name = "NCCL_NETDEVS_POLICY", .kind = TP_PARAM_STRING, .fallback = "AUTO",
		.doc = "how many of its nearest NICs a GPU uses: AUTO (shared out), ALL or MAX:n" },
};
TP_PARAM_TABLE("topo", policy_params)

void tp_topo_policy_default(struct tp_topo_policy *out)
{
	*out = (struct tp_topo_policy){ .p2p_level = -1, .gdr_level = -1, .gdr_read = TP_AUTO, .gdr_c2c = true, .flush = TP_AUTO, .pxn = true,
		.pxn_c2c = true, .nvb = true, .shm = true, .cross_nic = 2, .net_within = TP_AUTO, .multi_host = true };
}

_Static_assert(TP_PATH_SYS == TP_GPU_LEVELS - 1, "levels are path types");

/* -1: none is set. */
static int read_level(const char *name, struct tp_param *param)
{
	const char *text = param ? tp_param_string(param) : NULL;
	if (!text || !*text) return -1;
	int level = tp_gpu_level_parse(text);
	if (level < 0) TP_WARN("%s=%.32s is no level: " TP_GPU_LEVEL_NAMES "; it is ignored", name, text);
	return level;
}

static bool read_switch(const char *name)
{
	struct tp_param *param = tp_param_find(name);
	return param && tp_param_int(param);
}

static int read_nets(void)
{
	const char *text = tp_param_string(&policy_params[P_NETDEVS]);
	if (strcasecmp(text, "AUTO") == 0) return 0;
	if (strcasecmp(text, "ALL") == 0) return INT32_MAX;
	int count = strncasecmp(text, "MAX:", 4) == 0 ? atoi(text + 4) : 0;
	if (count <= 0) TP_WARN("NCCL_NETDEVS_POLICY=%.32s should be AUTO, ALL or MAX:n; AUTO is used", text);
	return TP_MAX(count, 0);
}

int tp_topo_cross_nic(void) { return (int)tp_param_int(&policy_params[P_CROSS_NIC]); }

ncclResult_t tp_topo_policy_load(struct tp_topo_policy *out)
{
	tp_topo_policy_default(out);
	out->p2p_level = read_level("NCCL_P2P_LEVEL", tp_param_find("NCCL_P2P_LEVEL"));
	if (out->p2p_level >= 0) out->p2p_by = "NCCL_P2P_LEVEL";
	if (read_switch("NCCL_P2P_DISABLE")) {
		out->p2p_level = TP_PATH_LOC;
		out->p2p_by = "NCCL_P2P_DISABLE";
	}
	out->shm = !read_switch("NCCL_SHM_DISABLE");
	out->gdr_level = read_level("NCCL_NET_GDR_LEVEL", &policy_params[P_GDR_LEVEL]);
	int64_t read = tp_param_int(&policy_params[P_GDR_READ]);
	out->gdr_read = read < 0 ? TP_AUTO : read ? TP_ON : TP_OFF;
	out->gdr_c2c = tp_param_int(&policy_params[P_GDR_C2C]);
	if (tp_param_int(&policy_params[P_FORCE_FLUSH])) out->flush = TP_ON;
	if (tp_param_int(&policy_params[P_FLUSH_DISABLE])) out->flush = TP_OFF;
	out->pxn = !tp_param_int(&policy_params[P_PXN_DISABLE]);
	out->pxn_c2c = tp_param_int(&policy_params[P_PXN_C2C]);
	out->nvb = !tp_param_int(&policy_params[P_NVB_DISABLE]);
	out->cross_nic = tp_topo_cross_nic();
	out->ignore_disabled_p2p = tp_param_int(&policy_params[P_IGNORE_P2P]) == 2;
	out->expect_disabled_p2p = tp_param_int(&policy_params[P_IGNORE_P2P]) == 1;
	out->nets_per_gpu = read_nets();
	return ncclSuccess;
}

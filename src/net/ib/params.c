/* NCCL_IB_*, with NCCL's meaning, and a few of our own. */
#include <string.h>
#include <sys/socket.h>
#include "net/ib/ib.h"

enum { P_DISABLE, P_HCA, P_GID_INDEX, P_FAMILY, P_RANGE, P_ROCE_VERSION, P_TIMEOUT, P_RETRY, P_SL, P_TC, P_FIFO_TC, P_PKEY, P_QPS, P_SPLIT, P_AR,
	P_AR_THRESHOLD, P_RELAXED, P_INLINE, P_FLID, P_ASYNC, P_FAILOVER, P_RECOVERY, P_MQP_ALL, P_MQP_CNT, P_MQP_SLEEP, P_SUBNET, P_MERGE, P_MERGE_VFS, P_MERGE_LEVEL,
	P_FORCE_MERGE, P_ECE, P_PATHS, P_PATH_TIMEOUT, P_DATA_DIRECT, P_CONNECT };
static struct tp_param ib_params[] = {
	[P_DISABLE] = { .name = "NCCL_IB_DISABLE", .kind = TP_PARAM_BOOL, .fallback = "0", .max = 1, .doc = "1: InfiniBand and RoCE are not used" },
	[P_HCA] = { .name = "NCCL_IB_HCA", .kind = TP_PARAM_STRING,
		.doc = "devices to use: mlx5_0,mlx5_1:1 (beginnings of names; a port behind a colon), = for whole names, ^ for all others" },
	[P_GID_INDEX] = { .name = "NCCL_IB_GID_INDEX", .kind = TP_PARAM_INT, .fallback = "-1", .min = -1, .max = 255, .doc = "GID to use, by its index; -1: chosen" },
	[P_FAMILY] = { .name = "NCCL_IB_ADDR_FAMILY", .kind = TP_PARAM_ENUM, .fallback = "auto", .choices = "auto|AF_INET|AF_INET6",
		.doc = "family of the address behind the GID that is chosen; auto: IPv4, IPv6 where a port has nothing else" },
	[P_RANGE] = { .name = "NCCL_IB_ADDR_RANGE", .kind = TP_PARAM_STRING, .doc = "range of the address behind the GID that is chosen: 192.0.2.0/24" },
	[P_ROCE_VERSION] = { .name = "NCCL_IB_ROCE_VERSION_NUM", .kind = TP_PARAM_INT, .fallback = "2", .min = 1, .max = 2, .doc = "RoCE version of the GID that is chosen" },
	[P_TIMEOUT] = { .name = "NCCL_IB_TIMEOUT", .kind = TP_PARAM_INT, .fallback = "20", .min = 1, .max = 31,
		.doc = "time after which a packet is sent again: 4.096 us times 2 to this" },
	[P_RETRY] = { .name = "NCCL_IB_RETRY_CNT", .kind = TP_PARAM_INT, .fallback = "7", .min = 0, .max = 7, .doc = "how often it is sent again" },
	[P_SL] = { .name = "NCCL_IB_SL", .kind = TP_PARAM_INT, .fallback = "-1", .min = -1, .max = 15, .doc = "InfiniBand service level; -1: 0" },
	[P_TC] = { .name = "NCCL_IB_TC", .kind = TP_PARAM_INT, .fallback = "-1", .min = -1, .max = 255, .doc = "traffic class; -1: 0" },
	[P_FIFO_TC] = { .name = "NCCL_IB_FIFO_TC", .kind = TP_PARAM_INT, .fallback = "-1", .min = -1, .max = 255,
		.doc = "traffic class of control messages; -1: as NCCL_IB_TC" },
	[P_PKEY] = { .name = "NCCL_IB_PKEY", .kind = TP_PARAM_INT, .fallback = "0", .min = 0, .max = 65535, .doc = "partition key, by its index" },
	[P_QPS] = { .name = "NCCL_IB_QPS_PER_CONNECTION", .kind = TP_PARAM_INT, .fallback = "1", .min = 1, .max = TP_IB_MAX_QPS,
		.doc = "queue pairs of a connection, on each port of a device: more of them take more ways through a fabric" },
	[P_SPLIT] = { .name = "NCCL_IB_SPLIT_DATA_ON_QPS", .kind = TP_PARAM_BOOL, .fallback = "0", .max = 1,
		.doc = "1: each message is split over all queue pairs; 0: they take turns" },
	[P_AR] = { .name = "NCCL_IB_ADAPTIVE_ROUTING", .kind = TP_PARAM_INT, .fallback = "-2", .min = -2, .max = 1,
		.doc = "1: data that may overtake itself on the way is followed by a write of its own; -2: on InfiniBand" },
	[P_AR_THRESHOLD] = { .name = "NCCL_IB_AR_THRESHOLD", .kind = TP_PARAM_BYTES, .fallback = "8192", .min = 0, .max = INT64_MAX,
		.doc = "messages above this are treated so" },
	[P_RELAXED] = { .name = "NCCL_IB_PCI_RELAXED_ORDERING", .kind = TP_PARAM_INT, .fallback = "2", .min = 0, .max = 2,
		.doc = "relaxed ordering on PCIe: 0 never, 1 always, 2 where the library can" },
	[P_INLINE] = { .name = "NCCL_IB_USE_INLINE", .kind = TP_PARAM_BOOL, .fallback = "0", .max = 1, .doc = "1: FIFO entries travel in the request itself" },
	[P_FLID] = { .name = "NCCL_IB_ROUTABLE_FLID_GID_INDEX", .kind = TP_PARAM_INT, .fallback = "1", .min = 0, .max = 255,
		.doc = "InfiniBand GID, by its index, that holds a forwarding LID for other subnets" },
	[P_ASYNC] = { .name = "NCCL_IB_RETURN_ASYNC_EVENTS", .kind = TP_PARAM_BOOL, .fallback = "1", .max = 1, .doc = "1: a fatal event of a device ends what uses it" },
	[P_FAILOVER] = { .name = "NCCL_IB_RESILIENCY_PORT_FAILOVER", .kind = TP_PARAM_BOOL, .fallback = "1", .max = 1,
		.doc = "1: a connection that has another port goes on there when one dies" },
	[P_RECOVERY] = { .name = "NCCL_IB_RESILIENCY_PORT_RECOVERY", .kind = TP_PARAM_BOOL, .fallback = "1", .max = 1, .doc = "1: a port that lives again is taken back" },
	[P_MQP_ALL] = { .name = "NCCL_IB_MQP_RETRY_ALL", .kind = TP_PARAM_BOOL, .fallback = "0", .max = 1,
		.doc = "1: ibv_modify_qp is tried again after any error; 0: after a timeout" },
	[P_MQP_CNT] = { .name = "NCCL_IB_MQP_RETRY_CNT", .kind = TP_PARAM_INT, .fallback = "34", .min = 0, .max = 100000, .doc = "how often" },
	[P_MQP_SLEEP] = { .name = "NCCL_IB_MQP_RETRY_SLEEP_MSEC", .kind = TP_PARAM_INT, .fallback = "100", .min = 0, .max = 60000, .doc = "ms in between" },
	[P_SUBNET] = { .name = "NCCL_IB_SUBNET_PREFIX_LEN", .kind = TP_PARAM_INT, .fallback = "24", .min = 0, .max = 32,
		.doc = "ports whose IPv4 addresses agree in so many bits belong to one network, and are paired first" },
	[P_ECE] = { .name = "NCCL_IB_ECE_ENABLE", .kind = TP_PARAM_BOOL, .fallback = "1", .max = 1,
		.doc = "1: two cards that both can agree on their maker's extensions (enhanced connection establishment)" },
	[P_DATA_DIRECT] = { .name = "NCCL_IB_DATA_DIRECT", .kind = TP_PARAM_INT, .fallback = "1", .min = 0, .max = 2,
		.doc = "0: GPU memory is reached through the root complex even where a card has a function beside the GPU (mlx5's data direct)" },
	[P_MERGE] = { .name = "NCCL_IB_MERGE_NICS", .kind = TP_PARAM_BOOL, .fallback = "1", .max = 1, .doc = "0: each port is a device of its own" },
	[P_MERGE_VFS] = { .name = "NCCL_IB_MERGE_VFS", .kind = TP_PARAM_BOOL, .fallback = "1", .max = 1, .doc = "1: virtual functions of one card count as its ports" },
	[P_MERGE_LEVEL] = { .name = "NCCL_NET_MERGE_LEVEL", .kind = TP_PARAM_ENUM, .fallback = "PORT", .choices = "LOC|PORT|PIX|PXB|P2C|PXN|PHB|SYS",
		.doc = "InfiniBand and RoCE ports no further apart make one device, up to 8: LOC none, PORT of one card, PIX behind one PCIe switch, PXB several, PHB one processor, SYS all" },
	[P_FORCE_MERGE] = { .name = "NCCL_NET_FORCE_MERGE", .kind = TP_PARAM_STRING,
		.doc = "InfiniBand and RoCE ports that make one device, by exact names: mlx5_0,mlx5_1;mlx5_2:1,mlx5_3:1" },
	[P_CONNECT] = { .name = "TELPHER_IB_CONNECT", .kind = TP_PARAM_ENUM, .fallback = "tcp", .choices = "tcp|rdma_cm",
		.doc = "who connects queue pairs on RoCE: tcp, what both ends say of themselves; rdma_cm, the kernel's connection manager (librdmacm), which knows routes; the same on all ranks" },
	[P_PATHS] = { .name = "TELPHER_IB_PATHS", .kind = TP_PARAM_INT, .fallback = "2", .min = 1, .max = 4,
		.doc = "devices whose ports a connection may use, those of one of them at a time" },
	[P_PATH_TIMEOUT] = { .name = "TELPHER_IB_PATH_TIMEOUT", .kind = TP_PARAM_INT, .fallback = "1500", .min = 100, .max = 600000,
		.doc = "ms after which a path on which nothing gets through, while the peer is alive, counts as dead" },
};
TP_PARAM_TABLE("ib", ib_params)

static int number(int which) { return (int)tp_param_int(&ib_params[which]); }

void tp_ib_params_read(struct tp_ib_params *out)
{
	static const int families[] = { 0, AF_INET, AF_INET6 };

	*out = (struct tp_ib_params){
		.disable = number(P_DISABLE), .gid_index = number(P_GID_INDEX), .roce_version = number(P_ROCE_VERSION), .timeout = number(P_TIMEOUT),
		.retry_cnt = number(P_RETRY), .sl = TP_MAX(number(P_SL), 0), .tc = TP_MAX(number(P_TC), 0), .fifo_tc = number(P_FIFO_TC), .pkey = number(P_PKEY),
		.qps = number(P_QPS), .split = number(P_SPLIT), .adaptive = number(P_AR), .relaxed = number(P_RELAXED), .use_inline = number(P_INLINE),
		.flid_gid_index = number(P_FLID), .return_async = number(P_ASYNC), .failover = number(P_FAILOVER), .recovery = number(P_RECOVERY),
		.modify_retry_all = number(P_MQP_ALL), .modify_retries = number(P_MQP_CNT), .modify_retry_ms = number(P_MQP_SLEEP), .max_paths = number(P_PATHS),
		.subnet_bits = number(P_SUBNET), .path_timeout_ms = number(P_PATH_TIMEOUT), .ar_threshold = tp_param_int(&ib_params[P_AR_THRESHOLD]), .addr_family = families[number(P_FAMILY)],
		.merge = number(P_MERGE), .merge_vfs = number(P_MERGE_VFS), .merge_level = number(P_MERGE_LEVEL), .force_merge = tp_param_string(&ib_params[P_FORCE_MERGE]),
		.ece = number(P_ECE), .connect = number(P_CONNECT), .data_direct = number(P_DATA_DIRECT), .hca = tp_param_string(&ib_params[P_HCA]), .addr_range = tp_param_string(&ib_params[P_RANGE]),
	};
	if (out->fifo_tc < 0) out->fifo_tc = out->tc;
}

/* The card's parameters: how many devices it shows and what they look like. */
#include <stdlib.h>
#include <string.h>
#include "verbs/internal.h"

enum { P_DEVICES, P_PORTS, P_IFNAME, P_GIDS, P_MTU, P_RATE, P_STATE, P_NUMA, P_PCI, P_HIDE_REAL, P_NOTE };
static struct tp_param params[] = {
	[P_DEVICES] = { .name = "TELPHER_VERBS_DEVICES", .kind = TP_PARAM_STRING, .fallback = "1",
		.doc = "Devices that the software card shows: a number (telpher0, …), or their names: mlx5_0,mlx5_1" },
	[P_PORTS] = { .name = "TELPHER_VERBS_PORTS", .kind = TP_PARAM_INT, .fallback = "1", .min = 1, .max = TP_CARD_PORTS,
		.doc = "Ports of each device" },
	[P_IFNAME] = { .name = "TELPHER_VERBS_IFNAME", .kind = TP_PARAM_STRING,
		.doc = "Network interface of each port, in order: eth0,eth1; unset: those that are up, lo where nothing else is" },
	[P_GIDS] = { .name = "TELPHER_VERBS_GIDS", .kind = TP_PARAM_ENUM, .fallback = "one", .choices = "one|all|roce",
		.doc = "GID table: one entry, one for each address, or link-local and IPv4 in both RoCE versions as a Mellanox port has it" },
	[P_MTU] = { .name = "TELPHER_VERBS_MTU", .kind = TP_PARAM_ENUM, .fallback = "auto", .choices = "auto|256|512|1024|2048|4096",
		.doc = "Active MTU of the ports; auto: the largest that the interface carries" },
	[P_RATE] = { .name = "TELPHER_VERBS_RATE", .kind = TP_PARAM_INT, .fallback = "100", .min = 1, .max = 1600,
		.doc = "Rate in Gb/s that the ports show" },
	[P_STATE] = { .name = "TELPHER_VERBS_STATE", .kind = TP_PARAM_ENUM, .fallback = "active", .choices = "active|down",
		.doc = "State of the ports" },
	[P_NUMA] = { .name = "TELPHER_VERBS_NUMA", .kind = TP_PARAM_STRING,
		.doc = "NUMA node of each device, in order: 0,1; unset: none" },
	[P_PCI] = { .name = "TELPHER_VERBS_PCI", .kind = TP_PARAM_STRING,
		.doc = "PCI place of each device, in order: 0000:c1:00.0,0000:c2:00.0; unset: made up" },
	[P_HIDE_REAL] = { .name = "TELPHER_VERBS_HIDE_REAL", .kind = TP_PARAM_BOOL, .fallback = "0",
		.doc = "Don't warn that the software card stands where a real RDMA device is" },
	[P_NOTE] = { .name = "TELPHER_VERBS_NOTE", .kind = TP_PARAM_STRING,
		.doc = "Set by `telpher verbs run`: where the library says that the card was opened" },
};
TP_PARAM_TABLE("verbs", params)

void tp_params_read(struct tp_card_params *out)
{
	*out = (struct tp_card_params){
		.devices = tp_param_string(&params[P_DEVICES]), .ports = (int)tp_param_int(&params[P_PORTS]),
		.interfaces = tp_param_string(&params[P_IFNAME]), .pci = tp_param_string(&params[P_PCI]),
		.numa = tp_param_string(&params[P_NUMA]), .gids = (enum tp_gid_mode)tp_param_int(&params[P_GIDS]),
		.mtu = (int)tp_param_int(&params[P_MTU]), .rate_gbps = (int)tp_param_int(&params[P_RATE]),
		.down = tp_param_int(&params[P_STATE]) != 0, .hide_real = tp_param_int(&params[P_HIDE_REAL]) != 0,
	};
}

bool tp_params_item(const char *list, int n, char *out, size_t bytes)
{
	if (!list)
		return false;
	for (; n > 0; n--) {
		list = strchr(list, ',');
		if (!list)
			return false;
		list++;
	}
	size_t length = strcspn(list, ",");
	if (length == 0 || length >= bytes)
		return false;
	memcpy(out, list, length);
	out[length] = 0;
	return true;
}

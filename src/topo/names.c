/* Names of kinds, path types, reasons and faults. Programs read the codes: none of them changes its meaning. */
#include "topo/topo.h"

const char *tp_topo_kind_name(enum tp_topo_kind kind)
{
	static const char *const names[TP_TOPO_KINDS] = { "GPU", "PCI", "NVS", "CPU", "NIC", "NET", "CACHE", "CORE" };
	return (unsigned)kind < TP_TOPO_KINDS ? names[kind] : "?";
}

const char *tp_topo_link_name(enum tp_topo_link_kind kind)
{
	static const char *const names[TP_WIRE_KINDS] = { "LOC", "NVL", "C2C", "PCI", "SYS", "NET" };
	return (unsigned)kind < TP_WIRE_KINDS ? names[kind] : "?";
}

const char *tp_topo_path_name(enum tp_topo_path_type type)
{
	static const char *const names[TP_PATH_TYPES] = { "LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS", "NET", "DIS" };
	return (unsigned)type < TP_PATH_TYPES ? names[type] : "?";
}

const char *tp_topo_path_meaning(enum tp_topo_path_type type)
{
	static const char *const meanings[TP_PATH_TYPES] = {
		"the same place", "over NVLink", "over NVLink through another GPU", "over C2C", "through one PCIe switch",
		"through several PCIe switches, no CPU", "over C2C to the CPU and PCIe from there", "over NVLink to a GPU that is near the NIC",
		"through a CPU's root complex", "from one CPU to another", "over the network", "no path",
	};
	return (unsigned)type < TP_PATH_TYPES ? meanings[type] : "?";
}

const char *tp_topo_reason_code(enum tp_topo_reason reason)
{
	static const char *const codes[TP_WHY_COUNT] = {
		"best", "disabled", "level", "distance", "forced", "no-path", "other-host", "gpu-unable", "nic-unable", "cpu-bridge", "old-gpu",
		"acs", "virtual", "relay", "narrow", "shared", "ordering",
	};
	return (unsigned)reason < TP_WHY_COUNT ? codes[reason] : "?";
}

const char *tp_topo_fault_code(enum tp_topo_fault fault)
{
	static const char *const codes[TP_FAULT_COUNT] = {
		"pci-width", "pci-speed", "acs", "no-gdr", "no-p2p", "nic-shared", "no-nic", "nvlink-missing", "uneven-nics", "link-one-way",
		"nic-rate",
	};
	return (unsigned)fault < TP_FAULT_COUNT ? codes[fault] : "?";
}

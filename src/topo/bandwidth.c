/* Every bandwidth that decisions are taken with, in one table. They are NCCL's planning numbers, below what the wires carry at
 * best, because channels are shared out by subtracting from them: with other numbers the same machine would get other channels.
 * Behind them the latency of hops, with which only costs are reckoned (cost.c). */
#include <assert.h>
#include <string.h>

#include "topo/topo.h"

#define NCCL_SOURCE "NCCL 2.30.7, topology constants"
#define RCCL_SOURCE "RCCL, topology constants"
#define PATHS_SOURCE "\"Communication and interconnects\", part 3, one way"
static const struct tp_topo_constant table[] = {
	{ "local", 5000.0, "GB/s", NCCL_SOURCE ": one place with itself" },
	{ "nvlink.sm60", 18.0, "GB/s a link", NCCL_SOURCE ": NVLink 1, 20 raw" },
	{ "nvlink.sm70", 20.0, "GB/s a link", NCCL_SOURCE ": NVLink 2, 25 raw" },
	{ "nvlink.sm80", 20.0, "GB/s a link", NCCL_SOURCE ": NVLink 3, 25 raw" },
	{ "nvlink.sm86", 12.0, "GB/s a link", NCCL_SOURCE ": A6000 and its like, 14 raw" },
	{ "nvlink.sm90", 20.6, "GB/s a link", NCCL_SOURCE ": NVLink 4, 25 raw" },
	{ "nvlink.sm100", 40.1, "GB/s a link", NCCL_SOURCE ": NVLink 5, 50 raw" },
	{ "xgmi", 24.0, "GB/s a link", RCCL_SOURCE ": MI50, MI100" },
	{ "xgmi.mi200", 36.0, "GB/s a link", RCCL_SOURCE ": gfx90a (MI210, MI250X)" },
	{ "xgmi.mi300", 48.0, "GB/s a link", RCCL_SOURCE ": gfx94x, gfx95x (MI300, MI350)" },
	/* A lane in 100 Mb/s, as usable after encoding and packet headers of typical size. */
	{ "pcie.2.5", 15.0, "100 Mb/s a lane", NCCL_SOURCE ": PCIe 1.0" },
	{ "pcie.5", 30.0, "100 Mb/s a lane", NCCL_SOURCE ": PCIe 2.0" },
	{ "pcie.8", 60.0, "100 Mb/s a lane", NCCL_SOURCE ": PCIe 3.0; also where the speed isn't known" },
	{ "pcie.16", 120.0, "100 Mb/s a lane", NCCL_SOURCE ": PCIe 4.0" },
	{ "pcie.32", 240.0, "100 Mb/s a lane", NCCL_SOURCE ": PCIe 5.0" },
	{ "pcie.64", 480.0, "100 Mb/s a lane", NCCL_SOURCE ": PCIe 6.0" },
	{ "inter.broadwell", 6.0, "GB/s", NCCL_SOURCE ": QPI" },
	{ "inter.skylake", 10.0, "GB/s", NCCL_SOURCE ": UPI" },
	{ "inter.sapphire-rapids", 22.0, "GB/s", NCCL_SOURCE ": UPI 2.0" },
	{ "inter.emerald-rapids", 40.0, "GB/s", NCCL_SOURCE ": UPI 2.0, granite and emerald rapids" },
	{ "inter.amd", 16.0, "GB/s", NCCL_SOURCE ": Infinity Fabric between sockets" },
	{ "inter.arm", 6.0, "GB/s", NCCL_SOURCE },
	{ "inter.power9", 32.0, "GB/s", NCCL_SOURCE ": X-Bus" },
	{ "inter.zhaoxin-yongfeng", 9.0, "GB/s", NCCL_SOURCE ": ZPI" },
	{ "inter.zhaoxin", 6.0, "GB/s", NCCL_SOURCE },
	{ "net.default", 10000.0, "Mb/s", NCCL_SOURCE ": a port that gives no speed" },
	{ "intel.p2p-overhead", 1.2, "times", NCCL_SOURCE ": peer traffic through an Intel root complex" },
	{ "hop.nvlink", 1.3, "us", "measured on four H200 behind NVSwitch: a flag from one GPU to another, one way" },
	{ "hop.pcie", 2.2, "us", "hop.nvlink, times what a PCIe hop takes to an NVLink hop in NCCL 2.30.7's tables, 1 / 0.6" },
	{ "hop.relay", 2.6, "us", "two NVLink hops" },
	{ "hop.host", 4.4, "us", "two PCIe hops: into host memory and out of it" },
	{ "net.ib", 1.5, "us", PATHS_SOURCE ": InfiniBand with GPUDirect, 1 to 2" },
	{ "net.roce", 3.0, "us", PATHS_SOURCE ": RoCE with GPUDirect, 2 to 4" },
	{ "net.tcp", 16.0, "us", PATHS_SOURCE ": half of a round trip of 15 to 50" },
};

const struct tp_topo_constant *tp_topo_constants(size_t *count)
{
	*count = TP_ARRAY_LEN(table);
	return table;
}

double tp_topo_constant(const char *name)
{
	for (size_t i = 0; i < TP_ARRAY_LEN(table); i++)
		if (strcmp(table[i].name, name) == 0) return table[i].value;
	assert(!"a constant of that name");
	return 0;
}

double tp_topo_pcie_bw(double gigatransfers, int lanes)
{
	static const struct { double speed; const char *name; } speeds[] = {
		{ 64, "pcie.64" }, { 32, "pcie.32" }, { 16, "pcie.16" }, { 8, "pcie.8" }, { 5, "pcie.5" }, { 2.5, "pcie.2.5" },
	};
	const char *name = "pcie.8";
	for (size_t i = 0; i < TP_ARRAY_LEN(speeds); i++)
		if (gigatransfers > speeds[i].speed - 0.01 && gigatransfers < speeds[i].speed + 0.01) name = speeds[i].name;
	return (lanes > 0 ? lanes : 16) * tp_topo_constant(name) / 80.0;
}

double tp_topo_nvlink_bw(int sm)
{
	static const struct { int from; const char *name; } kinds[] = {
		{ 100, "nvlink.sm100" }, { 90, "nvlink.sm90" }, { 87, "nvlink.sm80" }, { 86, "nvlink.sm86" }, { 80, "nvlink.sm80" },
		{ 70, "nvlink.sm70" }, { 60, "nvlink.sm60" },
	};
	for (size_t i = 0; i < TP_ARRAY_LEN(kinds); i++)
		if (sm >= kinds[i].from) return tp_topo_constant(kinds[i].name);
	return tp_topo_constant("nvlink.sm80");
}

/* Intel's family 6 by model. */
static const char *intel_name(int family, int model)
{
	if (family != 6) return family > 6 ? "inter.emerald-rapids" : "inter.broadwell";
	if (model >= 0xcf) return "inter.emerald-rapids";
	if (model >= 0x8f) return "inter.sapphire-rapids";
	return model >= 0x55 ? "inter.skylake" : "inter.broadwell";
}

double tp_topo_inter_cpu_bw(enum tp_cpu_arch arch, enum tp_cpu_vendor vendor, int family, int model)
{
	if (arch == TP_ARCH_POWER) return tp_topo_constant("inter.power9");
	if (arch == TP_ARCH_ARM) return tp_topo_constant("inter.arm");
	if (arch == TP_ARCH_X86 && vendor == TP_VENDOR_INTEL) return tp_topo_constant(intel_name(family, model));
	if (arch == TP_ARCH_X86 && vendor == TP_VENDOR_AMD) return tp_topo_constant("inter.amd");
	if (arch == TP_ARCH_X86 && vendor == TP_VENDOR_ZHAOXIN)
		return tp_topo_constant(family == 7 && model == 0x5b ? "inter.zhaoxin-yongfeng" : "inter.zhaoxin");
	return tp_topo_constant("local");
}

/* Well-known systems as descriptions: for planning, for tests, and for comparing a machine with what it should be. Sources: the
 * makers' and providers' published block diagrams and topology files. */
#include <stdlib.h>
#include <string.h>

#include "topo/doc.h"

#define MAX_GPUS 8

enum joint { APART, SWITCHED, MESH, ALL_TO_ALL, PAIRS };

struct model {
	const char *name, *doc;
	const char *arch, *vendor;
	int family, cpu_model;
	int hosts, cpus;                /* of one host: NUMA nodes that have devices */
	int numa[8];                    /* their numbers; all 0: 0, 1, 2, … */
	int switches, gpus, nics;       /* a CPU's switches; GPUs and NICs a switch; switches 0: all right at the CPU (of one) */
	const char *gpu_speed, *up_speed, *nic_speed;
	int nic_width, nic_mbps, nic_gdr;
	const char *nic_name, *fabric;
	uint32_t gpu_vendor, gpu_device, nic_vendor, nic_device;
	int sm;
	const char *gcn;
	enum joint joint;
	int links;                      /* to the switch, or between any two */
	const uint8_t (*mesh)[MAX_GPUS];
	int c2c_count, c2c_mbps;
	int far_nics;                   /* NICs at the first switch of the first CPU only, instead of everywhere */
};

/* The hybrid cube mesh of DGX-1 and p3dn: two quads, each whole, and two links from each GPU to its twin. */
static const uint8_t cube_mesh[MAX_GPUS][MAX_GPUS] = {
	{ 0, 1, 1, 2, 2, 0, 0, 0 }, { 1, 0, 2, 1, 0, 2, 0, 0 }, { 1, 2, 0, 2, 0, 0, 1, 0 }, { 2, 1, 2, 0, 0, 0, 0, 1 },
	{ 2, 0, 0, 0, 0, 1, 1, 2 }, { 0, 2, 0, 0, 1, 0, 2, 1 }, { 0, 0, 1, 0, 1, 2, 0, 2 }, { 0, 0, 0, 1, 2, 1, 2, 0 },
};
/* Four MI250X: the two dies (GCD) of a package joined by four links, packages by one or two. */
static const uint8_t mi250x_mesh[MAX_GPUS][MAX_GPUS] = {
	{ 0, 4, 0, 0, 2, 0, 1, 0 }, { 4, 0, 0, 1, 0, 0, 0, 1 }, { 0, 0, 0, 4, 1, 0, 2, 0 }, { 0, 1, 4, 0, 0, 1, 0, 0 },
	{ 2, 0, 1, 0, 0, 4, 0, 0 }, { 0, 0, 0, 1, 4, 0, 0, 1 }, { 1, 0, 2, 0, 0, 0, 0, 4 }, { 0, 1, 0, 0, 0, 1, 4, 0 },
};

#define GEN3 "8.0 GT/s PCIe"
#define GEN4 "16.0 GT/s PCIe"
#define GEN5 "32.0 GT/s PCIe"
#define INTEL .arch = "x86_64", .vendor = "GenuineIntel", .family = 6
#define AMD .arch = "x86_64", .vendor = "AuthenticAMD"
#define CONNECTX .nic_name = "mlx5_", .nic_vendor = 0x15b3, .nic_width = 16, .fabric = "ib", .nic_gdr = 1
#define EFA .nic_name = "rdmap", .nic_vendor = 0x1d0f, .fabric = "efa"

static const struct model models[] = {
	{ "dgx-1v", "8 V100 in a hybrid cube mesh, 4 NICs of 100 Gb/s", INTEL, .cpu_model = 79, .hosts = 1, .cpus = 2, .switches = 2, .gpus = 2, .nics = 1,
		.gpu_speed = GEN3, .up_speed = GEN3, .nic_speed = GEN3, CONNECTX, .nic_device = 0x1013, .nic_mbps = 100000, .gpu_vendor = 0x10de, .gpu_device = 0x1db1,
		.sm = 70, .joint = MESH, .mesh = cube_mesh },
	{ "dgx-a100", "8 A100 behind NVSwitch, 8 NICs of 200 Gb/s", AMD, .family = 23, .cpu_model = 49, .hosts = 1, .cpus = 4, .numa = { 3, 1, 7, 5 }, .switches = 1,
		.gpus = 2, .nics = 2, .gpu_speed = GEN4, .up_speed = GEN4, .nic_speed = GEN4, CONNECTX, .nic_device = 0x101b, .nic_mbps = 200000, .gpu_vendor = 0x10de,
		.gpu_device = 0x20b0, .sm = 80, .joint = SWITCHED, .links = 12 },
	{ "dgx-h100", "8 H100 behind NVSwitch, each with a NIC of 400 Gb/s", INTEL, .cpu_model = 143, .hosts = 1, .cpus = 2, .switches = 4, .gpus = 1, .nics = 1,
		.gpu_speed = GEN5, .up_speed = GEN5, .nic_speed = GEN5, CONNECTX, .nic_device = 0x1021, .nic_mbps = 400000, .gpu_vendor = 0x10de, .gpu_device = 0x2330,
		.sm = 90, .joint = SWITCHED, .links = 18 },
	{ "hgx-h200", "8 H200 behind NVSwitch, each with a NIC of 400 Gb/s", INTEL, .cpu_model = 207, .hosts = 1, .cpus = 2, .switches = 4, .gpus = 1, .nics = 1,
		.gpu_speed = GEN5, .up_speed = GEN5, .nic_speed = GEN5, CONNECTX, .nic_device = 0x1021, .nic_mbps = 400000, .gpu_vendor = 0x10de, .gpu_device = 0x2335,
		.sm = 90, .joint = SWITCHED, .links = 18 },
	{ "dgx-b200", "8 B200 behind NVSwitch, each with a NIC of 400 Gb/s", INTEL, .cpu_model = 207, .hosts = 1, .cpus = 2, .switches = 4, .gpus = 1, .nics = 1,
		.gpu_speed = GEN5, .up_speed = GEN5, .nic_speed = GEN5, CONNECTX, .nic_device = 0x1021, .nic_mbps = 400000, .gpu_vendor = 0x10de, .gpu_device = 0x2901,
		.sm = 100, .joint = SWITCHED, .links = 18 },
	{ "gb200-nvl72", "18 trays of 2 Grace and 4 B200, one NVLink domain, a NIC of 400 Gb/s a GPU", .arch = "arm64", .hosts = 18, .cpus = 2, .switches = 2, .gpus = 1,
		.nics = 1, .gpu_speed = GEN5, .up_speed = GEN5, .nic_speed = GEN5, CONNECTX, .nic_device = 0x1021, .nic_mbps = 400000, .gpu_vendor = 0x10de,
		.gpu_device = 0x2941, .sm = 100, .joint = SWITCHED, .links = 18, .c2c_count = 5, .c2c_mbps = 44712 },
	{ "gb200-tray", "one tray of it: 2 Grace, 4 B200, 4 NICs of 400 Gb/s", .arch = "arm64", .hosts = 1, .cpus = 2, .switches = 2, .gpus = 1, .nics = 1,
		.gpu_speed = GEN5, .up_speed = GEN5, .nic_speed = GEN5, CONNECTX, .nic_device = 0x1021, .nic_mbps = 400000, .gpu_vendor = 0x10de, .gpu_device = 0x2941,
		.sm = 100, .joint = SWITCHED, .links = 18, .c2c_count = 5, .c2c_mbps = 44712 },
	{ "p3dn", "Amazon's 8 V100 in a hybrid cube mesh, one NIC of 100 Gb/s", INTEL, .cpu_model = 85, .hosts = 1, .cpus = 1, .gpus = 8, .nics = 1, .gpu_speed = GEN3,
		.nic_speed = GEN4, EFA, .nic_device = 0xefa0, .nic_width = 16, .nic_mbps = 100000, .gpu_vendor = 0x10de, .gpu_device = 0x1db5, .sm = 70, .joint = MESH,
		.mesh = cube_mesh },
	{ "p4d", "Amazon's 8 A100 behind NVSwitch, 4 NICs of 100 Gb/s shared by pairs", INTEL, .cpu_model = 85, .hosts = 1, .cpus = 2, .switches = 2, .gpus = 2, .nics = 1,
		.gpu_speed = GEN3, .up_speed = GEN3, .nic_speed = GEN3, EFA, .nic_device = 0xefa0, .nic_width = 16, .nic_mbps = 100000, .nic_gdr = 1, .gpu_vendor = 0x10de,
		.gpu_device = 0x20b0, .sm = 80, .joint = SWITCHED, .links = 12 },
	{ "p5", "Amazon's 8 H100 behind NVSwitch, each with 4 NICs of 100 Gb/s", AMD, .family = 25, .cpu_model = 17, .hosts = 1, .cpus = 2, .switches = 4, .gpus = 1, .nics = 4,
		.gpu_speed = GEN5, .up_speed = GEN4, .nic_speed = GEN4, EFA, .nic_device = 0xefa1, .nic_width = 8, .nic_mbps = 100000, .nic_gdr = 1, .gpu_vendor = 0x10de,
		.gpu_device = 0x2330, .sm = 90, .joint = SWITCHED, .links = 18 },
	{ "g5", "Amazon's 8 A10G on two sockets, one NIC of 100 Gb/s that can't reach them", AMD, .family = 23, .cpu_model = 49, .hosts = 1, .cpus = 2, .gpus = 4, .nics = 1,
		.far_nics = 1, .gpu_speed = GEN4, .nic_speed = GEN4, EFA, .nic_device = 0xefa0, .nic_width = 16, .nic_mbps = 100000, .gpu_vendor = 0x10de, .gpu_device = 0x2237,
		.sm = 86 },
	{ "ndv4", "Azure's 8 A100 behind NVSwitch, 8 NICs of 200 Gb/s", AMD, .family = 23, .cpu_model = 49, .hosts = 1, .cpus = 4, .switches = 1, .gpus = 2, .nics = 2,
		.gpu_speed = GEN4, .up_speed = GEN4, .nic_speed = GEN4, CONNECTX, .nic_device = 0x101c, .nic_mbps = 200000, .gpu_vendor = 0x10de, .gpu_device = 0x20b0, .sm = 80,
		.joint = SWITCHED, .links = 12 },
	{ "ndv5", "Azure's 8 H100 behind NVSwitch, each with a NIC of 400 Gb/s", INTEL, .cpu_model = 143, .hosts = 1, .cpus = 2, .switches = 4, .gpus = 1, .nics = 1,
		.gpu_speed = GEN5, .up_speed = GEN5, .nic_speed = GEN5, CONNECTX, .nic_device = 0x101e, .nic_mbps = 400000, .gpu_vendor = 0x10de, .gpu_device = 0x2330, .sm = 90,
		.joint = SWITCHED, .links = 18 },
	{ "mi250x", "4 MI250X of two dies (GCD) each, joined by xGMI, 4 NICs of 200 Gb/s", AMD, .family = 25, .cpu_model = 48, .hosts = 1, .cpus = 4, .switches = 1, .gpus = 2,
		.nics = 1, .gpu_speed = GEN4, .up_speed = GEN4, .nic_speed = GEN4, CONNECTX, .nic_device = 0x101b, .nic_mbps = 200000, .gpu_vendor = 0x1002, .gpu_device = 0x7408,
		.sm = 110, .gcn = "gfx90a", .joint = MESH, .mesh = mi250x_mesh },
	{ "mi300x", "8 MI300X, each joined to each by xGMI, each with a NIC of 400 Gb/s", AMD, .family = 25, .cpu_model = 17, .hosts = 1, .cpus = 2, .switches = 4, .gpus = 1,
		.nics = 1, .gpu_speed = GEN5, .up_speed = GEN5, .nic_speed = GEN5, CONNECTX, .nic_device = 0x1021, .nic_mbps = 400000, .gpu_vendor = 0x1002, .gpu_device = 0x74a1,
		.sm = 304, .gcn = "gfx942", .joint = ALL_TO_ALL, .links = 1 },
	{ "mi300a", "4 MI300A, CPU and GPU in one package, joined by two xGMI each, a NIC of 200 Gb/s each", AMD, .family = 25, .cpu_model = 144, .hosts = 1, .cpus = 4,
		.switches = 1, .gpus = 1, .nics = 1, .gpu_speed = GEN5, .up_speed = GEN5, .nic_speed = GEN4, CONNECTX, .nic_device = 0x101b, .nic_mbps = 200000,
		.gpu_vendor = 0x1002, .gpu_device = 0x74a0, .sm = 228, .gcn = "gfx942", .joint = ALL_TO_ALL, .links = 2, .c2c_count = 1, .c2c_mbps = 256000 },
	{ "pcie-box", "8 L40S on PCIe alone, a NIC of 200 Gb/s a socket", INTEL, .cpu_model = 143, .hosts = 1, .cpus = 2, .switches = 1, .gpus = 4, .nics = 1,
		.gpu_speed = GEN4, .up_speed = GEN4, .nic_speed = GEN4, CONNECTX, .nic_device = 0x101b, .nic_mbps = 200000, .gpu_vendor = 0x10de, .gpu_device = 0x26b9, .sm = 89 },
	{ "two-sockets", "4 A100 on PCIe, two on each socket, and one NIC of 100 Gb/s", INTEL, .cpu_model = 106, .hosts = 1, .cpus = 2, .switches = 1, .gpus = 2, .nics = 1,
		.far_nics = 1, .gpu_speed = GEN4, .up_speed = GEN4, .nic_speed = GEN4, CONNECTX, .nic_device = 0x101d, .nic_mbps = 100000, .gpu_vendor = 0x10de,
		.gpu_device = 0x20b5, .sm = 80 },
	{ "nvlink-pairs", "4 A100 on PCIe joined in pairs by NVLink bridges, 2 NICs of 100 Gb/s", INTEL, .cpu_model = 106, .hosts = 1, .cpus = 2, .switches = 1, .gpus = 2,
		.nics = 1, .gpu_speed = GEN4, .up_speed = GEN4, .nic_speed = GEN4, CONNECTX, .nic_device = 0x101d, .nic_mbps = 100000, .gpu_vendor = 0x10de, .gpu_device = 0x20b5, .sm = 80,
		.joint = PAIRS, .links = 12 },
};

struct writer { struct tp_topo_doc *doc; const struct model *m; int gpu, nic; };     /* numbers within the host */

static int gpus_of(const struct model *m) { return m->cpus * TP_MAX(m->switches, 1) * m->gpus; }

/* Devices get bus numbers of their own: GPUs 0x40 and up in steps, NICs 0xa0 and up. */
static void gpu_bus(int gpu, char out[20]) { snprintf(out, 20, "0000:%02x:00.0", 0x40 + gpu); }

static ncclResult_t describe_pci(struct writer *w, struct tp_element *e, const char *bus, const char *class, uint32_t vendor, uint32_t device, const char *speed,
	int width)
{
	TP_TRY(tp_doc_set(w->doc, e, "busid", bus));
	TP_TRY(tp_doc_set(w->doc, e, "class", class));
	TP_TRY(tp_doc_setf(w->doc, e, "vendor", "0x%04x", vendor));
	TP_TRY(tp_doc_setf(w->doc, e, "device", "0x%04x", device));
	TP_TRY(tp_doc_set(w->doc, e, "link_speed", speed));
	return tp_doc_setf(w->doc, e, "link_width", "%d", width);
}

static ncclResult_t add_link(struct writer *w, struct tp_element *gpu, const char *target, int count, bool to_switch)
{
	bool amd = w->m->gpu_vendor == 0x1002;
	struct tp_element *link = tp_doc_add(w->doc, gpu, amd ? "xgmi" : "nvlink");
	if (!link) return ncclSystemError;
	TP_TRY(tp_doc_set(w->doc, link, "target", target));
	TP_TRY(tp_doc_setf(w->doc, link, "count", "%d", count));
	return tp_doc_set(w->doc, link, "tclass", to_switch ? "0x068000" : amd ? "0x038000" : "0x030200");
}

static ncclResult_t add_links(struct writer *w, struct tp_element *gpu, int number)
{
	const struct model *m = w->m;
	char bus[20];
	if (m->joint == SWITCHED) return add_link(w, gpu, "fffffff:ffff:ff", m->links, true);
	for (int peer = 0; peer < gpus_of(m); peer++) {
		int count = peer == number ? 0 : m->joint == MESH ? m->mesh[number][peer] : m->joint == ALL_TO_ALL ? m->links :
			m->joint == PAIRS && peer / 2 == number / 2 ? m->links : 0;
		gpu_bus(peer, bus);
		if (count) TP_TRY(add_link(w, gpu, bus, count, false));
	}
	return ncclSuccess;
}

static ncclResult_t add_gpu(struct writer *w, struct tp_element *parent, int host)
{
	const struct model *m = w->m;
	int number = w->gpu++;
	char bus[20];
	struct tp_element *pci = tp_doc_add(w->doc, parent, "pci"), *gpu = pci ? tp_doc_add(w->doc, pci, "gpu") : NULL;
	if (!gpu) return ncclSystemError;
	gpu_bus(number, bus);
	TP_TRY(describe_pci(w, pci, bus, m->gpu_vendor == 0x1002 ? "0x038000" : "0x030200", m->gpu_vendor, m->gpu_device, m->gpu_speed, 16));
	TP_TRY(tp_doc_setf(w->doc, gpu, "dev", "%d", number));
	TP_TRY(tp_doc_setf(w->doc, gpu, "sm", "%d", m->sm));
	if (m->gcn) TP_TRY(tp_doc_set(w->doc, gpu, "gcn", m->gcn));
	TP_TRY(tp_doc_setf(w->doc, gpu, "rank", "%d", host * gpus_of(m) + number));
	TP_TRY(tp_doc_set(w->doc, gpu, "gdr", "1"));
	TP_TRY(add_links(w, gpu, number));
	if (!m->c2c_count) return ncclSuccess;
	struct tp_element *c2c = tp_doc_add(w->doc, gpu, "c2c");
	if (!c2c) return ncclSystemError;
	TP_TRY(tp_doc_setf(w->doc, c2c, "bw", "%d", m->c2c_mbps));
	return tp_doc_setf(w->doc, c2c, "count", "%d", m->c2c_count);
}

static ncclResult_t add_nic(struct writer *w, struct tp_element *parent, int host)
{
	const struct model *m = w->m;
	int number = w->nic++;
	char bus[20];
	struct tp_element *pci = tp_doc_add(w->doc, parent, "pci"), *nic = pci ? tp_doc_add(w->doc, pci, "nic") : NULL, *net = nic ? tp_doc_add(w->doc, nic, "net") : NULL;
	if (!net) return ncclSystemError;
	snprintf(bus, sizeof(bus), "0000:%02x:00.0", 0xa0 + number);
	TP_TRY(describe_pci(w, pci, bus, strcmp(m->fabric, "ib") == 0 ? "0x020700" : "0x020000", m->nic_vendor, m->nic_device, m->nic_speed, m->nic_width));
	TP_TRY(tp_doc_setf(w->doc, net, "name", "%s%d", m->nic_name, number));
	TP_TRY(tp_doc_setf(w->doc, net, "dev", "%d", number));
	TP_TRY(tp_doc_setf(w->doc, net, "speed", "%d", m->nic_mbps));
	TP_TRY(tp_doc_set(w->doc, net, "port", "1"));
	TP_TRY(tp_doc_set(w->doc, net, "latency", "0.000000"));
	TP_TRY(tp_doc_setf(w->doc, net, "guid", "0x%x", 0x1000 * (host + 1) + number));
	TP_TRY(tp_doc_set(w->doc, net, "maxconn", "131072"));
	TP_TRY(tp_doc_setf(w->doc, net, "gdr", "%d", m->nic_gdr));
	return tp_doc_set(w->doc, net, "fabric", m->fabric);
}

/* C2C machines have the GPU right at its CPU, and the NIC at a port of its own. */
static ncclResult_t add_devices(struct writer *w, struct tp_element *cpu, struct tp_element *below, int host, bool with_nics)
{
	const struct model *m = w->m;
	for (int g = 0; g < m->gpus; g++) TP_TRY(add_gpu(w, m->c2c_count ? cpu : below, host));
	for (int n = 0; n < m->nics && with_nics; n++) TP_TRY(add_nic(w, m->c2c_count ? cpu : below, host));
	return ncclSuccess;
}

static ncclResult_t add_cpu(struct writer *w, int host, int number)
{
	const struct model *m = w->m;
	struct tp_element *cpu = tp_doc_add(w->doc, w->doc->root, "cpu");
	if (!cpu) return ncclSystemError;
	TP_TRY(tp_doc_setf(w->doc, cpu, "host_hash", "0x%x", host + 1));
	TP_TRY(tp_doc_setf(w->doc, cpu, "numaid", "%d", m->numa[0] ? m->numa[number] : number));
	TP_TRY(tp_doc_set(w->doc, cpu, "arch", m->arch));
	if (m->vendor) {
		TP_TRY(tp_doc_set(w->doc, cpu, "vendor", m->vendor));
		TP_TRY(tp_doc_setf(w->doc, cpu, "familyid", "%d", m->family));
		TP_TRY(tp_doc_setf(w->doc, cpu, "modelid", "%d", m->cpu_model));
	}
	if (!m->switches || m->c2c_count) {
		for (int s = 0; s < TP_MAX(m->switches, 1); s++) TP_TRY(add_devices(w, cpu, cpu, host, !m->far_nics || (number == 0 && s == 0)));
		return ncclSuccess;
	}
	for (int s = 0; s < m->switches; s++) {
		char bus[20];
		struct tp_element *bridge = tp_doc_add(w->doc, cpu, "pci");
		if (!bridge) return ncclSystemError;
		snprintf(bus, sizeof(bus), "0000:%02x:00.0", 0x10 + number * m->switches + s);
		TP_TRY(describe_pci(w, bridge, bus, "0x060400", 0x1000, 0xc034, m->up_speed, 16));
		TP_TRY(add_devices(w, cpu, bridge, host, !m->far_nics || (number == 0 && s == 0)));
	}
	return ncclSuccess;
}

const char *tp_topo_model_name(int index, const char **doc)
{
	if (index < 0 || index >= (int)TP_ARRAY_LEN(models)) return NULL;
	if (doc) *doc = models[index].doc;
	return models[index].name;
}

ncclResult_t tp_topo_model(const char *name, struct tp_topo_doc **out)
{
	struct writer w = { .m = NULL };
	for (size_t i = 0; i < TP_ARRAY_LEN(models); i++)
		if (strcmp(models[i].name, name) == 0) w.m = &models[i];
	if (!w.m) return TP_FAIL(ncclInvalidArgument, "there is no model '%.40s' (telpher topo model lists them)", name);
	TP_TRY(tp_doc_create(name, "system", &w.doc));
	ncclResult_t result = tp_doc_set(w.doc, w.doc->root, "version", "1");
	for (int h = 0; h < w.m->hosts && result == ncclSuccess; h++) {
		w.gpu = w.nic = 0;
		for (int c = 0; c < w.m->cpus && result == ncclSuccess; c++) result = add_cpu(&w, h, c);
	}
	if (result == ncclSuccess) result = tp_doc_check(w.doc);
	if (result != ncclSuccess) tp_topo_doc_free(w.doc);
	else *out = w.doc;
	return result;
}

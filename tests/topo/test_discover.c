/* Discovery on machines that are made of files: the PCIe tree, links, ACS, NUMA nodes, NICs, GPUs of both makers, guests, containers. */
#include "topo/helper_topo.h"

#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char root[64];

static void make_folders(char *path)
{
	for (char *p = path + 1; (p = strchr(p, '/')); p++) {
		*p = 0;
		mkdir(path, 0755);
		*p = '/';
	}
}

__attribute__((format(printf, 2, 3)))
static void file(const char *text, const char *format, ...)
{
	char path[1024];
	int used = snprintf(path, sizeof(path), "%s", root);
	va_list list;
	va_start(list, format);
	vsnprintf(path + used, sizeof(path) - (size_t)used, format, list);
	va_end(list);
	make_folders(path);
	FILE *out = fopen(path, "w");
	assert_non_null(out);
	fputs(text, out);
	fclose(out);
}

static void leads(const char *from, const char *to)
{
	char path[1024], target[1024];
	snprintf(path, sizeof(path), "%s%s", root, from);
	snprintf(target, sizeof(target), "%s%s", root, to);
	make_folders(path);
	assert_int_equal(symlink(target, path), 0);
}

struct device { const char *path, *class, *vendor, *max_speed, *speed; int max_width, width, numa; };

/* path: below /sys/devices; its last part is the bus id. */
static void pci(struct device d)
{
	const char *bus_id = strrchr(d.path, '/') + 1;
	char link[256], target[512], text[32];
	snprintf(target, sizeof(target), "/sys/devices/%s", d.path);
	snprintf(link, sizeof(link), "/sys/bus/pci/devices/%s", bus_id);
	file(d.class, "%s/class", target);
	file(d.vendor, "%s/vendor", target);
	file("0x0001\n", "%s/device", target);
	file(d.max_speed ? d.max_speed : "32.0 GT/s PCIe\n", "%s/max_link_speed", target);
	file(d.speed ? d.speed : "32.0 GT/s PCIe\n", "%s/current_link_speed", target);
	snprintf(text, sizeof(text), "%d\n", d.max_width ? d.max_width : 16);
	file(text, "%s/max_link_width", target);
	snprintf(text, sizeof(text), "%d\n", d.width ? d.width : 16);
	file(text, "%s/current_link_width", target);
	snprintf(text, sizeof(text), "%d\n", d.numa);
	file(text, "%s/numa_node", target);
	leads(link, target);
}

#define BRIDGE .class = "0x060400\n", .vendor = "0x1000\n"
#define GPU_CLASS .class = "0x030200\n", .vendor = "0x10de\n"
#define NIC_CLASS .class = "0x020700\n", .vendor = "0x15b3\n"

static void config(const char *bus_id, bool acs, int mps, int mrrs)
{
	uint8_t bytes[4096] = { 0 };
	char path[256];
	bytes[0x34] = 0x40;
	bytes[0x40] = 0x10;
	uint16_t control = (uint16_t)(mps << 5 | mrrs << 12);
	bytes[0x48] = (uint8_t)control;
	bytes[0x49] = (uint8_t)(control >> 8);
	/* An error-reporting capability first, then ACS. */
	bytes[0x100] = 0x01;
	bytes[0x102] = 0x02;
	bytes[0x103] = 0x14;
	bytes[0x140] = 0x0d;
	bytes[0x142] = 0x01;
	bytes[0x146] = acs ? 0x1d : 0;
	snprintf(path, sizeof(path), "%s/sys/bus/pci/devices/%s/config", root, bus_id);
	FILE *out = fopen(path, "w");
	assert_non_null(out);
	assert_int_equal(fwrite(bytes, 1, sizeof(bytes), out), sizeof(bytes));
	fclose(out);
}

static void rdma(const char *name, const char *device, const char *rate, const char *state, const char *layer)
{
	char path[256];
	snprintf(path, sizeof(path), "/sys/class/infiniband/%s", name);
	file("fc6a:1c03:0060:d5a8\n", "%s/node_guid", path);
	file(rate, "%s/ports/1/rate", path);
	file(state, "%s/ports/1/state", path);
	file(layer, "%s/ports/1/link_layer", path);
	strcat(path, "/device");
	if (device) leads(path, device);
}

/* Two sockets; on the first a switch with a GPU and a NIC, on the second a GPU right at a root port. */
static void build_server(void)
{
	static const char cpuinfo[] = "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\nmodel name\t: Xeon\nflags\t\t: fpu vme\n";
	file(cpuinfo, "/proc/cpuinfo");
	file("0123-4567\n", "/proc/sys/kernel/random/boot_id");
	file("0-3\n", "/sys/devices/system/node/node0/cpulist");
	file("4-7\n", "/sys/devices/system/node/node1/cpulist");
	file("\n", "/sys/devices/system/node/node2/cpulist");
	pci((struct device){ "pci0000:17/0000:17:01.0", BRIDGE });
	pci((struct device){ "pci0000:17/0000:17:01.0/0000:18:00.0", BRIDGE });
	pci((struct device){ "pci0000:17/0000:17:01.0/0000:18:00.0/0000:19:00.0", BRIDGE });
	pci((struct device){ "pci0000:17/0000:17:01.0/0000:18:00.0/0000:19:01.0", BRIDGE });
	pci((struct device){ "pci0000:17/0000:17:01.0/0000:18:00.0/0000:19:00.0/0000:1a:00.0", GPU_CLASS, .speed = "2.5 GT/s PCIe\n" });
	pci((struct device){ "pci0000:17/0000:17:01.0/0000:18:00.0/0000:19:01.0/0000:1b:00.0", NIC_CLASS });
	pci((struct device){ "pci0000:37/0000:37:01.0", BRIDGE, .numa = 1 });
	pci((struct device){ "pci0000:37/0000:37:01.0/0000:3a:00.0", GPU_CLASS, .numa = 1 });
	rdma("mlx5_0", "/sys/devices/pci0000:17/0000:17:01.0/0000:18:00.0/0000:19:01.0/0000:1b:00.0", "400 Gb/sec (4X NDR)\n", "4: ACTIVE\n", "InfiniBand\n");
	file("535.1\n", "/sys/module/nvidia_peermem/version");
}

static struct tp_topo *discover(struct tp_topo_find find)
{
	struct tp_topo_doc *doc;
	struct tp_topo *topo;
	struct tp_topo_policy policy;
	find.root = root;
	assert_int_equal(tp_topo_discover(&find, &doc), ncclSuccess);
	assert_int_equal(tp_topo_build(doc, &topo), ncclSuccess);
	tp_topo_doc_free(doc);
	tp_topo_policy_default(&policy);
	assert_int_equal(tp_topo_compute_paths(topo, &policy), ncclSuccess);
	return topo;
}

static const struct tp_topo_node *node(const struct tp_topo *topo, const char *name)
{
	return &topo->nodes[helper_node(topo, name)];
}

static void the_pci_tree_becomes_switches_gpus_and_nics(void **state)
{
	(void)state;
	build_server();
	struct tp_topo *topo = discover((struct tp_topo_find){ .all_gpus = true, .rank = -1 });
	assert_int_equal(topo->count[TP_TOPO_CPU], 2);
	assert_int_equal(topo->count[TP_TOPO_GPU], 2);
	assert_int_equal(topo->count[TP_TOPO_PCI], 1);
	const struct tp_topo_node *gpu = node(topo, "0000:1a:00.0"), *net = node(topo, "mlx5_0");
	assert_string_equal(topo->nodes[gpu->parent].pci.bus_id, "0000:18:00.0");
	assert_int_equal(topo->nodes[gpu->near_cpu].cpu.numa, 0);
	assert_int_equal(tp_topo_path(topo, gpu->index, net->index)->type, TP_PATH_PIX);
	const struct tp_topo_node *other = node(topo, "0000:3a:00.0");
	assert_int_equal(topo->nodes[other->parent].cpu.numa, 1);
	assert_int_equal(topo->nodes[other->parent].cpu.mask[0], 0xf0);
	assert_int_equal(topo->nodes[other->parent].cpu.model, 143);
	tp_topo_free(topo);
}

static void gpus_are_described_by_nvml(void **state)
{
	(void)state;
	build_server();
	struct tp_topo *topo = discover((struct tp_topo_find){ .all_gpus = true, .rank = -1 });
	const struct tp_topo_node *a = node(topo, "gpu0"), *b = node(topo, "gpu1");
	struct tp_topo_policy policy;
	struct tp_topo_warning *list;
	int count;
	assert_int_equal(a->gpu.sm, 90);
	assert_int_equal(a->gpu.nvlinks, 18);
	assert_int_equal(b->gpu.nvlinks, 16);
	assert_true(a->gpu.gdr);
	assert_int_equal(tp_topo_path(topo, a->index, b->index)->type, TP_PATH_NVL);
	tp_topo_policy_default(&policy);
	assert_int_equal(tp_topo_find_faults(topo, &policy, &list, &count), ncclSuccess);
	assert_int_equal(count, 1);
	assert_int_equal(list[0].fault, TP_FAULT_NVLINK_MISSING);
	free(list);
	tp_topo_free(topo);
}

static void a_sleeping_gpu_is_not_slow_but_a_narrow_nic_is(void **state)
{
	(void)state;
	build_server();
	file("8\n", "/sys/bus/pci/devices/0000:1b:00.0/current_link_width");
	file("16.0 GT/s PCIe\n", "/sys/bus/pci/devices/0000:1b:00.0/current_link_speed");
	struct tp_topo *topo = discover((struct tp_topo_find){ .all_gpus = true, .rank = -1 });
	const struct tp_topo_node *gpu = node(topo, "gpu0"), *net = node(topo, "mlx5_0"), *nic = &topo->nodes[net->parent];
	assert_float_equal(gpu->pci.speed, 32, 0);
	assert_int_equal(nic->pci.width, 8);
	assert_int_equal(nic->pci.max_width, 16);
	assert_float_equal(nic->pci.speed, 16, 0);
	assert_float_equal(nic->pci.max_speed, 32, 0);
	assert_float_equal(tp_topo_path(topo, gpu->index, net->index)->bw, 12, 1e-9);
	tp_topo_free(topo);
}

static void a_narrow_slot_is_no_fault_of_the_card(void **state)
{
	(void)state;
	build_server();
	file("8\n", "/sys/bus/pci/devices/0000:1b:00.0/current_link_width");
	file("8\n", "/sys/bus/pci/devices/0000:19:01.0/max_link_width");
	struct tp_topo *topo = discover((struct tp_topo_find){ .rank = -1 });
	const struct tp_topo_node *nic = &topo->nodes[node(topo, "mlx5_0")->parent];
	assert_int_equal(nic->pci.width, 8);
	assert_int_equal(nic->pci.max_width, 0);
	tp_topo_free(topo);
}

static void acs_and_packet_sizes_are_read_from_the_configuration_space(void **state)
{
	(void)state;
	build_server();
	config("0000:19:00.0", true, 1, 2);
	config("0000:1a:00.0", false, 1, 5);
	struct tp_topo *topo = discover((struct tp_topo_find){ .all_gpus = true, .rank = -1 });
	const struct tp_topo_node *gpu = node(topo, "gpu0");
	assert_int_equal(topo->nodes[gpu->parent].pci.acs, 1);
	assert_int_equal(gpu->pci.mps, 256);
	assert_int_equal(gpu->pci.mrrs, 4096);
	tp_topo_free(topo);
	config("0000:19:00.0", false, 1, 2);
	topo = discover((struct tp_topo_find){ .all_gpus = true, .rank = -1 });
	assert_int_equal(topo->nodes[node(topo, "gpu0")->parent].pci.acs, 0);
	tp_topo_free(topo);
}

static void a_configuration_space_that_leads_in_circles_ends(void **state)
{
	(void)state;
	build_server();
	uint8_t bytes[4096];
	char path[256];
	memset(bytes, 0, sizeof(bytes));
	bytes[0x34] = 0x40;
	bytes[0x41] = 0x40;
	bytes[0x100] = 0x01;
	bytes[0x103] = 0x10;
	snprintf(path, sizeof(path), "%s/sys/bus/pci/devices/0000:1a:00.0/config", root);
	FILE *out = fopen(path, "w");
	assert_int_equal(fwrite(bytes, 1, sizeof(bytes), out), sizeof(bytes));
	fclose(out);
	tp_topo_free(discover((struct tp_topo_find){ .all_gpus = true, .rank = -1 }));
}

static void nics_have_rate_fabric_and_guid(void **state)
{
	(void)state;
	build_server();
	rdma("mlx5_1", NULL, "100 Gb/sec (4X EDR)\n", "1: DOWN\n", "Ethernet\n");
	rdma("rxe0", NULL, "10 Gb/sec (4X)\n", "4: ACTIVE\n", "Ethernet\n");
	struct tp_topo *topo = discover((struct tp_topo_find){ .rank = -1 });
	const struct tp_topo_node *net = node(topo, "mlx5_0"), *soft = node(topo, "rxe0");
	assert_int_equal(topo->count[TP_TOPO_NET], 2);
	assert_float_equal(net->net.bw, 50, 1e-9);
	assert_int_equal(net->net.fabric, TP_FABRIC_IB);
	assert_int_equal(net->net.guid, 0xfc6a1c030060d5a8);
	assert_true(net->net.gdr);
	assert_int_equal(soft->net.fabric, TP_FABRIC_ROCE);
	assert_false(soft->net.gdr);
	assert_int_equal(topo->nodes[soft->parent].parent, topo->of_kind[TP_TOPO_CPU][0]);
	tp_topo_free(topo);
}

static void interfaces_serve_where_there_is_no_rdma(void **state)
{
	(void)state;
	file("0-1\n", "/sys/devices/system/node/node0/cpulist");
	pci((struct device){ "pci0000:00/0000:00:05.0", NIC_CLASS });
	leads("/sys/class/net/eth0/device", "/sys/devices/pci0000:00/0000:00:05.0");
	file("0x1003\n", "/sys/class/net/eth0/flags");
	file("25000\n", "/sys/class/net/eth0/speed");
	file("0x1009\n", "/sys/class/net/lo/flags");
	file("0x1003\n", "/sys/class/net/docker0/flags");
	struct tp_topo *topo = discover((struct tp_topo_find){ .rank = -1 });
	assert_int_equal(topo->count[TP_TOPO_NET], 1);
	assert_float_equal(node(topo, "eth0")->net.bw, 3.125, 1e-9);
	assert_int_equal(node(topo, "eth0")->net.fabric, TP_FABRIC_ETHERNET);
	assert_string_equal(topo->nodes[node(topo, "eth0")->parent].pci.bus_id, "0000:00:05.0");
	tp_topo_free(topo);
}

static void the_ports_of_a_transport_are_numbered_as_it_does(void **state)
{
	(void)state;
	build_server();
	rdma("mlx5_1", NULL, "100 Gb/sec (4X EDR)\n", "4: ACTIVE\n", "Ethernet\n");
	const struct tp_topo_port ports[] = { { .name = "mlx5_1", .guid = 7, .port = 1, .mbps = 100000, .gdr = true },
		{ .name = "mlx5_0", .bus_id = "0000:1b:00.0", .guid = 9, .port = 1, .mbps = 200000, .latency_us = 2.5, .gdr = true } };
	struct tp_topo *topo = discover((struct tp_topo_find){ .rank = -1, .ports = ports, .nports = 2 });
	const struct tp_topo_node *first = node(topo, "mlx5_1"), *second = node(topo, "mlx5_0");
	assert_int_equal(topo->count[TP_TOPO_NET], 2);
	assert_int_equal(first->net.dev, 0);
	assert_int_equal(first->net.fabric, TP_FABRIC_ROCE);
	assert_true(first->net.gdr);
	assert_int_equal(second->net.dev, 1);
	assert_int_equal(second->net.guid, 9);
	assert_float_equal(second->net.bw, 25, 1e-9);
	assert_int_equal(second->net.fabric, TP_FABRIC_IB);
	assert_true(second->net.gdr);
	assert_float_equal(first->net.latency_us, 0, 0);
	assert_float_equal(second->net.latency_us, 2.5, 1e-9);
	assert_string_equal(topo->nodes[second->parent].pci.bus_id, "0000:1b:00.0");
	tp_topo_free(topo);
	topo = discover((struct tp_topo_find){ .rank = -1, .ports = ports, .nports = 0 });
	assert_int_equal(topo->count[TP_TOPO_NET], 0);
	tp_topo_free(topo);
}

static void without_sys_there_is_one_cpu(void **state)
{
	(void)state;
	struct tp_topo *topo = discover((struct tp_topo_find){ .all_gpus = true, .rank = -1, .cores = true });
	assert_int_equal(topo->nnodes, 1);
	assert_int_equal(topo->nodes[0].kind, TP_TOPO_CPU);
	tp_topo_free(topo);
}

static void cores_and_caches_are_found(void **state)
{
	(void)state;
	uint64_t mask[TP_CPU_WORDS] = { 0x2 };
	file("0-3\n", "/sys/devices/system/node/node0/cpulist");
	for (int cpu = 0; cpu < 4; cpu++) {
		file(cpu % 2 ? "1,3\n" : "0,2\n", "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
		file("1\n", "/sys/devices/system/cpu/cpu%d/cache/index0/level", cpu);
		file("2\n", "/sys/devices/system/cpu/cpu%d/cache/index1/level", cpu);
		file("3\n", "/sys/devices/system/cpu/cpu%d/cache/index2/level", cpu);
		file("0-3\n", "/sys/devices/system/cpu/cpu%d/cache/index2/shared_cpu_list", cpu);
		file("32768K\n", "/sys/devices/system/cpu/cpu%d/cache/index2/size", cpu);
	}
	struct tp_topo *topo = discover((struct tp_topo_find){ .cores = true, .rank = 5, .cpu_mask = mask });
	assert_int_equal(topo->count[TP_TOPO_CACHE], 1);
	assert_int_equal(topo->count[TP_TOPO_CORE], 2);
	assert_int_equal(tp_topo_node_of(topo, TP_TOPO_CACHE, 0)->cache.bytes, 32 << 20);
	assert_int_equal(topo->nhost_ranks, 1);
	const struct tp_topo_node *core = &topo->nodes[tp_topo_find_rank(topo, 5)];
	assert_int_equal(core->kind, TP_TOPO_CORE);
	assert_int_equal(core->core.mask[0], 0xa);
	tp_topo_free(topo);
}

static void a_guest_is_told_and_its_topology_file_is_used(void **state)
{
	(void)state;
	build_server();
	file("vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 1\nflags\t\t: fpu hypervisor vme\n", "/proc/cpuinfo");
	file("Amazon EC2\n", "/sys/class/dmi/id/sys_vendor");
	file("p5.48xlarge\n", "/sys/class/dmi/id/product_name");
	file("<system version=\"1\"><cpu numaid=\"1\" arch=\"x86_64\" vendor=\"AuthenticAMD\" familyid=\"25\" modelid=\"1\">"
		"<pci busid=\"ffff:ff:01.0\" class=\"0x060400\" link_speed=\"32.0 GT/s PCIe\" link_width=\"16\">"
		"<pci busid=\"0000:1a:00.0\" class=\"0x030200\" link_speed=\"32.0 GT/s PCIe\" link_width=\"16\"/></pci></cpu></system>",
		"/var/run/nvidia-topologyd/virtualTopology.xml");
	struct tp_topo_find find = { .root = root, .gpu_bus_id = "0000:1a:00.0", .rank = 2 };
	struct tp_topo_doc *doc;
	struct tp_topo *topo;
	char *text;
	size_t bytes;
	assert_int_equal(tp_topo_discover(&find, &doc), ncclSuccess);
	assert_int_equal(tp_topo_doc_text(doc, &text, &bytes), ncclSuccess);
	assert_non_null(strstr(text, "virtual=\"Amazon EC2 p5.48xlarge\""));
	free(text);
	assert_int_equal(tp_topo_doc_settle(root, &doc), ncclSuccess);
	assert_int_equal(tp_topo_build(doc, &topo), ncclSuccess);
	const struct tp_topo_node *gpu = node(topo, "rank 2");
	assert_string_equal(topo->nodes[gpu->parent].pci.bus_id, "ffff:ff:01.0");
	assert_int_equal(topo->nodes[gpu->near_cpu].cpu.numa, 1);
	assert_int_equal(gpu->gpu.sm, 90);
	tp_topo_free(topo);
	tp_topo_doc_free(doc);
}

static void amd_gpus_and_their_links_come_from_kfd(void **state)
{
	(void)state;
	static const char nodes[] = "/sys/class/kfd/kfd/topology/nodes";
	file("0-7\n", "/sys/devices/system/node/node0/cpulist");
	file("6.8.0\n", "/proc/sys/kernel/osrelease");
	file("1\n", "/sys/module/amdgpu/version");
	pci((struct device){ "pci0000:00/0000:00:01.0/0000:03:00.0", .class = "0x120000\n", .vendor = "0x1002\n" });
	pci((struct device){ "pci0000:00/0000:00:02.0/0000:26:00.0", .class = "0x120000\n", .vendor = "0x1002\n" });
	file("cpu_cores_count 8\nsimd_count 0\n", "%s/0/properties", nodes);
	file("simd_count 1216\nsimd_per_cu 4\ngfx_target_version 90402\nlocation_id 768\ndomain 0\nvendor_id 4098\n", "%s/1/properties", nodes);
	file("simd_count 1216\nsimd_per_cu 4\ngfx_target_version 90402\nlocation_id 9728\ndomain 0\nvendor_id 4098\n", "%s/2/properties", nodes);
	file("type 2\nnode_from 1\nnode_to 0\n", "%s/1/io_links/0/properties", nodes);
	file("type 11\nnode_from 1\nnode_to 2\nmin_bandwidth 50000\nmax_bandwidth 100000\n", "%s/1/p2p_links/0/properties", nodes);
	file("type 11\nnode_from 1\nnode_to 2\nmin_bandwidth 50000\nmax_bandwidth 100000\n", "%s/1/io_links/1/properties", nodes);
	file("type 11\nnode_from 2\nnode_to 1\nmin_bandwidth 50000\nmax_bandwidth 100000\n", "%s/2/io_links/1/properties", nodes);
	struct tp_topo *topo = discover((struct tp_topo_find){ .all_gpus = true, .rank = -1 });
	const struct tp_topo_node *gpu = node(topo, "0000:26:00.0");
	assert_int_equal(gpu->gpu.dev, 1);
	assert_int_equal(gpu->gpu.sm, 304);
	assert_int_equal(gpu->gpu.maker, TP_MAKER_AMD);
	assert_string_equal(gpu->gpu.gcn, "gfx942");
	assert_true(gpu->gpu.gdr);
	const struct tp_topo_path *path = tp_topo_path(topo, gpu->index, helper_node(topo, "gpu0"));
	assert_int_equal(path->type, TP_PATH_NVL);
	assert_float_equal(path->bw, 96, 1e-9);
	tp_topo_free(topo);
}

static void what_the_driver_forbids_is_not_used(void **state)
{
	(void)state;
	build_server();
	pci((struct device){ "pci0000:37/0000:37:02.0/0000:5a:00.0", GPU_CLASS, .numa = 1 });
	struct tp_topo *topo = discover((struct tp_topo_find){ .all_gpus = true, .rank = -1 });
	struct tp_topo_policy policy;
	struct tp_topo_p2p p2p;
	tp_topo_policy_default(&policy);
	policy.p2p_level = TP_PATH_SYS;
	policy.p2p_by = "NCCL_P2P_LEVEL";
	int32_t a = helper_node(topo, "0000:1a:00.0"), b = helper_node(topo, "0000:5a:00.0");
	assert_int_equal(tp_topo_decide_p2p(topo, &policy, a, b, &p2p), ncclSuccess);
	assert_false(p2p.use);
	assert_int_equal(p2p.why.reason, TP_WHY_GPU_UNABLE);
	policy.ignore_disabled_p2p = true;
	assert_int_equal(tp_topo_decide_p2p(topo, &policy, a, b, &p2p), ncclSuccess);
	assert_true(p2p.use);
	/* It has C2C, and a domain of its own. */
	assert_int_equal(tp_topo_path(topo, b, topo->nodes[b].near_cpu)->type, TP_PATH_C2C);
	assert_int_equal(topo->count[TP_TOPO_NVS], 2);
	tp_topo_free(topo);
}

static void each_process_finds_its_own_and_together_they_are_the_machine(void **state)
{
	(void)state;
	build_server();
	struct tp_topo_find finds[2] = { { .root = root, .gpu_bus_id = "0000:1a:00.0", .rank = 0 }, { .root = root, .gpu_bus_id = "0000:3a:00.0", .rank = 1 } };
	struct tp_topo_doc *docs[2], *sent;
	struct tp_topo *topo;
	char *text;
	size_t bytes;
	for (int i = 0; i < 2; i++) assert_int_equal(tp_topo_discover(&finds[i], &docs[i]), ncclSuccess);
	assert_int_equal(tp_topo_doc_text(docs[1], &text, &bytes), ncclSuccess);
	assert_int_equal(tp_topo_doc_parse(text, bytes, "rank 1", &sent), ncclSuccess);
	assert_int_equal(tp_topo_doc_merge(docs[0], sent), ncclSuccess);
	assert_int_equal(tp_topo_build(docs[0], &topo), ncclSuccess);
	assert_int_equal(topo->count[TP_TOPO_GPU], 2);
	assert_int_equal(topo->count[TP_TOPO_NET], 1);
	assert_int_equal(tp_topo_node_of(topo, TP_TOPO_GPU, 1)->gpu.rank, 1);
	assert_int_equal(topo->count[TP_TOPO_NVS], 1);
	free(text);
	tp_topo_free(topo);
	tp_topo_doc_free(sent);
	for (int i = 0; i < 2; i++) tp_topo_doc_free(docs[i]);
}

static void this_machine_is_found(void **state)
{
	(void)state;
	struct tp_topo_find find = { .all_gpus = true, .rank = -1, .cores = true };
	struct tp_topo_doc *doc;
	struct tp_topo *topo;
	assert_int_equal(tp_topo_discover(&find, &doc), ncclSuccess);
	assert_int_equal(tp_topo_build(doc, &topo), ncclSuccess);
	assert_true(topo->count[TP_TOPO_CPU] >= 1);
	tp_topo_free(topo);
	tp_topo_doc_free(doc);
}

static int remove_one(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
	(void)st;
	(void)flag;
	(void)ftw;
	return remove(path);
}

static int make_root(void **state)
{
	(void)state;
	strcpy(root, "/tmp/telpher_machine_XXXXXX");
	return mkdtemp(root) ? 0 : -1;
}

static int remove_root(void **state)
{
	(void)state;
	return nftw(root, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

static void a_device_has_its_processors(void **state)
{
	(void)state;
	uint64_t mask[TP_CPU_WORDS] = { 7 };
	file("0-3,64-67\n", "/sys/bus/pci/devices/0000:1b:00.0/local_cpulist");
	file("\n", "/sys/bus/pci/devices/0000:1c:00.0/local_cpulist");
	assert_false(tp_topo_cpus_near(root, "0000:1c:00.0", mask));
	assert_false(tp_topo_cpus_near(root, "0000:1d:00.0", mask));
	assert_false(tp_topo_cpus_near(root, "../../../x", mask));
	assert_true(mask[0] == 7);
	assert_true(tp_topo_cpus_near(root, "0000:1b:00.0", mask));
	assert_true(mask[0] == 15 && mask[1] == 15 && mask[2] == 0);
}

#define ON_FILES(test) cmocka_unit_test_setup_teardown(test, make_root, remove_root)

int main(void)
{
	setenv("TELPHER_NVML_LIBRARY", FAKE_NVML_LIBRARY, 1);
	const struct CMUnitTest tests[] = {
		ON_FILES(the_pci_tree_becomes_switches_gpus_and_nics), ON_FILES(gpus_are_described_by_nvml), ON_FILES(a_sleeping_gpu_is_not_slow_but_a_narrow_nic_is),
		ON_FILES(a_narrow_slot_is_no_fault_of_the_card), ON_FILES(acs_and_packet_sizes_are_read_from_the_configuration_space),
		ON_FILES(a_configuration_space_that_leads_in_circles_ends), ON_FILES(nics_have_rate_fabric_and_guid),
		ON_FILES(interfaces_serve_where_there_is_no_rdma), ON_FILES(without_sys_there_is_one_cpu), ON_FILES(cores_and_caches_are_found),
		ON_FILES(a_guest_is_told_and_its_topology_file_is_used), ON_FILES(amd_gpus_and_their_links_come_from_kfd),
		ON_FILES(what_the_driver_forbids_is_not_used), ON_FILES(each_process_finds_its_own_and_together_they_are_the_machine),
		ON_FILES(this_machine_is_found), ON_FILES(the_ports_of_a_transport_are_numbered_as_it_does),
		ON_FILES(a_device_has_its_processors),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

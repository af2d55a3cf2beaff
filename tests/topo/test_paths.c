/* The graph and the ways through it. */
#include "topo/helper_topo.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct tp_topo_path *path(const struct tp_topo *topo, const char *from, const char *to)
{
	return tp_topo_path(topo, helper_node(topo, from), helper_node(topo, to));
}

static void link_speeds_are_those_of_nccl(void **state)
{
	(void)state;
	assert_float_equal(tp_topo_pcie_bw(16, 16), 24, 1e-9);
	assert_float_equal(tp_topo_pcie_bw(32, 16), 48, 1e-9);
	assert_float_equal(tp_topo_pcie_bw(0, 0), 12, 1e-9);
	assert_float_equal(tp_topo_nvlink_bw(90), 20.6, 1e-9);
	assert_float_equal(tp_topo_nvlink_bw(103), 40.1, 1e-9);
	assert_float_equal(tp_topo_inter_cpu_bw(TP_ARCH_X86, TP_VENDOR_INTEL, 6, 0x8f), 22, 1e-9);
}

static void every_constant_has_a_source(void **state)
{
	(void)state;
	size_t count;
	const struct tp_topo_constant *all = tp_topo_constants(&count);
	assert_true(count > 20);
	for (size_t i = 0; i < count; i++) {
		assert_true(all[i].value > 0 && strlen(all[i].source) > 4);
		assert_float_equal(tp_topo_constant(all[i].name), all[i].value, 0);
	}
}

static void one_switch_is_pix_two_are_pxb_a_cpu_is_phb(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_topo("<system version=\"1\">" HELPER_CPU("0") HELPER_BRIDGE("0000:01:00.0", "")
		HELPER_BRIDGE("0000:02:00.0", "") HELPER_GPU("0000:03:00.0", "0", "") HELPER_GPU("0000:04:00.0", "1", "") "</pci>"
		HELPER_BRIDGE("0000:05:00.0", "") HELPER_GPU("0000:06:00.0", "2", "") "</pci></pci>"
		HELPER_GPU("0000:07:00.0", "3", "") "</cpu>" HELPER_CPU("1") HELPER_GPU("0000:08:00.0", "4", "") "</cpu></system>", NULL);
	assert_int_equal(path(topo, "gpu0", "gpu0")->type, TP_PATH_LOC);
	assert_int_equal(path(topo, "gpu0", "gpu1")->type, TP_PATH_PIX);
	assert_int_equal(path(topo, "gpu0", "gpu2")->type, TP_PATH_PXB);
	assert_int_equal(path(topo, "gpu0", "gpu3")->type, TP_PATH_PHB);
	assert_int_equal(path(topo, "gpu0", "gpu4")->type, TP_PATH_SYS);
	assert_float_equal(path(topo, "gpu0", "gpu4")->bw, 22, 1e-9);
	tp_topo_free(topo);
}

static void a_path_is_made_of_links_that_follow_each_other(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_topo(HELPER_PAIR, NULL);
	const struct tp_topo_path *p = path(topo, "gpu0", "mlx5_1");
	int32_t at = helper_node(topo, "gpu0");
	assert_int_equal(p->nhops, 5);
	for (int32_t i = 0; i < p->nhops; i++) {
		assert_int_equal(topo->links[p->links[i]].from, at);
		at = topo->links[p->links[i]].to;
		assert_true(topo->links[p->links[i]].bw >= p->bw);
	}
	assert_int_equal(at, helper_node(topo, "mlx5_1"));
	assert_float_equal(topo->links[p->links[p->limit]].bw, p->bw, 0);
	tp_topo_free(topo);
}

static void every_link_has_its_way_back(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_topo(HELPER_PAIR, NULL);
	for (int32_t i = 0; i < topo->nlinks; i++) {
		const struct tp_topo_link *link = &topo->links[i], *back = &topo->links[link->reverse];
		assert_true(link->reverse >= 0);
		assert_int_equal(back->reverse, i);
		assert_int_equal(back->from, link->to);
		assert_int_equal(back->to, link->from);
	}
	tp_topo_free(topo);
}

static void nvlink_behind_a_switch_joins_all(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_topo("<system version=\"1\">" HELPER_CPU("0") HELPER_GPU("0000:01:00.0", "0", HELPER_NV18)
		HELPER_GPU("0000:02:00.0", "1", HELPER_NV18) "</cpu></system>", NULL);
	assert_int_equal(topo->count[TP_TOPO_NVS], 1);
	assert_int_equal(path(topo, "gpu0", "gpu1")->type, TP_PATH_NVL);
	assert_float_equal(path(topo, "gpu0", "gpu1")->bw, 370.8, 1e-6);
	assert_float_equal(topo->total_bw, 370.8, 1e-6);
	tp_topo_free(topo);
}

static void domains_of_nvlink_have_switches_of_their_own(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_topo("<system version=\"1\"><cpu host_hash=\"0x1\" numaid=\"0\"><pci busid=\"0000:01:00.0\"><gpu dev=\"0\" sm=\"90\" rank=\"0\" "
		"nvldomain=\"a\">" HELPER_NV18 "</gpu></pci></cpu><cpu host_hash=\"0x2\" numaid=\"0\"><pci busid=\"0000:01:00.0\"><gpu dev=\"0\" sm=\"90\" rank=\"1\" "
		"nvldomain=\"b\">" HELPER_NV18 "</gpu></pci></cpu></system>", NULL);
	assert_int_equal(topo->nhosts, 2);
	assert_int_equal(topo->count[TP_TOPO_NVS], 2);
	assert_int_equal(tp_topo_path(topo, topo->of_kind[TP_TOPO_GPU][0], topo->of_kind[TP_TOPO_GPU][1])->type, TP_PATH_DIS);
	tp_topo_free(topo);
}

#define LINK_TO(bus, count) "<nvlink target=\"" bus "\" count=\"" count "\" tclass=\"0x030200\"/>"

static void a_gpu_relays_one_step_over_nvlink(void **state)
{
	(void)state;
	static const char chain[] = "<system version=\"1\">" HELPER_CPU("0") HELPER_GPU("0000:01:00.0", "0", LINK_TO("0000:02:00.0", "2"))
		HELPER_GPU("0000:02:00.0", "1", LINK_TO("0000:01:00.0", "2") LINK_TO("0000:03:00.0", "1"))
		HELPER_GPU("0000:03:00.0", "2", LINK_TO("0000:02:00.0", "1") LINK_TO("0000:04:00.0", "1"))
		HELPER_GPU("0000:04:00.0", "3", LINK_TO("0000:03:00.0", "1")) "</cpu></system>";
	struct tp_topo_policy policy;
	struct tp_topo *topo = helper_topo(chain, NULL);
	struct tp_topo_p2p p2p;
	tp_topo_policy_default(&policy);
	assert_int_equal(path(topo, "gpu0", "gpu2")->type, TP_PATH_NVB);
	assert_float_equal(path(topo, "gpu0", "gpu2")->bw, 20.6, 1e-9);
	assert_int_equal(path(topo, "gpu0", "gpu3")->type, TP_PATH_PHB);
	assert_int_equal(tp_topo_decide_p2p(topo, &policy, helper_node(topo, "gpu0"), helper_node(topo, "gpu2"), &p2p), ncclSuccess);
	assert_true(p2p.use);
	assert_int_equal(p2p.relay, helper_node(topo, "gpu1"));
	assert_int_equal(p2p.why.reason, TP_WHY_RELAY);
	tp_topo_free(topo);

	policy.nvb = false;
	topo = helper_topo(chain, &policy);
	assert_int_equal(path(topo, "gpu0", "gpu2")->type, TP_PATH_PHB);
	tp_topo_free(topo);
}

static void links_that_are_all_down_are_no_links(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_topo("<system version=\"1\">" HELPER_CPU("0") HELPER_GPU("0000:01:00.0", "0", LINK_TO("0000:02:00.0", "0"))
		HELPER_GPU("0000:02:00.0", "1", LINK_TO("0000:01:00.0", "0")) "</cpu></system>", NULL);
	assert_int_equal(path(topo, "gpu0", "gpu1")->type, TP_PATH_PHB);
	tp_topo_free(topo);
}

static void a_link_to_oneself_is_left_out_with_a_warning(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_topo("<system version=\"1\">" HELPER_CPU("0") HELPER_GPU("0000:01:00.0", "0", LINK_TO("0000:01:00.0", "4"))
		HELPER_GPU("0000:02:00.0", "1", "") "</cpu></system>", NULL);
	assert_non_null(strstr(tp_log_last_error(), "from a GPU to itself"));
	assert_int_equal(topo->nodes[helper_node(topo, "gpu0")].nlinks, 1);
	tp_topo_free(topo);
}

static void a_link_that_only_one_end_knows_is_not_used(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_topo("<system version=\"1\">" HELPER_CPU("0") HELPER_GPU("0000:01:00.0", "0", LINK_TO("0000:02:00.0", "4"))
		HELPER_GPU("0000:02:00.0", "1", "") "</cpu></system>", NULL);
	assert_int_equal(path(topo, "gpu0", "gpu1")->type, TP_PATH_PHB);
	assert_int_equal(path(topo, "gpu1", "gpu0")->type, TP_PATH_PHB);
	tp_topo_free(topo);
}

static void xgmi_is_read_with_its_own_bandwidth(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_topo("<system version=\"2\"><cpu numaid=\"0\" arch=\"x86_64\" vendor=\"AuthenticAMD\" familyid=\"143\" modelid=\"49\">"
		"<pci busid=\"0000:01:00.0\" class=\"0x038000\" vendor=\"0x1002\" link_speed=\"16 GT/s\" link_width=\"16\"><gpu dev=\"0\" sm=\"94\" gcn=\"gfx942\" arch=\"38911\" "
		"rank=\"0\" gdr=\"1\"><xgmi target=\"0000:02:00.0\" count=\"1\" tclass=\"0x038000\"/></gpu></pci>"
		"<pci busid=\"0000:02:00.0\" class=\"0x038000\" vendor=\"0x1002\" link_speed=\"16 GT/s\" link_width=\"16\"><gpu dev=\"1\" sm=\"94\" gcn=\"gfx942\" arch=\"38911\" "
		"rank=\"1\" gdr=\"1\"><xgmi target=\"0000:01:00.0\" count=\"1\" tclass=\"0x038000\"/></gpu></pci></cpu></system>", NULL);
	const struct tp_topo_node *gpu = &topo->nodes[helper_node(topo, "gpu0")];
	assert_int_equal(path(topo, "gpu0", "gpu1")->type, TP_PATH_NVL);
	assert_float_equal(path(topo, "gpu0", "gpu1")->bw, 48, 1e-9);
	assert_int_equal(gpu->gpu.maker, TP_MAKER_AMD);
	assert_int_equal(topo->nodes[gpu->near_cpu].cpu.family, 0x17);
	tp_topo_free(topo);
}

#define BROADCOM(bus, sub) "<pci busid=\"" bus "\" class=\"0x060400\" vendor=\"0x1000\" device=\"0xc010\" subsystem_vendor=\"0x1000\" " \
	"subsystem_device=\"" sub "\" " HELPER_X16 ">"

static void two_levels_of_one_broadcom_switch_are_one(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_topo("<system version=\"1\">" HELPER_CPU("0") BROADCOM("0000:01:00.0", "0xa004")
		BROADCOM("0000:02:00.0", "0xa004") HELPER_GPU("0000:03:00.0", "0", "") "</pci>" BROADCOM("0000:04:00.0", "0xa004")
		HELPER_GPU("0000:05:00.0", "1", "") "</pci></pci></cpu></system>", NULL);
	assert_int_equal(topo->count[TP_TOPO_PCI], 1);
	assert_int_equal(path(topo, "gpu0", "gpu1")->type, TP_PATH_PIX);
	for (int32_t i = 0; i < topo->nnodes; i++) assert_int_equal(topo->nodes[i].index, i);
	tp_topo_free(topo);
}

static void partitions_of_a_gpu_share_its_link(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_topo("<system version=\"1\">" HELPER_CPU("0") "<pci busid=\"0000:01:00.0\" class=\"0x030200\" " HELPER_X16 ">"
		"<gpu dev=\"0\" sm=\"90\" rank=\"0\" gdr=\"1\"/><gpu dev=\"1\" sm=\"90\" rank=\"1\" gdr=\"1\"/></pci></cpu></system>", NULL);
	const struct tp_topo_node *a = tp_topo_node_of(topo, TP_TOPO_GPU, 0), *b = tp_topo_node_of(topo, TP_TOPO_GPU, 1);
	assert_int_equal(a->parent, b->parent);
	assert_int_equal(topo->nodes[a->parent].kind, TP_TOPO_PCI);
	assert_int_equal(path(topo, "gpu0", "gpu1")->type, TP_PATH_PIX);
	tp_topo_free(topo);
}

/* NCCL's mlopart: each half says of NVLink and C2C what the whole GPU has, and both stand under one PCI device. */
static void halves_of_a_gpu_have_half_of_its_links(void **state)
{
	(void)state;
#define HALF(n) "<gpu dev=\"0\" sm=\"107\" mlopart=\"" n "\" rank=\"" n "\" gdr=\"1\"><nvlink target=\"fffffff:ff:ff.0\" count=\"36\" tclass=\"0x068000\"/>" \
	"<c2c bw=\"56376\" count=\"7\"/></gpu>"
#define WHOLE HELPER_CPU("0") "<pci busid=\"0000:01:00.0\" class=\"0x030200\" " HELPER_X16 ">"
	struct tp_topo *topo = helper_topo("<system version=\"1\">" WHOLE HALF("0") HALF("1") "</pci></cpu></system>", NULL);
	struct tp_topo *one = helper_topo("<system version=\"1\">" WHOLE HALF("0") "</pci></cpu></system>", NULL);
	int32_t cpu = topo->of_kind[TP_TOPO_CPU][0];
	assert_int_equal(topo->count[TP_TOPO_GPU], 2);
	for (int i = 0; i < 2; i++) {
		const struct tp_topo_node *half = tp_topo_node_of(topo, TP_TOPO_GPU, i);
		double nvlink = 0;
		for (int l = half->first_link; l < half->first_link + half->nlinks; l++)
			if (topo->links[l].kind == TP_WIRE_NVL) nvlink += topo->links[l].bw;
		assert_int_equal(half->gpu.part, i);
		assert_string_equal(half->name, i ? "GPU 0.1" : "GPU 0.0");
		assert_float_equal(nvlink, 36 * tp_topo_nvlink_bw(107) / 2, 1e-6);
		assert_int_equal(tp_topo_path(topo, half->index, cpu)->type, TP_PATH_C2C);
		assert_float_equal(tp_topo_path(topo, half->index, cpu)->bw, 7 * 56.376 / 2, 1e-6);
	}
	assert_int_equal(tp_topo_find_name(topo, "gpu0.1"), topo->of_kind[TP_TOPO_GPU][1]);
	assert_int_equal(tp_topo_find_name(topo, "GPU 0.0"), topo->of_kind[TP_TOPO_GPU][0]);
	assert_int_equal(tp_topo_find_name(topo, "gpu0.2"), -1);
	/* Which half? */
	char why[160];
	assert_int_equal(tp_topo_find_name(topo, "gpu0"), -1);
	assert_int_equal(tp_topo_find_name(topo, "0000:01:00.0"), -1);
	tp_topo_refuse_name(topo, "it", "gpu0", why, sizeof(why));
	assert_string_equal(why, "in it \"gpu0\" is a GPU of several parts: say gpu0.0 or gpu0.1");
	tp_topo_refuse_name(topo, "it", "gpu7", why, sizeof(why));
	assert_string_equal(why, "it has nothing called \"gpu7\"");
	assert_int_equal(tp_topo_find_name(one, "gpu0"), one->of_kind[TP_TOPO_GPU][0]);
	/* Where the other half isn't there, all is its own. */
	assert_float_equal(tp_topo_path(one, one->of_kind[TP_TOPO_GPU][0], one->of_kind[TP_TOPO_CPU][0])->bw, 7 * 56.376, 1e-6);
	tp_topo_free(topo);
	tp_topo_free(one);
	assert_non_null(strstr(helper_refusal("<system version=\"1\">" WHOLE "<gpu dev=\"0\" mlopart=\"1\" rank=\"0\"/><gpu dev=\"0\" mlopart=\"1\" rank=\"1\"/></pci></cpu></system>"),
		"is the same part (mlopart) of its GPU"));
	char many[2048] = "<system version=\"1\">" WHOLE;
	for (int i = 0; i < 17; i++) snprintf(many + strlen(many), sizeof(many) - strlen(many), "<gpu dev=\"0\" sm=\"107\" mlopart=\"%d\"/>", i);
	strcat(many, "</pci></cpu></system>");
	assert_non_null(strstr(helper_refusal(many), "holds more than 16 GPUs"));
	assert_non_null(strstr(helper_refusal("<system version=\"1\">" WHOLE "<gpu dev=\"0\" mlopart=\"x\"/></pci></cpu></system>"), "mlopart=\"x\""));
}

static void nodes_are_found_by_what_people_call_them(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_topo(HELPER_PAIR, NULL);
	int32_t gpu = topo->of_kind[TP_TOPO_GPU][1];
	assert_int_equal(tp_topo_find_name(topo, "gpu1"), gpu);
	assert_int_equal(tp_topo_find_name(topo, "GPU 1"), gpu);
	assert_int_equal(tp_topo_find_name(topo, "rank 1"), gpu);
	assert_int_equal(tp_topo_find_name(topo, "0000:21:00.0"), gpu);
	assert_int_equal(tp_topo_find_name(topo, "mlx5_1"), topo->of_kind[TP_TOPO_NET][1]);
	assert_int_equal(tp_topo_find_name(topo, "net1"), topo->of_kind[TP_TOPO_NET][1]);
	assert_int_equal(tp_topo_find_name(topo, "cpu0"), topo->of_kind[TP_TOPO_CPU][0]);
	assert_int_equal(tp_topo_find_name(topo, "gpu7"), -1);
	assert_int_equal(tp_topo_find_name(topo, "gpu"), -1);
	assert_int_equal(tp_topo_find_name(topo, ""), -1);
	tp_topo_free(topo);
}

static void host_ranks_have_cores_and_caches(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_topo("<system version=\"1\"><cpu numaid=\"0\" affinity=\"0000ffff\">"
		"<cache level=\"3\" bytes=\"33554432\" affinity=\"000000ff\"><core affinity=\"00000003\"/><core affinity=\"0000000c\"/></cache>"
		"<cache level=\"3\" affinity=\"0000ff00\"/><hostrank rank=\"0\" affinity=\"00000001\"/><hostrank rank=\"1\" affinity=\"00000002\"/>"
		"<hostrank rank=\"2\" affinity=\"00000004\"/><hostrank rank=\"3\" affinity=\"00000100\"/></cpu>"
		"<cpu numaid=\"1\" affinity=\"ffff0000\"><hostrank rank=\"4\" affinity=\"00010000\"/></cpu></system>", NULL);
	const struct tp_topo_host_rank *r = topo->host_ranks;
	assert_int_equal(topo->nhost_ranks, 5);
	assert_int_equal(topo->nodes[r[0].node].kind, TP_TOPO_CORE);
	assert_int_equal(tp_topo_host_path(topo, &r[0], &r[1]), TP_PATH_LOC);
	assert_int_equal(tp_topo_host_path(topo, &r[0], &r[2]), TP_PATH_PIX);
	assert_int_equal(tp_topo_host_path(topo, &r[0], &r[3]), TP_PATH_PHB);
	assert_int_equal(tp_topo_host_path(topo, &r[0], &r[4]), TP_PATH_SYS);
	assert_int_equal(tp_topo_find_rank(topo, 3), r[3].node);
	assert_int_equal(topo->nodes[r[3].node].kind, TP_TOPO_CACHE);
	tp_topo_free(topo);
}

static void a_cpu_without_a_number_is_not_called_by_any(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_topo("<system version=\"1\">" HELPER_CPU("-1") HELPER_GPU("0000:01:00.0", "0", "") "</cpu></system>", NULL);
	assert_int_equal(tp_topo_find_name(topo, "nonsense"), -1);
	assert_int_equal(tp_topo_find_name(topo, "cpu3"), -1);
	tp_topo_free(topo);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_cpu_without_a_number_is_not_called_by_any),
		cmocka_unit_test(link_speeds_are_those_of_nccl), cmocka_unit_test(every_constant_has_a_source),
		cmocka_unit_test(one_switch_is_pix_two_are_pxb_a_cpu_is_phb), cmocka_unit_test(a_path_is_made_of_links_that_follow_each_other),
		cmocka_unit_test(every_link_has_its_way_back), cmocka_unit_test(nvlink_behind_a_switch_joins_all),
		cmocka_unit_test(domains_of_nvlink_have_switches_of_their_own), cmocka_unit_test(a_gpu_relays_one_step_over_nvlink),
		cmocka_unit_test(links_that_are_all_down_are_no_links), cmocka_unit_test(a_link_to_oneself_is_left_out_with_a_warning),
		cmocka_unit_test(a_link_that_only_one_end_knows_is_not_used), cmocka_unit_test(xgmi_is_read_with_its_own_bandwidth),
		cmocka_unit_test(two_levels_of_one_broadcom_switch_are_one), cmocka_unit_test(partitions_of_a_gpu_share_its_link), cmocka_unit_test(halves_of_a_gpu_have_half_of_its_links),
		cmocka_unit_test(nodes_are_found_by_what_people_call_them), cmocka_unit_test(host_ranks_have_cores_and_caches),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

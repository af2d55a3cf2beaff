/* Yes or no, and the reason; what is worse than it could be; descriptions of several processes made one. */
#include "topo/helper_topo.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct tp_topo_p2p p2p_of(const struct tp_topo *topo, const struct tp_topo_policy *policy, const char *a, const char *b)
{
	struct tp_topo_p2p out;
	assert_int_equal(tp_topo_decide_p2p(topo, policy, helper_node(topo, a), helper_node(topo, b), &out), ncclSuccess);
	return out;
}

static struct tp_topo_gdr gdr_of(const struct tp_topo *topo, const struct tp_topo_policy *policy, const char *gpu, const char *net, bool read)
{
	struct tp_topo_gdr out;
	assert_int_equal(tp_topo_decide_gdr(topo, policy, helper_node(topo, gpu), helper_node(topo, net), read, &out), ncclSuccess);
	return out;
}

/* text with the first `from` replaced by `to`; the caller frees it. */
static char *with(const char *text, const char *from, const char *to)
{
	const char *at = strstr(text, from);
	char *made = malloc(strlen(text) + strlen(to) + 1);
	assert_non_null(at);
	sprintf(made, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
	return made;
}

static void gpus_behind_a_cpu_use_no_p2p_and_the_way_through_it(void **state)
{
	(void)state;
	struct tp_topo_policy policy;
	tp_topo_policy_default(&policy);
	struct tp_topo *topo = helper_topo(HELPER_PAIR, &policy);
	struct tp_topo_p2p p = p2p_of(topo, &policy, "gpu0", "gpu1");
	assert_false(p.use);
	assert_int_equal(p.why.reason, TP_WHY_CPU_BRIDGE);
	assert_non_null(strstr(p.why.text, "NCCL_P2P_LEVEL=PHB would use it"));
	tp_topo_free(topo);
}

static void a_level_allows_and_forbids(void **state)
{
	(void)state;
	struct tp_topo_policy policy;
	tp_topo_policy_default(&policy);
	policy.p2p_level = TP_PATH_SYS;
	policy.p2p_by = "NCCL_P2P_LEVEL";
	struct tp_topo *topo = helper_topo(HELPER_PAIR, &policy);
	struct tp_topo_p2p p = p2p_of(topo, &policy, "gpu0", "gpu1");
	assert_true(p.use);
	assert_int_equal(p.why.reason, TP_WHY_FORCED);
	policy.p2p_level = TP_PATH_PIX;
	p = p2p_of(topo, &policy, "gpu0", "gpu1");
	assert_false(p.use);
	assert_int_equal(p.why.reason, TP_WHY_LEVEL);
	policy.p2p_level = TP_PATH_LOC;
	policy.p2p_by = "NCCL_P2P_DISABLE";
	p = p2p_of(topo, &policy, "gpu0", "gpu1");
	assert_int_equal(p.why.reason, TP_WHY_DISABLED);
	assert_true(p2p_of(topo, &policy, "gpu0", "gpu0").use);
	tp_topo_free(topo);
}

static void a_guest_that_hides_bridges_is_told(void **state)
{
	(void)state;
	struct tp_topo_policy policy;
	tp_topo_policy_default(&policy);
	struct tp_topo *topo = helper_topo("<system version=\"1\" virtual=\"Cloud 9\">" HELPER_CPU("0") HELPER_GPU("0000:01:00.0", "0", "")
		HELPER_GPU("0000:02:00.0", "1", "") "</cpu></system>", &policy);
	struct tp_topo_p2p p = p2p_of(topo, &policy, "gpu0", "gpu1");
	assert_int_equal(p.why.reason, TP_WHY_VIRTUAL);
	assert_non_null(strstr(p.why.text, "virtual machine (Cloud 9)"));
	tp_topo_free(topo);
}

static void two_gpus_on_an_amd_cpu_use_p2p(void **state)
{
	(void)state;
	struct tp_topo_policy policy;
	tp_topo_policy_default(&policy);
	char *text = with(HELPER_PAIR, "GenuineIntel", "AuthenticAMD");
	struct tp_topo *topo = helper_topo(text, &policy);
	assert_true(p2p_of(topo, &policy, "gpu0", "gpu1").use);
	tp_topo_free(topo);
	free(text);
}

static void gpudirect_follows_the_distance(void **state)
{
	(void)state;
	struct tp_topo_policy policy;
	tp_topo_policy_default(&policy);
	struct tp_topo *topo = helper_topo(HELPER_PAIR, &policy);
	struct tp_topo_gdr near = gdr_of(topo, &policy, "gpu0", "mlx5_0", false), far = gdr_of(topo, &policy, "gpu0", "mlx5_1", false);
	assert_int_equal(near.mode, TP_GDR_ON);
	assert_false(near.flush);
	assert_int_equal(far.mode, TP_GDR_OFF);
	assert_int_equal(far.why.reason, TP_WHY_DISTANCE);
	policy.gdr_level = TP_PATH_SYS;
	far = gdr_of(topo, &policy, "gpu0", "mlx5_1", false);
	assert_int_equal(far.mode, TP_GDR_ON);
	assert_int_equal(far.why.reason, TP_WHY_FORCED);
	policy.gdr_level = TP_PATH_LOC;
	near = gdr_of(topo, &policy, "gpu0", "mlx5_0", false);
	assert_int_equal(near.mode, TP_GDR_OFF);
	assert_int_equal(near.why.reason, TP_WHY_LEVEL);
	tp_topo_free(topo);
}

static void gpudirect_needs_both_ends(void **state)
{
	(void)state;
	struct tp_topo_policy policy;
	tp_topo_policy_default(&policy);
	char *text = with(HELPER_PAIR, "rank=\"0\" gdr=\"1\"", "rank=\"0\" gdr=\"0\"");
	struct tp_topo *topo = helper_topo(text, &policy);
	struct tp_topo_gdr gdr = gdr_of(topo, &policy, "gpu0", "mlx5_0", false);
	assert_int_equal(gdr.mode, TP_GDR_OFF);
	assert_int_equal(gdr.why.reason, TP_WHY_GPU_UNABLE);
	assert_non_null(strstr(gdr.why.text, "nvidia_peermem"));
	assert_int_equal(tp_topo_path(topo, helper_node(topo, "gpu0"), helper_node(topo, "mlx5_0"))->type, TP_PATH_PHB);
	tp_topo_free(topo);
	free(text);
	text = with(HELPER_PAIR, "port=\"1\" gdr=\"1\"", "port=\"1\" gdr=\"0\"");
	topo = helper_topo(text, &policy);
	assert_int_equal(gdr_of(topo, &policy, "gpu0", "mlx5_0", false).why.reason, TP_WHY_NIC_UNABLE);
	tp_topo_free(topo);
	free(text);
}

static void old_gpus_flush_and_read_only_with_nvlink(void **state)
{
	(void)state;
	struct tp_topo_policy policy;
	tp_topo_policy_default(&policy);
	char *once = with(HELPER_PAIR, "sm=\"90\"", "sm=\"70\""), *text = with(once, "sm=\"90\"", "sm=\"70\"");
	struct tp_topo *topo = helper_topo(text, &policy);
	struct tp_topo_gdr write = gdr_of(topo, &policy, "gpu0", "mlx5_0", false), read = gdr_of(topo, &policy, "gpu0", "mlx5_0", true);
	assert_int_equal(write.mode, TP_GDR_ON);
	assert_true(write.flush);
	assert_int_equal(read.mode, TP_GDR_OFF);
	assert_int_equal(read.why.reason, TP_WHY_OLD_GPU);
	policy.gdr_read = TP_ON;
	assert_int_equal(gdr_of(topo, &policy, "gpu0", "mlx5_0", true).mode, TP_GDR_ON);
	policy.flush = TP_OFF;
	assert_false(gdr_of(topo, &policy, "gpu0", "mlx5_0", false).flush);
	tp_topo_free(topo);
	free(once);
	free(text);
}

#define NVL_PAIR "<system version=\"1\">" HELPER_CPU("0") HELPER_BRIDGE("0000:10:00.0", "") HELPER_GPU("0000:11:00.0", "0", HELPER_NV18) \
	HELPER_NIC("0000:12:00.0", "0") "</pci>" HELPER_BRIDGE("0000:20:00.0", "") HELPER_GPU("0000:21:00.0", "1", HELPER_NV18) \
	HELPER_NIC("0000:22:00.0", "1") "</pci></cpu></system>"

static void the_nic_of_another_gpu_is_reached_through_that_gpu(void **state)
{
	(void)state;
	struct tp_topo_policy policy;
	struct tp_topo_why why;
	tp_topo_policy_default(&policy);
	struct tp_topo *topo = helper_topo(NVL_PAIR, &policy);
	int32_t gpu = helper_node(topo, "gpu0"), net = helper_node(topo, "mlx5_1");
	assert_int_equal(tp_topo_path(topo, gpu, net)->type, TP_PATH_PXN);
	assert_int_equal(tp_topo_wire_path(topo, gpu, net)->type, TP_PATH_PHB);
	assert_int_equal(tp_topo_pxn_relay(topo, &policy, gpu, net, &why), helper_node(topo, "gpu1"));
	struct tp_topo_gdr gdr = gdr_of(topo, &policy, "gpu0", "mlx5_1", false);
	assert_int_equal(gdr.mode, TP_GDR_ON);
	assert_int_equal(gdr.type, TP_PATH_PIX);
	tp_topo_free(topo);
	policy.pxn = false;
	topo = helper_topo(NVL_PAIR, &policy);
	assert_int_equal(tp_topo_path(topo, helper_node(topo, "gpu0"), helper_node(topo, "mlx5_1"))->type, TP_PATH_PHB);
	assert_int_equal(tp_topo_pxn_relay(topo, &policy, helper_node(topo, "gpu0"), helper_node(topo, "mlx5_1"), &why), -1);
	assert_int_equal(why.reason, TP_WHY_DISABLED);
	tp_topo_free(topo);
}

static void each_gpu_has_its_nic_and_each_nic_its_gpu(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_topo(NVL_PAIR, NULL);
	double bw;
	int32_t nets[4];
	assert_int_equal(tp_topo_local_net(topo, helper_node(topo, "gpu1"), 0), helper_node(topo, "mlx5_1"));
	assert_int_equal(tp_topo_local_net(topo, helper_node(topo, "gpu1"), 5), helper_node(topo, "mlx5_1"));
	assert_int_equal(tp_topo_local_gpu(topo, helper_node(topo, "mlx5_0")), helper_node(topo, "gpu0"));
	assert_int_equal(tp_topo_local_nets(topo, helper_node(topo, "gpu0"), nets, 4, &bw), 1);
	assert_float_equal(bw, 48, 1e-9);
	tp_topo_free(topo);
}

static void shared_memory_is_for_one_machine(void **state)
{
	(void)state;
	struct tp_topo_policy policy;
	struct tp_topo_why why;
	tp_topo_policy_default(&policy);
	struct tp_topo *topo = helper_topo(HELPER_PAIR, &policy);
	assert_true(tp_topo_decide_shm(topo, &policy, helper_node(topo, "gpu0"), helper_node(topo, "gpu1"), &why));
	policy.shm = false;
	assert_false(tp_topo_decide_shm(topo, &policy, helper_node(topo, "gpu0"), helper_node(topo, "gpu1"), &why));
	assert_int_equal(why.reason, TP_WHY_DISABLED);
	tp_topo_free(topo);
}

/* ---- What is worse than it could be ---- */

/* The codes of all warnings, in order, blanks between. */
static const char *faults_of(const char *text, const struct tp_topo_policy *policy)
{
	static char codes[256];
	struct tp_topo_policy usual;
	struct tp_topo *topo = helper_topo(text, policy);
	struct tp_topo_warning *list = NULL;
	int count;
	tp_topo_policy_default(&usual);
	assert_int_equal(tp_topo_find_faults(topo, policy ? policy : &usual, &list, &count), ncclSuccess);
	codes[0] = 0;
	for (int i = 0; i < count; i++) snprintf(codes + strlen(codes), sizeof(codes) - strlen(codes), "%s%s", i ? " " : "", tp_topo_fault_code(list[i].fault));
	free(list);
	tp_topo_free(topo);
	return codes;
}

static void a_healthy_machine_has_no_faults(void **state)
{
	(void)state;
	assert_string_equal(faults_of(HELPER_PAIR, NULL), "");
	assert_string_equal(faults_of(NVL_PAIR, NULL), "");
}

static void a_narrow_link_is_found_by_what_it_could_be_and_by_its_like(void **state)
{
	(void)state;
	char *text = with(NVL_PAIR, "\"0000:21:00.0\" class=\"0x030200\" link_speed=\"32.0 GT/s PCIe\" link_width=\"16\"",
		"\"0000:21:00.0\" class=\"0x030200\" link_speed=\"32.0 GT/s PCIe\" link_width=\"8\" max_link_width=\"16\"");
	assert_string_equal(faults_of(text, NULL), "pci-width");
	free(text);
	text = with(NVL_PAIR, "\"0000:22:00.0\" class=\"0x020700\" link_speed=\"32.0 GT/s PCIe\"", "\"0000:22:00.0\" class=\"0x020700\" link_speed=\"16.0 GT/s PCIe\"");
	assert_string_equal(faults_of(text, NULL), "pci-speed");
	free(text);
}

static void acs_is_a_fault_only_where_peers_pass(void **state)
{
	(void)state;
	char *text = with(NVL_PAIR, "<pci busid=\"0000:10:00.0\" class=\"0x060400\"", "<pci busid=\"0000:10:00.0\" class=\"0x060400\" acs=\"1\"");
	assert_string_equal(faults_of(text, NULL), "acs");
	free(text);
	text = with(NVL_PAIR, "</cpu>", "<pci busid=\"0000:30:00.0\" class=\"0x060400\" acs=\"1\"/></cpu>");
	assert_string_equal(faults_of(text, NULL), "");
	free(text);
}

static void missing_peermem_is_one_fault_for_all_gpus(void **state)
{
	(void)state;
	char *once = with(NVL_PAIR, "rank=\"0\" gdr=\"1\"", "rank=\"0\" gdr=\"0\""), *text = with(once, "rank=\"1\" gdr=\"1\"", "rank=\"1\" gdr=\"0\"");
	assert_string_equal(faults_of(text, NULL), "no-gdr");
	free(once);
	free(text);
}

static void a_missing_nic_is_found(void **state)
{
	(void)state;
	static const char three[] = "<system version=\"1\">" HELPER_CPU("0") HELPER_BRIDGE("0000:10:00.0", "") HELPER_GPU("0000:11:00.0", "0", HELPER_NV18)
		HELPER_NIC("0000:12:00.0", "0") "</pci>" HELPER_BRIDGE("0000:20:00.0", "") HELPER_GPU("0000:21:00.0", "1", HELPER_NV18)
		HELPER_NIC("0000:22:00.0", "1") "</pci>" HELPER_BRIDGE("0000:30:00.0", "") HELPER_GPU("0000:31:00.0", "2", HELPER_NV18) "</pci></cpu></system>";
	assert_string_equal(faults_of(three, NULL), "no-nic");
}

/* Four GPUs with two NICs each, without identities, as files of virtual machines have them. */
#define PORT(bus, dev, speed, width) "<pci busid=\"" bus "\" class=\"0x020000\" link_speed=\"32.0 GT/s PCIe\" link_width=\"" width "\"><nic><net name=\"rdma" dev "\" dev=\"" dev \
	"\" speed=\"" speed "\" port=\"1\" gdr=\"1\"/></nic></pci>"
#define SLOT(n, dev, first, second) HELPER_BRIDGE("0000:" n "0:00.0", "") HELPER_GPU("0000:" n "1:00.0", dev, HELPER_NV18) first second "</pci>"
#define SLOTS(last_one, last_two) "<system version=\"1\">" HELPER_CPU("0") SLOT("1", "0", PORT("0000:12:00.0", "0", "100000", "16"), PORT("0000:13:00.0", "1", "100000", "16")) \
	SLOT("2", "1", PORT("0000:22:00.0", "2", "100000", "16"), PORT("0000:23:00.0", "3", "100000", "16")) \
	SLOT("3", "2", PORT("0000:32:00.0", "4", "100000", "16"), PORT("0000:33:00.0", "5", "100000", "16")) SLOT("4", "3", last_one, last_two) "</cpu></system>"

static void one_of_a_gpu_s_several_nics_that_is_missing_is_found(void **state)
{
	(void)state;
	assert_string_equal(faults_of(SLOTS(PORT("0000:42:00.0", "6", "100000", "16"), PORT("0000:43:00.0", "7", "100000", "16")), NULL), "");
	assert_string_equal(faults_of(SLOTS(PORT("0000:42:00.0", "6", "100000", "16"), ""), NULL), "no-nic");
	assert_string_equal(faults_of(SLOTS("", ""), NULL), "no-nic");
}

#define SOCKET(n, one, other, nic) HELPER_CPU(n) HELPER_BRIDGE("0000:" n "0:00.0", "") HELPER_GPU("0000:" n "1:00.0", one, HELPER_NV18) \
	HELPER_GPU("0000:" n "2:00.0", other, HELPER_NV18) nic "</pci></cpu>"
static void one_nic_for_two_sockets_is_an_ordinary_machine(void **state)
{
	(void)state;
	static const char both[] = "<system version=\"1\">" SOCKET("1", "0", "1", HELPER_NIC("0000:13:00.0", "0")) SOCKET("2", "2", "3", HELPER_NIC("0000:23:00.0", "1")) "</system>";
	static const char one[] = "<system version=\"1\">" SOCKET("1", "0", "1", HELPER_NIC("0000:13:00.0", "0")) SOCKET("2", "2", "3", "") "</system>";
	static const char one_gpu[] = "<system version=\"1\">" SOCKET("1", "0", "1", "") HELPER_CPU("2") HELPER_NIC("0000:23:00.0", "1") "</cpu></system>";
	assert_string_equal(faults_of(both, NULL), "");
	assert_string_equal(faults_of(one, NULL), "");
	assert_string_equal(faults_of(one_gpu, NULL), "");
}

static void a_slow_port_is_found_without_identities_where_most_are_faster(void **state)
{
	(void)state;
	assert_string_equal(faults_of(SLOTS(PORT("0000:42:00.0", "6", "100000", "16"), PORT("0000:43:00.0", "7", "50000", "16")), NULL), "nic-rate");
}

/* Two GPUs share each NIC; behind the narrow one the others' are wider, which is not a NIC that is missing. */
#define PAIR(n, one, other, nic) HELPER_BRIDGE("0000:" n "0:00.0", "") HELPER_GPU("0000:" n "1:00.0", one, HELPER_NV18) HELPER_GPU("0000:" n "4:00.0", other, HELPER_NV18) nic "</pci>"
static void a_narrow_nic_is_one_fault_and_not_a_missing_one(void **state)
{
	(void)state;
	assert_string_equal(faults_of("<system version=\"1\">" HELPER_CPU("0") PAIR("1", "0", "1", PORT("0000:12:00.0", "0", "200000", "4"))
		PAIR("2", "2", "3", PORT("0000:22:00.0", "1", "200000", "16")) PAIR("3", "4", "5", PORT("0000:32:00.0", "2", "200000", "16"))
		PAIR("5", "6", "7", PORT("0000:52:00.0", "3", "200000", "16")) "</cpu></system>", NULL), "pci-width");
}

static void nvlinks_that_are_down_are_found(void **state)
{
	(void)state;
	char *text = with(NVL_PAIR, "count=\"18\"", "count=\"10\"");
	assert_string_equal(faults_of(text, NULL), "nvlink-missing");
	free(text);
}

static void p2p_that_is_off_between_nvlink_peers_is_a_fault(void **state)
{
	(void)state;
	struct tp_topo_policy policy;
	tp_topo_policy_default(&policy);
	policy.p2p_level = TP_PATH_LOC;
	policy.p2p_by = "NCCL_P2P_DISABLE";
	assert_string_equal(faults_of(NVL_PAIR, &policy), "no-p2p");
}

/* ---- Several processes ---- */

#define HALF(gpu, nic, bus) "<system version=\"1\">" HELPER_CPU("0") HELPER_BRIDGE("0000:" bus "0:00.0", "") gpu nic "</pci></cpu></system>"

static void what_two_processes_found_becomes_one_machine(void **state)
{
	(void)state;
	struct tp_topo_doc *a = helper_doc(HALF(HELPER_GPU("0000:11:00.0", "0", HELPER_NV18), HELPER_NIC("0000:12:00.0", "0"), "1"));
	struct tp_topo_doc *b = helper_doc(HALF(HELPER_GPU("0000:21:00.0", "1", HELPER_NV18), HELPER_NIC("0000:22:00.0", "1"), "2"));
	struct tp_topo *topo;
	assert_int_equal(tp_topo_doc_merge(a, b), ncclSuccess);
	assert_int_equal(tp_topo_doc_merge(a, b), ncclSuccess);
	assert_int_equal(tp_topo_build(a, &topo), ncclSuccess);
	assert_int_equal(topo->count[TP_TOPO_GPU], 2);
	assert_int_equal(topo->count[TP_TOPO_NET], 2);
	assert_int_equal(topo->count[TP_TOPO_CPU], 1);
	tp_topo_free(topo);
	tp_topo_doc_free(a);
	tp_topo_doc_free(b);
}

static void what_both_found_is_there_once(void **state)
{
	(void)state;
	struct tp_topo_doc *a = helper_doc(NVL_PAIR), *b = helper_doc(NVL_PAIR);
	char *before, *after;
	size_t bytes;
	assert_int_equal(tp_topo_doc_text(a, &before, &bytes), ncclSuccess);
	assert_int_equal(tp_topo_doc_merge(a, b), ncclSuccess);
	assert_int_equal(tp_topo_doc_text(a, &after, &bytes), ncclSuccess);
	assert_string_equal(before, after);
	free(before);
	free(after);
	tp_topo_doc_free(a);
	tp_topo_doc_free(b);
}

static void processes_that_contradict_each_other_are_an_error(void **state)
{
	(void)state;
	char *other = with(NVL_PAIR, "speed=\"400000\"", "speed=\"200000\"");
	struct tp_topo_doc *a = helper_doc(NVL_PAIR), *b = helper_doc(other);
	assert_int_not_equal(tp_topo_doc_merge(a, b), ncclSuccess);
	assert_non_null(strstr(tp_log_last_error(), "speed=\"400000\""));
	tp_topo_doc_free(a);
	tp_topo_doc_free(b);
	free(other);
	other = with(NVL_PAIR, "0000:10:00.0", "0000:40:00.0");
	a = helper_doc(NVL_PAIR);
	b = helper_doc(other);
	assert_int_not_equal(tp_topo_doc_merge(a, b), ncclSuccess);
	assert_non_null(strstr(tp_log_last_error(), "at different places"));
	tp_topo_doc_free(a);
	tp_topo_doc_free(b);
	free(other);
}

static void a_file_is_right_and_what_it_has_too_much_is_cut(void **state)
{
	(void)state;
	char path[] = "/tmp/telpher_topo_XXXXXX";
	int fd = mkstemp(path);
	static const char file[] = "<system version=\"1\">" HELPER_CPU("0") HELPER_BRIDGE("0000:10:00.0", "")
		"<pci busid=\"0000:11:00.0\" class=\"0x030200\" " HELPER_X16 "/><pci busid=\"0000:13:00.0\" class=\"0x030200\" " HELPER_X16 "/></pci></cpu></system>";
	assert_true(fd >= 0 && write(fd, file, strlen(file)) == (ssize_t)strlen(file));
	close(fd);
	/* A guest sees no bridge. */
	struct tp_topo_doc *found = helper_doc("<system version=\"1\">" HELPER_CPU("0") HELPER_GPU("0000:11:00.0", "0", HELPER_NV18) "</cpu></system>");
	struct tp_topo *topo;
	setenv("NCCL_TOPO_FILE", path, 1);
	tp_param_reload();
	assert_int_equal(tp_topo_doc_settle("", &found), ncclSuccess);
	unsetenv("NCCL_TOPO_FILE");
	tp_param_reload();
	unlink(path);
	assert_int_equal(tp_topo_build(found, &topo), ncclSuccess);
	assert_int_equal(topo->count[TP_TOPO_GPU], 1);
	assert_int_equal(topo->nodes[topo->nodes[helper_node(topo, "gpu0")].parent].kind, TP_TOPO_PCI);
	assert_int_equal(tp_topo_find_name(topo, "0000:13:00.0"), -1);
	tp_topo_free(topo);
	tp_topo_doc_free(found);
}

static void ports_that_nobody_found_are_cut_and_found_gpus_without_a_rank_stay(void **state)
{
	(void)state;
	char path[] = "/tmp/telpher_topo_XXXXXX";
	int fd = mkstemp(path);
	assert_true(fd >= 0 && write(fd, NVL_PAIR, strlen(NVL_PAIR)) == (ssize_t)strlen(NVL_PAIR));
	close(fd);
	struct tp_topo_doc *found = helper_doc("<system version=\"1\">" HELPER_CPU("0")
		"<pci busid=\"0000:21:00.0\" class=\"0x030200\"><gpu dev=\"1\" sm=\"90\" gdr=\"1\"/></pci>"
		HELPER_NIC("0000:12:00.0", "0") "</cpu></system>");
	struct tp_topo *topo;
	setenv("NCCL_TOPO_FILE", path, 1);
	tp_param_reload();
	assert_int_equal(tp_topo_doc_settle("", &found), ncclSuccess);
	unsetenv("NCCL_TOPO_FILE");
	tp_param_reload();
	unlink(path);
	assert_int_equal(tp_topo_build(found, &topo), ncclSuccess);
	assert_int_equal(topo->count[TP_TOPO_GPU], 1);
	assert_int_equal(topo->count[TP_TOPO_NET], 1);
	assert_true(tp_topo_find_name(topo, "gpu1") >= 0);
	assert_true(tp_topo_find_name(topo, "mlx5_0") >= 0);
	assert_int_equal(topo->nodes[helper_node(topo, "gpu1")].gpu.nvlinks, 18);
	tp_topo_free(topo);
	tp_topo_doc_free(found);
}

static void the_policy_is_read_from_the_environment(void **state)
{
	(void)state;
	struct tp_topo_policy policy;
	setenv("NCCL_NET_GDR_LEVEL", "PHB", 1);
	setenv("NCCL_PXN_DISABLE", "1", 1);
	setenv("NCCL_NETDEVS_POLICY", "MAX:3", 1);
	tp_param_reload();
	assert_int_equal(tp_topo_policy_load(&policy), ncclSuccess);
	assert_int_equal(policy.gdr_level, TP_PATH_PHB);
	assert_false(policy.pxn);
	assert_int_equal(policy.nets_per_gpu, 3);
	setenv("NCCL_NET_GDR_LEVEL", "5", 1);
	tp_param_reload();
	assert_int_equal(tp_topo_policy_load(&policy), ncclSuccess);
	assert_int_equal(policy.gdr_level, TP_PATH_SYS);
	setenv("NCCL_NET_GDR_LEVEL", "far", 1);
	tp_param_reload();
	assert_int_equal(tp_topo_policy_load(&policy), ncclSuccess);
	assert_int_equal(policy.gdr_level, -1);
	assert_non_null(strstr(tp_log_last_error(), "NCCL_NET_GDR_LEVEL=far is no level"));
	unsetenv("NCCL_NET_GDR_LEVEL");
	unsetenv("NCCL_PXN_DISABLE");
	unsetenv("NCCL_NETDEVS_POLICY");
	tp_param_reload();
}

static void a_level_that_forbids_names_the_distance_itself_not_the_way_round(void **state)
{
	(void)state;
	struct tp_topo_policy policy;
	tp_topo_policy_default(&policy);
	policy.gdr_level = TP_PATH_LOC;
	struct tp_topo *topo = helper_topo(HELPER_PAIR, &policy);
	struct tp_topo_gdr gdr = gdr_of(topo, &policy, "gpu0", "mlx5_0", false);
	assert_int_equal(tp_topo_path(topo, helper_node(topo, "gpu0"), helper_node(topo, "mlx5_0"))->type, TP_PATH_PHB);
	assert_int_equal(gdr.mode, TP_GDR_OFF);
	assert_int_equal(gdr.type, TP_PATH_PIX);
	assert_non_null(strstr(gdr.why.text, "(PIX), farther than NCCL_NET_GDR_LEVEL=LOC"));
	tp_topo_free(topo);
}

static void a_level_without_a_variable_is_named_all_the_same(void **state)
{
	(void)state;
	struct tp_topo_policy policy;
	tp_topo_policy_default(&policy);
	policy.p2p_level = TP_PATH_SYS;
	struct tp_topo *topo = helper_topo(HELPER_PAIR, &policy);
	assert_non_null(strstr(p2p_of(topo, &policy, "gpu0", "gpu1").why.text, "NCCL_P2P_LEVEL=SYS"));
	tp_topo_free(topo);
}

static void never_to_flush_wins_over_always(void **state)
{
	(void)state;
	struct tp_topo_policy policy;
	setenv("NCCL_NET_FORCE_FLUSH", "1", 1);
	setenv("NCCL_GDR_FLUSH_DISABLE", "1", 1);
	tp_param_reload();
	assert_int_equal(tp_topo_policy_load(&policy), ncclSuccess);
	unsetenv("NCCL_NET_FORCE_FLUSH");
	unsetenv("NCCL_GDR_FLUSH_DISABLE");
	tp_param_reload();
	assert_int_equal(policy.flush, TP_OFF);
}

/* GPU 0 and 2 are joined through GPU 1. */
#define MESH(forbidden) "<system version=\"1\">" HELPER_CPU("0") HELPER_GPU("0000:11:00.0", "0", "<nvlink target=\"0000:12:00.0\" count=\"4\" tclass=\"0x030200\"/>" forbidden) \
	HELPER_GPU("0000:12:00.0", "1", "<nvlink target=\"0000:11:00.0\" count=\"4\" tclass=\"0x030200\"/><nvlink target=\"0000:13:00.0\" count=\"4\" tclass=\"0x030200\"/>") \
	HELPER_GPU("0000:13:00.0", "2", "<nvlink target=\"0000:12:00.0\" count=\"4\" tclass=\"0x030200\"/>") "</cpu></system>"

static void a_relay_that_is_forbidden_to_one_side_relays_nothing(void **state)
{
	(void)state;
	struct tp_topo_policy policy;
	tp_topo_policy_default(&policy);
	struct tp_topo *topo = helper_topo(MESH(""), &policy);
	assert_true(p2p_of(topo, &policy, "gpu0", "gpu2").use);
	tp_topo_free(topo);
	topo = helper_topo(MESH("<nopeer target=\"0000:12:00.0\"/>"), &policy);
	assert_false(p2p_of(topo, &policy, "gpu0", "gpu2").use);
	assert_int_equal(p2p_of(topo, &policy, "gpu0", "gpu2").why.reason, TP_WHY_GPU_UNABLE);
	assert_true(p2p_of(topo, &policy, "gpu1", "gpu2").use);
	tp_topo_free(topo);
	assert_string_equal(faults_of(MESH("<nopeer target=\"0000:12:00.0\"/>"), &policy), "no-p2p");
	policy.expect_disabled_p2p = true;
	assert_string_equal(faults_of(MESH("<nopeer target=\"0000:12:00.0\"/>"), &policy), "");
}

static void a_switchs_own_link_that_is_narrow_is_a_fault(void **state)
{
	(void)state;
	char *text = with(NVL_PAIR, "<pci busid=\"0000:10:00.0\" class=\"0x060400\" link_speed=\"32.0 GT/s PCIe\" link_width=\"16\"",
		"<pci busid=\"0000:10:00.0\" class=\"0x060400\" link_speed=\"32.0 GT/s PCIe\" link_width=\"4\" max_link_width=\"16\"");
	assert_string_equal(faults_of(text, NULL), "pci-width");
	free(text);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_level_that_forbids_names_the_distance_itself_not_the_way_round),
		cmocka_unit_test(a_level_without_a_variable_is_named_all_the_same), cmocka_unit_test(never_to_flush_wins_over_always),
		cmocka_unit_test(a_relay_that_is_forbidden_to_one_side_relays_nothing), cmocka_unit_test(a_switchs_own_link_that_is_narrow_is_a_fault),
		cmocka_unit_test(gpus_behind_a_cpu_use_no_p2p_and_the_way_through_it), cmocka_unit_test(a_level_allows_and_forbids),
		cmocka_unit_test(a_guest_that_hides_bridges_is_told),
		cmocka_unit_test(two_gpus_on_an_amd_cpu_use_p2p), cmocka_unit_test(gpudirect_follows_the_distance), cmocka_unit_test(gpudirect_needs_both_ends),
		cmocka_unit_test(old_gpus_flush_and_read_only_with_nvlink), cmocka_unit_test(the_nic_of_another_gpu_is_reached_through_that_gpu),
		cmocka_unit_test(each_gpu_has_its_nic_and_each_nic_its_gpu), cmocka_unit_test(shared_memory_is_for_one_machine),
		cmocka_unit_test(a_healthy_machine_has_no_faults), cmocka_unit_test(a_narrow_link_is_found_by_what_it_could_be_and_by_its_like),
		cmocka_unit_test(acs_is_a_fault_only_where_peers_pass), cmocka_unit_test(missing_peermem_is_one_fault_for_all_gpus),
		cmocka_unit_test(a_missing_nic_is_found), cmocka_unit_test(one_of_a_gpu_s_several_nics_that_is_missing_is_found), cmocka_unit_test(a_slow_port_is_found_without_identities_where_most_are_faster),
		cmocka_unit_test(a_narrow_nic_is_one_fault_and_not_a_missing_one), cmocka_unit_test(one_nic_for_two_sockets_is_an_ordinary_machine), cmocka_unit_test(nvlinks_that_are_down_are_found),
		cmocka_unit_test(p2p_that_is_off_between_nvlink_peers_is_a_fault), cmocka_unit_test(what_two_processes_found_becomes_one_machine),
		cmocka_unit_test(what_both_found_is_there_once), cmocka_unit_test(processes_that_contradict_each_other_are_an_error),
		cmocka_unit_test(a_file_is_right_and_what_it_has_too_much_is_cut),
		cmocka_unit_test(ports_that_nobody_found_are_cut_and_found_gpus_without_a_rank_stay), cmocka_unit_test(the_policy_is_read_from_the_environment),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Loads on links by hand-made sums, what was measured in place of what is planned, and NCCL's formulas against figures of NCCL's own. */
#include "topo/helper_search.h"

#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "topo/cost.h"

static void expect(double found, double right)
{
	if (fabs(found - right) > 1e-6 * TP_MAX(1, fabs(right))) fail_msg("%.10g instead of %.10g", found, right);
}

/* ---- Loads ---- */

static struct tp_topo_costs planned(const struct tp_topo *topo, const struct tp_rails *rails)
{
	struct tp_topo_doc *nothing = helper_doc("<system version=\"1\">" HELPER_CPU("0") "</cpu></system>");
	struct tp_topo_policy policy = helper_policy(rails != NULL);
	struct tp_topo_costs costs;
	assert_int_equal(tp_topo_costs_of(nothing, topo, &policy, rails, &costs), ncclSuccess);
	tp_topo_doc_free(nothing);
	return costs;
}

static struct tp_topo_traffic all_to_all(int ngpus, double amount)
{
	struct tp_topo_traffic t;
	assert_int_equal(tp_topo_traffic_create(ngpus, &t), ncclSuccess);
	for (int i = 0; i < ngpus * ngpus; i++) t.pairs[i] = i / ngpus == i % ngpus ? 0 : amount;
	return t;
}

static struct tp_topo_load load_of(const struct tp_topo *topo, const struct tp_topo_traffic *traffic)
{
	struct tp_topo_costs costs = planned(topo, NULL);
	struct tp_topo_load load;
	assert_int_equal(tp_topo_load_find(topo, NULL, &costs, traffic, &load), ncclSuccess);
	return load;
}

static void behind_a_switch_a_gpu_s_own_link_limits(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_machine("switch8.xml", NULL, NULL, false);
	struct tp_topo_traffic t = all_to_all(8, 100);
	struct tp_topo_load load = load_of(topo, &t);
	expect(load.inside.load, 700);
	expect(load.inside.us, 700 / (18 * 20.6 * 1000));
	assert_int_equal(load.inside.flows, 7);
	assert_int_equal(topo->links[load.inside.link].kind, TP_WIRE_NVL);
	assert_int_equal(load.inside.from, helper_node(topo, "gpu0"));
	expect(load.inside.mean_us, tp_topo_constant("hop.nvlink"));
	assert_int_equal(load.across.link, -1);
	expect(load.across.us, 0);
	tp_topo_traffic_free(&t);
	tp_topo_free(topo);
}

static void on_pcie_the_way_between_the_cpus_limits(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_machine("pcie8.xml", NULL, NULL, false);
	struct tp_topo_traffic t = all_to_all(8, 1);
	struct tp_topo_load load = load_of(topo, &t);
	/* Four GPUs on each side: 16 flows over AMD's 16 GB/s. */
	assert_int_equal(topo->links[load.inside.link].kind, TP_WIRE_SYS);
	expect(load.inside.load, 16);
	assert_int_equal(load.inside.flows, 16);
	expect(load.inside.us, 16 / (16.0 * 1000));
	const struct tp_topo_path *path = tp_topo_path(topo, load.inside.from, load.inside.to);
	bool on_it = false;
	for (int i = 0; i < path->nhops; i++) on_it |= path->links[i] == load.inside.link;
	assert_true(on_it);
	expect(load.inside.most_us, tp_topo_constant("hop.host"));
	assert_true(load.inside.mean_us < load.inside.most_us && load.inside.mean_us > tp_topo_constant("hop.pcie"));
	tp_topo_traffic_free(&t);
	tp_topo_free(topo);
}

static void what_leaves_the_host_goes_by_each_gpu_s_own_port(void **state)
{
	(void)state;
	struct tp_topo_policy policy = helper_policy(true);
	struct tp_topo *topo = helper_machine("switch8.xml", NULL, NULL, true);
	struct tp_rails *rails;
	struct tp_topo_traffic t;
	struct tp_topo_load load;
	assert_int_equal(tp_rails_assign(topo, &policy, &rails), ncclSuccess);
	struct tp_topo_costs costs = planned(topo, rails);
	expect(costs.net_us, tp_topo_constant("net.roce"));     /* a port that reaches GPU memory, its fabric unsaid */
	assert_int_equal(tp_topo_traffic_create(8, &t), ncclSuccess);
	t.out[3] = 10;
	t.in[5] = 20;
	t.pairs[1] = 5;
	assert_int_equal(tp_topo_load_find(topo, rails, &costs, &t, &load), ncclSuccess);
	expect(load.across.load, 20);
	expect(load.across.us, 20 / (48.0 * 1000));
	assert_int_equal(load.across.from, rails->rails[5].nets[0]);
	assert_int_equal(load.across.to, helper_node(topo, "gpu5"));
	expect(load.inside.load, 5);
	expect(load.across.most_us, costs.net_us);
	tp_topo_traffic_free(&t);
	tp_rails_free(rails);
	tp_topo_free(topo);
}

static void a_link_that_both_cross_counts_for_both(void **state)
{
	(void)state;
	struct tp_topo_policy policy = helper_policy(true);
	struct tp_topo *topo = helper_machine("pcie8.xml", NULL, NULL, true);
	struct tp_rails *rails;
	struct tp_topo_traffic t;
	struct tp_topo_load load;
	assert_int_equal(tp_rails_assign(topo, &policy, &rails), ncclSuccess);
	struct tp_topo_costs costs = planned(topo, rails);
	assert_int_equal(tp_topo_traffic_create(8, &t), ncclSuccess);
	t.out[0] = 1;
	t.pairs[0 * 8 + 1] = 2;
	assert_int_equal(tp_topo_load_find(topo, rails, &costs, &t, &load), ncclSuccess);
	expect(load.inside.load, 3);
	expect(load.across.load, 3);
	assert_int_equal(load.inside.link, load.across.link);
	tp_topo_traffic_free(&t);
	tp_rails_free(rails);
	tp_topo_free(topo);
}

static void what_can_t_go_is_an_error(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_machine("switch8.xml", NULL, NULL, false);
	struct tp_topo_costs costs = planned(topo, NULL);
	struct tp_topo_traffic t;
	struct tp_topo_load load;
	assert_int_equal(tp_topo_traffic_create(8, &t), ncclSuccess);
	t.out[2] = 1;
	assert_int_equal(tp_topo_load_find(topo, NULL, &costs, &t, &load), ncclInvalidUsage);
	assert_non_null(strstr(tp_log_last_error(), "GPU 2 reaches no port"));
	tp_topo_traffic_free(&t);
	assert_int_equal(tp_topo_traffic_create(9, &t), ncclSuccess);
	assert_int_equal(tp_topo_load_find(topo, NULL, &costs, &t, &load), ncclInvalidArgument);
	tp_topo_traffic_free(&t);
	tp_topo_free(topo);
}

static void channels_use_what_the_search_left_them(void **state)
{
	(void)state;
	static const char *const files[] = { "switch8.xml", "mesh8.xml", "pairs8.xml", "pcie8.xml", "islands4.xml" };
	for (size_t f = 0; f < TP_ARRAY_LEN(files); f++) {
		for (int multi_host = 0; multi_host < 2; multi_host++) {
			struct tp_topo *topo = helper_machine(files[f], NULL, NULL, multi_host);
			for (int tree = 0; tree < 2; tree++) {
				struct tp_channels *channels = helper_channels(topo, tree ? TP_PATTERN_TREE : TP_PATTERN_RING, multi_host);
				struct tp_topo_load load;
				assert_int_equal(tp_topo_channels_load(topo, channels, &load), ncclSuccess);
				double most = TP_MAX(load.inside.us, load.across.us);
				assert_true(most > 0.5 && most <= 1 + 1e-5);
				assert_true((load.across.link >= 0) == multi_host);
				tp_channels_free(channels);
			}
			tp_topo_free(topo);
		}
	}
}

/* ---- What was measured ---- */

static void measured_values_take_the_place_of_planned_ones(void **state)
{
	(void)state;
	static const struct tp_topo_measured measured[] = {
		{ "GPU 0", "GPU 1", 2.0, 330, "", 0, "", "" }, { "GPU 0", "GPU 2", 4.0, 0, "", 0, "", "" }, { "GPU 3", "GPU 4", 2.5, 350, "", 0, "", "" },
		{ "GPU 0", "mlx5_0", 1.25, 40, "", 0, "", "" }, { "GPU 7", "GPU 77", 9, 9, "", 0, "", "" }, { "GPU 1", "CPU 0", 9, 9, "", 0, "", "" },
	};
	char path[512];
	snprintf(path, sizeof(path), "%s/switch8.xml", TOPO_DATA);
	char *text = helper_file(path);
	struct tp_topo_policy policy = helper_policy(true);
	struct tp_topo_doc *doc = helper_doc(text);
	struct tp_topo *topo = helper_topo(text, &policy);
	struct tp_rails *rails;
	struct tp_topo_costs costs;
	for (size_t i = 0; i < TP_ARRAY_LEN(measured); i++) assert_int_equal(tp_topo_doc_record(doc, &measured[i]), ncclSuccess);
	assert_int_equal(tp_rails_assign(topo, &policy, &rails), ncclSuccess);
	assert_int_equal(tp_topo_costs_of(doc, topo, &policy, rails, &costs), ncclSuccess);
	expect(costs.hop_us[TP_PATH_NVL], 2.5);
	assert_true(costs.hop_measured[TP_PATH_NVL] && !costs.hop_measured[TP_PATH_PIX]);
	expect(costs.hop_us[TP_PATH_PIX], tp_topo_constant("hop.pcie"));
	expect(costs.yield[TP_WIRE_NVL], 340 / 370.8);
	expect(costs.net_us, 1.25);
	assert_true(costs.net_measured && costs.yield_measured[TP_WIRE_NET]);
	expect(costs.yield[TP_WIRE_NET], 40 / 50.0);
	expect(costs.yield[TP_WIRE_PCI], 1);
	struct tp_topo_traffic t = all_to_all(8, 1);
	struct tp_topo_load load;
	t.out[0] = 1;
	assert_int_equal(tp_topo_load_find(topo, rails, &costs, &t, &load), ncclSuccess);
	/* That GPU's own figure; others have the median of their kind. */
	expect(load.inside.us, 7 / 330e3);
	expect(tp_topo_costs_yield(&costs, topo, load.inside.link), 330 / 370.8);
	expect(load.across.us, 1 / 40e3);
	expect(load.inside.mean_us, 2.5);
	tp_topo_traffic_free(&t);
	tp_rails_free(rails);
	tp_topo_free(topo);
	tp_topo_doc_free(doc);
	free(text);
}

static bool says(const char *text, const char *first, const char *second)
{
	char copy[2048], *line, *rest = copy;
	snprintf(copy, sizeof(copy), "%s", text);
	while ((line = strsep(&rest, "\n")))
		if (strstr(line, first) && strstr(line, second)) return true;
	return false;
}

static void what_was_measured_and_does_not_hold_is_refused_with_a_sentence(void **state)
{
	(void)state;
	static const struct tp_topo_measured measured[] = {
		{ "GPU 7", "GPU 77", 9, 9, "", 0, "", "" }, { "GPU 0", "GPU 1", 0, 900, "", 0, "", "" }, { "GPU 1", "GPU 2", 2, 0, "PIX", 24, "", "" }, { "GPU 2", "GPU 3", 2, 0, "NVL", 185, "", "" },
		{ "GPU 3", "GPU 4", 2, 300, "NVL", 370.8, "", "" }, { "GPU 3", "GPU 4", 2, 100, "NVL", 370.8, "", "" }, { "GPU 4", "GPU 5", 2, 300, "NVL", 370.8, "", "" }, { "GPU 4", "GPU 5", 3, 320, "", 0, "", "" },
		{ "GPU 4", "GPU 5", 3.5, 310, "", 0, "", "" },
	};
	char path[512], *notes = NULL;
	size_t bytes = 0;
	snprintf(path, sizeof(path), "%s/switch8.xml", TOPO_DATA);
	char *text = helper_file(path);
	struct tp_topo_doc *doc = helper_doc(text);
	struct tp_topo *topo = helper_topo(text, NULL);
	struct tp_topo_values values;
	for (size_t i = 0; i < TP_ARRAY_LEN(measured); i++) assert_int_equal(tp_topo_doc_record(doc, &measured[i]), ncclSuccess);
	FILE *told = open_memstream(&notes, &bytes);
	assert_int_equal(tp_topo_values_of(doc, topo, told, &values), ncclSuccess);
	fclose(told);
	assert_true(says(notes, "GPU 7 to GPU 77", "nothing is called GPU 77 any more"));
	assert_true(says(notes, "GPU 0 to GPU 1", "900 GB/s, and the wires (NVL) carry 370.8"));
	assert_true(says(notes, "GPU 1 to GPU 2", "over PIX of 24 GB/s, and now it is NVL of 370.8"));
	assert_true(says(notes, "GPU 2 to GPU 3", "over NVL of 185 GB/s, and now it is NVL of 370.8"));
	assert_true(says(notes, "GPU 3 to GPU 4", "2 values from 100 to 300 GB/s contradict each other"));
	assert_false(says(notes, "GPU 4 to GPU 5", ""));
	int32_t gpus[6];
	for (int g = 0; g < 6; g++) gpus[g] = tp_topo_node_of(topo, TP_TOPO_GPU, g)->index;
	const struct tp_topo_value *v = tp_topo_value_between(&values, gpus[4], gpus[5]);
	assert_non_null(v);
	expect(v->gbps, 310);
	expect(v->alpha_us, 3);
	assert_ptr_equal(tp_topo_value_between(&values, gpus[5], gpus[4]), v);
	assert_null(tp_topo_value_between(&values, gpus[0], gpus[1]));
	v = tp_topo_value_between(&values, gpus[3], gpus[4]);
	assert_non_null(v);
	expect(v->gbps, 0);
	expect(v->alpha_us, 2);
	free(values.list);
	free(notes);
	tp_topo_free(topo);
	tp_topo_doc_free(doc);
	free(text);
}

static void a_port_that_can_t_reach_gpu_memory_takes_two_copies_more(void **state)
{
	(void)state;
	struct tp_topo_policy policy = helper_policy(true);
	struct tp_topo *topo = helper_machine("switch8.xml", "gdr=\"1\"/></nic>", "gdr=\"0\"/></nic>", true);
	struct tp_rails *rails;
	assert_int_equal(tp_rails_assign(topo, &policy, &rails), ncclSuccess);
	struct tp_topo_costs costs = planned(topo, rails);
	expect(costs.net_us, tp_topo_constant("net.tcp") + tp_topo_constant("hop.host"));
	tp_rails_free(rails);
	tp_topo_free(topo);
}

static void a_port_that_says_its_latency_is_believed(void **state)
{
	(void)state;
	struct tp_topo_policy policy = helper_policy(true);
	struct tp_topo *topo = helper_machine("switch8.xml", "port=\"1\"", "port=\"1\" latency=\"7.5\"", true);
	struct tp_rails *rails;
	assert_int_equal(tp_rails_assign(topo, &policy, &rails), ncclSuccess);
	struct tp_topo_costs costs = planned(topo, rails);
	expect(costs.net_us, 7.5);
	tp_rails_free(rails);
	tp_topo_free(topo);
}

/* ---- Fewer GPUs ---- */

static void gpus_that_are_not_used_go(void **state)
{
	(void)state;
	struct tp_topo_doc *doc = helper_doc(HELPER_PAIR);
	struct tp_topo *topo;
	assert_int_equal(tp_topo_doc_keep_gpus(doc, 3), ncclInvalidUsage);
	assert_non_null(strstr(tp_log_last_error(), "has 2 GPUs, not 3"));
	assert_int_equal(tp_topo_doc_keep_gpus(doc, 0), ncclInvalidUsage);
	assert_int_equal(tp_topo_doc_keep_gpus(doc, 1), ncclSuccess);
	assert_int_equal(tp_topo_build(doc, &topo), ncclSuccess);
	assert_int_equal(topo->count[TP_TOPO_GPU], 1);
	assert_int_equal(topo->count[TP_TOPO_NET], 2);
	assert_true(tp_topo_find_rank(topo, 0) >= 0 && tp_topo_find_rank(topo, 1) < 0);
	tp_topo_free(topo);
	tp_topo_doc_free(doc);
}

/* ---- NCCL's model ---- */

static struct tp_nccl_graph graph(int nchannels, double intra, double inter, enum tp_topo_path_type type_intra, enum tp_topo_path_type type_inter, bool same,
	int pattern)
{
	return (struct tp_nccl_graph){ nchannels, intra, inter, 0, type_intra, type_inter, same, (enum tp_pattern)pattern };
}

/* Eight H100 behind NVSwitch: the channels that NCCL 2.30.7 finds on Azure's ND v5, one host and two. */
static struct tp_nccl_job h100(int nhosts)
{
	struct tp_nccl_job job = { .nranks = 8 * nhosts, .nhosts = nhosts, .sm_min = 90, .sm_max = 90, .arch = TP_ARCH_X86, .intel = true };
	bool one = nhosts == 1;
	job.graphs[TP_NCCL_RING] = graph(one ? 12 : 8, one ? 30 : 48, one ? 30 : 48, TP_PATH_NVL, TP_PATH_PIX, one, 4);
	job.graphs[TP_NCCL_TREE] = graph(one ? 12 : 8, one ? 30 : 48, one ? 30 : 48, TP_PATH_NVL, TP_PATH_PIX, one, one ? 1 : 3);
	job.graphs[TP_NCCL_NVLS] = job.graphs[TP_NCCL_NVLS_TREE] = graph(8, 40, one ? 60 : 48, TP_PATH_NVL, TP_PATH_PIX, false, 5);
	return job;
}

static void cost(const struct tp_nccl_job *job, enum tp_nccl_func func, enum tp_nccl_algo algo, enum tp_nccl_proto proto, double latency, double gbps)
{
	struct tp_nccl_cost found;
	tp_nccl_cost_of(job, func, algo, proto, &found);
	if (found.why_not) fail_msg("%s/%s: %s", tp_nccl_algo_name(algo), tp_nccl_proto_name(proto), found.why_not);
	if (fabs(found.latency_us - latency) > 0.05 || fabs(found.gbps - gbps) > 1e-3 * gbps)
		fail_msg("%s/%s: %g us, %g GB/s instead of %g and %g", tp_nccl_algo_name(algo), tp_nccl_proto_name(proto), found.latency_us, found.gbps, latency, gbps);
}

/* By hand: tree LL base 6.8 + 2 x 7 x 0.6; ring Simple 8.4 + 14 x 3.4, 360 x 8/14; NVLS 8 x min(40 x .85 x 7/8 x 2, 60) x 8/14 … */
static void one_host_as_nccl_has_it(void **state)
{
	(void)state;
	struct tp_nccl_job job = h100(1);
	cost(&job, TP_NCCL_ALL_REDUCE, TP_NCCL_TREE, TP_NCCL_LL, 6.8 + 14 * 0.6, 360 * 0.92 / 3.8 / 2);
	cost(&job, TP_NCCL_ALL_REDUCE, TP_NCCL_TREE, TP_NCCL_LL128, 31.5, 360 * 0.92 * 7 / 9 / 2);
	cost(&job, TP_NCCL_ALL_REDUCE, TP_NCCL_TREE, TP_NCCL_SIMPLE, 64.4, 165.6);
	cost(&job, TP_NCCL_ALL_REDUCE, TP_NCCL_RING, TP_NCCL_LL, 6.6 + 14 * 0.6, 141 * 8 / 14.0);
	cost(&job, TP_NCCL_ALL_REDUCE, TP_NCCL_RING, TP_NCCL_LL128, 40.6, 360 * 0.92 * 8 / 14);
	cost(&job, TP_NCCL_ALL_REDUCE, TP_NCCL_RING, TP_NCCL_SIMPLE, 8.4 + 14 * 3.4, 360 * 8 / 14.0);
	cost(&job, TP_NCCL_ALL_REDUCE, TP_NCCL_NVLS, TP_NCCL_SIMPLE, 25, 272);
	cost(&job, TP_NCCL_ALL_GATHER, TP_NCCL_NVLS, TP_NCCL_SIMPLE, 25, 208.25);
	cost(&job, TP_NCCL_BROADCAST, TP_NCCL_RING, TP_NCCL_LL128, 15.9, 331.2);
}

static void two_hosts_as_nccl_has_them(void **state)
{
	(void)state;
	struct tp_nccl_job job = h100(2);
	cost(&job, TP_NCCL_ALL_REDUCE, TP_NCCL_TREE, TP_NCCL_LL, 25.2, 16.575);
	cost(&job, TP_NCCL_ALL_REDUCE, TP_NCCL_TREE, TP_NCCL_LL128, 48.5, 124.78);
	cost(&job, TP_NCCL_ALL_REDUCE, TP_NCCL_RING, TP_NCCL_SIMPLE, 131.6, 204.8);
	cost(&job, TP_NCCL_ALL_REDUCE, TP_NCCL_NVLS_TREE, TP_NCCL_SIMPLE, 66.8, 246.187);
	cost(&job, TP_NCCL_REDUCE, TP_NCCL_RING, TP_NCCL_SIMPLE, 232.4, 384);
	cost(&job, TP_NCCL_ALL_GATHER, TP_NCCL_RING, TP_NCCL_LL128, 44.6, 313.173);
}

static void what_isn_t_there_says_why(void **state)
{
	(void)state;
	struct tp_nccl_job job = h100(1);
	struct tp_nccl_cost found;
	tp_nccl_cost_of(&job, TP_NCCL_ALL_REDUCE, TP_NCCL_NVLS_TREE, TP_NCCL_SIMPLE, &found);
	assert_string_equal(found.why_not, "it is for several hosts");
	tp_nccl_cost_of(&job, TP_NCCL_BROADCAST, TP_NCCL_TREE, TP_NCCL_SIMPLE, &found);
	assert_non_null(found.why_not);
	assert_true(tp_nccl_time(&job, TP_NCCL_BROADCAST, TP_NCCL_TREE, TP_NCCL_SIMPLE, 8, NULL, NULL) < 0);
	job.graphs[TP_NCCL_RING].type_intra = TP_PATH_PHB;
	tp_nccl_cost_of(&job, TP_NCCL_ALL_REDUCE, TP_NCCL_RING, TP_NCCL_LL128, &found);
	assert_non_null(strstr(found.why_not, "NVLink"));
	tp_nccl_cost_of(&job, TP_NCCL_ALL_REDUCE, TP_NCCL_RING, TP_NCCL_SIMPLE, &found);
	assert_null(found.why_not);
	job.sm_min = job.sm_max = 80;
	tp_nccl_cost_of(&job, TP_NCCL_ALL_REDUCE, TP_NCCL_NVLS, TP_NCCL_SIMPLE, &found);
	assert_non_null(strstr(found.why_not, "sm90"));
}

static void time_is_latency_and_bytes_over_bandwidth(void **state)
{
	(void)state;
	struct tp_nccl_job job = h100(1);
	double latency, data;
	expect(tp_nccl_time(&job, TP_NCCL_ALL_REDUCE, TP_NCCL_NVLS, TP_NCCL_SIMPLE, 272000, &latency, &data), 26);
	expect(latency, 25);
	expect(data, 1);
	/* A tree of 1 MiB has .6 of its bandwidth with LL128. */
	tp_nccl_time(&job, TP_NCCL_ALL_REDUCE, TP_NCCL_TREE, TP_NCCL_LL128, 1 << 20, &latency, &data);
	expect(data, (1 << 20) / (1000 * 128.8 * 0.6));
	/* Rings over hosts wait longer for their messages of some size. */
	job = h100(2);
	tp_nccl_time(&job, TP_NCCL_ALL_REDUCE, TP_NCCL_RING, TP_NCCL_SIMPLE, 64 * 16 * 16 - 1, &latency, &data);
	expect(latency, 131.6);
	tp_nccl_time(&job, TP_NCCL_ALL_REDUCE, TP_NCCL_RING, TP_NCCL_SIMPLE, 64 * 16 * 16, &latency, &data);
	expect(latency, 131.6 * 1.4);
}

static void small_messages_use_few_channels(void **state)
{
	(void)state;
	struct tp_nccl_job job = h100(1);
	assert_int_equal(tp_nccl_channels(&job, TP_NCCL_RING, TP_NCCL_SIMPLE, 8), 1);
	assert_int_equal(tp_nccl_channels(&job, TP_NCCL_RING, TP_NCCL_SIMPLE, 4 * 512 * 64), 4);
	assert_int_equal(tp_nccl_channels(&job, TP_NCCL_RING, TP_NCCL_SIMPLE, 1 << 30), 24);
	assert_int_equal(tp_nccl_channels(&job, TP_NCCL_RING, TP_NCCL_LL, 3 * 512 * 64), 3);
	assert_int_equal(tp_nccl_channels(&job, TP_NCCL_NVLS, TP_NCCL_SIMPLE, 8), 8);
}

static void more_bytes_take_longer(void **state)
{
	(void)state;
	for (int nhosts = 1; nhosts <= 32; nhosts *= 2) {
		struct tp_nccl_job job = h100(nhosts);
		for (int a = 0; a < TP_NCCL_ALGOS; a++)
			for (int p = 0; p < TP_NCCL_PROTOS; p++) {
				double before = 0;
				for (int shift = 3; shift < 34; shift++) {
					double us = tp_nccl_time(&job, TP_NCCL_ALL_REDUCE, (enum tp_nccl_algo)a, (enum tp_nccl_proto)p, (size_t)1 << shift, NULL, NULL);
					if (us < 0) break;
					if (us <= before) fail_msg("%d hosts, %d/%d: %g us at 2^%d, %g before", nhosts, a, p, us, shift, before);
					before = us;
				}
			}
	}
}

/* ---- NCCL's own answers, where they lie ---- */

static const char *within(const char *text, const char *key)
{
	const char *at = text ? strstr(text, key) : NULL;
	return at ? at + strlen(key) : NULL;
}

static double number(const char *text, const char *key)
{
	const char *at = within(text, key);
	if (!at) fail_msg("no %s", key);
	return strtod(at, NULL);
}

static enum tp_topo_path_type type_of(const char *graph_text, const char *key)
{
	const char *at = within(graph_text, key);
	if (!at) fail_msg("no %s", key);
	for (int t = 0; t < TP_PATH_TYPES; t++) {
		const char *name = tp_topo_path_name((enum tp_topo_path_type)t);
		if (strncmp(at, name, strlen(name)) == 0 && at[strlen(name)] == '"') return (enum tp_topo_path_type)t;
	}
	fail_msg("no type: %.8s", at);
	return TP_PATH_DIS;
}

static struct tp_nccl_graph read_graph(const char *answer, const char *which)
{
	const char *g = within(answer, which);
	if (!g || *g != '{') return (struct tp_nccl_graph){ .nchannels = 0 };
	return (struct tp_nccl_graph){ (int)number(g, "\"nchannels\":"), number(g, "\"bwIntra\":"), number(g, "\"bwInter\":"), number(g, "\"latencyInter\":"),
		type_of(g, "\"typeIntra\":\""), type_of(g, "\"typeInter\":\""), number(g, "\"sameChannels\":") != 0, (enum tp_pattern)number(g, "\"pattern\":") };
}

static int compared, differences;

static void compare_cell(const char *name, const struct tp_nccl_job *job, const char *table, int func, int algo, int proto)
{
	static const char *const funcs[] = { "\"Broadcast\":{", "\"Reduce\":{", "\"AllGather\":{", "\"ReduceScatter\":{", "\"AllReduce\":{" };
	char key[32];
	struct tp_nccl_cost ours;
	const char *row = within(table, funcs[func]), *end = row ? strchr(row, '}') : NULL;
	snprintf(key, sizeof(key), "\"%s/%s\":[", tp_nccl_algo_name((enum tp_nccl_algo)algo), tp_nccl_proto_name((enum tp_nccl_proto)proto));
	const char *cell = within(row, key);
	if (cell && cell > end) cell = NULL;
	tp_nccl_cost_of(job, (enum tp_nccl_func)func, (enum tp_nccl_algo)algo, (enum tp_nccl_proto)proto, &ours);
	if (ours.gbps <= 0) ours.why_not = "no bandwidth";
	compared++;
	if (!cell && ours.why_not) return;
	char *comma = NULL;
	double latency = cell ? strtod(cell, &comma) : 0, gbps = cell ? strtod(comma + 1, NULL) : 0;
	if (cell && !ours.why_not && fabs(latency - ours.latency_us) < 0.06 && fabs(gbps - ours.gbps) < 2e-3 * gbps + 1e-4) return;
	differences++;
	print_message("%s %s%s NCCL %g us %g GB/s, ours %g and %g %s\n", name, funcs[func], key, latency, gbps, ours.latency_us, ours.gbps, ours.why_not ? ours.why_not : "");
}

static void compare_answer(const char *name, const char *answer)
{
	const char *final = within(answer, "\"final\":{"), *table = within(answer, "\"table\":{"), *cpus = within(answer, "\"cpus\":["), *gpus = within(answer, "\"gpus\":[");
	if (!final || !table || !within(answer, "\"rings\":{")) return;
	struct tp_nccl_job job = { .nranks = (int)number(final, "\"nranks\":"), .nhosts = (int)number(final, "\"nodes\":"), .sm_min = (int)number(answer, "\"ccMin\":") };
	job.sm_max = job.sm_min;
	for (const char *at = gpus, *end = strchr(gpus, ']'); (at = within(at, "\"sm\":")) && at < end;) job.sm_max = TP_MAX(job.sm_max, atoi(at));
	int arch = (int)number(cpus, "\"arch\":"), vendor = (int)number(cpus, "\"vendor\":");
	job.arch = arch == 1 ? TP_ARCH_X86 : arch == 2 ? TP_ARCH_POWER : TP_ARCH_ARM;
	job.intel = arch == 1 && vendor == 1;
	job.amd = arch == 1 && vendor == 2;
	job.graphs[TP_NCCL_RING] = read_graph(answer, "\"rings\":");
	job.graphs[TP_NCCL_TREE] = job.graphs[TP_NCCL_PAT] = read_graph(answer, "\"tree\":");
	job.graphs[TP_NCCL_NVLS] = job.graphs[TP_NCCL_NVLS_TREE] = read_graph(answer, "\"nvls\":");
	for (int f = 0; f < TP_NCCL_FUNCS; f++)
		for (int a = 0; a < TP_NCCL_ALGOS; a++)
			for (int p = 0; p < TP_NCCL_PROTOS; p++) compare_cell(name, &job, table, f, a, p);
}

static void formulas_are_nccl_s_on_real_machines(void **state)
{
	(void)state;
	DIR *folder = opendir(TOPO_PUBLIC "/nccl");
	if (!folder) skip();
	for (struct dirent *entry; (entry = readdir(folder));) {
		char path[1024];
		if (!strstr(entry->d_name, ".json")) continue;
		snprintf(path, sizeof(path), "%s/nccl/%s", TOPO_PUBLIC, entry->d_name);
		char *answer = helper_file(path);
		compare_answer(entry->d_name, answer);
		free(answer);
	}
	closedir(folder);
	assert_true(compared > 0);
	assert_int_equal(differences, 0);
}

/* ---- From channels to NCCL's job ---- */

static void a_job_is_made_of_the_channels_found(void **state)
{
	(void)state;
	for (int nhosts = 1; nhosts <= 32; nhosts += 31) {
		struct tp_topo *topo = helper_machine("switch8.xml", NULL, NULL, nhosts > 1);
		struct tp_channels *rings = helper_channels(topo, TP_PATTERN_RING, nhosts > 1), *trees = helper_channels(topo, TP_PATTERN_TREE, nhosts > 1);
		struct tp_channels *pairs = helper_channels(topo, TP_PATTERN_PAIRS, nhosts > 1);
		struct tp_nccl_job job;
		tp_nccl_job_of(topo, rings, trees, pairs, nhosts, &job);
		assert_int_equal(job.nranks, 8 * nhosts);
		assert_true(job.sm_min == 90 && job.sm_max == 90 && job.intel && !job.amd);
		assert_int_equal(job.graphs[TP_NCCL_RING].nchannels, rings->nchannels);
		expect(job.graphs[TP_NCCL_NVLS].bw_intra, 40);
		/* What these two machines are known for: multicast on one, trees over many. */
		double best = 1e30;
		int algo = -1;
		for (int a = 0; a < TP_NCCL_ALGOS; a++)
			for (int p = 0; p < TP_NCCL_PROTOS; p++) {
				double us = tp_nccl_time(&job, TP_NCCL_ALL_REDUCE, (enum tp_nccl_algo)a, (enum tp_nccl_proto)p, 4 << 20, NULL, NULL);
				if (us < 0 || us >= best) continue;
				best = us;
				algo = a;
			}
		assert_int_equal(algo, nhosts == 1 ? TP_NCCL_NVLS : TP_NCCL_TREE);
		tp_channels_free(rings);
		tp_channels_free(trees);
		tp_channels_free(pairs);
		tp_topo_free(topo);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(behind_a_switch_a_gpu_s_own_link_limits),
		cmocka_unit_test(on_pcie_the_way_between_the_cpus_limits),
		cmocka_unit_test(what_leaves_the_host_goes_by_each_gpu_s_own_port),
		cmocka_unit_test(a_link_that_both_cross_counts_for_both),
		cmocka_unit_test(what_can_t_go_is_an_error),
		cmocka_unit_test(channels_use_what_the_search_left_them),
		cmocka_unit_test(measured_values_take_the_place_of_planned_ones),
		cmocka_unit_test(what_was_measured_and_does_not_hold_is_refused_with_a_sentence),
		cmocka_unit_test(a_port_that_can_t_reach_gpu_memory_takes_two_copies_more),
		cmocka_unit_test(a_port_that_says_its_latency_is_believed),
		cmocka_unit_test(gpus_that_are_not_used_go),
		cmocka_unit_test(one_host_as_nccl_has_it),
		cmocka_unit_test(two_hosts_as_nccl_has_them),
		cmocka_unit_test(what_isn_t_there_says_why),
		cmocka_unit_test(time_is_latency_and_bytes_over_bandwidth),
		cmocka_unit_test(small_messages_use_few_channels),
		cmocka_unit_test(more_bytes_take_longer),
		cmocka_unit_test(formulas_are_nccl_s_on_real_machines),
		cmocka_unit_test(a_job_is_made_of_the_channels_found),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

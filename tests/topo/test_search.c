/* The channel search on machines of known kinds, whole and degraded. */
#include "sanitizers.h"
#include "topo/helper_search.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Memory runs out at the nth allocation from now on, once; 0: never. */
static unsigned long allocations, fails_at;
void *__libc_calloc(size_t count, size_t bytes);
#if !SANITIZED
__attribute__((visibility("default")))
void *calloc(size_t count, size_t bytes) { return ++allocations == fails_at ? NULL : __libc_calloc(count, bytes); }
#endif

#define NEAR(a, b) assert_true(fabs((a) - (b)) < 1e-3 * (b))

static void a_cube_mesh_has_six_rings_over_nvlink(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_machine("mesh8.xml", NULL, NULL, false);
	struct tp_channels *rings = helper_channels(topo, TP_PATTERN_RING, false);
	NEAR(helper_total(rings), 120);
	assert_int_equal(rings->type_intra, TP_PATH_NVL);
	NEAR(rings->bound, 120);
	assert_int_equal(rings->nfindings, 0);
	tp_channels_free(rings);
	tp_topo_free(topo);
}

static void a_switch_has_a_channel_for_every_nvlink(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_machine("switch8.xml", NULL, NULL, false);
	struct tp_channels *rings = helper_channels(topo, TP_PATTERN_RING, false), *trees = helper_channels(topo, TP_PATTERN_TREE, false);
	assert_int_equal(rings->nchannels, 18);
	NEAR(rings->bw_intra, 20.6);
	assert_true(rings->same);
	/* A chain's ends send half of what its middle sends: as many as there are GPUs have room for one part in seven more. */
	NEAR(helper_total(trees), 370.8 * 8 / 7);
	tp_channels_free(rings);
	tp_channels_free(trees);
	tp_topo_free(topo);
}

static void every_gpu_talks_to_every_other_behind_a_switch_only(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_machine("switch8.xml", NULL, NULL, false), *mesh = helper_machine("mesh8.xml", NULL, NULL, false);
	struct tp_channels *pairs = helper_channels(topo, TP_PATTERN_PAIRS, false), *none = helper_channels(mesh, TP_PATTERN_PAIRS, false);
	assert_int_equal(pairs->nchannels, 8);
	NEAR(pairs->bw_intra, 370.8 / 7);
	for (int c = 0; c < 8; c++) assert_int_equal(topo->nodes[pairs->channels[c].gpus[0]].ordinal, c);
	assert_int_equal(none->nchannels, 0);
	tp_channels_free(pairs);
	tp_channels_free(none);
	tp_topo_free(topo);
	tp_topo_free(mesh);
}

/* Each NIC carries as much as any other, in as well as out. */
static void every_nic_is_used_alike(const struct tp_topo *topo, const struct tp_channels *channels)
{
	int in[64] = { 0 }, out[64] = { 0 };
	for (int c = 0; c < channels->nchannels; c++) {
		in[topo->nodes[channels->channels[c].net_in].ordinal]++;
		out[topo->nodes[channels->channels[c].net_out].ordinal]++;
	}
	for (int i = 0; i < topo->count[TP_TOPO_NET]; i++) {
		assert_int_equal(in[i], channels->nchannels / topo->count[TP_TOPO_NET]);
		assert_int_equal(out[i], in[i]);
	}
}

/* Rings come in at the GPU next to the NIC, and go out at the GPU next to the other. */
static void every_nic_is_next_to_its_gpu(const struct tp_topo *topo, const struct tp_channels *channels)
{
	for (int c = 0; c < channels->nchannels; c++) {
		const struct tp_channel *channel = &channels->channels[c];
		assert_int_equal(tp_topo_path(topo, channel->net_in, channel->gpus[0])->type, TP_PATH_PIX);
		if (channels->pattern == TP_PATTERN_RING)
			assert_int_equal(tp_topo_path(topo, channel->gpus[channels->ngpus - 1], channel->net_out)->type, TP_PATH_PIX);
	}
}

static void eight_nics_are_eight_rails_of_two_rings(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_machine("switch8.xml", NULL, NULL, true);
	struct tp_channels *rings = helper_channels(topo, TP_PATTERN_RING, true), *trees = helper_channels(topo, TP_PATTERN_TREE, true);
	assert_int_equal(rings->nchannels, 16);
	NEAR(helper_total(rings), 384);
	assert_int_equal(rings->cross_nic, 2);
	every_nic_is_used_alike(topo, rings);
	every_nic_is_next_to_its_gpu(topo, rings);
	NEAR(helper_total(trees), 384);
	every_nic_is_used_alike(topo, trees);
	every_nic_is_next_to_its_gpu(topo, trees);
	assert_int_equal(rings->nfindings + trees->nfindings, 0);
	tp_channels_free(rings);
	tp_channels_free(trees);
	tp_topo_free(topo);
}

static void four_nics_are_shared_by_pairs(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_machine("pairs8.xml", NULL, NULL, true);
	struct tp_channels *rings = helper_channels(topo, TP_PATTERN_RING, true), *trees = helper_channels(topo, TP_PATTERN_TREE, true);
	NEAR(helper_total(rings), 48);
	assert_int_equal(rings->cross_nic, 0);
	every_nic_is_used_alike(topo, rings);
	every_nic_is_next_to_its_gpu(topo, rings);
	NEAR(helper_total(trees), 48);
	NEAR(trees->nchannels * trees->bw_intra, 96);
	tp_channels_free(rings);
	tp_channels_free(trees);
	tp_topo_free(topo);
}

/* Rings that leave by another NIC than they came in by end at GPUs with little between them: a ring has no use for what joins its ends. */
static void a_mesh_of_uneven_links_fills_every_nic(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_machine("xgmi8.xml", NULL, NULL, true);
	struct tp_channels *rings = helper_channels(topo, TP_PATTERN_RING, true);
	NEAR(helper_total(rings), 8 * 24);
	assert_true(rings->type_intra <= TP_PATH_NVL);
	assert_false(rings->by_net);
	tp_channels_free(rings);
	tp_topo_free(topo);
}

static struct tp_channels *search_with(const struct tp_topo *topo, enum tp_topo_switch net_within, enum tp_pattern pattern, bool multi_host)
{
	struct tp_topo_policy policy = helper_policy(multi_host);
	struct tp_channels *channels = NULL;
	char why[256];
	policy.net_within = net_within;
	assert_int_equal(tp_channels_search(topo, &policy, pattern, &channels), ncclSuccess);
	if (tp_channels_check(topo, &policy, channels, why) != ncclSuccess) fail_msg("%s", why);
	return channels;
}

/* Four islands of four GPUs with a NIC each: each ring comes to each island once, and no island can be entered by more than its GPUs' links. */
static void islands_of_one_host_are_joined_by_their_nics(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_machine("islands16.xml", NULL, NULL, true);
	struct tp_channels *rings = helper_channels(topo, TP_PATTERN_RING, true), *trees = helper_channels(topo, TP_PATTERN_TREE, true);
	struct tp_channels *without = search_with(topo, TP_OFF, TP_PATTERN_RING, true), *few = search_with(topo, TP_OFF, TP_PATTERN_TREE, true);
	NEAR(helper_total(rings), 4 * 24);
	NEAR(rings->bound, 4 * 24);
	assert_true(rings->by_net);
	assert_int_equal(rings->type_intra, TP_PATH_NET);
	assert_true(helper_total(trees) > 80);
	/* Only where the CPU is the way else: GPUs of one switch reach each other through it. */
	for (int c = 0; c < rings->nchannels; c++)
		for (int i = 0; i + 1 < rings->ngpus; i++)
			assert_int_equal(rings->channels[c].nets && rings->channels[c].nets[i].next >= 0,
				tp_topo_path(topo, rings->channels[c].gpus[i], rings->channels[c].gpus[i + 1])->type >= TP_PATH_PHB);
	assert_false(without->by_net);
	assert_true(helper_total(without) < helper_total(rings) && helper_total(few) < helper_total(trees));
	tp_channels_free(rings);
	tp_channels_free(trees);
	tp_channels_free(without);
	tp_channels_free(few);
	tp_topo_free(topo);
}

/* Within one host no NIC is known to be wired; and who says nothing has it among AMD's GPUs alone, as RCCL does and NCCL doesn't. */
static void nics_within_a_host_are_used_where_they_may_be(void **state)
{
	(void)state;
	struct tp_topo *alone = helper_machine("islands16.xml", NULL, NULL, false), *pairs = helper_machine("islands4.xml", NULL, NULL, true);
	struct tp_channels *rings = helper_channels(alone, TP_PATTERN_RING, false), *other = helper_channels(pairs, TP_PATTERN_RING, true);
	struct tp_topo *both = helper_machine("islands16.xml", NULL, NULL, true);
	struct tp_channels *asked = search_with(both, TP_ON, TP_PATTERN_RING, true), *forbidden = search_with(both, TP_OFF, TP_PATTERN_RING, true);
	assert_false(rings->by_net);
	assert_false(other->by_net);
	assert_true(asked->by_net);
	assert_false(forbidden->by_net);
	assert_true(helper_total(asked) > helper_total(forbidden));
	for (int i = 0; i < both->count[TP_TOPO_GPU]; i++) both->nodes[tp_topo_node_of(both, TP_TOPO_GPU, i)->index].gpu.maker = TP_MAKER_NVIDIA;
	struct tp_channels *others = search_with(both, TP_AUTO, TP_PATTERN_RING, true);
	assert_false(others->by_net);
	tp_channels_free(rings);
	tp_channels_free(other);
	tp_channels_free(asked);
	tp_channels_free(forbidden);
	tp_channels_free(others);
	tp_topo_free(alone);
	tp_topo_free(pairs);
	tp_topo_free(both);
}

/* A machine on which looking for rings whose ends have little between them left too few steps for others. */
static void one_way_to_look_takes_nothing_from_the_other(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_machine("uneven16.xml", NULL, NULL, true);
	struct tp_channels *rings = helper_channels(topo, TP_PATTERN_RING, true);
	assert_true(helper_total(rings) >= 96 * 0.999);
	tp_channels_free(rings);
	tp_topo_free(topo);
}

/* A NIC of the two that a hop needs is narrow, or gone: its ring is, and no other. */
static void an_island_with_a_nic_less_is_entered_by_the_others(void **state)
{
	(void)state;
	struct tp_topo *slow = helper_machine("islands16.xml", "name=\"mlx5_9\" dev=\"9\" speed=\"200000\"", "name=\"mlx5_9\" dev=\"9\" speed=\"100000\"", true);
	struct tp_topo *none = helper_machine("islands16.xml", "name=\"mlx5_9\" dev=\"9\" speed=\"200000\" port=\"1\" guid=\"0xa\" gdr=\"1\"",
		"name=\"mlx5_9\" dev=\"9\" speed=\"200000\" port=\"1\" guid=\"0xa\" gdr=\"0\"", true);
	struct tp_channels *a = helper_channels(slow, TP_PATTERN_RING, true), *b = helper_channels(none, TP_PATTERN_RING, true);
	assert_true(helper_total(a) >= 72 && helper_total(b) >= 72);
	tp_channels_free(a);
	tp_channels_free(b);
	tp_topo_free(slow);
	tp_topo_free(none);
}

static void cross_nic_0_never_changes_nics(void **state)
{
	(void)state;
	struct tp_topo_policy policy = helper_policy(true);
	struct tp_topo *topo = helper_machine("switch8.xml", NULL, NULL, true);
	struct tp_channels *rings;
	char why[256];
	policy.cross_nic = 0;
	assert_int_equal(tp_channels_search(topo, &policy, TP_PATTERN_RING, &rings), ncclSuccess);
	assert_int_equal(tp_channels_check(topo, &policy, rings, why), ncclSuccess);
	for (int c = 0; c < rings->nchannels; c++) assert_int_equal(rings->channels[c].net_in, rings->channels[c].net_out);
	assert_true(helper_total(rings) > 300);
	tp_channels_free(rings);
	tp_topo_free(topo);
}

static void two_sockets_and_one_nic(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_machine("pcie8.xml", NULL, NULL, true);
	struct tp_channels *rings = helper_channels(topo, TP_PATTERN_RING, true);
	/* 16 GB/s between the sockets, once each way. */
	NEAR(helper_total(rings), 16);
	tp_channels_free(rings);
	tp_topo_free(topo);
}

/* ---- Degraded ---- */

static void a_lost_nvlink_of_a_mesh_costs_one_ring(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_machine("mesh8.xml", "<nvlink target=\"0000:23:00.0\" count=\"2\"", "<nvlink target=\"0000:23:00.0\" count=\"1\"", false);
	struct tp_channels *rings = helper_channels(topo, TP_PATTERN_RING, false);
	assert_true(helper_total(rings) <= 100.1 && helper_total(rings) >= 79.9);
	assert_non_null(helper_found(rings, TP_FOUND_UNEVEN));
	tp_channels_free(rings);
	tp_topo_free(topo);
}

static void a_gpu_with_fewer_links_to_the_switch_is_named(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_machine("switch8.xml", "count=\"18\"", "count=\"12\"", false);
	struct tp_channels *rings = helper_channels(topo, TP_PATTERN_RING, false);
	NEAR(helper_total(rings), 12 * 20.6);
	const char *text = helper_found(rings, TP_FOUND_UNEVEN);
	assert_non_null(text);
	assert_non_null(strstr(text, "247.2 GB/s over 12 NVLinks where most have 370.8"));
	assert_int_equal(rings->findings[0].node, tp_topo_node_of(topo, TP_TOPO_GPU, 0)->index);
	tp_channels_free(rings);
	tp_topo_free(topo);
}

static void islands_of_nvlink_are_named(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_machine("islands4.xml", NULL, NULL, false);
	struct tp_channels *rings = helper_channels(topo, TP_PATTERN_RING, false), *trees = helper_channels(topo, TP_PATTERN_TREE, false);
	const char *groups = helper_found(rings, TP_FOUND_MISSING_LINK), *link = helper_found(trees, TP_FOUND_MISSING_LINK);
	assert_non_null(groups);
	assert_non_null(strstr(groups, "(0 1 | 2 3)"));
	/* A chain would do with one link more. */
	assert_non_null(link);
	assert_non_null(strstr(link, "a link between GPU 0 and GPU 2 would let one"));
	tp_channels_free(rings);
	tp_channels_free(trees);
	tp_topo_free(topo);
}

static void a_narrow_slot_of_a_nic_is_named(void **state)
{
	(void)state;
	const char *whole = "<pci busid=\"0000:15:00.0\" class=\"0x020700\" vendor=\"0x15b3\" link_speed=\"16.0 GT/s PCIe\" link_width=\"16\"";
	const char *narrow = "<pci busid=\"0000:15:00.0\" class=\"0x020700\" vendor=\"0x15b3\" link_speed=\"16.0 GT/s PCIe\" link_width=\"4\" max_link_width=\"16\"";
	struct tp_topo *topo = helper_machine("pcie8.xml", whole, narrow, true);
	struct tp_channels *rings = helper_channels(topo, TP_PATTERN_RING, true);
	NEAR(helper_total(rings), 6);
	const char *text = helper_found(rings, TP_FOUND_NARROW);
	assert_non_null(text);
	assert_non_null(strstr(text, "6 of its possible 24 GB/s"));
	tp_channels_free(rings);
	tp_topo_free(topo);
}

static void a_missing_nic_costs_its_rail(void **state)
{
	(void)state;
	const char *nic = "<pci busid=\"0000:45:00.0\" class=\"0x020700\" vendor=\"0x15b3\" link_speed=\"32.0 GT/s PCIe\" link_width=\"16\"><nic>"
		"<net name=\"mlx5_3\" dev=\"3\" speed=\"400000\" port=\"1\" guid=\"0x103\" maxconn=\"131072\" gdr=\"1\"/></nic></pci>";
	struct tp_topo *topo = helper_machine("switch8.xml", nic, "", true);
	struct tp_channels *rings = helper_channels(topo, TP_PATTERN_RING, true);
	assert_true(helper_total(rings) <= 7 * 48 + 0.1);
	assert_true(helper_total(rings) >= 6 * 48 - 0.1);
	tp_channels_free(rings);
	tp_topo_free(topo);
}

/* Slots, links and ports of all sorts of bandwidths: what is found is checked each time, and nothing gets better by getting worse. */
static void random_degradations_are_never_oversubscribed(void **state)
{
	(void)state;
	static const char *const files[] = { "mesh8.xml", "switch8.xml", "pairs8.xml", "pcie8.xml", "islands4.xml" };
	static const struct { const char *from, *to[3]; } changes[] = {
		{ "link_width=\"16\"", { "link_width=\"8\"", "link_width=\"4\"", "link_width=\"1\"" } },
		{ "count=\"2\"", { "count=\"1\"", "count=\"1\"", "count=\"0\"" } },
		{ "count=\"18\"", { "count=\"17\"", "count=\"9\"", "count=\"1\"" } },
		{ "speed=\"100000\"", { "speed=\"50000\"", "speed=\"25000\"", "speed=\"10000\"" } },
		{ "speed=\"400000\"", { "speed=\"200000\"", "speed=\"100000\"", "speed=\"10000\"" } },
		{ "gdr=\"1\"", { "gdr=\"0\"", "gdr=\"0\"", "gdr=\"0\"" } },
	};
	uint32_t seed = 1;
	for (int round = 0; round < 20; round++) {
		char path[512];
		snprintf(path, sizeof(path), "%s/%s", TOPO_DATA, files[round % 5]);
		char *text = helper_file(path);
		for (int i = 0; i < 4; i++) {
			seed = seed * 1664525 + 1013904223;
			const char *from = changes[(seed >> 20) % TP_ARRAY_LEN(changes)].from;
			char *changed = helper_replace(text, from, (int)(seed >> 10) % 12, changes[(seed >> 20) % TP_ARRAY_LEN(changes)].to[(seed >> 24) % 3]);
			if (!changed) continue;
			free(text);
			text = changed;
		}
		for (int multi_host = 0; multi_host < 2; multi_host++) {
			struct tp_topo_policy policy = helper_policy(multi_host);
			struct tp_topo *topo = helper_topo(text, &policy), *whole = helper_machine(files[round % 5], NULL, NULL, multi_host);
			for (int p = 0; p < 2; p++) {
				enum tp_pattern pattern = p ? TP_PATTERN_TREE : TP_PATTERN_RING;
				struct tp_channels *now = helper_channels(topo, pattern, multi_host), *before = helper_channels(whole, pattern, multi_host);
				assert_true(helper_total(now) <= helper_total(before) * 1.01);
				tp_channels_free(now);
				tp_channels_free(before);
			}
			tp_topo_free(topo);
			tp_topo_free(whole);
		}
		free(text);
	}
}

static void a_gpu_that_nothing_reaches_is_said_and_never_passed_over(void **state)
{
	(void)state;
	/* No link has any bandwidth: a machine that only a broken file can describe. */
	struct tp_topo_policy policy = helper_policy(false);
	struct tp_topo *topo = helper_topo("<system version=\"1\">" HELPER_CPU("0") HELPER_GPU("0000:11:00.0", "0", "") "</cpu></system>", &policy);
	struct tp_channels *one = helper_channels(topo, TP_PATTERN_RING, false);
	assert_int_equal(one->nchannels, 1);
	assert_int_equal(one->nfindings, 0);
	tp_channels_free(one);
	tp_topo_free(topo);
	topo = helper_topo("<system version=\"1\"><cpu numaid=\"0\" host_hash=\"0x1\" arch=\"x86_64\" vendor=\"GenuineIntel\">" HELPER_GPU("0000:11:00.0", "0", "")
		"</cpu><cpu numaid=\"0\" host_hash=\"0x2\" arch=\"x86_64\" vendor=\"GenuineIntel\">" HELPER_GPU("0000:12:00.0", "1", "") "</cpu></system>", &policy);
	struct tp_channels *two = helper_channels(topo, TP_PATTERN_RING, false);
	assert_int_equal(two->nchannels, 1);
	NEAR(two->bw_intra, 0.1);
	assert_non_null(helper_found(two, TP_FOUND_NO_PATTERN));
	tp_channels_free(two);
	tp_topo_free(topo);
}

static void other_machines_without_a_nic_are_said(void **state)
{
	(void)state;
	struct tp_topo_policy policy = helper_policy(true);
	struct tp_topo *topo = helper_topo("<system version=\"1\">" HELPER_CPU("0") HELPER_GPU("0000:11:00.0", "0", HELPER_NV18)
		HELPER_GPU("0000:12:00.0", "1", HELPER_NV18) "</cpu></system>", &policy);
	struct tp_channels *rings = helper_channels(topo, TP_PATTERN_RING, true);
	assert_non_null(helper_found(rings, TP_FOUND_NO_NIC));
	tp_channels_free(rings);
	tp_topo_free(topo);
}

static void a_check_finds_what_is_wrong(void **state)
{
	(void)state;
	struct tp_topo_policy policy = helper_policy(true);
	struct tp_topo *topo = helper_machine("switch8.xml", NULL, NULL, true);
	struct tp_channels *rings = helper_channels(topo, TP_PATTERN_RING, true);
	char why[256];
	rings->bw_intra *= 1.2;
	assert_int_equal(tp_channels_check(topo, &policy, rings, why), ncclInvalidUsage);
	assert_non_null(strstr(why, "carries"));
	rings->bw_intra /= 1.2;
	int32_t kept = rings->channels[3].gpus[2];
	rings->channels[3].gpus[2] = rings->channels[3].gpus[1];
	assert_int_equal(tp_channels_check(topo, &policy, rings, why), ncclInvalidUsage);
	assert_non_null(strstr(why, "channel 3 passes GPU"));
	rings->channels[3].gpus[2] = kept;
	rings->channels[1].net_out = rings->channels[1].net_in;
	assert_int_equal(tp_channels_check(topo, &policy, rings, why), ncclInvalidUsage);
	assert_non_null(strstr(why, "has no partner that goes back"));
	tp_channels_free(rings);
	tp_topo_free(topo);
}

/* 72 GPUs of 18 hosts behind one switch, a NIC each. */
static char *rack(void)
{
	char *text = calloc(1, 1 << 17);
	assert_non_null(text);
	int at = sprintf(text, "<system version=\"1\">");
	for (int cpu = 0, rank = 0; cpu < 36; cpu++) {
		at += sprintf(text + at, "<cpu host_hash=\"0x%x\" numaid=\"%d\" arch=\"arm64\">", 16 + cpu / 2, cpu % 2);
		for (int i = 0; i < 2; i++, rank++)
			at += sprintf(text + at, "<pci busid=\"%04x:01:00.0\" class=\"0x030200\" " HELPER_X16 "><gpu dev=\"%d\" sm=\"100\" rank=\"%d\" gdr=\"1\">" HELPER_NV18
				"<c2c bw=\"44712\" count=\"5\"/></gpu></pci><pci busid=\"%04x:03:00.0\" class=\"0x020700\" " HELPER_X16 "><nic><net name=\"mlx5_%d\" dev=\"%d\" "
				"speed=\"400000\" port=\"1\" guid=\"0x%x\" gdr=\"1\"/></nic></pci>", cpu % 2 * 8 + i, cpu % 2 * 2 + i, rank, cpu % 2 * 8 + i + 4, cpu % 2 * 2 + i,
				cpu % 2 * 2 + i, 0x1000 + rank);
		at += sprintf(text + at, "</cpu>");
	}
	sprintf(text + at, "</system>");
	return text;
}

static void a_rack_is_one_domain(void **state)
{
	(void)state;
	char *text = rack();
	for (int inter = 0; inter < 2; inter++) {
		struct tp_topo_policy policy = helper_policy(inter);
		struct tp_topo *topo = helper_topo(text, &policy);
		struct tp_channels *rings = helper_channels(topo, TP_PATTERN_RING, inter), *trees = helper_channels(topo, TP_PATTERN_TREE, inter);
		assert_int_equal(rings->ngpus, 72);
		NEAR(rings->nchannels * rings->bw_intra, 721.8);
		assert_true(trees->nchannels * trees->bw_intra >= 700);
		/* What it costs, in hops looked at: some millions would be a second. */
		assert_true(rings->steps + trees->steps < 6000000);
		tp_channels_free(rings);
		tp_channels_free(trees);
		tp_topo_free(topo);
	}
	free(text);
}

/* Whatever goes wrong in looking for ways by NICs, the direct ones have been found. */
static void what_was_found_stays_where_a_search_by_nics_fails(void **state)
{
	(void)state;
	if (SANITIZED) skip();
	struct tp_topo *topo = helper_machine("islands16.xml", NULL, NULL, true);
	struct tp_topo_policy policy = helper_policy(true);
	struct tp_channels *direct = search_with(topo, TP_OFF, TP_PATTERN_RING, true), *found = NULL;
	int kept = 0;
	policy.net_within = TP_ON;
	for (unsigned long n = 1;; n += 17) {
		allocations = 0;
		fails_at = n;
		ncclResult_t result = tp_channels_search(topo, &policy, TP_PATTERN_RING, &found);
		fails_at = 0;
		if (result != ncclSuccess) continue;
		const bool by_net = found->by_net;
		if (!by_net) {
			kept++;
			NEAR(helper_total(found), helper_total(direct));
		}
		tp_channels_free(found);
		if (by_net && allocations < n) break;           /* nothing failed any more */
	}
	assert_true(kept > 0);
	tp_channels_free(direct);
	tp_topo_free(topo);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(what_was_found_stays_where_a_search_by_nics_fails),
		cmocka_unit_test(a_cube_mesh_has_six_rings_over_nvlink), cmocka_unit_test(a_switch_has_a_channel_for_every_nvlink),
		cmocka_unit_test(every_gpu_talks_to_every_other_behind_a_switch_only), cmocka_unit_test(eight_nics_are_eight_rails_of_two_rings),
		cmocka_unit_test(a_mesh_of_uneven_links_fills_every_nic), cmocka_unit_test(islands_of_one_host_are_joined_by_their_nics),
		cmocka_unit_test(one_way_to_look_takes_nothing_from_the_other), cmocka_unit_test(nics_within_a_host_are_used_where_they_may_be), cmocka_unit_test(an_island_with_a_nic_less_is_entered_by_the_others),
		cmocka_unit_test(four_nics_are_shared_by_pairs), cmocka_unit_test(cross_nic_0_never_changes_nics),
		cmocka_unit_test(two_sockets_and_one_nic), cmocka_unit_test(a_lost_nvlink_of_a_mesh_costs_one_ring),
		cmocka_unit_test(a_gpu_with_fewer_links_to_the_switch_is_named), cmocka_unit_test(islands_of_nvlink_are_named),
		cmocka_unit_test(a_narrow_slot_of_a_nic_is_named), cmocka_unit_test(a_missing_nic_costs_its_rail),
		cmocka_unit_test(random_degradations_are_never_oversubscribed),
		cmocka_unit_test(a_gpu_that_nothing_reaches_is_said_and_never_passed_over), cmocka_unit_test(other_machines_without_a_nic_are_said),
		cmocka_unit_test(a_check_finds_what_is_wrong), cmocka_unit_test(a_rack_is_one_domain),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

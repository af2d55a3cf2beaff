/* Channels as files, their rails, and the same over the hosts of a cluster. */
#include "topo/helper_search.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- Files ---- */

static void what_is_written_is_read_again(void **state)
{
	(void)state;
	struct tp_topo_policy policy = helper_policy(true);
	struct tp_topo *topo = helper_machine("switch8.xml", NULL, NULL, true);
	const enum tp_pattern patterns[] = { TP_PATTERN_RING, TP_PATTERN_TREE, TP_PATTERN_PAIRS };
	struct tp_channels *all[3], *read;
	for (int i = 0; i < 3; i++) all[i] = helper_channels(topo, patterns[i], true);
	char *text, why[256];
	size_t bytes;
	assert_int_equal(tp_channels_text(topo, (const struct tp_channels *const *)all, 3, &text, &bytes), ncclSuccess);
	assert_non_null(strstr(text, "<graphs version=\"1\">"));
	assert_non_null(strstr(text, "<graph id=\"0\" pattern=\"4\" crossnic=\"2\" nchannels=\"16\" speedintra=\"24\" speedinter=\"24\" latencyinter=\"0\" "
		"typeintra=\"NVL\" typeinter=\"PIX\" samechannels=\"0\">"));
	for (int i = 0; i < 3; i++) {
		assert_int_equal(tp_channels_parse(topo, text, bytes, "g.xml", patterns[i], &read), ncclSuccess);
		assert_non_null(read);
		assert_int_equal(read->nchannels, all[i]->nchannels);
		assert_int_equal(read->pattern, all[i]->pattern);
		assert_int_equal(read->type_inter, all[i]->type_inter);
		for (int c = 0; c < read->nchannels; c++) {
			assert_memory_equal(read->channels[c].gpus, all[i]->channels[c].gpus, 8 * sizeof(int32_t));
			assert_int_equal(read->channels[c].net_out, all[i]->channels[c].net_out);
		}
		assert_int_equal(tp_channels_check(topo, &policy, read, why), ncclSuccess);
		tp_channels_free(read);
		tp_channels_free(all[i]);
	}
	free(text);
	tp_topo_free(topo);
}

/* What goes by NICs within a host is attributes of the GPUs: NCCL knows no NIC in the middle of a channel. */
static void ways_over_nics_of_one_host_are_written_and_read(void **state)
{
	(void)state;
	struct tp_topo_policy policy = helper_policy(true);
	struct tp_topo *topo = helper_machine("islands16.xml", NULL, NULL, true);
	struct tp_channels *all[2] = { helper_channels(topo, TP_PATTERN_RING, true), helper_channels(topo, TP_PATTERN_TREE, true) }, *read;
	char *text, why[256];
	size_t bytes;
	assert_true(all[0]->by_net);
	assert_int_equal(tp_channels_text(topo, (const struct tp_channels *const *)all, 2, &text, &bytes), ncclSuccess);
	for (int i = 0; i < 2; i++) {
		assert_int_equal(tp_channels_parse(topo, text, bytes, "g.xml", all[i]->pattern, &read), ncclSuccess);
		assert_int_equal(read->by_net, all[i]->by_net);
		for (int c = 0; c < read->nchannels; c++) {
			assert_int_equal(!read->channels[c].nets, !all[i]->channels[c].nets);
			if (read->channels[c].nets) assert_memory_equal(read->channels[c].nets, all[i]->channels[c].nets, 16 * sizeof(struct tp_hop_nets));
		}
		assert_int_equal(tp_channels_check(topo, &policy, read, why), ncclSuccess);
		if (!i) {
			for (int g = 0; g < 16; g++)
				if (read->channels[0].nets[g].next >= 0) read->channels[0].nets[g].next = read->channels[0].nets[g].prev;
			assert_int_not_equal(tp_channels_check(topo, &policy, read, why), ncclSuccess);
			assert_non_null(strstr(why, "exchanges with its next by"));
		}
		tp_channels_free(read);
	}
	char *bad = helper_replace(text, "nextnet=\"", 0, "nextnet=\"77");
	assert_int_not_equal(tp_channels_parse(topo, bad, strlen(bad), "g.xml", TP_PATTERN_RING, &read), ncclSuccess);
	free(bad);
	struct tp_cluster *cluster;
	assert_int_equal(tp_cluster_create(topo, all[0], NULL, 2, &cluster), ncclSuccess);
	int by_net = 0;
	for (int rank = 0; rank < 32; rank++) {
		struct tp_ring_place place;
		tp_cluster_ring(cluster, 0, rank, &place);
		by_net += place.net_out >= 0 && place.next / 16 == rank / 16;
	}
	assert_true(by_net > 0);
	tp_cluster_free(cluster);
	free(text);
	tp_channels_free(all[0]);
	tp_channels_free(all[1]);
	tp_topo_free(topo);
}

/* As NCCL writes them: no rank, devices by dev. */
static const char two_gpus[] = "<graphs version=\"1\"><graph id=\"0\" pattern=\"4\" crossnic=\"0\" nchannels=\"1\" speedintra=\"12\" speedinter=\"12\" "
	"latencyinter=\"0\" typeintra=\"PHB\" typeinter=\"PIX\" samechannels=\"1\">\n<channel>\n%s</channel></graph></graphs>";

static const char *refusal(const char *inside)
{
	char text[2048];
	struct tp_topo_policy policy = helper_policy(true);
	struct tp_topo *topo = helper_topo(HELPER_PAIR, &policy);
	struct tp_channels *read = NULL;
	snprintf(text, sizeof(text), two_gpus, inside);
	ncclResult_t result = tp_channels_parse(topo, text, strlen(text), "g.xml", TP_PATTERN_RING, &read);
	tp_topo_free(topo);
	if (result != ncclSuccess) return tp_log_last_error();
	tp_channels_free(read);
	return "";
}

static void files_of_nccl_are_read(void **state)
{
	(void)state;
	assert_string_equal(refusal("<net dev=\"0\"/><gpu dev=\"0\"/><gpu dev=\"1\"/><net dev=\"1\"/>"), "");
	assert_string_equal(refusal("<gpu dev=\"1\" rank=\"1\"/><gpu dev=\"0\"/>"), "");
}

static void nonsense_is_refused_with_its_line(void **state)
{
	(void)state;
	assert_non_null(strstr(refusal("<gpu dev=\"0\"/>\n<gpu dev=\"7\"/>"), "g.xml:4: <gpu"));
	assert_non_null(strstr(refusal("<gpu dev=\"0\"/>\n<gpu dev=\"7\"/>"), "no GPU 7"));
	assert_non_null(strstr(refusal("<gpu dev=\"0\"/>"), "has 1 GPUs, the machine 2"));
	assert_non_null(strstr(refusal("<gpu dev=\"0\"/><gpu dev=\"0\"/>"), "twice"));
	assert_non_null(strstr(refusal("<gpu dev=\"0\"/><gpu dev=\"1\"/><gpu dev=\"0\"/>"), "one GPU too many"));
	assert_non_null(strstr(refusal("<net dev=\"0\"/><gpu dev=\"0\"/><gpu dev=\"1\"/>"), "one NIC"));
	assert_non_null(strstr(refusal("<net dev=\"0\"/><net dev=\"0\"/><net dev=\"0\"/><gpu dev=\"0\"/><gpu dev=\"1\"/>"), "third NIC"));
	assert_non_null(strstr(refusal("<net dev=\"9\"/><gpu dev=\"0\"/><gpu dev=\"1\"/><net dev=\"0\"/>"), "no NIC 9"));
	assert_non_null(strstr(refusal("<gpu dev=\"x\"/><gpu dev=\"1\"/>"), "g.xml:3"));
	assert_non_null(strstr(refusal("</channel><channel><gpu dev=\"0\"/><gpu dev=\"1\"/>"), "says 1 channels and has 2"));
}

static void another_pattern_in_the_file_is_no_error(void **state)
{
	(void)state;
	char text[2048];
	struct tp_topo_policy policy = helper_policy(true);
	struct tp_topo *topo = helper_topo(HELPER_PAIR, &policy);
	struct tp_channels *read = (void *)text;
	snprintf(text, sizeof(text), two_gpus, "<gpu dev=\"0\"/><gpu dev=\"1\"/>");
	assert_int_equal(tp_channels_parse(topo, text, strlen(text), "g.xml", TP_PATTERN_TREE, &read), ncclSuccess);
	assert_null(read);
	assert_int_not_equal(tp_channels_parse(topo, "<system/>", 9, "s.xml", TP_PATTERN_TREE, &read), ncclSuccess);
	tp_topo_free(topo);
}

static long size_of_file(const char *path)
{
	FILE *file = fopen(path, "re");
	assert_non_null(file);
	fseek(file, 0, SEEK_END);
	long size = ftell(file);
	fclose(file);
	return size;
}

/* Parameters are read once in the life of a process: this test is the one that sets them. */
static void the_users_file_wins_over_the_search(void **state)
{
	(void)state;
	char path[] = "/tmp/tp_channels_XXXXXX", dump[] = "/tmp/tp_channels_XXXXXX", text[2048];
	int fd = mkstemp(path), dump_fd = mkstemp(dump);
	assert_true(fd >= 0 && dump_fd >= 0);
	snprintf(text, sizeof(text), two_gpus, "<net dev=\"1\"/><gpu dev=\"1\"/><gpu dev=\"0\"/><net dev=\"1\"/>");
	assert_int_equal(write(fd, text, strlen(text)), (ssize_t)strlen(text));
	close(fd);
	close(dump_fd);
	setenv("NCCL_GRAPH_FILE", path, 1);
	setenv("NCCL_GRAPH_DUMP_FILE", dump, 1);
	struct tp_topo_policy policy = helper_policy(true);
	struct tp_topo *topo = helper_topo(HELPER_PAIR, &policy);
	struct tp_channels *rings, *trees;
	assert_int_equal(tp_channels_load(topo, &policy, TP_PATTERN_RING, &rings), ncclSuccess);
	assert_int_equal(rings->nchannels, 1);
	assert_int_equal(topo->nodes[rings->channels[0].gpus[0]].ordinal, 1);
	/* Not in the file: searched for. */
	assert_int_equal(tp_channels_load(topo, &policy, TP_PATTERN_TREE, &trees), ncclSuccess);
	assert_true(trees->nchannels >= 1 && trees->steps > 0);
	const struct tp_channels *all[] = { rings, trees };
	assert_int_equal(tp_channels_dump(topo, all, 2, 1), ncclSuccess);
	assert_int_equal(size_of_file(dump), 0);
	assert_int_equal(tp_channels_dump(topo, all, 2, 0), ncclSuccess);
	char *written = helper_file(dump);
	assert_non_null(strstr(written, "<graph id=\"0\" pattern=\"4\""));
	assert_non_null(strstr(written, "<graph id=\"1\""));
	free(written);
	tp_channels_free(rings);
	tp_channels_free(trees);
	tp_topo_free(topo);
	unlink(path);
	unlink(dump);
}

/* ---- Rails ---- */

static struct tp_rails *rails_of(const struct tp_topo *topo)
{
	struct tp_rails *rails;
	struct tp_topo_policy policy = helper_policy(true);
	assert_int_equal(tp_rails_assign(topo, &policy, &rails), ncclSuccess);
	assert_int_equal(rails->nrails, topo->count[TP_TOPO_GPU]);
	return rails;
}

static void each_gpu_has_the_nic_beside_it(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_machine("switch8.xml", NULL, NULL, true);
	struct tp_rails *rails = rails_of(topo);
	for (int i = 0; i < 8; i++) {
		assert_int_equal(rails->rails[i].nnets, 1);
		assert_int_equal(topo->nodes[rails->rails[i].nets[0]].ordinal, i);
		assert_int_equal(rails->rails[i].share, 1);
		assert_int_equal(rails->rails[i].type, TP_PATH_PIX);
	}
	assert_int_equal(rails->nfindings, 0);
	tp_rails_free(rails);
	tp_topo_free(topo);
}

static void two_gpus_share_each_of_four_nics(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_machine("pairs8.xml", NULL, NULL, true);
	struct tp_rails *rails = rails_of(topo);
	for (int i = 0; i < 8; i++) {
		assert_int_equal(topo->nodes[rails->rails[i].nets[0]].ordinal, i / 2);
		assert_int_equal(rails->rails[i].share, 2);
		assert_true(rails->rails[i].bw > 5.99 && rails->rails[i].bw < 6.01);
	}
	assert_int_equal(rails->nfindings, 8);
	assert_int_equal(rails->findings[0].kind, TP_FOUND_NIC_SHARED);
	tp_rails_free(rails);
	tp_topo_free(topo);
}

static void a_gpu_whose_nic_is_missing_shares_anothers(void **state)
{
	(void)state;
	const char *nic = "<pci busid=\"0000:45:00.0\" class=\"0x020700\" vendor=\"0x15b3\" link_speed=\"32.0 GT/s PCIe\" link_width=\"16\"><nic>"
		"<net name=\"mlx5_3\" dev=\"3\" speed=\"400000\" port=\"1\" guid=\"0x103\" maxconn=\"131072\" gdr=\"1\"/></nic></pci>";
	struct tp_topo *topo = helper_machine("switch8.xml", nic, "", true);
	struct tp_rails *rails = rails_of(topo);
	int shared = 0, far = 0;
	for (int i = 0; i < rails->nfindings; i++) {
		shared += rails->findings[i].kind == TP_FOUND_NIC_SHARED;
		far += rails->findings[i].kind == TP_FOUND_NIC_FAR;
		if (rails->findings[i].kind == TP_FOUND_NIC_FAR) assert_int_equal(topo->nodes[rails->findings[i].node].ordinal, 3);
	}
	assert_int_equal(shared, 2);
	assert_int_equal(far, 1);
	tp_rails_free(rails);
	tp_topo_free(topo);
}

/* ---- Host ranks ---- */

static struct tp_rails *rails_from(const struct tp_topo *topo, const struct tp_topo_policy *policy, const int32_t *places, int count)
{
	struct tp_rails *rails;
	assert_int_equal(tp_rails_assign_places(topo, policy, places, count, &rails), ncclSuccess);
	assert_int_equal(rails->nrails, count);
	return rails;
}

static int port_of(const struct tp_topo *topo, const struct tp_rails *rails, int rank, int i)
{
	return i < rails->rails[rank].nnets ? topo->nodes[rails->rails[rank].nets[i]].net.dev : -1;
}

/* Two NUMA nodes; three ports on the second. */
#define UNEVEN "<system version=\"1\">" HELPER_CPU("0") HELPER_NIC("0000:12:00.0", "0") "</cpu>" HELPER_CPU("1") HELPER_NIC("0000:22:00.0", "1") \
	HELPER_NIC("0000:32:00.0", "2") HELPER_NIC("0000:42:00.0", "3") "</cpu></system>"

static void host_ranks_have_the_ports_of_their_numa_node(void **state)
{
	(void)state;
	struct tp_topo_policy policy = helper_policy(true);
	struct tp_topo *topo = helper_topo(UNEVEN, &policy);
	int32_t first = tp_topo_node_of(topo, TP_TOPO_CPU, 0)->index, second = tp_topo_node_of(topo, TP_TOPO_CPU, 1)->index;
	const int32_t places[] = { first, first, first, second, second };
	struct tp_rails *rails = rails_from(topo, &policy, places, 5);
	/* Those of a node share its port, though others are free, */
	for (int r = 0; r < 3; r++) assert_int_equal(port_of(topo, rails, r, 0), 0);
	for (int r = 0; r < 3; r++) assert_int_equal(rails->rails[r].nnets, 1);
	/* and where there are several none is used twice. */
	int used = 0;
	for (int r = 3; r < 5; r++)
		for (int i = 0; i < rails->rails[r].nnets; i++) used |= 1 << port_of(topo, rails, r, i);
	assert_int_equal(used, 1 << 1 | 1 << 2 | 1 << 3);
	assert_int_equal(rails->rails[3].nnets + rails->rails[4].nnets, 3);
	tp_rails_free(rails);
	tp_topo_free(topo);
}

static void a_rank_whose_node_has_no_port_uses_anothers(void **state)
{
	(void)state;
	struct tp_topo_policy policy = helper_policy(true);
	struct tp_topo *topo = helper_topo("<system version=\"1\">" HELPER_CPU("0") "</cpu>" HELPER_CPU("1") HELPER_NIC("0000:22:00.0", "0") HELPER_NIC("0000:32:00.0", "1")
		"</cpu></system>", &policy);
	int32_t first = tp_topo_node_of(topo, TP_TOPO_CPU, 0)->index, second = tp_topo_node_of(topo, TP_TOPO_CPU, 1)->index;
	const int32_t places[] = { first, second };
	struct tp_rails *rails = rails_from(topo, &policy, places, 2);
	assert_true(port_of(topo, rails, 0, 0) >= 0);
	assert_int_equal(port_of(topo, rails, 0, 0) + port_of(topo, rails, 1, 0), 1);
	assert_int_equal(rails->rails[0].type, TP_PATH_SYS);
	tp_rails_free(rails);
	tp_topo_free(topo);
}

static void ranks_that_run_anywhere_share_all_ports_in_their_order(void **state)
{
	(void)state;
	struct tp_topo_policy policy = helper_policy(true);
	struct tp_topo *topo = helper_topo(UNEVEN, &policy);
	const int32_t places[] = { -1, -1, -1, -1, -1, -1, -1, -1 };
	struct tp_rails *rails = rails_from(topo, &policy, places, 8);
	for (int r = 0; r < 8; r++) assert_int_equal(port_of(topo, rails, r, 0), r / 2);
	tp_rails_free(rails);
	rails = rails_from(topo, &policy, places, 2);
	assert_int_equal(port_of(topo, rails, 0, 0), 0);
	assert_int_equal(port_of(topo, rails, 1, 0), 2);
	assert_int_equal(rails->rails[0].nnets + rails->rails[1].nnets, 4);
	tp_rails_free(rails);
	tp_topo_free(topo);
}

static void without_gpudirect_a_gpu_has_its_own_port_all_the_same(void **state)
{
	(void)state;
	struct tp_topo_policy policy = helper_policy(true);
	policy.gdr_level = TP_PATH_LOC;
	policy.pxn = false;
	struct tp_topo *topo = helper_topo("<system version=\"1\">" HELPER_CPU("0") HELPER_BRIDGE("0000:10:00.0", "") HELPER_GPU("0000:11:00.0", "0", "")
		HELPER_NIC("0000:12:00.0", "1") "</pci>" HELPER_BRIDGE("0000:20:00.0", "") HELPER_GPU("0000:21:00.0", "1", "") HELPER_NIC("0000:22:00.0", "0")
		"</pci></cpu></system>", &policy);
	struct tp_rails *rails = rails_from(topo, &policy, topo->of_kind[TP_TOPO_GPU], 2);
	assert_int_equal(port_of(topo, rails, 0, 0), 1);
	assert_int_equal(port_of(topo, rails, 1, 0), 0);
	assert_int_equal(rails->rails[0].type, TP_PATH_PHB);
	tp_rails_free(rails);
	tp_topo_free(topo);
}

static void the_policy_says_how_many_ports_a_gpu_has(void **state)
{
	(void)state;
	struct tp_topo_policy policy = helper_policy(true);
	struct tp_topo *topo = helper_topo("<system version=\"1\">" HELPER_CPU("0") HELPER_BRIDGE("0000:10:00.0", "") HELPER_GPU("0000:11:00.0", "0", "")
		HELPER_GPU("0000:21:00.0", "1", "") HELPER_NIC("0000:12:00.0", "0") HELPER_NIC("0000:22:00.0", "1") "</pci></cpu></system>", &policy);
	static const struct { int policy, has; } cases[] = { { 0, 1 }, { 1, 1 }, { 2, 2 }, { INT32_MAX, 2 } };
	for (size_t i = 0; i < TP_ARRAY_LEN(cases); i++) {
		policy.nets_per_gpu = cases[i].policy;
		struct tp_rails *rails = rails_from(topo, &policy, topo->of_kind[TP_TOPO_GPU], 2);
		for (int g = 0; g < 2; g++) assert_int_equal(rails->rails[g].nnets, cases[i].has);
		for (int g = 0; g < 2; g++) assert_int_equal(port_of(topo, rails, g, 0), g);
		tp_rails_free(rails);
	}
	tp_topo_free(topo);
}

static void host_ranks_stand_by_what_they_share(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_topo("<system version=\"1\"><cpu numaid=\"0\" affinity=\"0000ffff\"><cache level=\"3\" affinity=\"000000ff\"/>"
		"<cache level=\"3\" affinity=\"0000ff00\"/><hostrank rank=\"0\" affinity=\"00000001\"/><hostrank rank=\"1\" affinity=\"00000100\"/>"
		"<hostrank rank=\"3\" affinity=\"00000002\"/><hostrank rank=\"4\" affinity=\"00000200\"/></cpu>"
		"<cpu numaid=\"1\" affinity=\"ffff0000\"><hostrank rank=\"2\" affinity=\"00010000\"/></cpu></system>", NULL);
	int32_t ranks[5] = { 0 };
	static const int32_t wanted[] = { 0, 3, 1, 4, 2 };
	assert_int_equal(topo->nhost_ranks, 5);
	assert_int_equal(tp_channels_order_hosts(topo, ranks), ncclSuccess);
	assert_memory_equal(ranks, wanted, sizeof(wanted));
	tp_topo_free(topo);
}

/* ---- Clusters ---- */

static void ring_passes_all(const struct tp_cluster *cluster, int channel, int *crossings)
{
	int n = cluster->nhosts * cluster->ngpus, rank = 0, passed = 0;
	char *seen = calloc(1, (size_t)n);
	assert_non_null(seen);
	do {
		struct tp_ring_place at, next;
		tp_cluster_ring(cluster, channel, rank, &at);
		tp_cluster_ring(cluster, channel, at.next, &next);
		assert_false(seen[rank]);
		seen[rank] = 1;
		passed++;
		assert_int_equal(next.prev, rank);
		/* Within a host there are no NICs; between hosts both have one, and on one rail. */
		if (at.next / cluster->ngpus == rank / cluster->ngpus && cluster->nhosts > 1) {
			assert_int_equal(at.net_out, -1);
			assert_int_equal(next.net_in, -1);
		} else if (cluster->nhosts > 1) {
			assert_true(at.net_out >= 0 && next.net_in >= 0);
			*crossings += at.net_out != next.net_in;
		}
		rank = at.next;
	} while (rank);
	assert_int_equal(passed, n);
	free(seen);
}

static void rings_of_a_cluster_pass_every_rank_once_and_keep_their_rails(void **state)
{
	(void)state;
	static const int sizes[] = { 1, 2, 3, 5, 8, 1024 };
	struct tp_topo *topo = helper_machine("switch8.xml", NULL, NULL, true);
	struct tp_channels *rings = helper_channels(topo, TP_PATTERN_RING, true);
	for (size_t i = 0; i < TP_ARRAY_LEN(sizes); i++) {
		struct tp_cluster *cluster;
		assert_int_equal(tp_cluster_create(topo, rings, NULL, sizes[i], &cluster), ncclSuccess);
		for (int c = 0; c < rings->nchannels; c++) {
			int crossings = 0;
			ring_passes_all(cluster, c, &crossings);
			/* Rings that cross in pairs can't keep their rail all round an odd number of hosts. */
			assert_true(crossings <= (sizes[i] > 1 && sizes[i] % 2));
		}
		tp_cluster_free(cluster);
	}
	tp_channels_free(rings);
	tp_topo_free(topo);
}

/* Every rank hangs on the root, parents and children agree; flows in halves of a tree's data a host's NIC takes in. */
static void tree_holds(const struct tp_cluster *cluster, int channel, int *flows)
{
	int n = cluster->nhosts * cluster->ngpus, roots = 0;
	for (int rank = 0; rank < n; rank++) {
		struct tp_tree_place at, other;
		tp_cluster_tree(cluster, channel, rank, &at);
		roots += at.up < 0;
		for (int i = 0; i < 3; i++) {
			if (at.down[i] < 0) continue;
			tp_cluster_tree(cluster, channel, at.down[i], &other);
			assert_int_equal(other.up, rank);
			flows[rank / cluster->ngpus] += at.down[i] / cluster->ngpus != rank / cluster->ngpus;
		}
		if (at.up < 0) continue;
		bool mine = false;
		tp_cluster_tree(cluster, channel, at.up, &other);
		for (int i = 0; i < 3; i++) mine |= other.down[i] == rank;
		assert_true(mine);
		flows[rank / cluster->ngpus] += at.up / cluster->ngpus != rank / cluster->ngpus;
		int steps = 0;
		for (int up = rank; up >= 0 && steps <= n; steps++) {
			tp_cluster_tree(cluster, channel, up, &other);
			up = other.up;
			if (cluster->nhosts > 64) break;        /* the depth is asked for apart */
		}
		assert_true(steps <= n);
	}
	assert_int_equal(roots, 1);
}

static void trees_of_a_cluster_are_two_and_share_the_load(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_machine("switch8.xml", NULL, NULL, true);
	struct tp_channels *trees = helper_channels(topo, TP_PATTERN_TREE, true);
	for (int hosts = 1; hosts <= 1024; hosts = hosts < 20 ? hosts + 1 : hosts * 2 + hosts % 3) {
		struct tp_cluster *cluster;
		int *flows = calloc((size_t)hosts, sizeof(*flows)), depth = 0;
		assert_non_null(flows);
		assert_int_equal(tp_cluster_create(topo, NULL, trees, hosts, &cluster), ncclSuccess);
		tree_holds(cluster, 0, flows);
		tree_holds(cluster, 1, flows);
		/* Two trees, half of the data each: four halves are what a ring's NIC takes in. */
		for (int host = 0; host < hosts; host++) assert_true(flows[host] <= 4);
		while (1 << depth < hosts) depth++;
		assert_true(tp_cluster_tree_depth(cluster) <= depth);
		tp_cluster_free(cluster);
		free(flows);
	}
	tp_channels_free(trees);
	tp_topo_free(topo);
}

static void a_cluster_of_other_machines_is_refused(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_machine("switch8.xml", NULL, NULL, true), *other = helper_machine("islands4.xml", NULL, NULL, true);
	struct tp_channels *rings = helper_channels(other, TP_PATTERN_RING, true);
	struct tp_cluster *cluster;
	assert_int_equal(tp_cluster_create(topo, rings, NULL, 4, &cluster), ncclInvalidUsage);
	assert_int_equal(tp_cluster_create(other, rings, NULL, 0, &cluster), ncclInvalidUsage);
	tp_channels_free(rings);
	tp_topo_free(topo);
	tp_topo_free(other);
}

static void a_last_channel_without_a_partner_stays_with_itself(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_machine("switch8.xml", NULL, NULL, true);
	struct tp_channels *rings = helper_channels(topo, TP_PATTERN_RING, true);
	struct tp_cluster *cluster;
	int all = rings->nchannels;
	rings->cross_nic = 2;
	rings->nchannels = 1;
	rings->channels[0].net_out = topo->of_kind[TP_TOPO_NET][1];
	rings->channels[0].net_in = topo->of_kind[TP_TOPO_NET][0];
	assert_int_equal(tp_cluster_create(topo, rings, NULL, 2, &cluster), ncclSuccess);
	for (int rank = 0; rank < 16; rank++) {
		struct tp_ring_place place;
		tp_cluster_ring(cluster, 0, rank, &place);
		assert_in_range(place.next, 0, 15);
	}
	tp_cluster_free(cluster);
	rings->nchannels = all;
	tp_channels_free(rings);
	tp_topo_free(topo);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_last_channel_without_a_partner_stays_with_itself),
		cmocka_unit_test(what_is_written_is_read_again), cmocka_unit_test(ways_over_nics_of_one_host_are_written_and_read), cmocka_unit_test(files_of_nccl_are_read),
		cmocka_unit_test(nonsense_is_refused_with_its_line), cmocka_unit_test(another_pattern_in_the_file_is_no_error),
		cmocka_unit_test(the_users_file_wins_over_the_search), cmocka_unit_test(each_gpu_has_the_nic_beside_it),
		cmocka_unit_test(two_gpus_share_each_of_four_nics), cmocka_unit_test(a_gpu_whose_nic_is_missing_shares_anothers),
		cmocka_unit_test(host_ranks_have_the_ports_of_their_numa_node), cmocka_unit_test(a_rank_whose_node_has_no_port_uses_anothers),
		cmocka_unit_test(ranks_that_run_anywhere_share_all_ports_in_their_order), cmocka_unit_test(without_gpudirect_a_gpu_has_its_own_port_all_the_same),
		cmocka_unit_test(the_policy_says_how_many_ports_a_gpu_has), cmocka_unit_test(host_ranks_stand_by_what_they_share),
		cmocka_unit_test(rings_of_a_cluster_pass_every_rank_once_and_keep_their_rails),
		cmocka_unit_test(trees_of_a_cluster_are_two_and_share_the_load), cmocka_unit_test(a_cluster_of_other_machines_is_refused),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

/* On public files of real machines the search is never worse than NCCL's, of which the answers lie beside the files. Skipped where
 * nobody has them. */
#include "topo/helper_search.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The number behind "key": in an object; the answers have each key of a graph once, before its orders. */
static double number_of(const char *graph, const char *key)
{
	char quoted[32];
	snprintf(quoted, sizeof(quoted), "\"%s\":", key);
	const char *at = strstr(graph, quoted);
	if (!at) fail_msg("no %s", quoted);
	return strtod(at + strlen(quoted), NULL);
}

static int worse;

static void compare(const char *name, const char *variant, const char *answer, const char *which, const struct tp_channels *ours)
{
	char key[32];
	snprintf(key, sizeof(key), "\"%s\":{", which);
	const char *graph = strstr(answer, key);
	if (!graph) fail_msg("%s has no %s", name, key);
	double n = number_of(graph, "nchannels"), intra = n * number_of(graph, "bwIntra"), inter = n * number_of(graph, "bwInter");
	double our_intra = ours->nchannels * ours->bw_intra, our_inter = ours->nchannels * ours->bw_inter;
	if (our_intra >= intra * 0.9999 && our_inter >= inter * 0.9999) return;
	print_message("%s %s %s: %.4g within and %.4g outside, NCCL %.4g and %.4g\n", name, variant, which, our_intra, our_inter, intra, inter);
	worse++;
}

/* NVLS: as many heads, and at each as much. NCCL has it on Hopper and newer, we have pairs behind any switch. */
static void compare_pairs(const char *name, const char *variant, const char *answer, const struct tp_topo *topo, bool multi_host)
{
	const char *nvls = strstr(answer, "\"nvls\":{");
	if (!nvls || number_of(nvls, "nchannels") < 1) return;
	struct tp_channels *pairs = helper_channels(topo, TP_PATTERN_PAIRS, multi_host);
	double theirs = number_of(nvls, "nchannels") * number_of(nvls, multi_host ? "bwInter" : "bwIntra"), ours = helper_total(pairs);
	if (ours < theirs * 0.9999) {
		print_message("%s %s pairs: %.4g, NCCL %.4g\n", name, variant, ours, theirs);
		worse++;
	}
	tp_channels_free(pairs);
}

static void compare_machine(const char *name)
{
	char path[1024];
	snprintf(path, sizeof(path), "%s/%s.xml", TOPO_PUBLIC, name);
	char *text = helper_file(path);
	for (int multi_host = 0; multi_host < 2; multi_host++) {
		const char *variant = multi_host ? "inter" : "intra";
		snprintf(path, sizeof(path), "%s/nccl/%s.%s.json", TOPO_PUBLIC, name, variant);
		char *answer = helper_file(path);
		struct tp_topo_policy policy = helper_policy(multi_host);
		struct tp_topo *topo = helper_topo(text, &policy);
		struct tp_channels *rings = helper_channels(topo, TP_PATTERN_RING, multi_host), *trees = helper_channels(topo, TP_PATTERN_TREE, multi_host);
		compare(name, variant, answer, "rings", rings);
		compare(name, variant, answer, "tree", trees);
		compare_pairs(name, variant, answer, topo, multi_host);
		/* What a search may cost up to 8 GPUs, in hops looked at; above, what is promised is twenty times as long. */
		assert_true(rings->steps < (topo->count[TP_TOPO_GPU] > 8 ? 12000000 : 3000000) && trees->steps < 3000000);
		tp_channels_free(rings);
		tp_channels_free(trees);
		tp_topo_free(topo);
		free(answer);
	}
	free(text);
}

static void never_worse_than_nccl(void **state)
{
	(void)state;
	DIR *folder = opendir(TOPO_PUBLIC "/nccl");
	int machines = 0;
	if (!folder) skip();
	for (struct dirent *entry; (entry = readdir(folder));) {
		char name[300];
		size_t length = strlen(entry->d_name);
		if (length < 12 || strcmp(entry->d_name + length - 11, ".intra.json")) continue;
		snprintf(name, sizeof(name), "%.*s", (int)length - 11, entry->d_name);
		compare_machine(name);
		machines++;
	}
	closedir(folder);
	assert_true(machines > 0);
	assert_int_equal(worse, 0);
}

/* nchannels x bandwidth that NCCL 2.30.7 finds on public files of machines of these kinds, or that its list of bandwidths allows. */
static void never_worse_than_nccl_on_small_files(void **state)
{
	(void)state;
	static const struct { const char *file; bool multi_host; double rings, trees; } bars[] = {
		{ "mesh8.xml", false, 6 * 20, 6 * 20 }, { "mesh8.xml", true, 4 * 12, 4 * 12 },
		{ "switch8.xml", false, 12 * 30, 12 * 30 }, { "switch8.xml", true, 8 * 48, 8 * 48 },
		{ "pairs8.xml", false, 12 * 20, 12 * 20 }, { "pairs8.xml", true, 4 * 12, 4 * 12 },
		{ "pcie8.xml", false, 15, 15 }, { "pcie8.xml", true, 15, 15 },
		{ "islands4.xml", false, 10, 10 }, { "islands4.xml", true, 10, 10 },
	};
	for (size_t i = 0; i < TP_ARRAY_LEN(bars); i++) {
		struct tp_topo *topo = helper_machine(bars[i].file, NULL, NULL, bars[i].multi_host);
		struct tp_channels *rings = helper_channels(topo, TP_PATTERN_RING, bars[i].multi_host);
		struct tp_channels *trees = helper_channels(topo, TP_PATTERN_TREE, bars[i].multi_host);
		assert_true(helper_total(rings) >= bars[i].rings * 0.9999);
		assert_true(helper_total(trees) >= bars[i].trees * 0.9999);
		tp_channels_free(rings);
		tp_channels_free(trees);
		tp_topo_free(topo);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = { cmocka_unit_test(never_worse_than_nccl), cmocka_unit_test(never_worse_than_nccl_on_small_files) };
	return cmocka_run_group_tests(tests, NULL, NULL);
}

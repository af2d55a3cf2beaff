/* Expectations: what can be said, what is met, and with which words what isn't. Well-known systems and guesses besides. */
#include "topo/helper_topo.h"

#include <stdlib.h>
#include <string.h>

static struct tp_topo *model(const char *name, struct tp_topo_policy *policy)
{
	struct tp_topo_doc *doc;
	struct tp_topo *topo;
	tp_topo_policy_default(policy);
	assert_int_equal(tp_topo_model(name, &doc), ncclSuccess);
	assert_int_equal(tp_topo_build(doc, &topo), ncclSuccess);
	tp_topo_doc_free(doc);
	assert_int_equal(tp_topo_compute_paths(topo, policy), ncclSuccess);
	return topo;
}

/* The first text that isn't met, "" where all is; "!" where the list can't be read. */
static const char *unmet(const char *name, const char *expected)
{
	static char text[512];
	struct tp_topo_policy policy;
	struct tp_topo *topo = model(name, &policy);
	struct tp_topo_unmet *list = NULL;
	int count = 0;
	ncclResult_t result = tp_topo_expect_check(topo, &policy, expected, "TELPHER_EXPECT", &list, &count);
	snprintf(text, sizeof(text), "%s", result != ncclSuccess ? "!" : count ? list[0].text : "");
	free(list);
	tp_topo_free(topo);
	return text;
}

static void what_is_so_is_met(void **state)
{
	(void)state;
	assert_string_equal(unmet("dgx-h100", "net=ib gdr=on p2p=nvlink nics>=8"), "");
	assert_string_equal(unmet("dgx-h100", "gpus=8,nvlinks>=18\nnear=PIX|PXB # a comment with gpus=9\nfaults=0 nic.gbps>=400 gpu.lanes=16 NET=IB"), "");
	assert_string_equal(unmet("dgx-h100", ""), "");
	assert_string_equal(unmet("dgx-h100", "nics<=8"), "");
	assert_string_equal(unmet("mi300x", "p2p=nvlink gdr=on"), "");
}

static void what_is_not_so_is_named_with_its_reason(void **state)
{
	(void)state;
	assert_string_equal(unmet("p4d", "nics>=8"), "expected nics>=8, found 4 at the machine");
	const char *said = unmet("two-sockets", "p2p=nvlink|pcie");
	assert_non_null(strstr(said, "expected p2p=nvlink|pcie, found none at GPU 0 to GPU 2: they meet from one CPU to another"));
	assert_non_null(strstr(said, "(and 7 more of 12)"));
	assert_non_null(strstr(unmet("p3dn", "p2p=nvlink"), "found relay at GPU 0 to GPU 5"));
	assert_non_null(strstr(unmet("two-sockets", "near=PIX"), "found SYS at GPU 2 to its NIC"));
	assert_non_null(strstr(unmet("dgx-h100", "rings>=500"), "found 384 at all rings together"));
}

static void what_cannot_be_expected_is_an_error_that_says_what_can(void **state)
{
	(void)state;
	assert_string_equal(unmet("p4d", "speed=high"), "!");
	assert_non_null(strstr(tp_log_last_error(), "TELPHER_EXPECT: nothing can be expected of 'speed'"));
	assert_string_equal(unmet("p4d", "gdr=maybe"), "!");
	assert_non_null(strstr(tp_log_last_error(), "gdr can't be 'maybe'; it can be on|off"));
	assert_string_equal(unmet("p4d", "gdr>=on"), "!");
	assert_string_equal(unmet("p4d", "gpus=eight"), "!");
	assert_string_equal(unmet("p4d", "gpus"), "!");
	assert_string_equal(unmet("p4d", "gpus="), "!");
	assert_string_equal(unmet("p4d", "gpus>8"), "!");
	assert_string_equal(unmet("p4d", "=8"), "!");
}

static void what_a_machine_writes_it_meets(void **state)
{
	(void)state;
	const char *name;
	for (int i = 0; (name = tp_topo_model_name(i, NULL)); i++) {
		struct tp_topo_policy policy;
		char *text;
		size_t bytes;
		/* The same search twice: enough on one host. */
		if (strcmp(name, "gb200-nvl72") == 0) continue;
		struct tp_topo *topo = model(name, &policy);
		FILE *out = open_memstream(&text, &bytes);
		assert_int_equal(tp_topo_expect_write(topo, &policy, out), ncclSuccess);
		fclose(out);
		assert_string_equal(unmet(name, text), "");
		free(text);
		tp_topo_free(topo);
	}
}

static void every_key_is_explained(void **state)
{
	(void)state;
	const char *words, *doc;
	int count = 0;
	for (; tp_topo_expect_key(count, &words, &doc); count++) assert_true(strlen(doc) > 5);
	assert_true(count >= 15);
}

static void a_domain_over_hosts_is_one_graph(void **state)
{
	(void)state;
	struct tp_topo_policy policy;
	struct tp_topo *topo = model("gb200-nvl72", &policy);
	assert_int_equal(topo->nhosts, 18);
	assert_int_equal(topo->count[TP_TOPO_GPU], 72);
	assert_int_equal(topo->count[TP_TOPO_NVS], 1);
	assert_int_equal(tp_topo_path(topo, topo->of_kind[TP_TOPO_GPU][0], topo->of_kind[TP_TOPO_GPU][71])->type, TP_PATH_NVL);
	assert_int_equal(tp_topo_find_name(topo, "h17/gpu3"), topo->of_kind[TP_TOPO_GPU][71]);
	tp_topo_free(topo);
}

static void an_unknown_model_is_an_error(void **state)
{
	(void)state;
	struct tp_topo_doc *doc = NULL;
	assert_int_equal(tp_topo_model("dgx-9000", &doc), ncclInvalidArgument);
	assert_null(doc);
}

static void devices_that_are_only_placed_become_what_they_are(void **state)
{
	(void)state;
	struct tp_topo_doc *doc = helper_doc("<system version=\"1\">" HELPER_CPU("0") "<pci busid=\"0000:01:00.0\" class=\"0x030200\" vendor=\"0x10de\" device=\"0x2330\"/>"
		"<pci busid=\"0000:02:00.0\" class=\"0x020000\" vendor=\"0x1d0f\" device=\"0xefa1\"/><pci busid=\"0000:03:00.0\" class=\"0x010802\"/>"
		HELPER_GPU("0000:04:00.0", "0", "") "</cpu></system>");
	struct tp_topo *topo;
	char *notes;
	size_t bytes;
	FILE *out = open_memstream(&notes, &bytes);
	assert_int_equal(tp_topo_doc_complete(doc, out), ncclSuccess);
	fclose(out);
	assert_int_equal(tp_topo_build(doc, &topo), ncclSuccess);
	const struct tp_topo_node *gpu = &topo->nodes[helper_node(topo, "0000:01:00.0")];
	assert_int_equal(topo->count[TP_TOPO_GPU], 2);
	assert_int_equal(gpu->gpu.sm, 90);
	assert_int_equal(gpu->gpu.nvlinks, 18);
	assert_int_equal(gpu->gpu.dev, 1);
	assert_int_equal(gpu->gpu.rank, 1);
	assert_float_equal(tp_topo_node_of(topo, TP_TOPO_NET, 0)->net.bw, 12.5, 1e-9);
	assert_non_null(strstr(notes, "assumed: 0000:01:00.0 is H100 SXM5"));
	free(notes);
	tp_topo_free(topo);
	tp_topo_doc_free(doc);
}

#define PART(gpu, nic) "<system version=\"1\">" HELPER_CPU("0") HELPER_GPU("0000:0" gpu ":00.0", gpu, "") HELPER_NIC("0000:12:00.0", nic) "</cpu></system>"

static void what_all_ranks_say_is_one_machine_or_an_error_with_the_ranks(void **state)
{
	(void)state;
	static const char one[] = PART("1", "0"), two[] = PART("2", "0"), other[] = PART("3", "1");
	struct tp_topo_text texts[3] = { { one, sizeof(one) - 1, 1 }, { NULL, 0, 5 }, { two, sizeof(two) - 1, 2 } };
	struct tp_topo_doc *doc = NULL;
	struct tp_topo *topo;
	assert_int_equal(tp_topo_doc_fuse(texts, 3, &doc), ncclSuccess);
	assert_int_equal(tp_topo_build(doc, &topo), ncclSuccess);
	assert_int_equal(topo->count[TP_TOPO_GPU], 2);
	assert_int_equal(topo->count[TP_TOPO_NET], 1);
	tp_topo_free(topo);
	tp_topo_doc_free(doc);
	doc = NULL;
	texts[1] = (struct tp_topo_text){ "<system", 7, 5 };
	assert_int_not_equal(tp_topo_doc_fuse(texts, 3, &doc), ncclSuccess);
	assert_non_null(strstr(tp_log_last_error(), "rank 5"));
	assert_null(doc);
	texts[1] = (struct tp_topo_text){ other, sizeof(other) - 1, 3 };
	assert_int_equal(tp_topo_doc_fuse(texts, 3, &doc), ncclSuccess);
	tp_topo_doc_free(doc);
	assert_int_not_equal(tp_topo_doc_fuse(texts, 0, &doc), ncclSuccess);
}

static void what_is_not_there_at_all_is_not_as_expected(void **state)
{
	(void)state;
	struct tp_topo_policy policy;
	struct tp_topo *topo = helper_topo("<system version=\"1\">" HELPER_CPU("0") HELPER_GPU("0000:01:00.0", "0", "") "</cpu></system>", NULL);
	struct tp_topo_unmet *list = NULL;
	int count = 0;
	tp_topo_policy_default(&policy);
	assert_int_equal(tp_topo_expect_check(topo, &policy, "nic.gbps>=400", "TELPHER_EXPECT", &list, &count), ncclSuccess);
	assert_int_equal(count, 1);
	assert_non_null(strstr(list[0].text, "expected nic.gbps>=400, found nothing there to look at"));
	free(list);
	tp_topo_free(topo);
}

static void a_servers_own_screen_is_no_gpu(void **state)
{
	(void)state;
	struct tp_topo_doc *doc = helper_doc("<system version=\"1\">" HELPER_CPU("0") "<pci busid=\"0000:03:00.0\" class=\"0x030000\" vendor=\"0x1a03\" device=\"0x2000\"/>"
		"<pci busid=\"0000:04:00.0\" class=\"0x030000\" vendor=\"0x10de\" device=\"0x1eb8\"/></cpu></system>");
	struct tp_topo *topo;
	assert_int_equal(tp_topo_doc_complete(doc, NULL), ncclSuccess);
	assert_int_equal(tp_topo_build(doc, &topo), ncclSuccess);
	assert_int_equal(topo->count[TP_TOPO_GPU], 1);
	tp_topo_free(topo);
	tp_topo_doc_free(doc);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(what_is_not_there_at_all_is_not_as_expected), cmocka_unit_test(a_servers_own_screen_is_no_gpu),
		cmocka_unit_test(what_is_so_is_met), cmocka_unit_test(what_is_not_so_is_named_with_its_reason),
		cmocka_unit_test(what_cannot_be_expected_is_an_error_that_says_what_can), cmocka_unit_test(what_a_machine_writes_it_meets),
		cmocka_unit_test(every_key_is_explained), cmocka_unit_test(a_domain_over_hosts_is_one_graph), cmocka_unit_test(an_unknown_model_is_an_error),
		cmocka_unit_test(devices_that_are_only_placed_become_what_they_are),
		cmocka_unit_test(what_all_ranks_say_is_one_machine_or_an_error_with_the_ranks),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

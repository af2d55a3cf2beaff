/* Descriptions as text: what is read, what is written, what is refused and with which words. */
#include "topo/helper_topo.h"
#include "topo/doc.h"

#include <stdlib.h>
#include <string.h>

#include "topo/doc.h"

static char *text_of(const struct tp_topo_doc *doc)
{
	char *text;
	size_t bytes;
	assert_int_equal(tp_topo_doc_text(doc, &text, &bytes), ncclSuccess);
	assert_int_equal(strlen(text), bytes);
	return text;
}

static void what_is_written_reads_back_the_same(void **state)
{
	(void)state;
	struct tp_topo_doc *doc = helper_doc("<system version=\"1\"><cpu numaid=\"0\" affinity=\"1\"><odd a=\"&lt;&amp;&quot;&#10;\"/></cpu></system>");
	char *first = text_of(doc);
	struct tp_topo_doc *again = helper_doc(first);
	char *second = text_of(again);
	assert_string_equal(first, second);
	assert_string_equal(tp_element_get(tp_element_child(tp_element_child(again->root, "cpu"), "odd"), "a"), "<&\"\n");
	free(first);
	free(second);
	tp_topo_doc_free(doc);
	tp_topo_doc_free(again);
}

static void unknown_elements_and_attributes_are_kept(void **state)
{
	(void)state;
	struct tp_topo_doc *doc = helper_doc("<system version=\"1\"><cpu numaid=\"0\" new=\"7\"><future x=\"1\"><deep/></future></cpu></system>");
	char *text = text_of(doc);
	assert_non_null(strstr(text, "new=\"7\""));
	assert_non_null(strstr(text, "<future x=\"1\">"));
	assert_non_null(strstr(text, "<deep/>"));
	free(text);
	tp_topo_doc_free(doc);
}

static void broken_xml_is_refused_with_file_line_and_element(void **state)
{
	(void)state;
	const char *said = helper_refusal("<system version=\"1\">\n<cpu numaid=\"0\">\n</system>");
	assert_non_null(strstr(said, "test.xml:3"));
	assert_non_null(strstr(said, "<cpu>"));
	helper_refusal("");
	helper_refusal("no xml at all");
	helper_refusal("<system version=\"1\">");
}

static void a_document_type_is_refused(void **state)
{
	(void)state;
	const char *said = helper_refusal("<!DOCTYPE system [<!ENTITY a \"aaaa\"><!ENTITY b \"&a;&a;&a;&a;\">]><system version=\"1\"><cpu numaid=\"&b;\"/></system>");
	assert_non_null(strstr(said, "DOCTYPE"));
}

static void another_root_is_refused(void **state)
{
	(void)state;
	assert_non_null(strstr(helper_refusal("<html/>"), "<html> is no description of a machine"));
}

static void nesting_has_a_limit(void **state)
{
	(void)state;
	char *text = calloc(1, 100000);
	strcpy(text, "<system version=\"1\">");
	for (int i = 0; i < 500; i++) strcat(text, "<x>");
	assert_non_null(strstr(helper_refusal(text), "deeper than 64"));
	free(text);
}

static void too_many_elements_are_refused(void **state)
{
	(void)state;
	size_t room = (1 << 17) * 4 + 1000;
	char *text = malloc(room), *at = text;
	at += sprintf(at, "<system version=\"1\">");
	for (int i = 0; i < 1 << 17; i++, at += 4) memcpy(at, "<x/>", 4);
	strcpy(at, "</system>");
	assert_non_null(strstr(helper_refusal(text), "more than"));
	free(text);
}

static void numbers_that_are_none_are_refused_with_what_would_be_right(void **state)
{
	(void)state;
	const char *said = helper_refusal("<system version=\"1\"><cpu numaid=\"0\">\n<pci busid=\"0000:01:00.0\" link_width=\"wide\"/></cpu></system>");
	assert_non_null(strstr(said, "test.xml:2: <pci 0000:01:00.0>: link_width=\"wide\" should be a number from -1 to 255"));
	helper_refusal("<system version=\"1\"><cpu numaid=\"99999999999999999999\"/></system>");
	helper_refusal("<system version=\"1\"><cpu numaid=\"0\" affinity=\"xyz\"/></system>");
	helper_refusal("<system version=\"1\"><cpu numaid=\"0\" affinity=\",1\"/></system>");
	helper_refusal("<system version=\"1\"><cpu numaid=\"0\" host_hash=\"0x12345678901234567890\"/></system>");
	helper_refusal("<system version=\"1\"><cpu numaid=\"0\"><pci busid=\"01:00\"/></cpu></system>");
	helper_refusal("<system version=\"1\"><cpu numaid=\"0\"><pci/></cpu></system>");
	helper_refusal("<system version=\"1\"><cpu numaid=\"0\"><pci busid=\"0000:01:00.0\"><gpu dev=\"0\"><nvlink target=\"x\" count=\"1\"/></gpu></pci></cpu></system>");
	helper_refusal("<system version=\"1\"><cpu numaid=\"0\"><pci busid=\"0000:01:00.0\"><gpu dev=\"0\">"
		"<nvlink target=\"0000:02:00.0\" count=\"-1\"/></gpu></pci></cpu></system>");
}

static void one_identity_twice_is_refused_and_both_lines_are_named(void **state)
{
	(void)state;
	const char *said = helper_refusal("<system version=\"1\">\n<cpu numaid=\"0\">\n<pci busid=\"0000:01:00.0\"/>\n<pci busid=\"0000:01:00.0\"/>\n</cpu></system>");
	assert_non_null(strstr(said, "test.xml:3"));
	assert_non_null(strstr(said, "test.xml:4"));
	helper_refusal("<system version=\"1\"><cpu numaid=\"0\"/><cpu numaid=\"0\"/></system>");
	helper_refusal("<system version=\"1\"><cpu numaid=\"0\"><pci busid=\"0000:01:00.0\"><gpu dev=\"0\" rank=\"3\"/></pci>"
		"<pci busid=\"0000:02:00.0\"><gpu dev=\"1\" rank=\"3\"/></pci></cpu></system>");
	helper_refusal("<system version=\"1\"><cpu numaid=\"0\"><pci busid=\"0000:01:00.0\"><nic><net name=\"a\" dev=\"0\"/><net name=\"a\" dev=\"0\"/></nic></pci></cpu></system>");
	helper_refusal("<system version=\"1\"><cpu numaid=\"0\"><pci busid=\"0000:01:00.0\"><pci busid=\"0000:02:00.0\"><pci busid=\"0000:01:00.0\"><pci busid=\"0000:03:00.0\"/></pci></pci></pci></cpu></system>");
}

static void a_bus_id_may_be_on_two_hosts(void **state)
{
	(void)state;
	struct tp_topo_doc *doc = helper_doc("<system version=\"1\"><cpu host_hash=\"0x1\" numaid=\"0\"><pci busid=\"0000:01:00.0\"/></cpu>"
		"<cpu host_hash=\"0x2\" numaid=\"0\"><pci busid=\"0000:01:00.0\"/></cpu></system>");
	tp_topo_doc_free(doc);
}

#define BRIDGE(inside) "<pci busid=\"0000:01:00.0\" class=\"0x060400\">" inside "</pci>"
#define ENDS(bus, dev) "<pci busid=\"0000:" bus ":00.0\" class=\"0x030200\"><gpu dev=\"" dev "\" rank=\"" dev "\" sm=\"80\"/></pci>"

static void a_bridge_that_is_written_out_for_each_child_is_one(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_topo("<system version=\"1\"><cpu numaid=\"0\">" BRIDGE(ENDS("02", "0")) BRIDGE(ENDS("03", "1")) BRIDGE(ENDS("04", "2")) "</cpu></system>", NULL);
	assert_int_equal(topo->count[TP_TOPO_PCI], 1);
	assert_int_equal(topo->count[TP_TOPO_GPU], 3);
	assert_int_equal(tp_topo_path(topo, helper_node(topo, "gpu0"), helper_node(topo, "gpu2"))->type, TP_PATH_PIX);
	tp_topo_free(topo);
}

static void a_device_with_the_bus_id_of_a_bridge_gets_one_of_its_own(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_topo("<system version=\"1\"><cpu numaid=\"0\">" BRIDGE(ENDS("02", "0")
		"<pci busid=\"0000:01:00.0\" class=\"0x020700\"><nic><net name=\"mlx5_7\" dev=\"3\" speed=\"200000\" port=\"1\"/></nic></pci>") "</cpu></system>", NULL);
	assert_int_equal(topo->count[TP_TOPO_NET], 1);
	assert_string_equal(topo->nodes[helper_node(topo, "0000:01:00.1")].name, "NIC 0000:01:00.1");
	assert_true(helper_node(topo, "0000:01:00.0") >= 0);
	assert_int_equal(tp_topo_wire_path(topo, helper_node(topo, "gpu0"), helper_node(topo, "mlx5_7"))->type, TP_PATH_PIX);
	tp_topo_free(topo);
}

static void ports_of_one_number_are_numbered_anew(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_topo("<system version=\"1\"><cpu numaid=\"0\"><nic><net name=\"enp98s0f0\" dev=\"0\" speed=\"1000\"/></nic>"
		"<pci busid=\"0000:01:00.0\" class=\"0x020700\"><nic><net name=\"mlx5_0\" dev=\"0\" speed=\"200000\"/></nic></pci></cpu></system>", NULL);
	assert_int_equal(topo->count[TP_TOPO_NET], 2);
	assert_int_equal(topo->nodes[helper_node(topo, "enp98s0f0")].net.dev, 0);
	assert_int_equal(topo->nodes[helper_node(topo, "mlx5_0")].net.dev, 1);
	tp_topo_free(topo);
}

static void an_interface_that_is_no_pci_device_may_be_below_each_cpu(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_topo("<system version=\"1\"><cpu numaid=\"0\"><nic><net name=\"eth0\" dev=\"0\" speed=\"10000\"/></nic></cpu>"
		"<cpu numaid=\"1\"><nic><net name=\"eth0\" dev=\"0\" speed=\"10000\"/></nic></cpu></system>", NULL);
	assert_int_equal(topo->count[TP_TOPO_NET], 1);
	tp_topo_free(topo);
}

static void a_speed_in_another_unit_is_bound_by_pcie(void **state)
{
	(void)state;
	struct tp_topo *topo = helper_topo("<system version=\"1\"><cpu numaid=\"0\">" BRIDGE(ENDS("02", "0") "<pci busid=\"0000:05:00.0\" class=\"0x020000\" link_speed=\"16 GT/s\" "
		"link_width=\"16\"><nic><net name=\"cxi0\" dev=\"0\" speed=\"200000000\" port=\"1\"/></nic></pci>") "</cpu></system>", NULL);
	assert_true(tp_topo_wire_path(topo, helper_node(topo, "gpu0"), helper_node(topo, "cxi0"))->bw <= 24);
	tp_topo_free(topo);
}

static void an_element_at_a_wrong_place_is_refused(void **state)
{
	(void)state;
	assert_non_null(strstr(helper_refusal("<system version=\"1\"><gpu dev=\"0\"/></system>"), "its place is in <pci>"));
}

static void cores_are_read_from_the_right(void **state)
{
	(void)state;
	struct tp_topo_doc *doc = helper_doc("<system version=\"1\"><cpu numaid=\"0\" affinity=\"1,00000000,80000001\"/></system>");
	uint64_t mask[TP_CPU_WORDS];
	assert_int_equal(tp_element_mask(doc, doc->root->first, "affinity", mask), ncclSuccess);
	assert_int_equal(mask[0], 0x80000001);
	assert_int_equal(mask[1], 1);
	tp_topo_doc_free(doc);
}

static void bus_ids_are_numbers_and_back(void **state)
{
	(void)state;
	int64_t bus;
	char text[20];
	assert_true(tp_bus_id_parse("0000:1B:00.0", &bus));
	assert_int_equal(bus, 0x1b000);
	tp_bus_id_text(bus, text);
	assert_string_equal(text, "0000:1b:00.0");
	assert_true(tp_bus_id_parse("00010001:a2:1f.7", &bus));
	tp_bus_id_text(bus, text);
	assert_string_equal(text, "10001:a2:1f.7");
	assert_false(tp_bus_id_parse("1b:00.0", &bus));
	assert_false(tp_bus_id_parse("0000:1b:0g.0", &bus));
	assert_false(tp_bus_id_parse("0000:1b:00.0.0", &bus));
	assert_false(tp_bus_id_parse("", &bus));
	assert_false(tp_bus_id_parse("0000000000000000:1b:00.0", &bus));
}

static void a_missing_file_is_named(void **state)
{
	(void)state;
	struct tp_topo_doc *doc = NULL;
	assert_int_not_equal(tp_topo_doc_read("/nonexistent/machine.xml", &doc), ncclSuccess);
	assert_non_null(strstr(tp_log_last_error(), "/nonexistent/machine.xml can't be opened: No such file"));
}

static void bytes_that_xml_cannot_hold_are_written_as_question_marks(void **state)
{
	(void)state;
	struct tp_topo_doc *doc, *again;
	char *text;
	size_t bytes;
	assert_int_equal(tp_doc_create("this machine", "system", &doc), ncclSuccess);
	assert_int_equal(tp_doc_set(doc, doc->root, "version", "1"), ncclSuccess);
	assert_int_equal(tp_doc_set(doc, doc->root, "virtual", "Acm\xe9 \x01\xc3\xa9 \xf0\x9f\x98\x80 \xed\xa0\x80 \xc0\xaf<\xe2\x82"), ncclSuccess);
	assert_int_equal(tp_topo_doc_text(doc, &text, &bytes), ncclSuccess);
	assert_int_equal(tp_topo_doc_parse(text, bytes, "again", &again), ncclSuccess);
	assert_string_equal(tp_element_get(again->root, "virtual"), "Acm? ?\xc3\xa9 \xf0\x9f\x98\x80 ?\?\? ?\?<?\?");
	free(text);
	tp_topo_doc_free(doc);
	tp_topo_doc_free(again);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(bytes_that_xml_cannot_hold_are_written_as_question_marks),
		cmocka_unit_test(what_is_written_reads_back_the_same), cmocka_unit_test(unknown_elements_and_attributes_are_kept),
		cmocka_unit_test(broken_xml_is_refused_with_file_line_and_element), cmocka_unit_test(a_document_type_is_refused),
		cmocka_unit_test(another_root_is_refused), cmocka_unit_test(nesting_has_a_limit), cmocka_unit_test(too_many_elements_are_refused),
		cmocka_unit_test(numbers_that_are_none_are_refused_with_what_would_be_right),
		cmocka_unit_test(one_identity_twice_is_refused_and_both_lines_are_named), cmocka_unit_test(a_bus_id_may_be_on_two_hosts),
		cmocka_unit_test(a_bridge_that_is_written_out_for_each_child_is_one), cmocka_unit_test(a_device_with_the_bus_id_of_a_bridge_gets_one_of_its_own),
		cmocka_unit_test(ports_of_one_number_are_numbered_anew), cmocka_unit_test(an_interface_that_is_no_pci_device_may_be_below_each_cpu),
		cmocka_unit_test(a_speed_in_another_unit_is_bound_by_pcie),
		cmocka_unit_test(an_element_at_a_wrong_place_is_refused), cmocka_unit_test(cores_are_read_from_the_right),
		cmocka_unit_test(bus_ids_are_numbers_and_back), cmocka_unit_test(a_missing_file_is_named),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

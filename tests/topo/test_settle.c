/* What was found and what a file says, made one: a file is right about the machine and knows nothing of the job. And what many ranks say,
 * made one without an error. */
#include "topo/helper_topo.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define HOST(hash, numa) "<cpu host_hash=\"" hash "\" numaid=\"" numa "\" arch=\"x86_64\" vendor=\"GenuineIntel\" familyid=\"6\" modelid=\"143\" affinity=\"ff\">"
#define RANKED(bus, dev, rank) "<pci busid=\"" bus "\" class=\"0x030200\" " HELPER_X16 "><gpu dev=\"" dev "\" sm=\"90\" rank=\"" rank "\" gdr=\"1\"/></pci>"
#define PORT(bus, name, dev, gdr) "<pci busid=\"" bus "\" class=\"0x020700\" " HELPER_X16 "><nic><net name=\"" name "\" dev=\"" dev \
	"\" speed=\"400000\" port=\"1\" gdr=\"" gdr "\"/></nic></pci>"
#define SYSTEM(inside) "<system version=\"1\">" inside "</system>"

/* What becomes of a find with such a file. */
static struct tp_topo_doc *settle(const char *file, const char *found)
{
	char path[] = "/tmp/telpher_topo_XXXXXX";
	int fd = mkstemp(path);
	assert_true(fd >= 0 && write(fd, file, strlen(file)) == (ssize_t)strlen(file));
	close(fd);
	struct tp_topo_doc *doc = helper_doc(found);
	setenv("NCCL_TOPO_FILE", path, 1);
	tp_param_reload();
	ncclResult_t result = tp_topo_doc_settle("", &doc);
	unsetenv("NCCL_TOPO_FILE");
	tp_param_reload();
	unlink(path);
	assert_int_equal(result, ncclSuccess);
	return doc;
}

static struct tp_topo *settled(const char *file, const char *found)
{
	struct tp_topo_doc *doc = settle(file, found);
	struct tp_topo *topo;
	assert_int_equal(tp_topo_build(doc, &topo), ncclSuccess);
	tp_topo_doc_free(doc);
	return topo;
}

static char *text_of(struct tp_topo_doc *doc)
{
	char *text;
	size_t bytes;
	assert_int_equal(tp_topo_doc_text(doc, &text, &bytes), ncclSuccess);
	tp_topo_doc_free(doc);
	return text;
}

static void the_ranks_of_a_file_are_not_those_of_the_job(void **state)
{
	(void)state;
	struct tp_topo *topo = settled(SYSTEM(HOST("0x1", "0") RANKED("0000:11:00.0", "0", "1") RANKED("0000:12:00.0", "1", "0") RANKED("0000:13:00.0", "2", "2") "</cpu>"),
		SYSTEM(HOST("0x1", "0") RANKED("0000:11:00.0", "0", "0") RANKED("0000:12:00.0", "1", "2") "</cpu>"));
	assert_int_equal(topo->count[TP_TOPO_GPU], 2);
	assert_string_equal(topo->nodes[helper_node(topo, "rank 0")].pci.bus_id, "0000:11:00.0");
	assert_string_equal(topo->nodes[helper_node(topo, "rank 2")].pci.bus_id, "0000:12:00.0");
	assert_int_equal(tp_topo_find_rank(topo, 1), -1);
	tp_topo_free(topo);
}

static void the_numbers_of_ports_and_gpudirect_are_those_that_were_found(void **state)
{
	(void)state;
	struct tp_topo *topo = settled(SYSTEM(HOST("0x1", "0") PORT("0000:12:00.0", "mlx5_0", "0", "1") PORT("0000:22:00.0", "mlx5_1", "1", "1") "</cpu>"),
		SYSTEM(HOST("0x1", "0") PORT("0000:22:00.0", "mlx5_1", "0", "0") "</cpu>"));
	assert_int_equal(topo->count[TP_TOPO_NET], 1);
	const struct tp_topo_node *net = &topo->nodes[helper_node(topo, "mlx5_1")];
	assert_int_equal(net->net.dev, 0);
	assert_false(net->net.gdr);
	tp_topo_free(topo);
}

#define SOFT(name, dev) "<nic><net name=\"" name "\" dev=\"" dev "\" port=\"1\" gdr=\"0\"/></nic>"

static void a_port_without_a_pci_device_is_where_the_file_places_it(void **state)
{
	(void)state;
	struct tp_topo *topo = settled(SYSTEM(HOST("0x1", "0") "</cpu>" HOST("0x1", "1") "<nic><net name=\"soft1\" port=\"1\"/></nic></cpu>"),
		SYSTEM(HOST("0x1", "0") SOFT("soft0", "0") SOFT("soft1", "1") "</cpu>"));
	assert_int_equal(topo->count[TP_TOPO_NET], 2);
	assert_int_equal(topo->nodes[topo->nodes[helper_node(topo, "soft0")].near_cpu].cpu.numa, 0);
	assert_int_equal(topo->nodes[topo->nodes[helper_node(topo, "soft1")].near_cpu].cpu.numa, 1);
	assert_int_equal(topo->nodes[helper_node(topo, "soft1")].net.dev, 1);
	tp_topo_free(topo);
}

static void a_file_of_one_host_is_of_this_one_after_a_reboot(void **state)
{
	(void)state;
	struct tp_topo *topo = settled(SYSTEM(HOST("0xdead", "0") HELPER_BRIDGE("0000:10:00.0", "") RANKED("0000:11:00.0", "0", "0") "</pci></cpu>" HOST("0xdead", "1") "</cpu>"),
		SYSTEM(HOST("0x1", "0") RANKED("0000:11:00.0", "0", "0") "</cpu>" HOST("0x1", "1") "</cpu>"));
	assert_int_equal(topo->nhosts, 1);
	assert_int_equal(topo->host_hash[0], 1);
	assert_int_equal(topo->count[TP_TOPO_CPU], 2);
	assert_int_equal(topo->nodes[topo->nodes[helper_node(topo, "gpu0")].parent].kind, TP_TOPO_PCI);
	tp_topo_free(topo);
}

static void a_file_of_several_hosts_without_this_one_is_told_and_leaves_what_was_found(void **state)
{
	(void)state;
	struct tp_topo *topo = settled(SYSTEM(HOST("0x5", "0") RANKED("0000:11:00.0", "0", "0") "</cpu>" HOST("0x6", "0") RANKED("0000:11:00.0", "0", "1") "</cpu>"),
		SYSTEM(HOST("0x1", "0") RANKED("0000:21:00.0", "0", "0") "</cpu>"));
	assert_non_null(strstr(tp_log_last_error(), "none of them is this one"));
	assert_int_equal(topo->nhosts, 1);
	assert_int_equal(topo->host_hash[0], 1);
	assert_int_equal(topo->count[TP_TOPO_GPU], 1);
	tp_topo_free(topo);
}

static void of_a_file_of_several_hosts_only_this_one_is_kept(void **state)
{
	(void)state;
	struct tp_topo *topo = settled(SYSTEM(HOST("0x5", "0") RANKED("0000:11:00.0", "0", "0") "</cpu>" HOST("0x1", "0") HELPER_BRIDGE("0000:10:00.0", "")
		RANKED("0000:11:00.0", "0", "1") "</pci></cpu>"), SYSTEM(HOST("0x1", "0") RANKED("0000:11:00.0", "0", "0") "</cpu>"));
	assert_int_equal(topo->nhosts, 1);
	assert_int_equal(topo->count[TP_TOPO_CPU], 1);
	assert_int_equal(topo->nodes[topo->nodes[helper_node(topo, "rank 0")].parent].kind, TP_TOPO_PCI);
	tp_topo_free(topo);
}

static void marks_and_host_ranks_of_an_earlier_run_are_gone(void **state)
{
	(void)state;
	char *text = text_of(settle(SYSTEM(HOST("0x1", "0") "<hostrank rank=\"0\" affinity=\"1\"/><hostrank rank=\"7\" affinity=\"2\"/>"
		"<pci busid=\"0000:11:00.0\" class=\"0x030200\"><gpu dev=\"0\" sm=\"90\" keep=\"1\"/></pci></cpu>"),
		SYSTEM(HOST("0x1", "0") "<hostrank rank=\"0\" affinity=\"8\"/></cpu>")));
	assert_null(strstr(text, "keep"));
	assert_null(strstr(text, "gpu"));
	assert_null(strstr(text, "rank=\"7\""));
	assert_non_null(strstr(text, "<hostrank rank=\"0\" affinity=\"8\"/>"));
	free(text);
}

/* ---- Ranks that contradict each other, and run on */

static struct tp_topo_doc *join(const char *first, const char *second, char **notes)
{
	struct tp_topo_text texts[2] = { { first, strlen(first), 3 }, { second, strlen(second), 4 } };
	struct tp_topo_doc *doc = NULL;
	size_t bytes;
	FILE *out = open_memstream(notes, &bytes);
	assert_int_equal(tp_topo_doc_join(texts, 2, out, &doc), ncclSuccess);
	fclose(out);
	return doc;
}

static void ranks_with_different_nics_are_a_note_and_the_ports_have_different_numbers(void **state)
{
	(void)state;
	struct tp_topo *topo;
	char *notes;
	struct tp_topo_doc *doc = join(SYSTEM(HOST("0x1", "0") PORT("0000:12:00.0", "mlx5_0", "0", "1") "</cpu>"),
		SYSTEM(HOST("0x1", "0") PORT("0000:22:00.0", "mlx5_1", "0", "1") "</cpu>"), &notes);
	assert_non_null(strstr(notes, "mlx5_1"));
	assert_non_null(strstr(notes, "other NICs"));
	assert_int_equal(tp_topo_build(doc, &topo), ncclSuccess);
	assert_int_equal(topo->nodes[helper_node(topo, "mlx5_0")].net.dev, 0);
	assert_int_equal(topo->nodes[helper_node(topo, "mlx5_1")].net.dev, 1);
	free(notes);
	tp_topo_free(topo);
	tp_topo_doc_free(doc);
}

static void what_ranks_contradict_each_other_in_is_a_note_and_the_first_is_right(void **state)
{
	(void)state;
	static const char narrow[] = SYSTEM(HOST("0x1", "0") HELPER_BRIDGE("0000:10:00.0", "") "<pci busid=\"0000:12:00.0\" class=\"0x020700\"><nic>"
		"<net name=\"mlx5_0\" dev=\"0\" speed=\"100000\" port=\"1\" gdr=\"1\"/></nic></pci></pci></cpu>");
	struct tp_topo *topo;
	char *notes;
	struct tp_topo_doc *doc = join(SYSTEM(HOST("0x1", "0") PORT("0000:12:00.0", "mlx5_0", "0", "1") "</cpu>"), narrow, &notes);
	assert_non_null(strstr(notes, "speed of rank 3"));
	assert_non_null(strstr(notes, "for rank 4 it is 100000"));
	assert_non_null(strstr(notes, "rank 4 found rank 3"));
	assert_int_equal(tp_topo_build(doc, &topo), ncclSuccess);
	assert_int_equal(topo->count[TP_TOPO_NET], 1);
	assert_float_equal(topo->nodes[helper_node(topo, "mlx5_0")].net.bw, 50, 1e-9);
	free(notes);
	tp_topo_free(topo);
	tp_topo_doc_free(doc);
}

static void ranks_that_agree_are_no_note(void **state)
{
	(void)state;
	char *notes;
	tp_topo_doc_free(join(HELPER_PAIR, HELPER_PAIR, &notes));
	assert_string_equal(notes, "");
	free(notes);
}

/* ---- Limits */

static void more_than_any_machine_has_is_refused_soon(void **state)
{
	(void)state;
	char *text;
	size_t bytes;
	FILE *out = open_memstream(&text, &bytes);
	fprintf(out, "<system version=\"1\"><cpu numaid=\"0\">");
	for (int i = 0; i < 8000; i++) fprintf(out, "<core affinity=\"1\"/>");
	for (int i = 0; i < 60000; i++) fprintf(out, "<hostrank rank=\"%d\" affinity=\"1\"/>", i);
	fprintf(out, "</cpu></system>");
	fclose(out);
	struct tp_topo_doc *doc = helper_doc(text);
	struct tp_topo *topo = NULL;
	assert_int_not_equal(tp_topo_build(doc, &topo), ncclSuccess);
	assert_non_null(strstr(tp_log_last_error(), "host ranks"));
	tp_topo_doc_free(doc);
	free(text);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(the_ranks_of_a_file_are_not_those_of_the_job), cmocka_unit_test(the_numbers_of_ports_and_gpudirect_are_those_that_were_found),
		cmocka_unit_test(a_port_without_a_pci_device_is_where_the_file_places_it),
		cmocka_unit_test(a_file_of_one_host_is_of_this_one_after_a_reboot),
		cmocka_unit_test(a_file_of_several_hosts_without_this_one_is_told_and_leaves_what_was_found),
		cmocka_unit_test(of_a_file_of_several_hosts_only_this_one_is_kept), cmocka_unit_test(marks_and_host_ranks_of_an_earlier_run_are_gone),
		cmocka_unit_test(ranks_with_different_nics_are_a_note_and_the_ports_have_different_numbers),
		cmocka_unit_test(what_ranks_contradict_each_other_in_is_a_note_and_the_first_is_right), cmocka_unit_test(ranks_that_agree_are_no_note),
		cmocka_unit_test(more_than_any_machine_has_is_refused_soon),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

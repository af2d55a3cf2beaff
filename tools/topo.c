/* `telpher topo`: the machine, a file, or a well-known system, as a tree, a matrix, a picture; why a path is as it is; what differs
 * between two. */
#include "topo.h"

#include <errno.h>
#include <popt.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LARGEST_LIST 65536

struct request { int one_host, json, quiet, cores; char *output; };

static bool is_model(const char *name)
{
	const char *model;
	for (int i = 0; (model = tp_topo_model_name(i, NULL)); i++)
		if (strcmp(model, name) == 0) return true;
	return false;
}

static ncclResult_t find_machine(bool cores, struct tp_topo_doc **out)
{
	struct tp_topo_find find = { .root = "", .all_gpus = true, .rank = -1, .cores = cores };
	struct tp_topo_doc *doc;
	TP_TRY(tp_topo_discover(&find, &doc));
	/* What is searched for here is the machine itself: nothing of it is without a rank. */
	ncclResult_t result = tp_topo_doc_complete(doc, NULL);
	if (result == ncclSuccess) result = tp_topo_doc_settle("", &doc);
	if (result == ncclSuccess) result = tp_topo_doc_dump(doc, 0);
	if (result != ncclSuccess) tp_topo_doc_free(doc);
	else *out = doc;
	return result;
}

void topo_close(struct topo_machine *machine)
{
	tp_topo_free(machine->topo);
	tp_topo_doc_free(machine->doc);
	memset(machine, 0, sizeof(*machine));
}

bool topo_is_known(const char *name) { return access(name, F_OK) == 0 || is_model(name); }

ncclResult_t topo_load(const char *name, bool cores, FILE *notes, struct tp_topo_doc **out)
{
	struct tp_topo_doc *doc;
	if (!name) return find_machine(cores, out);
	if (access(name, F_OK) != 0 && is_model(name)) return tp_topo_model(name, out);
	TP_TRY(tp_topo_doc_read(name, &doc));
	ncclResult_t result = tp_topo_doc_complete(doc, notes);
	if (result != ncclSuccess) tp_topo_doc_free(doc);
	else *out = doc;
	return result;
}

static int open_machine(const char *name, const struct request *q, struct topo_machine *out)
{
	struct topo_machine m = { .name = name ? name : "this machine" };
	ncclResult_t result = topo_load(name, q->cores, q->quiet ? NULL : stderr, &m.doc);
	if (result == ncclSuccess) result = tp_topo_build(m.doc, &m.topo);
	if (result == ncclSuccess) result = tp_topo_policy_load(&m.policy);
	m.policy.multi_host = !q->one_host;
	if (result == ncclSuccess) result = tp_topo_compute_paths(m.topo, &m.policy);
	if (result != ncclSuccess) {
		fprintf(stderr, "telpher topo: %s\n", tp_log_last_error());
		topo_close(&m);
		return 1;
	}
	*out = m;
	return 0;
}

int topo_open(const char *name, bool quiet, struct topo_machine *out)
{
	return open_machine(name, &(struct request){ .quiet = quiet }, out);
}

void topo_link_text(const struct tp_topo *topo, const struct tp_topo_link *link, char *text, size_t bytes)
{
	const struct tp_topo_node *from = &topo->nodes[link->from], *to = &topo->nodes[link->to];
	/* The lower end's link is the one that is described. */
	const struct tp_topo_pci *pci = from->parent == link->to ? &from->pci : &to->pci;
	bool amd = from->kind == TP_TOPO_GPU ? from->gpu.maker == TP_MAKER_AMD : to->kind == TP_TOPO_GPU && to->gpu.maker == TP_MAKER_AMD;
	static const struct { float speed; const char *name; } generations[] = {
		{ 2.5f, "1.0" }, { 5, "2.0" }, { 8, "3.0" }, { 16, "4.0" }, { 32, "5.0" }, { 64, "6.0" },
	};
	switch (link->kind) {
	case TP_WIRE_NVL: snprintf(text, bytes, "%s x%d", amd ? "xGMI" : "NVLink", link->count); return;
	case TP_WIRE_C2C: snprintf(text, bytes, "%s", amd ? "package" : "C2C"); return;
	case TP_WIRE_SYS: snprintf(text, bytes, "CPU to CPU"); return;
	case TP_WIRE_NET: snprintf(text, bytes, "port"); return;
	case TP_WIRE_LOCAL: snprintf(text, bytes, "inside"); return;
	default: break;
	}
	for (size_t i = 0; i < TP_ARRAY_LEN(generations); i++)
		if (pci->speed == generations[i].speed && pci->width) {
			snprintf(text, bytes, "PCIe %s x%d", generations[i].name, pci->width);
			return;
		}
	if (pci->width) snprintf(text, bytes, "PCIe x%d", pci->width);
	else snprintf(text, bytes, "PCIe");
}

const char *topo_fabric_name(enum tp_net_kind kind)
{
	static const char *const names[] = { "", "InfiniBand", "RoCE", "Ethernet", "EFA" };
	return names[kind];
}

static int list_models(FILE *out)
{
	const char *name, *doc;
	for (int i = 0; (name = tp_topo_model_name(i, &doc)); i++) fprintf(out, "%-13s %s\n", name, doc);
	return 0;
}

static int write_model(const char *name, FILE *out)
{
	struct tp_topo_doc *doc;
	char *text;
	size_t bytes;
	if (!is_model(name)) return tool_usage_error("topo", "there is no model '%s'; `telpher topo model` lists them", name);
	if (tp_topo_model(name, &doc) != ncclSuccess) return 1;
	ncclResult_t result = tp_topo_doc_text(doc, &text, &bytes);
	if (result == ncclSuccess) {
		fwrite(text, 1, bytes, out);
		free(text);
	}
	tp_topo_doc_free(doc);
	return result == ncclSuccess ? 0 : 1;
}

/* The description itself, as it would be given to NCCL_TOPO_FILE. */
static int write_xml(const struct topo_machine *m, FILE *out)
{
	char *text;
	size_t bytes;
	if (tp_topo_doc_text(m->doc, &text, &bytes) != ncclSuccess) return 1;
	fwrite(text, 1, bytes, out);
	free(text);
	return 0;
}

static int of_one(const char *what, const char *name, const struct request *q, FILE *out)
{
	struct topo_machine m;
	int status = open_machine(name, q, &m);
	if (status) return status;
	if (strcmp(what, "xml") == 0) status = write_xml(&m, out);
	else if (strcmp(what, "matrix") == 0) status = topo_matrix(&m, out);
	else if (strcmp(what, "export") == 0) status = topo_export(&m, out);
	else if (strcmp(what, "expect") == 0) status = tp_topo_expect_write(m.topo, &m.policy, out) == ncclSuccess ? 0 : 1;
	else if (strcmp(what, "channels") == 0) status = topo_channels(&m, out);
	else if (strcmp(what, "svg") == 0 || strcmp(what, "html") == 0) status = topo_draw(&m, strcmp(what, "html") == 0, out);
	else status = q->json ? topo_json(&m, out) : topo_show(&m, out);
	topo_close(&m);
	return status;
}

static int of_pair(const char *from, const char *to, const char *name, const struct request *q, FILE *out)
{
	struct topo_machine m;
	int status = open_machine(name, q, &m);
	if (status) return status;
	status = topo_explain(&m, from, to, out);
	topo_close(&m);
	return status;
}

static int of_two(const char *first, const char *second, const struct request *q, FILE *out)
{
	struct topo_machine a, b;
	int status = open_machine(first, q, &a);
	if (status) return status;
	status = open_machine(second, q, &b);
	if (!status) {
		status = topo_diff(&a, &b, out);
		topo_close(&b);
	}
	topo_close(&a);
	return status;
}

/* The list itself, or the file of that name. */
static char *read_expectations(const char *given)
{
	FILE *in = strpbrk(given, "=<>") ? NULL : fopen(given, "re");
	if (!in) return strdup(given);
	char *text = calloc(1, LARGEST_LIST + 1);
	if (text) text[fread(text, 1, LARGEST_LIST, in)] = 0;
	fclose(in);
	return text;
}

static int check(const char *given, const char *name, const struct request *q, FILE *out)
{
	struct topo_machine m;
	struct tp_topo_unmet *unmet = NULL;
	int count = 0, status = open_machine(name, q, &m);
	if (status) return status;
	char *text = read_expectations(given);
	if (!text || tp_topo_expect_check(m.topo, &m.policy, text, given, &unmet, &count) != ncclSuccess)
		status = tool_usage_error("topo", "%s", text ? tp_log_last_error() : "out of memory");
	for (int i = 0; i < count; i++) fprintf(out, "%s\n", unmet[i].text);
	if (!status && !count) fprintf(out, "As expected.\n");
	free(unmet);
	free(text);
	topo_close(&m);
	return status ? status : count ? 1 : 0;
}

static int dispatch(const char *what, const char **args, int count, const struct request *q, FILE *out)
{
	static const char *const ones[] = { "show", "matrix", "channels", "expect", "export", "svg", "html", "xml" };
	for (size_t i = 0; i < TP_ARRAY_LEN(ones); i++)
		if (strcmp(what, ones[i]) == 0)
			return count > 1 ? tool_usage_error("topo", "%s takes one file or model", what) : of_one(what, count ? args[0] : NULL, q, out);
	if (strcmp(what, "explain") == 0)
		return count < 2 || count > 3 ? tool_usage_error("topo", "explain takes two places, as in \"explain gpu0 mlx5_1\", and a file or model") :
			of_pair(args[0], args[1], count == 3 ? args[2] : NULL, q, out);
	if (strcmp(what, "check") == 0)
		return count < 1 || count > 2 ? tool_usage_error("topo", "check takes what is expected, as in \"gdr=on nics>=8\" or a file, and a file or model") :
			check(args[0], count == 2 ? args[1] : NULL, q, out);
	if (strcmp(what, "diff") == 0)
		return count < 1 || count > 2 ? tool_usage_error("topo", "diff takes the healthy machine's file and the other's (this machine, where there is none)") :
			of_two(args[0], count == 2 ? args[1] : NULL, q, out);
	if (strcmp(what, "record") == 0)
		return count < 3 ? tool_usage_error("topo", "record takes a file, two places and what was measured, as in \"map.xml gpu0 gpu1 alpha=2.1 bw=370\"") :
			topo_record(args[0], args[1], args[2], args + 3, count - 3);
	if (strcmp(what, "model") == 0)
		return count > 1 ? tool_usage_error("topo", "model takes one name") : count ? write_model(args[0], out) : list_models(out);
	return tool_usage_error("topo", "there is no \"%s\"; there are show, matrix, channels, explain, diff, expect, check, model, record, export, svg, html and xml", what);
}

#define MAX_ARGUMENTS 8

int tool_topo(int argc, char **argv)
{
	struct request q = { 0 };
	struct poptOption options[] = {
		{ "output", 'o', POPT_ARG_STRING, &q.output, 0, "write to this file", "FILE" },
		{ "json", 0, POPT_ARG_NONE, &q.json, 0, "show: nodes, links, paths and decisions as JSON", NULL },
		{ "one-host", 0, POPT_ARG_NONE, &q.one_host, 0, "all ranks are on this machine: the network is no way out", NULL },
		{ "cores", 0, POPT_ARG_NONE, &q.cores, 0, "of this machine: caches and cores too", NULL },
		{ "quiet", 'q', POPT_ARG_NONE, &q.quiet, 0, "don't say what was assumed of devices that a file only names", NULL },
		POPT_AUTOHELP
		POPT_TABLEEND
	};
	poptContext context = poptGetContext("telpher topo", argc, (const char **)argv, options, 0);
	if (!context) return 1;
	poptSetOtherOptionHelp(context, "show|matrix|channels|expect|export|svg|html|xml [FILE|MODEL]\n"
		"       telpher topo explain A B [FILE|MODEL]\n       telpher topo diff HEALTHY [OTHER]\n"
		"       telpher topo check EXPECTED [FILE|MODEL]\n       telpher topo model [NAME]\n       telpher topo record FILE A B NAME=VALUE...\n\nWithout FILE or MODEL: this machine.");
	const char *args[MAX_ARGUMENTS], *what, *arg;
	int status, count = 0, code = tool_next_option(context, options);
	what = poptGetArg(context);
	while (count < MAX_ARGUMENTS && (arg = poptGetArg(context))) args[count++] = arg;
	FILE *out = stdout;
	if (code < -1) status = tool_usage_error("topo", "%s: %s", poptBadOption(context, 0), poptStrerror(code));
	else if (!what) status = tool_usage_error("topo", "say what: show, matrix, channels, explain, diff, expect, check, model, record, export, svg, html or xml");
	else if (q.output && !(out = fopen(q.output, "we"))) status = tool_usage_error("topo", "%s can't be written: %s", q.output, strerror(errno));
	else status = dispatch(what, args, count, &q, out);
	errno = 0;
	bool lost = out && (fflush(out) || ferror(out));
	if (out && out != stdout && fclose(out)) lost = true;
	if (lost) {
		fprintf(stderr, "telpher topo: %s can't be written: %s\n", q.output ? q.output : "the output", errno ? strerror(errno) : "some of it was refused; is the disk full?");
		status = 1;
	}
	free(q.output);
	poptFreeContext(context);
	return status;
}

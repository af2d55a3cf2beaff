/* `telpher topo record` and `export`: what was measured onto the map, and its medians out of it for the cost model. */
#include "topo.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static bool read_number(const char *text, const char *name, double *out)
{
	size_t bytes = strlen(name);
	char *end;
	if (strncmp(text, name, bytes) != 0) return false;
	*out = strtod(text + bytes, &end);
	return end != text + bytes && !*end && *out > 0 && *out < 1e9;
}

/* What the wires are at present: once they are others, the value is of no use. */
static ncclResult_t fill(const char *path, struct tp_topo *topo, int32_t from, int32_t to, struct tp_topo_measured *m)
{
	struct tp_topo_policy policy;
	tp_topo_policy_default(&policy);
	TP_TRY(tp_topo_compute_paths(topo, &policy));
	const struct tp_topo_path *wires = tp_topo_wire_path(topo, from, to);
	snprintf(m->from, sizeof(m->from), "%s", topo->nodes[from].name);
	snprintf(m->to, sizeof(m->to), "%s", topo->nodes[to].name);
	if (topo->nodes[from].kind == TP_TOPO_GPU) snprintf(m->from_bus, sizeof(m->from_bus), "%s", topo->nodes[from].pci.bus_id);
	if (topo->nodes[to].kind == TP_TOPO_GPU) snprintf(m->to_bus, sizeof(m->to_bus), "%s", topo->nodes[to].pci.bus_id);
	if (wires->type == TP_PATH_DIS)
		return TP_FAIL(ncclInvalidUsage, "nothing in %s joins %s and %s, so no value between them could ever hold. (What a network takes is recorded from a GPU to the port "
			"that it uses.)", path, m->from, m->to);
	if (wires->type == TP_PATH_LOC) return ncclSuccess;
	snprintf(m->path, sizeof(m->path), "%s", tp_topo_path_name(wires->type));
	m->planned_gbps = wires->bw;
	return ncclSuccess;
}

int topo_record(const char *path, const char *from, const char *to, const char *const *values, int nvalues)
{
	struct tp_topo_measured m = { .alpha_us = 0 };
	struct tp_topo_doc *doc;
	struct tp_topo *topo;
	for (int i = 0; i < nvalues; i++)
		if (!read_number(values[i], "alpha=", &m.alpha_us) && !read_number(values[i], "bw=", &m.gbps))
			return tool_usage_error("topo", "\"%s\" should be alpha=MICROSECONDS or bw=GB/s, as in alpha=2.1 bw=46", values[i]);
	if (!nvalues) return tool_usage_error("topo", "record what? alpha=MICROSECONDS, bw=GB/s, or both");
	if (tp_topo_doc_read(path, &doc) != ncclSuccess || tp_topo_build(doc, &topo) != ncclSuccess) {
		fprintf(stderr, "telpher topo: %s\n", tp_log_last_error());
		return 1;
	}
	int32_t a = tp_topo_find_name(topo, from), b = tp_topo_find_name(topo, to);
	int status = 0;
	if (a < 0 || b < 0) {
		char why[320];
		tp_topo_refuse_name(topo, path, a < 0 ? from : to, why, sizeof(why));
		status = tool_usage_error("topo", "%s", why);
	} else if (fill(path, topo, a, b, &m) != ncclSuccess) {
		fprintf(stderr, "telpher topo: %s\n", tp_log_last_error());
		status = 1;
	} else {
		/* Written beside and put in its place whole: a file that is lost is a map that is lost. */
		char beside[4096];
		snprintf(beside, sizeof(beside), "%.4000s.new", path);
		bool written = tp_topo_doc_record(doc, &m) == ncclSuccess && tp_topo_doc_write(doc, beside) == ncclSuccess;
		if (!written || rename(beside, path)) {
			fprintf(stderr, "telpher topo: %s can't be written: %s\n", path, written ? strerror(errno) : tp_log_last_error());
			unlink(beside);
			status = 1;
		}
	}
	tp_topo_free(topo);
	tp_topo_doc_free(doc);
	return status;
}

struct samples { double *alpha, *bw; int nalpha, nbw; };

static bool is_inside(const struct tp_topo *topo, int32_t a, int32_t b)
{
	const struct tp_topo_node *x = &topo->nodes[a], *y = &topo->nodes[b];
	if (x->kind == TP_TOPO_NET || y->kind == TP_TOPO_NET) return false;
	return x->host == y->host || tp_topo_wire_path(topo, a, b)->type == TP_PATH_NVL;
}

static void print_samples(const char *where, struct samples *s, FILE *out)
{
	if (s->nalpha) fprintf(out, "%s.latency_us        %.6g\n", where, tp_median(s->alpha, s->nalpha));
	/* GB/s are thousands of bytes a microsecond. */
	if (s->nbw) fprintf(out, "%s.us_per_byte       %.6g\n", where, 1 / (1000 * tp_median(s->bw, s->nbw)));
}

int topo_export(const struct topo_machine *machine, FILE *out)
{
	struct samples inside = { 0 }, across = { 0 };
	struct tp_topo_values values;
	if (tp_topo_values_of(machine->doc, machine->topo, stderr, &values) != ncclSuccess) return 1;
	double *room = calloc((size_t)values.count * 4 + 1, sizeof(*room));
	if (!room) {
		free(values.list);
		return 1;
	}
	inside.alpha = room;
	inside.bw = room + values.count;
	across.alpha = room + 2 * values.count;
	across.bw = room + 3 * values.count;
	for (int i = 0; i < values.count; i++) {
		const struct tp_topo_value *v = &values.list[i];
		struct samples *s = is_inside(machine->topo, v->from, v->to) ? &inside : &across;
		if (v->alpha_us > 0) s->alpha[s->nalpha++] = v->alpha_us;
		if (v->gbps > 0) s->bw[s->nbw++] = v->gbps;
	}
	if (!values.count) fprintf(stderr, "telpher topo: nothing that holds has been measured in %s (telpher topo record)\n", machine->name);
	print_samples("inside", &inside, out);
	print_samples("across", &across, out);
	free(room);
	free(values.list);
	return values.count ? 0 : 1;
}

static bool is_of(const char *line, const char *from, const char *to)
{
	char begin[2 * TP_TOPO_NAME_BYTES + 24];
	snprintf(begin, sizeof(begin), "measured from %s to %s:", from, to);
	return strncmp(line, begin, strlen(begin)) == 0;
}

/* What was measured between two places, for `explain`. */
void topo_print_measured(const struct topo_machine *machine, int32_t a, int32_t b, FILE *out)
{
	struct tp_topo_values values;
	char *notes = NULL, *line, *rest;
	size_t bytes = 0;
	FILE *told = open_memstream(&notes, &bytes);
	if (!told) return;
	ncclResult_t result = tp_topo_values_of(machine->doc, machine->topo, told, &values);
	fclose(told);
	const struct tp_topo_value *v = result == ncclSuccess ? tp_topo_value_between(&values, a, b) : NULL;
	if (v) {
		double planned = tp_topo_path(machine->topo, a, b)->bw;
		fprintf(out, "Measured%s:", v->from == a ? "" : " the other way");
		if (v->alpha_us > 0) fprintf(out, " alpha %.4g us", v->alpha_us);
		if (v->gbps > 0) fprintf(out, " %.4g GB/s", v->gbps);
		if (v->gbps > 0 && planned > 0) fprintf(out, ", %.0f %% of what is planned", 100 * v->gbps / planned);
		if (v->alpha_us > 0 && v->gbps > 0) fprintf(out, " (half of it at %.4g KB)", v->alpha_us * v->gbps);
		fprintf(out, "\n");
	}
	/* The refusals that concern these two. */
	for (rest = notes; (line = strsep(&rest, "\n"));)
		if (is_of(line, machine->topo->nodes[a].name, machine->topo->nodes[b].name) || is_of(line, machine->topo->nodes[b].name, machine->topo->nodes[a].name))
			fprintf(out, "Not taken: %s\n", line);
	if (result == ncclSuccess) free(values.list);
	free(notes);
}

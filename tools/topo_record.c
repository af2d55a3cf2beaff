/* `telpher topo record` and `export`: what was measured onto the map, and its medians out of it for the cost model. */
#include "topo.h"

#include <stdlib.h>
#include <string.h>

static bool read_number(const char *text, const char *name, double *out)
{
	size_t bytes = strlen(name);
	char *end;
	if (strncmp(text, name, bytes) != 0) return false;
	*out = strtod(text + bytes, &end);
	return end != text + bytes && !*end && *out > 0 && *out < 1e9;
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
		status = tool_usage_error("topo", "%s has nothing called \"%s\"", path, a < 0 ? from : to);
	} else {
		snprintf(m.from, sizeof(m.from), "%s", topo->nodes[a].name);
		snprintf(m.to, sizeof(m.to), "%s", topo->nodes[b].name);
		/* Written beside and put in its place whole: a file that is lost is a map that is lost. */
		char beside[4096];
		snprintf(beside, sizeof(beside), "%.4000s.new", path);
		if (tp_topo_doc_record(doc, &m) != ncclSuccess || tp_topo_doc_write(doc, beside) != ncclSuccess || rename(beside, path)) status = 1;
		if (status) fprintf(stderr, "telpher topo: %s can't be written: %s\n", path, tp_log_last_error());
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

static int count_measured(const struct tp_topo_doc *doc)
{
	struct tp_topo_measured m;
	bool is;
	int count = 0;
	while (tp_topo_doc_measured(doc, count, &m, &is) == ncclSuccess && is) count++;
	return count;
}

int topo_export(const struct topo_machine *machine, FILE *out)
{
	struct samples inside = { 0 }, across = { 0 };
	int count = count_measured(machine->doc), status = 0;
	double *room = calloc((size_t)count * 4 + 1, sizeof(*room));
	if (!room) return 1;
	inside.alpha = room;
	inside.bw = room + count;
	across.alpha = room + 2 * count;
	across.bw = room + 3 * count;
	for (int i = 0; i < count; i++) {
		struct tp_topo_measured m;
		bool is;
		if (tp_topo_doc_measured(machine->doc, i, &m, &is) != ncclSuccess || !is) break;
		int32_t a = tp_topo_find_name(machine->topo, m.from), b = tp_topo_find_name(machine->topo, m.to);
		if (a < 0 || b < 0) {
			fprintf(stderr, "telpher topo: measured from %s to %s: nothing is called so any more; left out\n", m.from, m.to);
			continue;
		}
		struct samples *s = is_inside(machine->topo, a, b) ? &inside : &across;
		if (m.alpha_us > 0) s->alpha[s->nalpha++] = m.alpha_us;
		if (m.gbps > 0) s->bw[s->nbw++] = m.gbps;
	}
	if (!count) {
		fprintf(stderr, "telpher topo: nothing has been measured in %s (telpher topo record)\n", machine->name);
		status = 1;
	}
	print_samples("inside", &inside, out);
	print_samples("across", &across, out);
	free(room);
	return status;
}

/* What was measured between two places, for `explain`. */
void topo_print_measured(const struct topo_machine *machine, int32_t a, int32_t b, FILE *out)
{
	struct tp_topo_measured m;
	bool is;
	for (int i = 0; tp_topo_doc_measured(machine->doc, i, &m, &is) == ncclSuccess && is; i++) {
		if (tp_topo_find_name(machine->topo, m.from) != a || tp_topo_find_name(machine->topo, m.to) != b) continue;
		fprintf(out, "Measured:");
		if (m.alpha_us > 0) fprintf(out, " alpha %.4g us", m.alpha_us);
		if (m.gbps > 0) fprintf(out, " %.4g GB/s", m.gbps);
		if (m.alpha_us > 0 && m.gbps > 0) fprintf(out, " (half of it at %.4g KB)", m.alpha_us * m.gbps);
		fprintf(out, "\n");
	}
}

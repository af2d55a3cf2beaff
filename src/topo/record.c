/* Measured values on a description: <measured from to alpha_us gbps from_bus to_bus path planned_gbps>, below <system>. NCCL doesn't know the element and reads past it. A
 * map outlives what it shows: a card moves to another slot, a link trains down. So what was measured holds only as long as the wires are what they were then. */
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "topo/doc.h"

ncclResult_t tp_topo_doc_record(struct tp_topo_doc *doc, const struct tp_topo_measured *value)
{
	struct tp_element *e = tp_doc_add(doc, doc->root, "measured");
	if (!e) return ncclSystemError;
	TP_TRY(tp_doc_set(doc, e, "from", value->from));
	TP_TRY(tp_doc_set(doc, e, "to", value->to));
	if (value->alpha_us > 0) TP_TRY(tp_doc_setf(doc, e, "alpha_us", "%.6g", value->alpha_us));
	if (value->gbps > 0) TP_TRY(tp_doc_setf(doc, e, "gbps", "%.6g", value->gbps));
	if (value->from_bus[0]) TP_TRY(tp_doc_set(doc, e, "from_bus", value->from_bus));
	if (value->to_bus[0]) TP_TRY(tp_doc_set(doc, e, "to_bus", value->to_bus));
	if (!value->path[0]) return ncclSuccess;
	TP_TRY(tp_doc_set(doc, e, "path", value->path));
	return tp_doc_setf(doc, e, "planned_gbps", "%.6g", value->planned_gbps);
}

static void take_text(const struct tp_element *e, const char *name, char *out, size_t bytes)
{
	const char *text = tp_element_get(e, name);
	snprintf(out, bytes, "%s", text ? text : "");
}

ncclResult_t tp_topo_doc_measured(const struct tp_topo_doc *doc, int index, struct tp_topo_measured *out, bool *is)
{
	char where[TP_WHERE_BYTES];
	*is = false;
	for (const struct tp_element *e = doc->root->first; e; e = e->next) {
		struct tp_topo_measured value = { .alpha_us = 0 };
		const char *from = tp_element_get(e, "from"), *to = tp_element_get(e, "to");
		if (strcmp(e->name, "measured") != 0 || index-- > 0) continue;
		if (!from || !to) return TP_FAIL(ncclInvalidUsage, "%s has no from and to", tp_element_where(doc, e, where));
		TP_TRY(tp_element_real(doc, e, "alpha_us", 0, 1e9, 0, &value.alpha_us));
		TP_TRY(tp_element_real(doc, e, "gbps", 0, 1e9, 0, &value.gbps));
		TP_TRY(tp_element_real(doc, e, "planned_gbps", 0, 1e9, 0, &value.planned_gbps));
		take_text(e, "path", value.path, sizeof(value.path));
		take_text(e, "from_bus", value.from_bus, sizeof(value.from_bus));
		take_text(e, "to_bus", value.to_bus, sizeof(value.to_bus));
		snprintf(value.from, sizeof(value.from), "%s", from);
		snprintf(value.to, sizeof(value.to), "%s", to);
		*out = value;
		*is = true;
		return ncclSuccess;
	}
	return ncclSuccess;
}

/* ---- What still holds ---- */

/* Planned bandwidths lie up to a quarter below what links really carry. */
#define TOO_MUCH 1.5
/* Of one pair the largest over the least. */
#define BW_APART 2.0
#define ALPHA_APART 4.0

__attribute__((format(printf, 3, 4)))
static void refuse(FILE *notes, const struct tp_topo_measured *m, const char *format, ...)
{
	char why[160];
	va_list args;
	va_start(args, format);
	vsnprintf(why, sizeof(why), format, args);
	va_end(args);
	if (notes) fprintf(notes, "measured from %s to %s: %s; left out\n", m->from, m->to, why);
	else TP_WARN("measured from %s to %s: %s; left out", m->from, m->to, why);
}

static bool holds(const struct tp_topo *topo, const struct tp_topo_measured *m, int32_t from, int32_t to, FILE *notes)
{
	if (from < 0 || to < 0) {
		refuse(notes, m, "nothing is called %s any more", from < 0 ? m->from : m->to);
		return false;
	}
	const struct tp_topo_path *path = tp_topo_wire_path(topo, from, to);
	double bw = path->bw;
	if (path->type == TP_PATH_DIS) {
		refuse(notes, m, "nothing joins the two any more");
		return false;
	}
	if (m->path[0] && (strcmp(m->path, tp_topo_path_name(path->type)) != 0 || m->planned_gbps > bw * 1.01 || m->planned_gbps < bw * 0.99)) {
		refuse(notes, m, "that was over %s of %.4g GB/s, and now it is %s of %.4g: measure anew", m->path, m->planned_gbps, tp_topo_path_name(path->type), bw);
		return false;
	}
	/* A port's speed is often a guess. */
	bool port = topo->nodes[from].kind == TP_TOPO_NET || topo->nodes[to].kind == TP_TOPO_NET;
	if (path->type != TP_PATH_LOC && !port && m->gbps > bw * TOO_MUCH) {
		refuse(notes, m, "%.4g GB/s, and the wires (%s) carry %.4g", m->gbps, tp_topo_path_name(path->type), bw);
		return false;
	}
	return true;
}

struct sample { struct tp_topo_measured m; int32_t from, to; bool used; };

/* The median of one kind of value of a pair; 0: there is none, or they contradict each other. */
static double settle(const struct sample *samples, int count, int first, bool bw, double *room, FILE *notes)
{
	int n = 0;
	double least = 0, most = 0;
	for (int i = first; i < count; i++) {
		const struct sample *s = &samples[i];
		double value = bw ? s->m.gbps : s->m.alpha_us;
		if (s->from != samples[first].from || s->to != samples[first].to || value <= 0) continue;
		least = n ? TP_MIN(least, value) : value;
		most = TP_MAX(most, value);
		room[n++] = value;
	}
	if (!n) return 0;
	if (most <= least * (bw ? BW_APART : ALPHA_APART)) return tp_median(room, n);
	refuse(notes, &samples[first].m, "%d values from %.4g to %.4g %s contradict each other", n, least, most, bw ? "GB/s" : "us");
	return 0;
}

/* By its bus id where there is one, on the host that the name begins with ("h1/") where there are several. */
static int32_t find_end(const struct tp_topo *topo, const char *name, const char *bus)
{
	char text[96];
	const char *slash = topo->nhosts > 1 ? strchr(name, '/') : NULL;
	if (!bus[0]) return tp_topo_find_name(topo, name);
	snprintf(text, sizeof(text), "%.*s%s", slash ? (int)(slash + 1 - name) : 0, name, bus);
	int32_t node = tp_topo_find_name(topo, text);
	/* Parts of a GPU have one bus id. */
	return node < 0 ? tp_topo_find_name(topo, name) : node;
}

static ncclResult_t read_samples(const struct tp_topo_doc *doc, const struct tp_topo *topo, FILE *notes, struct sample *samples, int *count, int most)
{
	int kept = 0;
	for (int i = 0; i < most; i++) {
		struct sample *s = &samples[kept];
		bool is;
		*s = (struct sample){ .used = false };
		TP_TRY(tp_topo_doc_measured(doc, i, &s->m, &is));
		s->from = find_end(topo, s->m.from, s->m.from_bus);
		s->to = find_end(topo, s->m.to, s->m.to_bus);
		kept += holds(topo, &s->m, s->from, s->to, notes);
	}
	*count = kept;
	return ncclSuccess;
}

ncclResult_t tp_topo_values_of(const struct tp_topo_doc *doc, const struct tp_topo *topo, FILE *notes, struct tp_topo_values *out)
{
	struct tp_topo_values values = { .list = NULL };
	int most = 0, count = 0;
	for (const struct tp_element *e = doc->root->first; e; e = e->next) most += strcmp(e->name, "measured") == 0;
	*out = values;
	if (!most) return ncclSuccess;
	struct sample *samples = tp_alloc((size_t)most, sizeof(*samples), "measured values");
	double *room = tp_alloc((size_t)most, sizeof(*room), "measured values");
	values.list = tp_alloc((size_t)most, sizeof(*values.list), "measured values");
	ncclResult_t result = samples && room && values.list ? read_samples(doc, topo, notes, samples, &count, most) : ncclSystemError;
	for (int i = 0; i < count && result == ncclSuccess; i++) {
		if (samples[i].used) continue;
		struct tp_topo_value v = { samples[i].from, samples[i].to, settle(samples, count, i, false, room, notes), settle(samples, count, i, true, room, notes) };
		for (int k = i; k < count; k++) samples[k].used |= samples[k].from == v.from && samples[k].to == v.to;
		if (v.alpha_us > 0 || v.gbps > 0) values.list[values.count++] = v;
	}
	free(samples);
	free(room);
	if (result == ncclSuccess) *out = values;
	else free(values.list);
	return result;
}

const struct tp_topo_value *tp_topo_value_between(const struct tp_topo_values *values, int32_t from, int32_t to)
{
	const struct tp_topo_value *back = NULL;
	for (int i = 0; i < values->count; i++) {
		const struct tp_topo_value *v = &values->list[i];
		if (v->from == from && v->to == to) return v;
		if (v->from == to && v->to == from) back = v;
	}
	return back;
}

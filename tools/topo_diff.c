/* `telpher topo diff`: what one machine has and the other hasn't, by device, then what that does to the paths. */
#include "topo.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#define MAX_PATH_LINES 24

struct differ { const struct topo_machine *a, *b; FILE *out; int count; };

static bool same_device(const struct tp_topo_node *x, const struct tp_topo_node *y)
{
	if (x->kind != y->kind || x->host != y->host) return false;
	switch (x->kind) {
	case TP_TOPO_GPU: return x->pci.bus_id[0] && y->pci.bus_id[0] ? x->pci.bus == y->pci.bus && x->gpu.dev == y->gpu.dev && x->gpu.part == y->gpu.part : x->gpu.dev == y->gpu.dev;
	case TP_TOPO_CPU: return x->cpu.numa == y->cpu.numa;
	case TP_TOPO_NET: case TP_TOPO_CACHE: case TP_TOPO_CORE: return strcmp(x->name, y->name) == 0;
	case TP_TOPO_NVS: return x->ordinal == y->ordinal;
	default: return x->pci.bus_id[0] ? x->pci.bus == y->pci.bus : x->ordinal == y->ordinal;
	}
}

static const struct tp_topo_node *twin_of(const struct tp_topo *topo, const struct tp_topo_node *node)
{
	for (int32_t i = 0; i < topo->nnodes; i++)
		if (same_device(&topo->nodes[i], node)) return &topo->nodes[i];
	return NULL;
}

__attribute__((format(printf, 3, 4)))
static void changed(struct differ *d, const char *name, const char *format, ...)
{
	va_list list;
	d->count++;
	fprintf(d->out, "~ %s: ", name);
	va_start(list, format);
	vfprintf(d->out, format, list);
	va_end(list);
	fprintf(d->out, "\n");
}

static const char *yes(bool value) { return value ? "yes" : "no"; }
static const char *acs_text(int acs) { return acs > 0 ? "on" : acs ? "not known" : "off"; }

static void compare_node(struct differ *d, const struct tp_topo_node *x, const struct tp_topo_node *y)
{
	if (x->pci.width != y->pci.width) changed(d, x->name, "PCIe lanes %d -> %d", x->pci.width, y->pci.width);
	if (x->pci.speed != y->pci.speed) changed(d, x->name, "PCIe speed %g -> %g GT/s", x->pci.speed, y->pci.speed);
	if (x->pci.acs != y->pci.acs && (x->pci.acs > 0 || y->pci.acs > 0)) changed(d, x->name, "ACS %s -> %s", acs_text(x->pci.acs), acs_text(y->pci.acs));
	if (x->pci.mps != y->pci.mps && x->pci.mps && y->pci.mps) changed(d, x->name, "largest payload (MPS) %d -> %d", x->pci.mps, y->pci.mps);
	if (x->pci.mrrs != y->pci.mrrs && x->pci.mrrs && y->pci.mrrs) changed(d, x->name, "largest read request (MRRS) %d -> %d", x->pci.mrrs, y->pci.mrrs);
	if (x->kind == TP_TOPO_GPU) {
		if (x->gpu.nvlinks != y->gpu.nvlinks) changed(d, x->name, "NVLinks %d -> %d", x->gpu.nvlinks, y->gpu.nvlinks);
		if (x->gpu.gdr != y->gpu.gdr) changed(d, x->name, "NICs reach its memory: %s -> %s", yes(x->gpu.gdr), yes(y->gpu.gdr));
		if (x->gpu.sm != y->gpu.sm) changed(d, x->name, "compute capability %d -> %d", x->gpu.sm, y->gpu.sm);
	}
	if (x->kind == TP_TOPO_NET) {
		if (x->net.bw != y->net.bw) changed(d, x->name, "%g -> %g Gb/s", x->net.bw * 8, y->net.bw * 8);
		if (x->net.gdr != y->net.gdr) changed(d, x->name, "reaches GPU memory: %s -> %s", yes(x->net.gdr), yes(y->net.gdr));
	}
	const struct tp_topo_node *up_x = x->parent >= 0 ? &d->a->topo->nodes[x->parent] : NULL, *up_y = y->parent >= 0 ? &d->b->topo->nodes[y->parent] : NULL;
	if (up_x && up_y && !same_device(up_x, up_y)) changed(d, x->name, "hangs on %s -> %s", up_x->name, up_y->name);
}

static void compare_nodes(struct differ *d)
{
	for (int32_t i = 0; i < d->a->topo->nnodes; i++) {
		const struct tp_topo_node *x = &d->a->topo->nodes[i], *y = twin_of(d->b->topo, x);
		if (y) {
			compare_node(d, x, y);
			continue;
		}
		d->count++;
		fprintf(d->out, "- %s%s%s is missing\n", x->name, x->kind == TP_TOPO_GPU ? " " : "", x->kind == TP_TOPO_GPU ? x->pci.bus_id : "");
	}
	for (int32_t i = 0; i < d->b->topo->nnodes; i++) {
		const struct tp_topo_node *y = &d->b->topo->nodes[i];
		if (twin_of(d->a->topo, y)) continue;
		d->count++;
		fprintf(d->out, "+ %s%s%s is new\n", y->name, y->kind == TP_TOPO_GPU ? " " : "", y->kind == TP_TOPO_GPU ? y->pci.bus_id : "");
	}
}

static void compare_paths(struct differ *d, enum tp_topo_kind to_kind)
{
	const struct tp_topo *a = d->a->topo, *b = d->b->topo;
	int differing = 0;
	for (int32_t g = 0; g < a->count[TP_TOPO_GPU]; g++) {
		const struct tp_topo_node *from = tp_topo_node_of(a, TP_TOPO_GPU, g), *from_b = twin_of(b, from);
		for (int32_t i = to_kind == TP_TOPO_GPU ? g + 1 : 0; i < a->count[to_kind] && from_b; i++) {
			const struct tp_topo_node *to = tp_topo_node_of(a, to_kind, i), *to_b = twin_of(b, to);
			if (!to_b) continue;
			const struct tp_topo_path *x = tp_topo_path(a, from->index, to->index), *y = tp_topo_path(b, from_b->index, to_b->index);
			double gap = x->bw - y->bw;
			if (x->type == y->type && gap < 0.001 && gap > -0.001) continue;
			d->count++;
			if (differing++ < MAX_PATH_LINES)
				fprintf(d->out, "~ %s to %s: %s %.4g -> %s %.4g GB/s\n", from->name, to->name, tp_topo_path_name(x->type), x->bw, tp_topo_path_name(y->type), y->bw);
		}
	}
	if (differing > MAX_PATH_LINES) fprintf(d->out, "  … and %d more such pairs\n", differing - MAX_PATH_LINES);
}

static int print_faults(const struct topo_machine *m, FILE *out)
{
	struct tp_topo_warning *list;
	int count;
	if (tp_topo_find_faults(m->topo, &m->policy, &list, &count) != ncclSuccess) return 1;
	if (count) fprintf(out, "\n%s is worse than it could be:\n", m->name);
	for (int i = 0; i < count; i++) fprintf(out, "  %s: %s\n", tp_topo_fault_code(list[i].fault), list[i].text);
	free(list);
	return 0;
}

int topo_diff(const struct topo_machine *a, const struct topo_machine *b, FILE *out)
{
	struct differ d = { .a = a, .b = b, .out = out };
	fprintf(out, "%s -> %s\n", a->name, b->name);
	compare_nodes(&d);
	compare_paths(&d, TP_TOPO_GPU);
	compare_paths(&d, TP_TOPO_NET);
	if (!d.count) fprintf(out, "No difference.\n");
	else print_faults(b, out);
	return d.count ? 1 : 0;
}

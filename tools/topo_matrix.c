/* `telpher topo matrix`: who meets whom where, in the form of `nvidia-smi topo -m`. */
#include "topo.h"

#include <stdlib.h>
#include <string.h>

/* NVLinks on the way: as many as the narrowest part has. */
static void cell_text(const struct tp_topo *topo, int32_t from, int32_t to, char *text, size_t bytes)
{
	const struct tp_topo_path *path = tp_topo_wire_path(topo, from, to);
	int links = 0;
	if (from == to) {
		snprintf(text, bytes, "X");
		return;
	}
	for (int32_t i = 0; i < path->nhops; i++) {
		const struct tp_topo_link *link = &topo->links[path->links[i]];
		if (link->kind == TP_WIRE_NVL && (!links || link->count < links)) links = link->count;
	}
	bool amd = topo->nodes[from].kind == TP_TOPO_GPU && topo->nodes[from].gpu.maker == TP_MAKER_AMD;
	if (path->type == TP_PATH_NVL) snprintf(text, bytes, "%s%d", amd ? "XGMI" : "NV", links);
	else snprintf(text, bytes, "%s", tp_topo_path_name(path->type));
}

/* "0-3,8". */
static void list_text(const uint64_t *mask, char *text, size_t bytes)
{
	size_t used = 0;
	*text = 0;
	for (int c = 0; c < TP_CPU_WORDS * 64; c++) {
		int last = c;
		if (!(mask[c / 64] >> (c % 64) & 1)) continue;
		while (last + 1 < TP_CPU_WORDS * 64 && mask[(last + 1) / 64] >> ((last + 1) % 64) & 1) last++;
		int wrote = last > c ? snprintf(text + used, bytes - used, "%s%d-%d", used ? "," : "", c, last) : snprintf(text + used, bytes - used, "%s%d", used ? "," : "", c);
		if (wrote < 0 || (size_t)wrote >= bytes - used) return;
		used += (size_t)wrote;
		c = last;
	}
}

struct column { int32_t node; char name[24]; };

static int make_columns(const struct tp_topo *topo, struct column *out)
{
	int count = 0;
	for (int32_t i = 0; i < topo->count[TP_TOPO_GPU]; i++) {
		const struct tp_topo_node *gpu = tp_topo_node_of(topo, TP_TOPO_GPU, i);
		out[count].node = gpu->index;
		char part[12] = "";
		if (gpu->gpu.part >= 0) snprintf(part, sizeof(part), ".%d", gpu->gpu.part);
		if (topo->nhosts > 1) snprintf(out[count++].name, sizeof(out->name), "h%d/GPU%d%s", gpu->host, gpu->gpu.dev, part);
		else snprintf(out[count++].name, sizeof(out->name), "GPU%d%s", gpu->gpu.dev, part);
	}
	for (int32_t i = 0; i < topo->count[TP_TOPO_NET]; i++) {
		out[count].node = topo->of_kind[TP_TOPO_NET][i];
		snprintf(out[count++].name, sizeof(out->name), "NIC%d", i);
	}
	return count;
}

static void print_legend(const struct tp_topo *topo, FILE *out)
{
	static const enum tp_topo_path_type types[] = { TP_PATH_SYS, TP_PATH_PHB, TP_PATH_PXB, TP_PATH_PIX, TP_PATH_C2C, TP_PATH_NVB };
	fprintf(out, "\nLegend:\n\n  X    = Self\n");
	for (size_t i = 0; i < TP_ARRAY_LEN(types); i++) fprintf(out, "  %-4s = %s\n", tp_topo_path_name(types[i]), tp_topo_path_meaning(types[i]));
	fprintf(out, "  NV#  = # NVLinks together (XGMI#: AMD's xGMI)\n");
	if (topo->count[TP_TOPO_NET]) fprintf(out, "\nNIC Legend:\n\n");
	for (int32_t i = 0; i < topo->count[TP_TOPO_NET]; i++) fprintf(out, "  NIC%d: %s\n", i, tp_topo_node_of(topo, TP_TOPO_NET, i)->name);
}

int topo_matrix(const struct topo_machine *m, FILE *out)
{
	const struct tp_topo *topo = m->topo;
	struct column *columns = calloc((size_t)(topo->count[TP_TOPO_GPU] + topo->count[TP_TOPO_NET] + 1), sizeof(*columns));
	if (!columns) return 1;
	int count = make_columns(topo, columns);
	if (!count) fprintf(out, "No GPU and no network port.\n");
	for (int c = 0; c < count; c++) fprintf(out, "\t%s", columns[c].name);
	if (count) fprintf(out, "\tCPU Affinity\tNUMA Affinity\n");
	for (int r = 0; r < count; r++) {
		const struct tp_topo_node *node = &topo->nodes[columns[r].node];
		char text[256];
		fprintf(out, "%s", columns[r].name);
		for (int c = 0; c < count; c++) {
			cell_text(topo, columns[r].node, columns[c].node, text, sizeof(text));
			fprintf(out, "\t%s", text);
		}
		if (node->kind == TP_TOPO_GPU && node->near_cpu >= 0) {
			list_text(topo->nodes[node->near_cpu].cpu.mask, text, sizeof(text));
			fprintf(out, "\t%s\t%d", *text ? text : "-", topo->nodes[node->near_cpu].cpu.numa);
		}
		fprintf(out, "\n");
	}
	print_legend(topo, out);
	free(columns);
	return 0;
}

/* `telpher topo explain`: the way between two places, hop by hop, and why it isn't a better one. */
#include "topo.h"

#include <string.h>

void topo_print_hops(const struct tp_topo *topo, const struct tp_topo_path *path, int32_t marked, const char *mark, FILE *out)
{
	for (int32_t i = 0; i < path->nhops; i++) {
		const struct tp_topo_link *link = &topo->links[path->links[i]];
		char text[40];
		topo_link_text(topo, link, text, sizeof(text));
		fprintf(out, "  %-22s -> %-22s %-14s %8.4g GB/s", topo->nodes[link->from].name, topo->nodes[link->to].name, text, link->bw);
		if (link->full_bw > link->bw * 1.001) fprintf(out, " (could be %.4g)", link->full_bw);
		fprintf(out, "%s%s\n", path->links[i] == marked ? "  <- " : "", path->links[i] == marked ? mark : "");
	}
}

static void print_path(const struct tp_topo *topo, const char *title, const struct tp_topo_path *path, FILE *out)
{
	fprintf(out, "%s: %s (%s)", title, tp_topo_path_name(path->type), tp_topo_path_meaning(path->type));
	if (path->type == TP_PATH_DIS) {
		fprintf(out, "\n");
		return;
	}
	fprintf(out, ", %.4g GB/s, %d hop%s\n", path->bw, path->nhops, path->nhops == 1 ? "" : "s");
	topo_print_hops(topo, path, path->limit < 0 ? -1 : path->links[path->limit], "the narrowest", out);
}

static void print_why(const char *what, bool yes, const struct tp_topo_why *why, FILE *out)
{
	fprintf(out, "  %-32s %s [%s] %s\n", what, yes ? "yes" : "no ", tp_topo_reason_code(why->reason), why->text);
}

/* Kinds of paths that would be nearer than the one there is. */
static void print_better(const struct tp_topo *topo, int32_t from, int32_t to, FILE *out)
{
	const struct tp_topo_node *a = &topo->nodes[from], *b = &topo->nodes[to];
	enum tp_topo_path_type type = tp_topo_wire_path(topo, from, to)->type;
	bool gpus = a->kind == TP_TOPO_GPU && b->kind == TP_TOPO_GPU;
	if (from == to || type == TP_PATH_LOC) return;
	if (gpus && type > TP_PATH_NVL) {
		int links = 0;
		for (int32_t l = a->first_link; l < a->first_link + a->nlinks; l++) links += topo->links[l].kind == TP_WIRE_NVL ? topo->links[l].count : 0;
		fprintf(out, "  not NVL: %s\n", !links ? "the first has no NVLink that leads anywhere here" :
			"none of the first's NVLinks leads to the second, or to a switch that it is on");
	}
	if (type > TP_PATH_PIX && type != TP_PATH_NVB && type != TP_PATH_C2C) {
		bool same = a->parent >= 0 && b->parent >= 0 && a->near_cpu == b->near_cpu;
		fprintf(out, "  not PIX: no PCIe switch is right above both%s\n", same || a->near_cpu < 0 || b->near_cpu < 0 ? "" : ": they are at different CPUs");
	}
	if (type == TP_PATH_SYS && a->near_cpu >= 0 && b->near_cpu >= 0)
		fprintf(out, "  not PHB: the first is at %s, the second at %s\n", topo->nodes[a->near_cpu].name, topo->nodes[b->near_cpu].name);
}

static int explain_gpus(const struct topo_machine *m, int32_t a, int32_t b, FILE *out)
{
	struct tp_topo_p2p p2p;
	struct tp_topo_why shm;
	if (tp_topo_decide_p2p(m->topo, &m->policy, a, b, &p2p) != ncclSuccess) return 1;
	bool shared = tp_topo_decide_shm(m->topo, &m->policy, a, b, &shm);
	print_why("direct access (P2P)", p2p.use, &p2p.why, out);
	if (p2p.use) fprintf(out, "  %-32s %s\n", "  by", p2p.read ? "reading" : "writing");
	print_why("shared memory (SHM)", shared, &shm, out);
	fprintf(out, "  %-32s %s\n", "so data goes", p2p.use ? "directly" : shared ? "through host memory" : "through the network");
	return 0;
}

static int explain_net(const struct topo_machine *m, int32_t gpu, int32_t net, FILE *out)
{
	const struct tp_topo *topo = m->topo;
	struct tp_topo_gdr writes, reads;
	struct tp_topo_why pxn;
	if (tp_topo_decide_gdr(topo, &m->policy, gpu, net, false, &writes) != ncclSuccess) return 1;
	if (tp_topo_decide_gdr(topo, &m->policy, gpu, net, true, &reads) != ncclSuccess) return 1;
	int32_t relay = tp_topo_pxn_relay(topo, &m->policy, gpu, net, &pxn), local = tp_topo_local_net(topo, gpu, 0);
	print_why("through another GPU (PXN)", relay >= 0, &pxn, out);
	print_why("NIC writes GPU memory (receive)", writes.mode != TP_GDR_OFF, &writes.why, out);
	print_why("NIC reads GPU memory (send)", reads.mode != TP_GDR_OFF, &reads.why, out);
	if (writes.mode != TP_GDR_OFF) print_why("flush after a receive", writes.flush, &writes.flush_why, out);
	if (local >= 0 && local != net)
		fprintf(out, "  %s's own NIC on channel 0 is %s\n", topo->nodes[gpu].name, topo->nodes[local].name);
	return 0;
}

static int32_t find(const struct topo_machine *m, const char *name)
{
	int32_t node = tp_topo_find_name(m->topo, name);
	char why[320];
	if (node >= 0) return node;
	tp_topo_refuse_name(m->topo, m->name, name, why, sizeof(why));
	tool_usage_error("topo", "%s; names are gpu0, gpu0.1, rank3, mlx5_1, net2, cpu1 or a bus id", why);
	return -1;
}

static bool is_end(const struct tp_topo_node *node)
{
	return node->kind == TP_TOPO_GPU || node->kind == TP_TOPO_NET || node->kind == TP_TOPO_CPU || node->kind == TP_TOPO_NVS;
}

int topo_explain(const struct topo_machine *m, const char *from, const char *to, FILE *out)
{
	const struct tp_topo *topo = m->topo;
	int32_t a = find(m, from), b = a < 0 ? -1 : find(m, to);
	if (a < 0 || b < 0) return TOOL_USAGE;
	if (!is_end(&topo->nodes[a]) || !is_end(&topo->nodes[b]))
		return tool_usage_error("topo", "paths are between GPUs, network ports, CPUs and NVSwitches, not from %s to %s", topo->nodes[a].name, topo->nodes[b].name);
	const struct tp_topo_path *wire = tp_topo_wire_path(topo, a, b), *used = tp_topo_path(topo, a, b);
	bool diverted = wire->nhops != used->nhops || (wire->nhops && memcmp(wire->links, used->links, (size_t)wire->nhops * sizeof(*wire->links)) != 0);
	fprintf(out, "%s -> %s\n\n", topo->nodes[a].name, topo->nodes[b].name);
	if (diverted) print_path(topo, "What the wires allow", wire, out);
	print_path(topo, diverted ? "\nWhat is used" : "The path", used, out);
	topo_print_measured(m, a, b, out);
	fprintf(out, "\nWhy:\n");
	print_better(topo, a, b, out);
	if (topo->nodes[a].kind == TP_TOPO_GPU && topo->nodes[b].kind == TP_TOPO_GPU) return explain_gpus(m, a, b, out);
	if (topo->nodes[a].kind == TP_TOPO_GPU && topo->nodes[b].kind == TP_TOPO_NET) return explain_net(m, a, b, out);
	if (topo->nodes[a].kind == TP_TOPO_NET && topo->nodes[b].kind == TP_TOPO_GPU) return explain_net(m, b, a, out);
	fprintf(out, "  it is the only way, or the best of them\n");
	return 0;
}

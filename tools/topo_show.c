/* `telpher topo show`: the tree, what crosses it, and what is worse than it could be; as text and as JSON. */
#include "topo.h"

#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>

static int count_bits(const uint64_t *mask)
{
	int bits = 0;
	for (int w = 0; w < TP_CPU_WORDS; w++) bits += __builtin_popcountll(mask[w]);
	return bits;
}

/* Links that leave the tree. */
static void print_crossing(const struct tp_topo *topo, const struct tp_topo_node *node, FILE *out)
{
	for (int32_t l = node->first_link; l < node->first_link + node->nlinks; l++) {
		const struct tp_topo_link *link = &topo->links[l];
		char text[40];
		if (link->kind != TP_WIRE_NVL && link->kind != TP_WIRE_C2C) continue;
		if (node->kind != TP_TOPO_GPU) continue;
		topo_link_text(topo, link, text, sizeof(text));
		fprintf(out, "; %s to %s %.4g GB/s", text, topo->nodes[link->to].name, link->bw);
	}
}

static void print_up_link(const struct tp_topo *topo, const struct tp_topo_node *node, FILE *out)
{
	for (int32_t l = node->first_link; l < node->first_link + node->nlinks; l++) {
		const struct tp_topo_link *link = &topo->links[l];
		char text[40];
		if (link->to != node->parent || link->kind != TP_WIRE_PCI || !node->pci.width) continue;
		topo_link_text(topo, link, text, sizeof(text));
		fprintf(out, "  %s %.4g GB/s", text, link->bw);
		if (link->full_bw > link->bw * 1.001) fprintf(out, " (could be %.4g)", link->full_bw);
		return;
	}
}

static void print_node(const struct tp_topo *topo, const struct tp_topo_node *node, FILE *out)
{
	switch (node->kind) {
	case TP_TOPO_GPU:
		fprintf(out, "%s", node->name);
		if (node->gpu.rank >= 0) fprintf(out, " rank %d", node->gpu.rank);
		if (node->gpu.gcn[0]) fprintf(out, " %s", node->gpu.gcn);
		else if (node->gpu.sm) fprintf(out, " sm%d", node->gpu.sm);
		if (node->pci.bus_id[0]) fprintf(out, " %s", node->pci.bus_id);
		break;
	case TP_TOPO_NET:
		fprintf(out, "%s  %.4g Gb/s%s%s%s", node->name, node->net.bw * 8, node->net.fabric ? " " : "", topo_fabric_name(node->net.fabric),
			node->net.gdr ? ", reaches GPU memory" : "");
		break;
	case TP_TOPO_CACHE:
		fprintf(out, "%s  %zu KiB, %d processors", node->name, node->cache.bytes >> 10, count_bits(node->cache.mask));
		break;
	case TP_TOPO_CORE:
		fprintf(out, "%s ", node->name);
		for (int c = 0; c < TP_CPU_WORDS * 64; c++)
			if (node->core.mask[c / 64] >> (c % 64) & 1) fprintf(out, " %d", c);
		break;
	default:
		fprintf(out, "%s", node->name);
	}
	print_up_link(topo, node, out);
	if (node->kind == TP_TOPO_PCI && node->pci.acs == 1) fprintf(out, "  ACS on");
	print_crossing(topo, node, out);
	fprintf(out, "\n");
}

static int32_t next_child(const struct tp_topo *topo, int32_t parent, int32_t after)
{
	for (int32_t i = after + 1; i < topo->nnodes; i++)
		if (topo->nodes[i].parent == parent) return i;
	return -1;
}

static void print_below(const struct tp_topo *topo, int32_t parent, const char *indent, FILE *out)
{
	for (int32_t child = next_child(topo, parent, -1), next; child >= 0; child = next) {
		char deeper[256];
		next = next_child(topo, parent, child);
		fprintf(out, "%s%s ", indent, next >= 0 ? "├─" : "└─");
		print_node(topo, &topo->nodes[child], out);
		snprintf(deeper, sizeof(deeper), "%.200s%s", indent, next >= 0 ? "│  " : "   ");
		print_below(topo, child, deeper, out);
	}
}

static void print_cpu(const struct tp_topo *topo, const struct tp_topo_node *cpu, FILE *out)
{
	static const char *const archs[] = { "", " x86", " POWER", " Arm" }, *const vendors[] = { "", " Intel", " AMD", " Zhaoxin" };
	int processors = count_bits(cpu->cpu.mask);
	fprintf(out, "%s%s%s", cpu->name, vendors[cpu->cpu.vendor], archs[cpu->cpu.arch]);
	if (cpu->cpu.family) fprintf(out, " family %d model %d", cpu->cpu.family, cpu->cpu.model);
	if (processors) fprintf(out, ", %d processors", processors);
	for (int32_t l = cpu->first_link; l < cpu->first_link + cpu->nlinks; l++)
		if (topo->links[l].kind == TP_WIRE_SYS) {
			fprintf(out, "; to other CPUs %.4g GB/s", topo->links[l].bw);
			break;
		}
	fprintf(out, "\n");
	print_below(topo, cpu->index, "", out);
}

static int print_faults(const struct topo_machine *m, FILE *out)
{
	struct tp_topo_warning *list;
	int count;
	if (tp_topo_find_faults(m->topo, &m->policy, &list, &count) != ncclSuccess) return 1;
	if (count) fprintf(out, "\nWorse than it could be:\n");
	for (int i = 0; i < count; i++) fprintf(out, "  %s: %s\n", tp_topo_fault_code(list[i].fault), list[i].text);
	free(list);
	return 0;
}

int topo_show(const struct topo_machine *m, FILE *out)
{
	static const struct { enum tp_topo_kind kind; const char *one, *many; } counted[] = {
		{ TP_TOPO_CPU, "CPU", "CPUs" }, { TP_TOPO_PCI, "PCIe switch or bridge", "PCIe switches or bridges" }, { TP_TOPO_GPU, "GPU", "GPUs" },
		{ TP_TOPO_NET, "network port", "network ports" },
	};
	const struct tp_topo *topo = m->topo;
	fprintf(out, "%s: %d host%s", m->name, topo->nhosts, topo->nhosts == 1 ? "" : "s");
	for (size_t i = 0; i < TP_ARRAY_LEN(counted); i++)
		fprintf(out, ", %d %s", topo->count[counted[i].kind], topo->count[counted[i].kind] == 1 ? counted[i].one : counted[i].many);
	fprintf(out, "\n");
	if (topo->virtual_machine[0])
		fprintf(out, "A virtual machine%s%s: it may hide switches and links.\n", strcmp(topo->virtual_machine, "yes") ? ", " : "",
			strcmp(topo->virtual_machine, "yes") ? topo->virtual_machine : "");
	for (int32_t h = 0; h < topo->nhosts; h++) {
		if (topo->nhosts > 1) fprintf(out, "\nHost %d\n", h);
		for (int32_t i = 0; i < topo->count[TP_TOPO_CPU]; i++) {
			const struct tp_topo_node *cpu = tp_topo_node_of(topo, TP_TOPO_CPU, i);
			if (cpu->host == h) print_cpu(topo, cpu, out);
		}
	}
	return print_faults(m, out);
}

/* ---- JSON ---- */

static void add_text(cJSON *o, const char *name, const char *text) { cJSON_AddStringToObject(o, name, text); }
static void add_number(cJSON *o, const char *name, double value) { cJSON_AddNumberToObject(o, name, value); }
static void add_bool(cJSON *o, const char *name, bool value) { cJSON_AddBoolToObject(o, name, value); }

static cJSON *node_json(const struct tp_topo_node *node)
{
	cJSON *o = cJSON_CreateObject();
	add_text(o, "kind", tp_topo_kind_name(node->kind));
	add_text(o, "name", node->name);
	add_number(o, "host", node->host);
	add_number(o, "parent", node->parent);
	if (node->pci.bus_id[0]) add_text(o, "busid", node->pci.bus_id);
	if (node->kind == TP_TOPO_GPU) {
		add_number(o, "dev", node->gpu.dev);
		add_number(o, "rank", node->gpu.rank);
		add_number(o, "sm", node->gpu.sm);
		add_bool(o, "gdr", node->gpu.gdr);
	}
	if (node->kind == TP_TOPO_NET) {
		add_number(o, "dev", node->net.dev);
		add_number(o, "port", node->net.port);
		add_number(o, "bw", node->net.bw);
		add_bool(o, "gdr", node->net.gdr);
	}
	return o;
}

static void add_path(cJSON *list, const struct tp_topo *topo, int32_t from, int32_t to, cJSON **out)
{
	const struct tp_topo_path *path = tp_topo_path(topo, from, to);
	cJSON *o = cJSON_CreateObject();
	add_number(o, "from", from);
	add_number(o, "to", to);
	add_text(o, "type", tp_topo_path_name(path->type));
	add_number(o, "bw", path->bw);
	add_number(o, "hops", path->nhops);
	cJSON_AddItemToArray(list, o);
	if (out) *out = o;
}

static void add_why(cJSON *o, const char *name, const struct tp_topo_why *why)
{
	cJSON *w = cJSON_AddObjectToObject(o, name);
	add_text(w, "reason", tp_topo_reason_code(why->reason));
	add_text(w, "text", why->text);
}

static void add_gpu_pairs(cJSON *root, const struct topo_machine *m)
{
	const struct tp_topo *topo = m->topo;
	cJSON *list = cJSON_AddArrayToObject(root, "gpu_gpu"), *o;
	for (int32_t a = 0; a < topo->count[TP_TOPO_GPU]; a++) {
		for (int32_t b = 0; b < topo->count[TP_TOPO_GPU]; b++) {
			int32_t from = topo->of_kind[TP_TOPO_GPU][a], to = topo->of_kind[TP_TOPO_GPU][b];
			struct tp_topo_p2p p2p;
			if (tp_topo_decide_p2p(topo, &m->policy, from, to, &p2p) != ncclSuccess) return;
			add_path(list, topo, from, to, &o);
			add_bool(o, "p2p", p2p.use);
			add_bool(o, "read", p2p.read);
			add_number(o, "relay", p2p.relay);
			add_why(o, "why", &p2p.why);
		}
	}
}

static void add_net_pairs(cJSON *root, const struct topo_machine *m)
{
	const struct tp_topo *topo = m->topo;
	cJSON *list = cJSON_AddArrayToObject(root, "gpu_net"), *back = cJSON_AddArrayToObject(root, "net_gpu"), *o;
	for (int32_t a = 0; a < topo->count[TP_TOPO_GPU]; a++) {
		for (int32_t b = 0; b < topo->count[TP_TOPO_NET]; b++) {
			int32_t gpu = topo->of_kind[TP_TOPO_GPU][a], net = topo->of_kind[TP_TOPO_NET][b];
			struct tp_topo_gdr writes, reads;
			if (tp_topo_decide_gdr(topo, &m->policy, gpu, net, false, &writes) != ncclSuccess) return;
			if (tp_topo_decide_gdr(topo, &m->policy, gpu, net, true, &reads) != ncclSuccess) return;
			add_path(list, topo, gpu, net, &o);
			add_number(o, "gdr", writes.mode);
			add_number(o, "gdr_read", reads.mode);
			add_bool(o, "flush", writes.flush);
			add_number(o, "relay", writes.relay);
			add_why(o, "why", &writes.why);
			add_why(o, "why_read", &reads.why);
			add_path(back, topo, net, gpu, NULL);
		}
	}
}

#define CHANNELS 8

static void add_local(cJSON *root, const struct tp_topo *topo)
{
	cJSON *list = cJSON_AddArrayToObject(root, "local_net"), *gpus = cJSON_AddArrayToObject(root, "local_gpu");
	for (int32_t g = 0; g < topo->count[TP_TOPO_GPU]; g++) {
		cJSON *channels = cJSON_CreateArray();
		for (int c = 0; c < CHANNELS; c++) cJSON_AddItemToArray(channels, cJSON_CreateNumber(tp_topo_local_net(topo, topo->of_kind[TP_TOPO_GPU][g], c)));
		cJSON_AddItemToArray(list, channels);
	}
	for (int32_t n = 0; n < topo->count[TP_TOPO_NET]; n++) cJSON_AddItemToArray(gpus, cJSON_CreateNumber(tp_topo_local_gpu(topo, topo->of_kind[TP_TOPO_NET][n])));
}

static void add_links(cJSON *root, const struct tp_topo *topo)
{
	cJSON *list = cJSON_AddArrayToObject(root, "links");
	for (int32_t i = 0; i < topo->nlinks; i++) {
		cJSON *o = cJSON_CreateObject();
		add_number(o, "from", topo->links[i].from);
		add_number(o, "to", topo->links[i].to);
		add_text(o, "kind", tp_topo_link_name(topo->links[i].kind));
		add_number(o, "count", topo->links[i].count);
		add_number(o, "bw", topo->links[i].bw);
		cJSON_AddItemToArray(list, o);
	}
}

static void add_faults(cJSON *root, const struct topo_machine *m)
{
	struct tp_topo_warning *list;
	int count;
	cJSON *faults = cJSON_AddArrayToObject(root, "faults");
	if (tp_topo_find_faults(m->topo, &m->policy, &list, &count) != ncclSuccess) return;
	for (int i = 0; i < count; i++) {
		cJSON *o = cJSON_CreateObject();
		add_text(o, "fault", tp_topo_fault_code(list[i].fault));
		add_number(o, "node", list[i].node);
		add_number(o, "peer", list[i].peer);
		add_text(o, "text", list[i].text);
		cJSON_AddItemToArray(faults, o);
	}
	free(list);
}

int topo_json(const struct topo_machine *m, FILE *out)
{
	cJSON *root = cJSON_CreateObject(), *nodes = cJSON_AddArrayToObject(root, "nodes");
	add_text(root, "name", m->name);
	add_number(root, "max_bw", m->topo->max_bw);
	add_number(root, "total_bw", m->topo->total_bw);
	for (int32_t i = 0; i < m->topo->nnodes; i++) cJSON_AddItemToArray(nodes, node_json(&m->topo->nodes[i]));
	add_links(root, m->topo);
	add_gpu_pairs(root, m);
	add_net_pairs(root, m);
	add_local(root, m->topo);
	add_faults(root, m);
	char *text = cJSON_Print(root);
	cJSON_Delete(root);
	if (!text) return 1;
	fprintf(out, "%s\n", text);
	cJSON_free(text);
	return 0;
}

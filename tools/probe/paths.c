/* `telpher probe paths`: from GPU memory to GPU memory of another machine by TCP, by RDMA through host memory, by GPUDirect RDMA: for each
 * the copies, the PCIe links, the host memory's bytes and the CPU's time a byte, the bound, and what was measured here. */
#include <popt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "probe/formula.h"
#include "probe/staged.h"
#include "probe/tcp.h"
#include "topo.h"

#define CHUNK ((size_t)1 << 20)
#define LATENCIES 200
#define SOCKET_MEMORY 300                   /* GB/s: eight channels of DDR5-4800 */
#define CORE_COPY 12.5                      /* GB/s: a core copies 10 to 15 … */
#define CORE_TCP 2.5                        /* … and drives 10 to 30 Gb/s of TCP */

struct options { char *device, *size, *gpu_name, *nic_name; const char *machine; double memory_gbs; int gid, gpu, json; size_t bytes; };

struct row { bool measured; double gbs, latency_us, cpu_ns_per_byte; char links[300], note[300]; };
struct answer {
	struct probe_stages stages;
	struct row rows[PROBE_PATHS];
	char machine[200], gpu[64], nic[64], core[64];
	bool gdr_known, gdr_refused;
};

/* The machine's part. */

static void links_text(const struct topo_machine *m, int32_t from, int32_t to, char *out, size_t bytes)
{
	const struct tp_topo_path *path = tp_topo_wire_path(m->topo, from, to);
	char link[48];
	size_t used = (size_t)snprintf(out, bytes, "%s", m->topo->nodes[from].name);
	for (int i = 0; i < path->nhops && used < bytes; i++) {
		const struct tp_topo_link *l = &m->topo->links[path->links[i]];
		topo_link_text(m->topo, l, link, sizeof(link));
		used += (size_t)snprintf(out + used, bytes - used, " -%s- %s", link, m->topo->nodes[l->to].name);
	}
}

static int find_node(const struct topo_machine *m, const char *name, enum tp_topo_kind kind, int32_t *out)
{
	*out = name ? tp_topo_find_name(m->topo, name) : m->topo->count[kind] > 0 ? m->topo->of_kind[kind][0] : -1;
	if (name && *out < 0) {
		char why[320];
		tp_topo_refuse_name(m->topo, m->name, name, why, sizeof(why));
		return probe_fail("%s", why);
	}
	if (name && m->topo->nodes[*out].kind != kind) return probe_fail("\"%s\" is no %s", name, tp_topo_kind_name(kind));
	return 0;
}

/* Both ends on their way to the host's memory and past it; what isn't there leaves its stage out. */
static void machine_stages(const struct topo_machine *m, int32_t gpu, int32_t net, struct answer *a)
{
	const struct tp_topo_node *nodes = m->topo->nodes;
	char up[140] = "", down[140] = "";
	if (net >= 0) {
		snprintf(a->nic, sizeof(a->nic), "%s", nodes[net].name);
		a->stages.nic = nodes[net].net.bw;
		if (nodes[net].near_cpu >= 0) {
			a->stages.nic_host = tp_topo_wire_path(m->topo, nodes[net].near_cpu, net)->bw;
			links_text(m, nodes[net].near_cpu, net, down, sizeof(down));
		}
	}
	if (gpu >= 0) {
		snprintf(a->gpu, sizeof(a->gpu), "%s", nodes[gpu].name);
		if (nodes[gpu].near_cpu >= 0) {
			a->stages.gpu_host = tp_topo_wire_path(m->topo, gpu, nodes[gpu].near_cpu)->bw;
			links_text(m, gpu, nodes[gpu].near_cpu, up, sizeof(up));
		}
	}
	for (int p = PROBE_TCP; p <= PROBE_STAGED; p++)
		snprintf(a->rows[p].links, sizeof(a->rows[p].links), "%s%s%s", up, up[0] && down[0] ? "; " : "", down);
	if (gpu < 0 || net < 0) return;
	struct tp_topo_gdr gdr;
	a->stages.gpu_nic = tp_topo_wire_path(m->topo, gpu, net)->bw;
	links_text(m, gpu, net, a->rows[PROBE_DIRECT].links, sizeof(a->rows[PROBE_DIRECT].links));
	if (tp_topo_decide_gdr(m->topo, &m->policy, gpu, net, true, &gdr) != ncclSuccess) return;
	a->gdr_known = true;
	a->gdr_refused = gdr.mode == TP_GDR_OFF;
	if (a->gdr_refused) snprintf(a->rows[PROBE_DIRECT].note, sizeof(a->rows[PROBE_DIRECT].note), "refused by NCCL's rules: %s", gdr.why.text);
}

/* port: what is measured with; NULL: none. */
static int read_machine(const struct options *o, const struct probe_port *port, struct answer *a)
{
	struct topo_machine m;
	int32_t gpu = -1, net = -1;
	if (topo_open(o->machine, true, &m)) return 1;
	int status = find_node(&m, o->gpu_name, TP_TOPO_GPU, &gpu);
	if (!status && o->nic_name) status = find_node(&m, o->nic_name, TP_TOPO_NET, &net);
	else if (!status && port) net = tp_topo_find_name(m.topo, port->ib->context->name);
	else if (!status) status = find_node(&m, NULL, TP_TOPO_NET, &net);
	if (net >= 0 && m.topo->nodes[net].kind != TP_TOPO_NET) net = -1;
	/* The NIC that goes with this GPU. */
	if (!status && !o->nic_name && !port && gpu >= 0 && tp_topo_local_net(m.topo, gpu, 0) >= 0) net = tp_topo_local_net(m.topo, gpu, 0);
	if (!status) {
		snprintf(a->machine, sizeof(a->machine), "%s", m.name);
		machine_stages(&m, gpu, net, a);
	}
	/* A port that the map doesn't have: the software card, say, which no PCIe link is before. */
	if (!status && port && net < 0) {
		a->stages.nic = port->ib->mbps / 8000.0;
		snprintf(a->nic, sizeof(a->nic), "%.60s", port->ib->text);
	}
	topo_close(&m);
	return status;
}

/* What is measured here. */

/* By the CPU's time, not the clock's: others may use this core too. */
static double copy_rate(const struct probe_memory *from, const struct probe_memory *to, size_t bytes)
{
	double gbs[5];
	for (int i = 0; i < 5; i++) {
		double before = probe_cpu_ns();
		memcpy(to->ptr, from->ptr, bytes);
		gbs[i] = (double)bytes / (probe_cpu_ns() - before);
	}
	return tp_median(gbs, 5);
}

static int measure_tcp(const struct options *o, const struct tp_gpu *gpu, struct answer *a)
{
	struct probe_memory from = { 0 }, to = { 0 };
	struct probe_tcp tcp;
	struct row *row = &a->rows[PROBE_TCP];
	int status = probe_alloc(gpu ? PROBE_GPU : PROBE_HUGE, gpu, o->bytes, -1, &from);
	if (!status) status = probe_tcp_run(gpu, from.ptr, o->bytes, 2, &tcp);
	if (!status && !gpu) status = probe_alloc(PROBE_HUGE, NULL, o->bytes, -1, &to);
	if (!status) {
		row->measured = true;
		row->gbs = tcp.gbs;
		row->latency_us = tcp.latency_us;
		row->cpu_ns_per_byte = tcp.cpu_ns_per_byte;
		snprintf(row->note, sizeof(row->note), "over loopback%s", gpu ? "" : "; host memory stands for the GPU's");
		a->stages.core_tcp = tcp.core_gbs;
		if (!gpu) a->stages.core_copy = copy_rate(&from, &to, o->bytes);
		snprintf(a->core, sizeof(a->core), "measured here");
	}
	if (from.ptr) probe_free(&from);
	if (to.ptr) probe_free(&to);
	return status;
}

static int measure_staged(const struct options *o, const struct probe_port *port, const struct tp_gpu *gpu, struct row *row)
{
	struct probe_staged staged;
	double gbs[3], cpu = 0;
	int status = probe_staged_open(port, gpu, o->bytes, -1, &staged);
	if (status) return status;
	for (int i = 0; i < 3 && !status; i++) {
		double start = probe_now_us(), before = probe_cpu_ns();
		status = probe_staged_move(&staged, o->bytes, CHUNK);
		gbs[i] = (double)o->bytes / (probe_now_us() - start) / 1000;
		cpu += (probe_cpu_ns() - before) / (double)o->bytes / 3;
	}
	if (!status) status = probe_staged_check(&staged, o->bytes);
	if (!status) status = probe_loop_latency(&staged.loop, 8, LATENCIES, &row->latency_us);
	if (!status) {
		row->measured = true;
		row->gbs = tp_median(gbs, 3);
		row->cpu_ns_per_byte = cpu;
		snprintf(row->note, sizeof(row->note), "%s with itself, nothing overlaps%s%s", port->ib->text, gpu ? "" : "; host memory stands for the GPU's",
			port->verbs->software ? "; the software card's copying is CPU time too" : "");
	}
	probe_staged_close(&staged);
	return status;
}

/* Many machines have no GPUDirect: the other two ways are worth knowing there. What fails once memory is registered is an error. */
static int measure_direct(const struct options *o, const struct probe_port *port, const struct tp_gpu *gpu, struct row *row)
{
	struct probe_memory from = { 0 }, to = { 0 };
	struct probe_loop loop = { 0 };
	double cpu = 0;
	bool dma_buf = false;
	int status = probe_alloc(PROBE_GPU, gpu, o->bytes, -1, &from);
	if (!status) status = probe_alloc(PROBE_GPU, gpu, o->bytes, -1, &to);
	bool registered = !status && probe_register_either(port, &from, &dma_buf) == 0 && probe_register_either(port, &to, &dma_buf) == 0;
	if (!status && !registered) {
		snprintf(row->note, sizeof(row->note), "not run here: %.250s", probe_last_error());
		goto free_memory;
	}
	if (!status) status = probe_loop_open(port, &from, &to, &loop);
	if (!status) status = probe_loop_latency(&loop, 8, LATENCIES, &row->latency_us);
	double before = probe_cpu_ns();
	if (!status) status = probe_loop_stream(&loop, o->bytes, 4, &row->gbs);
	cpu = (probe_cpu_ns() - before) / (double)o->bytes / 4;
	if (!status) {
		row->measured = true;
		row->cpu_ns_per_byte = cpu;
		snprintf(row->note, sizeof(row->note), "%s with itself, %s%s", port->ib->text, dma_buf ? "as DMA-BUF" : "by address",
			port->verbs->software ? "; the software card copies" : "");
	}
	probe_loop_close(&loop);
free_memory:
	if (from.ptr) probe_free(&from);
	if (to.ptr) probe_free(&to);
	return status;
}

/* What can't run here stays computed; why is said, and is no error of the command. */
static int measure_rdma(const struct options *o, const struct probe_port *port, const struct tp_gpu *gpu, struct answer *a)
{
	struct row *staged = &a->rows[PROBE_STAGED], *direct = &a->rows[PROBE_DIRECT];
	if (!port) {
		snprintf(staged->note, sizeof(staged->note), "not run here: %.250s", probe_last_error());
		if (!direct->note[0]) snprintf(direct->note, sizeof(direct->note), "not run here: no RDMA port");
		return 0;
	}
	if (measure_staged(o, port, gpu, staged)) return 1;
	if (gpu) return measure_direct(o, port, gpu, direct);
	if (!direct->note[0]) snprintf(direct->note, sizeof(direct->note), "not run here: no GPU (--gpu N)");
	return 0;
}

/* The answer. */

static void print_row(const struct answer *a, enum probe_path p)
{
	const struct probe_path_facts *f = &probe_path_facts[p];
	const struct row *r = &a->rows[p];
	const char *limit;
	double bound = probe_path_bound(p, &a->stages, &limit);
	char x[32], y[32], z[32];
	printf("\n%s\n  copies at each end         %d\n  host memory, bytes a byte  %d\n  CPU                        %s\n", f->name, f->copies, f->memory_accesses, f->cpu);
	if (r->links[0]) printf("  links at each end          %s\n", r->links);
	if (bound > 0) printf("  bound, one stream          %s GB/s: %s\n", probe_digits(bound, x), limit);
	else printf("  bound, one stream          not known: neither NIC nor GPU; telpher probe paths dgx-h100 computes a known machine\n");
	if (r->measured)
		printf("  measured                   %s GB/s, %s us one way, CPU %s ns a byte, both ends\n", probe_digits(r->gbs, x), probe_digits(r->latency_us, y),
			probe_digits(r->cpu_ns_per_byte, z));
	if (r->note[0]) printf("  %-25s  %s\n", r->measured ? "how" : "", r->note);
}

static void print_all(const struct options *o, const struct answer *a)
{
	char x[32];
	printf("From GPU memory to GPU memory of another machine; %s%s%s%s%s\n", a->machine, a->gpu[0] ? ", " : "", a->gpu, a->nic[0] ? ", " : "", a->nic);
	for (int p = 0; p < PROBE_PATHS; p++) print_row(a, (enum probe_path)p);
	printf("\nBounds are the least of the stages. PCIe as NCCL counts it (telpher calc pcie), host memory %g GB/s (--memory), a core copies %s GB/s", o->memory_gbs,
		probe_digits(a->stages.core_copy, x));
	printf(" and drives %s GB/s of TCP (%s).\n", probe_digits(a->stages.core_tcp, x), a->core);
}

static int print_as_json(const struct answer *a)
{
	static const char *const keys[] = { "tcp", "rdma_staged", "gpudirect" };
	cJSON *json = cJSON_CreateObject(), *paths = cJSON_AddArrayToObject(json, "paths");
	cJSON_AddStringToObject(json, "machine", a->machine);
	cJSON_AddStringToObject(json, "gpu", a->gpu);
	cJSON_AddStringToObject(json, "nic", a->nic);
	for (int p = 0; p < PROBE_PATHS; p++) {
		const struct row *r = &a->rows[p];
		const char *limit;
		double bound = probe_path_bound((enum probe_path)p, &a->stages, &limit);
		cJSON *one = cJSON_CreateObject();
		cJSON_AddStringToObject(one, "path", keys[p]);
		cJSON_AddNumberToObject(one, "copies", probe_path_facts[p].copies);
		cJSON_AddNumberToObject(one, "memory_bytes_per_byte", probe_path_facts[p].memory_accesses);
		cJSON_AddStringToObject(one, "links", r->links);
		cJSON_AddNumberToObject(one, "bound_gbs", bound);
		cJSON_AddStringToObject(one, "limit", limit);
		if (r->measured) {
			cJSON_AddNumberToObject(one, "measured_gbs", r->gbs);
			cJSON_AddNumberToObject(one, "latency_us", r->latency_us);
			cJSON_AddNumberToObject(one, "cpu_ns_per_byte", r->cpu_ns_per_byte);
		}
		if (r->note[0]) cJSON_AddStringToObject(one, "note", r->note);
		if (p == PROBE_DIRECT && a->gdr_known) cJSON_AddBoolToObject(one, "allowed", !a->gdr_refused);
		cJSON_AddItemToArray(paths, one);
	}
	return probe_print_json(json);
}

static int of_this_machine(const struct options *o, struct answer *a)
{
	const struct tp_gpu *gpu = NULL;
	struct probe_port port, *has = NULL;
	int status = o->gpu >= 0 ? probe_find_gpu(o->gpu, &gpu) : 0;
	/* Before the port: this one forks. */
	if (!status) status = measure_tcp(o, gpu, a);
	if (status) return status;
	if (probe_open_port(o->device, o->gid, &port) == 0) has = &port;
	/* A port that was asked for must be there. */
	else if (o->device) return 1;
	status = read_machine(o, has, a);
	return status ? status : measure_rdma(o, has, gpu, a);
}

static int run(const struct options *o)
{
	struct answer a = { .stages = { .memory = o->memory_gbs, .core_copy = CORE_COPY, .core_tcp = CORE_TCP }, .core = "usual figures" };
	int status = o->machine ? read_machine(o, NULL, &a) : of_this_machine(o, &a);
	if (status) return status;
	for (int p = 0; p < PROBE_PATHS && o->machine; p++)
		if (!a.rows[p].note[0]) snprintf(a.rows[p].note, sizeof(a.rows[p].note), "computed");
	if (o->json) return print_as_json(&a);
	print_all(o, &a);
	return 0;
}

int probe_paths(int argc, char **argv)
{
	struct options o = { .gid = -1, .gpu = PROBE_UNSET, .memory_gbs = SOCKET_MEMORY, .bytes = (size_t)32 << 20 };
	struct poptOption options[] = {
		{ "device", 'd', POPT_ARG_STRING, &o.device, 0, "RDMA device to measure with (the first that can be used)", "DEV" },
		{ "gid", 'g', POPT_ARG_INT, &o.gid, 0, "index of the port's GID (chosen)", "GID" },
		{ "gpu", 0, POPT_ARG_INT, &o.gpu, 0, "measure with memory of this GPU", "N" },
		{ "size", 's', POPT_ARG_STRING, &o.size, 0, "bytes to move (32M)", "BYTES" },
		{ "from", 0, POPT_ARG_STRING, &o.gpu_name, 0, "the machine's GPU to reckon with, as gpu3 (its first)", "NAME" },
		{ "nic", 0, POPT_ARG_STRING, &o.nic_name, 0, "and the NIC, as mlx5_1 (the GPU's own)", "NAME" },
		{ "memory", 0, POPT_ARG_DOUBLE, &o.memory_gbs, 0, "memory bandwidth of a socket (300)", "GB/s" },
		{ "json", 0, POPT_ARG_NONE, &o.json, 0, "print JSON", NULL },
		POPT_AUTOHELP
		POPT_TABLEEND
	};
	poptContext context = poptGetContext(argv[0], argc, (const char **)argv, options, 0);
	if (!context) return probe_fail("out of memory");
	poptSetOtherOptionHelp(context, "[FILE|MODEL] [OPTIONS]\n\nWithout FILE or MODEL: this machine, and measured.");
	int code = tool_next_option(context, options), status;
	o.machine = poptGetArg(context);
	if (code < -1) status = probe_usage("%s: %s", poptBadOption(context, 0), poptStrerror(code));
	else if (poptPeekArg(context)) status = probe_usage("one FILE or MODEL, not \"%s\" too", poptPeekArg(context));
	else if (o.size && (!tool_parse_size(o.size, &o.bytes) || o.bytes < 8)) status = probe_usage("-s %s: no size of 8 bytes or more", o.size);
	else if (!(o.memory_gbs >= 1 && o.memory_gbs <= 1e6)) status = probe_usage("--memory %g: from 1 to 1000000 GB/s", o.memory_gbs);
	else if (o.machine && (o.device || o.gpu != PROBE_UNSET)) status = probe_usage("-d and --gpu measure this machine: not with a FILE or MODEL");
	else if (o.gpu < 0 && o.gpu != PROBE_UNSET) status = probe_usage("--gpu %d: GPUs are numbered from 0", o.gpu);
	else if (o.gid < -1 || o.gid > 255) status = probe_usage("-g %d: a GID's index is from 0 to 255", o.gid);
	else status = run(&o);
	free(o.device);
	free(o.size);
	free(o.gpu_name);
	free(o.nic_name);
	poptFreeContext(context);
	return status;
}

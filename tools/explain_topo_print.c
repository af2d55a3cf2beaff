/* `telpher explain --topo` for people. */
#include "explain_topo.h"

#include <stdlib.h>
#include <string.h>

#include "coll.h"

/* Three digits, whatever the size. */
static const char *us_text(double us, char text[32])
{
	if (us >= 100) snprintf(text, 32, "%.0f", us);
	else snprintf(text, 32, "%.*f", us >= 10 ? 1 : 2, us);
	return text;
}

static const char *bytes_text(double bytes, char text[32])
{
	static const char *const units[] = { "B", "KB", "MB", "GB", "TB" };
	int unit = 0;
	while (unit < 4 && bytes >= 1000) {
		bytes /= 1000;
		unit++;
	}
	snprintf(text, 32, "%.3g %s", bytes, units[unit]);
	return text;
}

/* ---- The machine ---- */

static void print_channels(const struct explain_case *c, const struct tp_channels *all, const char *what, FILE *out)
{
	if (!all->nchannels || c->nranks < 2) return;
	fprintf(out, "  %d %s%s of %.4g GB/s inside", all->nchannels, what, all->nchannels == 1 ? "" : "s", all->bw_intra);
	if (c->nhosts > 1) fprintf(out, " and %.4g across hosts", all->bw_inter);
	fprintf(out, "; paths %s", tp_topo_path_name(all->type_intra));
	if (c->nhosts > 1) fprintf(out, ", to the network %s", tp_topo_path_name(all->type_inter));
	fprintf(out, "\n");
	for (int i = 0; i < all->nfindings; i++) fprintf(out, "    %s: %s\n", tp_finding_code(all->findings[i].kind), all->findings[i].text);
}

static const char *source_of(bool measured) { return measured ? "measured" : "planned"; }

static void print_costs(const struct explain_case *c, FILE *out)
{
	bool used[TP_PATH_TYPES] = { false };
	if (c->nranks < 2) return;
	for (int a = 0; a < c->ngpus; a++)
		for (int b = 0; b < c->ngpus; b++)
			if (a != b) used[tp_topo_path(c->topo, tp_topo_node_of(c->topo, TP_TOPO_GPU, a)->index, tp_topo_node_of(c->topo, TP_TOPO_GPU, b)->index)->type] = true;
	fprintf(out, "  a hop takes");
	const char *comma = "";
	for (int t = 0; t < TP_PATH_TYPES; t++) {
		if (!used[t]) continue;
		fprintf(out, "%s %.3g us by %s (%s)", comma, c->costs.hop_us[t], tp_topo_path_name((enum tp_topo_path_type)t), source_of(c->costs.hop_measured[t]));
		comma = ",";
	}
	if (c->nhosts > 1)
		fprintf(out, "%s %.3g us across hosts (%s) and %.3g for the engine", comma, c->costs.net_us, source_of(c->costs.net_measured), c->engine_us);
	fprintf(out, "\n");
	for (int k = 0; k < TP_WIRE_KINDS; k++)
		if (c->costs.yield_measured[k])
			fprintf(out, "  %s wires carry %.0f %% of their planned bandwidth (measured)\n", tp_topo_link_name((enum tp_topo_link_kind)k), 100 * c->costs.yield[k]);
}

/* As the library has it (topo/search.h, rails). */
static void print_ports(const struct explain_case *c, FILE *out)
{
	enum { MOST = 16 };
	if (!c->rails || c->nranks < 2) return;
	fprintf(out, "  to other hosts go");
	for (int r = 0; r < TP_MIN(c->rails->nrails, MOST); r++) {
		const struct tp_rail *rail = &c->rails->rails[r];
		fprintf(out, "%s %s by", r ? ";" : "", c->topo->nodes[rail->gpu].name);
		for (int n = 0; n < rail->nnets; n++) fprintf(out, "%s %s", n ? "," : "", c->topo->nodes[rail->nets[n]].name);
		if (rail->nnets) fprintf(out, " (%s)", tp_topo_path_name(rail->type));
		else fprintf(out, " nothing");
	}
	fprintf(out, "%s\n", c->rails->nrails > MOST ? "; …" : "");
}

static double carries(const struct tp_way *way) { return 1e-3 / (double)way->inside_us; }

/* By what the library chooses: what the paths carry, and whether its table of fused kernels counts. */
static void print_evenness(const struct explain_case *c, FILE *out)
{
	const struct tp_way *pairs = &c->machine.of[TP_ALL_REDUCE][TP_ALGO_TWO_SHOT], *ring = &c->machine.of[TP_ALL_REDUCE][TP_ALGO_RING];
	if (c->ngpus < 2 || c->nhosts > 1 || pairs->inside_us <= 0 || ring->inside_us <= 0) return;
	bool even = tp_ways_are_even(&c->machine);
	fprintf(out, "  an all-reduce of a host carries %.4g GB/s by all pairs at once, %.4g by rings: its GPUs are %sjoined alike", carries(pairs), carries(ring), even ? "" : "not ");
	if (!c->is_nvidia) fprintf(out, "\n");
	else if (!c->all_reach) fprintf(out, "; not all reach each other's memory, so there are no fused kernels\n");
	else fprintf(out, ", so %s\n", even ? "fused kernels run up to the sizes that they were measured for" : "times decide, and not what fused kernels were measured for");
}

static void print_machine(const struct explain_case *c, FILE *out)
{
	int nets = c->topo->count[TP_TOPO_NET];
	fprintf(out, "Machine: %s", c->name);
	if (c->nhosts > 1) fprintf(out, ", %d of it", c->nhosts);
	fprintf(out, ": %d rank%s, %d GPU%s and %d network port%s on each host\n", c->nranks, c->nranks == 1 ? "" : "s", c->ngpus, c->ngpus == 1 ? "" : "s", nets,
		nets == 1 ? "" : "s");
	if (c->topo->nhosts > 1)
		fprintf(out, "  its %d hosts are one NVLink domain, and taken as one host as NCCL does; between hosts our links use the network\n", c->topo->nhosts);
	print_channels(c, c->rings, "ring", out);
	print_channels(c, c->trees, "tree", out);
	if (c->pairs->nchannels)
		fprintf(out, "  all pairs through a switch: %d head%s of %.4g GB/s\n", c->pairs->nchannels, c->pairs->nchannels == 1 ? "" : "s", c->pairs->bw_intra);
	if (c->layout->norders) fprintf(out, "  our rings go along %d of these\n", c->layout->norders);
	print_evenness(c, out);
	print_ports(c, out);
	print_costs(c, out);
}

/* ---- A limit, hop by hop ---- */

static void print_limit(const struct explain_case *c, const char *where, const struct tp_topo_limit *limit, size_t block, FILE *out)
{
	char load[32], us[32], kind[40], mark[80];
	if (limit->link < 0) return;
	const struct tp_topo_link *link = &c->topo->links[limit->link];
	topo_link_text(c->topo, link, kind, sizeof(kind));
	double bytes = limit->load * (double)block;
	fprintf(out, "  %s: %s -> %s (%s, %.4g GB/s) carries %s of %d flow%s: %s us\n", where, c->topo->nodes[link->from].name, c->topo->nodes[link->to].name, kind,
		link->bw * tp_topo_costs_yield(&c->costs, c->topo, limit->link), bytes_text(bytes, load), limit->flows, limit->flows == 1 ? "" : "s", us_text(limit->us * (double)block, us));
	if (limit->from < 0) return;
	const struct tp_topo_path *path = tp_topo_path(c->topo, limit->from, limit->to);
	fprintf(out, "  from %s to %s, hop by hop:\n", c->topo->nodes[limit->from].name, c->topo->nodes[limit->to].name);
	snprintf(mark, sizeof(mark), "the limit");
	topo_print_hops(c->topo, path, limit->link, mark, out);
}

/* Those that count: what takes less than a twentieth of the time limits nothing. */
static void print_limits(const struct explain_case *c, const struct explain_times *t, int algo, size_t block, FILE *out)
{
	const struct tp_topo_load *load = &c->ways[algo].load;
	double least = t->of[algo].us / 20;
	if (load->inside.us * (double)block >= least) print_limit(c, "inside", &load->inside, block, out);
	if (load->across.us * (double)block >= least) print_limit(c, "across", &load->across, block, out);
}

/* The plan's rings go along those that are found without relays, one NIC a GPU; others may carry more. */
static void print_rings(const struct explain_case *c, const struct explain_times *t, FILE *out)
{
	const struct tp_topo_load *load = &c->ways[TP_ALGO_RING].load;
	if (t->of[TP_ALGO_RING].us < 0 || !c->has_ring_load || c->q->coll != TP_ALL_REDUCE || c->nranks < 2) return;
	double moved = 2.0 * (c->nranks - 1) / c->nranks / 1000, plan = moved / TP_MAX(load->inside.us, load->across.us);
	double found = c->rings->nchannels * (c->nhosts > 1 ? c->rings->bw_inter : c->rings->bw_intra);
	if (plan >= found * 0.9) return;
	fprintf(out, "The plan's rings %s carry %.4g GB/s; the rings found above would carry %.4g.\n",
		c->layout->norders ? "along the channels that need no relays" : "in the order of ranks", plan, found);
}

/* ---- Our own plans ---- */

static int by_time(const void *a, const void *b, void *arg)
{
	const struct explain_times *times = arg;
	const int *x = a, *y = b;
	double s = times->of[*x].us, t = times->of[*y].us;
	if ((s < 0) != (t < 0)) return s < 0 ? 1 : -1;
	if (s != t) return s < t ? -1 : 1;
	return *x - *y;
}

static void print_ways(const struct explain_case *c, const struct explain_times *t, FILE *out)
{
	int order[TP_NALGOS];
	for (int a = 0; a < TP_NALGOS; a++) order[a] = a;
	qsort_r(order, TP_NALGOS, sizeof(order[0]), by_time, (void *)t);
	fprintf(out, "\nTelpher's plans:\n  %-18s %10s %8s %10s %10s %10s %10s  %s\n", "algorithm", "us", "times", "latency", "inside", "network", "reduction", "most of it");
	for (int i = 0; i < TP_NALGOS; i++) {
		const struct explain_time *x = &t->of[order[i]];
		const char *name = tp_algo_name((enum tp_algo)order[i]);
		char us[5][32];
		if (x->us < 0) {
			fprintf(out, "  %-18s %10s %8s  %s\n", name, "-", "-", c->ways[order[i]].why_not);
			continue;
		}
		fprintf(out, "%c %-18s %10s %8.2f %10s %10s %10s %10s  %s%s\n", order[i] == t->best ? '*' : ' ', name, us_text(x->us, us[0]), x->us / t->of[t->best].us,
			us_text(x->latency_us, us[1]), us_text(x->inside_us, us[2]), us_text(x->across_us, us[3]), us_text(x->reduce_us, us[4]), explain_dominant(x),
			c->ways[order[i]].left_out ? "; NCCL_ALGO leaves it out" : "");
	}
	fprintf(out, "  (latency: what it takes however few the bytes; inside, network: the wires; the terms overlap in time)\n");
}

/* The one that comes next of those allowed; -1: there is none. */
static int second(const struct explain_case *c, const struct explain_times *t)
{
	int next = -1;
	for (int a = 0; a < TP_NALGOS; a++)
		if (a != t->best && t->of[a].us >= 0 && !c->ways[a].left_out && (next < 0 || t->of[a].us < t->of[next].us)) next = a;
	return next;
}

static void print_choice(const struct explain_case *c, const struct explain_times *t, FILE *out)
{
	const struct explain_time *x = &t->of[t->best];
	const char *name = tp_algo_name((enum tp_algo)t->best);
	int next = second(c, t);
	char us[32];
	fprintf(out, "\nChosen: %s on %d channel%s, %s us", name, x->nchannels, x->nchannels == 1 ? "" : "s", us_text(x->us, us));
	if (c->nranks < 2) {
		fprintf(out, ", as any would be: one rank only copies.\n");
		return;
	}
	if (next < 0) fprintf(out, ": the only one that is possible%s", c->q->filter ? " and allowed" : "");
	else if (t->best != t->least)
		fprintf(out, ": what fused kernels were measured to be best with between GPUs that are joined alike (TELPHER_CUDA_TABLE); by the model %s takes %.2f times as long",
			tp_algo_name((enum tp_algo)t->least), t->of[t->least].us / x->us);
	else fprintf(out, ": the least; the next, %s, takes %.2f times as long", tp_algo_name((enum tp_algo)next), t->of[next].us / x->us);
	fprintf(out, ". Most of it is %s.\n", explain_dominant(x));
	if (t->least != t->best_of_all && t->best == t->least)
		fprintf(out, "NCCL_ALGO=%s costs %.2f times what %s would take, which it leaves out.\n", c->q->filter, x->us / t->of[t->best_of_all].us,
			tp_algo_name((enum tp_algo)t->best_of_all));
}

/* What moves it. */
static void print_kernel(const struct explain_case *c, const struct explain_times *t, FILE *out)
{
	if (c->nranks < 2) return;
	if (!t->kernel) {
		fprintf(out, "Kernel: none; %s.\n", c->is_nvidia ? "there is nothing to move" : "the library has kernels for NVIDIA's GPUs");
		return;
	}
	fprintf(out, "Kernel: %s (%s)", t->kernel, explain_kernel_text(t->kernel));
	if (t->in_windows) fprintf(out, "; between symmetric windows: %s (%s)", t->in_windows, explain_kernel_text(t->in_windows));
	fprintf(out, ".\n");
}

/* What NCCL_ALGO=Ring and =Tree would cost. */
static void print_forced(const struct explain_case *c, const struct explain_times *t, size_t block, FILE *out)
{
	static const struct { int algo; const char *name; } forced[] = { { TP_ALGO_RING, "Ring" }, { TP_ALGO_TREE, "Tree" } };
	for (size_t i = 0; i < TP_ARRAY_LEN(forced); i++) {
		const struct explain_time *x = &t->of[forced[i].algo];
		char us[32];
		if (x->us < 0 || forced[i].algo == t->best) continue;
		fprintf(out, "NCCL_ALGO=%s would cost %.2f times as much: %s us, most of it %s.\n", forced[i].name, x->us / t->of[t->best].us, us_text(x->us, us), explain_dominant(x));
		if (forced[i].algo == TP_ALGO_RING) print_limits(c, t, TP_ALGO_RING, block, out);
	}
	print_rings(c, t, out);
}

/* ---- NCCL's ---- */

static void print_nccl_row(const struct explain_nccl_times *t, int a, int p, FILE *out)
{
	const struct explain_nccl_time *x = &t->of[a][p];
	char us[3][32];
	fprintf(out, "%c %-9s %-7s %10s %8.2f %10s %10s %9d\n", a == t->algo && p == t->proto ? '*' : ' ', tp_nccl_algo_name((enum tp_nccl_algo)a),
		tp_nccl_proto_name((enum tp_nccl_proto)p), us_text(x->us, us[0]), x->us / t->of[t->algo][t->proto].us, us_text(x->latency_us, us[1]),
		us_text(x->data_us, us[2]), x->nchannels);
}

/* Where no protocol of an algorithm is possible for one reason, one line says it. */
static void print_nccl_refusals(const struct explain_nccl_times *t, int a, FILE *out)
{
	bool all = explain_nccl_best_proto(t, a) < 0;
	if (all) {
		fprintf(out, "  %-9s %-7s %10s           %s\n", tp_nccl_algo_name((enum tp_nccl_algo)a), "", "-", t->of[a][TP_NCCL_SIMPLE].why_not);
		return;
	}
	for (int p = 0; p < TP_NCCL_PROTOS; p++)
		if (t->of[a][p].us < 0 && a <= TP_NCCL_RING)
			fprintf(out, "  %-9s %-7s %10s           %s\n", tp_nccl_algo_name((enum tp_nccl_algo)a), tp_nccl_proto_name((enum tp_nccl_proto)p), "-", t->of[a][p].why_not);
}

static void print_nccl_choice(const struct explain_case *c, const struct explain_nccl_times *t, FILE *out)
{
	const struct explain_nccl_time *x = &t->of[t->algo][t->proto];
	char us[32];
	fprintf(out, "NCCL would take %s with %s on %d channel%s: %s us, most of it %s.\n", tp_nccl_algo_name((enum tp_nccl_algo)t->algo),
		tp_nccl_proto_name((enum tp_nccl_proto)t->proto), x->nchannels, x->nchannels == 1 ? "" : "s", us_text(x->us, us), x->latency_us > x->data_us ? "latency" : "bytes over bandwidth");
	for (int a = TP_NCCL_TREE; a <= TP_NCCL_RING; a++) {
		int p = explain_nccl_best_proto(t, a);
		if (p < 0 || a == t->algo) continue;
		fprintf(out, "There NCCL_ALGO=%s would cost %.2f times as much: %s us with %s, most of it %s.\n", tp_nccl_algo_name((enum tp_nccl_algo)a), t->of[a][p].us / x->us,
			us_text(t->of[a][p].us, us), tp_nccl_proto_name((enum tp_nccl_proto)p), t->of[a][p].latency_us > t->of[a][p].data_us ? "latency" : "bytes over bandwidth");
	}
	if (!c->has_ring_load || c->ring_load.inside.link < 0) return;
	const struct tp_topo_limit *limit = c->nhosts > 1 && c->ring_load.across.us > c->ring_load.inside.us ? &c->ring_load.across : &c->ring_load.inside;
	const struct tp_topo_link *link = &c->topo->links[limit->link];
	fprintf(out, "Its rings are bound by %s -> %s: %.4g of %.4g GB/s.\n", c->topo->nodes[link->from].name, c->topo->nodes[link->to].name, limit->load, link->bw);
}

static void print_nccl(const struct explain_case *c, size_t bytes, FILE *out)
{
	struct explain_nccl_times t;
	explain_nccl_times_of(c, bytes, &t);
	if (t.algo < 0) return;
	fprintf(out, "\nNCCL 2.30.7's tables, on the channels found here:\n  %-9s %-7s %10s %8s %10s %10s %9s\n", "algorithm", "proto", "us", "times", "latency", "bytes/bw", "channels");
	for (int a = 0; a < TP_NCCL_ALGOS; a++)
		for (int p = 0; p < TP_NCCL_PROTOS; p++)
			if (t.of[a][p].us >= 0) print_nccl_row(&t, a, p, out);
	for (int a = 0; a < TP_NCCL_ALGOS; a++) print_nccl_refusals(&t, a, out);
	print_nccl_choice(c, &t, out);
}

/* ---- All of it ---- */

static int print_ranges(const struct explain_case *c, bool nccl, FILE *out)
{
	struct explain_range list[EXPLAIN_MOST_RANGES];
	int count;
	if (explain_ranges(c, nccl, list, &count) != ncclSuccess) return 1;
	fprintf(out, "%s", nccl ? "  NCCL:    " : "  Telpher: ");
	for (int i = 0; i < count; i++) {
		char size[32];
		const char *name = nccl ? tp_nccl_algo_name((enum tp_nccl_algo)list[i].algo) : tp_algo_name((enum tp_algo)list[i].algo);
		fprintf(out, "%s%s%s%s", i ? ", " : "", name, nccl ? "/" : "", nccl ? tp_nccl_proto_name((enum tp_nccl_proto)list[i].proto) : "");
		if (i + 1 < count) fprintf(out, " to %s", tool_size_text(list[i].to, size));
		else if (count > 1) fprintf(out, " from there on");
	}
	fprintf(out, "\n");
	return 0;
}

static void print_message(const struct explain_case *c, size_t bytes, FILE *out)
{
	char whole[32], block[32];
	fprintf(out, "\nMessage: %s of %s %s", tp_coll_name(c->q->coll), tool_size_text(bytes, whole), c->q->type_name);
	if (tool_is_reduction(c->q->coll)) fprintf(out, ", %s", c->q->op_name);
	if (tool_is_rooted(c->q->coll)) fprintf(out, ", root %d", c->q->root);
	if (tool_has_blocks(c->q->coll)) fprintf(out, ": a block of %s a rank", tool_size_text(explain_block(c, bytes), block));
	fprintf(out, "\n");
}

static const char *why_no_nccl(const struct explain_case *c)
{
	if (!c->is_nvidia) return "its tables are for NVIDIA's GPUs; RCCL has others";
	if (!c->has_func) return "it makes sends and receives of this, and has nothing to choose";
	return c->nranks < 2 ? "one rank only copies" : NULL;
}

int explain_topo_print(const struct explain_case *c, FILE *out)
{
	const char *no_nccl = why_no_nccl(c);
	print_machine(c, out);
	if (c->q->filter) fprintf(out, "NCCL_ALGO: %s\n", c->q->filter);
	for (int i = 0; i < c->q->nsizes; i++) {
		struct explain_times t;
		size_t bytes = c->q->sizes[i];
		if (explain_times_of(c, bytes, &t) != ncclSuccess) return 1;
		print_message(c, bytes, out);
		print_ways(c, &t, out);
		print_choice(c, &t, out);
		print_kernel(c, &t, out);
		print_limits(c, &t, t.best, explain_block(c, bytes), out);
		if (c->nranks > 1) print_forced(c, &t, explain_block(c, bytes), out);
		if (!no_nccl) print_nccl(c, bytes, out);
	}
	if (no_nccl) fprintf(out, "\nWhat NCCL would take isn't said: %s.\n", no_nccl);
	fprintf(out, "\nBy size, powers of two from 8 B to 8 GiB:\n");
	int status = print_ranges(c, false, out);
	return status || no_nccl ? status : print_ranges(c, true, out);
}

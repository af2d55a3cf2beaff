/* What NCCL 2.30.7 takes a collective to cost: latency + bytes / bandwidth, of every algorithm with every protocol; the least is what it runs.
 * Its tables and rules are facts; they are measured by its makers on machines of theirs, and known to be rough in between. Left out:
 * CollNet (switches that reduce), whatever variables and plug-ins change, kernels for registered windows. */
#include "topo/cost.h"

#include <math.h>

enum { VOLTA, AMPERE, HOPPER, BLACKWELL, GENERATIONS };
enum { ONE_HOST, TWO_HOSTS, MORE_HOSTS };
enum { NVLINK, PCIE, NETWORK };

/* us: LL, LL128, Simple. */
static const double base_us[TP_NCCL_ALGOS][TP_NCCL_PROTOS] = {
	[TP_NCCL_TREE] = { 6.8, 14, 8.4 }, [TP_NCCL_RING] = { 6.6, 14, 8.4 }, [TP_NCCL_PAT] = { 8, 8, 8 },
};
static const double hop_us[3][TP_NCCL_ALGOS][TP_NCCL_PROTOS] = {
	[NVLINK] = { [TP_NCCL_TREE] = { 0.6, 1.25, 4 }, [TP_NCCL_RING] = { 0.6, 1.9, 3.4 }, [TP_NCCL_NVLS] = { 0, 0, 25 }, [TP_NCCL_NVLS_TREE] = { 0, 0, 25 },
		[TP_NCCL_PAT] = { 0, 0, 4 } },
	[PCIE] = { [TP_NCCL_TREE] = { 1, 1.9, 4 }, [TP_NCCL_RING] = { 1, 2.5, 5.7 }, [TP_NCCL_PAT] = { 0, 0, 4 } },
	[NETWORK] = { [TP_NCCL_TREE] = { 5, 8.5, 14 }, [TP_NCCL_RING] = { 2.7, 4, 14 }, [TP_NCCL_NVLS] = { 0, 0, 18 }, [TP_NCCL_NVLS_TREE] = { 0, 0, 20.9 },
		[TP_NCCL_PAT] = { 0, 0, 14 } },
};
/* GB/s: on one host, two, more. LL's between hosts goes by the CPUs' maker: first row Intel and others, second AMD. */
static const double ll_most[GENERATIONS][3] = { { 39, 39, 20.4 }, { 87.7, 22.5, 19 }, { 141, 45, 35 }, { 282, 90, 70 } };
static const double ring_ll128_most[GENERATIONS] = { 20, 20, 36.7, 40 };        /* of a channel; so all below */
static const double tree_ll128_most[GENERATIONS][3] = { { 20, 20, 20 }, { 20, 20, 20 }, { 36.7, 36.7, 29 }, { 55.6, 31.67, 20 } };
static const double tree_most[GENERATIONS][3] = { { 26.5, 18.5, 10 }, { 24, 23.6, 17.8 }, { 38.7, 41.4, 36 }, { 70, 42.8, 24 } };
static const double nvls_tree_most[GENERATIONS][3] = { { 26.5, 18.5, 10 }, { 24, 23.6, 17.8 }, { 0, 57.7, 45.5 }, { 0, 96, 80 } };
static const double nvls_efficiency[GENERATIONS] = { 0, 0, 0.85, 0.74 };
/* What trees make of their bandwidth, from 64 bytes on, by powers of two. */
#define TREE_SIZES 24
static const double tree_factor[TP_NCCL_PROTOS][TREE_SIZES] = {
	{ 1, 1, 1, 1, .9, .8, .7, .7, .7, .7, .6, .5, .4, .4, .5, .6, .7, .8, .9, 1, 1, 1, 1, 1 },
	{ 1, 1, 1, 1, 1, .9, .8, .8, .8, .7, .6, .6, .6, .6, .6, .6, .8, .9, .9, .9, .9, 1, 1, 1 },
	{ .9, .9, .9, .9, .9, .9, .9, .8, .7, .6, .6, .5, .5, .5, .5, .6, .7, .8, .7, .7, .8, .9, .9, .9 },
};
/* Bandwidths of a channel that NCCL tries for NVLS on one host; ours is rounded down to one, since its efficiencies were measured with them. */
static const double hopper_tries[] = { 60, 50, 40, 30, 24, 20, 15, 12, 11, 6, 3 };
static const double blackwell_tries[] = { 90, 80, 70, 60, 50, 45, 40, 30, 24, 20, 19, 18 };

const char *tp_nccl_algo_name(enum tp_nccl_algo algo)
{
	static const char *const names[TP_NCCL_ALGOS] = { "Tree", "Ring", "NVLS", "NVLSTree", "PAT" };
	return names[algo];
}

const char *tp_nccl_proto_name(enum tp_nccl_proto proto)
{
	static const char *const names[TP_NCCL_PROTOS] = { "LL", "LL128", "Simple" };
	return names[proto];
}

static int generation_of(int sm) { return sm >= 100 ? BLACKWELL : sm >= 90 ? HOPPER : sm >= 80 ? AMPERE : VOLTA; }
static int hosts_of(const struct tp_nccl_job *job) { return job->nhosts > 2 ? MORE_HOSTS : job->nhosts - 1; }

static int log2_down(double n)
{
	int bits = 0;
	while (n >= 2) {
		n /= 2;
		bits++;
	}
	return bits;
}

/* ---- The job ---- */

static double round_to_tried(double bw, int sm)
{
	const double *tries = sm >= 100 ? blackwell_tries : hopper_tries;
	size_t count = sm >= 100 ? TP_ARRAY_LEN(blackwell_tries) : TP_ARRAY_LEN(hopper_tries);
	for (size_t i = 0; i < count; i++)
		if (tries[i] <= bw * (1 + 1e-6)) return tries[i];
	return bw;
}

static struct tp_nccl_graph graph_of(const struct tp_channels *c)
{
	if (!c) return (struct tp_nccl_graph){ .nchannels = 0 };
	return (struct tp_nccl_graph){ .nchannels = c->nchannels, .bw_intra = c->bw_intra, .bw_inter = c->bw_inter, .latency_us = c->latency_inter_us,
		.type_intra = c->type_intra, .type_inter = c->type_inter, .same = c->same, .pattern = c->pattern };
}

void tp_nccl_job_of(const struct tp_topo *topo, const struct tp_channels *rings, const struct tp_channels *trees, const struct tp_channels *pairs,
	int nhosts, struct tp_nccl_job *out)
{
	struct tp_nccl_job job = { .nranks = nhosts * topo->count[TP_TOPO_GPU], .nhosts = nhosts, .sm_min = 1 << 20 };
	for (int g = 0; g < topo->count[TP_TOPO_GPU]; g++) {
		const struct tp_topo_node *gpu = tp_topo_node_of(topo, TP_TOPO_GPU, g);
		job.sm_min = TP_MIN(job.sm_min, gpu->gpu.sm);
		job.sm_max = TP_MAX(job.sm_max, gpu->gpu.sm);
	}
	for (int c = 0; c < topo->count[TP_TOPO_CPU]; c++) {
		const struct tp_topo_node *cpu = tp_topo_node_of(topo, TP_TOPO_CPU, c);
		job.arch = cpu->cpu.arch;
		job.intel |= cpu->cpu.arch == TP_ARCH_X86 && cpu->cpu.vendor == TP_VENDOR_INTEL;
		job.amd |= cpu->cpu.arch == TP_ARCH_X86 && cpu->cpu.vendor == TP_VENDOR_AMD;
	}
	job.graphs[TP_NCCL_RING] = graph_of(rings);
	job.graphs[TP_NCCL_TREE] = job.graphs[TP_NCCL_PAT] = graph_of(trees);
	if (job.sm_min >= 90) job.graphs[TP_NCCL_NVLS] = graph_of(pairs);
	struct tp_nccl_graph *nvls = &job.graphs[TP_NCCL_NVLS];
	/* A head's share stays where it is; NCCL counts as if it travelled. */
	double n = topo->count[TP_TOPO_GPU];
	if (nvls->nchannels) nvls->bw_intra = round_to_tried(nvls->bw_intra * (n - 1) / n, job.sm_min);
	if (nhosts == 1) nvls->bw_inter = INFINITY;
	job.graphs[TP_NCCL_NVLS_TREE] = *nvls;
	*out = job;
}

/* ---- Which are there ---- */

static const char *refuse_ll128(const struct tp_nccl_job *job, const struct tp_nccl_graph *graph)
{
	if (job->sm_min < 70) return "LL128 is for sm70 and newer";
	if (job->sm_min < 90 && job->sm_min != job->sm_max) return "LL128 is for GPUs of one kind";
	if (graph->type_intra > TP_PATH_NVB) return "LL128 needs NVLink between all neighbours: elsewhere 128 bytes may not arrive as one";
	if (job->nhosts > 1 && graph->type_inter > (job->sm_min >= 90 ? TP_PATH_PXN : TP_PATH_PXB)) return "LL128 needs ports nearer than through a CPU";
	return NULL;
}

static const char *refuse_nvls(const struct tp_nccl_job *job, enum tp_nccl_func func, enum tp_nccl_algo algo, enum tp_nccl_proto proto)
{
	if (proto != TP_NCCL_SIMPLE) return "multicast has no flags in its data";
	if (job->sm_min < 90) return "NVLink multicast is there from sm90 on";
	if (job->graphs[algo].nchannels < 2) return "there is no NVSwitch that all GPUs are behind";
	if (algo == TP_NCCL_NVLS && job->nhosts > 1) return "between hosts it needs network switches that reduce (CollNet)";
	if (algo == TP_NCCL_NVLS_TREE && job->nhosts == 1) return "it is for several hosts";
	if (algo == TP_NCCL_NVLS_TREE && func != TP_NCCL_ALL_REDUCE) return "it does all-reduce only";
	return NULL;
}

static const char *refuse(const struct tp_nccl_job *job, enum tp_nccl_func func, enum tp_nccl_algo algo, enum tp_nccl_proto proto)
{
	if (job->nranks < 2) return "one rank only copies";
	if ((func == TP_NCCL_BROADCAST || func == TP_NCCL_REDUCE) && algo != TP_NCCL_RING) return "broadcast and reduce have rings only";
	if (algo == TP_NCCL_TREE && func != TP_NCCL_ALL_REDUCE) return "trees do all-reduce only";
	if (algo == TP_NCCL_PAT && func == TP_NCCL_ALL_REDUCE) return "it does all-gather and reduce-scatter only";
	if (algo == TP_NCCL_PAT && job->nhosts != job->nranks) return "it is for one GPU a host";
	if (algo == TP_NCCL_PAT && proto != TP_NCCL_SIMPLE) return "it has Simple only";
	if (algo == TP_NCCL_NVLS || algo == TP_NCCL_NVLS_TREE) return refuse_nvls(job, func, algo, proto);
	if (job->graphs[algo].nchannels < 1) return "there are no channels";
	return proto == TP_NCCL_LL128 ? refuse_ll128(job, &job->graphs[algo]) : NULL;
}

/* ---- Bandwidth ---- */

static double nvls_bw(const struct tp_nccl_job *job, enum tp_nccl_func func, enum tp_nccl_algo algo)
{
	const struct tp_nccl_graph *graph = &job->graphs[algo];
	int generation = generation_of(job->sm_min);
	double n = graph->nchannels, local = (double)job->nranks / job->nhosts;
	double bw = graph->bw_intra * nvls_efficiency[generation] * (n - 1) / n * (func == TP_NCCL_ALL_REDUCE ? 2 : (local - 1) / local);
	bw = TP_MIN(bw, graph->bw_inter * (algo == TP_NCCL_NVLS_TREE && job->nhosts <= 2 ? 2 : 1));
	return algo == TP_NCCL_NVLS_TREE ? TP_MIN(bw, nvls_tree_most[generation][hosts_of(job)]) : bw;
}

static int steps_of(enum tp_nccl_func func, int nranks)
{
	switch (func) {
	case TP_NCCL_ALL_REDUCE: return 2 * (nranks - 1);
	case TP_NCCL_ALL_GATHER: case TP_NCCL_REDUCE_SCATTER: return nranks - 1;
	default: return nranks;
	}
}

static double bandwidth_of(const struct tp_nccl_job *job, enum tp_nccl_func func, enum tp_nccl_algo algo, enum tp_nccl_proto proto)
{
	const struct tp_nccl_graph *graph = &job->graphs[algo];
	int generation = generation_of(job->sm_min), hosts = hosts_of(job);
	double ll = ll_most[job->nhosts == 1 ? generation : job->amd][hosts], n = graph->nchannels;
	bool nvls = algo == TP_NCCL_NVLS || algo == TP_NCCL_NVLS_TREE;
	double bus = n * (nvls ? nvls_bw(job, func, algo) : job->nhosts <= 2 ? graph->bw_intra : graph->bw_inter);
	if (algo == TP_NCCL_RING && proto == TP_NCCL_LL) bus = TP_MIN(ll, bus * 0.5);
	if (algo == TP_NCCL_RING && proto == TP_NCCL_LL128) bus = TP_MIN(bus * 0.92, n * ring_ll128_most[generation]);
	if (algo == TP_NCCL_TREE) {
		bus = TP_MIN(bus * 0.92, n * tree_most[generation][hosts]);
		if (proto == TP_NCCL_LL) bus = TP_MIN(bus / 3.8, ll);
		if (proto == TP_NCCL_LL128) bus = TP_MIN(bus * (job->nhosts == 1 ? 7.0 / 9 : 120.0 / 128), n * tree_ll128_most[generation][hosts]);
		if (graph->pattern == TP_PATTERN_TREE) bus *= 0.85;
	}
	if (algo == TP_NCCL_PAT) bus *= 0.75;
	if (algo == TP_NCCL_RING || (nvls && func == TP_NCCL_ALL_REDUCE)) return bus * job->nranks / steps_of(func, job->nranks);
	return func == TP_NCCL_ALL_REDUCE ? bus * 0.5 : bus;
}

/* ---- Latency ---- */

static double ring_latency(const struct tp_nccl_job *job, enum tp_nccl_func func, enum tp_nccl_proto proto, double inside, double across)
{
	const struct tp_nccl_graph *graph = &job->graphs[TP_NCCL_RING];
	int steps = steps_of(func, job->nranks), wire = job->nhosts > 1 ? NETWORK : graph->type_intra == TP_PATH_NVL ? NVLINK : PCIE;
	if (func == TP_NCCL_BROADCAST || func == TP_NCCL_REDUCE) {
		if (graph->same) return hop_us[wire][TP_NCCL_RING][proto];
		return steps * hop_us[wire][proto == TP_NCCL_SIMPLE ? TP_NCCL_TREE : TP_NCCL_RING][proto];
	}
	/* Posting to the network, which steps inside wait for as well. */
	double post = job->nhosts == 1 ? 0 : (job->amd && !job->intel ? 2 : 1) * (proto == TP_NCCL_SIMPLE ? 3 : 1);
	int between = (func == TP_NCCL_ALL_REDUCE ? 2 : 1) * (job->nhosts - 1);
	return (steps - between) * TP_MAX(inside, post) + between * across;
}

static double latency_of(const struct tp_nccl_job *job, enum tp_nccl_func func, enum tp_nccl_algo algo, enum tp_nccl_proto proto)
{
	const struct tp_nccl_graph *graph = &job->graphs[algo];
	bool alone = job->nhosts == job->nranks;        /* a rank a host: nothing hides the network */
	double inside = hop_us[graph->type_intra == TP_PATH_NVL ? NVLINK : PCIE][algo][proto], base = base_us[algo][proto];
	double across = hop_us[NETWORK][alone ? TP_NCCL_TREE : algo][proto] + graph->latency_us * (proto == TP_NCCL_SIMPLE ? 2 : 1);
	/* Power's rings and trees over the CPU are alike. */
	if (job->arch == TP_ARCH_POWER && algo == TP_NCCL_TREE && proto == TP_NCCL_SIMPLE && graph->type_intra != TP_PATH_NVL)
		inside = hop_us[PCIE][TP_NCCL_RING][proto];
	switch (algo) {
	case TP_NCCL_RING: return base + ring_latency(job, func, proto, inside, across);
	case TP_NCCL_TREE: return base + 2 * ((job->nranks / job->nhosts - 1) * inside + log2_down(job->nhosts) * across);
	case TP_NCCL_NVLS: return inside + (job->nhosts > 1 ? across : 0);
	case TP_NCCL_NVLS_TREE: return base + inside + 2 * log2_down(job->nhosts) * across;
	default: return base + log2_down(job->nhosts) * across / 3.5 + job->nranks * 2.8;
	}
}

/* ---- Time ---- */

void tp_nccl_cost_of(const struct tp_nccl_job *job, enum tp_nccl_func func, enum tp_nccl_algo algo, enum tp_nccl_proto proto,
	struct tp_nccl_cost *out)
{
	*out = (struct tp_nccl_cost){ .why_not = refuse(job, func, algo, proto) };
	if (out->why_not) return;
	out->latency_us = latency_of(job, func, algo, proto);
	out->gbps = bandwidth_of(job, func, algo, proto);
}

/* NCCL makes two channels of each that its search finds. */
static int channels_of(const struct tp_nccl_job *job)
{
	return TP_MIN(2 * TP_MIN(job->graphs[TP_NCCL_RING].nchannels, job->graphs[TP_NCCL_TREE].nchannels), 64);
}

double tp_nccl_time(const struct tp_nccl_job *job, enum tp_nccl_func func, enum tp_nccl_algo algo, enum tp_nccl_proto proto, size_t bytes,
	double *latency_us, double *data_us)
{
	struct tp_nccl_cost cost;
	tp_nccl_cost_of(job, func, algo, proto, &cost);
	if (cost.why_not || cost.gbps <= 0) return -1;
	double lines = (double)(bytes >> 6), size = lines >= 1 ? log2_down(lines) : -1;
	bool reduces = func == TP_NCCL_ALL_REDUCE;
	if (algo == TP_NCCL_TREE && reduces && size >= 0 && size < TREE_SIZES - 1) cost.gbps *= tree_factor[proto][(int)size];
	if (algo == TP_NCCL_NVLS_TREE && reduces && size >= 0 && size < TREE_SIZES && job->sm_min >= 100 && job->arch == TP_ARCH_X86)
		cost.gbps *= tree_factor[proto][(int)size];
	/* Rings over hosts level off before they carry what they could. */
	if (algo == TP_NCCL_RING && proto == TP_NCCL_SIMPLE && job->nhosts > 1 && reduces && bytes / ((size_t)channels_of(job) * (size_t)job->nranks) >= 64)
		cost.latency_us *= job->sm_min < 80 ? 1.9 : 1.4;
	double data = (double)bytes / (1000 * cost.gbps);
	if (latency_us) *latency_us = cost.latency_us;
	if (data_us) *data_us = data;
	return cost.latency_us + data;
}

int tp_nccl_channels(const struct tp_nccl_job *job, enum tp_nccl_algo algo, enum tp_nccl_proto proto, size_t bytes)
{
	const struct tp_nccl_graph *ring = &job->graphs[TP_NCCL_RING];
	int n = channels_of(job), threads = proto == TP_NCCL_LL128 ? 640 : 512;
	if (algo == TP_NCCL_NVLS || algo == TP_NCCL_NVLS_TREE) return job->graphs[algo].nchannels;
	if (algo == TP_NCCL_RING && proto == TP_NCCL_SIMPLE && ring->bw_intra * ring->nchannels <= 12) threads = 256;
	size_t least = proto == TP_NCCL_SIMPLE ? 64 : proto == TP_NCCL_LL && algo == TP_NCCL_RING ? 8 * (size_t)job->nranks : 8;
	while (n > 1 && bytes < (size_t)n * (size_t)threads * least) n--;
	return n;
}

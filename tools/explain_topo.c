/* `telpher explain --topo`: which algorithm suits a collective on a machine that is described, and why. What each plan sends is counted in the
 * plan's own programs and laid over the machine's links; the link that limits becomes a constant of the library's cost model, and the
 * chooser's own code says the times. Beside them stands what NCCL's tables say on the channels that the search finds. */
#include "explain_topo.h"

#include <stdlib.h>
#include <string.h>

#include "coll.h"
#include "exec/cuda.h"

#define MOST_RANKS 16384
#define EACH_HOST 64            /* hosts: up to here each is looked at, beyond a few */
/* What GPU ranks have unless they are told otherwise (NCCL_MAX_CTAS): channels in one host, and where there are others. */
#define CHANNELS_INSIDE 32
#define CHANNELS_ACROSS 16

static int failed(const char *what)
{
	fprintf(stderr, "telpher explain: %s: %s\n", what, tp_log_last_error());
	return 1;
}

/* ---- The machine ---- */

/* "dgx-h100x32": a name and how often, unless all of it is a name. "this": this machine. */
static int read_name(struct explain_case *c)
{
	const char *text = c->q->machine, *x = strrchr(text, 'x');
	size_t length = strlen(text);
	c->nhosts = 1;
	if (!topo_is_known(text) && x && x > text && x[1] >= '1' && x[1] <= '9' && strspn(x + 1, "0123456789") == strlen(x + 1) && strlen(x + 1) < 6) {
		c->nhosts = atoi(x + 1);
		length = (size_t)(x - text);
	}
	if (length >= sizeof(c->name)) return tool_usage_error("explain", "--topo: a name of %zu characters", length);
	snprintf(c->name, sizeof(c->name), "%.*s", (int)length, text);
	if (strcmp(c->name, "this") == 0 || topo_is_known(c->name)) return 0;
	return tool_usage_error("explain", "--topo %s: there is no file or model \"%s\"; `telpher topo model` lists the models, and x32 behind a name makes it 32 hosts",
		text, c->name);
}

static int count_ranks(struct explain_case *c)
{
	int wanted = c->q->nranks, had = c->topo->count[TP_TOPO_GPU];
	if (!had) return tool_usage_error("explain", "%s has no GPUs: leave --topo out, and say -n and --hosts for host ranks", c->name);
	if (wanted && wanted % c->nhosts)
		return tool_usage_error("explain", "-n %d: %d hosts can't share %d ranks evenly", wanted, c->nhosts, wanted);
	c->ngpus = wanted ? wanted / c->nhosts : had;
	if (c->ngpus < 1 || c->ngpus > had)
		return tool_usage_error("explain", "-n %d: %s has %d GPU%s on each of %d host%s, and a rank has one", wanted, c->name, had, had == 1 ? "" : "s", c->nhosts,
			c->nhosts == 1 ? "" : "s");
	if ((int64_t)c->ngpus * c->nhosts > MOST_RANKS)
		return tool_usage_error("explain", "--topo %s: from 1 to %d ranks can be explained", c->q->machine, MOST_RANKS);
	c->nranks = c->ngpus * c->nhosts;
	return 0;
}

static ncclResult_t build(struct explain_case *c)
{
	tp_topo_free(c->topo);
	c->topo = NULL;
	TP_TRY(tp_topo_build(c->doc, &c->topo));
	TP_TRY(tp_topo_policy_load(&c->policy));
	c->policy.multi_host = c->nhosts > 1;
	c->policy.net_within = TP_OFF;          /* our links between ranks of a host are no network's */
	return tp_topo_compute_paths(c->topo, &c->policy);
}

static int open_machine(struct explain_case *c)
{
	int status = read_name(c);
	if (status) return status;
	bool here = strcmp(c->name, "this") == 0 && !topo_is_known(c->name);
	if (here) snprintf(c->name, sizeof(c->name), "this machine");
	if (topo_load(here ? NULL : c->name, false, c->q->json ? NULL : stderr, &c->doc) != ncclSuccess || build(c) != ncclSuccess) return failed(c->name);
	status = count_ranks(c);
	if (status || c->ngpus == c->topo->count[TP_TOPO_GPU]) return status;
	if (tp_topo_doc_keep_gpus(c->doc, c->ngpus) != ncclSuccess || build(c) != ncclSuccess) return failed(c->name);
	return 0;
}

/* ---- What plans send ---- */

/* The busiest of the hosts. Of many a few stand for all: plans treat them alike but for the root's, the first and the last. */
static ncclResult_t find_load(const struct explain_case *c, enum tp_coll coll, int algo, bool *can, struct tp_topo_load *out)
{
	const struct tp_ways_host host = { .graph = c->topo, .rails = c->rails, .costs = &c->costs, .layout = c->layout, .gpus = c->gpus };
	int few[] = { 0, 1, c->nhosts / 2, c->nhosts - 2, c->nhosts - 1 }, count = c->nhosts <= EACH_HOST ? c->nhosts : (int)TP_ARRAY_LEN(few);
	for (int i = 0; i < count; i++) {
		struct tp_topo_load load;
		TP_TRY(tp_ways_load(&host, coll, (enum tp_algo)algo, c->nhosts <= EACH_HOST ? i : few[i], can, &load));
		if (!*can) return ncclSuccess;
		if (!i || load.inside.us > out->inside.us * (1 + 1e-9)) out->inside = load.inside;
		if (!i || load.across.us > out->across.us * (1 + 1e-9)) out->across = load.across;
	}
	return ncclSuccess;
}

static struct tp_plan_spec spec_of(const struct explain_case *c, int algo)
{
	return (struct tp_plan_spec){ .coll = c->q->coll, .algo = (enum tp_algo)algo, .root = tool_is_rooted(c->q->coll) ? c->q->root : -1, .nchannels = 1,
		.layout = c->layout };
}

static ncclResult_t find_way(struct explain_case *c, int algo)
{
	struct explain_way *way = &c->ways[algo];
	struct tp_plan_spec spec = spec_of(c, algo);
	bool can;
	way->why_not = tp_plan_refuses(&spec);
	if (way->why_not) return ncclSuccess;
	TP_TRY(find_load(c, c->q->coll, algo, &can, &way->load));
	c->machine.of[c->q->coll][algo] = tp_way_of((enum tp_algo)algo, &way->load);
	return ncclSuccess;
}

/* By these two the library judges whether all are joined alike. */
static ncclResult_t find_evenness(struct explain_case *c)
{
	static const enum tp_algo judged[] = { TP_ALGO_RING, TP_ALGO_TWO_SHOT };
	for (size_t i = 0; i < TP_ARRAY_LEN(judged); i++) {
		struct tp_topo_load load;
		bool can;
		TP_TRY(find_load(c, TP_ALL_REDUCE, judged[i], &can, &load));
		if (can) c->machine.of[TP_ALL_REDUCE][judged[i]] = tp_way_of(judged[i], &load);
	}
	return ncclSuccess;
}

/* Does each GPU reach the memory of all others, and by NVLink? Fused kernels need the one, lines of 128 bytes the other. */
static ncclResult_t find_reach(struct explain_case *c)
{
	c->all_reach = c->all_nvlink = c->is_nvidia && c->nhosts == 1;
	for (int a = 0; a < c->ngpus && c->all_reach; a++)
		for (int b = 0; b < c->ngpus; b++) {
			struct tp_topo_p2p p2p;
			if (a == b) continue;
			TP_TRY(tp_topo_decide_p2p(c->topo, &c->policy, tp_topo_node_of(c->topo, TP_TOPO_GPU, a)->index, tp_topo_node_of(c->topo, TP_TOPO_GPU, b)->index, &p2p));
			c->all_reach &= p2p.use;
			c->all_nvlink &= p2p.type == TP_PATH_NVL;
		}
	return ncclSuccess;
}

/* ---- The case ---- */

static bool find_func(enum tp_coll coll, enum tp_nccl_func *out)
{
	switch (coll) {
	case TP_ALL_REDUCE: *out = TP_NCCL_ALL_REDUCE; return true;
	case TP_ALL_GATHER: *out = TP_NCCL_ALL_GATHER; return true;
	case TP_REDUCE_SCATTER: *out = TP_NCCL_REDUCE_SCATTER; return true;
	case TP_BROADCAST: *out = TP_NCCL_BROADCAST; return true;
	case TP_REDUCE: *out = TP_NCCL_REDUCE; return true;
	default: return false;
	}
}

static ncclResult_t find_channels(struct explain_case *c)
{
	c->is_nvidia = true;
	for (int g = 0; g < c->ngpus; g++) {
		const struct tp_topo_node *gpu = tp_topo_node_of(c->topo, TP_TOPO_GPU, g);
		c->is_nvidia &= gpu->gpu.maker == TP_MAKER_NVIDIA;
		c->sm = g ? TP_MIN(c->sm, gpu->gpu.sm) : gpu->gpu.sm;
	}
	TP_TRY(tp_channels_load(c->topo, &c->policy, TP_PATTERN_RING, &c->rings));
	TP_TRY(tp_channels_load(c->topo, &c->policy, TP_PATTERN_TREE, &c->trees));
	TP_TRY(tp_channels_load(c->topo, &c->policy, TP_PATTERN_PAIRS, &c->pairs));
	c->has_ring_load = !tp_channels_stand_in(c->rings);
	if (c->has_ring_load) TP_TRY(tp_topo_channels_load(c->topo, c->rings, &c->ring_load));
	tp_nccl_job_of(c->topo, c->rings, c->trees, c->pairs, c->nhosts, &c->job);
	c->has_func = find_func(c->q->coll, &c->func);
	return ncclSuccess;
}

/* As communicators have it (comm/orders.c): rings along those that are found where GPUs relay for nobody. */
static ncclResult_t order_rings(struct explain_case *c)
{
	struct tp_channels *rings;
	TP_TRY(tp_channels_load(c->topo, &c->policy, TP_PATTERN_RING, &rings));
	int norders = c->nranks > 2 && !tp_channels_stand_in(rings) ? TP_MIN(rings->nchannels, c->nhosts > 1 ? CHANNELS_ACROSS : CHANNELS_INSIDE) : 0;
	int *orders = norders ? tp_alloc((size_t)norders * (size_t)c->nranks, sizeof(*orders), "the orders of rings") : NULL;
	ncclResult_t result = !norders || orders ? ncclSuccess : ncclSystemError;
	for (int o = 0; o < norders && result == ncclSuccess; o++)
		for (int r = 0; r < c->nranks; r++) {
			const struct tp_channel *channel = &rings->channels[tp_cluster_turn(rings, o, r / c->ngpus)];
			orders[o * c->nranks + r] = r / c->ngpus * c->ngpus + c->topo->nodes[channel->gpus[r % c->ngpus]].ordinal;
		}
	if (result == ncclSuccess) result = tp_layout_set_orders(c->layout, norders, orders);
	free(orders);
	tp_channels_free(rings);
	return result;
}

static struct tp_ways_call call_of(const struct explain_case *c, size_t block, const char *filter)
{
	return (struct tp_ways_call){ .layout = c->layout, .ways = &c->machine, .library = &c->library, .coll = c->q->coll, .root = tool_is_rooted(c->q->coll) ? c->q->root : -1,
		.nchannels = c->nhosts > 1 ? CHANNELS_ACROSS : CHANNELS_INSIDE, .block_bytes = block, .staged = c->q->staged, .filter = filter };
}

static ncclResult_t note_filter(struct explain_case *c)
{
	struct tp_choice choice;
	const struct tp_ways_call call = call_of(c, c->q->element, c->q->filter);
	TP_TRY(tp_choose_check_algo(c->q->filter));
	TP_TRY(tp_ways_choose(&call, &choice));
	for (int a = 0; a < TP_NALGOS; a++) c->ways[a].left_out = !c->ways[a].why_not && choice.candidates[a].why_not;
	return ncclSuccess;
}

static ncclResult_t find_out(struct explain_case *c)
{
	TP_TRY(tool_layout(c->nranks, c->nhosts, &c->layout));
	TP_TRY(tp_cost_load_gpu(&c->library));
	c->gpus = tp_alloc((size_t)c->ngpus, sizeof(*c->gpus), "GPUs");
	if (!c->gpus) return ncclSystemError;
	for (int g = 0; g < c->ngpus; g++) c->gpus[g] = g;
	TP_TRY(find_channels(c));
	/* NCCL lets GPUs relay for others, to GPUs (NVB) and to ports (PXN); our links do not. */
	c->policy.nvb = c->policy.pxn = false;
	TP_TRY(tp_topo_compute_paths(c->topo, &c->policy));
	TP_TRY(order_rings(c));
	if (c->nhosts > 1) TP_TRY(tp_rails_assign(c->topo, &c->policy, &c->rails));
	TP_TRY(tp_topo_costs_of(c->doc, c->topo, &c->policy, c->rails, &c->costs));
	c->engine_us = tp_ways_engine_us();
	c->machine = (struct tp_ways){ .known = true, .net_us = (float)(c->costs.net_us + c->engine_us) };
	TP_TRY(find_evenness(c));
	TP_TRY(find_reach(c));
	for (int a = 0; a < TP_NALGOS; a++) TP_TRY(find_way(c, a));
	for (int a = 0; a < TP_NALGOS; a++) tp_ways_model(&c->machine, c->layout, c->q->coll, (enum tp_algo)a, &c->library, &c->ways[a].model);
	return note_filter(c);
}

static void let_go(struct explain_case *c)
{
	tp_layout_free(c->layout);
	free(c->gpus);
	tp_channels_free(c->rings);
	tp_channels_free(c->trees);
	tp_channels_free(c->pairs);
	tp_rails_free(c->rails);
	tp_topo_free(c->topo);
	tp_topo_doc_free(c->doc);
}

int explain_topo(const struct explain_topo_request *q)
{
	struct explain_case c = { .q = q };
	int status = open_machine(&c);
	if (!status && q->root >= c.nranks) status = tool_usage_error("explain", "--root %d: ranks are 0 to %d", q->root, c.nranks - 1);
	if (!status && find_out(&c) != ncclSuccess) status = failed("no plan");
	if (!status && (q->json ? explain_topo_json(&c, stdout) : explain_topo_print(&c, stdout))) status = failed("no times");
	let_go(&c);
	return status;
}

/* ---- Times ---- */

size_t explain_block(const struct explain_case *c, size_t bytes)
{
	return bytes / (tool_has_blocks(c->q->coll) ? (size_t)c->nranks : 1) / c->q->element * c->q->element;
}

/* The model without what its fields of the kinds left out take. */
static double term(const struct tp_plan_spec *spec, size_t block, size_t chunk, struct tp_cost_model m, bool latency, bool inside, bool across, bool reduce)
{
	if (!latency) m.call_us = m.inside.latency_us = m.inside.step_us = m.across.latency_us = m.across.step_us = 0;
	if (!inside) m.copy_us_per_byte = m.inside.us_per_byte = 0;
	if (!across) m.across.us_per_byte = 0;
	if (!reduce) m.reduce_us_per_byte = 0;
	return tp_cost_predict(spec, block, chunk, &m);
}

static struct explain_time time_of(const struct explain_case *c, int algo, size_t block, const struct tp_candidate *found)
{
	const struct explain_way *way = &c->ways[algo];
	struct tp_plan_spec spec = spec_of(c, algo);
	struct tp_choice only = { .algo = (enum tp_algo)algo };
	const struct tp_ways_call call = call_of(c, block, NULL);
	size_t chunk = found->chunk_bytes;
	tp_ways_fit(&call, false, TP_ALGO_RING, &only);
	return (struct explain_time){ .us = found->us, .chunk_bytes = chunk, .nchannels = only.nchannels,
		.latency_us = term(&spec, block, chunk, way->model, true, false, false, false), .inside_us = term(&spec, block, chunk, way->model, false, true, false, false),
		.across_us = term(&spec, block, chunk, way->model, false, false, true, false), .reduce_us = term(&spec, block, chunk, way->model, false, false, false, true) };
}

/* As communicators do: the model's least of those allowed, and over it what fused kernels want. */
static ncclResult_t choose(const struct explain_case *c, size_t block, struct explain_times *t)
{
	const struct tp_ways_call call = call_of(c, block, c->q->filter);
	struct tp_choice choice;
	enum tp_algo wanted = TP_ALGO_RING;
	bool wants = false;
	TP_TRY(tp_ways_choose(&call, &choice));
	t->least = (int)choice.algo;
	/* Where they don't reach each other there is one rank, as far as fused kernels go. */
	const struct tp_cuda_foreseen ranks = { .nranks = c->all_reach ? c->nranks : 1, .sm = c->sm, .nvlink = c->all_nvlink };
	TP_TRY(tp_cuda_suggest_for(&ranks, c->q->coll, block, &wants, &wanted));
	t->by_table = tp_ways_fit(&call, wants, wanted, &choice);
	t->best = (int)choice.algo;
	if (c->is_nvidia && c->nranks > 1 && block) TP_TRY(tp_cuda_kernel_for(&ranks, c->q->coll, choice.algo, block, &t->kernel, &t->in_windows));
	return ncclSuccess;
}

ncclResult_t explain_times_of(const struct explain_case *c, size_t bytes, struct explain_times *out)
{
	size_t block = explain_block(c, bytes);
	const struct tp_ways_call all = call_of(c, block, NULL);
	struct explain_times t = { .best_of_all = -1 };
	struct tp_choice choice;
	TP_TRY(tp_ways_choose(&all, &choice));
	for (int a = 0; a < TP_NALGOS; a++) {
		t.of[a].us = -1;
		if (!c->ways[a].why_not) t.of[a] = time_of(c, a, block, &choice.candidates[a]);
	}
	t.best_of_all = (int)choice.algo;
	TP_TRY(choose(c, block, &t));
	*out = t;
	return ncclSuccess;
}

const char *explain_dominant(const struct explain_time *t)
{
	double most = TP_MAX(TP_MAX(t->latency_us, t->inside_us), TP_MAX(t->across_us, t->reduce_us));
	return most == t->latency_us ? "latency" : most == t->across_us ? "network" : most == t->inside_us ? "wires inside" : "reduction";
}

const char *explain_kernel_text(const char *kernel)
{
	static const struct { const char *name, *text; } kinds[] = {
		{ "/LL", "one kernel, in lines of 16 bytes, half of each flags" }, { "/LL128", "one kernel, in lines of 128 bytes that carry their flags" },
		{ "/PIPE", "one kernel, through pipes: bulk copies push chunks into rings at the receiver" }, { "/STREAM", "one kernel, as sends and receives in lines of 128 bytes" },
		{ "/WINDOW", "one kernel, straight out of the others' windows and into them" }, { "/COPY", "copy engines, between two kernels that say when" },
	};
	const char *protocol = strchr(kernel, '/');
	for (size_t i = 0; i < TP_ARRAY_LEN(kinds) && protocol; i++)
		if (strcmp(kinds[i].name, protocol) == 0) return kinds[i].text;
	return "not fused: a kernel does the plan's steps, through slots";
}

void explain_nccl_times_of(const struct explain_case *c, size_t bytes, struct explain_nccl_times *out)
{
	*out = (struct explain_nccl_times){ .algo = -1, .proto = -1 };
	for (int a = 0; a < TP_NCCL_ALGOS; a++) {
		for (int p = 0; p < TP_NCCL_PROTOS; p++) {
			struct explain_nccl_time *t = &out->of[a][p];
			struct tp_nccl_cost cost;
			tp_nccl_cost_of(&c->job, c->func, (enum tp_nccl_algo)a, (enum tp_nccl_proto)p, &cost);
			t->why_not = cost.why_not;
			t->us = tp_nccl_time(&c->job, c->func, (enum tp_nccl_algo)a, (enum tp_nccl_proto)p, bytes, &t->latency_us, &t->data_us);
			if (t->us < 0) continue;
			t->nchannels = tp_nccl_channels(&c->job, (enum tp_nccl_algo)a, (enum tp_nccl_proto)p, bytes);
			if (out->algo >= 0 && t->us >= out->of[out->algo][out->proto].us) continue;
			out->algo = a;
			out->proto = p;
		}
	}
}

int explain_nccl_best_proto(const struct explain_nccl_times *t, int algo)
{
	int best = -1;
	for (int p = 0; p < TP_NCCL_PROTOS; p++)
		if (t->of[algo][p].us >= 0 && (best < 0 || t->of[algo][p].us < t->of[algo][best].us)) best = p;
	return best;
}

ncclResult_t explain_ranges(const struct explain_case *c, bool nccl, struct explain_range *out, int *count)
{
	int n = 0;
	for (int shift = 3; shift <= 33; shift++) {
		struct explain_range r = { .to = (size_t)1 << shift, .proto = -1 };
		if (nccl) {
			struct explain_nccl_times t;
			explain_nccl_times_of(c, r.to, &t);
			r.algo = t.algo;
			r.proto = t.proto;
		} else {
			struct explain_times t;
			TP_TRY(explain_times_of(c, r.to, &t));
			r.algo = t.best;
		}
		if (n && out[n - 1].algo == r.algo && out[n - 1].proto == r.proto) out[n - 1].to = r.to;
		else out[n++] = r;
	}
	*count = n;
	return ncclSuccess;
}

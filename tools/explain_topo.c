/* `telpher explain --topo`: which algorithm suits a collective on a machine that is described, and why. What each plan sends is counted in the
 * plan's own programs and laid over the machine's links; the link that limits becomes a constant of the library's cost model, and the
 * chooser's own code says the times. Beside them stands what NCCL's tables say on the channels that the search finds. */
#include "explain_topo.h"

#include <stdlib.h>
#include <string.h>

#include "coll.h"

#define MOST_RANKS 16384
#define EACH_HOST 64            /* hosts: up to here each is looked at, beyond a few */
/* What GPU ranks have unless they are told otherwise (NCCL_MAX_CTAS): channels in one host, and where there are others; a ring's slot. */
#define CHANNELS_INSIDE 32
#define CHANNELS_ACROSS 16
#define RING_SLOT ((size_t)128 << 10)

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

struct counting { struct explain_case *c; const struct tp_plan_spec *spec; struct tp_topo_traffic traffic; };

/* A chunk of each of the plan's sends and receives is a piece of a block. */
static void count_program(struct counting *n, const struct tp_program *p, double piece)
{
	const struct tp_layout *l = n->c->layout;
	int own = l->place[p->rank];
	for (uint32_t s = 0; s < p->nsteps; s++) {
		const struct tp_step *step = &p->steps[s];
		for (uint32_t i = 0; i < step->nsrc + (uint32_t)step->ndst; i++) {
			const struct tp_operand *o = &p->operands[step->first + i];
			const struct tp_plan_link *link = o->where == TP_LINK ? &p->links[o->index] : NULL;
			bool sent = i >= step->nsrc;
			if (!link || link->from == link->to) continue;
			if (l->domain[link->from] != l->domain[link->to]) (sent ? n->traffic.out : n->traffic.in)[own] += piece;
			else if (sent) n->traffic.pairs[own * n->c->ngpus + l->place[link->to]] += piece;
		}
	}
}

static ncclResult_t count_host(struct counting *n, int host)
{
	size_t gpus = (size_t)n->c->ngpus;
	memset(n->traffic.pairs, 0, (gpus * gpus + 2 * gpus) * sizeof(double));
	for (int g = 0; g < n->c->ngpus; g++) {
		struct tp_plan *plan;
		TP_TRY(tp_plan_create(n->spec, host * n->c->ngpus + g, &plan));
		for (uint32_t i = 0; i < plan->nprograms; i++) count_program(n, &plan->programs[i], 1.0 / plan->pieces / n->spec->nchannels);
		tp_plan_free(plan);
	}
	return ncclSuccess;
}

/* The busiest of the hosts. Of many a few stand for all: plans treat them alike but for the root's, the first and the last. */
static ncclResult_t find_load(struct counting *n, struct tp_topo_load *out)
{
	struct explain_case *c = n->c;
	int few[] = { 0, 1, c->nhosts / 2, c->nhosts - 2, c->nhosts - 1, c->layout->domain[c->q->root] }, count = c->nhosts <= EACH_HOST ? c->nhosts : (int)TP_ARRAY_LEN(few);
	for (int i = 0; i < count; i++) {
		struct tp_topo_load load;
		TP_TRY(count_host(n, c->nhosts <= EACH_HOST ? i : few[i]));
		TP_TRY(tp_topo_load_find(c->topo, c->rails, &c->costs, &n->traffic, &load));
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

/* A chain of hops takes the mean of them; where all send to all at once, the farthest counts. */
static double hop_us(int algo, const struct tp_topo_limit *inside)
{
	bool at_once = algo == TP_ALGO_ONE_SHOT || algo == TP_ALGO_TWO_SHOT || algo == TP_ALGO_DIRECT || algo == TP_ALGO_HIERARCHICAL;
	return at_once ? inside->most_us : inside->mean_us;
}

static ncclResult_t find_way(struct explain_case *c, int algo)
{
	struct explain_way *way = &c->ways[algo];
	struct tp_plan_spec spec = spec_of(c, algo), all = spec;
	struct counting n = { .c = c, .spec = &all };
	/* A ring of each order: channels take turns with them, and a long message has a multiple of their number. */
	if (algo == TP_ALGO_RING && c->layout->norders) all.nchannels = c->layout->norders;
	way->why_not = tp_plan_refuses(&spec);
	if (way->why_not) return ncclSuccess;
	TP_TRY(tp_topo_traffic_create(c->ngpus, &n.traffic));
	ncclResult_t result = find_load(&n, &way->load);
	tp_topo_traffic_free(&n.traffic);
	TP_TRY(result);
	way->model = c->library;
	if (way->load.inside.us > 0) way->model.inside.latency_us = hop_us(algo, &way->load.inside);
	if (way->load.across.us > 0) way->model.across.latency_us = c->costs.net_us + c->engine_us;
	if (!tp_cost_fit(&spec, way->load.inside.us, way->load.across.us, &way->model)) way->why_not = "the cost model doesn't know it";
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
	for (int g = 0; g < c->ngpus; g++) c->is_nvidia &= tp_topo_node_of(c->topo, TP_TOPO_GPU, g)->gpu.maker == TP_MAKER_NVIDIA;
	TP_TRY(tp_channels_load(c->topo, &c->policy, TP_PATTERN_RING, &c->rings));
	TP_TRY(tp_channels_load(c->topo, &c->policy, TP_PATTERN_TREE, &c->trees));
	TP_TRY(tp_channels_load(c->topo, &c->policy, TP_PATTERN_PAIRS, &c->pairs));
	c->has_ring_load = !tp_channels_stand_in(c->rings);
	if (c->has_ring_load) TP_TRY(tp_topo_channels_load(c->topo, c->rings, &c->ring_load));
	tp_nccl_job_of(c->topo, c->rings, c->trees, c->pairs, c->nhosts, &c->job);
	c->has_func = find_func(c->q->coll, &c->func);
	return ncclSuccess;
}

/* What the library's constants say of its engine: a hop of GPU ranks over TCP, less one of host ranks. */
static ncclResult_t load_library(struct explain_case *c)
{
	struct tp_cost_model host, gpu;
	tp_cost_defaults(&host);
	tp_cost_gpu_defaults(&gpu);
	c->engine_us = TP_MAX(gpu.across.latency_us - host.across.latency_us, 0);
	return tp_cost_load_gpu(&c->library);
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

static ncclResult_t note_filter(struct explain_case *c)
{
	struct tp_choice choice;
	TP_TRY(tp_choose_check_algo(c->q->filter));
	TP_TRY(tp_choose(c->layout, c->q->coll, c->q->root, c->q->element, c->q->staged, &c->library, c->q->filter, &choice));
	for (int a = 0; a < TP_NALGOS; a++) c->ways[a].left_out = !c->ways[a].why_not && choice.candidates[a].why_not;
	return ncclSuccess;
}

static ncclResult_t find_out(struct explain_case *c)
{
	TP_TRY(tool_layout(c->nranks, c->nhosts, &c->layout));
	TP_TRY(load_library(c));
	TP_TRY(find_channels(c));
	/* NCCL lets GPUs relay for others, to GPUs (NVB) and to ports (PXN); our links do not. */
	c->policy.nvb = c->policy.pxn = false;
	TP_TRY(tp_topo_compute_paths(c->topo, &c->policy));
	TP_TRY(order_rings(c));
	if (c->nhosts > 1) TP_TRY(tp_rails_assign(c->topo, &c->policy, &c->rails));
	TP_TRY(tp_topo_costs_of(c->doc, c->topo, &c->policy, c->rails, &c->costs));
	for (int a = 0; a < TP_NALGOS; a++) TP_TRY(find_way(c, a));
	return note_filter(c);
}

static void let_go(struct explain_case *c)
{
	tp_layout_free(c->layout);
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

static int most_channels(const struct explain_case *c) { return c->nhosts > 1 ? CHANNELS_ACROSS : CHANNELS_INSIDE; }

/* The largest chunk of all channels together, where the chooser's model reckons with one in all; 0: its own limit. */
static size_t widest(const struct explain_case *c, int algo)
{
	if (c->nhosts > 1) return (size_t)most_channels(c) * c->library.slot_bytes_across;
	return algo == TP_ALGO_RING ? (size_t)most_channels(c) * RING_SLOT : 0;
}

/* As tp_gpu_fit_choice has it. */
static int channels_for(const struct explain_case *c, int algo, size_t block)
{
	int channels = tp_choose_channels((enum tp_algo)algo, c->q->coll, c->nranks, block, most_channels(c)), norders = algo == TP_ALGO_RING ? c->layout->norders : 0;
	return norders && channels > norders ? channels - channels % norders : channels;
}

static ncclResult_t time_of(const struct explain_case *c, int algo, size_t block, struct explain_time *out)
{
	const struct explain_way *way = &c->ways[algo];
	struct tp_plan_spec spec = spec_of(c, algo);
	struct tp_choice choice;
	char only[64];
	snprintf(only, sizeof(only), "%s:%s", tp_coll_name(c->q->coll), tp_algo_name((enum tp_algo)algo));
	TP_TRY(tp_choose(c->layout, c->q->coll, c->q->root, block, c->q->staged, &way->model, only, &choice));
	size_t chunk = choice.candidates[algo].chunk_bytes, wide = widest(c, algo);
	double us = choice.candidates[algo].us;
	for (size_t more = wide; more > chunk && more > wide >> 8; more /= 2) {
		double with = tp_cost_predict(&spec, block, more, &way->model);
		if (with < us) chunk = more;
		us = TP_MIN(us, with);
	}
	*out = (struct explain_time){ .us = us, .chunk_bytes = chunk,
		.nchannels = channels_for(c, algo, block),
		.latency_us = term(&spec, block, chunk, way->model, true, false, false, false), .inside_us = term(&spec, block, chunk, way->model, false, true, false, false),
		.across_us = term(&spec, block, chunk, way->model, false, false, true, false), .reduce_us = term(&spec, block, chunk, way->model, false, false, false, true) };
	return ncclSuccess;
}

ncclResult_t explain_times_of(const struct explain_case *c, size_t bytes, struct explain_times *out)
{
	struct explain_times t = { .best = -1, .best_of_all = -1 };
	struct tp_choice choice;
	size_t block = explain_block(c, bytes);
	for (int a = 0; a < TP_NALGOS; a++) {
		t.of[a].us = -1;
		if (c->ways[a].why_not) continue;
		TP_TRY(time_of(c, a, block, &t.of[a]));
		if (t.best_of_all < 0 || t.of[a].us < t.of[t.best_of_all].us) t.best_of_all = a;
		if (!c->ways[a].left_out && (t.best < 0 || t.of[a].us < t.of[t.best].us)) t.best = a;
	}
	TP_TRY(tp_choose(c->layout, c->q->coll, c->q->root, block, c->q->staged, &c->library, c->q->filter, &choice));
	t.library = (int)choice.algo;
	if (t.best < 0) return TP_FAIL(ncclInvalidUsage, "no algorithm is left for %s", tp_coll_name(c->q->coll));
	*out = t;
	return ncclSuccess;
}

const char *explain_dominant(const struct explain_time *t)
{
	double most = TP_MAX(TP_MAX(t->latency_us, t->inside_us), TP_MAX(t->across_us, t->reduce_us));
	return most == t->latency_us ? "latency" : most == t->across_us ? "network" : most == t->inside_us ? "wires inside" : "reduction";
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

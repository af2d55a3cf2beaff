#include "comm/ways.h"

#define RING_SLOT ((size_t)128 << 10)
#define FAR_PIECE ((size_t)32 << 10)
#define EVEN 1.1        /* all pairs at once against a ring: up to here they are joined alike */

/* ---- What plans send ---- */

struct counting { const struct tp_ways_host *host; struct tp_topo_traffic traffic; };

/* A chunk of each of the plan's sends and receives is a piece of a block. */
static void count_program(struct counting *n, const struct tp_program *p, double piece)
{
	const struct tp_layout *l = n->host->layout;
	int own = n->host->gpus[l->place[p->rank]], ngpus = n->traffic.ngpus;
	for (uint32_t s = 0; s < p->nsteps; s++) {
		const struct tp_step *step = &p->steps[s];
		for (uint32_t i = 0; i < step->nsrc + (uint32_t)step->ndst; i++) {
			const struct tp_operand *o = &p->operands[step->first + i];
			const struct tp_plan_link *link = o->where == TP_LINK ? &p->links[o->index] : NULL;
			bool sent = i >= step->nsrc;
			if (!link || link->from == link->to) continue;
			if (l->domain[link->from] != l->domain[link->to]) (sent ? n->traffic.out : n->traffic.in)[own] += piece;
			else if (sent) n->traffic.pairs[own * ngpus + n->host->gpus[l->place[link->to]]] += piece;
		}
	}
}

static ncclResult_t count_domain(struct counting *n, const struct tp_plan_spec *spec, int domain)
{
	const struct tp_layout *l = spec->layout;
	for (int r = 0; r < l->nranks; r++) {
		struct tp_plan *plan;
		if (l->domain[r] != domain) continue;
		TP_TRY(tp_plan_create(spec, r, &plan));
		for (uint32_t i = 0; i < plan->nprograms; i++) count_program(n, &plan->programs[i], 1.0 / plan->pieces / spec->nchannels);
		tp_plan_free(plan);
	}
	return ncclSuccess;
}

static bool is_rooted(enum tp_coll coll) { return coll == TP_BROADCAST || coll == TP_REDUCE || coll == TP_GATHER || coll == TP_SCATTER; }

static struct tp_plan_spec spec_of(const struct tp_layout *layout, enum tp_coll coll, enum tp_algo algo)
{
	return (struct tp_plan_spec){ .coll = coll, .algo = algo, .root = is_rooted(coll) ? 0 : -1, .nchannels = 1, .layout = layout };
}

ncclResult_t tp_ways_load(const struct tp_ways_host *host, enum tp_coll coll, enum tp_algo algo, int domain, bool *can, struct tp_topo_load *out)
{
	struct tp_plan_spec spec = spec_of(host->layout, coll, algo);
	struct counting n = { .host = host };
	*can = !tp_plan_refuses(&spec);
	if (!*can) return ncclSuccess;
	/* A ring of each order: channels take turns with them, and a long message has a multiple of their number. */
	if (algo == TP_ALGO_RING && host->layout->norders) spec.nchannels = host->layout->norders;
	TP_TRY(tp_topo_traffic_create(host->graph->count[TP_TOPO_GPU], &n.traffic));
	ncclResult_t result = count_domain(&n, &spec, domain);
	if (result == ncclSuccess) result = tp_topo_load_find(host->graph, host->rails, host->costs, &n.traffic, out);
	tp_topo_traffic_free(&n.traffic);
	return result;
}

/* A chain of hops takes the mean of them; where all send to all at once, the farthest counts. */
static bool is_at_once(enum tp_algo algo)
{
	return algo == TP_ALGO_ONE_SHOT || algo == TP_ALGO_TWO_SHOT || algo == TP_ALGO_DIRECT || algo == TP_ALGO_HIERARCHICAL;
}

struct tp_way tp_way_of(enum tp_algo algo, const struct tp_topo_load *load)
{
	double hop = is_at_once(algo) ? load->inside.most_us : load->inside.mean_us;
	return (struct tp_way){ (float)load->inside.us, (float)load->across.us, load->inside.us > 0 ? (float)hop : 0 };
}

double tp_ways_engine_us(void)
{
	struct tp_cost_model host, gpu;
	tp_cost_defaults(&host);
	tp_cost_gpu_defaults(&gpu);
	return TP_MAX(gpu.across.latency_us - host.across.latency_us, 0);
}

/* ---- Choice ---- */

void tp_ways_model(const struct tp_ways *ways, const struct tp_layout *layout, enum tp_coll coll, enum tp_algo algo, const struct tp_cost_model *library,
	struct tp_cost_model *out)
{
	const struct tp_way *way = &ways->of[coll][algo];
	struct tp_plan_spec spec = spec_of(layout, coll, algo);
	struct tp_cost_model guess;
	*out = *library;
	if (!ways->known) return;
	tp_cost_gpu_defaults(&guess);
	bool inside = way->inside_us > 0 && !tp_cost_is_measured(library, &guess, false), across = way->across_us > 0 && !tp_cost_is_measured(library, &guess, true);
	if (inside) out->inside.latency_us = way->hop_us;
	if (across) out->across.latency_us = ways->net_us;
	tp_cost_fit(&spec, inside ? way->inside_us : 0, across ? way->across_us : 0, out);
}

/* The largest chunk of all channels together, where the model reckons with one in all; 0: its own limit. */
static size_t widest(const struct tp_ways_call *call, int algo)
{
	if (!call->ways->known) return 0;
	if (call->layout->ndomains > 1) return (size_t)call->nchannels * call->library->slot_bytes_across;
	return algo == TP_ALGO_RING ? (size_t)call->nchannels * RING_SLOT : 0;
}

ncclResult_t tp_ways_choose(const struct tp_ways_call *call, struct tp_choice *out)
{
	struct tp_cost_model models[TP_NALGOS];
	struct tp_choose_models by;
	for (int a = 0; a < TP_NALGOS; a++) {
		tp_ways_model(call->ways, call->layout, call->coll, (enum tp_algo)a, call->library, &models[a]);
		by.of[a] = &models[a];
		by.widest[a] = widest(call, a);
	}
	return tp_choose_by(call->layout, call->coll, call->root, call->block_bytes, call->staged, &by, call->filter, out);
}

bool tp_ways_are_even(const struct tp_ways *ways)
{
	const struct tp_way *pairs = &ways->of[TP_ALL_REDUCE][TP_ALGO_TWO_SHOT], *ring = &ways->of[TP_ALL_REDUCE][TP_ALGO_RING];
	return !ways->known || ring->inside_us <= 0 || pairs->inside_us <= EVEN * ring->inside_us;
}

/* Between hosts a chunk costs the proxy some microseconds whatever its size, and all channels share one: so few channels, with a piece of some size each, and
 * chunks that are large. */
static int far_channels(const struct tp_ways_call *call, int nchannels)
{
	size_t pieces = call->coll == TP_ALL_REDUCE ? (size_t)call->layout->nranks : 1;
	return (int)TP_MIN((size_t)nchannels, TP_MAX(call->block_bytes / pieces / FAR_PIECE, 1));
}

bool tp_ways_fit(const struct tp_ways_call *call, bool wants, enum tp_algo wanted, struct tp_choice *choice)
{
	bool heeded = wants && choice->candidates[wanted].us >= 0 && tp_ways_are_even(call->ways);
	if (heeded) choice->algo = wanted;
	choice->nchannels = tp_choose_channels(choice->algo, call->coll, call->layout->nranks, call->block_bytes, call->nchannels);
	if (call->layout->ndomains > 1) choice->nchannels = far_channels(call, choice->nchannels);
	/* As many channels for each order of the rings, so that each carries the same. */
	int norders = choice->algo == TP_ALGO_RING ? call->layout->norders : 0;
	if (norders && choice->nchannels > norders) choice->nchannels -= choice->nchannels % norders;
	return heeded;
}

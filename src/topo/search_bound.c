/* Upper bounds, so that a search knows when it is done and when a bandwidth isn't worth trying.
 *
 * A ring leaves every GPU once and enters it once. So over any set of resources such that each route out of a GPU takes one of them
 * there are at most as many rings as the set has room for; sets are made by greedy covering (behind a switch one link covers
 * all, in a mesh it takes one a neighbour). And a resource without which the routes no longer join all GPUs is crossed by every
 * channel. Chains (trees) cross a link both ways with half of their bandwidth and end somewhere: their bound is over all GPUs. */
#include <stdlib.h>
#include <string.h>

#include "topo/search_model.h"

struct set { int first, n; double share; };     /* items[first ..]; a channel takes `share` of its bandwidth of it */

struct tp_bound {
	struct set *sets;
	double *items;
	int nsets, nitems, sets_room, items_room;
	double chains;                  /* GB/s of chains together; 0: doesn't apply */
	bool nothing;                   /* some GPU has no route at all */
};

struct cover { const struct tp_problem *p; int *times; float *weight; bool *done, *taken; int32_t *routes; int nroutes; };

void tp_bound_free(struct tp_bound *bound)
{
	if (!bound) return;
	free(bound->sets);
	free(bound->items);
	free(bound);
}

static bool grow(void **array, int *room, int need, size_t size)
{
	if (need <= *room) return true;
	int larger = need * 2 + 16;
	void *moved = realloc(*array, (size_t)larger * size);
	if (!moved) return false;
	*array = moved;
	*room = larger;
	return true;
}

static ncclResult_t add_item(struct tp_bound *b, double item)
{
	if (!grow((void **)&b->items, &b->items_room, b->nitems + 1, sizeof(*b->items)))
		return TP_FAIL(ncclSystemError, "out of memory for the bounds of a channel search");
	b->items[b->nitems++] = item;
	b->sets[b->nsets - 1].n++;
	return ncclSuccess;
}

static ncclResult_t add_set(struct tp_bound *b, double share)
{
	if (!grow((void **)&b->sets, &b->sets_room, b->nsets + 1, sizeof(*b->sets)))
		return TP_FAIL(ncclSystemError, "out of memory for the bounds of a channel search");
	b->sets[b->nsets++] = (struct set){ b->nitems, 0, share };
	return ncclSuccess;
}

static void count_uses(struct cover *c, int by)
{
	for (int i = 0; i < c->nroutes; i++) {
		const struct tp_route *route = &c->p->routes[c->routes[i]];
		for (int32_t u = route->first; u < route->first + route->nuses && !c->done[i]; u++) {
			const struct tp_use *use = &c->p->uses[u];
			if (by > 0 && (!c->times[use->resource] || use->weight < c->weight[use->resource])) c->weight[use->resource] = use->weight;
			c->times[use->resource] += by;
		}
	}
}

/* The resource that most of the routes not yet covered take; of equals the narrowest. -1: all are covered. */
static int32_t busiest(const struct cover *c)
{
	int32_t best = -1;
	for (int i = 0; i < c->nroutes; i++) {
		const struct tp_route *route = &c->p->routes[c->routes[i]];
		for (int32_t u = route->first; u < route->first + route->nuses && !c->done[i]; u++) {
			int32_t r = c->p->uses[u].resource;
			if (best < 0 || c->times[r] > c->times[best] || (c->times[r] == c->times[best] && c->p->capacity[r] < c->p->capacity[best])) best = r;
		}
	}
	return best;
}

static bool is_covered(const struct cover *c, const struct tp_route *route)
{
	for (int32_t u = route->first; u < route->first + route->nuses; u++)
		if (c->taken[c->p->uses[u].resource]) return true;
	return false;
}

/* What else the set needs for the routes gathered in c. */
static ncclResult_t extend_set(struct tp_bound *b, struct cover *c)
{
	for (int i = 0; i < c->nroutes; i++) c->done[i] = is_covered(c, &c->p->routes[c->routes[i]]);
	for (;;) {
		count_uses(c, 1);
		int32_t r = busiest(c);
		float weight = r >= 0 ? c->weight[r] : 1;
		count_uses(c, -1);
		if (r < 0) return ncclSuccess;
		TP_TRY(add_item(b, c->p->capacity[r] / weight));
		c->taken[r] = true;
		for (int i = 0; i < c->nroutes; i++) {
			const struct tp_route *route = &c->p->routes[c->routes[i]];
			for (int32_t u = route->first; u < route->first + route->nuses; u++) c->done[i] |= c->p->uses[u].resource == r;
		}
	}
}

static ncclResult_t begin_set(struct tp_bound *b, struct cover *c, double share)
{
	memset(c->taken, 0, (size_t)c->p->nresources * sizeof(*c->taken));
	return add_set(b, share);
}

/* One set out of the routes gathered in c. */
static ncclResult_t cover_routes(struct tp_bound *b, struct cover *c, double share)
{
	if (!c->nroutes) {
		b->nothing = true;
		return ncclSuccess;
	}
	TP_TRY(begin_set(b, c, share));
	return extend_set(b, c);
}

static void gather(struct cover *c, int from, int to, enum tp_topo_path_type limit)
{
	const struct tp_route *route = tp_route_of(c->p, from, to);
	if (route->nuses && route->type <= limit) c->routes[c->nroutes++] = (int32_t)(route - c->p->routes);
}

/* Out of (or into) one GPU, to GPUs and, for rings with NETs, to those. */
static void gather_gpu(struct cover *c, const struct tp_wish *wish, int gpu, bool out)
{
	int places = c->p->ngpus + (wish->form == TP_FORM_RING_NETS ? c->p->nnets : 0);
	c->nroutes = 0;
	for (int other = 0; other < places; other++)
		gather(c, out ? gpu : other, out ? other : gpu, other < c->p->ngpus ? wish->type_intra : wish->type_inter);
}

static void gather_nets(struct cover *c, const struct tp_wish *wish, bool out)
{
	c->nroutes = 0;
	for (int net = 0; net < c->p->nnets; net++)
		for (int gpu = 0; gpu < c->p->ngpus; gpu++)
			gather(c, out ? gpu : tp_net_place(c->p, net), out ? tp_net_place(c->p, net) : gpu, wish->type_inter);
}

/* Into (or out of) an island (or one GPU of it; -1: all) from outside: each channel comes to each island. */
static void gather_island(struct cover *c, const struct tp_wish *wish, const int *island, int which, int only, bool out)
{
	int places = c->p->ngpus + (wish->form == TP_FORM_RING_NETS ? c->p->nnets : 0);
	c->nroutes = 0;
	for (int gpu = TP_MAX(only, 0); gpu < (only < 0 ? c->p->ngpus : only + 1); gpu++)
		for (int other = 0; other < places && island[gpu] == which; other++) {
			if (other < c->p->ngpus && island[other] == which) continue;
			gather(c, out ? gpu : other, out ? other : gpu, other < c->p->ngpus ? wish->type_intra : wish->type_inter);
		}
}

static bool joined_by_nvlink(const struct tp_problem *p, int a, int b)
{
	const struct tp_route *there = tp_route_of(p, a, b), *back = tp_route_of(p, b, a);
	return there->nuses && back->nuses && TP_MAX(there->type, back->type) <= TP_PATH_NVB;
}

int tp_problem_islands(const struct tp_problem *p, int *island, int *queue)
{
	int n = 0;
	for (int gpu = 0; gpu < p->ngpus; gpu++) island[gpu] = -1;
	for (int gpu = 0; gpu < p->ngpus; gpu++) {
		int head = 0, tail = 0;
		if (island[gpu] >= 0) continue;
		island[queue[tail++] = gpu] = n;
		while (head < tail) {
			int at = queue[head++];
			for (int other = 0; other < p->ngpus; other++)
				if (island[other] < 0 && joined_by_nvlink(p, at, other)) island[queue[tail++] = other] = n;
		}
		n++;
	}
	return n;
}

static ncclResult_t add_islands(struct tp_bound *b, struct cover *c, const struct tp_wish *wish, int *island, int *queue)
{
	int n = tp_problem_islands(c->p, island, queue);
	/* One is all, and one a GPU has been looked at. */
	for (int which = 0; which < n && n > 1 && n < c->p->ngpus && tp_form_is_ring(wish->form); which++)
		for (int way = 0; way < 2; way++) {
			gather_island(c, wish, island, which, -1, way);
			TP_TRY(cover_routes(b, c, 1));
			if (!c->nroutes) continue;
			/* And GPU by GPU: what each GPU's own link holds is mostly least. */
			TP_TRY(begin_set(b, c, 1));
			for (int gpu = 0; gpu < c->p->ngpus; gpu++) {
				gather_island(c, wish, island, which, gpu, way);
				TP_TRY(extend_set(b, c));
			}
		}
	return ncclSuccess;
}

static bool takes(const struct tp_problem *p, const struct tp_route *route, int32_t resource, float *weight)
{
	for (int32_t u = route->first; u < route->first + route->nuses; u++)
		if (p->uses[u].resource == resource) {
			if (p->uses[u].weight < *weight) *weight = p->uses[u].weight;
			return true;
		}
	return false;
}

/* Which GPUs are reached from `from` (or reach it) without a resource. */
static int reach(const struct tp_problem *p, const struct tp_wish *wish, int from, bool forward, int32_t without, bool *seen, int *queue)
{
	int head = 0, tail = 0;
	memset(seen, 0, (size_t)p->ngpus * sizeof(*seen));
	seen[queue[tail++] = from] = true;
	while (head < tail) {
		int at = queue[head++];
		for (int other = 0; other < p->ngpus; other++) {
			float weight = 1e9f;
			const struct tp_route *route = forward ? tp_route_of(p, at, other) : tp_route_of(p, other, at);
			if (seen[other] || !route->nuses || route->type > wish->type_intra) continue;
			if (without >= 0 && takes(p, route, without, &weight)) continue;
			seen[queue[tail++] = other] = true;
		}
	}
	return tail;
}

/* Whether every channel must take this resource: a ring goes round, a path or a chain needs only that one way leads through. */
static bool is_mandatory(const struct tp_problem *p, const struct tp_wish *wish, int32_t resource, bool *seen, int *queue)
{
	bool ring = wish->form == TP_FORM_RING, reaches = reach(p, wish, 0, true, resource, seen, queue) == p->ngpus;
	if (ring) return !reaches || reach(p, wish, 0, false, resource, seen, queue) < p->ngpus;
	if (reaches) return false;
	/* A path may start anywhere: mandatory only if no GPU reaches all others. */
	for (int from = 1; from < p->ngpus; from++)
		if (reach(p, wish, from, true, resource, seen, queue) == p->ngpus) return false;
	return true;
}

static ncclResult_t add_mandatory(struct tp_bound *b, const struct tp_problem *p, const struct tp_wish *wish, float *least, bool *seen, int *queue)
{
	for (int32_t r = 0; r < p->nresources; r++) least[r] = 0;
	for (int from = 0; from < p->ngpus; from++)
		for (int to = 0; to < p->ngpus; to++) {
			const struct tp_route *route = tp_route_of(p, from, to);
			for (int32_t u = route->first; u < route->first + route->nuses && route->type <= wish->type_intra; u++) {
				float *at = &least[p->uses[u].resource];
				if (*at <= 0 || p->uses[u].weight < *at) *at = p->uses[u].weight;
			}
		}
	for (int32_t r = 0; r < p->nresources; r++) {
		if (least[r] <= 0 || !is_mandatory(p, wish, r, seen, queue)) continue;
		TP_TRY(add_set(b, tp_form_is_ring(wish->form) ? 1 : 0.5));
		TP_TRY(add_item(b, p->capacity[r] / least[r]));
	}
	return ncclSuccess;
}

static ncclResult_t add_gpus(struct tp_bound *b, struct cover *c, const struct tp_wish *wish)
{
	double all[2] = { 0, 0 };
	for (int gpu = 0; gpu < c->p->ngpus && (c->p->ngpus > 1 || wish->form == TP_FORM_RING_NETS); gpu++)
		for (int way = 0; way < 2; way++) {
			gather_gpu(c, wish, gpu, way);
			TP_TRY(cover_routes(b, c, tp_form_is_ring(wish->form) ? 1 : 0.5));
			if (!c->nroutes) continue;
			const struct set *set = &b->sets[b->nsets - 1];
			for (int i = 0; i < set->n; i++) all[way] += b->items[set->first + i];
		}
	/* ngpus - 1 edges a chain, each half a channel out of both its ends. */
	if (!tp_form_is_ring(wish->form) && c->p->ngpus > 1) b->chains = TP_MIN(all[0], all[1]) / (c->p->ngpus - 1);
	for (int way = 0; way < 2 && tp_form_has_nets(wish->form); way++) {
		gather_nets(c, wish, way);
		TP_TRY(cover_routes(b, c, 1));
	}
	return ncclSuccess;
}

ncclResult_t tp_bound_create(const struct tp_problem *p, const struct tp_wish *wish, struct tp_bound **out)
{
	size_t places = (size_t)(p->ngpus + p->nnets), gpus = (size_t)p->ngpus, n = (size_t)p->nresources + 1;
	struct cover c = { .p = p };
	struct tp_bound *b = tp_alloc(1, sizeof(*b), "bounds");
	c.times = tp_alloc(n, sizeof(*c.times), "bounds");
	c.weight = tp_alloc(n, sizeof(*c.weight), "bounds");
	c.routes = tp_alloc(gpus * places + places, sizeof(*c.routes), "bounds");
	c.done = tp_alloc(gpus * places + places, sizeof(*c.done), "bounds");
	c.taken = tp_alloc(n, sizeof(*c.taken), "bounds");
	int *queue = tp_alloc(places, sizeof(*queue), "bounds"), *island = tp_alloc(gpus, sizeof(*island), "bounds");
	ncclResult_t result = b && c.times && c.weight && c.routes && c.done && c.taken && queue && island ? ncclSuccess : ncclSystemError;
	if (result == ncclSuccess) result = add_gpus(b, &c, wish);
	if (result == ncclSuccess && p->ngpus > 1) result = add_islands(b, &c, wish, island, queue);
	/* Dear, and of no use behind one switch: for machines of usual size only. */
	if (result == ncclSuccess && p->ngpus > 1 && p->ngpus <= 32) result = add_mandatory(b, p, wish, c.weight, c.done, queue);
	free(c.times);
	free(c.weight);
	free(c.routes);
	free(c.done);
	free(c.taken);
	free(queue);
	free(island);
	if (result == ncclSuccess) *out = b;
	else tp_bound_free(b);
	return result;
}

int tp_bound_channels(const struct tp_bound *bound, double bw, int most)
{
	if (bound->nothing) return 0;
	if (bound->chains > 0 && bound->chains * (1 + 1e-9) < most * bw) most = (int)(bound->chains * (1 + 1e-9) / bw);
	for (int s = 0; s < bound->nsets; s++) {
		const struct set *set = &bound->sets[s];
		double room = 0;
		for (int i = set->first; i < set->first + set->n && room < most; i++)
			room += (double)(int64_t)(bound->items[i] / (bw * set->share) * (1 + 1e-9) + 1e-9);
		if (room < most) most = (int)room;
	}
	return most;
}

double tp_bound_total(const struct tp_bound *bound)
{
	double least = bound->nothing ? 0 : bound->chains > 0 ? bound->chains : 1e18;
	for (int s = 0; s < bound->nsets; s++) {
		double sum = 0;
		for (int i = 0; i < bound->sets[s].n; i++) sum += bound->items[bound->sets[s].first + i] / bound->sets[s].share;
		if (sum < least) least = sum;
	}
	return least;
}

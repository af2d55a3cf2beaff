/* The search against brute force on small random machines, and against optima that were planted. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "topo/search_model.h"

#define MOST_RESOURCES 256
#define MOST_SHAPES 1024

/* ---- Random machines ---- */

static uint64_t seed;
static int draw(int below)
{
	seed = seed * 6364136223846793005u + 1442695040888963407u;
	return (int)((seed >> 33) % (uint64_t)below);
}

static struct tp_problem *new_problem(int ngpus, int nnets)
{
	int places = ngpus + nnets;
	struct tp_problem *p = calloc(1, sizeof(*p));
	p->ngpus = ngpus;
	p->nnets = nnets;
	p->routes = calloc((size_t)(places * places), sizeof(*p->routes));
	p->uses = calloc((size_t)(places * places * 16), sizeof(*p->uses));
	p->capacity = calloc(MOST_RESOURCES, sizeof(*p->capacity));
	p->link = calloc(MOST_RESOURCES, sizeof(*p->link));
	p->port = calloc((size_t)nnets + 1, sizeof(*p->port));
	for (int i = 0; i < places * places; i++) {
		p->routes[i].first = i * 16;
		p->routes[i].type = TP_PATH_DIS;
	}
	for (int i = 0; i < nnets; i++) p->port[i] = i;
	p->unit = 20;
	p->channel_max = 1000;
	return p;
}

static int new_resource(struct tp_problem *p, double capacity)
{
	assert_true(p->nresources < MOST_RESOURCES);
	p->capacity[p->nresources] = capacity;
	return p->nresources++;
}

static void use(struct tp_problem *p, int from, int to, enum tp_topo_path_type type, int resource, float weight)
{
	struct tp_route *route = &p->routes[from * (p->ngpus + p->nnets) + to];
	p->uses[route->first + route->nuses++] = (struct tp_use){ resource, weight };
	route->type = type;
	route->nhops++;
}

static const double sizes[] = { 6, 10, 12, 20, 24, 40, 48 };

/* GPUs and NETs (two a switch) under switches under sockets; bandwidths drawn for each. */
static void add_tree(struct tp_problem *p, bool intel)
{
	enum { UP, DOWN };
	int places = p->ngpus + p->nnets, leaf[32][2], sw[32][2], socket[8][2];
	for (int i = 0; i < places; i++)
		for (int way = 0; way < 2; way++) {
			leaf[i][way] = new_resource(p, sizes[2 + draw(5)]);
			if (i % 2 == 0) sw[i / 2][way] = new_resource(p, sizes[2 + draw(5)]);
			if (i % 4 == 0) socket[i / 4][way] = new_resource(p, sizes[draw(5)]);
		}
	for (int a = 0; a < places; a++)
		for (int b = 0; b < places; b++) {
			/* NETs stand behind the GPUs: net i with GPU i. */
			int x = a < p->ngpus ? a : a - p->ngpus, y = b < p->ngpus ? b : b - p->ngpus;
			if (a == b || (a >= p->ngpus && b >= p->ngpus)) continue;
			enum tp_topo_path_type type = x / 2 == y / 2 ? TP_PATH_PIX : x / 4 == y / 4 ? TP_PATH_PHB : TP_PATH_SYS;
			float weight = intel && type == TP_PATH_PHB ? 1.2f : 1;
			use(p, a, b, type, leaf[a][UP], weight);
			if (type > TP_PATH_PIX) use(p, a, b, type, sw[x / 2][UP], weight);
			if (type == TP_PATH_SYS) use(p, a, b, type, socket[x / 4][UP], 1);
			if (type == TP_PATH_SYS) use(p, a, b, type, socket[y / 4][DOWN], 1);
			if (type > TP_PATH_PIX) use(p, a, b, type, sw[y / 2][DOWN], weight);
			use(p, a, b, type, leaf[b][DOWN], weight);
		}
}

/* NVLink between some pairs, both ways alike, over the tree's routes. */
static void add_mesh(struct tp_problem *p, int percent)
{
	for (int a = 0; a < p->ngpus; a++)
		for (int b = 0; b < a; b++) {
			if (draw(100) >= percent) continue;
			double bw = 20 * (1 + draw(2));
			p->routes[a * (p->ngpus + p->nnets) + b].nuses = p->routes[b * (p->ngpus + p->nnets) + a].nuses = 0;
			use(p, a, b, TP_PATH_NVL, new_resource(p, bw), 1);
			use(p, b, a, TP_PATH_NVL, new_resource(p, bw), 1);
		}
}

/* ---- Brute force: every set of up to `most` channels ---- */

struct shape { double load[MOST_RESOURCES]; };
static struct shape shapes[MOST_SHAPES];
static int nshapes;

static void add_route(const struct tp_problem *p, struct shape *s, int from, int to, double amount, bool *possible)
{
	const struct tp_route *route = tp_route_of(p, from, to);
	if (!route->nuses) *possible = false;
	for (int u = route->first; u < route->first + route->nuses; u++) s->load[p->uses[u].resource] += amount * p->uses[u].weight;
}

static void add_shape(const struct tp_problem *p, bool ring, const int *order, int in, int out)
{
	struct shape s = { { 0 } };
	bool possible = true;
	for (int i = 0; i + 1 < p->ngpus; i++) {
		add_route(p, &s, order[i], order[i + 1], ring ? 1 : 0.5, &possible);
		if (!ring) add_route(p, &s, order[i + 1], order[i], 0.5, &possible);
	}
	if (ring && !p->nnets) add_route(p, &s, order[p->ngpus - 1], order[0], 1, &possible);
	if (p->nnets) {
		add_route(p, &s, tp_net_place(p, in), order[0], 1, &possible);
		add_route(p, &s, order[p->ngpus - 1], tp_net_place(p, out), 1, &possible);
	}
	if (!possible) return;
	assert_true(nshapes < MOST_SHAPES);
	shapes[nshapes++] = s;
}

static void permute(const struct tp_problem *p, bool ring, bool cross, int *order, bool *used, int at)
{
	if (at == p->ngpus) {
		for (int in = 0; in < (p->nnets ? p->nnets : 1); in++)
			for (int out = 0; out < (p->nnets ? p->nnets : 1); out++)
				if (in == out || cross) add_shape(p, ring, order, in, out);
		return;
	}
	for (int gpu = 0; gpu < p->ngpus; gpu++) {
		/* A closed ring may begin anywhere; a chain is its own way back. */
		if (used[gpu] || (at == 0 && ring && !p->nnets && gpu) || (!ring && at == p->ngpus - 1 && gpu < order[0])) continue;
		used[gpu] = true;
		order[at] = gpu;
		permute(p, ring, cross, order, used, at + 1);
		used[gpu] = false;
	}
}

static void choose(const struct tp_problem *p, int from, int n, int most, double *load, double *best)
{
	double bw = p->channel_max;
	for (int r = 0; r < p->nresources; r++)
		if (load[r] > 0 && p->capacity[r] / load[r] < bw) bw = p->capacity[r] / load[r];
	if (n && n * bw > *best) *best = n * bw;
	if (n == most || bw * most <= *best) return;
	for (int i = from; i < nshapes; i++) {
		for (int r = 0; r < p->nresources; r++) load[r] += shapes[i].load[r];
		choose(p, i, n + 1, most, load, best);
		for (int r = 0; r < p->nresources; r++) load[r] -= shapes[i].load[r];
	}
}

static double brute_force(const struct tp_problem *p, bool ring, bool cross, int most)
{
	int order[8] = { 0 };
	bool used[8] = { false };
	double load[MOST_RESOURCES] = { 0 }, best = 0;
	nshapes = 0;
	permute(p, ring, cross, order, used, 0);
	choose(p, 0, 0, most, load, &best);
	return best;
}

/* ---- The search's own result, checked apart from it ---- */

static double search(const struct tp_problem *p, bool ring, int cross_nic, int most)
{
	struct tp_search_result found;
	assert_int_equal(tp_search_run(p, ring, cross_nic, most, &found), ncclSuccess);
	double load[MOST_RESOURCES] = { 0 };
	assert_true(found.packed.n <= most);
	for (int c = 0; c < found.packed.n; c++) {
		int order[8];
		bool seen[8] = { false };
		for (int i = 0; i < p->ngpus; i++) {
			order[i] = found.packed.order[c * p->ngpus + i];
			assert_false(seen[order[i]]);
			seen[order[i]] = true;
		}
		if (p->nnets && cross_nic == 0) assert_int_equal(found.packed.net_in[c], found.packed.net_out[c]);
		nshapes = 0;
		add_shape(p, ring, order, found.packed.net_in[c], found.packed.net_out[c]);
		assert_int_equal(nshapes, 1);
		for (int r = 0; r < p->nresources; r++) load[r] += shapes[0].load[r] * found.bw_intra;
	}
	for (int r = 0; r < p->nresources; r++) assert_true(load[r] <= p->capacity[r] * (1 + 1e-5));
	double total = found.packed.n * found.bw_intra;
	assert_true(total <= found.bound * (1 + 1e-6) || found.packed.n == 0);
	tp_search_free(&found);
	return total;
}

static void compare(struct tp_problem *p, bool ring, int cross_nic, int most, uint64_t which)
{
	double best = brute_force(p, ring, cross_nic == 1, most), found = search(p, ring, cross_nic, most);
	if (found < best * 0.999)
		print_message("machine %lu: %d GPUs, %d NICs, at most %d: found %.3f of %.3f\n", (unsigned long)which, p->ngpus, p->nnets, most, found, best);
	assert_true(found >= best * 0.999);
	assert_true(found <= best * 1.001);
	tp_problem_free(p);
}

static struct tp_problem *random_machine(uint64_t which, int ngpus, int nnets)
{
	seed = which * 7919 + 1;
	struct tp_problem *p = new_problem(ngpus, nnets);
	add_tree(p, which % 3 == 0);
	if (which % 4) add_mesh(p, 40 + 15 * (int)(which % 4));
	return p;
}

static void rings_are_as_good_as_brute_force(void **state)
{
	(void)state;
	for (uint64_t which = 0; which < 60; which++) compare(random_machine(which, 3 + (int)(which % 3), 0), true, 0, 3, which);
	for (uint64_t which = 100; which < 120; which++) compare(random_machine(which, 6, 0), true, 0, 2, which);
}

static void trees_are_as_good_as_brute_force(void **state)
{
	(void)state;
	for (uint64_t which = 0; which < 40; which++) compare(random_machine(which, 3 + (int)(which % 3), 0), false, 0, 2, which);
	for (uint64_t which = 100; which < 104; which++) compare(random_machine(which, 6, 0), false, 0, 1, which);
}

static void rings_with_nics_are_as_good_as_brute_force(void **state)
{
	(void)state;
	for (uint64_t which = 0; which < 40; which++) compare(random_machine(which, 3 + (int)(which % 2), 2), true, 0, 3, which);
	for (uint64_t which = 0; which < 20; which++) compare(random_machine(which, 4, 2), true, 1, 2, which);
}

/* ---- Planted ---- */

static void shuffle(int *order, int n)
{
	for (int i = 0; i < n; i++) order[i] = i;
	for (int i = n - 1; i > 0; i--) {
		int j = draw(i + 1), swapped = order[i];
		order[i] = order[j];
		order[j] = swapped;
	}
}

/* Links for exactly k rings of 20 GB/s, drawn over each other: no GPU can send more, so k x 20 is the optimum. */
static void planted_rings_are_found(void **state)
{
	(void)state;
	for (uint64_t which = 0; which < 40; which++) {
		seed = which + 1000;
		int n = 4 + (int)(which % 3), k = 1 + draw(3), order[8], resource[8][8];
		struct tp_problem *p = new_problem(n, 0);
		memset(resource, -1, sizeof(resource));
		for (int ring = 0; ring < k; ring++) {
			shuffle(order, n);
			for (int i = 0; i < n; i++) {
				int from = order[i], to = order[(i + 1) % n];
				if (resource[from][to] >= 0) {
					p->capacity[resource[from][to]] += 20;
					continue;
				}
				resource[from][to] = new_resource(p, 20);
				use(p, from, to, TP_PATH_NVL, resource[from][to], 1);
			}
		}
		double found = search(p, true, 0, TP_CHANNELS_MAX);
		assert_true(found >= k * 20 * 0.999 && found <= k * 20 * 1.001);
		tp_problem_free(p);
	}
}

/* Eight and sixteen GPUs: two-way rings, three of them, as many links a GPU as an eight-GPU mesh has. */
static void planted_rings_of_larger_machines_are_found(void **state)
{
	(void)state;
	for (uint64_t which = 0; which < 6; which++) {
		seed = which + 5000;
		int n = which < 4 ? 8 : 12, order[16], resource[16][16];
		struct tp_problem *p = new_problem(n, 0);
		memset(resource, -1, sizeof(resource));
		for (int ring = 0; ring < 3; ring++) {
			shuffle(order, n);
			for (int i = 0; i < 2 * n; i++) {
				int from = order[i / 2], to = order[(i / 2 + 1) % n];
				if (i % 2) from = to, to = order[i / 2];
				if (resource[from][to] >= 0) {
					p->capacity[resource[from][to]] += 20;
					continue;
				}
				resource[from][to] = new_resource(p, 20);
				use(p, from, to, TP_PATH_NVL, resource[from][to], 1);
			}
		}
		struct tp_search_result found;
		assert_int_equal(tp_search_run(p, true, 0, TP_CHANNELS_MAX, &found), ncclSuccess);
		if (found.packed.n * found.bw_intra < 119.9) print_message("machine %d: %.2f of 120\n", (int)which, found.packed.n * found.bw_intra);
		assert_true(found.packed.n * found.bw_intra >= 119.9);
		tp_search_free(&found);
		tp_problem_free(p);
	}
}

/* Islands of GPUs with a NIC each, joined by these alone: a ring comes to an island once, so that the optimum is what one island's NICs carry. */
static void rings_over_islands_are_found(void **state)
{
	(void)state;
	for (uint64_t which = 0; which < 24; which++) {
		seed = which + 9000;
		int size = 2 + draw(3), n = size * (2 + draw(3)), places = 2 * n, out[16], in[16], place[16];
		double bw = draw(2) ? 24 : 12;
		struct tp_problem *p = new_problem(n, n);
		/* Which GPUs make an island says nothing of their numbers. */
		shuffle(place, n);
		p->unit = 50;
		for (int i = 0; i < n; i++) {
			out[i] = new_resource(p, bw);
			in[i] = new_resource(p, bw);
		}
		int islands[16][2];
		for (int i = 0; i < n / size; i++)
			for (int way = 0; way < 2; way++) islands[i][way] = new_resource(p, 1000);
		for (int a = 0; a < places; a++)
			for (int b = 0; b < places; b++) {
				int x = a % n, y = b % n;
				if (a == b || (a >= n && b >= n) || ((a >= n || b >= n) && x != y)) continue;
				if (a < n && b < n && place[x] / size == place[y] / size) {
					use(p, a, b, TP_PATH_NVL, islands[place[x] / size][x > y], 1);
					continue;
				}
				enum tp_topo_path_type type = a < n && b < n ? TP_PATH_NET : TP_PATH_PIX;
				if (a < n) use(p, a, b, type, out[x], 1);
				if (b < n) use(p, a, b, type, in[y], 1);
			}
		struct tp_search_result found;
		assert_int_equal(tp_search_run(p, true, 2, TP_CHANNELS_MAX, &found), ncclSuccess);
		double total = found.packed.n * found.bw_inter;
		if (total < size * bw * 0.999) print_message("machine %d: %d GPUs in islands of %d: %.2f of %.2f\n", (int)which, n, size, total, size * bw);
		/* Pairs of rings, there and back, take two GPUs of an island each: with three of them the last pair may find none together. */
		assert_true(total >= size * bw * (size % 2 ? 0.9 : 0.999) && total <= size * bw * 1.001);
		assert_true(found.bound <= size * bw * 1.001);
		tp_search_free(&found);
		tp_problem_free(p);
	}
}

static void the_same_machine_gives_the_same_channels(void **state)
{
	(void)state;
	struct tp_search_result a, b;
	struct tp_problem *p = random_machine(7, 6, 0), *q = random_machine(7, 6, 0);
	assert_int_equal(tp_search_run(p, true, 0, TP_CHANNELS_MAX, &a), ncclSuccess);
	assert_int_equal(tp_search_run(q, true, 0, TP_CHANNELS_MAX, &b), ncclSuccess);
	assert_int_equal(a.packed.n, b.packed.n);
	assert_int_equal(a.steps, b.steps);
	assert_memory_equal(a.packed.order, b.packed.order, (size_t)a.packed.n * 6 * sizeof(*a.packed.order));
	tp_search_free(&a);
	tp_search_free(&b);
	tp_problem_free(p);
	tp_problem_free(q);
}

static void links_that_the_same_routes_take_become_one(void **state)
{
	(void)state;
	struct tp_problem *p = new_problem(2, 0);
	int out = new_resource(p, 40), narrow = new_resource(p, 10), back = new_resource(p, 20);
	use(p, 0, 1, TP_PATH_PIX, out, 1);
	use(p, 0, 1, TP_PATH_PIX, narrow, 1);
	use(p, 1, 0, TP_PATH_PIX, back, 1);
	assert_int_equal(tp_problem_merge(p), ncclSuccess);
	assert_int_equal(p->nresources, 2);
	assert_int_equal(tp_route_of(p, 0, 1)->nuses, 1);
	assert_true(p->capacity[p->uses[tp_route_of(p, 0, 1)->first].resource] == 10);
	tp_problem_free(p);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(rings_are_as_good_as_brute_force),
		cmocka_unit_test(trees_are_as_good_as_brute_force),
		cmocka_unit_test(rings_with_nics_are_as_good_as_brute_force),
		cmocka_unit_test(planted_rings_are_found),
		cmocka_unit_test(planted_rings_of_larger_machines_are_found),
		cmocka_unit_test(rings_over_islands_are_found),
		cmocka_unit_test(the_same_machine_gives_the_same_channels),
		cmocka_unit_test(links_that_the_same_routes_take_become_one),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

/* All-reduce over two binary trees at once, a piece of each round on each. In a binary tree half the ranks are leaves that
 * only send up and receive; the second tree is the first one relabelled so that the leaves of one are inner in the other,
 * so every rank sends about twice the data in all, at a depth that grows as log n.
 *
 * The first tree: position 0 is the root; below it the others in order, a position's height being its lowest set bit, so
 * odd positions are leaves. The second: mirrored where n is even, shifted by one where n is odd, either of which turns odd
 * positions into even ones. Positions follow the domains, so that most edges stay inside one.
 *
 * Up and down are two lanes, so that a round climbs while the one before it falls. A pair of ranks that are neighbours in
 * both trees uses a lane class a tree. References: a leaf's INPUT is overwritten by the result only, results never. */
#include <stdlib.h>

#include "plan/build.h"

static const char *tree_refuses(const struct tp_plan_spec *spec)
{
	return spec->coll == TP_ALL_REDUCE ? NULL : "trees do all-reduce";
}

static void tree_describe(const struct tp_plan_spec *spec, struct tp_plan *plan)
{
	(void)spec;
	plan->pieces = 2;
}

struct node { int parent, nkids, kids[2]; };

/* The node at a position of the first tree among n positions. */
static struct node first_tree(int n, int at)
{
	struct node node = { .parent = -1 };
	int half;
	if (at) {
		int bit = at & -at, up = (at - bit) | bit << 1;
		node.parent = up < n ? up : at - bit;
		half = bit / 2;
		if (half) node.kids[node.nkids++] = at - half;
	} else {
		for (half = 1; half * 2 < n; half *= 2) { }
	}
	/* To the right the tree may be cut off: the highest position that exists takes its parent's place. */
	while (half && at + half >= n) half /= 2;
	if (half) node.kids[node.nkids++] = at + half;
	return node;
}

static struct node tree_node(int n, int tree, int at)
{
	if (!tree) return first_tree(n, at);
	bool even = n % 2 == 0;
	struct node node = first_tree(n, even ? n - 1 - at : (at + n - 1) % n);
	if (node.parent >= 0) node.parent = even ? n - 1 - node.parent : (node.parent + 1) % n;
	for (int i = 0; i < node.nkids; i++) node.kids[i] = even ? n - 1 - node.kids[i] : (node.kids[i] + 1) % n;
	return node;
}

static void generate_tree(struct tp_builder *b, int tree, int rank, const struct node *node)
{
	int up = tp_build_lane(b), down = tp_build_lane(b);
	bool root = node->parent < 0;
	int sources[3] = { rank }, nsources = 1;
	for (int i = 0; i < node->nkids; i++) {         /* in rank order */
		int s = nsources++;
		for (; s && sources[s - 1] > node->kids[i]; s--) sources[s] = sources[s - 1];
		sources[s] = node->kids[i];
	}
	tp_build_step(b, up, (unsigned)((node->nkids ? TP_STEP_REDUCE : 0) | (root ? TP_STEP_FINAL : 0)));
	for (int s = 0; s < nsources; s++) {
		if (sources[s] == rank) tp_build_read(b, TP_INPUT, tree);
		else tp_build_take(b, sources[s], tree);
	}
	if (!root) {
		tp_build_give(b, node->parent, tree, !node->nkids);
		tp_build_step(b, down, 0);
		tp_build_take(b, node->parent, tree);
	}
	tp_build_write(b, TP_OUTPUT, tree);
	for (int i = 0; i < node->nkids; i++) tp_build_give(b, node->kids[i], tree, true);
}

static void tree_generate(struct tp_builder *b, const struct tp_plan_spec *spec, int rank)
{
	int n = spec->layout->nranks, at;
	int *order = tp_build_order(b, spec->layout, rank, &at);
	if (!order) return;
	for (int tree = 0; tree < 2; tree++) {
		struct node node = tree_node(n, tree, at);
		if (node.parent >= 0) node.parent = order[node.parent];
		for (int i = 0; i < node.nkids; i++) node.kids[i] = order[node.kids[i]];
		generate_tree(b, tree, rank, &node);
	}
	free(order);
}

const struct tp_generator tp_generator_tree = { tree_refuses, tree_describe, tree_generate };

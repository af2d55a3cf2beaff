/* Where a machine's parts lie in a picture: CPUs at the top, bridges below them, GPUs and NICs in one row, switches of NVLink at the
 * bottom. A part is as wide as what hangs on it; hosts are tiles of a grid. */
#include "topo_draw.h"

#include <math.h>
#include <stdlib.h>

#define GAP 14.0
#define TOP 34.0                /* room for what joins CPUs */
#define ROW 92.0

static bool is_drawn(const struct tp_topo_node *node)
{
	return node->kind == TP_TOPO_GPU || node->kind == TP_TOPO_PCI || node->kind == TP_TOPO_CPU || node->kind == TP_TOPO_NIC;
}

static double own_width(const struct tp_topo_node *node)
{
	switch (node->kind) {
	case TP_TOPO_GPU: return 96;
	case TP_TOPO_NIC: return 104;
	case TP_TOPO_PCI: return 112;
	default: return 150;
	}
}

static int depth_of(const struct tp_topo *topo, const struct tp_topo_node *node)
{
	int depth = 0;
	for (int32_t up = node->parent; up >= 0; up = topo->nodes[up].parent) depth++;
	return depth;
}

/* Lays node and what is below it from x on; returns the width. Recursion is as deep as the description may be. */
static double lay(struct picture *p, int32_t index, double x, int rows)
{
	const struct tp_topo_node *node = &p->topo->nodes[index];
	struct box *box = &p->boxes[index];
	double used = 0, own = own_width(node);
	bool device = node->kind == TP_TOPO_GPU || node->kind == TP_TOPO_NIC;
	for (int32_t i = 0; i < p->topo->nnodes && !device; i++) {
		if (p->topo->nodes[i].parent != index || !is_drawn(&p->topo->nodes[i])) continue;
		used += (used > 0 ? GAP : 0) + lay(p, i, x + used + (used > 0 ? GAP : 0), rows);
	}
	double width = fmax(used, own);
	int row = device ? rows : depth_of(p->topo, node);
	box->drawn = true;
	box->w = node->kind == TP_TOPO_CPU ? width : own;
	box->h = device ? 62 : node->kind == TP_TOPO_CPU ? 40 : 38;
	box->x = node->kind == TP_TOPO_CPU ? x : x + (width - own) / 2;
	box->y = TOP + row * ROW;
	return width;
}

static void move(struct picture *p, int32_t host, double dx, double dy)
{
	for (int32_t i = 0; i < p->topo->nnodes; i++) {
		if (p->topo->nodes[i].host != host || p->topo->nodes[i].kind == TP_TOPO_NVS) continue;
		p->boxes[i].x += dx;
		p->boxes[i].y += dy;
	}
}

static int rows_of(const struct tp_topo *topo)
{
	int rows = 1;
	for (int32_t i = 0; i < topo->nnodes; i++) {
		const struct tp_topo_node *node = &topo->nodes[i];
		if (node->kind == TP_TOPO_GPU || node->kind == TP_TOPO_NIC) rows = depth_of(topo, node) > rows ? depth_of(topo, node) : rows;
	}
	return rows;
}

bool picture_lay_out(const struct tp_topo *topo, struct picture *p)
{
	*p = (struct picture){ .topo = topo };
	p->boxes = calloc((size_t)topo->nnodes, sizeof(*p->boxes));
	p->tiles = calloc((size_t)topo->nhosts, sizeof(*p->tiles));
	if (!p->boxes || !p->tiles) {
		picture_free(p);
		return false;
	}
	int rows = rows_of(topo), columns = topo->nhosts > 2 ? (int)ceil(sqrt((double)topo->nhosts * 0.6)) : 1;
	bool mesh = false, switched = topo->count[TP_TOPO_NVS] > 0;
	for (int32_t l = 0; l < topo->nlinks; l++)
		mesh = mesh || (topo->links[l].kind == TP_WIRE_NVL && topo->nodes[topo->links[l].from].kind == TP_TOPO_GPU && topo->nodes[topo->links[l].to].kind == TP_TOPO_GPU);
	double widest = 0;
	for (int32_t h = 0; h < topo->nhosts; h++) {
		double x = 0;
		for (int32_t i = 0; i < topo->count[TP_TOPO_CPU]; i++) {
			const struct tp_topo_node *cpu = tp_topo_node_of(topo, TP_TOPO_CPU, i);
			if (cpu->host == h) x += lay(p, cpu->index, x, rows) + 2 * GAP;
		}
		p->tiles[h].w = fmax(x - 2 * GAP, 150);
		widest = fmax(widest, p->tiles[h].w);
	}
	p->below = TOP + rows * ROW + 62;
	p->tile_height = p->below + (switched ? 84 : 0) + (mesh ? 150 : 0) + 16;
	for (int32_t h = 0; h < topo->nhosts; h++) {
		p->tiles[h].x = 40 + (h % columns) * (widest + 60);
		p->tiles[h].y = 90 + (h / columns) * (p->tile_height + 40);
		p->tiles[h].h = p->tile_height;
		move(p, h, p->tiles[h].x, p->tiles[h].y);
	}
	p->width = fmax(40 + columns * (widest + 60), 760);
	p->height = 90 + ((topo->nhosts + columns - 1) / columns) * (p->tile_height + 40);
	return true;
}

void picture_free(struct picture *p)
{
	free(p->boxes);
	free(p->tiles);
	p->boxes = p->tiles = NULL;
}

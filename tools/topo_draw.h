/* Between layout and drawing of `telpher topo svg` and `html`. */
#ifndef TELPHER_TOPO_DRAW_H
#define TELPHER_TOPO_DRAW_H

#include "topo.h"

struct box { double x, y, w, h; bool drawn; };
struct picture {
	const struct tp_topo *topo;
	struct box *boxes;          /* [node] */
	struct box *tiles;          /* [host] */
	double width, height, tile_height, below;       /* below: where devices end within a tile */
};
bool picture_lay_out(const struct tp_topo *topo, struct picture *out);
void picture_free(struct picture *picture);

#endif

/* Between the files that make the graph. */
#ifndef TP_TOPO_BUILD_H
#define TP_TOPO_BUILD_H

#include "topo/doc.h"

struct tp_builder {
	const struct tp_topo_doc *doc;
	struct tp_topo *topo;
	const struct tp_element **element;      /* [node] it was made from; NULL: NVS */
	char (*domain)[TP_TOPO_NAME_BYTES];     /* [node] of an NVS: the NVLink domain that it joins */
	int32_t node_room, link_room;
	int64_t looks;                          /* at nodes, for the far ends of links */
};

/* NULL: no memory or too many (logged). The pointer is valid until the next one is added. */
struct tp_topo_node *tp_build_node(struct tp_builder *b, enum tp_topo_kind kind, const struct tp_element *element, int32_t host, int32_t parent,
	int32_t near_cpu);
/* Adds to the link that is there. One way. */
ncclResult_t tp_build_link(struct tp_builder *b, int32_t from, int32_t to, enum tp_topo_link_kind kind, int count, double bw, double full_bw);
ncclResult_t tp_build_link_both(struct tp_builder *b, int32_t a, int32_t c, enum tp_topo_link_kind kind, int count, double bw, double full_bw);
int32_t tp_build_find_bus(const struct tp_builder *b, enum tp_topo_kind kind, int32_t host, int64_t bus);

ncclResult_t tp_build_add_nodes(struct tp_builder *b);
ncclResult_t tp_build_add_links(struct tp_builder *b);          /* NVLink, C2C, pcilink, between CPUs */
ncclResult_t tp_build_finish(struct tp_builder *b);             /* flattens switches, orders, names, numbers */

/* GB/s of an xGMI link between two GPUs by their gcn name ("gfx942", "910"). */
double tp_topo_xgmi_bw(const char *gcn);

struct tp_topo_internal {
	struct tp_topo_path *wire, *used;       /* [nends * nends] */
	int32_t *end_of;                        /* [node]: its row; -1: no paths are kept */
	int32_t *ends;                          /* [nends] nodes */
	int32_t nends, nets_per_gpu;
	struct tp_paths_block *blocks;          /* where hops are kept */
	int32_t (*no_peer)[2];                  /* GPUs between which the driver forbids direct access */
	int32_t nno_peer;
};
void tp_topo_forget_paths(struct tp_topo *topo);

#endif

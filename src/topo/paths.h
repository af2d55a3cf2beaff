/* Between the files that compute paths and those that decide on them. */
#ifndef TP_TOPO_PATHS_H
#define TP_TOPO_PATHS_H

#include "topo/topo.h"

int32_t *tp_paths_keep(struct tp_topo *topo, int32_t nhops);    /* room for hops; lives as long as the paths */
int32_t tp_paths_limit(const struct tp_topo *topo, const int32_t *links, int32_t nhops);
/* From what the wires allow to what is used. */
ncclResult_t tp_paths_apply(struct tp_topo *topo, const struct tp_topo_policy *policy);

/* Nodes of a kind that are nearest to from: widest path, then best type. nodes NULL: only counts. */
int tp_paths_nearest(const struct tp_topo *topo, int32_t from, enum tp_topo_kind kind, int32_t *nodes, int max);
int32_t tp_paths_near_cpu(const struct tp_topo *topo, int32_t gpu);     /* -1: none */

#endif

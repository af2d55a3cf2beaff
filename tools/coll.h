/* Collectives by the names that people type, for the commands that reckon with plans. */
#ifndef TELPHER_TOOLS_COLL_H
#define TELPHER_TOOLS_COLL_H

#include <stdbool.h>

#include "plan/plan.h"

/* all_reduce, allreduce, AllReduce, all-reduce: the same. */
bool tool_same_name(const char *a, const char *b);
bool tool_find_coll(const char *name, enum tp_coll *out);
#define TOOL_COLL_NAMES "all_reduce, all_gather, reduce_scatter, broadcast, reduce, alltoall, gather, scatter"
const char *tool_coll_name(enum tp_coll coll);      /* "all_reduce", as telpher perf calls it */
bool tool_is_rooted(enum tp_coll coll);
bool tool_is_reduction(enum tp_coll coll);
/* Its size is that of a buffer with a block a rank. */
bool tool_has_blocks(enum tp_coll coll);
const char *tool_size_text(size_t bytes, char text[32]);     /* "64 KiB" */
/* Ranks dealt to hosts as `telpher run` does; freed by tp_layout_free. */
ncclResult_t tool_layout(int nranks, int nhosts, struct tp_layout **out);

#endif

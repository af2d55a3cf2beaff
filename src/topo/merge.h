#ifndef TP_TOPO_MERGE_H
#define TP_TOPO_MERGE_H

#include "topo/doc.h"

/* What the machine shows into a file that says how it is: where they differ the file is right, but for which rank has which GPU and for
 * what a port is to the transport (its number, GPUDirect). The file isn't checked: what it has too much may be what clashes. */
ncclResult_t tp_doc_merge_found(struct tp_topo_doc *file, const struct tp_topo_doc *found);

#endif

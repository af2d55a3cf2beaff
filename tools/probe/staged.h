/* Data through host memory on its way to the NIC: copied there, written from there, copied away from there. */
#ifndef TELPHER_PROBE_STAGED_H
#define TELPHER_PROBE_STAGED_H

#include "probe/loop.h"

struct probe_staged {
	const struct tp_gpu *gpu;               /* NULL: ordinary memory stands for a GPU's, and a core copies */
	struct probe_memory from, to;           /* where the data is, and where it goes */
	struct probe_memory out, in;            /* the stages, registered */
	struct probe_loop loop;                 /* out to in */
};

int probe_staged_open(const struct probe_port *port, const struct tp_gpu *gpu, size_t bytes, int numa, struct probe_staged *out);
void probe_staged_close(struct probe_staged *staged);
/* All bytes, in chunks, one after the other: nothing overlaps. */
int probe_staged_move(struct probe_staged *staged, size_t bytes, size_t chunk);
/* A copy from one's memory to the other's, by the GPU's copy engine where one of them is the GPU's. */
int probe_copy(const struct tp_gpu *gpu, void *to, const void *from, size_t bytes);
/* Reads [0, bytes) of from and checks that to holds the same. */
int probe_staged_check(struct probe_staged *staged, size_t bytes);

#endif

/* GPU ranks in a world (helper_world.h): links and an executor on the driver that TELPHER_CUDA_LIBRARY names, a stream, and
 * memory for a test's buffers, taken once, for an allocation may wait for kernels of other ranks. */
#ifndef TP_TESTS_EXEC_HELPER_CUDA_H
#define TP_TESTS_EXEC_HELPER_CUDA_H

#include "exec/cuda.h"
#include "exec/helper_world.h"

struct cuda_rank {
	struct tp_gpu *gpu;
	struct tp_links *links;
	struct tp_cuda_exec *exec;
	CUstream stream;
	struct tp_gpu_memory pool;
	size_t used;
};
/* Collective over the world. ndevices: the ranks take them in turn. False: it can't be, and it said why. */
bool cuda_open(struct world *world, int nchannels, int ndevices, size_t pool_bytes, struct cuda_rank *out);
void cuda_close(struct world *world, struct cuda_rank *c);
/* Memory of the pool, at `skew` bytes behind a line; all of it again after cuda_reset. */
void *cuda_take(struct cuda_rank *c, size_t bytes, size_t skew);
void cuda_reset(struct cuda_rank *c);
/* In the order of the stream; cuda_get waits. */
void cuda_put(struct cuda_rank *c, void *to, const void *from, size_t bytes);
void cuda_get(struct cuda_rank *c, void *to, const void *from, size_t bytes);
/* Until the stream has nothing to do, net links moved meanwhile. */
bool cuda_wait(struct cuda_rank *c);
/* The driver is there (the fake one, or a GPU's). */
bool cuda_has_driver(void);

#endif

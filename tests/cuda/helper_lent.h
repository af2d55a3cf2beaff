/* For tests of registered buffers that GPU ranks on different hosts send from where they lie: ranks on two virtual hosts over the software card, which reads
 * device memory, and what their logs say of what was lent. By hand on a real GPU too, which the ranks share. */
#ifndef TESTS_CUDA_HELPER_LENT_H
#define TESTS_CUDA_HELPER_LENT_H

#include <stdatomic.h>

#include "cuda/helper_ops.h"

#define GDR "NCCL_NET_GDR_LEVEL=SYS"
#define DMABUF "FAKE_CUDA_DMABUF=1"

/* Runs the tests whose names match (NULL: all), with the card and the log. */
int lent_main(const char *name, const struct CMUnitTest *tests, size_t ntests, const char *pattern);
struct gpu_options lent_on_two_hosts(int nranks, const char *env, const char *more);
/* A communicator of all ranks, any number of them one after the other. Closed: what this rank has lent so far. */
struct lent { unsigned long long chunks, bytes, late; };
void lent_open_comm(struct gpu_rank *g);
struct lent lent_close_comm(struct gpu_rank *g);
/* So much was lent, and nothing copied late. A GPU has more channels, and so chunks that are too small for it: there it is something, and no more. */
bool lent_is(struct lent now, unsigned long long bytes);
void *lent_register_range(struct gpu_rank *g, CUdeviceptr at, size_t bytes);
void *lent_register_pool(struct gpu_rank *g);
void lent_run_op(struct gpu_rank *g, struct gpu_op o);
bool lent_log_has(const char *what);
bool lent_warns(void);

#endif

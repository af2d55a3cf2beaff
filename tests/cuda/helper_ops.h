/* Operations on GPU ranks with a plain reference: prepare (device memory from the rank's pool), issue, check. Results are checked together
 * with what lies around them, which must be as it was. */
#ifndef TESTS_CUDA_HELPER_OPS_H
#define TESTS_CUDA_HELPER_OPS_H

#include "cuda/helper_gpu.h"

enum op_kind { ALL_REDUCE, REDUCE, REDUCE_SCATTER, BROADCAST, ALL_GATHER, GATHER, SCATTER, ALL_TO_ALL, TRANSFERS, NKINDS };
extern const char *const op_kind_names[NKINDS];

/* Alike on all ranks, but for rank and the pointers. */
struct gpu_op {
	enum op_kind kind;
	int rank, nranks, root;
	size_t count;
	ncclDataType_t type;
	ncclRedOp_t op;
	bool in_place;
	int skew_send, skew_recv;       /* elements off alignment */
	uint64_t seed;
	CUdeviceptr send, recv;         /* recv: with a margin before and behind */
	size_t send_bytes, recv_bytes;
};
void op_prepare(struct gpu_rank *g, struct gpu_op *o);
/* Fills the same memory anew, for seed. What was issued must be done. */
void op_fill(struct gpu_rank *g, struct gpu_op *o, uint64_t seed);
ncclResult_t op_issue(const struct gpu_op *o, ncclComm_t comm, CUstream stream);
/* Ends the process with a message where the result isn't the reference's. */
void op_check(struct gpu_rank *g, const struct gpu_op *o);
/* prepare, issue on a stream, check; the pool is empty again. */
void op_run(struct gpu_rank *g, struct gpu_op *o, ncclComm_t comm, int stream);
size_t op_pool_bytes(const struct gpu_op *o);   /* at most */

struct random { uint64_t state; };
uint64_t draw(struct random *random);
size_t below(struct random *random, size_t n);
size_t draw_count(struct random *random);
/* All but rank and nranks, which are the communicator's (root is below nranks). */
void draw_op(struct random *random, int nranks, struct gpu_op *out);

#endif

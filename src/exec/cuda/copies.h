/* All-gather, all-to-all and broadcast by copy engines, into windows: no multiprocessor moves data. What the host passes to the one
 * kernel, and the host's side.
 *
 * A call is a few tiny kernels of one block with copies between them, all on the caller's stream: the first tells the peers that this
 * rank's output may be written and waits for theirs; copies push this rank's blocks to where they belong; the last tells the peers that
 * they have landed and waits for theirs. A broadcast of three ranks and more is a scatter and a gather, from a size on: the root's link
 * carries twice the message and not once for each peer.
 *
 * Signs. Each rank has lines of 16 bytes in its region, by (kind of sign, peer): {tag, epoch, epoch's upper half and place, epoch}. The epoch
 * counts these calls, in 48 bits, in device memory, so that a graph replays for ever; place is a hash of where the output lies, which all
 * ranks have promised to be the same. A line is never written over before it was read: nobody ends a call before whoever waits for its
 * signs has seen them, so the next call's signs come later; and signs that nobody waits for aren't given.
 *
 * An aborted call gives no more signs. Its copies, which nobody can take back, still go where they would have gone. */
#ifndef TP_EXEC_CUDA_COPIES_H
#define TP_EXEC_CUDA_COPIES_H

#include "exec/cuda/device.h"

enum tp_copies_sign {
	TP_COPIES_READY,                            /* my output may be written */
	TP_COPIES_SCATTERED,                        /* from a root: your slice is there */
	TP_COPIES_DONE,                             /* what I had for you has landed */
	TP_COPIES_SIGNS
};

/* Tell these ranks (bits), then wait for those. */
struct tp_copies_args {
	uint64_t comm;                              /* struct tp_dev_comm */
	uint64_t epoch;                             /* uint64_t in this rank's memory: calls that it has ended */
	uint64_t lines;                             /* where they lie in every region */
	uint64_t tell, await;
	uint32_t tag;
	uint16_t place;
	uint8_t tell_sign, await_sign;              /* enum tp_copies_sign */
	int16_t rank, nranks;
	uint8_t ends;                               /* the call's last kernel */
	uint8_t gives_way;                          /* peers run on the same GPU */
	uint16_t pad;
};

#ifndef __cplusplus
#include "exec/exec.h"
#include "gpu/gpu.h"

struct tp_cuda_exec;
enum { TP_COPIES_STREAMS = 8 };
struct tp_cuda_copies {
	uint64_t epoch, lines;
	int spread;                                 /* streams that a rank's copies are spread over */
	bool batch;
	/* Of our own; none where ranks share the GPU: streams that share a queue would wait for each other. [0]: the rank's own block, and what must
	 * not go to the legacy stream; [1 …]: shares of the peers'. */
	int nstreams;
	CUstream streams[TP_COPIES_STREAMS];
	CUevent fork, joins[TP_COPIES_STREAMS];
};

size_t tp_cuda_copies_region_bytes(int nlocal);
/* Where its lines lie in the region. */
size_t tp_cuda_copies_at(int nlocal, int nchannels);
/* After the agreement on fused kernels. */
ncclResult_t tp_cuda_copies_init(struct tp_cuda_exec *exec);
void tp_cuda_copies_close(struct tp_cuda_exec *exec);
/* The call is one of these. A function of what all ranks agree on, or have promised. */
static inline bool tp_cuda_copies_take(const struct tp_exec_call *call)
{
	return __builtin_expect(call->out_peers != NULL, 0) && call->plan && call->plan->shape == TP_SHAPE_DIRECT;
}
ncclResult_t tp_cuda_copies_launch(struct tp_cuda_exec *exec, CUstream stream, const struct tp_exec_call *call);
const char *tp_cuda_copies_name(const struct tp_cuda_exec *exec, const struct tp_exec_call *call);
#endif
#endif

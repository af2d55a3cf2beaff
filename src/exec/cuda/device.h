/* What the host passes to kernels: read by C and by CUDA C, so fixed-size types only. Device addresses are uint64_t.
 *
 * Three kinds of memory: struct tp_dev_comm and the programs in the rank's device memory; struct tp_dev_status in pinned host
 * memory; arguments of a launch. */
#ifndef TP_EXEC_CUDA_DEVICE_H
#define TP_EXEC_CUDA_DEVICE_H

#include <stdint.h>

enum { TP_DEV_MAX_CHANNELS = 64, TP_DEV_MAX_LOCAL = 64, TP_DEV_MAX_CALLS = 8, TP_DEV_THREADS = 512 };

/* One end of a link. next and head_seen are the kernels'; the rest is written once. */
struct tp_dev_link {
	uint64_t slots, head;
	uint32_t stride, mask, capacity, kind;      /* enum tp_link_kind */
	uint32_t next, head_seen;
	int32_t peer;
	uint32_t pad;
};

/* Pinned host memory. abort: host to device, polled by every spin. The rest: device to host; the first fault counts. */
struct tp_dev_status {
	uint32_t abort;
	uint32_t fault;                             /* enum tp_cuda_fault; written last */
	int32_t peer, channel;
	uint32_t found, expected;
	uint64_t completed;
};

struct tp_dev_comm {
	int32_t rank, nranks, local, nlocal;
	uint64_t status;                            /* device's address of struct tp_dev_status */
	uint64_t region[TP_DEV_MAX_LOCAL];          /* of each rank of this host (tp_links_region), by place */
	uint32_t epoch[TP_DEV_MAX_CHANNELS];        /* of fused kernels, one a block: launches that used the block */
	uint32_t blocks_done;                       /* of the running kernel: the last one counts the kernel as completed */
	uint32_t shared_gpu;                        /* peers run on the same GPU: waits give way */
	uint64_t completed;
};

/* The reduction, as struct tp_reduce (exec.h) says it; type and op are the kernel's. */
struct tp_dev_reduce {
	uint32_t pre, post;
	double pre_scale, post_scale;
	int64_t pre_integer, post_divisor;
	uint64_t device_scalar;                     /* PreMulSum's scalar in device memory, of the element type; 0: pre_scale, pre_integer */
};

/* A collective. programs: struct tp_dev_program of channel 0, the others follow. */
struct tp_dev_call {
	uint64_t programs, input, output;
	uint64_t block_bytes, chunk_bytes;          /* chunk_bytes: the limit; each block fits its own geometry */
	uint32_t line_bytes, tag;
	struct tp_dev_reduce reduce;
};

#endif

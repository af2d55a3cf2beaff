/* GPUs for tests: the driver's table, opened by dlopen as the library does (TELPHER_CUDA_LIBRARY, else libcuda.so.1), so that the same
 * test runs on the fake driver and on a GPU; and ranks on them.
 *
 * Ranks of one process share a context, and some calls wait for all of its kernels (cuMemFree, allocation of pinned
 * memory): a rank must not call them while another's kernel waits for it. So a rank gets all its memory before its
 * communicator, and gives it back after a barrier. */
#ifndef TESTS_CUDA_HELPER_GPU_H
#define TESTS_CUDA_HELPER_GPU_H

#include "api/helper_ranks.h"
#include "gpu/driver.h"

extern struct tp_cuda cuda;
/* false: no driver here, or no device. Once a process; not before a fork. */
bool gpu_open(void);
/* Is there one? Asked in a process of its own, so that the caller may fork. Exit 77 where not: */
void gpu_need(void);
bool gpu_is_fake(void);
bool gpu_fake_here(void);                       /* the same, asked in a process of its own */
long long gpu_count(const char *what);          /* the fake's fakeCudaCount; -1: a real driver */

#define CUDA_IS(call, wanted) do { \
	CUresult cuda_got_ = cuda.call; \
	if (cuda_got_ != (wanted)) { \
		const char *cuda_name_ = NULL; \
		cuda.GetErrorName(cuda_got_, &cuda_name_); \
		fprintf(stderr, "%s:%d: (pid %d) cu%s gives %d (%s), not %d\n", __FILE__, __LINE__, (int)getpid(), #call, (int)cuda_got_, \
			cuda_name_ ? cuda_name_ : "?", (int)(wanted)); \
		_exit(9); \
	} \
} while (0)
#define CUDA_OK(call) CUDA_IS(call, CUDA_SUCCESS)
#define CHECK(condition) do { \
	if (!(condition)) { \
		fprintf(stderr, "%s:%d: (pid %d) %s is false\n", __FILE__, __LINE__, (int)getpid(), #condition); \
		_exit(9); \
	} \
} while (0)

/* Runs body in a process with these settings (NAME=value, NULL at the end; SECONDS=n: it has so long, not 30 s); true: it ended well. */
bool gpu_in_child(void (*body)(void), const char *const *env);
/* The same; true: it died of signal, or ended with a status other than 0. */
bool gpu_child_fails(void (*body)(void), const char *const *env);
CUcontext gpu_context(int ordinal);             /* the primary one, made current */

/* Ranks on GPUs. */
#define GPU_STREAMS 3
struct gpu_rank {
	struct ranks *r;
	ncclComm_t comm;
	int device, ndevices;
	CUstream streams[GPU_STREAMS];          /* non-blocking */
	CUdeviceptr pool;
	size_t pool_bytes, used;
	unsigned char *host;                    /* pinned, pool_bytes */
	void *arg;
};
struct gpu_options {
	int nranks, nhosts;
	bool threads, no_comm;
	int ndevices;                           /* of the fake; ranks take them in turn. 0: 1. Real ones: as many as there are, at most this */
	size_t pool_bytes;                      /* 0: 4 MB */
	uint64_t may_die;
	int timeout_s;
	const char *env[5];
};
typedef void (*gpu_body)(struct gpu_rank *g);
bool gpu_run(const struct gpu_options *options, gpu_body body, void *arg);
/* In processes and in threads, on one GPU and on several, and in processes on two hosts; asserts that all ends well. */
void gpu_everywhere(gpu_body body, int nranks);
/* Device memory from the rank's pool, 256-byte aligned plus skew bytes; all of it again after gpu_reset. */
CUdeviceptr gpu_take(struct gpu_rank *g, size_t bytes, size_t skew);
void gpu_reset(struct gpu_rank *g);
/* Copies, on streams[0], done when they return. Any host memory. */
void gpu_put(struct gpu_rank *g, CUdeviceptr to, const void *from, size_t bytes);
void gpu_get(struct gpu_rank *g, void *to, CUdeviceptr from, size_t bytes);
void gpu_fill(struct gpu_rank *g, CUdeviceptr to, int value, size_t bytes);
void gpu_sync(struct gpu_rank *g, int stream);
CUgraphExec gpu_end_capture(struct gpu_rank *g, int stream);      /* what the stream has captured, to be launched */
#define GPU_PTR(p) ((void *)(uintptr_t)(p))
#define GPU_STREAM(g, i) ((cudaStream_t)(g)->streams[i])
/* GPU_TEST_SCALE: sizes and numbers of rounds are multiplied by it, for runs on real GPUs. */
size_t gpu_scale(void);

#endif

/* What the parts of gpu share: gpu.c opens the driver and knows the devices, memory.c allocates, share.c takes memory to other
 * devices and processes, pointer.c says what an address is, nvml.c asks how devices are joined. */
#ifndef TP_GPU_INTERNAL_H
#define TP_GPU_INTERNAL_H

#include "gpu/gpu.h"

/* A device and what only this folder sees of it. */
struct tp_gpu_inside {
	struct tp_gpu gpu;
	struct tp_gpu_inside *next;
	unsigned long long context_id;  /* a context that is destroyed and made anew may have the same handle, never the same id */
	CUstream stream;                /* non-blocking, for our own copies: never waits for the program's streams */
};

bool tp_gpu_vmm_allowed(void);      /* NCCL_CUMEM_ENABLE */
/* The granularity of device memory on gpu's device. */
ncclResult_t tp_gpu_granularity(const struct tp_gpu *gpu, size_t *out);
void tp_gpu_properties(const struct tp_gpu *gpu, CUmemAllocationProp *out);
/* Reserves addresses, maps the whole of handle there, read and write for gpu. */
ncclResult_t tp_gpu_map(const struct tp_gpu *gpu, CUmemGenericAllocationHandle handle, size_t mapped, const char *what, CUdeviceptr *out);
/* For calls whose failure must not stop what is under way. */
void tp_gpu_complain(const struct tp_gpu *gpu, const char *call, CUresult error);

#endif

/* Memory of GPUs behind keys: it is never touched by a processor, but copied by the GPU's copy engine, through pinned host memory.
 *
 * CUDA is used only where the program itself uses it: a program without libcuda.so.1 has no pointer to device memory. gpu.c says what an
 * address is, gpu_copy.c copies. */
#ifndef TP_VERBS_GPU_H
#define TP_VERBS_GPU_H

#include "gpu/driver.h"
#include "verbs/card.h"

/* One allocation of those that a region lies in. */
struct tp_gpu_piece { uint64_t start, end, id; };
struct tp_gpu_copier;
struct tp_gpu_range {
	struct tp_gpu_range *next, **back;      /* all of them: for data that are posted inline */
	struct tp_gpu_copier *copier;
	uint64_t addr, bytes;
	uint32_t count;
	struct tp_gpu_piece pieces[];           /* in order; without gaps but in the first and the last page of a DMA-BUF */
};

/* Is all of it device memory? 0: none is. 1: *out holds what is needed to copy it (tp_gpu_drop). -1: it can't be had, said why; errno. */
int tp_gpu_find(uint64_t addr, uint64_t bytes, struct tp_gpu_range **out);
/* Of a DMA-BUF, which is of whole pages: the first and the last one may hold what isn't allocated, and can't be reached. */
int tp_gpu_find_pages(uint64_t addr, uint64_t bytes, struct tp_gpu_range **out);
void tp_gpu_drop(struct tp_gpu_range *range);
/* May device memory be registered at all (TELPHER_VERBS_GPU)? */
bool tp_gpu_allowed(void);

/* A region's place among the keys (key->region of those with TP_KEY_DEVICE) and its range; between alloc and publish, or after revoke. */
void tp_gpu_bind(uint32_t place, struct tp_gpu_range *range);
struct tp_gpu_range *tp_gpu_at(uint32_t place);

/* Copies by the copy engine of the GPU; when they return the data are there, the last bytes after all others. addr: the device's. 0, or
 * EFAULT: the memory isn't what was registered (any more), or CUDA failed, which is logged with the call and its error. */
int tp_gpu_write(const struct tp_gpu_range *range, uint64_t addr, const void *from, size_t bytes);
int tp_gpu_read(const struct tp_gpu_range *range, uint64_t addr, void *to, size_t bytes);
/* Within GPUs; EXDEV: not of one context, so they go through the host. *source: it is the source that is wrong. */
int tp_gpu_move(const struct tp_gpu_range *to, uint64_t to_addr, const struct tp_gpu_range *from, uint64_t from_addr, size_t bytes, bool *source);
/* Nobody else of this process has an atomic operation on device memory between the two. */
void tp_gpu_lock_atomics(void);
void tp_gpu_unlock_atomics(void);

/* Data that are posted inline are named by address alone. The bounds of all device memory that was ever registered: without a GPU this is
 * one comparison. */
extern _Atomic uint64_t tp_gpu_lowest, tp_gpu_highest;
static inline bool tp_gpu_near(uint64_t addr)
{
	return addr < atomic_load_explicit(&tp_gpu_highest, memory_order_relaxed) && addr >= atomic_load_explicit(&tp_gpu_lowest, memory_order_relaxed);
}
/* 0, EFAULT, or ENOENT: it lies in no registered device memory. */
int tp_gpu_read_inline(uint64_t addr, void *to, size_t bytes);

void tp_gpu_forget(void);               /* in a forked child: CUDA, if its parent had started it, says that it can't be used there */

/* ---- between the two files ---- */

/* What is used of the driver. must: without it there is no device memory for us; may: NULL in old drivers. */
#define TP_GPU_FUNCTIONS(must, may) \
	must(PointerGetAttributes, cuPointerGetAttributes, (unsigned int count, CUpointer_attribute *attributes, void **out, CUdeviceptr ptr)) \
	must(GetErrorName, cuGetErrorName, (CUresult error, const char **out)) \
	must(GetErrorString, cuGetErrorString, (CUresult error, const char **out)) \
	must(DeviceGet, cuDeviceGet, (CUdevice *out, int ordinal)) \
	must(DevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, (CUcontext *out, CUdevice device)) \
	must(DevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, (CUdevice device)) \
	must(DevicePrimaryCtxGetState, cuDevicePrimaryCtxGetState, (CUdevice device, unsigned int *flags, int *active)) \
	must(CtxPushCurrent, cuCtxPushCurrent_v2, (CUcontext context)) \
	must(CtxPopCurrent, cuCtxPopCurrent_v2, (CUcontext *out)) \
	may(CtxGetId, cuCtxGetId, (CUcontext context, unsigned long long *out)) \
	must(MemHostAlloc, cuMemHostAlloc, (void **out, size_t bytes, unsigned int flags)) \
	must(MemFreeHost, cuMemFreeHost, (void *ptr)) \
	must(MemcpyHtoDAsync, cuMemcpyHtoDAsync_v2, (CUdeviceptr to, const void *from, size_t bytes, CUstream stream)) \
	must(MemcpyDtoHAsync, cuMemcpyDtoHAsync_v2, (void *to, CUdeviceptr from, size_t bytes, CUstream stream)) \
	must(MemcpyDtoDAsync, cuMemcpyDtoDAsync_v2, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)) \
	must(StreamCreate, cuStreamCreate, (CUstream *out, unsigned int flags)) \
	must(StreamDestroy, cuStreamDestroy_v2, (CUstream stream)) \
	must(StreamSynchronize, cuStreamSynchronize, (CUstream stream)) \
	must(EventCreate, cuEventCreate, (CUevent *out, unsigned int flags)) \
	must(EventDestroy, cuEventDestroy_v2, (CUevent event)) \
	must(EventRecord, cuEventRecord, (CUevent event, CUstream stream)) \
	must(EventSynchronize, cuEventSynchronize, (CUevent event)) \
	must(ThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, (CUstreamCaptureMode *mode))
#define TP_GPU_MEMBER(name, symbol, parameters) CUresult (*name) parameters;
struct tp_gpu_driver { TP_GPU_FUNCTIONS(TP_GPU_MEMBER, TP_GPU_MEMBER) };
extern struct tp_gpu_driver tp_gpu_driver;      /* filled once there is a range */

/* What CUDA says about an address. */
struct tp_gpu_address { bool device; uint64_t end, id; CUcontext context; int ordinal; };
struct tp_gpu_address tp_gpu_ask(uint64_t addr);
/* Logs what failed, and gives EFAULT. */
int tp_gpu_failed(const char *call, CUresult error, uint64_t addr, uint64_t bytes);
/* The one for memory of this context (NULL: of the device's primary one); 0 or an errno, logged with the memory that it was wanted for.
 * They stay as long as the process. */
int tp_gpu_copier(CUcontext context, int ordinal, uint64_t addr, uint64_t bytes, struct tp_gpu_copier **out);
void tp_gpu_copiers_forget(void);

#endif

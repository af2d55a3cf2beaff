/* GPUs: CUDA's driver and NVML, opened at run time, so that one library serves machines with and without them.
 *
 * `tp_cuda` is the table of the driver's functions, under their names without "cu". Nothing here uses the CUDA runtime: a
 * program's own runtime shares the primary context with us. All of it may be called from any thread, with any context
 * current; what needs one takes it from the struct tp_gpu and puts the caller's back. */
#ifndef TP_GPU_GPU_H
#define TP_GPU_GPU_H

#include "base/base.h"
#include "gpu/driver.h"         /* the driver's types, constants and struct tp_cuda: our own text, no CUDA headers needed */

/* Opens libcuda.so.1 (or TELPHER_CUDA_LIBRARY) once. ncclSuccess with *has: devices there and working. No driver at all, or
 * no device: success, !*has. A driver that is there and doesn't work: an error that says what and what to do. */
ncclResult_t tp_gpu_open(bool *has);
extern const struct tp_cuda *tp_cuda;           /* NULL until tp_gpu_open found devices */
/* An error of the driver as a message: the call, the error by name, number and text, the device. ncclUnhandledCudaError. */
#define TP_CUDA_TRY(gpu, call) \
	do { \
		CUresult cuda_result_ = tp_cuda->call; \
		if (__builtin_expect(cuda_result_ != CUDA_SUCCESS, 0)) \
			return tp_gpu_fail(__FILE__, __LINE__, __func__, gpu, #call, cuda_result_); \
	} while (0)

/* One device in one context. Kept for the process's life, one per context that a communicator was made in. */
struct tp_gpu {
	CUcontext context;
	CUdevice device;
	int ordinal;                    /* as the program counts (CUDA_VISIBLE_DEVICES applied) */
	int nvml;                       /* as the machine counts; -1: NVML isn't there */
	uint8_t uuid[16];
	char bus_id[32];                /* "0000:1b:00.0" */
	int64_t bus;                    /* the same as a number, as NCCL logs it */
	char name[64];
	int major, minor;               /* compute capability */
	int sms;
	int driver_version;             /* 13000 */
	size_t memory_bytes;
	bool vmm;                       /* virtual memory management with file-descriptor export works here (probed) */
	bool ipc;                       /* cuIpcGetMemHandle works here (probed) */
	bool dma_buf;                   /* its memory can be exported so */
	bool rdma;                      /* its driver says that network cards reach its memory (nvidia-peermem) */
	bool mps;                       /* an MPS client */
};
/* The rank that the calling thread's calls are for, named in such messages; -1: none. */
extern _Thread_local int tp_gpu_rank_now __attribute__((tls_model("initial-exec")));
ncclResult_t tp_gpu_fail(const char *file, int line, const char *function, const struct tp_gpu *gpu, const char *call, CUresult error);
/* Our own stream on it, non-blocking. */
CUstream tp_gpu_stream(const struct tp_gpu *gpu);
/* The device of the calling thread's current context; the primary context of device 0 where there is none. */
ncclResult_t tp_gpu_current(struct tp_gpu **out);
ncclResult_t tp_gpu_of_ordinal(int ordinal, struct tp_gpu **out);       /* its primary context */
ncclResult_t tp_gpu_count(int *out);
/* Makes gpu's context current, if it isn't; *pushed says what tp_gpu_leave has to undo. */
ncclResult_t tp_gpu_enter(const struct tp_gpu *gpu, bool *pushed);
void tp_gpu_leave(bool pushed);
/* Around calls that a stream capture of the calling thread in global mode would forbid (allocation, synchronisation on our
 * own streams). Nests. */
void tp_gpu_relax(int *mode);
void tp_gpu_unrelax(int mode);

/* Memory. */
enum tp_gpu_memory_kind { TP_GPU_VMM, TP_GPU_PLAIN, TP_GPU_HOST, TP_GPU_HOST_REGISTERED, TP_GPU_IMPORTED_VMM, TP_GPU_IMPORTED_IPC };
struct tp_gpu_memory {
	const struct tp_gpu *gpu;
	enum tp_gpu_memory_kind kind;
	void *ptr;                      /* device address (host memory: the device's address for it) */
	void *host;                     /* TP_GPU_HOST*: the host's address */
	size_t bytes;                   /* as asked; mapped is what was rounded up to */
	size_t mapped;
	CUmemGenericAllocationHandle handle;
};
/* Device memory, zeroed. shareable: VMM with export where gpu->vmm, else plain (exported by IPC). what: for messages. */
ncclResult_t tp_gpu_alloc(const struct tp_gpu *gpu, size_t bytes, bool shareable, const char *what, struct tp_gpu_memory *out);
/* Pinned host memory that all devices see, zeroed. */
ncclResult_t tp_gpu_alloc_host(const struct tp_gpu *gpu, size_t bytes, const char *what, struct tp_gpu_memory *out);
/* Pins memory of ours (a shared segment, say): [host, host + bytes), page aligned. Undone by tp_gpu_free. */
ncclResult_t tp_gpu_register_host(const struct tp_gpu *gpu, void *host, size_t bytes, const char *what, struct tp_gpu_memory *out);
/* bytes between any two of: gpu's memory, memory mapped for it, host memory. On a stream of our own, and waits for it: no
 * kernel or stream of the program is waited for, and captures of the calling thread don't forbid it. */
ncclResult_t tp_gpu_copy(const struct tp_gpu *gpu, void *to, const void *from, size_t bytes);
/* Never waits for kernels that spin, where CUDA can avoid it; not in error paths of other calls: failures are logged. */
void tp_gpu_free(struct tp_gpu_memory *memory);

/* Device memory that the host stores to (GDRCopy): single words, as fast as a store over PCIe. Zeroed. Never read by the host, which would be slow. */
struct tp_gpu_mapped { struct tp_gpu_memory memory; unsigned char *host; void *mapping; unsigned long handle; };
bool tp_gpu_can_map(void);          /* NCCL_GDRCOPY_ENABLE, and GDRCopy is there */
ncclResult_t tp_gpu_map_for_host(const struct tp_gpu *gpu, size_t bytes, const char *what, struct tp_gpu_mapped *out);
void tp_gpu_unmap_for_host(struct tp_gpu_mapped *window);
/* Whole, and on its way at once: such memory gathers stores. What was stored before is seen before it. */
static inline void tp_gpu_mapped_store(void *at, uint64_t value)
{
	__atomic_store_n((uint64_t *)at, value, __ATOMIC_RELEASE);
#ifdef __x86_64__
	__builtin_ia32_sfence();
#else
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

/* To another process of this machine. The record travels as bytes; a VMM export has a descriptor besides (SCM_RIGHTS). */
#define TP_GPU_EXPORT_VERSION 1
struct tp_gpu_export { uint32_t kind, version; uint64_t bytes, mapped, offset; int32_t pid; uint8_t uuid[16]; uint8_t ipc[64]; };
/* *fd: -1 where none is needed; the caller closes it. */
ncclResult_t tp_gpu_export(const struct tp_gpu_memory *memory, struct tp_gpu_export *out, int *fd);
/* Maps it for gpu, read and write. fd stays the caller's. */
ncclResult_t tp_gpu_import(const struct tp_gpu *gpu, const struct tp_gpu_export *from, int fd, struct tp_gpu_memory *out);
/* VMM memory of ours: peer may use it too, at the same address. Other kinds: nothing to do, contexts enable peer access. */
ncclResult_t tp_gpu_allow(const struct tp_gpu_memory *memory, CUdevice peer);
/* Device memory as a DMA-BUF, for network cards; the caller closes it. ptr and bytes: multiples of the page size. pcie: for cards that reach it
 * over PCIe though something faster joins GPU and processor (data direct). Where gpu->dma_buf. */
ncclResult_t tp_gpu_export_dma_buf(const struct tp_gpu *gpu, const void *ptr, size_t bytes, bool pcie, int *fd);
/* Without a word where CUDA refuses it: of a range that may not be all of the program's. */
ncclResult_t tp_gpu_try_dma_buf(const struct tp_gpu *gpu, const void *ptr, size_t bytes, bool pcie, int *fd);
/* In the process: memory of another rank. VMM: a mapping of its own, which lives as long as it is needed, whatever the owner does;
 * out is freed like an import. PLAIN: peer access, and out->ptr stays NULL: kernels of gpu see it where the owner does. */
ncclResult_t tp_gpu_map_again(const struct tp_gpu *gpu, const struct tp_gpu_memory *memory, struct tp_gpu_memory *out);

/* What a pointer is. */
struct tp_gpu_pointer {
	bool device;                    /* device memory; false: host memory, pinned or not */
	bool pinned, managed;
	int ordinal;                    /* of the device that has it */
	void *base;                     /* of its allocation */
	size_t bytes;
	uint64_t buffer_id;             /* unique in the process's life: an address used again has another */
};
ncclResult_t tp_gpu_pointer(const void *ptr, struct tp_gpu_pointer *out);
ncclResult_t tp_gpu_buffer_id(const void *ptr, uint64_t *out);  /* 0: CUDA doesn't know the address */
/* Can kernels of gpu load and store memory of the device with this uuid / bus id? why: the reason against, for reports. In the
 * process: enables peer access to peer's context (NULL: another process's). */
bool tp_gpu_reaches(const struct tp_gpu *gpu, const uint8_t peer_uuid[16], const char *peer_bus_id, char *why, size_t why_bytes);
ncclResult_t tp_gpu_enable_peer(const struct tp_gpu *gpu, const struct tp_gpu *peer);
/* Asks NVML about a device, which takes some 30 ms in a virtual machine, so that later questions are answered at once. From any thread. */
void tp_gpu_ask_nvml(const struct tp_gpu *gpu);
/* NVLinks between two devices and their kind, by NVML: for the path report ("NV18", "PIX", "SYS"). */
void tp_gpu_path_name(const struct tp_gpu *gpu, const char *peer_bus_id, char *text, size_t bytes);
void tp_gpu_bus_path_name(const char *bus_id, const char *peer_bus_id, char *text, size_t bytes);       /* the same between two others */
/* NCCL's levels, nearest first; UNKNOWN: no NVML, or it can't tell. */
enum tp_gpu_distance { TP_GPU_LOC, TP_GPU_NVL, TP_GPU_PIX, TP_GPU_PXB, TP_GPU_PHB, TP_GPU_SYS, TP_GPU_UNKNOWN };
enum tp_gpu_distance tp_gpu_distance(const struct tp_gpu *gpu, const char *peer_bus_id);
/* NCCL_P2P_LEVEL and its like: a name, or the old number. The level's place in LOC NVL NVB C2C PIX PXB P2C PXN PHB SYS; -1: it is none. */
#define TP_GPU_LEVELS 10
#define TP_GPU_LEVEL_NAMES "LOC, NVL, NVB, C2C, PIX, PXB, P2C, PXN, PHB or SYS (or 0 to 4, the old form)"
int tp_gpu_level_parse(const char *text);
/* The farthest that it allows, as NVML tells distances: which know no relays and no C2C. */
enum tp_gpu_distance tp_gpu_level_distance(int level);

#endif

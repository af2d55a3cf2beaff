/* Memory for communicators. On devices it comes from virtual memory management wherever that works: it is mapped for exactly
 * those who need it, and giving it back waits for no kernel (cuMemFree waits for all of the context, and a kernel that waits for
 * a peer would never end). */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "gpu/internal.h"


void tp_gpu_properties(const struct tp_gpu *gpu, CUmemAllocationProp *out)
{
	int rdma = 0;
	*out = (CUmemAllocationProp){ .type = CU_MEM_ALLOCATION_TYPE_PINNED, .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
		.location = { CU_MEM_LOCATION_TYPE_DEVICE, gpu->device } };
	if (tp_cuda && tp_cuda->DeviceGetAttribute(&rdma, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, gpu->device) == CUDA_SUCCESS && rdma)
		out->allocFlags.gpuDirectRDMACapable = 1;
}

ncclResult_t tp_gpu_granularity(const struct tp_gpu *gpu, size_t *out)
{
	CUmemAllocationProp properties;
	tp_gpu_properties(gpu, &properties);
	TP_CUDA_TRY(gpu, MemGetAllocationGranularity(out, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
	return ncclSuccess;
}

static ncclResult_t out_of_memory(const struct tp_gpu *gpu, size_t bytes, const char *what)
{
	size_t free_bytes = 0, total = 0;
	if (tp_cuda->MemGetInfo(&free_bytes, &total) != CUDA_SUCCESS) free_bytes = total = 0;
	return TP_FAIL(ncclUnhandledCudaError, "device %d (%s, %s) has no %zu bytes left for %s: %zu of %zu MiB are free", gpu->ordinal, gpu->name,
		gpu->bus_id, bytes, what, free_bytes >> 20, total >> 20);
}

ncclResult_t tp_gpu_map(const struct tp_gpu *gpu, CUmemGenericAllocationHandle handle, size_t mapped, const char *what, CUdeviceptr *out)
{
	CUdeviceptr ptr;
	CUmemAccessDesc access = { { CU_MEM_LOCATION_TYPE_DEVICE, gpu->device }, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	TP_CUDA_TRY(gpu, MemAddressReserve(&ptr, mapped, 0, 0, 0));
	CUresult error = tp_cuda->MemMap(ptr, mapped, 0, handle, 0);
	if (error == CUDA_SUCCESS) {
		error = tp_cuda->MemSetAccess(ptr, mapped, &access, 1);
		if (error != CUDA_SUCCESS) tp_gpu_complain(gpu, "MemUnmap", tp_cuda->MemUnmap(ptr, mapped));
	}
	if (error == CUDA_SUCCESS) {
		*out = ptr;
		return ncclSuccess;
	}
	tp_gpu_complain(gpu, "MemAddressFree", tp_cuda->MemAddressFree(ptr, mapped));
	tp_gpu_fail(__FILE__, __LINE__, __func__, gpu, "MemMap", error);
	return TP_FAIL(ncclUnhandledCudaError, "device %d can't map %zu bytes (%s)", gpu->ordinal, mapped, what);
}

static ncclResult_t alloc_vmm(const struct tp_gpu *gpu, const char *what, struct tp_gpu_memory *m)
{
	CUmemAllocationProp properties;
	CUdeviceptr ptr;
	size_t unit;
	TP_TRY(tp_gpu_granularity(gpu, &unit));
	tp_gpu_properties(gpu, &properties);
	m->mapped = tp_align_up(m->bytes, unit);
	CUresult error = tp_cuda->MemCreate(&m->handle, m->mapped, &properties, 0);
	if (error == CUDA_ERROR_OUT_OF_MEMORY) return out_of_memory(gpu, m->mapped, what);
	if (error != CUDA_SUCCESS) return tp_gpu_fail(__FILE__, __LINE__, __func__, gpu, "MemCreate", error);
	ncclResult_t result = tp_gpu_map(gpu, m->handle, m->mapped, what, &ptr);
	if (result != ncclSuccess) {
		tp_gpu_complain(gpu, "MemRelease", tp_cuda->MemRelease(m->handle));
		return result;
	}
	m->kind = TP_GPU_VMM;
	m->ptr = (void *)(uintptr_t)ptr;
	return ncclSuccess;
}

static ncclResult_t alloc_plain(const struct tp_gpu *gpu, const char *what, struct tp_gpu_memory *m)
{
	CUdeviceptr ptr;
	CUresult error = tp_cuda->MemAlloc(&ptr, m->bytes);
	if (error == CUDA_ERROR_OUT_OF_MEMORY) return out_of_memory(gpu, m->bytes, what);
	if (error != CUDA_SUCCESS) return tp_gpu_fail(__FILE__, __LINE__, __func__, gpu, "MemAlloc", error);
	m->kind = TP_GPU_PLAIN;
	m->mapped = m->bytes;
	m->ptr = (void *)(uintptr_t)ptr;
	return ncclSuccess;
}

/* gpu's context is current and captures don't forbid it. */
static ncclResult_t fill_zero(const struct tp_gpu *gpu, const struct tp_gpu_memory *m)
{
	CUstream stream = tp_gpu_stream(gpu);
	TP_CUDA_TRY(gpu, MemsetD8Async((CUdeviceptr)(uintptr_t)m->ptr, 0, m->mapped, stream));
	TP_CUDA_TRY(gpu, StreamSynchronize(stream));
	return ncclSuccess;
}

ncclResult_t tp_gpu_alloc(const struct tp_gpu *gpu, size_t bytes, bool shareable, const char *what, struct tp_gpu_memory *out)
{
	struct tp_gpu_memory m = { .gpu = gpu, .bytes = bytes };
	bool pushed;
	int mode;
	if (shareable && !gpu->vmm && !gpu->ipc)
		TP_INFO(TP_ALLOC, "device %d: %s can't be shared with other processes: neither CUDA VMM nor CUDA IPC works here", gpu->ordinal, what);
	TP_TRY(tp_gpu_enter(gpu, &pushed));
	tp_gpu_relax(&mode);
	ncclResult_t result = gpu->vmm ? alloc_vmm(gpu, what, &m) : alloc_plain(gpu, what, &m);
	if (result == ncclSuccess) {
		result = fill_zero(gpu, &m);
		if (result != ncclSuccess) tp_gpu_free(&m);
	}
	tp_gpu_unrelax(mode);
	tp_gpu_leave(pushed);
	if (result != ncclSuccess) return result;
	TP_INFO(TP_ALLOC, "device %d: %zu bytes at %p for %s", gpu->ordinal, m.mapped, m.ptr, what);
	*out = m;
	return ncclSuccess;
}

static ncclResult_t alloc_host(const struct tp_gpu *gpu, const char *what, struct tp_gpu_memory *m)
{
	CUdeviceptr ptr;
	CUresult error = tp_cuda->MemHostAlloc(&m->host, m->bytes, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
	if (error == CUDA_ERROR_OUT_OF_MEMORY)
		return TP_FAIL(ncclUnhandledCudaError, "no %zu bytes of pinned host memory for %s (limits on locked memory of a container or user: ulimit -l)",
			m->bytes, what);
	if (error != CUDA_SUCCESS) return tp_gpu_fail(__FILE__, __LINE__, __func__, gpu, "MemHostAlloc", error);
	error = tp_cuda->MemHostGetDevicePointer(&ptr, m->host, 0);
	if (error != CUDA_SUCCESS) {
		tp_gpu_complain(gpu, "MemFreeHost", tp_cuda->MemFreeHost(m->host));
		return tp_gpu_fail(__FILE__, __LINE__, __func__, gpu, "MemHostGetDevicePointer", error);
	}
	memset(m->host, 0, m->bytes);
	m->ptr = (void *)(uintptr_t)ptr;
	return ncclSuccess;
}

ncclResult_t tp_gpu_alloc_host(const struct tp_gpu *gpu, size_t bytes, const char *what, struct tp_gpu_memory *out)
{
	struct tp_gpu_memory m = { .gpu = gpu, .kind = TP_GPU_HOST, .bytes = bytes, .mapped = bytes };
	bool pushed;
	int mode;
	TP_TRY(tp_gpu_enter(gpu, &pushed));
	tp_gpu_relax(&mode);
	ncclResult_t result = alloc_host(gpu, what, &m);
	tp_gpu_unrelax(mode);
	tp_gpu_leave(pushed);
	if (result == ncclSuccess) *out = m;
	return result;
}

/* ---- registered host memory: ranks of one process register the same segment, the driver takes it once. */

struct registered { struct registered *next; void *host; size_t bytes; int users; };
static pthread_mutex_t registered_lock = PTHREAD_MUTEX_INITIALIZER;
static struct registered *all_registered;

static ncclResult_t register_locked(const struct tp_gpu *gpu, void *host, size_t bytes, const char *what)
{
	struct registered *r = all_registered;
	while (r && (r->host != host || r->bytes != bytes)) r = r->next;
	if (r) {
		r->users++;
		return ncclSuccess;
	}
	r = tp_alloc(1, sizeof(*r), "a range of pinned memory");
	if (!r) return ncclSystemError;
	CUresult error = tp_cuda->MemHostRegister(host, bytes, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
	if (error != CUDA_SUCCESS) {
		free(r);
		tp_gpu_fail(__FILE__, __LINE__, __func__, gpu, "MemHostRegister", error);
		return TP_FAIL(ncclUnhandledCudaError, "can't pin %zu bytes of shared memory (%s); limits on locked memory of a container or user: ulimit -l",
			bytes, what);
	}
	*r = (struct registered){ all_registered, host, bytes, 1 };
	all_registered = r;
	return ncclSuccess;
}

static void unregister(const struct tp_gpu *gpu, void *host, size_t bytes)
{
	pthread_mutex_lock(&registered_lock);
	struct registered **at = &all_registered;
	while (*at && ((*at)->host != host || (*at)->bytes != bytes)) at = &(*at)->next;
	struct registered *r = *at;
	if (r && --r->users == 0) {
		*at = r->next;
		tp_gpu_complain(gpu, "MemHostUnregister", tp_cuda->MemHostUnregister(host));
		free(r);
	}
	pthread_mutex_unlock(&registered_lock);
}

ncclResult_t tp_gpu_register_host(const struct tp_gpu *gpu, void *host, size_t bytes, const char *what, struct tp_gpu_memory *out)
{
	CUdeviceptr ptr = 0;
	bool pushed;
	int mode;
	TP_TRY(tp_gpu_enter(gpu, &pushed));
	tp_gpu_relax(&mode);
	pthread_mutex_lock(&registered_lock);
	ncclResult_t result = register_locked(gpu, host, bytes, what);
	pthread_mutex_unlock(&registered_lock);
	if (result == ncclSuccess) {
		CUresult error = tp_cuda->MemHostGetDevicePointer(&ptr, host, 0);
		if (error != CUDA_SUCCESS) {
			result = tp_gpu_fail(__FILE__, __LINE__, __func__, gpu, "MemHostGetDevicePointer", error);
			unregister(gpu, host, bytes);
		}
	}
	tp_gpu_unrelax(mode);
	tp_gpu_leave(pushed);
	if (result == ncclSuccess)
		*out = (struct tp_gpu_memory){ .gpu = gpu, .kind = TP_GPU_HOST_REGISTERED, .ptr = (void *)(uintptr_t)ptr, .host = host, .bytes = bytes, .mapped = bytes };
	return result;
}

static void unmap(const struct tp_gpu_memory *m)
{
	CUdeviceptr ptr = (CUdeviceptr)(uintptr_t)m->ptr;
	tp_gpu_complain(m->gpu, "MemUnmap", tp_cuda->MemUnmap(ptr, m->mapped));
	tp_gpu_complain(m->gpu, "MemAddressFree", tp_cuda->MemAddressFree(ptr, m->mapped));
	tp_gpu_complain(m->gpu, "MemRelease", tp_cuda->MemRelease(m->handle));
}

void tp_gpu_free(struct tp_gpu_memory *memory)
{
	const struct tp_gpu *gpu = memory->gpu;
	bool pushed = false;
	int mode;
	if (!memory->ptr) return;
	if (tp_gpu_enter(gpu, &pushed) != ncclSuccess) return;
	tp_gpu_relax(&mode);
	switch (memory->kind) {
	case TP_GPU_VMM: case TP_GPU_IMPORTED_VMM:
		unmap(memory);
		break;
	case TP_GPU_PLAIN:
		tp_gpu_complain(gpu, "MemFree", tp_cuda->MemFree((CUdeviceptr)(uintptr_t)memory->ptr));
		break;
	case TP_GPU_HOST:
		tp_gpu_complain(gpu, "MemFreeHost", tp_cuda->MemFreeHost(memory->host));
		break;
	case TP_GPU_HOST_REGISTERED:
		unregister(gpu, memory->host, memory->bytes);
		break;
	case TP_GPU_IMPORTED_IPC:
		tp_gpu_complain(gpu, "IpcCloseMemHandle", tp_cuda->IpcCloseMemHandle((CUdeviceptr)(uintptr_t)memory->ptr));
		break;
	}
	tp_gpu_unrelax(mode);
	tp_gpu_leave(pushed);
	memset(memory, 0, sizeof(*memory));
}

/* ---- our own copies */

static ncclResult_t copy_and_wait(const struct tp_gpu *gpu, void *to, const void *from, size_t bytes)
{
	CUstream stream = tp_gpu_stream(gpu);
	TP_CUDA_TRY(gpu, MemcpyAsync((CUdeviceptr)(uintptr_t)to, (CUdeviceptr)(uintptr_t)from, bytes, stream));
	TP_CUDA_TRY(gpu, StreamSynchronize(stream));
	return ncclSuccess;
}

ncclResult_t tp_gpu_copy(const struct tp_gpu *gpu, void *to, const void *from, size_t bytes)
{
	bool pushed;
	int mode;
	if (!bytes) return ncclSuccess;
	TP_TRY(tp_gpu_enter(gpu, &pushed));
	tp_gpu_relax(&mode);
	ncclResult_t result = copy_and_wait(gpu, to, from, bytes);
	tp_gpu_unrelax(mode);
	tp_gpu_leave(pushed);
	return result;
}

/* What an allocation of the program is, as others need to know it to map it. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "mem/internal.h"

/* Mapped memory: what is mapped at this very place, which may be less than the range of addresses that was reserved. */
static void narrow_to_mapping(const void *ptr, struct tp_gpu_pointer *p)
{
	CUdeviceptr base = 0, address = (CUdeviceptr)(uintptr_t)ptr;
	size_t bytes = 0;
	if (tp_cuda->PointerGetAttribute(&base, CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR, address) != CUDA_SUCCESS ||
		tp_cuda->PointerGetAttribute(&bytes, CU_POINTER_ATTRIBUTE_MAPPING_SIZE, address) != CUDA_SUCCESS || !base || !bytes) return;
	p->base = (void *)(uintptr_t)base;
	p->bytes = bytes;
}

bool tp_mem_is_mapped(const void *ptr)
{
	CUmemGenericAllocationHandle handle;
	int mode;
	tp_gpu_relax(&mode);
	bool mapped = tp_cuda->MemRetainAllocationHandle(&handle, (void *)(uintptr_t)ptr) == CUDA_SUCCESS;
	if (mapped) tp_cuda->MemRelease(handle);
	tp_gpu_unrelax(mode);
	return mapped;
}

/* true: it is mapped memory; *fd stays -1 where that can't be exported. */
static bool export_mapped(const struct tp_gpu_pointer *p, struct tp_gpu_export *out, int *fd)
{
	CUmemGenericAllocationHandle handle;
	CUmemAllocationProp properties;
	if (tp_cuda->MemRetainAllocationHandle(&handle, p->base) != CUDA_SUCCESS) return false;
	if (tp_cuda->MemGetAllocationPropertiesFromHandle(&properties, handle) != CUDA_SUCCESS ||
		!((unsigned)properties.requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) ||
		tp_cuda->MemExportToShareableHandle(fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) != CUDA_SUCCESS) *fd = -1;
	tp_cuda->MemRelease(handle);
	out->kind = TP_GPU_VMM;
	return true;
}

static bool export_plain(const struct tp_gpu_pointer *p, struct tp_gpu_export *out)
{
	CUipcMemHandle ipc;
	if (tp_cuda->IpcGetMemHandle(&ipc, (CUdeviceptr)(uintptr_t)p->base) != CUDA_SUCCESS) return false;
	memcpy(out->ipc, ipc.reserved, sizeof(out->ipc));
	out->kind = TP_GPU_PLAIN;
	return true;
}

static const char *judge(const struct tp_gpu *gpu, const struct tp_gpu_pointer *p, const void *ptr, size_t bytes)
{
	if (!p->device) return "it is host memory, or no memory that CUDA knows";
	if (p->managed) return "it is managed memory";
	if (p->ordinal != gpu->ordinal) return "it belongs to another device than the communicator's rank";
	if ((uintptr_t)ptr < (uintptr_t)p->base || (uintptr_t)ptr + bytes > (uintptr_t)p->base + p->bytes)
		return "the range isn't inside one allocation (expandable segments are mapped in pieces)";
	return NULL;
}

const char *tp_mem_refuse(const struct tp_gpu *gpu, const void *ptr, size_t bytes, struct tp_gpu_pointer *out)
{
	if (tp_gpu_pointer(ptr, out) != ncclSuccess) return "CUDA can't say what it is";
	if (out->device) narrow_to_mapping(ptr, out);
	return judge(gpu, out, ptr, bytes);
}

bool tp_mem_describe(const struct tp_gpu *gpu, uint64_t process, const void *ptr, size_t bytes, struct tp_mem_record *out, int *fd, char *why,
	size_t why_bytes)
{
	struct tp_gpu_pointer p = { 0 };
	bool pushed = false, mapped = false, shared = false;
	int made = -1, mode;
	memset(out, 0, sizeof(*out));
	const char *reason = tp_mem_refuse(gpu, ptr, bytes, &p);
	if (!reason && tp_gpu_enter(gpu, &pushed) == ncclSuccess) {
		tp_gpu_relax(&mode);
		mapped = export_mapped(&p, &out->export, &made);
		shared = mapped ? made >= 0 : gpu->ipc && export_plain(&p, &out->export);
		tp_gpu_unrelax(mode);
		tp_gpu_leave(pushed);
		if (!shared) reason = mapped ? "it was made without a handle for file descriptors" : "CUDA IPC can't share it (a pool of cudaMallocAsync?)";
	}
	if (!shared) {
		snprintf(why, why_bytes, "%s", reason ? reason : "its context can't be entered");
		return false;
	}
	out->export.version = TP_GPU_EXPORT_VERSION;
	out->export.bytes = out->export.mapped = p.bytes;
	out->export.pid = getpid();
	memcpy(out->export.uuid, gpu->uuid, sizeof(out->export.uuid));
	out->process = process;
	out->buffer_id = p.buffer_id;
	out->base = (uintptr_t)p.base;
	out->gpu = (uintptr_t)gpu;
	out->offset = (uintptr_t)ptr - (uintptr_t)p.base;
	out->bytes = bytes;
	*fd = made;
	return true;
}

/* Memory across devices and processes: peer access, exports and imports. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "gpu/internal.h"
#include "gpu/nvml.h"

/* ---- within the process */

ncclResult_t tp_gpu_enable_peer(const struct tp_gpu *gpu, const struct tp_gpu *peer)
{
	bool pushed;
	if (gpu->context == peer->context) return ncclSuccess;
	TP_TRY(tp_gpu_enter(gpu, &pushed));
	CUresult error = tp_cuda->CtxEnablePeerAccess(peer->context, 0);
	tp_gpu_leave(pushed);
	if (error == CUDA_SUCCESS || error == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) return ncclSuccess;
	tp_gpu_fail(__FILE__, __LINE__, __func__, gpu, "CtxEnablePeerAccess", error);
	return TP_FAIL(ncclUnhandledCudaError, "device %d can't reach device %d; NCCL_P2P_DISABLE=1 goes through host memory", gpu->ordinal, peer->ordinal);
}

ncclResult_t tp_gpu_allow(const struct tp_gpu_memory *memory, CUdevice peer)
{
	CUmemAccessDesc access = { { CU_MEM_LOCATION_TYPE_DEVICE, peer }, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	if (memory->kind != TP_GPU_VMM) return ncclSuccess;
	TP_CUDA_TRY(memory->gpu, MemSetAccess((CUdeviceptr)(uintptr_t)memory->ptr, memory->mapped, &access, 1));
	return ncclSuccess;
}

ncclResult_t tp_gpu_map_again(const struct tp_gpu *gpu, const struct tp_gpu_memory *memory, struct tp_gpu_memory *out)
{
	struct tp_gpu_memory m = { .gpu = gpu, .kind = TP_GPU_IMPORTED_VMM, .bytes = memory->bytes, .mapped = memory->mapped };
	CUdeviceptr ptr;
	bool pushed;
	if (memory->kind == TP_GPU_PLAIN) return tp_gpu_enable_peer(gpu, memory->gpu);
	if (memory->kind != TP_GPU_VMM)
		return TP_FAIL(ncclInternalError, "memory at %p (kind %d) isn't of a device of this process: it can't be mapped again", memory->ptr, (int)memory->kind);
	TP_TRY(tp_gpu_enter(gpu, &pushed));
	CUresult error = tp_cuda->MemRetainAllocationHandle(&m.handle, memory->ptr);
	ncclResult_t result = error == CUDA_SUCCESS ? tp_gpu_map(gpu, m.handle, m.mapped, "memory of another rank", &ptr)
		: tp_gpu_fail(__FILE__, __LINE__, __func__, gpu, "MemRetainAllocationHandle", error);
	if (error == CUDA_SUCCESS && result != ncclSuccess) tp_gpu_complain(gpu, "MemRelease", tp_cuda->MemRelease(m.handle));
	tp_gpu_leave(pushed);
	if (result != ncclSuccess) return result;
	m.ptr = (void *)(uintptr_t)ptr;
	*out = m;
	return ncclSuccess;
}

/* Two devices that this process may see. */
static bool can_access(const struct tp_gpu *gpu, CUdevice peer, char *why, size_t why_bytes)
{
	int can = 0;
	if (tp_cuda->DeviceCanAccessPeer(&can, gpu->device, peer) == CUDA_SUCCESS && can) return true;
	snprintf(why, why_bytes, "CUDA gives device %d no peer access to device %d", gpu->ordinal, (int)peer);
	return false;
}

bool tp_gpu_reaches(const struct tp_gpu *gpu, const uint8_t peer_uuid[16], const char *peer_bus_id, char *why, size_t why_bytes)
{
	CUdevice peer;
	CUuuid uuid;
	if (why_bytes) why[0] = 0;
	if (memcmp(gpu->uuid, peer_uuid, sizeof(gpu->uuid)) == 0) return true;
	if (tp_cuda->DeviceGetByPCIBusId(&peer, peer_bus_id) == CUDA_SUCCESS && tp_cuda->DeviceGetUuid(&uuid, peer) == CUDA_SUCCESS &&
		memcmp(uuid.bytes, peer_uuid, 16) == 0)
		return can_access(gpu, peer, why, why_bytes);
	/* CUDA_VISIBLE_DEVICES hides it from this process: CUDA can map its memory all the same, but can't be asked. */
	if (!tp_nvml_forbids_peer(gpu->bus_id, peer_bus_id)) return true;
	snprintf(why, why_bytes, "NVML says that %s has no peer access to %s", gpu->bus_id, peer_bus_id);
	return false;
}

/* ---- between processes */

ncclResult_t tp_gpu_export(const struct tp_gpu_memory *memory, struct tp_gpu_export *out, int *fd)
{
	const struct tp_gpu *gpu = memory->gpu;
	struct tp_gpu_export e = { .kind = (uint32_t)memory->kind, .version = TP_GPU_EXPORT_VERSION, .bytes = memory->bytes, .mapped = memory->mapped,
		.pid = getpid() };
	int made = -1;
	memcpy(e.uuid, gpu->uuid, sizeof(e.uuid));
	if (memory->kind == TP_GPU_VMM) {
		TP_CUDA_TRY(gpu, MemExportToShareableHandle(&made, memory->handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
	} else if (memory->kind == TP_GPU_PLAIN) {
		CUipcMemHandle ipc;
		TP_CUDA_TRY(gpu, IpcGetMemHandle(&ipc, (CUdeviceptr)(uintptr_t)memory->ptr));
		memcpy(e.ipc, ipc.reserved, sizeof(e.ipc));
	} else {
		return TP_FAIL(ncclInternalError, "memory at %p (kind %d) isn't of a device of this process: it has no export", memory->ptr, (int)memory->kind);
	}
	*out = e;
	*fd = made;
	return ncclSuccess;
}

static ncclResult_t export_dma_buf(const struct tp_gpu *gpu, const void *ptr, size_t bytes, bool pcie, int *out, CUresult *error)
{
	int fd = -1;
	bool pushed;
	*error = CUDA_SUCCESS;
	if (!gpu->dma_buf) return TP_FAIL(ncclInternalError, "device %d (%s) has no DMA-BUF", gpu->ordinal, gpu->name);
	TP_TRY(tp_gpu_enter(gpu, &pushed));
	*error = tp_cuda->MemGetHandleForAddressRange(&fd, (CUdeviceptr)(uintptr_t)ptr, bytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, pcie ? CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE : 0);
	tp_gpu_leave(pushed);
	if (*error != CUDA_SUCCESS) return ncclUnhandledCudaError;
	*out = fd;
	return ncclSuccess;
}

ncclResult_t tp_gpu_export_dma_buf(const struct tp_gpu *gpu, const void *ptr, size_t bytes, bool pcie, int *fd)
{
	CUresult error;
	ncclResult_t result = export_dma_buf(gpu, ptr, bytes, pcie, fd, &error);
	return error == CUDA_SUCCESS ? result : tp_gpu_fail(__FILE__, __LINE__, __func__, gpu, "MemGetHandleForAddressRange", error);
}

ncclResult_t tp_gpu_try_dma_buf(const struct tp_gpu *gpu, const void *ptr, size_t bytes, bool pcie, int *fd)
{
	CUresult error;
	return export_dma_buf(gpu, ptr, bytes, pcie, fd, &error);
}

static ncclResult_t import_vmm(const struct tp_gpu *gpu, const struct tp_gpu_export *from, int fd, struct tp_gpu_memory *m)
{
	CUdeviceptr ptr;
	if (fd < 0) return TP_FAIL(ncclInternalError, "memory of process %d came without its descriptor", (int)from->pid);
	TP_CUDA_TRY(gpu, MemImportFromShareableHandle(&m->handle, (void *)(uintptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
	ncclResult_t result = tp_gpu_map(gpu, m->handle, from->mapped, "memory of another process", &ptr);
	if (result != ncclSuccess) {
		tp_gpu_complain(gpu, "MemRelease", tp_cuda->MemRelease(m->handle));
		return result;
	}
	m->kind = TP_GPU_IMPORTED_VMM;
	m->ptr = (void *)(uintptr_t)ptr;
	return ncclSuccess;
}

static ncclResult_t import_ipc(const struct tp_gpu *gpu, const struct tp_gpu_export *from, struct tp_gpu_memory *m)
{
	CUdeviceptr ptr;
	CUipcMemHandle ipc;
	memcpy(ipc.reserved, from->ipc, sizeof(ipc.reserved));
	TP_CUDA_TRY(gpu, IpcOpenMemHandle(&ptr, ipc, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
	m->kind = TP_GPU_IMPORTED_IPC;
	m->ptr = (void *)(uintptr_t)ptr;
	return ncclSuccess;
}

ncclResult_t tp_gpu_import(const struct tp_gpu *gpu, const struct tp_gpu_export *from, int fd, struct tp_gpu_memory *out)
{
	struct tp_gpu_memory m = { .gpu = gpu, .bytes = from->bytes, .mapped = from->mapped };
	bool pushed;
	int mode;
	if (from->version != TP_GPU_EXPORT_VERSION || (from->kind != TP_GPU_VMM && from->kind != TP_GPU_PLAIN) || !from->mapped || from->bytes > from->mapped)
		return TP_FAIL(ncclInvalidArgument, "process %d sent a record of GPU memory of version %u and kind %u, %llu of %llu bytes; expected version %d",
			(int)from->pid, from->version, from->kind, (unsigned long long)from->bytes, (unsigned long long)from->mapped, TP_GPU_EXPORT_VERSION);
	TP_TRY(tp_gpu_enter(gpu, &pushed));
	tp_gpu_relax(&mode);
	ncclResult_t result = from->kind == TP_GPU_VMM ? import_vmm(gpu, from, fd, &m) : import_ipc(gpu, from, &m);
	tp_gpu_unrelax(mode);
	tp_gpu_leave(pushed);
	if (result == ncclSuccess) *out = m;
	return result;
}

void tp_gpu_ask_nvml(const struct tp_gpu *gpu) { tp_nvml_find(gpu->bus_id); }

void tp_gpu_bus_path_name(const char *bus_id, const char *peer_bus_id, char *text, size_t bytes)
{
	if (strcmp(bus_id, peer_bus_id) == 0) snprintf(text, bytes, "LOC");
	else tp_nvml_path(bus_id, peer_bus_id, text, bytes);
}

void tp_gpu_path_name(const struct tp_gpu *gpu, const char *peer_bus_id, char *text, size_t bytes)
{
	tp_gpu_bus_path_name(gpu->bus_id, peer_bus_id, text, bytes);
}

enum tp_gpu_distance tp_gpu_distance(const struct tp_gpu *gpu, const char *peer_bus_id)
{
	return strcmp(gpu->bus_id, peer_bus_id) == 0 ? TP_GPU_LOC : tp_nvml_distance(gpu->bus_id, peer_bus_id);
}

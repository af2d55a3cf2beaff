/* ncclMemAlloc: memory of a device that all devices of the process that reach it may use, and that can be exported. */
#include <stdlib.h>

#include "mem/internal.h"

struct allocation { struct allocation *next; struct tp_gpu_memory memory; };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct allocation *all;
TP_FORK_HOLD(TP_FORK_MEM, lock)

static ncclResult_t allow_peers(const struct tp_gpu_memory *memory)
{
	int count;
	TP_TRY(tp_gpu_count(&count));
	for (int i = 0; i < count; i++) {
		CUdevice peer;
		int can = 0;
		if (i == memory->gpu->ordinal || tp_cuda->DeviceGet(&peer, i) != CUDA_SUCCESS ||
			tp_cuda->DeviceCanAccessPeer(&can, peer, memory->gpu->device) != CUDA_SUCCESS || !can) continue;
		TP_TRY(tp_gpu_allow(memory, peer));
	}
	return ncclSuccess;
}

ncclResult_t tp_mem_alloc(const struct tp_gpu *gpu, size_t bytes, void **out)
{
	struct allocation *a = tp_alloc(1, sizeof(*a), "an allocation's entry");
	if (!a) return ncclSystemError;
	ncclResult_t result = tp_gpu_alloc(gpu, TP_MAX(bytes, 1), true, "ncclMemAlloc", &a->memory);
	if (result == ncclSuccess) {
		int mode;
		tp_gpu_relax(&mode);
		result = allow_peers(&a->memory);
		tp_gpu_unrelax(mode);
		if (result != ncclSuccess) tp_gpu_free(&a->memory);
	}
	if (result != ncclSuccess) {
		free(a);
		return result;
	}
	pthread_mutex_lock(&lock);
	a->next = all;
	all = a;
	pthread_mutex_unlock(&lock);
	*out = a->memory.ptr;
	return ncclSuccess;
}

static struct allocation *take_out(const void *ptr)
{
	pthread_mutex_lock(&lock);
	struct allocation **at = &all;
	while (*at && (*at)->memory.ptr != ptr) at = &(*at)->next;
	struct allocation *found = *at;
	if (found) *at = found->next;
	pthread_mutex_unlock(&lock);
	return found;
}

ncclResult_t tp_mem_free(void *ptr)
{
	struct tp_gpu_pointer p;
	if (!ptr) return ncclSuccess;
	struct allocation *a = take_out(ptr);
	if (a) {
		tp_gpu_free(&a->memory);
		free(a);
		return ncclSuccess;
	}
	TP_TRY(tp_gpu_pointer(ptr, &p));
	if (!p.device || p.base != ptr)
		return TP_FAIL(ncclInvalidArgument, "ncclMemFree: %p is not the beginning of device memory, of ncclMemAlloc or cudaMalloc", ptr);
	TP_CUDA_TRY(NULL, MemFree((CUdeviceptr)(uintptr_t)ptr));
	return ncclSuccess;
}

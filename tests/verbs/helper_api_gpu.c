#include "verbs/helper_api_gpu.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

struct gpu_table gpu;
static CUcontext primaries[8];

static void must(CUresult error, const char *what)
{
	if (error == CUDA_SUCCESS)
		return;
	fprintf(stderr, "%s: CUDA error %d\n", what, (int)error);
	abort();
}
#define MUST(name, ...) must(gpu.name(__VA_ARGS__), #name)

bool gpu_is_fake(void) { return !getenv("TELPHER_CUDA_LIBRARY"); }

void gpu_start(void)
{
	if (gpu.Init)
		return;
	if (gpu_is_fake()) {
		setenv("FAKE_CUDA_APART", "1", 1);
		setenv("FAKE_CUDA_DMABUF", "1", 1);
		setenv("FAKE_CUDA_DEVICES", "2", 1);
	}
	void *library = dlopen(gpu_is_fake() ? FAKE_CUDA_LIBRARY : getenv("TELPHER_CUDA_LIBRARY"), RTLD_NOW);
	if (!library) {
		fprintf(stderr, "%s\n", dlerror());
		abort();
	}
#define FIND(name, symbol, parameters) *(void **)&gpu.name = dlsym(library, #symbol);
	TP_CUDA_FUNCTIONS(FIND, FIND)
	MUST(Init, 0);
	MUST(CtxSetCurrent, gpu_primary(0));
}

int gpu_devices(void)
{
	int count;
	MUST(DeviceGetCount, &count);
	return count;
}

CUcontext gpu_primary(int device)
{
	if (!primaries[device])
		MUST(DevicePrimaryCtxRetain, &primaries[device], device);
	return primaries[device];
}

uint8_t *gpu_alloc(int device, size_t bytes)
{
	CUdeviceptr ptr;
	CUcontext old;
	MUST(CtxPushCurrent, gpu_primary(device));
	MUST(MemAlloc, &ptr, bytes);
	MUST(CtxPopCurrent, &old);
	return (uint8_t *)(uintptr_t)ptr;
}

void gpu_free(uint8_t *ptr) { MUST(MemFree, (CUdeviceptr)(uintptr_t)ptr); }

uint8_t *gpu_map_two(int device, int other)
{
	CUdeviceptr ptr;
	MUST(MemAddressReserve, &ptr, 2 * GPU_BLOCK, 0, 0, 0);
	for (int i = 0; i < 2; i++) {
		int on = i ? other : device;
		CUmemGenericAllocationHandle handle;
		CUmemAllocationProp properties = { .type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = { CU_MEM_LOCATION_TYPE_DEVICE, on } };
		CUmemAccessDesc access = { { CU_MEM_LOCATION_TYPE_DEVICE, on }, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
		MUST(MemCreate, &handle, GPU_BLOCK, &properties, 0);
		MUST(MemMap, ptr + (size_t)i * GPU_BLOCK, GPU_BLOCK, 0, handle, 0);
		MUST(MemSetAccess, ptr + (size_t)i * GPU_BLOCK, GPU_BLOCK, &access, 1);
		MUST(MemRelease, handle);
	}
	return (uint8_t *)(uintptr_t)ptr;
}

void gpu_unmap_two(uint8_t *ptr)
{
	for (size_t i = 0; i < 2; i++)
		MUST(MemUnmap, (CUdeviceptr)(uintptr_t)ptr + i * GPU_BLOCK, GPU_BLOCK);
	MUST(MemAddressFree, (CUdeviceptr)(uintptr_t)ptr, 2 * GPU_BLOCK);
}

/* In two pieces at most: of a range that is mapped from two blocks. */
static void copy(uint8_t *device, uint8_t *host, size_t bytes, bool put)
{
	CUdeviceptr base, at = (CUdeviceptr)(uintptr_t)device;
	size_t size;
	while (bytes) {
		MUST(MemGetAddressRange, &base, &size, at);
		size_t part = base + size - at < bytes ? base + size - at : bytes;
		if (put)
			MUST(MemcpyHtoD, at, host, part);
		else
			MUST(MemcpyDtoH, host, at, part);
		at += part;
		host += part;
		bytes -= part;
	}
}

void gpu_put(uint8_t *to, const void *from, size_t bytes) { copy(to, (uint8_t *)(uintptr_t)from, bytes, true); }
void gpu_get(void *to, const uint8_t *from, size_t bytes) { copy((uint8_t *)(uintptr_t)from, to, bytes, false); }

void gpu_set(uint8_t *to, uint8_t value, size_t bytes)
{
	MUST(MemsetD8, (CUdeviceptr)(uintptr_t)to, value, bytes);
	MUST(CtxSynchronize);
}

/* What an address is. */
#include <string.h>

#include "gpu/internal.h"

ncclResult_t tp_gpu_pointer(const void *ptr, struct tp_gpu_pointer *out)
{
	unsigned int type = 0, managed = 0;
	int ordinal = -1;
	CUdeviceptr base = 0;
	size_t bytes = 0;
	unsigned long long id = 0, block = 0;
	CUdeviceptr address = (CUdeviceptr)(uintptr_t)ptr;
	CUpointer_attribute attributes[] = { CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
		CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE, CU_POINTER_ATTRIBUTE_BUFFER_ID };
	void *values[] = { &type, &managed, &ordinal, &base, &bytes, &id };
	struct tp_gpu_pointer p = { .ordinal = -1 };
	/* An address that CUDA doesn't know is no error: everything is 0 then. */
	CUresult error = tp_cuda->PointerGetAttributes(TP_ARRAY_LEN(attributes), attributes, values, address);
	if (error != CUDA_SUCCESS && error != CUDA_ERROR_INVALID_VALUE) return tp_gpu_fail(__FILE__, __LINE__, __func__, NULL, "PointerGetAttributes", error);
	if (error == CUDA_SUCCESS && type != 0) {
		p.device = type == CU_MEMORYTYPE_DEVICE;
		p.managed = (managed & 0xff) != 0;
		p.pinned = !p.device;
		p.ordinal = ordinal;
		p.base = (void *)(uintptr_t)base;
		p.bytes = bytes;
		/* Mapped memory keeps its range while what is mapped there changes: then the block tells. */
		if (p.device && tp_cuda->PointerGetAttribute(&block, CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID, address) != CUDA_SUCCESS) block = 0;
		p.buffer_id = block ? tp_hash64(&block, sizeof(block), id) : id;
	}
	*out = p;
	return ncclSuccess;
}

ncclResult_t tp_gpu_buffer_id(const void *ptr, uint64_t *out)
{
	struct tp_gpu_pointer p = { 0 };
	TP_TRY(tp_gpu_pointer(ptr, &p));
	*out = p.buffer_id;
	return ncclSuccess;
}

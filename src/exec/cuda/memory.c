/* Device memory that is written once and lives as long as the executor: programs, ends of links, rings between lanes. Handed
 * out in pieces, for an allocation may wait for kernels; written by the GPU's own stream (tp_gpu_stream), from pinned memory. */
#include <stdlib.h>

#include "exec/cuda/internal.h"

enum { CHUNK_BYTES = 4 << 20, ALIGNMENT = 128 };

ncclResult_t tp_cuda_take_memory(struct tp_cuda_exec *exec, size_t bytes, const char *what, uint64_t *out)
{
	struct tp_cuda_chunk *chunk = exec->chunks;
	bytes = tp_align_up(TP_MAX(bytes, 1), ALIGNMENT);
	if (!chunk || chunk->memory.bytes - chunk->used < bytes) {
		chunk = tp_alloc(1, sizeof(*chunk), what);
		if (!chunk) return ncclSystemError;
		ncclResult_t result = tp_gpu_alloc(exec->gpu, TP_MAX(bytes, CHUNK_BYTES), false, what, &chunk->memory);
		if (result != ncclSuccess) {
			free(chunk);
			return result;
		}
		/* What is large has a chunk of its own, and leaves the one that is handed out from in front. */
		struct tp_cuda_chunk **at = exec->chunks && bytes > CHUNK_BYTES / 2 ? &exec->chunks->next : &exec->chunks;
		chunk->next = *at;
		*at = chunk;
	}
	*out = (uint64_t)(uintptr_t)chunk->memory.ptr + chunk->used;
	chunk->used += bytes;
	return ncclSuccess;
}

static ncclResult_t wait_relaxed(struct tp_cuda_exec *exec)
{
	exec->staged = 0;
	TP_CUDA_TRY(exec->gpu, StreamSynchronize(tp_gpu_stream(exec->gpu)));
	return ncclSuccess;
}

static ncclResult_t upload_relaxed(struct tp_cuda_exec *exec, uint64_t to, const unsigned char *from, size_t bytes)
{
	while (bytes) {
		if (exec->staged == TP_CUDA_STAGING_BYTES) TP_TRY(wait_relaxed(exec));
		size_t piece = TP_MIN(bytes, TP_CUDA_STAGING_BYTES - exec->staged);
		unsigned char *staging = (unsigned char *)exec->staging_memory.host + exec->staged;
		memcpy(staging, from, piece);
		exec->staged += TP_MIN(tp_align_up(piece, 16), TP_CUDA_STAGING_BYTES - exec->staged);
		TP_CUDA_TRY(exec->gpu, MemcpyHtoDAsync(to, staging, piece, tp_gpu_stream(exec->gpu)));
		to += piece;
		from += piece;
		bytes -= piece;
	}
	return ncclSuccess;
}

ncclResult_t tp_cuda_upload(struct tp_cuda_exec *exec, uint64_t to, const void *from, size_t bytes)
{
	bool pushed;
	int mode;
	TP_TRY(tp_gpu_enter(exec->gpu, &pushed));
	tp_gpu_relax(&mode);
	ncclResult_t result = upload_relaxed(exec, to, from, bytes);
	tp_gpu_unrelax(mode);
	tp_gpu_leave(pushed);
	return result;
}

ncclResult_t tp_cuda_upload_wait(struct tp_cuda_exec *exec)
{
	bool pushed;
	int mode;
	TP_TRY(tp_gpu_enter(exec->gpu, &pushed));
	tp_gpu_relax(&mode);
	ncclResult_t result = wait_relaxed(exec);
	tp_gpu_unrelax(mode);
	tp_gpu_leave(pushed);
	return result;
}

void tp_cuda_free_memory(struct tp_cuda_exec *exec)
{
	for (struct tp_cuda_chunk *c = exec->chunks, *next; c; c = next) {
		next = c->next;
		tp_gpu_free(&c->memory);
		free(c);
	}
	exec->chunks = NULL;
}

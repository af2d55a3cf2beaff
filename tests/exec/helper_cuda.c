#include <sched.h>
#include <stdio.h>
#include <string.h>

#include "exec/helper_cuda.h"

bool cuda_has_driver(void)
{
	bool has;
	return tp_gpu_open(&has) == ncclSuccess && has;
}

bool cuda_open(struct world *world, int nchannels, int ndevices, size_t pool_bytes, struct cuda_rank *out)
{
	bool has, pushed;
	memset(out, 0, sizeof(*out));
	if (tp_gpu_open(&has) != ncclSuccess || !has) return false;
	if (tp_gpu_of_ordinal(world->rank % ndevices, &out->gpu) != ncclSuccess) return false;
	if (tp_gpu_enter(out->gpu, &pushed) != ncclSuccess) return false;       /* stays current: this thread is the rank's */
	world_barrier(world);
	struct tp_links_options links = { .nchannels = nchannels, .gpu = out->gpu, .region_bytes = tp_cuda_region_bytes(world->nranks, nchannels, TP_CUDA_PIPES_NONE) };
	if (tp_links_create(world->boot, &links, &out->links) != ncclSuccess) return false;
	struct tp_cuda_options options = { .gpu = out->gpu, .nchannels = nchannels, .shared_gpu = ndevices < world->nranks, .counts = true };
	if (tp_cuda_exec_create(world->boot, out->links, &options, &out->exec) != ncclSuccess) return false;
	if (tp_cuda->StreamCreate(&out->stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS) return false;
	if (tp_gpu_alloc(out->gpu, pool_bytes, false, "a test's buffers", &out->pool) != ncclSuccess) return false;
	world_barrier(world);
	return true;
}

void cuda_close(struct world *world, struct cuda_rank *c)
{
	tp_cuda->StreamSynchronize(c->stream);
	world_barrier(world);
	tp_cuda->StreamDestroy(c->stream);
	tp_cuda_exec_destroy(c->exec);
	world_barrier(world);
	tp_links_destroy(c->links);
	tp_gpu_free(&c->pool);
	world_barrier(world);
}

void *cuda_take(struct cuda_rank *c, size_t bytes, size_t skew)
{
	size_t at = tp_align_up(c->used, 256) + skew;
	if (at + bytes > c->pool.bytes) {
		fprintf(stderr, "a test's pool of %zu bytes is too small for %zu more\n", c->pool.bytes, bytes);
		return NULL;
	}
	c->used = at + bytes;
	return (char *)c->pool.ptr + at;
}

void cuda_reset(struct cuda_rank *c) { c->used = 0; }

void cuda_put(struct cuda_rank *c, void *to, const void *from, size_t bytes)
{
	if (!bytes) return;
	tp_cuda->MemcpyHtoDAsync((CUdeviceptr)(uintptr_t)to, from, bytes, c->stream);
	tp_cuda->StreamSynchronize(c->stream);
}

bool cuda_wait(struct cuda_rank *c)
{
	bool moved;
	if (!tp_links_have_net(c->links)) return tp_cuda->StreamSynchronize(c->stream) == CUDA_SUCCESS;
	/* A kernel's chunks for other ranks are under way until nothing moves any more. */
	CUresult done;
	do {
		done = tp_cuda->StreamQuery(c->stream);
		if (tp_links_progress(c->links, &moved) != ncclSuccess) return false;
		if (!moved) sched_yield();
	} while (done == CUDA_ERROR_NOT_READY || tp_links_need_progress(c->links));
	return done == CUDA_SUCCESS;
}

void cuda_get(struct cuda_rank *c, void *to, const void *from, size_t bytes)
{
	cuda_wait(c);
	if (bytes) tp_cuda->MemcpyDtoHAsync(to, (CUdeviceptr)(uintptr_t)from, bytes, c->stream);
	tp_cuda->StreamSynchronize(c->stream);
}

/* Registered buffers for kernels that offer them (offers.h). */
#include "exec/cuda/internal.h"
#include "mem/mem.h"

_Static_assert((int)TP_DEV_BUFFERS == (int)TP_MEM_BUFFERS && TP_MEM_BUFFERS < 0xffff, "kernels index the table of registered buffers");

void tp_cuda_exec_set_buffers(struct tp_cuda_exec *exec, struct tp_mem *mem)
{
	const struct tp_boot *boot = exec->boot;
	if (!exec->fused.usable || !tp_mem_is_useful(mem)) return;
	/* Kernels take a rank for its place on the host. */
	for (int r = 0; r < boot->nranks; r++)
		if (boot->peers[r].local != r) return;
	exec->buffers = mem;
	exec->streams.args.head.table = (uint64_t)(uintptr_t)tp_mem_table(mem);
	exec->streams.args.head.offers_from = exec->fused.table.offer;
}

struct tp_dev_offer tp_cuda_find_offer(const struct tp_cuda_exec *exec, const void *buffer, size_t bytes)
{
	struct tp_mem_place place;
	if (!exec->buffers || !tp_mem_find(exec->buffers, buffer, bytes, &place)) return (struct tp_dev_offer){ 0 };
	return (struct tp_dev_offer){ .offset = place.offset, .index = place.index + 1 };
}

void tp_cuda_pipe_offers(const struct tp_cuda_exec *exec, const struct tp_exec_call *call, struct tp_pipe_launch *pipes)
{
	struct tp_pipe_args *a = &pipes->args;
	if (!exec->buffers || pipes->kind != TP_FUSED_PUSH || call->block_bytes < exec->fused.table.offer) return;
	a->table = (uint64_t)(uintptr_t)tp_mem_table(exec->buffers);
	a->offers = 1;
	/* All that peers store: with one block a rank, or one. */
	if (a->collect_from) a->offer = tp_cuda_find_offer(exec, call->output, a->out_stride ? a->out_stride * (size_t)a->nranks : call->block_bytes);
}

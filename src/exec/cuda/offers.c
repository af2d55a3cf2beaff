/* Registered buffers for kernels that offer them (offers.h). */
#include "exec/cuda/internal.h"

void tp_cuda_exec_set_buffers(struct tp_cuda_exec *exec, const struct tp_cuda_buffers *buffers)
{
	const struct tp_boot *boot = exec->boot;
	if (!exec->fused.usable || buffers->row != TP_DEV_BUFFERS) return;
	/* Kernels take a rank for its place on the host. */
	for (int r = 0; r < boot->nranks; r++)
		if (boot->peers[r].local != r) return;
	exec->buffers = *buffers;
	exec->streams.args.lines.head.table = (uint64_t)(uintptr_t)buffers->table;
	exec->streams.args.lines.head.offers_from = exec->fused.table.offer;
	exec->streams.args.pipe.table = exec->streams.args.lines.head.table;
}

struct tp_dev_offer tp_cuda_find_offer(const struct tp_cuda_exec *exec, const void *buffer, size_t bytes)
{
	struct tp_dev_offer offer = { 0 };
	if (!exec->buffers.table || !exec->buffers.find(exec->buffers.mem, buffer, bytes, &offer.index, &offer.offset)) return (struct tp_dev_offer){ 0 };
	offer.index++;
	return offer;
}

void tp_cuda_pipe_offers(const struct tp_cuda_exec *exec, const struct tp_exec_call *call, struct tp_pipe_launch *pipes)
{
	struct tp_pipe_args *a = &pipes->args;
	if (!exec->buffers.table || pipes->kind != TP_FUSED_PUSH || call->block_bytes < exec->fused.table.offer) return;
	a->table = (uint64_t)(uintptr_t)exec->buffers.table;
	a->offers = 1;
	/* All that peers store: a block a rank, or one. */
	if (a->collect_from) a->offer = tp_cuda_find_offer(exec, call->output, a->out_stride ? a->out_stride * (size_t)a->nranks : call->block_bytes);
}

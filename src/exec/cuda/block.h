/* What every kernel's blocks do alike: watch for an abort, report a fault, count the kernel. */
#ifndef TP_EXEC_CUDA_BLOCK_H
#define TP_EXEC_CUDA_BLOCK_H

#include "exec/cuda/shim.h"

/* As exec/cuda.h's enum tp_cuda_fault. */
enum { TP_BLOCK_ABORTED = 1, TP_BLOCK_TAG = 2, TP_BLOCK_SIZE = 3, TP_BLOCK_BUFFER = 4, TP_BLOCK_PLACE = 5 };

/* A waiting thread asks on each turn. The device's word is looked at now and then, the host's, which lies behind PCIe, rarely. */
TP_DEVICE bool tp_block_stopped(tp_dev_comm *comm, unsigned turn)
{
	if (turn % 64 != 63) return false;
	if (tp_load_relaxed(&comm->stop)) return true;
	return turn % 512 == 511 && tp_load_relaxed(&((tp_dev_status *)comm->status)->abort);
}
/* The first fault of a rank counts; all its kernels end. */
TP_DEVICE void tp_block_fault(tp_dev_comm *comm, uint32_t fault, int peer, int channel, uint32_t found, uint32_t expected)
{
	if (tp_add_device(&comm->stop, 1)) return;
	tp_dev_status *status = (tp_dev_status *)comm->status;
	status->peer = peer;
	status->channel = channel;
	status->found = found;
	status->expected = expected;
	tp_fence();
	tp_store_release(&status->fault, fault);        /* pairs with tp_cuda_exec_status */
}
/* The end of a kernel: all threads of the block. The last block counts it where somebody wants to know. */
TP_DEVICE void tp_kernel_end(tp_dev_comm *comm)
{
	if (!comm->counts) return;
	tp_block_sync();
	if (tp_thread()) return;
	tp_fence();
	if (tp_add_device(&comm->blocks_done, 1) + 1 < (uint32_t)tp_blocks()) return;
	tp_store_relaxed(&comm->blocks_done, 0);
	comm->completed++;
	tp_fence();
	tp_store_release64(&((tp_dev_status *)comm->status)->completed, comm->completed);     /* pairs with tp_cuda_exec_status */
}

#endif

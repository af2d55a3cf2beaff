/* The steps kernel (steps.h) of collectives that only move. */
#include "exec/cuda/steps.h"

TP_KERNEL_BLOCKS(tp_steps_copy, tp_dev_steps, 2)
{
	TP_SHARED(tp_steps_shared, shared);
	tp_steps_kernel<tp_mover_copy>(shared, args);
}

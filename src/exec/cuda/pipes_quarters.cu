/* Pipes that reduce: 8-bit floats. */
#include "exec/cuda/pipes_move.h"

#define X(type, op) \
TP_KERNEL_BLOCKS(tp_pipe_##type##_##op, tp_pipe_args, 1) \
{ \
	TP_SHARED(tp_pipes_shared, shared); \
	TP_SHARED_DYNAMIC(memory, TP_PIPE_SHARED_MOST); \
	tp_pipes_run<tp_reduction<tp_type_##type, tp_op_##op>>(shared, memory, args); \
}
TP_REDUCTIONS_QUARTERS(X)

/* Fused kernels on windows, half and bfloat16. */
#include "exec/cuda/window.h"

#define X(type, op) \
TP_KERNEL_BLOCKS(tp_window_##type##_##op, tp_fused_args, 2) \
{ \
	TP_SHARED(tp_window_places, places); \
	tp_window_run<tp_reduction<tp_type_##type, tp_op_##op>>(args, places); \
}
TP_REDUCTIONS_HALVES(X)

/* Fused kernels on lines: 128-byte lines, float and double. */
#include "exec/cuda/lines_move.h"

#define X(type, op) \
TP_KERNEL_BLOCKS(tp_ll128_##type##_##op, tp_fused_args, 2) { tp_lines_run_reduce<tp_ll128, tp_reduction<tp_type_##type, tp_op_##op>>(args); }
TP_REDUCTIONS_FLOATS(X)

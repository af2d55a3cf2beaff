/* Fused kernels on lines: 16-byte lines, integers. */
#include "exec/cuda/lines_move.h"

#define X(type, op) \
TP_KERNEL_BLOCKS(tp_ll_##type##_##op, tp_fused_args, 2) { tp_lines_run_reduce<tp_ll, tp_reduction<tp_type_##type, tp_op_##op>>(args); }
TP_REDUCTIONS_INTEGERS(X)

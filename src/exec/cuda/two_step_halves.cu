/* Reductions to a root in two steps (lines_move.h), on 128-byte lines: half and bfloat16. */
#include "exec/cuda/lines_move.h"

#define X(type, op) \
TP_KERNEL_BLOCKS(tp_two_step_##type##_##op, tp_fused_args, 2) \
{ tp_lines_run_reduce_owners<tp_ll128, tp_reduction<tp_type_##type, tp_op_##op>>(args); }
TP_REDUCTIONS_HALVES(X)

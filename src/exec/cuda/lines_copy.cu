/* Fused kernels on lines that only copy. */
#include "exec/cuda/lines_move.h"

TP_KERNEL_BLOCKS(tp_ll_copy, tp_fused_args, 2) { tp_lines_run_copy<tp_ll>(args); }
TP_KERNEL_BLOCKS(tp_ll128_copy, tp_fused_args, 2) { tp_lines_run_copy<tp_ll128>(args); }
/* A broadcast in two steps. */
TP_KERNEL_BLOCKS(tp_two_step_copy, tp_fused_args, 2) { tp_lines_run_broadcast<tp_ll128>(args); }

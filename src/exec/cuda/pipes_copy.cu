/* Pipes that only move. */
#include "exec/cuda/pipes_move.h"

TP_KERNEL_BLOCKS(tp_push_copy, tp_pipe_args, 1)
{
	TP_SHARED(tp_pipes_shared, shared);
	TP_SHARED_DYNAMIC(memory, TP_PIPE_SHARED_MOST);
	tp_pipes_run_move(shared, memory, args);
}

/* A broadcast in two steps. */
TP_KERNEL_BLOCKS(tp_pipe_copy, tp_pipe_args, 1)
{
	TP_SHARED(tp_pipes_shared, shared);
	TP_SHARED_DYNAMIC(memory, TP_PIPE_SHARED_MOST);
	tp_pipes_run<tp_pipe_plain>(shared, memory, args);
}

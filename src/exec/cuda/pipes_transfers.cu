/* Sends and receives of which some go through pipes. */
#include "exec/cuda/streams.h"

TP_KERNEL_BLOCKS(tp_streams_piped, tp_dev_streams_piped, 2)
{
	TP_SHARED(tp_streams_shared, shared);
	TP_SHARED(tp_stream_pipes, block);
	TP_SHARED_DYNAMIC(memory, TP_PIPE_SHARED_MOST);
	tp_stream_pipe pipes = { &args.pipe, &block, memory, 0, 0, 0 };
	tp_streams_kernel<TP_STREAM_PIPES>(shared, args.lines.head, args.lines.streams, &pipes);
}

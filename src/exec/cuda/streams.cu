/* The kernels of sends and receives by lines (streams.h): one for the usual group, one for groups of many, or of transfers for which offers are
 * made. */
#include "exec/cuda/streams.h"

TP_KERNEL_BLOCKS(tp_streams, tp_dev_streams, 2)
{
	TP_SHARED(tp_streams_shared, shared);
	tp_streams_kernel<TP_STREAM_LINES>(shared, args.head, args.streams, nullptr);
}

TP_KERNEL_BLOCKS(tp_streams_more, tp_dev_streams_more, 2)
{
	TP_SHARED(tp_streams_shared, shared);
	tp_streams_kernel<TP_STREAM_OFFERS>(shared, args.head, args.streams, nullptr);
}

/* The kernels of sends and receives (transfers.h): one for the usual group, one for large ones. */
#include "exec/cuda/transfers.h"

TP_KERNEL_BLOCKS(tp_transfers, tp_dev_transfers, 2)
{
	TP_SHARED(tp_transfers_shared, shared);
	tp_transfers_kernel(shared, args.head, args.transfers);
}

TP_KERNEL_BLOCKS(tp_transfers_more, tp_dev_transfers_more, 2)
{
	TP_SHARED(tp_transfers_shared, shared);
	tp_transfers_kernel(shared, args.head, args.transfers);
}

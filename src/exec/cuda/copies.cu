/* The kernel around copies by copy engines (copies.h). */
#include "exec/cuda/block.h"
#include "exec/cuda/copies.h"

TP_DEVICE void *tp_copies_line(const tp_dev_comm *comm, const tp_copies_args &a, int at, uint32_t sign, int from)
{
	return (char *)comm->region[at] + a.lines + (sign * TP_DEV_MAX_LOCAL + (uint32_t)from) * 16;
}

/* False: stopped. */
TP_DEVICE bool tp_copies_await(tp_dev_comm *comm, const tp_copies_args &a, int peer, uint64_t now)
{
	const void *line = tp_copies_line(comm, a, a.rank, a.await_sign, peer);
	for (unsigned turn = 0;; turn++) {
		const tp_four v = tp_load_line(line);
		if (v.y == (uint32_t)now && v.w == (uint32_t)now && (v.z & 0xffff) == (uint32_t)(now >> 32 & 0xffff)) {
			if (v.x != a.tag) tp_block_fault(comm, TP_BLOCK_TAG, peer, 0, v.x, a.tag);
			else if (v.z >> 16 != a.place) tp_block_fault(comm, TP_BLOCK_PLACE, peer, 0, v.z >> 16, a.place);
			else return true;
			return false;
		}
		if (tp_block_stopped(comm, turn)) return false;
		tp_nap(turn, a.gives_way);
	}
}

TP_KERNEL(tp_copies, tp_copies_args)
{
	TP_SHARED(uint32_t, stopped);
	tp_dev_comm *comm = (tp_dev_comm *)args.comm;
	const uint64_t now = *(const uint64_t *)args.epoch + 1;
	if (tp_thread() == 0) tp_block_set(&stopped, tp_load_relaxed(&comm->stop));
	tp_block_sync();
	/* What copies before this kernel have written is seen by who sees the sign. */
	tp_fence();
	for (int p = tp_thread(); p < args.nranks && !tp_block_load(&stopped); p += tp_threads()) {
		if (!(args.tell >> p & 1)) continue;
		const uint32_t low = (uint32_t)now, high = (uint32_t)(now >> 32 & 0xffff) | (uint32_t)args.place << 16;
		tp_store_line(tp_copies_line(comm, args, p, args.tell_sign, args.rank), { args.tag, low, high, low });
	}
	for (int p = tp_thread(); p < args.nranks && !tp_block_load(&stopped); p += tp_threads())
		if ((args.await >> p & 1) && !tp_copies_await(comm, args, p, now)) tp_block_set(&stopped, 1);
	tp_fence();
	tp_block_sync();
	if (tp_thread() == 0) {
		/* The call's other kernels are to give no sign: they look here, not at the host's word. */
		if (tp_block_load(&stopped)) tp_add_device(&comm->stop, 1);
		else if (args.ends) *(uint64_t *)args.epoch = now;
	}
	tp_kernel_end(comm);
}

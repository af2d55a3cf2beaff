/* Chunks that a kernel leaves where they lie, for a network card that reads GPU memory to fetch: no copy into a slot.
 *
 * What is lent is registered (link/net_loans.c), large, and stays as it is until it is through: so the plan must say that it does (by_ref), and a kernel ends, or
 * begins its next call, only when the link has nothing left to send, for then the program may write over it. The slot is claimed and published as ever, but its
 * flag, which the host reads, is a whole header that says where the data are.
 *
 * The arguments of a captured kernel outlive the registration: the entry of the table decides, which is empty once the buffer is deregistered. If that happens
 * just after the look, the buffer stays registered with the network until no block lends. Memory that is freed while it is registered nobody sees here: a launch of a graph
 * is no call to us, and the program must deregister first (docs/rdma.md). */
#ifndef TP_EXEC_CUDA_LEND_H
#define TP_EXEC_CUDA_LEND_H

#include "exec/cuda/groups.h"

/* Of a slot's header in words: its tag and kind, and where the address of what is lent begins (links.c checks that it is so). */
enum { TP_LEND_TAG_AT = 2, TP_LEND_KIND_AT = 3, TP_LEND_ADDRESS_AT = 6, TP_LEND_SLOT_LENT = 2 };

/* Before the block looks into the table, (one thread), and after its last loan is through. The host empties an entry and then looks here, so either we see it empty or the
 * host sees us (tp_cuda_exec_lends). It can't go by what was launched: that of graphs it hears of late. */
TP_FAR void tp_lend_begin(const tp_dev_comm *comm)
{
	tp_store_relaxed(&((tp_dev_status *)comm->status)->lends[tp_block()], 1);
	tp_fence_whole();
}
TP_FAR void tp_lend_end(const tp_dev_comm *comm)        /* all threads */
{
	tp_block_sync();
	if (tp_thread() == 0) tp_store_relaxed(&((tp_dev_status *)comm->status)->lends[tp_block()], 0);
}

/* Is what was found at the launch still registered? number: the entry's, counted from 1; 0: nothing was found. */
TP_FAR bool tp_lend_stands(const tp_dev_comm *comm, uint32_t number, uint64_t address, uint64_t bytes)
{
	if (!number) return false;
	const tp_dev_loan *loan = (const tp_dev_loan *)comm->loans + (number - 1);
	const uint64_t begin = tp_load_acquire64(&loan->begin), end = tp_load_acquire64(&loan->end);
	return begin && begin <= address && address + bytes <= end;
}

/* The flag of a slot whose header lies elsewhere, but for its number. address: of what is lent; 0: the data are in the slot. */
TP_DEVICE void tp_lend_flag(uint32_t *flag, uint32_t bytes, uint32_t tag, uint64_t address)
{
	tp_store_relaxed(flag + 1, bytes);
	tp_store_relaxed(flag + TP_LEND_KIND_AT, address ? TP_LEND_SLOT_LENT : 0);
	if (!address) return;
	tp_store_relaxed(flag + TP_LEND_TAG_AT, tag);
	tp_store_relaxed(flag + TP_LEND_ADDRESS_AT, (uint32_t)address);
	tp_store_relaxed(flag + TP_LEND_ADDRESS_AT + 1, (uint32_t)(address >> 32));
}

/* Until all that was given to a link is through; one thread. */
TP_FAR void tp_lend_await(tp_groups &all, tp_dev_link *l)
{
	for (unsigned turn = 0; l->next != l->head_seen; turn++) {
		l->head_seen = tp_load_acquire((const uint32_t *)l->head);      /* pairs with the proxy's release */
		if (tp_block_load(&all.stopped)) return;
		if (tp_block_stopped(all.comm, turn)) tp_block_set(&all.stopped, 1);
		tp_nap(turn, all.gives_way);
	}
}

#endif

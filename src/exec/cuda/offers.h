/* Registered buffers, offered in band: a receiver says where its buffer lies, and the sender's kernel stores there instead of into the ring.
 *
 * Whether this rank's buffer is registered is its own affair, so it is no part of the plan: in every large transfer the receiver makes an offer to each
 * of its senders, of its buffer or of nothing, as one line in the sender's memory with the number of the transfer's first chunk or round for a stamp; the
 * sender waits for it. The offer also says that the receiver's kernel has begun, so that its buffer may be written.
 *
 * The arguments of a captured kernel outlive the registration. So a kernel offers only what its own entry of the table still says: that entry is
 * there exactly while all peers have the buffer mapped. */
#ifndef TP_EXEC_CUDA_OFFERS_H
#define TP_EXEC_CUDA_OFFERS_H

#include "exec/cuda/lines.h"

TP_DEVICE uint64_t tp_offer_entry(uint64_t table, int rank, uint32_t index)
{ return index ? tp_load_acquire64((const uint64_t *)table + (uint32_t)rank * TP_DEV_BUFFERS + index - 1) : 0; }
/* Is what was found at the launch still so? address: of the buffer. */
TP_DEVICE bool tp_offer_stands(uint64_t table, int rank, const tp_dev_offer &offer, uint64_t address)
{
	const uint64_t entry = tp_offer_entry(table, rank, offer.index);
	return entry && entry + offer.offset == address;
}

/* In a line: the offset, the index with the stamp's upper bits, its lower bits. */
TP_DEVICE void tp_offer_make(void *line, bool stands, const tp_dev_offer &offer, uint64_t more, uint64_t stamp)
{
	const uint64_t offset = offer.offset + more;
	tp_store_line(line, { (uint32_t)offset, (uint32_t)(offset >> 32), (stands ? offer.index : 0) | ((uint32_t)(stamp >> 32) & 0xffffu) << 16, (uint32_t)stamp });
}
/* false: it hasn't come. */
TP_DEVICE bool tp_offer_look(const void *line, uint64_t stamp, uint64_t *offset, uint32_t *index)
{
	const tp_four v = tp_load_line(line);
	*offset = v.x | (uint64_t)v.y << 32;
	*index = v.z & 0xffffu;
	return v.w == (uint32_t)stamp && v.z >> 16 == ((uint32_t)(stamp >> 32) & 0xffffu);
}
/* The end of a part that came straight: one thread. */
TP_DEVICE void tp_offer_count(tp_dev_comm *comm)
{ tp_store_relaxed(&((tp_dev_status *)comm->status)->straight, tp_add_device(&comm->straight, 1) + 1); }

#endif

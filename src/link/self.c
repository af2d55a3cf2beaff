/* A private ring between two lanes of one rank: the same slots, in memory of our own. */
#include <stdlib.h>

#include "link/internal.h"

ncclResult_t tp_link_self_create(size_t capacity, uint32_t nslots, int rank, struct tp_link *sender, struct tp_link *receiver)
{
	size_t stride = tp_align_up(sizeof(struct tp_slot) + capacity, TP_CACHE_LINE);
	size_t bytes = TP_CACHE_LINE + nslots * stride;
	unsigned char *memory = aligned_alloc(TP_CACHE_LINE, bytes);
	if (!memory)
		return TP_FAIL(ncclSystemError, "rank %d: no memory for a ring of %u slots of %zu bytes between two lanes", rank, nslots,
			capacity);
	atomic_init((_Atomic uint32_t *)memory, 0);
	for (uint32_t i = 0; i < nslots; i++)
		atomic_init(&((struct tp_slot *)(memory + TP_CACHE_LINE + i * stride))->seq, 0);
	struct tp_link link = { .slots = memory + TP_CACHE_LINE, .stride = stride, .capacity = capacity, .mask = nslots - 1,
		.head = (_Atomic uint32_t *)memory, .kind = TP_LINK_SELF, .same_process = 1, .by_ref = 1, .peer = rank };
	*sender = link;
	*receiver = link;
	return ncclSuccess;
}

void tp_link_self_destroy(struct tp_link *sender)
{
	free((void *)sender->head);
	*sender = (struct tp_link){ 0 };
}

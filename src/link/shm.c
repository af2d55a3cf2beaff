/* The place of every ring in the one segment that the ranks of a host share.
 *
 * Where a ring lies is a formula of numbers that all ranks agree on, and zeroed memory is an empty ring: so there is no
 * connection phase, and an unused ring costs address space only. The segment grows with the square of the ranks; slots
 * shrink with it, so that 4,096 ranks still fit in half a terabyte of addresses. */
#include "link/internal.h"

#define HEAD_BYTES 128                      /* the receiver's line, apart from the prefetcher's pair of the first slot */
#define PAGE_BYTES 4096
#define SEGMENT_LIMIT (512ull << 30)
#define CAPACITY_MAX ((size_t)256 << 10)
#define CAPACITY_MIN ((size_t)4016)         /* two slots and the head in two pages */

/* An odd number of lines: the headers of a ring's slots fall into different sets of the cache. */
static size_t slot_stride(size_t capacity)
{
	size_t lines = tp_div_up(sizeof(struct tp_slot) + capacity, TP_CACHE_LINE);
	return (lines | 1) * TP_CACHE_LINE;
}

static size_t ring_bytes(uint32_t nslots, size_t capacity)
{
	return tp_align_up(HEAD_BYTES + nslots * slot_stride(capacity), PAGE_BYTES);
}

void tp_shm_shape_fit(int nlocal, int largest_nlocal, int nchannels, struct tp_shm_shape *out)
{
	uint64_t rings = (uint64_t)largest_nlocal * largest_nlocal * TP_LINK_CLASSES * nchannels;
	uint32_t nslots = 8;
	size_t capacity = CAPACITY_MAX;
	while (rings * ring_bytes(nslots, capacity) > SEGMENT_LIMIT && (nslots > 2 || capacity > CAPACITY_MIN)) {
		/* Wide slots first, then many: a chunk of 32 KB hides what it costs to pass it on. */
		if (capacity > 32768 || nslots == 2)
			capacity = TP_MAX(capacity / 2, CAPACITY_MIN);
		else if (nslots > 4 || capacity == CAPACITY_MIN)
			nslots /= 2;
		else
			capacity = TP_MAX(capacity / 2, CAPACITY_MIN);
	}
	*out = (struct tp_shm_shape){ .nlocal = nlocal, .nchannels = nchannels, .nslots = nslots, .capacity = capacity,
		.stride = slot_stride(capacity), .link_bytes = ring_bytes(nslots, capacity) };
	out->segment_bytes = (size_t)nlocal * nlocal * TP_LINK_CLASSES * nchannels * out->link_bytes;
}

size_t tp_shm_shape_place(const struct tp_shm_shape *shape, int channel, int lane_class, int from, int to)
{
	size_t pair = (size_t)from * shape->nlocal + to;
	return ((pair * shape->nchannels + channel) * TP_LINK_CLASSES + lane_class) * shape->link_bytes;
}

void tp_shm_link_fill(const struct tp_shm_shape *shape, unsigned char *segment, size_t place, struct tp_link *link)
{
	link->kind = TP_LINK_SHM;
	link->head = (_Atomic uint32_t *)(segment + place);
	link->slots = segment + place + HEAD_BYTES;
	link->stride = shape->stride;
	link->capacity = shape->capacity;
	link->mask = shape->nslots - 1;
}

/* The memory of network links' rings. Host ranks: private pages, an end's own. GPU ranks: pinned memory that kernels see too; taken
 * in large pieces, and given back with the communicator. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "link/net_link.h"

#define PIECE_BYTES ((size_t)16 << 20)

static ncclResult_t map_ring(struct tp_link_net *end)
{
	void *ring = mmap(NULL, end->ring_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (ring == MAP_FAILED)
		return TP_FAIL(ncclSystemError, "no memory (%zu bytes) for the slots of network link (channel %d, class %d) %d -> %d", end->ring_bytes, end->channel,
			end->lane_class, end->from, end->to);
	end->ring = ring;
	return ncclSuccess;
}

static ncclResult_t grow_pool(struct tp_net_links *nets, size_t bytes)
{
	struct tp_net_pool *piece = tp_alloc(1, sizeof(*piece), "pinned memory of network links");
	if (!piece) return ncclSystemError;
	ncclResult_t result = tp_gpu_alloc_host(nets->gpu, TP_MAX(bytes, PIECE_BYTES), "network links", &piece->memory);
	if (result != ncclSuccess) {
		free(piece);
		return result;
	}
	piece->next = nets->pool;
	nets->pool = piece;
	return ncclSuccess;
}

static ncclResult_t take_ring(struct tp_link_net *end)
{
	struct tp_net_links *nets = end->nets;
	if (!nets->pool || nets->pool->memory.bytes - nets->pool->used < end->ring_bytes) TP_TRY(grow_pool(nets, end->ring_bytes));
	struct tp_net_pool *piece = nets->pool;
	end->ring = (unsigned char *)piece->memory.host + piece->used;
	end->device_ring = (unsigned char *)piece->memory.ptr + piece->used;
	piece->used += end->ring_bytes;
	return ncclSuccess;
}

ncclResult_t tp_net_ring_make(struct tp_link_net *end, struct tp_link *link)
{
	const struct tp_net_links *nets = end->nets;

	end->ring_bytes = 4096 + nets->nslots * nets->stride;
	TP_TRY(nets->gpu ? take_ring(end) : map_ring(end));
	link->slots = end->ring + 4096;
	link->stride = nets->stride;
	link->capacity = nets->capacity;
	link->mask = nets->nslots - 1;
	link->head = (_Atomic uint32_t *)end->ring;
	return ncclSuccess;
}

void tp_net_ring_free(struct tp_link_net *end)
{
	if (end->nets->gpu) return;     /* with the pool */
	munmap(end->ring, end->ring_bytes);
}

void tp_net_rings_destroy(struct tp_net_links *nets)
{
	while (nets->pool) {
		struct tp_net_pool *piece = nets->pool;
		nets->pool = piece->next;
		tp_gpu_free(&piece->memory);
		free(piece);
	}
}

void *tp_net_link_base(const struct tp_link *link) { return link->net->ring; }
void *tp_net_link_device_base(const struct tp_link *link) { return link->net->device_ring; }

/* The memory of network links' rings. Host ranks: private pages, an end's own. GPU ranks: pinned memory that kernels see too; taken
 * in large pieces, and given back with the communicator. Where the network card reaches GPU memory (net_gdr.c) the slots lie there, and pinned
 * memory has the head and a flag for each slot, {seq, bytes} as in struct tp_slot: the host sees no device memory, and needs no more. */
#include <stdlib.h>
#include <string.h>

#include "base/pages.h"
#include "link/net_link.h"

#define PIECE_BYTES ((size_t)16 << 20)
#define HEAD_BYTES 4096
#define WINDOW_BYTES ((size_t)64 << 10)
#define FLAG_BYTES 128          /* a line of the GPU's, so that what the host writes for one slot leaves others alone */
_Static_assert(sizeof(struct tp_slot) + sizeof(struct tp_slot_lent) <= FLAG_BYTES, "a sender's flag is a header that may say what is lent");

static ncclResult_t map_ring(struct tp_link_net *end)
{
	void *ring = tp_pages_map(end->ring_bytes);
	if (!ring)
		return TP_FAIL(ncclSystemError, "no memory (%zu bytes) for the slots of network link (channel %d, class %d) %d -> %d", end->ring_bytes, end->channel,
			end->lane_class, end->from, end->to);
	end->ring = ring;
	/* A card pins all of it; elsewhere only what is used takes memory, and that may be a line a slot. */
	end->enlarged = end->nets->pins;
	if (end->nets->pins) tp_pages_want_large(ring, end->ring_bytes);
	return ncclSuccess;
}

void tp_net_ring_enlarge(struct tp_link_net *end)
{
	end->enlarged = true;
	if (!end->nets->gpu) tp_pages_make_large(end->ring, end->ring_bytes);
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

/* What kernels poll lies near them, where GDRCopy can: a receiver's flags, a sender's head. Without it they look into pinned memory. */
static void take_window(struct tp_link_net *end)
{
	struct tp_net_links *nets = end->nets;
	size_t bytes = end->sending ? FLAG_BYTES : nets->nslots * FLAG_BYTES;

	if (nets->no_windows || !tp_gpu_can_map()) return;
	if (!nets->near || nets->near->window.memory.bytes - nets->near->used < bytes) {
		struct tp_net_near *piece = tp_alloc(1, sizeof(*piece), "words of network links");
		if (!piece || tp_gpu_map_for_host(nets->gpu, TP_MAX(bytes, WINDOW_BYTES), "words of network links", &piece->window) != ncclSuccess) {
			TP_WARN("rank %d: GDRCopy isn't used for network links (see above): kernels poll host memory", nets->boot->rank);
			nets->no_windows = true;
			free(piece);
			return;
		}
		TP_INFO(TP_INIT | TP_NET, "rank %d: kernels poll GPU memory for network links, %zu bytes by GDRCopy", nets->boot->rank, piece->window.memory.bytes);
		piece->next = nets->near;
		nets->near = piece;
	}
	end->window = nets->near->window.host + nets->near->used;
	end->device_window = (uint64_t)(uintptr_t)nets->near->window.memory.ptr + nets->near->used;
	nets->near->used += bytes;
}

ncclResult_t tp_net_ring_make(struct tp_link_net *end, struct tp_link *link)
{
	const struct tp_net_links *nets = end->nets;
	size_t slots = nets->nslots * nets->stride;

	if (nets->gpu) tp_net_gdr_take(end, slots);
	if (nets->gpu) take_window(end);
	end->flag_stride = end->far_slots ? FLAG_BYTES : nets->stride;
	end->ring_bytes = HEAD_BYTES + (end->far_slots ? tp_align_up(nets->nslots * FLAG_BYTES, 4096) : slots);
	TP_TRY(nets->gpu ? take_ring(end) : map_ring(end));
	end->flags = end->ring + HEAD_BYTES;
	link->slots = end->far_slots ? end->far_slots : end->ring + HEAD_BYTES;
	link->stride = nets->stride;
	link->capacity = nets->capacity;
	link->mask = nets->nslots - 1;
	link->head = (_Atomic uint32_t *)end->ring;
	return ncclSuccess;
}

ncclResult_t tp_net_ring_register(struct tp_link_net *end)
{
	const struct tp_net_ops *ops = end->nets->ops;
	uint64_t since = tp_clock_ns();

	if (end->far_slots) TP_TRY(tp_net_gdr_register(end));
	else TP_TRY(ops->reg_memory(end->comm, end->ring, end->ring_bytes, TP_NET_HOST, &end->mhandle));
	if (!ops->any_memory) tp_net_tell_slots(end->nets, since, end);
	return ncclSuccess;
}

void tp_net_ring_tell_full(const struct tp_link_net *end, uint32_t index, uint32_t bytes)
{
	tp_gpu_mapped_store(end->window + (size_t)(index & end->link->mask) * FLAG_BYTES, (uint64_t)bytes << 32 | (index + 1));
}

void tp_net_ring_tell_head(const struct tp_link_net *end, uint32_t head) { tp_gpu_mapped_store(end->window, head); }

void tp_net_ring_places(const struct tp_link *link, struct tp_device_link *out)
{
	const struct tp_link_net *end = link->net;
	uint64_t ring = (uint64_t)(uintptr_t)end->device_ring;

	out->head = ring;
	out->flags = ring + HEAD_BYTES;
	out->flag_stride = (uint32_t)end->flag_stride;
	if (end->window && end->sending) {
		out->head = end->device_window;
	} else if (end->window) {
		out->flags = end->device_window;
		out->flag_stride = FLAG_BYTES;
	}
	out->slots = end->far_slots ? (uint64_t)(uintptr_t)end->far_slots : ring + HEAD_BYTES;
	out->lends = end->sending && end->far_slots && end->nets->loans;
}

void tp_net_ring_free(struct tp_link_net *end)
{
	if (end->nets->gpu) return;     /* with the pool */
	tp_pages_unmap(end->ring, end->ring_bytes);
}

void tp_net_rings_destroy(struct tp_net_links *nets)
{
	while (nets->pool) {
		struct tp_net_pool *piece = nets->pool;
		nets->pool = piece->next;
		tp_gpu_free(&piece->memory);
		free(piece);
	}
	while (nets->near) {
		struct tp_net_near *piece = nets->near;
		nets->near = piece->next;
		tp_gpu_unmap_for_host(&piece->window);
		free(piece);
	}
	tp_net_gdr_close(nets);
}

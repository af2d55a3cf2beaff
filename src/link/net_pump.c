/* The proxy of net links: takes published slots to the network in order, and puts what arrives into slots in order.
 * Receives are posted ahead into every free slot, so that a sender never waits for this side to ask. */
#include <sched.h>
#include <string.h>

#include "link/net_link.h"

#define LOST_GRACE_MS 300
#define BYE_MS 300

static struct tp_slot *slot_at(const struct tp_link *link, uint32_t index)
{
	return (struct tp_slot *)(link->slots + (size_t)(index & link->mask) * link->stride);
}

/* Header and first bytes from the slot, the rest from where it lies. The header travels as that of a chunk like any other. */
static ncclResult_t send_lent(struct tp_link_net *end, struct tp_slot *slot, void **request)
{
	const struct tp_slot_lent *lent = (const struct tp_slot_lent *)slot->data;
	struct tp_net_grant *grant = lent->grant;
	struct iovec parts[TP_NET_LENT_PARTS] = { { &slot->bytes, sizeof(struct tp_net_chunk) + lent->first_bytes }, { (void *)(uintptr_t)lent->addr, slot->bytes - lent->first_bytes } };
	void *mhandles[TP_NET_LENT_PARTS] = { end->mhandle, grant ? grant->mhandle : NULL };
	slot->kind = TP_SLOT_INLINE;
	TP_TRY(end->nets->ops->isendv(end->comm, parts, TP_NET_LENT_PARTS, TP_NET_LINK_TAG, mhandles, request));
	if (*request) end->lent[end->posted % TP_NET_MAX_REQUESTS] = grant;
	else slot->kind = TP_SLOT_LENT;
	return ncclSuccess;
}

static ncclResult_t send_slot(struct tp_link_net *end, struct tp_slot *slot, void **request)
{
	const struct tp_net_ops *ops = end->nets->ops;

	end->lent[end->posted % TP_NET_MAX_REQUESTS] = NULL;
	if (slot->bytes > end->link->capacity)
		return TP_FAIL(ncclInternalError, "a chunk of %u bytes for rank %d (channel %d, class %d); a network slot holds %zu", slot->bytes, end->to, end->channel,
			end->lane_class, end->link->capacity);
	if (slot->kind == TP_SLOT_LENT) return send_lent(end, slot, request);
	return ops->isend(end->comm, &slot->bytes, sizeof(struct tp_net_chunk) + slot->bytes, TP_NET_LINK_TAG, end->mhandle, request);
}

void tp_net_link_see_published(struct tp_link_net *end)
{
	struct tp_link *link = end->link;

	/* The acquire pairs with the kernel's release of seq; after the last slot of the ring comes one that is in use. */
	while (link->next - end->finished <= link->mask &&
		atomic_load_explicit(&slot_at(link, link->next)->seq, memory_order_acquire) == link->next + 1) link->next++;
}

static ncclResult_t pump_send(struct tp_link_net *end, bool *moved)
{
	struct tp_link *link = end->link;
	bool done;

	if (end->nets->gpu) tp_net_link_see_published(end);
	while (end->posted != link->next && end->posted - end->finished < TP_NET_MAX_REQUESTS) {
		void *request = NULL;
		TP_TRY(send_slot(end, slot_at(link, end->posted), &request));
		if (!request) break;
		end->requests[end->posted++ % TP_NET_MAX_REQUESTS] = request;
		*moved = true;
	}
	while (end->finished != end->posted) {
		TP_TRY(end->nets->ops->test(end->requests[end->finished % TP_NET_MAX_REQUESTS], &done, NULL));
		if (!done) break;
		if (end->lent[end->finished % TP_NET_MAX_REQUESTS]) tp_net_grant_back(end->lent[end->finished % TP_NET_MAX_REQUESTS]);
		end->finished++;
		*moved = true;
		atomic_store_explicit(link->head, end->finished, memory_order_release);        /* pairs with tp_link_claim */
	}
	return ncclSuccess;
}

/* What came into slot is a chunk, or the sender's goodbye. */
static ncclResult_t take_chunk(struct tp_link_net *end, struct tp_slot *slot, size_t bytes)
{
	if (bytes < sizeof(struct tp_net_chunk) || bytes - sizeof(struct tp_net_chunk) != slot->bytes)
		return TP_FAIL(ncclInternalError, "rank %d sent a chunk of %zu bytes (channel %d, class %d) whose header says %u", end->from, bytes, end->channel,
			end->lane_class, bytes < sizeof(struct tp_net_chunk) ? 0 : slot->bytes);
	if (slot->kind == TP_NET_KIND_BYE && slot->bytes == 0) {
		end->state = TP_NET_LEFT;
		return ncclSuccess;
	}
	if (slot->kind != TP_SLOT_INLINE)
		return TP_FAIL(ncclInternalError, "rank %d sent a chunk of unknown kind %u (channel %d, class %d)", end->from, slot->kind, end->channel, end->lane_class);
	end->finished++;
	atomic_store_explicit(&slot->seq, end->finished, memory_order_release);        /* pairs with tp_link_peek */
	return ncclSuccess;
}

static ncclResult_t lose(struct tp_link_net *end, ncclResult_t result)
{
	if (result != ncclRemoteError) return result;
	/* Its goodbye found no room. */
	if (end->nets->ops->has_left && end->nets->ops->has_left(end->comm)) {
		end->state = TP_NET_LEFT;
		return ncclSuccess;
	}
	end->state = TP_NET_LOST;
	end->lost_ms = tp_clock_ms();
	return ncclSuccess;
}

ncclResult_t tp_net_link_mourn(struct tp_link_net *end)
{
	if (atomic_load_explicit(end->link->head, memory_order_acquire) != end->finished) return ncclSuccess;  /* pairs with tp_link_release */
	return tp_clock_ms() - end->lost_ms < LOST_GRACE_MS ? ncclSuccess : ncclRemoteError;
}

static ncclResult_t pump_receive(struct tp_link_net *end, bool *moved)
{
	struct tp_link *link = end->link;
	const struct tp_net_ops *ops = end->nets->ops;
	uint32_t head = atomic_load_explicit(link->head, memory_order_acquire);         /* pairs with tp_link_release */
	bool done;

	while (end->posted - head <= link->mask && end->posted - end->finished < TP_NET_MAX_REQUESTS) {
		struct tp_slot *slot = slot_at(link, end->posted);
		void *data = &slot->bytes, *request = NULL;
		size_t room = sizeof(struct tp_net_chunk) + link->capacity;
		int tag = TP_NET_LINK_TAG;
		ncclResult_t result = ops->irecv(end->comm, 1, &data, &room, &tag, &end->mhandle, &request);
		if (result != ncclSuccess) return lose(end, result);
		if (!request) break;
		end->requests[end->posted++ % TP_NET_MAX_REQUESTS] = request;
	}
	while (end->finished != end->posted && end->state == TP_NET_READY) {
		size_t bytes = 0;
		ncclResult_t result = ops->test(end->requests[end->finished % TP_NET_MAX_REQUESTS], &done, &bytes);
		if (result != ncclSuccess) return lose(end, result);
		if (!done) break;
		*moved = true;
		TP_TRY(take_chunk(end, slot_at(link, end->finished), bytes));
	}
	return ncclSuccess;
}

ncclResult_t tp_net_link_pump(struct tp_link_net *end, bool *moved)
{
	return end->sending ? pump_send(end, moved) : pump_receive(end, moved);
}

/* The other links' ends go on meanwhile; what is wrong with them is found when it is their turn. */
static void pump_all(struct tp_net_links *nets)
{
	for (int i = 0; i < nets->nends; i++) {
		bool moved;
		if (nets->ends[i]->state == TP_NET_READY) (void)tp_net_link_pump(nets->ends[i], &moved);
	}
}

void tp_net_link_say_bye(struct tp_link_net *end)
{
	/* From the next slot, which is free and, unlike anything else here, registered memory. */
	struct tp_slot *slot = slot_at(end->link, end->posted);
	struct tp_net_links *nets = end->nets;
	const struct tp_net_ops *ops = nets->ops;
	void *request = NULL;
	bool done = false;
	uint64_t since = tp_clock_ms(), waited = 0;

	if (ops->leaving) ops->leaving(end->comm);
	slot->bytes = slot->tag = 0;
	slot->kind = TP_NET_KIND_BYE;
	/* A transport whose receiver says where data goes has room only when the receiver has used a chunk up. */
	while (waited <= (request ? nets->patience_ms : TP_MIN(nets->patience_ms, (uint64_t)BYE_MS))) {
		if (!request && ops->isend(end->comm, &slot->bytes, sizeof(struct tp_net_chunk), TP_NET_LINK_TAG, end->mhandle, &request) != ncclSuccess) return;
		if (request && (ops->test(request, &done, NULL) != ncclSuccess || done)) return;
		pump_all(nets);
		sched_yield();
		waited = tp_clock_ms() - since;
	}
	nets->patience_ms -= TP_MIN(waited, nets->patience_ms);
}

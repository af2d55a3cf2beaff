/* The proxy of net links: takes published slots to the network in order, and puts what arrives into slots in order.
 * Receives are posted ahead into every free slot, so that a sender never waits for this side to ask. */
#include <sched.h>
#include <string.h>

#include "link/net_link.h"

#define LOST_GRACE_MS 300
#define BYE_MS 300
#define LARGE_CHUNK ((size_t)64 << 10)    /* the first of so much brings its ring into large pages */

static struct tp_slot *slot_at(const struct tp_link *link, uint32_t index)
{
	return (struct tp_slot *)(link->slots + (size_t)(index & link->mask) * link->stride);
}

/* A slot's number and size: in the slot itself, or, where that lies in device memory, alone. What the proxy knows of a chunk. */
struct flag { _Atomic uint32_t seq; uint32_t bytes; };
_Static_assert(offsetof(struct tp_slot, bytes) == offsetof(struct flag, bytes), "a flag is the beginning of a slot");

static struct flag *flag_at(const struct tp_link_net *end, uint32_t index)
{
	return (struct flag *)(end->flags + (size_t)(index & end->link->mask) * end->flag_stride);
}

/* A sender's header: what says how the slot is sent. Host ranks: the slot's own. GPU ranks: where the slot lies in device memory, its flag. */
static struct tp_slot *header_at(const struct tp_link_net *end, uint32_t index) { return (struct tp_slot *)flag_at(end, index); }

/* The header, with first bytes, and the rest from where it lies. The header travels as that of a chunk like any other. */
static ncclResult_t send_lent(struct tp_link_net *end, struct tp_slot *header, void **request)
{
	const struct tp_slot_lent *lent = (const struct tp_slot_lent *)header->data;
	struct tp_net_grant *grant = lent->grant;
	struct iovec parts[TP_NET_LENT_PARTS] = { { &header->bytes, sizeof(struct tp_net_chunk) + lent->first_bytes }, { (void *)(uintptr_t)lent->addr, header->bytes - lent->first_bytes } };
	void *mhandles[TP_NET_LENT_PARTS] = { end->headers_mhandle ? end->headers_mhandle : end->mhandle, grant ? grant->mhandle : NULL };
	header->kind = TP_SLOT_INLINE;
	ncclResult_t result = end->nets->ops->isendv(end->comm, parts, TP_NET_LENT_PARTS, TP_NET_LINK_TAG, mhandles, request);
	if (result != ncclSuccess || !*request) {
		header->kind = TP_SLOT_LENT;
		return result;
	}
	end->lent[end->posted % TP_NET_MAX_REQUESTS] = grant;
	if (end->nets->gpu) tp_net_loan_out(end, grant, header->bytes);
	return ncclSuccess;
}

static ncclResult_t send_slot(struct tp_link_net *end, void **request)
{
	const struct tp_net_ops *ops = end->nets->ops;
	struct tp_slot *slot = slot_at(end->link, end->posted), *header = header_at(end, end->posted);
	uint32_t bytes = header->bytes;

	end->lent[end->posted % TP_NET_MAX_REQUESTS] = NULL;
	if (bytes > end->link->capacity)
		return TP_FAIL(ncclInternalError, "a chunk of %u bytes for rank %d (channel %d, class %d); a network slot holds %zu", bytes, end->to, end->channel,
			end->lane_class, end->link->capacity);
	if (header->kind == TP_SLOT_LENT && end->nets->gpu) TP_TRY(tp_net_loan_open(end, header, slot));
	if (header->kind == TP_SLOT_LENT) return send_lent(end, header, request);
	if (bytes >= LARGE_CHUNK && !end->enlarged) tp_net_ring_enlarge(end);
	return ops->isend(end->comm, &slot->bytes, sizeof(struct tp_net_chunk) + bytes, TP_NET_LINK_TAG, end->mhandle, request);
}

void tp_net_link_see_published(struct tp_link_net *end)
{
	struct tp_link *link = end->link;

	/* The acquire pairs with the kernel's release of seq; after the last slot of the ring comes one that is in use. */
	while (link->next - end->finished <= link->mask &&
		atomic_load_explicit(&flag_at(end, link->next)->seq, memory_order_acquire) == link->next + 1) link->next++;
}

bool tp_net_link_has_loan(struct tp_link_net *end)
{
	bool has = (int32_t)(end->lent_to - end->finished) > 0;

	if (!end->nets->gpu) return has;
	tp_net_link_see_published(end);
	for (uint32_t i = end->posted; i != end->link->next && !has; i++) has = header_at(end, i)->kind == TP_SLOT_LENT;
	return has;
}

bool tp_net_link_owes(struct tp_link_net *end, uintptr_t begin, uintptr_t finish)
{
	bool owes = false;

	tp_net_link_see_published(end);
	for (uint32_t i = end->posted; i != end->link->next && !owes; i++) {
		const struct tp_slot *header = header_at(end, i);
		uint64_t at = ((const struct tp_slot_lent *)header->data)->addr;
		owes = header->kind == TP_SLOT_LENT && at >= begin && at < finish;
	}
	return owes;
}

static ncclResult_t pump_send(struct tp_link_net *end, bool *moved)
{
	struct tp_link *link = end->link;
	bool done;

	if (end->nets->gpu) tp_net_link_see_published(end);
	while (end->posted != link->next && end->posted - end->finished < TP_NET_MAX_REQUESTS) {
		void *request = NULL;
		TP_TRY(send_slot(end, &request));
		if (!request) break;
		end->requests[end->posted++ % TP_NET_MAX_REQUESTS] = request;
		*moved = true;
	}
	while (end->finished != end->posted) {
		TP_TRY(end->nets->ops->test(end->requests[end->finished % TP_NET_MAX_REQUESTS], &done, NULL));
		if (!done) break;
		if (end->lent[end->finished % TP_NET_MAX_REQUESTS]) tp_net_grant_back(end->lent[end->finished % TP_NET_MAX_REQUESTS]);
		end->finished++;
		/* Numbers wrap, and this one would be left behind. */
		if ((int32_t)(end->lent_to - end->finished) < 0) end->lent_to = end->finished;
		*moved = true;
		if (end->window) tp_net_ring_tell_head(end, end->finished);
		else atomic_store_explicit(link->head, end->finished, memory_order_release);   /* pairs with tp_link_claim, or the kernel's look */
	}
	return ncclSuccess;
}

/* What a slot in host memory says of its chunk must be what came; one in device memory the kernel checks. */
static ncclResult_t check_chunk(const struct tp_link_net *end, const struct tp_slot *slot, size_t bytes)
{
	if (bytes < sizeof(struct tp_net_chunk) || (slot && bytes - sizeof(struct tp_net_chunk) != slot->bytes))
		return TP_FAIL(ncclInternalError, "rank %d sent a chunk of %zu bytes (channel %d, class %d) whose header says %u", end->from, bytes, end->channel,
			end->lane_class, !slot || bytes < sizeof(struct tp_net_chunk) ? 0 : slot->bytes);
	if (slot && slot->kind != TP_SLOT_INLINE)
		return TP_FAIL(ncclInternalError, "rank %d sent a chunk of unknown kind %u (channel %d, class %d)", end->from, slot->kind, end->channel, end->lane_class);
	return ncclSuccess;
}

/* What came into the next slot is a chunk, or the sender's goodbye. */
static ncclResult_t take_chunk(struct tp_link_net *end, size_t bytes)
{
	struct tp_slot *slot = slot_at(end->link, end->landed);
	void **flush = &end->flush[end->landed % TP_NET_MAX_REQUESTS], *data = &slot->bytes;

	if (bytes == TP_NET_BYE_BYTES) {
		end->leaves = true;
		return ncclSuccess;
	}
	TP_TRY(check_chunk(end, end->far_slots ? NULL : slot, bytes));
	end->sizes[end->landed % TP_NET_MAX_REQUESTS] = (uint32_t)(bytes - sizeof(struct tp_net_chunk));
	if (bytes >= LARGE_CHUNK && !end->enlarged) tp_net_ring_enlarge(end);
	*flush = NULL;
	if (end->flushes) TP_TRY(end->nets->ops->iflush(end->comm, 1, &data, &bytes, &end->mhandle, flush));
	end->landed++;
	return ncclSuccess;
}

/* What has landed, and is there for kernels too. */
static ncclResult_t publish_landed(struct tp_link_net *end, bool *moved)
{
	while (end->finished != end->landed) {
		void **flush = &end->flush[end->finished % TP_NET_MAX_REQUESTS];
		bool done = true;
		if (*flush) TP_TRY(end->nets->ops->test(*flush, &done, NULL));
		if (!done) break;
		*flush = NULL;
		*moved = true;
		struct flag *flag = flag_at(end, end->finished);
		uint32_t bytes = end->sizes[end->finished % TP_NET_MAX_REQUESTS], number = end->finished++;
		if (end->window) {
			tp_net_ring_tell_full(end, number, bytes);
			continue;
		}
		flag->bytes = bytes;
		atomic_store_explicit(&flag->seq, number + 1, memory_order_release);           /* pairs with tp_link_peek, or the kernel's look */
	}
	if (end->leaves && end->finished == end->landed) end->state = TP_NET_LEFT;
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
	bool moved = false;

	/* Flushes need no peer. */
	TP_TRY(publish_landed(end, &moved));
	if (end->finished != end->landed) return ncclSuccess;
	if (atomic_load_explicit(end->link->head, memory_order_acquire) != end->finished) return ncclSuccess;  /* pairs with tp_link_release */
	return tp_clock_ms() - end->lost_ms < LOST_GRACE_MS ? ncclSuccess : ncclRemoteError;
}

static ncclResult_t pump_receive(struct tp_link_net *end, bool *moved)
{
	struct tp_link *link = end->link;
	const struct tp_net_ops *ops = end->nets->ops;
	uint32_t head = atomic_load_explicit(link->head, memory_order_acquire);         /* pairs with tp_link_release */
	bool done;

	while (!end->leaves && end->posted - head <= link->mask && end->posted - end->finished < TP_NET_MAX_REQUESTS) {
		struct tp_slot *slot = slot_at(link, end->posted);
		void *data = &slot->bytes, *request = NULL;
		size_t room = sizeof(struct tp_net_chunk) + link->capacity;
		int tag = TP_NET_LINK_TAG;
		ncclResult_t result = ops->irecv(end->comm, 1, &data, &room, &tag, &end->mhandle, &request);
		if (result != ncclSuccess) return lose(end, result);
		if (!request) break;
		end->requests[end->posted++ % TP_NET_MAX_REQUESTS] = request;
	}
	while (end->landed != end->posted && !end->leaves) {
		size_t bytes = 0;
		ncclResult_t result = ops->test(end->requests[end->landed % TP_NET_MAX_REQUESTS], &done, &bytes);
		if (result != ncclSuccess) return lose(end, result);
		if (!done) break;
		*moved = true;
		TP_TRY(take_chunk(end, bytes));
		if (!end->flushes) TP_TRY(publish_landed(end, moved));
	}
	return publish_landed(end, moved);
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
	/* Whatever there is in the next slot, which is registered memory. */
	struct tp_slot *slot = slot_at(end->link, end->posted);
	struct tp_net_links *nets = end->nets;
	const struct tp_net_ops *ops = nets->ops;
	void *request = NULL;
	bool done = false;
	uint64_t since = tp_clock_ms(), waited = 0;

	if (ops->leaving) ops->leaving(end->comm);
	/* A transport whose receiver says where data goes has room only when the receiver has used a chunk up. */
	while (waited <= (request ? nets->patience_ms : TP_MIN(nets->patience_ms, (uint64_t)BYE_MS))) {
		if (!request && ops->isend(end->comm, &slot->bytes, TP_NET_BYE_BYTES, TP_NET_LINK_TAG, end->mhandle, &request) != ncclSuccess) return;
		if (request && (ops->test(request, &done, NULL) != ncclSuccess || done)) return;
		pump_all(nets);
		sched_yield();
		waited = tp_clock_ms() - since;
	}
	nets->patience_ms -= TP_MIN(waited, nets->patience_ms);
}

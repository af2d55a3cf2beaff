/* Chunks that are sent from where they lie: memory that the program registered (ncclCommRegister), or any, where the transport takes any. One copy
 * less; the plan's by_ref marks say which chunks stay unchanged until the other end has used them up, and an operation ends only when all
 * that it lent is through. Unregistered memory isn't registered in passing: nobody would tell us when the program unmaps it.
 *
 * What the kernels of GPU ranks lend is told of in another way (net_loans.c), and sent the same way.
 *
 * Each connection has a handle of its own for a buffer, made when the program registers it, or, where the connection came later, at the
 * first chunk; the transport's cache keeps that cheap. */
#include <stdlib.h>

#include "link/net_link.h"

void tp_net_tell_slots(struct tp_net_links *nets, uint64_t since_ns, const struct tp_link_net *end)
{
	if (nets->told_slots) return;
	nets->told_slots = true;
	TP_INFO(TP_NET | TP_REG, "rank %d: the slots of a new link, %zu bytes at %p, were registered with the network in %.0f us. Each link has that once, in the collective that uses it first",
		nets->boot->rank, end->far_slots ? end->far_bytes : end->ring_bytes, (const void *)(end->far_slots ? end->far_slots : end->ring), (double)(tp_clock_ns() - since_ns) / 1e3);
}

static void tell_late(struct tp_net_links *nets, uint64_t since_ns, const struct tp_net_buffer *b)
{
	if (nets->told_late) return;
	nets->told_late = true;
	TP_INFO(TP_NET | TP_REG, "rank %d: a collective waited %.0f us while the buffer of %zu bytes at %p was registered with the network: its link didn't exist yet when ncclCommRegister "
		"was called. That is once a buffer and link; ncclCommRegister after such a collective has run once avoids it", nets->boot->rank,
		(double)(tp_clock_ns() - since_ns) / 1e3, (size_t)(b->end - b->begin), (void *)b->begin);
}

static void tell_copied(struct tp_net_links *nets, const void *memory, size_t bytes)
{
	if (nets->told_copied) return;
	nets->told_copied = true;
	TP_INFO(TP_NET | TP_REG, "rank %d: what is sent from %p (%zu bytes at a time) is copied first, since that memory isn't registered: ncclCommRegister avoids it. Said once",
		nets->boot->rank, memory, bytes);
}

static ncclResult_t register_buffer(const struct tp_link_net *end, struct tp_net_buffer *buffer, void **mhandle)
{
	void *memory = (void *)buffer->begin;
	size_t bytes = buffer->end - buffer->begin;
	if (end->nets->gpu) return tp_net_gdr_register_memory(end, &buffer->shown, memory, bytes, mhandle);
	return end->nets->ops->reg_memory(end->comm, memory, bytes, TP_NET_HOST, mhandle);
}

/* Nothing where it can't be had: then it is copied. */
static struct tp_net_grant *make_grant(struct tp_link_net *end, struct tp_net_buffer *buffer)
{
	struct tp_net_grant *grant = tp_alloc(1, sizeof(*grant), "a registration");
	if (!grant) return NULL;
	*grant = (struct tp_net_grant){ .next = buffer->grants, .buffer = buffer, .end = end };
	if (register_buffer(end, buffer, &grant->mhandle) != ncclSuccess) {
		tp_net_loans_lock(end->nets);
		buffer->refused = true;
		tp_net_loans_unlock(end->nets);
		tp_net_loans_refuse(end->nets);
		TP_WARN("rank %d: the buffer of %zu bytes at %p can't be registered with the network (see above): it is copied into slots instead, as others are", end->nets->boot->rank,
			(size_t)(buffer->end - buffer->begin), (void *)buffer->begin);
		free(grant);
		return NULL;
	}
	buffer->grants = grant;
	return grant;
}

static struct tp_net_grant *find_grant(struct tp_link_net *end, struct tp_net_buffer *buffer)
{
	struct tp_net_grant *g = buffer->grants;
	while (g && g->end != end) g = g->next;
	return g;
}

static struct tp_net_grant *have_grant(struct tp_link_net *end, struct tp_net_buffer *buffer)
{
	struct tp_net_grant *grant = find_grant(end, buffer);
	if (grant || buffer->refused) return grant;
	uint64_t since = tp_clock_ns();
	grant = make_grant(end, buffer);
	if (grant) tell_late(end->nets, since, buffer);
	return grant;
}

struct tp_net_grant *tp_net_grant_for(struct tp_link_net *end, const void *memory, size_t bytes)
{
	struct tp_net_links *nets = end->nets;
	if (end->grant && tp_net_buffer_covers(end->grant->buffer, memory, bytes)) return end->grant;
	bool refused = false;           /* that was told */
	for (struct tp_net_buffer *b = nets->buffers; b; b = b->next) {
		if (!tp_net_buffer_covers(b, memory, bytes)) continue;
		refused |= b->refused;
		struct tp_net_grant *grant = have_grant(end, b);
		if (grant) return end->grant = grant;
	}
	/* What a kernel found while it was registered. */
	for (struct tp_net_buffer *b = nets->buffers; b && nets->gpu; b = b->next) {
		struct tp_net_grant *grant = tp_net_buffer_lingers_over(b, memory, bytes) ? have_grant(end, b) : NULL;
		if (grant) return grant;
	}
	if (!refused && !nets->gpu) tell_copied(nets, memory, bytes);
	return NULL;
}

/* *grant: NULL where none is needed. */
static bool prepare_loan(struct tp_link_net *end, const void *memory, size_t bytes, struct tp_net_grant **grant)
{
	*grant = NULL;
	if (end->state != TP_NET_READY || !end->nets->lends) return false;
	if (end->nets->ops->any_memory) return true;
	*grant = tp_net_grant_for(end, memory, bytes);
	return *grant;
}

bool tp_link_prepare_loan(struct tp_link *link, const void *memory, size_t bytes)
{
	struct tp_net_grant *grant;
	return prepare_loan(link->net, memory, bytes, &grant);
}

bool tp_link_lend(struct tp_link *link, const void *memory, size_t bytes, void **out)
{
	struct tp_link_net *end = link->net;
	struct tp_net_grant *grant;
	if (!prepare_loan(end, memory, bytes, &grant)) return false;
	if (grant) grant->out++;
	*out = grant;
	end->lent_to = link->next + 1;
	return true;
}

/* Unlinks it and gives it back. */
static void drop_grant(struct tp_net_grant *grant)
{
	struct tp_link_net *end = grant->end;
	struct tp_net_grant **at = &grant->buffer->grants;
	while (*at != grant) at = &(*at)->next;
	*at = grant->next;
	if (end->grant == grant) end->grant = NULL;
	end->nets->ops->dereg_memory(end->comm, grant->mhandle);
	free(grant);
}

void tp_net_buffer_unlist(struct tp_net_links *nets, struct tp_net_buffer *buffer)
{
	struct tp_net_buffer **at = &nets->buffers;
	tp_net_loans_lock(nets);
	while (*at != buffer) at = &(*at)->next;
	*at = buffer->next;
	tp_net_loans_forget(nets, buffer);
	tp_net_loans_unlock(nets);
}

void tp_net_buffer_free(const struct tp_net_links *nets, struct tp_net_buffer *buffer)
{
	if (nets->gpu) tp_net_gdr_let_go(nets, &buffer->shown);
	free(buffer);
}

/* A buffer that is gone goes with its last grant. Those of GPU ranks go when kernels that may have found them are over. */
static void bury(struct tp_net_links *nets, struct tp_net_buffer *buffer)
{
	if (nets->gpu || !buffer->gone || buffer->grants) return;
	tp_net_buffer_unlist(nets, buffer);
	tp_net_buffer_free(nets, buffer);
}

void tp_net_grant_back(struct tp_net_grant *grant)
{
	struct tp_net_buffer *buffer = grant->buffer;
	struct tp_net_links *nets = grant->end->nets;
	if (--grant->out || !(buffer->freed || (buffer->gone && !nets->gpu))) return;
	drop_grant(grant);
	bury(nets, buffer);
}

void tp_net_grants_drop(struct tp_link_net *end)
{
	for (struct tp_net_buffer *b = end->nets->buffers, *next; b; b = next) {
		struct tp_net_grant *grant = find_grant(end, b);
		next = b->next;
		if (!grant) continue;
		drop_grant(grant);
		bury(end->nets, b);
	}
}

void tp_net_buffer_add(struct tp_net_links *nets, struct tp_net_buffer *buffer)
{
	tp_net_loans_lock(nets);
	buffer->next = nets->buffers;
	nets->buffers = buffer;
	tp_net_loans_unlock(nets);
	for (int i = 0; i < nets->nends && nets->lends && !nets->ops->any_memory && !buffer->refused; i++) {
		struct tp_link_net *end = nets->ends[i];
		if (end->sending && end->state == TP_NET_READY && (!nets->gpu || end->far_slots)) make_grant(end, buffer);
	}
}

void tp_net_buffer_drop_idle(struct tp_net_buffer *buffer)
{
	for (struct tp_net_grant *g = buffer->grants, *next; g; g = next) {
		next = g->next;
		if (!g->out) drop_grant(g);
	}
}

ncclResult_t tp_net_links_register(struct tp_net_links *nets, void *memory, size_t bytes, struct tp_net_buffer **out)
{
	struct tp_net_buffer *buffer = tp_alloc(1, sizeof(*buffer), "a registered buffer");
	if (!buffer) return ncclSystemError;
	*buffer = (struct tp_net_buffer){ .begin = (uintptr_t)memory, .end = (uintptr_t)memory + bytes };
	tp_net_buffer_add(nets, buffer);
	*out = buffer;
	return ncclSuccess;
}

void tp_net_links_deregister(struct tp_net_links *nets, struct tp_net_buffer *buffer)
{
	buffer->gone = true;
	tp_net_buffer_drop_idle(buffer);
	bury(nets, buffer);
}

void tp_net_links_recall(struct tp_net_links *nets)
{
	for (int i = 0; i < nets->nends; i++) {
		struct tp_link_net *end = nets->ends[i];
		if (!end->sending || end->state > TP_NET_READY || !tp_net_link_has_loan(end)) continue;
		TP_INFO(TP_NET | TP_REG, "rank %d: network link (channel %d, class %d) to rank %d is closed: an operation ended before what it had lent was through", nets->boot->rank, end->channel,
			end->lane_class, end->to);
		/* One that isn't connected yet has lent nothing on, and never will. */
		end->state = TP_NET_RECALLED;
		if (end->comm) nets->ops->close_send(end->comm);
		end->comm = NULL;
		tp_net_grants_drop(end);
	}
}

/* What kernels lend: registered buffers of GPU ranks, sent from where they lie by network cards that read GPU memory (net_gdr.c).
 *
 * A kernel goes by the table in device memory, which has an entry for each buffer while it is registered: so a graph that was captured with a buffer copies once
 * that is deregistered. The engine, which sends what kernels have published, goes by the list of buffers. A chunk whose buffer has left the list in between, or
 * that a connection can't register, is copied late, by the engine, into the slot that it didn't need until then. That is right whenever it happens: a kernel
 * waits for all that it has lent, so the memory is its operation's as long as the chunk isn't through; and where the kernel ended early (an abort, a
 * fault) nothing is sent any more (tp_links_recall).
 *
 * The list changes with two locks, so whoever has either may read it: the engine has the links', launches take the small one alone. CUDA is called with
 * neither while a program registers, for whoever waits inside CUDA may wait for a kernel that waits for the engine. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "link/net_link.h"

struct tp_net_loans {
	pthread_mutex_t lock;
	struct tp_gpu_memory table;             /* [TP_LINK_LOANS] of struct tp_link_loan */
	uint64_t used[TP_LINK_LOANS / 64];      /* of its entries */
	_Atomic uint32_t nbuffers;
	struct tp_links_loans counts;           /* with the links' lock */
	bool told_copied;
};

ncclResult_t tp_net_loans_open(struct tp_net_links *nets)
{
	if (!nets->gpu || !nets->lends) return ncclSuccess;
	struct tp_net_loans *loans = tp_alloc(1, sizeof(*loans), "what kernels lend");
	if (!loans) return ncclSystemError;
	ncclResult_t result = tp_gpu_alloc(nets->gpu, TP_LINK_LOANS * sizeof(struct tp_link_loan), false, "a table of registered buffers", &loans->table);
	if (result != ncclSuccess) {
		free(loans);
		return result;
	}
	pthread_mutex_init(&loans->lock, NULL);
	nets->loans = loans;
	return ncclSuccess;
}

void tp_net_loans_close(struct tp_net_links *nets)
{
	if (!nets->loans) return;
	tp_gpu_free(&nets->loans->table);
	pthread_mutex_destroy(&nets->loans->lock);
	free(nets->loans);
	nets->loans = NULL;
}

void tp_net_loans_lock(struct tp_net_links *nets)
{
	if (nets->loans) pthread_mutex_lock(&nets->loans->lock);
}

void tp_net_loans_unlock(struct tp_net_links *nets)
{
	if (nets->loans) pthread_mutex_unlock(&nets->loans->lock);
}

uint64_t tp_net_loans_table(const struct tp_net_links *nets) { return nets->loans ? (uint64_t)(uintptr_t)nets->loans->table.ptr : 0; }

void tp_net_loans_count(const struct tp_net_links *nets, struct tp_links_loans *out)
{
	if (nets->loans) *out = nets->loans->counts;
}

/* ---- registering */

static bool take_index(struct tp_net_loans *loans, uint32_t *index)
{
	for (uint32_t i = 0; i < TP_LINK_LOANS; i++) {
		if (loans->used[i / 64] >> i % 64 & 1) continue;
		loans->used[i / 64] |= 1ull << i % 64;
		*index = i;
		return true;
	}
	return false;
}

void tp_net_loans_forget(struct tp_net_links *nets, const struct tp_net_buffer *buffer)
{
	struct tp_net_loans *loans = nets->loans;
	if (!loans) return;
	loans->used[buffer->index / 64] &= ~(1ull << buffer->index % 64);
	atomic_fetch_sub_explicit(&loans->nbuffers, 1, memory_order_relaxed);
}

static ncclResult_t write_entry(const struct tp_net_links *nets, uint32_t index, uintptr_t begin, uintptr_t end)
{
	struct tp_link_loan entry = { begin, end };
	return tp_gpu_copy(nets->gpu, (struct tp_link_loan *)nets->loans->table.ptr + index, &entry, sizeof(entry));
}

/* Ranges of other allocations that were where this one is: the program freed them without a word. Their registrations must not be found for the new memory. */
static void forsake(struct tp_net_links *nets, uintptr_t begin, uintptr_t end, uint64_t id)
{
	for (struct tp_net_buffer *b = nets->buffers; b; b = b->next)
		if (b->id != id && b->begin < end && begin < b->end) tp_net_buffer_forsake(nets, b);
}

/* Where it can't be lent: why not. Registers it with the devices that will send it. */
static bool may_be_lent(struct tp_net_links *nets, pthread_mutex_t *links_lock, struct tp_net_buffer *buffer, char *why, size_t why_bytes)
{
	int devs[TP_LINK_SEATS_MAX], ndevs = 0;
	struct tp_gpu_pointer p;
	void *memory = (void *)buffer->begin;
	size_t bytes = buffer->end - buffer->begin;
	if (!nets->loans) {
		snprintf(why, why_bytes, "%s", nets->ops->isendv ? "TELPHER_NET_LEND=0, or the card sends from one place at a time" : "the transport sends from one place at a time");
		return false;
	}
	pthread_mutex_lock(links_lock);
	ndevs = tp_net_gdr_send_devices(nets, devs, TP_LINK_SEATS_MAX);
	if (!ndevs) snprintf(why, why_bytes, "the network doesn't read GPU memory: %.160s", tp_net_gdr_why_not(nets));
	pthread_mutex_unlock(links_lock);
	if (!ndevs) return false;
	snprintf(why, why_bytes, "it isn't one allocation of a GPU's memory");
	if (tp_gpu_pointer(memory, &p) != ncclSuccess || !p.device || p.managed) return false;
	if (buffer->begin < (uintptr_t)p.base || buffer->end > (uintptr_t)p.base + p.bytes) return false;
	buffer->id = p.buffer_id;
	pthread_mutex_lock(links_lock);
	forsake(nets, buffer->begin, buffer->end, buffer->id);
	pthread_mutex_unlock(links_lock);
	for (int d = 0; d < ndevs; d++) {
		if (tp_net_gdr_hold(nets, devs[d], memory, bytes, &buffer->held[buffer->nheld]) != ncclSuccess) {
			snprintf(why, why_bytes, "device %d can't register it (see above)", devs[d]);
			return false;
		}
		buffer->nheld += buffer->held[buffer->nheld] != NULL;
	}
	pthread_mutex_lock(&nets->loans->lock);
	bool has_index = take_index(nets->loans, &buffer->index);
	if (has_index) atomic_fetch_add_explicit(&nets->loans->nbuffers, 1, memory_order_relaxed);
	pthread_mutex_unlock(&nets->loans->lock);
	if (!has_index) snprintf(why, why_bytes, "%d buffers are registered already", TP_LINK_LOANS);
	return has_index;
}

ncclResult_t tp_net_loans_register(struct tp_net_links *nets, pthread_mutex_t *links_lock, void *memory, size_t bytes, struct tp_net_buffer **out)
{
	char why[200];
	struct tp_net_buffer *buffer = tp_alloc(1, sizeof(*buffer), "a registered buffer");
	*out = NULL;
	if (!buffer) return ncclSystemError;
	*buffer = (struct tp_net_buffer){ .begin = (uintptr_t)memory, .end = (uintptr_t)memory + bytes };
	if (!may_be_lent(nets, links_lock, buffer, why, sizeof(why))) {
		for (int i = 0; i < buffer->nheld; i++) nets->ops->drop_memory(buffer->held[i]);
		free(buffer);
		TP_INFO(TP_NET | TP_REG, "rank %d: what is sent over the network from the %zu bytes registered at %p is copied into slots first: %s", nets->boot->rank, bytes, memory, why);
		return ncclSuccess;
	}
	pthread_mutex_lock(links_lock);
	tp_net_buffer_add(nets, buffer);
	pthread_mutex_unlock(links_lock);
	ncclResult_t result = write_entry(nets, buffer->index, buffer->begin, buffer->end);
	if (result != ncclSuccess) {
		tp_net_loans_deregister(nets, links_lock, buffer);
		return result;
	}
	TP_INFO(TP_NET | TP_REG, "rank %d: what is sent over the network from the %zu bytes registered at %p is sent from where it lies, in large chunks, as the plan allows", nets->boot->rank,
		bytes, memory);
	*out = buffer;
	return ncclSuccess;
}

void tp_net_loans_deregister(struct tp_net_links *nets, pthread_mutex_t *links_lock, struct tp_net_buffer *buffer)
{
	/* Kernels first. Should it fail, what they go on lending is copied late. */
	(void)write_entry(nets, buffer->index, 0, 0);
	pthread_mutex_lock(links_lock);
	tp_net_buffer_retire(nets, buffer);
	pthread_mutex_unlock(links_lock);
}

/* ---- lending */

bool tp_net_loans_find(struct tp_net_links *nets, const void *memory, size_t bytes, uint32_t *index)
{
	struct tp_net_loans *loans = nets->loans;
	uint64_t id = 0, now = 0;
	if (!loans || !bytes || !atomic_load_explicit(&loans->nbuffers, memory_order_relaxed)) return false;
	pthread_mutex_lock(&loans->lock);
	const struct tp_net_buffer *b = nets->buffers;
	while (b && (b->refused || !tp_net_buffer_covers(b, memory, bytes))) b = b->next;
	bool found = b != NULL;
	if (found) {
		*index = b->index;
		id = b->id;
	}
	pthread_mutex_unlock(&loans->lock);
	/* It may have been freed, and the address may be somebody else's by now. */
	return found && tp_gpu_buffer_id(memory, &now) == ncclSuccess && now == id;
}

static bool register_headers(struct tp_link_net *end)
{
	if (end->headers_mhandle) return true;
	if (end->nets->ops->reg_memory(end->comm, end->ring, end->ring_bytes, TP_NET_HOST, &end->headers_mhandle) == ncclSuccess) return true;
	end->headers_mhandle = NULL;
	return false;
}

ncclResult_t tp_net_loan_open(struct tp_link_net *end, struct tp_slot *header, struct tp_slot *slot)
{
	struct tp_net_links *nets = end->nets;
	struct tp_slot_lent *lent = (struct tp_slot_lent *)header->data;
	const void *memory = (const void *)(uintptr_t)lent->addr;
	struct tp_net_grant *grant = tp_net_grant_for(end, memory, header->bytes);
	if (grant && register_headers(end)) {
		lent->grant = grant;
		lent->first_bytes = 0;
		return ncclSuccess;
	}
	if (tp_gpu_copy(nets->gpu, slot->data, memory, header->bytes) != ncclSuccess)
		return TP_FAIL(ncclInvalidUsage, "rank %d: %u bytes for rank %d at %p can't be read (see above): the registered buffer there was freed while an operation used it", nets->boot->rank,
			header->bytes, end->to, memory);
	header->kind = TP_SLOT_INLINE;
	nets->loans->counts.copied++;
	if (!nets->loans->told_copied)
		TP_INFO(TP_NET | TP_REG, "rank %d: a chunk at %p that a kernel left for the network to fetch is copied into its slot late, since that memory isn't registered (any more). Said once",
			nets->boot->rank, memory);
	nets->loans->told_copied = true;
	return ncclSuccess;
}

void tp_net_loan_out(struct tp_link_net *end, struct tp_net_grant *grant, uint32_t bytes)
{
	struct tp_links_loans *counts = &end->nets->loans->counts;
	grant->out++;
	end->lent_to = end->posted + 1;
	counts->chunks++;
	counts->bytes += bytes;
}

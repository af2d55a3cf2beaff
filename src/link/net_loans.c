/* What kernels lend: registered buffers of GPU ranks, sent from where they lie by network cards that read GPU memory (net_gdr.c).
 *
 * A kernel goes by the table in device memory, which has an entry for each buffer while it is registered: so a graph that was captured with a buffer copies once
 * that is deregistered. The engine, which sends what kernels have published, goes by the list of buffers. What is deregistered stays in the list, for the engine
 * alone, as long as a kernel may lend that has looked into the table before (tp_net_loans_settle).
 *
 * The engine calls nothing of CUDA's here: DMA-BUFs are made, and memory is registered with the devices, when the program registers it, and what connections get is a
 * share of that. The last resort is a chunk whose memory isn't registered, or that a connection can't register: the engine copies it late, into the slot that it didn't
 * need until then. That is right whenever it happens: a kernel waits for all that it has lent, so the memory is its operation's as long as the chunk isn't through; and
 * where the kernel ended early (an abort, a fault) nothing is sent any more (tp_links_recall).
 *
 * The list changes with two locks, so whoever has either may read it: the engine has the links', launches take the small one alone. CUDA is called with
 * neither, but for the last resort's copy, for whoever waits inside CUDA may wait for a kernel that waits for the engine. Nor are registrations given up with the links' lock, where that can be
 * avoided. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "link/net_link.h"

struct tp_net_loans {
	pthread_mutex_t lock;
	pthread_mutex_t table_lock;             /* around what is written there and listed; taken first, with none of the engine's, and CUDA is called with it */
	struct tp_gpu_memory table;             /* [TP_LINK_LOANS] of struct tp_link_loan */
	uint64_t used[TP_LINK_LOANS / 64];      /* of its entries */
	_Atomic uint32_t nbuffers;
	_Atomic bool any_refused;               /* since the table was last looked through */
	_Atomic bool any_gone;                  /* some are in the list */
	struct tp_links_loans counts;           /* with the links' lock */
	bool told_copied;
};

ncclResult_t tp_net_loans_open(struct tp_net_links *nets)
{
	if (!nets->gpu || !nets->lends || nets->ops->any_memory || nets->loans || !tp_net_gdr_sends(nets)) return ncclSuccess;
	struct tp_net_loans *loans = tp_alloc(1, sizeof(*loans), "what kernels lend");
	if (!loans) return ncclSystemError;
	ncclResult_t result = tp_gpu_alloc(nets->gpu, TP_LINK_LOANS * sizeof(struct tp_link_loan), false, "a table of registered buffers", &loans->table);
	if (result != ncclSuccess) {
		free(loans);
		return result;
	}
	pthread_mutex_init(&loans->lock, NULL);
	pthread_mutex_init(&loans->table_lock, NULL);
	nets->loans = loans;
	return ncclSuccess;
}

void tp_net_loans_close(struct tp_net_links *nets)
{
	if (!nets->loans) return;
	tp_gpu_free(&nets->loans->table);
	pthread_mutex_destroy(&nets->loans->lock);
	pthread_mutex_destroy(&nets->loans->table_lock);
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

void tp_net_loans_refuse(struct tp_net_links *nets)
{
	if (!nets->loans) return;
	atomic_store_explicit(&nets->loans->any_refused, true, memory_order_release);   /* pairs with strike_refused */
}

static ncclResult_t write_entry(const struct tp_net_links *nets, uint32_t index, uintptr_t begin, uintptr_t end)
{
	struct tp_link_loan entry = { begin, end };
	return tp_gpu_copy(nets->gpu, (struct tp_link_loan *)nets->loans->table.ptr + index, &entry, sizeof(entry));
}

/* Kernels don't find it any more. Should it fail, what they go on lending is copied late. */
static void strike(struct tp_net_links *nets, uint32_t index) { (void)write_entry(nets, index, 0, 0); }

static bool take_listed(struct tp_net_links *nets, bool (*which)(const struct tp_net_buffer *buffer), uint32_t *index)
{
	tp_net_loans_lock(nets);
	struct tp_net_buffer *b = nets->buffers;
	while (b && !(b->listed && which(b))) b = b->next;
	if (b) {
		b->listed = false;
		*index = b->index;
	}
	tp_net_loans_unlock(nets);
	return b != NULL;
}

static void strike_all(struct tp_net_links *nets, bool (*which)(const struct tp_net_buffer *buffer))
{
	uint32_t index;
	pthread_mutex_lock(&nets->loans->table_lock);
	while (take_listed(nets, which, &index)) strike(nets, index);
	pthread_mutex_unlock(&nets->loans->table_lock);
}

static bool is_refused(const struct tp_net_buffer *buffer) { return buffer->refused; }
static bool is_freed(const struct tp_net_buffer *buffer) { return buffer->freed; }

/* What a connection couldn't register, in the engine, which can't write to the table. */
static void strike_refused(struct tp_net_links *nets)
{
	if (!atomic_load_explicit(&nets->loans->any_refused, memory_order_relaxed)) return;
	if (atomic_exchange_explicit(&nets->loans->any_refused, false, memory_order_acquire)) strike_all(nets, is_refused);
}

/* Ranges of other allocations that were where this one is: the program freed them without a word. Their registrations must not be found for the new memory. */
static void forsake(struct tp_net_links *nets, pthread_mutex_t *links_lock, const struct tp_net_buffer *by)
{
	bool found;
	do {
		void *held[TP_LINK_SEATS_MAX];
		int nheld = 0;
		found = false;
		pthread_mutex_lock(links_lock);
		for (struct tp_net_buffer *b = nets->buffers; b && !found; b = b->next) {
			if (b->freed || b->id == by->id || b->begin >= by->end || by->begin >= b->end) continue;
			found = true;
			tp_net_loans_lock(nets);
			b->freed = true;
			tp_net_loans_unlock(nets);
			tp_net_buffer_drop_idle(b);
			while (b->shown.nheld) held[nheld++] = b->shown.held[--b->shown.nheld];
		}
		pthread_mutex_unlock(links_lock);
		while (nheld) nets->ops->drop_memory(held[--nheld]);
	} while (found);
	strike_all(nets, is_freed);
}

/* Where it can't be lent: why not. */
static bool may_be_lent(struct tp_net_links *nets, pthread_mutex_t *links_lock, struct tp_net_buffer *buffer, char *why, size_t why_bytes)
{
	int devs[TP_LINK_SEATS_MAX], ndevs = 0;
	struct tp_gpu_pointer p;
	void *memory = (void *)buffer->begin;
	size_t bytes = buffer->end - buffer->begin;
	if (!nets->lends) {
		snprintf(why, why_bytes, "%s", nets->ops->isendv ? "TELPHER_NET_LEND=0, or the card sends from one place at a time" : "the transport sends from one place at a time");
		return false;
	}
	pthread_mutex_lock(links_lock);
	if (nets->loans) ndevs = tp_net_gdr_send_devices(nets, devs, TP_LINK_SEATS_MAX);
	const char *no = tp_net_gdr_why_not(nets);
	if (!ndevs) snprintf(why, why_bytes, "the network doesn't read GPU memory: %.160s", no ? no : "none of the devices that this rank sends by does");
	pthread_mutex_unlock(links_lock);
	if (!ndevs) return false;
	const char *refusal = tp_mem_refuse(nets->gpu, memory, bytes, &p);
	if (refusal) {
		snprintf(why, why_bytes, "%.160s", refusal);
		return false;
	}
	buffer->id = p.buffer_id;
	tp_net_gdr_show(memory, bytes, p.buffer_id, &buffer->shown);
	buffer->shown.beyond = !tp_net_gdr_fits(&buffer->shown, &p);
	forsake(nets, links_lock, buffer);
	if (tp_net_gdr_hold(nets, devs, ndevs, &buffer->shown) != ncclSuccess) {
		if (buffer->shown.beyond) snprintf(why, why_bytes, "its first or last page isn't its allocation's alone, and devices want whole pages: sizes that are multiples of the page size avoid that");
		else snprintf(why, why_bytes, "device %d can't register it (see above)", devs[buffer->shown.nheld]);
		return false;
	}
	pthread_mutex_lock(&nets->loans->lock);
	bool has_index = take_index(nets->loans, &buffer->index);
	if (has_index) atomic_fetch_add_explicit(&nets->loans->nbuffers, 1, memory_order_relaxed);
	pthread_mutex_unlock(&nets->loans->lock);
	if (!has_index) snprintf(why, why_bytes, "%d buffers are registered already", TP_LINK_LOANS);
	return has_index;
}

static ncclResult_t list(struct tp_net_links *nets, struct tp_net_buffer *buffer, bool *listed)
{
	ncclResult_t result = ncclSuccess;
	pthread_mutex_lock(&nets->loans->table_lock);
	tp_net_loans_lock(nets);
	*listed = buffer->listed = !buffer->refused && !buffer->freed;
	tp_net_loans_unlock(nets);
	if (*listed) result = write_entry(nets, buffer->index, buffer->begin, buffer->end);
	pthread_mutex_unlock(&nets->loans->table_lock);
	return result;
}

ncclResult_t tp_net_loans_register(struct tp_net_links *nets, pthread_mutex_t *links_lock, void *memory, size_t bytes, struct tp_net_buffer **out)
{
	char why[200];
	struct tp_net_buffer *buffer = tp_alloc(1, sizeof(*buffer), "a registered buffer");
	*out = NULL;
	if (!buffer) return ncclSystemError;
	*buffer = (struct tp_net_buffer){ .begin = (uintptr_t)memory, .end = (uintptr_t)memory + bytes };
	tp_net_gdr_show(memory, bytes, 0, &buffer->shown);
	if (!may_be_lent(nets, links_lock, buffer, why, sizeof(why))) {
		tp_net_buffer_free(nets, buffer);
		TP_INFO(TP_NET | TP_REG, "rank %d: what is sent over the network from the %zu bytes registered at %p is copied into slots first: %s", nets->boot->rank, bytes, memory, why);
		return ncclSuccess;
	}
	pthread_mutex_lock(links_lock);
	tp_net_buffer_add(nets, buffer);
	pthread_mutex_unlock(links_lock);
	*out = buffer;
	bool listed;
	ncclResult_t result = list(nets, buffer, &listed);
	if (result == ncclSuccess && !listed) return ncclSuccess;       /* a connection refused it, which was told */
	if (result != ncclSuccess) {
		*out = NULL;
		tp_net_loans_deregister(nets, links_lock, buffer);
		return result;
	}
	TP_INFO(TP_NET | TP_REG, "rank %d: what is sent over the network from the %zu bytes registered at %p is sent from where it lies, in large chunks, as the plan allows", nets->boot->rank,
		bytes, memory);
	return ncclSuccess;
}

void tp_net_loans_deregister(struct tp_net_links *nets, pthread_mutex_t *links_lock, struct tp_net_buffer *buffer)
{
	/* Kernels first. */
	pthread_mutex_lock(&nets->loans->table_lock);
	tp_net_loans_lock(nets);
	bool listed = buffer->listed;
	buffer->listed = false;
	tp_net_loans_unlock(nets);
	if (listed) strike(nets, buffer->index);
	pthread_mutex_unlock(&nets->loans->table_lock);
	pthread_mutex_lock(links_lock);
	tp_net_loans_lock(nets);
	buffer->gone = true;
	tp_net_loans_unlock(nets);
	/* Before the caller looks whether kernels run; who ends last looks at it after that. */
	atomic_store_explicit(&nets->loans->any_gone, true, memory_order_seq_cst);
	pthread_mutex_unlock(links_lock);
}

static bool is_owed(const struct tp_net_links *nets, const struct tp_net_buffer *buffer)
{
	for (int i = 0; i < nets->nends; i++)
		if (nets->ends[i]->sending && nets->ends[i]->state <= TP_NET_READY && tp_net_link_owes(nets->ends[i], buffer->begin, buffer->end)) return true;
	return false;
}

/* Out of the list, what is gone and has nothing on its way: chained by next. over: nothing is sent any more. */
static struct tp_net_buffer *take_gone(struct tp_net_links *nets, bool over)
{
	struct tp_net_buffer *taken = NULL;
	bool stays = false;
	for (struct tp_net_buffer *b = nets->buffers, *next; b; b = next) {
		next = b->next;
		if (!b->gone) continue;
		bool owed = !over && is_owed(nets, b);
		if (!owed) tp_net_buffer_drop_idle(b);
		stays |= owed || b->grants;
		if (owed || b->grants) continue;
		tp_net_buffer_unlist(nets, b);
		b->next = taken;
		taken = b;
	}
	atomic_store_explicit(&nets->loans->any_gone, stays, memory_order_relaxed);
	return taken;
}

static void give_back(struct tp_net_links *nets, struct tp_net_buffer *taken)
{
	for (struct tp_net_buffer *next; taken; taken = next) {
		next = taken->next;
		tp_net_buffer_free(nets, taken);
	}
}

void tp_net_loans_settle(struct tp_net_links *nets, pthread_mutex_t *links_lock, bool (*lends)(void *arg), void *arg)
{
	struct tp_net_buffer *taken = NULL;
	if (!nets->loans || !atomic_load_explicit(&nets->loans->any_gone, memory_order_seq_cst)) return;
	pthread_mutex_lock(links_lock);
	/* With the lock: of what is gone by now, and not of what will be. */
	if (!lends(arg)) taken = take_gone(nets, false);
	pthread_mutex_unlock(links_lock);
	give_back(nets, taken);
}

void tp_net_loans_retire(struct tp_net_links *nets, pthread_mutex_t *links_lock)
{
	if (!nets->loans) return;
	pthread_mutex_lock(links_lock);
	tp_net_loans_lock(nets);
	for (struct tp_net_buffer *b = nets->buffers; b; b = b->next) b->gone = true;
	tp_net_loans_unlock(nets);
	struct tp_net_buffer *taken = take_gone(nets, true);
	pthread_mutex_unlock(links_lock);
	give_back(nets, taken);
}

/* ---- lending */

bool tp_net_loans_find(struct tp_net_links *nets, const void *memory, size_t bytes, struct tp_link_loan *range, uint32_t *index)
{
	struct tp_net_loans *loans = nets->loans;
	uint64_t id = 0, now = 0;
	if (!loans || !bytes || !atomic_load_explicit(&loans->nbuffers, memory_order_relaxed)) return false;
	strike_refused(nets);
	pthread_mutex_lock(&loans->lock);
	const struct tp_net_buffer *b = nets->buffers;
	while (b && (!b->listed || !tp_net_buffer_covers(b, memory, bytes))) b = b->next;
	bool found = b != NULL;
	if (found) {
		*range = (struct tp_link_loan){ b->begin, b->end };
		*index = b->index;
		id = b->id;
	}
	pthread_mutex_unlock(&loans->lock);
	/* It may have been freed, and the address may be somebody else's by now. */
	return found && tp_gpu_buffer_id(memory, &now) == ncclSuccess && now == id;
}

/* Where that fails the operation does, as where slots can't be registered. */
static ncclResult_t register_headers(struct tp_link_net *end)
{
	void *mhandle;
	if (end->headers_mhandle) return ncclSuccess;
	TP_TRY(end->nets->ops->reg_memory(end->comm, end->ring, end->ring_bytes, TP_NET_HOST, &mhandle));
	end->headers_mhandle = mhandle;
	return ncclSuccess;
}

ncclResult_t tp_net_loan_open(struct tp_link_net *end, struct tp_slot *header, struct tp_slot *slot)
{
	struct tp_net_links *nets = end->nets;
	struct tp_slot_lent *lent = (struct tp_slot_lent *)header->data;
	const void *memory = (const void *)(uintptr_t)lent->addr;
	struct tp_net_grant *grant = tp_net_grant_for(end, memory, header->bytes);
	if (grant) {
		TP_TRY(register_headers(end));
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

/* Numbers of QPs and SRQs. Finding one takes no lock: a reader pins the place, then looks whether something is there; whoever
 * takes it away empties the place, then waits for the pins. One of the two sees the other (both are sequentially consistent). */
#include <errno.h>
#include <sched.h>
#include <string.h>
#include "verbs/internal.h"

#define REST_MS 10000

static inline struct tp_index_slot *slots_of(struct tp_index *index)
{
	return atomic_load_explicit(&index->slots, memory_order_acquire);
}

static bool make_slots(struct tp_index *index)
{
	if (atomic_load_explicit(&index->slots, memory_order_relaxed))
		return true;
	struct tp_index_slot *slots = tp_alloc((size_t)index->mask + 1, sizeof(*slots), "a table of numbers");
	atomic_store_explicit(&index->slots, slots, memory_order_release);
	return slots != NULL;
}

/* From a random start on: the first free place that has rested, else the one that has rested longest. */
static int choose_place(struct tp_index *index, uint32_t first)
{
	uint32_t start;
	uint64_t now = tp_clock_ms();
	int oldest = -1;
	struct tp_index_slot *slots = slots_of(index);
	tp_secret_random(&start, sizeof(start));
	for (uint32_t i = 0; i <= index->mask; i++) {
		uint32_t place = (start + i) & index->mask;
		struct tp_index_slot *slot = &slots[place];
		if (place < first || atomic_load_explicit(&slot->thing, memory_order_relaxed))
			continue;
		if (slot->free_from_ms <= now)
			return (int)place;
		if (oldest < 0 || slot->free_from_ms < slots[oldest].free_from_ms)
			oldest = (int)place;
	}
	return oldest;
}

int tp_index_add(struct tp_index *index, uint32_t first, void *thing, uint32_t base, uint32_t *number)
{
	int place = -1;
	pthread_mutex_lock(&index->lock);
	if (make_slots(index))
		place = choose_place(index, first);
	if (place >= 0) {
		*number = base + (uint32_t)place;
		atomic_store_explicit(&slots_of(index)[place].thing, thing, memory_order_seq_cst);
		index->count++;
	}
	pthread_mutex_unlock(&index->lock);
	return place < 0 ? ENOMEM : 0;
}

void *tp_index_get(struct tp_index *index, uint32_t place)
{
	struct tp_index_slot *slots = slots_of(index);
	if (place > index->mask || !slots)
		return NULL;
	struct tp_index_slot *slot = &slots[place];
	atomic_fetch_add_explicit(&slot->users, 1, memory_order_seq_cst);
	void *thing = atomic_load_explicit(&slot->thing, memory_order_seq_cst);
	if (!thing)
		atomic_fetch_sub_explicit(&slot->users, 1, memory_order_release);
	return thing;
}

void tp_index_put(struct tp_index *index, uint32_t place)
{
	/* Release: pairs with the load in tp_index_remove, so that all a reader did is over when the thing is freed. */
	atomic_fetch_sub_explicit(&slots_of(index)[place].users, 1, memory_order_release);
}

void tp_index_remove(struct tp_index *index, uint32_t place)
{
	struct tp_index_slot *slot = &slots_of(index)[place];
	atomic_store_explicit(&slot->thing, NULL, memory_order_seq_cst);
	while (atomic_load_explicit(&slot->users, memory_order_seq_cst))
		sched_yield();
	pthread_mutex_lock(&index->lock);
	slot->free_from_ms = tp_clock_ms() + REST_MS;
	index->count--;
	pthread_mutex_unlock(&index->lock);
}

void tp_index_forget(struct tp_index *index)
{
	pthread_mutex_init(&index->lock, NULL);
	atomic_store_explicit(&index->slots, NULL, memory_order_relaxed);
	index->count = 0;
}

/* The end of a registration, at its owner: no longer found, no longer offered; then, once all is done that was launched before, peers are told;
 * once all of them have let go of it its index is used again. Nothing here waits for kernels: what they keep is looked at again by the service
 * thread. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "mem/internal.h"

#define ANSWER_MS 200u          /* for a peer whose service thread is held up elsewhere; who is gone answers at once */

/* The lock is held: until all have answered. range: compared only, if it may be gone. */
static void wait_answers(struct tp_mem *mem, uint32_t index, const struct tp_mem_range *range, uint32_t generation, uint64_t most_ms)
{
	struct timespec until;
	clock_gettime(CLOCK_MONOTONIC, &until);
	until.tv_sec += (time_t)(most_ms / 1000);
	until.tv_nsec += (long)(most_ms % 1000) * 1000000;
	until.tv_sec += until.tv_nsec / 1000000000;
	until.tv_nsec %= 1000000000;
	while (mem->by_index[index] == range && mem->generations[index] == generation && range->answers != mem->everybody)
		if (pthread_cond_timedwait(&mem->answered, &mem->lock, &until)) break;
}

uint64_t tp_mem_await_peers(struct tp_mem *mem, const void *handle, uint64_t most_ms)
{
	const struct tp_mem_range *range = handle;
	uint64_t start = tp_clock_ms();
	if (range->index == TP_MEM_BUFFERS) return 0;
	pthread_mutex_lock(&mem->lock);
	wait_answers(mem, range->index, range, range->generation, most_ms);
	pthread_mutex_unlock(&mem->lock);
	return tp_clock_ms() - start;
}

/* Peers are told. The range may be gone when this returns, unless it waits. */
static void retire(struct tp_mem *mem, struct tp_mem_range *range, bool waits)
{
	pthread_mutex_lock(&mem->lock);
	range->retiring = true;
	range->acks = range->answers = 0;
	struct tp_mem_range told = *range;
	pthread_mutex_unlock(&mem->lock);
	tp_mem_announce(mem, TP_MEM_RETIRE, &told, -1);
	if (!waits) return;
	pthread_mutex_lock(&mem->lock);
	wait_answers(mem, told.index, range, told.generation, ANSWER_MS);
	bool kept = mem->by_index[told.index] == range && mem->generations[told.index] == told.generation;
	uint64_t acks = kept ? range->acks : mem->everybody;
	pthread_mutex_unlock(&mem->lock);
	for (int l = 0; l < mem->boot->nlocal && kept; l++)
		if ((mem->everybody & ~acks) >> l & 1)
			TP_INFO(TP_REG, "rank %d: what was registered at %p is still mapped by rank %d, until its kernels are done", mem->boot->rank, (void *)told.begin,
				mem->boot->local_ranks[l]);
}

static ncclResult_t end(struct tp_mem *mem, void *handle, bool waits)
{
	struct tp_mem_range *range;
	pthread_mutex_lock(&mem->lock);
	for (range = mem->ranges; range && (range != handle || range->ended); range = range->next) { }
	if (!range) {
		pthread_mutex_unlock(&mem->lock);
		return TP_FAIL(ncclInvalidArgument, "ncclCommDeregister: %p is not a registration of this communicator (rank %d)", handle, mem->boot->rank);
	}
	if (range->record.bytes) tp_mem_sort_out(mem, range);
	if (range->index == TP_MEM_BUFFERS) {
		tp_mem_forget_range(mem, range);
		pthread_mutex_unlock(&mem->lock);
		return ncclSuccess;
	}
	range->ended = true;
	ncclResult_t result = tp_mem_write_own(mem, range->index, 0);
	pthread_mutex_unlock(&mem->lock);
	/* Kernels that begin from now on don't offer it: those that may have are the ones that were launched. */
	void *mark = mem->kernels.mark ? mem->kernels.mark(mem->kernels.rank) : NULL;
	if (!mark) {
		retire(mem, range, waits && range->plain);
		return result;
	}
	pthread_mutex_lock(&mem->lock);
	range->mark = mark;
	pthread_mutex_unlock(&mem->lock);
	tp_mem_poll_soon(mem);
	return result;
}

ncclResult_t tp_mem_deregister(struct tp_mem *mem, void *handle) { return end(mem, handle, true); }
ncclResult_t tp_mem_drop(struct tp_mem *mem, void *handle) { return end(mem, handle, false); }

bool tp_mem_retire_passed(struct tp_mem *mem)
{
	struct tp_mem_range *passed[16];
	int npassed = 0;
	bool left = false;
	pthread_mutex_lock(&mem->lock);
	for (struct tp_mem_range *range = mem->ranges; range; range = range->next) {
		if (!range->mark) continue;
		if (npassed == (int)TP_ARRAY_LEN(passed) || !mem->kernels.passed(mem->kernels.rank, range->mark)) {
			left = true;
			continue;
		}
		mem->kernels.forget(mem->kernels.rank, range->mark);
		range->mark = NULL;
		passed[npassed++] = range;
	}
	pthread_mutex_unlock(&mem->lock);
	for (int i = 0; i < npassed; i++) retire(mem, passed[i], false);
	return left;
}

void tp_mem_retire_close(struct tp_mem *mem)
{
	for (struct tp_mem_range *range = mem->ranges; range; range = range->next) {
		if (range->mark) mem->kernels.forget(mem->kernels.rank, range->mark);
		range->mark = NULL;
	}
}

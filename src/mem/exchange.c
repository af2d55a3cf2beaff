/* Every rank of a host shows a piece of its memory to the others: all learn from an all-gather where it is, its descriptors are passed, and whoever
 * wants it maps it. */
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "mem/internal.h"

/* What a rank tells all others. */
struct card {
	struct tp_gpu_export export;
	struct tp_gpu_memory memory;        /* for ranks of its process; to others its pointers mean nothing */
	struct tp_mem_hand hand;
	uint32_t shows, pad;
};

/* ---- memory that others of this process use at its owner's address outlives the owner until they are done. */

struct shown { struct shown *next; void *ptr; struct tp_gpu_memory memory; int users; };
static pthread_mutex_t shown_lock = PTHREAD_MUTEX_INITIALIZER;
static struct shown *all_shown;

static struct shown **find_shown(void *ptr)
{
	struct shown **at = &all_shown;
	while (*at && (*at)->ptr != ptr) at = &(*at)->next;
	return at;
}

static ncclResult_t borrow(void *ptr)
{
	pthread_mutex_lock(&shown_lock);
	struct shown *s = *find_shown(ptr);
	if (!s && (s = tp_alloc(1, sizeof(*s), "memory that ranks of a process share"))) {
		*s = (struct shown){ .next = all_shown, .ptr = ptr };
		all_shown = s;
	}
	if (s) s->users++;
	pthread_mutex_unlock(&shown_lock);
	return s ? ncclSuccess : ncclSystemError;
}

static void give_back(void *ptr)
{
	struct tp_gpu_memory last = { 0 };
	pthread_mutex_lock(&shown_lock);
	struct shown **at = find_shown(ptr), *s = *at;
	if (s && --s->users == 0) {
		last = s->memory;
		*at = s->next;
		free(s);
	}
	pthread_mutex_unlock(&shown_lock);
	tp_gpu_free(&last);
}

void tp_mem_free_shown(struct tp_gpu_memory *memory)
{
	if (!memory->ptr) return;
	pthread_mutex_lock(&shown_lock);
	struct shown *s = *find_shown(memory->ptr);
	if (s) s->memory = *memory;
	pthread_mutex_unlock(&shown_lock);
	if (s) memset(memory, 0, sizeof(*memory));
	else tp_gpu_free(memory);
}

/* Its error is already in the log; here it becomes the reason why a pair goes another way. */
static void map_peer(const struct tp_boot *boot, const struct tp_gpu *gpu, const struct card *card, int rank, int fd, struct tp_mem_map *map)
{
	ncclResult_t result;
	if (tp_mem_same_process(boot, rank)) {
		const struct tp_gpu_memory *memory = &card->memory;
		/* On one GPU the owner's own address: a second one for the same memory is a second proxy, which the GPU's fences don't order. */
		result = memory->gpu == gpu ? ncclSuccess : tp_gpu_map_again(gpu, memory, &map->imported);
		if (result == ncclSuccess && !map->imported.ptr) result = borrow(memory->ptr);
		if (result == ncclSuccess) map->ptr = map->imported.ptr ? map->imported.ptr : memory->ptr;
	} else {
		result = tp_gpu_import(gpu, &card->export, fd, &map->imported);
		if (result == ncclSuccess) map->ptr = map->imported.ptr;
	}
	if (result != ncclSuccess) snprintf(map->why, sizeof(map->why), "%.95s", tp_log_last_error());
}

static ncclResult_t show(struct tp_boot *boot, const struct tp_gpu_memory *own, struct card *card, int *listener, int *fd)
{
	if (own) {
		/* Where nothing can be exported it is still for ranks of this process. */
		if (own->gpu->vmm || own->gpu->ipc) TP_TRY(tp_gpu_export(own, &card->export, fd));
		card->shows = 1;
		card->hand.has_fd = *fd >= 0;
		card->memory = *own;
	}
	return tp_mem_listen(boot, listener, &card->hand.name);
}

static ncclResult_t pass_and_map(struct tp_boot *boot, const struct tp_gpu *gpu, const struct tp_gpu_memory *own, const struct card *cards,
	const bool *wanted, int listener, int own_fd, struct tp_mem_map *maps)
{
	struct tp_mem_hand hands[TP_MEM_LOCAL_MAX];
	int fds[TP_MEM_LOCAL_MAX];
	for (int l = 0; l < boot->nlocal; l++) hands[l] = cards[boot->local_ranks[l]].hand;
	ncclResult_t result = tp_mem_pass(boot, listener, hands, wanted, own_fd, fds);
	for (int l = 0; l < boot->nlocal; l++) {
		int rank = boot->local_ranks[l];
		if (rank == boot->rank) maps[l] = (struct tp_mem_map){ .ptr = own ? own->ptr : NULL, .own = true };
		else if (result == ncclSuccess && wanted[l] && cards[rank].shows) map_peer(boot, gpu, &cards[rank], rank, fds[l], &maps[l]);
		if (fds[l] >= 0) close(fds[l]);
	}
	return result;
}

ncclResult_t tp_mem_exchange(struct tp_boot *boot, const struct tp_gpu *gpu, const struct tp_gpu_memory *own, const bool *wanted,
	struct tp_mem_map *maps)
{
	int listener = -1, own_fd = -1;
	if (boot->nlocal > TP_MEM_LOCAL_MAX)
		return TP_FAIL(ncclInvalidUsage, "host %s has more than %d ranks with GPUs", tp_host_name(), TP_MEM_LOCAL_MAX);
	struct card *cards = tp_alloc((size_t)boot->nranks, sizeof(*cards), "the ranks' GPU memory");
	ncclResult_t result = cards ? show(boot, own, &cards[boot->rank], &listener, &own_fd) : ncclSystemError;
	if (result == ncclSuccess) result = tp_boot_all_gather(boot, cards, sizeof(*cards));
	if (result == ncclSuccess) result = pass_and_map(boot, gpu, own, cards, wanted, listener, own_fd, maps);
	/* Whoever leaves may free what others of its process still map by address, and close a listener that they push to. */
	if (result == ncclSuccess) result = tp_boot_barrier(boot);
	if (result != ncclSuccess) tp_mem_unmap(maps, boot->nlocal);
	if (listener >= 0) close(listener);
	if (own_fd >= 0) close(own_fd);
	free(cards);
	return result;
}

void tp_mem_unmap(struct tp_mem_map *maps, int nlocal)
{
	for (int l = 0; maps && l < nlocal; l++) {
		if (maps[l].ptr && !maps[l].imported.ptr && !maps[l].own) give_back(maps[l].ptr);
		tp_gpu_free(&maps[l].imported);
		memset(&maps[l], 0, sizeof(maps[l]));
	}
}

/* Windows: buffers that all ranks register together. When the call returns every rank of a host has the others' mapped, or all know that
 * they haven't. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "mem/internal.h"

/* A window and what only this file sees of it. */
struct tp_mem_view {
	struct tp_mem_window window;
	struct tp_mem_view *next;
	uint64_t buffer_id;
	uint32_t slot;                      /* of the words for kernels */
	struct tp_mem_import *imports[TP_MEM_LOCAL_MAX];
	uint64_t addresses[TP_MEM_LOCAL_MAX];
};

/* What a rank tells all others. */
struct card {
	struct tp_mem_record record;
	struct tp_mem_hand hand;
	uint64_t bytes;
	int32_t flags, mapped, full, pad;
	char why[112];                      /* it can't be shared; "": it can */
};

static ncclResult_t check_cards(const struct tp_boot *boot, const struct card *cards)
{
	for (int r = 0; r < boot->nranks; r++) {
		if (cards[r].why[0])
			return TP_FAIL(ncclInvalidArgument, "ncclCommWindowRegister: the buffer of rank %d (%s) can't be shared: %.100s; memory of ncclMemAlloc can",
				r, boot->peers[r].host_name, cards[r].why);
		if (cards[r].full)
			return TP_FAIL(ncclInvalidUsage, "ncclCommWindowRegister: rank %d (%s) has %d windows of this communicator, which is all there may be", r,
				boot->peers[r].host_name, TP_MEM_WINDOWS);
		if (cards[r].bytes != cards[0].bytes || cards[r].flags != cards[0].flags)
			return TP_FAIL(ncclInvalidArgument, "ncclCommWindowRegister: rank 0 says %llu bytes and flags 0x%x, rank %d (%s) %llu and 0x%x: they must be "
				"equal", (unsigned long long)cards[0].bytes, (unsigned)cards[0].flags, r, boot->peers[r].host_name,
				(unsigned long long)cards[r].bytes, (unsigned)cards[r].flags);
	}
	return ncclSuccess;
}

/* A slot that is free; the lock is held. */
static bool take_slot(struct tp_mem *mem, uint32_t *slot)
{
	for (uint32_t s = 0; s < TP_MEM_WINDOWS; s++) {
		if (mem->windows_used[s / 64] >> s % 64 & 1) continue;
		mem->windows_used[s / 64] |= 1ull << s % 64;
		*slot = s;
		return true;
	}
	return false;
}

static void give_slot(struct tp_mem *mem, uint32_t slot)
{
	pthread_mutex_lock(&mem->lock);
	mem->windows_used[slot / 64] &= ~(1ull << slot % 64);
	pthread_mutex_unlock(&mem->lock);
}

static void drop_imports(struct tp_mem *mem, struct tp_mem_view *view)
{
	for (int l = 0; l < mem->boot->nlocal && l < TP_MEM_LOCAL_MAX; l++) {
		tp_mem_import_drop(view->imports[l]);
		view->imports[l] = NULL;
	}
}

/* Maps what the others of the host show; true: all. */
static bool map_all(struct tp_mem *mem, const struct card *cards, const int *fds, struct tp_mem_view *view)
{
	const struct tp_boot *boot = mem->boot;
	bool all = true;
	for (int l = 0; l < boot->nlocal; l++) {
		const struct tp_mem_record *record = &cards[boot->local_ranks[l]].record;
		if (l == boot->local) view->addresses[l] = (uintptr_t)view->window.base;
		else if (mem->useful) all &= tp_mem_import_take(mem->gpu, mem->process, record, fds[l], &view->addresses[l], &view->imports[l]) == ncclSuccess;
		else all = false;
	}
	return all;
}

static ncclResult_t agree_mapped(struct tp_mem *mem, struct card *cards, struct tp_mem_view *view, bool mapped)
{
	const struct tp_boot *boot = mem->boot;
	cards[boot->rank].mapped = mapped;
	TP_TRY(tp_boot_all_gather(mem->boot, cards, sizeof(*cards)));
	view->window.mapped = true;
	for (int r = 0; r < boot->nranks; r++) view->window.mapped &= cards[r].mapped != 0;
	if (view->window.mapped) return ncclSuccess;
	TP_INFO(TP_REG, "rank %d: window %u isn't mapped by all ranks: it is used like other memory", boot->rank, view->window.id);
	drop_imports(mem, view);
	memset(view->addresses, 0, sizeof(view->addresses));
	return ncclSuccess;
}

static ncclResult_t meet(struct tp_mem *mem, struct card *cards, int listener, int fd, struct tp_mem_view *view)
{
	struct tp_boot *boot = mem->boot;
	struct tp_mem_hand hands[TP_MEM_LOCAL_MAX];
	bool wanted[TP_MEM_LOCAL_MAX];
	int fds[TP_MEM_LOCAL_MAX];
	size_t first = (size_t)boot->nlocal * (TP_MEM_BUFFERS + view->slot);
	TP_TRY(tp_boot_all_gather(boot, cards, sizeof(*cards)));
	TP_TRY(check_cards(boot, cards));
	for (int l = 0; l < boot->nlocal; l++) {
		hands[l] = cards[boot->local_ranks[l]].hand;
		wanted[l] = mem->useful;
	}
	ncclResult_t result = tp_mem_pass(boot, listener, hands, wanted, fd, fds);
	bool mapped = result == ncclSuccess && map_all(mem, cards, fds, view);
	for (int l = 0; l < boot->nlocal; l++)
		if (fds[l] >= 0) close(fds[l]);
	if (result == ncclSuccess) result = agree_mapped(mem, cards, view, mapped);
	return result == ncclSuccess ? tp_mem_write_words(mem, first, view->addresses, (size_t)boot->nlocal) : result;
}

static ncclResult_t create(struct tp_mem *mem, void *ptr, size_t bytes, int flags, struct tp_mem_view *view)
{
	struct tp_boot *boot = mem->boot;
	int listener = -1, fd = -1;
	struct card *cards = tp_alloc((size_t)boot->nranks, sizeof(*cards), "the ranks' windows"), *own;
	if (!cards) return ncclSystemError;
	own = &cards[boot->rank];
	pthread_mutex_lock(&mem->lock);
	own->full = !take_slot(mem, &view->slot);
	view->window = (struct tp_mem_window){ .id = mem->next_window++, .flags = flags, .base = ptr, .bytes = bytes };
	pthread_mutex_unlock(&mem->lock);
	own->bytes = bytes;
	own->flags = flags;
	/* What fails here is told to all, who would wait otherwise. */
	if (mem->useful && tp_mem_describe(mem->gpu, mem->process, ptr, bytes, &own->record, &fd, own->why, sizeof(own->why)) &&
		tp_mem_listen(boot, &listener, &own->hand.name) != ncclSuccess)
		snprintf(own->why, sizeof(own->why), "no socket to show it by (see its log)");
	own->hand.has_fd = fd >= 0;
	view->buffer_id = own->record.buffer_id;
	ncclResult_t result = meet(mem, cards, listener, fd, view);
	if (result != ncclSuccess) {
		drop_imports(mem, view);
		if (!own->full) give_slot(mem, view->slot);
	}
	if (listener >= 0) close(listener);
	if (fd >= 0) close(fd);
	free(cards);
	return result;
}

ncclResult_t tp_mem_window_create(struct tp_mem *mem, void *ptr, size_t bytes, int flags, struct tp_mem_window **out)
{
	struct tp_mem_view *view = tp_alloc(1, sizeof(*view), "a window");
	if (!view) return ncclSystemError;
	ncclResult_t result = create(mem, ptr, bytes, flags, view);
	if (result != ncclSuccess) {
		free(view);
		return result;
	}
	view->window.peers = view->addresses;
	view->window.device_peers = (const uint64_t *)mem->memory.ptr + (size_t)mem->boot->nlocal * (TP_MEM_BUFFERS + view->slot);
	pthread_mutex_lock(&mem->lock);
	view->next = mem->windows;
	mem->windows = view;
	pthread_mutex_unlock(&mem->lock);
	TP_INFO(TP_REG, "rank %d: window %u of %zu bytes at %p%s", mem->boot->rank, view->window.id, bytes, ptr, view->window.mapped ? "" : ", not mapped");
	*out = &view->window;
	return ncclSuccess;
}

ncclResult_t tp_mem_window_destroy(struct tp_mem *mem, struct tp_mem_window *window)
{
	pthread_mutex_lock(&mem->lock);
	struct tp_mem_view *view = mem->windows, *before = NULL;
	while (view && &view->window != window) {
		before = view;
		view = view->next;
	}
	if (view && before) before->next = view->next;
	else if (view) mem->windows = view->next;
	pthread_mutex_unlock(&mem->lock);
	if (!view) return TP_FAIL(ncclInvalidArgument, "ncclCommWindowDeregister: %p is no window of this communicator", (void *)window);
	drop_imports(mem, view);
	give_slot(mem, view->slot);
	free(view);
	return ncclSuccess;
}

const struct tp_mem_window *tp_mem_window_find(struct tp_mem *mem, const void *ptr, size_t bytes, uint64_t *offset)
{
	const struct tp_mem_view *found = NULL;
	uint64_t id = 0, now = 0, at = 0;
	uintptr_t begin = (uintptr_t)ptr;
	if (!atomic_load_explicit(&mem->windows, memory_order_relaxed)) return NULL;
	pthread_mutex_lock(&mem->lock);
	for (const struct tp_mem_view *v = mem->windows; v && !found; v = v->next) {
		uintptr_t base = (uintptr_t)v->window.base;
		if (!v->window.mapped || begin < base || begin + bytes > base + v->window.bytes) continue;
		found = v;
		id = v->buffer_id;
		at = begin - base;
	}
	pthread_mutex_unlock(&mem->lock);
	if (!found || tp_gpu_buffer_id(ptr, &now) != ncclSuccess || now != id) return NULL;
	*offset = at;
	return &found->window;
}

void tp_mem_windows_close(struct tp_mem *mem)
{
	while (mem->windows) {
		struct tp_mem_view *view = mem->windows;
		mem->windows = view->next;
		drop_imports(mem, view);
		free(view);
	}
}

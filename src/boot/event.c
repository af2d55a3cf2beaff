/* The events board of a host, and what the waits of this folder look at. */
#include "boot/internal.h"
#include <stdio.h>
#include <string.h>

static void ring_everybody(struct tp_segment *seg)
{
	struct tp_bell *bells = tp_segment_bells(seg);
	for (int i = 0; i < seg->nlocal; i++) {
		/* Unconditionally: an event is rare, and a sleeper must not miss it. */
		atomic_fetch_add_explicit(&bells[i].word, 1, memory_order_release);
		tp_futex_wake(&bells[i].word, INT_MAX);
	}
	tp_futex_wake(&seg->generation, INT_MAX);
	tp_futex_wake(&seg->full, INT_MAX);
}

bool tp_event_set(struct tp_segment *seg, const struct tp_event *event)
{
	uint32_t none = 0;
	if (atomic_load_explicit(&seg->event_first, memory_order_acquire)) return false;
	uint32_t slot = atomic_fetch_add_explicit(&seg->event_next, 1, memory_order_relaxed);
	if (slot >= TP_SEGMENT_EVENTS) return false;
	seg->events[slot] = *event;
	seg->events[slot].text[sizeof(event->text) - 1] = 0;
	/* Release: pairs with the acquire in tp_event_get. */
	if (!atomic_compare_exchange_strong_explicit(&seg->event_first, &none, slot + 1, memory_order_acq_rel, memory_order_acquire))
		return false;
	atomic_fetch_add_explicit(&seg->alarm, 1, memory_order_release);
	ring_everybody(seg);
	return true;
}

bool tp_event_get(struct tp_segment *seg, struct tp_event *out)
{
	uint32_t first = atomic_load_explicit(&seg->event_first, memory_order_acquire);     /* pairs with tp_event_set */
	if (first == 0 || first > TP_SEGMENT_EVENTS) return false;
	*out = seg->events[first - 1];
	return true;
}

void tp_event_post(struct tp_site *site, const struct tp_event *event)
{
	if (site->seg && tp_event_set(site->seg, event) && site->seg->nhosts > 1) tp_mesh_flood(site, event);
}

ncclResult_t tp_event_check(const struct tp_boot *boot, const char *what)
{
	const struct tp_boot_inside *inside = (const struct tp_boot_inside *)boot;
	struct tp_event event;
	if (atomic_load_explicit(boot->abort, memory_order_relaxed))
		return TP_FAIL(ncclInternalError, "rank %d: %s was aborted", boot->rank, what);
	if (tp_event_get(inside->site->seg, &event))
		return TP_FAIL(event.result == ncclSuccess ? ncclRemoteError : event.result, "rank %d: %s ended: %s", boot->rank, what, event.text);
	return ncclSuccess;
}

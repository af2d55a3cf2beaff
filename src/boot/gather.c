/* What ranks do together: all-gather, barrier, and inside a host new shared memory. Inside a host the blocks of a gather lie in
 * the segment, in two areas used in turn: who writes an area knows that all have read what was in it two turns before, because
 * all have arrived one turn before. Between hosts the processes of the first ranks exchange blocks in ceil(log2(hosts)) rounds
 * (Bruck): in round k what is known of the last 2^k hosts goes to the host at distance 2^k. The service threads put what
 * arrives straight into the areas. */
#include "boot/internal.h"
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#define YIELDS 64
#define SPINS 200

/* Looks at word until it differs from old: for a moment by yielding, then asleep; `sleepers` tells who changes it to wake us. */
static ncclResult_t wait_change(struct tp_boot_inside *b, _Atomic uint32_t *word, uint32_t old, _Atomic uint32_t *sleepers, const char *what)
{
	bool crowded = b->boot.nlocal > 4 * tp_cpu_count();
	for (int i = 0; i < (b->boot.nlocal > tp_cpu_count() ? 0 : SPINS); i++) {
		if (atomic_load_explicit(word, memory_order_acquire) != old) return ncclSuccess;
		tp_clock_relax();
	}
	for (int i = 0; i < (crowded ? 1 : YIELDS); i++) {
		if (atomic_load_explicit(word, memory_order_acquire) != old) return ncclSuccess;
		sched_yield();
	}
	/* Many sleepers look less often: they are woken anyway. */
	uint64_t slice_us = TP_BOOT_SLICE_MS * 1000 + (uint64_t)b->boot.nlocal * 500;
	while (atomic_load_explicit(word, memory_order_acquire) == old) {
		TP_TRY(tp_event_check(&b->boot, what));
		atomic_fetch_add_explicit(sleepers, 1, memory_order_seq_cst);
		/* Sequentially consistent with move_word: either it sees the sleeper or this sees its change. */
		if (atomic_load_explicit(word, memory_order_seq_cst) == old) tp_futex_wait(word, old, slice_us);
		atomic_fetch_sub_explicit(sleepers, 1, memory_order_relaxed);
	}
	return ncclSuccess;
}

static void move_word(_Atomic uint32_t *word, _Atomic uint32_t *sleepers)
{
	atomic_fetch_add_explicit(word, 1, memory_order_seq_cst);
	if (atomic_load_explicit(sleepers, memory_order_seq_cst)) tp_futex_wake(word, INT_MAX);
}

/* ---- between hosts */

static size_t pack_hosts(struct tp_segment *seg, uint32_t turn, uint32_t bytes_each, int first_host, int nhosts, char *out)
{
	const int *first = tp_segment_host_first(seg), *ranks = tp_segment_host_ranks(seg);
	const char *area = tp_segment_gather(seg, turn);
	size_t at = 0;
	for (int k = 0; k < nhosts; k++) {
		int host = (first_host + k) % seg->nhosts;
		for (int i = first[host]; i < first[host + 1]; i++, at += bytes_each)
			if (out && bytes_each) memcpy(out + at, area + (size_t)ranks[i] * bytes_each, bytes_each);
	}
	return at;
}

const char *tp_gather_arrived(struct tp_site *site, int from_host, const void *data, size_t bytes)
{
	struct tp_segment *seg = site->seg;
	struct tp_wire_gather head;
	const int *first = tp_segment_host_first(seg), *ranks = tp_segment_host_ranks(seg);
	if (bytes < sizeof(head)) return "sent a gather that is too short";
	memcpy(&head, data, sizeof(head));
	uint32_t done = atomic_load_explicit(&site->gather_done, memory_order_acquire), turn = (uint32_t)head.seq;
	/* After a connection broke it may come again (see mesh.c). */
	if (turn + 1 == done || turn + 2 == done) return NULL;
	if (!site->leader || (turn != done && turn != done + 1)) return "sent a gather out of its turn";
	if (head.round > 30 || (1 << head.round) >= seg->nhosts || head.bytes_each > TP_BOOT_GATHER_MAX) return "sent a gather that can't be";
	int distance = 1 << head.round, count = TP_MIN(distance, seg->nhosts - distance);
	int from = (seg->host - distance + seg->nhosts) % seg->nhosts, start = (from - count + 1 + seg->nhosts) % seg->nhosts;
	if (from != from_host || head.nhosts != (uint32_t)count || head.first_host != (uint32_t)start) return "sent a gather of the wrong hosts";
	if (bytes != sizeof(head) + pack_hosts(seg, turn, head.bytes_each, start, count, NULL)) return "sent a gather of the wrong length";
	if (atomic_load_explicit(&site->rounds[turn & 1], memory_order_relaxed) & (1u << head.round)) return NULL;
	const char *in = (const char *)data + sizeof(head);
	char *area = tp_segment_gather(seg, turn);
	for (int k = 0; k < count && head.bytes_each; k++) {
		int host = (start + k) % seg->nhosts;
		for (int i = first[host]; i < first[host + 1]; i++, in += head.bytes_each)
			memcpy(area + (size_t)ranks[i] * head.bytes_each, in, head.bytes_each);
	}
	/* Release: pairs with the acquire in wait_round. */
	atomic_fetch_or_explicit(&site->rounds[turn & 1], 1u << head.round, memory_order_release);
	atomic_fetch_add_explicit(&site->rounds_word, 1, memory_order_release);
	tp_futex_wake(&site->rounds_word, 1);
	return NULL;
}

static ncclResult_t wait_round(struct tp_boot_inside *b, uint32_t turn, int round, const char *what)
{
	struct tp_site *site = b->site;
	for (;;) {
		uint32_t seen = atomic_load_explicit(&site->rounds_word, memory_order_acquire);
		if (atomic_load_explicit(&site->rounds[turn & 1], memory_order_acquire) & (1u << round)) return ncclSuccess;
		TP_TRY(tp_event_check(&b->boot, what));
		tp_futex_wait(&site->rounds_word, seen, TP_BOOT_SLICE_MS * 1000);
	}
}

/* Whoever has come through a gather may leave at once: so its own part must be on its way to everybody. */
static ncclResult_t wait_sent(struct tp_boot_inside *b, uint32_t turn, const char *what)
{
	struct tp_site *site = b->site;
	ncclResult_t result = ncclSuccess;
	tp_service_lock();
	/* All have begun this turn, so all have had the one before. */
	tp_mesh_forget_gathers(site, turn - 1);
	while (result == ncclSuccess && !tp_mesh_flushed(site)) {
		result = tp_event_check(&b->boot, what);
		if (result == ncclSuccess) tp_service_wait(&site->cond, tp_clock_ms() + TP_BOOT_SLICE_MS);
	}
	tp_service_unlock();
	return result;
}

static ncclResult_t exchange(struct tp_boot_inside *b, uint32_t turn, uint32_t bytes_each, const char *what)
{
	struct tp_site *site = b->site;
	struct tp_segment *seg = site->seg;
	char *buffer = tp_alloc(1, sizeof(struct tp_wire_gather) + (size_t)seg->nranks * bytes_each, "all-gather between hosts");
	ncclResult_t result = buffer ? ncclSuccess : ncclSystemError;
	for (int round = 0; result == ncclSuccess && (1 << round) < seg->nhosts; round++) {
		int distance = 1 << round, count = TP_MIN(distance, seg->nhosts - distance);
		int start = (seg->host - count + 1 + seg->nhosts) % seg->nhosts;
		struct tp_wire_gather head = { turn, (uint32_t)round, bytes_each, (uint32_t)start, (uint32_t)count };
		memcpy(buffer, &head, sizeof(head));
		size_t bytes = pack_hosts(seg, turn, bytes_each, start, count, buffer + sizeof(head));
		tp_service_lock();
		result = tp_mesh_gather(site, (seg->host + distance) % seg->nhosts, turn, buffer, sizeof(head) + bytes);
		tp_service_unlock();
		if (result == ncclSuccess) result = wait_round(b, turn, round, what);
	}
	free(buffer);
	if (result == ncclSuccess) result = wait_sent(b, turn, what);
	if (result != ncclSuccess) return result;
	/* Locked: a gather of this turn that is said again between the two would count as one of the turn after the next. */
	tp_service_lock();
	atomic_store_explicit(&site->rounds[turn & 1], 0, memory_order_relaxed);
	atomic_store_explicit(&site->gather_done, turn + 1, memory_order_release);
	tp_service_unlock();
	return ncclSuccess;
}

/* ---- inside a host */

static ncclResult_t wait_all(struct tp_boot_inside *b, uint32_t turn, uint32_t bytes_each, const char *what)
{
	struct tp_segment *seg = b->site->seg;
	bool across = seg->nhosts > 1, leader = b->boot.local == 0;
	uint32_t generation = atomic_load_explicit(&seg->generation, memory_order_acquire);
	uint32_t full = atomic_load_explicit(&seg->full, memory_order_acquire);
	/* Acquire and release: the last one has seen all blocks, and who sees its move has too. */
	bool last = atomic_fetch_add_explicit(&seg->arrived, 1, memory_order_acq_rel) + 1 == (uint32_t)seg->nlocal;
	if (last && across && !leader) move_word(&seg->full, &seg->full_sleepers);
	if (leader && across) {
		if (!last) TP_TRY(wait_change(b, &seg->full, full, &seg->full_sleepers, what));
		TP_TRY(exchange(b, turn, bytes_each, what));
	}
	if (across ? leader : last) {
		atomic_store_explicit(&seg->arrived, 0, memory_order_relaxed);
		move_word(&seg->generation, &seg->sleepers);
		return ncclSuccess;
	}
	return wait_change(b, &seg->generation, generation, &seg->sleepers, what);
}

static ncclResult_t meet(struct tp_boot_inside *b, uint32_t turn, uint32_t bytes_each, const char *what)
{
	struct tp_segment_rank *ranks = tp_segment_ranks(b->site->seg);
	atomic_store_explicit(&ranks[b->boot.local].gather_bytes[turn & 1], bytes_each, memory_order_relaxed);
	TP_TRY(wait_all(b, turn, bytes_each, what));
	uint32_t first = atomic_load_explicit(&ranks[0].gather_bytes[turn & 1], memory_order_relaxed);
	if (first == bytes_each) return ncclSuccess;
	return TP_FAIL(ncclInternalError, "rank %d: %s number %u of %u bytes a rank, where rank %d has %u", b->boot.rank, what, turn, bytes_each,
		b->boot.local_ranks[0], first);
}

static ncclResult_t check_usable(struct tp_boot_inside *b, const char *what)
{
	if (b->generation != tp_service.generation)
		return TP_FAIL(ncclInvalidUsage, "rank %d: %s in a forked child: the communicator belongs to the parent process", b->boot.rank, what);
	return tp_event_check(&b->boot, what);
}

ncclResult_t tp_boot_all_gather(struct tp_boot *boot, void *all, size_t bytes_each)
{
	struct tp_boot_inside *b = (struct tp_boot_inside *)boot;
	struct tp_segment *seg = b->site->seg;
	size_t own = (size_t)boot->rank * bytes_each;
	if (bytes_each > TP_BOOT_GATHER_MAX)
		return TP_FAIL(ncclInternalError, "rank %d: an all-gather of %zu bytes a rank, %d are possible", boot->rank, bytes_each, TP_BOOT_GATHER_MAX);
	TP_TRY(check_usable(b, "all-gather"));
	uint32_t turn = b->gathers++;
	char *area = tp_segment_gather(seg, turn);
	if (bytes_each) memcpy(area + own, (const char *)all + own, bytes_each);
	TP_TRY(meet(b, turn, (uint32_t)bytes_each, "all-gather"));
	if (bytes_each) memcpy(all, area, (size_t)boot->nranks * bytes_each);
	return ncclSuccess;
}

ncclResult_t tp_boot_barrier(struct tp_boot *boot)
{
	struct tp_boot_inside *b = (struct tp_boot_inside *)boot;
	TP_TRY(check_usable(b, "barrier"));
	return meet(b, b->gathers++, 0, "barrier");
}

ncclResult_t tp_boot_share(struct tp_boot *boot, size_t bytes, const char *what, void **base)
{
	struct tp_boot_inside *b = (struct tp_boot_inside *)boot;
	TP_TRY(check_usable(b, "share"));
	return tp_site_share(b->site, ++b->shares, bytes, what, boot->local == 0, NULL, boot->abort, 0, base);
}

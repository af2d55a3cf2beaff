/* A set of runnables: running them in turn, and the wait of a thread that has nothing else to do.
 *
 * Network descriptors and bells can't be slept on together: while there are descriptors the thread polls them, for a
 * sixteenth of what it has waited so far and 5 ms at most, so that a bell is answered late by that much at the worst. */
#include <errno.h>
#include <poll.h>

#include "engine/internal.h"

enum { MAX_WORDS = 128, MAX_FDS = 256 };
#define POLL_MIN_NS 50000u
#define POLL_MAX_NS 5000000u

/* Not tp_engine_unlock: a ring after every look would keep the sleepers of this very bell awake. Pairs with the acquire in
 * tp_engine_try_lock. */
static void unlock(struct tp_runnable *runnable) { atomic_store_explicit(&runnable->lock, 0, memory_order_release); }

bool tp_round_run(struct tp_round *round, bool *idle)
{
	bool moved = false;
	for (int i = 0; i < round->count; i++) {
		struct tp_runnable *r = round->set[i];
		if (idle) idle[i] = false;
		if (!tp_engine_try_lock(r)) continue;
		enum tp_run run = r->run(r);
		unlock(r);
		if (idle) idle[i] = run == TP_RUN_IDLE;
		if (run != TP_RUN_MOVED) continue;
		moved = true;
		if (r->bell) tp_bell_ring(r->bell);
	}
	if (moved) {
		tp_wait_begin(&round->wait, false);
		round->moved_ms = round->stalled_ms = 0;
	}
	return moved;
}

static void call_stalled(struct tp_round *round)
{
	uint64_t now = tp_clock_ms();
	if (!round->moved_ms) round->moved_ms = round->stalled_ms = now;
	if (now - round->stalled_ms < STALL_MS) return;
	round->stalled_ms = now;
	for (int i = 0; i < round->count; i++) {
		struct tp_runnable *r = round->set[i];
		if (!r->stalled || !tp_engine_try_lock(r)) continue;
		r->stalled(r, now - round->moved_ms);
		unlock(r);
	}
}

static int gather_fds(struct tp_round *round, struct pollfd *out)
{
	int fds[MAX_FDS], n = 0;
	uint32_t events[MAX_FDS];
	for (int i = 0; i < round->count && n < MAX_FDS; i++) {
		struct tp_runnable *r = round->set[i];
		if (!r->poll_fds || !tp_engine_try_lock(r)) continue;
		int more = r->poll_fds(r, fds, events, MAX_FDS - n);
		unlock(r);
		for (int k = 0; k < more; k++) out[n++] = (struct pollfd){ .fd = fds[k], .events = (short)events[k] };
	}
	return n;
}

static bool is_patient(const struct tp_round *round)
{
	return round->count == 1 && atomic_load_explicit(&round->set[0]->patient, memory_order_relaxed);
}

static void sleep_on_fds(struct tp_round *round, struct pollfd *fds, int nfds)
{
	uint64_t share = tp_wait_lasted_ns(&round->wait) / 16, ns = is_patient(round) ? POLL_MAX_NS : TP_MIN(TP_MAX(share, POLL_MIN_NS), POLL_MAX_NS);
	struct timespec limit = { 0, (long)ns };
	ppoll(fds, (nfds_t)nfds, &limit, NULL);
}

static void sleep_on_words(struct tp_round *round, const uint32_t *armed, _Atomic uint32_t *extra, uint32_t extra_seen)
{
	_Atomic uint32_t *words[MAX_WORDS];
	uint32_t seen[MAX_WORDS];
	int n = 0;
	uint64_t limit_us = SLEEP_US;
	if (extra) words[n] = extra, seen[n++] = extra_seen;
	for (int i = 0; i < round->count; i++) {
		if (!round->set[i]->bell) continue;
		if (n == MAX_WORDS || i >= MAX_WORDS) {
			limit_us = BLIND_SLEEP_US;
			break;
		}
		words[n] = &round->set[i]->bell->word;
		seen[n++] = armed[i];
	}
	if (!tp_engine_barrier_works()) limit_us = BLIND_SLEEP_US;
	if (n == 1) tp_futex_wait(words[0], seen[0], limit_us);
	else if (n > 1) tp_futex_wait_any(words, seen, n, limit_us);
	else tp_engine_nap(BLIND_SLEEP_US);
}

/* Without the kernel's barrier for each: one for all. */
static void arm(struct tp_round *round, uint32_t *armed)
{
	for (int i = 0; i < round->count; i++) {
		struct tp_bell *bell = round->set[i]->bell;
		if (!bell) continue;
		atomic_fetch_add_explicit(&bell->sleeping, 1, memory_order_seq_cst);
		if (i < MAX_WORDS) armed[i] = atomic_load_explicit(&bell->word, memory_order_acquire);  /* pairs with tp_bell_ring */
	}
	tp_engine_barrier();
}

static void disarm(struct tp_round *round)
{
	for (int i = 0; i < round->count; i++)
		if (round->set[i]->bell) tp_bell_disarm(round->set[i]->bell);
}

void tp_round_pause(struct tp_round *round, _Atomic uint32_t *extra, bool (*go_on)(void *arg), void *arg)
{
	bool crowded = false;
	for (int i = 0; i < round->count; i++) crowded |= round->set[i]->crowded;
	round->wait.crowded = crowded || round->count > 1;
	if (!is_patient(round) && tp_wait_turn(&round->wait)) return;

	uint32_t armed[MAX_WORDS], extra_seen = extra ? atomic_load_explicit(extra, memory_order_acquire) : 0;
	struct pollfd fds[MAX_FDS];
	arm(round, armed);
	if (!go_on(arg) && !tp_round_run(round, NULL) && !go_on(arg)) {
		int nfds = gather_fds(round, fds);
		if (nfds) sleep_on_fds(round, fds, nfds);
		else sleep_on_words(round, armed, extra, extra_seen);
	}
	disarm(round);
	call_stalled(round);
}

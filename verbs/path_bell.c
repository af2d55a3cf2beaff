/* Who looks into the rings.
 *
 * A program that polls its completion queues does it itself. Then peers must not ring, nor may this process's thread stand in
 * the poller's way: the poller holds a lease, and the thread only looks now and then whether it still polls. When it doesn't, the
 * thread says so (`bell` is 1) and sleeps until a peer wakes it. How long a lease is the thread learns: it grows (to 1 ms) when
 * the thread was woken for what a poller took, and shrinks (to nothing) when something had waited for the lease to lapse. */
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include "verbs/internal.h"
#include "verbs/path.h"

enum { BELL_AWAKE, BELL_ASLEEP, BELL_RUNG };
enum { LEASE_FIRST_US = 200, LEASE_MIN_US = 50, LEASE_MAX_US = 1000, TAKE_OVER_AFTER = 32, YIELD_AFTER = 512, YIELD_EVERY = 16 };

static pthread_mutex_t reader_lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic uint32_t polls;          /* counts pollers' visits */
static _Atomic uint32_t lease_us;
static _Atomic bool sleepy;             /* a program is about to sleep: the lease ends */
static _Atomic uint32_t empty_polls;    /* since the thread fell asleep */
static bool started;

static int read_all_locked(void)
{
	int done = 0;
	for (struct tp_path_link *link = tp_path_first_link(); link; link = atomic_load_explicit(&link->next, memory_order_acquire))
		if (tp_path_has_input(link))
			done += tp_path_read(link);
	return done;
}

static bool any_input(void)
{
	bool any = false;
	pthread_mutex_lock(&reader_lock);
	for (struct tp_path_link *link = tp_path_first_link(); link && !any; link = atomic_load_explicit(&link->next, memory_order_acquire))
		any = tp_path_has_input(link);
	pthread_mutex_unlock(&reader_lock);
	return any;
}

/* ---- the thread ---- */

/* Wakes the thread whatever it waits for. */
void tp_path_kick(void)
{
	struct tp_path_yard *yard = tp_path_own_yard;
	if (!yard)
		return;
	atomic_store_explicit(&yard->bell, BELL_RUNG, memory_order_seq_cst);
	tp_futex_wake(&yard->bell, 1);
}

void tp_path_ring_bell(struct tp_path_link *link)
{
	_Atomic uint32_t *bell = &link->yard->bell;
	uint32_t asleep = BELL_ASLEEP;
	if (atomic_load_explicit(bell, memory_order_seq_cst) == BELL_ASLEEP &&
		atomic_compare_exchange_strong_explicit(bell, &asleep, BELL_RUNG, memory_order_seq_cst, memory_order_relaxed))
		tp_futex_wake(bell, 1);
}

static void learn(bool lapsed, int done)
{
	uint32_t lease = atomic_load_explicit(&lease_us, memory_order_relaxed);
	if (lapsed && done)
		lease = lease / 4 < LEASE_MIN_US ? 0 : lease / 4;
	else if (!lapsed && !done)
		lease = lease ? TP_MIN(2 * lease, (uint32_t)LEASE_MAX_US) : (uint32_t)LEASE_MIN_US;
	atomic_store_explicit(&lease_us, lease, memory_order_relaxed);
}

/* While a poller comes by. Returns when none did for the lease's length, or when there is something to hear. */
static bool wait_out_lease(struct tp_path_yard *yard)
{
	uint32_t seen = atomic_load_explicit(&polls, memory_order_relaxed);
	bool waited = false;
	for (;;) {
		uint32_t lease = atomic_load_explicit(&lease_us, memory_order_relaxed);
		if (!lease || atomic_load_explicit(&sleepy, memory_order_relaxed))
			return waited;
		waited = true;
		tp_futex_wait(&yard->bell, BELL_AWAKE, lease);
		uint32_t now = atomic_load_explicit(&polls, memory_order_relaxed);
		if (now == seen || atomic_load_explicit(&yard->bell, memory_order_relaxed) != BELL_AWAKE)
			return waited;
		seen = now;
	}
}

static void *run_thread(void *arg)
{
	struct tp_path_yard *yard = arg;
	bool lapsed = false, woken = false;
	uint32_t polls_before = atomic_load_explicit(&polls, memory_order_relaxed);
	prctl(PR_SET_NAME, "telpher-path");
	prctl(PR_SET_TIMERSLACK, 1000);
	for (;;) {
		atomic_exchange_explicit(&yard->bell, BELL_AWAKE, memory_order_acq_rel);
		pthread_mutex_lock(&reader_lock);
		int done = read_all_locked();
		tp_path_sweep();
		pthread_mutex_unlock(&reader_lock);
		if (lapsed || woken)
			learn(lapsed, done);
		lapsed = woken = false;
		if (done)
			continue;
		uint32_t now = atomic_load_explicit(&polls, memory_order_relaxed);
		if (now != polls_before && !atomic_exchange_explicit(&sleepy, false, memory_order_relaxed)) {
			polls_before = now;
			lapsed = wait_out_lease(yard);
			if (lapsed)
				continue;
		}
		polls_before = atomic_load_explicit(&polls, memory_order_relaxed);
		atomic_store_explicit(&empty_polls, 0, memory_order_relaxed);
		/* Sequentially consistent, as in tp_path_commit: whoever writes sees this, or we see what was written. */
		atomic_store_explicit(&yard->bell, BELL_ASLEEP, memory_order_seq_cst);
		if (any_input())
			continue;
		tp_futex_wait(&yard->bell, BELL_ASLEEP, 0);
		woken = true;
	}
	return NULL;
}

/* Under the links' lock. 0 or an errno, logged. */
int tp_path_start_thread(void)
{
	pthread_t thread;
	sigset_t all, before;
	if (started)
		return 0;
	atomic_store_explicit(&lease_us, LEASE_FIRST_US, memory_order_relaxed);
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	int error = pthread_create(&thread, NULL, run_thread, tp_path_own_yard);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (error)
		return TP_CARD_FAIL(error, "the thread for peers of this machine can't be started: %s", strerror(error));
	pthread_detach(thread);
	started = true;
	return 0;
}

void tp_path_bell_forget(void)
{
	pthread_mutex_init(&reader_lock, NULL);
	started = false;
}

/* ---- pollers ---- */

static void visit(void)
{
	struct tp_path_yard *yard = tp_path_own_yard;
	uint32_t asleep = BELL_ASLEEP;
	atomic_store_explicit(&polls, atomic_load_explicit(&polls, memory_order_relaxed) + 1, memory_order_relaxed);
	if (atomic_load_explicit(&yard->bell, memory_order_relaxed) != BELL_ASLEEP || !atomic_load_explicit(&lease_us, memory_order_relaxed))
		return;
	/* It polls on and on: it takes over, peers need not ring. */
	uint32_t empty = atomic_load_explicit(&empty_polls, memory_order_relaxed) + 1;
	atomic_store_explicit(&empty_polls, empty, memory_order_relaxed);
	if (empty >= TAKE_OVER_AFTER &&
		atomic_compare_exchange_strong_explicit(&yard->bell, &asleep, BELL_RUNG, memory_order_seq_cst, memory_order_relaxed))
		tp_futex_wake(&yard->bell, 1);
}

/* A poller that has found nothing for long may be keeping from its processor the very process that it waits for. */
static void rest(int done)
{
	static _Thread_local uint32_t idle;
	idle = done ? 0 : idle + 1;
	if (idle >= YIELD_AFTER && idle % YIELD_EVERY == 0)
		sched_yield();
}

int tp_path_poll(void)
{
	if (!tp_path_any())
		return 0;
	visit();
	if (pthread_mutex_trylock(&reader_lock) != 0)
		return 0;
	int done = read_all_locked();
	pthread_mutex_unlock(&reader_lock);
	rest(done);
	return done;
}

void tp_path_arm(void)
{
	if (!tp_path_any() || atomic_load_explicit(&tp_path_own_yard->bell, memory_order_relaxed) == BELL_ASLEEP)
		return;
	atomic_store_explicit(&sleepy, true, memory_order_relaxed);
	tp_path_kick();
}

/* Waiting on words of shared memory. The futexes are shared ones: a waiter may be another process. */
#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include "base/internal.h"

#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449
#endif
#define WAITV_MAX 128
#define WAITV_U32 2
#define FALLBACK_SLEEP_NS 1000000u

/* The kernel's struct futex_waitv, which older headers lack. */
struct waitv { uint64_t value, address; uint32_t flags, reserved; };

static long futex(_Atomic uint32_t *word, int op, uint32_t value, const struct timespec *timeout)
{
	return syscall(SYS_futex, word, op, value, timeout, NULL, FUTEX_BITSET_MATCH_ANY);
}

static struct timespec timespec_of(uint64_t ns)
{
	return (struct timespec){ .tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u) };
}

static uint64_t deadline_of(uint64_t timeout_us)
{
	uint64_t now = tp_clock_ns();
	return timeout_us > (INT64_MAX - now) / 1000 ? INT64_MAX : now + timeout_us * 1000;
}

bool tp_futex_wait(_Atomic uint32_t *word, uint32_t seen, uint64_t timeout_us)
{
	struct timespec deadline = timespec_of(timeout_us ? deadline_of(timeout_us) : 0);
	for (;;) {
		/* FUTEX_WAIT_BITSET takes the deadline on CLOCK_MONOTONIC, so a signal doesn't prolong the wait. */
		if (futex(word, FUTEX_WAIT_BITSET, seen, timeout_us ? &deadline : NULL) == 0)
			return true;
		if (errno == ETIMEDOUT)
			return atomic_load_explicit(word, memory_order_acquire) != seen;
		if (errno != EINTR)
			return true;
		if (atomic_load_explicit(word, memory_order_acquire) != seen)
			return true;
	}
}

void tp_futex_wake(_Atomic uint32_t *word, int waiters)
{
	futex(word, FUTEX_WAKE, (uint32_t)waiters, NULL);
}

static bool any_changed(_Atomic uint32_t *const *words, const uint32_t *seen, int count)
{
	for (int i = 0; i < count; i++)
		if (atomic_load_explicit(words[i], memory_order_acquire) != seen[i])
			return true;
	return false;
}

static bool sleep_and_look(_Atomic uint32_t *const *words, const uint32_t *seen, int count, uint64_t deadline_ns)
{
	uint64_t now = tp_clock_ns();
	if (any_changed(words, seen, count))
		return true;
	if (now >= deadline_ns)
		return false;
	struct timespec nap = timespec_of(TP_MIN(deadline_ns - now, (uint64_t)FALLBACK_SLEEP_NS));
	nanosleep(&nap, NULL);
	/* A wake without a change can't be seen here, so every nap may have been ended by one. */
	return tp_clock_ns() < deadline_ns || any_changed(words, seen, count);
}

bool tp_futex_wait_any(_Atomic uint32_t *const *words, const uint32_t *seen, int count, uint64_t timeout_us)
{
	static _Atomic bool lacking;
	uint64_t deadline_ns = timeout_us ? deadline_of(timeout_us) : INT64_MAX;
	if (count == 1)
		return tp_futex_wait(words[0], seen[0], timeout_us);
	if (count < 1 || count > WAITV_MAX || atomic_load_explicit(&lacking, memory_order_relaxed))
		return sleep_and_look(words, seen, count, deadline_ns);
	struct waitv waits[WAITV_MAX];
	for (int i = 0; i < count; i++)
		waits[i] = (struct waitv){ .value = seen[i], .address = (uint64_t)(uintptr_t)words[i], .flags = WAITV_U32 };
	struct timespec deadline = timespec_of(deadline_ns);
	for (;;) {
		if (syscall(SYS_futex_waitv, waits, count, 0, timeout_us ? &deadline : NULL, CLOCK_MONOTONIC) >= 0)
			return true;
		if (errno == ETIMEDOUT)
			return any_changed(words, seen, count);
		if (errno == EAGAIN)
			return true;
		if (errno != EINTR) {
			atomic_store_explicit(&lacking, true, memory_order_relaxed);
			return sleep_and_look(words, seen, count, deadline_ns);
		}
		if (any_changed(words, seen, count))
			return true;
	}
}

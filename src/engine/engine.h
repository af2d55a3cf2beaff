/* Progress: who runs a rank's programs, and how one waits.
 *
 * A runnable is one rank of one communicator. Whoever holds its run lock runs it: a caller that waits runs it itself (a
 * group's caller all of its ranks, in turn), so the fast path has no hand-over; work on a stream is run by the process's
 * engine thread unless a caller that synchronises takes the lock first. Waiting is: spin (only where every waiting rank of
 * the host can have a core), then sched_yield for a bounded time, then sleep on the rank's bell. */
#ifndef TP_ENGINE_ENGINE_H
#define TP_ENGINE_ENGINE_H

#include "boot/boot.h"

enum tp_run {
	TP_RUN_IDLE,                /* nothing outstanding */
	TP_RUN_WAITING,             /* outstanding, but nothing could be moved now */
	TP_RUN_MOVED                /* something moved: call again */
};

struct tp_runnable {
	enum tp_run (*run)(struct tp_runnable *self);       /* with the lock held */
	/* Descriptors to sleep on besides the bell (network); may be NULL. */
	int (*poll_fds)(struct tp_runnable *self, int *fds, uint32_t *events, int max);
	/* A wait has lasted long (every 200 ms or so, lock held): look for mismatched calls, the dead, … */
	void (*stalled)(struct tp_runnable *self, uint64_t waited_ms);
	struct tp_bell *bell;
	bool crowded;               /* the host has more ranks than cores: yield at once, don't spin */
	/* What it waits for comes by a descriptor and its time is being measured: a thread that waits for it alone sleeps at once, until then, so that the
	 * kernel counts as a wait for a processor nothing else. */
	_Atomic uint32_t patient;
	_Atomic uint32_t lock;
	_Atomic uint32_t queued;    /* in the engine thread's list */
	struct tp_runnable *next_queued;
};

/* Once in every process that rings bells, before it does: rings carry no fence, so the sleeper's barrier must reach them. */
void tp_engine_prepare(void);

/* One wait: spin (not long where turns cost more than a yield: a network by system calls), yield, and then the caller sleeps. For loops that watch
 * memory themselves. */
struct tp_wait { uint64_t since_ns; uint32_t turns; bool crowded, slow; };
static inline void tp_wait_begin(struct tp_wait *wait, bool crowded)
{
	*wait = (struct tp_wait){ .crowded = crowded };
}
/* One turn without sleep. false: the time for that is over; arm the bell, look again, sleep, disarm. */
bool tp_wait_turn(struct tp_wait *wait);
uint64_t tp_wait_lasted_ns(const struct tp_wait *wait);
uint32_t tp_bell_arm(struct tp_bell *bell);
void tp_bell_sleep(struct tp_bell *bell, uint32_t armed);       /* until it rings, 50 ms at most */
void tp_bell_disarm(struct tp_bell *bell);

static inline bool tp_engine_try_lock(struct tp_runnable *runnable)
{
	uint32_t open = 0;
	return atomic_load_explicit(&runnable->lock, memory_order_relaxed) == 0 &&
		atomic_compare_exchange_strong_explicit(&runnable->lock, &open, 1, memory_order_acquire, memory_order_relaxed);
}
static inline void tp_engine_unlock(struct tp_runnable *runnable)
{
	atomic_store_explicit(&runnable->lock, 0, memory_order_release);            /* pairs with tp_engine_try_lock */
	/* Another thread may sleep until what was just run is done. */
	if (runnable->bell) tp_bell_ring(runnable->bell);
}
/* Runs the set until done(arg). Runnables whose lock another thread holds are left to it. Returns when done. */
void tp_engine_wait(struct tp_runnable *const *set, int count, bool (*done)(void *arg), void *arg);
/* The engine thread runs it until it is idle. Started at first use; sleeps (no CPU) when nothing is queued. */
ncclResult_t tp_engine_submit(struct tp_runnable *runnable);
/* The engine thread serves a device ("NIC mlx5_0") that these processors are near: from now on it runs there, and by those named before, within
 * what the calling thread may use (NCCL_IGNORE_CPU_AFFINITY: whatever that is; NCCL_PROXY_CPUSET goes before all). */
void tp_engine_sit_by(const char *device, const uint64_t near[TP_CPU_WORDS]);
/* Waits until the engine thread has let go of it for good: before it is freed. */
void tp_engine_forget(struct tp_runnable *runnable);

#endif

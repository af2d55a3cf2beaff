/* Waiting, from the cheapest to the most patient: spin, sched_yield, sleep on the bell.
 *
 * A bell's ringer does a store and one relaxed load, with no fence in between. The sleeper makes up for it: it raises
 * `sleeping`, has the kernel run a barrier on every processor that runs a registered process, and looks at its memory once
 * more. Either the ringer's store is seen by that look, or the ringer's load comes after the barrier and sees the flag. */
#include <errno.h>
#include <linux/membarrier.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "engine/internal.h"

enum { SPIN_TURNS = 4000, TRIAL_TURNS = 8, TURNS_A_LOOK = 16 };
#define TRIAL_NS 4000u              /* for so many turns: more, and a turn costs more than a yield, as one with system calls does */
#define SPIN_NS 100000u             /* where it does: as long as a small message takes to come back on a busy machine, for who yields there is late */
#define YIELD_NS 500000u            /* then sleep: a wake-up costs some 50 us, a tenth of that */

static bool barrier_works;
static pthread_once_t prepared = PTHREAD_ONCE_INIT;

static void prepare(void)
{
	barrier_works = syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED, 0, 0) == 0;
}

void tp_engine_prepare(void) { pthread_once(&prepared, prepare); }

bool tp_engine_barrier(void)
{
	tp_engine_prepare();
	return barrier_works && syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL_EXPEDITED, 0, 0) == 0;
}

bool tp_engine_barrier_works(void) { return barrier_works; }

void tp_engine_nap(uint32_t us)
{
	struct timespec length = { 0, (long)us * 1000 };
	nanosleep(&length, NULL);
}

/* Thousands of turns of shared memory are some 100 us. Of a network that is system calls they would be 10 ms, taken from whoever moves its packets:
 * the transport's own thread, or the other rank. */
static void try_turns(struct tp_wait *wait, uint32_t turn)
{
	if (turn == TRIAL_TURNS) {
		wait->since_ns = tp_clock_ns();
	} else if (turn == 2 * TRIAL_TURNS) {
		wait->slow = tp_clock_ns() - wait->since_ns > TRIAL_NS;
		if (!wait->slow) wait->since_ns = 0;
	} else if (wait->slow && tp_clock_ns() - wait->since_ns > SPIN_NS) {
		wait->turns = SPIN_TURNS;
		wait->since_ns = 0;
	}
}

bool tp_wait_turn(struct tp_wait *wait)
{
	uint32_t turn = wait->turns++;
	if (!wait->crowded && turn < SPIN_TURNS) {
		try_turns(wait, turn);
		/* A pause is as long as a line takes to come over: only every eighth look is followed by one. */
		if (turn % 8 == 7) tp_clock_relax();
		return true;
	}
	sched_yield();
	if (turn % TURNS_A_LOOK) return true;
	if (!wait->since_ns) wait->since_ns = tp_clock_ns();
	return tp_clock_ns() - wait->since_ns < YIELD_NS;
}

uint64_t tp_wait_lasted_ns(const struct tp_wait *wait)
{
	return wait->since_ns ? tp_clock_ns() - wait->since_ns : 0;
}

uint32_t tp_bell_arm(struct tp_bell *bell)
{
	atomic_fetch_add_explicit(&bell->sleeping, 1, memory_order_seq_cst);
	uint32_t seen = atomic_load_explicit(&bell->word, memory_order_acquire);    /* pairs with tp_bell_ring */
	tp_engine_barrier();
	return seen;
}

void tp_bell_sleep(struct tp_bell *bell, uint32_t armed)
{
	/* Without the barrier a ring may be lost: then a sleep must not last. */
	tp_futex_wait(&bell->word, armed, barrier_works ? SLEEP_US : BLIND_SLEEP_US);
}

void tp_bell_disarm(struct tp_bell *bell)
{
	atomic_fetch_sub_explicit(&bell->sleeping, 1, memory_order_relaxed);
}

/* Does it pay to look for the next packet for a while before the progress thread sleeps? At the target of READs and WRITEs
 * packets come one after the other while the application sleeps, and waking a processor takes longer than the pause between
 * them. It doesn't pay where the pauses are long, and it harms where one of the application's own threads wants to run. Those
 * that we keep from their processor use none, so they are watched while we don't linger: some milliseconds of that, then as
 * many in which we may. (Their states in /proc would say more; but threads of real-time priority that end while others have entries
 * of theirs there open can lock up the kernel, which waits for those with a loop.) */
#include <time.h>
#include "verbs/internal.h"

/* The longest pause that counts; how long not again after somebody else got the processor; the times of watching and of lingering. */
enum { GAP_MOST_NS = 1000000, REFRAIN_NS = 2000000, WATCH_NS = 1000000, TRUST_NS = 10000000 };

static struct {
	uint64_t packet_ns, gap_ns;     /* when packets were there last; the usual time between */
	uint64_t since_ns, others_ns;   /* when we began to watch, and the processor time then of the application's threads */
	uint64_t trust_ns;              /* until then they are taken to sleep */
	uint64_t refrain_ns;            /* not before */
	bool idle;                      /* they slept, when that could be seen last */
} state;        /* the progress thread's alone */

static uint64_t cpu_ns(clockid_t clock)
{
	struct timespec time;
	return clock_gettime(clock, &time) ? 0 : (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static void watch(uint64_t now)
{
	state.since_ns = now;
	state.others_ns = cpu_ns(CLOCK_PROCESS_CPUTIME_ID) - cpu_ns(CLOCK_THREAD_CPUTIME_ID);
}

bool tp_linger_application_sleeps(uint64_t now)
{
	if (!state.since_ns)
		watch(now);
	if (now - state.since_ns < WATCH_NS)
		return state.idle;
	uint64_t since = state.since_ns, others = state.others_ns;
	watch(now);
	if (state.others_ns - others >= (now - since) / 4) {
		state.idle = false;
		state.trust_ns = 0;
	} else if (now >= state.trust_ns + WATCH_NS) {      /* that was a time in which we didn't linger */
		state.idle = true;
		state.trust_ns = now + TRUST_NS;
	}
	return state.idle;
}

void tp_linger_note(uint64_t now)
{
	uint64_t gap = TP_MIN(now - state.packet_ns, (uint64_t)GAP_MOST_NS);
	state.packet_ns = now;
	state.gap_ns = state.gap_ns - state.gap_ns / 4 + gap / 4;
}

void tp_linger_refrain(uint64_t now) { state.refrain_ns = now + REFRAIN_NS; }

bool tp_linger_pays(uint64_t now)
{
	bool sleeps = tp_linger_application_sleeps(now);
	return sleeps && now < state.trust_ns && state.gap_ns < TP_LINGER_NS && now >= state.refrain_ns;
}

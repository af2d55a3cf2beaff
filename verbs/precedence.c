/* The progress thread's place among the threads: an application that spins must not hold it up, nor must it push aside who spins while
 * the application sleeps. */
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "verbs/internal.h"

enum { SLICE_NS = 100000 };

/* As <linux/sched/types.h> has it, which not all versions of the C library allow beside <sched.h>. */
struct scheduling { uint32_t size, policy; uint64_t flags; int32_t nice; uint32_t priority; uint64_t runtime, deadline, period; };

static struct { int policy, base, now; } rank;      /* of the thread, where it has a real-time priority */

static void set_rank(int priority)
{
	struct sched_param param = { .sched_priority = TP_MIN(priority, sched_get_priority_max(rank.policy)) };
	if (param.sched_priority == rank.now)
		return;
	if (sched_setscheduler(0, rank.policy, &param) == 0) {
		rank.now = param.sched_priority;
	} else {
		TP_INFO(TP_NET, "the progress thread stays at real-time priority %d: threads that spin there hold it up", rank.now);
		rank.policy = SCHED_OTHER;
	}
}

/* An application that spins must not keep us from our processor: we go one above its real-time priority, or ask for short slices,
 * which let a thread that was woken run at once (Linux 6.12; others take no notice). */
void tp_progress_take_precedence(void)
{
	struct sched_param param;
	rank.policy = sched_getscheduler(0);
	if (rank.policy == SCHED_FIFO || rank.policy == SCHED_RR) {
		rank.base = rank.now = sched_getparam(0, &param) == 0 ? param.sched_priority : 1;
		set_rank(rank.base + 1);
		return;
	}
#if defined SYS_sched_getattr && defined SYS_sched_setattr
	struct scheduling how = { .size = sizeof(how) };
	if (rank.policy == SCHED_OTHER && syscall(SYS_sched_getattr, 0, &how, sizeof(how), 0) == 0) {
		how.runtime = SLICE_NS;
		syscall(SYS_sched_setattr, 0, &how, 0);
	}
#endif
}

/* While the application sleeps nothing of ours needs precedence, and a thread that has it is woken where it ran last, on top of
 * whoever spins there, not where a processor is free. (Not with SCHED_FIFO: there we should never learn that it woke up.) */
void tp_progress_keep_precedence(void)
{
	if (rank.policy == SCHED_RR)
		set_rank(rank.base + (tp_linger_application_sleeps(tp_clock_ns()) ? 0 : 1));
}

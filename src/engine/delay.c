/* Does the engine thread get a processor when it has work? A thread that waits yields and sleeps, and the kernel's counters
 * can't tell that from being pushed aside; so what is measured is stretches in which every round moved something: the time that the
 * clock says and the thread's own processor time doesn't was lost. Every fourth is enough, for it costs two system calls.
 *
 * Half seconds are judged in which an eighth or more was measured. Lost time counts only where the kernel says that the thread waited for
 * a processor (a page that is read, or a card's command, is no such wait), and only three bad ones in a row are told of: the first time
 * as INFO, for on a full machine it is nobody's mistake; as a warning where all that time whole processors of the machine stood idle, and
 * the machine has processors for all ranks: then it is where the thread may run that is wrong. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/internal.h"

#define EVERY 4u                        /* stretches: one in so many is measured */
#define PIECE_NS 10000000u              /* a longer stretch is measured in pieces */
#define WINDOW_NS 500000000u
#define IN_A_ROW 3

static uint64_t cpu_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* How long this thread has waited for a processor so far; false: the kernel doesn't say. */
static bool read_queue_ns(uint64_t *out)
{
	unsigned long long ran, waited;
	FILE *file = fopen("/proc/thread-self/schedstat", "re");
	bool got = file && fscanf(file, "%llu %llu", &ran, &waited) == 2;
	if (file) fclose(file);
	if (got) *out = waited;
	return got;
}

/* Of all processors together. */
static bool read_idle_ns(uint64_t *out)
{
	unsigned long long user, nice, system, idle, io;
	FILE *file = fopen("/proc/stat", "re");
	bool got = file && fscanf(file, "cpu %llu %llu %llu %llu %llu", &user, &nice, &system, &idle, &io) == 5;
	if (file) fclose(file);
	if (got) *out = (idle + io) * (1000000000u / (unsigned long long)TP_MAX(sysconf(_SC_CLK_TCK), 1L));
	return got;
}

enum tp_delay_verdict tp_delay_judge(const struct tp_delay_window *w)
{
	if (w->measured_ns * 8 < w->wall_ns || w->lost_ns * 4 < w->measured_ns || w->queue_ns * 2 < w->lost_ns) return TP_DELAY_NONE;
	return !w->crowded && w->idle_ns >= w->wall_ns ? TP_DELAY_MISPLACED : TP_DELAY_FULL;
}

static void begin_window(struct tp_delay *d, uint64_t now)
{
	d->window = (struct tp_delay_window){ 0 };
	d->since_ns = now;
	d->readable = read_queue_ns(&d->queue_ns) && read_idle_ns(&d->idle_ns);
}

static void tell(struct tp_delay *d, bool warn)
{
	const struct tp_delay_window *w = &d->window;
	char text[700], where[512];
	snprintf(text, sizeof(text), "the engine thread, which moves network links, got no processor for %.0f %% of the time that it had work (%.0f of %.0f ms measured, %d half "
		"seconds in a row; it waited %.0f ms of the last): collectives are slower by as much. It is %s", 100 * (double)w->lost_ns / (double)w->measured_ns,
		(double)w->lost_ns / 1e6, (double)w->measured_ns / 1e6, IN_A_ROW, (double)w->queue_ns / 1e6, d->where ? d->where(where, sizeof(where)) : "");
	d->told = true;
	if (!warn) {
		TP_INFO(TP_PROXY | TP_NET, "%s. Other programs, or other ranks, use this machine's processors too", text);
		return;
	}
	d->warned = true;
	TP_WARN("%s, while %.1f processors of the machine stood idle. Give it others (NCCL_PROXY_CPUSET), take other threads off these, or raise the container's limit (%d of %ld "
		"processors)", text, (double)w->idle_ns / (double)w->wall_ns, tp_cpu_count(), sysconf(_SC_NPROCESSORS_ONLN));
}

static void end_window(struct tp_delay *d, uint64_t now)
{
	struct tp_delay_window *w = &d->window;
	uint64_t queue = 0, idle = 0;
	w->wall_ns = now - d->since_ns;
	enum tp_delay_verdict verdict = TP_DELAY_NONE;
	if (d->readable && read_queue_ns(&queue) && read_idle_ns(&idle)) {
		w->queue_ns = queue - d->queue_ns;
		w->idle_ns = idle > d->idle_ns ? idle - d->idle_ns : 0;
		verdict = tp_delay_judge(w);
	}
	d->bad = verdict == TP_DELAY_NONE ? 0 : d->bad + 1;
	d->misplaced = verdict == TP_DELAY_MISPLACED ? d->misplaced + 1 : 0;
	if (d->misplaced >= IN_A_ROW) tell(d, true);
	else if (d->bad >= IN_A_ROW && !d->told) tell(d, false);
	begin_window(d, now);
}

void tp_delay_before(struct tp_delay *d)
{
	if (d->measuring || d->warned || d->rounds++ % EVERY) return;
	d->measuring = true;
	d->worked = false;
	d->start_ns = tp_clock_ns();
	d->start_cpu_ns = cpu_ns();
}

void tp_delay_after(struct tp_delay *d, bool moved, bool crowded)
{
	if (!d->measuring) return;
	d->worked |= moved;
	uint64_t now = tp_clock_ns();
	if (moved && now - d->start_ns < PIECE_NS) return;
	d->measuring = false;
	if (!d->worked) return;
	uint64_t wall = now - d->start_ns, used = cpu_ns() - d->start_cpu_ns;
	if (!d->since_ns || now - d->since_ns > 2 * WINDOW_NS) {
		/* After a pause nothing is in a row any more. */
		if (d->since_ns) d->bad = d->misplaced = 0;
		begin_window(d, now);
		return;
	}
	d->window.measured_ns += wall;
	d->window.lost_ns += wall > used ? wall - used : 0;
	d->window.crowded |= crowded;
	if (now - d->since_ns >= WINDOW_NS) end_window(d, now);
}

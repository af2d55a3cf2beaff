/* Does it pay to look for the next packet for a while before the progress thread sleeps? At the target of READs and WRITEs
 * packets come one after the other while the application sleeps, and waking a processor takes longer than the pause between
 * them. It doesn't pay where the pauses are long, and it harms where one of the application's own threads wants to run: for the
 * processor's time that they used says little where we, at a higher priority, keep them from it, so their states are looked at. */
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include "verbs/internal.h"

/* The longest pause that counts; how long not again after somebody else got the processor; how often the threads are looked at. */
enum { GAP_MOST_NS = 1000000, REFRAIN_NS = 2000000, LOOK_EVERY_NS = 2000000, THREADS_MAX = 16 };

static struct {
	uint64_t packet_ns, gap_ns;     /* when packets were there last; the usual time between */
	uint64_t looked_ns, others_ns;  /* when we looked at, and the processor time then of the application's threads */
	uint64_t refrain_ns;            /* not before */
	bool idle;                      /* they slept, at the last look */
} state;        /* the progress thread's alone */

static uint64_t cpu_ns(clockid_t clock)
{
	struct timespec time;
	return clock_gettime(clock, &time) ? 0 : (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static bool is_runnable(int folder, const char *thread)
{
	char path[64], text[256];
	snprintf(path, sizeof(path), "%.20s/stat", thread);
	int fd = openat(folder, path, O_RDONLY | O_CLOEXEC);
	ssize_t bytes = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);
	if (fd >= 0)
		close(fd);
	if (bytes <= 0)
		return false;
	text[bytes] = 0;
	const char *end = strrchr(text, ')');       /* of its name */
	return end && end[1] == ' ' && end[2] == 'R';
}

bool tp_linger_any_runnable(void)
{
	DIR *folder = opendir("/proc/self/task");
	bool any = !folder;
	int threads = 0;
	for (struct dirent *entry; folder && !any && (entry = readdir(folder));)
		if (entry->d_name[0] != '.' && atoi(entry->d_name) != (int)gettid())
			any = ++threads > THREADS_MAX || is_runnable(dirfd(folder), entry->d_name);
	if (folder)
		closedir(folder);
	return any;
}

static bool application_sleeps(uint64_t now)
{
	if (now - state.looked_ns < LOOK_EVERY_NS)
		return state.idle;
	uint64_t others = cpu_ns(CLOCK_PROCESS_CPUTIME_ID) - cpu_ns(CLOCK_THREAD_CPUTIME_ID);
	state.idle = state.looked_ns && others - state.others_ns < (now - state.looked_ns) / 4 && !tp_linger_any_runnable();
	state.looked_ns = now;
	state.others_ns = others;
	return state.idle;
}

void tp_linger_note(uint64_t now)
{
	uint64_t gap = TP_MIN(now - state.packet_ns, (uint64_t)GAP_MOST_NS);
	state.packet_ns = now;
	state.gap_ns = state.gap_ns - state.gap_ns / 4 + gap / 4;
}

void tp_linger_refrain(uint64_t now) { state.refrain_ns = now + REFRAIN_NS; }

bool tp_linger_pays(uint64_t now) { return state.gap_ns < TP_LINGER_NS && now >= state.refrain_ns && application_sleeps(now); }

/* Is this machine too busy for times to mean anything? A thread that is ready to run while others have its processor takes longer over everything,
 * and no link is to blame. Linux counts that time for each thread, and for a virtual machine what its host took. Both are read at a few points of a
 * look, never in a call that isn't looked at. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "watch/internal.h"

static bool read_text(const char *path, char *out, size_t bytes)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0) return false;
	ssize_t n = read(fd, out, bytes - 1);
	close(fd);
	out[n > 0 ? n : 0] = 0;
	return n > 0;
}

static int this_thread(void) { return (int)syscall(SYS_gettid); }

/* In ns; false: the system doesn't say. */
static bool read_delay(unsigned long long *delay)
{
	char text[128];
	unsigned long long ran;
	return read_text("/proc/thread-self/schedstat", text, sizeof(text)) && sscanf(text, "%llu %llu", &ran, delay) == 2 && ran;      /* some print zeros */
}

void tp_delay_begin(struct tp_delay *since)
{
	unsigned long long delay = 0;
	since->thread = read_delay(&delay) ? this_thread() : 0;
	since->delay_ns = delay;
}

float tp_delay_us(const struct tp_delay *since)
{
	unsigned long long delay;
	if (!since->thread || since->thread != this_thread() || !read_delay(&delay)) return TP_DELAY_UNKNOWN;
	return (float)((double)(delay - since->delay_ns) / 1e3);
}

float tp_stolen_share(struct tp_stolen *since)
{
	char text[512];
	unsigned long long t[8] = { 0 }, all = 0;
	if (!read_text("/proc/stat", text, sizeof(text))) return 0;
	int found = sscanf(text, "cpu %llu %llu %llu %llu %llu %llu %llu %llu", &t[0], &t[1], &t[2], &t[3], &t[4], &t[5], &t[6], &t[7]);
	if (found < 8) return 0;
	for (int i = 0; i < 8; i++) all += t[i];
	uint64_t before_all = since->all, before_stolen = since->stolen;
	since->all = all;
	since->stolen = t[7];
	/* Idle processors have nothing stolen: it is held against what ran. Some counters have run backwards. */
	if (!before_all || all <= before_all || t[7] <= before_stolen) return 0;
	return (float)((double)(t[7] - before_stolen) / (double)(all - before_all));
}

/* Where the engine thread runs. It moves network links' chunks: its NIC writes into memory that it reads, and a NIC's processors find that
 * memory in their caches, others across the socket's border. So it sits by the NICs (or GPUs) of the communicators that it serves,
 * within the processors that those who made them may use: a job's processors are shared out by its launcher, and taking others means
 * disturbing neighbours. NCCL_IGNORE_CPU_AFFINITY=1 leaves that out, NCCL_PROXY_CPUSET says where in so many words.
 *
 * The set only grows: a process has one engine thread, and a device that it served once it may serve again. */
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>

#include "engine/internal.h"

enum { PARAM_CPUSET, PARAM_IGNORE };
static struct tp_param params[] = {
	[PARAM_CPUSET] = { .name = "NCCL_PROXY_CPUSET", .kind = TP_PARAM_STRING,
		.doc = "processors of the engine thread, as \"0-3,8\"; unset: those near its NIC or GPU" },
	[PARAM_IGNORE] = { .name = "NCCL_IGNORE_CPU_AFFINITY", .kind = TP_PARAM_BOOL, .fallback = "0", .max = 1,
		.doc = "1: the engine thread runs on all processors near its NIC or GPU, whether or not this process may use them" },
};
TP_PARAM_TABLE("engine", params)

enum { LIST_BYTES = 256 };

/* Guarded by the engine's mutex. */
static struct {
	bool read;                          /* NCCL_PROXY_CPUSET has been */
	bool fixed;                         /* and is what holds */
	bool bound;                         /* cpus is where the thread is */
	bool apart;                         /* it was said that a device is elsewhere */
	uint64_t cpus[TP_CPU_WORDS];
	char why[160];
} place;

static bool is_empty(const uint64_t mask[TP_CPU_WORDS])
{
	uint64_t any = 0;
	for (int w = 0; w < TP_CPU_WORDS; w++) any |= mask[w];
	return !any;
}

static void read_cpuset(void)
{
	uint64_t cpus[TP_CPU_WORDS];
	const char *text = tp_param_string(&params[PARAM_CPUSET]);
	place.read = true;
	if (!text || !*text) return;
	const char *rest = tp_cpu_list_read(text, cpus);
	if (*rest || is_empty(cpus)) {
		TP_WARN("NCCL_PROXY_CPUSET is \"%s\", which is no list of processors%s%s%s: it should be like \"0-3,8\" and is ignored", text, *rest ? " from \"" : "", rest,
			*rest ? "\" on" : "");
		return;
	}
	memcpy(place.cpus, cpus, sizeof(cpus));
	place.fixed = true;
	snprintf(place.why, sizeof(place.why), "NCCL_PROXY_CPUSET");
}

bool tp_place_add(const char *device, const uint64_t near[TP_CPU_WORDS])
{
	uint64_t own[TP_CPU_WORDS], cpus[TP_CPU_WORDS];
	char text[LIST_BYTES], has[LIST_BYTES];
	bool more = false;
	if (!place.read) read_cpuset();
	tp_cpu_mask(own);
	if (place.fixed || is_empty(own) || is_empty(near)) return false;
	bool ignore = tp_param_int(&params[PARAM_IGNORE]) != 0;
	for (int w = 0; w < TP_CPU_WORDS; w++) cpus[w] = near[w] & (ignore ? ~UINT64_C(0) : own[w]);
	if (is_empty(cpus)) {
		if (!place.apart)
			TP_INFO(TP_INIT | TP_PROXY, "%s is near processors %s, and this process may use %s: the engine thread stays there. NCCL_IGNORE_CPU_AFFINITY=1 puts it by the device "
				"all the same", device, tp_cpu_list_format(near, text, sizeof(text)), tp_cpu_list_format(own, has, sizeof(has)));
		place.apart = true;
		return false;
	}
	/* Nothing is gained by binding a thread to all that it has. */
	if (!place.bound && is_empty(place.cpus) && memcmp(cpus, own, sizeof(cpus)) == 0) return false;
	for (int w = 0; w < TP_CPU_WORDS; w++) {
		more |= (cpus[w] & ~place.cpus[w]) != 0;
		place.cpus[w] |= cpus[w];
	}
	if (!more) return false;
	size_t used = strlen(place.why);
	snprintf(place.why + used, sizeof(place.why) - used, "%s%.60s", used ? ", " : "by ", device);
	return true;
}

void tp_place_thread(pthread_t thread)
{
	cpu_set_t set;
	char text[LIST_BYTES], has[LIST_BYTES];
	uint64_t own[TP_CPU_WORDS];
	if (!place.read) read_cpuset();
	if (is_empty(place.cpus)) return;
	CPU_ZERO(&set);
	memcpy(&set, place.cpus, TP_MIN(sizeof(set), sizeof(place.cpus)));
	int error = pthread_setaffinity_np(thread, sizeof(set), &set);
	tp_cpu_list_format(place.cpus, text, sizeof(text));
	place.bound = error == 0;
	if (!error) {
		TP_INFO(TP_INIT | TP_PROXY, "The engine thread runs on processors %s (%s)", text, place.why);
		return;
	}
	tp_cpu_mask(own);
	TP_WARN("the engine thread can't run on processors %s (%s): %s. This process may use %s", text, place.why, strerror(error), tp_cpu_list_format(own, has, sizeof(has)));
}

const char *tp_place_words(char *text, size_t bytes)
{
	char list[LIST_BYTES];
	if (place.bound) snprintf(text, bytes, "bound to processors %s: %s", tp_cpu_list_format(place.cpus, list, sizeof(list)), place.why);
	else snprintf(text, bytes, "on the processors that its process was given");
	return text;
}

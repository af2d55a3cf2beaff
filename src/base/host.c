/* Who this machine is and what its processors can do. One "host" is a set of processes that can share memory: they run
 * under one kernel (boot id) and reach each other's abstract Unix sockets (one network namespace). */
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/internal.h"

enum { P_HOSTID, P_ISA };
static struct tp_param host_params[] = {
	[P_HOSTID] = { .name = "NCCL_HOSTID", .kind = TP_PARAM_STRING,
		.doc = "name of the host that this process counts as part of: makes several hosts of one machine" },
	[P_ISA] = { .name = "TELPHER_ISA", .kind = TP_PARAM_ENUM, .fallback = "avx512", .choices = "scalar|avx2|avx512",
		.doc = "widest vector instructions to use; the processor may have less" },
};
TP_PARAM_TABLE("host", host_params)

static pthread_once_t name_once = PTHREAD_ONCE_INIT, isa_once = PTHREAD_ONCE_INIT, cpu_once = PTHREAD_ONCE_INIT;
static char host_name[256];
static enum tp_isa processor_isa;
static int cpu_count;

static void read_host_name(void)
{
	if (gethostname(host_name, sizeof(host_name) - 1) < 0 || !host_name[0])
		strcpy(host_name, "unknown");
	/* Up to the domain, as in NCCL's lines. */
	host_name[strcspn(host_name, ".")] = 0;
}

const char *tp_host_name(void)
{
	pthread_once(&name_once, read_host_name);
	return host_name;
}

static ssize_t read_text(const char *path, char *out, size_t bytes)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return -1;
	ssize_t n;
	do
		n = read(fd, out, bytes - 1);
	while (n < 0 && errno == EINTR);
	close(fd);
	out[n > 0 ? n : 0] = 0;
	return n;
}

static uint64_t namespace_hash(const char *path, uint64_t seed)
{
	struct stat st;
	if (stat(path, &st) < 0)
		return seed;
	uint64_t id[2] = { (uint64_t)st.st_dev, (uint64_t)st.st_ino };
	return tp_hash64(id, sizeof(id), seed);
}

uint64_t tp_machine_hash(void)
{
	char boot_id[64];
	if (read_text("/proc/sys/kernel/random/boot_id", boot_id, sizeof(boot_id)) <= 0)
		return 2;
	return tp_hash64(boot_id, strlen(boot_id), 2);
}

uint64_t tp_host_hash(void)
{
	const char *given = tp_param_string(&host_params[P_HOSTID]);
	if (given && *given)
		return tp_hash64(given, strlen(given), 1);
	char full_name[256] = "";
	/* Machines cloned while running have one boot id, but hardly one name. */
	gethostname(full_name, sizeof(full_name) - 1);
	return namespace_hash("/proc/self/ns/net", tp_hash64(full_name, strlen(full_name), tp_machine_hash()));
}

uint64_t tp_process_hash(void)
{
	char stat_line[1024];
	unsigned long long start = 0;
	/* A process number comes back in time; with the start time it doesn't. */
	if (read_text("/proc/self/stat", stat_line, sizeof(stat_line)) > 0) {
		const char *p = strrchr(stat_line, ')');
		for (int field = 2; p && field < 22; field++)
			p = strchr(p + 1, ' ');
		if (p)
			start = strtoull(p + 1, NULL, 10);
	}
	uint64_t id[2] = { (uint64_t)getpid(), start };
	return tp_hash64(id, sizeof(id), namespace_hash("/proc/self/ns/pid", tp_host_hash()));
}

static void read_isa(void)
{
#if defined(__x86_64__)
	unsigned a, b, c = 0, d;
	__builtin_cpu_init();
	/* The other checks ask the system too whether it saves the registers; F16C needs no more than AVX2's. */
	bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
	if (f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
		processor_isa = TP_ISA_AVX2;
		if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
		    __builtin_cpu_supports("avx512vl"))
			processor_isa = TP_ISA_AVX512;
	}
#endif
}

enum tp_isa tp_cpu_isa(void)
{
	pthread_once(&isa_once, read_isa);
	enum tp_isa allowed = (enum tp_isa)tp_param_int(&host_params[P_ISA]);
	return TP_MIN(allowed, processor_isa);
}

void tp_cpu_mask(uint64_t mask[TP_CPU_WORDS])
{
	cpu_set_t set;
	memset(mask, 0, TP_CPU_WORDS * sizeof(mask[0]));
	if (sched_getaffinity(0, sizeof(set), &set) == 0)
		memcpy(mask, &set, TP_MIN(sizeof(set), TP_CPU_WORDS * sizeof(mask[0])));
}

const char *tp_cpu_list_read(const char *text, uint64_t mask[TP_CPU_WORDS])
{
	memset(mask, 0, TP_CPU_WORDS * sizeof(*mask));
	while (*text) {
		char *end;
		long first = strtol(text, &end, 10), last = first;
		if (end == text || first < 0)
			return text;
		if (*end == '-') {
			const char *from = end + 1;
			last = strtol(from, &end, 10);
			if (end == from || last < first)
				return text;
		}
		if (*end && *end != ',')
			return text;
		for (long c = first; c <= last && c < TP_CPU_WORDS * 64; c++)
			mask[c / 64] |= UINT64_C(1) << (c % 64);
		text = *end ? end + 1 : end;
	}
	return text;
}

static bool has_cpu(const uint64_t *mask, int cpu) { return cpu < TP_CPU_WORDS * 64 && mask[cpu / 64] >> (cpu % 64) & 1; }

const char *tp_cpu_list_format(const uint64_t mask[TP_CPU_WORDS], char *text, size_t bytes)
{
	size_t used = 0;
	text[0] = 0;
	for (int cpu = 0; cpu < TP_CPU_WORDS * 64 && used < bytes; cpu++) {
		int first = cpu;
		if (!has_cpu(mask, cpu))
			continue;
		while (has_cpu(mask, cpu + 1))
			cpu++;
		used += (size_t)snprintf(text + used, bytes - used, cpu > first ? "%s%d-%d" : "%s%d", used ? "," : "", first, cpu);
	}
	return text;
}

static int affinity_count(void)
{
	for (int cpus = 1024; cpus <= 65536; cpus *= 2) {
		cpu_set_t *set = CPU_ALLOC(cpus);
		size_t bytes = CPU_ALLOC_SIZE(cpus);
		if (!set)
			break;
		int failed = sched_getaffinity(0, bytes, set), error = errno;
		int count = failed ? 0 : CPU_COUNT_S(bytes, set);
		CPU_FREE(set);
		if (count > 0)
			return count;
		if (error != EINVAL)
			break;
	}
	long online = sysconf(_SC_NPROCESSORS_ONLN);
	return online > 0 ? (int)online : 1;
}

static int quota_cpus(long long quota, long long period, int limit)
{
	if (quota <= 0 || period <= 0)
		return limit;
	long long cpus = (quota + period - 1) / period;
	return cpus < limit ? (int)cpus : limit;
}

/* Every group from ours up to the root may set a quota; the least holds. */
static int cgroup2_limit(char *path, int limit)
{
	char file[4200], text[128];
	for (;;) {
		long long quota, period;
		snprintf(file, sizeof(file), "/sys/fs/cgroup%s/cpu.max", path);
		if (read_text(file, text, sizeof(text)) > 0 && sscanf(text, "%lld %lld", &quota, &period) == 2)
			limit = quota_cpus(quota, period, limit);
		char *slash = strrchr(path, '/');
		if (!slash)
			return limit;
		*slash = 0;
	}
}

static int cgroup1_limit(char *path, int limit)
{
	char file[4200], text[128];
	for (;;) {
		long long quota = 0, period = 0;
		snprintf(file, sizeof(file), "/sys/fs/cgroup/cpu%s/cpu.cfs_quota_us", path);
		if (read_text(file, text, sizeof(text)) > 0)
			quota = atoll(text);
		snprintf(file, sizeof(file), "/sys/fs/cgroup/cpu%s/cpu.cfs_period_us", path);
		if (read_text(file, text, sizeof(text)) > 0)
			period = atoll(text);
		limit = quota_cpus(quota, period, limit);
		char *slash = strrchr(path, '/');
		if (!slash)
			return limit;
		*slash = 0;
	}
}

static void read_cpu_count(void)
{
	char text[4096];
	cpu_count = affinity_count();
	if (read_text("/proc/self/cgroup", text, sizeof(text)) <= 0)
		return;
	char *rest, *line = strtok_r(text, "\n", &rest);
	for (; line; line = strtok_r(NULL, "\n", &rest)) {
		char *controllers = strchr(line, ':');
		char *path = controllers ? strchr(controllers + 1, ':') : NULL;
		if (!path)
			continue;
		*path++ = 0;
		bool v2 = controllers[1] == 0;
		if (v2)
			cpu_count = cgroup2_limit(path, cpu_count);
		else if (strncmp(controllers + 1, "cpu", 3) == 0 && (controllers[4] == 0 || controllers[4] == ','))
			cpu_count = cgroup1_limit(path, cpu_count);
	}
	cpu_count = TP_MAX(cpu_count, 1);
}

int tp_cpu_count(void)
{
	pthread_once(&cpu_once, read_cpu_count);
	return cpu_count;
}

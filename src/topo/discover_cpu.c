/* NUMA nodes, what kind of CPU they are, and on demand the caches and cores in them. */
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "topo/discover.h"

struct cpu_kind { const char *arch; char vendor[16]; int family, model; };

#if defined(__x86_64__)
static const char arch_name[] = "x86_64";
static bool ask_cpu(struct cpu_kind *kind)
{
	unsigned eax, ebx, ecx, edx;
	if (!__get_cpuid(0, &eax, &ebx, &ecx, &edx)) return false;
	memcpy(kind->vendor, &ebx, 4);
	memcpy(kind->vendor + 4, &edx, 4);
	memcpy(kind->vendor + 8, &ecx, 4);
	kind->vendor[12] = 0;
	if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return false;
	kind->family = (int)(eax >> 8 & 15);
	kind->model = (int)((eax >> 4 & 15) | (eax >> 12 & 0xf0));
	if (kind->family == 15) kind->family += (int)(eax >> 20 & 255);
	return true;
}
#else
#if defined(__aarch64__)
static const char arch_name[] = "arm64";
#elif defined(__powerpc64__)
static const char arch_name[] = "ppc64";
#else
static const char arch_name[] = "unknown";
#endif
static bool ask_cpu(struct cpu_kind *kind)
{
	(void)kind;
	return false;
}
#endif

/* The first processor in /proc/cpuinfo: of machines that are made of files, and of those without cpuid. */
static void read_cpuinfo(const struct tp_discovery *d, struct cpu_kind *kind)
{
	char *text = calloc(1, 8192), *line, *rest = text;
	if (!text) return;
	tp_sys_bytes(d, (uint8_t *)text, 8191, "/proc/cpuinfo");
	while ((line = strsep(&rest, "\n"))) {
		char *value = strchr(line, ':');
		if (!value) continue;
		value += 1 + strspn(value + 1, " \t");
		if (strncmp(line, "vendor_id", 9) == 0) snprintf(kind->vendor, sizeof(kind->vendor), "%.15s", value);
		if (strncmp(line, "cpu family", 10) == 0) kind->family = atoi(value);
		if (strncmp(line, "model\t", 6) == 0) kind->model = atoi(value);
		if (strncmp(line, "CPU implementer", 15) == 0) kind->arch = "arm64";
	}
	if (kind->vendor[0]) kind->arch = "x86_64";
	free(text);
}

static ncclResult_t describe_kind(struct tp_discovery *d, struct tp_element *cpu, const struct cpu_kind *kind)
{
	TP_TRY(tp_doc_set(d->doc, cpu, "arch", kind->arch));
	if (!kind->vendor[0]) return ncclSuccess;
	TP_TRY(tp_doc_set(d->doc, cpu, "vendor", kind->vendor));
	TP_TRY(tp_doc_setf(d->doc, cpu, "familyid", "%d", kind->family));
	return tp_doc_setf(d->doc, cpu, "modelid", "%d", kind->model);
}

static bool has_bit(const uint64_t *mask, int bit)
{
	return mask[bit / 64] >> (bit % 64) & 1;
}

int tp_discover_last_cache(const struct tp_discovery *d, int cpu)
{
	int64_t level, best_level = 1;
	int best = -1;
	for (int i = 0; i < 8; i++) {
		char type[32];
		if (!tp_sys_number(d, &level, "/sys/devices/system/cpu/cpu%d/cache/index%d/level", cpu, i)) break;
		bool data = !tp_sys_text(d, type, sizeof(type), "/sys/devices/system/cpu/cpu%d/cache/index%d/type", cpu, i) || strcmp(type, "Instruction") != 0;
		if (!data || level <= best_level) continue;
		best_level = level;
		best = i;
	}
	return best;
}

static int64_t size_of(const char *text)
{
	char *end;
	int64_t size = strtoll(text, &end, 10);
	return *end == 'K' ? size << 10 : *end == 'M' ? size << 20 : size;
}

static ncclResult_t add_cache(struct tp_discovery *d, struct tp_element *cpu_element, int cpu, uint64_t *mask, struct tp_element **out)
{
	char text[256];
	int64_t level;
	int index = tp_discover_last_cache(d, cpu);
	*out = cpu_element;
	if (index < 0 || !tp_sys_text(d, text, sizeof(text), "/sys/devices/system/cpu/cpu%d/cache/index%d/shared_cpu_list", cpu, index)) return ncclSuccess;
	tp_sys_cpu_list(text, mask);
	struct tp_element *cache = tp_doc_add(d->doc, cpu_element, "cache");
	if (!cache) return ncclSystemError;
	if (tp_sys_number(d, &level, "/sys/devices/system/cpu/cpu%d/cache/index%d/level", cpu, index))
		TP_TRY(tp_doc_setf(d->doc, cache, "level", "%d", (int)level));
	if (tp_sys_text(d, text, sizeof(text), "/sys/devices/system/cpu/cpu%d/cache/index%d/size", cpu, index))
		TP_TRY(tp_doc_setf(d->doc, cache, "bytes", "%lld", (long long)size_of(text)));
	*out = cache;
	return tp_sys_set_mask(d->doc, cache, "affinity", mask);
}

static ncclResult_t add_cores(struct tp_discovery *d, struct tp_element *cpu_element, const uint64_t node[TP_CPU_WORDS])
{
	uint64_t cache_mask[TP_CPU_WORDS] = { 0 }, done[TP_CPU_WORDS] = { 0 };
	struct tp_element *cache = cpu_element;
	for (int cpu = 0; cpu < TP_CPU_WORDS * 64; cpu++) {
		char text[256];
		uint64_t core_mask[TP_CPU_WORDS] = { 0 };
		if (!has_bit(node, cpu) || has_bit(done, cpu)) continue;
		if (!has_bit(cache_mask, cpu)) TP_TRY(add_cache(d, cpu_element, cpu, cache_mask, &cache));
		core_mask[cpu / 64] = UINT64_C(1) << (cpu % 64);
		if (tp_sys_text(d, text, sizeof(text), "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu)) tp_sys_cpu_list(text, core_mask);
		struct tp_element *core = tp_doc_add(d->doc, cache, "core");
		if (!core) return ncclSystemError;
		TP_TRY(tp_sys_set_mask(d->doc, core, "affinity", core_mask));
		for (int w = 0; w < TP_CPU_WORDS; w++) done[w] |= core_mask[w];
	}
	return ncclSuccess;
}

static ncclResult_t add_node(struct tp_discovery *d, int numa, const uint64_t mask[TP_CPU_WORDS], const struct cpu_kind *kind)
{
	struct tp_element *cpu = tp_doc_add(d->doc, d->doc->root, "cpu");
	if (!cpu) return ncclSystemError;
	TP_TRY(tp_doc_setf(d->doc, cpu, "host_hash", "0x%llx", (unsigned long long)d->host_hash));
	TP_TRY(tp_doc_setf(d->doc, cpu, "numaid", "%d", numa));
	TP_TRY(tp_sys_set_mask(d->doc, cpu, "affinity", mask));
	TP_TRY(describe_kind(d, cpu, kind));
	d->nnodes++;
	return d->find->cores ? add_cores(d, cpu, mask) : ncclSuccess;
}

ncclResult_t tp_topo_doc_add_host_rank(struct tp_topo_doc *doc, int number, const uint64_t own[TP_CPU_WORDS])
{
	struct tp_element *best = NULL;
	int most = -1;
	for (struct tp_element *cpu = doc->root->first; cpu; cpu = cpu->next) {
		uint64_t mask[TP_CPU_WORDS];
		int common = 0;
		if (strcmp(cpu->name, "cpu") != 0) continue;
		TP_TRY(tp_element_mask(doc, cpu, "affinity", mask));
		for (int w = 0; w < TP_CPU_WORDS; w++) common += __builtin_popcountll(mask[w] & own[w]);
		if (common <= most) continue;
		most = common;
		best = cpu;
	}
	struct tp_element *rank = best ? tp_doc_add(doc, best, "hostrank") : NULL;
	if (!rank) return ncclSystemError;
	TP_TRY(tp_doc_setf(doc, rank, "rank", "%d", number));
	return tp_sys_set_mask(doc, rank, "affinity", own);
}

ncclResult_t tp_discover_cpus(struct tp_discovery *d)
{
	static const char folder[] = "/sys/devices/system/node";
	struct cpu_kind kind = { .arch = arch_name };
	char text[1024];
	uint64_t mask[TP_CPU_WORDS];
	if (*d->root || !ask_cpu(&kind)) read_cpuinfo(d, &kind);
	char (*names)[TP_TOPO_NAME_BYTES] = tp_alloc(TP_MAX_DEVICES, sizeof(*names), "the machine's CPUs");
	if (!names) return ncclSystemError;
	int count = tp_sys_list(d, names, TP_MAX_DEVICES, "%s", folder);
	ncclResult_t result = ncclSuccess;
	for (int i = 0; i < count && result == ncclSuccess; i++) {
		int numa;
		char end;
		if (sscanf(names[i], "node%d%c", &numa, &end) != 1) continue;
		/* Memory without processors (a GPU's, on some machines) is no place for a rank. */
		if (!tp_sys_text(d, text, sizeof(text), "%s/%s/cpulist", folder, names[i]) || !*text) continue;
		tp_sys_cpu_list(text, mask);
		result = add_node(d, numa, mask, &kind);
	}
	free(names);
	TP_TRY(result);
	if (!d->nnodes) {
		memset(mask, 0, sizeof(mask));
		if (tp_sys_text(d, text, sizeof(text), "/sys/devices/system/cpu/online")) tp_sys_cpu_list(text, mask);
		else if (!*d->root) tp_cpu_mask(mask);
		TP_TRY(add_node(d, 0, mask, &kind));
	}
	return d->find->cpu_mask && d->find->rank >= 0 ? tp_topo_doc_add_host_rank(d->doc, d->find->rank, d->find->cpu_mask) : ncclSuccess;
}

struct tp_element *tp_discover_cpu_of(const struct tp_discovery *d, int numa)
{
	char text[16];
	snprintf(text, sizeof(text), "%d", numa);
	struct tp_element *cpu = tp_element_child_with(d->doc->root, "cpu", "numaid", text);
	return cpu ? cpu : tp_element_child(d->doc->root, "cpu");
}

/* `telpher probe reg`: what registering memory costs, by its size and the kind of its pages, and after how many transfers it was worth it. */
#include <popt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "probe/formula.h"
#include "probe/memory.h"

#define FIRST ((size_t)4 << 10)
#define FACTOR 16
#define MOST_MRS 65536

struct options { char *device, *size; int gid, gpu, repetitions, mrs, json; size_t most; };
struct line { size_t bytes, page; double reg_us, dereg_us, copy_us, pays; bool dma_buf; };

/* May the kernel make huge pages of what asks for them? */
static bool has_huge_pages(void)
{
	char line[64] = "";
	FILE *file = fopen("/sys/kernel/mm/transparent_hugepage/enabled", "re");
	bool read = file && fgets(line, sizeof(line), file);
	if (file) fclose(file);
	return read && !strstr(line, "[never]");
}

/* 0: not known; what a GPU's driver tells the card is its own affair. */
static size_t page_of(enum probe_kind kind)
{
	if (kind == PROBE_GPU) return 0;
	return kind == PROBE_HUGETLB || (kind == PROBE_HUGE && has_huge_pages()) ? (size_t)2 << 20 : (size_t)sysconf(_SC_PAGESIZE);
}

/* What it would take instead: a copy into memory that is registered. */
static int copy_time(const struct probe_memory *from, const struct probe_memory *into, size_t bytes, double *us)
{
	double start = probe_now_us();
	if (from->kind == PROBE_GPU) {
		if (tp_gpu_copy(from->gpu, into->ptr, from->ptr, bytes) != ncclSuccess) return probe_fail_below(NULL);
	} else {
		memcpy(into->ptr, from->ptr, bytes);
	}
	*us = probe_now_us() - start;
	return 0;
}

/* By the way that serves it: a DMA-BUF's time has its export in it. */
static int register_once(const struct probe_port *port, const struct probe_memory *m, struct line *line, struct ibv_mr **mr)
{
	struct probe_memory part = *m;
	part.bytes = line->bytes;
	if (m->kind == PROBE_GPU) {
		int status = probe_register_either(port, &part, &line->dma_buf);
		*mr = part.mr;
		return status;
	}
	int error = probe_register_once(port, m, line->bytes, mr);
	return error ? probe_cannot_register(port, m, line->bytes, probe_kind_name(m->kind), error) : 0;
}

static int measure(const struct probe_port *port, const struct options *o, const struct probe_memory *m, const struct probe_memory *slots, struct line *out)
{
	double *times = calloc((size_t)o->repetitions * 3, sizeof(*times)), *reg = times, *dereg = times + o->repetitions, *copy = dereg + o->repetitions;
	int status = times ? 0 : probe_fail("out of memory");
	for (int i = 0; i < o->repetitions && !status; i++) {
		struct ibv_mr *mr = NULL;
		double start = probe_now_us();
		status = register_once(port, m, out, &mr);
		reg[i] = probe_now_us() - start;
		if (status) break;
		start = probe_now_us();
		port->verbs->dereg_mr(mr);
		dereg[i] = probe_now_us() - start;
		status = copy_time(m, slots, out->bytes, &copy[i]);
	}
	if (!status) {
		out->page = page_of(m->kind);
		out->reg_us = tp_median(reg, o->repetitions);
		out->dereg_us = tp_median(dereg, o->repetitions);
		out->copy_us = tp_median(copy, o->repetitions);
		out->pays = probe_pays_after(out->reg_us, out->dereg_us, out->copy_us);
	}
	free(times);
	return status;
}

static void add_line(const struct line *l, enum probe_kind kind, cJSON *lines, bool quiet)
{
	char size[32], page[32] = "-", a[32], b[32] = "-", c[32], d[32];
	const char *name = l->dma_buf ? "GPU, DMA-BUF" : probe_kind_name(kind);
	cJSON *one = cJSON_CreateObject();
	cJSON_AddStringToObject(one, "memory", name);
	cJSON_AddNumberToObject(one, "bytes", (double)l->bytes);
	if (l->page) {
		cJSON_AddNumberToObject(one, "page_bytes", (double)l->page);
		probe_size_text(l->page, page);
		probe_digits(l->reg_us / (double)tp_div_up(l->bytes, l->page), b);
	}
	cJSON_AddNumberToObject(one, "register_us", l->reg_us);
	cJSON_AddNumberToObject(one, "deregister_us", l->dereg_us);
	cJSON_AddNumberToObject(one, "copy_us", l->copy_us);
	cJSON_AddNumberToObject(one, "pays_after", l->pays);
	cJSON_AddItemToArray(lines, one);
	if (quiet) return;
	printf("%-24s  %9s  %8s  %11s  %11s  %11s  %11s  %9.0f\n", name, probe_size_text(l->bytes, size), page, probe_digits(l->reg_us, a), b,
		probe_digits(l->dereg_us, c), probe_digits(l->copy_us, d), l->pays);
}

static int measure_kind(const struct probe_port *port, const struct options *o, enum probe_kind kind, const struct tp_gpu *gpu, const struct probe_memory *slots,
	cJSON *lines)
{
	struct probe_memory memory;
	int status = probe_alloc(kind, gpu, o->most, -1, &memory);
	if (status) return status;
	for (size_t bytes = FIRST; !status; bytes *= FACTOR) {
		struct line line = { .bytes = TP_MIN(bytes, o->most) };
		status = measure(port, o, &memory, slots, &line);
		if (!status) add_line(&line, kind, lines, o->json);
		if (line.bytes == o->most) break;
	}
	probe_free(&memory);
	return status;
}

/* How many registrations there can be at once, as far as is tried. */
static int count_registrations(const struct probe_port *port, int most, int *out)
{
	struct probe_memory page;
	struct ibv_mr **mrs = calloc((size_t)most, sizeof(*mrs));
	int n = 0, status = mrs ? probe_alloc(PROBE_PAGES, NULL, FIRST, -1, &page) : probe_fail("out of memory");
	if (status) {
		free(mrs);
		return status;
	}
	while (n < most && probe_register_once(port, &page, FIRST, &mrs[n]) == 0) n++;
	for (int i = 0; i < n; i++) port->verbs->dereg_mr(mrs[i]);
	probe_free(&page);
	free(mrs);
	*out = n;
	return 0;
}

static int limits(const struct probe_port *port, const struct options *o, cJSON *json)
{
	const struct ibv_device_attr *attr = &port->ib->context->attr;
	struct rlimit memlock = { 0 };
	int made = 0, status = count_registrations(port, o->mrs, &made);
	char text[64] = "unlimited";
	if (status) return status;
	getrlimit(RLIMIT_MEMLOCK, &memlock);
	if (memlock.rlim_cur != RLIM_INFINITY) snprintf(text, sizeof(text), "%llu bytes", (unsigned long long)memlock.rlim_cur);
	cJSON_AddNumberToObject(json, "max_mr", attr->max_mr);
	cJSON_AddNumberToObject(json, "max_mr_bytes", (double)attr->max_mr_size);
	cJSON_AddNumberToObject(json, "page_sizes", (double)attr->page_size_cap);
	cJSON_AddNumberToObject(json, "made_at_once", made);
	cJSON_AddStringToObject(json, "memlock", text);
	if (o->json) return 0;
	printf("\nLimits of %s: %d registrations (max_mr), of %llu bytes each at most (max_mr_size); pages of %#llx (bits of page_size_cap).\n"
		"%d at once were made, of %d tried. RLIMIT_MEMLOCK: %s%s.\n", port->ib->context->name, attr->max_mr, (unsigned long long)attr->max_mr_size,
		(unsigned long long)attr->page_size_cap, made, o->mrs, text, port->verbs->software ? " (the software card locks nothing)" : "");
	printf("\"pays after\": transfers of the same memory from which on registering it once is cheaper than copying it each time into memory that is registered.\n");
	return 0;
}

static int run(const struct options *o)
{
	static const enum probe_kind host_kinds[] = { PROBE_PAGES, PROBE_HUGE, PROBE_HUGETLB, PROBE_SHARED }, gpu_kinds[] = { PROBE_PINNED, PROBE_GPU };
	const struct tp_gpu *gpu = NULL;
	struct probe_port port;
	struct probe_memory slots = { 0 };
	char text[160];
	int status = o->gpu >= 0 ? probe_find_gpu(o->gpu, &gpu) : 0;
	if (!status) status = probe_open_port(o->device, o->gid, &port);
	if (!status) status = probe_alloc(PROBE_HUGE, NULL, o->most, -1, &slots);
	if (status) return status;
	cJSON *json = cJSON_CreateObject(), *lines = cJSON_AddArrayToObject(json, "registrations");
	cJSON_AddItemToObject(json, "local", probe_port_json(&port));
	if (!o->json)
		printf("%s\n%-24s  %9s  %8s  %11s  %11s  %11s  %11s  %9s\n", probe_port_text(&port, text, sizeof(text)), "memory", "size", "pages of", "register us", "us a page",
			"deregister", "copy us", "pays after");
	for (size_t i = 0; i < TP_ARRAY_LEN(host_kinds) && !status; i++) {
		/* Reserved huge pages are nobody's duty. */
		if (host_kinds[i] == PROBE_HUGETLB && !probe_has_hugetlb(o->most)) probe_note("hugetlb pages are left out: too few are reserved (/proc/sys/vm/nr_hugepages)");
		else status = measure_kind(&port, o, host_kinds[i], NULL, &slots, lines);
	}
	for (size_t i = 0; i < TP_ARRAY_LEN(gpu_kinds) && gpu && !status; i++) status = measure_kind(&port, o, gpu_kinds[i], gpu, &slots, lines);
	if (!status) status = limits(&port, o, json);
	probe_free(&slots);
	if (!status && o->json) return probe_print_json(json);
	cJSON_Delete(json);
	return status;
}

int probe_reg(int argc, char **argv)
{
	struct options o = { .gid = -1, .gpu = PROBE_UNSET, .repetitions = 9, .mrs = 1024, .most = (size_t)64 << 20 };
	struct poptOption options[] = {
		{ "device", 'd', POPT_ARG_STRING, &o.device, 0, "RDMA device (the first that can be used)", "DEV" },
		{ "gid", 'g', POPT_ARG_INT, &o.gid, 0, "index of the port's GID (chosen)", "GID" },
		{ "size", 's', POPT_ARG_STRING, &o.size, 0, "largest piece of memory (64M)", "BYTES" },
		{ "gpu", 0, POPT_ARG_INT, &o.gpu, 0, "memory of this GPU too, and what its driver has pinned", "N" },
		{ "repetitions", 'n', POPT_ARG_INT, &o.repetitions, 0, "of each measurement, of which the median is printed (9)", "N" },
		{ "mrs", 0, POPT_ARG_INT, &o.mrs, 0, "registrations to try at once (1024)", "N" },
		{ "json", 0, POPT_ARG_NONE, &o.json, 0, "print JSON", NULL },
		POPT_AUTOHELP
		POPT_TABLEEND
	};
	poptContext context = poptGetContext(argv[0], argc, (const char **)argv, options, 0);
	if (!context) return probe_fail("out of memory");
	int code = tool_next_option(context, options), status;
	if (code < -1) status = probe_usage("%s: %s", poptBadOption(context, 0), poptStrerror(code));
	else if (poptPeekArg(context)) status = probe_usage("it takes no arguments");
	else if (o.size && (!tool_parse_size(o.size, &o.most) || o.most < FIRST)) status = probe_usage("-s %s: no size of 4K or more", o.size);
	else if (o.repetitions < 1 || o.repetitions > 10000) status = probe_usage("--repetitions %d: from 1 to 10000", o.repetitions);
	else if (o.mrs < 1 || o.mrs > MOST_MRS) status = probe_usage("--mrs %d: from 1 to %d", o.mrs, MOST_MRS);
	else if (o.gpu < 0 && o.gpu != PROBE_UNSET) status = probe_usage("--gpu %d: GPUs are numbered from 0", o.gpu);
	else if (o.gid < -1 || o.gid > 255) status = probe_usage("-g %d: a GID's index is from 0 to 255", o.gid);
	else status = run(&o);
	free(o.device);
	free(o.size);
	poptFreeContext(context);
	return status;
}

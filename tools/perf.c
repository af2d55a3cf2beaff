/* `telpher perf COLLECTIVE`: nccl-tests' flags. Ranks are processes (under `telpher run`, mpirun, torchrun, … or --np), threads
 * (-t) and several ranks in one thread (-g), in any product. */
#include "tools.h"
#include "perf.h"

#include <errno.h>
#include <popt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "nccl.h"
#include "telpher.h"
#include "base/base.h"

const struct perf_coll_info perf_colls[PERF_NCOLLS] = {
	[PERF_ALL_REDUCE] = { "all_reduce", true, false, false, false, false, "2(n-1)/n" },
	[PERF_ALL_GATHER] = { "all_gather", false, false, true, false, true, "(n-1)/n" },
	[PERF_REDUCE_SCATTER] = { "reduce_scatter", true, false, true, true, false, "(n-1)/n" },
	[PERF_BROADCAST] = { "broadcast", false, true, false, false, false, "1" },
	[PERF_REDUCE] = { "reduce", true, true, false, false, false, "1" },
	[PERF_ALL_TO_ALL] = { "alltoall", false, false, true, true, true, "(n-1)/n" },
	[PERF_GATHER] = { "gather", false, true, true, false, true, "(n-1)/n" },
	[PERF_SCATTER] = { "scatter", false, true, true, true, false, "(n-1)/n" },
	[PERF_SEND_RECV] = { "sendrecv", false, false, false, false, false, "1" },
};

double perf_bus_factor(enum perf_coll coll, int nranks)
{
	double n = nranks;
	switch (coll) {
	case PERF_ALL_REDUCE: return 2 * (n - 1) / n;
	case PERF_BROADCAST: case PERF_REDUCE: case PERF_SEND_RECV: return 1;
	default: return (n - 1) / n;
	}
}

static int parse_collective(const char *name, enum perf_coll *out)
{
	char plain[32];
	size_t n = 0;
	for (; *name && n + 1 < sizeof(plain); name++)
		if (*name != '_' && *name != '-') plain[n++] = *name >= 'A' && *name <= 'Z' ? (char)(*name + 32) : *name;
	plain[n] = 0;
	if (n > 4 && !strcmp(plain + n - 4, "perf")) plain[n - 4] = 0;
	for (int c = 0; c < PERF_NCOLLS; c++) {
		char other[32];
		size_t m = 0;
		for (const char *p = perf_colls[c].name; *p; p++)
			if (*p != '_') other[m++] = *p;
		other[m] = 0;
		if (!strcmp(plain, other)) { *out = (enum perf_coll)c; return 1; }
	}
	return 0;
}

static int parse_type(const char *text, struct perf_options *o)
{
	if (!strcmp(text, "all")) {
		for (int t = 0; t < ncclNumTypes; t++) o->types[o->ntypes++] = t;
		return 1;
	}
	static const struct { const char *name; int type; } aliases[] = {
		{ "fp16", ncclFloat16 }, { "float16", ncclFloat16 }, { "fp32", ncclFloat32 }, { "float32", ncclFloat32 }, { "fp64", ncclFloat64 },
		{ "float64", ncclFloat64 }, { "bf16", ncclBfloat16 }, { "fp8_e4m3", ncclFloat8e4m3 }, { "fp8_e5m2", ncclFloat8e5m2 },
		{ "char", ncclInt8 }, { "int", ncclInt32 },
	};
	for (size_t i = 0; i < sizeof(aliases) / sizeof(aliases[0]); i++)
		if (!strcmp(text, aliases[i].name)) { o->types[o->ntypes++] = aliases[i].type; return 1; }
	for (int t = 0; t < ncclNumTypes; t++)
		if (!strcmp(text, perf_type_name(t))) { o->types[o->ntypes++] = t; return 1; }
	return 0;
}

static int parse_op(const char *text, struct perf_options *o)
{
	bool all = !strcmp(text, "all"), found = false;
	for (int op = 0; op < PERF_NOPS; op++)
		if (all || !strcmp(text, perf_op_name(op))) { o->ops[o->nops++] = op; found = true; }
	return found;
}

struct arguments {
	char *min, *max, *step, *factor, *type, *op, *json, *vary;
	int nprocs, nhosts;
};

static int check_options(struct perf_options *o, const struct arguments *a)
{
	if (a->min && !tool_parse_size(a->min, &o->min_bytes)) return tool_usage_error("perf", "-b takes a size such as 8 or 4M, got '%s'", a->min);
	if (a->max && !tool_parse_size(a->max, &o->max_bytes)) return tool_usage_error("perf", "-e takes a size such as 8 or 4M, got '%s'", a->max);
	if (a->step && (!tool_parse_size(a->step, &o->step_bytes) || !o->step_bytes)) return tool_usage_error("perf", "-i takes a size over 0, got '%s'", a->step);
	if (a->factor) {
		char *end;
		o->step_factor = strtod(a->factor, &end);
		if (*end || !(o->step_factor > 1)) return tool_usage_error("perf", "-f takes a number over 1, got '%s'", a->factor);
	}
	if (!a->max && o->max_bytes < o->min_bytes) o->max_bytes = o->min_bytes;
	if (o->min_bytes > o->max_bytes) return tool_usage_error("perf", "-b (%zu) is more than -e (%zu)", o->min_bytes, o->max_bytes);
	if (!parse_type(a->type ? a->type : "float", o)) return tool_usage_error("perf", "-d takes an element type or 'all', got '%s'", a->type);
	if (!parse_op(a->op ? a->op : "sum", o)) return tool_usage_error("perf", "-o takes sum, prod, max, min, avg, mulsum or all, got '%s'", a->op);
	if (o->nthreads < 1 || o->nthreads > 1024) return tool_usage_error("perf", "-t takes 1 to 1024 threads, got %d", o->nthreads);
	if (o->ngpus < 1 || o->ngpus > PERF_MOST_RANKS) return tool_usage_error("perf", "-g takes 1 to %d ranks a thread, got %d", PERF_MOST_RANKS, o->ngpus);
	if (o->root < -1) return tool_usage_error("perf", "-r takes a rank, or -1 for each in turn, got %d", o->root);
	if (o->iters < 0 || o->warmup < 0 || o->check < 0) return tool_usage_error("perf", "-n, -w and -c take numbers from 0");
	if (o->aggregate < 1 || o->aggregate > 64) return tool_usage_error("perf", "-m takes 1 to 64, got %d", o->aggregate);
	if (o->average < 0 || o->average > 3) return tool_usage_error("perf", "-a takes 0 (rank 0), 1 (mean), 2 (least) or 3 (greatest), got %d", o->average);
	if (a->nprocs < 0 || a->nhosts < 1 || (a->nprocs && a->nhosts > a->nprocs))
		return tool_usage_error("perf", "--hosts takes 1 to the number of processes (--np)");
	return 0;
}

static int parse(struct perf_options *o, struct arguments *a, int argc, char **argv)
{
	struct poptOption options[] = {
		{ "minbytes", 'b', POPT_ARG_STRING, &a->min, 0, "least size (32M)", "SIZE" },
		{ "maxbytes", 'e', POPT_ARG_STRING, &a->max, 0, "greatest size (32M)", "SIZE" },
		{ "stepbytes", 'i', POPT_ARG_STRING, &a->step, 0, "size step (1M)", "SIZE" },
		{ "stepfactor", 'f', POPT_ARG_STRING, &a->factor, 0, "multiply the size instead of adding", "FACTOR" },
		{ "iters", 'n', POPT_ARG_INT, &o->iters, 0, "timed iterations (0: by size, 20 to 2000)", "N" },
		{ "warmup_iters", 'w', POPT_ARG_INT, &o->warmup, 0, "iterations before those (5)", "N" },
		{ "agg_iters", 'm', POPT_ARG_INT, &o->aggregate, 0, "calls put in one group (1)", "N" },
		{ "check", 'c', POPT_ARG_INT, &o->check, 0, "how often each line is checked, every element (1)", "N" },
		{ "datatype", 'd', POPT_ARG_STRING, &a->type, 0, "element type, or all (float)", "TYPE" },
		{ "op", 'o', POPT_ARG_STRING, &a->op, 0, "sum, prod, max, min, avg, mulsum or all (sum)", "OP" },
		{ "root", 'r', POPT_ARG_INT, &o->root, 0, "root; -1: every rank in turn (0)", "RANK" },
		{ "nthreads", 't', POPT_ARG_INT, &o->nthreads, 0, "threads a process (1)", "N" },
		{ "ngpus", 'g', POPT_ARG_INT, &o->ngpus, 0, "ranks a thread (1)", "N" },
		{ "local_register", 'R', POPT_ARG_INT, &o->registers, 0, "1: buffers are registered with ncclCommRegister (0)", "0|1" },
		{ "average", 'a', POPT_ARG_INT, &o->average, 0, "time shown: 0 rank 0's, 1 mean, 2 least, 3 greatest (1)", "HOW" },
		{ "json", 'J', POPT_ARG_STRING, &a->json, 0, "write the results here too", "FILE" },
		{ "np", 0, POPT_ARG_INT, &a->nprocs, 0, "start so many processes by oneself", "N" },
		{ "hosts", 0, POPT_ARG_INT, &a->nhosts, 0, "as so many virtual hosts (1; with --np)", "K" },
		{ "vary", 0, POPT_ARG_STRING, &a->vary, 0, "repeat it all for each value of a variable", "NAME=A,B,C" },
		POPT_AUTOHELP POPT_TABLEEND
	};
	poptContext context = poptGetContext("telpher perf", argc, (const char **)argv, options, 0);
	poptSetOtherOptionHelp(context, "COLLECTIVE [OPTIONS]\n\n"
		"Collectives: all_reduce all_gather reduce_scatter broadcast reduce alltoall gather scatter sendrecv");
	int rc = tool_next_option(context, options), bad = 0;
	const char *name = poptGetArg(context), *more = poptPeekArg(context);
	if (rc < -1) bad = tool_usage_error("perf", "%s: %s", poptBadOption(context, 0), poptStrerror(rc));
	else if (!name) bad = tool_usage_error("perf", "which collective?");
	else if (!parse_collective(name, &o->coll)) bad = tool_usage_error("perf", "there is no collective '%s'", name);
	else if (more) bad = tool_usage_error("perf", "'%s' is one argument too many", more);
	else bad = check_options(o, a);
	poptFreeContext(context);
	return bad;
}

static void free_arguments(struct arguments *a)
{
	char *const texts[] = { a->min, a->max, a->step, a->factor, a->type, a->op, a->json, a->vary };
	for (size_t i = 0; i < TP_ARRAY_LEN(texts); i++) free(texts[i]);
}

/* Before anything is measured: an hour's results shouldn't be lost to a wrong name. */
static bool open_json(const char *path, FILE **out)
{
	*out = path ? fopen(path, "we") : NULL;
	if (path && !*out) fprintf(stderr, "telpher perf: can't write '%s': %s\n", path, strerror(errno));
	return !path || *out;
}

/* As one process of a job, whose other processes the launcher started alike. */
static int run_process(struct perf_options *o, const char *json)
{
	telpher_rank_t place;
	if (telpher_unique_id_from_environment(&place, &o->id) != ncclSuccess) return tool_usage_error("perf", "%s", ncclGetLastError(NULL));
	o->nprocs = place.nranks;
	o->proc = place.rank;
	int nranks = o->nprocs * o->nthreads * o->ngpus;
	if (o->root >= nranks) return tool_usage_error("perf", "-r %d: there are %d ranks", o->root, nranks);
	if (o->proc == 0 && !open_json(json, &o->json)) return 1;
	return perf_run(o);
}

/* Its buffers are host memory, so its ranks are too, on machines with GPUs as well. */
static bool take_host_ranks(void)
{
	const char *device = getenv("TELPHER_DEVICE");
	if (device && !strcasecmp(device, "cuda")) {
		fprintf(stderr, "telpher perf: TELPHER_DEVICE=cuda, but this measures host memory; nccl-tests and bench/gpu measure GPUs\n");
		return false;
	}
	setenv("TELPHER_DEVICE", "host", 1);
	return true;
}

int tool_perf(int argc, char **argv)
{
	if (!take_host_ranks()) return 2;
	struct perf_options o = { .min_bytes = 32 << 20, .max_bytes = 32 << 20, .step_bytes = 1 << 20, .warmup = 5, .aggregate = 1,
		.check = 1, .nthreads = 1, .ngpus = 1, .average = 1, .nprocs = 1 };
	struct arguments a = { .nhosts = 1 };
	int status = parse(&o, &a, argc, argv);
	if (status == 0) {
		/* An empty --vary is none: so the runs of a --vary are told. */
		if (a.vary && *a.vary) status = open_json(a.json, &o.json) ? perf_vary(a.vary, argc, argv, a.nprocs, a.nhosts, o.json) : 1;
		else if (a.nprocs) status = perf_spawn(argc, argv, a.nprocs, a.nhosts);
		else status = run_process(&o, a.json);
	}
	free_arguments(&a);
	return status;
}

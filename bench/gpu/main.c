/* See README.md beside this. */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench.h"

static struct {
	int nranks, ndevices, repeats, calls, inits;
	size_t min_bytes, max_bytes, factor;
	bool threads, quick, cold, tunes, registers, buffers, colls[NCOLLS], modes[NMODES];
	ncclDataType_t type;
	const char *json, *paths[2], *table;
} opt = { .nranks = 2, .ndevices = 0, .repeats = 11, .calls = 0, .inits = 6, .min_bytes = 8, .max_bytes = (size_t)64 << 20, .factor = 8, .cold = true,
	.registers = true, .type = ncclFloat32 };

/* 0: it is none. */
static size_t parse_bytes(const char *text)
{
	char *end;
	double v = strtod(text, &end);
	if (*end == 'K' || *end == 'k') v *= 1 << 10, end++;
	else if (*end == 'M' || *end == 'm') v *= 1 << 20, end++;
	else if (*end == 'G' || *end == 'g') v *= 1 << 30, end++;
	return end == text || *end || !(v >= 1 && v < 1e15) ? 0 : (size_t)v;
}

static void usage(FILE *to)
{
	fprintf(to, "usage: bench_gpu --ours FILE [--nccl FILE] [options]\n"
		"  --ranks N         ranks (2); --devices N: devices that they take in turn (all there are)\n"
		"  --processes, --threads  what ranks are (processes)\n"
		"  --min B --max B   sizes (8 to 64M; 8 to 1G and more where memory allows), each --factor F (8) times the one before\n"
		"  --only LIST       of all_reduce,all_gather,reduce_scatter,broadcast,reduce,all_to_all,gather,scatter,send_recv\n"
		"  --mode LIST       of eager,graph (both)\n"
		"  --joint           beside the graphs of each rank by itself one graph that holds all ranks' calls; with --threads\n"
		"  --bf16            bfloat16 instead of float\n"
		"  --no-cold --no-registered   leave these out\n"
		"  --buffers                   registered as buffers (ncclCommRegister), not as windows\n"
		"  --repeats N       the median of so many (11); --calls N: in each (by size)\n"
		"  --inits N         communicators that each rank makes, one after the other, before what else is measured (6)\n"
		"  --tune            each kind of kernel alone, graphs, and the table of crossovers as TELPHER_CUDA_TABLE reads it\n"
		"  --table FILE      with --tune: the table goes there, for TELPHER_CUDA_TABLE=@FILE\n"
		"  --quick           few calls, small sizes: a look whether all works\n"
		"  --json FILE       one line a measurement\n"
		"Eager rows end with what the kernel's launch costs the host by itself, with the record of an event behind it, and what the call adds to that.\n"
		"Exit 1: something failed or gave a wrong result. TELPHER_CUDA_LIBRARY: another libcuda.so.1.\n");
}

static bool in_list(const char *list, const char *name)
{
	size_t n = strlen(name);
	for (const char *p = list; (p = strstr(p, name)); p += n)
		if ((p == list || p[-1] == ',') && (p[n] == 0 || p[n] == ',')) return true;
	return false;
}

/* Which of the names a list has; false: it has another, which is said. */
static bool read_list(const char *option, const char *list, const char *const *names, int n, bool *out)
{
	char word[32];
	size_t known = 0, words = 1;
	for (const char *p = list; (p = strchr(p, ',')); p++) words++;
	for (int i = 0; i < n; i++) known += out[i] = in_list(list, names[i]);
	if (known == words) return true;
	for (const char *p = list;; p++) {
		snprintf(word, sizeof(word), "%.*s", (int)strcspn(p, ","), p);
		int i = 0;
		while (i < n && strcmp(names[i], word)) i++;
		if (i == n) break;
		if (!(p = strchr(p, ','))) break;
	}
	fprintf(stderr, "bench_gpu: %s has \"%s\", and knows", option, word);
	for (int i = 0; i < n; i++) fprintf(stderr, "%s %s", i ? "," : "", names[i]);
	fprintf(stderr, ", each once\n");
	return false;
}

static int parse(int argc, char **argv)
{
	enum { OURS, NCCL, RANKS, DEVICES, THREADS, PROCESSES, MIN, MAX, FACTOR, ONLY, MODE, BF16, NO_COLD, NO_REGISTERED, BUFFERS, REPEATS, CALLS, QUICK, TUNE, TABLE, JOINT_GRAPH, INITS, JSON, HELP };
	static const struct option options[] = { { "ours", 1, 0, OURS }, { "nccl", 1, 0, NCCL }, { "ranks", 1, 0, RANKS }, { "devices", 1, 0, DEVICES },
		{ "threads", 0, 0, THREADS }, { "processes", 0, 0, PROCESSES }, { "min", 1, 0, MIN }, { "max", 1, 0, MAX }, { "factor", 1, 0, FACTOR }, { "only", 1, 0, ONLY }, { "mode", 1, 0, MODE },
		{ "bf16", 0, 0, BF16 }, { "no-cold", 0, 0, NO_COLD }, { "no-registered", 0, 0, NO_REGISTERED }, { "buffers", 0, 0, BUFFERS }, { "repeats", 1, 0, REPEATS },
		{ "calls", 1, 0, CALLS }, { "quick", 0, 0, QUICK }, { "tune", 0, 0, TUNE }, { "table", 1, 0, TABLE },
		{ "joint", 0, 0, JOINT_GRAPH }, { "inits", 1, 0, INITS }, { "json", 1, 0, JSON }, { "help", 0, 0, HELP }, { 0, 0, 0, 0 } };
	const char *only = NULL, *mode = "eager,graph";
	for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
		switch (c) {
		case OURS: opt.paths[0] = optarg; break;
		case NCCL: opt.paths[1] = optarg; break;
		case RANKS: opt.nranks = atoi(optarg); break;
		case DEVICES: opt.ndevices = atoi(optarg); break;
		case THREADS: opt.threads = true; break;
		case PROCESSES: opt.threads = false; break;
		case MIN: opt.min_bytes = parse_bytes(optarg); break;
		case MAX: opt.max_bytes = parse_bytes(optarg); break;
		case FACTOR: opt.factor = (size_t)atoi(optarg); break;
		case ONLY: only = optarg; break;
		case MODE: mode = optarg; break;
		case BF16: opt.type = ncclBfloat16; break;
		case NO_COLD: opt.cold = false; break;
		case NO_REGISTERED: opt.registers = false; break;
		case BUFFERS: opt.buffers = true; break;
		case REPEATS: opt.repeats = atoi(optarg); break;
		case CALLS: opt.calls = atoi(optarg); break;
		case TUNE: opt.tunes = true; break;
		case TABLE: opt.table = optarg; break;
		case JOINT_GRAPH: opt.modes[JOINT] = true; break;
		case INITS: opt.inits = atoi(optarg); break;
		case QUICK: opt.quick = true; break;
		case JSON: opt.json = optarg; break;
		case HELP: usage(stdout); exit(0);
		default: usage(stderr); return 2;
		}
	}
	static const char *const own[] = { [EAGER] = "eager", [GRAPH] = "graph" };
	for (int c = 0; c < NCOLLS; c++) opt.colls[c] = true;
	if ((only && !read_list("--only", only, coll_names, NCOLLS, opt.colls)) || !read_list("--mode", mode, own, 2, opt.modes)) return 2;
	/* Tests on the fake driver have little memory, and no use for times. */
	if (getenv("BENCH_GPU_TINY")) opt.quick = true;
	if (opt.quick) {
		opt.repeats = opt.repeats < 3 ? opt.repeats : 3;
		opt.calls = opt.calls ? opt.calls : 5;
		opt.inits = opt.inits < 2 ? opt.inits : 2;
		opt.max_bytes = opt.max_bytes < 1 << 20 ? opt.max_bytes : 1 << 20;
	}
	if ((opt.modes[JOINT] && !opt.threads) || (opt.table && !opt.tunes)) {
		fprintf(stderr, "bench_gpu: %s\n", opt.table && !opt.tunes ? "--table goes with --tune" : "--joint goes with --threads: one graph is one process's");
		return 2;
	}
	if (!opt.paths[0] || opt.nranks < 1 || opt.nranks > MOST_RANKS || opt.repeats < 1 || opt.repeats > MOST_REPEATS || opt.factor < 2 ||
		opt.inits < 1 || opt.inits > MOST_INITS ||
		opt.min_bytes < 8 || opt.max_bytes < opt.min_bytes) {
		usage(stderr);
		return 2;
	}
	return 0;
}

int calls_for(size_t bytes, int asked)
{
	if (asked) return asked;
	return bytes <= 1 << 20 ? 200 : bytes <= 64 << 20 ? 20 : 5;
}

/* ---- what is run ---- */

enum { OURS_GROUP, NCCL_GROUP, OURS_ALONE };

static bool run_table(enum coll coll, bool beside)
{
	static const struct { enum mode mode; bool registered, cold; const char *name; } kinds[] = { { GRAPH, false, false, "graph" },
		{ GRAPH, false, true, "graph, cold" }, { JOINT, false, false, "one graph of all" }, { GRAPH, true, false, "graph, registered" },
		{ GRAPH, true, true, "graph, reg., cold" }, { EAGER, false, false, "eager" }, { EAGER, true, false, "eager, registered" } };
	bool right = true;
	print_head(coll, opt.nranks, group_of(OURS_GROUP)->library.name, beside ? "nccl" : NULL);
	for (size_t bytes = opt.min_bytes; bytes <= opt.max_bytes; bytes *= opt.factor) {
		for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
			if (!opt.modes[kinds[i].mode] || (kinds[i].cold && !opt.cold) || (kinds[i].registered && !opt.registers)) continue;
			struct cell cell = { coll, bytes, kinds[i].mode, kinds[i].registered, kinds[i].cold, calls_for(bytes, opt.calls), opt.repeats };
			struct answer ours = measure_cell(OURS_GROUP, &cell), theirs = { .done = false };
			if (beside) theirs = measure_cell(NCCL_GROUP, &cell);
			right &= print_row(bytes, kinds[i].name, &ours, beside ? &theirs : NULL);
		}
	}
	return right;
}

/* What a call costs where there is nobody to talk to: all that can be compared where NCCL refuses several ranks on one GPU. */
static bool run_alone(void)
{
	static const struct { enum mode mode; const char *name; } kinds[] = { { EAGER, "eager" }, { GRAPH, "graph" } };
	bool right = true;
	print_head(ALL_REDUCE, 1, "telpher", "nccl");
	for (size_t bytes = 8; bytes <= opt.max_bytes && bytes <= 1 << 20; bytes <<= 17) {
		for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
			struct cell cell = { .coll = ALL_REDUCE, .bytes = bytes, .mode = kinds[i].mode, .calls = calls_for(bytes, opt.calls), .repeats = opt.repeats };
			struct answer ours = measure_cell(OURS_ALONE, &cell), theirs = measure_cell(NCCL_GROUP, &cell);
			right &= print_row(bytes, kinds[i].name, &ours, &theirs);
		}
	}
	return right;
}

/* How many devices: asked in a child, for a process that has used CUDA can't fork. */
static int count_devices(void)
{
	int status;
	pid_t pid = fork();
	if (pid == 0) {
		int n = 0;
		if (!cuda_open() || cuda.DeviceGetCount(&n) != CUDA_SUCCESS) n = 0;
		_exit(n);
	}
	return waitpid(pid, &status, 0) == pid && WIFEXITED(status) ? WEXITSTATUS(status) : 0;
}

static void print_machine(int there)
{
	const struct group *g = group_of(0);
	printf("%s, %d multiprocessors; %d ranks as %s on %d of %d devices, %s\n", g->device_name, g->sms, opt.nranks, opt.threads ? "threads" : "processes",
		opt.ndevices, there, opt.type == ncclFloat32 ? "float" : "bfloat16");
}

static bool run_tune(const struct group_options *ours, int there)
{
	struct tune_options o = { .group = *ours, .min_bytes = opt.min_bytes, .max_bytes = opt.max_bytes, .factor = opt.factor, .repeats = opt.repeats,
		.calls = opt.calls, .table = opt.table };
	if (!tune_open(&o)) return false;
	print_machine(there);
	return tune(&o);
}

static bool run_collectives(const struct group_options *ours, int there)
{
	struct group_options theirs = *ours, alone = *ours;
	bool beside = opt.paths[1] && opt.ndevices == opt.nranks, right = true;
	int ngroups = 1;
	open_group(ours);
	theirs.name = "nccl";
	theirs.path = opt.paths[1];
	alone.nranks = alone.ndevices = 1;
	if (!beside) theirs.nranks = theirs.ndevices = 1;
	if (opt.paths[1]) open_group(&theirs), ngroups++;
	if (opt.paths[1] && !beside) open_group(&alone), ngroups++;
	print_machine(there);
	if (opt.paths[1] && !beside) printf("NCCL refuses several ranks on one GPU: ours alone, and what a call and an init of one rank cost with either\n");
	for (int c = 0; c < NCOLLS; c++)
		if (opt.colls[c]) right &= run_table((enum coll)c, beside);
	if (opt.paths[1] && !beside) right &= run_alone();
	printf("\n");
	for (int i = 0; i < ngroups; i++) {
		close_group(i);
		report_lives(group_of(i));
	}
	return right;
}

int main(int argc, char **argv)
{
	int bad = parse(argc, argv), there;
	if (bad) return bad;
	if (!(there = count_devices())) {
		fprintf(stderr, "no CUDA device here\n");
		return 77;
	}
	if (!opt.ndevices || opt.ndevices > there) opt.ndevices = there;
	if (opt.ndevices > opt.nranks) opt.ndevices = opt.nranks;
	if (!report_open(opt.json)) return 1;
	struct group_options ours = { .name = "telpher", .path = opt.paths[0], .nranks = opt.nranks, .ndevices = opt.ndevices, .inits = opt.inits,
		.threads = opt.threads, .registers = opt.registers, .buffers = opt.buffers, .most_bytes = opt.max_bytes, .type = opt.type };
	bool right = opt.tunes ? run_tune(&ours, there) : run_collectives(&ours, there);
	report_close();
	if (!right) fprintf(stderr, "bench_gpu: some results were wrong, or could not be kept\n");
	return right ? 0 : 1;
}

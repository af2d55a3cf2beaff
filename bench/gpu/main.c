/* See README.md beside this. */
#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "bench.h"

enum { MOST_GROUPS = 8 };

static struct {
	int nranks, ndevices, repeats, calls;
	size_t min_bytes, max_bytes, factor;
	bool threads, quick, cold, tunes, registers, buffers, colls[NCOLLS], modes[NMODES];
	ncclDataType_t type;
	const char *json, *paths[2];
} opt = { .nranks = 2, .ndevices = 0, .repeats = 11, .calls = 0, .min_bytes = 8, .max_bytes = (size_t)64 << 20, .factor = 8, .cold = true,
	.registers = true, .type = ncclFloat32 };

static struct group *groups[MOST_GROUPS];
static pid_t pids[MOST_GROUPS][MOST_RANKS];
static int ngroups;
static FILE *json;

static size_t parse_bytes(const char *text)
{
	char *end;
	double v = strtod(text, &end);
	if (*end == 'K' || *end == 'k') v *= 1 << 10;
	else if (*end == 'M' || *end == 'm') v *= 1 << 20;
	else if (*end == 'G' || *end == 'g') v *= 1 << 30;
	return (size_t)v;
}

static void usage(FILE *to)
{
	fprintf(to, "usage: bench_gpu --ours FILE [--nccl FILE] [options]\n"
		"  --ranks N         ranks (2); --devices N: devices that they take in turn (all there are)\n"
		"  --processes, --threads  what ranks are (processes)\n"
		"  --min B --max B   sizes (8 to 64M; 8 to 1G and more where memory allows), each --factor F (8) times the one before\n"
		"  --only LIST       of all_reduce,all_gather,reduce_scatter,broadcast,reduce,all_to_all,gather,scatter,send_recv\n"
		"  --mode LIST       of eager,graph (both)\n"
		"  --bf16            bfloat16 instead of float\n"
		"  --no-cold --no-registered   leave these out\n"
		"  --buffers                   registered as buffers (ncclCommRegister), not as windows\n"
		"  --repeats N       the median of so many (11); --calls N: in each (by size)\n"
		"  --tune            each kind of kernel alone, graphs, and the table of crossovers as TELPHER_CUDA_TABLE reads it\n"
		"  --quick           few calls, small sizes: a look whether all works\n"
		"  --json FILE       one line a measurement\n"
		"Exit 1: something failed or gave a wrong result. TELPHER_CUDA_LIBRARY: another libcuda.so.1.\n");
}

static bool in_list(const char *list, const char *name)
{
	size_t n = strlen(name);
	for (const char *p = list; (p = strstr(p, name)); p += n)
		if ((p == list || p[-1] == ',') && (p[n] == 0 || p[n] == ',')) return true;
	return false;
}

static int parse(int argc, char **argv)
{
	enum { OURS, NCCL, RANKS, DEVICES, THREADS, PROCESSES, MIN, MAX, FACTOR, ONLY, MODE, BF16, NO_COLD, NO_REGISTERED, BUFFERS, REPEATS, CALLS, QUICK, TUNE, JSON, HELP };
	static const struct option options[] = { { "ours", 1, 0, OURS }, { "nccl", 1, 0, NCCL }, { "ranks", 1, 0, RANKS }, { "devices", 1, 0, DEVICES },
		{ "threads", 0, 0, THREADS }, { "processes", 0, 0, PROCESSES }, { "min", 1, 0, MIN }, { "max", 1, 0, MAX }, { "factor", 1, 0, FACTOR }, { "only", 1, 0, ONLY }, { "mode", 1, 0, MODE },
		{ "bf16", 0, 0, BF16 }, { "no-cold", 0, 0, NO_COLD }, { "no-registered", 0, 0, NO_REGISTERED }, { "buffers", 0, 0, BUFFERS }, { "repeats", 1, 0, REPEATS },
		{ "calls", 1, 0, CALLS }, { "quick", 0, 0, QUICK }, { "tune", 0, 0, TUNE }, { "json", 1, 0, JSON }, { "help", 0, 0, HELP }, { 0, 0, 0, 0 } };
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
		case QUICK: opt.quick = true; break;
		case JSON: opt.json = optarg; break;
		case HELP: usage(stdout); exit(0);
		default: usage(stderr); return 2;
		}
	}
	for (int c = 0; c < NCOLLS; c++) opt.colls[c] = !only || in_list(only, coll_names[c]);
	opt.modes[EAGER] = in_list(mode, "eager");
	opt.modes[GRAPH] = in_list(mode, "graph");
	if (opt.quick) {
		opt.repeats = opt.repeats < 3 ? opt.repeats : 3;
		opt.calls = opt.calls ? opt.calls : 5;
		opt.max_bytes = opt.max_bytes < 1 << 20 ? opt.max_bytes : 1 << 20;
	}
	if (!opt.paths[0] || opt.nranks < 1 || opt.nranks > MOST_RANKS || opt.repeats < 1 || opt.repeats > MOST_REPEATS || opt.factor < 2 ||
		opt.min_bytes < 8 || opt.max_bytes < opt.min_bytes) {
		usage(stderr);
		return 2;
	}
	return 0;
}

/* ---- groups ---- */

struct seat { struct group *group; int rank; };
static void *run_seat(void *arg)
{
	struct seat *seat = arg;
	rank_run(seat->group, seat->rank);
	return NULL;
}

/* In a child: a rank, or all of a group's. */
static void be_group(struct group *g, int rank)
{
	static struct seat seats[MOST_RANKS];
	pthread_t threads[MOST_RANKS];
	if (!cuda_open() || !library_open(&g->library)) _exit(1);
	if (!g->threads) {
		rank_run(g, rank);
		_exit(0);
	}
	for (int r = 0; r < g->nranks; r++) {
		seats[r] = (struct seat){ g, r };
		pthread_create(&threads[r], NULL, run_seat, &seats[r]);
	}
	for (int r = 0; r < g->nranks; r++) pthread_join(threads[r], NULL);
	_exit(0);
}

static int processes_of(const struct group *g) { return g->threads ? 1 : g->nranks; }

static void stop_all(void)
{
	for (int i = 0; i < ngroups; i++)
		for (int r = 0; r < processes_of(groups[i]); r++)
			if (pids[i][r] > 0) kill(pids[i][r], SIGKILL);
}

/* Until all ranks of a group have ended what they do; a rank that died ends the run. */
static void await_ranks(int i, uint32_t times)
{
	struct group *g = groups[i];
	uint32_t want = (uint32_t)g->nranks * times;
	while (atomic_load_explicit(&g->ended, memory_order_acquire) < want) {
		struct timespec pause = { 0, 200000 };
		int status;
		nanosleep(&pause, NULL);
		pid_t pid = waitpid(-1, &status, WNOHANG);
		if (pid <= 0 || (WIFEXITED(status) && WEXITSTATUS(status) == 0)) continue;
		fprintf(stderr, "%s: a rank's process (%d) ended with status 0x%x\n", g->library.name, (int)pid, status);
		stop_all();
		exit(1);
	}
}

struct group *open_group(const char *name, const char *path, int nranks, int ndevices, bool registers)
{
	struct group *g = mmap(NULL, sizeof(*g), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (g == MAP_FAILED) abort();
	*g = (struct group){ .library = { .name = name, .path = path }, .nranks = nranks, .ndevices = ndevices, .threads = opt.threads,
		.registers = registers, .buffers = opt.buffers, .most_bytes = opt.max_bytes, .type = opt.type };
	pthread_barrierattr_t shared;
	pthread_barrierattr_init(&shared);
	pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
	pthread_barrier_init(&g->barrier, &shared, (unsigned)nranks);
	int i = ngroups++;
	groups[i] = g;
	for (int r = 0; r < processes_of(g); r++)
		if ((pids[i][r] = fork()) == 0) be_group(g, r);
	await_ranks(i, 1);
	return g;
}

/* ---- one measurement ---- */

static int compare_doubles(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

static double median_of_slowest(const struct group *g, bool host)
{
	double slowest[MOST_REPEATS];
	for (int i = 0; i < g->cell.repeats; i++) {
		slowest[i] = 0;
		for (int r = 0; r < g->nranks; r++) {
			double v = host ? g->times[r].host_us[i] : g->times[r].device_us[i];
			if (v > slowest[i]) slowest[i] = v;
		}
	}
	qsort(slowest, (size_t)g->cell.repeats, sizeof(double), compare_doubles);
	return slowest[g->cell.repeats / 2];
}

static uint32_t orders[MOST_GROUPS];
struct answer measure_cell(int i, const struct cell *cell)
{
	struct group *g = groups[i];
	struct answer a = { .done = true };
	g->cell = *cell;
	word_raise(&g->order);
	await_ranks(i, ++orders[i] + 1);
	for (int r = 0; r < g->nranks; r++) {
		a.wrong |= g->times[r].wrong;
		if (g->times[r].device_us[0] < 0) a.done = false;
		if (g->times[r].blocks > a.blocks) a.blocks = g->times[r].blocks;
		if (g->times[r].kernels > a.kernels) a.kernels = g->times[r].kernels;
		if (g->times[r].shared > a.shared) a.shared = g->times[r].shared;
	}
	a.device_us = median_of_slowest(g, false);
	a.host_us = median_of_slowest(g, true);
	if (json && a.done)
		fprintf(json, "{\"library\":\"%s\",\"collective\":\"%s\",\"bytes\":%zu,\"ranks\":%d,\"devices\":%d,\"type\":\"%s\",\"mode\":\"%s\",\"registered\":%s,"
			"\"cold\":%s,\"device_us\":%.3f,\"host_us\":%.3f,\"busbw_gb_s\":%.3f,\"blocks\":%d,\"kernels\":%d,\"right\":%s}\n", g->library.name,
			coll_names[cell->coll], cell->bytes, g->nranks, g->ndevices, g->type == ncclFloat32 ? "float" : "bfloat16", cell->mode == GRAPH ? "graph" : "eager",
			cell->registered ? "true" : "false", cell->cold ? "true" : "false", a.device_us, a.host_us,
			a.device_us > 0 ? (double)cell->bytes / a.device_us / 1e3 * coll_bus_factor(cell->coll, g->nranks) : 0, a.blocks, a.kernels,
			a.wrong ? "false" : "true");
	return a;
}

int calls_for(size_t bytes)
{
	if (opt.calls) return opt.calls;
	return bytes <= 1 << 20 ? 200 : bytes <= 64 << 20 ? 20 : 5;
}

static const char *text_of(size_t bytes, char *to)
{
	if (bytes >= 1 << 30 && bytes % (1 << 30) == 0) sprintf(to, "%zu GB", bytes >> 30);
	else if (bytes >= 1 << 20 && bytes % (1 << 20) == 0) sprintf(to, "%zu MB", bytes >> 20);
	else if (bytes >= 1 << 10 && bytes % (1 << 10) == 0) sprintf(to, "%zu KB", bytes >> 10);
	else sprintf(to, "%zu B", bytes);
	return to;
}

static bool print_answer(const struct answer *a)
{
	if (!a->done) printf(" %9s %7s %4s |", "-", "-", "");
	else if (a->wrong) printf(" %9s %7s %4s |", "WRONG", "", "");
	else if (a->blocks) printf(" %9.2f %7.2f %4d |", a->device_us, a->host_us, a->blocks);
	else printf(" %9.2f %7.2f %4s |", a->device_us, a->host_us, "");
	return !a->wrong;
}

static bool run_table(enum coll coll, bool beside)
{
	static const struct { enum mode mode; bool registered, cold; const char *name; } kinds[] = { { GRAPH, false, false, "graph" },
		{ GRAPH, false, true, "graph, cold" }, { GRAPH, true, false, "graph, registered" }, { GRAPH, true, true, "graph, reg., cold" },
		{ EAGER, false, false, "eager" }, { EAGER, true, false, "eager, registered" } };
	bool right = true;
	char text[32];
	printf("\n%s, %d ranks: us a call on the device (slowest rank), us of the host's, blocks\n%-10s %-18s | %-22s |%s\n", coll_names[coll], groups[0]->nranks,
		"bytes", "", groups[0]->library.name, beside ? " nccl                   | ratio" : "");
	for (size_t bytes = opt.min_bytes; bytes <= opt.max_bytes; bytes *= opt.factor) {
		for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
			if (!opt.modes[kinds[i].mode] || (kinds[i].cold && !opt.cold) || (kinds[i].registered && !opt.registers)) continue;
			struct cell cell = { coll, bytes, kinds[i].mode, kinds[i].registered, kinds[i].cold, calls_for(bytes), opt.repeats };
			struct answer ours = measure_cell(0, &cell), theirs = { .done = false };
			if (beside) theirs = measure_cell(1, &cell);
			printf("%-10s %-18s |", text_of(bytes, text), kinds[i].name);
			right &= print_answer(&ours);
			if (beside) {
				right &= print_answer(&theirs);
				if (ours.done && theirs.done && !ours.wrong && !theirs.wrong) printf(" %5.2f", theirs.device_us / ours.device_us);
			}
			printf("\n");
			fflush(stdout);
		}
	}
	return right;
}

/* ---- the rest ---- */

static double most(const double *values, int n)
{
	double m = 0;
	for (int i = 0; i < n; i++)
		if (values[i] > m) m = values[i];
	return m;
}

static void close_group(int i)
{
	struct group *g = groups[i];
	struct stat file = { 0 };
	g->quit = true;
	word_raise(&g->order);
	await_ranks(i, orders[i] + 2);
	for (int r = 0; r < processes_of(g); r++) waitpid(pids[i][r], NULL, 0);
	stat(g->library.path, &file);
	printf("%s: version %d, %d ranks on %d devices: CUDA %.0f ms, init %.1f ms (slowest rank), destroy %.1f ms; %.1f MB of the first device's memory "
		"(all its ranks' communicators); library %.1f MB\n", g->library.name, g->version, g->nranks, g->ndevices, most(g->cuda_ms, g->nranks),
		most(g->init_ms, g->nranks), most(g->destroy_ms, g->nranks), (double)g->memory_bytes / (1 << 20), (double)file.st_size / (1 << 20));
	if (json)
		fprintf(json, "{\"library\":\"%s\",\"path\":\"%s\",\"version\":%d,\"ranks\":%d,\"devices\":%d,\"device\":\"%s\",\"sms\":%d,\"cuda_ms\":%.2f,"
			"\"init_ms\":%.2f,\"destroy_ms\":%.2f,\"memory_bytes\":%lld,\"library_bytes\":%lld}\n", g->library.name, g->library.path, g->version, g->nranks,
			g->ndevices, g->device_name, g->sms, most(g->cuda_ms, g->nranks), most(g->init_ms, g->nranks), most(g->destroy_ms, g->nranks),
			(long long)g->memory_bytes, (long long)file.st_size);
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

int main(int argc, char **argv)
{
	int bad = parse(argc, argv), there;
	bool right = true;
	if (bad) return bad;
	setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);     /* ranks that share a GPU need queues of their own */
	if (!(there = count_devices())) {
		fprintf(stderr, "no CUDA device here\n");
		return 77;
	}
	if (!opt.ndevices || opt.ndevices > there) opt.ndevices = there;
	if (opt.ndevices > opt.nranks) opt.ndevices = opt.nranks;
	if (opt.json && !(json = fopen(opt.json, "w"))) {
		fprintf(stderr, "%s: %s\n", opt.json, strerror(errno));
		return 1;
	}
	bool beside = false;
	if (opt.tunes) {
		tune_open(opt.paths[0], opt.nranks, opt.ndevices, opt.min_bytes, opt.max_bytes, opt.factor);
	} else {
		open_group("telpher", opt.paths[0], opt.nranks, opt.ndevices, opt.registers);
	}
	if (opt.paths[1] && !opt.tunes) {
		beside = opt.ndevices == opt.nranks;
		open_group("nccl", opt.paths[1], beside ? opt.nranks : 1, beside ? opt.ndevices : 1, opt.registers);
	}
	printf("%s, %d multiprocessors; %d ranks as %s on %d of %d devices, %s\n", groups[0]->device_name, groups[0]->sms, opt.nranks,
		opt.threads ? "threads" : "processes", opt.ndevices, there, opt.type == ncclFloat32 ? "float" : "bfloat16");
	if (ngroups == 2 && !beside)
		printf("NCCL refuses several ranks on one GPU: ours alone, and what a call and an init of one rank cost there\n");
	if (opt.tunes) tune(groups[0], opt.repeats);
	for (int c = 0; c < NCOLLS && !opt.tunes; c++)
		if (opt.colls[c]) right &= run_table((enum coll)c, beside);
	printf("\n");
	if (ngroups == 2 && !beside) {
		struct cell cell = { ALL_REDUCE, 8, EAGER, false, false, calls_for(8), opt.repeats };
		struct answer one = measure_cell(1, &cell);
		printf("nccl, 1 rank: an all-reduce of 8 B costs %.2f us of the host's, %.2f on the device\n", one.host_us, one.device_us);
	}
	for (int i = 0; i < ngroups; i++) close_group(i);
	if (json) fclose(json);
	if (!right) fprintf(stderr, "some results were wrong\n");
	return right ? 0 : 1;
}

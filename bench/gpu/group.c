/* Groups of ranks: children of this process, which never uses CUDA itself. */
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "bench.h"

static struct group *groups[MOST_GROUPS];
static pid_t pids[MOST_GROUPS][MOST_RANKS];
static uint32_t orders[MOST_GROUPS];
static int ngroups;

struct group *group_of(int number) { return groups[number]; }

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
	/* Ranks that share a GPU in one process need queues of their own. Processes keep the default: under MPS more than that is too much for four of them. */
	if (g->threads) setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
	look_open();
	if (!cuda_open() || !library_open(&g->library)) _exit(1);
	if (!g->threads) {
		rank_run(g, rank);
		look_close();
		_exit(0);
	}
	for (int r = 0; r < g->nranks; r++) {
		seats[r] = (struct seat){ g, r };
		pthread_create(&threads[r], NULL, run_seat, &seats[r]);
	}
	for (int r = 0; r < g->nranks; r++) pthread_join(threads[r], NULL);
	look_close();
	_exit(0);
}

static int processes_of(const struct group *g) { return g->threads ? 1 : g->nranks; }

static void stop_all(void)
{
	for (int i = 0; i < ngroups; i++)
		for (int r = 0; r < processes_of(groups[i]); r++)
			if (pids[i][r] > 0) kill(pids[i][r], SIGKILL);
}

/* It has been waited for: its number may soon be another process's. */
static void forget(pid_t pid)
{
	for (int i = 0; i < ngroups; i++)
		for (int r = 0; r < processes_of(groups[i]); r++)
			if (pids[i][r] == pid) pids[i][r] = 0;
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
		if (pid > 0) forget(pid);
		if (pid <= 0 || (WIFEXITED(status) && WEXITSTATUS(status) == 0)) continue;
		fprintf(stderr, "%s: a rank's process (%d) ended with status 0x%x\n", g->library.name, (int)pid, status);
		stop_all();
		exit(1);
	}
}

int open_group(const struct group_options *o)
{
	struct group *g = ngroups < MOST_GROUPS ? mmap(NULL, sizeof(*g), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0) : MAP_FAILED;
	const char *spoiled = getenv("BENCH_GPU_SPOIL");
	if (g == MAP_FAILED) abort();
	*g = (struct group){ .library = { .name = o->name, .path = o->path }, .nranks = o->nranks, .ndevices = o->ndevices, .inits = o->inits,
		.threads = o->threads, .registers = o->registers, .buffers = o->buffers, .most_bytes = o->most_bytes, .type = o->type,
		.spoiled = spoiled ? atoi(spoiled) : -1 };
	pthread_barrierattr_t shared;
	pthread_barrierattr_init(&shared);
	pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
	pthread_barrier_init(&g->barrier, &shared, (unsigned)o->nranks);
	int i = ngroups++;
	groups[i] = g;
	fflush(NULL);
	for (int r = 0; r < processes_of(g); r++)
		if ((pids[i][r] = fork()) == 0) be_group(g, r);
	await_ranks(i, 1);
	return i;
}

void close_group(int i)
{
	struct group *g = groups[i];
	g->quit = true;
	word_raise(&g->order);
	await_ranks(i, orders[i] + 2);
	for (int r = 0; r < processes_of(g); r++) {
		if (pids[i][r]) waitpid(pids[i][r], NULL, 0);
		pids[i][r] = 0;
	}
}

/* ---- one measurement ---- */

static int compare_doubles(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

double median(double *values, int n)
{
	qsort(values, (size_t)n, sizeof(double), compare_doubles);
	return n ? values[n / 2] : 0;
}

/* what: the offset of its times in struct rank_times. */
static double median_of_slowest(const struct group *g, size_t what)
{
	double slowest[MOST_REPEATS];
	for (int i = 0; i < g->cell.repeats; i++) {
		slowest[i] = 0;
		for (int r = 0; r < g->nranks; r++) {
			double v = ((const double *)(const void *)((const char *)&g->times[r] + what))[i];
			if (v > slowest[i]) slowest[i] = v;
		}
	}
	return median(slowest, g->cell.repeats);
}

struct answer measure_cell(int i, const struct cell *cell)
{
	struct group *g = groups[i];
	struct answer a = { .done = true };
	g->cell = *cell;
	word_raise(&g->order);
	await_ranks(i, ++orders[i] + 1);
	a.ran = g->times[0].ran;
	for (int r = 0; r < g->nranks; r++) {
		const struct rank_times *t = &g->times[r];
		a.wrong |= t->wrong;
		if (t->absent) a.done = false;
		if (t->ran.blocks > a.ran.blocks) a.ran = t->ran;
	}
	if (a.done && !a.wrong) {
		a.device_us = median_of_slowest(g, offsetof(struct rank_times, device_us));
		a.host_us = median_of_slowest(g, offsetof(struct rank_times, host_us));
		a.launch_us = median_of_slowest(g, offsetof(struct rank_times, launch_us));
		a.event_us = median_of_slowest(g, offsetof(struct rank_times, event_us));
	}
	report_cell(g, cell, &a);
	return a;
}

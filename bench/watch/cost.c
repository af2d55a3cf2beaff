/* What a watched call costs more than one that isn't: two jobs of two ranks on this machine, one with the watch over the pace as it is by default and one
 * without (TELPHER_WATCH=0), take turns of a fraction of a millisecond in one run. Printed for each size: the least and the median time of a call over all turns, of
 * both, and their ratios. On a busy machine the least is the one to look at. */
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "nccl.h"

#define RANKS 2
#define TURNS 600
#define MOST_BYTES ((size_t)1 << 20)

struct order { size_t bytes; int calls; };
struct worker { int to, from; };

static double now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void must(bool good, const char *what)
{
	if (good) return;
	fprintf(stderr, "%s failed: %s\n", what, ncclGetLastError(NULL));
	exit(1);
}

static void work(int rank, const ncclUniqueId *id, int in, int out)
{
	ncclComm_t comm;
	struct order order;
	float *data = calloc(1, MOST_BYTES), *sum = calloc(1, MOST_BYTES);
	must(data && sum && ncclCommInitRank(&comm, RANKS, *id, rank) == ncclSuccess, "init");
	while (read(in, &order, sizeof(order)) == (ssize_t)sizeof(order)) {
		size_t count = order.bytes / sizeof(float);
		/* The first finds the other rank. */
		must(ncclAllReduce(data, sum, count, ncclFloat32, ncclSum, comm, NULL) == ncclSuccess, "all-reduce");
		double begun = now_ns();
		for (int i = 0; i < order.calls; i++) must(ncclAllReduce(data, sum, count, ncclFloat32, ncclSum, comm, NULL) == ncclSuccess, "all-reduce");
		double each = (now_ns() - begun) / order.calls;
		must(write(out, &each, sizeof(each)) == (ssize_t)sizeof(each), "write");
	}
	ncclCommDestroy(comm);
	exit(0);
}

/* The root's process must know of the job: it is the first rank's. */
static void start(struct worker *workers, const char *watch)
{
	int ids[2];
	must(pipe(ids) == 0, "pipe");
	for (int r = 0; r < RANKS; r++) {
		int to[2], from[2];
		must(pipe(to) == 0 && pipe(from) == 0, "pipe");
		pid_t pid = fork();
		if (pid == 0) {
			ncclUniqueId id;
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			close(to[1]);
			for (int other = 0; other < r; other++) close(workers[other].to);
			setenv("TELPHER_WATCH", watch, 1);
			if (r == 0) must(ncclGetUniqueId(&id) == ncclSuccess && write(ids[1], &id, sizeof(id)) == (ssize_t)sizeof(id), "a unique id");
			else must(read(ids[0], &id, sizeof(id)) == (ssize_t)sizeof(id), "a unique id");
			work(r, &id, to[0], from[1]);
		}
		close(to[0]);
		close(from[1]);
		workers[r] = (struct worker){ to[1], from[0] };
	}
}

static double turn(const struct worker *workers, struct order order)
{
	double each[RANKS];
	for (int r = 0; r < RANKS; r++) must(write(workers[r].to, &order, sizeof(order)) == (ssize_t)sizeof(order), "write");
	for (int r = 0; r < RANKS; r++) must(read(workers[r].from, &each[r], sizeof(each[r])) == (ssize_t)sizeof(each[r]), "a rank");
	return each[0];
}

static int compare(const void *left, const void *right)
{
	const double *a = left, *b = right;
	return (*a > *b) - (*a < *b);
}

int main(void)
{
	static const struct order orders[] = { { 8, 50 }, { 32 << 10, 10 }, { 256 << 10, 4 }, { 1 << 20, 2 } };
	static double times[2][TURNS];
	struct worker watched[RANKS], free_[RANKS];
	setenv("TELPHER_DEVICE", "host", 1);
	start(watched, "1");
	start(free_, "0");
	printf("%10s %14s %14s %8s %14s %14s %8s\n", "bytes", "watched ns", "unwatched ns", "ratio", "median", "median", "ratio");
	for (size_t o = 0; o < sizeof(orders) / sizeof(orders[0]); o++) {
		for (int t = 0; t < TURNS; t++) {
			times[t % 2][t] = turn(t % 2 ? free_ : watched, orders[o]);
			times[!(t % 2)][t] = turn(t % 2 ? watched : free_, orders[o]);
		}
		for (int side = 0; side < 2; side++) qsort(times[side], TURNS, sizeof(double), compare);
		printf("%10zu %14.1f %14.1f %8.3f %14.1f %14.1f %8.3f\n", orders[o].bytes, times[0][0], times[1][0], times[0][0] / times[1][0], times[0][TURNS / 2],
			times[1][TURNS / 2], times[0][TURNS / 2] / times[1][TURNS / 2]);
		fflush(stdout);
	}
	for (int r = 0; r < RANKS; r++) {
		close(watched[r].to);
		close(free_[r].to);
	}
	while (wait(NULL) > 0) {}
	return 0;
}

/* One rank of one implementation: does what compare.py says, over a Unix socket, and sleeps in between, so that the
 * implementations can take turns in one run without disturbing each other.
 *
 * Usage: loop SOCKET DIR BIND [RANK NRANKS]. BIND 1: rank r stays on the r-th processor.
 *   "run COLLECTIVE COUNT CALLS BATCHES CHECK": per batch a barrier, then CALLS calls back to back, out of place where the
 *   collective has two buffers. Answer: microseconds a call of each batch, in one line, or "wrong …", or "failed".
 *   "stop" or the end of the stream: leaves. */
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>
#include "loop.h"

static int rank = -1, nranks;

static double now_us(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static int join_driver(const char *path)
{
	struct sockaddr_un to = { .sun_family = AF_UNIX };
	if (strlen(path) >= sizeof(to.sun_path)) {
		fprintf(stderr, "the socket's path is too long: %s\n", path);
		return -1;
	}
	strcpy(to.sun_path, path);
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd < 0 || connect(fd, (struct sockaddr *)&to, sizeof(to)) != 0) {
		perror(path);
		return -1;
	}
	return fd;
}

/* Binds to the place-th processor of those the process may use. */
static void bind_to(int place)
{
	cpu_set_t allowed, one;
	if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0)
		return;
	for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
		if (CPU_ISSET(cpu, &allowed) && place-- == 0) {
			CPU_ZERO(&one);
			CPU_SET(cpu, &one);
			sched_setaffinity(0, sizeof(one), &one);
		}
}

/* Whole numbers small enough that every sum is exact; of rank r, block to or from, element i. */
static float element(int of, int block, size_t i)
{
	return (float)(of + 3 * block + (int)(i % 7));
}

static void expect(enum peer_collective which, const float *out, size_t count, size_t *wrong)
{
	const int blocks = which == PEER_ALL_GATHER || which == PEER_ALL_TO_ALL ? nranks : 1;
	for (int b = 0; b < blocks; b++)
		for (size_t i = 0; i < count; i++) {
			float want = 0;
			if (which == PEER_ALL_REDUCE || which == PEER_REDUCE_SCATTER)
				for (int r = 0; r < nranks; r++)
					want += element(r, which == PEER_REDUCE_SCATTER ? rank : 0, i);
			else if (which == PEER_BROADCAST)
				want = element(0, 0, i);
			else
				want = element(b, which == PEER_ALL_TO_ALL ? rank : 0, i);
			*wrong += out[(size_t)b * count + i] != want;
		}
}

static float *map(size_t bytes)
{
	void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	return p == MAP_FAILED ? NULL : p;
}

static int measure(enum peer_collective which, float *in, float *out, size_t count, int calls, int batches, FILE *to)
{
	for (int b = 0; b < batches; b++) {
		if (peer_barrier() != 0)
			return -1;
		double from = now_us();
		for (int i = 0; i < calls; i++)
			if (peer_call(which, in, out, count) != 0)
				return -1;
		fprintf(to, "%.4f%c", (now_us() - from) / calls, b + 1 == batches ? '\n' : ' ');
	}
	return 0;
}

static int turn(enum peer_collective which, size_t count, int calls, int batches, int check, FILE *to)
{
	const int wide_in = which == PEER_REDUCE_SCATTER || which == PEER_ALL_TO_ALL;
	const int wide_out = which == PEER_ALL_GATHER || which == PEER_ALL_TO_ALL;
	const size_t in_count = count * (size_t)(wide_in ? nranks : 1), out_count = count * (size_t)(wide_out ? nranks : 1);
	size_t wrong = 0;
	float *in = map(in_count * sizeof(float)), *out = map(out_count * sizeof(float));
	if (in == NULL || out == NULL) {
		fprintf(stderr, "no memory for %zu bytes\n", (in_count + out_count) * sizeof(float));
		return -1;
	}
	for (int b = 0; b < (wide_in ? nranks : 1); b++)
		for (size_t i = 0; i < count; i++)
			in[(size_t)b * count + i] = element(rank, b, i);
	if (which == PEER_BROADCAST && rank == 0)
		memcpy(out, in, count * sizeof(float));
	int result = peer_call(which, in, out, count);
	if (result == 0 && check)
		expect(which, out, count, &wrong);
	if (wrong != 0)
		fprintf(to, "wrong %zu of %zu elements\n", wrong, out_count);
	/* everyone measures, wrong or not: the others are in it already */
	FILE *sink = wrong != 0 ? fopen("/dev/null", "w") : to;
	if (result == 0)
		result = sink == NULL ? -1 : measure(which, in, out, count, calls, batches, sink);
	if (sink != NULL && sink != to)
		fclose(sink);
	munmap(in, in_count * sizeof(float));
	munmap(out, out_count * sizeof(float));
	return result;
}

int main(int argc, char **argv)
{
	if (argc != 4 && argc != 6) {
		fprintf(stderr, "usage: loop SOCKET DIR BIND [RANK NRANKS]; started by run.sh\n");
		return 2;
	}
	if (argc == 6) {
		rank = atoi(argv[4]);
		nranks = atoi(argv[5]);
	}
	/* threads that the implementation starts later inherit the binding; where its own launcher tells the rank, there is none yet */
	if (atoi(argv[3]) && rank >= 0)
		bind_to(rank);
	if (peer_start(argv[2], &rank, &nranks) != 0)
		return 1;
	if (atoi(argv[3]) && argc == 4)
		bind_to(rank);
	int fd = join_driver(argv[1]);
	FILE *from = fd < 0 ? NULL : fdopen(fd, "r"), *to = fd < 0 ? NULL : fdopen(dup(fd), "w");
	if (from == NULL || to == NULL)
		return 1;
	fprintf(to, "hello %d %d\n", rank, nranks);
	fflush(to);
	char line[256];
	int result = 0;
	while (result == 0 && fgets(line, sizeof(line), from) != NULL && strncmp(line, "stop", 4) != 0) {
		unsigned which;
		size_t count;
		int calls, batches, check;
		if (sscanf(line, "run %u %zu %d %d %d", &which, &count, &calls, &batches, &check) != 5 || which >= PEER_COLLECTIVES) {
			fprintf(stderr, "not understood: %s", line);
			return 2;
		}
		result = turn((enum peer_collective)which, count, calls, batches, check, to);
		if (result != 0)
			fprintf(to, "failed\n");
		fflush(to);
	}
	if (result == 0)
		peer_stop();
	return result != 0;
}

/* What the machine itself allows, as the yardstick of the software card: copies of 1 MiB within a process and into another one,
 * and two processes that answer each other by UDP over loopback while both spin. Prints `name value` a line: Gb/s, or us one way. */
#include <arpa/inet.h>
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { BYTES = 1 << 20, RUN_MS = 200 };

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void *memory(void)
{
	void *at = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	if (at == MAP_FAILED) {
		perror("mmap");
		exit(1);
	}
	memset(at, 1, BYTES);
	return at;
}

static void copies(void)
{
	char *from = memory(), *to = memory();
	double start = now(), time;
	long count = 0;
	do {
		memcpy(to, from, BYTES);
		__asm__ volatile("" ::: "memory");
		count++;
	} while ((time = now() - start) < RUN_MS * 1e-3);
	printf("memcpy_gbps %.2f\n", (double)count * BYTES * 8 / time * 1e-9);
}

/* A child with the same memory at the same place, as large or as small a write into it. */
static double vm_write(pid_t child, char *from, size_t bytes)
{
	struct iovec local = { from, bytes }, remote = { from, bytes };
	double start = now(), time;
	long count = 0;
	do {
		if (process_vm_writev(child, &local, 1, &remote, 1, 0) != (ssize_t)bytes) {
			fprintf(stderr, "process_vm_writev: %s\n", strerror(errno));
			return 0;
		}
		count++;
	} while ((time = now() - start) < RUN_MS * 1e-3);
	return time / (double)count;
}

static void vm_writes(void)
{
	char *buffer = memory();
	pid_t child = fork();
	if (child == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		memset(buffer, 2, BYTES);
		for (;;)
			pause();
	}
	usleep(20000);
	double large = vm_write(child, buffer, BYTES), small = vm_write(child, buffer, 8);
	if (large > 0)
		printf("vm_writev_gbps %.2f\n", BYTES * 8 / large * 1e-9);
	if (small > 0)
		printf("vm_writev_8_us %.3f\n", small * 1e6);
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
}

static int bound(struct sockaddr_in *addr)
{
	socklen_t length = sizeof(*addr);
	int fd = socket(AF_INET, SOCK_DGRAM, 0);
	*addr = (struct sockaddr_in){ .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	if (fd < 0 || bind(fd, (struct sockaddr *)addr, sizeof(*addr)) < 0 || getsockname(fd, (struct sockaddr *)addr, &length) < 0) {
		perror("UDP");
		exit(1);
	}
	return fd;
}

static void receive(int fd)
{
	char bytes[64];
	while (recv(fd, bytes, sizeof(bytes), MSG_DONTWAIT) < 0)
		;
}

static void udp(void)
{
	enum { ROUNDS = 20000 };
	struct sockaddr_in here, there;
	char bytes[40] = { 0 };
	int ours = bound(&here), theirs = bound(&there);
	pid_t child = fork();
	if (child == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		for (;;) {
			receive(theirs);
			sendto(theirs, bytes, sizeof(bytes), 0, (struct sockaddr *)&here, sizeof(here));
		}
	}
	static double times[ROUNDS];
	for (int i = 0; i < ROUNDS; i++) {
		double start = now();
		sendto(ours, bytes, sizeof(bytes), 0, (struct sockaddr *)&there, sizeof(there));
		receive(ours);
		times[i] = now() - start;
	}
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
	/* The median: insertion into buckets of 10 ns is exact enough. */
	static int buckets[100000];
	int seen = 0, k = 0;
	for (int i = 0; i < ROUNDS; i++)
		buckets[(int)(times[i] * 1e8) < 100000 ? (int)(times[i] * 1e8) : 99999]++;
	while ((seen += buckets[k]) < ROUNDS / 2)
		k++;
	printf("udp_us %.3f\n", (k + 0.5) * 0.01 / 2);
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";
	if (!strcmp(what, "copy"))
		copies();
	else if (!strcmp(what, "vm"))
		vm_writes();
	else if (!strcmp(what, "udp"))
		udp();
	else
		return fprintf(stderr, "usage: %s copy|vm|udp\n", argv[0]), 2;
	return 0;
}

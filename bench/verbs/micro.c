/* What the machine itself allows, as the yardstick of the software card: copies of 1 MiB within a process and into another one, many
 * small ones a call, a flag in shared memory that two processes hand to and fro, and UDP over loopback, as two processes that answer
 * each other while both spin, and as packets of 4 KB in segmented pieces, with the CRC that RoCE asks for made and checked, and without.
 * Prints `name value` a line: Gb/s, us one way, or millions a second. */
#include <arpa/inet.h>
#include <errno.h>
#include <linux/udp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
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
#include "verbs/crc.h"

enum { BYTES = 1 << 20, RUN_MS = 200, LIST = 16 };

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

/* LIST pieces of 8 bytes a call. */
static double vm_write_list(pid_t child, char *from)
{
	struct iovec local[LIST], remote[LIST];
	for (int i = 0; i < LIST; i++)
		local[i] = remote[i] = (struct iovec){ from + 64 * i, 8 };
	double start = now(), time;
	long count = 0;
	do {
		if (process_vm_writev(child, local, LIST, remote, LIST, 0) != 8 * LIST)
			return 0;
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
	double large = vm_write(child, buffer, BYTES), small = vm_write(child, buffer, 8), listed = vm_write_list(child, buffer);
	if (large > 0)
		printf("vm_writev_gbps %.2f\n", BYTES * 8 / large * 1e-9);
	if (small > 0)
		printf("vm_writev_8_us %.3f\n", small * 1e6);
	if (listed > 0)
		printf("vm_writev_list_mps %.3f\n", LIST / listed * 1e-6);
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
}

/* The median of rounds there and back, in ns: insertion into buckets of 10 ns is exact enough. Half of it is one way. */
enum { BUCKETS = 100000 };
static int buckets[BUCKETS];
static void note(double seconds) { buckets[seconds * 1e8 < BUCKETS ? (int)(seconds * 1e8) : BUCKETS - 1]++; }
static double one_way_us(int rounds)
{
	int seen = 0, k = 0;
	while ((seen += buckets[k]) < rounds / 2)
		k++;
	return (k + 0.5) * 0.01 / 2;
}

/* A batch a sample: a round is too short for the clock. */
static void flags(void)
{
	enum { SAMPLES = 2000, BATCH = 50 };
	struct line { _Alignas(128) _Atomic uint32_t turn; } *at = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (at == MAP_FAILED) {
		perror("mmap");
		exit(1);
	}
	pid_t child = fork();
	if (child == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		for (uint32_t k = 1;; k++) {
			while (atomic_load_explicit(&at[0].turn, memory_order_acquire) != k)
				;
			atomic_store_explicit(&at[1].turn, k, memory_order_release);
		}
	}
	uint32_t k = 0;
	for (int i = 0; i < SAMPLES; i++) {
		double start = now();
		for (int j = 0; j < BATCH; j++) {
			atomic_store_explicit(&at[0].turn, ++k, memory_order_release);
			while (atomic_load_explicit(&at[1].turn, memory_order_acquire) != k)
				;
		}
		note((now() - start) / BATCH);
	}
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
	printf("flag_us %.3f\n", one_way_us(SAMPLES));
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
	for (int i = 0; i < ROUNDS; i++) {
		double start = now();
		sendto(ours, bytes, sizeof(bytes), 0, (struct sockaddr *)&there, sizeof(there));
		receive(ours);
		note(now() - start);
	}
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
	printf("udp_us %.3f\n", one_way_us(ROUNDS));
}

/* ---- packets of 4 KB, as the card sends them ---- */

enum { PACKET = 4096 + 16, SEGMENTS = 15, PIECE = PACKET * SEGMENTS };

static int bulk_socket(struct sockaddr_in *addr)
{
	int fd = bound(addr), on = 1, size = PACKET, bytes = 8 << 20;
	setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof(bytes));
	setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
	if (setsockopt(fd, IPPROTO_UDP, UDP_SEGMENT, &size, sizeof(size)) < 0 || setsockopt(fd, IPPROTO_UDP, UDP_GRO, &on, sizeof(on)) < 0) {
		perror("UDP segmentation");
		exit(1);
	}
	return fd;
}

static uint32_t crc_of(const char *piece, size_t bytes)
{
	uint32_t crc = 0;
	for (size_t at = 0; at < bytes; at += PACKET)
		crc ^= tp_crc_update(~0u, piece + at, bytes - at < PACKET ? bytes - at : PACKET);
	return crc;
}

static void bulk_send(int fd, const struct sockaddr_in *to, bool crc)
{
	char *from = memory(), *piece = malloc(PIECE);
	for (size_t at = 0;; at = at + 2 * PIECE < BYTES ? at + PIECE : 0) {
		memcpy(piece, from + at, PIECE);
		if (crc)
			__asm__ volatile("" ::"r"(crc_of(piece, PIECE)));
		if (sendto(fd, piece, PIECE, 0, (const struct sockaddr *)to, sizeof(*to)) < 0 && errno != ENOBUFS && errno != EAGAIN)
			exit(1);
	}
}

/* Gb/s of what arrived, was checked, and was copied to where it belongs. */
static double bulk_receive(int fd, bool crc)
{
	static char piece[65536];
	char *to = memory();
	double start = 0, bytes = 0;
	while (!start || now() - start < 2 * RUN_MS * 1e-3) {
		ssize_t n = recv(fd, piece, sizeof(piece), 0);
		if (n <= 0)
			continue;
		if (crc)
			__asm__ volatile("" ::"r"(crc_of(piece, (size_t)n)));
		memcpy(to, piece, (size_t)n);
		if (!start)
			start = now();
		else
			bytes += (double)n;
	}
	return bytes * 8 / (now() - start) * 1e-9;
}

static void bulk(bool crc, const char *name)
{
	struct sockaddr_in here, there;
	int ours = bulk_socket(&here), theirs = bulk_socket(&there);
	pid_t child = fork();
	if (child == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		bulk_send(theirs, &here, crc);
	}
	printf("%s %.2f\n", name, bulk_receive(ours, crc));
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
	close(ours);
	close(theirs);
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";
	if (!strcmp(what, "copy"))
		copies();
	else if (!strcmp(what, "vm"))
		vm_writes();
	else if (!strcmp(what, "flag"))
		flags();
	else if (!strcmp(what, "udp"))
		udp();
	else if (!strcmp(what, "bulk"))
		bulk(false, "udp_gbps");
	else if (!strcmp(what, "bulk_crc"))
		bulk(true, "udp_crc_gbps");
	else
		return fprintf(stderr, "usage: %s copy|vm|flag|udp|bulk|bulk_crc\n", argv[0]), 2;
	return 0;
}

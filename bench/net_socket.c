/* The Socket transport against plain TCP on loopback, in one run: round trips and throughput, with ratios.
 * Usage: net_socket [rounds]. Both sides of each measurement do the same: two processes, non-blocking calls in a loop that
 * yields when nothing moved, one connection for each direction, the same buffers. The first column of numbers is plain TCP,
 * the others the transport. A third table has the processor's time for one message with both ends in one thread: it hardly
 * depends on what else runs on the machine. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include "net/net.h"

enum { MOST = 4 << 20, DEPTH = 8, MAX_ROUNDS = 15 };
static unsigned char *memory;
static const struct tp_net_hello hello = { .secret = "for a benchmark", .comm_hash = 1, .from = 0, .to = 1 };

struct way {                        /* one way of moving bytes: both directions, this process's ends */
	void *send_comm, *recv_comm;    /* transport */
	int fds[2];                     /* plain TCP: to receive, to send; -1: transport */
};

static void die(const char *what)
{
	fprintf(stderr, "net_socket: %s: %s\n", what, tp_log_last_error()[0] ? tp_log_last_error() : strerror(errno));
	exit(1);
}

static void plain_move(struct way *w, bool sending, size_t bytes, int slot)
{
	unsigned char *at = memory + (size_t)slot * MOST;
	size_t done = 0;

	while (done < bytes) {
		ssize_t n = sending ? send(w->fds[1], at + done, bytes - done, MSG_DONTWAIT | MSG_NOSIGNAL)
			: recv(w->fds[0], at + done, bytes - done, MSG_DONTWAIT);
		if (n > 0) done += (size_t)n;
		else if (n < 0 && errno == EAGAIN) sched_yield();
		else die("plain TCP");
	}
}

static void *post(struct way *w, bool sending, size_t bytes, int slot)
{
	void *request = NULL, *at = memory + (size_t)slot * MOST;
	int tag = 1;
	ncclResult_t result = sending ? tp_net_socket.isend(w->send_comm, at, bytes, tag, NULL, &request)
		: tp_net_socket.irecv(w->recv_comm, 1, &at, &bytes, &tag, NULL, &request);

	if (result != ncclSuccess || !request) die("post");
	return request;
}

static void finish(void *request)
{
	for (bool done = false; !done;) {
		if (tp_net_socket.test(request, &done, NULL) != ncclSuccess) die("test");
		if (!done) sched_yield();
	}
}

/* count messages one way, several under way. */
static void stream(struct way *w, bool sending, size_t bytes, int count)
{
	void *requests[DEPTH];

	if (w->fds[0] >= 0) {
		for (int i = 0; i < count; i++) plain_move(w, sending, bytes, i % DEPTH);
		return;
	}
	for (int i = 0; i < count + DEPTH; i++) {
		if (i >= DEPTH) finish(requests[i % DEPTH]);
		if (i < count) requests[i % DEPTH] = post(w, sending, bytes, i % DEPTH);
		else requests[i % DEPTH] = NULL;
		if (i >= count && i + 1 - DEPTH >= count) break;
	}
}

static void move_one(struct way *w, bool sending, size_t bytes)
{
	if (w->fds[0] >= 0) plain_move(w, sending, bytes, 0);
	else finish(post(w, sending, bytes, 0));
}

/* us a round trip, or GB/s one way; the second process answers. */
static double measure(struct way *w, bool first, bool throughput, size_t bytes, int count)
{
	uint64_t start;

	move_one(w, first, 8);
	move_one(w, !first, 8);
	start = tp_clock_ns();
	if (throughput) {
		stream(w, first, bytes, count);
		move_one(w, !first, 8);
		return (double)bytes * count / (double)(tp_clock_ns() - start);
	}
	for (int i = 0; i < count; i++) {
		move_one(w, first, bytes);
		move_one(w, !first, bytes);
	}
	return (double)(tp_clock_ns() - start) / 1000.0 / count;
}

/* The transport's connection, by pipes for the handles. */
static void join_transport(struct way *w, int in, int out, const char *threads, const char *sockets)
{
	unsigned char mine[TP_NET_HANDLE_BYTES], theirs[TP_NET_HANDLE_BYTES];
	void *listener, *state = NULL;
	struct tp_net_hello who;

	setenv("NCCL_SOCKET_NTHREADS", threads, 1);
	setenv("NCCL_NSOCKS_PERTHREAD", sockets, 1);
	tp_param_reload();
	w->fds[0] = w->fds[1] = -1;
	if (tp_net_socket.init() != ncclSuccess || tp_net_socket.listen(0, mine, &listener) != ncclSuccess) die("listen");
	if (write(out, mine, sizeof(mine)) != sizeof(mine) || read(in, theirs, sizeof(theirs)) != sizeof(theirs)) die("handles");
	while (!w->send_comm || !w->recv_comm) {
		if (!w->send_comm && tp_net_socket.connect(0, theirs, &hello, &state, &w->send_comm) != ncclSuccess) die("connect");
		if (!w->recv_comm && tp_net_socket.accept(listener, &hello, &who, &w->recv_comm) != ncclSuccess) die("accept");
	}
	tp_net_socket.close_listen(listener);
}

/* Both ends in one process: from one way to another of the same shape. */
static void join_here(struct way *w, const char *threads, const char *sockets)
{
	int loop[2];

	if (pipe(loop) != 0) die("pipe");
	join_transport(w, loop[0], loop[1], threads, sockets);
	close(loop[0]);
	close(loop[1]);
}

static void plain_pair(int fds[2])
{
	union tp_addr addr = { .v4 = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) } };
	int door, one = 1;

	if (tp_socket_listen(&addr, 1, &door) != ncclSuccess || tp_socket_connect(&addr, NULL, 1000, "itself", &fds[0]) != ncclSuccess) die("plain TCP");
	fds[1] = accept(door, NULL, NULL);
	close(door);
	for (int i = 0; i < 2; i++) setsockopt(fds[i], IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
}

/* us of processor time for a message, sent and received by this thread. */
static double cost(struct way *w, size_t bytes, int count)
{
	struct timespec a, b;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &a);
	for (int i = 0; i < count; i++) {
		size_t sent = 0, got = 0;
		if (w->fds[0] < 0) {
			void *s = post(w, true, bytes, 0), *r = post(w, false, bytes, 1);
			for (bool s_done = false, r_done = false; !s_done || !r_done;) {
				if (!s_done && tp_net_socket.test(s, &s_done, NULL) != ncclSuccess) die("test");
				if (!r_done && tp_net_socket.test(r, &r_done, NULL) != ncclSuccess) die("test");
			}
			continue;
		}
		while (got < bytes) {
			ssize_t n = sent < bytes ? send(w->fds[1], memory + sent, bytes - sent, MSG_DONTWAIT | MSG_NOSIGNAL) : 0;
			if (n > 0) sent += (size_t)n;
			n = recv(w->fds[0], memory + MOST + got, bytes - got, MSG_DONTWAIT);
			if (n > 0) got += (size_t)n;
		}
	}
	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &b);
	return ((double)(b.tv_sec - a.tv_sec) * 1e9 + (double)(b.tv_nsec - a.tv_nsec)) / 1000.0 / count;
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
	static const struct { const char *threads, *sockets, *name; } shapes[] = {
		{ "1", "1", "1 socket" }, { "1", "2", "2 sockets" }, { "1", "4", "4 sockets" }, { "2", "1", "2 threads" } };
	static const size_t sizes[] = { 8, 1024, 16384, 65536, 524288, 4194304 };
	enum { WAYS = TP_ARRAY_LEN(shapes) + 1, SIZES = TP_ARRAY_LEN(sizes) };
	static double results[3][SIZES][WAYS][MAX_ROUNDS];
	struct way ways[WAYS], here[WAYS];
	int rounds = argc > 1 ? TP_MIN(TP_MAX(atoi(argv[1]), 1), MAX_ROUNDS) : 5, up[2], down[2], plain[2][2];
	bool first;
	pid_t child;

	memory = calloc(DEPTH, MOST);
	if (!memory) die("memory");
	setenv("NCCL_SOCKET_IFNAME", "lo", 1);
	memset(ways, 0, sizeof(ways));
	memset(here, 0, sizeof(here));
	plain_pair(plain[0]);
	memcpy(here[0].fds, plain[0], sizeof(plain[0]));
	for (int i = 1; i < WAYS; i++) join_here(&here[i], shapes[i - 1].threads, shapes[i - 1].sockets);
	for (int r = 0; r < rounds; r++)
		for (int s = 0; s < SIZES; s++)
			/* Helper threads spend time of their own, which this doesn't see. */
			for (int i = 0; i < WAYS - 1; i++)
				results[2][s][i][r] = cost(&here[i], sizes[s], (int)TP_MIN((16u << 20) / sizes[s], 3000u));
	plain_pair(plain[1]);
	if (pipe(up) != 0 || pipe(down) != 0) die("pipe");
	child = fork();
	first = child != 0;
	ways[0].fds[0] = plain[first][0];
	ways[0].fds[1] = plain[!first][1];
	for (int i = 1; i < WAYS; i++) join_transport(&ways[i], first ? down[0] : up[0], first ? up[1] : down[1], shapes[i - 1].threads, shapes[i - 1].sockets);
	for (int r = 0; r < rounds; r++)
		for (int t = 0; t < 2; t++)
			for (int s = 0; s < SIZES; s++)
				for (int i = 0; i < WAYS; i++) {
					int count = t ? (int)TP_MIN((64u << 20) / sizes[s], 20000u) : sizes[s] > 65536 ? 30 : 1000;
					results[t][s][i][r] = measure(&ways[i], first, t, sizes[s], count);
				}
	if (!first) return 0;
	waitpid(child, NULL, 0);
	for (int t = 0; t < 3; t++) {
		static const char *const titles[] = { "round trip, us (ratio: plain TCP / transport)", "one way, GB/s (ratio: transport / plain TCP)",
			"processor time a message, both ends, us (ratio: plain TCP / transport)" };
		int columns = t == 2 ? WAYS - 1 : WAYS;
		printf("# %s; above 1 is better\n%10s %10s", titles[t], "bytes", "plain TCP");
		for (int i = 1; i < columns; i++) printf(" %20s", shapes[i - 1].name);
		for (int s = 0; s < SIZES; s++) {
			double base = 0;
			printf("\n%10zu", sizes[s]);
			for (int i = 0; i < columns; i++) {
				double *values = results[t][s][i], middle;
				qsort(values, (size_t)rounds, sizeof(*values), by_value);
				middle = values[rounds / 2];
				if (i == 0) printf(" %10.2f", base = middle);
				else printf(" %10.2f (x %.2f)", middle, t == 1 ? middle / base : base / middle);
			}
		}
		printf("\n");
	}
	return 0;
}

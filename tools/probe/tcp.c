/* TCP over loopback; see tcp.h. The receiver is a child: its share of the CPU is counted too. */
#include "probe/tcp.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "probe/meet.h"
#include "probe/staged.h"

#define CHUNK ((size_t)1 << 20)
#define PINGS 200
#define ROUND_MS 60000

double probe_cpu_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
	return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static int receive(struct probe_peer *peer, char *stage, char *into, size_t bytes, int rounds)
{
	char ping;
	for (int i = 0; i < PINGS; i++)
		if (tp_socket_recv(peer->fd, &ping, 1, tp_clock_ms() + ROUND_MS, NULL) != ncclSuccess || tp_socket_send(peer->fd, &ping, 1, tp_clock_ms() + ROUND_MS, NULL) != ncclSuccess) return 1;
	double before = probe_cpu_ns();
	for (int r = 0; r < rounds; r++) {
		for (size_t at = 0; at < bytes; at += CHUNK) {
			size_t n = TP_MIN(CHUNK, bytes - at);
			if (tp_socket_recv(peer->fd, stage, n, tp_clock_ms() + ROUND_MS, NULL) != ncclSuccess) return 1;
			/* To where it shall be; a forked child can't use its parent's GPU, so an ordinary copy stands for it. */
			memcpy(into + at, stage, n);
		}
		if (tp_socket_send(peer->fd, &ping, 1, tp_clock_ms() + ROUND_MS, NULL) != ncclSuccess) return 1;
	}
	double cpu = probe_cpu_ns() - before;
	return tp_socket_send(peer->fd, &cpu, sizeof(cpu), tp_clock_ms() + ROUND_MS, NULL) == ncclSuccess ? 0 : 1;
}

static int send_all(struct probe_peer *peer, const struct tp_gpu *gpu, char *stage, const char *from, size_t bytes, int rounds, struct probe_tcp *out)
{
	char ping = 1;
	double theirs = 0, us[PINGS];
	for (int i = 0; i < PINGS; i++) {
		double start = probe_now_us();
		if (tp_socket_send(peer->fd, &ping, 1, tp_clock_ms() + ROUND_MS, NULL) != ncclSuccess || tp_socket_recv(peer->fd, &ping, 1, tp_clock_ms() + ROUND_MS, NULL) != ncclSuccess)
			return probe_fail("TCP over loopback: the other end has gone");
		us[i] = (probe_now_us() - start) / 2;
	}
	double before = probe_cpu_ns(), start = probe_now_us();
	for (int r = 0; r < rounds; r++) {
		for (size_t at = 0; at < bytes; at += CHUNK) {
			size_t n = TP_MIN(CHUNK, bytes - at);
			int status = probe_copy(gpu, stage, from + at, n);
			if (status) return status;
			if (tp_socket_send(peer->fd, stage, n, tp_clock_ms() + ROUND_MS, NULL) != ncclSuccess) return probe_fail("TCP over loopback: the other end has gone");
		}
		if (tp_socket_recv(peer->fd, &ping, 1, tp_clock_ms() + ROUND_MS, NULL) != ncclSuccess) return probe_fail("TCP over loopback: the other end has gone");
	}
	double took = probe_now_us() - start, ours = probe_cpu_ns() - before, moved = (double)bytes * rounds;
	if (tp_socket_recv(peer->fd, &theirs, sizeof(theirs), tp_clock_ms() + ROUND_MS, NULL) != ncclSuccess) return probe_fail("TCP over loopback: the other end has gone");
	*out = (struct probe_tcp){ moved / took / 1000, tp_median(us, PINGS), (ours + theirs) / moved, moved / TP_MAX(ours, theirs) };
	return 0;
}

int probe_tcp_run(const struct tp_gpu *gpu, const void *from, size_t bytes, int rounds, struct probe_tcp *out)
{
	struct probe_listener listener;
	struct probe_peer peer = { .fd = -1 };
	char *stage = malloc(CHUNK), *into = malloc(bytes);
	int status = stage && into ? probe_listen(0, &listener) : probe_fail("out of memory");
	if (status) {
		free(stage);
		free(into);
		return status;
	}
	memset(into, 0, bytes);
	fflush(NULL);
	pid_t child = fork();
	if (child == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		status = probe_accept(&listener, &peer);
		if (!status) status = receive(&peer, stage, into, bytes, rounds);
		/* Nothing of the parent's is to be ended twice. */
		_exit(status);
	}
	if (child < 0) status = probe_fail("no process can be started: %s", strerror(errno));
	else status = probe_meet("127.0.0.1", listener.port, &peer);
	probe_stop_listening(&listener);
	if (!status) status = send_all(&peer, gpu, stage, from, bytes, rounds, out);
	if (peer.fd >= 0) close(peer.fd);
	if (status && child > 0) kill(child, SIGKILL);      /* it may still wait for us */
	while (child > 0 && waitpid(child, NULL, 0) < 0 && errno == EINTR) {
	}
	free(stage);
	free(into);
	return status;
}

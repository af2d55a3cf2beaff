/* The exchange of a probe's two ends; see meet.h. */
#include "probe/meet.h"

#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/base.h"

#define CONNECT_MS 10000

int probe_listen(int port, struct probe_listener *out)
{
	union tp_addr v4 = { .v4 = { .sin_family = AF_INET, .sin_port = htons((uint16_t)port) } };
	union tp_addr v6 = { .v6 = { .sin6_family = AF_INET6, .sin6_addr = IN6ADDR_ANY_INIT, .sin6_port = htons((uint16_t)port) } };
	struct probe_listener l = { { -1, -1 }, port };
	bool has4 = tp_socket_listen(&v4, 8, &l.fds[0]) == ncclSuccess;
	if (has4) v6.v6.sin6_port = v4.v4.sin_port;
	if (!has4 && strstr(tp_log_last_error(), strerror(EADDRINUSE)))
		return probe_fail("TCP port %d is in use: is another server running? --port takes another, on both sides", port);
	/* A machine may have only one of the two. */
	if (tp_socket_listen(&v6, 8, &l.fds[1]) != ncclSuccess && !has4) return probe_fail_below(NULL);
	l.port = has4 ? ntohs(v4.v4.sin_port) : ntohs(v6.v6.sin6_port);
	*out = l;
	return 0;
}

void probe_stop_listening(struct probe_listener *listener)
{
	for (int i = 0; i < 2; i++)
		if (listener->fds[i] >= 0) close(listener->fds[i]);
	*listener = (struct probe_listener){ { -1, -1 }, 0 };
}

/* A host that has vanished closes nothing: after some ten seconds of silence its kernel is asked. */
static void keep_alive(int fd)
{
	int on = 1, idle_s = 10, every_s = 5, probes = 4;
	setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof(idle_s));
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &every_s, sizeof(every_s));
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes));
}

int probe_accept(const struct probe_listener *listener, struct probe_peer *out)
{
	union tp_addr from = { 0 };
	socklen_t bytes = sizeof(from);
	char text[TP_ADDR_TEXT];
	int fd;
	do {
		/* poll skips descriptors that are negative. */
		struct pollfd wait[2] = { { .fd = listener->fds[0], .events = POLLIN }, { .fd = listener->fds[1], .events = POLLIN } };
		if (poll(wait, 2, -1) < 0 && errno != EINTR) return probe_fail("no client can be waited for: %s", strerror(errno));
		int ready = wait[0].revents ? wait[0].fd : wait[1].revents ? wait[1].fd : -1;
		errno = EINTR;
		fd = ready >= 0 ? accept4(ready, &from.sa, &bytes, SOCK_CLOEXEC) : -1;
	} while (fd < 0 && (errno == EINTR || errno == ECONNABORTED));
	if (fd < 0) return probe_fail("no client can be taken: %s", strerror(errno));
	keep_alive(fd);
	*out = (struct probe_peer){ .fd = fd };
	snprintf(out->name, sizeof(out->name), "client %s", tp_addr_format(&from, text));
	return 0;
}

int probe_meet(const char *server, int port, struct probe_peer *out)
{
	union tp_addr to;
	char text[300];
	bool bare = strchr(server, ':') && server[0] != '[';
	snprintf(text, sizeof(text), bare ? "[%.250s]:%d" : "%.250s:%d", server, port);
	struct probe_peer peer = { .fd = -1 };
	snprintf(peer.name, sizeof(peer.name), "server %.100s", server);
	if (tp_addr_parse(text, "the server's name", &to) != ncclSuccess) return probe_fail_below(NULL);
	if (tp_socket_connect(&to, NULL, CONNECT_MS, peer.name, &peer.fd) != ncclSuccess) return probe_fail_below("is the server running?");
	keep_alive(peer.fd);
	*out = peer;
	return 0;
}

void probe_part(struct probe_peer *peer)
{
	struct probe_record record;
	if (peer->fd < 0) return;
	if (*probe_last_error() && !peer->said_failed) {
		probe_record_start(&record, PROBE_FAILED);
		snprintf(record.as.failed.text, sizeof(record.as.failed.text), "%s", probe_last_error());
		tp_socket_send(peer->fd, &record, record.head.bytes, tp_clock_ms() + 1000, NULL);
		/* Closing with bytes unread would cut off what was just sent. */
		shutdown(peer->fd, SHUT_WR);
		char rest[256];
		uint64_t until = tp_clock_ms() + 500;
		struct pollfd wait = { .fd = peer->fd, .events = POLLIN };
		while (tp_clock_ms() < until && poll(&wait, 1, 100) >= 0)
			if ((wait.revents & POLLIN) && read(peer->fd, rest, sizeof(rest)) <= 0) break;
	}
	close(peer->fd);
	peer->fd = -1;
}

int probe_tell(struct probe_peer *peer, const struct probe_record *record)
{
	if (tp_socket_send(peer->fd, record, record->head.bytes, tp_clock_ms() + PROBE_ANSWER_MS, NULL) == ncclSuccess) return 0;
	/* It may have said why before it closed. */
	if (probe_look(peer)) return 1;
	return probe_fail("%s: the connection of the exchange is gone", peer->name);
}

static int ended(const struct probe_peer *peer, const char *before)
{
	return probe_fail("%s: it closed the connection before %s: has it ended?", peer->name, before);
}

int probe_hear(struct probe_peer *peer, enum probe_type type, int timeout_ms, struct probe_record *out)
{
	struct probe_record record = { 0 };
	unsigned char *bytes = (unsigned char *)&record;
	char why[256];
	uint64_t until = tp_clock_ms() + (uint64_t)timeout_ms;
	size_t have = 0, need = sizeof(record.head);
	while (have < need) {
		uint64_t now = tp_clock_ms();
		struct pollfd wait = { .fd = peer->fd, .events = POLLIN };
		int ready = now < until ? poll(&wait, 1, (int)(until - now)) : 0;
		if (ready < 0 && errno == EINTR) continue;
		if (ready == 0) return probe_fail("%s: no %s within %d s", peer->name, probe_type_name((int)type), timeout_ms / 1000);
		ssize_t n = ready > 0 ? read(peer->fd, bytes + have, need - have) : -1;
		if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
		if (n <= 0) return ended(peer, have ? "its record was whole" : probe_type_name((int)type));
		have += (size_t)n;
		long whole = probe_record_check(bytes, have, why, sizeof(why));
		if (whole < 0) return probe_fail("%s: %s", peer->name, why);
		if (whole > 0) need = (size_t)whole;
	}
	if (!probe_record_accept(&record, why, sizeof(why))) return probe_fail("%s: %s", peer->name, why);
	if (record.head.type == PROBE_FAILED) {
		peer->said_failed = true;
		return probe_fail("%s has failed: %s", peer->name, record.as.failed.text);
	}
	if (record.head.type != (uint16_t)type)
		return probe_fail("%s: it sent %s where %s belongs", peer->name, probe_type_name(record.head.type), probe_type_name((int)type));
	*out = record;
	return 0;
}

int probe_look(struct probe_peer *peer)
{
	struct probe_record record;
	struct probe_head head;
	struct pollfd wait = { .fd = peer->fd, .events = POLLIN };
	if (poll(&wait, 1, 0) <= 0) return 0;
	ssize_t n = recv(peer->fd, &head, sizeof(head), MSG_PEEK | MSG_DONTWAIT);
	if (n < 0) return errno == EAGAIN || errno == EINTR ? 0 : ended(peer, "the transfer was over");
	if (n == 0) return ended(peer, "the transfer was over");
	if (n < (ssize_t)sizeof(head) || head.type != PROBE_FAILED) return 0;
	return probe_hear(peer, PROBE_FAILED, 1000, &record);
}

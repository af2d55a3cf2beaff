/* TCP with deadlines. Every wait is a poll with the time that is left, every transfer is MSG_DONTWAIT, so blocking and
 * non-blocking descriptors behave alike; a signal ends nothing and SIGPIPE is never raised. */
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include "base/internal.h"

#ifndef IP_BIND_ADDRESS_NO_PORT
#define IP_BIND_ADDRESS_NO_PORT 24
#endif

enum { P_RETRY_CNT, P_RETRY_SLEEP, P_SNDBUF, P_RCVBUF };
static struct tp_param socket_params[] = {
	[P_RETRY_CNT] = { .name = "NCCL_SOCKET_RETRY_CNT", .kind = TP_PARAM_INT, .fallback = "34", .min = 0, .max = 1000000,
		.doc = "times that a connection which was refused or found nobody is tried again" },
	[P_RETRY_SLEEP] = { .name = "NCCL_SOCKET_RETRY_SLEEP_MSEC", .kind = TP_PARAM_INT, .fallback = "100", .min = 0, .max = 60000,
		.doc = "ms of wait before the first new try; before the n-th, n times this" },
	[P_SNDBUF] = { .name = "NCCL_SOCKET_SNDBUF", .kind = TP_PARAM_INT, .fallback = "-1", .min = -1, .max = 1 << 30,
		.doc = "bytes of a socket's send buffer; -1: the system decides" },
	[P_RCVBUF] = { .name = "NCCL_SOCKET_RCVBUF", .kind = TP_PARAM_INT, .fallback = "-1", .min = -1, .max = 1 << 30,
		.doc = "bytes of a socket's receive buffer; -1: the system decides" },
};
TP_PARAM_TABLE("socket", socket_params)

static void set_option(int fd, int level, int option)
{
	int on = 1;
	setsockopt(fd, level, option, &on, sizeof(on));
}

/* Before connect and listen: the window's scale is agreed then, and accepted sockets inherit the sizes. */
static void set_buffers(int fd)
{
	int send_bytes = (int)tp_param_int(&socket_params[P_SNDBUF]), recv_bytes = (int)tp_param_int(&socket_params[P_RCVBUF]);
	if (send_bytes > 0)
		setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &send_bytes, sizeof(send_bytes));
	if (recv_bytes > 0)
		setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &recv_bytes, sizeof(recv_bytes));
}

ncclResult_t tp_socket_set_nonblocking(int fd, bool on)
{
	int flags = fcntl(fd, F_GETFL);
	if (flags < 0 || fcntl(fd, F_SETFL, on ? flags | O_NONBLOCK : flags & ~O_NONBLOCK) < 0)
		return TP_FAIL(ncclSystemError, "fcntl on descriptor %d: %s", fd, strerror(errno));
	return ncclSuccess;
}

/* Waits until fd has events or the deadline (0: none) passes; 1, 0 or -1 with errno. */
static int wait_fd(int fd, short events, uint64_t deadline_ms)
{
	for (;;) {
		struct pollfd p = { .fd = fd, .events = events };
		int timeout = -1;
		if (deadline_ms) {
			uint64_t now = tp_clock_ms();
			timeout = now >= deadline_ms ? 0 : (int)TP_MIN(deadline_ms - now, (uint64_t)3600000);
		}
		int n = poll(&p, 1, timeout);
		if (n > 0)
			return 1;
		if (n < 0 && errno != EINTR)
			return -1;
		if (deadline_ms && tp_clock_ms() >= deadline_ms)
			return 0;
	}
}

ncclResult_t tp_socket_listen(union tp_addr *addr, int backlog, int *fd)
{
	char text[TP_ADDR_TEXT];
	int s = socket(addr->sa.sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (s < 0)
		return TP_FAIL(ncclSystemError, "no socket to listen at %s: %s", tp_addr_format(addr, text), strerror(errno));
	set_option(s, SOL_SOCKET, SO_REUSEADDR);
	set_buffers(s);
	if (addr->sa.sa_family == AF_INET6)
		set_option(s, IPPROTO_IPV6, IPV6_V6ONLY);
	union tp_addr bound = *addr;
	socklen_t length = sizeof(bound);
	if (bind(s, &addr->sa, tp_addr_len(addr)) < 0 || listen(s, backlog) < 0 || getsockname(s, &bound.sa, &length) < 0) {
		int error = errno;
		close(s);
		return TP_FAIL(ncclSystemError, "can't listen at %s on %s: %s", tp_addr_format(addr, text), tp_host_name(), strerror(error));
	}
	*addr = bound;
	*fd = s;
	return ncclSuccess;
}

/* 0: connected; EINPROGRESS: under way; else the errno of the failure, *hopeless where trying again is no use. The
 * descriptor is non-blocking. */
static int start_connect(const union tp_addr *to, const union tp_addr *from, int *fd, bool *hopeless)
{
	int s = socket(to->sa.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (s < 0)
		return errno;
	set_option(s, IPPROTO_TCP, TCP_NODELAY);
	set_buffers(s);
	if (from && from->sa.sa_family == to->sa.sa_family) {
		union tp_addr local = *from;
		if (local.sa.sa_family == AF_INET6)
			local.v6.sin6_port = 0;
		else
			local.v4.sin_port = 0;
		/* The port is chosen by connect, which knows the peer: thousands of connections don't use up the ports. */
		set_option(s, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT);
		if (bind(s, &local.sa, tp_addr_len(&local)) < 0) {
			int error = errno;
			*hopeless = true;
			close(s);
			return error;
		}
	}
	int error = connect(s, &to->sa, tp_addr_len(to)) < 0 ? errno : 0;
	if (error == EINTR)
		error = EINPROGRESS;
	if (error && error != EINPROGRESS) {
		close(s);
		return error;
	}
	*fd = s;
	return error;
}

/* A connect to a free port of one's own machine can meet itself (TCP's simultaneous open): nobody listens there. */
static bool met_itself(int fd)
{
	union tp_addr local = { 0 }, remote = { 0 };
	socklen_t a = sizeof(local), b = sizeof(remote);
	return getsockname(fd, &local.sa, &a) == 0 && getpeername(fd, &remote.sa, &b) == 0 && a == b && memcmp(&local, &remote, a) == 0;
}

static int finish_connect(int fd)
{
	int error = 0;
	socklen_t length = sizeof(error);
	if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) < 0)
		return errno;
	return !error && met_itself(fd) ? ECONNREFUSED : error;
}

static bool worth_retrying(int error)
{
	return error == ECONNREFUSED || error == ECONNRESET || error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH || error == EADDRNOTAVAIL;
}

static int connect_once(const union tp_addr *to, const union tp_addr *from, uint64_t deadline_ms, int *fd, bool *hopeless)
{
	int s = -1, error = start_connect(to, from, &s, hopeless);
	if (error && error != EINPROGRESS)
		return error;
	if (error == EINPROGRESS) {
		int ready = wait_fd(s, POLLOUT, deadline_ms);
		error = ready > 0 ? 0 : ready == 0 ? ETIMEDOUT : errno;
	}
	if (!error)
		error = finish_connect(s);
	if (!error && fcntl(s, F_SETFL, fcntl(s, F_GETFL) & ~O_NONBLOCK) < 0)
		error = errno;
	if (error) {
		close(s);
		return error;
	}
	*fd = s;
	return 0;
}

static void sleep_ms(uint64_t ms)
{
	struct timespec t = { (time_t)(ms / 1000), (long)(ms % 1000) * 1000000 };
	while (nanosleep(&t, &t) < 0 && errno == EINTR) {}
}

ncclResult_t tp_socket_connect(const union tp_addr *to, const union tp_addr *from, int timeout_ms, const char *what, int *fd)
{
	char text[TP_ADDR_TEXT];
	uint64_t start = tp_clock_ms(), deadline_ms = timeout_ms > 0 ? start + (uint64_t)timeout_ms : 0;
	int64_t retries = tp_param_int(&socket_params[P_RETRY_CNT]), pause_ms = tp_param_int(&socket_params[P_RETRY_SLEEP]);
	for (int64_t attempt = 1;; attempt++) {
		bool hopeless = false;
		int error = connect_once(to, from, deadline_ms, fd, &hopeless);
		if (!error)
			return ncclSuccess;
		uint64_t now = tp_clock_ms();
		bool late = deadline_ms && now >= deadline_ms;
		hopeless = hopeless || !worth_retrying(error);
		if (hopeless || late || attempt > retries)
			return TP_FAIL(!hopeless ? ncclRemoteError : ncclSystemError, "%s at %s can't be reached from %s: %s (%lld tries in %llu ms)",
				what ? what : "the peer", tp_addr_format(to, text), tp_host_name(), strerror(error), (long long)attempt,
				(unsigned long long)(now - start));
		TP_INFO(TP_NET, "%s at %s: %s, trying again (%lld of %lld)", what ? what : "the peer", tp_addr_format(to, text), strerror(error),
			(long long)attempt, (long long)retries);
		uint64_t nap = (uint64_t)(attempt * pause_ms);
		sleep_ms(deadline_ms ? TP_MIN(nap, deadline_ms - now) : nap);
	}
}

int tp_socket_try_connect_start(const union tp_addr *to, const union tp_addr *from, int *fd, bool *hopeless)
{
	*hopeless = false;
	int error = start_connect(to, from, fd, hopeless);
	*hopeless = *hopeless || (error && error != EINPROGRESS && !worth_retrying(error));
	return error;
}

int tp_socket_try_connect_finish(int fd) { return finish_connect(fd); }

ncclResult_t tp_socket_connect_start(const union tp_addr *to, const union tp_addr *from, int *fd)
{
	char text[TP_ADDR_TEXT];
	bool hopeless = false;
	int error = start_connect(to, from, fd, &hopeless);
	if (error == 0)
		return ncclSuccess;
	if (error == EINPROGRESS)
		return ncclInProgress;
	return TP_FAIL(worth_retrying(error) && !hopeless ? ncclRemoteError : ncclSystemError, "can't connect to %s from %s: %s", tp_addr_format(to, text), tp_host_name(),
		strerror(error));
}

ncclResult_t tp_socket_connect_finish(int fd)
{
	int error = finish_connect(fd);
	if (error == 0)
		return ncclSuccess;
	return TP_FAIL(worth_retrying(error) ? ncclRemoteError : ncclSystemError, "a connection from %s failed: %s", tp_host_name(), strerror(error));
}

/* One line for both directions; done of bytes were moved. error 0: the peer closed. */
static ncclResult_t transfer_failed(int fd, const char *verb, const char *what, size_t done, size_t bytes, int error)
{
	bool remote = error == 0 || error == EPIPE || error == ECONNRESET || error == ETIMEDOUT || error == EHOSTUNREACH;
	ncclResult_t result = remote ? ncclRemoteError : ncclSystemError;
	if (!what)
		return result;
	char text[TP_ADDR_TEXT] = "a Unix socket";
	union tp_addr peer = { 0 };
	socklen_t length = sizeof(peer);
	if (getpeername(fd, &peer.sa, &length) == 0 && (peer.sa.sa_family == AF_INET || peer.sa.sa_family == AF_INET6))
		tp_addr_format(&peer, text);
	return TP_FAIL(result, "%s (%s): %s after %zu of %zu bytes %s", what, text,
		error == 0 ? "the peer closed the connection" : error == ETIMEDOUT ? "time is over" : strerror(error), done, bytes, verb);
}

ncclResult_t tp_socket_send(int fd, const void *data, size_t bytes, uint64_t deadline_ms, const char *what)
{
	const char *p = data;
	size_t done = 0;
	while (done < bytes) {
		ssize_t n = send(fd, p + done, bytes - done, MSG_NOSIGNAL | MSG_DONTWAIT);
		if (n >= 0) {
			done += (size_t)n;
			continue;
		}
		if (errno == EINTR)
			continue;
		if (errno != EAGAIN)
			return transfer_failed(fd, "sent", what, done, bytes, errno);
		int ready = wait_fd(fd, POLLOUT, deadline_ms);
		if (ready <= 0)
			return transfer_failed(fd, "sent", what, done, bytes, ready == 0 ? ETIMEDOUT : errno);
	}
	return ncclSuccess;
}

ncclResult_t tp_socket_recv(int fd, void *data, size_t bytes, uint64_t deadline_ms, const char *what)
{
	char *p = data;
	size_t done = 0;
	while (done < bytes) {
		ssize_t n = recv(fd, p + done, bytes - done, MSG_DONTWAIT);
		if (n > 0) {
			done += (size_t)n;
			continue;
		}
		if (n == 0)
			return transfer_failed(fd, "received", what, done, bytes, 0);
		if (errno == EINTR)
			continue;
		if (errno != EAGAIN)
			return transfer_failed(fd, "received", what, done, bytes, errno);
		int ready = wait_fd(fd, POLLIN, deadline_ms);
		if (ready <= 0)
			return transfer_failed(fd, "received", what, done, bytes, ready == 0 ? ETIMEDOUT : errno);
	}
	return ncclSuccess;
}

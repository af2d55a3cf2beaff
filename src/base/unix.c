/* Abstract Unix sockets and the passing of descriptors. An abstract name belongs to the network namespace and vanishes
 * with its listener; anybody in the namespace may connect, so whoever accepts must ask who it is. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include "base/internal.h"

#define SEND_LIMIT_MS 10000
#define FDS_MAX 16

static ncclResult_t unix_address(const char *name, struct sockaddr_un *addr, socklen_t *length)
{
	size_t bytes = strlen(name);
	memset(addr, 0, sizeof(*addr));
	addr->sun_family = AF_UNIX;
	if (bytes == 0 || bytes > sizeof(addr->sun_path) - 1)
		return TP_FAIL(ncclInvalidArgument, "Unix socket name '%.128s' has %zu bytes, expected 1 to %zu", name, bytes, sizeof(addr->sun_path) - 1);
	memcpy(addr->sun_path + 1, name, bytes);
	*length = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + bytes);
	return ncclSuccess;
}

ncclResult_t tp_unix_listen(const char *name, int backlog, int *fd)
{
	struct sockaddr_un addr;
	socklen_t length = 0;
	TP_TRY(unix_address(name, &addr, &length));
	int s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (s < 0)
		return TP_FAIL(ncclSystemError, "no Unix socket for %s: %s", name, strerror(errno));
	if (bind(s, (const struct sockaddr *)&addr, length) < 0 || listen(s, backlog) < 0) {
		int error = errno;
		close(s);
		return TP_FAIL(ncclSystemError, "can't listen at the Unix socket @%s: %s", name, strerror(error));
	}
	*fd = s;
	return ncclSuccess;
}

int tp_unix_try_connect(const char *name, int timeout_ms, int *fd)
{
	struct sockaddr_un addr;
	socklen_t length = 0;
	if (unix_address(name, &addr, &length) != ncclSuccess)
		return EINVAL;
	uint64_t deadline_ms = tp_clock_ms() + (uint64_t)TP_MAX(timeout_ms, 0);
	int s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (s < 0)
		return errno;
	/* Non-blocking, because a full backlog would block without end; EAGAIN says that it is full. */
	while (connect(s, (const struct sockaddr *)&addr, length) < 0) {
		int error = errno;
		if ((error != EAGAIN && error != ECONNREFUSED && error != EINTR) || tp_clock_ms() >= deadline_ms) {
			close(s);
			return error;
		}
		poll(NULL, 0, 1);
	}
	if (fcntl(s, F_SETFL, fcntl(s, F_GETFL) & ~O_NONBLOCK) < 0) {
		int error = errno;
		close(s);
		return error;
	}
	*fd = s;
	return 0;
}

ncclResult_t tp_unix_connect(const char *name, int timeout_ms, int *fd)
{
	int error = tp_unix_try_connect(name, timeout_ms, fd);
	if (error == 0)
		return ncclSuccess;
	return TP_FAIL(error == ECONNREFUSED || error == EAGAIN ? ncclRemoteError : error == EINVAL ? ncclInvalidArgument : ncclSystemError,
		"can't connect to the Unix socket @%.128s on %s: %s", name, tp_host_name(), error == EAGAIN ? "its queue stays full" : strerror(error));
}

ncclResult_t tp_unix_peer(int sock, pid_t *pid, uid_t *uid)
{
	struct ucred peer;
	socklen_t length = sizeof(peer);
	if (getsockopt(sock, SOL_SOCKET, SO_PEERCRED, &peer, &length) < 0)
		return TP_FAIL(ncclSystemError, "can't ask who is behind Unix socket %d: %s", sock, strerror(errno));
	*pid = peer.pid;
	*uid = peer.uid;
	return ncclSuccess;
}

ncclResult_t tp_unix_send_fd(int sock, int fd, const void *data, size_t bytes)
{
	char filler = 0;
	struct iovec iov = { .iov_base = bytes ? (void *)(uintptr_t)data : &filler, .iov_len = bytes ? bytes : 1 };
	union { struct cmsghdr align; char bytes[CMSG_SPACE(sizeof(int))]; } control = { 0 };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof(control.bytes) };
	struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
	*c = (struct cmsghdr){ .cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS };
	memcpy(CMSG_DATA(c), &fd, sizeof(fd));
	uint64_t deadline_ms = tp_clock_ms() + SEND_LIMIT_MS;
	ssize_t n;
	while ((n = sendmsg(sock, &msg, MSG_NOSIGNAL | MSG_DONTWAIT)) < 0) {
		int error = errno;
		if (error == EINTR)
			continue;
		uint64_t now = tp_clock_ms();
		if ((error != EAGAIN && error != ETOOMANYREFS) || now >= deadline_ms)
			return TP_FAIL(error == EPIPE || error == ECONNRESET || error == EAGAIN ? ncclRemoteError : ncclSystemError,
				"can't pass descriptor %d over a Unix socket: %s", fd, error == EAGAIN ? "the peer doesn't read" : strerror(error));
		struct pollfd p = { .fd = error == EAGAIN ? sock : -1, .events = POLLOUT };
		poll(&p, 1, error == EAGAIN ? (int)(deadline_ms - now) : 1);
	}
	if ((size_t)n >= iov.iov_len)
		return ncclSuccess;
	return tp_socket_send(sock, (const char *)iov.iov_base + n, iov.iov_len - (size_t)n, deadline_ms, "the rest of a passed descriptor's message");
}

/* Keeps the one descriptor that was meant and closes what else a peer may have sent. */
static int take_fds(struct msghdr *msg)
{
	int kept = -1, total = 0;
	for (struct cmsghdr *c = CMSG_FIRSTHDR(msg); c; c = CMSG_NXTHDR(msg, c)) {
		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
			continue;
		size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
		for (size_t i = 0; i < count; i++, total++) {
			int fd;
			memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(fd));
			if (total == 0)
				kept = fd;
			else
				close(fd);
		}
	}
	if (kept >= 0 && (total != 1 || (msg->msg_flags & MSG_CTRUNC))) {
		close(kept);
		kept = -1;
	}
	return kept;
}

ncclResult_t tp_unix_recv_fd(int sock, int *fd, void *data, size_t bytes, uint64_t deadline_ms)
{
	char filler;
	struct iovec iov = { .iov_base = bytes ? data : &filler, .iov_len = bytes ? bytes : 1 };
	union { struct cmsghdr align; char bytes[CMSG_SPACE(FDS_MAX * sizeof(int))]; } control;
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1 };
	ssize_t n;
	for (;;) {
		msg.msg_control = control.bytes;
		msg.msg_controllen = sizeof(control.bytes);
		n = recvmsg(sock, &msg, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
		if (n >= 0)
			break;
		if (errno == EINTR)
			continue;
		uint64_t now = tp_clock_ms();
		if (errno != EAGAIN || (deadline_ms && now >= deadline_ms))
			return TP_FAIL(errno == EAGAIN || errno == ECONNRESET ? ncclRemoteError : ncclSystemError, "waiting for a descriptor over a Unix socket: %s",
				errno == EAGAIN ? "time is over" : strerror(errno));
		struct pollfd p = { .fd = sock, .events = POLLIN };
		poll(&p, 1, deadline_ms ? (int)TP_MIN(deadline_ms - now, (uint64_t)3600000) : -1);
	}
	int taken = take_fds(&msg);
	if (n == 0 || taken < 0) {
		if (taken >= 0)
			close(taken);
		return TP_FAIL(ncclRemoteError, n == 0 ? "the peer closed the Unix socket before it passed a descriptor"
			: "expected one descriptor over a Unix socket, found none or several (or this process has no descriptor left: ulimit -n)");
	}
	ncclResult_t result = ncclSuccess;
	if ((size_t)n < iov.iov_len)
		result = tp_socket_recv(sock, (char *)iov.iov_base + n, iov.iov_len - (size_t)n, deadline_ms, "the rest of a passed descriptor's message");
	if (result != ncclSuccess) {
		close(taken);
		return result;
	}
	*fd = taken;
	return ncclSuccess;
}

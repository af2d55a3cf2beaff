/* How two processes meet: the listener, the handshake, the probes of each mechanism (path_meet.h).
 *
 * A process listens under its user's and its slot's name in the network namespace. Who connects brings the link's segment, its
 * yard and its keys; the other probes and answers with its own; the first probes too and decides. A probe reads a nonce from the
 * other's memory, writes a token there and reads it back. Of two that connect to each other at once the one with the
 * lower slot wins. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>
#include "verbs/internal.h"
#include "verbs/path_meet.h"
#include "verbs/wire_fault.h"

enum { ANSWER_MS = 2000, FDS_MAX = 3 };

/* What peers read and write to see whether they can. One token a peer, so that a late one strikes nobody. */
static struct { uint64_t nonce, tokens[TP_PATH_SLOTS]; } probed;
static int listener = -1;

static size_t make_name(char *out, size_t bytes, int slot)
{
	return (size_t)snprintf(out, bytes, "telpher-verbs-path-%u-%d", (unsigned)geteuid(), slot);
}

static socklen_t make_address(struct sockaddr_un *addr, int slot)
{
	memset(addr, 0, sizeof(*addr));
	addr->sun_family = AF_UNIX;
	return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + make_name(addr->sun_path + 1, sizeof(addr->sun_path) - 1, slot));
}

/* ---- messages with descriptors ---- */

int tp_path_send(int s, const void *data, size_t bytes, const int *fds, int count)
{
	_Alignas(struct cmsghdr) uint8_t control[CMSG_SPACE(sizeof(int) * FDS_MAX)] = { 0 };
	struct iovec vector = { .iov_base = (void *)(uintptr_t)data, .iov_len = bytes };
	struct msghdr message = { .msg_iov = &vector, .msg_iovlen = 1 };
	if (count) {
		message.msg_control = control;
		message.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)count);
		struct cmsghdr *c = CMSG_FIRSTHDR(&message);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)count);
		memcpy(CMSG_DATA(c), fds, sizeof(int) * (size_t)count);
	}
	ssize_t sent;
	while ((sent = sendmsg(s, &message, MSG_NOSIGNAL)) < 0 && errno == EINTR)
		;
	return sent == (ssize_t)bytes ? 0 : errno;
}

/* fds: those that came, -1 where none did. Returns the bytes, or -1. */
ssize_t tp_path_receive(int s, void *data, size_t bytes, int fds[FDS_MAX], int flags)
{
	_Alignas(struct cmsghdr) uint8_t control[CMSG_SPACE(sizeof(int) * 8)];
	struct iovec vector = { .iov_base = data, .iov_len = bytes };
	struct msghdr message = { .msg_iov = &vector, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control) };
	ssize_t got;
	for (int i = 0; i < FDS_MAX; i++)
		fds[i] = -1;
	while ((got = recvmsg(s, &message, MSG_CMSG_CLOEXEC | flags)) < 0 && errno == EINTR)
		;
	for (struct cmsghdr *c = got >= 0 ? CMSG_FIRSTHDR(&message) : NULL; c; c = CMSG_NXTHDR(&message, c)) {
		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
			continue;
		size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
		for (size_t i = 0; i < count; i++) {
			int fd;
			memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(fd));
			if (i < FDS_MAX && fds[i] < 0)
				fds[i] = fd;
			else
				close(fd);
		}
	}
	return got;
}

void tp_path_close_all(int *fds, int count)
{
	for (int i = 0; i < count; i++)
		if (fds[i] >= 0)
			close(fds[i]);
}

/* ---- what each says ---- */

static uint64_t netns(void)
{
	struct stat info = { 0 };
	stat("/proc/self/ns/net", &info);
	return info.st_ino;
}

void tp_path_introduce(struct tp_path_hello *hello, enum tp_path_hello_kind kind, int slot, int peer_slot)
{
	*hello = (struct tp_path_hello){ .magic = TP_PATH_MAGIC, .version = TP_PATH_VERSION, .kind = kind, .slot = slot, .uid = geteuid(),
		.dumpable = (uint32_t)prctl(PR_GET_DUMPABLE), .faults = tp_fault_wire(), .netns = netns(), .process = tp_process_hash(), .nonce = probed.nonce,
		.nonce_addr = (uintptr_t)&probed.nonce, .token_addr = (uintptr_t)&probed.tokens[peer_slot & (TP_PATH_SLOTS - 1)] };
}

static int copy_word(pid_t pid, bool write, uint64_t at, uint64_t *value)
{
	struct iovec local = { value, sizeof(*value) }, remote = { (void *)(uintptr_t)at, sizeof(*value) };
	ssize_t done = write ? process_vm_writev(pid, &local, 1, &remote, 1, 0) : process_vm_readv(pid, &local, 1, &remote, 1, 0);
	return done == (ssize_t)sizeof(*value) ? 0 : done < 0 ? errno : EFAULT;
}

enum tp_path_reason tp_path_probe(pid_t pid, const struct tp_path_hello *hello, int *error)
{
	uint64_t seen = 0, token, back = 0;
	*error = 0;
	if (hello->magic != TP_PATH_MAGIC || hello->version != TP_PATH_VERSION)
		return TP_PATH_OTHER_VERSION;
	if (hello->uid != geteuid())
		return TP_PATH_OTHER_UID;
	if (hello->netns != netns())
		return TP_PATH_OTHER_NETNS;
	if (hello->dumpable != 1 || prctl(PR_GET_DUMPABLE) != 1)
		return TP_PATH_NOT_DUMPABLE;
	if (hello->faults || tp_fault_wire())
		return TP_PATH_FAULTS;
	if (pid <= 0)
		return TP_PATH_OTHER_PIDNS;
	tp_secret_random(&token, sizeof(token));
	*error = copy_word(pid, false, hello->nonce_addr, &seen);
	if (!*error && seen != hello->nonce)
		return TP_PATH_OTHER_PIDNS;
	if (!*error)
		*error = copy_word(pid, true, hello->token_addr, &token);
	if (!*error)
		*error = copy_word(pid, false, hello->token_addr, &back);
	if (*error || back != token)
		return TP_PATH_CMA_REFUSED;
	return TP_PATH_TAKEN;
}

pid_t tp_path_pid_behind(int s, uid_t *uid)
{
	struct ucred peer = { 0 };
	socklen_t length = sizeof(peer);
	if (getsockopt(s, SOL_SOCKET, SO_PEERCRED, &peer, &length) < 0)
		return -1;
	*uid = peer.uid;
	return peer.pid;
}

int tp_path_connect(int slot)
{
	struct sockaddr_un addr;
	socklen_t length = make_address(&addr, slot);
	struct timeval limit = { .tv_sec = ANSWER_MS / 1000 };
	int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (s < 0)
		return -1;
	setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
	setsockopt(s, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
	if (connect(s, (const struct sockaddr *)&addr, length) == 0)
		return s;
	int error = errno;
	close(s);
	errno = error;
	return -1;
}

int tp_path_listen(int slot)
{
	struct sockaddr_un addr;
	socklen_t length = make_address(&addr, slot);
	int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (s < 0)
		return -1;
	if (bind(s, (const struct sockaddr *)&addr, length) < 0 || listen(s, 128) < 0) {
		int error = errno;
		close(s);
		errno = error;
		return -1;
	}
	tp_secret_random(&probed.nonce, sizeof(probed.nonce));
	listener = s;
	return s;
}

void tp_path_meet_forget(void)
{
	if (listener >= 0)
		close(listener);
	listener = -1;
}

int tp_path_open_pidfd(pid_t pid)
{
#ifdef SYS_pidfd_open
	return (int)syscall(SYS_pidfd_open, pid, 0);
#else
	(void)pid;
	errno = ENOSYS;
	return -1;
#endif
}

bool tp_path_has_ended(int s, int pidfd)
{
	struct pollfd polls[2] = { { .fd = pidfd, .events = POLLIN }, { .fd = s, .events = POLLRDHUP } };
	return poll(polls, 2, 0) > 0 && ((polls[0].revents & POLLIN) || (polls[1].revents & (POLLHUP | POLLRDHUP | POLLERR)));
}

/* The box that keeps sockets open (share.h). */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include "verbs/share.h"
#include "verbs/wire.h"

#ifndef SO_PEEK_OFF
#define SO_PEEK_OFF 42
#endif

void tp_share_name(char *out, size_t bytes) { snprintf(out, bytes, "telpher-verbs-%u-%d", (unsigned)geteuid(), TP_WIRE_UDP_PORT); }

int tp_box_new(void)
{
	struct sockaddr_un name = { .sun_family = AF_UNIX };
	socklen_t length = sizeof(name);
	int bytes = 1 << 20, box = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (box < 0)
		return -1;
	setsockopt(box, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
	/* A name of the kernel's choice; once it is connected to itself nobody else can send to it. */
	if (bind(box, (const struct sockaddr *)&name, sizeof(sa_family_t)) < 0 || getsockname(box, (struct sockaddr *)&name, &length) < 0 ||
		connect(box, (const struct sockaddr *)&name, length) < 0) {
		int error = errno;
		close(box);
		errno = error;
		return -1;
	}
	return box;
}

int tp_box_put(int box, const struct tp_share_boxed *what, const int *fds)
{
	_Alignas(struct cmsghdr) uint8_t control[CMSG_SPACE(sizeof(int) * TP_SHARE_BATCH)] = { 0 };
	struct iovec vector = { .iov_base = (void *)(uintptr_t)what, .iov_len = sizeof(*what) };
	struct msghdr message = { .msg_iov = &vector, .msg_iovlen = 1, .msg_control = control, .msg_controllen = CMSG_SPACE(sizeof(int) * what->count) };
	struct cmsghdr *c = CMSG_FIRSTHDR(&message);
	c->cmsg_level = SOL_SOCKET;
	c->cmsg_type = SCM_RIGHTS;
	c->cmsg_len = CMSG_LEN(sizeof(int) * what->count);
	memcpy(CMSG_DATA(c), fds, sizeof(int) * what->count);
	return sendmsg(box, &message, MSG_NOSIGNAL) == (ssize_t)sizeof(*what) ? 0 : errno;
}

int tp_box_look(int box, void (*visit)(const struct tp_share_boxed *what, const int *fds, void *arg), void *arg)
{
	int offset = 0;
	if (setsockopt(box, SOL_SOCKET, SO_PEEK_OFF, &offset, sizeof(offset)) < 0)
		return errno;
	for (;;) {
		struct tp_share_boxed what = { 0 };
		_Alignas(struct cmsghdr) uint8_t control[CMSG_SPACE(sizeof(int) * TP_SHARE_BATCH)] = { 0 };
		struct iovec vector = { .iov_base = &what, .iov_len = sizeof(what) };
		struct msghdr message = { .msg_iov = &vector, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control) };
		ssize_t n = recvmsg(box, &message, MSG_PEEK | MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
		if (n < 0)
			return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : errno;
		struct cmsghdr *c = CMSG_FIRSTHDR(&message);
		int fds[TP_SHARE_BATCH];
		uint32_t count = c && c->cmsg_type == SCM_RIGHTS ? (uint32_t)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int)) : 0;
		if (count)
			memcpy(fds, CMSG_DATA(c), count * sizeof(int));
		if (n != (ssize_t)sizeof(what) || count != what.count || (message.msg_flags & MSG_CTRUNC)) {
			for (uint32_t i = 0; i < count; i++)
				close(fds[i]);
			return EMFILE;
		}
		visit(&what, fds, arg);
	}
}

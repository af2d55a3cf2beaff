/* Messages between the processes of a machine: datagrams over Unix sockets with abstract names, which the kernel keeps apart by
 * network namespace and takes away with their process. One socket a process, whose 16-bit name is the upper half of all its
 * connections' numbers, so that every answer finds its way; and one for each port that is held. What came by the wire comes
 * here too, from the keeper, in a longer datagram (gsi.h). */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>
#include "verbs/rdmacm/cm.h"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
enum { PARCEL_MAX = 1024, LAST_WORDS_MS = 500, WATCHED_MAX = 1024 };

static int own_fd = -1, epoll_fd = -1, wake_fd = -1;
static uint16_t own_name, next_number;
static pid_t owner;                 /* a forked child starts anew */
static struct { pid_t pid; int fd; } watched[WATCHED_MAX];  /* peers' processes */
static int watched_count;

uint64_t cm_now_ms(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

static int bind_name(const struct tp_cm_name *what, int *out)
{
	struct sockaddr_un name;
	socklen_t length = tp_cm_name_address(what, &name);
	int one = 1, fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return errno;
	struct epoll_event event = { .events = EPOLLIN, .data.fd = fd };
	if (setsockopt(fd, SOL_SOCKET, SO_PASSCRED, &one, sizeof(one)) || bind(fd, (struct sockaddr *)&name, length) ||
		epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event)) {
		int error = errno;
		close(fd);
		return error;
	}
	*out = fd;
	return 0;
}

/* One datagram of our own user's, and how many bytes of use it has; false: there is none. */
static bool receive(int fd, uint8_t *data, size_t room, size_t *bytes, pid_t *pid)
{
	union { char bytes[CMSG_SPACE(sizeof(struct ucred))]; struct cmsghdr align; } control;
	struct iovec part = { data, room };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control) };
	ssize_t got = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	*bytes = 0;
	if (got < 0)
		return errno == EINTR;
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);
	struct ucred who = { .uid = (uid_t)-1 };
	if (header && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_CREDENTIALS)
		memcpy(&who, CMSG_DATA(header), sizeof(who));
	if (!(message.msg_flags & MSG_TRUNC) && who.uid == geteuid())
		*bytes = (size_t)got;
	*pid = who.pid;
	return true;
}

/* A descriptor that has been closed since it was found ready may be the program's by now. */
static bool is_ours_locked(int fd)
{
	struct cm_id *id = cm_ids;
	while (id && id->port_fd != fd)
		id = id->next;
	return fd == own_fd || id;
}

static void take_locked(int fd)
{
	uint8_t data[PARCEL_MAX], bytes[TP_MAD_BYTES];
	size_t got;
	pid_t pid;
	while (receive(fd, data, sizeof(data), &got, &pid)) {
		struct tp_cm_mad mad;
		struct cm_target from = { .wire = got != TP_MAD_BYTES, .pid = got == TP_MAD_BYTES ? pid : 0 };
		int copies = from.wire ? tp_card_inner_gsi_take(data, got, bytes, &from.peer, &from.own) : 1;
		if (!copies || !tp_cm_parse(from.wire ? bytes : data, TP_MAD_BYTES, &mad))
			continue;
		from.name = tp_cm_name_of_number(mad.local_id);
		for (; copies > 0; copies--)
			cm_arrive_locked(&mad, fd, &from);
	}
}

/* ---- peers' ends: a process that is killed says no DREQ, and the kernel isn't the manager that would say it ---- */

void cm_bus_watch_locked(pid_t pid)
{
	for (int i = 0; i < watched_count; i++)
		if (watched[i].pid == pid)
			return;
	if (pid <= 0 || pid == getpid() || watched_count == WATCHED_MAX)
		return;
	int fd = (int)syscall(SYS_pidfd_open, pid, 0);
	struct epoll_event event = { .events = EPOLLIN, .data.fd = fd };
	if (fd < 0)
		return;
	if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event)) {
		close(fd);
		return;
	}
	watched[watched_count].pid = pid;
	watched[watched_count++].fd = fd;
}

/* True where the descriptor is a process's that has ended. */
static bool take_end_locked(int fd)
{
	for (int i = 0; i < watched_count; i++)
		if (watched[i].fd == fd) {
			pid_t pid = watched[i].pid;
			watched[i] = watched[--watched_count];
			close(fd);
			cm_ended_locked(pid);
			return true;
		}
	return false;
}

static void *run(void *arg)
{
	(void)arg;
	for (uint64_t next_ms = 0;;) {
		struct epoll_event events[16];
		uint64_t now_ms = cm_now_ms();
		int wait_ms = !next_ms ? -1 : next_ms <= now_ms ? 0 : (int)(next_ms - now_ms);
		int count = epoll_wait(epoll_fd, events, 16, wait_ms);
		pthread_mutex_lock(&cm_lock);
		for (int i = 0; i < count; i++) {
			eventfd_t rung;
			if (events[i].data.fd == wake_fd)
				eventfd_read(wake_fd, &rung);
			else if (!take_end_locked(events[i].data.fd) && is_ours_locked(events[i].data.fd))
				take_locked(events[i].data.fd);
		}
		next_ms = cm_timers_locked(cm_now_ms());
		cm_reap_locked();
		pthread_mutex_unlock(&cm_lock);
	}
	return NULL;
}

static int start_thread(void)
{
	pthread_t thread;
	sigset_t all, before;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	int error = pthread_create(&thread, NULL, run, NULL);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (error)
		return error;
	pthread_setname_np(thread, "telpher-cm");
	pthread_detach(thread);
	return 0;
}

static int start_locked(void)
{
	struct epoll_event event = { .events = EPOLLIN };
	epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (epoll_fd < 0 || wake_fd < 0)
		return errno;
	event.data.fd = wake_fd;
	if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, wake_fd, &event))
		return errno;
	int error = EADDRINUSE;
	for (int tries = 0; tries < 1000 && error == EADDRINUSE; tries++) {
		if (getrandom(&own_name, sizeof(own_name), 0) != sizeof(own_name))
			return errno;
		error = bind_name(&(struct tp_cm_name){ .number = own_name }, &own_fd);
	}
	if (!error && getrandom(&next_number, sizeof(next_number), 0) != sizeof(next_number))
		error = errno;
	return error ? error : start_thread();
}

/* The parent's name must not outlive it because a child has its socket. */
void cm_bus_forget(void)
{
	int *const fds[] = { &own_fd, &epoll_fd, &wake_fd };
	for (int i = 0; i < watched_count; i++)
		close(watched[i].fd);
	watched_count = 0;
	for (int i = 0; i < 3; i++) {
		if (*fds[i] >= 0)
			close(*fds[i]);
		*fds[i] = -1;
	}
}

int cm_bus_start(void)
{
	pthread_mutex_lock(&cm_lock);
	int error = owner == getpid() ? 0 : start_locked();
	if (!error)
		owner = getpid();
	pthread_mutex_unlock(&cm_lock);
	return error;
}

uint32_t cm_bus_number(void)
{
	for (;;) {
		uint32_t number = (uint32_t)own_name << 16 | ++next_number;
		struct cm_id *id = cm_ids;
		while (id && id->local_id != number)
			id = id->next;
		if (!id)
			return number;
	}
}

int cm_bus_hold(uint16_t space, uint16_t number, int *fd)
{
	return bind_name(&(struct tp_cm_name){ .port = true, .space = space, .number = number }, fd);
}

void cm_bus_release(int fd)
{
	if (fd >= 0)
		close(fd);
}

int cm_bus_send(const struct cm_target *target, const uint8_t mad[TP_MAD_BYTES])
{
	if (target->wire) {
		/* What can't be sent now is sent again. */
		tp_card_inner_gsi_send(&target->own, &target->peer, target->tos, mad);
		return 0;
	}
	struct sockaddr_un name;
	socklen_t length = tp_cm_name_address(&target->name, &name);
	/* A full queue is a lost message: it is sent again. */
	if (sendto(own_fd, mad, TP_MAD_BYTES, MSG_DONTWAIT | MSG_NOSIGNAL, (struct sockaddr *)&name, length) < 0 && errno == ECONNREFUSED)
		return ECONNREFUSED;
	return 0;
}

void cm_bus_wake(void) { eventfd_write(wake_fd, 1); }

/* A process often ends just after it let go of its connections. Peers on other machines should hear of it, which the kernel
 * would see to if it were the manager: so wait for their answers, for a moment. */
__attribute__((destructor)) static void last_words(void)
{
	if (owner != getpid())
		return;
	for (uint64_t end_ms = cm_now_ms() + LAST_WORDS_MS; cm_now_ms() < end_ms; poll(NULL, 0, 1)) {
		if (pthread_mutex_trylock(&cm_lock))
			continue;
		bool any = cm_parting_locked();
		pthread_mutex_unlock(&cm_lock);
		if (!any)
			return;
	}
}

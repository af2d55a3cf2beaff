/* Where ranks that one launcher started on one machine find each other without being told an address: rank 0 makes the
 * unique id and hands it out on an abstract Unix socket named after the job and the user; only processes of the same user
 * get it. A job that spans machines needs NCCL_COMM_ID. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "comm/internal.h"

struct server {
	int fd, left;               /* ranks that haven't asked yet */
	ncclUniqueId id;
	_Atomic(struct tp_service_watch *) watch;
};

static bool is_same_user(int fd)
{
	pid_t pid;
	uid_t uid;
	return tp_unix_peer(fd, &pid, &uid) == ncclSuccess && uid == geteuid();
}

/* On the service thread. The reply fits any socket buffer, so it never blocks. */
static void serve(void *arg, uint32_t events)
{
	struct server *server = arg;
	struct tp_service_watch *watch = atomic_load_explicit(&server->watch, memory_order_acquire);    /* pairs with hand_out */
	(void)events;
	int fd;
	if (!watch) return;     /* too early; the event comes again */
	while (server->left > 0 && (fd = accept4(server->fd, NULL, NULL, SOCK_CLOEXEC)) >= 0) {
		if (is_same_user(fd) && tp_socket_send(fd, &server->id, sizeof(server->id), tp_clock_ms() + 100, NULL) == ncclSuccess)
			server->left--;
		close(fd);
	}
	if (server->left > 0) return;
	tp_service_unwatch(watch);
	close(server->fd);
	free(server);
}

static ncclResult_t hand_out(const char *name, int others, const ncclUniqueId *id)
{
	struct server *server = tp_alloc(1, sizeof(*server), "meeting place");
	if (!server) return ncclSystemError;
	*server = (struct server){ .left = others, .id = *id };
	ncclResult_t result = tp_unix_listen(name, TP_MAX(others, 8), &server->fd);
	if (result != ncclSuccess) goto free_server;
	result = tp_socket_set_nonblocking(server->fd, true);
	struct tp_service_watch *watch;
	if (result == ncclSuccess) result = tp_service_watch_fd(server->fd, EPOLLIN, serve, server, &watch);
	if (result == ncclSuccess) {
		atomic_store_explicit(&server->watch, watch, memory_order_release);
		return ncclSuccess;
	}
	close(server->fd);
free_server:
	free(server);
	return result;
}

ncclResult_t tp_meet_on_this_machine(const char *job, int rank, int nranks, int timeout_ms, ncclUniqueId *id)
{
	static _Atomic unsigned rounds;         /* a process may meet its job several times, in the same order on all ranks */
	char name[100];
	uint64_t key = tp_hash64(job, strlen(job), 0x6d656574);
	snprintf(name, sizeof(name), "telpher-meet-%u-%016llx-%u", (unsigned)geteuid(), (unsigned long long)key,
		atomic_fetch_add_explicit(&rounds, 1, memory_order_relaxed));
	if (rank == 0) {
		ncclUniqueId made;
		TP_TRY(tp_boot_unique_id(&made));
		if (nranks > 1) TP_TRY(hand_out(name, nranks - 1, &made));
		*id = made;
		return ncclSuccess;
	}
	int fd;
	uint64_t deadline = tp_clock_ms() + (uint64_t)timeout_ms;
	ncclResult_t result = tp_unix_connect(name, timeout_ms, &fd);
	if (result != ncclSuccess)
		return TP_FAIL(ncclRemoteError, "rank %d of %d found no rank 0 of job \"%s\" on this machine within %d s", rank, nranks, job,
			timeout_ms / 1000);
	if (!is_same_user(fd)) result = TP_FAIL(ncclSystemError, "the meeting place of job \"%s\" belongs to another user", job);
	else result = tp_socket_recv(fd, id, sizeof(*id), deadline, "rank 0 at the meeting place");
	close(fd);
	return result;
}

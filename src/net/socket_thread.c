/* Helper threads of a connection (NCCL_SOCKET_NTHREADS > 1): each owns its share of the bulk sockets and moves them,
 * sleeping in poll while they are blocked and on its eventfd while there is nothing to do. */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include "net/socket.h"

static void eventfd_set(int fd)
{
	uint64_t one = 1;
	ssize_t n;

	do n = write(fd, &one, sizeof(one));
	while (n < 0 && errno == EINTR);
}

void tp_sock_signal_done(struct tp_sock_comm *comm)
{
	if (atomic_exchange_explicit(&comm->signalled, 1, memory_order_seq_cst) == 0) eventfd_set(comm->done_fd);
}

void tp_sock_helpers_wake(struct tp_sock_comm *comm)
{
	for (int i = 0; i < comm->nhelpers; i++) {
		struct tp_sock_helper *h = &comm->helpers[i];
		/* seq_cst: either we see the flag, or the helper's last look sees what was published before this. */
		if (atomic_load_explicit(&h->sleeping, memory_order_seq_cst)
			&& atomic_exchange_explicit(&h->sleeping, 0, memory_order_seq_cst)) eventfd_set(h->wake_fd);
	}
}

static bool helper_has_work(struct tp_sock_helper *h)
{
	if (atomic_load_explicit(&h->comm->error, memory_order_acquire) != ncclSuccess) return false;
	for (int i = 0; i < h->count; i++)
		if (tp_sock_stream_has_work(h->comm, h->first + i)) return true;
	return false;
}

/* Until a socket is ready, or there is more to do than what blocks. */
static void helper_sleep(struct tp_sock_helper *h)
{
	struct tp_sock_comm *comm = h->comm;
	struct pollfd fds[TP_SOCK_MAX_STREAMS + 1];
	bool unblocked_work = false, failed = atomic_load_explicit(&comm->error, memory_order_acquire) != ncclSuccess;
	int n = 1;

	atomic_store_explicit(&h->sleeping, 1, memory_order_seq_cst);
	fds[0] = (struct pollfd){ .fd = h->wake_fd, .events = POLLIN };
	for (int i = h->first; i < h->first + h->count && !failed; i++) {
		if (!tp_sock_stream_has_work(comm, i)) continue;
		if (!comm->streams[i].blocked) unblocked_work = true;
		fds[n++] = (struct pollfd){ .fd = comm->streams[i].fd, .events = comm->sending ? POLLOUT : POLLIN };
	}
	if (!unblocked_work && !atomic_load_explicit(&comm->stopping, memory_order_seq_cst)) {
		while (poll(fds, (nfds_t)n, -1) < 0 && errno == EINTR) {}
	}
	/* Whoever took the flag away has set the eventfd, or is about to: a stray wake-up costs one turn. */
	atomic_store_explicit(&h->sleeping, 0, memory_order_seq_cst);
	if (fds[0].revents & POLLIN) {
		uint64_t count;
		ssize_t got = read(h->wake_fd, &count, sizeof(count));
		(void)got;
	}
}

static void *helper_main(void *arg)
{
	struct tp_sock_helper *h = arg;
	struct tp_sock_comm *comm = h->comm;

	while (!atomic_load_explicit(&comm->stopping, memory_order_seq_cst)) {
		bool blocked = true;

		if (helper_has_work(h)) {
			for (int i = h->first; i < h->first + h->count; i++) {
				if (!tp_sock_stream_has_work(comm, i)) continue;
				tp_sock_stream_move(comm, i);
				if (!comm->streams[i].blocked) blocked = false;
			}
			if (atomic_load_explicit(&comm->error, memory_order_acquire) != ncclSuccess) tp_sock_signal_done(comm);
		}
		if (blocked) helper_sleep(h);
	}
	return NULL;
}

ncclResult_t tp_sock_helpers_start(struct tp_sock_comm *comm)
{
	sigset_t all, old;
	int each = (comm->nstreams - 1) / comm->nthreads, error = 0;

	comm->done_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (comm->done_fd < 0) return TP_FAIL(ncclSystemError, "NET/Socket : no event descriptor for helper threads: %s", strerror(errno));
	comm->helpers = tp_alloc((size_t)comm->nthreads, sizeof(*comm->helpers), "socket helper threads");
	if (!comm->helpers) return ncclSystemError;
	/* The application's signals are not ours to take. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	for (int i = 0; i < comm->nthreads && error == 0; i++) {
		struct tp_sock_helper *h = &comm->helpers[i];
		h->comm = comm;
		h->first = 1 + i * each;
		h->count = each;
		h->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
		if (h->wake_fd < 0) {
			error = errno;
			break;
		}
		error = pthread_create(&h->thread, NULL, helper_main, h);
		if (error != 0) close(h->wake_fd);
		else comm->nhelpers++;
	}
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (error != 0) return TP_FAIL(ncclSystemError, "NET/Socket : helper thread %d of %d can't be started: %s", comm->nhelpers, comm->nthreads, strerror(error));
	return ncclSuccess;
}

void tp_sock_helpers_stop(struct tp_sock_comm *comm)
{
	atomic_store_explicit(&comm->stopping, 1, memory_order_seq_cst);
	for (int i = 0; i < comm->nhelpers; i++) eventfd_set(comm->helpers[i].wake_fd);
	for (int i = 0; i < comm->nhelpers; i++) {
		pthread_join(comm->helpers[i].thread, NULL);
		close(comm->helpers[i].wake_fd);
	}
	free(comm->helpers);
	comm->helpers = NULL;
	comm->nhelpers = 0;
	if (comm->done_fd >= 0) close(comm->done_fd);
}

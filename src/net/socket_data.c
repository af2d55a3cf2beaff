/* Messages over the sockets of a connection.
 *
 * Socket 0 carries a header {size, tag} a message and, behind it, the whole of a small one: header and data leave in one
 * sendmsg, and the receiver reads ahead into a small stage, so each costs one system call. A large message is striped: its
 * header on socket 0, a contiguous part on each socket. Both ends compute the parts from the size alone, so the other
 * sockets carry bare data. Messages are matched in the order in which they were posted; a stream works through them in that order at its own
 * pace, so a connection always has several messages under way.
 *
 * Without helper threads the caller moves all streams (in isend, irecv and test). With them, stream 0 has headers and small
 * messages only and stays the caller's, and each helper owns its share of the others. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>
#include "net/socket.h"

#define SMALL_BYTES 2048
#define HEADER_BYTES sizeof(struct tp_wire_message)

static bool is_striped(const struct tp_sock_comm *comm, size_t bytes)
{
	return comm->nstreams > 1 && bytes > TP_SOCK_WHOLE_BYTES;
}

/* The part of a message that a stream carries. */
static size_t stream_part(const struct tp_sock_comm *comm, size_t bytes, int stream, size_t *offset)
{
	int first = comm->nthreads > 0 ? 1 : 0;
	size_t count, each, index;

	*offset = 0;
	if (!is_striped(comm, bytes)) return stream == 0 ? bytes : 0;
	if (stream < first) return 0;
	count = TP_MIN((size_t)(comm->nstreams - first), tp_div_up(bytes, TP_SOCK_PART_BYTES));
	each = tp_align_up(tp_div_up(bytes, count), TP_CACHE_LINE);
	index = (size_t)(stream - first);
	if (index >= count || index * each >= bytes) return 0;
	*offset = index * each;
	return TP_MIN(each, bytes - *offset);
}

/* Appends [offset, offset + bytes) of the request's memory to iov; returns the number of entries. */
static int slice(const struct tp_sock_request *request, size_t offset, size_t bytes, struct iovec *iov)
{
	int n = 0;

	for (int i = 0; i < request->nparts && bytes > 0; i++) {
		size_t have = request->parts[i].iov_len;
		if (offset >= have) {
			offset -= have;
			continue;
		}
		iov[n].iov_base = (char *)request->parts[i].iov_base + offset;
		iov[n].iov_len = TP_MIN(have - offset, bytes);
		bytes -= iov[n].iov_len;
		offset = 0;
		n++;
	}
	return n;
}

static void copy_in(const struct tp_sock_request *request, size_t offset, const unsigned char *from, size_t bytes)
{
	struct iovec iov[TP_NET_MAX_PARTS];
	int n = slice(request, offset, bytes, iov);

	for (int i = 0; i < n; i++) {
		memcpy(iov[i].iov_base, from, iov[i].iov_len);
		from += iov[i].iov_len;
	}
}

static ncclResult_t comm_error(struct tp_sock_comm *comm)
{
	return (ncclResult_t)atomic_load_explicit(&comm->error, memory_order_acquire);  /* pairs with set_error */
}

/* Keeps the first error; true where this one is it, and should be logged. */
static bool set_error(struct tp_sock_comm *comm, ncclResult_t result)
{
	int none = ncclSuccess;
	return atomic_compare_exchange_strong_explicit(&comm->error, &none, result, memory_order_acq_rel, memory_order_acquire);
}

static void fail_errno(struct tp_sock_comm *comm, const char *what, int error)
{
	bool gone = error == ECONNRESET || error == EPIPE || error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH
		|| error == ENETDOWN || error == ECONNABORTED || error == ENOTCONN;

	if (!set_error(comm, gone ? ncclRemoteError : ncclSystemError)) return;
	(void)TP_FAIL(gone ? ncclRemoteError : ncclSystemError, "NET/Socket : %s peer %s (rank %d -> rank %d) failed: %s%s", what, comm->peer,
		comm->from, comm->to, strerror(error), gone ? "; the peer has died, closed the connection or can't be reached any more" : "");
}

static void fail_closed(struct tp_sock_comm *comm)
{
	if (!set_error(comm, ncclRemoteError)) return;
	(void)TP_FAIL(ncclRemoteError, "NET/Socket : peer %s (rank %d -> rank %d) closed the connection while data was expected; has it died or been aborted?",
		comm->peer, comm->from, comm->to);
}

/* One stream is through with its part. Nothing of the request may be touched afterwards. */
static void part_done(struct tp_sock_comm *comm, struct tp_sock_request *request)
{
	/* pairs with the load in tp_sock_test */
	if (atomic_fetch_sub_explicit(&request->left, 1, memory_order_acq_rel) == 1 && comm->nthreads > 0) tp_sock_signal_done(comm);
}

/* The request's size is known: how many streams must work on it, and who has to know. */
static void publish_striped(struct tp_sock_comm *comm, struct tp_sock_request *request)
{
	uint64_t n = atomic_load_explicit(&comm->striped, memory_order_relaxed);

	atomic_fetch_add_explicit(&request->left, comm->nstreams - 1, memory_order_relaxed);
	comm->striped_at[n % TP_NET_MAX_REQUESTS] = request;
	/* seq_cst: pairs with the load in tp_sock_stream_has_work, and orders the store before the look at `sleeping` in wake */
	atomic_store_explicit(&comm->striped, n + 1, memory_order_seq_cst);
	if (comm->nthreads > 0) tp_sock_helpers_wake(comm);
}

static struct tp_sock_request *stream_request(struct tp_sock_comm *comm, int stream)
{
	uint64_t at = comm->streams[stream].at;

	if (stream == 0) return at < comm->posted ? &comm->requests[at % TP_NET_MAX_REQUESTS] : NULL;
	if (at >= atomic_load_explicit(&comm->striped, memory_order_seq_cst)) return NULL;     /* pairs with publish_striped */
	return comm->striped_at[at % TP_NET_MAX_REQUESTS];
}

bool tp_sock_stream_has_work(struct tp_sock_comm *comm, int stream)
{
	return stream_request(comm, stream) != NULL;
}

static void stream_next(struct tp_sock_comm *comm, struct tp_sock_stream *s, struct tp_sock_request *request)
{
	s->at++;
	s->done = 0;
	part_done(comm, request);
}

/* One system call. A few bytes are cheaper gathered here than by the kernel. */
static ssize_t send_pieces(int fd, struct iovec *iov, int n)
{
	struct msghdr message = { .msg_iov = iov, .msg_iovlen = (size_t)n };
	unsigned char small[SMALL_BYTES];
	size_t bytes = 0;

	for (int i = 0; i < n; i++) bytes += iov[i].iov_len;
	if (bytes > sizeof(small)) return sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
	bytes = 0;
	for (int i = 0; i < n; i++) {
		if (iov[i].iov_len == 0) continue;
		memcpy(small + bytes, iov[i].iov_base, iov[i].iov_len);
		bytes += iov[i].iov_len;
	}
	return send(fd, small, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
}

static void send_stream(struct tp_sock_comm *comm, int stream)
{
	struct tp_sock_stream *s = &comm->streams[stream];
	size_t header = stream == 0 ? HEADER_BYTES : 0;
	struct tp_sock_request *request;

	while ((request = stream_request(comm, stream)) != NULL) {
		struct iovec iov[TP_NET_MAX_PARTS + 1];
		size_t offset, part = stream_part(comm, request->bytes, stream, &offset);
		int n = 0;

		if (s->done == header + part) {
			stream_next(comm, s, request);
			continue;
		}
		if (s->done < header) {
			iov[n].iov_base = (char *)&request->header + s->done;
			iov[n++].iov_len = header - s->done;
			n += slice(request, offset, part, iov + n);
		} else {
			n = slice(request, offset + s->done - header, part - (s->done - header), iov);
		}
		ssize_t sent = send_pieces(s->fd, iov, n);
		if (sent < 0 && errno == EINTR) continue;
		if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS)) {
			s->blocked = true;
			return;
		}
		if (sent < 0) {
			fail_errno(comm, "sending to", errno);
			return;
		}
		s->done += (size_t)sent;
		if (s->done == header + part) stream_next(comm, s, request);
	}
}

/* A header is there: does it fit what was posted? */
static bool take_header(struct tp_sock_comm *comm, struct tp_sock_request *request)
{
	const struct tp_wire_message *h = &request->header;

	if (h->kind != TP_WIRE_MESSAGE) {
		if (set_error(comm, ncclInternalError))
			(void)TP_FAIL(ncclInternalError, "NET/Socket : peer %s (rank %d -> rank %d) sent 0x%08x where a message begins with 0x%08x: the stream is broken",
				comm->peer, comm->from, comm->to, h->kind, TP_WIRE_MESSAGE);
		return false;
	}
	if (h->tag != request->tag || h->bytes > request->capacity) {
		if (set_error(comm, ncclInvalidUsage))
			(void)TP_FAIL(ncclInvalidUsage, "NET/Socket : peer %s (rank %d -> rank %d) sent %llu bytes with tag %d, but a receive of at most %zu bytes with tag %d was posted",
				comm->peer, comm->from, comm->to, (unsigned long long)h->bytes, h->tag, request->capacity, request->tag);
		return false;
	}
	request->bytes = h->bytes;
	if (is_striped(comm, request->bytes)) publish_striped(comm, request);
	return true;
}

/* Reads into the request's memory and, behind it, the stage (socket 0). False: blocked or failed. */
static bool read_more(struct tp_sock_comm *comm, struct tp_sock_stream *s, struct iovec *iov, int n, size_t wanted, size_t *direct)
{
	bool staged = s == &comm->streams[0];
	ssize_t got;

	if (staged) {
		iov[n].iov_base = comm->stage;
		iov[n++].iov_len = TP_SOCK_STAGE_BYTES;
	}
	struct msghdr message = { .msg_iov = iov, .msg_iovlen = (size_t)n };
	do got = n == 1 ? recv(s->fd, iov[0].iov_base, iov[0].iov_len, MSG_DONTWAIT) : recvmsg(s->fd, &message, MSG_DONTWAIT);
	while (got < 0 && errno == EINTR);
	if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
		s->blocked = true;
		return false;
	}
	if (got < 0) {
		fail_errno(comm, "receiving from", errno);
		return false;
	}
	if (got == 0) {
		/* Between two messages: a peer that leaves in good order ends so. Whoever waits for one more is told by test. */
		if (staged && s->done == 0) comm->ended = true;
		else fail_closed(comm);
		return false;
	}
	*direct = TP_MIN((size_t)got, wanted);
	if (staged) {
		comm->stage_at = 0;
		comm->stage_end = (size_t)got - *direct;
	}
	return true;
}

/* Stream 0, header: from the stage, filled anew where it has run dry. True once the header is whole. */
static bool recv_header(struct tp_sock_comm *comm, struct tp_sock_stream *s, struct tp_sock_request *request)
{
	while (s->done < HEADER_BYTES) {
		size_t staged = comm->stage_end - comm->stage_at, take = TP_MIN(staged, HEADER_BYTES - s->done), none;
		struct iovec iov[1];

		memcpy((char *)&request->header + s->done, comm->stage + comm->stage_at, take);
		comm->stage_at += take;
		s->done += take;
		if (s->done == HEADER_BYTES) return take_header(comm, request);
		if (!read_more(comm, s, iov, 0, 0, &none)) return false;
	}
	return true;
}

static void recv_stream(struct tp_sock_comm *comm, int stream)
{
	struct tp_sock_stream *s = &comm->streams[stream];
	size_t header = stream == 0 ? HEADER_BYTES : 0;
	struct tp_sock_request *request;

	while ((request = stream_request(comm, stream)) != NULL) {
		struct iovec iov[TP_NET_MAX_PARTS + 1];
		size_t offset, part, got, left;

		if (s->done < header && !recv_header(comm, s, request)) return;
		part = stream_part(comm, request->bytes, stream, &offset);
		left = header + part - s->done;
		if (stream == 0 && left > 0 && comm->stage_at < comm->stage_end) {
			got = TP_MIN(left, comm->stage_end - comm->stage_at);
			copy_in(request, offset + s->done - header, comm->stage + comm->stage_at, got);
			comm->stage_at += got;
			s->done += got;
			left -= got;
		}
		if (left == 0) {
			stream_next(comm, s, request);
			continue;
		}
		int n = slice(request, offset + s->done - header, left, iov);
		if (!read_more(comm, s, iov, n, left, &got)) return;
		s->done += got;
		if (got == left) stream_next(comm, s, request);
	}
}

void tp_sock_stream_move(struct tp_sock_comm *comm, int stream)
{
	comm->streams[stream].blocked = false;
	if (comm_error(comm) != ncclSuccess || (stream == 0 && comm->ended)) return;
	if (comm->sending) send_stream(comm, stream);
	else recv_stream(comm, stream);
}

/* The caller's streams: all, or the first where helpers have the rest. */
static void comm_move(struct tp_sock_comm *comm)
{
	int mine = comm->nthreads > 0 ? 1 : comm->nstreams;

	for (int i = 0; i < mine; i++)
		if (tp_sock_stream_has_work(comm, i)) tp_sock_stream_move(comm, i);
}

/* The next request, or NULL where all are in use. */
static struct tp_sock_request *new_request(struct tp_sock_comm *comm, int tag)
{
	struct tp_sock_request *request = &comm->requests[comm->posted % TP_NET_MAX_REQUESTS];

	if (request->busy) return NULL;
	request->comm = comm;
	request->number = comm->posted;
	request->busy = true;
	request->tag = tag;
	request->nparts = 0;
	request->capacity = request->bytes = 0;
	atomic_store_explicit(&request->left, 1, memory_order_relaxed);
	return request;
}

ncclResult_t tp_sock_isendv(void *handle, const struct iovec *parts, int n, int tag, void *const *mhandles, void **out)
{
	struct tp_sock_comm *comm = handle;
	struct tp_sock_request *request;

	(void)mhandles;
	TP_TRY(comm_error(comm));
	if (n < 0 || n > TP_NET_MAX_PARTS)
		return TP_FAIL(ncclInternalError, "NET/Socket : a message of %d parts, at most %d are possible", n, TP_NET_MAX_PARTS);
	request = new_request(comm, tag);
	if (!request) {
		*out = NULL;
		return ncclSuccess;
	}
	for (int i = 0; i < n; i++) {
		request->parts[request->nparts++] = parts[i];
		request->bytes += parts[i].iov_len;
	}
	request->capacity = request->bytes;
	request->header = (struct tp_wire_message){ .kind = TP_WIRE_MESSAGE, .tag = tag, .bytes = request->bytes };
	if (is_striped(comm, request->bytes)) publish_striped(comm, request);
	comm->posted++;
	comm_move(comm);
	/* An error is for test to tell: the request is out. */
	*out = request;
	return ncclSuccess;
}

ncclResult_t tp_sock_isend(void *handle, const void *data, size_t bytes, int tag, void *mhandle, void **out)
{
	struct iovec part = { .iov_base = (void *)(uintptr_t)data, .iov_len = bytes };

	return tp_sock_isendv(handle, &part, 1, tag, mhandle ? &mhandle : NULL, out);
}

ncclResult_t tp_sock_irecv(void *handle, int n, void *const *data, const size_t *bytes, const int *tags, void *const *mhandles,
	void **out)
{
	struct tp_sock_comm *comm = handle;
	struct tp_sock_request *request;

	(void)mhandles;
	TP_TRY(comm_error(comm));
	if (n != 1) return TP_FAIL(ncclInternalError, "NET/Socket : a grouped receive of %d, this transport takes 1 (max_recvs)", n);
	request = new_request(comm, tags[0]);
	if (!request) {
		*out = NULL;
		return ncclSuccess;
	}
	request->parts[0] = (struct iovec){ .iov_base = data[0], .iov_len = bytes[0] };
	request->nparts = 1;
	request->capacity = bytes[0];
	comm->posted++;
	/* What was read ahead may hold it whole; a system call can wait for test. */
	if (comm->stage_at < comm->stage_end && comm->streams[0].at + 1 == comm->posted) tp_sock_stream_move(comm, 0);
	*out = request;
	return ncclSuccess;
}

ncclResult_t tp_sock_test(void *handle, bool *done, size_t *sizes)
{
	struct tp_sock_request *request = handle;
	struct tp_sock_comm *comm = request->comm;

	if (atomic_load_explicit(&request->left, memory_order_acquire) != 0) {  /* pairs with part_done */
		comm_move(comm);
		if (atomic_load_explicit(&request->left, memory_order_acquire) != 0) {
			if (comm->ended && request->number >= comm->streams[0].at) fail_closed(comm);
			TP_TRY(comm_error(comm));
			*done = false;
			return ncclSuccess;
		}
	}
	if (sizes) sizes[0] = request->bytes;
	request->busy = false;
	*done = true;
	return ncclSuccess;
}

static bool finished_untested(const struct tp_sock_comm *comm)
{
	for (int i = 0; i < TP_NET_MAX_REQUESTS; i++) {
		const struct tp_sock_request *r = &comm->requests[i];
		if (r->busy && atomic_load_explicit(&r->left, memory_order_acquire) == 0) return true;
	}
	return false;
}

int tp_sock_poll_fds(void *handle, int *fds, uint32_t *events, int max)
{
	struct tp_sock_comm *comm = handle;
	int mine = comm->nthreads > 0 ? 1 : comm->nstreams, n = 0;

	for (int i = 0; i < mine && n < max; i++) {
		if (!tp_sock_stream_has_work(comm, i)) continue;
		fds[n] = comm->streams[i].fd;
		events[n++] = comm->sending ? EPOLLOUT : EPOLLIN;
	}
	if (comm->nthreads == 0 || n >= max || comm->posted == 0) return n;
	/* Cleared only where nothing waits to be tested; a helper that finishes meanwhile is seen by the second look. */
	if (atomic_load_explicit(&comm->signalled, memory_order_acquire) && !finished_untested(comm) && comm_error(comm) == ncclSuccess) {
		uint64_t count;
		ssize_t got = read(comm->done_fd, &count, sizeof(count));
		(void)got;
		atomic_store_explicit(&comm->signalled, 0, memory_order_seq_cst);
		if (finished_untested(comm) || comm_error(comm) != ncclSuccess) tp_sock_signal_done(comm);
	}
	fds[n] = comm->done_fd;
	events[n++] = EPOLLIN;
	return n;
}

ncclResult_t tp_sock_comm_create(bool sending, const int *fds, int nfds, int nthreads, const struct tp_net_hello *who,
	struct tp_sock_comm **out)
{
	struct tp_sock_comm *comm = tp_alloc(1, sizeof(*comm), "a socket connection");
	union tp_addr addr;
	socklen_t len = sizeof(addr);
	ncclResult_t result = ncclSystemError;

	if (!comm) goto close_fds;
	comm->done_fd = -1;
	comm->streams = tp_alloc((size_t)nfds, sizeof(*comm->streams), "a socket connection");
	if (!sending) comm->stage = tp_alloc(1, TP_SOCK_STAGE_BYTES, "a socket connection");
	if (!comm->streams || (!sending && !comm->stage)) goto free_comm;
	for (int i = 0; i < nfds; i++) comm->streams[i].fd = fds[i];
	comm->nstreams = nfds;
	comm->nthreads = nthreads;
	comm->sending = sending;
	comm->from = who->from;
	comm->to = who->to;
	memset(&addr, 0, sizeof(addr));
	if (getpeername(fds[0], &addr.sa, &len) == 0 && (addr.sa.sa_family == AF_INET || addr.sa.sa_family == AF_INET6)) tp_addr_format(&addr, comm->peer);
	else strcpy(comm->peer, "(address unknown)");
	if (nthreads > 0) {
		result = tp_sock_helpers_start(comm);
		if (result != ncclSuccess) {
			tp_sock_comm_destroy(comm);
			return result;
		}
	}
	*out = comm;
	return ncclSuccess;

free_comm:
	free(comm->streams);
	free(comm->stage);
	free(comm);
close_fds:
	for (int i = 0; i < nfds; i++) close(fds[i]);
	return result;
}

void tp_sock_comm_destroy(struct tp_sock_comm *comm)
{
	if (!comm) return;
	if (comm->nthreads > 0) tp_sock_helpers_stop(comm);
	for (int i = 0; i < comm->nstreams; i++) close(comm->streams[i].fd);
	free(comm->streams);
	free(comm->stage);
	free(comm);
}

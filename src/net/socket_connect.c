/* The connecting end: all sockets of a connection at once, each a small state machine; see socket_hello.h for what is said. */
#include <errno.h>
#include <net/if.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>
#include "net/socket.h"

#define HANDSHAKE_RETRIES 5

enum phase { WAITING, CONNECTING, SENDING_HELLO, READING_ANSWER, SENDING_PROOF, READING_WELCOME, CONNECTED };

struct attempt {                        /* one socket on its way */
	int fd;
	enum phase phase;
	uint64_t retry_at_ms;
	size_t moved;                       /* bytes of the message being sent or read */
	struct tp_wire_hello hello;
	struct tp_wire_answer answer;
	struct tp_wire_proof proof;
	struct tp_wire_welcome welcome;
};

struct connecting {
	struct tp_net_hello hello;
	struct tp_sock_params params;
	union tp_addr to, local;
	bool bound;                         /* local is to be the source address */
	char text[TP_ADDR_TEXT], device[16];
	uint64_t listener;
	int refused;                        /* connects that failed so far */
	int dropped;                        /* handshakes that the other side broke off */
	uint64_t started_ms;
	int count;
	struct attempt *attempts;
};

/* NCCL_SOCKET_IFNAME holds for the connecting side too: the source address is that of an allowed interface. */
static ncclResult_t choose_source(struct connecting *c, int dev)
{
	struct tp_interface ifc;
	int family = c->to.sa.sa_family;

	TP_TRY(tp_socket_interface_for(&c->to, &ifc));
	if (ifc.addr.sa.sa_family != family) TP_TRY(tp_sock_device(dev, &ifc));
	for (int i = 0; ifc.addr.sa.sa_family != family; i++) {
		if (tp_sock_device(i, &ifc) != ncclSuccess)
			return TP_FAIL(ncclInvalidUsage, "NET/Socket : peer %s (rank %d) has an IPv%d address, but none of the interfaces that NCCL_SOCKET_IFNAME and "
				"NCCL_SOCKET_FAMILY allow here has one", c->text, c->hello.to, family == AF_INET ? 4 : 6);
	}
	c->local = ifc.addr;
	if (family == AF_INET) c->local.v4.sin_port = 0;
	else c->local.v6.sin6_port = 0;
	c->bound = true;
	memcpy(c->device, ifc.name, sizeof(c->device));
	/* A link-local address means a link, and which one is this machine's own affair. */
	if (family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&c->to.v6.sin6_addr)) c->to.v6.sin6_scope_id = if_nametoindex(ifc.name);
	return ncclSuccess;
}

static void start_over(struct connecting *c)
{
	uint8_t id[TP_WIRE_ID_BYTES];

	tp_secret_random(id, sizeof(id));
	for (int i = 0; i < c->count; i++) {
		struct attempt *a = &c->attempts[i];
		if (a->fd >= 0) close(a->fd);
		a->fd = -1;
		a->phase = WAITING;
		a->moved = 0;
		memset(&a->hello, 0, sizeof(a->hello));
		tp_wire_fill_prefix(&a->hello.prefix, TP_WIRE_HELLO, sizeof(a->hello), TP_WIRE_OK);
		memcpy(a->hello.connection, id, sizeof(id));
		tp_secret_random(a->hello.nonce, sizeof(a->hello.nonce));
		a->hello.listener = c->listener;
		a->hello.comm_hash = c->hello.comm_hash;
		a->hello.from = c->hello.from;
		a->hello.to = c->hello.to;
		a->hello.channel = c->hello.channel;
		a->hello.lane_class = c->hello.lane_class;
		a->hello.socket = (uint8_t)i;
		a->hello.nsockets = (uint8_t)c->count;
		a->hello.nthreads = (uint8_t)(c->params.nthreads > 1 ? c->params.nthreads : 0);
	}
}

static ncclResult_t connecting_create(int dev, const void *handle, const struct tp_net_hello *hello, bool alone, struct connecting **out)
{
	struct connecting *c = tp_alloc(1, sizeof(*c), "a connection under way");
	ncclResult_t result = ncclSystemError;

	if (!c) return ncclSystemError;
	c->hello = *hello;
	result = tp_wire_read_handle(handle, &c->to, &c->listener);
	if (result != ncclSuccess) goto free_c;
	tp_addr_format(&c->to, c->text);
	tp_sock_get_params(dev, &c->params);
	if (alone) c->params.nthreads = c->params.nsocks_per_thread = 1;
	result = choose_source(c, dev);
	if (result != ncclSuccess) goto free_c;
	c->count = c->params.nthreads > 1 ? 1 + c->params.nthreads * c->params.nsocks_per_thread : c->params.nsocks_per_thread;
	c->attempts = tp_alloc((size_t)c->count, sizeof(*c->attempts), "a connection under way");
	result = ncclSystemError;
	if (!c->attempts) goto free_c;
	for (int i = 0; i < c->count; i++) c->attempts[i].fd = -1;
	c->started_ms = tp_clock_ms();
	start_over(c);
	*out = c;
	return ncclSuccess;

free_c:
	free(c);
	return result;
}

void tp_sock_cancel_connect(void *state)
{
	struct connecting *c = state;

	if (!c) return;
	for (int i = 0; i < c->count; i++)
		if (c->attempts[i].fd >= 0) close(c->attempts[i].fd);
	free(c->attempts);
	free(c);
}

/* A connect failed. Success: it is tried again a little later. */
static ncclResult_t connect_failed(struct connecting *c, struct attempt *a, int error)
{
	bool passing = error == ECONNREFUSED || error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH || error == EAGAIN
		|| error == ECONNRESET || error == EADDRNOTAVAIL || error == EINTR;
	uint64_t waited = tp_clock_ms() - c->started_ms;

	if (a->fd >= 0) close(a->fd);
	a->fd = -1;
	if (passing && c->refused < c->params.retries && waited < (uint64_t)c->params.connect_ms) {
		if (c->refused++ == 0)
			TP_INFO(TP_INIT | TP_NET, "NET/Socket : connecting to %s (rank %d): %s, will retry", c->text, c->hello.to, strerror(error));
		a->phase = WAITING;
		a->retry_at_ms = tp_clock_ms() + (uint64_t)TP_MIN(c->params.retry_ms * c->refused, 1000);
		return ncclSuccess;
	}
	return TP_FAIL(passing && error != EADDRNOTAVAIL ? ncclRemoteError : ncclSystemError,
		"NET/Socket : connecting to %s (rank %d) from interface %s failed after %llu ms and %d retries: %s%s", c->text, c->hello.to,
		c->device, (unsigned long long)waited, c->refused, strerror(error), passing
			? "; is the peer still alive, and can it be reached through the interfaces that NCCL_SOCKET_IFNAME allows?" : "");
}

static ncclResult_t connect_timed_out(struct connecting *c)
{
	uint64_t waited = tp_clock_ms() - c->started_ms;

	if (waited < (uint64_t)c->params.connect_ms) return ncclSuccess;
	return TP_FAIL(ncclRemoteError, "NET/Socket : connecting to %s (rank %d) from interface %s got no answer for %llu ms; does a firewall drop packets, or "
		"is the wrong interface allowed (NCCL_SOCKET_IFNAME)?", c->text, c->hello.to, c->device, (unsigned long long)waited);
}

static ncclResult_t begin(struct connecting *c, struct attempt *a)
{
	int one = 1, error;

	if (tp_clock_ms() < a->retry_at_ms) return ncclSuccess;
	/* Not tp_socket_connect_start: refusals are retried here, silently, and buffers must be set before the connect. */
	a->fd = socket(c->to.sa.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (a->fd < 0) {
		error = errno;
		return TP_FAIL(ncclSystemError, "NET/Socket : no socket for the connection to %s (rank %d): %s%s", c->text, c->hello.to,
			strerror(error), error == EMFILE || error == ENFILE ? " (raise RLIMIT_NOFILE: ulimit -n)" : "");
	}
	tp_sock_tune(a->fd, &c->params);
	if (c->bound) {
#ifdef IP_BIND_ADDRESS_NO_PORT
		/* The port is chosen at connect: then two connections to different peers may share one. */
		setsockopt(a->fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &one, sizeof(one));
#endif
		if (bind(a->fd, &c->local.sa, tp_addr_len(&c->local)) < 0) return connect_failed(c, a, errno);
	}
	if (connect(a->fd, &c->to.sa, tp_addr_len(&c->to)) == 0) a->phase = SENDING_HELLO;
	else if (errno == EINPROGRESS) a->phase = CONNECTING;
	else return connect_failed(c, a, errno);
	a->moved = 0;
	return ncclSuccess;
}

/* A connect to a free port of this machine can meet itself; nobody listens there then. */
static bool met_itself(int fd)
{
	union tp_addr local, remote;
	socklen_t a = sizeof(local), b = sizeof(remote);

	memset(&local, 0, sizeof(local));
	memset(&remote, 0, sizeof(remote));
	return getsockname(fd, &local.sa, &a) == 0 && getpeername(fd, &remote.sa, &b) == 0 && a == b && memcmp(&local, &remote, a) == 0;
}

static ncclResult_t finish_connect(struct connecting *c, struct attempt *a, bool *moved)
{
	struct pollfd p = { .fd = a->fd, .events = POLLOUT };
	int error = 0;
	socklen_t len = sizeof(error);

	if (poll(&p, 1, 0) <= 0) return connect_timed_out(c);
	if (getsockopt(a->fd, SOL_SOCKET, SO_ERROR, &error, &len) < 0) error = errno;
	*moved = true;
	if (error == 0 && met_itself(a->fd)) error = ECONNREFUSED;
	if (error != 0) return connect_failed(c, a, error);
	a->phase = SENDING_HELLO;
	a->moved = 0;
	return ncclSuccess;
}

/* The other side broke off in the middle: it may have found us too slow, so try afresh, but not for ever. */
static ncclResult_t dropped(struct connecting *c, int error)
{
	if (c->dropped++ < HANDSHAKE_RETRIES) {
		TP_INFO(TP_INIT | TP_NET, "NET/Socket : %s (rank %d) broke off the hello (%s), will retry", c->text, c->hello.to,
			error ? strerror(error) : "closed");
		start_over(c);
		c->started_ms = tp_clock_ms();
		c->refused = 0;
		for (int i = 0; i < c->count; i++) c->attempts[i].retry_at_ms = tp_clock_ms() + (uint64_t)c->params.retry_ms;
		return ncclSuccess;
	}
	return TP_FAIL(ncclRemoteError, "NET/Socket : %s (rank %d) broke off the hello %d times, the last time: %s; has the peer died, or is something else "
		"listening there?", c->text, c->hello.to, c->dropped, error ? strerror(error) : "closed");
}

/* Sends or reads the rest of a message. *whole: all of it. An error of the socket starts everything over. */
static ncclResult_t transfer(struct connecting *c, struct attempt *a, bool sending, void *data, size_t bytes, bool *whole, bool *moved)
{
	ssize_t n = sending ? send(a->fd, (char *)data + a->moved, bytes - a->moved, MSG_NOSIGNAL | MSG_DONTWAIT)
		: recv(a->fd, (char *)data + a->moved, bytes - a->moved, MSG_DONTWAIT);

	*whole = false;
	if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return ncclSuccess;
	if (n < 0) return dropped(c, errno);
	if (n == 0) return dropped(c, 0);
	*moved = true;
	a->moved += (size_t)n;
	*whole = a->moved == bytes;
	return ncclSuccess;
}

static ncclResult_t check_reply(struct connecting *c, struct attempt *a, const void *data, enum tp_wire_type type, size_t bytes)
{
	struct tp_wire_prefix prefix;
	enum tp_wire_verdict verdict = tp_wire_check(data, a->moved, type, bytes);

	if (verdict == TP_WIRE_MORE) return ncclSuccess;
	if (verdict == TP_WIRE_STRANGER)
		return TP_FAIL(ncclRemoteError, "NET/Socket : what listens at %s (where rank %d should) answers with %s", c->text, c->hello.to,
			tp_wire_describe_stranger(data, a->moved));
	memcpy(&prefix, data, sizeof(prefix));
	if (verdict == TP_WIRE_OTHER_VERSION)
		return TP_FAIL(ncclInvalidUsage, "NET/Socket : %s (rank %d) speaks version %u of the socket protocol, this library version %d: all ranks must use the same library",
			c->text, c->hello.to, prefix.version, TP_WIRE_VERSION);
	if (prefix.status != TP_WIRE_OK)
		return TP_FAIL(ncclRemoteError, "NET/Socket : %s (rank %d) refuses the connection: %s", c->text, c->hello.to, tp_wire_status_text(prefix.status));
	return ncclSuccess;
}

static ncclResult_t answer_arrived(struct connecting *c, struct attempt *a)
{
	uint8_t right[TP_SECRET_BYTES];

	tp_wire_mac(c->hello.secret, false, &a->hello, a->answer.nonce, right);
	if (!tp_secret_equal(right, a->answer.mac))
		return TP_FAIL(ncclRemoteError, "NET/Socket : %s (where rank %d should listen) can't prove that it knows the communicator's secret", c->text, c->hello.to);
	tp_wire_fill_prefix(&a->proof.prefix, TP_WIRE_PROOF, sizeof(a->proof), TP_WIRE_OK);
	tp_wire_mac(c->hello.secret, true, &a->hello, a->answer.nonce, a->proof.mac);
	a->phase = SENDING_PROOF;
	a->moved = 0;
	return ncclSuccess;
}

static ncclResult_t step(struct connecting *c, struct attempt *a, bool *moved)
{
	bool whole;

	switch (a->phase) {
	case WAITING:
		TP_TRY(begin(c, a));
		*moved = a->phase != WAITING;
		return ncclSuccess;
	case CONNECTING:
		return finish_connect(c, a, moved);
	case SENDING_HELLO:
		TP_TRY(transfer(c, a, true, &a->hello, sizeof(a->hello), &whole, moved));
		if (whole) a->phase = READING_ANSWER, a->moved = 0;
		return ncclSuccess;
	case READING_ANSWER:
		TP_TRY(transfer(c, a, false, &a->answer, sizeof(a->answer), &whole, moved));
		if (a->phase == READING_ANSWER && a->moved > 0) TP_TRY(check_reply(c, a, &a->answer, TP_WIRE_ANSWER, sizeof(a->answer)));
		return whole ? answer_arrived(c, a) : ncclSuccess;
	case SENDING_PROOF:
		TP_TRY(transfer(c, a, true, &a->proof, sizeof(a->proof), &whole, moved));
		if (whole) a->phase = READING_WELCOME, a->moved = 0;
		return ncclSuccess;
	case READING_WELCOME:
		TP_TRY(transfer(c, a, false, &a->welcome, sizeof(a->welcome), &whole, moved));
		if (a->phase == READING_WELCOME && a->moved > 0) TP_TRY(check_reply(c, a, &a->welcome, TP_WIRE_WELCOME, sizeof(a->welcome)));
		if (whole) a->phase = CONNECTED;
		return ncclSuccess;
	case CONNECTED:
		return ncclSuccess;
	}
	return ncclSuccess;
}

static ncclResult_t finish(struct connecting *c, void **send_comm)
{
	int fds[TP_SOCK_MAX_STREAMS];
	struct tp_sock_comm *comm;

	for (int i = 0; i < c->count; i++) {
		fds[i] = c->attempts[i].fd;
		c->attempts[i].fd = -1;
	}
	TP_TRY(tp_sock_comm_create(true, fds, c->count, c->attempts[0].hello.nthreads, &c->hello, &comm));
	TP_INFO(TP_NET, "NET/Socket : rank %d -> rank %d [channel %d] connected to %s from %s, %d sockets, %d helper threads", c->hello.from, c->hello.to,
		c->hello.channel, c->text, c->device, c->count, comm->nthreads);
	*send_comm = comm;
	return ncclSuccess;
}

static ncclResult_t connecting_step(struct connecting *c, void **state, void **send_comm)
{
	ncclResult_t result = ncclSuccess;
	int connected = 0;

	for (int i = 0; i < c->count && result == ncclSuccess; i++) {
		struct attempt *a = &c->attempts[i];
		bool moved;
		do {
			moved = false;
			result = step(c, a, &moved);
		} while (moved && result == ncclSuccess && a->phase != CONNECTED);
	}
	for (int i = 0; i < c->count; i++) connected += c->attempts[i].phase == CONNECTED;
	if (result == ncclSuccess && connected < c->count) return ncclSuccess;
	if (result == ncclSuccess) result = finish(c, send_comm);
	tp_sock_cancel_connect(c);
	*state = NULL;
	return result;
}

static ncclResult_t connect_some(int dev, const void *handle, const struct tp_net_hello *hello, bool alone, void **state, void **send_comm)
{
	struct connecting *c = *state;

	if (!c) {
		TP_TRY(connecting_create(dev, handle, hello, alone, &c));
		*state = c;
	}
	return connecting_step(c, state, send_comm);
}

ncclResult_t tp_sock_connect(int dev, const void *handle, const struct tp_net_hello *hello, void **state, void **send_comm)
{
	return connect_some(dev, handle, hello, false, state, send_comm);
}

ncclResult_t tp_sock_connect_one(const void *handle, const struct tp_net_hello *hello, void **state, void **send_comm)
{
	return connect_some(0, handle, hello, true, state, send_comm);
}

int tp_sock_comm_take_fd(void *handle)
{
	struct tp_sock_comm *comm = handle;
	int fd = comm->streams[0].fd;

	comm->nstreams = 0;
	tp_sock_comm_destroy(comm);
	return fd;
}

int tp_sock_poll_connect_fds(void *state, int *fds, uint32_t *events, int max)
{
	struct connecting *c = state;
	int n = 0;

	for (int i = 0; c && i < c->count && n < max; i++) {
		struct attempt *a = &c->attempts[i];
		if (a->fd < 0 || a->phase == CONNECTED) continue;
		fds[n] = a->fd;
		events[n++] = a->phase == READING_ANSWER || a->phase == READING_WELCOME ? EPOLLIN : EPOLLOUT;
	}
	return n;
}

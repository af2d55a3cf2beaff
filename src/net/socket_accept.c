/* The listening end. Whoever connects is a guest until its hello is proven; guests are served side by side without
 * blocking, so that one who says nothing, or nonsense, delays nobody. Proven sockets are gathered by connection, and a
 * connection is handed out once it is whole.
 *
 * Bounds: GUESTS_MAX guests at a time (the longest silent one makes room), hello_ms for each, GATHERING_MAX connections. */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>
#include "net/socket.h"

#define GUESTS_MAX 256
#define GATHERING_MAX 4096
#define BACKLOG 4096
#define KINDS_MAX 32

enum guest_phase { READING_HELLO, SENDING_ANSWER, READING_PROOF, SENDING_WELCOME };

struct guest {
	int fd;
	enum guest_phase phase;
	bool ours;                          /* it said a well-formed hello */
	bool refused;                       /* it is told why, then dropped */
	uint64_t since_ms;
	size_t moved;
	union tp_addr from;
	struct tp_wire_hello hello;
	struct tp_wire_answer answer;
	struct tp_wire_proof proof;
	struct tp_wire_welcome welcome;
};

struct gathering {                      /* a connection whose sockets come in one by one */
	struct tp_wire_hello hello;         /* of the first */
	int have;
	uint64_t since_ms;
	int fds[];                          /* [nsockets], -1: not there yet */
};

struct listener {
	int fd;
	struct tp_sock_params params;
	union tp_addr addr;
	uint64_t id;
	const char *logged[KINDS_MAX];      /* kinds of strangers that were logged */
	int nlogged, strangers;
	int nguests, ngathering, size_gathering;
	struct guest *guests[GUESTS_MAX];
	struct gathering **gathering;
};

ncclResult_t tp_sock_listen(int dev, void *handle, void **out)
{
	struct listener *l = tp_alloc(1, sizeof(*l), "a listener");
	struct tp_interface ifc;
	ncclResult_t result;

	if (!l) return ncclSystemError;
	result = tp_sock_device(dev, &ifc);
	if (result != ncclSuccess) goto free_l;
	tp_sock_get_params(dev, &l->params);
	l->addr = ifc.addr;
	if (l->addr.sa.sa_family == AF_INET) l->addr.v4.sin_port = 0;
	else l->addr.v6.sin6_port = 0;
	result = tp_socket_listen(&l->addr, BACKLOG, &l->fd);
	if (result != ncclSuccess) goto free_l;
	/* Buffers are inherited by what is accepted; they must be set before the window is agreed. */
	tp_sock_tune(l->fd, &l->params);
	result = tp_socket_set_nonblocking(l->fd, true);
	if (result != ncclSuccess) goto close_fd;
	tp_secret_random(&l->id, sizeof(l->id));
	tp_wire_write_handle(&l->addr, l->id, handle);
	*out = l;
	return ncclSuccess;

close_fd:
	close(l->fd);
free_l:
	free(l);
	return result;
}

static void gathering_free(struct gathering *g)
{
	for (int i = 0; i < g->hello.nsockets; i++)
		if (g->fds[i] >= 0) close(g->fds[i]);
	free(g);
}

ncclResult_t tp_sock_close_listen(void *listener)
{
	struct listener *l = listener;

	if (!l) return ncclSuccess;
	if (l->strangers > 0) TP_INFO(TP_NET, "NET/Socket : %d connections of strangers were dropped in all", l->strangers);
	for (int i = 0; i < l->nguests; i++) {
		close(l->guests[i]->fd);
		free(l->guests[i]);
	}
	for (int i = 0; i < l->ngathering; i++) gathering_free(l->gathering[i]);
	free(l->gathering);
	close(l->fd);
	free(l);
	return ncclSuccess;
}

/* Lets go of guest i; another takes its place. */
static void guest_leave(struct listener *l, int i, bool close_it)
{
	if (close_it) close(l->guests[i]->fd);
	free(l->guests[i]);
	l->guests[i] = l->guests[--l->nguests];
}

static bool logged_before(struct listener *l, const char *what)
{
	for (int i = 0; i < l->nlogged; i++)
		if (strcmp(l->logged[i], what) == 0) return true;
	if (l->nlogged == KINDS_MAX) return true;
	l->logged[l->nlogged++] = what;
	return false;
}

/* Drops a stranger; says so once for each kind (what: a literal), for a port scan must not fill the log. */
static void drop_stranger(struct listener *l, int i, const char *what, const char *why)
{
	struct guest *g = l->guests[i];
	char from[TP_ADDR_TEXT], here[TP_ADDR_TEXT], rest[512];

	l->strangers++;
	if (!logged_before(l, what))
		TP_INFO(TP_INIT | TP_NET, "NET/Socket : dropped a stranger: %s came to %s and is not one of this job's ranks: %s%s (more of the kind won't be logged)",
			tp_addr_format(&g->from, from), tp_addr_format(&l->addr, here), what, why);
	/* Unread bytes would make the close a reset, which can overtake our last words to it. */
	ssize_t ignored = recv(g->fd, rest, sizeof(rest), MSG_DONTWAIT);
	(void)ignored;
	guest_leave(l, i, true);
}

/* The one to go where there is no room: the longest without a hello. */
static int longest_silent(const struct listener *l)
{
	int oldest = -1;

	for (int i = 0; i < l->nguests; i++)
		if (!l->guests[i]->ours && (oldest < 0 || l->guests[i]->since_ms < l->guests[oldest]->since_ms)) oldest = i;
	return oldest;
}

static ncclResult_t accept_failed(struct listener *l, int error)
{
	struct rlimit limit = { 0 };
	char here[TP_ADDR_TEXT];
	int silent = longest_silent(l);

	if ((error == EMFILE || error == ENFILE) && silent >= 0) {
		drop_stranger(l, silent, "somebody who says nothing", ", and descriptors ran out");
		return ncclSuccess;
	}
	if (error == EMFILE || error == ENFILE) {
		getrlimit(RLIMIT_NOFILE, &limit);
		return TP_FAIL(ncclSystemError, "NET/Socket : no descriptor left to accept a connection at %s: %s (RLIMIT_NOFILE is %llu; raise it: ulimit -n)",
			tp_addr_format(&l->addr, here), strerror(error), (unsigned long long)limit.rlim_cur);
	}
	return TP_FAIL(ncclSystemError, "NET/Socket : accepting at %s failed: %s", tp_addr_format(&l->addr, here), strerror(error));
}

/* Takes in whoever waits at the door. */
static ncclResult_t admit(struct listener *l)
{
	for (;;) {
		union tp_addr from;
		socklen_t len = sizeof(from);
		struct guest *g;
		int fd;

		if (l->nguests == GUESTS_MAX) {
			int silent = longest_silent(l);
			/* Where all have said a proper hello they will be through soon; the others wait in the backlog. */
			if (silent < 0 || l->guests[silent]->since_ms + 200 > tp_clock_ms()) return ncclSuccess;
			drop_stranger(l, silent, "somebody who says nothing", ", and others are waiting");
		}
		memset(&from, 0, sizeof(from));
		fd = accept4(l->fd, &from.sa, &len, SOCK_CLOEXEC | SOCK_NONBLOCK);
		if (fd < 0) {
			if (errno == EAGAIN || errno == EWOULDBLOCK) return ncclSuccess;
			/* Errors of a connection that broke before it was taken. */
			if (errno == EINTR || errno == ECONNABORTED || errno == EPROTO || errno == ENETDOWN || errno == EHOSTUNREACH || errno == ENETUNREACH) continue;
			TP_TRY(accept_failed(l, errno));
			continue;
		}
		g = tp_alloc(1, sizeof(*g), "a connection being accepted");
		if (!g) {
			close(fd);
			return ncclSystemError;
		}
		g->fd = fd;
		g->from = from;
		g->since_ms = tp_clock_ms();
		tp_sock_tune(fd, &l->params);
		l->guests[l->nguests++] = g;
	}
}

static struct gathering *find_gathering(struct listener *l, const struct tp_wire_hello *hello)
{
	for (int i = 0; i < l->ngathering; i++)
		if (memcmp(l->gathering[i]->hello.connection, hello->connection, TP_WIRE_ID_BYTES) == 0) return l->gathering[i];
	return NULL;
}

static ncclResult_t add_gathering(struct listener *l, const struct tp_wire_hello *hello, struct gathering **out)
{
	struct gathering *g;

	if (l->ngathering == l->size_gathering) {
		int size = l->size_gathering ? l->size_gathering * 2 : 16;
		struct gathering **more;
		if (size > GATHERING_MAX) return TP_FAIL(ncclSystemError, "NET/Socket : %d connections are half made, more than anybody needs", l->ngathering);
		more = realloc(l->gathering, (size_t)size * sizeof(*more));
		if (!more) return TP_FAIL(ncclSystemError, "NET/Socket : no memory for %d connections under way", size);
		l->gathering = more;
		l->size_gathering = size;
	}
	g = tp_alloc(1, sizeof(*g) + hello->nsockets * sizeof(int), "a connection being accepted");
	if (!g) return ncclSystemError;
	g->hello = *hello;
	g->since_ms = tp_clock_ms();
	for (int i = 0; i < hello->nsockets; i++) g->fds[i] = -1;
	l->gathering[l->ngathering++] = g;
	*out = g;
	return ncclSuccess;
}

/* A proven socket goes to its connection. */
static ncclResult_t gather(struct listener *l, int i)
{
	struct guest *guest = l->guests[i];
	const struct tp_wire_hello *h = &guest->hello;
	struct gathering *g = find_gathering(l, h);

	if (!g) TP_TRY(add_gathering(l, h, &g));
	if (g->hello.nsockets != h->nsockets || g->hello.nthreads != h->nthreads || g->hello.from != h->from || g->hello.to != h->to
		|| g->hello.channel != h->channel || g->hello.lane_class != h->lane_class || g->fds[h->socket] >= 0) {
		drop_stranger(l, i, "a socket that contradicts the others of its connection", "");
		return ncclSuccess;
	}
	g->fds[h->socket] = guest->fd;
	g->have++;
	guest_leave(l, i, false);
	return ncclSuccess;
}

/* The hello is whole: an answer with our proof, or with what is wrong. */
static void answer_hello(struct listener *l, struct guest *g, const struct tp_net_hello *expect, enum tp_wire_verdict verdict)
{
	enum tp_wire_status status = TP_WIRE_OK;

	if (verdict == TP_WIRE_OTHER_VERSION) status = TP_WIRE_BAD_VERSION;
	else if (g->hello.listener != l->id) status = TP_WIRE_BAD_LISTENER;
	else if (g->hello.comm_hash != expect->comm_hash) status = TP_WIRE_BAD_COMM;
	else if (tp_wire_check_hello(&g->hello)) status = TP_WIRE_BAD_SHAPE;
	g->ours = true;
	g->refused = status != TP_WIRE_OK;
	tp_wire_fill_prefix(&g->answer.prefix, TP_WIRE_ANSWER, sizeof(g->answer), status);
	if (!g->refused) {
		tp_secret_random(g->answer.nonce, sizeof(g->answer.nonce));
		tp_wire_mac(expect->secret, false, &g->hello, g->answer.nonce, g->answer.mac);
	}
	g->phase = SENDING_ANSWER;
	g->moved = 0;
}

static void check_proof(struct guest *g, const struct tp_net_hello *expect)
{
	uint8_t right[TP_SECRET_BYTES];

	tp_wire_mac(expect->secret, true, &g->hello, g->answer.nonce, right);
	g->refused = !tp_secret_equal(right, g->proof.mac);
	tp_wire_fill_prefix(&g->welcome.prefix, TP_WIRE_WELCOME, sizeof(g->welcome), g->refused ? TP_WIRE_BAD_PROOF : TP_WIRE_OK);
	g->phase = SENDING_WELCOME;
	g->moved = 0;
}

/* 1: whole, 0: later, -1: gone. */
static int guest_transfer(struct guest *g, bool sending, void *data, size_t bytes)
{
	ssize_t n = sending ? send(g->fd, (char *)data + g->moved, bytes - g->moved, MSG_NOSIGNAL | MSG_DONTWAIT)
		: recv(g->fd, (char *)data + g->moved, bytes - g->moved, MSG_DONTWAIT);

	if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return 0;
	if (n <= 0) return -1;
	g->moved += (size_t)n;
	return g->moved == bytes;
}

/* Moves guest i on as far as it goes. *gone: it isn't a guest any more. */
static ncclResult_t serve(struct listener *l, int i, const struct tp_net_hello *expect, bool *gone)
{
	struct guest *g = l->guests[i];
	enum tp_wire_verdict verdict;
	int n;

	*gone = true;
	switch (g->phase) {
	case READING_HELLO:
		n = guest_transfer(g, false, &g->hello, sizeof(g->hello));
		if (n < 0) {
			drop_stranger(l, i, tp_wire_describe_stranger(&g->hello, g->moved), ", then it closed");
			return ncclSuccess;
		}
		verdict = g->moved > 0 ? tp_wire_check(&g->hello, g->moved, TP_WIRE_HELLO, sizeof(g->hello)) : TP_WIRE_MORE;
		if (verdict == TP_WIRE_STRANGER) {
			drop_stranger(l, i, tp_wire_describe_stranger(&g->hello, g->moved), "");
			return ncclSuccess;
		}
		if (verdict == TP_WIRE_MORE) break;
		answer_hello(l, g, expect, verdict);
		/* fall through */
	case SENDING_ANSWER:
		n = guest_transfer(g, true, &g->answer, sizeof(g->answer));
		if (n < 0 || (n > 0 && g->refused)) {
			drop_stranger(l, i, n < 0 ? "a rank that left during the hello" : tp_wire_status_text(g->answer.prefix.status), "");
			return ncclSuccess;
		}
		if (n == 0) break;
		g->phase = READING_PROOF;
		g->moved = 0;
		/* fall through */
	case READING_PROOF:
		n = guest_transfer(g, false, &g->proof, sizeof(g->proof));
		verdict = g->moved > 0 ? tp_wire_check(&g->proof, g->moved, TP_WIRE_PROOF, sizeof(g->proof)) : TP_WIRE_MORE;
		if (n < 0 || verdict == TP_WIRE_STRANGER || verdict == TP_WIRE_OTHER_VERSION) {
			drop_stranger(l, i, n < 0 ? "a rank that left during the hello" : "a hello without a proof", "");
			return ncclSuccess;
		}
		if (n == 0) break;
		check_proof(g, expect);
		/* fall through */
	case SENDING_WELCOME:
		n = guest_transfer(g, true, &g->welcome, sizeof(g->welcome));
		if (n < 0 || (n > 0 && g->refused)) {
			drop_stranger(l, i, g->refused ? "a hello with a false proof of the secret" : "a rank that left during the hello", "");
			return ncclSuccess;
		}
		if (n == 0) break;
		return gather(l, i);
	}
	*gone = false;
	return ncclSuccess;
}

static void drop_late(struct listener *l)
{
	uint64_t now = tp_clock_ms();

	for (int i = l->nguests - 1; i >= 0; i--) {
		struct guest *g = l->guests[i];
		if (now - g->since_ms < (uint64_t)l->params.hello_ms) continue;
		drop_stranger(l, i, g->ours ? "a rank that fell silent during the hello"
			: tp_wire_describe_stranger(&g->hello, g->phase == READING_HELLO ? g->moved : 0), ", for too long");
	}
	for (int i = l->ngathering - 1; i >= 0; i--) {
		struct gathering *g = l->gathering[i];
		char c;
		bool lost = now - g->since_ms >= (uint64_t)l->params.hello_ms * 4;
		/* A connector that starts over leaves these closed. */
		for (int k = 0; k < g->hello.nsockets && !lost; k++)
			lost = g->have < g->hello.nsockets && g->fds[k] >= 0 && recv(g->fds[k], &c, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
		if (!lost || g->have == g->hello.nsockets) continue;
		TP_INFO(TP_NET, "NET/Socket : rank %d -> rank %d: gave up a connection of which %d of %d sockets came", g->hello.from, g->hello.to,
			g->have, g->hello.nsockets);
		gathering_free(g);
		l->gathering[i] = l->gathering[--l->ngathering];
	}
}

/* Hands out a connection that is whole, in the order in which they began. */
static ncclResult_t hand_out(struct listener *l, const struct tp_net_hello *expect, struct tp_net_hello *who, void **recv_comm)
{
	for (int i = 0; i < l->ngathering; i++) {
		struct gathering *g = l->gathering[i];
		struct tp_net_hello hello = *expect;
		struct tp_sock_comm *comm;
		int mine = l->params.nthreads > 1 ? l->params.nthreads * l->params.nsocks_per_thread + 1 : l->params.nsocks_per_thread;
		ncclResult_t result;

		if (g->have < g->hello.nsockets) continue;
		hello.from = g->hello.from;
		hello.to = g->hello.to;
		hello.channel = g->hello.channel;
		hello.lane_class = g->hello.lane_class;
		result = tp_sock_comm_create(false, g->fds, g->hello.nsockets, g->hello.nthreads, &hello, &comm);
		if (result == ncclSuccess) {
			TP_INFO(TP_NET, "NET/Socket : rank %d <- rank %d [channel %d] accepted %s, %d sockets, %d helper threads%s", hello.to, hello.from,
				hello.channel, comm->peer, g->hello.nsockets, g->hello.nthreads,
				mine != g->hello.nsockets ? ", as the connecting side wishes (NCCL_SOCKET_NTHREADS, NCCL_NSOCKS_PERTHREAD differ here)" : "");
			*who = hello;
			*recv_comm = comm;
		}
		free(g);
		memmove(&l->gathering[i], &l->gathering[i + 1], (size_t)(--l->ngathering - i) * sizeof(*l->gathering));
		return result;
	}
	return ncclSuccess;
}

ncclResult_t tp_sock_accept(void *listener, const struct tp_net_hello *expect, struct tp_net_hello *who, void **recv_comm)
{
	struct listener *l = listener;

	*recv_comm = NULL;
	TP_TRY(admit(l));
	for (int i = l->nguests - 1; i >= 0; i--) {
		bool gone;
		TP_TRY(serve(l, i, expect, &gone));
	}
	if (l->nguests > 0 || l->ngathering > 0) drop_late(l);
	return hand_out(l, expect, who, recv_comm);
}

int tp_sock_poll_listen_fds(void *listener, int *fds, uint32_t *events, int max)
{
	struct listener *l = listener;
	int n = 0;

	if (max > 0) {
		fds[n] = l->fd;
		events[n++] = EPOLLIN;
	}
	for (int i = 0; i < l->nguests && n < max; i++) {
		enum guest_phase phase = l->guests[i]->phase;
		fds[n] = l->guests[i]->fd;
		events[n++] = phase == READING_HELLO || phase == READING_PROOF ? EPOLLIN : EPOLLOUT;
	}
	return n;
}

/* Descriptors of GPU memory between the ranks of a host, by abstract Unix sockets: each rank listens, tells its socket's name in a gather,
 * pushes its descriptor to all who want it and then takes theirs. A message is small enough to lie in a socket's buffer, so
 * nobody waits for anybody while pushing. Who connects proves the communicator's secret. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "mem/internal.h"

#define SLICE_MS 50
#define STRANGER_MS 1000
#define CONNECT_MS 10000

/* What goes with a descriptor. */
struct token { int32_t from, to; uint8_t mac[TP_SECRET_BYTES]; };

void tp_mem_socket_name(const struct tp_boot *boot, int rank, uint64_t name, char text[80])
{
	snprintf(text, 80, "telpher-mem-%016llx-%d-%016llx", (unsigned long long)boot->comm_hash, rank, (unsigned long long)name);
}

void tp_mem_sign(const struct tp_boot *boot, const char *what, int from, int to, uint64_t nonce, uint8_t mac[TP_SECRET_BYTES])
{
	struct { char what[16]; uint64_t nonce; int32_t from, to; } text;
	memset(&text, 0, sizeof(text));
	snprintf(text.what, sizeof(text.what), "%s", what);
	text.nonce = nonce;
	text.from = from;
	text.to = to;
	tp_secret_mac(boot->secret, &text, sizeof(text), mac);
}

ncclResult_t tp_mem_listen(const struct tp_boot *boot, int *listener, uint64_t *name)
{
	char text[80];
	uint64_t number;
	do tp_secret_random(&number, sizeof(number)); while (!number);
	tp_mem_socket_name(boot, boot->rank, number, text);
	TP_TRY(tp_unix_listen(text, 4 * boot->nlocal + 16, listener));
	*name = number;
	return ncclSuccess;
}

static bool is_passed(const struct tp_boot *boot, const struct tp_mem_hand *from, int local, bool wanted)
{
	int rank = boot->local_ranks[local];
	return wanted && rank != boot->rank && from->has_fd && !tp_mem_same_process(boot, rank);
}

static ncclResult_t push(const struct tp_boot *boot, uint64_t name, int to, int fd)
{
	char text[80];
	struct token token = { boot->rank, to, { 0 } };
	int sock;
	tp_mem_socket_name(boot, to, name, text);
	tp_mem_sign(boot, "exchange", boot->rank, to, name, token.mac);
	TP_TRY(tp_unix_connect(text, CONNECT_MS, &sock));
	ncclResult_t result = tp_unix_send_fd(sock, fd, &token, sizeof(token));
	close(sock);
	return result;
}

/* Somebody has connected. Returns whose descriptor it was, -1: nobody's that we know. */
static int take(const struct tp_boot *boot, uint64_t name, int sock, int *fd)
{
	struct token token;
	uint8_t mac[TP_SECRET_BYTES];
	int got = -1;
	pid_t pid;
	uid_t uid;
	/* A token comes whole; a stranger that says less must not hold us long. */
	if (tp_unix_peer(sock, &pid, &uid) != ncclSuccess || uid != geteuid() ||
		tp_unix_recv_fd(sock, &got, &token, sizeof(token), tp_clock_ms() + STRANGER_MS) != ncclSuccess) return -1;
	bool known = token.from >= 0 && token.from < boot->nranks && token.to == boot->rank && boot->peers[token.from].host == boot->host;
	if (known) tp_mem_sign(boot, "exchange", token.from, token.to, name, mac);
	if (!known || !tp_secret_equal(mac, token.mac)) {
		close(got);
		TP_INFO(TP_ALLOC, "rank %d: a stranger (pid %d) passed a descriptor; it was closed", boot->rank, (int)pid);
		return -1;
	}
	*fd = got;
	return token.from;
}

static ncclResult_t check_events(struct tp_boot *boot)
{
	struct tp_event event;
	if (boot->abort && atomic_load_explicit(boot->abort, memory_order_relaxed))
		return TP_FAIL(ncclInternalError, "rank %d: the exchange of GPU memory was aborted", boot->rank);
	if (tp_boot_first_event(boot, &event))
		return TP_FAIL(event.result == ncclSuccess ? ncclRemoteError : event.result, "rank %d: the exchange of GPU memory ended: %s", boot->rank,
			event.text);
	return ncclSuccess;
}

/* The listener, then those who have connected and said nothing yet. */
enum { GUESTS_MAX = 2 * TP_MEM_LOCAL_MAX };
struct guests { struct pollfd polled[1 + GUESTS_MAX]; int count; };

static ncclResult_t let_in(const struct tp_boot *boot, struct guests *g)
{
	int sock = accept4(g->polled[0].fd, NULL, NULL, SOCK_CLOEXEC);
	if (sock < 0 && (errno == EMFILE || errno == ENFILE))
		return TP_FAIL(ncclSystemError, "rank %d has no descriptor left to take GPU memory of its peers: raise ulimit -n", boot->rank);
	if (sock < 0) return ncclSuccess;
	if (g->count == GUESTS_MAX) {
		/* Peers come once each: the oldest silent guest is none. */
		close(g->polled[1].fd);
		memmove(&g->polled[1], &g->polled[2], (size_t)(--g->count) * sizeof(g->polled[0]));
	}
	g->polled[++g->count] = (struct pollfd){ .fd = sock, .events = POLLIN };
	return ncclSuccess;
}

/* Death and failure of others come as events. A guest that says nothing holds nobody up. */
static ncclResult_t take_all(struct tp_boot *boot, int listener, uint64_t name, int missing, int *fds)
{
	struct guests g = { .polled[0] = { .fd = listener, .events = POLLIN } };
	ncclResult_t result = ncclSuccess;
	while (missing > 0 && result == ncclSuccess) {
		result = check_events(boot);
		if (result != ncclSuccess || poll(g.polled, (nfds_t)(1 + g.count), SLICE_MS) <= 0) continue;
		for (int i = g.count; i >= 1; i--) {
			if (!g.polled[i].revents) continue;
			int fd = -1, from = take(boot, name, g.polled[i].fd, &fd);
			close(g.polled[i].fd);
			memmove(&g.polled[i], &g.polled[i + 1], (size_t)(g.count-- - i) * sizeof(g.polled[0]));
			if (from < 0) continue;
			int *place = &fds[boot->peers[from].local];
			if (*place >= 0) close(*place);
			else missing--;
			*place = fd;
		}
		if (missing > 0 && g.polled[0].revents) result = let_in(boot, &g);
	}
	for (int i = 1; i <= g.count; i++) close(g.polled[i].fd);
	return result;
}

ncclResult_t tp_mem_pass(struct tp_boot *boot, int listener, const struct tp_mem_hand *hands, const bool *wanted, int own_fd, int *fds)
{
	int missing = 0;
	for (int l = 0; l < boot->nlocal; l++) fds[l] = -1;
	for (int l = 0; l < boot->nlocal; l++) {
		if (is_passed(boot, &hands[boot->local], l, wanted[l])) TP_TRY(push(boot, hands[l].name, boot->local_ranks[l], own_fd));
		missing += is_passed(boot, &hands[l], l, wanted[l]);
	}
	return take_all(boot, listener, hands[boot->local].name, missing, fds);
}

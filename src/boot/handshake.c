/* How a connection begins: callers are accepted, both sides prove the id's secret, and who can't is dropped. Keeps little for
 * who has proven nothing: 96 bytes of what was said, and TP_UNPROVEN_MAX of them. */
#include "boot/conn.h"
#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#define ACCEPT_BATCH 64

/* Once a source and kind of nonsense: a scanner must not fill the log. */
void tp_conn_stranger(const struct tp_conn *conn, const char *what)
{
	static uint64_t seen[128];
	static unsigned count;
	union tp_addr addr = conn->peer;
	char text[TP_ADDR_TEXT];
	if (addr.sa.sa_family == AF_INET6) addr.v6.sin6_port = 0;
	else addr.v4.sin_port = 0;
	uint64_t hash = tp_hash64(what, strcspn(what, "0123456789"), tp_hash64(&addr, sizeof(addr), 0));
	for (unsigned i = 0; i < TP_MIN(count, TP_ARRAY_LEN(seen)); i++)
		if (seen[i] == hash) return;
	seen[count++ % TP_ARRAY_LEN(seen)] = hash;
	TP_WARN("Bootstrap: a stranger at %s %s; dropped", tp_conn_peer(conn, text), what);
}

/* Nonsense is known by its first bytes: an HTTP request of 20 bytes would otherwise be waited for. */
bool tp_conn_is_nonsense(struct tp_conn *conn)
{
	char text[160];
	if (conn->state != TP_CONN_HELLO || conn->have < 8 || memcmp(conn->head, TP_WIRE_MAGIC, 8) == 0) return false;
	tp_conn_stranger(conn, tp_wire_hello_check(conn->head, conn->have, text, sizeof(text)));
	tp_conn_close(conn);
	return true;
}

/* No descriptor is left: the reserve is given up for a moment so that the caller is turned away and not kept waiting. */
static void refuse_for_want_of_fds(struct tp_listener *listener)
{
	static uint64_t warned_ms;
	uint64_t now = tp_clock_ms();
	if (!warned_ms || now - warned_ms > 10000) {
		warned_ms = now;
		TP_WARN("Bootstrap: no file descriptor is left for a connection (ulimit -n); callers are turned away and will call again");
	}
	if (tp_service.spare_fd >= 0) close(tp_service.spare_fd);
	int fd = accept4(listener->source.fd, NULL, NULL, SOCK_CLOEXEC);
	if (fd >= 0) close(fd);
	tp_service.spare_fd = dup(tp_service.wake);
}

static void drop_oldest_unproven(void)
{
	struct tp_conn *conn = tp_service.oldest;
	while (conn && !conn->counted) conn = conn->prev;
	if (conn) tp_conn_close(conn);
}

/* False: there is no memory for it, and it is turned away. */
static bool admit(int fd, const union tp_addr *peer, bool is_unix)
{
	int on = 1;
	if (!is_unix) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
	struct tp_conn *conn = tp_conn_new(fd, false, is_unix, tp_clock_ms() + TP_HANDSHAKE_MS);
	if (!conn) {
		close(fd);
		return false;
	}
	conn->peer = *peer;
	conn->counted = true;
	tp_service.unproven++;
	conn->events = EPOLLIN;
	tp_conn_expect(conn, TP_CONN_HELLO, sizeof(struct tp_wire_hello));
	if (tp_service_add(&conn->source, EPOLLIN) != ncclSuccess) tp_conn_close(conn);
	else if (tp_service.unproven > TP_UNPROVEN_MAX) drop_oldest_unproven();
	return true;
}

void tp_conn_accept(struct tp_listener *listener)
{
	for (int i = 0; i < ACCEPT_BATCH && listener->source.fd >= 0; i++) {
		union tp_addr peer;
		socklen_t length = sizeof(peer);
		memset(&peer, 0, sizeof(peer));
		int fd = accept4(listener->source.fd, listener->is_unix ? NULL : &peer.sa, listener->is_unix ? NULL : &length,
			SOCK_CLOEXEC | SOCK_NONBLOCK);
		if (fd < 0 && (errno == EMFILE || errno == ENFILE)) {
			if (tp_service_need_fds(256) == ncclSuccess) continue;
			refuse_for_want_of_fds(listener);
			return;
		}
		if (fd < 0 && (errno == EINTR || errno == ECONNABORTED)) continue;
		if (fd < 0) return;
		if (!admit(fd, &peer, listener->is_unix)) return;
	}
}

static void become_open(struct tp_conn *conn)
{
	tp_wire_session(conn->secret, &conn->hello, conn->nonce, conn->keys);
	tp_conn_expect(conn, TP_CONN_OPEN, sizeof(struct tp_wire_frame));
	conn->deadline_ms = 0;
	if (conn->counted) tp_service.unproven--;
	conn->counted = false;
	if (conn->ops && conn->ops->open) conn->ops->open(conn);
}

/* Whom the caller wants: one of the two, or neither. */
struct called { struct tp_root *root; struct tp_site *site; const uint8_t *secret; };
static struct called find_called(const struct tp_wire_hello *hello)
{
	struct called called = {0};
	if (hello->kind == TP_WIRE_JOIN || hello->kind == TP_WIRE_GROUP) called.root = tp_root_find(hello->name, &called.secret);
	else called.site = tp_site_find(hello->name, &called.secret);
	return called;
}

static void challenge(struct tp_conn *conn)
{
	struct tp_wire_challenge answer = { .magic = TP_WIRE_MAGIC, .format = TP_WIRE_FORMAT };
	const uint8_t *secret = find_called(&conn->hello).secret;
	if (!secret && (conn->hello.flags & TP_WIRE_HOLD)) {
		conn->state = TP_CONN_HELD;
		conn->need = 0;
		return;
	}
	if (!secret) {
		answer.verdict = TP_WIRE_UNKNOWN;
		tp_conn_send_raw(conn, &answer, sizeof(answer), NULL, 0);
		tp_conn_close(conn);
		return;
	}
	conn->deadline_ms = tp_clock_ms() + TP_HANDSHAKE_MS;    /* for the proof: its process may lack a processor */
	memcpy(conn->secret, secret, TP_SECRET_BYTES);
	tp_secret_random(conn->nonce, sizeof(conn->nonce));
	memcpy(answer.nonce, conn->nonce, sizeof(answer.nonce));
	tp_wire_prove(conn->secret, TP_WIRE_SERVICE, &conn->hello, conn->nonce, answer.proof);
	tp_conn_expect(conn, TP_CONN_PROOF, sizeof(struct tp_wire_proof));
	tp_conn_send_raw(conn, &answer, sizeof(answer), NULL, 0);
}

void tp_conn_wake_held(uint64_t name)
{
	struct tp_conn *next;
	for (struct tp_conn *conn = tp_service.conns; conn; conn = next) {
		next = conn->next;
		if (conn->state == TP_CONN_HELD && conn->hello.name == name) challenge(conn);
	}
}

void tp_conn_got_hello(struct tp_conn *conn)
{
	char text[160];
	const char *wrong = tp_wire_hello_check(conn->head, conn->have, text, sizeof(text));
	if (wrong) {
		if (memcmp(conn->head, TP_WIRE_MAGIC, 8) == 0) {
			struct tp_wire_challenge answer = { .magic = TP_WIRE_MAGIC, .format = TP_WIRE_FORMAT, .verdict = TP_WIRE_FOREIGN };
			tp_conn_send_raw(conn, &answer, sizeof(answer), NULL, 0);
		}
		tp_conn_stranger(conn, wrong);
		tp_conn_close(conn);
		return;
	}
	memcpy(&conn->hello, conn->head, sizeof(conn->hello));
	challenge(conn);
}

/* The proof is right: whose is it now? */
static void hand_over(struct tp_conn *conn)
{
	struct called called = find_called(&conn->hello);
	if (!called.secret) {
		tp_conn_close(conn);
		return;
	}
	become_open(conn);
	if (called.root) tp_root_adopt(called.root, conn);
	else if (conn->hello.kind == TP_WIRE_SEGMENT) tp_site_adopt_segment(called.site, conn);
	else tp_mesh_adopt(called.site, conn);
}

void tp_conn_got_proof(struct tp_conn *conn)
{
	uint8_t right[TP_SECRET_BYTES];
	tp_wire_prove(conn->secret, TP_WIRE_CALLER, &conn->hello, conn->nonce, right);
	if (!tp_secret_equal(right, conn->head)) {
		tp_conn_stranger(conn, "knows the name of an id but not its secret");
		tp_conn_close(conn);
		return;
	}
	hand_over(conn);
}

void tp_conn_got_challenge(struct tp_conn *conn)
{
	struct tp_wire_challenge answer;
	struct tp_wire_proof proof;
	uint8_t right[TP_SECRET_BYTES];
	char text[160];
	memcpy(&answer, conn->head, sizeof(answer));
	if (memcmp(answer.magic, TP_WIRE_MAGIC, sizeof(answer.magic)) != 0) {
		tp_conn_end(conn, TP_END_FOREIGN, "is no Telpher process");
		return;
	}
	if (answer.format != TP_WIRE_FORMAT) {
		snprintf(text, sizeof(text), "speaks version %u of the bootstrap's greeting, this process version %u", answer.format, TP_WIRE_FORMAT);
		tp_conn_end(conn, TP_END_FOREIGN, text);
		return;
	}
	if (answer.verdict != TP_WIRE_GO_ON) {
		tp_conn_end(conn, TP_END_UNKNOWN, "does not know this communicator's id (any more)");
		return;
	}
	memcpy(conn->nonce, answer.nonce, sizeof(conn->nonce));
	tp_wire_prove(conn->secret, TP_WIRE_SERVICE, &conn->hello, conn->nonce, right);
	if (!tp_secret_equal(right, answer.proof)) {
		tp_conn_end(conn, TP_END_FOREIGN, "does not know the id's secret");
		return;
	}
	tp_wire_prove(conn->secret, TP_WIRE_CALLER, &conn->hello, conn->nonce, proof.proof);
	tp_conn_send_raw(conn, &proof, sizeof(proof), NULL, 0);
	become_open(conn);
}

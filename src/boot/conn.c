/* One connection: the handshake (handshake.c), then frames. Non-blocking throughout; reads exactly what it needs next, so a
 * descriptor that follows a frame is never read past. */
#include "boot/conn.h"
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/uio.h>
#include <unistd.h>

#define FRAME_BATCH 64
#define CONN_DEFAULT_LIMIT 4096

const char *tp_conn_peer(const struct tp_conn *conn, char text[TP_ADDR_TEXT])
{
	if (conn->is_unix) {
		snprintf(text, TP_ADDR_TEXT, "a process of this host");
		return text;
	}
	return tp_addr_format(&conn->peer, text);
}

static void unlink_conn(struct tp_conn *conn)
{
	if (conn->prev) conn->prev->next = conn->next;
	else tp_service.conns = conn->next;
	if (conn->next) conn->next->prev = conn->prev;
	else tp_service.oldest = conn->prev;
	if (conn->counted) tp_service.unproven--;
	conn->counted = false;
}

void tp_conn_close(struct tp_conn *conn)
{
	if (conn->state == TP_CONN_CLOSED) return;
	conn->state = TP_CONN_CLOSED;
	tp_service_remove(&conn->source);
	unlink_conn(conn);
	free(conn->payload);
	free(conn->out);
	conn->payload = conn->out = NULL;
	memset(conn->secret, 0, sizeof(conn->secret));
	conn->next = tp_service.dead_conns;
	tp_service.dead_conns = conn;
}

void tp_conn_close_all_of(const void *owner)
{
	struct tp_conn *next;
	for (struct tp_conn *conn = tp_service.conns; conn; conn = next) {
		next = conn->next;
		if (conn->owner == owner) tp_conn_close(conn);
	}
}

void tp_conn_free_dead(void)
{
	while (tp_service.dead_conns) {
		struct tp_conn *conn = tp_service.dead_conns;
		tp_service.dead_conns = conn->next;
		free(conn);
	}
}

void tp_conn_end(struct tp_conn *conn, enum tp_conn_end how, const char *why)
{
	const struct tp_conn_ops *ops = conn->ops;
	if (conn->state == TP_CONN_CLOSED) return;
	tp_conn_close(conn);
	if (ops && ops->closed) ops->closed(conn, how, why);
}

void tp_conn_close_flushed(struct tp_conn *conn)
{
	conn->ops = NULL;
	conn->owner = NULL;
	if (conn->state != TP_CONN_OPEN || conn->out_have == 0) {
		tp_conn_close(conn);
		return;
	}
	conn->deadline_ms = tp_clock_ms() + 2000;
	tp_service_poke(conn->deadline_ms);
}

struct tp_conn *tp_conn_new(int fd, bool caller, bool is_unix, uint64_t deadline_ms)
{
	struct tp_conn *conn = tp_alloc(1, sizeof(*conn), "bootstrap connection");
	if (!conn) return NULL;
	conn->source = (struct tp_source){ .kind = TP_SOURCE_CONN, .fd = fd };
	conn->caller = caller;
	conn->is_unix = is_unix;
	conn->limit = CONN_DEFAULT_LIMIT;
	conn->deadline_ms = deadline_ms;
	conn->next = tp_service.conns;
	if (conn->next) conn->next->prev = conn;
	else tp_service.oldest = conn;
	tp_service.conns = conn;
	if (deadline_ms) tp_service_poke(deadline_ms);
	return conn;
}

static void want(struct tp_conn *conn, uint32_t events)
{
	if (conn->events == events || conn->source.fd < 0) return;
	conn->events = events;
	tp_service_change(&conn->source, events);
}

static void take_input(struct tp_conn *conn);

static void queue_out(struct tp_conn *conn, const void *data, size_t bytes)
{
	if (bytes == 0) return;
	if (conn->out_at + conn->out_have + bytes > conn->out_room) {
		size_t room = TP_MAX(conn->out_have + bytes, 512);
		uint8_t *grown = malloc(room);
		if (!grown) {
			conn->broken = true;
			return;
		}
		if (conn->out_have) memcpy(grown, conn->out + conn->out_at, conn->out_have);
		free(conn->out);
		conn->out = grown;
		conn->out_room = room;
		conn->out_at = 0;
	}
	memcpy(conn->out + conn->out_at + conn->out_have, data, bytes);
	conn->out_have += bytes;
}

/* What the socket takes now goes out, the rest is queued. A broken connection is ended by the service thread later, so that
 * a sender is never called back. */
void tp_conn_send_raw(struct tp_conn *conn, const void *head, size_t head_bytes, const void *data, size_t bytes)
{
	size_t sent = 0;
	if (conn->broken || conn->state == TP_CONN_CLOSED) return;
	if (conn->out_have == 0) {
		struct iovec parts[2] = { { (void *)(uintptr_t)head, head_bytes }, { (void *)(uintptr_t)data, bytes } };
		struct msghdr msg = { .msg_iov = parts, .msg_iovlen = bytes ? 2 : 1 };
		ssize_t n;
		do n = sendmsg(conn->source.fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
		while (n < 0 && errno == EINTR);
		if (n < 0 && errno != EAGAIN) conn->broken = true;
		if (n > 0) sent = (size_t)n;
	}
	if (sent < head_bytes) queue_out(conn, (const char *)head + sent, head_bytes - sent);
	sent = sent > head_bytes ? sent - head_bytes : 0;
	if (sent < bytes) queue_out(conn, (const char *)data + sent, bytes - sent);
	if (conn->out_have) want(conn, EPOLLIN | EPOLLOUT);
	if (conn->broken) {
		conn->deadline_ms = 1;
		tp_service_poke(0);
	}
}

/* What the other side said last, before it closed, counts all the same. */
static void end_broken(struct tp_conn *conn, const char *why)
{
	uint64_t before;
	conn->broken = true;
	do {
		before = conn->received;
		take_input(conn);
	} while (conn->state == TP_CONN_OPEN && conn->received != before);
	tp_conn_end(conn, TP_END_BROKEN, why);
}

static void flush(struct tp_conn *conn)
{
	while (conn->out_have) {
		ssize_t n = send(conn->source.fd, conn->out + conn->out_at, conn->out_have, MSG_NOSIGNAL | MSG_DONTWAIT);
		if (n < 0 && errno == EINTR) continue;
		if (n < 0 && errno == EAGAIN) return;
		if (n < 0) {
			end_broken(conn, strerror(errno));
			return;
		}
		conn->out_at += (size_t)n;
		conn->out_have -= (size_t)n;
	}
	free(conn->out);
	conn->out = NULL;
	conn->out_at = conn->out_room = 0;
	if (!conn->ops && conn->state == TP_CONN_OPEN) {
		tp_conn_close(conn);
		return;
	}
	want(conn, EPOLLIN);
	if (conn->ops && conn->ops->flushed) conn->ops->flushed(conn);
}

void tp_conn_send(struct tp_conn *conn, enum tp_wire_type type, const void *payload, size_t bytes)
{
	struct tp_wire_frame frame;
	if (conn->state != TP_CONN_OPEN || conn->broken) return;
	tp_wire_seal(&frame, conn->keys[conn->caller ? 0 : 1], type, conn->sent++, payload, bytes);
	tp_conn_send_raw(conn, &frame, sizeof(frame), payload, bytes);
}

void tp_conn_send_fail(struct tp_conn *conn, ncclResult_t result, const char *text)
{
	struct tp_wire_fail fail;
	tp_wire_fail_make(&fail, result, text);
	tp_conn_send(conn, TP_FRAME_FAIL, &fail, sizeof(fail));
}

void tp_conn_send_fd(struct tp_conn *conn, int fd)
{
	if (conn->state != TP_CONN_OPEN || conn->broken) return;
	if (conn->out_have || tp_unix_send_fd(conn->source.fd, fd, "F", 1) != ncclSuccess) conn->broken = true;
}

void tp_conn_expect(struct tp_conn *conn, enum tp_conn_state state, size_t need)
{
	conn->state = state;
	conn->need = need;
	conn->have = 0;
}

/* What may pass is only noted: the caller tries again. */
static ncclResult_t start_call(const union tp_addr *to, const union tp_addr *from, int *fd)
{
	char text[TP_ADDR_TEXT];
	bool hopeless;
	int error = tp_socket_try_connect_start(to, from, fd, &hopeless);
	if (error == 0 || error == EINPROGRESS) return ncclSuccess;
	if (hopeless) return TP_FAIL(ncclSystemError, "Bootstrap: can't connect to %s from %s: %s", tp_addr_format(to, text), tp_host_name(), strerror(error));
	TP_INFO(TP_BOOTSTRAP, "Bootstrap: can't connect to %s: %s; trying again", tp_addr_format(to, text), strerror(error));
	return ncclRemoteError;
}

ncclResult_t tp_conn_call(int fd, const union tp_addr *addr, enum tp_wire_kind kind, uint8_t flags, uint64_t name,
	const uint8_t secret[TP_SECRET_BYTES], uint64_t deadline_ms, const struct tp_conn_ops *ops, void *owner, struct tp_conn **out)
{
	bool is_unix = fd >= 0;
	union tp_addr space;
	ncclResult_t result = ncclSuccess;
	if (!is_unix) TP_TRY(start_call(addr, tp_service_from(addr, &space), &fd));
	else result = tp_socket_set_nonblocking(fd, true);
	if (result != ncclSuccess) {
		close(fd);
		return result;
	}
	struct tp_conn *conn = tp_conn_new(fd, true, is_unix, deadline_ms);
	if (!conn) {
		close(fd);
		return ncclSystemError;
	}
	if (!is_unix) conn->peer = *addr;
	conn->ops = ops;
	conn->owner = owner;
	memcpy(conn->secret, secret, TP_SECRET_BYTES);
	tp_wire_hello_make(&conn->hello, kind, flags, name);
	conn->state = TP_CONN_CONNECTING;
	conn->events = EPOLLOUT;
	result = tp_service_add(&conn->source, conn->events);
	if (result != ncclSuccess) {
		tp_conn_close(conn);
		return result;
	}
	*out = conn;
	return ncclSuccess;
}

static void bad_frame(struct tp_conn *conn, const char *wrong)
{
	if (!conn->caller) tp_conn_stranger(conn, wrong);
	tp_conn_end(conn, TP_END_BROKEN, wrong);
}

static void got_frame(struct tp_conn *conn)
{
	const char *wrong = NULL;
	uint8_t *payload = conn->payload;
	if (!tp_wire_frame_proven(&conn->frame, conn->keys[conn->caller ? 1 : 0], payload)) {
		bad_frame(conn, "sent a frame whose proof is wrong (forged or damaged)");
		return;
	}
	conn->payload = NULL;
	conn->received++;
	tp_conn_expect(conn, TP_CONN_OPEN, sizeof(struct tp_wire_frame));
	if (conn->ops) wrong = conn->ops->frame(conn, conn->frame.type, payload, conn->frame.bytes);
	free(payload);
	if (wrong && conn->state != TP_CONN_CLOSED) bad_frame(conn, wrong);
}

static void got_frame_head(struct tp_conn *conn)
{
	memcpy(&conn->frame, conn->head, sizeof(conn->frame));
	const char *wrong = tp_wire_frame_check(&conn->frame, conn->received, conn->limit);
	if (wrong) {
		bad_frame(conn, wrong);
		return;
	}
	if (conn->frame.bytes == 0) {
		got_frame(conn);
		return;
	}
	conn->payload = malloc(conn->frame.bytes);
	if (!conn->payload) {
		tp_conn_end(conn, TP_END_BROKEN, "no memory for a frame");
		return;
	}
	conn->need = conn->frame.bytes;
	conn->have = 0;
}

static void got_all(struct tp_conn *conn)
{
	switch (conn->state) {
	case TP_CONN_HELLO: tp_conn_got_hello(conn); break;
	case TP_CONN_PROOF: tp_conn_got_proof(conn); break;
	case TP_CONN_CHALLENGE: tp_conn_got_challenge(conn); break;
	case TP_CONN_OPEN:
		if (conn->payload) got_frame(conn);
		else got_frame_head(conn);
		break;
	default: break;
	}
}

static void got_end(struct tp_conn *conn, const char *why)
{
	char text[160];
	if (!conn->caller && conn->state == TP_CONN_HELLO && !conn->is_unix) {
		/* A process of ours that is killed looks like that too. */
		if (!conn->have) TP_INFO(TP_BOOTSTRAP, "Bootstrap: %s connected and left without a word", tp_conn_peer(conn, text));
		else tp_conn_stranger(conn, tp_wire_hello_check(conn->head, conn->have, text, sizeof(text)));
	}
	tp_conn_end(conn, TP_END_BROKEN, why);
}

/* False: it isn't here yet. */
static bool take_descriptor(struct tp_conn *conn)
{
	struct pollfd here = { .fd = conn->source.fd, .events = POLLIN };
	int fd = -1;
	char byte;
	/* Its sender may have lost the processor since it announced it; nobody else is held up meanwhile. */
	if (poll(&here, 1, 0) == 0) return false;
	conn->want_fd = false;
	if (tp_unix_recv_fd(conn->source.fd, &fd, &byte, 1, tp_clock_ms() + 1000) != ncclSuccess) fd = -1;
	conn->ops->descriptor(conn, fd);
	return true;
}

static void take_input(struct tp_conn *conn)
{
	for (int frames = 0; frames < FRAME_BATCH && conn->state != TP_CONN_CLOSED;) {
		if (conn->want_fd) {
			if (!take_descriptor(conn)) return;
			continue;
		}
		uint8_t spill;
		uint8_t *to = conn->payload ? conn->payload : conn->head;
		bool idle = conn->need == 0;        /* held: nothing may come but the end */
		ssize_t n = recv(conn->source.fd, idle ? &spill : to + conn->have, idle ? 1 : conn->need - conn->have, MSG_DONTWAIT);
		if (n < 0 && errno == EINTR) continue;
		if (n < 0 && errno == EAGAIN) return;
		if (n < 0) {
			got_end(conn, strerror(errno));
			return;
		}
		if (n == 0) {
			got_end(conn, "closed the connection");
			return;
		}
		if (idle) {
			bad_frame(conn, "spoke out of turn");
			return;
		}
		conn->have += (size_t)n;
		if (tp_conn_is_nonsense(conn)) return;
		if (conn->have < conn->need) continue;
		frames++;
		got_all(conn);
	}
}

static void finish_connect(struct tp_conn *conn)
{
	int error = conn->is_unix ? 0 : tp_socket_try_connect_finish(conn->source.fd);
	if (error) {
		tp_conn_end(conn, error == ECONNREFUSED ? TP_END_REFUSED : TP_END_SILENT, error == ECONNREFUSED ? "refuses connections" : strerror(error));
		return;
	}
	tp_conn_expect(conn, TP_CONN_CHALLENGE, sizeof(struct tp_wire_challenge));
	want(conn, EPOLLIN);
	tp_conn_send_raw(conn, &conn->hello, sizeof(conn->hello), NULL, 0);
}

void tp_conn_event(struct tp_conn *conn, uint32_t events)
{
	if (conn->state == TP_CONN_CLOSED) return;
	if (conn->state == TP_CONN_CONNECTING) {
		finish_connect(conn);
		return;
	}
	if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) take_input(conn);
	if (conn->state != TP_CONN_CLOSED && (events & EPOLLOUT)) flush(conn);
}

static void expire(struct tp_conn *conn)
{
	if (conn->broken) end_broken(conn, "closed the connection");
	else if (conn->caller) tp_conn_end(conn, TP_END_SILENT, "does not answer");
	else if (!conn->ops && conn->state == TP_CONN_OPEN) tp_conn_close(conn);
	else if (conn->state == TP_CONN_HELLO) {
		char text[160];
		const char *what = conn->have ? tp_wire_hello_check(conn->head, conn->have, text, sizeof(text)) : "connected and says nothing";
		tp_conn_stranger(conn, what ? what : "is too slow with its greeting");
		tp_conn_close(conn);
	} else if (conn->state != TP_CONN_OPEN) {
		tp_conn_close(conn);            /* held in vain, or without a proof: the caller will call again */
	}
}

void tp_conn_tick(uint64_t now_ms)
{
	struct tp_conn *conn = tp_service.conns;
	while (conn) {
		if (conn->deadline_ms && conn->deadline_ms <= now_ms) {
			conn->deadline_ms = 0;
			expire(conn);
			conn = tp_service.conns;        /* others may have been closed with it */
			continue;
		}
		if (conn->deadline_ms) tp_service_poke(conn->deadline_ms);
		conn = conn->next;
	}
}

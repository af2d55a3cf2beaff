/* A rank on its way into a communicator: it calls the root (or meets it, where the root is in this process), again if need be,
 * and hands what it hears to the thread that waits in tp_boot_open. */
#include "boot/internal.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ROOT_SAYS_MS 5000
#define REFUSED_MS 4000             /* how long a refusing root is believed to be on its way */

static void call_root(struct tp_joiner *joiner);

void tp_join_fail(struct tp_joiner *joiner, ncclResult_t result, const char *text)
{
	if (joiner->result != ncclSuccess) return;
	joiner->result = result == ncclSuccess ? ncclInternalError : result;
	snprintf(joiner->text, sizeof(joiner->text), "%s", text);
	pthread_cond_signal(&joiner->cond);
}

static void root_open(struct tp_conn *conn)
{
	struct tp_joiner *joiner = conn->owner;
	struct tp_wire_join join = joiner->join;
	conn->limit = sizeof(struct tp_wire_seat) + tp_wire_table_bytes(join.nranks, join.nranks) + sizeof(struct tp_wire_fail);
	tp_wire_mask(conn->keys[0], join.first_secret);
	tp_conn_send(conn, TP_FRAME_JOIN, &join, sizeof(join));
	joiner->sent_ns = tp_clock_ns();
}

static const char *got_seat(struct tp_joiner *joiner, const void *data, size_t bytes, bool with_table)
{
	size_t table_bytes = bytes - sizeof(joiner->seat);
	const char *table = (const char *)data + sizeof(joiner->seat);
	if (joiner->seated || bytes < sizeof(joiner->seat)) return "sent a seat that was not asked for";
	if (!with_table && table_bytes) return "sent a seat of the wrong length";
	if (with_table) {
		const char *wrong = tp_wire_table_check(table, table_bytes, joiner->join.nranks);
		if (wrong) return wrong;
		joiner->table = malloc(table_bytes);
		if (!joiner->table) return "sent a table there is no memory for";
		memcpy(joiner->table, table, table_bytes);
	}
	memcpy(&joiner->seat, data, sizeof(joiner->seat));
	joiner->seated = true;
	pthread_cond_signal(&joiner->cond);
	return NULL;
}

static const char *root_frame(struct tp_conn *conn, enum tp_wire_type type, const void *data, size_t bytes)
{
	struct tp_joiner *joiner = conn->owner;
	struct tp_wire_fail told;
	switch (type) {
	case TP_FRAME_TABLE: return got_seat(joiner, data, bytes, true);
	case TP_FRAME_SEAT: return got_seat(joiner, data, bytes, false);
	case TP_FRAME_GO:
		joiner->go = true;
		pthread_cond_signal(&joiner->cond);
		return NULL;
	case TP_FRAME_FAIL:
		if (!tp_wire_fail_read(&told, data, bytes)) return "sent a failure of the wrong length";
		tp_join_fail(joiner, (ncclResult_t)told.result, told.text);
		return NULL;
	default: return "sent a frame that is none of a root's";
	}
}

static void retry_later(struct tp_joiner *joiner, uint64_t now_ms)
{
	uint32_t spread;
	tp_secret_random(&spread, sizeof(spread));
	joiner->retry_ms = now_ms + 20 + spread % 80;
	tp_service_poke(joiner->retry_ms);
}

static void root_closed(struct tp_conn *conn, enum tp_conn_end how, const char *why)
{
	struct tp_joiner *joiner = conn->owner;
	char addr[TP_ADDR_TEXT], text[TP_WIRE_TEXT];
	uint64_t now = tp_clock_ms();
	bool env = joiner->id.flags & TP_ID_ENV, was_in = conn->sent > 0;
	joiner->conn = NULL;
	if (joiner->go || joiner->result != ncclSuccess) return;
	if (how == TP_END_REFUSED && !joiner->refused_since_ms) joiner->refused_since_ms = now;
	bool patient = env || how != TP_END_REFUSED || now - joiner->refused_since_ms < REFUSED_MS;
	bool retry = !was_in && patient && how != TP_END_FOREIGN && (env || how != TP_END_UNKNOWN);
	if (retry && now < joiner->deadline_ms) {
		retry_later(joiner, now);
		return;
	}
	snprintf(text, sizeof(text), "the root of the communicator at %s %s%s", tp_addr_format(&joiner->id.root, addr), why,
		how == TP_END_REFUSED ? ": its process has ended, or never was there"
		: was_in ? ": its process has died" : "");
	tp_join_fail(joiner, how == TP_END_FOREIGN || how == TP_END_UNKNOWN ? ncclInvalidUsage : ncclRemoteError, text);
}

static const struct tp_conn_ops root_ops = { .open = root_open, .frame = root_frame, .closed = root_closed };

static void call_root(struct tp_joiner *joiner)
{
	uint8_t flags = joiner->id.flags & (TP_ID_DERIVED | TP_ID_ENV) ? TP_WIRE_HOLD : 0;
	uint64_t now = tp_clock_ms();
	joiner->retry_ms = 0;
	ncclResult_t result = tp_conn_call(-1, &joiner->id.root, TP_WIRE_JOIN, flags, joiner->id.name, joiner->id.secret,
		now + TP_HANDSHAKE_MS + 5000, &root_ops, joiner, &joiner->conn);
	if (result == ncclRemoteError && now < joiner->deadline_ms) retry_later(joiner, now);
	else if (result != ncclSuccess) tp_join_fail(joiner, result, tp_log_last_error());
}

/* The root may be in this process: then nothing goes over the network. */
static ncclResult_t find_root_here(struct tp_joiner *joiner, struct tp_root **root)
{
	const struct tp_id *id = &joiner->id;
	*root = tp_root_find(id->name, NULL);
	if (*root) return ncclSuccess;
	if ((id->flags & TP_ID_ENV) && joiner->join.rank == 0) return tp_root_serve(id, root);
	if (!tp_service_is_here(&id->root)) return ncclSuccess;
	if (id->flags & TP_ID_DERIVED) return tp_root_serve(id, root);
	return TP_FAIL(ncclInvalidUsage, "rank %d: this process made the unique id but does not know it any more: it was used long ago", joiner->join.rank);
}

ncclResult_t tp_join_start(struct tp_joiner *joiner)
{
	struct tp_root *root = NULL;
	tp_service_lock();
	ncclResult_t result = tp_service_use();
	if (result != ncclSuccess) {
		tp_service_unlock();
		return result;
	}
	tp_wire_addr_put(&joiner->join.service, &tp_service.addr);
	joiner->join.process_hash = tp_service.process_hash;
	joiner->join.pid = (int32_t)getpid();
	joiner->next = tp_service.joiners;
	tp_service.joiners = joiner;
	result = find_root_here(joiner, &root);
	if (result != ncclSuccess) tp_join_fail(joiner, result, tp_log_last_error());
	else if (root) tp_root_join_here(root, joiner);
	else call_root(joiner);
	tp_service_unlock();
	return ncclSuccess;
}

ncclResult_t tp_join_wait(struct tp_joiner *joiner, const bool *flag, _Atomic uint32_t *abort)
{
	ncclResult_t result = ncclSuccess;
	tp_service_lock();
	while (!*flag && joiner->result == ncclSuccess) {
		uint64_t now = tp_clock_ms();
		if (abort && atomic_load_explicit(abort, memory_order_relaxed)) tp_join_fail(joiner, ncclInternalError, "init was aborted");
		/* The root's limit is the same, and it knows who is missing: it gets a little more time to say so, though it may lack a processor. */
		else if (now > joiner->deadline_ms + ROOT_SAYS_MS) tp_join_fail(joiner, ncclRemoteError, "time is over (TELPHER_INIT_TIMEOUT): the root does not answer");
		else tp_service_wait(&joiner->cond, now + TP_BOOT_SLICE_MS);
	}
	if (joiner->result != ncclSuccess) result = joiner->result;
	tp_service_unlock();
	if (result != ncclSuccess) return TP_FAIL(result, "rank %d of %d: %s", joiner->join.rank, joiner->join.nranks, joiner->text);
	return ncclSuccess;
}

void tp_join_tell(struct tp_joiner *joiner, enum tp_wire_type type)
{
	tp_service_lock();
	if (joiner->conn) tp_conn_send(joiner->conn, type, NULL, 0);
	else if (joiner->root && type == TP_FRAME_READY) tp_root_ready_here(joiner->root, joiner);
	else if (joiner->root && type == TP_FRAME_DONE) tp_root_done_here(joiner->root, joiner);
	tp_service_unlock();
}

void tp_join_end(struct tp_joiner *joiner)
{
	tp_service_lock();
	bool failed = !joiner->go;
	const char *why = joiner->text[0] ? joiner->text : tp_log_last_error();
	if (failed && joiner->conn) tp_conn_send_fail(joiner->conn, joiner->result == ncclSuccess ? ncclRemoteError : joiner->result, why);
	if (failed && joiner->root) tp_root_leave_here(joiner->root, joiner, why);
	if (joiner->conn) tp_conn_close_flushed(joiner->conn);
	for (struct tp_joiner **at = &tp_service.joiners; *at; at = &(*at)->next)
		if (*at == joiner) {
			*at = joiner->next;
			break;
		}
	free(joiner->table);
	joiner->table = NULL;
	tp_service_unuse();
	tp_service_unlock();
}

void tp_join_tick(uint64_t now_ms)
{
	for (struct tp_joiner *joiner = tp_service.joiners; joiner; joiner = joiner->next) {
		if (!joiner->retry_ms) continue;
		if (joiner->retry_ms <= now_ms) call_root(joiner);
		else tp_service_poke(joiner->retry_ms);
	}
}

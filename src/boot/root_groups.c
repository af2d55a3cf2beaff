/* Several ids (ncclCommInitRankScalable): each root serves a block of ranks and passes joins, READY and DONE on to the root of
 * the first id, whose answers it hands down. */
#include "boot/root.h"
#include <stdlib.h>
#include <string.h>

/* ---- roots that call the first root */

static const char *group_joins(struct tp_root *root, struct tp_conn *conn, const void *data, size_t bytes)
{
	size_t count = bytes / sizeof(struct tp_wire_join);
	if (count * sizeof(struct tp_wire_join) != bytes) return "sent joins of the wrong length";
	for (size_t i = 0; i < count && !root->over; i++) {
		struct tp_wire_join join;
		memcpy(&join, (const char *)data + i * sizeof(join), sizeof(join));
		const char *wrong = tp_wire_join_check(&join, sizeof(join));
		if (wrong) return wrong;
		if (join.group < 1) return "passed on a join of our own";
		if (conn->tag >= 0 && join.group != conn->tag) return "passed on a join of another root";
		int group = join.group;
		join.group = 0;
		if (!root->members && (join.nids < 2 || !tp_root_size_up(root, &join))) return "passed on a join that is of no use";
		if (group >= root->nids || (root->groups[group] && root->groups[group] != conn)) return "is not the only root of its ranks";
		conn->tag = group;
		root->groups[group] = conn;
		if (!tp_root_add_join(root, &join, true)) return NULL;
	}
	if (!root->over && root->joined == root->nranks) tp_root_all_joined(root);
	return NULL;
}

static const char *group_frame(struct tp_conn *conn, enum tp_wire_type type, const void *data, size_t bytes)
{
	struct tp_root *root = conn->owner;
	struct tp_wire_fail told;
	uint32_t host;
	if (type == TP_FRAME_GROUP) {
		if (root->over) {
			tp_conn_send_fail(conn, root->result, root->text);
			tp_conn_close_flushed(conn);
			return NULL;
		}
		return group_joins(root, conn, data, bytes);
	}
	if (conn->tag < 0 || root->over) return "spoke before it passed on a join";
	if (type == TP_FRAME_READY && bytes == sizeof(host)) {
		memcpy(&host, data, sizeof(host));
		tp_root_host_is_ready(root, (int)host);
	} else if (type == TP_FRAME_DONE) {
		root->groups_done++;
		tp_root_check_done(root);
	} else if (type == TP_FRAME_FAIL && tp_wire_fail_read(&told, data, bytes)) {
		root->groups[conn->tag] = NULL;
		tp_conn_close_flushed(conn);
		tp_root_fail(root, (ncclResult_t)told.result, told.text);
	} else {
		return "sent a frame that is none of a root's";
	}
	return NULL;
}

static void group_closed(struct tp_conn *conn, enum tp_conn_end how, const char *why)
{
	struct tp_root *root = conn->owner;
	char text[TP_ADDR_TEXT];
	(void)how;
	if (conn->tag < 0 || root->over || !root->groups) return;
	root->groups[conn->tag] = NULL;
	tp_root_failf(root, ncclRemoteError, "the root of id %d of %d (%s) %s before all ranks were there: it died or gave up", conn->tag, root->nids,
		tp_conn_peer(conn, text), why);
}

const struct tp_conn_ops tp_root_group_ops = { .frame = group_frame, .closed = group_closed };

/* ---- a root that is not the first one calls it */

static void pass_on_joins(struct tp_root *root)
{
	struct tp_wire_join *batch = tp_alloc((size_t)(root->hi - root->lo), sizeof(*batch), "joins to pass on");
	size_t count = 0;
	if (!batch) {
		tp_root_failf(root, ncclSystemError, "the root has no memory for %d joins", root->hi - root->lo);
		return;
	}
	for (int r = root->lo; r < root->hi; r++) {
		struct tp_member *m = &root->members[r];
		if (!m->joined || m->passed_on) continue;
		m->passed_on = true;
		batch[count++] = m->join;
	}
	if (count) tp_conn_send(root->parent, TP_FRAME_GROUP, batch, count * sizeof(*batch));
	free(batch);
}

static void parent_open(struct tp_conn *conn)
{
	conn->limit = TP_WIRE_FRAME_MAX;
	pass_on_joins(conn->owner);
}

static const char *parent_table(struct tp_root *root, const void *data, size_t bytes)
{
	struct tp_wire_seat seat;
	if (root->message || bytes < sizeof(seat)) return "sent a table that was not asked for";
	const char *wrong = tp_wire_table_check((const char *)data + sizeof(seat), bytes - sizeof(seat), root->nranks);
	if (wrong) return wrong;
	root->message = malloc(bytes);
	if (!root->message) return "sent a table there is no memory for";
	memcpy(root->message, data, bytes);
	memcpy(&root->seat, data, sizeof(root->seat));
	root->table_bytes = bytes - sizeof(seat);
	tp_root_seat_leaders(root);
	return NULL;
}

static const char *parent_frame(struct tp_conn *conn, enum tp_wire_type type, const void *data, size_t bytes)
{
	struct tp_root *root = conn->owner;
	struct tp_wire_fail told;
	uint32_t host;
	if (type == TP_FRAME_TABLE) return parent_table(root, data, bytes);
	if (type == TP_FRAME_READY && bytes == sizeof(host)) {
		memcpy(&host, data, sizeof(host));
		tp_root_host_is_ready(root, (int)host);
	} else if (type == TP_FRAME_GO) {
		tp_root_let_go(root);
	} else if (type == TP_FRAME_FAIL && tp_wire_fail_read(&told, data, bytes)) {
		root->parent = NULL;
		tp_conn_close(conn);
		tp_root_fail(root, (ncclResult_t)told.result, told.text);
	} else {
		return "sent a frame that is none of the first root's";
	}
	return NULL;
}

static void parent_closed(struct tp_conn *conn, enum tp_conn_end how, const char *why)
{
	struct tp_root *root = conn->owner;
	char text[TP_ADDR_TEXT];
	root->parent = NULL;
	if (root->over) return;
	if (!root->message && (how == TP_END_SILENT || (how == TP_END_BROKEN && conn->sent == 0))) {
		root->retry_ms = tp_clock_ms() + 100;
		tp_service_poke(root->retry_ms);
		return;
	}
	tp_root_failf(root, ncclRemoteError, "the root of the first id, at %s, %s", tp_addr_format(&root->first.root, text), why);
}

static const struct tp_conn_ops parent_ops = { .open = parent_open, .frame = parent_frame, .closed = parent_closed };

void tp_root_call_first(struct tp_root *root)
{
	if (root->parent) {
		if (root->parent->state == TP_CONN_OPEN) pass_on_joins(root);
		return;
	}
	ncclResult_t result = tp_conn_call(-1, &root->first.root, TP_WIRE_GROUP, TP_WIRE_HOLD, root->first.name, root->first.secret,
		tp_clock_ms() + TP_HANDSHAKE_MS + 5000, &parent_ops, root, &root->parent);
	if (result != ncclSuccess) tp_root_fail(root, result, tp_log_last_error());
}

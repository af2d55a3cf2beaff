/* The root of an id: collects the ranks' joins, and where one fails tells all of them, as the error of their init. Nothing is
 * complete for one rank before it is for all. What happens when all have joined: root_seats.c; with several ids: root_groups.c. */
#include "boot/root.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ROOTS_KEPT 64               /* that are over: late-comers learn why */
#define PROGRESS_MS 10000
#define LINGER_MS 3000

struct tp_root *tp_root_find(uint64_t name, const uint8_t **secret)
{
	for (struct tp_root *root = tp_service.roots; root; root = root->next)
		if (root->id.name == name) {
			if (secret) *secret = root->id.secret;
			return root;
		}
	return NULL;
}

static void free_state(struct tp_root *root)
{
	free(root->members);
	free(root->groups);
	free(root->message);
	free(root->host_of);
	free(root->host_first);
	free(root->host_ranks);
	free(root->host_ready);
	root->members = NULL;
	root->groups = NULL;
	root->message = NULL;
	root->host_of = root->host_first = root->host_ranks = NULL;
	root->host_ready = NULL;
}

void tp_root_free_all(void)
{
	while (tp_service.roots) {
		struct tp_root *root = tp_service.roots;
		tp_service.roots = root->next;
		free_state(root);
		free(root);
	}
}

void tp_root_trim(void)
{
	int kept = 0;
	for (struct tp_root **at = &tp_service.roots; *at;) {
		struct tp_root *root = *at;
		if (root->over && !root->linger_ms && ++kept > ROOTS_KEPT) {
			*at = root->next;
			tp_conn_close_all_of(root);     /* those that never joined */
			free(root);
		} else {
			at = &root->next;
		}
	}
}

/* Connections are closed once their last words are out; the id stays known, so that who comes late is told. An id from
 * NCCL_COMM_ID is free for the next communicator. */
void tp_root_finish(struct tp_root *root)
{
	root->over = true;
	for (int r = root->lo; root->members && r < root->hi; r++) {
		struct tp_member *m = &root->members[r];
		if (m->conn) tp_conn_close_flushed(m->conn);
		if (m->joiner) m->joiner->root = NULL;
	}
	for (int g = 1; root->groups && g < root->nids; g++)
		if (root->groups[g]) tp_conn_close_flushed(root->groups[g]);
	if (root->parent) tp_conn_close_flushed(root->parent);
	root->parent = NULL;
	free_state(root);
	tp_service_unlisten(root->listener);
	root->listener = NULL;
	if (root->id.flags & TP_ID_ENV) root->id.name = 0;
	if (root->linger_ms) tp_service_poke(root->linger_ms);
	else tp_service_unuse();
}

void tp_root_fail(struct tp_root *root, ncclResult_t result, const char *text)
{
	if (root->over) return;
	root->result = result;
	snprintf(root->text, sizeof(root->text), "%s", text);
	/* Who comes late shall learn the reason, even if nobody else keeps the service thread busy. */
	if (!root->message) root->linger_ms = tp_clock_ms() + LINGER_MS;
	for (int r = root->lo; root->members && r < root->hi; r++) {
		struct tp_member *m = &root->members[r];
		if (m->conn) tp_conn_send_fail(m->conn, result, root->text);
		if (m->joiner) tp_join_fail(m->joiner, result, root->text);
	}
	for (int g = 1; root->groups && g < root->nids; g++)
		if (root->groups[g]) tp_conn_send_fail(root->groups[g], result, root->text);
	if (root->parent) tp_conn_send_fail(root->parent, result, root->text);
	tp_root_finish(root);
}

void tp_root_failf(struct tp_root *root, ncclResult_t result, const char *format, ...)
{
	char text[TP_WIRE_TEXT];
	va_list args;
	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	tp_root_fail(root, result, text);
}

ncclResult_t tp_root_serve(const struct tp_id *id, struct tp_root **out)
{
	struct tp_root *root = tp_root_find(id->name, NULL);
	if (root) {
		*out = root;
		return ncclSuccess;
	}
	root = tp_alloc(1, sizeof(*root), "root of a communicator");
	if (!root) return ncclSystemError;
	root->id = *id;
	ncclResult_t result = tp_service_use();
	if (result == ncclSuccess && (id->flags & TP_ID_ENV)) {
		int fd;
		result = tp_socket_listen(&root->id.root, 4096, &fd);
		if (result == ncclSuccess) result = tp_service_listen(fd, false, &root->listener);
		if (result != ncclSuccess) tp_service_unuse();
	}
	if (result != ncclSuccess) {
		free(root);
		return result;
	}
	root->next = tp_service.roots;
	tp_service.roots = root;
	tp_conn_wake_held(id->name);
	*out = root;
	return ncclSuccess;
}

static const char *who(const struct tp_wire_join *join, char text[128])
{
	snprintf(text, 128, "rank %d (host %s, pid %d)", join->rank, join->host_name, join->pid);
	return text;
}

bool tp_root_size_up(struct tp_root *root, const struct tp_wire_join *join)
{
	root->nranks = join->nranks;
	root->nids = join->nids;
	root->group = join->group;
	root->lo = (int)tp_div_up((size_t)root->group * (size_t)root->nranks, (size_t)root->nids);
	root->hi = (int)tp_div_up((size_t)(root->group + 1) * (size_t)root->nranks, (size_t)root->nids);
	root->started_ms = tp_clock_ms();
	root->deadline_ms = UINT64_MAX;         /* each join brings its own */
	root->progress_ms = root->started_ms + PROGRESS_MS;
	root->members = tp_alloc((size_t)root->nranks, sizeof(*root->members), "ranks of a communicator");
	root->groups = tp_alloc((size_t)root->nids, sizeof(*root->groups), "roots of a communicator");
	if (!root->members || !root->groups) {
		free_state(root);
		tp_root_failf(root, ncclSystemError, "the root has no memory for %d ranks", root->nranks);
		return false;
	}
	tp_service_poke(root->progress_ms);
	return true;
}

static const struct tp_wire_join *any_join(const struct tp_root *root)
{
	for (int r = 0; r < root->nranks; r++)
		if (root->members[r].joined) return &root->members[r].join;
	return NULL;
}

static bool is_equal_in_version(struct tp_root *root, const struct tp_wire_join *join)
{
	char a[128];
	if (join->protocol == TP_WIRE_PROTOCOL && join->library == TP_WIRE_LIBRARY) return true;
	tp_root_failf(root, ncclInvalidUsage, "Mismatched Telpher version detected: rank %d runs %u.%u.%u (bootstrap protocol %u), the root (host %s, pid %d) "
		"%u.%u.%u (protocol %u); all ranks must load the same libnccl.so.2%s", join->rank, join->library / 10000, join->library / 100 % 100,
		join->library % 100, join->protocol, tp_host_name(), (int)getpid(), TP_WIRE_LIBRARY / 10000, TP_WIRE_LIBRARY / 100 % 100,
		TP_WIRE_LIBRARY % 100, TP_WIRE_PROTOCOL, join->protocol == TP_WIRE_PROTOCOL ? who(join, a) : "");
	return false;
}

bool tp_root_add_join(struct tp_root *root, const struct tp_wire_join *join, bool by_network)
{
	char a[128], b[128];
	if (!is_equal_in_version(root, join)) return false;
	if (!root->members && !tp_root_size_up(root, join)) return false;
	if (by_network && !root->has_room) {
		root->has_room = true;
		if (tp_service_need_fds(root->hi - root->lo) != ncclSuccess) {
			tp_root_fail(root, ncclSystemError, tp_log_last_error());
			return false;
		}
	}
	const struct tp_wire_join *other = any_join(root);
	struct tp_member *m = join->rank < root->nranks ? &root->members[join->rank] : NULL;
	if (join->nranks != root->nranks || join->nids != root->nids) {
		tp_root_failf(root, ncclInvalidArgument, "%s was started with %d ranks and %d ids, %s with %d and %d", who(join, a), join->nranks, join->nids,
			other ? who(other, b) : "another", root->nranks, root->nids);
		return false;
	}
	if (m->joined) {
		tp_root_failf(root, ncclInvalidArgument, "rank %d is there twice: on host %s (pid %d) and on host %s (pid %d)", join->rank, m->join.host_name,
			m->join.pid, join->host_name, join->pid);
		return false;
	}
	m->join = *join;
	m->joined = true;
	root->joined++;
	/* The first root knows better who is missing: it speaks first. */
	uint64_t deadline_ms = root->started_ms + (uint64_t)join->timeout_ms + (root->group > 0 ? 1000 : 0);
	root->deadline_ms = TP_MIN(root->deadline_ms, deadline_ms);
	tp_service_poke(root->deadline_ms);
	return true;
}

/* ---- ranks of this process */

void tp_root_join_here(struct tp_root *root, struct tp_joiner *joiner)
{
	if (root->over) {
		tp_join_fail(joiner, root->result, root->text);
		return;
	}
	struct tp_wire_join join = joiner->join;
	if (join.group > 0 && !root->members) root->first = joiner->first;
	memset(join.first_secret, 0, sizeof(join.first_secret));
	joiner->root = root;
	if (!tp_root_add_join(root, &join, false)) {
		joiner->root = NULL;
		if (joiner->result == ncclSuccess) tp_join_fail(joiner, root->result, root->text);
		return;
	}
	root->members[joiner->join.rank].joiner = joiner;
	if (root->group > 0) tp_root_call_first(root);
	else if (root->joined == root->nranks) tp_root_all_joined(root);
}

void tp_root_ready_here(struct tp_root *root, struct tp_joiner *joiner) { tp_root_leader_is_ready(root, joiner->join.rank); }
void tp_root_done_here(struct tp_root *root, struct tp_joiner *joiner) { tp_root_rank_is_done(root, joiner->join.rank); }

void tp_root_leave_here(struct tp_root *root, struct tp_joiner *joiner, const char *why)
{
	char text[128];
	if (root->over || !root->members) return;
	root->members[joiner->join.rank].joiner = NULL;
	tp_root_failf(root, joiner->result == ncclSuccess ? ncclRemoteError : joiner->result, "%s gave up: %s", who(&joiner->join, text), why);
}

/* ---- ranks that call */

static const char *member_join(struct tp_root *root, struct tp_conn *conn, const void *data, size_t bytes)
{
	struct tp_wire_join join = {0};
	if (conn->tag >= 0) return "joined twice on one connection";
	memcpy(&join, data, TP_MIN(bytes, sizeof(join)));
	if (bytes < 16) return "sent a join that is too short";
	const char *wrong = join.protocol == TP_WIRE_PROTOCOL ? tp_wire_join_check(&join, bytes) : NULL;
	if (wrong) return wrong;
	if (root->over) {
		tp_conn_send_fail(conn, root->result, root->text);
		tp_conn_close_flushed(conn);
		return NULL;
	}
	if (join.group > 0) {
		tp_wire_mask(conn->keys[0], join.first_secret);
		if (!root->members) {
			tp_wire_addr_get(&join.first, &root->first.root);
			memcpy(root->first.secret, join.first_secret, sizeof(join.first_secret));
			root->first.name = tp_id_name(root->first.secret);
		}
		memset(join.first_secret, 0, sizeof(join.first_secret));
	}
	if (!tp_root_add_join(root, &join, true)) {
		tp_conn_send_fail(conn, root->result, root->text);
		tp_conn_close_flushed(conn);
		return NULL;
	}
	conn->tag = join.rank;
	root->members[join.rank].conn = conn;
	if (root->group > 0) tp_root_call_first(root);
	else if (root->joined == root->nranks) tp_root_all_joined(root);
	return NULL;
}

static const char *member_frame(struct tp_conn *conn, enum tp_wire_type type, const void *data, size_t bytes)
{
	struct tp_root *root = conn->owner;
	struct tp_wire_fail told;
	if (type == TP_FRAME_JOIN) return member_join(root, conn, data, bytes);
	if (conn->tag < 0) return "spoke before it joined";
	if (type == TP_FRAME_READY) tp_root_leader_is_ready(root, conn->tag);
	else if (type == TP_FRAME_DONE) tp_root_rank_is_done(root, conn->tag);
	else if (type == TP_FRAME_FAIL && tp_wire_fail_read(&told, data, bytes)) {
		tp_root_failf(root, (ncclResult_t)told.result, "rank %d: %.900s", conn->tag, told.text);
	} else {
		return "sent a frame that is none of a rank's";
	}
	return NULL;
}

static void member_closed(struct tp_conn *conn, enum tp_conn_end how, const char *why)
{
	struct tp_root *root = conn->owner;
	char text[128];
	(void)how;
	if (conn->tag < 0 || root->over || !root->members) return;
	root->members[conn->tag].conn = NULL;
	tp_root_failf(root, ncclRemoteError, "%s %s before all ranks were there: it died or gave up", who(&root->members[conn->tag].join, text), why);
}

static const struct tp_conn_ops member_ops = { .frame = member_frame, .closed = member_closed };

void tp_root_adopt(struct tp_root *root, struct tp_conn *conn)
{
	conn->owner = root;
	conn->tag = -1;
	conn->ops = conn->hello.kind == TP_WIRE_GROUP ? &tp_root_group_ops : &member_ops;
	if (conn->hello.kind == TP_WIRE_GROUP) conn->limit = TP_WIRE_FRAME_MAX;
}

/* ---- time */

/* "3, 5-7": the ranks whose `wanted` isn't there. */
static void list_missing(const struct tp_root *root, bool joined, char *text, size_t room)
{
	int lo = root->group == 0 && joined ? 0 : root->lo, hi = root->group == 0 && joined ? root->nranks : root->hi;
	size_t at = 0;
	text[0] = 0;
	for (int r = lo; r < hi; r++) {
		int last = r;
		if (joined ? root->members[r].joined : root->members[r].done) continue;
		while (last + 1 < hi && !(joined ? root->members[last + 1].joined : root->members[last + 1].done)) last++;
		int n = snprintf(text + at, room - at, last > r ? "%s%d-%d" : "%s%d", at ? ", " : "", r, last);
		if (n < 0 || at + (size_t)n >= room) {
			snprintf(text + room - 4, 4, "...");
			return;
		}
		at += (size_t)n;
		r = last;
	}
}

static void tick(struct tp_root *root, uint64_t now_ms)
{
	char missing[400];
	bool joining = !root->message;
	if (root->group > 0 && !root->parent && root->retry_ms && root->retry_ms <= now_ms) {
		root->retry_ms = 0;
		tp_root_call_first(root);
		if (root->over) return;
	}
	uint64_t waited = now_ms - root->started_ms;
	list_missing(root, joining, missing, sizeof(missing));
	if (root->deadline_ms <= now_ms) {
		tp_root_failf(root, ncclRemoteError, "time is over after %.1f s (TELPHER_INIT_TIMEOUT): of %d ranks %s %s", (double)waited / 1000, root->nranks,
			joining ? "these never came: ranks" : "these did not attach to their host's segment: ranks", missing[0] ? missing : "of other roots");
		return;
	}
	if (root->progress_ms <= now_ms) {
		TP_INFO(TP_INIT | TP_BOOTSTRAP, "Bootstrap: %d of %d ranks are here after %.0f s; missing: ranks %s", joining ? root->joined : root->done,
			root->nranks, (double)waited / 1000, missing);
		root->progress_ms += PROGRESS_MS;
	}
	tp_service_poke(TP_MIN(root->deadline_ms, root->progress_ms));
	if (root->retry_ms) tp_service_poke(root->retry_ms);
}

void tp_root_tick(uint64_t now_ms)
{
	struct tp_root *next;
	for (struct tp_root *root = tp_service.roots; root; root = next) {
		next = root->next;
		if (!root->over && root->members) tick(root, now_ms);
		if (root->linger_ms && root->linger_ms <= now_ms) {
			root->linger_ms = 0;
			tp_service_unuse();
		} else if (root->linger_ms) {
			tp_service_poke(root->linger_ms);
		}
	}
}

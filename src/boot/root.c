/* The root of an id: collects the ranks' joins, says who is where, and lets everybody go when all are attached. Nothing is
 * complete for one rank before it is for all, so a failure of one reaches all of them as the error of their init:
 *   JOIN …; TABLE to each host's first rank, whose READY (the host's segment exists) releases the SEATs of the host's others;
 *   DONE of each; GO to all.
 * With several ids (ncclCommInitRankScalable) each root serves a block of ranks and passes joins, READY and DONE on to the root
 * of the first id, whose answers it hands down. */
#include "boot/internal.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ROOTS_KEPT 64               /* that are over: late-comers learn why */
#define PROGRESS_MS 10000
#define LINGER_MS 3000

struct member {
	struct tp_wire_join join;
	bool joined, done;
	struct tp_conn *conn;           /* one of these two for our own ranks */
	struct tp_joiner *joiner;
};

struct tp_root {
	struct tp_id id;
	bool over, has_room;
	ncclResult_t result;
	char text[TP_WIRE_TEXT];
	struct tp_listener *listener;   /* NCCL_COMM_ID */
	int nranks, nids, group, lo, hi;
	struct member *members;         /* [nranks] */
	int joined, passed_on, done, groups_done;
	struct tp_conn **groups;        /* [nids] first root: the others */
	struct tp_conn *parent;
	struct tp_id first;
	uint64_t started_ms, deadline_ms, progress_ms, retry_ms, linger_ms;
	struct tp_wire_seat seat;
	void *message;                  /* room for a seat, then the table */
	size_t table_bytes;
	int *host_of, *host_first, *host_ranks;
	bool *host_ready;
	struct tp_root *next;
};

static void group_root_call(struct tp_root *root);

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
			free(root);
		} else {
			at = &root->next;
		}
	}
}

/* Connections are closed once their last words are out; the id stays known, so that who comes late is told. An id from
 * NCCL_COMM_ID is free for the next communicator. */
static void finish(struct tp_root *root)
{
	root->over = true;
	for (int r = root->lo; root->members && r < root->hi; r++) {
		struct member *m = &root->members[r];
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

static void tell_failure(struct tp_conn *conn, ncclResult_t result, const char *text)
{
	struct tp_wire_fail fail = { .result = (int32_t)result };
	snprintf(fail.text, sizeof(fail.text), "%s", text);
	tp_conn_send(conn, TP_FRAME_FAIL, &fail, sizeof(fail));
}

static void fail(struct tp_root *root, ncclResult_t result, const char *text)
{
	if (root->over) return;
	root->result = result;
	snprintf(root->text, sizeof(root->text), "%s", text);
	/* Who comes late shall learn the reason, even if nobody else keeps the service thread busy. */
	if (!root->message) root->linger_ms = tp_clock_ms() + LINGER_MS;
	for (int r = root->lo; root->members && r < root->hi; r++) {
		struct member *m = &root->members[r];
		if (m->conn) tell_failure(m->conn, result, root->text);
		if (m->joiner) tp_join_fail(m->joiner, result, root->text);
	}
	for (int g = 1; root->groups && g < root->nids; g++)
		if (root->groups[g]) tell_failure(root->groups[g], result, root->text);
	if (root->parent) tell_failure(root->parent, result, root->text);
	finish(root);
}

static void failf(struct tp_root *root, ncclResult_t result, const char *format, ...) __attribute__((format(printf, 3, 4)));
static void failf(struct tp_root *root, ncclResult_t result, const char *format, ...)
{
	char text[TP_WIRE_TEXT];
	va_list args;
	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	fail(root, result, text);
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

/* The first join says how large all this is. */
static bool size_up(struct tp_root *root, const struct tp_wire_join *join)
{
	root->nranks = join->nranks;
	root->nids = join->nids;
	root->group = join->group;
	root->lo = (int)tp_div_up((size_t)root->group * (size_t)root->nranks, (size_t)root->nids);
	root->hi = (int)tp_div_up((size_t)(root->group + 1) * (size_t)root->nranks, (size_t)root->nids);
	root->started_ms = tp_clock_ms();
	root->deadline_ms = root->started_ms + (uint64_t)join->timeout_ms;
	root->progress_ms = root->started_ms + PROGRESS_MS;
	root->members = tp_alloc((size_t)root->nranks, sizeof(*root->members), "ranks of a communicator");
	root->groups = tp_alloc((size_t)root->nids, sizeof(*root->groups), "roots of a communicator");
	if (!root->members || !root->groups) {
		free_state(root);
		failf(root, ncclSystemError, "the root has no memory for %d ranks", root->nranks);
		return false;
	}
	/* The first root knows better who is missing: it speaks first. */
	if (root->group > 0) root->deadline_ms += 1000;
	tp_service_poke(TP_MIN(root->deadline_ms, root->progress_ms));
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
	failf(root, ncclInvalidUsage, "Mismatched Telpher version detected: rank %d runs %u.%u.%u (bootstrap protocol %u), the root (host %s, pid %d) "
		"%u.%u.%u (protocol %u); all ranks must load the same libnccl.so.2%s", join->rank, join->library / 10000, join->library / 100 % 100,
		join->library % 100, join->protocol, tp_host_name(), (int)getpid(), TP_WIRE_LIBRARY / 10000, TP_WIRE_LIBRARY / 100 % 100,
		TP_WIRE_LIBRARY % 100, TP_WIRE_PROTOCOL, join->protocol == TP_WIRE_PROTOCOL ? who(join, a) : "");
	return false;
}

/* True: the rank is in. */
static bool add_join(struct tp_root *root, const struct tp_wire_join *join, bool by_network)
{
	char a[128], b[128];
	if (!is_equal_in_version(root, join)) return false;
	if (!root->members && !size_up(root, join)) return false;
	if (by_network && !root->has_room) {
		root->has_room = true;
		if (tp_service_need_fds(root->hi - root->lo) != ncclSuccess) {
			fail(root, ncclSystemError, tp_log_last_error());
			return false;
		}
	}
	const struct tp_wire_join *other = any_join(root);
	struct member *m = join->rank < root->nranks ? &root->members[join->rank] : NULL;
	if (join->nranks != root->nranks || join->nids != root->nids) {
		failf(root, ncclInvalidArgument, "%s was started with %d ranks and %d ids, %s with %d and %d", who(join, a), join->nranks, join->nids,
			other ? who(other, b) : "another", root->nranks, root->nids);
		return false;
	}
	if (m->joined) {
		failf(root, ncclInvalidArgument, "rank %d is there twice: on host %s (pid %d) and on host %s (pid %d)", join->rank, m->join.host_name,
			m->join.pid, join->host_name, join->pid);
		return false;
	}
	m->join = *join;
	m->joined = true;
	root->joined++;
	root->deadline_ms = TP_MIN(root->deadline_ms, root->started_ms + (uint64_t)join->timeout_ms + (root->group > 0 ? 1000 : 0));
	tp_service_poke(root->deadline_ms);
	return true;
}

/* Hosts in order of their lowest rank. */
static int number_hosts(struct tp_root *root, uint64_t *hashes)
{
	size_t room = 16;
	while (room < 2 * (size_t)root->nranks) room *= 2;
	int *slots = tp_alloc(room, sizeof(*slots), "hosts of a communicator");
	int nhosts = 0;
	if (!slots) return -1;
	for (int r = 0; r < root->nranks; r++) {
		uint64_t hash = root->members[r].join.host_hash;
		size_t at = (size_t)(hash * 0x9E3779B97F4A7C15u >> 20) & (room - 1);
		while (slots[at] && hashes[slots[at] - 1] != hash) at = (at + 1) & (room - 1);
		if (!slots[at]) {
			hashes[nhosts++] = hash;
			slots[at] = nhosts;
		}
		root->host_of[r] = slots[at] - 1;
	}
	free(slots);
	return nhosts;
}

static bool make_table(struct tp_root *root)
{
	size_t n = (size_t)root->nranks;
	uint64_t *hashes = tp_alloc(n, sizeof(*hashes), "hosts of a communicator");
	root->host_of = tp_alloc(n, sizeof(int), "hosts of a communicator");
	int nhosts = hashes && root->host_of ? number_hosts(root, hashes) : -1;
	if (nhosts > 0) {
		root->table_bytes = tp_wire_table_bytes(nhosts, root->nranks);
		root->message = tp_alloc(1, sizeof(struct tp_wire_seat) + root->table_bytes, "table of a communicator");
	}
	if (nhosts <= 0 || !root->message) {
		free(hashes);
		return false;
	}
	struct tp_wire_table *head = (void *)((char *)root->message + sizeof(struct tp_wire_seat));
	struct tp_wire_host *hosts = (void *)(head + 1);
	struct tp_wire_peer *peers = (void *)(hosts + nhosts);
	*head = (struct tp_wire_table){ nhosts, root->nranks };
	for (int r = root->nranks - 1; r >= 0; r--) {
		const struct tp_wire_join *join = &root->members[r].join;
		int h = root->host_of[r];
		hosts[h].hash = join->host_hash;
		memcpy(hosts[h].name, join->host_name, sizeof(hosts[h].name));
		peers[r] = (struct tp_wire_peer){ h, join->pid, join->device, join->process_hash, join->service };
	}
	tp_secret_random(root->seat.session, sizeof(root->seat.session));
	root->seat.nhosts = nhosts;
	free(hashes);
	return true;
}

/* From the table, ours or the first root's: ranks by host. */
static bool index_hosts(struct tp_root *root)
{
	const struct tp_wire_table *head = (const void *)((const char *)root->message + sizeof(struct tp_wire_seat));
	const struct tp_wire_peer *peers = (const void *)((const char *)(head + 1) + (size_t)head->nhosts * sizeof(struct tp_wire_host));
	int nhosts = head->nhosts;
	root->seat.nhosts = nhosts;
	root->host_first = tp_alloc((size_t)nhosts + 2, sizeof(int), "hosts of a communicator");
	root->host_ranks = tp_alloc((size_t)root->nranks, sizeof(int), "hosts of a communicator");
	root->host_ready = tp_alloc((size_t)nhosts, sizeof(bool), "hosts of a communicator");
	if (!root->host_of) root->host_of = tp_alloc((size_t)root->nranks, sizeof(int), "hosts of a communicator");
	if (!root->host_first || !root->host_ranks || !root->host_ready || !root->host_of) return false;
	for (int r = 0; r < root->nranks; r++) {
		root->host_of[r] = peers[r].host;
		root->host_first[peers[r].host + 2]++;
	}
	for (int h = 0; h < nhosts; h++) root->host_first[h + 2] += root->host_first[h + 1];
	for (int r = 0; r < root->nranks; r++) root->host_ranks[root->host_first[root->host_of[r] + 1]++] = r;
	return true;
}

static const struct tp_wire_peer *table_peer(const struct tp_root *root, int rank)
{
	const struct tp_wire_table *head = (const void *)((const char *)root->message + sizeof(struct tp_wire_seat));
	return (const struct tp_wire_peer *)(const void *)((const char *)(head + 1) + (size_t)head->nhosts * sizeof(struct tp_wire_host)) + rank;
}

static void seat_rank(struct tp_root *root, int rank)
{
	struct member *m = &root->members[rank];
	int host = root->host_of[rank], leader = root->host_ranks[root->host_first[host]];
	struct tp_wire_seat *seat = root->message;
	*seat = root->seat;
	seat->host = host;
	seat->leader_rank = leader;
	seat->leader_pid = table_peer(root, leader)->pid;
	if (m->conn) {
		if (rank == leader) tp_conn_send(m->conn, TP_FRAME_TABLE, root->message, sizeof(*seat) + root->table_bytes);
		else tp_conn_send(m->conn, TP_FRAME_SEAT, seat, sizeof(*seat));
	} else if (m->joiner) {
		struct tp_joiner *j = m->joiner;
		if (rank == leader && (j->table = malloc(root->table_bytes)) != NULL) {
			memcpy(j->table, (char *)root->message + sizeof(*seat), root->table_bytes);
			j->table_bytes = root->table_bytes;
		}
		j->seat = *seat;
		j->seated = true;
		pthread_cond_signal(&j->cond);
	}
}

static void seat_leaders(struct tp_root *root)
{
	if (!index_hosts(root)) {
		failf(root, ncclSystemError, "the root has no memory for %d ranks", root->nranks);
		return;
	}
	for (int h = 0; h < root->seat.nhosts; h++) {
		int leader = root->host_ranks[root->host_first[h]];
		if (leader >= root->lo && leader < root->hi) seat_rank(root, leader);
	}
}

static void all_joined(struct tp_root *root)
{
	if (!make_table(root)) {
		failf(root, ncclSystemError, "the root has no memory for %d ranks", root->nranks);
		return;
	}
	struct tp_wire_seat *seat = root->message;
	*seat = root->seat;
	for (int g = 1; g < root->nids; g++)
		tp_conn_send(root->groups[g], TP_FRAME_TABLE, root->message, sizeof(*seat) + root->table_bytes);
	seat_leaders(root);
}

static void host_is_ready(struct tp_root *root, int host)
{
	if (root->over || !root->message || host < 0 || host >= root->seat.nhosts || root->host_ready[host]) return;
	root->host_ready[host] = true;
	uint32_t number = (uint32_t)host;
	for (int g = 1; g < root->nids && root->group == 0; g++) tp_conn_send(root->groups[g], TP_FRAME_READY, &number, sizeof(number));
	for (int i = root->host_first[host] + 1; i < root->host_first[host + 1]; i++) {
		int rank = root->host_ranks[i];
		if (rank >= root->lo && rank < root->hi) seat_rank(root, rank);
	}
}

static void leader_is_ready(struct tp_root *root, int rank)
{
	if (root->over || !root->message) return;
	uint32_t host = (uint32_t)root->host_of[rank];
	if (root->host_ranks[root->host_first[host]] != rank) return;
	if (root->group > 0 && root->parent) tp_conn_send(root->parent, TP_FRAME_READY, &host, sizeof(host));
	else host_is_ready(root, (int)host);
}

static void let_go(struct tp_root *root)
{
	for (int r = root->lo; r < root->hi; r++) {
		struct member *m = &root->members[r];
		if (m->conn) tp_conn_send(m->conn, TP_FRAME_GO, NULL, 0);
		if (m->joiner) {
			m->joiner->go = true;
			pthread_cond_signal(&m->joiner->cond);
		}
	}
	for (int g = 1; g < root->nids && root->group == 0; g++) tp_conn_send(root->groups[g], TP_FRAME_GO, NULL, 0);
	snprintf(root->text, sizeof(root->text), "this communicator's %d ranks are complete already; an id is good for one communicator", root->nranks);
	root->result = ncclInvalidUsage;
	TP_INFO(TP_INIT | TP_BOOTSTRAP, "Bootstrap: root of %d ranks on %d hosts done after %.3f s", root->nranks, root->seat.nhosts,
		(double)(tp_clock_ms() - root->started_ms) / 1000);
	finish(root);
}

static void check_done(struct tp_root *root)
{
	if (root->over || root->done < root->hi - root->lo) return;
	if (root->group > 0 && root->parent) tp_conn_send(root->parent, TP_FRAME_DONE, NULL, 0);
	else if (root->group == 0 && root->groups_done == root->nids - 1) let_go(root);
}

static void rank_is_done(struct tp_root *root, int rank)
{
	if (root->over || !root->message || root->members[rank].done) return;
	root->members[rank].done = true;
	root->done++;
	check_done(root);
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
	if (!add_join(root, &join, false)) {
		joiner->root = NULL;
		if (joiner->result == ncclSuccess) tp_join_fail(joiner, root->result, root->text);
		return;
	}
	root->members[joiner->join.rank].joiner = joiner;
	if (root->group > 0) group_root_call(root);
	else if (root->joined == root->nranks) all_joined(root);
}

void tp_root_ready_here(struct tp_root *root, struct tp_joiner *joiner) { leader_is_ready(root, joiner->join.rank); }
void tp_root_done_here(struct tp_root *root, struct tp_joiner *joiner) { rank_is_done(root, joiner->join.rank); }

void tp_root_leave_here(struct tp_root *root, struct tp_joiner *joiner, const char *why)
{
	char text[128];
	if (root->over || !root->members) return;
	root->members[joiner->join.rank].joiner = NULL;
	failf(root, joiner->result == ncclSuccess ? ncclRemoteError : joiner->result, "%s gave up: %s", who(&joiner->join, text), why);
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
		tell_failure(conn, root->result, root->text);
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
	if (!add_join(root, &join, true)) {
		tell_failure(conn, root->result, root->text);
		tp_conn_close_flushed(conn);
		return NULL;
	}
	conn->tag = join.rank;
	root->members[join.rank].conn = conn;
	if (root->group > 0) group_root_call(root);
	else if (root->joined == root->nranks) all_joined(root);
	return NULL;
}

static const char *member_frame(struct tp_conn *conn, enum tp_wire_type type, const void *data, size_t bytes)
{
	struct tp_root *root = conn->owner;
	struct tp_wire_fail told;
	if (type == TP_FRAME_JOIN) return member_join(root, conn, data, bytes);
	if (conn->tag < 0) return "spoke before it joined";
	if (type == TP_FRAME_READY) leader_is_ready(root, conn->tag);
	else if (type == TP_FRAME_DONE) rank_is_done(root, conn->tag);
	else if (type == TP_FRAME_FAIL && bytes == sizeof(told)) {
		memcpy(&told, data, sizeof(told));
		told.text[sizeof(told.text) - 1] = 0;
		failf(root, (ncclResult_t)told.result, "rank %d: %.900s", conn->tag, told.text);
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
	failf(root, ncclRemoteError, "%s %s before all ranks were there: it died or gave up", who(&root->members[conn->tag].join, text), why);
}

static const struct tp_conn_ops member_ops = { .frame = member_frame, .closed = member_closed };

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
		if (!root->members && (join.nids < 2 || !size_up(root, &join))) return "passed on a join that is of no use";
		if (group >= root->nids || (root->groups[group] && root->groups[group] != conn)) return "is not the only root of its ranks";
		conn->tag = group;
		root->groups[group] = conn;
		if (!add_join(root, &join, true)) return NULL;
	}
	if (!root->over && root->joined == root->nranks) all_joined(root);
	return NULL;
}

static const char *group_frame(struct tp_conn *conn, enum tp_wire_type type, const void *data, size_t bytes)
{
	struct tp_root *root = conn->owner;
	struct tp_wire_fail told;
	uint32_t host;
	if (type == TP_FRAME_GROUP) {
		if (root->over) {
			tell_failure(conn, root->result, root->text);
			tp_conn_close_flushed(conn);
			return NULL;
		}
		return group_joins(root, conn, data, bytes);
	}
	if (conn->tag < 0 || root->over) return "spoke before it passed on a join";
	if (type == TP_FRAME_READY && bytes == sizeof(host)) {
		memcpy(&host, data, sizeof(host));
		host_is_ready(root, (int)host);
	} else if (type == TP_FRAME_DONE) {
		root->groups_done++;
		check_done(root);
	} else if (type == TP_FRAME_FAIL && bytes == sizeof(told)) {
		memcpy(&told, data, sizeof(told));
		told.text[sizeof(told.text) - 1] = 0;
		root->groups[conn->tag] = NULL;
		tp_conn_close_flushed(conn);
		fail(root, (ncclResult_t)told.result, told.text);
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
	failf(root, ncclRemoteError, "the root of id %d of %d (%s) %s before all ranks were there: it died or gave up", conn->tag, root->nids,
		tp_conn_peer(conn, text), why);
}

static const struct tp_conn_ops group_ops = { .frame = group_frame, .closed = group_closed };

void tp_root_adopt(struct tp_root *root, struct tp_conn *conn)
{
	conn->owner = root;
	conn->tag = -1;
	conn->ops = conn->hello.kind == TP_WIRE_GROUP ? &group_ops : &member_ops;
	if (conn->hello.kind == TP_WIRE_GROUP) conn->limit = TP_WIRE_FRAME_MAX;
}

/* ---- this root is not the first one */

static void pass_on_joins(struct tp_root *root)
{
	struct tp_wire_join *batch = tp_alloc((size_t)(root->hi - root->lo), sizeof(*batch), "joins to pass on");
	size_t count = 0;
	if (!batch) return;
	for (int r = root->lo; r < root->hi; r++) {
		/* `done` isn't used yet: it marks what has been passed on until the table comes. */
		struct member *m = &root->members[r];
		if (!m->joined || m->done) continue;
		m->done = true;
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
	for (int r = root->lo; r < root->hi; r++) root->members[r].done = false;
	seat_leaders(root);
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
		host_is_ready(root, (int)host);
	} else if (type == TP_FRAME_GO) {
		let_go(root);
	} else if (type == TP_FRAME_FAIL && bytes == sizeof(told)) {
		memcpy(&told, data, sizeof(told));
		told.text[sizeof(told.text) - 1] = 0;
		root->parent = NULL;
		tp_conn_close(conn);
		fail(root, (ncclResult_t)told.result, told.text);
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
	failf(root, ncclRemoteError, "the root of the first id, at %s, %s", tp_addr_format(&root->first.root, text), why);
}

static const struct tp_conn_ops parent_ops = { .open = parent_open, .frame = parent_frame, .closed = parent_closed };

static void group_root_call(struct tp_root *root)
{
	if (root->parent) {
		if (root->parent->state == TP_CONN_OPEN) pass_on_joins(root);
		return;
	}
	ncclResult_t result = tp_conn_call(-1, &root->first.root, TP_WIRE_GROUP, TP_WIRE_HOLD, root->first.name, root->first.secret,
		tp_clock_ms() + TP_HANDSHAKE_MS + 5000, &parent_ops, root, &root->parent);
	if (result != ncclSuccess) fail(root, result, tp_log_last_error());
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
		group_root_call(root);
		if (root->over) return;
	}
	uint64_t waited = now_ms - root->started_ms;
	list_missing(root, joining, missing, sizeof(missing));
	if (root->deadline_ms <= now_ms) {
		failf(root, ncclRemoteError, "time is over after %.1f s (TELPHER_INIT_TIMEOUT): of %d ranks %s %s", (double)waited / 1000, root->nranks,
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

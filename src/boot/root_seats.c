/* A root whose ranks have all joined says who is where, and lets everybody go when all are attached:
 *   TABLE to each host's first rank, whose READY (the host's segment exists) releases the SEATs of the host's others;
 *   DONE of each; GO to all. */
#include "boot/root.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* To the roots of the other ids, if this is the first one. */
static void send_to_groups(struct tp_root *root, enum tp_wire_type type, const void *data, size_t bytes)
{
	for (int g = 1; g < root->nids && root->group == 0; g++) tp_conn_send(root->groups[g], type, data, bytes);
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

static const void *table_of(const struct tp_root *root) { return (const char *)root->message + sizeof(struct tp_wire_seat); }

/* From the table, ours or the first root's: ranks by host. */
static bool index_hosts(struct tp_root *root)
{
	const struct tp_wire_table *head = table_of(root);
	const struct tp_wire_peer *peers = tp_wire_table_peers(head);
	root->seat.nhosts = head->nhosts;
	root->host_first = tp_alloc((size_t)head->nhosts + 1, sizeof(int), "hosts of a communicator");
	root->host_ranks = tp_alloc((size_t)root->nranks, sizeof(int), "hosts of a communicator");
	root->host_ready = tp_alloc((size_t)head->nhosts, sizeof(bool), "hosts of a communicator");
	if (!root->host_of) root->host_of = tp_alloc((size_t)root->nranks, sizeof(int), "hosts of a communicator");
	if (!root->host_first || !root->host_ranks || !root->host_ready || !root->host_of) return false;
	for (int r = 0; r < root->nranks; r++) root->host_of[r] = peers[r].host;
	tp_wire_table_index(head, root->host_first, root->host_ranks);
	return true;
}

static void seat_rank(struct tp_root *root, int rank)
{
	struct tp_member *m = &root->members[rank];
	int host = root->host_of[rank], leader = root->host_ranks[root->host_first[host]];
	struct tp_wire_seat *seat = root->message;
	*seat = root->seat;
	seat->host = host;
	seat->leader_rank = leader;
	seat->leader_pid = tp_wire_table_peers(table_of(root))[leader].pid;
	if (m->conn) {
		if (rank == leader) tp_conn_send(m->conn, TP_FRAME_TABLE, root->message, sizeof(*seat) + root->table_bytes);
		else tp_conn_send(m->conn, TP_FRAME_SEAT, seat, sizeof(*seat));
	} else if (m->joiner) {
		struct tp_joiner *j = m->joiner;
		if (rank == leader) {
			j->table = malloc(root->table_bytes);
			if (!j->table) {
				tp_join_fail(j, ncclSystemError, "no memory for the table of the communicator's ranks");
				return;         /* it gives up, and the root with it */
			}
			memcpy(j->table, table_of(root), root->table_bytes);
		}
		j->seat = *seat;
		j->seated = true;
		pthread_cond_signal(&j->cond);
	}
}

void tp_root_seat_leaders(struct tp_root *root)
{
	if (!index_hosts(root)) {
		tp_root_failf(root, ncclSystemError, "the root has no memory for %d ranks", root->nranks);
		return;
	}
	for (int h = 0; h < root->seat.nhosts; h++) {
		int leader = root->host_ranks[root->host_first[h]];
		if (leader >= root->lo && leader < root->hi) seat_rank(root, leader);
	}
}

void tp_root_all_joined(struct tp_root *root)
{
	if (!make_table(root)) {
		tp_root_failf(root, ncclSystemError, "the root has no memory for %d ranks", root->nranks);
		return;
	}
	struct tp_wire_seat *seat = root->message;
	*seat = root->seat;
	send_to_groups(root, TP_FRAME_TABLE, root->message, sizeof(*seat) + root->table_bytes);
	tp_root_seat_leaders(root);
}

void tp_root_host_is_ready(struct tp_root *root, int host)
{
	if (root->over || !root->message || host < 0 || host >= root->seat.nhosts || root->host_ready[host]) return;
	root->host_ready[host] = true;
	uint32_t number = (uint32_t)host;
	send_to_groups(root, TP_FRAME_READY, &number, sizeof(number));
	for (int i = root->host_first[host] + 1; i < root->host_first[host + 1]; i++) {
		int rank = root->host_ranks[i];
		if (rank >= root->lo && rank < root->hi) seat_rank(root, rank);
	}
}

void tp_root_leader_is_ready(struct tp_root *root, int rank)
{
	if (root->over || !root->message) return;
	uint32_t host = (uint32_t)root->host_of[rank];
	if (root->host_ranks[root->host_first[host]] != rank) return;
	if (root->group > 0 && root->parent) tp_conn_send(root->parent, TP_FRAME_READY, &host, sizeof(host));
	else tp_root_host_is_ready(root, (int)host);
}

void tp_root_let_go(struct tp_root *root)
{
	for (int r = root->lo; r < root->hi; r++) {
		struct tp_member *m = &root->members[r];
		if (m->conn) tp_conn_send(m->conn, TP_FRAME_GO, NULL, 0);
		if (m->joiner) {
			m->joiner->go = true;
			pthread_cond_signal(&m->joiner->cond);
		}
	}
	send_to_groups(root, TP_FRAME_GO, NULL, 0);
	snprintf(root->text, sizeof(root->text), "this communicator's %d ranks are complete already; an id is good for one communicator", root->nranks);
	root->result = ncclInvalidUsage;
	TP_INFO(TP_INIT | TP_BOOTSTRAP, "Bootstrap: root of %d ranks on %d hosts done after %.3f s", root->nranks, root->seat.nhosts,
		(double)(tp_clock_ms() - root->started_ms) / 1000);
	tp_root_finish(root);
}

void tp_root_check_done(struct tp_root *root)
{
	if (root->over || root->done < root->hi - root->lo) return;
	if (root->group > 0 && root->parent) tp_conn_send(root->parent, TP_FRAME_DONE, NULL, 0);
	else if (root->group == 0 && root->groups_done == root->nids - 1) tp_root_let_go(root);
}

void tp_root_rank_is_done(struct tp_root *root, int rank)
{
	if (root->over || !root->message || root->members[rank].done) return;
	root->members[rank].done = true;
	root->done++;
	tp_root_check_done(root);
}

/* The inside of a root, shared by root.c, root_seats.c and root_groups.c. */
#ifndef TP_BOOT_ROOT_H
#define TP_BOOT_ROOT_H

#include "boot/internal.h"

struct tp_member {
	struct tp_wire_join join;
	bool joined, done;
	bool passed_on;                 /* its join, to the first root */
	struct tp_conn *conn;           /* one of these two for our own ranks */
	struct tp_joiner *joiner;
};

struct tp_root {
	struct tp_id id;
	bool over, has_room;
	ncclResult_t result;
	char text[TP_WIRE_TEXT];
	struct tp_listener *listener;   /* NCCL_COMM_ID */
	int nranks, nids, group;
	int lo, hi;                     /* our ranks: lo up to hi - 1 */
	struct tp_member *members;      /* [nranks] */
	int joined, done, groups_done;
	struct tp_conn **groups;        /* [nids] first root: the others */
	struct tp_conn *parent;         /* to the first root, whose id `first` is */
	struct tp_id first;
	uint64_t started_ms, deadline_ms, progress_ms, retry_ms, linger_ms;
	struct tp_wire_seat seat;
	void *message;                  /* room for a seat, then the table */
	size_t table_bytes;
	int *host_of;                   /* [nranks] */
	int *host_first, *host_ranks;   /* host h: host_ranks[host_first[h]] up to host_first[h + 1] */
	bool *host_ready;
	struct tp_root *next;
};

/* ---- root.c */
void tp_root_fail(struct tp_root *root, ncclResult_t result, const char *text);
void tp_root_failf(struct tp_root *root, ncclResult_t result, const char *format, ...) __attribute__((format(printf, 3, 4)));
void tp_root_finish(struct tp_root *root);
/* The first join says how large all this is. False: the root has failed. */
bool tp_root_size_up(struct tp_root *root, const struct tp_wire_join *join);
/* True: the rank is in; false: the root has failed. */
bool tp_root_add_join(struct tp_root *root, const struct tp_wire_join *join, bool by_network);

/* ---- root_seats.c */
void tp_root_all_joined(struct tp_root *root);
void tp_root_seat_leaders(struct tp_root *root);        /* once the table is there */
void tp_root_leader_is_ready(struct tp_root *root, int rank);
void tp_root_host_is_ready(struct tp_root *root, int host);
void tp_root_rank_is_done(struct tp_root *root, int rank);
void tp_root_check_done(struct tp_root *root);
void tp_root_let_go(struct tp_root *root);

/* ---- root_groups.c */
extern const struct tp_conn_ops tp_root_group_ops;      /* of the other roots' connections to the first one */
void tp_root_call_first(struct tp_root *root);          /* hands on the joins that the first root hasn't had */

#endif

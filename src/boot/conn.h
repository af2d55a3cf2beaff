/* The inside of a connection, shared by conn.c and handshake.c. */
#ifndef TP_BOOT_CONN_H
#define TP_BOOT_CONN_H

#include "boot/internal.h"

/* ---- conn.c */
struct tp_conn *tp_conn_new(int fd, bool caller, bool is_unix, uint64_t deadline_ms);
void tp_conn_send_raw(struct tp_conn *conn, const void *head, size_t head_bytes, const void *data, size_t bytes);
void tp_conn_expect(struct tp_conn *conn, enum tp_conn_state state, size_t need);      /* reads so much next */
void tp_conn_end(struct tp_conn *conn, enum tp_conn_end how, const char *why);         /* closes and tells the owner */

/* ---- handshake.c: each is called when all of its message is in conn->head */
void tp_conn_got_hello(struct tp_conn *conn);
void tp_conn_got_proof(struct tp_conn *conn);
void tp_conn_got_challenge(struct tp_conn *conn);
/* After each piece of a hello. True: it was none of ours, and the connection is closed. */
bool tp_conn_is_nonsense(struct tp_conn *conn);

#endif

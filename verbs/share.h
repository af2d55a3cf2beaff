/* How processes of one user share UDP port 4791 of an address.
 *
 * All their sockets are one SO_REUSEPORT group; a filter steers each packet by the top byte of its destination QPN to the socket
 * of that index, so the top byte is the process's slot. A group closes ranks when a socket in it is closed, which would hand
 * packets to the wrong process. So no socket is ever closed while anybody uses the group: all of them lie in the *box*, a
 * datagram socket connected to itself whose queue holds them, and every member holds the box.
 *
 * The keeper (keeper/main.c), started by whoever needs it first, hands out slots and sockets. When it dies nothing moves: a member
 * starts another and gives it the box. It answers for those who left (last.h) and ends 5 s after its last member. Messages are of one size, one at a time, answered
 * in order; the first of a connection is HELLO. */
#ifndef TP_VERBS_SHARE_H
#define TP_VERBS_SHARE_H

#include "base/base.h"

#define TP_SHARE_MAGIC 0x54504b31u
#define TP_SHARE_VERSION 1u
#define TP_SHARE_SLOTS 256
#define TP_SHARE_BATCH 8            /* sockets made, and put into the box, at a time */
#define TP_SHARE_LINGER_MS 5000
#define TP_SHARE_REST_MS 10000      /* a slot that was freed rests */
#define TP_SHARE_KEEPER "telpher-verbs-keeper"

/* LAST comes with a pipe that holds what a member leaves behind (struct tp_last), and has no answer. */
enum tp_share_kind { TP_SHARE_HELLO, TP_SHARE_SOCKET, TP_SHARE_LAST };
enum tp_share_status { TP_SHARE_OK, TP_SHARE_AGAIN /* another may have the port's sockets: ask again soon */, TP_SHARE_ERROR };

struct tp_share_request {
	uint32_t magic, version, kind;
	int32_t slot;                   /* HELLO: had before, or -1 */
	uint32_t has_box;               /* HELLO: the box comes along; else any descriptor does */
	uint32_t pad;
	union tp_addr addr;             /* SOCKET */
};
struct tp_share_reply {
	uint32_t magic, version, status;
	int32_t slot;
	int32_t error;                  /* errno */
	uint32_t pad;
};
/* What a datagram of the box says of its descriptors. */
struct tp_share_boxed { union tp_addr addr; uint32_t first, count; };

/* The name of the keeper's Unix socket, of this user. */
void tp_share_name(char *out, size_t bytes);
int tp_box_new(void);               /* a descriptor, or -1 with errno */
int tp_box_put(int box, const struct tp_share_boxed *what, const int *fds);
/* Visits what is in the box; visit owns the descriptors. Leaves the box as it is. 0 or an errno. */
int tp_box_look(int box, void (*visit)(const struct tp_share_boxed *what, const int *fds, void *arg), void *arg);

#endif

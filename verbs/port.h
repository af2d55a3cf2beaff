/* UDP sockets of the wire: one endpoint for each address of ours that a QP uses.
 *
 * Packets come in on one socket, bound to the address and port 4791 (share.c says how processes share it), and go out from
 * own unconnected sockets: an unconnected socket with DF makes the kernel write the IP identification 0, which the ICRC covers,
 * and the source port, different for different QPs, spreads them over equal paths of a network. */
#ifndef TP_VERBS_PORT_H
#define TP_VERBS_PORT_H

#include <pthread.h>
#include <stdatomic.h>
#include "base/base.h"
#include "verbs/wire.h"

#define TP_PORT_SENDERS 16          /* sockets that send, an endpoint; made when first used */
#define TP_PORT_FRAMES 32           /* of one call */
#define TP_PORT_FRAME_BYTES 64000u  /* packets of one segmented send, together */
#define TP_PORT_SEGMENTS 60         /* packets of one segmented send; their identifications stay below 64 */

struct tp_receiver;
struct tp_endpoint {
	struct tp_endpoint *next;       /* never taken out: endpoints live as long as the process */
	union tp_addr addr;             /* ours, with port 4791; or a group's */
	bool multicast;
	bool watched;                   /* by the progress thread */
	int receive_fd;
	struct tp_receiver *receiver;   /* buffers, under receive_lock */
	pthread_mutex_t receive_lock;   /* one thread at a time, so that packets keep their order */
	pthread_mutex_t lock;           /* of the senders */
	_Atomic int senders[TP_PORT_SENDERS];       /* descriptors; -1: not made yet */
	uint16_t sender_ports[TP_PORT_SENDERS];     /* network order */
	_Atomic bool whole;             /* no segmentation offload here: each packet alone */
	/* What may be under way to one socket, packets with their overhead: what ours could hold, as the best guess. */
	uint32_t budget;
};

/* The endpoint of an address of this machine (its port is not looked at), made at first use. 0 or an errno, logged. */
int tp_endpoint_open(const union tp_addr *addr, struct tp_endpoint **out);
/* A group's: joined on the interface of an address of ours. Made anew by each call; left by tp_endpoint_leave. */
int tp_endpoint_join(const union tp_addr *group, const union tp_addr *local, uint32_t ifindex, struct tp_endpoint **out);
void tp_endpoint_leave(struct tp_endpoint *endpoint);
/* The source address (with port) of sender n; 0 or an errno. */
int tp_endpoint_sender(struct tp_endpoint *endpoint, uint32_t n, union tp_addr *out);
/* True where addr (with port) is one of this process's senders: a multicast packet that came back. */
bool tp_endpoint_is_sender(const union tp_addr *addr);

struct tp_route {
	union tp_addr to;
	uint8_t tos, ttl;               /* ttl 0: the system's */
	bool mute;                      /* nothing goes out: a GID of RoCE v1, which has no UDP */
};
/* segment 0: one packet; else packets of so many bytes each (the last may be shorter). */
struct tp_frame { const uint8_t *data; uint32_t bytes, segment; };
/* Sends; returns how many frames went out. Fewer: *error says why (EAGAIN: the socket is full; others: what can't be sent). */
int tp_endpoint_send(struct tp_endpoint *endpoint, uint32_t sender, const struct tp_route *route, const struct tp_frame *frames, int count,
	int *error);

/* A packet that came in. */
struct tp_ingress {
	struct tp_endpoint *endpoint;
	union tp_addr from, to;
	uint8_t tos, ttl;
	uint16_t index;                 /* its place among those that came in one piece: the likely identification */
	const uint8_t *data;
	uint32_t bytes;
};
/* Takes what has come in, at most a batch, and hands each packet to take; returns how many there were; -1: another thread is
 * at it. */
int tp_endpoint_receive(struct tp_endpoint *endpoint, void (*take)(const struct tp_ingress *packet, void *arg), void *arg);
/* First of all endpoints (acquire); follow next. */
struct tp_endpoint *tp_endpoint_first(void);

/* share.c: this process's place (the top byte of its QP numbers) among those that share port 4791; negative: an errno, logged. */
int tp_share_slot(void);
/* The receiving socket of an address for this process; 0 or an errno, logged. */
int tp_share_socket(const union tp_addr *addr, int *fd);
/* The process ends: the keeper answers for it (last.h), as far as there is one. */
struct tp_last;
void tp_share_leave(const struct tp_last *lasts, int count);
/* Socket options that every receiving socket needs; bound to addr. reuse: as one of a group. 0 or an errno. */
int tp_endpoint_bind(const union tp_addr *addr, bool reuse, int *fd);
/* Says who holds port 4791 at addr, and what helps (WARN). */
void tp_endpoint_explain(const union tp_addr *addr, int error);

#endif

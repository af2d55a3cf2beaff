/* QP 1: the connection manager's messages on the wire, datagrams of 256 bytes with a key that all know.
 *
 * No process owns QP 1. Its packets come to the socket of slot 0, which the keeper reads (or the one process that has the port
 * alone); it hands each on, whole, to the Unix socket of whom it is for (cm_name.h), and answers itself where nobody is there, so
 * that a peer needn't wait for its own patience to end. Who gets one reads the message out of it by tp_gsi_take. */
#ifndef TP_VERBS_GSI_H
#define TP_VERBS_GSI_H

#include <infiniband/verbs.h>
#include "verbs/cm_mad.h"
#include "verbs/port.h"

#define TP_GSI_QPN 1
#define TP_GSI_PACKET_BYTES (12 + 8 + TP_MAD_BYTES + TP_WIRE_ICRC_BYTES)

/* What goes over the Unix socket. */
struct tp_gsi_parcel {
	uint32_t magic;
	uint8_t tos, ttl;
	uint8_t struck;                 /* faults and capture have seen it */
	uint8_t pad;
	union tp_addr from, to;
	uint8_t packet[TP_GSI_PACKET_BYTES];    /* from BTH to ICRC */
};
#define TP_GSI_MAGIC 0x47534931u

/* Is it a message for QP 1, whole and undamaged? */
bool tp_gsi_parse(const struct tp_ingress *in, struct tp_cm_mad *mad);
/* Hands a packet that came in on, or answers it; whatever else it is is dropped. struck: faults and capture have seen it. */
void tp_gsi_route(const struct tp_ingress *in, bool struck);
/* Called for each message that comes in, before it is handed on; NULL: nothing. */
extern void (*tp_gsi_saw)(const struct tp_ingress *in, const struct tp_cm_mad *mad);
/* Says something in nobody's name, from an address of ours (ports aren't looked at). */
void tp_gsi_utter(const union tp_addr *own, const union tp_addr *peer, const struct tp_packet *packet);      /* at most TP_MAD_BYTES, whole words */
void tp_gsi_say(const union tp_addr *own, const union tp_addr *peer, const struct tp_cm_mad *mad);

/* Addresses are GIDs of RoCE v2. Hears what comes for QP 1 to own (NULL: to each GID's address) from now on; 0 or an errno. */
int tp_gsi_listen(const union ibv_gid *own);
/* 0 or an errno; a message may be lost, like any datagram. */
int tp_gsi_send(const union ibv_gid *from, const union ibv_gid *to, uint8_t tos, const uint8_t mad[TP_MAD_BYTES]);
/* What peers sent before now is taken in: a message must not overtake it. */
void tp_gsi_catch_up(void);
/* Takes a parcel apart; returns how often the message counts: 0 (no parcel, or a fault struck it), 1, or 2. */
int tp_gsi_take(const void *parcel, size_t bytes, uint8_t mad[TP_MAD_BYTES], union ibv_gid *from, union ibv_gid *to);

#endif

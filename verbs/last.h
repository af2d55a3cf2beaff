/* What a connection that is gone still owes its peer: the answer to what was taken in, should it have been lost.
 *
 * A program takes its last message, destroys its queue pairs and ends; the acknowledgement is lost on the way, or in a socket that is
 * full. The peer asks again, and if nobody answers it takes a success for a failure. So of each connection that ends we keep for some
 * seconds what an acknowledgement needs, and answer repeats of what was served. When the process ends it gives that to the keeper of
 * the port (keeper/last.c), which hears what comes to the sockets of those who left. READs and atomics aren't answered: their
 * memory is gone. */
#ifndef TP_VERBS_LAST_H
#define TP_VERBS_LAST_H

#include "base/base.h"
#include "verbs/port.h"
#include "verbs/wire.h"

#define TP_LAST_NS 9000000000u      /* how long; shorter than a queue pair's number rests */
#define TP_LAST_MAX 256

struct tp_last {
	union tp_addr own, peer;        /* ports aren't looked at */
	uint64_t until_ns;              /* by the machine's monotonic clock */
	uint32_t qpn, dest_qpn;
	uint32_t recv_psn, msn;         /* what comes before was served */
	uint32_t last_psn;
	uint8_t last_word;              /* the NAK that was given for last_psn; 0: none */
	uint8_t transport, tos, ttl;
};
/* Is that a repeat of what was served, from its peer and undamaged? Then *answer is what it gets. */
bool tp_last_answers(const struct tp_last *last, const struct tp_ingress *in, const struct tp_packet *packet, struct tp_packet *answer);

/* ---- in the process ---- */
void tp_last_keep(const struct tp_last *last);
void tp_last_drop(uint32_t qpn);    /* the number belongs to a new connection */
/* Answers a packet for a queue pair that isn't connected, if it is a repeat. */
void tp_last_serve(const struct tp_ingress *in, const struct tp_packet *packet);
/* Those that still count; returns how many. */
int tp_last_all(struct tp_last out[TP_LAST_MAX]);
void tp_last_forget(void);          /* in a forked child */

#endif

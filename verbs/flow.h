/* What is under way to one receiving socket: a process's, at one address. Entries live as long as this process. */
#ifndef TP_VERBS_FLOW_H
#define TP_VERBS_FLOW_H

#include <pthread.h>
#include <stdatomic.h>
#include "base/base.h"

#define TP_FLOW_MARKS 32u
#define TP_FLOW_WAITERS 32
#define TP_FLOW_UNIT 64u            /* bytes: how a word counts */
/* What a datagram costs a socket: its bytes above UDP, and what the kernel keeps beside a packet. */
#define TP_FLOW_COST(bytes) ((bytes) + 512u)

/* A datagram that asked what has arrived; sent: the flow's count of bytes with it. */
struct tp_flow_mark { uint32_t qpn, psn; uint64_t sent; };
/* And a packet of a connection: its headers, and the kernel's overhead up to the next size that it has buffers of. */
#define TP_FLOW_PACKET_COST(mtu) ((mtu) + 1280u)
struct tp_flow {
	struct tp_flow *next;
	union tp_addr to;
	uint32_t slot;
	_Atomic int64_t bytes;          /* of connected QPs: each counts its own */
	/* When one of them heard something last, and when one of them asked last because nothing came; how often since then. */
	_Atomic uint64_t heard_ns, asked_ns;
	_Atomic uint32_t asks;
	_Atomic bool uc_mute;           /* nobody there says what arrived of UC */
	/* Of datagrams, as far as known; and until when that is worth anything. */
	_Atomic int64_t datagrams;
	_Atomic uint64_t datagrams_until_ns;
	pthread_mutex_t lock;           /* of what follows: datagrams */
	uint64_t sent, known, asked;    /* bytes in all: sent; that have arrived or are lost; sent when it was asked last */
	uint64_t window, told;          /* bytes; told: what the other side said last that it can take */
	uint64_t word_ns;               /* the last word from there, or since when one is waited for */
	bool speaks;                    /* it has said what arrived: it is one of ours */
	uint32_t silent;                /* waits in a row without a word */
	struct tp_flow_mark marks[TP_FLOW_MARKS];
	uint32_t marks_made;
	uint32_t waiting[TP_FLOW_WAITERS];      /* QPs */
	int waiting_count;
};
/* NULL: no memory, logged. slot: of the process there. */
struct tp_flow *tp_flow_find(const union tp_addr *to, uint32_t slot);
int64_t tp_flow_bytes(struct tp_flow *flow);
void tp_flow_forget(void);          /* in a forked child */

enum tp_flow_word {
	TP_FLOW_GO,
	TP_FLOW_ASK,                    /* it may go, and asks what has arrived */
	TP_FLOW_WAIT,                   /* until *until_ns at most; the QP is run again before, if a word comes */
	TP_FLOW_LOSE                    /* nobody has taken anything there for long */
};
/* One datagram with so many bytes; budget: what a socket takes, as far as this side knows. */
enum tp_flow_word tp_flow_admit(struct tp_flow *flow, uint32_t budget, const struct tp_flow_mark *datagram, uint32_t bytes, uint64_t *until_ns);
/* What was sent to from before the datagram psn of qpn, and that itself, has arrived or is lost; told: bytes that can be taken there. */
void tp_flow_arrived(const union tp_addr *from, uint32_t slot, uint32_t qpn, uint32_t psn, uint32_t told);

#endif

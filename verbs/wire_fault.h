/* Faults on demand that strike packets: lost, late, doubled, out of order, damaged, too large, or a port that is dead. */
#ifndef TP_VERBS_WIRE_FAULT_H
#define TP_VERBS_WIRE_FAULT_H

#include <stdatomic.h>
#include "verbs/port.h"

/* "drop=0.01,duplicate=0.01,reorder=0.01,corrupt=0.01,delay=0.01:2ms,mtu=1500,dscp=26:0.05,dead,unroute=10.0.0.2,slow=50us,
 * side=out|in|both,seed=7"; "" or "none": nothing. 0 or EINVAL, logged with what was found. */
int tp_fault_wire_set(const char *text);
extern _Atomic bool tp_fault_wire_any;
static inline bool tp_fault_wire(void) { return atomic_load_explicit(&tp_fault_wire_any, memory_order_relaxed); }
extern _Atomic bool tp_fault_wire_out;     /* those that go out */
static inline bool tp_fault_out(void) { return atomic_load_explicit(&tp_fault_wire_out, memory_order_relaxed); }

struct tp_fault_packet {
	const union tp_addr *from, *to;
	uint8_t tos;
	uint8_t *data;                  /* may be damaged in place */
	uint32_t bytes;
	bool out;
};
/* How many times the packet goes on: 0 (lost, or kept for later), 1, 2. route NULL: it came in. */
int tp_fault_packet(struct tp_fault_packet *packet, struct tp_endpoint *endpoint, uint32_t sender, const struct tp_route *route);
/* Where there are no packets (path_trace.c): what so many, of so many bytes at most (from BTH to ICRC), would meet. */
struct tp_fault_stream { const union tp_addr *from, *to; uint8_t tos; bool out; uint32_t packets, bytes; };
struct tp_fault_toll { bool never /* none gets through */, last_lost; uint32_t lost; uint64_t delay_ns; };
struct tp_fault_toll tp_fault_stream(const struct tp_fault_stream *stream);
/* Sends what was kept and is due. */
void tp_fault_flush(void);
/* How long the receiver sleeps before each batch. */
uint64_t tp_fault_slow_ns(void);

#endif

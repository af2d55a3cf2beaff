/* Packets written to a pcapng file, as they would be on a wire: with IP and UDP headers, segmented, ICRC included. */
#ifndef TP_VERBS_CAPTURE_H
#define TP_VERBS_CAPTURE_H

#include <stdatomic.h>
#include "base/base.h"

struct tp_capture {
	union tp_addr from, to;         /* with ports */
	uint8_t tos, ttl;
	uint16_t id;                    /* IPv4: the header's identification */
	bool out;
	const uint8_t *data;            /* from BTH to ICRC */
	uint32_t bytes;
};
extern _Atomic bool tp_capture_running;
static inline bool tp_capture_on(void) { return atomic_load_explicit(&tp_capture_running, memory_order_relaxed); }
void tp_capture_packet(const struct tp_capture *packet);
/* Begins at once; %p in path stands for the process's number. 0 or an errno, logged. Replaces one that is running. */
int tp_capture_start(const char *path);
void tp_capture_stop(void);
/* Begins where TELPHER_VERBS_CAPTURE says so; called when the first QP takes to the wire. */
void tp_capture_from_environment(void);

#endif

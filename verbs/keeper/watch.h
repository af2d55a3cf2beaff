/* Connections by rdma_cm over the wire, as far as their messages came through the keeper. When the process of one ends without a
 * word, the peer is told (DREQ), as the kernel would tell it if it were the connection manager. */
#ifndef TP_VERBS_KEEPER_WATCH_H
#define TP_VERBS_KEEPER_WATCH_H

#include "verbs/gsi.h"

void tp_watch_saw(const struct tp_ingress *in, const struct tp_cm_mad *mad);    /* a message that came in */
void tp_watch_ended(void);          /* some process has */
/* Does what is due; returns the milliseconds until it must be called again, -1: never. */
int tp_watch_tick(void);

#endif

/* What the parts of mem share: exchange.c shows memory to the ranks of a host at once, registry.c keeps local registrations, window.c
 * collective ones, announce.c tells peers of local ones in the background, import.c keeps what was mapped. */
#ifndef TP_MEM_INTERNAL_H
#define TP_MEM_INTERNAL_H

#include "mem/mem.h"

/* Proves the communicator's secret for one purpose. */
void tp_mem_sign(const struct tp_boot *boot, const char *what, int from, int to, uint64_t nonce, uint8_t mac[TP_SECRET_BYTES]);

#endif

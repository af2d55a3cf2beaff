/* CRC-32 (Ethernet's, zlib's), in pieces: start with all ones, invert the end. */
#ifndef TP_VERBS_CRC_H
#define TP_VERBS_CRC_H

#include <stddef.h>
#include <stdint.h>

uint32_t tp_crc_update(uint32_t state, const void *data, size_t bytes);
/* The same without the processor's help (tests, and what processors lack it use). */
uint32_t tp_crc_update_plain(uint32_t state, const void *data, size_t bytes);

#endif

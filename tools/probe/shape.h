/* How a job is cut into requests. Pure arithmetic; both ends compute the same.
 *
 * One block: each queue pair has a share of it, 128-byte aligned, in pieces of at most a message of the port. A stream: `count` messages,
 * which the queue pairs take in turn, each in pieces too. */
#ifndef TELPHER_PROBE_SHAPE_H
#define TELPHER_PROBE_SHAPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct probe_shape {
	uint64_t bytes;                         /* of the block, or of a message */
	uint64_t max_message;
	uint32_t nqps;
	uint32_t count;                         /* 0: one block; else messages of a stream */
};

struct probe_piece { uint64_t offset, bytes; bool last; };  /* last: of its share (or message) */

/* Queue pair q's share of a block. */
void probe_share(const struct probe_shape *shape, uint32_t q, uint64_t *offset, uint64_t *bytes);
/* Requests at queue pair q, and the r-th of them. */
uint64_t probe_requests(const struct probe_shape *shape, uint32_t q);
uint64_t probe_pieces(const struct probe_shape *shape);    /* of a stream's message */
/* Which message of a stream the r-th request at queue pair q belongs to; 0 of a block. */
uint32_t probe_message_of(const struct probe_shape *shape, uint32_t q, uint64_t r);
struct probe_piece probe_piece_of(const struct probe_shape *shape, uint32_t q, uint64_t r);
/* The largest message that is asked of a card: what both ports take, and never more than a scatter entry's 32 bits hold. */
uint64_t probe_largest_message(uint64_t a, uint64_t b);

#endif

/* How a job is cut into requests; see shape.h. */
#include "probe/shape.h"

#define ALIGN 128
#define SCATTER_MAX ((uint64_t)1 << 31)     /* a power of two below what 32 bits hold: pieces stay aligned */

void probe_share(const struct probe_shape *shape, uint32_t q, uint64_t *offset, uint64_t *bytes)
{
	uint64_t each = (shape->bytes / shape->nqps + ALIGN - 1) / ALIGN * ALIGN;
	/* So few bytes that rounding down would leave the last with all of them. */
	if (each * shape->nqps < shape->bytes) each += ALIGN;
	uint64_t start = each * q < shape->bytes ? each * q : shape->bytes, left = shape->bytes - start;
	*offset = start;
	*bytes = left < each ? left : each;
}

static uint64_t pieces(uint64_t bytes, uint64_t most) { return (bytes + most - 1) / most; }

uint64_t probe_requests(const struct probe_shape *shape, uint32_t q)
{
	uint64_t offset, bytes;
	if (shape->count) {
		uint64_t messages = shape->count / shape->nqps + (q < shape->count % shape->nqps);
		return messages * pieces(shape->bytes, shape->max_message);
	}
	probe_share(shape, q, &offset, &bytes);
	return pieces(bytes, shape->max_message);
}

uint64_t probe_pieces(const struct probe_shape *shape) { return pieces(shape->bytes, shape->max_message); }

uint32_t probe_message_of(const struct probe_shape *shape, uint32_t q, uint64_t r)
{
	return shape->count ? (uint32_t)(r / probe_pieces(shape) * shape->nqps + q) : 0;
}

struct probe_piece probe_piece_of(const struct probe_shape *shape, uint32_t q, uint64_t r)
{
	uint64_t offset = 0, bytes = shape->bytes, piece = r;
	if (shape->count) piece = r % pieces(bytes, shape->max_message);
	else probe_share(shape, q, &offset, &bytes);
	uint64_t at = piece * shape->max_message, left = bytes - at;
	return (struct probe_piece){ offset + at, left < shape->max_message ? left : shape->max_message, left <= shape->max_message };
}

uint64_t probe_largest_message(uint64_t a, uint64_t b)
{
	uint64_t least = a < b ? a : b;
	return least < SCATTER_MAX ? least : SCATTER_MAX;
}

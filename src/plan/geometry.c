/* Geometry: how a plan's chunks lie in a message. Every part begins and every chunk but the last ragged one ends on a line,
 * so that a chunk never cuts an element and channels never share a line. */
#include "plan/plan.h"

void tp_geometry_fit(const struct tp_plan *plan, size_t block_bytes, size_t chunk_limit, size_t line_bytes, int channel,
	struct tp_geometry *out)
{
	size_t channels = (size_t)plan->spec.nchannels, pieces = plan->pieces, at = (size_t)channel;
	size_t lines = tp_div_up(block_bytes, line_bytes);
	size_t first = lines / channels * at + TP_MIN(at, lines % channels);
	size_t mine = lines / channels + (at < lines % channels);
	size_t offset = TP_MIN(first * line_bytes, block_bytes), end = TP_MIN((first + mine) * line_bytes, block_bytes);
	size_t limit = TP_MAX(chunk_limit / line_bytes, 1);         /* lines a chunk */
	size_t rounds = TP_MAX(tp_div_up(mine, pieces * limit), 1);
	size_t chunk = tp_div_up(mine, rounds * pieces);            /* evened out: at most `limit` */
	if (chunk) rounds = tp_div_up(mine, pieces * chunk);
	size_t last = tp_div_up(mine - (rounds - 1) * pieces * chunk, pieces);
	*out = (struct tp_geometry){
		.block_bytes = block_bytes, .chunk_bytes = TP_MAX(chunk, 1) * line_bytes, .last_chunk_bytes = last * line_bytes,
		.part_offset = offset, .part_bytes = end - offset, .nrounds = (uint32_t)rounds,
	};
}

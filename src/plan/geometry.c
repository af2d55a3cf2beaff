/* Geometry: how a plan's chunks lie in a message. Every part begins and every chunk but the last ragged one ends on a line,
 * so that a chunk never cuts an element and channels never share a line. */
#include "plan/geometry.h"
#include "plan/plan.h"

void tp_geometry_fit(const struct tp_plan *plan, size_t block_bytes, size_t chunk_limit, size_t line_bytes, int channel,
	struct tp_geometry *out)
{
	struct tp_geometry_split split = tp_geometry_share(block_bytes, line_bytes, (uint32_t)plan->spec.nchannels);
	uint64_t offset, bytes;
	tp_geometry_part(split, block_bytes, line_bytes, (uint32_t)channel, &offset, &bytes);
	struct tp_geometry_cut cut = tp_geometry_rounds(split.lines + ((uint64_t)channel < split.more), plan->pieces, chunk_limit, line_bytes);
	*out = (struct tp_geometry){
		.block_bytes = block_bytes, .chunk_bytes = cut.chunk_bytes, .last_chunk_bytes = cut.last_chunk_bytes,
		.part_offset = offset, .part_bytes = bytes, .nrounds = cut.nrounds,
	};
}

/* The arithmetic of tp_geometry_fit (plan.h), for C and for kernels: sizes are uint64_t, and everything is inline. */
#ifndef TP_PLAN_GEOMETRY_H
#define TP_PLAN_GEOMETRY_H

#include <stdint.h>

#ifdef __CUDACC__
#define TP_GEOMETRY_INLINE static __host__ __device__ __forceinline__
#else
#define TP_GEOMETRY_INLINE static inline
#endif

/* How a message's lines are shared out: channel c has `lines` of them, the first `more` channels one more. */
struct tp_geometry_split { uint64_t lines, more; };
/* How a part of so many lines is cut into rounds. */
struct tp_geometry_cut { uint64_t chunk_bytes, last_chunk_bytes; uint32_t nrounds; };

TP_GEOMETRY_INLINE struct tp_geometry_split tp_geometry_share(uint64_t block_bytes, uint64_t line_bytes, uint32_t channels)
{
	uint64_t lines = (block_bytes + line_bytes - 1) / line_bytes;
	struct tp_geometry_split split = { lines / channels, lines % channels };
	return split;
}

/* Where channel c's part of a block begins and ends. */
TP_GEOMETRY_INLINE void tp_geometry_part(struct tp_geometry_split split, uint64_t block_bytes, uint64_t line_bytes, uint32_t channel,
	uint64_t *offset, uint64_t *bytes)
{
	uint64_t first = split.lines * channel + (channel < split.more ? channel : split.more);
	uint64_t begin = first * line_bytes, end = (first + split.lines + (channel < split.more)) * line_bytes;
	*offset = begin < block_bytes ? begin : block_bytes;
	*bytes = (end < block_bytes ? end : block_bytes) - *offset;
}

TP_GEOMETRY_INLINE struct tp_geometry_cut tp_geometry_rounds(uint64_t lines, uint32_t pieces, uint64_t chunk_limit, uint64_t line_bytes)
{
	uint64_t limit = chunk_limit / line_bytes;                  /* lines a chunk */
	if (!limit) limit = 1;
	uint64_t rounds = (lines + pieces * limit - 1) / (pieces * limit);
	if (!rounds) rounds = 1;
	uint64_t chunk = (lines + rounds * pieces - 1) / (rounds * pieces);     /* evened out: at most `limit` */
	if (chunk) rounds = (lines + pieces * chunk - 1) / (pieces * chunk);
	uint64_t last = (lines - (rounds - 1) * pieces * chunk + pieces - 1) / pieces;
	struct tp_geometry_cut cut = { (chunk ? chunk : 1) * line_bytes, last * line_bytes, (uint32_t)rounds };
	return cut;
}

#endif

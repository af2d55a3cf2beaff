/* What the parts of the host executor share: compile.c turns a rank's programs into what lane.c runs and move.c moves. */
#ifndef TP_EXEC_HOST_INTERNAL_H
#define TP_EXEC_HOST_INTERNAL_H

#include <string.h>

#include "exec/exec.h"

/* Our end of a link, and what of it the operation has still to see consumed. */
struct tp_exec_end {
	struct tp_link *link;
	struct tp_link own;         /* local links live here */
	bool token, net;
	bool marked;                /* in the operation's list of links to drain, up to number mark */
	uint32_t mark;
	/* A ring of chunks that are too large for a slot and lie in no buffer: sent by reference. */
	unsigned char *staging;
	size_t staging_bytes;       /* of one chunk */
};

struct tp_exec_operand {
	uint8_t where, by_ref;
	uint32_t piece;
	uint32_t block;             /* SCRATCH: the chunk */
	struct tp_exec_end *end;    /* TP_LINK */
};

enum tp_exec_size { TP_SIZE_CHUNK /* of size_block, size_piece */, TP_SIZE_SCRATCH /* what size_block holds */, TP_SIZE_SLOT, TP_SIZE_NONE };

/* Operands sorted by what is done with them: sources[0, nsrc) in the plan's order, tokens to take, buffers to write, links
 * to give to, tokens to give. */
struct tp_exec_step {
	uint8_t flags, size_from;
	uint16_t nsrc, ntake, nbuf, nout, ngive;
	uint32_t size_block, size_piece;
	struct tp_exec_operand *src, *take, *buf, *out, *give;
};

struct tp_exec_lane {
	struct tp_exec_step *first, *end;
	struct tp_exec_program *program;
	struct tp_exec_lane *after;         /* runs only once that one is done: they share a link (send/recv) */
	int32_t transfer;
	/* Of the running operation. */
	struct tp_exec_step *at;
	uint32_t round;
	uint32_t ready;                     /* links of the step at hand that are known to be ready */
	size_t round_at, chunk;             /* offset of the round in a part, its chunk size */
	const struct tp_geometry *geometry; /* the program's, or its own (send/recv) */
	struct tp_geometry own_geometry;
	const unsigned char *input;
	unsigned char *output;
	bool done;
};

struct tp_exec_program {
	int channel;
	uint32_t nlanes, nends;
	struct tp_exec_lane *lanes;
	struct tp_exec_end *ends;           /* [2 * link]: sending, [2 * link + 1]: receiving */
	struct tp_exec_step *steps;
	struct tp_exec_operand *operands;
	size_t *scratch_bytes;              /* [scratch_chunks]: what each holds */
	unsigned char *scratch;
	struct tp_geometry geometry;        /* the last one, kept while the message has the same size */
};

/* A plan made ready for this rank. Key: the plan's address and what it is made of. */
struct tp_exec_plan {
	struct tp_exec_plan *next;
	const struct tp_plan *plan;
	struct tp_plan_spec spec;
	const struct tp_program *source;
	bool reduces, p2p;
	bool all_shm;                       /* every link is shared memory between ranks */
	uint32_t pieces, nprograms, nlanes;
	struct tp_exec_program *programs;
	size_t fit_block, fit_chunk, fit_line;      /* what the geometries were fitted to */
	/* For the fused one-shot: links to and from every other rank, in rank order; NULL: not that shape. */
	struct tp_link **sends, **receives;
};

struct tp_exec_op {
	struct tp_exec_op *next_free;
	struct tp_exec_plan *plan;
	struct tp_exec_call call;
	bool begun, pre, post;
	bool round_first;                   /* scaled input is rounded to its type before it is reduced */
	size_t limit;                       /* of a chunk */
	bool streams;                       /* its output is larger than caches */
	bool moves_net;                     /* some of its chunks may go over the network */
	size_t ref_bytes;                   /* from which on chunks travel by reference to another process */
	struct tp_exec_lane **active;       /* [nactive] */
	uint32_t nactive, active_room;
	struct tp_exec_end **drain;         /* [ndrain] */
	uint32_t ndrain, drain_room;
};

struct tp_exec_source { const void *at; struct tp_link *remote; uint64_t addr; };

struct tp_exec {
	struct tp_boot *boot;
	struct tp_links *links;
	struct tp_exec_plan *plans, *last;
	struct tp_exec_op *free_ops;
	int nchannels;
	unsigned char **scratch;            /* [channel], kept and grown */
	size_t *scratch_bytes;
	struct tp_exec_source *sources;     /* of the step at hand; as many as any plan needs */
	const void **addresses;
	size_t sources_room;
	unsigned char *blocks;              /* TP_BLOCK_BYTES for each source: where references are read to */
	size_t blocks_room;
};

/* Bytes that a reference is read in where they are reduced: in the nearest caches. */
#define TP_BLOCK_BYTES ((size_t)128 << 10)
/* Outputs from here on are copied past the caches (stream.c). */
#define TP_STREAM_BYTES ((size_t)32 << 20)
/* Send/recv: the total, in front of the first chunk, so that unequal sizes are seen. */
#define TP_TOTAL_BYTES sizeof(uint64_t)

/* Chunks of at least so much go by reference: into another process a system call costs what copying so much costs (16 KB that
 * are reduced: 6.1 us for two ways copied, 8.3 read). */
#define TP_REF_BYTES ((size_t)24 << 10)
#define TP_REF_BYTES_SAME_PROCESS ((size_t)4 << 10)

/* Chunks of at least so much are sent over the network from where they lie. */
#define TP_LEND_BYTES ((size_t)16 << 10)

/* The largest slot of a local ring; what is larger goes through its staging ring. */
#define TP_LOCAL_BYTES ((size_t)64 << 10)

/* A struct tp_slot_ref and, for send/recv, the total. */
struct tp_exec_ref { uint64_t addr, total; };

ncclResult_t tp_exec_compile(struct tp_exec *exec, const struct tp_plan *plan, struct tp_exec_plan **out);
/* The plan made ready, from those that are kept or anew. */
ncclResult_t tp_exec_find_plan(struct tp_exec *exec, const struct tp_plan *plan, struct tp_exec_plan **out);
void tp_exec_plan_free(struct tp_exec_plan *plan);
ncclResult_t tp_exec_op_begin(struct tp_exec *exec, struct tp_exec_op *op);
/* Runs a lane as far as it gets. */
ncclResult_t tp_exec_lane_run(struct tp_exec *exec, struct tp_exec_op *op, struct tp_exec_lane *lane, bool *moved);
/* All links of the lane's step are ready: moves it. */
ncclResult_t tp_exec_step_move(struct tp_exec *exec, struct tp_exec_op *op, struct tp_exec_lane *lane, struct tp_exec_step *step);
void tp_exec_stream_copy(void *to, const void *from, size_t bytes);
ncclResult_t tp_exec_op_mark(struct tp_exec *exec, struct tp_exec_op *op, struct tp_exec_end *end);
/* Hints about lines that two processors pass to and fro (a processor without them takes them for nops): demote sends a
 * written line to the shared cache, where its reader finds it sooner; own fetches a line for writing. */
static inline void tp_exec_demote_line(const void *line)
{
#if defined(__x86_64__)
	__asm__ volatile(".byte 0x0f, 0x1c, 0x00" : : "a"(line) : "memory");        /* cldemote (%rax) */
#else
	(void)line;
#endif
}

static inline void tp_exec_own_line(void *line)
{
#if defined(__x86_64__)
	__asm__ volatile("prefetchw (%0)" : : "r"(line));
#else
	__builtin_prefetch(line, 1);
#endif
}

/* What a chunk of middle size costs is the lines' way there and back: those of the next slot are fetched while this chunk
 * is read at the other end. Not where that slot is perhaps still being read. (4 KB between two cores: 1.35 us, 1.05 with.) */
#define TP_OWN_LEAST ((size_t)256)
#define TP_OWN_MOST ((size_t)8 << 10)
#define TP_DEMOTE_MOST ((size_t)2 << 10)
static inline void tp_exec_own_next(const struct tp_link *link, size_t bytes)
{
	if (bytes < TP_OWN_LEAST || bytes > TP_OWN_MOST || link->next - link->head_seen > link->mask) return;
	unsigned char *slot = link->slots + (size_t)(link->next & link->mask) * link->stride;
	for (size_t at = 0; at < sizeof(struct tp_slot) + bytes; at += TP_CACHE_LINE) tp_exec_own_line(slot + at);
}

/* A chunk of this size takes about as long to make as to send: whoever makes several at a stretch leaves the network idle, at both ends. */
#define TP_NET_STEP_BYTES ((size_t)128 << 10)
static inline bool tp_exec_lane_is_slow(const struct tp_exec_op *op, const struct tp_exec_lane *lane) { return op->moves_net && lane->chunk >= TP_NET_STEP_BYTES; }

/* Fills a slot's data, the line of the header last: the receiver's eyes are on that line, and each look takes it away. */
static inline void tp_exec_fill(unsigned char *data, const void *from, size_t bytes)
{
	const size_t first = TP_CACHE_LINE - sizeof(struct tp_slot);
	if (bytes > first) memcpy(data + first, (const char *)from + first, bytes - first);
	if (bytes >= TP_OWN_LEAST && bytes <= TP_DEMOTE_MOST)
		for (size_t at = first; at < bytes; at += TP_CACHE_LINE) tp_exec_demote_line(data + at);
	if (bytes == 8) memcpy(data, from, 8);
	else if (bytes) memcpy(data, from, bytes < first ? bytes : first);
}

/* Where a buffer operand's chunk lies in the lane's round, and how much of it there is. */
static inline size_t tp_exec_chunk(const struct tp_exec_lane *lane, uint32_t block, uint32_t piece, size_t *offset)
{
	const struct tp_geometry *g = lane->geometry;
	size_t at = lane->round_at + piece * lane->chunk;
	*offset = block * g->block_bytes + g->part_offset + at;
	if (at >= g->part_bytes) return 0;
	return lane->chunk < g->part_bytes - at ? lane->chunk : g->part_bytes - at;
}

#endif

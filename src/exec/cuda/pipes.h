/* Large messages through pipes (pipes_move.h, streams_pipes.h): what the host passes to the kernels, and which calls run so. Read by C and CUDA C. */
#ifndef TP_EXEC_CUDA_PIPES_H
#define TP_EXEC_CUDA_PIPES_H

#include "exec/cuda/device.h"

enum {
	TP_PIPE_RANKS = 8, TP_PIPE_PEERS = TP_PIPE_RANKS - 1,
	TP_PIPE_PUSHERS = 4, TP_PIPE_TILES = 3,     /* warps that push, at most; tiles, and warps that send them */
	TP_PIPE_DEPTH = 4,                          /* a divisor of it: warps that collect from a peer, or feed what is reduced: they have chunks in turn */
	TP_PIPE_COLLECTORS = 8,                     /* of a block, at most */
	TP_PIPE_SHARED = 96 << 10, TP_PIPE_SHARED_MOST = 208 << 10          /* a block's memory: at least (and where transfers alone
	                                               go through pipes: so that no fewer blocks fit a multiprocessor), and where the GPU has it */
};

/* Kernels: tp_pipe_<type>_<op> (all-reduce, reduce-scatter, reduce), tp_pipe_copy (broadcast in two steps), tp_push_copy (all that only
 * moves). Masks are of ranks. */
struct tp_pipe_args {
	uint64_t comm, counters;
	uint64_t rings[TP_PIPE_RANKS];              /* each rank's pipes: of each peer in turn, of each channel */
	uint64_t input, output;
	uint64_t slice_bytes, total_bytes, in_stride, out_stride;   /* as in struct tp_fused_args */
	uint64_t lines_each, lines_more;            /* of a slice, in lines of 128 bytes: each block has lines_each, the first lines_more one more */
	uint32_t chunk, pipe_bytes;                 /* of a chunk; of a (peer, channel): both phases, heads and flags */
	uint32_t tag;
	int16_t rank, nranks;
	uint16_t nchannels;
	uint8_t slots;                              /* chunks of a phase: a power of two, at most 16 */
	uint8_t pushers, feeders, tiles;            /* feeders, tiles: 0 where nothing is reduced */
	uint8_t collectors;                         /* warps for each peer that collect in bulk; 0: collect_warps do it together */
	uint8_t push_to, sources, send_to, collect_from;
	int8_t slice_of[TP_PIPE_RANKS];             /* which slice is a rank's */
	int8_t keep_slice, keep_place;
	uint8_t keeps;                              /* slices that stay here: 0; 1: keep_slice, at keep_place; more: all */
	uint8_t fans;                               /* all peers get the same */
	uint8_t stores, gathers;                    /* what was reduced goes to OUTPUT here; at its slice's place */
	uint8_t aligned;                            /* buffers and strides are, to 16 bytes */
	uint8_t reduce_warps, collect_warps;
	uint16_t stages;                            /* transfers: chunks of shared memory */
	uint8_t gives_way, counts;
	uint8_t offers;                             /* what only moves: receivers offer their buffers */
	uint64_t table;                             /* registered buffers, and OUTPUT among them */
	struct tp_dev_offer offer;
	struct tp_dev_reduce reduce;
};

/* Sends and receives of which some go through pipes (streams_pipes.h): pipe has what of it isn't a collective's. Kernel: tp_streams_piped. */
struct tp_dev_streams_piped { struct tp_dev_streams_more lines; struct tp_pipe_args pipe; };

#ifndef __cplusplus
#include "exec/cuda.h"

/* A communicator's; the same on all ranks but for the addresses. */
struct tp_pipes {
	enum tp_cuda_pipes level;
	int nchannels;
	uint32_t pipe_bytes, shared;
	uint32_t chunk[2];                          /* of what only moves; of what reduces */
	uint64_t counters;                          /* in this rank's memory: [channel][phase][rank]{sent, received} */
	uint64_t rings[TP_PIPE_RANKS];
};
struct tp_pipe_launch {
	int kind;                                   /* enum tp_fused_kind: TP_FUSED_PIPE or TP_FUSED_PUSH */
	bool reduces;                               /* the kernel is of call->reduce's type and operation; else the kind's copying one */
	unsigned blocks, shared;                    /* of TP_DEV_THREADS threads and so many bytes of shared memory */
	const char *name;
	struct tp_pipe_args args;
};
/* Of a block's memory, where a block may have `most` bytes. */
uint32_t tp_pipes_shared(int most);
/* Of a rank's region; of its counters. */
size_t tp_pipes_region_bytes(enum tp_cuda_pipes level, int nlocal, int nchannels);
size_t tp_pipes_counter_bytes(int nchannels);
/* rings: of each rank, zeroed, as the counters are. shared_most: of a block. */
void tp_pipes_init(enum tp_cuda_pipes level, int nranks, int nchannels, int shared_most, uint64_t counters, const uint64_t *rings, struct tp_pipes *out);
/* A call whose protocol is TP_FUSED_BY_PIPES. */
struct tp_fused;
struct tp_exec_call;
struct tp_fused_shape;
/* Of transfers: all that isn't a call's. */
void tp_pipes_fill_transfers(const struct tp_fused *fused, struct tp_pipe_args *out);
void tp_pipes_fit(const struct tp_fused *fused, const struct tp_exec_call *call, const struct tp_fused_shape *shape, struct tp_pipe_launch *out);
#endif
#endif

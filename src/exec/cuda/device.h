/* What the host passes to kernels: read by C and by CUDA C, so fixed-size types only. Device addresses are uint64_t.
 *
 * Three kinds of memory: struct tp_dev_comm, programs and links in the rank's device memory; struct tp_dev_status in pinned host
 * memory; arguments of a launch. */
#ifndef TP_EXEC_CUDA_DEVICE_H
#define TP_EXEC_CUDA_DEVICE_H

#include <stdint.h>

enum { TP_DEV_MAX_CHANNELS = 64, TP_DEV_MAX_LOCAL = 64, TP_DEV_MAX_CALLS = 8, TP_DEV_THREADS = 512 };

/* One end of a link. next and head_seen are the kernels'; the rest is written once. A slot's flag, {seq, bytes}, lies in it or elsewhere (link.h). */
struct tp_dev_link {
	uint64_t slots, head, flags;
	uint32_t stride, flag_stride, mask, capacity;
	uint16_t kind, lends;                       /* kind: enum tp_link_kind; lends: see lend.h */
	uint32_t next, head_seen;
	int32_t peer;
};

/* Pinned host memory. abort: host to device, polled by every spin. The rest: device to host; the first fault counts. */
struct tp_dev_status {
	uint32_t abort;
	uint32_t fault;                             /* enum tp_cuda_fault; written last */
	int32_t peer, channel;
	uint32_t found, expected;
	uint64_t completed;
	uint32_t straight, pad;                     /* parts of messages that came straight into registered buffers, about */
	uint32_t lends[TP_DEV_MAX_CHANNELS];        /* the block has looked, or will in a moment, into the table of loans, and hasn't ended (lend.h) */
};

/* A block's time in fused kernels (lines.h): read and written at once, 16 bytes. */
struct tp_dev_epoch {
	uint32_t now;                               /* rounds that the block has ended; their numbers are flags in lines */
	uint32_t heard;                             /* the last one in which it heard from all ranks */
	uint32_t gates;                             /* barriers that it has been through */
	uint32_t pad;
};

struct tp_dev_comm {
	int32_t rank, nranks, local, nlocal;
	uint64_t status;                            /* device's address of struct tp_dev_status */
	uint64_t region[TP_DEV_MAX_LOCAL];          /* of each rank of this host (tp_links_region), by place */
	struct tp_dev_epoch epoch[TP_DEV_MAX_CHANNELS] __attribute__((aligned(16)));   /* one a block */
	uint32_t blocks_done;                       /* of the running kernel: the last one counts the kernel as completed */
	uint32_t shared_gpu;                        /* peers run on the same GPU: waits give way */
	uint64_t completed;
	uint32_t counts;                            /* somebody reads status.completed: see tp_kernel_end */
	uint32_t straight;                          /* see struct tp_dev_status */
	uint32_t stop;                              /* a kernel found a fault: all of this rank's end; near, so cheap to look at */
	uint64_t loans;                             /* struct tp_dev_loan [TP_DEV_LOANS] */
};

/* Registered buffers that links over the network send from where they lie (lend.h): link.h's tp_link_loan. Chunks of at least so many bytes. */
enum { TP_DEV_LOANS = 1024, TP_DEV_LEND_BYTES = 16 << 10 };
struct tp_dev_loan { uint64_t begin, end; };

/* A receiver's registered buffer (offers.h): entry index - 1 of its row in tp_mem_table, offset bytes in; index 0: nothing is offered. */
enum { TP_DEV_BUFFERS = 1024 };
struct tp_dev_offer { uint64_t offset; uint32_t index, pad; };

/* The reduction, as struct tp_reduce (exec.h) says it; type and op are the kernel's. post: 0, 1, or TP_DEV_POST_SIGNED: the
 * average of signed integers, whose sums the kernels of unsigned ones make. */
enum { TP_DEV_POST_SIGNED = 2 };
struct tp_dev_reduce {
	uint32_t pre, post;
	double pre_scale, post_scale;
	int64_t pre_integer, post_divisor;
	uint64_t device_scalar;                     /* PreMulSum's scalar in device memory, of the element type; 0: pre_scale, pre_integer */
};

/* How one channel's part of a message is cut (plan/geometry.h); of two kinds, as the first part_more channels have one line more. */
struct tp_dev_part { uint64_t chunk_bytes, last_chunk_bytes; uint32_t nrounds, pad; };

/* A collective. programs: struct tp_dev_program of channel 0, the others follow at a stride. */
struct tp_dev_call {
	uint64_t programs, input, output;
	uint64_t block_bytes, chunk_bytes;          /* chunk_bytes: the limit; each block fits its own geometry */
	uint32_t line_bytes, tag;
	struct tp_dev_reduce reduce;
	/* Steps kernels: what needs divisions is computed by the host. Channel c's part has part_lines lines, and one more where
	 * c < part_more; parts[0] is how those with one more are cut, parts[1] the others. */
	uint32_t nchannels, program_stride;
	uint64_t part_lines;
	uint32_t part_more;
	uint16_t lend_input, lend_output;           /* number + 1 of the entry of struct tp_dev_loan that input, output lie in; 0: none */
	struct tp_dev_part parts[2];
};

/* Arguments of steps kernels: the calls one after the other. */
struct tp_dev_steps {
	uint64_t comm;
	uint32_t ncalls, pad;
	struct tp_dev_call calls[TP_DEV_MAX_CALLS];
};

/* A rank's program on one channel, as the kernel reads it: this, then lanes, steps, operands and the addresses of links' ends, each array
 * aligned to 8 bytes; the whole to 16. */
struct tp_dev_program {
	uint32_t bytes;                             /* of all of it */
	uint16_t nlanes, ngroups;                   /* ngroups: groups of warps that the lanes are spread over */
	uint32_t nsteps, noperands;
	uint32_t nlinks, room;                      /* nlinks: ends; room: operands of the largest step */
	uint32_t pieces, flags;                     /* TP_DEV_PROGRAM_* */
	uint32_t lanes_at, steps_at, operands_at, links_at;     /* from the beginning of this */
	uint64_t scratch;                           /* this channel's: scratch_chunks sizes (uint32_t), then, 128-byte aligned, the chunks */
	uint32_t scratch_at, input_blocks, output_blocks, pad;
};
enum { TP_DEV_PROGRAM_REDUCES = 1 };
/* What a block can hold: groups; operands of the steps at hand, of which each group has its share; lanes. */
enum { TP_DEV_GROUPS = 16, TP_DEV_ROOM = 512, TP_DEV_LANES = 256 };

struct tp_dev_lane { uint32_t first_step, nsteps; };

/* Operands sorted by what is done with them: nsrc sources in the plan's order, ntake tokens to take, nbuf buffers to write,
 * nout links to give to, ngive tokens to give. Of the links, the last nlend may be lent what would be copied into their slots: the source, where flags have
 * TP_DEV_STEP_LENDS_SOURCE, else the first of the buffers. */
enum { TP_DEV_STEP_LENDS_SOURCE = 128 };
struct tp_dev_step {
	uint32_t first;
	uint16_t nsrc, ntake, nbuf, nout, ngive;
	uint8_t flags, size_from;                   /* enum tp_step_flag and the above; enum tp_dev_size: of the operand number size_operand */
	uint16_t size_operand, nlend;
};
enum tp_dev_size { TP_DEV_SIZE_CHUNK, TP_DEV_SIZE_SCRATCH, TP_DEV_SIZE_SLOT, TP_DEV_SIZE_NONE };

struct tp_dev_operand {
	uint16_t where, piece;                      /* enum tp_where */
	uint32_t block;                             /* LINK: the end's number in the program; SCRATCH: the chunk */
};

/* A send or receive, or (from != 0) a copy from one's own send to one's own receive. Parts: what channels
 * base, base + 1 … base + nparts - 1 (modulo all) move of it, in whole lines of 128 bytes; a function of its bytes and of the
 * two ranks, so both ends agree. Links: struct tp_dev_link of channel 0, the other channels' follow. */
struct tp_dev_transfer {
	uint64_t buf, bytes, from, links;
	uint32_t chunk_bytes;
	uint16_t base, nparts;
	uint16_t next;                              /* number + 1 of the next transfer on the same links; 0: the last */
	uint8_t is_send, is_first;                  /* is_first: no other is before it on its links */
	uint32_t lend;                              /* as lend_input of struct tp_dev_call, of buf */
};
/* Two sizes of arguments: what fits into 4 KB, as is usual, and what fits into 32 KB. */
enum { TP_DEV_TRANSFERS = 80, TP_DEV_TRANSFERS_MORE = 640, TP_DEV_TRANSFER_LANES = 128 };
struct tp_dev_transfers_head { uint64_t comm; uint32_t ntransfers; uint16_t nchannels, lends; };      /* lends: some transfer has lend */
struct tp_dev_transfers { struct tp_dev_transfers_head head; struct tp_dev_transfer transfers[TP_DEV_TRANSFERS]; };
struct tp_dev_transfers_more { struct tp_dev_transfers_head head; struct tp_dev_transfer transfers[TP_DEV_TRANSFERS_MORE]; };

/* The same between ranks that map each other's regions (streams.h): units of TP_DEV_STREAM_UNIT bytes, of which each part has units_each, the
 * first units_more one more. Of what goes through pipes, the first TP_DEV_STREAM_PIPED_UNITS: whole lines of 128 bytes, less than a slot. */
enum { TP_DEV_STREAM_UNIT = 120, TP_DEV_STREAM_SLOTS = 4, TP_DEV_STREAM_RANKS = 8, TP_DEV_STREAM_LANES = 16, TP_DEV_STREAM_PIPED_UNITS = 16 };
struct tp_dev_stream {
	uint64_t buf, bytes, from;
	uint64_t offset;                            /* of the offer, where index isn't 0 */
	uint32_t units, units_each, units_more;
	uint16_t base, nparts;
	uint16_t next;
	uint8_t is_send, is_first;
	int16_t peer;
	uint16_t index;
};
/* Each (peer, channel) has a ring in the region: a line that the peer writes (how far it has read what this rank sent it; its offer; the
 * stamp of what it has stored to this rank's buffer), then slots that the peer writes. counters: [peer][is_send][channel], in this rank's memory. */
struct tp_dev_streams_head {
	uint64_t comm, counters;
	uint64_t table, offers_from;                /* registered buffers; sizes of transfers for which offers are made */
	uint64_t pipes_from;                        /* sizes of transfers that go through pipes; streams_pipes.h */
	uint64_t rings[TP_DEV_STREAM_RANKS];        /* of each rank */
	uint32_t slot_units, ntransfers;
	int16_t rank, nranks;
	uint16_t nchannels;
	uint8_t gives_way, counts;
	uint8_t channels[TP_DEV_MAX_CHANNELS];      /* of each block */
};
enum { TP_DEV_STREAMS = 68, TP_DEV_STREAMS_MORE = 192 };
struct tp_dev_streams { struct tp_dev_streams_head head; struct tp_dev_stream streams[TP_DEV_STREAMS]; };
struct tp_dev_streams_more { struct tp_dev_streams_head head; struct tp_dev_stream streams[TP_DEV_STREAMS_MORE]; };

#endif

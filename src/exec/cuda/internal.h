/* What the parts of the CUDA executor's host side share.
 *   kernels.c   images to functions, one table a context
 *   exec.c      an executor's life, its status
 *   memory.c    device memory that is written once (programs, links)
 *   links.c     ends of links in device memory
 *   program.c   plans to programs in device memory
 *   launch.c    calls to launches of fused kernels, on windows or on lines, or of the steps kernels
 *   transfers.c groups of sends and receives to launches
 *   streams.c   the same between ranks that map each other's regions, and collectives that are such groups
 *   fused.c     which calls run as fused kernels, and how
 *   pipes.c     large ones through pipes
 *   offers.c    registered buffers, which large messages are stored to without a copy
 *   copies.c    all-gather, all-to-all and broadcast by copy engines, into windows
 *   table.c     from which sizes on */
#ifndef TP_EXEC_CUDA_INTERNAL_H
#define TP_EXEC_CUDA_INTERNAL_H

#include <string.h>

#include "exec/cuda.h"
#include "exec/cuda/copies.h"
#include "exec/cuda/device.h"
#include "exec/cuda/fused.h"

/* ---- kernels.c ----
 * Kernels are named tp_<kind>_<type>_<op> and tp_<kind>_copy; those of sends and receives stand alone. Sums and products of
 * signed integers are those of unsigned ones, which exist alone. */
enum tp_cuda_kind { TP_CUDA_STEPS, TP_CUDA_FUSED /* + enum tp_fused_kind */, TP_CUDA_NKINDS = TP_CUDA_FUSED + TP_FUSED_KINDS };
enum { TP_CUDA_NOPS = 4 };          /* Sum, Prod, Max, Min: as ncclRedOp_t counts */
struct tp_cuda_kernels {
	struct tp_cuda_kernels *next;
	const struct tp_gpu *gpu;
	CUfunction reduce[TP_CUDA_NKINDS][ncclNumTypes][TP_CUDA_NOPS];      /* NULL: the kind has none */
	CUfunction copy[TP_CUDA_NKINDS];
	CUfunction transfers, transfers_more, streams, streams_more;
	CUfunction copies, streams_piped;   /* streams_piped: where there are pipes */
	int resident[TP_CUDA_PIPES_ALL + 1];        /* of what communicators of that level launch */
	enum tp_cuda_pipes pipes;           /* that are loaded and can be used */
	_Atomic int pipes_used;             /* enum tp_cuda_pipes: the most of a communicator of this process */
	int shared_most;                    /* bytes of shared memory that a block may have */
};
/* reduces: of this type and operation; else the copying one. */
static inline CUfunction tp_cuda_kernel(const struct tp_cuda_kernels *k, enum tp_cuda_kind kind, bool reduces, const struct tp_reduce *r)
{
	return reduces ? k->reduce[kind][r->type][r->op] : k->copy[kind];
}
/* The images that this build has (images.c.in); count 0: built without nvcc. */
struct tp_cuda_image { const char *name; const void *data; };
extern const struct tp_cuda_image tp_cuda_images[];
extern const int tp_cuda_nimages, tp_cuda_images_toolkit;   /* the CUDA that compiled them: 13000 */

/* ---- exec.c ---- */
enum { TP_CUDA_PLAN_BUCKETS = 64, TP_CUDA_LOCAL_LINKS = 64, TP_CUDA_STAGING_BYTES = 64 << 10 };
struct tp_cuda_plan;
struct tp_cuda_ordered;
/* Sends and receives by lines (streams.h). */
struct tp_cuda_streams {
	bool usable;                                /* agreed */
	uint32_t slot_units;
	size_t rings_at;                            /* in the region */
	uint64_t counters;                          /* the device's address */
	struct tp_dev_streams_piped args;
};
struct tp_cuda_chunk { struct tp_cuda_chunk *next; struct tp_gpu_memory memory; size_t used; };
struct tp_cuda_exec {
	struct tp_boot *boot;
	struct tp_links *links;
	const struct tp_gpu *gpu;
	struct tp_cuda_kernels *kernels;
	int nchannels;
	bool shared_gpu;
	size_t chunk_limit;                         /* of any chunk: what slots hold; agreed */
	struct tp_gpu_memory comm_memory, status_memory, staging_memory;
	uint64_t comm;                              /* struct tp_dev_comm, the device's address */
	struct tp_dev_status *status;               /* the host's address */
	_Atomic uint64_t launched;                  /* kernels */
	struct tp_cuda_chunk *chunks;               /* device memory that is handed out in pieces */
	size_t staged;                              /* bytes of staging memory under way */
	struct tp_cuda_plan *plans[TP_CUDA_PLAN_BUCKETS], *last;
	/* Device addresses of links' ends; 0: not made yet. */
	uint64_t *ends;                             /* see end_index in links.c */
	bool knows_loans;                           /* the device knows where the table of loans is */
	bool *ends_lend;                            /* the same: senders that may be lent registered buffers */
	uint64_t *local_ends;                       /* rings between lanes: [(channel * 2 + token) * TP_CUDA_LOCAL_LINKS + number], sender's; the receiver's follows */
	struct tp_fused fused;
	/* transfers.c: [2 * peer + is_send] channels whose ends are there, and what a group needs, kept for the next. */
	uint64_t *transfer_ends;
	uint32_t *transfer_last;
	struct tp_dev_transfers_more *transfer_args;
	struct tp_cuda_ordered *transfer_order;
	int transfer_room;
	bool transfer_uploads;
	struct tp_cuda_streams streams;
	struct tp_cuda_buffers buffers;             /* table NULL: registered buffers are of no use */
	struct tp_cuda_copies copies;
};
/* A hash of where in which windows a call's buffers lie: the same on all ranks, or a promise is broken. */
uint16_t tp_cuda_window_place(const struct tp_exec_call *call);
/* struct tp_reduce as kernels get it. */
void tp_cuda_fill_reduce(const struct tp_exec_call *call, struct tp_dev_reduce *out);
/* Launches one of our kernels and counts it. */
ncclResult_t tp_cuda_exec_run(struct tp_cuda_exec *exec, CUstream stream, CUfunction function, unsigned blocks, unsigned threads, void *args);
/* The same with so many bytes of dynamic shared memory. */
ncclResult_t tp_cuda_exec_run_shared(struct tp_cuda_exec *exec, CUstream stream, CUfunction function, unsigned blocks, unsigned threads, unsigned shared,
	void *args);

/* ---- memory.c ---- */
/* Device memory that lives as long as the executor, zeroed, 128-byte aligned. */
ncclResult_t tp_cuda_take_memory(struct tp_cuda_exec *exec, size_t bytes, const char *what, uint64_t *out);
/* Under way; there once tp_cuda_upload_wait returns. Both may be called while the calling thread captures and while kernels spin. */
ncclResult_t tp_cuda_upload(struct tp_cuda_exec *exec, uint64_t to, const void *from, size_t bytes);
ncclResult_t tp_cuda_upload_wait(struct tp_cuda_exec *exec);
void tp_cuda_free_memory(struct tp_cuda_exec *exec);

/* ---- links.c ---- */
/* This rank's end of a link, as the device has it: made (and uploaded, not waited for) at first use. The ends of one (class, from,
 * to) lie one after the other, by channel. */
ncclResult_t tp_cuda_link_end(struct tp_cuda_exec *exec, int channel, int lane_class, int from, int to, uint64_t *out);
/* May an end that there is be lent registered buffers? */
bool tp_cuda_link_lends(const struct tp_cuda_exec *exec, int channel, int lane_class, int from, int to);
/* What kernels get of such a buffer: the number of its entry, counted from 1, and its range; 0: it is none. */
uint32_t tp_cuda_find_loan(const struct tp_cuda_exec *exec, const void *buffer, size_t bytes, struct tp_link_loan *range);
/* A ring between two lanes of a channel; its ends are free between operations, so all plans use the same ones. */
ncclResult_t tp_cuda_local_ends(struct tp_cuda_exec *exec, int channel, bool token, int number, uint64_t *sender, uint64_t *receiver);
enum { TP_CUDA_LOCAL_BYTES = 64 << 10 };        /* chunks of plans with such rings are no larger */

/* ---- program.c ---- */
struct tp_cuda_plan {
	struct tp_cuda_plan *next;
	const struct tp_plan *plan;
	struct tp_plan_spec spec;
	const struct tp_program *source;
	bool reduces;
	bool lends;                                 /* some step may lend what it sends */
	uint64_t programs;                          /* the device's address */
	uint32_t stride;
	size_t chunk_limit;                         /* what slots, rings and scratch memory hold: agreed */
	size_t ring_limit;                          /* rings in slots of their own: for calls that allow all that other slots hold; 0: none */
	/* The geometry of the last call, for others of the same size. */
	size_t fit_block, fit_chunk, fit_line;
	struct tp_dev_call fit;
};
ncclResult_t tp_cuda_compile(struct tp_cuda_exec *exec, const struct tp_plan *plan, struct tp_cuda_plan **out);
struct tp_cuda_plan *tp_cuda_find_plan(struct tp_cuda_exec *exec, const struct tp_plan *plan);      /* NULL: never prepared */

/* ---- transfers.c ---- */
ncclResult_t tp_cuda_transfers_launch(struct tp_cuda_exec *exec, CUstream stream, const struct tp_exec_call *call);
/* A cut of them, in order: one launch. */
struct tp_cuda_ordered { uint64_t cut; int index, from; };  /* from: of a self-receive, the number of its send; -1: another's */
uint32_t tp_cuda_transfer_distance(const struct tp_cuda_exec *exec, const struct tp_exec_transfer *t);
/* Of the largest launch. */
int tp_cuda_transfers_blocks(const struct tp_cuda_exec *exec, const struct tp_exec_call *call);

/* ---- offers.c ---- */
/* Of a buffer that a peer may store to; index 0: it isn't registered. */
struct tp_dev_offer tp_cuda_find_offer(const struct tp_cuda_exec *exec, const void *buffer, size_t bytes);
void tp_cuda_pipe_offers(const struct tp_cuda_exec *exec, const struct tp_exec_call *call, struct tp_pipe_launch *pipes);

/* ---- streams.c ---- */
size_t tp_cuda_streams_region_bytes(int nlocal, int nchannels);
/* After the agreement on fused kernels. */
ncclResult_t tp_cuda_streams_init(struct tp_cuda_exec *exec);
/* Sends and receives of so many bytes and more go through pipes. */
uint64_t tp_cuda_streams_pipes_from(const struct tp_fused *fused);
ncclResult_t tp_cuda_streams_launch(struct tp_cuda_exec *exec, CUstream stream, const struct tp_exec_call *call, const struct tp_cuda_ordered *order,
	int count);
/* Does any of them go through pipes? */
bool tp_cuda_streams_are_piped(const struct tp_cuda_exec *exec, const struct tp_exec_call *call);
int tp_cuda_streams_blocks(const struct tp_cuda_exec *exec, const struct tp_exec_call *call);
/* A collective that is nothing but sends and receives, as such: false: it isn't, or other kernels are better. transfers: 2 * nranks. */
bool tp_cuda_streams_take(const struct tp_cuda_exec *exec, const struct tp_exec_call *call, struct tp_exec_transfer *transfers,
	struct tp_exec_call *out);

#endif

/* Fused kernels: a plan whose whole is a well-known shape, run between ranks that load and store each other's memory, with
 * the flags in the data. What the host passes to them, and the host's side: which call runs as which kernel, and how the
 * region is laid out. Read by C and CUDA C.
 *
 * The region (tp_links_region) is divided among blocks: block b of every rank talks with the blocks b of its peers and with
 * nobody else. Of a block's share, every peer has its own part:
 *   heads  two lines (by the epoch's parity) that say what call the peer's block is in: {tag, flag, bytes, flag};
 *   gates  a counter for barriers;
 *   LL     slots of 16-byte lines, {data, flag, data, flag};
 *   LL128  slots of 128-byte lines, 120 bytes of data and two flags.
 * Slots exist for two phases (scatter, gather) by two parities. Nothing but lines of one protocol is ever written to a slot, so
 * a flag is never taken for data nor data for a flag. Of a share, in this order: heads, gates, LL, LL128. */
#ifndef TP_EXEC_CUDA_FUSED_H
#define TP_EXEC_CUDA_FUSED_H

#include "exec/cuda/device.h"

/* Kernels: tp_ll_<type>_<op>, tp_ll128_<type>_<op> (all-reduce in one or two shots, reduce-scatter, reduce), tp_ll_copy,
 * tp_ll128_copy (all-gather, all-to-all, broadcast, gather, scatter), tp_window_<type>_<op> (all-reduce and reduce-scatter of
 * memory that all ranks have mapped), tp_two_step_<type>_<op> and tp_two_step_copy (reduce and broadcast by way of all others, on
 * lines of 128 bytes). */
enum tp_fused_kind { TP_FUSED_LL, TP_FUSED_LL128, TP_FUSED_WINDOW, TP_FUSED_TWO_STEP, TP_FUSED_PIPE, TP_FUSED_PUSH /* pipes.h */, TP_FUSED_KINDS };

enum { TP_FUSED_PHASES = 2, TP_FUSED_PARITIES = 2, TP_FUSED_INLINE = 8 };

/* Who sends to whom. */
enum tp_fused_pattern { TP_FUSED_ALL, TP_FUSED_FROM_ROOT, TP_FUSED_TO_ROOT };

/* A block's share of a region, in bytes from its beginning; each block has `share` bytes. All zero at init. */
struct tp_fused_layout {
	uint32_t share;
	uint32_t heads, gates;
	uint32_t lines[2];                  /* LL, LL128: the slots of (phase, parity, peer) */
	uint32_t slot[2];                   /* bytes of one slot */
};

/* Arguments of every fused kernel. Each rank has a slice for each rank: bytes at input + rank * in_stride. */
struct tp_fused_args {
	uint64_t comm;                              /* struct tp_dev_comm */
	uint64_t region[TP_FUSED_INLINE];           /* of the first ranks; the others' are in comm */
	uint64_t input, output;
	uint32_t slice_bytes, total_bytes;          /* of a slice; all slices end at total_bytes */
	uint32_t in_stride, out_stride;
	/* Of a slice: each block has units_each, the first units_more one more; what needs divisions is computed by the host. */
	uint32_t units_each, units_more;
	uint32_t units_a_round;                     /* what a slot holds */
	uint32_t rounds[2];                         /* of blocks with one more, of the others */
	struct tp_fused_layout layout;
	uint32_t tag;
	int16_t rank, nranks, root;
	uint8_t pattern;                            /* enum tp_fused_pattern */
	uint8_t gathers;                            /* two-shot: what was reduced goes to all */
	uint8_t owners;                             /* two steps: slices belong to all ranks but the root, in their order */
	uint8_t aligned;                            /* buffers and strides are, to 16 bytes (LL), to 8 (LL128); windows: the output, to 16 */
	uint8_t gives_way;                          /* peers run on the same GPU */
	uint8_t counts;                             /* somebody wants to know when kernels are done */
	struct tp_dev_reduce reduce;
	/* TP_FUSED_WINDOW: where this rank's kernels see each rank's windows (uint64_t [nranks] in device memory), and how far in the
	 * buffers lie. */
	uint64_t in_bases, in_offset, out_bases, out_offset;
	/* What ranks that meet must agree on: a hash of where in which windows the buffers lie, and one of the call. */
	uint16_t place, call;
	uint32_t pad;
};

#ifndef __cplusplus
#include "exec/exec.h"
#include "exec/cuda/pipes.h"
#include "gpu/gpu.h"

/* Each protocol up to how many bytes, counted as what a rank sends to all peers together (of user data, both phases): LL up to `ll`, then
 * LL128, where lines of 128 bytes are allowed, up to `ll128`; what is larger isn't fused. Where there are pipes (pipes.h) they move what has
 * `pipes` bytes or more. The same on all ranks. */
enum tp_fused_class { TP_FUSED_ONE_SHOT, TP_FUSED_TWO_SHOT, TP_FUSED_GATHER, TP_FUSED_SCATTER, TP_FUSED_PAIRS, TP_FUSED_ROOTED, TP_FUSED_OWNERS,
	TP_FUSED_CLASSES };
struct tp_fused_limit { uint64_t ll, ll128, pipes; };
struct tp_fused_table {
	struct tp_fused_limit limits[TP_FUSED_CLASSES];
	uint32_t threads[2];                        /* a block's, LL and LL128: more blocks only once these are busy */
	uint32_t max_blocks;
	uint32_t allows_128;                        /* lines of 128 bytes arrive whole here */
	uint64_t window;                            /* two-shot all-reduces and reduce-scatters of windows: from so many bytes on where they lie */
	uint64_t copies;                            /* all-gather and all-to-all into windows: by copy engines from so many bytes on that a rank sends, */
	uint64_t copies_rooted;                     /* broadcasts from so many bytes of the message on */
	uint64_t owners;                            /* broadcast and reduce of three ranks and more: from so many bytes on in two steps */
	uint64_t stream;                            /* gather and scatter: blocks from so many bytes on as sends and receives */
	uint64_t offer;                             /* what a rank sends another: from so many bytes on registered buffers are offered */
	uint64_t transfers;                         /* sends and receives: from so many bytes on through pipes */
	uint64_t reduce;                            /* reduce in one step: from so many bytes on through pipes */
	uint64_t cut;                               /* bytes of a launch of lines or of windows, counted over all ranks: what is larger takes several */
	uint64_t pipes;                             /* whether there are any: 0: no; 1: over NVLink, where GPUs have bulk copies; 2: yes */
};

/* What kind of machine a communicator is on, for the table; the same on all ranks, or nothing is known of the GPU. */
enum tp_fused_join { TP_FUSED_NVLINK, TP_FUSED_PCIE /* whatever is no NVLink */, TP_FUSED_SHARED /* ranks share a GPU */ };
struct tp_fused_machine {
	char gpu[64];                               /* its name; empty: not known */
	int32_t major, minor;                       /* compute capability */
	int32_t nranks;
	uint32_t join;                              /* enum tp_fused_join */
};

/* What of a communicator decides; the same on all ranks but for the addresses. */
struct tp_fused {
	bool usable;                                /* all ranks on one host, and each sees all regions */
	bool shared_gpu, counts, no_ctas;
	int rank, nranks;
	uint64_t comm;
	uint64_t region[TP_DEV_MAX_LOCAL];
	struct tp_fused_layout layout;
	struct tp_fused_table table;
	struct tp_pipes pipes;
	char why_not[96];                           /* where !usable */
};

/* What a call is to fused kernels. */
struct tp_fused_shape {
	enum tp_fused_class class;
	const char *name[3];                        /* by LL, LL128, pipes */
	enum tp_fused_pattern pattern;
	bool reduces, gathers, owners;
	size_t slice, total, in_stride, out_stride, sends;
};
enum { TP_FUSED_BY_PIPES = 2 };                 /* beside LL and LL128 */
/* False: they don't run it. protocol: 0, 1, TP_FUSED_BY_PIPES. */
bool tp_fused_find(const struct tp_fused *fused, const struct tp_exec_call *call, struct tp_fused_shape *shape, int *protocol);

struct tp_fused_options {
	const struct tp_gpu *gpu;
	int nchannels;                              /* blocks at most */
	bool shared_gpu;
	bool counts;
	enum tp_cuda_pipes pipes;                   /* that there is room for */
	bool no_ctas;                               /* copy engines wherever they can */
	uint64_t comm;                              /* struct tp_dev_comm, the device's address */
};

void tp_fused_lay_out(int nlocal, int nchannels, struct tp_fused_layout *out);
/* Bytes of a rank's region. */
size_t tp_fused_region_bytes(int nlocal, int nchannels);
/* Collective over the communicator: all ranks agree whether, and on the table. */
ncclResult_t tp_fused_init(struct tp_boot *boot, struct tp_links *links, const struct tp_fused_options *options, struct tp_fused *out);

struct tp_fused_launch {
	enum tp_fused_kind kind;
	bool reduces;                               /* the kernel is of call->reduce's type and operation; else the kind's copying one */
	unsigned blocks, threads;
	const char *name;                           /* "ONE_SHOT/LL" */
	size_t bytes;                               /* of each block, from `from` on */
	struct tp_fused_args args;
};
/* How a call's blocks run as a fused kernel, from byte `from` on as far as one goes; false: they don't. A function of what all ranks agree on,
 * addresses aside. */
bool tp_fused_fit(const struct tp_fused *fused, const struct tp_exec_call *call, size_t from, struct tp_fused_launch *out);
/* Of a launch on lines from the first byte on, the same for other buffers. */
static inline void tp_fused_set_buffers(struct tp_fused_launch *launch, const void *input, void *output)
{
	struct tp_fused_args *args = &launch->args;
	args->input = (uint64_t)(uintptr_t)input;
	args->output = (uint64_t)(uintptr_t)output;
	args->aligned = ((args->input | args->output | args->in_stride | args->out_stride) & (launch->kind == TP_FUSED_LL ? 15 : 7)) == 0;
}
/* The same for buffers in memory that all ranks have mapped, with the same offsets on all ranks; bases: as in struct tp_fused_args. */
struct tp_fused_windows { uint64_t in_bases, in_offset, out_bases, out_offset; uint16_t place; };
bool tp_fused_fit_windows(const struct tp_fused *fused, const struct tp_exec_call *call, const struct tp_fused_windows *windows, size_t from,
	struct tp_fused_launch *out);
/* Is it for the kernels of windows, where its buffers lie in such? */
bool tp_fused_has_windows(const struct tp_fused *fused, enum tp_coll coll, size_t block_bytes);
/* Is it for copy engines, where its output lies in a window? */
bool tp_fused_copies(const struct tp_fused *fused, enum tp_coll coll, size_t block_bytes);
/* Which algorithm these kernels want for a message, before there is a plan; false: they have no opinion. */
bool tp_fused_suggest(const struct tp_fused *fused, enum tp_coll coll, size_t block_bytes, enum tp_algo *out);

/* ---- table.c ---- */
/* What goes through pipes by this table. */
enum tp_cuda_pipes tp_fused_table_pipes(const struct tp_fused_table *table);
/* What is built in for such a machine. */
void tp_fused_defaults(const struct tp_fused_machine *machine, struct tp_fused_table *out);
/* TELPHER_CUDA_TABLE over what is there. */
ncclResult_t tp_fused_read_table(const struct tp_fused_machine *machine, struct tp_fused_table *table);
const char *tp_fused_join_name(enum tp_fused_join join);
#endif
#endif

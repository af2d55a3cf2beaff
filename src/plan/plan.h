/* The plan: a collective written down as data, one small program a rank, made by a generator and run by every executor.
 *
 * A plan is a network of sequential programs (lanes) that block only on first-in-first-out links. It says nothing of the
 * message's size, the element type or the kind of memory; a geometry fits it to a message when it is launched. It depends
 * only on what all ranks agree on: (collective, algorithm, layout, root, channels).
 *
 * Blocks and pieces. A buffer holds `blocks` equal blocks of block_bytes (geometry): all-reduce, broadcast, reduce 1; the
 * OUTPUT of all-gather, gather and all-to-all and the INPUT of reduce-scatter, scatter and all-to-all nranks, block r being
 * rank r's. In one round a block gives `pieces` pieces; chunk index = block * pieces + piece. Round k of piece p of a block
 * lies at block * block_bytes + part_offset(channel) + (k * pieces + p) * chunk_bytes; the last round's chunks are smaller
 * and may be empty. SCRATCH has scratch_chunks chunks a channel, of chunk_bytes each, the same in every round.
 *
 * Steps. A step takes its sources (in order: the order of the reduction), makes one value of them (the first, or their
 * reduction), and gives it to all its destinations. It waits until every source link has a chunk and every destination
 * link a free slot. An empty chunk still travels.
 *
 * References. A destination link operand marked by_ref may travel as a reference to the buffer chunk in the same step
 * (its single buffer source, or its buffer destination) instead of a copy: the receiver reads that memory later. The
 * generator declares that nothing overwrites the chunk before it was read; the checker proves it (vector clocks). An
 * executor ends an operation only when all its references were read. Which chunk: the buffer source, where the step has no
 * other source of data and doesn't reduce; else the first buffer destination.
 *
 * In place means, as NCCL has it: INPUT is OUTPUT (all-reduce, broadcast, reduce), INPUT is block `rank` of OUTPUT
 * (all-gather; gather at the root), OUTPUT is block `rank` of INPUT (reduce-scatter; scatter at the root). All-to-all has
 * no in-place form. Where the root alone has an INPUT (broadcast, scatter) or an OUTPUT (reduce, gather), no program of
 * another rank touches it. INPUT is never written, but for what in place makes of it. A source that is INPUT always still
 * holds this rank's own contribution when it is read, so pre-scaling there scales each contribution once. */
#ifndef TP_PLAN_PLAN_H
#define TP_PLAN_PLAN_H

#include "base/base.h"

enum tp_coll {
	TP_ALL_REDUCE, TP_ALL_GATHER, TP_REDUCE_SCATTER, TP_BROADCAST, TP_REDUCE, TP_ALL_TO_ALL, TP_GATHER, TP_SCATTER,
	TP_SEND_RECV,               /* a group of sends and receives; made by tp_plan_p2p, never chosen */
	TP_NCOLLS
};

enum tp_algo {
	TP_ALGO_RING, TP_ALGO_TREE, TP_ALGO_HALVING_DOUBLING, TP_ALGO_PAT,
	TP_ALGO_ONE_SHOT,           /* everyone sends all to everyone; one step of latency */
	TP_ALGO_TWO_SHOT,           /* reduce-scatter then all-gather, all pairs, three lanes */
	TP_ALGO_DIRECT,             /* all pairs: all-gather, reduce-scatter, broadcast, gather, scatter, all-to-all pairwise */
	TP_ALGO_BRUCK,              /* all-to-all in log n steps */
	TP_ALGO_HIERARCHICAL,       /* inside a domain, across domains, inside: composed of the others */
	TP_NALGOS
};

const char *tp_coll_name(enum tp_coll coll);    /* "AllReduce" */
const char *tp_algo_name(enum tp_algo algo);    /* "RING", as NCCL_ALGO spells it; ours: "HALVING_DOUBLING", "ONE_SHOT" … */

/* Who is where; nothing else about the machine. Domains are numbered in order of their lowest rank; places inside a domain
 * in order of rank. Agreed by all ranks. */
struct tp_layout {
	int nranks, ndomains;
	const int *domain;          /* [nranks] */
	const int *place;           /* [nranks] */
	const int *domain_size;     /* [ndomains] */
	int norders;                /* 0: rings go by domain and place … */
	const int *orders;          /* … [norders * nranks]: channel c's go in the order of ranks c % norders, the domains one after the other as they are numbered */
};
/* Makes a layout from each rank's domain (numbered anyhow); one allocation, freed by tp_layout_free. */
ncclResult_t tp_layout_create(int nranks, const int *domain_of_rank, struct tp_layout **out);
/* Orders for rings, copied; norders 0: none. ncclInvalidArgument where one isn't an order of the ranks, domain by domain. */
ncclResult_t tp_layout_set_orders(struct tp_layout *layout, int norders, const int *orders);
void tp_layout_free(struct tp_layout *layout);

enum tp_where { TP_LINK, TP_INPUT, TP_OUTPUT, TP_SCRATCH };

struct tp_operand {
	uint8_t where;              /* enum tp_where */
	uint8_t by_ref;             /* destination links: see above */
	int32_t index;              /* TP_LINK: into the program's links; else a chunk index */
};

enum tp_step_flag {
	TP_STEP_REDUCE = 1,         /* the value is the reduction of the sources, in their order */
	TP_STEP_FINAL = 2           /* the reduction is complete here: the operator's post-scaling (avg) is applied */
};

struct tp_step {
	uint16_t flags;             /* enum tp_step_flag */
	uint16_t nsrc, ndst;
	uint32_t first;             /* operands[first .. first + nsrc) are sources, the next ndst destinations */
};

struct tp_lane {
	uint32_t first_step, nsteps;
	int32_t transfer;           /* TP_SEND_RECV: which transfer this lane moves (its buffer and size); else -1 */
	uint32_t after;             /* TP_SEND_RECV: number + 1 of the lane that must have done all its rounds before this one
	                               starts, as both use one link; 0: none */
};

#define TP_LINK_CLASSES 4       /* links between an ordered pair of ranks on one channel: three for collectives' lanes … */
#define TP_LINK_P2P 3           /* … and one for send/recv, so that neither meets the other's chunks */

struct tp_plan_link {
	int32_t from, to;           /* ranks; from == to: joins two lanes of this rank */
	uint8_t lane_class;         /* < TP_LINK_CLASSES; local links: any number that is unique in the program */
	uint8_t token;              /* local links only: carries order, no data */
};

/* One rank's program on one channel. Operands of links the rank sends on appear as destinations, the others as sources. */
struct tp_program {
	int rank, channel;
	uint32_t nlanes, nsteps, noperands, nlinks;
	struct tp_lane *lanes;
	struct tp_step *steps;
	struct tp_operand *operands;
	struct tp_plan_link *links;
};

/* A plan whose whole is a well-known shape may be run by an executor's fused code; the shape is declared here and the
 * checker compares the program with what the fused code does. */
enum tp_shape {
	TP_SHAPE_STEPS, TP_SHAPE_ONE_SHOT, TP_SHAPE_TWO_SHOT,
	TP_SHAPE_DIRECT             /* one piece, links of class 0; steps that give a buffer chunk, then (in the order of the lanes)
	                               steps that take into OUTPUT: one may be run after the other */
};

struct tp_plan_spec {
	enum tp_coll coll;
	enum tp_algo algo;
	int root;                   /* -1 where the collective has none */
	int nchannels;
	const struct tp_layout *layout;
};

struct tp_plan {
	struct tp_plan_spec spec;
	enum tp_shape shape;
	uint32_t pieces;            /* of a block, in a round */
	uint32_t input_blocks, output_blocks;
	uint32_t scratch_chunks;
	uint32_t nprograms;         /* one rank's: nchannels; all: nranks * nchannels, [rank * nchannels + channel] */
	struct tp_program *programs;
};

/* Can this algorithm do this collective on this layout? NULL, or the reason why not, as a sentence. */
const char *tp_plan_refuses(const struct tp_plan_spec *spec);
/* The plan with the program of one rank, or (rank -1) of all. ncclInvalidUsage with the reason where refused. */
ncclResult_t tp_plan_create(const struct tp_plan_spec *spec, int rank, struct tp_plan **out);
void tp_plan_free(struct tp_plan *plan);
/* Prints the plan for people, a line a step. Caller frees. */
char *tp_plan_text(const struct tp_plan *plan);

/* A group's sends and receives of one rank, as a program: a lane a (peer, direction), in rounds of rank + d and rank - d;
 * several transfers with one peer follow each other; self-sends become copies. Lane l moves transfers[lane.transfer].
 * The lanes: for d = 0, 1 … one for each send to rank + d and each receive from rank - d, a single step each: INPUT 0 to
 * the link (class TP_LINK_P2P, by reference), or the link to OUTPUT 0; INPUT and OUTPUT are the transfer's buffer. Lanes
 * differ in their number of rounds, so those that share a link are ordered by `after`. A self-send is a sending and a
 * receiving lane joined by a local link, whose chunks travel by reference too: one copy. spec.layout is NULL. */
struct tp_transfer { int peer; bool is_send; };
ncclResult_t tp_plan_p2p(int rank, int nranks, const struct tp_transfer *transfers, int ntransfers, struct tp_plan **out);
/* One block from INPUT of `from` to OUTPUT of `to`, over a link of channel 0 that collectives use: the program of rank, which is one of the two. */
ncclResult_t tp_plan_pair(int rank, int from, int to, int lane_class, struct tp_plan **out);

/* Fits a plan to a message. All ranks compute the same. */
struct tp_geometry {
	size_t block_bytes;         /* of one block, all channels */
	size_t chunk_bytes;         /* of all rounds but the last; a multiple of line_bytes */
	size_t last_chunk_bytes;
	size_t part_offset, part_bytes;     /* this channel's part of a block */
	uint32_t nrounds;           /* at least 1, even for zero bytes */
};
/* chunk_limit: the largest chunk allowed (slot size, or the chooser's). Rounds are evened out. */
void tp_geometry_fit(const struct tp_plan *plan, size_t block_bytes, size_t chunk_limit, size_t line_bytes, int channel,
	struct tp_geometry *out);
/* Offset in its buffer and size of a chunk in a round (size 0: empty). */
static inline size_t tp_geometry_chunk(const struct tp_geometry *g, uint32_t pieces, uint32_t round, int32_t chunk,
	size_t *offset)
{
	size_t block = (uint32_t)chunk / pieces, piece = (uint32_t)chunk % pieces;
	size_t size = round + 1 == g->nrounds ? g->last_chunk_bytes : g->chunk_bytes;
	size_t at = (size_t)round * pieces * g->chunk_bytes + piece * size;
	*offset = block * g->block_bytes + g->part_offset + at;
	if (at >= g->part_bytes) return 0;
	return size < g->part_bytes - at ? size : g->part_bytes - at;
}

/* The checker (check.c): runs the plan of all ranks on sets of contributions. */
struct tp_check_options {
	uint32_t slots;             /* capacity of each link; executors use 2 at least */
	uint32_t rounds;            /* 3 shows pipelining */
	bool in_place;
	bool by_ref;                /* references travel as such where declared */
	bool ends_early;            /* a rank goes on without waiting until its references were read (as no executor may) */
};
enum tp_check_fault {
	TP_CHECK_OK, TP_CHECK_DEADLOCK, TP_CHECK_WRONG_RESULT, TP_CHECK_TWICE, TP_CHECK_ORDER_DIFFERS, TP_CHECK_LEFT_FULL,
	TP_CHECK_RACE, TP_CHECK_UNDEFINED_READ, TP_CHECK_MALFORMED, TP_CHECK_SHAPE, TP_CHECK_NOT_FINAL
};
struct tp_check_report {
	enum tp_check_fault fault;
	int rank, channel, lane, step, round;
	char text[256];             /* the fault for people */
	uint64_t chunks_sent_max, chunks_sent_total, chunks_crossing;   /* a round: busiest rank, all, over domain borders */
	uint32_t depth;             /* longest chain of dependent steps of one round */
};
/* ncclSuccess with report->fault == TP_CHECK_OK, or ncclInternalError with the report filled. Needs all ranks' programs. */
ncclResult_t tp_check_plan(const struct tp_plan *plan, const struct tp_check_options *options, struct tp_check_report *report);
/* The same with several plans one after the other on the same links, nobody waiting for anybody in between. */
ncclResult_t tp_check_sequence(const struct tp_plan *const *plans, int nplans, const struct tp_check_options *options,
	struct tp_check_report *report);

/* The cost model and the chooser (cost.c, choose.c). Constants are agreed by all ranks at init. */
struct tp_cost_link { double latency_us, us_per_byte, step_us; };
struct tp_cost_model {
	struct tp_cost_link inside, across;     /* a domain; between domains */
	double reduce_us_per_byte, copy_us_per_byte;
	double call_us;
	int cores_per_domain;                   /* ranks beyond it share cores */
	size_t inline_bytes;                    /* chunks above travel by reference inside a domain, where allowed */
	size_t slot_bytes_inside, slot_bytes_across;
	bool by_ref_inside;
	double ref_us;              /* what a chunk by reference costs its reader besides its bytes */
	double switch_us;           /* until another rank that shares the core has had its turn */
	size_t stream_bytes;        /* broadcasts from here on go through slots where ranks have their own cores: two copy, not one */
	double scale[TP_NALGOS];    /* predicted times are multiplied by it: what a table corrects by measurement */
};
void tp_cost_defaults(struct tp_cost_model *model);     /* a small machine, shared memory inside, TCP across */
void tp_cost_gpu_defaults(struct tp_cost_model *model); /* GPUs with NVLink inside, TCP across; bytes of all channels at once */
/* The defaults, corrected by the table that TELPHER_TUNE_FILE names. Ranks may see different files: the communicator
 * agrees on one record. */
ncclResult_t tp_cost_load(struct tp_cost_model *model);
ncclResult_t tp_cost_load_gpu(struct tp_cost_model *model);     /* the same from the GPUs' defaults */
/* A table: a line "name value" each, # begins a comment; names are the model's, "inside.latency_us", "scale.RING". Values
 * that aren't named stay. file: for messages. The model changes only on success. */
ncclResult_t tp_cost_parse_table(const char *text, size_t bytes, const char *file, struct tp_cost_model *model);
/* Did a table give the links' times, inside domains or across? (Figures that equal the defaults are nobody's measurement: the defaults print as a
 * table, too.) */
bool tp_cost_is_measured(const struct tp_cost_model *model, const struct tp_cost_model *defaults, bool across);
char *tp_cost_table_text(const struct tp_cost_model *model);    /* the model as such a table; the caller frees it */
/* The model as ranks compare it: no padding, the same bytes for the same model. */
#define TP_COST_VALUES 26
struct tp_cost_record { uint32_t version, nvalues; double values[TP_COST_VALUES]; };
void tp_cost_pack(const struct tp_cost_model *model, struct tp_cost_record *out);

struct tp_candidate {
	enum tp_algo algo;
	size_t chunk_bytes;
	bool by_ref;                /* chunks above inline_bytes travel by reference inside a domain */
	double us;                  /* predicted; negative: not usable */
	const char *why_not;        /* NULL where usable */
};
struct tp_choice {
	enum tp_algo algo;
	size_t chunk_bytes;
	size_t ref_bytes;           /* chunks of at least so much go by reference: for tp_exec_call */
	int nchannels;
	struct tp_candidate candidates[TP_NALGOS];
};
/* NCCL_ALGO / NCCL_PROTO restrict the candidates (syntax "[func:]algo,…;…", ^ negates); their text is an argument so that
 * all ranks can agree on it. bytes: of a block. staged: references are not allowed (pre-scaled operators). */
ncclResult_t tp_choose(const struct tp_layout *layout, enum tp_coll coll, int root, size_t block_bytes, bool staged,
	const struct tp_cost_model *model, const char *algo_filter, struct tp_choice *out);
/* The same with a model of its own for each algorithm (what the wires make of it), and the largest chunk that it may have; 0: the model's limit. */
struct tp_choose_models { const struct tp_cost_model *of[TP_NALGOS]; size_t widest[TP_NALGOS]; };
ncclResult_t tp_choose_by(const struct tp_layout *layout, enum tp_coll coll, int root, size_t block_bytes, bool staged,
	const struct tp_choose_models *models, const char *algo_filter, struct tp_choice *out);
/* How many of a GPU communicator's `most` channels a message gets: lines that carry flags move 4 KB a channel in the time that a flag takes; bulk
 * data is worth another channel from 16 KB on. */
int tp_choose_channels(enum tp_algo algo, enum tp_coll coll, int nranks, size_t block_bytes, int most);
/* Is the filter readable, and what does it say that has no meaning here? Logs one INFO line for each known name that these
 * ranks don't have (NVLS, CollNet); an unknown name, function or form is ncclInvalidUsage. Once, at init. */
ncclResult_t tp_choose_check_algo(const char *algo_filter);
ncclResult_t tp_choose_check_proto(const char *proto_filter);   /* LL, LL128, Simple: known, and without effect here */
const char *tp_choose_algo_text(void);      /* NCCL_ALGO and NCCL_PROTO; NULL where unset */
const char *tp_choose_proto_text(void);
/* The predicted time of one plan for one message; negative where the plan can't be. */
double tp_cost_predict(const struct tp_plan_spec *spec, size_t block_bytes, size_t chunk_bytes, const struct tp_cost_model *model);
/* The model for one plan on a machine that is known: what the copies of its busiest rank take a byte of a block, and what crosses the border of
 * its busiest domain. 0: as the model has it. false: the plan can't be, and nothing changes. */
bool tp_cost_fit(const struct tp_plan_spec *spec, double inside_us_per_byte, double across_us_per_byte, struct tp_cost_model *model);
/* The same by running the very programs of all ranks against the clock of the model, step by step: slower (milliseconds),
 * knows nothing but the programs. For explaining and for tests of the predictions. */
ncclResult_t tp_cost_run(const struct tp_plan *plan, size_t block_bytes, size_t chunk_bytes, const struct tp_cost_model *model,
	double *us);

#endif

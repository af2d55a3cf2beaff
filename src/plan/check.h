/* The checker's own parts (internal to this folder): check.c sets up, check_run.c runs, check_memory.c watches buffers, check_form.c looks at
 * programs without running them, check_result.c knows what each collective must leave behind. */
#ifndef TP_PLAN_CHECK_H
#define TP_PLAN_CHECK_H

#include "plan/build.h"

/* A value on sets of contributions: input chunk `chunk` of round `round` of every rank in the set. Values never change. */
struct tp_check_value {
	uint64_t hash;              /* of the expression that made it */
	int32_t chunk;
	uint16_t round, op;
	int32_t rank;               /* a leaf: whose; else -1 */
	uint8_t final;
};

struct tp_check_read { int32_t lane; int16_t time; int16_t step; int32_t next; };

/* One chunk of a buffer in one round (of SCRATCH: in all rounds). */
struct tp_check_cell {
	uint32_t value;             /* 0: undefined */
	int32_t writer;             /* clock lane, -1: nobody yet */
	int32_t reads;              /* since the last write: index of a tp_check_read, -1: none */
	int16_t write_time, write_step;
	uint32_t depth;
};

struct tp_check_entry {             /* a chunk on a link */
	uint32_t value, depth;
	int32_t clock;              /* snapshot of the sender's clock */
	int32_t cell_rank, cell;    /* by reference: where it lies; -1: copied */
	uint16_t op;
	int16_t lane, step, round;  /* of the sender, for the report */
};

struct tp_check_link {
	int32_t from, to;
	uint8_t lane_class, token;
	int32_t sender, receiver;   /* lane runs that wait; -1: none */
	uint32_t first, count;
	struct tp_check_entry *entries;     /* [slots] */
};

/* A source of the step at hand: its value, and for a chunk by reference where it lies. */
struct tp_check_source { uint32_t value; const struct tp_operand *operand; struct tp_check_entry entry; };

struct tp_check_lane {
	const struct tp_program *program;
	const struct tp_lane *lane;
	int32_t *links;             /* of the program: index of a tp_check_link */
	int32_t rank, number;       /* of the rank's lanes */
	int32_t clock_lane;         /* this lane's entry in clocks */
	int32_t op;
	uint32_t step, round, nrounds, ready;
	bool done, queued;
	int16_t *clock;
};

struct tp_check_rank {
	uint32_t op;                /* that it is in; nplans: finished */
	int32_t clock_base;
	uint32_t lanes_left, refs_out;
	int16_t *end_clock;
};

/* The state of one rank in one operation. */
struct tp_check_memory {
	struct tp_check_cell *cells;
	bool ended;
	int32_t first_lane, nlanes;
	uint32_t output_cell, scratch_cell, ncells, first_leaf;
};

struct tp_check {
	const struct tp_plan *const *plans;
	int nplans, nranks, channel;
	const struct tp_check_options *options;
	struct tp_check_report *report;
	uint32_t words;             /* of a contribution set */

	struct tp_check_value *values;
	uint64_t *sets;
	uint32_t nvalues, values_room;

	struct tp_check_read *reads;
	int32_t nreads, reads_room, free_read;

	uint32_t nclock;            /* entries in a clock */
	int16_t *clocks;            /* snapshots */
	int32_t *clock_users, *free_clocks;
	int32_t nclocks, clocks_room, nfree_clocks;

	struct tp_check_link *links;
	int32_t nlinks, links_room;
	int32_t *link_table;        /* [class][from][to], link + 1 */

	struct tp_check_lane *lanes;
	int32_t nlanes;
	int32_t *program_links;     /* what the lanes' links point into */
	int16_t *lane_clocks;
	struct tp_check_entry *entries;
	struct tp_check_source *sources;    /* room for the widest step */
	int32_t *queue;
	int32_t queue_first, queue_count;
	struct tp_check_rank *ranks;
	struct tp_check_memory *memory;     /* [op * nranks + rank] */
	uint64_t *all_reduce_hash;          /* per op: [round * chunks + chunk] of the first rank that ended */
	size_t *hash_base;
	uint64_t *sent;                     /* per rank, in round 0 of plan 0 */
};

/* Fills the report; always returns ncclInternalError. lane and step may be -1. */
ncclResult_t tp_check_fail(struct tp_check *c, enum tp_check_fault fault, int rank, int lane, int step, int round,
	const char *format, ...) __attribute__((format(printf, 7, 8)));

ncclResult_t tp_check_run(struct tp_check *c);       /* check_run.c */

/* check_form.c: programs alone. */
ncclResult_t tp_check_form(struct tp_check *c, const struct tp_plan *plan);
ncclResult_t tp_check_shape(struct tp_check *c, const struct tp_plan *plan);

/* check_memory.c: cells and values. */
ncclResult_t tp_check_memory_begin(struct tp_check *c, int op, int rank);
/* The cell of a chunk; a plan of sends and receives has a chunk a transfer. */
uint32_t tp_check_cell_of(const struct tp_check *c, int op, int rank, const struct tp_check_lane *lane, enum tp_where where,
	int32_t index, uint32_t round);
ncclResult_t tp_check_read_cell(struct tp_check *c, const struct tp_check_lane *lane, int op, int rank, uint32_t cell,
	uint32_t *value, uint32_t *depth);
ncclResult_t tp_check_write_cell(struct tp_check *c, const struct tp_check_lane *lane, int op, uint32_t cell, uint32_t value,
	uint32_t depth);
/* Everything that a rank has read of another's memory must have happened before that rank goes on (no waiting for
 * references: options->ends_early). */
ncclResult_t tp_check_memory_end(struct tp_check *c, int op, int rank, const int16_t *end_clock);
uint32_t tp_check_new_value(struct tp_check *c, struct tp_check_value value);   /* its set is empty; 0: no memory */
static inline uint64_t *tp_check_set(const struct tp_check *c, uint32_t value) { return c->sets + (size_t)value * c->words; }
static inline uint64_t tp_check_mix(uint64_t h, uint64_t x)
{
	h = (h ^ x) * 0x9e3779b97f4a7c15u;
	return h ^ h >> 29;
}

/* check_result.c */
uint32_t tp_check_input_chunks(const struct tp_check *c, int op, int rank);
uint32_t tp_check_output_chunks(const struct tp_check *c, int op, int rank);
/* Is INPUT there, may OUTPUT be written, on this rank? */
bool tp_check_has_input(const struct tp_plan *plan, int rank);
bool tp_check_has_output(const struct tp_plan *plan, int rank);
ncclResult_t tp_check_result(struct tp_check *c, int op, int rank);
uint32_t tp_check_p2p_rounds(const struct tp_check *c, const struct tp_check_lane *lane);

#endif

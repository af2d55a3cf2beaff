/* What generators write programs with (internal to this folder).
 *
 * A generator makes one rank's program on one channel, in time proportional to its own steps, by opening lanes and steps
 * and adding operands: sources first, in the order of the reduction, then destinations. Links are named by the peer and
 * a lane class; the builder numbers them. Memory that runs out is remembered and reported once, at the end.
 *
 * A view relabels what a generator says: its ranks, lanes, link classes and chunks. Thus a plan is made of others: the
 * same generator that reduces over all ranks reduces over one domain. A chunk that a view maps to nothing drops the whole
 * step at both of its ends (both ends name the same block), so that a collective over m ranks can leave some blocks out. */
#ifndef TP_PLAN_BUILD_H
#define TP_PLAN_BUILD_H

#include "plan/plan.h"

struct tp_build_lane {
	struct tp_step *steps;          /* .first counts from this lane's operands */
	struct tp_operand *operands;
	uint32_t nsteps, steps_room, noperands, operands_room;
	int32_t transfer;
	uint32_t after;                 /* see struct tp_lane; lanes of such programs are never empty */
};

struct tp_build_view {
	const int *ranks;               /* the generator's rank to the plan's; NULL: the same */
	int lane_base, class_base;
	/* Where the generator's chunk lies; false: nowhere, the step is dropped. NULL: where it says. */
	bool (*chunk)(const void *arg, uint8_t where, int32_t index, struct tp_operand *out);
	const void *arg;
	bool partial;                   /* what is complete for the generator is not yet: TP_STEP_FINAL is left out */
	bool never_by_ref;
};

struct tp_builder {
	int rank, channel;              /* of the plan, not of the view */
	bool failed;                    /* out of memory; said already */
	bool drop;                      /* the open step is dropped when it ends */
	int open_lane;                  /* the lane of the open step, -1: none */
	int next_lane;                  /* of the view */
	struct tp_build_view view;
	struct tp_build_lane *lanes;
	uint32_t nlanes, lanes_room;
	struct tp_plan_link *links;
	uint32_t nlinks, links_room;
	uint32_t *link_hash;            /* links_room * 2 entries, link + 1 */
	int nlocal;
};

/* For generators. */
int tp_build_lane(struct tp_builder *b);                            /* opens the view's next lane */
void tp_build_step(struct tp_builder *b, int lane, unsigned flags); /* opens a step at the end of a lane */
void tp_build_take(struct tp_builder *b, int from, int lane_class);
void tp_build_read(struct tp_builder *b, enum tp_where where, int32_t chunk);
void tp_build_write(struct tp_builder *b, enum tp_where where, int32_t chunk);
void tp_build_give(struct tp_builder *b, int to, int lane_class, bool by_ref);
int tp_build_local(struct tp_builder *b, bool token);               /* a new link between two lanes of this rank */
void tp_build_take_local(struct tp_builder *b, int link);
void tp_build_give_local(struct tp_builder *b, int link);
void tp_build_give_local_ref(struct tp_builder *b, int link);

/* The ranks domain by domain, then by place: order[position] is a rank. Rings and trees follow it, so that few of their
 * links leave a domain. *at: this rank's position. The caller frees; NULL and failed where there is no memory. */
int *tp_build_order(struct tp_builder *b, const struct tp_layout *layout, int rank, int *at);
/* The same in the order that the layout has for rings on this channel, where it has one. */
int *tp_build_ring_order(struct tp_builder *b, const struct tp_layout *layout, int rank, int *at);

/* One algorithm. refuses and describe see nranks >= 2 (one rank is a copy, whatever the algorithm), a valid root and
 * nchannels >= 1. describe changes only what isn't the default: pieces 1, no scratch, TP_SHAPE_STEPS. */
struct tp_generator {
	const char *(*refuses)(const struct tp_plan_spec *spec);
	void (*describe)(const struct tp_plan_spec *spec, struct tp_plan *plan);
	void (*generate)(struct tp_builder *b, const struct tp_plan_spec *spec, int rank);
};
const struct tp_generator *tp_generator_of(enum tp_algo algo);      /* NULL: none. The table is in generators.c */
extern const struct tp_generator tp_generator_ring, tp_generator_tree, tp_generator_one_shot, tp_generator_two_shot,
	tp_generator_direct, tp_generator_hierarchical, tp_generator_halving_doubling, tp_generator_pat, tp_generator_bruck;

/* For plan.c and generators made of others. */
void tp_build_describe(const struct tp_plan_spec *spec, struct tp_plan *plan);
void tp_build_generate(struct tp_builder *b, const struct tp_plan_spec *spec, int rank);
/* The same, relabelled by the view; the builder's own view is put back afterwards. */
void tp_build_generate_view(struct tp_builder *b, const struct tp_plan_spec *spec, int rank, const struct tp_build_view *view);

/* Orders the lanes of stages, each from first_lane[stage] on, where one reads what an earlier one wrote (join.c). */
void tp_build_join(struct tp_builder *b, const int *first_lane, int nstages, uint32_t output_chunks, uint32_t scratch_chunks);
/* Room for one more in an array that the builder keeps; false, and failed, where there is no memory. */
bool tp_build_room(struct tp_builder *b, void **array, uint32_t count, uint32_t *room, size_t bytes);
/* What a hierarchical plan runs across domains. */
enum tp_algo tp_hierarchical_across(enum tp_coll coll, int ndomains);

void tp_build_begin(struct tp_builder *b, int rank, int channel);
ncclResult_t tp_build_end(struct tp_builder *b, struct tp_program *out);    /* frees the builder, also on failure */
void tp_program_free(struct tp_program *program);

static inline bool tp_coll_reduces(enum tp_coll coll)
{
	return coll == TP_ALL_REDUCE || coll == TP_REDUCE_SCATTER || coll == TP_REDUCE;
}
static inline bool tp_coll_has_root(enum tp_coll coll)
{
	return coll == TP_BROADCAST || coll == TP_REDUCE || coll == TP_GATHER || coll == TP_SCATTER;
}
static inline bool tp_coll_input_is_blocks(enum tp_coll coll)       /* a block for each rank */
{
	return coll == TP_REDUCE_SCATTER || coll == TP_ALL_TO_ALL || coll == TP_SCATTER;
}
static inline bool tp_coll_output_is_blocks(enum tp_coll coll)
{
	return coll == TP_ALL_GATHER || coll == TP_ALL_TO_ALL || coll == TP_GATHER;
}

#endif

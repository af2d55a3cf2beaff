/* Logarithmic gathers and reductions over a circle of ranks, for any number of them (internal to this folder).
 *
 * Everyone runs the same schedule, turned by its rank. A rank's piece x is piece (rank + x) mod n of the collective; x = 0
 * is its own. In stage j of a gather, rank r sends some of the pieces it has to r - skip[j], where they are the pieces
 * x + skip[j]: a tree over the offsets x, the same for each piece. A reduction is the gather backwards, from the last
 * stage to the first.
 *
 * Pieces of a stage are many, slots are few, and a rank that first sent all of one stage would wait for ever. So each
 * stage is a lane: lane j takes the pieces that stage j - 1 brought, and sends those that stage j needs. Pieces go from
 * lane to lane in the order in which they come over the links: lane j + 1 has, for each piece x of lane j in turn, the
 * piece x + skip[j] that comes over the link, then x itself. As all ranks do the same, whoever waits for a link waits for
 * something that its neighbour is about to do, and two slots a link are enough. */
#ifndef TP_PLAN_STAGES_H
#define TP_PLAN_STAGES_H

#include "plan/build.h"

#define TP_MAX_STAGES 31

enum tp_stages_kind {
	TP_STAGES_NEAR_FIRST,       /* skips 1 … n/2 (halves of n, rounded up): most data goes far */
	TP_STAGES_FAR_FIRST         /* skips n/2 … 1 (powers of two): most data stays near */
};

struct tp_stages {
	int nranks, nstages;
	enum tp_stages_kind kind;
	int skip[TP_MAX_STAGES];    /* in the order of a gather */
};

void tp_stages_make(enum tp_stages_kind kind, int nranks, struct tp_stages *out);
/* Does stage j send on the piece x (which the rank has by then)? */
bool tp_stages_sends(const struct tp_stages *s, int stage, int x);

/* A reduction that goes on as a gather: the step that completes the rank's own piece gives it to the gather's first link
 * and, where a later lane of the gather sends it too, a token to that lane. */
struct tp_stages_join {
	int gather_class;
	int token;                  /* local link; -1: none needed */
};
struct tp_stages_join tp_stages_join(struct tp_builder *b, const struct tp_stages *s, int gather_class);

/* Reduces all pieces to their owners; piece p is read from INPUT p, the rank's own goes into OUTPUT `into`. */
void tp_stages_reduce(struct tp_builder *b, const struct tp_stages *s, int rank, int lane_class, int into,
	const struct tp_stages_join *join);
/* Gathers all pieces in OUTPUT; without a join the rank's own is read from INPUT 0. */
void tp_stages_gather(struct tp_builder *b, const struct tp_stages *s, int rank, int lane_class,
	const struct tp_stages_join *join);

#endif

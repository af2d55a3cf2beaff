/* What the plan's tests share. */
#ifndef TP_TESTS_PLAN_HELPER_PLAN_H
#define TP_TESTS_PLAN_HELPER_PLAN_H

#include "plan/plan.h"
#include "sanitizers.h"

/* Ways of spreading n ranks over domains. */
enum layout_kind { ONE_DOMAIN, HALVES, INTERLEAVED, UNEVEN, LONELY /* the last rank */, ALONE /* each rank */, TWELVE, SCATTERED, NLAYOUTS };
struct tp_layout *plans_layout(int nranks, enum layout_kind kind);

/* Up to how many ranks plans are proven. Under a sanitizer the larger half proves nothing more. */
enum { PLANS_MOST_RANKS = SANITIZED ? 33 : 64 };

/* Fail the test where there is no such plan. All ranks' programs; freed with tp_plan_free. */
struct tp_plan *plans_make_on(enum tp_coll coll, enum tp_algo algo, const struct tp_layout *layout, int root, int nchannels);
struct tp_plan *plans_make(enum tp_coll coll, enum tp_algo algo, int nranks, enum layout_kind kind, int root, int nchannels);

/* Fails the test, with the report, unless the plan is right in place and not, with and without references. */
void plans_expect_right(const struct tp_plan *plan, uint32_t slots, uint32_t rounds);
/* The same with 2 slots, and the report; of many ranks only the hardest of these: by reference and in place. */
struct tp_check_report plans_check(const struct tp_plan *plan);
/* Checks the plan of 1 to PLANS_MOST_RANKS ranks, for generators that don't look at the layout. */
void plans_check_all(enum tp_coll coll, enum tp_algo algo);

/* One plan of a group's transfers, all ranks: transfers[rank][0 .. counts[rank]). */
struct tp_plan *plans_p2p(int nranks, struct tp_transfer *const *transfers, const int *counts);

/* A generator of random numbers that a seed reproduces. */
struct plans_random { uint64_t state; };
uint32_t plans_random(struct plans_random *r, uint32_t below);

/* For planted faults: the step of a rank's program (channel 0), and its operands. */
struct tp_step *plans_step(struct tp_plan *plan, int rank, int lane, int step);
struct tp_operand *plans_sources(struct tp_plan *plan, int rank, int lane, int step);
struct tp_operand *plans_destinations(struct tp_plan *plan, int rank, int lane, int step);
#endif

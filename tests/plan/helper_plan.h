/* What the plan's tests share. */
#ifndef TP_TESTS_PLAN_HELPER_PLAN_H
#define TP_TESTS_PLAN_HELPER_PLAN_H

#include "plan/plan.h"

/* Ways of spreading n ranks over domains. */
enum layout_kind { ONE_DOMAIN, HALVES, INTERLEAVED, UNEVEN, LONELY, TWELVE, SCATTERED, NLAYOUTS };
const char *plans_layout_name(enum layout_kind kind);
struct tp_layout *plans_layout(int nranks, enum layout_kind kind);

/* Fails the test where there is no such plan. All ranks' programs; freed with tp_plan_free. */
struct tp_plan *plans_make(enum tp_coll coll, enum tp_algo algo, int nranks, enum layout_kind kind, int root, int nchannels);

/* Fails the test, with the report, unless the plan is right in place and not, with and without references. */
void plans_expect_right(const struct tp_plan *plan, uint32_t slots, uint32_t rounds);

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

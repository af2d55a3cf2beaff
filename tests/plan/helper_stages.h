/* Shared by the tests of logarithmic generators and of the cost model. */
#ifndef HELPER_STAGES_H
#define HELPER_STAGES_H

#include "plan/plan.h"

/* Layouts of n ranks: one domain; two contiguous ones; a rank a domain; uneven (1, 2, 3 … ranks); dealt in turn to three. */
enum { HELPER_ONE, HELPER_HALVES, HELPER_ALONE, HELPER_UNEVEN, HELPER_DEALT, HELPER_NLAYOUTS };
struct tp_layout *helper_layout(int nranks, int kind);
struct tp_plan *helper_plan(enum tp_coll coll, enum tp_algo algo, int root, const struct tp_layout *layout);
/* Fails the test, with the report's text, unless the plan passes with 2 slots, copied and by reference, out of place and
 * (where there is such a form) in place; of more than 20 ranks only the hardest of these. */
struct tp_check_report helper_check(const struct tp_plan *plan);
/* The plan for 1 to `most` ranks, and for some numbers of ranks on every layout. */
void helper_check_all(enum tp_coll coll, enum tp_algo algo, int most);

#endif

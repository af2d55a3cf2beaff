/* NCCL_ALGO and NCCL_PROTO (internal to this folder): NCCL's own syntax, "[function:]name,name…;…", where ^ before the
 * names of an entry turns them into those that are left out, case doesn't matter, an entry without a function comes
 * first and is for all of them, and a later entry for the same function replaces an earlier one. */
#ifndef TP_PLAN_FILTER_H
#define TP_PLAN_FILTER_H

#include "plan/plan.h"

struct tp_filter {
	uint32_t algos[TP_NCOLLS];      /* bit a: algorithm a is allowed */
	bool named[TP_NCOLLS];          /* an entry names the collective */
	bool restricted;                /* there is an entry for all */
	uint32_t foreign;               /* bits of the names that are NCCL's and not ours, in foreign_names order */
};

/* NULL or empty text allows all. */
ncclResult_t tp_filter_parse_algo(const char *text, struct tp_filter *out);
ncclResult_t tp_filter_parse_proto(const char *text, uint32_t *named);     /* bits: LL, LL128, Simple */
const char *tp_filter_foreign_name(int bit);                               /* NULL past the last */
const char *tp_filter_foreign_why(int bit);

#endif

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <cmocka.h>

#include "plan/helper_stages.h"

struct tp_layout *helper_layout(int nranks, int kind)
{
	int *domain = malloc((size_t)nranks * sizeof(*domain)), at = 0, left = 1;
	struct tp_layout *layout = NULL;
	assert_non_null(domain);
	for (int r = 0; r < nranks; r++) {
		switch (kind) {
		case HELPER_ONE: domain[r] = 7; break;
		case HELPER_HALVES: domain[r] = r < nranks / 2; break;
		case HELPER_ALONE: domain[r] = r; break;
		case HELPER_DEALT: domain[r] = r % 3; break;
		default:
			domain[r] = at;
			if (!--left) left = ++at + 1;
			break;
		}
	}
	assert_int_equal(tp_layout_create(nranks, domain, &layout), ncclSuccess);
	free(domain);
	return layout;
}

struct tp_plan *helper_plan(enum tp_coll coll, enum tp_algo algo, int root, const struct tp_layout *layout)
{
	struct tp_plan_spec spec = { .coll = coll, .algo = algo, .root = root, .nchannels = 1, .layout = layout };
	struct tp_plan *plan = NULL;
	assert_int_equal(tp_plan_create(&spec, -1, &plan), ncclSuccess);
	return plan;
}

struct tp_check_report helper_check(const struct tp_plan *plan)
{
	struct tp_check_report report;
	int n = plan->spec.layout->nranks;
	bool in_place = plan->spec.coll != TP_ALL_TO_ALL;
	for (int mode = in_place ? 3 : 1; mode >= 0; mode--) {
		/* Large plans: by reference and in place, which is the hardest, and the plainest. */
		if (n > 20 && (mode == 1 || mode == 2) && in_place) continue;
		if (n > 40 && mode == 0) continue;
		struct tp_check_options options = { .slots = 2, .rounds = n > 20 ? 2 : 3, .by_ref = mode & 1, .in_place = mode & 2 };
		if (tp_check_plan(plan, &options, &report) != ncclSuccess)
			fail_msg("%s %s, %d ranks%s%s: %s", tp_coll_name(plan->spec.coll), tp_algo_name(plan->spec.algo), n,
				options.in_place ? ", in place" : "", options.by_ref ? ", by reference" : "", report.text);
	}
	return report;
}

static void check_one(enum tp_coll coll, enum tp_algo algo, int nranks, int kind)
{
	struct tp_layout *layout = helper_layout(nranks, kind);
	struct tp_plan *plan = helper_plan(coll, algo, -1, layout);
	helper_check(plan);
	tp_plan_free(plan);
	tp_layout_free(layout);
}

void helper_check_all(enum tp_coll coll, enum tp_algo algo, int most)
{
	for (int n = 1; n <= most; n++) check_one(coll, algo, n, HELPER_ONE);
	for (int kind = 0; kind < HELPER_NLAYOUTS; kind++)
		for (int n = 2; n <= 17; n += 5) check_one(coll, algo, n, kind);
}

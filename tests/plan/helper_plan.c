#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <cmocka.h>

#include "plan/helper_plan.h"

struct tp_layout *plans_layout(int nranks, enum layout_kind kind)
{
	struct plans_random random = { (uint64_t)nranks };
	int *domain = calloc((size_t)nranks, sizeof(*domain));
	struct tp_layout *layout = NULL;
	assert_non_null(domain);
	for (int r = 0; r < nranks; r++) {
		switch (kind) {
		case HALVES: domain[r] = r * 2 / nranks; break;
		case INTERLEAVED: domain[r] = r % 3; break;
		case UNEVEN: domain[r] = r * r % 7; break;
		case LONELY: domain[r] = r == nranks - 1; break;
		case ALONE: domain[r] = r; break;
		case TWELVE: domain[r] = r * 12 / nranks; break;
		case SCATTERED: domain[r] = (int)plans_random(&random, 4); break;
		default: domain[r] = 5; break;
		}
	}
	assert_int_equal(tp_layout_create(nranks, domain, &layout), ncclSuccess);
	free(domain);
	return layout;
}

struct tp_plan *plans_make_on(enum tp_coll coll, enum tp_algo algo, const struct tp_layout *layout, int root, int nchannels)
{
	struct tp_plan_spec spec = { coll, algo, root, nchannels, layout };
	struct tp_plan *plan = NULL;
	assert_int_equal(tp_plan_create(&spec, -1, &plan), ncclSuccess);
	return plan;
}

struct tp_plan *plans_make(enum tp_coll coll, enum tp_algo algo, int nranks, enum layout_kind kind, int root, int nchannels)
{
	struct tp_layout *layout = plans_layout(nranks, kind);
	struct tp_plan *plan = plans_make_on(coll, algo, layout, root, nchannels);
	tp_layout_free(layout);
	return plan;
}

static struct tp_check_report check(const struct tp_plan *plan, uint32_t slots, uint32_t rounds, bool in_place, bool by_ref)
{
	struct tp_check_options options = { .slots = slots, .rounds = rounds, .in_place = in_place, .by_ref = by_ref };
	struct tp_check_report report;
	if (tp_check_plan(plan, &options, &report) != ncclSuccess)
		fail_msg("%s %s, %d ranks in %d domains, root %d,%s%s: %s", tp_algo_name(plan->spec.algo), tp_coll_name(plan->spec.coll),
			plan->spec.layout->nranks, plan->spec.layout->ndomains, plan->spec.root, in_place ? " in place" : "",
			by_ref ? " by reference" : "", report.text);
	return report;
}

void plans_expect_right(const struct tp_plan *plan, uint32_t slots, uint32_t rounds)
{
	for (int mode = 0; mode < 4; mode++) check(plan, slots, rounds, mode & 1, mode >> 1);
}

struct tp_check_report plans_check(const struct tp_plan *plan)
{
	int n = plan->spec.layout->nranks;
	if (n <= 20) plans_expect_right(plan, 2, 3);
	else if (n <= 40) check(plan, 2, 2, false, false);
	return check(plan, 2, n > 20 ? 2 : 3, true, true);
}

void plans_check_all(enum tp_coll coll, enum tp_algo algo)
{
	for (int n = 1; n <= PLANS_MOST_RANKS; n++) {
		struct tp_plan *plan = plans_make(coll, algo, n, ONE_DOMAIN, -1, 1);
		plans_check(plan);
		tp_plan_free(plan);
	}
}

struct tp_plan *plans_p2p(int nranks, struct tp_transfer *const *transfers, const int *counts)
{
	struct tp_plan *all = calloc(1, sizeof(*all));
	assert_non_null(all);
	for (int r = 0; r < nranks; r++) {
		struct tp_plan *one = NULL;
		assert_int_equal(tp_plan_p2p(r, nranks, transfers[r], counts[r], &one), ncclSuccess);
		assert_int_equal(one->nprograms, 1);
		if (!r) {
			*all = *one;
			all->programs = calloc((size_t)nranks, sizeof(*all->programs));
			assert_non_null(all->programs);
		}
		all->programs[r] = one->programs[0];
		one->nprograms = 0;
		tp_plan_free(one);
	}
	all->nprograms = (uint32_t)nranks;
	all->spec.layout = plans_layout(nranks, ONE_DOMAIN);
	return all;
}

uint32_t plans_random(struct plans_random *r, uint32_t below)
{
	r->state = r->state * 6364136223846793005u + 1442695040888963407u;
	return (uint32_t)((r->state >> 33) % below);
}

struct tp_step *plans_step(struct tp_plan *plan, int rank, int lane, int step)
{
	struct tp_program *p = &plan->programs[rank * plan->spec.nchannels];
	assert_true((uint32_t)lane < p->nlanes && (uint32_t)step < p->lanes[lane].nsteps);
	return &p->steps[p->lanes[lane].first_step + (uint32_t)step];
}

struct tp_operand *plans_sources(struct tp_plan *plan, int rank, int lane, int step)
{
	return &plan->programs[rank * plan->spec.nchannels].operands[plans_step(plan, rank, lane, step)->first];
}

struct tp_operand *plans_destinations(struct tp_plan *plan, int rank, int lane, int step)
{
	return plans_sources(plan, rank, lane, step) + plans_step(plan, rank, lane, step)->nsrc;
}

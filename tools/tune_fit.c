/* The cost model's constants out of measured times. Each constant is tried a factor up and down, the better is kept, and where none gets
 * better the factor shrinks; they multiply times, so all is reckoned in logarithms. What counts is how far predictions are off and, more,
 * what the choices cost against the best that was measured; a little pull to where it began keeps constants still that nothing speaks of. */
#include "tune.h"

#include <math.h>
#include <stddef.h>

#define FIRST_STEP 0.7          /* a factor of 2 */
#define LAST_STEP 0.02
#define FARTHEST 5.3            /* from where it began: a factor of 200 */
#define PULL 2e-4
#define OF_CHOICES 4.0          /* what a choice that loses counts, against predictions that are off */
enum { SWEEPS_MOST = 200 };

static const size_t inside_only[] = { offsetof(struct tp_cost_model, inside.latency_us), offsetof(struct tp_cost_model, inside.us_per_byte),
	offsetof(struct tp_cost_model, ref_us) };
static const size_t across_only[] = { offsetof(struct tp_cost_model, across.latency_us), offsetof(struct tp_cost_model, across.us_per_byte),
	offsetof(struct tp_cost_model, across.step_us) };
static const size_t everywhere[] = { offsetof(struct tp_cost_model, inside.step_us), offsetof(struct tp_cost_model, reduce_us_per_byte),
	offsetof(struct tp_cost_model, copy_us_per_byte), offsetof(struct tp_cost_model, call_us) };

enum { CONSTANTS_MOST = 11 + TP_NALGOS };
struct search {
	const struct tune_cell *cells;
	int ncells, nconstants;
	const struct tp_layout *layout;
	size_t at[CONSTANTS_MOST];          /* where the constants lie in a model */
	double began[CONSTANTS_MOST];
};

static double *constant(struct tp_cost_model *model, size_t at) { return (double *)(void *)((char *)model + at); }

ncclResult_t tune_choose(const struct tune_cell *cell, const struct tp_layout *layout, const struct tp_cost_model *model, struct tp_choice *out)
{
	return tp_choose(layout, cell->coll, 0, cell->block_bytes, false, model, NULL, out);
}

/* Sums over all cells, as logarithms. */
struct sums { double squares, errors, lost, worst; int nerrors, nchoices; };

static ncclResult_t sum_up(const struct tune_cell *cells, int ncells, const struct tp_layout *layout, const struct tp_cost_model *model, struct sums *out)
{
	*out = (struct sums){ 0 };
	for (int i = 0; i < ncells; i++) {
		struct tp_choice choice;
		double best = INFINITY;
		TP_TRY(tune_choose(&cells[i], layout, model, &choice));
		for (int a = 0; a < TP_NALGOS; a++) {
			double us = cells[i].us[a], predicted = choice.candidates[a].us;
			if (us <= 0 || predicted <= 0) continue;
			double off = log(predicted / us);
			best = fmin(best, us);
			out->squares += off * off;
			out->errors += fabs(off);
			out->nerrors++;
		}
		if (isinf(best) || cells[i].us[choice.algo] <= 0) continue;
		double lost = log(cells[i].us[choice.algo] / best);
		out->lost += lost;
		out->worst = fmax(out->worst, lost);
		out->nchoices++;
	}
	return ncclSuccess;
}

ncclResult_t tune_score(const struct tune_cell *cells, int ncells, const struct tp_layout *layout, const struct tp_cost_model *model,
	struct tune_score *out)
{
	struct sums s;
	TP_TRY(sum_up(cells, ncells, layout, model, &s));
	*out = (struct tune_score){ exp(s.errors / TP_MAX(s.nerrors, 1)), exp(s.lost / TP_MAX(s.nchoices, 1)), exp(s.worst) };
	return ncclSuccess;
}

static ncclResult_t judge(const struct search *s, struct tp_cost_model *model, double *out)
{
	struct sums sums;
	double pull = 0;
	TP_TRY(sum_up(s->cells, s->ncells, s->layout, model, &sums));
	for (int c = 0; c < s->nconstants; c++) {
		double far = log(*constant(model, s->at[c]) / s->began[c]);
		pull += PULL * far * far;
	}
	*out = sums.squares / TP_MAX(sums.nerrors, 1) + OF_CHOICES * sums.lost / TP_MAX(sums.nchoices, 1) + pull;
	return ncclSuccess;
}

static void add(struct search *s, struct tp_cost_model *model, const size_t *at, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		double value = *constant(model, at[i]);
		if (value <= 0) continue;       /* switched off: a factor of nothing */
		s->began[s->nconstants] = value;
		s->at[s->nconstants++] = at[i];
	}
}

static void find_constants(struct search *s, struct tp_cost_model *model)
{
	int largest = 1;
	for (int d = 0; d < s->layout->ndomains; d++) largest = TP_MAX(largest, s->layout->domain_size[d]);
	add(s, model, everywhere, TP_ARRAY_LEN(everywhere));
	if (largest > 1) add(s, model, inside_only, TP_ARRAY_LEN(inside_only));
	if (s->layout->ndomains > 1) add(s, model, across_only, TP_ARRAY_LEN(across_only));
	if (largest > model->cores_per_domain) {
		size_t at = offsetof(struct tp_cost_model, switch_us);
		add(s, model, &at, 1);
	}
	for (int a = 0; a < TP_NALGOS; a++) {
		bool measured = false;
		size_t at = offsetof(struct tp_cost_model, scale) + sizeof(double) * (size_t)a;
		for (int i = 0; i < s->ncells; i++) measured |= s->cells[i].us[a] > 0;
		if (measured) add(s, model, &at, 1);
	}
}

/* One look at each constant, in both directions. */
static ncclResult_t sweep(const struct search *s, struct tp_cost_model *model, double step, double *least, bool *better)
{
	for (int c = 0; c < s->nconstants; c++) {
		double *value = constant(model, s->at[c]), kept = *value;
		for (int way = 0; way < 2; way++) {
			double found;
			*value = kept * exp(way ? -step : step);
			if (fabs(log(*value / s->began[c])) <= FARTHEST) {
				TP_TRY(judge(s, model, &found));
				if (found < *least - 1e-9) {
					*least = found;
					*better = true;
					break;
				}
			}
			*value = kept;
		}
	}
	return ncclSuccess;
}

ncclResult_t tune_fit(const struct tune_cell *cells, int ncells, const struct tp_layout *layout, struct tp_cost_model *model)
{
	struct search s = { .cells = cells, .ncells = ncells, .layout = layout };
	struct tp_cost_model trial = *model;
	double least, step = FIRST_STEP;
	find_constants(&s, &trial);
	TP_TRY(judge(&s, &trial, &least));
	for (int n = 0; n < SWEEPS_MOST && step >= LAST_STEP; n++) {
		bool better = false;
		TP_TRY(sweep(&s, &trial, step, &least, &better));
		if (!better) step /= 2;
	}
	*model = trial;
	return ncclSuccess;
}

/* `telpher tune`: what its parts share. tune.c parses and steers, tune_measure.c has jobs measured, tune_fit.c makes the cost model's
 * constants of what was measured. */
#ifndef TELPHER_TUNE_H
#define TELPHER_TUNE_H

#include <stdbool.h>
#include <stddef.h>

#include "plan/plan.h"

/* A collective at a size, by every algorithm that can do it. */
struct tune_cell {
	enum tp_coll coll;
	size_t bytes, block_bytes;          /* as telpher perf counts them; of a block */
	double us[TP_NALGOS];               /* measured, a call; 0: not measured */
};

/* How well a model does on what was measured. */
struct tune_score {
	double error;                       /* predicted against measured, either way: geometric mean of the larger over the smaller */
	double lost;                        /* time of what it chooses over that of the best measured: geometric mean */
	double worst;                       /* the largest such */
};
ncclResult_t tune_score(const struct tune_cell *cells, int ncells, const struct tp_layout *layout, const struct tp_cost_model *model,
	struct tune_score *out);
/* Changes the constants that the cells can tell of so that predictions come close and choices lose little; what they say nothing of stays. */
ncclResult_t tune_fit(const struct tune_cell *cells, int ncells, const struct tp_layout *layout, struct tp_cost_model *model);
/* The algorithm that the model takes for a cell, and its prediction for each (negative: can't be). */
ncclResult_t tune_choose(const struct tune_cell *cell, const struct tp_layout *layout, const struct tp_cost_model *model, struct tp_choice *out);

struct tune_job {
	char **launcher;                    /* words before the program's, NULL behind the last */
	int nranks;
	size_t min_bytes, max_bytes;        /* sizes are 8 times the one before */
};
/* One job of `telpher perf`, with these settings (NAME=VALUE, NULL behind the last) for its ranks. us: [tune_sizes(job)]. False with a message
 * where it failed. */
bool tune_measure(const struct tune_job *job, enum tp_coll coll, char *const *settings, double *us);
#define TUNE_PATH 256
/* A new file for what is not to stay; the caller closes and unlinks it. False with a message where there can be none. */
bool tune_open_file(char path[TUNE_PATH], int *fd);
int tune_sizes(const struct tune_job *job);
size_t tune_size(const struct tune_job *job, int i);

#endif

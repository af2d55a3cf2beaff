/* The cost model's constants out of measured times: here times that another model predicts, so what is right is known. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "tune.h"

enum { SIZES = 8, CELLS = TP_SEND_RECV * SIZES };

struct world { int nranks, per_host; const char *table; };

static struct tp_layout *make_layout(const struct world *w)
{
	int hosts[16];
	struct tp_layout *layout;
	for (int r = 0; r < w->nranks; r++) hosts[r] = r / w->per_host;
	assert_int_equal(tp_layout_create(w->nranks, hosts, &layout), ncclSuccess);
	return layout;
}

/* What a machine like that would take. noise: a factor at most, both ways. */
static void measure(const struct tp_layout *layout, const struct tp_cost_model *truth, double noise, struct tune_cell cells[CELLS])
{
	unsigned seed = 7;
	for (int c = 0; c < TP_SEND_RECV; c++) {
		for (int i = 0; i < SIZES; i++) {
			struct tune_cell *cell = &cells[c * SIZES + i];
			struct tp_choice choice;
			*cell = (struct tune_cell){ .coll = (enum tp_coll)c, .bytes = (size_t)64 << 3 * i, .block_bytes = (size_t)64 << 3 * i };
			assert_int_equal(tune_choose(cell, layout, truth, &choice), ncclSuccess);
			for (int a = 0; a < TP_NALGOS; a++) {
				if (choice.candidates[a].us < 0) continue;
				seed = seed * 1664525 + 1013904223;
				cell->us[a] = choice.candidates[a].us * pow(noise, (double)(seed >> 8) / (1 << 23) - 1);
			}
		}
	}
}

static void check(const struct world *w, double noise, double error_most, double lost_most)
{
	static struct tune_cell cells[CELLS];
	struct tp_layout *layout = make_layout(w);
	struct tp_cost_model truth, model;
	struct tune_score before, after;
	tp_cost_defaults(&model);
	model.cores_per_domain = 4;
	truth = model;
	assert_int_equal(tp_cost_parse_table(w->table, strlen(w->table), "planted", &truth), ncclSuccess);
	measure(layout, &truth, noise, cells);
	assert_int_equal(tune_score(cells, CELLS, layout, &model, &before), ncclSuccess);
	assert_int_equal(tune_fit(cells, CELLS, layout, &model), ncclSuccess);
	assert_int_equal(tune_score(cells, CELLS, layout, &model, &after), ncclSuccess);
	assert_true(before.error > error_most);         /* there was something to find */
	assert_true(after.error < error_most);
	assert_true(after.lost < lost_most && after.lost <= before.lost);
	tp_layout_free(layout);
}

static const char slow_copies[] = "inside.latency_us 0.6\ninside.us_per_byte 2e-4\ncopy_us_per_byte 4e-4\nreduce_us_per_byte 1e-4\nscale.RING 2\nscale.BRUCK 0.7\n";
static const char fast_network[] = "across.latency_us 3\nacross.us_per_byte 4e-5\nacross.step_us 0.5\nscale.HIERARCHICAL 2\n";

static void a_planted_machine_is_found(void **state)
{
	(void)state;
	check(&(struct world){ 4, 4, slow_copies }, 1, 1.1, 1.02);
}

static void a_planted_network_is_found(void **state)
{
	(void)state;
	check(&(struct world){ 8, 4, fast_network }, 1, 1.1, 1.02);
}

static void noise_does_not_mislead_it(void **state)
{
	(void)state;
	check(&(struct world){ 4, 4, slow_copies }, 1.3, 1.25, 1.1);
}

/* A machine of one host says nothing of networks. */
static void what_was_not_measured_stays(void **state)
{
	(void)state;
	static struct tune_cell cells[CELLS];
	struct tp_layout *layout = make_layout(&(struct world){ 4, 4, "" });
	struct tp_cost_model began, model;
	tp_cost_defaults(&began);
	began.cores_per_domain = 4;
	model = began;
	model.copy_us_per_byte *= 3;
	measure(layout, &model, 1, cells);
	model = began;
	assert_int_equal(tune_fit(cells, CELLS, layout, &model), ncclSuccess);
	assert_memory_equal(&model.across, &began.across, sizeof(model.across));
	assert_true(model.switch_us == began.switch_us && model.scale[TP_ALGO_HIERARCHICAL] == began.scale[TP_ALGO_HIERARCHICAL]);
	assert_true(model.copy_us_per_byte > 1.5 * began.copy_us_per_byte);
	tp_layout_free(layout);
}

static void nothing_measured_changes_nothing(void **state)
{
	(void)state;
	struct tune_cell cell = { .coll = TP_ALL_REDUCE, .bytes = 64, .block_bytes = 64 };
	struct tp_layout *layout = make_layout(&(struct world){ 4, 4, "" });
	struct tp_cost_model began, model;
	tp_cost_defaults(&began);
	model = began;
	assert_int_equal(tune_fit(&cell, 1, layout, &model), ncclSuccess);
	assert_memory_equal(&model, &began, sizeof(model));
	tp_layout_free(layout);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_planted_machine_is_found),
		cmocka_unit_test(a_planted_network_is_found),
		cmocka_unit_test(noise_does_not_mislead_it),
		cmocka_unit_test(what_was_not_measured_stays),
		cmocka_unit_test(nothing_measured_changes_nothing),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

/* The closed forms of the cost model against the very programs: what is counted in them, and how long they take against
 * the model's clock. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "plan/cost.h"
#include "plan/helper_plan.h"

struct counts { double steps, refs, copies_out, results_out, takes, stored, reduce_takes, reduces, far, between_lanes; };

static void count_step(const struct tp_plan *plan, const struct tp_program *p, const struct tp_step *s, struct counts *c)
{
	const struct tp_layout *layout = plan->spec.layout;
	int data = 0, links = 0;
	c->steps++;
	for (int i = 0; i < s->nsrc + s->ndst; i++) {
		const struct tp_operand *o = &p->operands[s->first + (uint32_t)i];
		const struct tp_plan_link *l = o->where == TP_LINK ? &p->links[o->index] : NULL;
		bool remote = l && l->from != l->to;
		if (i < s->nsrc) {
			data += !(l && l->token && !remote);
			links += remote;
			c->between_lanes += l && !remote && !l->token;
		} else if (remote) {
			c->far += layout->domain[l->from] != layout->domain[l->to];
			if (o->by_ref) c->refs++;
			else if (s->flags & TP_STEP_REDUCE) c->results_out++;
			else c->copies_out++;
		}
	}
	c->takes += links;
	if (s->flags & TP_STEP_REDUCE && data > 1) {
		c->reduce_takes += links;
		c->reduces += (data + 1) / 3.0;
	} else {
		c->stored += links;
	}
}

static struct counts count_plan(const struct tp_plan *plan)
{
	struct counts c = { 0 };
	for (uint32_t i = 0; i < plan->nprograms; i++)
		for (uint32_t s = 0; s < plan->programs[i].nsteps; s++) count_step(plan, &plan->programs[i], &plan->programs[i].steps[s], &c);
	return c;
}

/* All ranks' share of a kind of work: offset in struct tp_cost_work. */
static double total(const struct tp_cost_profile *p, int n, size_t offset)
{
	double each = *(const double *)((const char *)&p->each + offset), root = *(const double *)((const char *)&p->root + offset);
	return p->rooted ? (n - 1) * each + root : n * each;
}
#define TOTAL(field) total(&p, n, offsetof(struct tp_cost_work, field))

static void expect(double found, double right, const struct tp_plan_spec *spec, const char *what)
{
	if (fabs(found - right) > 1e-6)
		fail_msg("%s %s, %d ranks: the profile has %g %s, the programs %g", tp_coll_name(spec->coll), tp_algo_name(spec->algo),
			spec->layout->nranks, found, what, right);
}

static void compare_counts(const struct tp_plan_spec *spec)
{
	struct tp_cost_profile p;
	int n = spec->layout->nranks;
	assert_true(tp_cost_profile_of(spec, &p));
	struct tp_plan *plan = plans_make_on(spec->coll, spec->algo, spec->layout, spec->root, 1);
	struct counts c = count_plan(plan);
	expect(p.pieces, plan->pieces, spec, "pieces");
	expect(TOTAL(steps), c.steps, spec, "steps");
	expect(TOTAL(refs), c.refs, spec, "sends by reference");
	expect(TOTAL(copies_out), c.copies_out, spec, "sends of copies");
	expect(TOTAL(results_out), c.results_out, spec, "sends of results");
	expect(TOTAL(ref_stored) + TOTAL(takes), c.stored, spec, "chunks put into buffers");
	expect(TOTAL(reduce_takes), c.reduce_takes, spec, "chunks reduced");
	expect(TOTAL(reduces), c.reduces, spec, "passes of reduction");
	expect(TOTAL(ref_takes), c.refs, spec, "receives by reference");
	assert_int_equal(p.refs_only, c.copies_out + c.results_out + c.between_lanes == 0);
	tp_plan_free(plan);
}

typedef void visit(const struct tp_plan_spec *spec);

/* Every plan there is on layouts of a kind, of 2 to `most` ranks. */
static void visit_all(visit *what, int kind, int most)
{
	for (int n = 2; n <= most; n++) {
		struct tp_layout *layout = plans_layout(n, kind);
		for (int coll = 0; coll < TP_SEND_RECV; coll++)
			for (int algo = 0; algo < TP_NALGOS; algo++) {
				struct tp_plan_spec spec = { (enum tp_coll)coll, (enum tp_algo)algo, tp_coll_has_root((enum tp_coll)coll) ? 0 : -1, 1,
					layout };
				if (!tp_plan_refuses(&spec)) what(&spec);
			}
		tp_layout_free(layout);
	}
}

static void profiles_count_what_the_programs_do(void **state)
{
	(void)state;
	visit_all(compare_counts, ONE_DOMAIN, 20);
}

static void compare_crossings(const struct tp_plan_spec *spec)
{
	struct tp_cost_profile p;
	int n = spec->layout->nranks;
	if (spec->algo == TP_ALGO_HIERARCHICAL && n % spec->layout->ndomains) return;      /* uneven: an estimate */
	assert_true(tp_cost_profile_of(spec, &p));
	struct tp_plan *plan = plans_make_on(spec->coll, spec->algo, spec->layout, spec->root, 1);
	double found = TOTAL(far_out), right = count_plan(plan).far;
	if (spec->algo != TP_ALGO_TREE) expect(found, right, spec, "crossings");
	else if (found > 2.5 * right + 1 || right > 2.5 * found + 1) expect(found, right, spec, "crossings");
	tp_plan_free(plan);
}

static void profiles_count_what_crosses_hosts(void **state)
{
	(void)state;
	visit_all(compare_crossings, ALONE, 9);
	visit_all(compare_crossings, HALVES, 16);
	visit_all(compare_crossings, INTERLEAVED, 15);
}

static struct tp_cost_model wide_model(void)
{
	struct tp_cost_model model;
	tp_cost_defaults(&model);
	model.cores_per_domain = 64;
	return model;
}

static void compare_times(const struct tp_plan_spec *spec)
{
	struct tp_cost_model model = wide_model();
	struct tp_plan *plan = plans_make_on(spec->coll, spec->algo, spec->layout, spec->root, 1);
	for (size_t bytes = 64; bytes <= 4u << 20; bytes *= 64) {
		double run, predicted = tp_cost_predict(spec, bytes, 32768, &model);
		assert_int_equal(tp_cost_run(plan, bytes, 32768, &model, &run), ncclSuccess);
		if (predicted > 2.5 * run || run > 2.5 * predicted)
			fail_msg("%s %s of %zu bytes, %d ranks in %d domains: predicted %.1f us, the programs take %.1f", tp_coll_name(spec->coll),
				tp_algo_name(spec->algo), bytes, spec->layout->nranks, spec->layout->ndomains, predicted, run);
	}
	tp_plan_free(plan);
}

static void predictions_are_near_the_time_of_the_programs(void **state)
{
	(void)state;
	visit_all(compare_times, ONE_DOMAIN, 9);
	visit_all(compare_times, HALVES, 8);
	visit_all(compare_times, ALONE, 5);
}

/* What matters of a prediction: the plan that it makes us take is not much slower than the best. */
static void choices_are_near_the_best_of_the_programs(void **state)
{
	(void)state;
	for (int kind = 0; kind <= HALVES; kind++)
		for (int n = 2; n <= 8; n += 2)
			for (int coll = 0; coll < TP_SEND_RECV; coll++)
				for (size_t bytes = 64; bytes <= 4u << 20; bytes *= 16) {
					struct tp_layout *layout = plans_layout(n, kind);
					struct tp_cost_model model = wide_model();
					struct tp_choice choice;
					double best = 1e300, chosen = 1e300;
					assert_int_equal(tp_choose(layout, (enum tp_coll)coll, 0, bytes, false, &model, NULL, &choice), ncclSuccess);
					for (int a = 0; a < TP_NALGOS; a++) {
						double us;
						if (choice.candidates[a].us < 0) continue;
						struct tp_plan *plan = plans_make_on((enum tp_coll)coll, (enum tp_algo)a, layout, 0, 1);
						model.by_ref_inside = choice.candidates[a].by_ref;
						assert_int_equal(tp_cost_run(plan, bytes, choice.candidates[a].chunk_bytes, &model, &us), ncclSuccess);
						best = TP_MIN(best, us);
						if (a == (int)choice.algo) chosen = us;
						tp_plan_free(plan);
					}
					if (chosen > 1.6 * best)
						fail_msg("%s of %zu bytes, %d ranks, layout %d: %s takes %.1f us, the best %.1f", tp_coll_name((enum tp_coll)coll),
							bytes, n, kind, tp_algo_name(choice.algo), chosen, best);
					tp_layout_free(layout);
				}
}

static void more_bytes_take_longer(const struct tp_plan_spec *spec)
{
	struct tp_cost_model model;
	double before = 0;
	tp_cost_defaults(&model);
	for (size_t bytes = 1; bytes <= 1u << 30; bytes *= 4) {
		double us = tp_cost_predict(spec, bytes, 65536, &model);
		assert_true(isfinite(us) && us > 0 && us >= before);
		before = us;
	}
}

static void more_bytes_take_no_less_time(void **state)
{
	(void)state;
	visit_all(more_bytes_take_longer, ONE_DOMAIN, 9);
	visit_all(more_bytes_take_longer, UNEVEN, 9);
}

static void slower_parts_take_no_less_time(void **state)
{
	(void)state;
	struct tp_layout *layout = plans_layout(8, HALVES);
	struct tp_plan_spec spec = { TP_ALL_REDUCE, TP_ALGO_RING, -1, 1, layout };
	struct tp_cost_model fast = wide_model(), slow = fast;
	slow.across.latency_us *= 10;
	assert_true(tp_cost_predict(&spec, 8, 65536, &slow) > tp_cost_predict(&spec, 8, 65536, &fast));
	slow = fast;
	slow.reduce_us_per_byte *= 10;
	assert_true(tp_cost_predict(&spec, 1 << 20, 65536, &slow) > tp_cost_predict(&spec, 1 << 20, 65536, &fast));
	slow = fast;
	slow.cores_per_domain = 1;
	assert_true(tp_cost_predict(&spec, 1 << 20, 65536, &slow) > tp_cost_predict(&spec, 1 << 20, 65536, &fast));
	slow = fast;
	slow.scale[TP_ALGO_RING] *= 3;
	assert_true(fabs(tp_cost_predict(&spec, 1 << 20, 65536, &slow) / tp_cost_predict(&spec, 1 << 20, 65536, &fast) - 3) < 1e-9);
	tp_layout_free(layout);
}

static void a_plan_that_cannot_be_has_no_time(void **state)
{
	(void)state;
	struct tp_layout *layout = plans_layout(4, ONE_DOMAIN);
	struct tp_plan_spec spec = { TP_ALL_REDUCE, TP_ALGO_BRUCK, -1, 1, layout };
	struct tp_cost_model model = wide_model();
	assert_true(tp_cost_predict(&spec, 8, 65536, &model) < 0);
	tp_layout_free(layout);
}

/* With nothing else to pay a message in one round takes what its wires were said to take. */
static void compare_fitted(const struct tp_plan_spec *spec)
{
	struct tp_cost_model model, none;
	memset(&model, 0, sizeof(model));
	model.cores_per_domain = 64;
	model.slot_bytes_inside = model.slot_bytes_across = 1 << 30;
	for (int a = 0; a < TP_NALGOS; a++) model.scale[a] = 1;
	none = model;
	struct tp_cost_profile p;
	assert_true(tp_cost_profile_of(spec, &p));
	p.relays = 0;                   /* what a first round takes longer than the others */
	assert_true(tp_cost_fit(spec, 0, 0, &none));
	assert_memory_equal(&none, &model, sizeof(model));
	assert_true(tp_cost_fit(spec, 1e-3, 0, &model));
	double inside = tp_cost_time(&p, spec, 4096, 1 << 20, false, &model);
	if (fabs(inside - 4.096) > 1e-6) fail_msg("%s %s, %d ranks: %g us inside", tp_coll_name(spec->coll), tp_algo_name(spec->algo), spec->layout->nranks, inside);
	if (spec->layout->ndomains == 1) return;
	model.copy_us_per_byte = 0;
	assert_true(tp_cost_fit(spec, 0, 1e-3, &model));
	double across = p.crossing * 4096 / p.pieces * model.across.us_per_byte;
	if (fabs(across - 4.096) > 1e-6) fail_msg("%s %s, %d ranks: %g us across", tp_coll_name(spec->coll), tp_algo_name(spec->algo), spec->layout->nranks, across);
}

static void a_fitted_model_takes_what_the_wires_take(void **state)
{
	(void)state;
	visit_all(compare_fitted, ONE_DOMAIN, 9);
	visit_all(compare_fitted, HALVES, 9);
	struct tp_layout *layout = plans_layout(4, ONE_DOMAIN);
	struct tp_plan_spec spec = { TP_ALL_REDUCE, TP_ALGO_BRUCK, -1, 1, layout };
	struct tp_cost_model model = wide_model();
	assert_false(tp_cost_fit(&spec, 1, 1, &model));
	assert_true(model.copy_us_per_byte == wide_model().copy_us_per_byte);
	tp_layout_free(layout);
}

static void big_layouts_have_finite_times(void **state)
{
	(void)state;
	struct tp_layout *layout = plans_layout(3000, INTERLEAVED);
	struct tp_cost_model model;
	struct tp_choice choice;
	tp_cost_defaults(&model);
	for (int coll = 0; coll < TP_SEND_RECV; coll++) {
		assert_int_equal(tp_choose(layout, (enum tp_coll)coll, 0, 1 << 20, false, &model, NULL, &choice), ncclSuccess);
		for (int a = 0; a < TP_NALGOS; a++) assert_true(choice.candidates[a].why_not || choice.candidates[a].us > 0);
	}
	tp_layout_free(layout);
}

static ncclResult_t parse(const char *text, struct tp_cost_model *model)
{
	return tp_cost_parse_table(text, strlen(text), "table", model);
}

static void a_table_changes_what_it_names(void **state)
{
	(void)state;
	struct tp_cost_model model, before;
	tp_cost_defaults(&model);
	before = model;
	assert_int_equal(parse("# measured\n\ninside.latency_us 0.5 # us\n\tscale.RING = 2\nby_ref_inside 0\nslot_bytes_inside 8192", &model), ncclSuccess);
	assert_true(model.inside.latency_us == 0.5 && model.scale[TP_ALGO_RING] == 2);
	assert_false(model.by_ref_inside);
	assert_int_equal(model.slot_bytes_inside, 8192);
	assert_true(model.across.latency_us == before.across.latency_us);
}

static void a_bad_table_changes_nothing(void **state)
{
	(void)state;
	static const char *const bad[] = {
		"inside.latency_us 1\ninside.latency_us", "inside.latency 1", "call_us -1", "call_us nan", "call_us inf", "call_us 1e99",
		"call_us 1x", "call_us 1 2", "cores_per_domain 1.5", "cores_per_domain 0", "by_ref_inside 2", "scale.RING 0", "x",
		"slot_bytes_inside 1e300",
	};
	struct tp_cost_model model;
	struct tp_cost_record before, after;
	tp_cost_defaults(&model);
	tp_cost_pack(&model, &before);
	for (size_t i = 0; i < TP_ARRAY_LEN(bad); i++) {
		if (parse(bad[i], &model) != ncclInvalidUsage) fail_msg("\"%s\" was taken", bad[i]);
		assert_non_null(strstr(tp_log_last_error(), "table:"));
	}
	char line[512];
	memset(line, 'x', sizeof(line));
	assert_int_equal(tp_cost_parse_table(line, sizeof(line), "table", &model), ncclInvalidUsage);
	assert_int_equal(tp_cost_parse_table("call_us\0 1", 10, "table", &model), ncclInvalidUsage);
	tp_cost_pack(&model, &after);
	assert_memory_equal(&before, &after, sizeof(before));
}

static void a_printed_table_reads_as_the_same_model(void **state)
{
	(void)state;
	struct tp_cost_model model, other;
	struct tp_cost_record a, b;
	tp_cost_defaults(&model);
	tp_cost_defaults(&other);
	model.across.us_per_byte = 1.0 / 3;
	model.cores_per_domain = 77;
	model.scale[TP_ALGO_BRUCK] = 0.7;
	char *text = tp_cost_table_text(&model);
	assert_non_null(text);
	assert_int_equal(parse(text, &other), ncclSuccess);
	tp_cost_pack(&model, &a);
	tp_cost_pack(&other, &b);
	assert_memory_equal(&a, &b, sizeof(a));
	free(text);
}

static void a_missing_tune_file_is_an_error_that_names_it(void **state)
{
	(void)state;
	struct tp_cost_model model;
	setenv("TELPHER_TUNE_FILE", "/nonexistent/table", 1);
	tp_param_reload();
	assert_int_equal(tp_cost_load(&model), ncclInvalidUsage);
	assert_non_null(strstr(tp_log_last_error(), "/nonexistent/table"));
	setenv("TELPHER_TUNE_FILE", "/dev/zero", 1);
	tp_param_reload();
	assert_int_equal(tp_cost_load(&model), ncclInvalidUsage);
	unsetenv("TELPHER_TUNE_FILE");
	tp_param_reload();
	assert_int_equal(tp_cost_load(&model), ncclSuccess);
}

static void figures_are_measured_only_where_both_of_a_link_were_given(void **state)
{
	(void)state;
	struct tp_cost_model guess, model;
	tp_cost_defaults(&guess);
	model = guess;
	assert_false(tp_cost_is_measured(&model, &guess, true));
	assert_int_equal(parse("scale.RING 2\nacross.latency_us 31\n", &model), ncclSuccess);
	assert_false(tp_cost_is_measured(&model, &guess, true));
	assert_int_equal(parse("across.us_per_byte 1e-5", &model), ncclSuccess);
	assert_true(tp_cost_is_measured(&model, &guess, true));
	assert_false(tp_cost_is_measured(&model, &guess, false));
	/* The defaults as a table are nobody's measurement. */
	char *text = tp_cost_table_text(&guess);
	assert_non_null(text);
	assert_int_equal(parse(text, &model), ncclSuccess);
	assert_false(tp_cost_is_measured(&model, &guess, true));
	free(text);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(profiles_count_what_the_programs_do),
		cmocka_unit_test(profiles_count_what_crosses_hosts),
		cmocka_unit_test(predictions_are_near_the_time_of_the_programs),
		cmocka_unit_test(choices_are_near_the_best_of_the_programs),
		cmocka_unit_test(more_bytes_take_no_less_time),
		cmocka_unit_test(slower_parts_take_no_less_time),
		cmocka_unit_test(a_plan_that_cannot_be_has_no_time),
		cmocka_unit_test(a_fitted_model_takes_what_the_wires_take),
		cmocka_unit_test(big_layouts_have_finite_times),
		cmocka_unit_test(a_table_changes_what_it_names),
		cmocka_unit_test(a_bad_table_changes_nothing),
		cmocka_unit_test(a_printed_table_reads_as_the_same_model),
		cmocka_unit_test(a_missing_tune_file_is_an_error_that_names_it),
		cmocka_unit_test(figures_are_measured_only_where_both_of_a_link_were_given),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

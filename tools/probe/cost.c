/* `telpher probe cost`: how long each collective takes by each algorithm, from alpha and beta alone: by the closed formulas that the
 * literature has, and by the model that the library chooses with; beside what `telpher perf` measures, where it is asked. */
#include <errno.h>
#include <fcntl.h>
#include <popt.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "coll.h"
#include "probe/formula.h"
#include "probe/probe.h"

#define FIRST 8
#define FACTOR 8
#define MOST_SIZES 16
#define UNSET (-1e300)                     /* alpha and beta until they are given */

struct options { char *from, *most_text; double alpha_us, beta_gbs; int nranks, nhosts, measure, iterations, json; size_t most; };

struct table {
	const struct options *options;
	struct tp_cost_model model;
	struct tp_layout *layout;
	size_t sizes[MOST_SIZES];
	int nsizes;
	cJSON *json;
};

/* alpha and beta of a sweep: what `telpher probe write --sweep --json` printed. */
static int read_sweep(struct options *o)
{
	char *text = calloc(1, 1 << 20);
	FILE *in = fopen(o->from, "re");
	if (!in || !text) {
		int error = in ? ENOMEM : errno;
		if (in) fclose(in);
		free(text);
		return probe_fail("--from %s can't be read: %s", o->from, strerror(error));
	}
	text[fread(text, 1, (1 << 20) - 1, in)] = 0;
	fclose(in);
	cJSON *json = cJSON_Parse(text), *sweep = cJSON_GetObjectItem(json, "sweep");
	const cJSON *alpha = cJSON_GetObjectItem(sweep, "alpha_us"), *beta = cJSON_GetObjectItem(sweep, "beta_gbs");
	bool good = cJSON_IsNumber(alpha) && cJSON_IsNumber(beta) && alpha->valuedouble >= 0 && beta->valuedouble > 0;
	if (good) {
		o->alpha_us = alpha->valuedouble;
		o->beta_gbs = beta->valuedouble;
	}
	cJSON_Delete(json);
	free(text);
	return good ? 0 : probe_fail("--from %s: it has no alpha and beta; telpher probe write --sweep --json prints what is read here", o->from);
}

/* What isn't said is the model's: of links between hosts, or inside the one. */
static void settle_constants(struct options *o, struct tp_cost_model *model)
{
	struct tp_cost_link *link = o->nhosts > 1 ? &model->across : &model->inside;
	if (o->alpha_us >= 0) link->latency_us = o->alpha_us;
	else o->alpha_us = link->latency_us;
	if (o->beta_gbs > 0) link->us_per_byte = 1 / (1000 * o->beta_gbs);
	else o->beta_gbs = 1 / (1000 * link->us_per_byte);
}

static void add_cells(struct table *t, cJSON *rows, const char *by, const char *formula, const double *us)
{
	char digits[32];
	cJSON *row = cJSON_CreateObject();
	cJSON_AddStringToObject(row, "by", by);
	if (formula) cJSON_AddStringToObject(row, "formula", formula);
	cJSON_AddItemToObject(row, "us", cJSON_CreateDoubleArray(us, t->nsizes));
	cJSON_AddItemToArray(rows, row);
	if (t->options->json) return;
	printf("  %-24s", by);
	for (int i = 0; i < t->nsizes; i++) printf(" %10s", us[i] < 0 ? "-" : probe_digits(us[i], digits));
	printf("  %s\n", formula ? formula : "");
}

static void formulas(struct table *t, enum tp_coll coll, cJSON *rows)
{
	const struct options *o = t->options;
	double us[MOST_SIZES];
	char by[48];
	for (int f = 0; f < PROBE_FORMULAS; f++) {
		const char *text = "";
		for (int i = 0; i < t->nsizes; i++)
			us[i] = probe_formula_us((enum probe_formula)f, coll, o->nranks, (double)t->sizes[i], o->alpha_us, o->beta_gbs, &text);
		if (us[0] < 0) continue;
		snprintf(by, sizeof(by), "formula, %s", probe_formula_name((enum probe_formula)f));
		add_cells(t, rows, by, text, us);
	}
}

static int model_rows(struct table *t, enum tp_coll coll, cJSON *rows)
{
	double us[TP_NALGOS][MOST_SIZES];
	bool usable[TP_NALGOS] = { false };
	char by[48];
	for (int i = 0; i < t->nsizes; i++) {
		struct tp_choice choice;
		size_t block = tool_has_blocks(coll) ? t->sizes[i] / (size_t)t->options->nranks : t->sizes[i];
		if (tp_choose(t->layout, coll, tool_is_rooted(coll) ? 0 : -1, block, false, &t->model, NULL, &choice) != ncclSuccess) return probe_fail_below(NULL);
		for (int a = 0; a < TP_NALGOS; a++) {
			us[a][i] = -1;
			for (int k = 0; k < TP_NALGOS; k++)
				if (choice.candidates[k].algo == (enum tp_algo)a) us[a][i] = choice.candidates[k].us;
			usable[a] |= us[a][i] >= 0;
		}
	}
	for (int a = 0; a < TP_NALGOS; a++) {
		if (!usable[a]) continue;
		snprintf(by, sizeof(by), "model, %s", tp_algo_name((enum tp_algo)a));
		add_cells(t, rows, by, NULL, us[a]);
	}
	return 0;
}

/* telpher perf as a job of its own; its JSON has a line a size. */
static int run_perf(const struct table *t, enum tp_coll coll, const char *path)
{
	extern char **environ;
	const struct options *o = t->options;
	char least[24], most[24], factor[8], np[16], hosts[16], iterations[16], warmup[16];
	snprintf(least, sizeof(least), "%zu", t->sizes[0]);
	snprintf(most, sizeof(most), "%zu", t->sizes[t->nsizes - 1]);
	snprintf(factor, sizeof(factor), "%d", FACTOR);
	snprintf(np, sizeof(np), "%d", o->nranks);
	snprintf(hosts, sizeof(hosts), "%d", o->nhosts);
	snprintf(iterations, sizeof(iterations), "%d", o->iterations);
	snprintf(warmup, sizeof(warmup), "%d", TP_MIN(o->iterations, 5));
	char *argv[] = { "telpher", "perf", (char *)tool_coll_name(coll), "-b", least, "-e", most, "-f", factor, "--np", np, "--hosts", hosts, "-J", (char *)path,
		o->iterations ? "-n" : NULL, iterations, "-w", warmup, NULL };
	posix_spawn_file_actions_t actions;
	pid_t pid;
	int status = 0;
	posix_spawn_file_actions_init(&actions);
	/* Its table isn't ours; what goes wrong it says on stderr. */
	posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
	int error = posix_spawn(&pid, "/proc/self/exe", &actions, NULL, argv, environ);
	posix_spawn_file_actions_destroy(&actions);
	if (error) return probe_fail("telpher perf can't be started: %s", strerror(error));
	while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
	}
	return status ? probe_fail("telpher perf %s failed: what it says is above", tool_coll_name(coll)) : 0;
}

static int measured(struct table *t, enum tp_coll coll, cJSON *rows)
{
	char path[] = "/tmp/telpher-probe-XXXXXX", *text = calloc(1, 1 << 20);
	double us[MOST_SIZES];
	int fd = text ? mkstemp(path) : -1, status = fd < 0 ? probe_fail("no file for telpher perf's results: %s", strerror(errno)) : run_perf(t, coll, path);
	if (!status && pread(fd, text, (1 << 20) - 1, 0) < 0) status = probe_fail("%s can't be read: %s", path, strerror(errno));
	if (fd >= 0) {
		close(fd);
		unlink(path);
	}
	cJSON *json = status ? NULL : cJSON_Parse(text);
	const cJSON *lines = cJSON_GetObjectItem(json, "results");
	for (int i = 0; i < t->nsizes && !status; i++) {
		const cJSON *time = cJSON_GetObjectItem(cJSON_GetObjectItem(cJSON_GetArrayItem(lines, i), "out_of_place"), "time_us");
		us[i] = cJSON_IsNumber(time) && time->valuedouble > 0 ? time->valuedouble : -1;
	}
	if (!status && cJSON_GetArraySize(lines) != t->nsizes) status = probe_fail("telpher perf measured %d sizes of %d", cJSON_GetArraySize(lines), t->nsizes);
	if (!status) add_cells(t, rows, "measured (telpher perf)", NULL, us);
	cJSON_Delete(json);
	free(text);
	return status;
}

static int of_collective(struct table *t, enum tp_coll coll)
{
	char text[32];
	cJSON *one = cJSON_CreateObject(), *all = cJSON_GetObjectItem(t->json, "collectives"), *rows;
	cJSON_AddStringToObject(one, "collective", tool_coll_name(coll));
	rows = cJSON_AddArrayToObject(one, "rows");
	cJSON_AddItemToArray(all, one);
	if (!t->options->json) {
		printf("\n%-26s", tool_coll_name(coll));
		for (int i = 0; i < t->nsizes; i++) printf(" %10s", probe_size_text(t->sizes[i], text));
		printf("\n");
	}
	formulas(t, coll, rows);
	int status = model_rows(t, coll, rows);
	if (!status && t->options->measure) status = measured(t, coll, rows);
	fflush(stdout);
	return status;
}

static int run(struct options *o, const enum tp_coll *only)
{
	struct table t = { .options = o };
	o->iterations = TP_MAX(o->iterations, 0);
	char a[32], b[32], c[32];
	int status = o->from ? read_sweep(o) : 0;
	if (status) return status;
	if (tp_cost_load(&t.model) != ncclSuccess || tool_layout(o->nranks, o->nhosts, &t.layout) != ncclSuccess) return probe_fail_below(NULL);
	settle_constants(o, &t.model);
	for (size_t size = FIRST; size <= o->most && t.nsizes < MOST_SIZES; size *= FACTOR) t.sizes[t.nsizes++] = size;
	t.json = cJSON_CreateObject();
	cJSON_AddNumberToObject(t.json, "alpha_us", o->alpha_us);
	cJSON_AddNumberToObject(t.json, "beta_gbs", o->beta_gbs);
	cJSON_AddNumberToObject(t.json, "s_star_bytes", o->alpha_us * o->beta_gbs * 1000);
	cJSON_AddNumberToObject(t.json, "ranks", o->nranks);
	cJSON_AddNumberToObject(t.json, "hosts", o->nhosts);
	cJSON *sizes = cJSON_AddArrayToObject(t.json, "sizes");
	for (int i = 0; i < t.nsizes; i++) cJSON_AddItemToArray(sizes, cJSON_CreateNumber((double)t.sizes[i]));
	cJSON_AddArrayToObject(t.json, "collectives");
	if (!o->json)
		printf("alpha %s us, beta %s GB/s of a link %s, S* = %s KB; %d ranks on %d host%s; times in us\n", probe_digits(o->alpha_us, a), probe_digits(o->beta_gbs, b),
			o->nhosts > 1 ? "between hosts" : "inside the host", probe_digits(o->alpha_us * o->beta_gbs, c), o->nranks, o->nhosts, o->nhosts == 1 ? "" : "s");
	for (int coll = 0; coll < TP_SEND_RECV && !status; coll++)
		if (!only || *only == (enum tp_coll)coll) status = of_collective(&t, (enum tp_coll)coll);
	if (!status && !o->json)
		printf("\nformula: all links alike, computing free. model: what the library chooses by (TELPHER_TUNE_FILE, telpher explain), with this alpha and beta.\n");
	tp_layout_free(t.layout);
	if (!status && o->json) return probe_print_json(t.json);
	cJSON_Delete(t.json);
	return status;
}

int probe_cost(int argc, char **argv)
{
	struct options o = { .alpha_us = UNSET, .beta_gbs = UNSET, .iterations = PROBE_UNSET, .nranks = 8, .nhosts = 2, .most = (size_t)16 << 20 };
	enum tp_coll coll;
	struct poptOption options[] = {
		{ "alpha", 'a', POPT_ARG_DOUBLE, &o.alpha_us, 0, "latency of a link (the library's model has one)", "US" },
		{ "beta", 'B', POPT_ARG_DOUBLE, &o.beta_gbs, 0, "its bandwidth (the library's model has one)", "GB/s" },
		{ "from", 0, POPT_ARG_STRING, &o.from, 0, "both from what telpher probe write --sweep --json printed", "FILE" },
		{ "ranks", 'n', POPT_ARG_INT, &o.nranks, 0, "ranks (8)", "N" },
		{ "hosts", 'H', POPT_ARG_INT, &o.nhosts, 0, "hosts that share them evenly (2)", "K" },
		{ "size", 's', POPT_ARG_STRING, &o.most_text, 0, "sizes from 8 bytes to this (16M)", "BYTES" },
		{ "measure", 0, POPT_ARG_NONE, &o.measure, 0, "run telpher perf with so many ranks on as many virtual hosts of this machine", NULL },
		{ "iterations", 0, POPT_ARG_INT, &o.iterations, 0, "its iterations a size (by size)", "N" },
		{ "json", 0, POPT_ARG_NONE, &o.json, 0, "print JSON", NULL },
		POPT_AUTOHELP
		POPT_TABLEEND
	};
	poptContext context = poptGetContext(argv[0], argc, (const char **)argv, options, 0);
	if (!context) return probe_fail("out of memory");
	poptSetOtherOptionHelp(context, "[COLLECTIVE] [OPTIONS]");
	int code = tool_next_option(context, options), status;
	const char *name = poptGetArg(context);
	bool has_alpha = o.alpha_us != UNSET, has_beta = o.beta_gbs != UNSET;
	if (code < -1) status = probe_usage("%s: %s", poptBadOption(context, 0), poptStrerror(code));
	else if (poptPeekArg(context)) status = probe_usage("one COLLECTIVE, not \"%s\" too", poptPeekArg(context));
	else if (name && !tool_find_coll(name, &coll)) status = probe_usage("there is no collective \"%s\"; there are " TOOL_COLL_NAMES, name);
	else if (o.from && (has_alpha || has_beta)) status = probe_usage("--from, or --alpha and --beta, not both");
	else if (has_alpha && !(o.alpha_us >= 0 && o.alpha_us <= 1e9)) status = probe_usage("--alpha %g: from 0 to 10^9 us", o.alpha_us);
	else if (has_beta && !(o.beta_gbs > 0 && o.beta_gbs <= 1e6)) status = probe_usage("--beta %g: more than 0, up to 10^6 GB/s", o.beta_gbs);
	else if (o.nranks < 2 || o.nranks > 65536) status = probe_usage("-n %d: from 2 to 65536 ranks", o.nranks);
	else if (o.nhosts < 1 || o.nhosts > o.nranks) status = probe_usage("--hosts %d: from 1 to as many hosts as ranks (%d)", o.nhosts, o.nranks);
	else if (o.measure && o.nranks > 64) status = probe_usage("--measure starts a process a rank on this machine: up to 64");
	else if (o.iterations != PROBE_UNSET && (o.iterations < 1 || o.iterations > 1000000)) status = probe_usage("--iterations %d: from 1 to 1000000", o.iterations);
	else if (o.most_text && (!tool_parse_size(o.most_text, &o.most) || o.most < FIRST)) status = probe_usage("-s %s: no size of %d bytes or more", o.most_text, FIRST);
	else status = run(&o, name ? &coll : NULL);
	free(o.from);
	free(o.most_text);
	poptFreeContext(context);
	return status;
}

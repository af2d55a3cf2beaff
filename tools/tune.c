/* `telpher tune`: has every algorithm of every collective measured, fits the cost model's constants to that, measures what the
 * library chooses without and with them, and prints them as a table for TELPHER_TUNE_FILE. For GPUs it hands over to the benchmark, which
 * measures each kind of kernel. */
#include "tools.h"
#include "coll.h"
#include "tune.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <math.h>
#include <popt.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#include "base/base.h"

#define NOISY 1.5

enum { SIZES_MOST = 24, ROUNDS_MOST = 31, CELLS_MOST = TP_NCOLLS * SIZES_MOST };

struct request {
	int nranks, nhosts, cores, rounds, gpu, no_check;
	char *launch, *out, *only, *min, *max;
	bool colls[TP_NCOLLS];
	struct tune_job job;
	struct tp_cost_model model;
};

/* What else a machine does only adds. */
static double least(const double *values, int n)
{
	double found = values[0];
	for (int i = 1; i < n; i++) found = fmin(found, values[i]);
	return found;
}

static double greatest(const double *values, int n)
{
	double found = values[0];
	for (int i = 1; i < n; i++) found = fmax(found, values[i]);
	return found;
}

/* ---- what is measured ---- */

struct plan_of_work { struct tune_cell cells[CELLS_MOST]; int ncells; double us[CELLS_MOST][TP_NALGOS][ROUNDS_MOST]; };

static bool list_cells(const struct request *q, const struct tp_layout *layout, struct plan_of_work *w)
{
	for (int c = 0; c < TP_SEND_RECV; c++) {
		for (int i = 0; q->colls[c] && i < tune_sizes(&q->job); i++) {
			struct tune_cell *cell = &w->cells[w->ncells++];
			size_t blocks = tool_has_blocks((enum tp_coll)c) ? (size_t)layout->nranks : 1;
			*cell = (struct tune_cell){ .coll = (enum tp_coll)c, .bytes = tune_size(&q->job, i) };
			cell->block_bytes = cell->bytes / blocks / sizeof(float) * sizeof(float);
		}
	}
	return w->ncells > 0;
}

/* All algorithms of a collective in turn, round by round, so that what else the machine does meets all alike. */
static bool measure(const struct request *q, const struct tp_layout *layout, struct plan_of_work *w)
{
	int sizes = tune_sizes(&q->job);
	for (int round = 0; round < q->rounds; round++) {
		for (int first = 0; first < w->ncells; first += sizes) {
			struct tp_choice choice;
			if (tune_choose(&w->cells[first], layout, &q->model, &choice) != ncclSuccess) return false;
			fprintf(stderr, "round %d of %d: %-15s", round + 1, q->rounds, tool_coll_name(w->cells[first].coll));
			for (int a = 0; a < TP_NALGOS; a++) {
				char setting[64], *settings[] = { setting, NULL };
				double us[SIZES_MOST];
				if (choice.candidates[a].us < 0) continue;
				fprintf(stderr, " %s", tp_algo_name((enum tp_algo)a));
				fflush(stderr);
				/* Of this collective only: telpher perf has calls of its own. */
				snprintf(setting, sizeof(setting), "NCCL_ALGO=%s:%s", tp_coll_name(w->cells[first].coll), tp_algo_name((enum tp_algo)a));
				if (!tune_measure(&q->job, w->cells[first].coll, settings, us)) return false;
				for (int i = 0; i < sizes; i++) w->us[first + i][a][round] = us[i];
			}
			fprintf(stderr, "\n");
		}
	}
	double apart = 0;
	int n = 0;
	for (int i = 0; i < w->ncells; i++) {
		for (int a = 0; a < TP_NALGOS; a++) {
			if (w->us[i][a][0] <= 0) continue;
			w->cells[i].us[a] = least(w->us[i][a], q->rounds);
			apart += log(greatest(w->us[i][a], q->rounds) / w->cells[i].us[a]);
			n++;
		}
	}
	apart = exp(apart / TP_MAX(n, 1));
	if (q->rounds > 1) fprintf(stderr, "The same differs by a factor of %.2f between rounds%s.\n", apart,
		apart < NOISY ? "" : ": the machine is busy with something else, and a table of now says as much of that as of the machine");
	return true;
}

/* The library's own choices, without and with the table, in turns. gain: of the geometric mean. */
static bool compare(const struct request *q, const struct plan_of_work *w, const char *table, double *gain)
{
	char setting[PATH_MAX + 32], *with[] = { setting, NULL }, *without[] = { NULL };
	double sum = 0;
	int sizes = tune_sizes(&q->job);
	snprintf(setting, sizeof(setting), "TELPHER_TUNE_FILE=%s", table);
	fprintf(stderr, "\nChosen before and with the table, us a call:\n%-15s %12s %12s %12s %8s\n", "", "bytes", "before", "with it", "ratio");
	for (int first = 0; first < w->ncells; first += sizes) {
		double us[2][SIZES_MOST][ROUNDS_MOST], once[SIZES_MOST];
		for (int round = 0; round < q->rounds; round++) {
			for (int k = 0; k < 2; k++) {
				if (!tune_measure(&q->job, w->cells[first].coll, k ? with : without, once)) return false;
				for (int i = 0; i < sizes; i++) us[k][i][round] = once[i];
			}
		}
		for (int i = 0; i < sizes; i++) {
			double before = least(us[0][i], q->rounds), after = least(us[1][i], q->rounds);
			fprintf(stderr, "%-15s %12zu %12.2f %12.2f %8.2f\n", i ? "" : tool_coll_name(w->cells[first].coll), w->cells[first + i].bytes, before, after,
				before / after);
			sum += log(before / after);
		}
	}
	*gain = exp(sum / w->ncells);
	return true;
}

/* ---- what comes out ---- */

static void print_choices(const struct plan_of_work *w, const struct tp_layout *layout, const struct tp_cost_model *before, const struct tp_cost_model *after)
{
	fprintf(stderr, "\n%-15s %12s  %-18s %12s  %-18s %-18s\n", "measured", "bytes", "best", "us", "chosen before", "with the table");
	for (int i = 0; i < w->ncells; i++) {
		const struct tune_cell *cell = &w->cells[i];
		struct tp_choice old, new;
		int best = -1;
		for (int a = 0; a < TP_NALGOS; a++)
			if (cell->us[a] > 0 && (best < 0 || cell->us[a] < cell->us[best])) best = a;
		if (best < 0 || tune_choose(cell, layout, before, &old) != ncclSuccess || tune_choose(cell, layout, after, &new) != ncclSuccess) continue;
		fprintf(stderr, "%-15s %12zu  %-18s %12.2f  %-18s %-18s\n", i && w->cells[i - 1].coll == cell->coll ? "" : tool_coll_name(cell->coll), cell->bytes,
			tp_algo_name((enum tp_algo)best), cell->us[best], tp_algo_name(old.algo), tp_algo_name(new.algo));
	}
}

static void print_score(const char *name, const struct tune_score *s)
{
	fprintf(stderr, "%-16s predictions off by a factor of %.2f; choices take %.1f %% more than the best measured, at worst %.1f %%\n", name, s->error,
		100 * (s->lost - 1), 100 * (s->worst - 1));
}

static bool write_table(const struct request *q, const struct tp_cost_model *model, FILE *to)
{
	struct utsname machine = { 0 };
	char day[32], *text = tp_cost_table_text(model);
	time_t now = time(NULL);
	uname(&machine);
	strftime(day, sizeof(day), "%Y-%m-%d", gmtime(&now));
	if (!text) return false;
	fprintf(to, "# telpher tune, %s, on %s: %d ranks on %d hosts, %zu to %zu bytes, the least of %d\n%s", day, machine.nodename, q->nranks, q->nhosts,
		q->job.min_bytes, q->job.max_bytes, q->rounds, text);
	free(text);
	return fflush(to) == 0 && !ferror(to);
}

static int failed(const char *what)
{
	fprintf(stderr, "telpher tune: %s: %s\n", what, tp_log_last_error());
	return 1;
}

/* The table goes to a file first, for the jobs that try it, then to where it was asked for. */
static int try_table(const struct request *q, const struct plan_of_work *w, const struct tp_cost_model *model)
{
	char path[TUNE_PATH];
	double gain = 1;
	int fd;
	if (!tune_open_file(path, &fd)) return 1;
	FILE *file = fdopen(fd, "w");
	bool written = file && write_table(q, model, file);
	if (!written) fprintf(stderr, "telpher tune: the table can't be written to %s: %s\n", path, strerror(errno));
	bool compared = written && compare(q, w, path, &gain);
	if (file) fclose(file);
	else close(fd);
	unlink(path);
	if (!compared) return 1;
	fprintf(stderr, "With the table calls take 1/%.3f of the time (geometric mean).\n", gain);
	if (gain > 0.97) return 0;
	fprintf(stderr, "telpher tune: that is slower than before, so no table is written. Was the machine busy with something else? --rounds 5 tells noise from it.\n");
	return 1;
}

static int tune(struct request *q, const struct tp_layout *layout)
{
	struct plan_of_work *w = calloc(1, sizeof(*w));
	struct tp_cost_model model = q->model;
	struct tune_score before, after;
	int status = 1;
	if (!w || !list_cells(q, layout, w) || !measure(q, layout, w)) goto out;
	if (tune_score(w->cells, w->ncells, layout, &q->model, &before) != ncclSuccess || tune_fit(w->cells, w->ncells, layout, &model) != ncclSuccess
		|| tune_score(w->cells, w->ncells, layout, &model, &after) != ncclSuccess) {
		failed("the model");
		goto out;
	}
	print_choices(w, layout, &q->model, &model);
	fprintf(stderr, "\n");
	print_score("before:", &before);
	print_score("with the table:", &after);
	status = q->no_check ? 0 : try_table(q, w, &model);
	if (status) goto out;
	FILE *to = q->out ? fopen(q->out, "we") : stdout;
	bool written = to && write_table(q, &model, to);
	if (!written) fprintf(stderr, "telpher tune: the table can't be written to %s: %s\n", q->out ? q->out : "the output", strerror(errno));
	else if (q->out) fprintf(stderr, "Written to %s: TELPHER_TUNE_FILE=%s uses it, on every rank of a job.\n", q->out, q->out);
	if (to && q->out && fclose(to)) written = false;
	status = !written;
out:
	free(w);
	return status;
}

/* ---- arguments ---- */

static int read_collectives(struct request *q)
{
	if (!q->only) {
		for (int c = 0; c < TP_SEND_RECV; c++) q->colls[c] = true;
		return 0;
	}
	char *keep, *names = strdup(q->only);
	int status = names ? 0 : 1;
	for (char *name = names ? strtok_r(names, ",", &keep) : NULL; name && !status; name = strtok_r(NULL, ",", &keep)) {
		enum tp_coll coll;
		if (!tool_find_coll(name, &coll)) status = tool_usage_error("tune", "there is no collective \"%s\"; there are " TOOL_COLL_NAMES, name);
		else q->colls[coll] = true;
	}
	free(names);
	return status;
}

static int check_request(struct request *q)
{
	if (q->nranks < 2 || q->nranks > 4096) return tool_usage_error("tune", "-n %d: there is something to choose for 2 to 4096 ranks", q->nranks);
	if (q->nhosts < 1 || q->nhosts > q->nranks) return tool_usage_error("tune", "--hosts %d: from 1 to as many hosts as ranks (%d)", q->nhosts, q->nranks);
	if (q->rounds < 1 || q->rounds > ROUNDS_MOST) return tool_usage_error("tune", "--rounds %d: from 1 to %d", q->rounds, ROUNDS_MOST);
	if (q->cores < 0 || q->cores > 1000000) return tool_usage_error("tune", "--cores %d: from 1 to 1000000", q->cores);
	/* A block is an element at least. */
	for (q->job.min_bytes = 8; q->job.min_bytes < sizeof(float) * (size_t)q->nranks; ) q->job.min_bytes *= 2;
	if (q->min && (!tool_parse_size(q->min, &q->job.min_bytes) || q->job.min_bytes < sizeof(float) * (size_t)q->nranks))
		return tool_usage_error("tune", "-b takes a size of at least an element a rank (%zu), got '%s'", sizeof(float) * (size_t)q->nranks, q->min);
	q->job.max_bytes = TP_MAX((size_t)64 << 20, q->job.min_bytes);
	if (q->max && !tool_parse_size(q->max, &q->job.max_bytes)) return tool_usage_error("tune", "-e takes a size such as 8 or 4M, got '%s'", q->max);
	if (q->job.max_bytes < q->job.min_bytes) return tool_usage_error("tune", "-e (%zu) is less than -b (%zu)", q->job.max_bytes, q->job.min_bytes);
	q->job.nranks = q->nranks;
	return read_collectives(q);
}

/* `telpher run` on this machine, or what --launch says. */
static int make_launcher(struct request *q, char ***out)
{
	static char self[4096], np[16], hosts[16], *own[] = { self, "run", "-n", np, "--hosts", hosts, "--no-prefix", "--", NULL };
	int n;
	if (q->launch) {
		int code = poptParseArgvString(q->launch, &n, (const char ***)out);
		if (!code && n >= 1 && n <= 48) return 0;
		if (!code) free(*out);
		return tool_usage_error("tune", "--launch \"%s\": %s", q->launch, code ? poptStrerror(code) : "from 1 to 48 words");
	}
	ssize_t length = readlink("/proc/self/exe", self, sizeof(self) - 1);
	if (length <= 0) { fprintf(stderr, "telpher tune: where this program lies could not be found out\n"); return 1; }
	self[length] = 0;
	snprintf(np, sizeof(np), "%d", q->nranks);
	snprintf(hosts, sizeof(hosts), "%d", q->nhosts);
	*out = own;
	return 0;
}

static int tune_host(struct request *q)
{
	struct tp_layout *layout;
	int status = check_request(q);
	if (!status) status = make_launcher(q, &q->job.launcher);
	if (status) return status;
	if (tp_cost_load(&q->model) != ncclSuccess || tool_layout(q->nranks, q->nhosts, &layout) != ncclSuccess) {
		if (q->launch) free(q->job.launcher);
		return failed("no model");
	}
	/* As communicators do: virtual hosts share their machine's processors. */
	if (q->cores) q->model.cores_per_domain = q->cores;
	else if (!q->launch) q->model.cores_per_domain = TP_MAX(1, tp_cpu_count() * layout->domain_size[layout->ndomains - 1] / q->nranks);
	status = tune(q, layout);
	tp_layout_free(layout);
	if (q->launch) free(q->job.launcher);       /* one piece */
	return status;
}

/* The benchmark lies beside this program's folder, built or installed. */
static int tune_gpus(const struct request *q)
{
	static const char *const places[] = { "../libexec/telpher/bench_gpu", "../bench/bench_gpu" };
	char self[PATH_MAX], bench[PATH_MAX + 64] = "", library[PATH_MAX], ranks[16];
	char *words[14] = { bench, "--tune", "--ours", library, "--ranks", ranks };
	int n = 6;
	Dl_info ours;
	ssize_t length = readlink("/proc/self/exe", self, sizeof(self) - 1);
	if (length <= 0) { fprintf(stderr, "telpher tune: where this program lies could not be found out\n"); return 1; }
	self[length] = 0;
	if (q->launch || q->nhosts != 1 || q->only || q->no_check || q->cores)
		return tool_usage_error("tune", "--gpu measures the GPUs of this machine and prints what TELPHER_CUDA_TABLE takes: it goes with -n, -b, -e and -o alone");
	if (q->min) { words[n++] = "--min"; words[n++] = q->min; }
	if (q->max) { words[n++] = "--max"; words[n++] = q->max; }
	if (q->out) { words[n++] = "--table"; words[n++] = q->out; }
	const char *folder = dirname(self);
	for (size_t i = 0; i < TP_ARRAY_LEN(places); i++) {
		snprintf(bench, sizeof(bench), "%s/%s", folder, places[i]);
		if (access(bench, X_OK) == 0) break;
	}
	if (!dladdr((void *)(uintptr_t)&ncclGetVersion, &ours) || !realpath(ours.dli_fname, library)) {
		fprintf(stderr, "telpher tune: where libnccl.so.2 lies could not be found out\n");
		return 1;
	}
	snprintf(ranks, sizeof(ranks), "%d", q->nranks);
	fflush(NULL);
	execv(bench, words);
	fprintf(stderr, "telpher tune: %s can't be run: %s\n", bench, strerror(errno));
	return 1;
}

int tool_tune(int argc, char **argv)
{
	struct request q = { .nranks = 4, .nhosts = 1, .rounds = 3 };
	struct poptOption options[] = {
		{ "ranks", 'n', POPT_ARG_INT, &q.nranks, 0, "ranks of the jobs (4)", "N" },
		{ "hosts", 'H', POPT_ARG_INT, &q.nhosts, 0, "hosts, virtual ones without --launch (1)", "K" },
		{ "launch", 0, POPT_ARG_STRING, &q.launch, 0, "what starts a job, as in \"mpirun -n 16 --hostfile h\" (telpher run)", "COMMAND" },
		{ "cores", 0, POPT_ARG_INT, &q.cores, 0, "cores of a host (as this machine has)", "N" },
		{ "only", 0, POPT_ARG_STRING, &q.only, 0, "collectives, with commas between (all)", "LIST" },
		{ "minbytes", 'b', POPT_ARG_STRING, &q.min, 0, "least size (an element a rank)", "SIZE" },
		{ "maxbytes", 'e', POPT_ARG_STRING, &q.max, 0, "greatest size (64M)", "SIZE" },
		{ "rounds", 0, POPT_ARG_INT, &q.rounds, 0, "all is measured so often, and the least counts (3)", "N" },
		{ "out", 'o', POPT_ARG_STRING, &q.out, 0, "where the table goes (the output)", "FILE" },
		{ "no-check", 0, POPT_ARG_NONE, &q.no_check, 0, "don't measure the table against what was there before", NULL },
		{ "gpu", 0, POPT_ARG_NONE, &q.gpu, 0, "each kind of kernel on this machine's GPUs, for TELPHER_CUDA_TABLE", NULL },
		POPT_AUTOHELP POPT_TABLEEND
	};
	poptContext context = poptGetContext("telpher tune", argc, (const char **)argv, options, 0);
	if (!context) return failed("out of memory");
	poptSetOtherOptionHelp(context, "[OPTIONS]");
	int status, code = tool_next_option(context, options);
	if (code < -1) status = tool_usage_error("tune", "%s: %s", poptBadOption(context, 0), poptStrerror(code));
	else if (poptPeekArg(context)) status = tool_usage_error("tune", "\"%s\" is a word too many", poptPeekArg(context));
	else status = q.gpu ? tune_gpus(&q) : tune_host(&q);
	char *const texts[] = { q.launch, q.out, q.only, q.min, q.max };
	for (size_t i = 0; i < TP_ARRAY_LEN(texts); i++) free(texts[i]);
	poptFreeContext(context);
	return status;
}

/* `telpher explain`: which plan a collective would run on a given layout, what each candidate would cost, why this one, and
 * the plan itself, checked. It asks the chooser and the generators that the library uses; no rank is started. On a machine that is
 * described (--topo) explain_topo.c answers. */
#include "tools.h"
#include "coll.h"
#include "explain_topo.h"

#include <limits.h>
#include <popt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "plan/plan.h"

#define LINE_BYTES 64           /* what communicators use */
#define LARGEST_LAYOUT 65536
#define LARGEST_CHECKED 64      /* ranks; the checker needs the programs of all */
#define LARGEST_TIMED 16        /* ranks; so does a run against the model's clock */
#define UNSAID INT_MIN

struct request {
	enum tp_coll coll;
	size_t bytes, block_bytes;  /* as asked; of a block, whole elements */
	int nranks, nhosts, root, cores, rank;
	ncclDataType_t type;
	const char *type_name, *op_name, *algo;
	int steps, no_check, table, json;
	struct tp_cost_model model;
};

/* References are only for operators that take INPUT as it is. */
static bool is_staged(const struct request *q)
{
	bool narrow = q->type == ncclFloat16 || q->type == ncclFloat8e4m3 || q->type == ncclFloat8e5m2;
	return tool_is_reduction(q->coll) && (tool_same_name(q->op_name, "mulsum") || (narrow && tool_same_name(q->op_name, "avg")));
}

static void print_layout(const struct request *q, const struct tp_layout *layout)
{
	printf("Layout: %d rank%s on %d host%s\n", q->nranks, q->nranks == 1 ? "" : "s", layout->ndomains, layout->ndomains == 1 ? "" : "s");
	for (int d = 0, first = 0; d < layout->ndomains && d < 16; first += layout->domain_size[d++])
		printf("  host %d: ranks %d to %d\n", d, first, first + layout->domain_size[d] - 1);
	if (layout->ndomains > 16) printf("  … and %d hosts more\n", layout->ndomains - 16);
	printf("  %d core%s a host; inside: %s; across: slots of %zu bytes\n", q->model.cores_per_domain,
		q->model.cores_per_domain == 1 ? "" : "s", q->model.by_ref_inside && !is_staged(q)
		? "shared memory, large chunks straight from the sender's memory" : "shared memory, every chunk through a slot",
		q->model.slot_bytes_across);
}

static void print_message(const struct request *q)
{
	char whole[32], block[32];
	printf("Message: %s of %s %s", tp_coll_name(q->coll), tool_size_text(q->bytes, whole), q->type_name);
	if (tool_is_reduction(q->coll)) printf(", %s", q->op_name);
	if (tool_is_rooted(q->coll)) printf(", root %d", q->root);
	if (tool_has_blocks(q->coll)) printf(": a block of %s a rank", tool_size_text(q->block_bytes, block));
	printf("\n");
}

static int by_time(const void *a, const void *b)
{
	const struct tp_candidate *x = a, *y = b;
	if ((x->us < 0) != (y->us < 0)) return x->us < 0 ? 1 : -1;
	if (x->us != y->us) return x->us < y->us ? -1 : 1;
	return (int)x->algo - (int)y->algo;
}

/* The programs of all ranks against the model's clock, as a second opinion on the prediction; "-" where that is much work. */
static const char *run_text(const struct request *q, const struct tp_layout *layout, const struct tp_candidate *c, char *text, size_t room)
{
	struct tp_plan_spec spec = { .coll = q->coll, .algo = c->algo, .root = tool_is_rooted(q->coll) ? q->root : -1, .nchannels = 1,
		.layout = layout };
	struct tp_cost_model model = q->model;
	struct tp_plan *plan;
	double us;
	snprintf(text, room, "-");
	if (q->nranks > LARGEST_TIMED || tp_plan_create(&spec, -1, &plan) != ncclSuccess) return text;
	if (!c->by_ref) model.by_ref_inside = false;
	if (tp_cost_run(plan, q->block_bytes, c->chunk_bytes, &model, &us) == ncclSuccess) snprintf(text, room, "%.2f", us);
	tp_plan_free(plan);
	return text;
}

static void print_candidates(const struct request *q, const struct tp_layout *layout, const struct tp_choice *choice)
{
	struct tp_candidate sorted[TP_NALGOS];
	int usable = 0;
	memcpy(sorted, choice->candidates, sizeof(sorted));
	qsort(sorted, TP_NALGOS, sizeof(sorted[0]), by_time);
	printf("\nCandidates:\n  %-18s %13s %13s  %s\n", "algorithm", "predicted us", "run us", "chunks of at most");
	for (int i = 0; i < TP_NALGOS; i++) {
		const struct tp_candidate *c = &sorted[i];
		char chunk[32], run[32];
		if (c->us < 0) {
			printf("  %-18s %13s %13s  %s\n", tp_algo_name(c->algo), "-", "-", c->why_not);
			continue;
		}
		usable++;
		printf("%c %-18s %13.2f %13s  %s\n", c->algo == choice->algo ? '*' : ' ', tp_algo_name(c->algo), c->us,
			run_text(q, layout, c, run, sizeof(run)), tool_size_text(c->chunk_bytes, chunk));
	}
	if (q->nranks <= LARGEST_TIMED) printf("  (predicted: by the formulas that choose; run: the programs of all ranks against the same constants)\n");
	printf("\nChosen: %s, ", tp_algo_name(choice->algo));
	if (usable == 1)
		printf("the only algorithm that can be used here%s.\n", q->algo ? " and is allowed" : "");
	else if (q->nranks == 1)
		printf("as any would be: one rank only copies.\n");
	else
		printf("because its predicted time is the least: %.2f us; the next, %s, would take %.1f %% more.\n", sorted[0].us,
			tp_algo_name(sorted[1].algo), 100 * (sorted[1].us / sorted[0].us - 1));
}

static void print_geometry(const struct request *q, const struct tp_plan *plan, size_t chunk_limit)
{
	struct tp_geometry g;
	tp_geometry_fit(plan, q->block_bytes, chunk_limit, LINE_BYTES, 0, &g);
	printf("Geometry: %u round%s of %u piece%s of %zu bytes a block", g.nrounds, g.nrounds == 1 ? "" : "s", plan->pieces,
		plan->pieces == 1 ? "" : "s", g.nrounds > 1 ? g.chunk_bytes : g.last_chunk_bytes);
	if (g.nrounds > 1) printf(", the last of %zu", g.last_chunk_bytes);
	printf("; 1 channel\n");
}

static void print_verdict(const struct request *q, const struct tp_plan *plan)
{
	struct tp_check_report report;
	bool may_be_in_place = q->coll != TP_ALL_TO_ALL;
	for (int mode = 0; mode < (may_be_in_place ? 4 : 2); mode++) {
		struct tp_check_options options = { .slots = 2, .rounds = 3, .by_ref = mode & 1, .in_place = mode & 2 };
		if (tp_check_plan(plan, &options, &report) == ncclSuccess) continue;
		printf("Checker: FAULT%s%s: %s\n", options.in_place ? ", in place" : "", options.by_ref ? ", by reference" : "",
			report.fault ? report.text : tp_log_last_error());
		return;
	}
	printf("Checker: right result, the same bits on all ranks, no deadlock, no race (%s; copied and by reference; 2 slots a link)\n",
		may_be_in_place ? "in place and not" : "out of place");
	printf("  chain of %u dependent steps a round; %llu chunks leave the busiest rank, %llu cross hosts\n", report.depth,
		(unsigned long long)report.chunks_sent_max, (unsigned long long)report.chunks_crossing);
}

static int failed(const char *what)
{
	fprintf(stderr, "telpher explain: %s: %s\n", what, tp_log_last_error());
	return 1;
}

static int print_plan(const struct request *q, const struct tp_layout *layout, const struct tp_choice *choice)
{
	struct tp_plan_spec spec = { .coll = q->coll, .algo = choice->algo, .root = tool_is_rooted(q->coll) ? q->root : -1,
		.nchannels = choice->nchannels, .layout = layout };
	struct tp_plan *all = NULL, *one = NULL;
	bool check = !q->no_check && q->nranks <= LARGEST_CHECKED;
	if (tp_plan_create(&spec, q->rank, &one) != ncclSuccess) return failed("the plan can't be made");
	print_geometry(q, one, choice->chunk_bytes);
	if ((check || q->steps) && tp_plan_create(&spec, -1, &all) != ncclSuccess) {
		tp_plan_free(one);
		return failed("the plan of all ranks can't be made");
	}
	if (check) print_verdict(q, all);
	else printf("Checker: not run (%s)\n", q->no_check ? "--no-check" : "only up to 64 ranks here");
	char *text = tp_plan_text(q->steps ? all : one);
	printf("\nPlan of %s:\n%s", q->steps ? "all ranks" : "one rank (--steps prints all)", text ? text : "out of memory\n");
	free(text);
	tp_plan_free(one);
	tp_plan_free(all);
	return 0;
}

static int explain(struct request *q)
{
	struct tp_layout *layout;
	struct tp_choice choice;
	int status;
	ncclResult_t result = tool_layout(q->nranks, q->nhosts, &layout);
	if (result != ncclSuccess) return failed("no layout");
	const char *filter = q->algo ? q->algo : tp_choose_algo_text();
	result = tp_choose_check_algo(filter);
	if (result == ncclSuccess)
		result = tp_choose(layout, q->coll, q->root, q->block_bytes, is_staged(q), &q->model, filter, &choice);
	if (result != ncclSuccess) {
		status = failed("no plan");
	} else {
		print_message(q);
		print_layout(q, layout);
		if (filter) printf("NCCL_ALGO: %s\n", filter);
		print_candidates(q, layout, &choice);
		status = print_plan(q, layout, &choice);
	}
	tp_layout_free(layout);
	return status;
}

static int find_type(struct request *q)
{
	for (int t = 0; t < ncclNumTypes; t++) {
		if (!tool_same_name(q->type_name, tp_type_name((ncclDataType_t)t))) continue;
		q->type = (ncclDataType_t)t;
		q->type_name = tp_type_name(q->type);
		return 0;
	}
	return tool_usage_error("explain", "there is no type \"%s\"; those of telpher perf are int8, uint8, int32, uint32, int64, "
		"uint64, half, float, double, bfloat16, %s, %s", q->type_name, tp_type_name(ncclFloat8e4m3), tp_type_name(ncclFloat8e5m2));
}

static int find_op(const struct request *q)
{
	static const char *const ops[] = { "sum", "prod", "max", "min", "avg", "mulsum" };
	for (size_t i = 0; i < sizeof(ops) / sizeof(ops[0]); i++)
		if (tool_same_name(q->op_name, ops[i])) return 0;
	return tool_usage_error("explain", "there is no operation \"%s\"; there are sum, prod, max, min, avg, mulsum", q->op_name);
}

static int check_request(struct request *q, const char *coll, const char *size)
{
	if (!tool_find_coll(coll, &q->coll))
		return tool_usage_error("explain", "there is no collective \"%s\"; there are " TOOL_COLL_NAMES, coll);
	if (!tool_parse_size(size, &q->bytes)) return tool_usage_error("explain", "\"%s\" is no size; say 4096, 64K, 4M or 1G", size);
	if (q->nranks < 1 || q->nranks > LARGEST_LAYOUT)
		return tool_usage_error("explain", "-n %d: from 1 to %d ranks can be explained", q->nranks, LARGEST_LAYOUT);
	if (q->nhosts < 1 || q->nhosts > q->nranks)
		return tool_usage_error("explain", "--hosts %d: from 1 to as many hosts as ranks (%d)", q->nhosts, q->nranks);
	if (q->root < 0 || q->root >= q->nranks || q->rank < 0 || q->rank >= q->nranks)
		return tool_usage_error("explain", "ranks are 0 to %d: neither --root %d nor --rank %d may lie outside", q->nranks - 1, q->root,
			q->rank);
	if (q->cores < 0 || q->cores > 1000000) return tool_usage_error("explain", "--cores %d: from 1 to 1000000", q->cores);
	int status = find_type(q);
	if (!status) status = find_op(q);
	if (status) return status;
	size_t blocks = tool_has_blocks(q->coll) ? (size_t)q->nranks : 1, element = tp_type_bytes(q->type);
	q->block_bytes = q->bytes / blocks / element * element;
	if (q->cores) q->model.cores_per_domain = q->cores;
	return 0;
}

/* A described machine has hosts, GPUs and paths of its own, and what is shown of it is not one plan. */
static int explain_machine(struct request *q, const char *machine, const char **words, int nwords)
{
	struct explain_topo_request t = { .machine = machine, .filter = q->algo ? q->algo : tp_choose_algo_text(), .op_name = q->op_name, .root = q->root,
		.nranks = q->nranks == UNSAID ? 0 : q->nranks, .nsizes = nwords - 1, .json = q->json };
	if (q->nhosts != UNSAID || q->cores || q->rank || q->steps || q->no_check || q->table)
		return tool_usage_error("explain", "--topo goes without --hosts (say it as in dgx-h100x32), --cores, --rank, --steps, --no-check and --table");
	if (nwords < 2) return tool_usage_error("explain", "say a collective and sizes, as in \"all_reduce 8 4M 1G --topo dgx-h100x32\"");
	if (!tool_find_coll(words[0], &t.coll)) return tool_usage_error("explain", "there is no collective \"%s\"; there are " TOOL_COLL_NAMES, words[0]);
	for (int i = 1; i < nwords; i++)
		if (!tool_parse_size(words[i], &t.sizes[i - 1])) return tool_usage_error("explain", "\"%s\" is no size; say 4096, 64K, 4M or 1G", words[i]);
	if (t.root < 0 || (q->nranks != UNSAID && q->nranks < 1)) return tool_usage_error("explain", "neither ranks (%d) nor a root (%d) are below 0", q->nranks, t.root);
	q->coll = t.coll;
	int status = find_type(q);
	if (!status) status = find_op(q);
	if (status) return status;
	t.type_name = q->type_name;
	t.element = tp_type_bytes(q->type);
	t.staged = is_staged(q);
	return explain_topo(&t);
}

static int explain_layout(struct request *q, const char **words, int nwords)
{
	if (nwords != 2) return tool_usage_error("explain", "say a collective and a size, as in \"all_reduce 4M -n 8\"");
	if (q->json) return tool_usage_error("explain", "--json is for --topo");
	if (q->nranks == UNSAID) q->nranks = 4;
	if (q->nhosts == UNSAID) q->nhosts = 1;
	int status = check_request(q, words[0], words[1]);
	return status ? status : explain(q);
}

int tool_explain(int argc, char **argv)
{
	struct request q = { .nranks = UNSAID, .nhosts = UNSAID };
	char *type = NULL, *op = NULL, *algo = NULL, *topo = NULL;
	struct poptOption options[] = {
		{ "topo", 't', POPT_ARG_STRING, &topo, 0, "on this machine: a file or model, x32 behind it for 32 hosts, or \"this\"", "MACHINE" },
		{ "ranks", 'n', POPT_ARG_INT, &q.nranks, 0, "number of ranks (4; with --topo all GPUs)", "N" },
		{ "hosts", 'H', POPT_ARG_INT, &q.nhosts, 0, "hosts that share them evenly (1)", "K" },
		{ "cores", 0, POPT_ARG_INT, &q.cores, 0, "cores of a host (as this machine has)", "N" },
		{ "algo", 0, POPT_ARG_STRING, &algo, 0, "restrict the algorithms, in NCCL_ALGO's syntax (NCCL_ALGO)", "LIST" },
		{ "type", 'd', POPT_ARG_STRING, &type, 0, "element type (float)", "TYPE" },
		{ "op", 'o', POPT_ARG_STRING, &op, 0, "reduction: sum, prod, max, min, avg, mulsum (sum)", "OP" },
		{ "root", 'r', POPT_ARG_INT, &q.root, 0, "root of broadcast, reduce, gather and scatter (0)", "RANK" },
		{ "rank", 0, POPT_ARG_INT, &q.rank, 0, "print the plan of this rank (0)", "RANK" },
		{ "steps", 0, POPT_ARG_NONE, &q.steps, 0, "print the plan of all ranks", NULL },
		{ "no-check", 0, POPT_ARG_NONE, &q.no_check, 0, "don't run the checker", NULL },
		{ "table", 0, POPT_ARG_NONE, &q.table, 0, "print the cost model's constants as a TELPHER_TUNE_FILE and stop", NULL },
		{ "json", 0, POPT_ARG_NONE, &q.json, 0, "with --topo: as JSON", NULL },
		POPT_AUTOHELP
		POPT_TABLEEND
	};
	poptContext context = poptGetContext("telpher explain", argc, (const char **)argv, options, 0);
	if (!context) return failed("out of memory");
	poptSetOtherOptionHelp(context, "COLLECTIVE SIZE [OPTIONS]\n       telpher explain COLLECTIVE SIZE... --topo MACHINE [OPTIONS]\n\nSIZE is that of telpher perf: of the larger buffer, K, M, G and T allowed.");
	const char *words[EXPLAIN_MOST_SIZES + 1], *word;
	int status = 0, nwords = 0, code = tool_next_option(context, options);
	while (nwords < EXPLAIN_MOST_SIZES + 1 && (word = poptGetArg(context))) words[nwords++] = word;
	q.type_name = type ? type : "float";
	q.op_name = op ? op : "sum";
	q.algo = algo;
	if (code < -1) {
		status = tool_usage_error("explain", "%s: %s", poptBadOption(context, 0), poptStrerror(code));
	} else if (poptPeekArg(context)) {
		status = tool_usage_error("explain", "\"%s\" is a word too many: up to %d sizes can be explained", poptPeekArg(context), EXPLAIN_MOST_SIZES);
	} else if (topo) {
		status = explain_machine(&q, topo, words, nwords);
	} else if (tp_cost_load(&q.model) != ncclSuccess) {
		status = failed("no cost model");
	} else if (q.table) {
		char *text = tp_cost_table_text(&q.model);
		printf("%s", text ? text : "");
		free(text);
	} else {
		status = explain_layout(&q, words, nwords);
	}
	free(type);
	free(op);
	free(algo);
	free(topo);
	poptFreeContext(context);
	return status;
}

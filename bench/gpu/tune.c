/* --tune: what each kind of kernel takes for each collective and size, and from these the table of crossovers, as TELPHER_CUDA_TABLE
 * reads it and src/exec/cuda/table.c keeps it. Each kind has a group of ranks of its own, whose table allows nothing else; they take
 * turns, size by size. A crossover is where the sum of slowdowns against the better one, over all sizes, is the least: one
 * measurement that is off moves nothing. */
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"

enum way { ONE_LL, ONE_LL128, TWO_LL, TWO_LL128, STREAMS, OFFERS, STEPS, PIPES, WINDOWS, COPIES, NWAYS };
enum { SIZES_MOST = 48 };
_Static_assert((int)NWAYS <= (int)MOST_GROUPS, "a group for each");

#define ALL(ll, ll128) "gather=" ll ":" ll128 ",scatter=" ll ":" ll128 ",pairs=" ll ":" ll128 ",rooted=" ll ":" ll128
#define OFF(...) __VA_ARGS__ "pipes=0,offer=never"
/* one: in one shot, and to or from a root in one step; two: in two. kernels: what they begin with, where the driver tells. */
static const struct { const char *name, *table, *kernels[3]; bool windows, buffers; } ways[NWAYS] = {
	[ONE_LL] = { "one LL", OFF("one_shot=1G:1G," ALL("1G", "1G") ",two_step_from=never,stream=never,"), { "tp_ll_" }, false, false },
	[ONE_LL128] = { "one LL128", OFF("one_shot=0:1G," ALL("0", "1G") ",two_step_from=never,stream=never,"), { "tp_ll128_" }, false, false },
	[TWO_LL] = { "two LL", OFF("one_shot=0:0,two_shot=1G:1G,two_step=1G:1G,two_step_from=1," ALL("1G", "1G") ",stream=never,"), { "tp_ll_", "tp_two_step_" },
		false, false },
	[TWO_LL128] = { "two LL128", OFF("one_shot=0:0,two_shot=0:1G,two_step=0:1G,two_step_from=1," ALL("0", "1G") ",stream=never,"),
		{ "tp_ll128_", "tp_two_step_" }, false, false },
	[STREAMS] = { "streams", OFF("stream=1,"), { "tp_streams" }, false, false },
	/* The same into buffers that are registered; windows, which are all that ranks register together, aren't offered. */
	[OFFERS] = { "offers", "stream=1,pipes=0,offer=1", { "tp_streams" }, false, true },
	[STEPS] = { "steps", OFF("one_shot=0:0,two_shot=0:0,two_step=0:0,two_step_from=never,stream=never," ALL("0", "0") ","), { "tp_steps_", "tp_transfers" },
		false, false },
	/* Where the library would have any (pipes=1). */
	[PIPES] = { "pipes", "one_shot=0:0,two_shot=0:0:0,two_step=0:0:0,two_step_from=never,stream=never,gather=0:0:0,scatter=0:0:0,pairs=0:0:0,rooted=0:0:0,"
		"reduce=1,transfers=1,pipes=1", { "tp_pipe_", "tp_push_", "tp_streams_piped" }, false, false },
	[WINDOWS] = { "windows", OFF("window=1,"), { "tp_window_" }, true, false },
	[COPIES] = { "copies", OFF("copies=1,copies_rooted=1,"), { "tp_copies" }, true, false },
};
static double times[NCOLLS][NWAYS][SIZES_MOST];
static size_t sizes[SIZES_MOST];
static int nsizes;
static FILE *table;

static bool has(enum coll c, enum way w)
{
	bool two = c == ALL_REDUCE || c == BROADCAST || c == REDUCE, moves = c == GATHER || c == SCATTER;
	switch (w) {
	case TWO_LL: case TWO_LL128: return two;
	case COPIES: return c == ALL_GATHER || c == ALL_TO_ALL || c == BROADCAST;
	case WINDOWS: return c == ALL_REDUCE || c == REDUCE_SCATTER;
	case STREAMS: case OFFERS: return moves || c == SEND_RECV;
	case PIPES: return true;
	default: return c != SEND_RECV;
	}
}

enum { NONE_US = 1000 * 1000 * 1000 };     /* in place of a time: not measured */
static bool was_measured(enum coll c, enum way w)
{
	for (int s = 0; s < nsizes; s++)
		if (times[c][w][s] < NONE_US) return true;
	return false;
}

/* Where a kind isn't to be had, something else ran: told by the shared memory, which pipes alone have, and by the name, where the driver tells it. */
static bool is_other(enum way w, const struct ran *ran)
{
	if ((w == PIPES) != (ran->shared > 0)) return true;
	if (!ran->kernel[0]) return false;
	for (int i = 0; i < 3 && ways[w].kernels[i]; i++)
		if (strncmp(ran->kernel, ways[w].kernels[i], strlen(ways[w].kernels[i])) == 0) return false;
	return true;
}

static bool run(enum coll c, const struct tune_options *o)
{
	bool right = true;
	printf("\n%s, us a call/blocks\n%-12s", coll_names[c], "bytes");
	for (int w = 0; w < NWAYS; w++)
		if (has(c, (enum way)w)) printf(" %14s", ways[w].name);
	printf("\n");
	for (int s = 0; s < nsizes; s++) {
		printf("%-12zu", sizes[s]);
		for (int w = 0; w < NWAYS; w++) {
			if (!has(c, (enum way)w)) continue;
			struct cell cell = { .coll = c, .bytes = sizes[s], .mode = GRAPH, .registered = ways[w].windows || ways[w].buffers,
				.calls = calls_for(sizes[s], o->calls), .repeats = o->repeats };
			struct answer a = measure_cell(w, &cell);
			bool counts = a.done && !a.wrong && !is_other((enum way)w, &a.ran);
			times[c][w][s] = counts ? a.device_us : NONE_US;
			right &= !a.wrong;
			if (counts) printf(" %10.2f/%-3d", a.device_us, a.ran.blocks);
			else printf(" %14s", a.wrong ? "WRONG" : "none");
		}
		printf("\n");
		fflush(stdout);
	}
	return right;
}

/* The number of sizes, from the smallest on, that the first of the two is better for. */
static int crossover(const double *below, const double *above)
{
	double least = 1e300;
	int best = 0;
	for (int split = 0; split <= nsizes; split++) {
		double sum = 0;
		for (int s = 0; s < nsizes; s++) sum += (s < split ? below[s] : above[s]) / (below[s] < above[s] ? below[s] : above[s]);
		if (sum < least) least = sum, best = split;
	}
	return best;
}

static void least_of(double *out, const double *a, const double *b)
{
	for (int s = 0; s < nsizes; s++) out[s] = a[s] < b[s] ? a[s] : b[s];
}

/* What a rank sends of a collective, in one shot or step or in two: how the table counts. */
static size_t sends_of(enum coll c, bool two, size_t bytes, int n)
{
	size_t ranks = (size_t)n, block = bytes;
	if (c == ALL_GATHER || c == REDUCE_SCATTER || c == ALL_TO_ALL || c == GATHER || c == SCATTER) block = bytes / ranks;
	if (two) return c == ALL_REDUCE ? bytes / ranks * (ranks - 1) * 2 : bytes;
	return block * (ranks - 1);
}
/* Up to the last size that is better; without end where all are. */
static size_t limit_of(enum coll c, bool two, int split, int n)
{
	if (split == nsizes) return SIZE_MAX;
	return split ? sends_of(c, two, sizes[split - 1], n) : 0;
}

static void print_from(FILE *to, const char *name, size_t bytes)
{
	if (bytes == SIZE_MAX) fprintf(to, "%snever", name);
	else fprintf(to, "%s%zu", name, bytes);
}

/* The first size that pipes are better for than what else there is, as the table counts; never: more than there is. */
static size_t pipes_from(enum coll c, bool two, const double *others, int n)
{
	int split = crossover(others, times[c][PIPES]);
	return split == nsizes ? SIZE_MAX : sends_of(c, two, sizes[split], n);
}

static void print_class(FILE *to, const char *name, enum coll c, bool two, const double *after, int n)
{
	double lines[SIZES_MOST], others[SIZES_MOST];
	enum way ll = two ? TWO_LL : ONE_LL, ll128 = two ? TWO_LL128 : ONE_LL128;
	least_of(lines, times[c][ll], times[c][ll128]);
	size_t first = limit_of(c, two, crossover(times[c][ll], times[c][ll128]), n), second = limit_of(c, two, crossover(lines, after), n);
	fprintf(to, "%s", name);
	print_from(to, "=", first < second ? first : second);
	print_from(to, ":", second);
	/* One shot has none, and two steps of a broadcast weren't measured through them. */
	least_of(others, lines, after);
	if (was_measured(c, PIPES) && (two ? c == ALL_REDUCE : c != ALL_REDUCE)) print_from(to, ":", pipes_from(c, two, others, n));
	fprintf(to, "\n");
}

/* From the first size that is better. */
static void print_entry(FILE *to, const char *name, int split, size_t bytes)
{
	print_from(to, name, split == nsizes ? SIZE_MAX : bytes);
	fprintf(to, "\n");
}

static void least_of_all(double *out, enum coll c, enum way but)
{
	for (int s = 0; s < nsizes; s++) out[s] = NONE_US;
	for (int w = 0; w < NWAYS; w++)
		if (w != (int)but && has(c, (enum way)w)) least_of(out, out, times[c][w]);
}

/* An entry for what begins to be better than all else that a collective has; none where it wasn't to be had. bytes: what of a size the table counts. */
static void print_first(FILE *to, const char *name, enum coll c, enum way w, size_t (*bytes)(size_t size, int n), int n)
{
	double others[SIZES_MOST];
	if (!was_measured(c, w)) return;
	least_of_all(others, c, w);
	int split = crossover(others, times[c][w]);
	print_entry(to, name, split, split < nsizes ? bytes(sizes[split], n) : 0);
}

static size_t whole(size_t size, int n) { (void)n; return size; }
static size_t block_of(size_t size, int n) { return size / (size_t)n; }
static size_t gathers(size_t size, int n) { return sends_of(ALL_GATHER, false, size, n); }
static size_t two_shots(size_t size, int n) { return sends_of(ALL_REDUCE, true, size, n); }

/* One entry a line. */
static void print_table(FILE *to, int n)
{
	double one[SIZES_MOST], two[SIZES_MOST];
	least_of(two, times[ALL_REDUCE][TWO_LL], times[ALL_REDUCE][TWO_LL128]);
	print_class(to, "one_shot", ALL_REDUCE, false, two, n);
	print_class(to, "two_shot", ALL_REDUCE, true, times[ALL_REDUCE][STEPS], n);
	print_class(to, "scatter", REDUCE_SCATTER, false, times[REDUCE_SCATTER][STEPS], n);
	print_class(to, "gather", ALL_GATHER, false, times[ALL_GATHER][STEPS], n);
	print_class(to, "pairs", ALL_TO_ALL, false, times[ALL_TO_ALL][STEPS], n);
	print_class(to, "rooted", SCATTER, false, times[SCATTER][STREAMS], n);
	print_class(to, "two_step", BROADCAST, true, times[BROADCAST][STEPS], n);
	least_of(one, times[BROADCAST][ONE_LL], times[BROADCAST][ONE_LL128]);
	least_of(two, times[BROADCAST][TWO_LL], times[BROADCAST][TWO_LL128]);
	int split = crossover(one, two);
	print_entry(to, "two_step_from=", split, split < nsizes ? sizes[split] : 0);
	print_first(to, "reduce=", REDUCE, PIPES, whole, n);
	least_of(one, times[SCATTER][ONE_LL], times[SCATTER][ONE_LL128]);
	split = crossover(one, times[SCATTER][STREAMS]);
	if (was_measured(SCATTER, STREAMS)) print_entry(to, "stream=", split, split < nsizes ? block_of(sizes[split], n) : 0);
	if (was_measured(SEND_RECV, PIPES)) {
		split = crossover(times[SEND_RECV][STREAMS], times[SEND_RECV][PIPES]);
		print_entry(to, "transfers=", split, split < nsizes ? sizes[split] : 0);
	}
	print_first(to, "offer=", SEND_RECV, OFFERS, whole, n);
	print_first(to, "window=", ALL_REDUCE, WINDOWS, two_shots, n);
	print_first(to, "copies=", ALL_GATHER, COPIES, gathers, n);
	print_first(to, "copies_rooted=", BROADCAST, COPIES, whole, n);
}

/* For this kind of machine alone, if it goes to a file: there others may stand beside it. */
static bool keep_table(const struct tune_options *o, FILE *to, const char *entries)
{
	const struct group *any = group_of(0);
	if (!to) return true;
	fprintf(to, "# telpher tune --gpu: %s, %d ranks on %d devices, %zu to %zu bytes\n[gpu=\"%s\" ranks=%d join=%s]\n%s", any->device_name, any->nranks,
		any->ndevices, o->min_bytes, o->max_bytes, any->device_name, any->nranks, any->join, entries);
	bool written = !ferror(to);
	if (fclose(to) == 0 && written) {
		printf("Written to %s: TELPHER_CUDA_TABLE=@%s uses it, on machines of this kind.\n", o->table, o->table);
		return true;
	}
	fprintf(stderr, "bench_gpu: the table can't be written to %s: %s\n", o->table, strerror(errno));
	return false;
}

bool tune(const struct tune_options *o)
{
	const struct group *any = group_of(0);
	char *entries = NULL;
	size_t bytes;
	bool right = true;
	for (int c = 0; c < NCOLLS; c++) right &= run((enum coll)c, o);
	for (int w = 0; w < NWAYS; w++) close_group(w);
	FILE *to = open_memstream(&entries, &bytes);
	if (!to) abort();
	print_table(to, any->nranks);
	fclose(to);
	if (right) right = keep_table(o, table, entries);
	else fprintf(stderr, "bench_gpu: results were wrong, so no table is kept\n");
	while (bytes && entries[bytes - 1] == '\n') entries[--bytes] = 0;
	for (char *at = entries; (at = strchr(at, '\n'));) *at = ',';
	printf("\n%s, %d ranks on %d devices: TELPHER_CUDA_TABLE=%s\n", any->device_name, any->nranks, any->ndevices, entries);
	free(entries);
	return right;
}

bool tune_open(const struct tune_options *o)
{
	/* Before anything is measured: that takes minutes. It stays empty if nothing comes of it. */
	if (o->table && !(table = fopen(o->table, "we"))) {
		fprintf(stderr, "bench_gpu: the table can't be written to %s: %s\n", o->table, strerror(errno));
		return false;
	}
	for (size_t size = o->min_bytes; size <= o->max_bytes && nsizes < SIZES_MOST; size *= o->factor) sizes[nsizes++] = size;
	for (int w = 0; w < NWAYS; w++) {
		struct group_options group = o->group;
		group.name = ways[w].name;
		group.registers = ways[w].windows || ways[w].buffers;
		group.buffers = ways[w].buffers;
		group.inits = 1;
		setenv("TELPHER_CUDA_TABLE", ways[w].table, 1);
		open_group(&group);
	}
	return true;
}

/* --tune: what each kind of kernel takes for each collective and size, and from these the table of crossovers, as TELPHER_CUDA_TABLE
 * reads it and src/exec/cuda/table.c keeps it. Each kind has a group of ranks of its own, whose table allows nothing else; they take
 * turns, size by size. A crossover is where the sum of slowdowns against the better one, over all sizes, is the least: one
 * measurement that is off moves nothing. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "bench.h"

enum way { ONE_LL, ONE_LL128, TWO_LL, TWO_LL128, STREAMS, STEPS, PIPES, COPIES, NWAYS };
enum { SIZES_MOST = 48 };

#define ALL(ll, ll128) "gather=" ll ":" ll128 ",scatter=" ll ":" ll128 ",pairs=" ll ":" ll128 ",rooted=" ll ":" ll128
/* one: in one shot, and to or from a root in one step; two: in two. */
static const struct { const char *name, *table; } ways[NWAYS] = {
	[ONE_LL] = { "one LL", "one_shot=1G:1G," ALL("1G", "1G") ",two_step_from=64G,stream=64G,pipes=0" },
	[ONE_LL128] = { "one LL128", "one_shot=0:1G," ALL("0", "1G") ",two_step_from=64G,stream=64G,pipes=0" },
	[TWO_LL] = { "two LL", "one_shot=0:0,two_shot=1G:1G,two_step=1G:1G,two_step_from=1," ALL("1G", "1G") ",stream=64G,pipes=0" },
	[TWO_LL128] = { "two LL128", "one_shot=0:0,two_shot=0:1G,two_step=0:1G,two_step_from=1," ALL("0", "1G") ",stream=64G,pipes=0" },
	[STREAMS] = { "streams", "stream=1,pipes=0" },
	[STEPS] = { "steps", "one_shot=0:0,two_shot=0:0,two_step=0:0,two_step_from=64G,stream=64G," ALL("0", "0") ",pipes=0" },
	/* Where the library would have any (pipes=1). */
	[PIPES] = { "pipes", "one_shot=0:0,two_shot=0:0:0,two_step=0:0:0,two_step_from=64G,stream=64G,gather=0:0:0,scatter=0:0:0,pairs=0:0:0,rooted=0:0:0,"
		"reduce=1,pipes=1" },
	[COPIES] = { "copies", "copies=1,copies_rooted=1,pipes=0" },
};
static double times[NCOLLS][NWAYS][SIZES_MOST];
static size_t sizes[SIZES_MOST];
static int nsizes;

static bool has(enum coll c, enum way w)
{
	bool two = c == ALL_REDUCE || c == BROADCAST || c == REDUCE, moves = c == GATHER || c == SCATTER;
	if (w == TWO_LL || w == TWO_LL128) return two;
	if (w == COPIES) return c == ALL_GATHER || c == ALL_TO_ALL || c == BROADCAST;
	return w != STREAMS || moves;
}

static void run(enum coll c, int repeats)
{
	printf("\n%s, us a call\n%-12s", coll_names[c], "bytes");
	for (int w = 0; w < NWAYS; w++)
		if (has(c, (enum way)w)) printf(" %10s", ways[w].name);
	printf("\n");
	for (int s = 0; s < nsizes; s++) {
		printf("%-12zu", sizes[s]);
		for (int w = 0; w < NWAYS; w++) {
			if (!has(c, (enum way)w)) continue;
			struct cell cell = { .coll = c, .bytes = sizes[s], .mode = GRAPH, .registered = w == COPIES, .calls = calls_for(sizes[s]), .repeats = repeats };
			struct answer a = measure_cell(w, &cell);
			/* Where pipes aren't to be had, something else ran. */
			bool other = w == PIPES && !a.shared;
			times[c][w][s] = a.wrong || other ? 1e12 : a.device_us;
			printf(a.wrong ? "      WRONG" : other ? "       none" : " %10.2f", a.device_us);
		}
		printf("\n");
		fflush(stdout);
	}
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
/* Up to the last size that is better; 1 GB where all are. */
static size_t limit_of(enum coll c, bool two, int split, int n)
{
	if (split == nsizes) return (size_t)1 << 30;
	return split ? sends_of(c, two, sizes[split - 1], n) : 0;
}

/* The first size that pipes are better for than what else there is, as the table counts; never: more than there is. */
static size_t pipes_from(enum coll c, bool two, const double *others, int n)
{
	int split = crossover(others, times[c][PIPES]);
	return split == nsizes ? SIZE_MAX : sends_of(c, two, sizes[split], n);
}

static void print_class(const char *name, enum coll c, bool two, const double *after, int n)
{
	double lines[SIZES_MOST], others[SIZES_MOST];
	enum way ll = two ? TWO_LL : ONE_LL, ll128 = two ? TWO_LL128 : ONE_LL128;
	least_of(lines, times[c][ll], times[c][ll128]);
	size_t first = limit_of(c, two, crossover(times[c][ll], times[c][ll128]), n), second = limit_of(c, two, crossover(lines, after), n);
	printf("%s=%zu:%zu", name, first < second ? first : second, second);
	/* One shot has none, and two steps of a broadcast weren't measured through them. */
	least_of(others, lines, after);
	if (two ? c == ALL_REDUCE : c != ALL_REDUCE) printf(":%zu", pipes_from(c, two, others, n));
	printf(",");
}

/* From the first size that is better; 64 GB where none is. */
static size_t from_of(int split, size_t divisor) { return split == nsizes ? (size_t)64 << 30 : sizes[split] / divisor; }

static size_t sends_from(int split, int n) { return split == nsizes ? (size_t)64 << 30 : sends_of(ALL_GATHER, false, sizes[split], n); }

bool tune(const struct group *any, int repeats)
{
	static const enum coll colls[] = { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL, BROADCAST, REDUCE, GATHER, SCATTER };
	double one[SIZES_MOST], two[SIZES_MOST], lines[SIZES_MOST];
	int n = any->nranks;
	for (size_t c = 0; c < sizeof(colls) / sizeof(colls[0]); c++) run(colls[c], repeats);
	printf("\n%s, %d ranks on %d devices: TELPHER_CUDA_TABLE=", any->device_name, n, any->ndevices);
	least_of(two, times[ALL_REDUCE][TWO_LL], times[ALL_REDUCE][TWO_LL128]);
	print_class("one_shot", ALL_REDUCE, false, two, n);
	print_class("two_shot", ALL_REDUCE, true, times[ALL_REDUCE][STEPS], n);
	print_class("scatter", REDUCE_SCATTER, false, times[REDUCE_SCATTER][STEPS], n);
	print_class("gather", ALL_GATHER, false, times[ALL_GATHER][STEPS], n);
	print_class("pairs", ALL_TO_ALL, false, times[ALL_TO_ALL][STEPS], n);
	print_class("rooted", SCATTER, false, times[SCATTER][STREAMS], n);
	print_class("two_step", BROADCAST, true, times[BROADCAST][STEPS], n);
	least_of(one, times[BROADCAST][ONE_LL], times[BROADCAST][ONE_LL128]);
	least_of(two, times[BROADCAST][TWO_LL], times[BROADCAST][TWO_LL128]);
	printf("two_step_from=%zu,", from_of(crossover(one, two), 1));
	least_of(one, times[REDUCE][ONE_LL], times[REDUCE][ONE_LL128]);
	least_of(lines, one, times[REDUCE][STEPS]);
	printf("reduce=%zu,", pipes_from(REDUCE, true, lines, n));
	least_of(lines, times[SCATTER][ONE_LL], times[SCATTER][ONE_LL128]);
	printf("stream=%zu,", from_of(crossover(lines, times[SCATTER][STREAMS]), (size_t)n));
	least_of(one, times[ALL_GATHER][ONE_LL], times[ALL_GATHER][ONE_LL128]);
	least_of(lines, one, times[ALL_GATHER][STEPS]);
	printf("copies=%zu,", sends_from(crossover(lines, times[ALL_GATHER][COPIES]), n));
	least_of(one, times[BROADCAST][ONE_LL], times[BROADCAST][ONE_LL128]);
	least_of(two, times[BROADCAST][TWO_LL], times[BROADCAST][TWO_LL128]);
	least_of(lines, one, two);
	least_of(lines, lines, times[BROADCAST][STEPS]);
	printf("copies_rooted=%zu\n", from_of(crossover(lines, times[BROADCAST][COPIES]), 1));
	return true;
}

void tune_open(const char *path, int nranks, int ndevices, size_t min_bytes, size_t max_bytes, size_t factor)
{
	for (size_t bytes = min_bytes; bytes <= max_bytes && nsizes < SIZES_MOST; bytes *= factor) sizes[nsizes++] = bytes;
	for (int w = 0; w < NWAYS; w++) {
		setenv("TELPHER_CUDA_TABLE", ways[w].table, 1);
		open_group(ways[w].name, path, nranks, ndevices, w == COPIES);
	}
}

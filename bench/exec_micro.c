/* The host executor alone: ranks as forked processes, the engine's way of waiting, no API in between. Prints the median of
 * the time a call, back to back, for all-reduce (fused one-shot where it applies, else the steps of each plan), all-gather
 * and broadcast. usage: exec_micro [ranks [largest bytes [part of a name [threads]]]] */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "exec/helper_world.h"

enum { BATCHES = 31 };
struct subject { const char *name; enum tp_coll coll; enum tp_algo algo; bool fused; size_t chunk; size_t least, most; };
static const struct subject subjects[] = {
	{ "all_reduce one_shot fused", TP_ALL_REDUCE, TP_ALGO_ONE_SHOT, true, 64 << 10, 0, 32 << 10 },
	{ "all_reduce one_shot steps", TP_ALL_REDUCE, TP_ALGO_ONE_SHOT, false, 64 << 10, 0, 64 << 10 },
	{ "all_reduce two_shot", TP_ALL_REDUCE, TP_ALGO_TWO_SHOT, false, 256 << 10, 4 << 10, SIZE_MAX },
	{ "all_reduce two_shot 1M", TP_ALL_REDUCE, TP_ALGO_TWO_SHOT, false, 1 << 20, 1 << 20, SIZE_MAX },
	{ "all_reduce ring", TP_ALL_REDUCE, TP_ALGO_RING, false, 128 << 10, 32 << 10, SIZE_MAX },
	{ "all_gather direct", TP_ALL_GATHER, TP_ALGO_DIRECT, false, 1 << 20, 0, SIZE_MAX },
	{ "broadcast direct", TP_BROADCAST, TP_ALGO_DIRECT, false, 1 << 20, 0, SIZE_MAX },
	{ "reduce_scatter direct", TP_REDUCE_SCATTER, TP_ALGO_DIRECT, false, 1 << 20, 0, SIZE_MAX },
	{ "all_to_all direct", TP_ALL_TO_ALL, TP_ALGO_DIRECT, false, 1 << 20, 0, SIZE_MAX },
};
static size_t largest = 16 << 20;
static const char *wanted = "";

static int compare(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

static void call_once(struct world *world, const struct tp_exec_call *call, bool fused)
{
	bool handled = false;
	if (fused && tp_exec_one_shot(world->exec, call, world->crowded, NULL, NULL, &handled) != ncclSuccess) abort();
	if (!handled && world_run_call(world, call) != ncclSuccess) abort();
}

static int measure(struct world *world)
{
	int n = world->nranks;
	/* As mpirun does where there are enough cores: the peers are measured that way, too. */
	cpu_set_t core;
	CPU_ZERO(&core);
	CPU_SET(world->rank, &core);
	if (!world->crowded) sched_setaffinity(0, sizeof(core), &core);
	struct tp_layout *layout;
	int *domains = calloc((size_t)n, sizeof(int));
	if (tp_layout_create(n, domains, &layout) != ncclSuccess) return __LINE__;
	float *input = malloc(largest * (size_t)n + 64), *output = malloc(largest * (size_t)n + 64);
	for (size_t i = 0; i < largest * (size_t)n / 4; i++) input[i] = (float)(world->rank + (int)(i % 7));
	memset(output, 0, largest * (size_t)n);
	for (size_t s = 0; s < TP_ARRAY_LEN(subjects); s++) {
		const struct subject *subject = &subjects[s];
		struct tp_plan *plan;
		if (!strstr(subject->name, wanted)) continue;
		bool rooted = subject->coll == TP_BROADCAST;
		struct tp_plan_spec spec = { subject->coll, subject->algo, rooted ? 0 : -1, 1, layout };
		if (tp_plan_create(&spec, world->rank, &plan) != ncclSuccess) return __LINE__;
		for (size_t bytes = 8; bytes <= largest; bytes *= 8) {
			if (bytes < subject->least || bytes > subject->most) continue;
			struct tp_exec_call call = { .plan = plan, .input = input, .output = output, .block_bytes = bytes, .chunk_bytes = subject->chunk,
				.line_bytes = 16, .reduce = { .type = ncclFloat32, .op = ncclSum }, .tag = 7 };
			int iterations = bytes <= 512 ? 10000 : bytes <= 4096 ? 2000 : bytes <= (256 << 10) ? 100 : bytes <= (2 << 20) ? 10 : 2;
			if (n > 2) iterations = iterations / 4 + 2;
			double times[BATCHES];
			for (int b = -1; b < BATCHES; b++) {
				world_barrier(world);
				uint64_t start = tp_clock_ns();
				for (int i = 0; i < iterations; i++) call_once(world, &call, subject->fused);
				if (b >= 0) times[b] = (double)(tp_clock_ns() - start) / 1e3 / iterations;
			}
			qsort(times, BATCHES, sizeof(*times), compare);
			if (world->rank == 0) printf("%-28s n %d bytes %9zu median %10.3f us least %10.3f\n", subject->name, n, bytes, times[BATCHES / 2], times[0]);
			fflush(stdout);
		}
		tp_exec_forget(world->exec, plan);
		tp_plan_free(plan);
	}
	free(input);
	free(output);
	free(domains);
	tp_layout_free(layout);
	return 0;
}

int main(int argc, char **argv)
{
	struct world_options options = { .kind = argc > 4 ? WORLD_THREADS : WORLD_PROCESSES, .nranks = argc > 1 ? atoi(argv[1]) : 2, .nchannels = 1,
		.by_ref = true };
	if (argc > 2) largest = strtoull(argv[2], NULL, 0);
	if (argc > 3) wanted = argv[3];
	return world_run(&options, measure, NULL) != 0;
}

/* The CUDA executor's launches: several calls in one, captures, calls that differ, aborts, net links. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "exec/cuda/internal.h"
#include "exec/helper_cuda.h"

enum { CHANNELS = 2, POOL_BYTES = 4 << 20, COUNT = 5000 };

static struct tp_plan *make_plan(const struct world *world, enum tp_coll coll, enum tp_algo algo)
{
	static const int domains[64];
	struct tp_layout *layout;
	struct tp_plan *plan = NULL;
	if (tp_layout_create(world->nranks, domains, &layout) != ncclSuccess) return NULL;
	struct tp_plan_spec spec = { coll, algo, -1, CHANNELS, layout };
	tp_plan_create(&spec, world->rank, &plan);
	tp_layout_free(layout);
	return plan;
}

static void put_ints(struct cuda_rank *c, void *to, int first, int count)
{
	int *ints = malloc((size_t)count * sizeof(int));
	for (int i = 0; i < count; i++) ints[i] = first + i;
	cuda_put(c, to, ints, (size_t)count * sizeof(int));
	free(ints);
}

/* Element i is first + i * step. */
static bool has_ints(struct cuda_rank *c, const void *from, int first, int step, int count)
{
	int *ints = malloc((size_t)count * sizeof(int));
	bool right = true;
	cuda_get(c, ints, from, (size_t)count * sizeof(int));
	for (int i = 0; i < count && right; i++) {
		right = ints[i] == first + i * step;
		if (!right) fprintf(stderr, "element %d is %d, not %d\n", i, ints[i], first + i * step);
	}
	free(ints);
	return right;
}

static struct tp_exec_call sum_call(const struct tp_plan *plan, const void *in, void *out, uint32_t tag)
{
	return (struct tp_exec_call){ .plan = plan, .input = in, .output = out, .block_bytes = COUNT * sizeof(int), .chunk_bytes = 2048, .line_bytes = 16,
		.reduce = { .type = ncclInt32, .op = ncclSum }, .tag = tag };
}

static int sum_of_ranks(const struct world *world) { return world->nranks * (world->nranks - 1) / 2; }

static int groups(struct world *world)
{
	struct cuda_rank c;
	struct tp_cuda_status status;
	struct tp_exec_call calls[12];
	void *in[12], *out[12];
	WORLD_CHECK(cuda_open(world, CHANNELS, 2, POOL_BYTES, &c));
	c.exec->fused.usable = false;
	struct tp_plan *plans[2] = { make_plan(world, TP_ALL_REDUCE, TP_ALGO_RING), make_plan(world, TP_ALL_REDUCE, TP_ALGO_TREE) };
	for (int i = 0; i < 12; i++) {
		WORLD_CHECK(in[i] = cuda_take(&c, COUNT * sizeof(int), 0));
		WORLD_CHECK(out[i] = cuda_take(&c, COUNT * sizeof(int), 0));
		put_ints(&c, in[i], world->rank + 100 * i, COUNT);
		calls[i] = sum_call(plans[i % 2], in[i], out[i], (uint32_t)i);
		WORLD_CHECK(tp_cuda_exec_prepare(c.exec, plans[i % 2]) == ncclSuccess);
	}
	WORLD_CHECK(tp_cuda_exec_launch(c.exec, c.stream, calls, 12) == ncclSuccess);
	for (int i = 0; i < 12; i++) WORLD_CHECK(has_ints(&c, out[i], sum_of_ranks(world) + world->nranks * 100 * i, world->nranks, COUNT));
	tp_cuda_exec_status(c.exec, &status);
	WORLD_CHECK(status.launched == 2 && status.completed == 2 && status.fault == TP_CUDA_FINE);
	/* The second reads what the first writes: not in one launch. */
	calls[1].input = calls[0].output;
	WORLD_CHECK(tp_cuda_exec_launch(c.exec, c.stream, calls, 2) == ncclSuccess);
	WORLD_CHECK(has_ints(&c, out[1], sum_of_ranks(world) * world->nranks, world->nranks * world->nranks, COUNT));
	tp_cuda_exec_status(c.exec, &status);
	WORLD_CHECK(status.launched == 4 && status.completed == 4);
	/* Another operation is another kernel. */
	calls[1] = sum_call(plans[1], in[1], out[1], 77);
	calls[1].reduce.op = ncclMax;
	WORLD_CHECK(tp_cuda_exec_launch(c.exec, c.stream, calls, 3) == ncclSuccess);
	WORLD_CHECK(has_ints(&c, out[1], 100 + world->nranks - 1, 1, COUNT));
	tp_cuda_exec_status(c.exec, &status);
	WORLD_CHECK(status.launched == 7 && status.completed == 7);
	cuda_close(world, &c);
	tp_plan_free(plans[0]);
	tp_plan_free(plans[1]);
	return 0;
}

/* Replays of a captured program, with other calls in between; the plan is prepared within the capture. */
static int captures(struct world *world)
{
	struct cuda_rank c;
	CUgraph graph;
	CUgraphExec replay;
	int next = (world->rank + 1) % world->nranks, before = (world->rank + world->nranks - 1) % world->nranks;
	WORLD_CHECK(cuda_open(world, CHANNELS, 2, POOL_BYTES, &c));
	struct tp_plan *plan = make_plan(world, TP_ALL_REDUCE, TP_ALGO_RING);
	void *in = cuda_take(&c, COUNT * sizeof(int), 4), *out = cuda_take(&c, COUNT * sizeof(int), 0), *got = cuda_take(&c, COUNT * sizeof(int), 8);
	WORLD_CHECK(in && out && got);
	struct tp_exec_transfer transfers[2] = { { next, true, out, COUNT * sizeof(int) }, { before, false, got, COUNT * sizeof(int) } };
	struct tp_exec_call calls[2] = { sum_call(plan, in, out, 5), { .chunk_bytes = 2048, .line_bytes = 16, .transfers = transfers, .ntransfers = 2 } };
	world_barrier(world);       /* what other threads do with streams would end a capture */
	WORLD_CHECK(tp_cuda->StreamBeginCapture(c.stream, CU_STREAM_CAPTURE_MODE_GLOBAL) == CUDA_SUCCESS);
	WORLD_CHECK(tp_cuda_exec_prepare(c.exec, plan) == ncclSuccess);
	WORLD_CHECK(tp_cuda_exec_launch(c.exec, c.stream, calls, 2) == ncclSuccess);
	WORLD_CHECK(tp_cuda->StreamEndCapture(c.stream, &graph) == CUDA_SUCCESS);
	world_barrier(world);
	WORLD_CHECK(tp_cuda->GraphInstantiate(&replay, graph, 0) == CUDA_SUCCESS);
	for (int round = 0; round < 6; round++) {
		put_ints(&c, in, world->rank + 10 * round, COUNT);
		if (round % 2) WORLD_CHECK(tp_cuda_exec_launch(c.exec, c.stream, calls, 1) == ncclSuccess);
		if (round % 3) WORLD_CHECK(tp_cuda_exec_launch(c.exec, c.stream, &calls[1], 1) == ncclSuccess);
		WORLD_CHECK(tp_cuda->GraphLaunch(replay, c.stream) == CUDA_SUCCESS);
		WORLD_CHECK(has_ints(&c, got, sum_of_ranks(world) + world->nranks * 10 * round, world->nranks, COUNT));
		WORLD_CHECK(has_ints(&c, out, sum_of_ranks(world) + world->nranks * 10 * round, world->nranks, COUNT));
	}
	world_barrier(world);
	WORLD_CHECK(tp_cuda->GraphExecDestroy(replay) == CUDA_SUCCESS);
	WORLD_CHECK(tp_cuda->GraphDestroy(graph) == CUDA_SUCCESS);
	cuda_close(world, &c);
	tp_plan_free(plan);
	return 0;
}

static int calls_differ(struct world *world)
{
	struct cuda_rank c;
	struct tp_cuda_status status;
	WORLD_CHECK(cuda_open(world, CHANNELS, 2, POOL_BYTES, &c));
	c.exec->fused.usable = false;
	struct tp_plan *plan = make_plan(world, TP_ALL_REDUCE, TP_ALGO_RING);
	void *in = cuda_take(&c, COUNT * sizeof(int), 0), *out = cuda_take(&c, COUNT * sizeof(int), 0);
	struct tp_exec_call call = sum_call(plan, in, out, world->rank ? 0xbeef : 0xcafe);
	WORLD_CHECK(tp_cuda_exec_prepare(c.exec, plan) == ncclSuccess);
	WORLD_CHECK(tp_cuda_exec_launch(c.exec, c.stream, &call, 1) == ncclSuccess);
	tp_cuda->StreamSynchronize(c.stream);
	tp_cuda_exec_status(c.exec, &status);
	WORLD_CHECK(status.fault == TP_CUDA_TAG && status.peer == !world->rank);
	WORLD_CHECK(status.found == (world->rank ? 0xcafe : 0xbeef) && status.expected == call.tag);
	WORLD_CHECK(status.completed == 1);
	WORLD_CHECK(tp_cuda_exec_launch(c.exec, c.stream, &call, 1) == ncclInvalidUsage);
	cuda_close(world, &c);
	tp_plan_free(plan);
	return 0;
}

/* Rank 1 never calls. */
static int abort_waiting(struct world *world)
{
	struct cuda_rank c;
	struct tp_cuda_status status;
	WORLD_CHECK(cuda_open(world, CHANNELS, 2, POOL_BYTES, &c));
	c.exec->fused.usable = false;
	struct tp_plan *plan = make_plan(world, TP_ALL_REDUCE, TP_ALGO_TWO_SHOT);
	void *in = cuda_take(&c, COUNT * sizeof(int), 0), *out = cuda_take(&c, COUNT * sizeof(int), 0);
	struct tp_exec_call call = sum_call(plan, in, out, 1);
	WORLD_CHECK(tp_cuda_exec_prepare(c.exec, plan) == ncclSuccess);
	if (world->rank == 0) {
		for (int i = 0; i < 3; i++) WORLD_CHECK(tp_cuda_exec_launch(c.exec, c.stream, &call, 1) == ncclSuccess);
		tp_cuda_exec_status(c.exec, &status);
		WORLD_CHECK(status.launched == 3 && status.completed == 0 && status.fault == TP_CUDA_FINE);
		tp_cuda_exec_abort(c.exec);
		tp_cuda->StreamSynchronize(c.stream);
		tp_cuda_exec_status(c.exec, &status);
		WORLD_CHECK(status.completed == 3 && status.fault == TP_CUDA_ABORTED);
		WORLD_CHECK(tp_cuda_exec_launch(c.exec, c.stream, &call, 1) != ncclSuccess);
	}
	cuda_close(world, &c);
	tp_plan_free(plan);
	return 0;
}

static int explains(struct world *world)
{
	struct cuda_rank c;
	int blocks = 0;
	WORLD_CHECK(cuda_open(world, CHANNELS, 2, POOL_BYTES, &c));
	c.exec->fused.usable = false;
	struct tp_plan *plan = make_plan(world, TP_ALL_REDUCE, TP_ALGO_RING);
	struct tp_exec_call call = sum_call(plan, NULL, NULL, 1);
	WORLD_CHECK(!strcmp(tp_cuda_exec_explain(c.exec, &call, &blocks), "RING/SIMPLE") && blocks == CHANNELS);
	WORLD_CHECK(tp_cuda_exec_launch(c.exec, c.stream, &call, 1) == ncclInternalError);      /* never prepared */
	struct tp_exec_transfer t = { !world->rank, true, NULL, 1 << 20 };
	call = (struct tp_exec_call){ .chunk_bytes = 4096, .line_bytes = 16, .transfers = &t, .ntransfers = 1 };
	WORLD_CHECK(!strcmp(tp_cuda_exec_explain(c.exec, &call, &blocks), "SEND_RECV/SIMPLE") && blocks == CHANNELS);
	cuda_close(world, &c);
	tp_plan_free(plan);
	return 0;
}

static void run(int (*body)(struct world *world), int nranks)
{
	struct world_options options = { .kind = WORLD_THREADS, .nranks = nranks, .nchannels = CHANNELS };
	assert_int_equal(world_run(&options, body, NULL), 0);
}

static void calls_of_a_group_share_launches_unless_they_touch(void **state)
{
	(void)state;
	run(groups, 2);
	run(groups, 3);
}

static void captured_calls_replay_among_others(void **state)
{
	(void)state;
	run(captures, 2);
	run(captures, 4);
}

static void calls_that_differ_are_a_fault_that_names_the_peer(void **state)
{
	(void)state;
	run(calls_differ, 2);
}

static void abort_ends_kernels_that_wait_and_those_behind_them(void **state)
{
	(void)state;
	run(abort_waiting, 2);
}

static void explain_says_what_a_call_runs_as(void **state)
{
	(void)state;
	run(explains, 2);
}

int main(void)
{
	if (!cuda_has_driver()) {
		fprintf(stderr, "no GPU driver\n");
		return 77;
	}
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(calls_of_a_group_share_launches_unless_they_touch),
		cmocka_unit_test(captured_calls_replay_among_others),
		cmocka_unit_test(calls_that_differ_are_a_fault_that_names_the_peer),
		cmocka_unit_test(abort_ends_kernels_that_wait_and_those_behind_them),
		cmocka_unit_test(explain_says_what_a_call_runs_as),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

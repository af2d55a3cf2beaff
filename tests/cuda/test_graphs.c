/* Captured graphs: replayed any number of times with new data, mixed with eager calls, on several streams and communicators. */
#include "cuda/helper_ops.h"

enum { MOST = 8 };

struct captured { CUgraphExec exec; struct gpu_op ops[MOST]; int n; };

static void begin(struct gpu_rank *g, int stream, CUstreamCaptureMode mode) { CUDA_OK(StreamBeginCapture(g->streams[stream], mode)); }

static struct gpu_op make_op(struct gpu_rank *g, uint64_t seed)
{
	struct random random = { seed };
	struct gpu_op o;
	draw_op(&random, g->r->nranks, &o);
	o.rank = g->r->rank;
	o.nranks = g->r->nranks;
	if (o.count > 3000) o.count = 3000 + o.count % 1000;
	o.count *= gpu_scale();
	return o;
}

/* n operations in a row, in a group or not. */
static void capture(struct gpu_rank *g, struct captured *c, int n, int stream, CUstreamCaptureMode mode, bool grouped, uint64_t seed)
{
	struct ranks *r = g->r;
	c->n = n;
	for (int i = 0; i < n; i++) {
		c->ops[i] = make_op(g, seed + (uint64_t)i);
		op_prepare(g, &c->ops[i]);
	}
	ranks_barrier(r);               /* one rank's copies are no part of another's capture */
	begin(g, stream, mode);
	if (grouped) REQUIRE_OK(ncclGroupStart());
	for (int i = 0; i < n; i++) REQUIRE_OK(op_issue(&c->ops[i], g->comm, g->streams[stream]));
	if (grouped) REQUIRE_OK(ncclGroupEnd());
	c->exec = gpu_end_capture(g, stream);
	ranks_barrier(r);
}

static void refill(struct gpu_rank *g, struct captured *c, uint64_t seed)
{
	for (int i = 0; i < c->n; i++) op_fill(g, &c->ops[i], seed + (uint64_t)i * 1000);
}

static void check(struct gpu_rank *g, struct captured *c)
{
	for (int i = 0; i < c->n; i++) op_check(g, &c->ops[i]);
}

static void drop(struct captured *c) { CUDA_OK(GraphExecDestroy(c->exec)); }

static void replay(struct gpu_rank *g)
{
	struct captured c;
	for (int k = 0; k < 3; k++) {
		gpu_reset(g);
		capture(g, &c, 1 + 2 * k, 1, k == 1 && !g->arg ? CU_STREAM_CAPTURE_MODE_GLOBAL : CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, k == 2, (uint64_t)k * 77 + 5);
		for (int i = 0; i < 6; i++) {
			refill(g, &c, (uint64_t)i);
			CUDA_OK(GraphLaunch(c.exec, g->streams[1]));
			gpu_sync(g, 1);
			check(g, &c);
		}
		drop(&c);
	}
}

/* Back to back: eager, graph, eager, other graph, on one stream or on two. */
static void mixed(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	struct captured a, b;
	struct gpu_op eager[4];
	capture(g, &a, 3, 1, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, false, 21);
	capture(g, &b, 2, 2, CU_STREAM_CAPTURE_MODE_RELAXED, true, 43);
	for (int i = 0; i < 4; i++) {
		eager[i] = make_op(g, 60 + (uint64_t)i);
		op_prepare(g, &eager[i]);
	}
	for (int i = 0; i < 5; i++) {
		int second = i % 2 ? 2 : 1;     /* another stream: ordered by the communicator */
		refill(g, &a, (uint64_t)i * 3 + 1);
		refill(g, &b, (uint64_t)i * 5 + 2);
		for (int k = 0; k < 4; k++) op_fill(g, &eager[k], (uint64_t)(i * 11 + k));
		REQUIRE_OK(op_issue(&eager[0], g->comm, g->streams[1]));
		CUDA_OK(GraphLaunch(a.exec, g->streams[1]));
		REQUIRE_OK(op_issue(&eager[1], g->comm, g->streams[second]));
		CUDA_OK(GraphLaunch(b.exec, g->streams[second]));
		REQUIRE_OK(op_issue(&eager[2], g->comm, g->streams[1]));
		REQUIRE_OK(op_issue(&eager[3], g->comm, g->streams[second]));
		gpu_sync(g, 1);
		gpu_sync(g, 2);
		check(g, &a);
		check(g, &b);
		for (int k = 0; k < 4; k++) op_check(g, &eager[k]);
	}
	drop(&a);
	drop(&b);
}

/* One capture that forks: two communicators on two streams, joined again. */
static void forked(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	ncclComm_t other;
	CUevent fork, join;
	struct gpu_op ops[4];
	REQUIRE_OK(ncclCommSplit(g->comm, 0, r->rank, &other, NULL));
	CUDA_OK(EventCreate(&fork, CU_EVENT_DISABLE_TIMING));
	CUDA_OK(EventCreate(&join, CU_EVENT_DISABLE_TIMING));
	for (int i = 0; i < 4; i++) {
		ops[i] = make_op(g, 100 + (uint64_t)i);
		op_prepare(g, &ops[i]);
	}
	ranks_barrier(r);
	begin(g, 1, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
	CUDA_OK(EventRecord(fork, g->streams[1]));
	CUDA_OK(StreamWaitEvent(g->streams[2], fork, 0));
	REQUIRE_OK(op_issue(&ops[0], g->comm, g->streams[1]));
	REQUIRE_OK(op_issue(&ops[1], other, g->streams[2]));
	REQUIRE_OK(op_issue(&ops[2], g->comm, g->streams[1]));
	REQUIRE_OK(op_issue(&ops[3], other, g->streams[2]));
	CUDA_OK(EventRecord(join, g->streams[2]));
	CUDA_OK(StreamWaitEvent(g->streams[1], join, 0));
	CUgraphExec exec = gpu_end_capture(g, 1);
	ranks_barrier(r);
	for (int i = 0; i < 5; i++) {
		for (int k = 0; k < 4; k++) op_fill(g, &ops[k], (uint64_t)(i * 7 + k));
		CUDA_OK(GraphLaunch(exec, g->streams[1]));
		gpu_sync(g, 1);
		for (int k = 0; k < 4; k++) op_check(g, &ops[k]);
	}
	CUDA_OK(GraphExecDestroy(exec));
	CUDA_OK(EventDestroy(fork));
	CUDA_OK(EventDestroy(join));
	REQUIRE_OK(ncclCommDestroy(other));
}

/* The same communicator on both branches of a fork: in the order of the calls. */
static void forked_one_communicator(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	CUevent fork, join;
	struct gpu_op ops[4];
	CUDA_OK(EventCreate(&fork, CU_EVENT_DISABLE_TIMING));
	CUDA_OK(EventCreate(&join, CU_EVENT_DISABLE_TIMING));
	for (int i = 0; i < 4; i++) {
		ops[i] = make_op(g, 200 + (uint64_t)i);
		op_prepare(g, &ops[i]);
	}
	ranks_barrier(r);
	begin(g, 1, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
	CUDA_OK(EventRecord(fork, g->streams[1]));
	CUDA_OK(StreamWaitEvent(g->streams[2], fork, 0));
	for (int i = 0; i < 4; i++) REQUIRE_OK(op_issue(&ops[i], g->comm, g->streams[1 + i % 2]));
	CUDA_OK(EventRecord(join, g->streams[2]));
	CUDA_OK(StreamWaitEvent(g->streams[1], join, 0));
	CUgraphExec exec = gpu_end_capture(g, 1);
	ranks_barrier(r);
	for (int i = 0; i < 3; i++) {
		for (int k = 0; k < 4; k++) op_fill(g, &ops[k], (uint64_t)(i * 7 + k));
		CUDA_OK(GraphLaunch(exec, g->streams[1]));
		gpu_sync(g, 1);
		for (int k = 0; k < 4; k++) op_check(g, &ops[k]);
	}
	CUDA_OK(GraphExecDestroy(exec));
	CUDA_OK(EventDestroy(fork));
	CUDA_OK(EventDestroy(join));
}

/* First calls of all, captured: what an eager call would have prepared must be there. */
static void first_call_captured(struct gpu_rank *g)
{
	struct captured c;
	capture(g, &c, 1, 1, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, false, *(const uint64_t *)g->arg);
	refill(g, &c, 9);
	CUDA_OK(GraphLaunch(c.exec, g->streams[2]));
	gpu_sync(g, 2);
	check(g, &c);
	drop(&c);
}

static bool run(gpu_body body, int nranks, bool threads, int ndevices, int nhosts, void *arg)
{
	struct gpu_options o = { .nranks = nranks, .threads = threads, .ndevices = ndevices, .nhosts = nhosts, .pool_bytes = (size_t)8 << 20 };
	return gpu_run(&o, body, arg);
}

static void everywhere(gpu_body body)
{
	assert_true(run(body, 1, false, 1, 1, NULL));
	assert_true(run(body, 2, false, 1, 1, NULL));
	assert_true(run(body, 4, false, 2, 1, NULL));
	assert_true(run(body, 3, true, 1, 1, "threads"));
	assert_true(run(body, 4, false, 1, 2, NULL));
}

static void graphs_replay_with_new_data(void **state) { (void)state; everywhere(replay); }
static void graphs_mix_with_eager_calls(void **state) { (void)state; everywhere(mixed); }
static void a_capture_may_fork_to_two_communicators(void **state) { (void)state; everywhere(forked); }
static void a_communicator_in_both_branches_is_ordered(void **state) { (void)state; everywhere(forked_one_communicator); }
static void a_first_call_may_be_captured(void **state)
{
	(void)state;
	for (uint64_t seed = 1; seed < 5; seed++) assert_true(run(first_call_captured, 2, seed % 2, 1, 1, &seed));
}

int main(void)
{
	gpu_need();
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(graphs_replay_with_new_data), cmocka_unit_test(graphs_mix_with_eager_calls),
		cmocka_unit_test(a_capture_may_fork_to_two_communicators), cmocka_unit_test(a_communicator_in_both_branches_is_ordered),
		cmocka_unit_test(a_first_call_may_be_captured),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

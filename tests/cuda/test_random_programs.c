/* Random programs on GPU ranks: communicators, groups, types, counts, streams, graphs, on 1 to 8 ranks, each result compared with a
 * plain reference. One seed makes a program, the same on all ranks; it is printed where something is wrong.
 *   test_cuda_random_programs [seconds [seed]]     (TELPHER_RANDOM_SECONDS, TELPHER_RANDOM_SEED)
 * RANDOM_TRACE=1 prints what rank 0 does; RANDOM_ONLY=0110… leaves out the steps with a 0, to find what matters. */
#include <time.h>

#include "cuda/helper_ops.h"

enum { MAX_COMMS = 4, MAX_PENDING = 12, MAX_GRAPHS = 3, MAX_NODES = 3 };

struct member { ncclComm_t comm; int rank, nranks; };   /* nranks 0: none */
struct pending { struct gpu_op o; int comm, stream, nth; };       /* nth: in its graph, with those of communicators that aren't ours */
struct kept { CUgraphExec exec; struct pending ops[MAX_NODES]; int n, stream; bool outstanding; };

struct program {
	struct gpu_rank *g;
	struct random random;
	struct member members[MAX_COMMS];
	int ncomms;
	struct pending pending[MAX_PENDING];
	int npending;
	struct kept graphs[MAX_GRAPHS];
	int ngraphs;
	size_t below_graphs;            /* of the pool: the graphs' memory */
	bool skip;                      /* draw, but do nothing */
	int step;
};

static void trace(const struct program *p, const char *what, const struct pending *all, int n, int stream)
{
	if (p->g->r->rank != 0 || !getenv("RANDOM_TRACE")) return;
	fprintf(stderr, "%d: %s", p->step, what);
	if (stream >= 0) fprintf(stderr, " on stream %d", stream);
	for (int i = 0; i < n; i++)
		fprintf(stderr, "%s %s(comm %d, stream %d, count %zu, type %d, op %d, root %d, %s, skew %d %d, seed %llx)", i ? "," : ":",
			op_kind_names[all[i].o.kind], all[i].comm, all[i].stream, all[i].o.count, (int)all[i].o.type, (int)all[i].o.op, all[i].o.root,
			all[i].o.in_place ? "in place" : "out of place", all[i].o.skew_send, all[i].o.skew_recv, (unsigned long long)all[i].o.seed);
	fprintf(stderr, "\n");
}

static void settle(struct program *p)
{
	trace(p, "settle", NULL, 0, -1);
	for (int s = 0; s < GPU_STREAMS; s++) gpu_sync(p->g, s);
	for (int i = 0; i < p->npending; i++) op_check(p->g, &p->pending[i].o);
	for (int i = 0; i < p->ngraphs; i++)
		for (int k = 0; p->graphs[i].outstanding && k < p->graphs[i].n; k++) op_check(p->g, &p->graphs[i].ops[k].o);
	for (int i = 0; i < p->ngraphs; i++) p->graphs[i].outstanding = false;
	p->npending = 0;
	p->g->used = p->below_graphs;
}

/* All members of the communicator draw the same; who isn't one draws too. false: not a member. */
static bool draw_pending(struct program *p, struct pending *out)
{
	out->comm = (int)below(&p->random, (size_t)p->ncomms);
	out->stream = (int)below(&p->random, GPU_STREAMS);
	const struct member *m = &p->members[out->comm];
	draw_op(&p->random, m->nranks, &out->o);
	out->o.rank = m->rank;
	out->o.nranks = m->nranks;
	return m->nranks > 0;
}

static void issue(struct program *p, struct pending *all, int n, bool grouped)
{
	struct ranks *r = p->g->r;
	trace(p, grouped ? "group" : "call", all, n, -1);
	if (grouped) REQUIRE_OK(ncclGroupStart());
	for (int i = 0; i < n; i++) REQUIRE_OK(op_issue(&all[i].o, p->members[all[i].comm].comm, p->g->streams[all[i].stream]));
	if (grouped) REQUIRE_OK(ncclGroupEnd());
}

static bool room(const struct program *p, const struct pending *all, int n)
{
	size_t bytes = 0;
	for (int i = 0; i < n; i++) bytes += op_pool_bytes(&all[i].o);
	return p->g->used + bytes <= p->g->pool_bytes;
}

static void run_operations(struct program *p)
{
	bool grouped = below(&p->random, 3) == 0;
	int n = grouped ? 1 + (int)below(&p->random, 5) : 1, mine = 0, stream = (int)below(&p->random, GPU_STREAMS);
	struct pending drawn[5];
	for (int i = 0; i < n; i++) {
		if (!draw_pending(p, &drawn[mine])) continue;
		/* Sends and receives of one communicator in a group are one operation: the order of the streams would be too. */
		if (grouped) drawn[mine].stream = stream;
		mine++;
	}
	if (p->skip) return;
	if (p->npending + mine > MAX_PENDING || !room(p, drawn, mine)) settle(p);
	for (int i = 0; i < mine; i++) op_prepare(p->g, &drawn[i].o);
	issue(p, drawn, mine, grouped);
	for (int i = 0; i < mine; i++) p->pending[p->npending++] = drawn[i];
}

/* CUDA may wait for all kernels of a context where it makes or drops a graph, and those of ranks that share the context could wait for this very
 * rank: so all have settled before, and none goes on until all are through. */
static bool share_a_context;    /* ranks are threads */
static void meet(struct program *p)
{
	if (share_a_context) ranks_barrier(p->g->r);
}
static void settle_all(struct program *p)
{
	settle(p);
	meet(p);
}

static void drop_graphs(struct program *p)
{
	settle_all(p);
	for (int i = 0; i < p->ngraphs; i++)
		if (p->graphs[i].n) CUDA_OK(GraphExecDestroy(p->graphs[i].exec));
	meet(p);
	p->ngraphs = 0;
	p->below_graphs = 0;
	p->g->used = 0;
}

static void capture(struct program *p)
{
	if (p->ngraphs == MAX_GRAPHS) drop_graphs(p);
	settle_all(p);
	struct kept *k = &p->graphs[p->ngraphs++];
	memset(k, 0, sizeof(*k));
	int n = 1 + (int)below(&p->random, MAX_NODES);
	k->stream = (int)below(&p->random, GPU_STREAMS);
	bool grouped = below(&p->random, 2);
	for (int i = 0; i < n; i++)
		if (draw_pending(p, &k->ops[k->n])) {
			k->ops[k->n].stream = k->stream;
			k->ops[k->n++].nth = i;
		}
	if (p->skip) k->n = 0;
	for (int i = 0; i < k->n; i++) {
		if (k->ops[i].o.count > 2000) k->ops[i].o.count %= 2000;
		op_prepare(p->g, &k->ops[i].o);
	}
	p->below_graphs = p->g->used;
	if (k->n) {
		trace(p, "capture", NULL, 0, k->stream);
		CUDA_OK(StreamBeginCapture(p->g->streams[k->stream], CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
		issue(p, k->ops, k->n, grouped);
		k->exec = gpu_end_capture(p->g, k->stream);
	}
	meet(p);
}

/* All ranks launch it, those too for whom it is empty. */
static void replay(struct program *p)
{
	int which = (int)below(&p->random, MAX_GRAPHS), stream = (int)below(&p->random, GPU_STREAMS);
	uint64_t seed = draw(&p->random);
	if (which >= p->ngraphs) return;
	struct kept *k = &p->graphs[which];
	if (!k->n || p->skip) return;
	if (k->outstanding) settle(p);
	for (int i = 0; i < k->n; i++) op_fill(p->g, &k->ops[i].o, seed + (uint64_t)k->ops[i].nth);
	trace(p, "launch of a graph", k->ops, k->n, stream);
	CUDA_OK(GraphLaunch(k->exec, p->g->streams[stream]));
	k->outstanding = true;
}

/* A new communicator of some ranks of the first, in some order. */
static void split(struct program *p)
{
	struct ranks *r = p->g->r;
	drop_graphs(p);
	int slot = 1 + (int)below(&p->random, MAX_COMMS - 1);
	uint64_t salt = draw(&p->random), colors = 1 + below(&p->random, 3);
	if (slot >= p->ncomms) slot = p->ncomms++;
	else if (p->members[slot].nranks) REQUIRE_OK(ncclCommDestroy(p->members[slot].comm));
	struct member *m = &p->members[slot];
	memset(m, 0, sizeof(*m));
	/* Only colour 0 gets one, so that every rank draws for the same communicator. */
	struct random own = { salt + (uint64_t)r->rank };
	if (p->skip) return;
	int color = below(&own, colors) == 0 ? 0 : NCCL_SPLIT_NOCOLOR, key = (int)below(&own, 5) - 2;
	REQUIRE_OK(ncclCommSplit(p->members[0].comm, color, key, &m->comm, NULL));
	if (!m->comm) return;
	REQUIRE_OK(ncclCommCount(m->comm, &m->nranks));
	REQUIRE_OK(ncclCommUserRank(m->comm, &m->rank));
}

static void run_program(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	struct program *p = calloc(1, sizeof(*p));
	p->g = g;
	p->random.state = *(uint64_t *)g->arg;
	p->members[0] = (struct member){ g->comm, r->rank, r->nranks };
	p->ncomms = 1;
	const char *only = getenv("RANDOM_ONLY");
	for (int i = 0; i < 60; i++) {
		size_t what = below(&p->random, 16);
		p->step = i;
		p->skip = only && strlen(only) > (size_t)i && only[i] == '0';
		if (what == 0) split(p);
		else if (what == 1) capture(p);
		else if (what < 5) replay(p);
		else run_operations(p);
	}
	drop_graphs(p);
	for (int c = 1; c < p->ncomms; c++)
		if (p->members[c].nranks) REQUIRE_OK(ncclCommDestroy(p->members[c].comm));
	free(p);
}

static double seconds_to_run = 6;
static uint64_t first_seed;

static void run_seed(uint64_t seed)
{
	static const char *const settings[] = { NULL, NULL, NULL, "FAKE_CUDA_VMM=0", "FAKE_CUDA_PEER_GROUP=2", "FAKE_CUDA_PEER_GROUP=1", "FAKE_CUDA_SEED=1",
		"TELPHER_CUDA_TABLE=two_shot=4K:4K:4K,gather=4K:4K:4K,scatter=4K:4K:4K,pairs=4K:4K:4K,rooted=4K:4K:4K,reduce=4K,transfers=4K,pipes=2" };
	struct random random = { seed ^ 0x1234567 };
	struct gpu_options options = { .nranks = 1 + (int)below(&random, 8), .pool_bytes = (size_t)16 << 20 };
	share_a_context = options.threads = below(&random, 3) == 0;
	options.nhosts = !options.threads && below(&random, 4) == 0 ? 1 + (int)below(&random, (size_t)options.nranks) : 1;
	options.ndevices = below(&random, 2) ? 1 : 1 + (int)below(&random, (size_t)options.nranks);
	options.env[0] = settings[below(&random, sizeof(settings) / sizeof(settings[0]))];
	if (options.env[0] && strstr(options.env[0], "transfers=")) options.env[1] = "TELPHER_LL128=on";
	if (!gpu_run(&options, run_program, &seed))
		fail_msg("seed %llu: %d ranks, %d hosts, %d GPUs, %s, %s", (unsigned long long)seed, options.nranks, options.nhosts, options.ndevices,
			options.threads ? "threads" : "processes", options.env[0] ? options.env[0] : "no settings");
}

static void results_equal_the_reference(void **state)
{
	(void)state;
	uint64_t end = ranks_now_ms() + (uint64_t)(seconds_to_run * 1000);
	int programs = 0;
	for (uint64_t seed = first_seed; programs == 0 || ranks_now_ms() < end; seed++, programs++) run_seed(seed);
	print_message("%d programs from seed %llu\n", programs, (unsigned long long)first_seed);
}

/* A split loaded kernels while others spun, and waited for them. */
static void a_program_that_hung_ends(void **state)
{
	(void)state;
	run_seed(78);
}

int main(int argc, char **argv)
{
	const char *seconds = argc > 1 ? argv[1] : getenv("TELPHER_RANDOM_SECONDS"), *seed = argc > 2 ? argv[2] : getenv("TELPHER_RANDOM_SEED");
	if (seconds) seconds_to_run = atof(seconds);
	first_seed = seed ? strtoull(seed, NULL, 0) : (uint64_t)time(NULL);
	gpu_need();
	const struct CMUnitTest tests[] = { cmocka_unit_test(a_program_that_hung_ends), cmocka_unit_test(results_equal_the_reference) };
	return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Calls made again with buffers that lie otherwise and with other sizes, by every kind of kernel: at once in a row, in groups, in a graph. What a call keeps of
 * the one before must be only what the two share. Ranks' buffers lie in different ways but where they promise not to. */
#include "cuda/helper_ops.h"

enum { PLACES = 7, SIZES = 2, ROW = PLACES * SIZES, MOST_CALLS = 9 };

/* In place, and off alignment by so many elements. */
static const struct { bool in_place; int send, recv; } places[PLACES] = { { false, 0, 0 }, { false, 1, 0 }, { true, 0, 0 }, { false, 0, 3 }, { true, 1, 1 },
	{ false, 8, 16 }, { false, 2, 7 } };

struct call { enum op_kind kind; size_t count; ncclDataType_t type; };
struct way {
	int nranks, nhosts, ndevices;
	const char *table, *more;
	const char *const *names;               /* of kernels, as the log says them: each must have run */
	struct call calls[MOST_CALLS];
	bool promised;                          /* all is in a window of all ranks, at the same offsets */
	unsigned registered;                    /* ranks that have registered the first half of their memory */
};

enum { IN_A_ROW, IN_GROUPS, IN_A_GRAPH, HOWS };

static void fill_row(struct gpu_rank *g, const struct way *way, const struct call *call, int how, struct gpu_op *row)
{
	for (int i = 0; i < ROW; i++) {
		/* Where a rank's buffers lie, and whether in place, is its own affair, but for what is promised. */
		int place = (i / SIZES + (way->promised ? 0 : g->r->rank)) % PLACES;
		row[i] = (struct gpu_op){ .kind = call->kind, .rank = g->r->rank, .nranks = g->r->nranks, .root = how % g->r->nranks, .count = call->count + (size_t)(i % SIZES),
			.type = call->type, .op = ncclSum, .in_place = places[place].in_place && call->kind < ALL_TO_ALL, .skew_send = places[place].send,
			.skew_recv = places[place].recv, .seed = (uint64_t)(how * ROW + i) };
		op_prepare(g, &row[i]);
	}
}

static void issue_row(struct gpu_rank *g, const struct gpu_op *row, bool grouped)
{
	struct ranks *r = g->r;
	for (int i = 0; i < ROW; i++) {
		if (grouped) REQUIRE_OK(ncclGroupStart());
		REQUIRE_OK(op_issue(&row[i], g->comm, g->streams[1]));
		if (grouped) REQUIRE_OK(ncclGroupEnd());
	}
}

static void replay_row(struct gpu_rank *g, struct gpu_op *row)
{
	struct ranks *r = g->r;
	CUDA_OK(StreamBeginCapture(g->streams[1], CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
	issue_row(g, row, false);
	CUgraphExec graph = gpu_end_capture(g, 1);
	for (int turn = 0; turn < 2; turn++) {
		for (int i = 0; i < ROW; i++) op_fill(g, &row[i], (uint64_t)(100 * (turn + 1) + i));
		ranks_barrier(r);
		CUDA_OK(GraphLaunch(graph, g->streams[1]));
		gpu_sync(g, 1);
		for (int i = 0; i < ROW; i++) op_check(g, &row[i]);
		ranks_barrier(r);
	}
	CUDA_OK(GraphExecDestroy(graph));
}

static void call_again(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	const struct way *way = g->arg;
	struct gpu_op row[ROW];
	ncclWindow_t window = NULL;
	void *handle = NULL;
	ranks_barrier(r);
	if (way->promised) REQUIRE_OK(ncclCommWindowRegister(g->comm, GPU_PTR(g->pool), g->pool_bytes, &window, NCCL_WIN_COLL_SYMMETRIC));
	for (int c = 0; c < MOST_CALLS && way->calls[c].count; c++)
		for (int how = 0; how < HOWS; how++) {
			fill_row(g, way, &way->calls[c], how, row);
			/* So that of each row some calls' buffers lie in it and some don't. */
			if (!handle && way->registered >> r->rank & 1) REQUIRE_OK(ncclCommRegister(g->comm, GPU_PTR(g->pool), g->used / 2, &handle));
			ranks_barrier(r);
			if (how == IN_A_GRAPH) {
				replay_row(g, row);
			} else {
				issue_row(g, row, how == IN_GROUPS);
				gpu_sync(g, 1);
				for (int i = 0; i < ROW; i++) op_check(g, &row[i]);
			}
			ranks_barrier(r);
			gpu_reset(g);
		}
	if (handle) REQUIRE_OK(ncclCommDeregister(g->comm, handle));
}

static bool log_has(const char *log, const char *name)
{
	char line[1024], wanted[64];
	bool found = false;
	FILE *f = fopen(log, "re");
	snprintf(wanted, sizeof(wanted), " as %s,", name);
	while (f && !found && fgets(line, sizeof(line), f)) found = strstr(line, wanted) != NULL;
	if (f) fclose(f);
	return found;
}

static void run(const struct way *way)
{
	char log[] = "/tmp/test_again.XXXXXX", file[64];
	int fd = mkstemp(log);
	assert_true(fd >= 0);
	close(fd);
	snprintf(file, sizeof(file), "NCCL_DEBUG_FILE=%s", log);
	struct gpu_options o = { .nranks = way->nranks, .nhosts = way->nhosts, .ndevices = way->ndevices, .threads = way->nranks > 1 && !way->nhosts,
		.pool_bytes = (size_t)6 << 20, .env = { file, "NCCL_DEBUG=INFO", "NCCL_DEBUG_SUBSYS=TUNING", way->table, way->more } };
	bool right = gpu_run(&o, call_again, (void *)(uintptr_t)way);
	for (int i = 0; way->names[i]; i++) {
		if (log_has(log, way->names[i])) continue;
		fprintf(stderr, "no call went as %s\n", way->names[i]);
		right = false;
	}
	unlink(log);
	assert_true(right);
}

#define NAMES(...) (const char *const[]){ __VA_ARGS__, NULL }

/* Each call's second size is one more than its first. */
static void lines_take_other_buffers(void **state)
{
	(void)state;
	static const struct call calls[MOST_CALLS] = { { ALL_REDUCE, 33, ncclFloat32 }, { ALL_REDUCE, 2001, ncclFloat32 }, { REDUCE_SCATTER, 400, ncclUint8 },
		{ BROADCAST, 1000, ncclUint8 }, { REDUCE, 500, ncclFloat32 }, { ALL_GATHER, 333, ncclUint8 }, { GATHER, 400, ncclFloat16 }, { SCATTER, 404, ncclFloat32 },
		{ ALL_TO_ALL, 555, ncclUint8 } };
	struct way way = { .nranks = 3, .ndevices = 3, .more = "TELPHER_LL128=off", .names = NAMES("ONE_SHOT/LL", "TWO_SHOT/LL", "DIRECT/LL"),
		.table = "TELPHER_CUDA_TABLE=one_shot=1K:1K,two_shot=1M:1M,stream=never,pipes=0" };
	memcpy(way.calls, calls, sizeof(calls));
	run(&way);
	way.table = "TELPHER_CUDA_TABLE=one_shot=0:1K,two_shot=0:1M,gather=0:1M,scatter=0:1M,pairs=0:1M,rooted=0:1M,two_step_from=never,stream=never,pipes=0";
	way.more = "TELPHER_LL128=on";
	way.names = NAMES("ONE_SHOT/LL128", "TWO_SHOT/LL128", "DIRECT/LL128");
	run(&way);
	way.table = "TELPHER_CUDA_TABLE=one_shot=0:1K,two_step=0:1M,two_step_from=1,stream=1,pipes=0";
	way.names = NAMES("TWO_STEP/LL128", "DIRECT/STREAM");
	run(&way);
}

static void pipes_take_other_buffers(void **state)
{
	(void)state;
	struct way way = { .nranks = 3, .ndevices = 3, .more = "TELPHER_LL128=on", .names = NAMES("TWO_SHOT/PIPE", "DIRECT/PIPE", "TWO_STEP/PIPE"),
		.calls = { { ALL_REDUCE, 3001, ncclFloat32 }, { REDUCE_SCATTER, 4000, ncclUint8 }, { BROADCAST, 2000, ncclUint8 }, { BROADCAST, 9000, ncclFloat32 },
			{ REDUCE, 9000, ncclFloat32 }, { ALL_GATHER, 3333, ncclUint8 }, { GATHER, 4000, ncclFloat16 }, { SCATTER, 4040, ncclFloat32 },
			{ ALL_TO_ALL, 5555, ncclUint8 } },
		.table = "TELPHER_CUDA_TABLE=one_shot=0:0,two_shot=0:0:0,gather=0:0:0,scatter=0:0:0,pairs=0:0:0,rooted=0:0:0,two_step=0:0:0,two_step_from=16K,stream=never,reduce=0,"
			"offer=2K,pipes=2" };
	run(&way);
	way.registered = 5;
	run(&way);
}

static void transfers_take_other_buffers(void **state)
{
	(void)state;
	struct way way = { .nranks = 3, .ndevices = 3, .more = "TELPHER_LL128=on", .names = NAMES("SEND_RECV/LL128", "DIRECT/STREAM"),
		.calls = { { TRANSFERS, 3000, ncclUint8 }, { TRANSFERS, 7001, ncclFloat32 }, { GATHER, 4000, ncclFloat16 }, { SCATTER, 4040, ncclFloat32 } },
		.table = "TELPHER_CUDA_TABLE=stream=1,transfers=never,offer=4K,pipes=0" };
	run(&way);
	way.registered = 6;
	way.calls[1].count = 9001;
	way.calls[2].count = 1000;
	way.calls[3].count = 9001;
	way.table = "TELPHER_CUDA_TABLE=stream=1,transfers=0,offer=4K,pipes=2";
	way.names = NAMES("SEND_RECV/LL128", "SEND_RECV/PIPE", "DIRECT/STREAM", "DIRECT/PIPE");
	run(&way);
	way.more = "TELPHER_LL128=off";
	way.names = NAMES("SEND_RECV/SIMPLE");
	run(&way);
}

static void steps_take_other_buffers(void **state)
{
	(void)state;
	struct way way = { .nranks = 3, .ndevices = 3, .names = NAMES("ONE_SHOT/SIMPLE", "DIRECT/SIMPLE"),
		.calls = { { ALL_REDUCE, 3001, ncclFloat32 }, { REDUCE_SCATTER, 400, ncclUint8 }, { BROADCAST, 9000, ncclUint8 }, { REDUCE, 900, ncclFloat32 },
			{ ALL_GATHER, 333, ncclUint8 }, { GATHER, 400, ncclFloat16 }, { SCATTER, 440, ncclFloat32 }, { ALL_TO_ALL, 555, ncclUint8 } },
		.table = "TELPHER_CUDA_TABLE=one_shot=0:0,two_shot=0:0,gather=0:0,scatter=0:0,pairs=0:0,rooted=0:0,two_step_from=never,stream=never,pipes=0" };
	run(&way);
	way.more = "NCCL_ALGO=RING";
	way.names = NAMES("RING/SIMPLE");
	run(&way);
	/* Over a network, where registered buffers are sent from where they lie. */
	way.nranks = 4;
	way.nhosts = 2;
	way.ndevices = 2;
	way.registered = 0xf;
	way.more = NULL;
	way.names = NAMES("SEND_RECV/SIMPLE");
	way.calls[MOST_CALLS - 1] = (struct call){ TRANSFERS, 3000, ncclFloat32 };
	run(&way);
}

static void windows_take_other_places(void **state)
{
	(void)state;
	struct way way = { .nranks = 3, .ndevices = 3, .promised = true, .names = NAMES("TWO_SHOT/WINDOW", "DIRECT/WINDOW"),
		.calls = { { ALL_REDUCE, 3001, ncclFloat32 }, { REDUCE_SCATTER, 400, ncclFloat32 }, { REDUCE_SCATTER, 4095, ncclUint8 }, { ALL_REDUCE, 999, ncclUint8 } },
		.table = "TELPHER_CUDA_TABLE=window=1" };
	run(&way);
	/* Cut, so that there are several launches a call. */
	way.table = "TELPHER_CUDA_TABLE=window=1,cut=6K";
	run(&way);
}

static void copies_take_other_places(void **state)
{
	(void)state;
	struct way way = { .nranks = 3, .ndevices = 3, .promised = true, .more = "NCCL_CTA_POLICY=ZERO", .names = NAMES("DIRECT/COPY", "TWO_STEP/COPY"),
		.calls = { { ALL_GATHER, 3333, ncclUint8 }, { ALL_TO_ALL, 555, ncclFloat32 }, { BROADCAST, 900, ncclUint8 }, { BROADCAST, 9000, ncclFloat32 } },
		.table = "TELPHER_CUDA_TABLE=two_step_from=16K" };
	run(&way);
}

/* Its kernel is for small calls that are made again; the first, and large ones, are copies. */
static void a_rank_alone_takes_other_buffers(void **state)
{
	(void)state;
	struct way way = { .nranks = 1, .ndevices = 1, .names = NAMES("COPY"),
		.calls = { { ALL_REDUCE, 33, ncclFloat32 }, { REDUCE_SCATTER, 400, ncclUint8 }, { BROADCAST, 1000, ncclUint8 }, { REDUCE, 500, ncclFloat32 },
			{ ALL_GATHER, 333, ncclUint8 }, { GATHER, 400, ncclFloat16 }, { SCATTER, 20000, ncclFloat32 }, { ALL_TO_ALL, 555, ncclUint8 }, { TRANSFERS, 100, ncclFloat32 } },
		.table = "TELPHER_LL128=auto" };
	run(&way);
}

int main(void)
{
	gpu_need();
	const struct CMUnitTest tests[] = { cmocka_unit_test(lines_take_other_buffers), cmocka_unit_test(pipes_take_other_buffers),
		cmocka_unit_test(transfers_take_other_buffers), cmocka_unit_test(steps_take_other_buffers), cmocka_unit_test(windows_take_other_places),
		cmocka_unit_test(copies_take_other_places), cmocka_unit_test(a_rank_alone_takes_other_buffers) };
	return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Every collective, type, operator and a choice of counts on GPU ranks: in place and not, aligned and not, in processes and in
 * threads, 1 to 8 ranks, on one GPU and on several.
 *   test_cuda_collectives [part of a name [n]]: those ways only, every n-th call only */
#include "cuda/helper_ops.h"

static const size_t counts[] = { 0, 1, 3, 17, 1000, 4099, 30011 };
#define NCOUNTS (sizeof(counts) / sizeof(counts[0]))

static uint64_t every = 1;

static void one(struct gpu_rank *g, uint64_t seed, enum op_kind kind, size_t count, int type, int op)
{
	if (seed % *(const uint64_t *)g->arg) return;
	struct random random = { seed };
	struct gpu_op o = { .kind = kind, .rank = g->r->rank, .nranks = g->r->nranks, .root = (int)below(&random, (size_t)g->r->nranks), .count = count,
		.type = (ncclDataType_t)type, .op = (ncclRedOp_t)op, .in_place = below(&random, 2) && kind != ALL_TO_ALL && kind != TRANSFERS, .seed = seed };
	if (below(&random, 3) == 0) {
		o.skew_send = (int)below(&random, 17);
		o.skew_recv = (int)below(&random, 17);
	}
	op_run(g, &o, g->comm, below(&random, 4) ? 1 : 2);
}

/* Small counts with all types and operators; larger ones with one operator a type; copies with each size of element. */
static void everything(struct gpu_rank *g)
{
	uint64_t step = 0;
	for (int type = 0; type < ncclNumTypes; type++)
		for (size_t c = 0; c < NCOUNTS; c++) {
			size_t count = counts[c] > 100 ? counts[c] * gpu_scale() : counts[c];
			for (int op = 0; op < ncclNumOps; op++)
				for (int kind = ALL_REDUCE; kind <= REDUCE_SCATTER; kind++)
					if (counts[c] == 17 || op == (type + (int)c + kind) % ncclNumOps)
						one(g, ++step, (enum op_kind)kind, count, type, op);
			if (type == ncclInt8 || type == ncclFloat16 || type == ncclFloat32 || type == ncclFloat64)
				for (int kind = BROADCAST; kind < NKINDS; kind++)
					one(g, ++step, (enum op_kind)kind, count, type, ncclSum);
		}
	struct ranks *r = g->r;
	const char *table = getenv("TELPHER_CUDA_TABLE");
	if (gpu_is_fake() && table && strstr(table, "gather=0:0:0")) REQUIRE(gpu_count("tp_push_copy") > 0);
}

/* part: where the way matters, not the arithmetic, one call in so many will do. */
struct way { const char *name; int nranks; bool threads; int ndevices, nhosts; uint64_t part; const char *first, *second; };
#define PIPES "TELPHER_CUDA_TABLE=one_shot=0:0,two_shot=0:0:0,gather=0:0:0,scatter=0:0:0,pairs=0:0:0,rooted=0:0:0,two_step=0:0:0,two_step_from=1,reduce=0,pipes=2"
static const struct way ways[] = {
	{ "1 process", 1, false, 1, 1, 1, NULL, NULL },
	{ "2 processes", 2, false, 1, 1, 2, NULL, NULL },
	{ "3 processes", 3, false, 1, 1, 2, NULL, NULL },
	{ "4 processes", 4, false, 1, 1, 1, NULL, NULL },
	{ "8 processes", 8, false, 1, 1, 7, NULL, NULL },
	{ "1 thread", 1, true, 1, 1, 5, NULL, NULL },
	{ "2 threads", 2, true, 1, 1, 5, NULL, NULL },
	{ "3 threads", 3, true, 1, 1, 5, NULL, NULL },
	{ "4 threads", 4, true, 1, 1, 2, NULL, NULL },
	{ "8 threads", 8, true, 1, 1, 7, NULL, NULL },
	{ "4 processes, 4 GPUs", 4, false, 4, 1, 5, NULL, NULL },
	{ "4 processes, 2 GPUs", 4, false, 2, 1, 5, NULL, NULL },
	{ "4 threads, 4 GPUs", 4, true, 4, 1, 5, NULL, NULL },
	{ "2 processes, CUDA IPC", 2, false, 1, 1, 5, "FAKE_CUDA_VMM=0", NULL },
	{ "2 processes, neither VMM nor IPC", 2, false, 1, 1, 5, "FAKE_CUDA_VMM=0", "FAKE_CUDA_IPC=0" },
	{ "4 processes, GPUs in pairs", 4, false, 4, 1, 5, "FAKE_CUDA_PEER_GROUP=2", NULL },
	{ "3 threads, GPUs that don't reach each other", 3, true, 3, 1, 5, "FAKE_CUDA_PEER_GROUP=1", NULL },
	{ "3 processes, NCCL_P2P_DISABLE", 3, false, 3, 1, 5, "NCCL_P2P_DISABLE=1", NULL },
	{ "4 processes, large messages' kernels", 4, false, 1, 1, 3, "TELPHER_LL128=on", "TELPHER_CUDA_TABLE=one_shot=0:0,two_shot=0:1G,stream=1,two_step_from=1" },
	{ "5 threads, large messages' kernels", 5, true, 1, 1, 7, "TELPHER_LL128=on", "TELPHER_CUDA_TABLE=one_shot=0:0,two_shot=0:1G,stream=1,two_step_from=1" },
	{ "2 threads, pipes", 2, true, 1, 1, 5, "TELPHER_LL128=on", PIPES },
	{ "3 processes, pipes", 3, false, 1, 1, 7, "TELPHER_LL128=on", PIPES },
	{ "4 processes, pipes", 4, false, 1, 1, 5, "TELPHER_LL128=on", PIPES },
	{ "5 threads, pipes", 5, true, 5, 1, 11, "TELPHER_LL128=on", PIPES },
	{ "6 processes, pipes", 6, false, 1, 1, 11, "TELPHER_LL128=on", PIPES },
	{ "7 threads, pipes", 7, true, 1, 1, 11, "TELPHER_LL128=on", PIPES },
	{ "8 processes, pipes", 8, false, 1, 1, 13, "TELPHER_LL128=on", PIPES },
	{ "2 processes, 2 GPUs, pipes for what moves", 2, false, 2, 1, 7, "TELPHER_LL128=on", "TELPHER_CUDA_TABLE=gather=0:0:0,pairs=0:0:0,rooted=0:0:0" },
	{ "4 processes, 2 hosts", 4, false, 1, 2, 5, NULL, NULL },
	{ "3 processes, 3 hosts", 3, false, 1, 3, 5, NULL, NULL },
};
#define NWAYS (sizeof(ways) / sizeof(ways[0]))

static void results_equal_the_reference(void **state)
{
	const struct way *w = *state;
	struct gpu_options o = { .nranks = w->nranks, .threads = w->threads, .ndevices = w->ndevices, .nhosts = w->nhosts, .pool_bytes = (size_t)6 << 20,
		.env = { w->first, w->second } };
	uint64_t part = w->part * every * (SANITIZED ? 5 : 1);
	assert_true(gpu_run(&o, everything, &part));
}

int main(int argc, char **argv)
{
	struct CMUnitTest tests[NWAYS];
	int ntests = 0;
	if (argc > 2) every = strtoull(argv[2], NULL, 10);
	gpu_need();
	for (size_t w = 0; w < NWAYS; w++)
		if (argc < 2 || strstr(ways[w].name, argv[1]))
			tests[ntests++] = (struct CMUnitTest){ ways[w].name, results_equal_the_reference, NULL, NULL, (void *)(uintptr_t)&ways[w] };
	return _cmocka_run_group_tests("cuda_collectives", tests, (size_t)ntests, NULL, NULL);
}

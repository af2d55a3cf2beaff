/* Every collective, type, operator and a choice of counts on GPU ranks: in place and not, aligned and not, in processes and in
 * threads, 1 to 8 ranks, on one GPU and on several. */
#include "cuda/helper_ops.h"

static const size_t counts[] = { 0, 1, 3, 17, 1000, 4099, 30011 };
#define NCOUNTS (sizeof(counts) / sizeof(counts[0]))

static void one(struct gpu_rank *g, uint64_t seed, enum op_kind kind, size_t count, int type, int op)
{
	struct gpu_op o = { .kind = kind, .rank = g->r->rank, .nranks = g->r->nranks, .root = (int)(seed % (uint64_t)g->r->nranks), .count = count,
		.type = (ncclDataType_t)type, .op = (ncclRedOp_t)op, .in_place = kind != ALL_TO_ALL && kind != TRANSFERS && seed % 2, .seed = seed };
	if (seed % 3 == 0) {
		o.skew_send = (int)(seed / 3 % 17);
		o.skew_recv = (int)(seed / 7 % 17);
	}
	op_run(g, &o, g->comm, (int)(seed % 5 == 0 ? seed % GPU_STREAMS : 1));
}

/* Small counts with all types and operators; larger ones with one operator a type; copies with each size of element. */
static void everything(struct gpu_rank *g)
{
	size_t rounds = *(const size_t *)g->arg;
	uint64_t step = 0;
	for (size_t round = 0; round < rounds; round++)
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
}

static void run(int nranks, bool threads, int ndevices, int nhosts, const char *first, const char *second)
{
	size_t rounds = 1;
	struct gpu_options o = { .nranks = nranks, .threads = threads, .ndevices = ndevices, .nhosts = nhosts, .pool_bytes = (size_t)6 << 20,
		.env = { first, second } };
	assert_true(gpu_run(&o, everything, &rounds));
}

struct way { const char *name; int nranks; bool threads; int ndevices, nhosts; const char *first, *second; };
static const struct way ways[] = {
	{ "1 process", 1, false, 1, 1, NULL, NULL },
	{ "2 processes", 2, false, 1, 1, NULL, NULL },
	{ "3 processes", 3, false, 1, 1, NULL, NULL },
	{ "4 processes", 4, false, 1, 1, NULL, NULL },
	{ "8 processes", 8, false, 1, 1, NULL, NULL },
	{ "1 thread", 1, true, 1, 1, NULL, NULL },
	{ "2 threads", 2, true, 1, 1, NULL, NULL },
	{ "3 threads", 3, true, 1, 1, NULL, NULL },
	{ "4 threads", 4, true, 1, 1, NULL, NULL },
	{ "8 threads", 8, true, 1, 1, NULL, NULL },
	{ "4 processes, 4 GPUs", 4, false, 4, 1, NULL, NULL },
	{ "4 processes, 2 GPUs", 4, false, 2, 1, NULL, NULL },
	{ "4 threads, 4 GPUs", 4, true, 4, 1, NULL, NULL },
	{ "2 processes, CUDA IPC", 2, false, 1, 1, "FAKE_CUDA_VMM=0", NULL },
	{ "2 processes, neither VMM nor IPC", 2, false, 1, 1, "FAKE_CUDA_VMM=0", "FAKE_CUDA_IPC=0" },
	{ "4 processes, GPUs in pairs", 4, false, 4, 1, "FAKE_CUDA_PEER_GROUP=2", NULL },
	{ "3 threads, GPUs that don't reach each other", 3, true, 3, 1, "FAKE_CUDA_PEER_GROUP=1", NULL },
	{ "3 processes, NCCL_P2P_DISABLE", 3, false, 3, 1, "NCCL_P2P_DISABLE=1", NULL },
	{ "4 processes, 2 hosts", 4, false, 1, 2, NULL, NULL },
	{ "3 processes, 3 hosts", 3, false, 1, 3, NULL, NULL },
};
#define NWAYS (sizeof(ways) / sizeof(ways[0]))

static void results_equal_the_reference(void **state)
{
	const struct way *w = *state;
	run(w->nranks, w->threads, w->ndevices, w->nhosts, w->first, w->second);
}

/* With arguments: only the ways whose names contain the first. */
int main(int argc, char **argv)
{
	struct CMUnitTest tests[NWAYS];
	int ntests = 0;
	gpu_need();
	for (size_t w = 0; w < NWAYS; w++)
		if (argc < 2 || strstr(ways[w].name, argv[1]))
			tests[ntests++] = (struct CMUnitTest){ ways[w].name, results_equal_the_reference, NULL, NULL, (void *)(uintptr_t)&ways[w] };
	return _cmocka_run_group_tests("cuda_collectives", tests, (size_t)ntests, NULL, NULL);
}

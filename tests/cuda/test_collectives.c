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

static void one_rank(void **state) { (void)state; run(1, false, 1, 1, NULL, NULL); }
static void two_processes(void **state) { (void)state; run(2, false, 1, 1, NULL, NULL); }
static void three_processes(void **state) { (void)state; run(3, false, 1, 1, NULL, NULL); }
static void four_processes(void **state) { (void)state; run(4, false, 1, 1, NULL, NULL); }
static void eight_processes(void **state) { (void)state; run(8, false, 1, 1, NULL, NULL); }

int main(int argc, char **argv)
{
	(void)argc;
	(void)argv;
	gpu_need();
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(one_rank), cmocka_unit_test(two_processes), cmocka_unit_test(three_processes), cmocka_unit_test(four_processes),
		cmocka_unit_test(eight_processes),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

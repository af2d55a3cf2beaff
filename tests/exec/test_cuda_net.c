/* GPU ranks whose chunks travel over sockets: kernels fill and empty slots in pinned host memory, the proxy moves them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "exec/cuda/internal.h"
#include "exec/helper_cuda.h"

enum { CHANNELS = 2, POOL_BYTES = 4 << 20, COUNT = 30011 };

static int sums(struct world *world, struct cuda_rank *c, enum tp_algo algo, uint32_t tag)
{
	static const int domains[64];
	struct tp_layout *layout;
	struct tp_plan *plan;
	WORLD_CHECK(tp_layout_create(world->nranks, domains, &layout) == ncclSuccess);
	struct tp_plan_spec spec = { TP_ALL_REDUCE, algo, -1, CHANNELS, layout };
	if (tp_plan_refuses(&spec)) {
		tp_layout_free(layout);
		return 0;
	}
	WORLD_CHECK(tp_plan_create(&spec, world->rank, &plan) == ncclSuccess);
	tp_layout_free(layout);
	int *ints = malloc(COUNT * sizeof(int));
	void *in = cuda_take(c, COUNT * sizeof(int), 0), *out = cuda_take(c, COUNT * sizeof(int), 0);
	for (int i = 0; i < COUNT; i++) ints[i] = world->rank + i;
	cuda_put(c, in, ints, COUNT * sizeof(int));
	struct tp_exec_call call = { .plan = plan, .input = in, .output = out, .block_bytes = COUNT * sizeof(int), .chunk_bytes = 8192, .line_bytes = 16,
		.reduce = { .type = ncclInt32, .op = ncclSum }, .tag = tag };
	WORLD_CHECK(tp_cuda_exec_prepare(c->exec, plan) == ncclSuccess);
	WORLD_CHECK(tp_cuda_exec_launch(c->exec, c->stream, &call, 1) == ncclSuccess);
	cuda_get(c, ints, out, COUNT * sizeof(int));
	for (int i = 0; i < COUNT; i++) WORLD_CHECK(ints[i] == world->nranks * (world->nranks - 1) / 2 + i * world->nranks);
	free(ints);
	tp_plan_free(plan);
	cuda_reset(c);
	return 0;
}

static int around(struct world *world, struct cuda_rank *c)
{
	int n = world->nranks, rank = world->rank;
	int *ints = malloc(COUNT * sizeof(int));
	void *out = cuda_take(c, COUNT * sizeof(int), 0), *in = cuda_take(c, COUNT * sizeof(int), 0);
	for (int i = 0; i < COUNT; i++) ints[i] = rank * 1000000 + i;
	cuda_put(c, out, ints, COUNT * sizeof(int));
	struct tp_exec_transfer t[2] = { { (rank + 1) % n, true, out, COUNT * sizeof(int) }, { (rank + n - 1) % n, false, in, COUNT * sizeof(int) } };
	struct tp_exec_call call = { .chunk_bytes = 1 << 20, .line_bytes = 16, .transfers = t, .ntransfers = 2 };
	WORLD_CHECK(tp_cuda_exec_launch(c->exec, c->stream, &call, 1) == ncclSuccess);
	cuda_get(c, ints, in, COUNT * sizeof(int));
	for (int i = 0; i < COUNT; i++) WORLD_CHECK(ints[i] == (rank + n - 1) % n * 1000000 + i);
	free(ints);
	cuda_reset(c);
	return 0;
}

static int over_sockets(struct world *world)
{
	struct cuda_rank c;
	struct tp_cuda_status status;
	WORLD_CHECK(cuda_open(world, CHANNELS, 2, POOL_BYTES, &c));
	WORLD_CHECK(tp_links_have_net(c.links));
	int failed = 0;
	for (enum tp_algo algo = 0; algo < TP_NALGOS && !failed; algo++) failed = sums(world, &c, algo, 100 + algo);
	if (!failed) failed = around(world, &c);
	if (failed) return failed;
	tp_cuda_exec_status(c.exec, &status);
	WORLD_CHECK(status.completed == status.launched && status.fault == TP_CUDA_FINE);
	cuda_close(world, &c);
	return 0;
}

static void collectives_and_transfers_over_sockets_give_the_right_results(void **state)
{
	(void)state;
	for (int n = 2; n < 6; n += 2) {
		struct world_options options = { .kind = WORLD_THREADS, .nranks = n, .nchannels = CHANNELS };
		assert_int_equal(world_run(&options, over_sockets, NULL), 0);
	}
}

int main(void)
{
	setenv("NCCL_SHM_DISABLE", "1", 1);
	setenv("NCCL_P2P_DISABLE", "1", 1);
	setenv("NCCL_SOCKET_IFNAME", "lo", 1);
	if (!cuda_has_driver()) {
		fprintf(stderr, "no GPU driver\n");
		return 77;
	}
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(collectives_and_transfers_over_sockets_give_the_right_results),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Every plan that the generators make, run by the CUDA executor and by the host executor on the same input: the same bits. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "exec/cuda/internal.h"
#include "exec/helper_cuda.h"
#include "exec/helper_reduce.h"

enum { GUARD = 64, GUARD_BYTE = 0xa5, CHANNELS = 3, POOL_BYTES = 4 << 20 };

struct round {
	enum tp_coll coll;
	enum tp_algo algo;
	int root, nchannels, ndomains;
	ncclDataType_t type;
	ncclRedOp_t op;
	int scaling;                /* 0: none, 1: average, 2: by a number, 3: by a number in device memory */
	size_t count, chunk_bytes, skew;    /* skew: of the buffers on the GPU, in elements */
	bool in_place, wild;
	uint32_t tag;
};
struct variant { int ndevices; bool steps_only; };

static bool has_root(enum tp_coll c) { return c == TP_BROADCAST || c == TP_REDUCE || c == TP_GATHER || c == TP_SCATTER; }
static bool many_in(enum tp_coll c) { return c == TP_REDUCE_SCATTER || c == TP_ALL_TO_ALL || c == TP_SCATTER; }
static bool many_out(enum tp_coll c) { return c == TP_ALL_GATHER || c == TP_ALL_TO_ALL || c == TP_GATHER; }
static bool has_in(const struct round *r, int rank) { return (r->coll != TP_BROADCAST && r->coll != TP_SCATTER) || rank == r->root; }
static bool has_out(const struct round *r, int rank) { return (r->coll != TP_REDUCE && r->coll != TP_GATHER) || rank == r->root; }

struct buffers {
	size_t in_bytes, out_bytes, block;
	unsigned char *in_memory, *out_memory, *in, *out;   /* the host executor's */
	unsigned char *gpu_in_memory, *gpu_out_memory, *gpu_in, *gpu_out;
};

static void place(const struct round *r, int rank, size_t block, unsigned char **in, unsigned char **out)
{
	if (!r->in_place || !*in || !*out || r->coll == TP_ALL_TO_ALL) return;
	if (many_in(r->coll)) *out = *in + block * (size_t)rank;
	else *in = *out + (many_out(r->coll) ? block * (size_t)rank : 0);
}

static bool prepare(struct world *world, struct cuda_rank *c, const struct round *r, struct buffers *b)
{
	size_t n = (size_t)world->nranks, each = tp_type_bytes(r->type);
	memset(b, 0, sizeof(*b));
	b->block = r->count * each;
	b->in_bytes = has_in(r, world->rank) ? b->block * (many_in(r->coll) ? n : 1) : 0;
	b->out_bytes = has_out(r, world->rank) ? b->block * (many_out(r->coll) ? n : 1) : 0;
	b->in_memory = malloc(b->in_bytes + GUARD);
	b->out_memory = malloc(b->out_bytes + GUARD);
	cuda_reset(c);
	b->gpu_in_memory = cuda_take(c, b->in_bytes + GUARD, r->skew * each);
	b->gpu_out_memory = cuda_take(c, b->out_bytes + GUARD, r->skew * each * 3);
	if (!b->in_memory || !b->out_memory || !b->gpu_in_memory || !b->gpu_out_memory) return false;
	memset(b->in_memory, GUARD_BYTE, b->in_bytes + GUARD);
	memset(b->out_memory, GUARD_BYTE, b->out_bytes + GUARD);
	if (has_in(r, world->rank)) b->in = b->in_memory, b->gpu_in = b->gpu_in_memory;
	if (has_out(r, world->rank)) b->out = b->out_memory, b->gpu_out = b->gpu_out_memory;
	place(r, world->rank, b->block, &b->in, &b->out);
	place(r, world->rank, b->block, &b->gpu_in, &b->gpu_out);
	uint64_t seed = (uint64_t)r->tag * 1000 + (uint64_t)world->rank + 1;
	for (int i = 0; i < 8; i++) reduce_draw(&seed);
	if (b->in) reduce_fill(r->type, b->in, b->in_bytes, r->wild, &seed);
	cuda_put(c, b->gpu_in_memory, b->in_memory, b->in_bytes + GUARD);
	cuda_put(c, b->gpu_out_memory, b->out_memory, b->out_bytes + GUARD);
	return true;
}

static void set_reduce(struct world *world, const struct round *r, struct tp_exec_call *call)
{
	call->reduce = (struct tp_reduce){ .type = r->type, .op = r->op, .pre_scale = 1, .post_scale = 1, .pre_integer = 1, .post_divisor = 1 };
	if (r->op != ncclSum) return;
	if (r->scaling == 1) tp_reduce_fill_avg(&call->reduce, world->nranks);
	if (r->scaling < 2) return;
	call->reduce.pre = true;
	call->reduce.pre_scale = 0.75;
	call->reduce.pre_integer = 3;
}

static const void *put_scalar(struct cuda_rank *c, ncclDataType_t type)
{
	unsigned char scalar[8] = { 3 };
	if (type >= ncclFloat16) reduce_encode(type, 0.75, scalar);
	void *at = cuda_take(c, sizeof(scalar), 0);
	cuda_put(c, at, scalar, sizeof(scalar));
	return at;
}

static int compare(struct world *world, struct cuda_rank *c, const struct buffers *b)
{
	unsigned char *got = malloc(TP_MAX(b->in_bytes, b->out_bytes) + GUARD);
	WORLD_CHECK(got);
	cuda_get(c, got, b->gpu_out_memory, b->out_bytes + GUARD);
	for (size_t i = 0; i < b->out_bytes + GUARD; i++) {
		if (got[i] == b->out_memory[i]) continue;
		fprintf(stderr, "rank %d: byte %zu of %zu of the output is 0x%02x, not 0x%02x\n", world->rank, i, b->out_bytes, got[i], b->out_memory[i]);
		free(got);
		return __LINE__;
	}
	cuda_get(c, got, b->gpu_in_memory, b->in_bytes + GUARD);
	int differs = memcmp(got, b->in_memory, b->in_bytes + GUARD);
	free(got);
	WORLD_CHECK(!differs);
	return 0;
}

static int run_both(struct world *world, struct cuda_rank *c, const struct round *r, const struct tp_plan *plan)
{
	struct buffers b;
	WORLD_CHECK(prepare(world, c, r, &b));
	struct tp_exec_call call = { .plan = plan, .input = b.in, .output = b.out, .block_bytes = b.block, .chunk_bytes = r->chunk_bytes,
		.line_bytes = 16, .tag = r->tag };
	set_reduce(world, r, &call);
	WORLD_CHECK(world_run_call(world, &call) == ncclSuccess);
	call.input = b.gpu_in;
	call.output = b.gpu_out;
	if (r->op == ncclSum && r->scaling == 3) {
		call.device_scalar = put_scalar(c, r->type);
		call.reduce.pre_scale = 99;
		call.reduce.pre_integer = 99;
	}
	WORLD_CHECK(tp_cuda_exec_prepare(c->exec, plan) == ncclSuccess);
	WORLD_CHECK(tp_cuda_exec_launch(c->exec, c->stream, &call, 1) == ncclSuccess);
	int failed = compare(world, c, &b);
	free(b.in_memory);
	free(b.out_memory);
	return failed;
}

/* 0, a failed line, or -1 where there is no such plan. */
static int run_round(struct world *world, struct cuda_rank *c, const struct round *r)
{
	int domains[64];
	struct tp_layout *layout;
	struct tp_plan *plan;
	for (int i = 0; i < world->nranks; i++) domains[i] = i * r->ndomains / world->nranks;
	WORLD_CHECK(tp_layout_create(world->nranks, domains, &layout) == ncclSuccess);
	struct tp_plan_spec spec = { r->coll, r->algo, r->root, r->nchannels, layout };
	if (tp_plan_refuses(&spec)) {
		tp_layout_free(layout);
		return -1;
	}
	WORLD_CHECK(tp_plan_create(&spec, world->rank, &plan) == ncclSuccess);
	tp_layout_free(layout);
	int failed = run_both(world, c, r, plan);
	if (failed)
		fprintf(stderr, "rank %d of %d: %s by %s, %zu x %s, op %s, scaling %d, root %d, %d channels, %d domains, chunks of %zu, skew %zu, %s\n",
			world->rank, world->nranks, tp_coll_name(r->coll), tp_algo_name(r->algo), r->count, tp_type_name(r->type), tp_op_name(r->op),
			r->scaling, r->root, r->nchannels, r->ndomains, r->chunk_bytes, r->skew, r->in_place ? "in place" : "not in place");
	tp_exec_forget(world->exec, plan);
	world_barrier(world);
	tp_plan_free(plan);
	return failed;
}

static int all_plans(struct world *world)
{
	static const size_t sizes[] = { 0, 1, 3, 12, 257, 1024, 4101, 16389 };
	static const size_t chunks[] = { 1024, 4096 };
	const struct variant *v = world->arg;
	struct cuda_rank c;
	unsigned turn = (unsigned)world->nranks * 7 + (unsigned)v->ndevices;
	WORLD_CHECK(cuda_open(world, CHANNELS, v->ndevices, POOL_BYTES, &c));
	if (v->steps_only) c.exec->fused.usable = false;
	for (enum tp_coll coll = 0; coll < TP_SEND_RECV; coll++) {
		for (enum tp_algo algo = 0; algo < TP_NALGOS; algo++) {
			for (size_t s = turn % 4; s < TP_ARRAY_LEN(sizes); s += 4, turn++) {
				struct round r = { .coll = coll, .algo = algo, .root = has_root(coll) ? (int)(turn % (unsigned)world->nranks) : -1,
					.nchannels = 1 + (int)(turn / 2 % CHANNELS), .ndomains = turn / 4 % 2 && world->nranks > 3 ? 2 : 1, .type = turn % ncclNumTypes,
					.op = turn / 5 % 4, .scaling = turn / 3 % 4, .count = sizes[s], .chunk_bytes = chunks[turn / 3 % 2],
					.skew = turn % 3 == 1 ? turn % 7 : 0, .in_place = turn % 2, .wild = turn % 4 == 2, .tag = turn };
				int failed = run_round(world, &c, &r);
				if (failed > 0) return failed;
			}
		}
	}
	cuda_close(world, &c);
	return 0;
}

static int all_types(struct world *world)
{
	static const enum tp_algo algos[] = { TP_ALGO_ONE_SHOT, TP_ALGO_RING, TP_ALGO_TWO_SHOT, TP_ALGO_TREE, TP_ALGO_HALVING_DOUBLING };
	const struct variant *v = world->arg;
	struct cuda_rank c;
	unsigned turn = 5000 + (unsigned)world->nranks;
	WORLD_CHECK(cuda_open(world, 1, v->ndevices, POOL_BYTES, &c));
	if (v->steps_only) c.exec->fused.usable = false;
	for (ncclDataType_t type = 0; type < ncclNumTypes; type++) {
		for (int how = 0; how < 7; how++, turn++) {
			struct round r = { .coll = TP_ALL_REDUCE, .algo = algos[turn % 5], .root = -1, .nchannels = 1, .ndomains = 1, .type = type,
				.op = how < 4 ? (ncclRedOp_t)how : ncclSum, .scaling = how < 4 ? 0 : how - 3, .count = 700 + (size_t)type * 331, .chunk_bytes = 2048,
				.in_place = turn % 2, .wild = true, .tag = turn, .skew = turn % 3 == 0 };
			int failed = run_round(world, &c, &r);
			if (failed > 0) return failed;
		}
	}
	cuda_close(world, &c);
	return 0;
}

/* Megabytes, in chunks as large as slots allow; a ring's are larger. */
static int large(struct world *world)
{
	static const enum tp_algo algos[] = { TP_ALGO_RING, TP_ALGO_TREE, TP_ALGO_TWO_SHOT, TP_ALGO_HIERARCHICAL };
	const struct variant *v = world->arg;
	struct cuda_rank c;
	WORLD_CHECK(cuda_open(world, 2, v->ndevices, 16 << 20, &c));
	if (v->steps_only) c.exec->fused.usable = false;
	for (size_t a = 0; a < TP_ARRAY_LEN(algos); a++) {
		/* Integers: their sums don't depend on how the message is cut, which differs from the host's. */
		struct round r = { .coll = TP_ALL_REDUCE, .algo = algos[a], .root = -1, .nchannels = 2, .ndomains = 1, .type = ncclUint32, .op = ncclSum,
			.count = 1100003, .chunk_bytes = 1 << 20, .in_place = a % 2, .wild = true, .tag = 900 + (unsigned)a };
		int failed = run_round(world, &c, &r);
		if (failed > 0) return failed;
	}
	cuda_close(world, &c);
	return 0;
}

/* With fused kernels where they are taken, and by steps alone. */
static void run(int (*body)(struct world *world), int nranks, int ndevices)
{
	struct world_options options = { .kind = WORLD_THREADS, .nranks = nranks, .nchannels = CHANNELS };
	for (int steps_only = 0; steps_only < 2; steps_only++) {
		const struct variant v = { .ndevices = ndevices, .steps_only = steps_only };
		assert_int_equal(world_run(&options, body, &v), 0);
	}
}

static void threads_on_one_gpu_agree_with_the_host(void **state)
{
	(void)state;
	run(all_plans, 2, 1);
	run(all_plans, 3, 1);
	run(all_plans, 5, 1);
}

static void threads_on_several_gpus_agree_with_the_host(void **state)
{
	(void)state;
	run(all_plans, 4, 4);
	run(all_plans, 8, 4);
}

static void every_type_and_operation_agrees_with_the_host(void **state)
{
	(void)state;
	run(all_types, 2, 1);
	run(all_types, 3, 3);
	run(all_types, 6, 2);
}

static void megabytes_agree_with_the_host(void **state)
{
	(void)state;
	run(large, 3, 3);
}

int main(void)
{
	if (!cuda_has_driver()) {
		fprintf(stderr, "no GPU driver\n");
		return 77;
	}
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(threads_on_one_gpu_agree_with_the_host),
		cmocka_unit_test(threads_on_several_gpus_agree_with_the_host),
		cmocka_unit_test(every_type_and_operation_agrees_with_the_host),
		cmocka_unit_test(megabytes_agree_with_the_host),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

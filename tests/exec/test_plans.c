/* Every plan that the generators make, run by the host executor between threads and between processes, compared with the
 * collective's definition element by element. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "exec/helper_reduce.h"
#include "exec/helper_world.h"

enum { GUARD = 64, GUARD_BYTE = 0xa5, MOST_BYTES = 2 << 20, SHARED_EACH = 64 << 10, MOST_WORLDS = WORLD_KINDS == 1 ? 3 : 5 };

struct round {
	enum tp_coll coll;
	enum tp_algo algo;
	int root, nchannels, ndomains;
	ncclDataType_t type;
	ncclRedOp_t op;
	size_t count, chunk_bytes;
	bool in_place, fused;
};

struct buffers { unsigned char *in_memory, *out_memory, *input, *output; size_t in_bytes, out_bytes; };

/* 1 or 2, so that products and sums of eight stay exact in every type. */
static long long element(int rank, int block, size_t i)
{
	uint64_t x = (uint64_t)rank * 0x9e3779b97f4a7c15u + (uint64_t)block * 0xc2b2ae3d27d4eb4fu + i * 0x165667b19e3779f9u;
	x ^= x >> 29;
	x *= 0xbf58476d1ce4e5b9u;
	return 1 + (long long)(x >> 63);
}

static void put(ncclDataType_t type, long long value, unsigned char *to)
{
	switch (type) {
	case ncclInt8: case ncclUint8: memcpy(to, &(int8_t){ (int8_t)value }, 1); break;
	case ncclInt32: case ncclUint32: memcpy(to, &(int32_t){ (int32_t)value }, 4); break;
	case ncclInt64: case ncclUint64: memcpy(to, &value, 8); break;
	case ncclFloat32: memcpy(to, &(float){ (float)value }, 4); break;
	default: reduce_encode(type, (double)value, to); break;
	}
}

static long long combine(ncclRedOp_t op, long long a, long long b)
{
	switch (op) {
	case ncclSum: return a + b;
	case ncclProd: return a * b;
	case ncclMax: return a > b ? a : b;
	default: return a < b ? a : b;
	}
}

static bool has_input(const struct round *r, int rank)
{
	return (r->coll != TP_BROADCAST && r->coll != TP_SCATTER) || rank == r->root;
}

static bool has_output(const struct round *r, int rank)
{
	return (r->coll != TP_REDUCE && r->coll != TP_GATHER) || rank == r->root;
}

static size_t blocks(bool many, int n) { return many ? (size_t)n : 1; }

static bool input_is_many(const struct round *r)
{
	return r->coll == TP_REDUCE_SCATTER || r->coll == TP_ALL_TO_ALL || r->coll == TP_SCATTER;
}

static bool output_is_many(const struct round *r)
{
	return r->coll == TP_ALL_GATHER || r->coll == TP_ALL_TO_ALL || r->coll == TP_GATHER;
}

static long long expected(const struct round *r, int n, int rank, int block, size_t i)
{
	int slice = r->coll == TP_REDUCE_SCATTER ? rank : 0;
	switch (r->coll) {
	case TP_ALL_GATHER: case TP_GATHER: return element(block, 0, i);
	case TP_BROADCAST: return element(r->root, 0, i);
	case TP_ALL_TO_ALL: return element(block, rank, i);
	case TP_SCATTER: return element(r->root, rank, i);
	default: break;
	}
	long long value = element(0, slice, i);
	for (int p = 1; p < n; p++) value = combine(r->op, value, element(p, slice, i));
	return value;
}

static bool prepare(const struct world *world, const struct round *r, struct buffers *b)
{
	int n = world->nranks, rank = world->rank;
	size_t each = tp_type_bytes(r->type), block = r->count * each;
	b->in_bytes = has_input(r, rank) ? block * blocks(input_is_many(r), n) : 0;
	b->out_bytes = has_output(r, rank) ? block * blocks(output_is_many(r), n) : 0;
	b->in_memory = malloc(b->in_bytes + GUARD);
	b->out_memory = malloc(b->out_bytes + GUARD);
	if (!b->in_memory || !b->out_memory) return false;
	memset(b->out_memory, GUARD_BYTE, b->out_bytes + GUARD);
	memset(b->in_memory, GUARD_BYTE, b->in_bytes + GUARD);
	b->input = has_input(r, rank) ? b->in_memory : NULL;
	b->output = has_output(r, rank) ? b->out_memory : NULL;
	if (r->in_place && b->input && b->output && r->coll != TP_ALL_TO_ALL) {
		if (input_is_many(r)) b->output = b->input + block * (size_t)rank;
		else b->input = b->output + (output_is_many(r) ? block * (size_t)rank : 0);
	}
	if (!b->input) return true;
	for (int k = 0; k < (int)blocks(input_is_many(r), n); k++)
		for (size_t i = 0; i < r->count; i++) put(r->type, element(rank, k, i), b->input + ((size_t)k * r->count + i) * each);
	return true;
}

static int verify(const struct world *world, const struct round *r, const struct buffers *b)
{
	size_t each = tp_type_bytes(r->type);
	unsigned char want[8];
	for (int k = 0; b->output && k < (int)blocks(output_is_many(r), world->nranks); k++) {
		for (size_t i = 0; i < r->count; i++) {
			put(r->type, expected(r, world->nranks, world->rank, k, i), want);
			if (!memcmp(want, b->output + ((size_t)k * r->count + i) * each, each)) continue;
			fprintf(stderr, "rank %d of %d: block %d element %zu is wrong\n", world->rank, world->nranks, k, i);
			return __LINE__;
		}
	}
	for (int i = 0; i < GUARD; i++) {
		WORLD_CHECK(b->in_memory[b->in_bytes + (size_t)i] == GUARD_BYTE);
		WORLD_CHECK(b->out_memory[b->out_bytes + (size_t)i] == GUARD_BYTE);
	}
	if (b->input != b->in_memory || (b->output && b->output != b->out_memory)) return 0;
	for (int k = 0; k < (int)blocks(input_is_many(r), world->nranks); k++) {
		for (size_t i = 0; i < r->count; i += 1 + r->count / 97) {
			put(r->type, element(world->rank, k, i), want);
			WORLD_CHECK(!memcmp(want, b->input + ((size_t)k * r->count + i) * each, each));
		}
	}
	return 0;
}

static int run_call(struct world *world, const struct round *r, const struct tp_plan *plan, const struct buffers *b)
{
	struct tp_exec_call call = { .plan = plan, .input = b->input, .output = b->output, .block_bytes = r->count * tp_type_bytes(r->type),
		.chunk_bytes = r->chunk_bytes, .line_bytes = 16, .reduce = { .type = r->type, .op = r->op },
		.tag = (uint32_t)r->count * 31 + (uint32_t)r->coll };
	bool handled = false;
	if (r->fused) WORLD_CHECK(tp_exec_one_shot(world->exec, &call, world->crowded, NULL, NULL, &handled) == ncclSuccess);
	if (!handled) WORLD_CHECK(world_run_call(world, &call) == ncclSuccess);
	return 0;
}

/* 0, a failed line, or -1 where there is no such plan. */
static int run_round(struct world *world, const struct round *r)
{
	int domains[64];
	for (int i = 0; i < world->nranks; i++) domains[i] = i * r->ndomains / world->nranks;
	struct tp_layout *layout;
	WORLD_CHECK(tp_layout_create(world->nranks, domains, &layout) == ncclSuccess);
	struct tp_plan_spec spec = { r->coll, r->algo, r->root, r->nchannels, layout };
	if (tp_plan_refuses(&spec)) {
		tp_layout_free(layout);
		return -1;
	}
	struct tp_plan *plan;
	struct buffers b;
	WORLD_CHECK(tp_plan_create(&spec, world->rank, &plan) == ncclSuccess);
	tp_layout_free(layout);
	WORLD_CHECK(prepare(world, r, &b));
	int failed = run_call(world, r, plan, &b);
	if (!failed) failed = verify(world, r, &b);
	if (failed)
		fprintf(stderr, "rank %d of %d: %s by %s, %zu x %s, op %s, root %d, %d channels, %d domains, chunks of %zu, %s\n", world->rank,
			world->nranks, tp_coll_name(r->coll), tp_algo_name(r->algo), r->count, tp_type_name(r->type), tp_op_name(r->op), r->root,
			r->nchannels, r->ndomains, r->chunk_bytes, r->in_place ? "in place" : "not in place");
	tp_exec_forget(world->exec, plan);
	tp_plan_free(plan);
	free(b.in_memory);
	free(b.out_memory);
	return failed;
}

static bool has_root(enum tp_coll coll)
{
	return coll == TP_BROADCAST || coll == TP_REDUCE || coll == TP_GATHER || coll == TP_SCATTER;
}

/* All plans, with sizes around each threshold; what else there is to vary changes from one to the next. */
static int all_plans(struct world *world)
{
	static const size_t sizes[] = { 0, 1, 3, 11, 12, 13, 257, 1024, 4096, 4101, 16389, 20011 };
	static const size_t chunks[] = { 4096, 32768, 1 << 20 };
	/* Each world takes another third of the sizes for each plan. */
	unsigned turn = (unsigned)world->nranks + *(const unsigned *)world->arg;
	for (enum tp_coll coll = 0; coll < TP_SEND_RECV; coll++) {
		for (enum tp_algo algo = 0; algo < TP_NALGOS; algo++) {
			for (size_t s = turn % 3; s < TP_ARRAY_LEN(sizes); s += 3, turn++) {
				struct round r = { .coll = coll, .algo = algo, .root = has_root(coll) ? (int)(turn % (unsigned)world->nranks) : -1,
					.nchannels = 1 + (int)(turn / 2 % 2), .ndomains = turn / 4 % 2 && world->nranks > 3 ? 2 : 1, .type = ncclFloat32, .op = ncclSum,
					.count = sizes[s], .chunk_bytes = chunks[turn % 3], .in_place = turn % 2, .fused = turn % 3 == 0 };
				int failed = run_round(world, &r);
				if (failed > 0) return failed;
			}
		}
	}
	return 0;
}

static int all_types(struct world *world)
{
	static const enum tp_algo algos[] = { TP_ALGO_ONE_SHOT, TP_ALGO_TWO_SHOT, TP_ALGO_RING, TP_ALGO_TREE };
	for (ncclDataType_t type = 0; type < ncclNumTypes; type++) {
		for (ncclRedOp_t op = 0; op <= ncclMin; op++) {
			struct round r = { .coll = TP_ALL_REDUCE, .algo = algos[(type + op) % 4], .root = -1, .nchannels = 1, .ndomains = 1, .type = type,
				.op = op, .count = 1 + (size_t)type * 331, .chunk_bytes = 4096, .in_place = op % 2, .fused = true };
			/* Two bits of mantissa don't hold sums beyond 8. */
			if (type == ncclFloat8e5m2 && op == ncclSum && world->nranks > 4) r.op = ncclMax;
			int failed = run_round(world, &r);
			if (failed > 0) return failed;
		}
	}
	return 0;
}

static int large(struct world *world)
{
	for (enum tp_coll coll = 0; coll < TP_SEND_RECV; coll++) {
		for (enum tp_algo algo = 0; algo < TP_NALGOS; algo++) {
			struct round r = { .coll = coll, .algo = algo, .root = has_root(coll) ? 1 : -1, .nchannels = 1, .ndomains = 1, .type = ncclInt32,
				.op = ncclSum, .chunk_bytes = 512 << 10, .in_place = (coll + algo) % 2 };
			r.count = MOST_BYTES / 4 / blocks(input_is_many(&r) || output_is_many(&r), world->nranks) + 1;
			int failed = run_round(world, &r);
			if (failed > 0) return failed;
		}
	}
	return 0;
}

static void run_everywhere(int (*body)(struct world *world), const int *nranks, int count)
{
	for (int i = 0; i < count; i++) {
		for (int kind = 0; kind < WORLD_KINDS; kind++) {
			for (int by_ref = 0; by_ref < 2; by_ref++) {
				struct world_options options = { .kind = kind ? WORLD_PROCESSES : WORLD_THREADS, .nranks = nranks[i], .nchannels = 2,
					.by_ref = by_ref };
				unsigned which = (unsigned)(2 * kind + by_ref);
				assert_int_equal(world_run(&options, body, &which), 0);
			}
		}
	}
}

static void every_plan_gives_the_defined_result_at_every_size(void **state)
{
	(void)state;
	run_everywhere(all_plans, (const int[]){ 2, 3, 4, 5, 8 }, MOST_WORLDS);
}

static void every_type_and_operator_is_reduced(void **state)
{
	(void)state;
	if (SANITIZED_THREAD) skip();       /* arithmetic knows no threads */
	run_everywhere(all_types, (const int[]){ 2, 5 }, 2);
}

static void messages_of_megabytes_arrive_whole(void **state)
{
	(void)state;
	run_everywhere(large, (const int[]){ 3 }, 1);
}

/* Values whose sums round: what each rank has must still be the same bits. */
static int same_bits(struct world *world)
{
	static const ncclDataType_t types[] = { ncclFloat16, ncclBfloat16, ncclFloat8e4m3, ncclFloat8e5m2, ncclFloat32, ncclFloat64 };
	for (unsigned turn = 0; turn < TP_ARRAY_LEN(types) * TP_NALGOS * 4; turn++) {
		ncclDataType_t type = types[turn % TP_ARRAY_LEN(types)];
		enum tp_algo algo = turn / TP_ARRAY_LEN(types) % TP_NALGOS;
		unsigned kind = turn / (TP_ARRAY_LEN(types) * TP_NALGOS);
		size_t bytes = kind % 2 ? 40000 : 1016;
		struct tp_layout *layout;
		WORLD_CHECK(tp_layout_create(world->nranks, (const int[64]){ 0 }, &layout) == ncclSuccess);
		struct tp_plan_spec spec = { TP_ALL_REDUCE, algo, -1, 1, layout };
		if (tp_plan_refuses(&spec)) {
			tp_layout_free(layout);
			continue;
		}
		struct tp_plan *plan;
		WORLD_CHECK(tp_plan_create(&spec, world->rank, &plan) == ncclSuccess);
		unsigned char *input = malloc(bytes), *output = world->shared + (size_t)world->rank * SHARED_EACH;
		uint64_t seed = 77 + turn * 8 + (unsigned)world->rank;
		reduce_fill(type, input, bytes, false, &seed);
		struct tp_exec_call call = { .plan = plan, .input = input, .output = output, .block_bytes = bytes, .chunk_bytes = 8192, .line_bytes = 16,
			.reduce = { .type = type, .op = ncclSum, .pre = kind >= 2, .pre_scale = 0.3, .pre_integer = 1, .post_scale = 1, .post_divisor = 1 },
			.tag = turn };
		if (kind < 2) tp_reduce_fill_avg(&call.reduce, world->nranks);
		bool handled = false;
		if (world->rank % 2) WORLD_CHECK(tp_exec_one_shot(world->exec, &call, world->crowded, NULL, NULL, &handled) == ncclSuccess);
		if (!handled) WORLD_CHECK(world_run_call(world, &call) == ncclSuccess);
		world_barrier(world);
		if (memcmp(output, world->shared, bytes)) {
			fprintf(stderr, "rank %d: %s %s kind %u differs from rank 0\n", world->rank, tp_algo_name(algo), tp_type_name(type), kind);
			return __LINE__;
		}
		world_barrier(world);
		free(input);
		tp_exec_forget(world->exec, plan);
		tp_plan_free(plan);
		tp_layout_free(layout);
	}
	return 0;
}

static void rounded_results_are_the_same_bits_on_all_ranks(void **state)
{
	(void)state;
	for (int n = 2; n < 6; n += 3) {
		for (int by_ref = 0; by_ref < 2; by_ref++) {
			struct world_options options = { .kind = WORLD_PROCESSES, .nranks = n, .nchannels = 1, .by_ref = by_ref,
				.shared_bytes = (size_t)n * SHARED_EACH };
			assert_int_equal(world_run(&options, same_bits, NULL), 0);
		}
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_plan_gives_the_defined_result_at_every_size),
		cmocka_unit_test(every_type_and_operator_is_reduced),
		cmocka_unit_test(messages_of_megabytes_arrive_whole),
		cmocka_unit_test(rounded_results_are_the_same_bits_on_all_ranks),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

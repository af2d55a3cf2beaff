/* Every collective, type, operator and a choice of counts, in place and not, against the definition. */
#include "api/helper_ranks.h"

static const size_t counts[] = { 0, 1, 3, 17, 1000, 4099 };
#define NCOUNTS (sizeof(counts) / sizeof(counts[0]))

struct buffers { unsigned char *send, *recv; size_t bytes; };

static struct buffers make_buffers(struct ranks *r, size_t count, ncclDataType_t type)
{
	struct buffers b = { .bytes = (count + 1) * (size_t)r->nranks * ranks_type_bytes(type) };
	b.send = malloc(b.bytes);
	b.recv = malloc(b.bytes);
	REQUIRE(b.send && b.recv);
	memset(b.send, 0x5a, b.bytes);
	memset(b.recv, 0xa5, b.bytes);
	return b;
}

static void free_buffers(struct buffers *b)
{
	free(b->send);
	free(b->recv);
}

static void fill(struct ranks *r, void *buffer, size_t first, size_t n, ncclDataType_t type, ncclRedOp_t op, uint64_t seed)
{
	for (size_t i = 0; i < n; i++) ranks_put(buffer, first + i, type, ranks_value(seed, r->rank, first + i, op));
}

static void check_reduced(struct ranks *r, const void *got, size_t first, size_t n, ncclDataType_t type, ncclRedOp_t op, uint64_t seed)
{
	for (size_t i = 0; i < n; i++) {
		double tolerance, wanted = ranks_reduced(seed, r->nranks, first + i, type, op, &tolerance), value = ranks_get(got, i, type);
		if (!ranks_equal(value, wanted, tolerance))
			fprintf(stderr, "type %d op %d count %zu element %zu: %g, not %g\n", (int)type, (int)op, n, i, value, wanted);
		REQUIRE(ranks_equal(value, wanted, tolerance));
	}
}

static void check_copied(struct ranks *r, const void *got, size_t at, int from, size_t first, size_t n, ncclDataType_t type, uint64_t seed)
{
	for (size_t i = 0; i < n; i++) {
		double wanted = ranks_value(seed, from, first + i, ncclMax), value = ranks_get(got, at + i, type);
		if (value != wanted) fprintf(stderr, "type %d from %d count %zu element %zu: %g, not %g\n", (int)type, from, n, i, value, wanted);
		REQUIRE(value == wanted);
	}
}

static void reduce_family(struct ranks *r, size_t n, ncclDataType_t type, ncclRedOp_t op, bool in_place, uint64_t seed)
{
	size_t size = ranks_type_bytes(type), all = n * (size_t)r->nranks;
	int root = (int)(seed % (uint64_t)r->nranks);
	struct buffers b = make_buffers(r, n, type);
	fill(r, b.send, 0, n, type, op, seed);
	REQUIRE_OK(ncclAllReduce(b.send, in_place ? b.send : b.recv, n, type, op, r->comm, NULL));
	check_reduced(r, in_place ? b.send : b.recv, 0, n, type, op, seed);

	fill(r, b.send, 0, n, type, op, seed + 1);
	bool is_root = r->rank == root;
	REQUIRE_OK(ncclReduce(b.send, in_place ? b.send : is_root ? b.recv : NULL, n, type, op, root, r->comm, NULL));
	if (is_root) check_reduced(r, in_place ? b.send : b.recv, 0, n, type, op, seed + 1);

	fill(r, b.send, 0, all, type, op, seed + 2);
	void *out = in_place ? b.send + (size_t)r->rank * n * size : b.recv;
	REQUIRE_OK(ncclReduceScatter(b.send, out, n, type, op, r->comm, NULL));
	check_reduced(r, out, (size_t)r->rank * n, n, type, op, seed + 2);
	free_buffers(&b);
}

static void copy_family(struct ranks *r, size_t n, ncclDataType_t type, bool in_place, uint64_t seed)
{
	size_t size = ranks_type_bytes(type), own = (size_t)r->rank * n;
	int root = (int)(seed % (uint64_t)r->nranks);
	bool is_root = r->rank == root;
	struct buffers b = make_buffers(r, n, type);

	fill(r, b.send, 0, n, type, ncclMax, seed);
	if (in_place) REQUIRE_OK(ncclBcast(b.send, n, type, root, r->comm, NULL));
	else REQUIRE_OK(ncclBroadcast(is_root ? b.send : NULL, b.recv, n, type, root, r->comm, NULL));
	check_copied(r, in_place ? b.send : b.recv, 0, root, 0, n, type, seed);

	void *part = in_place ? b.recv + own * size : b.send;
	fill(r, part, 0, n, type, ncclMax, seed + 1);
	REQUIRE_OK(ncclAllGather(part, b.recv, n, type, r->comm, NULL));
	for (int k = 0; k < r->nranks; k++) check_copied(r, b.recv, (size_t)k * n, k, 0, n, type, seed + 1);

	part = in_place && is_root ? b.recv + own * size : b.send;
	fill(r, part, 0, n, type, ncclMax, seed + 2);
	REQUIRE_OK(ncclGather(part, is_root ? b.recv : NULL, n, type, root, r->comm, NULL));
	for (int k = 0; k < r->nranks && is_root; k++) check_copied(r, b.recv, (size_t)k * n, k, 0, n, type, seed + 2);

	fill(r, b.send, 0, n * (size_t)r->nranks, type, ncclMax, seed + 3);
	part = in_place && is_root ? b.send + own * size : b.recv;
	REQUIRE_OK(ncclScatter(is_root ? b.send : NULL, part, n, type, root, r->comm, NULL));
	check_copied(r, part, 0, root, own, n, type, seed + 3);

	fill(r, b.send, 0, n * (size_t)r->nranks, type, ncclMax, seed + 4);
	REQUIRE_OK(ncclAlltoAll(b.send, b.recv, n, type, r->comm, NULL));
	for (int k = 0; k < r->nranks; k++) check_copied(r, b.recv, (size_t)k * n, k, own, n, type, seed + 4);
	free_buffers(&b);
}

static void everything(struct ranks *r)
{
	uint64_t seed = 1;
	/* Under the thread sanitizer some types: arithmetic knows no threads. */
	for (int type = 0; type < ncclNumTypes; type += SANITIZED_THREAD ? 3 : 1) {
		for (size_t c = 0; c < NCOUNTS; c++) {
			/* The long ones once for each type. */
			bool one_op = counts[c] > 100;
			for (int op = 0; op < ncclNumOps; op++) {
				if (one_op && op != type % ncclNumOps) continue;
				reduce_family(r, counts[c], (ncclDataType_t)type, (ncclRedOp_t)op, seed % 2, seed);
				reduce_family(r, counts[c], (ncclDataType_t)type, (ncclRedOp_t)op, seed % 2 == 0, seed);
				seed += 10;
			}
			copy_family(r, counts[c], (ncclDataType_t)type, false, seed);
			copy_family(r, counts[c], (ncclDataType_t)type, true, seed);
			seed += 10;
		}
	}
}

static void large(struct ranks *r)
{
	static const size_t sizes[] = { 1u << 14, (1u << 17) + 5, (1u << 20) + 3 };
	for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
		reduce_family(r, sizes[i], ncclFloat32, ncclSum, i % 2, 77 + i);
		copy_family(r, sizes[i] / (size_t)r->nranks, ncclInt32, i % 2, 99 + i);
	}
}

static void one_rank_is_its_own_group(void **state) { (void)state; assert_true(ranks_run_n(1, everything, NULL)); }
static void two_processes(void **state) { (void)state; assert_true(ranks_run_n(2, everything, NULL)); }
static void three_processes(void **state) { (void)state; assert_true(ranks_run_n(3, everything, NULL)); }

static void five_threads_of_one_process(void **state)
{
	(void)state;
	struct ranks_options options = { .nranks = 5, .threads = true };
	assert_true(ranks_run(&options, everything, NULL));
}

static void four_ranks_on_two_hosts(void **state)
{
	(void)state;
	struct ranks_options options = { .nranks = 4, .nhosts = 2, .timeout_s = 250 };
	assert_true(ranks_run(&options, everything, NULL));
}

static void three_processes_of_one_host_over_the_network(void **state)
{
	(void)state;
	struct ranks_options options = { .nranks = 3, .timeout_s = 250, .env = { "NCCL_SHM_DISABLE=1", "NCCL_SOCKET_IFNAME=lo" } };
	assert_true(ranks_run(&options, everything, NULL));
}

static void large_messages(void **state) { (void)state; assert_true(ranks_run_n(4, large, NULL)); }

static void large_messages_between_hosts(void **state)
{
	(void)state;
	struct ranks_options options = { .nranks = 3, .nhosts = 3 };
	assert_true(ranks_run(&options, large, NULL));
}

static void scaled(struct ranks *r)
{
	/* rank k multiplies by k + 1 */
	for (int type = 0; type < ncclNumTypes; type++) {
		unsigned char scalar[8], send[40 * 8], recv[40 * 8];
		ranks_put(scalar, 0, (ncclDataType_t)type, r->rank + 1);
		ncclRedOp_t op;
		REQUIRE_OK(ncclRedOpCreatePreMulSum(&op, scalar, (ncclDataType_t)type, type % 2 ? ncclScalarDevice : ncclScalarHostImmediate, r->comm));
		for (size_t i = 0; i < 40; i++) ranks_put(send, i, (ncclDataType_t)type, (double)(i % 2));
		REQUIRE_OK(ncclAllReduce(send, recv, 40, (ncclDataType_t)type, op, r->comm, NULL));
		for (size_t i = 0; i < 40; i++)
			REQUIRE(ranks_get(recv, i, (ncclDataType_t)type) == (double)(i % 2) * r->nranks * (r->nranks + 1) / 2);
		REQUIRE_OK(ncclRedOpDestroy(op, r->comm));
		REQUIRE_IS(ncclAllReduce(send, recv, 40, (ncclDataType_t)type, op, r->comm, NULL), ncclInvalidArgument);
	}
}

static void each_rank_scales_its_own_input(void **state) { (void)state; assert_true(ranks_run_n(3, scaled, NULL)); }

static void same_bits(struct ranks *r)
{
	enum { N = 5001 };
	float *send = malloc(N * sizeof(*send)), *recv = malloc(N * sizeof(*recv)), *all = malloc((size_t)r->nranks * N * sizeof(*all));
	for (int i = 0; i < N; i++) send[i] = 1.0f / (float)(i + 3 + 7 * r->rank);
	REQUIRE_OK(ncclAllReduce(send, recv, N, ncclFloat32, ncclSum, r->comm, NULL));
	REQUIRE_OK(ncclAllGather(recv, all, N, ncclFloat32, r->comm, NULL));
	for (int k = 0; k < r->nranks; k++) REQUIRE(!memcmp(all + (size_t)k * N, recv, N * sizeof(*recv)));
	REQUIRE_OK(ncclAllReduce(send, all, N, ncclFloat32, ncclSum, r->comm, NULL));
	REQUIRE(!memcmp(all, recv, N * sizeof(*recv)));
	free(send);
	free(recv);
	free(all);
}

static void results_are_bit_identical_on_all_ranks(void **state) { (void)state; assert_true(ranks_run_n(4, same_bits, NULL)); }

static void repeated(struct ranks *r)
{
	/* As many as two seconds hold: on a busy machine a turn may take milliseconds. The first rank says when, by the sum. */
	uint64_t end = ranks_now_ms() + 2000;
	bool stop = false;
	for (int i = 0; i < 20000 && !stop; i++) {
		int64_t value[2] = { i + r->rank, r->rank == 0 && ranks_now_ms() >= end }, sum[2] = { -1, -1 };
		REQUIRE_OK(ncclAllReduce(value, sum, 2, ncclInt64, ncclSum, r->comm, NULL));
		REQUIRE(sum[0] == (int64_t)r->nranks * i + r->nranks * (r->nranks - 1) / 2);
		stop = sum[1] > 0;
	}
}

static void the_same_small_call_again_and_again(void **state) { (void)state; assert_true(ranks_run_n(2, repeated, NULL)); }

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(one_rank_is_its_own_group), cmocka_unit_test(two_processes), cmocka_unit_test(three_processes),
		cmocka_unit_test(five_threads_of_one_process), cmocka_unit_test(four_ranks_on_two_hosts),
		cmocka_unit_test(three_processes_of_one_host_over_the_network), cmocka_unit_test(large_messages),
		cmocka_unit_test(large_messages_between_hosts), cmocka_unit_test(each_rank_scales_its_own_input),
		cmocka_unit_test(results_are_bit_identical_on_all_ranks), cmocka_unit_test(the_same_small_call_again_and_again),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

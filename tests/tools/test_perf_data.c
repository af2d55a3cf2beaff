/* What `telpher perf` calls wrong: nothing that is right, and each element that isn't. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "../../tools/perf_data.c"

#define COUNT 50

const struct perf_coll_info perf_colls[PERF_NCOLLS] = {
	[PERF_ALL_REDUCE] = { .name = "all_reduce", .reduces = true },
	[PERF_ALL_GATHER] = { .name = "all_gather", .block_per_rank = true, .recv_is_large = true },
	[PERF_ALL_TO_ALL] = { .name = "alltoall", .block_per_rank = true, .send_is_large = true, .recv_is_large = true },
};
static const struct perf_options all_reduce = { .coll = PERF_ALL_REDUCE }, all_gather = { .coll = PERF_ALL_GATHER },
	all_to_all = { .coll = PERF_ALL_TO_ALL };

static void each_flipped_bit_is_a_wrong_element(void **state)
{
	(void)state;
	for (int type = 0; type < ncclNumTypes; type++)
		for (int op = 0; op < PERF_NOPS; op++) {
			uint8_t buf[COUNT * 8];
			size_t bytes = perf_type_bytes(type);
			/* Of one rank, what was sent is the result (mulsum's scalar of rank 0 is 1). */
			perf_fill(&all_reduce, type, op, 0, 1, buf, 1, COUNT, 7);
			assert_int_equal(perf_wrong(&all_reduce, type, op, -1, 0, 1, buf, COUNT, 7), 0);
			buf[5 * bytes + bytes - 1] ^= 0x40;
			buf[9 * bytes + bytes - 1] ^= 0x40;
			assert_int_equal(perf_wrong(&all_reduce, type, op, -1, 0, 1, buf, COUNT, 7), 2);
		}
}

/* The sum of all ranks but `without` (-1: of all) and what is called wrong in it. */
static int64_t wrong_in_sum(int type, int nranks, int without)
{
	uint8_t one[COUNT * 8], sum[COUNT * 8];
	double total[COUNT] = { 0 };
	for (int r = 0; r < nranks; r++) {
		perf_fill(&all_reduce, type, ncclSum, r, nranks, one, 1, COUNT, 3);
		for (size_t i = 0; i < COUNT && r != without; i++) total[i] += get(type, one, i);
	}
	for (size_t i = 0; i < COUNT; i++) put(type, sum, i, total[i]);
	return perf_wrong(&all_reduce, type, ncclSum, -1, 0, nranks, sum, COUNT, 3);
}

static void a_lost_contribution_is_seen_in_every_type_at_any_number_of_ranks(void **state)
{
	(void)state;
	static const int sizes[] = { 2, 9, 40, 300 };
	for (int type = 0; type < ncclNumTypes; type++)
		for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
			int n = sizes[s], seen = 0;
			assert_int_equal(wrong_in_sum(type, n, -1), 0);
			for (int without = 0; without < n; without++) seen += wrong_in_sum(type, n, without) > 0;
			/* A message this short has room for some of the ranks only. */
			assert_true(n > COUNT ? seen > COUNT / 2 : seen == n);
		}
}

static void blocks_in_the_wrong_place_are_wrong(void **state)
{
	(void)state;
	uint32_t buf[3][COUNT], other[COUNT];
	for (int r = 0; r < 3; r++) perf_fill(&all_gather, ncclInt32, -1, r, 3, buf[r], 1, COUNT, 1);
	assert_int_equal(perf_wrong(&all_gather, ncclInt32, -1, -1, 1, 3, buf, COUNT, 1), 0);
	memcpy(other, buf[0], sizeof(other));
	memcpy(buf[0], buf[2], sizeof(other));
	memcpy(buf[2], other, sizeof(other));
	assert_int_equal(perf_wrong(&all_gather, ncclInt32, -1, -1, 1, 3, buf, COUNT, 1), 2 * COUNT);
	/* What rank 0 sent to itself instead of to rank 1. */
	perf_fill(&all_to_all, ncclInt32, -1, 0, 3, buf, 3, COUNT, 1);
	assert_int_equal(perf_wrong(&all_to_all, ncclInt32, -1, -1, 1, 3, buf, COUNT, 1), 3 * COUNT);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(each_flipped_bit_is_a_wrong_element),
		cmocka_unit_test(a_lost_contribution_is_seen_in_every_type_at_any_number_of_ranks),
		cmocka_unit_test(blocks_in_the_wrong_place_are_wrong),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

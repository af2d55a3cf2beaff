/* The kernel around copies (exec/cuda/copies.h), run by the emulator: ranks are threads, copies are memcpy. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "cuda/emulator_run.h"
#include "exec/cuda/internal.h"

enum { RANKS = 4, BLOCK = 300, LINES_AT = 512, CALLS = 120, TAG = 77, PLACE = 5 };

struct rank {
	int rank;
	struct tp_dev_comm comm;
	struct tp_dev_status status;
	uint64_t epoch;
	_Alignas(16) unsigned char region[LINES_AT + TP_COPIES_SIGNS * TP_DEV_MAX_LOCAL * 16];
	unsigned char out[RANKS * BLOCK];
	int wrong;
};
static struct rank ranks[RANKS];

static void open_world(uint64_t epoch)
{
	memset(ranks, 0, sizeof(ranks));
	for (int r = 0; r < RANKS; r++) {
		ranks[r].rank = r;
		ranks[r].epoch = epoch;
		ranks[r].comm = (struct tp_dev_comm){ .rank = r, .nranks = RANKS, .status = (uint64_t)(uintptr_t)&ranks[r].status };
		for (int p = 0; p < RANKS; p++) ranks[r].comm.region[p] = (uint64_t)(uintptr_t)ranks[p].region;
	}
}

static struct tp_copies_args args_of(struct rank *k)
{
	return (struct tp_copies_args){ .comm = (uint64_t)(uintptr_t)&k->comm, .epoch = (uint64_t)(uintptr_t)&k->epoch, .lines = LINES_AT, .tag = TAG,
		.place = PLACE, .rank = (int16_t)k->rank, .nranks = RANKS, .gives_way = 1 };
}

static void run_args(const struct tp_copies_args *args) { tp_emulator_launch(tp_emulator_find("tp_copies"), 1, 32, 1, args); }

static void run(struct rank *k, uint64_t tell, enum tp_copies_sign tell_sign, uint64_t await, enum tp_copies_sign await_sign, bool ends)
{
	struct tp_copies_args args = args_of(k);
	args.tell = tell;
	args.tell_sign = (uint8_t)tell_sign;
	args.await = await;
	args.await_sign = (uint8_t)await_sign;
	args.ends = ends;
	run_args(&args);
}

static bool has_sign(const struct rank *at, enum tp_copies_sign sign, int from)
{
	const unsigned char *line = at->region + LINES_AT + ((size_t)sign * TP_DEV_MAX_LOCAL + (size_t)from) * 16;
	for (int i = 0; i < 16; i++)
		if (line[i]) return true;
	return false;
}

static const uint64_t all = (1u << RANKS) - 1;

/* ---- calls ---- */

static unsigned char value_of(int call, int from, int block) { return (unsigned char)(call * 37 + from * 11 + block + 1); }

static void late(struct rank *k, int call)
{
	if ((call * 7 + k->rank * 5) % 11 == 0) usleep((useconds_t)(50 * (call % 5)));
}

/* Each rank pushes its block to all. */
static void gather(struct rank *k, int call)
{
	uint64_t others = all & ~(1ull << k->rank);
	unsigned char mine[BLOCK];
	memset(mine, value_of(call, k->rank, 0), sizeof(mine));
	run(k, others, TP_COPIES_READY, others, TP_COPIES_READY, false);
	for (int p = 0; p < RANKS; p++) memcpy(ranks[p].out + k->rank * BLOCK, mine, BLOCK);
	late(k, call);
	run(k, others, TP_COPIES_DONE, others, TP_COPIES_DONE, true);
	for (int i = 0; i < RANKS * BLOCK; i++)
		if (k->out[i] != value_of(call, i / BLOCK, 0) && !k->wrong) k->wrong = call + 1;
}

/* A broadcast as a scatter and a gather. */
static void slices(struct rank *k, int call, int root)
{
	uint64_t others = all & ~(1ull << k->rank), roots = 1ull << root;
	unsigned char mine[RANKS * BLOCK];
	if (k->rank == root) {
		for (int b = 0; b < RANKS; b++) memset(mine + b * BLOCK, value_of(call, root, b), BLOCK);
		run(k, 0, TP_COPIES_READY, others, TP_COPIES_READY, false);
		for (int p = 0; p < RANKS; p++) memcpy(ranks[p].out + p * BLOCK, mine + p * BLOCK, BLOCK);
		run(k, others, TP_COPIES_SCATTERED, 0, TP_COPIES_READY, false);
		for (int p = 0; p < RANKS; p++)
			if (p != root) memcpy(ranks[p].out + root * BLOCK, mine + root * BLOCK, BLOCK);
		run(k, others, TP_COPIES_DONE, 0, TP_COPIES_READY, true);
		return;
	}
	run(k, roots, TP_COPIES_READY, roots, TP_COPIES_SCATTERED, false);
	late(k, call);
	for (int p = 0; p < RANKS; p++)
		if (p != root && p != k->rank) memcpy(ranks[p].out + k->rank * BLOCK, k->out + k->rank * BLOCK, BLOCK);
	run(k, others & ~roots, TP_COPIES_DONE, others, TP_COPIES_DONE, true);
	for (int i = 0; i < RANKS * BLOCK; i++)
		if (k->out[i] != value_of(call, root, i / BLOCK) && !k->wrong) k->wrong = call + 1;
}

static void *run_rank(void *arg)
{
	struct rank *k = arg;
	for (int call = 0; call < CALLS; call++) {
		late(k, call);
		if (call % 3) slices(k, call, call % RANKS);
		else gather(k, call);
	}
	return NULL;
}

static void calls_follow_each_other_over_all_ages(void **state)
{
	(void)state;
	static const uint64_t epochs[] = { 0, (1ull << 32) - CALLS / 2, (1ull << 48) - CALLS / 2 };
	pthread_t threads[RANKS];
	for (size_t e = 0; e < sizeof(epochs) / sizeof(epochs[0]); e++) {
		open_world(epochs[e]);
		for (int r = 0; r < RANKS; r++) assert_int_equal(pthread_create(&threads[r], NULL, run_rank, &ranks[r]), 0);
		for (int r = 0; r < RANKS; r++) assert_int_equal(pthread_join(threads[r], NULL), 0);
		for (int r = 0; r < RANKS; r++) {
			assert_int_equal(ranks[r].wrong, 0);
			assert_int_equal(ranks[r].status.fault, TP_CUDA_FINE);
			assert_true(ranks[r].epoch == epochs[e] + CALLS);
		}
	}
}

/* ---- what ends them ---- */

/* Rank 1 has said what args say; rank 0 waits for it. */
static void expect_fault(struct tp_copies_args *args, enum tp_cuda_fault fault, uint32_t found, uint32_t expected)
{
	run_args(args);
	run(&ranks[0], 0, TP_COPIES_READY, 2, TP_COPIES_READY, true);
	assert_int_equal(ranks[0].status.fault, fault);
	assert_int_equal(ranks[0].status.peer, 1);
	assert_int_equal(ranks[0].status.found, found);
	assert_int_equal(ranks[0].status.expected, expected);
	assert_true(ranks[0].epoch == 9);
	run(&ranks[0], 2, TP_COPIES_DONE, 0, TP_COPIES_READY, true);
	assert_false(has_sign(&ranks[1], TP_COPIES_DONE, 0));
}

static void another_call_or_place_is_a_fault_and_no_sign_follows(void **state)
{
	(void)state;
	open_world(9);
	struct tp_copies_args args = args_of(&ranks[1]);
	args.tell = 1;
	args.tag = TAG + 1;
	expect_fault(&args, TP_CUDA_TAG, TAG + 1, TAG);
	open_world(9);
	args.tag = TAG;
	args.place = PLACE + 1;
	expect_fault(&args, TP_CUDA_PLACE, PLACE + 1, PLACE);
}

static void an_abort_ends_the_wait_and_no_sign_follows(void **state)
{
	(void)state;
	open_world(3);
	ranks[0].status.abort = 1;
	run(&ranks[0], 2, TP_COPIES_READY, 2, TP_COPIES_READY, false);
	assert_true(has_sign(&ranks[1], TP_COPIES_READY, 0));
	assert_int_not_equal(ranks[0].comm.stop, 0);
	run(&ranks[0], 2, TP_COPIES_DONE, 0, TP_COPIES_DONE, true);
	assert_false(has_sign(&ranks[1], TP_COPIES_DONE, 0));
	assert_true(ranks[0].epoch == 3);
	assert_int_equal(ranks[0].status.fault, TP_CUDA_FINE);
}

/* Rank 1's sign of the call before, and of the one 2^32 before, are no news. */
static void old_signs_are_no_news(void **state)
{
	(void)state;
	for (int i = 0; i < 2; i++) {
		open_world(i ? 1ull << 32 : 5);
		ranks[1].epoch = i ? 0 : 4;
		struct tp_copies_args args = args_of(&ranks[1]);
		args.tell = 1;
		run_args(&args);
		ranks[0].status.abort = 1;
		run(&ranks[0], 0, TP_COPIES_READY, 2, TP_COPIES_READY, true);
		assert_true(ranks[0].epoch == (i ? 1ull << 32 : 5));
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(calls_follow_each_other_over_all_ages), cmocka_unit_test(another_call_or_place_is_a_fault_and_no_sign_follows),
		cmocka_unit_test(an_abort_ends_the_wait_and_no_sign_follows), cmocka_unit_test(old_signs_are_no_news),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

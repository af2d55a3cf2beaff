/* Fused kernels' time: epochs, ages, ranks that are late, and what ends a wait.
 *   test_cuda_fused_epochs [pattern of tests' names] */
#include "exec/cuda/helper_fused.h"
#include "exec/helper_reduce.h"

/* A thread that has no part in a kernel's last round may be late in the one before, when others are in the next kernel. */
static void last_rounds_of_few_units(void **unused)
{
	(void)unused;
	struct fused_call calls[24];
	fused_lateness = 3;
	for (size_t kind = 0; kind < FUSED_KINDS; kind++)
		for (int lines = 0; lines < 2; lines++) {
			const int n = fused_kinds[kind].owners ? 3 : 2;
			const size_t round = fused_small_round(n, lines), slices = fused_kinds[kind].algo == TP_ALGO_TWO_SHOT || fused_kinds[kind].owners ? 2 : 1;
			for (uint32_t i = 0; i < 24; i++) calls[i] = fused_call_of(&fused_kinds[kind], 0, ((i % 3 ? 0 : round) + 10) * slices, lines, i * 2);
			fused_run_small(n, calls, 24);
		}
	fused_lateness = 0;
}

/* The same between kernels of different kinds and roots. */
static void rounds_of_different_kernels_in_a_row(void **unused)
{
	(void)unused;
	enum { CALLS = 120 };
	struct fused_call calls[CALLS];
	uint64_t state = 4711;
	fused_lateness = 4;
	for (int n = 3; n <= 4; n++)
		for (int lines = 0; lines < 2; lines++) {
			for (uint32_t i = 0; i < CALLS; i++) {
				const struct fused_kind *kind = &fused_kinds[reduce_draw(&state) % FUSED_KINDS];
				const size_t slices = kind->algo == TP_ALGO_TWO_SHOT ? (size_t)n : kind->owners ? (size_t)n - 1 : 1;
				const size_t floats = reduce_draw(&state) % 4 * fused_small_round(n, lines) + 10;
				calls[i] = fused_call_of(kind, (int)(reduce_draw(&state) % (uint64_t)n), floats * slices, lines, i * 2);
			}
			fused_run_small(n, calls, CALLS);
		}
	fused_lateness = 0;
}

static void different_kernels_in_a_row_while_ranks_drift_apart(void **unused)
{
	(void)unused;
	fused_lateness = 20;
	for (int n = 2; n <= 5; n++) fused_random_calls(n, 3, 0, (uint64_t)n, n < 4 ? 60 : 30, 60000);
	fused_lateness = 0;
}

static void many_tiny_calls_of_all_kinds(void **unused)
{
	(void)unused;
	fused_lateness = 2;
	for (int n = 2; n <= 4; n++) fused_random_calls(n, 2, 0, 77 + (uint64_t)n, 400, 300);
	fused_lateness = 0;
}

/* ---- ages ---- */

enum { OLD = 0xfff00000u };             /* TP_LINES_AGE: a kernel that begins this late begins a new age */

static void epochs_pass_the_end_of_their_bits(void **unused)
{
	(void)unused;
	fused_lateness = 10;
	for (int n = 2; n <= 4; n++) fused_random_calls(n, 3, OLD - 20, 500 + (uint64_t)n, 60, 10000);
	fused_lateness = 0;
}

/* What an age leaves behind must not be taken for lines of the next. */
static void lines_of_an_earlier_age_are_gone(void **unused)
{
	(void)unused;
	static struct fused_world w;
	struct fused_call calls[24];
	for (int i = 0; i < 24; i++)
		calls[i] = (struct fused_call){ .coll = TP_ALL_REDUCE, .algo = i % 2 ? TP_ALGO_TWO_SHOT : TP_ALGO_ONE_SHOT, .root = -1, .type = ncclInt32,
			.op = ncclSum, .count = 4000, .lines128 = i / 2 % 2, .tag = (uint32_t)i * 2 };
	fused_open(&w, 3, 2, 0);
	assert_int_equal(fused_run(&w, calls, 12), 0);
	for (int r = 0; r < 3; r++)
		for (int b = 0; b < 2; b++) w.ranks[r].comm.epoch[b].now = w.ranks[r].comm.epoch[b].heard = OLD + 1;
	fused_lateness = 50;
	assert_int_equal(fused_run(&w, calls + 12, 12), 0);
	fused_lateness = 0;
	assert_true(w.ranks[0].comm.epoch[0].now < 100);
	fused_close(&w);
}

/* The flag of rank 1's first line of this epoch; or of another one, before it comes and where it was written over. */
static uint32_t first_flag(const struct fused_world *w, bool lines128, uint32_t epoch)
{
	const struct tp_fused_layout *layout = &w->ranks[1].fused.layout;
	const char *slot = (const char *)w->ranks[1].region + layout->lines[lines128] + epoch % 2 * layout->slot[lines128];
	return (uint32_t)(__atomic_load_n((const uint64_t *)(slot + (lines128 ? 120 : 0)), __ATOMIC_ACQUIRE) >> 32);
}

static void hold_the_reader(struct fused_world *w, const struct fused_call *call, uint32_t epoch, bool in_rounds)
{
	pthread_t threads[2];
	struct fused_rank *reader = &w->ranks[1];
	atomic_store(&reader->held, true);
	reader->held_from = 0;
	reader->held_in_rounds = in_rounds;
	fused_begin(w, 2, call, 1, threads);
	while (first_flag(w, call->lines128, epoch) - epoch > 100) usleep(100);
	usleep(10000);                          /* for a writer who doesn't wait */
	uint32_t flag = first_flag(w, call->lines128, epoch);
	bool kept = flag == epoch;
	if (!kept) fused_abort(w);              /* or the reader waits for ever */
	atomic_store(&reader->held, false);
	int failed = fused_end(w, 2, threads);
	assert_true(kept);
	assert_int_equal(failed, 0);
}

static struct fused_call long_call(bool to_root, bool lines128)
{
	/* Of rank 0 to rank 1. */
	const struct fused_kind kind = { to_root ? TP_GATHER : TP_BROADCAST, TP_ALGO_DIRECT, .rooted = true };
	return fused_call_of(&kind, to_root, 5 * fused_small_round(2, lines128), lines128, 4);
}

/* Nothing tells a block of its peers while all hear from all: what it knows of them may be older than half of the epochs. */
static void however_old_the_last_news_a_writer_waits_for_its_reader(void **unused)
{
	(void)unused;
	static const uint32_t epochs[] = { 0, 0x7fffffff, 0x80000001, 0xc0000000, OLD - 2 };
	for (size_t e = 0; e < TP_ARRAY_LEN(epochs); e++)
		for (int way = 0; way < 4; way++) {
			static struct fused_world w;
			struct fused_call call = long_call(way & 1, way & 2);
			fused_open_small(&w, 2, epochs[e]);
			hold_the_reader(&w, &call, epochs[e] + 1, false);
			fused_close(&w);
		}
}

static void news_of_an_earlier_age_is_none(void **unused)
{
	(void)unused;
	for (int way = 0; way < 4; way++) {
		static struct fused_world w;
		struct fused_call call = long_call(way & 1, way & 2);
		fused_open_small(&w, 2, OLD - 1);
		assert_int_equal(fused_run(&w, &call, 1), 0);
		assert_true(w.ranks[0].comm.epoch[0].now > OLD);
		hold_the_reader(&w, &call, 1, true);
		assert_true(w.ranks[0].comm.epoch[0].now < 100);
		fused_close(&w);
	}
}

/* ---- what ends a wait ---- */

static void an_abort_ends_waiting_kernels(void **unused)
{
	(void)unused;
	for (size_t kind = 0; kind < FUSED_KINDS; kind++) {
		for (int lines = 0; lines < 2; lines++) {
			static struct fused_world w;
			pthread_t threads[2];
			struct fused_call call = fused_call_of(&fused_kinds[kind], 2, 100000, lines, 0);
			fused_open(&w, 3, 2, 0);
			fused_begin(&w, 2, &call, 1, threads);          /* the third never comes */
			usleep(2000);
			fused_abort(&w);
			fused_end(&w, 2, threads);
			fused_close(&w);
		}
	}
}

static void calls_that_differ_are_reported(void **unused)
{
	(void)unused;
	for (size_t kind = 0; kind < 2 * FUSED_KINDS; kind++) {
		static struct fused_world w;
		const struct fused_kind *its = &fused_kinds[kind / 2];
		const int n = its->owners ? 3 : 2;
		struct fused_call call = fused_call_of(its, 0, 100, its->owners || kind / 2 % 2, 0x1000);
		fused_open(&w, n, 2, kind % 2 ? 0x90000000 : 0);
		w.ranks[1].tag_differs = 1;
		assert_int_not_equal(fused_run(&w, &call, 1), 0);
		for (int r = 0; r < n; r++) {
			/* Who hears from nobody (a root that sends, those who send to one) has no reason to complain. */
			bool from_root = call.coll == TP_BROADCAST || call.coll == TP_SCATTER;
			if (its->rooted && (from_root ? r == 0 : r != 0 && !its->owners)) continue;
			assert_int_equal(w.ranks[r].status.fault, TP_CUDA_TAG);
			if (r != 1) assert_int_equal(w.ranks[r].status.peer, 1);
			assert_int_equal(w.ranks[r].status.found, r == 1 ? 0x1000 : 0x1001);
			assert_int_equal(w.ranks[r].status.expected, r == 1 ? 0x1001 : 0x1000);
		}
		fused_close(&w);
	}
}

int main(int argc, char **argv)
{
	if (argc > 1) cmocka_set_test_filter(argv[1]);
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(last_rounds_of_few_units),
		cmocka_unit_test(rounds_of_different_kernels_in_a_row),
		cmocka_unit_test(different_kernels_in_a_row_while_ranks_drift_apart),
		cmocka_unit_test(many_tiny_calls_of_all_kinds),
		cmocka_unit_test(epochs_pass_the_end_of_their_bits),
		cmocka_unit_test(lines_of_an_earlier_age_are_gone),
		cmocka_unit_test(however_old_the_last_news_a_writer_waits_for_its_reader),
		cmocka_unit_test(news_of_an_earlier_age_is_none),
		cmocka_unit_test(an_abort_ends_waiting_kernels),
		cmocka_unit_test(calls_that_differ_are_reported),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Kernels of large messages, whose chunks go through pipes: results, rings that are full, counters' ends, and what ends a wait.
 *   test_cuda_pipes [pattern of tests' names] */
#include "exec/cuda/helper_fused.h"
#include "exec/helper_reduce.h"

static struct fused_call pipe_call(const struct fused_kind *kind, int n, int root, size_t count, uint32_t tag)
{
	struct fused_call c = fused_call_of(kind, root, count, true, tag);
	if (c.coll == TP_ALL_REDUCE) c.algo = TP_ALGO_TWO_SHOT;
	c.owners &= n > 2;
	c.pipes = true;
	return c;
}

static void run_with_chunks(int n, int nchannels, uint32_t chunk, const struct fused_call *calls, int ncalls)
{
	static struct fused_world w;
	fused_open(&w, n, nchannels, 0);
	if (chunk) fused_set_chunk(&w, chunk);
	int failed = fused_run(&w, calls, ncalls);
	fused_close(&w);
	assert_int_equal(failed, 0);
}

static void every_type_and_operation_has_the_host_executors_bits(void **unused)
{
	(void)unused;
	struct fused_call calls[ncclNumTypes * 4 * 4];
	for (int n = 2; n <= 5; n++) {
		int ncalls = 0;
		for (int type = 0; type < ncclNumTypes; type++)
			for (int op = 0; op < 4; op++)
				for (int scaling = 0; scaling < (op == ncclSum ? 4 : 1); scaling++, ncalls++) {
					const struct fused_kind *kind = &fused_kinds[(type + op + scaling) % 3 == 0 ? 2 : 1];
					calls[ncalls] = pipe_call(kind, n, 0, 1021, (uint32_t)ncalls * 2 + 1);
					calls[ncalls].type = (ncclDataType_t)type;
					calls[ncalls].op = (ncclRedOp_t)op;
					calls[ncalls].scaling = scaling;
				}
		run_with_chunks(n, 2, 512, calls, ncalls);
	}
}

static void all_collectives_of_all_sizes(void **unused)
{
	(void)unused;
	static const size_t sizes[] = { 1, 3, 4, 31, 32, 33, 1000, 4096, 20001, 65536 };
	struct fused_call calls[FUSED_KINDS * TP_ARRAY_LEN(sizes) * 2];
	for (int n = 2; n <= 8; n += n < 4 ? 1 : 2) {
		int ncalls = 0;
		for (size_t kind = 0; kind < FUSED_KINDS; kind++)
			for (size_t s = 0; s < TP_ARRAY_LEN(sizes); s++)
				for (int variant = 0; variant < 2; variant++, ncalls++) {
					calls[ncalls] = pipe_call(&fused_kinds[kind], n, (int)(s % (size_t)n), sizes[s] / (n > 4 ? 3 : 1) + 1, (uint32_t)ncalls);
					calls[ncalls].in_place = variant;
					calls[ncalls].shift = variant ? s % 4 : 0;
				}
		run_with_chunks(n, 3, 0, calls, ncalls);
	}
}

static void chunks_come_straight_to_whoever_has_registered(void **unused)
{
	(void)unused;
	static struct fused_world w;
	struct fused_call calls[FUSED_KINDS * 8];
	for (int n = 2; n <= 5; n++) {
		int ncalls = 0;
		for (size_t kind = 0; kind < FUSED_KINDS; kind++)
			for (unsigned which = 0; which < 8; which++, ncalls++) {
				calls[ncalls] = pipe_call(&fused_kinds[kind], n, (int)which % n, which % 2 ? 4001 : 4096, (uint32_t)ncalls);
				calls[ncalls].offers = true;
				calls[ncalls].registered = which == 7 ? ~0u : which;
				calls[ncalls].shift = which == 5;
				calls[ncalls].in_place = which == 6;
			}
		fused_lateness = 3;
		fused_open(&w, n, 2, 0xfffffff0u);
		fused_set_chunk(&w, 1024);
		int failed = fused_run(&w, calls, ncalls);
		fused_lateness = 0;
		for (int r = 0; r < n; r++) assert_true(w.ranks[r].status.straight > 0);
		fused_close(&w);
		assert_int_equal(failed, 0);
	}
}

static void many_chunks_go_through_full_rings(void **unused)
{
	(void)unused;
	struct fused_call calls[FUSED_KINDS * 2];
	for (int n = 2; n <= 4; n++) {
		int ncalls = 0;
		for (size_t kind = 0; kind < FUSED_KINDS; kind++)
			for (int variant = 0; variant < 2; variant++, ncalls++) {
				calls[ncalls] = pipe_call(&fused_kinds[kind], n, n - 1, 9001, (uint32_t)ncalls * 2);
				calls[ncalls].in_place = variant;
			}
		fused_lateness = 5;
		run_with_chunks(n, 1, 128, calls, ncalls);
		fused_lateness = 0;
	}
}

static void different_kernels_in_a_row_while_ranks_drift_apart(void **unused)
{
	(void)unused;
	fused_lateness = 10;
	for (int n = 2; n <= 5; n++) fused_random_pipes(n, 3, 0, n % 2 ? 256 : 0, (uint64_t)n, n < 4 ? 60 : 30, 60000);
	fused_lateness = 0;
}

/* Between collectives that reduce, whose chunks and phases divide the same rings otherwise. */
static void transfers_and_collectives_take_turns_in_the_same_rings(void **unused)
{
	(void)unused;
	fused_lateness = 10;
	for (int n = 2; n <= 4; n++) {
		struct fused_call calls[45];
		static struct fused_world w;
		for (int i = 0; i < (int)TP_ARRAY_LEN(calls); i++) {
			const bool transfers = i % 3 != 0;
			calls[i] = pipe_call(&fused_kinds[transfers ? 4 : i % 2 ? 1 : (size_t)i % FUSED_KINDS], n, 0, (size_t)(transfers ? 1001 + i * 397 : 700 + i * 301), (uint32_t)i * 7 + 1);
			calls[i].transfers = transfers;
			calls[i].shift = i % 5 == 0;
			calls[i].offers = i % 4 == 0;
			calls[i].registered = (unsigned)i;
		}
		fused_open(&w, n, 1 + n % 3, n % 2 ? 0xffffffe0u : 0);
		fused_set_chunk(&w, n % 2 ? 2048 : 512);
		int failed = fused_run(&w, calls, (int)TP_ARRAY_LEN(calls));
		fused_close(&w);
		assert_int_equal(failed, 0);
	}
	fused_lateness = 0;
}

static void counters_pass_the_end_of_their_bits(void **unused)
{
	(void)unused;
	fused_lateness = 5;
	for (int n = 2; n <= 4; n++) fused_random_pipes(n, 2, n == 3 ? 0x7fffffe0u : 0xffffffe0u, 512, 40 + (uint64_t)n, 40, 20000);
	fused_lateness = 0;
}

static void an_abort_ends_waiting_kernels(void **unused)
{
	(void)unused;
	for (size_t kind = 0; kind < FUSED_KINDS; kind++) {
		static struct fused_world w;
		pthread_t threads[2];
		struct fused_call call = pipe_call(&fused_kinds[kind], 3, 2, 100000, 0);
		fused_open(&w, 3, 2, 0);
		fused_begin(&w, 2, &call, 1, threads);          /* the third never comes */
		usleep(2000);
		fused_abort(&w);
		fused_end(&w, 2, threads);
		fused_close(&w);
	}
}

static void calls_that_differ_are_reported(void **unused)
{
	(void)unused;
	for (size_t kind = 0; kind < FUSED_KINDS; kind++) {
		static struct fused_world w;
		const int n = 3;
		struct fused_call call = pipe_call(&fused_kinds[kind], n, 0, 100, 0x1000);
		fused_open(&w, n, 2, 0);
		w.ranks[1].tag_differs = 1;
		/* Who doesn't find it, and waits for those who have, would be ended by the watcher. */
		pthread_t threads[FUSED_MOST_RANKS];
		fused_begin(&w, n, &call, 1, threads);
		bool found = false;
		while (!found) {
			usleep(1000);
			for (int r = 0; r < n; r++) found |= __atomic_load_n(&w.ranks[r].status.fault, __ATOMIC_ACQUIRE) == TP_CUDA_TAG;
		}
		fused_abort(&w);
		fused_end(&w, n, threads);
		for (int r = 0; r < n; r++) {
			if (w.ranks[r].status.fault != TP_CUDA_TAG) continue;
			assert_true(r == 1 || w.ranks[r].status.peer == 1);
			assert_int_equal(w.ranks[r].status.found, r == 1 ? 0x1000 : 0x1001);
			assert_int_equal(w.ranks[r].status.expected, r == 1 ? 0x1001 : 0x1000);
		}
		fused_close(&w);
	}
}

static void pipes_of_eight_ranks_take_16_mb_at_most(void **unused)
{
	(void)unused;
	for (int n = 2; n <= TP_PIPE_RANKS; n++)
		for (int channels = 1; channels <= TP_DEV_MAX_CHANNELS; channels++) {
			assert_true(tp_pipes_region_bytes(TP_CUDA_PIPES_ALL, n, channels) <= (size_t)16 << 20);
			assert_true(tp_pipes_region_bytes(TP_CUDA_PIPES_MOVE, n, channels) <= (size_t)9 << 20);
			assert_int_equal(tp_pipes_region_bytes(TP_CUDA_PIPES_NONE, n, channels), 0);
		}
	assert_int_equal(tp_pipes_region_bytes(TP_CUDA_PIPES_ALL, 1, 64), 0);
	assert_int_equal(tp_pipes_region_bytes(TP_CUDA_PIPES_ALL, TP_PIPE_RANKS + 1, 64), 0);
}

/* What was not measured to be better has none, and no memory for them; sends and receives use one link at a time, however many GPUs there are. */
static void only_two_gpus_have_pipes_for_collectives_unasked(void **unused)
{
	(void)unused;
	struct tp_fused_table table;
	for (int n = 2; n <= 64; n++) {
		tp_fused_defaults(&(struct tp_fused_machine){ .gpu = "NVIDIA H200", .major = 9, .nranks = n, .join = TP_FUSED_NVLINK }, &table);
		assert_int_equal(tp_fused_table_pipes(&table), n == 2 ? TP_CUDA_PIPES_ALL : n <= TP_PIPE_RANKS ? TP_CUDA_PIPES_TRANSFER : TP_CUDA_PIPES_NONE);
		for (enum tp_fused_join join = TP_FUSED_PCIE; join <= TP_FUSED_SHARED; join++) {
			tp_fused_defaults(&(struct tp_fused_machine){ .gpu = "NVIDIA H200", .major = 9, .nranks = n, .join = join }, &table);
			assert_int_equal(tp_fused_table_pipes(&table), TP_CUDA_PIPES_NONE);
		}
	}
}

int main(int argc, char **argv)
{
	if (argc > 1) cmocka_set_test_filter(argv[1]);
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_type_and_operation_has_the_host_executors_bits),
		cmocka_unit_test(all_collectives_of_all_sizes),
		cmocka_unit_test(chunks_come_straight_to_whoever_has_registered),
		cmocka_unit_test(many_chunks_go_through_full_rings),
		cmocka_unit_test(different_kernels_in_a_row_while_ranks_drift_apart),
		cmocka_unit_test(transfers_and_collectives_take_turns_in_the_same_rings),
		cmocka_unit_test(counters_pass_the_end_of_their_bits),
		cmocka_unit_test(an_abort_ends_waiting_kernels),
		cmocka_unit_test(calls_that_differ_are_reported),
		cmocka_unit_test(pipes_of_eight_ranks_take_16_mb_at_most),
		cmocka_unit_test(only_two_gpus_have_pipes_for_collectives_unasked),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

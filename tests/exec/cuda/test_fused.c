/* Fused kernels' results: every type, operation and shape.
 *   test_cuda_fused [pattern of tests' names] */
#include "exec/cuda/helper_fused.h"

static void every_type_and_operation_has_the_host_executors_bits(void **unused)
{
	(void)unused;
	struct fused_call calls[ncclNumTypes * 4 * 2 * 4];
	int ncalls = 0;
	for (int type = 0; type < ncclNumTypes; type++)
		for (int op = 0; op < 4; op++)
			for (int lines = 0; lines < 2; lines++)
				for (int scaling = 0; scaling < (op == ncclSum ? 4 : 1); scaling++, ncalls++)
					calls[ncalls] = (struct fused_call){ .coll = TP_ALL_REDUCE, .algo = TP_ALGO_ONE_SHOT, .root = -1, .type = (ncclDataType_t)type,
						.op = (ncclRedOp_t)op, .scaling = scaling, .count = 1021, .lines128 = lines, .tag = (uint32_t)(ncalls * 2 + 1) };
	fused_run_calls(3, 2, 0, calls, ncalls);
}

static void all_collectives_of_all_sizes(void **unused)
{
	(void)unused;
	static const size_t sizes[] = { 1, 3, 4, 7, 8, 17, 29, 30, 31, 61, 1000, 4099, 20001 };
	struct fused_call calls[TP_ARRAY_LEN(fused_kinds) * TP_ARRAY_LEN(sizes) * 2];
	for (int n = 2; n <= 9; n += n < 5 ? 1 : 4) {
		int ncalls = 0;
		for (size_t kind = 0; kind < TP_ARRAY_LEN(fused_kinds); kind++)
			for (size_t s = 0; s < TP_ARRAY_LEN(sizes); s++)
				for (int lines = 0; lines < 2; lines++, ncalls++) {
					calls[ncalls] = fused_call_of(&fused_kinds[kind], (int)(s % (size_t)n), sizes[s], lines, (uint32_t)ncalls);
					calls[ncalls].in_place = ncalls / 2 % 2;
				}
		fused_run_calls(n, 4, 0, calls, ncalls);
	}
}

static void buffers_at_any_element(void **unused)
{
	(void)unused;
	struct fused_call calls[FUSED_KINDS * 2 * 5 * 2];
	static const ncclDataType_t types[] = { ncclUint8, ncclBfloat16, ncclFloat32, ncclInt64, ncclFloat8e4m3 };
	int ncalls = 0;
	for (size_t kind = 0; kind < TP_ARRAY_LEN(fused_kinds); kind++)
		for (size_t t = 0; t < TP_ARRAY_LEN(types); t++)
			for (int lines = 0; lines < 2; lines++)
				for (size_t shift = 1; shift < 4; shift += 2, ncalls++) {
					calls[ncalls] = fused_call_of(&fused_kinds[kind], 1, 333 + t, lines, (uint32_t)ncalls);
					calls[ncalls].type = types[t];
					calls[ncalls].shift = shift;
					calls[ncalls].in_place = t % 2;
				}
	fused_run_calls(3, 2, 0, calls, ncalls);
}

static void many_rounds(void **unused)
{
	(void)unused;
	struct fused_call calls[FUSED_KINDS * 2];
	int ncalls = 0;
	for (size_t kind = 0; kind < TP_ARRAY_LEN(fused_kinds); kind++)
		for (int lines = 0; lines < 2; lines++, ncalls++) {
			calls[ncalls] = fused_call_of(&fused_kinds[kind], 0, 50007, lines, (uint32_t)ncalls * 2);
			calls[ncalls].in_place = true;
		}
	fused_lateness = 5;
	fused_run_calls(3, 1, 0, calls, ncalls);
	fused_lateness = 0;
}

/* Only 1,920 bytes of a rank at a time, as if that were all that a launch can count. */
static void what_is_too_large_for_a_launch_takes_several(void **unused)
{
	(void)unused;
	static const size_t counts[] = { 480, 481, 5007 };
	struct fused_call calls[FUSED_KINDS * 2 * 3 + 2 * 3];
	for (int n = 2; n <= 5; n += 3) {
		int ncalls = 0;
		for (size_t c = 0; c < TP_ARRAY_LEN(counts); c++) {
			for (size_t kind = 0; kind < TP_ARRAY_LEN(fused_kinds); kind++)
				for (int lines = 0; lines < 2; lines++, ncalls++) {
					calls[ncalls] = fused_call_of(&fused_kinds[kind], n - 1, counts[c], lines, (uint32_t)ncalls);
					calls[ncalls].in_place = c == 2;
				}
			for (int reduce = 0; reduce < 2; reduce++, ncalls++)
				calls[ncalls] = (struct fused_call){ .coll = reduce ? TP_REDUCE_SCATTER : TP_ALL_REDUCE, .algo = reduce ? TP_ALGO_DIRECT : TP_ALGO_TWO_SHOT,
					.type = ncclFloat32, .count = (counts[c] + 3) / 4 * 4, .windows = true, .tag = (uint32_t)ncalls };
		}
		for (int i = 0; i < ncalls; i++) calls[i].cut = (size_t)n * 1920;
		fused_run_calls(n, 3, 7, calls, ncalls);
	}
}

static void windows_are_reduced_where_they_lie(void **unused)
{
	(void)unused;
	static const size_t counts[] = { 4, 64, 8196 };
	struct fused_call calls[ncclNumTypes * 4 * 4 * 2];
	for (int n = 2; n <= 4; n += 2) {
		int ncalls = 0;
		for (int type = 0; type < ncclNumTypes; type++)
			for (int op = 0; op < 4; op++)
				for (size_t i = 0; i < TP_ARRAY_LEN(counts); i++, ncalls++) {
					bool scatter = (type + op + (int)i) % 3 == 0;
					size_t whole = 16 / tp_type_bytes((ncclDataType_t)type);
					calls[ncalls] = (struct fused_call){ .coll = scatter ? TP_REDUCE_SCATTER : TP_ALL_REDUCE, .algo = scatter ? TP_ALGO_DIRECT : TP_ALGO_TWO_SHOT,
						.root = -1, .type = (ncclDataType_t)type, .op = (ncclRedOp_t)op, .scaling = op == ncclSum ? (int)(i % 4) : 0, .windows = true,
						.count = scatter ? tp_align_up(counts[i], whole) : counts[i], .in_place = i % 2, .tag = (uint32_t)ncalls * 2 + 1 };
					/* Only outputs that are no windows are each rank's own. */
					if (scatter && i % 2 == 0) calls[ncalls].odd = (unsigned)(ncalls % (1 << n));
				}
		fused_lateness = 1;
		fused_run_calls(n, 3, 0, calls, ncalls);
		fused_lateness = 0;
	}
}

static void regions_of_eight_ranks_take_16_mb_at_most(void **unused)
{
	(void)unused;
	for (int n = 2; n <= 8; n++)
		for (int channels = 1; channels <= TP_DEV_MAX_CHANNELS; channels++) {
			struct tp_fused_layout layout;
			tp_fused_lay_out(n, channels, &layout);
			assert_true(tp_fused_region_bytes(n, channels) <= (size_t)16 << 20);
			assert_true(layout.slot[0] % 1024 == 0 && layout.slot[0] >= 1024 && layout.slot[1] % 128 == 0 && layout.slot[1] >= 1024);
			assert_true(layout.lines[0] % 128 == 0 && layout.lines[1] % 128 == 0 && layout.share % 128 == 0);
		}
	assert_int_equal(tp_fused_region_bytes(1, 64), 0);
}

int main(int argc, char **argv)
{
	if (argc > 1) cmocka_set_test_filter(argv[1]);
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_type_and_operation_has_the_host_executors_bits),
		cmocka_unit_test(all_collectives_of_all_sizes),
		cmocka_unit_test(buffers_at_any_element),
		cmocka_unit_test(many_rounds),
		cmocka_unit_test(what_is_too_large_for_a_launch_takes_several),
		cmocka_unit_test(windows_are_reduced_where_they_lie),
		cmocka_unit_test(regions_of_eight_ranks_take_16_mb_at_most),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

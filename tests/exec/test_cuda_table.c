/* The table of kernels by kind of machine: which rows count where, and what is said to text that is none. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "base/log.h"
#include "base/param.h"
#include "exec/cuda/internal.h"

enum { KB = 1 << 10, MB = 1 << 20, GB = 1 << 30 };
#define NEVER UINT64_MAX

static struct tp_fused_machine machine(const char *gpu, int major, int nranks, enum tp_fused_join join)
{
	struct tp_fused_machine m = { .major = major, .nranks = nranks, .join = join };
	snprintf(m.gpu, sizeof(m.gpu), "%s", gpu);
	return m;
}

static struct tp_fused_table built_in(const char *gpu, int major, int nranks, enum tp_fused_join join)
{
	struct tp_fused_machine m = machine(gpu, major, nranks, join);
	struct tp_fused_table t;
	tp_fused_defaults(&m, &t);
	return t;
}

static ncclResult_t read_over(const char *text, const struct tp_fused_machine *m, struct tp_fused_table *out)
{
	setenv("TELPHER_CUDA_TABLE", text, 1);
	tp_param_reload();
	tp_fused_defaults(m, out);
	ncclResult_t result = tp_fused_read_table(m, out);
	unsetenv("TELPHER_CUDA_TABLE");
	tp_param_reload();
	return result;
}

static char path[64];
static void write_file(const char *text, size_t bytes)
{
	FILE *f = fopen(path, "w");
	assert_non_null(f);
	assert_int_equal(fwrite(text, 1, bytes, f), bytes);
	assert_int_equal(fclose(f), 0);
}

static ncclResult_t read_file(const char *text, const struct tp_fused_machine *m, struct tp_fused_table *out)
{
	char setting[80];
	write_file(text, strlen(text));
	snprintf(setting, sizeof(setting), "@%s", path);
	return read_over(setting, m, out);
}

static void measured_machines_have_rows_of_their_own(void **unused)
{
	(void)unused;
	struct tp_fused_table two = built_in("NVIDIA H200", 9, 2, TP_FUSED_NVLINK), four = built_in("NVIDIA H200", 9, 4, TP_FUSED_NVLINK);
	assert_int_equal(two.limits[TP_FUSED_TWO_SHOT].pipes, GB / 2 + 1);
	assert_int_equal(two.limits[TP_FUSED_ONE_SHOT].ll128, 8 * MB);
	assert_int_equal(two.copies, 256 * MB);
	assert_int_equal(two.reduce, 16 * MB);
	assert_int_equal(four.limits[TP_FUSED_ONE_SHOT].ll128, 1 * MB);
	assert_int_equal(four.owners, 512 * KB);
	assert_true(four.reduce == NEVER && four.limits[TP_FUSED_TWO_SHOT].pipes == NEVER);
	assert_int_equal(four.copies, 16 * MB);
}

static void their_kin_is_like_them_and_others_are_not(void **unused)
{
	(void)unused;
	struct tp_fused_table kin = built_in("NVIDIA H100 80GB HBM3", 9, 2, TP_FUSED_NVLINK), old = built_in("NVIDIA A100", 8, 2, TP_FUSED_NVLINK),
		pcie = built_in("NVIDIA H200 NVL", 9, 2, TP_FUSED_PCIE);
	assert_int_equal(kin.reduce, 16 * MB);
	assert_true(old.reduce == NEVER && pcie.reduce == NEVER);
	assert_int_equal(old.limits[TP_FUSED_ONE_SHOT].ll, 96 * KB);
	assert_int_equal(old.threads[0], 128);
	assert_int_equal(old.threads[1], 256);
}

static void ranks_that_share_a_gpu_have_lines_and_nothing_else(void **unused)
{
	(void)unused;
	for (int n = 2; n <= 8; n++) {
		struct tp_fused_table t = built_in("NVIDIA H200", 9, n, TP_FUSED_SHARED);
		assert_int_equal(t.limits[TP_FUSED_TWO_SHOT].ll, 4 * MB);
		assert_int_equal(t.limits[TP_FUSED_ROOTED].ll, 1 * MB);
		assert_int_equal(t.limits[TP_FUSED_ONE_SHOT].ll128, 4 * MB);
		assert_int_equal(t.limits[TP_FUSED_OWNERS].ll128, 16 * MB);
		assert_true(t.limits[TP_FUSED_GATHER].ll128 > (uint64_t)64 << 30 && t.transfers == NEVER);
		assert_int_equal(t.pipes, 0);
		assert_true(t.copies == NEVER && t.copies_rooted == NEVER && t.limits[TP_FUSED_GATHER].pipes == NEVER);
	}
}

/* Launch by launch: all bytes once, and nothing beyond what kernels count in 32 bits. */
static bool runs_whole(enum tp_coll coll, int nranks, size_t block, bool windows)
{
	struct tp_plan plan = { .spec = { .coll = coll }, .shape = coll == TP_ALL_REDUCE ? TP_SHAPE_TWO_SHOT : TP_SHAPE_DIRECT };
	struct tp_fused f = { .usable = true, .nranks = nranks, .table = built_in("NVIDIA H200", 9, nranks, TP_FUSED_NVLINK) };
	struct tp_exec_call call = { .plan = &plan, .input = (void *)4096, .output = (void *)8192, .block_bytes = block };
	struct tp_fused_launch l;
	size_t from = 0;
	tp_fused_lay_out(nranks, TP_DEV_MAX_CHANNELS, &f.layout);
	while (from < block && (windows ? tp_fused_fit_windows(&f, &call, &(struct tp_fused_windows){ 1, 0, 1, 0, 0 }, from, &l) : tp_fused_fit(&f, &call, from, &l))) {
		const uint64_t last = (uint64_t)(nranks - 1) * l.args.in_stride;
		assert_true(l.args.gathers || last + l.args.slice_bytes <= l.args.total_bytes);
		assert_true(last + l.args.slice_bytes <= UINT32_MAX && (uint64_t)(nranks - 1) * l.args.out_stride + l.args.slice_bytes <= UINT32_MAX);
		assert_true(l.bytes > 0);
		from += l.bytes;
	}
	assert_true(from == 0 || from == block);
	return from == block;
}

static void calls_of_any_size_are_cut_into_launches_that_kernels_can_count(void **unused)
{
	(void)unused;
	for (int windows = 0; windows < 2; windows++) {
		assert_true(runs_whole(TP_REDUCE_SCATTER, 8, (size_t)511 * MB, windows));
		assert_false(runs_whole(TP_REDUCE_SCATTER, 8, (size_t)512 * MB, windows));
		assert_true(runs_whole(TP_REDUCE_SCATTER, 4, (size_t)1000 * MB + 16, windows));
		assert_false(runs_whole(TP_REDUCE_SCATTER, 4, (size_t)1536 * MB, windows));
		for (int n = 3; n <= 8; n++) assert_true(runs_whole(TP_ALL_REDUCE, n, (size_t)9 * GB + 16, windows));
	}
	assert_true(runs_whole(TP_ALL_GATHER, 4, (size_t)1000 * MB + 4, false));
	assert_false(runs_whole(TP_ALL_TO_ALL, 4, (size_t)GB, false));
}

static void the_users_entries_come_last(void **unused)
{
	(void)unused;
	struct tp_fused_machine m = machine("NVIDIA H200", 9, 2, TP_FUSED_NVLINK);
	struct tp_fused_table t;
	assert_int_equal(read_over("one_shot=1K:2M,copies=never,two_shot=0:0:3M,threads=64:512", &m, &t), ncclSuccess);
	assert_int_equal(t.limits[TP_FUSED_ONE_SHOT].ll, 1 * KB);
	assert_int_equal(t.limits[TP_FUSED_TWO_SHOT].pipes, 3 * MB);
	assert_true(t.copies == NEVER);
	assert_int_equal(t.threads[1], 512);
	assert_int_equal(t.reduce, 16 * MB);
}

static void a_files_rows_are_for_machines_that_they_name(void **unused)
{
	(void)unused;
	static const char text[] = "# a comment\nwindow=3M  # for all\n[gpu=\"NVIDIA H200\"|H300 ranks=2-3 join=nvlink]\nwindow=5M\ncopies=7M\n"
		"[ ranks=4 cc=9.0 join=nvlink|pcie ] window=9M,\n\twindow=10M\n[] stream=1\n[gpu=B200]\nstream=2";
	static const struct { const char *gpu; int major, nranks; enum tp_fused_join join; uint64_t window, copies; } cases[] = {
		{ "NVIDIA H200", 9, 2, TP_FUSED_NVLINK, 5 * MB, 7 * MB }, { "NVIDIA H200", 9, 3, TP_FUSED_NVLINK, 5 * MB, 7 * MB },
		{ "NVIDIA H300", 9, 2, TP_FUSED_NVLINK, 5 * MB, 7 * MB }, { "NVIDIA H200", 9, 2, TP_FUSED_SHARED, 3 * MB, NEVER },
		{ "NVIDIA H200", 9, 4, TP_FUSED_NVLINK, 10 * MB, 16 * MB }, { "NVIDIA A100", 8, 4, TP_FUSED_NVLINK, 3 * MB, 16 * MB },
		{ "NVIDIA B100", 10, 4, TP_FUSED_PCIE, 10 * MB, 16 * MB }, { "", 0, 5, TP_FUSED_PCIE, 3 * MB, 16 * MB } };
	for (size_t i = 0; i < TP_ARRAY_LEN(cases); i++) {
		struct tp_fused_machine m = machine(cases[i].gpu, cases[i].major, cases[i].nranks, cases[i].join);
		struct tp_fused_table t;
		assert_int_equal(read_file(text, &m, &t), ncclSuccess);
		assert_true(t.window == cases[i].window);
		assert_true(t.copies == cases[i].copies);
		assert_int_equal(t.stream, 1);
	}
}

static void text_that_is_no_table_is_named(void **unused)
{
	(void)unused;
	static const struct { const char *text, *wanted; } cases[] = { { "one_shot=1K", "at 'one_shot=1K'" }, { "window=1M,windows=2", "at 'windows=2'" },
		{ "copies=lots", "at 'copies=lots'" }, { "threads=1:2", "at 'threads=1:2'" }, { "window=1Mcopies=2", "at 'window=1Mcopies=2'" },
		{ "[ranks=0] window=1", "at '[ranks=0]" }, { "[ranks=4-2] window=1", "at '[ranks=4-2]" }, { "[join=rope] window=1", "at '[join=rope]" },
		{ "[cc=9] window=1", "at '[cc=9]" }, { "[gpu=] window=1", "at '[gpu=]" }, { "[gpu=\"H200] window=1", "at '[gpu=" }, { "[ranks=2", "at '[ranks=2'" },
		{ "[nranks=2] window=1", "at '[nranks=2]" }, { "[", "at '['" } };
	struct tp_fused_machine m = machine("NVIDIA H200", 9, 2, TP_FUSED_NVLINK);
	struct tp_fused_table t;
	for (size_t i = 0; i < TP_ARRAY_LEN(cases); i++) {
		assert_int_equal(read_over(cases[i].text, &m, &t), ncclInvalidUsage);
		assert_non_null(strstr(tp_log_last_error(), cases[i].wanted));
	}
	/* In rows for other machines too. */
	assert_int_equal(read_file("window=1M\n[ranks=64]\nwindow=much\n", &m, &t), ncclInvalidUsage);
	assert_non_null(strstr(tp_log_last_error(), ":3 can't be read at 'window=much'"));
	assert_int_equal(read_over("@/nonexistent/table", &m, &t), ncclInvalidUsage);
	assert_non_null(strstr(tp_log_last_error(), "TELPHER_CUDA_TABLE names /nonexistent/table"));
	assert_int_equal(read_over("@/dev/zero", &m, &t), ncclInvalidUsage);
	assert_non_null(strstr(tp_log_last_error(), "/dev/zero is no table"));
	assert_int_equal(read_over("@/", &m, &t), ncclSystemError);
}

static void a_table_that_cant_be_read_changes_nothing(void **unused)
{
	(void)unused;
	struct tp_fused_machine m = machine("NVIDIA H200", 9, 2, TP_FUSED_NVLINK);
	struct tp_fused_table t, before;
	tp_fused_defaults(&m, &before);
	assert_int_equal(read_over("window=1,offer=x", &m, &t), ncclInvalidUsage);
	assert_memory_equal(&t, &before, sizeof(t));
}

int main(void)
{
	snprintf(path, sizeof(path), "/tmp/test_cuda_table.%d", (int)getpid());
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(measured_machines_have_rows_of_their_own),
		cmocka_unit_test(their_kin_is_like_them_and_others_are_not),
		cmocka_unit_test(ranks_that_share_a_gpu_have_lines_and_nothing_else),
		cmocka_unit_test(calls_of_any_size_are_cut_into_launches_that_kernels_can_count),
		cmocka_unit_test(the_users_entries_come_last),
		cmocka_unit_test(a_files_rows_are_for_machines_that_they_name),
		cmocka_unit_test(text_that_is_no_table_is_named),
		cmocka_unit_test(a_table_that_cant_be_read_changes_nothing),
	};
	int failed = cmocka_run_group_tests(tests, NULL, NULL);
	unlink(path);
	return failed;
}

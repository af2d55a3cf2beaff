/* The probe's pure parts: how a block is cut, what a peer may say, the line through measured times, the formulas. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "probe/fit.h"
#include "probe/formula.h"
#include "probe/shape.h"
#include "probe/wire.h"

#define GB ((uint64_t)1 << 30)

static void close_to(double wanted, double got) { assert_true(got > wanted * 0.999999 - 1e-9 && got < wanted * 1.000001 + 1e-9); }

/* Pieces of all queue pairs cover the block once, in order, none too large. */
static void check_block(uint64_t bytes, uint32_t nqps, uint64_t most)
{
	struct probe_shape shape = { .bytes = bytes, .nqps = nqps, .max_message = most };
	uint64_t at = 0;
	for (uint32_t q = 0; q < nqps; q++) {
		uint64_t requests = probe_requests(&shape, q);
		for (uint64_t r = 0; r < requests; r++) {
			struct probe_piece piece = probe_piece_of(&shape, q, r);
			assert_int_equal(piece.offset, at);
			assert_in_range(piece.bytes, 1, most);
			assert_int_equal(piece.last, r + 1 == requests);
			at += piece.bytes;
		}
	}
	assert_int_equal(at, bytes);
}

static void a_block_is_cut_into_pieces_that_cover_it(void **state)
{
	(void)state;
	static const uint64_t sizes[] = { 1, 8, 127, 128, 129, 4096, 1000001, 256u << 20 };
	static const uint32_t qps[] = { 1, 2, 3, 7, 64 };
	for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++)
		for (size_t k = 0; k < sizeof(qps) / sizeof(qps[0]); k++) {
			check_block(sizes[i], qps[k], 1u << 20);
			check_block(sizes[i], qps[k], GB);
		}
}

static void shares_begin_at_128_bytes(void **state)
{
	(void)state;
	struct probe_shape shape = { .bytes = 1000, .nqps = 3, .max_message = GB };
	uint64_t offset, bytes;
	probe_share(&shape, 0, &offset, &bytes);
	assert_int_equal(bytes, 384);
	probe_share(&shape, 2, &offset, &bytes);
	assert_int_equal(offset, 768);
	assert_int_equal(bytes, 232);
}

static void small_blocks_leave_queue_pairs_idle(void **state)
{
	(void)state;
	struct probe_shape shape = { .bytes = 8, .nqps = 4, .max_message = GB };
	assert_int_equal(probe_requests(&shape, 0), 1);
	assert_int_equal(probe_requests(&shape, 1), 0);
}

static void more_than_a_message_or_4_gb_takes_several_requests(void **state)
{
	(void)state;
	struct probe_shape shape = { .bytes = 5 * GB + 1, .nqps = 1, .max_message = probe_largest_message((uint64_t)4 * GB - 1, (uint64_t)4 * GB - 1) };
	assert_int_equal(shape.max_message, 2 * GB);
	assert_int_equal(probe_requests(&shape, 0), 3);
	struct probe_piece last = probe_piece_of(&shape, 0, 2);
	assert_int_equal(last.offset, 4 * GB);
	assert_int_equal(last.bytes, GB + 1);
	assert_true(last.last);
	check_block(5 * GB + 1, 3, GB);
	assert_int_equal(probe_largest_message(GB, 1u << 20), 1u << 20);
}

static void a_stream_takes_turns(void **state)
{
	(void)state;
	struct probe_shape shape = { .bytes = 3000, .nqps = 2, .max_message = 1024, .count = 5 };
	assert_int_equal(probe_pieces(&shape), 3);
	assert_int_equal(probe_requests(&shape, 0), 9);
	assert_int_equal(probe_requests(&shape, 1), 6);
	assert_int_equal(probe_message_of(&shape, 1, 3), 3);
	struct probe_piece piece = probe_piece_of(&shape, 0, 5);
	assert_int_equal(piece.offset, 2048);
	assert_int_equal(piece.bytes, 952);
	assert_true(piece.last);
}

static void good_hello(struct probe_record *record)
{
	probe_record_start(record, PROBE_HELLO);
	record->as.hello = (struct probe_hello){ .bytes = 4096, .max_message = GB, .nqps = 2, .mtu = 5, .qpns = { 17, 18 } };
	strcpy(record->as.hello.host, "a\x1b[2Jb");
}

static void a_hello_is_taken_and_its_text_made_harmless(void **state)
{
	(void)state;
	struct probe_record record;
	char why[128];
	good_hello(&record);
	assert_int_equal(probe_record_check(&record, sizeof(record.head), why, sizeof(why)), record.head.bytes);
	assert_true(probe_record_accept(&record, why, sizeof(why)));
	assert_string_equal(record.as.hello.host, "a?[2Jb");
}

static void what_no_peer_says_is_refused(void **state)
{
	(void)state;
	struct probe_record record;
	char why[128];
	assert_int_equal(probe_record_check("GET / HTTP/1.1\r\n", 3, why, sizeof(why)), -1);
	assert_non_null(strstr(why, "another program"));
	assert_int_equal(probe_record_check("TP", 2, why, sizeof(why)), 0);
	good_hello(&record);
	record.head.version = 9;
	assert_int_equal(probe_record_check(&record, sizeof(record), why, sizeof(why)), -1);
	assert_non_null(strstr(why, "version 9"));
	good_hello(&record);
	record.head.bytes = 1u << 30;
	assert_int_equal(probe_record_check(&record, sizeof(record), why, sizeof(why)), -1);
	good_hello(&record);
	record.head.type = 77;
	assert_int_equal(probe_record_check(&record, sizeof(record), why, sizeof(why)), -1);
#define REFUSED(change, word) do { good_hello(&record); change; assert_false(probe_record_accept(&record, why, sizeof(why))); assert_non_null(strstr(why, word)); } while (0)
	REFUSED(record.as.hello.nqps = 65, "queue pairs");
	REFUSED(record.as.hello.nqps = 0, "queue pairs");
	REFUSED(record.as.hello.bytes = 0, "size");
	REFUSED(record.as.hello.bytes = UINT64_MAX, "size");
	REFUSED(record.as.hello.op = 3, "operation");
	REFUSED(record.as.hello.mtu = 9, "MTU");
	REFUSED(record.as.hello.max_message = 0, "no message");
	REFUSED(record.as.hello.qpns[1] = 1u << 24, "24 bits");
	probe_record_start(&record, PROBE_STEP);
	assert_false(probe_record_accept(&record, why, sizeof(why)));
}

static void the_line_gives_alpha_beta_and_s_star(void **state)
{
	(void)state;
	double bytes[16], us[16];
	struct probe_fit fit;
	for (int i = 0; i < 16; i++) {
		bytes[i] = (double)(8u << (2 * i));
		us[i] = 2 + bytes[i] / 50000;       /* 2 us, 50 GB/s: S* of 100 KB */
	}
	assert_true(probe_fit(14, bytes, us, &fit));
	close_to(2, fit.alpha_us);
	close_to(50, fit.beta_gbs);
	close_to(100000, fit.s_star);
	assert_false(probe_fit(1, bytes, us, &fit));
	/* Times that don't grow have no bandwidth. */
	double flat[] = { 3, 3, 3 };
	assert_false(probe_fit(3, bytes, flat, &fit));
	/* A steep start can't make a negative latency. */
	double steep[] = { 0.001, 0.1, 1 };
	assert_true(probe_fit(3, bytes, steep, &fit));
	assert_true(fit.alpha_us >= 0);
}

static void formulas_by_hand(void **state)
{
	(void)state;
	const char *text;
	/* 8 ranks, 1 MB, 2 us, 50 GB/s: the whole takes 20 us, an eighth 2.5. */
	close_to(14 * 4.5, probe_formula_us(PROBE_RING, TP_ALL_REDUCE, 8, 1e6, 2, 50, &text));
	close_to(7 * 4.5, probe_formula_us(PROBE_RING, TP_ALL_GATHER, 8, 1e6, 2, 50, &text));
	close_to(7 * 4.5, probe_formula_us(PROBE_RING, TP_REDUCE_SCATTER, 8, 1e6, 2, 50, &text));
	close_to(14 + 20, probe_formula_us(PROBE_RING, TP_BROADCAST, 8, 1e6, 2, 50, &text));
	close_to(12 + 40, probe_formula_us(PROBE_TREE, TP_ALL_REDUCE, 8, 1e6, 2, 50, &text));
	close_to(6 + 20, probe_formula_us(PROBE_TREE, TP_REDUCE, 8, 1e6, 2, 50, &text));
	close_to(8 + 20, probe_formula_us(PROBE_TREE, TP_BROADCAST, 9, 1e6, 2, 50, &text));
	close_to(7 * 4.5, probe_formula_us(PROBE_PAIRS, TP_ALL_TO_ALL, 8, 1e6, 2, 50, &text));
	assert_true(probe_formula_us(PROBE_TREE, TP_ALL_TO_ALL, 8, 1e6, 2, 50, &text) < 0);
}

static void bounds_of_the_three_paths_are_the_least_stage(void **state)
{
	(void)state;
	const char *limit;
	/* H100, PCIe 5.0, 400 Gb/s, and A100, PCIe 4.0, with the same NIC. */
	struct probe_stages h100 = { .nic = 50, .gpu_host = 64, .nic_host = 64, .gpu_nic = 64, .memory = 300, .core_copy = 12.5, .core_tcp = 2.5 }, a100 = h100;
	close_to(50, probe_path_bound(PROBE_DIRECT, &h100, &limit));
	assert_string_equal(limit, "the NIC");
	close_to(50, probe_path_bound(PROBE_STAGED, &h100, &limit));
	close_to(2.5, probe_path_bound(PROBE_TCP, &h100, &limit));
	assert_string_equal(limit, "a core's TCP");
	a100.gpu_host = a100.nic_host = a100.gpu_nic = 32;
	close_to(32, probe_path_bound(PROBE_DIRECT, &a100, &limit));
	assert_string_equal(limit, "PCIe from GPU to NIC");
	/* Two accesses a byte of slow memory. */
	h100.memory = 60;
	close_to(30, probe_path_bound(PROBE_STAGED, &h100, &limit));
	assert_string_equal(limit, "host memory");
	close_to(0, probe_path_bound(PROBE_DIRECT, &(struct probe_stages){ .memory = 300 }, &limit));
}

static void a_registration_pays_after_so_many_copies(void **state)
{
	(void)state;
	close_to(11, probe_pays_after(100, 5, 10));
	close_to(1, probe_pays_after(1, 1, 10));
	close_to(0, probe_pays_after(100, 5, 0));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_block_is_cut_into_pieces_that_cover_it), cmocka_unit_test(shares_begin_at_128_bytes), cmocka_unit_test(small_blocks_leave_queue_pairs_idle),
		cmocka_unit_test(more_than_a_message_or_4_gb_takes_several_requests), cmocka_unit_test(a_stream_takes_turns),
		cmocka_unit_test(a_hello_is_taken_and_its_text_made_harmless), cmocka_unit_test(what_no_peer_says_is_refused),
		cmocka_unit_test(the_line_gives_alpha_beta_and_s_star), cmocka_unit_test(formulas_by_hand), cmocka_unit_test(bounds_of_the_three_paths_are_the_least_stage),
		cmocka_unit_test(a_registration_pays_after_so_many_copies),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

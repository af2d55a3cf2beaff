/* The reduction against the plain reference, on every usable instruction set, bit for bit. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "exec/helper_reduce.h"

enum { ROOM = 4096, SOURCES = 70 };

static const ncclRedOp_t all_ops[] = { ncclSum, ncclProd, ncclMax, ncclMin };

struct bench { unsigned char src[SOURCES][ROOM + 64], keep[ROOM + 64], dst[ROOM + 64], want[ROOM + 64]; };
static struct bench *b;

static int set_up(void **state)
{
	(void)state;
	b = malloc(sizeof(*b));
	return b == NULL;
}

static int tear_down(void **state)
{
	(void)state;
	free(b);
	return 0;
}

static void expect_same(const struct tp_reduce *r, enum tp_isa isa, int nsrc, size_t bytes, const void *got, const void *want)
{
	const size_t size = reduce_type_bytes(r->type);
	for (size_t at = 0; at < bytes; at += size)
		if (memcmp((const char *)got + at, (const char *)want + at, size) != 0) {
			uint64_t g = 0, w = 0;
			memcpy(&g, (const char *)got + at, size);
			memcpy(&w, (const char *)want + at, size);
			fail_msg("type %d op %d isa %d, %d sources, %zu bytes: element %zu is %#llx, should be %#llx", (int)r->type, (int)r->op,
				(int)isa, nsrc, bytes, at / size, (unsigned long long)g, (unsigned long long)w);
		}
}

/* One draw on all instruction sets; alias >= 0: dst is that source. Bytes around dst must stay as they were. */
static void check(const struct tp_reduce *r, bool final, int nsrc, size_t count, int alias, uint64_t raw_mask, bool wild, uint64_t *seed)
{
	const size_t bytes = count * reduce_type_bytes(r->type);
	const void *src[SOURCES];
	assert_true(bytes <= ROOM);
	for (int s = 0; s < nsrc; s++) {
		unsigned char *at = b->src[s] + reduce_draw(seed) % 64;
		reduce_fill(r->type, at, bytes, wild, seed);
		src[s] = at;
	}
	reduce_reference(r, final, b->want, src, nsrc, raw_mask, bytes);
	for (int isa = TP_ISA_SCALAR; isa <= TP_ISA_AVX512; isa++) {
		if ((int)tp_reduce_usable_isa((enum tp_isa)isa) != isa)
			continue;
		unsigned char *dst = b->dst + reduce_draw(seed) % 32 + 1;
		if (alias >= 0) {
			dst = (unsigned char *)(uintptr_t)src[alias];
			memcpy(b->keep, dst, bytes);
		} else {
			memset(b->dst, 0xa5, sizeof(b->dst));
		}
		tp_reduce_run_isa((enum tp_isa)isa, r, final, dst, src, nsrc, raw_mask, bytes);
		expect_same(r, (enum tp_isa)isa, nsrc, bytes, dst, b->want);
		if (alias >= 0) {
			memcpy(dst, b->keep, bytes);
		} else {
			assert_int_equal(dst[-1], 0xa5);
			assert_int_equal(dst[bytes], 0xa5);
		}
	}
}

static struct tp_reduce plain(ncclDataType_t type, ncclRedOp_t op)
{
	return (struct tp_reduce){ .type = type, .op = op, .pre_scale = 1, .post_scale = 1, .post_divisor = 1, .pre_integer = 1 };
}

static void every_count_up_to_a_few_vectors_is_right(void **state)
{
	(void)state;
	uint64_t seed = 1;
	for (int type = 0; type < ncclNumTypes; type++)
		for (size_t o = 0; o < TP_ARRAY_LEN(all_ops); o++) {
			struct tp_reduce r = plain((ncclDataType_t)type, all_ops[o]);
			for (size_t count = 0; count <= 150; count++)
				check(&r, true, 2, count, -1, 0, true, &seed);
		}
}

static void every_number_of_sources_is_right(void **state)
{
	(void)state;
	uint64_t seed = 2;
	for (int type = 0; type < ncclNumTypes; type++)
		for (size_t o = 0; o < TP_ARRAY_LEN(all_ops); o++) {
			struct tp_reduce r = plain((ncclDataType_t)type, all_ops[o]);
			for (int nsrc = 1; nsrc <= SOURCES; nsrc += nsrc < 9 ? 1 : 20)
				for (int wild = 0; wild < 2; wild++)
					check(&r, true, nsrc, 1 + reduce_draw(&seed) % 200, -1, 0, wild, &seed);
		}
}

static void the_destination_may_be_any_source(void **state)
{
	(void)state;
	uint64_t seed = 3;
	for (int type = 0; type < ncclNumTypes; type++)
		for (size_t o = 0; o < TP_ARRAY_LEN(all_ops); o++) {
			struct tp_reduce r = plain((ncclDataType_t)type, all_ops[o]);
			for (int nsrc = 1; nsrc <= 4; nsrc++)
				for (int alias = 0; alias < nsrc; alias++)
					for (int i = 0; i < 3; i++)
						check(&r, true, nsrc, 1 + reduce_draw(&seed) % 300, alias, 0, true, &seed);
		}
}

static void a_source_may_be_given_twice(void **state)
{
	(void)state;
	uint64_t seed = 4;
	float *a = (float *)(void *)b->src[0];
	reduce_fill(ncclFloat32, a, 400, false, &seed);
	const void *src[2] = { a, a };
	struct tp_reduce r = plain(ncclFloat32, ncclSum);
	reduce_reference(&r, true, b->want, src, 2, 0, 400);
	tp_reduce_run(&r, true, a, src, 2, 0, 400);
	assert_memory_equal(a, b->want, 400);
}

static void averages_and_scaled_sums_are_right(void **state)
{
	(void)state;
	static const int ranks[] = { 1, 2, 3, 7, 64, 1000 };
	uint64_t seed = 5;
	for (int type = 0; type < ncclNumTypes; type++)
		for (size_t n = 0; n < TP_ARRAY_LEN(ranks); n++)
			for (int nsrc = 1; nsrc <= 5; nsrc++)
				for (int final = 0; final < 2; final++) {
					struct tp_reduce r = plain((ncclDataType_t)type, ncclAvg);
					tp_reduce_fill_avg(&r, ranks[n]);
					for (int wild = 0; wild < 2; wild++)
						check(&r, final, nsrc, 1 + reduce_draw(&seed) % 200, wild ? (int)(reduce_draw(&seed) % (unsigned)nsrc) : -1,
							reduce_draw(&seed), wild, &seed);
					r.post = false;
					r.pre = true;
					r.pre_scale = -1.25;
					r.pre_integer = -3;
					check(&r, final, nsrc, 1 + reduce_draw(&seed) % 200, -1, reduce_draw(&seed), true, &seed);
				}
}

static void an_average_over_several_blocks_divides_each_element_once(void **state)
{
	(void)state;
	enum { COUNT = 8192 * 3 + 5 };
	int8_t *x = malloc(COUNT), *y = malloc(COUNT);
	assert_non_null(x);
	assert_non_null(y);
	for (int i = 0; i < COUNT; i++) {
		x[i] = (int8_t)(i % 251);
		y[i] = (int8_t)(i % 127);
	}
	for (int isa = TP_ISA_SCALAR; isa <= TP_ISA_AVX512; isa++) {
		if ((int)tp_reduce_usable_isa((enum tp_isa)isa) != isa)
			continue;
		int8_t *out = malloc(COUNT);
		assert_non_null(out);
		struct tp_reduce r = plain(ncclInt8, ncclAvg);
		tp_reduce_fill_avg(&r, 2);
		tp_reduce_run_isa((enum tp_isa)isa, &r, true, out, (const void *[]){ x, y }, 2, 0, COUNT);
		for (int i = 0; i < COUNT; i++)
			if (out[i] != (int8_t)(x[i] + y[i]) / 2)
				fail_msg("isa %d element %d: %d and %d averaged to %d", isa, i, x[i], y[i], out[i]);
		free(out);
	}
	free(x);
	free(y);
}

static void sources_past_the_mask_are_never_scaled(void **state)
{
	(void)state;
	uint64_t seed = 6;
	struct tp_reduce r = plain(ncclInt32, ncclSum);
	r.pre = true;
	r.pre_integer = 5;
	check(&r, true, SOURCES, 100, -1, ~(uint64_t)0, true, &seed);
}

static void half_averages_of_large_values_do_not_overflow(void **state)
{
	(void)state;
	const uint16_t big = 0x7bff;
	uint16_t out = 0;
	struct tp_reduce r = plain(ncclFloat16, ncclAvg);
	tp_reduce_fill_avg(&r, 4);
	/* as a ring adds them: one step a rank, each rounded to half in between */
	tp_reduce_run(&r, false, &out, (const void *[]){ &big }, 1, 1, 2);
	for (int rank = 1; rank < 4; rank++)
		tp_reduce_run(&r, rank == 3, &out, (const void *[]){ &out, &big }, 2, 2, 2);
	assert_int_equal(out, big);
}

static void the_first_zero_is_kept_and_nan_wins(void **state)
{
	(void)state;
	const float plus = 0.0f, minus = -0.0f, one = 1;
	const uint32_t odd_nan = 0xffc12345;
	uint32_t out;
	for (int isa = TP_ISA_SCALAR; isa <= TP_ISA_AVX512; isa++)
		for (int op = ncclMax; op <= ncclMin; op++) {
			struct tp_reduce r = plain(ncclFloat32, (ncclRedOp_t)op);
			tp_reduce_run_isa(tp_reduce_usable_isa((enum tp_isa)isa), &r, true, &out, (const void *[]){ &plus, &minus }, 2, 0, 4);
			assert_int_equal(out, 0);
			tp_reduce_run_isa(tp_reduce_usable_isa((enum tp_isa)isa), &r, true, &out, (const void *[]){ &minus, &plus }, 2, 0, 4);
			assert_int_equal(out, 0x80000000);
			tp_reduce_run_isa(tp_reduce_usable_isa((enum tp_isa)isa), &r, true, &out, (const void *[]){ &odd_nan, &one }, 2, 0, 4);
			assert_int_equal(out, 0x7fffffff);
			tp_reduce_run_isa(tp_reduce_usable_isa((enum tp_isa)isa), &r, true, &out, (const void *[]){ &one, &odd_nan, &one }, 3, 0, 4);
			assert_int_equal(out, 0x7fffffff);
		}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_count_up_to_a_few_vectors_is_right),
		cmocka_unit_test(every_number_of_sources_is_right),
		cmocka_unit_test(the_destination_may_be_any_source),
		cmocka_unit_test(a_source_may_be_given_twice),
		cmocka_unit_test(averages_and_scaled_sums_are_right),
		cmocka_unit_test(an_average_over_several_blocks_divides_each_element_once),
		cmocka_unit_test(sources_past_the_mask_are_never_scaled),
		cmocka_unit_test(half_averages_of_large_values_do_not_overflow),
		cmocka_unit_test(the_first_zero_is_kept_and_nan_wins),
	};
	return cmocka_run_group_tests(tests, set_up, tear_down);
}

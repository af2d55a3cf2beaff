/* Small floats, exhaustively where that is possible: one correct rounding of the exact result. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "exec/helper_reduce.h"

static double exact(ncclRedOp_t op, double x, double y)
{
	switch (op) {
	case ncclSum:
		return x + y;
	case ncclProd:
		return x * y;
	case ncclMax:
		return isnan(x) || isnan(y) ? NAN : y > x ? y : x;
	default:
		return isnan(x) || isnan(y) ? NAN : y < x ? y : x;
	}
}

static void compare(ncclDataType_t type, const void *x, const void *y, size_t count)
{
	const size_t size = reduce_type_bytes(type);
	char *want = malloc(count * size), *got = malloc(count * size);
	assert_non_null(want);
	assert_non_null(got);
	for (int op = ncclSum; op <= ncclMin; op++) {
		struct tp_reduce r = { .type = type, .op = (ncclRedOp_t)op };
		for (size_t i = 0; i < count * size; i += size)
			reduce_encode(type, exact(r.op, reduce_decode(type, (const char *)x + i), reduce_decode(type, (const char *)y + i)), want + i);
		for (int isa = TP_ISA_SCALAR; isa <= TP_ISA_AVX512; isa++) {
			if ((int)tp_reduce_usable_isa((enum tp_isa)isa) != isa)
				continue;
			tp_reduce_run_isa((enum tp_isa)isa, &r, true, got, (const void *[]){ x, y }, 2, 0, count * size);
			for (size_t i = 0; i < count * size; i += size)
				if (memcmp(got + i, want + i, size) != 0)
					fail_msg("type %d op %d isa %d: %a and %a give %a, should be %a", (int)type, op, isa,
						reduce_decode(type, (const char *)x + i), reduce_decode(type, (const char *)y + i),
						reduce_decode(type, got + i), reduce_decode(type, want + i));
		}
	}
	free(want);
	free(got);
}

static void all_pairs_of_fp8(ncclDataType_t type)
{
	uint8_t *x = malloc(65536), *y = malloc(65536);
	assert_non_null(x);
	assert_non_null(y);
	for (int i = 0; i < 65536; i++) {
		x[i] = (uint8_t)i;
		y[i] = (uint8_t)(i >> 8);
	}
	compare(type, x, y, 65536);
	free(x);
	free(y);
}

static void every_pair_of_e4m3_is_rounded_once(void **state)
{
	(void)state;
	all_pairs_of_fp8(ncclFloat8e4m3);
}

static void every_pair_of_e5m2_is_rounded_once(void **state)
{
	(void)state;
	all_pairs_of_fp8(ncclFloat8e5m2);
}

/* Every value of the type beside partners that make it round, cancel, overflow and vanish, and random ones. */
static void all_values_of_16_bits(ncclDataType_t type)
{
	static const double partners[] = { 0.0, -0.0, 1, -1, 0x1p-11, -0x1p-12, 65504, -65504, 32, 0x1p-24, 0x1p-14, 0.333, 3e38,
		0x1p-133, INFINITY, NAN };
	uint16_t *x = malloc(65536 * 2), *y = malloc(65536 * 2);
	assert_non_null(x);
	assert_non_null(y);
	uint64_t seed = (uint64_t)type;
	for (int i = 0; i < 65536; i++)
		x[i] = (uint16_t)i;
	for (size_t p = 0; p < TP_ARRAY_LEN(partners) + 4; p++) {
		for (int i = 0; i < 65536; i++) {
			uint64_t draw = reduce_draw(&seed);
			if (p < TP_ARRAY_LEN(partners))
				reduce_encode(type, partners[p], &y[i]);
			else if (p % 2)
				y[i] = (uint16_t)draw;
			else
				y[i] = (uint16_t)(x[i] ^ (draw & 0x8fff));      /* of about the same size */
		}
		compare(type, x, y, 65536);
	}
	free(x);
	free(y);
}

static void every_half_is_rounded_once(void **state)
{
	(void)state;
	all_values_of_16_bits(ncclFloat16);
}

static void every_bfloat16_is_rounded_once(void **state)
{
	(void)state;
	all_values_of_16_bits(ncclBfloat16);
}

/* The rounding itself: floats on, just above and just below the middle between neighbours come out of a scaled copy. */
static void rounding_from_float_is_to_nearest_even(void **state)
{
	(void)state;
	static const ncclDataType_t types[] = { ncclFloat16, ncclFloat8e4m3, ncclFloat8e5m2, ncclBfloat16 };
	for (size_t t = 0; t < TP_ARRAY_LEN(types); t++)
		for (int scale = 1; scale <= 255; scale += 2) {
			uint16_t words[512], got[512];
			const size_t size = reduce_type_bytes(types[t]);
			uint64_t seed = (uint64_t)scale;
			reduce_fill(types[t], words, 512 * size, true, &seed);
			struct tp_reduce r = { .type = types[t], .op = ncclSum, .pre = true, .pre_scale = scale / 64.0 };
			for (int isa = TP_ISA_SCALAR; isa <= TP_ISA_AVX512; isa++) {
				if ((int)tp_reduce_usable_isa((enum tp_isa)isa) != isa)
					continue;
				tp_reduce_run_isa((enum tp_isa)isa, &r, true, got, (const void *[]){ words }, 1, 1, 512 * size);
				for (size_t i = 0; i < 512 * size; i += size) {
					char want[2] = { 0 };
					reduce_encode(types[t], reduce_decode(types[t], (char *)words + i) * r.pre_scale, want);
					assert_memory_equal((char *)got + i, want, size);
				}
			}
		}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_pair_of_e4m3_is_rounded_once),
		cmocka_unit_test(every_pair_of_e5m2_is_rounded_once),
		cmocka_unit_test(every_half_is_rounded_once),
		cmocka_unit_test(every_bfloat16_is_rounded_once),
		cmocka_unit_test(rounding_from_float_is_to_nearest_even),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Geometry: each byte of a block lies in exactly one chunk, chunks keep to lines and to their limit, channels share evenly. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "plan/helper_plan.h"

struct call { size_t bytes, limit, line; int nchannels; uint32_t pieces, blocks; };

static void expect_covered(const struct call *c)
{
	struct tp_plan plan = { .spec.nchannels = c->nchannels, .pieces = c->pieces };
	unsigned char *seen = calloc(c->bytes * c->blocks + 1, 1);
	size_t least = SIZE_MAX, most = 0;
	assert_non_null(seen);
	for (int channel = 0; channel < c->nchannels; channel++) {
		struct tp_geometry g;
		tp_geometry_fit(&plan, c->bytes, c->limit, c->line, channel, &g);
		assert_true(g.nrounds >= 1);
		assert_int_equal(g.block_bytes, c->bytes);
		assert_int_equal(g.chunk_bytes % c->line, 0);
		assert_true(g.chunk_bytes <= TP_MAX(c->limit / c->line * c->line, c->line) && g.last_chunk_bytes <= g.chunk_bytes);
		assert_true(!g.part_bytes || g.part_offset % c->line == 0);
		assert_int_equal(g.last_chunk_bytes % c->line, 0);
		least = TP_MIN(least, g.part_bytes);
		most = TP_MAX(most, g.part_bytes);
		for (uint32_t k = 0; k < g.nrounds; k++) {
			size_t in_round = 0;
			for (uint32_t chunk = 0; chunk < c->pieces * c->blocks; chunk++) {
				size_t offset, size = tp_geometry_chunk(&g, c->pieces, k, (int32_t)chunk, &offset);
				assert_true(size <= g.chunk_bytes);
				assert_true(!size || offset + size <= c->bytes * c->blocks);
				assert_true(!size || (offset - chunk / c->pieces * c->bytes) % c->line == 0);
				for (size_t i = 0; i < size; i++) assert_int_equal(seen[offset + i]++, 0);
				in_round += size;
			}
			assert_true(in_round || !g.part_bytes);         /* no round in vain */
		}
	}
	for (size_t i = 0; i < c->bytes * c->blocks; i++) assert_int_equal(seen[i], 1);
	assert_true(most - least < 2 * c->line);
	free(seen);
}

static void each_byte_lies_in_exactly_one_chunk(void **state)
{
	(void)state;
	struct plans_random random = { 7 };
	for (int i = 0; i < 4000; i++) {
		struct call c = {
			.bytes = plans_random(&random, i % 3 ? 3000 : 40), .limit = 1 + plans_random(&random, i % 2 ? 700 : 4000),
			.line = (size_t[]){ 1, 8, 16, 128 }[plans_random(&random, 4)], .nchannels = 1 + (int)plans_random(&random, 5),
			.pieces = 1 + plans_random(&random, i % 5 ? 9 : 40), .blocks = 1 + plans_random(&random, 3),
		};
		expect_covered(&c);
	}
}

static void no_bytes_make_one_round_of_empty_chunks(void **state)
{
	(void)state;
	struct tp_plan plan = { .spec.nchannels = 2, .pieces = 3 };
	struct tp_geometry g;
	size_t offset;
	tp_geometry_fit(&plan, 0, 4096, 16, 1, &g);
	assert_int_equal(g.nrounds, 1);
	for (int chunk = 0; chunk < 6; chunk++) assert_int_equal(tp_geometry_chunk(&g, 3, 0, chunk, &offset), 0);
}

static void rounds_are_evened_out(void **state)
{
	(void)state;
	struct tp_plan plan = { .spec.nchannels = 1, .pieces = 1 };
	struct tp_geometry g;
	tp_geometry_fit(&plan, 1000 * 16, 900 * 16, 16, 0, &g);      /* not 900 and 100 lines */
	assert_int_equal(g.nrounds, 2);
	assert_int_equal(g.chunk_bytes, 500 * 16);
	assert_int_equal(g.last_chunk_bytes, 500 * 16);
}

static void a_large_message_fits_without_overflow(void **state)
{
	(void)state;
	struct tp_plan plan = { .spec.nchannels = 3, .pieces = 7 };
	struct tp_geometry g;
	size_t offset, total = 0, bytes = (size_t)5 << 33;
	for (int channel = 0; channel < 3; channel++) {
		tp_geometry_fit(&plan, bytes, 1 << 20, 128, channel, &g);
		total += g.part_bytes;
		assert_true(tp_geometry_chunk(&g, 7, g.nrounds - 1, 0, &offset) > 0);
		assert_true(offset < bytes);
	}
	assert_int_equal(total, bytes);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(each_byte_lies_in_exactly_one_chunk), cmocka_unit_test(no_bytes_make_one_round_of_empty_chunks),
		cmocka_unit_test(rounds_are_evened_out), cmocka_unit_test(a_large_message_fits_without_overflow),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

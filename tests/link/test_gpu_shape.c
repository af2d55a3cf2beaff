/* Where rings, heads and regions lie in a GPU rank's arena. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <cmocka.h>

#include "link/internal.h"

static void eight_ranks_of_32_channels_stay_under_48_mb(void **state)
{
	(void)state;
	struct tp_gpu_shape s;
	for (int n = 1; n <= 8; n++)
		for (int channels = 1; channels <= 32; channels *= 2) {
			tp_gpu_shape_fit(n, n, channels, 40 << 20, 4 << 20, &s);
			assert_true(s.bytes < 48u << 20);
			assert_true(s.nslots >= 2 && s.wide_nslots >= 2 && !(s.nslots & (s.nslots - 1)) && !(s.wide_nslots & (s.wide_nslots - 1)));
			assert_true(s.capacity >= 8192 && s.wide_capacity >= s.capacity);
		}
	tp_gpu_shape_fit(8, 8, 32, 40 << 20, 4 << 20, &s);
	assert_true(s.wide_capacity >= 96 << 10 && s.wide_nslots == 4);
}

static void small_budgets_and_many_ranks_still_have_two_slots(void **state)
{
	(void)state;
	struct tp_gpu_shape s;
	tp_gpu_shape_fit(64, 64, 64, 1 << 20, 0, &s);
	assert_true(s.nslots == 2 && s.capacity >= 1024);
}

static void all_hosts_have_the_same_slots(void **state)
{
	(void)state;
	struct tp_gpu_shape small, large;
	tp_gpu_shape_fit(1, 8, 16, 40 << 20, 0, &small);
	tp_gpu_shape_fit(8, 8, 16, 40 << 20, 0, &large);
	assert_int_equal(small.capacity, large.capacity);
	assert_int_equal(small.wide_capacity, large.wide_capacity);
	assert_true(small.bytes < large.bytes);
}

struct span { size_t begin, end; };
static int compare_spans(const void *a, const void *b)
{
	const struct span *x = a, *y = b;
	return x->begin < y->begin ? -1 : x->begin > y->begin;
}

/* next: as in the shape. */
static void nothing_overlaps_in_an_arena_of(int n, int channels, const uint8_t *next)
{
	struct tp_gpu_shape s;
	size_t count = 0, most = (size_t)2 * n * channels * TP_LINK_CLASSES + 2;
	struct span *spans = malloc(most * sizeof(*spans));
	tp_gpu_shape_fit(n, n, channels, 8 << 20, 12345, &s);
	s.next = next;
	int own = n / 2;
	for (int peer = 0; peer < n; peer++)
		for (int c = 0; c < channels && peer != own; c++)
			for (int k = 0; k < TP_LINK_CLASSES; k++) {
				struct tp_gpu_ring ring = tp_gpu_shape_ring(&s, c, k, peer, own);
				size_t head = tp_gpu_shape_head(&s, c, k, peer);
				size_t capacity = k == 0 && own == (next ? next[c * n + peer] : (peer + 1) % n) ? s.wide_capacity : s.capacity;
				assert_int_equal(ring.place % 128, 0);
				assert_int_equal(ring.stride % 128, 0);
				assert_int_equal(head % 128, 0);
				assert_true(ring.stride >= sizeof(struct tp_slot) + capacity && ring.nslots >= 2);
				spans[count++] = (struct span){ ring.place, ring.place + ring.nslots * ring.stride };
				spans[count++] = (struct span){ head, head + 128 };
			}
	spans[count++] = (struct span){ 0, (size_t)128 * TP_GPU_LOCAL_MAX };
	spans[count++] = (struct span){ s.region, s.region + 12345 };
	qsort(spans, count, sizeof(*spans), compare_spans);
	for (size_t i = 1; i < count; i++) assert_true(spans[i - 1].end <= spans[i].begin);
	assert_true(spans[count - 1].end <= s.bytes);
	assert_int_equal(s.region % 128, 0);
	free(spans);
}

static void rings_heads_and_region_do_not_overlap(void **state)
{
	(void)state;
	nothing_overlaps_in_an_arena_of(2, 1, NULL);
	nothing_overlaps_in_an_arena_of(3, 5, NULL);
	nothing_overlaps_in_an_arena_of(8, 4, NULL);
	static const uint8_t next[] = { 2, 3, 1, 0, 1, 2, 3, 0, 3, 0, 1, 2 };
	nothing_overlaps_in_an_arena_of(4, 3, next);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(eight_ranks_of_32_channels_stay_under_48_mb),
		cmocka_unit_test(small_budgets_and_many_ranks_still_have_two_slots),
		cmocka_unit_test(all_hosts_have_the_same_slots),
		cmocka_unit_test(rings_heads_and_region_do_not_overlap),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

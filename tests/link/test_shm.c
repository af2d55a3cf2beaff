/* The place of shared rings, and the protocol of their slots. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

#include "link/internal.h"

static void segments_stay_within_half_a_terabyte_up_to_4096_ranks(void **state)
{
	(void)state;
	for (int n = 1; n <= 4096; n = n < 16 ? n + 1 : n * 2) {
		for (int channels = 1; channels <= (n > 1024 ? 1 : 2); channels++) {
			struct tp_shm_shape shape;
			tp_shm_shape_fit(n, n, channels, &shape);
			assert_true(shape.segment_bytes <= 512ull << 30);
			assert_true(shape.nslots >= 2 && !(shape.nslots & (shape.nslots - 1)));
			assert_true(shape.capacity >= 4000);
		}
	}
}

static void few_ranks_get_wide_slots(void **state)
{
	(void)state;
	struct tp_shm_shape shape;
	tp_shm_shape_fit(8, 8, 2, &shape);
	assert_true(shape.capacity == 256 << 10 && shape.nslots == 8);
}

static void all_hosts_agree_on_the_capacity_whatever_their_size(void **state)
{
	(void)state;
	struct tp_shm_shape small, big;
	tp_shm_shape_fit(2, 1024, 1, &small);
	tp_shm_shape_fit(1024, 1024, 1, &big);
	assert_int_equal(small.capacity, big.capacity);
	assert_true(small.segment_bytes < big.segment_bytes);
}

static void rings_do_not_overlap(void **state)
{
	(void)state;
	struct tp_shm_shape shape;
	tp_shm_shape_fit(5, 5, 3, &shape);
	size_t rings = shape.segment_bytes / shape.link_bytes;
	unsigned char *taken = calloc(rings, 1);
	for (int c = 0; c < 3; c++)
		for (int k = 0; k < TP_LINK_CLASSES; k++)
			for (int a = 0; a < 5; a++)
				for (int b = 0; b < 5; b++) {
					size_t place = tp_shm_shape_place(&shape, c, k, a, b);
					assert_int_equal(place % shape.link_bytes, 0);
					assert_true(place / shape.link_bytes < rings && !taken[place / shape.link_bytes]);
					taken[place / shape.link_bytes] = 1;
				}
	free(taken);
	assert_true(128 + shape.nslots * shape.stride <= shape.link_bytes);
	assert_true(shape.stride >= sizeof(struct tp_slot) + shape.capacity);
}

static void make_ends(struct tp_link *sender, struct tp_link *receiver, void **memory, size_t *bytes)
{
	struct tp_shm_shape shape;
	tp_shm_shape_fit(2, 2, 1, &shape);
	*bytes = shape.segment_bytes;
	*memory = mmap(NULL, *bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	assert_true(*memory != MAP_FAILED);
	*sender = *receiver = (struct tp_link){ 0 };
	tp_shm_link_fill(&shape, *memory, tp_shm_shape_place(&shape, 0, 1, 0, 1), sender);
	tp_shm_link_fill(&shape, *memory, tp_shm_shape_place(&shape, 0, 1, 0, 1), receiver);
}

static void a_full_ring_gives_no_slot_until_one_is_released(void **state)
{
	(void)state;
	struct tp_link a, b;
	void *memory;
	size_t bytes;
	make_ends(&a, &b, &memory, &bytes);
	assert_null(tp_link_peek(&b));
	for (uint32_t i = 0; i <= a.mask; i++) {
		struct tp_slot *slot = tp_link_claim(&a);
		assert_non_null(slot);
		slot->bytes = i;
		tp_link_publish(&a, slot);
	}
	assert_null(tp_link_claim(&a));
	assert_false(tp_link_drained(&a));
	for (uint32_t i = 0; i <= b.mask; i++) {
		assert_int_equal(tp_link_peek(&b)->bytes, i);
		tp_link_release(&b);
		assert_non_null(tp_link_claim(&a));
	}
	assert_null(tp_link_peek(&b));
	assert_true(tp_link_drained(&a));
	munmap(memory, bytes);
}

static void numbers_wrap_without_a_slip(void **state)
{
	(void)state;
	struct tp_link a, b;
	void *memory;
	size_t bytes;
	make_ends(&a, &b, &memory, &bytes);
	a.next = b.next = a.head_seen = UINT32_MAX - 5;
	atomic_store(a.head, a.next);
	for (uint32_t i = 0; i < 40; i++) {
		for (int k = 0; k < 3; k++) {
			struct tp_slot *slot = tp_link_claim(&a);
			assert_non_null(slot);
			slot->tag = i * 3 + (uint32_t)k;
			tp_link_publish(&a, slot);
		}
		for (int k = 0; k < 3; k++) {
			struct tp_slot *slot = tp_link_peek(&b);
			assert_non_null(slot);
			assert_int_equal(slot->tag, i * 3 + (uint32_t)k);
			tp_link_release(&b);
		}
	}
	munmap(memory, bytes);
}

static void reading_a_process_that_is_gone_names_its_rank(void **state)
{
	(void)state;
	pid_t pid = fork();
	if (!pid) _exit(0);
	waitpid(pid, NULL, 0);
	struct tp_link link = { .peer = 7, .peer_pid = pid };
	char byte;
	assert_int_equal(tp_link_read(&link, &byte, (uintptr_t)&byte, 1), ncclRemoteError);
	assert_non_null(strstr(tp_log_last_error(), "rank 7"));
}

static void reading_memory_that_is_not_there_says_where(void **state)
{
	(void)state;
	struct tp_link link = { .peer = 3, .peer_pid = getpid() };
	char *two = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), dst[8192];
	munmap(two + 4096, 4096);
	ncclResult_t result = tp_link_read(&link, dst, (uintptr_t)two, 8192);
	if (result == ncclSystemError) skip();
	assert_int_equal(result, ncclInvalidArgument);
	assert_non_null(strstr(tp_log_last_error(), "after 4096 bytes"));
	munmap(two, 4096);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(segments_stay_within_half_a_terabyte_up_to_4096_ranks),
		cmocka_unit_test(few_ranks_get_wide_slots),
		cmocka_unit_test(all_hosts_agree_on_the_capacity_whatever_their_size),
		cmocka_unit_test(rings_do_not_overlap),
		cmocka_unit_test(a_full_ring_gives_no_slot_until_one_is_released),
		cmocka_unit_test(numbers_wrap_without_a_slip),
		cmocka_unit_test(reading_a_process_that_is_gone_names_its_rank),
		cmocka_unit_test(reading_memory_that_is_not_there_says_where),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

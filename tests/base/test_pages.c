#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "base/helper_base.h"
#include "base/pages.h"

#define LARGE ((size_t)2 << 20)

static bool is_zero(const unsigned char *memory, size_t bytes)
{
	for (size_t i = 0; i < bytes; i++)
		if (memory[i]) return false;
	return true;
}

static bool is_mapped(const unsigned char *at)
{
	unsigned char present;
	uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
	return mincore((void *)((uintptr_t)at & ~(page - 1)), 1, &present) == 0;
}

static void pages_are_zeros_and_large_ones_begin_where_large_pages_do(void **s)
{
	(void)s;
	static const size_t sizes[] = { 1, 4096, 70000, LARGE - 1, LARGE, LARGE + 1, 2 * LARGE + 12345 };
	for (size_t i = 0; i < TP_ARRAY_LEN(sizes); i++) {
		unsigned char *memory = tp_pages_map(sizes[i]);
		assert_non_null(memory);
		assert_true(is_zero(memory, sizes[i]));
		if (sizes[i] >= LARGE) assert_int_equal((uintptr_t)memory % LARGE, 0);
		memset(memory, 1, sizes[i]);
		assert_true(is_mapped(memory + sizes[i] - 1));
		tp_pages_unmap(memory, sizes[i]);
		assert_false(is_mapped(memory));
		assert_false(is_mapped(memory + sizes[i] - 1));
	}
}

static void what_pages_hold_stays_when_they_become_large(void **s)
{
	(void)s;
	size_t bytes = 2 * LARGE + 12345;
	unsigned char *memory = tp_pages_map(bytes);
	assert_non_null(memory);
	/* Some pages of the first large one; none of the second. */
	for (size_t i = 0; i < LARGE / 4; i++) memory[i] = (unsigned char)(i * 7 + 1);
	memory[bytes - 1] = 9;
	tp_pages_make_large(memory, bytes);
	for (size_t i = 0; i < LARGE / 4; i++) assert_int_equal(memory[i], (unsigned char)(i * 7 + 1));
	assert_true(is_zero(memory + LARGE / 4, bytes - LARGE / 4 - 1));
	assert_int_equal(memory[bytes - 1], 9);
	tp_pages_unmap(memory, bytes);
}

static void memory_without_a_whole_large_page_is_left_alone(void **s)
{
	(void)s;
	unsigned char *memory = tp_pages_map(2 * LARGE);
	assert_non_null(memory);
	memory[100] = 5;
	tp_pages_make_large(memory + 4096, LARGE);
	tp_pages_want_large(memory + 4096, LARGE);
	tp_pages_want_large(memory, 0);
	assert_int_equal(memory[100], 5);
	tp_pages_unmap(memory, 2 * LARGE);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(pages_are_zeros_and_large_ones_begin_where_large_pages_do),
		cmocka_unit_test(what_pages_hold_stays_when_they_become_large),
		cmocka_unit_test(memory_without_a_whole_large_page_is_left_alone),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Copies past the caches: every size around a line, every alignment, nothing beyond the destination. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "exec/host/internal.h"

enum { ROOM = 8192, GUARD_BYTE = 0xa5 };

static void check(size_t to_at, size_t from_at, size_t bytes)
{
	static _Alignas(TP_CACHE_LINE) unsigned char from[ROOM], to[ROOM];
	for (size_t i = 0; i < ROOM; i++) from[i] = (unsigned char)(i * 7 + 1);
	memset(to, GUARD_BYTE, ROOM);
	tp_exec_stream_copy(to + to_at, from + from_at, bytes);
	assert_memory_equal(to + to_at, from + from_at, bytes);
	for (size_t i = 0; i < ROOM; i++)
		if (i < to_at || i >= to_at + bytes) assert_int_equal(to[i], GUARD_BYTE);
}

static void any_size_at_any_place_is_copied_and_nothing_else(void **state)
{
	(void)state;
	static const size_t sizes[] = { 0, 1, 63, 64, 65, 127, 128, 129, 191, 1000, 4096, 5001 };
	for (size_t s = 0; s < TP_ARRAY_LEN(sizes); s++)
		for (size_t to_at = 0; to_at < 70; to_at += 3)
			for (size_t from_at = 0; from_at < 20; from_at += 19) check(to_at, from_at, sizes[s]);
}

int main(void)
{
	const struct CMUnitTest tests[] = { cmocka_unit_test(any_size_at_any_place_is_copied_and_nothing_else) };
	return cmocka_run_group_tests(tests, NULL, NULL);
}

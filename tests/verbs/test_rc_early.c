/* Packets that came before their turn. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>
#include "verbs/rc.h"

static struct tp_packet packet(uint32_t psn, const char *text)
{
	return (struct tp_packet){ .psn = psn, .payload = (const uint8_t *)text, .bytes = (uint32_t)strlen(text), .rkey = psn };
}

static void what_is_kept_is_found_by_its_number(void **state)
{
	(void)state;
	struct tp_early *early = NULL;
	char text[] = "hello";
	struct tp_packet p = packet(12, text);
	assert_null(tp_early_at(early, 12));
	assert_false(tp_early_any(early));
	tp_early_keep(&early, &p, 10);
	memset(text, 0, sizeof(text));      /* it is a copy */
	const struct tp_packet *kept = tp_early_at(early, 12);
	assert_non_null(kept);
	assert_int_equal(kept->bytes, 5);
	assert_memory_equal(kept->payload, "hello", 5);
	assert_int_equal(kept->rkey, 12);
	assert_null(tp_early_at(early, 11));
	assert_null(tp_early_at(early, 12 + 1024));
	tp_early_free(&early);
	assert_null(early);
}

static void what_is_passed_is_gone(void **state)
{
	(void)state;
	struct tp_early *early = NULL;
	for (uint32_t i = 0; i < 8; i++) {
		struct tp_packet p = packet(tp_psn_add(0xfffffc, i), "x");      /* beyond the largest number */
		tp_early_keep(&early, &p, 0xfffffb);
	}
	tp_early_pass(early, 0xfffffb, 2);
	assert_null(tp_early_at(early, 0xfffffc));
	assert_null(tp_early_at(early, 1));
	assert_non_null(tp_early_at(early, 2));
	assert_true(tp_early_any(early));
	tp_early_pass(early, 2, 4);
	assert_false(tp_early_any(early));
	tp_early_free(&early);
}

static void the_first_of_two_with_one_number_stays(void **state)
{
	(void)state;
	struct tp_early *early = NULL;
	struct tp_packet first = packet(5, "first"), second = packet(5, "other");
	tp_early_keep(&early, &first, 4);
	tp_early_keep(&early, &second, 4);
	assert_memory_equal(tp_early_at(early, 5)->payload, "first", 5);
	tp_early_free(&early);
}

static void what_is_too_far_ahead_is_not_kept(void **state)
{
	(void)state;
	struct tp_early *early = NULL;
	struct tp_packet far = packet(4 + 1024, "far");
	tp_early_keep(&early, &far, 4);
	assert_null(tp_early_at(early, far.psn));
	assert_false(tp_early_any(early));
	tp_early_free(&early);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(what_is_kept_is_found_by_its_number),
		cmocka_unit_test(what_is_passed_is_gone),
		cmocka_unit_test(the_first_of_two_with_one_number_stays),
		cmocka_unit_test(what_is_too_far_ahead_is_not_kept),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

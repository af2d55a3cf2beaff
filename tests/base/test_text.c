/* Text of others, before it reaches a log. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>
#include "base/text.h"

static void becomes(const char *from, const char *to)
{
	char text[64];

	memset(text, 'x', sizeof(text));
	memcpy(text, from, strlen(from) + 1);
	tp_text_clean(text, sizeof(text));
	assert_string_equal(text, to);
}

static void what_is_text_stays(void **state)
{
	(void)state;
	becomes("host-7.example (mlx5_0:1, 400 Gb/s)", "host-7.example (mlx5_0:1, 400 Gb/s)");
	becomes("knoten-\xc3\xa4 \xe2\x80\xa6 \xf0\x9f\x98\x80", "knoten-\xc3\xa4 \xe2\x80\xa6 \xf0\x9f\x98\x80");
}

static void what_controls_a_terminal_does_not(void **state)
{
	(void)state;
	becomes("a\x1b[2Jb\rc\nd\te\x7f", "a?[2Jb?c?d?e?");
	becomes("a\xc2\x9b" "2J", "a??2J");
	becomes("a\x9b" "2J", "a?2J");
}

static void what_is_no_utf_8_does_not(void **state)
{
	(void)state;
	becomes("\xff\xfe", "??");
	becomes("a\xc3", "a?");
	/* Longer than it need be, half of a pair of UTF-16, beyond the last. */
	becomes("\xe0\x82\x9b", "???");
	becomes("\xf0\x80\x82\x9b", "????");
	becomes("\xed\xa0\x80", "???");
	becomes("\xf4\x90\x80\x80", "????");
	becomes("\xe2\x80z", "??z");
	becomes("\xc0\xafz", "??z");
}

static void an_endless_text_ends(void **state)
{
	char text[8];

	(void)state;
	memset(text, 'x', sizeof(text));
	tp_text_clean(text, sizeof(text));
	assert_string_equal(text, "xxxxxxx");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(what_is_text_stays), cmocka_unit_test(what_controls_a_terminal_does_not), cmocka_unit_test(what_is_no_utf_8_does_not),
		cmocka_unit_test(an_endless_text_ends),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

/* What the IB transport's ends say of themselves, from a peer that means harm. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>
#include "net/ib/wire.h"

#define HARM "a\x1b]0;owned\x07\nNCCL WARN all is well"
#define HARMLESS "a?]0;owned??NCCL WARN all is well"

static void names_of_a_peer_hold_nothing_that_controls_a_terminal(void **state)
{
	struct tp_ib_wire_meta meta = { .nqps = 1, .npaths = 1, .paths = { { .port = 1, .mtu = 5, .link_layer = 2 } } };
	struct tp_ib_wire_switch change = { .epoch = 1 };
	struct tp_ib_wire_refusal refusal, out;

	(void)state;
	strcpy(meta.host, HARM);
	strcpy(meta.set, HARM);
	strcpy(meta.paths[0].device, "a\x1b[2J\n");
	assert_null(tp_ib_wire_check_meta(&meta));
	assert_string_equal(meta.host, HARMLESS);
	assert_string_equal(meta.set, HARMLESS);
	assert_string_equal(meta.paths[0].device, "a?[2J?");
	strcpy(change.why, HARM);
	assert_null(tp_ib_wire_check_switch(&change));
	assert_string_equal(change.why, HARMLESS);
	tp_ib_refusal_start(&refusal);
	strcpy(refusal.text, HARM);
	assert_true(tp_ib_refusal_read(&refusal, sizeof(refusal), &out));
	assert_string_equal(out.text, HARMLESS);
}

static void texts_of_a_peer_end(void **state)
{
	struct tp_ib_wire_meta meta = { .nqps = 1, .npaths = 1, .paths = { { .port = 1, .mtu = 5, .link_layer = 2 } } };

	(void)state;
	memset(meta.host, 'x', sizeof(meta.host));
	memset(meta.paths[0].device, 'x', sizeof(meta.paths[0].device));
	assert_null(tp_ib_wire_check_meta(&meta));
	assert_int_equal(strlen(meta.host), sizeof(meta.host) - 1);
	assert_int_equal(strlen(meta.paths[0].device), sizeof(meta.paths[0].device) - 1);
}

static void a_way_to_connect_that_there_is_not_is_refused(void **state)
{
	struct tp_ib_wire_meta meta = { .nqps = 1, .npaths = 1, .connect = 2, .paths = { { .port = 1, .mtu = 5, .link_layer = 2 } } };

	(void)state;
	assert_string_equal(tp_ib_wire_check_meta(&meta), "a way to connect that there isn't");
}

static void a_token_is_read_only_where_it_is_one(void **state)
{
	unsigned char padded[196] = { 0 };
	struct tp_ib_wire_token token, out;
	struct tp_ib_wire_refusal refusal;

	(void)state;
	tp_ib_token_start(&token);
	token.path = 3;
	token.qp = 2;
	memcpy(padded, &token, sizeof(token));
	/* Its way pads it. */
	assert_null(tp_ib_token_read(padded, sizeof(padded), &out));
	assert_memory_equal(&out, &token, sizeof(token));
	assert_non_null(tp_ib_token_read(padded, sizeof(token) - 1, &out));
	assert_non_null(tp_ib_token_read(NULL, 0, &out));
	assert_false(tp_ib_refusal_read(padded, sizeof(padded), &refusal));
	token.qp = TP_IB_MAX_QPS;
	assert_non_null(tp_ib_token_read(&token, sizeof(token), &out));
	token.qp = 0;
	token.version++;
	assert_non_null(strstr(tp_ib_token_read(&token, sizeof(token), &out), "another version"));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(names_of_a_peer_hold_nothing_that_controls_a_terminal), cmocka_unit_test(texts_of_a_peer_end),
		cmocka_unit_test(a_way_to_connect_that_there_is_not_is_refused), cmocka_unit_test(a_token_is_read_only_where_it_is_one),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

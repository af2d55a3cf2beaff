/* Programs that end, or destroy their queue pairs, as soon as they have their last message: whoever sent it has a success, even where the
 * acknowledgement was lost. Two processes, on the wire. */
#include <stdlib.h>
#include <string.h>
#include "verbs/helper_api_two.h"

static int ask(struct end *end)
{
	CHECK(end_open(end, NULL) == 0);
	CHECK(end_meet(end) == 0);
	CHECK(end_do(end, &(struct request){ .opcode = IBV_WR_SEND, .bytes = 8 }) == 0);
	return end_close(end);
}

static int take_the_last_message(struct end *end)
{
	struct ibv_wc wc;
	CHECK(end_open(end, NULL) == 0);
	CHECK(end_recv(end, 1, 0, 64) == 0);
	CHECK(end_meet(end) == 0);
	CHECK(end_wait(end, &wc) == 0);
	CHECK(wc.status == IBV_WC_SUCCESS && wc.byte_len == 8);
	return 0;
}

static int take_and_end(struct end *end) { return take_the_last_message(end); }

/* Nothing that this process sends arrives. */
static int take_and_end_mute(struct end *end)
{
	setenv("TELPHER_VERBS_FAULT", "dead", 1);
	return take_the_last_message(end);
}

static int take_destroy_and_end_mute(struct end *end)
{
	setenv("TELPHER_VERBS_FAULT", "dead", 1);
	CHECK(take_the_last_message(end) == 0);
	return end_close(end);
}

static void expect_success(int (*b)(struct end *end))
{
	static struct outcome outcome;
	run_two(&outcome, ask, b);
	assert_true(outcome.a_ok && outcome.b_ok);
	assert_non_null(strstr(outcome.log, "carried by wire"));
}

static void what_a_process_owes_at_its_end_is_sent(void **state)
{
	(void)state;
	for (int i = 0; i < 8; i++)
		expect_success(take_and_end);
}

static void the_keeper_answers_for_a_process_that_has_ended(void **state)
{
	(void)state;
	expect_success(take_and_end_mute);
}

static void and_for_the_queue_pairs_that_it_destroyed_before(void **state)
{
	(void)state;
	expect_success(take_destroy_and_end_mute);
}

int main(void)
{
	setenv("TELPHER_VERBS_HIDE_REAL", "1", 1);
	setenv("TELPHER_VERBS_CARRIER", "wire", 1);
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(what_a_process_owes_at_its_end_is_sent),
		cmocka_unit_test(the_keeper_answers_for_a_process_that_has_ended),
		cmocka_unit_test(and_for_the_queue_pairs_that_it_destroyed_before),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

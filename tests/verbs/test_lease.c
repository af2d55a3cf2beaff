/* Leases of pollers, by a clock of the test's own: how long the progress thread leaves packets to whom. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "verbs/internal.h"

static uint64_t now = 1000000000;

/* Packets come for a poller that was here a moment ago; the thread waits for the lease's end, and again as long as it is renewed. */
static void polls(int times, uint64_t every_ns)
{
	for (int i = 0; i < times; i++) {
		now += every_ns;
		tp_lease_poll(now, true);
		if (tp_lease_holds(now) || tp_lease_leaves(now))
			tp_lease_waited(now);
	}
}

static uint64_t length(void)
{
	return tp_lease_holds(now) ? tp_lease_end_ns() - now : 0;
}

static void a_poller_that_is_always_there_may_be_away_for_a_slice(void **state)
{
	(void)state;
	polls(200, 10000);
	assert_in_range(length(), 1000000, 4000000);
	/* It is put aside at times, and keeps it. */
	for (int i = 0; i < 20; i++) {
		polls(1, 1200000);
		polls(100, 10000);
		assert_in_range(length(), 1000000, 4000000);
	}
}

static void who_comes_by_once_in_a_while_is_not_waited_for(void **state)
{
	(void)state;
	polls(200, 10000);
	polls(20, 1000000);
	assert_in_range(length(), 0, 200000);
	/* Nor after the few polls that empty a queue. */
	for (int i = 0; i < 20; i++) {
		polls(1, 1000000);
		polls(4, 10000);
	}
	assert_in_range(length(), 0, 200000);
}

static void a_lease_that_leaves_packets_waiting_shrinks_to_none(void **state)
{
	(void)state;
	polls(200, 10000);
	uint64_t before = length();
	for (int i = 0; before; i++) {
		assert_in_range(i, 0, 10);
		now += before;
		assert_false(tp_lease_holds(now));
		tp_lease_waited(now);
		tp_lease_learn(1);
		tp_lease_poll(now, false);
		assert_in_range(length(), 0, before / 2);
		before = length();
	}
	/* And none is given for a while, though polls go on. */
	int refused = 0;
	for (; !tp_lease_leaves(now); refused++) {
		assert_in_range(refused, 0, 100);
		tp_lease_learn(1);
	}
	assert_in_range(refused, 4, 100);
}

static void who_is_about_to_sleep_has_none(void **state)
{
	(void)state;
	polls(200, 10000);
	assert_true(tp_lease_holds(now));
	assert_true(tp_lease_cancel());
	assert_false(tp_lease_holds(now));
	assert_false(tp_lease_cancel());
}

static void a_poll_after_the_clock_was_read_is_one_of_now(void **state)
{
	(void)state;
	polls(200, 10000);
	tp_lease_poll(now + 500, false);
	assert_true(tp_lease_holds(now));
	tp_lease_forget();
	assert_false(tp_lease_holds(now));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_poller_that_is_always_there_may_be_away_for_a_slice),
		cmocka_unit_test(who_comes_by_once_in_a_while_is_not_waited_for),
		cmocka_unit_test(a_lease_that_leaves_packets_waiting_shrinks_to_none),
		cmocka_unit_test(who_is_about_to_sleep_has_none),
		cmocka_unit_test(a_poll_after_the_clock_was_read_is_one_of_now),
	};
	return cmocka_run_group_tests_name("verbs_lease", tests, NULL, NULL);
}

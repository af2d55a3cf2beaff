/* How busy the machine is: what a thread waits for a processor that others have is counted, for that thread alone. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include "watch/watch.h"

static _Atomic bool over;

static void spin_ms(uint64_t ms)
{
	for (uint64_t end = tp_clock_ms() + ms; tp_clock_ms() < end && !over;) {}
}

static void *compete(void *arg)
{
	(void)arg;
	spin_ms(10000);
	return NULL;
}

static bool system_counts(void)
{
	struct tp_delay since;
	tp_delay_begin(&since);
	return tp_delay_us(&since) < TP_DELAY_UNKNOWN;
}

/* Two threads on one processor. */
static void waiting_for_a_processor_is_counted(void **s)
{
	(void)s;
	cpu_set_t before, one;
	pthread_t other;
	struct tp_delay since;
	float us = 0;
	if (!system_counts()) skip();
	assert_int_equal(sched_getaffinity(0, sizeof(before), &before), 0);
	int cpu = 0;
	while (!CPU_ISSET(cpu, &before)) cpu++;
	CPU_ZERO(&one);
	CPU_SET(cpu, &one);
	assert_int_equal(sched_setaffinity(0, sizeof(one), &one), 0);
	over = false;
	tp_delay_begin(&since);
	int failed = pthread_create(&other, NULL, compete, NULL);       /* it inherits the processor */
	for (int i = 0; i < 500 && !failed && us < 5000; i++) {
		spin_ms(10);
		us = tp_delay_us(&since);
	}
	over = true;
	if (!failed) pthread_join(other, NULL);
	sched_setaffinity(0, sizeof(before), &before);
	assert_int_equal(failed, 0);
	assert_true(us >= 5000 && us < TP_DELAY_UNKNOWN);
}

static void *ask(void *arg)
{
	static float us;
	us = tp_delay_us(arg);
	return &us;
}

static void nobody_knows_what_another_thread_waited(void **s)
{
	(void)s;
	struct tp_delay since, never = { 0 };
	pthread_t other;
	void *us;
	tp_delay_begin(&since);
	assert_int_equal(pthread_create(&other, NULL, ask, &since), 0);
	assert_int_equal(pthread_join(other, &us), 0);
	assert_true(*(float *)us >= TP_DELAY_UNKNOWN);
	assert_true(tp_delay_us(&never) >= TP_DELAY_UNKNOWN);
}

static void the_first_look_at_what_was_taken_says_nothing(void **s)
{
	(void)s;
	struct tp_stolen since = { 0 };
	assert_true(tp_stolen_share(&since) == 0);
	for (int i = 0; i < 3; i++) {
		float share = tp_stolen_share(&since);
		assert_true(share >= 0 && share <= 1);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(waiting_for_a_processor_is_counted), cmocka_unit_test(nobody_knows_what_another_thread_waited),
		cmocka_unit_test(the_first_look_at_what_was_taken_says_nothing),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

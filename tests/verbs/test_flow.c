/* Flows: how much may be under way to one receiving socket, and what a sender of datagrams learns. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <arpa/inet.h>
#include "verbs/flow.h"

enum { BUDGET = 1 << 20, BYTES = 1024, QPN = 0x050123, MOST = 100000 };

/* A flow of its own for each test. */
static union tp_addr peer_of(uint32_t n)
{
	union tp_addr addr = { .v4 = { .sin_family = AF_INET, .sin_port = htons(4791), .sin_addr.s_addr = htonl(0x0a630700 + n) } };
	return addr;
}

static enum tp_flow_word admit(struct tp_flow *flow, uint32_t psn)
{
	uint64_t until = 0;
	enum tp_flow_word word = tp_flow_admit(flow, BUDGET, &(struct tp_flow_mark){ .qpn = QPN, .psn = psn }, BYTES, &until);
	if (word == TP_FLOW_WAIT)
		assert_true(until > 0);
	return word;
}

/* Sends until it has to wait (or is told to lose); returns how many went, *asked: the last that asked. */
static uint32_t fill(struct tp_flow *flow, uint32_t *psn, uint32_t *asked)
{
	uint32_t first = *psn;
	for (; *psn - first < MOST; ++*psn) {
		enum tp_flow_word word = admit(flow, *psn);
		if (word == TP_FLOW_WAIT || word == TP_FLOW_LOSE)
			break;
		if (word == TP_FLOW_ASK)
			*asked = *psn;
	}
	return *psn - first;
}

static void a_window_fills_and_a_word_makes_room(void **state)
{
	(void)state;
	union tp_addr peer = peer_of(1);
	struct tp_flow *flow = tp_flow_find(&peer, 5);
	uint32_t psn = 0, asked = MOST;
	uint32_t went = fill(flow, &psn, &asked);
	assert_in_range(went, 32, BUDGET / BYTES);
	assert_int_not_equal(asked, MOST);
	int64_t bytes = tp_flow_bytes(flow);
	assert_true(bytes >= (int64_t)went * BYTES || bytes == 0);     /* 0: it took us long to get here */
	assert_true(bytes <= BUDGET);
	/* The word comes from whatever port; its place among the windows counts, not how often it comes. */
	peer.v4.sin_port = htons(50000);
	tp_flow_arrived(&peer, 5, QPN, asked, BUDGET);
	tp_flow_arrived(&peer, 5, QPN, asked, BUDGET);
	assert_in_range(fill(flow, &psn, &asked), went / 2, 3 * went);
}

static void a_word_about_what_was_never_asked_means_nothing(void **state)
{
	(void)state;
	union tp_addr peer = peer_of(2), other = peer_of(99);
	struct tp_flow *flow = tp_flow_find(&peer, 5);
	uint32_t psn = 0, asked = MOST;
	fill(flow, &psn, &asked);
	int64_t before = tp_flow_bytes(flow);
	tp_flow_arrived(&peer, 5, QPN, psn + 7, BUDGET);
	tp_flow_arrived(&peer, 5, QPN + 1, asked, BUDGET);
	tp_flow_arrived(&peer, 6, QPN, asked, BUDGET);
	tp_flow_arrived(&other, 5, QPN, asked, BUDGET);
	assert_true(tp_flow_bytes(flow) == before || tp_flow_bytes(flow) == 0);     /* 0: it took us long to get here */
	assert_false(flow->speaks);
}

static void no_more_goes_than_there_are_receives_but_one_always_may(void **state)
{
	(void)state;
	union tp_addr peer = peer_of(3);
	struct tp_flow *flow = tp_flow_find(&peer, 5);
	uint32_t psn = 0, asked = MOST;
	assert_int_equal(admit(flow, psn), TP_FLOW_GO);
	fill(flow, &psn, &asked);
	tp_flow_arrived(&peer, 5, QPN, asked, 4 * TP_FLOW_COST(BYTES));
	uint32_t round = 0;
	for (; round < 20; round++) {
		fill(flow, &psn, &asked);
		tp_flow_arrived(&peer, 5, QPN, asked, 4 * TP_FLOW_COST(BYTES));
		uint32_t went = fill(flow, &psn, &asked);
		assert_in_range(went, 0, 5);
		tp_flow_arrived(&peer, 5, QPN, asked, 4 * TP_FLOW_COST(BYTES));
	}
	/* Every one asks then, so that the sender hears of new receives. */
	tp_flow_arrived(&peer, 5, QPN, asked, 0);
	flow->known = flow->asked = flow->sent;
	assert_int_equal(admit(flow, psn), TP_FLOW_ASK);
	assert_int_equal(admit(flow, psn + 1), TP_FLOW_WAIT);
}

static void whoever_never_answers_is_waited_for_a_few_times_only(void **state)
{
	(void)state;
	union tp_addr peer = peer_of(4);
	struct tp_flow *flow = tp_flow_find(&peer, 5);
	uint64_t started = tp_clock_ns();
	uint32_t psn = 0;
	while (psn < MOST)
		if (admit(flow, psn) != TP_FLOW_WAIT)
			psn++;
		else
			assert_true(tp_clock_ns() - started < 30000000000u);
	assert_true(tp_flow_bytes(flow) <= BUDGET);
}

static void a_peer_that_falls_silent_costs_little_time(void **state)
{
	(void)state;
	union tp_addr peer = peer_of(5);
	struct tp_flow *flow = tp_flow_find(&peer, 5);
	uint32_t psn = 0, asked = MOST;
	fill(flow, &psn, &asked);
	tp_flow_arrived(&peer, 5, QPN, asked, BUDGET);
	assert_true(flow->speaks);
	uint32_t waits = 0;
	enum tp_flow_word word;
	while ((word = admit(flow, psn++)) != TP_FLOW_LOSE)
		waits += word == TP_FLOW_WAIT;
	assert_true(waits > 0);
	assert_true(flow->window < 256u << 10);
	tp_flow_arrived(&peer, 5, QPN, asked, BUDGET);
	assert_int_not_equal(admit(flow, psn), TP_FLOW_LOSE);
}

static void connected_bytes_leave_datagrams_less(void **state)
{
	(void)state;
	union tp_addr peer = peer_of(6), twin = peer_of(7);
	struct tp_flow *flow = tp_flow_find(&peer, 5), *free_one = tp_flow_find(&twin, 5);
	uint32_t psn = 0, asked = 0, other = 0;
	flow->bytes = BUDGET - (100 << 10);
	uint32_t went = fill(flow, &psn, &asked);
	assert_true(went < fill(free_one, &other, &asked));
	assert_true(tp_flow_find(&peer, 5) == flow && tp_flow_find(&peer, 6) != flow);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_window_fills_and_a_word_makes_room),
		cmocka_unit_test(a_word_about_what_was_never_asked_means_nothing),
		cmocka_unit_test(no_more_goes_than_there_are_receives_but_one_always_may),
		cmocka_unit_test(whoever_never_answers_is_waited_for_a_few_times_only),
		cmocka_unit_test(a_peer_that_falls_silent_costs_little_time),
		cmocka_unit_test(connected_bytes_leave_datagrams_less),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

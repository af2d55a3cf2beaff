/* Who measures with whom: all ranks see the same rounds, in each of which a rank gives to one or takes from one, and both ends know it; all
 * neighbours are there, both ways. Where ranks of a host share its network, as many share it in all pairs that are held against each other. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include "comm/pace.h"
#include "comm/topo.h"

#define MOST 128

static struct tp_boot_peer peers[MOST];
static struct tp_boot boot = { .peers = peers };
static struct tp_comm_pace paces[MOST];
static bool paired[MOST][MOST];

/* Pairs that leave a host at the same time: as many from every host, in all rounds of a distance. */
static void check_sharing(int nranks, int nhosts)
{
	int each = nranks / nhosts, of_distance[MOST + 1] = { 0 };
	for (int round = 0; round < paces[0].nrounds; round++) {
		int distance = paces[0].rounds[round].distance;
		for (int host = 0; host < nhosts; host++) {
			int leave = 0;
			for (int r = host * each; r < (host + 1) * each; r++) {
				const struct tp_pace_round *own = &paces[r].rounds[round];
				leave += own->from == r && peers[own->to].host != host;
			}
			if (!leave) continue;
			if (!of_distance[distance]) of_distance[distance] = leave;
			assert_int_equal(leave, of_distance[distance]);
		}
	}
}

static void check(int nranks, int nhosts)
{
	memset(peers, 0, sizeof(peers));
	memset(paces, 0, sizeof(paces));
	memset(paired, 0, sizeof(paired));
	boot.nranks = nranks;
	boot.nhosts = nhosts;
	for (int r = 0, first = 0; r < nranks; r++) {
		peers[r].host = r * nhosts / nranks;
		if (r && peers[r].host != peers[r - 1].host) first = r;
		peers[r].local = r - first;
	}
	for (int r = 0; r < nranks; r++) {
		struct ncclComm comm = { .rank = r, .nranks = nranks, .boot = &boot };
		boot.host = peers[r].host;
		boot.local = peers[r].local;
		tp_pace_pair_up(&comm, &paces[r]);
		assert_int_equal(paces[r].nrounds, paces[0].nrounds);
	}
	assert_true(paces[0].nrounds > 0 && paces[0].nrounds <= TP_PACE_ROUNDS);
	for (int round = 0; round < paces[0].nrounds; round++) {
		for (int r = 0; r < nranks; r++) {
			const struct tp_pace_round *own = &paces[r].rounds[round];
			if (own->from < 0) continue;
			assert_true(own->from != own->to && (own->from == r || own->to == r));
			const struct tp_pace_round *other = &paces[own->from == r ? own->to : own->from].rounds[round];
			assert_int_equal(other->from, own->from);
			assert_int_equal(other->to, own->to);
			paired[own->from][own->to] = true;
		}
	}
	if (nhosts > 1 && nranks % nhosts == 0) check_sharing(nranks, nhosts);
	for (int r = 0; r < nranks; r++) {
		assert_true(paired[r][(r + 1) % nranks]);
		assert_true(paired[(r + 1) % nranks][r]);
	}
}

static void both_ends_of_every_pair_know_of_it(void **s)
{
	(void)s;
	for (int nranks = 2; nranks <= 16; nranks++)
		for (int nhosts = 1; nhosts <= nranks; nhosts++) check(nranks, nhosts);
	check(MOST, MOST);
	check(64, 33);
	check(99, 33);
}

static void far_hosts_meet_too(void **s)
{
	(void)s;
	check(64, 16);
	for (int host = 0; host < 16; host++)
		for (int distance = 1; distance <= 8; distance *= 2)
			if (distance > 1) assert_true(paired[4 * host][4 * ((host + distance) % 16)]);
}

/* ---- What is made of times */

/* Times of pairs, as ranks add them up. */
static float like(const float *us, int count, float best)
{
	float counts[TP_PACE_BUCKETS] = { 0 };
	for (int i = 0; i < count; i++) counts[tp_pace_bucket(us[i], best)] += 1;
	return tp_pace_like_us(counts, best);
}

static void one_lucky_pair_is_not_what_others_are_held_against(void **s)
{
	(void)s;
	const float us[] = { 10, 100, 105, 110, 120, 900 }, slow_host[] = { 100, 100, 1000, 1100, 1200, 1300 }, two[] = { 100, 1000 }, many[] = { 100, 1e9f };
	float found = like(us, 6, 10);
	assert_true(found >= 100 && found < 130);
	/* Two healthy pairs of six are enough. */
	found = like(slow_host, 6, 100);
	assert_true(found >= 100 && found < 130);
	found = like(two, 2, 100);
	assert_true(found >= 100 && found < 130);
	assert_true(like(many, 2, 100) < 130);
	assert_true(like(us, 1, 10) == 0);
}

/* Two ranks a host. */
static struct tp_comm_pace watch_of(enum tp_pace_class kind, int from, int to, float took_us, float like_us)
{
	return (struct tp_comm_pace){ .found = { .kind = kind, .from = from, .to = to, .from_host = from / 2, .to_host = to / 2, .took_us = took_us, .like_us = like_us, .unrest = 1 } };
}

/* A second look, after a first that found something. */
static enum tp_pace_end look_again(struct tp_comm_pace *was, const struct tp_comm_pace *now, bool measured)
{
	enum tp_pace_verdict verdict;
	assert_int_equal(tp_pace_weigh(was, measured, &verdict), TP_PACE_ONCE_MORE);
	was->found = now->found;
	return tp_pace_weigh(was, measured, &verdict);
}

static void the_same_pair_twice_is_told(void **s)
{
	(void)s;
	struct tp_comm_pace was = watch_of(TP_PACE_REMOTE, 1, 2, 1000, 100), now = watch_of(TP_PACE_REMOTE, 1, 0, 2000, 100);
	assert_int_equal(look_again(&was, &now, false), TP_PACE_WARNED);
}

/* Of two ranks behind a slow cable now one and now the other is the slowest. */
static void another_pair_of_the_same_hosts_is_the_same(void **s)
{
	(void)s;
	struct tp_comm_pace was = watch_of(TP_PACE_REMOTE, 2, 0, 1000, 100), now = watch_of(TP_PACE_REMOTE, 3, 1, 2000, 100);
	assert_int_equal(look_again(&was, &now, false), TP_PACE_WARNED);
	was = watch_of(TP_PACE_APART, 2, 0, 1000, 100);
	now = watch_of(TP_PACE_APART, 3, 1, 2000, 100);
	assert_int_equal(look_again(&was, &now, false), TP_PACE_CALM);
}

static void another_pair_or_class_is_not_the_same(void **s)
{
	(void)s;
	struct tp_comm_pace was = watch_of(TP_PACE_REMOTE, 1, 2, 1000, 100), other = watch_of(TP_PACE_REMOTE, 5, 6, 1000, 100);
	assert_int_equal(look_again(&was, &other, false), TP_PACE_CALM);
	was = watch_of(TP_PACE_REMOTE, 1, 2, 1000, 100);
	other = watch_of(TP_PACE_APART, 1, 0, 1000, 100);
	assert_int_equal(look_again(&was, &other, false), TP_PACE_CALM);
}

/* A pair that stood out once, and slowness of all later: neither was seen twice. */
static void slowness_of_all_does_not_confirm_a_pair(void **s)
{
	(void)s;
	struct tp_comm_pace was = watch_of(TP_PACE_REMOTE, 1, 2, 1000, 100), all = watch_of(TP_PACE_REMOTE, 1, 2, 120, 100);
	assert_int_equal(look_again(&was, &all, true), TP_PACE_CALM);
	was = all;
	assert_int_equal(look_again(&was, &all, true), TP_PACE_WARNED);
	struct tp_comm_pace pair = watch_of(TP_PACE_REMOTE, 1, 2, 1000, 100);
	was = all;
	assert_int_equal(look_again(&was, &pair, true), TP_PACE_CALM);
}

static void what_healthy_turns_differ_by_is_no_slowness(void **s)
{
	(void)s;
	enum tp_pace_verdict verdict;
	struct tp_comm_pace watch = watch_of(TP_PACE_MACHINE, 1, 2, 1000, 100);
	watch.found.spread_us = 250;
	watch.grown = TP_PACE_MOST_GROWN;
	assert_int_equal(tp_pace_weigh(&watch, false, &verdict), TP_PACE_CALM);
	watch.found.spread_us = 200;
	assert_int_equal(tp_pace_weigh(&watch, false, &verdict), TP_PACE_ONCE_MORE);
}

/* A link whose message takes no longer than threads wait for processors: of a longer one it does. */
static void what_may_hide_in_chance_is_looked_at_with_longer_messages(void **s)
{
	(void)s;
	enum tp_pace_verdict verdict;
	struct tp_comm_pace watch = watch_of(TP_PACE_REMOTE, 1, 2, 10000, 1000);
	watch.found.spread_us = 5000;
	assert_int_equal(tp_pace_weigh(&watch, false, &verdict), TP_PACE_LARGER);
	assert_int_equal(tp_pace_weigh(&watch, false, &verdict), TP_PACE_LARGER);
	assert_int_equal(tp_pace_bytes(1 << 20, false, watch.grown), 4 << 20);
	assert_int_equal(tp_pace_bytes(1 << 18, false, watch.grown), 1 << 21);
	watch.found.took_us = 80000;
	assert_int_equal(tp_pace_weigh(&watch, false, &verdict), TP_PACE_ONCE_MORE);
	assert_int_equal(tp_pace_weigh(&watch, false, &verdict), TP_PACE_WARNED);
	/* Between two looks that find it may be one that can't. */
	watch = watch_of(TP_PACE_REMOTE, 1, 2, 10000, 1000);
	assert_int_equal(tp_pace_weigh(&watch, false, &verdict), TP_PACE_ONCE_MORE);
	watch.found.spread_us = 5000;
	assert_int_equal(tp_pace_weigh(&watch, false, &verdict), TP_PACE_LARGER);
	watch.found.spread_us = 0;
	assert_int_equal(tp_pace_weigh(&watch, false, &verdict), TP_PACE_WARNED);
	/* Nothing there after all, or a machine whose host takes its processors: as long as before. */
	watch = watch_of(TP_PACE_REMOTE, 1, 2, 10000, 1000);
	watch.found.spread_us = 5000;
	watch.grown = 1;
	watch.taken = 1;
	assert_int_equal(tp_pace_weigh(&watch, false, &verdict), TP_PACE_CALM);
	assert_int_equal(watch.grown, 0);
	assert_int_equal(tp_pace_bytes(1 << 20, false, 0), 1 << 19);
}

/* Then no pair is ever known to be slow, however long its messages are. */
static void where_waits_for_processors_are_not_counted_longer_messages_tell_no_more(void **s)
{
	(void)s;
	enum tp_pace_verdict verdict;
	struct tp_comm_pace watch = watch_of(TP_PACE_REMOTE, 1, 2, 0, 1000);
	watch.found.unrest = 50;
	watch.busy = TP_DELAY_UNKNOWN / 3e6f;
	assert_int_equal(tp_pace_weigh(&watch, false, &verdict), TP_PACE_CALM);
	assert_int_equal(watch.grown, 0);
	watch.busy = 1;
	assert_int_equal(tp_pace_weigh(&watch, false, &verdict), TP_PACE_LARGER);
}

/* Another look of the same length would cost what the first did, and tell no more. */
static void messages_that_are_as_long_as_they_get_are_not_tried_again(void **s)
{
	(void)s;
	enum tp_pace_verdict verdict;
	for (int hurry = 0; hurry < 2; hurry++) {
		struct tp_comm_pace watch = watch_of(TP_PACE_REMOTE, 1, 2, 10000, 1000);
		struct tp_pace_found found = watch.found;
		found.spread_us = 5000;
		watch.hurry = hurry;
		tp_pace_begin_look(&watch, 2 << 20);
		watch.found = found;
		size_t shorter = watch.bytes;
		assert_int_equal(tp_pace_weigh(&watch, false, &verdict), TP_PACE_LARGER);
		tp_pace_begin_look(&watch, 2 << 20);
		watch.found = found;
		assert_true(watch.bytes > shorter);
		assert_int_equal(tp_pace_weigh(&watch, false, &verdict), TP_PACE_CALM);
	}
}

static void a_time_that_may_all_be_waits_for_processors_is_no_rate(void **s)
{
	(void)s;
	char text[400];
	struct tp_comm_pace watch = watch_of(TP_PACE_REMOTE, 1, 2, 0, 1000);
	watch.bytes = 1000000;
	tp_pace_describe_look(&watch, TP_PACE_NOTHING, TP_PACE_LARGER, text, sizeof(text));
	assert_non_null(strstr(text, "rank 1 -> rank 2: no rate that is sure, while others like it make 1 GB/s. "));
	assert_non_null(strstr(text, "with longer messages"));
	watch.found.took_us = 10000;
	tp_pace_describe_look(&watch, TP_PACE_BEHIND_LIKE, TP_PACE_ONCE_MORE, text, sizeof(text));
	assert_non_null(strstr(text, "rank 1 -> rank 2: 0.1 GB/s, while others like it make 1 GB/s. "));
	assert_null(strstr(text, "longer"));
	watch.found.like_us = 0;
	tp_pace_describe_look(&watch, TP_PACE_NOTHING, TP_PACE_LARGER, text, sizeof(text));
	assert_non_null(strstr(text, "0.1 GB/s, and it has no like. "));
}

/* A queue that fills and empties, packets that are lost: its least time is far too long all the same. */
static void a_sick_pairs_times_may_vary(void **s)
{
	(void)s;
	enum tp_pace_verdict verdict;
	struct tp_comm_pace watch = watch_of(TP_PACE_MACHINE, 1, 2, 1000, 100);
	watch.found.own_spread_us = 5000;
	assert_int_equal(tp_pace_weigh(&watch, false, &verdict), TP_PACE_ONCE_MORE);
	/* By figures alone, a factor of two, they are all that is known of its surroundings. */
	watch = watch_of(TP_PACE_REMOTE, 1, 2, 1000, 0);
	watch.found.expected_us = 200;
	watch.found.own_spread_us = 250;
	assert_int_equal(tp_pace_weigh(&watch, false, &verdict), TP_PACE_CALM);
	watch.found.own_spread_us = 100;
	assert_int_equal(tp_pace_weigh(&watch, false, &verdict), TP_PACE_ONCE_MORE);
	assert_int_equal(verdict, TP_PACE_BEHIND_FIGURES);
}

static void all_are_slow_by_measured_figures_alone(void **s)
{
	(void)s;
	enum tp_pace_verdict verdict;
	struct tp_comm_pace watch = watch_of(TP_PACE_REMOTE, 1, 2, 120, 100);
	assert_int_equal(tp_pace_weigh(&watch, false, &verdict), TP_PACE_CALM);
	watch.found.unrest = 10;        /* a busy machine */
	watch.grown = TP_PACE_MOST_GROWN;
	assert_int_equal(tp_pace_weigh(&watch, true, &verdict), TP_PACE_CALM);
	watch.found.unrest = 1;
	assert_int_equal(tp_pace_weigh(&watch, true, &verdict), TP_PACE_ONCE_MORE);
}

static void a_pair_is_slow_by_what_it_took_in_most_turns(void **s)
{
	(void)s;
	const float busy[] = { 0, 10, 900, 1000 }, quiet[] = { 0, 850, 1000, 1300 };
	assert_true(tp_pace_took_us(busy, 4) == 10);
	assert_true(tp_pace_took_us(quiet, 4) == 850);
	assert_true(tp_pace_took_us(quiet, 3) == 0);
	assert_true(tp_pace_took_us(quiet + 1, 2) == 850);
}

/* Turns in which a taker came late say nothing, so there are more; but not for ever. */
static void a_round_lasts_until_every_taker_knows_enough(void **s)
{
	(void)s;
	assert_false(tp_pace_has_enough(4, 3, 100));
	assert_true(tp_pace_has_enough(4, 4, 100));
	assert_true(tp_pace_has_enough(TP_PACE_TURNS, 0, 100));
	assert_true(tp_pace_has_enough(3, 3, 60e3f));
	assert_false(tp_pace_has_enough(3, 2, 60e3f));
	assert_true(tp_pace_has_enough(2, 2, 2e6f));
}

static void what_the_host_of_a_virtual_machine_takes_accuses_nobody(void **s)
{
	(void)s;
	enum tp_pace_verdict verdict;
	struct tp_comm_pace watch = watch_of(TP_PACE_REMOTE, 1, 2, 1000, 100);
	watch.taken = 0.2f;
	assert_int_equal(tp_pace_weigh(&watch, true, &verdict), TP_PACE_CALM);
	watch.taken = 0.01f;
	assert_int_equal(tp_pace_weigh(&watch, true, &verdict), TP_PACE_ONCE_MORE);
}

static void times_that_are_short_all_are_alike(void **s)
{
	(void)s;
	enum tp_pace_verdict verdict;
	struct tp_comm_pace watch = watch_of(TP_PACE_APART, 1, 2, 60, 5);
	assert_int_equal(tp_pace_weigh(&watch, false, &verdict), TP_PACE_CALM);
	watch.found.took_us = 90;
	assert_int_equal(tp_pace_weigh(&watch, false, &verdict), TP_PACE_ONCE_MORE);
}

static void a_message_of_a_turn_is_a_part_of_the_call_that_it_goes_behind(void **s)
{
	(void)s;
	assert_int_equal(tp_pace_bytes(1 << 20, false, 0), 512 << 10);
	assert_int_equal(tp_pace_bytes(128 << 10, false, 0), 128 << 10);
	assert_int_equal(tp_pace_bytes((size_t)1 << 40, false, 0), 1 << 20);
	assert_int_equal(tp_pace_bytes(256 << 10, true, 0), 1 << 20);
}

/* A look waits for calls of the size that it began behind, but not for ever. */
static void turns_go_behind_calls_as_large_as_the_first(void **s)
{
	(void)s;
	struct tp_comm_pace watch = { 0 };
	tp_pace_begin_look(&watch, 1 << 20);
	assert_false(tp_pace_waits(&watch, 1 << 18));           /* who has a part is asked behind any call */
	watch.due = TP_PACE_IDLE;
	watch.rest = 2;
	watch.rested = 0;
	assert_true(tp_pace_waits(&watch, 1 << 20) && tp_pace_waits(&watch, 1 << 20));
	assert_true(tp_pace_waits(&watch, 1 << 18));
	assert_true(watch.looking);
	assert_false(tp_pace_waits(&watch, 1 << 20));
	int waited = 0;
	while (watch.looking && waited < 100000) {
		assert_true(tp_pace_waits(&watch, 1 << 18));
		waited++;
	}
	assert_true(waited > 1000 && waited < 100000);
}

static void turns_cost_a_fiftieth_of_the_time(void **s)
{
	(void)s;
	/* A turn of 7 ms, where a call comes each 10 ms: 35 calls go by. */
	assert_int_equal(tp_pace_rest(7000, 100 * 10000, 100, 2), 35);
	assert_int_equal(tp_pace_rest(10, 100 * 10000, 100, 2), 1);
	assert_int_equal(tp_pace_rest(1e9f, 1, 1, 2), 1024);
	assert_true(tp_pace_rest(7000, 0, 0, 2) >= 16 && tp_pace_rest(7000, 0, 100, 2) >= 16);
	/* At a quarter of its speed, a twenty-fifth; a tenth at the most. */
	assert_int_equal(tp_pace_rest(8000, 100 * 10000, 100, 4), 20);
	assert_int_equal(tp_pace_rest(8000, 100 * 10000, 100, 100), 8);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(both_ends_of_every_pair_know_of_it), cmocka_unit_test(far_hosts_meet_too),
		cmocka_unit_test(one_lucky_pair_is_not_what_others_are_held_against), cmocka_unit_test(the_same_pair_twice_is_told), cmocka_unit_test(another_pair_of_the_same_hosts_is_the_same),
		cmocka_unit_test(another_pair_or_class_is_not_the_same), cmocka_unit_test(slowness_of_all_does_not_confirm_a_pair),
		cmocka_unit_test(what_healthy_turns_differ_by_is_no_slowness), cmocka_unit_test(what_may_hide_in_chance_is_looked_at_with_longer_messages),
		cmocka_unit_test(where_waits_for_processors_are_not_counted_longer_messages_tell_no_more),
		cmocka_unit_test(messages_that_are_as_long_as_they_get_are_not_tried_again),
		cmocka_unit_test(a_time_that_may_all_be_waits_for_processors_is_no_rate), cmocka_unit_test(a_sick_pairs_times_may_vary),
		cmocka_unit_test(all_are_slow_by_measured_figures_alone),
		cmocka_unit_test(a_pair_is_slow_by_what_it_took_in_most_turns), cmocka_unit_test(a_round_lasts_until_every_taker_knows_enough),
		cmocka_unit_test(what_the_host_of_a_virtual_machine_takes_accuses_nobody), cmocka_unit_test(times_that_are_short_all_are_alike),
		cmocka_unit_test(a_message_of_a_turn_is_a_part_of_the_call_that_it_goes_behind), cmocka_unit_test(turns_go_behind_calls_as_large_as_the_first),
		cmocka_unit_test(turns_cost_a_fiftieth_of_the_time),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

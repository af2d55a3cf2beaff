/* Which devices the two ends of a network link use, once ranks have said which are near to them: both ends find the same. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>
#include "link/net_link.h"

#define MOST 8
static _Alignas(struct tp_link_seat) unsigned char told[2][sizeof(struct tp_net_seats) + MOST * sizeof(struct tp_link_seat)];
static struct tp_net_seats *told_by(int rank) { return (void *)told[rank]; }
static struct tp_boot_peer peers[2] = { { .host = 0 }, { .host = 1 } };
static struct tp_boot boot[2] = { { .rank = 0, .nranks = 2, .nhosts = 2, .peers = peers }, { .rank = 1, .nranks = 2, .nhosts = 2, .peers = peers } };
static struct tp_net_links nets[2] = { { .boot = &boot[0], .seats = told, .seats_stride = sizeof(told[0]) }, { .boot = &boot[1], .seats = told, .seats_stride = sizeof(told[0]) } };

/* devs: a digit each, near ones first; a rail is the device's number, a network as said (0: all alike). */
static void seat(int rank, int near, const char *devs, uint64_t network)
{
	told_by(rank)->near = near;
	told_by(rank)->count = (int)strlen(devs);
	for (size_t i = 0; i < strlen(devs); i++) {
		struct tp_link_seat *s = &told_by(rank)->list[i];
		*s = (struct tp_link_seat){ .dev = devs[i] - '0', .rail = devs[i] - '0', .network = network ? network + (uint64_t)i : 1 };
		s->handle[0] = (unsigned char)devs[i];
	}
}

static void cross(int how) { nets[0].cross = nets[1].cross = how; }

/* From rank 0 to rank 1 on a channel: "23" is by device 2 to device 3. Each end says its own, and the sender whom it calls. */
static const char *ends(int channel)
{
	static char text[3];
	text[0] = (char)('0' + tp_net_links_device(&nets[0], channel, 0, 1));
	text[1] = (char)('0' + tp_net_links_device(&nets[1], channel, 0, 1));
	assert_int_equal(tp_net_links_handle(&nets[0], channel, 1)[0], text[1]);
	return text;
}

static void each_end_uses_what_is_near_to_it(void **state)
{
	(void)state;
	cross(TP_CROSS_TRY_NOT);
	seat(0, 1, "7", 0);
	seat(1, 1, "0", 0);
	assert_string_equal(ends(0), "70");
	assert_string_equal(ends(5), "70");
}

static void channels_take_turns_and_rails_meet(void **state)
{
	(void)state;
	cross(TP_CROSS_TRY_NOT);
	seat(0, 2, "01", 0);
	seat(1, 2, "10", 0);
	assert_string_equal(ends(0), "00");
	assert_string_equal(ends(1), "11");
	assert_string_equal(ends(2), "00");
}

static void any_rail_will_do_where_that_is_asked_for(void **state)
{
	(void)state;
	cross(TP_CROSS_ALWAYS);
	seat(0, 2, "01", 0);
	seat(1, 2, "10", 0);
	assert_string_equal(ends(0), "01");
	assert_string_equal(ends(1), "10");
}

static void rails_are_kept_at_any_price_where_that_is_asked_for(void **state)
{
	(void)state;
	seat(0, 1, "3", 0);
	seat(1, 1, "0123", 0);
	cross(TP_CROSS_TRY_NOT);
	assert_string_equal(ends(0), "30");
	cross(TP_CROSS_NEVER);
	assert_string_equal(ends(0), "33");
}

static void a_common_network_counts_for_more_than_a_rail(void **state)
{
	(void)state;
	cross(TP_CROSS_TRY_NOT);
	seat(0, 2, "01", 10);
	seat(1, 2, "10", 10);
	assert_string_equal(ends(0), "01");
	assert_string_equal(ends(1), "10");
}

static void hosts_with_fewer_devices_share_them_out(void **state)
{
	(void)state;
	cross(TP_CROSS_TRY_NOT);
	seat(0, 4, "0123", 0);
	seat(1, 2, "01", 0);
	assert_string_equal(ends(0), "00");
	assert_string_equal(ends(1), "11");
	assert_string_equal(ends(2), "20");
	assert_string_equal(ends(3), "31");
}

/* places: a digit a channel; 0: by turns. */
static void ring(int rank, const char *out, const char *in)
{
	struct tp_net_seats *s = told_by(rank);
	s->nrings = (int)strlen(out);
	for (int c = 0; c < s->nrings; c++) {
		s->out[c] = (uint8_t)(out[c] - '0');
		s->in[c] = (uint8_t)(in[c] - '0');
	}
}

static void the_end_of_a_ring_uses_what_the_search_gave_it(void **state)
{
	(void)state;
	cross(TP_CROSS_TRY_NOT);
	seat(0, 1, "0123", 0);
	seat(1, 1, "3210", 0);
	ring(0, "3200", "0000");
	ring(1, "0000", "2300");
	assert_string_equal(ends(0), "22");
	assert_string_equal(ends(1), "11");
	assert_string_equal(ends(2), "03");     /* of neither: as they stand near */
	assert_string_equal(ends(4), "22");     /* channels take turns with rings */
	ring(0, "", "");
	ring(1, "", "");
}

static void a_ring_s_device_that_the_other_end_lacks_is_met_as_without_it(void **state)
{
	(void)state;
	cross(TP_CROSS_TRY_NOT);
	seat(0, 1, "03", 0);
	seat(1, 2, "01", 0);
	ring(0, "2", "0");
	assert_string_equal(ends(0), "30");
	assert_string_equal(ends(1), "31");
	/* One on the sender's network counts for more than the ring's. */
	seat(0, 1, "03", 10);
	seat(1, 2, "01", 10);
	ring(1, "0", "1");
	assert_string_equal(ends(0), "31");
	ring(0, "", "");
	ring(1, "", "");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(each_end_uses_what_is_near_to_it),
		cmocka_unit_test(channels_take_turns_and_rails_meet),
		cmocka_unit_test(any_rail_will_do_where_that_is_asked_for),
		cmocka_unit_test(rails_are_kept_at_any_price_where_that_is_asked_for),
		cmocka_unit_test(a_common_network_counts_for_more_than_a_rail),
		cmocka_unit_test(hosts_with_fewer_devices_share_them_out),
		cmocka_unit_test(the_end_of_a_ring_uses_what_the_search_gave_it),
		cmocka_unit_test(a_ring_s_device_that_the_other_end_lacks_is_met_as_without_it),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

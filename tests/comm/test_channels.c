/* What the path report says of channels that take turns with a rank's network ports. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>
#include "comm/topo.h"
#include "link/net_link.h"

#define MOST 4
static _Alignas(struct tp_link_seat) unsigned char told[2][sizeof(struct tp_net_seats) + MOST * sizeof(struct tp_link_seat)];
static struct tp_net_seats *told_by(int rank) { return (void *)told[rank]; }
static struct tp_topo_card cards[2];
static struct tp_boot_peer peers[2];
static struct tp_boot boot = { .nranks = 2, .nhosts = 2, .peers = peers };
static struct tp_net_links nets = { .boot = &boot, .seats = told, .seats_stride = sizeof(told[0]), .cross = TP_CROSS_TRY_NOT };
static struct tp_links links = { .boot = &boot, .nets = &nets };
static struct tp_comm_topo topo = { .cards = cards };
static struct ncclComm comm = { .nranks = 2, .boot = &boot, .topo = &topo, .links = &links, .nchannels = 6 };

static void add_ports(int rank, int count, float gbps)
{
	told_by(rank)->near = told_by(rank)->count = count;
	for (int i = 0; i < count; i++) {
		struct tp_link_seat *seat = &told_by(rank)->list[i];
		snprintf(seat->name, sizeof(seat->name), "mlx5_%d", i);
		seat->port = i == 1 ? 2 : 1;
		seat->dev = seat->rail = i;
		seat->gbps = gbps;
	}
	snprintf(cards[rank].net, sizeof(cards[rank].net), "mlx5_0");
	cards[rank].gbps = gbps;
	peers[rank].host = rank;
}

static struct tp_watch_path described(void)
{
	struct tp_watch_path path = { .from = 0, .to = 1, .via = "NET/IB/0" };
	tp_comm_topo_describe(&comm, 0, 1, &path);
	return path;
}

static void channels_take_turns_with_the_ports(void **s)
{
	(void)s;
	struct tp_watch_channel channels[8];
	add_ports(0, 4, 50);
	add_ports(1, 4, 50);
	struct tp_watch_path path = described();
	assert_string_equal(path.device, "mlx5_0");
	assert_int_equal(path.devices, 4);
	assert_true(path.gbps == 200);
	assert_int_equal(tp_comm_topo_channels(&comm, &path, channels, 8), 6);
	assert_string_equal(channels[1].device, "mlx5_1:2");
	assert_string_equal(channels[3].device, "mlx5_3");
	assert_string_equal(channels[5].device, "mlx5_1:2");
	assert_true(channels[5].gbps == 50);
	assert_int_equal(tp_comm_topo_channels(&comm, &path, channels, 3), 3);
}

static void the_slower_end_counts(void **s)
{
	(void)s;
	struct tp_watch_channel channels[8];
	add_ports(0, 4, 50);
	add_ports(1, 1, 25);
	struct tp_watch_path path = described();
	assert_true(path.gbps == 25);
	assert_int_equal(tp_comm_topo_channels(&comm, &path, channels, 8), 6);
	assert_true(channels[0].gbps == 25);
}

static void one_port_is_alike_for_all(void **s)
{
	(void)s;
	struct tp_watch_channel channels[8];
	add_ports(0, 1, 50);
	add_ports(1, 4, 50);
	struct tp_watch_path path = described();
	assert_int_equal(tp_comm_topo_channels(&comm, &path, channels, 8), 0);
	snprintf(path.via, sizeof(path.via), "SHM");
	assert_int_equal(tp_comm_topo_channels(&comm, &path, channels, 8), 0);
}

static void where_nobody_was_seated_the_one_of_the_card_counts(void **s)
{
	(void)s;
	struct tp_watch_channel channels[8];
	add_ports(0, 4, 50);
	add_ports(1, 4, 50);
	nets.seats = NULL;
	struct tp_watch_path path = described();
	nets.seats = told;
	assert_true(path.gbps == 50);
	assert_int_equal(path.devices, 1);
	nets.seats = NULL;
	assert_int_equal(tp_comm_topo_channels(&comm, &path, channels, 8), 0);
	nets.seats = told;
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(channels_take_turns_with_the_ports), cmocka_unit_test(the_slower_end_counts),
		cmocka_unit_test(one_port_is_alike_for_all), cmocka_unit_test(where_nobody_was_seated_the_one_of_the_card_counts),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

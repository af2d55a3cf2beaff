/* What the path report says of channels that take turns with a rank's network ports. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>
#include "comm/topo.h"

static struct tp_topo_card cards[2];
static struct tp_topo_ports ports[2];
static struct tp_boot_peer peers[2];
static struct tp_boot boot = { .nranks = 2, .nhosts = 2, .peers = peers };
static struct tp_comm_topo topo = { .cards = cards, .ports = ports };
static struct ncclComm comm = { .nranks = 2, .boot = &boot, .topo = &topo, .nchannels = 6 };

static void add_ports(int rank, int count, float gbps)
{
	ports[rank] = (struct tp_topo_ports){ .count = count };
	for (int i = 0; i < TP_MIN(count, TP_TOPO_PORTS_MAX); i++) {
		snprintf(ports[rank].list[i].name, sizeof(ports[rank].list[i].name), "mlx5_%d", i);
		ports[rank].list[i].port = i == 1 ? 2 : 1;
		ports[rank].list[i].gbps = gbps;
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

static void of_more_ports_than_are_told_the_rest_is_unknown(void **s)
{
	(void)s;
	struct tp_watch_channel channels[20];
	add_ports(0, 18, 50);
	add_ports(1, 18, 50);
	comm.nchannels = 20;
	struct tp_watch_path path = described();
	assert_int_equal(tp_comm_topo_channels(&comm, &path, channels, 20), 20);
	comm.nchannels = 6;
	assert_string_equal(channels[15].device, "mlx5_15");
	assert_string_equal(channels[16].device, "");
	assert_string_equal(channels[18].device, "mlx5_0");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(channels_take_turns_with_the_ports), cmocka_unit_test(the_slower_end_counts),
		cmocka_unit_test(one_port_is_alike_for_all), cmocka_unit_test(of_more_ports_than_are_told_the_rest_is_unknown),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

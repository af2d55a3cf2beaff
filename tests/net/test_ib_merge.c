/* Ports that make one device: which do, and connections over all of them. */
#include <errno.h>
#include <stdio.h>
#include "helper_ib.h"

#define BYTES (4u << 20)
#define MOST 12

/* ---- which ---- */

static struct tp_ib_context contexts[MOST];
static struct tp_ib_port ports[MOST];
static struct tp_ib_device devices[MOST];

/* Ports from 0: "mlx5_<i>:1" at this place ("" where none is known) on node numa. */
static void port_at(int i, const char *pci_path, int numa)
{
	contexts[i] = (struct tp_ib_context){ .numa = numa };
	snprintf(contexts[i].name, sizeof(contexts[i].name), "mlx5_%d", i);
	snprintf(contexts[i].pci_path, sizeof(contexts[i].pci_path), "%s", pci_path);
	ports[i] = (struct tp_ib_port){ .context = &contexts[i], .number = 1, .mbps = 100000, .attr = { .link_layer = IBV_LINK_LAYER_ETHERNET } };
	snprintf(ports[i].text, sizeof(ports[i].text), "mlx5_%d:1", i);
}

static int merge(int count, enum tp_ib_distance level, const char *force)
{
	struct tp_ib_params params = { .merge = 1, .merge_vfs = 1, .merge_level = level, .force_merge = force };

	return tp_ib_merge(&params, ports, count, devices);
}

static void ports_of_one_card_are_a_device(void **state)
{
	(void)state;
	port_at(0, "/sys/devices/pci0000:c0/0000:c0:01.0/0000:c1:00.0", 0);
	port_at(1, "/sys/devices/pci0000:c0/0000:c0:01.0/0000:c1:00.1", 0);
	port_at(2, "/sys/devices/pci0000:e0/0000:e0:01.0/0000:e1:00.0", 0);
	assert_int_equal(merge(3, TP_IB_PORT, NULL), 2);
	assert_string_equal(devices[0].name, "mlx5_0+mlx5_1");
	assert_string_equal(devices[0].text, "mlx5_0:1+mlx5_1:1");
	assert_int_equal(devices[0].mbps, 200000);
	assert_string_equal(devices[1].name, "mlx5_2");
	assert_int_equal(ports[1].device, 0);
	assert_int_equal(ports[1].place, 1);
	assert_int_equal(ports[2].device, 1);
	assert_int_equal(merge(3, TP_IB_LOC, NULL), 3);
	/* Two ports of one libibverbs device. */
	ports[1].context = &contexts[0];
	contexts[0].pci_path[0] = 0;
	assert_int_equal(merge(3, TP_IB_PORT, NULL), 2);
	assert_string_equal(devices[0].name, "mlx5_0+mlx5_0");
}

static void virtual_functions_of_a_card_are_its_ports(void **state)
{
	struct tp_ib_params params = { .merge = 1, .merge_level = TP_IB_PORT };

	(void)state;
	port_at(0, "/sys/devices/pci0000:c0/0000:c0:01.0/0000:c1:00.7", 0);
	port_at(1, "/sys/devices/pci0000:c0/0000:c0:01.0/0000:c1:01.1", 0);
	assert_int_equal(merge(2, TP_IB_PORT, NULL), 1);
	assert_int_equal(tp_ib_merge(&params, ports, 2, devices), 2);
	params = (struct tp_ib_params){ .merge_level = TP_IB_SYS, .force_merge = "mlx5_0,mlx5_1" };
	assert_int_equal(tp_ib_merge(&params, ports, 2, devices), 2);
}

static void a_level_says_how_far_apart_they_may_be(void **state)
{
	static const struct { const char *path; int numa; enum tp_ib_distance distance; } others[] = {
		{ "/sys/devices/pci0000:c0/0000:c0:01.0/0000:c1:00.0/0000:c2:08.0/0000:c4:00.0", 0, TP_IB_PIX },
		{ "/sys/devices/pci0000:c0/0000:c0:01.0/0000:c1:00.0/0000:c2:10.0/0000:c5:00.0/0000:c6:00.0/0000:c7:00.0", 0, TP_IB_PXB },
		{ "/sys/devices/pci0000:c0/0000:c0:03.0/0000:d1:00.0", 0, TP_IB_PHB },
		{ "/sys/devices/pci0000:e0/0000:e0:01.0/0000:e1:00.0", 0, TP_IB_PHB },
		{ "/sys/devices/pci0000:20/0000:20:01.0/0000:21:00.0", 1, TP_IB_SYS },
		{ "", -1, TP_IB_SYS },
	};

	(void)state;
	port_at(0, "/sys/devices/pci0000:c0/0000:c0:01.0/0000:c1:00.0/0000:c2:00.0/0000:c3:00.0", 0);
	for (size_t i = 0; i < TP_ARRAY_LEN(others); i++) {
		port_at(1, others[i].path, others[i].numa);
		assert_int_equal(tp_ib_port_distance(&ports[0], &ports[1], true), others[i].distance);
		assert_int_equal(tp_ib_port_distance(&ports[1], &ports[0], true), others[i].distance);
		assert_int_equal(merge(2, others[i].distance, NULL), 1);
		assert_int_equal(merge(2, others[i].distance - 1, NULL), 2);
	}
}

static void a_device_has_at_most_eight_ports_of_one_kind(void **state)
{
	(void)state;
	for (int i = 0; i < MOST; i++) port_at(i, "", -1);
	ports[3].attr.link_layer = IBV_LINK_LAYER_INFINIBAND;
	assert_int_equal(merge(MOST, TP_IB_SYS, NULL), 3);
	assert_int_equal(devices[0].nports, 8);
	assert_int_equal(devices[1].nports, 1);
	assert_string_equal(devices[1].name, "mlx5_3");
	assert_int_equal(devices[2].nports, 3);
}

static void those_that_are_named_belong_together(void **state)
{
	(void)state;
	for (int i = 0; i < 5; i++) port_at(i, "", -1);
	assert_int_equal(merge(5, TP_IB_LOC, "mlx5_3,mlx5_1;mlx5_2:1,mlx5_4"), 3);
	assert_string_equal(devices[0].name, "mlx5_0");
	assert_string_equal(devices[1].name, "mlx5_2+mlx5_4");
	assert_string_equal(devices[2].name, "mlx5_3+mlx5_1");
	assert_int_equal(ports[4].device, 1);
	assert_int_equal(ports[3].device, 2);
}

static void a_name_that_fits_nothing_is_told(void **state)
{
	static const char *const lists[] = { "mlx5_0,mlx5_9", "mlx5_0,mlx5_1:2", "mlx5_0,mlx5_0", "mlx5_0,^mlx5_1", "mlx5_0,mlx5_2" };
	static const char *const said[] = { "'mlx5_9'", "'mlx5_1:2'", "in a device already", "'^mlx5_1'", "all InfiniBand or all Ethernet" };

	(void)state;
	for (int i = 0; i < 3; i++) port_at(i, "", -1);
	ports[2].attr.link_layer = IBV_LINK_LAYER_INFINIBAND;
	for (size_t i = 0; i < TP_ARRAY_LEN(lists); i++) {
		assert_int_equal(merge(3, TP_IB_LOC, lists[i]), 3);
		assert_non_null(strstr(tp_log_last_error(), said[i]));
	}
	assert_int_equal(merge(3, TP_IB_LOC, ";;,"), 3);
}

/* ---- connections ---- */

/* Two ports in one device, a third by itself. */
static int card(void **state)
{
	(void)state;
	ib_use_card(NULL);
	net_set_environment("NCCL_IB_HCA==telpher0,telpher1,telpher2", "NCCL_NET_FORCE_MERGE=telpher0,telpher1", NULL);
	assert_int_equal(tp_net_ib.init(), ncclSuccess);
	assert_int_equal(tp_ib_device_count(), 2);
	return 0;
}

static struct tp_ib_comm *sender(const struct ib_pair *pair) { return pair->send_comm; }
static struct tp_ib_comm *receiver(const struct ib_pair *pair) { return pair->recv_comm; }

static void all_sizes(struct ib_pair *pair)
{
	static const size_t all[] = { 0, 1, 8, 127, 128, 129, 4096, 8193, 65537, 1u << 20, (1u << 20) + 1, BYTES };

	for (size_t i = 0; i < TP_ARRAY_LEN(all); i++) assert_int_equal(ib_exchange(pair, 0, all[i], (int)i), ncclSuccess);
	for (int i = 0; i < 100; i++) assert_int_equal(ib_exchange(pair, (size_t)i * 64, 1000, i), ncclSuccess);
}

static void a_merged_device_says_what_it_is(void **state)
{
	struct tp_net_properties p;
	int count;

	(void)state;
	assert_int_equal(tp_net_ib.devices(&count), ncclSuccess);
	assert_int_equal(count, 2);
	assert_int_equal(tp_net_ib.properties(0, &p), ncclSuccess);
	assert_string_equal(p.name, "telpher0+telpher1");
	assert_int_equal(p.speed_mbps, 200000);
	assert_int_equal(tp_net_ib.properties(1, &p), ncclSuccess);
	assert_string_equal(p.name, "telpher2");
	assert_int_equal(tp_net_ib.properties(2, &p), ncclInternalError);
}

static void a_connection_uses_all_ports(void **state)
{
	struct ib_pair pair;

	(void)state;
	net_set_environment("NCCL_IB_QPS_PER_CONNECTION=2", NULL);
	ib_pair_open(&pair, BYTES);
	assert_int_equal(sender(&pair)->nused, 2);
	assert_int_equal(sender(&pair)->npaths, tp_ib_count_paths(&sender(&pair)->params, 0));
	assert_int_equal(receiver(&pair)->nused, 2);
	for (int i = 0; i < 2; i++) {
		assert_ptr_equal(sender(&pair)->used[i]->port, tp_ib_port(i));
		assert_ptr_equal(receiver(&pair)->used[i]->port, tp_ib_port(i));
	}
	uint32_t before[2][2];
	for (int i = 0; i < 4; i++) before[i / 2][i % 2] = sender(&pair)->used[i / 2]->qps[i % 2].posted;
	for (int i = 0; i < 8; i++) assert_int_equal(ib_exchange(&pair, 0, 1000, i), ncclSuccess);
	for (int i = 0; i < 4; i++) assert_int_equal(sender(&pair)->used[i / 2]->qps[i % 2].posted - before[i / 2][i % 2], 2);
	/* A large one goes over both ports. */
	assert_int_equal(ib_exchange(&pair, 0, BYTES, 1), ncclSuccess);
	assert_int_equal(sender(&pair)->used[0]->qps[0].posted - before[0][0], 3);
	assert_int_equal(sender(&pair)->used[1]->qps[0].posted - before[1][0], 3);
	all_sizes(&pair);
	ib_pair_close(&pair);
}

static void every_port_shares_a_message_where_that_is_asked_for(void **state)
{
	struct ib_pair pair;

	(void)state;
	net_set_environment("NCCL_IB_QPS_PER_CONNECTION=3", "NCCL_IB_SPLIT_DATA_ON_QPS=1", "NCCL_IB_ADAPTIVE_ROUTING=1", NULL);
	ib_pair_open(&pair, BYTES);
	all_sizes(&pair);
	ib_pair_close(&pair);
}

static void many_are_outstanding_over_all_ports(void **state)
{
	void *sends[TP_NET_MAX_REQUESTS], *receives[TP_NET_MAX_REQUESTS];
	size_t got, each = BYTES / TP_NET_MAX_REQUESTS;
	struct ib_pair pair;

	(void)state;
	ib_pair_open(&pair, BYTES);
	for (int round = 0; round < 10; round++) {
		net_fill(pair.from, BYTES, (uint32_t)round);
		/* The last receives are large by their room. */
		for (size_t i = 0; i < TP_NET_MAX_REQUESTS; i++) assert_non_null(receives[i] = ib_recv(&pair, each * i, i % 3 || i > 20 ? each : 1u << 20, 1));
		for (size_t i = 0; i < TP_NET_MAX_REQUESTS; i++) assert_non_null(sends[i] = ib_send(&pair, each * i, each - i, 1));
		for (size_t i = 0; i < TP_NET_MAX_REQUESTS; i++) {
			assert_int_equal(ib_wait_both(sends[i], receives[i], &got), ncclSuccess);
			assert_int_equal(got, each - i);
			assert_memory_equal(pair.from + each * i, pair.to + each * i, got);
		}
	}
	ib_pair_close(&pair);
}

static void one_port_meets_two(void **state)
{
	struct ib_pair pair;

	(void)state;
	net_set_environment("NCCL_IB_QPS_PER_CONNECTION=2", "TELPHER_IB_PATHS=1", NULL);
	ib_pair_open_on(&pair, BYTES, 1, 0);
	assert_int_equal(sender(&pair)->nused, 2);
	assert_int_equal(receiver(&pair)->nused, 2);
	for (int i = 0; i < 2; i++) assert_ptr_equal(sender(&pair)->used[i]->port, tp_ib_port(2));
	assert_ptr_not_equal(receiver(&pair)->used[0]->port, receiver(&pair)->used[1]->port);
	assert_int_equal(sender(&pair)->ncontexts, 1);
	assert_int_equal(receiver(&pair)->ncontexts, 2);
	all_sizes(&pair);
	ib_pair_close(&pair);
}

static void memory_is_registered_with_every_card(void **state)
{
	struct ib_pair pair;
	size_t before[2];

	(void)state;
	for (int i = 0; i < 2; i++) before[i] = tp_ib_reg_count(tp_ib_port(i)->context);
	ib_pair_open(&pair, BYTES);
	for (int i = 0; i < 2; i++) assert_int_equal(tp_ib_reg_count(tp_ib_port(i)->context), before[i] + 2);
	ib_pair_close(&pair);
	for (int i = 0; i < 2; i++) assert_int_equal(tp_ib_reg_count(tp_ib_port(i)->context), before[i]);
}

static void an_eighth_port_is_one_more(void **state)
{
	struct ib_pair pair;

	(void)state;
	net_set_environment("NCCL_IB_HCA=telpher", "NCCL_NET_FORCE_MERGE", "NCCL_NET_MERGE_LEVEL=SYS", NULL);
	tp_ib_forget_devices();
	assert_int_equal(tp_net_ib.init(), ncclSuccess);
	assert_int_equal(tp_ib_device_count(), 1);
	ib_pair_open(&pair, BYTES);
	assert_int_equal(sender(&pair)->nused, 8);
	assert_int_equal(tp_ib_count_paths(&sender(&pair)->params, 0), 16);
	assert_int_equal(sender(&pair)->npaths, 16);
	all_sizes(&pair);
	ib_pair_close(&pair);
}

static const struct tp_verbs *whole;

static int refuses_to_connect(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
	return attr->qp_state == IBV_QPS_RTR ? EHOSTUNREACH : whole->modify_qp(qp, attr, mask);
}

/* It is used without it, and not in silence. */
static void a_port_that_cannot_be_connected_is_told(void **state)
{
	struct tp_ib_context *context = tp_ib_port(1)->context;
	struct tp_verbs broken = *context->verbs;
	struct ib_pair pair;

	(void)state;
	net_set_environment("TELPHER_IB_PATHS=1", NULL);
	whole = context->verbs;
	broken.modify_qp = refuses_to_connect;
	context->verbs = &broken;
	net_log_capture();
	ib_pair_open(&pair, BYTES);
	assert_int_equal(sender(&pair)->nused, 1);
	assert_ptr_equal(sender(&pair)->used[0]->port, tp_ib_port(0));
	context->verbs = whole;
	all_sizes(&pair);
	ib_pair_close(&pair);
	char *said = net_log_text();
	assert_non_null(strstr(said, "NCCL WARN NET/IB : rank 3 -> rank 5"));
	assert_non_null(strstr(said, "This connection begins over telpher0:1, and so may others"));
	free(said);
	net_log_end();
}

/* The queue pair that the receive just posted was announced at; those before are in *posted. */
static int announced_at(struct tp_ib_comm *comm, uint32_t *posted)
{
	int found = -1;

	for (int g = 0, q; g < tp_ib_qps_in_use(comm); g++) {
		struct tp_ib_path *path = tp_ib_path_at(comm, g, &q);
		if (path->qps[q].posted == posted[g]) continue;
		assert_int_equal(found, -1);
		posted[g] = path->qps[q].posted;
		found = g;
	}
	return found;
}

/* A card may repeat a write whose acknowledgement was lost: on another queue pair it would land on the entry of a later message. */
static void a_place_in_the_fifo_keeps_its_queue_pair(void **state)
{
	struct ib_pair pair;
	uint32_t posted[TP_IB_MAX_MERGED * TP_IB_MAX_QPS] = { 0 };
	int places[TP_IB_RING], at;
	void *receive, *send;

	(void)state;
	net_set_environment("NCCL_NET_FORCE_MERGE=telpher0,telpher1,telpher2", "NCCL_IB_QPS_PER_CONNECTION=16", NULL);
	tp_ib_forget_devices();
	ib_pair_open(&pair, 4096);
	assert_int_equal(tp_ib_qps_in_use(receiver(&pair)), 48);
	for (int i = 0; i < 3 * TP_IB_RING; i++) {
		assert_non_null(receive = ib_recv(&pair, 0, 64, 1));
		at = announced_at(receiver(&pair), posted);
		assert_true(at >= 0);
		if (i >= TP_IB_RING) assert_int_equal(at, places[i % TP_IB_RING]);
		places[i % TP_IB_RING] = at;
		assert_non_null(send = ib_send(&pair, 0, 64, 1));
		assert_int_equal(ib_wait_both(send, receive, NULL), ncclSuccess);
	}
	ib_pair_close(&pair);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(ports_of_one_card_are_a_device),
		cmocka_unit_test(virtual_functions_of_a_card_are_its_ports),
		cmocka_unit_test(a_level_says_how_far_apart_they_may_be),
		cmocka_unit_test(a_device_has_at_most_eight_ports_of_one_kind),
		cmocka_unit_test(those_that_are_named_belong_together),
		cmocka_unit_test(a_name_that_fits_nothing_is_told),
		cmocka_unit_test_setup(a_merged_device_says_what_it_is, card),
		cmocka_unit_test_setup(a_connection_uses_all_ports, card),
		cmocka_unit_test_setup(every_port_shares_a_message_where_that_is_asked_for, card),
		cmocka_unit_test_setup(many_are_outstanding_over_all_ports, card),
		cmocka_unit_test_setup(one_port_meets_two, card),
		cmocka_unit_test_setup(memory_is_registered_with_every_card, card),
		cmocka_unit_test_setup(an_eighth_port_is_one_more, card),
		cmocka_unit_test_setup(a_port_that_cannot_be_connected_is_told, card),
		cmocka_unit_test_setup(a_place_in_the_fifo_keeps_its_queue_pair, card),
	};

	setenv("TELPHER_VERBS_DEVICES", "8", 1);
	return cmocka_run_group_tests(tests, NULL, NULL);
}

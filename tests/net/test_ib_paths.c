/* Paths of the IB transport that die and live again: a network namespace with two interfaces, a port of the software card on each,
 * both ends in one thread, every packet on the wire. Needs root and ip (skipped otherwise). */
#include <stdio.h>
#include "helper_ib.h"
#include "net/helper_namespaces.h"

#define BYTES (8u << 20)

static void fault(const char *faults)
{
	assert_true(shell("env LD_PRELOAD= %s verbs fault -p %d %s", TELPHER, (int)getpid(), faults));
}

static int two_ports(void **state)
{
	(void)state;
	ib_use_card(NULL);
	net_set_environment("NCCL_IB_TIMEOUT=14", "TELPHER_IB_PATH_TIMEOUT=1000", NULL);
	assert_int_equal(tp_net_ib.init(), ncclSuccess);
	assert_int_equal(tp_ib_port_count(), 2);
	fault("none");      /* of a test that failed */
	return 0;
}

static int one_port(void **state)
{
	two_ports(state);
	net_set_environment("NCCL_IB_HCA=telpher0", NULL);
	tp_ib_forget_devices();
	return 0;
}

static struct tp_ib_comm *sender(const struct ib_pair *pair) { return pair->send_comm; }

static void exchange_until(struct ib_pair *pair, int active)
{
	uint64_t until = tp_clock_ms() + 60000;

	for (int i = 0; sender(pair)->active != active; i++) {
		assert_int_equal(ib_exchange(pair, (size_t)(i % 100) * 1000, 1000, i), ncclSuccess);
		assert_true(tp_clock_ms() < until);
	}
}

static void messages(struct ib_pair *pair, int count)
{
	for (int i = 0; i < count; i++) assert_int_equal(ib_exchange(pair, (size_t)i * 1000, (size_t)i * 517 + 1, i), ncclSuccess);
}

static void a_connection_has_a_path_over_each_port(void **state)
{
	struct ib_pair pair;

	(void)state;
	ib_pair_open(&pair, BYTES);
	assert_int_equal(sender(&pair)->npaths, 2);
	assert_int_equal(sender(&pair)->active, 0);
	assert_string_equal(sender(&pair)->paths[0].gid.text, "::ffff:10.198.0.1");
	assert_memory_equal(sender(&pair)->paths[0].remote.gid, sender(&pair)->paths[0].gid.raw, 16);
	assert_string_equal(sender(&pair)->paths[1].gid.text, "::ffff:10.198.1.1");
	assert_memory_equal(sender(&pair)->paths[1].remote.gid, sender(&pair)->paths[1].gid.raw, 16);
	messages(&pair, 50);
	ib_pair_close(&pair);
}

static void a_path_that_falls_silent_is_left_and_taken_back(void **state)
{
	struct ib_pair pair;

	(void)state;
	ib_pair_open(&pair, BYTES);
	messages(&pair, 20);
	fault("unroute=10.198.0.1,side=both");
	messages(&pair, 50);
	assert_int_equal(sender(&pair)->active, 1);
	assert_int_equal(sender(&pair)->switches, 1);
	fault("none");
	exchange_until(&pair, 0);
	messages(&pair, 50);
	ib_pair_close(&pair);
}

/* As a chunk that is lent: its header, and the rest from where it lies, which is another registration. */
static void *send_lent(struct ib_pair *pair, void *lent_memory, size_t offset, size_t bytes)
{
	struct iovec parts[2] = { { pair->from + offset, 12 }, { pair->from + offset + 12, bytes - 12 } };
	void *memories[2] = { pair->send_memory, lent_memory }, *request = NULL;

	while (!request) {
		if (tp_net_ib.isendv(pair->send_comm, parts, 2, 1, memories, &request) != ncclSuccess) return NULL;
		if (!request && tp_ib_progress(pair->recv_comm) != ncclSuccess) return NULL;
		if (!request) sched_yield();
	}
	return request;
}

/* A path dies with half of it on its way; then once more, in peace. */
static void leave_with_much_outstanding(size_t each, size_t count, bool lent)
{
	void *lent_memory = NULL;
	struct ib_pair pair;
	void *sends[TP_NET_MAX_REQUESTS], *receives[TP_NET_MAX_REQUESTS];
	size_t got, bytes = each * count;

	net_set_environment("NCCL_IB_QPS_PER_CONNECTION=2", NULL);
	ib_pair_open(&pair, TP_MAX(bytes, BYTES));
	if (lent) assert_int_equal(tp_net_ib.reg_memory(pair.send_comm, pair.from, bytes, TP_NET_HOST, &lent_memory), ncclSuccess);
	messages(&pair, 1);
	for (int round = 0; round < 2; round++) {
		net_fill(pair.from, bytes, (uint32_t)round);
		for (size_t i = 0; i < count; i++) assert_non_null(receives[i] = ib_recv(&pair, each * i, each, 1));
		for (size_t i = 0; i < count / 2; i++) assert_non_null(sends[i] = lent ? send_lent(&pair, lent_memory, each * i, each - i) : ib_send(&pair, each * i, each - i, 1));
		if (round == 0) fault("unroute=10.198.0.1,side=both");
		for (size_t i = count / 2; i < count; i++) assert_non_null(sends[i] = lent ? send_lent(&pair, lent_memory, each * i, each - i) : ib_send(&pair, each * i, each - i, 1));
		for (size_t i = 0; i < count; i++) {
			assert_int_equal(ib_wait_both(sends[i], receives[i], &got), ncclSuccess);
			assert_int_equal(got, each - i);
			assert_memory_equal(pair.from + each * i, pair.to + each * i, got);
			/* It is the program's now: nothing may write here any more, nor read there. */
			memset(pair.to + each * i, 0xa5, each);
			if (lent) memset(pair.from + each * i, 0x5a, each);
		}
		assert_int_equal(pair.to[0], 0xa5);
		if (memcmp(pair.to, pair.to + 1, bytes - 1) != 0) fail_msg("something was written once more");
	}
	assert_int_equal(sender(&pair)->switches, 1);
	fault("none");
	if (lent) assert_int_equal(tp_net_ib.dereg_memory(pair.send_comm, lent_memory), ncclSuccess);
	ib_pair_close(&pair);
}

static void what_was_outstanding_arrives_once(void **state)
{
	(void)state;
	leave_with_much_outstanding(200000, TP_NET_MAX_REQUESTS, false);
}

static void what_was_lent_arrives_once(void **state)
{
	(void)state;
	leave_with_much_outstanding(200000, TP_NET_MAX_REQUESTS, true);
	leave_with_much_outstanding((1u << 20) + 1000, 8, true);
}

static void what_was_outstanding_over_merged_ports_arrives_once(void **state)
{
	(void)state;
	leave_with_much_outstanding((1u << 20) + 1000, 8, false);
}

static void a_port_that_goes_down_is_left_and_taken_back(void **state)
{
	struct ib_pair pair;

	(void)state;
	ib_pair_open(&pair, BYTES);
	messages(&pair, 20);
	assert_true(shell("ip link set tp0 down"));
	exchange_until(&pair, 1);
	messages(&pair, 20);
	assert_true(shell("ip link set tp0 up"));
	exchange_until(&pair, 0);
	ib_pair_close(&pair);
}

static ncclResult_t exchange_until_it_fails(struct ib_pair *pair)
{
	ncclResult_t result = ncclSuccess;
	uint64_t since = tp_clock_ms();

	for (int i = 0; i < 100000 && result == ncclSuccess; i++) result = ib_exchange(pair, 0, 1000, i);
	print_message("an error after %llu ms: %s\n", (unsigned long long)(tp_clock_ms() - since), tp_log_last_error());
	return result;
}

static void the_only_path_falls_silent_and_is_named(void **state)
{
	struct ib_pair pair;

	(void)state;
	ib_pair_open(&pair, BYTES);
	messages(&pair, 20);
	fault("unroute=10.198.0.1,side=both");
	assert_int_equal(exchange_until_it_fails(&pair), ncclRemoteError);
	assert_non_null(strstr(tp_log_last_error(), "telpher0:1"));
	assert_non_null(strstr(tp_log_last_error(), "::ffff:10.198.0.1"));
	fault("none");
	ib_pair_close(&pair);
}

/* The queue pair itself would take two minutes, so that a machine on which life signs take a second each is no reason to fail. */
static void life_signs_find_out_before_the_card_does(void **state)
{
	struct ib_pair pair;

	(void)state;
	net_set_environment("NCCL_IB_TIMEOUT=22", NULL);
	ib_pair_open(&pair, BYTES);
	messages(&pair, 20);
	fault("unroute=10.198.0.1,side=both");
	assert_int_equal(exchange_until_it_fails(&pair), ncclRemoteError);
	assert_non_null(strstr(tp_log_last_error(), "telpher0:1"));
	assert_non_null(strstr(tp_log_last_error(), "although the peer answers over TCP"));
	fault("none");
	ib_pair_close(&pair);
}

/* As on a busy machine, whose owner comes by a few times a second: its card may be as late, so that a path gets as many looks as usual, and takes longer. */
static void a_path_whose_owner_seldom_comes_by_has_longer_and_is_named_in_the_end(void **state)
{
	enum { TIMEOUT_MS = 400, ROUND_MS = 40, MOST = 40 };
	struct ib_pair pair;
	struct tp_ib_comm *receiver;
	ncclResult_t result = ncclSuccess;
	int looks = 0;

	(void)state;
	net_set_environment("NCCL_IB_TIMEOUT=20", "TELPHER_IB_PATH_TIMEOUT=400", NULL);
	ib_pair_open(&pair, BYTES);
	receiver = pair.recv_comm;
	messages(&pair, 20);
	fault("unroute=10.198.0.1,side=both");
	assert_non_null(ib_recv(&pair, 0, 1000, 1));
	for (; looks < MOST && result == ncclSuccess; looks++) {
		usleep(120000);
		tp_ib_poll_path(receiver, &receiver->paths[0]);
		result = tp_ib_care(receiver);
	}
	fault("none");
	ib_pair_close(&pair);
	assert_int_equal(result, ncclRemoteError);
	assert_in_range(looks, TIMEOUT_MS / ROUND_MS, MOST);
	assert_non_null(strstr(tp_log_last_error(), "although the peer answers over TCP"));
}

static void leave_first_path(struct ib_pair *pair)
{
	messages(pair, 20);
	tp_ib_path_failed(sender(pair), &sender(pair)->paths[0], "it is broken by a test");
	exchange_until(pair, 1);
}

static void a_path_is_not_left_for_one_that_lives_on_one_side_only(void **state)
{
	struct ib_pair pair;
	struct tp_ib_comm *receiver;

	(void)state;
	ib_pair_open(&pair, BYTES);
	receiver = pair.recv_comm;
	leave_first_path(&pair);
	for (int i = 0; sender(&pair)->paths[0].state != TP_IB_PATH_LIVE || receiver->paths[0].state != TP_IB_PATH_LIVE; i++)
		assert_int_equal(ib_exchange(&pair, 0, 1000, i), ncclSuccess);
	if (sender(&pair)->active == 1) {
		tp_ib_path_failed(receiver, &receiver->paths[0], "it is broken by a test");
		receiver->paths[0].next_ms = UINT64_MAX;
		sender(&pair)->paths[0].since_ms = 1;
		for (uint64_t until = tp_clock_ms() + 1500; tp_clock_ms() < until;) assert_int_equal(ib_exchange(&pair, 0, 1000, 1), ncclSuccess);
		assert_int_equal(sender(&pair)->active, 1);
		receiver->paths[0].next_ms = 0;
	}
	exchange_until(&pair, 0);
	ib_pair_close(&pair);
}

static void a_path_that_is_coming_to_life_is_waited_for(void **state)
{
	struct ib_pair pair;

	(void)state;
	net_set_environment("TELPHER_IB_PATH_TIMEOUT=5000", NULL);
	ib_pair_open(&pair, BYTES);
	leave_first_path(&pair);
	for (int i = 0; sender(&pair)->paths[0].state < TP_IB_PATH_REVIVING; i++) assert_int_equal(ib_exchange(&pair, 0, 1000, i), ncclSuccess);
	tp_ib_path_failed(sender(&pair), &sender(&pair)->paths[1], "it is broken by a test");
	messages(&pair, 50);
	ib_pair_close(&pair);
}

/* The memory of what was acknowledged is the program's again: it can't be sent once more. */
static void what_was_acknowledged_and_is_not_there_is_an_error(void **state)
{
	struct ib_pair pair;
	struct tp_ib_record lie;
	ncclResult_t result = ncclSuccess;

	(void)state;
	ib_pair_open(&pair, BYTES);
	messages(&pair, 20);
	tp_ib_record_start(&lie, TP_IB_SWITCH);
	lie.as.change.epoch = 1;
	lie.as.change.dead = 1;
	lie.as.change.below = 19;
	assert_int_equal(tp_ib_control_send(&((struct tp_ib_comm *)pair.recv_comm)->control, &lie), 0);
	while (result == ncclSuccess) result = tp_ib_progress(pair.send_comm);
	assert_int_equal(result, ncclInternalError);
	assert_non_null(strstr(tp_log_last_error(), "message 19 was acknowledged"));
	ib_pair_close(&pair);
}

static void a_port_without_an_address_is_left_out(void **state)
{
	struct ib_pair pair;

	(void)state;
	assert_true(shell("ip addr del 10.198.1.1/24 dev tp1"));
	for (struct tp_ib_gid_choice gid; tp_ib_port_has_gid(tp_ib_port(1), &gid);) usleep(20000);
	ib_pair_open(&pair, BYTES);
	assert_int_equal(sender(&pair)->npaths, 1);
	messages(&pair, 20);
	ib_pair_close(&pair);
	assert_true(shell("ip addr add 10.198.1.1/24 dev tp1"));
	for (struct tp_ib_gid_choice gid; !tp_ib_port_has_gid(tp_ib_port(1), &gid);) usleep(20000);
}

static void the_only_port_goes_down_and_is_named(void **state)
{
	struct ib_pair pair;

	(void)state;
	ib_pair_open(&pair, BYTES);
	messages(&pair, 20);
	assert_true(shell("ip link set tp0 down"));
	assert_int_equal(exchange_until_it_fails(&pair), ncclRemoteError);
	assert_non_null(strstr(tp_log_last_error(), "telpher0:1"));
	assert_true(shell("ip link set tp0 up"));
	while (!tp_ib_port_is_active(tp_ib_port(0))) usleep(20000);
	ib_pair_close(&pair);
}

static void failover_can_be_switched_off(void **state)
{
	struct ib_pair pair;

	(void)state;
	net_set_environment("NCCL_IB_RESILIENCY_PORT_FAILOVER=0", NULL);
	ib_pair_open(&pair, BYTES);
	fault("unroute=10.198.0.1,side=both");
	assert_int_equal(exchange_until_it_fails(&pair), ncclRemoteError);
	assert_non_null(strstr(tp_log_last_error(), "NCCL_IB_RESILIENCY_PORT_FAILOVER=0"));
	fault("none");
	ib_pair_close(&pair);
}

/* Its queue pair may go before the acknowledgement does. */
static void a_receiver_may_leave_when_it_has_all(void **state)
{
	(void)state;
	ib_receiver_leaves();
}

static void loss_is_repaired_without_leaving(void **state)
{
	struct ib_pair pair;

	(void)state;
	ib_pair_open(&pair, BYTES);
	fault("drop=0.01,seed=3");
	messages(&pair, 200);
	assert_int_equal(sender(&pair)->switches, 0);
	fault("none");
	ib_pair_close(&pair);
}

/* Both ports as one device. */
static int merged(void **state)
{
	two_ports(state);
	net_set_environment("NCCL_NET_MERGE_LEVEL=SYS", NULL);
	tp_ib_forget_devices();
	assert_int_equal(tp_net_ib.init(), ncclSuccess);
	assert_int_equal(tp_ib_device_count(), 1);
	return 0;
}

static void use_until(struct ib_pair *pair, int ports)
{
	uint64_t until = tp_clock_ms() + 60000;

	for (int i = 0; sender(pair)->nused != ports; i++) {
		assert_int_equal(ib_exchange(pair, (size_t)(i % 100) * 1000, i % 8 ? 1000 : 2u << 20, i), ncclSuccess);
		assert_true(tp_clock_ms() < until);
	}
}

static void a_silent_port_of_a_merged_device_leaves_the_other(void **state)
{
	struct ib_pair pair;

	(void)state;
	ib_pair_open(&pair, BYTES);
	assert_int_equal(sender(&pair)->nused, 2);
	messages(&pair, 20);
	fault("unroute=10.198.1.1,side=both");
	use_until(&pair, 1);
	assert_ptr_equal(sender(&pair)->used[0]->port, tp_ib_port(0));
	assert_int_equal(sender(&pair)->switches, 1);
	messages(&pair, 20);
	fault("none");
	ib_pair_close(&pair);
}

static void a_merged_device_loses_a_port_and_gets_it_back(void **state)
{
	struct ib_pair pair;

	(void)state;
	ib_pair_open(&pair, BYTES);
	assert_true(shell("ip link set tp0 down"));
	use_until(&pair, 1);
	assert_ptr_equal(sender(&pair)->used[0]->port, tp_ib_port(1));
	messages(&pair, 20);
	assert_true(shell("ip link set tp0 up"));
	use_until(&pair, 2);
	ib_pair_close(&pair);
}

/* The port that lives is in use, and is set up afresh. */
static void a_merged_device_without_a_second_way_goes_on_too(void **state)
{
	struct ib_pair pair;

	(void)state;
	net_set_environment("TELPHER_IB_PATHS=1", NULL);
	ib_pair_open(&pair, BYTES);
	assert_int_equal(sender(&pair)->npaths, 2);
	assert_true(shell("ip link set tp0 down"));
	use_until(&pair, 1);
	assert_ptr_equal(sender(&pair)->used[0]->port, tp_ib_port(1));
	messages(&pair, 20);
	assert_true(shell("ip link set tp0 up"));
	while (!tp_ib_port_is_active(tp_ib_port(0))) usleep(20000);
	ib_pair_close(&pair);
}

static void a_merged_device_without_any_port_is_named(void **state)
{
	struct ib_pair pair;

	(void)state;
	ib_pair_open(&pair, BYTES);
	messages(&pair, 20);
	assert_true(shell("ip link set tp0 down && ip link set tp1 down"));
	assert_int_equal(exchange_until_it_fails(&pair), ncclRemoteError);
	assert_non_null(strstr(tp_log_last_error(), "DOWN"));
	assert_true(shell("ip link set tp0 up && ip link set tp1 up"));
	for (int i = 0; i < 2; i++)
		while (!tp_ib_port_is_active(tp_ib_port(i))) usleep(20000);
	ib_pair_close(&pair);
}

static void what_fails_on_every_path_is_an_error(void **state)
{
	struct ib_pair pair;
	struct tp_ib_memory *good, bad;
	struct ibv_mr forged[TP_IB_MAX_KEYS];
	void *receive, *send;

	(void)state;
	/* On a busy machine it takes a while until a path that was left lives again; one that isn't waited for ends the connection sooner. */
	net_set_environment("TELPHER_IB_PATH_TIMEOUT=60000", NULL);
	ib_pair_open(&pair, 4096);
	good = pair.send_memory;
	bad = *good;
	for (int k = 0; k < TP_IB_MAX_KEYS; k++) {
		if (!good->mrs[k]) continue;
		forged[k] = *good->mrs[k];
		forged[k].lkey ^= 0x5a5a5a;
		bad.mrs[k] = &forged[k];
	}
	receive = ib_recv(&pair, 0, 1000, 1);
	pair.send_memory = &bad;
	send = ib_send(&pair, 0, 1000, 1);
	if (send) assert_int_not_equal(ib_wait_both(send, receive, NULL), ncclSuccess);
	/* On a busy machine the other path may not have come back to life in time: then that is the error, of the same cause. */
	if (!strstr(tp_log_last_error(), "fails on every path")) assert_non_null(strstr(tp_log_last_error(), "there is no other path: "));
	print_message("%s\n", tp_log_last_error());
	pair.send_memory = good;
	ib_pair_close(&pair);
}

/* A message that fails wherever it is sent: what its first switch counts for. */
static uint32_t fruitless_after_one_switch(int messages_before)
{
	struct tp_ib_memory *good, bad;
	struct ibv_mr forged[TP_IB_MAX_KEYS];
	struct ib_pair pair;
	uint32_t switches, fruitless;

	ib_pair_open(&pair, 4096);
	for (int i = 0; i < messages_before; i++) assert_int_equal(ib_exchange(&pair, 0, 1000, i), ncclSuccess);
	good = pair.send_memory;
	bad = *good;
	for (int k = 0; k < TP_IB_MAX_KEYS; k++) {
		if (!good->mrs[k]) continue;
		forged[k] = *good->mrs[k];
		forged[k].lkey ^= 0x5a5a5a;
		bad.mrs[k] = &forged[k];
	}
	switches = sender(&pair)->switches;
	assert_non_null(ib_recv(&pair, 0, 1000, 1));
	pair.send_memory = &bad;
	assert_non_null(ib_send(&pair, 0, 1000, 1));
	while (sender(&pair)->switches == switches) {
		assert_int_equal(tp_ib_progress(pair.send_comm), ncclSuccess);
		assert_int_equal(tp_ib_progress(pair.recv_comm), ncclSuccess);
	}
	fruitless = sender(&pair)->fruitless;
	pair.send_memory = good;
	ib_pair_close(&pair);
	return fruitless;
}

static void the_first_message_is_tried_as_often_as_any_other(void **state)
{
	(void)state;
	assert_int_equal(fruitless_after_one_switch(3), 0);
	assert_int_equal(fruitless_after_one_switch(0), 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup(a_connection_has_a_path_over_each_port, two_ports),
		cmocka_unit_test_setup(what_fails_on_every_path_is_an_error, two_ports),
		cmocka_unit_test_setup(the_first_message_is_tried_as_often_as_any_other, two_ports),
		cmocka_unit_test_setup(a_path_that_falls_silent_is_left_and_taken_back, two_ports),
		cmocka_unit_test_setup(what_was_outstanding_arrives_once, two_ports),
		cmocka_unit_test_setup(what_was_lent_arrives_once, two_ports),
		cmocka_unit_test_setup(a_port_that_goes_down_is_left_and_taken_back, two_ports),
		cmocka_unit_test_setup(the_only_path_falls_silent_and_is_named, one_port),
		cmocka_unit_test_setup(life_signs_find_out_before_the_card_does, one_port),
		cmocka_unit_test_setup(a_path_whose_owner_seldom_comes_by_has_longer_and_is_named_in_the_end, one_port),
		cmocka_unit_test_setup(a_path_is_not_left_for_one_that_lives_on_one_side_only, two_ports),
		cmocka_unit_test_setup(a_path_that_is_coming_to_life_is_waited_for, two_ports),
		cmocka_unit_test_setup(what_was_acknowledged_and_is_not_there_is_an_error, two_ports),
		cmocka_unit_test_setup(the_only_port_goes_down_and_is_named, one_port),
		cmocka_unit_test_setup(failover_can_be_switched_off, two_ports),
		cmocka_unit_test_setup(a_receiver_may_leave_when_it_has_all, two_ports),
		cmocka_unit_test_setup(loss_is_repaired_without_leaving, two_ports),
		cmocka_unit_test_setup(a_port_without_an_address_is_left_out, two_ports),
		cmocka_unit_test_setup(a_silent_port_of_a_merged_device_leaves_the_other, merged),
		cmocka_unit_test_setup(a_merged_device_loses_a_port_and_gets_it_back, merged),
		cmocka_unit_test_setup(what_was_outstanding_over_merged_ports_arrives_once, merged),
		cmocka_unit_test_setup(a_merged_device_without_a_second_way_goes_on_too, merged),
		cmocka_unit_test_setup(a_merged_device_without_any_port_is_named, merged),
	};

	setenv("TELPHER_VERBS_DEVICES", "2", 1);
	setenv("TELPHER_VERBS_IFNAME", "tp0,tp1", 1);
	setenv("TELPHER_VERBS_CARRIER", "wire", 1);
	if (!namespaces_enter_own(198)) {
		fprintf(stderr, "skipped: needs root, ip and network namespaces\n");
		return 77;
	}
	return cmocka_run_group_tests(tests, NULL, NULL);
}

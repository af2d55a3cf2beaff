/* libnccl-net-telpher.so over sockets, driven as NCCL drives a NET plug-in; both ends in this one thread. */
#include "helper_export.h"

static int start(void **state)
{
	(void)state;
	setenv("NCCL_SOCKET_IFNAME", "lo", 1);
	setenv("NCCL_IB_DISABLE", "1", 1);
	setenv("TELPHER_PLUGIN_NET", "Socket", 1);
	return 0;
}

static void every_version_carries_messages_of_every_size(void **state) { (void)state; export_runs_every_version(); }
static void receives_are_grouped_as_far_as_is_said(void **state) { (void)state; export_groups(); }
static void requests_are_many_and_no_more(void **state) { (void)state; export_keeps_many_requests(); }
static void what_is_too_long_is_refused_with_words(void **state) { (void)state; export_refuses_what_is_too_long("WARN NET/Socket : peer"); }
static void closing_with_requests_in_flight_is_safe(void **state) { (void)state; export_closes_with_requests_in_flight(); }
static void connections_under_way_end_with_their_communicator(void **state) { (void)state; export_gives_up_connections_under_way(); }

static void a_group_of_more_than_is_said_is_refused(void **state)
{
	struct export_pair pair;
	void *at[2], *memory[2], *request = NULL;
	size_t rooms[2] = { 8, 8 };
	int tags[2] = { 1, 2 };

	(void)state;
	export_open(11);
	assert_int_equal(export_max_recvs(), 1);
	export_pair_open(&pair, 64);
	for (int i = 0; i < 2; i++) at[i] = pair.to + 8 * i, memory[i] = pair.recv_memory;
	assert_int_not_equal(export_irecv(pair.recv_comm, 2, at, rooms, tags, memory, &request), ncclSuccess);
	assert_null(request);
	export_pair_close(&pair);
	export_close();
}

static void properties_are_what_nccl_wants_to_know(void **state)
{
	struct tp_abi_properties_v11 p;
	int count = 0;

	(void)state;
	export_open(11);
	assert_string_equal(export_v11()->name, "Telpher");
	assert_int_equal(export_v11()->devices(&count), ncclSuccess);
	assert_int_equal(count, 1);
	memset(&p, 0xa5, sizeof(p));
	assert_int_equal(export_v11()->properties(0, &p), ncclSuccess);
	assert_string_equal(p.name, "lo");
	assert_null(p.pci_path);
	assert_int_equal(p.memory, TP_ABI_PTR_HOST);
	assert_int_equal(p.reg_is_global, 0);
	assert_int_equal(p.force_flush, 0);
	assert_int_equal(p.device_type, TP_ABI_DEVICE_HOST);
	assert_int_equal(p.parts.ndevs, 1);
	assert_int_equal(p.parts.devs[0], 0);
	assert_int_equal(p.max_p2p_bytes, 1 << 30);
	assert_int_equal(p.max_multi_requests, 1);
	assert_true(p.speed_mbps > 0 && p.max_comms > 0);
	assert_int_not_equal(export_v11()->properties(1, &p), ncclSuccess);
	assert_non_null(strstr(export_log(), "WARN NET/Telpher : there is no device 1 (there are 1)"));
	assert_int_equal(export_v11()->set_attributes(NULL, NULL), ncclSuccess);
	export_close();
}

/* Our lines go where NCCL's go, and to no other place. */
static void the_log_is_the_hosts(void **state)
{
	(void)state;
	export_open(8);
	assert_non_null(strstr(export_log(), "INFO NET/Socket : Using [0]lo:127.0.0.1<0>\n"));
	assert_non_null(strstr(export_log(), "INFO NET/Telpher : Using network Socket\n"));
	export_close();
}

static void handles_of_others_are_refused(void **state)
{
	uint64_t handle[TP_ABI_HANDLE_BYTES / 8] = { 1, 2, 3 };
	void *listener, *comm = &listener;

	(void)state;
	export_open(8);
	assert_int_not_equal(export_connect(handle, &comm), ncclSuccess);
	assert_null(comm);
	assert_non_null(strstr(export_log(), "isn't one of this plug-in's"));
	assert_int_equal(export_listen(handle, &listener), ncclSuccess);
	memcpy((char *)handle + 8, "IB", 3);
	memset((char *)handle + 11, 0, 5);
	assert_int_not_equal(export_connect(handle, &comm), ncclSuccess);
	assert_non_null(strstr(export_log(), "the peer listens on network IB"));
	assert_int_equal(export_close_listen(listener), ncclSuccess);
	export_close();
}

static void only_host_memory_can_be_registered(void **state)
{
	struct export_pair pair;
	void *memory = NULL;

	(void)state;
	export_open(8);
	export_pair_open(&pair, 64);
	assert_int_not_equal(export_v8()->reg_mr(pair.send_comm, pair.from, 64, TP_ABI_PTR_CUDA, &memory), ncclSuccess);
	assert_int_not_equal(export_v8()->reg_mr_dmabuf(pair.send_comm, pair.from, 64, TP_ABI_PTR_CUDA, 0, 0, &memory), ncclSuccess);
	assert_non_null(strstr(export_log(), "this device takes no DMA-BUF"));
	export_pair_close(&pair);
	export_close();
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(properties_are_what_nccl_wants_to_know),
		cmocka_unit_test(the_log_is_the_hosts),
		cmocka_unit_test(every_version_carries_messages_of_every_size),
		cmocka_unit_test(receives_are_grouped_as_far_as_is_said),
		cmocka_unit_test(a_group_of_more_than_is_said_is_refused),
		cmocka_unit_test(requests_are_many_and_no_more),
		cmocka_unit_test(what_is_too_long_is_refused_with_words),
		cmocka_unit_test(closing_with_requests_in_flight_is_safe),
		cmocka_unit_test(connections_under_way_end_with_their_communicator),
		cmocka_unit_test(handles_of_others_are_refused),
		cmocka_unit_test(only_host_memory_can_be_registered),
	};
	return cmocka_run_group_tests(tests, start, NULL);
}

/* libnccl-net-telpher.so over RDMA on the software card, driven as NCCL drives a NET plug-in. */
#include "helper_export.h"

static int start(void **state)
{
	(void)state;
	setenv("NCCL_SOCKET_IFNAME", "lo", 1);
	setenv("NCCL_IB_HCA", "telpher", 1);
	setenv("TELPHER_VERBS_HIDE_REAL", "1", 1);
	setenv("TELPHER_PLUGIN_NET", "IB", 1);
	return 0;
}

static void every_version_carries_messages_of_every_size(void **state) { (void)state; export_runs_every_version(); }
static void receives_are_grouped_as_far_as_is_said(void **state) { (void)state; export_groups(); }
static void requests_are_many_and_no_more(void **state) { (void)state; export_keeps_many_requests(); }
static void tags_may_come_in_any_order(void **state) { (void)state; export_tags_may_come_in_any_order(); }
static void what_is_too_long_is_refused_with_words(void **state) { (void)state; export_refuses_what_is_too_long("for a receive of at most 100 bytes"); }
static void closing_with_requests_in_flight_is_safe(void **state) { (void)state; export_closes_with_requests_in_flight(); }
static void connections_under_way_end_with_their_communicator(void **state) { (void)state; export_gives_up_connections_under_way(); }

static void properties_are_what_nccl_wants_to_know(void **state)
{
	struct tp_abi_properties_v11 p;

	(void)state;
	export_open(11);
	assert_int_equal(export_v11()->properties(0, &p), ncclSuccess);
	assert_string_equal(p.name, "telpher0");
	assert_int_equal(p.port, 1);
	/* The card reaches GPU memory; that of a machine without one is never offered to it. */
	assert_int_equal(p.memory, TP_ABI_PTR_HOST | TP_ABI_PTR_CUDA | TP_ABI_PTR_DMABUF);
	assert_int_equal(p.max_recvs, TP_NET_MAX_RECVS);
	assert_int_equal(p.device_type, TP_ABI_DEVICE_HOST);
	assert_true(p.guid != 0 && p.max_comms > 0 && p.speed_mbps > 0);
	assert_true(p.max_p2p_bytes > 0 && p.max_p2p_bytes <= 1 << 30);
	assert_non_null(strstr(export_log(), "INFO NET/Telpher : Using network IB\n"));
	export_close();
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(properties_are_what_nccl_wants_to_know),
		cmocka_unit_test(every_version_carries_messages_of_every_size),
		cmocka_unit_test(receives_are_grouped_as_far_as_is_said),
		cmocka_unit_test(requests_are_many_and_no_more),
		cmocka_unit_test(tags_may_come_in_any_order),
		cmocka_unit_test(what_is_too_long_is_refused_with_words),
		cmocka_unit_test(closing_with_requests_in_flight_is_safe),
		cmocka_unit_test(connections_under_way_end_with_their_communicator),
	};
	return cmocka_run_group_tests(tests, start, NULL);
}

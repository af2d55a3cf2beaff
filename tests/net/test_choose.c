/* Which network is used, and what is said where it can't be. */
#include "helper_net.h"

static int fresh(void **state)
{
	(void)state;
	net_set_environment("NCCL_NET", "NCCL_SOCKET_IFNAME=lo", "NCCL_SOCKET_FAMILY", NULL);
	net_log_capture();
	return 0;
}

static int end(void **state)
{
	(void)state;
	net_log_end();
	return 0;
}

static void expect_line(const char *words)
{
	char *text = net_log_text();

	if (!strstr(text, words)) fail_msg("\"%s\" is not in the log:\n%s", words, text);
	free(text);
}

static void socket_is_used_unasked_and_said_as_nccl_says_it(void **state)
{
	const struct tp_net_ops *ops = NULL;

	(void)state;
	assert_int_equal(tp_net_choose(NULL, &ops), ncclSuccess);
	assert_ptr_equal(ops, &tp_net_socket);
	assert_null(tp_net_why_not(ops));
	tp_net_log_using(ops);
	expect_line("NCCL INFO NET/Socket : Using [0]lo:127.0.0.1<0>");
	expect_line("NCCL INFO Initialized NET plugin Socket");
	expect_line("NCCL INFO Assigned NET plugin Socket to comm");
	expect_line("NCCL INFO Using network Socket");
}

static void names_are_compared_without_regard_to_case(void **state)
{
	const struct tp_net_ops *ops = NULL;

	(void)state;
	assert_int_equal(tp_net_choose("sOCKET", &ops), ncclSuccess);
	net_set_environment("NCCL_NET=SOCKET", NULL);
	assert_int_equal(tp_net_choose(NULL, &ops), ncclSuccess);
}

static void an_unknown_network_is_an_error_that_lists_what_there_is(void **state)
{
	const struct tp_net_ops *ops = NULL;

	(void)state;
	assert_int_equal(tp_net_choose("Carrier Pigeon", &ops), ncclInvalidUsage);
	assert_null(ops);
	assert_non_null(strstr(tp_log_last_error(), "netName=Carrier Pigeon"));
	assert_non_null(strstr(tp_log_last_error(), "Socket (usable)"));
}

static void the_variable_wins_over_the_communicators_name(void **state)
{
	const struct tp_net_ops *ops = NULL;

	(void)state;
	net_set_environment("NCCL_NET=Carrier", NULL);
	assert_int_equal(tp_net_choose("Socket", &ops), ncclInvalidUsage);
	assert_non_null(strstr(tp_log_last_error(), "NCCL_NET=Carrier"));
}

static void an_unusable_network_says_why(void **state)
{
	const struct tp_net_ops *ops = NULL;

	(void)state;
	net_set_environment("NCCL_SOCKET_IFNAME==nosuchcard", NULL);
	assert_int_equal(tp_net_choose("Socket", &ops), ncclInvalidUsage);
	assert_non_null(strstr(tp_log_last_error(), "not usable: "));
	assert_non_null(strstr(tp_log_last_error(), "nosuchcard"));
	assert_non_null(strstr(tp_net_why_not(&tp_net_socket), "nosuchcard"));
	assert_int_equal(tp_net_choose(NULL, &ops), ncclInvalidUsage);
	assert_null(ops);
	/* It can be used again once it can. */
	net_set_environment("NCCL_SOCKET_IFNAME=lo", NULL);
	assert_int_equal(tp_net_choose(NULL, &ops), ncclSuccess);
	assert_null(tp_net_why_not(&tp_net_socket));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(socket_is_used_unasked_and_said_as_nccl_says_it, fresh, end),
		cmocka_unit_test_setup_teardown(names_are_compared_without_regard_to_case, fresh, end),
		cmocka_unit_test_setup_teardown(an_unknown_network_is_an_error_that_lists_what_there_is, fresh, end),
		cmocka_unit_test_setup_teardown(the_variable_wins_over_the_communicators_name, fresh, end),
		cmocka_unit_test_setup_teardown(an_unusable_network_says_why, fresh, end),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

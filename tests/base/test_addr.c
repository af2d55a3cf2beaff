#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/helper_base.h"

static int clean(void **s)
{
	(void)s;
	test_clean_environment();
	return 0;
}

static void good_texts_become_addresses_and_back(void **s)
{
	(void)s;
	static const struct { const char *text, *formatted; } cases[] = {
		{ "192.0.2.2:34567", "192.0.2.2<34567>" }, { "127.0.0.1:0", "127.0.0.1<0>" }, { "[::1]:80", "::1<80>" },
		{ "[2001:db8::1]:65535", "2001:db8::1<65535>" }, { "[fe80::1%lo]:5", "fe80::1%lo<5>" }, { "localhost:9", "127.0.0.1<9>" },
	};
	for (size_t i = 0; i < TP_ARRAY_LEN(cases); i++) {
		union tp_addr addr;
		char text[TP_ADDR_TEXT];
		if (strncmp(cases[i].text, "localhost", 9) == 0)
			test_set("NCCL_SOCKET_FAMILY", "AF_INET");
		assert_int_equal(tp_addr_parse(cases[i].text, "NCCL_COMM_ID", &addr), ncclSuccess);
		assert_string_equal(tp_addr_format(&addr, text), cases[i].formatted);
	}
}

static void bad_texts_are_refused_and_the_output_stays(void **s)
{
	(void)s;
	static const char *const cases[] = {
		"", ":", "host", "127.0.0.1", "127.0.0.1:", ":80", "127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1:8x", "127.0.0.1: 80", "[::1]", "[::1", "[::1]80",
		"::1:80", "[]:80", "[::1]:", "127.0.0.1:000080", "[::g]:80", "[fe80::1%nosuchif]:5",
	};
	union tp_addr addr = { 0 }, before = { 0 };
	for (size_t i = 0; i < TP_ARRAY_LEN(cases); i++) {
		assert_int_equal(tp_addr_parse_numeric(cases[i], "NCCL_COMM_ID", &addr), ncclInvalidArgument);
		assert_non_null(strstr(tp_log_last_error(), "NCCL_COMM_ID="));
		assert_memory_equal(&addr, &before, sizeof(addr));
	}
	assert_int_equal(tp_addr_parse(NULL, "NCCL_COMM_ID", &addr), ncclInvalidArgument);
}

static void a_host_name_without_an_address_of_the_family_is_refused(void **s)
{
	(void)s;
	union tp_addr addr;
	test_set("NCCL_SOCKET_FAMILY", "AF_INET6");
	assert_int_equal(tp_addr_parse("127.0.0.1:5", "NCCL_COMM_ID", &addr), ncclInvalidArgument);
	assert_non_null(strstr(tp_log_last_error(), "NCCL_SOCKET_FAMILY"));
}

static void the_longest_address_fits(void **s)
{
	(void)s;
	union tp_addr addr = { .v6 = { .sin6_family = AF_INET6, .sin6_port = htons(65535), .sin6_scope_id = UINT32_MAX } };
	char text[TP_ADDR_TEXT];
	memset(&addr.v6.sin6_addr, 0xff, 16);
	assert_string_equal(tp_addr_format(&addr, text), "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff%4294967295<65535>");
	addr.sa.sa_family = AF_UNIX;
	assert_string_equal(tp_addr_format(&addr, text), "address family 1");
}

static void interface_lists_mean_what_nccls_do(void **s)
{
	(void)s;
	static const struct { const char *spec, *name; bool allowed; } cases[] = {
		{ "eth", "eth0", true }, { "eth", "veth0", false }, { "eth0", "eth01", true }, { "=eth0", "eth01", false }, { "=eth0", "eth0", true },
		{ "ib,eth", "eth7", true }, { "ib,eth", "enp1s0", false }, { "^docker,lo", "eth0", true }, { "^docker,lo", "docker0", false },
		{ "^docker,lo", "lo", false }, { "^=eth0", "eth0", false }, { "^=eth0", "eth01", true }, { "=eth0,ib0", "ib0", true },
		{ "=eth0,ib0", "ib01", false }, { ",,eth", "eth0", true }, { ",", "eth0", false },
	};
	for (size_t i = 0; i < TP_ARRAY_LEN(cases); i++)
		assert_int_equal(tp_interface_allowed(cases[i].spec, cases[i].name), cases[i].allowed);
}

static void a_named_interface_is_found(void **s)
{
	(void)s;
	struct tp_interface list[8];
	int count = 0;
	static const char *const specs[] = { "lo", "=lo", "l", "nothing,lo" };
	for (size_t i = 0; i < TP_ARRAY_LEN(specs); i++) {
		test_set("NCCL_SOCKET_IFNAME", specs[i]);
		assert_int_equal(tp_socket_interfaces(list, 8, &count), ncclSuccess);
		assert_true(count >= 1);
		assert_string_equal(list[0].name, "lo");
		assert_int_equal(list[0].addr.sa.sa_family, AF_INET);
		assert_int_equal(ntohl(list[0].addr.v4.sin_addr.s_addr), INADDR_LOOPBACK);
	}
}

static void excluded_interfaces_are_not_used(void **s)
{
	(void)s;
	struct tp_interface list[8];
	int count = 0;
	test_set("NCCL_SOCKET_IFNAME", "^lo");
	ncclResult_t result = tp_socket_interfaces(list, 8, &count);
	for (int i = 0; i < count; i++)
		assert_string_not_equal(list[i].name, "lo");
	assert_int_equal(result, count > 0 ? ncclSuccess : ncclInvalidUsage);
}

static void no_interface_is_an_error_that_lists_what_there_is(void **s)
{
	(void)s;
	struct tp_interface list[8];
	int count = -1;
	test_set("NCCL_SOCKET_IFNAME", "=nosuchif");
	assert_int_equal(tp_socket_interfaces(list, 8, &count), ncclInvalidUsage);
	assert_int_equal(count, -1);
	assert_non_null(strstr(tp_log_last_error(), "NCCL_SOCKET_IFNAME==nosuchif"));
	assert_non_null(strstr(tp_log_last_error(), "lo:127.0.0.1<0>"));
}

static void no_more_interfaces_than_there_is_room_for(void **s)
{
	(void)s;
	struct tp_interface list[2] = { 0 };
	int count = 0;
	test_set("NCCL_SOCKET_IFNAME", "^nothing");
	assert_int_equal(tp_socket_interfaces(list, 1, &count), ncclSuccess);
	assert_int_equal(count, 1);
	assert_string_equal(list[1].name, "");
}

static void the_family_is_respected(void **s)
{
	(void)s;
	struct tp_interface list[8];
	int count = 0;
	test_set("NCCL_SOCKET_IFNAME", "lo");
	test_set("NCCL_SOCKET_FAMILY", "AF_INET6");
	if (tp_socket_interfaces(list, 8, &count) != ncclSuccess)
		skip();
	assert_int_equal(list[0].addr.sa.sa_family, AF_INET6);
	test_set("NCCL_SOCKET_FAMILY", "AF_INET");
	assert_int_equal(tp_socket_interfaces(list, 8, &count), ncclSuccess);
	assert_int_equal(list[0].addr.sa.sa_family, AF_INET);
}

static void a_remote_address_finds_the_interface_of_its_subnet(void **s)
{
	(void)s;
	union tp_addr remote;
	struct tp_interface found;
	assert_int_equal(tp_addr_parse_numeric("127.5.6.7:1", "test", &remote), ncclSuccess);
	assert_int_equal(tp_socket_interface_for(&remote, &found), ncclSuccess);
	assert_string_equal(found.name, "lo");
}

static void a_remote_address_elsewhere_gets_the_first_allowed_interface(void **s)
{
	(void)s;
	union tp_addr remote;
	struct tp_interface found;
	test_set("NCCL_SOCKET_IFNAME", "lo");
	assert_int_equal(tp_addr_parse_numeric("203.0.113.1:1", "test", &remote), ncclSuccess);
	assert_int_equal(tp_socket_interface_for(&remote, &found), ncclSuccess);
	assert_string_equal(found.name, "lo");
}

#define MACHINE_MAX 8
struct machine { struct ifaddrs entries[MACHINE_MAX]; union tp_addr addrs[MACHINE_MAX]; int count; };

static void plug(struct machine *m, const char *name, const char *addr, unsigned flags)
{
	char text[64];
	int i = m->count++;
	snprintf(text, sizeof(text), strchr(addr, ':') ? "[%s]:0" : "%s:0", addr);
	assert_int_equal(tp_addr_parse_numeric(text, "test", &m->addrs[i]), ncclSuccess);
	m->entries[i] = (struct ifaddrs){ .ifa_name = (char *)(uintptr_t)name, .ifa_addr = &m->addrs[i].sa, .ifa_flags = flags };
	if (i > 0)
		m->entries[i - 1].ifa_next = &m->entries[i];
}

static void the_best_kind_of_interface_is_chosen(void **s)
{
	(void)s;
	/* Each machine has one interface more than the one before, and a better one. */
	static const struct { const char *name, *addr; } better[] = {
		{ "virbr0", "192.168.122.1" }, { "lo", "127.0.0.1" }, { "docker0", "172.17.0.1" }, { "eth0", "192.0.2.2" }, { "ib0", "198.51.100.2" },
	};
	struct machine m = { .count = 0 };
	struct tp_interface list[4];
	for (size_t i = 0; i < TP_ARRAY_LEN(better); i++) {
		plug(&m, better[i].name, better[i].addr, IFF_UP);
		assert_int_equal(tp_interface_choose(m.entries, list, 4), 1);
		assert_string_equal(list[0].name, better[i].name);
	}
}

static void all_interfaces_of_the_best_kind_are_listed_but_none_that_is_down(void **s)
{
	(void)s;
	struct machine m = { .count = 0 };
	struct tp_interface list[8];
	plug(&m, "lo", "127.0.0.1", IFF_UP);
	plug(&m, "eth0", "192.0.2.2", IFF_UP);
	plug(&m, "eth1", "192.0.2.3", 0);
	plug(&m, "eth2", "192.0.2.4", IFF_UP);
	assert_int_equal(tp_interface_choose(m.entries, list, 8), 2);
	assert_string_equal(list[0].name, "eth0");
	assert_string_equal(list[1].name, "eth2");
}

static void an_interface_has_one_address_ipv4_first_then_a_routable_ipv6(void **s)
{
	(void)s;
	struct machine m = { .count = 0 };
	struct tp_interface list[8];
	char text[TP_ADDR_TEXT];
	plug(&m, "eth0", "fe80::1", IFF_UP);
	plug(&m, "eth0", "2001:db8::5", IFF_UP);
	assert_int_equal(tp_interface_choose(m.entries, list, 8), 1);
	assert_string_equal(tp_addr_format(&list[0].addr, text), "2001:db8::5<0>");
	m.count = 0;
	plug(&m, "eth0", "192.0.2.2", IFF_UP);
	plug(&m, "eth0", "2001:db8::5", IFF_UP);
	assert_int_equal(tp_interface_choose(m.entries, list, 8), 1);
	assert_string_equal(tp_addr_format(&list[0].addr, text), "192.0.2.2<0>");
	test_set("NCCL_SOCKET_FAMILY", "AF_INET6");
	assert_int_equal(tp_interface_choose(m.entries, list, 8), 1);
	assert_string_equal(tp_addr_format(&list[0].addr, text), "2001:db8::5<0>");
}

static void ipv6_loopback_is_used_only_where_it_is_asked_for(void **s)
{
	(void)s;
	struct machine m = { .count = 0 };
	struct tp_interface list[8];
	plug(&m, "lo", "::1", IFF_UP);
	assert_int_equal(tp_interface_choose(m.entries, list, 8), 0);
	test_set("NCCL_SOCKET_IFNAME", "lo");
	assert_int_equal(tp_interface_choose(m.entries, list, 8), 1);
	test_set("NCCL_SOCKET_IFNAME", NULL);
	test_set("NCCL_SOCKET_FAMILY", "AF_INET6");
	assert_int_equal(tp_interface_choose(m.entries, list, 8), 1);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup(good_texts_become_addresses_and_back, clean),
		cmocka_unit_test_setup(bad_texts_are_refused_and_the_output_stays, clean),
		cmocka_unit_test_setup(a_host_name_without_an_address_of_the_family_is_refused, clean),
		cmocka_unit_test_setup(the_longest_address_fits, clean),
		cmocka_unit_test_setup(interface_lists_mean_what_nccls_do, clean),
		cmocka_unit_test_setup(a_named_interface_is_found, clean),
		cmocka_unit_test_setup(excluded_interfaces_are_not_used, clean),
		cmocka_unit_test_setup(no_interface_is_an_error_that_lists_what_there_is, clean),
		cmocka_unit_test_setup(no_more_interfaces_than_there_is_room_for, clean),
		cmocka_unit_test_setup(the_family_is_respected, clean),
		cmocka_unit_test_setup(the_best_kind_of_interface_is_chosen, clean),
		cmocka_unit_test_setup(all_interfaces_of_the_best_kind_are_listed_but_none_that_is_down, clean),
		cmocka_unit_test_setup(an_interface_has_one_address_ipv4_first_then_a_routable_ipv6, clean),
		cmocka_unit_test_setup(ipv6_loopback_is_used_only_where_it_is_asked_for, clean),
		cmocka_unit_test_setup(a_remote_address_finds_the_interface_of_its_subnet, clean),
		cmocka_unit_test_setup(a_remote_address_elsewhere_gets_the_first_allowed_interface, clean),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

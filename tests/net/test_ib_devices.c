/* Which devices, ports and addresses the IB transport uses, and what it says where they can't be used. Each case that opens the
 * software card does so in a child of its own, since the card reads its settings once a process. */
#include <linux/capability.h>
#include <arpa/inet.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include "helper_ib.h"

/* ---- NCCL_IB_HCA ---- */

static bool allows(const char *list, const char *device, int port)
{
	struct tp_ib_hca_list parsed;
	char why[128];

	assert_true(tp_ib_hca_parse(list, &parsed, why, sizeof(why)));
	return tp_ib_hca_allows(&parsed, device, port);
}

static void names_are_beginnings_unless_they_are_exact(void **state)
{
	(void)state;
	assert_true(allows(NULL, "mlx5_0", 1));
	assert_true(allows("", "mlx5_0", 1));
	assert_true(allows("mlx5", "mlx5_0", 1));
	assert_true(allows("mlx5_1", "mlx5_10", 1));
	assert_false(allows("=mlx5_1", "mlx5_10", 1));
	assert_true(allows("=mlx5_0,mlx5_1", "mlx5_1", 2));
	assert_false(allows("mlx4,bnxt", "mlx5_0", 1));
}

static void a_caret_excludes(void **state)
{
	(void)state;
	assert_false(allows("^mlx5_1", "mlx5_1", 1));
	assert_false(allows("^mlx5_1", "mlx5_10", 1));
	assert_true(allows("^=mlx5_1", "mlx5_10", 1));
	assert_false(allows("^=mlx5_1:2", "mlx5_1", 2));
	assert_true(allows("^=mlx5_1:2", "mlx5_1", 1));
}

static void a_port_may_follow(void **state)
{
	(void)state;
	assert_true(allows("mlx5_0:1,mlx5_1:2", "mlx5_1", 2));
	assert_false(allows("mlx5_0:1,mlx5_1:2", "mlx5_1", 1));
}

static void what_is_no_list_is_refused(void **state)
{
	struct tp_ib_hca_list list;
	char why[128];

	(void)state;
	assert_false(tp_ib_hca_parse("mlx5_0:x", &list, why, sizeof(why)));
	assert_non_null(strstr(why, "mlx5_0:x"));
	assert_false(tp_ib_hca_parse("mlx5_0:0", &list, why, sizeof(why)));
	assert_false(tp_ib_hca_parse("a:1:2", &list, why, sizeof(why)));
	assert_true(tp_ib_hca_parse(" mlx5_0, mlx5_1:2 ,\t", &list, why, sizeof(why)) && list.count == 2 && strcmp(list.items[0].name, "mlx5_0") == 0);
	assert_true(strcmp(list.items[1].name, "mlx5_1") == 0 && list.items[1].port == 2);
	assert_true(tp_ib_hca_parse(",,a,", &list, why, sizeof(why)));
	assert_int_equal(list.count, 1);
}

static void telphers_card_is_asked_for_by_its_name(void **state)
{
	struct tp_ib_hca_list list;
	char why[128];

	(void)state;
	assert_true(tp_ib_hca_parse("mlx5_0,telpher0", &list, why, sizeof(why)));
	assert_true(tp_ib_hca_asks_for_card(&list));
	assert_true(tp_ib_hca_parse("^telpher0", &list, why, sizeof(why)));
	assert_false(tp_ib_hca_asks_for_card(&list));
	assert_true(tp_ib_hca_parse("mlx5", &list, why, sizeof(why)));
	assert_false(tp_ib_hca_asks_for_card(&list));
}

/* ---- addresses ---- */

static struct tp_ib_gid gid(int index, const char *text, enum tp_ib_gid_type type)
{
	struct tp_ib_gid g = { .index = index, .type = type };

	assert_int_equal(inet_pton(AF_INET6, text, g.raw), 1);
	return g;
}

static int choose(const struct tp_ib_gid *gids, int count, struct tp_ib_gid_wish wish, char *why, char *doubt)
{
	int at = tp_ib_gid_choose(gids, count, &wish, why, 512, doubt, 512);

	return at < 0 ? -1 : gids[at].index;
}

static const struct tp_ib_gid_wish plain = { .index = -1, .version = 2, .range_bits = -1, .ethernet = true };

/* What a Mellanox port shows: link-local and IPv4, each in both versions. */
static void mellanox(struct tp_ib_gid out[4])
{
	out[0] = gid(0, "fe80::ac0:ebff:feda:1cfb", TP_IB_GID_ROCE_V1);
	out[1] = gid(1, "fe80::ac0:ebff:feda:1cfb", TP_IB_GID_ROCE_V2);
	out[2] = gid(2, "::ffff:192.0.2.6", TP_IB_GID_ROCE_V1);
	out[3] = gid(3, "::ffff:192.0.2.6", TP_IB_GID_ROCE_V2);
}

static void ipv4_of_roce_v2_is_chosen_unasked(void **state)
{
	struct tp_ib_gid gids[4];
	char why[512], doubt[512];
	struct tp_ib_gid_wish wish = plain;

	(void)state;
	mellanox(gids);
	assert_int_equal(choose(gids, 4, plain, why, doubt), 3);
	assert_string_equal(doubt, "");
	wish.version = 1;
	assert_int_equal(choose(gids, 4, wish, why, doubt), 2);
}

static void a_port_with_ipv6_alone_works(void **state)
{
	struct tp_ib_gid gids[2] = { gid(0, "fe80::1", TP_IB_GID_ROCE_V2), gid(1, "2001:db8::7", TP_IB_GID_ROCE_V2) };
	struct tp_ib_gid_wish wish = plain;
	char why[512], doubt[512];

	(void)state;
	assert_int_equal(choose(gids, 2, plain, why, doubt), 1);
	wish.family = AF_INET;
	assert_int_equal(choose(gids, 2, wish, why, doubt), -1);
	assert_non_null(strstr(why, "2001:db8::7"));
	assert_non_null(strstr(why, "IPv4"));
}

static void a_link_local_address_is_never_chosen(void **state)
{
	struct tp_ib_gid gids[2] = { gid(0, "fe80::1", TP_IB_GID_ROCE_V1), gid(1, "fe80::1", TP_IB_GID_ROCE_V2) };
	char why[512], doubt[512];

	(void)state;
	assert_int_equal(choose(gids, 2, plain, why, doubt), -1);
	assert_non_null(strstr(why, "[1] fe80::1 (RoCE v2)"));
	assert_non_null(strstr(why, "NCCL_IB_GID_INDEX"));
}

static void an_index_is_used_as_it_is_but_not_in_silence(void **state)
{
	struct tp_ib_gid gids[4];
	struct tp_ib_gid_wish wish = plain;
	char why[512], doubt[512];

	(void)state;
	mellanox(gids);
	wish.index = 1;
	assert_int_equal(choose(gids, 4, wish, why, doubt), 1);
	assert_non_null(strstr(doubt, "link-local"));
	wish.index = 2;
	assert_int_equal(choose(gids, 4, wish, why, doubt), 2);
	assert_non_null(strstr(doubt, "RoCE v1"));
	wish.index = 9;
	assert_int_equal(choose(gids, 4, wish, why, doubt), -1);
	assert_non_null(strstr(why, "NCCL_IB_GID_INDEX=9"));
}

static void a_range_narrows_the_choice(void **state)
{
	struct tp_ib_gid gids[3] = { gid(0, "::ffff:10.1.2.3", TP_IB_GID_ROCE_V2), gid(1, "::ffff:192.0.2.6", TP_IB_GID_ROCE_V2), gid(2, "2001:db8::7", TP_IB_GID_UNKNOWN) };
	struct tp_ib_gid_wish wish = plain;
	char why[512], doubt[512];
	int family;

	(void)state;
	assert_true(tp_ib_gid_range("192.0.2.0/24", wish.range, &wish.range_bits, &family));
	assert_int_equal(family, AF_INET);
	assert_int_equal(choose(gids, 3, wish, why, doubt), 1);
	assert_true(tp_ib_gid_range("2001:db8::/32", wish.range, &wish.range_bits, &family));
	assert_int_equal(family, AF_INET6);
	assert_int_equal(choose(gids, 3, wish, why, doubt), 2);
	assert_false(tp_ib_gid_range("192.0.2.0/33", wish.range, &wish.range_bits, &family));
	assert_false(tp_ib_gid_range("nonsense", wish.range, &wish.range_bits, &family));
	assert_false(tp_ib_gid_range("10.0.0.0/8x", wish.range, &wish.range_bits, &family));
}

static void on_infiniband_the_first_is_the_ports_own(void **state)
{
	struct tp_ib_gid gids[1] = { gid(0, "fe80::2:c903:1", TP_IB_GID_IB) };
	struct tp_ib_gid_wish wish = plain;
	char why[512], doubt[512];

	(void)state;
	wish.ethernet = false;
	assert_int_equal(choose(gids, 1, wish, why, doubt), 0);
}

static void addresses_that_cant_meet_are_seen(void **state)
{
	struct tp_ib_gid v4 = gid(0, "::ffff:127.0.0.1", TP_IB_GID_ROCE_V2), v6 = gid(0, "2001:db8::7", TP_IB_GID_ROCE_V2), local = gid(0, "fe80::1", TP_IB_GID_ROCE_V2);
	char text[256];

	(void)state;
	assert_null(tp_ib_gid_unreachable(v4.raw, v4.type, v4.raw, v4.type, true, text, sizeof(text)));
	assert_non_null(tp_ib_gid_unreachable(v4.raw, v4.type, v6.raw, v6.type, true, text, sizeof(text)));
	assert_non_null(tp_ib_gid_unreachable(v6.raw, v6.type, local.raw, local.type, true, text, sizeof(text)));
	assert_non_null(tp_ib_gid_unreachable(v4.raw, TP_IB_GID_ROCE_V1, v4.raw, TP_IB_GID_ROCE_V2, true, text, sizeof(text)));
	assert_null(tp_ib_gid_unreachable(v4.raw, v4.type, v6.raw, v6.type, false, text, sizeof(text)));
	assert_int_equal(tp_ib_gid_common_bits(v4.raw, v4.raw), 128);
	assert_int_equal(tp_ib_gid_common_bits(v4.raw, gid(0, "::ffff:127.0.0.3", TP_IB_GID_ROCE_V2).raw), 126);
}

/* ---- the card ---- */

/* The child's exit status: 0, or the line that failed. */
#define CHILD_CHECK(condition) do { if (!(condition)) { fprintf(stderr, "line %d: %s; last error: %s\n", __LINE__, #condition, tp_log_last_error()); _exit(1); } } while (0)

static void in_child(void (*run)(void), const char *first, ...)
{
	va_list args;
	int status;
	pid_t child = fork();

	if (child == 0) {
		ib_use_card(NULL);
		va_start(args, first);
		for (const char *s = first; s; s = va_arg(args, const char *)) putenv((char *)(uintptr_t)s);
		va_end(args);
		tp_param_reload();
		run();
		_exit(0);
	}
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_int_equal(status, 0);
}

static char why_text[512];
static bool present(bool asked) { return tp_ib_present(asked, why_text, sizeof(why_text)); }

static void sees_one(void)
{
	struct tp_net_properties p;

	CHILD_CHECK(present(false) && tp_ib_port_count() == 1 && tp_ib_on_software());
	CHILD_CHECK(tp_net_ib.properties(0, &p) == ncclSuccess && strcmp(p.name, "telpher0") == 0 && p.port == 1 && p.speed_mbps == 100000 && p.max_recvs == 8);
}

/* Lanes of 200 Gb/s are told where 32 bits are. */
static void sees_the_rate(void)
{
	struct tp_net_properties p;

	CHILD_CHECK(present(false) && tp_net_ib.properties(0, &p) == ncclSuccess && p.speed_mbps == 1000u * (unsigned)atoi(getenv("TELPHER_VERBS_RATE")));
}

static void sees_four(void) { CHILD_CHECK(present(false) && tp_ib_port_count() == 4 && strcmp(tp_ib_port(3)->text, "b:2") == 0); }
static void sees_one_of_four(void) { CHILD_CHECK(present(false) && tp_ib_port_count() == 1 && strcmp(tp_ib_port(0)->text, "telpherb:1") == 0); }

static void devices_and_ports_are_what_the_list_allows(void **state)
{
	(void)state;
	in_child(sees_one, NULL);
	in_child(sees_the_rate, "TELPHER_VERBS_RATE=400", NULL);
	in_child(sees_the_rate, "TELPHER_VERBS_RATE=800", NULL);
	in_child(sees_the_rate, "TELPHER_VERBS_RATE=1600", NULL);
	in_child(sees_four, "TELPHER_VERBS_DEVICES=a,b", "TELPHER_VERBS_PORTS=2", "NCCL_IB_HCA=", "TELPHER_VERBS_NOTE=/dev/null", NULL);
	in_child(sees_one_of_four, "TELPHER_VERBS_DEVICES=telphera,telpherb", "TELPHER_VERBS_PORTS=2", "NCCL_IB_HCA==telpherb:1", NULL);
}

static void is_not_used_unasked(void)
{
	const struct tp_net_ops *ops = NULL;

	CHILD_CHECK(!present(false) && strstr(why_text, "software card"));
	CHILD_CHECK(tp_net_choose(NULL, &ops) == ncclSuccess && ops == &tp_net_socket);
	CHILD_CHECK(tp_net_choose("IB", &ops) == ncclSuccess && ops == &tp_net_ib);
}
static void is_used_in_verbs_run(void) { CHILD_CHECK(present(false)); }

static void the_card_is_used_only_where_it_is_asked_for(void **state)
{
	(void)state;
	in_child(is_not_used_unasked, "NCCL_IB_HCA=", NULL);
	in_child(is_used_in_verbs_run, "NCCL_IB_HCA=", "TELPHER_VERBS_NOTE=/dev/null", NULL);
}

static void is_switched_off(void)
{
	const struct tp_net_ops *ops = NULL;

	CHILD_CHECK(!present(true) && strstr(why_text, "NCCL_IB_DISABLE=1"));
	CHILD_CHECK(tp_net_choose(NULL, &ops) == ncclSuccess && ops == &tp_net_socket);
}

static void it_can_be_switched_off(void **state)
{
	(void)state;
	in_child(is_switched_off, "NCCL_IB_DISABLE=1", NULL);
}

static void has_no_library(void) { CHILD_CHECK(!present(true) && strstr(why_text, "/nowhere/libibverbs.so")); }
static void has_another_library(void) { CHILD_CHECK(!present(true) && strstr(why_text, "has no ibv_get_device_list")); }

static void a_missing_or_wrong_library_is_a_reason_and_no_failure(void **state)
{
	(void)state;
	in_child(has_no_library, "NCCL_IBVERBS_LIB=/nowhere/libibverbs.so", "NCCL_IB_HCA=", NULL);
	in_child(has_another_library, "NCCL_IBVERBS_LIB=libm.so.6", "NCCL_IB_HCA=", NULL);
}

static void cant_open(void)
{
	CHILD_CHECK(!present(false));
	CHILD_CHECK(strstr(tp_log_last_error(), "Unable to open device telpher0: Permission denied") && strstr(tp_log_last_error(), "--device=/dev/infiniband"));
	/* It is the reason too that others give for doing without: not that no device has the name. */
	CHILD_CHECK(strstr(why_text, "telpher0 can't be opened: Permission denied") && strstr(why_text, "--device=/dev/infiniband"));
}
static void is_not_called_so(void) { CHILD_CHECK(!present(false) && strstr(why_text, "NCCL_IB_HCA=telpherz allows no port of the devices that there are: telpher0, telpher1")); }
static void is_down(void) { CHILD_CHECK(!present(false) && strstr(why_text, "telpher0:1 is DOWN, not ACTIVE: is its interface up")); }
static void is_missing(void) { CHILD_CHECK(!present(false) && strstr(why_text, "No device found")); }

static void a_device_that_cant_be_used_is_told_with_a_cure(void **state)
{
	(void)state;
	in_child(cant_open, "TELPHER_VERBS_FAULT=open=EACCES", NULL);
	in_child(is_down, "TELPHER_VERBS_STATE=down", NULL);
	in_child(is_missing, "TELPHER_VERBS_FAULT=missing", NULL);
	in_child(is_not_called_so, "NCCL_IB_HCA=telpherz", "TELPHER_VERBS_DEVICES=2", NULL);
}

static void cant_register(void)
{
	struct ib_pair pair;
	void *memory = NULL, *data;

	ib_pair_open(&pair, 4096);
	data = calloc(1, 1 << 20);
	CHILD_CHECK(tp_net_ib.reg_memory(pair.send_comm, data, 1 << 20, TP_NET_HOST, &memory) == ncclSystemError && !memory);
	/* Root may lock what it likes, where a container has left it that, and is told so. */
	struct __user_cap_header_struct head = { .version = _LINUX_CAPABILITY_VERSION_3 };
	struct __user_cap_data_struct caps[2] = { { 0 } };
	syscall(SYS_capget, &head, caps);
	CHILD_CHECK(!(caps[0].effective >> CAP_IPC_LOCK & 1) || strstr(tp_log_last_error(), "this process has CAP_IPC_LOCK, which lifts that limit except in a user namespace: it may be the card's"));
	CHILD_CHECK(strstr(tp_log_last_error(), "Cannot allocate memory") && strstr(tp_log_last_error(), "ulimit -l unlimited") && strstr(tp_log_last_error(), "may lock 8388608 bytes"));
	ib_pair_close(&pair);
}

static void limited_memlock(void)
{
	struct rlimit limit = { 8u << 20, 8u << 20 };

	CHILD_CHECK(setrlimit(RLIMIT_MEMLOCK, &limit) == 0);
	cant_register();
}

static void a_limit_of_locked_memory_is_named(void **state)
{
	(void)state;
	in_child(limited_memlock, "TELPHER_VERBS_FAULT=memlock=512K", NULL);
}

static void meets_a_wrong_gid(void)
{
	unsigned char handle[TP_NET_HANDLE_BYTES];
	void *listener, *state = NULL, *comm = NULL;

	CHILD_CHECK(tp_net_ib.init() == ncclSuccess && tp_net_ib.listen(0, handle, &listener) == ncclSuccess);
	ncclResult_t result = ncclSuccess;
	struct tp_net_hello who;
	void *accepted = NULL;
	while (result == ncclSuccess && !comm) {
		result = tp_net_ib.connect(0, handle, &net_hello, &state, &comm);
		/* The other side is told, and says it too. */
		if (result == ncclSuccess && tp_net_ib.accept(listener, &net_hello, &who, &accepted) != ncclSuccess) break;
	}
	CHILD_CHECK(!comm && (result == ncclInvalidUsage || result == ncclSuccess) && strstr(tp_log_last_error(), "NCCL_IB_GID_INDEX=77"));
	tp_net_ib.cancel_connect(state);
	CHILD_CHECK(tp_net_ib.close_listen(listener) == ncclSuccess);
}

static void a_gid_that_isnt_there_is_an_error_that_lists_them(void **state)
{
	(void)state;
	in_child(meets_a_wrong_gid, "NCCL_IB_GID_INDEX=77", NULL);
}

static void breaks_protection(void)
{
	struct ib_pair pair;
	ncclResult_t result = ncclSuccess;

	ib_pair_open(&pair, 4096);
	for (int i = 0; i < 1000 && result == ncclSuccess; i++) result = ib_exchange(&pair, 0, 1000, i);
	CHILD_CHECK(result == ncclRemoteError && strstr(tp_log_last_error(), "IBV_WC_LOC_PROT_ERR(4)"));
	CHILD_CHECK(strstr(tp_log_last_error(), "ACS"));
	ib_pair_close(&pair);
}

static void a_local_protection_error_speaks_of_acs(void **state)
{
	(void)state;
	in_child(breaks_protection, "TELPHER_VERBS_FAULT=protection=0.2,seed=2", NULL);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(names_are_beginnings_unless_they_are_exact),
		cmocka_unit_test(a_caret_excludes),
		cmocka_unit_test(a_port_may_follow),
		cmocka_unit_test(what_is_no_list_is_refused),
		cmocka_unit_test(telphers_card_is_asked_for_by_its_name),
		cmocka_unit_test(ipv4_of_roce_v2_is_chosen_unasked),
		cmocka_unit_test(a_port_with_ipv6_alone_works),
		cmocka_unit_test(a_link_local_address_is_never_chosen),
		cmocka_unit_test(an_index_is_used_as_it_is_but_not_in_silence),
		cmocka_unit_test(a_range_narrows_the_choice),
		cmocka_unit_test(on_infiniband_the_first_is_the_ports_own),
		cmocka_unit_test(addresses_that_cant_meet_are_seen),
		cmocka_unit_test(devices_and_ports_are_what_the_list_allows),
		cmocka_unit_test(the_card_is_used_only_where_it_is_asked_for),
		cmocka_unit_test(it_can_be_switched_off),
		cmocka_unit_test(a_missing_or_wrong_library_is_a_reason_and_no_failure),
		cmocka_unit_test(a_device_that_cant_be_used_is_told_with_a_cure),
		cmocka_unit_test(a_limit_of_locked_memory_is_named),
		cmocka_unit_test(a_gid_that_isnt_there_is_an_error_that_lists_them),
		cmocka_unit_test(a_local_protection_error_speaks_of_acs),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

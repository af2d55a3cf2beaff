/* What the card shows: as many devices and ports as asked for, with the names, rates and GIDs asked for. */
#include <dirent.h>
#include <errno.h>
#include <net/if.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "verbs/helper_api.h"

/* Parameters are read once a process, so each case has a child of its own: it ends with the check's answer. */
static bool in_child(const char *const settings[][2], bool (*check)(void))
{
	int status;
	pid_t pid = fork();
	if (pid == 0) {
		for (int i = 0; settings[i][0]; i++)
			setenv(settings[i][0], settings[i][1], 1);
		_exit(check() ? 0 : 1);
	}
	assert_true(pid > 0);
	assert_int_equal(waitpid(pid, &status, 0), pid);
	return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static struct ibv_context *open_named(const char *name)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = NULL;
	for (int i = 0; list && list[i]; i++)
		if (!strcmp(ibv_get_device_name(list[i]), name))
			context = ibv_open_device(list[i]);
	ibv_free_device_list(list);
	return context;
}

static bool default_is_one_active_port(void)
{
	int count;
	struct ibv_device **list = ibv_get_device_list(&count);
	bool one = list && count == 1 && !list[1] && !strcmp(list[0]->name, "telpher0") && ibv_get_device_index(list[0]) == 0;
	struct ibv_context *context = one ? ibv_open_device(list[0]) : NULL;
	struct ibv_port_attr port;
	struct ibv_device_attr device;
	ibv_free_device_list(list);
	return context && !ibv_query_device(context, &device) && device.phys_port_cnt == 1 && device.node_guid &&
		!ibv_query_port(context, 1, &port) && port.state == IBV_PORT_ACTIVE && port.link_layer == IBV_LINK_LAYER_ETHERNET &&
		port.gid_tbl_len == 1 && port.active_mtu >= IBV_MTU_256 && ibv_query_port(context, 2, &port) == EINVAL;
}

static void by_default_there_is_one_device_with_one_active_port_and_one_gid(void **state)
{
	(void)state;
	assert_true(in_child((const char *const[][2]){ { NULL, NULL } }, default_is_one_active_port));
}

static bool named_as_asked(void)
{
	int count;
	struct ibv_device **list = ibv_get_device_list(&count);
	struct ibv_context *context = open_named("mlx5_1");
	struct ibv_port_attr port;
	return count == 2 && !strcmp(list[0]->name, "mlx5_0") && context && !ibv_query_port(context, 2, &port) && port.active_width == 2 &&
		port.active_speed == 128 && ibv_get_device_guid(list[0]) != ibv_get_device_guid(list[1]);
}

static void devices_have_the_names_ports_and_rate_asked_for(void **state)
{
	(void)state;
	assert_true(in_child((const char *const[][2]){ { "TELPHER_VERBS_DEVICES", "mlx5_0,mlx5_1" }, { "TELPHER_VERBS_PORTS", "2" },
		{ "TELPHER_VERBS_RATE", "400" }, { NULL, NULL } }, named_as_asked));
}

static bool none(void)
{
	int count = 7;
	struct ibv_device **list = ibv_get_device_list(&count);
	return list && count == 0 && !list[0];
}
static void there_can_be_no_device(void **state)
{
	(void)state;
	assert_true(in_child((const char *const[][2]){ { "TELPHER_VERBS_DEVICES", "0" }, { NULL, NULL } }, none));
}

static bool down(void)
{
	struct ibv_context *context = open_named("telpher0");
	struct ibv_port_attr port;
	return context && !ibv_query_port(context, 1, &port) && port.state == IBV_PORT_DOWN;
}
static void a_port_can_be_down(void **state)
{
	(void)state;
	assert_true(in_child((const char *const[][2]){ { "TELPHER_VERBS_STATE", "down" }, { NULL, NULL } }, down));
}

/* On lo alone: 127.0.0.1 and, where the machine has IPv6, ::1. */
static bool both_versions_of_each_address(void)
{
	static const uint8_t mapped[16] = { [10] = 0xff, 0xff, 127, 0, 0, 1 };
	struct ibv_context *context = open_named("telpher0");
	struct ibv_gid_entry entries[256], one;
	struct ibv_port_attr port;
	if (!context || ibv_query_port(context, 1, &port) || port.gid_tbl_len != 256)
		return false;
	ssize_t count = ibv_query_gid_table(context, entries, 256, 0);
	if (count < 2 || count % 2)
		return false;
	for (ssize_t i = 0; i < count; i++) {
		if (entries[i].gid_index != i || entries[i].gid_type != (i % 2 ? IBV_GID_TYPE_ROCE_V2 : IBV_GID_TYPE_ROCE_V1))
			return false;
		if (memcmp(&entries[i].gid, &entries[i / 2 * 2].gid, 16) || entries[i].ndev_ifindex != if_nametoindex("lo"))
			return false;
	}
	return !memcmp(entries[0].gid.raw, mapped, 16) && ibv_query_gid_ex(context, 1, (uint32_t)count, &one, 0) == ENODATA &&
		ibv_query_gid_ex(context, 1, 256, &one, 0) == EINVAL;
}
static void the_roce_table_has_both_versions_of_each_address(void **state)
{
	(void)state;
	assert_true(in_child((const char *const[][2]){ { "TELPHER_VERBS_GIDS", "roce" }, { "TELPHER_VERBS_IFNAME", "lo" }, { NULL, NULL } },
		both_versions_of_each_address));
}

/* As on a network that carries only one of the versions. */
static bool only_version_2_arrives(void)
{
	struct pair p;
	for (uint8_t index = 0; index < 2; index++) {
		pair_open(&p, &(struct pair_options){ .timeout = index ? 20 : 1, .retry_cnt = 7, .gid_index = index });
		if (post(&p.a, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .bytes = 64, .remote = &p.b }) ||
			next_wc(p.a.cq).status != (index ? IBV_WC_SUCCESS : IBV_WC_RETRY_EXC_ERR))
			return false;
		pair_close(&p);
	}
	return true;
}
static void the_wrong_gid_of_the_roce_table_reaches_nobody(void **state)
{
	(void)state;
	assert_true(in_child((const char *const[][2]){ { "TELPHER_VERBS_GIDS", "roce" }, { "TELPHER_VERBS_IFNAME", "lo" },
		{ "TELPHER_VERBS_CARRIER", "wire" }, { NULL, NULL } }, only_version_2_arrives));
}

/* Every thread but this one: a program's signals are its own. */
static bool our_threads_block_signals(void)
{
	struct pair p;
	char path[300], line[200];
	int threads = 0;
	pair_open(&p, &(struct pair_options){ .timeout = 20 });
	if (post(&p.a, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .bytes = 64, .remote = &p.b }) || next_wc(p.a.cq).status)
		return false;
	DIR *dir = opendir("/proc/self/task");
	for (struct dirent *entry; dir && (entry = readdir(dir)) != NULL;) {
		unsigned long long blocked = 0;
		if (entry->d_name[0] == '.' || atoi(entry->d_name) == getpid())
			continue;
		snprintf(path, sizeof(path), "/proc/self/task/%s/status", entry->d_name);
		FILE *file = fopen(path, "re");
		while (file && fgets(line, sizeof(line), file))
			if (sscanf(line, "SigBlk: %llx", &blocked) == 1)
				break;
		if (file)
			fclose(file);
		for (int sig = 1; sig <= SIGRTMAX; sig++)
			if (sig != SIGKILL && sig != SIGSTOP && (sig < 32 || sig >= SIGRTMIN) && !(blocked >> (sig - 1) & 1))
				return false;
		threads++;
	}
	closedir(dir);
	pair_close(&p);
	return threads > 0;
}
static void a_programs_signals_never_come_to_our_threads(void **state)
{
	(void)state;
	/* It has a thread of its own. */
	if (SANITIZED_THREAD)
		skip();
	assert_true(in_child((const char *const[][2]){ { "TELPHER_VERBS_CARRIER", "wire" }, { NULL, NULL } }, our_threads_block_signals));
}

static bool mtu_is_512(void)
{
	struct ibv_context *context = open_named("telpher0");
	struct ibv_port_attr port;
	return context && !ibv_query_port(context, 1, &port) && port.active_mtu == IBV_MTU_512;
}
static void the_mtu_can_be_set(void **state)
{
	(void)state;
	assert_true(in_child((const char *const[][2]){ { "TELPHER_VERBS_MTU", "512" }, { NULL, NULL } }, mtu_is_512));
}

static bool wrong_settings_leave_the_default(void)
{
	struct ibv_port_attr port;
	struct ibv_context *context = open_named("telpher0");
	return context && !ibv_query_port(context, 1, &port) && port.active_width == 2 && port.active_speed == 32;
}
static void a_setting_that_means_nothing_is_left_out(void **state)
{
	(void)state;
	assert_true(in_child((const char *const[][2]){ { "TELPHER_VERBS_RATE", "fast" }, { "TELPHER_VERBS_DEVICES", "99" },
		{ "TELPHER_VERBS_IFNAME", "" }, { NULL, NULL } }, wrong_settings_leave_the_default));
}

static bool pkey(void)
{
	struct ibv_context *context = open_named("telpher0");
	__be16 key;
	return context && !ibv_query_pkey(context, 1, 0, &key) && key == 0xffff && ibv_query_pkey(context, 1, 1, &key) == -1 &&
		ibv_get_pkey_index(context, 1, 0xffff) == 0;
}
static void there_is_one_pkey(void **state)
{
	(void)state;
	assert_true(in_child((const char *const[][2]){ { NULL, NULL } }, pkey));
}

/* A program that forks with everything open: the child's copies do no harm, and the child can open its own. */
static bool child_of_a_user(void)
{
	struct pair p, own;
	int status;
	pair_open(&p, NULL);
	pid_t pid = fork();
	if (pid == 0) {
		struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };
		if (ibv_modify_qp(p.a.qp, &attr, IBV_QP_STATE) == 0 || ibv_reg_mr(p.a.pd, p.a.data, 64, 0))
			_exit(2);
		side_close(&p.a);
		side_close(&p.b);
		pair_open(&own, NULL);
		if (post(&own.a, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .bytes = 64, .remote = &own.b }) || next_wc(own.a.cq).status)
			_exit(3);
		pair_close(&own);
		_exit(0);
	}
	if (waitpid(pid, &status, 0) != pid || !WIFEXITED(status) || WEXITSTATUS(status))
		return false;
	if (post(&p.a, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .bytes = 64, .remote = &p.b }) || next_wc(p.a.cq).status)
		return false;
	pair_close(&p);
	return true;
}
static void a_forked_child_leaves_the_parent_alone_and_can_open_its_own(void **state)
{
	(void)state;
	if (SANITIZED)
		skip();
	assert_true(in_child((const char *const[][2]){ { NULL, NULL } }, child_of_a_user));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(by_default_there_is_one_device_with_one_active_port_and_one_gid),
		cmocka_unit_test(devices_have_the_names_ports_and_rate_asked_for),
		cmocka_unit_test(there_can_be_no_device),
		cmocka_unit_test(a_port_can_be_down),
		cmocka_unit_test(the_roce_table_has_both_versions_of_each_address),
		cmocka_unit_test(the_wrong_gid_of_the_roce_table_reaches_nobody),
		cmocka_unit_test(a_programs_signals_never_come_to_our_threads),
		cmocka_unit_test(the_mtu_can_be_set),
		cmocka_unit_test(a_setting_that_means_nothing_is_left_out),
		cmocka_unit_test(there_is_one_pkey),
		cmocka_unit_test(a_forked_child_leaves_the_parent_alone_and_can_open_its_own),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

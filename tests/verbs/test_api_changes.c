/* Addresses and links that change while a program runs. In network namespaces of its own. */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "verbs/helper_api.h"

static struct ibv_context *context;

static void write_file(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY);
	if (fd >= 0 && write(fd, text, strlen(text)) < 0)
		perror(path);
	close(fd);
}

/* A namespace in which we may change addresses; false where the machine doesn't allow one. */
static bool enter_namespace(void)
{
	char map[32], groups[32];
	snprintf(map, sizeof(map), "0 %d 1", (int)getuid());
	snprintf(groups, sizeof(groups), "0 %d 1", (int)getgid());
	if (unshare(CLONE_NEWUSER | CLONE_NEWNET))
		return false;
	write_file("/proc/self/setgroups", "deny");
	write_file("/proc/self/uid_map", map);
	write_file("/proc/self/gid_map", groups);
	return system("ip link set lo up 2>/dev/null") == 0;
}

static void do_ip(const char *command) { assert_int_equal(system(command), 0); }

static int ask_for_events(void **state)
{
	(void)state;
	context = open_first();
	/* Waiting for events is what makes the card listen. */
	struct ibv_async_event event;
	fcntl(context->async_fd, F_SETFL, fcntl(context->async_fd, F_GETFL) | O_NONBLOCK);
	return ibv_get_async_event(context, &event) == -1 && errno == EAGAIN ? 0 : -1;
}

static int count_gids(void)
{
	struct ibv_gid_entry entries[256];
	return (int)ibv_query_gid_table(context, entries, 256, 0);
}

static void an_address_that_comes_and_goes_changes_the_table(void **state)
{
	(void)state;
	static const uint8_t mapped[16] = { [10] = 0xff, 0xff, 192, 0, 2, 9 };
	union ibv_gid first, gid;
	int before = count_gids();
	ibv_query_gid(context, 1, 0, &first);
	do_ip("ip addr add 192.0.2.9/32 dev lo");
	assert_int_equal(next_event(context).event_type, IBV_EVENT_GID_CHANGE);
	assert_int_equal(count_gids(), before + 1);
	assert_int_equal(ibv_query_gid(context, 1, before, &gid), 0);
	assert_memory_equal(gid.raw, mapped, 16);
	do_ip("ip addr del 192.0.2.9/32 dev lo");
	assert_int_equal(next_event(context).event_type, IBV_EVENT_GID_CHANGE);
	assert_int_equal(count_gids(), before);
	ibv_query_gid(context, 1, 0, &gid);
	assert_memory_equal(gid.raw, first.raw, 16);
}

static void a_link_that_goes_down_and_up_is_a_port_event(void **state)
{
	(void)state;
	struct ibv_port_attr port;
	do_ip("ip link set lo down");
	struct ibv_async_event event = next_event(context);
	while (event.event_type == IBV_EVENT_GID_CHANGE)
		event = next_event(context);
	assert_int_equal(event.event_type, IBV_EVENT_PORT_ERR);
	assert_int_equal(event.element.port_num, 1);
	assert_int_equal(ibv_query_port(context, 1, &port), 0);
	assert_int_equal(port.state, IBV_PORT_DOWN);
	do_ip("ip link set lo up");
	event = next_event(context);
	while (event.event_type == IBV_EVENT_GID_CHANGE)
		event = next_event(context);
	assert_int_equal(event.event_type, IBV_EVENT_PORT_ACTIVE);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(an_address_that_comes_and_goes_changes_the_table),
		cmocka_unit_test(a_link_that_goes_down_and_up_is_a_port_event),
	};
	if (system("ip -V >/dev/null 2>&1") != 0 || !enter_namespace()) {
		puts("no network namespace can be made here");
		return 77;
	}
	setenv("TELPHER_VERBS_GIDS", "all", 1);
	return cmocka_run_group_tests(tests, ask_for_events, NULL);
}

/* Two network namespaces, joined by two veth pairs, stand for two machines with two cards each: NCCL_SOCKET_IFNAME says
 * which one carries the data, on the listening and on the connecting side. Needs root and ip (skipped otherwise). */
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>
#include "helper_net.h"
#include "net/helper_namespaces.h"
#include "net/socket.h"

static pid_t holders[2];            /* a process in each namespace keeps it alive; nothing has a name, so nothing is left behind */

static pid_t hold_namespace(void)
{
	int ready[2];
	char byte = 0;
	pid_t child;

	if (pipe(ready) != 0) return -1;
	child = fork();
	if (child == 0) {
		byte = unshare(CLONE_NEWNET) == 0;
		if (write(ready[1], &byte, 1) != 1) _exit(1);
		for (;;) pause();
	}
	if (read(ready[0], &byte, 1) != 1) byte = 0;
	close(ready[0]);
	close(ready[1]);
	if (byte) return child;
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
	return -1;
}

static void end_namespaces(void)
{
	for (int i = 0; i < 2; i++) {
		if (holders[i] <= 0) continue;
		kill(holders[i], SIGKILL);
		waitpid(holders[i], NULL, 0);
	}
}

static bool make_namespaces(void)
{
	if (getuid() != 0 || !shell("command -v ip nsenter >/dev/null 2>&1")) return false;
	for (int i = 0; i < 2; i++)
		if ((holders[i] = hold_namespace()) < 0) return false;
	if (!namespaces_join(holders, "tpx0", "10.199.0.", "fd99:0::") || !namespaces_join(holders, "tpy0", "10.199.1.", "fd99:1::")) return false;
	return true;
}

static void enter(int side)
{
	char path[64];
	int fd;

	snprintf(path, sizeof(path), "/proc/%d/ns/net", (int)holders[side]);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0 || setns(fd, CLONE_NEWNET) != 0) _exit(40);
	close(fd);
	tp_sock_forget_devices();
}

static void accept_one(int handle_out, const char *own, const char *other)
{
	unsigned char handle[TP_NET_HANDLE_BYTES];
	char text[TP_ADDR_TEXT], data[64] = "";
	void *listener, *comm = NULL, *request, *at = data;
	struct tp_net_hello who;
	union tp_addr addr;
	uint64_t id;
	size_t room = sizeof(data);
	int tag = 9;

	enter(0);
	if (tp_net_socket.listen(0, handle, &listener) != ncclSuccess || tp_wire_read_handle(handle, &addr, &id) != ncclSuccess) _exit(1);
	if (strncmp(tp_addr_format(&addr, text), own, strlen(own)) != 0) _exit(2);
	if (write(handle_out, handle, sizeof(handle)) != sizeof(handle)) _exit(3);
	while (!comm)
		if (tp_net_socket.accept(listener, &net_hello, &who, &comm) != ncclSuccess) _exit(4);
	if (strncmp(((struct tp_sock_comm *)comm)->peer, other, strlen(other)) != 0) _exit(5);
	if (tp_net_socket.irecv(comm, 1, &at, &room, &tag, NULL, &request) != ncclSuccess || net_wait(request, NULL) != ncclSuccess) _exit(6);
	if (strcmp(data, "over the wire") != 0) _exit(7);
	tp_net_socket.close_recv(comm);
	tp_net_socket.close_listen(listener);
	_exit(0);
}

static void connect_one(int handle_in)
{
	unsigned char handle[TP_NET_HANDLE_BYTES];
	void *connecting = NULL, *comm = NULL, *request;

	enter(1);
	if (read(handle_in, handle, sizeof(handle)) != sizeof(handle)) _exit(11);
	while (!comm)
		if (tp_net_socket.connect(0, handle, &net_hello, &connecting, &comm) != ncclSuccess) _exit(12);
	if (tp_net_socket.isend(comm, "over the wire", 14, 9, NULL, &request) != ncclSuccess || net_wait(request, NULL) != ncclSuccess) _exit(13);
	tp_net_socket.close_send(comm);
	_exit(0);
}

/* Both sides with this NCCL_SOCKET_IFNAME ("" : unset) and family; the addresses must begin like that. */
static void joined_by(const char *ifname, const char *family, const char *own, const char *other)
{
	char name[64], version[64];
	int fds[2], status[2];
	pid_t children[2];

	snprintf(name, sizeof(name), "NCCL_SOCKET_IFNAME%s%s", *ifname ? "=" : "", ifname);
	snprintf(version, sizeof(version), "NCCL_SOCKET_FAMILY%s%s", *family ? "=" : "", family);
	net_set_environment(name, version, "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD=2", NULL);
	assert_int_equal(pipe(fds), 0);
	for (int side = 0; side < 2; side++) {
		children[side] = fork();
		if (children[side] != 0) continue;
		if (side == 0) accept_one(fds[1], own, other);
		else connect_one(fds[0]);
	}
	for (int side = 0; side < 2; side++) assert_int_equal(waitpid(children[side], &status[side], 0), children[side]);
	close(fds[0]);
	close(fds[1]);
	assert_int_equal(WEXITSTATUS(status[0]), 0);
	assert_int_equal(WEXITSTATUS(status[1]), 0);
}

static void the_first_real_interface_is_used_unasked(void **state)
{
	(void)state;
	joined_by("", "", "10.199.", "10.199.");
}

static void a_prefix_chooses_on_both_sides(void **state)
{
	(void)state;
	joined_by("tpy", "", "10.199.1.1<", "10.199.1.2<");
	joined_by("tpx", "", "10.199.0.1<", "10.199.0.2<");
	joined_by("eth,tpx", "", "10.199.0.1<", "10.199.0.2<");
}

static void an_exact_name_chooses_on_both_sides(void **state)
{
	(void)state;
	joined_by("=tpy0", "", "10.199.1.1<", "10.199.1.2<");
	joined_by("=tpx,tpy0", "", "10.199.1.1<", "10.199.1.2<");
}

static void an_exclusion_chooses_on_both_sides(void **state)
{
	(void)state;
	joined_by("^tpx,lo", "", "10.199.1.1<", "10.199.1.2<");
	joined_by("^=tpy0,lo", "", "10.199.0.1<", "10.199.0.2<");
}

static void ipv6_is_used_where_asked_for(void **state)
{
	(void)state;
	if (!shell("nsenter -t %d -n ip -6 addr show dev tpy0 2>/dev/null | grep -q fd99", (int)holders[0])) skip();
	joined_by("tpy", "AF_INET6", "fd99:1::1", "fd99:1::2");
}

static void a_link_local_address_is_enough(void **state)
{
	(void)state;
	for (int i = 0; i < 2; i++)
		if (!shell("nsenter -t %d -n sh -c 'ip -6 addr del fd99:1::%d/64 dev tpy0' 2>/dev/null", (int)holders[i], i + 1)) skip();
	for (int i = 0; i < 2; i++) {
		/* Duplicate address detection takes its time. */
		while (shell("nsenter -t %d -n ip -6 addr show dev tpy0 tentative | grep -q fe80", (int)holders[i])) usleep(10000);
		if (!shell("nsenter -t %d -n ip -6 addr show dev tpy0 | grep -q fe80", (int)holders[i])) skip();
	}
	joined_by("=tpy0", "AF_INET6", "fe80:", "fe80:");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(the_first_real_interface_is_used_unasked),
		cmocka_unit_test(a_prefix_chooses_on_both_sides),
		cmocka_unit_test(an_exact_name_chooses_on_both_sides),
		cmocka_unit_test(an_exclusion_chooses_on_both_sides),
		cmocka_unit_test(ipv6_is_used_where_asked_for),
		cmocka_unit_test(a_link_local_address_is_enough),
	};
	int failed = 77;

	if (make_namespaces()) failed = cmocka_run_group_tests(tests, NULL, NULL);
	else fprintf(stderr, "skipped: needs root, ip, nsenter and network namespaces\n");
	end_namespaces();
	return failed;
}

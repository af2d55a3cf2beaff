/* Containers: hosts in network namespaces of their own, a cut between them, and NCCL_HOSTIDs that say "one host" where the kernel
 * says two. Needs root and the ip command; skipped otherwise. */
#include "helper_boot.h"
#include <sched.h>
#include <signal.h>
#include <sys/socket.h>
#include "boot/internal.h"

#define EVENT_MS 30000

enum { HERE, PID, WIRED = 4, SEEN, STOPPED, BACK };

static bool can_have_spaces(void)
{
	int status;
	if (geteuid() != 0 || system("ip -V >/dev/null 2>&1") != 0) return false;
	fflush(NULL);
	pid_t pid = fork();
	if (pid == 0) _exit(unshare(CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWPID) == 0 && system("ip link add tpx type veth peer name tpy 2>/dev/null") == 0 ? 0 : 1);
	return pid > 0 && waitpid(pid, &status, 0) == pid && status == 0;
}

static void shell(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void shell(const char *format, ...)
{
	char line[200];
	va_list args;
	va_start(args, format);
	vsnprintf(line, sizeof(line), format, args);
	va_end(args);
	must(system(line) == 0);
}

/* Rank r becomes a machine of its own, "cut-r" at 10.98.76.(r + 1), joined to the other by a cable. */
static void become_a_machine(struct helper_job *job)
{
	char name[16];
	snprintf(name, sizeof(name), "cut-%d", job->rank);
	unsetenv("NCCL_HOSTID");
	setenv("NCCL_SOCKET_IFNAME", "tpc", 1);
	tp_param_reload();
	must(unshare(CLONE_NEWNET | CLONE_NEWUTS) == 0);
	must(sethostname(name, strlen(name)) == 0);
	helper_put(job, PID + job->rank, getpid());
	helper_add(job, HERE);
	helper_await(job, HERE, 2);
	if (job->rank == 0) {
		shell("ip link add tpc0 type veth peer name tpc1 netns %d", helper_get(job, PID + 1));
		helper_put(job, WIRED, 1);
	}
	helper_await(job, WIRED, 1);
	shell("ip addr add 10.98.76.%d/24 dev tpc%d && ip link set lo up && ip link set tpc%d up", job->rank + 1, job->rank, job->rank);
	helper_add(job, WIRED);
	helper_await(job, WIRED, 3);
}

static void lose_the_cable(struct helper_job *job)
{
	struct tp_boot *boot;
	struct tp_event event;
	char text[64];
	become_a_machine(job);
	helper_open(job, &boot);
	must(boot->nhosts == 2);
	must(tp_boot_barrier(boot) == ncclSuccess);
	/* Too busy for a second: no reason to be taken for dead. */
	if (job->rank == 0) {
		must(kill(helper_get(job, PID + 1), SIGSTOP) == 0);
		usleep(1000000);
		must(kill(helper_get(job, PID + 1), SIGCONT) == 0);
	}
	must(tp_boot_barrier(boot) == ncclSuccess);
	must(tp_boot_barrier(boot) == ncclSuccess);
	must(!tp_boot_first_event(boot, &event));
	if (job->rank == 0) shell("ip link set tpc0 down");
	must(helper_event(boot, EVENT_MS, &event));
	must(event.kind == TP_EVENT_DEAD && event.rank == 1 - job->rank);
	snprintf(text, sizeof(text), "rank %d (host cut-%d,", 1 - job->rank, 1 - job->rank);
	must(strstr(event.text, text) && strstr(event.text, "cut off"));
	must(tp_boot_barrier(boot) == ncclRemoteError);
	tp_boot_close(boot);
}
static void a_cut_network_is_found_on_both_sides(void **state)
{
	(void)state;
	if (!can_have_spaces()) skip();
	assert_int_equal(helper_run(2, 2, lose_the_cable, NULL), 0);
}

static void be_one_host_in_two_networks(struct helper_job *job)
{
	struct tp_boot *boot;
	become_a_machine(job);
	setenv("NCCL_HOSTID", "one", 1);
	tp_param_reload();
	must(helper_try_open(job, job->rank, 2, 30000, &boot) == (job->rank == 0 ? ncclRemoteError : ncclSystemError));
	must(strstr(tp_log_last_error(), "different network namespaces") && strstr(tp_log_last_error(), "NCCL_HOSTID"));
	must(strstr(tp_log_last_error(), "rank 0"));
	helper_add(job, SEEN);
	helper_await(job, SEEN, 2);
}
static void one_host_id_in_two_network_namespaces_is_an_error(void **state)
{
	(void)state;
	if (!can_have_spaces()) skip();
	assert_int_equal(helper_run(2, 1, be_one_host_in_two_networks, NULL), 0);
}

static void expect_refusal(struct helper_job *job, const char *what)
{
	struct tp_boot *boot;
	must(helper_try_open(job, job->rank, 2, 30000, &boot) == (job->rank == 0 ? ncclRemoteError : ncclSystemError));
	must(strstr(tp_log_last_error(), what));
	helper_add(job, SEEN);
	helper_await(job, SEEN, 2);
}

static void be_one_host_in_two_pid_spaces(struct helper_job *job)
{
	int status;
	if (job->rank == 0) {
		expect_refusal(job, "PID namespace");
		return;
	}
	must(unshare(CLONE_NEWPID) == 0);
	pid_t pid = fork();
	must(pid >= 0);
	if (pid == 0) {
		expect_refusal(job, "PID namespace");
		_exit(0);
	}
	must(waitpid(pid, &status, 0) == pid && status == 0);
}
static void one_host_id_in_two_pid_namespaces_is_an_error(void **state)
{
	(void)state;
	if (!can_have_spaces()) skip();
	assert_int_equal(helper_run(2, 1, be_one_host_in_two_pid_spaces, NULL), 0);
}

static void be_of_two_users(struct helper_job *job)
{
	if (job->rank == 1) must(setresuid(65533, 65533, 65533) == 0);
	expect_refusal(job, "as user 65533");
}
static void ranks_of_one_host_that_run_as_two_users_are_an_error(void **state)
{
	(void)state;
	if (geteuid() != 0) skip();
	assert_int_equal(helper_run(2, 1, be_of_two_users, NULL), 0);
}

/* The address at which this process's leader hands out segments, from the kernel's list. */
static bool find_listener(char name[128])
{
	char line[512];
	FILE *file = fopen("/proc/net/unix", "r");
	bool found = false;
	must(file);
	while (!found && fgets(line, sizeof(line), file)) {
		char *at = strstr(line, "@telpher-");
		if (!at || strlen(at) != 1 + strlen("telpher-") + 32 + 1) continue;
		snprintf(name, 128, "%.40s", at + 1);
		int fd = -1;
		pid_t pid;
		uid_t uid;
		if (tp_unix_try_connect(name, 0, &fd) != 0) continue;
		found = tp_unix_peer(fd, &pid, &uid) == ncclSuccess && pid == getppid();
		close(fd);
	}
	fclose(file);
	return found;
}

/* Knows the secret, but is of another user: gets nothing. Runs in a child of the leader. */
static void ask_as_another_user(const struct tp_boot *boot)
{
	struct tp_wire_hello hello;
	struct tp_wire_challenge challenge;
	struct tp_wire_frame frame;
	uint8_t proof[TP_SECRET_BYTES], keys[2][TP_SECRET_BYTES];
	uint32_t which = 0;
	char name[128], byte;
	int fd = -1;
	must(setresuid(65533, 65533, 65533) == 0);
	must(find_listener(name));
	must(tp_unix_try_connect(name, 1000, &fd) == 0);
	tp_wire_hello_make(&hello, TP_WIRE_SEGMENT, 0, boot->comm_hash);
	must(send(fd, &hello, sizeof(hello), 0) == sizeof(hello));
	must(recv(fd, &challenge, sizeof(challenge), MSG_WAITALL) == sizeof(challenge));
	tp_wire_prove(boot->secret, TP_WIRE_CALLER, &hello, challenge.nonce, proof);
	tp_wire_session(boot->secret, &hello, challenge.nonce, keys);
	tp_wire_seal(&frame, keys[0], TP_FRAME_ASK, 0, &which, sizeof(which));
	must(send(fd, proof, sizeof(proof), MSG_NOSIGNAL) == sizeof(proof));
	send(fd, &frame, sizeof(frame), MSG_NOSIGNAL);
	send(fd, &which, sizeof(which), MSG_NOSIGNAL);
	must(recv(fd, &byte, 1, 0) <= 0);
	close(fd);
}
static void be_asked_by_another_user(struct helper_job *job)
{
	struct tp_boot *boot;
	int status;
	helper_open(job, &boot);
	must(tp_boot_barrier(boot) == ncclSuccess);
	if (job->rank == 0) {
		pid_t pid = fork();
		must(pid >= 0);
		if (pid == 0) {
			ask_as_another_user(boot);
			_exit(0);
		}
		must(waitpid(pid, &status, 0) == pid && status == 0);
	}
	must(tp_boot_barrier(boot) == ncclSuccess);
	tp_boot_close(boot);
}
static void another_user_gets_no_segment(void **state)
{
	(void)state;
	if (geteuid() != 0) skip();
	assert_int_equal(helper_run(2, 1, be_asked_by_another_user, NULL), 0);
}

int main(int argc, char **argv)
{
	if (argc > 1) cmocka_set_test_filter(argv[1]);
	setenv("NCCL_SOCKET_IFNAME", "lo", 1);
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_cut_network_is_found_on_both_sides),
		cmocka_unit_test(one_host_id_in_two_network_namespaces_is_an_error),
		cmocka_unit_test(one_host_id_in_two_pid_namespaces_is_an_error),
		cmocka_unit_test(ranks_of_one_host_that_run_as_two_users_are_an_error),
		cmocka_unit_test(another_user_gets_no_segment),
	};
	return geteuid() == 0 ? cmocka_run_group_tests(tests, NULL, NULL) : 77;
}

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>
#include "base/helper_base.h"

static char name[64];

static int clean(void **s)
{
	(void)s;
	test_clean_environment();
	snprintf(name, sizeof(name), "telpher-test-%d", getpid());
	return 0;
}

static void make_pair(int pair[2])
{
	int listener;
	assert_int_equal(tp_unix_listen(name, 4, &listener), ncclSuccess);
	assert_int_equal(tp_unix_connect(name, 5000, &pair[0]), ncclSuccess);
	pair[1] = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
	assert_true(pair[1] >= 0);
	close(listener);
}

static void a_name_is_free_again_when_its_listener_is_gone(void **s)
{
	(void)s;
	int a, b = -7;
	assert_int_equal(tp_unix_listen(name, 4, &a), ncclSuccess);
	assert_int_equal(tp_unix_listen(name, 4, &b), ncclSystemError);
	assert_int_equal(b, -7);
	close(a);
	assert_int_equal(tp_unix_listen(name, 4, &a), ncclSuccess);
	close(a);
}

static void names_that_are_too_long_or_empty_are_refused(void **s)
{
	(void)s;
	int fd;
	char text[200];
	memset(text, 'n', sizeof(text));
	text[107] = 0;
	assert_int_equal(tp_unix_listen(text, 4, &fd), ncclSuccess);
	close(fd);
	text[107] = 'n';
	text[108] = 0;
	assert_int_equal(tp_unix_listen(text, 4, &fd), ncclInvalidArgument);
	assert_int_equal(tp_unix_connect("", 10, &fd), ncclInvalidArgument);
}

static void connecting_to_nobody_ends_at_the_time_limit(void **s)
{
	(void)s;
	int fd = -7;
	assert_int_equal(tp_unix_connect(name, 20, &fd), ncclRemoteError);
	assert_int_equal(fd, -7);
	assert_non_null(strstr(tp_log_last_error(), "Connection refused"));
}

static void connecting_to_a_full_queue_ends_at_the_time_limit(void **s)
{
	(void)s;
	int listener, fds[8], count = 0;
	assert_int_equal(tp_unix_listen(name, 0, &listener), ncclSuccess);
	while (count < 8 && tp_unix_connect(name, 20, &fds[count]) == ncclSuccess)
		count++;
	assert_in_range(count, 1, 7);
	assert_non_null(strstr(tp_log_last_error(), "its queue stays full"));
	while (count > 0)
		close(fds[--count]);
	close(listener);
}

static void a_descriptor_and_its_bytes_arrive(void **s)
{
	(void)s;
	int pair[2], pipe_fds[2], got = -1;
	char text[6] = "", byte = 0;
	make_pair(pair);
	assert_int_equal(pipe(pipe_fds), 0);
	assert_int_equal(tp_unix_send_fd(pair[0], pipe_fds[1], "hello", 6), ncclSuccess);
	assert_int_equal(tp_unix_recv_fd(pair[1], &got, text, 6, tp_clock_ms() + 5000), ncclSuccess);
	assert_string_equal(text, "hello");
	assert_true(fcntl(got, F_GETFD) & FD_CLOEXEC);
	assert_int_equal(write(got, "x", 1), 1);
	assert_int_equal(read(pipe_fds[0], &byte, 1), 1);
	assert_int_equal(byte, 'x');
	int fds[] = { got, pipe_fds[0], pipe_fds[1], pair[0], pair[1] };
	for (size_t i = 0; i < TP_ARRAY_LEN(fds); i++)
		close(fds[i]);
}

static void a_descriptor_may_come_without_bytes_and_two_stay_apart(void **s)
{
	(void)s;
	int pair[2], a, b;
	char rest[2];
	make_pair(pair);
	assert_int_equal(tp_unix_send_fd(pair[0], 0, NULL, 0), ncclSuccess);
	assert_int_equal(tp_unix_send_fd(pair[0], 1, "ok", 2), ncclSuccess);
	assert_int_equal(tp_unix_recv_fd(pair[1], &a, NULL, 0, tp_clock_ms() + 5000), ncclSuccess);
	assert_int_equal(tp_unix_recv_fd(pair[1], &b, rest, 2, tp_clock_ms() + 5000), ncclSuccess);
	assert_memory_equal(rest, "ok", 2);
	close(a);
	close(b);
	close(pair[0]);
	close(pair[1]);
}

static void many_bytes_may_come_with_a_descriptor(void **s)
{
	(void)s;
	int pair[2], got;
	size_t bytes = 4 << 20;
	char *data = malloc(bytes), *received = calloc(1, bytes);
	for (size_t i = 0; i < bytes; i++)
		data[i] = (char)(i * 31);
	make_pair(pair);
	pid_t child = fork();
	if (child == 0)
		_exit(tp_unix_send_fd(pair[0], 0, data, bytes) == ncclSuccess ? 0 : 1);
	assert_int_equal(tp_unix_recv_fd(pair[1], &got, received, bytes, tp_clock_ms() + 10000), ncclSuccess);
	assert_memory_equal(received, data, bytes);
	int status;
	waitpid(child, &status, 0);
	assert_int_equal(status, 0);
	close(got);
	close(pair[0]);
	close(pair[1]);
	free(data);
	free(received);
}

static void send_fds(int sock, const int *fds, size_t count)
{
	char byte = 'b', control[CMSG_SPACE(64 * sizeof(int))] __attribute__((aligned(8))) = { 0 };
	struct iovec iov = { &byte, 1 };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1 };
	if (count > 0) {
		msg.msg_control = control;
		msg.msg_controllen = CMSG_SPACE(count * sizeof(int));
		struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(count * sizeof(int));
		memcpy(CMSG_DATA(c), fds, count * sizeof(int));
	}
	assert_int_equal(sendmsg(sock, &msg, 0), 1);
}

static void any_other_number_of_descriptors_is_refused_and_none_is_kept(void **s)
{
	(void)s;
	static const size_t counts[] = { 0, 2, 3, 16, 17, 60 };
	int pair[2], fds[64] = { 0 }, got = -7;
	char byte;
	make_pair(pair);
	for (size_t i = 0; i < TP_ARRAY_LEN(counts); i++) {
		int before = test_open_fds();
		send_fds(pair[0], fds, counts[i]);
		assert_int_equal(tp_unix_recv_fd(pair[1], &got, &byte, 1, tp_clock_ms() + 5000), ncclRemoteError);
		assert_int_equal(got, -7);
		assert_int_equal(test_open_fds(), before);
	}
	close(pair[0]);
	close(pair[1]);
}

static void a_silent_a_short_and_a_closed_peer_are_remote_errors(void **s)
{
	(void)s;
	int pair[2], got = -7, fd = 0;
	char data[8];
	make_pair(pair);
	assert_int_equal(tp_unix_recv_fd(pair[1], &got, data, 8, tp_clock_ms() + 20), ncclRemoteError);
	int before = test_open_fds();
	send_fds(pair[0], &fd, 1);
	assert_int_equal(tp_unix_recv_fd(pair[1], &got, data, 8, tp_clock_ms() + 20), ncclRemoteError);
	assert_int_equal(test_open_fds(), before);
	close(pair[0]);
	assert_int_equal(tp_unix_recv_fd(pair[1], &got, data, 8, tp_clock_ms() + 5000), ncclRemoteError);
	assert_int_equal(tp_unix_send_fd(pair[1], 0, data, 8), ncclRemoteError);
	assert_int_equal(got, -7);
	close(pair[1]);
}

static void a_receiver_without_descriptors_left_says_so(void **s)
{
	(void)s;
	int pair[2], got = -7;
	char byte;
	struct rlimit limit, none;
	make_pair(pair);
	assert_int_equal(tp_unix_send_fd(pair[0], 0, "x", 1), ncclSuccess);
	getrlimit(RLIMIT_NOFILE, &limit);
	none = (struct rlimit){ 3, limit.rlim_max };
	setrlimit(RLIMIT_NOFILE, &none);
	ncclResult_t result = tp_unix_recv_fd(pair[1], &got, &byte, 1, tp_clock_ms() + 5000);
	setrlimit(RLIMIT_NOFILE, &limit);
	assert_int_equal(result, ncclRemoteError);
	assert_non_null(strstr(tp_log_last_error(), "no descriptor left"));
	close(pair[0]);
	close(pair[1]);
}

static void who_connected_is_known(void **s)
{
	(void)s;
	int pair[2];
	pid_t pid = 0;
	uid_t uid = 12345;
	make_pair(pair);
	assert_int_equal(tp_unix_peer(pair[1], &pid, &uid), ncclSuccess);
	assert_int_equal(pid, getpid());
	assert_int_equal(uid, getuid());
	close(pair[0]);
	close(pair[1]);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup(a_name_is_free_again_when_its_listener_is_gone, clean),
		cmocka_unit_test_setup(names_that_are_too_long_or_empty_are_refused, clean),
		cmocka_unit_test_setup(connecting_to_nobody_ends_at_the_time_limit, clean),
		cmocka_unit_test_setup(connecting_to_a_full_queue_ends_at_the_time_limit, clean),
		cmocka_unit_test_setup(a_descriptor_and_its_bytes_arrive, clean),
		cmocka_unit_test_setup(a_descriptor_may_come_without_bytes_and_two_stay_apart, clean),
		cmocka_unit_test_setup(many_bytes_may_come_with_a_descriptor, clean),
		cmocka_unit_test_setup(any_other_number_of_descriptors_is_refused_and_none_is_kept, clean),
		cmocka_unit_test_setup(a_silent_a_short_and_a_closed_peer_are_remote_errors, clean),
		cmocka_unit_test_setup(a_receiver_without_descriptors_left_says_so, clean),
		cmocka_unit_test_setup(who_connected_is_known, clean),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

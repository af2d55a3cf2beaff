/* What goes wrong is an error that names who and what, at once, and stays one. */
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include "helper_net.h"
#include "net/socket.h"

static int on_loopback(void **state)
{
	(void)state;
	net_set_environment("NCCL_SOCKET_IFNAME=lo", "NCCL_SOCKET_FAMILY", "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD", "NCCL_SOCKET_RETRY_CNT",
		"NCCL_SOCKET_RETRY_SLEEP_MSEC", NULL);
	return 0;
}

static void expect_words(const char *words)
{
	if (!strstr(tp_log_last_error(), words)) fail_msg("the last error should say \"%s\": %s", words, tp_log_last_error());
}

static ncclResult_t test_until_error(void *request)
{
	ncclResult_t result = ncclSuccess;
	bool done = false;

	while (result == ncclSuccess) {
		result = tp_net_socket.test(request, &done, NULL);
		assert_false(done);
	}
	return result;
}

static void a_tag_that_differs_is_an_error_with_both(void **state)
{
	struct net_pair pair;
	char got[16];
	void *s, *r;

	(void)state;
	net_pair_open(&pair);
	net_send_one(&pair, "abcd", 4, 17, &s);
	net_recv_one(&pair, got, sizeof(got), 23, &r);
	assert_int_equal(test_until_error(r), ncclInvalidUsage);
	expect_words("tag 17");
	expect_words("tag 23");
	expect_words("rank 3 -> rank 5");
	assert_int_equal(test_until_error(r), ncclInvalidUsage);
	net_pair_close(&pair);
}

static void a_message_above_the_receive_is_an_error_with_both(void **state)
{
	struct net_pair pair;
	char got[100] = "";
	static char data[5000];
	void *s, *r;

	(void)state;
	net_pair_open(&pair);
	net_recv_one(&pair, got, sizeof(got), 1, &r);
	net_send_one(&pair, data, sizeof(data), 1, &s);
	assert_int_equal(test_until_error(r), ncclInvalidUsage);
	expect_words("sent 5000 bytes");
	expect_words("at most 100 bytes");
	net_pair_close(&pair);
}

static void a_closed_connection_is_a_remote_error_that_stays(const char *nthreads, const char *nsocks, size_t bytes)
{
	struct net_pair pair;
	unsigned char *data = calloc(1, bytes);
	void *r, *more;
	void *at = data;
	int tag = 1;

	net_set_environment(nthreads, nsocks, NULL);
	net_pair_open(&pair);
	net_recv_one(&pair, data, bytes, 1, &r);
	tp_net_socket.close_send(pair.send_comm);
	pair.send_comm = NULL;
	assert_int_equal(test_until_error(r), ncclRemoteError);
	expect_words("127.0.0.1");
	assert_int_equal(test_until_error(r), ncclRemoteError);
	assert_int_equal(tp_net_socket.irecv(pair.recv_comm, 1, &at, &bytes, &tag, NULL, &more), ncclRemoteError);
	net_pair_close(&pair);
	free(data);
}

static void a_sender_that_closes_is_a_remote_error(void **state)
{
	(void)state;
	a_closed_connection_is_a_remote_error_that_stays("NCCL_SOCKET_NTHREADS=1", "NCCL_NSOCKS_PERTHREAD=1", 10);
	a_closed_connection_is_a_remote_error_that_stays("NCCL_SOCKET_NTHREADS=1", "NCCL_NSOCKS_PERTHREAD=4", 1000000);
	a_closed_connection_is_a_remote_error_that_stays("NCCL_SOCKET_NTHREADS=2", "NCCL_NSOCKS_PERTHREAD=2", 1000000);
}

/* Receives are posted ahead, so one always waits when the sender leaves: that is no fault before somebody asks for it. */
static void a_stream_that_ends_between_messages_is_silent_until_asked(void **state)
{
	static const char *const streams[][2] = { { "NCCL_SOCKET_NTHREADS=1", "NCCL_NSOCKS_PERTHREAD=1" }, { "NCCL_SOCKET_NTHREADS=2", "NCCL_NSOCKS_PERTHREAD=2" } };

	(void)state;
	for (size_t i = 0; i < TP_ARRAY_LEN(streams); i++) {
		struct net_pair pair;
		char data[2000] = "farewell", got[2000], more[100];
		void *s, *first, *second;

		net_set_environment(streams[i][0], streams[i][1], NULL);
		net_pair_open(&pair);
		net_recv_one(&pair, got, sizeof(got), 1, &first);
		net_recv_one(&pair, more, sizeof(more), 1, &second);
		net_send_one(&pair, data, sizeof(data), 1, &s);
		assert_int_equal(net_wait(s, NULL), ncclSuccess);
		tp_net_socket.close_send(pair.send_comm);
		pair.send_comm = NULL;
		usleep(20000);      /* what is to come, the end too, is there */
		(void)TP_FAIL(ncclInvalidUsage, "an error from before");
		assert_int_equal(net_wait(first, NULL), ncclSuccess);
		assert_memory_equal(got, data, sizeof(data));
		expect_words("an error from before");
		assert_int_equal(test_until_error(second), ncclRemoteError);
		expect_words("closed the connection while data was expected");
		net_pair_close(&pair);
	}
}

static void a_receiver_that_closes_is_a_remote_error(const char *nthreads, const char *nsocks)
{
	struct net_pair pair;
	size_t bytes = 32 << 20;
	unsigned char *data = calloc(1, bytes);
	void *s;

	net_set_environment(nthreads, nsocks, NULL);
	net_pair_open(&pair);
	net_send_one(&pair, data, bytes, 1, &s);
	tp_net_socket.close_recv(pair.recv_comm);
	pair.recv_comm = NULL;
	assert_int_equal(test_until_error(s), ncclRemoteError);
	expect_words("127.0.0.1");
	net_pair_close(&pair);
	free(data);
}

static void sending_to_one_who_left_is_a_remote_error(void **state)
{
	(void)state;
	a_receiver_that_closes_is_a_remote_error("NCCL_SOCKET_NTHREADS=1", "NCCL_NSOCKS_PERTHREAD=1");
	a_receiver_that_closes_is_a_remote_error("NCCL_SOCKET_NTHREADS=1", "NCCL_NSOCKS_PERTHREAD=4");
	a_receiver_that_closes_is_a_remote_error("NCCL_SOCKET_NTHREADS=2", "NCCL_NSOCKS_PERTHREAD=2");
}

static void closing_with_requests_outstanding_is_safe(void **state)
{
	static const char *const threads[] = { "NCCL_SOCKET_NTHREADS=1", "NCCL_SOCKET_NTHREADS=3" };
	size_t bytes = 8 << 20;
	unsigned char *out = calloc(1, bytes), *in = calloc(1, bytes);

	(void)state;
	for (int i = 0; i < 10; i++) {
		struct net_pair pair;
		void *s, *r;
		net_set_environment(threads[i % 2], "NCCL_NSOCKS_PERTHREAD=2", NULL);
		net_pair_open(&pair);
		net_send_one(&pair, out, bytes, 1, &s);
		net_recv_one(&pair, in, bytes, 1, &r);
		for (int k = 0; k < i; k++) {
			bool done;
			assert_int_equal(tp_net_socket.test(r, &done, NULL), ncclSuccess);
			if (done) break;
		}
		net_pair_close(&pair);
	}
	free(out);
	free(in);
}

/* The child connects, sends for ever, and is killed. */
static void a_killed_peer_is_a_remote_error(void **state)
{
	unsigned char handle[TP_NET_HANDLE_BYTES];
	static char data[1 << 20];
	void *listener, *comm = NULL, *at = data;
	struct tp_net_hello who;
	ncclResult_t result = ncclSuccess;
	pid_t child;

	(void)state;
	assert_int_equal(tp_net_socket.listen(0, handle, &listener), ncclSuccess);
	child = fork();
	if (child == 0) {
		void *connecting = NULL, *to = NULL, *request;
		while (!to)
			if (tp_net_socket.connect(0, handle, &net_hello, &connecting, &to) != ncclSuccess) _exit(1);
		for (int i = 0;; i++) {
			if (tp_net_socket.isend(to, data, sizeof(data), 1, NULL, &request) != ncclSuccess || net_wait(request, NULL) != ncclSuccess) _exit(2);
			if (i == 20) raise(SIGKILL);
		}
	}
	while (!comm) assert_int_equal(tp_net_socket.accept(listener, &net_hello, &who, &comm), ncclSuccess);
	for (int received = 0; result == ncclSuccess; received++) {
		size_t room = sizeof(data);
		int tag = 1;
		void *request;
		assert_true(received < 100);
		result = tp_net_socket.irecv(comm, 1, &at, &room, &tag, NULL, &request);
		if (result == ncclSuccess) result = net_wait(request, NULL);
	}
	assert_int_equal(result, ncclRemoteError);
	assert_int_equal(waitpid(child, NULL, 0), child);
	tp_net_socket.close_recv(comm);
	tp_net_socket.close_listen(listener);
}

static void a_refused_connection_is_retried_then_an_error(void **state)
{
	unsigned char handle[TP_NET_HANDLE_BYTES];
	void *listener, *connecting = NULL, *comm = NULL;
	ncclResult_t result = ncclSuccess;

	(void)state;
	net_set_environment("NCCL_SOCKET_RETRY_CNT=3", "NCCL_SOCKET_RETRY_SLEEP_MSEC=1", NULL);
	assert_int_equal(tp_net_socket.listen(0, handle, &listener), ncclSuccess);
	tp_net_socket.close_listen(listener);
	while (result == ncclSuccess) result = tp_net_socket.connect(0, handle, &net_hello, &connecting, &comm);
	assert_int_equal(result, ncclRemoteError);
	assert_null(connecting);
	expect_words("3 retries");
	expect_words("Connection refused");
	expect_words("rank 5");
}

static void a_connection_under_way_can_be_given_up(void **state)
{
	unsigned char handle[TP_NET_HANDLE_BYTES];
	void *listener, *comm = NULL;
	int before = net_open_descriptors();

	(void)state;
	assert_int_equal(tp_net_socket.listen(0, handle, &listener), ncclSuccess);
	for (int i = 0; i < 20; i++) {
		void *connecting = NULL;
		struct tp_net_hello who;
		void *got = NULL;
		assert_int_equal(tp_net_socket.connect(0, handle, &net_hello, &connecting, &comm), ncclSuccess);
		if (i % 2) assert_int_equal(tp_net_socket.accept(listener, &net_hello, &who, &got), ncclSuccess);
		assert_null(got);
		tp_net_socket.cancel_connect(connecting);
	}
	tp_net_socket.close_listen(listener);
	assert_int_equal(net_open_descriptors(), before);
}

static void without_descriptors_it_fails_with_words(void **state)
{
	unsigned char handle[TP_NET_HANDLE_BYTES];
	void *listener, *connecting = NULL, *send_comm = NULL, *recv_comm = NULL;
	struct tp_net_hello who;
	struct rlimit old, none;
	ncclResult_t result = ncclSuccess;
	int fds[64], n = 0;

	(void)state;
	assert_int_equal(tp_net_socket.listen(0, handle, &listener), ncclSuccess);
	assert_int_equal(tp_net_socket.connect(0, handle, &net_hello, &connecting, &send_comm), ncclSuccess);
	/* Fill up to the limit, so that the connection that waits can't be taken. */
	getrlimit(RLIMIT_NOFILE, &old);
	none = old;
	none.rlim_cur = (rlim_t)net_open_descriptors();
	setrlimit(RLIMIT_NOFILE, &none);
	while (n < 64 && (fds[n] = dup(0)) >= 0) n++;
	for (int i = 0; i < 1000000 && result == ncclSuccess; i++) result = tp_net_socket.accept(listener, &net_hello, &who, &recv_comm);
	assert_int_equal(result, ncclSystemError);
	expect_words("RLIMIT_NOFILE");
	void *another = NULL, *comm = NULL;
	assert_int_equal(tp_net_socket.connect(0, handle, &net_hello, &another, &comm), ncclSystemError);
	expect_words("Too many open files");
	assert_null(another);
	while (n > 0) close(fds[--n]);
	setrlimit(RLIMIT_NOFILE, &old);
	/* With descriptors again, the one that waited gets through. */
	while (!send_comm || !recv_comm) {
		if (!send_comm) assert_int_equal(tp_net_socket.connect(0, handle, &net_hello, &connecting, &send_comm), ncclSuccess);
		if (!recv_comm) assert_int_equal(tp_net_socket.accept(listener, &net_hello, &who, &recv_comm), ncclSuccess);
	}
	tp_net_socket.close_send(send_comm);
	tp_net_socket.close_recv(recv_comm);
	tp_net_socket.close_listen(listener);
}

static void a_storm_of_connections_is_served(void **state)
{
	enum { STORM = 300 };
	static void *connecting[STORM], *send_comm[STORM], *recv_comm[STORM];
	static bool seen[STORM];
	unsigned char handle[TP_NET_HANDLE_BYTES];
	struct rlimit limit;
	void *listener;
	int sent = 0, got = 0;

	(void)state;
	getrlimit(RLIMIT_NOFILE, &limit);
	if (limit.rlim_cur < 2 * STORM + 64) {
		limit.rlim_cur = TP_MIN(limit.rlim_max, 2 * STORM + 64);
		setrlimit(RLIMIT_NOFILE, &limit);
	}
	if (limit.rlim_cur < 2 * STORM + 64) skip();
	assert_int_equal(tp_net_socket.listen(0, handle, &listener), ncclSuccess);
	while (sent < STORM || got < STORM) {
		struct tp_net_hello hello = net_hello, who;
		for (int i = 0; i < STORM; i++) {
			if (send_comm[i]) continue;
			hello.from = i;
			assert_int_equal(tp_net_socket.connect(0, handle, &hello, &connecting[i], &send_comm[i]), ncclSuccess);
			sent += send_comm[i] != NULL;
		}
		assert_int_equal(tp_net_socket.accept(listener, &net_hello, &who, &recv_comm[got]), ncclSuccess);
		if (!recv_comm[got]) continue;
		assert_false(seen[who.from]);
		seen[who.from] = true;
		got++;
	}
	for (int i = 0; i < STORM; i++) {
		tp_net_socket.close_send(send_comm[i]);
		tp_net_socket.close_recv(recv_comm[i]);
	}
	tp_net_socket.close_listen(listener);
}

static void a_sleeper_is_woken_by_what_it_waits_for(const char *nthreads)
{
	struct net_pair pair;
	size_t bytes = 4 << 20;
	unsigned char *out = calloc(1, bytes), *in = calloc(1, bytes);
	void *s, *r;
	bool s_done = false, r_done = false;

	net_set_environment(nthreads, "NCCL_NSOCKS_PERTHREAD=2", NULL);
	net_pair_open(&pair);
	for (int i = 0; i < 20; i++) {
		s_done = r_done = false;
		net_recv_one(&pair, in, bytes, 1, &r);
		net_send_one(&pair, out, bytes, 1, &s);
		/* Only sleeping with no limit moves this on: a lost wake-up would hang it. */
		while (!s_done || !r_done) {
			int fds[8], n, epoll = epoll_create1(0);
			uint32_t events[8];
			struct epoll_event event;
			if (!s_done) assert_int_equal(tp_net_socket.test(s, &s_done, NULL), ncclSuccess);
			if (!r_done) assert_int_equal(tp_net_socket.test(r, &r_done, NULL), ncclSuccess);
			n = s_done ? 0 : tp_net_socket.poll_fds(pair.send_comm, fds, events, 4);
			if (!r_done) n += tp_net_socket.poll_fds(pair.recv_comm, fds + n, events + n, 4);
			for (int k = 0; k < n; k++) {
				event = (struct epoll_event){ .events = events[k] };
				assert_int_equal(epoll_ctl(epoll, EPOLL_CTL_ADD, fds[k], &event), 0);
			}
			if (!s_done || !r_done)
				while ((n = epoll_wait(epoll, &event, 1, -1)) < 0) assert_int_equal(errno, EINTR);     /* it was stopped for a moment */
			assert_true(n > 0 || (s_done && r_done));
			close(epoll);
		}
	}
	net_pair_close(&pair);
	free(out);
	free(in);
}

static void sleepers_are_woken(void **state)
{
	(void)state;
	a_sleeper_is_woken_by_what_it_waits_for("NCCL_SOCKET_NTHREADS=1");
	a_sleeper_is_woken_by_what_it_waits_for("NCCL_SOCKET_NTHREADS=2");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup(a_tag_that_differs_is_an_error_with_both, on_loopback),
		cmocka_unit_test_setup(a_message_above_the_receive_is_an_error_with_both, on_loopback),
		cmocka_unit_test_setup(a_sender_that_closes_is_a_remote_error, on_loopback),
		cmocka_unit_test_setup(a_stream_that_ends_between_messages_is_silent_until_asked, on_loopback),
		cmocka_unit_test_setup(sending_to_one_who_left_is_a_remote_error, on_loopback),
		cmocka_unit_test_setup(closing_with_requests_outstanding_is_safe, on_loopback),
		cmocka_unit_test_setup(a_killed_peer_is_a_remote_error, on_loopback),
		cmocka_unit_test_setup(a_refused_connection_is_retried_then_an_error, on_loopback),
		cmocka_unit_test_setup(a_connection_under_way_can_be_given_up, on_loopback),
		cmocka_unit_test_setup(without_descriptors_it_fails_with_words, on_loopback),
		cmocka_unit_test_setup(a_storm_of_connections_is_served, on_loopback),
		cmocka_unit_test_setup(sleepers_are_woken, on_loopback),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

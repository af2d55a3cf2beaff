#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>
#include "base/helper_base.h"

static int clean(void **s)
{
	(void)s;
	test_clean_environment();
	return 0;
}

static union tp_addr loopback(void)
{
	union tp_addr addr = { .v4 = { .sin_family = AF_INET, .sin_addr = { htonl(INADDR_LOOPBACK) } } };
	return addr;
}

/* A port that refuses connections, and that nobody else gets, until the socket is closed: bound, but not listening. */
static int reserve(union tp_addr *addr)
{
	socklen_t length = sizeof(*addr);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	*addr = loopback();
	assert_int_equal(bind(fd, &addr->sa, sizeof(addr->v4)), 0);
	assert_int_equal(getsockname(fd, &addr->sa, &length), 0);
	return fd;
}

static void make_pair(int pair[2])
{
	union tp_addr addr = loopback();
	int listener;
	assert_int_equal(tp_socket_listen(&addr, 4, &listener), ncclSuccess);
	assert_int_equal(tp_socket_connect(&addr, NULL, 5000, "the test", &pair[0]), ncclSuccess);
	pair[1] = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
	assert_true(pair[1] >= 0);
	close(listener);
}

static void a_listener_gets_a_port_and_a_connection_has_its_properties(void **s)
{
	(void)s;
	union tp_addr addr = loopback(), from = loopback();
	int listener, fd, on = 0;
	socklen_t length = sizeof(on);
	assert_int_equal(tp_socket_listen(&addr, 4, &listener), ncclSuccess);
	assert_int_not_equal(addr.v4.sin_port, 0);
	assert_int_equal(tp_socket_connect(&addr, &from, 5000, "the test", &fd), ncclSuccess);
	assert_int_equal(getsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, &length), 0);
	assert_int_not_equal(on, 0);
	assert_int_equal(fcntl(fd, F_GETFL) & O_NONBLOCK, 0);
	assert_true(fcntl(fd, F_GETFD) & FD_CLOEXEC);
	assert_true(fcntl(listener, F_GETFD) & FD_CLOEXEC);
	close(fd);
	close(listener);
}

static void ipv6_works_alike(void **s)
{
	(void)s;
	union tp_addr addr = { .v6 = { .sin6_family = AF_INET6, .sin6_addr = in6addr_loopback } };
	int listener, fd;
	if (tp_socket_listen(&addr, 4, &listener) != ncclSuccess)
		skip();
	assert_int_equal(tp_socket_connect(&addr, NULL, 5000, "the test", &fd), ncclSuccess);
	close(fd);
	close(listener);
}

static void listening_at_an_address_of_somebody_else_is_an_error(void **s)
{
	(void)s;
	union tp_addr addr;
	int fd = -7;
	assert_int_equal(tp_addr_parse_numeric("203.0.113.9:0", "test", &addr), ncclSuccess);
	assert_int_equal(tp_socket_listen(&addr, 4, &fd), ncclSystemError);
	assert_int_equal(fd, -7);
	assert_non_null(strstr(tp_log_last_error(), "can't listen at 203.0.113.9<0>"));
}

static void a_refused_connection_is_retried_and_then_names_the_peer(void **s)
{
	(void)s;
	union tp_addr addr;
	int reserved = reserve(&addr), fd = -7;
	test_set("NCCL_SOCKET_RETRY_CNT", "3");
	test_set("NCCL_SOCKET_RETRY_SLEEP_MSEC", "1");
	assert_int_equal(tp_socket_connect(&addr, NULL, 5000, "rank 3's service", &fd), ncclRemoteError);
	assert_int_equal(fd, -7);
	assert_non_null(strstr(tp_log_last_error(), "rank 3's service at 127.0.0.1<"));
	assert_non_null(strstr(tp_log_last_error(), "Connection refused (4 tries in"));
	close(reserved);
}

static void the_time_limit_ends_the_retries(void **s)
{
	(void)s;
	union tp_addr addr;
	int reserved = reserve(&addr), fd;
	uint64_t start = tp_clock_ms();
	assert_int_equal(tp_socket_connect(&addr, NULL, 20, "the test", &fd), ncclRemoteError);
	/* With the default pauses all 34 tries would take a minute. */
	assert_true(tp_clock_ms() - start < 30000);
	close(reserved);
}

static void *listen_later(void *arg)
{
	usleep(30000);
	return listen(*(int *)arg, 4) == 0 ? arg : NULL;
}

static void a_listener_that_comes_late_is_found(void **s)
{
	(void)s;
	union tp_addr addr;
	int listener = reserve(&addr), fd;
	pthread_t thread;
	void *listens;
	test_set("NCCL_SOCKET_RETRY_SLEEP_MSEC", "5");
	pthread_create(&thread, NULL, listen_later, &listener);
	assert_int_equal(tp_socket_connect(&addr, NULL, 20000, "the test", &fd), ncclSuccess);
	pthread_join(thread, &listens);
	assert_non_null(listens);
	close(fd);
	close(listener);
}

static void a_connection_never_meets_itself(void **s)
{
	(void)s;
	/* Bound to the very port that it connects to, a socket of TCP connects to itself. */
	union tp_addr addr = loopback();
	socklen_t length = sizeof(addr);
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	assert_int_equal(bind(fd, &addr.sa, sizeof(addr.v4)), 0);
	assert_int_equal(getsockname(fd, &addr.sa, &length), 0);
	assert_int_equal(connect(fd, &addr.sa, sizeof(addr.v4)), 0);
	assert_int_equal(tp_socket_connect_finish(fd), ncclRemoteError);
	close(fd);
}

static void a_started_connection_is_finished_later(void **s)
{
	(void)s;
	union tp_addr addr = loopback();
	int listener, fd = -1;
	assert_int_equal(tp_socket_listen(&addr, 4, &listener), ncclSuccess);
	ncclResult_t result = tp_socket_connect_start(&addr, NULL, &fd);
	assert_true(result == ncclSuccess || result == ncclInProgress);
	struct pollfd p = { .fd = fd, .events = POLLOUT };
	assert_int_equal(poll(&p, 1, 5000), 1);
	assert_int_equal(tp_socket_connect_finish(fd), ncclSuccess);
	close(fd);
	close(listener);
	listener = reserve(&addr);
	result = tp_socket_connect_start(&addr, NULL, &fd);
	if (result == ncclInProgress) {
		p.fd = fd;
		assert_int_equal(poll(&p, 1, 5000), 1);
		result = tp_socket_connect_finish(fd);
		close(fd);
	}
	assert_int_equal(result, ncclRemoteError);
	close(listener);
}

static void a_quiet_attempt_says_what_failed_and_logs_nothing(void **s)
{
	(void)s;
	union tp_addr addr;
	bool hopeless = true;
	int reserved = reserve(&addr), fd = -1;
	assert_int_equal(tp_socket_connect_finish(-1), ncclSystemError);        /* the last thing that is logged */
	char before[512];
	snprintf(before, sizeof(before), "%s", tp_log_last_error());
	int error = tp_socket_try_connect_start(&addr, NULL, &fd, &hopeless);
	assert_false(hopeless);
	if (error == EINPROGRESS) {
		struct pollfd p = { .fd = fd, .events = POLLOUT };
		assert_int_equal(poll(&p, 1, 5000), 1);
		error = tp_socket_try_connect_finish(fd);
		close(fd);
	}
	assert_int_equal(error, ECONNREFUSED);
	assert_string_equal(tp_log_last_error(), before);
	close(reserved);
}

struct transfer { int fd; char *data; size_t bytes; ncclResult_t result; };

static void *send_all(void *arg)
{
	struct transfer *t = arg;
	t->result = tp_socket_send(t->fd, t->data, t->bytes, tp_clock_ms() + 20000, "the sender");
	return NULL;
}

static void many_bytes_arrive_whole(bool nonblocking)
{
	int pair[2];
	struct transfer t = { .bytes = 8 << 20 };
	char *received = malloc(t.bytes);
	pthread_t thread;
	make_pair(pair);
	for (int i = 0; i < 2; i++)
		assert_int_equal(tp_socket_set_nonblocking(pair[i], nonblocking), ncclSuccess);
	t.fd = pair[0];
	t.data = malloc(t.bytes);
	for (size_t i = 0; i < t.bytes; i++)
		t.data[i] = (char)(i * 2654435761u >> 13);
	pthread_create(&thread, NULL, send_all, &t);
	assert_int_equal(tp_socket_recv(pair[1], received, t.bytes, tp_clock_ms() + 20000, "the receiver"), ncclSuccess);
	pthread_join(thread, NULL);
	assert_int_equal(t.result, ncclSuccess);
	assert_memory_equal(received, t.data, t.bytes);
	free(t.data);
	free(received);
	close(pair[0]);
	close(pair[1]);
}

static void many_bytes_arrive_whole_on_blocking_sockets(void **s) { (void)s; many_bytes_arrive_whole(false); }
static void many_bytes_arrive_whole_on_nonblocking_sockets(void **s) { (void)s; many_bytes_arrive_whole(true); }

static void on_alarm(int number) { (void)number; }

static void signals_do_not_end_a_transfer(void **s)
{
	(void)s;
	struct sigaction action = { .sa_handler = on_alarm }, before;
	struct itimerval often = { { 0, 500 }, { 0, 500 } }, never = { 0 };
	sigaction(SIGALRM, &action, &before);
	setitimer(ITIMER_REAL, &often, NULL);
	many_bytes_arrive_whole(false);
	setitimer(ITIMER_REAL, &never, NULL);
	sigaction(SIGALRM, &before, NULL);
}

static void a_silent_peer_meets_the_deadline(void **s)
{
	(void)s;
	int pair[2];
	char data[8];
	make_pair(pair);
	assert_int_equal(send(pair[0], "abc", 3, 0), 3);
	assert_int_equal(tp_socket_recv(pair[1], data, 8, tp_clock_ms() + 20, "rank 2's hello"), ncclRemoteError);
	assert_non_null(strstr(tp_log_last_error(), "rank 2's hello (127.0.0.1<"));
	assert_non_null(strstr(tp_log_last_error(), "time is over after 3 of 8 bytes received"));
	close(pair[0]);
	close(pair[1]);
}

static void a_peer_that_does_not_read_meets_the_deadline(void **s)
{
	(void)s;
	int pair[2];
	size_t bytes = 64 << 20;
	char *data = calloc(1, bytes);
	make_pair(pair);
	assert_int_equal(tp_socket_send(pair[0], data, bytes, tp_clock_ms() + 50, "rank 2"), ncclRemoteError);
	assert_non_null(strstr(tp_log_last_error(), "time is over"));
	free(data);
	close(pair[0]);
	close(pair[1]);
}

static void a_closed_peer_is_a_remote_error_and_raises_no_signal(void **s)
{
	(void)s;
	int pair[2];
	char data[65536] = { 0 };
	make_pair(pair);
	close(pair[0]);
	signal(SIGPIPE, SIG_DFL);
	assert_int_equal(tp_socket_recv(pair[1], data, 1, 0, "rank 1"), ncclRemoteError);
	assert_non_null(strstr(tp_log_last_error(), "the peer closed the connection after 0 of 1 bytes received"));
	ncclResult_t result = ncclSuccess;
	for (int i = 0; i < 1000 && result == ncclSuccess; i++)
		result = tp_socket_send(pair[1], data, sizeof(data), tp_clock_ms() + 5000, "rank 1");
	assert_int_equal(result, ncclRemoteError);
	close(pair[1]);
}

static void errors_are_silent_where_nobody_is_named(void **s)
{
	(void)s;
	int pair[2];
	char data;
	make_pair(pair);
	close(pair[0]);
	TP_WARN("before");
	assert_int_equal(tp_socket_recv(pair[1], &data, 1, 0, NULL), ncclRemoteError);
	assert_string_equal(tp_log_last_error(), "before");
	close(pair[1]);
}

static void nothing_is_sent_and_received_at_once(void **s)
{
	(void)s;
	int pair[2];
	make_pair(pair);
	assert_int_equal(tp_socket_send(pair[0], NULL, 0, 1, "x"), ncclSuccess);
	assert_int_equal(tp_socket_recv(pair[1], NULL, 0, 1, "x"), ncclSuccess);
	close(pair[0]);
	close(pair[1]);
}

static void failures_keep_no_descriptor(void **s)
{
	(void)s;
	union tp_addr addr = loopback(), foreign;
	int listener, fd, before = test_open_fds();
	test_set("NCCL_SOCKET_RETRY_CNT", "1");
	test_set("NCCL_SOCKET_RETRY_SLEEP_MSEC", "0");
	assert_int_equal(tp_socket_listen(&addr, 4, &listener), ncclSuccess);
	close(listener);
	assert_int_equal(tp_addr_parse_numeric("203.0.113.9:0", "test", &foreign), ncclSuccess);
	for (int i = 0; i < 20; i++) {
		assert_int_not_equal(tp_socket_connect(&addr, NULL, 1000, "x", &fd), ncclSuccess);
		assert_int_not_equal(tp_socket_connect(&addr, &foreign, 1000, "x", &fd), ncclSuccess);
		assert_int_not_equal(tp_socket_listen(&foreign, 4, &listener), ncclSuccess);
	}
	assert_int_equal(test_open_fds(), before);
}

static void no_descriptor_left_is_a_clear_error(void **s)
{
	(void)s;
	union tp_addr addr = loopback();
	struct rlimit limit, none;
	int fd = -7;
	getrlimit(RLIMIT_NOFILE, &limit);
	none = (struct rlimit){ 3, limit.rlim_max };
	setrlimit(RLIMIT_NOFILE, &none);
	ncclResult_t a = tp_socket_listen(&addr, 4, &fd), b = tp_socket_connect(&addr, NULL, 100, "x", &fd);
	setrlimit(RLIMIT_NOFILE, &limit);
	assert_int_equal(a, ncclSystemError);
	assert_int_equal(b, ncclSystemError);
	assert_int_equal(fd, -7);
	assert_non_null(strstr(tp_log_last_error(), "Too many open files"));
}

static void an_address_of_somebody_else_to_connect_from_is_an_error_at_once(void **s)
{
	(void)s;
	union tp_addr addr = loopback(), foreign;
	int listener, fd = -7;
	assert_int_equal(tp_socket_listen(&addr, 4, &listener), ncclSuccess);
	assert_int_equal(tp_addr_parse_numeric("203.0.113.9:0", "test", &foreign), ncclSuccess);
	assert_int_equal(tp_socket_connect(&addr, &foreign, 60000, "x", &fd), ncclSystemError);
	assert_non_null(strstr(tp_log_last_error(), "(1 tries in"));
	assert_int_equal(tp_socket_connect_start(&addr, &foreign, &fd), ncclSystemError);
	assert_int_equal(fd, -7);
	close(listener);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup(a_listener_gets_a_port_and_a_connection_has_its_properties, clean),
		cmocka_unit_test_setup(ipv6_works_alike, clean),
		cmocka_unit_test_setup(listening_at_an_address_of_somebody_else_is_an_error, clean),
		cmocka_unit_test_setup(a_refused_connection_is_retried_and_then_names_the_peer, clean),
		cmocka_unit_test_setup(the_time_limit_ends_the_retries, clean),
		cmocka_unit_test_setup(a_quiet_attempt_says_what_failed_and_logs_nothing, clean),
		cmocka_unit_test_setup(a_listener_that_comes_late_is_found, clean),
		cmocka_unit_test_setup(a_connection_never_meets_itself, clean),
		cmocka_unit_test_setup(a_started_connection_is_finished_later, clean),
		cmocka_unit_test_setup(many_bytes_arrive_whole_on_blocking_sockets, clean),
		cmocka_unit_test_setup(many_bytes_arrive_whole_on_nonblocking_sockets, clean),
		cmocka_unit_test_setup(signals_do_not_end_a_transfer, clean),
		cmocka_unit_test_setup(a_silent_peer_meets_the_deadline, clean),
		cmocka_unit_test_setup(a_peer_that_does_not_read_meets_the_deadline, clean),
		cmocka_unit_test_setup(a_closed_peer_is_a_remote_error_and_raises_no_signal, clean),
		cmocka_unit_test_setup(errors_are_silent_where_nobody_is_named, clean),
		cmocka_unit_test_setup(nothing_is_sent_and_received_at_once, clean),
		cmocka_unit_test_setup(an_address_of_somebody_else_to_connect_from_is_an_error_at_once, clean),
		cmocka_unit_test_setup(failures_keep_no_descriptor, clean),
		cmocka_unit_test_setup(no_descriptor_left_is_a_clear_error, clean),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

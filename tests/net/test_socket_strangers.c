/* Whoever comes to a listener without belonging to the job is dropped, said in plain words once, and delays nobody. */
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include "helper_net.h"
#include "net/socket.h"

static void *listener;
static unsigned char handle[TP_NET_HANDLE_BYTES];
static union tp_addr address;

static int listen_on_loopback(void **state)
{
	uint64_t id;

	(void)state;
	net_set_environment("NCCL_SOCKET_IFNAME=lo", "NCCL_SOCKET_FAMILY", "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD", "TELPHER_SOCKET_HELLO_TIMEOUT",
		"NCCL_SOCKET_RETRY_SLEEP_MSEC=1", NULL);
	net_log_capture();
	assert_int_equal(tp_net_socket.listen(0, handle, &listener), ncclSuccess);
	assert_int_equal(tp_wire_read_handle(handle, &address, &id), ncclSuccess);
	return 0;
}

static int stop_listening(void **state)
{
	(void)state;
	tp_net_socket.close_listen(listener);
	net_log_end();
	return 0;
}

static int stranger(const void *data, size_t bytes)
{
	int fd = socket(address.sa.sa_family, SOCK_STREAM, 0);

	assert_true(fd >= 0);
	assert_int_equal(connect(fd, &address.sa, tp_addr_len(&address)), 0);
	if (bytes) assert_int_equal(send(fd, data, bytes, MSG_NOSIGNAL), bytes);
	return fd;
}

static void serve_once(void)
{
	struct tp_net_hello who;
	void *comm;

	assert_int_equal(tp_net_socket.accept(listener, &net_hello, &who, &comm), ncclSuccess);
	assert_null(comm);
}

static bool is_closed(int fd)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };
	char bytes[4096];

	if (poll(&p, 1, 0) == 0) return false;
	return recv(fd, bytes, sizeof(bytes), MSG_DONTWAIT) <= 0 && errno != EAGAIN;
}

static void serve_until_closed(int fd)
{
	errno = 0;
	while (!is_closed(fd)) {
		serve_once();
		errno = 0;
	}
	close(fd);
}

static void expect_log(const char *words, int times)
{
	char *text = net_log_text();
	int found = 0;

	for (const char *at = text; (at = strstr(at, words)); at++) found++;
	if (found != times) fail_msg("\"%s\" is %d times in the log, not %d:\n%s", words, found, times, text);
	free(text);
}

/* A rank gets through whatever else is there. */
static void a_rank_gets_through(void)
{
	void *state = NULL, *send_comm = NULL, *recv_comm = NULL;
	struct tp_net_hello who;

	while (!send_comm || !recv_comm) {
		if (!send_comm) assert_int_equal(tp_net_socket.connect(0, handle, &net_hello, &state, &send_comm), ncclSuccess);
		if (!recv_comm) assert_int_equal(tp_net_socket.accept(listener, &net_hello, &who, &recv_comm), ncclSuccess);
	}
	tp_net_socket.close_send(send_comm);
	tp_net_socket.close_recv(recv_comm);
}

static void an_http_request_is_dropped(void **state)
{
	static const char request[] = "GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n";

	(void)state;
	for (int i = 0; i < 3; i++) serve_until_closed(stranger(request, strlen(request)));
	expect_log("an HTTP request", 1);
	a_rank_gets_through();
}

static void a_tls_hello_is_dropped(void **state)
{
	(void)state;
	serve_until_closed(stranger("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11));
	expect_log("a TLS hello", 1);
}

static void zeros_are_dropped(void **state)
{
	static char zeros[3000];

	(void)state;
	serve_until_closed(stranger(zeros, sizeof(zeros)));
	expect_log("zeros", 1);
}

static void one_who_connects_and_leaves_is_dropped(void **state)
{
	(void)state;
	close(stranger(NULL, 0));
	for (int i = 0; i < 100; i++) serve_once();
	a_rank_gets_through();
}

static void silence_is_dropped_after_a_while(void **state)
{
	int fd;

	(void)state;
	tp_net_socket.close_listen(listener);
	net_set_environment("TELPHER_SOCKET_HELLO_TIMEOUT=20", NULL);
	assert_int_equal(tp_net_socket.listen(0, handle, &listener), ncclSuccess);
	assert_int_equal(tp_wire_read_handle(handle, &address, &(uint64_t){ 0 }), ncclSuccess);
	fd = stranger(NULL, 0);
	serve_until_closed(fd);
	expect_log("somebody who says nothing", 1);
	/* One who dribbles a proper beginning, byte by byte, isn't waited for either. */
	fd = stranger("Te", 2);
	serve_until_closed(fd);
	expect_log("an unfinished or malformed hello", 1);
}

static void silent_crowds_delay_nobody(void **state)
{
	enum { CROWD = 400 };
	int fds[CROWD];

	(void)state;
	for (int i = 0; i < CROWD; i++) {
		fds[i] = stranger(NULL, 0);
		if (i % 50 == 0) serve_once();
	}
	a_rank_gets_through();
	for (int i = 0; i < CROWD; i++) close(fds[i]);
}

static void a_rank_of_another_version_is_told(void **state)
{
	struct tp_wire_hello hello = { 0 };
	struct tp_wire_answer answer = { 0 };
	int fd;

	(void)state;
	tp_wire_fill_prefix(&hello.prefix, TP_WIRE_HELLO, sizeof(hello), TP_WIRE_OK);
	hello.prefix.version = 99;
	fd = stranger(&hello, sizeof(hello));
	while (recv(fd, &answer, sizeof(answer), MSG_DONTWAIT) != sizeof(answer)) serve_once();
	assert_int_equal(answer.prefix.status, TP_WIRE_BAD_VERSION);
	serve_until_closed(fd);
	expect_log("another version of the protocol", 1);
}

static ncclResult_t connect_as(const struct tp_net_hello *hello, const unsigned char *to)
{
	void *state = NULL, *send_comm = NULL, *recv_comm = NULL;
	struct tp_net_hello who;
	ncclResult_t result = ncclSuccess;

	while (!send_comm && result == ncclSuccess) {
		result = tp_net_socket.connect(0, to, hello, &state, &send_comm);
		assert_int_equal(tp_net_socket.accept(listener, &net_hello, &who, &recv_comm), ncclSuccess);
		assert_null(recv_comm);
	}
	assert_null(state);
	assert_null(send_comm);
	return result;
}

static void another_communicator_is_refused_with_words(void **state)
{
	struct tp_net_hello other = net_hello;

	(void)state;
	other.comm_hash++;
	assert_int_equal(connect_as(&other, handle), ncclRemoteError);
	assert_non_null(strstr(tp_log_last_error(), "another communicator"));
}

static void a_wrong_secret_is_seen_by_the_connecting_side(void **state)
{
	struct tp_net_hello other = net_hello;

	(void)state;
	other.secret[0] ^= 1;
	assert_int_equal(connect_as(&other, handle), ncclRemoteError);
	assert_non_null(strstr(tp_log_last_error(), "can't prove that it knows the communicator's secret"));
}

static void a_port_taken_over_by_another_listener_is_seen(void **state)
{
	unsigned char old[TP_NET_HANDLE_BYTES];

	(void)state;
	tp_wire_write_handle(&address, 4711, old);
	assert_int_equal(connect_as(&net_hello, old), ncclRemoteError);
	assert_non_null(strstr(tp_log_last_error(), "its listener is a different one"));
}

/* Reads an answer and proves with the given secret. */
static void forge_proof(const struct tp_net_hello *as, bool replay_mirror)
{
	struct tp_wire_hello hello = { 0 };
	struct tp_wire_answer answer;
	struct tp_wire_proof proof;
	struct tp_wire_welcome welcome;
	int fd;

	tp_wire_fill_prefix(&hello.prefix, TP_WIRE_HELLO, sizeof(hello), TP_WIRE_OK);
	memcpy(&hello.listener, &((struct tp_wire_handle *)(void *)handle)->listener, 8);
	hello.comm_hash = as->comm_hash;
	hello.from = 3;
	hello.to = 5;
	hello.nsockets = 1;
	fd = stranger(&hello, sizeof(hello));
	while (recv(fd, &answer, sizeof(answer), MSG_DONTWAIT) != sizeof(answer)) serve_once();
	assert_int_equal(answer.prefix.status, TP_WIRE_OK);
	tp_wire_fill_prefix(&proof.prefix, TP_WIRE_PROOF, sizeof(proof), TP_WIRE_OK);
	if (replay_mirror) memcpy(proof.mac, answer.mac, sizeof(proof.mac));
	else tp_wire_mac(as->secret, true, &hello, answer.nonce, proof.mac);
	assert_int_equal(send(fd, &proof, sizeof(proof), MSG_NOSIGNAL), sizeof(proof));
	while (recv(fd, &welcome, sizeof(welcome), MSG_DONTWAIT) != sizeof(welcome)) serve_once();
	assert_int_equal(welcome.prefix.status, TP_WIRE_BAD_PROOF);
	serve_until_closed(fd);
}

static void a_false_proof_is_refused(void **state)
{
	struct tp_net_hello other = net_hello;

	(void)state;
	other.secret[31] ^= 0x80;
	forge_proof(&other, false);
	forge_proof(&net_hello, true);
	expect_log("a false proof of the secret", 1);
}

static void a_server_that_is_none_of_ours_is_named(void **state)
{
	unsigned char to[TP_NET_HANDLE_BYTES];
	void *connecting = NULL, *comm = NULL;
	union tp_addr here = address;
	int door, fd = -1;
	ncclResult_t result = ncclSuccess;

	(void)state;
	here.v4.sin_port = 0;
	assert_int_equal(tp_socket_listen(&here, 4, &door), ncclSuccess);
	tp_socket_set_nonblocking(door, true);
	tp_wire_write_handle(&here, 1, to);
	while (result == ncclSuccess && !comm) {
		result = tp_net_socket.connect(0, to, &net_hello, &connecting, &comm);
		if (fd < 0 && (fd = accept(door, NULL, NULL)) >= 0) assert_int_equal(send(fd, "HTTP/1.1 400 Bad Request\r\n\r\n", 28, MSG_NOSIGNAL), 28);
	}
	assert_int_equal(result, ncclRemoteError);
	assert_non_null(strstr(tp_log_last_error(), "an HTTP server"));
	close(fd);
	close(door);
}

static void a_server_that_hangs_up_is_given_up_after_some_tries(void **state)
{
	unsigned char to[TP_NET_HANDLE_BYTES];
	void *connecting = NULL, *comm = NULL;
	union tp_addr here = address;
	int door;
	ncclResult_t result = ncclSuccess;

	(void)state;
	here.v4.sin_port = 0;
	assert_int_equal(tp_socket_listen(&here, 4, &door), ncclSuccess);
	tp_socket_set_nonblocking(door, true);
	tp_wire_write_handle(&here, 1, to);
	while (result == ncclSuccess) {
		int fd = accept(door, NULL, NULL);
		if (fd >= 0) close(fd);
		result = tp_net_socket.connect(0, to, &net_hello, &connecting, &comm);
	}
	assert_int_equal(result, ncclRemoteError);
	assert_non_null(strstr(tp_log_last_error(), "broke off the hello"));
	close(door);
}

int main(void)
{
#define STRANGERS(test) cmocka_unit_test_setup_teardown(test, listen_on_loopback, stop_listening)
	const struct CMUnitTest tests[] = {
		STRANGERS(an_http_request_is_dropped),
		STRANGERS(a_tls_hello_is_dropped),
		STRANGERS(zeros_are_dropped),
		STRANGERS(one_who_connects_and_leaves_is_dropped),
		STRANGERS(silence_is_dropped_after_a_while),
		STRANGERS(silent_crowds_delay_nobody),
		STRANGERS(a_rank_of_another_version_is_told),
		STRANGERS(another_communicator_is_refused_with_words),
		STRANGERS(a_wrong_secret_is_seen_by_the_connecting_side),
		STRANGERS(a_port_taken_over_by_another_listener_is_seen),
		STRANGERS(a_false_proof_is_refused),
		STRANGERS(a_server_that_is_none_of_ours_is_named),
		STRANGERS(a_server_that_hangs_up_is_given_up_after_some_tries),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

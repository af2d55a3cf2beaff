/* The socket transport between two ends that behave: what is sent arrives, in order, whole. */
#include <sched.h>
#include <sys/wait.h>
#include "helper_net.h"
#include "net/socket.h"

static int on_loopback(void **state)
{
	(void)state;
	net_set_environment("NCCL_SOCKET_IFNAME=lo", "NCCL_SOCKET_FAMILY", "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD", NULL);
	return 0;
}

static void a_message_arrives_with_its_size(void **state)
{
	struct net_pair pair;
	unsigned char data[100], got[200];
	void *s, *r;
	size_t bytes = 0;

	(void)state;
	net_pair_open(&pair);
	net_fill(data, sizeof(data), 7);
	net_send_one(&pair, data, sizeof(data), 42, &s);
	net_recv_one(&pair, got, sizeof(got), 42, &r);
	assert_int_equal(net_wait_both(s, r, &bytes), ncclSuccess);
	assert_int_equal(bytes, 100);
	net_check(got, 100, 7);
	net_pair_close(&pair);
}

static void the_acceptor_learns_which_link_came(void **state)
{
	struct net_pair pair;

	(void)state;
	net_pair_open(&pair);
	assert_int_equal(pair.who.from, 3);
	assert_int_equal(pair.who.to, 5);
	assert_int_equal(pair.who.channel, 2);
	assert_int_equal(pair.who.lane_class, 1);
	net_pair_close(&pair);
}

static void parts_arrive_as_one_message(void **state)
{
	struct net_pair pair;
	unsigned char *data = malloc(300000), *got = malloc(300000);
	void *s, *r;
	size_t bytes = 0;

	(void)state;
	net_pair_open(&pair);
	net_fill(data, 300000, 1);
	struct iovec parts[3] = { { data, 12 }, { data + 12, 0 }, { data + 12, 300000 - 12 } };
	assert_int_equal(tp_net_socket.isendv(pair.send_comm, parts, 3, 1, NULL, &s), ncclSuccess);
	net_recv_one(&pair, got, 300000, 1, &r);
	assert_int_equal(net_wait_both(s, r, &bytes), ncclSuccess);
	assert_int_equal(bytes, 300000);
	net_check(got, bytes, 1);
	net_pair_close(&pair);
	free(data);
	free(got);
}

static void an_empty_message_is_a_message(void **state)
{
	struct net_pair pair;
	char byte = 'x';
	void *s, *r;
	size_t bytes = 99;

	(void)state;
	net_pair_open(&pair);
	net_recv_one(&pair, &byte, 1, 0, &r);
	net_send_one(&pair, NULL, 0, 0, &s);
	assert_int_equal(net_wait_both(s, r, &bytes), ncclSuccess);
	assert_int_equal(bytes, 0);
	assert_int_equal(byte, 'x');
	net_pair_close(&pair);
}

static void no_more_requests_than_agreed_are_given_out(void **state)
{
	struct net_pair pair;
	char bytes[TP_NET_MAX_REQUESTS];
	void *requests[TP_NET_MAX_REQUESTS], *more = &pair, *s;
	void *data = bytes;
	size_t one = 1;
	int tag = 0;

	(void)state;
	net_pair_open(&pair);
	for (int i = 0; i < TP_NET_MAX_REQUESTS; i++) net_recv_one(&pair, bytes + i, 1, 0, &requests[i]);
	assert_int_equal(tp_net_socket.irecv(pair.recv_comm, 1, &data, &one, &tag, NULL, &more), ncclSuccess);
	assert_null(more);
	net_send_one(&pair, "a", 1, 0, &s);
	assert_int_equal(net_wait_both(s, requests[0], NULL), ncclSuccess);
	assert_int_equal(tp_net_socket.irecv(pair.recv_comm, 1, &data, &one, &tag, NULL, &more), ncclSuccess);
	assert_non_null(more);
	net_pair_close(&pair);
}

/* Random sizes, many under way at once, several of them larger than any socket buffer. */
#define STREAM_MESSAGES 400
static size_t stream_size(uint32_t *random)
{
	static const size_t limits[] = { 1, 16, 300, 5000, 70000, 300000, 1500000 };
	uint32_t limit = net_random(random) % 64;

	return net_random(random) % (limits[limit < 7 ? limit : limit % 5] + 1);
}

static void stream_messages(struct net_pair *pair)
{
	enum { DEPTH = 8 };
	static unsigned char *out[DEPTH], *in[DEPTH];
	void *s[DEPTH] = { 0 }, *r[DEPTH] = { 0 };
	size_t sizes[DEPTH];
	int sent = 0, send_done = 0, posted = 0, received = 0;
	uint32_t random = 12345;

	for (int i = 0; i < DEPTH; i++) {
		out[i] = malloc(1500000);
		in[i] = malloc(1500000);
	}
	while (received < STREAM_MESSAGES || send_done < STREAM_MESSAGES) {
		bool done;
		size_t bytes;
		if (sent < STREAM_MESSAGES && sent - received < DEPTH && sent - send_done < DEPTH) {
			sizes[sent % DEPTH] = stream_size(&random);
			net_fill(out[sent % DEPTH], sizes[sent % DEPTH], (uint32_t)sent);
			net_send_one(pair, out[sent % DEPTH], sizes[sent % DEPTH], sent, &s[sent % DEPTH]);
			sent++;
		}
		if (posted < STREAM_MESSAGES && posted - received < DEPTH - 2) {
			net_recv_one(pair, in[posted % DEPTH], 1500000, posted, &r[posted % DEPTH]);
			posted++;
		}
		if (send_done < sent) {
			assert_int_equal(tp_net_socket.test(s[send_done % DEPTH], &done, NULL), ncclSuccess);
			send_done += done;
		}
		if (received < posted) {
			assert_int_equal(tp_net_socket.test(r[received % DEPTH], &done, &bytes), ncclSuccess);
			if (done) {
				assert_int_equal(bytes, sizes[received % DEPTH]);
				net_check(in[received % DEPTH], bytes, (uint32_t)received);
				received++;
			}
		}
	}
	for (int i = 0; i < DEPTH; i++) {
		free(out[i]);
		free(in[i]);
	}
}

static void many_messages_of_random_sizes(const char *nthreads, const char *nsocks)
{
	struct net_pair pair;
	int descriptors = net_open_descriptors(), threads = net_threads();

	net_set_environment(nthreads, nsocks, NULL);
	net_pair_open(&pair);
	stream_messages(&pair);
	net_pair_close(&pair);
	assert_int_equal(net_open_descriptors(), descriptors);
	/* A joined thread may be seen a moment longer. */
	while (net_threads() > threads) sched_yield();
}

static void one_socket_carries_many_messages(void **state)
{
	(void)state;
	many_messages_of_random_sizes("NCCL_SOCKET_NTHREADS=1", "NCCL_NSOCKS_PERTHREAD=1");
}

static void several_sockets_carry_many_messages(void **state)
{
	(void)state;
	many_messages_of_random_sizes("NCCL_SOCKET_NTHREADS=0", "NCCL_NSOCKS_PERTHREAD=5");
}

static void helper_threads_carry_many_messages(void **state)
{
	(void)state;
	many_messages_of_random_sizes("NCCL_SOCKET_NTHREADS=2", "NCCL_NSOCKS_PERTHREAD=3");
}

static void sixty_four_sockets_are_the_most(void **state)
{
	struct tp_sock_params params;

	(void)state;
	net_set_environment("NCCL_SOCKET_NTHREADS=16", "NCCL_NSOCKS_PERTHREAD=16", NULL);
	tp_sock_get_params(0, &params);
	assert_int_equal(params.nthreads, 16);
	assert_int_equal(params.nsocks_per_thread, 4);
	many_messages_of_random_sizes("NCCL_SOCKET_NTHREADS=16", "NCCL_NSOCKS_PERTHREAD=4");
}

static void the_connecting_side_says_how_many_sockets(void **state)
{
	struct net_pair pair = { 0 };
	unsigned char handle[TP_NET_HANDLE_BYTES];
	struct tp_net_hello who;
	void *connecting = NULL;

	(void)state;
	net_set_environment("NCCL_SOCKET_NTHREADS=2", "NCCL_NSOCKS_PERTHREAD=2", NULL);
	assert_int_equal(tp_net_socket.listen(0, handle, &pair.listener), ncclSuccess);
	net_set_environment("NCCL_SOCKET_NTHREADS=1", "NCCL_NSOCKS_PERTHREAD=3", NULL);
	while (!pair.send_comm || !pair.recv_comm) {
		if (!pair.send_comm) assert_int_equal(tp_net_socket.connect(0, handle, &net_hello, &connecting, &pair.send_comm), ncclSuccess);
		if (!pair.recv_comm) assert_int_equal(tp_net_socket.accept(pair.listener, &net_hello, &who, &pair.recv_comm), ncclSuccess);
	}
	assert_int_equal(((struct tp_sock_comm *)pair.recv_comm)->nstreams, 3);
	assert_int_equal(((struct tp_sock_comm *)pair.recv_comm)->nthreads, 0);
	stream_messages(&pair);
	net_pair_close(&pair);
}

static void ipv6_works_like_ipv4(void **state)
{
	struct net_pair pair;
	int count = 0;

	(void)state;
	net_set_environment("NCCL_SOCKET_IFNAME=lo", "NCCL_SOCKET_FAMILY=AF_INET6", NULL);
	if (tp_net_socket.devices(&count) != ncclSuccess) skip();      /* a machine without ::1 */
	net_pair_open(&pair);
	assert_non_null(strstr(((struct tp_sock_comm *)pair.recv_comm)->peer, "::1"));
	stream_messages(&pair);
	net_pair_close(&pair);
}

static void devices_are_interfaces(void **state)
{
	struct tp_net_properties p;
	int count = 0;

	(void)state;
	assert_int_equal(tp_net_socket.devices(&count), ncclSuccess);
	assert_int_equal(count, 1);
	assert_int_equal(tp_net_socket.properties(0, &p), ncclSuccess);
	assert_string_equal(p.name, "lo");
	assert_int_equal(p.speed_mbps, 10000);
	assert_int_equal(p.memory, TP_NET_HOST);
	assert_int_equal(p.max_recvs, 1);
	assert_int_equal(tp_net_socket.properties(1, &p), ncclInternalError);
}

/* The child echoes what it gets until an empty message ends it. */
static void echo(const unsigned char *handle, int handle_out)
{
	struct net_pair to = { 0 };
	unsigned char mine[TP_NET_HANDLE_BYTES];
	void *connecting = NULL, *request;
	unsigned char *data = malloc(1000000);
	struct tp_net_hello who;

	if (tp_net_socket.listen(0, mine, &to.listener) != ncclSuccess) _exit(1);
	if (write(handle_out, mine, sizeof(mine)) != sizeof(mine)) _exit(2);
	while (!to.send_comm || !to.recv_comm) {
		if (!to.send_comm && tp_net_socket.connect(0, handle, &net_hello, &connecting, &to.send_comm) != ncclSuccess) _exit(3);
		if (!to.recv_comm && tp_net_socket.accept(to.listener, &net_hello, &who, &to.recv_comm) != ncclSuccess) _exit(4);
	}
	for (;;) {
		size_t bytes = 0, room = 1000000;
		void *at = data;
		int tag = 1;
		if (tp_net_socket.irecv(to.recv_comm, 1, &at, &room, &tag, NULL, &request) != ncclSuccess || net_wait(request, &bytes) != ncclSuccess) _exit(5);
		if (tp_net_socket.isend(to.send_comm, data, bytes, 2, NULL, &request) != ncclSuccess || net_wait(request, NULL) != ncclSuccess) _exit(6);
		if (bytes == 0) break;
	}
	net_pair_close(&to);
	free(data);
	_exit(0);
}

static void two_processes_exchange_messages(void **state)
{
	struct net_pair pair = { 0 };
	unsigned char handle[TP_NET_HANDLE_BYTES], theirs[TP_NET_HANDLE_BYTES], *data = malloc(1000000);
	void *connecting = NULL, *s, *r;
	int fds[2], status;
	pid_t child;

	(void)state;
	assert_int_equal(tp_net_socket.init(), ncclSuccess);
	assert_int_equal(pipe(fds), 0);
	assert_int_equal(tp_net_socket.listen(0, handle, &pair.listener), ncclSuccess);
	child = fork();
	if (child == 0) echo(handle, fds[1]);
	assert_int_equal(read(fds[0], theirs, sizeof(theirs)), sizeof(theirs));
	while (!pair.send_comm || !pair.recv_comm) {
		if (!pair.send_comm) assert_int_equal(tp_net_socket.connect(0, theirs, &net_hello, &connecting, &pair.send_comm), ncclSuccess);
		if (!pair.recv_comm) assert_int_equal(tp_net_socket.accept(pair.listener, &net_hello, &pair.who, &pair.recv_comm), ncclSuccess);
	}
	for (size_t size = 1000000;; size /= 3) {
		size_t bytes = 1;
		net_fill(data, size, (uint32_t)size);
		net_send_one(&pair, data, size, 1, &s);
		assert_int_equal(net_wait(s, NULL), ncclSuccess);
		memset(data, 0, size);
		net_recv_one(&pair, data, 1000000, 2, &r);
		assert_int_equal(net_wait(r, &bytes), ncclSuccess);
		assert_int_equal(bytes, size);
		net_check(data, size, (uint32_t)size);
		if (size == 0) break;
	}
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_int_equal(status, 0);
	net_pair_close(&pair);
	close(fds[0]);
	close(fds[1]);
	free(data);
}

static void *nothing(void *arg) { return arg; }

int main(void)
{
	pthread_t thread;

	/* A sanitizer's own thread comes with the first one of ours: before anything is counted. */
	if (pthread_create(&thread, NULL, nothing, NULL) == 0) pthread_join(thread, NULL);

	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup(a_message_arrives_with_its_size, on_loopback),
		cmocka_unit_test_setup(the_acceptor_learns_which_link_came, on_loopback),
		cmocka_unit_test_setup(parts_arrive_as_one_message, on_loopback),
		cmocka_unit_test_setup(an_empty_message_is_a_message, on_loopback),
		cmocka_unit_test_setup(no_more_requests_than_agreed_are_given_out, on_loopback),
		cmocka_unit_test_setup(one_socket_carries_many_messages, on_loopback),
		cmocka_unit_test_setup(several_sockets_carry_many_messages, on_loopback),
		cmocka_unit_test_setup(helper_threads_carry_many_messages, on_loopback),
		cmocka_unit_test_setup(sixty_four_sockets_are_the_most, on_loopback),
		cmocka_unit_test_setup(the_connecting_side_says_how_many_sockets, on_loopback),
		cmocka_unit_test_setup(ipv6_works_like_ipv4, on_loopback),
		cmocka_unit_test_setup(devices_are_interfaces, on_loopback),
		cmocka_unit_test_setup(two_processes_exchange_messages, on_loopback),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

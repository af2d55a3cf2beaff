/* Connections by rdma_cm: on the software card's connection manager, in a network namespace with two interfaces and a port on each; both ends in
 * one thread. What a real manager does and the card's doesn't comes from fake_rdmacm.c. Needs root and ip (skipped otherwise). */
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <sys/wait.h>
#include "helper_ib.h"
#include "net/helper_namespaces.h"
#include "sanitizers.h"

#define BYTES (1u << 20)

static void fault(const char *faults) { assert_true(shell("env LD_PRELOAD= %s verbs fault -p %d %s", TELPHER, (int)getpid(), faults)); }

static int two_ports(void **state)
{
	(void)state;
	ib_use_card(NULL);
	net_set_environment("TELPHER_IB_CONNECT=rdma_cm", "TELPHER_IB_RDMACM_LIB=" FAKE_RDMACM, "FAKE_RDMACM_REAL=" CARD_RDMACM, "NCCL_IB_TIMEOUT=14", "TELPHER_IB_PATH_TIMEOUT=1000", NULL);
	assert_int_equal(tp_net_ib.init(), ncclSuccess);
	assert_int_equal(tp_ib_port_count(), 2);
	return 0;
}

static int one_port(void **state)
{
	two_ports(state);
	net_set_environment("NCCL_IB_HCA=telpher0", NULL);
	tp_ib_forget_devices();
	assert_int_equal(tp_net_ib.init(), ncclSuccess);
	return 0;
}

/* ---- the fake's controls ---- */

static void *control(const char *name)
{
	void *fake = dlopen(FAKE_RDMACM, RTLD_NOW | RTLD_LOCAL), *at = fake ? dlsym(fake, name) : NULL;

	assert_non_null(at);
	return at;
}

static void turn(int from, int to, int status, int times)
{
	void *at = control("fake_rdmacm_turn");
	void (*call)(int, int, int, int);

	memcpy(&call, &at, sizeof(call));
	call(from, to, status, times);
}

static void say(int event, int status)
{
	void *at = control("fake_rdmacm_say");
	void (*call)(int, int);

	memcpy(&call, &at, sizeof(call));
	call(event, status);
}

static void spoil(int event)
{
	void *at = control("fake_rdmacm_spoil");
	void (*call)(int);

	memcpy(&call, &at, sizeof(call));
	call(event);
}

static struct tp_ib_comm *sender(const struct ib_pair *pair) { return pair->send_comm; }
static struct tp_ib_comm *receiver(const struct ib_pair *pair) { return pair->recv_comm; }

static void messages(struct ib_pair *pair, int count)
{
	for (int i = 0; i < count; i++) assert_int_equal(ib_exchange(pair, (size_t)i * 1000, (size_t)i * 517 + 1, i), ncclSuccess);
}

static void exchange_until(struct ib_pair *pair, int active)
{
	uint64_t until = tp_clock_ms() + 60000;

	for (int i = 0; sender(pair)->active != active; i++) {
		assert_int_equal(ib_exchange(pair, (size_t)(i % 100) * 1000, 1000, i), ncclSuccess);
		assert_true(tp_clock_ms() < until);
	}
}

/* ---- what there is ---- */

static void a_missing_library_is_said_with_its_cure(void **state)
{
	char why[512];

	(void)state;
	ib_use_card(NULL);
	net_set_environment("TELPHER_IB_CONNECT=rdma_cm", "TELPHER_IB_RDMACM_LIB=/nowhere/librdmacm.so.1", NULL);
	assert_false(tp_net_ib.present(true, why, sizeof(why)));
	assert_non_null(strstr(why, "TELPHER_IB_CONNECT=rdma_cm: /nowhere/librdmacm.so.1: cannot open shared object file"));
	assert_int_equal(tp_net_ib.init(), ncclInvalidUsage);
	assert_non_null(strstr(tp_log_last_error(), "/nowhere/librdmacm.so.1"));
}

static void a_library_that_is_another_is_said_with_the_symbol_that_it_lacks(void **state)
{
	char why[512];

	(void)state;
	ib_use_card(NULL);
	net_set_environment("TELPHER_IB_CONNECT=rdma_cm", "TELPHER_IB_RDMACM_LIB=" CARD_LIBRARY, NULL);
	assert_false(tp_net_ib.present(true, why, sizeof(why)));
	assert_non_null(strstr(why, "has no rdma_create_event_channel: it is not librdmacm, or older than rdma-core 21 (Debian and Ubuntu: install a newer librdmacm1)"));
}

static void the_address_says_that_rdma_cm_connects(void **state)
{
	struct tp_net_properties properties;

	(void)state;
	assert_int_equal(tp_net_ib.properties(0, &properties), ncclSuccess);
	assert_string_equal(properties.address, "GID 0 ::ffff:10.196.0.1 RoCE v2, rdma_cm");
}

/* ---- connections ---- */

static void every_path_is_connected(void **state)
{
	struct ib_pair pair;

	(void)state;
	net_log_capture();
	ib_pair_open(&pair, BYTES);
	for (int p = 0; p < 2; p++) {
		assert_int_equal(sender(&pair)->paths[p].state, TP_IB_PATH_LIVE);
		assert_int_equal(receiver(&pair)->paths[p].state, TP_IB_PATH_LIVE);
	}
	messages(&pair, 50);
	ib_pair_close(&pair);
	char *log = net_log_text();
	assert_non_null(strstr(log, "connected by rdma_cm\n"));
	assert_non_null(strstr(log, "connected by rdma_cm, stands by\n"));
	assert_null(strstr(log, "NCCL WARN"));
	free(log);
	net_log_end();
}

static bool is_open(int fd) { return fcntl(fd, F_GETFD) >= 0; }

static void a_forked_child_that_closes_keeps_no_descriptor(void **state)
{
	struct ib_pair pair;
	int status = 0;

	(void)state;
	if (SANITIZED) skip();
	ib_pair_open(&pair, BYTES);
	const int fds[] = { tp_ib_cm_fd(sender(&pair)), tp_ib_cm_fd(receiver(&pair)), sender(&pair)->control.fd, receiver(&pair)->control.fd };
	pid_t child = fork();
	if (child == 0) {
		int left = 0;
		tp_net_ib.close_send(pair.send_comm);
		tp_net_ib.close_recv(pair.recv_comm);
		for (size_t i = 0; i < TP_ARRAY_LEN(fds); i++) left += is_open(fds[i]);
		_exit(left);
	}
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_int_equal(status, 0);
	for (size_t i = 0; i < TP_ARRAY_LEN(fds); i++) assert_true(is_open(fds[i]));
	messages(&pair, 20);
	assert_int_equal(sender(&pair)->switches, 0);
	ib_pair_close(&pair);
}

static void several_queue_pairs_are_connected(void **state)
{
	struct ib_pair pair;

	(void)state;
	net_set_environment("NCCL_IB_QPS_PER_CONNECTION=4", "NCCL_IB_SPLIT_DATA_ON_QPS=1", NULL);
	ib_pair_open(&pair, BYTES);
	assert_int_equal(sender(&pair)->nqps, 4);
	messages(&pair, 50);
	ib_pair_close(&pair);
}

static void a_path_that_falls_silent_is_left_and_taken_back(void **state)
{
	struct ib_pair pair;

	(void)state;
	ib_pair_open(&pair, BYTES);
	messages(&pair, 20);
	fault("unroute=10.196.0.1,side=both");
	messages(&pair, 50);
	assert_int_equal(sender(&pair)->active, 1);
	fault("none");
	exchange_until(&pair, 0);
	messages(&pair, 50);
	assert_int_equal(sender(&pair)->paths[0].attempt, receiver(&pair)->paths[0].attempt);
	assert_true(sender(&pair)->paths[0].attempt > 0);
	ib_pair_close(&pair);
}

static void a_path_that_is_lost_is_left(int event, const char *name)
{
	struct ib_pair pair;
	uint64_t until = tp_clock_ms() + 60000;

	net_log_capture();
	ib_pair_open(&pair, BYTES);
	messages(&pair, 5);
	say(event, 0);
	for (int i = 0; sender(&pair)->switches == 0; i++) {
		assert_int_equal(ib_exchange(&pair, 0, 1000, i), ncclSuccess);
		assert_true(tp_clock_ms() < until);
	}
	assert_int_equal(sender(&pair)->active, 1);
	messages(&pair, 20);
	if (event == RDMA_CM_EVENT_DISCONNECTED) exchange_until(&pair, 0);
	ib_pair_close(&pair);
	char *log = net_log_text();
	assert_non_null(strstr(log, name));
	assert_non_null(strstr(log, "from ::ffff:10.196.0.1 (telpher0:1) to ::ffff:10.196.0.1 (telpher0:1 of "));
	free(log);
	net_log_end();
}

static void a_path_that_is_disconnected_is_left(void **state)
{
	(void)state;
	a_path_that_is_lost_is_left(RDMA_CM_EVENT_DISCONNECTED, "RDMA_CM_EVENT_DISCONNECTED");
}

static void a_path_whose_address_changes_is_left(void **state)
{
	(void)state;
	a_path_that_is_lost_is_left(RDMA_CM_EVENT_ADDR_CHANGE, "RDMA_CM_EVENT_ADDR_CHANGE");
}

static void a_path_whose_device_is_removed_is_left(void **state)
{
	(void)state;
	a_path_that_is_lost_is_left(RDMA_CM_EVENT_DEVICE_REMOVAL, "RDMA_CM_EVENT_DEVICE_REMOVAL");
}

static void what_a_queue_pair_leaves_behind_is_no_news(void **state)
{
	struct ib_pair pair;

	(void)state;
	ib_pair_open(&pair, BYTES);
	say(RDMA_CM_EVENT_TIMEWAIT_EXIT, 0);
	messages(&pair, 200);
	assert_int_equal(sender(&pair)->switches, 0);
	assert_int_equal(sender(&pair)->paths[0].failures + sender(&pair)->paths[1].failures, 0);
	ib_pair_close(&pair);
}

static void a_path_that_cannot_be_connected_is_left_out_and_tried_again(void **state)
{
	struct ib_pair pair;
	uint64_t until = tp_clock_ms() + 60000;

	(void)state;
	turn(RDMA_CM_EVENT_ADDR_RESOLVED, RDMA_CM_EVENT_ADDR_ERROR, -ETIMEDOUT, 1);
	ib_pair_open(&pair, BYTES);
	int dead = sender(&pair)->paths[0].state == TP_IB_PATH_DEAD ? 0 : 1;
	assert_int_equal(sender(&pair)->paths[dead].state, TP_IB_PATH_DEAD);
	assert_int_equal(sender(&pair)->active, 1 - dead);
	assert_non_null(strstr(sender(&pair)->paths[dead].why, "RDMA_CM_EVENT_ADDR_ERROR with status -110 (Connection timed out), from ::ffff:10.196."));
	for (int i = 0; sender(&pair)->paths[dead].state != TP_IB_PATH_LIVE; i++) {
		assert_int_equal(ib_exchange(&pair, 0, 1000, i), ncclSuccess);
		assert_true(tp_clock_ms() < until);
	}
	messages(&pair, 20);
	ib_pair_close(&pair);
}

/* ---- refusals ---- */

struct meeting { void *listener, *state, *send_comm, *recv_comm; unsigned char handle[TP_NET_HANDLE_BYTES]; ncclResult_t connected, accepted; };

static void meet(struct meeting *m)
{
	memset(m, 0, sizeof(*m));
	assert_int_equal(tp_net_ib.listen(0, m->handle, &m->listener), ncclSuccess);
}

/* Until so many ends have failed, or both are there. */
static void move_on(struct meeting *m, int failures)
{
	struct tp_net_hello expect = net_hello, who;

	expect.from = expect.to = -1;
	while ((m->connected != ncclSuccess) + (m->accepted != ncclSuccess) < failures && !(m->send_comm && m->recv_comm)) {
		if (!m->send_comm && m->connected == ncclSuccess) m->connected = tp_net_ib.connect(0, m->handle, &net_hello, &m->state, &m->send_comm);
		if (m->connected == ncclSuccess || failures == 2)
			if (!m->recv_comm && m->accepted == ncclSuccess) m->accepted = tp_net_ib.accept(m->listener, &expect, &who, &m->recv_comm);
		sched_yield();
	}
}

static void end(struct meeting *m)
{
	if (m->state) tp_net_ib.cancel_connect(m->state);
	if (m->send_comm) tp_net_ib.close_send(m->send_comm);
	if (m->recv_comm) tp_net_ib.close_recv(m->recv_comm);
	tp_net_ib.close_listen(m->listener);
}

static void each_failure_is_said_with_both_ends_and_its_meaning(void **state)
{
	static const struct { int from, to, status; const char *words, *advice; } cases[] = {
		{ RDMA_CM_EVENT_ADDR_RESOLVED, RDMA_CM_EVENT_ADDR_ERROR, -ENODEV, "RDMA_CM_EVENT_ADDR_ERROR with status -19 (No such device)", "no neighbour at the remote address" },
		{ RDMA_CM_EVENT_ROUTE_RESOLVED, RDMA_CM_EVENT_ROUTE_ERROR, -EINVAL, "RDMA_CM_EVENT_ROUTE_ERROR with status -22 (Invalid argument)", "no way to the remote port is known" },
		{ RDMA_CM_EVENT_CONNECT_RESPONSE, RDMA_CM_EVENT_UNREACHABLE, -ETIMEDOUT, "RDMA_CM_EVENT_UNREACHABLE with status -110 (Connection timed out)", "UDP port 4791" },
		{ RDMA_CM_EVENT_CONNECT_RESPONSE, RDMA_CM_EVENT_CONNECT_ERROR, -EINVAL, "RDMA_CM_EVENT_CONNECT_ERROR with status -22", "broke while it was made" },
		{ RDMA_CM_EVENT_CONNECT_RESPONSE, RDMA_CM_EVENT_REJECTED, 10, "RDMA_CM_EVENT_REJECTED with status 10 (stale connection)", "of a connection before" },
		{ RDMA_CM_EVENT_CONNECT_RESPONSE, RDMA_CM_EVENT_REJECTED, 8, "RDMA_CM_EVENT_REJECTED with status 8 (invalid service ID)", "nobody listens there any more" },
		{ RDMA_CM_EVENT_CONNECT_RESPONSE, RDMA_CM_EVENT_DISCONNECTED, 0, "RDMA_CM_EVENT_DISCONNECTED with status 0 (no more is said)", "its process has ended" },
		{ RDMA_CM_EVENT_ROUTE_RESOLVED, RDMA_CM_EVENT_DEVICE_REMOVAL, 0, "RDMA_CM_EVENT_DEVICE_REMOVAL with status 0", "taken out of the system" },
	};
	struct meeting m;

	(void)state;
	for (size_t i = 0; i < TP_ARRAY_LEN(cases); i++) {
		meet(&m);
		net_log_capture();
		turn(cases[i].from, cases[i].to, cases[i].status, 1);
		move_on(&m, 1);
		assert_int_equal(m.connected, ncclSystemError);
		char *log = net_log_text();
		assert_non_null(strstr(log, cases[i].words));
		assert_non_null(strstr(log, "from ::ffff:10.196.0.1 (telpher0:1) to ::ffff:10.196.0.1 (telpher0:1 of "));
		if (!strstr(log, cases[i].advice)) fail_msg("%s isn't in: %s", cases[i].advice, log);
		free(log);
		net_log_end();
		/* The other end hears of it over TCP, whatever its connection manager says. */
		move_on(&m, 2);
		assert_int_equal(m.accepted, ncclRemoteError);
		end(&m);
	}
}

static void an_answer_by_somebody_else_is_refused(void **state)
{
	struct meeting m;

	(void)state;
	meet(&m);
	spoil(RDMA_CM_EVENT_CONNECT_RESPONSE);
	move_on(&m, 1);
	assert_int_equal(m.connected, ncclSystemError);
	assert_non_null(strstr(tp_log_last_error(), "somebody else answers rdma_cm's connect request (it brings no token of the IB transport)"));
	end(&m);
}

static void a_request_with_a_wrong_token_is_refused_and_says_so(void **state)
{
	struct meeting m;

	(void)state;
	meet(&m);
	spoil(RDMA_CM_EVENT_CONNECT_REQUEST);
	move_on(&m, 1);
	assert_int_equal(m.connected, ncclSystemError);
	assert_non_null(strstr(tp_log_last_error(), "RDMA_CM_EVENT_REJECTED with status 28 (consumer reject)"));
	assert_non_null(strstr(tp_log_last_error(), ": it brings no token of the IB transport"));
	end(&m);
}

static void ends_that_are_asked_for_different_ways_say_both(void **state)
{
	struct tp_net_hello expect = net_hello, who;
	struct meeting m;

	(void)state;
	meet(&m);
	expect.from = expect.to = -1;
	while (m.accepted == ncclSuccess) {
		setenv("TELPHER_IB_CONNECT", "rdma_cm", 1);
		tp_param_reload();
		assert_int_equal(tp_net_ib.connect(0, m.handle, &net_hello, &m.state, &m.send_comm), ncclSuccess);
		setenv("TELPHER_IB_CONNECT", "tcp", 1);
		tp_param_reload();
		m.accepted = tp_net_ib.accept(m.listener, &expect, &who, &m.recv_comm);
	}
	assert_int_equal(m.accepted, ncclInvalidUsage);
	assert_non_null(strstr(tp_log_last_error(), "TELPHER_IB_CONNECT is rdma_cm at rank 3 ("));
	assert_non_null(strstr(tp_log_last_error(), "and tcp at rank 5 ("));
	move_on(&m, 2);
	assert_int_equal(m.connected, ncclRemoteError);
	assert_non_null(strstr(tp_log_last_error(), "the peer refuses: "));
	assert_non_null(strstr(tp_log_last_error(), "TELPHER_IB_CONNECT is rdma_cm at rank 3 ("));
	end(&m);
}

static void an_end_that_is_given_up_leaves_nothing_behind(void **state)
{
	struct tp_net_hello expect = net_hello, who;
	struct meeting m;
	int before = 0;

	(void)state;
	/* After each number of steps of both ends; the first rounds open what stays. */
	for (int round = 0; round < 60; round++) {
		meet(&m);
		expect.from = expect.to = -1;
		for (int i = 0; i < round * 4 && !m.send_comm; i++) {
			assert_int_equal(tp_net_ib.connect(0, m.handle, &net_hello, &m.state, &m.send_comm), ncclSuccess);
			if (!m.recv_comm) assert_int_equal(tp_net_ib.accept(m.listener, &expect, &who, &m.recv_comm), ncclSuccess);
		}
		end(&m);
		if (round == 50) before = net_open_descriptors();
	}
	assert_true(net_open_descriptors() <= before + 4);
}

static void a_listener_that_goes_away_is_said_to_the_other_end(void **state)
{
	struct tp_net_hello expect = net_hello, who;
	struct meeting m;

	(void)state;
	meet(&m);
	expect.from = expect.to = -1;
	/* Both have met, and queue pairs wait to be connected: nobody takes requests any more. */
	turn(RDMA_CM_EVENT_ROUTE_RESOLVED, RDMA_CM_EVENT_TIMEWAIT_EXIT, 0, 1);
	for (int i = 0; i < 2000 && m.connected == ncclSuccess; i++) {
		m.connected = tp_net_ib.connect(0, m.handle, &net_hello, &m.state, &m.send_comm);
		if (m.listener) assert_int_equal(tp_net_ib.accept(m.listener, &expect, &who, &m.recv_comm), ncclSuccess);
		usleep(500);
		if (i < 1000) continue;
		if (m.listener) tp_net_ib.close_listen(m.listener);
		m.listener = NULL;
	}
	assert_int_equal(m.connected, ncclRemoteError);
	assert_non_null(strstr(tp_log_last_error(), "the peer closed the connection while it was made"));
	turn(0, 0, 0, 0);
}

/* ---- strangers ---- */

/* A connect request to the connection's port with this private data; the event that answers it. */
static int ask(uint16_t port, const void *data, size_t bytes, struct tp_ib_wire_refusal *refusal, struct tp_ib_comm *asked)
{
	void *lib = dlopen(CARD_RDMACM, RTLD_NOW | RTLD_LOCAL), *at;
	struct rdma_event_channel *(*create)(void);
	void (*destroy)(struct rdma_event_channel *);
	int (*create_id)(struct rdma_event_channel *, struct rdma_cm_id **, void *, enum rdma_port_space), (*destroy_id)(struct rdma_cm_id *), (*get)(struct rdma_event_channel *,
		struct rdma_cm_event **), (*ack)(struct rdma_cm_event *), (*resolve)(struct rdma_cm_id *, struct sockaddr *, struct sockaddr *, int), (*route)(struct rdma_cm_id *, int),
		(*join)(struct rdma_cm_id *, struct rdma_conn_param *);
	struct rdma_conn_param param = { .private_data = data, .private_data_len = (uint8_t)bytes, .qp_num = 77 };
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = inet_addr("10.196.0.1") };
	struct rdma_event_channel *channel;
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;
	int result = -1;

	assert_non_null(lib);
#define FIND(pointer, name) (assert_non_null(at = dlsym(lib, name)), memcpy(&(pointer), &at, sizeof(at)))
	FIND(create, "rdma_create_event_channel");
	FIND(destroy, "rdma_destroy_event_channel");
	FIND(create_id, "rdma_create_id");
	FIND(destroy_id, "rdma_destroy_id");
	FIND(get, "rdma_get_cm_event");
	FIND(ack, "rdma_ack_cm_event");
	FIND(resolve, "rdma_resolve_addr");
	FIND(route, "rdma_resolve_route");
	FIND(join, "rdma_connect");
	assert_non_null(channel = create());
	assert_int_equal(create_id(channel, &id, NULL, RDMA_PS_TCP), 0);
	assert_int_equal(resolve(id, NULL, (struct sockaddr *)&to, 2000), 0);
	tp_socket_set_nonblocking(channel->fd, true);
	for (uint64_t until = tp_clock_ms() + 60000; result < 0 && tp_clock_ms() < until; usleep(1000)) {
		tp_ib_progress(asked);
		if (get(channel, &event) != 0) continue;
		enum rdma_cm_event_type type = event->event;
		if (type == RDMA_CM_EVENT_REJECTED && !tp_ib_refusal_read(event->param.conn.private_data, event->param.conn.private_data_len, refusal)) memset(refusal, 0, sizeof(*refusal));
		ack(event);
		if (type == RDMA_CM_EVENT_ADDR_RESOLVED) assert_int_equal(route(id, 2000), 0);
		else if (type == RDMA_CM_EVENT_ROUTE_RESOLVED) assert_int_equal(join(id, &param), 0);
		else result = (int)type;
	}
	destroy_id(id);
	destroy(channel);
	return result;
}

static void a_stranger_is_refused_and_nothing_else_happens(void **state)
{
	struct tp_ib_wire_refusal refusal;
	struct tp_ib_wire_token token;
	struct tp_ib_wire_meta meta;
	struct ib_pair pair;
	unsigned char noise[56];

	(void)state;
	ib_pair_open(&pair, BYTES);
	tp_ib_comm_describe(receiver(&pair), &meta);
	net_fill(noise, sizeof(noise), 7);
	assert_int_equal(ask(meta.cm_port, noise, sizeof(noise), &refusal, receiver(&pair)), RDMA_CM_EVENT_REJECTED);
	assert_string_equal(refusal.text, "it brings no token of the IB transport");
	assert_int_equal(ask(meta.cm_port, NULL, 0, &refusal, receiver(&pair)), RDMA_CM_EVENT_REJECTED);
	tp_ib_token_start(&token);
	assert_int_equal(ask(meta.cm_port, &token, sizeof(token), &refusal, receiver(&pair)), RDMA_CM_EVENT_REJECTED);
	assert_string_equal(refusal.text, "its token is of another connection");
	/* Even who knows the token can't have a queue pair that is connected, or one that isn't there. */
	memcpy(token.token, meta.cm_token, sizeof(token.token));
	assert_int_equal(ask(meta.cm_port, &token, sizeof(token), &refusal, receiver(&pair)), RDMA_CM_EVENT_REJECTED);
	assert_string_equal(refusal.text, "it is late: that path isn't being connected any more");
	token.qp = 9;
	assert_int_equal(ask(meta.cm_port, &token, sizeof(token), &refusal, receiver(&pair)), RDMA_CM_EVENT_REJECTED);
	assert_string_equal(refusal.text, "it is for a queue pair that there isn't");
	messages(&pair, 20);
	assert_int_equal(sender(&pair)->switches, 0);
	ib_pair_close(&pair);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_missing_library_is_said_with_its_cure),
		cmocka_unit_test(a_library_that_is_another_is_said_with_the_symbol_that_it_lacks),
		cmocka_unit_test_setup(the_address_says_that_rdma_cm_connects, two_ports),
		cmocka_unit_test_setup(every_path_is_connected, two_ports),
		cmocka_unit_test_setup(a_forked_child_that_closes_keeps_no_descriptor, two_ports),
		cmocka_unit_test_setup(several_queue_pairs_are_connected, two_ports),
		cmocka_unit_test_setup(a_path_that_falls_silent_is_left_and_taken_back, two_ports),
		cmocka_unit_test_setup(a_path_that_is_disconnected_is_left, two_ports),
		cmocka_unit_test_setup(a_path_whose_address_changes_is_left, two_ports),
		cmocka_unit_test_setup(a_path_whose_device_is_removed_is_left, two_ports),
		cmocka_unit_test_setup(what_a_queue_pair_leaves_behind_is_no_news, two_ports),
		cmocka_unit_test_setup(a_path_that_cannot_be_connected_is_left_out_and_tried_again, two_ports),
		cmocka_unit_test_setup(each_failure_is_said_with_both_ends_and_its_meaning, one_port),
		cmocka_unit_test_setup(an_answer_by_somebody_else_is_refused, one_port),
		cmocka_unit_test_setup(a_request_with_a_wrong_token_is_refused_and_says_so, one_port),
		cmocka_unit_test_setup(ends_that_are_asked_for_different_ways_say_both, one_port),
		cmocka_unit_test_setup(an_end_that_is_given_up_leaves_nothing_behind, one_port),
		cmocka_unit_test_setup(a_listener_that_goes_away_is_said_to_the_other_end, one_port),
		cmocka_unit_test_setup(a_stranger_is_refused_and_nothing_else_happens, two_ports),
	};

	setenv("TELPHER_VERBS_DEVICES", "2", 1);
	setenv("TELPHER_VERBS_IFNAME", "tp0,tp1", 1);
	setenv("TELPHER_VERBS_CARRIER", "wire", 1);
	if (!namespaces_enter_own(196)) {
		fprintf(stderr, "skipped: needs root, ip and network namespaces\n");
		return 77;
	}
	return cmocka_run_group_tests(tests, NULL, NULL);
}

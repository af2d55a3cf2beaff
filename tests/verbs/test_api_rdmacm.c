/* librdmacm.so.1 as a program sees it: events, addresses, a connection within one process, over the bus and over the wire. */
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>
#include <rdma/rdma_cma.h>
#include "verbs/helper_api.h"

#define PORT 17471
enum { EVENT_ADDRINFO_RESOLVED = 16, EVENT_ADDRINFO_ERROR, EVENT_USER };

/* The library is another than the one that tests link with: it is loaded, as programs load it. */
static struct {
	struct rdma_event_channel *(*create_channel)(void);
	void (*destroy_channel)(struct rdma_event_channel *);
	int (*create_id)(struct rdma_event_channel *, struct rdma_cm_id **, void *, enum rdma_port_space);
	int (*destroy_id)(struct rdma_cm_id *);
	int (*bind_addr)(struct rdma_cm_id *, struct sockaddr *);
	int (*listen)(struct rdma_cm_id *, int);
	int (*resolve_addr)(struct rdma_cm_id *, struct sockaddr *, struct sockaddr *, int);
	int (*resolve_route)(struct rdma_cm_id *, int);
	int (*create_qp)(struct rdma_cm_id *, struct ibv_pd *, struct ibv_qp_init_attr *);
	void (*destroy_qp)(struct rdma_cm_id *);
	int (*connect)(struct rdma_cm_id *, struct rdma_conn_param *);
	int (*accept)(struct rdma_cm_id *, struct rdma_conn_param *);
	int (*reject)(struct rdma_cm_id *, const void *, uint8_t);
	int (*disconnect)(struct rdma_cm_id *);
	int (*notify)(struct rdma_cm_id *, enum ibv_event_type);
	int (*get_event)(struct rdma_event_channel *, struct rdma_cm_event **);
	int (*ack_event)(struct rdma_cm_event *);
	const char *(*event_str)(enum rdma_cm_event_type);
	void (*freeaddrinfo)(struct rdma_addrinfo *);
	int (*write_event)(struct rdma_cm_id *, enum rdma_cm_event_type, int, uint64_t);
	int (*resolve_addrinfo)(struct rdma_cm_id *, const char *, const char *, const struct rdma_addrinfo *);
	int (*query_addrinfo)(struct rdma_cm_id *, struct rdma_addrinfo **);
} cm;

static bool load(void)
{
	static const struct { const char *name; void *at; } calls[] = {
		{ "rdma_create_event_channel", &cm.create_channel }, { "rdma_destroy_event_channel", &cm.destroy_channel },
		{ "rdma_create_id", &cm.create_id }, { "rdma_destroy_id", &cm.destroy_id }, { "rdma_bind_addr", &cm.bind_addr },
		{ "rdma_listen", &cm.listen }, { "rdma_resolve_addr", &cm.resolve_addr }, { "rdma_resolve_route", &cm.resolve_route },
		{ "rdma_create_qp", &cm.create_qp }, { "rdma_destroy_qp", &cm.destroy_qp }, { "rdma_connect", &cm.connect },
		{ "rdma_accept", &cm.accept }, { "rdma_reject", &cm.reject }, { "rdma_disconnect", &cm.disconnect }, { "rdma_notify", &cm.notify },
		{ "rdma_get_cm_event", &cm.get_event }, { "rdma_ack_cm_event", &cm.ack_event }, { "rdma_event_str", &cm.event_str },
		{ "rdma_freeaddrinfo", &cm.freeaddrinfo }, { "rdma_write_cm_event", &cm.write_event },
		{ "rdma_resolve_addrinfo", &cm.resolve_addrinfo }, { "rdma_query_addrinfo", &cm.query_addrinfo },
	};
	/* By its path: the address sanitizer's dlopen doesn't look where this program would. */
	Dl_info verbs;
	char path[4096];
	if (!dladdr((void *)(uintptr_t)&ibv_get_device_list, &verbs) || !strrchr(verbs.dli_fname, '/'))
		return false;
	snprintf(path, sizeof(path), "%.*s/librdmacm.so.1", (int)(strrchr(verbs.dli_fname, '/') - verbs.dli_fname), verbs.dli_fname);
	void *library = dlopen(path, RTLD_NOW);
	for (size_t i = 0; library && i < sizeof(calls) / sizeof(calls[0]); i++) {
		void *found = dlsym(library, calls[i].name);
		if (!found)
			return false;
		memcpy(calls[i].at, &found, sizeof(found));
	}
	return library != NULL;
}

static struct rdma_cm_event *next(struct rdma_event_channel *channel, int type)
{
	struct rdma_cm_event *event;
	assert_int_equal(cm.get_event(channel, &event), 0);
	if ((int)event->event != type)
		fail_msg("%s (%d), not %s", cm.event_str(event->event), event->status, cm.event_str((enum rdma_cm_event_type)type));
	return event;
}
static void pass(struct rdma_event_channel *channel, int type) { assert_int_equal(cm.ack_event(next(channel, type)), 0); }

static void a_program_writes_events_of_its_own(void **state)
{
	(void)state;
	struct rdma_event_channel *channel = cm.create_channel();
	struct rdma_cm_id *id;
	uint64_t arg;
	assert_int_equal(cm.create_id(channel, &id, NULL, RDMA_PS_TCP), 0);
	assert_int_equal(cm.write_event(id, (enum rdma_cm_event_type)EVENT_USER, 77, 0x1122334455667788), 0);
	struct rdma_cm_event *event = next(channel, EVENT_USER);
	memcpy(&arg, &event->param, sizeof(arg));
	assert_int_equal(event->status, 77);
	assert_true(arg == 0x1122334455667788);
	assert_ptr_equal(event->id, id);
	cm.ack_event(event);
	errno = 0;
	assert_int_equal(cm.write_event(id, RDMA_CM_EVENT_ESTABLISHED, 0, 0), -1);
	assert_int_equal(errno, EINVAL);
	assert_int_equal(cm.destroy_id(id), 0);
	cm.destroy_channel(channel);
}

static void an_id_resolves_names_and_keeps_what_it_found(void **state)
{
	(void)state;
	struct rdma_event_channel *channel = cm.create_channel();
	struct rdma_addrinfo *info, hints = { .ai_flags = RAI_NUMERICHOST | RAI_FAMILY, .ai_family = AF_INET, .ai_port_space = RDMA_PS_TCP };
	struct rdma_cm_id *id;
	assert_int_equal(cm.create_id(channel, &id, NULL, RDMA_PS_TCP), 0);
	errno = 0;
	assert_int_equal(cm.query_addrinfo(id, &info), -1);
	assert_int_equal(errno, ENOENT);
	assert_int_equal(cm.resolve_addrinfo(id, "127.0.0.1", "7471", &hints), 0);
	pass(channel, EVENT_ADDRINFO_RESOLVED);
	for (int twice = 0; twice < 2; twice++) {
		assert_int_equal(cm.query_addrinfo(id, &info), 0);
		assert_int_equal(((struct sockaddr_in *)(void *)info->ai_dst_addr)->sin_port, htons(7471));
		cm.freeaddrinfo(info);
	}
	assert_int_equal(cm.resolve_addrinfo(id, "no address", "7471", &hints), 0);
	pass(channel, EVENT_ADDRINFO_ERROR);
	assert_int_equal(cm.query_addrinfo(id, &info), -1);
	hints.ai_flags = 0x10;              /* RAI_SA: there is none on Ethernet */
	assert_int_equal(cm.resolve_addrinfo(id, "127.0.0.1", "7471", &hints), -1);
	assert_int_equal(errno, EOPNOTSUPP);
	assert_int_equal(cm.destroy_id(id), 0);
	cm.destroy_channel(channel);
}

/* A listener and a client that has resolved its address. */
struct ends { struct rdma_event_channel *server_channel, *client_channel; struct rdma_cm_id *listener, *client, *server; };

static void make_qp(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC, .sq_sig_all = 1, .cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 } };
	assert_int_equal(cm.create_qp(id, NULL, &attr), 0);
}

static void open_ends(struct ends *ends, uint16_t port, int backlog)
{
	struct sockaddr_in any = { .sin_family = AF_INET, .sin_port = htons(port) }, to = any;
	to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	ends->server_channel = cm.create_channel();
	ends->client_channel = cm.create_channel();
	assert_int_equal(cm.create_id(ends->server_channel, &ends->listener, NULL, RDMA_PS_TCP), 0);
	assert_int_equal(cm.bind_addr(ends->listener, (struct sockaddr *)&any), 0);
	assert_int_equal(cm.listen(ends->listener, backlog), 0);
	assert_int_equal(cm.create_id(ends->client_channel, &ends->client, NULL, RDMA_PS_TCP), 0);
	assert_int_equal(cm.resolve_addr(ends->client, NULL, (struct sockaddr *)&to, 1000), 0);
	pass(ends->client_channel, RDMA_CM_EVENT_ADDR_RESOLVED);
	assert_int_equal(cm.resolve_route(ends->client, 1000), 0);
	pass(ends->client_channel, RDMA_CM_EVENT_ROUTE_RESOLVED);
}

static void close_ends(struct ends *ends)
{
	assert_int_equal(cm.destroy_id(ends->client), 0);
	assert_int_equal(cm.destroy_id(ends->listener), 0);
	cm.destroy_channel(ends->client_channel);
	cm.destroy_channel(ends->server_channel);
}

static void two_ids_connect_talk_and_part(void **state)
{
	(void)state;
	struct ends ends;
	struct rdma_conn_param param = { .private_data = "hello", .private_data_len = 6, .responder_resources = 1, .initiator_depth = 1, .retry_count = 7 };
	open_ends(&ends, PORT, 1);
	make_qp(ends.client);
	assert_int_equal(cm.connect(ends.client, &param), 0);
	struct rdma_cm_event *event = next(ends.server_channel, RDMA_CM_EVENT_CONNECT_REQUEST);
	assert_string_equal(event->param.conn.private_data, "hello");
	ends.server = event->id;
	cm.ack_event(event);
	make_qp(ends.server);
	param.private_data = "welcome";
	param.private_data_len = 8;
	assert_int_equal(cm.accept(ends.server, &param), 0);
	event = next(ends.client_channel, RDMA_CM_EVENT_ESTABLISHED);
	assert_string_equal(event->param.conn.private_data, "welcome");
	cm.ack_event(event);
	pass(ends.server_channel, RDMA_CM_EVENT_ESTABLISHED);
	/* It was known already: nothing follows. */
	assert_int_equal(cm.notify(ends.server, IBV_EVENT_COMM_EST), 0);

	static char from[64] = "over the queue pairs", to[64];
	struct ibv_mr *source = ibv_reg_mr(ends.client->pd, from, sizeof(from), 0);
	struct ibv_mr *sink = ibv_reg_mr(ends.server->pd, to, sizeof(to), IBV_ACCESS_LOCAL_WRITE);
	struct ibv_sge in = { (uintptr_t)to, sizeof(to), sink->lkey }, out = { (uintptr_t)from, sizeof(from), source->lkey };
	struct ibv_recv_wr receive = { .sg_list = &in, .num_sge = 1 }, *bad_receive;
	struct ibv_send_wr send = { .sg_list = &out, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad_send;
	assert_int_equal(ibv_post_recv(ends.server->qp, &receive, &bad_receive), 0);
	assert_int_equal(ibv_post_send(ends.client->qp, &send, &bad_send), 0);
	assert_int_equal(next_wc(ends.server->recv_cq).status, IBV_WC_SUCCESS);
	assert_string_equal(to, from);
	assert_int_equal(next_wc(ends.client->send_cq).status, IBV_WC_SUCCESS);

	assert_int_equal(cm.disconnect(ends.client), 0);
	pass(ends.server_channel, RDMA_CM_EVENT_DISCONNECTED);
	pass(ends.client_channel, RDMA_CM_EVENT_DISCONNECTED);
	ibv_dereg_mr(source);
	ibv_dereg_mr(sink);
	cm.destroy_qp(ends.server);
	cm.destroy_qp(ends.client);
	assert_int_equal(cm.destroy_id(ends.server), 0);
	close_ends(&ends);
}

static void a_refusal_brings_its_reason_and_data(void **state)
{
	(void)state;
	struct ends ends;
	open_ends(&ends, PORT + 1, 0);
	make_qp(ends.client);
	assert_int_equal(cm.connect(ends.client, NULL), 0);
	struct rdma_cm_event *event = next(ends.server_channel, RDMA_CM_EVENT_CONNECT_REQUEST);
	ends.server = event->id;
	cm.ack_event(event);
	assert_int_equal(cm.reject(ends.server, "no", 3), 0);
	event = next(ends.client_channel, RDMA_CM_EVENT_REJECTED);
	assert_int_equal(event->status, 28);
	assert_string_equal(event->param.conn.private_data, "no");
	cm.ack_event(event);
	cm.destroy_qp(ends.client);
	assert_int_equal(cm.destroy_id(ends.server), 0);
	close_ends(&ends);
}

static struct rdma_cm_id *next_request(struct ends *ends)
{
	struct rdma_cm_event *event = next(ends->server_channel, RDMA_CM_EVENT_CONNECT_REQUEST);
	ends->server = event->id;
	cm.ack_event(event);
	return ends->server;
}

static void connect_ends(struct ends *ends, uint16_t port)
{
	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1 };
	open_ends(ends, port, 0);
	make_qp(ends->client);
	assert_int_equal(cm.connect(ends->client, &param), 0);
	make_qp(next_request(ends));
	assert_int_equal(cm.accept(ends->server, &param), 0);
	pass(ends->client_channel, RDMA_CM_EVENT_ESTABLISHED);
	pass(ends->server_channel, RDMA_CM_EVENT_ESTABLISHED);
}

/* As programs do: ibv_destroy_qp, which the manager doesn't hear of, and id->qp goes on to name what isn't there. */
static void a_queue_pair_that_its_program_destroyed_is_left_alone(void **state)
{
	(void)state;
	struct ends ends;
	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1 };
	/* Before the peer parts, and at the same time. */
	for (int i = 0; i < 20; i++) {
		connect_ends(&ends, PORT + 5);
		if (i % 2)
			assert_int_equal(ibv_destroy_qp(ends.client->qp), 0);
		assert_int_equal(cm.disconnect(ends.server), 0);
		if (i % 2 == 0)
			assert_int_equal(ibv_destroy_qp(ends.client->qp), 0);
		pass(ends.client_channel, RDMA_CM_EVENT_DISCONNECTED);
		pass(ends.server_channel, RDMA_CM_EVENT_DISCONNECTED);
		ends.client->qp = NULL;
		cm.destroy_qp(ends.client);
		cm.destroy_qp(ends.server);
		assert_int_equal(cm.destroy_id(ends.server), 0);
		close_ends(&ends);
	}
	/* Before the peer answers: there is nothing to connect. */
	open_ends(&ends, PORT + 5, 0);
	make_qp(ends.client);
	assert_int_equal(cm.connect(ends.client, &param), 0);
	make_qp(next_request(&ends));
	assert_int_equal(ibv_destroy_qp(ends.client->qp), 0);
	assert_int_equal(cm.accept(ends.server, &param), 0);
	pass(ends.client_channel, RDMA_CM_EVENT_CONNECT_ERROR);
	pass(ends.server_channel, RDMA_CM_EVENT_REJECTED);
	ends.client->qp = NULL;
	cm.destroy_qp(ends.client);
	cm.destroy_qp(ends.server);
	assert_int_equal(cm.destroy_id(ends.server), 0);
	close_ends(&ends);
	/* Before the peer refuses, before the program itself parts. */
	for (int i = 0; i < 2; i++) {
		open_ends(&ends, PORT + 5, 0);
		make_qp(ends.client);
		assert_int_equal(cm.connect(ends.client, &param), 0);
		next_request(&ends);
		assert_int_equal(ibv_destroy_qp(ends.client->qp), 0);
		if (i == 0) {
			assert_int_equal(cm.reject(ends.server, NULL, 0), 0);
			pass(ends.client_channel, RDMA_CM_EVENT_REJECTED);
		} else {
			assert_int_equal(cm.disconnect(ends.client), 0);
		}
		ends.client->qp = NULL;
		cm.destroy_qp(ends.client);
		assert_int_equal(cm.destroy_id(ends.server), 0);
		close_ends(&ends);
	}
}

static void a_channel_that_is_destroyed_takes_its_connections_with_it(void **state)
{
	(void)state;
	struct ends ends;
	connect_ends(&ends, PORT + 6);
	cm.destroy_channel(ends.client_channel);
	pass(ends.server_channel, RDMA_CM_EVENT_DISCONNECTED);
	cm.destroy_qp(ends.client);
	cm.destroy_qp(ends.server);
	assert_int_equal(cm.destroy_id(ends.client), 0);
	assert_int_equal(cm.destroy_id(ends.server), 0);
	/* With a request in it that nobody fetched: the peer is refused. */
	struct ends other;
	open_ends(&other, PORT + 7, 0);
	make_qp(other.client);
	assert_int_equal(cm.connect(other.client, NULL), 0);
	for (int i = 0; i < 100; i++) {
		struct pollfd ready = { .fd = other.server_channel->fd, .events = POLLIN };
		if (poll(&ready, 1, 100) == 1)
			break;
	}
	cm.destroy_channel(other.server_channel);
	pass(other.client_channel, RDMA_CM_EVENT_REJECTED);
	cm.destroy_qp(other.client);
	assert_int_equal(cm.destroy_id(other.listener), 0);
	assert_int_equal(cm.destroy_id(other.client), 0);
	cm.destroy_channel(other.client_channel);
	assert_int_equal(cm.destroy_id(ends.listener), 0);
	cm.destroy_channel(ends.server_channel);
}

static void a_request_has_the_context_that_its_listener_has_when_it_is_fetched(void **state)
{
	(void)state;
	struct ends ends;
	int mark;
	open_ends(&ends, PORT + 8, 0);
	make_qp(ends.client);
	assert_int_equal(cm.connect(ends.client, NULL), 0);
	ends.listener->context = &mark;
	assert_ptr_equal(next_request(&ends)->context, &mark);
	assert_int_equal(cm.reject(ends.server, NULL, 0), 0);
	pass(ends.client_channel, RDMA_CM_EVENT_REJECTED);
	cm.destroy_qp(ends.client);
	assert_int_equal(cm.destroy_id(ends.server), 0);
	close_ends(&ends);
}

static void a_request_that_was_given_up_is_over_for_the_listener(void **state)
{
	(void)state;
	struct ends ends;
	open_ends(&ends, PORT + 9, 0);
	make_qp(ends.client);
	assert_int_equal(cm.connect(ends.client, NULL), 0);
	next_request(&ends);
	cm.destroy_qp(ends.client);
	assert_int_equal(cm.destroy_id(ends.client), 0);
	struct rdma_cm_event *event = next(ends.server_channel, RDMA_CM_EVENT_REJECTED);
	assert_ptr_equal(event->id, ends.server);
	assert_int_equal(event->status, 4);
	cm.ack_event(event);
	make_qp(ends.server);
	assert_int_equal(cm.accept(ends.server, NULL), -1);
	cm.destroy_qp(ends.server);
	assert_int_equal(cm.destroy_id(ends.server), 0);
	assert_int_equal(cm.create_id(ends.client_channel, &ends.client, NULL, RDMA_PS_TCP), 0);
	close_ends(&ends);
}

static int name_socket(const char *kind, unsigned number, struct sockaddr_un *name, socklen_t *length)
{
	*name = (struct sockaddr_un){ .sun_family = AF_UNIX };
	int bytes = snprintf(name->sun_path + 1, sizeof(name->sun_path) - 1, strcmp(kind, "port") ? "telpher-verbs/1/%u/process/%x" :
		"telpher-verbs/1/%u/port/106/%u", geteuid(), number);
	*length = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)bytes);
	return socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
}

/* A peer that couldn't read the request's number refuses it with zeros for both: the transaction is the request's. */
static void a_refusal_without_numbers_ends_the_request_of_its_transaction(void **state)
{
	(void)state;
	const char *carrier = getenv("TELPHER_VERBS_CARRIER");
	if (carrier && !strcmp(carrier, "wire"))
		return;             /* test_gsi.c has the way of packets */
	enum { MAD_BYTES = 256 };
	uint8_t mad[MAD_BYTES + 1] = { 0 };
	struct sockaddr_un name;
	socklen_t length;
	struct ends ends;
	open_ends(&ends, PORT + 10, 0);
	assert_int_equal(cm.destroy_id(ends.listener), 0);
	int port = name_socket("port", PORT + 10, &name, &length);
	assert_int_equal(bind(port, (struct sockaddr *)&name, length), 0);
	make_qp(ends.client);
	assert_int_equal(cm.connect(ends.client, NULL), 0);
	assert_int_equal(recv(port, mad, sizeof(mad), 0), MAD_BYTES);
	int process = name_socket("process", (unsigned)(mad[24] << 8 | mad[25]), &name, &length);
	memset(mad + 24, 0, MAD_BYTES - 24);
	mad[17] = 0x12;             /* REJ, of a REQ */
	mad[35] = 1;                /* no QP */
	mad[15] ^= 1;
	assert_int_equal(sendto(process, mad, MAD_BYTES, 0, (struct sockaddr *)&name, length), MAD_BYTES);
	mad[15] ^= 1;
	mad[35] = 5;                /* unsupported request */
	assert_int_equal(sendto(process, mad, MAD_BYTES, 0, (struct sockaddr *)&name, length), MAD_BYTES);
	struct rdma_cm_event *event = next(ends.client_channel, RDMA_CM_EVENT_REJECTED);
	assert_int_equal(event->status, 5);
	cm.ack_event(event);
	close(port);
	close(process);
	cm.destroy_qp(ends.client);
	assert_int_equal(cm.create_id(ends.server_channel, &ends.listener, NULL, RDMA_PS_TCP), 0);
	close_ends(&ends);
}

/* A copy of the request came when nobody listened, and the word of that is slower than the answer to the next copy. */
static void a_refusal_that_the_answer_overtook_is_not_heard(void **state)
{
	(void)state;
	if (!strcmp(getenv("TELPHER_VERBS_CARRIER") ?: "", "wire")) return;         /* it is the same there, and packets would be more to make */
	uint8_t mad[257] = { 0 };
	struct sockaddr_un name;
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons(PORT + 11) };
	socklen_t length;
	struct ends ends;
	open_ends(&ends, PORT + 11, 0);
	assert_int_equal(cm.destroy_id(ends.listener), 0);
	int port = name_socket("port", PORT + 11, &name, &length);
	assert_int_equal(bind(port, (struct sockaddr *)&name, length), 0);
	make_qp(ends.client);
	assert_int_equal(cm.connect(ends.client, NULL), 0);
	assert_int_equal(recv(port, mad, sizeof(mad), 0), 256);
	close(port);
	assert_int_equal(cm.create_id(ends.server_channel, &ends.listener, NULL, RDMA_PS_TCP), 0);
	assert_int_equal(cm.bind_addr(ends.listener, (struct sockaddr *)&at), 0);
	assert_int_equal(cm.listen(ends.listener, 4), 0);
	next_request(&ends);
	make_qp(ends.server);
	assert_int_equal(cm.accept(ends.server, NULL), 0);
	int process = name_socket("process", (unsigned)(mad[24] << 8 | mad[25]), &name, &length);
	memcpy(mad + 28, mad + 24, 4);
	memset(mad + 24, 0, 4);
	memset(mad + 32, 0, 224);
	mad[17] = 0x12, mad[35] = 8;        /* REJ, of a REQ: nobody listens */
	assert_int_equal(sendto(process, mad, 256, 0, (struct sockaddr *)&name, length), 256);
	usleep(100000);             /* for our own thread to hear it */
	pass(ends.client_channel, RDMA_CM_EVENT_ESTABLISHED);
	pass(ends.server_channel, RDMA_CM_EVENT_ESTABLISHED);
	close(process);
	cm.destroy_qp(ends.client);
	cm.destroy_qp(ends.server);
	assert_int_equal(cm.destroy_id(ends.server), 0);
	close_ends(&ends);
}

/* Where the word that it was given up didn't come. */
static void an_answer_to_a_request_that_was_given_up_is_refused(void **state)
{
	(void)state;
	struct ends ends;
	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1 };
	open_ends(&ends, PORT + 4, 0);
	make_qp(ends.client);
	assert_int_equal(cm.connect(ends.client, NULL), 0);
	struct rdma_cm_event *event = next(ends.server_channel, RDMA_CM_EVENT_CONNECT_REQUEST);
	ends.server = event->id;
	cm.ack_event(event);
	assert_int_equal(cm.destroy_id(ends.listener), 0);
	assert_int_equal(cm.create_id(ends.server_channel, &ends.listener, NULL, RDMA_PS_TCP), 0);
	cm.destroy_qp(ends.client);
	assert_int_equal(cm.destroy_id(ends.client), 0);
	make_qp(ends.server);
	assert_int_equal(cm.accept(ends.server, &param), 0);
	event = next(ends.server_channel, RDMA_CM_EVENT_REJECTED);
	assert_int_equal(event->status, 6);
	cm.ack_event(event);
	cm.destroy_qp(ends.server);
	assert_int_equal(cm.destroy_id(ends.server), 0);
	assert_int_equal(cm.create_id(ends.client_channel, &ends.client, NULL, RDMA_PS_TCP), 0);
	close_ends(&ends);
}

static void nobody_listens(void **state)
{
	(void)state;
	struct ends ends;
	open_ends(&ends, PORT + 2, 0);
	assert_int_equal(cm.destroy_id(ends.listener), 0);
	make_qp(ends.client);
	assert_int_equal(cm.connect(ends.client, NULL), 0);
	struct rdma_cm_event *event = next(ends.client_channel, RDMA_CM_EVENT_REJECTED);
	assert_int_equal(event->status, 8);
	cm.ack_event(event);
	cm.destroy_qp(ends.client);
	assert_int_equal(cm.create_id(ends.server_channel, &ends.listener, NULL, RDMA_PS_TCP), 0);
	close_ends(&ends);
}

/* More requests than the backlog holds come again later: none is lost. */
static void a_full_backlog_makes_requests_wait(void **state)
{
	(void)state;
	enum { CLIENTS = 4 };
	struct ends ends[CLIENTS];
	open_ends(&ends[0], PORT + 3, 1);
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(PORT + 3), .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	for (int i = 0; i < CLIENTS; i++) {
		if (i) {
			assert_int_equal(cm.create_id(ends[0].client_channel, &ends[i].client, NULL, RDMA_PS_TCP), 0);
			assert_int_equal(cm.resolve_addr(ends[i].client, NULL, (struct sockaddr *)&to, 1000), 0);
			pass(ends[0].client_channel, RDMA_CM_EVENT_ADDR_RESOLVED);
			assert_int_equal(cm.resolve_route(ends[i].client, 1000), 0);
			pass(ends[0].client_channel, RDMA_CM_EVENT_ROUTE_RESOLVED);
		}
		make_qp(ends[i].client);
		assert_int_equal(cm.connect(ends[i].client, NULL), 0);
	}
	for (int i = 0; i < CLIENTS; i++) {
		struct rdma_cm_event *event = next(ends[0].server_channel, RDMA_CM_EVENT_CONNECT_REQUEST);
		ends[i].server = event->id;
		cm.ack_event(event);
		assert_int_equal(cm.reject(ends[i].server, NULL, 0), 0);
		pass(ends[0].client_channel, RDMA_CM_EVENT_REJECTED);
	}
	for (int i = 0; i < CLIENTS; i++) {
		cm.destroy_qp(ends[i].client);
		assert_int_equal(cm.destroy_id(ends[i].server), 0);
		if (i)
			assert_int_equal(cm.destroy_id(ends[i].client), 0);
	}
	close_ends(&ends[0]);
}

/* The child's ids are copies: putting them away parts nobody, and what it opens itself works. */
static void a_forked_child_parts_nobody_and_connects_by_itself(void **state)
{
	(void)state;
	struct ends ends, own;
	int status;
	if (SANITIZED)
		skip();
	connect_ends(&ends, PORT + 13);
	pid_t pid = fork();
	if (pid == 0) {
		alarm(60);
		cm.destroy_id(ends.server);
		close_ends(&ends);
		connect_ends(&own, PORT + 14);
		assert_int_equal(cm.disconnect(own.client), 0);
		pass(own.server_channel, RDMA_CM_EVENT_DISCONNECTED);
		_exit(0);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_int_equal(status, 0);
	/* Had it parted them, that would be the next event. */
	assert_int_equal(cm.write_event(ends.server, (enum rdma_cm_event_type)EVENT_USER, 1, 0), 0);
	pass(ends.server_channel, EVENT_USER);
	assert_int_equal(cm.disconnect(ends.client), 0);
	pass(ends.client_channel, RDMA_CM_EVENT_DISCONNECTED);
	pass(ends.server_channel, RDMA_CM_EVENT_DISCONNECTED);
	cm.destroy_qp(ends.client);
	cm.destroy_qp(ends.server);
	assert_int_equal(cm.destroy_id(ends.server), 0);
	close_ends(&ends);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_program_writes_events_of_its_own), cmocka_unit_test(an_id_resolves_names_and_keeps_what_it_found),
		cmocka_unit_test(two_ids_connect_talk_and_part), cmocka_unit_test(a_refusal_brings_its_reason_and_data), cmocka_unit_test(nobody_listens),
		cmocka_unit_test(a_queue_pair_that_its_program_destroyed_is_left_alone),
		cmocka_unit_test(a_channel_that_is_destroyed_takes_its_connections_with_it),
		cmocka_unit_test(a_request_has_the_context_that_its_listener_has_when_it_is_fetched),
		cmocka_unit_test(a_request_that_was_given_up_is_over_for_the_listener),
		cmocka_unit_test(a_refusal_without_numbers_ends_the_request_of_its_transaction),
		cmocka_unit_test(a_refusal_that_the_answer_overtook_is_not_heard),
		cmocka_unit_test(an_answer_to_a_request_that_was_given_up_is_refused),
		cmocka_unit_test(a_full_backlog_makes_requests_wait), cmocka_unit_test(a_forked_child_parts_nobody_and_connects_by_itself),
	};
	setenv("TELPHER_VERBS_HIDE_REAL", "1", 1);
	if (argc > 1)
		setenv("TELPHER_VERBS_CARRIER", argv[1], 1);
	if (!load()) {
		printf("librdmacm.so.1 isn't built (Debian: librdmacm-dev): %s\n", dlerror());
		return 77;
	}
	int failed = cmocka_run_group_tests(tests, NULL, NULL);
	/* Once more, each message as a packet. */
	if (!failed && argc == 1)
		execl("/proc/self/exe", argv[0], "wire", (char *)NULL);
	return failed;
}

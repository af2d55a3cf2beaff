/* Other people's transports: which are loaded, what they carry, and what is said of those that break the interface. The plug-ins are
 * plugin_loop.c, built once a version; both ends are in this one thread. */
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include "helper_net.h"
#include "net/plugin/plugin.h"

struct pair { const struct tp_net_ops *ops; void *listener, *state, *send_comm, *recv_comm; };

static int fresh(void **state)
{
	(void)state;
	net_set_environment("NCCL_NET", "NCCL_NET_PLUGIN", "LOOP_BAD", "NCCL_SOCKET_IFNAME=lo", "NCCL_SOCKET_FAMILY", "TELPHER_SOCKET_CONNECT_TIMEOUT", "NCCL_IB_DISABLE=1", NULL);
	tp_net_plugin_forget();
	net_log_capture();
	return 0;
}

static int end(void **state)
{
	(void)state;
	net_log_end();
	tp_net_plugin_forget();
	return 0;
}

static void expect_line(const char *words, bool there)
{
	char *text = net_log_text();

	if (!strstr(text, words) == there) fail_msg("\"%s\" is %s in the log:\n%s", words, there ? "not" : "also", text);
	free(text);
}

static void expect_error(const char *words)
{
	if (!strstr(tp_log_last_error(), words)) fail_msg("\"%s\" is not in the last error: %s", words, tp_log_last_error());
}

static const struct tp_net_ops *use(const char *plugin)
{
	const struct tp_net_ops *ops = NULL;
	char text[512];

	snprintf(text, sizeof(text), "NCCL_NET_PLUGIN=%s", plugin);
	tp_net_plugin_forget();
	net_set_environment(text, NULL);
	assert_int_equal(tp_net_choose(NULL, &ops), ncclSuccess);
	return ops;
}

/* The first error of either end. */
static ncclResult_t try_pair(struct pair *pair)
{
	unsigned char handle[TP_NET_HANDLE_BYTES];
	struct tp_net_hello who;

	TP_TRY(pair->ops->listen(0, handle, &pair->listener));
	while (!pair->send_comm || !pair->recv_comm) {
		if (!pair->send_comm) TP_TRY(pair->ops->connect(1, handle, &net_hello, &pair->state, &pair->send_comm));
		if (!pair->recv_comm) TP_TRY(pair->ops->accept(pair->listener, &net_hello, &who, &pair->recv_comm));
		sched_yield();
	}
	assert_int_equal(who.from, net_hello.from);
	assert_int_equal(who.channel, net_hello.channel);
	return ncclSuccess;
}

static void close_pair(struct pair *pair)
{
	if (pair->send_comm) assert_int_equal(pair->ops->close_send(pair->send_comm), ncclSuccess);
	if (pair->recv_comm) assert_int_equal(pair->ops->close_recv(pair->recv_comm), ncclSuccess);
	if (pair->state) pair->ops->cancel_connect(pair->state);
	if (pair->listener) assert_int_equal(pair->ops->close_listen(pair->listener), ncclSuccess);
	memset(pair, 0, sizeof(*pair));
}

/* The first error, or success and the number of bytes. */
static ncclResult_t exchange(struct pair *pair, unsigned char *from, unsigned char *to, size_t bytes, size_t room, size_t *got)
{
	void *from_memory, *to_memory, *at = to, *send = NULL, *receive = NULL;
	bool sent = false, received = false;
	int tag = 77;
	ncclResult_t result = pair->ops->reg_memory(pair->send_comm, from, bytes, TP_NET_HOST, &from_memory);

	TP_TRY(result);
	assert_int_equal(pair->ops->reg_memory(pair->recv_comm, to, room, TP_NET_HOST, &to_memory), ncclSuccess);
	while (result == ncclSuccess && !receive) result = pair->ops->irecv(pair->recv_comm, 1, &at, &room, &tag, &to_memory, &receive);
	while (result == ncclSuccess && !send) result = pair->ops->isend(pair->send_comm, from, bytes, tag, from_memory, &send);
	while (result == ncclSuccess && (!sent || !received)) {
		if (!sent) result = pair->ops->test(send, &sent, NULL);
		if (result == ncclSuccess && !received) result = pair->ops->test(receive, &received, got);
	}
	assert_int_equal(pair->ops->dereg_memory(pair->send_comm, from_memory), ncclSuccess);
	assert_int_equal(pair->ops->dereg_memory(pair->recv_comm, to_memory), ncclSuccess);
	return result;
}

static void every_version_carries_messages(void **state)
{
	static const size_t sizes[] = { 0, 1, 8, 4096, 1000000 };
	unsigned char *from = malloc(1000000), *to = malloc(1000000);
	int descriptors;

	(void)state;
	use("none");                    /* the log is open from here on */
	descriptors = net_open_descriptors();
	for (int version = 8; version <= 11; version++) {
		char name[64];
		struct pair pair = { 0 };

		snprintf(name, sizeof(name), "loop%d", version);
		pair.ops = use(name);
		assert_string_equal(pair.ops->name, "Loop");
		assert_int_equal(try_pair(&pair), ncclSuccess);
		for (size_t i = 0; i < TP_ARRAY_LEN(sizes); i++) {
			size_t got = 99;
			net_fill(from, sizes[i], (uint32_t)i + 1);
			assert_int_equal(exchange(&pair, from, to, sizes[i], sizes[i] + (i % 2) * 100 < 1000000 ? sizes[i] + (i % 2) * 100 : 1000000, &got), ncclSuccess);
			assert_int_equal(got, sizes[i]);
			net_check(to, got, (uint32_t)i + 1);
		}
		close_pair(&pair);
		snprintf(name, sizeof(name), "NET/Plugin: Loaded net plugin %s (v%d)", version == 9 ? "Loops of all kinds" : "Loop", version);
		expect_line(name, true);
		snprintf(name, sizeof(name), "NCCL INFO LOOP : speaks v%d", version);
		expect_line(name, true);
		tp_net_plugin_forget();
	}
	expect_line("LOOP : 0 contexts are left", true);
	expect_line("Initialized NET plugin Loop", true);
	expect_line("Assigned NET plugin Loop to comm", true);
	expect_line("NET/Loop : Using [0]loop0:1 [1]loop1:2", true);
	expect_line("NCCL WARN", false);
	assert_int_equal(net_open_descriptors(), descriptors);
	free(from);
	free(to);
}

static void a_plugin_is_named_by_suffix_library_or_path(void **state)
{
	(void)state;
	assert_string_equal(use("loop9")->name, "Loop");
	assert_string_equal(use("libnccl-net-loop9.so")->name, "Loop");
	assert_string_equal(use(PLUGINS "/libnccl-net-loop9.so")->name, "Loop");
	assert_string_equal(use("none")->name, "Socket");
	assert_string_equal(use("NONE")->name, "Socket");
	expect_line("NCCL WARN", false);
}

static void of_a_list_the_first_that_works_is_used_and_the_others_are_out(void **state)
{
	const struct tp_net_ops *ops = use("not-here,loop10,loop11");

	(void)state;
	assert_string_equal(ops->name, "Loop");
	expect_line("NET/Plugin: Could not find: not-here libnccl-net-not-here.so", true);
	expect_line("NCCL WARN NET plug-in not-here (NCCL_NET_PLUGIN) can't be used: there is no not-here libnccl-net-not-here.so on the library path", true);
	expect_line("Disabling external plugins: loop11", true);
	expect_line("Loaded net plugin Loop (v10)", true);
	expect_line("Loaded net plugin Loop (v11)", false);
}

static void without_a_name_a_missing_default_is_no_warning(void **state)
{
	const struct tp_net_ops *ops = NULL;

	(void)state;
	tp_net_plugin_forget();
	assert_int_equal(tp_net_choose(NULL, &ops), ncclSuccess);
	assert_string_equal(ops->name, "Socket");
	expect_line("NET/Plugin: Could not find: libnccl-net.so", true);
	expect_line("NCCL WARN", false);
}

static void a_named_network_that_is_a_plugin_must_work(void **state)
{
	const struct tp_net_ops *ops = NULL;

	(void)state;
	net_set_environment("NCCL_NET=loop", NULL);
	assert_string_equal(use("loop8")->name, "Loop");
	assert_string_equal(use("loop9")->name, "Loop");        /* which it is called only after init */
	net_set_environment("NCCL_NET=loops of all kinds", NULL);
	assert_string_equal(use("loop9")->name, "Loop");
	net_set_environment("NCCL_NET=nowhere", NULL);
	tp_net_plugin_forget();
	net_set_environment("NCCL_NET_PLUGIN=nowhere", NULL);
	assert_int_equal(tp_net_choose(NULL, &ops), ncclInvalidUsage);
	expect_error("NCCL_NET=nowhere: that network can't be used here. There are: nowhere (not usable: there is no nowhere libnccl-net-nowhere.so");
	net_set_environment("NCCL_NET=Socket", NULL);
	assert_string_equal(use("loop8")->name, "Socket");
}

static void a_library_that_is_no_plugin_says_what_it_is(void **state)
{
	static const char garbage[] = "/tmp/test_plugin_garbage.so";
	int fd = open(garbage, O_WRONLY | O_CREAT | O_TRUNC, 0644);

	(void)state;
	for (int i = 0; i < 100; i++) assert_int_equal(write(fd, "this is no library\n", 19), 19);
	close(fd);
	assert_string_equal(use("loop0")->name, "Socket");
	expect_error("it exports no ncclNetPlugin_v8 to _v11: it is no NET plug-in");
	assert_string_equal(use("loop6")->name, "Socket");
	expect_error("its newest interface is v6 (ncclNetPlugin_v6), and this library speaks v8 to v11");
	expect_line("is unsupported", true);
	assert_string_equal(use(garbage)->name, "Socket");
	expect_error("invalid ELF header");
	unlink(garbage);
}

/* How each is told, and that the job goes on over sockets, or, where it asked for the plug-in by name, doesn't. */
static void what_a_plugin_says_of_itself_is_checked(void **state)
{
	static const struct { const char *bad, *plugin, *says; } cases[] = {
		{ "null-name", "loop9", "the table ncclNetPlugin_v9 has no name (NULL)" },
		{ "null-isend", "loop10", "the table ncclNetPlugin_v10 has no isend (NULL)" },
		{ "null-test", "loop11", "the table ncclNetPlugin_v11 has no test (NULL)" },
		{ "null-test", "loop9", "the table ncclNetPlugin_v9 has no test (NULL)" },
		{ "name-socket", "loop8", "it calls itself Socket" },
		{ "init", "loop8", "init gives ncclSystemError" },
		{ "init-99", "loop11", "init gives 99, which is no result of NCCL's" },
		{ "devices", "loop9", "has 0 devices" },
		{ "devices-many", "loop9", "has 1048576 devices; at most 256 can be used" },
		{ "devices-error", "loop11", "devices gives ncclInternalError" },
		{ "properties", "loop10", "getProperties for device 0 gives ncclInternalError" },
		{ "no-host", "loop10", "device 0 (loop0) takes no host memory (ptrSupport 0x2" },
		{ "unpack", "loop8", "device 0 (loop0) is of type 1" },
		{ "max-recvs", "loop11", "takes 0 receives at once" },
	};

	(void)state;
	for (size_t i = 0; i < TP_ARRAY_LEN(cases); i++) {
		const struct tp_net_ops *ops = NULL;
		char text[64];

		snprintf(text, sizeof(text), "LOOP_BAD=%s", cases[i].bad);
		net_set_environment(text, "NCCL_NET", NULL);
		assert_string_equal(use(cases[i].plugin)->name, "Socket");
		expect_error("can't be used");
		expect_error(cases[i].says);
		tp_net_plugin_forget();
		snprintf(text, sizeof(text), "NCCL_NET=%s", i == 0 ? cases[i].plugin : strcmp(cases[i].bad, "name-socket") == 0 ? "Carrier" : "Loop");
		net_set_environment(text, NULL);
		assert_int_equal(tp_net_choose(NULL, &ops), ncclInvalidUsage);
		expect_error(cases[i].says);
	}
	expect_line("NCCL WARN LOOP : no loops today", true);
}

static void what_is_odd_but_harmless_is_put_right(void **state)
{
	struct tp_net_properties p;
	const struct tp_net_ops *ops;

	(void)state;
	net_set_environment("LOOP_BAD=speed", NULL);
	ops = use("loop9");
	assert_int_equal(ops->properties(0, &p), ncclSuccess);
	assert_int_equal(p.speed_mbps, 10000);
	expect_error("has a speed of -7 Mb/s; 10000 are assumed");
	net_set_environment("LOOP_BAD=no-name", NULL);
	ops = use("loop11");
	assert_int_equal(ops->properties(1, &p), ncclSuccess);
	assert_string_equal(p.name, "Loop1");
	assert_int_equal(p.port, 2);
	assert_int_equal(ops->properties(2, &p), ncclInternalError);
}

static void an_error_while_connecting_names_the_function(void **state)
{
	static const struct { const char *bad, *says; } cases[] = {
		{ "listen", "listen for rank 3 -> rank 5 [channel 2] gives ncclSystemError" },
		{ "listen-null", "listen for rank 3 -> rank 5 [channel 2] gives no listener" },
		{ "connect", "connect for rank 3 -> rank 5 [channel 2] gives ncclInternalError" },
		{ "accept", "accept for rank 3 -> rank 5 [channel 2] gives ncclInternalError" },
		{ "connect-never", "has been under way for 300 ms" },
	};
	int descriptors = net_open_descriptors();

	(void)state;
	for (size_t i = 0; i < TP_ARRAY_LEN(cases); i++) {
		struct pair pair = { 0 };
		char text[64];

		snprintf(text, sizeof(text), "LOOP_BAD=%s", cases[i].bad);
		/* The others must not take as long on a busy machine. */
		net_set_environment(text, strcmp(cases[i].bad, "connect-never") ? "TELPHER_SOCKET_CONNECT_TIMEOUT" : "TELPHER_SOCKET_CONNECT_TIMEOUT=300", NULL);
		pair.ops = use(i % 2 ? "loop11" : "loop9");
		assert_int_not_equal(try_pair(&pair), ncclSuccess);
		expect_error(cases[i].says);
		close_pair(&pair);
	}
	assert_int_equal(net_open_descriptors(), descriptors);
}

static void an_acceptor_that_fails_tells_its_peer_why(void **state)
{
	unsigned char handle[TP_NET_HANDLE_BYTES];
	struct pair pair = { 0 };
	struct tp_net_hello who;
	ncclResult_t connected = ncclSuccess;
	bool failed = false;

	(void)state;
	net_set_environment("LOOP_BAD=listen", NULL);
	pair.ops = use("loop10");
	assert_int_equal(pair.ops->listen(0, handle, &pair.listener), ncclSuccess);
	while (connected == ncclSuccess) {
		connected = pair.ops->connect(0, handle, &net_hello, &pair.state, &pair.send_comm);
		if (!failed) failed = pair.ops->accept(pair.listener, &net_hello, &who, &pair.recv_comm) != ncclSuccess;
	}
	assert_int_equal(connected, ncclRemoteError);
	expect_error("the peer refuses: NET/Plugin: Loop (v10");
	close_pair(&pair);
}

static void an_error_of_a_transfer_names_what_was_wrong(void **state)
{
	static const struct { const char *bad, *plugin, *says; } cases[] = {
		{ "regmr", "loop8", "regMr for rank 3 -> rank 5 [channel 2] gives ncclSystemError" },
		{ "isend", "loop9", "isend for rank 3 -> rank 5 [channel 2] gives ncclSystemError" },
		{ "irecv", "loop10", "irecv for rank 3 -> rank 5 [channel 2] gives ncclInternalError" },
		{ "test-99", "loop11", "test for rank 3 -> rank 5 [channel 2] gives 99, which is no result of NCCL's" },
		{ "sizes-large", "loop8", "test says that 3001 bytes came for a receive of at most 3000" },
		{ "sizes-none", "loop9", "test says that a receive is done, but not how many bytes came" },
		{ "max-bytes", "loop10", "a message of 2000 bytes; device 1 (loop1) takes 1000 at most" },
	};
	static unsigned char from[3000], to[3000];

	(void)state;
	for (size_t i = 0; i < TP_ARRAY_LEN(cases); i++) {
		struct pair pair = { 0 };
		char text[64];
		size_t got;

		snprintf(text, sizeof(text), "LOOP_BAD=%s", cases[i].bad);
		net_set_environment(text, NULL);
		pair.ops = use(cases[i].plugin);
		assert_int_equal(try_pair(&pair), ncclSuccess);
		assert_int_not_equal(exchange(&pair, from, to, 2000, 3000, &got), ncclSuccess);
		expect_error(cases[i].says);
		close_pair(&pair);
	}
}

static void a_peer_that_goes_is_a_remote_error_and_closing_with_requests_outstanding_is_safe(void **state)
{
	static unsigned char to[64];
	void *memory, *at = to, *receive = NULL;
	size_t room = sizeof(to);
	bool done = false;
	int tag = 1, descriptors = net_open_descriptors();
	struct pair pair = { .ops = use("loop11") };

	(void)state;
	assert_int_equal(try_pair(&pair), ncclSuccess);
	assert_int_equal(pair.ops->reg_memory(pair.recv_comm, to, sizeof(to), TP_NET_HOST, &memory), ncclSuccess);
	assert_int_equal(pair.ops->irecv(pair.recv_comm, 1, &at, &room, &tag, &memory, &receive), ncclSuccess);
	assert_int_equal(pair.ops->test(receive, &done, NULL), ncclSuccess);
	assert_false(done);
	assert_int_equal(pair.ops->close_send(pair.send_comm), ncclSuccess);
	pair.send_comm = NULL;
	assert_int_equal(pair.ops->test(receive, &done, NULL), ncclRemoteError);
	expect_error("test for rank 3 -> rank 5 [channel 2] gives ncclRemoteError");
	assert_int_equal(pair.ops->dereg_memory(pair.recv_comm, memory), ncclSuccess);
	close_pair(&pair);
	assert_int_equal(net_open_descriptors(), descriptors);
}

static void a_peer_that_goes_is_noticed_where_the_plugin_does_not(void **state)
{
	static unsigned char to[64];
	void *memory, *at = to, *receive = NULL;
	size_t room = sizeof(to);
	bool done = false;
	int tag = 1;
	ncclResult_t result = ncclSuccess;
	struct pair pair;

	(void)state;
	net_set_environment("LOOP_BAD=deaf", NULL);
	pair = (struct pair){ .ops = use("loop8") };
	assert_int_equal(try_pair(&pair), ncclSuccess);
	assert_int_equal(pair.ops->reg_memory(pair.recv_comm, to, sizeof(to), TP_NET_HOST, &memory), ncclSuccess);
	assert_int_equal(pair.ops->irecv(pair.recv_comm, 1, &at, &room, &tag, &memory, &receive), ncclSuccess);
	assert_int_equal(pair.ops->close_send(pair.send_comm), ncclSuccess);
	pair.send_comm = NULL;
	while (result == ncclSuccess && !done) result = pair.ops->test(receive, &done, NULL);
	assert_int_equal(result, ncclRemoteError);
	expect_error("NET/Loop : rank 3 -> rank 5 [channel 2] : peer 127.0.0.1<");
	expect_error("closed the connection while data was outstanding");
	assert_int_equal(pair.ops->dereg_memory(pair.recv_comm, memory), ncclSuccess);
	close_pair(&pair);
}

static void what_is_outstanding_when_a_sender_leaves_still_goes_out(void **state)
{
	unsigned char *from = malloc(4 << 20), *to = malloc(4 << 20);
	void *from_memory, *to_memory, *at = to, *send = NULL, *receive = NULL;
	size_t bytes = 200000, got = 0;
	bool done = false;
	int tag = 1;
	struct pair pair = { .ops = use("loop9") };

	(void)state;
	assert_int_equal(try_pair(&pair), ncclSuccess);
	net_fill(from, bytes, 3);
	assert_int_equal(pair.ops->reg_memory(pair.send_comm, from, bytes, TP_NET_HOST, &from_memory), ncclSuccess);
	assert_int_equal(pair.ops->reg_memory(pair.recv_comm, to, bytes, TP_NET_HOST, &to_memory), ncclSuccess);
	assert_int_equal(pair.ops->isend(pair.send_comm, from, bytes, tag, from_memory, &send), ncclSuccess);
	pair.ops->leaving(pair.send_comm);
	/* It has moved nothing yet; only test does. */
	assert_int_equal(pair.ops->close_send(pair.send_comm), ncclSuccess);
	assert_int_equal(pair.ops->dereg_memory(NULL, from_memory), ncclSuccess);
	pair.send_comm = NULL;
	assert_int_equal(pair.ops->irecv(pair.recv_comm, 1, &at, &bytes, &tag, &to_memory, &receive), ncclSuccess);
	while (!done) assert_int_equal(pair.ops->test(receive, &done, &got), ncclSuccess);
	assert_int_equal(got, bytes);
	net_check(to, got, 3);
	pair.ops->dereg_memory(pair.recv_comm, to_memory);
	close_pair(&pair);
	free(from);
	free(to);
}

static void an_offer_of_another_plugin_or_of_nonsense_is_refused(void **state)
{
	struct tp_plug plug = { .name = "Loop", .version = 9 };
	struct tp_plug_offer offer;
	char why[400];

	(void)state;
	tp_plug_offer_fill(&offer, &plug);
	assert_null(tp_plug_offer_check(&offer, "Loop", why, sizeof(why)));
	assert_non_null(strstr(tp_plug_offer_check(&offer, "Coil", why, sizeof(why)), "the peer's plug-in is Loop, this rank's is Coil"));
	offer.version++;
	assert_non_null(strstr(tp_plug_offer_check(&offer, "Loop", why, sizeof(why)), "has version 2"));
	memset(&offer, 0xff, sizeof(offer));
	assert_non_null(strstr(tp_plug_offer_check(&offer, "Loop", why, sizeof(why)), "no plug-in's handle"));
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(every_version_carries_messages, fresh, end),
		cmocka_unit_test_setup_teardown(a_plugin_is_named_by_suffix_library_or_path, fresh, end),
		cmocka_unit_test_setup_teardown(of_a_list_the_first_that_works_is_used_and_the_others_are_out, fresh, end),
		cmocka_unit_test_setup_teardown(without_a_name_a_missing_default_is_no_warning, fresh, end),
		cmocka_unit_test_setup_teardown(a_named_network_that_is_a_plugin_must_work, fresh, end),
		cmocka_unit_test_setup_teardown(a_library_that_is_no_plugin_says_what_it_is, fresh, end),
		cmocka_unit_test_setup_teardown(what_a_plugin_says_of_itself_is_checked, fresh, end),
		cmocka_unit_test_setup_teardown(what_is_odd_but_harmless_is_put_right, fresh, end),
		cmocka_unit_test_setup_teardown(an_error_while_connecting_names_the_function, fresh, end),
		cmocka_unit_test_setup_teardown(an_acceptor_that_fails_tells_its_peer_why, fresh, end),
		cmocka_unit_test_setup_teardown(an_error_of_a_transfer_names_what_was_wrong, fresh, end),
		cmocka_unit_test_setup_teardown(a_peer_that_goes_is_a_remote_error_and_closing_with_requests_outstanding_is_safe, fresh, end),
		cmocka_unit_test_setup_teardown(a_peer_that_goes_is_noticed_where_the_plugin_does_not, fresh, end),
		cmocka_unit_test_setup_teardown(what_is_outstanding_when_a_sender_leaves_still_goes_out, fresh, end),
		cmocka_unit_test_setup_teardown(an_offer_of_another_plugin_or_of_nonsense_is_refused, fresh, end),
	};
	const char *path = getenv("LD_LIBRARY_PATH");

	/* The library path is read at a program's start. */
	if (argc > 0 && (!path || strcmp(path, PLUGINS) != 0)) {
		setenv("LD_LIBRARY_PATH", PLUGINS, 1);
		execv("/proc/self/exe", argv);
		return 1;
	}
	return cmocka_run_group_tests(tests, NULL, NULL);
}

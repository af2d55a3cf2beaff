#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include "helper_export.h"

int export_version;
static void *library, *context;
static const void *table;
static char log_text[1 << 16];
static size_t log_used;
static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;

#define V8 ((const struct tp_abi_v8 *)table)
#define V9 ((const struct tp_abi_v9 *)table)
#define V10 ((const struct tp_abi_v10 *)table)
#define V11 ((const struct tp_abi_v11 *)table)
/* A function that has the same type in all versions. */
#define SAME(function) (export_version == 8 ? V8->function : export_version == 9 ? V9->function : export_version == 10 ? V10->function : V11->function)

static void take_line(int level, unsigned long flags, const char *file, int line, const char *format, ...) __attribute__((format(printf, 5, 6)));
static void take_line(int level, unsigned long flags, const char *file, int line, const char *format, ...)
{
	char text[1024];
	va_list args;

	(void)flags, (void)file, (void)line;
	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	pthread_mutex_lock(&log_lock);
	if (log_used < sizeof(log_text))
		log_used += (size_t)snprintf(log_text + log_used, sizeof(log_text) - log_used, "%s %s\n", level == 2 ? "WARN" : level == 3 ? "INFO" : "?", text);
	pthread_mutex_unlock(&log_lock);
}

const char *export_log(void) { return log_text; }

static struct tp_abi_config config = { .traffic_class = TP_ABI_TRAFFIC_CLASS_UNSET };

void export_open(int version)
{
	char symbol[32];
	ncclResult_t result;

	export_version = version;
	library = dlopen(EXPORTED_PLUGIN, RTLD_NOW | RTLD_LOCAL);
	if (!library) fail_msg("%s", dlerror());
	snprintf(symbol, sizeof(symbol), "ncclNetPlugin_v%d", version);
	table = dlsym(library, symbol);
	assert_non_null(table);
	switch (version) {
	case 8: result = V8->init(take_line); break;
	case 9: result = V9->init(take_line); break;
	case 10: result = V10->init(take_line, NULL); break;
	default: result = V11->init(&context, 1, &config, take_line, NULL); break;
	}
	if (result != ncclSuccess) fail_msg("init gives %d: %s", result, log_text);
}

void export_close(void)
{
	if (export_version == 11) assert_int_equal(V11->finalize(context), ncclSuccess);
	context = NULL;
	/* As NCCL with its last communicator; threads that watch devices may be running. */
	assert_int_equal(dlclose(library), 0);
}

const struct tp_abi_v8 *export_v8(void) { return V8; }
const struct tp_abi_v11 *export_v11(void) { return V11; }

int export_max_recvs(void)
{
	struct tp_abi_properties_v8 p8;
	struct tp_abi_properties_v9 p9;
	struct tp_abi_properties_v11 p11;

	switch (export_version) {
	case 8:
		assert_int_equal(V8->properties(0, &p8), ncclSuccess);
		return p8.max_recvs;
	case 9: case 10:
		assert_int_equal(export_version == 9 ? V9->properties(0, &p9) : V10->properties(0, &p9), ncclSuccess);
		return p9.max_recvs;
	default:
		assert_int_equal(V11->properties(0, &p11), ncclSuccess);
		return p11.max_recvs;
	}
}

ncclResult_t export_listen(void *handle, void **listener)
{
	switch (export_version) {
	case 8: return V8->listen(0, handle, listener);
	case 9: return V9->listen(0, handle, listener);
	case 10: return V10->listen(0, handle, listener);
	default: return V11->listen(context, 0, handle, listener);
	}
}

ncclResult_t export_connect(void *handle, void **send_comm)
{
	struct tp_abi_device_handle *device = NULL;

	switch (export_version) {
	case 8: return V8->connect(0, handle, send_comm, &device);
	case 9: return V9->connect(0, handle, send_comm, &device);
	case 10: return V10->connect(0, &config, handle, send_comm, &device);
	default: return V11->connect(context, 0, handle, send_comm, &device);
	}
}

ncclResult_t export_accept(void *listener, void **recv_comm) { return SAME(accept)(listener, recv_comm, NULL); }
ncclResult_t export_test(void *request, int *done, int *sizes) { return SAME(test)(request, done, sizes); }
ncclResult_t export_reg(void *comm, void *data, size_t bytes, void **memory) { return SAME(reg_mr)(comm, data, bytes, TP_ABI_PTR_HOST, memory); }
ncclResult_t export_dereg(void *comm, void *memory) { return SAME(dereg_mr)(comm, memory); }
ncclResult_t export_close_comm(void *comm, bool sending) { return sending ? SAME(close_send)(comm) : SAME(close_recv)(comm); }
ncclResult_t export_close_listen(void *listener) { return SAME(close_listen)(listener); }

ncclResult_t export_isend(void *comm, void *data, size_t bytes, int tag, void *memory, void **request)
{
	switch (export_version) {
	case 8: return V8->isend(comm, data, (int)bytes, tag, memory, request);
	case 9: return V9->isend(comm, data, bytes, tag, memory, request);
	case 10: return V10->isend(comm, data, bytes, tag, memory, NULL, request);
	default: return V11->isend(comm, data, bytes, tag, memory, NULL, request);
	}
}

ncclResult_t export_irecv(void *comm, int n, void **data, size_t *bytes, int *tags, void **memory, void **request)
{
	int small[TP_NET_MAX_RECVS];
	void *events[TP_NET_MAX_RECVS] = { NULL };

	for (int i = 0; i < n && i < TP_NET_MAX_RECVS; i++) small[i] = (int)bytes[i];
	switch (export_version) {
	case 8: return V8->irecv(comm, n, data, small, tags, memory, request);
	case 9: return V9->irecv(comm, n, data, bytes, tags, memory, request);
	case 10: return V10->irecv(comm, n, data, bytes, tags, memory, events, request);
	default: return V11->irecv(comm, n, data, bytes, tags, memory, events, request);
	}
}

void export_pair_open(struct export_pair *pair, size_t bytes)
{
	uint64_t handle[TP_ABI_HANDLE_BYTES / 8];

	memset(pair, 0, sizeof(*pair));
	assert_int_equal(export_listen(handle, &pair->listener), ncclSuccess);
	while (!pair->send_comm || !pair->recv_comm) {
		if (!pair->send_comm) assert_int_equal(export_connect(handle, &pair->send_comm), ncclSuccess);
		if (!pair->recv_comm) assert_int_equal(export_accept(pair->listener, &pair->recv_comm), ncclSuccess);
		sched_yield();
	}
	/* As NCCL: a listener is for one connection. */
	assert_int_equal(export_close_listen(pair->listener), ncclSuccess);
	pair->listener = NULL;
	pair->bytes = bytes;
	assert_non_null(pair->from = malloc(bytes));
	assert_non_null(pair->to = malloc(bytes));
	assert_int_equal(export_reg(pair->send_comm, pair->from, bytes, &pair->send_memory), ncclSuccess);
	assert_int_equal(export_reg(pair->recv_comm, pair->to, bytes, &pair->recv_memory), ncclSuccess);
}

void export_pair_close(struct export_pair *pair)
{
	if (pair->send_comm) {
		assert_int_equal(export_dereg(pair->send_comm, pair->send_memory), ncclSuccess);
		assert_int_equal(export_close_comm(pair->send_comm, true), ncclSuccess);
	}
	if (pair->recv_comm) {
		assert_int_equal(export_dereg(pair->recv_comm, pair->recv_memory), ncclSuccess);
		assert_int_equal(export_close_comm(pair->recv_comm, false), ncclSuccess);
	}
	free(pair->from);
	free(pair->to);
	memset(pair, 0, sizeof(*pair));
}

static void wait_for(void *request, int *sizes)
{
	for (int done = 0; !done;) {
		assert_int_equal(export_test(request, &done, sizes), ncclSuccess);
		if (!done) sched_yield();
	}
}

void export_exchange(struct export_pair *pair, int n, size_t bytes, size_t room, const int *order)
{
	static uint32_t seed;
	void *at[TP_NET_MAX_RECVS], *memory[TP_NET_MAX_RECVS], *sends[TP_NET_MAX_RECVS] = { NULL }, *receive = NULL;
	size_t rooms[TP_NET_MAX_RECVS];
	int tags[TP_NET_MAX_RECVS], sizes[TP_NET_MAX_RECVS + 1], size, sent = 0;

	assert_true(room * (size_t)n <= pair->bytes && bytes <= room);
	seed += 16;
	for (int i = 0; i < n; i++) {
		at[i] = pair->to + (size_t)i * room;
		memory[i] = pair->recv_memory;
		rooms[i] = room;
		tags[i] = 100 + i;
		net_fill(pair->from + (size_t)i * room, bytes, seed + (uint32_t)i);
	}
	memset(pair->to, 0xee, room * (size_t)n);
	for (int i = 0; i <= TP_NET_MAX_RECVS; i++) sizes[i] = -7;
	while (!receive) assert_int_equal(export_irecv(pair->recv_comm, n, at, rooms, tags, memory, &receive), ncclSuccess);
	while (sent < n) {
		int i = order ? order[sent] : sent, done;
		assert_int_equal(export_isend(pair->send_comm, bytes ? pair->from + (size_t)i * room : NULL, bytes, tags[i], pair->send_memory, &sends[i]), ncclSuccess);
		if (sends[i]) sent++;
		/* As NCCL's proxy: it goes round; the receiver tests as well. */
		else assert_int_equal(export_test(receive, &done, sizes), ncclSuccess);
	}
	for (int i = 0; i < n; i++) {
		size = -7;
		/* Both ends by turns: a card without an engine of its own needs it. */
		for (int done = 0; !done;) {
			assert_int_equal(export_test(sends[i], &done, i % 2 ? NULL : &size), ncclSuccess);
			if (!done) sched_yield();
			if (!done && receive) {
				int received = 0;
				assert_int_equal(export_test(receive, &received, sizes), ncclSuccess);
				if (received) receive = NULL;
			}
		}
		if (i % 2 == 0) assert_int_equal(size, bytes);
	}
	if (receive) wait_for(receive, sizes);
	for (int i = 0; i < n; i++) {
		assert_int_equal(sizes[i], bytes);
		net_check(pair->to + (size_t)i * room, bytes, seed + (uint32_t)i);
		for (size_t b = bytes; b < room; b += 97) assert_int_equal(pair->to[(size_t)i * room + b], 0xee);
	}
	assert_int_equal(sizes[n], -7);
}

void export_runs_every_version(void)
{
	static const size_t sizes[] = { 0, 1, 8, 4096, 65537, 1000000 };
	struct export_pair pair;

	for (int version = 8; version <= 11; version++) {
		export_open(version);
		export_pair_open(&pair, 1 << 20);
		for (size_t i = 0; i < TP_ARRAY_LEN(sizes); i++) export_exchange(&pair, 1, sizes[i], i % 2 ? sizes[i] : 1 << 20, NULL);
		export_pair_close(&pair);
		export_close();
	}
}

void export_groups(void)
{
	static const int order[TP_NET_MAX_RECVS] = { 3, 0, 7, 1, 6, 2, 5, 4 };
	struct export_pair pair;

	for (int version = 8; version <= 11; version++) {
		export_open(version);
		export_pair_open(&pair, 1 << 19);
		for (int n = 1; n <= export_max_recvs(); n++) {
			export_exchange(&pair, n, 1000, 4096, NULL);
			export_exchange(&pair, n, 0, 64, NULL);
		}
		if (export_max_recvs() == TP_NET_MAX_RECVS) export_exchange(&pair, TP_NET_MAX_RECVS, 30000, 1 << 16, order);
		export_pair_close(&pair);
		export_close();
	}
}

/* A shared connection's senders come as they come: one whose receive isn't posted yet has no room, and waits. */
void export_tags_may_come_in_any_order(void)
{
	struct export_pair pair;
	void *receives[2] = { NULL }, *sends[2] = { NULL }, *at[2], *request;
	size_t room = 64;
	int tags[2] = { 11, 22 }, sizes[2];

	export_open(11);
	export_pair_open(&pair, 4096);
	net_fill(pair.from, 64, 1);
	net_fill(pair.from + 64, 64, 2);
	for (int i = 0; i < 2; i++) {
		at[i] = pair.to + 64 * i;
		assert_int_equal(export_irecv(pair.recv_comm, 1, &at[i], &room, &tags[i], &pair.recv_memory, &receives[i]), ncclSuccess);
		assert_non_null(receives[i]);
	}
	for (int looks = 0; looks < 1000; looks++) {
		assert_int_equal(export_isend(pair.send_comm, pair.from + 64, 64, 22, pair.send_memory, &request), ncclSuccess);
		assert_null(request);
	}
	while (!sends[0]) assert_int_equal(export_isend(pair.send_comm, pair.from, 64, 11, pair.send_memory, &sends[0]), ncclSuccess);
	while (!sends[1]) {
		int done;
		assert_int_equal(export_isend(pair.send_comm, pair.from + 64, 64, 22, pair.send_memory, &sends[1]), ncclSuccess);
		if (receives[0]) assert_int_equal(export_test(receives[0], &done, &sizes[0]), ncclSuccess);
		if (receives[0] && done) receives[0] = NULL;
	}
	for (int i = 0; i < 2; i++) {
		wait_for(sends[i], NULL);
		if (receives[i]) wait_for(receives[i], &sizes[i]);
		assert_int_equal(sizes[i], 64);
		net_check(pair.to + 64 * i, 64, (uint32_t)i + 1);
	}
	export_pair_close(&pair);
	export_close();
}

/* Until there is no more room: then one is done, and there is. */
void export_keeps_many_requests(void)
{
	struct export_pair pair;
	void *receives[TP_ABI_MAX_REQUESTS], *sends[TP_ABI_MAX_REQUESTS], *at, *request;
	size_t room = 512;
	int tag = 5, size, posted = 0, sent = 0;

	export_open(10);
	export_pair_open(&pair, TP_ABI_MAX_REQUESTS * 512);
	net_fill(pair.from, pair.bytes, 9);
	for (request = pair.from; request && posted < TP_ABI_MAX_REQUESTS;) {
		at = pair.to + 512 * posted;
		assert_int_equal(export_irecv(pair.recv_comm, 1, &at, &room, &tag, &pair.recv_memory, &request), ncclSuccess);
		if (request) receives[posted++] = request;
	}
	assert_int_equal(posted, TP_ABI_MAX_REQUESTS);
	assert_int_equal(export_irecv(pair.recv_comm, 1, &at, &room, &tag, &pair.recv_memory, &request), ncclSuccess);
	assert_null(request);
	while (sent < posted) {
		assert_int_equal(export_isend(pair.send_comm, pair.from + 512 * sent, 512, tag, pair.send_memory, &request), ncclSuccess);
		if (request) sends[sent++] = request;
		else sched_yield();
	}
	for (int i = 0; i < posted; i++) {
		bool s_done = false, r_done = false;
		while (!s_done || !r_done) {
			int done = 0;
			if (!s_done) assert_int_equal(export_test(sends[i], &done, NULL), ncclSuccess);
			s_done |= done != 0;
			done = 0;
			if (!r_done) assert_int_equal(export_test(receives[i], &done, &size), ncclSuccess);
			r_done |= done != 0;
			if (!s_done || !r_done) sched_yield();
		}
		assert_int_equal(size, 512);
	}
	net_check(pair.to, pair.bytes, 9);
	export_pair_close(&pair);
	export_close();
}

void export_refuses_what_is_too_long(const char *says)
{
	struct export_pair pair;
	void *at, *send = NULL, *receive = NULL;
	size_t room = 100;
	int tag = 3, done = 0;
	ncclResult_t sent = ncclSuccess, received = ncclSuccess;

	export_open(9);
	export_pair_open(&pair, 4096);
	at = pair.to;
	memset(pair.to, 0xee, 4096);
	while (!receive) assert_int_equal(export_irecv(pair.recv_comm, 1, &at, &room, &tag, &pair.recv_memory, &receive), ncclSuccess);
	while (sent == ncclSuccess && received == ncclSuccess) {
		if (!send) sent = export_isend(pair.send_comm, pair.from, 101, tag, pair.send_memory, &send);
		if (sent == ncclSuccess) received = export_test(receive, &done, NULL);
	}
	assert_int_equal(sent != ncclSuccess ? sent : received, ncclInvalidUsage);
	assert_int_equal(pair.to[100], 0xee);
	if (!strstr(export_log(), says)) fail_msg("\"%s\" is not in the log:\n%s", says, export_log());
	export_pair_close(&pair);
	export_close();
}

void export_closes_with_requests_in_flight(void)
{
	struct export_pair pair;
	int descriptors = 0;

	for (int round = 0; round < 6; round++) {
		void *at, *send = NULL, *receive = NULL;
		size_t room = 4096;
		int tag = 3;

		export_open(8 + round % 4);
		export_pair_open(&pair, 1 << 20);
		at = pair.to;
		if (round % 2) assert_int_equal(export_irecv(pair.recv_comm, 1, &at, &room, &tag, &pair.recv_memory, &receive), ncclSuccess);
		assert_int_equal(export_isend(pair.send_comm, pair.from, round % 2 ? 4096 : 1 << 20, tag, pair.send_memory, &send), ncclSuccess);
		export_pair_close(&pair);
		export_close();
		if (round == 1) descriptors = net_open_descriptors();
	}
	assert_int_equal(net_open_descriptors(), descriptors);
}

/* v11 alone tells that a communicator has ended: what it left under way ends with it. */
void export_gives_up_connections_under_way(void)
{
	uint64_t handle[TP_ABI_HANDLE_BYTES / 8];
	void *listener, *comm;
	int descriptors = 0;

	for (int round = 0; round < 4; round++) {
		export_open(11);
		assert_int_equal(export_listen(handle, &listener), ncclSuccess);
		for (int i = 0; i < 3; i++) {
			assert_int_equal(export_connect(handle, &comm), ncclSuccess);
			assert_null(comm);
			if (i > 0) assert_int_equal(export_accept(listener, &comm), ncclSuccess);
			if (comm) assert_int_equal(export_close_comm(comm, false), ncclSuccess);
		}
		assert_int_equal(export_close_listen(listener), ncclSuccess);
		export_close();
		if (round == 0) descriptors = net_open_descriptors();
		/* Nobody knows this connection any more. */
		export_open(11);
		assert_int_not_equal(export_connect(handle, &comm), ncclSuccess);
		export_close();
	}
	assert_int_equal(net_open_descriptors(), descriptors);
}

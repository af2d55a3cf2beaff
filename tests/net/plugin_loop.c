/* A small NET plug-in for tests, over sockets of this machine. It does nothing more than the interface demands of it: one connection a
 * listener, "not yet" at first, data moves in test only, memory must be registered. PLUG_VERSION: the one interface it speaks (6: a table
 * that is too old; 0: none). LOOP_BAD makes it break the interface, each word in one way. */
#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include <fcntl.h>
#include "net/plugin/abi.h"

#define REQUESTS 32
#define NET 16
#define EXPORTED __attribute__((visibility("default")))

enum { LOG_WARN = 2, LOG_INFO = 3 };
static tp_abi_logger logger;
static _Atomic int listeners, contexts;

static bool bad(const char *what)
{
	const char *text = getenv("LOOP_BAD");
	return text && strcmp(text, what) == 0;
}

struct message { uint64_t bytes; int64_t tag; };
struct memory { char *data; size_t bytes; };
struct comm;
struct request { struct comm *comm; bool busy; char *data; struct message message; size_t room, moved; };
struct comm { int fd; bool sending; struct request requests[REQUESTS]; uint64_t posted, at; };
struct listener { int fd; bool taken; int calls; };
struct handle { uint64_t magic; char name[64]; int fd, calls; };

static void fill_in(void);

static ncclResult_t begin(tp_abi_logger log)
{
	logger = log;
	if (bad("init")) {
		log(LOG_WARN, ~0ul, __FILE__, __LINE__, "LOOP : no %s today", "loops");
		return ncclSystemError;
	}
	if (bad("init-99")) return (ncclResult_t)99;
	fill_in();
	log(LOG_INFO, NET, __FILE__, __LINE__, "LOOP : speaks v%d", PLUG_VERSION);
	return ncclSuccess;
}

static ncclResult_t devices(int *count)
{
	*count = bad("devices") ? 0 : bad("devices-many") ? 1 << 20 : 2;
	return bad("devices-error") ? ncclInternalError : ncclSuccess;
}

/* The versions differ in what they have beside these. */
#define FILL(p) do { \
	static char names[2][8] = { "loop0", "loop1" }; \
	if (bad("properties")) return ncclInternalError; \
	memset((p), 0xa5, sizeof(*(p))); \
	(p)->name = bad("no-name") ? NULL : names[dev & 1]; \
	(p)->pci_path = NULL; \
	(p)->guid = (uint64_t)dev; \
	(p)->memory = bad("no-host") ? TP_ABI_PTR_CUDA : TP_ABI_PTR_HOST; \
	(p)->reg_is_global = 0; \
	(p)->speed_mbps = bad("speed") ? -7 : 40000; \
	(p)->port = 1 + dev; \
	(p)->latency_us = 1; \
	(p)->max_comms = 1024; \
	(p)->max_recvs = bad("max-recvs") ? 0 : 1; \
	(p)->device_type = bad("unpack") ? TP_ABI_DEVICE_UNPACK : TP_ABI_DEVICE_HOST; \
	(p)->device_version = 0; \
} while (0)

static ncclResult_t properties_v8(int dev, struct tp_abi_properties_v8 *p)
{
	FILL(p);
	return ncclSuccess;
}

static ncclResult_t properties_v9(int dev, struct tp_abi_properties_v9 *p)
{
	FILL(p);
	p->max_p2p_bytes = p->max_coll_bytes = bad("max-bytes") ? 1000 : TP_ABI_MAX_BYTES;
	return ncclSuccess;
}

static ncclResult_t properties_v11(int dev, struct tp_abi_properties_v11 *p)
{
	FILL(p);
	p->max_p2p_bytes = p->max_coll_bytes = TP_ABI_MAX_BYTES;
	p->max_multi_requests = 1;
	return ncclSuccess;
}

static socklen_t address(const char *name, struct sockaddr_un *out)
{
	memset(out, 0, sizeof(*out));
	out->sun_family = AF_UNIX;
	strcpy(out->sun_path + 1, name);        /* abstract: no file */
	return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(name));
}

static ncclResult_t loop_listen(int dev, void *out, void **listener)
{
	struct handle *h = out;
	struct listener *l = calloc(1, sizeof(*l));
	struct sockaddr_un to;
	socklen_t length;

	_Static_assert(sizeof(*h) <= TP_ABI_HANDLE_BYTES, "the handle");
	if (bad("listen") || dev < 0 || dev > 1) {
		free(l);
		return ncclSystemError;
	}
	if (bad("listen-null")) {
		free(l);
		*listener = NULL;
		return ncclSuccess;
	}
	memset(h, 0, sizeof(*h));
	h->magic = 0x100b;
	h->fd = -1;
	snprintf(h->name, sizeof(h->name), "tploop.%d.%d.%p", (int)getpid(), atomic_fetch_add(&listeners, 1), (void *)l);
	length = address(h->name, &to);
	l->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	if (l->fd < 0 || bind(l->fd, (struct sockaddr *)&to, length) != 0 || listen(l->fd, 1) != 0) return ncclSystemError;
	*listener = l;
	return ncclSuccess;
}

static struct comm *make(int fd, bool sending)
{
	struct comm *c = calloc(1, sizeof(*c));
	c->fd = fd;
	c->sending = sending;
	return c;
}

static ncclResult_t loop_connect(int dev, void *handle, void **send_comm, struct tp_abi_device_handle **device)
{
	struct handle *h = handle;
	struct sockaddr_un to;
	socklen_t length;

	*send_comm = NULL;
	*device = NULL;
	if (dev < 0 || dev > 1 || h->magic != 0x100b || bad("connect")) return ncclInternalError;
	if (bad("connect-never") || h->calls++ < 2) return ncclSuccess;
	h->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	length = address(h->name, &to);
	if (h->fd < 0 || connect(h->fd, (struct sockaddr *)&to, length) != 0) return ncclRemoteError;
	fcntl(h->fd, F_SETFL, O_NONBLOCK);
	*send_comm = make(h->fd, true);
	return ncclSuccess;
}

static ncclResult_t loop_accept(void *listener, void **recv_comm, struct tp_abi_device_handle **device)
{
	struct listener *l = listener;
	int fd;

	*recv_comm = NULL;
	*device = NULL;
	if (l->taken || bad("accept")) return ncclInternalError;
	if (l->calls++ < 2) return ncclSuccess;
	fd = accept4(l->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
	if (fd < 0) return errno == EAGAIN ? ncclSuccess : ncclSystemError;
	l->taken = true;
	*recv_comm = make(fd, false);
	return ncclSuccess;
}

static ncclResult_t reg_mr(void *comm, void *data, size_t bytes, int type, void **mhandle)
{
	struct memory *m = malloc(sizeof(*m));

	(void)comm;
	if (type != TP_ABI_PTR_HOST || bad("regmr")) {
		free(m);
		return ncclSystemError;
	}
	*m = (struct memory){ data, bytes };
	*mhandle = m;
	return ncclSuccess;
}

static ncclResult_t dereg_mr(void *comm, void *mhandle)
{
	(void)comm;
	free(mhandle);
	return ncclSuccess;
}

static ncclResult_t move(struct comm *c)
{
	while (c->at < c->posted) {
		struct request *r = &c->requests[c->at % REQUESTS];
		bool header = r->moved < sizeof(r->message);
		size_t done = header ? r->moved : r->moved - sizeof(r->message), want = (header ? sizeof(r->message) : r->message.bytes) - done;
		char *at = (header ? (char *)&r->message : r->data) + done;
		ssize_t n = want == 0 ? 0 : c->sending ? send(c->fd, at, want, MSG_NOSIGNAL) : recv(c->fd, at, want, 0);

		if (n < 0 && (errno == EAGAIN || errno == EINTR)) return ncclSuccess;
		if (n < 0 || (n == 0 && want > 0)) return bad("deaf") ? ncclSuccess : ncclRemoteError;
		r->moved += (size_t)n;
		if (!c->sending && r->moved >= sizeof(r->message) && r->message.bytes > r->room) return ncclInvalidUsage;
		if (r->moved >= sizeof(r->message) && r->moved == sizeof(r->message) + r->message.bytes) c->at++;
	}
	return ncclSuccess;
}

static ncclResult_t post(struct comm *c, void *data, size_t bytes, int tag, void *mhandle, void **out)
{
	struct request *r = &c->requests[c->posted % REQUESTS];
	const struct memory *m = mhandle;

	*out = NULL;
	if (r->busy) return ncclSuccess;
	if (!m || (char *)data < m->data || (char *)data + bytes > m->data + m->bytes) return ncclInvalidArgument;
	*r = (struct request){ .comm = c, .busy = true, .data = data, .room = bytes };
	if (c->sending) r->message = (struct message){ bytes, tag };
	c->posted++;
	*out = r;
	return ncclSuccess;
}

static ncclResult_t send_any(void *comm, void *data, size_t bytes, int tag, void *mhandle, void **request)
{
	if (bad("isend")) return ncclSystemError;
	return post(comm, data, bytes, tag, mhandle, request);
}

static ncclResult_t recv_any(void *comm, int n, void *data, size_t bytes, int tag, void *mhandle, void **request)
{
	if (n != 1 || bad("irecv")) return ncclInternalError;
	return post(comm, data, bytes, tag, mhandle, request);
}

static ncclResult_t loop_test(void *request, int *done, int *sizes)
{
	struct request *r = request;
	struct comm *c = r->comm;
	ncclResult_t result = move(c);

	*done = 0;
	if (bad("test-99")) return (ncclResult_t)99;
	if ((uint64_t)(r - c->requests) == c->at % REQUESTS && c->at < c->posted) return result;
	/* Done unless it lies behind the one that is under way. */
	for (uint64_t i = c->at; i < c->posted; i++)
		if (&c->requests[i % REQUESTS] == r) return result;
	*done = 1;
	r->busy = false;
	if (sizes && bad("sizes-large")) sizes[0] = (int)r->room + 1;
	else if (sizes && !bad("sizes-none")) sizes[0] = (int)r->message.bytes;
	return ncclSuccess;
}

static ncclResult_t close_comm(void *comm)
{
	struct comm *c = comm;

	close(c->fd);
	free(c);
	return bad("close") ? ncclSystemError : ncclSuccess;
}

static ncclResult_t close_listen(void *listener)
{
	struct listener *l = listener;

	close(l->fd);
	free(l);
	return ncclSuccess;
}

static ncclResult_t init_v9(tp_abi_logger log) { return begin(log); }
static ncclResult_t init_v10(tp_abi_logger log, tp_abi_profiler profiler)
{
	void *event = NULL;

	if (profiler(&event, 0, NULL, 1, NULL) != ncclSuccess) return ncclInternalError;
	return begin(log);
}

/* Contexts are numbers + 1, so that a wrong one is noticed. */
static ncclResult_t init_v11(void **context, uint64_t comm_id, struct tp_abi_config *config, tp_abi_logger log, tp_abi_profiler profiler)
{
	(void)comm_id, (void)profiler;
	if (config->traffic_class != TP_ABI_TRAFFIC_CLASS_UNSET) return ncclInvalidArgument;
	*context = malloc(1);
	atomic_fetch_add(&contexts, 1);
	ncclResult_t result = begin(log);
	if (result != ncclSuccess) free(*context);
	return result;
}

static ncclResult_t finalize(void *context)
{
	logger(LOG_INFO, NET, __FILE__, __LINE__, "LOOP : %d contexts are left", atomic_fetch_sub(&contexts, 1) - 1);
	free(context);
	return ncclSuccess;
}

static ncclResult_t listen_v11(void *context, int dev, void *handle, void **listener)
{
	return context ? loop_listen(dev, handle, listener) : ncclInvalidArgument;
}
static ncclResult_t connect_v10(int dev, struct tp_abi_config *config, void *handle, void **send_comm, struct tp_abi_device_handle **device)
{
	return config->traffic_class == TP_ABI_TRAFFIC_CLASS_UNSET ? loop_connect(dev, handle, send_comm, device) : ncclInvalidArgument;
}
static ncclResult_t connect_v11(void *context, int dev, void *handle, void **send_comm, struct tp_abi_device_handle **device)
{
	return context ? loop_connect(dev, handle, send_comm, device) : ncclInvalidArgument;
}
static ncclResult_t isend_v8(void *comm, void *data, int bytes, int tag, void *mhandle, void **request)
{
	return bytes < 0 ? ncclInvalidArgument : send_any(comm, data, (size_t)bytes, tag, mhandle, request);
}
static ncclResult_t isend_v9(void *comm, void *data, size_t bytes, int tag, void *mhandle, void **request)
{
	return send_any(comm, data, bytes, tag, mhandle, request);
}
static ncclResult_t isend_v10(void *comm, void *data, size_t bytes, int tag, void *mhandle, void *event, void **request)
{
	return event ? ncclInvalidArgument : send_any(comm, data, bytes, tag, mhandle, request);
}
static ncclResult_t irecv_v8(void *comm, int n, void **data, int *bytes, int *tags, void **mhandles, void **request)
{
	return recv_any(comm, n, data[0], (size_t)bytes[0], tags[0], mhandles[0], request);
}
static ncclResult_t irecv_v9(void *comm, int n, void **data, size_t *bytes, int *tags, void **mhandles, void **request)
{
	return recv_any(comm, n, data[0], bytes[0], tags[0], mhandles[0], request);
}
static ncclResult_t irecv_v10(void *comm, int n, void **data, size_t *bytes, int *tags, void **mhandles, void **events, void **request)
{
	return events[0] ? ncclInvalidArgument : recv_any(comm, n, data[0], bytes[0], tags[0], mhandles[0], request);
}

#define COMMON .name = "Loop", .devices = devices, .accept = loop_accept, .reg_mr = reg_mr, .dereg_mr = dereg_mr, .test = loop_test, .close_send = close_comm, \
	.close_recv = close_comm, .close_listen = close_listen

#if PLUG_VERSION == 6
extern EXPORTED struct tp_abi_v8 ncclNetPlugin_v6;
struct tp_abi_v8 ncclNetPlugin_v6 = { COMMON, .init = init_v9, .properties = properties_v8, .listen = loop_listen, .connect = loop_connect, .isend = isend_v8, .irecv = irecv_v8 };
#define TABLE ncclNetPlugin_v6
#elif PLUG_VERSION == 8
extern EXPORTED struct tp_abi_v8 ncclNetPlugin_v8;
struct tp_abi_v8 ncclNetPlugin_v8 = { COMMON, .init = init_v9, .properties = properties_v8, .listen = loop_listen, .connect = loop_connect, .isend = isend_v8, .irecv = irecv_v8 };
#define TABLE ncclNetPlugin_v8
#elif PLUG_VERSION == 9
extern EXPORTED struct tp_abi_v9 ncclNetPlugin_v9;
struct tp_abi_v9 ncclNetPlugin_v9 = { COMMON, .init = init_v9, .properties = properties_v9, .listen = loop_listen, .connect = loop_connect, .isend = isend_v9, .irecv = irecv_v9 };
#define TABLE ncclNetPlugin_v9
#elif PLUG_VERSION == 10
extern EXPORTED struct tp_abi_v10 ncclNetPlugin_v10;
struct tp_abi_v10 ncclNetPlugin_v10 = { COMMON, .init = init_v10, .properties = properties_v9, .listen = loop_listen, .connect = connect_v10, .isend = isend_v10, .irecv = irecv_v10 };
#define TABLE ncclNetPlugin_v10
#elif PLUG_VERSION == 11
extern EXPORTED struct tp_abi_v11 ncclNetPlugin_v11;
struct tp_abi_v11 ncclNetPlugin_v11 = { COMMON, .init = init_v11, .properties = properties_v11, .listen = listen_v11, .connect = connect_v11, .isend = isend_v10, .irecv = irecv_v10,
	.finalize = finalize };
#define TABLE ncclNetPlugin_v11
#endif

#ifndef TABLE
static void fill_in(void) {}
#else
/* v9's table is whole, and has its name, only after init: plug-ins that choose among several networks are so. */
static ncclResult_t (*late_test)(void *request, int *done, int *sizes);
static void fill_in(void)
{
	if (PLUG_VERSION != 9) return;
	TABLE.test = late_test;
	TABLE.name = "Loop";
}

__attribute__((constructor)) static void spoil(void)
{
	late_test = bad("null-test") ? NULL : TABLE.test;
	if (PLUG_VERSION == 9) {
		TABLE.test = NULL;
		TABLE.name = "Loops of all kinds";
	}
	if (bad("null-name")) TABLE.name = NULL;
	if (bad("null-isend")) TABLE.isend = NULL;
	if (bad("null-test")) TABLE.test = NULL;
	if (bad("name-socket")) TABLE.name = "Socket";
}
#endif

/* Listeners and connections as NCCL's interface has them; see plugin.h.
 *
 * Between two calls of connect nothing but the handle is ours, so it carries the number of the connection under way. Those that
 * are never finished end with their communicator's context (v11). */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "plugin/plugin.h"

#define INNER_BYTES 72
#define NETWORK_BYTES 8

static const uint8_t handle_magic[7] = { 'T', 'e', 'l', 'p', 'N', 'C', 'L' };
#define HANDLE_VERSION 1

struct handle {
	uint8_t magic[7], version;
	char network[NETWORK_BYTES];
	uint64_t under_way;                     /* the connecting process's own; 0: not begun */
	uint8_t secret[TP_SECRET_BYTES];
	uint8_t inner[INNER_BYTES];             /* the rest of the transport's is zero */
} __attribute__((packed));
_Static_assert(sizeof(struct handle) <= TP_ABI_HANDLE_BYTES, "the handle must fit");
_Static_assert(INNER_BYTES <= TP_NET_HANDLE_BYTES, "a transport's handle is longer than what is kept of it");

struct listener { void *inner; int dev; struct tp_net_hello expect; };

struct connecting {
	uint64_t number;
	const struct tp_export_context *context;
	struct tp_net_hello hello;
	unsigned char inner[TP_NET_HANDLE_BYTES];
	void *state;
	struct connecting *next;
};

/* Its address is all that it is. */
struct tp_export_context { char unused; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct connecting *under_way;        /* under lock; an entry is its caller's once found */
static uint64_t last_number;
TP_FORK_HOLD(TP_FORK_BASE, lock)

ncclResult_t tp_export_context_create(struct tp_export_context **out)
{
	struct tp_export_context *context = tp_alloc(1, sizeof(*context), "a plug-in's context");

	if (!context) return ncclSystemError;
	*out = context;
	return ncclSuccess;
}

static struct connecting *take_of_context(const struct tp_export_context *context)
{
	struct connecting **at, *c;

	pthread_mutex_lock(&lock);
	for (at = &under_way; *at && (*at)->context != context;) at = &(*at)->next;
	c = *at;
	if (c) *at = c->next;
	pthread_mutex_unlock(&lock);
	return c;
}

ncclResult_t tp_export_context_destroy(struct tp_export_context *context)
{
	struct connecting *c;

	if (!context) return ncclSuccess;
	while ((c = take_of_context(context)) != NULL) {
		if (c->state && tp_export_ops()->cancel_connect) tp_export_ops()->cancel_connect(c->state);
		free(c);
	}
	free(context);
	return ncclSuccess;
}

/* Ranks aren't told: what is known of a connection is that it is one of this listener's. */
static void make_hello(const uint8_t secret[TP_SECRET_BYTES], struct tp_net_hello *out)
{
	memset(out, 0, sizeof(*out));
	memcpy(out->secret, secret, TP_SECRET_BYTES);
	out->comm_hash = tp_hash64(secret, TP_SECRET_BYTES, 0);
	out->any_order = true;
}

ncclResult_t tp_export_listen(struct tp_export_context *context, int dev, void *handle, void **out)
{
	unsigned char inner[TP_NET_HANDLE_BYTES] = { 0 };
	struct handle h = { .version = HANDLE_VERSION };
	struct listener *l;
	int count;
	ncclResult_t result;

	(void)context;
	TP_TRY(tp_export_devices(&count));
	if (dev < 0 || dev >= count) return TP_FAIL(ncclInvalidArgument, "NET/Telpher : there is no device %d (there are %d)", dev, count);
	l = tp_alloc(1, sizeof(*l), "a listener");
	if (!l) return ncclSystemError;
	l->dev = dev;
	result = tp_export_ops()->listen(dev, inner, &l->inner);
	if (result != ncclSuccess) {
		free(l);
		return result;
	}
	for (size_t i = INNER_BYTES; i < sizeof(inner) && result == ncclSuccess; i++)
		if (inner[i]) result = TP_FAIL(ncclInternalError, "NET/Telpher : a handle of network %s is longer than %d bytes", tp_export_ops()->name, INNER_BYTES);
	if (result != ncclSuccess) {
		tp_export_ops()->close_listen(l->inner);
		free(l);
		return result;
	}
	tp_secret_random(h.secret, sizeof(h.secret));
	make_hello(h.secret, &l->expect);
	memcpy(h.magic, handle_magic, sizeof(h.magic));
	strncpy(h.network, tp_export_ops()->name, sizeof(h.network) - 1);
	memcpy(h.inner, inner, sizeof(h.inner));
	memset(handle, 0, TP_ABI_HANDLE_BYTES);
	memcpy(handle, &h, sizeof(h));
	*out = l;
	return ncclSuccess;
}

static ncclResult_t check_handle(struct handle *h)
{
	h->network[sizeof(h->network) - 1] = 0;
	if (memcmp(h->magic, handle_magic, sizeof(h->magic)) != 0)
		return TP_FAIL(ncclInternalError, "NET/Telpher : a peer's connect handle isn't one of this plug-in's: do all ranks use it (NCCL_NET_PLUGIN)?");
	if (h->version != HANDLE_VERSION)
		return TP_FAIL(ncclInvalidUsage, "NET/Telpher : a peer's connect handle has version %u, this plug-in's is %u: do all ranks use the same?", h->version, HANDLE_VERSION);
	if (strcmp(h->network, tp_export_ops()->name) != 0)
		return TP_FAIL(ncclInvalidUsage, "NET/Telpher : the peer listens on network %s, this rank (%s) uses %s: TELPHER_PLUGIN_NET=Socket on all ranks is what all can do", h->network,
			tp_host_name(), tp_export_ops()->name);
	return ncclSuccess;
}

static struct connecting *begin(const struct tp_export_context *context, const struct handle *h)
{
	struct connecting *c = tp_alloc(1, sizeof(*c), "a connection under way");

	if (!c) return NULL;
	c->context = context;
	make_hello(h->secret, &c->hello);
	memcpy(c->inner, h->inner, sizeof(h->inner));
	pthread_mutex_lock(&lock);
	c->number = ++last_number;
	c->next = under_way;
	under_way = c;
	pthread_mutex_unlock(&lock);
	return c;
}

static struct connecting *find(uint64_t number)
{
	struct connecting *c;

	pthread_mutex_lock(&lock);
	for (c = under_way; c && c->number != number;) c = c->next;
	pthread_mutex_unlock(&lock);
	return c;
}

static void end(struct connecting *c)
{
	pthread_mutex_lock(&lock);
	for (struct connecting **at = &under_way; *at; at = &(*at)->next)
		if (*at == c) {
			*at = c->next;
			break;
		}
	pthread_mutex_unlock(&lock);
	free(c);
}

static ncclResult_t wrap(void *inner, bool sending, int dev, void **out)
{
	struct tp_export_comm *comm = tp_alloc(1, sizeof(*comm), "a connection");

	if (!comm) {
		if (sending) tp_export_ops()->close_send(inner);
		else tp_export_ops()->close_recv(inner);
		return ncclSystemError;
	}
	comm->inner = inner;
	comm->sending = sending;
	comm->memory = tp_export_memory(dev);
	*out = comm;
	return ncclSuccess;
}

ncclResult_t tp_export_connect(struct tp_export_context *context, int dev, void *handle, void **send_comm)
{
	struct handle h;
	struct connecting *c;
	void *inner = NULL;
	int count;
	ncclResult_t result;

	*send_comm = NULL;
	TP_TRY(tp_export_devices(&count));
	if (dev < 0 || dev >= count) return TP_FAIL(ncclInvalidArgument, "NET/Telpher : there is no device %d (there are %d)", dev, count);
	memcpy(&h, handle, sizeof(h));
	TP_TRY(check_handle(&h));
	c = h.under_way ? find(h.under_way) : begin(context, &h);
	if (!c) return TP_FAIL(ncclInternalError, "NET/Telpher : a connect handle says that connection %llu is under way, which isn't: was the handle copied or used twice?",
		(unsigned long long)h.under_way);
	h.under_way = c->number;
	result = tp_export_ops()->connect(dev, c->inner, &c->hello, &c->state, &inner);
	if (result == ncclSuccess && !inner) {
		memcpy(handle, &h, sizeof(h));
		return ncclSuccess;
	}
	end(c);
	h.under_way = 0;
	memcpy(handle, &h, sizeof(h));
	return result == ncclSuccess ? wrap(inner, true, dev, send_comm) : result;
}

ncclResult_t tp_export_accept(void *listener, void **recv_comm)
{
	struct listener *l = listener;
	struct tp_net_hello who;
	void *inner = NULL;

	*recv_comm = NULL;
	TP_TRY(tp_export_ops()->accept(l->inner, &l->expect, &who, &inner));
	return inner ? wrap(inner, false, l->dev, recv_comm) : ncclSuccess;
}

ncclResult_t tp_export_close_listen(void *listener)
{
	struct listener *l = listener;
	ncclResult_t result;

	if (!l) return ncclSuccess;
	result = tp_export_ops()->close_listen(l->inner);
	free(l);
	return result;
}

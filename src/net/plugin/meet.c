/* How two ends of a plug-in's connection meet, and contexts:
 *
 *   connector                          acceptor
 *   the Socket transport's handshake  <->            both know the communicator's secret
 *                                     <-  offer      listen of the plug-in: its handle
 *   connect of the plug-in            <->            accept of the plug-in
 *
 * A plug-in keeps its progress in the handle while it connects, so each connection has its own copy at one place. */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>
#include "base/text.h"
#include "net/plugin/plugin.h"
#include "net/socket.h"

#define GONE_MS 1000

static const uint8_t offer_magic[8] = { 'T', 'e', 'l', 'p', 'P', 'l', 'g', 0xe5 };

void tp_plug_offer_fill(struct tp_plug_offer *offer, const struct tp_plug *plug)
{
	memset(offer, 0, sizeof(*offer));
	memcpy(offer->magic, offer_magic, sizeof(offer->magic));
	offer->version = TP_PLUG_OFFER_VERSION;
	offer->abi = (uint16_t)plug->version;
	snprintf(offer->name, sizeof(offer->name), "%s", plug->name);
}

const char *tp_plug_offer_check(struct tp_plug_offer *offer, const char *name, char *why, size_t bytes)
{
	tp_text_clean(offer->name, sizeof(offer->name));
	tp_text_clean(offer->text, sizeof(offer->text));
	if (memcmp(offer->magic, offer_magic, sizeof(offer->magic)) != 0) return "what the peer sent is no plug-in's handle";
	if (offer->version != TP_PLUG_OFFER_VERSION) {
		snprintf(why, bytes, "the peer's record has version %u, this library's is %u: do all ranks use the same library?", offer->version, TP_PLUG_OFFER_VERSION);
		return why;
	}
	if (offer->refused) {
		snprintf(why, bytes, "the peer refuses: %s", offer->text);
		return why;
	}
	if (strcmp(offer->name, name) == 0) return NULL;
	snprintf(why, bytes, "the peer's plug-in is %s, this rank's is %s: NCCL_NET_PLUGIN must be the same on all ranks", offer->name, name);
	return why;
}

/* ---- contexts ---- */

struct context { uint64_t comm_hash; uint32_t holders; void *of_plugin; struct context *next; };
static pthread_mutex_t contexts_lock = PTHREAD_MUTEX_INITIALIZER;
static struct context *contexts;
TP_FORK_RENEW(contexts_lock)             /* foreign code runs under it; the list is whole at any moment */

ncclResult_t tp_plug_context_get(struct tp_plug *plug, uint64_t comm_hash, void **out)
{
	struct context *c;
	ncclResult_t result = ncclSuccess;

	*out = NULL;
	if (plug->version < 11) return ncclSuccess;
	pthread_mutex_lock(&contexts_lock);
	for (c = contexts; c && c->comm_hash != comm_hash;) c = c->next;
	if (!c) {
		c = tp_alloc(1, sizeof(*c), "a plug-in's context");
		result = c ? tp_plug_init(plug, comm_hash, &c->of_plugin) : ncclSystemError;
		if (result != ncclSuccess) {
			free(c);
			c = NULL;
		} else {
			c->comm_hash = comm_hash;
			c->next = contexts;
			contexts = c;
		}
	}
	if (c) {
		c->holders++;
		*out = c->of_plugin;
	}
	pthread_mutex_unlock(&contexts_lock);
	return result;
}

void tp_plug_context_put(struct tp_plug *plug, uint64_t comm_hash)
{
	if (plug->version < 11) return;
	pthread_mutex_lock(&contexts_lock);
	for (struct context **at = &contexts; *at; at = &(*at)->next) {
		struct context *c = *at;
		if (c->comm_hash != comm_hash) continue;
		if (--c->holders == 0) {
			*at = c->next;
			tp_plug_finalize(plug, c->of_plugin);
			free(c);
		}
		break;
	}
	pthread_mutex_unlock(&contexts_lock);
}

/* ---- both ends ---- */

struct talk {
	int fd;
	uint64_t since_ms, limit_ms, gone_ms;   /* gone_ms: since when the peer's end is closed */
	size_t moved;
	struct tp_plug_offer offer;
	char which[64];
};

static void start_talk(struct talk *talk, void *socket_comm, const struct tp_net_hello *who)
{
	struct tp_sock_params sock;

	tp_sock_get_params(0, &sock);
	talk->fd = tp_sock_comm_take_fd(socket_comm);
	talk->since_ms = tp_clock_ms();
	talk->limit_ms = (uint64_t)sock.connect_ms;
	snprintf(talk->which, sizeof(talk->which), "rank %d -> rank %d [channel %d]", who->from, who->to, who->channel);
}

/* The plug-in has said "not yet": for how long, and is anybody there still? A peer may have sent all and closed already. */
static ncclResult_t check_patience(struct talk *talk, const struct tp_plug *plug, const char *function)
{
	if (!talk->gone_ms && tp_plug_has_closed(talk->fd)) talk->gone_ms = tp_clock_ms();
	if (talk->gone_ms && tp_clock_ms() - talk->gone_ms > GONE_MS)
		return TP_FAIL(ncclRemoteError, "NET/%s : %s : the peer closed the connection while it was made: has it died, or failed itself?", plug->name, talk->which);
	if (tp_clock_ms() - talk->since_ms < talk->limit_ms) return ncclSuccess;
	return TP_FAIL(ncclRemoteError, "NET/%s : %s : %s has been under way for %llu ms (TELPHER_SOCKET_CONNECT_TIMEOUT)", plug->name, talk->which, function,
		(unsigned long long)talk->limit_ms);
}

/* ---- connecting ---- */

struct connecting {
	struct tp_plug *plug;
	struct tp_net_hello hello;
	int dev;
	void *socket;                           /* the Socket transport's state */
	struct talk talk;
	bool has_context, has_offer;
	void *context;
	uint64_t handle[TP_ABI_HANDLE_BYTES / 8];       /* aligned, as plug-ins expect: it is a structure of theirs */
	struct tp_abi_device_handle *device;
};

void tp_plug_cancel_connect(void *state)
{
	struct connecting *c = state;

	if (!c) return;
	if (c->socket) tp_sock_cancel_connect(c->socket);
	if (c->talk.fd >= 0) close(c->talk.fd);
	if (c->has_context) tp_plug_context_put(c->plug, c->hello.comm_hash);
	free(c);
}

static ncclResult_t read_offer(struct connecting *c)
{
	char text[400];
	const char *why;

	while (c->talk.moved < sizeof(c->talk.offer)) {
		ssize_t n = recv(c->talk.fd, (char *)&c->talk.offer + c->talk.moved, sizeof(c->talk.offer) - c->talk.moved, MSG_DONTWAIT);
		if (n < 0 && errno == EINTR) continue;
		if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return check_patience(&c->talk, c->plug, "the peer's listen");
		if (n <= 0)
			return TP_FAIL(ncclRemoteError, "NET/%s : %s : the peer closed the connection while it was made: has it died, or failed itself?", c->plug->name, c->talk.which);
		c->talk.moved += (size_t)n;
	}
	why = tp_plug_offer_check(&c->talk.offer, c->plug->name, text, sizeof(text));
	if (why) return TP_FAIL(ncclRemoteError, "NET/%s : %s : %s", c->plug->name, c->talk.which, why);
	memcpy(c->handle, c->talk.offer.handle, sizeof(c->handle));
	c->has_offer = true;
	return ncclSuccess;
}

static ncclResult_t connecting_step(struct connecting *c, void **out)
{
	struct tp_plug_comm *comm;
	void *inner = NULL;
	ncclResult_t result;

	if (!c->has_offer) TP_TRY(read_offer(c));
	if (!c->has_offer) return ncclSuccess;
	if (!c->has_context) TP_TRY(tp_plug_context_get(c->plug, c->hello.comm_hash, &c->context));
	c->has_context = true;
	result = tp_plug_call_connect(c->plug, c->context, c->dev, c->handle, &inner, &c->device);
	if (result != ncclSuccess) return tp_plug_failed(c->plug, "connect", c->talk.which, result);
	if (!inner) return check_patience(&c->talk, c->plug, "connect");
	int fd = c->talk.fd;
	c->talk.fd = -1;
	c->has_context = false;                 /* the connection's now */
	TP_TRY(tp_plug_comm_create(c->plug, true, c->dev, &c->hello, fd, inner, &comm));
	*out = comm;
	return ncclSuccess;
}

ncclResult_t tp_plug_connect(int dev, const void *handle, const struct tp_net_hello *hello, void **state, void **send_comm)
{
	struct connecting *c = *state;
	void *socket_comm = NULL;
	ncclResult_t result = ncclSuccess;

	*send_comm = NULL;
	if (!c) {
		c = tp_alloc(1, sizeof(*c), "a connection under way");
		if (!c) return ncclSystemError;
		c->plug = tp_plug_current();
		c->hello = *hello;
		c->dev = dev;
		c->talk.fd = -1;
		*state = c;
	}
	if (c->talk.fd < 0) {
		result = tp_sock_connect_one(handle, hello, &c->socket, &socket_comm);
		if (result == ncclSuccess && !socket_comm) return ncclSuccess;
		if (result == ncclSuccess) start_talk(&c->talk, socket_comm, hello);
	}
	if (result == ncclSuccess) result = connecting_step(c, send_comm);
	if (result == ncclSuccess && !*send_comm) return ncclSuccess;
	tp_plug_cancel_connect(c);
	*state = NULL;
	return result;
}

int tp_plug_poll_connect_fds(void *state, int *fds, uint32_t *events, int max)
{
	struct connecting *c = state;

	if (!c || max < 1) return 0;
	if (c->talk.fd < 0) return tp_sock_poll_connect_fds(c->socket, fds, events, max);
	fds[0] = c->talk.fd;
	events[0] = EPOLLIN;
	return 1;
}

/* ---- accepting ---- */

struct guest {
	struct tp_net_hello hello;
	struct talk talk;
	bool has_context;
	void *context, *inner;                  /* inner: the plug-in's listener, for this connection alone */
	struct tp_abi_device_handle *device;
	struct guest *next;
};
struct listener { struct tp_plug *plug; void *socket; int dev; struct guest *guests; };

ncclResult_t tp_plug_listen(int dev, void *handle, void **out)
{
	struct listener *l = tp_alloc(1, sizeof(*l), "a listener");
	ncclResult_t result;

	if (!l) return ncclSystemError;
	l->plug = tp_plug_current();
	l->dev = dev;
	result = tp_sock_listen(0, handle, &l->socket);
	if (result != ncclSuccess) {
		free(l);
		return result;
	}
	*out = l;
	return ncclSuccess;
}

static ncclResult_t end_guest(struct listener *l, struct guest *g)
{
	ncclResult_t result = ncclSuccess;

	if (g->inner) result = l->plug->close_listen(g->inner);
	if (result != ncclSuccess) result = tp_plug_failed(l->plug, "closeListen", g->talk.which, result);
	if (g->has_context) tp_plug_context_put(l->plug, g->hello.comm_hash);
	if (g->talk.fd >= 0) close(g->talk.fd);
	free(g);
	return result;
}

static ncclResult_t make_offer(struct listener *l, struct guest *g)
{
	uint64_t handle[TP_ABI_HANDLE_BYTES / 8] = { 0 };
	ncclResult_t result;

	TP_TRY(tp_plug_context_get(l->plug, g->hello.comm_hash, &g->context));
	g->has_context = true;
	result = tp_plug_call_listen(l->plug, g->context, l->dev, handle, &g->inner);
	if (result != ncclSuccess) {
		g->inner = NULL;
		return tp_plug_failed(l->plug, "listen", g->talk.which, result);
	}
	if (!g->inner) return TP_FAIL(ncclInternalError, "NET/Plugin: %s: listen for %s gives no listener", l->plug->name, g->talk.which);
	tp_plug_offer_fill(&g->talk.offer, l->plug);
	memcpy(g->talk.offer.handle, handle, sizeof(handle));
	return ncclSuccess;
}

/* Tells the peer why it won't be; it would see a closed connection only. */
static void refuse(struct listener *l, struct guest *g)
{
	if (g->talk.moved > 0) return;
	tp_plug_offer_fill(&g->talk.offer, l->plug);
	g->talk.offer.refused = 1;
	snprintf(g->talk.offer.text, sizeof(g->talk.offer.text), "%.255s", tp_log_last_error());
	if (send(g->talk.fd, &g->talk.offer, sizeof(g->talk.offer), MSG_DONTWAIT | MSG_NOSIGNAL) < 0) return;
}

static ncclResult_t guest_step(struct listener *l, struct guest *g, void **out)
{
	struct talk *talk = &g->talk;
	struct tp_plug_comm *comm;
	void *inner = NULL;
	ncclResult_t result;

	if (!g->inner) TP_TRY(make_offer(l, g));
	while (talk->moved < sizeof(talk->offer)) {
		ssize_t n = send(talk->fd, (char *)&talk->offer + talk->moved, sizeof(talk->offer) - talk->moved, MSG_DONTWAIT | MSG_NOSIGNAL);
		if (n < 0 && errno == EINTR) continue;
		if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return check_patience(talk, l->plug, "sending a handle");
		if (n < 0) return TP_FAIL(ncclRemoteError, "NET/%s : %s : the peer has gone while the connection was made: %s", l->plug->name, talk->which, strerror(errno));
		talk->moved += (size_t)n;
	}
	result = l->plug->accept(g->inner, &inner, &g->device);
	if (result != ncclSuccess) return tp_plug_failed(l->plug, "accept", talk->which, result);
	if (!inner) return check_patience(talk, l->plug, "accept");
	int fd = talk->fd;
	talk->fd = -1;
	g->has_context = false;                 /* the connection's now */
	TP_TRY(tp_plug_comm_create(l->plug, false, l->dev, &g->hello, fd, inner, &comm));
	*out = comm;
	return ncclSuccess;
}

static ncclResult_t admit(struct listener *l, const struct tp_net_hello *expect)
{
	struct tp_net_hello who;
	void *comm;

	for (;;) {
		TP_TRY(tp_sock_accept(l->socket, expect, &who, &comm));
		if (!comm) return ncclSuccess;
		struct guest *g = tp_alloc(1, sizeof(*g), "a connection being accepted"), **at = &l->guests;
		if (!g) {
			close(tp_sock_comm_take_fd(comm));
			return ncclSystemError;
		}
		g->hello = who;
		start_talk(&g->talk, comm, &who);
		while (*at) at = &(*at)->next;
		*at = g;
	}
}

ncclResult_t tp_plug_accept(void *listener, const struct tp_net_hello *expect, struct tp_net_hello *who, void **recv_comm)
{
	struct listener *l = listener;

	*recv_comm = NULL;
	TP_TRY(admit(l, expect));
	for (struct guest **at = &l->guests; *at;) {
		struct guest *g = *at;
		ncclResult_t result = guest_step(l, g, recv_comm);
		if (result == ncclSuccess && !*recv_comm) {
			at = &g->next;
			continue;
		}
		if (result != ncclSuccess) refuse(l, g);
		else *who = g->hello;
		*at = g->next;
		ncclResult_t ended = end_guest(l, g);
		/* A listener that won't close is not the connection's fault: it has been said. */
		(void)ended;
		return result;
	}
	return ncclSuccess;
}

int tp_plug_poll_listen_fds(void *listener, int *fds, uint32_t *events, int max)
{
	struct listener *l = listener;
	int n = tp_sock_poll_listen_fds(l->socket, fds, events, max);

	for (struct guest *g = l->guests; g && n < max; g = g->next) {
		fds[n] = g->talk.fd;
		events[n++] = EPOLLIN;
	}
	return n;
}

ncclResult_t tp_plug_close_listen(void *listener)
{
	struct listener *l = listener;
	ncclResult_t result = ncclSuccess;

	if (!l) return ncclSuccess;
	while (l->guests) {
		struct guest *g = l->guests;
		l->guests = g->next;
		ncclResult_t one = end_guest(l, g);
		if (result == ncclSuccess) result = one;
	}
	tp_sock_close_listen(l->socket);
	free(l);
	return result;
}

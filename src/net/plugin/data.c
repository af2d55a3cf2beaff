/* Requests of a plug-in's connection, its end, and the table of operations. */
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <limits.h>
#include "net/plugin/plugin.h"

enum { PEER_LOOKS = 256 };          /* tests between two looks at the peer's TCP connection */
#define GONE_MS 1000                /* what the peer sent before it went may still come in */
#define GONE_LOOKS 100
#define CLOSE_MS 500                /* a good end waits so long for what is outstanding */

static ncclResult_t fail(struct tp_plug_comm *comm, const char *function, ncclResult_t result)
{
	/* A peer that has gone while we are leaving too is no news. */
	if (comm->error == ncclSuccess) comm->error = comm->leaving ? ncclRemoteError : tp_plug_failed(comm->plug, function, comm->which, result);
	return comm->error;
}

ncclResult_t tp_plug_comm_create(struct tp_plug *plug, bool sending, int dev, const struct tp_net_hello *who, int fd, void *inner, struct tp_plug_comm **out)
{
	struct tp_plug_comm *comm = tp_alloc(1, sizeof(*comm), "a plug-in's connection");
	union tp_addr addr;
	socklen_t length = sizeof(addr);

	if (!comm) {
		if (sending) plug->close_send(inner);
		else plug->close_recv(inner);
		tp_plug_context_put(plug, who->comm_hash);
		close(fd);
		return ncclSystemError;
	}
	comm->plug = plug;
	comm->sending = sending;
	comm->dev = dev;
	comm->fd = fd;
	comm->inner = inner;
	comm->comm_hash = who->comm_hash;
	snprintf(comm->which, sizeof(comm->which), "rank %d -> rank %d [channel %d]", who->from, who->to, who->channel);
	memset(&addr, 0, sizeof(addr));
	if (getpeername(fd, &addr.sa, &length) == 0) tp_addr_format(&addr, comm->peer);
	*out = comm;
	return ncclSuccess;
}

bool tp_plug_has_closed(int fd)
{
	char byte;
	ssize_t n = recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);

	return n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}

/* Has the peer closed its end, and has everything had time enough to come in since? */
static bool is_gone(struct tp_plug_comm *comm)
{
	if (!comm->gone_ms) {
		if (++comm->looks % PEER_LOOKS != 0 || !tp_plug_has_closed(comm->fd)) return false;
		comm->gone_ms = tp_clock_ms();
		comm->looks_since = 0;
	}
	return ++comm->looks_since > GONE_LOOKS && tp_clock_ms() - comm->gone_ms > GONE_MS;
}

static ncclResult_t gone(struct tp_plug_comm *comm)
{
	if (comm->error == ncclSuccess)
		comm->error = comm->leaving ? ncclRemoteError : TP_FAIL(ncclRemoteError, "NET/%s : %s : peer %s closed the connection while data was outstanding; has it died or "
			"been aborted?", comm->plug->name, comm->which, comm->peer);
	return comm->error;
}

static ncclResult_t check_bytes(const struct tp_plug_comm *comm, size_t bytes)
{
	size_t most = comm->plug->properties[comm->dev].max_bytes;

	if (comm->plug->version == 8) most = TP_MIN(most, (size_t)INT_MAX);
	if (bytes <= most) return ncclSuccess;
	return TP_FAIL(ncclInvalidUsage, "NET/Plugin: %s: %s: a message of %zu bytes; device %d (%s) takes %zu at most (maxP2pBytes): set TELPHER_NET_CHUNK below that on all ranks",
		comm->plug->name, comm->which, bytes, comm->dev, comm->plug->properties[comm->dev].name, most);
}

static struct tp_plug_request *new_request(struct tp_plug_comm *comm, int n)
{
	for (int i = 0; i < TP_ABI_MAX_REQUESTS; i++) {
		struct tp_plug_request *r = &comm->requests[comm->next++ % TP_ABI_MAX_REQUESTS];
		if (r->busy) continue;
		r->comm = comm;
		r->n = n;
		r->inner = NULL;
		return r;
	}
	return NULL;
}

static void *inner_of(void *mhandle) { return mhandle ? ((struct tp_plug_memory *)mhandle)->inner : NULL; }

static ncclResult_t plug_isend(void *handle, const void *data, size_t bytes, int tag, void *mhandle, void **out)
{
	struct tp_plug_comm *comm = handle;
	struct tp_plug_request *request;
	ncclResult_t result;

	*out = NULL;
	TP_TRY(comm->error);
	TP_TRY(check_bytes(comm, bytes));
	request = new_request(comm, 0);
	if (!request) return ncclSuccess;
	request->capacity[0] = bytes;
	tp_plug_be_quiet(comm->leaving);
	result = tp_plug_call_isend(comm->plug, comm->inner, data, bytes, tag, inner_of(mhandle), &request->inner);
	tp_plug_be_quiet(false);
	if (result != ncclSuccess) return fail(comm, "isend", result);
	if (!request->inner) return is_gone(comm) ? gone(comm) : ncclSuccess;
	request->busy = true;
	*out = request;
	return ncclSuccess;
}

static ncclResult_t plug_irecv(void *handle, int n, void *const *data, const size_t *bytes, const int *tags, void *const *mhandles, void **out)
{
	struct tp_plug_comm *comm = handle;
	const struct tp_net_properties *p = &comm->plug->properties[comm->dev];
	struct tp_plug_request *request;
	void *memory[TP_NET_MAX_RECVS];
	ncclResult_t result;

	*out = NULL;
	TP_TRY(comm->error);
	if (n < 1 || n > (int)p->max_recvs)
		return TP_FAIL(ncclInternalError, "NET/Plugin: %s: a grouped receive of %d; device %s takes 1 to %u", comm->plug->name, n, p->name, p->max_recvs);
	for (int i = 0; i < n && comm->plug->version == 8; i++)
		if (bytes[i] > INT_MAX) return TP_FAIL(ncclInvalidUsage, "NET/Plugin: %s (v8) takes receives of %d bytes at most, not %zu", comm->plug->name, INT_MAX, bytes[i]);
	request = new_request(comm, n);
	if (!request) return ncclSuccess;
	for (int i = 0; i < n; i++) {
		request->capacity[i] = bytes[i];
		memory[i] = mhandles ? inner_of(mhandles[i]) : NULL;
	}
	result = tp_plug_call_irecv(comm->plug, comm->inner, n, data, bytes, tags, memory, &request->inner);
	if (result != ncclSuccess) return fail(comm, "irecv", result);
	if (!request->inner) return is_gone(comm) ? gone(comm) : ncclSuccess;
	request->busy = true;
	*out = request;
	return ncclSuccess;
}

/* Only memory of GPUs needs it. */
static ncclResult_t plug_iflush(void *handle, int n, void *const *data, const size_t *bytes, void *const *mhandles, void **out)
{
	struct tp_plug_comm *comm = handle;
	void *at[TP_NET_MAX_RECVS], *memory[TP_NET_MAX_RECVS];
	int sizes[TP_NET_MAX_RECVS];
	struct tp_plug_request *request;
	ncclResult_t result;

	*out = NULL;
	if (!comm->plug->iflush || n < 1) return ncclSuccess;
	TP_TRY(comm->error);
	if (n > TP_NET_MAX_RECVS) return TP_FAIL(ncclInternalError, "NET/Plugin: %s: a flush of %d receives; at most %d are possible", comm->plug->name, n, TP_NET_MAX_RECVS);
	request = new_request(comm, 0);
	if (!request) return TP_FAIL(ncclInternalError, "NET/Plugin: %s: %s: a flush while %d requests are outstanding", comm->plug->name, comm->which, TP_ABI_MAX_REQUESTS);
	for (int i = 0; i < n; i++) {
		at[i] = data[i];
		memory[i] = mhandles ? inner_of(mhandles[i]) : NULL;
		sizes[i] = (int)TP_MIN(bytes[i], (size_t)INT_MAX);
	}
	result = comm->plug->iflush(comm->inner, n, at, sizes, memory, &request->inner);
	if (result != ncclSuccess) return fail(comm, "iflush", result);
	if (!request->inner) return ncclSuccess;
	request->busy = true;
	*out = request;
	return ncclSuccess;
}

static ncclResult_t check_sizes(struct tp_plug_request *request, const int *got)
{
	struct tp_plug_comm *comm = request->comm;

	for (int i = 0; i < request->n; i++) {
		if (got[i] >= 0 && (size_t)got[i] <= request->capacity[i]) continue;
		if (got[i] < 0)
			comm->error = TP_FAIL(ncclInternalError, "NET/Plugin: %s: %s: test says that a receive is done, but not how many bytes came (%d)", comm->plug->name, comm->which, got[i]);
		else
			comm->error = TP_FAIL(ncclInternalError, "NET/Plugin: %s: %s: test says that %d bytes came for a receive of at most %zu", comm->plug->name, comm->which, got[i],
				request->capacity[i]);
		return comm->error;
	}
	return ncclSuccess;
}

static ncclResult_t plug_test(void *handle, bool *done, size_t *sizes)
{
	struct tp_plug_request *request = handle;
	struct tp_plug_comm *comm = request->comm;
	int finished = 0, got[TP_NET_MAX_RECVS];
	ncclResult_t result;

	TP_TRY(comm->error);
	/* A receiver must fill them in; room for more than it was asked for, should it write more. */
	for (int i = 0; i < TP_NET_MAX_RECVS; i++) got[i] = -1;
	tp_plug_be_quiet(comm->leaving);
	result = comm->plug->test(request->inner, &finished, got);
	tp_plug_be_quiet(false);
	if (result != ncclSuccess) return fail(comm, "test", result);
	if (!finished) {
		if (is_gone(comm)) return gone(comm);
		*done = false;
		return ncclSuccess;
	}
	TP_TRY(check_sizes(request, got));
	for (int i = 0; i < request->n && sizes; i++) sizes[i] = (size_t)got[i];
	if (request->n == 0 && sizes) sizes[0] = request->capacity[0];
	request->busy = false;
	*done = true;
	return ncclSuccess;
}

static ncclResult_t keep_memory(struct tp_plug_comm *comm, void *inner, void **mhandle)
{
	struct tp_plug_memory *memory = tp_alloc(1, sizeof(*memory), "a registration");

	if (!memory) {
		comm->plug->dereg_mr(comm->inner, inner);
		return ncclSystemError;
	}
	*memory = (struct tp_plug_memory){ comm, inner, comm->memory };
	comm->memory = memory;
	*mhandle = memory;
	return ncclSuccess;
}

static ncclResult_t plug_reg_memory(void *handle, void *data, size_t bytes, enum tp_net_memory kind, void **mhandle)
{
	struct tp_plug_comm *comm = handle;
	void *inner = NULL;
	ncclResult_t result = comm->plug->reg_mr(comm->inner, data, bytes, (int)kind, &inner);

	if (result != ncclSuccess) return tp_plug_failed(comm->plug, "regMr", comm->which, result);
	return keep_memory(comm, inner, mhandle);
}

static ncclResult_t plug_reg_dmabuf(void *handle, void *data, size_t bytes, uint64_t offset, int fd, void **mhandle)
{
	struct tp_plug_comm *comm = handle;
	void *inner = NULL;
	ncclResult_t result;

	if (!comm->plug->reg_mr_dmabuf) return TP_FAIL(ncclInternalError, "NET/Plugin: %s: a DMA-BUF can't be registered (no regMrDmaBuf)", comm->plug->name);
	result = comm->plug->reg_mr_dmabuf(comm->inner, data, bytes, TP_ABI_PTR_CUDA, offset, fd, &inner);
	if (result != ncclSuccess) return tp_plug_failed(comm->plug, "regMrDmaBuf", comm->which, result);
	return keep_memory(comm, inner, mhandle);
}

static ncclResult_t undo(struct tp_plug_memory *memory)
{
	struct tp_plug_comm *comm = memory->comm;
	ncclResult_t result = comm->plug->dereg_mr(comm->inner, memory->inner);

	for (struct tp_plug_memory **at = &comm->memory; *at; at = &(*at)->next)
		if (*at == memory) {
			*at = memory->next;
			break;
		}
	memory->comm = NULL;
	return result == ncclSuccess ? ncclSuccess : tp_plug_failed(comm->plug, "deregMr", comm->which, result);
}

static ncclResult_t plug_dereg_memory(void *handle, void *mhandle)
{
	struct tp_plug_memory *memory = mhandle;
	ncclResult_t result = memory && memory->comm ? undo(memory) : ncclSuccess;

	(void)handle;
	free(memory);
	return result;
}

/* The peer's end of TCP says that it has gone: nothing else ever comes there. */
static int plug_poll_fds(void *handle, int *fds, uint32_t *events, int max)
{
	struct tp_plug_comm *comm = handle;

	if (max < 1) return 0;
	fds[0] = comm->fd;
	/* A plug-in has no descriptors: whoever sleeps on this one looks again after a small part of what it has waited already. */
	events[0] = comm->gone_ms ? 0 : EPOLLIN;
	return 1;
}

static void plug_leaving(void *handle)
{
	struct tp_plug_comm *comm = handle;

	comm->leaving = true;
}

/* Many plug-ins move data only in test. A receiver that has closed takes nothing more. */
static void finish_sending(struct tp_plug_comm *comm)
{
	uint64_t until = tp_clock_ms() + CLOSE_MS;
	bool outstanding = true;

	while (outstanding && comm->error == ncclSuccess && tp_clock_ms() < until) {
		bool done = false;
		outstanding = false;
		for (int i = 0; i < TP_ABI_MAX_REQUESTS && comm->error == ncclSuccess; i++)
			if (comm->requests[i].busy && plug_test(&comm->requests[i], &done, NULL) == ncclSuccess && !done) outstanding = true;
		if (outstanding && tp_plug_has_closed(comm->fd)) return;
		if (outstanding) sched_yield();
	}
}

static ncclResult_t plug_close(void *handle)
{
	struct tp_plug_comm *comm = handle;
	ncclResult_t result;

	if (!comm) return ncclSuccess;
	if (comm->sending && comm->leaving) finish_sending(comm);
	while (comm->memory) (void)undo(comm->memory);
	result = comm->sending ? comm->plug->close_send(comm->inner) : comm->plug->close_recv(comm->inner);
	if (result != ncclSuccess) result = tp_plug_failed(comm->plug, comm->sending ? "closeSend" : "closeRecv", comm->which, result);
	tp_plug_context_put(comm->plug, comm->comm_hash);
	close(comm->fd);
	free(comm);
	return result;
}

static ncclResult_t plug_init(void)
{
	return tp_plug_current() ? ncclSuccess : TP_FAIL(ncclInternalError, "NET/Plugin: no plug-in is chosen");
}

static ncclResult_t plug_devices(int *count)
{
	TP_TRY(plug_init());
	*count = tp_plug_current()->ndevs;
	return ncclSuccess;
}

static ncclResult_t plug_properties(int dev, struct tp_net_properties *out)
{
	TP_TRY(plug_init());
	if (dev < 0 || dev >= tp_plug_current()->ndevs) return TP_FAIL(ncclInternalError, "NET/Plugin: %s: there is no device %d", tp_plug_current()->name, dev);
	*out = tp_plug_current()->properties[dev];
	return ncclSuccess;
}

struct tp_net_ops tp_net_plugged = {
	.name = "plug-in",
	.spreads = true,
	.init = plug_init,
	.devices = plug_devices,
	.properties = plug_properties,
	.listen = tp_plug_listen,
	.connect = tp_plug_connect,
	.cancel_connect = tp_plug_cancel_connect,
	.accept = tp_plug_accept,
	.reg_memory = plug_reg_memory,
	.reg_dmabuf = plug_reg_dmabuf,
	.dereg_memory = plug_dereg_memory,
	.isend = plug_isend,
	.irecv = plug_irecv,
	.iflush = plug_iflush,
	.test = plug_test,
	.poll_fds = plug_poll_fds,
	.poll_connect_fds = tp_plug_poll_connect_fds,
	.poll_listen_fds = tp_plug_poll_listen_fds,
	.leaving = plug_leaving,
	.close_send = plug_close,
	.close_recv = plug_close,
	.close_listen = tp_plug_close_listen,
};

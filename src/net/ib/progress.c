/* Requests, and what completes. The hot path is one look at the completion queue of each path in use; everything rare is in path.c. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include "net/ib/ib.h"

enum { POLL_BATCH = 16, CARE_LOOKS = 64 };

struct tp_ib_request *tp_ib_new_request(struct tp_ib_comm *comm)
{
	for (int i = 0; i < TP_NET_MAX_REQUESTS; i++) {
		struct tp_ib_request *r = &comm->requests[comm->next_request++ % TP_NET_MAX_REQUESTS];
		if (r->busy) continue;
		memset(r, 0, sizeof(*r));
		r->comm = comm;
		r->busy = true;
		return r;
	}
	return NULL;
}

void tp_ib_message_done(struct tp_ib_comm *comm, uint64_t number)
{
	struct tp_ib_message *m = &comm->messages[number % TP_IB_RING];
	int requests = comm->sending ? m->n : 1;

	m->done = true;
	m->left = 0;
	for (int r = 0; r < requests; r++)
		if (m->requests[r]) m->requests[r]->done = true;
	while (comm->below < comm->head && comm->messages[comm->below % TP_IB_RING].done) {
		/* Sender: an entry that hasn't been read yet is known by n being 0. */
		if (comm->sending) comm->messages[comm->below % TP_IB_RING].n = 0;
		comm->below++;
	}
}

static void free_to(struct tp_ib_qp *qp, uint32_t position)
{
	qp->freed += (position - qp->freed) & 0xffff;
}

static void one(struct tp_ib_comm *comm, struct tp_ib_path *path, const struct ibv_wc *wc)
{
	enum tp_ib_kind kind = (enum tp_ib_kind)(wc->wr_id >> 56);
	int q = (int)(wc->wr_id >> 48 & 0xff);
	struct tp_ib_qp *qp = &path->qps[q];
	uint64_t message = comm->below + (((wc->wr_id & 0xffff) - comm->below) & 0xffff);
	char text[1024];

	if ((wc->wr_id >> 32 & 0xffff) != (path->generation & 0xffff)) return;
	if (kind == TP_IB_RECEIVE) qp->receives--;
	else free_to(qp, (uint32_t)(wc->wr_id >> 16 & 0xffff));
	if (kind == TP_IB_PROBE) path->probes--;
	if (wc->status != IBV_WC_SUCCESS) {
		if (path->state == TP_IB_PATH_DEAD || path->state == TP_IB_PATH_NONE) return;
		tp_ib_explain(comm, path, wc, text, sizeof(text));
		tp_ib_path_failed(comm, path, "%s", text);
		return;
	}
	switch (kind) {
	case TP_IB_RECEIVE:
		if (path->at >= 0) tp_ib_arrived(comm, path, q, wc->imm_data);
		if (qp->receives <= comm->rq_depth / 2 && path->state == TP_IB_PATH_LIVE && !comm->switching) tp_ib_qp_fill(comm, path, q);
		return;
	case TP_IB_DATA:
		tp_ib_sent(comm, message);
		return;
	case TP_IB_FIFO: case TP_IB_PROBE: return;
	}
}

int tp_ib_poll_path(struct tp_ib_comm *comm, struct tp_ib_path *path)
{
	struct ibv_wc wcs[POLL_BATCH];
	int total = 0, n;

	do {
		n = ibv_poll_cq(path->cq, POLL_BATCH, wcs);
		if (n < 0) {
			tp_ib_path_failed(comm, path, "Call to ibv_poll_cq failed");
			return total;
		}
		for (int i = 0; i < n; i++) one(comm, path, &wcs[i]);
		total += n;
	} while (n == POLL_BATCH);
	return total;
}

void tp_ib_poll_used(struct tp_ib_comm *comm)
{
	for (int i = 0; i < comm->nused; i++)
		if (tp_ib_poll_path(comm, comm->used[i]) > 0) comm->used[i]->moved_ms = 0;
}

/* Something that only path.c can deal with? Looks at flags, and from time to time at the clock. */
static bool wants_care(struct tp_ib_comm *comm)
{
	if (comm->switching || comm->to_close) return true;
	for (int i = 0; i < comm->nused; i++) {
		const struct tp_ib_path *path = comm->used[i];
		if (path->state != TP_IB_PATH_LIVE || atomic_load_explicit(&path->port->state, memory_order_relaxed) != IBV_PORT_ACTIVE) return true;
	}
	if (atomic_load_explicit(&comm->control.waiting, memory_order_acquire)) return true;   /* pairs with the watch thread's */
	return comm->looks % CARE_LOOKS == 0;
}

ncclResult_t tp_ib_progress(struct tp_ib_comm *comm)
{
	TP_TRY(comm->error);
	comm->looks++;
	tp_ib_poll_used(comm);
	if (comm->resending) tp_ib_resend(comm);
	if (wants_care(comm)) TP_TRY(tp_ib_care(comm));
	return comm->error;
}

ncclResult_t tp_ib_peer_gone(struct tp_ib_comm *comm)
{
	/* What completed before the peer went is in the queue by now, and what it said last in the inbox. */
	tp_ib_poll_used(comm);
	TP_TRY(tp_ib_care(comm));
	if (comm->below == comm->head && !comm->sending) return ncclSuccess;
	if (atomic_load_explicit(&comm->control.closed, memory_order_relaxed) == 2)
		return tp_ib_fail(comm, ncclInternalError, "what came over the TCP connection is not what a peer of ours sends: does something else write to it, or are the libraries of "
			"different versions?");
	return tp_ib_fail(comm, ncclRemoteError, "the peer closed the connection while data was outstanding; has it died or been aborted?");
}

ncclResult_t tp_ib_test(void *handle, bool *done, size_t *sizes)
{
	struct tp_ib_request *request = handle;
	struct tp_ib_comm *comm = request->comm;

	if (request->is_flush) return tp_ib_test_flush(request, done);
	if (!request->done) {
		ncclResult_t result = tp_ib_progress(comm);
		if (!request->done && result != ncclSuccess) return result;
		if (!request->done && atomic_load_explicit(&comm->control.closed, memory_order_acquire)) {     /* pairs with the watch thread's */
			result = tp_ib_peer_gone(comm);
			if (!request->done) return result;
		}
		if (!request->done) {
			*done = false;
			return ncclSuccess;
		}
	}
	if (sizes && comm->sending) sizes[0] = request->bytes;
	for (int i = 0; sizes && !comm->sending && i < request->n; i++) sizes[i] = request->sizes[i];
	request->busy = false;
	*done = true;
	return ncclSuccess;
}

static void take_cq_events(struct tp_ib_comm *comm, int card)
{
	const struct tp_verbs *v = comm->contexts[card]->verbs;
	struct ibv_cq *cq;
	void *whose;

	while (v->get_cq_event(comm->channels[card], &cq, &whose) == 0) {
		struct tp_ib_path *path = whose;
		if (++path->unacked_events < 64) continue;
		v->ack_cq_events(cq, path->unacked_events);
		path->unacked_events = 0;
	}
}

/* A FIFO entry makes no completion, so whoever waits for one is woken by nothing: but receives are posted ahead, and a sleep is a
 * small part of what was waited already. */
int tp_ib_poll_fds(void *handle, int *fds, uint32_t *events, int max)
{
	struct tp_ib_comm *comm = handle;
	bool ready = comm->ncontexts > max;
	int n = 0;

	if (max < 1) return 0;
	/* Whoever sleeps looks seldom: then with care. */
	comm->looks = CARE_LOOKS - 1;
	/* All events are taken before any queue is armed again: paths over one card share them. */
	for (int c = 0; c < comm->ncontexts && !ready; c++) {
		if (!comm->channels[c]) continue;
		take_cq_events(comm, c);
		fds[n] = comm->channels[c]->fd;
		events[n++] = EPOLLIN;
	}
	for (int i = 0; i < comm->nused && !ready; i++) {
		struct tp_ib_path *path = comm->used[i];
		/* What completes between the last look and now would ring no bell any more; it is found by this one. */
		if (ibv_req_notify_cq(path->cq, 0) != 0 || tp_ib_poll_path(comm, path) == 0) continue;
		path->moved_ms = 0;
		ready = true;
	}
	if (comm->cm && n < max) {
		fds[n] = tp_ib_cm_fd(comm);
		events[n++] = EPOLLIN;
	}
	/* A flush takes no time to sleep in. */
	if (!ready && !tp_ib_flush_is_under_way(comm)) return n;
	fds[0] = tp_ib_ready_fd();
	events[0] = EPOLLIN;
	return 1;
}

/* A request into the ring: the initiator's checks, the way that its data take (in the ring, straight from where they lie, by a
 * buffer of the request's own), and the room for both. */
#include <stdlib.h>
#include <string.h>
#include "verbs/capture.h"
#include "verbs/internal.h"
#include "verbs/path.h"

void tp_path_drop_bounce(struct tp_path *path)
{
	free(path->bounce);
	path->bounce = NULL;
}

/* What is wrong with it before the target is asked; SUCCESS: nothing. */
static enum ibv_wc_status check_locked(const struct tp_qp *qp, const struct tp_wqe *wqe)
{
	if (wqe->length > TP_CARD_MSG_BYTES || (tp_path_is_atomic(wqe->opcode) && wqe->length != 8))
		return IBV_WC_LOC_LEN_ERR;
	if (tp_path_fetches(wqe->opcode) && qp->attr.max_rd_atomic == 0)
		return IBV_WC_LOC_QP_OP_ERR;
	return IBV_WC_SUCCESS;
}

void tp_path_complete_at_once(struct tp_qp *qp, enum ibv_wc_status status)
{
	qp->sq.exec++;
	tp_sq_complete_locked(qp, status, 0);
}

/* Memory that the target can't reach. */
static bool any_apart(const struct tp_span *spans, int count)
{
	for (int i = 0; i < count; i++)
		if (spans[i].grip.flags & (TP_KEY_NULL | TP_KEY_APART))
			return true;
	return false;
}

/* The data's way, and the bytes that follow the request's head. */
struct load { enum tp_path_form form; uint32_t bytes; bool bounce, placed; };

static struct load load_of(struct tp_qp *qp, struct tp_wqe *wqe, const struct tp_span *spans, int count)
{
	if (tp_path_is_atomic(wqe->opcode))
		return (struct load){ TP_PATH_NO_DATA, sizeof(struct tp_path_operands), false, false };
	if (wqe->length == 0)
		return (struct load){ TP_PATH_NO_DATA, 0, false, false };
	if (wqe->opcode == IBV_WR_RDMA_READ)
		return (struct load){ TP_PATH_THERE, sizeof(struct tp_path_span), true, false };
	if (wqe->length <= TP_PATH_INLINE)
		return (struct load){ TP_PATH_HERE, wqe->length, false, false };
	if (wqe->opcode == IBV_WR_RDMA_WRITE_WITH_IMM && tp_path_of(qp)->in_flight == 0 && !tp_path_is_watched(tp_path_of(qp)->link) &&
		tp_path_place(qp, wqe))
		return (struct load){ TP_PATH_NO_DATA, 0, false, true };
	if (any_apart(spans, count))
		return (struct load){ TP_PATH_THERE, sizeof(struct tp_path_span), true, false };
	return (struct load){ TP_PATH_THERE, (uint32_t)count * (uint32_t)sizeof(struct tp_path_span), false, false };
}

static void fill_head(struct tp_qp *qp, const struct tp_wqe *wqe, const struct load *load, struct tp_path_request *request)
{
	*request = (struct tp_path_request){ .opcode = (uint8_t)wqe->opcode, .form = (uint8_t)load->form, .type = (uint8_t)qp->ibv.qp_type,
		.mtu = (uint8_t)qp->attr.path_mtu, .dest_qpn = qp->attr.dest_qp_num, .src_qpn = qp->ibv.qp_num, .epoch = tp_path_of(qp)->epoch,
		.seq = qp->sq.exec, .psn = qp->send_psn, .imm = wqe->imm, .length = wqe->length, .srqn = wqe->srqn,
		.rkey = tp_path_is_atomic(wqe->opcode) ? wqe->atomic.rkey : wqe->rdma.rkey,
		.addr = tp_path_is_atomic(wqe->opcode) ? wqe->atomic.addr : wqe->rdma.addr,
		.flags = (uint8_t)((wqe->flags & IBV_SEND_SOLICITED ? TP_PATH_SOLICITED : 0u) | (load->placed ? TP_PATH_PLACED : 0u) |
			(tp_path_of(qp)->fated_there ? TP_PATH_FATED : 0u)) };
	request->bytes = (uint32_t)tp_align_up(TP_PATH_HEAD_BYTES + load->bytes, 64);
}

/* The data, or where they are. false: they can't be read. */
static bool fill_load(struct tp_qp *qp, const struct tp_wqe *wqe, const struct load *load, const struct tp_span *spans, int count,
	struct tp_path_request *request)
{
	uint8_t *at = (uint8_t *)request + TP_PATH_HEAD_BYTES;
	struct tp_path *path = tp_path_of(qp);
	if (tp_path_is_atomic(wqe->opcode)) {
		struct tp_path_operands operands = { wqe->atomic.compare_add, wqe->atomic.swap };
		memcpy(at, &operands, sizeof(operands));
	} else if (load->form == TP_PATH_HERE) {
		return tp_span_read(spans, count, 0, at, wqe->length) == 0;
	} else if (load->bounce) {
		struct tp_path_span span = { (uintptr_t)path->bounce, wqe->length };
		memcpy(at, &span, sizeof(span));
		request->spans = 1;
	} else if (load->form == TP_PATH_THERE) {
		struct tp_path_span *out = (struct tp_path_span *)(void *)at;
		for (int i = 0; i < count; i++)
			out[i] = (struct tp_path_span){ (uintptr_t)spans[i].grip.addr, spans[i].bytes };
		request->spans = (uint16_t)count;
	}
	return true;
}

/* A buffer of the request's own, for what the target can't copy straight. */
static bool make_bounce(struct tp_qp *qp, const struct tp_wqe *wqe, const struct tp_span *spans, int count)
{
	struct tp_path *path = tp_path_of(qp);
	path->bounce = malloc(wqe->length);
	if (path->bounce && (wqe->opcode == IBV_WR_RDMA_READ || tp_span_read(spans, count, 0, path->bounce, wqe->length) == 0))
		return true;
	if (!path->bounce)
		TP_WARN("no memory for %u bytes on their way to another process", wqe->length);
	tp_path_drop_bounce(path);
	return false;
}

enum sent { SENT, ENDED, WAITS };

/* head: a copy of what was sent. */
static enum sent put_into_ring(struct tp_qp *qp, struct tp_wqe *wqe, const struct tp_span *spans, int count, struct tp_path_request *head)
{
	struct tp_path *path = tp_path_of(qp);
	struct load load = load_of(qp, wqe, spans, count);
	if (load.bounce && path->in_flight)
		return WAITS;
	if (load.bounce && !make_bounce(qp, wqe, spans, count)) {
		tp_path_complete_at_once(qp, IBV_WC_LOC_PROT_ERR);
		return ENDED;
	}
	uint32_t bytes = (uint32_t)tp_align_up(TP_PATH_HEAD_BYTES + load.bytes, 64);
	struct tp_path_request *request = tp_path_reserve(path->link, bytes);
	while (!request && tp_path_await_room(path->link, &path->waiter, bytes))
		request = tp_path_reserve(path->link, bytes);
	if (!request) {
		tp_path_drop_bounce(path);
		return WAITS;
	}
	fill_head(qp, wqe, &load, request);
	if (!fill_load(qp, wqe, &load, spans, count, request)) {
		tp_path_abandon(path->link);
		if (path->in_flight)
			return WAITS;
		tp_path_complete_at_once(qp, IBV_WC_LOC_PROT_ERR);
		return ENDED;
	}
	*head = *request;
	tp_path_commit(path->link, bytes);
	return SENT;
}

bool tp_path_request(struct tp_qp *qp, struct tp_wqe *wqe)
{
	struct tp_path *path = tp_path_of(qp);
	struct tp_span spans[TP_CARD_SGE];
	enum ibv_wc_status status = check_locked(qp, wqe);
	bool alone = wqe->opcode == IBV_WR_RDMA_READ || (wqe->flags & IBV_SEND_FENCE);
	int count = 0;
	if (path->in_flight && alone)
		return false;
	if (status == IBV_WC_SUCCESS && wqe->length &&
		(count = tp_wqe_enter(qp, wqe, tp_path_fetches(wqe->opcode) ? IBV_ACCESS_LOCAL_WRITE : 0, spans)) < 0)
		status = IBV_WC_LOC_PROT_ERR;
	if (status != IBV_WC_SUCCESS) {
		if (path->in_flight)    /* completions come in order */
			return false;
		tp_path_complete_at_once(qp, status);
		return true;
	}
	struct tp_path_request head;
	enum sent sent = put_into_ring(qp, wqe, spans, count, &head);
	if (sent == SENT && tp_capture_on()) {
		struct tp_path_operands operands = { wqe->atomic.compare_add, wqe->atomic.swap };
		tp_path_trace_request(qp, true, &head, tp_path_is_atomic(wqe->opcode) ? &operands : NULL, spans, count);
	}
	tp_span_leave(spans, count);
	if (sent != WAITS)
		path->fated = path->fated_there = false;
	if (sent != SENT)
		return sent == ENDED;
	uint32_t packets = tp_packets(wqe->length, qp->attr.path_mtu);
	wqe->carrier[0] = qp->send_psn;
	qp->sq.exec++;
	path->in_flight++;
	atomic_fetch_add_explicit(&path->link->ring_ops, 1, memory_order_relaxed);
	qp->send_psn = (qp->send_psn + packets) & 0xffffff;
	tp_counter_add(qp->port, TP_CNT_PORT_XMIT_PACKETS, packets);
	tp_counter_add(qp->port, TP_CNT_UNICAST_XMIT, packets);
	tp_counter_add(qp->port, TP_CNT_PORT_XMIT_DATA, wqe->length / 4);
	tp_path_watch_time(qp);
	return true;
}

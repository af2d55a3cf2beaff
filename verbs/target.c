/* The target's side of connected QPs: receives are taken, data is placed, rights are checked, errors get their meaning. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "verbs/gpu.h"
#include "verbs/internal.h"

enum ibv_wc_status tp_reply_status(enum tp_reply reply)
{
	switch (reply) {
	case TP_REPLY_INVALID_REQUEST: return IBV_WC_REM_INV_REQ_ERR;
	case TP_REPLY_REMOTE_ACCESS: return IBV_WC_REM_ACCESS_ERR;
	case TP_REPLY_REMOTE_OPERATION: return IBV_WC_REM_OP_ERR;
	default: return IBV_WC_GENERAL_ERR;
	}
}

bool tp_target_receives(const struct tp_qp *qp)
{
	int state = atomic_load_explicit(&qp->state, memory_order_relaxed);
	return state >= IBV_QPS_RTR && state <= IBV_QPS_SQE;
}

void tp_target_established_locked(struct tp_qp *qp)
{
	if (qp->established)
		return;
	qp->established = true;
	tp_event_qp(qp, IBV_EVENT_COMM_EST);
}

/* ---- receives ---- */

static bool take_locked(struct tp_rq *rq, struct tp_recv *recv)
{
	if (!rq->max_wr || rq->taken == atomic_load_explicit(&rq->head, memory_order_relaxed))
		return false;
	const struct tp_rwqe *slot = tp_rq_at(rq, rq->taken++);
	recv->wr_id = slot->wr_id;
	recv->num_sge = slot->num_sge;
	recv->length = slot->length;
	if (slot->num_sge)
		memcpy(recv->sge, slot->sge, slot->num_sge * sizeof(slot->sge[0]));
	return true;
}

uint32_t tp_target_receives_posted(struct tp_qp *qp)
{
	struct tp_rq *rq = qp->srq ? &qp->srq->rq : &qp->rq;
	pthread_mutex_lock(&rq->lock);
	uint32_t posted = rq->max_wr ? atomic_load_explicit(&rq->head, memory_order_relaxed) - rq->taken : 0;
	pthread_mutex_unlock(&rq->lock);
	return posted;
}

static bool take_shared(struct tp_srq *srq, struct tp_recv *recv)
{
	struct tp_rq *rq = &srq->rq;
	bool below = false;
	pthread_mutex_lock(&rq->lock);
	bool any = take_locked(rq, recv);
	if (any) {
		atomic_fetch_add_explicit(&rq->tail, 1, memory_order_release);
		below = srq->limit && atomic_load_explicit(&rq->head, memory_order_relaxed) - rq->taken < srq->limit;
		if (below)
			srq->limit = 0;
	}
	pthread_mutex_unlock(&rq->lock);
	if (below)
		tp_event_srq(srq, IBV_EVENT_SRQ_LIMIT_REACHED);
	return any;
}

/* The XRC SRQ that a request names, pinned: of the QP's domain, or NULL. */
static struct tp_srq *get_xrc_srq(const struct tp_qp *qp, uint32_t srqn)
{
	struct tp_srq *srq = tp_srq_get(srqn);
	if (srq && (srq->type != IBV_SRQT_XRC || srq->xrcd->id != qp->xrcd->id)) {
		tp_srq_put(srq);
		return NULL;
	}
	return srq;
}

enum tp_reply tp_target_begin_locked(struct tp_qp *qp, uint32_t srqn)
{
	struct tp_recv *recv = &qp->recv;
	bool xrc = qp->ibv.qp_type == IBV_QPT_XRC_RECV;
	recv->spoiled = false;
	if (recv->taken)        /* left by a message that was dropped (UC) */
		return TP_REPLY_ACK;
	struct tp_srq *srq = xrc ? get_xrc_srq(qp, srqn) : qp->srq;
	if (xrc && !srq)
		return TP_REPLY_INVALID_REQUEST;
	if (srq) {
		recv->taken = take_shared(srq, recv);
	} else {
		pthread_mutex_lock(&qp->rq.lock);
		recv->taken = take_locked(&qp->rq, recv);
		pthread_mutex_unlock(&qp->rq.lock);
	}
	if (!recv->taken) {
		if (xrc)
			tp_srq_put(srq);
		tp_counter_add(qp->port, TP_CNT_OUT_OF_BUFFER, 1);
		return TP_REPLY_RNR;
	}
	recv->srq = srq;
	recv->pd = srq ? srq->pd->id : qp->pd->id;
	return TP_REPLY_ACK;
}

/* The receive is no longer the QP's. */
static void release_locked(struct tp_qp *qp)
{
	if (qp->recv.srq && qp->ibv.qp_type == IBV_QPT_XRC_RECV)
		tp_srq_put(qp->recv.srq);
	qp->recv.taken = false;
	qp->recv.srq = NULL;
}

void tp_target_forget_locked(struct tp_qp *qp)
{
	if (qp->recv.taken)
		release_locked(qp);
}

static bool complete_locked(struct tp_qp *qp, struct tp_cqe *cqe, bool solicited)
{
	struct tp_recv *recv = &qp->recv;
	bool xrc = qp->ibv.qp_type == IBV_QPT_XRC_RECV;
	cqe->wc.wr_id = recv->wr_id;
	cqe->wc.qp_num = qp->ibv.qp_num;
	cqe->qp = xrc ? NULL : qp;
	cqe->is_recv = true;
	cqe->frees = recv->srq ? 0 : 1;
	bool pushed = tp_cq_push(xrc ? recv->srq->cq : qp->recv_cq, cqe, solicited);
	release_locked(qp);
	return pushed;
}

void tp_target_spoil_locked(struct tp_qp *qp, enum ibv_wc_status status)
{
	struct tp_cqe cqe = { .wc = { .status = status, .opcode = IBV_WC_RECV } };
	if (!qp->recv.taken)
		return;
	tp_counter_add(qp->port, status == IBV_WC_WR_FLUSH_ERR ? TP_CNT_RESP_CQE_FLUSH_ERROR : TP_CNT_RESP_CQE_ERROR, 1);
	complete_locked(qp, &cqe, false);
	qp->recv.spoiled = true;
}

enum tp_reply tp_target_finish_locked(struct tp_qp *qp, const struct tp_arrival *arrival)
{
	struct tp_cqe cqe = { .wc = { .status = IBV_WC_SUCCESS, .opcode = arrival->opcode, .byte_len = arrival->byte_len,
		.imm_data = arrival->imm, .src_qp = arrival->src_qp, .wc_flags = arrival->wc_flags, .sl = arrival->sl } };
	if (complete_locked(qp, &cqe, arrival->solicited))
		return TP_REPLY_ACK;
	tp_qp_fail_locked(qp, IBV_QPS_ERR, IBV_EVENT_QP_FATAL);
	return TP_REPLY_REMOTE_OPERATION;
}

/* ---- placing ---- */

/* For UC an error drops the message and keeps the receive. */
static enum tp_reply place_failed_locked(struct tp_qp *qp, enum ibv_wc_status status, enum tp_reply reply)
{
	if (status == IBV_WC_LOC_LEN_ERR)
		tp_counter_add(qp->port, TP_CNT_RESP_LOCAL_LENGTH_ERROR, 1);
	if (qp->ibv.qp_type != IBV_QPT_UC)
		tp_target_spoil_locked(qp, status);
	return reply;
}

enum tp_reply tp_target_place_locked(struct tp_qp *qp, uint64_t offset, const void *from, size_t bytes)
{
	struct tp_recv *recv = &qp->recv;
	struct tp_span spans[TP_CARD_SGE];
	if (bytes == 0)
		return TP_REPLY_ACK;
	if (offset + bytes > recv->length)
		return place_failed_locked(qp, IBV_WC_LOC_LEN_ERR, TP_REPLY_INVALID_REQUEST);
	int count = tp_sge_enter(recv->pd, recv->sge, recv->num_sge, IBV_ACCESS_LOCAL_WRITE, spans);
	int error = count < 0 ? EPERM : tp_span_write(spans, count, offset, from, bytes);
	if (count > 0)
		tp_span_leave(spans, count);
	return error ? place_failed_locked(qp, IBV_WC_LOC_PROT_ERR, TP_REPLY_REMOTE_OPERATION) : TP_REPLY_ACK;
}

/* From a GPU: each part straight to where it belongs, if that is memory of the same GPU or plain memory of the host; else by way of a buffer. */
static int move_part(const struct tp_span *to, uint64_t to_offset, const struct tp_span *from, uint64_t offset, uint64_t bytes, bool *source)
{
	const struct tp_gpu_range *range = tp_gpu_at(from->grip.key->region);
	uint64_t addr = (uintptr_t)from->grip.addr + offset;
	int error = EXDEV;
	if (to->grip.flags & TP_KEY_DEVICE)
		error = tp_gpu_move(tp_gpu_at(to->grip.key->region), (uintptr_t)to->grip.addr + to_offset, range, addr, bytes, source);
	if (error != EXDEV)
		return error;
	if (!(to->grip.flags & (TP_KEY_NULL | TP_KEY_CHECKED | TP_KEY_DEVICE))) {
		error = tp_gpu_read(range, addr, to->grip.addr + to_offset, bytes);
		*source = error != 0;
		return error;
	}
	const uint64_t most = TP_MIN(bytes, (uint64_t)1 << 20);
	uint8_t *buffer = malloc(most);
	error = buffer ? 0 : EFAULT;
	for (uint64_t at = 0; at < bytes && !error; at += most) {
		uint64_t part = TP_MIN(bytes - at, most);
		error = tp_gpu_read(range, addr + at, buffer, part);
		*source = error != 0;
		if (!error)
			error = tp_grip_write(&to->grip, to_offset + at, buffer, part);
	}
	free(buffer);
	return error;
}

static int move_from_gpu(const struct tp_span *to, int count, uint64_t offset, const struct tp_span *from, bool *source)
{
	uint64_t done = 0;
	for (int i = 0; i < count && done < from->bytes; i++) {
		if (offset >= to[i].bytes) {
			offset -= to[i].bytes;
			continue;
		}
		uint64_t part = TP_MIN(from->bytes - done, to[i].bytes - offset);
		int error = move_part(&to[i], offset, from, done, part, source);
		if (error)
			return error;
		done += part;
		offset = 0;
	}
	return done == from->bytes ? 0 : EFAULT;
}

/* Both sides are pinned: straight from one to the other, by way of a small buffer where the source needs the kernel. */
static int move_span(const struct tp_span *to, int count, uint64_t offset, const struct tp_span *from, bool *source)
{
	uint8_t bounce[4096];
	*source = false;
	if (!(from->grip.flags & (TP_KEY_NULL | TP_KEY_CHECKED | TP_KEY_DEVICE)))
		return tp_span_write(to, count, offset, from->grip.addr, from->bytes);
	if (from->grip.flags & TP_KEY_DEVICE)
		return move_from_gpu(to, count, offset, from, source);
	for (uint64_t at = 0; at < from->bytes; at += sizeof(bounce)) {
		size_t part = TP_MIN(sizeof(bounce), (size_t)(from->bytes - at));
		if (tp_grip_read(&from->grip, at, bounce, part)) {
			*source = true;
			return EFAULT;
		}
		if (tp_span_write(to, count, offset + at, bounce, part))
			return EFAULT;
	}
	return 0;
}

int tp_span_move(const struct tp_span *to, int to_count, uint64_t offset, const struct tp_span *from, int from_count, bool *source)
{
	for (int i = 0; i < from_count; i++) {
		int error = move_span(to, to_count, offset, &from[i], source);
		if (error)
			return error;
		offset += from[i].bytes;
	}
	return 0;
}

static uint64_t total_bytes(const struct tp_span *spans, int count)
{
	uint64_t bytes = 0;
	for (int i = 0; i < count; i++)
		bytes += spans[i].bytes;
	return bytes;
}

enum tp_reply tp_target_place_spans_locked(struct tp_qp *qp, uint64_t offset, const struct tp_span *from, int from_count)
{
	struct tp_recv *recv = &qp->recv;
	struct tp_span spans[TP_CARD_SGE];
	bool source = false;
	uint64_t bytes = total_bytes(from, from_count);
	if (bytes == 0)
		return TP_REPLY_ACK;
	if (offset + bytes > recv->length)
		return place_failed_locked(qp, IBV_WC_LOC_LEN_ERR, TP_REPLY_INVALID_REQUEST);
	int count = tp_sge_enter(recv->pd, recv->sge, recv->num_sge, IBV_ACCESS_LOCAL_WRITE, spans);
	int error = count < 0 ? EPERM : tp_span_move(spans, count, offset, from, from_count, &source);
	if (count > 0)
		tp_span_leave(spans, count);
	return error ? place_failed_locked(qp, IBV_WC_LOC_PROT_ERR, TP_REPLY_REMOTE_OPERATION) : TP_REPLY_ACK;
}

/* ---- RDMA and atomics ---- */

/* The domain that a request's keys must belong to; 0: there is none (an XRC SRQ that doesn't exist). */
static uint32_t domain_of(struct tp_qp *qp, uint32_t srqn)
{
	if (qp->ibv.qp_type != IBV_QPT_XRC_RECV)
		return qp->pd->id;
	struct tp_srq *srq = get_xrc_srq(qp, srqn);
	uint32_t id = srq ? srq->pd->id : 0;
	if (srq)
		tp_srq_put(srq);
	return id;
}

static enum tp_reply enter(struct tp_qp *qp, uint32_t srqn, uint32_t rkey, uint64_t addr, uint64_t bytes, uint32_t access, struct tp_grip *grip)
{
	*grip = (struct tp_grip){ 0 };
	if (!(qp->attr.qp_access_flags & access))
		return TP_REPLY_INVALID_REQUEST;
	if (bytes == 0)
		return TP_REPLY_ACK;
	uint32_t pd = domain_of(qp, srqn);
	if (!pd)
		return TP_REPLY_INVALID_REQUEST;
	if (tp_key_enter(rkey, pd, qp->ibv.qp_num, addr, bytes, access, grip)) {
		tp_counter_add(qp->port, TP_CNT_RESP_REMOTE_ACCESS_ERRORS, 1);
		return TP_REPLY_REMOTE_ACCESS;
	}
	return TP_REPLY_ACK;
}

enum tp_reply tp_target_write_enter_locked(struct tp_qp *qp, uint32_t srqn, uint32_t rkey, uint64_t addr, uint64_t bytes, struct tp_grip *grip)
{
	tp_counter_add(qp->port, TP_CNT_RX_WRITE_REQUESTS, 1);
	return enter(qp, srqn, rkey, addr, bytes, IBV_ACCESS_REMOTE_WRITE, grip);
}

enum tp_reply tp_target_read_enter_locked(struct tp_qp *qp, uint32_t srqn, uint32_t rkey, uint64_t addr, uint64_t bytes, struct tp_grip *grip)
{
	tp_counter_add(qp->port, TP_CNT_RX_READ_REQUESTS, 1);
	if (qp->attr.max_dest_rd_atomic == 0) {
		*grip = (struct tp_grip){ 0 };
		return TP_REPLY_INVALID_REQUEST;
	}
	return enter(qp, srqn, rkey, addr, bytes, IBV_ACCESS_REMOTE_READ, grip);
}

static uint64_t operate(uint64_t *at, const struct tp_atomic *atomic)
{
	if (atomic->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD)
		return __atomic_fetch_add(at, atomic->compare_add, __ATOMIC_SEQ_CST);
	uint64_t was = atomic->compare_add;
	__atomic_compare_exchange_n(at, &was, atomic->swap, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
	return was;
}

/* One of ours after the other; a kernel that writes there at the same time isn't kept out, as it wouldn't be by a card. */
static enum tp_reply operate_at_gpu(const struct tp_grip *grip, const struct tp_atomic *atomic, uint64_t *result)
{
	uint64_t word;
	tp_gpu_lock_atomics();
	int error = tp_grip_read(grip, 0, &word, sizeof(word));
	if (!error) {
		uint64_t was = operate(&word, atomic);
		error = word == was ? 0 : tp_grip_write(grip, 0, &word, sizeof(word));
		if (!error)
			*result = was;
	}
	tp_gpu_unlock_atomics();
	return error ? TP_REPLY_REMOTE_ACCESS : TP_REPLY_ACK;
}

enum tp_reply tp_target_atomic_locked(struct tp_qp *qp, uint32_t srqn, const struct tp_atomic *atomic, uint64_t *result)
{
	struct tp_grip grip = { 0 };
	tp_counter_add(qp->port, TP_CNT_RX_ATOMIC_REQUESTS, 1);
	if (qp->attr.max_dest_rd_atomic == 0 || (atomic->addr & 7))
		return TP_REPLY_INVALID_REQUEST;
	enum tp_reply reply = enter(qp, srqn, atomic->rkey, atomic->addr, 8, IBV_ACCESS_REMOTE_ATOMIC, &grip);
	if (reply != TP_REPLY_ACK)
		return reply;
	uint64_t look;
	if ((uintptr_t)grip.addr & 7)
		reply = TP_REPLY_INVALID_REQUEST;
	else if (grip.flags & TP_KEY_DEVICE)
		reply = operate_at_gpu(&grip, atomic, result);
	else if ((grip.flags & TP_KEY_CHECKED) && tp_grip_read(&grip, 0, &look, 8))
		reply = TP_REPLY_REMOTE_ACCESS;
	else
		*result = operate((uint64_t *)(void *)grip.addr, atomic);
	tp_key_leave(&grip);
	return reply;
}

void tp_target_refuse_locked(struct tp_qp *qp, enum tp_reply reply)
{
	bool told = qp->recv.spoiled;
	if (!tp_qp_reliable(qp->ibv.qp_type))
		return;
	int event = reply == TP_REPLY_REMOTE_ACCESS ? IBV_EVENT_QP_ACCESS_ERR : reply == TP_REPLY_INVALID_REQUEST ? IBV_EVENT_QP_REQ_ERR :
		IBV_EVENT_QP_FATAL;
	tp_target_spoil_locked(qp, IBV_WC_WR_FLUSH_ERR);
	tp_qp_fail_locked(qp, IBV_QPS_ERR, told ? -1 : event);
}

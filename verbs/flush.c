/* What happens to work that will not be done: in ERR both queues are flushed, in SQE the send queue alone. */
#include "verbs/internal.h"

static void flush_send_locked(struct tp_qp *qp)
{
	struct tp_sq *sq = &qp->sq;
	while (sq->done != sq->head) {
		const struct tp_wqe *wqe = tp_sq_at(sq, sq->done++);
		struct tp_cqe cqe = { .qp = qp, .frees = sq->done, .wc = { .wr_id = wqe->wr_id, .status = IBV_WC_WR_FLUSH_ERR,
			.opcode = tp_wqe_wc_opcode(wqe->opcode), .vendor_err = 0, .qp_num = qp->ibv.qp_num } };
		tp_counter_add(qp->port, TP_CNT_REQ_CQE_FLUSH_ERROR, 1);
		tp_cq_push(qp->send_cq, &cqe, false);
	}
	sq->exec = sq->done;
}

static void flush_receive_locked(struct tp_qp *qp)
{
	struct tp_rq *rq = &qp->rq;
	tp_target_spoil_locked(qp, IBV_WC_WR_FLUSH_ERR);
	for (;;) {
		pthread_mutex_lock(&rq->lock);
		bool any = rq->taken != atomic_load_explicit(&rq->head, memory_order_relaxed);
		struct tp_cqe cqe = { .qp = qp, .frees = 1, .is_recv = true };
		if (any)
			cqe.wc.wr_id = tp_rq_at(rq, rq->taken++)->wr_id;
		pthread_mutex_unlock(&rq->lock);
		if (!any)
			break;
		cqe.wc.status = IBV_WC_WR_FLUSH_ERR;
		cqe.wc.opcode = IBV_WC_RECV;
		cqe.wc.qp_num = qp->ibv.qp_num;
		tp_counter_add(qp->port, TP_CNT_RESP_CQE_FLUSH_ERROR, 1);
		tp_cq_push(qp->recv_cq, &cqe, false);
	}
	if (qp->srq && !qp->last_wqe) {
		qp->last_wqe = true;
		tp_event_qp(qp, IBV_EVENT_QP_LAST_WQE_REACHED);
	}
}

void tp_qp_settle_locked(struct tp_qp *qp)
{
	int state = atomic_load_explicit(&qp->state, memory_order_relaxed);
	if (qp->running || (state != IBV_QPS_ERR && state != IBV_QPS_SQE))
		return;
	if (qp->carrier && !qp->stopped) {
		qp->stopped = true;
		qp->carrier->stop(qp);
	}
	if (qp->sq.max_wr)
		flush_send_locked(qp);
	if (state == IBV_QPS_ERR)
		flush_receive_locked(qp);
}

enum ibv_wc_opcode tp_wqe_wc_opcode(uint32_t opcode)
{
	switch (opcode) {
	case IBV_WR_RDMA_WRITE: case IBV_WR_RDMA_WRITE_WITH_IMM: return IBV_WC_RDMA_WRITE;
	case IBV_WR_RDMA_READ: return IBV_WC_RDMA_READ;
	case IBV_WR_ATOMIC_CMP_AND_SWP: return IBV_WC_COMP_SWAP;
	case IBV_WR_ATOMIC_FETCH_AND_ADD: return IBV_WC_FETCH_ADD;
	case IBV_WR_LOCAL_INV: return IBV_WC_LOCAL_INV;
	case IBV_WR_BIND_MW: return IBV_WC_BIND_MW;
	default: return IBV_WC_SEND;
	}
}

static void count_error(struct tp_qp *qp, enum ibv_wc_status status)
{
	tp_counter_add(qp->port, TP_CNT_REQ_CQE_ERROR, 1);
	if (status == IBV_WC_REM_ACCESS_ERR)
		tp_counter_add(qp->port, TP_CNT_REQ_REMOTE_ACCESS_ERRORS, 1);
	else if (status == IBV_WC_REM_INV_REQ_ERR)
		tp_counter_add(qp->port, TP_CNT_REQ_REMOTE_INVALID_REQUEST, 1);
	else if (status == IBV_WC_RNR_RETRY_EXC_ERR)
		tp_counter_add(qp->port, TP_CNT_RNR_NAK_RETRY_ERR, 1);
}

void tp_sq_complete_locked(struct tp_qp *qp, enum ibv_wc_status status, uint32_t byte_len)
{
	struct tp_sq *sq = &qp->sq;
	const struct tp_wqe *wqe = tp_sq_at(sq, sq->done++);
	if (status == IBV_WC_SUCCESS && !(wqe->flags & IBV_SEND_SIGNALED))
		return;
	struct tp_cqe cqe = { .qp = qp, .frees = sq->done, .wc = { .wr_id = wqe->wr_id, .status = status,
		.opcode = tp_wqe_wc_opcode(wqe->opcode), .byte_len = byte_len, .qp_num = qp->ibv.qp_num } };
	bool pushed = tp_cq_push(qp->send_cq, &cqe, false);
	if (status != IBV_WC_SUCCESS) {
		bool stays = qp->ibv.qp_type == IBV_QPT_UC || qp->ibv.qp_type == IBV_QPT_UD;
		count_error(qp, status);
		tp_qp_fail_locked(qp, stays ? IBV_QPS_SQE : IBV_QPS_ERR, -1);
	} else if (!pushed) {
		tp_qp_fail_locked(qp, IBV_QPS_ERR, IBV_EVENT_QP_FATAL);
	}
}

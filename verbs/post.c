/* Posting: a request is checked, copied into its slot, shown to the carrier. What only shows when it is executed (keys, bounds,
 * the other side) becomes the status of its completion; what is wrong with the call itself is an errno. */
#include <errno.h>
#include <string.h>
#include "verbs/gpu.h"
#include "verbs/internal.h"

#define BIT(opcode) (1u << (opcode))
#define SENDS (BIT(IBV_WR_SEND) | BIT(IBV_WR_SEND_WITH_IMM))
#define WRITES (BIT(IBV_WR_RDMA_WRITE) | BIT(IBV_WR_RDMA_WRITE_WITH_IMM))
#define ATOMICS (BIT(IBV_WR_ATOMIC_CMP_AND_SWP) | BIT(IBV_WR_ATOMIC_FETCH_AND_ADD))
#define LOCALS (BIT(IBV_WR_LOCAL_INV) | BIT(IBV_WR_BIND_MW))

static uint32_t opcodes_of(enum ibv_qp_type type)
{
	switch (type) {
	case IBV_QPT_RC: case IBV_QPT_XRC_SEND:
		return SENDS | BIT(IBV_WR_SEND_WITH_INV) | WRITES | BIT(IBV_WR_RDMA_READ) | ATOMICS | LOCALS;
	case IBV_QPT_UC:
		return SENDS | BIT(IBV_WR_SEND_WITH_INV) | WRITES | LOCALS;
	case IBV_QPT_UD:
		return SENDS;
	default:
		return 0;
	}
}

int tp_wqe_check(struct tp_qp *qp, const struct tp_wqe *wqe)
{
	if (wqe->opcode >= 32 || !(opcodes_of(qp->ibv.qp_type) & BIT(wqe->opcode)))
		return TP_CARD_FAIL(EINVAL, "a queue pair of type %d can't do the operation %u", qp->ibv.qp_type, wqe->opcode);
	if ((wqe->flags & IBV_SEND_INLINE) && !(BIT(wqe->opcode) & (SENDS | WRITES | BIT(IBV_WR_SEND_WITH_INV))))
		return TP_CARD_FAIL(EINVAL, "the operation %u has no inline data", wqe->opcode);
	return 0;
}

bool tp_sq_room(struct tp_qp *qp, uint32_t count)
{
	struct tp_sq *sq = &qp->sq;
	/* Acquire: pairs with the release of who polled the completion (take_locked in cq.c). */
	return sq->head + count - atomic_load_explicit(&sq->tail, memory_order_acquire) < sq->max_wr;
}

int tp_wqe_copy_inline(uint8_t *to, uint64_t from, size_t bytes)
{
	int error = tp_gpu_near(from) ? tp_gpu_read_inline(from, to, bytes) : ENOENT;
	if (error == ENOENT)
		memcpy(to, (const void *)(uintptr_t)from, bytes);
	return error == ENOENT ? 0 : error;
}

static int fill_inline(struct tp_qp *qp, struct tp_wqe *wqe, const struct ibv_send_wr *wr)
{
	uint8_t *to = tp_wqe_inline(&qp->sq, wqe);
	uint32_t used = 0;
	for (int i = 0; i < wr->num_sge; i++) {
		const struct ibv_sge *sge = &wr->sg_list[i];
		if (sge->length > qp->sq.max_inline - used)
			return EINVAL;
		int error = sge->length ? tp_wqe_copy_inline(to + used, sge->addr, sge->length) : 0;
		if (error)
			return error;
		used += sge->length;
	}
	wqe->num_sge = 0;
	wqe->inline_bytes = wqe->length = used;
	return 0;
}

static int fill_data(struct tp_qp *qp, struct tp_wqe *wqe, const struct ibv_send_wr *wr)
{
	uint64_t length = 0;
	if (wr->num_sge < 0 || (uint32_t)wr->num_sge > qp->sq.max_sge)
		return EINVAL;
	if (wr->send_flags & IBV_SEND_INLINE)
		return fill_inline(qp, wqe, wr);
	for (int i = 0; i < wr->num_sge; i++)
		length += wr->sg_list[i].length;
	if (wr->num_sge)
		memcpy(wqe->sge, wr->sg_list, (size_t)wr->num_sge * sizeof(*wr->sg_list));
	wqe->num_sge = (uint32_t)wr->num_sge;
	wqe->inline_bytes = 0;
	/* Longer than any message can be: the completion says so (LOC_LEN_ERR). */
	wqe->length = (uint32_t)TP_MIN(length, (uint64_t)UINT32_MAX);
	return 0;
}

static int fill_target(struct tp_qp *qp, struct tp_wqe *wqe, const struct ibv_send_wr *wr)
{
	switch (wqe->opcode) {
	case IBV_WR_RDMA_WRITE: case IBV_WR_RDMA_WRITE_WITH_IMM: case IBV_WR_RDMA_READ:
		wqe->rdma.addr = wr->wr.rdma.remote_addr;
		wqe->rdma.rkey = wr->wr.rdma.rkey;
		break;
	case IBV_WR_ATOMIC_CMP_AND_SWP: case IBV_WR_ATOMIC_FETCH_AND_ADD:
		wqe->atomic.addr = wr->wr.atomic.remote_addr;
		wqe->atomic.compare_add = wr->wr.atomic.compare_add;
		wqe->atomic.swap = wr->wr.atomic.swap;
		wqe->atomic.rkey = wr->wr.atomic.rkey;
		break;
	case IBV_WR_BIND_MW:
		if (!wr->bind_mw.mw)
			return EINVAL;
		wqe->bind.mw = (struct tp_mw *)wr->bind_mw.mw;
		wqe->bind.rkey = wr->bind_mw.rkey;
		wqe->bind.info = wr->bind_mw.bind_info;
		break;
	default:
		break;
	}
	if (qp->ibv.qp_type == IBV_QPT_UD) {
		if (!wr->wr.ud.ah)
			return TP_CARD_FAIL(EINVAL, "a datagram needs an address handle");
		wqe->ud.av = ((struct tp_ah *)wr->wr.ud.ah)->av;
		wqe->ud.qpn = wr->wr.ud.remote_qpn;
		wqe->ud.qkey = wr->wr.ud.remote_qkey;
	}
	if (qp->ibv.qp_type == IBV_QPT_XRC_SEND)
		wqe->srqn = wr->qp_type.xrc.remote_srqn;
	return 0;
}

/* The request behind those that are published (count of them are built already). */
static int build(struct tp_qp *qp, const struct ibv_send_wr *wr, uint32_t count)
{
	if (!tp_sq_room(qp, count))
		return ENOMEM;
	struct tp_wqe *wqe = tp_sq_at(&qp->sq, qp->sq.head + count);
	wqe->wr_id = wr->wr_id;
	wqe->opcode = wr->opcode;
	wqe->flags = wr->send_flags | (qp->sq_sig_all ? IBV_SEND_SIGNALED : 0u);
	wqe->imm = wr->invalidate_rkey;     /* one union with imm_data */
	memset(wqe->carrier, 0, sizeof(wqe->carrier));
	int error = tp_wqe_check(qp, wqe);
	if (!error && BIT(wqe->opcode) & LOCALS)
		wqe->num_sge = wqe->length = wqe->inline_bytes = 0;
	else if (!error)
		error = fill_data(qp, wqe, wr);
	return error ? error : fill_target(qp, wqe, wr);
}

static bool takes_sends(const struct tp_qp *qp)
{
	int state = atomic_load_explicit(&qp->state, memory_order_relaxed);
	return state >= IBV_QPS_RTS && state <= IBV_QPS_ERR;
}

_Thread_local bool tp_qp_is_posting;

int tp_sq_publish_locked(struct tp_qp *qp, uint32_t count)
{
	if (!takes_sends(qp))
		return TP_CARD_FAIL(EINVAL, "work was posted to a queue pair that doesn't send yet (state %d): bring it to RTS first", (int)qp->state);
	if (count == 0)
		return 0;
	qp->sq.head += count;
	tp_qp_is_posting = true;
	tp_qp_run_locked(qp);
	tp_qp_is_posting = false;
	tp_qp_settle_locked(qp);
	return 0;
}

int tp_qp_post_send(struct ibv_qp *ibv, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct tp_qp *qp = tp_qp_of(ibv);
	uint32_t count = 0;
	int error = 0;
	if (!tp_context_mine(ibv->context)) {
		*bad = wr;
		return EINVAL;      /* a forked child: whoever held the lock isn't there */
	}
	if (qp->extended)
		pthread_mutex_lock(&qp->post_lock);
	pthread_mutex_lock(&qp->lock);
	if (!takes_sends(qp))
		error = tp_sq_publish_locked(qp, 0);
	while (wr && !error) {
		error = build(qp, wr, count);
		if (!error) {
			count++;
			wr = wr->next;
		}
	}
	/* Those before the bad one are done all the same. */
	if (count)
		tp_sq_publish_locked(qp, count);
	pthread_mutex_unlock(&qp->lock);
	if (qp->extended)
		pthread_mutex_unlock(&qp->post_lock);
	if (error)
		*bad = wr;
	return error;
}

int tp_qp_post_recv(struct ibv_qp *ibv, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct tp_qp *qp = tp_qp_of(ibv);
	int state = atomic_load_explicit(&qp->state, memory_order_relaxed);
	int error = 0;
	if (!tp_context_mine(ibv->context)) {
		*bad = wr;
		return EINVAL;
	}
	if (state == IBV_QPS_RESET || qp->srq || !qp->rq.max_wr) {
		*bad = wr;
		return TP_CARD_FAIL(qp->srq || state == IBV_QPS_RESET ? EINVAL : ENOMEM, "a receive was posted to a queue pair that %s",
			state == IBV_QPS_RESET ? "is in RESET" : qp->srq ? "takes its receives from a shared queue" : "has no receive queue");
	}
	error = tp_rq_post(&qp->rq, wr, bad);
	/* Moved to ERR meanwhile, or before: what was posted is flushed. */
	if (atomic_load_explicit(&qp->state, memory_order_relaxed) == IBV_QPS_ERR) {
		pthread_mutex_lock(&qp->lock);
		tp_qp_settle_locked(qp);
		pthread_mutex_unlock(&qp->lock);
	}
	return error;
}

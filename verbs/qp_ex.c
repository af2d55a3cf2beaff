/* The ibv_wr_* interface: requests are built in their slots between wr_start and wr_complete, then shown all at once. The first
 * error makes the whole batch fail. */
#include <errno.h>
#include <string.h>
#include "verbs/internal.h"

static inline struct tp_qp *qp_of(struct ibv_qp_ex *ex) { return (struct tp_qp *)ex; }

static void fail(struct tp_qp *qp, int error)
{
	if (!qp->batch.error)
		qp->batch.error = error;
	qp->batch.wqe = NULL;
}

static void wr_start(struct ibv_qp_ex *ex)
{
	struct tp_qp *qp = qp_of(ex);
	pthread_mutex_lock(&qp->post_lock);
	qp->batch.count = 0;
	qp->batch.wqe = NULL;
	qp->batch.error = 0;
}

static int wr_complete(struct ibv_qp_ex *ex)
{
	struct tp_qp *qp = qp_of(ex);
	int error = qp->batch.error;
	if (!error) {
		pthread_mutex_lock(&qp->lock);
		error = tp_sq_publish_locked(qp, qp->batch.count);
		pthread_mutex_unlock(&qp->lock);
	}
	pthread_mutex_unlock(&qp->post_lock);
	return error;
}

static void wr_abort(struct ibv_qp_ex *ex) { pthread_mutex_unlock(&qp_of(ex)->post_lock); }

/* A new request with the opcode; NULL after an error. */
static struct tp_wqe *begin(struct ibv_qp_ex *ex, enum ibv_wr_opcode opcode)
{
	struct tp_qp *qp = qp_of(ex);
	if (qp->batch.error)
		return NULL;
	if (!tp_sq_room(qp, qp->batch.count)) {
		fail(qp, ENOMEM);
		return NULL;
	}
	struct tp_wqe *wqe = tp_sq_at(&qp->sq, qp->sq.head + qp->batch.count);
	memset(wqe, 0, sizeof(*wqe));
	wqe->wr_id = ex->wr_id;
	wqe->opcode = opcode;
	wqe->flags = (ex->wr_flags & ~(unsigned)IBV_SEND_INLINE) | (qp->sq_sig_all ? IBV_SEND_SIGNALED : 0u);
	int error = tp_wqe_check(qp, wqe);
	if (error) {
		fail(qp, error);
		return NULL;
	}
	qp->batch.count++;
	qp->batch.wqe = wqe;
	return wqe;
}

static void begin_rdma(struct ibv_qp_ex *ex, enum ibv_wr_opcode opcode, uint32_t rkey, uint64_t addr, uint32_t imm)
{
	struct tp_wqe *wqe = begin(ex, opcode);
	if (!wqe)
		return;
	wqe->rdma.addr = addr;
	wqe->rdma.rkey = rkey;
	wqe->imm = imm;
}

static void begin_atomic(struct ibv_qp_ex *ex, enum ibv_wr_opcode opcode, uint32_t rkey, uint64_t addr, uint64_t compare_add, uint64_t swap)
{
	struct tp_wqe *wqe = begin(ex, opcode);
	if (!wqe)
		return;
	wqe->atomic.addr = addr;
	wqe->atomic.rkey = rkey;
	wqe->atomic.compare_add = compare_add;
	wqe->atomic.swap = swap;
}

static void begin_imm(struct ibv_qp_ex *ex, enum ibv_wr_opcode opcode, uint32_t imm)
{
	struct tp_wqe *wqe = begin(ex, opcode);
	if (wqe)
		wqe->imm = imm;
}

static void wr_atomic_cmp_swp(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr, uint64_t compare, uint64_t swap)
{
	begin_atomic(ex, IBV_WR_ATOMIC_CMP_AND_SWP, rkey, addr, compare, swap);
}
static void wr_atomic_fetch_add(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr, uint64_t add)
{
	begin_atomic(ex, IBV_WR_ATOMIC_FETCH_AND_ADD, rkey, addr, add, 0);
}
static void wr_bind_mw(struct ibv_qp_ex *ex, struct ibv_mw *mw, uint32_t rkey, const struct ibv_mw_bind_info *info)
{
	struct tp_wqe *wqe = begin(ex, IBV_WR_BIND_MW);
	if (!wqe)
		return;
	wqe->bind.mw = (struct tp_mw *)mw;
	wqe->bind.rkey = rkey;
	wqe->bind.info = *info;
}
static void wr_local_inv(struct ibv_qp_ex *ex, uint32_t rkey) { begin_imm(ex, IBV_WR_LOCAL_INV, rkey); }
static void wr_rdma_read(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr) { begin_rdma(ex, IBV_WR_RDMA_READ, rkey, addr, 0); }
static void wr_rdma_write(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr) { begin_rdma(ex, IBV_WR_RDMA_WRITE, rkey, addr, 0); }
static void wr_rdma_write_imm(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr, __be32 imm)
{
	begin_rdma(ex, IBV_WR_RDMA_WRITE_WITH_IMM, rkey, addr, imm);
}
static void wr_send(struct ibv_qp_ex *ex) { begin_imm(ex, IBV_WR_SEND, 0); }
static void wr_send_imm(struct ibv_qp_ex *ex, __be32 imm) { begin_imm(ex, IBV_WR_SEND_WITH_IMM, imm); }
static void wr_send_inv(struct ibv_qp_ex *ex, uint32_t rkey) { begin_imm(ex, IBV_WR_SEND_WITH_INV, rkey); }

static void wr_set_ud_addr(struct ibv_qp_ex *ex, struct ibv_ah *ah, uint32_t qpn, uint32_t qkey)
{
	struct tp_qp *qp = qp_of(ex);
	if (!qp->batch.wqe)
		return;
	if (!ah || qp->ibv.qp_type != IBV_QPT_UD) {
		fail(qp, EINVAL);
		return;
	}
	qp->batch.wqe->ud.av = ((struct tp_ah *)ah)->av;
	qp->batch.wqe->ud.qpn = qpn;
	qp->batch.wqe->ud.qkey = qkey;
}

static void wr_set_xrc_srqn(struct ibv_qp_ex *ex, uint32_t srqn)
{
	if (qp_of(ex)->batch.wqe)
		qp_of(ex)->batch.wqe->srqn = srqn;
}

static void add_inline(struct tp_qp *qp, const void *from, size_t bytes)
{
	struct tp_wqe *wqe = qp->batch.wqe;
	if (!wqe)
		return;
	if (bytes > qp->sq.max_inline - wqe->inline_bytes) {
		fail(qp, ENOMEM);
		return;
	}
	int error = bytes ? tp_wqe_copy_inline(tp_wqe_inline(&qp->sq, wqe) + wqe->inline_bytes, (uintptr_t)from, bytes) : 0;
	if (error) {
		fail(qp, error);
		return;
	}
	wqe->inline_bytes += (uint32_t)bytes;
	wqe->length = wqe->inline_bytes;
	wqe->flags |= IBV_SEND_INLINE;
	error = tp_wqe_check(qp, wqe);
	if (error)
		fail(qp, error);
}

static void wr_set_inline_data(struct ibv_qp_ex *ex, void *addr, size_t bytes) { add_inline(qp_of(ex), addr, bytes); }

static void wr_set_inline_data_list(struct ibv_qp_ex *ex, size_t count, const struct ibv_data_buf *list)
{
	for (size_t i = 0; i < count; i++)
		add_inline(qp_of(ex), list[i].addr, list[i].length);
}

static void wr_set_sge_list(struct ibv_qp_ex *ex, size_t count, const struct ibv_sge *list)
{
	struct tp_qp *qp = qp_of(ex);
	struct tp_wqe *wqe = qp->batch.wqe;
	uint64_t length = 0;
	if (!wqe)
		return;
	if (count > qp->sq.max_sge) {
		fail(qp, ENOMEM);
		return;
	}
	for (size_t i = 0; i < count; i++)
		length += list[i].length;
	if (count)
		memcpy(wqe->sge, list, count * sizeof(*list));
	wqe->num_sge = (uint32_t)count;
	wqe->length = (uint32_t)TP_MIN(length, (uint64_t)UINT32_MAX);
}

static void wr_set_sge(struct ibv_qp_ex *ex, uint32_t lkey, uint64_t addr, uint32_t length)
{
	struct ibv_sge sge = { .addr = addr, .length = length, .lkey = lkey };
	wr_set_sge_list(ex, 1, &sge);
}

/* Only what the QP was made for is there: a call of anything else is a program's error that must show at once. */
void tp_qp_fill_ops(struct tp_qp *qp)
{
	struct ibv_qp_ex *ex = &qp->ex;
	uint64_t ops = qp->send_ops;
	ex->wr_start = wr_start;
	ex->wr_complete = wr_complete;
	ex->wr_abort = wr_abort;
	ex->wr_set_sge = wr_set_sge;
	ex->wr_set_sge_list = wr_set_sge_list;
	ex->wr_set_inline_data = wr_set_inline_data;
	ex->wr_set_inline_data_list = wr_set_inline_data_list;
	if (qp->ibv.qp_type == IBV_QPT_UD)
		ex->wr_set_ud_addr = wr_set_ud_addr;
	if (qp->ibv.qp_type == IBV_QPT_XRC_SEND)
		ex->wr_set_xrc_srqn = wr_set_xrc_srqn;
#define OP(flag, entry) ex->entry = ops & IBV_QP_EX_WITH_##flag ? entry : NULL
	OP(ATOMIC_CMP_AND_SWP, wr_atomic_cmp_swp);
	OP(ATOMIC_FETCH_AND_ADD, wr_atomic_fetch_add);
	OP(BIND_MW, wr_bind_mw);
	OP(LOCAL_INV, wr_local_inv);
	OP(RDMA_READ, wr_rdma_read);
	OP(RDMA_WRITE, wr_rdma_write);
	OP(RDMA_WRITE_WITH_IMM, wr_rdma_write_imm);
	OP(SEND, wr_send);
	OP(SEND_WITH_IMM, wr_send_imm);
	OP(SEND_WITH_INV, wr_send_inv);
#undef OP
}

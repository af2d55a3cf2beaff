/* Queue pairs: made, opened anew (XRC), queried, destroyed. Their states are in qp_state.c, their requests in post.c. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "verbs/internal.h"
#include "verbs/path.h"

static struct tp_index qps = { .lock = PTHREAD_MUTEX_INITIALIZER, .mask = (1u << TP_CARD_QP_SLOTS_LOG) - 1 };
#define QP_PLACE(qpn) ((qpn) & ((1u << TP_CARD_QP_SLOTS_LOG) - 1))
#define FIRST_PLACE 16u             /* below: QPNs with a meaning of their own (1: the connection manager's) */

void tp_qp_forget(void) { tp_index_forget(&qps); }
void tp_qp_put(struct tp_qp *qp) { tp_index_put(&qps, QP_PLACE(qp->ibv.qp_num)); }

struct tp_qp *tp_qp_get(uint32_t qpn)
{
	struct tp_qp *qp = tp_index_get(&qps, QP_PLACE(qpn));
	if (qp && qp->ibv.qp_num != qpn) {
		tp_qp_put(qp);
		return NULL;
	}
	return qp;
}

static bool is_xrc(enum ibv_qp_type type) { return type == IBV_QPT_XRC_SEND || type == IBV_QPT_XRC_RECV; }

static int check_cap(const struct ibv_qp_cap *cap)
{
	if (cap->max_send_wr > TP_CARD_QP_WR || cap->max_recv_wr > TP_CARD_QP_WR)
		return TP_CARD_FAIL(EINVAL, "a queue pair can't have %u send and %u receive requests: %d at most", cap->max_send_wr, cap->max_recv_wr,
			TP_CARD_QP_WR);
	if (cap->max_send_sge > TP_CARD_SGE || cap->max_recv_sge > TP_CARD_SGE)
		return TP_CARD_FAIL(EINVAL, "a request can't have %u send and %u receive segments: %d at most", cap->max_send_sge, cap->max_recv_sge,
			TP_CARD_SGE);
	if (cap->max_inline_data > TP_CARD_INLINE)
		return TP_CARD_FAIL(EINVAL, "a request can't have %u bytes of inline data: %d at most", cap->max_inline_data, TP_CARD_INLINE);
	return 0;
}

#define SEND_OPS_RC (IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM | \
	IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD | IBV_QP_EX_WITH_LOCAL_INV | \
	IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_SEND_WITH_INV)
#define SEND_OPS_UC (IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM | \
	IBV_QP_EX_WITH_LOCAL_INV | IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_SEND_WITH_INV)
#define SEND_OPS_UD (IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM)

static uint64_t possible_send_ops(enum ibv_qp_type type)
{
	switch (type) {
	case IBV_QPT_RC: case IBV_QPT_XRC_SEND: return SEND_OPS_RC;
	case IBV_QPT_UC: return SEND_OPS_UC;
	case IBV_QPT_UD: return SEND_OPS_UD;
	default: return 0;
	}
}

static int check_attr(const struct ibv_qp_init_attr_ex *attr)
{
	const uint32_t known = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_XRCD | IBV_QP_INIT_ATTR_CREATE_FLAGS | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
	bool receiver = attr->qp_type == IBV_QPT_XRC_RECV, sender = attr->qp_type == IBV_QPT_XRC_SEND;
	if (!(attr->qp_type >= IBV_QPT_RC && attr->qp_type <= IBV_QPT_UD) && !is_xrc(attr->qp_type))
		return TP_CARD_FAIL(EOPNOTSUPP, "queue pairs of type %d need hardware: there are RC, UC, UD and XRC", attr->qp_type);
	if (attr->comp_mask & ~known)
		return TP_CARD_FAIL(EOPNOTSUPP, "a queue pair was asked for with the attributes 0x%x, which need hardware", attr->comp_mask & ~known);
	if (!receiver && (!(attr->comp_mask & IBV_QP_INIT_ATTR_PD) || !attr->pd || !attr->send_cq || (!sender && !attr->recv_cq)))
		return TP_CARD_FAIL(EINVAL, "a queue pair needs a protection domain, a send and a receive completion queue");
	if (receiver && (!(attr->comp_mask & IBV_QP_INIT_ATTR_XRCD) || !attr->xrcd))
		return TP_CARD_FAIL(EINVAL, "an XRC target queue pair needs an XRC domain");
	if ((attr->comp_mask & IBV_QP_INIT_ATTR_CREATE_FLAGS) && (attr->create_flags & ~(uint32_t)IBV_QP_CREATE_BLOCK_SELF_MCAST_LB))
		return TP_CARD_FAIL(EOPNOTSUPP, "a queue pair was asked for with the flags 0x%x, which need hardware", attr->create_flags);
	if ((attr->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) && (attr->send_ops_flags & ~possible_send_ops(attr->qp_type)))
		return TP_CARD_FAIL(EOPNOTSUPP, "queue pairs of type %d can't have the send operations 0x%llx", attr->qp_type,
			(unsigned long long)(attr->send_ops_flags & ~possible_send_ops(attr->qp_type)));
	if (attr->srq && ((struct tp_srq *)attr->srq)->type != IBV_SRQT_BASIC)
		return TP_CARD_FAIL(EINVAL, "only an XRC target uses an XRC shared receive queue, and by its number");
	return check_cap(&attr->cap);
}

static int init_queues(struct tp_qp *qp, struct ibv_qp_init_attr_ex *attr)
{
	struct ibv_qp_cap *cap = &attr->cap;
	if (attr->qp_type == IBV_QPT_XRC_RECV)
		cap->max_send_wr = cap->max_send_sge = cap->max_inline_data = 0;
	if (is_xrc(attr->qp_type) || attr->srq)
		cap->max_recv_wr = cap->max_recv_sge = 0;
	else
		cap->max_recv_sge = TP_MAX(cap->max_recv_sge, 1u);
	int error = tp_sq_init(&qp->sq, cap);
	return error ? error : tp_rq_init(&qp->rq, cap->max_recv_wr, cap->max_recv_sge);
}

static void hold(_Atomic int *users, int by) { atomic_fetch_add_explicit(users, by, memory_order_acq_rel); }

/* Counts the QP at (+1) or off (-1) what it belongs to. */
static void hold_all(struct tp_qp *qp, int by)
{
	if (qp->pd)
		hold(&qp->pd->users, by);
	if (qp->send_cq)
		hold(&qp->send_cq->users, by);
	if (qp->recv_cq)
		hold(&qp->recv_cq->users, by);
	if (qp->srq)
		hold(&qp->srq->users, by);
	if (qp->xrcd)
		hold(&qp->xrcd->users, by);
	hold(&tp_context_of(qp->ibv.context)->objects, by);
}

static void init_fields(struct tp_qp *qp, struct ibv_context *context, const struct ibv_qp_init_attr_ex *attr)
{
	bool receiver = attr->qp_type == IBV_QPT_XRC_RECV;
	struct ibv_qp *ibv = &qp->ibv;
	*ibv = (struct ibv_qp){ .context = context, .qp_context = attr->qp_context, .pd = receiver ? NULL : attr->pd,
		.send_cq = receiver ? NULL : attr->send_cq, .recv_cq = is_xrc(attr->qp_type) ? NULL : attr->recv_cq, .srq = attr->srq,
		.state = IBV_QPS_RESET, .qp_type = attr->qp_type };
	pthread_mutex_init(&ibv->mutex, NULL);
	pthread_cond_init(&ibv->cond, NULL);
	pthread_mutex_init(&qp->lock, NULL);
	pthread_mutex_init(&qp->post_lock, NULL);
	pthread_cond_init(&qp->idle, NULL);
	qp->pd = ibv->pd ? tp_pd_of(ibv->pd) : NULL;
	qp->send_cq = (struct tp_cq *)ibv->send_cq;
	qp->recv_cq = (struct tp_cq *)ibv->recv_cq;
	qp->srq = (struct tp_srq *)attr->srq;
	qp->xrcd = attr->comp_mask & IBV_QP_INIT_ATTR_XRCD ? (struct tp_xrcd *)attr->xrcd : NULL;
	qp->sq_sig_all = attr->sq_sig_all;
	qp->create_flags = attr->comp_mask & IBV_QP_INIT_ATTR_CREATE_FLAGS ? attr->create_flags : 0;
	qp->attr.cap = attr->cap;
	qp->handles = 1;
	atomic_init(&qp->state, IBV_QPS_RESET);
	if (attr->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) {
		qp->extended = true;
		qp->send_ops = attr->send_ops_flags;
		tp_qp_fill_ops(qp);
	}
}

static int number(struct tp_qp *qp)
{
	int slot = tp_engine_slot();
	if (slot < 0)
		return -slot;
	int error = tp_index_add(&qps, FIRST_PLACE, qp, (uint32_t)slot << TP_CARD_QP_SLOTS_LOG, &qp->ibv.qp_num);
	if (error)
		return TP_CARD_FAIL(error, "no queue pair number is left");
	tp_path_named(qp);
	return 0;
}

struct ibv_qp *tp_qp_create(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr)
{
	int error = check_attr(attr);
	if (!error && !tp_context_mine(context))
		error = TP_CARD_FAIL(EINVAL, "a forked child can't make queue pairs on what its parent opened: it must open the device itself");
	struct tp_qp *qp = error ? NULL : tp_alloc(1, sizeof(*qp), "a queue pair");
	if (!error)
		error = qp ? init_queues(qp, attr) : ENOMEM;
	if (!error) {
		init_fields(qp, context, attr);
		error = number(qp);
	}
	if (error) {
		if (qp) {
			tp_sq_free(&qp->sq);
			tp_rq_free(&qp->rq);
		}
		free(qp);
		errno = error;
		return NULL;
	}
	hold_all(qp, 1);
	tp_gid_watch();
	return &qp->ibv;
}

/* Another handle for an XRC target, with a context of its own; the QP lives until the last handle goes. */
struct ibv_qp *tp_qp_open(struct ibv_context *context, struct ibv_qp_open_attr *attr)
{
	const uint32_t needed = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE;
	struct tp_qp *real = (attr->comp_mask & needed) == needed && attr->qp_type == IBV_QPT_XRC_RECV ? tp_qp_get(attr->qp_num) : NULL;
	if (!real || real->ibv.qp_type != IBV_QPT_XRC_RECV || real->xrcd->id != ((struct tp_xrcd *)attr->xrcd)->id) {
		if (real)
			tp_qp_put(real);
		errno = TP_CARD_FAIL(EINVAL, "there is no XRC target queue pair %u in that domain", attr->qp_num);
		return NULL;
	}
	struct tp_qp *handle = tp_alloc(1, sizeof(*handle), "a queue pair's handle");
	if (handle) {
		pthread_mutex_lock(&real->lock);
		real->handles++;
		pthread_mutex_unlock(&real->lock);
		handle->real = real;
		handle->ibv = (struct ibv_qp){ .context = context, .qp_num = attr->qp_num, .qp_type = attr->qp_type,
			.qp_context = attr->comp_mask & IBV_QP_OPEN_ATTR_CONTEXT ? attr->qp_context : NULL };
		pthread_mutex_init(&handle->ibv.mutex, NULL);
		pthread_cond_init(&handle->ibv.cond, NULL);
	} else {
		errno = ENOMEM;
	}
	tp_qp_put(real);
	return handle ? &handle->ibv : NULL;
}

int tp_qp_query(struct ibv_qp *ibv, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init)
{
	struct tp_qp *qp = tp_qp_of(ibv);
	(void)mask;
	if (!tp_context_mine(ibv->context))
		return EINVAL;
	pthread_mutex_lock(&qp->lock);
	*attr = qp->attr;
	attr->qp_state = attr->cur_qp_state = (enum ibv_qp_state)atomic_load_explicit(&qp->state, memory_order_relaxed);
	attr->sq_psn = qp->send_psn;
	attr->rq_psn = qp->recv_psn;
	attr->sq_draining = attr->qp_state == IBV_QPS_SQD && (qp->running || qp->sq.done != qp->sq.exec);
	*init = (struct ibv_qp_init_attr){ .qp_context = ibv->qp_context, .send_cq = qp->ibv.send_cq, .recv_cq = qp->ibv.recv_cq,
		.srq = qp->ibv.srq, .cap = qp->attr.cap, .qp_type = qp->ibv.qp_type, .sq_sig_all = qp->sq_sig_all };
	pthread_mutex_unlock(&qp->lock);
	return 0;
}

/* Leaves the carrier: nothing is sent, answered or timed any more. */
static void quiesce(struct tp_qp *qp)
{
	pthread_mutex_lock(&qp->lock);
	atomic_store_explicit(&qp->state, IBV_QPS_RESET, memory_order_relaxed);
	while (qp->running)
		pthread_cond_wait(&qp->idle, &qp->lock);
	tp_qp_leave_carrier_locked(qp);
	tp_target_forget_locked(qp);
	pthread_mutex_unlock(&qp->lock);
}

static void free_qp(struct tp_qp *qp)
{
	tp_mcast_leave_all(qp);
	quiesce(qp);
	tp_path_unnamed(qp);
	tp_index_remove(&qps, QP_PLACE(qp->ibv.qp_num));
	tp_event_drop(tp_context_of(qp->ibv.context), qp, &qp->reported, &qp->ibv.mutex, &qp->ibv.cond, &qp->ibv.events_completed);
	if (qp->send_cq)
		tp_cq_purge(qp->send_cq, qp);
	if (qp->recv_cq && qp->recv_cq != qp->send_cq)
		tp_cq_purge(qp->recv_cq, qp);
	hold_all(qp, -1);
	tp_sq_free(&qp->sq);
	tp_rq_free(&qp->rq);
	free(qp);
}

int tp_qp_destroy(struct ibv_qp *ibv)
{
	struct tp_qp *handle = (struct tp_qp *)ibv, *qp = tp_qp_of(ibv);
	if (!tp_context_mine(ibv->context))
		return 0;       /* a forked child: it stays, inert */
	pthread_mutex_lock(&qp->lock);
	bool last = --qp->handles == 0;
	pthread_mutex_unlock(&qp->lock);
	if (handle != qp)
		free(handle);
	if (last)
		free_qp(qp);
	return 0;
}

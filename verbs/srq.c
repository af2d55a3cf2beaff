/* Shared receive queues, found by number (XRC names them on the wire). */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "verbs/internal.h"

static struct tp_index srqs = { .lock = PTHREAD_MUTEX_INITIALIZER, .mask = (1u << 15) - 1 };

void tp_srq_forget(void) { tp_index_forget(&srqs); }
struct tp_srq *tp_srq_get(uint32_t number) { return tp_index_get(&srqs, number); }
void tp_srq_put(struct tp_srq *srq) { tp_index_put(&srqs, srq->number); }

static int check_attr(const struct ibv_srq_init_attr_ex *attr)
{
	const uint32_t known = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ | IBV_SRQ_INIT_ATTR_TM;
	const uint32_t xrc = IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ;
	enum ibv_srq_type type = attr->comp_mask & IBV_SRQ_INIT_ATTR_TYPE ? attr->srq_type : IBV_SRQT_BASIC;
	if ((attr->comp_mask & ~known) || !(attr->comp_mask & IBV_SRQ_INIT_ATTR_PD) || (type == IBV_SRQT_XRC && (attr->comp_mask & xrc) != xrc))
		return TP_CARD_FAIL(EINVAL, "a shared receive queue of type %d can't be made from the attributes 0x%x", type, attr->comp_mask);
	if (type != IBV_SRQT_BASIC && type != IBV_SRQT_XRC)
		return TP_CARD_FAIL(EOPNOTSUPP, "shared receive queues of type %d (tag matching) need hardware", type);
	if (attr->attr.max_wr < 1 || attr->attr.max_wr > TP_CARD_QP_WR || attr->attr.max_sge > TP_CARD_SGE)
		return TP_CARD_FAIL(EINVAL, "a shared receive queue can't have %u requests of %u segments: 1 to %d, %d at most", attr->attr.max_wr,
			attr->attr.max_sge, TP_CARD_QP_WR, TP_CARD_SGE);
	return 0;
}

static int init(struct tp_srq *srq, struct ibv_context *context, const struct ibv_srq_init_attr_ex *attr)
{
	int error = tp_rq_init(&srq->rq, attr->attr.max_wr, attr->attr.max_sge);
	if (error)
		return error;
	srq->ibv = (struct ibv_srq){ .context = context, .srq_context = attr->srq_context, .pd = attr->pd };
	pthread_mutex_init(&srq->ibv.mutex, NULL);
	pthread_cond_init(&srq->ibv.cond, NULL);
	srq->type = attr->comp_mask & IBV_SRQ_INIT_ATTR_TYPE ? attr->srq_type : IBV_SRQT_BASIC;
	srq->pd = tp_pd_of(attr->pd);
	srq->limit = attr->attr.srq_limit;
	if (srq->type == IBV_SRQT_XRC) {
		srq->xrcd = (struct tp_xrcd *)attr->xrcd;
		srq->cq = (struct tp_cq *)attr->cq;
	}
	return tp_index_add(&srqs, 1, srq, 0, &srq->number);
}

struct ibv_srq *tp_srq_create_ex(struct ibv_context *context, struct ibv_srq_init_attr_ex *attr)
{
	int error = check_attr(attr);
	struct tp_srq *srq = error ? NULL : tp_alloc(1, sizeof(*srq), "a shared receive queue");
	if (!error)
		error = srq ? init(srq, context, attr) : ENOMEM;
	if (error) {
		if (srq)
			tp_rq_free(&srq->rq);
		free(srq);
		errno = error;
		return NULL;
	}
	atomic_fetch_add_explicit(&srq->pd->users, 1, memory_order_relaxed);
	if (srq->xrcd)
		atomic_fetch_add_explicit(&srq->xrcd->users, 1, memory_order_relaxed);
	if (srq->cq)
		atomic_fetch_add_explicit(&srq->cq->users, 1, memory_order_relaxed);
	atomic_fetch_add_explicit(&tp_context_of(context)->objects, 1, memory_order_relaxed);
	attr->attr.max_sge = srq->rq.max_sge;
	return &srq->ibv;
}

struct ibv_srq *tp_srq_create(struct ibv_pd *pd, struct ibv_srq_init_attr *attr)
{
	struct ibv_srq_init_attr_ex wide = { .srq_context = attr->srq_context, .attr = attr->attr, .comp_mask = IBV_SRQ_INIT_ATTR_PD, .pd = pd };
	struct ibv_srq *srq = tp_srq_create_ex(pd->context, &wide);
	if (srq)
		attr->attr = wide.attr;
	return srq;
}

/* The lock is held: copies what is posted and not taken into a larger or smaller ring. */
static int resize_locked(struct tp_rq *rq, uint32_t max_wr)
{
	struct tp_rq now;
	uint32_t head = atomic_load_explicit(&rq->head, memory_order_relaxed);
	if (max_wr < 1 || max_wr > TP_CARD_QP_WR || head - rq->taken > max_wr)
		return EINVAL;
	if (tp_rq_init(&now, max_wr, rq->max_sge))
		return ENOMEM;
	for (uint32_t i = rq->taken; i != head; i++)
		memcpy(tp_rq_at(&now, i), tp_rq_at(rq, i), rq->stride);
	free(rq->slots);
	rq->slots = now.slots;
	rq->mask = now.mask;
	rq->max_wr = max_wr;
	return 0;
}

int tp_srq_modify(struct ibv_srq *ibv, struct ibv_srq_attr *attr, int mask)
{
	struct tp_srq *srq = (struct tp_srq *)ibv;
	int error = mask & ~(IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT) ? EINVAL : 0;
	pthread_mutex_lock(&srq->rq.lock);
	if (!error && (mask & IBV_SRQ_LIMIT) && attr->srq_limit > (mask & IBV_SRQ_MAX_WR ? attr->max_wr : srq->rq.max_wr))
		error = EINVAL;
	if (!error && (mask & IBV_SRQ_MAX_WR))
		error = resize_locked(&srq->rq, attr->max_wr);
	if (!error && (mask & IBV_SRQ_LIMIT))
		srq->limit = attr->srq_limit;
	pthread_mutex_unlock(&srq->rq.lock);
	return error;
}

int tp_srq_query(struct ibv_srq *ibv, struct ibv_srq_attr *attr)
{
	struct tp_srq *srq = (struct tp_srq *)ibv;
	pthread_mutex_lock(&srq->rq.lock);
	*attr = (struct ibv_srq_attr){ .max_wr = srq->rq.max_wr, .max_sge = srq->rq.max_sge, .srq_limit = srq->limit };
	pthread_mutex_unlock(&srq->rq.lock);
	return 0;
}

int tp_srq_destroy(struct ibv_srq *ibv)
{
	struct tp_srq *srq = (struct tp_srq *)ibv;
	if (!tp_context_mine(ibv->context))
		return 0;       /* a forked child: it stays, inert */
	int users = atomic_load_explicit(&srq->users, memory_order_acquire);
	if (users)
		return TP_CARD_FAIL(EBUSY, "a shared receive queue can't go while %d queue pairs use it", users);
	tp_index_remove(&srqs, srq->number);
	tp_event_drop(tp_context_of(ibv->context), srq, &srq->reported, &ibv->mutex, &ibv->cond, &ibv->events_completed);
	atomic_fetch_sub_explicit(&srq->pd->users, 1, memory_order_release);
	if (srq->xrcd)
		atomic_fetch_sub_explicit(&srq->xrcd->users, 1, memory_order_release);
	if (srq->cq)
		atomic_fetch_sub_explicit(&srq->cq->users, 1, memory_order_release);
	atomic_fetch_sub_explicit(&tp_context_of(ibv->context)->objects, 1, memory_order_relaxed);
	tp_rq_free(&srq->rq);
	free(srq);
	return 0;
}

int tp_srq_post(struct ibv_srq *ibv, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	return tp_rq_post(&((struct tp_srq *)ibv)->rq, wr, bad);
}

int tp_srq_number(struct ibv_srq *ibv, uint32_t *number)
{
	struct tp_srq *srq = (struct tp_srq *)ibv;
	if (srq->type != IBV_SRQT_XRC)
		return EOPNOTSUPP;
	*number = srq->number;
	return 0;
}

/* Completion queues: a ring of completions. Producers and pollers hold the lock; that the ring is empty is seen without it. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "verbs/fault.h"
#include "verbs/internal.h"

static uint32_t ring_size(uint32_t cqe)
{
	uint32_t size = 16;
	while (size < cqe)
		size *= 2;
	return size;
}

int tp_cq_init(struct tp_cq *cq, struct ibv_context *context, uint32_t cqe, void *cq_context, struct ibv_comp_channel *channel,
	uint32_t vector)
{
	if (cqe < 1 || cqe >= TP_CARD_CQE)
		return TP_CARD_FAIL(EINVAL, "a completion queue can't have %u entries: 1 to %d", cqe, TP_CARD_CQE - 1);
	if (vector >= (uint32_t)context->num_comp_vectors)
		return TP_CARD_FAIL(EINVAL, "there is no completion vector %u: 0 to %d", vector, context->num_comp_vectors - 1);
	cq->size = ring_size(cqe);
	cq->ring = tp_alloc(cq->size, sizeof(*cq->ring), "a completion queue");
	if (!cq->ring)
		return ENOMEM;
	cq->ibv.context = context;
	cq->ibv.channel = channel;
	cq->ibv.cq_context = cq_context;
	cq->ibv.cqe = (int)cqe;
	pthread_mutex_init(&cq->ibv.mutex, NULL);
	pthread_cond_init(&cq->ibv.cond, NULL);
	pthread_mutex_init(&cq->lock, NULL);
	pthread_mutex_init(&cq->poll_lock, NULL);
	if (channel) {
		struct tp_channel *its = (struct tp_channel *)channel;
		pthread_mutex_lock(&its->lock);
		its->users++;
		channel->refcnt++;
		pthread_mutex_unlock(&its->lock);
	}
	atomic_fetch_add_explicit(&tp_context_of(context)->objects, 1, memory_order_relaxed);
	return 0;
}

struct ibv_cq *tp_cq_create(struct ibv_context *context, int cqe, void *cq_context, struct ibv_comp_channel *channel, int vector)
{
	struct tp_cq *cq = tp_alloc(1, sizeof(*cq), "a completion queue");
	int error = cq ? tp_cq_init(cq, context, (uint32_t)TP_MAX(cqe, 0), cq_context, channel, (uint32_t)vector) : ENOMEM;
	if (error) {
		free(cq);
		errno = error;
		return NULL;
	}
	return &cq->ibv;
}

int tp_cq_destroy(struct ibv_cq *ibv)
{
	struct tp_cq *cq = (struct tp_cq *)ibv;
	if (!tp_context_mine(ibv->context))
		return 0;       /* a forked child: it stays, inert */
	int users = atomic_load_explicit(&cq->users, memory_order_acquire);
	if (users)
		return TP_CARD_FAIL(EBUSY, "a completion queue can't go while %d work queues use it", users);
	if (ibv->channel)
		tp_channel_drop((struct tp_channel *)ibv->channel, cq);
	tp_event_drop(tp_context_of(ibv->context), cq, &cq->reported_async, &ibv->mutex, &ibv->cond, &ibv->async_events_completed);
	if (cq->parent)
		atomic_fetch_sub_explicit(&cq->parent->users, 1, memory_order_release);
	atomic_fetch_sub_explicit(&tp_context_of(ibv->context)->objects, 1, memory_order_relaxed);
	free(cq->ring);
	free(cq);
	return 0;
}

int tp_cq_resize(struct ibv_cq *ibv, int cqe)
{
	struct tp_cq *cq = (struct tp_cq *)ibv;
	if (cqe < 1 || cqe >= TP_CARD_CQE)
		return TP_CARD_FAIL(EINVAL, "a completion queue can't be resized to %d entries: 1 to %d", cqe, TP_CARD_CQE - 1);
	uint32_t size = ring_size((uint32_t)cqe);
	struct tp_cqe *ring = tp_alloc(size, sizeof(*ring), "a completion queue");
	if (!ring)
		return ENOMEM;
	pthread_mutex_lock(&cq->lock);
	uint32_t head = atomic_load_explicit(&cq->head, memory_order_relaxed), tail = atomic_load_explicit(&cq->tail, memory_order_relaxed);
	int error = head - tail > (uint32_t)cqe ? EINVAL : 0;
	if (!error) {
		for (uint32_t i = tail; i != head; i++)
			ring[i & (size - 1)] = cq->ring[i & (cq->size - 1)];
		struct tp_cqe *old = cq->ring;
		cq->ring = ring;
		cq->size = size;
		ibv->cqe = cqe;
		ring = old;
	}
	pthread_mutex_unlock(&cq->lock);
	free(ring);
	if (error)
		TP_WARN("a completion queue can't shrink to %d entries: it holds %u completions", cqe, head - tail);
	return error;
}

static void overrun_locked(struct tp_cq *cq)
{
	if (cq->overrun)
		return;
	cq->overrun = true;
	TP_WARN("completion queue of %d entries overran on %s: its program polls too rarely, or it is too small for the work queues "
		"that use it", cq->ibv.cqe, cq->ibv.context->device->name);
	tp_event_cq(cq, IBV_EVENT_CQ_ERR);
}

/* A fault on demand: as if the card had found its queue damaged. */
static void fail_locked(struct tp_cq *cq)
{
	cq->overrun = true;
	TP_WARN("completion queue of %d entries failed on %s: a fault on demand", cq->ibv.cqe, cq->ibv.context->device->name);
	tp_event_cq(cq, IBV_EVENT_CQ_ERR);
}

bool tp_cq_push(struct tp_cq *cq, const struct tp_cqe *cqe, bool solicited)
{
	pthread_mutex_lock(&cq->lock);
	uint32_t head = atomic_load_explicit(&cq->head, memory_order_relaxed), tail = atomic_load_explicit(&cq->tail, memory_order_relaxed);
	if (!cq->overrun && tp_fault(TP_FAULT_CQ, cq->ibv.context->device->name, head))
		fail_locked(cq);
	bool room = head - tail < (uint32_t)cq->ibv.cqe && !cq->overrun;
	if (room) {
		struct tp_cqe *slot = &cq->ring[head & (cq->size - 1)];
		*slot = *cqe;
		if (cq->stamped)
			slot->when_ns = tp_clock_ns();
		/* Release: pairs with the acquire in tp_cq_empty. */
		atomic_store_explicit(&cq->head, head + 1, memory_order_release);
	} else if (!cq->ignore_overrun) {
		overrun_locked(cq);
	}
	if (room && cq->armed && (cq->armed == 1 || solicited || cqe->wc.status != IBV_WC_SUCCESS)) {
		cq->armed = 0;
		if (cq->ibv.channel)
			tp_channel_raise((struct tp_channel *)cq->ibv.channel, cq);
	}
	pthread_mutex_unlock(&cq->lock);
	return room || cq->ignore_overrun;
}

void tp_cq_purge(struct tp_cq *cq, struct tp_qp *qp)
{
	pthread_mutex_lock(&cq->lock);
	uint32_t head = atomic_load_explicit(&cq->head, memory_order_relaxed), tail = atomic_load_explicit(&cq->tail, memory_order_relaxed);
	uint32_t to = tail;
	for (uint32_t i = tail; i != head; i++) {
		struct tp_cqe *from = &cq->ring[i & (cq->size - 1)];
		if (from->qp != qp)
			cq->ring[to++ & (cq->size - 1)] = *from;
	}
	atomic_store_explicit(&cq->head, to, memory_order_release);
	pthread_mutex_unlock(&cq->lock);
}

static bool is_empty(struct tp_cq *cq)
{
	return atomic_load_explicit(&cq->head, memory_order_acquire) == atomic_load_explicit(&cq->tail, memory_order_relaxed);
}

/* A polled completion gives the slots of its work queue back. */
static void take_locked(struct tp_cq *cq, struct tp_cqe *out)
{
	uint32_t tail = atomic_load_explicit(&cq->tail, memory_order_relaxed);
	*out = cq->ring[tail & (cq->size - 1)];
	atomic_store_explicit(&cq->tail, tail + 1, memory_order_relaxed);
	if (!out->qp)
		return;
	if (!out->is_recv)
		atomic_store_explicit(&out->qp->sq.tail, out->frees, memory_order_release);
	else if (out->frees)
		atomic_fetch_add_explicit(&out->qp->rq.tail, 1, memory_order_release);
}

bool tp_cq_take(struct tp_cq *cq, struct tp_cqe *out)
{
	if (is_empty(cq)) {
		tp_progress_poll();
		if (is_empty(cq))
			return false;
	}
	if (!tp_context_mine(cq->ibv.context))
		return false;
	pthread_mutex_lock(&cq->lock);
	bool any = !is_empty(cq);
	if (any)
		take_locked(cq, out);
	pthread_mutex_unlock(&cq->lock);
	return any;
}

int tp_cq_poll(struct ibv_cq *ibv, int count, struct ibv_wc *wc)
{
	struct tp_cq *cq = (struct tp_cq *)ibv;
	int done = 0;
	if (is_empty(cq)) {
		tp_progress_poll();
		if (is_empty(cq))
			return 0;
	}
	if (!tp_context_mine(ibv->context))
		return -EINVAL; /* a forked child: whoever held the lock isn't there */
	pthread_mutex_lock(&cq->lock);
	for (; done < count && !is_empty(cq); done++) {
		struct tp_cqe cqe;
		take_locked(cq, &cqe);
		wc[done] = cqe.wc;
	}
	pthread_mutex_unlock(&cq->lock);
	return done;
}

int tp_cq_notify(struct ibv_cq *ibv, int solicited_only)
{
	struct tp_cq *cq = (struct tp_cq *)ibv;
	if (!tp_context_mine(ibv->context))
		return EINVAL;
	pthread_mutex_lock(&cq->lock);
	/* Armed for any completion stays so: the wider request counts. */
	if (cq->armed != 1)
		cq->armed = solicited_only ? 2 : 1;
	pthread_mutex_unlock(&cq->lock);
	tp_progress_arm();
	return 0;
}

int tp_cq_modify(struct ibv_cq *ibv, struct ibv_modify_cq_attr *attr)
{
	struct tp_cq *cq = (struct tp_cq *)ibv;
	if (attr->attr_mask & ~(uint32_t)IBV_CQ_ATTR_MODERATE)
		return EOPNOTSUPP;
	pthread_mutex_lock(&cq->lock);
	cq->moderate_count = attr->moderate.cq_count;
	cq->moderate_period = attr->moderate.cq_period;
	pthread_mutex_unlock(&cq->lock);
	return 0;
}

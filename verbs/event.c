/* Asynchronous events. async_fd is an eventfd that counts the queued events: it changes only under event_lock, together with
 * the list, so a reader that holds the lock and sees an event never blocks on it. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "verbs/internal.h"

void tp_event_queue(struct tp_context *context, const struct ibv_async_event *what, uint32_t *reported)
{
	static const uint64_t one = 1;
	struct tp_event *event = tp_alloc(1, sizeof(*event), "an asynchronous event");
	if (!event)
		return;
	event->event = *what;
	event->reported = reported;
	pthread_mutex_lock(&context->event_lock);
	*context->events_end = event;
	context->events_end = &event->next;
	if (write(context->verbs.context.async_fd, &one, sizeof(one)) < 0)
		TP_WARN("an asynchronous event can't be signalled: %m");
	pthread_mutex_unlock(&context->event_lock);
}

void tp_event_qp(struct tp_qp *qp, enum ibv_event_type type)
{
	struct ibv_async_event event = { .element.qp = &qp->ibv, .event_type = type };
	tp_event_queue(tp_context_of(qp->ibv.context), &event, &qp->reported);
}

void tp_event_srq(struct tp_srq *srq, enum ibv_event_type type)
{
	struct ibv_async_event event = { .element.srq = &srq->ibv, .event_type = type };
	tp_event_queue(tp_context_of(srq->ibv.context), &event, &srq->reported);
}

void tp_event_cq(struct tp_cq *cq, enum ibv_event_type type)
{
	struct ibv_async_event event = { .element.cq = &cq->ibv, .event_type = type };
	tp_event_queue(tp_context_of(cq->ibv.context), &event, &cq->reported_async);
}

/* The lock is held and there is an event: the descriptor's count is at least 1. */
static void unlink_event(struct tp_context *context, struct tp_event **at)
{
	struct tp_event *event = *at;
	uint64_t count;
	*at = event->next;
	if (context->events_end == &event->next)
		context->events_end = at;
	ssize_t got = read(context->verbs.context.async_fd, &count, sizeof(count));
	(void)got;
}

int tp_event_take(struct tp_context *context, struct ibv_async_event *out)
{
	struct pollfd wait = { .fd = context->verbs.context.async_fd, .events = POLLIN };
	if (!tp_context_mine(&context->verbs.context)) {
		errno = EINVAL;
		return -1;
	}
	tp_gid_watch();
	for (;;) {
		pthread_mutex_lock(&context->event_lock);
		struct tp_event *event = context->events;
		if (event) {
			unlink_event(context, &context->events);
			if (event->reported)
				(*event->reported)++;
			*out = event->event;
		}
		pthread_mutex_unlock(&context->event_lock);
		if (event) {
			free(event);
			return 0;
		}
		int flags = fcntl(wait.fd, F_GETFL);
		if (flags < 0)
			return -1;
		if (flags & O_NONBLOCK) {
			errno = EAGAIN;
			return -1;
		}
		if (poll(&wait, 1, -1) < 0)
			return -1;
		if (wait.revents & POLLNVAL) {
			errno = EBADF;
			return -1;
		}
	}
}

static void count_ack(pthread_mutex_t *mutex, pthread_cond_t *cond, uint32_t *completed)
{
	pthread_mutex_lock(mutex);
	(*completed)++;
	pthread_cond_broadcast(cond);
	pthread_mutex_unlock(mutex);
}

void tp_event_ack(struct ibv_async_event *event)
{
	struct ibv_cq *cq = event->element.cq;
	struct ibv_qp *qp = event->element.qp;
	struct ibv_srq *srq = event->element.srq;
	switch (event->event_type) {
	case IBV_EVENT_CQ_ERR:
		count_ack(&cq->mutex, &cq->cond, &cq->async_events_completed);
		break;
	case IBV_EVENT_QP_FATAL: case IBV_EVENT_QP_REQ_ERR: case IBV_EVENT_QP_ACCESS_ERR: case IBV_EVENT_COMM_EST:
	case IBV_EVENT_SQ_DRAINED: case IBV_EVENT_PATH_MIG: case IBV_EVENT_PATH_MIG_ERR: case IBV_EVENT_QP_LAST_WQE_REACHED:
		count_ack(&qp->mutex, &qp->cond, &qp->events_completed);
		break;
	case IBV_EVENT_SRQ_ERR: case IBV_EVENT_SRQ_LIMIT_REACHED:
		count_ack(&srq->mutex, &srq->cond, &srq->events_completed);
		break;
	default:
		break;
	}
}

void tp_event_drop(struct tp_context *context, const void *object, uint32_t *reported, pthread_mutex_t *mutex, pthread_cond_t *cond,
	uint32_t *completed)
{
	pthread_mutex_lock(&context->event_lock);
	for (struct tp_event **at = &context->events; *at;) {
		struct tp_event *event = *at;
		if (!event->reported || (const void *)event->event.element.qp != object) {
			at = &event->next;
			continue;
		}
		unlink_event(context, at);
		free(event);
	}
	uint32_t handed_out = *reported;
	pthread_mutex_unlock(&context->event_lock);
	pthread_mutex_lock(mutex);
	while (*completed != handed_out)
		pthread_cond_wait(cond, mutex);
	pthread_mutex_unlock(mutex);
}

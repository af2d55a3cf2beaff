/* Completion channels: a descriptor that can be polled (an eventfd that counts the events) and the list of the CQs that have
 * some. Both change only under the channel's lock, so whoever holds it and finds a CQ never blocks on the descriptor. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include "verbs/internal.h"

struct ibv_comp_channel *tp_channel_create(struct ibv_context *context)
{
	struct tp_channel *channel = tp_alloc(1, sizeof(*channel), "a completion channel");
	if (!channel) {
		errno = ENOMEM;
		return NULL;
	}
	channel->ibv.context = context;
	channel->ibv.fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
	if (channel->ibv.fd < 0) {
		int error = TP_CARD_FAIL(errno, "a completion channel can't be made: %m");
		free(channel);
		errno = error;
		return NULL;
	}
	channel->last = &channel->first;
	pthread_mutex_init(&channel->lock, NULL);
	atomic_fetch_add_explicit(&tp_context_of(context)->objects, 1, memory_order_relaxed);
	return &channel->ibv;
}

int tp_channel_destroy(struct ibv_comp_channel *ibv)
{
	struct tp_channel *channel = (struct tp_channel *)ibv;
	if (!tp_context_mine(ibv->context))
		return 0;       /* a forked child: it stays, inert */
	pthread_mutex_lock(&channel->lock);
	int users = channel->users;
	pthread_mutex_unlock(&channel->lock);
	if (users)
		return TP_CARD_FAIL(EBUSY, "a completion channel can't go while %d completion queues use it", users);
	atomic_fetch_sub_explicit(&tp_context_of(ibv->context)->objects, 1, memory_order_relaxed);
	close(ibv->fd);
	free(channel);
	return 0;
}

static void append_locked(struct tp_channel *channel, struct tp_cq *cq)
{
	cq->next_event = NULL;
	*channel->last = cq;
	channel->last = &cq->next_event;
}

static void remove_locked(struct tp_channel *channel, struct tp_cq **at)
{
	struct tp_cq *cq = *at;
	*at = cq->next_event;
	if (channel->last == &cq->next_event)
		channel->last = at;
}

static void count_down_locked(struct tp_channel *channel)
{
	uint64_t count;
	ssize_t got = read(channel->ibv.fd, &count, sizeof(count));
	(void)got;
}

void tp_channel_raise(struct tp_channel *channel, struct tp_cq *cq)
{
	static const uint64_t one = 1;
	pthread_mutex_lock(&channel->lock);
	if (cq->queued++ == 0)
		append_locked(channel, cq);
	if (write(channel->ibv.fd, &one, sizeof(one)) < 0)
		TP_WARN("a completion event can't be signalled: %m");
	pthread_mutex_unlock(&channel->lock);
}

/* The next event, if there is one. */
static struct tp_cq *pop(struct tp_channel *channel)
{
	pthread_mutex_lock(&channel->lock);
	struct tp_cq *cq = channel->first;
	if (cq) {
		remove_locked(channel, &channel->first);
		if (--cq->queued)
			append_locked(channel, cq);
		cq->reported_comp++;
		count_down_locked(channel);
	}
	pthread_mutex_unlock(&channel->lock);
	return cq;
}

int tp_channel_get(struct ibv_comp_channel *ibv, struct ibv_cq **cq, void **cq_context)
{
	struct tp_cq *found;
	while (!(found = pop((struct tp_channel *)ibv))) {
		int flags = fcntl(ibv->fd, F_GETFL);
		if (flags < 0)
			return -1;
		if (flags & O_NONBLOCK) {
			errno = EAGAIN;
			return -1;
		}
		struct pollfd wait = { .fd = ibv->fd, .events = POLLIN };
		if (poll(&wait, 1, -1) < 0)
			return -1;
	}
	*cq = &found->ibv;
	*cq_context = found->ibv.cq_context;
	return 0;
}

void tp_channel_ack(struct ibv_cq *cq, unsigned int count)
{
	pthread_mutex_lock(&cq->mutex);
	cq->comp_events_completed += count;
	pthread_cond_broadcast(&cq->cond);
	pthread_mutex_unlock(&cq->mutex);
}

void tp_channel_drop(struct tp_channel *channel, struct tp_cq *cq)
{
	pthread_mutex_lock(&channel->lock);
	for (struct tp_cq **at = &channel->first; *at; at = &(*at)->next_event)
		if (*at == cq) {
			remove_locked(channel, at);
			break;
		}
	for (; cq->queued; cq->queued--)
		count_down_locked(channel);
	uint32_t handed_out = cq->reported_comp;
	channel->users--;
	channel->ibv.refcnt--;
	pthread_mutex_unlock(&channel->lock);
	pthread_mutex_lock(&cq->ibv.mutex);
	while (cq->ibv.comp_events_completed != handed_out)
		pthread_cond_wait(&cq->ibv.cond, &cq->ibv.mutex);
	pthread_mutex_unlock(&cq->ibv.mutex);
}

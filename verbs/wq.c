/* Rings of work requests. A slot holds a whole request, its segments and (send) its inline data, so that nothing is allocated when
 * work is posted. Counters run on; a ring has a power of two of slots and takes as many requests as the program asked for. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "verbs/internal.h"

static uint32_t slots_for(uint32_t max_wr)
{
	uint32_t count = 1;
	while (count < max_wr)
		count *= 2;
	return count;
}

int tp_sq_init(struct tp_sq *sq, struct ibv_qp_cap *cap)
{
	cap->max_send_sge = TP_MAX(cap->max_send_sge, 1u);
	sq->max_wr = cap->max_send_wr;
	sq->max_sge = cap->max_send_sge;
	sq->max_inline = cap->max_inline_data;
	if (sq->max_wr == 0)
		return 0;
	uint32_t count = slots_for(sq->max_wr);
	sq->mask = count - 1;
	sq->stride = (uint32_t)tp_align_up(sizeof(struct tp_wqe) + sq->max_sge * sizeof(struct ibv_sge) + sq->max_inline, TP_CACHE_LINE);
	sq->slots = tp_alloc(count, sq->stride, "a send queue");
	return sq->slots ? 0 : ENOMEM;
}

void tp_sq_free(struct tp_sq *sq) { free(sq->slots); }

int tp_rq_init(struct tp_rq *rq, uint32_t max_wr, uint32_t max_sge)
{
	pthread_mutex_init(&rq->lock, NULL);
	rq->max_wr = max_wr;
	rq->max_sge = TP_MAX(max_sge, 1u);
	if (max_wr == 0)
		return 0;
	uint32_t count = slots_for(max_wr);
	rq->mask = count - 1;
	rq->stride = (uint32_t)(sizeof(struct tp_rwqe) + rq->max_sge * sizeof(struct ibv_sge));
	rq->slots = tp_alloc(count, rq->stride, "a receive queue");
	return rq->slots ? 0 : ENOMEM;
}

void tp_rq_free(struct tp_rq *rq) { free(rq->slots); }

struct tp_rwqe *tp_rq_at(struct tp_rq *rq, uint32_t counter)
{
	return (struct tp_rwqe *)(void *)(rq->slots + (size_t)(counter & rq->mask) * rq->stride);
}

static int post_one(struct tp_rq *rq, const struct ibv_recv_wr *wr)
{
	uint32_t head = atomic_load_explicit(&rq->head, memory_order_relaxed);
	uint64_t length = 0;
	if (wr->num_sge < 0 || (uint32_t)wr->num_sge > rq->max_sge)
		return EINVAL;
	/* Acquire: pairs with the release of who polled the completion; the slot is free from then on. */
	if (head - atomic_load_explicit(&rq->tail, memory_order_acquire) >= rq->max_wr)
		return ENOMEM;
	struct tp_rwqe *slot = tp_rq_at(rq, head);
	for (int i = 0; i < wr->num_sge; i++)
		length += wr->sg_list[i].length;
	slot->wr_id = wr->wr_id;
	slot->num_sge = (uint32_t)wr->num_sge;
	slot->length = (uint32_t)TP_MIN(length, (uint64_t)TP_CARD_MSG_BYTES);
	if (wr->num_sge)
		memcpy(slot->sge, wr->sg_list, (size_t)wr->num_sge * sizeof(*wr->sg_list));
	/* Release: pairs with the acquire in tp_target_begin_locked's look for a receive. */
	atomic_store_explicit(&rq->head, head + 1, memory_order_release);
	return 0;
}

int tp_rq_post(struct tp_rq *rq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	int error = 0;
	pthread_mutex_lock(&rq->lock);
	for (; wr && !error; wr = error ? wr : wr->next)
		error = post_one(rq, wr);
	pthread_mutex_unlock(&rq->lock);
	if (error)
		*bad = wr;
	return error;
}

/* A link's rings: requests one way, their answers the other.
 *
 * A request lies in one piece; its writer moves the tail, the reader the head. An answer needs no room of its own: there are never
 * more requests without an answer than the list of answers has places. Consecutive successes of one QP share an answer.
 *
 * A message that the target's program sends because one came must not overtake the answer to that one: on a card the initiator has
 * its completion first, and programs that wait for events of both (perftest's latencies) take the first for it. So a request tells
 * how many had been served when it was written, and its reader takes their answers first.
 *
 * Datagrams get no answer. Who waits for room says so (`starved`), and the reader then counts a nudge. */
#include <string.h>
#include "verbs/internal.h"
#include "verbs/path.h"

#define MASK (TP_PATH_RING_BYTES - 1)
enum { READ_MAX = 64, RERUN_MAX = 32 };

/* ---- requests out; link->lock is held between reserve and commit ---- */

static bool has_room(struct tp_path_link *link, uint32_t bytes)
{
	uint64_t at = link->tail & MASK, wanted = bytes + (at + bytes > TP_PATH_RING_BYTES ? TP_PATH_RING_BYTES - at : 0);
	if (atomic_load_explicit(&link->unanswered, memory_order_relaxed) >= TP_PATH_ANSWERS)
		return false;
	if (link->tail + wanted - link->head_seen <= TP_PATH_RING_BYTES)
		return true;
	/* Pairs with the reader's store: what lay there was read. Sequentially consistent, because it may follow `starved`. */
	link->head_seen = atomic_load_explicit(&link->out->head, memory_order_seq_cst);
	return link->tail + wanted - link->head_seen <= TP_PATH_RING_BYTES;
}

struct tp_path_request *tp_path_reserve(struct tp_path_link *link, uint32_t bytes)
{
	pthread_mutex_lock(&link->lock);
	if (!has_room(link, bytes)) {
		pthread_mutex_unlock(&link->lock);
		return NULL;
	}
	uint64_t at = link->tail & MASK;
	if (at + bytes > TP_PATH_RING_BYTES) {
		memset(link->out->data + at, 0, sizeof(uint32_t));
		link->tail += TP_PATH_RING_BYTES - at;
		at = 0;
	}
	return (struct tp_path_request *)(void *)(link->out->data + at);
}

/* What was served before the program heard of it, as it must have to write this. */
static void mark(struct tp_path_link *link)
{
	struct tp_path_request *request = (struct tp_path_request *)(void *)(link->out->data + (link->tail & MASK));
	request->after = atomic_load_explicit(&link->served, memory_order_relaxed);
}

void tp_path_commit(struct tp_path_link *link, uint32_t bytes)
{
	mark(link);
	link->tail += bytes;
	atomic_fetch_add_explicit(&link->unanswered, 1, memory_order_relaxed);
	/* Sequentially consistent: the reader's thread says that it sleeps, then looks here; we look there next. */
	atomic_store_explicit(&link->out->tail, link->tail, memory_order_seq_cst);
	pthread_mutex_unlock(&link->lock);
}

void tp_path_commit_datagram(struct tp_path_link *link, uint32_t bytes)
{
	mark(link);
	link->tail += bytes;
	/* As in tp_path_commit. */
	atomic_store_explicit(&link->out->tail, link->tail, memory_order_seq_cst);
	pthread_mutex_unlock(&link->lock);
}

void tp_path_abandon(struct tp_path_link *link) { pthread_mutex_unlock(&link->lock); }

static bool list_without_room(struct tp_path_link *link, struct tp_path_waiter *waiter, uint32_t bytes)
{
	pthread_mutex_lock(&link->lock);
	bool room = has_room(link, bytes);
	if (!room && !waiter->listed) {
		waiter->listed = true;
		waiter->next = NULL;
		*(link->waiting_last ? &link->waiting_last->next : &link->waiting) = waiter;
		link->waiting_last = waiter;
		atomic_fetch_add_explicit(&link->waiting_count, 1, memory_order_relaxed);
	}
	pthread_mutex_unlock(&link->lock);
	return room;
}

bool tp_path_await_room(struct tp_path_link *link, struct tp_path_waiter *waiter, uint32_t bytes)
{
	if (list_without_room(link, waiter, bytes))
		return true;
	/* Sequentially consistent, as the reader's head: either it sees this, or we see what it has read since. */
	atomic_store_explicit(&link->out->starved, 1, memory_order_seq_cst);
	return list_without_room(link, waiter, bytes);
}

void tp_path_forget_room(struct tp_path_link *link, struct tp_path_waiter *waiter)
{
	struct tp_path_waiter *before = NULL;
	pthread_mutex_lock(&link->lock);
	for (struct tp_path_waiter *at = link->waiting; waiter->listed && at; before = at, at = at->next) {
		if (at != waiter)
			continue;
		*(before ? &before->next : &link->waiting) = waiter->next;
		if (link->waiting_last == waiter)
			link->waiting_last = before;
		waiter->listed = false;
		atomic_fetch_sub_explicit(&link->waiting_count, 1, memory_order_relaxed);
		break;
	}
	pthread_mutex_unlock(&link->lock);
}

static uint32_t take_waiting(struct tp_path_link *link, uint32_t most, uint32_t *qpns)
{
	uint32_t count = 0;
	pthread_mutex_lock(&link->lock);
	for (struct tp_path_waiter *waiter; count < most && (waiter = link->waiting) != NULL; count++) {
		qpns[count] = waiter->qpn;
		link->waiting = waiter->next;
		waiter->listed = false;
	}
	if (!link->waiting)
		link->waiting_last = NULL;
	atomic_fetch_sub_explicit(&link->waiting_count, count, memory_order_relaxed);
	pthread_mutex_unlock(&link->lock);
	return count;
}

/* For anything at all? Where there is none the reader will say so, as to who waits. */
static bool room_is_left(struct tp_path_link *link)
{
	for (int look = 0; look < 2; look++) {
		pthread_mutex_lock(&link->lock);
		bool room = has_room(link, TP_PATH_HEAD_BYTES);
		pthread_mutex_unlock(&link->lock);
		if (room)
			return true;
		/* As in tp_path_await_room. */
		atomic_store_explicit(&link->out->starved, 1, memory_order_seq_cst);
	}
	return false;
}

/* Those that found no room try again, in the order in which they came, some at a time: what they do may take long, and peers wait. All of
 * them, while there is room: what some of them do at once brings no answer that would wake the others. By number: they may go meanwhile. */
static void rerun_some(struct tp_path_link *link)
{
	uint32_t qpns[RERUN_MAX], count = take_waiting(link, TP_MIN(link->to_rerun, (uint32_t)RERUN_MAX), qpns);
	for (uint32_t i = 0; i < count; i++)
		tp_qp_run_again(qpns[i]);
	link->to_rerun -= count;
	if (!count || (!atomic_load_explicit(&link->dead, memory_order_relaxed) && !room_is_left(link)))
		link->to_rerun = 0;
}

void tp_path_rerun(struct tp_path_link *link)
{
	link->to_rerun = atomic_load_explicit(&link->waiting_count, memory_order_relaxed);
	rerun_some(link);
}

/* ---- reading; the reader's lock is held ---- */

bool tp_path_has_input(struct tp_path_link *link)
{
	return (atomic_load_explicit(&link->in->tail, memory_order_seq_cst) != link->head && !link->held) ||
		atomic_load_explicit(&link->in->answers_tail, memory_order_seq_cst) != link->answers_head ||
		atomic_load_explicit(&link->in->nudges, memory_order_seq_cst) != link->nudges || link->to_rerun;
}

static void push_answer(struct tp_path_link *link, const struct tp_path_answer *answer)
{
	link->out->answers[link->answers_tail++ % TP_PATH_ANSWERS] = *answer;
	atomic_store_explicit(&link->out->answers_tail, link->answers_tail, memory_order_seq_cst);
}

static int read_answers(struct tp_path_link *link)
{
	uint32_t nudges = atomic_load_explicit(&link->in->nudges, memory_order_acquire);
	int done = nudges != link->nudges;
	link->nudges = nudges;
	/* Acquire: pairs with push_answer. */
	uint64_t tail = atomic_load_explicit(&link->in->answers_tail, memory_order_acquire);
	for (; link->answers_head != tail; done++) {
		struct tp_path_answer answer = link->in->answers[link->answers_head++ % TP_PATH_ANSWERS];
		if (answer.covers > atomic_load_explicit(&link->unanswered, memory_order_relaxed))
			answer.covers = 0;
		atomic_fetch_sub_explicit(&link->unanswered, answer.covers, memory_order_relaxed);
		link->answered += answer.covers;
		tp_path_answered(link, &answer);
	}
	if (!done && !link->to_rerun)
		return 0;
	if (done)
		link->to_rerun = atomic_load_explicit(&link->waiting_count, memory_order_relaxed);
	if (link->to_rerun)
		rerun_some(link);
	return done + 1;
}

/* Is it one? Peers may err. */
static bool is_sound(const struct tp_path_request *request, uint64_t left)
{
	uint64_t data = request->form == TP_PATH_HERE ? request->length : request->form == TP_PATH_THERE ? request->spans * sizeof(struct tp_path_span) : 0;
	if (request->type == IBV_QPT_UD)
		data += sizeof(struct tp_path_datagram);
	return request->bytes % 64 == 0 && request->bytes >= TP_PATH_HEAD_BYTES && request->bytes <= left && request->spans <= TP_CARD_SGE &&
		data <= request->bytes - TP_PATH_HEAD_BYTES;
}

static bool joins(const struct tp_path_answer *waiting, const struct tp_path_answer *answer)
{
	return waiting->covers && waiting->qpn == answer->qpn && waiting->epoch == answer->epoch && waiting->reply == TP_REPLY_ACK &&
		answer->reply == TP_REPLY_ACK && !waiting->single && !answer->single;
}

/* The other side waits for room, and none of its requests may bring an answer. */
static bool nudge(struct tp_path_link *link)
{
	if (!atomic_load_explicit(&link->in->starved, memory_order_seq_cst) || !atomic_exchange_explicit(&link->in->starved, 0, memory_order_seq_cst))
		return false;
	atomic_fetch_add_explicit(&link->out->nudges, 1, memory_order_seq_cst);
	return true;
}

/* Serves it; what there is to answer is joined to what waits, or takes its place. */
static void serve(struct tp_path_link *link, const struct tp_path_request *request, const uint8_t *data, struct tp_path_answer *waiting)
{
	if (request->type == IBV_QPT_UD) {
		tp_path_take_datagram(request, data);
		return;
	}
	struct tp_path_answer answer = { .qpn = request->src_qpn, .epoch = request->epoch, .seq = request->seq, .covers = 1 };
	/* Relaxed: the completion queue's lock, or the program, orders it before what is written on account of it. */
	atomic_store_explicit(&link->served, atomic_load_explicit(&link->served, memory_order_relaxed) + 1, memory_order_relaxed);
	tp_path_serve(link, request, data, &answer);
	if (joins(waiting, &answer))
		answer.covers += waiting->covers;
	else if (waiting->covers)
		push_answer(link, waiting);
	*waiting = answer;
}

static bool is_early(struct tp_path_link *link, uint32_t after)
{
	if ((int32_t)(after - link->answered) > 0)
		read_answers(link);
	return (int32_t)(after - link->answered) > 0;
}

static int read_requests(struct tp_path_link *link)
{
	struct tp_path_answer waiting = { 0 };
	uint64_t answers_before = link->answers_tail;
	int done = 0;
	/* Acquire: pairs with tp_path_commit. */
	uint64_t tail = atomic_load_explicit(&link->in->tail, memory_order_acquire);
	while (link->head != tail && done < READ_MAX) {
		const struct tp_path_request *slot = (const struct tp_path_request *)(const void *)(link->in->data + (link->head & MASK));
		if (slot->bytes == 0) {
			link->head += TP_PATH_RING_BYTES - (link->head & MASK);
			continue;
		}
		struct tp_path_request request = *slot;
		if (!is_sound(&request, TP_MIN(tail - link->head, TP_PATH_RING_BYTES - (link->head & MASK)))) {
			TP_WARN("process %d wrote a request of %u bytes that makes no sense: its connections end", (int)link->pid, request.bytes);
			link->head = tail;
			tp_path_lose(link);
			break;
		}
		/* Its writer's thread is about to write them, and rings then. */
		link->held = is_early(link, request.after);
		if (link->held)
			break;
		serve(link, &request, (const uint8_t *)slot + TP_PATH_HEAD_BYTES, &waiting);
		link->head += request.bytes;
		done++;
		if (done % 16 == 0)
			atomic_store_explicit(&link->in->head, link->head, memory_order_release);
	}
	if (!done)
		return 0;
	/* Pairs with has_room. */
	atomic_store_explicit(&link->in->head, link->head, memory_order_seq_cst);
	if (waiting.covers)
		push_answer(link, &waiting);
	if (nudge(link) || link->answers_tail != answers_before)
		tp_path_ring_bell(link);
	return done;
}

int tp_path_read(struct tp_path_link *link)
{
	int done = read_answers(link);
	return done + read_requests(link);
}

/* Acknowledgements that wait for company. Where two programs answer each other, as those do that measure latency, whoever gets a
 * message sends one at once; so an acknowledgement is held for some microseconds and leaves with that message, as one datagram
 * more of the same system call. It saves more than that call: the other side, which waits for its completion, is polling when
 * the message comes in, and takes it itself; without, its thread would have to be woken, and to find a processor.
 *
 * Each connection learns whether holding pays: after a time-out the next acknowledgements aren't held, 8 at first, then twice as
 * many after each failure in a row. What is held leaves with the next request, after HOLD_NS by whoever polls or by the thread,
 * when the connection stops, and when the process ends (at_exit in carrier.c). */
#include <string.h>
#include "verbs/internal.h"
#include "verbs/rc.h"

enum { HOLD_NS = 40000, HELD_MAX = 64, BATCH_MAX = 2, PENALTY_FIRST = 1, PENALTY_MAX = 1024 };

static struct {
	pthread_mutex_t lock;           /* below the QPs' */
	uint32_t qpns[HELD_MAX];
	int count;
} held = { .lock = PTHREAD_MUTEX_INITIALIZER };

static _Atomic bool ended;

void tp_rc_hold_end(void) { atomic_store_explicit(&ended, true, memory_order_relaxed); }

static bool list(uint32_t qpn, uint64_t due_ns)
{
	pthread_mutex_lock(&held.lock);
	bool room = held.count < HELD_MAX;
	if (room) {
		held.qpns[held.count++] = qpn;
		tp_progress_expect(due_ns);
	}
	pthread_mutex_unlock(&held.lock);
	return room;
}

bool tp_rc_hold(struct tp_qp *qp, uint32_t packets)
{
	struct tp_rc *rc = tp_rc_of(qp);
	if (!rc->ack_due || rc->nak || rc->answers_count || packets > BATCH_MAX || !tp_qp_sends(qp) || atomic_load_explicit(&ended, memory_order_relaxed))
		return false;
	if (rc->held_ns)
		return ++rc->held_batches <= BATCH_MAX;
	if (rc->hold_penalty) {
		rc->hold_penalty--;
		return false;
	}
	uint64_t due = tp_clock_ns() + HOLD_NS;
	if (!rc->hold_listed && !list(qp->ibv.qp_num, due))
		return false;
	rc->hold_listed = true;
	rc->held_ns = due;
	rc->held_batches = 1;
	return true;
}

void tp_rc_hold_paid(struct tp_rc *rc)
{
	rc->held_ns = 0;
	rc->hold_failures = 0;
}

/* Sends what is due; what isn't stays on the list. */
static void flush_one(struct tp_qp *qp, uint64_t now)
{
	struct tp_rc *rc = qp->carrier == &tp_wire ? tp_rc_of(qp) : NULL;
	if (!rc || !rc->hold_listed)
		return;
	rc->hold_listed = false;
	if (rc->held_ns > now) {
		rc->hold_listed = list(qp->ibv.qp_num, rc->held_ns);
		if (rc->hold_listed)
			return;
	}
	if (!rc->held_ns)
		return;
	rc->hold_penalty = TP_MIN((uint32_t)PENALTY_FIRST << TP_MIN(rc->hold_failures, 8u), (uint32_t)PENALTY_MAX);
	rc->hold_failures++;
	tp_rc_answer(qp);
}

static int take_list_locked(uint32_t qpns[HELD_MAX])
{
	int count = held.count;
	memcpy(qpns, held.qpns, (size_t)count * sizeof(qpns[0]));
	held.count = 0;
	tp_progress_expect(0);
	return count;
}

void tp_rc_flush_held(uint64_t now)
{
	uint32_t qpns[HELD_MAX];
	pthread_mutex_lock(&held.lock);
	int count = take_list_locked(qpns);
	pthread_mutex_unlock(&held.lock);
	for (int i = 0; i < count; i++) {
		struct tp_qp *qp = tp_qp_get(qpns[i]);
		if (!qp)
			continue;
		pthread_mutex_lock(&qp->lock);
		flush_one(qp, now);
		pthread_mutex_unlock(&qp->lock);
		tp_qp_put(qp);
	}
}

void tp_rc_hold_forget(void)
{
	pthread_mutex_init(&held.lock, NULL);
	held.count = 0;
	atomic_store_explicit(&ended, false, memory_order_relaxed);
}

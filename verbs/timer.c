/* Timers: a heap of those that are armed. They fire on the progress thread, or on a poller that comes by when they are due.
 *
 * Timers are lazy: arming one later than it is queued for is one store; whoever gets there finds out. */
#include <stdlib.h>
#include "verbs/internal.h"

struct tp_timer {
	void (*fire)(struct tp_qp *qp);
	struct tp_qp *qp;
	uint32_t qpn;
	_Atomic uint64_t when;          /* 0: not armed */
	_Atomic uint64_t queued;        /* its key in the heap, never above when while armed; 0: not in it. Written under lock */
	int place;                      /* in the heap; under lock */
};

static struct {
	pthread_mutex_t lock;
	struct tp_timer **timers;
	int count, room;
	uint64_t sleeps_until;          /* what the progress thread set out to sleep for */
} heap = { .lock = PTHREAD_MUTEX_INITIALIZER };

static _Atomic uint64_t next_due_ns;    /* for a poller's quick look; 0: none */

uint64_t tp_timers_next(void) { return atomic_load_explicit(&next_due_ns, memory_order_relaxed); }

void tp_timers_forget(void)
{
	pthread_mutex_init(&heap.lock, NULL);
	heap.count = 0;
	heap.sleeps_until = 0;
	atomic_store_explicit(&next_due_ns, 0, memory_order_relaxed);
}

/* ---- the heap ---- */

static uint64_t key_at(int place) { return atomic_load_explicit(&heap.timers[place]->queued, memory_order_relaxed); }

static void put_at(struct tp_timer *timer, int place)
{
	heap.timers[place] = timer;
	timer->place = place;
}

static void sift(int place)
{
	struct tp_timer *timer = heap.timers[place];
	uint64_t key = atomic_load_explicit(&timer->queued, memory_order_relaxed);
	for (; place > 0 && key_at((place - 1) / 2) > key; place = (place - 1) / 2)
		put_at(heap.timers[(place - 1) / 2], place);
	for (;;) {
		int child = 2 * place + 1;
		if (child >= heap.count)
			break;
		if (child + 1 < heap.count && key_at(child + 1) < key_at(child))
			child++;
		if (key_at(child) >= key)
			break;
		put_at(heap.timers[child], place);
		place = child;
	}
	put_at(timer, place);
}

static void show_next(void) { atomic_store_explicit(&next_due_ns, heap.count ? key_at(0) : 0, memory_order_relaxed); }

static void take_out(struct tp_timer *timer)
{
	int place = timer->place;
	struct tp_timer *last = heap.timers[--heap.count];
	/* Sequentially consistent: who arms it stores when, then looks here. */
	atomic_store_explicit(&timer->queued, 0, memory_order_seq_cst);
	if (last != timer) {
		put_at(last, place);
		sift(place);
	}
	show_next();
}

static void put_in(struct tp_timer *timer, uint64_t when)
{
	if (heap.count == heap.room) {
		int room = heap.room ? 2 * heap.room : 64;
		struct tp_timer **grown = realloc(heap.timers, (size_t)room * sizeof(struct tp_timer *));
		if (!grown) {
			TP_WARN("no memory for %d timers", room);
			return;
		}
		heap.timers = grown;
		heap.room = room;
	}
	atomic_store_explicit(&timer->queued, when, memory_order_relaxed);
	put_at(timer, heap.count++);
	sift(timer->place);
	show_next();
}

/* Takes the first timer that is due out; gives its function and its QP, with a reference. */
static struct tp_qp *next_due_locked(uint64_t now, void (**fire)(struct tp_qp *qp))
{
	while (heap.count && key_at(0) <= now) {
		struct tp_timer *timer = heap.timers[0];
		take_out(timer);
		uint64_t when = atomic_load_explicit(&timer->when, memory_order_seq_cst);
		if (when > now) {
			put_in(timer, when);
		} else if (when && atomic_compare_exchange_strong_explicit(&timer->when, &when, 0, memory_order_acq_rel, memory_order_relaxed)) {
			struct tp_qp *qp = tp_qp_get(timer->qpn);
			*fire = timer->fire;
			if (qp == timer->qp && qp)
				return qp;
			if (qp)
				tp_qp_put(qp);
		} else if (when) {
			put_in(timer, when);
		}
	}
	return NULL;
}

/* Runs what is due; returns when the next is, 0: none. thread: the caller will sleep until then. */
uint64_t tp_timers_run(bool thread)
{
	for (;;) {
		void (*fire)(struct tp_qp *) = NULL;
		pthread_mutex_lock(&heap.lock);
		struct tp_qp *qp = next_due_locked(tp_clock_ns(), &fire);
		uint64_t next = heap.count ? key_at(0) : 0;
		if (thread)
			heap.sleeps_until = next ? next : UINT64_MAX;
		pthread_mutex_unlock(&heap.lock);
		if (!qp)
			return next;
		fire(qp);
		tp_qp_put(qp);
	}
}

/* ---- timers ---- */

struct tp_timer *tp_timer_new(void (*fire)(struct tp_qp *qp), struct tp_qp *qp)
{
	struct tp_timer *timer = tp_alloc(1, sizeof(*timer), "a timer");
	if (timer) {
		timer->fire = fire;
		timer->qp = qp;
		timer->qpn = qp->ibv.qp_num;
	}
	return timer;
}

void tp_timer_arm(struct tp_timer *timer, uint64_t when_ns)
{
	/* Sequentially consistent, as in take_out: either we see it taken out, or who took it out sees the new time. */
	atomic_store_explicit(&timer->when, when_ns, memory_order_seq_cst);
	uint64_t queued = atomic_load_explicit(&timer->queued, memory_order_seq_cst);
	if (when_ns == 0 || (queued && queued <= when_ns))
		return;
	tp_progress_start();
	pthread_mutex_lock(&heap.lock);
	queued = atomic_load_explicit(&timer->queued, memory_order_relaxed);
	if (!queued) {
		put_in(timer, when_ns);
	} else if (queued > when_ns) {
		atomic_store_explicit(&timer->queued, when_ns, memory_order_relaxed);
		sift(timer->place);
		show_next();
	}
	/* The thread itself looks at the heap before it sleeps. */
	bool early = when_ns < heap.sleeps_until && !tp_progress_is_thread();
	if (early)
		heap.sleeps_until = when_ns;
	pthread_mutex_unlock(&heap.lock);
	if (early)
		tp_progress_kick();
}

void tp_timer_free(struct tp_timer *timer)
{
	if (!timer)
		return;
	pthread_mutex_lock(&heap.lock);
	if (atomic_load_explicit(&timer->queued, memory_order_relaxed))
		take_out(timer);
	pthread_mutex_unlock(&heap.lock);
	free(timer);
}

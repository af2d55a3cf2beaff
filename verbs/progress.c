/* Timers, watched descriptors and the thread that serves them when nobody polls.
 *
 * A program that polls completion queues does the work itself (tp_progress_poll) and thereby renews a lease; the thread leaves
 * descriptors alone while it lasts. The thread is started at the first timer or descriptor, blocks all signals, and isn't
 * inherited by fork. Timers are a heap; the thread sleeps on a timerfd that is set to the earliest. */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>
#include "verbs/internal.h"

#define LEASE_NS 1000000u

struct tp_timer {
	void (*fire)(struct tp_qp *qp);
	struct tp_qp *qp;
	uint64_t when_ns;
	int place;                      /* in the heap; -1: not armed */
};

struct watch { int fd; int (*ready)(int fd, void *arg); void *arg; struct watch *next; };

static pthread_mutex_t timers_lock = PTHREAD_MUTEX_INITIALIZER;
static struct tp_timer **heap;      /* all that follows: under timers_lock */
static int heap_count, heap_room;
static int epoll_fd = -1, timer_fd = -1;
static struct watch *watches;
static bool thread_runs;
static _Atomic uint64_t next_due_ns;        /* 0: no timer; for a poller's quick look */
static _Atomic uint64_t lease_until_ns;
static _Atomic int watch_count;

/* ---- the heap ---- */

static void put_at(int place, struct tp_timer *timer)
{
	heap[place] = timer;
	timer->place = place;
}

static void sift_up(int place, struct tp_timer *timer)
{
	while (place > 0 && heap[(place - 1) / 2]->when_ns > timer->when_ns) {
		put_at(place, heap[(place - 1) / 2]);
		place = (place - 1) / 2;
	}
	put_at(place, timer);
}

static void sift_down(int place, struct tp_timer *timer)
{
	for (int child; (child = place * 2 + 1) < heap_count; place = child) {
		if (child + 1 < heap_count && heap[child + 1]->when_ns < heap[child]->when_ns)
			child++;
		if (heap[child]->when_ns >= timer->when_ns)
			break;
		put_at(place, heap[child]);
	}
	put_at(place, timer);
}

static void take_out(struct tp_timer *timer)
{
	int place = timer->place;
	timer->place = -1;
	struct tp_timer *last = heap[--heap_count];
	if (last == timer)
		return;
	if (place > 0 && heap[(place - 1) / 2]->when_ns > last->when_ns)
		sift_up(place, last);
	else
		sift_down(place, last);
}

static bool put_in(struct tp_timer *timer)
{
	if (heap_count == heap_room) {
		int room = heap_room ? heap_room * 2 : 64;
		struct tp_timer **larger = realloc(heap, (size_t)room * sizeof(struct tp_timer *));
		if (!larger)
			return false;
		heap = larger;
		heap_room = room;
	}
	sift_up(heap_count++, timer);
	return true;
}

/* The earliest time changed: tell the thread and the pollers. */
static void show_next(void)
{
	uint64_t next = heap_count ? heap[0]->when_ns : 0;
	if (atomic_load_explicit(&next_due_ns, memory_order_relaxed) == next)
		return;
	atomic_store_explicit(&next_due_ns, next, memory_order_relaxed);
	struct itimerspec spec = { .it_value = { .tv_sec = (time_t)(next / 1000000000u), .tv_nsec = (long)(next % 1000000000u) } };
	if (timer_fd >= 0)
		timerfd_settime(timer_fd, TFD_TIMER_ABSTIME, &spec, NULL);
}

/* ---- the thread ---- */

static void fire_due(void)
{
	uint64_t now = tp_clock_ns();
	for (;;) {
		pthread_mutex_lock(&timers_lock);
		struct tp_timer *timer = heap_count && heap[0]->when_ns <= now ? heap[0] : NULL;
		void (*fire)(struct tp_qp *) = timer ? timer->fire : NULL;
		struct tp_qp *qp = timer ? timer->qp : NULL;
		if (timer)
			take_out(timer);
		show_next();
		pthread_mutex_unlock(&timers_lock);
		if (!timer)
			return;
		/* From here on only the reference that the armed timer held keeps the QP alive; the timer may be gone. */
		fire(qp);
		tp_qp_put(qp);
	}
}

static void serve(const struct epoll_event *event)
{
	struct watch found = { .fd = -1 };
	pthread_mutex_lock(&timers_lock);
	for (struct watch *watch = watches; watch; watch = watch->next)
		if (watch->fd == event->data.fd)
			found = *watch;
	pthread_mutex_unlock(&timers_lock);
	if (found.fd >= 0)
		found.ready(found.fd, found.arg);
}

bool tp_progress_leased(void)
{
	return atomic_load_explicit(&lease_until_ns, memory_order_relaxed) > tp_clock_ns();
}

static void *thread_main(void *arg)
{
	int fd = (int)(intptr_t)arg;
	struct epoll_event events[16];
	for (;;) {
		int count = epoll_wait(fd, events, TP_ARRAY_LEN(events), -1);
		if (count < 0 && errno != EINTR)
			return NULL;
		bool leased = tp_progress_leased(), left = false;
		for (int i = 0; i < count; i++) {
			uint64_t ticks;
			if (events[i].data.fd == timer_fd) {
				ssize_t got = read(timer_fd, &ticks, sizeof(ticks));
				(void)got;
				fire_due();
			} else if (leased) {
				left = true;
			} else {
				serve(&events[i]);
			}
		}
		if (left)
			poll(NULL, 0, 1);
	}
}

/* timers_lock is held. */
static bool start_thread(void)
{
	pthread_t thread;
	pthread_attr_t attr;
	sigset_t all, before;
	if (thread_runs)
		return true;
	epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
	struct epoll_event event = { .events = EPOLLIN, .data.fd = timer_fd };
	if (epoll_fd < 0 || timer_fd < 0 || epoll_ctl(epoll_fd, EPOLL_CTL_ADD, timer_fd, &event)) {
		TP_WARN("the progress thread can't get its descriptors: %m");
		return false;
	}
	pthread_attr_init(&attr);
	pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
	sigfillset(&all);
	pthread_sigmask(SIG_BLOCK, &all, &before);
	int error = pthread_create(&thread, &attr, thread_main, (void *)(intptr_t)epoll_fd);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	pthread_attr_destroy(&attr);
	if (error)
		TP_WARN("the progress thread can't be started: %s", strerror(error));
	else
		pthread_setname_np(thread, "telpher-verbs");
	return thread_runs = !error;
}

void tp_progress_forget(void)
{
	pthread_mutex_init(&timers_lock, NULL);
	/* The parent's epoll set must not change by our closing what we share with it: closing a duplicate doesn't. */
	if (epoll_fd >= 0)
		close(epoll_fd);
	if (timer_fd >= 0)
		close(timer_fd);
	epoll_fd = timer_fd = -1;
	heap_count = 0;
	watches = NULL;
	thread_runs = false;
	atomic_store_explicit(&next_due_ns, 0, memory_order_relaxed);
	atomic_store_explicit(&watch_count, 0, memory_order_relaxed);
}

/* ---- timers ---- */

struct tp_timer *tp_timer_new(void (*fire)(struct tp_qp *qp), struct tp_qp *qp)
{
	struct tp_timer *timer = tp_alloc(1, sizeof(*timer), "a timer");
	if (timer)
		*timer = (struct tp_timer){ .fire = fire, .qp = qp, .place = -1 };
	return timer;
}

void tp_timer_arm(struct tp_timer *timer, uint64_t when_ns)
{
	bool unpin = false;
	pthread_mutex_lock(&timers_lock);
	if (timer->place >= 0) {
		take_out(timer);
		unpin = true;
	}
	if (when_ns && start_thread()) {
		timer->when_ns = when_ns;
		if (put_in(timer)) {
			if (!unpin)
				tp_qp_pin(timer->qp);
			unpin = false;
		}
	}
	show_next();
	pthread_mutex_unlock(&timers_lock);
	if (unpin)
		tp_qp_put(timer->qp);
}

void tp_timer_free(struct tp_timer *timer)
{
	if (!timer)
		return;
	tp_timer_arm(timer, 0);
	free(timer);
}

/* ---- descriptors ---- */

int tp_progress_watch(int fd, int (*ready)(int fd, void *arg), void *arg)
{
	struct watch *watch = tp_alloc(1, sizeof(*watch), "a watched descriptor");
	if (!watch)
		return ENOMEM;
	*watch = (struct watch){ .fd = fd, .ready = ready, .arg = arg };
	struct epoll_event event = { .events = EPOLLIN, .data.fd = fd };
	pthread_mutex_lock(&timers_lock);
	int error = !start_thread() ? EAGAIN : epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) ? errno : 0;
	if (!error) {
		watch->next = watches;
		watches = watch;
		atomic_fetch_add_explicit(&watch_count, 1, memory_order_relaxed);
	}
	pthread_mutex_unlock(&timers_lock);
	if (error)
		free(watch);
	return error;
}

void tp_progress_unwatch(int fd)
{
	struct watch *gone = NULL;
	pthread_mutex_lock(&timers_lock);
	for (struct watch **at = &watches; *at; at = &(*at)->next)
		if ((*at)->fd == fd) {
			gone = *at;
			*at = gone->next;
			epoll_ctl(epoll_fd, EPOLL_CTL_DEL, fd, NULL);
			atomic_fetch_sub_explicit(&watch_count, 1, memory_order_relaxed);
			break;
		}
	pthread_mutex_unlock(&timers_lock);
	free(gone);
}

/* ---- pollers ---- */

void tp_progress_poll(void)
{
	uint64_t due = atomic_load_explicit(&next_due_ns, memory_order_relaxed);
	bool watched = atomic_load_explicit(&watch_count, memory_order_relaxed) > 0;
	if (!due && !watched)
		return;
	uint64_t now = tp_clock_ns();
	if (due && due <= now)
		fire_due();
	if (!watched)
		return;
	atomic_store_explicit(&lease_until_ns, now + LEASE_NS, memory_order_relaxed);
	if (tp_engine_wire && tp_engine_wire->progress)
		tp_engine_wire->progress();
}

void tp_progress_arm(void) { atomic_store_explicit(&lease_until_ns, 0, memory_order_relaxed); }

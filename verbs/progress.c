/* The progress thread and the timers: one thread a process, which exists from the first timer or descriptor on, blocks all
 * signals and uses no processor while there is nothing to do.
 *
 * An application that polls its completion queues moves packets itself, faster than any thread that must be woken. So a poller
 * holds a lease: while it was here within the lease's length the thread leaves descriptors alone. How long that is the
 * thread learns: a lease is given when packets come just after a poll, grows (to LEASE_MAX_NS) while pollers renew it, and shrinks
 * (to nothing) when packets were found waiting at its end, as with programs that poll memory and no completion queue. Those
 * get none for a while: for so many packets' wakings, twice as many after each vain lease.
 *
 * Where the application sleeps while packets come in quick succession the thread lingers before it sleeps (linger.c).
 *
 * Timers are lazy: arming one later than it is queued for is one store; whoever gets there finds out. */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "verbs/internal.h"
#include "verbs/path.h"

enum { LEASE_MIN_NS = 20000, LEASE_MAX_NS = 200000, READY_MAX = 32, WATCHES_MAX = 512 };
/* Lingering: at a stretch; a pause that means that we were put aside. */
enum { LINGER_MOST_NS = 1000000, ASIDE_NS = 50000 };
enum { LOOK_EVERY_NS = 20000000 };

struct tp_timer {
	void (*fire)(struct tp_qp *qp);
	struct tp_qp *qp;
	uint32_t qpn;
	_Atomic uint64_t when;          /* 0: not armed */
	_Atomic uint64_t queued;        /* its key in the heap, never above when while armed; 0: not in it. Written under lock */
	int place;                      /* in the heap; under lock */
};

struct watch { int fd; int (*ready)(int, void *); void *arg; };

static struct {
	pthread_mutex_t lock;           /* heap, watches, start of the thread */
	struct tp_timer **heap;
	int count, room;
	struct watch watches[WATCHES_MAX];
	int watched;
	bool started;
	pthread_t thread;
	int epoll_fd, kick_fd;
	uint64_t sleeps_until;          /* what the thread set out to sleep for */
	uint32_t turn;                  /* odd: a descriptor's function runs on the thread */
} state = { .lock = PTHREAD_MUTEX_INITIALIZER, .epoll_fd = -1, .kick_fd = -1 };

static _Atomic uint64_t polled_ns;      /* when a poller was here last */
static _Atomic uint64_t lease_ns;
static _Atomic uint64_t next_due_ns;    /* of the heap, for a poller's quick look; 0: none */
static _Atomic bool any_watch;
static _Atomic uint64_t expected_ns;    /* tp_progress_expect */
static _Atomic bool asleep;             /* the thread waits for descriptors, or is about to */

/* ---- the heap ---- */

static uint64_t key_at(int place) { return atomic_load_explicit(&state.heap[place]->queued, memory_order_relaxed); }

static void put_at(struct tp_timer *timer, int place)
{
	state.heap[place] = timer;
	timer->place = place;
}

static void sift(int place)
{
	struct tp_timer *timer = state.heap[place];
	uint64_t key = atomic_load_explicit(&timer->queued, memory_order_relaxed);
	for (; place > 0 && key_at((place - 1) / 2) > key; place = (place - 1) / 2)
		put_at(state.heap[(place - 1) / 2], place);
	for (;;) {
		int child = 2 * place + 1;
		if (child >= state.count)
			break;
		if (child + 1 < state.count && key_at(child + 1) < key_at(child))
			child++;
		if (key_at(child) >= key)
			break;
		put_at(state.heap[child], place);
		place = child;
	}
	put_at(timer, place);
}

static void show_next(void) { atomic_store_explicit(&next_due_ns, state.count ? key_at(0) : 0, memory_order_relaxed); }

static void take_out(struct tp_timer *timer)
{
	int place = timer->place;
	struct tp_timer *last = state.heap[--state.count];
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
	if (state.count == state.room) {
		int room = state.room ? 2 * state.room : 64;
		struct tp_timer **heap = realloc(state.heap, (size_t)room * sizeof(struct tp_timer *));
		if (!heap) {
			TP_WARN("no memory for %d timers", room);
			return;
		}
		state.heap = heap;
		state.room = room;
	}
	atomic_store_explicit(&timer->queued, when, memory_order_relaxed);
	put_at(timer, state.count++);
	sift(timer->place);
	show_next();
}

/* Takes the first timer that is due out; gives its function and its QP, with a reference. */
static struct tp_qp *next_due_locked(uint64_t now, void (**fire)(struct tp_qp *qp))
{
	while (state.count && key_at(0) <= now) {
		struct tp_timer *timer = state.heap[0];
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
static uint64_t run_timers(bool thread)
{
	for (;;) {
		void (*fire)(struct tp_qp *) = NULL;
		pthread_mutex_lock(&state.lock);
		struct tp_qp *qp = next_due_locked(tp_clock_ns(), &fire);
		uint64_t next = state.count ? key_at(0) : 0;
		if (thread)
			state.sleeps_until = next ? next : UINT64_MAX;
		pthread_mutex_unlock(&state.lock);
		if (!qp)
			return next;
		fire(qp);
		tp_qp_put(qp);
	}
}

/* ---- the thread ---- */

static void kick(void)
{
	uint64_t one = 1;
	while (write(state.kick_fd, &one, sizeof(one)) < 0 && errno == EINTR)
		;
}

static void clear_kick(void)
{
	uint64_t count;
	while (read(state.kick_fd, &count, sizeof(count)) < 0 && errno == EINTR)
		;
}

bool tp_progress_leased(void)
{
	uint64_t lease = atomic_load_explicit(&lease_ns, memory_order_relaxed);
	return lease && tp_clock_ns() - atomic_load_explicit(&polled_ns, memory_order_relaxed) < lease;
}

/* Waits for a descriptor (or only for a kick) until the time comes; 0: none. Returns how many are ready. */
static int wait_until(uint64_t until_ns, bool kick_only, struct epoll_event *events)
{
	uint64_t now = tp_clock_ns(), left = until_ns > now ? until_ns - now : 0;
	struct timespec time = { .tv_sec = (time_t)(left / 1000000000u), .tv_nsec = (long)(left % 1000000000u) };
	if (kick_only) {
		struct pollfd p = { .fd = state.kick_fd, .events = POLLIN };
		ppoll(&p, 1, until_ns ? &time : NULL, NULL);
		return 0;
	}
#ifdef SYS_epoll_pwait2
	long n = syscall(SYS_epoll_pwait2, state.epoll_fd, events, READY_MAX, until_ns ? &time : NULL, NULL, 0);
	if (n >= 0 || errno != ENOSYS)
		return (int)n;
#endif
	return epoll_wait(state.epoll_fd, events, READY_MAX, until_ns ? (int)TP_MIN(left / 1000000u + 1, (uint64_t)60000) : -1);
}

static int serve(const struct epoll_event *event)
{
	struct watch watch = { .fd = -1 };
	int done = 0;
	pthread_mutex_lock(&state.lock);
	for (int k = 0; k < state.watched; k++)
		if (state.watches[k].fd == event->data.fd)
			watch = state.watches[k];
	state.turn++;
	pthread_mutex_unlock(&state.lock);
	if (watch.fd >= 0)
		done = watch.ready(watch.fd, watch.arg);
	pthread_mutex_lock(&state.lock);
	state.turn++;
	pthread_mutex_unlock(&state.lock);
	return done;
}

/* ---- leases ---- */

static struct {
	bool waited;                    /* for the end of one, since packets were served last */
	uint32_t refuse, vain;          /* so many wakings give none; how many were given in vain, in a row */
} leases;       /* the thread's alone */

static void set_lease(uint64_t ns) { atomic_store_explicit(&lease_ns, ns, memory_order_relaxed); }

/* Packets woke us: leave them to a poller who was here a moment ago? */
static bool leave_to_poller(void)
{
	if (leases.waited || tp_clock_ns() - atomic_load_explicit(&polled_ns, memory_order_relaxed) > LEASE_MIN_NS)
		return false;
	if (leases.refuse) {
		leases.refuse--;
		return false;
	}
	if (!atomic_load_explicit(&lease_ns, memory_order_relaxed))
		set_lease(LEASE_MIN_NS);
	return true;
}

static void wait_for_lease(uint64_t next, struct epoll_event *events)
{
	uint64_t lease = atomic_load_explicit(&lease_ns, memory_order_relaxed);
	uint64_t end = atomic_load_explicit(&polled_ns, memory_order_relaxed) + lease;
	wait_until(next ? TP_MIN(next, end) : end, true, events);
	clear_kick();
	leases.waited = true;
	if (tp_progress_leased()) {
		set_lease(TP_MIN(2 * lease, (uint64_t)LEASE_MAX_NS));
		leases.vain = 0;
	}
}

static void learn(int done)
{
	uint64_t lease = atomic_load_explicit(&lease_ns, memory_order_relaxed);
	if (done == 0) {        /* a poller was faster */
		set_lease(lease ? TP_MIN(2 * lease, (uint64_t)LEASE_MAX_NS) : (uint64_t)LEASE_MIN_NS);
		leases.refuse = leases.vain = 0;
	} else if (leases.waited) {
		lease = lease / 4 < LEASE_MIN_NS ? 0 : lease / 4;
		set_lease(lease);
		if (!lease)
			leases.refuse = 8u << TP_MIN(leases.vain++, 5u);
	}
	leases.waited = false;
}

/* Packets were served: looks for more. */
static void look_on(void)
{
	uint64_t start = tp_clock_ns(), before = start;
	if (!tp_linger_pays(start))
		return;
	for (uint64_t now = start, last = start; now - last < TP_LINGER_NS && now - start < LINGER_MOST_NS && !tp_progress_leased();) {
		uint64_t due = atomic_load_explicit(&next_due_ns, memory_order_relaxed);
		int packets = tp_wire.progress();
		now = tp_clock_ns();
		if (packets) {
			tp_linger_note(now);
			last = now;
		} else if (now - before > ASIDE_NS) {
			tp_linger_refrain(now);
			return;
		}
		before = now;
		if (due && due <= now)
			return;
	}
}

/* ---- its work ---- */

static uint64_t earlier(uint64_t a, uint64_t b) { return !a || (b && b < a) ? b : a; }

/* A poller is receiving just now, and may have been put aside by us: it needs its processor back. */
static void defer(void)
{
	if (!atomic_load_explicit(&lease_ns, memory_order_relaxed))
		set_lease(LEASE_MIN_NS);
	atomic_store_explicit(&polled_ns, tp_clock_ns(), memory_order_relaxed);
}

/* Runs what is ready. Returns how much was done; -1: a poller is at it. */
static int serve_all(const struct epoll_event *events, int count)
{
	int done = 0;
	bool busy = false;
	for (int i = 0; i < count; i++) {
		if (events[i].data.fd == state.kick_fd) {
			clear_kick();
			continue;
		}
		int its = serve(&events[i]);
		busy |= its < 0;
		done += TP_MAX(its, 0);
	}
	return busy ? -1 : done;
}

/* Pollers see to packets, not to what else is watched: the keeper's end, changes of addresses. */
static void look_meanwhile(struct epoll_event *events)
{
	static uint64_t looked_ns;
	uint64_t now = tp_clock_ns();
	if (now - looked_ns < LOOK_EVERY_NS)
		return;
	looked_ns = now;
	int n = epoll_wait(state.epoll_fd, events, READY_MAX, 0);
	if (n > 0)
		serve_all(events, n);
}

static void *run_thread(void *arg)
{
	(void)arg;
	prctl(PR_SET_NAME, "telpher-verbs");
	prctl(PR_SET_TIMERSLACK, 1000);
	tp_progress_take_precedence();
	struct epoll_event events[READY_MAX];
	for (;;) {
		uint64_t next = run_timers(true);
		if (tp_progress_leased()) {
			wait_for_lease(next, events);
			look_meanwhile(events);
			continue;
		}
		tp_progress_keep_precedence();
		/* Sequentially consistent: either who expects something sees us asleep, or we see the time. */
		atomic_store_explicit(&asleep, true, memory_order_seq_cst);
		next = earlier(next, atomic_load_explicit(&expected_ns, memory_order_seq_cst));
		int n = wait_until(next, false, events);
		atomic_store_explicit(&asleep, false, memory_order_relaxed);
		if (tp_progress_expected())
			tp_wire.progress();
		if (n <= 0 || leave_to_poller())
			continue;
		int done = serve_all(events, n);
		if (done < 0)
			defer();
		else
			learn(done);
		if (done > 0) {
			tp_linger_note(tp_clock_ns());
			look_on();
		}
	}
	return NULL;
}

/* Under lock. 0 or an errno, logged. */
static int start_locked(void)
{
	if (state.started)
		return 0;
	state.kick_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	state.epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	struct epoll_event event = { .events = EPOLLIN, .data.fd = state.kick_fd };
	int error = state.kick_fd < 0 || state.epoll_fd < 0 || epoll_ctl(state.epoll_fd, EPOLL_CTL_ADD, state.kick_fd, &event) < 0 ? errno : 0;
	if (error) {
		TP_WARN("the progress thread can't get its descriptors: %s", strerror(error));
	} else {
		sigset_t all, before;
		sigfillset(&all);
		pthread_sigmask(SIG_SETMASK, &all, &before);
		error = pthread_create(&state.thread, NULL, run_thread, NULL);
		pthread_sigmask(SIG_SETMASK, &before, NULL);
		if (error)
			TP_WARN("the progress thread can't be started: %s", strerror(error));
	}
	if (error) {
		if (state.kick_fd >= 0)
			close(state.kick_fd);
		if (state.epoll_fd >= 0)
			close(state.epoll_fd);
		state.kick_fd = state.epoll_fd = -1;
		return error;
	}
	pthread_detach(state.thread);
	state.started = true;
	return 0;
}

static int watch_for(uint32_t what, int fd, int (*ready)(int fd, void *arg), void *arg)
{
	pthread_mutex_lock(&state.lock);
	int error = start_locked();
	struct epoll_event event = { .events = what, .data.fd = fd };
	if (!error && state.watched == WATCHES_MAX)
		error = TP_CARD_FAIL(EMFILE, "the progress thread can't watch more than %d descriptors", state.watched);
	if (!error && epoll_ctl(state.epoll_fd, EPOLL_CTL_ADD, fd, &event) < 0)
		error = TP_CARD_FAIL(errno, "can't watch descriptor %d: %s", fd, strerror(errno));
	if (!error)
		state.watches[state.watched++] = (struct watch){ fd, ready, arg };
	atomic_store_explicit(&any_watch, state.watched > 0, memory_order_relaxed);
	pthread_mutex_unlock(&state.lock);
	return error;
}

int tp_progress_watch(int fd, int (*ready)(int fd, void *arg), void *arg) { return watch_for(EPOLLIN, fd, ready, arg); }
int tp_progress_watch_end(int fd, int (*ready)(int fd, void *arg), void *arg) { return watch_for(EPOLLRDHUP, fd, ready, arg); }

void tp_progress_unwatch(int fd)
{
	pthread_mutex_lock(&state.lock);
	for (int i = 0; i < state.watched; i++)
		if (state.watches[i].fd == fd) {
			epoll_ctl(state.epoll_fd, EPOLL_CTL_DEL, fd, NULL);
			state.watches[i] = state.watches[--state.watched];
			break;
		}
	atomic_store_explicit(&any_watch, state.watched > 0, memory_order_relaxed);
	/* Its function may be running: that turn must end (the function itself never comes here). */
	uint32_t turn = state.turn;
	while (turn % 2 && state.turn == turn && !pthread_equal(pthread_self(), state.thread)) {
		pthread_mutex_unlock(&state.lock);
		poll(NULL, 0, 1);
		pthread_mutex_lock(&state.lock);
	}
	pthread_mutex_unlock(&state.lock);
}

void tp_progress_forget(void)
{
	pthread_mutex_init(&state.lock, NULL);
	if (state.epoll_fd >= 0)
		close(state.epoll_fd);
	if (state.kick_fd >= 0)
		close(state.kick_fd);
	state.epoll_fd = state.kick_fd = -1;
	state.count = state.watched = 0;
	state.turn = 0;
	state.started = false;
	atomic_store_explicit(&lease_ns, 0, memory_order_relaxed);
	atomic_store_explicit(&next_due_ns, 0, memory_order_relaxed);
	atomic_store_explicit(&any_watch, false, memory_order_relaxed);
	atomic_store_explicit(&expected_ns, 0, memory_order_relaxed);
	atomic_store_explicit(&asleep, false, memory_order_relaxed);
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
	pthread_mutex_lock(&state.lock);
	start_locked();
	queued = atomic_load_explicit(&timer->queued, memory_order_relaxed);
	if (!queued) {
		put_in(timer, when_ns);
	} else if (queued > when_ns) {
		atomic_store_explicit(&timer->queued, when_ns, memory_order_relaxed);
		sift(timer->place);
		show_next();
	}
	/* The thread itself looks at the heap before it sleeps. */
	bool early = when_ns < state.sleeps_until && state.started && !pthread_equal(pthread_self(), state.thread);
	if (early)
		state.sleeps_until = when_ns;
	pthread_mutex_unlock(&state.lock);
	if (early)
		kick();
}

void tp_timer_free(struct tp_timer *timer)
{
	if (!timer)
		return;
	pthread_mutex_lock(&state.lock);
	if (atomic_load_explicit(&timer->queued, memory_order_relaxed))
		take_out(timer);
	pthread_mutex_unlock(&state.lock);
	free(timer);
}

/* ---- pollers ---- */

void tp_progress_poll(void)
{
	uint64_t due = atomic_load_explicit(&next_due_ns, memory_order_relaxed);
	if (due && due <= tp_clock_ns())
		run_timers(false);
	tp_path_poll();
	if (!atomic_load_explicit(&any_watch, memory_order_relaxed))
		return;
	tp_wire.progress();
	atomic_store_explicit(&polled_ns, tp_clock_ns(), memory_order_relaxed);
}

void tp_progress_expect(uint64_t when_ns)
{
	uint64_t before = atomic_load_explicit(&expected_ns, memory_order_relaxed);
	if (when_ns && before && before <= when_ns)
		return;
	atomic_store_explicit(&expected_ns, when_ns, memory_order_seq_cst);
	if (when_ns && atomic_load_explicit(&asleep, memory_order_seq_cst))
		kick();
}

bool tp_progress_expected(void)
{
	uint64_t when = atomic_load_explicit(&expected_ns, memory_order_relaxed);
	return when && when <= tp_clock_ns();
}

void tp_progress_arm(void)
{
	tp_path_arm();
	if (!atomic_load_explicit(&lease_ns, memory_order_relaxed) || !atomic_load_explicit(&polled_ns, memory_order_relaxed))
		return;
	atomic_store_explicit(&polled_ns, 0, memory_order_relaxed);
	kick();
}

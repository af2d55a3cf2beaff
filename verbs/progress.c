/* The progress thread: one thread a process, which exists from the first timer or descriptor on, blocks all
 * signals and uses no processor while there is nothing to do.
 *
 * An application that polls its completion queues moves packets itself, faster than any thread that must be woken. So a poller
 * holds a lease: while it was here within the lease's length the thread leaves descriptors alone. How long that is the
 * thread learns: a lease is given when packets come just after a poll, grows (to LEASE_MAX_NS) while pollers renew it, and shrinks
 * (to nothing) when packets were found waiting at its end, as with programs that poll memory and no completion queue. Those
 * get none for a while: for so many packets' wakings, twice as many after each vain lease.
 *
 * Where the application sleeps while packets come in quick succession the thread lingers before it sleeps (linger.c). */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "verbs/internal.h"
#include "verbs/path.h"

enum { LEASE_MIN_NS = 20000, LEASE_MAX_NS = 200000, READY_MAX = 32, WATCHES_MAX = 640 /* two for each process that shares the port, and more */ };
/* Lingering: at a stretch; a pause that means that we were put aside. */
enum { LINGER_MOST_NS = 1000000, ASIDE_NS = 50000 };
enum { LOOK_EVERY_NS = 20000000 };

struct watch { int fd; int (*ready)(int, void *); void *arg; };

static struct {
	pthread_mutex_t lock;           /* watches, start of the thread */
	struct watch watches[WATCHES_MAX];
	int watched;
	_Atomic bool started;
	int epoll_fd, kick_fd;
	uint32_t turn;                  /* odd: a descriptor's function runs on the thread */
} state = { .lock = PTHREAD_MUTEX_INITIALIZER, .epoll_fd = -1, .kick_fd = -1 };

static _Atomic uint64_t polled_ns;      /* when a poller was here last */
static _Atomic uint64_t lease_ns;
static _Atomic bool any_watch;
static _Thread_local bool is_thread;
static _Atomic uint64_t expected_ns;    /* tp_progress_expect */
static _Atomic bool asleep;             /* the thread waits for descriptors, or is about to */

/* ---- the thread ---- */

void tp_progress_kick(void)
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
			leases.refuse = 8u << (leases.vain < 5 ? leases.vain++ : 5);
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
		uint64_t due = tp_timers_next();
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
	is_thread = true;
	prctl(PR_SET_NAME, "telpher-verbs");
	prctl(PR_SET_TIMERSLACK, 1000);
	tp_progress_take_precedence();
	struct epoll_event events[READY_MAX];
	for (;;) {
		uint64_t next = tp_timers_run(true);
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
	if (atomic_load_explicit(&state.started, memory_order_relaxed))
		return 0;
	state.kick_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	state.epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	struct epoll_event event = { .events = EPOLLIN, .data.fd = state.kick_fd };
	int error = state.kick_fd < 0 || state.epoll_fd < 0 || epoll_ctl(state.epoll_fd, EPOLL_CTL_ADD, state.kick_fd, &event) < 0 ? errno : 0;
	if (error) {
		TP_WARN("the progress thread can't get its descriptors: %s", strerror(error));
	} else {
		pthread_t thread;
		sigset_t all, before;
		sigfillset(&all);
		pthread_sigmask(SIG_SETMASK, &all, &before);
		error = pthread_create(&thread, NULL, run_thread, NULL);
		pthread_sigmask(SIG_SETMASK, &before, NULL);
		if (error)
			TP_WARN("the progress thread can't be started: %s", strerror(error));
		else
			pthread_detach(thread);
	}
	if (error) {
		if (state.kick_fd >= 0)
			close(state.kick_fd);
		if (state.epoll_fd >= 0)
			close(state.epoll_fd);
		state.kick_fd = state.epoll_fd = -1;
		return error;
	}
	atomic_store_explicit(&state.started, true, memory_order_release);
	return 0;
}

bool tp_progress_is_thread(void) { return is_thread; }

void tp_progress_start(void)
{
	if (atomic_load_explicit(&state.started, memory_order_acquire))
		return;
	pthread_mutex_lock(&state.lock);
	start_locked();
	pthread_mutex_unlock(&state.lock);
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
	while (turn % 2 && state.turn == turn && !is_thread) {
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
	state.watched = 0;
	state.turn = 0;
	atomic_store_explicit(&state.started, false, memory_order_relaxed);
	tp_timers_forget();
	atomic_store_explicit(&lease_ns, 0, memory_order_relaxed);
	atomic_store_explicit(&any_watch, false, memory_order_relaxed);
	atomic_store_explicit(&expected_ns, 0, memory_order_relaxed);
	atomic_store_explicit(&asleep, false, memory_order_relaxed);
}

/* ---- pollers ---- */

void tp_progress_poll(void)
{
	uint64_t due = tp_timers_next();
	if (due && due <= tp_clock_ns())
		tp_timers_run(false);
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
		tp_progress_kick();
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
	tp_progress_kick();
}

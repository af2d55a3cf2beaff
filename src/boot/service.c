/* The service thread: one a process, started by the first user and ended by the last. It sleeps in epoll on the listeners, the
 * connections, the pidfds and other folders' descriptors, and runs the timers; an idle process has no timer but the life signs.
 * All fields are guarded by one lock: what happens here is rare and short. */
#include "boot/internal.h"
#include <errno.h>
#include <dirent.h>
#include <linux/membarrier.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <fcntl.h>

pthread_mutex_t tp_service_mutex = PTHREAD_MUTEX_INITIALIZER;
struct tp_service tp_service = { .epoll = -1, .wake = -1, .spare_fd = -1 };
static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct tp_source wake_source = { .kind = TP_SOURCE_WAKE, .fd = -1 };

struct tp_service_watch {
	struct tp_source source;
	void (*call)(void *arg, uint32_t events);
	void *arg;
	bool calling, dead;
	uint32_t generation;
	struct tp_service_watch *next_dead;
};
/* What a forked child leaves behind: kept reachable, never used. */
static struct tp_service abandoned;
static struct tp_service_watch *dead_watches;

void tp_service_init_cond(pthread_cond_t *cond)
{
	pthread_condattr_t attr;
	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(cond, &attr);
	pthread_condattr_destroy(&attr);
}

void tp_service_wait(pthread_cond_t *cond, uint64_t until_ms)
{
	struct timespec until = { (time_t)(until_ms / 1000), (long)(until_ms % 1000) * 1000000 };
	pthread_cond_timedwait(cond, &tp_service_mutex, &until);
}

static void fork_prepare(void) { pthread_mutex_lock(&tp_service_mutex); }
static void fork_parent(void) { pthread_mutex_unlock(&tp_service_mutex); }

static void close_fd(int fd)
{
	if (fd >= 0) close(fd);
}

/* The child has no service thread. It lets go of the descriptors, so that it can't keep the parent's connections open, and
 * forgets the rest; what was opened before the fork fails by its generation. */
static void fork_child(void)
{
	struct tp_service *s = &tp_service;
	for (struct tp_conn *conn = s->conns; conn; conn = conn->next) close_fd(conn->source.fd);
	for (struct tp_listener *l = s->listeners; l; l = l->next) close_fd(l->source.fd);
	for (struct tp_site *site = s->sites; site; site = site->next) {
		close_fd(site->pidfd.fd);
		for (struct tp_share *share = site->shares; share; share = share->next) close_fd(share->fd);
	}
	close_fd(s->epoll);
	close_fd(s->wake);
	close_fd(s->spare_fd);
	abandoned = *s;
	*s = (struct tp_service){ .epoll = -1, .wake = -1, .spare_fd = -1, .generation = abandoned.generation + 1 };
	dead_watches = NULL;
	tp_service_init_cond(&s->stopped);
	tp_service_init_cond(&s->watch_idle);
	tp_secret_random(&s->process_hash, sizeof(s->process_hash));
	pthread_mutex_unlock(&tp_service_mutex);    /* locked in fork_prepare, by this thread */
}

static void init_once(void)
{
	tp_service_init_cond(&tp_service.stopped);
	tp_service_init_cond(&tp_service.watch_idle);
	tp_secret_random(&tp_service.process_hash, sizeof(tp_service.process_hash));
	pthread_atfork(fork_prepare, fork_parent, fork_child);
}

void tp_service_lock(void)
{
	pthread_once(&once, init_once);
	pthread_mutex_lock(&tp_service_mutex);
}
void tp_service_unlock(void) { pthread_mutex_unlock(&tp_service_mutex); }
bool tp_service_is_mine(void) { return tp_service.running && pthread_equal(pthread_self(), tp_service.thread); }

static void ring_wake(void)
{
	uint64_t one = 1;
	if (tp_service.wake >= 0 && write(tp_service.wake, &one, sizeof(one)) < 0 && errno != EAGAIN)
		TP_WARN("Bootstrap: the service thread can't be woken: %s", strerror(errno));
}

void tp_service_poke(uint64_t when_ms)
{
	if (when_ms >= tp_service.next_ms) return;
	tp_service.next_ms = when_ms;
	if (!tp_service_is_mine()) ring_wake();
}

ncclResult_t tp_service_add(struct tp_source *source, uint32_t events)
{
	struct epoll_event event = { .events = events, .data.ptr = source };
	if (epoll_ctl(tp_service.epoll, EPOLL_CTL_ADD, source->fd, &event) < 0)
		return TP_FAIL(ncclSystemError, "Bootstrap: epoll takes no descriptor %d: %s", source->fd, strerror(errno));
	return ncclSuccess;
}

void tp_service_change(struct tp_source *source, uint32_t events)
{
	struct epoll_event event = { .events = events, .data.ptr = source };
	epoll_ctl(tp_service.epoll, EPOLL_CTL_MOD, source->fd, &event);
}

void tp_service_remove(struct tp_source *source)
{
	if (source->fd < 0) return;
	epoll_ctl(tp_service.epoll, EPOLL_CTL_DEL, source->fd, NULL);
	close(source->fd);
	source->fd = -1;
}

ncclResult_t tp_service_listen(int fd, bool is_unix, struct tp_listener **out)
{
	struct tp_listener *l = tp_alloc(1, sizeof(*l), "bootstrap listener");
	if (!l) {
		close(fd);
		return ncclSystemError;
	}
	l->source = (struct tp_source){ .kind = TP_SOURCE_LISTENER, .fd = fd };
	l->is_unix = is_unix;
	ncclResult_t result = tp_socket_set_nonblocking(fd, true);
	if (result == ncclSuccess) result = tp_service_add(&l->source, EPOLLIN);
	if (result != ncclSuccess) {
		close(fd);
		free(l);
		return result;
	}
	l->next = tp_service.listeners;
	tp_service.listeners = l;
	*out = l;
	return ncclSuccess;
}

void tp_service_unlisten(struct tp_listener *listener)
{
	if (!listener) return;
	for (struct tp_listener **at = &tp_service.listeners; *at; at = &(*at)->next)
		if (*at == listener) {
			*at = listener->next;
			break;
		}
	tp_service_remove(&listener->source);
	/* An event of this batch may still name it: it is freed at the batch's end. */
	listener->next = tp_service.dead_listeners;
	tp_service.dead_listeners = listener;
}

bool tp_service_is_this_machine(const union tp_addr *addr)
{
	const union tp_addr *own = &tp_service.addr;
	if (!tp_service.running || addr->sa.sa_family != own->sa.sa_family) return false;
	if (addr->sa.sa_family == AF_INET6) return memcmp(&addr->v6.sin6_addr, &own->v6.sin6_addr, sizeof(own->v6.sin6_addr)) == 0;
	return addr->v4.sin_addr.s_addr == own->v4.sin_addr.s_addr;
}

bool tp_service_is_here(const union tp_addr *addr)
{
	const union tp_addr *own = &tp_service.addr;
	if (!tp_service_is_this_machine(addr)) return false;
	return addr->sa.sa_family == AF_INET6 ? addr->v6.sin6_port == own->v6.sin6_port : addr->v4.sin_port == own->v4.sin_port;
}

bool tp_service_is_loopback(const union tp_addr *addr)
{
	if (addr->sa.sa_family == AF_INET6) return IN6_IS_ADDR_LOOPBACK(&addr->v6.sin6_addr);
	return (ntohl(addr->v4.sin_addr.s_addr) >> 24) == 127;
}

const union tp_addr *tp_service_from(const union tp_addr *to, union tp_addr *space)
{
	struct tp_interface found;
	struct tp_param *names = tp_param_find("NCCL_SOCKET_IFNAME");
	if (!names || !tp_param_is_set(names) || tp_socket_interface_for(to, &found) != ncclSuccess) return NULL;
	if (found.addr.sa.sa_family != to->sa.sa_family || tp_service_is_loopback(&found.addr) != tp_service_is_loopback(to)) return NULL;
	*space = found.addr;
	return space;
}

static int count_fds(void)
{
	int count = 0;
	DIR *dir = opendir("/proc/self/fd");
	if (!dir) return 64;
	while (readdir(dir)) count++;
	closedir(dir);
	return count;
}

ncclResult_t tp_service_need_fds(int more)
{
	struct rlimit limit;
	if (getrlimit(RLIMIT_NOFILE, &limit) < 0) return ncclSuccess;
	rlim_t need = (rlim_t)(count_fds() + more + 32);
	if (need <= limit.rlim_cur) return ncclSuccess;
	if (need > limit.rlim_max)
		return TP_FAIL(ncclSystemError, "Bootstrap: this process needs %llu file descriptors, the limit (ulimit -Hn) is %llu: "
			"raise it, or spread the ranks over several roots (ncclCommInitRankScalable)", (unsigned long long)need,
			(unsigned long long)limit.rlim_max);
	rlim_t old = limit.rlim_cur;
	limit.rlim_cur = TP_MIN(limit.rlim_max, TP_MAX(need, old * 2));
	if (setrlimit(RLIMIT_NOFILE, &limit) < 0)
		return TP_FAIL(ncclSystemError, "Bootstrap: this process needs %llu file descriptors, the limit (ulimit -n) is %llu and "
			"can't be raised: %s", (unsigned long long)need, (unsigned long long)old, strerror(errno));
	TP_INFO(TP_INIT | TP_BOOTSTRAP, "Bootstrap: raised the limit of file descriptors from %llu to %llu", (unsigned long long)old,
		(unsigned long long)limit.rlim_cur);
	return ncclSuccess;
}

/* A short slice gets this thread the processor soon among many spinning ranks (Linux 6.12 and later; harmless before). */
static void ask_for_short_slices(void)
{
	/* Under a real-time policy the ranks run by it too: then only the same policy gets this thread its turn. */
	if (sched_getscheduler(0) != SCHED_OTHER) return;
	struct { uint32_t size, policy; uint64_t flags; int32_t nice; uint32_t priority; uint64_t runtime, deadline, period; }
		attr = { .size = 48, .runtime = 100000, .nice = getpriority(PRIO_PROCESS, 0) };
	syscall(SYS_sched_setattr, 0, &attr, 0);
}

static void call_watch(struct tp_service_watch *watch, uint32_t events)
{
	if (watch->dead) return;
	watch->calling = true;
	tp_service_unlock();
	watch->call(watch->arg, events);
	tp_service_lock();
	watch->calling = false;
	pthread_cond_broadcast(&tp_service.watch_idle);
}

static void dispatch(struct tp_source *source, uint32_t events)
{
	if (source->fd < 0) return;
	switch (source->kind) {
	case TP_SOURCE_WAKE: {
		uint64_t drained;
		while (read(source->fd, &drained, sizeof(drained)) > 0) {}
		break;
	}
	case TP_SOURCE_LISTENER: tp_conn_accept((struct tp_listener *)source); break;
	case TP_SOURCE_CONN: tp_conn_event((struct tp_conn *)source, events); break;
	case TP_SOURCE_PIDFD: tp_watch_event(source); break;
	case TP_SOURCE_WATCH: call_watch((struct tp_service_watch *)source, events); break;
	}
}

static void run_timers(void)
{
	uint64_t now = tp_clock_ms();
	if (now < tp_service.next_ms) return;
	tp_service.next_ms = UINT64_MAX;
	tp_conn_tick(now);
	tp_join_tick(now);
	tp_root_tick(now);
	tp_site_tick(now);
}

static void free_batch(void)
{
	tp_conn_free_dead();
	tp_root_trim();
	tp_site_free_dead();
	while (dead_watches) {
		struct tp_service_watch *watch = dead_watches;
		dead_watches = watch->next_dead;
		free(watch);
	}
	while (tp_service.dead_listeners) {
		struct tp_listener *listener = tp_service.dead_listeners;
		tp_service.dead_listeners = listener->next;
		free(listener);
	}
}

static void shut(void)
{
	struct tp_service *s = &tp_service;
	while (s->conns) tp_conn_close(s->conns);
	tp_root_free_all();
	while (s->listeners) tp_service_unlisten(s->listeners);
	free_batch();
	close_fd(s->epoll);
	close_fd(s->wake);
	close_fd(s->spare_fd);
	s->epoll = s->wake = s->spare_fd = wake_source.fd = -1;
}

static void *service_main(void *unused)
{
	struct tp_service *s = &tp_service;
	struct epoll_event events[64];
	(void)unused;
	pthread_setname_np(pthread_self(), "telpher-service");
	ask_for_short_slices();
	tp_service_lock();
	while (s->users > 0) {
		uint64_t now = tp_clock_ms();
		int timeout = s->next_ms == UINT64_MAX ? -1 : s->next_ms <= now ? 0 : (int)TP_MIN(s->next_ms - now, 60000u);
		int epoll = s->epoll;
		tp_service_unlock();
		int count = epoll_wait(epoll, events, TP_ARRAY_LEN(events), timeout);
		tp_service_lock();
		for (int i = 0; i < count; i++) dispatch(events[i].data.ptr, events[i].events);
		run_timers();
		free_batch();
	}
	shut();
	s->running = false;
	/* Who waits for the end joins it; where nobody does, the next start or the end of the library. */
	s->finished = !s->abandoned;
	pthread_cond_broadcast(&s->stopped);
	tp_service_unlock();
	return unused;
}

static void join_finished(void)
{
	if (!tp_service.finished) return;
	tp_service.finished = false;
	pthread_join(tp_service.thread, NULL);      /* it has let go of the lock for good */
}

static ncclResult_t open_listener(void)
{
	struct tp_interface found[16];
	struct tp_listener *listener;
	char text[TP_ADDR_TEXT];
	int count = 0, fd;
	TP_TRY(tp_socket_interfaces(found, TP_ARRAY_LEN(found), &count));
	union tp_addr addr = found[0].addr;
	TP_INFO(TP_INIT | TP_BOOTSTRAP, "Bootstrap: Using %s:%s", found[0].name, tp_addr_format(&addr, text));
	TP_TRY(tp_socket_listen(&addr, 4096, &fd));
	TP_TRY(tp_service_listen(fd, false, &listener));
	tp_service.addr = addr;
	return ncclSuccess;
}

static ncclResult_t start_thread(void)
{
	sigset_t all, old;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	int error = pthread_create(&tp_service.thread, NULL, service_main, NULL);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (error) return TP_FAIL(ncclSystemError, "Bootstrap: no service thread: %s", strerror(error));
	return ncclSuccess;
}

static ncclResult_t start(void)
{
	struct tp_service *s = &tp_service;
	join_finished();
	s->abandoned = false;
	s->next_ms = UINT64_MAX;
	s->epoll = epoll_create1(EPOLL_CLOEXEC);
	s->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	s->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
	ncclResult_t result = ncclSuccess;
	if (s->epoll < 0 || s->wake < 0 || s->spare_fd < 0)
		result = TP_FAIL(ncclSystemError, "Bootstrap: no descriptors for the service thread: %s", strerror(errno));
	wake_source.fd = s->wake;
	if (result == ncclSuccess) result = tp_service_add(&wake_source, EPOLLIN);
	if (result == ncclSuccess) result = open_listener();
	/* Sleepers on bells count on it (see tp_bell_arm). */
	syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED, 0, 0);
	if (result == ncclSuccess) {
		s->running = true;
		result = start_thread();
	}
	if (result != ncclSuccess) {
		s->running = false;
		shut();
	}
	return result;
}

ncclResult_t tp_service_use(void)
{
	if (!tp_service.running) TP_TRY(start());
	/* Who waits for the thread's end waits no longer: it lives on. */
	if (tp_service.users++ == 0) pthread_cond_broadcast(&tp_service.stopped);
	return ncclSuccess;
}

void tp_service_unuse(void)
{
	struct tp_service *s = &tp_service;
	if (--s->users > 0 || tp_service_is_mine()) return;
	ring_wake();
	while (s->running && s->users == 0) pthread_cond_wait(&s->stopped, &tp_service_mutex);
	join_finished();
}

/* Before the library is unloaded, a thread that has ended by itself must be out of it. One that still has something to say
 * when the process ends may go on until then; nobody joins it any more. */
__attribute__((destructor)) static void wait_for_end(void)
{
	struct tp_service *s = &tp_service;
	tp_service_lock();
	if (!s->running) join_finished();
	else if (!s->abandoned) s->abandoned = pthread_detach(s->thread) == 0;
	tp_service_unlock();
}

ncclResult_t tp_service_watch_fd(int fd, uint32_t epoll_events, void (*call)(void *arg, uint32_t events), void *arg,
	struct tp_service_watch **out)
{
	struct tp_service_watch *watch = tp_alloc(1, sizeof(*watch), "service watch");
	if (!watch) return ncclSystemError;
	/* Its own descriptor of the same file: the caller may close or watch its own again. */
	*watch = (struct tp_service_watch){ .source = { TP_SOURCE_WATCH, fcntl(fd, F_DUPFD_CLOEXEC, 0) }, .call = call, .arg = arg };
	if (watch->source.fd < 0) {
		free(watch);
		return TP_FAIL(ncclSystemError, "the service thread can't watch descriptor %d: %s", fd, strerror(errno));
	}
	tp_service_lock();
	watch->generation = tp_service.generation;
	ncclResult_t result = tp_service_use();
	if (result == ncclSuccess) {
		result = tp_service_add(&watch->source, epoll_events);
		if (result != ncclSuccess) tp_service_unuse();
	}
	tp_service_unlock();
	if (result != ncclSuccess) {
		close(watch->source.fd);
		free(watch);
		return result;
	}
	*out = watch;
	return ncclSuccess;
}

void tp_service_unwatch(struct tp_service_watch *watch)
{
	if (!watch) return;
	tp_service_lock();
	if (watch->generation != tp_service.generation) {
		tp_service_unlock();
		return;     /* a forked child: it was the parent's */
	}
	watch->dead = true;
	tp_service_remove(&watch->source);
	if (!tp_service_is_mine())
		while (watch->calling) pthread_cond_wait(&tp_service.watch_idle, &tp_service_mutex);
	watch->next_dead = dead_watches;
	dead_watches = watch;
	ring_wake();
	tp_service_unuse();
	tp_service_unlock();
}

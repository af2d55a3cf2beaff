/* The process's watch thread: sleeps in epoll on the devices' event descriptors and on all control connections. It answers life
 * signs, whatever the application is doing, sorts what else comes into inboxes, and keeps the ports' states; the connections
 * themselves belong to others. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>
#include "net/ib/ib.h"

#define DEVICE_BIT ((uint64_t)1 << 32)
#define WAKE_BIT ((uint64_t)1 << 33)

static struct {
	pthread_mutex_t lock;               /* the table of controls, and that nobody is taken out while it is served */
	pthread_t thread;
	bool running, stopping;
	int epoll, wake, ready;
	uint32_t last_id;
	struct tp_ib_control *controls;
	struct tp_ib_context *contexts[TP_IB_MAX_PORTS];
	int ncontexts;
} watch = { .lock = PTHREAD_MUTEX_INITIALIZER };
static uint32_t forks;                  /* between this process and the first; only a child's only thread writes it */

/* ---- devices ---- */

static void port_changed(struct tp_ib_context *context, int number, bool up)
{
	for (int i = 0; i < tp_ib_port_count(); i++) {
		struct tp_ib_port *port = tp_ib_port(i);
		if (port->context != context || port->number != number) continue;
		/* No news where a connection has asked before: then its own message, which says more, stays the last. */
		bool news = atomic_load_explicit(&port->state, memory_order_relaxed) == IBV_PORT_ACTIVE;
		if (up) TP_INFO(TP_NET, "NET/IB : %s : port is ACTIVE again", port->text);
		else if (news) TP_WARN("NET/IB : %s : port has gone DOWN: look at its cable and the switch; connections leave it where they have another port", port->text);
		else TP_INFO(TP_NET, "NET/IB : %s : port has gone DOWN", port->text);
		atomic_store_explicit(&port->state, up ? IBV_PORT_ACTIVE : IBV_PORT_DOWN, memory_order_relaxed);
	}
}

static void one_event(struct tp_ib_context *context, const struct ibv_async_event *event)
{
	const char *text = context->verbs->event_type_str(event->event_type);

	switch (event->event_type) {
	case IBV_EVENT_PORT_ERR: port_changed(context, event->element.port_num, false); return;
	case IBV_EVENT_PORT_ACTIVE: port_changed(context, event->element.port_num, true); return;
	case IBV_EVENT_DEVICE_FATAL:
		TP_WARN("NET/IB : %s : Got async fatal event: %s; the card has failed: look at the kernel log (dmesg)", context->name, text);
		atomic_store_explicit(&context->fatal, (uint32_t)event->event_type + 1, memory_order_relaxed);
		return;
	case IBV_EVENT_CQ_ERR: case IBV_EVENT_QP_FATAL: case IBV_EVENT_QP_REQ_ERR: case IBV_EVENT_QP_ACCESS_ERR:
		/* The completions say more, and say which connection it is. */
		TP_INFO(TP_NET, "NET/IB : %s : Got async event: %s", context->name, text);
		return;
	case IBV_EVENT_GID_CHANGE:
		TP_INFO(TP_NET, "NET/IB : %s:%d : Got async event: %s; connections that exist keep the address they have", context->name, event->element.port_num, text);
		return;
	default:
		TP_INFO(TP_NET, "NET/IB : %s : Got async event: %s", context->name, text);
	}
}

static void take_events(struct tp_ib_context *context, uint32_t ready)
{
	struct ibv_async_event event;

	/* A descriptor that is broken is so for good: it would wake this thread without end. */
	if (ready & (EPOLLERR | EPOLLHUP)) {
		TP_WARN("NET/IB : %s : events don't come any more (was the device taken away?); its port's state is asked for instead", context->name);
		epoll_ctl(watch.epoll, EPOLL_CTL_DEL, context->ibv->async_fd, NULL);
	}

	while (context->verbs->get_async_event(context->ibv, &event) == 0) {
		one_event(context, &event);
		context->verbs->ack_async_event(&event);
	}
}

/* ---- controls ---- */

/* false: the inbox is full, which no peer of ours does to us. */
static bool sort(struct tp_ib_control *control, const struct tp_ib_record *record)
{
	struct tp_ib_record pong;

	switch (record->head.type) {
	case TP_IB_PING:
		tp_ib_record_start(&pong, TP_IB_PONG);
		tp_ib_control_send(control, &pong);
		return true;
	case TP_IB_PONG:
		atomic_fetch_add_explicit(&control->pongs, 1, memory_order_relaxed);
		return true;
	}
	pthread_mutex_lock(&control->lock);
	bool room = control->count < TP_IB_INBOX, known = false;
	/* Attempts to revive a path go on while the owner is elsewhere: the last one is enough. */
	for (uint32_t i = 0; i < control->count && record->head.type == TP_IB_REVIVE; i++) {
		struct tp_ib_record *old = &control->inbox[(control->first + i) % TP_IB_INBOX];
		if (old->head.type != TP_IB_REVIVE || old->as.revive.path != record->as.revive.path) continue;
		old->as.revive = record->as.revive;
		known = true;
	}
	if (known) {
		room = true;
	} else if (room) {
		memcpy(&control->inbox[(control->first + control->count++) % TP_IB_INBOX], record, record->head.bytes);
		atomic_store_explicit(&control->waiting, control->count, memory_order_release);    /* pairs with wants_care in progress.c */
	}
	pthread_mutex_unlock(&control->lock);
	return room;
}

static void end_control(struct tp_ib_control *control, uint32_t how)
{
	epoll_ctl(watch.epoll, EPOLL_CTL_DEL, control->fd, NULL);
	atomic_store_explicit(&control->closed, how, memory_order_release);    /* pairs with the loads in test and care */
}

static void serve(struct tp_ib_control *control)
{
	for (;;) {
		struct tp_ib_record record;
		const char *why;
		ssize_t n = recv(control->fd, control->buffer + control->have, sizeof(control->buffer) - control->have, MSG_DONTWAIT);

		if (n < 0 && errno == EINTR) continue;
		if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
		if (n <= 0) {
			end_control(control, 1);
			return;
		}
		control->have += (size_t)n;
		for (long whole; control->have > 0 && (whole = tp_ib_record_check(control->buffer, control->have, &why)) != 0;) {
			if (whole > 0) memcpy(&record, control->buffer, (size_t)whole);
			if (whole < 0 || !sort(control, &record)) {
				end_control(control, 2);
				return;
			}
			control->have -= (size_t)whole;
			memmove(control->buffer, control->buffer + whole, control->have);
		}
	}
}

static void serve_id(uint32_t id)
{
	for (struct tp_ib_control *c = watch.controls; c; c = c->next)
		if (c->id == id) {
			serve(c);
			return;
		}
}

static void *run(void *arg)
{
	struct epoll_event events[32];

	(void)arg;
	for (;;) {
		int n = epoll_wait(watch.epoll, events, TP_ARRAY_LEN(events), -1);
		if (n < 0 && errno != EINTR) return NULL;
		pthread_mutex_lock(&watch.lock);
		bool stop = watch.stopping;
		for (int i = 0; i < n && !stop; i++) {
			uint64_t tag = events[i].data.u64;
			if (tag & DEVICE_BIT) take_events(watch.contexts[(uint32_t)tag], events[i].events);
			else if (!(tag & WAKE_BIT)) serve_id((uint32_t)tag);
		}
		pthread_mutex_unlock(&watch.lock);
		if (stop) return NULL;
	}
}

/* A forked child has none of it: neither the thread nor a use for its parent's connections. */
static void before_fork(void) { pthread_mutex_lock(&watch.lock); }
static void after_fork_parent(void) { pthread_mutex_unlock(&watch.lock); }
static void after_fork_child(void)
{
	pthread_mutex_unlock(&watch.lock);
	forks++;
	if (watch.running) {
		close(watch.epoll);
		close(watch.wake);
		close(watch.ready);
	}
	watch.running = false;
	watch.controls = NULL;
	watch.ncontexts = 0;
	tp_ib_forget_after_fork();
}

static ncclResult_t start_locked(void)
{
	static bool hooked;

	struct epoll_event event = { .events = EPOLLIN, .data.u64 = WAKE_BIT };
	sigset_t all, old;
	int error;

	if (!hooked && pthread_atfork(before_fork, after_fork_parent, after_fork_child) != 0) return TP_FAIL(ncclSystemError, "NET/IB : no memory to watch for forks");
	hooked = true;
	watch.epoll = epoll_create1(EPOLL_CLOEXEC);
	if (watch.epoll < 0) return TP_FAIL(ncclSystemError, "NET/IB : no descriptor to watch devices: %s", strerror(errno));
	watch.wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	watch.ready = eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK);
	if (watch.wake < 0 || watch.ready < 0 || epoll_ctl(watch.epoll, EPOLL_CTL_ADD, watch.wake, &event) != 0) {
		error = errno;
		goto close_fds;
	}
	watch.stopping = false;
	/* The application's signals are not ours to take. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	error = pthread_create(&watch.thread, NULL, run, NULL);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (error) goto close_fds;
	pthread_setname_np(watch.thread, "telpher-ib");
	watch.running = true;
	return ncclSuccess;
close_fds:
	if (watch.wake >= 0) close(watch.wake);
	if (watch.ready >= 0) close(watch.ready);
	close(watch.epoll);
	return TP_FAIL(ncclSystemError, "NET/IB : the thread that watches devices can't be started: %s", strerror(error));
}

ncclResult_t tp_ib_watch_start(void)
{
	ncclResult_t result = ncclSuccess;

	pthread_mutex_lock(&watch.lock);
	if (!watch.running) result = start_locked();
	pthread_mutex_unlock(&watch.lock);
	return result;
}

void tp_ib_watch_stop(void)
{
	uint64_t one = 1;

	pthread_mutex_lock(&watch.lock);
	bool running = watch.running;
	watch.stopping = true;
	if (running && write(watch.wake, &one, sizeof(one)) < 0) running = false;
	pthread_mutex_unlock(&watch.lock);
	if (!running) return;
	pthread_join(watch.thread, NULL);
	close(watch.wake);
	close(watch.ready);
	close(watch.epoll);
	watch.running = false;
	watch.ncontexts = 0;
}

int tp_ib_ready_fd(void) { return watch.ready; }

void tp_ib_watch_port(struct tp_ib_context *context)
{
	struct epoll_event event = { .events = EPOLLIN };
	int flags = fcntl(context->ibv->async_fd, F_GETFL);

	pthread_mutex_lock(&watch.lock);
	for (int i = 0; i < watch.ncontexts; i++)
		if (watch.contexts[i] == context) {
			pthread_mutex_unlock(&watch.lock);
			return;
		}
	event.data.u64 = DEVICE_BIT | (uint64_t)watch.ncontexts;
	if (flags >= 0 && fcntl(context->ibv->async_fd, F_SETFL, flags | O_NONBLOCK) == 0) {
		watch.contexts[watch.ncontexts++] = context;
		if (epoll_ctl(watch.epoll, EPOLL_CTL_ADD, context->ibv->async_fd, &event) != 0) watch.ncontexts--;
	}
	pthread_mutex_unlock(&watch.lock);
}

bool tp_ib_control_is_inherited(const struct tp_ib_control *control) { return control->fd >= 0 && control->forks != forks; }

ncclResult_t tp_ib_control_add(struct tp_ib_control *control, int fd)
{
	struct epoll_event event = { .events = EPOLLIN };
	ncclResult_t result = ncclSuccess;

	control->fd = fd;
	control->forks = forks;
	pthread_mutex_lock(&watch.lock);
	control->id = ++watch.last_id;
	event.data.u64 = control->id;
	control->next = watch.controls;
	watch.controls = control;
	if (epoll_ctl(watch.epoll, EPOLL_CTL_ADD, fd, &event) != 0) {
		watch.controls = control->next;
		control->fd = -1;
		result = TP_FAIL(ncclSystemError, "NET/IB : a connection can't be watched: %s", strerror(errno));
		close(fd);
	}
	pthread_mutex_unlock(&watch.lock);
	return result;
}

void tp_ib_control_remove(struct tp_ib_control *control)
{
	if (control->fd < 0) return;
	pthread_mutex_lock(&watch.lock);
	for (struct tp_ib_control **at = &watch.controls; *at; at = &(*at)->next)
		if (*at == control) {
			*at = control->next;
			break;
		}
	epoll_ctl(watch.epoll, EPOLL_CTL_DEL, control->fd, NULL);
	pthread_mutex_unlock(&watch.lock);
	/* The peer must hear of it now, also where a forked child has the descriptor too. */
	shutdown(control->fd, SHUT_RDWR);
	close(control->fd);
	control->fd = -1;
}

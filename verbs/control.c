/* Takes orders while the process runs (control.h), in a thread of its own: the progress thread leaves descriptors alone while the
 * program polls, and an order must be heard just then. */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/fork.h"
#include "verbs/capture.h"
#include "verbs/control.h"
#include "verbs/engine.h"
#include "verbs/fault.h"

enum { CLIENTS = 8 };
struct client { int fd; bool captures; };

static struct tp_param params[] = {
	{ .name = "TELPHER_VERBS_CONTROL", .kind = TP_PARAM_BOOL, .fallback = "1",
		.doc = "Take the orders of `telpher verbs fault` and `telpher verbs capture` while the process runs" },
};
TP_PARAM_TABLE("verbs", params)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic bool started;
static int listener = -1;
static struct client clients[CLIENTS];
static int client_count;

void tp_control_name(uid_t uid, pid_t pid, char *out, size_t bytes)
{
	struct stat pidns = { 0 };
	stat("/proc/self/ns/pid", &pidns);
	snprintf(out, bytes, "telpher-verbs/1/%u/control/%d/%llu", (unsigned)uid, (int)pid, (unsigned long long)pidns.st_ino);
}

static struct tp_control_answer carry_out(struct client *client, const struct tp_control_order *order, int with)
{
	struct tp_control_answer answer = { .magic = TP_CONTROL_MAGIC, .version = TP_CONTROL_VERSION };
	char text[sizeof(order->text)], path[64];
	snprintf(text, sizeof(text), "%.*s", (int)sizeof(order->text) - 1, order->text);
	switch ((enum tp_control_kind)order->kind) {
	case TP_CONTROL_FAULTS:
		answer.error = tp_fault_text_set(text);
		if (!answer.error)
			TP_INFO(TP_NET, "faults on demand from now on: %s", text);
		break;
	case TP_CONTROL_SHOW: tp_fault_text_get(answer.text, sizeof(answer.text)); break;
	case TP_CONTROL_CAPTURE:
		/* The file as the other process opened it: this one's folders may be others. */
		snprintf(path, sizeof(path), "/proc/self/fd/%d", with);
		answer.error = tp_capture_start(path);
		for (int i = 0; i < client_count; i++)
			clients[i].captures = false;
		client->captures = answer.error == 0;
		break;
	default: answer.error = ENOSYS;
	}
	return answer;
}

/* false: it is gone, or talks nonsense. */
static bool serve(struct client *client)
{
	struct tp_control_order order;
	char byte;
	int with;
	if (recv(client->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0)
		return false;
	if (tp_unix_recv_fd(client->fd, &with, &order, sizeof(order), tp_clock_ms() + 1000) != ncclSuccess)
		return false;
	struct tp_control_answer answer = { .magic = TP_CONTROL_MAGIC, .version = TP_CONTROL_VERSION, .error = EPROTO };
	bool good = order.magic == TP_CONTROL_MAGIC && order.version == TP_CONTROL_VERSION;
	if (good)
		answer = carry_out(client, &order, with);
	close(with);
	return tp_unix_send_fd(client->fd, client->fd, &answer, sizeof(answer)) == ncclSuccess && good;
}

static void drop(int i)
{
	if (clients[i].captures)
		tp_capture_stop();
	close(clients[i].fd);
	clients[i] = clients[--client_count];
}

static void welcome(void)
{
	pid_t pid;
	uid_t uid;
	int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
	if (fd < 0)
		return;
	if (client_count == CLIENTS || tp_unix_peer(fd, &pid, &uid) != ncclSuccess || (uid != geteuid() && uid != 0)) {
		close(fd);
		return;
	}
	clients[client_count++] = (struct client){ .fd = fd };
}

static void *run(void *arg)
{
	(void)arg;
	prctl(PR_SET_NAME, "telpher-control");
	for (;;) {
		struct pollfd polls[1 + CLIENTS] = { { .fd = listener, .events = POLLIN } };
		int served = client_count;
		for (int i = 0; i < served; i++)
			polls[1 + i] = (struct pollfd){ .fd = clients[i].fd, .events = POLLIN };
		if (poll(polls, (nfds_t)served + 1, -1) < 0 && errno != EINTR)
			return NULL;
		for (int i = served - 1; i >= 0; i--)
			if (polls[1 + i].revents && !serve(&clients[i]))
				drop(i);
		if (polls[0].revents)
			welcome();
	}
}

/* A forked child is another process, with another name; its parent's clients aren't its own. */
static void fork_child(void)
{
	pthread_mutex_init(&lock, NULL);
	if (listener >= 0)
		close(listener);
	for (int i = 0; i < client_count; i++)
		close(clients[i].fd);
	listener = -1;
	client_count = 0;
	atomic_store_explicit(&started, false, memory_order_relaxed);
}
TP_FORK_HOOK(TP_FORK_BASE, NULL, NULL, fork_child)

static void start_locked(void)
{
	char name[64];
	pthread_t thread;
	sigset_t all, before;
	tp_control_name(geteuid(), getpid(), name, sizeof(name));
	if (tp_unix_listen(name, CLIENTS, &listener) != ncclSuccess) {
		listener = -1;
		return;
	}
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	int error = pthread_create(&thread, NULL, run, NULL);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (!error) {
		pthread_detach(thread);
		return;
	}
	TP_WARN("orders from outside can't be taken: no thread (%s)", strerror(error));
	close(listener);
	listener = -1;
}

void tp_control_start(void)
{
	if (atomic_load_explicit(&started, memory_order_relaxed))
		return;
	pthread_mutex_lock(&lock);
	if (!atomic_exchange_explicit(&started, true, memory_order_relaxed) && tp_param_int(&params[0]))
		start_locked();
	pthread_mutex_unlock(&lock);
}

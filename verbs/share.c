/* A member's side of sharing the port (share.h): finds or starts the keeper, gets a slot and its sockets, and when the keeper dies
 * starts another with the box. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>
#include "base/fork.h"
#include "verbs/internal.h"
#include "verbs/last.h"
#include "verbs/port.h"
#include "verbs/rc.h"
#include "verbs/share.h"

enum { START_MS = 3000, PORT_WAIT_MS = 2000, ANSWER_MS = 5000, ALONE_SLOT = 1, PIPE_BYTES = 65536 };

enum { P_SHARE, P_KEEPER };
static struct tp_param params[] = {
	[P_SHARE] = { .name = "TELPHER_VERBS_SHARE", .kind = TP_PARAM_BOOL, .fallback = "1",
		.doc = "Share UDP port 4791 with other processes of this user; 0: have it alone" },
	[P_KEEPER] = { .name = "TELPHER_VERBS_KEEPER", .kind = TP_PARAM_STRING,
		.doc = "Program that keeps the sockets of port 4791; unset: " TP_SHARE_KEEPER " beside the library" },
};
TP_PARAM_TABLE("verbs", params)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int keeper_fd = -1, box = -1;
static _Atomic int my_slot = -1;        /* -1: not asked yet */
static bool alone;

static void fork_child(void)
{
	pthread_mutex_init(&lock, NULL);
	if (keeper_fd >= 0)
		close(keeper_fd);
	if (box >= 0)
		close(box);
	keeper_fd = box = -1;
	alone = false;
	atomic_store_explicit(&my_slot, -1, memory_order_relaxed);
}
TP_FORK_HOOK(TP_FORK_BASE, NULL, NULL, fork_child)

/* ---- starting the keeper ---- */

/* Its whole path: the library may have been found by a relative one, and the keeper starts in the root. */
static bool find_keeper(char out[PATH_MAX])
{
	char path[PATH_MAX];
	const char *named = tp_param_string(&params[P_KEEPER]);
	Dl_info info;
	if (named) {
		snprintf(path, sizeof(path), "%s", named);
	} else {
		if (!dladdr((void *)(uintptr_t)&find_keeper, &info) || !info.dli_fname)
			return false;
		const char *slash = strrchr(info.dli_fname, '/');
		snprintf(path, sizeof(path), "%.*s" TP_SHARE_KEEPER, slash ? (int)(slash - info.dli_fname + 1) : 0, info.dli_fname);
	}
	return realpath(path, out) && access(out, X_OK) == 0;
}

/* In a child that shares nothing but memory as it was: only system calls. The box becomes descriptor 3. */
static void become_keeper(const char *path, int with_box)
{
	char *const argv[] = { (char *)(uintptr_t)TP_SHARE_KEEPER, NULL };
	char *const environment[] = { NULL };
	sigset_t none;
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	setsid();
	int null = open("/dev/null", O_RDWR);
	if (with_box >= 0 && with_box != 3)
		dup2(with_box, 3);
	else if (with_box == 3)
		fcntl(3, F_SETFD, 0);
	for (int fd = 0; fd < 3; fd++)
		dup2(null, fd);
	syscall(SYS_close_range, with_box >= 0 ? 4u : 3u, ~0u, 0u);
	if (chdir("/") == 0)
		execve(path, argv, environment);
	_exit(127);
}

/* A grandchild, so that the application never waits for it, and the child in between raises no SIGCHLD. */
static void start_keeper(int with_box)
{
	char path[PATH_MAX];
	if (!find_keeper(path))
		return;
	pid_t child = (pid_t)syscall(SYS_clone, 0, NULL, NULL, NULL, NULL);
	if (child == 0) {
		if (syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL) == 0)
			become_keeper(path, with_box);
		_exit(0);
	}
	while (child > 0 && waitpid(child, NULL, __WCLONE) < 0 && errno == EINTR)
		;
}

/* ---- talking ---- */

/* Connects without a word where nobody listens. */
static int connect_keeper(void)
{
	struct sockaddr_un addr = { .sun_family = AF_UNIX };
	tp_share_name(addr.sun_path + 1, sizeof(addr.sun_path) - 1);
	int s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (s >= 0 && connect(s, (const struct sockaddr *)&addr, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(addr.sun_path + 1))) == 0)
		return s;
	if (s >= 0)
		close(s);
	return -1;
}

/* The keeper ends when nobody has needed it for a while, perhaps as we come: then another one is asked, without a word. */
static bool has_gone(int s, int timeout_ms)
{
	struct pollfd p = { .fd = s, .events = POLLIN };
	char byte;
	while (poll(&p, 1, timeout_ms) < 0 && errno == EINTR)
		;
	ssize_t n = recv(s, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
	return n == 0 || (n < 0 && errno == ECONNRESET);
}

/* Sends a request with a descriptor, takes the answer with one (*fd, -1 where it is an error). 0 or an errno. */
static int ask(int s, const struct tp_share_request *request, int with, struct tp_share_reply *reply, int *fd)
{
	*fd = -1;
	if (has_gone(s, 0) || tp_unix_send_fd(s, with, request, sizeof(*request)) != ncclSuccess || has_gone(s, ANSWER_MS) ||
		tp_unix_recv_fd(s, fd, reply, sizeof(*reply), tp_clock_ms() + ANSWER_MS) != ncclSuccess)
		return ECONNRESET;
	if (reply->magic == TP_SHARE_MAGIC && reply->version == TP_SHARE_VERSION)
		return 0;
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
	return TP_CARD_FAIL(EPROTO, "the keeper of UDP port %d speaks version %u, this library %u: end the programs that use the other one",
		TP_WIRE_UDP_PORT, reply->version, TP_SHARE_VERSION);
}

static int on_keeper(int fd, void *arg);

/* Under lock: a connection on which a slot was agreed. */
static int join_locked(void)
{
	uint64_t deadline = tp_clock_ms() + START_MS;
	bool started = false;
	while (keeper_fd < 0) {
		int s = connect_keeper(), fd = -1;
		if (s < 0) {
			if (!started)
				start_keeper(box);
			started = true;
			if (tp_clock_ms() > deadline)
				return ETIMEDOUT;
			poll(NULL, 0, 2);
			continue;
		}
		pid_t pid;
		uid_t uid;
		if (tp_unix_peer(s, &pid, &uid) != ncclSuccess || uid != geteuid()) {
			close(s);
			return TP_CARD_FAIL(EPERM, "the keeper of UDP port %d isn't of this user", TP_WIRE_UDP_PORT);
		}
		struct tp_share_request request = { .magic = TP_SHARE_MAGIC, .version = TP_SHARE_VERSION, .kind = TP_SHARE_HELLO,
			.slot = atomic_load_explicit(&my_slot, memory_order_relaxed), .has_box = box >= 0 };
		struct tp_share_reply reply;
		int error = ask(s, &request, box >= 0 ? box : s, &reply, &fd);
		if (error || reply.status != TP_SHARE_OK) {
			close(s);
			if (fd >= 0)
				close(fd);
			if (tp_clock_ms() < deadline && (error == ECONNRESET || (!error && reply.status == TP_SHARE_AGAIN))) {
				poll(NULL, 0, 20);      /* it was just ending, or just began */
				continue;
			}
			return error ? error : TP_CARD_FAIL(reply.error, "no place is left among the processes that share UDP port %d: %s", TP_WIRE_UDP_PORT,
				strerror(reply.error));
		}
		if (box < 0)
			box = fd;
		else
			close(fd);
		keeper_fd = s;
		atomic_store_explicit(&my_slot, reply.slot, memory_order_relaxed);
		TP_INFO(TP_NET, "slot %d of UDP port %d, kept by process %d", reply.slot, TP_WIRE_UDP_PORT, (int)pid);
		tp_progress_watch_end(s, on_keeper, NULL);
	}
	return 0;
}

/* It is gone. Our sockets stay; a new one gets the box. */
static int on_keeper(int fd, void *arg)
{
	(void)arg;
	char byte;
	if (pthread_mutex_trylock(&lock) != 0) {
		poll(NULL, 0, 1);       /* a request is under way: whoever makes it sees the end, and needs a processor for that */
		return 0;
	}
	if (keeper_fd == fd && recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0) {
		tp_progress_unwatch(fd);
		close(fd);
		keeper_fd = -1;
		int error = join_locked();
		if (error)
			TP_WARN("the keeper of UDP port %d ended and can't be started anew (%s): this process goes on, others can't join", TP_WIRE_UDP_PORT,
				strerror(error));
	}
	pthread_mutex_unlock(&lock);
	return 1;
}

static void leave_keeper_locked(void)
{
	tp_progress_unwatch(keeper_fd);
	close(keeper_fd);
	keeper_fd = -1;
}

int tp_share_slot(void)
{
	int slot = atomic_load_explicit(&my_slot, memory_order_relaxed);
	if (slot >= 0)
		return slot;
	char path[PATH_MAX];
	pthread_mutex_lock(&lock);
	slot = atomic_load_explicit(&my_slot, memory_order_relaxed);
	int error = 0;
	if (slot < 0) {
		alone = tp_param_int(&params[P_SHARE]) == 0 || !find_keeper(path);
		error = alone ? 0 : join_locked();
		if (error == ETIMEDOUT) {
			TP_WARN("%s doesn't start: UDP port %d is used by this process alone", path, TP_WIRE_UDP_PORT);
			alone = true;
			error = 0;
		}
		if (alone)
			atomic_store_explicit(&my_slot, ALONE_SLOT, memory_order_relaxed);
		slot = atomic_load_explicit(&my_slot, memory_order_relaxed);
	}
	pthread_mutex_unlock(&lock);
	return error ? -error : slot;
}

/* One try; EAGAIN: another process may bring the port's sockets yet. */
static int ask_socket_locked(const union tp_addr *addr, int *fd)
{
	struct tp_share_request request = { .magic = TP_SHARE_MAGIC, .version = TP_SHARE_VERSION, .kind = TP_SHARE_SOCKET, .addr = *addr };
	struct tp_share_reply reply;
	int error = keeper_fd < 0 ? join_locked() : 0;
	if (error)
		return error;
	error = ask(keeper_fd, &request, keeper_fd, &reply, fd);
	if (error) {
		leave_keeper_locked();
		return error == ECONNRESET ? EAGAIN : error;
	}
	if (reply.status == TP_SHARE_OK)
		return 0;
	close(*fd);
	*fd = -1;
	return reply.status == TP_SHARE_AGAIN ? EAGAIN : reply.error;
}

int tp_share_socket(const union tp_addr *addr, int *fd)
{
	int error = tp_share_slot();
	if (error < 0)
		return -error;
	pthread_mutex_lock(&lock);
	if (alone) {
		error = tp_endpoint_bind(addr, false, fd);
	} else {
		uint64_t deadline = tp_clock_ms() + PORT_WAIT_MS;
		while ((error = ask_socket_locked(addr, fd)) == EAGAIN && tp_clock_ms() < deadline)
			poll(NULL, 0, 20);
		if (error == EAGAIN)
			error = EADDRINUSE;
	}
	pthread_mutex_unlock(&lock);
	if (error)
		tp_endpoint_explain(addr, error);
	return error;
}

void tp_share_leave(const struct tp_last *lasts, int count)
{
	struct tp_share_request request = { .magic = TP_SHARE_MAGIC, .version = TP_SHARE_VERSION, .kind = TP_SHARE_LAST };
	int ends[2];
	/* Somebody holds the lock where the keeper died just now, or a thread waits for it: then that is lost. */
	if (pthread_mutex_trylock(&lock) != 0)
		return;
	if (keeper_fd >= 0 && pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0) {
		/* What a pipe can't hold is left out. */
		int fits = TP_MIN(count, PIPE_BYTES / (int)sizeof(lasts[0]));
		size_t bytes = (size_t)fits * sizeof(lasts[0]);
		bool sent = write(ends[1], lasts, bytes) == (ssize_t)bytes && tp_unix_send_fd(keeper_fd, ends[0], &request, sizeof(request)) == ncclSuccess;
		if (!sent)
			TP_INFO(TP_NET, "the keeper of UDP port %d couldn't be told what this process leaves: %m", TP_WIRE_UDP_PORT);
		close(ends[0]);
		close(ends[1]);
	}
	pthread_mutex_unlock(&lock);
}

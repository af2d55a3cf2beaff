/* Links: one to each process of this machine that a QP was connected to (path_join.c makes them), with the QPs that use them; and
 * this process's yard, which it shows to all.
 *
 * A link is over when its process is (pidfd) or has left it (an exec closes the socket); it is freed by the reader once its last QP
 * has gone. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>
#include "base/fork.h"
#include "verbs/internal.h"
#include "verbs/path_meet.h"

enum { P_PTRACER };
static struct tp_param params[] = {
	[P_PTRACER] = { .name = "TELPHER_VERBS_PTRACER", .kind = TP_PARAM_BOOL, .fallback = "0",
		.doc = "Where Yama forbids processes each other's memory: allow this one's to every process of its user (PR_SET_PTRACER)" },
};
TP_PARAM_TABLE("verbs", params)

struct tp_path_yard *tp_path_own_yard;

struct tp_path_state tp_path_state = { .lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER, .listener = -1, .yard_fd = -1,
	.slot = -1 };
static struct tp_path_link *_Atomic all_links;
static _Atomic bool started;

bool tp_path_any(void) { return atomic_load_explicit(&all_links, memory_order_relaxed) != NULL; }
struct tp_path_link *tp_path_first_link(void) { return atomic_load_explicit(&all_links, memory_order_acquire); }

/* ---- a link made ---- */

static int on_end(int fd, void *arg);

static void free_link(struct tp_path_link *link)
{
	bool loop = link->yard == tp_path_own_yard;
	tp_shm_unmap(link->segment);
	if (!loop) {
		tp_shm_unmap(link->yard);
		tp_shm_unmap(link->keys);
	}
	tp_path_unmap_all(link);
	if (link->socket >= 0)
		close(link->socket);
	if (link->pidfd >= 0)
		close(link->pidfd);
	free(link);
}

struct tp_path_link *tp_path_new_link(int slot, pid_t pid, uint64_t process, const int fds[3], bool connector)
{
	struct tp_path_link *link = tp_alloc(1, sizeof(*link), "a link to a process of this machine");
	void *segment = NULL, *yard = NULL, *keys = NULL;
	size_t key_bytes;
	tp_key_fd(&key_bytes);
	if (!link)
		return NULL;
	link->socket = link->pidfd = -1;
	if (tp_shm_map(fds[0], sizeof(struct tp_path_segment), &segment) != ncclSuccess ||
		tp_shm_map(fds[1], sizeof(struct tp_path_yard), &yard) != ncclSuccess || tp_shm_map(fds[2], key_bytes, &keys) != ncclSuccess) {
		tp_shm_unmap(segment);
		tp_shm_unmap(yard);
		free(link);
		return NULL;
	}
	madvise(segment, sizeof(struct tp_path_segment), MADV_DONTFORK);
	madvise(yard, sizeof(struct tp_path_yard), MADV_DONTFORK);
	link->slot = slot;
	link->pid = pid;
	link->process = process;
	link->segment = segment;
	link->yard = yard;
	link->keys = keys;
	bool self = pid == getpid();
	link->out = &link->segment->lanes[self || connector ? 0 : 1];
	link->in = &link->segment->lanes[self || !connector ? 0 : 1];
	pthread_mutex_init(&link->lock, NULL);
	pthread_mutex_init(&link->map_lock, NULL);
	return link;
}

bool tp_path_register_link(struct tp_path_link *link)
{
	bool self = link->pid == getpid();
	if (!self)
		link->pidfd = tp_path_open_pidfd(link->pid);
	/* Where there is no such thing (Linux before 5.3, containers) the socket says it. */
	bool gone = !self && link->pidfd < 0 && errno == ESRCH;
	if (gone || (link->pidfd >= 0 && tp_progress_watch(link->pidfd, on_end, link) != 0)) {
		free_link(link);
		return false;
	}
	pthread_mutex_lock(&tp_path_state.lock);
	if (tp_path_start_thread() != 0) {
		pthread_mutex_unlock(&tp_path_state.lock);
		if (link->pidfd >= 0)
			tp_progress_unwatch(link->pidfd);
		free_link(link);
		return false;
	}
	if (tp_path_state.by_slot[link->slot])
		atomic_store_explicit(&tp_path_state.by_slot[link->slot]->dead, true, memory_order_release);
	tp_path_state.by_slot[link->slot] = link;
	atomic_store_explicit(&link->next, atomic_load_explicit(&all_links, memory_order_relaxed), memory_order_relaxed);
	/* Release: pairs with tp_path_first_link. */
	atomic_store_explicit(&all_links, link, memory_order_release);
	pthread_cond_broadcast(&tp_path_state.changed);
	pthread_mutex_unlock(&tp_path_state.lock);
	if (!self && tp_progress_watch(link->socket, on_end, link) != 0)
		tp_path_lose(link);
	atomic_store_explicit(&link->registered, true, memory_order_release);
	return true;
}

/* ---- ends ---- */

void tp_path_lose(struct tp_path_link *link)
{
	if (!atomic_exchange_explicit(&link->dead, true, memory_order_acq_rel))
		tp_path_kick();
}

bool tp_path_is_over(struct tp_path_link *link) { return link->socket >= 0 && tp_path_has_ended(link->socket, link->pidfd); }

static int on_end(int fd, void *arg)
{
	struct tp_path_link *link = arg;
	(void)fd;
	/* Both descriptors must be watched before they can be given up; until then this is called again. */
	if (!atomic_load_explicit(&link->registered, memory_order_acquire) || !tp_path_has_ended(link->socket, link->pidfd))
		return 0;
	if (link->pidfd >= 0)
		tp_progress_unwatch(link->pidfd);
	tp_progress_unwatch(link->socket);
	TP_INFO(TP_NET, "process %d (slot %d) ended", (int)link->pid, link->slot);
	atomic_store_explicit(&link->unwatched, true, memory_order_release);
	tp_path_lose(link);
	tp_path_kick();
	return 1;
}

/* What the dead left in the ring is read, its QPs' requests end; the link goes when nothing uses it any more. */
void tp_path_sweep(void)
{
	for (struct tp_path_link *link = tp_path_first_link(), *next; link; link = next) {
		next = atomic_load_explicit(&link->next, memory_order_relaxed);
		if (!atomic_load_explicit(&link->dead, memory_order_acquire))
			continue;
		if (!link->buried) {
			while (tp_path_read(link))
				;
			link->buried = true;
			tp_path_peer_died(link);
		}
		pthread_mutex_lock(&tp_path_state.lock);
		bool free_now = atomic_load_explicit(&link->users, memory_order_acquire) == 0 &&
			atomic_load_explicit(&link->unwatched, memory_order_acquire);
		if (free_now) {
			if (tp_path_state.by_slot[link->slot] == link)
				tp_path_state.by_slot[link->slot] = NULL;
			struct tp_path_link *_Atomic *at = &all_links;
			while (atomic_load_explicit(at, memory_order_relaxed) != link)
				at = &atomic_load_explicit(at, memory_order_relaxed)->next;
			atomic_store_explicit(at, next, memory_order_release);
		}
		pthread_mutex_unlock(&tp_path_state.lock);
		if (free_now)
			free_link(link);
	}
}

/* The lock isn't held. Once the last user has gone the thread may free the link, unless the lock keeps it from looking. */
void tp_path_release(struct tp_path_link *link)
{
	int users = atomic_load_explicit(&link->users, memory_order_relaxed);
	while (users > 1)
		if (atomic_compare_exchange_weak_explicit(&link->users, &users, users - 1, memory_order_release, memory_order_relaxed))
			return;
	pthread_mutex_lock(&tp_path_state.lock);
	bool last = atomic_fetch_sub_explicit(&link->users, 1, memory_order_release) == 1 && atomic_load_explicit(&link->dead, memory_order_relaxed);
	pthread_mutex_unlock(&tp_path_state.lock);
	if (last)
		tp_path_kick();
}

/* ---- QPs ---- */

void tp_path_add_user(struct tp_path_link *link, struct tp_path *path)
{
	pthread_mutex_lock(&tp_path_state.lock);
	path->next = link->first;
	link->first = path;
	pthread_mutex_unlock(&tp_path_state.lock);
}

void tp_path_drop_user(struct tp_path_link *link, struct tp_path *path)
{
	pthread_mutex_lock(&tp_path_state.lock);
	for (struct tp_path **at = &link->first; *at; at = &(*at)->next)
		if (*at == path) {
			*at = path->next;
			break;
		}
	pthread_mutex_unlock(&tp_path_state.lock);
	tp_path_release(link);
}

int tp_path_users(struct tp_path_link *link, uint32_t after, uint32_t *qpns, int max)
{
	int count = 0;
	pthread_mutex_lock(&tp_path_state.lock);
	for (struct tp_path *path = link->first; path && count < max; path = path->next)
		if (after == 0)
			qpns[count++] = path->qpn;
		else
			after--;
	pthread_mutex_unlock(&tp_path_state.lock);
	return count;
}

pid_t tp_path_find_inside(uint32_t place)
{
	pid_t found = 0;
	if (!tp_path_any())
		return 0;
	pthread_mutex_lock(&tp_path_state.lock);
	for (struct tp_path_link *l = tp_path_first_link(); l && !found; l = atomic_load_explicit(&l->next, memory_order_relaxed)) {
		if (atomic_load_explicit(&l->dead, memory_order_relaxed))
			continue;
		for (struct tp_path *path = l->first; path && !found; path = path->next)
			for (int i = 0; i < TP_PATH_KEYS; i++) {
				uint32_t key = atomic_load_explicit(&path->peer->keys[i], memory_order_seq_cst);
				if (key && TP_KEY_PLACE(key) == place && !tp_path_is_over(l))
					found = l->pid;
			}
	}
	pthread_mutex_unlock(&tp_path_state.lock);
	return found;
}

/* ---- the start, and a forked child ---- */

static void fork_child(void)
{
	for (struct tp_path_link *l = atomic_load_explicit(&all_links, memory_order_relaxed); l; l = atomic_load_explicit(&l->next, memory_order_relaxed)) {
		if (l->socket >= 0)
			close(l->socket);
		if (l->pidfd >= 0)
			close(l->pidfd);
	}
	if (tp_path_state.yard_fd >= 0)
		close(tp_path_state.yard_fd);
	memset(&tp_path_state, 0, sizeof(tp_path_state));
	tp_path_state.slot = tp_path_state.listener = tp_path_state.yard_fd = -1;
	pthread_mutex_init(&tp_path_state.lock, NULL);
	pthread_cond_init(&tp_path_state.changed, NULL);
	atomic_store_explicit(&all_links, NULL, memory_order_relaxed);
	atomic_store_explicit(&started, false, memory_order_relaxed);
	tp_path_own_yard = NULL;
	tp_path_meet_forget();
	tp_path_map_forget();
	tp_path_bell_forget();
}
TP_FORK_HOOK(TP_FORK_BASE, NULL, NULL, fork_child)

static bool make_yard_locked(void)
{
	void *memory;
	size_t key_bytes;
	if (tp_path_own_yard)
		return true;
	/* Without keys that others can see there is nothing to do there. */
	if (tp_key_fd(&key_bytes) < 0)
		return false;
	if (tp_path_state.yard_fd < 0 && tp_shm_create("telpher-verbs-yard", sizeof(struct tp_path_yard), &tp_path_state.yard_fd) != ncclSuccess)
		return false;
	if (tp_shm_map(tp_path_state.yard_fd, sizeof(struct tp_path_yard), &memory) != ncclSuccess)
		return false;
	/* A forked child has none of this. */
	madvise(memory, sizeof(struct tp_path_yard), MADV_DONTFORK);
	struct tp_path_yard *yard = memory;
	yard->magic = TP_PATH_MAGIC;
	yard->version = TP_PATH_VERSION;
	tp_path_own_yard = yard;
	tp_path_watch();
	return true;
}

struct tp_path_yard *tp_path_make_yard(void)
{
	pthread_mutex_lock(&tp_path_state.lock);
	make_yard_locked();
	struct tp_path_yard *yard = tp_path_own_yard;
	pthread_mutex_unlock(&tp_path_state.lock);
	return yard;
}

static enum tp_path_reason start_locked(int slot)
{
	tp_path_state.slot = slot;
	if (!make_yard_locked())
		return TP_PATH_NO_MEMORY;
	if (tp_param_int(&params[P_PTRACER]) && prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY) != 0)
		TP_INFO(TP_NET, "PR_SET_PTRACER: %s", strerror(errno));
	tp_path_state.listener = tp_path_listen(slot);
	if (tp_path_state.listener < 0 || tp_progress_watch(tp_path_state.listener, tp_path_on_connect, NULL) != 0)
		return TP_PATH_NO_MEMORY;
	tp_key_peers_hook = tp_path_keep_out;
	return tp_engine_wire_always ? TP_PATH_SWITCHED_OFF : TP_PATH_TAKEN;
}

void tp_path_start(int slot)
{
	if (atomic_load_explicit(&started, memory_order_acquire))
		return;
	pthread_mutex_lock(&tp_path_state.lock);
	if (!atomic_load_explicit(&started, memory_order_relaxed)) {
		tp_path_state.off = start_locked(slot);
		if (tp_path_state.off == TP_PATH_NO_MEMORY)
			TP_INFO(TP_NET, "this process reaches others of this machine by the wire alone: %s", strerror(errno));
		/* Release: what was made is seen by who finds it started. */
		atomic_store_explicit(&started, true, memory_order_release);
	}
	pthread_mutex_unlock(&tp_path_state.lock);
}

/* Who of a host's processes lives. Each process watches the next living one by a pidfd: the kernel tells of a death whatever
 * the dead one's children hold open. The watcher of a dead process goes on to that one's successor.
 *
 * A process that calls execve keeps its number but has forgotten its ranks. So each one locks a byte of the control segment's
 * file: the kernel lets go of that lock at execve too, and children don't inherit it. POSIX locks end when any descriptor of
 * the file is closed by the process: the one of the control segment stays open as long as the site. */
#include "boot/internal.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

void tp_watch_dead(struct tp_site *site, int rank, const char *how)
{
	const struct tp_boot_peer *peer = &tp_segment_peers(site->seg)[rank];
	struct tp_event event = { .kind = TP_EVENT_DEAD, .rank = rank, .result = ncclRemoteError };
	snprintf(event.text, sizeof(event.text), "rank %d (host %s, pid %d) %s", rank, peer->host_name, (int)peer->pid, how);
	if (!tp_event_get(site->seg, &(struct tp_event){ .kind = TP_EVENT_NONE })) TP_WARN("comm %#llx: %s", (unsigned long long)site->name, event.text);
	tp_event_post(site, &event);
}

/* The lowest rank of a process that has not closed. */
static int rank_of(struct tp_site *site, int proc)
{
	struct tp_segment_rank *ranks = tp_segment_ranks(site->seg);
	for (int i = 0; i < site->seg->nlocal; i++)
		if (ranks[i].proc == proc && !atomic_load_explicit(&ranks[i].left, memory_order_acquire)) return tp_segment_local_ranks(site->seg)[i];
	return tp_segment_procs(site->seg)[proc].first_rank;
}

static void found_dead(struct tp_site *site, int proc, const char *how)
{
	uint32_t lives = TP_PROC_LIVES;
	struct tp_event event;
	if (!atomic_compare_exchange_strong_explicit(&tp_segment_procs(site->seg)[proc].state, &lives, TP_PROC_DEAD, memory_order_acq_rel,
		memory_order_acquire)) return;
	/* It may have been the one that had an earlier event to tell to the other hosts, and not have got to it. */
	if (tp_event_get(site->seg, &event)) tp_mesh_flood(site, &event);
	else tp_watch_dead(site, rank_of(site, proc), how);
}

/* True: watched; false: it is dead already. */
static bool watch_proc(struct tp_site *site, int proc)
{
	pid_t pid = tp_segment_procs(site->seg)[proc].pid;
	int fd = (int)syscall(SYS_pidfd_open, pid, 0);
	if (fd < 0 && errno == ESRCH) return false;
	/* No descriptor left, or an old kernel: the timer asks. */
	if (fd < 0 && kill(pid, 0) < 0 && errno == ESRCH) return false;
	site->watching = proc;
	site->pidfd.fd = fd;
	if (fd >= 0 && tp_service_add(&site->pidfd, EPOLLIN) != ncclSuccess) {
		close(fd);
		site->pidfd.fd = -1;
	}
	return true;
}

void tp_watch_start(struct tp_site *site)
{
	struct tp_segment *seg = site->seg;
	tp_watch_stop(site);
	for (int step = 1; step < seg->nprocs; step++) {
		int proc = (site->proc + step) % seg->nprocs;
		if (atomic_load_explicit(&tp_segment_procs(seg)[proc].state, memory_order_acquire) != TP_PROC_LIVES) continue;
		if (watch_proc(site, proc)) return;
		found_dead(site, proc, "died");
	}
}

void tp_watch_stop(struct tp_site *site)
{
	tp_service_remove(&site->pidfd);
	site->watching = -1;
}

void tp_watch_event(struct tp_source *pidfd)
{
	struct tp_site *site = (struct tp_site *)((char *)pidfd - offsetof(struct tp_site, pidfd));
	int proc = site->watching;
	if (proc < 0 || site->closing) return;
	found_dead(site, proc, "died");
	tp_watch_start(site);
}

void tp_watch_hold(struct tp_site *site)
{
	struct flock lock = { .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = site->proc, .l_len = 1 };
	if (site->lock_fd < 0 || fcntl(site->lock_fd, F_SETLK, &lock) < 0) return;
	/* Release: pairs with the acquire in has_let_go. */
	atomic_store_explicit(&tp_segment_procs(site->seg)[site->proc].locked, 1, memory_order_release);
}

static bool has_let_go(struct tp_site *site, int proc)
{
	struct flock lock = { .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = proc, .l_len = 1 };
	if (site->lock_fd < 0 || !atomic_load_explicit(&tp_segment_procs(site->seg)[proc].locked, memory_order_acquire)) return false;
	return fcntl(site->lock_fd, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

void tp_watch_look(struct tp_site *site)
{
	int proc = site->watching;
	if (proc < 0) return;
	_Atomic uint32_t *state = &tp_segment_procs(site->seg)[proc].state;
	bool lives = atomic_load_explicit(state, memory_order_acquire) == TP_PROC_LIVES;
	/* Who leaves says so before it lets go: hence the second look. */
	if (lives && has_let_go(site, proc) && atomic_load_explicit(state, memory_order_acquire) == TP_PROC_LIVES) {
		found_dead(site, proc, "died or became another program (execve)");
		lives = false;
	}
	if (!lives || site->pidfd.fd < 0) tp_watch_start(site);
}

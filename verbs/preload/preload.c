/* libtelpher-verbs-preload.so: shows programs that look into /sys/class/infiniband or /dev/infiniband past libibverbs (UCX, NCCL,
 * ibstat, pyverbs) what they would find there with a card. Each call whose path names something of the card goes on with the path
 * of a real file that says the same (verbs/sysfs.c); all others go on untouched.
 *
 * Calls may come before anything is set up, and from inside an allocator: until the real function is found they go to the kernel. */
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>
#include "verbs/preload/preload.h"

extern bool tp_card_inner_sysfs_redirect(const char *path, char *out, size_t bytes);
extern void tp_card_inner_sysfs_restore(char *path);
extern bool tp_card_inner_sysfs_unreadable(const char *real);

/* Inside the card's own work, its calls are left alone. */
static __thread bool inside __attribute__((tls_model("initial-exec")));

void *tp_preload_next(void *_Atomic *place, const char *name)
{
	void *next = atomic_load_explicit(place, memory_order_relaxed);
	if (next || inside)
		return next;
	inside = true;
	next = dlsym(RTLD_NEXT, name);
	inside = false;
	atomic_store_explicit(place, next, memory_order_relaxed);
	return next;
}

/* An absolute path for one that begins at the root by way of a descriptor or the working directory (hwloc does that). */
static const char *from_root(int dirfd, const char *path, char *out)
{
	char link[40], place[4];
	if (strncmp(path, "sys/", 4) && strncmp(path, "dev/infiniband", 14))
		return path;
	snprintf(link, sizeof(link), dirfd == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", dirfd);
	if (syscall(SYS_readlinkat, AT_FDCWD, link, place, sizeof(place)) != 1 || place[0] != '/' || strlen(path) + 2 > TP_SYSFS_PATH)
		return path;
	out[0] = '/';
	strcpy(out + 1, path);
	return out;
}

const char *tp_preload_path(int dirfd, const char *path, char *out)
{
	char absolute[TP_SYSFS_PATH];
	if (!path || inside || (path[0] == '/' && tp_sysfs_foreign(path)) || (path[0] != '/' && path[0] != 's' && path[0] != 'd'))
		return path;
	/* Most of what is left: /dev/shm, /srv, /sys/devices/system … */
	if (path[0] == '/' && path[1] == 'd' && !strstr(path, "infiniband"))
		return path;
	int error = errno;
	inside = true;
	const char *full = path[0] == '/' ? path : from_root(dirfd, path, absolute);
	bool ours = full[0] == '/' && tp_card_inner_sysfs_redirect(full, out, TP_SYSFS_PATH);
	inside = false;
	errno = error;
	return ours ? out : path;
}

bool tp_preload_unreadable(const char *real)
{
	inside = true;
	bool is = tp_card_inner_sysfs_unreadable(real);
	inside = false;
	return is;
}

void tp_preload_restore(char *path)
{
	int error = errno;
	inside = true;
	tp_card_inner_sysfs_restore(path);
	inside = false;
	errno = error;
}

/* A path that stands for a device: the link to /dev/null is what we made of it. */
bool tp_preload_is_device(const char *real)
{
	return strstr(real, "/dev/infiniband/") != NULL;
}

uint64_t tp_preload_device_number(const char *real)
{
	const char *uverbs = strstr(real, "/dev/infiniband/uverbs");
	return uverbs ? makedev(231, 192 + (unsigned)atoi(uverbs + 22)) : makedev(10, 121);
}

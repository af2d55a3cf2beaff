/* Files and folders opened by path. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "verbs/preload/preload.h"

/* Fortified and 64-bit variants have no declaration to lean on; their types are those of the plain ones. */
#pragma GCC diagnostic ignored "-Wmissing-prototypes"
#pragma GCC diagnostic ignored "-Wredundant-decls"

/* An empty GID's type can be opened, and read() gives EINVAL: as with this descriptor, which has nothing to read. */
static int open_unreadable(int flags) { return epoll_create1(flags & O_CLOEXEC ? EPOLL_CLOEXEC : 0); }

static bool takes_mode(int flags) { return (flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE; }

static mode_t mode_of(int flags, va_list args) { return takes_mode(flags) ? va_arg(args, mode_t) : 0; }

/* sysfs is there to be read: what would write, create or remove gets the kernel's answer for a file of another owner. */
static int open_ours(const char *real, int flags)
{
	if ((flags & O_ACCMODE) == O_RDONLY && !(flags & O_DIRECTORY) && tp_preload_unreadable(real))
		return open_unreadable(flags);
	if (((flags & O_ACCMODE) != O_RDONLY || takes_mode(flags)) && !tp_preload_is_device(real)) {
		errno = EACCES;
		return -1;
	}
	return (int)syscall(SYS_openat, AT_FDCWD, real, flags & ~(O_CREAT | O_NOFOLLOW), 0);
}

#define WRAP_OPEN(name) \
	TP_NEXT(int, name, (const char *, int, ...)) \
	TP_WRAP int name(const char *path, int flags, ...) \
	{ \
		char ours[TP_SYSFS_PATH]; \
		va_list args; \
		va_start(args, flags); \
		mode_t mode = mode_of(flags, args); \
		va_end(args); \
		const char *real = tp_preload_path(AT_FDCWD, path, ours); \
		if (real == ours) \
			return open_ours(real, flags); \
		return next_##name() ? next_##name()(path, flags, mode) : (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode); \
	}
WRAP_OPEN(open)
WRAP_OPEN(open64)

#define WRAP_OPENAT(name) \
	TP_NEXT(int, name, (int, const char *, int, ...)) \
	TP_WRAP int name(int dirfd, const char *path, int flags, ...) \
	{ \
		char ours[TP_SYSFS_PATH]; \
		va_list args; \
		va_start(args, flags); \
		mode_t mode = mode_of(flags, args); \
		va_end(args); \
		const char *real = tp_preload_path(dirfd, path, ours); \
		if (real == ours) \
			return open_ours(real, flags); \
		return next_##name() ? next_##name()(dirfd, path, flags, mode) : (int)syscall(SYS_openat, dirfd, path, flags, mode); \
	}
WRAP_OPENAT(openat)
WRAP_OPENAT(openat64)

/* What fortified programs call where no mode is given. */
#define WRAP_OPEN_2(name) \
	TP_NEXT(int, name, (const char *, int)) \
	TP_WRAP int name(const char *path, int flags) \
	{ \
		char ours[TP_SYSFS_PATH]; \
		const char *real = tp_preload_path(AT_FDCWD, path, ours); \
		if (real == ours) \
			return open_ours(real, flags); \
		return next_##name() ? next_##name()(path, flags) : (int)syscall(SYS_openat, AT_FDCWD, path, flags, 0); \
	}
WRAP_OPEN_2(__open_2)
WRAP_OPEN_2(__open64_2)

#define WRAP_OPENAT_2(name) \
	TP_NEXT(int, name, (int, const char *, int)) \
	TP_WRAP int name(int dirfd, const char *path, int flags) \
	{ \
		char ours[TP_SYSFS_PATH]; \
		const char *real = tp_preload_path(dirfd, path, ours); \
		if (real == ours) \
			return open_ours(real, flags); \
		return next_##name() ? next_##name()(dirfd, path, flags) : (int)syscall(SYS_openat, dirfd, path, flags, 0); \
	}
WRAP_OPENAT_2(__openat_2)
WRAP_OPENAT_2(__openat64_2)

static FILE *fopen_ours(const char *real, const char *mode)
{
	bool reads = mode[0] == 'r' && !strchr(mode, '+');
	int fd = open_ours(real, (reads ? O_RDONLY : O_RDWR) | (strchr(mode, 'e') ? O_CLOEXEC : 0));
	FILE *file = fd < 0 ? NULL : fdopen(fd, mode);
	if (!file && fd >= 0)
		close(fd);
	return file;
}

#define WRAP_FOPEN(name) \
	TP_NEXT(FILE *, name, (const char *, const char *)) \
	TP_WRAP FILE *name(const char *path, const char *mode) \
	{ \
		char ours[TP_SYSFS_PATH]; \
		const char *real = tp_preload_path(AT_FDCWD, path, ours); \
		if (real == ours) \
			return fopen_ours(real, mode); \
		if (next_##name()) \
			return next_##name()(path, mode); \
		errno = EAGAIN; \
		return NULL; \
	}
WRAP_FOPEN(fopen)
WRAP_FOPEN(fopen64)

TP_NEXT(DIR *, opendir, (const char *))
TP_WRAP DIR *opendir(const char *path)
{
	char ours[TP_SYSFS_PATH];
	const char *real = tp_preload_path(AT_FDCWD, path, ours);
	if (next_opendir())
		return next_opendir()(real);
	errno = EAGAIN;
	return NULL;
}

#define WRAP_SCANDIR(name, entry) \
	TP_NEXT(int, name, (const char *, struct entry ***, int (*)(const struct entry *), int (*)(const struct entry **, const struct entry **))) \
	TP_WRAP int name(const char *path, struct entry ***list, int (*filter)(const struct entry *), \
		int (*compare)(const struct entry **, const struct entry **)) \
	{ \
		char ours[TP_SYSFS_PATH]; \
		const char *real = tp_preload_path(AT_FDCWD, path, ours); \
		if (next_##name()) \
			return next_##name()(real, list, filter, compare); \
		errno = EAGAIN; \
		return -1; \
	}
WRAP_SCANDIR(scandir, dirent)
WRAP_SCANDIR(scandir64, dirent64)

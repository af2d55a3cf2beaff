/* Questions about paths: stat in all its forms, access, readlink, realpath. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>
#include "verbs/preload/preload.h"

#pragma GCC diagnostic ignored "-Wmissing-prototypes"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wnonnull-compare"
#endif

_Static_assert(sizeof(struct stat) == sizeof(struct stat64), "64-bit machines alone: one structure, one system call");

static int kernel_stat(int dirfd, const char *path, void *out, int flags)
{
#ifdef SYS_newfstatat
	return (int)syscall(SYS_newfstatat, dirfd, path, out, flags);
#else
	return (int)syscall(SYS_fstatat, dirfd, path, out, flags);
#endif
}

/* A device's link to /dev/null is no link to the program, and has the number of a verbs device. */
static int stat_ours(const char *real, struct stat *out, int flags)
{
	bool device = tp_preload_is_device(real);
	if (kernel_stat(AT_FDCWD, real, out, device ? 0 : flags & AT_SYMLINK_NOFOLLOW))
		return -1;
	if (device)
		out->st_rdev = tp_preload_device_number(real);
	else if (S_ISREG(out->st_mode))
		out->st_mode = S_IFREG | 0444;
	else if (S_ISDIR(out->st_mode))
		out->st_mode = S_IFDIR | 0755;
	return 0;
}

#define WRAP_STAT(name, type, flags) \
	TP_NEXT(int, name, (const char *, struct type *)) \
	TP_WRAP int name(const char *path, struct type *out) \
	{ \
		char ours[TP_SYSFS_PATH]; \
		const char *real = tp_preload_path(AT_FDCWD, path, ours); \
		if (real == ours) \
			return stat_ours(real, (struct stat *)out, flags); \
		return next_##name() ? next_##name()(path, out) : kernel_stat(AT_FDCWD, path, out, flags); \
	}
WRAP_STAT(stat, stat, 0)
WRAP_STAT(stat64, stat64, 0)
WRAP_STAT(lstat, stat, AT_SYMLINK_NOFOLLOW)
WRAP_STAT(lstat64, stat64, AT_SYMLINK_NOFOLLOW)

/* Programs built before glibc 2.33. */
#define WRAP_XSTAT(name, type, flags) \
	TP_NEXT(int, name, (int, const char *, struct type *)) \
	TP_WRAP int name(int version, const char *path, struct type *out) \
	{ \
		char ours[TP_SYSFS_PATH]; \
		const char *real = tp_preload_path(AT_FDCWD, path, ours); \
		if (real == ours) \
			return stat_ours(real, (struct stat *)out, flags); \
		return next_##name() ? next_##name()(version, path, out) : kernel_stat(AT_FDCWD, path, out, flags); \
	}
WRAP_XSTAT(__xstat, stat, 0)
WRAP_XSTAT(__xstat64, stat64, 0)
WRAP_XSTAT(__lxstat, stat, AT_SYMLINK_NOFOLLOW)
WRAP_XSTAT(__lxstat64, stat64, AT_SYMLINK_NOFOLLOW)

#define WRAP_FSTATAT(name, type) \
	TP_NEXT(int, name, (int, const char *, struct type *, int)) \
	TP_WRAP int name(int dirfd, const char *path, struct type *out, int flags) \
	{ \
		char ours[TP_SYSFS_PATH]; \
		const char *real = tp_preload_path(dirfd, path, ours); \
		if (real == ours) \
			return stat_ours(real, (struct stat *)out, flags); \
		return next_##name() ? next_##name()(dirfd, path, out, flags) : kernel_stat(dirfd, path, out, flags); \
	}
WRAP_FSTATAT(fstatat, stat)
WRAP_FSTATAT(fstatat64, stat64)

#define WRAP_FXSTATAT(name, type) \
	TP_NEXT(int, name, (int, int, const char *, struct type *, int)) \
	TP_WRAP int name(int version, int dirfd, const char *path, struct type *out, int flags) \
	{ \
		char ours[TP_SYSFS_PATH]; \
		const char *real = tp_preload_path(dirfd, path, ours); \
		if (real == ours) \
			return stat_ours(real, (struct stat *)out, flags); \
		return next_##name() ? next_##name()(version, dirfd, path, out, flags) : kernel_stat(dirfd, path, out, flags); \
	}
WRAP_FXSTATAT(__fxstatat, stat)
WRAP_FXSTATAT(__fxstatat64, stat64)

TP_NEXT(int, statx, (int, const char *, int, unsigned int, struct statx *))
TP_WRAP int statx(int dirfd, const char *path, int flags, unsigned int mask, struct statx *out)
{
	char ours[TP_SYSFS_PATH];
	const char *real = tp_preload_path(dirfd, path, ours);
	if (real != ours)
		return next_statx() ? next_statx()(dirfd, path, flags, mask, out) : (int)syscall(SYS_statx, dirfd, path, flags, mask, out);
	bool device = tp_preload_is_device(real);
	if (syscall(SYS_statx, AT_FDCWD, real, device ? flags & ~AT_SYMLINK_NOFOLLOW : flags, mask, out))
		return -1;
	if (device) {
		out->stx_rdev_major = major(tp_preload_device_number(real));
		out->stx_rdev_minor = minor(tp_preload_device_number(real));
	} else if (S_ISREG(out->stx_mode) || S_ISDIR(out->stx_mode)) {
		out->stx_mode = S_ISREG(out->stx_mode) ? S_IFREG | 0444 : S_IFDIR | 0755;
	}
	return 0;
}

/* ---- access ---- */

static int access_ours(const char *real, int mode)
{
	if (syscall(SYS_faccessat, AT_FDCWD, real, mode & ~(tp_preload_is_device(real) ? 0 : W_OK)))
		return -1;
	if ((mode & W_OK) && !tp_preload_is_device(real)) {
		errno = EACCES;
		return -1;
	}
	return 0;
}

#define WRAP_ACCESS(name) \
	TP_NEXT(int, name, (const char *, int)) \
	TP_WRAP int name(const char *path, int mode) \
	{ \
		char ours[TP_SYSFS_PATH]; \
		const char *real = tp_preload_path(AT_FDCWD, path, ours); \
		if (real == ours) \
			return access_ours(real, mode); \
		return next_##name() ? next_##name()(path, mode) : (int)syscall(SYS_faccessat, AT_FDCWD, path, mode); \
	}
WRAP_ACCESS(access)
WRAP_ACCESS(euidaccess)
WRAP_ACCESS(eaccess)

TP_NEXT(int, faccessat, (int, const char *, int, int))
TP_WRAP int faccessat(int dirfd, const char *path, int mode, int flags)
{
	char ours[TP_SYSFS_PATH];
	const char *real = tp_preload_path(dirfd, path, ours);
	if (real == ours)
		return access_ours(real, mode);
	return next_faccessat() ? next_faccessat()(dirfd, path, mode, flags) : (int)syscall(SYS_faccessat, dirfd, path, mode);
}

/* ---- extended attributes: sysfs has none (ls asks) ---- */

#define WRAP_GETXATTR(name) \
	TP_NEXT(ssize_t, name, (const char *, const char *, void *, size_t)) \
	TP_WRAP ssize_t name(const char *path, const char *attribute, void *out, size_t bytes) \
	{ \
		char ours[TP_SYSFS_PATH]; \
		if (tp_preload_path(AT_FDCWD, path, ours) == ours) { \
			errno = access_ours(ours, F_OK) ? errno : EOPNOTSUPP; \
			return -1; \
		} \
		return next_##name() ? next_##name()(path, attribute, out, bytes) : syscall(SYS_##name, path, attribute, out, bytes); \
	}
WRAP_GETXATTR(getxattr)
WRAP_GETXATTR(lgetxattr)

#define WRAP_LISTXATTR(name) \
	TP_NEXT(ssize_t, name, (const char *, char *, size_t)) \
	TP_WRAP ssize_t name(const char *path, char *out, size_t bytes) \
	{ \
		char ours[TP_SYSFS_PATH]; \
		const char *real = tp_preload_path(AT_FDCWD, path, ours); \
		if (real == ours) \
			return access_ours(real, F_OK) ? -1 : 0; \
		return next_##name() ? next_##name()(path, out, bytes) : syscall(SYS_##name, path, out, bytes); \
	}
WRAP_LISTXATTR(listxattr)
WRAP_LISTXATTR(llistxattr)

/* ---- links ---- */

static ssize_t readlink_ours(const char *real, char *out, size_t bytes)
{
	if (tp_preload_is_device(real) && access_ours(real, F_OK) == 0) {
		errno = EINVAL;
		return -1;
	}
	return syscall(SYS_readlinkat, AT_FDCWD, real, out, bytes);
}

TP_NEXT(ssize_t, readlink, (const char *, char *, size_t))
TP_WRAP ssize_t readlink(const char *path, char *out, size_t bytes)
{
	char ours[TP_SYSFS_PATH];
	const char *real = tp_preload_path(AT_FDCWD, path, ours);
	if (real == ours)
		return readlink_ours(real, out, bytes);
	return next_readlink() ? next_readlink()(path, out, bytes) : syscall(SYS_readlinkat, AT_FDCWD, path, out, bytes);
}

TP_NEXT(ssize_t, readlinkat, (int, const char *, char *, size_t))
TP_WRAP ssize_t readlinkat(int dirfd, const char *path, char *out, size_t bytes)
{
	char ours[TP_SYSFS_PATH];
	const char *real = tp_preload_path(dirfd, path, ours);
	if (real == ours)
		return readlink_ours(real, out, bytes);
	return next_readlinkat() ? next_readlinkat()(dirfd, path, out, bytes) : syscall(SYS_readlinkat, dirfd, path, out, bytes);
}

/* The fortified forms know the buffer's size: the plain ones check no less once it is known to suffice. */
TP_WRAP ssize_t __readlink_chk(const char *path, char *out, size_t bytes, size_t room)
{
	if (bytes > room)
		abort();
	return readlink(path, out, bytes);
}
TP_WRAP ssize_t __readlinkat_chk(int dirfd, const char *path, char *out, size_t bytes, size_t room)
{
	if (bytes > room)
		abort();
	return readlinkat(dirfd, path, out, bytes);
}

TP_NEXT(char *, realpath, (const char *, char *))
TP_WRAP char *realpath(const char *path, char *out)
{
	char ours[TP_SYSFS_PATH];
	const char *real = tp_preload_path(AT_FDCWD, path, ours);
	if (real == ours && tp_preload_is_device(real)) {
		if (access_ours(real, F_OK))
			return NULL;
		tp_preload_restore(ours);
		return out ? strcpy(out, ours) : strdup(ours);
	}
	if (!next_realpath()) {
		errno = EAGAIN;
		return NULL;
	}
	/* The oldest realpath, which dlsym may give, refuses to allocate. */
	char *room = out || !path ? out : malloc(PATH_MAX), *found = room || !path ? next_realpath()(real, room) : NULL;
	if (!found && !out)
		free(room);
	if (found && real == ours)
		tp_preload_restore(found);
	return found;
}
TP_WRAP char *__realpath_chk(const char *path, char *out, size_t room)
{
	if (room < PATH_MAX)
		abort();
	return realpath(path, out);
}
TP_WRAP char *canonicalize_file_name(const char *path) { return realpath(path, NULL); }

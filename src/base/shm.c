/* Shared memory segments. A segment is a memfd: it has no name in any file system, so nothing is left when its
 * processes die, and /dev/shm may be full or absent. It is sealed against shrinking, so that a peer can't turn our reads
 * into SIGBUS. The registry maps each segment once a process: ranks that are threads see the same addresses. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/internal.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

struct mapping {
	dev_t dev;
	ino_t ino;
	void *base;
	size_t bytes;
	int references;
	struct mapping *next;
};

static pthread_mutex_t mappings_lock = PTHREAD_MUTEX_INITIALIZER;
static struct mapping *mappings;
TP_FORK_HOLD(TP_FORK_BASE, mappings_lock)

ncclResult_t tp_shm_create(const char *name, size_t bytes, int *fd)
{
	if (bytes == 0 || bytes > INT64_MAX)
		return TP_FAIL(ncclInvalidArgument, "shared segment %s: %zu bytes is no size", name, bytes);
	int made = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
	if (made < 0 && errno == EINVAL)
		made = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (made < 0)
		return TP_FAIL(ncclSystemError, "shared segment %s of %zu bytes: memfd_create: %s%s", name, bytes, strerror(errno),
			errno == EMFILE ? " (raise the limit of open files: ulimit -n)" : "");
	if (ftruncate(made, (off_t)bytes) < 0 || fcntl(made, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0) {
		int error = errno;
		close(made);
		return TP_FAIL(ncclSystemError, "shared segment %s of %zu bytes: can't set its size: %s", name, bytes, strerror(error));
	}
	*fd = made;
	return ncclSuccess;
}

static ncclResult_t check_segment(int fd, size_t bytes, struct stat *st)
{
	if (fstat(fd, st) < 0)
		return TP_FAIL(ncclSystemError, "shared segment behind descriptor %d: %s", fd, strerror(errno));
	int seals = fcntl(fd, F_GET_SEALS);
	if (seals < 0 || !(seals & F_SEAL_SHRINK))
		return TP_FAIL(ncclInvalidArgument, "descriptor %d is no shared segment of ours: expected a memfd sealed against shrinking", fd);
	if (bytes == 0 || (uint64_t)st->st_size < bytes)
		return TP_FAIL(ncclInvalidArgument, "shared segment behind descriptor %d has %lld bytes, expected at least %zu", fd, (long long)st->st_size,
			TP_MAX(bytes, 1));
	return ncclSuccess;
}

static ncclResult_t map_locked(int fd, const struct stat *st, void **base)
{
	for (struct mapping *m = mappings; m; m = m->next) {
		if (m->dev == st->st_dev && m->ino == st->st_ino && m->bytes == (size_t)st->st_size) {
			m->references++;
			*base = m->base;
			return ncclSuccess;
		}
	}
	struct mapping *m = tp_alloc(1, sizeof(*m), "a shared segment's entry");
	if (!m)
		return ncclSystemError;
	size_t bytes = (size_t)st->st_size;
	void *mapped = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (mapped == MAP_FAILED) {
		int error = errno;
		free(m);
		return TP_FAIL(ncclSystemError, "can't map a shared segment of %zu bytes: %s", bytes, strerror(error));
	}
	*m = (struct mapping){ st->st_dev, st->st_ino, mapped, bytes, 1, mappings };
	mappings = m;
	*base = mapped;
	return ncclSuccess;
}

ncclResult_t tp_shm_map(int fd, size_t bytes, void **base)
{
	struct stat st;
	TP_TRY(check_segment(fd, bytes, &st));
	pthread_mutex_lock(&mappings_lock);
	ncclResult_t result = map_locked(fd, &st, base);
	pthread_mutex_unlock(&mappings_lock);
	return result;
}

void tp_shm_unmap(void *base)
{
	if (!base)
		return;
	pthread_mutex_lock(&mappings_lock);
	struct mapping **at = &mappings;
	while (*at && (*at)->base != base)
		at = &(*at)->next;
	struct mapping *m = *at;
	if (m && --m->references == 0) {
		*at = m->next;
		munmap(m->base, m->bytes);
		free(m);
	}
	pthread_mutex_unlock(&mappings_lock);
	if (!m)
		TP_WARN("tp_shm_unmap: nothing is mapped at %p", base);
}

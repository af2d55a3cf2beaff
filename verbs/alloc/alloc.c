/* `telpher verbs run --shared-alloc`: a program's larger allocations are born shared.
 *
 * They come from one memfd that is mapped MAP_SHARED, so that other processes of the machine can map it and an RDMA WRITE there is a
 * store. Smaller ones stay with libc. A block takes whole pages; what is in front of it (a page at most) holds its size.
 *
 * A forked child gets a private view in place of the shared one, so that what it writes doesn't reach its parent; but pages that it
 * hasn't written to still show what the parent writes later. That, and the pages that a block costs more, is why one must ask
 * for this. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096u
#define HEAD_BYTES 64u
#define GIVE_BACK_BYTES (256u << 10)    /* pages of freed blocks from here on go back to the system */
#define WRAP __attribute__((visibility("default")))

/* libc's own, under the names that it exports for this. */
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *old, size_t bytes);
void *__libc_memalign(size_t align, size_t bytes);
void __libc_free(void *at);

struct head { uint64_t magic; size_t bytes; uint8_t *extent; size_t extent_bytes; };
#define MAGIC 0x54656c5068657221u
/* Free pages below the arena's top, by address. */
struct gap { struct gap *next; uint8_t *at; size_t bytes; };

static struct {
	pthread_mutex_t lock;
	uint8_t *base, *end, *top;      /* base NULL: not made; base == end: it can't be, or this is a forked child */
	int fd;
	size_t least;                   /* smaller requests are libc's */
	struct gap *gaps;
} arena = { .lock = PTHREAD_MUTEX_INITIALIZER, .fd = -1, .least = PAGE };

static uint8_t *forked_from, *forked_to;    /* in a child: its parent's blocks */

static bool is_ours(const void *at)
{
	const uint8_t *p = at;
	return (p >= arena.base && p < arena.end) || (p >= forked_from && p < forked_to);
}

/* ---- fork ---- */

static void before_fork(void) { pthread_mutex_lock(&arena.lock); }
static void in_parent(void) { pthread_mutex_unlock(&arena.lock); }
static void in_child(void)
{
	pthread_mutex_init(&arena.lock, NULL);
	if (arena.top != arena.base && mmap(arena.base, (size_t)(arena.top - arena.base), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE,
		arena.fd, 0) == MAP_FAILED)
		abort();
	forked_from = arena.base;
	forked_to = arena.end;
	arena.base = arena.end = arena.top = (uint8_t *)PAGE;
	arena.gaps = NULL;
}

/* ---- the arena; its lock is held ---- */

static void make_arena_locked(void)
{
	const char *text = getenv("TELPHER_VERBS_SHARED_ALLOC");
	size_t least = text ? strtoull(text, NULL, 0) : 0;
	size_t bytes = (size_t)sysconf(_SC_PHYS_PAGES) * PAGE * 4;
	arena.base = arena.end = arena.top = (uint8_t *)PAGE;
	if (least > 1)
		arena.least = least;
	int fd = memfd_create("telpher-shared-alloc", MFD_CLOEXEC);
	if (fd < 0)
		return;
	/* High, out of the way of programs that count on the numbers of their descriptors. */
	int high = fcntl(fd, F_DUPFD_CLOEXEC, 200);
	if (high >= 0) {
		close(fd);
		fd = high;
	}
	void *base = ftruncate(fd, (off_t)bytes) == 0 ? mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0) : MAP_FAILED;
	if (base == MAP_FAILED) {
		close(fd);
		return;
	}
	arena.fd = fd;
	arena.base = arena.top = base;
	arena.end = arena.base + bytes;
	pthread_atfork(before_fork, in_parent, in_child);
}

static uint8_t *take_locked(size_t bytes)
{
	for (struct gap **at = &arena.gaps; *at; at = &(*at)->next) {
		struct gap *gap = *at;
		if (gap->bytes < bytes)
			continue;
		uint8_t *found = gap->at;
		gap->at += bytes;
		gap->bytes -= bytes;
		if (!gap->bytes) {
			*at = gap->next;
			__libc_free(gap);
		}
		return found;
	}
	if ((size_t)(arena.end - arena.top) < bytes)
		return NULL;
	arena.top += bytes;
	return arena.top - bytes;
}

static void give_locked(uint8_t *at, size_t bytes)
{
	struct gap **where = &arena.gaps, *before = NULL;
	if (bytes >= GIVE_BACK_BYTES)
		fallocate(arena.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at - arena.base, (off_t)bytes);
	while (*where && (*where)->at < at) {
		before = *where;
		where = &before->next;
	}
	struct gap *after = *where;
	if (before && before->at + before->bytes == at) {
		before->bytes += bytes;
	} else {
		struct gap *gap = __libc_malloc(sizeof(*gap));
		if (!gap)
			return;     /* lost, not broken */
		*gap = (struct gap){ .next = after, .at = at, .bytes = bytes };
		*where = gap;
		before = gap;
	}
	if (after && before->at + before->bytes == after->at) {
		before->bytes += after->bytes;
		before->next = after->next;
		__libc_free(after);
	}
}

/* ---- blocks ---- */

static size_t libc_usable(void *at)
{
	static size_t (*_Atomic next)(void *);
	size_t (*usable)(void *) = atomic_load_explicit(&next, memory_order_relaxed);
	if (!usable) {
		*(void **)&usable = dlsym(RTLD_NEXT, "malloc_usable_size");
		atomic_store_explicit(&next, usable, memory_order_relaxed);
	}
	return usable(at);
}

static struct head *head_of(void *at) { return (struct head *)(void *)((uint8_t *)at - HEAD_BYTES); }

/* NULL: libc is to do it. */
static void *allocate(size_t align, size_t bytes)
{
	if (bytes < __atomic_load_n(&arena.least, __ATOMIC_RELAXED))
		return NULL;
	if (align < PAGE)
		align = PAGE;
	size_t wanted = bytes + align + PAGE;
	if (wanted < bytes)
		return NULL;
	wanted = (wanted + PAGE - 1) / PAGE * PAGE;
	pthread_mutex_lock(&arena.lock);
	if (!arena.base)
		make_arena_locked();
	uint8_t *extent = bytes >= arena.least ? take_locked(wanted) : NULL;
	pthread_mutex_unlock(&arena.lock);
	if (!extent)
		return NULL;
	uint8_t *at = (uint8_t *)(((uintptr_t)extent + HEAD_BYTES + align - 1) / align * align);
	*head_of(at) = (struct head){ .magic = MAGIC, .bytes = bytes, .extent = extent, .extent_bytes = wanted };
	return at;
}

static void release(void *at)
{
	struct head *head = head_of(at);
	if ((uint8_t *)at >= forked_from && (uint8_t *)at < forked_to)
		return;
	if (head->magic != MAGIC)
		abort();    /* freed twice, or never given */
	head->magic = 0;
	pthread_mutex_lock(&arena.lock);
	give_locked(head->extent, head->extent_bytes);
	pthread_mutex_unlock(&arena.lock);
}

WRAP size_t malloc_usable_size(void *at)
{
	return !at ? 0 : is_ours(at) ? head_of(at)->bytes : libc_usable(at);
}

WRAP void *malloc(size_t bytes)
{
	void *at = allocate(0, bytes);
	return at ? at : __libc_malloc(bytes);
}

WRAP void free(void *at)
{
	int error = errno;
	if (at && is_ours(at))
		release(at);
	else
		__libc_free(at);
	errno = error;
}

WRAP void *calloc(size_t count, size_t bytes)
{
	size_t all;
	if (__builtin_mul_overflow(count, bytes, &all)) {
		errno = ENOMEM;
		return NULL;
	}
	void *at = allocate(0, all);
	return at ? memset(at, 0, all) : __libc_calloc(count, bytes);
}

WRAP void *realloc(void *old, size_t bytes)
{
	if (!old)
		return malloc(bytes);
	if (!is_ours(old)) {
		size_t had = bytes >= arena.least ? libc_usable(old) : 0;
		void *at = bytes >= arena.least ? allocate(0, bytes) : NULL;
		if (!at)
			return __libc_realloc(old, bytes);
		memcpy(at, old, had < bytes ? had : bytes);
		__libc_free(old);
		return at;
	}
	if (bytes == 0) {
		release(old);
		return NULL;
	}
	size_t had = head_of(old)->bytes;
	if (bytes <= had && bytes > had / 2)
		return old;
	void *at = malloc(bytes);
	if (!at)
		return NULL;
	memcpy(at, old, had < bytes ? had : bytes);
	release(old);
	return at;
}

WRAP void *reallocarray(void *old, size_t count, size_t bytes)
{
	size_t all;
	if (__builtin_mul_overflow(count, bytes, &all)) {
		errno = ENOMEM;
		return NULL;
	}
	return realloc(old, all);
}

WRAP void *memalign(size_t align, size_t bytes)
{
	void *at = align && !(align & (align - 1)) ? allocate(align, bytes) : NULL;
	return at ? at : __libc_memalign(align, bytes);
}

WRAP void *aligned_alloc(size_t align, size_t bytes) { return memalign(align, bytes); }
WRAP void *valloc(size_t bytes) { return memalign(PAGE, bytes); }
WRAP void *pvalloc(size_t bytes) { return memalign(PAGE, (bytes + PAGE - 1) / PAGE * PAGE); }

WRAP int posix_memalign(void **out, size_t align, size_t bytes)
{
	if (align < sizeof(void *) || (align & (align - 1)))
		return EINVAL;
	int error = errno;
	void *at = memalign(align, bytes);
	errno = error;
	if (!at)
		return ENOMEM;
	*out = at;
	return 0;
}


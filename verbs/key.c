/* The table of memory keys, and the only way to the memory behind them.
 *
 * A user of a key counts itself in, then looks whether the place still holds that very key; who revokes a key clears it, then
 * waits for the count to fall to zero. Both are sequentially consistent, so one of them sees the other. The places lie in a
 * shared segment for the sake of peers on this machine; where there is no such thing, in memory of this process alone. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>
#include "verbs/gpu.h"
#include "verbs/internal.h"

#define PLACES (1u << TP_CARD_KEY_SLOTS_LOG)
#define TABLE_BYTES (PLACES * sizeof(struct tp_key))
_Static_assert(sizeof(struct tp_key) == 64, "a key is a cache line");

void (*tp_key_peers_hook)(uint32_t place);

static struct tp_key *_Atomic table;
static int table_fd = -1;
static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;

static bool share_table(void **base)
{
	if (tp_shm_create("telpher-verbs-keys", TABLE_BYTES, &table_fd) != ncclSuccess)
		return false;
	if (tp_shm_map(table_fd, TABLE_BYTES, base) == ncclSuccess)
		return true;
	close(table_fd);
	table_fd = -1;
	return false;
}

/* Under table_lock. */
static struct tp_key *make_table(void)
{
	struct tp_key *keys = atomic_load_explicit(&table, memory_order_relaxed);
	void *base;
	if (keys)
		return keys;
	if (!share_table(&base)) {
		base = mmap(NULL, TABLE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		if (base == MAP_FAILED)
			return NULL;
		TP_INFO(TP_NET, "memory keys can't be shown to other processes: they are reached by the wire");
	}
	/* Release: pairs with the acquire in tp_key_at. */
	atomic_store_explicit(&table, base, memory_order_release);
	return base;
}

int tp_key_fd(size_t *bytes)
{
	pthread_mutex_lock(&table_lock);
	int fd = make_table() ? table_fd : -1;
	pthread_mutex_unlock(&table_lock);
	*bytes = TABLE_BYTES;
	return fd;
}

void tp_key_forget(void)
{
	struct tp_key *keys = atomic_load_explicit(&table, memory_order_relaxed);
	pthread_mutex_init(&table_lock, NULL);
	if (!keys)
		return;
	/* The child's old regions point here: let them find zeros of their own, not the parent's table. */
	if (mmap(keys, TABLE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) == MAP_FAILED)
		abort();
	if (table_fd >= 0)
		close(table_fd);
	table_fd = -1;
	atomic_store_explicit(&table, NULL, memory_order_relaxed);
}

struct tp_key *tp_key_alloc(enum tp_key_kind kind, uint32_t *value)
{
	uint32_t random;
	struct tp_key *found = NULL;
	pthread_mutex_lock(&table_lock);
	struct tp_key *keys = make_table();
	tp_secret_random(&random, sizeof(random));
	for (uint32_t i = 0; keys && i < PLACES && !found; i++) {
		uint32_t place = (TP_KEY_PLACE(random) + i) & (PLACES - 1);
		if (place == 0 || keys[place].kind != TP_KEY_FREE)     /* no key is 0 */
			continue;
		found = &keys[place];
		found->kind = kind;
		*value = (random & ~((PLACES - 1) << 8)) | place << 8;
	}
	pthread_mutex_unlock(&table_lock);
	if (!found)
		TP_WARN("no memory key is left: all %u are in use", PLACES - 1);
	return found;
}

void tp_key_publish(struct tp_key *key, uint32_t value)
{
	atomic_store_explicit(&key->key, value, memory_order_seq_cst);
}

void tp_key_revoke(struct tp_key *key)
{
	atomic_store_explicit(&key->key, 0, memory_order_seq_cst);
	for (int spins = 0; atomic_load_explicit(&key->users, memory_order_seq_cst); spins++) {
		if (spins < 100)
			tp_clock_relax();
		else
			sched_yield();
	}
	if (tp_key_peers_hook)
		tp_key_peers_hook((uint32_t)(key - atomic_load_explicit(&table, memory_order_relaxed)));
}

void tp_key_free(struct tp_key *key)
{
	pthread_mutex_lock(&table_lock);
	memset((char *)key + sizeof(key->key), 0, offsetof(struct tp_key, users) - sizeof(key->key));
	key->windows = key->qpn = key->parent = key->flags = key->region = 0;
	key->kind = TP_KEY_FREE;
	pthread_mutex_unlock(&table_lock);
}

struct tp_key *tp_key_at(uint32_t value)
{
	struct tp_key *keys = atomic_load_explicit(&table, memory_order_acquire);
	return keys ? &keys[TP_KEY_PLACE(value)] : NULL;
}

static int check(const struct tp_key *key, uint32_t pd, uint32_t qpn, uint64_t addr, uint64_t length, uint32_t access)
{
	/* A local request (QPN 0) can't go through a window. */
	if (key->kind != TP_KEY_MR && qpn == 0)
		return EINVAL;
	if (key->pd != pd || (key->kind == TP_KEY_MW2 && key->qpn != qpn) || (access & ~key->access))
		return EPERM;
	uint64_t offset = addr - key->iova;
	return addr >= key->iova && offset <= key->length && length <= key->length - offset ? 0 : ERANGE;
}

int tp_key_enter(uint32_t value, uint32_t pd, uint32_t qpn, uint64_t addr, uint64_t length, uint32_t access, struct tp_grip *grip)
{
	struct tp_key *key = tp_key_at(value);
	if (!key || value == 0)
		return EINVAL;
	atomic_fetch_add_explicit(&key->users, 1, memory_order_seq_cst);
	int error = atomic_load_explicit(&key->key, memory_order_seq_cst) == value ? check(key, pd, qpn, addr, length, access) : EINVAL;
	if (error) {
		atomic_fetch_sub_explicit(&key->users, 1, memory_order_release);
		return error;
	}
	*grip = (struct tp_grip){ .key = key, .addr = (uint8_t *)(uintptr_t)(key->addr + (addr - key->iova)), .flags = key->flags };
	return 0;
}

void tp_key_leave(const struct tp_grip *grip)
{
	/* Release: pairs with the load in tp_key_revoke; what was copied is over before the region goes. */
	if (grip->key)
		atomic_fetch_sub_explicit(&grip->key->users, 1, memory_order_release);
}

/* For where the kernel copies nobody's memory, not even our own (a seccomp filter): a pipe finds missing pages too. */
static int copy_through_pipe(uint8_t *to, const uint8_t *from, size_t bytes)
{
	int ends[2], error = 0;
	if (pipe2(ends, O_CLOEXEC) != 0) {
		TP_WARN("memory on demand can't be reached: process_vm_writev is refused, and there is no pipe: %s", strerror(errno));
		return EFAULT;
	}
	for (size_t at = 0; at < bytes && !error; at += PIPE_BUF) {
		ssize_t piece = (ssize_t)TP_MIN(bytes - at, (size_t)PIPE_BUF);
		if (write(ends[1], from + at, (size_t)piece) != piece || read(ends[0], to + at, (size_t)piece) != piece)
			error = EFAULT;
	}
	close(ends[0]);
	close(ends[1]);
	return error;
}

/* Pages may be missing: the kernel copies and says so. */
static int copy_checked(void *to, const void *from, size_t bytes, bool write)
{
	struct iovec local = { write ? (void *)(uintptr_t)from : to, bytes };
	struct iovec remote = { write ? to : (void *)(uintptr_t)from, bytes };
	ssize_t done = write ? process_vm_writev(getpid(), &local, 1, &remote, 1, 0) : process_vm_readv(getpid(), &local, 1, &remote, 1, 0);
	if (done < 0 && errno != EFAULT)
		return copy_through_pipe(to, from, bytes);
	return done == (ssize_t)bytes ? 0 : EFAULT;
}

/* Copies so that the last bytes become visible after all others: programs poll the last byte of a message. */
void tp_key_copy(uint8_t *to, const uint8_t *from, size_t bytes)
{
	size_t tail = bytes >= 8 && ((uintptr_t)(to + bytes) & 7) == 0 ? 8 : 1;
	memcpy(to, from, bytes - tail);
	to += bytes - tail;
	from += bytes - tail;
	if (tail == 8) {
		uint64_t word;
		memcpy(&word, from, 8);
		__atomic_store_n((uint64_t *)(void *)to, word, __ATOMIC_RELEASE);
	} else {
		__atomic_store_n(to, *from, __ATOMIC_RELEASE);
	}
}

int tp_grip_write(const struct tp_grip *grip, uint64_t offset, const void *from, size_t bytes)
{
	if (bytes == 0)
		return 0;
	if (!(grip->flags & (TP_KEY_NULL | TP_KEY_CHECKED | TP_KEY_DEVICE)))
		tp_key_copy(grip->addr + offset, from, bytes);
	else if (grip->flags & TP_KEY_DEVICE)
		return tp_gpu_write(tp_gpu_at(grip->key->region), (uintptr_t)grip->addr + offset, from, bytes);
	else if (grip->flags & TP_KEY_CHECKED)
		return copy_checked(grip->addr + offset, from, bytes, true);
	return 0;
}

int tp_grip_read(const struct tp_grip *grip, uint64_t offset, void *to, size_t bytes)
{
	if (bytes == 0)
		return 0;
	if (!(grip->flags & (TP_KEY_NULL | TP_KEY_CHECKED | TP_KEY_DEVICE)))
		memcpy(to, grip->addr + offset, bytes);
	else if (grip->flags & TP_KEY_NULL)
		memset(to, 0, bytes);
	else if (grip->flags & TP_KEY_DEVICE)
		return tp_gpu_read(tp_gpu_at(grip->key->region), (uintptr_t)grip->addr + offset, to, bytes);
	else
		return copy_checked(to, grip->addr + offset, bytes, false);
	return 0;
}

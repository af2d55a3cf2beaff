/* Counters that outlive a process, and that others can read: a port's figure is the sum over all processes of this user in this
 * network namespace, as a card would count them.
 *
 * One file in /dev/shm, a block a process, so that no two processes write to one cache line. A block belongs to whoever holds
 * the lock of the byte with its number; it goes to the next process as it is when that one ends, so nothing is ever lost or
 * added up twice. Readers use pread, which leaves holes alone. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include "verbs/internal.h"

#define BLOCKS 256
#define FORMAT_VERSION 1            /* a layout change gets another file */
#define PORT_BYTES (TP_CNT_COUNT * sizeof(uint64_t))
#define BLOCK_BYTES (tp_align_up(TP_CARD_DEVICES * TP_CARD_PORTS * PORT_BYTES, 4096))

static int file_fd = -1;
static _Atomic uint64_t *block;     /* ours; NULL: counters of this process alone */
static pthread_once_t once = PTHREAD_ONCE_INIT;

static int open_file(void)
{
	char path[96];
	struct stat netns = { 0 }, info;
	stat("/proc/self/ns/net", &netns);
	snprintf(path, sizeof(path), "/dev/shm/telpher-verbs-counters-%u-%llu-%d-%d", geteuid(), (unsigned long long)netns.st_ino, FORMAT_VERSION,
		TP_CNT_COUNT);
	int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
	if (fd < 0)
		return -1;
	if (fstat(fd, &info) || !S_ISREG(info.st_mode) || info.st_uid != geteuid()) {
		close(fd);
		errno = EPERM;
		return -1;
	}
	return fd;
}

static void *claim_block(int fd)
{
	for (int i = 0; i < BLOCKS; i++) {
		struct flock lock = { .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = i, .l_len = 1 };
		if (fcntl(fd, F_OFD_SETLK, &lock))
			continue;
		/* Memory that isn't there would be a SIGBUS later. */
		off_t at = (off_t)(i * BLOCK_BYTES);
		if ((errno = posix_fallocate(fd, at, (off_t)BLOCK_BYTES)) != 0)
			return NULL;
		void *memory = mmap(NULL, BLOCK_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, at);
		return memory == MAP_FAILED ? NULL : memory;
	}
	errno = EBUSY;
	return NULL;
}

static void open_once(void)
{
	file_fd = open_file();
	if (file_fd >= 0)
		block = claim_block(file_fd);
	if (!block)
		TP_INFO(TP_NET, "the software card's counters count this process alone: /dev/shm can't hold them (%s)", strerror(errno));
}

static size_t place_of(int device, int port) { return (size_t)(device * TP_CARD_PORTS + port - 1) * TP_CNT_COUNT; }

_Atomic uint64_t *tp_counters_of(int device, int port)
{
	pthread_once(&once, open_once);
	if (block)
		return block + place_of(device, port);
	return tp_alloc(TP_CNT_COUNT, sizeof(_Atomic uint64_t), "a port's counters");
}

void tp_counters_read(struct tp_port *port, uint64_t sums[TP_CNT_COUNT])
{
	memset(sums, 0, PORT_BYTES);
	if (!block) {
		for (int c = 0; c < TP_CNT_COUNT && port->counters; c++)
			sums[c] = atomic_load_explicit(&port->counters[c], memory_order_relaxed);
		return;
	}
	struct stat info;
	off_t end = fstat(file_fd, &info) ? 0 : info.st_size;
	off_t at = (off_t)(place_of(port->device->index, port->number) * sizeof(uint64_t));
	for (int i = 0; i < BLOCKS && at < end; i++, at += (off_t)BLOCK_BYTES) {
		uint64_t figures[TP_CNT_COUNT];
		if (pread(file_fd, figures, sizeof(figures), at) != (ssize_t)sizeof(figures))
			break;
		for (int c = 0; c < TP_CNT_COUNT; c++)
			sums[c] += figures[c];
	}
}

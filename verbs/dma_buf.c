/* DMA-BUFs: descriptors of memory that a device, or the kernel, gives to others.
 *
 * A card would be told by the exporter where the memory lies. We aren't: we reach memory of a GPU by its address in this process, which
 * programs give as the region's iova (a region that answers to the addresses that the program itself uses; all that are known do so). Whether
 * the descriptor is that memory's can't be asked. What isn't a GPU's, and can be mapped, is mapped: by way of udmabuf, of a DMA heap, or a
 * memory file, which a card would refuse and which stands here for one. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>
#include "verbs/gpu.h"

#define DMA_BUF_MAGIC 0x444d4142        /* its file system's */

/* Who gave it out, for messages. */
static void exporter_of(int fd, char *out, size_t bytes)
{
	char path[64], line[128];
	snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", fd);
	snprintf(out, bytes, "an unknown exporter");
	FILE *file = fopen(path, "re");
	while (file && fgets(line, sizeof(line), file))
		if (strncmp(line, "exp_name:", 9) == 0) {
			line[strcspn(line, "\n")] = 0;
			snprintf(out, bytes, "%s", line + 9 + strspn(line + 9, " \t"));
		}
	if (file)
		fclose(file);
}

/* 0, or what a card with support for DMA-BUF answers: callers ask whether there is support by a descriptor that is none. */
static int check_descriptor(int fd, uint64_t offset, size_t length)
{
	struct statfs info;
	if (fcntl(fd, F_GETFD) < 0)
		return EBADF;
	bool dma_buf = fstatfs(fd, &info) == 0 && (unsigned long)info.f_type == DMA_BUF_MAGIC;
	if (!dma_buf && fcntl(fd, F_GET_SEALS) < 0)
		return TP_CARD_FAIL(EINVAL, "descriptor %d can't be registered: it is no DMA-BUF", fd);
	off_t size = lseek(fd, 0, SEEK_END);
	if (length == 0 || length > UINT64_MAX - offset || (size >= 0 && offset + length > (uint64_t)size))
		return TP_CARD_FAIL(EINVAL, "%zu bytes at offset %llu of a DMA-BUF can't be registered: it has %lld", length, (unsigned long long)offset,
			(long long)size);
	return 0;
}

static int map(int fd, uint64_t offset, size_t length, bool write, struct tp_dma_buf *out)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE), ahead = (size_t)(offset % page), bytes = tp_align_up(ahead + length, page);
	void *at = mmap(NULL, bytes, write ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, (off_t)(offset - ahead));
	if (at == MAP_FAILED) {
		int error = errno;
		char exporter[64];
		exporter_of(fd, exporter, sizeof(exporter));
		return TP_CARD_FAIL(EOPNOTSUPP, "a DMA-BUF of %s can't be registered with the software card: its pages can't be mapped (%s), and its iova is "
			"no address of GPU memory that CUDA knows in this process", exporter, strerror(error));
	}
	*out = (struct tp_dma_buf){ .addr = (uint8_t *)at + ahead, .mapped = at, .mapped_bytes = bytes };
	return 0;
}

int tp_dma_buf_open(int fd, uint64_t offset, size_t length, uint64_t iova, bool write, struct tp_dma_buf *out)
{
	struct tp_gpu_range *gpu = NULL;
	if (!tp_gpu_allowed())
		return TP_CARD_FAIL(EOPNOTSUPP, "a DMA-BUF can't be registered: TELPHER_VERBS_GPU=0");
	int error = check_descriptor(fd, offset, length);
	if (error)
		return error;
	int found = tp_gpu_find_pages(iova, length, &gpu);
	if (found < 0)
		return errno;
	if (found == 0)
		return map(fd, offset, length, write, out);
	*out = (struct tp_dma_buf){ .addr = (void *)(uintptr_t)iova, .gpu = gpu };
	return 0;
}

void tp_dma_buf_close(struct tp_dma_buf *found)
{
	tp_gpu_drop(found->gpu);
	if (found->mapped)
		munmap(found->mapped, found->mapped_bytes);
}

/* Exported calls that came after the headers which we may be built with (1.15 and later): their structures are written out here,
 * under names of our own. What needs hardware says so. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "verbs/api.h"

#define UNUSED __attribute__((unused))

/* ---- regions from a structure (1.15) ---- */

struct mr_init_attr {
	size_t length;
	int access;
	uint64_t comp_mask;
	uint64_t iova;
	void *addr;
	int fd;
	uint64_t fd_offset;
	void *dmah, *buf;
};
enum { MASK_IOVA = 1, MASK_ADDR = 2, MASK_FD = 4, MASK_FD_OFFSET = 8, MASK_DMAH = 16, MASK_BUF = 32 };

TP_API(struct ibv_mr *, reg_mr_ex, (struct ibv_pd *pd, struct mr_init_attr *attr))
{
	if (!(attr->comp_mask & MASK_ADDR) || (attr->comp_mask & ~(uint64_t)(MASK_IOVA | MASK_ADDR | MASK_BUF))) {
		errno = attr->comp_mask & (MASK_FD | MASK_FD_OFFSET | MASK_DMAH) ? EOPNOTSUPP : EINVAL;
		return NULL;
	}
	return tp_mr_reg(pd, attr->addr, attr->length, attr->comp_mask & MASK_IOVA ? attr->iova : (uintptr_t)attr->addr, (unsigned)attr->access);
}

TP_API(void *, alloc_dmah, (struct ibv_context *context UNUSED, void *attr UNUSED))
{
	errno = EOPNOTSUPP;
	return NULL;
}
TP_API(int, dealloc_dmah, (void *dmah UNUSED)) { return EOPNOTSUPP; }
TP_API(int, dm_export_dmabuf_fd, (struct ibv_dm *dm UNUSED))
{
	errno = EOPNOTSUPP;
	return -1;
}

/* ---- buffers that the library allocates (1.17): whole pages ---- */

struct buffer { void *addr; size_t bytes; };

TP_API(void *, alloc_buf, (struct ibv_pd *pd UNUSED, size_t bytes, struct buffer **out))
{
	struct buffer *buffer = bytes ? calloc(1, sizeof(*buffer)) : NULL;
	if (!buffer) {
		errno = bytes ? ENOMEM : EINVAL;
		return NULL;
	}
	buffer->bytes = tp_align_up(bytes, (size_t)sysconf(_SC_PAGESIZE));
	buffer->addr = mmap(NULL, buffer->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (buffer->addr == MAP_FAILED) {
		free(buffer);
		return NULL;
	}
	*out = buffer;
	return buffer->addr;
}
TP_API(void, free_buf, (struct buffer *buffer))
{
	munmap(buffer->addr, buffer->bytes);
	free(buffer);
}
TP_API(struct ibv_mr *, reg_buf_mr, (struct ibv_pd *pd, struct buffer *buffer, void *addr, size_t length, int access))
{
	size_t offset = (size_t)((uintptr_t)addr - (uintptr_t)buffer->addr);
	if ((uintptr_t)addr < (uintptr_t)buffer->addr || offset > buffer->bytes || length > buffer->bytes - offset) {
		errno = EINVAL;
		return NULL;
	}
	return tp_mr_reg(pd, addr, length, (uintptr_t)addr, (unsigned)access);
}
TP_API(int, export_buf_dmabuf_fd, (struct buffer *buffer UNUSED))
{
	errno = EOPNOTSUPP;
	return -1;
}

/* ---- counters of completions in hardware (1.18) ---- */

TP_API_NAMED(int, query_comp_cntr_caps, "_ibv_query_comp_cntr_caps", (struct ibv_context *context UNUSED, void *caps UNUSED, size_t bytes UNUSED))
{
	return EOPNOTSUPP;
}
TP_API(void *, create_comp_cntr, (struct ibv_context *context UNUSED, void *attr UNUSED))
{
	errno = EOPNOTSUPP;
	return NULL;
}
TP_API(int, destroy_comp_cntr, (void *counter UNUSED)) { return EOPNOTSUPP; }
TP_API(int, set_comp_cntr, (void *counter UNUSED, uint64_t value UNUSED)) { return EOPNOTSUPP; }
TP_API(int, set_err_comp_cntr, (void *counter UNUSED, uint64_t value UNUSED)) { return EOPNOTSUPP; }
TP_API(int, inc_comp_cntr, (void *counter UNUSED, uint64_t amount UNUSED)) { return EOPNOTSUPP; }
TP_API(int, inc_err_comp_cntr, (void *counter UNUSED, uint64_t amount UNUSED)) { return EOPNOTSUPP; }
TP_API(int, read_comp_cntr, (void *counter UNUSED, uint64_t *value UNUSED)) { return EOPNOTSUPP; }
TP_API(int, read_err_comp_cntr, (void *counter UNUSED, uint64_t *value UNUSED)) { return EOPNOTSUPP; }
TP_API(int, qp_attach_comp_cntr, (struct ibv_qp *qp UNUSED, void *counter UNUSED, void *attr UNUSED)) { return EOPNOTSUPP; }

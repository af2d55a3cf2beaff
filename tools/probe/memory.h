/* Memory that a probe moves: of the host in several kinds of pages, or of a GPU; registered with a port's card; filled with a pattern that
 * depends on a seed and on the place, so that what arrives can be told from what lay there, came twice or came elsewhere. */
#ifndef TELPHER_PROBE_MEMORY_H
#define TELPHER_PROBE_MEMORY_H

#include "gpu/gpu.h"
#include "probe/port.h"

enum probe_kind {
	PROBE_PAGES,                            /* of 4 KiB (no huge ones) */
	PROBE_HUGE,                             /* transparent huge pages, where the kernel has some */
	PROBE_HUGETLB,                          /* reserved huge pages of 2 MiB */
	PROBE_SHARED,                           /* a shared segment (memfd) */
	PROBE_PINNED,                           /* host memory that a GPU's driver has pinned */
	PROBE_GPU,
	PROBE_KINDS
};
const char *probe_kind_name(enum probe_kind kind);

struct probe_memory {
	enum probe_kind kind;
	void *ptr;                              /* GPU: the device's address */
	size_t bytes, mapped;
	const struct tp_gpu *gpu;
	struct tp_gpu_memory held;              /* PROBE_PINNED, PROBE_GPU */
	struct ibv_mr *mr;
	const struct tp_verbs *verbs;
};

bool probe_has_hugetlb(size_t bytes);       /* are so many reserved? */
/* A GPU by its number; fails, with the reason, where there is none. */
int probe_find_gpu(int ordinal, const struct tp_gpu **out);
/* gpu: of PROBE_PINNED and PROBE_GPU; numa: the node that host memory shall lie on, -1: any. Touched, so that its pages are there. */
int probe_alloc(enum probe_kind kind, const struct tp_gpu *gpu, size_t bytes, int numa, struct probe_memory *out);
void probe_free(struct probe_memory *memory);       /* deregisters too */
/* dma_buf: by ibv_reg_dmabuf_mr; else ibv_reg_mr, which for GPU memory needs nvidia-peermem. */
int probe_register(const struct probe_port *port, struct probe_memory *memory, bool dma_buf);
/* GPU memory as DMA-BUF where that does, else by address: NCCL's order. */
int probe_register_either(const struct probe_port *port, struct probe_memory *memory, bool *dma_buf);
int probe_cannot_register(const struct probe_port *port, const struct probe_memory *memory, size_t bytes, const char *what, int error);   /* says so; 1 */
/* One registration, for measuring: 0 or errno. Undone by verbs->dereg_mr. */
int probe_register_once(const struct probe_port *port, const struct probe_memory *memory, size_t bytes, struct ibv_mr **out);
void probe_deregister(struct probe_memory *memory);

int probe_fill(const struct probe_memory *memory, size_t offset, size_t bytes, uint64_t seed);
/* Something that no seed gives, so that old content can't pass. */
int probe_wipe(const struct probe_memory *memory, size_t offset, size_t bytes);
/* 0: as filled with seed; else it says at which byte it isn't (right: *ok), or that it can't be read. */
int probe_verify(const struct probe_memory *memory, size_t offset, size_t bytes, uint64_t seed, bool *ok, char *text, size_t text_bytes);

#endif

/* Memory that programs give us for good: ncclMemAlloc, ncclCommRegister, ncclCommWindowRegister.
 *
 * Registration offers the communicator a shorter way: kernels of peers on this host load and store the buffer where it lies,
 * through a mapping of their own. Only windows with a promise (tp_mem_window_find) may change the plan. Two kinds:
 *   local    (register) each rank for itself, at any time. Peers map it in the background and say so; only
 *            when all of them have it does tp_mem_find tell the caller, who then may offer {index, offset} to its peers in band. A peer's
 *            kernel finds the address in its own table [local rank][index]. A rank's entry for its own buffer is there while all peers have it
 *            mapped: a captured graph may outlive a registration, so its kernels look before they offer what was found at capture.
 *   windows  collective: when the call returns every rank of a host whose GPUs all reach each other has all buffers mapped.
 * cudaFree tells nobody: each look-up compares the allocation's buffer id with that of its registration. Imports are kept once a
 * process and context, by (process, buffer id), counted.
 *
 * Memory of other processes comes by file descriptor (VMM: ncclMemAlloc, PyTorch's expandable segments made with handles) or
 * by CUDA IPC (cudaMalloc). Memory of neither kind (pools of cudaMallocAsync, managed) can't be shared: it registers without effect, and
 * as a window it is an error that says why. */
#ifndef TP_MEM_MEM_H
#define TP_MEM_MEM_H

#include "boot/boot.h"
#include "gpu/gpu.h"

/* ncclMemAlloc: device memory of gpu that can be exported, mapped for every device of this process that reaches it. */
ncclResult_t tp_mem_alloc(const struct tp_gpu *gpu, size_t bytes, void **out);
/* ncclMemFree; also takes what cuMemAlloc gave. NULL: nothing. */
ncclResult_t tp_mem_free(void *ptr);

#define TP_MEM_BUFFERS 1024             /* local registrations of a rank in a communicator that peers can have mapped */

struct tp_mem;
struct tp_mem_options {
	const struct tp_gpu *gpu;
	const bool *reaches;                /* [nlocal] by place: this rank's GPU and that one's reach each other; agreed (tp_links_reaches) */
};
/* Collective over the communicator; any number of hosts. */
ncclResult_t tp_mem_create(struct tp_boot *boot, const struct tp_mem_options *options, struct tp_mem **out);
/* No kernel that uses it may be running, here or on peers. Not collective. */
void tp_mem_destroy(struct tp_mem *mem);

/* ncclCommRegister: [ptr, ptr + bytes). Ranges may overlap and repeat: each has its handle. Memory of the host, and what can't be
 * shared, registers without effect. From any thread; makes no kernel wait and waits for none. */
ncclResult_t tp_mem_register(struct tp_mem *mem, void *ptr, size_t bytes, void **handle);
/* NCCL_LOCAL_REGISTER: are registrations to have an effect, of host memory too? */
bool tp_mem_registers(void);
/* Device memory of ncclMemAlloc and its like, which peers map and let go of without waiting for their kernels, as they do for what CUDA IPC shows them. */
bool tp_mem_is_mapped(const void *ptr);
/* Can peers have it? What can't be shared, or is one too many, registers without effect. */
bool tp_mem_has_effect(const void *handle);
/* ncclCommDeregister: nothing that uses the range may be outstanding. A handle that isn't one is ncclInvalidArgument. */
ncclResult_t tp_mem_deregister(struct tp_mem *mem, void *handle);

/* Why [ptr, ptr + bytes) isn't memory of gpu in one allocation, or one mapping; NULL: it is. *out: what it lies in, narrowed to that. */
const char *tp_mem_refuse(const struct tp_gpu *gpu, const void *ptr, size_t bytes, struct tp_gpu_pointer *out);

struct tp_mem_place { uint32_t index; uint64_t offset; };
/* True where [ptr, ptr + bytes) lies in a registered range, still the same allocation, that all ranks of this host have mapped. Cheap: a few
 * compares where nothing is registered, else one question to the driver. */
bool tp_mem_find(struct tp_mem *mem, const void *ptr, size_t bytes, struct tp_mem_place *out);
/* Can anything be found? The same on all ranks of the host. */
bool tp_mem_is_useful(const struct tp_mem *mem);
/* Device memory: uint64_t [nlocal][TP_MEM_BUFFERS], where this rank's kernels see the buffers of each local rank (its own too),
 * 0 where it has none. Entries change while kernels run, whole, and only where no offer is outstanding. */
const uint64_t *tp_mem_table(const struct tp_mem *mem);
/* The same table for the host. */
uint64_t tp_mem_lookup(const struct tp_mem *mem, int local, uint32_t index);

/* ncclCommWindowRegister, collective over the communicator. All ranks must say the same bytes. */
struct tp_mem_window {
	uint32_t id;                        /* 0, 1, … the same on all ranks */
	int flags;                          /* NCCL_WIN_* */
	void *base;                         /* this rank's */
	size_t bytes;
	bool mapped;                        /* agreed over the communicator's ranks: each has all those of its host */
	const uint64_t *peers;              /* host memory, [nlocal]: where this rank's kernels see each local rank's; 0: not mapped */
	const uint64_t *device_peers;       /* the same in device memory */
};
/* Where a pair of the host doesn't reach each other the window is not mapped, which is no error. Memory that can't be shared is one, on
 * all ranks. */
ncclResult_t tp_mem_window_create(struct tp_mem *mem, void *ptr, size_t bytes, int flags, struct tp_mem_window **out);
/* Not collective; no kernel that uses it may be running, here or on peers. */
ncclResult_t tp_mem_window_destroy(struct tp_mem *mem, struct tp_mem_window *window);
/* The mapped window that holds [ptr, ptr + bytes), the allocation unchanged, or NULL. With NCCL_WIN_COLL_SYMMETRIC the program promises
 * the same window and offset on all ranks of a call: then, and only then, the choice of a plan may depend on it. */
const struct tp_mem_window *tp_mem_window_find(struct tp_mem *mem, const void *ptr, size_t bytes, uint64_t *offset);

/* For the folders above: collective over the communicator, each rank shows its memory to others of its host. */
struct tp_mem_map {
	void *ptr;                          /* where this rank's kernels see it; NULL: not mapped */
	struct tp_gpu_memory imported;      /* ptr NULL where it is seen where its owner sees it */
	bool own;                           /* this rank's */
	char why[96];                       /* not mapped: why */
};
/* own: allocated by tp_gpu_alloc (or described likewise), NULL: nothing to show. wanted: [nlocal] by place, where both sides want; the own place
 * is ignored. maps: [nlocal], zeroed; whoever can't be mapped is no error. */
ncclResult_t tp_mem_exchange(struct tp_boot *boot, const struct tp_gpu *gpu, const struct tp_gpu_memory *own, const bool *wanted,
	struct tp_mem_map *maps);
void tp_mem_unmap(struct tp_mem_map *maps, int nlocal);
/* Gives back memory that was shown: where other ranks of this process still use it at its own address, when the last of them unmaps. */
void tp_mem_free_shown(struct tp_gpu_memory *memory);

#endif

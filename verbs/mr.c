/* Memory regions. Nothing is pinned: a region is a range of this process's memory that exists when it is registered; or of a GPU's (gpu.h). */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "verbs/fault.h"
#include "verbs/gpu.h"
#include "verbs/internal.h"
#include "verbs/path.h"

#define ACCESS_KNOWN (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC | \
	IBV_ACCESS_MW_BIND | IBV_ACCESS_ZERO_BASED | IBV_ACCESS_ON_DEMAND | IBV_ACCESS_HUGETLB)
#define ACCESS_ATOMIC_WRITERS (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC)

/* 0 or EINVAL. Flags of the optional range are hints: unknown ones are fine. */
static int check_access(unsigned int access)
{
	unsigned int unknown = access & ~(unsigned int)(ACCESS_KNOWN | IBV_ACCESS_OPTIONAL_RANGE);
	if (unknown)
		return TP_CARD_FAIL(EINVAL, "a region can't have the access flags 0x%x: the software card knows 0x%x", unknown, ACCESS_KNOWN);
	if ((access & ACCESS_ATOMIC_WRITERS) && !(access & IBV_ACCESS_LOCAL_WRITE))
		return TP_CARD_FAIL(EINVAL, "a region with remote write or atomic access needs IBV_ACCESS_LOCAL_WRITE too (flags 0x%x)", access);
	return 0;
}

/* Does each page of the range exist? Its first and last also get their page tables, which shows whether they may be written. */
static int check_memory(uintptr_t addr, size_t length, unsigned int access)
{
	static const size_t step_pages = 4096;
	unsigned char present[4096];
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	uintptr_t at = addr / page * page, end = addr + length;
	if (end < addr || end > UINTPTR_MAX - page)
		return EINVAL;
	end = (end + page - 1) / page * page;
	for (uintptr_t from = at; from < end; from += step_pages * page)
		if (mincore((void *)from, TP_MIN(step_pages * page, end - from), present))
			return errno == ENOMEM ? EFAULT : errno;
#ifdef MADV_POPULATE_WRITE
	int advice = access & (IBV_ACCESS_LOCAL_WRITE | ACCESS_ATOMIC_WRITERS) ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
	uintptr_t ends[2] = { at, end - page };
	for (int i = 0; i < 2 && length; i++)
		/* What can be populated for reading but not for writing is read-only. Special mappings (of devices, of CUDA) and old
		 * kernels can do neither, and are left alone. */
		if (madvise((void *)ends[i], page, advice) && advice == MADV_POPULATE_WRITE &&
			madvise((void *)ends[i], page, MADV_POPULATE_READ) == 0)
			return EFAULT;
#endif
	return 0;
}

static void fill_key(struct tp_key *key, const struct tp_mr *mr, uint64_t iova, unsigned int access)
{
	bool implicit = (access & IBV_ACCESS_ON_DEMAND) && !mr->ibv.addr && mr->ibv.length == SIZE_MAX;
	key->pd = tp_pd_of(mr->ibv.pd)->id;
	key->access = access & (ACCESS_KNOWN | IBV_ACCESS_RELAXED_ORDERING);
	key->iova = implicit ? 0 : iova;
	key->length = mr->ibv.length;
	key->addr = (uintptr_t)mr->ibv.addr;
	if (mr->gpu) {
		key->flags = TP_KEY_APART | TP_KEY_DEVICE;
		key->region = mr->ibv.handle;
		tp_gpu_bind(key->region, mr->gpu);
		return;
	}
	if (mr->mapped) {       /* of no file that others could map, nor of pages that they could copy */
		key->flags = TP_KEY_APART;
		key->region = 0;
		return;
	}
	key->flags = access & IBV_ACCESS_ON_DEMAND ? TP_KEY_CHECKED : 0;
	key->region = access & IBV_ACCESS_ON_DEMAND ? 0 : tp_path_show_region(key->addr, key->length);
	if (key->region)
		key->flags |= TP_KEY_SHARED;
}

/* What was behind the key, which is revoked. */
static void let_go(struct tp_mr *mr)
{
	if (mr->gpu)
		tp_gpu_bind(mr->ibv.handle, NULL);
	else
		tp_path_hide_region(mr->key->region);
	tp_gpu_drop(mr->gpu);
	mr->gpu = NULL;
	if (mr->mapped)
		munmap(mr->mapped, mr->mapped_bytes);
	mr->mapped = NULL;
}

static struct tp_mr *make(struct ibv_pd *pd, void *addr, size_t length)
{
	struct tp_mr *mr = tp_alloc(1, sizeof(*mr), "a memory region");
	uint32_t value;
	if (!mr)
		return NULL;
	mr->key = tp_key_alloc(TP_KEY_MR, &value);
	if (!mr->key) {
		free(mr);
		return NULL;
	}
	mr->ibv = (struct ibv_mr){ .context = pd->context, .pd = pd, .addr = addr, .length = length, .handle = TP_KEY_PLACE(value),
		.lkey = value, .rkey = value };
	atomic_fetch_add_explicit(&tp_pd_of(pd)->users, 1, memory_order_relaxed);
	return mr;
}

/* What a real card would have pinned: the limit is a fault's (memlock). */
static _Atomic uint64_t pinned_bytes;
static uint64_t pins(const struct tp_mr *mr) { return mr->key->flags & (TP_KEY_CHECKED | TP_KEY_NULL | TP_KEY_APART) ? 0 : mr->ibv.length; }

static int check_limit(struct ibv_pd *pd, size_t length)
{
	uint64_t all = atomic_load_explicit(&pinned_bytes, memory_order_relaxed) + length;
	int error = tp_fault(TP_FAULT_MEMLOCK, pd->context->device->name, all);
	return error ? TP_CARD_FAIL(error, "%zu bytes more can't be registered (%llu in all): a fault on demand limits them as RLIMIT_MEMLOCK would", length,
		(unsigned long long)all) : 0;
}

/* What the memory is: *gpu is set where it is a GPU's. pinned: bytes that are counted as such already. 0 or an errno, said why. */
static int look_at_memory(struct ibv_pd *pd, void *addr, size_t length, unsigned int access, uint64_t pinned, struct tp_gpu_range **gpu)
{
	if (access & IBV_ACCESS_ON_DEMAND)      /* where that is a GPU's, each access fails */
		return 0;
	int found = tp_gpu_find((uintptr_t)addr, length, gpu);
	if (found)
		return found < 0 ? errno : 0;
	int error = check_memory((uintptr_t)addr, length, access);
	if (error)
		return TP_CARD_FAIL(error, "%zu bytes at %p can't be registered with access 0x%x: %s", length, addr, access,
			error == EFAULT ? "not all of it is mapped with such rights" : strerror(error));
	return length > pinned ? check_limit(pd, length - pinned) : 0;
}

static int check_call(struct ibv_pd *pd, unsigned int access)
{
	int error = check_access(access);
	if (!error && !tp_context_mine(pd->context))
		error = TP_CARD_FAIL(EINVAL, "a forked child can't register memory with what its parent opened: it must open the device itself");
	return error;
}

static struct ibv_mr *publish(struct tp_mr *mr, uint64_t iova, unsigned int access)
{
	fill_key(mr->key, mr, iova, access);
	atomic_fetch_add_explicit(&pinned_bytes, pins(mr), memory_order_relaxed);
	tp_key_publish(mr->key, mr->ibv.lkey);
	return &mr->ibv;
}

struct ibv_mr *tp_mr_reg(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned int access)
{
	struct tp_gpu_range *gpu = NULL;
	int error = check_call(pd, access);
	if (!error)
		error = look_at_memory(pd, addr, length, access, 0, &gpu);
	struct tp_mr *mr = error ? NULL : make(pd, addr, length);
	if (!mr) {
		tp_gpu_drop(gpu);
		errno = error ? error : ENOMEM;
		return NULL;
	}
	mr->gpu = gpu;
	return publish(mr, access & IBV_ACCESS_ZERO_BASED ? 0 : iova, access);
}

struct ibv_mr *tp_mr_reg_dma_buf(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, unsigned int access)
{
	struct tp_dma_buf found = { 0 };
	int error = check_call(pd, access);
	if (!error && (access & (IBV_ACCESS_ON_DEMAND | IBV_ACCESS_HUGETLB)))
		error = TP_CARD_FAIL(EOPNOTSUPP, "a DMA-BUF can't be registered on demand, nor as huge pages (flags 0x%x)", access);
	if (!error)
		error = tp_dma_buf_open(fd, offset, length, iova, access & IBV_ACCESS_LOCAL_WRITE, &found);
	struct tp_mr *mr = error ? NULL : make(pd, found.addr, length);
	if (!mr) {
		tp_dma_buf_close(&found);
		errno = error ? error : ENOMEM;
		return NULL;
	}
	mr->gpu = found.gpu;
	mr->mapped = found.mapped;
	mr->mapped_bytes = found.mapped_bytes;
	mr->dma_buf = true;
	publish(mr, access & IBV_ACCESS_ZERO_BASED ? 0 : iova, access);
	mr->ibv.addr = (void *)(uintptr_t)offset;       /* as libibverbs gives it */
	return &mr->ibv;
}

struct ibv_mr *tp_mr_alloc_null(struct ibv_pd *pd)
{
	struct tp_mr *mr = make(pd, NULL, SIZE_MAX);
	if (!mr) {
		errno = ENOMEM;
		return NULL;
	}
	fill_key(mr->key, mr, 0, IBV_ACCESS_LOCAL_WRITE);
	mr->key->flags = TP_KEY_NULL;
	mr->ibv.length = 0;
	mr->ibv.rkey = 0;
	tp_key_publish(mr->key, mr->ibv.lkey);
	return &mr->ibv;
}

int tp_mr_dereg(struct ibv_mr *ibv)
{
	struct tp_mr *mr = (struct tp_mr *)ibv;
	if (!tp_context_mine(ibv->context))
		return 0;       /* a forked child: it stays, inert */
	uint32_t windows = atomic_load_explicit(&mr->key->windows, memory_order_acquire);
	if (windows)
		return TP_CARD_FAIL(EBUSY, "a region can't be deregistered while %u memory windows are bound to it", windows);
	tp_key_revoke(mr->key);
	atomic_fetch_sub_explicit(&pinned_bytes, pins(mr), memory_order_relaxed);
	let_go(mr);
	tp_key_free(mr->key);
	atomic_fetch_sub_explicit(&tp_pd_of(ibv->pd)->users, 1, memory_order_release);
	free(mr);
	return 0;
}

int tp_mr_rereg(struct ibv_mr *ibv, int flags, struct ibv_pd *pd, void *addr, size_t length, int access)
{
	struct tp_mr *mr = (struct tp_mr *)ibv;
	struct tp_gpu_range *gpu = NULL;
	int error = tp_context_mine(ibv->context) ? 0 : EINVAL;
	if (!error && mr->dma_buf)
		error = TP_CARD_FAIL(EINVAL, "a region of a DMA-BUF can't be registered anew");
	if (flags == 0 || (flags & ~IBV_REREG_MR_FLAGS_SUPPORTED) || ((flags & IBV_REREG_MR_CHANGE_PD) && !pd) ||
		((flags & IBV_REREG_MR_CHANGE_TRANSLATION) && (!addr || !length)))
		error = TP_CARD_FAIL(EINVAL, "a region can't be registered anew with flags 0x%x, domain %p, %zu bytes at %p", (unsigned)flags,
			(void *)pd, length, addr);
	unsigned int rights = flags & IBV_REREG_MR_CHANGE_ACCESS ? (unsigned int)access : mr->key->access;
	if (!error)
		error = check_access(rights);
	if (!error && atomic_load_explicit(&mr->key->windows, memory_order_acquire))
		error = TP_CARD_FAIL(EBUSY, "a region can't change while memory windows are bound to it");
	void *to = flags & IBV_REREG_MR_CHANGE_TRANSLATION ? addr : ibv->addr;
	size_t bytes = flags & IBV_REREG_MR_CHANGE_TRANSLATION ? length : ibv->length;
	if (!error)
		error = look_at_memory(ibv->pd, to, bytes, rights, pins(mr), &gpu);
	if (error) {
		errno = error;
		return IBV_REREG_MR_ERR_INPUT;
	}
	uint64_t iova = flags & IBV_REREG_MR_CHANGE_TRANSLATION ? (uintptr_t)addr : mr->key->iova;
	tp_key_revoke(mr->key);
	atomic_fetch_sub_explicit(&pinned_bytes, pins(mr), memory_order_relaxed);
	let_go(mr);
	mr->gpu = gpu;
	if (flags & IBV_REREG_MR_CHANGE_PD) {
		atomic_fetch_sub_explicit(&tp_pd_of(ibv->pd)->users, 1, memory_order_release);
		atomic_fetch_add_explicit(&tp_pd_of(pd)->users, 1, memory_order_relaxed);
		ibv->pd = pd;
	}
	ibv->addr = to;
	ibv->length = bytes;
	fill_key(mr->key, mr, iova, rights);
	atomic_fetch_add_explicit(&pinned_bytes, pins(mr), memory_order_relaxed);
	tp_key_publish(mr->key, ibv->lkey);
	return 0;
}

int tp_mr_advise(struct ibv_pd *pd, enum ibv_advise_mr_advice advice, uint32_t flags, struct ibv_sge *sge, uint32_t count)
{
	if ((flags & ~(uint32_t)IBV_ADVISE_MR_FLAG_FLUSH) || (int)advice < IBV_ADVISE_MR_ADVICE_PREFETCH ||
		advice > IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT || !sge || !count)
		return EINVAL;
	uint32_t access = advice == IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE ? IBV_ACCESS_LOCAL_WRITE : 0;
	for (uint32_t i = 0; i < count; i++) {
		struct tp_grip grip;
		int error = tp_key_enter(sge[i].lkey, tp_pd_of(pd)->id, 0, sge[i].addr, sge[i].length, access, &grip);
		if (error)
			return error == EINVAL ? ENOENT : error == EPERM ? EPERM : ENOENT;
		/* The pages come at the first touch; what was asked for here is a hint. */
		uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), from = (uintptr_t)grip.addr / page * page;
		if (!(grip.flags & (TP_KEY_NULL | TP_KEY_APART)))
			madvise((void *)from, (uintptr_t)grip.addr + sge[i].length - from, MADV_WILLNEED);
		tp_key_leave(&grip);
	}
	return 0;
}

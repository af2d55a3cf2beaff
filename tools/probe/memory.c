/* Memory that a probe moves; see memory.h. */
#include "probe/memory.h"

#include <errno.h>
#include <limits.h>
#include <linux/mempolicy.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define HUGE_PAGE ((size_t)2 << 20)
#define PIECE ((size_t)1 << 20)             /* of GPU memory, filled and looked at through the host */
#define WIPED 0x5a

const char *probe_kind_name(enum probe_kind kind)
{
	static const char *const names[] = { "4 KiB pages", "huge pages", "hugetlb pages", "shared memory", "pinned by the GPU driver", "GPU" };
	return names[kind];
}

int probe_find_gpu(int ordinal, const struct tp_gpu **out)
{
	bool has = false;
	int count = 0;
	struct tp_gpu *gpu;
	if (tp_gpu_open(&has) != ncclSuccess) return probe_fail_below("--gpu");
	if (!has) return probe_fail("--gpu %d: this machine has no GPU that CUDA's driver (libcuda.so.1) knows", ordinal);
	if (tp_gpu_count(&count) != ncclSuccess) return probe_fail_below("--gpu");
	if (ordinal >= count) return probe_fail("--gpu %d: there %s %d, numbered from 0", ordinal, count == 1 ? "is" : "are", count);
	if (tp_gpu_of_ordinal(ordinal, &gpu) != ncclSuccess) return probe_fail_below("--gpu");
	*out = gpu;
	return 0;
}

static void *map_host(enum probe_kind kind, size_t bytes)
{
	int flags = MAP_PRIVATE | MAP_ANONYMOUS;
	if (kind == PROBE_SHARED) {
		int fd = memfd_create("telpher-probe", MFD_CLOEXEC);
		void *at = fd >= 0 && ftruncate(fd, (off_t)bytes) == 0 ? mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
		if (fd >= 0) close(fd);
		return at;
	}
	if (kind == PROBE_HUGETLB) flags |= MAP_HUGETLB;
	void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
	if (at == MAP_FAILED) return at;
	/* Where the kernel can't do what is advised it is no error: then pages are what it has. */
	if (kind == PROBE_PAGES) madvise(at, bytes, MADV_NOHUGEPAGE);
	if (kind == PROBE_HUGE) madvise(at, bytes, MADV_HUGEPAGE);
	return at;
}

bool probe_has_hugetlb(size_t bytes)
{
	size_t mapped = tp_align_up(bytes, HUGE_PAGE);
	void *at = map_host(PROBE_HUGETLB, mapped);
	if (at == MAP_FAILED) return false;
	munmap(at, mapped);
	return true;
}

static int bind_to(void *at, size_t bytes, int numa)
{
	unsigned long mask[16] = { 0 };
	if (numa < 0 || numa >= (int)(sizeof(mask) * 8)) return 0;
	mask[(size_t)numa / (8 * sizeof(long))] = 1ul << ((size_t)numa % (8 * sizeof(long)));
	return syscall(SYS_mbind, at, bytes, MPOL_BIND, mask, sizeof(mask) * 8, 0) == 0 ? 0 : errno;
}

/* The number after a word at a line's beginning; 0: no such line, or no such file. */
static unsigned long long number_in(const char *path, const char *word)
{
	char line[128];
	unsigned long long value = 0;
	FILE *file = fopen(path, "re");
	while (file && fgets(line, sizeof(line), file))
		if (strncmp(line, word, strlen(word)) == 0 && sscanf(line + strlen(word), "%llu", &value) == 1) break;
	if (file) fclose(file);
	return value;
}

/* What can be had without the kernel ending processes for it, in bytes: of the machine, and of a container's limit, which counts cached files that the kernel
 * gives up for it. */
static size_t available_memory(void)
{
	static const char stat[] = "/sys/fs/cgroup/memory.stat";
	unsigned long long bytes = 1024 * number_in("/proc/meminfo", "MemAvailable:");
	unsigned long long most = number_in("/sys/fs/cgroup/memory.max", ""), used = number_in("/sys/fs/cgroup/memory.current", "");
	unsigned long long cached = number_in(stat, "active_file ") + number_in(stat, "inactive_file ") + number_in(stat, "slab_reclaimable ");
	if (!bytes) bytes = SIZE_MAX;
	used -= TP_MIN(used, cached);
	if (most) bytes = TP_MIN(bytes, most > used ? most - used : 0);
	return (size_t)bytes;
}

static int alloc_host(enum probe_kind kind, size_t bytes, int numa, struct probe_memory *out)
{
	size_t unit = kind == PROBE_HUGE || kind == PROBE_HUGETLB ? HUGE_PAGE : (size_t)sysconf(_SC_PAGESIZE);
	struct probe_memory m = { .kind = kind, .bytes = bytes, .mapped = tp_align_up(bytes, unit) };
	size_t room = kind == PROBE_HUGETLB ? SIZE_MAX : available_memory();
	if (m.mapped > room) return probe_fail("no memory of %zu bytes: %zu are available; a smaller -s would do", m.mapped, room);
	m.ptr = map_host(kind, m.mapped);
	if (m.ptr == MAP_FAILED && kind == PROBE_HUGETLB)
		return probe_fail("no %zu bytes of huge pages: %s (/proc/sys/vm/nr_hugepages reserves some)", m.mapped, strerror(errno));
	if (m.ptr == MAP_FAILED) return probe_fail("no memory of %zu bytes: %s", m.mapped, strerror(errno));
	int error = bind_to(m.ptr, m.mapped, numa);
	if (error) {
		munmap(m.ptr, m.mapped);
		return probe_fail("no memory on NUMA node %d: %s", numa, strerror(error));
	}
	/* An allocation that the kernel can't back would end the process when it is touched; asked for so, it is an error. */
	if (madvise(m.ptr, m.mapped, MADV_POPULATE_WRITE) != 0) {
		error = errno;
		if (error != EINVAL) {
			munmap(m.ptr, m.mapped);
			return probe_fail("no memory of %zu bytes: %s", m.mapped, strerror(error));
		}
		/* A kernel that can't be asked. */
		memset(m.ptr, WIPED, m.mapped);
	}
	*out = m;
	return 0;
}

int probe_alloc(enum probe_kind kind, const struct tp_gpu *gpu, size_t bytes, int numa, struct probe_memory *out)
{
	if (kind != PROBE_GPU && kind != PROBE_PINNED) return alloc_host(kind, bytes, numa, out);
	struct probe_memory m = { .kind = kind, .bytes = bytes, .mapped = bytes, .gpu = gpu };
	ncclResult_t result = kind == PROBE_GPU ? tp_gpu_alloc(gpu, bytes, false, "the probe", &m.held) : tp_gpu_alloc_host(gpu, bytes, "the probe", &m.held);
	if (result != ncclSuccess) return probe_fail_below(NULL);
	m.ptr = kind == PROBE_GPU ? m.held.ptr : m.held.host;
	*out = m;
	return 0;
}

void probe_deregister(struct probe_memory *memory)
{
	if (memory->mr) memory->verbs->dereg_mr(memory->mr);
	memory->mr = NULL;
}

void probe_free(struct probe_memory *memory)
{
	probe_deregister(memory);
	if (memory->kind == PROBE_GPU || memory->kind == PROBE_PINNED) {
		if (memory->held.ptr) tp_gpu_free(&memory->held);
	} else if (memory->ptr) {
		munmap(memory->ptr, memory->mapped);
	}
	memset(memory, 0, sizeof(*memory));
}

static int access_flags(void) { return IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ; }

int probe_register_once(const struct probe_port *port, const struct probe_memory *memory, size_t bytes, struct ibv_mr **out)
{
	errno = 0;
	struct ibv_mr *mr = port->verbs->reg_mr(port->ib->context->pd, memory->ptr, bytes, access_flags());
	if (!mr) return errno ? errno : ENOMEM;
	*out = mr;
	return 0;
}

/* NULL: done. Else what stands in the way. */
static const char *register_dma_buf(const struct probe_port *port, struct probe_memory *m, char *text, size_t text_bytes)
{
	int fd = -1;
	CUresult result = CUDA_ERROR_NOT_SUPPORTED;
	bool pushed;
	if (!port->verbs->reg_dmabuf_mr) {
		snprintf(text, text_bytes, "%.200s has no ibv_reg_dmabuf_mr (rdma-core 34 or later has)", port->verbs->file);
		return text;
	}
	if (!m->gpu->dma_buf) {
		snprintf(text, text_bytes, "GPU %d (%s) or its driver has no DMA-BUF (CUDA 11.7, Linux 5.12, the open kernel modules)", m->gpu->ordinal, m->gpu->name);
		return text;
	}
	if (tp_gpu_enter(m->gpu, &pushed) != ncclSuccess) return tp_log_last_error();
	size_t bytes = tp_align_up(m->bytes, (size_t)sysconf(_SC_PAGESIZE));
	if (tp_cuda->MemGetHandleForAddressRange)
		result = tp_cuda->MemGetHandleForAddressRange(&fd, (CUdeviceptr)(uintptr_t)m->ptr, bytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
	tp_gpu_leave(pushed);
	if (result != CUDA_SUCCESS) {
		tp_gpu_fail(__FILE__, __LINE__, __func__, m->gpu, "MemGetHandleForAddressRange", result);
		return tp_log_last_error();
	}
	/* Its iova is the device's address, so that the other side writes to that. */
	errno = 0;
	m->mr = port->verbs->reg_dmabuf_mr(port->ib->context->pd, 0, m->bytes, (uint64_t)(uintptr_t)m->ptr, fd, access_flags());
	int error = errno;
	/* The registration holds the memory. */
	close(fd);
	if (m->mr) return NULL;
	snprintf(text, text_bytes, "%s can't register a DMA-BUF of GPU %d: %s (its driver or the kernel may be too old)", port->ib->context->name, m->gpu->ordinal,
		strerror(error ? error : EOPNOTSUPP));
	return text;
}

int probe_cannot_register(const struct probe_port *port, const struct probe_memory *memory, size_t bytes, const char *what, int error)
{
	if (memory->kind == PROBE_GPU && error != ENOMEM)
		return probe_fail("%s can't register memory of GPU %d: %s. By ibv_reg_mr it needs nvidia-peermem (lsmod | grep peermem); as DMA-BUF (telpher probe write --dmabuf) "
			"it needs none", port->ib->context->name, memory->gpu->ordinal, strerror(error));
	tp_ib_reg_failed(port->ib->context, bytes, what, error);
	return probe_fail_below(NULL);
}

int probe_register(const struct probe_port *port, struct probe_memory *memory, bool dma_buf)
{
	char text[300];
	memory->verbs = port->verbs;
	if (dma_buf) {
		const char *why = register_dma_buf(port, memory, text, sizeof(text));
		return why ? probe_fail("--dmabuf: %s", why) : 0;
	}
	int error = probe_register_once(port, memory, memory->bytes, &memory->mr);
	return error ? probe_cannot_register(port, memory, memory->bytes, "the probe's memory", error) : 0;
}

int probe_register_either(const struct probe_port *port, struct probe_memory *memory, bool *dma_buf)
{
	char text[300], why[300];
	memory->verbs = port->verbs;
	*dma_buf = false;
	if (memory->kind != PROBE_GPU) return probe_register(port, memory, false);
	const char *refused = register_dma_buf(port, memory, text, sizeof(text));
	*dma_buf = !refused;
	if (!refused) return 0;
	snprintf(why, sizeof(why), "%s", refused);
	int error = probe_register_once(port, memory, memory->bytes, &memory->mr);
	if (!error) return 0;
	if (error == ENOMEM) return probe_cannot_register(port, memory, memory->bytes, "the probe's memory", error);
	return probe_fail("%s can't register memory of GPU %d: %s. By ibv_reg_mr it needs nvidia-peermem (lsmod | grep peermem); and %s", port->ib->context->name,
		memory->gpu->ordinal, strerror(error), why);
}

/* Eight bytes of the pattern: any change of seed or place changes half of the bits (splitmix64). */
static uint64_t word_at(uint64_t seed, uint64_t index)
{
	uint64_t z = seed + (index + 1) * 0x9e3779b97f4a7c15u;
	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
	z = (z ^ z >> 27) * 0x94d049bb133111ebu;
	return z ^ z >> 31;
}

static void fill_host(unsigned char *to, size_t first, size_t bytes, uint64_t seed)
{
	size_t at = 0;
	for (; at + 8 <= bytes; at += 8) {
		uint64_t word = word_at(seed, (first + at) / 8);
		memcpy(to + at, &word, 8);
	}
	uint64_t tail = word_at(seed, (first + at) / 8);
	memcpy(to + at, &tail, bytes - at);
}

static size_t first_wrong(const unsigned char *at, size_t first, size_t bytes, uint64_t seed)
{
	size_t i = 0;
	for (; i + 8 <= bytes; i += 8) {
		uint64_t word = word_at(seed, (first + i) / 8), found;
		memcpy(&found, at + i, 8);
		if (found != word) break;
	}
	/* The last word, or the one that is wrong, byte by byte. */
	uint64_t word = word_at(seed, (first + i) / 8);
	for (size_t k = 0; k < 8 && i + k < bytes; k++)
		if (at[i + k] != ((unsigned char *)&word)[k]) return i + k;
	return bytes;
}

/* Visits memory in pieces that the host can touch. */
enum visit { FILL, WIPE, VERIFY };
static int visit(const struct probe_memory *m, size_t offset, size_t bytes, enum visit what, uint64_t seed, size_t *wrong)
{
	unsigned char *base = (unsigned char *)m->ptr + offset, *room = m->kind == PROBE_GPU ? malloc(PIECE) : NULL;
	ncclResult_t result = ncclSuccess;
	if (m->kind == PROBE_GPU && !room) return probe_fail("out of memory");
	*wrong = bytes;
	for (size_t at = 0; at < bytes && result == ncclSuccess && *wrong == bytes; at += PIECE) {
		size_t n = TP_MIN(PIECE, bytes - at), bad = n;
		unsigned char *here = room ? room : base + at;
		if (room && what == VERIFY) result = tp_gpu_copy(m->gpu, room, base + at, n);
		if (result != ncclSuccess) break;
		if (what == FILL) fill_host(here, at, n, seed);
		else if (what == WIPE) memset(here, WIPED, n);
		else bad = first_wrong(here, at, n, seed);
		if (bad < n) *wrong = at + bad;
		if (room && what != VERIFY) result = tp_gpu_copy(m->gpu, base + at, room, n);
	}
	free(room);
	return result == ncclSuccess ? 0 : probe_fail_below(NULL);
}

int probe_fill(const struct probe_memory *memory, size_t offset, size_t bytes, uint64_t seed)
{
	size_t unused;
	return visit(memory, offset, bytes, FILL, seed, &unused);
}

int probe_wipe(const struct probe_memory *memory, size_t offset, size_t bytes)
{
	size_t unused;
	return visit(memory, offset, bytes, WIPE, 0, &unused);
}

int probe_verify(const struct probe_memory *memory, size_t offset, size_t bytes, uint64_t seed, bool *ok, char *text, size_t text_bytes)
{
	size_t wrong = 0;
	int status = visit(memory, offset, bytes, VERIFY, seed, &wrong);
	if (status) return status;
	*ok = wrong == bytes;
	if (*ok) snprintf(text, text_bytes, "verify OK");
	else snprintf(text, text_bytes, "verify FAILED: byte %zu of %zu is the first that is wrong", wrong, bytes);
	return 0;
}

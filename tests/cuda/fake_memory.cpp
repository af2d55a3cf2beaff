/* Memory: what every address is. Device memory lies in one arena a device and process, a sparse memory file that other
 * processes can map (IPC); freed addresses are used again at once, as CUDA does. New memory is rubbish. Under the address
 * sanitizer what isn't allocated is poisoned, so that kernels are checked too. */
#include "emulator_run.h"
#include "fake.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <fcntl.h>

#ifdef __SANITIZE_ADDRESS__
#define FAKE_ASAN 1
#elif defined __has_feature
#if __has_feature(address_sanitizer)
#define FAKE_ASAN 1
#endif
#endif
#ifdef FAKE_ASAN
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#define ASAN_UNPOISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#endif

namespace fake {

namespace {

std::map<uintptr_t, memory> &all = *new std::map<uintptr_t, memory>;
unsigned long long next_id = 1;
constexpr size_t unit = 512;                    /* alignment, and rubbish between allocations */

struct arena { int fd; uintptr_t base, shadow; size_t bytes, high; std::map<size_t, size_t> used; };
std::map<int, arena> &arenas = *new std::map<int, arena>;

arena &find_arena(int ordinal)
{
	auto found = arenas.find(ordinal);
	if (found != arenas.end()) return found->second;
	arena a;
	char name[64];
	snprintf(name, sizeof name, "fake-gpu-%d-arena", devices[(size_t)ordinal].number);
	a.bytes = set.memory_bytes * 2;         /* gaps cost addresses, no memory */
	a.high = 0;
	a.fd = memfd_create(name, MFD_CLOEXEC);
	if (a.fd < 0 || ftruncate(a.fd, (off_t)a.bytes) != 0) die("no memory file for device %d", ordinal);
	void *map = mmap(nullptr, a.bytes, set.apart ? PROT_NONE : PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, a.fd, 0);
	void *shadow = set.apart ? mmap(nullptr, a.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, a.fd, 0) : map;
	if (map == MAP_FAILED || shadow == MAP_FAILED) die("no %zu bytes of addresses for device %d", a.bytes, ordinal);
	a.base = (uintptr_t)map;
	a.shadow = (uintptr_t)shadow;
	return arenas[ordinal] = a;
}

/* First fit, with a gap behind each. */
bool arena_take(arena &a, size_t bytes, size_t *out)
{
	size_t need = (bytes + 2 * unit - 1) / unit * unit, at = 0;
	for (auto &u : a.used) {
		if (u.first - at >= need) break;
		at = u.first + u.second;
	}
	if (at + need > a.bytes) return false;
	a.used[at] = need;
	if (at + need > a.high) {
		a.high = at + need;
		ASAN_POISON_MEMORY_REGION((void *)(a.base + at), need);
	}
	*out = at;
	return true;
}

CUresult alloc_plain(CUcontext context, size_t bytes, CUdeviceptr *out)
{
	device &d = devices[(size_t)context->ordinal];
	size_t at;
	if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
	arena &a = find_arena(context->ordinal);
	if (d.allocated + bytes > set.memory_bytes || !arena_take(a, bytes, &at)) return CUDA_ERROR_OUT_OF_MEMORY;
	d.allocated += bytes;
	memory m;
	m.base = a.base + at;
	m.bytes = bytes;
	m.kind = PLAIN;
	m.ordinal = context->ordinal;
	m.context = context;
	m.offset = at;
	if (set.apart) m.shadow = a.shadow + at;
	add_memory(m);
	ASAN_UNPOISON_MEMORY_REGION((void *)m.base, bytes);
	memset((void *)(a.shadow + at), 0xa7, bytes < 1 << 20 ? bytes : 1 << 20);
	*out = m.base;
	return CUDA_SUCCESS;
}

void free_plain(const memory &m)
{
	arena &a = arenas[m.ordinal];
	devices[(size_t)m.ordinal].allocated -= m.bytes;
	ASAN_POISON_MEMORY_REGION((void *)m.base, m.bytes);
	if (m.bytes >= 1 << 18)
		(void)!fallocate(a.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)((m.offset + 4095) / 4096 * 4096), (off_t)(m.bytes - 4096));
	a.used.erase(m.offset);
	remove_memory(m.base);
}

CUresult alloc_host(CUcontext context, size_t bytes, memory_kind kind, void **out)
{
	void *ptr;
	if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
	if (posix_memalign(&ptr, 4096, bytes) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
	memset(ptr, 0xa7, bytes < 1 << 20 ? bytes : 1 << 20);
	memory m;
	m.base = (uintptr_t)ptr;
	m.bytes = bytes;
	m.kind = kind;
	m.ordinal = context->ordinal;
	m.context = context;
	add_memory(m);
	*out = ptr;
	return CUDA_SUCCESS;
}

}

memory *find_memory(uintptr_t ptr)
{
	auto after = all.upper_bound(ptr);
	if (after == all.begin()) return nullptr;
	memory &m = (--after)->second;
	return ptr - m.base < m.bytes ? &m : nullptr;
}

memory *add_memory(const memory &m)
{
	memory &added = all[m.base] = m;
	added.id = next_id++;
	return &added;
}

namespace {
/* Each part of it that lies in one piece, where its bytes are. */
void visit(uintptr_t ptr, size_t bytes, const std::function<void(char *, size_t)> &part)
{
	while (bytes > 0) {
		memory *m = find_memory(ptr);
		size_t n = m && m->base + m->bytes - ptr < bytes ? m->base + m->bytes - ptr : bytes;
		part((char *)(m && m->shadow ? m->shadow + (ptr - m->base) : ptr), n);
		ptr += n;
		bytes -= n;
	}
}
}

namespace {
/* A word comes at once: a kernel, or a stream, may wait for it. */
void store(void *to, const void *from, size_t bytes)
{
	uint32_t word;
	uint64_t two;
	if (bytes == 4 && (uintptr_t)to % 4 == 0) {
		memcpy(&word, from, 4);
		__atomic_store_n((uint32_t *)to, word, __ATOMIC_RELEASE);
	} else if (bytes == 8 && (uintptr_t)to % 8 == 0) {
		memcpy(&two, from, 8);
		__atomic_store_n((uint64_t *)to, two, __ATOMIC_RELEASE);
	} else {
		memmove(to, from, bytes);
	}
}
}

void copy_bytes(uintptr_t to, uintptr_t from, size_t bytes)
{
	if (!set.apart) {
		store((void *)to, (const void *)from, bytes);
		return;
	}
	std::vector<char> between(bytes);
	char *at = between.data();
	guard inner(fake::lock);
	visit(from, bytes, [&](char *place, size_t n) { memcpy(at, place, n); at += n; });
	at = between.data();
	visit(to, bytes, [&](char *place, size_t n) { store(place, at, n); at += n; });
}

/* A kernel may wait for a word. */
void fill_bytes(uintptr_t to, unsigned value, size_t width, size_t count)
{
	auto fill = [=](char *place, size_t n) {
		if (width == 1) memset(place, (int)value, n);
		else
			for (size_t i = 0; i < n / 4; i++) __atomic_store_n((unsigned *)place + i, value, __ATOMIC_RELEASE);
	};
	if (!set.apart) {
		fill((char *)to, count * width);
		return;
	}
	guard inner(fake::lock);
	visit(to, count * width, fill);
}

uint32_t *word_at(uintptr_t ptr)
{
	uintptr_t at = ptr;
	if (set.apart) {
		guard inner(fake::lock);
		visit(ptr, 4, [&](char *place, size_t) { at = (uintptr_t)place; });
	}
	return (uint32_t *)at;
}

void remove_memory(uintptr_t base) { all.erase(base); }
size_t count_memory() { return all.size(); }

bool in_device_space(uintptr_t ptr)
{
	for (auto &a : arenas)
		if (ptr - a.second.base < a.second.bytes) return true;
	return false;
}

void arena_place(int ordinal, int *fd, uintptr_t *base)
{
	arena &a = find_arena(ordinal);
	*fd = a.fd;
	*base = a.base;
}

CUresult check_range(CUdeviceptr ptr, size_t bytes, bool must_be_known)
{
	memory *m = find_memory(ptr);
	if (!m) return must_be_known || in_device_space(ptr) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
	/* Mappings side by side count as one. */
	while (m && ptr + bytes > m->base + m->bytes) {
		if (m->kind != VMM) return CUDA_ERROR_INVALID_VALUE;
		uintptr_t end = m->base + m->bytes;
		m = find_memory(end);
		if (!m || m->base != end) return CUDA_ERROR_INVALID_VALUE;
	}
	return CUDA_SUCCESS;
}

}

using namespace fake;

CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t bytes)
{
	FAKE_ENTER(cuMemAlloc_v2);
	CUcontext context;
	FAKE_TRY(current(&context));
	FAKE_TRY(unsafe());
	return alloc_plain(context, bytes, out);
}

/* Waits for all that the context has to do, as CUDA does in practice. */
CUresult cuMemFree_v2(CUdeviceptr ptr)
{
	FAKE_ENTER(cuMemFree_v2);
	if (ptr == 0) return CUDA_SUCCESS;
	FAKE_TRY(unsafe());
	memory *m = find_memory(ptr);
	if (!m || m->base != ptr || (m->kind != PLAIN && m->kind != MANAGED)) return CUDA_ERROR_INVALID_VALUE;
	wait_context(held, m->context);
	m = find_memory(ptr);
	if (!m || m->base != ptr) die("cuMemFree: two threads free %#llx", ptr);
	if (m->kind == PLAIN) {
		free_plain(*m);
	} else {
		remove_memory(ptr);
		free((void *)ptr);
	}
	return CUDA_SUCCESS;
}

CUresult cuMemAllocAsync(CUdeviceptr *out, size_t bytes, CUstream handle)
{
	FAKE_ENTER(cuMemAllocAsync);
	CUstream stream;
	FAKE_TRY(find_stream(handle, &stream));
	if (stream->capture) return invalidate(stream->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	return alloc_plain(stream->context, bytes, out);
}

CUresult cuMemFreeAsync(CUdeviceptr ptr, CUstream handle)
{
	FAKE_ENTER(cuMemFreeAsync);
	CUstream stream;
	FAKE_TRY(find_stream(handle, &stream));
	if (stream->capture) return invalidate(stream->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	memory *m = find_memory(ptr);
	if (!m || m->base != ptr || m->kind != PLAIN) return CUDA_ERROR_INVALID_VALUE;
	enqueue(stream, {}, [ptr] {
		guard inner(fake::lock);
		if (memory *gone = find_memory(ptr)) free_plain(*gone);
	}, 0);
	return CUDA_SUCCESS;
}

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
	FAKE_ENTER(cuMemGetInfo_v2);
	CUcontext context;
	FAKE_TRY(current(&context));
	*total_bytes = set.memory_bytes;
	*free_bytes = set.memory_bytes - fake::devices[(size_t)context->ordinal].allocated;
	return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr ptr)
{
	FAKE_ENTER(cuMemGetAddressRange_v2);
	memory *m = find_memory(ptr);
	if (!m) return CUDA_ERROR_NOT_FOUND;
	if (base) *base = m->base;
	if (bytes) *bytes = m->bytes;
	return CUDA_SUCCESS;
}

CUresult cuMemHostAlloc(void **out, size_t bytes, unsigned int flags)
{
	FAKE_ENTER(cuMemHostAlloc);
	CUcontext context;
	FAKE_TRY(current(&context));
	FAKE_TRY(unsafe());
	if (flags > 7) return CUDA_ERROR_INVALID_VALUE;
	return alloc_host(context, bytes, HOST, out);
}

CUresult cuMemAllocHost_v2(void **out, size_t bytes) { return cuMemHostAlloc(out, bytes, 0); }

CUresult cuMemFreeHost(void *ptr)
{
	FAKE_ENTER(cuMemFreeHost);
	FAKE_TRY(unsafe());
	memory *m = find_memory((uintptr_t)ptr);
	if (!m || m->base != (uintptr_t)ptr || m->kind != HOST) return CUDA_ERROR_INVALID_VALUE;
	wait_context(held, m->context);
	remove_memory((uintptr_t)ptr);
	free(ptr);
	return CUDA_SUCCESS;
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *out, void *ptr, unsigned int flags)
{
	FAKE_ENTER(cuMemHostGetDevicePointer_v2);
	memory *m = find_memory((uintptr_t)ptr);
	if (flags != 0 || !m || (m->kind != HOST && m->kind != REGISTERED)) return CUDA_ERROR_INVALID_VALUE;
	*out = (CUdeviceptr)(uintptr_t)ptr;
	return CUDA_SUCCESS;
}

CUresult cuMemHostRegister_v2(void *ptr, size_t bytes, unsigned int flags)
{
	FAKE_ENTER(cuMemHostRegister_v2);
	CUcontext context;
	FAKE_TRY(current(&context));
	FAKE_TRY(unsafe());
	if (bytes == 0 || flags > 15) return CUDA_ERROR_INVALID_VALUE;
	uintptr_t base = (uintptr_t)ptr;
	for (auto &one : all)
		if (one.first < base + bytes && base < one.first + one.second.bytes) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
	memory m;
	m.base = base;
	m.bytes = bytes;
	m.kind = REGISTERED;
	m.ordinal = context->ordinal;
	m.context = context;
	add_memory(m);
	tp_emulator_others();           /* it may be shared */
	return CUDA_SUCCESS;
}

CUresult cuMemHostUnregister(void *ptr)
{
	FAKE_ENTER(cuMemHostUnregister);
	FAKE_TRY(unsafe());
	memory *m = find_memory((uintptr_t)ptr);
	if (!m || m->base != (uintptr_t)ptr || m->kind != REGISTERED) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
	wait_context(held, m->context);
	remove_memory((uintptr_t)ptr);
	return CUDA_SUCCESS;
}

CUresult cuMemAllocManaged(CUdeviceptr *out, size_t bytes, unsigned int flags)
{
	FAKE_ENTER(cuMemAllocManaged);
	CUcontext context;
	FAKE_TRY(current(&context));
	FAKE_TRY(unsafe());
	if (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST) return CUDA_ERROR_INVALID_VALUE;
	void *ptr;
	FAKE_TRY(alloc_host(context, bytes, MANAGED, &ptr));
	*out = (CUdeviceptr)(uintptr_t)ptr;
	return CUDA_SUCCESS;
}

/* What a pointer is. */
static CUresult attribute_of(const memory &m, CUdeviceptr ptr, CUpointer_attribute attribute, void *out)
{
	bool host = m.kind == HOST || m.kind == REGISTERED;
	switch (attribute) {
	case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)out = m.kind == VMM ? nullptr : m.context; break;
	case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)out = host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE; break;
	case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)out = ptr; break;
	case CU_POINTER_ATTRIBUTE_HOST_POINTER:
		if (!host && m.kind != MANAGED) return CUDA_ERROR_INVALID_VALUE;
		*(void **)out = (void *)ptr;
		break;
	case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: *(unsigned *)out = 0; break;
	case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(unsigned long long *)out = m.id; break;
	case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned char *)out = m.kind == MANAGED; break;
	case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)out = m.ordinal; break;
	case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *(unsigned *)out = m.kind == PLAIN && set.ipc; break;
	case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR: *(CUdeviceptr *)out = m.base; break;
	case CU_POINTER_ATTRIBUTE_RANGE_SIZE: case CU_POINTER_ATTRIBUTE_MAPPING_SIZE: *(size_t *)out = m.bytes; break;
	case CU_POINTER_ATTRIBUTE_MAPPED: *(unsigned *)out = 1; break;
	case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: *(unsigned long long *)out = m.kind == VMM ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : 0; break;
	case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS: *(unsigned *)out = CU_MEM_ACCESS_FLAGS_PROT_READWRITE; break;
	case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: *(void **)out = nullptr; break;
	case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID: *(unsigned long long *)out = m.id; break;
	default: return CUDA_ERROR_INVALID_VALUE;
	}
	return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *out, CUpointer_attribute attribute, CUdeviceptr ptr)
{
	FAKE_ENTER(cuPointerGetAttribute);
	memory *m = find_memory(ptr);
	return m ? attribute_of(*m, ptr, attribute, out) : CUDA_ERROR_INVALID_VALUE;
}

/* Memory that CUDA doesn't know is no error here: everything is zero, the device -2. */
CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **out, CUdeviceptr ptr)
{
	FAKE_ENTER(cuPointerGetAttributes);
	memory *m = find_memory(ptr);
	for (unsigned i = 0; i < count; i++) {
		if (m && attribute_of(*m, ptr, attributes[i], out[i]) == CUDA_SUCCESS) continue;
		switch (attributes[i]) {
		case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)out[i] = -2; break;
		case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: case CU_POINTER_ATTRIBUTE_MAPPED:
		case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS: *(unsigned *)out[i] = 0; break;
		case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned char *)out[i] = 0; break;
		default: *(unsigned long long *)out[i] = 0; break;
		}
	}
	return CUDA_SUCCESS;
}

CUresult cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr ptr)
{
	FAKE_ENTER(cuPointerSetAttribute);
	(void)value;
	return attribute == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS && find_memory(ptr) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

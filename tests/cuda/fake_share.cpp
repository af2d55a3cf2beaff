/* Virtual memory management (each allocation a memory file, mapped at reserved addresses), and IPC: a handle names the
 * process, its arena's descriptor and the place. */
#include "emulator_run.h"
#include "fake.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace fake {

struct block { int fd; size_t bytes; int number; unsigned handles, maps; CUmemAllocationProp properties; };

namespace {

constexpr size_t granularity = 2 << 20;
std::map<CUmemGenericAllocationHandle, block *> &blocks = *new std::map<CUmemGenericAllocationHandle, block *>;
std::map<uintptr_t, size_t> &reserved = *new std::map<uintptr_t, size_t>;
CUmemGenericAllocationHandle next_handle = 0x1000;

block *find_block(CUmemGenericAllocationHandle handle)
{
	auto found = blocks.find(handle);
	return found == blocks.end() || found->second->handles == 0 ? nullptr : found->second;
}

void drop_unused(block *b)
{
	if (b->handles > 0 || b->maps > 0) return;
	close(b->fd);
	int ordinal = ordinal_of_number(b->number);
	if (ordinal >= 0 && b->properties.win32HandleMetaData == nullptr) devices[(size_t)ordinal].allocated -= b->bytes;
	for (auto i = blocks.begin(); i != blocks.end(); ++i)
		if (i->second == b) {
			blocks.erase(i);
			break;
		}
	delete b;
}

bool valid_properties(const CUmemAllocationProp *p)
{
	return p->type == CU_MEM_ALLOCATION_TYPE_PINNED && p->location.type == CU_MEM_LOCATION_TYPE_DEVICE && p->location.id >= 0
		&& (size_t)p->location.id < devices.size();
}

bool inside_reservation(uintptr_t ptr, size_t bytes)
{
	auto after = reserved.upper_bound(ptr);
	if (after == reserved.begin()) return false;
	--after;
	return ptr + bytes <= after->first + after->second;
}

/* The mappings that make up exactly [ptr, ptr + bytes). */
bool mappings(uintptr_t ptr, size_t bytes, std::vector<memory *> &out)
{
	for (uintptr_t at = ptr; at < ptr + bytes;) {
		memory *m = find_memory(at);
		if (!m || m->kind != VMM || m->base != at || at + m->bytes > ptr + bytes) return false;
		out.push_back(m);
		at += m->bytes;
	}
	return true;
}

struct ipc_handle { char magic[8]; int pid, fd, number; uint64_t offset, bytes, id; };

}

size_t count_blocks() { return blocks.size(); }

}

using namespace fake;

#define NEED_VMM() if (!set.vmm) return CUDA_ERROR_NOT_SUPPORTED

CUresult cuMemAddressReserve(CUdeviceptr *out, size_t bytes, size_t alignment, CUdeviceptr address, unsigned long long flags)
{
	FAKE_ENTER(cuMemAddressReserve);
	NEED_VMM();
	(void)address;
	if (bytes == 0 || bytes % granularity != 0 || flags != 0 || (alignment & (alignment - 1)) != 0) return CUDA_ERROR_INVALID_VALUE;
	if (alignment < granularity) alignment = granularity;
	char *map = (char *)mmap(nullptr, bytes + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (map == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
	char *base = (char *)(((uintptr_t)map + alignment - 1) & ~(alignment - 1));
	if (base > map) munmap(map, (size_t)(base - map));
	if (base < map + alignment) munmap(base + bytes, (size_t)(map + alignment - base));
	reserved[(uintptr_t)base] = bytes;
	*out = (CUdeviceptr)(uintptr_t)base;
	return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr ptr, size_t bytes)
{
	FAKE_ENTER(cuMemAddressFree);
	NEED_VMM();
	auto found = reserved.find(ptr);
	if (found == reserved.end() || found->second != bytes) return CUDA_ERROR_INVALID_VALUE;
	for (uintptr_t at = ptr; at < ptr + bytes; at += granularity)
		if (find_memory(at)) return CUDA_ERROR_INVALID_VALUE;
	munmap((void *)ptr, bytes);
	reserved.erase(found);
	return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *properties, unsigned long long flags)
{
	FAKE_ENTER(cuMemCreate);
	NEED_VMM();
	if (bytes == 0 || bytes % granularity != 0 || flags != 0 || !valid_properties(properties)) return CUDA_ERROR_INVALID_VALUE;
	if (properties->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
	device &d = fake::devices[(size_t)properties->location.id];
	if (d.allocated + bytes > set.memory_bytes) return CUDA_ERROR_OUT_OF_MEMORY;
	char name[64];
	snprintf(name, sizeof name, "fake-gpu-%d-block", d.number);
	int fd = memfd_create(name, MFD_CLOEXEC);
	if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0) die("no memory file for an allocation of %zu bytes", bytes);
	char rubbish[4096];
	memset(rubbish, 0xa7, sizeof rubbish);
	for (int i = 0; i < 16; i++) (void)!pwrite(fd, rubbish, sizeof rubbish, i * (off_t)sizeof rubbish);
	d.allocated += bytes;
	block *b = new block { fd, bytes, d.number, 1, 0, *properties };
	b->properties.win32HandleMetaData = nullptr;
	*out = next_handle++;
	blocks[*out] = b;
	return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
	FAKE_ENTER(cuMemRelease);
	NEED_VMM();
	block *b = find_block(handle);
	if (!b) return CUDA_ERROR_INVALID_VALUE;
	b->handles--;
	drop_unused(b);
	return CUDA_SUCCESS;
}

/* Mapped, but nobody may touch it before cuMemSetAccess. */
CUresult cuMemMap(CUdeviceptr ptr, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags)
{
	FAKE_ENTER(cuMemMap);
	NEED_VMM();
	block *b = find_block(handle);
	if (!b || flags != 0 || offset != 0 || bytes == 0 || bytes % granularity != 0 || ptr % granularity != 0 || bytes > b->bytes) return CUDA_ERROR_INVALID_VALUE;
	if (!inside_reservation(ptr, bytes)) return CUDA_ERROR_INVALID_VALUE;
	for (uintptr_t at = ptr; at < ptr + bytes; at += granularity)
		if (find_memory(at)) return CUDA_ERROR_ALREADY_MAPPED;
	if (mmap((void *)ptr, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, b->fd, 0) == MAP_FAILED) return CUDA_ERROR_MAP_FAILED;
	/* At a second address the thread sanitizer doesn't know it again. */
	if (b->maps++) tp_emulator_others();
	memory m;
	m.base = ptr;
	m.bytes = bytes;
	m.kind = VMM;
	m.ordinal = b->properties.location.id;
	m.from = b;
	m.access = false;
	add_memory(m);
	return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr ptr, size_t bytes)
{
	FAKE_ENTER(cuMemUnmap);
	NEED_VMM();
	CUcontext context;
	if (set.unmap_waits && current(&context) == CUDA_SUCCESS) wait_context(held, context);
	std::vector<memory *> found;
	if (bytes == 0 || !mappings(ptr, bytes, found)) return CUDA_ERROR_INVALID_VALUE;
	for (memory *m : found) {
		if (mmap((void *)m->base, m->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) == MAP_FAILED) die("can't unmap");
		if (m->shadow) munmap((void *)m->shadow, m->bytes);
		m->from->maps--;
		drop_unused(m->from);
		remove_memory(m->base);
	}
	return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr ptr, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
	FAKE_ENTER(cuMemSetAccess);
	NEED_VMM();
	std::vector<memory *> found;
	if (bytes == 0 || !mappings(ptr, bytes, found)) return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < count; i++) {
		int id = access[i].location.id;
		if (access[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE || id < 0 || (size_t)id >= fake::devices.size()) return CUDA_ERROR_INVALID_VALUE;
		for (memory *m : found) {
			int owner = m->from->number, peer = fake::devices[(size_t)id].number;
			if (owner != peer && set.peer_group != 0 && owner / set.peer_group != peer / set.peer_group) return CUDA_ERROR_INVALID_DEVICE;
			if (access[i].flags == CU_MEM_ACCESS_FLAGS_PROT_NONE) continue;
			if (set.apart) {
				void *shadow = m->shadow ? (void *)m->shadow : mmap(nullptr, m->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, m->from->fd, 0);
				if (shadow == MAP_FAILED) die("no addresses for %zu bytes", m->bytes);
				m->shadow = (uintptr_t)shadow;
			} else if (mprotect((void *)m->base, m->bytes, access[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READ ? PROT_READ : PROT_READ | PROT_WRITE) != 0)
				die("can't give access to %#lx", m->base);
			m->access = true;
		}
	}
	return CUDA_SUCCESS;
}

CUresult cuMemGetAccess(unsigned long long *out, const CUmemLocation *location, CUdeviceptr ptr)
{
	FAKE_ENTER(cuMemGetAccess);
	NEED_VMM();
	memory *m = find_memory(ptr);
	if (!m || location->type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
	*out = m->access ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
	return CUDA_SUCCESS;
}

CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long flags)
{
	FAKE_ENTER(cuMemExportToShareableHandle);
	NEED_VMM();
	block *b = find_block(handle);
	if (!b || flags != 0 || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || !(b->properties.requestedHandleTypes & type)) return CUDA_ERROR_INVALID_VALUE;
	int fd = fcntl(b->fd, F_DUPFD_CLOEXEC, 3);
	if (fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
	*(int *)out = fd;
	return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *handle, CUmemAllocationHandleType type)
{
	FAKE_ENTER(cuMemImportFromShareableHandle);
	NEED_VMM();
	int from = (int)(intptr_t)handle, number;
	char path[64], name[128];
	struct stat status;
	snprintf(path, sizeof path, "/proc/self/fd/%d", from);
	ssize_t length = readlink(path, name, sizeof name - 1);
	if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || length < 0) return CUDA_ERROR_INVALID_VALUE;
	name[length] = 0;
	if (sscanf(name, "/memfd:fake-gpu-%d-block", &number) != 1 || fstat(from, &status) != 0) return CUDA_ERROR_INVALID_VALUE;
	int fd = fcntl(from, F_DUPFD_CLOEXEC, 3);
	if (fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
	int ordinal = ordinal_of_number(number);
	block *b = new block { fd, (size_t)status.st_size, number, 1, 0, {} };
	b->properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
	b->properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
	b->properties.location = { CU_MEM_LOCATION_TYPE_DEVICE, ordinal < 0 ? 0 : ordinal };
	b->properties.win32HandleMetaData = b;          /* imported: not counted as this process's */
	tp_emulator_others();
	*out = next_handle++;
	blocks[*out] = b;
	return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t *out, const CUmemAllocationProp *properties, CUmemAllocationGranularity_flags option)
{
	FAKE_ENTER(cuMemGetAllocationGranularity);
	NEED_VMM();
	(void)option;
	if (!valid_properties(properties)) return CUDA_ERROR_INVALID_VALUE;
	*out = granularity;
	return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *out, CUmemGenericAllocationHandle handle)
{
	FAKE_ENTER(cuMemGetAllocationPropertiesFromHandle);
	NEED_VMM();
	block *b = find_block(handle);
	if (!b) return CUDA_ERROR_INVALID_VALUE;
	*out = b->properties;
	out->win32HandleMetaData = nullptr;
	return CUDA_SUCCESS;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *out, void *ptr)
{
	FAKE_ENTER(cuMemRetainAllocationHandle);
	NEED_VMM();
	memory *m = find_memory((uintptr_t)ptr);
	if (!m || m->kind != VMM) return CUDA_ERROR_INVALID_VALUE;
	for (auto &one : blocks)
		if (one.second == m->from) {
			m->from->handles++;
			*out = one.first;
			return CUDA_SUCCESS;
		}
	return CUDA_ERROR_INVALID_VALUE;
}

/* A descriptor as large as the range; the memory itself is reached by its address alone. */
CUresult cuMemGetHandleForAddressRange(void *out, CUdeviceptr ptr, size_t bytes, CUmemRangeHandleType type, unsigned long long flags)
{
	FAKE_ENTER(cuMemGetHandleForAddressRange);
	if (!set.dma_buf) return CUDA_ERROR_NOT_SUPPORTED;
	if (type != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD || flags != 0 || bytes == 0 || ptr % 4096 != 0 || bytes % 4096 != 0) return CUDA_ERROR_INVALID_VALUE;
	memory *m = find_memory(ptr);
	if (!m || (m->kind != PLAIN && m->kind != VMM)) return CUDA_ERROR_INVALID_VALUE;
	if (m->kind == PLAIN ? ptr + bytes >= m->base + m->bytes + 4096 : check_range(ptr, bytes, true) != CUDA_SUCCESS) return CUDA_ERROR_INVALID_VALUE;
	int fd = memfd_create("fake-gpu-dmabuf", MFD_CLOEXEC);
	if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0) die("no memory file for a DMA-BUF");
	*(int *)out = fd;
	return CUDA_SUCCESS;
}

/* IPC. */
CUresult cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr ptr)
{
	FAKE_ENTER(cuIpcGetMemHandle);
	if (!set.ipc) return CUDA_ERROR_NOT_SUPPORTED;
	memory *m = find_memory(ptr);
	if (!m || m->kind != PLAIN) return CUDA_ERROR_INVALID_VALUE;
	ipc_handle h = {};
	uintptr_t base;
	memcpy(h.magic, "fakeipc", 8);
	h.pid = getpid();
	arena_place(m->ordinal, &h.fd, &base);
	h.number = fake::devices[(size_t)m->ordinal].number;
	h.offset = m->offset;
	h.bytes = m->bytes;
	h.id = m->id;
	memset(out, 0, sizeof *out);
	static_assert(sizeof h <= sizeof *out, "fits");
	memcpy(out, &h, sizeof h);
	return CUDA_SUCCESS;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *out, CUipcMemHandle handle, unsigned int flags)
{
	FAKE_ENTER(cuIpcOpenMemHandle_v2);
	CUcontext context;
	ipc_handle h;
	FAKE_TRY(current(&context));
	if (!set.ipc) return CUDA_ERROR_NOT_SUPPORTED;
	memcpy(&h, &handle, sizeof h);
	if (memcmp(h.magic, "fakeipc", 8) != 0 || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) return CUDA_ERROR_INVALID_VALUE;
	if (h.pid == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
	int mine = fake::devices[(size_t)context->ordinal].number;
	if (mine != h.number && set.peer_group != 0 && mine / set.peer_group != h.number / set.peer_group) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
	std::string key((const char *)&h, sizeof h);
	static std::map<std::pair<std::string, CUcontext>, uintptr_t> &open_handles = *new std::map<std::pair<std::string, CUcontext>, uintptr_t>;
	auto found = open_handles.find({ key, context });
	memory *m = found == open_handles.end() ? nullptr : find_memory(found->second);
	if (m && m->kind == IPC && m->key == key) {
		m->references++;
		*out = m->base;
		return CUDA_SUCCESS;
	}
	char path[64];
	snprintf(path, sizeof path, "/proc/%d/fd/%d", h.pid, h.fd);
	int fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd < 0) return CUDA_ERROR_INVALID_VALUE;
	size_t skip = h.offset % 4096, map_bytes = (skip + h.bytes + 4095) / 4096 * 4096;
	void *map = mmap(nullptr, map_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, (off_t)(h.offset - skip));
	close(fd);
	if (map == MAP_FAILED) return CUDA_ERROR_MAP_FAILED;
	tp_emulator_others();
	memory added;
	if (set.apart) {
		added.shadow = (uintptr_t)map + skip;
		map = mmap(nullptr, map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		if (map == MAP_FAILED) return CUDA_ERROR_MAP_FAILED;
	}
	added.base = (uintptr_t)map + skip;
	added.bytes = h.bytes;
	added.kind = IPC;
	added.ordinal = ordinal_of_number(h.number) < 0 ? context->ordinal : ordinal_of_number(h.number);
	added.context = context;
	added.map = map;
	added.map_bytes = map_bytes;
	added.key = key;
	add_memory(added);
	open_handles[{ key, context }] = added.base;
	*out = added.base;
	return CUDA_SUCCESS;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr ptr)
{
	FAKE_ENTER(cuIpcCloseMemHandle);
	memory *m = find_memory(ptr);
	if (!m || m->kind != IPC || m->base != ptr) return CUDA_ERROR_INVALID_VALUE;
	if (--m->references > 0) return CUDA_SUCCESS;
	/* As cuMemFree does; and nobody opens it meanwhile. */
	m->key = "closing";
	wait_context(held, m->context);
	m = find_memory(ptr);
	if (!m || m->base != ptr) die("cuIpcCloseMemHandle: two threads close %#llx", ptr);
	if (m->shadow) munmap((void *)(m->shadow - (m->base - (uintptr_t)m->map)), m->map_bytes);
	munmap(m->map, m->map_bytes);
	remove_memory(ptr);
	return CUDA_SUCCESS;
}

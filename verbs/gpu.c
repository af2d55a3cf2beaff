/* What is device memory, as CUDA's driver says, and what of it is registered (gpu.h).
 *
 * A pointer stays what it was as long as its allocations have the numbers that they had when it was registered: those are unique in the
 * process's life, so memory that was freed is found out even where its addresses are in use again. */
#include "verbs/gpu.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

enum { P_GPU };
enum { STEP = 256 };    /* CUDA's allocations begin at multiples of it */
static struct tp_param params[] = {
	[P_GPU] = { .name = "TELPHER_VERBS_GPU", .kind = TP_PARAM_BOOL, .fallback = "1",
		.doc = "The software card registers memory of GPUs, by address or as DMA-BUF; 0: it refuses, as a card without GPUDirect does" },
};
TP_PARAM_TABLE("verbs", params)

struct tp_gpu_driver tp_gpu_driver;
_Atomic uint64_t tp_gpu_lowest = UINT64_MAX, tp_gpu_highest;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;       /* of all below */
static enum { UNKNOWN, USABLE, UNUSABLE } driver_state;
static struct tp_gpu_range *ranges;
static struct tp_gpu_range *_Atomic by_place[1u << TP_CARD_KEY_SLOTS_LOG];

bool tp_gpu_allowed(void) { return tp_param_int(&params[P_GPU]) != 0; }

/* ---- the driver ---- */

static bool load_locked(void *library)
{
	const char *missing = NULL;
#define LOAD_MUST(name, symbol, parameters) \
	*(void **)&tp_gpu_driver.name = dlsym(library, #symbol); \
	if (!tp_gpu_driver.name) \
		missing = #symbol;
#define LOAD_MAY(name, symbol, parameters) *(void **)&tp_gpu_driver.name = dlsym(library, #symbol);
	TP_GPU_FUNCTIONS(LOAD_MUST, LOAD_MAY)
	if (missing)
		TP_WARN("memory of GPUs can't be registered with the software card: libcuda.so.1 has no %s", missing);
	return !missing;
}

/* Does the program use CUDA? Then its driver is in the process. */
static bool have_driver(void)
{
	pthread_mutex_lock(&lock);
	if (driver_state == UNKNOWN) {
		void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
		if (library)
			driver_state = load_locked(library) ? USABLE : UNUSABLE;
	}
	bool usable = driver_state == USABLE;
	pthread_mutex_unlock(&lock);
	return usable;
}

int tp_gpu_failed(const char *call, CUresult error, uint64_t addr, uint64_t bytes)
{
	const char *name = NULL, *text = NULL;
	if (tp_gpu_driver.GetErrorName(error, &name) != CUDA_SUCCESS || !name)
		name = "an unknown error";
	if (tp_gpu_driver.GetErrorString(error, &text) != CUDA_SUCCESS || !text)
		text = "";
	return TP_CARD_FAIL(EFAULT, "%llu bytes of GPU memory at 0x%llx can't be reached: %s: %s (%d) %s", (unsigned long long)bytes,
		(unsigned long long)addr, call, name, (int)error, text);
}

/* An address that CUDA doesn't know is no error: all is zero. Nor is a driver that wasn't started: then nothing is device memory. */
struct tp_gpu_address tp_gpu_ask(uint64_t addr)
{
	unsigned int type = 0, managed = 0;     /* the latter's first byte */
	int ordinal = -1;
	CUcontext context = NULL;
	CUdeviceptr base = 0, mapping = 0;
	size_t bytes = 0, mapping_bytes = 0;
	unsigned long long id = 0, block = 0;
	CUpointer_attribute first[] = { CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
		CU_POINTER_ATTRIBUTE_CONTEXT, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE, CU_POINTER_ATTRIBUTE_BUFFER_ID };
	void *values[] = { &type, &managed, &ordinal, &context, &base, &bytes, &id };
	CUpointer_attribute second[] = { CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR, CU_POINTER_ATTRIBUTE_MAPPING_SIZE, CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID };
	void *mapped[] = { &mapping, &mapping_bytes, &block };
	/* Managed memory is the host's as well. */
	if (tp_gpu_driver.PointerGetAttributes(TP_ARRAY_LEN(first), first, values, (CUdeviceptr)addr) != CUDA_SUCCESS || type != CU_MEMORYTYPE_DEVICE ||
		(managed & 0xff))
		return (struct tp_gpu_address){ 0 };
	uint64_t end = bytes ? base + bytes : UINT64_MAX;
	/* Memory that was mapped belongs to no context, and its range may be the reserved one: what is mapped there may change. Memory of a pool
	 * belongs to none either, and its mapping is the pool's. */
	if (!context && tp_gpu_driver.PointerGetAttributes(TP_ARRAY_LEN(second), second, mapped, (CUdeviceptr)addr) == CUDA_SUCCESS && mapping_bytes) {
		end = TP_MIN(end, (uint64_t)mapping + mapping_bytes);
		id ^= block << 32 | block >> 32;
	}
	return (struct tp_gpu_address){ .device = end != UINT64_MAX, .end = end, .id = id, .context = context, .ordinal = ordinal };
}

/* ---- registered ranges ---- */

/* Adds the allocation that holds addr; the list grows. 0 or an errno. */
static int add_piece(struct tp_gpu_range **range, uint64_t addr, const struct tp_gpu_address *at)
{
	uint32_t count = (*range)->count;
	if ((count & (count - 1)) == 0) {
		struct tp_gpu_range *more = realloc(*range, sizeof(*more) + (count ? 2 * count : 1) * sizeof(more->pieces[0]));
		if (!more)
			return ENOMEM;
		*range = more;
	}
	(*range)->pieces[(*range)->count++] = (struct tp_gpu_piece){ .start = addr, .end = at->end, .id = at->id };
	return 0;
}

static uint64_t page_of(uint64_t addr) { return addr / (uint64_t)sysconf(_SC_PAGESIZE); }

/* All allocations of the range, on one device. They must follow each other; but for pages: see tp_gpu_find_pages. */
static int find_pieces(struct tp_gpu_range **range, const struct tp_gpu_address *first, bool pages)
{
	uint64_t start = (*range)->addr, addr = start, end = addr + (*range)->bytes;
	while (addr < end) {
		struct tp_gpu_address at = tp_gpu_ask(addr);
		if (!at.device || at.end <= addr) {
			if (!pages || (page_of(addr) != page_of(start) && page_of(addr) != page_of(end - 1)))
				return TP_CARD_FAIL(EFAULT, "%llu bytes at 0x%llx can't be registered: from 0x%llx on it is no memory of a GPU",
					(unsigned long long)(*range)->bytes, (unsigned long long)start, (unsigned long long)addr);
			addr = addr / STEP * STEP + STEP;
			continue;
		}
		if (at.ordinal != first->ordinal || at.context != first->context)
			return TP_CARD_FAIL(EFAULT, "%llu bytes at 0x%llx can't be registered: they belong to GPU %d, and from 0x%llx on to %s",
				(unsigned long long)(*range)->bytes, (unsigned long long)start, first->ordinal, (unsigned long long)addr,
				at.ordinal != first->ordinal ? "another" : "another context of it");
		if (add_piece(range, addr, &at))
			return TP_CARD_FAIL(ENOMEM, "no memory for the description of a region of GPU memory");
		addr = at.end;
	}
	return 0;
}

static void link_range(struct tp_gpu_range *range)
{
	pthread_mutex_lock(&lock);
	range->next = ranges;
	range->back = &ranges;
	if (ranges)
		ranges->back = &range->next;
	ranges = range;
	if (range->addr < atomic_load_explicit(&tp_gpu_lowest, memory_order_relaxed))
		atomic_store_explicit(&tp_gpu_lowest, range->addr, memory_order_relaxed);
	if (range->addr + range->bytes > atomic_load_explicit(&tp_gpu_highest, memory_order_relaxed))
		atomic_store_explicit(&tp_gpu_highest, range->addr + range->bytes, memory_order_relaxed);
	pthread_mutex_unlock(&lock);
}

static int make_range(const struct tp_gpu_address *first, uint64_t addr, uint64_t bytes, bool pages, struct tp_gpu_range **out)
{
	struct tp_gpu_range *range = tp_alloc(1, sizeof(*range), "a region of GPU memory");
	if (!range)
		return ENOMEM;
	range->addr = addr;
	range->bytes = bytes;
	int error = find_pieces(&range, first, pages);
	if (!error)
		error = tp_gpu_copier(first->context, first->ordinal, addr, bytes, &range->copier);
	if (error) {
		free(range);
		return error;
	}
	link_range(range);
	*out = range;
	return 0;
}

static int find(uint64_t addr, uint64_t bytes, bool pages, struct tp_gpu_range **out)
{
	int error;
	if (!bytes || bytes > UINT64_MAX - addr || !have_driver())
		return 0;
	struct tp_gpu_address first = tp_gpu_ask(addr);
	for (uint64_t at = addr / STEP * STEP + STEP; pages && !first.device && at < addr + bytes && page_of(at) == page_of(addr); at += STEP)
		first = tp_gpu_ask(at);
	if (!first.device)
		return 0;
	if (!tp_gpu_allowed())
		error = TP_CARD_FAIL(EFAULT, "%llu bytes of GPU memory at 0x%llx can't be registered: TELPHER_VERBS_GPU=0", (unsigned long long)bytes,
			(unsigned long long)addr);
	else
		error = make_range(&first, addr, bytes, pages, out);
	errno = error;
	return error ? -1 : 1;
}

int tp_gpu_find(uint64_t addr, uint64_t bytes, struct tp_gpu_range **out) { return find(addr, bytes, false, out); }
int tp_gpu_find_pages(uint64_t addr, uint64_t bytes, struct tp_gpu_range **out) { return find(addr, bytes, true, out); }

void tp_gpu_drop(struct tp_gpu_range *range)
{
	if (!range)
		return;
	pthread_mutex_lock(&lock);
	*range->back = range->next;
	if (range->next)
		range->next->back = range->back;
	pthread_mutex_unlock(&lock);
	free(range);
}

/* Relaxed: who uses a key has seen it published. */
void tp_gpu_bind(uint32_t place, struct tp_gpu_range *range) { atomic_store_explicit(&by_place[place], range, memory_order_relaxed); }
struct tp_gpu_range *tp_gpu_at(uint32_t place) { return atomic_load_explicit(&by_place[place], memory_order_relaxed); }

int tp_gpu_read_inline(uint64_t addr, void *to, size_t bytes)
{
	int error = ENOENT;
	pthread_mutex_lock(&lock);
	for (struct tp_gpu_range *range = ranges; range && error == ENOENT; range = range->next)
		if (addr >= range->addr && addr - range->addr < range->bytes)
			error = bytes <= range->bytes - (addr - range->addr) ? tp_gpu_read(range, addr, to, bytes) : EFAULT;
	pthread_mutex_unlock(&lock);
	return error;
}

void tp_gpu_forget(void)
{
	pthread_mutex_init(&lock, NULL);
	ranges = NULL;
	atomic_store_explicit(&tp_gpu_lowest, UINT64_MAX, memory_order_relaxed);
	atomic_store_explicit(&tp_gpu_highest, 0, memory_order_relaxed);
	tp_gpu_copiers_forget();
}

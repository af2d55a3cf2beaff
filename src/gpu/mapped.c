/* Device memory that the host stores to, by GDRCopy (libgdrapi and its kernel module gdrdrv): a word that a kernel polls lies near it, and costs the host one
 * store over PCIe. Opened at run time where NCCL_GDRCOPY_ENABLE asks for it, as NCCL has it. */
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "base/fork.h"
#include "gpu/internal.h"

#define GPU_PAGE ((size_t)64 << 10)

enum { PARAM_ENABLE, PARAM_LIBRARY };
static struct tp_param params[] = {
	[PARAM_ENABLE] = { .name = "NCCL_GDRCOPY_ENABLE", .kind = TP_PARAM_BOOL, .fallback = "0", .max = 1,
		.doc = "1: words by which the host tells kernels that chunks of network links have come, or were sent, lie in GPU memory (GDRCopy, where it is installed)" },
	[PARAM_LIBRARY] = { .name = "TELPHER_GDRCOPY_LIBRARY", .kind = TP_PARAM_STRING, .fallback = "libgdrapi.so.2", .doc = "GDRCopy's library" },
};
TP_PARAM_TABLE("gpu", params)

/* By value, as its interface has it. */
struct handle { unsigned long h; };
/* Its first field, and room for what versions add. */
struct info { uint64_t va; uint64_t rest[31]; };

static struct {
	void *(*open)(void);
	int (*pin)(void *gdr, unsigned long addr, size_t bytes, uint64_t token, uint32_t space, struct handle *out);
	int (*unpin)(void *gdr, struct handle handle);
	int (*map)(void *gdr, struct handle handle, void **out, size_t bytes);
	int (*unmap)(void *gdr, struct handle handle, void *at, size_t bytes);
	int (*get_info)(void *gdr, struct handle handle, struct info *out);
} api;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
TP_FORK_RENEW(lock)
static bool tried;
static void *gdr;

static void open_library(void)
{
	static const struct { const char *name; void *at; } symbols[] = { { "gdr_open", &api.open }, { "gdr_pin_buffer", &api.pin }, { "gdr_unpin_buffer", &api.unpin },
		{ "gdr_map", &api.map }, { "gdr_unmap", &api.unmap }, { "gdr_get_info_v2", &api.get_info } };
	const char *path = tp_param_string(&params[PARAM_LIBRARY]);
	void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);

	if (!library) {
		TP_INFO(TP_INIT | TP_NET, "NCCL_GDRCOPY_ENABLE=1, but GDRCopy isn't there: %s", dlerror());
		return;
	}
	for (size_t i = 0; i < TP_ARRAY_LEN(symbols); i++) {
		void *function = dlsym(library, symbols[i].name);
		if (!function) {
			TP_WARN("NCCL_GDRCOPY_ENABLE=1, but %s has no %s: GDRCopy 2.0 or later has it. It isn't used", path, symbols[i].name);
			return;
		}
		memcpy(symbols[i].at, &function, sizeof(function));
	}
	gdr = api.open();
	if (!gdr) TP_WARN("NCCL_GDRCOPY_ENABLE=1, but gdr_open fails: is the kernel module gdrdrv loaded, and /dev/gdrdrv in this container? GDRCopy isn't used");
}

bool tp_gpu_can_map(void)
{
	if (!tp_param_int(&params[PARAM_ENABLE])) return false;
	pthread_mutex_lock(&lock);
	if (!tried) open_library();
	tried = true;
	bool has = gdr != NULL;
	pthread_mutex_unlock(&lock);
	return has;
}

static ncclResult_t map(struct tp_gpu_mapped *w)
{
	struct handle handle;
	struct info info = { 0 };
	void *at = NULL;
	unsigned long start = (unsigned long)(uintptr_t)w->memory.ptr;
	size_t bytes = tp_align_up(w->memory.bytes, GPU_PAGE);

	if (start % GPU_PAGE || bytes > w->memory.mapped)
		return TP_FAIL(ncclSystemError, "GDRCopy can't map %zu bytes of GPU memory at %p: pages of %zu bytes are wanted", w->memory.bytes, w->memory.ptr, GPU_PAGE);
	if (api.pin(gdr, start, bytes, 0, 0, &handle) != 0)
		return TP_FAIL(ncclSystemError, "gdr_pin_buffer of %zu bytes of GPU memory fails: BAR1 may be used up (nvidia-smi -q -d MEMORY)", bytes);
	if (api.map(gdr, handle, &at, bytes) != 0 || api.get_info(gdr, handle, &info) != 0 || info.va > start) {
		if (at) api.unmap(gdr, handle, at, bytes);
		api.unpin(gdr, handle);
		return TP_FAIL(ncclSystemError, "gdr_map of %zu bytes of GPU memory fails", bytes);
	}
	w->handle = handle.h;
	w->mapping = at;
	w->host = (unsigned char *)at + (start - info.va);
	return ncclSuccess;
}

ncclResult_t tp_gpu_map_for_host(const struct tp_gpu *gpu, size_t bytes, const char *what, struct tp_gpu_mapped *out)
{
	struct tp_gpu_mapped w = { 0 };
	TP_TRY(tp_gpu_alloc(gpu, tp_align_up(bytes, GPU_PAGE), false, what, &w.memory));
	ncclResult_t result = map(&w);
	if (result != ncclSuccess) {
		tp_gpu_free(&w.memory);
		return result;
	}
	*out = w;
	return ncclSuccess;
}

void tp_gpu_unmap_for_host(struct tp_gpu_mapped *w)
{
	if (!w->host) return;
	struct handle handle = { w->handle };
	if (api.unmap(gdr, handle, w->mapping, tp_align_up(w->memory.bytes, GPU_PAGE)) != 0 || api.unpin(gdr, handle) != 0) TP_WARN("GDRCopy can't unmap %zu bytes of GPU memory", w->memory.bytes);
	tp_gpu_free(&w->memory);
	*w = (struct tp_gpu_mapped){ 0 };
}

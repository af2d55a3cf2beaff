/* A libgdrapi.so.2 for tests on the fake driver, whose device memory is the host's: a mapping is the memory itself. GDRAPI_FAKE=0: no kernel module. */
#include <stdint.h>
#include <stdlib.h>

struct handle { unsigned long h; };
struct info { uint64_t va, mapped_size; uint32_t page_size; };
void *gdr_open(void);
int gdr_pin_buffer(void *gdr, unsigned long addr, size_t bytes, uint64_t token, uint32_t space, struct handle *out);
int gdr_unpin_buffer(void *gdr, struct handle handle);
int gdr_map(void *gdr, struct handle handle, void **out, size_t bytes);
int gdr_unmap(void *gdr, struct handle handle, void *at, size_t bytes);
int gdr_get_info_v2(void *gdr, struct handle handle, struct info *out);

static int opened;

void *gdr_open(void)
{
	const char *module = getenv("GDRAPI_FAKE");
	return module && atoi(module) == 0 ? NULL : &opened;
}

int gdr_pin_buffer(void *gdr, unsigned long addr, size_t bytes, uint64_t token, uint32_t space, struct handle *out)
{
	(void)token, (void)space;
	if (gdr != &opened || addr % 65536 || bytes % 65536) return 22;
	out->h = addr;
	return 0;
}

int gdr_unpin_buffer(void *gdr, struct handle handle) { return gdr == &opened && handle.h ? 0 : 22; }

int gdr_map(void *gdr, struct handle handle, void **out, size_t bytes)
{
	if (gdr != &opened || !bytes) return 22;
	*out = (void *)handle.h;
	return 0;
}

int gdr_unmap(void *gdr, struct handle handle, void *at, size_t bytes) { return gdr == &opened && (unsigned long)(uintptr_t)at == handle.h && bytes ? 0 : 22; }

int gdr_get_info_v2(void *gdr, struct handle handle, struct info *out)
{
	if (gdr != &opened) return 22;
	*out = (struct info){ .va = handle.h, .page_size = 65536 };
	return 0;
}

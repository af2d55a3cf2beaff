/* Memory in large pages, where the kernel has them to give (transparent huge pages). Whoever walks through megabytes spends more time on finding
 * out where their pages lie than on moving what is in them, above all in a virtual machine, whose hypervisor translates each address once more. */
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>
#include "base/base.h"
#include "base/pages.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25        /* Linux 6.1 */
#endif

#define LARGE_BYTES ((size_t)2 << 20)

void *tp_pages_map(size_t bytes)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE), whole = tp_align_up(bytes, page), more = whole >= LARGE_BYTES ? LARGE_BYTES : 0;
	unsigned char *all = mmap(NULL, whole + more, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (all == MAP_FAILED) return NULL;
	if (!more) return all;
	size_t before = -(uintptr_t)all & (LARGE_BYTES - 1);
	if (before) munmap(all, before);
	if (before < more) munmap(all + before + whole, more - before);
	return all + before;
}

void tp_pages_unmap(void *memory, size_t bytes) { munmap(memory, bytes); }

/* Those that are whole within the memory. */
static uintptr_t find_large(const void *memory, size_t bytes, size_t *out)
{
	uintptr_t from = tp_align_up((uintptr_t)memory, LARGE_BYTES), to = ((uintptr_t)memory + bytes) & ~(uintptr_t)(LARGE_BYTES - 1);
	*out = from < to ? to - from : 0;
	return from;
}

void tp_pages_want_large(void *memory, size_t bytes)
{
	size_t large;
	uintptr_t from = find_large(memory, bytes, &large);
	if (large) madvise((void *)from, large, MADV_HUGEPAGE);
}

void tp_pages_make_large(void *memory, size_t bytes)
{
	size_t large;
	uintptr_t from = find_large(memory, bytes, &large);
	if (!large || madvise((void *)from, large, MADV_HUGEPAGE) != 0) return;
	/* One by one: what has no page yet is refused, and gets a large one at its first touch. */
	for (size_t at = 0; at < large; at += LARGE_BYTES) madvise((void *)(from + at), LARGE_BYTES, MADV_COLLAPSE);
}

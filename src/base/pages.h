/* Memory in large pages, where the kernel has them to give. */
#ifndef TP_BASE_PAGES_H
#define TP_BASE_PAGES_H

#include <stddef.h>

/* Zeroed pages of this process's own, from a large page's beginning on where they are as many; NULL and errno. */
void *tp_pages_map(size_t bytes);
void tp_pages_unmap(void *memory, size_t bytes);
/* As large pages: when they are touched first; or now, with what they hold, which takes some 100 us for each 2 MB and does nothing to pages that a
 * card has pinned. Others may use the memory meanwhile. Where there are none to be had it stays as it is. */
void tp_pages_want_large(void *memory, size_t bytes);
void tp_pages_make_large(void *memory, size_t bytes);

#endif

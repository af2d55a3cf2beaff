/* Shared memory that leaves nothing behind: memfd segments, mapped once a process, and futexes on them. */
#ifndef TP_BASE_SHM_H
#define TP_BASE_SHM_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "nccl.h"

/* A new segment of zeros, sparse: pages cost memory when touched. */
ncclResult_t tp_shm_create(const char *name, size_t bytes, int *fd);
/* Maps the segment behind fd; a process that maps it again (ranks as threads) gets the same address and a reference. */
ncclResult_t tp_shm_map(int fd, size_t bytes, void **base);
void tp_shm_unmap(void *base);
/* Sleeps while *word == seen, for timeout_us at most (0: no limit). true: woken or changed; false: time is over. */
bool tp_futex_wait(_Atomic uint32_t *word, uint32_t seen, uint64_t timeout_us);
void tp_futex_wake(_Atomic uint32_t *word, int waiters);
/* Sleeps until one of the words changes (FUTEX_WAITV; where the kernel lacks it, a bounded sleep of at most 1 ms). */
bool tp_futex_wait_any(_Atomic uint32_t *const *words, const uint32_t *seen, int count, uint64_t timeout_us);

#endif

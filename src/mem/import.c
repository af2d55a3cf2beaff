/* What was mapped of others' memory: once a process and context, however many communicators and registrations use it. */
#include <stdlib.h>
#include <string.h>

#include "mem/internal.h"

struct tp_mem_import {
	struct tp_mem_import *next;
	const struct tp_gpu *gpu;
	uint64_t process, buffer_id, owner_base;
	struct tp_gpu_memory memory;        /* ptr NULL: of this process, at its owner's address (plain memory, or of the same context) */
	uint64_t base;
	int users;
};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct tp_mem_import *all;

/* An allocation that is mapped in several pieces has a base for each. */
static struct tp_mem_import *find(const struct tp_gpu *gpu, const struct tp_mem_record *r)
{
	struct tp_mem_import *i = all;
	while (i && (i->gpu != gpu || i->process != r->process || i->buffer_id != r->buffer_id || i->owner_base != r->base)) i = i->next;
	return i;
}

static ncclResult_t map(struct tp_mem_import *i, bool own, const struct tp_mem_record *r, int fd)
{
	if (own) {
		struct tp_gpu_memory theirs = { .gpu = (const struct tp_gpu *)(uintptr_t)r->gpu, .kind = (enum tp_gpu_memory_kind)r->export.kind,
			.ptr = (void *)(uintptr_t)r->base, .bytes = r->export.bytes, .mapped = r->export.mapped };
		if (theirs.gpu != i->gpu) TP_TRY(tp_gpu_map_again(i->gpu, &theirs, &i->memory));
	} else {
		TP_TRY(tp_gpu_import(i->gpu, &r->export, fd, &i->memory));
	}
	i->base = i->memory.ptr ? (uintptr_t)i->memory.ptr : r->base;
	return ncclSuccess;
}

static ncclResult_t add(const struct tp_gpu *gpu, bool own, const struct tp_mem_record *r, int fd, struct tp_mem_import **out)
{
	struct tp_mem_import *i = tp_alloc(1, sizeof(*i), "a mapping of a peer's memory");
	if (!i) return ncclSystemError;
	*i = (struct tp_mem_import){ .gpu = gpu, .process = r->process, .buffer_id = r->buffer_id, .owner_base = r->base };
	ncclResult_t result = map(i, own, r, fd);
	if (result != ncclSuccess) {
		free(i);
		return result;
	}
	i->next = all;
	all = i;
	*out = i;
	return ncclSuccess;
}

ncclResult_t tp_mem_import_take(const struct tp_gpu *gpu, uint64_t own_process, const struct tp_mem_record *record, int fd, uint64_t *address,
	struct tp_mem_import **out)
{
	if (record->offset > record->export.bytes || record->bytes > record->export.bytes - record->offset)
		return TP_FAIL(ncclInvalidArgument, "process %d sent a record of %llu bytes at %llu of GPU memory that has %llu", (int)record->export.pid,
			(unsigned long long)record->bytes, (unsigned long long)record->offset, (unsigned long long)record->export.bytes);
	pthread_mutex_lock(&lock);
	struct tp_mem_import *i = find(gpu, record);
	ncclResult_t result = i ? ncclSuccess : add(gpu, record->process == own_process, record, fd, &i);
	if (result == ncclSuccess) {
		i->users++;
		*address = i->base + record->offset;
		*out = i;
	}
	pthread_mutex_unlock(&lock);
	return result;
}

void tp_mem_import_drop(struct tp_mem_import *import)
{
	if (!import) return;
	pthread_mutex_lock(&lock);
	bool last = --import->users == 0;
	if (last) {
		struct tp_mem_import **at = &all;
		while (*at != import) at = &(*at)->next;
		*at = import->next;
	}
	pthread_mutex_unlock(&lock);
	if (!last) return;
	tp_gpu_free(&import->memory);
	free(import);
}

int tp_mem_imports(void)
{
	int count = 0;
	pthread_mutex_lock(&lock);
	for (struct tp_mem_import *i = all; i; i = i->next) count++;
	pthread_mutex_unlock(&lock);
	return count;
}

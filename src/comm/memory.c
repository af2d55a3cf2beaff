/* ncclMemAlloc. GPU ranks: see gpu_memory.c. Host ranks: whole pages, large ones where there are any, remembered, so that only what came from here is
 * freed here. Registered buffers are remembered for the same reason. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <errno.h>

#include "base/pages.h"
#include "comm/gpu.h"

/* Of a registration: for the network, and (GPU ranks) for the host's other ranks. */
struct block { struct block *next; void *address; size_t bytes; const void *comm; struct tp_net_buffer *net; void *mem; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct block *allocated, *registered;
TP_FORK_HOLD(TP_FORK_COMM, lock)

static ncclResult_t add(struct block **list, void *address, size_t bytes, const void *comm)
{
	struct block *b = tp_alloc(1, sizeof(*b), "a record of memory");
	if (!b) return ncclSystemError;
	pthread_mutex_lock(&lock);
	*b = (struct block){ .next = *list, .address = address, .bytes = bytes, .comm = comm };
	*list = b;
	pthread_mutex_unlock(&lock);
	return ncclSuccess;
}

/* Takes the one at address (and of comm, where that matters) out of the list; NULL: there is none. */
static struct block *take(struct block **list, const void *address, const void *comm)
{
	pthread_mutex_lock(&lock);
	struct block **at = list;
	while (*at && ((*at)->address != address || (*at)->comm != comm)) at = &(*at)->next;
	struct block *b = *at;
	if (b) *at = b->next;
	pthread_mutex_unlock(&lock);
	return b;
}

ncclResult_t tp_memory_alloc(void **out, size_t bytes)
{
	if (!out) return TP_FAIL(ncclInvalidArgument, "ncclMemAlloc: ptr is NULL");
	enum tp_device_kind kind;
	TP_TRY(tp_device_kind(&kind));
	if (!bytes) {
		*out = NULL;
		return ncclSuccess;
	}
	if (kind == TP_DEVICE_CUDA) return tp_gpu_memory_alloc(bytes, out);
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	if (bytes > (size_t)PTRDIFF_MAX - page) return TP_FAIL(ncclInvalidArgument, "ncclMemAlloc: %zu bytes are more than memory can hold", bytes);
	size_t whole = tp_align_up(bytes, page);
	void *memory = tp_pages_map(whole);
	if (!memory) return TP_FAIL(ncclSystemError, "ncclMemAlloc: %zu bytes can't be had: %s", bytes, strerror(errno));
	ncclResult_t result = add(&allocated, memory, whole, NULL);
	if (result != ncclSuccess) {
		tp_pages_unmap(memory, whole);
		return result;
	}
	tp_pages_want_large(memory, whole);
	*out = memory;
	return ncclSuccess;
}

ncclResult_t tp_memory_free(void *memory)
{
	if (!memory) return ncclSuccess;
	enum tp_device_kind kind;
	TP_TRY(tp_device_kind(&kind));
	if (kind == TP_DEVICE_CUDA) return tp_gpu_memory_free(memory);
	struct block *b = take(&allocated, memory, NULL);
	if (!b) return TP_FAIL(ncclInvalidArgument, "ncclMemFree: %p did not come from ncclMemAlloc, or was freed before", memory);
	tp_pages_unmap(b->address, b->bytes);
	free(b);
	return ncclSuccess;
}

/* Network links of host ranks belong to who has the run lock. */
static ncclResult_t register_net(struct ncclComm *comm, void *buffer, size_t bytes, struct tp_net_buffer **out)
{
	if (!tp_mem_registers() || !tp_links_have_net(comm->links)) return ncclSuccess;
	if (!comm->gpu) tp_comm_lock_run(comm);
	ncclResult_t result = tp_links_register(comm->links, buffer, bytes, out);
	if (!comm->gpu) tp_engine_unlock(&comm->runnable);
	return result;
}

static void deregister_net(struct ncclComm *comm, struct tp_net_buffer *net)
{
	if (!net) return;
	if (!comm->gpu) tp_comm_lock_run(comm);
	tp_links_deregister(comm->links, net);
	if (!comm->gpu) tp_engine_unlock(&comm->runnable);
	else tp_gpu_watch_settle(comm);
}

static ncclResult_t register_block(struct ncclComm *comm, void *buffer, size_t bytes, struct block *b)
{
	*b = (struct block){ .address = b, .bytes = bytes, .comm = comm };
	if (comm->gpu) TP_TRY(tp_gpu_memory_register(comm, buffer, bytes, &b->mem));
	ncclResult_t result = register_net(comm, buffer, bytes, &b->net);
	if (result != ncclSuccess && b->mem) tp_gpu_memory_deregister(comm, b->mem);
	return result;
}

ncclResult_t tp_memory_register(ncclComm_t comm, void *buffer, size_t bytes, void **handle)
{
	if (!buffer || !handle) return TP_FAIL(ncclInvalidArgument, "ncclCommRegister: %s is NULL", buffer ? "handle" : "buff");
	if (!bytes) return TP_FAIL(ncclInvalidArgument, "ncclCommRegister: size is 0");
	if (bytes > UINTPTR_MAX - (uintptr_t)buffer) return TP_FAIL(ncclInvalidArgument, "ncclCommRegister: %zu bytes at %p are more than memory can hold", bytes, buffer);
	TP_TRY(tp_comm_enter(comm, "ncclCommRegister"));
	ncclResult_t result = tp_comm_may_call(comm, "ncclCommRegister");
	struct block *b = NULL;
	if (result == ncclSuccess && !(b = tp_alloc(1, sizeof(*b), "a registration"))) result = ncclSystemError;
	if (b) result = register_block(comm, buffer, bytes, b);
	if (b && result != ncclSuccess) {
		free(b);
	} else if (b) {
		pthread_mutex_lock(&lock);
		b->next = registered;
		registered = b;
		pthread_mutex_unlock(&lock);
		*handle = b;
	}
	tp_comm_leave(comm);
	return result;
}

ncclResult_t tp_memory_deregister(ncclComm_t comm, void *handle)
{
	if (!handle) return ncclSuccess;
	TP_TRY(tp_comm_enter(comm, "ncclCommDeregister"));
	struct block *b = take(&registered, handle, comm);
	ncclResult_t result = b ? ncclSuccess
		: TP_FAIL(ncclInvalidArgument, "ncclCommDeregister: %p is not a registration of communicator %p", handle, (void *)comm);
	if (b) deregister_net(comm, b->net);
	if (b && b->mem) result = tp_gpu_memory_deregister(comm, b->mem);
	free(b);
	tp_comm_leave(comm);
	return result;
}

/* What the user left registered ends with the communicator. */
void tp_memory_forget_comm(const struct ncclComm *comm)
{
	pthread_mutex_lock(&lock);
	for (struct block **at = &registered; *at;) {
		struct block *b = *at;
		if (b->comm != comm) {
			at = &b->next;
			continue;
		}
		*at = b->next;
		free(b);
	}
	pthread_mutex_unlock(&lock);
}

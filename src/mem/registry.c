/* A communicator's registrations. Of each range that can be shared, peers are told under an index; once all of them have answered that
 * they have it mapped, tp_mem_find finds it. Kernels read a peer's table entry only for an index that was offered to them, so
 * entries may change while kernels run. An index is used again when all have answered that they let it go. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "mem/internal.h"

#define LET_GO_MS 200

static struct tp_param params[] = {
	{ .name = "NCCL_LOCAL_REGISTER", .kind = TP_PARAM_BOOL, .fallback = "1", .max = 1,
		.doc = "0: ncclCommRegister has no effect, and buffers that it was called for are used like all others" },
};
TP_PARAM_TABLE("mem", params)

/* The words of the table, then those of the windows. */
static size_t table_words(const struct tp_boot *boot) { return (size_t)boot->nlocal * TP_MEM_BUFFERS; }
static size_t all_words(const struct tp_boot *boot) { return table_words(boot) + (size_t)boot->nlocal * TP_MEM_WINDOWS; }

ncclResult_t tp_mem_write_words(struct tp_mem *mem, size_t first, const uint64_t *words, size_t count)
{
	for (size_t i = 0; i < count; i++) __atomic_store_n(&mem->table[first + i], words[i], __ATOMIC_RELEASE);    /* pairs with tp_mem_lookup */
	return tp_gpu_copy(mem->gpu, (uint64_t *)mem->memory.ptr + first, words, count * sizeof(*words));
}

static void judge_use(struct tp_mem *mem, const bool *reaches)
{
	mem->useful = mem->boot->nlocal > 1 && mem->boot->nlocal <= TP_MEM_LOCAL_MAX;
	for (int l = 0; l < mem->boot->nlocal && mem->useful; l++) {
		if (l == mem->boot->local) continue;
		mem->useful = reaches[l];
		mem->everybody |= 1ull << l;
	}
}

/* The use of registrations is agreed inside a host: who isn't listened to needs no table either. */
static ncclResult_t agree_use(struct tp_mem *mem)
{
	struct tp_boot *boot = mem->boot;
	struct word { uint64_t name; uint32_t useful, pad; } *all = tp_alloc((size_t)boot->nranks, sizeof(*all), "registered memory");
	if (!all) return ncclSystemError;
	all[boot->rank] = (struct word){ mem->names[boot->local], mem->useful, 0 };
	ncclResult_t result = tp_boot_all_gather(boot, all, sizeof(*all));
	pthread_mutex_lock(&mem->say_lock);
	for (int l = 0; l < boot->nlocal && result == ncclSuccess; l++) {
		const struct word *theirs = &all[boot->local_ranks[l]];
		mem->useful &= theirs->useful != 0;
		if (l < TP_MEM_LOCAL_MAX && l != boot->local) mem->names[l] = theirs->name;
	}
	pthread_mutex_unlock(&mem->say_lock);
	free(all);
	/* Nobody announces anything to a rank that doesn't know yet whom to answer. */
	return result == ncclSuccess ? tp_boot_barrier(boot) : result;
}

static void init_lock(struct tp_mem *mem)
{
	pthread_condattr_t attr;
	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&mem->answered, &attr);
	pthread_condattr_destroy(&attr);
	pthread_mutex_init(&mem->lock, NULL);
	pthread_mutex_init(&mem->say_lock, NULL);
}

ncclResult_t tp_mem_create(struct tp_boot *boot, const struct tp_mem_options *options, struct tp_mem **out)
{
	struct tp_mem *mem = tp_alloc(1, sizeof(*mem), "registered memory");
	if (!mem) return ncclSystemError;
	mem->boot = boot;
	mem->gpu = options->gpu;
	mem->process = boot->peers[boot->rank].process_hash;
	mem->listener = mem->timer = -1;
	init_lock(mem);
	judge_use(mem, options->reaches);
	ncclResult_t result = ncclSystemError;
	mem->table = tp_alloc(all_words(boot), sizeof(*mem->table), "tables of registered memory");
	mem->remotes = tp_alloc((size_t)boot->nlocal, sizeof(*mem->remotes), "peers' registered memory");
	if (mem->table && mem->remotes)
		result = tp_gpu_alloc(mem->gpu, all_words(boot) * sizeof(uint64_t), false, "tables of registered memory", &mem->memory);
	if (result == ncclSuccess && mem->useful) result = tp_mem_announce_open(mem);
	if (result == ncclSuccess) result = agree_use(mem);
	if (result != ncclSuccess) {
		tp_mem_destroy(mem);
		return result;
	}
	*out = mem;
	return ncclSuccess;
}

void tp_mem_destroy(struct tp_mem *mem)
{
	if (!mem) return;
	tp_mem_announce_close(mem);
	tp_mem_windows_close(mem);
	for (int l = 0; mem->remotes && l < mem->boot->nlocal; l++)
		for (int i = 0; i < TP_MEM_BUFFERS; i++) tp_mem_import_drop(mem->remotes[l][i].import);
	while (mem->ranges) {
		struct tp_mem_range *range = mem->ranges;
		mem->ranges = range->next;
		free(range);
	}
	tp_gpu_free(&mem->memory);
	free(mem->sorted);
	free(mem->remotes);
	free(mem->table);
	pthread_cond_destroy(&mem->answered);
	pthread_mutex_destroy(&mem->lock);
	pthread_mutex_destroy(&mem->say_lock);
	free(mem);
}

bool tp_mem_is_useful(const struct tp_mem *mem) { return mem->useful; }

const uint64_t *tp_mem_table(const struct tp_mem *mem) { return mem->memory.ptr; }

uint64_t tp_mem_lookup(const struct tp_mem *mem, int local, uint32_t index)
{
	return index < TP_MEM_BUFFERS ? __atomic_load_n(&mem->table[(size_t)local * TP_MEM_BUFFERS + index], __ATOMIC_ACQUIRE) : 0;
}

/* ---- ranges in order; the lock is held */

static void renew_highest(struct tp_mem *mem, int from)
{
	for (int i = from; i < mem->nranges; i++)
		mem->sorted[i]->highest = i && mem->sorted[i - 1]->highest > mem->sorted[i]->end ? mem->sorted[i - 1]->highest : mem->sorted[i]->end;
}

/* How many begin at or before address. */
static int count_until(const struct tp_mem *mem, uintptr_t address)
{
	int low = 0, high = mem->nranges;
	while (low < high) {
		int middle = (low + high) / 2;
		if (mem->sorted[middle]->begin <= address) low = middle + 1;
		else high = middle;
	}
	return low;
}

static ncclResult_t sort_in(struct tp_mem *mem, struct tp_mem_range *range)
{
	int n = mem->nranges, at = count_until(mem, range->begin);
	if ((n & (n - 1)) == 0) {
		struct tp_mem_range **more = realloc(mem->sorted, (size_t)(n ? 2 * n : 1) * sizeof(*more));
		if (!more) return TP_FAIL(ncclSystemError, "no memory for %d registrations", 2 * n);
		mem->sorted = more;
	}
	memmove(mem->sorted + at + 1, mem->sorted + at, (size_t)(n - at) * sizeof(*mem->sorted));
	mem->sorted[at] = range;
	mem->nranges = n + 1;
	renew_highest(mem, at);
	return ncclSuccess;
}

static void sort_out(struct tp_mem *mem, const struct tp_mem_range *range)
{
	for (int i = 0; i < mem->nranges; i++) {
		if (mem->sorted[i] != range) continue;
		memmove(mem->sorted + i, mem->sorted + i + 1, (size_t)(mem->nranges - i - 1) * sizeof(*mem->sorted));
		mem->nranges--;
		renew_highest(mem, i);
		return;
	}
}

/* ---- registering */

/* An index that nobody uses, or TP_MEM_BUFFERS. */
static uint32_t free_index(struct tp_mem *mem)
{
	for (uint32_t tries = 0; tries < TP_MEM_BUFFERS; tries++) {
		uint32_t index = mem->next_index++ % TP_MEM_BUFFERS;
		if (!mem->by_index[index]) return index;
	}
	return TP_MEM_BUFFERS;
}

/* Its own kernels see the range where the program does, while all peers have it mapped: so they know whether it can be offered. */
static ncclResult_t write_own(struct tp_mem *mem, uint32_t index, uint64_t address)
{
	return tp_mem_write_words(mem, (size_t)mem->boot->local * TP_MEM_BUFFERS + index, &address, 1);
}

static ncclResult_t take_index(struct tp_mem *mem, struct tp_mem_range *range)
{
	range->index = free_index(mem);
	if (range->index == TP_MEM_BUFFERS) {
		TP_INFO(TP_REG, "rank %d has %d registrations that peers know; %p is used without", mem->boot->rank, TP_MEM_BUFFERS, (void *)range->begin);
		return ncclSuccess;
	}
	mem->by_index[range->index] = range;
	range->generation = ++mem->generations[range->index];
	return ncclSuccess;
}

static ncclResult_t register_range(struct tp_mem *mem, struct tp_mem_range *range, int fd)
{
	pthread_mutex_lock(&mem->lock);
	range->next = mem->ranges;
	mem->ranges = range;
	ncclResult_t result = range->record.bytes ? sort_in(mem, range) : ncclSuccess;
	if (result == ncclSuccess && range->record.bytes) result = take_index(mem, range);
	bool tell = result == ncclSuccess && range->index < TP_MEM_BUFFERS;
	if (result != ncclSuccess) {
		mem->ranges = range->next;
		sort_out(mem, range);
		if (range->index < TP_MEM_BUFFERS) mem->by_index[range->index] = NULL;
	}
	pthread_mutex_unlock(&mem->lock);
	if (tell) tp_mem_announce(mem, TP_MEM_ANNOUNCE, range, fd);
	return result;
}

bool tp_mem_registers(void) { return tp_param_int(&params[0]) != 0; }

ncclResult_t tp_mem_register(struct tp_mem *mem, void *ptr, size_t bytes, void **handle)
{
	char why[128] = "no peer on this host reaches it";
	bool wanted = tp_mem_registers();
	int fd = -1;
	struct tp_mem_range *range = tp_alloc(1, sizeof(*range), "a registration");
	if (!range) return ncclSystemError;
	*range = (struct tp_mem_range){ .begin = (uintptr_t)ptr, .end = (uintptr_t)ptr + bytes, .index = TP_MEM_BUFFERS };
	if (!wanted) snprintf(why, sizeof(why), "NCCL_LOCAL_REGISTER=0");
	bool shared = wanted && mem->useful && bytes && tp_mem_describe(mem->gpu, mem->process, ptr, bytes, &range->record, &fd, why, sizeof(why));
	if (!shared) memset(&range->record, 0, sizeof(range->record));
	range->buffer_id = range->record.buffer_id;
	range->plain = range->record.export.kind == TP_GPU_PLAIN;
	ncclResult_t result = register_range(mem, range, fd);
	if (fd >= 0) close(fd);
	if (result != ncclSuccess) {
		free(range);
		return result;
	}
	TP_INFO(TP_REG, "rank %d registered %zu bytes at %p%s%s", mem->boot->rank, bytes, ptr, shared ? "" : ", without effect on this host: ", shared ? "" : why);
	*handle = range;
	return ncclSuccess;
}

bool tp_mem_has_effect(const void *handle) { return ((const struct tp_mem_range *)handle)->index < TP_MEM_BUFFERS; }

/* The lock is held. */
static void forget(struct tp_mem *mem, struct tp_mem_range *range)
{
	struct tp_mem_range **at = &mem->ranges;
	while (*at != range) at = &(*at)->next;
	*at = range->next;
	if (range->index < TP_MEM_BUFFERS) mem->by_index[range->index] = NULL;
	free(range);
}

/* CUDA wants an exported allocation to be freed only when importers have closed it, and the program may free it next. */
static void wait_let_go(struct tp_mem *mem, uint32_t index, const struct tp_mem_range *range, uint32_t generation)
{
	struct timespec until;
	clock_gettime(CLOCK_MONOTONIC, &until);
	until.tv_nsec += (long)LET_GO_MS * 1000000;
	until.tv_sec += until.tv_nsec / 1000000000;
	until.tv_nsec %= 1000000000;
	while (mem->by_index[index] == range && mem->generations[index] == generation)
		if (pthread_cond_timedwait(&mem->answered, &mem->lock, &until)) break;
}

ncclResult_t tp_mem_deregister(struct tp_mem *mem, void *handle)
{
	struct tp_mem_range *range, told;
	pthread_mutex_lock(&mem->lock);
	for (range = mem->ranges; range && (range != handle || range->retiring); range = range->next) { }
	if (!range) {
		pthread_mutex_unlock(&mem->lock);
		return TP_FAIL(ncclInvalidArgument, "ncclCommDeregister: %p is not a registration of this communicator (rank %d)", handle, mem->boot->rank);
	}
	if (range->record.bytes) sort_out(mem, range);
	if (range->index == TP_MEM_BUFFERS) {
		forget(mem, range);
		pthread_mutex_unlock(&mem->lock);
		return ncclSuccess;
	}
	range->retiring = true;
	range->acks = 0;
	told = *range;
	ncclResult_t result = write_own(mem, range->index, 0);
	pthread_mutex_unlock(&mem->lock);
	tp_mem_announce(mem, TP_MEM_RETIRE, &told, -1);
	if (!told.plain) return result;
	pthread_mutex_lock(&mem->lock);
	wait_let_go(mem, told.index, range, told.generation);
	pthread_mutex_unlock(&mem->lock);
	return result;
}

/* ---- finding */

/* The lock is held. Ranges may lie in one another, so those that begin before are looked at while any of them reaches so far. */
static struct tp_mem_range *find_range(const struct tp_mem *mem, uintptr_t begin, uintptr_t end)
{
	for (int i = count_until(mem, begin) - 1; i >= 0 && mem->sorted[i]->highest >= end; i--)
		if (mem->sorted[i]->end >= end && mem->sorted[i]->index < TP_MEM_BUFFERS && mem->sorted[i]->acks == mem->everybody) return mem->sorted[i];
	return NULL;
}

bool tp_mem_find(struct tp_mem *mem, const void *ptr, size_t bytes, struct tp_mem_place *out)
{
	uint64_t id = 0, now = 0;
	bool found = false;
	if (!atomic_load_explicit(&mem->nranges, memory_order_relaxed)) return false;
	pthread_mutex_lock(&mem->lock);
	const struct tp_mem_range *range = find_range(mem, (uintptr_t)ptr, (uintptr_t)ptr + bytes);
	if (range) {
		*out = (struct tp_mem_place){ range->index, (uintptr_t)ptr - range->begin };
		id = range->buffer_id;
		found = true;
	}
	pthread_mutex_unlock(&mem->lock);
	/* It may have been freed, and the address may be somebody else's by now. */
	return found && tp_gpu_buffer_id(ptr, &now) == ncclSuccess && now == id;
}

/* ---- what peers say; on the memory thread */

void tp_mem_peer_announced(struct tp_mem *mem, int from, uint32_t index, uint32_t generation, const struct tp_mem_record *record, int fd)
{
	struct tp_mem_import *import = NULL, *old;
	uint64_t address = 0;
	bool mapped = tp_mem_import_take(mem->gpu, mem->process, record, fd, &address, &import) == ncclSuccess;
	pthread_mutex_lock(&mem->lock);
	struct tp_mem_remote *remote = &mem->remotes[from][index];
	old = remote->import;
	*remote = (struct tp_mem_remote){ import, generation };
	if (tp_mem_write_words(mem, (size_t)from * TP_MEM_BUFFERS + index, &address, 1) != ncclSuccess) mapped = false;
	pthread_mutex_unlock(&mem->lock);
	tp_mem_import_drop(old);
	tp_mem_answer(mem, from, index, generation, false, mapped);
}

void tp_mem_peer_retired(struct tp_mem *mem, int from, uint32_t index, uint32_t generation)
{
	struct tp_mem_import *import = NULL;
	uint64_t nothing = 0;
	pthread_mutex_lock(&mem->lock);
	struct tp_mem_remote *remote = &mem->remotes[from][index];
	if (remote->generation == generation) {
		import = remote->import;
		remote->import = NULL;
		(void)tp_mem_write_words(mem, (size_t)from * TP_MEM_BUFFERS + index, &nothing, 1);
	}
	pthread_mutex_unlock(&mem->lock);
	tp_mem_import_drop(import);
	tp_mem_answer(mem, from, index, generation, true, false);
}

void tp_mem_peer_answered(struct tp_mem *mem, int from, uint32_t index, uint32_t generation, bool retired, bool mapped)
{
	pthread_mutex_lock(&mem->lock);
	struct tp_mem_range *range = mem->by_index[index];
	if (range && range->generation == generation && range->retiring == retired) {
		if (retired || mapped) range->acks |= 1ull << from;
		else TP_INFO(TP_REG, "rank %d can't map a buffer that rank %d registered: it is used without", mem->boot->local_ranks[from], mem->boot->rank);
		if (!retired && range->acks == mem->everybody && write_own(mem, index, range->begin) == ncclSuccess)
			TP_INFO(TP_REG, "rank %d: what it registered at %p is mapped by all ranks of the host", mem->boot->rank, (void *)range->begin);
		if (retired && range->acks == mem->everybody) {
			forget(mem, range);
			pthread_cond_broadcast(&mem->answered);
		}
	}
	pthread_mutex_unlock(&mem->lock);
}

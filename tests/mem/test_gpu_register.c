/* Memory that one rank registers and its peers map in the background; ncclMemAlloc; imports and their counts. */
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include "boot/helper_boot.h"
#include "gpu/fake_driver.h"
#include "mem/internal.h"

#define BYTES ((size_t)1 << 20)

static struct { int gpus; bool reach; } world = { 2, true };

static struct tp_gpu *gpu_of(int rank)
{
	struct tp_gpu *gpu;
	bool has;
	must(tp_gpu_open(&has) == ncclSuccess && has);
	must(tp_gpu_of_ordinal(rank % world.gpus, &gpu) == ncclSuccess);
	return gpu;
}

static void *plain_memory(const struct tp_gpu *gpu)
{
	CUdeviceptr ptr;
	bool pushed;
	must(tp_gpu_enter(gpu, &pushed) == ncclSuccess);
	must(tp_cuda->MemAlloc(&ptr, BYTES) == CUDA_SUCCESS);
	tp_gpu_leave(pushed);
	return (void *)(uintptr_t)ptr;
}

static void free_plain(const struct tp_gpu *gpu, void *ptr)
{
	bool pushed;
	must(tp_gpu_enter(gpu, &pushed) == ncclSuccess);
	must(tp_cuda->MemFree((CUdeviceptr)(uintptr_t)ptr) == CUDA_SUCCESS);
	tp_gpu_leave(pushed);
}

static struct tp_mem *open_mem(struct tp_boot *boot, const struct tp_gpu *gpu)
{
	struct tp_mem *mem;
	bool reaches[TP_MEM_LOCAL_MAX];
	for (int l = 0; l < boot->nlocal; l++) reaches[l] = world.reach;
	struct tp_mem_options options = { gpu, reaches };
	must(tp_mem_create(boot, &options, &mem) == ncclSuccess);
	return mem;
}

static void find_in_time(struct tp_mem *mem, const void *ptr, size_t bytes, struct tp_mem_place *out)
{
	uint64_t until = tp_clock_ms() + 20000;
	while (!tp_mem_find(mem, ptr, bytes, out)) {
		must(tp_clock_ms() < until);
		usleep(500);
	}
}

static uint64_t table_entry(struct tp_mem *mem, int local, uint32_t index)
{
	uint64_t word;
	must(tp_gpu_copy(mem->gpu, &word, tp_mem_table(mem) + (size_t)local * TP_MEM_BUFFERS + index, sizeof(word)) == ncclSuccess);
	return word;
}

/* Each rank leaves a word in its buffer, tells all where it is, and reads the others' through its table. */
static void exchange(struct tp_boot *boot, struct tp_mem *mem, const struct tp_gpu *gpu, char *buffer, size_t offset)
{
	struct tp_mem_place *places = calloc((size_t)boot->nranks, sizeof(*places));
	uint32_t word = 1000 + (uint32_t)boot->rank, seen;
	must(tp_gpu_copy(gpu, buffer + offset, &word, sizeof(word)) == ncclSuccess);
	find_in_time(mem, buffer + offset, sizeof(word), &places[boot->rank]);
	must(tp_boot_all_gather(boot, places, sizeof(*places)) == ncclSuccess);
	for (int r = 0; r < boot->nranks; r++) {
		uint64_t base = table_entry(mem, boot->peers[r].local, places[r].index);
		must(base && base == tp_mem_lookup(mem, boot->peers[r].local, places[r].index));
		must(tp_gpu_copy(gpu, &seen, (void *)(uintptr_t)(base + places[r].offset), sizeof(seen)) == ncclSuccess && seen == 1000 + (uint32_t)r);
	}
	must(tp_boot_barrier(boot) == ncclSuccess);
	free(places);
}

static void wait_no_imports(void)
{
	uint64_t until = tp_clock_ms() + 20000;
	while (tp_mem_imports() > 0) {
		must(tp_clock_ms() < until);
		usleep(500);
	}
}

static void share_one(struct tp_boot *boot, void *(*get)(const struct tp_gpu *gpu), void (*put)(const struct tp_gpu *gpu, void *ptr))
{
	struct tp_gpu *gpu = gpu_of(boot->rank);
	struct tp_mem *mem = open_mem(boot, gpu);
	struct tp_mem_place place;
	void *handle;
	char *buffer = get(gpu);
	must(!tp_mem_find(mem, buffer, 4, &place));
	must(tp_mem_register(mem, buffer + 4096, BYTES - 8192, &handle) == ncclSuccess);
	exchange(boot, mem, gpu, buffer, 5000);
	must(!tp_mem_find(mem, buffer, 4, &place) && !tp_mem_find(mem, buffer + BYTES - 8192, 8192, &place));
	must(tp_mem_find(mem, buffer + 4096, BYTES - 8192, &place) && place.offset == 0);
	must(tp_mem_deregister(mem, handle) == ncclSuccess);
	must(!tp_mem_find(mem, buffer + 5000, 4, &place) && table_entry(mem, boot->local, place.index) == 0);
	must(tp_mem_deregister(mem, handle) == ncclInvalidArgument);
	must(tp_boot_barrier(boot) == ncclSuccess);
	put(gpu, buffer);
	wait_no_imports();
	must(tp_boot_barrier(boot) == ncclSuccess);
	tp_mem_destroy(mem);
}

static void *get_shareable(const struct tp_gpu *gpu)
{
	void *ptr;
	must(tp_mem_alloc(gpu, BYTES, &ptr) == ncclSuccess);
	return ptr;
}
static void put_shareable(const struct tp_gpu *gpu, void *ptr)
{
	(void)gpu;
	must(tp_mem_free(ptr) == ncclSuccess);
}

static void shareable(struct tp_boot *boot, void *arg)
{
	(void)arg;
	share_one(boot, get_shareable, put_shareable);
}
static void plain(struct tp_boot *boot, void *arg)
{
	(void)arg;
	share_one(boot, plain_memory, free_plain);
}

/* ---- what may go wrong */

static void freed_and_used_again(struct tp_boot *boot, void *arg)
{
	struct tp_gpu *gpu = gpu_of(boot->rank);
	struct tp_mem *mem = open_mem(boot, gpu);
	struct tp_mem_place place;
	void *handle, *again;
	char *buffer = plain_memory(gpu), *next;
	(void)arg;
	must(tp_mem_register(mem, buffer, BYTES, &handle) == ncclSuccess);
	exchange(boot, mem, gpu, buffer, 0);
	free_plain(gpu, buffer);
	must(!tp_mem_find(mem, buffer, 4, &place));
	next = plain_memory(gpu);
	must(next == buffer);
	/* Whoever hears of a peer's new buffer maps it, and could map it right where this one was. */
	must(tp_boot_barrier(boot) == ncclSuccess);
	must(!tp_mem_find(mem, next, 4, &place));
	/* The program registers the new one, and gives up the old one later. */
	must(tp_mem_register(mem, next, BYTES, &again) == ncclSuccess);
	must(tp_mem_deregister(mem, handle) == ncclSuccess);
	exchange(boot, mem, gpu, next, 64);
	must(tp_mem_deregister(mem, again) == ncclSuccess);
	must(tp_boot_barrier(boot) == ncclSuccess);
	free_plain(gpu, next);
	tp_mem_destroy(mem);
}

static void other_memory(struct tp_boot *boot, void *arg)
{
	struct tp_gpu *gpu = gpu_of(boot->rank);
	struct tp_mem *mem = open_mem(boot, gpu);
	struct tp_mem_place place;
	void *handles[3];
	char here[64], *device = get_shareable(gpu);
	(void)arg;
	must(tp_mem_register(mem, here, sizeof(here), &handles[0]) == ncclSuccess);
	must(tp_mem_register(mem, device, BYTES * 64, &handles[1]) == ncclSuccess);     /* more than there is */
	must(tp_mem_register(mem, device, 0, &handles[2]) == ncclSuccess);
	usleep(20000);
	must(!tp_mem_find(mem, here, 4, &place) && !tp_mem_find(mem, device, 4, &place));
	for (int i = 0; i < 3; i++) must(tp_mem_deregister(mem, handles[i]) == ncclSuccess);
	must(tp_mem_deregister(mem, here) == ncclInvalidArgument && strstr(tp_log_last_error(), "not a registration"));
	put_shareable(gpu, device);
	tp_mem_destroy(mem);
}

static void overlapping(struct tp_boot *boot, void *arg)
{
	struct tp_gpu *gpu = gpu_of(boot->rank);
	struct tp_mem *mem = open_mem(boot, gpu);
	struct tp_mem_place place;
	void *handles[4];
	char *buffer = get_shareable(gpu);
	(void)arg;
	must(tp_mem_register(mem, buffer, BYTES, &handles[0]) == ncclSuccess);
	must(tp_mem_register(mem, buffer + 100, 100, &handles[1]) == ncclSuccess);
	must(tp_mem_register(mem, buffer + 300, 100, &handles[2]) == ncclSuccess);
	must(tp_mem_register(mem, buffer, BYTES, &handles[3]) == ncclSuccess);
	find_in_time(mem, buffer + 350, 1000, &place);
	must(place.offset == 350);
	must(tp_mem_deregister(mem, handles[0]) == ncclSuccess);
	find_in_time(mem, buffer + 150, 200, &place);
	must(tp_mem_deregister(mem, handles[3]) == ncclSuccess);
	must(!tp_mem_find(mem, buffer + 150, 200, &place));
	find_in_time(mem, buffer + 310, 50, &place);
	must(place.offset == 10);
	must(tp_mem_deregister(mem, handles[2]) == ncclSuccess);
	must(tp_mem_deregister(mem, handles[1]) == ncclSuccess);
	must(tp_boot_barrier(boot) == ncclSuccess);
	put_shareable(gpu, buffer);
	tp_mem_destroy(mem);
}

static bool is_used(struct tp_mem *mem, int index)
{
	pthread_mutex_lock(&mem->lock);
	bool used = mem->by_index[index] != NULL;
	pthread_mutex_unlock(&mem->lock);
	return used;
}

/* More than there are indices, again and again: none is lost. */
static void many(struct tp_boot *boot, void *arg)
{
	enum { COUNT = TP_MEM_BUFFERS + 10 };
	struct tp_gpu *gpu = gpu_of(boot->rank);
	struct tp_mem *mem = open_mem(boot, gpu);
	static void *handles[8][COUNT];
	struct tp_mem_place place;
	char *buffer = get_shareable(gpu);
	(void)arg;
	for (int round = 0; round < 2; round++) {
		for (int i = 0; i < COUNT; i++) must(tp_mem_register(mem, buffer + i, 1, &handles[boot->rank][i]) == ncclSuccess);
		find_in_time(mem, buffer + 3, 1, &place);
		for (int i = 0; i < COUNT; i++) must(tp_mem_deregister(mem, handles[boot->rank][i]) == ncclSuccess);
		uint64_t until = tp_clock_ms() + 20000;
		for (int i = 0; i < TP_MEM_BUFFERS; i++)
			while (is_used(mem, i)) {
				must(tp_clock_ms() < until);
				usleep(500);
			}
	}
	must(tp_boot_barrier(boot) == ncclSuccess);
	put_shareable(gpu, buffer);
	tp_mem_destroy(mem);
}

/* A peer that has left answers no more: nothing is found, nothing waits. */
static void without_a_peer(struct tp_boot *boot, void *arg)
{
	struct tp_gpu *gpu = gpu_of(boot->rank);
	struct tp_mem *mem = open_mem(boot, gpu);
	struct tp_mem_place place;
	void *handle;
	(void)arg;
	must(tp_boot_barrier(boot) == ncclSuccess);
	if (boot->rank == 1) tp_mem_destroy(mem);
	must(tp_boot_barrier(boot) == ncclSuccess);
	if (boot->rank == 1) return;
	char *buffer = plain_memory(gpu);
	must(tp_mem_register(mem, buffer, BYTES, &handle) == ncclSuccess);
	usleep(20000);
	must(!tp_mem_find(mem, buffer, 4, &place));
	must(tp_mem_deregister(mem, handle) == ncclSuccess);
	free_plain(gpu, buffer);
	tp_mem_destroy(mem);
}

static void out_of_reach(struct tp_boot *boot, void *arg)
{
	struct tp_gpu *gpu = gpu_of(boot->rank);
	struct tp_mem_place place;
	void *handle;
	(void)arg;
	world.reach = boot->rank != 0;          /* one side is enough */
	struct tp_mem *mem = open_mem(boot, gpu);
	char *buffer = get_shareable(gpu);
	must(tp_mem_register(mem, buffer, BYTES, &handle) == ncclSuccess);
	usleep(20000);
	must(!tp_mem_find(mem, buffer, 4, &place));
	must(tp_mem_deregister(mem, handle) == ncclSuccess);
	put_shareable(gpu, buffer);
	tp_mem_destroy(mem);
}

/* Somebody who doesn't know the secret, and somebody who says nothing. */
static void strangers(struct tp_boot *boot, void *arg)
{
	struct tp_gpu *gpu = gpu_of(boot->rank);
	struct tp_mem *mem = open_mem(boot, gpu);
	char name[80], rubbish[1024];
	int silent, liar;
	(void)arg;
	tp_mem_socket_name(boot, boot->rank, mem->names[boot->local], name);
	must(tp_unix_connect(name, 1000, &silent) == ncclSuccess && tp_unix_connect(name, 1000, &liar) == ncclSuccess);
	memset(rubbish, 1, sizeof(rubbish));
	must(write(liar, rubbish, sizeof(rubbish)) == (ssize_t)sizeof(rubbish));
	must(tp_boot_barrier(boot) == ncclSuccess);
	char *buffer = get_shareable(gpu);
	void *handle;
	must(tp_mem_register(mem, buffer, BYTES, &handle) == ncclSuccess);
	exchange(boot, mem, gpu, buffer, 0);
	must(tp_mem_deregister(mem, handle) == ncclSuccess);
	must(tp_boot_barrier(boot) == ncclSuccess);
	put_shareable(gpu, buffer);
	tp_mem_destroy(mem);
	close(liar);
	close(silent);
}

/* ---- ncclMemAlloc */

static void allocations(struct tp_boot *boot, void *arg)
{
	struct tp_gpu *gpu = gpu_of(boot->rank), *other = gpu_of(boot->rank + 1);
	void *ptr, *plain_ptr = plain_memory(gpu);
	uint64_t word = 5, seen = 0;
	int host;
	(void)arg;
	must(tp_mem_alloc(gpu, 0, &ptr) == ncclSuccess && tp_mem_free(ptr) == ncclSuccess);
	must(tp_mem_alloc(gpu, 100, &ptr) == ncclSuccess);
	must(tp_gpu_copy(other, ptr, &word, sizeof(word)) == ncclSuccess && tp_gpu_copy(gpu, &seen, ptr, sizeof(seen)) == ncclSuccess && seen == 5);
	must(tp_mem_free((char *)ptr + 8) == ncclInvalidArgument && strstr(tp_log_last_error(), "not the beginning"));
	must(tp_mem_free(&host) == ncclInvalidArgument);
	must(tp_mem_free(ptr) == ncclSuccess && tp_mem_free(NULL) == ncclSuccess);
	bool pushed;
	must(tp_gpu_enter(gpu, &pushed) == ncclSuccess && tp_mem_free(plain_ptr) == ncclSuccess);
	tp_gpu_leave(pushed);
}

/* ---- running them */

static void (*body)(struct tp_boot *boot, void *arg);

static void process(struct helper_job *job)
{
	struct tp_boot *boot;
	use_fake_driver(world.gpus);
	helper_open(job, &boot);
	body(boot, NULL);
	tp_boot_close(boot);
}

static void in_processes(int nranks, int gpus, void (*what)(struct tp_boot *boot, void *arg))
{
	world.gpus = gpus;
	body = what;
	assert_int_equal(helper_run(nranks, 1, process, NULL), 0);
}

static void in_threads(int nranks, int gpus, void (*what)(struct tp_boot *boot, void *arg))
{
	int status;
	pid_t pid = fork();
	assert_true(pid >= 0);
	world.gpus = gpus;
	if (pid == 0) {
		use_fake_driver(gpus);
		helper_threads(nranks, what, NULL);
		_exit(0);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_int_equal(status, 0);
}

static void peers_map_a_registered_buffer_and_let_it_go(void **state) { (void)state; in_processes(3, 3, shareable); }
static void also_on_one_gpu(void **state) { (void)state; in_processes(2, 1, shareable); }
static void also_plain_memory_by_ipc(void **state) { (void)state; in_processes(3, 3, plain); }
static void also_as_threads(void **state) { (void)state; in_threads(3, 3, shareable); }
static void also_plain_memory_as_threads(void **state) { (void)state; in_threads(2, 2, plain); }
static void memory_that_was_freed_is_not_found_though_its_address_is_used_again(void **state) { (void)state; in_processes(2, 2, freed_and_used_again); }
static void memory_that_cannot_be_shared_registers_without_effect(void **state) { (void)state; in_processes(2, 2, other_memory); }
static void ranges_may_overlap_and_repeat(void **state) { (void)state; in_processes(2, 2, overlapping); }
static void indices_come_back(void **state) { (void)state; in_processes(2, 1, many); }
static void a_peer_that_has_left_holds_nobody_up(void **state) { (void)state; in_processes(3, 1, without_a_peer); }
static void ranks_out_of_reach_register_without_effect(void **state) { (void)state; in_processes(2, 2, out_of_reach); }
static void strangers_are_ignored(void **state) { (void)state; in_processes(2, 1, strangers); }
static void allocations_are_for_all_devices_of_the_process(void **state) { (void)state; in_processes(1, 2, allocations); }

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(peers_map_a_registered_buffer_and_let_it_go),
		cmocka_unit_test(also_on_one_gpu),
		cmocka_unit_test(also_plain_memory_by_ipc),
		cmocka_unit_test(also_as_threads),
		cmocka_unit_test(also_plain_memory_as_threads),
		cmocka_unit_test(memory_that_was_freed_is_not_found_though_its_address_is_used_again),
		cmocka_unit_test(memory_that_cannot_be_shared_registers_without_effect),
		cmocka_unit_test(ranges_may_overlap_and_repeat),
		cmocka_unit_test(indices_come_back),
		cmocka_unit_test(a_peer_that_has_left_holds_nobody_up),
		cmocka_unit_test(ranks_out_of_reach_register_without_effect),
		cmocka_unit_test(strangers_are_ignored),
		cmocka_unit_test(allocations_are_for_all_devices_of_the_process),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Windows: buffers that all ranks register together. */
#include <unistd.h>

#include "boot/helper_boot.h"
#include "gpu/fake_driver.h"
#include "mem/internal.h"

#define BYTES ((size_t)1 << 20)

static struct { int gpus; bool reach; } world;

static struct tp_gpu *gpu_of(int rank)
{
	struct tp_gpu *gpu;
	bool has;
	must(tp_gpu_open(&has) == ncclSuccess && has);
	must(tp_gpu_of_ordinal(rank % world.gpus, &gpu) == ncclSuccess);
	return gpu;
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

/* Every rank writes into every rank's buffer of its host, through the addresses that kernels get. */
static void use_window(struct tp_boot *boot, const struct tp_gpu *gpu, const struct tp_mem_window *w, char *buffer)
{
	uint64_t device[TP_MEM_LOCAL_MAX];
	uint32_t seen;
	must(w->mapped && w->base == buffer && w->bytes == BYTES);
	must(tp_gpu_copy(gpu, device, w->device_peers, (size_t)boot->nlocal * sizeof(*device)) == ncclSuccess);
	must(memcmp(device, w->peers, (size_t)boot->nlocal * sizeof(*device)) == 0);
	for (int l = 0; l < boot->nlocal; l++) {
		uint32_t word = 100 + (uint32_t)boot->local;
		must(w->peers[l] && tp_gpu_copy(gpu, (void *)(uintptr_t)(w->peers[l] + 64 * (uint64_t)boot->local), &word, sizeof(word)) == ncclSuccess);
	}
	must(tp_boot_barrier(boot) == ncclSuccess);
	for (int l = 0; l < boot->nlocal; l++)
		must(tp_gpu_copy(gpu, &seen, buffer + 64 * l, sizeof(seen)) == ncclSuccess && seen == 100 + (uint32_t)l);
	must(tp_boot_barrier(boot) == ncclSuccess);
}

static void mapped(struct tp_boot *boot, void *arg)
{
	struct tp_gpu *gpu = gpu_of(boot->rank);
	struct tp_mem *mem = open_mem(boot, gpu);
	struct tp_mem_window *first, *second;
	uint64_t offset;
	void *a, *b;
	(void)arg;
	must(tp_mem_alloc(gpu, BYTES, &a) == ncclSuccess && tp_mem_alloc(gpu, BYTES, &b) == ncclSuccess);
	must(!tp_mem_window_find(mem, a, 1, &offset));
	must(tp_mem_window_create(mem, a, BYTES, NCCL_WIN_COLL_SYMMETRIC, &first) == ncclSuccess);
	must(tp_mem_window_create(mem, b, BYTES, 0, &second) == ncclSuccess);
	must(first->id == 0 && second->id == 1 && first->flags == NCCL_WIN_COLL_SYMMETRIC);
	use_window(boot, gpu, first, a);
	use_window(boot, gpu, second, b);
	must(tp_mem_window_find(mem, (char *)b + 100, 50, &offset) == second && offset == 100);
	must(tp_mem_window_find(mem, (char *)a, BYTES, &offset) == first && offset == 0);
	must(!tp_mem_window_find(mem, (char *)b + BYTES - 10, 50, &offset));
	must(tp_mem_window_destroy(mem, first) == ncclSuccess && tp_mem_window_destroy(mem, first) == ncclInvalidArgument);
	must(!tp_mem_window_find(mem, a, 1, &offset));
	must(tp_boot_barrier(boot) == ncclSuccess);
	/* The address may be used again while the window is still there. */
	must(tp_mem_free(b) == ncclSuccess && !tp_mem_window_find(mem, b, 1, &offset));
	must(tp_mem_window_create(mem, a, BYTES, 0, &first) == ncclSuccess && first->id == 2);
	use_window(boot, gpu, first, a);
	must(tp_mem_window_destroy(mem, second) == ncclSuccess);
	must(tp_boot_barrier(boot) == ncclSuccess);
	tp_mem_destroy(mem);
	must(tp_mem_free(a) == ncclSuccess);
}

static void plain_windows(struct tp_boot *boot, void *arg)
{
	struct tp_gpu *gpu = gpu_of(boot->rank);
	struct tp_mem *mem = open_mem(boot, gpu);
	struct tp_mem_window *window;
	CUdeviceptr ptr;
	bool pushed;
	(void)arg;
	must(tp_gpu_enter(gpu, &pushed) == ncclSuccess && tp_cuda->MemAlloc(&ptr, 2 * BYTES) == CUDA_SUCCESS);
	char *inner = (char *)(uintptr_t)ptr + 4096 * (size_t)(boot->rank + 1);
	must(tp_mem_window_create(mem, inner, BYTES, 0, &window) == ncclSuccess);
	use_window(boot, gpu, window, inner);
	must(tp_mem_window_destroy(mem, window) == ncclSuccess);
	must(tp_boot_barrier(boot) == ncclSuccess);
	must(tp_cuda->MemFree(ptr) == CUDA_SUCCESS);
	tp_gpu_leave(pushed);
	tp_mem_destroy(mem);
}

static void wrong(struct tp_boot *boot, void *arg)
{
	struct tp_gpu *gpu = gpu_of(boot->rank);
	struct tp_mem *mem = open_mem(boot, gpu);
	struct tp_mem_window *window;
	char host[64];
	void *ptr;
	(void)arg;
	must(tp_mem_alloc(gpu, BYTES, &ptr) == ncclSuccess);
	must(tp_mem_window_create(mem, boot->rank == 1 ? host : ptr, sizeof(host), 0, &window) == ncclInvalidArgument);
	must(strstr(tp_log_last_error(), "rank 1") && strstr(tp_log_last_error(), "host memory"));
	must(tp_mem_window_create(mem, ptr, boot->rank == 1 ? 100 : 200, 0, &window) == ncclInvalidArgument);
	must(strstr(tp_log_last_error(), "must be equal"));
	must(tp_mem_window_create(mem, ptr, BYTES, 0, &window) == ncclSuccess);
	use_window(boot, gpu, window, ptr);
	tp_mem_destroy(mem);
	must(tp_boot_barrier(boot) == ncclSuccess);
	must(tp_mem_free(ptr) == ncclSuccess && tp_mem_imports() == 0);
}

static void unmapped(struct tp_boot *boot, void *arg)
{
	struct tp_gpu *gpu = gpu_of(boot->rank);
	struct tp_mem *mem = open_mem(boot, gpu);
	struct tp_mem_window *window;
	uint64_t offset;
	void *ptr;
	(void)arg;
	must(tp_mem_alloc(gpu, BYTES, &ptr) == ncclSuccess);
	must(tp_mem_window_create(mem, ptr, BYTES, 0, &window) == ncclSuccess && !window->mapped && !window->peers[0]);
	must(!tp_mem_window_find(mem, ptr, 1, &offset));
	must(tp_mem_window_destroy(mem, window) == ncclSuccess);
	tp_mem_destroy(mem);
	must(tp_mem_free(ptr) == ncclSuccess);
}

static void (*body)(struct tp_boot *boot, void *arg);

static void process(struct helper_job *job)
{
	struct tp_boot *boot;
	use_fake_driver(world.gpus);
	helper_open(job, &boot);
	body(boot, NULL);
	tp_boot_close(boot);
}

static void in_processes(int nranks, int nhosts, int gpus, bool reach, void (*what)(struct tp_boot *boot, void *arg))
{
	world.gpus = gpus;
	world.reach = reach;
	body = what;
	assert_int_equal(helper_run(nranks, nhosts, process, NULL), 0);
}

static void in_threads(int nranks, int gpus, void (*what)(struct tp_boot *boot, void *arg))
{
	int status;
	pid_t pid = fork();
	assert_true(pid >= 0);
	world.gpus = gpus;
	world.reach = true;
	if (pid == 0) {
		use_fake_driver(gpus);
		helper_threads(nranks, what, NULL);
		_exit(0);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_int_equal(status, 0);
}

static void ranks_see_each_others_windows(void **state) { (void)state; in_processes(3, 1, 3, true, mapped); }
static void also_as_threads(void **state) { (void)state; in_threads(3, 2, mapped); }
static void also_within_each_of_two_hosts(void **state) { (void)state; in_processes(4, 2, 2, true, mapped); }
static void also_inside_plain_allocations(void **state) { (void)state; in_processes(2, 1, 2, true, plain_windows); }
static void what_cannot_be_is_an_error_on_all_ranks(void **state) { (void)state; in_processes(3, 1, 1, true, wrong); }
static void ranks_out_of_reach_have_windows_that_are_not_mapped(void **state) { (void)state; in_processes(2, 1, 2, false, unmapped); }

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(ranks_see_each_others_windows),
		cmocka_unit_test(also_as_threads),
		cmocka_unit_test(also_within_each_of_two_hosts),
		cmocka_unit_test(also_inside_plain_allocations),
		cmocka_unit_test(what_cannot_be_is_an_error_on_all_ranks),
		cmocka_unit_test(ranks_out_of_reach_have_windows_that_are_not_mapped),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

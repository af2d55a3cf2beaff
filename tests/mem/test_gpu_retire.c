/* Registrations that end while kernels run, here or at peers: nobody waits for a kernel, and what they keep goes when they are done. */
#include <stdatomic.h>
#include <unistd.h>

#include "boot/helper_boot.h"
#include "gpu/fake_driver.h"
#include "mem/internal.h"

#define BYTES ((size_t)1 << 20)

/* What this rank's kernels are said to do; the service thread asks. */
static struct { _Atomic bool running; _Atomic int marks, forgotten, hushed; } kernels;

static void *mark(void *rank)
{
	if (!kernels.running) return NULL;
	kernels.marks++;
	return rank;
}
static bool passed(void *rank, void *what) { return !kernels.running && what == rank; }
static void forget(void *rank, void *what)
{
	must(what == rank);
	kernels.forgotten++;
}
static bool hush(void *rank)
{
	(void)rank;
	if (kernels.running) return false;
	kernels.hushed++;
	return true;
}
static void hush_end(void *rank)
{
	(void)rank;
	kernels.hushed--;
}

static struct tp_gpu *gpu_of(int rank)
{
	struct tp_gpu *gpu;
	bool has;
	must(tp_gpu_open(&has) == ncclSuccess && has);
	must(tp_gpu_of_ordinal(rank, &gpu) == ncclSuccess);
	return gpu;
}

static struct tp_mem *open_mem(struct tp_boot *boot, const struct tp_gpu *gpu)
{
	struct tp_mem *mem;
	const bool reaches[] = { true, true };
	struct tp_mem_options options = { .gpu = gpu, .reaches = reaches, .kernels = { mark, passed, forget, hush, hush_end, &kernels } };
	must(tp_mem_create(boot, &options, &mem) == ncclSuccess);
	return mem;
}

static char *plain_memory(const struct tp_gpu *gpu)
{
	CUdeviceptr ptr;
	bool pushed;
	must(tp_gpu_enter(gpu, &pushed) == ncclSuccess);
	must(tp_cuda->MemAlloc(&ptr, BYTES) == CUDA_SUCCESS);
	tp_gpu_leave(pushed);
	return (char *)(uintptr_t)ptr;
}

static bool is_used(struct tp_mem *mem, uint32_t index)
{
	pthread_mutex_lock(&mem->lock);
	bool used = mem->by_index[index] != NULL;
	pthread_mutex_unlock(&mem->lock);
	return used;
}

/* Has the peer answered to the end of what has this index, without having let go? */
static bool is_kept(struct tp_mem *mem, uint32_t index)
{
	pthread_mutex_lock(&mem->lock);
	const struct tp_mem_range *range = mem->by_index[index];
	bool kept = range && range->retiring && range->answers == mem->everybody && range->acks == 0;
	pthread_mutex_unlock(&mem->lock);
	return kept;
}

#define AWAIT(condition) \
	for (uint64_t until_ = tp_clock_ms() + 20000; !(condition); usleep(500)) must(tp_clock_ms() < until_)

/* Rank 0's buffer, of a kind, registered and mapped; in every rank where the other's kernels are to see it. */
static void *share(struct tp_boot *boot, struct tp_mem *mem, char *buffer, struct tp_mem_place *place)
{
	void *handle = NULL;
	if (boot->rank == 0) {
		must(tp_mem_register(mem, buffer, BYTES, &handle) == ncclSuccess);
		tp_mem_await_peers(mem, handle, 600000);
		must(tp_mem_find(mem, buffer, BYTES, place));
	}
	must(tp_boot_barrier(boot) == ncclSuccess);
	must(tp_mem_imports() == boot->rank);
	return handle;
}

/* Rank 1's kernels run when rank 0 lets go of memory that CUDA IPC shows. */
static void at_the_peer(struct tp_boot *boot, struct tp_mem *mem)
{
	struct tp_mem_place place = { 0 };
	char *buffer = plain_memory(mem->gpu);
	void *handle = share(boot, mem, buffer, &place);
	if (boot->rank) kernels.running = true;
	must(tp_boot_barrier(boot) == ncclSuccess);
	if (!boot->rank) {
		must(tp_mem_deregister(mem, handle) == ncclSuccess);
		must(is_kept(mem, place.index));
	}
	must(tp_boot_barrier(boot) == ncclSuccess);
	must(tp_mem_imports() == boot->rank);
	kernels.running = false;
	if (boot->rank) AWAIT(tp_mem_imports() == 0);
	else AWAIT(!is_used(mem, place.index));
	must(kernels.hushed == 0);
}

/* Rank 0's own run: peers hear nothing of it until they are done. */
static void at_the_owner(struct tp_boot *boot, struct tp_mem *mem)
{
	struct tp_mem_place place = { 0 };
	void *buffer;
	must(tp_mem_alloc(mem->gpu, BYTES, &buffer) == ncclSuccess);
	void *handle = share(boot, mem, buffer, &place);
	if (!boot->rank) {
		kernels.running = true;
		must(tp_mem_deregister(mem, handle) == ncclSuccess && kernels.marks == 1);
		must(tp_mem_deregister(mem, handle) == ncclInvalidArgument);
		must(!tp_mem_find(mem, buffer, 4, &(struct tp_mem_place){ 0 }) && tp_mem_lookup(mem, boot->local, place.index) == 0);
		usleep(10000);
		must(is_used(mem, place.index) && kernels.forgotten == 0);
	}
	must(tp_boot_barrier(boot) == ncclSuccess);
	must(tp_mem_imports() == boot->rank);
	must(tp_boot_barrier(boot) == ncclSuccess);
	kernels.running = false;
	AWAIT(tp_mem_imports() == 0);
	if (!boot->rank) AWAIT(!is_used(mem, place.index));
	must(kernels.forgotten == kernels.marks);
	must(tp_mem_free(buffer) == ncclSuccess);
}

/* All of it is still kept when the communicator ends. */
static void to_the_end(struct tp_boot *boot, struct tp_mem *mem)
{
	struct tp_mem_place place;
	void *handle = share(boot, mem, plain_memory(mem->gpu), &place);
	void *mine;
	must(tp_mem_register(mem, plain_memory(mem->gpu), BYTES, &mine) == ncclSuccess);
	tp_mem_await_peers(mem, mine, 600000);
	must(tp_boot_barrier(boot) == ncclSuccess);
	if (boot->rank) kernels.running = true;
	must(tp_boot_barrier(boot) == ncclSuccess);
	if (!boot->rank) must(tp_mem_deregister(mem, handle) == ncclSuccess);
	kernels.running = true;
	must(tp_mem_deregister(mem, mine) == ncclSuccess);
	must(tp_boot_barrier(boot) == ncclSuccess);
}

/* Rank 1 can't map anything: rank 0 hears so. */
static void cannot_be_mapped(struct tp_boot *boot, struct tp_mem *mem)
{
	struct tp_mem_place place;
	char *buffer = plain_memory(mem->gpu);
	void *handle;
	if (!boot->rank) {
		must(tp_mem_register(mem, buffer, BYTES, &handle) == ncclSuccess);
		tp_mem_await_peers(mem, handle, 600000);
		must(!tp_mem_find(mem, buffer, BYTES, &place));
		must(tp_mem_deregister(mem, handle) == ncclSuccess);
	}
	must(tp_boot_barrier(boot) == ncclSuccess);
	must(tp_mem_imports() == 0);
}

static void (*body)(struct tp_boot *boot, struct tp_mem *mem);

static void process(struct helper_job *job)
{
	struct tp_boot *boot;
	use_fake_driver(2);
	helper_open(job, &boot);
	struct tp_mem *mem = open_mem(boot, gpu_of(boot->rank));
	body(boot, mem);
	tp_mem_destroy(mem);
	must(kernels.forgotten == kernels.marks && kernels.hushed == 0 && tp_mem_imports() == 0);
	tp_boot_close(boot);
}

static void two(void (*what)(struct tp_boot *boot, struct tp_mem *mem))
{
	body = what;
	assert_int_equal(helper_run(2, 1, process, NULL), 0);
}

static void a_peer_whose_kernels_keep_a_buffer_mapped_says_so_and_lets_go_later(void **state) { (void)state; two(at_the_peer); }
static void peers_hear_of_an_end_when_the_owners_kernels_are_done(void **state) { (void)state; two(at_the_owner); }
static void what_kernels_keep_goes_with_the_communicator(void **state) { (void)state; two(to_the_end); }
static void a_peer_that_cannot_map_says_so(void **state)
{
	(void)state;
	setenv("FAKE_CUDA_FAIL", "cuIpcOpenMemHandle_v2:1:2", 1);
	two(cannot_be_mapped);
	unsetenv("FAKE_CUDA_FAIL");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_peer_whose_kernels_keep_a_buffer_mapped_says_so_and_lets_go_later),
		cmocka_unit_test(peers_hear_of_an_end_when_the_owners_kernels_are_done),
		cmocka_unit_test(what_kernels_keep_goes_with_the_communicator),
		cmocka_unit_test(a_peer_that_cannot_map_says_so),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

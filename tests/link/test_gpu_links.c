/* Links of GPU ranks: every ring, head and region is where both sides take it to be, whatever memory joins them. Words are written and read
 * by copies, as kernels would; the rings of network links are pinned and looked at directly. */
#include <sched.h>
#include <unistd.h>

#include "boot/helper_boot.h"
#include "gpu/fake_driver.h"
#include "link/internal.h"

#define CHANNELS 2
#define REGION_BYTES 10000

/* Rank r is on GPU r / ranks_a_gpu. */
static struct { int nranks, nhosts, gpus, ranks_a_gpu; const char *local_via, *far_via; bool regions; } world;

static uint32_t word_of(int channel, int lane_class, int from, int to)
{
	return 0x1000000u * (uint32_t)(channel + 1) + 0x10000u * (uint32_t)lane_class + 0x100u * (uint32_t)from + (uint32_t)to + 1;
}

static void put(const struct tp_gpu *gpu, uint64_t to, uint32_t value) { must(tp_gpu_copy(gpu, (void *)(uintptr_t)to, &value, sizeof(value)) == ncclSuccess); }
static uint32_t get(const struct tp_gpu *gpu, uint64_t from)
{
	uint32_t value;
	must(tp_gpu_copy(gpu, &value, (void *)(uintptr_t)from, sizeof(value)) == ncclSuccess);
	return value;
}

typedef void each_link(struct tp_boot *boot, const struct tp_gpu *gpu, const struct tp_device_link *end, int channel, int lane_class, int from, int to);
static void for_all_links(struct tp_boot *boot, struct tp_links *links, const struct tp_gpu *gpu, each_link *call)
{
	for (int peer = 0; peer < boot->nranks; peer++)
		for (int c = 0; c < CHANNELS && peer != boot->rank; c++)
			for (int k = 0; k < TP_LINK_CLASSES; k++)
				for (int way = 0; way < 2; way++) {
					struct tp_device_link end;
					int from = way ? peer : boot->rank, to = way ? boot->rank : peer;
					must(tp_links_get_device(links, c, k, from, to, &end) == ncclSuccess);
					must(end.peer == peer && end.slots % 128 == 0 && end.mask >= 1 && end.stride >= end.capacity + 16);
					if (end.kind != TP_LINK_NET) call(boot, gpu, &end, c, k, from, to);
				}
}

/* The last slot, too: it must not run into the next ring. */
static uint64_t last_word(const struct tp_device_link *end) { return end->slots + (uint64_t)end->mask * end->stride + end->stride - 4; }

static void find_zeros(struct tp_boot *boot, const struct tp_gpu *gpu, const struct tp_device_link *end, int channel, int lane_class, int from, int to)
{
	(void)boot, (void)channel, (void)lane_class, (void)from, (void)to;
	must(get(gpu, end->head) == 0);
	for (uint32_t i = 0; i <= end->mask; i++) must(get(gpu, end->slots + (uint64_t)i * end->stride) == 0);
}

static void write_ends(struct tp_boot *boot, const struct tp_gpu *gpu, const struct tp_device_link *end, int channel, int lane_class, int from, int to)
{
	uint32_t word = word_of(channel, lane_class, from, to);
	if (from == boot->rank) {
		put(gpu, end->slots, word);
		put(gpu, last_word(end), ~word);
	} else {
		put(gpu, end->head, word);
	}
}

static void read_ends(struct tp_boot *boot, const struct tp_gpu *gpu, const struct tp_device_link *end, int channel, int lane_class, int from, int to)
{
	uint32_t word = word_of(channel, lane_class, from, to);
	if (from == boot->rank) {
		must(get(gpu, end->head) == word);
	} else {
		must(get(gpu, end->slots) == word);
		must(get(gpu, last_word(end)) == ~word);
	}
}

static void check_regions(struct tp_boot *boot, struct tp_links *links, const struct tp_gpu *gpu)
{
	for (int l = 0; l < boot->nlocal; l++) {
		char *region = tp_links_region(links, boot->local_ranks[l]);
		if (!world.regions) {
			must(!region);
			continue;
		}
		must(region && (uintptr_t)region % 128 == 0);
		must(get(gpu, (uintptr_t)region + (uint64_t)(4 * boot->local)) == 0 && get(gpu, (uintptr_t)region + REGION_BYTES - 4) == 0);
		put(gpu, (uintptr_t)region + (uint64_t)(4 * boot->local), (uint32_t)(100 * boot->rank + l + 1));
	}
	must(tp_boot_barrier(boot) == ncclSuccess);
	char *own = tp_links_region(links, boot->rank);
	for (int l = 0; l < boot->nlocal && world.regions; l++)
		must(get(gpu, (uintptr_t)own + (uint64_t)(4 * l)) == (uint32_t)(100 * boot->local_ranks[l] + boot->local + 1));
	for (int r = 0; r < boot->nranks; r++)
		if (boot->peers[r].host != boot->host) must(!tp_links_region(links, r));
}

/* A kernel's sender and receiver on a network link, by hand. */
static void send_over_net(struct tp_links *links, const struct tp_device_link *end, uint32_t number)
{
	struct tp_slot *slot = (struct tp_slot *)(uintptr_t)(end->slots + (uint64_t)(number & end->mask) * end->stride);
	_Atomic uint32_t *head = (_Atomic uint32_t *)(uintptr_t)end->head;
	bool moved;
	while (number - atomic_load(head) > end->mask) must(tp_links_progress(links, &moved) == ncclSuccess);
	slot->bytes = 4 + number % 60;
	slot->tag = 99;
	memset(slot->data, (int)number, slot->bytes);
	atomic_store(&slot->seq, number + 1);
}

static void receive_over_net(struct tp_links *links, const struct tp_device_link *end, uint32_t number)
{
	struct tp_slot *slot = (struct tp_slot *)(uintptr_t)(end->slots + (uint64_t)(number & end->mask) * end->stride);
	bool moved;
	while (atomic_load(&slot->seq) != number + 1) {
		must(tp_links_progress(links, &moved) == ncclSuccess);
		if (!moved) sched_yield();
	}
	must(slot->bytes == 4 + number % 60 && slot->tag == 99 && slot->data[0] == (unsigned char)number && slot->data[slot->bytes - 1] == (unsigned char)number);
	atomic_store((_Atomic uint32_t *)(uintptr_t)end->head, number + 1);
}

/* Each rank sends 40 chunks to the next one, in turns with receiving from the one before. */
static void run_net(struct tp_boot *boot, struct tp_links *links)
{
	int next = (boot->rank + 1) % boot->nranks, before = (boot->rank + boot->nranks - 1) % boot->nranks;
	struct tp_device_link out, in;
	bool moved;
	must(tp_links_get_device(links, 1, 0, boot->rank, next, &out) == ncclSuccess);
	must(tp_links_get_device(links, 1, 0, before, boot->rank, &in) == ncclSuccess);
	if (out.kind == TP_LINK_NET) must(out.capacity == tp_links_inline_capacity(links, true));
	for (uint32_t i = 0; i < 40; i++) {
		if (out.kind == TP_LINK_NET) send_over_net(links, &out, i);
		if (in.kind == TP_LINK_NET) receive_over_net(links, &in, i);
	}
	while (tp_links_need_progress(links)) must(tp_links_progress(links, &moved) == ncclSuccess);
}

static void check_paths(struct tp_boot *boot, struct tp_links *links)
{
	for (int r = 0; r < boot->nranks; r++) {
		struct tp_link_path path;
		bool same = boot->peers[r].process_hash == boot->peers[boot->rank].process_hash;
		must(tp_links_path(links, boot->rank, r, &path) == ncclSuccess);
		if (r == boot->rank || (same && !strncmp(world.local_via, "P2P/", 4))) continue;
		bool near = boot->peers[r].host == boot->host && (strncmp(world.local_via, "P2P", 3) != 0 || tp_links_reaches(links, boot->rank, r));
		if (strcmp(path.via, near ? world.local_via : world.far_via) != 0) {
			fprintf(stderr, "rank %d to %d: %s (%s)\n", boot->rank, r, path.via, path.text);
			_exit(1);
		}
		if (strncmp(path.via, "P2P", 3) != 0) must(path.text[0]);
	}
}

static void run_rank(struct tp_boot *boot, void *arg)
{
	struct tp_gpu *gpu;
	struct tp_links *links;
	bool has;
	(void)arg;
	must(tp_gpu_open(&has) == ncclSuccess && has);
	must(tp_gpu_of_ordinal(boot->rank / world.ranks_a_gpu % world.gpus, &gpu) == ncclSuccess);
	struct tp_links_options options = { .nchannels = CHANNELS, .gpu = gpu, .region_bytes = REGION_BYTES };
	must(tp_links_create(boot, &options, &links) == ncclSuccess);
	must(!tp_links_by_ref(links) && tp_links_inline_capacity(links, false) >= 1024 && tp_links_ring_capacity(links) >= tp_links_inline_capacity(links, false));
	for_all_links(boot, links, gpu, find_zeros);
	must(tp_boot_barrier(boot) == ncclSuccess);
	for_all_links(boot, links, gpu, write_ends);
	must(tp_boot_barrier(boot) == ncclSuccess);
	for_all_links(boot, links, gpu, read_ends);
	check_regions(boot, links, gpu);
	check_paths(boot, links);
	if (tp_links_have_net(links)) run_net(boot, links);
	must(tp_boot_barrier(boot) == ncclSuccess);
	/* The first to leave takes nothing from the others. */
	if (boot->rank == 0) tp_links_destroy(links);
	must(tp_boot_barrier(boot) == ncclSuccess);
	if (boot->rank == 0) return;
	for (int l = 0; l < boot->nlocal; l++)
		if (world.regions) put(gpu, (uintptr_t)tp_links_region(links, boot->local_ranks[l]) + (uint64_t)(4 * boot->local), 1);
	tp_links_destroy(links);
}

static void process(struct helper_job *job)
{
	struct tp_boot *boot;
	use_fake_driver(world.gpus);
	setenv("TELPHER_P2P_BYTES", "2M", 1);
	tp_param_reload();
	helper_open(job, &boot);
	run_rank(boot, NULL);
	tp_boot_close(boot);
}

/* CUDA may wait for a kernel that waits for the engine, which needs the links' lock. */
static const struct tp_cuda *cuda;
static struct tp_links *opening;
static int asked;
static CUresult alloc_host(void **out, size_t bytes, unsigned int flags)
{
	must(pthread_mutex_trylock(&opening->lock) == 0);
	pthread_mutex_unlock(&opening->lock);
	asked++;
	return cuda->MemHostAlloc(out, bytes, flags);
}

static void open_watched(struct helper_job *job)
{
	static struct tp_cuda watched;
	struct tp_boot *boot;
	struct tp_gpu *gpu;
	struct tp_device_link end;
	bool has;
	use_fake_driver(1);
	helper_open(job, &boot);
	must(tp_gpu_open(&has) == ncclSuccess && has && tp_gpu_of_ordinal(0, &gpu) == ncclSuccess);
	struct tp_links_options options = { .nchannels = CHANNELS, .gpu = gpu };
	must(tp_links_create(boot, &options, &opening) == ncclSuccess);
	cuda = tp_cuda;
	watched = *cuda;
	watched.MemHostAlloc = alloc_host;
	tp_cuda = &watched;
	for (int way = 0; way < 2; way++) must(tp_links_get_device(opening, 0, 0, way, !way, &end) == ncclSuccess && end.kind == TP_LINK_NET);
	must(asked > 0);
	tp_cuda = cuda;
	must(tp_boot_barrier(boot) == ncclSuccess);
	tp_links_destroy(opening);
	tp_boot_close(boot);
}

static void memory_for_links_is_had_without_the_lock_that_the_engine_needs(void **state)
{
	(void)state;
	assert_int_equal(helper_run(2, 2, open_watched, NULL), 0);
}

static void in_threads(void)
{
	int status;
	pid_t pid = fork();
	assert_true(pid >= 0);
	if (pid == 0) {
		use_fake_driver(world.gpus);
		setenv("TELPHER_P2P_BYTES", "2M", 1);
		tp_param_reload();
		helper_threads(world.nranks, run_rank, NULL);
		_exit(0);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_int_equal(status, 0);
}

static void set_world(int nranks, int nhosts, int gpus, int ranks_a_gpu, const char *local_via, const char *far_via, bool regions)
{
	world.nranks = nranks;
	world.nhosts = nhosts;
	world.gpus = gpus;
	world.ranks_a_gpu = ranks_a_gpu;
	world.local_via = local_via;
	world.far_via = far_via;
	world.regions = regions;
}

static void processes_on_one_gpu_share_by_descriptor(void **state)
{
	(void)state;
	set_world(3, 1, 1, 3, "P2P/CUMEM", "", true);
	assert_int_equal(helper_run(3, 1, process, NULL), 0);
}

static void processes_on_several_gpus_share_by_descriptor(void **state)
{
	(void)state;
	set_world(4, 1, 2, 2, "P2P/CUMEM", "", true);
	assert_int_equal(helper_run(4, 1, process, NULL), 0);
}

static void processes_share_by_ipc(void **state)
{
	(void)state;
	setenv("NCCL_CUMEM_ENABLE", "0", 1);
	set_world(3, 1, 3, 1, "P2P/IPC", "", true);
	int wrong = helper_run(3, 1, process, NULL);
	unsetenv("NCCL_CUMEM_ENABLE");
	assert_int_equal(wrong, 0);
}

static void threads_use_pointers(void **state)
{
	(void)state;
	set_world(4, 1, 2, 2, "P2P/direct pointer", "", true);
	in_threads();
}

static void threads_use_plain_memory(void **state)
{
	(void)state;
	setenv("NCCL_CUMEM_ENABLE", "0", 1);
	set_world(3, 1, 3, 1, "P2P/direct pointer", "", true);
	in_threads();
	unsetenv("NCCL_CUMEM_ENABLE");
}

static void without_peer_access_ranks_meet_in_pinned_memory(void **state)
{
	(void)state;
	setenv("NCCL_P2P_DISABLE", "1", 1);
	set_world(3, 1, 1, 3, "SHM/direct/direct", "", true);
	int wrong = helper_run(3, 1, process, NULL);
	in_threads();
	unsetenv("NCCL_P2P_DISABLE");
	assert_int_equal(wrong, 0);
}

static void pairs_out_of_reach_alone_meet_in_pinned_memory(void **state)
{
	(void)state;
	setenv("FAKE_CUDA_PEER_GROUP", "2", 1);
	set_world(4, 1, 4, 1, "P2P/CUMEM", "SHM/direct/direct", true);
	int wrong = helper_run(4, 1, process, NULL);
	unsetenv("FAKE_CUDA_PEER_GROUP");
	assert_int_equal(wrong, 0);
}

static void processes_that_can_share_nothing_meet_in_pinned_memory(void **state)
{
	(void)state;
	setenv("FAKE_CUDA_VMM", "0", 1);
	setenv("FAKE_CUDA_IPC", "0", 1);
	set_world(3, 1, 3, 1, "SHM/direct/direct", "", true);
	int wrong = helper_run(3, 1, process, NULL);
	set_world(3, 1, 3, 1, "P2P/direct pointer", "", true);
	in_threads();
	unsetenv("FAKE_CUDA_VMM");
	unsetenv("FAKE_CUDA_IPC");
	assert_int_equal(wrong, 0);
}

static void a_level_keeps_devices_apart(void **state)
{
	(void)state;
	setenv("NCCL_P2P_LEVEL", "LOC", 1);
	set_world(4, 1, 2, 2, "P2P/CUMEM", "SHM/direct/direct", true);
	int wrong = helper_run(4, 1, process, NULL);
	unsetenv("NCCL_P2P_LEVEL");
	assert_int_equal(wrong, 0);
}

static void with_nothing_left_ranks_meet_over_the_network(void **state)
{
	(void)state;
	setenv("NCCL_P2P_DISABLE", "1", 1);
	setenv("NCCL_SHM_DISABLE", "1", 1);
	set_world(2, 1, 1, 2, "NET/Socket/0", "", false);
	int wrong = helper_run(2, 1, process, NULL);
	unsetenv("NCCL_P2P_DISABLE");
	unsetenv("NCCL_SHM_DISABLE");
	assert_int_equal(wrong, 0);
}

static void hosts_are_joined_by_the_network(void **state)
{
	(void)state;
	set_world(4, 2, 2, 1, "P2P/CUMEM", "NET/Socket/0", true);
	assert_int_equal(helper_run(4, 2, process, NULL), 0);
}

static void ranks_of_other_sizes_are_named(struct helper_job *job)
{
	struct tp_boot *boot;
	struct tp_gpu *gpu;
	struct tp_links *links;
	bool has;
	use_fake_driver(1);
	setenv("TELPHER_P2P_BYTES", job->rank ? "2M" : "3M", 1);
	tp_param_reload();
	must(tp_gpu_open(&has) == ncclSuccess && tp_gpu_of_ordinal(0, &gpu) == ncclSuccess);
	helper_open(job, &boot);
	struct tp_links_options options = { .nchannels = CHANNELS, .gpu = gpu };
	must(tp_links_create(boot, &options, &links) == ncclInvalidUsage && strstr(tp_log_last_error(), "TELPHER_P2P_BYTES"));
	tp_boot_close(boot);
}
static void different_sizes_are_an_error_on_all_ranks(void **state)
{
	(void)state;
	assert_int_equal(helper_run(2, 1, ranks_of_other_sizes_are_named, NULL), 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(processes_on_one_gpu_share_by_descriptor),
		cmocka_unit_test(processes_on_several_gpus_share_by_descriptor),
		cmocka_unit_test(processes_share_by_ipc),
		cmocka_unit_test(threads_use_pointers),
		cmocka_unit_test(threads_use_plain_memory),
		cmocka_unit_test(without_peer_access_ranks_meet_in_pinned_memory),
		cmocka_unit_test(pairs_out_of_reach_alone_meet_in_pinned_memory),
		cmocka_unit_test(processes_that_can_share_nothing_meet_in_pinned_memory),
		cmocka_unit_test(a_level_keeps_devices_apart),
		cmocka_unit_test(with_nothing_left_ranks_meet_over_the_network),
		cmocka_unit_test(memory_for_links_is_had_without_the_lock_that_the_engine_needs),
		cmocka_unit_test(hosts_are_joined_by_the_network),
		cmocka_unit_test(different_sizes_are_an_error_on_all_ranks),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

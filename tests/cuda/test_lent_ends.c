/* What becomes of lent buffers whose registration, memory or operation ends: deregistered under way, freed and used again, aborts and errors, and all at once.
 *   test_cuda_lent_ends [pattern of tests' names] */
#include <pthread.h>
#include <signal.h>

#include "cuda/helper_lent.h"

/* ---- ends of buffers */

enum { PIECE = 4 << 20, FEW = 128 << 10 };

static void fill_and_send(struct gpu_rank *g, CUdeviceptr buffer, int value)
{
	struct ranks *r = g->r;
	gpu_fill(g, buffer, r->rank ? 0 : value, PIECE);
	ranks_barrier(r);
	if (r->rank == 0) REQUIRE_OK(ncclSend(GPU_PTR(buffer), PIECE, ncclUint8, 1, g->comm, GPU_STREAM(g, 1)));
	else REQUIRE_OK(ncclRecv(GPU_PTR(buffer), PIECE, ncclUint8, 0, g->comm, GPU_STREAM(g, 1)));
}

static void require_value(struct gpu_rank *g, CUdeviceptr buffer, int value)
{
	struct ranks *r = g->r;
	unsigned char *got = malloc(PIECE);
	gpu_get(g, got, buffer, PIECE);
	for (size_t i = 0; i < PIECE; i++) REQUIRE(got[i] == value);
	free(got);
}

static void send_and_check(struct gpu_rank *g, CUdeviceptr buffer, int value)
{
	fill_and_send(g, buffer, value);
	gpu_sync(g, 1);
	require_value(g, buffer, value);
}

/* Memory of its own, and other memory in its place: of the fake driver at the same address. On whole pages, as what is so large is on a GPU. */
enum { PAGE = 4096 };
static CUdeviceptr take_piece(CUdeviceptr *memory)
{
	CUDA_OK(MemAlloc(memory, PIECE + PAGE));
	return (*memory + PAGE - 1) / PAGE * PAGE;
}

static CUdeviceptr renew(struct gpu_rank *g, CUdeviceptr *memory)
{
	struct ranks *r = g->r;
	CUdeviceptr before = *memory;
	CUDA_OK(MemFree(*memory));
	CUdeviceptr buffer = take_piece(memory);
	REQUIRE(!gpu_is_fake() || *memory == before);
	return buffer;
}

static void memory_is_used_again(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	CUdeviceptr memory, buffer = take_piece(&memory);
	lent_open_comm(g);
	void *handle = lent_register_range(g, buffer, PIECE);
	send_and_check(g, buffer, 1);           /* lent */
	REQUIRE_OK(ncclCommDeregister(g->comm, handle));
	buffer = renew(g, &memory);
	send_and_check(g, buffer, 2);
	handle = lent_register_range(g, buffer, PIECE);
	send_and_check(g, buffer, 3);           /* lent */
	/* Freed without a word: what is there now isn't what was registered. */
	buffer = renew(g, &memory);
	send_and_check(g, buffer, 4);
	void *other = lent_register_range(g, buffer, PIECE);
	send_and_check(g, buffer, 5);           /* lent */
	REQUIRE_OK(ncclCommDeregister(g->comm, handle));
	send_and_check(g, buffer, 6);           /* lent */
	REQUIRE_OK(ncclCommDeregister(g->comm, other));
	send_and_check(g, buffer, 7);
	struct lent now = lent_close_comm(g);
	REQUIRE(lent_is(now, r->rank ? 0 : 4ull * PIECE));
	CUDA_OK(MemFree(memory));
}

static void memory_that_was_freed_is_never_read_whoever_has_its_address(void **state)
{
	(void)state;
	struct gpu_options o = lent_on_two_hosts(2, DMABUF, NULL);
	assert_true(gpu_run(&o, memory_is_used_again, NULL));
	o.env[2] = "NCCL_DMABUF_ENABLE=0";
	assert_true(gpu_run(&o, memory_is_used_again, NULL));
}

static void map_piece(struct gpu_rank *g, CUdeviceptr at)
{
	CUmemAllocationProp properties = { .type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = { CU_MEM_LOCATION_TYPE_DEVICE, g->device } };
	CUmemAccessDesc access = { { CU_MEM_LOCATION_TYPE_DEVICE, g->device }, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	CUmemGenericAllocationHandle handle;
	CUDA_OK(MemCreate(&handle, PIECE, &properties, 0));
	CUDA_OK(MemMap(at, PIECE, 0, handle, 0));
	CUDA_OK(MemRelease(handle));
	CUDA_OK(MemSetAccess(at, PIECE, &access, 1));
}

/* The address stays, and what is mapped there changes. */
static void memory_is_mapped_again(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	CUdeviceptr at;
	CUDA_OK(MemAddressReserve(&at, 2 * PIECE, 0, 0, 0));
	map_piece(g, at);
	map_piece(g, at + PIECE);
	lent_open_comm(g);
	void *handle = lent_register_range(g, at, PIECE);
	send_and_check(g, at, 1);               /* lent */
	CUDA_OK(MemUnmap(at, PIECE));
	map_piece(g, at);
	send_and_check(g, at, 2);
	void *other = lent_register_range(g, at, PIECE);
	send_and_check(g, at, 3);               /* lent */
	REQUIRE_OK(ncclCommDeregister(g->comm, handle));
	send_and_check(g, at, 4);               /* lent */
	REQUIRE_OK(ncclCommDeregister(g->comm, other));
	struct lent now = lent_close_comm(g);
	REQUIRE(lent_is(now, r->rank ? 0 : 3ull * PIECE));
	REQUIRE(!lent_warns());
	for (int i = 0; i < 2; i++) CUDA_OK(MemUnmap(at + (size_t)i * PIECE, PIECE));
	CUDA_OK(MemAddressFree(at, 2 * PIECE));
}

static void what_is_mapped_again_is_other_memory(void **state)
{
	(void)state;
	struct gpu_options o = lent_on_two_hosts(2, DMABUF, NULL);
	assert_true(gpu_run(&o, memory_is_mapped_again, NULL));
	o.env[2] = "NCCL_DMABUF_ENABLE=0";
	assert_true(gpu_run(&o, memory_is_mapped_again, NULL));
}

static CUgraphExec capture_send(struct gpu_rank *g, CUdeviceptr buffer)
{
	struct ranks *r = g->r;
	CUDA_OK(StreamBeginCapture(g->streams[1], CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
	if (r->rank == 0) REQUIRE_OK(ncclSend(GPU_PTR(buffer), PIECE, ncclUint8, 1, g->comm, GPU_STREAM(g, 1)));
	else REQUIRE_OK(ncclRecv(GPU_PTR(buffer), PIECE, ncclUint8, 0, g->comm, GPU_STREAM(g, 1)));
	return gpu_end_capture(g, 1);
}

/* Communicators over one card, which has one cache of registrations. One ends while a graph of another lives, and a third, so what there is of it waits; but what
 * it had registered is given back, and never found for what lies at that address later. */
static void one_of_two_ends(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	CUdeviceptr memory, buffer = take_piece(&memory);
	lent_open_comm(g);
	ncclComm_t third = g->comm;
	lent_open_comm(g);
	CUgraphExec exec = capture_send(g, g->pool);
	CUDA_OK(GraphLaunch(exec, g->streams[1]));
	gpu_sync(g, 1);
	ncclComm_t first = g->comm;
	for (int value = 1; value < 5; value += 2) {
		/* Left registered; then forgotten by both, freed, and used again while the first still has it. */
		lent_open_comm(g);
		lent_register_range(g, buffer, PIECE);
		send_and_check(g, buffer, value);       /* lent */
		lent_close_comm(g);
		buffer = renew(g, &memory);
		g->comm = first;
		lent_register_range(g, buffer, PIECE);
		send_and_check(g, buffer, value + 1);   /* lent */
	}
	CUDA_OK(GraphExecDestroy(exec));
	lent_close_comm(g);
	g->comm = third;
	struct lent now = lent_close_comm(g);
	REQUIRE(lent_is(now, r->rank ? 0 : 4ull * PIECE));
	REQUIRE(!lent_warns());
	CUDA_OK(MemFree(memory));
}

static void what_an_ended_communicator_registered_is_never_found(void **state)
{
	(void)state;
	struct gpu_options o = lent_on_two_hosts(2, DMABUF, NULL);
	assert_true(gpu_run(&o, one_of_two_ends, NULL));
	o.env[2] = "NCCL_DMABUF_ENABLE=0";
	assert_true(gpu_run(&o, one_of_two_ends, NULL));
}

/* The receiver isn't there yet, so the kernel has left some chunks and will leave more. */
static void deregistered_under_way(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	lent_open_comm(g);
	void *handle = lent_register_pool(g);
	send_and_check(g, g->pool, 1);
	if (r->rank == 0) {
		gpu_fill(g, g->pool, 2, PIECE);
		REQUIRE_OK(ncclSend(GPU_PTR(g->pool), PIECE, ncclUint8, 1, g->comm, GPU_STREAM(g, 1)));
		usleep(100000);
		REQUIRE_OK(ncclCommDeregister(g->comm, handle));
		ranks_barrier(r);
	} else {
		ranks_barrier(r);
		REQUIRE_OK(ncclRecv(GPU_PTR(g->pool), PIECE, ncclUint8, 0, g->comm, GPU_STREAM(g, 1)));
	}
	gpu_sync(g, 1);
	require_value(g, g->pool, 2);
	send_and_check(g, g->pool, 3);
	struct lent now = lent_close_comm(g);
	/* A GPU has more channels: all may have been sent before. */
	REQUIRE(now.late == 0);
	if (r->rank == 0 && gpu_is_fake()) REQUIRE(now.bytes > PIECE && now.bytes < 2ull * PIECE);
}

static void what_is_deregistered_while_a_kernel_lends_it_goes_on(void **state)
{
	(void)state;
	/* Few small slots, or all has been sent before. */
	struct gpu_options o = lent_on_two_hosts(2, "TELPHER_NET_DEPTH=2", "TELPHER_NET_CHUNK=32K");
	assert_true(gpu_run(&o, deregistered_under_way, NULL));
}

/* A kernel of a graph has looked, and waits for what it will lend; nobody has been told of it yet. */
static void deregistered_before_it_is_known(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	lent_open_comm(g);
	void *handle = lent_register_pool(g);
	CUDA_OK(StreamBeginCapture(g->streams[1], CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
	REQUIRE_OK(ncclBroadcast(GPU_PTR(g->pool), GPU_PTR(g->pool), PIECE, ncclUint8, 0, g->comm, GPU_STREAM(g, 1)));
	CUgraphExec exec = gpu_end_capture(g, 1);
	for (int value = 1; value < 3; value++) {
		gpu_fill(g, g->pool, r->rank ? 0 : value, PIECE);
		ranks_barrier(r);
		if (r->rank) CUDA_OK(GraphLaunch(exec, g->streams[1]));
		usleep(100000);
		if (value == 2) REQUIRE_OK(ncclCommDeregister(g->comm, handle));
		ranks_barrier(r);
		if (!r->rank) CUDA_OK(GraphLaunch(exec, g->streams[1]));
		gpu_sync(g, 1);
		require_value(g, g->pool, value);
	}
	CUDA_OK(GraphExecDestroy(exec));
	struct lent now = lent_close_comm(g);
	REQUIRE(now.late == 0);
	if (r->rank && now.chunks > 0) atomic_fetch_add(&r->shared->word[0], 1);
	ranks_barrier(r);
	REQUIRE(atomic_load(&r->shared->word[0]) > 0);          /* somebody passes on what comes */
}

static void what_a_kernel_has_found_stays_before_anybody_knows_that_it_runs(void **state)
{
	(void)state;
	struct gpu_options o = lent_on_two_hosts(3, DMABUF, "FAKE_CUDA_HOST_NODE_MS=300");
	o.nhosts = 3;
	assert_true(gpu_run(&o, deregistered_before_it_is_known, NULL));
}

/* What is gone needn't wait until the communicator has nothing to do, which it may never have: another kernel waits all the time, and has lent nothing. */
static void given_back_under_way(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	lent_open_comm(g);
	send_and_check(g, g->pool, 1);
	gpu_fill(g, g->pool, r->rank ? 0 : 2, PIECE);
	if (r->rank) REQUIRE_OK(ncclRecv(GPU_PTR(g->pool), PIECE, ncclUint8, 0, g->comm, GPU_STREAM(g, 1)));
	for (int i = 0; i < 1100; i++) REQUIRE_OK(ncclCommDeregister(g->comm, lent_register_range(g, g->pool, PIECE)));
	ranks_barrier(r);
	if (!r->rank) REQUIRE_OK(ncclSend(GPU_PTR(g->pool), PIECE, ncclUint8, 1, g->comm, GPU_STREAM(g, 1)));
	gpu_sync(g, 1);
	require_value(g, g->pool, 2);
	lent_close_comm(g);
	REQUIRE(!lent_log_has("buffers are registered already"));
}

static void what_is_deregistered_is_given_back_while_other_kernels_run(void **state)
{
	(void)state;
	struct gpu_options o = lent_on_two_hosts(2, DMABUF, NULL);
	assert_true(gpu_run(&o, given_back_under_way, NULL));
}

/* ---- aborts */

/* Rank 0 has lent, and nobody takes it; then it has its memory back, and nothing reads that any more. few: chunks that the slots have room for all, so that the kernel
 * waits for nothing but the end of what it has lent. */
struct sending { bool connected, few; };
static void aborted(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	const struct sending *arg = g->arg;
	CUdeviceptr memory, buffer = take_piece(&memory);
	lent_open_comm(g);
	lent_register_range(g, buffer, PIECE);
	if (arg->connected) send_and_check(g, buffer, 1);
	ranks_barrier(r);
	if (r->rank == 0) {
		REQUIRE_OK(ncclSend(GPU_PTR(buffer), arg->few ? FEW : PIECE, ncclUint8, 1, g->comm, GPU_STREAM(g, 1)));
		usleep(50000);
		uint64_t start = ranks_now_ms();
		REQUIRE_OK(ncclCommAbort(g->comm));
		REQUIRE(ranks_now_ms() - start < (uint64_t)ranks_patience_ms(20000));
		gpu_sync(g, 1);
		CUDA_OK(MemFree(memory));
		usleep(50000);
		ranks_barrier(r);
	} else {
		ranks_barrier(r);
		REQUIRE_OK(ncclCommAbort(g->comm));
		CUDA_OK(MemFree(memory));
	}
	g->comm = NULL;
}

static void an_abort_takes_back_what_was_lent(void **state)
{
	(void)state;
	static const struct sending turns[] = { { .connected = false }, { .connected = true }, { .few = true } };
	for (size_t i = 0; i < sizeof(turns) / sizeof(turns[0]); i++) {
		struct gpu_options o = lent_on_two_hosts(2, DMABUF, NULL);
		assert_true(gpu_run(&o, aborted, (void *)(uintptr_t)&turns[i]));
	}
}

static void await_error(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	ncclResult_t error = ncclSuccess;
	for (uint64_t end = ranks_now_ms() + (uint64_t)ranks_patience_ms(30000); error == ncclSuccess && ranks_now_ms() < end; usleep(1000))
		REQUIRE_OK(ncclCommGetAsyncError(g->comm, &error));
	REQUIRE(error != ncclSuccess);
}

/* The peer is gone before it has taken anything; the kernel ends though nothing that it has lent was sent. */
static void dies(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	const struct sending *arg = g->arg;
	CUdeviceptr memory, buffer = take_piece(&memory);
	lent_open_comm(g);
	void *handle = lent_register_range(g, buffer, PIECE);
	if (arg->connected) send_and_check(g, buffer, 1);
	ranks_barrier(r);
	if (r->rank) {
		usleep(100000);
		kill(getpid(), SIGKILL);
	}
	REQUIRE_OK(ncclSend(GPU_PTR(buffer), arg->few ? FEW : PIECE, ncclUint8, 1, g->comm, GPU_STREAM(g, 1)));
	gpu_sync(g, 1);
	await_error(g);
	REQUIRE_OK(ncclCommDeregister(g->comm, handle));
	REQUIRE_OK(ncclCommAbort(g->comm));
	CUDA_OK(MemFree(memory));
	g->comm = NULL;
}

static void a_kernel_that_waits_for_its_loans_ends_when_the_peer_dies(void **state)
{
	static const struct sending turns[] = { { .connected = true }, { .few = true } };
	(void)state;
	for (size_t i = 0; i < sizeof(turns) / sizeof(turns[0]); i++) {
		struct gpu_options o = lent_on_two_hosts(2, DMABUF, NULL);
		o.may_die = 2;
		assert_true(gpu_run(&o, dies, (void *)(uintptr_t)&turns[i]));
	}
}

static void await_log(const struct ranks *r, const char *what)
{
	uint64_t end = ranks_now_ms() + (uint64_t)ranks_patience_ms(30000);
	while (!lent_log_has(what) && ranks_now_ms() < end) usleep(1000);
	REQUIRE(lent_log_has(what));
}

/* A kernel finds that the calls differ, and ends with chunks on loan. */
static void fails(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	lent_open_comm(g);
	lent_register_pool(g);
	send_and_check(g, g->pool, 1);
	ncclGroupStart();
	ncclSend(GPU_PTR(g->pool), PIECE, ncclUint8, !r->rank, g->comm, GPU_STREAM(g, 1));
	ncclRecv(GPU_PTR(g->pool + PIECE), r->rank ? PIECE : PIECE / 2, ncclUint8, !r->rank, g->comm, GPU_STREAM(g, 1));
	REQUIRE_OK(ncclGroupEnd());
	await_error(g);
	/* More than the network holds, and rank 0 takes no more of it. Nobody has asked for an end yet. */
	if (r->rank && gpu_is_fake()) await_log(r, "is closed: an operation ended before what it had lent was through");
	REQUIRE_OK(ncclCommAbort(g->comm));
	gpu_sync(g, 1);
	g->comm = NULL;
}

static void an_error_takes_back_what_was_lent(void **state)
{
	(void)state;
	struct gpu_options o = lent_on_two_hosts(2, DMABUF, "TELPHER_NET_DEPTH=2");
	assert_true(gpu_run(&o, fails, NULL));
}

/* ---- all at once */

/* Another thread registers and deregisters what operations use. */
struct meddler { struct gpu_rank *g; _Atomic bool ends; int turns; };
static void *meddle(void *arg)
{
	struct meddler *m = arg;
	struct gpu_rank *g = m->g;
	struct ranks *r = g->r;
	struct random random = { 11 + (uint64_t)r->rank };
	void *handles[4] = { NULL };
	CUDA_OK(CtxSetCurrent(gpu_context(g->device)));
	while (!atomic_load_explicit(&m->ends, memory_order_relaxed)) {
		void **handle = &handles[below(&random, 4)];
		if (*handle) {
			REQUIRE_OK(ncclCommDeregister(g->comm, *handle));
			*handle = NULL;
		} else {
			size_t from = below(&random, 3) ? 0 : below(&random, g->pool_bytes / 4);
			*handle = lent_register_range(g, g->pool + from, g->pool_bytes - from - below(&random, g->pool_bytes / 8));
		}
		m->turns++;
		usleep(200);
	}
	for (int i = 0; i < 4; i++)
		if (handles[i]) REQUIRE_OK(ncclCommDeregister(g->comm, handles[i]));
	return NULL;
}

static void random_ops(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	struct random random = { 5 };
	struct meddler m = { .g = g };
	pthread_t thread;
	lent_open_comm(g);
	REQUIRE(!pthread_create(&thread, NULL, meddle, &m));
	for (int i = 0; i < (SANITIZED ? 25 : 60); i++) {
		struct gpu_op o;
		draw_op(&random, r->nranks, &o);
		if (below(&random, 2)) o.count = 20000 + below(&random, 120000 / (size_t)r->nranks);
		lent_run_op(g, o);
	}
	atomic_store(&m.ends, true);
	REQUIRE(!pthread_join(thread, NULL));
	REQUIRE(m.turns > 0);
	struct lent now = lent_close_comm(g);
	atomic_fetch_add(&r->shared->word[0], (int)now.chunks);
	ranks_barrier(r);
	REQUIRE(atomic_load(&r->shared->word[0]) > 0);
}

static void random_operations_while_another_thread_registers_and_deregisters(void **state)
{
	(void)state;
	/* On a GPU, a rank a host: letting go of what the host's other ranks have mapped waits for kernels, with CUDA's lock held, which the software card's copies need. */
	struct gpu_options o = lent_on_two_hosts(gpu_fake_here() ? 4 : 2, DMABUF, NULL);
	o.ndevices = 2;
	assert_true(gpu_run(&o, random_ops, NULL));
	o = lent_on_two_hosts(2, DMABUF, "NCCL_DMABUF_ENABLE=0");
	assert_true(gpu_run(&o, random_ops, NULL));
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(memory_that_was_freed_is_never_read_whoever_has_its_address),
		cmocka_unit_test(what_is_mapped_again_is_other_memory),
		cmocka_unit_test(what_an_ended_communicator_registered_is_never_found),
		cmocka_unit_test(what_is_deregistered_while_a_kernel_lends_it_goes_on),
		cmocka_unit_test(what_a_kernel_has_found_stays_before_anybody_knows_that_it_runs),
		cmocka_unit_test(what_is_deregistered_is_given_back_while_other_kernels_run),
		cmocka_unit_test(an_abort_takes_back_what_was_lent),
		cmocka_unit_test(a_kernel_that_waits_for_its_loans_ends_when_the_peer_dies),
		cmocka_unit_test(an_error_takes_back_what_was_lent),
		cmocka_unit_test(random_operations_while_another_thread_registers_and_deregisters),
	};
	return lent_main("cuda_lent_ends", tests, sizeof(tests) / sizeof(tests[0]), argc > 1 ? argv[1] : NULL);
}

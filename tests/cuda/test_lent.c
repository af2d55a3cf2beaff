/* Registered buffers of GPU ranks on different hosts are sent from where they lie: that results are right, that data really is lent, where it isn't and why,
 * and what graphs do.
 *   test_cuda_lent [pattern of tests' names] */
#include <dirent.h>

#include "cuda/helper_lent.h"

enum { LARGE = 400000 };        /* elements: some chunks for each channel */
enum { STEPS = 3 };
static const enum op_kind few_kinds[STEPS] = { ALL_REDUCE, ALL_GATHER, ALL_TO_ALL };

/* ---- what is lent */

/* Some rank lends of each kind: the plans say which. But what is reduced inside hosts first, and is no result, crosses from memory of ours. */
static void every_kind(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	struct lent before = { 0 };
	for (int kind = 0; kind < TRANSFERS; kind++) {
		lent_open_comm(g);
		lent_register_pool(g);
		lent_run_op(g, (struct gpu_op){ .kind = (enum op_kind)kind, .count = LARGE, .type = ncclFloat32, .seed = (uint64_t)kind + 1 });
		struct lent now = lent_close_comm(g);
		REQUIRE(now.late == 0);
		if (now.chunks > before.chunks) atomic_fetch_add(&r->shared->word[kind], 1);
		before = now;
		ranks_barrier(r);
		if ((kind == REDUCE || kind == REDUCE_SCATTER) && r->nranks > 2) continue;
		if (!atomic_load(&r->shared->word[kind])) fprintf(stderr, "of %s nothing was lent\n", op_kind_names[kind]);
		REQUIRE(atomic_load(&r->shared->word[kind]) > 0);
	}
	REQUIRE(lent_log_has("is sent from where it lies, in large chunks"));
}

static void of_every_collective_something_is_lent(void **state)
{
	(void)state;
	for (int nranks = 2; nranks <= 4; nranks += 2) {
		struct gpu_options o = lent_on_two_hosts(nranks, DMABUF, NULL);
		assert_true(gpu_run(&o, every_kind, NULL));
	}
}

/* Descriptors of this process that are DMA-BUFs. */
static int open_dma_bufs(void)
{
	int found = 0;
	DIR *fds = opendir("/proc/self/fd");
	for (const struct dirent *e; fds && (e = readdir(fds));) {
		char name[64];
		ssize_t n = readlinkat(dirfd(fds), e->d_name, name, sizeof(name) - 1);
		name[n > 0 ? n : 0] = 0;
		found += strstr(name, "dmabuf") != NULL;
	}
	if (fds) closedir(fds);
	return found;
}

/* All that a rank sends of its buffer to another host goes without a copy. */
static void all_of_a_send(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	const size_t bytes = (size_t)5 << 20;
	lent_open_comm(g);
	lent_register_pool(g);
	gpu_fill(g, g->pool, r->rank ? 1 : 2, bytes);
	ranks_barrier(r);
	if (r->rank == 0) REQUIRE_OK(ncclSend(GPU_PTR(g->pool), bytes, ncclUint8, 1, g->comm, GPU_STREAM(g, 1)));
	else REQUIRE_OK(ncclRecv(GPU_PTR(g->pool), bytes, ncclUint8, 0, g->comm, GPU_STREAM(g, 1)));
	gpu_sync(g, 1);
	unsigned char *got = malloc(bytes);
	gpu_get(g, got, g->pool, bytes);
	for (size_t i = 0; i < bytes; i++) REQUIRE(got[i] == 2);
	free(got);
	REQUIRE(open_dma_bufs() == 0);          /* what cards hold needs none */
	struct lent now = lent_close_comm(g);
	REQUIRE(lent_is(now, r->rank ? 0 : bytes));
}

static void a_send_is_lent_whole(void **state)
{
	(void)state;
	struct gpu_options o = lent_on_two_hosts(2, DMABUF, NULL);
	assert_true(gpu_run(&o, all_of_a_send, NULL));
}

/* Sizes below and above a chunk, any alignment, in place, types and operations. */
static void many_shapes(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	static const size_t counts[] = { 1, 4099, 60011, 250007 };
	lent_open_comm(g);
	lent_register_pool(g);
	for (int kind = 0; kind < NKINDS; kind++)
		for (int c = 0; c < 4; c++) {
			bool skewed = (kind + c) % 2;
			lent_run_op(g, (struct gpu_op){ .kind = (enum op_kind)kind, .count = counts[c], .type = c % 3 == 1 ? ncclFloat16 : c % 3 ? ncclUint8 : ncclInt32, .root = c % r->nranks,
				.op = c % 2 ? ncclSum : ncclAvg, .in_place = c % 2 == 0 && kind < ALL_TO_ALL, .skew_send = skewed ? 3 : 0, .skew_recv = skewed ? 5 : 0, .seed = (uint64_t)c });
		}
	struct lent now = lent_close_comm(g);
	REQUIRE(now.chunks > 0 && now.late == 0);
	REQUIRE(!lent_warns());
}

static void results_are_right_by_whatever_way_the_card_reads(void **state)
{
	(void)state;
	static const struct { int nranks; const char *env, *more; } ways[] = {
		{ 4, DMABUF, NULL }, { 2, DMABUF, "NCCL_DMABUF_ENABLE=0" }, { 2, "NCCL_NET_FORCE_FLUSH=1", NULL }, { 3, "TELPHER_VERBS_DEVICES=2", NULL },
		{ 2, "TELPHER_VERBS_PORTS=2", DMABUF }, { 2, "TELPHER_NET_DEPTH=2", "TELPHER_NET_CHUNK=32K" },
	};
	for (size_t w = 0; w < sizeof(ways) / sizeof(ways[0]); w++) {
		struct gpu_options o = lent_on_two_hosts(ways[w].nranks, ways[w].env, ways[w].more);
		assert_true(gpu_run(&o, many_shapes, NULL));
	}
}

/* What is multiplied before it is reduced isn't in the buffer as it is sent. */
static void multiplied(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	const size_t count = LARGE;
	float factor = 3, *values = malloc(count * sizeof(*values));
	ncclRedOp_t op;
	lent_open_comm(g);
	lent_register_pool(g);
	REQUIRE_OK(ncclRedOpCreatePreMulSum(&op, &factor, ncclFloat32, ncclScalarHostImmediate, g->comm));
	for (size_t apart = 0; apart < 2; apart++) {
		CUdeviceptr to = g->pool + apart * count * sizeof(*values);
		for (size_t i = 0; i < count; i++) values[i] = (float)(r->rank + 1) * (float)(i % 7);
		gpu_put(g, g->pool, values, count * sizeof(*values));
		REQUIRE_OK(ncclAllReduce(GPU_PTR(g->pool), GPU_PTR(to), count, ncclFloat32, op, g->comm, GPU_STREAM(g, 1)));
		gpu_sync(g, 1);
		gpu_get(g, values, to, count * sizeof(*values));
		for (size_t i = 0; i < count; i++) REQUIRE(values[i] == factor * (float)(r->nranks * (r->nranks + 1) / 2) * (float)(i % 7));
		ranks_barrier(r);
	}
	REQUIRE_OK(ncclRedOpDestroy(op, g->comm));
	free(values);
	REQUIRE(lent_close_comm(g).late == 0);
}

static void what_is_multiplied_first_is_never_lent_as_it_was(void **state)
{
	(void)state;
	for (int nranks = 2; nranks <= 4; nranks += 2) {
		struct gpu_options o = lent_on_two_hosts(nranks, DMABUF, NULL);
		assert_true(gpu_run(&o, multiplied, NULL));
	}
}

/* Several collectives in one kernel, and behind it in the stream what writes over all that they have lent: while the peers haven't begun. */
static void grouped(struct gpu_rank *g)
{
	enum { CALLS = 5 };
	struct ranks *r = g->r;
	struct gpu_op ops[CALLS];
	lent_open_comm(g);
	lent_register_pool(g);
	for (int round = 0; round < 3; round++) {
		gpu_reset(g);
		for (int c = 0; c < CALLS; c++) {
			ops[c] = (struct gpu_op){ .kind = few_kinds[c % STEPS], .rank = r->rank, .nranks = r->nranks, .count = LARGE / 4 + 7001 * (size_t)c, .type = ncclFloat32, .skew_send = c,
				.in_place = c == 3, .seed = (uint64_t)(10 * round + c) };
			op_prepare(g, &ops[c]);
		}
		ranks_barrier(r);
		if (r->rank % 2 != round % 2) usleep(20000);
		ncclGroupStart();
		for (int c = 0; c < CALLS; c++) REQUIRE_OK(op_issue(&ops[c], g->comm, g->streams[1]));
		REQUIRE_OK(ncclGroupEnd());
		for (int c = 0; c < CALLS; c++)
			if (!ops[c].in_place) CUDA_OK(MemsetD8Async(ops[c].send, 0xa5, ops[c].send_bytes / 2, g->streams[1]));
		gpu_sync(g, 1);
		for (int c = 0; c < CALLS; c++) op_check(g, &ops[c]);
	}
	struct lent now = lent_close_comm(g);
	REQUIRE(now.chunks > 0 && now.late == 0);
}

static void a_kernel_ends_when_all_that_its_calls_have_lent_is_through(void **state)
{
	(void)state;
	for (int nranks = 2; nranks <= 4; nranks += 2) {
		struct gpu_options o = lent_on_two_hosts(nranks, DMABUF, "TELPHER_NET_DEPTH=2");
		assert_true(gpu_run(&o, grouped, NULL));
	}
}

/* ---- what isn't */

struct refusal { const char *env, *more, *said; bool registers; };

static void nothing_is_lent(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	const struct refusal *f = g->arg;
	if (f->more && strncmp(f->more, "FAKE", 4) == 0 && !gpu_is_fake()) return;
	lent_open_comm(g);
	if (f->registers) lent_register_pool(g);
	for (int k = 0; k < STEPS; k++) lent_run_op(g, (struct gpu_op){ .kind = few_kinds[k], .count = LARGE / 2, .type = ncclFloat32 });
	struct lent now = lent_close_comm(g);
	REQUIRE(now.chunks == 0 && now.late == 0);
	if (f->said && !lent_log_has(f->said)) fprintf(stderr, "not in the log: %s\n", f->said);
	REQUIRE(!f->said || lent_log_has(f->said));
}

static void elsewhere_all_is_copied_and_the_reason_said(void **state)
{
	(void)state;
	static const struct refusal refusals[] = {
		{ DMABUF, NULL, NULL, false },
		{ DMABUF, "TELPHER_NET_LEND=0", "is copied into slots first: TELPHER_NET_LEND=0", true },
		{ DMABUF, "NCCL_NET_GDR_LEVEL=LOC", "is copied into slots first: the network doesn't read GPU memory", true },
		{ DMABUF, "NCCL_NET_GDR_READ=0", "is copied into slots first: the network doesn't read GPU memory", true },
		{ "NCCL_NET=Socket", NULL, "is copied into slots first: the network doesn't read GPU memory", true },
		{ DMABUF, "NCCL_LOCAL_REGISTER=0", "NCCL_LOCAL_REGISTER=0", true },
		/* The first is of the trial, the second of the buffer. */
		{ DMABUF, "FAKE_CUDA_FAIL=cuMemGetHandleForAddressRange:2:801", "can't register it", true },
	};
	for (size_t i = 0; i < sizeof(refusals) / sizeof(refusals[0]); i++) {
		struct gpu_options o = lent_on_two_hosts(2, refusals[i].env, refusals[i].more);
		assert_true(gpu_run(&o, nothing_is_lent, (void *)(uintptr_t)&refusals[i]));
	}
}

static void send_bytes(struct gpu_rank *g, CUdeviceptr buffer, size_t bytes, int value)
{
	struct ranks *r = g->r;
	unsigned char *got = malloc(bytes);
	gpu_fill(g, buffer, r->rank ? 0 : value, bytes);
	ranks_barrier(r);
	if (r->rank == 0) REQUIRE_OK(ncclSend(GPU_PTR(buffer), bytes, ncclUint8, 1, g->comm, GPU_STREAM(g, 1)));
	else REQUIRE_OK(ncclRecv(GPU_PTR(buffer), bytes, ncclUint8, 0, g->comm, GPU_STREAM(g, 1)));
	gpu_sync(g, 1);
	gpu_get(g, got, buffer, bytes);
	for (size_t i = 0; i < bytes; i++) REQUIRE(got[i] == value);
	free(got);
}

/* The send lies in the middle of what is registered, at odd places; then it reaches a byte farther on either side; over the edge of two ranges; and last, its receiver
 * has registered nothing. */
static void parts_of_ranges(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	const size_t margin = 1003, bytes = LARGE * 4;
	const CUdeviceptr buffer = g->pool + 3 * 4096 + 7, end = buffer + bytes, middle = buffer + bytes / 2 + 5;
	const struct { CUdeviceptr begins[2], ends[2]; } turns[] = {
		{ { buffer - margin }, { end + margin } }, { { buffer + 1 }, { end + margin } }, { { buffer - margin }, { end - 1 } },
		{ { buffer - margin, middle }, { middle, end + margin } }, { { buffer }, { end } },
	};
	const int last = (int)(sizeof(turns) / sizeof(turns[0])) - 1;
	lent_open_comm(g);
	for (int turn = 0; turn <= last; turn++) {
		void *handles[2] = { NULL };
		for (int i = 0; i < 2 && (turn < last || !r->rank); i++)
			if (turns[turn].begins[i]) handles[i] = lent_register_range(g, turns[turn].begins[i], turns[turn].ends[i] - turns[turn].begins[i]);
		send_bytes(g, buffer, bytes, 1 + turn);
		for (int i = 0; i < 2; i++) REQUIRE_OK(ncclCommDeregister(g->comm, handles[i]));
	}
	struct lent now = lent_close_comm(g);
	REQUIRE(lent_is(now, r->rank ? 0 : 2 * bytes));
}

static void only_what_lies_in_a_registered_range_as_a_whole_is_lent(void **state)
{
	(void)state;
	struct gpu_options o = lent_on_two_hosts(2, DMABUF, NULL);
	assert_true(gpu_run(&o, parts_of_ranges, NULL));
	o.env[2] = "NCCL_DMABUF_ENABLE=0";
	assert_true(gpu_run(&o, parts_of_ranges, NULL));
}

enum { SEGMENT = 2 << 20 };
static CUdeviceptr map_segments(struct gpu_rank *g, int count)
{
	CUmemAllocationProp properties = { .type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = { CU_MEM_LOCATION_TYPE_DEVICE, g->device } };
	CUmemAccessDesc access = { { CU_MEM_LOCATION_TYPE_DEVICE, g->device }, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	CUdeviceptr at;
	CUDA_OK(MemAddressReserve(&at, (size_t)count * SEGMENT, 0, 0, 0));
	for (int i = 0; i < count; i++) {
		CUmemGenericAllocationHandle handle;
		CUDA_OK(MemCreate(&handle, SEGMENT, &properties, 0));
		CUDA_OK(MemMap(at + (size_t)i * SEGMENT, SEGMENT, 0, handle, 0));
		CUDA_OK(MemRelease(handle));
	}
	CUDA_OK(MemSetAccess(at, (size_t)count * SEGMENT, &access, 1));
	return at;
}

/* Mapped in pieces: each is lent, what reaches over the edge of two isn't. */
static void segments(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	CUdeviceptr at = map_segments(g, 2);
	lent_open_comm(g);
	for (int i = 0; i < 2; i++) {
		void *handle = lent_register_range(g, at + (size_t)i * SEGMENT, SEGMENT);
		send_bytes(g, at + (size_t)i * SEGMENT, SEGMENT, 1 + i);
		REQUIRE_OK(ncclCommDeregister(g->comm, handle));
	}
	lent_register_range(g, at, 2 * SEGMENT);
	send_bytes(g, at, 2 * SEGMENT, 5);
	struct lent now = lent_close_comm(g);
	REQUIRE(lent_is(now, r->rank ? 0 : 2 * SEGMENT));
	REQUIRE(lent_log_has("is copied into slots first: the range isn't inside one allocation"));
	REQUIRE(!lent_warns());
}

static void mapped_memory_is_lent_a_piece_at_a_time(void **state)
{
	(void)state;
	struct gpu_options o = lent_on_two_hosts(2, DMABUF, NULL);
	assert_true(gpu_run(&o, segments, NULL));
}

/* Whether CUDA makes a DMA-BUF of pages that aren't all the allocation's or not, no warning comes of it. */
static void odd_sizes(struct gpu_rank *g)
{
	static const size_t sizes[] = { 1000003, 512, 3 * SEGMENT + 1 };
	struct ranks *r = g->r;
	lent_open_comm(g);
	for (int i = 0; i < 3; i++) {
		CUdeviceptr memory;
		CUDA_OK(MemAlloc(&memory, sizes[i]));
		void *handle = lent_register_range(g, memory, sizes[i]);
		send_bytes(g, memory, sizes[i], 1 + i);
		REQUIRE_OK(ncclCommDeregister(g->comm, handle));
		CUDA_OK(MemFree(memory));
	}
	REQUIRE(lent_close_comm(g).late == 0);
	REQUIRE(!lent_warns());
}

static void odd_sizes_give_no_warning(void **state)
{
	(void)state;
	struct gpu_options o = lent_on_two_hosts(2, DMABUF, NULL);
	assert_true(gpu_run(&o, odd_sizes, NULL));
}

static void a_handle_is_taken_back_once(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	lent_open_comm(g);
	void *handle = lent_register_pool(g), *again = lent_register_pool(g);
	REQUIRE_OK(ncclCommDeregister(g->comm, handle));
	REQUIRE_IS(ncclCommDeregister(g->comm, handle), ncclInvalidArgument);
	REQUIRE_ERROR_HAS("is not a registration of communicator");
	REQUIRE_IS(ncclCommDeregister(g->comm, &handle), ncclInvalidArgument);
	lent_run_op(g, (struct gpu_op){ .kind = ALL_GATHER, .count = LARGE, .type = ncclFloat32 });
	REQUIRE_OK(ncclCommDeregister(g->comm, again));
	REQUIRE(lent_close_comm(g).chunks > 0);
}

static void ranges_repeat_and_handles_are_checked(void **state)
{
	(void)state;
	struct gpu_options o = lent_on_two_hosts(2, DMABUF, NULL);
	assert_true(gpu_run(&o, a_handle_is_taken_back_once, NULL));
}

/* ---- graphs */

struct step { struct gpu_op op; CUgraphExec exec; };

static void capture_all(struct gpu_rank *g, struct step *steps)
{
	struct ranks *r = g->r;
	for (int k = 0; k < STEPS; k++) {
		steps[k].op = (struct gpu_op){ .kind = few_kinds[k], .rank = r->rank, .nranks = r->nranks, .count = LARGE / 2, .type = ncclFloat32 };
		op_prepare(g, &steps[k].op);
		ranks_barrier(r);
		CUDA_OK(StreamBeginCapture(g->streams[1], CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
		REQUIRE_OK(op_issue(&steps[k].op, g->comm, g->streams[1]));
		steps[k].exec = gpu_end_capture(g, 1);
	}
	ranks_barrier(r);
}

static void replay(struct gpu_rank *g, struct step *steps, uint64_t seed)
{
	for (int round = 0; round < 2; round++)
		for (int k = 0; k < STEPS; k++) {
			op_fill(g, &steps[k].op, seed + (uint64_t)round);
			CUDA_OK(GraphLaunch(steps[k].exec, g->streams[1]));
			gpu_sync(g, 1);
			op_check(g, &steps[k].op);
		}
	ranks_barrier(g->r);
}

static void end_graphs(struct step *steps)
{
	for (int k = 0; k < STEPS; k++) CUDA_OK(GraphExecDestroy(steps[k].exec));
}

/* The same graphs, replayed: while the buffer is registered; no more; again, as another one. */
static void graphs(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	struct step steps[STEPS];
	struct lent first, second, third;
	for (int turn = 0; turn < 3; turn++) {
		gpu_reset(g);
		lent_open_comm(g);
		void *handle = lent_register_pool(g);
		capture_all(g, steps);
		if (turn) REQUIRE_OK(ncclCommDeregister(g->comm, handle));
		ranks_barrier(r);
		if (turn == 2) handle = lent_register_pool(g);
		replay(g, steps, 10 * (uint64_t)turn);
		end_graphs(steps);
		*(turn == 0 ? &first : turn == 1 ? &second : &third) = lent_close_comm(g);
	}
	REQUIRE(first.chunks > 0 && first.late == 0);
	REQUIRE(second.chunks == first.chunks && second.late == 0);
	REQUIRE(third.chunks > second.chunks && third.late == 0);
}

static void a_captured_graph_lends_while_its_buffer_is_registered(void **state)
{
	(void)state;
	for (int nranks = 2; nranks <= 4; nranks += 2) {
		struct gpu_options o = lent_on_two_hosts(nranks, DMABUF, "NCCL_GRAPH_REGISTER=0");
		assert_true(gpu_run(&o, graphs, NULL));
	}
}

/* What is registered anew has the entry that the graph knows, but ends within the graph's buffer. */
static void the_rest_is_deregistered(struct gpu_rank *g)
{
	struct step s = { .op = { .kind = ALL_TO_ALL, .rank = g->r->rank, .nranks = g->r->nranks, .count = LARGE / 2, .type = ncclFloat32 } };
	struct ranks *r = g->r;
	gpu_reset(g);
	lent_open_comm(g);
	void *handle = lent_register_pool(g);
	op_prepare(g, &s.op);
	ranks_barrier(r);
	CUDA_OK(StreamBeginCapture(g->streams[1], CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
	REQUIRE_OK(op_issue(&s.op, g->comm, g->streams[1]));
	s.exec = gpu_end_capture(g, 1);
	REQUIRE_OK(ncclCommDeregister(g->comm, handle));
	lent_register_range(g, s.op.send, s.op.count * sizeof(float));
	ranks_barrier(r);
	for (uint64_t seed = 1; seed < 3; seed++) {
		op_fill(g, &s.op, seed);
		CUDA_OK(GraphLaunch(s.exec, g->streams[1]));
		gpu_sync(g, 1);
		op_check(g, &s.op);
	}
	ranks_barrier(r);
	CUDA_OK(GraphExecDestroy(s.exec));
	struct lent now = lent_close_comm(g);
	REQUIRE(now.chunks == 0 && now.late == 0);
}

static void a_captured_graph_lends_nothing_of_a_buffer_of_which_a_part_is_registered(void **state)
{
	(void)state;
	struct gpu_options o = lent_on_two_hosts(2, DMABUF, NULL);
	assert_true(gpu_run(&o, the_rest_is_deregistered, NULL));
}

static void sends_of_a_graph(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	const size_t bytes = 1 << 20;
	unsigned char *got = malloc(bytes);
	lent_open_comm(g);
	void *handle = lent_register_pool(g);
	CUDA_OK(StreamBeginCapture(g->streams[1], CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
	ncclGroupStart();
	for (size_t part = 0; part < 2; part++) {
		if (r->rank == 0) ncclSend(GPU_PTR(g->pool + part * bytes), bytes, ncclUint8, 1, g->comm, GPU_STREAM(g, 1));
		else ncclRecv(GPU_PTR(g->pool + part * bytes), bytes, ncclUint8, 0, g->comm, GPU_STREAM(g, 1));
	}
	REQUIRE_OK(ncclGroupEnd());
	CUgraphExec exec = gpu_end_capture(g, 1);
	for (int turn = 0; turn < 4; turn++) {
		for (int part = 0; part < 2; part++) gpu_fill(g, g->pool + (size_t)part * bytes, r->rank ? 0 : 10 * turn + part, bytes);
		if (turn == 2) REQUIRE_OK(ncclCommDeregister(g->comm, handle));
		CUDA_OK(GraphLaunch(exec, g->streams[1]));
		gpu_sync(g, 1);
		for (int part = 0; part < 2; part++) {
			gpu_get(g, got, g->pool + (size_t)part * bytes, bytes);
			for (size_t i = 0; i < bytes; i++) REQUIRE(got[i] == 10 * turn + part);
		}
	}
	CUDA_OK(GraphExecDestroy(exec));
	free(got);
	struct lent now = lent_close_comm(g);
	REQUIRE(lent_is(now, r->rank ? 0 : 4 * bytes));
}

static void captured_sends_are_lent_while_their_buffer_is_registered(void **state)
{
	(void)state;
	struct gpu_options o = lent_on_two_hosts(2, DMABUF, NULL);
	assert_true(gpu_run(&o, sends_of_a_graph, NULL));
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(of_every_collective_something_is_lent),
		cmocka_unit_test(a_send_is_lent_whole),
		cmocka_unit_test(results_are_right_by_whatever_way_the_card_reads),
		cmocka_unit_test(what_is_multiplied_first_is_never_lent_as_it_was),
		cmocka_unit_test(a_kernel_ends_when_all_that_its_calls_have_lent_is_through),
		cmocka_unit_test(elsewhere_all_is_copied_and_the_reason_said),
		cmocka_unit_test(only_what_lies_in_a_registered_range_as_a_whole_is_lent),
		cmocka_unit_test(mapped_memory_is_lent_a_piece_at_a_time),
		cmocka_unit_test(odd_sizes_give_no_warning),
		cmocka_unit_test(ranges_repeat_and_handles_are_checked),
		cmocka_unit_test(a_captured_graph_lends_while_its_buffer_is_registered),
		cmocka_unit_test(a_captured_graph_lends_nothing_of_a_buffer_of_which_a_part_is_registered),
		cmocka_unit_test(captured_sends_are_lent_while_their_buffer_is_registered),
	};
	return lent_main("cuda_lent", tests, sizeof(tests) / sizeof(tests[0]), argc > 1 ? argv[1] : NULL);
}

/* Registered buffers of GPU ranks on different hosts are sent from where they lie: ranks on two virtual hosts over the software card, which reads device memory.
 * That results are right, that data really is lent, where it isn't and why, and what a buffer's end does.
 *   test_cuda_lent [pattern of tests' names]
 * By hand on a real GPU too, which ranks share. */
#include <pthread.h>
#include <stdatomic.h>

#include "cuda/helper_ops.h"

#define GDR "NCCL_NET_GDR_LEVEL=SYS"
#define DMABUF "FAKE_CUDA_DMABUF=1"
enum { LARGE = 400000 };        /* elements: some chunks for each channel */
enum { STEPS = 3 };
static const enum op_kind few_kinds[STEPS] = { ALL_REDUCE, ALL_GATHER, ALL_TO_ALL };

static char folder[64];

static char *read_log(void)
{
	char path[128];
	snprintf(path, sizeof(path), "%s/%d", folder, (int)getpid());
	FILE *in = fopen(path, "r");
	char *text = calloc(1, 8 << 20);
	CHECK(in && text && fread(text, 1, (8 << 20) - 1, in) > 0);
	fclose(in);
	return text;
}

static bool log_has(const char *what)
{
	char *text = read_log();
	bool found = strstr(text, what) != NULL;
	free(text);
	return found;
}

/* But for a word of the card: a process that gets no processor for a second looks like one that has been stopped. */
static bool warns(void)
{
	char *text = read_log();
	bool found = false;
	for (const char *at = strstr(text, "NCCL WARN"); at && !found; at = strstr(at + 1, "NCCL WARN")) {
		const char *busy = strstr(at, "has served nothing for");
		found = !busy || (size_t)(busy - at) > strcspn(at, "\n");
	}
	free(text);
	return found;
}

/* What this rank's ended communicators have said of what they lent. */
struct lent { unsigned long long chunks, bytes, late; };
static struct lent lent_of(const struct ranks *r)
{
	struct lent all = { 0 }, one;
	char what[64], *text = read_log();
	snprintf(what, sizeof(what), "rank %d sent ", r->rank);
	for (const char *at = strstr(text, what); at; at = strstr(at + 1, what)) {
		CHECK(sscanf(at + strlen(what), "%llu chunks, %llu bytes, over the network from where they lay in its registered buffers, and copied %llu late", &one.chunks, &one.bytes,
			&one.late) == 3);
		all = (struct lent){ all.chunks + one.chunks, all.bytes + one.bytes, all.late + one.late };
	}
	free(text);
	return all;
}

/* So much was lent, and nothing copied late. A GPU has more channels, and so chunks that are too small for it. */
static bool is_lent(struct lent now, unsigned long long bytes)
{
	return now.late == 0 && (gpu_is_fake() || !bytes ? now.bytes == bytes : now.bytes > 0 && now.bytes <= bytes);
}

static void open_comm(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	ncclUniqueId *id = (ncclUniqueId *)r->shared->bytes;
	if (r->rank == 0) REQUIRE_OK(ncclGetUniqueId(id));
	ranks_barrier(r);
	REQUIRE_OK(ncclCommInitRank(&g->comm, r->nranks, *id, r->rank));
	ranks_barrier(r);
}

static void *register_range(struct gpu_rank *g, CUdeviceptr at, size_t bytes)
{
	struct ranks *r = g->r;
	void *handle = NULL;
	REQUIRE_OK(ncclCommRegister(g->comm, GPU_PTR(at), bytes, &handle));
	REQUIRE(handle);
	return handle;
}
static void *register_pool(struct gpu_rank *g) { return register_range(g, g->pool, g->pool_bytes); }

static struct lent close_comm(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	ranks_barrier(r);
	REQUIRE_OK(ncclCommDestroy(g->comm));
	g->comm = NULL;
	return lent_of(r);
}

static void run_op(struct gpu_rank *g, struct gpu_op o)
{
	o.rank = g->r->rank;
	o.nranks = g->r->nranks;
	op_run(g, &o, g->comm, 1);
}

static struct gpu_options on_two_hosts(int nranks, const char *env, const char *more)
{
	return (struct gpu_options){ .nranks = nranks, .nhosts = 2, .no_comm = true, .pool_bytes = (size_t)32 << 20, .env = { GDR, env, more } };
}

/* ---- what is lent */

/* Some rank lends of each kind: the plans say which. But what is reduced inside hosts first, and is no result, crosses from memory of ours. */
static void every_kind(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	struct lent before = { 0 };
	for (int kind = 0; kind < TRANSFERS; kind++) {
		open_comm(g);
		register_pool(g);
		run_op(g, (struct gpu_op){ .kind = (enum op_kind)kind, .count = LARGE, .type = ncclFloat32, .seed = (uint64_t)kind + 1 });
		struct lent now = close_comm(g);
		REQUIRE(now.late == 0);
		if (now.chunks > before.chunks) atomic_fetch_add(&r->shared->word[kind], 1);
		before = now;
		ranks_barrier(r);
		if ((kind == REDUCE || kind == REDUCE_SCATTER) && r->nranks > 2) continue;
		if (!atomic_load(&r->shared->word[kind])) fprintf(stderr, "of %s nothing was lent\n", op_kind_names[kind]);
		REQUIRE(atomic_load(&r->shared->word[kind]) > 0);
	}
	REQUIRE(log_has("is sent from where it lies, in large chunks"));
}

static void of_every_collective_something_is_lent(void **state)
{
	(void)state;
	for (int nranks = 2; nranks <= 4; nranks += 2) {
		struct gpu_options o = on_two_hosts(nranks, DMABUF, NULL);
		assert_true(gpu_run(&o, every_kind, NULL));
	}
}

/* All that a rank sends of its buffer to another host goes without a copy. */
static void all_of_a_send(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	const size_t bytes = (size_t)5 << 20;
	open_comm(g);
	register_pool(g);
	gpu_fill(g, g->pool, r->rank ? 1 : 2, bytes);
	ranks_barrier(r);
	if (r->rank == 0) REQUIRE_OK(ncclSend(GPU_PTR(g->pool), bytes, ncclUint8, 1, g->comm, GPU_STREAM(g, 1)));
	else REQUIRE_OK(ncclRecv(GPU_PTR(g->pool), bytes, ncclUint8, 0, g->comm, GPU_STREAM(g, 1)));
	gpu_sync(g, 1);
	unsigned char *got = malloc(bytes);
	gpu_get(g, got, g->pool, bytes);
	for (size_t i = 0; i < bytes; i++) REQUIRE(got[i] == 2);
	free(got);
	struct lent now = close_comm(g);
	REQUIRE(is_lent(now, r->rank ? 0 : bytes));
}

static void a_send_is_lent_whole(void **state)
{
	(void)state;
	struct gpu_options o = on_two_hosts(2, DMABUF, NULL);
	assert_true(gpu_run(&o, all_of_a_send, NULL));
}

/* Sizes below and above a chunk, any alignment, in place, types and operations. */
static void many_shapes(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	static const size_t counts[] = { 1, 4099, 60011, 250007 };
	open_comm(g);
	register_pool(g);
	for (int kind = 0; kind < NKINDS; kind++)
		for (int c = 0; c < 4; c++) {
			bool skewed = (kind + c) % 2;
			run_op(g, (struct gpu_op){ .kind = (enum op_kind)kind, .count = counts[c], .type = c % 3 == 1 ? ncclFloat16 : c % 3 ? ncclUint8 : ncclInt32, .root = c % r->nranks,
				.op = c % 2 ? ncclSum : ncclAvg, .in_place = c % 2 == 0 && kind < ALL_TO_ALL, .skew_send = skewed ? 3 : 0, .skew_recv = skewed ? 5 : 0, .seed = (uint64_t)c });
		}
	struct lent now = close_comm(g);
	REQUIRE(now.chunks > 0 && now.late == 0);
	REQUIRE(!warns());
}

static void results_are_right_by_whatever_way_the_card_reads(void **state)
{
	(void)state;
	static const struct { int nranks; const char *env, *more; } ways[] = {
		{ 4, DMABUF, NULL }, { 2, DMABUF, "NCCL_DMABUF_ENABLE=0" }, { 2, "NCCL_NET_FORCE_FLUSH=1", NULL }, { 3, "TELPHER_VERBS_DEVICES=2", NULL },
		{ 2, "TELPHER_VERBS_PORTS=2", DMABUF }, { 2, "TELPHER_NET_DEPTH=2", "TELPHER_NET_CHUNK=32K" },
	};
	for (size_t w = 0; w < sizeof(ways) / sizeof(ways[0]); w++) {
		struct gpu_options o = on_two_hosts(ways[w].nranks, ways[w].env, ways[w].more);
		assert_true(gpu_run(&o, many_shapes, NULL));
	}
}

/* ---- what isn't */

struct refusal { const char *env, *more, *said; bool registers; };

static void nothing_is_lent(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	const struct refusal *f = g->arg;
	if (f->more && strncmp(f->more, "FAKE", 4) == 0 && !gpu_is_fake()) return;
	open_comm(g);
	if (f->registers) register_pool(g);
	for (int k = 0; k < STEPS; k++) run_op(g, (struct gpu_op){ .kind = few_kinds[k], .count = LARGE / 2, .type = ncclFloat32 });
	struct lent now = close_comm(g);
	REQUIRE(now.chunks == 0 && now.late == 0);
	if (f->said && !log_has(f->said)) fprintf(stderr, "not in the log: %s\n", f->said);
	REQUIRE(!f->said || log_has(f->said));
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
		/* Of the trial, of the links' memory; then of the buffer. */
		{ DMABUF, "FAKE_CUDA_FAIL=cuMemGetHandleForAddressRange:2:801", "can't register it", true },
	};
	for (size_t i = 0; i < sizeof(refusals) / sizeof(refusals[0]); i++) {
		struct gpu_options o = on_two_hosts(2, refusals[i].env, refusals[i].more);
		assert_true(gpu_run(&o, nothing_is_lent, (void *)(uintptr_t)&refusals[i]));
	}
}

/* Only what lies in the range as a whole. */
static void parts_of_ranges(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	struct lent now;
	size_t margin = 1003, bytes = LARGE * 4;
	open_comm(g);
	/* The send lies in the middle of what is registered, at odd places; then it reaches a byte farther on either side. */
	for (int turn = 0; turn < 3; turn++) {
		CUdeviceptr buffer = g->pool + 3 * 4096 + 7;
		CUdeviceptr begin = turn == 1 ? buffer + 1 : buffer - margin, end = turn == 2 ? buffer + bytes - 1 : buffer + bytes + margin;
		unsigned char *got = malloc(bytes);
		void *handle = register_range(g, begin, end - begin);
		gpu_fill(g, buffer, r->rank + 1 + turn, bytes);
		ranks_barrier(r);
		if (r->rank == 0) REQUIRE_OK(ncclSend(GPU_PTR(buffer), bytes, ncclUint8, 1, g->comm, GPU_STREAM(g, 1)));
		else REQUIRE_OK(ncclRecv(GPU_PTR(buffer), bytes, ncclUint8, 0, g->comm, GPU_STREAM(g, 1)));
		gpu_sync(g, 1);
		gpu_get(g, got, buffer, bytes);
		for (size_t i = 0; i < bytes; i++) REQUIRE(got[i] == 1 + turn);
		REQUIRE_OK(ncclCommDeregister(g->comm, handle));
		free(got);
	}
	now = close_comm(g);
	REQUIRE(is_lent(now, r->rank ? 0 : bytes));
}

static void only_what_lies_in_a_registered_range_as_a_whole_is_lent(void **state)
{
	(void)state;
	struct gpu_options o = on_two_hosts(2, DMABUF, NULL);
	assert_true(gpu_run(&o, parts_of_ranges, NULL));
	o.env[2] = "NCCL_DMABUF_ENABLE=0";
	assert_true(gpu_run(&o, parts_of_ranges, NULL));
}

static void a_handle_is_taken_back_once(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	open_comm(g);
	void *handle = register_pool(g), *again = register_pool(g);
	REQUIRE_OK(ncclCommDeregister(g->comm, handle));
	REQUIRE_IS(ncclCommDeregister(g->comm, handle), ncclInvalidArgument);
	REQUIRE_ERROR_HAS("is not a registration of communicator");
	REQUIRE_IS(ncclCommDeregister(g->comm, &handle), ncclInvalidArgument);
	run_op(g, (struct gpu_op){ .kind = ALL_GATHER, .count = LARGE, .type = ncclFloat32 });
	REQUIRE_OK(ncclCommDeregister(g->comm, again));
	REQUIRE(close_comm(g).chunks > 0);
}

static void ranges_repeat_and_handles_are_checked(void **state)
{
	(void)state;
	struct gpu_options o = on_two_hosts(2, DMABUF, NULL);
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
		open_comm(g);
		void *handle = register_pool(g);
		capture_all(g, steps);
		if (turn) REQUIRE_OK(ncclCommDeregister(g->comm, handle));
		ranks_barrier(r);
		if (turn == 2) handle = register_pool(g);
		replay(g, steps, 10 * (uint64_t)turn);
		end_graphs(steps);
		*(turn == 0 ? &first : turn == 1 ? &second : &third) = close_comm(g);
	}
	REQUIRE(first.chunks > 0 && first.late == 0);
	REQUIRE(second.chunks == first.chunks && second.late == 0);
	REQUIRE(third.chunks > second.chunks && third.late == 0);
}

static void a_captured_graph_lends_while_its_buffer_is_registered(void **state)
{
	(void)state;
	for (int nranks = 2; nranks <= 4; nranks += 2) {
		struct gpu_options o = on_two_hosts(nranks, DMABUF, "NCCL_GRAPH_REGISTER=0");
		assert_true(gpu_run(&o, graphs, NULL));
	}
}

static void sends_of_a_graph(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	const size_t bytes = 1 << 20;
	unsigned char *got = malloc(bytes);
	open_comm(g);
	void *handle = register_pool(g);
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
	struct lent now = close_comm(g);
	REQUIRE(is_lent(now, r->rank ? 0 : 4 * bytes));
}

static void captured_sends_are_lent_while_their_buffer_is_registered(void **state)
{
	(void)state;
	struct gpu_options o = on_two_hosts(2, DMABUF, NULL);
	assert_true(gpu_run(&o, sends_of_a_graph, NULL));
}

/* ---- ends of buffers */

enum { PIECE = 4 << 20 };

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

/* Memory of its own, and other memory at the same address. On whole pages, as what is so large is on a GPU. */
enum { PAGE = 4096 };
static CUdeviceptr take_piece(CUdeviceptr *memory)
{
	CUDA_OK(MemAlloc(memory, PIECE + PAGE));
	return (*memory + PAGE - 1) / PAGE * PAGE;
}

static void renew(struct gpu_rank *g, CUdeviceptr *memory)
{
	struct ranks *r = g->r;
	CUdeviceptr before = *memory;
	CUDA_OK(MemFree(*memory));
	take_piece(memory);
	REQUIRE(!gpu_is_fake() || *memory == before);
}

static void memory_is_used_again(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	CUdeviceptr memory, buffer = take_piece(&memory);
	open_comm(g);
	void *handle = register_range(g, buffer, PIECE);
	send_and_check(g, buffer, 1);           /* lent */
	REQUIRE_OK(ncclCommDeregister(g->comm, handle));
	renew(g, &memory);
	send_and_check(g, buffer, 2);
	handle = register_range(g, buffer, PIECE);
	send_and_check(g, buffer, 3);           /* lent */
	/* Freed without a word: what is there now isn't what was registered. */
	renew(g, &memory);
	send_and_check(g, buffer, 4);
	void *other = register_range(g, buffer, PIECE);
	send_and_check(g, buffer, 5);           /* lent */
	REQUIRE_OK(ncclCommDeregister(g->comm, handle));
	send_and_check(g, buffer, 6);           /* lent */
	REQUIRE_OK(ncclCommDeregister(g->comm, other));
	send_and_check(g, buffer, 7);
	struct lent now = close_comm(g);
	REQUIRE(is_lent(now, r->rank ? 0 : 4ull * PIECE));
	CUDA_OK(MemFree(memory));
}

static void memory_that_was_freed_is_never_read_whoever_has_its_address(void **state)
{
	(void)state;
	struct gpu_options o = on_two_hosts(2, DMABUF, NULL);
	assert_true(gpu_run(&o, memory_is_used_again, NULL));
	o.env[2] = "NCCL_DMABUF_ENABLE=0";
	assert_true(gpu_run(&o, memory_is_used_again, NULL));
}

/* The receiver isn't there yet, so the kernel has left some chunks and will leave more. */
static void deregistered_under_way(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	open_comm(g);
	void *handle = register_pool(g);
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
	struct lent now = close_comm(g);
	/* A GPU has more channels: all may have been sent before. */
	if (r->rank || !gpu_is_fake()) return;
	REQUIRE(now.bytes >= PIECE && now.bytes < 2ull * PIECE && now.late > 0);
	REQUIRE(log_has("is copied into its slot late"));
}

static void what_is_deregistered_while_a_kernel_lends_it_is_copied(void **state)
{
	(void)state;
	/* Few small slots, or all has been sent before. */
	struct gpu_options o = on_two_hosts(2, "TELPHER_NET_DEPTH=2", "TELPHER_NET_CHUNK=32K");
	assert_true(gpu_run(&o, deregistered_under_way, NULL));
}

/* ---- aborts */

/* Rank 0 has lent, and nobody takes it; then it has its memory back, and nothing reads that any more. */
static void aborted(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	bool connected = *(const bool *)g->arg;
	CUdeviceptr memory, buffer = take_piece(&memory);
	open_comm(g);
	register_range(g, buffer, PIECE);
	if (connected) send_and_check(g, buffer, 1);
	ranks_barrier(r);
	if (r->rank == 0) {
		REQUIRE_OK(ncclSend(GPU_PTR(buffer), PIECE, ncclUint8, 1, g->comm, GPU_STREAM(g, 1)));
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
	for (int connected = 0; connected < 2; connected++) {
		bool arg = connected;
		struct gpu_options o = on_two_hosts(2, DMABUF, NULL);
		assert_true(gpu_run(&o, aborted, &arg));
	}
}

/* A kernel finds that the calls differ, and ends with chunks on loan. */
static void fails(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	ncclResult_t error = ncclSuccess;
	open_comm(g);
	register_pool(g);
	send_and_check(g, g->pool, 1);
	ncclGroupStart();
	ncclSend(GPU_PTR(g->pool), PIECE, ncclUint8, !r->rank, g->comm, GPU_STREAM(g, 1));
	ncclRecv(GPU_PTR(g->pool + PIECE), r->rank ? PIECE : PIECE / 2, ncclUint8, !r->rank, g->comm, GPU_STREAM(g, 1));
	REQUIRE_OK(ncclGroupEnd());
	for (uint64_t end = ranks_now_ms() + (uint64_t)ranks_patience_ms(30000); error == ncclSuccess && ranks_now_ms() < end; usleep(1000))
		REQUIRE_OK(ncclCommGetAsyncError(g->comm, &error));
	REQUIRE(error != ncclSuccess);
	REQUIRE_OK(ncclCommAbort(g->comm));
	gpu_sync(g, 1);
	g->comm = NULL;
}

static void an_error_takes_back_what_was_lent(void **state)
{
	(void)state;
	struct gpu_options o = on_two_hosts(2, DMABUF, NULL);
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
			*handle = register_range(g, g->pool + from, g->pool_bytes - from - below(&random, g->pool_bytes / 8));
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
	open_comm(g);
	REQUIRE(!pthread_create(&thread, NULL, meddle, &m));
	for (int i = 0; i < (SANITIZED ? 25 : 60); i++) {
		struct gpu_op o;
		draw_op(&random, r->nranks, &o);
		if (below(&random, 2)) o.count = 20000 + below(&random, 120000 / (size_t)r->nranks);
		run_op(g, o);
	}
	atomic_store(&m.ends, true);
	REQUIRE(!pthread_join(thread, NULL));
	REQUIRE(m.turns > 0);
	struct lent now = close_comm(g);
	atomic_fetch_add(&r->shared->word[0], (int)now.chunks);
	ranks_barrier(r);
	REQUIRE(atomic_load(&r->shared->word[0]) > 0);
}

static void random_operations_while_another_thread_registers_and_deregisters(void **state)
{
	(void)state;
	struct gpu_options o = on_two_hosts(4, DMABUF, NULL);
	o.ndevices = 2;
	assert_true(gpu_run(&o, random_ops, NULL));
	o = on_two_hosts(2, DMABUF, "NCCL_DMABUF_ENABLE=0");
	assert_true(gpu_run(&o, random_ops, NULL));
}

static void clean(void)
{
	char command[96];
	snprintf(command, sizeof(command), "rm -rf %s", folder);
	if (system(command)) return;
}

int main(int argc, char **argv)
{
	char file[96];
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(of_every_collective_something_is_lent), cmocka_unit_test(a_send_is_lent_whole),
		cmocka_unit_test(results_are_right_by_whatever_way_the_card_reads), cmocka_unit_test(elsewhere_all_is_copied_and_the_reason_said),
		cmocka_unit_test(only_what_lies_in_a_registered_range_as_a_whole_is_lent), cmocka_unit_test(ranges_repeat_and_handles_are_checked),
		cmocka_unit_test(a_captured_graph_lends_while_its_buffer_is_registered), cmocka_unit_test(captured_sends_are_lent_while_their_buffer_is_registered),
		cmocka_unit_test(memory_that_was_freed_is_never_read_whoever_has_its_address),
		cmocka_unit_test(what_is_deregistered_while_a_kernel_lends_it_is_copied), cmocka_unit_test(an_abort_takes_back_what_was_lent),
		cmocka_unit_test(an_error_takes_back_what_was_lent), cmocka_unit_test(random_operations_while_another_thread_registers_and_deregisters),
	};
	gpu_need();
	strcpy(folder, "/tmp/telpher_lent_XXXXXX");
	if (!mkdtemp(folder)) return 1;
	snprintf(file, sizeof(file), "%s/%%p", folder);
	setenv("NCCL_IB_HCA", "telpher", 1);
	setenv("TELPHER_VERBS_HIDE_REAL", "1", 1);
	setenv("NCCL_DEBUG", "INFO", 1);
	setenv("NCCL_DEBUG_SUBSYS", "INIT,NET,REG", 1);
	setenv("NCCL_DEBUG_FILE", file, 1);
	if (argc > 1) cmocka_set_test_filter(argv[1]);
	int failed = cmocka_run_group_tests_name("cuda_lent", tests, NULL, NULL);
	clean();
	return failed;
}

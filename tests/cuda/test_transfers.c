/* Sends and receives on GPU ranks: groups of every shape. Each message has its own data: (from, to, nth between the two).
 *   test_cuda_transfers [pattern of tests' names] */
#include "cuda/helper_ops.h"

enum { MOST_RANKS = SANITIZED ? 4 : 8, ROOM = 8, MOST = 64, MARGIN = 64, RUBBISH = 0x5d };

struct message { bool sends; int peer, nth; size_t bytes; CUdeviceptr at; };
struct exchange { struct message all[MOST]; int n; };

static unsigned char byte_of(int from, int to, int nth, size_t i) { return (unsigned char)((size_t)(from * 31 + to * 17 + nth * 7) + i + i / 251); }

static void add(struct gpu_rank *g, struct exchange *x, bool sends, int peer, size_t bytes)
{
	struct ranks *r = g->r;
	struct message m = { .sends = sends, .peer = peer, .bytes = bytes };
	REQUIRE(x->n < MOST);
	for (int i = 0; i < x->n; i++) m.nth += x->all[i].sends == sends && x->all[i].peer == peer;
	m.at = gpu_take(g, bytes + 2 * MARGIN, (size_t)(x->n % 3)) + MARGIN;
	unsigned char *image = malloc(bytes + 2 * MARGIN);
	memset(image, RUBBISH, bytes + 2 * MARGIN);
	for (size_t i = 0; sends && i < bytes; i++) image[MARGIN + i] = byte_of(r->rank, peer, m.nth, i);
	gpu_put(g, m.at - MARGIN, image, bytes + 2 * MARGIN);
	free(image);
	x->all[x->n++] = m;
}

static void issue(struct gpu_rank *g, const struct exchange *x, int first, int end, ncclComm_t comm, int stream)
{
	struct ranks *r = g->r;
	for (int i = first; i < end; i++) {
		const struct message *m = &x->all[i];
		if (m->sends) REQUIRE_OK(ncclSend(GPU_PTR(m->at), m->bytes, ncclUint8, m->peer, comm, GPU_STREAM(g, stream)));
		else REQUIRE_OK(ncclRecv(GPU_PTR(m->at), m->bytes, ncclUint8, m->peer, comm, GPU_STREAM(g, stream)));
	}
}

static void check(struct gpu_rank *g, struct exchange *x)
{
	struct ranks *r = g->r;
	for (int i = 0; i < x->n; i++) {
		const struct message *m = &x->all[i];
		if (m->sends) continue;
		unsigned char *image = malloc(m->bytes + 2 * MARGIN);
		gpu_get(g, image, m->at - MARGIN, m->bytes + 2 * MARGIN);
		for (size_t k = 0; k < m->bytes; k++) REQUIRE(image[MARGIN + k] == byte_of(m->peer, r->rank, m->nth, k));
		for (size_t k = 0; k < MARGIN; k++) REQUIRE(image[k] == RUBBISH && image[MARGIN + m->bytes + k] == RUBBISH);
		free(image);
	}
	x->n = 0;
	gpu_reset(g);
}

static void exchange(struct gpu_rank *g, struct exchange *x)
{
	struct ranks *r = g->r;
	REQUIRE_OK(ncclGroupStart());
	issue(g, x, 0, x->n, g->comm, 1);
	REQUIRE_OK(ncclGroupEnd());
	gpu_sync(g, 1);
	check(g, x);
}

static const size_t sizes[] = { 0, 1, 16, 1000, 70001, SANITIZED ? 90000 : 300000 };
#define NSIZES (sizeof(sizes) / sizeof(sizes[0]))

/* Around the ring, and back; one way alone. */
static void ring(struct gpu_rank *g)
{
	struct exchange x = { .n = 0 };
	int rank = g->r->rank, n = g->r->nranks, right = (rank + 1) % n, left = (rank + n - 1) % n;
	for (size_t s = 0; s < NSIZES; s++) {
		size_t bytes = sizes[s] * (sizes[s] > 1000 ? gpu_scale() : 1);
		add(g, &x, true, right, bytes);
		add(g, &x, false, left, bytes);
		exchange(g, &x);
		/* In this order, for of two ranks the left one is the right one. */
		add(g, &x, false, right, bytes / 2);
		add(g, &x, true, left, bytes / 2);
		add(g, &x, true, right, bytes);
		add(g, &x, false, left, bytes);
		exchange(g, &x);
	}
}

/* Without a group: rank 0 to 1, to 2, …; each call is an operation of its own. */
static void chain(struct gpu_rank *g)
{
	struct exchange x = { .n = 0 };
	int rank = g->r->rank, n = g->r->nranks;
	for (size_t s = 0; s < NSIZES; s++) {
		if (rank > 0) add(g, &x, false, rank - 1, sizes[s]);
		if (rank < n - 1) add(g, &x, true, rank + 1, sizes[s]);
		issue(g, &x, 0, x.n, g->comm, 1);
		gpu_sync(g, 1);
		check(g, &x);
	}
}

/* Everyone to everyone, itself too, each pair its own sizes. */
static void all_pairs(struct gpu_rank *g)
{
	struct exchange x = { .n = 0 };
	int rank = g->r->rank, n = g->r->nranks;
	for (int round = 0; round < 3; round++) {
		for (int p = 0; p < n; p++) add(g, &x, true, (rank + p) % n, (size_t)(rank * 1000 + (rank + p) % n * 37 + round * 5000));
		for (int p = 0; p < n; p++) add(g, &x, false, (rank + n - p) % n, (size_t)((rank + n - p) % n * 1000 + rank * 37 + round * 5000));
		exchange(g, &x);
	}
}

/* Several messages between the same two in one group arrive in their order, whatever their sizes. */
static void many_of_a_pair(struct gpu_rank *g)
{
	struct exchange x = { .n = 0 };
	int rank = g->r->rank, other = rank ^ 1;
	if (other < g->r->nranks) {
		for (int i = 0; i < 12; i++) add(g, &x, true, other, (size_t)(i * i * 97 % 9001));
		for (int i = 0; i < 12; i++) add(g, &x, false, other, (size_t)(i * i * 97 % 9001));
	}
	exchange(g, &x);
}

/* All to one, one to all. */
static void one_sided(struct gpu_rank *g)
{
	struct exchange x = { .n = 0 };
	int rank = g->r->rank, n = g->r->nranks;
	for (int way = 0; way < 2; way++) {
		for (int p = 1; p < n && rank == 0; p++) add(g, &x, way, p, 40000);
		if (rank) add(g, &x, !way, 0, 40000);
		exchange(g, &x);
	}
}

/* Two communicators, and a collective between transfers, in one group. */
static void mixed_group(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	struct exchange x = { .n = 0 };
	ncclComm_t other;
	int rank = r->rank, n = r->nranks, right = (rank + 1) % n, left = (rank + n - 1) % n;
	struct gpu_op o = { .kind = ALL_REDUCE, .rank = rank, .nranks = n, .count = 999, .type = ncclFloat32, .op = ncclSum, .seed = 3 };
	/* Reversed ranks. */
	REQUIRE_OK(ncclCommSplit(g->comm, 0, -rank, &other, NULL));
	for (int round = 0; round < 3; round++) {
		op_prepare(g, &o);
		add(g, &x, true, right, 5000);
		add(g, &x, false, left, 5000);
		int first = x.n;
		add(g, &x, true, left, 3000);
		add(g, &x, false, right, 3000);
		REQUIRE_OK(ncclGroupStart());
		issue(g, &x, 0, first, g->comm, 1);
		REQUIRE_OK(op_issue(&o, g->comm, g->streams[1]));
		for (int i = first; i < x.n; i++) {
			struct message m = x.all[i];
			m.peer = n - 1 - m.peer;
			if (m.sends) REQUIRE_OK(ncclSend(GPU_PTR(m.at), m.bytes, ncclUint8, m.peer, other, GPU_STREAM(g, 1)));
			else REQUIRE_OK(ncclRecv(GPU_PTR(m.at), m.bytes, ncclUint8, m.peer, other, GPU_STREAM(g, 1)));
		}
		REQUIRE_OK(ncclGroupEnd());
		gpu_sync(g, 1);
		op_check(g, &o);
		/* With two ranks left is right, and the second of the two messages came by the other communicator. */
		check(g, &x);
	}
	REQUIRE_OK(ncclCommDestroy(other));
}

/* What all ranks draw alike: how many transfers each has for each other, their sizes. */
static void draw_sizes(struct random *random, int n, int *counts, size_t (*bytes)[3])
{
	static const size_t some[] = { 0, 100, 4095, 4096, 5003, 20000, 70001, 200003 };
	for (int i = 0; i < n * n; i++) {
		counts[i] = (int)below(random, n > 4 ? 3 : 4);
		for (int k = 0; k < 3; k++) bytes[i][k] = some[below(random, n > 4 ? 6 : 8)];
	}
}

/* Groups in a row, without a look at the results between them, and often a collective before them: any number of transfers of any sizes for each two ranks, in an order
 * that each rank has for itself, but for those of two ranks and direction. */
static void of_all_sizes_in_any_order(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	enum { ROUNDS = SANITIZED ? 4 : 8 };
	struct random all = { 11 }, own = { 1000 + (uint64_t)r->rank };
	const int rank = r->rank, n = r->nranks;
	int counts[ROOM * ROOM];
	size_t bytes[ROOM * ROOM][3];
	for (int round = 0; round < ROUNDS; round++) {
		struct exchange x = { .n = 0 };
		const struct gpu_op drawn = { .kind = round % 2 ? ALL_REDUCE : (enum op_kind)below(&all, NKINDS), .rank = rank, .nranks = n, .count = 20000, .type = ncclFloat32, .op = ncclSum, .seed = 5 };
		struct gpu_op o = drawn;
		bool collective = round % 4 != 0;
		if (collective) op_prepare(g, &o);
		if (collective) REQUIRE_OK(op_issue(&o, g->comm, g->streams[1]));
		for (int group = 0; group < 2; group++) {
			int next[2 * ROOM] = { 0 }, left = 0, first = x.n;
			draw_sizes(&all, n, counts, bytes);
			for (int p = 0; p < n; p++) left += counts[rank * n + p] + counts[p * n + rank];
			while (left) {
				int p = (int)below(&own, (size_t)n);
				bool sends = below(&own, 2);
				const int which = sends ? rank * n + p : p * n + rank, k = next[2 * p + sends];
				if (k == counts[which]) continue;
				next[2 * p + sends]++;
				left--;
				add(g, &x, sends, p, bytes[which][k]);
			}
			if (x.n == first) continue;
			REQUIRE_OK(ncclGroupStart());
			issue(g, &x, first, x.n, g->comm, 1);
			REQUIRE_OK(ncclGroupEnd());
		}
		gpu_sync(g, 1);
		if (collective) op_check(g, &o);
		check(g, &x);
	}
}

/* Rank 0 gives to 1 and 2 in one group; 1 takes it only after it has heard from 2, which answers only to what it has got. */
static void who_is_not_ready_holds_up_nobody_else(struct gpu_rank *g)
{
	const int rank = g->r->rank, n = g->r->nranks;
	static const size_t some[] = { 100, 90000 };
	for (int way = 0; way < 16 && n > 2; way++) {
		struct exchange x = { .n = 0 };
		const size_t to_one = some[way & 1], to_two = some[way >> 1 & 1], on = some[way >> 2 & 1];
		const int one = way >> 3 ? 2 : 1, two = 3 - one;
		if (rank == 0) {
			add(g, &x, true, one, to_one);
			add(g, &x, true, two, to_two);
			exchange(g, &x);
		} else if (rank <= 2) {
			add(g, &x, false, rank == one ? two : 0, rank == one ? on : to_two);
			add(g, &x, rank == two, rank == one ? 0 : one, rank == one ? to_one : on);
			for (int i = 0; i < 2; i++) issue(g, &x, i, i + 1, g->comm, 1);
			gpu_sync(g, 1);
			check(g, &x);
		}
	}
}

static void shapes(struct gpu_rank *g)
{
	ring(g);
	chain(g);
	all_pairs(g);
	many_of_a_pair(g);
	one_sided(g);
	mixed_group(g);
	of_all_sizes_in_any_order(g);
	who_is_not_ready_holds_up_nobody_else(g);
	const char *table = getenv("TELPHER_CUDA_TABLE");
	if (gpu_is_fake() && table && strstr(table, "transfers=4K")) {
		struct ranks *r = g->r;
		REQUIRE(gpu_count("tp_streams_piped") > 0);
	}
}

static bool run_with(int nranks, bool threads, int ndevices, int nhosts, const char *const *settings)
{
	struct gpu_options o = { .nranks = nranks, .threads = threads, .ndevices = ndevices, .nhosts = nhosts, .pool_bytes = (size_t)12 << 20 };
	for (int i = 0; settings[i]; i++) o.env[i] = settings[i];
	return gpu_run(&o, shapes, NULL);
}
static bool run(int nranks, bool threads, int ndevices, int nhosts, const char *setting)
{
	return run_with(nranks, threads, ndevices, nhosts, (const char *const[]){ setting, NULL });
}

static void in_processes(void **state)
{
	(void)state;
	for (int n = 1; n <= MOST_RANKS; n = n < 4 ? n + 1 : 2 * n) assert_true(run(n, false, 1, 1, NULL));
}
static void in_threads(void **state)
{
	(void)state;
	for (int n = 2; n <= MOST_RANKS; n *= 2) assert_true(run(n, true, 1, 1, NULL));
}
static void on_several_gpus(void **state)
{
	(void)state;
	assert_true(run(4, false, 4, 1, NULL));
	assert_true(run(3, true, 3, 1, NULL));
	assert_true(run(4, false, 4, 1, "FAKE_CUDA_PEER_GROUP=2"));
	assert_true(run(2, false, 1, 1, "FAKE_CUDA_VMM=0"));
}
static void by_lines_of_128_bytes(void **state)
{
	(void)state;
	for (int n = 2; n <= MOST_RANKS; n = n < 4 ? n + 1 : 2 * n) assert_true(run(n, false, 1, 1, "TELPHER_LL128=on"));
	assert_true(run(4, true, 2, 1, "TELPHER_LL128=on"));
}
/* With few blocks chunks go round their rings. */
static void large_ones_through_pipes(void **state)
{
	(void)state;
	static const char *const all[] = { "TELPHER_LL128=on", "TELPHER_CUDA_TABLE=transfers=4K,pipes=2", NULL };
	static const char *const mixed[] = { "TELPHER_LL128=on", "NCCL_MAX_CTAS=1",
		"TELPHER_CUDA_TABLE=two_shot=4K:4K:4K,gather=4K:4K:4K,scatter=4K:4K:4K,pairs=4K:4K:4K,rooted=4K:4K:4K,two_step=0:0:0,two_step_from=4K,reduce=4K,transfers=4K,pipes=2",
		NULL };
	for (int n = 2; n <= MOST_RANKS; n = n < 4 ? n + 1 : 2 * n) assert_true(run_with(n, n % 2, 1, 1, mixed));
	assert_true(run_with(4, true, 2, 1, mixed));
	assert_true(run_with(3, false, 3, 1, all));
	assert_true(run_with(2, true, 2, 1, all));
}
static void between_hosts(void **state)
{
	(void)state;
	assert_true(run(2, false, 1, 2, NULL));
	assert_true(run(5, false, 1, 2, NULL));
}

int main(int argc, char **argv)
{
	gpu_need();
	if (argc > 1) cmocka_set_test_filter(argv[1]);
	const struct CMUnitTest tests[] = { cmocka_unit_test(in_processes), cmocka_unit_test(in_threads), cmocka_unit_test(on_several_gpus),
		cmocka_unit_test(by_lines_of_128_bytes), cmocka_unit_test(large_ones_through_pipes), cmocka_unit_test(between_hosts) };
	return cmocka_run_group_tests(tests, NULL, NULL);
}

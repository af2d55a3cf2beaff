/* Fused kernels, run by the emulator: ranks are threads, each with its own region, comm and epochs. Results are compared bit for
 * bit with the host executor's arithmetic, sources in rank order. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>

#include "cuda/emulator_run.h"
#include "exec/cuda/fused.h"
#include "exec/cuda/internal.h"
#include "exec/helper_reduce.h"

enum { MOST_RANKS = 16, GUARD = 32, GUARD_BYTE = 0xa5 };

struct call {
	enum tp_coll coll;
	enum tp_algo algo;
	int root;
	ncclDataType_t type;
	ncclRedOp_t op;
	int scaling;                            /* 0: none, 1: average, 2: multiplied first, 3: the same by a scalar in device memory */
	size_t count, shift;                    /* shift: of the buffers, in elements */
	bool in_place, lines128, windows;
	uint32_t tag;
};

struct rank {
	int rank;
	struct world *world;
	struct tp_dev_comm comm;
	struct tp_dev_status status;
	struct tp_fused fused;
	void *region;
	uint32_t tag_differs;
	uint64_t in_bases[MOST_RANKS], out_bases[MOST_RANKS];   /* windows: of the call at hand */
	int failed;
};

/* A call's buffers, until all are checked: nobody waits between calls. */
struct buffers { unsigned char *in_memory, *out_memory, *in, *out; size_t block, nin, nout, shift; };

struct world {
	int n, nchannels;
	size_t region_bytes;
	const struct call *calls;
	int ncalls;
	struct tp_layout *layout;
	pthread_barrier_t barrier;
	struct rank ranks[MOST_RANKS];
};

/* ---- late ranks ---- */

static int lateness;                        /* of 100 looks so many are late */
unsigned tp_lines_test_delay(void);
unsigned tp_lines_test_delay(void)
{
	/* Of all ranks: a thread's own would be of several coroutines, which the thread sanitizer takes for threads. */
	static _Atomic uint64_t turn;
	if (!lateness) return 0;
	uint64_t state = (atomic_fetch_add_explicit(&turn, 1, memory_order_relaxed) + 1) * 0x9e3779b97f4a7c15u;
	reduce_draw(&state);
	if ((int)(reduce_draw(&state) % 100) >= lateness) return 0;
	if (reduce_draw(&state) % 16 == 0) usleep((useconds_t)(reduce_draw(&state) % 300));
	return (unsigned)(reduce_draw(&state) % (reduce_draw(&state) % 8 ? 20 : 2000));
}

/* ---- what should come out ---- */

static bool many_in(enum tp_coll c) { return c == TP_REDUCE_SCATTER || c == TP_ALL_TO_ALL || c == TP_SCATTER; }
static bool many_out(enum tp_coll c) { return c == TP_ALL_GATHER || c == TP_ALL_TO_ALL || c == TP_GATHER; }
static bool has_in(const struct call *c, int rank) { return (c->coll != TP_BROADCAST && c->coll != TP_SCATTER) || rank == c->root; }
static bool has_out(const struct call *c, int rank) { return (c->coll != TP_REDUCE && c->coll != TP_GATHER) || rank == c->root; }

static void fill_reduce(const struct call *c, int n, struct tp_reduce *r)
{
	*r = (struct tp_reduce){ .type = c->type, .op = c->op, .pre_scale = 1, .post_scale = 1, .pre_integer = 1, .post_divisor = 1 };
	if (c->scaling == 1) tp_reduce_fill_avg(r, n);
	if (c->scaling < 2) return;
	r->pre = true;
	r->pre_scale = 0.75;
	r->pre_integer = 3;
}

static const void *device_scalar(ncclDataType_t type)
{
	static unsigned char scalars[ncclNumTypes][16];
	static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
	pthread_mutex_lock(&lock);
	if (type >= ncclFloat16) reduce_encode(type, 0.75, scalars[type]);
	else scalars[type][0] = 3;
	pthread_mutex_unlock(&lock);
	return scalars[type];
}

static void fill_input(const struct call *c, int rank, int block, size_t bytes, unsigned char *to)
{
	uint64_t state = ((uint64_t)c->tag << 20 | (uint64_t)rank << 8 | (uint64_t)block) * 0x9e3779b97f4a7c15u + 1;
	for (int i = 0; i < 4; i++) reduce_draw(&state);
	reduce_fill(c->type, to, bytes, c->tag % 2, &state);
}

/* One block of a rank's output. */
static void expect(const struct world *w, const struct call *c, int rank, int block, size_t bytes, unsigned char *out)
{
	int slice = c->coll == TP_REDUCE_SCATTER || c->coll == TP_ALL_TO_ALL || c->coll == TP_SCATTER ? rank : 0;
	switch (c->coll) {
	case TP_ALL_GATHER: case TP_GATHER: case TP_ALL_TO_ALL:
		fill_input(c, block, slice, bytes, out);
		return;
	case TP_BROADCAST: case TP_SCATTER:
		fill_input(c, c->root, slice, bytes, out);
		return;
	default:
		break;
	}
	unsigned char *all = malloc(bytes * (size_t)w->n + 1);
	const void *from[MOST_RANKS];
	struct tp_reduce r;
	fill_reduce(c, w->n, &r);
	for (int p = 0; p < w->n; p++) {
		unsigned char *at = all + bytes * (size_t)p;
		fill_input(c, p, slice, bytes, at);
		from[p] = at;
		if (r.pre) tp_reduce_run(&r, false, at, &from[p], 1, 1, bytes);
	}
	tp_reduce_run(&r, true, out, from, w->n, 0, bytes);
	free(all);
}

/* ---- a rank ---- */

#define CHECK(rank_, condition) do { \
	if (!(condition)) { \
		fprintf(stderr, "%s:%d: rank %d: %s\n", __FILE__, __LINE__, (rank_)->rank, #condition); \
		(rank_)->failed = __LINE__; \
		return false; \
	} \
} while (0)

static const char *type_name(ncclDataType_t type)
{
	static const char *const names[] = { "i8", "u8", "i32", "u32", "i64", "u64", "f16", "f32", "f64", "bf16", "e4m3", "e5m2" };
	return names[type];
}

static const struct tp_emulated_kernel *kernel_of(const struct tp_fused_launch *launch, const struct call *c)
{
	static const char *const kinds[] = { "ll", "ll128", "window" }, *const ops[] = { "sum", "prod", "max", "min" };
	char name[64];
	const char *type = type_name(c->type);
	if (c->op <= ncclProd && type[0] == 'i') type = type_name((ncclDataType_t)(c->type + 1));
	if (launch->reduces) snprintf(name, sizeof(name), "tp_%s_%s_%s", kinds[launch->kind], type, ops[c->op]);
	else snprintf(name, sizeof(name), "tp_%s_copy", kinds[launch->kind]);
	return tp_emulator_find(name);
}

static bool prepare(struct rank *k, const struct call *c, struct buffers *b)
{
	struct world *w = k->world;
	size_t each = tp_type_bytes(c->type);
	*b = (struct buffers){ .block = c->count * each, .nin = many_in(c->coll) ? (size_t)w->n : 1, .nout = many_out(c->coll) ? (size_t)w->n : 1,
		.shift = c->shift * each };
	CHECK(k, !posix_memalign((void **)&b->in_memory, 16, b->shift + b->block * b->nin + GUARD));
	CHECK(k, !posix_memalign((void **)&b->out_memory, 16, b->shift + b->block * b->nout + GUARD));
	memset(b->in_memory, GUARD_BYTE, b->shift + b->block * b->nin + GUARD);
	memset(b->out_memory, GUARD_BYTE, b->shift + b->block * b->nout + GUARD);
	b->in = has_in(c, k->rank) ? b->in_memory + b->shift : NULL;
	b->out = has_out(c, k->rank) ? b->out_memory + b->shift : NULL;
	if (c->in_place && b->in && b->out && c->coll != TP_ALL_TO_ALL) {
		if (many_in(c->coll)) b->out = b->in + b->block * (size_t)k->rank;
		else b->in = b->out + (many_out(c->coll) ? b->block * (size_t)k->rank : 0);
	}
	for (size_t i = 0; i < b->nin && b->in; i++) fill_input(c, k->rank, (int)i, b->block, b->in + i * b->block);
	return true;
}

static bool launch(struct rank *k, const struct call *c, const struct tp_plan *plan, const struct buffers *b)
{
	struct world *w = k->world;
	struct tp_exec_call call = { .plan = plan, .input = b->in, .output = b->out, .block_bytes = b->block, .tag = c->tag + k->tag_differs };
	fill_reduce(c, w->n, &call.reduce);
	if (c->scaling == 3) call.device_scalar = device_scalar(c->type);
	k->fused.table.allows_128 = c->lines128;
	for (int i = 0; i < TP_FUSED_CLASSES; i++)
		k->fused.table.limits[i] = (struct tp_fused_limit){ c->lines128 ? 0 : (uint64_t)1 << 40, (uint64_t)1 << 40 };
	struct tp_fused_launch l;
	if (c->windows) {
		/* What collective registration would have told everybody. */
		pthread_barrier_wait(&w->barrier);
		for (int p = 0; p < w->n; p++) {
			w->ranks[p].in_bases[k->rank] = (uint64_t)(uintptr_t)b->in - 16;
			w->ranks[p].out_bases[k->rank] = (uint64_t)(uintptr_t)b->out;
		}
		pthread_barrier_wait(&w->barrier);
		k->fused.table.window = 0;
		struct tp_fused_windows windows = { (uint64_t)(uintptr_t)k->in_bases, 16, (uint64_t)(uintptr_t)k->out_bases, 0 };
		CHECK(k, tp_fused_fit_windows(&k->fused, &call, &windows, &l));
	} else {
		CHECK(k, tp_fused_fit(&k->fused, &call, &l));
	}
	CHECK(k, l.blocks >= 1 && l.blocks <= (unsigned)w->nchannels && l.threads <= TP_DEV_THREADS);
	const struct tp_emulated_kernel *kernel = kernel_of(&l, c);
	CHECK(k, kernel && kernel->args_bytes == sizeof(l.args));
	tp_emulator_launch(kernel, (int)l.blocks, (int)l.threads, (int)l.blocks, &l.args);
	return true;
}

static bool verify(struct rank *k, const struct call *c, const struct buffers *b)
{
	struct world *w = k->world;
	unsigned char *want = malloc(b->block);
	bool right = true;
	for (size_t i = 0; i < b->nout && b->out && right; i++) {
		const unsigned char *got = b->out + i * b->block;
		expect(w, c, k->rank, (int)i, b->block, want);
		if (!memcmp(want, got, b->block)) continue;
		size_t at = 0;
		while (want[at] == got[at]) at++;
		fprintf(stderr, "rank %d of %d: block %zu, byte %zu: %02x, not %02x\n", k->rank, w->n, i, at, got[at], want[at]);
		right = false;
	}
	free(want);
	CHECK(k, right);
	for (size_t i = 0; i < GUARD; i++)
		CHECK(k, b->in_memory[b->shift + b->block * b->nin + i] == GUARD_BYTE && b->out_memory[b->shift + b->block * b->nout + i] == GUARD_BYTE);
	for (size_t i = 0; i < b->shift; i++) CHECK(k, b->in_memory[i] == GUARD_BYTE && b->out_memory[i] == GUARD_BYTE);
	return true;
}

static void describe(const struct rank *k, const struct call *c)
{
	fprintf(stderr, "rank %d of %d: %s by %s, %s, %zu x %s %s, root %d, scaling %d, shift %zu, %s\n", k->rank, k->world->n, tp_coll_name(c->coll),
		tp_algo_name(c->algo), c->lines128 ? "LL128" : "LL", c->count, tp_type_name(c->type), tp_op_name(c->op), c->root, c->scaling, c->shift,
		c->in_place ? "in place" : "not in place");
}

static void *run_rank(void *arg)
{
	struct rank *k = arg;
	struct world *w = k->world;
	struct buffers *buffers = calloc((size_t)w->ncalls, sizeof(*buffers));
	for (int i = 0; i < w->ncalls && !k->failed; i++)
		if (!prepare(k, &w->calls[i], &buffers[i])) describe(k, &w->calls[i]);
	pthread_barrier_wait(&w->barrier);
	for (int i = 0; i < w->ncalls && !k->failed; i++) {
		const struct call *c = &w->calls[i];
		struct tp_plan_spec spec = { c->coll, c->algo, c->root, 1, w->layout };
		struct tp_plan *plan;
		if (tp_plan_create(&spec, k->rank, &plan) != ncclSuccess) abort();
		if (!launch(k, c, plan, &buffers[i])) describe(k, c);
		tp_plan_free(plan);
		if (__atomic_load_n(&k->status.abort, __ATOMIC_RELAXED)) break;
	}
	for (int i = 0; i < w->ncalls; i++) {
		if (!k->failed && !k->status.abort && !k->status.fault && !verify(k, &w->calls[i], &buffers[i])) describe(k, &w->calls[i]);
		free(buffers[i].in_memory);
		free(buffers[i].out_memory);
	}
	free(buffers);
	return NULL;
}

static void world_open(struct world *w, int n, int nchannels, uint32_t epoch)
{
	*w = (struct world){ .n = n, .nchannels = nchannels, .region_bytes = tp_fused_region_bytes(n, nchannels) };
	int domains[MOST_RANKS] = { 0 };
	assert_int_equal(tp_layout_create(n, domains, &w->layout), ncclSuccess);
	for (int r = 0; r < n; r++) assert_int_equal(posix_memalign(&w->ranks[r].region, 128, w->region_bytes), 0);
	for (int r = 0; r < n; r++) {
		struct rank *k = &w->ranks[r];
		k->rank = r;
		k->world = w;
		memset(k->region, 0, w->region_bytes);
		k->comm.status = (uint64_t)(uintptr_t)&k->status;
		for (int p = 0; p < n; p++) k->comm.region[p] = (uint64_t)(uintptr_t)w->ranks[p].region;
		for (int b = 0; b < TP_DEV_MAX_CHANNELS; b++) k->comm.epoch[b].now = k->comm.epoch[b].heard = epoch;
		k->fused = (struct tp_fused){ .usable = true, .shared_gpu = true, .rank = r, .nranks = n, .comm = (uint64_t)(uintptr_t)&k->comm };
		memcpy(k->fused.region, k->comm.region, sizeof(k->fused.region));
		tp_fused_lay_out(n, nchannels, &k->fused.layout);
		tp_fused_defaults(true, n, &k->fused.table);
		k->fused.table.max_blocks = (uint32_t)nchannels;
	}
}

static void world_begin(struct world *w, int nranks, const struct call *calls, int ncalls, pthread_t *threads)
{
	w->calls = calls;
	w->ncalls = ncalls;
	pthread_barrier_init(&w->barrier, NULL, (unsigned)nranks);
	for (int r = 0; r < nranks; r++) pthread_create(&threads[r], NULL, run_rank, &w->ranks[r]);
}

/* The line that failed first, 0. */
static int world_run(struct world *w, const struct call *calls, int ncalls)
{
	pthread_t threads[MOST_RANKS];
	world_begin(w, w->n, calls, ncalls, threads);
	for (int r = 0; r < w->n; r++) pthread_join(threads[r], NULL);
	for (int r = 0; r < w->n; r++)
		if (w->ranks[r].status.fault) return __LINE__;
	for (int r = 0; r < w->n; r++)
		if (w->ranks[r].failed) return w->ranks[r].failed;
	return 0;
}

static void world_close(struct world *w)
{
	for (int r = 0; r < w->n; r++) {
		free(w->ranks[r].region);
	}
	tp_layout_free(w->layout);
}

static void run_calls(int n, int nchannels, uint32_t epoch, const struct call *calls, int ncalls)
{
	static struct world w;
	world_open(&w, n, nchannels, epoch);
	int failed = world_run(&w, calls, ncalls);
	world_close(&w);
	assert_int_equal(failed, 0);
}

/* ---- calls ---- */

static const struct { enum tp_coll coll; enum tp_algo algo; bool rooted, reduces; } kinds[] = {
	{ TP_ALL_REDUCE, TP_ALGO_ONE_SHOT, false, true }, { TP_ALL_REDUCE, TP_ALGO_TWO_SHOT, false, true },
	{ TP_REDUCE_SCATTER, TP_ALGO_DIRECT, false, true }, { TP_ALL_GATHER, TP_ALGO_DIRECT, false, false },
	{ TP_ALL_TO_ALL, TP_ALGO_DIRECT, false, false }, { TP_BROADCAST, TP_ALGO_DIRECT, true, false },
	{ TP_REDUCE, TP_ALGO_DIRECT, true, true }, { TP_GATHER, TP_ALGO_DIRECT, true, false }, { TP_SCATTER, TP_ALGO_DIRECT, true, false },
};

static struct call random_call(uint64_t *state, int n, size_t most_bytes)
{
	size_t kind = reduce_draw(state) % TP_ARRAY_LEN(kinds);
	struct call c = { .coll = kinds[kind].coll, .algo = kinds[kind].algo, .root = kinds[kind].rooted ? (int)(reduce_draw(state) % (uint64_t)n) : -1,
		.type = (ncclDataType_t)(reduce_draw(state) % ncclNumTypes), .op = (ncclRedOp_t)(reduce_draw(state) % 4),
		.shift = reduce_draw(state) % 2 ? reduce_draw(state) % 5 : 0, .in_place = reduce_draw(state) % 2, .lines128 = reduce_draw(state) % 2,
		.tag = (uint32_t)reduce_draw(state) };
	if (kinds[kind].reduces && c.op == ncclSum) c.scaling = (int)(reduce_draw(state) % 4);
	size_t most = (size_t)1 << reduce_draw(state) % 22;
	if (most > most_bytes) most = most_bytes;
	c.count = 1 + reduce_draw(state) % (most / tp_type_bytes(c.type) + 1);
	if (kinds[kind].rooted || kinds[kind].coll != TP_ALL_REDUCE) c.count = 1 + c.count / (size_t)n;
	return c;
}

static void random_calls(int n, int nchannels, uint32_t epoch, uint64_t seed, int ncalls, size_t most_bytes)
{
	struct call *calls = calloc((size_t)ncalls, sizeof(*calls));
	uint64_t state = seed * 0x9e3779b97f4a7c15u + 12345;
	for (int i = 0; i < ncalls; i++) calls[i] = random_call(&state, n, most_bytes);
	run_calls(n, nchannels, epoch, calls, ncalls);
	free(calls);
}

static void every_type_and_operation_has_the_host_executors_bits(void **unused)
{
	(void)unused;
	struct call calls[ncclNumTypes * 4 * 2 * 4];
	int ncalls = 0;
	for (int type = 0; type < ncclNumTypes; type++)
		for (int op = 0; op < 4; op++)
			for (int lines = 0; lines < 2; lines++)
				for (int scaling = 0; scaling < (op == ncclSum ? 4 : 1); scaling++, ncalls++)
					calls[ncalls] = (struct call){ .coll = TP_ALL_REDUCE, .algo = TP_ALGO_ONE_SHOT, .root = -1, .type = (ncclDataType_t)type,
						.op = (ncclRedOp_t)op, .scaling = scaling, .count = 1021, .lines128 = lines, .tag = (uint32_t)(ncalls * 2 + 1) };
	run_calls(3, 2, 0, calls, ncalls);
}

static void all_collectives_of_all_sizes(void **unused)
{
	(void)unused;
	static const size_t sizes[] = { 1, 3, 4, 7, 8, 17, 29, 30, 31, 61, 1000, 4099, 20001 };
	struct call calls[TP_ARRAY_LEN(kinds) * TP_ARRAY_LEN(sizes) * 2];
	for (int n = 2; n <= 9; n += n < 5 ? 1 : 4) {
		int ncalls = 0;
		for (size_t kind = 0; kind < TP_ARRAY_LEN(kinds); kind++)
			for (size_t s = 0; s < TP_ARRAY_LEN(sizes); s++)
				for (int lines = 0; lines < 2; lines++, ncalls++)
					calls[ncalls] = (struct call){ .coll = kinds[kind].coll, .algo = kinds[kind].algo,
						.root = kinds[kind].rooted ? (int)(s % (size_t)n) : -1, .type = ncclFloat32, .op = ncclSum, .count = sizes[s],
						.in_place = ncalls / 2 % 2, .lines128 = lines, .tag = (uint32_t)ncalls };
		run_calls(n, 4, 0, calls, ncalls);
	}
}

static void buffers_at_any_element(void **unused)
{
	(void)unused;
	struct call calls[9 * 2 * 5 * 2];
	static const ncclDataType_t types[] = { ncclUint8, ncclBfloat16, ncclFloat32, ncclInt64, ncclFloat8e4m3 };
	int ncalls = 0;
	for (size_t kind = 0; kind < TP_ARRAY_LEN(kinds); kind++)
		for (size_t t = 0; t < TP_ARRAY_LEN(types); t++)
			for (int lines = 0; lines < 2; lines++)
				for (size_t shift = 1; shift < 4; shift += 2, ncalls++)
					calls[ncalls] = (struct call){ .coll = kinds[kind].coll, .algo = kinds[kind].algo, .root = kinds[kind].rooted ? 1 : -1,
						.type = types[t], .op = ncclSum, .count = 333 + t, .shift = shift, .lines128 = lines, .in_place = t % 2,
						.tag = (uint32_t)ncalls };
	run_calls(3, 2, 0, calls, ncalls);
}

static void many_rounds(void **unused)
{
	(void)unused;
	struct call calls[9 * 2];
	int ncalls = 0;
	for (size_t kind = 0; kind < TP_ARRAY_LEN(kinds); kind++)
		for (int lines = 0; lines < 2; lines++, ncalls++)
			calls[ncalls] = (struct call){ .coll = kinds[kind].coll, .algo = kinds[kind].algo, .root = kinds[kind].rooted ? 0 : -1,
				.type = ncclFloat32, .op = ncclSum, .count = 50007, .lines128 = lines, .in_place = true, .tag = (uint32_t)ncalls * 2 };
	lateness = 5;
	run_calls(3, 1, 0, calls, ncalls);
	lateness = 0;
}

/* A thread that has no part in a kernel's last round may be late in the one before, when others are in the next kernel. */
static void last_rounds_of_few_units(void **unused)
{
	(void)unused;
	struct call calls[24];
	lateness = 3;
	for (size_t kind = 0; kind < TP_ARRAY_LEN(kinds); kind++)
		for (int lines = 0; lines < 2; lines++) {
			struct tp_fused_layout layout;
			tp_fused_lay_out(2, 1, &layout);
			size_t round = lines ? layout.slot[1] / 128 * 30 : layout.slot[0] / 32 * 4;
			for (int i = 0; i < 24; i++)
				calls[i] = (struct call){ .coll = kinds[kind].coll, .algo = kinds[kind].algo, .root = kinds[kind].rooted ? 0 : -1,
					.type = ncclFloat32, .op = ncclSum, .lines128 = lines, .tag = (uint32_t)i * 2,
					.count = ((i % 3 ? 0 : round) + 10) * (kinds[kind].algo == TP_ALGO_TWO_SHOT ? 2 : 1) };
			run_calls(2, 1, 0, calls, 24);
		}
	lateness = 0;
}

static void windows_are_reduced_where_they_lie(void **unused)
{
	(void)unused;
	static const size_t counts[] = { 4, 64, 8196 };
	struct call calls[ncclNumTypes * 4 * 4 * 2];
	for (int n = 2; n <= 4; n += 2) {
		int ncalls = 0;
		for (int type = 0; type < ncclNumTypes; type++)
			for (int op = 0; op < 4; op++)
				for (size_t i = 0; i < TP_ARRAY_LEN(counts); i++, ncalls++) {
					bool scatter = (type + op + (int)i) % 3 == 0;
					size_t whole = 16 / tp_type_bytes((ncclDataType_t)type);
					calls[ncalls] = (struct call){ .coll = scatter ? TP_REDUCE_SCATTER : TP_ALL_REDUCE, .algo = scatter ? TP_ALGO_DIRECT : TP_ALGO_TWO_SHOT,
						.root = -1, .type = (ncclDataType_t)type, .op = (ncclRedOp_t)op, .scaling = op == ncclSum ? (int)(i % 4) : 0, .windows = true,
						.count = scatter ? tp_align_up(counts[i], whole) : counts[i], .in_place = i % 2, .tag = (uint32_t)ncalls * 2 + 1 };
				}
		lateness = 1;
		run_calls(n, 3, 0, calls, ncalls);
		lateness = 0;
	}
}

static void different_kernels_in_a_row_while_ranks_drift_apart(void **unused)
{
	(void)unused;
	lateness = 20;
	for (int n = 2; n <= 5; n++) random_calls(n, 3, 0, (uint64_t)n, n < 4 ? 60 : 30, 60000);
	lateness = 0;
}

static void many_tiny_calls_of_all_kinds(void **unused)
{
	(void)unused;
	lateness = 2;
	for (int n = 2; n <= 4; n++) random_calls(n, 2, 0, 77 + (uint64_t)n, 400, 300);
	lateness = 0;
}

static void epochs_pass_the_end_of_their_bits(void **unused)
{
	(void)unused;
	lateness = 10;
	for (int n = 2; n <= 4; n++) random_calls(n, 3, 0xfff00000u - 20, 500 + (uint64_t)n, 60, 10000);
	lateness = 0;
}

/* What an age leaves behind must not be taken for lines of the next. */
static void lines_of_an_earlier_age_are_gone(void **unused)
{
	(void)unused;
	static struct world w;
	struct call calls[24];
	for (int i = 0; i < 24; i++)
		calls[i] = (struct call){ .coll = TP_ALL_REDUCE, .algo = i % 2 ? TP_ALGO_TWO_SHOT : TP_ALGO_ONE_SHOT, .root = -1, .type = ncclInt32,
			.op = ncclSum, .count = 4000, .lines128 = i / 2 % 2, .tag = (uint32_t)i * 2 };
	world_open(&w, 3, 2, 0);
	assert_int_equal(world_run(&w, calls, 12), 0);
	for (int r = 0; r < 3; r++)
		for (int b = 0; b < 2; b++) w.ranks[r].comm.epoch[b].now = w.ranks[r].comm.epoch[b].heard = 0xfff00000u + 1;
	lateness = 50;
	assert_int_equal(world_run(&w, calls + 12, 12), 0);
	lateness = 0;
	assert_true(w.ranks[0].comm.epoch[0].now < 100);
	world_close(&w);
}

static void an_abort_ends_waiting_kernels(void **unused)
{
	(void)unused;
	for (size_t kind = 0; kind < TP_ARRAY_LEN(kinds); kind++) {
		for (int lines = 0; lines < 2; lines++) {
			static struct world w;
			pthread_t threads[2];
			struct call call = { .coll = kinds[kind].coll, .algo = kinds[kind].algo, .root = kinds[kind].rooted ? 2 : -1, .type = ncclFloat32,
				.op = ncclSum, .count = 100000, .lines128 = lines };
			world_open(&w, 3, 2, 0);
			world_begin(&w, 2, &call, 1, threads);          /* the third never comes */
			usleep(2000);
			for (int r = 0; r < 2; r++) __atomic_store_n(&w.ranks[r].status.abort, 1, __ATOMIC_RELAXED);
			for (int r = 0; r < 2; r++) pthread_join(threads[r], NULL);
			world_close(&w);
		}
	}
}

static void calls_that_differ_are_reported(void **unused)
{
	(void)unused;
	for (size_t kind = 0; kind < TP_ARRAY_LEN(kinds); kind++) {
		static struct world w;
		struct call call = { .coll = kinds[kind].coll, .algo = kinds[kind].algo, .root = kinds[kind].rooted ? 0 : -1, .type = ncclFloat32,
			.op = ncclSum, .count = 100, .lines128 = kind % 2, .tag = 0x1000 };
		world_open(&w, 2, 2, 0);
		w.ranks[1].tag_differs = 1;
		assert_int_not_equal(world_run(&w, &call, 1), 0);
		/* Who hears from nobody (a root that sends, those who send to one) has no reason to complain. */
		for (int r = 0; r < 2; r++) {
			if (kinds[kind].rooted && r == (call.coll == TP_BROADCAST || call.coll == TP_SCATTER ? 0 : 1)) continue;
			assert_int_equal(w.ranks[r].status.fault, TP_CUDA_TAG);
			assert_int_equal(w.ranks[r].status.peer, 1 - r);
			assert_int_equal(w.ranks[r].status.found, 0x1001 - r);
			assert_int_equal(w.ranks[r].status.expected, 0x1000 + r);
		}
		world_close(&w);
	}
}

static void regions_of_eight_ranks_take_16_mb_at_most(void **unused)
{
	(void)unused;
	for (int n = 2; n <= 8; n++)
		for (int channels = 1; channels <= TP_DEV_MAX_CHANNELS; channels++) {
			struct tp_fused_layout layout;
			tp_fused_lay_out(n, channels, &layout);
			assert_true(tp_fused_region_bytes(n, channels) <= (size_t)16 << 20);
			assert_true(layout.slot[0] % 1024 == 0 && layout.slot[0] >= 1024 && layout.slot[1] % 128 == 0 && layout.slot[1] >= 1024);
			assert_true(layout.lines[0] % 128 == 0 && layout.lines[1] % 128 == 0 && layout.share % 128 == 0);
		}
	assert_int_equal(tp_fused_region_bytes(1, 64), 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_type_and_operation_has_the_host_executors_bits),
		cmocka_unit_test(all_collectives_of_all_sizes),
		cmocka_unit_test(buffers_at_any_element),
		cmocka_unit_test(many_rounds),
		cmocka_unit_test(last_rounds_of_few_units),
		cmocka_unit_test(windows_are_reduced_where_they_lie),
		cmocka_unit_test(different_kernels_in_a_row_while_ranks_drift_apart),
		cmocka_unit_test(many_tiny_calls_of_all_kinds),
		cmocka_unit_test(epochs_pass_the_end_of_their_bits),
		cmocka_unit_test(lines_of_an_earlier_age_are_gone),
		cmocka_unit_test(an_abort_ends_waiting_kernels),
		cmocka_unit_test(calls_that_differ_are_reported),
		cmocka_unit_test(regions_of_eight_ranks_take_16_mb_at_most),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

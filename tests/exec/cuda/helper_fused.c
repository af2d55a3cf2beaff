#include "cuda/emulator_run.h"
#include "exec/cuda/helper_fused.h"
#include "exec/helper_reduce.h"

enum { GUARD = 32, GUARD_BYTE = 0xa5 };
/* Rings of sends and receives: of each peer and channel. */
enum { LINE_UNITS = 32, LINE_RING = 128 + TP_DEV_STREAM_SLOTS * LINE_UNITS * 128 };

/* A call's buffers, until all are checked: nobody waits between calls. */
struct buffers { unsigned char *in_memory, *out_memory, *in, *out; size_t block, nin, nout, shift, out_shift; };

/* ---- late ranks ---- */

int fused_lateness;
static _Thread_local struct fused_rank *running;
unsigned tp_lines_test_delay(void);
unsigned tp_lines_test_delay(void)
{
	/* Of all ranks: a thread's own would be of several coroutines, which the thread sanitizer takes for threads. */
	static _Atomic uint64_t turn;
	if (atomic_fetch_add_explicit(&running->looks, 1, memory_order_relaxed) >= running->held_from)
		while (atomic_load(&running->held)) usleep(100);
	if (!fused_lateness) return 0;
	uint64_t state = (atomic_fetch_add_explicit(&turn, 1, memory_order_relaxed) + 1) * 0x9e3779b97f4a7c15u;
	reduce_draw(&state);
	if ((int)(reduce_draw(&state) % 100) >= fused_lateness) return 0;
	if (reduce_draw(&state) % 16 == 0) usleep((useconds_t)(reduce_draw(&state) % 300));
	/* A turn in vain is a yield, which takes milliseconds where other programs run. */
	return (unsigned)(reduce_draw(&state) % (reduce_draw(&state) % 8 ? 10 : 150));
}

/* ---- what should come out ---- */

static bool many_in(enum tp_coll c) { return c == TP_REDUCE_SCATTER || c == TP_ALL_TO_ALL || c == TP_SCATTER; }
static bool many_out(enum tp_coll c) { return c == TP_ALL_GATHER || c == TP_ALL_TO_ALL || c == TP_GATHER; }
static bool has_in(const struct fused_call *c, int rank) { return (c->coll != TP_BROADCAST && c->coll != TP_SCATTER) || rank == c->root; }
static bool has_out(const struct fused_call *c, int rank) { return (c->coll != TP_REDUCE && c->coll != TP_GATHER) || rank == c->root; }

static void fill_reduce(const struct fused_call *c, int n, struct tp_reduce *r)
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

static void fill_input(const struct fused_call *c, int rank, int block, size_t bytes, unsigned char *to)
{
	uint64_t state = ((uint64_t)c->tag << 20 | (uint64_t)rank << 8 | (uint64_t)block) * 0x9e3779b97f4a7c15u + 1;
	for (int i = 0; i < 4; i++) reduce_draw(&state);
	reduce_fill(c->type, to, bytes, c->tag % 2, &state);
}

/* One block of a rank's output. */
static void expect(const struct fused_world *w, const struct fused_call *c, int rank, int block, size_t bytes, unsigned char *out)
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
	const void *from[FUSED_MOST_RANKS];
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

static const struct tp_emulated_kernel *kernel_of(int kind, bool reduces, const struct fused_call *c)
{
	static const char *const kinds[] = { "ll", "ll128", "window", "two_step", "pipe", "push" }, *const ops[] = { "sum", "prod", "max", "min" };
	char name[64];
	const char *type = type_name(c->type);
	if (c->op <= ncclProd && type[0] == 'i') type = type_name((ncclDataType_t)(c->type + 1));
	if (reduces) snprintf(name, sizeof(name), "tp_%s_%s_%s", kinds[kind], type, ops[c->op]);
	else snprintf(name, sizeof(name), "tp_%s_copy", kinds[kind]);
	return tp_emulator_find(name);
}

static bool prepare(struct fused_rank *k, const struct fused_call *c, struct buffers *b)
{
	struct fused_world *w = k->world;
	size_t each = tp_type_bytes(c->type);
	*b = (struct buffers){ .block = c->count * each, .nin = many_in(c->coll) ? (size_t)w->n : 1, .nout = many_out(c->coll) ? (size_t)w->n : 1,
		.shift = c->shift * each, .out_shift = (c->shift + (c->odd >> k->rank & 1)) * each };
	CHECK(k, !posix_memalign((void **)&b->in_memory, 16, b->shift + b->block * b->nin + GUARD));
	CHECK(k, !posix_memalign((void **)&b->out_memory, 16, b->out_shift + b->block * b->nout + GUARD));
	memset(b->in_memory, GUARD_BYTE, b->shift + b->block * b->nin + GUARD);
	memset(b->out_memory, GUARD_BYTE, b->out_shift + b->block * b->nout + GUARD);
	b->in = has_in(c, k->rank) ? b->in_memory + b->shift : NULL;
	b->out = has_out(c, k->rank) ? b->out_memory + b->out_shift : NULL;
	if (c->in_place && b->in && b->out && c->coll != TP_ALL_TO_ALL) {
		if (many_in(c->coll)) b->out = b->in + b->block * (size_t)k->rank;
		else b->in = b->out + (many_out(c->coll) ? b->block * (size_t)k->rank : 0);
	}
	for (size_t i = 0; i < b->nin && b->in; i++) fill_input(c, k->rank, (int)i, b->block, b->in + i * b->block);
	return true;
}

static bool launch_pipes(struct fused_rank *k, const struct fused_call *c, const struct tp_exec_call *call)
{
	struct tp_fused_shape shape;
	struct tp_pipe_launch l;
	int protocol;
	memset(k->fused.table.limits, 0, sizeof(k->fused.table.limits));
	k->fused.table.reduce = 0;
	CHECK(k, tp_fused_find(&k->fused, call, &shape, &protocol) && protocol == TP_FUSED_BY_PIPES);
	tp_pipes_fit(&k->fused, call, &shape, &l);
	CHECK(k, l.blocks >= 1 && l.blocks <= (unsigned)k->world->nchannels);
	const struct tp_emulated_kernel *kernel = kernel_of(l.kind, l.reduces, c);
	CHECK(k, kernel && kernel->args_bytes == sizeof(l.args));
	if (c->offers && l.kind == TP_FUSED_PUSH) {
		l.args.offers = 1;
		l.args.table = (uint64_t)(uintptr_t)k->table;
		/* Captured when it was registered, whether it still is or not. */
		l.args.offer = (struct tp_dev_offer){ .index = (uint32_t)(c - k->world->calls) % TP_DEV_BUFFERS + 1 };
	}
	tp_emulator_launch(kernel, (int)l.blocks, TP_DEV_THREADS, (int)l.blocks, &l.args);
	return true;
}

static void add_transfer(struct tp_dev_streams_more *s, const struct tp_dev_stream *t, uint16_t *last)
{
	const uint32_t nchannels = s->head.nchannels, n = (uint32_t)s->head.nranks, distance = (uint32_t)(t->is_send ? t->peer - s->head.rank : s->head.rank - t->peer) + n;
	const bool piped = t->bytes >= s->head.pipes_from && !t->from;
	struct tp_dev_stream *out = &s->streams[s->head.ntransfers];
	*out = *t;
	out->units = piped ? TP_DEV_STREAM_PIPED_UNITS : (uint32_t)TP_MAX(tp_div_up(t->bytes, TP_DEV_STREAM_UNIT), 1);
	out->nparts = (uint16_t)(piped ? 1 : TP_MIN(tp_div_up(out->units, 32), nchannels));
	out->units_each = out->units / out->nparts;
	out->units_more = out->units % out->nparts;
	out->base = (uint16_t)(distance % n * TP_MAX(nchannels / n, 1) % nchannels);
	out->is_first = !*last;
	if (*last) s->streams[*last - 1].next = (uint16_t)(s->head.ntransfers + 1);
	*last = (uint16_t)++s->head.ntransfers;
}

/* Each block in three, so that large and small ones follow each other. */
static bool launch_transfers(struct fused_rank *k, const struct fused_call *c, const struct buffers *b)
{
	const struct fused_world *w = k->world;
	struct tp_dev_streams_piped *args = calloc(1, sizeof(*args));
	const struct tp_emulated_kernel *kernel = tp_emulator_find("tp_streams_piped");
	const size_t cuts[] = { 0, b->block / 2, b->block / 2 + TP_MIN(b->block / 4, 100), b->block };
	CHECK(k, args && kernel && kernel->args_bytes == sizeof(*args));
	args->lines.head = (struct tp_dev_streams_head){ .comm = (uint64_t)(uintptr_t)&k->comm, .counters = (uint64_t)(uintptr_t)k->line_counters, .slot_units = LINE_UNITS,
		.table = c->offers ? (uint64_t)(uintptr_t)k->table : 0, .offers_from = c->offers ? 1000 : UINT64_MAX, .rank = (int16_t)k->rank, .nranks = (int16_t)w->n,
		.pipes_from = 2 * TP_DEV_STREAM_PIPED_UNITS * TP_DEV_STREAM_UNIT, .nchannels = (uint16_t)w->nchannels, .gives_way = 1 };
	for (int p = 0; p < w->n; p++) args->lines.head.rings[p] = (uint64_t)(uintptr_t)w->ranks[p].lines;
	for (int i = 0; i < w->nchannels; i++) args->lines.head.channels[i] = (uint8_t)i;
	tp_pipes_fill_transfers(&k->fused, &args->pipe);
	args->pipe.table = (uint64_t)(uintptr_t)k->table;
	for (int i = 0; i < w->n; i++) {
		const int to = (k->rank + i) % w->n, from = (k->rank + w->n - i) % w->n;
		uint16_t last[2] = { 0 };
		for (int piece = 0; piece < 3; piece++) {
			const size_t send = (size_t)to * b->block + cuts[piece], receive = (size_t)from * b->block + cuts[piece];
			struct tp_dev_stream t = { .buf = (uint64_t)(uintptr_t)(b->out + receive), .bytes = cuts[piece + 1] - cuts[piece], .peer = (int16_t)from,
				.offset = receive, .index = (uint16_t)(c->offers ? (c - w->calls) % TP_DEV_BUFFERS + 1 : 0) };
			if (!i) t.from = (uint64_t)(uintptr_t)(b->in + send);
			if (i || t.bytes) add_transfer(&args->lines, &t, &last[0]);
			t = (struct tp_dev_stream){ .buf = (uint64_t)(uintptr_t)(b->in + send), .bytes = t.bytes, .is_send = 1, .peer = (int16_t)to };
			if (i) add_transfer(&args->lines, &t, &last[1]);
		}
	}
	tp_emulator_launch(kernel, w->nchannels, TP_DEV_THREADS, w->nchannels, args);
	free(args);
	return true;
}

/* What registration would have told everybody, before any kernel runs. */
static void tell_buffers(struct fused_rank *k, const struct buffers *buffers)
{
	struct fused_world *w = k->world;
	for (int i = 0; i < w->ncalls; i++) {
		const struct fused_call *c = &w->calls[i];
		if (!c->offers || !(c->registered >> k->rank & 1)) continue;
		for (int p = 0; p < w->n && w->ranks[p].table; p++)
			w->ranks[p].table[k->rank * TP_DEV_BUFFERS + i % TP_DEV_BUFFERS] = (uint64_t)(uintptr_t)buffers[i].out;
	}
}

static bool launch(struct fused_rank *k, const struct fused_call *c, const struct tp_plan *plan, const struct buffers *b)
{
	struct fused_world *w = k->world;
	struct tp_exec_call call = { .plan = plan, .input = b->in, .output = b->out, .block_bytes = b->block, .tag = c->tag + k->tag_differs };
	fill_reduce(c, w->n, &call.reduce);
	if (c->scaling == 3) call.device_scalar = device_scalar(c->type);
	k->fused.table.allows_128 = c->lines128;
	k->fused.table.owners = c->owners && c->lines128 ? 0 : UINT64_MAX;
	for (int i = 0; i < TP_FUSED_CLASSES; i++)
		k->fused.table.limits[i] = (struct tp_fused_limit){ c->lines128 ? 0 : (uint64_t)1 << 40, (uint64_t)1 << 40, UINT64_MAX };
	if (c->transfers) return launch_transfers(k, c, b);
	if (c->pipes) return launch_pipes(k, c, &call);
	k->fused.table.cut = c->cut ? c->cut : (size_t)1 << 30;
	if (c->windows) {
		/* What collective registration would have told everybody. */
		pthread_barrier_wait(&w->barrier);
		for (int p = 0; p < w->n; p++) {
			w->ranks[p].in_bases[k->rank] = (uint64_t)(uintptr_t)b->in - 16;
			w->ranks[p].out_bases[k->rank] = (uint64_t)(uintptr_t)b->out;
		}
		pthread_barrier_wait(&w->barrier);
		k->fused.table.window = 0;
	}
	for (size_t from = 0; from < b->block;) {
		struct tp_fused_windows windows = { (uint64_t)(uintptr_t)k->in_bases, 16, (uint64_t)(uintptr_t)k->out_bases, 0, 0 };
		struct tp_fused_launch l;
		CHECK(k, c->windows ? tp_fused_fit_windows(&k->fused, &call, &windows, from, &l) : tp_fused_fit(&k->fused, &call, from, &l));
		CHECK(k, l.bytes > 0 && from + l.bytes <= b->block && (!c->cut || l.bytes * (size_t)w->n <= c->cut));
		CHECK(k, l.blocks >= 1 && l.blocks <= (unsigned)w->nchannels && l.threads <= TP_DEV_THREADS);
		const struct tp_emulated_kernel *kernel = kernel_of(l.kind, l.reduces, c);
		CHECK(k, kernel && kernel->args_bytes == sizeof(l.args));
		if (k->held_in_rounds) k->held_from = atomic_load(&k->looks) + l.blocks * l.threads / 32;
		tp_emulator_launch(kernel, (int)l.blocks, (int)l.threads, (int)l.blocks, &l.args);
		from += l.bytes;
	}
	return true;
}

static bool verify(struct fused_rank *k, const struct fused_call *c, const struct buffers *b)
{
	struct fused_world *w = k->world;
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
		CHECK(k, b->in_memory[b->shift + b->block * b->nin + i] == GUARD_BYTE && b->out_memory[b->out_shift + b->block * b->nout + i] == GUARD_BYTE);
	for (size_t i = 0; i < b->shift; i++) CHECK(k, b->in_memory[i] == GUARD_BYTE);
	for (size_t i = 0; i < b->out_shift; i++) CHECK(k, b->out_memory[i] == GUARD_BYTE);
	return true;
}

static void describe(const struct fused_rank *k, const struct fused_call *c)
{
	fprintf(stderr, "rank %d of %d: %s by %s, %s%s, %zu x %s %s, root %d, scaling %d, shift %zu, %s\n", k->rank, k->world->n, tp_coll_name(c->coll),
		tp_algo_name(c->algo), c->pipes ? "pipes" : c->lines128 ? "LL128" : "LL", c->owners ? " in two steps" : "", c->count, tp_type_name(c->type), tp_op_name(c->op), c->root,
		c->scaling, c->shift, c->in_place ? "in place" : "not in place");
}

static void *run_rank(void *arg)
{
	struct fused_rank *k = arg;
	struct fused_world *w = k->world;
	running = k;
	struct buffers *buffers = calloc((size_t)w->ncalls, sizeof(*buffers));
	for (int i = 0; i < w->ncalls && !k->failed; i++)
		if (!prepare(k, &w->calls[i], &buffers[i])) describe(k, &w->calls[i]);
	tell_buffers(k, buffers);
	pthread_barrier_wait(&w->barrier);
	for (int i = 0; i < w->ncalls && !k->failed; i++) {
		const struct fused_call *c = &w->calls[i];
		struct tp_plan_spec spec = { c->coll, c->algo, c->root, 1, w->layout };
		struct tp_plan *plan;
		if (tp_plan_create(&spec, k->rank, &plan) != ncclSuccess) abort();
		if (!launch(k, c, plan, &buffers[i])) describe(k, c);
		tp_plan_free(plan);
		if (__atomic_load_n(&k->status.abort, __ATOMIC_RELAXED)) break;
	}
	for (int i = 0; i < w->ncalls; i++) {
		if (!k->failed && !__atomic_load_n(&k->status.abort, __ATOMIC_RELAXED) && !k->status.fault && !verify(k, &w->calls[i], &buffers[i])) describe(k, &w->calls[i]);
		free(buffers[i].in_memory);
		free(buffers[i].out_memory);
	}
	free(buffers);
	return NULL;
}

/* As if so many chunks had gone through each pipe. */
static void open_pipes(struct fused_rank *k, uint32_t count)
{
	const struct fused_world *w = k->world;
	struct tp_pipes *pipes = &k->fused.pipes;
	uint64_t rings[FUSED_MOST_RANKS];
	for (int p = 0; p < w->n; p++) rings[p] = (uint64_t)(uintptr_t)w->ranks[p].pipes;
	tp_pipes_init(TP_CUDA_PIPES_ALL, w->n, w->nchannels, k->rank % 2 ? 99 << 10 : 227 << 10, (uint64_t)(uintptr_t)k->counters, rings, pipes);
	for (size_t i = 0; i < tp_pipes_counter_bytes(w->nchannels) / sizeof(uint32_t); i++) ((uint32_t *)k->counters)[i] = count;
	memset(k->pipes, 0, tp_pipes_region_bytes(TP_CUDA_PIPES_ALL, w->n, w->nchannels));
	for (int i = 0; i < (w->n - 1) * w->nchannels; i++)
		for (int head = 0; head < 2 * TP_PIPE_DEPTH; head++) ((uint32_t *)((char *)k->pipes + (size_t)i * pipes->pipe_bytes))[head] = count;
}

/* layout_channels: whose slots are used. */
static void open_world(struct fused_world *w, int n, int nchannels, int layout_channels, uint32_t epoch)
{
	struct tp_fused_layout layout;
	tp_fused_lay_out(n, layout_channels, &layout);
	*w = (struct fused_world){ .n = n, .nchannels = nchannels, .region_bytes = (size_t)layout.share * (size_t)nchannels };
	int domains[FUSED_MOST_RANKS] = { 0 };
	assert_int_equal(tp_layout_create(n, domains, &w->layout), ncclSuccess);
	for (int r = 0; r < n; r++) assert_int_equal(posix_memalign(&w->ranks[r].region, 128, w->region_bytes), 0);
	const size_t pipes_bytes = tp_pipes_region_bytes(TP_CUDA_PIPES_ALL, n, nchannels), counter_bytes = tp_pipes_counter_bytes(nchannels);
	for (int r = 0; r < n && pipes_bytes; r++) {
		assert_int_equal(posix_memalign(&w->ranks[r].pipes, 128, pipes_bytes), 0);
		assert_int_equal(posix_memalign(&w->ranks[r].counters, 128, counter_bytes), 0);
		const size_t lines_bytes = (size_t)(n - 1) * (size_t)nchannels * LINE_RING;
		assert_int_equal(posix_memalign(&w->ranks[r].lines, 128, lines_bytes), 0);
		memset(w->ranks[r].lines, 0, lines_bytes);
		w->ranks[r].line_counters = calloc((size_t)n * 2 * (size_t)nchannels, sizeof(uint64_t));
		assert_non_null(w->ranks[r].line_counters);
		w->ranks[r].table = calloc((size_t)n * TP_DEV_BUFFERS, sizeof(uint64_t));
		assert_non_null(w->ranks[r].table);
	}
	for (int r = 0; r < n; r++) {
		struct fused_rank *k = &w->ranks[r];
		k->rank = r;
		k->world = w;
		memset(k->region, 0, w->region_bytes);
		k->comm.status = (uint64_t)(uintptr_t)&k->status;
		for (int p = 0; p < n; p++) k->comm.region[p] = (uint64_t)(uintptr_t)w->ranks[p].region;
		for (int b = 0; b < TP_DEV_MAX_CHANNELS; b++) k->comm.epoch[b].now = k->comm.epoch[b].heard = epoch;
		k->fused = (struct tp_fused){ .usable = true, .shared_gpu = true, .rank = r, .nranks = n, .comm = (uint64_t)(uintptr_t)&k->comm };
		memcpy(k->fused.region, k->comm.region, sizeof(k->fused.region));
		k->fused.layout = layout;
		tp_fused_defaults(&(struct tp_fused_machine){ .nranks = n, .join = TP_FUSED_SHARED }, &k->fused.table);
		k->fused.table.max_blocks = (uint32_t)nchannels;
		if (pipes_bytes) open_pipes(k, epoch);
	}
}

void fused_set_chunk(struct fused_world *w, uint32_t bytes)
{
	/* Unequal ones, where they can be: kernels that reduce divide rings in another way than those that move. */
	for (int r = 0; r < w->n; r++) {
		w->ranks[r].fused.pipes.chunk[0] = bytes;
		w->ranks[r].fused.pipes.chunk[1] = TP_MAX(bytes / 2, 128u);
	}
}

void fused_open(struct fused_world *w, int n, int nchannels, uint32_t epoch) { open_world(w, n, nchannels, nchannels, epoch); }
void fused_open_small(struct fused_world *w, int n, uint32_t epoch) { open_world(w, n, 1, TP_DEV_MAX_CHANNELS, epoch); }

size_t fused_small_round(int n, bool lines128)
{
	struct tp_fused_layout layout;
	tp_fused_lay_out(n, TP_DEV_MAX_CHANNELS, &layout);
	return lines128 ? layout.slot[1] / 128 * 30 : layout.slot[0] / 32 * 4;
}

void fused_begin(struct fused_world *w, int nranks, const struct fused_call *calls, int ncalls, pthread_t *threads)
{
	w->calls = calls;
	w->ncalls = ncalls;
	pthread_barrier_init(&w->barrier, NULL, (unsigned)nranks);
	for (int r = 0; r < nranks; r++) pthread_create(&threads[r], NULL, run_rank, &w->ranks[r]);
}

/* The line that failed first, 0. */
int fused_end(struct fused_world *w, int nranks, const pthread_t *threads)
{
	for (int r = 0; r < nranks; r++) pthread_join(threads[r], NULL);
	pthread_barrier_destroy(&w->barrier);
	for (int r = 0; r < nranks; r++)
		if (w->ranks[r].status.fault) return __LINE__;
	for (int r = 0; r < nranks; r++)
		if (w->ranks[r].failed) return w->ranks[r].failed;
	return 0;
}

int fused_run(struct fused_world *w, const struct fused_call *calls, int ncalls)
{
	pthread_t threads[FUSED_MOST_RANKS];
	fused_begin(w, w->n, calls, ncalls, threads);
	return fused_end(w, w->n, threads);
}

void fused_abort(struct fused_world *w)
{
	for (int r = 0; r < w->n; r++) __atomic_store_n(&w->ranks[r].status.abort, 1, __ATOMIC_RELAXED);
}

void fused_close(struct fused_world *w)
{
	for (int r = 0; r < w->n; r++) {
		free(w->ranks[r].region);
		free(w->ranks[r].pipes);
		free(w->ranks[r].counters);
		free(w->ranks[r].lines);
		free(w->ranks[r].line_counters);
		free(w->ranks[r].table);
	}
	tp_layout_free(w->layout);
}

static void run_and_close(struct fused_world *w, const struct fused_call *calls, int ncalls)
{
	int failed = fused_run(w, calls, ncalls);
	fused_close(w);
	assert_int_equal(failed, 0);
}

static struct fused_world the_world;
void fused_run_calls(int n, int nchannels, uint32_t epoch, const struct fused_call *calls, int ncalls)
{
	fused_open(&the_world, n, nchannels, epoch);
	run_and_close(&the_world, calls, ncalls);
}

void fused_run_small(int n, const struct fused_call *calls, int ncalls)
{
	fused_open_small(&the_world, n, 0);
	run_and_close(&the_world, calls, ncalls);
}

const struct fused_kind fused_kinds[FUSED_KINDS] = {
	{ TP_ALL_REDUCE, TP_ALGO_ONE_SHOT, .reduces = true }, { TP_ALL_REDUCE, TP_ALGO_TWO_SHOT, .reduces = true },
	{ TP_REDUCE_SCATTER, TP_ALGO_DIRECT, .reduces = true }, { TP_ALL_GATHER, TP_ALGO_DIRECT, .rooted = false },
	{ TP_ALL_TO_ALL, TP_ALGO_DIRECT, .rooted = false },
	{ TP_BROADCAST, TP_ALGO_DIRECT, .rooted = true }, { TP_REDUCE, TP_ALGO_DIRECT, .rooted = true, .reduces = true },
	{ TP_GATHER, TP_ALGO_DIRECT, .rooted = true }, { TP_SCATTER, TP_ALGO_DIRECT, .rooted = true },
	{ TP_BROADCAST, TP_ALGO_DIRECT, .rooted = true, .owners = true }, { TP_REDUCE, TP_ALGO_DIRECT, .rooted = true, .reduces = true, .owners = true },
};

struct fused_call fused_call_of(const struct fused_kind *kind, int root, size_t count, bool lines128, uint32_t tag)
{
	return (struct fused_call){ .coll = kind->coll, .algo = kind->algo, .root = kind->rooted ? root : -1, .owners = kind->owners, .type = ncclFloat32,
		.op = ncclSum, .count = count, .lines128 = lines128, .tag = tag };
}

static struct fused_call random_call(uint64_t *state, int n, size_t most_bytes)
{
	size_t kind = reduce_draw(state) % TP_ARRAY_LEN(fused_kinds);
	struct fused_call c = { .coll = fused_kinds[kind].coll, .algo = fused_kinds[kind].algo, .root = fused_kinds[kind].rooted ? (int)(reduce_draw(state) % (uint64_t)n) : -1,
		.type = (ncclDataType_t)(reduce_draw(state) % ncclNumTypes), .op = (ncclRedOp_t)(reduce_draw(state) % 4),
		.shift = reduce_draw(state) % 2 ? reduce_draw(state) % 5 : 0, .in_place = reduce_draw(state) % 2, .lines128 = reduce_draw(state) % 2,
		.tag = (uint32_t)reduce_draw(state), .owners = fused_kinds[kind].owners };
	if (fused_kinds[kind].reduces && c.op == ncclSum) c.scaling = (int)(reduce_draw(state) % 4);
	size_t most = (size_t)1 << reduce_draw(state) % 22;
	if (most > most_bytes) most = most_bytes;
	c.count = 1 + reduce_draw(state) % (most / tp_type_bytes(c.type) + 1);
	if (fused_kinds[kind].rooted || fused_kinds[kind].coll != TP_ALL_REDUCE) c.count = 1 + c.count / (size_t)n;
	if (reduce_draw(state) % 3 == 0) c.cut = (size_t)n * 1920 * (1 + reduce_draw(state) % 4);
	return c;
}

void fused_random_calls(int n, int nchannels, uint32_t epoch, uint64_t seed, int ncalls, size_t most_bytes)
{
	struct fused_call *calls = calloc((size_t)ncalls, sizeof(*calls));
	uint64_t state = seed * 0x9e3779b97f4a7c15u + 12345;
	for (int i = 0; i < ncalls; i++) calls[i] = random_call(&state, n, most_bytes);
	fused_run_calls(n, nchannels, epoch, calls, ncalls);
	free(calls);
}

void fused_random_pipes(int n, int nchannels, uint32_t epoch, uint32_t chunk, uint64_t seed, int ncalls, size_t most_bytes)
{
	struct fused_call *calls = calloc((size_t)ncalls, sizeof(*calls));
	uint64_t state = seed * 0x9e3779b97f4a7c15u + 54321;
	for (int i = 0; i < ncalls; i++) {
		calls[i] = random_call(&state, n, most_bytes);
		calls[i].lines128 = calls[i].pipes = true;
		calls[i].offers = reduce_draw(&state) % 2;
		calls[i].registered = (unsigned)reduce_draw(&state);
		if (n > 2 && (calls[i].coll == TP_BROADCAST || calls[i].coll == TP_REDUCE)) calls[i].owners = reduce_draw(&state) % 2;
		if (calls[i].coll == TP_ALL_REDUCE) calls[i].algo = TP_ALGO_TWO_SHOT;
		calls[i].transfers = calls[i].coll == TP_ALL_TO_ALL && reduce_draw(&state) % 2;
	}
	fused_open(&the_world, n, nchannels, epoch);
	if (chunk) fused_set_chunk(&the_world, chunk);
	run_and_close(&the_world, calls, ncalls);
	free(calls);
}


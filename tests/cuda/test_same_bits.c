/* Every rank gets the same bits of an all-reduce, and every root the same of a reduction, whichever kernels run, with values whose sums depend on the order
 * of adding and on where is rounded; and where docs/design.md ("Arithmetic") says in rank order, it is that order. */
#include "cuda/helper_gpu.h"

enum { COUNT = 3001, POOL = 4 << 20 };

/* in_rank_order: lines, windows, pipes; else the plan's order. */
struct family { const char *name, *kernel; bool in_rank_order, windows; const char *first, *second; };
#define LINES "one_shot=1G:1G,two_shot=1G:1G,rooted=1G:1G,pipes=0,"
static const struct family families[] = {
	{ "one shot, lines of 16 bytes", "tp_ll_", true, false, "TELPHER_LL128=off", "TELPHER_CUDA_TABLE=" LINES },
	{ "one shot, lines of 128 bytes", "tp_ll128_", true, false, "TELPHER_LL128=on", "TELPHER_CUDA_TABLE=" LINES "one_shot=0:1G,rooted=0:1G,two_step_from=never" },
	{ "two shots, lines of 16 bytes", "tp_ll_", true, false, "TELPHER_LL128=off", "TELPHER_CUDA_TABLE=" LINES "one_shot=0:0" },
	{ "two shots and two steps, lines of 128 bytes", "tp_ll128_", true, false, "TELPHER_LL128=on",
		"TELPHER_CUDA_TABLE=" LINES "one_shot=0:0,two_shot=0:1G,two_step=0:1G,two_step_from=1" },
	{ "pipes", "tp_pipe_", true, false, "TELPHER_LL128=on", "TELPHER_CUDA_TABLE=one_shot=0:0,two_shot=0:0:0,two_step=0:0:0,two_step_from=1,reduce=0,pipes=2" },
	{ "windows", "tp_window_", true, true, "TELPHER_CUDA_TABLE=window=1", NULL },
	{ "steps of a ring", "tp_steps_", false, false, "NCCL_ALGO=RING", "TELPHER_CUDA_TABLE=one_shot=0:0,two_shot=0:0,rooted=0:0,two_step=0:0,pipes=0" },
	{ "steps of a tree", "tp_steps_", false, false, "NCCL_ALGO=allreduce:TREE", "TELPHER_CUDA_TABLE=one_shot=0:0,two_shot=0:0,rooted=0:0,two_step=0:0,pipes=0" },
	{ "steps of two shots", "tp_steps_", false, false, NULL, "TELPHER_CUDA_TABLE=one_shot=0:0,two_shot=0:0,rooted=0:0,two_step=0:0,pipes=0" },
};

/* Any sign and mantissa; exponents so close that sums round, and so far apart that it matters when. */
static const struct { ncclDataType_t type; const char *name; unsigned bytes, mantissa, least, most; } types[] = {
	{ ncclFloat32, "f32", 4, 23, 120, 134 }, { ncclFloat16, "f16", 2, 10, 8, 20 }, { ncclBfloat16, "bf16", 2, 7, 120, 134 },
	{ ncclFloat8e4m3, "e4m3", 1, 3, 3, 11 }, { ncclFloat8e5m2, "e5m2", 1, 2, 10, 20 } };

static uint32_t value_of(size_t t, int rank, size_t i)
{
	uint64_t x = (uint64_t)(rank + 1) * 0x9e3779b97f4a7c15u ^ (uint64_t)(i + 1) * 0xbf58476d1ce4e5b9u;
	x ^= x >> 31;
	x *= 0x94d049bb133111ebu;
	x ^= x >> 29;
	unsigned m = types[t].mantissa, exponents = types[t].most - types[t].least + 1;
	uint32_t mantissa = (uint32_t)x & ((1u << m) - 1), exponent = types[t].least + (uint32_t)(x >> 32) % exponents, sign = (uint32_t)(x >> 63);
	return sign << (types[t].bytes * 8 - 1) | exponent << m | mantissa;
}

static void fill(size_t t, int rank, unsigned char *to)
{
	for (size_t i = 0; i < COUNT; i++) {
		uint32_t v = value_of(t, rank, i);
		memcpy(to + i * types[t].bytes, &v, types[t].bytes);
	}
}

/* Floats added up in rank order, or from the last rank on. */
static void add_up(int nranks, bool backwards, float *out)
{
	for (size_t i = 0; i < COUNT; i++) {
		for (int p = 0; p < nranks; p++) {
			uint32_t bits = value_of(0, backwards ? nranks - 1 - p : p, i);
			float v;
			memcpy(&v, &bits, 4);
			out[i] = p ? out[i] + v : v;
		}
	}
}

static void check_order(struct ranks *r, const struct family *f, const unsigned char *got)
{
	static float forwards[COUNT], backwards[COUNT];
	add_up(r->nranks, false, forwards);
	add_up(r->nranks, true, backwards);
	/* Else nothing here could fail. */
	REQUIRE(r->nranks == 2 || memcmp(forwards, backwards, sizeof(forwards)) != 0);
	if (f->in_rank_order) REQUIRE(memcmp(forwards, got, sizeof(forwards)) == 0);
}

/* All ranks' bytes, at this rank, are the same. */
static void check_same(struct gpu_rank *g, CUdeviceptr all, const unsigned char *mine, size_t bytes, CUdeviceptr from)
{
	struct ranks *r = g->r;
	unsigned char *got = malloc(bytes * (size_t)r->nranks);
	REQUIRE(got);
	REQUIRE_OK(ncclAllGather(GPU_PTR(from), GPU_PTR(all), bytes, ncclInt8, g->comm, GPU_STREAM(g, 0)));
	gpu_get(g, got, all, bytes * (size_t)r->nranks);
	for (int p = 0; p < r->nranks; p++) REQUIRE(memcmp(got + (size_t)p * bytes, mine, bytes) == 0);
	free(got);
}

static void one_type(struct gpu_rank *g, const struct family *f, size_t t, CUdeviceptr in, CUdeviceptr out, CUdeviceptr all)
{
	static _Thread_local unsigned char values[COUNT * 4], sum[COUNT * 4], at_root[COUNT * 4];
	struct ranks *r = g->r;
	size_t bytes = COUNT * types[t].bytes;
	char kernel[64];
	fill(t, r->rank, values);
	gpu_put(g, in, values, bytes);
	REQUIRE_OK(ncclAllReduce(GPU_PTR(in), GPU_PTR(out), COUNT, types[t].type, ncclSum, g->comm, GPU_STREAM(g, 0)));
	gpu_get(g, sum, out, bytes);
	if (t == 0) check_order(r, f, sum);
	check_same(g, all, sum, bytes, out);
	snprintf(kernel, sizeof(kernel), "%s%s_sum", f->kernel, types[t].name);
	REQUIRE(!gpu_is_fake() || gpu_count(kernel) > 0);
	/* In turn to every root. */
	for (int root = 0; root < r->nranks; root++)
		REQUIRE_OK(ncclReduce(GPU_PTR(in), GPU_PTR(root == r->rank ? out : 0), COUNT, types[t].type, ncclSum, root, g->comm, GPU_STREAM(g, 0)));
	gpu_get(g, at_root, out, bytes);
	if (f->in_rank_order || r->nranks == 2) {
		if (!f->windows) REQUIRE(memcmp(at_root, sum, bytes) == 0);
		check_same(g, all, at_root, bytes, out);
	}
}

static void all_types(struct gpu_rank *g)
{
	const struct family *f = g->arg;
	struct ranks *r = g->r;
	ncclWindow_t window = NULL;
	void *own = NULL;
	CUdeviceptr in = gpu_take(g, COUNT * 4, 0), out = gpu_take(g, COUNT * 4, 0), all = gpu_take(g, COUNT * 4 * (size_t)r->nranks, 0);
	if (f->windows) {
		REQUIRE_OK(ncclMemAlloc(&own, 64 << 10));
		REQUIRE_OK(ncclCommWindowRegister(g->comm, own, 64 << 10, &window, NCCL_WIN_COLL_SYMMETRIC));
		in = (CUdeviceptr)(uintptr_t)own;
		out = in + (32 << 10);
	}
	for (size_t t = 0; t < sizeof(types) / sizeof(types[0]); t++) one_type(g, f, t, in, out, all);
	ranks_barrier(r);
	if (!window) return;
	REQUIRE_OK(ncclCommWindowDeregister(g->comm, window));
	ranks_barrier(r);
	REQUIRE_OK(ncclMemFree(own));
	ranks_barrier(r);
}

static void all_ranks_get_the_same_bits(void **state)
{
	const struct family *f = *state;
	for (int n = 2; n <= 5; n += 1 + (n == 3)) {
		if (SANITIZED && n != 3) continue;
		struct gpu_options o = { .nranks = n, .pool_bytes = POOL, .env = { f->first ? f->first : f->second, f->first ? f->second : NULL } };
		assert_true(gpu_run(&o, all_types, (void *)(uintptr_t)f));
	}
}

int main(int argc, char **argv)
{
	enum { N = sizeof(families) / sizeof(families[0]) };
	struct CMUnitTest tests[N];
	int ntests = 0;
	gpu_need();
	for (size_t i = 0; i < N; i++)
		if (argc < 2 || strstr(families[i].name, argv[1]))
			tests[ntests++] = (struct CMUnitTest){ families[i].name, all_ranks_get_the_same_bits, NULL, NULL, (void *)(uintptr_t)&families[i] };
	return _cmocka_run_group_tests("cuda_same_bits", tests, (size_t)ntests, NULL, NULL);
}

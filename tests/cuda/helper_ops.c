#include "cuda/helper_ops.h"

const char *const op_kind_names[NKINDS] = { "all-reduce", "reduce", "reduce-scatter", "broadcast", "all-gather", "gather", "scatter", "all-to-all",
	"transfers" };

enum { MARGIN = 64, RUBBISH = 0x77 };

/* Sizes of transfers differ for each pair: up to two elements more than count, and little less where count is large. */
static size_t transfer_count(const struct gpu_op *o, int from, int to) { return o->count + 2 - (size_t)(from * 7 + to * 13) % (o->count + 3); }
static size_t stride(const struct gpu_op *o) { return o->count + 4; }

static size_t send_elements(const struct gpu_op *o)
{
	switch (o->kind) {
	case REDUCE_SCATTER: case SCATTER: case ALL_TO_ALL: return o->count * (size_t)o->nranks;
	case TRANSFERS: return stride(o) * (size_t)o->nranks;
	default: return o->count;
	}
}

static size_t recv_elements(const struct gpu_op *o)
{
	switch (o->kind) {
	case ALL_GATHER: case GATHER: case ALL_TO_ALL: return o->count * (size_t)o->nranks;
	case TRANSFERS: return stride(o) * (size_t)o->nranks;
	default: return o->count;
	}
}

size_t op_pool_bytes(const struct gpu_op *o)
{
	return (send_elements(o) + recv_elements(o) + 16) * ranks_type_bytes(o->type) + 6 * 512 + 4 * MARGIN;
}

/* Gathers that are in place read the rank's own part of recv. */
static bool reads_recv(const struct gpu_op *o)
{
	return o->in_place && (o->kind == ALL_GATHER || (o->kind == GATHER && o->rank == o->root));
}

void op_fill(struct gpu_rank *g, struct gpu_op *o, uint64_t seed)
{
	size_t size = ranks_type_bytes(o->type), n = send_elements(o);
	unsigned char *image = malloc((o->send_bytes > o->recv_bytes ? o->send_bytes : o->recv_bytes) + 1);
	o->seed = seed;
	memset(image, RUBBISH, o->send_bytes);
	for (size_t i = 0; i < n; i++) ranks_put(image + MARGIN, i, o->type, ranks_value(seed, o->rank, i, o->op));
	gpu_put(g, o->send - MARGIN, image, o->send_bytes);
	memset(image, RUBBISH, o->recv_bytes);
	if (reads_recv(o))
		for (size_t i = 0; i < o->count; i++)
			ranks_put(image + MARGIN + (size_t)o->rank * o->count * size, i, o->type, ranks_value(seed, o->rank, i, o->op));
	gpu_put(g, o->recv - MARGIN, image, o->recv_bytes);
	free(image);
}

void op_prepare(struct gpu_rank *g, struct gpu_op *o)
{
	size_t size = ranks_type_bytes(o->type);
	o->send_bytes = send_elements(o) * size + 2 * MARGIN;
	o->recv_bytes = recv_elements(o) * size + 2 * MARGIN;
	o->send = gpu_take(g, o->send_bytes, (size_t)o->skew_send * size) + MARGIN;
	o->recv = gpu_take(g, o->recv_bytes, (size_t)o->skew_recv * size) + MARGIN;
	op_fill(g, o, o->seed);
}

static ncclResult_t transfers(const struct gpu_op *o, ncclComm_t comm, cudaStream_t stream)
{
	size_t step = stride(o) * ranks_type_bytes(o->type);
	ncclGroupStart();
	for (int i = 0; i < o->nranks; i++) {
		int to = (i + o->root) % o->nranks;
		ncclSend(GPU_PTR(o->send + (size_t)to * step), transfer_count(o, o->rank, to), o->type, to, comm, stream);
		ncclRecv(GPU_PTR(o->recv + (size_t)i * step), transfer_count(o, i, o->rank), o->type, i, comm, stream);
	}
	return ncclGroupEnd();
}

/* Where the result lies. */
static CUdeviceptr result_at(const struct gpu_op *o)
{
	size_t own = (size_t)o->rank * o->count * ranks_type_bytes(o->type);
	if (!o->in_place) return o->recv;
	switch (o->kind) {
	case ALL_REDUCE: case REDUCE: case BROADCAST: return o->send;
	case REDUCE_SCATTER: return o->send + own;
	case SCATTER: return o->rank == o->root ? o->send + own : o->recv;
	default: return o->recv;
	}
}

ncclResult_t op_issue(const struct gpu_op *o, ncclComm_t comm, CUstream handle)
{
	cudaStream_t stream = (cudaStream_t)handle;
	bool is_root = o->rank == o->root;
	size_t own = (size_t)o->rank * o->count * ranks_type_bytes(o->type);
	void *s = GPU_PTR(o->send), *t = GPU_PTR(o->recv), *out = GPU_PTR(result_at(o));
	const void *in = reads_recv(o) ? (char *)t + own : s;
	switch (o->kind) {
	case ALL_REDUCE: return ncclAllReduce(s, out, o->count, o->type, o->op, comm, stream);
	case REDUCE: return ncclReduce(s, is_root || o->in_place ? out : NULL, o->count, o->type, o->op, o->root, comm, stream);
	case REDUCE_SCATTER: return ncclReduceScatter(s, out, o->count, o->type, o->op, comm, stream);
	case BROADCAST: return ncclBroadcast(is_root || o->in_place ? s : NULL, out, o->count, o->type, o->root, comm, stream);
	case ALL_GATHER: return ncclAllGather(in, t, o->count, o->type, comm, stream);
	case GATHER: return ncclGather(in, is_root ? t : NULL, o->count, o->type, o->root, comm, stream);
	case SCATTER: return ncclScatter(is_root ? s : NULL, out, o->count, o->type, o->root, comm, stream);
	case ALL_TO_ALL: return ncclAlltoAll(s, t, o->count, o->type, comm, stream);
	default: return transfers(o, comm, stream);
	}
}

static void wrong(const struct gpu_rank *g, const struct gpu_op *o, const char *what, size_t i, double got, double wanted)
{
	fprintf(stderr, "rank %d of %d (%d of %d in the communicator), %s: %s at %zu is %g, not %g; count %zu type %d op %d root %d %s skew %d %d; last error: %s\n",
		g->r->rank, g->r->nranks, o->rank, o->nranks, op_kind_names[o->kind], what, i, got, wanted, o->count, (int)o->type, (int)o->op, o->root,
		o->in_place ? "in place" : "out of place", o->skew_send, o->skew_recv, ncclGetLastError(NULL));
	_exit(9);
}

static void check_reduced(const struct gpu_rank *g, const struct gpu_op *o, const unsigned char *got, size_t first)
{
	for (size_t i = 0; i < o->count; i++) {
		double tolerance, wanted = ranks_reduced(o->seed, o->nranks, first + i, o->type, o->op, &tolerance), value = ranks_get(got, i, o->type);
		if (!ranks_equal(value, wanted, tolerance)) wrong(g, o, "the result", i, value, wanted);
	}
}

static void check_copied(const struct gpu_rank *g, const struct gpu_op *o, const unsigned char *got, int from, size_t first, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		double value = ranks_get(got, i, o->type), wanted = ranks_value(o->seed, from, first + i, o->op);
		if (value != wanted) wrong(g, o, "the copy", i, value, wanted);
	}
}

static void check_margins(const struct gpu_rank *g, const struct gpu_op *o, const unsigned char *image, size_t bytes)
{
	for (size_t i = 0; i < MARGIN; i++) {
		if (image[i] != RUBBISH) wrong(g, o, "a byte before the buffer", MARGIN - i, image[i], RUBBISH);
		if (image[bytes - 1 - i] != RUBBISH) wrong(g, o, "a byte behind the buffer", MARGIN - i, image[bytes - 1 - i], RUBBISH);
	}
}

void op_check(struct gpu_rank *g, const struct gpu_op *o)
{
	size_t size = ranks_type_bytes(o->type);
	bool is_root = o->rank == o->root, in_send = result_at(o) >= o->send - MARGIN && result_at(o) < o->send - MARGIN + o->send_bytes;
	CUdeviceptr base = (in_send ? o->send : o->recv) - MARGIN;
	size_t bytes = in_send ? o->send_bytes : o->recv_bytes;
	unsigned char *image = malloc(bytes), *got = image + (result_at(o) - base);
	gpu_get(g, image, base, bytes);
	check_margins(g, o, image, bytes);
	switch (o->kind) {
	case ALL_REDUCE: check_reduced(g, o, got, 0); break;
	case REDUCE: if (is_root) check_reduced(g, o, got, 0); break;
	case REDUCE_SCATTER: check_reduced(g, o, got, (size_t)o->rank * o->count); break;
	case BROADCAST: check_copied(g, o, got, o->root, 0, o->count); break;
	case ALL_GATHER: case GATHER:
		for (int k = 0; k < o->nranks && (o->kind == ALL_GATHER || is_root); k++) check_copied(g, o, got + (size_t)k * o->count * size, k, 0, o->count);
		break;
	case SCATTER: check_copied(g, o, got, o->root, (size_t)o->rank * o->count, o->count); break;
	case ALL_TO_ALL:
		for (int k = 0; k < o->nranks; k++) check_copied(g, o, got + (size_t)k * o->count * size, k, (size_t)o->rank * o->count, o->count);
		break;
	default:
		for (int k = 0; k < o->nranks; k++)
			check_copied(g, o, got + (size_t)k * stride(o) * size, k, (size_t)o->rank * stride(o), transfer_count(o, k, o->rank));
		break;
	}
	free(image);
}

void op_run(struct gpu_rank *g, struct gpu_op *o, ncclComm_t comm, int stream)
{
	struct ranks *r = g->r;
	op_prepare(g, o);
	REQUIRE_OK(op_issue(o, comm, g->streams[stream]));
	gpu_sync(g, stream);
	op_check(g, o);
	gpu_reset(g);
}

uint64_t draw(struct random *random)
{
	uint64_t x = random->state += 0x9e3779b97f4a7c15u;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
	return x ^ (x >> 31);
}

size_t below(struct random *random, size_t n) { return (size_t)(draw(random) % n); }

size_t draw_count(struct random *random)
{
	switch (below(random, 8)) {
	case 0: return below(random, 3);
	case 1: return 1 + below(random, 16);
	case 2: case 3: return below(random, 300);
	case 4: case 5: return below(random, 3000 * gpu_scale());
	case 6: return below(random, 12000 * gpu_scale());
	default: return 1 + ((size_t)1 << below(random, 14)) * gpu_scale();
	}
}

void draw_op(struct random *random, int nranks, struct gpu_op *o)
{
	memset(o, 0, sizeof(*o));
	o->kind = (enum op_kind)below(random, NKINDS);
	o->count = draw_count(random);
	o->type = (ncclDataType_t)below(random, ncclNumTypes);
	o->op = (ncclRedOp_t)below(random, ncclNumOps);
	o->in_place = below(random, 2) && o->kind != ALL_TO_ALL;
	bool skewed = below(random, 3) == 0;
	int skew_send = (int)below(random, 17), skew_recv = (int)below(random, 17);
	if (skewed) {
		o->skew_send = skew_send;
		o->skew_recv = skew_recv;
	}
	o->seed = draw(random);
	size_t root = below(random, 1 << 20);
	o->root = nranks ? (int)(root % (size_t)nranks) : 0;
}

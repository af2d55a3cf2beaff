/* Random programs: communicators, groups, types, counts, in place or not, streams, on 1 to 8 ranks, each result compared
 * with a plain reference. One seed makes a program, the same on all ranks; it is printed where something is wrong.
 *   test_api_random_programs [seconds [seed]]     (TELPHER_RANDOM_SECONDS, TELPHER_RANDOM_SEED) */
#include <time.h>

#include "api/helper_ranks.h"

#define MAX_COMMS 4
#define MAX_PENDING 12
#define MAX_STREAMS 3

struct random { uint64_t state; };

static uint64_t draw(struct random *random)
{
	uint64_t x = random->state += 0x9e3779b97f4a7c15u;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
	return x ^ (x >> 31);
}

static size_t below(struct random *random, size_t n) { return (size_t)(draw(random) % n); }

static size_t draw_count(struct random *random)
{
	switch (below(random, 8)) {
	case 0: return below(random, 3);
	case 1: return 1 + below(random, 16);
	case 2: case 3: return below(random, 300);
	case 4: case 5: return below(random, 3000);
	case 6: return below(random, 20000);
	default: return 1 + ((size_t)1 << below(random, 15));
	}
}

struct member { ncclComm_t comm; int rank, nranks; };   /* nranks 0: none */

enum kind { ALL_REDUCE, REDUCE, REDUCE_SCATTER, BROADCAST, ALL_GATHER, GATHER, SCATTER, ALL_TO_ALL, TRANSFERS, NKINDS };

/* One operation: drawn alike on all ranks. */
struct operation {
	enum kind kind;
	int comm, root, stream;
	size_t count;
	ncclDataType_t type;
	ncclRedOp_t op;
	bool in_place;
	uint64_t seed;
	unsigned char *send, *recv;
};

struct program {
	struct ranks *r;
	struct random random;
	struct member members[MAX_COMMS];
	int ncomms;
	cudaStream_t streams[MAX_STREAMS];  /* [0]: NULL */
	struct operation pending[MAX_PENDING];
	int npending;
	uint64_t seed;
};

static void require(struct program *p, bool good, const struct operation *o, const char *what, size_t i)
{
	if (good) return;
	fprintf(stderr, "seed %llu, rank %d of %d: %s wrong at %zu: kind %d comm %d (%d of %d) count %zu type %d op %d root %d in place %d stream %d;"
		" last error: %s\n", (unsigned long long)p->seed, p->r->rank, p->r->nranks, what, i, o->kind, o->comm, p->members[o->comm].rank,
		p->members[o->comm].nranks, o->count, (int)o->type, (int)o->op, o->root, o->in_place, o->stream, ncclGetLastError(NULL));
	_exit(9);
}

/* Sizes of transfers differ for each pair. */
static size_t transfer_count(const struct operation *o, int from, int to)
{
	return (o->count + (size_t)(from * 7 + to * 13)) % (o->count + 3);
}

static void prepare(struct program *p, struct operation *o)
{
	const struct member *m = &p->members[o->comm];
	size_t bytes = (o->count + 4) * (size_t)m->nranks * ranks_type_bytes(o->type);
	size_t elements = (o->count + 4) * (size_t)m->nranks;
	o->send = malloc(bytes);
	o->recv = malloc(bytes);
	memset(o->recv, 0x77, bytes);
	for (size_t i = 0; i < elements; i++) ranks_put(o->send, i, o->type, ranks_value(o->seed, m->rank, i, o->op));
}

static ncclResult_t transfers(struct program *p, struct operation *o, ncclComm_t comm, cudaStream_t stream)
{
	const struct member *m = &p->members[o->comm];
	size_t size = ranks_type_bytes(o->type), stride = (o->count + 4) * size;
	ncclGroupStart();
	for (int i = 0; i < m->nranks; i++) {
		int to = (i + o->root) % m->nranks;
		ncclSend(o->send + (size_t)to * stride, transfer_count(o, m->rank, to), o->type, to, comm, stream);
		ncclRecv(o->recv + (size_t)i * stride, transfer_count(o, i, m->rank), o->type, i, comm, stream);
	}
	return ncclGroupEnd();
}

static ncclResult_t issue(struct program *p, struct operation *o)
{
	const struct member *m = &p->members[o->comm];
	ncclComm_t comm = m->comm;
	cudaStream_t stream = p->streams[o->stream];
	size_t size = ranks_type_bytes(o->type), own = (size_t)m->rank * o->count * size, bytes = o->count * size;
	bool is_root = m->rank == o->root;
	unsigned char *s = o->send, *t = o->recv;
	switch (o->kind) {
	case ALL_REDUCE: return ncclAllReduce(s, o->in_place ? s : t, o->count, o->type, o->op, comm, stream);
	case REDUCE: return ncclReduce(s, o->in_place ? s : is_root ? t : NULL, o->count, o->type, o->op, o->root, comm, stream);
	case REDUCE_SCATTER: return ncclReduceScatter(s, o->in_place ? s + own : t, o->count, o->type, o->op, comm, stream);
	case BROADCAST: return ncclBroadcast(is_root || o->in_place ? s : NULL, o->in_place ? s : t, o->count, o->type, o->root, comm, stream);
	case ALL_GATHER:
		if (o->in_place) memcpy(t + own, s, bytes);
		return ncclAllGather(o->in_place ? t + own : s, t, o->count, o->type, comm, stream);
	case GATHER:
		if (o->in_place && is_root) memcpy(t + own, s, bytes);
		return ncclGather(o->in_place && is_root ? t + own : s, is_root ? t : NULL, o->count, o->type, o->root, comm, stream);
	case SCATTER: return ncclScatter(is_root ? s : NULL, o->in_place && is_root ? s + own : t, o->count, o->type, o->root, comm, stream);
	case ALL_TO_ALL: return ncclAlltoAll(s, t, o->count, o->type, comm, stream);
	default: return transfers(p, o, comm, stream);
	}
}

static void check_reduced(struct program *p, struct operation *o, const unsigned char *got, size_t first)
{
	for (size_t i = 0; i < o->count; i++) {
		double tolerance, wanted = ranks_reduced(o->seed, p->members[o->comm].nranks, first + i, o->type, o->op, &tolerance);
		require(p, ranks_equal(ranks_get(got, i, o->type), wanted, tolerance), o, "sum", i);
	}
}

static void check_copied(struct program *p, struct operation *o, const unsigned char *got, int from, size_t first, size_t n)
{
	for (size_t i = 0; i < n; i++)
		require(p, ranks_get(got, i, o->type) == ranks_value(o->seed, from, first + i, o->op), o, "copy", i);
}

static void check(struct program *p, struct operation *o)
{
	const struct member *m = &p->members[o->comm];
	size_t size = ranks_type_bytes(o->type), own = (size_t)m->rank * o->count, stride = (o->count + 4) * size;
	bool is_root = m->rank == o->root;
	unsigned char *s = o->send, *t = o->recv;
	switch (o->kind) {
	case ALL_REDUCE: check_reduced(p, o, o->in_place ? s : t, 0); break;
	case REDUCE: if (is_root) check_reduced(p, o, o->in_place ? s : t, 0); break;
	case REDUCE_SCATTER: check_reduced(p, o, o->in_place ? s + own * size : t, own); break;
	case BROADCAST: check_copied(p, o, o->in_place ? s : t, o->root, 0, o->count); break;
	case GATHER: case ALL_GATHER:
		for (int k = 0; k < m->nranks && (o->kind == ALL_GATHER || is_root); k++)
			check_copied(p, o, t + (size_t)k * o->count * size, k, 0, o->count);
		break;
	case SCATTER: check_copied(p, o, o->in_place && is_root ? s + own * size : t, o->root, own, o->count); break;
	case ALL_TO_ALL:
		for (int k = 0; k < m->nranks; k++) check_copied(p, o, t + (size_t)k * o->count * size, k, own, o->count);
		break;
	default:
		for (int k = 0; k < m->nranks; k++)
			check_copied(p, o, t + (size_t)k * stride, k, (size_t)m->rank * (o->count + 4), transfer_count(o, k, m->rank));
		break;
	}
	free(s);
	free(t);
}

static void settle(struct program *p)
{
	for (int s = 1; s < MAX_STREAMS; s++)
		require(p, telpher_stream_synchronize(p->streams[s]) == ncclSuccess, &p->pending[0], "synchronize", (size_t)s);
	for (int i = 0; i < p->npending; i++) check(p, &p->pending[i]);
	p->npending = 0;
}

/* All members of the communicator draw the same; who isn't one skips it, but draws too. */
static void draw_operation(struct program *p, struct operation *o)
{
	struct random *random = &p->random;
	memset(o, 0, sizeof(*o));
	o->kind = (enum kind)below(random, NKINDS);
	o->comm = (int)below(random, (size_t)p->ncomms);
	o->count = draw_count(random);
	o->type = (ncclDataType_t)below(random, ncclNumTypes);
	o->op = (ncclRedOp_t)below(random, ncclNumOps);
	o->stream = (int)below(random, MAX_STREAMS);
	o->in_place = below(random, 2) && o->kind != ALL_TO_ALL;
	o->seed = draw(random);
	size_t root = below(random, 1 << 20);
	o->root = p->members[o->comm].nranks ? (int)(root % (size_t)p->members[o->comm].nranks) : 0;
}

static void run_operations(struct program *p)
{
	bool grouped = below(&p->random, 3) == 0;
	int n = grouped ? 1 + (int)below(&p->random, 5) : 1;
	if (p->npending + n > MAX_PENDING) settle(p);
	int first = p->npending, stream = (int)below(&p->random, MAX_STREAMS);
	for (int i = 0; i < n; i++) {
		struct operation o;
		draw_operation(p, &o);
		/* Sends and receives of one communicator in a group are one operation: the order of the streams would be too. */
		if (grouped) o.stream = stream;
		if (!p->members[o.comm].nranks) continue;
		prepare(p, &o);
		p->pending[p->npending++] = o;
	}
	if (grouped) require(p, ncclGroupStart() == ncclSuccess, &p->pending[0], "group", 0);
	for (int i = first; i < p->npending; i++)
		require(p, issue(p, &p->pending[i]) == ncclSuccess, &p->pending[i], "call", (size_t)i);
	if (grouped) require(p, ncclGroupEnd() == ncclSuccess, &p->pending[first], "group", 1);
}

/* A new communicator of some ranks of the first, in some order. */
static void split(struct program *p)
{
	settle(p);
	int slot = 1 + (int)below(&p->random, MAX_COMMS - 1);
	uint64_t salt = draw(&p->random), colors = 1 + below(&p->random, 3);
	if (slot >= p->ncomms) slot = p->ncomms++;
	else if (p->members[slot].nranks) require(p, ncclCommDestroy(p->members[slot].comm) == ncclSuccess, &p->pending[0], "destroy", 0);
	struct member *m = &p->members[slot];
	memset(m, 0, sizeof(*m));
	/* Only colour 0 gets one, so that every rank draws for the same communicator. */
	struct random own = { salt + (uint64_t)p->r->rank };
	int color = below(&own, colors) == 0 ? 0 : NCCL_SPLIT_NOCOLOR, key = (int)below(&own, 5) - 2;
	require(p, ncclCommSplit(p->members[0].comm, color, key, &m->comm, NULL) == ncclSuccess, &p->pending[0], "split", 0);
	if (!m->comm) return;
	require(p, ncclCommCount(m->comm, &m->nranks) == ncclSuccess, &p->pending[0], "count", 0);
	require(p, ncclCommUserRank(m->comm, &m->rank) == ncclSuccess, &p->pending[0], "rank", 0);
}

static void run_program(struct ranks *r)
{
	struct program *p = calloc(1, sizeof(*p));
	p->r = r;
	p->seed = *(uint64_t *)r->arg;
	p->random.state = p->seed;
	p->members[0] = (struct member){ r->comm, r->rank, r->nranks };
	p->ncomms = 1;
	for (int s = 1; s < MAX_STREAMS; s++) REQUIRE_OK(telpher_stream_create(&p->streams[s]));
	for (int i = 0; i < 60; i++) {
		if (below(&p->random, 12) == 0) split(p);
		else run_operations(p);
	}
	settle(p);
	for (int c = 1; c < p->ncomms; c++)
		if (p->members[c].nranks) REQUIRE_OK(ncclCommDestroy(p->members[c].comm));
	for (int s = 1; s < MAX_STREAMS; s++) REQUIRE_OK(telpher_stream_destroy(p->streams[s]));
	free(p);
}

static double seconds_to_run = 5;
static uint64_t first_seed;

static void results_equal_the_reference(void **state)
{
	(void)state;
	uint64_t end = ranks_now_ms() + (uint64_t)(seconds_to_run * 1000);
	int programs = 0;
	for (uint64_t seed = first_seed; programs == 0 || ranks_now_ms() < end; seed++, programs++) {
		struct random random = { seed ^ 0x1234567 };
		struct ranks_options options = { .nranks = 1 + (int)below(&random, 8), .timeout_s = 150 };
		options.threads = below(&random, 3) == 0;
		options.nhosts = !options.threads && below(&random, 3) == 0 ? 1 + (int)below(&random, (size_t)options.nranks) : 1;
		if (!ranks_run(&options, run_program, &seed))
			fail_msg("seed %llu: %d ranks, %d hosts, %s", (unsigned long long)seed, options.nranks, options.nhosts,
				options.threads ? "threads" : "processes");
	}
	print_message("%d programs from seed %llu\n", programs, (unsigned long long)first_seed);
}

int main(int argc, char **argv)
{
	const char *seconds = argc > 1 ? argv[1] : getenv("TELPHER_RANDOM_SECONDS"), *seed = argc > 2 ? argv[2] : getenv("TELPHER_RANDOM_SEED");
	if (seconds) seconds_to_run = atof(seconds);
	first_seed = seed ? strtoull(seed, NULL, 0) : (uint64_t)time(NULL);
	const struct CMUnitTest tests[] = { cmocka_unit_test(results_equal_the_reference) };
	return cmocka_run_group_tests(tests, NULL, NULL);
}

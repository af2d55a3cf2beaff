/* Registered buffers of GPU ranks on different hosts are sent from where they lie: ranks on two virtual hosts over the software card, which reads device memory. That
 * results are right, that data really is lent, where it isn't and why, and what a buffer's end does.
 *   test_cuda_lent [pattern of tests' names] */
#include "cuda/helper_ops.h"

static char folder[64];

static char *read_log(void)
{
	char path[128];
	snprintf(path, sizeof(path), "%s/%d", folder, (int)getpid());
	FILE *in = fopen(path, "r");
	char *text = calloc(1, 4 << 20);
	CHECK(in && text && fread(text, 1, (4 << 20) - 1, in) > 0);
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

/* What this rank's ended communicators have said of what they lent: the last of them. */
struct lent { unsigned long long chunks, bytes, late; };
static struct lent lent_of(const struct ranks *r)
{
	struct lent lent = { 0 };
	char what[64], *text = read_log();
	snprintf(what, sizeof(what), "rank %d sent ", r->rank);
	for (const char *at = strstr(text, what); at; at = strstr(at + 1, what))
		CHECK(sscanf(at + strlen(what), "%llu chunks, %llu bytes, over the network from where they lay in its registered buffers, and copied %llu late", &lent.chunks, &lent.bytes,
			&lent.late) == 3);
	free(text);
	return lent;
}

static void open_comm(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	REQUIRE_OK(ncclCommInitRank(&g->comm, r->nranks, r->id, r->rank));
}

static void *register_pool(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	void *handle;
	REQUIRE_OK(ncclCommRegister(g->comm, GPU_PTR(g->pool), g->pool_bytes, &handle));
	return handle;
}

static struct lent close_comm(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	ranks_barrier(r);
	REQUIRE_OK(ncclCommDestroy(g->comm));
	g->comm = NULL;
	return lent_of(r);
}

static void every_kind(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	open_comm(g);
	register_pool(g);
	for (int kind = 0; kind < NKINDS; kind++) {
		struct gpu_op o = { .kind = (enum op_kind)kind, .rank = r->rank, .nranks = r->nranks, .root = 0, .count = 400000, .type = ncclFloat32, .seed = 3 };
		op_run(g, &o, g->comm, 1);
	}
	struct lent l = close_comm(g);
	fprintf(stderr, "rank %d lent %llu %llu %llu\n", r->rank, l.chunks, l.bytes, l.late);
}

static void x(void **state)
{
	(void)state;
	struct gpu_options o = { .nranks = 2, .nhosts = 2, .no_comm = true, .pool_bytes = (size_t)32 << 20, .env = { "NCCL_NET_GDR_LEVEL=SYS", "FAKE_CUDA_DMABUF=1" } };
	assert_true(gpu_run(&o, every_kind, NULL));
	o.nranks = 4;
	assert_true(gpu_run(&o, every_kind, NULL));
}
int main(void)
{
	char file[96];
	if (!gpu_fake_here()) return 77;
	strcpy(folder, "/tmp/telpher_lent_XXXXXX");
	if (!mkdtemp(folder)) return 1;
	snprintf(file, sizeof(file), "%s/%%p", folder);
	setenv("NCCL_IB_HCA", "telpher", 1);
	setenv("TELPHER_VERBS_HIDE_REAL", "1", 1);
	setenv("NCCL_DEBUG", "INFO", 1);
	setenv("NCCL_DEBUG_SUBSYS", "INIT,NET,REG,TUNING", 1);
	setenv("NCCL_DEBUG_FILE", file, 1);
	(void)log_has;
	const struct CMUnitTest tests[] = { cmocka_unit_test(x) };
	return cmocka_run_group_tests_name("cuda_lent", tests, NULL, NULL);
}

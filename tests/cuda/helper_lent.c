#include "cuda/helper_lent.h"

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

bool lent_log_has(const char *what)
{
	char *text = read_log();
	bool found = strstr(text, what) != NULL;
	free(text);
	return found;
}

/* But for a word of the card: a process that gets no processor for a second looks like one that has been stopped. */
bool lent_warns(void)
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

bool lent_is(struct lent now, unsigned long long bytes)
{
	return now.late == 0 && (gpu_is_fake() || !bytes ? now.bytes == bytes : now.bytes > 0 && now.bytes <= bytes);
}

void lent_open_comm(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	ncclUniqueId *id = (ncclUniqueId *)r->shared->bytes;
	if (r->rank == 0) REQUIRE_OK(ncclGetUniqueId(id));
	ranks_barrier(r);
	REQUIRE_OK(ncclCommInitRank(&g->comm, r->nranks, *id, r->rank));
	ranks_barrier(r);
}

void *lent_register_range(struct gpu_rank *g, CUdeviceptr at, size_t bytes)
{
	struct ranks *r = g->r;
	void *handle = NULL;
	REQUIRE_OK(ncclCommRegister(g->comm, GPU_PTR(at), bytes, &handle));
	REQUIRE(handle);
	return handle;
}
void *lent_register_pool(struct gpu_rank *g) { return lent_register_range(g, g->pool, g->pool_bytes); }

struct lent lent_close_comm(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	ranks_barrier(r);
	REQUIRE_OK(ncclCommDestroy(g->comm));
	g->comm = NULL;
	return lent_of(r);
}

void lent_run_op(struct gpu_rank *g, struct gpu_op o)
{
	o.rank = g->r->rank;
	o.nranks = g->r->nranks;
	op_run(g, &o, g->comm, 1);
}

struct gpu_options lent_on_two_hosts(int nranks, const char *env, const char *more)
{
	return (struct gpu_options){ .nranks = nranks, .nhosts = 2, .no_comm = true, .pool_bytes = (size_t)32 << 20, .env = { GDR, env, more } };
}

int lent_main(const char *name, const struct CMUnitTest *tests, size_t ntests, const char *pattern)
{
	char file[96], command[96];
	gpu_need();
	strcpy(folder, "/tmp/telpher_lent_XXXXXX");
	if (!mkdtemp(folder)) return 1;
	snprintf(file, sizeof(file), "%s/%%p", folder);
	setenv("NCCL_IB_HCA", "telpher", 1);
	setenv("TELPHER_VERBS_HIDE_REAL", "1", 1);
	setenv("NCCL_DEBUG", "INFO", 1);
	setenv("NCCL_DEBUG_SUBSYS", "INIT,NET,REG", 1);
	setenv("NCCL_DEBUG_FILE", file, 1);
	if (pattern) cmocka_set_test_filter(pattern);
	int failed = _cmocka_run_group_tests(name, tests, ntests, NULL, NULL);
	snprintf(command, sizeof(command), "rm -rf %s", folder);
	return system(command) ? 1 : failed;
}

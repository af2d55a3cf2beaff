#include "cuda/helper_gpu.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sys/wait.h>

struct tp_cuda cuda;
static void *library;

static void open_once(void)
{
	int count = 0;
	const char *path = getenv("TELPHER_CUDA_LIBRARY");
	void *opened = dlopen(path && *path ? path : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	if (!opened) return;
#define FIND(name, symbol, parameters) *(void **)&cuda.name = dlsym(opened, #symbol);
	TP_CUDA_FUNCTIONS(FIND, FIND)
#undef FIND
	if (cuda.Init && cuda.Init(0) == CUDA_SUCCESS && cuda.DeviceGetCount(&count) == CUDA_SUCCESS && count > 0) library = opened;
}

bool gpu_open(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	pthread_once(&once, open_once);
	return library;
}

static void ask(void) { _exit(gpu_open() ? 0 : 1); }

void gpu_need(void)
{
	if (gpu_in_child(ask, NULL)) return;
	fprintf(stderr, "skipped: no GPU here, and no fake driver in TELPHER_CUDA_LIBRARY\n");
	exit(77);
}

static long long (*find_count(void))(const char *)
{
	long long (*count)(const char *) = NULL;
	*(void **)&count = dlsym(library, "fakeCudaCount");
	return count;
}

bool gpu_is_fake(void) { return gpu_open() && find_count(); }

static void answer_fake(void) { _exit(gpu_is_fake() ? 0 : 1); }
bool gpu_fake_here(void) { return gpu_in_child(answer_fake, NULL); }

long long gpu_count(const char *what)
{
	long long (*count)(const char *) = find_count();
	return count ? count(what) : -1;
}

static int run_child(void (*body)(void), const char *const *env)
{
	int status;
	fflush(NULL);
	pid_t pid = fork();
	if (pid == 0) {
		alarm(200);
		for (; env && *env; env++) {
			char *copy = strdup(*env), *value = strchr(copy, '=');
			*value++ = '\0';
			setenv(copy, value, 1);
			if (strcmp(copy, "SECONDS") == 0) alarm((unsigned)atoi(value));
			free(copy);
		}
		body();
		exit(0);
	}
	return waitpid(pid, &status, 0) == pid ? status : -1;
}

bool gpu_in_child(void (*body)(void), const char *const *env) { return run_child(body, env) == 0; }
bool gpu_child_fails(void (*body)(void), const char *const *env) { return run_child(body, env) != 0; }

CUcontext gpu_context(int ordinal)
{
	CUcontext context;
	CHECK(gpu_open());
	CUDA_OK(DevicePrimaryCtxRetain(&context, ordinal));
	CUDA_OK(CtxSetCurrent(context));
	return context;
}

size_t gpu_scale(void)
{
	const char *text = getenv("GPU_TEST_SCALE");
	long scale = text ? strtol(text, NULL, 10) : 1;
	return scale > 1 ? (size_t)scale : 1;
}

/* Ranks. */
struct run { const struct gpu_options *options; gpu_body body; void *arg; };

static void open_rank(struct gpu_rank *g, const struct gpu_options *o)
{
	struct ranks *r = g->r;
	int count;
	REQUIRE(gpu_open());
	CUDA_OK(DeviceGetCount(&count));
	g->ndevices = o->ndevices > 1 && o->ndevices < count ? o->ndevices : o->ndevices > 1 ? count : 1;
	g->device = r->rank % g->ndevices;
	gpu_context(g->device);
	g->pool_bytes = (o->pool_bytes ? o->pool_bytes : (size_t)4 << 20) * gpu_scale();
	CUDA_OK(MemAlloc(&g->pool, g->pool_bytes));
	CUDA_OK(MemHostAlloc((void **)&g->host, g->pool_bytes, CU_MEMHOSTALLOC_PORTABLE));
	for (int s = 0; s < GPU_STREAMS; s++) CUDA_OK(StreamCreate(&g->streams[s], CU_STREAM_NON_BLOCKING));
	ranks_barrier(r);
}

static void close_rank(struct gpu_rank *g)
{
	for (int s = 0; s < GPU_STREAMS; s++) CUDA_OK(StreamSynchronize(g->streams[s]));
	ranks_barrier(g->r);
	for (int s = 0; s < GPU_STREAMS; s++) CUDA_OK(StreamDestroy(g->streams[s]));
	CUDA_OK(MemFreeHost(g->host));
	CUDA_OK(MemFree(g->pool));
}

static void be_rank(struct ranks *r)
{
	struct run *run = r->arg;
	struct gpu_rank g = { .r = r, .arg = run->arg };
	open_rank(&g, run->options);
	if (!run->options->no_comm) REQUIRE_OK(ncclCommInitRank(&g.comm, r->nranks, r->id, r->rank));
	run->body(&g);
	for (int s = 0; s < GPU_STREAMS; s++) CUDA_OK(StreamSynchronize(g.streams[s]));
	if (g.comm) REQUIRE_OK(ncclCommDestroy(g.comm));
	if (run->options->may_die == 0) close_rank(&g);
}

bool gpu_run(const struct gpu_options *options, gpu_body body, void *arg)
{
	char devices[48];
	struct run run = { options, body, arg };
	struct ranks_options o = { .nranks = options->nranks, .nhosts = options->nhosts, .threads = options->threads, .no_comm = true,
		.may_die = options->may_die, .timeout_s = options->timeout_s ? options->timeout_s : ranks_patience_ms(100000) / 1000 };
	snprintf(devices, sizeof(devices), "FAKE_CUDA_DEVICES=%d", options->ndevices > 1 ? options->ndevices : 1);
	int n = 0;
	o.env[n++] = devices;
	o.env[n++] = "TELPHER_DEVICE=cuda";
	/* Several ranks of a process need queues of their own; of several processes MPS has not so many for all. */
	if (o.threads) o.env[n++] = "CUDA_DEVICE_MAX_CONNECTIONS=32";
	for (int i = 0; i < 5 && options->env[i]; i++) o.env[n++] = options->env[i];
	return ranks_run(&o, be_rank, &run);
}

void gpu_everywhere(gpu_body body, int nranks)
{
	/* Under a sanitizer processes of one GPU and threads of several. */
	for (int i = 0; i < 4; i += SANITIZED ? 3 : 1) {
		struct gpu_options o = { .nranks = nranks, .threads = i % 2, .ndevices = i < 2 ? 1 : nranks };
		assert_true(gpu_run(&o, body, NULL));
	}
	struct gpu_options hosts = { .nranks = nranks, .nhosts = 2 };
	assert_true(gpu_run(&hosts, body, NULL));
}

CUdeviceptr gpu_take(struct gpu_rank *g, size_t bytes, size_t skew)
{
	struct ranks *r = g->r;
	CUdeviceptr p = g->pool + g->used + skew;
	g->used += (bytes + skew + 511) / 256 * 256;
	REQUIRE(g->used <= g->pool_bytes);
	return p;
}

void gpu_reset(struct gpu_rank *g) { g->used = 0; }

void gpu_sync(struct gpu_rank *g, int stream) { CUDA_OK(StreamSynchronize(g->streams[stream])); }

CUgraphExec gpu_end_capture(struct gpu_rank *g, int stream)
{
	CUgraph graph;
	CUgraphExec exec;
	CUDA_OK(StreamEndCapture(g->streams[stream], &graph));
	CUDA_OK(GraphInstantiate(&exec, graph, 0));
	CUDA_OK(GraphDestroy(graph));
	return exec;
}

void gpu_put(struct gpu_rank *g, CUdeviceptr to, const void *from, size_t bytes)
{
	memcpy(g->host, from, bytes);
	CUDA_OK(MemcpyHtoDAsync(to, g->host, bytes, g->streams[0]));
	gpu_sync(g, 0);
}

void gpu_get(struct gpu_rank *g, void *to, CUdeviceptr from, size_t bytes)
{
	CUDA_OK(MemcpyDtoHAsync(g->host, from, bytes, g->streams[0]));
	gpu_sync(g, 0);
	memcpy(to, g->host, bytes);
}

void gpu_fill(struct gpu_rank *g, CUdeviceptr to, int value, size_t bytes)
{
	CUDA_OK(MemsetD8Async(to, (unsigned char)value, bytes, g->streams[0]));
	gpu_sync(g, 0);
}

#include "api/helper_ranks.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>

uint64_t ranks_now_ms(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

int ranks_patience_ms(int ms)
{
	double load = 0, cores = (double)sysconf(_SC_NPROCESSORS_ONLN);
	if (getloadavg(&load, 1) == 1 && load > 2 * cores) ms = (int)(ms * load / cores);
	return SANITIZED ? 2 * ms : ms;
}

static void nap(void)
{
	struct timespec t = { 0, 100000 };
	nanosleep(&t, NULL);
}

void ranks_barrier(struct ranks *r)
{
	_Atomic int *counter = &r->shared->barrier[r->barriers++ % 64];
	/* A counter comes round again after 64 barriers: each use adds nranks. */
	int use = (r->barriers - 1) / 64 + 1;
	atomic_fetch_add(counter, 1);
	while (atomic_load(counter) < use * r->nranks) nap();
}

static void get_id(struct ranks *r)
{
	if (r->rank == 0) {
		REQUIRE_OK(ncclGetUniqueId(&r->shared->id));
		atomic_store(&r->shared->id_ready, 1);
	}
	while (!atomic_load(&r->shared->id_ready)) nap();
	r->id = r->shared->id;
}

struct thread { struct ranks r; const struct ranks_options *options; ranks_body body; };

static void *run_rank(void *arg)
{
	struct thread *t = arg;
	struct ranks *r = &t->r;
	get_id(r);
	if (!t->options->no_comm) REQUIRE_OK(ncclCommInitRank(&r->comm, r->nranks, r->id, r->rank));
	t->body(r);
	if (r->comm) REQUIRE_OK(ncclCommDestroy(r->comm));
	/* The root's process must outlive those who still look for it. */
	atomic_fetch_add(&r->shared->left, 1);
	return NULL;
}

static void set_env(const struct ranks_options *options, int rank)
{
	for (size_t i = 0; i < sizeof(options->env) / sizeof(options->env[0]) && options->env[i]; i++) {
		char *copy = strdup(options->env[i]), *value = strchr(copy, '=');
		*value++ = '\0';
		setenv(copy, value, 1);
		free(copy);
	}
	if (options->nhosts > 1) {
		char host[32];
		snprintf(host, sizeof(host), "virtual-host-%d", rank * options->nhosts / options->nranks);
		setenv("NCCL_HOSTID", host, 1);
	}
	if (!getenv("NCCL_SOCKET_IFNAME")) setenv("NCCL_SOCKET_IFNAME", "lo", 1);
	if (!getenv("TELPHER_DEVICE")) setenv("TELPHER_DEVICE", "host", 1);
}

static void be_process(const struct ranks_options *options, struct ranks_shared *shared, int rank, ranks_body body, void *arg)
{
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	set_env(options, rank);
	struct thread threads[RANKS_MAX];
	pthread_t ids[RANKS_MAX];
	memset(threads, 0, sizeof(threads));
	int first = options->threads ? 0 : rank, end = options->threads ? options->nranks : rank + 1;
	for (int i = first; i < end; i++)
		threads[i] = (struct thread){ { .rank = i, .nranks = options->nranks, .shared = shared, .arg = arg }, options, body };
	if (!options->threads) run_rank(&threads[rank]);
	for (int i = first; i < end && options->threads; i++)
		if (pthread_create(&ids[i], NULL, run_rank, &threads[i])) _exit(8);
	for (int i = first; i < end && options->threads; i++) pthread_join(ids[i], NULL);
	exit(0);
}

bool ranks_run(const struct ranks_options *options, ranks_body body, void *arg)
{
	int nprocesses = options->threads ? 1 : options->nranks;
	struct ranks_shared *shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (shared == MAP_FAILED) return false;
	fflush(NULL);
	for (int p = 0; p < nprocesses; p++) {
		pid_t pid = fork();
		if (pid == 0) be_process(options, shared, p, body, arg);
		shared->pids[p] = pid;
	}
	uint64_t end = ranks_now_ms() + (uint64_t)(options->timeout_s ? options->timeout_s : 150) * 1000;
	bool good = true, killed = false;
	int left = nprocesses;
	pid_t pids[RANKS_MAX];
	memcpy(pids, shared->pids, sizeof(pids));
	while (left) {
		bool any = false;
		for (int p = 0; p < nprocesses; p++) {
			int status;
			if (!pids[p] || waitpid(pids[p], &status, WNOHANG) != pids[p]) continue;
			any = true;
			pids[p] = 0;
			left--;
			if ((options->may_die >> p & 1) || (WIFEXITED(status) && WEXITSTATUS(status) == 0)) continue;
			if (!killed)
				fprintf(stderr, "rank %d ended with %s %d\n", p, WIFSIGNALED(status) ? "signal" : "status",
					WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
			good = false;
			/* The others may wait for it for ever. */
			if (end > ranks_now_ms() + 5000) end = ranks_now_ms() + 5000;
		}
		if (!any) nap();
		if (!killed && ranks_now_ms() > end) {
			if (good) fprintf(stderr, "%d ranks haven't ended in time\n", left);
			good = false;
			killed = true;
			for (int p = 0; p < nprocesses; p++)
				if (pids[p]) kill(pids[p], SIGKILL);
		}
	}
	munmap(shared, sizeof(*shared));
	return good;
}

bool ranks_run_n(int nranks, ranks_body body, void *arg)
{
	struct ranks_options options = { .nranks = nranks };
	return ranks_run(&options, body, arg);
}

/* Floats as (exponent bits, mantissa bits); 0: an integer. */
static const struct { size_t bytes; int exponent, mantissa; bool is_signed; } types[ncclNumTypes] = {
	[ncclInt8] = { 1, 0, 0, true }, [ncclUint8] = { 1, 0, 0, false }, [ncclInt32] = { 4, 0, 0, true }, [ncclUint32] = { 4, 0, 0, false },
	[ncclInt64] = { 8, 0, 0, true }, [ncclUint64] = { 8, 0, 0, false }, [ncclFloat16] = { 2, 5, 10, true },
	[ncclFloat32] = { 4, 8, 23, true }, [ncclFloat64] = { 8, 11, 52, true }, [ncclBfloat16] = { 2, 8, 7, true },
	[ncclFloat8e4m3] = { 1, 4, 3, true }, [ncclFloat8e5m2] = { 1, 5, 2, true },
};

size_t ranks_type_bytes(ncclDataType_t type) { return types[type].bytes; }

double ranks_get(const void *buffer, size_t i, ncclDataType_t type)
{
	size_t bytes = types[type].bytes;
	uint64_t raw = 0;
	memcpy(&raw, (const char *)buffer + i * bytes, bytes);
	int e = types[type].exponent, m = types[type].mantissa;
	if (!e) {
		if (!types[type].is_signed) return (double)raw;
		int shift = 64 - 8 * (int)bytes;
		return (double)((int64_t)(raw << shift) >> shift);
	}
	uint64_t exponent = raw >> m & ((1u << e) - 1), mantissa = raw & ((UINT64_C(1) << m) - 1);
	int bias = (1 << (e - 1)) - 1;
	double value = exponent ? ldexp((double)(mantissa + (UINT64_C(1) << m)), (int)exponent - bias - m)
		: ldexp((double)mantissa, 1 - bias - m);
	return raw >> (e + m) & 1 ? -value : value;
}

void ranks_put(void *buffer, size_t i, ncclDataType_t type, double value)
{
	size_t bytes = types[type].bytes;
	int e = types[type].exponent, m = types[type].mantissa;
	uint64_t raw;
	if (!e) {
		raw = value < 0 ? (uint64_t)(int64_t)value : (uint64_t)value;
	} else if (value == 0) {
		raw = 0;
	} else {
		int exponent;
		double fraction = frexp(fabs(value), &exponent);        /* [0.5, 1) */
		uint64_t mantissa = (uint64_t)ldexp(fraction, m + 1) - (UINT64_C(1) << m);
		raw = ((uint64_t)(exponent - 1 + (1 << (e - 1)) - 1) << m) | mantissa;
		if (value < 0) raw |= UINT64_C(1) << (e + m);
	}
	memcpy((char *)buffer + i * bytes, &raw, bytes);
}

static uint64_t mix(uint64_t x)
{
	x += 0x9e3779b97f4a7c15u;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
	return x ^ (x >> 31);
}

double ranks_value(uint64_t seed, int rank, size_t i, ncclRedOp_t op)
{
	/* At most three ranks in eight have a factor of 2, so products stay below 16. */
	if (op == ncclProd) return (mix(seed ^ i) + (uint64_t)rank) % 3 == 0 ? 2 : 1;
	uint64_t h = mix(seed ^ mix(i) ^ ((uint64_t)(unsigned)rank << 40));
	return op == ncclMax || op == ncclMin ? (double)(h % 8) : (double)(h % 2);
}

double ranks_reduced(uint64_t seed, int n, size_t i, ncclDataType_t type, ncclRedOp_t op, double *tolerance)
{
	double result = ranks_value(seed, 0, i, op);
	for (int k = 1; k < n; k++) {
		double v = ranks_value(seed, k, i, op);
		if (op == ncclProd) result *= v;
		else if (op == ncclMax) result = fmax(result, v);
		else if (op == ncclMin) result = fmin(result, v);
		else result += v;
	}
	*tolerance = 0;
	if (op == ncclAvg) {
		result /= n;
		if (!types[type].exponent) result = trunc(result);
		else *tolerance = ldexp(1, -types[type].mantissa);
	}
	return result;
}

bool ranks_equal(double got, double wanted, double tolerance)
{
	return got == wanted || fabs(got - wanted) <= tolerance * fabs(wanted);
}

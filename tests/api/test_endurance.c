/* Nothing is lost: descriptors, threads, memory, over many lives; and too few descriptors are an error, not a crash. */
#include <dirent.h>
#include <malloc.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/resource.h>

#include "api/helper_ranks.h"

static int count_entries(const char *path)
{
	DIR *dir = opendir(path);
	int n = 0;
	while (dir && readdir(dir)) n++;
	if (dir) closedir(dir);
	return n;
}

static long resident_kb(void)
{
	long pages = 0;
	FILE *f = fopen("/proc/self/statm", "r");
	if (f && fscanf(f, "%*d %ld", &pages) != 1) pages = 0;
	if (f) fclose(f);
	return pages * (sysconf(_SC_PAGESIZE) / 1024);
}

static void one_life(struct ranks *r, int i, void *data)
{
	ncclComm_t comm;
	float *a = data;
	REQUIRE_OK(ncclCommSplit(r->comm, 0, i % 2 ? -r->rank : r->rank, &comm, NULL));
	REQUIRE_OK(ncclAllReduce(a, a, 10, ncclFloat, ncclMax, comm, NULL));
	REQUIRE_OK(ncclAllReduce(a, a, 20000, ncclFloat, ncclMax, comm, NULL));
	REQUIRE_OK(ncclGroupStart());
	REQUIRE_OK(ncclSend(a, 5, ncclFloat, 1 - r->rank, comm, NULL));
	REQUIRE_OK(ncclRecv(a + 10, 5, ncclFloat, 1 - r->rank, comm, NULL));
	REQUIRE_OK(ncclGroupEnd());
	if (i % 3 == 0) {
		cudaStream_t stream;
		REQUIRE_OK(telpher_stream_create(&stream));
		REQUIRE_OK(ncclBroadcast(a, a, 100, ncclFloat, 0, comm, stream));
		REQUIRE_OK(telpher_stream_synchronize(stream));
		REQUIRE_OK(telpher_stream_destroy(stream));
	}
	if (i % 2) REQUIRE_OK(ncclCommFinalize(comm));
	REQUIRE_OK(ncclCommDestroy(comm));
}

/* What ended communicators leave for a while (handles that are told from live ones, ids that late-comers ask for) is
 * bounded, and has come to its bound after so many lives; from then on not a byte. */
#define WARM_UP 200
#define SOME_BYTES 4096     /* what is in use for a moment: a connection that lingers */

static void many_lives(struct ranks *r)
{
	int lives = *(int *)r->arg;
	static float data[20000];
	for (int i = 0; i < WARM_UP; i++) one_life(r, i, data);
	ranks_barrier(r);
	usleep(100000);
	int fds = count_entries("/proc/self/fd"), threads = count_entries("/proc/self/task");
	size_t heap = mallinfo2().uordblks;
	long resident = resident_kb();
	for (int i = WARM_UP; i < lives; i++) one_life(r, i, data);
	ranks_barrier(r);
	usleep(100000);
	int fds_now = count_entries("/proc/self/fd"), threads_now = count_entries("/proc/self/task");
	/* A connection lingers for a while, a joined thread for a moment. */
	for (int i = 0; i < 1000 && (fds_now > fds || threads_now > threads); i++) {
		usleep(10000);
		fds_now = count_entries("/proc/self/fd");
		threads_now = count_entries("/proc/self/task");
	}
	size_t heap_now = mallinfo2().uordblks;
	if (fds_now > fds || threads_now > threads || heap_now > heap + SOME_BYTES)
		fprintf(stderr, "descriptors %d -> %d, threads %d -> %d, heap %zu -> %zu, resident %ld -> %ld KB\n", fds, fds_now, threads,
			threads_now, heap, heap_now, resident, resident_kb());
	REQUIRE(fds_now <= fds);
	REQUIRE(threads_now <= threads);
	if (!SANITIZED) REQUIRE(heap_now <= heap + SOME_BYTES);
	if (!SANITIZED) REQUIRE(resident_kb() <= resident + 2048);
}

static void hundreds_of_lives_lose_nothing(void **state)
{
	(void)state;
	int lives = WARM_UP + (SANITIZED ? 50 : 200);
	struct ranks_options options = { .nranks = 2, .timeout_s = 250 };
	assert_true(ranks_run(&options, many_lives, &lives));
}

static void lives_between_hosts_lose_nothing(void **state)
{
	(void)state;
	int lives = WARM_UP + (SANITIZED ? 20 : 200);
	struct ranks_options options = { .nranks = 2, .nhosts = 2, .timeout_s = 250 };
	assert_true(ranks_run(&options, many_lives, &lives));
}

/* Ranks that are threads: the service thread ends and begins anew between any two lives, under the feet of those who join. */
static void lives_of_their_own(struct ranks *r)
{
	int lives = *(int *)r->arg;
	ranks_barrier(r);       /* all have read the id of the job */
	for (int i = 0; i < lives; i++) {
		ncclComm_t comm;
		int value = i, sum;
		if (r->rank == 0) {
			REQUIRE_OK(ncclGetUniqueId(&r->shared->id));
			atomic_store(&r->shared->word[0], i + 1);
		}
		while (atomic_load(&r->shared->word[0]) <= i) sched_yield();
		ncclUniqueId id = r->shared->id;
		REQUIRE_OK(ncclCommInitRank(&comm, r->nranks, id, r->rank));
		REQUIRE_OK(ncclAllReduce(&value, &sum, 1, ncclInt, ncclSum, comm, NULL));
		REQUIRE(sum == i * r->nranks);
		REQUIRE_OK(ncclCommDestroy(comm));
	}
}

static void threads_come_and_go_at_their_own_pace(void **state)
{
	(void)state;
	int lives = SANITIZED ? 60 : 300;
	struct ranks_options options = { .nranks = 2, .threads = true, .no_comm = true };
	assert_true(ranks_run(&options, lives_of_their_own, &lives));
}

/* Whoever is later still expects data when the other goes; no end in good order is worth a word. */
static void leaves_quietly(struct ranks *r)
{
	static float a[200000];
	ncclComm_t comm;
	for (int i = 0; i < 30; i++) {
		REQUIRE_OK(ncclCommSplit(r->comm, 0, r->rank, &comm, NULL));
		REQUIRE_OK(ncclAllReduce(a, a, i % 2 ? 10 : 200000, ncclFloat, ncclMax, comm, NULL));
		REQUIRE_OK(ncclBroadcast(a, a, 10, ncclFloat, i % r->nranks, comm, NULL));
		if (i % r->nranks == r->rank) usleep(2000);
		if (i % 3 == 0) REQUIRE_OK(ncclCommFinalize(comm));
		REQUIRE_OK(ncclCommDestroy(comm));
		if (ncclGetLastError(NULL)[0]) fprintf(stderr, "life %d: %s\n", i, ncclGetLastError(NULL));
		REQUIRE(!ncclGetLastError(NULL)[0]);
	}
}

static void an_end_in_good_order_leaves_no_error(void **state)
{
	(void)state;
	for (int nhosts = 1; nhosts <= 3; nhosts++) {
		struct ranks_options options = { .nranks = 3, .nhosts = nhosts };
		assert_true(ranks_run(&options, leaves_quietly, NULL));
	}
}

static void no_descriptors(struct ranks *r)
{
	/* From none to enough: each time either a communicator or an error with a reason, and afterwards it works. */
	ncclUniqueId id;
	struct rlimit before, limit;
	getrlimit(RLIMIT_NOFILE, &before);
	int used = count_entries("/proc/self/fd");
	for (int extra = 0; extra < 24; extra++) {
		ncclComm_t comm = NULL;
		limit = (struct rlimit){ (rlim_t)(used + extra), (rlim_t)before.rlim_max };
		REQUIRE(setrlimit(RLIMIT_NOFILE, &limit) == 0);
		ncclResult_t result = ncclGetUniqueId(&id);
		if (result == ncclSuccess) result = ncclCommInitRank(&comm, 1, id, 0);
		REQUIRE(result == ncclSuccess || result == ncclSystemError);
		if (result != ncclSuccess) REQUIRE(ncclGetLastError(NULL)[0]);
		else REQUIRE_OK(ncclCommDestroy(comm));
	}
	REQUIRE(setrlimit(RLIMIT_NOFILE, &before) == 0);
	ncclComm_t comm;
	REQUIRE_OK(ncclGetUniqueId(&id));
	REQUIRE_OK(ncclCommInitRank(&comm, 1, id, 0));
	REQUIRE_OK(ncclCommDestroy(comm));
}

static void without_descriptors_there_is_an_error(void **state)
{
	(void)state;
	struct ranks_options options = { .nranks = 1, .no_comm = true };
	assert_true(ranks_run(&options, no_descriptors, NULL));
}

static void threads_call(struct ranks *r)
{
	/* Two threads of one rank, a communicator each, at the same time. */
	ncclComm_t other = *(ncclComm_t *)r->arg;
	for (int i = 0; i < 300; i++) {
		int value = i, sum;
		REQUIRE_OK(ncclAllReduce(&value, &sum, 1, ncclInt, ncclSum, other, NULL));
		REQUIRE(sum == i * r->nranks);
	}
}

static void *run_threads_call(void *arg)
{
	threads_call(arg);
	return NULL;
}

static void two_threads(struct ranks *r)
{
	ncclComm_t other;
	REQUIRE_OK(ncclCommSplit(r->comm, 0, r->rank, &other, NULL));
	struct ranks first = *r, second = *r;
	first.arg = &r->comm;
	second.arg = &other;
	pthread_t thread;
	REQUIRE(pthread_create(&thread, NULL, run_threads_call, &second) == 0);
	threads_call(&first);
	pthread_join(thread, NULL);
	REQUIRE_OK(ncclCommDestroy(other));
}

static void threads_use_communicators_of_their_own(void **state) { (void)state; assert_true(ranks_run_n(2, two_threads, NULL)); }

int main(void)
{
	/* Blocks that malloc keeps at hand count as in use: without them the sums are exact. It only hears of this at the start. */
	static const char tunables[] = "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0";
	if (!SANITIZED && !getenv("GLIBC_TUNABLES")) {
		setenv("GLIBC_TUNABLES", tunables, 1);
		execl("/proc/self/exe", "test_endurance", (char *)NULL);
	}
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(hundreds_of_lives_lose_nothing), cmocka_unit_test(lives_between_hosts_lose_nothing),
		cmocka_unit_test(an_end_in_good_order_leaves_no_error), cmocka_unit_test(threads_come_and_go_at_their_own_pace),
		cmocka_unit_test(without_descriptors_there_is_an_error), cmocka_unit_test(threads_use_communicators_of_their_own),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

/* A child that a program forks beside its communicators: it can't disturb them, it hangs on none of the parent's locks, and it can make its own. */
#include "api/helper_ranks.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>

#define COUNT 64

/* ThreadSanitizer can't start a thread in a child of a process with several, and its own locks may stay held there. */
#if defined(__SANITIZE_THREAD__)
#define THREADS_AFTER_FORK 0
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define THREADS_AFTER_FORK 0
#endif
#endif
#ifndef THREADS_AFTER_FORK
#define THREADS_AFTER_FORK 1
#endif

static void wait_for_child(struct ranks *r, pid_t child)
{
	int status = 0;
	REQUIRE(child > 0);
	while (waitpid(child, &status, 0) < 0) REQUIRE(errno == EINTR);
	REQUIRE(status == 0);
}

static void sum_ranks(struct ranks *r, ncclComm_t comm, int nranks)
{
	float in[COUNT], out[COUNT];
	for (int i = 0; i < COUNT; i++) in[i] = (float)(i + 1);
	REQUIRE_OK(ncclAllReduce(in, out, COUNT, ncclFloat32, ncclSum, comm, NULL));
	for (int i = 0; i < COUNT; i++) REQUIRE(out[i] == (float)(nranks * (i + 1)));
}

static void call_on_the_parents(struct ranks *r)
{
	float in[COUNT] = { 1 }, out[COUNT];
	ncclResult_t state;
	ncclComm_t made = NULL;
	REQUIRE_IS(ncclAllReduce(in, out, COUNT, ncclFloat32, ncclSum, r->comm, NULL), ncclInvalidUsage);
	REQUIRE_ERROR_HAS("belongs to the parent");
	REQUIRE_IS(ncclSend(in, COUNT, ncclFloat32, !r->rank, r->comm, NULL), ncclInvalidUsage);
	REQUIRE_IS(ncclCommSplit(r->comm, 0, 0, &made, NULL), ncclInvalidUsage);
	REQUIRE_IS(ncclCommGetAsyncError(r->comm, &state), ncclInvalidUsage);
	REQUIRE_IS(ncclCommFinalize(r->comm), ncclInvalidUsage);
	/* Destructors of the program's call one of these. */
	REQUIRE_OK(r->rank ? ncclCommDestroy(r->comm) : ncclCommAbort(r->comm));
	REQUIRE_IS(ncclCommDestroy(r->comm), ncclInvalidArgument);
}

static void make_its_own(struct ranks *r)
{
	ncclUniqueId id;
	ncclComm_t own;
	REQUIRE_OK(ncclGetUniqueId(&id));
	REQUIRE_OK(ncclCommInitRank(&own, 1, id, 0));
	sum_ranks(r, own, 1);
	float on_stream[COUNT] = { 0 };
	cudaStream_t stream;
	REQUIRE_OK(telpher_stream_create(&stream));
	REQUIRE_OK(ncclAllReduce(on_stream, on_stream, COUNT, ncclFloat32, ncclMax, own, stream));
	REQUIRE_OK(telpher_stream_synchronize(stream));
	REQUIRE_OK(telpher_stream_destroy(stream));
	REQUIRE_OK(ncclCommDestroy(own));
}

static void fork_between_calls(struct ranks *r)
{
	float data[COUNT] = { 1 };
	cudaStream_t stream;
	REQUIRE_OK(telpher_stream_create(&stream));
	for (int round = 0; round < 3; round++) {
		sum_ranks(r, r->comm, r->nranks);
		pid_t child = fork();
		if (!child) {
			alarm(60);
			call_on_the_parents(r);
			REQUIRE_IS(telpher_stream_synchronize(stream), ncclInvalidArgument);
			if (THREADS_AFTER_FORK) make_its_own(r);
			exit(0);
		}
		sum_ranks(r, r->comm, r->nranks);
		wait_for_child(r, child);
		sum_ranks(r, r->comm, r->nranks);
		REQUIRE_OK(ncclAllReduce(data, data, COUNT, ncclFloat32, ncclMax, r->comm, stream));
		REQUIRE_OK(telpher_stream_synchronize(stream));
	}
	REQUIRE_OK(telpher_stream_destroy(stream));
}
static void a_forked_child_is_told_that_communicators_are_its_parents(void **state)
{
	(void)state;
	assert_true(ranks_run_n(2, fork_between_calls, NULL));
	assert_true(ranks_run(&(struct ranks_options){ .nranks = 2, .nhosts = 2 }, fork_between_calls, NULL));
}

struct worker { struct ranks *r; _Atomic bool *stop; };

static void use_memory_and_streams(struct ranks *r)
{
	void *memory;
	cudaStream_t stream;
	REQUIRE_OK(ncclMemAlloc(&memory, 100));
	REQUIRE_OK(ncclMemFree(memory));
	REQUIRE_OK(telpher_stream_create(&stream));
	REQUIRE_OK(telpher_stream_destroy(stream));
}

static void *use_all_locks(void *arg)
{
	struct worker *w = arg;
	while (!atomic_load(w->stop)) {
		for (int i = 0; i < 20; i++) use_memory_and_streams(w->r);
		make_its_own(w->r);
	}
	return NULL;
}

static void fork_beside_other_threads(struct ranks *r)
{
	_Atomic bool stop = false;
	struct worker worker = { r, &stop };
	pthread_t threads[2];
	for (int i = 0; i < 2; i++) REQUIRE(pthread_create(&threads[i], NULL, use_all_locks, &worker) == 0);
	for (int i = 0; i < 100; i++) {
		pid_t child = fork();
		if (!child) {
			alarm(30);
			use_memory_and_streams(r);
			if (i % 4 == 0) make_its_own(r);
			exit(0);
		}
		wait_for_child(r, child);
	}
	atomic_store(&stop, true);
	for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
}
static void a_child_forked_while_others_make_and_end_communicators_can_too(void **state)
{
	(void)state;
	if (!THREADS_AFTER_FORK) skip();
	assert_true(ranks_run(&(struct ranks_options){ .nranks = 1, .no_comm = true }, fork_beside_other_threads, NULL));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_forked_child_is_told_that_communicators_are_its_parents),
		cmocka_unit_test(a_child_forked_while_others_make_and_end_communicators_can_too),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

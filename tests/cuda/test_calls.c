/* What a call costs: which of the driver's functions it calls, and how many threads a communicator's init starts. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>

#include "cuda/helper_ops.h"

static _Atomic int threads_started;

/* The library's too, for the program's own functions come first. */
__attribute__((visibility("default")))
int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *arg)
{
	static int (*create)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
	if (!create) *(void **)&create = dlsym(RTLD_NEXT, "pthread_create");
	atomic_fetch_add(&threads_started, 1);
	return create(thread, attributes, run, arg);
}

static void no_threads_for_a_second_communicator(struct gpu_rank *g)
{
	struct ranks *r = g->r;
	ncclComm_t again;
	ncclUniqueId id;
	int before = threads_started;
	REQUIRE(before > 0);
	REQUIRE_OK(ncclGetUniqueId(&id));
	REQUIRE_OK(ncclCommInitRank(&again, 1, id, 0));
	REQUIRE(threads_started == before);
	REQUIRE_OK(ncclCommDestroy(again));
}

static void only_a_gpus_first_communicator_starts_threads(void **state)
{
	(void)state;
	struct gpu_options o = { .nranks = 1 };
	assert_true(gpu_run(&o, no_threads_for_a_second_communicator, NULL));
}

int main(void)
{
	gpu_need();
	if (!gpu_fake_here()) return 77;
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(only_a_gpus_first_communicator_starts_threads),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

/* What a communicator must survive: ranks that die, abort, disagree. Every waiter comes back with an error that names the
 * culprit. */
#include <pthread.h>
#include <stdatomic.h>

#include "api/helper_ranks.h"

struct victim { int rank; int after_us; bool fork_child; size_t count; };

static void culprit_is(struct ranks *r, int rank)
{
	char text[32];
	snprintf(text, sizeof(text), "rank %d", rank);
	REQUIRE_ERROR_HAS(text);
}

static void die_during(struct ranks *r)
{
	const struct victim *v = r->arg;
	float *a = calloc(v->count, sizeof(*a)), *b = calloc(v->count, sizeof(*b));
	ranks_barrier(r);
	if (r->rank == v->rank) {
		if (v->fork_child && fork() == 0) {
			/* Holds every descriptor of its parent open until all others have noticed. */
			for (int i = 0; i < 40000 && atomic_load(&r->shared->word[0]) < r->nranks - 1; i++) usleep(1000);
			_exit(0);
		}
		/* A thread that kills while the rank is somewhere inside. */
		pid_t self = getpid();
		if (fork() == 0) {
			usleep((useconds_t)v->after_us);
			kill(self, SIGKILL);
			_exit(0);
		}
	}
	ncclResult_t result = ncclSuccess;
	uint64_t start = ranks_now_ms();
	while (result == ncclSuccess && ranks_now_ms() - start < (uint64_t)ranks_patience_ms(20000))
		result = ncclAllReduce(a, b, v->count, ncclFloat, ncclSum, r->comm, NULL);
	REQUIRE_IS(result, ncclRemoteError);
	REQUIRE(ranks_now_ms() - start < (uint64_t)ranks_patience_ms(10000));
	atomic_fetch_add(&r->shared->word[0], 1);
	culprit_is(r, v->rank);
	/* In error for good, at once. */
	REQUIRE_IS(ncclAllReduce(a, b, v->count, ncclFloat, ncclSum, r->comm, NULL), ncclRemoteError);
	ncclResult_t state;
	REQUIRE_OK(ncclCommGetAsyncError(r->comm, &state));
	REQUIRE(state == ncclRemoteError);
	free(a);
	free(b);
}

static void kill_each(int nranks, int nhosts, size_t count, bool fork_child)
{
	for (int rank = 0; rank < nranks; rank++) {
		struct victim v = { .rank = rank, .after_us = 1000 + 17000 * rank, .fork_child = fork_child, .count = count };
		struct ranks_options options = { .nranks = nranks, .nhosts = nhosts, .may_die = UINT64_C(1) << rank };
		assert_true(ranks_run(&options, die_during, &v));
	}
}

static void a_killed_rank_is_named_small_messages(void **state) { (void)state; kill_each(3, 1, 2, false); }
static void a_killed_rank_is_named_large_messages(void **state) { (void)state; kill_each(2, 1, 1 << 20, false); }
static void a_killed_rank_of_another_host_is_named(void **state) { (void)state; kill_each(4, 2, 50000, false); }
static void a_killed_rank_whose_child_holds_its_sockets_is_named(void **state) { (void)state; kill_each(2, 2, 100, true); }

struct aborter { ncclComm_t comm; int after_us; };

static void *abort_later(void *arg)
{
	struct aborter *a = arg;
	usleep((useconds_t)a->after_us);
	return (void *)(intptr_t)ncclCommAbort(a->comm);
}

static void abort_inside(struct ranks *r)
{
	bool *between_hosts = r->arg;
	(void)between_hosts;
	int value = 1, sum;
	if (r->rank == 0) {
		/* Waits for rank 2, which never calls; another thread aborts. */
		struct aborter a = { r->comm, 50000 };
		pthread_t thread;
		pthread_create(&thread, NULL, abort_later, &a);
		uint64_t start = ranks_now_ms();
		ncclResult_t result = ncclAllReduce(&value, &sum, 1, ncclInt, ncclSum, r->comm, NULL);
		REQUIRE(result != ncclSuccess);
		REQUIRE(ranks_now_ms() - start < (uint64_t)ranks_patience_ms(10000));
		void *aborted;
		pthread_join(thread, &aborted);
		REQUIRE((intptr_t)aborted == ncclSuccess);
		r->comm = NULL;
	} else if (r->rank == 1) {
		REQUIRE_IS(ncclAllReduce(&value, &sum, 1, ncclInt, ncclSum, r->comm, NULL), ncclRemoteError);
		culprit_is(r, 0);
	} else {
		ncclResult_t state = ncclSuccess;
		for (; state == ncclSuccess; usleep(200)) REQUIRE_OK(ncclCommGetAsyncError(r->comm, &state));
		REQUIRE(state == ncclRemoteError);
		culprit_is(r, 0);
	}
	ranks_barrier(r);
}

static void an_abort_frees_every_waiter(void **state)
{
	(void)state;
	struct ranks_options options = { .nranks = 3 };
	assert_true(ranks_run(&options, abort_inside, NULL));
	options.nhosts = 3;
	assert_true(ranks_run(&options, abort_inside, NULL));
	options.nhosts = 0;
	options.threads = true;
	assert_true(ranks_run(&options, abort_inside, NULL));
}

static void revoke_it(struct ranks *r)
{
	int value = 1, sum;
	if (r->rank == 0) {
		usleep(20000);
		REQUIRE_IS(ncclCommRevoke(r->comm, 5), ncclInvalidArgument);
		REQUIRE_OK(ncclCommRevoke(r->comm, NCCL_REVOKE_DEFAULT));
		REQUIRE_IS(ncclAllReduce(&value, &sum, 1, ncclInt, ncclSum, r->comm, NULL), ncclInvalidUsage);
	} else {
		REQUIRE_IS(ncclAllReduce(&value, &sum, 1, ncclInt, ncclSum, r->comm, NULL), ncclRemoteError);
		culprit_is(r, 0);
	}
	ranks_barrier(r);
}

static void a_revoked_communicator_refuses_work(void **state) { (void)state; assert_true(ranks_run_n(2, revoke_it, NULL)); }

enum mismatch { COUNT, TYPE, OPERATION, COLLECTIVE, ROOT, ORDER, LARGE_COUNT, NCASES };

static ncclResult_t mismatched_call(struct ranks *r, enum mismatch what, void *a, void *b)
{
	bool odd = r->rank == 1;
	switch (what) {
	case COUNT: return ncclAllReduce(a, b, odd ? 4 : 5, ncclFloat, ncclSum, r->comm, NULL);
	case TYPE: return ncclAllReduce(a, b, 4, odd ? ncclInt : ncclFloat, ncclSum, r->comm, NULL);
	case OPERATION: return ncclAllReduce(a, b, 4, ncclFloat, odd ? ncclMax : ncclSum, r->comm, NULL);
	case COLLECTIVE: return odd ? ncclAllGather(a, b, 4, ncclFloat, r->comm, NULL) : ncclAllReduce(a, b, 4, ncclFloat, ncclSum, r->comm, NULL);
	case ROOT: return ncclBroadcast(a, b, 4, ncclFloat, odd ? 1 : 0, r->comm, NULL);
	case LARGE_COUNT: return ncclAllReduce(a, b, odd ? 100000 : 90000, ncclFloat, ncclSum, r->comm, NULL);
	default:
		if (odd) {
			ncclResult_t result = ncclAllReduce(a, b, 9, ncclFloat, ncclSum, r->comm, NULL);
			return result != ncclSuccess ? result : ncclAllReduce(a, b, 8, ncclFloat, ncclSum, r->comm, NULL);
		}
		ncclResult_t result = ncclAllReduce(a, b, 8, ncclFloat, ncclSum, r->comm, NULL);
		return result != ncclSuccess ? result : ncclAllReduce(a, b, 9, ncclFloat, ncclSum, r->comm, NULL);
	}
}

static void mismatch(struct ranks *r)
{
	const enum mismatch *what = r->arg;
	float *a = calloc(400000, sizeof(*a)), *b = calloc(400000, sizeof(*b));
	/* A call before that matches, so that the fast path is in use. */
	for (int k = 0; k < 3; k++) REQUIRE_OK(ncclAllReduce(a, b, 4, ncclFloat, ncclSum, r->comm, NULL));
	ranks_barrier(r);
	uint64_t start = ranks_now_ms();
	ncclResult_t result = mismatched_call(r, *what, a, b);
	/* A rank that only gives may be through before anybody notices; its next call tells. */
	while (result == ncclSuccess && ranks_now_ms() - start < (uint64_t)ranks_patience_ms(10000)) result = ncclAllReduce(a, b, 4, ncclFloat, ncclSum, r->comm, NULL);
	REQUIRE_IS(result, ncclInvalidUsage);
	culprit_is(r, 1);
	REQUIRE(ranks_now_ms() - start < (uint64_t)ranks_patience_ms(10000));
	free(a);
	free(b);
	ranks_barrier(r);
}

static void calls_that_dont_match_name_both_ranks(void **state)
{
	(void)state;
	for (int what = 0; what < NCASES; what++) {
		enum mismatch m = (enum mismatch)what;
		struct ranks_options options = { .nranks = 3 };
		if (!ranks_run(&options, mismatch, &m)) fail_msg("case %d", what);
	}
}

static void calls_that_dont_match_between_hosts(void **state)
{
	(void)state;
	for (int what = 0; what < NCASES; what += 3) {
		enum mismatch m = (enum mismatch)what;
		struct ranks_options options = { .nranks = 3, .nhosts = 3 };
		if (!ranks_run(&options, mismatch, &m)) fail_msg("case %d", what);
	}
}

static void truncated(struct ranks *r)
{
	char data[64] = { 0 };
	ncclResult_t result;
	if (r->rank == 0) result = ncclSend(data, 64, ncclInt8, 1, r->comm, NULL);
	else result = ncclRecv(data, 32, ncclInt8, 0, r->comm, NULL);
	if (r->rank == 1) {
		REQUIRE_IS(result, ncclInvalidUsage);
		culprit_is(r, 0);
		REQUIRE_ERROR_HAS("64");
		REQUIRE_ERROR_HAS("32");
	} else {
		ncclResult_t state = result;
		for (; state == ncclSuccess; usleep(200)) REQUIRE_OK(ncclCommGetAsyncError(r->comm, &state));
		culprit_is(r, 1);
	}
	ranks_barrier(r);
}

static void a_receive_of_another_size_names_both(void **state)
{
	(void)state;
	assert_true(ranks_run_n(2, truncated, NULL));
	struct ranks_options options = { .nranks = 2, .nhosts = 2 };
	assert_true(ranks_run(&options, truncated, NULL));
}

static void leaves_early(struct ranks *r)
{
	int value = 1, sum;
	REQUIRE_OK(ncclAllReduce(&value, &sum, 1, ncclInt, ncclSum, r->comm, NULL));
	if (r->rank == r->nranks - 1) {
		REQUIRE_OK(ncclCommDestroy(r->comm));
		r->comm = NULL;
	} else {
		REQUIRE_IS(ncclAllReduce(&value, &sum, 1, ncclInt, ncclSum, r->comm, NULL), ncclRemoteError);
		culprit_is(r, r->nranks - 1);
	}
	ranks_barrier(r);
}

static void who_waits_for_a_rank_that_left_is_told(void **state)
{
	(void)state;
	for (int nhosts = 1; nhosts <= 3; nhosts++) {
		struct ranks_options options = { .nranks = 3, .nhosts = nhosts };
		if (!ranks_run(&options, leaves_early, NULL)) fail_msg("on %d hosts", nhosts);
	}
}

static void settings_differ(struct ranks *r)
{
	if (r->rank == 1) setenv("NCCL_ALGO", "Ring", 1);
	ncclComm_t comm = NULL;
	ncclResult_t result = ncclCommInitRank(&comm, r->nranks, r->id, r->rank);
	REQUIRE_IS(result, ncclInvalidUsage);
	REQUIRE(!comm);
	REQUIRE_ERROR_HAS("NCCL_ALGO");
	culprit_is(r, 1);
	ranks_barrier(r);
}

static void different_settings_are_named_at_init(void **state)
{
	(void)state;
	struct ranks_options options = { .nranks = 3, .no_comm = true };
	assert_true(ranks_run(&options, settings_differ, NULL));
}

static void missing_rank(struct ranks *r)
{
	ranks_barrier(r);           /* the time runs from the first one's call */
	if (r->rank == 2) {
		ranks_barrier(r);
		return;
	}
	ncclComm_t comm = NULL;
	ncclResult_t result = ncclCommInitRank(&comm, r->nranks, r->id, r->rank);
	REQUIRE(result == ncclSystemError || result == ncclRemoteError);
	REQUIRE_ERROR_HAS("never came: ranks 2");
	ranks_barrier(r);
}

static void a_rank_that_never_comes_is_named(void **state)
{
	(void)state;
	/* Where one of the two that come is late itself, on a busy machine, they are given more time. */
	struct ranks_options options = { .nranks = 3, .no_comm = true, .env = { "TELPHER_INIT_TIMEOUT=2" } };
	if (ranks_run(&options, missing_rank, NULL)) return;
	options.env[0] = "TELPHER_INIT_TIMEOUT=30";
	assert_true(ranks_run(&options, missing_rank, NULL));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_killed_rank_is_named_small_messages), cmocka_unit_test(a_killed_rank_is_named_large_messages),
		cmocka_unit_test(a_killed_rank_of_another_host_is_named), cmocka_unit_test(a_killed_rank_whose_child_holds_its_sockets_is_named),
		cmocka_unit_test(an_abort_frees_every_waiter), cmocka_unit_test(a_revoked_communicator_refuses_work),
		cmocka_unit_test(calls_that_dont_match_name_both_ranks), cmocka_unit_test(calls_that_dont_match_between_hosts),
		cmocka_unit_test(a_receive_of_another_size_names_both), cmocka_unit_test(different_settings_are_named_at_init),
		cmocka_unit_test(a_rank_that_never_comes_is_named), cmocka_unit_test(who_waits_for_a_rank_that_left_is_told),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Communicators that don't block: every call returns at once, ncclCommGetAsyncError tells when it is over. */
#include "api/helper_ranks.h"

static ncclResult_t settle(struct ranks *r, ncclComm_t comm)
{
	ncclResult_t state;
	/* A pause, since who asks without one takes the processor from whom it waits for. */
	for (;; usleep(200)) {
		REQUIRE_OK(ncclCommGetAsyncError(comm, &state));
		if (state != ncclInProgress) return state;
	}
}

static ncclComm_t join(struct ranks *r)
{
	ncclComm_t comm = NULL;
	ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
	config.blocking = 0;
	REQUIRE_IS(ncclCommInitRankConfig(&comm, r->nranks, r->id, r->rank, &config), ncclInProgress);
	REQUIRE(comm);
	return comm;
}

static void whole_life(struct ranks *r)
{
	ncclComm_t comm = join(r), child;
	REQUIRE(settle(r, comm) == ncclSuccess);
	int value = r->rank, sum = -1;
	ncclResult_t result = ncclAllReduce(&value, &sum, 1, ncclInt, ncclSum, comm, NULL);
	REQUIRE(result == ncclSuccess || result == ncclInProgress);
	REQUIRE(settle(r, comm) == ncclSuccess);
	REQUIRE(sum == r->nranks * (r->nranks - 1) / 2);
	REQUIRE_IS(ncclCommSplit(comm, 0, -r->rank, &child, NULL), ncclInProgress);
	REQUIRE(settle(r, child) == ncclSuccess);
	int rank;
	REQUIRE_OK(ncclCommUserRank(child, &rank));
	REQUIRE(rank == r->nranks - 1 - r->rank);
	for (int k = 0; k < 100; k++) {
		result = ncclAllReduce(&value, &sum, 1, ncclInt, ncclMax, child, NULL);
		REQUIRE(result == ncclSuccess || result == ncclInProgress);
	}
	REQUIRE(settle(r, child) == ncclSuccess && sum == r->nranks - 1);
	result = ncclCommFinalize(child);
	REQUIRE(result == ncclSuccess || result == ncclInProgress);
	REQUIRE(settle(r, child) == ncclSuccess);
	REQUIRE_OK(ncclCommDestroy(child));
	REQUIRE_OK(ncclCommDestroy(comm));
}

static void every_call_returns_at_once(void **state)
{
	(void)state;
	struct ranks_options options = { .nranks = 3, .no_comm = true };
	assert_true(ranks_run(&options, whole_life, NULL));
	options.threads = true;
	assert_true(ranks_run(&options, whole_life, NULL));
}

static void too_early(struct ranks *r)
{
	if (r->rank == 1) {
		ranks_barrier(r);
		ncclComm_t comm = join(r);
		REQUIRE(settle(r, comm) == ncclSuccess);
		REQUIRE_OK(ncclCommDestroy(comm));
		return;
	}
	ncclComm_t comm = join(r);
	int value = 1, count;
	REQUIRE_IS(ncclAllReduce(&value, &value, 1, ncclInt, ncclSum, comm, NULL), ncclInvalidArgument);
	REQUIRE_IS(ncclCommCount(comm, &count), ncclInvalidArgument);
	ranks_barrier(r);
	REQUIRE(settle(r, comm) == ncclSuccess);
	REQUIRE_OK(ncclCommDestroy(comm));
}

static void a_call_before_the_communicator_is_made_is_an_error(void **state)
{
	(void)state;
	struct ranks_options options = { .nranks = 2, .no_comm = true };
	assert_true(ranks_run(&options, too_early, NULL));
}

static void give_up(struct ranks *r)
{
	/* Nobody else ever comes. */
	if (r->rank) return;
	ncclComm_t comm = join(r);
	usleep(20000);
	uint64_t start = ranks_now_ms();
	REQUIRE_OK(ncclCommAbort(comm));
	REQUIRE(ranks_now_ms() - start < (uint64_t)ranks_patience_ms(10000));
	ncclResult_t state;
	REQUIRE_IS(ncclCommGetAsyncError(comm, &state), ncclInvalidArgument);
}

static void an_init_under_way_can_be_aborted(void **state)
{
	(void)state;
	struct ranks_options options = { .nranks = 2, .no_comm = true };
	assert_true(ranks_run(&options, give_up, NULL));
}

static void mixed_group(struct ranks *r)
{
	ncclComm_t comm = join(r);
	REQUIRE(settle(r, comm) == ncclSuccess);
	ncclComm_t blocking = NULL;
	ncclUniqueId id;
	REQUIRE_OK(ncclGetUniqueId(&id));
	REQUIRE_OK(ncclCommInitRank(&blocking, 1, id, 0));
	int value = 1;
	REQUIRE_OK(ncclGroupStart());
	REQUIRE_OK(ncclAllReduce(&value, &value, 1, ncclInt, ncclSum, blocking, NULL));
	REQUIRE_IS(ncclAllReduce(&value, &value, 1, ncclInt, ncclSum, comm, NULL), ncclInvalidArgument);
	REQUIRE_IS(ncclGroupEnd(), ncclInvalidArgument);
	REQUIRE_OK(ncclCommDestroy(blocking));
	REQUIRE_OK(ncclCommDestroy(comm));
}

static void blocking_and_nonblocking_dont_mix_in_a_group(void **state)
{
	(void)state;
	struct ranks_options options = { .nranks = 1, .no_comm = true };
	assert_true(ranks_run(&options, mixed_group, NULL));
}

static void group_of_inits(struct ranks *r)
{
	enum { N = 3 };
	ncclComm_t comms[N];
	ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
	config.blocking = 0;
	REQUIRE_OK(ncclGroupStart());
	for (int k = 0; k < N; k++) REQUIRE_IS(ncclCommInitRankConfig(&comms[k], N, r->id, k, &config), ncclInProgress);
	REQUIRE_IS(ncclGroupEnd(), ncclInProgress);
	for (int k = 0; k < N; k++) REQUIRE(settle(r, comms[k]) == ncclSuccess);
	int value[N], sum[N];
	REQUIRE_OK(ncclGroupStart());
	for (int k = 0; k < N; k++) {
		value[k] = k;
		REQUIRE_OK(ncclAllReduce(&value[k], &sum[k], 1, ncclInt, ncclSum, comms[k], NULL));
	}
	ncclResult_t result = ncclGroupEnd();
	REQUIRE(result == ncclSuccess || result == ncclInProgress);
	for (int k = 0; k < N; k++) REQUIRE(settle(r, comms[k]) == ncclSuccess && sum[k] == 3);
	for (int k = 0; k < N; k++) REQUIRE_OK(ncclCommDestroy(comms[k]));
}

static void a_group_of_nonblocking_ranks_of_one_thread(void **state)
{
	(void)state;
	struct ranks_options options = { .nranks = 1, .no_comm = true };
	assert_true(ranks_run(&options, group_of_inits, NULL));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_call_returns_at_once), cmocka_unit_test(a_call_before_the_communicator_is_made_is_an_error),
		cmocka_unit_test(an_init_under_way_can_be_aborted), cmocka_unit_test(blocking_and_nonblocking_dont_mix_in_a_group),
		cmocka_unit_test(a_group_of_nonblocking_ranks_of_one_thread),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Communicators out of communicators: split, shrink, several roots. */
#include "api/helper_ranks.h"

static void check_works(struct ranks *r, ncclComm_t comm, int rank, int nranks)
{
	int got_rank, got_count, value, sum = -1;
	REQUIRE_OK(ncclCommUserRank(comm, &got_rank));
	REQUIRE_OK(ncclCommCount(comm, &got_count));
	REQUIRE(got_rank == rank && got_count == nranks);
	value = rank + 1;
	REQUIRE_OK(ncclAllReduce(&value, &sum, 1, ncclInt, ncclSum, comm, NULL));
	REQUIRE(sum == nranks * (nranks + 1) / 2);
	int *all = calloc((size_t)nranks, sizeof(*all));
	REQUIRE_OK(ncclAllGather(&value, all, 1, ncclInt, comm, NULL));
	for (int k = 0; k < nranks; k++) REQUIRE(all[k] == k + 1);
	free(all);
}

static void by_color(struct ranks *r)
{
	/* Colours 0 and 1, keys reversed; the last rank takes no part in the second. */
	ncclComm_t half, reversed, child, none = r->comm;
	int n = r->nranks, members = r->rank % 2 ? n / 2 : (n + 1) / 2;
	REQUIRE_OK(ncclCommSplit(r->comm, r->rank % 2, r->rank, &half, NULL));
	check_works(r, half, r->rank / 2, members);
	REQUIRE_OK(ncclCommSplit(r->comm, 5, -r->rank, &reversed, NULL));
	check_works(r, reversed, n - 1 - r->rank, n);
	bool out = r->rank == n - 1;
	REQUIRE_OK(ncclCommSplit(r->comm, out ? NCCL_SPLIT_NOCOLOR : 0, 0, out ? &none : &child, NULL));
	if (out) REQUIRE(none == NULL);
	else check_works(r, child, r->rank, n - 1);
	/* A child of a child, and the parent still works. */
	ncclComm_t grandchild;
	REQUIRE_OK(ncclCommSplit(half, 0, -r->rank, &grandchild, NULL));
	check_works(r, grandchild, members - 1 - r->rank / 2, members);
	check_works(r, r->comm, r->rank, n);
	REQUIRE_OK(ncclCommDestroy(grandchild));
	REQUIRE_OK(ncclCommDestroy(half));
	REQUIRE_OK(ncclCommDestroy(reversed));
	if (!out) REQUIRE_OK(ncclCommDestroy(child));
	REQUIRE_IS(ncclCommSplit(r->comm, -7, 0, &child, NULL), ncclInvalidArgument);
	REQUIRE_IS(ncclCommSplit(r->comm, 0, 0, NULL, NULL), ncclInvalidArgument);
}

static void split_by_color_and_key(void **state) { (void)state; assert_true(ranks_run_n(5, by_color, NULL)); }

static void split_between_hosts(void **state)
{
	(void)state;
	struct ranks_options options = { .nranks = 4, .nhosts = 2 };
	assert_true(ranks_run(&options, by_color, NULL));
}

/* The parent's ranks meet in each of them: one after the other, in the group's order. */
static void several_in_a_group(struct ranks *r)
{
	const int n = r->nranks, members = r->rank % 2 ? n / 2 : (n + 1) / 2;
	for (int turn = 0; turn < 6; turn++) {
		const bool blocking = turn % 2 == 0;
		ncclComm_t children[3];
		ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
		config.blocking = blocking;
		REQUIRE_OK(ncclGroupStart());
		for (int i = 0; i < 3; i++)
			REQUIRE_IS(ncclCommSplit(r->comm, i == 1 ? r->rank % 2 : 0, i == 2 ? -r->rank : r->rank, &children[i], &config), blocking ? ncclSuccess : ncclInProgress);
		REQUIRE_IS(ncclGroupEnd(), blocking ? ncclSuccess : ncclInProgress);
		for (int i = 0; i < 3; i++) {
			ncclResult_t state;
			do {
				usleep(200);
				REQUIRE_OK(ncclCommGetAsyncError(children[i], &state));
			} while (state == ncclInProgress);
			REQUIRE_OK(state);
			int rank, count;
			REQUIRE_OK(ncclCommUserRank(children[i], &rank));
			REQUIRE_OK(ncclCommCount(children[i], &count));
			REQUIRE(count == (i == 1 ? members : n) && rank == (i == 0 ? r->rank : i == 1 ? r->rank / 2 : n - 1 - r->rank));
			if (blocking) check_works(r, children[i], rank, count);
		}
		for (int i = 0; i < 3; i++) REQUIRE_OK(ncclCommDestroy(children[i]));
	}
}

static void in_processes_and_threads(void (*body)(struct ranks *r))
{
	struct ranks_options options = { .nranks = 4, .threads = true };
	assert_true(ranks_run(&options, body, NULL));
	assert_true(ranks_run_n(3, body, NULL));
}

static void splits_of_a_group_are_made_in_its_order(void **state) { (void)state; in_processes_and_threads(several_in_a_group); }

/* Its parent may end in the same group, and one of several may be aborted while they are made. */
static void ended_in_its_group(struct ranks *r)
{
	for (int turn = 0; turn < 4; turn++) {
		ncclComm_t parent, child, children[3];
		ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
		config.blocking = 0;
		REQUIRE_OK(ncclCommSplit(r->comm, 0, r->rank, &parent, NULL));
		REQUIRE_OK(ncclGroupStart());
		for (int i = 0; i < 3; i++) REQUIRE_IS(ncclCommSplit(parent, 0, r->rank, &children[i], &config), ncclInProgress);
		REQUIRE_IS(ncclGroupEnd(), ncclInProgress);
		for (int i = 2; i > 0; i--) REQUIRE_OK(ncclCommAbort(children[i]));
		REQUIRE_OK(ncclCommDestroy(children[0]));
		ranks_barrier(r);
		REQUIRE_OK(ncclCommDestroy(parent));
		REQUIRE_OK(ncclCommSplit(r->comm, 0, r->rank, &parent, NULL));
		REQUIRE_OK(ncclGroupStart());
		REQUIRE_OK(ncclCommSplit(parent, 0, -r->rank, &child, NULL));
		REQUIRE_OK(ncclCommDestroy(parent));
		REQUIRE_OK(ncclGroupEnd());
		check_works(r, child, r->nranks - 1 - r->rank, r->nranks);
		REQUIRE_OK(ncclCommDestroy(child));
	}
}

static void a_group_may_end_what_it_splits(void **state) { (void)state; in_processes_and_threads(ended_in_its_group); }

static void without_some(struct ranks *r)
{
	int exclude[] = { 1, 3 }, wrong[] = { 1, 1 }, self[] = { r->rank }, far[] = { r->nranks };
	ncclComm_t less = NULL;
	if (r->rank == 1 || r->rank == 3) {
		ranks_barrier(r);
		return;
	}
	REQUIRE_IS(ncclCommShrink(r->comm, wrong, 2, &less, NULL, NCCL_SHRINK_DEFAULT), ncclInvalidArgument);
	REQUIRE_IS(ncclCommShrink(r->comm, self, 1, &less, NULL, NCCL_SHRINK_DEFAULT), ncclInvalidArgument);
	REQUIRE_IS(ncclCommShrink(r->comm, far, 1, &less, NULL, NCCL_SHRINK_DEFAULT), ncclInvalidArgument);
	REQUIRE_IS(ncclCommShrink(r->comm, exclude, 2, &less, NULL, 7), ncclInvalidArgument);
	REQUIRE_OK(ncclCommShrink(r->comm, exclude, 2, &less, NULL, NCCL_SHRINK_DEFAULT));
	check_works(r, less, r->rank / 2, r->nranks - 2);
	REQUIRE_OK(ncclCommDestroy(less));
	ranks_barrier(r);
}

static void shrink_leaves_ranks_out(void **state) { (void)state; assert_true(ranks_run_n(5, without_some, NULL)); }

static void after_death(struct ranks *r)
{
	int exclude[] = { 0 }, value = 1, sum;
	ranks_barrier(r);       /* none is still inside its init */
	if (r->rank == 0) {
		usleep(50000);
		raise(SIGKILL);
	}
	REQUIRE_IS(ncclAllReduce(&value, &sum, 1, ncclInt, ncclSum, r->comm, NULL), ncclRemoteError);
	ncclComm_t less;
	REQUIRE_OK(ncclCommShrink(r->comm, exclude, 1, &less, NULL, NCCL_SHRINK_ABORT));
	check_works(r, less, r->rank - 1, r->nranks - 1);
	REQUIRE_OK(ncclCommDestroy(less));
}

static void shrink_goes_on_without_the_dead(void **state)
{
	(void)state;
	struct ranks_options options = { .nranks = 4, .may_die = 1 };
	assert_true(ranks_run(&options, after_death, NULL));
	options.nhosts = 2;
	assert_true(ranks_run(&options, after_death, NULL));
}

static void abort_shrink(struct ranks *r)
{
	/* Rank 2 never joins the operation on the stream; the others give it up and go on. */
	int exclude[] = { 2 }, value = 1, sum;
	if (r->rank == 2) {
		ncclResult_t state = ncclSuccess;
		for (; state == ncclSuccess; usleep(200)) REQUIRE_OK(ncclCommGetAsyncError(r->comm, &state));
		REQUIRE(state == ncclRemoteError);
		ranks_barrier(r);
		return;
	}
	cudaStream_t stream;
	ncclComm_t less;
	REQUIRE_OK(telpher_stream_create(&stream));
	REQUIRE_OK(ncclAllReduce(&value, &sum, 1, ncclInt, ncclSum, r->comm, stream));
	REQUIRE_OK(ncclCommShrink(r->comm, exclude, 1, &less, NULL, NCCL_SHRINK_ABORT));
	REQUIRE(telpher_stream_synchronize(stream) != ncclSuccess);
	check_works(r, less, r->rank > 2 ? r->rank - 1 : r->rank, r->nranks - 1);
	REQUIRE_OK(ncclCommDestroy(less));
	REQUIRE_OK(telpher_stream_destroy(stream));
	ranks_barrier(r);
}

static void shrink_gives_up_what_is_outstanding(void **state) { (void)state; assert_true(ranks_run_n(3, abort_shrink, NULL)); }

static void several_roots(struct ranks *r)
{
	/* Each of two ranks makes an id; both ids go to everybody. */
	ncclUniqueId *ids = (void *)r->shared->bytes, mine[2];
	if (r->rank < 2) REQUIRE_OK(ncclGetUniqueId(&ids[r->rank]));
	ranks_barrier(r);
	memcpy(mine, ids, sizeof(mine));
	ncclComm_t comm;
	REQUIRE_OK(ncclCommInitRankScalable(&comm, r->nranks, r->rank, 2, mine, NULL));
	check_works(r, comm, r->rank, r->nranks);
	REQUIRE_OK(ncclCommDestroy(comm));
	ranks_barrier(r);
}

static void a_communicator_of_several_roots(void **state)
{
	(void)state;
	_Static_assert(sizeof(((struct ranks_shared *)0)->bytes) >= 2 * sizeof(ncclUniqueId), "room for two ids");
	struct ranks_options options = { .nranks = 5, .no_comm = true };
	assert_true(ranks_run(&options, several_roots, NULL));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(split_by_color_and_key), cmocka_unit_test(split_between_hosts), cmocka_unit_test(splits_of_a_group_are_made_in_its_order), cmocka_unit_test(a_group_may_end_what_it_splits),
		cmocka_unit_test(shrink_leaves_ranks_out),
		cmocka_unit_test(shrink_goes_on_without_the_dead), cmocka_unit_test(shrink_gives_up_what_is_outstanding),
		cmocka_unit_test(a_communicator_of_several_roots),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

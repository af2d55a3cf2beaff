/* Groups: several ranks in one thread, sends and receives in any mix, nesting, errors inside. */
#include "api/helper_ranks.h"

#define N 4

static void in_one_process(ranks_body body)
{
	struct ranks_options options = { .nranks = 1, .no_comm = true };
	assert_true(ranks_run(&options, body, NULL));
}

static void all_of_one_thread(struct ranks *r)
{
	ncclComm_t comms[N];
	float in[N][100], out[N][100];
	REQUIRE_OK(ncclCommInitAll(comms, N, NULL));
	for (int round = 0; round < 50; round++) {
		for (int k = 0; k < N; k++)
			for (int i = 0; i < 100; i++) in[k][i] = (float)(k + i + round);
		REQUIRE_OK(ncclGroupStart());
		for (int k = 0; k < N; k++) REQUIRE_OK(ncclAllReduce(in[k], out[k], 100, ncclFloat, ncclSum, comms[k], NULL));
		REQUIRE_OK(ncclGroupEnd());
		for (int k = 0; k < N; k++)
			for (int i = 0; i < 100; i++) REQUIRE(out[k][i] == (float)(N * (i + round) + N * (N - 1) / 2));
	}
	for (int k = 0; k < N; k++) {
		int count, rank, device;
		REQUIRE_OK(ncclCommCount(comms[k], &count));
		REQUIRE_OK(ncclCommUserRank(comms[k], &rank));
		REQUIRE_OK(ncclCommCuDevice(comms[k], &device));
		REQUIRE(count == N && rank == k && device == k);
	}
	for (int k = 0; k < N; k++) REQUIRE_OK(ncclCommFinalize(comms[k]));
	for (int k = 0; k < N; k++) REQUIRE_OK(ncclCommDestroy(comms[k]));
}

static void one_thread_serves_all_ranks(void **state) { (void)state; in_one_process(all_of_one_thread); }

static void init_in_a_group(struct ranks *r)
{
	ncclComm_t comms[N] = { NULL };
	ncclUniqueId id;
	REQUIRE_OK(ncclGetUniqueId(&id));
	REQUIRE_OK(ncclGroupStart());
	for (int k = 0; k < N; k++) REQUIRE_OK(ncclCommInitRank(&comms[k], N, id, k));
	REQUIRE_OK(ncclGroupEnd());
	int value[N], sum[N];
	REQUIRE_OK(ncclGroupStart());
	REQUIRE_OK(ncclGroupStart());       /* nested */
	for (int k = 0; k < N; k++) {
		value[k] = k;
		REQUIRE_OK(ncclAllReduce(&value[k], &sum[k], 1, ncclInt, ncclSum, comms[k], NULL));
	}
	REQUIRE_OK(ncclGroupEnd());
	for (int k = 0; k < N; k++) REQUIRE_OK(ncclAllReduce(&value[k], &value[k], 1, ncclInt, ncclMax, comms[k], NULL));
	REQUIRE_OK(ncclGroupEnd());
	for (int k = 0; k < N; k++) REQUIRE(sum[k] == N * (N - 1) / 2 && value[k] == N - 1);
	REQUIRE_OK(ncclGroupStart());
	for (int k = 0; k < N; k++) REQUIRE_OK(ncclCommDestroy(comms[k]));
	REQUIRE_OK(ncclGroupEnd());
}

static void ranks_are_made_and_ended_in_groups(void **state) { (void)state; in_one_process(init_in_a_group); }

static void exchange(struct ranks *r)
{
	enum { LARGEST = 70000 };
	int n = r->nranks;
	unsigned char *out = malloc((size_t)n * LARGEST), *in = malloc((size_t)n * LARGEST);
	static const size_t sizes[] = { 0, 1, 100, 5000, LARGEST };
	for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
		/* To rank k goes a size that both ends compute: different for each pair, oneself included. */
		REQUIRE_OK(ncclGroupStart());
		for (int k = n - 1; k >= 0; k--) {
			size_t bytes = sizes[(s + (size_t)(r->rank + 2 * k)) % 5], expected = sizes[(s + (size_t)(k + 2 * r->rank)) % 5];
			memset(out + (size_t)k * LARGEST, r->rank * 16 + k + 1, bytes);
			memset(in + (size_t)k * LARGEST, 0, LARGEST);
			REQUIRE_OK(ncclSend(out + (size_t)k * LARGEST, bytes, ncclUint8, k, r->comm, NULL));
			REQUIRE_OK(ncclRecv(in + (size_t)k * LARGEST, expected, ncclUint8, k, r->comm, NULL));
		}
		REQUIRE_OK(ncclGroupEnd());
		for (int k = 0; k < n; k++) {
			size_t expected = sizes[(s + (size_t)(k + 2 * r->rank)) % 5];
			for (size_t i = 0; i < LARGEST; i++)
				REQUIRE(in[(size_t)k * LARGEST + i] == (i < expected ? (unsigned char)(k * 16 + r->rank + 1) : 0));
		}
	}
	free(out);
	free(in);
}

static void sends_and_receives_need_no_order(void **state) { (void)state; assert_true(ranks_run_n(4, exchange, NULL)); }

static void sends_and_receives_between_hosts(void **state)
{
	(void)state;
	struct ranks_options options = { .nranks = 4, .nhosts = 2 };
	assert_true(ranks_run(&options, exchange, NULL));
}

static void ring_and_reduce(struct ranks *r)
{
	/* A collective and several transfers with one peer in one group; then pairs outside groups. */
	int n = r->nranks, next = (r->rank + 1) % n, before = (r->rank + n - 1) % n;
	for (int round = 0; round < 100; round++) {
		int a = r->rank * 1000 + round, b = -a, got_a = 0, got_b = 0, sum = 0;
		REQUIRE_OK(ncclGroupStart());
		REQUIRE_OK(ncclSend(&a, 1, ncclInt, next, r->comm, NULL));
		REQUIRE_OK(ncclAllReduce(&round, &sum, 1, ncclInt, ncclSum, r->comm, NULL));
		REQUIRE_OK(ncclSend(&b, 1, ncclInt, next, r->comm, NULL));
		REQUIRE_OK(ncclRecv(&got_a, 1, ncclInt, before, r->comm, NULL));
		REQUIRE_OK(ncclRecv(&got_b, 1, ncclInt, before, r->comm, NULL));
		REQUIRE_OK(ncclGroupEnd());
		REQUIRE(got_a == before * 1000 + round && got_b == -got_a && sum == n * round);
		if (r->rank == 0) REQUIRE_OK(ncclSend(&a, 1, ncclInt, n - 1, r->comm, NULL));
		if (r->rank == n - 1) REQUIRE_OK(ncclRecv(&got_a, 1, ncclInt, 0, r->comm, NULL));
		if (r->rank == n - 1) REQUIRE(got_a == round);
	}
}

static void collectives_and_transfers_mix(void **state) { (void)state; assert_true(ranks_run_n(3, ring_and_reduce, NULL)); }

static void different_groupings(struct ranks *r)
{
	/* One rank sends in two groups what the other receives in one: the collectives after it still meet. */
	int a = 1, b = 2, x = 0, y = 0, sum = 0;
	if (r->rank == 0) {
		REQUIRE_OK(ncclSend(&a, 1, ncclInt, 1, r->comm, NULL));
		REQUIRE_OK(ncclSend(&b, 1, ncclInt, 1, r->comm, NULL));
	} else {
		REQUIRE_OK(ncclGroupStart());
		REQUIRE_OK(ncclRecv(&x, 1, ncclInt, 0, r->comm, NULL));
		REQUIRE_OK(ncclRecv(&y, 1, ncclInt, 0, r->comm, NULL));
		REQUIRE_OK(ncclGroupEnd());
		REQUIRE(x == 1 && y == 2);
	}
	REQUIRE_OK(ncclAllReduce(&a, &sum, 1, ncclInt, ncclSum, r->comm, NULL));
	REQUIRE(sum == 2);
}

static void groups_need_not_be_alike_on_both_sides(void **state) { (void)state; assert_true(ranks_run_n(2, different_groupings, NULL)); }

static void errors_inside(struct ranks *r)
{
	int value = 1, sum = 0;
	REQUIRE_IS(ncclGroupEnd(), ncclInvalidUsage);
	REQUIRE_OK(ncclGroupStart());
	REQUIRE_OK(ncclAllReduce(&value, &sum, 1, ncclInt, ncclSum, r->comm, NULL));
	REQUIRE_IS(ncclAllReduce(NULL, &sum, 1, ncclInt, ncclSum, r->comm, NULL), ncclInvalidArgument);
	REQUIRE_IS(ncclGroupEnd(), ncclInvalidArgument);
	REQUIRE(sum == 0);
	/* The thread's groups work again. */
	REQUIRE_OK(ncclGroupStart());
	REQUIRE_OK(ncclAllReduce(&value, &sum, 1, ncclInt, ncclSum, r->comm, NULL));
	REQUIRE_OK(ncclGroupEnd());
	REQUIRE(sum == r->nranks);
	REQUIRE_OK(ncclGroupStart());
	REQUIRE_OK(ncclGroupEnd());
}

static void an_error_in_a_group_runs_nothing_and_resets_it(void **state) { (void)state; assert_true(ranks_run_n(2, errors_inside, NULL)); }

static void simulate(struct ranks *r)
{
	static float small[16], large[1 << 20];
	float times[2];
	for (int k = 0; k < 2; k++) {
		ncclSimInfo_t info = NCCL_SIM_INFO_INITIALIZER;
		REQUIRE_OK(ncclGroupStart());
		REQUIRE_OK(ncclAllReduce(k ? large : small, k ? large : small, k ? 1 << 20 : 16, ncclFloat, ncclSum, r->comm, NULL));
		REQUIRE_OK(ncclGroupSimulateEnd(&info));
		times[k] = info.estimatedTime;
	}
	REQUIRE(times[0] > 0 && times[1] > times[0]);
	ncclSimInfo_t info = { 0 };
	REQUIRE_OK(ncclGroupStart());
	REQUIRE_IS(ncclGroupSimulateEnd(&info), ncclInvalidArgument);
	REQUIRE_OK(ncclGroupEnd());
}

static void a_simulated_group_tells_its_time_and_runs_nothing(void **state) { (void)state; assert_true(ranks_run_n(2, simulate, NULL)); }

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(one_thread_serves_all_ranks), cmocka_unit_test(ranks_are_made_and_ended_in_groups),
		cmocka_unit_test(sends_and_receives_need_no_order), cmocka_unit_test(sends_and_receives_between_hosts),
		cmocka_unit_test(collectives_and_transfers_mix), cmocka_unit_test(groups_need_not_be_alike_on_both_sides),
		cmocka_unit_test(an_error_in_a_group_runs_nothing_and_resets_it), cmocka_unit_test(a_simulated_group_tells_its_time_and_runs_nothing),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

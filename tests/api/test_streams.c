/* Host streams: order, waiting, errors, several communicators on one. */
#include "api/helper_ranks.h"

static void in_order(struct ranks *r)
{
	enum { N = 300, COUNT = 1000 };
	cudaStream_t stream;
	REQUIRE_OK(telpher_stream_create(&stream));
	int *x = calloc(COUNT, sizeof(*x)), *y = calloc(COUNT, sizeof(*y));
	for (int i = 0; i < COUNT; i++) x[i] = 1;
	/* Each reads what the one before wrote. */
	for (int k = 0; k < 5; k++) {
		REQUIRE_OK(ncclAllReduce(x, y, COUNT, ncclInt, ncclSum, r->comm, stream));
		REQUIRE_OK(ncclAllReduce(y, x, COUNT, ncclInt, ncclMax, r->comm, stream));
	}
	REQUIRE_OK(telpher_stream_synchronize(stream));
	REQUIRE_OK(telpher_stream_query(stream));
	int wanted = 1;
	for (int k = 0; k < 5; k++) wanted *= r->nranks;
	for (int i = 0; i < COUNT; i++) REQUIRE(x[i] == wanted);
	for (int k = 0; k < N; k++) REQUIRE_OK(ncclAllReduce(x, x, 1, ncclInt, ncclMax, r->comm, stream));
	REQUIRE_OK(telpher_stream_destroy(stream));
	/* The communicator keeps its order across streams: this waits for them. */
	REQUIRE_OK(ncclAllReduce(x, x, 1, ncclInt, ncclMax, r->comm, NULL));
	free(x);
	free(y);
}

static void operations_of_a_stream_run_in_order(void **state) { (void)state; assert_true(ranks_run_n(3, in_order, NULL)); }

static void returns_at_once(struct ranks *r)
{
	cudaStream_t stream;
	REQUIRE_OK(telpher_stream_create(&stream));
	int value = r->rank, sum = -1;
	if (r->rank == 0) {
		REQUIRE_OK(ncclAllReduce(&value, &sum, 1, ncclInt, ncclSum, r->comm, stream));
		REQUIRE_IS(telpher_stream_query(stream), ncclInProgress);
		ranks_barrier(r);
	} else {
		ranks_barrier(r);
		REQUIRE_OK(ncclAllReduce(&value, &sum, 1, ncclInt, ncclSum, r->comm, stream));
	}
	ncclResult_t state;
	do state = telpher_stream_query(stream); while (state == ncclInProgress);
	REQUIRE(state == ncclSuccess && sum == 1);
	REQUIRE_OK(telpher_stream_destroy(stream));
}

static void a_call_on_a_stream_returns_at_once(void **state) { (void)state; assert_true(ranks_run_n(2, returns_at_once, NULL)); }

static void shared_stream(struct ranks *r)
{
	ncclComm_t other;
	cudaStream_t stream, second;
	REQUIRE_OK(ncclCommSplit(r->comm, 0, -r->rank, &other, NULL));
	REQUIRE_OK(telpher_stream_create(&stream));
	REQUIRE_OK(telpher_stream_create(&second));
	long value = 1;
	for (int k = 0; k < 20; k++) {
		REQUIRE_OK(ncclAllReduce(&value, &value, 1, ncclInt64, ncclSum, k % 2 ? other : r->comm, stream));
		if (k % 5 == 0) {
			REQUIRE_OK(telpher_stream_synchronize(stream));
			REQUIRE_OK(ncclAllReduce(&value, &value, 1, ncclInt64, ncclMax, other, second));
			REQUIRE_OK(telpher_stream_synchronize(second));
		}
	}
	REQUIRE_OK(telpher_stream_synchronize(stream));
	REQUIRE(value == 1 << 20);
	REQUIRE_OK(telpher_stream_destroy(stream));
	REQUIRE_OK(telpher_stream_destroy(second));
	REQUIRE_OK(ncclCommDestroy(other));
}

static void communicators_share_a_stream(void **state) { (void)state; assert_true(ranks_run_n(2, shared_stream, NULL)); }

static void foreign(struct ranks *r)
{
	int value = 1, on_stack = 0;
	cudaStream_t stream, bad = (cudaStream_t)(void *)&on_stack;
	REQUIRE_IS(ncclAllReduce(&value, &value, 1, ncclInt, ncclSum, r->comm, bad), ncclInvalidArgument);
	REQUIRE_IS(telpher_stream_synchronize(bad), ncclInvalidArgument);
	REQUIRE_IS(telpher_stream_destroy(bad), ncclInvalidArgument);
	REQUIRE_OK(telpher_stream_create(&stream));
	REQUIRE_OK(telpher_stream_destroy(stream));
	REQUIRE_IS(telpher_stream_query(stream), ncclInvalidArgument);
	REQUIRE_IS(telpher_stream_create(NULL), ncclInvalidArgument);
	/* CUDA's names for the default stream mean: return when it is done. */
	REQUIRE_OK(ncclAllReduce(&value, &value, 1, ncclInt, ncclSum, r->comm, (cudaStream_t)(uintptr_t)1));
	REQUIRE_OK(ncclAllReduce(&value, &value, 1, ncclInt, ncclSum, r->comm, (cudaStream_t)(uintptr_t)2));
	REQUIRE(value == r->nranks * r->nranks);
	REQUIRE_OK(telpher_stream_synchronize(NULL));
}

static void a_foreign_stream_is_an_error(void **state) { (void)state; assert_true(ranks_run_n(2, foreign, NULL)); }

static void transfers(struct ranks *r)
{
	cudaStream_t a, b;
	REQUIRE_OK(telpher_stream_create(&a));
	REQUIRE_OK(telpher_stream_create(&b));
	int peer = 1 - r->rank, out = r->rank, in = -1, value = 1;
	for (int k = 0; k < 50; k++) {
		REQUIRE_OK(ncclAllReduce(&value, &value, 1, ncclInt, ncclMax, r->comm, b));
		REQUIRE_OK(ncclGroupStart());
		REQUIRE_OK(ncclSend(&out, 1, ncclInt, peer, r->comm, a));
		REQUIRE_OK(ncclRecv(&in, 1, ncclInt, peer, r->comm, b));
		REQUIRE_OK(ncclGroupEnd());
		REQUIRE_OK(telpher_stream_synchronize(k % 2 ? a : b));
		REQUIRE(in == peer);
		in = -1;
	}
	REQUIRE_OK(telpher_stream_destroy(a));
	REQUIRE_OK(telpher_stream_destroy(b));
}

static void a_group_may_use_several_streams(void **state) { (void)state; assert_true(ranks_run_n(2, transfers, NULL)); }

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(operations_of_a_stream_run_in_order), cmocka_unit_test(a_call_on_a_stream_returns_at_once),
		cmocka_unit_test(communicators_share_a_stream), cmocka_unit_test(a_foreign_stream_is_an_error),
		cmocka_unit_test(a_group_may_use_several_streams),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

/* What a call with wrong arguments gives: an error with a reason, and a communicator that still works. */
#include "api/helper_ranks.h"

static void still_works(struct ranks *r)
{
	int value = 1, sum = 0;
	REQUIRE_OK(ncclAllReduce(&value, &sum, 1, ncclInt, ncclSum, r->comm, NULL));
	REQUIRE(sum == r->nranks);
}

static void arguments(struct ranks *r)
{
	int a[64] = { 0 }, b[64];
	ncclComm_t c = r->comm;
	REQUIRE_IS(ncclAllReduce(a, b, 1, ncclInt, ncclSum, NULL, NULL), ncclInvalidArgument);
	REQUIRE_ERROR_HAS("NULL");
	REQUIRE_IS(ncclAllReduce(NULL, b, 1, ncclInt, ncclSum, c, NULL), ncclInvalidArgument);
	REQUIRE_ERROR_HAS("sendbuff");
	REQUIRE_IS(ncclAllReduce(a, NULL, 1, ncclInt, ncclSum, c, NULL), ncclInvalidArgument);
	REQUIRE_ERROR_HAS("recvbuff");
	REQUIRE_IS(ncclAllReduce(a, b, 1, (ncclDataType_t)ncclNumTypes, ncclSum, c, NULL), ncclInvalidArgument);
	REQUIRE_IS(ncclAllReduce(a, b, 1, (ncclDataType_t)-1, ncclSum, c, NULL), ncclInvalidArgument);
	REQUIRE_IS(ncclAllReduce(a, b, 1, ncclInt, (ncclRedOp_t)77, c, NULL), ncclInvalidArgument);
	REQUIRE_IS(ncclAllReduce(a, b, SIZE_MAX, ncclInt, ncclSum, c, NULL), ncclInvalidArgument);
	REQUIRE_IS(ncclAllGather(a, b, SIZE_MAX / 5, ncclInt, c, NULL), ncclInvalidArgument);
	REQUIRE_IS(ncclBroadcast(a, b, 1, ncclInt, r->nranks, c, NULL), ncclInvalidArgument);
	REQUIRE_IS(ncclReduce(a, b, 1, ncclInt, ncclSum, -1, c, NULL), ncclInvalidArgument);
	REQUIRE_IS(ncclSend(a, 1, ncclInt, r->nranks, c, NULL), ncclInvalidArgument);
	REQUIRE_IS(ncclRecv(b, 1, ncclInt, -1, c, NULL), ncclInvalidArgument);
	REQUIRE_IS(ncclSend(NULL, 1, ncclInt, 0, c, NULL), ncclInvalidArgument);
	/* Nothing of nothing is fine. */
	REQUIRE_OK(ncclAllReduce(NULL, NULL, 0, ncclInt, ncclSum, c, NULL));
	REQUIRE_OK(ncclAllGather(NULL, NULL, 0, ncclInt, c, NULL));
	still_works(r);
}

static void overlaps(struct ranks *r)
{
	int a[256];
	ncclComm_t c = r->comm;
	memset(a, 0, sizeof(a));
	REQUIRE_IS(ncclAllReduce(a, a + 1, 2, ncclInt, ncclSum, c, NULL), ncclInvalidArgument);
	REQUIRE_ERROR_HAS("overlap");
	REQUIRE_IS(ncclAllReduce(a + 1, a, 2, ncclInt, ncclSum, c, NULL), ncclInvalidArgument);
	REQUIRE_OK(ncclAllReduce(a, a + 2, 2, ncclInt, ncclSum, c, NULL));
	REQUIRE_OK(ncclAllReduce(a, a, 2, ncclInt, ncclSum, c, NULL));
	/* Once a call like it went the short way, too. */
	for (int k = 0; k < 3; k++) REQUIRE_OK(ncclAllReduce(a, a, 2, ncclInt, ncclSum, c, NULL));
	REQUIRE_IS(ncclAllReduce(a, a + 1, 2, ncclInt, ncclSum, c, NULL), ncclInvalidArgument);
	REQUIRE_IS(ncclAllReduce(NULL, a, 2, ncclInt, ncclSum, c, NULL), ncclInvalidArgument);
	int other = 1 - r->rank;
	REQUIRE_IS(ncclAllGather(a + 4 * other, a, 4, ncclInt, c, NULL), ncclInvalidArgument);
	REQUIRE_IS(ncclReduceScatter(a, a + 4 * other, 4, ncclInt, ncclSum, c, NULL), ncclInvalidArgument);
	REQUIRE_IS(ncclAlltoAll(a, a + 1, 4, ncclInt, c, NULL), ncclInvalidArgument);
	REQUIRE_OK(ncclAlltoAll(a, a, 4, ncclInt, c, NULL));
	still_works(r);
}

static void handles(struct ranks *r)
{
	int value = 1, zeros[64] = { 0 };
	ncclComm_t gone, foreign = (ncclComm_t)(void *)zeros;
	ncclResult_t state;
	REQUIRE_OK(ncclCommSplit(r->comm, 0, 0, &gone, NULL));
	REQUIRE_OK(ncclCommDestroy(gone));
	REQUIRE_IS(ncclAllReduce(&value, &value, 1, ncclInt, ncclSum, gone, NULL), ncclInvalidArgument);
	REQUIRE_IS(ncclCommDestroy(gone), ncclInvalidArgument);
	REQUIRE_IS(ncclCommAbort(gone), ncclInvalidArgument);
	REQUIRE_IS(ncclCommGetAsyncError(gone, &state), ncclInvalidArgument);
	REQUIRE_IS(ncclCommCount(gone, &value), ncclInvalidArgument);
	REQUIRE_IS(ncclAllReduce(&value, &value, 1, ncclInt, ncclSum, foreign, NULL), ncclInvalidArgument);
	REQUIRE_OK(ncclCommDestroy(NULL));
	REQUIRE_OK(ncclCommAbort(NULL));
	REQUIRE_IS(ncclCommCount(r->comm, NULL), ncclInvalidArgument);
	REQUIRE_IS(ncclCommGetAsyncError(r->comm, NULL), ncclInvalidArgument);
	still_works(r);
	REQUIRE_OK(ncclCommSplit(r->comm, 0, 0, &gone, NULL));
	REQUIRE_OK(ncclCommFinalize(gone));
	REQUIRE_IS(ncclAllReduce(&value, &value, 1, ncclInt, ncclSum, gone, NULL), ncclInvalidUsage);
	REQUIRE_OK(ncclCommCount(gone, &value));
	REQUIRE_IS(ncclCommFinalize(gone), ncclInvalidUsage);
	REQUIRE_OK(ncclCommDestroy(gone));
}

static void operators(struct ranks *r)
{
	ncclComm_t other;
	ncclRedOp_t op;
	float scalar = 2, a = 1, b = 0;
	int n = 1;
	REQUIRE_OK(ncclCommSplit(r->comm, 0, 0, &other, NULL));
	REQUIRE_OK(ncclRedOpCreatePreMulSum(&op, &scalar, ncclFloat, ncclScalarHostImmediate, other));
	REQUIRE((int)op >= ncclNumOps);
	REQUIRE_IS(ncclAllReduce(&a, &b, 1, ncclFloat, op, r->comm, NULL), ncclInvalidArgument);
	REQUIRE_IS(ncclAllReduce(&n, &n, 1, ncclInt, op, other, NULL), ncclInvalidArgument);
	REQUIRE_OK(ncclAllReduce(&a, &b, 1, ncclFloat, op, other, NULL));
	REQUIRE(b == 2 * (float)r->nranks);
	REQUIRE_IS(ncclRedOpDestroy(op, r->comm), ncclInvalidArgument);
	REQUIRE_OK(ncclRedOpDestroy(op, other));
	REQUIRE_IS(ncclRedOpDestroy(op, other), ncclInvalidArgument);
	REQUIRE_IS(ncclRedOpDestroy(ncclSum, other), ncclInvalidArgument);
	REQUIRE_IS(ncclRedOpCreatePreMulSum(&op, NULL, ncclFloat, ncclScalarHostImmediate, other), ncclInvalidArgument);
	REQUIRE_IS(ncclRedOpCreatePreMulSum(&op, &scalar, (ncclDataType_t)99, ncclScalarHostImmediate, other), ncclInvalidArgument);
	REQUIRE_OK(ncclCommDestroy(other));
	still_works(r);
}

static void not_for_hosts(struct ranks *r)
{
	typedef struct { int nRanks, rank, stride; } team_t;
	team_t ncclTeamWorld(ncclComm_t);
	ncclResult_t ncclDevCommCreate(ncclComm_t, const void *, void *);
	char buffer[64];
	ncclWindow_t window = NULL;
	REQUIRE_IS(ncclCommWindowRegister(r->comm, buffer, sizeof(buffer), &window, NCCL_WIN_DEFAULT), ncclInvalidUsage);
	REQUIRE_ERROR_HAS("window");
	REQUIRE(!window);
	REQUIRE_OK(ncclCommWindowDeregister(r->comm, NULL));
	REQUIRE_IS(ncclDevCommCreate(r->comm, NULL, NULL), ncclInvalidUsage);
	team_t team = ncclTeamWorld(r->comm);
	REQUIRE(team.nRanks == 0 && team.rank == 0 && team.stride == 0);
	REQUIRE_ERROR_HAS("ncclTeamWorld");
	still_works(r);
}

static void memory(struct ranks *r)
{
	void *a, *handle, *again;
	REQUIRE_OK(ncclMemAlloc(&a, 10000));
	REQUIRE((uintptr_t)a % 4096 == 0);
	for (int i = 0; i < 10000; i++) REQUIRE(((char *)a)[i] == 0);
	REQUIRE_OK(ncclCommRegister(r->comm, a, 10000, &handle));
	REQUIRE_OK(ncclAllReduce(a, a, 2500, ncclInt, ncclSum, r->comm, NULL));
	REQUIRE_OK(ncclCommDeregister(r->comm, handle));
	REQUIRE_IS(ncclCommDeregister(r->comm, handle), ncclInvalidArgument);
	REQUIRE_OK(ncclCommRegister(r->comm, a, 10000, &again));    /* left to the communicator */
	REQUIRE_OK(ncclMemFree(a));
	REQUIRE_IS(ncclMemFree(a), ncclInvalidArgument);
	REQUIRE_IS(ncclMemFree(&a), ncclInvalidArgument);
	REQUIRE_OK(ncclMemFree(NULL));
	REQUIRE_OK(ncclMemAlloc(&a, 0));
	REQUIRE(!a);
	REQUIRE_IS(ncclMemAlloc(NULL, 5), ncclInvalidArgument);
	REQUIRE_IS(ncclMemAlloc(&a, SIZE_MAX), ncclInvalidArgument);
}

static void configurations(struct ranks *r)
{
	/* One rank: {size, version} of every header since 2.14. */
	static const struct { size_t size; unsigned version; bool good; } headers[] = {
		{ 24, 21400, true }, { 40, 21700, true }, { 48, 21805, true }, { 48, 22602, true }, { 72, 22703, true }, { 80, 22809, true },
		{ 88, 22902, true }, { 112, 23102, true }, { 8, 21400, false }, { 0, 22809, false }, { 80, 0, false },
	};
	for (size_t i = 0; i < sizeof(headers) / sizeof(headers[0]); i++) {
		union { ncclConfig_t config; char bytes[128]; } u;
		/* What lies behind an older header's end, and in its padding, is anything. */
		memset(&u, 0x5c, sizeof(u));
		ncclConfig_t fresh = NCCL_CONFIG_INITIALIZER;
		memcpy(&u, &fresh, headers[i].size < sizeof(fresh) ? headers[i].size : sizeof(fresh));
		u.config.size = headers[i].size;
		u.config.version = headers[i].version;
		u.config.blocking = 1;
		if (headers[i].version < 22600) u.config.trafficClass = 0x5c5c5c5c;
		ncclUniqueId id;
		ncclComm_t comm;
		REQUIRE_OK(ncclGetUniqueId(&id));
		ncclResult_t result = ncclCommInitRankConfig(&comm, 1, id, 0, &u.config);
		REQUIRE_IS(result, headers[i].good ? ncclSuccess : ncclInvalidArgument);
		if (headers[i].good) REQUIRE_OK(ncclCommDestroy(comm));
	}
	ncclConfig_t bad = NCCL_CONFIG_INITIALIZER;
	ncclUniqueId id;
	ncclComm_t comm = NULL;
	REQUIRE_OK(ncclGetUniqueId(&id));
	bad.magic = 1;
	REQUIRE_IS(ncclCommInitRankConfig(&comm, 1, id, 0, &bad), ncclInvalidArgument);
	bad = (ncclConfig_t)NCCL_CONFIG_INITIALIZER;
	bad.blocking = 2;
	REQUIRE_IS(ncclCommInitRankConfig(&comm, 1, id, 0, &bad), ncclInvalidArgument);
	bad = (ncclConfig_t)NCCL_CONFIG_INITIALIZER;
	bad.minCTAs = 5;
	bad.maxCTAs = 3;
	REQUIRE_IS(ncclCommInitRankConfig(&comm, 1, id, 0, &bad), ncclInvalidArgument);
	bad = (ncclConfig_t)NCCL_CONFIG_INITIALIZER;
	REQUIRE_IS(ncclCommInitRank(&comm, 0, id, 0), ncclInvalidArgument);
	REQUIRE_IS(ncclCommInitRank(&comm, 2, id, 2), ncclInvalidArgument);
	REQUIRE_IS(ncclCommInitRank(NULL, 2, id, 1), ncclInvalidArgument);
	int devices[] = { 3, 3 };
	ncclComm_t comms[2];
	REQUIRE_IS(ncclCommInitAll(comms, 2, devices), ncclInvalidUsage);
	REQUIRE_IS(ncclCommInitAll(comms, 0, NULL), ncclInvalidArgument);
	REQUIRE(!comm);
}

static void library(struct ranks *r)
{
	int version = 0;
	REQUIRE_OK(ncclGetVersion(&version));
	REQUIRE(version == 22809);
	REQUIRE_IS(ncclGetVersion(NULL), ncclInvalidArgument);
	for (int i = -1; i < 20; i++) REQUIRE(ncclGetErrorString((ncclResult_t)i)[0]);
	REQUIRE(ncclGetLastError(NULL));
	REQUIRE(!strcmp(telpher_version(), TELPHER_VERSION));
	ncclResetDebugInit();
	char text[200];
	REQUIRE_OK(telpher_comm_path(r->comm, r->rank, 1 - r->rank, text, sizeof(text)));
	REQUIRE(strlen(text) > 0);
	REQUIRE_IS(telpher_comm_path(r->comm, 0, 2, text, sizeof(text)), ncclInvalidArgument);
	still_works(r);
}

static void wrong_arguments_are_errors(void **state) { (void)state; assert_true(ranks_run_n(2, arguments, NULL)); }
static void buffers_may_not_overlap_but_in_place(void **state) { (void)state; assert_true(ranks_run_n(2, overlaps, NULL)); }
static void dead_and_foreign_handles_are_errors(void **state) { (void)state; assert_true(ranks_run_n(2, handles, NULL)); }
static void operators_belong_to_a_communicator_and_a_type(void **state) { (void)state; assert_true(ranks_run_n(2, operators, NULL)); }
static void what_gpus_have_is_refused_clearly(void **state) { (void)state; assert_true(ranks_run_n(2, not_for_hosts, NULL)); }
static void memory_is_remembered(void **state) { (void)state; assert_true(ranks_run_n(2, memory, NULL)); }
static void the_library_tells_of_itself(void **state) { (void)state; assert_true(ranks_run_n(2, library, NULL)); }

static void configurations_of_every_version(void **state)
{
	(void)state;
	struct ranks_options options = { .nranks = 1, .no_comm = true };
	assert_true(ranks_run(&options, configurations, NULL));
}

static void unknown_network(struct ranks *r)
{
	ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
	ncclComm_t comm = NULL;
	config.netName = "Pigeon";
	REQUIRE_IS(ncclCommInitRankConfig(&comm, r->nranks, r->id, r->rank, &config), ncclInvalidUsage);
	REQUIRE(!comm);
	REQUIRE_ERROR_HAS("netName=Pigeon: there is no such network. There are: ");
	ranks_barrier(r);
}

static void known_network(struct ranks *r)
{
	ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
	ncclComm_t comm = NULL;
	config.netName = "socket";
	REQUIRE_OK(ncclCommInitRankConfig(&comm, r->nranks, r->id, r->rank, &config));
	REQUIRE_OK(ncclCommDestroy(comm));
}

static void a_network_is_chosen_by_name_or_refused(void **state)
{
	(void)state;
	struct ranks_options options = { .nranks = 2, .nhosts = 2, .no_comm = true };
	assert_true(ranks_run(&options, unknown_network, NULL));
	assert_true(ranks_run(&options, known_network, NULL));
}

static void another_network_expected(struct ranks *r)
{
	ncclComm_t comm = NULL;
	REQUIRE_IS(ncclCommInitRank(&comm, r->nranks, r->id, r->rank), ncclInvalidUsage);
	REQUIRE(!comm);
	REQUIRE_ERROR_HAS("TELPHER_EXPECT: expected net=IB of rank");
	REQUIRE_ERROR_HAS("found Socket/0");
	ranks_barrier(r);
}

static void this_network_expected(struct ranks *r)
{
	ncclComm_t comm = NULL;
	REQUIRE_OK(ncclCommInitRank(&comm, r->nranks, r->id, r->rank));
	REQUIRE_OK(ncclCommDestroy(comm));
}

static void an_expected_network_is_checked(void **state)
{
	(void)state;
	struct ranks_options options = { .nranks = 2, .nhosts = 2, .no_comm = true, .env = { "TELPHER_EXPECT=net=IB" } };
	assert_true(ranks_run(&options, another_network_expected, NULL));
	options.env[0] = "TELPHER_EXPECT=net=IB|Socket";
	assert_true(ranks_run(&options, this_network_expected, NULL));
	/* On one host there is none to expect it of. */
	options.nhosts = 1;
	options.env[0] = "TELPHER_EXPECT=net=IB";
	assert_true(ranks_run(&options, this_network_expected, NULL));
}

static void needs_no_gpu(struct ranks *r)
{
	void *memory_;
	ncclComm_t comm;
	ncclUniqueId id;
	REQUIRE_OK(ncclGetUniqueId(&id));
	REQUIRE_IS(ncclCommInitRank(&comm, 1, id, 0), ncclInvalidUsage);
	REQUIRE_ERROR_HAS("TELPHER_DEVICE=host");
	REQUIRE_IS(ncclMemAlloc(&memory_, 100), ncclInvalidUsage);
}

static void gpu_ranks_are_refused_clearly(void **state)
{
	(void)state;
	struct ranks_options options = { .nranks = 1, .no_comm = true, .env = { "TELPHER_DEVICE=cuda", "CUDA_VISIBLE_DEVICES=" } };
	assert_true(ranks_run(&options, needs_no_gpu, NULL));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(wrong_arguments_are_errors), cmocka_unit_test(buffers_may_not_overlap_but_in_place),
		cmocka_unit_test(dead_and_foreign_handles_are_errors), cmocka_unit_test(operators_belong_to_a_communicator_and_a_type),
		cmocka_unit_test(what_gpus_have_is_refused_clearly), cmocka_unit_test(memory_is_remembered),
		cmocka_unit_test(the_library_tells_of_itself), cmocka_unit_test(configurations_of_every_version),
		cmocka_unit_test(a_network_is_chosen_by_name_or_refused), cmocka_unit_test(an_expected_network_is_checked),
		cmocka_unit_test(gpu_ranks_are_refused_clearly),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Buffers that the program registered are sent by RDMA from where they lie, others are copied; both arrive as they were, also with loss; and
 * nothing reads them any more once a call has returned, however it ended. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "api/helper_ranks.h"

#define COUNT (SANITIZED_THREAD ? (size_t)60000 : (size_t)300000)    /* floats: several chunks, the last one ragged */

static char log_file[64];

static float *map(size_t count)
{
	void *memory = mmap(NULL, count * sizeof(float), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	return memory == MAP_FAILED ? NULL : memory;
}

static float value(int rank, size_t i, int round) { return (float)((rank + 1) * (int)((i * 7 + (size_t)round * 31) % 1009)); }

static void fill(struct ranks *r, float *buffer, size_t count, int round)
{
	for (size_t i = 0; i < count; i++) buffer[i] = value(r->rank, i, round);
}

/* How many lines of all ranks' logs have this text. */
static int count_said(const char *what)
{
	char line[2048];
	int count = 0;
	FILE *log = fopen(log_file, "r");
	while (log && fgets(line, sizeof(line), log)) count += strstr(line, what) != NULL;
	if (log) fclose(log);
	return count;
}

static void all_reduce(struct ranks *r, float *send, float *recv, int round)
{
	fill(r, send, COUNT, round);
	REQUIRE_OK(ncclAllReduce(send, recv, COUNT, ncclFloat, ncclSum, r->comm, NULL));
	for (size_t i = 0; i < COUNT; i++) {
		float sum = 0;
		for (int p = 0; p < r->nranks; p++) sum += value(p, i, round);
		REQUIRE(recv[i] == sum);
	}
}

static void all_gather(struct ranks *r, float *send, float *recv, int round)
{
	size_t each = COUNT / (size_t)r->nranks;
	fill(r, send, each, round);
	REQUIRE_OK(ncclAllGather(send, recv, each, ncclFloat, r->comm, NULL));
	for (int p = 0; p < r->nranks; p++)
		for (size_t i = 0; i < each; i++) REQUIRE(recv[(size_t)p * each + i] == value(p, i, round));
}

static void ring_exchange(struct ranks *r, float *send, float *recv, int round)
{
	int next = (r->rank + 1) % r->nranks, last = (r->rank + r->nranks - 1) % r->nranks;
	fill(r, send, COUNT, round);
	REQUIRE_OK(ncclGroupStart());
	REQUIRE_OK(ncclSend(send, COUNT, ncclFloat, next, r->comm, NULL));
	REQUIRE_OK(ncclRecv(recv, COUNT, ncclFloat, last, r->comm, NULL));
	REQUIRE_OK(ncclGroupEnd());
	for (size_t i = 0; i < COUNT; i++) REQUIRE(recv[i] == value(last, i, round));
}

static void one_of_each(struct ranks *r, float *send, float *recv, int round)
{
	all_reduce(r, send, recv, round);
	all_reduce(r, recv, recv, round + 1);           /* in place */
	all_gather(r, send, recv, round + 2);
	ring_exchange(r, send, recv, round + 3);
	/* At once overwritten: what was sent must have been sent. */
	fill(r, send, COUNT, 99);
}

static void registers_and_unmaps(struct ranks *r)
{
	for (int round = 0; round < 20; round += 5) {
		float *send = map(COUNT), *recv = map(COUNT);
		void *handles[3];
		REQUIRE(send && recv);
		/* One of them twice, and a part of the other; the peer copies in every second round. */
		if (round % 2 == 0 || r->rank == 0) {
			REQUIRE_OK(ncclCommRegister(r->comm, send, COUNT * sizeof(float), &handles[0]));
			REQUIRE_OK(ncclCommRegister(r->comm, send, COUNT * sizeof(float), &handles[1]));
			REQUIRE_OK(ncclCommRegister(r->comm, recv, COUNT * sizeof(float) / 2, &handles[2]));
			one_of_each(r, send, recv, round);
			REQUIRE_OK(ncclCommDeregister(r->comm, handles[1]));
			all_reduce(r, send, recv, round);
			REQUIRE_OK(ncclCommDeregister(r->comm, handles[0]));
			REQUIRE_OK(ncclCommDeregister(r->comm, handles[2]));
		} else {
			one_of_each(r, send, recv, round);
			all_reduce(r, send, recv, round);
		}
		munmap(send, COUNT * sizeof(float));
		munmap(recv, COUNT * sizeof(float));
	}
}

static struct ranks_options on_the_card(int nranks)
{
	struct ranks_options options = { .nranks = nranks, .nhosts = 2, .timeout_s = 250, .env = { "NCCL_IB_HCA=telpher", "TELPHER_VERBS_HIDE_REAL=1", "NCCL_NET=IB",
		"NCCL_DEBUG=INFO", "NCCL_DEBUG_SUBSYS=REG" } };
	static char file[96];
	snprintf(file, sizeof(file), "NCCL_DEBUG_FILE=%s", log_file);
	options.env[5] = file;
	unlink(log_file);
	return options;
}

static void registered_buffers_arrive_and_may_be_unmapped_afterwards(void **state)
{
	(void)state;
	struct ranks_options options = on_the_card(2);
	assert_true(ranks_run(&options, registers_and_unmaps, NULL));
	/* The first round's connections came after the registrations. */
	assert_int_equal(count_said("a collective waited"), 2);
}

static void they_do_with_loss_on_the_wire(void **state)
{
	(void)state;
	struct ranks_options options = on_the_card(3);
	options.env[6] = "TELPHER_VERBS_CARRIER=wire";
	options.env[7] = "TELPHER_VERBS_FAULT=drop=0.01,seed=7";
	assert_true(ranks_run(&options, registers_and_unmaps, NULL));
}

static void registers_nothing(struct ranks *r)
{
	float *send = map(COUNT), *recv = map(COUNT);
	REQUIRE(send && recv);
	one_of_each(r, send, recv, 0);
	one_of_each(r, send, recv, 4);
}

static void registers_all(struct ranks *r)
{
	float *send = map(COUNT), *recv = map(COUNT);
	void *handle;
	REQUIRE(send && recv);
	REQUIRE_OK(ncclCommRegister(r->comm, send, COUNT * sizeof(float), &handle));
	REQUIRE_OK(ncclCommRegister(r->comm, recv, COUNT * sizeof(float), &handle));
	one_of_each(r, send, recv, 0);
	/* The handles are the communicator's. */
}

static void what_is_not_registered_is_copied_and_that_is_said_once(void **state)
{
	(void)state;
	struct ranks_options options = on_the_card(2);
	assert_true(ranks_run(&options, registers_nothing, NULL));
	assert_int_equal(count_said("is copied first"), 2);
	assert_int_equal(count_said("a collective waited"), 0);
	options = on_the_card(2);
	assert_true(ranks_run(&options, registers_all, NULL));
	assert_int_equal(count_said("is copied first"), 0);
}

static void registers_too_much(struct ranks *r)
{
	const size_t much = (size_t)40 << 20;
	float *send = map(much), *recv = map(COUNT);
	void *handle;
	REQUIRE(send && recv);
	REQUIRE_OK(ncclCommRegister(r->comm, send, much * sizeof(float), &handle));
	one_of_each(r, send, recv, 0);
	one_of_each(r, send, recv, 4);
	REQUIRE_OK(ncclCommDeregister(r->comm, handle));
}

static void what_cannot_be_registered_is_copied_with_a_warning(void **state)
{
	(void)state;
	struct ranks_options options = on_the_card(2);
	options.env[6] = "TELPHER_VERBS_FAULT=memlock=128M";
	assert_true(ranks_run(&options, registers_too_much, NULL));
	assert_int_equal(count_said("NCCL WARN rank"), 2);
	assert_int_equal(count_said("can't be registered with the network (see above): it is copied into slots instead"), 2);
}

struct shaker { struct ranks *r; float *buffers[2]; _Atomic bool stop; };

static void *registers_all_the_time(void *arg)
{
	struct shaker *s = arg;
	struct ranks *r = s->r;
	for (unsigned seed = 5; !atomic_load(&s->stop); seed = seed * 1103515245u + 12345u) {
		void *handles[3];
		for (int i = 0; i < 3; i++) {
			size_t first = (seed >> (8 + i)) % (COUNT / 2);
			REQUIRE_OK(ncclCommRegister(r->comm, s->buffers[(seed >> (16 + i)) % 2] + first, (COUNT - first) * sizeof(float), &handles[i]));
		}
		for (int i = 0; i < 3; i++) REQUIRE_OK(ncclCommDeregister(r->comm, handles[i]));
		usleep(200);
	}
	return NULL;
}

static void uses_what_comes_and_goes(struct ranks *r)
{
	struct shaker shaker = { .r = r, .buffers = { map(COUNT), map(COUNT) } };
	pthread_t threads[2];
	for (int i = 0; i < 2; i++) REQUIRE(pthread_create(&threads[i], NULL, registers_all_the_time, &shaker) == 0);
	for (int round = 0; round < 40; round += 4) one_of_each(r, shaker.buffers[0], shaker.buffers[1], round);
	atomic_store(&shaker.stop, true);
	for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
}

static void registrations_may_come_and_go_while_collectives_run(void **state)
{
	(void)state;
	struct ranks_options options = on_the_card(2);
	assert_true(ranks_run(&options, uses_what_comes_and_goes, NULL));
}

static void registers_when_its_links_are_there(struct ranks *r)
{
	float *send = map(COUNT), *recv = map(COUNT);
	void *handle;
	REQUIRE(send && recv);
	fill(r, send, 16, 0);
	REQUIRE_OK(ncclAllReduce(send, recv, COUNT, ncclFloat, ncclSum, r->comm, NULL));
	REQUIRE_OK(ncclCommRegister(r->comm, send, COUNT * sizeof(float), &handle));
	REQUIRE_OK(ncclCommRegister(r->comm, recv, COUNT * sizeof(float), &handle));
	for (int round = 0; round < 3; round++) all_reduce(r, send, recv, round);
}

static void whoever_registers_when_links_are_there_lets_no_collective_wait(void **state)
{
	(void)state;
	struct ranks_options options = on_the_card(2);
	assert_true(ranks_run(&options, registers_when_its_links_are_there, NULL));
	assert_int_equal(count_said("a collective waited"), 0);
}

/* Rank 1 dies in the middle; what rank 0 gave it is unmapped as soon as the call returns. */
static void loses_its_peer(struct ranks *r)
{
	float *send = map(8 * COUNT), *recv = map(8 * COUNT);
	void *handle[2];
	ncclResult_t result = ncclSuccess;
	REQUIRE(send && recv);
	REQUIRE_OK(ncclCommRegister(r->comm, send, 8 * COUNT * sizeof(float), &handle[0]));
	REQUIRE_OK(ncclCommRegister(r->comm, recv, 8 * COUNT * sizeof(float), &handle[1]));
	for (int round = 0; result == ncclSuccess; round++) {
		if (r->rank == 1 && round == 3) kill(getpid(), SIGKILL);
		result = ncclAllReduce(send, recv, 8 * COUNT, ncclFloat, ncclSum, r->comm, NULL);
	}
	munmap(send, 8 * COUNT * sizeof(float));
	munmap(recv, 8 * COUNT * sizeof(float));
	REQUIRE_IS(result, ncclRemoteError);
	usleep(200000);
	for (int i = 0; i < 2; i++) REQUIRE_OK(ncclCommDeregister(r->comm, handle[i]));
	REQUIRE_OK(ncclCommAbort(r->comm));
	r->comm = NULL;
}

static void after_an_error_nothing_reads_them(void **state)
{
	(void)state;
	struct ranks_options options = on_the_card(2);
	options.may_die = 2;
	assert_true(ranks_run(&options, loses_its_peer, NULL));
	options.env[6] = "TELPHER_VERBS_CARRIER=wire";
	assert_true(ranks_run(&options, loses_its_peer, NULL));
	options.env[6] = NULL;
	options.env[0] = "NCCL_IB_DISABLE=1";
	options.env[2] = "NCCL_NET=Socket";
	assert_true(ranks_run(&options, loses_its_peer, NULL));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(registered_buffers_arrive_and_may_be_unmapped_afterwards),
		cmocka_unit_test(they_do_with_loss_on_the_wire),
		cmocka_unit_test(what_is_not_registered_is_copied_and_that_is_said_once),
		cmocka_unit_test(whoever_registers_when_links_are_there_lets_no_collective_wait),
		cmocka_unit_test(what_cannot_be_registered_is_copied_with_a_warning),
		cmocka_unit_test(registrations_may_come_and_go_while_collectives_run),
		cmocka_unit_test(after_an_error_nothing_reads_them),
	};
	if (access(CARD_LIBRARY, R_OK) != 0) {
		fprintf(stderr, "skipped: needs the software card\n");
		return 77;
	}
	setenv("TELPHER_IB_PATH_TIMEOUT", "60000", 1);       /* a busy machine is no reason to take the only path for dead */
	snprintf(log_file, sizeof(log_file), "/tmp/test_ib_lend.%d", (int)getpid());
	int failed = cmocka_run_group_tests(tests, NULL, NULL);
	unlink(log_file);
	return failed;
}

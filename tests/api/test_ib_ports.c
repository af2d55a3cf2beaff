/* Two ranks in two network namespaces, joined by a pair of interfaces for start-up and two for RDMA on the software card, add up
 * numbers without end while ports die and live again, and peers are killed. Needs root and ip (skipped otherwise). */
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "nccl.h"
#include "telpher.h"
#include "net/helper_namespaces.h"
#include "sanitizers.h"

#define COUNT 50000
#define ROUNDS (SANITIZED_THREAD ? 10u : 60u)               /* with either state of the ports: there a round takes many times as long */
#define WAIT_S 100
#define END_S 25

struct shared {
	ncclUniqueId id;
	_Atomic int ready[2], go, has_id, stop;
	_Atomic unsigned rounds[2], wrong;
	_Atomic int result[2];
	char error[2][1024];
};
static struct shared *shared;
static pid_t ranks[2];
static char logs[] = "/tmp/test_ib_ports.XXXXXX";        /* a folder: each rank's log in rank.PID */

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void keep(int rank, ncclResult_t result)
{
	snprintf(shared->error[rank], sizeof(shared->error[rank]), "%s", ncclGetLastError(NULL));
	atomic_store(&shared->result[rank], (int)result);
}

static void run_rank(int rank)
{
	ncclComm_t comm;
	float *send = malloc(COUNT * sizeof(float)), *recv = malloc(COUNT * sizeof(float));
	ncclResult_t result;

	/* A test that is killed for its time leaves nothing behind that keeps processors busy. */
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (unshare(CLONE_NEWNET) != 0) _exit(77);
	atomic_store(&shared->ready[rank], 1);
	while (!atomic_load(&shared->go)) usleep(1000);
	if (rank == 0) {
		if (ncclGetUniqueId(&shared->id) != ncclSuccess) _exit(3);
		atomic_store(&shared->has_id, 1);
	}
	while (!atomic_load(&shared->has_id)) usleep(1000);
	result = ncclCommInitRank(&comm, 2, shared->id, rank);
	/* What the larger rounds send is sent from here, and sent again from here where a path dies. */
	void *handles[2];
	if (result == ncclSuccess) result = ncclCommRegister(comm, send, COUNT * sizeof(float), &handles[0]);
	if (result == ncclSuccess) result = ncclCommRegister(comm, recv, COUNT * sizeof(float), &handles[1]);
	for (unsigned round = 0; result == ncclSuccess; round++) {
		size_t count = round % 2 ? COUNT : 16;
		/* A last round that both know of: the flag is part of the sum. */
		float stop = (float)atomic_load(&shared->stop);
		for (size_t i = 0; i < count; i++) send[i] = (float)((rank + 1) * (int)((i + round) % 1000));
		send[0] = stop;
		result = ncclAllReduce(send, recv, count, ncclFloat, ncclSum, comm, NULL);
		for (size_t i = 1; i < count && result == ncclSuccess; i++)
			if (recv[i] != (float)(3 * (int)((i + round) % 1000))) atomic_fetch_add(&shared->wrong, 1);
		if (result == ncclSuccess) atomic_fetch_add(&shared->rounds[rank], 1);
		if (result == ncclSuccess && recv[0] > 0) break;
	}
	for (int i = 0; i < 2 && result == ncclSuccess; i++) result = ncclCommDeregister(comm, handles[i]);
	keep(rank, result);
	if (result == ncclSuccess) ncclCommDestroy(comm);
	else ncclCommAbort(comm);
	_exit(0);
}

/* v0 is for start-up. With two ports one that goes down is told of; that nothing gets through is no reason there, for the machine may be busy. */
static void start(const char *devices)
{
	memset(shared, 0, sizeof(*shared));
	if (*devices == '=') unsetenv("TELPHER_IB_PATH_TIMEOUT");
	else setenv("TELPHER_IB_PATH_TIMEOUT", "60000", 1);
	setenv("NCCL_SOCKET_IFNAME", "v0", 1);
	setenv("NCCL_IB_HCA", devices, 1);
	setenv("TELPHER_VERBS_DEVICES", "2", 1);
	setenv("TELPHER_VERBS_IFNAME", "v1,v2", 1);
	setenv("TELPHER_VERBS_HIDE_REAL", "1", 1);
	setenv("TELPHER_DEVICE", "host", 1);
	setenv("NCCL_NET", "IB", 1);
	setenv("NCCL_DEBUG", "INFO", 1);
	setenv("NCCL_DEBUG_SUBSYS", "INIT,NET", 1);
	char file[64];
	snprintf(file, sizeof(file), "%s/rank.%%p", logs);
	setenv("NCCL_DEBUG_FILE", file, 1);
	for (int i = 0; i < 2; i++) {
		atomic_store(&shared->result[i], -1);
		ranks[i] = fork();
		if (ranks[i] == 0) run_rank(i);
		while (!atomic_load(&shared->ready[i])) usleep(1000);
	}
	const char *const networks[] = { "10.95.0.", "10.95.1.", "10.95.2." }, *const names[] = { "v0", "v1", "v2" };
	for (int card = 0; card < 3; card++) assert_true(namespaces_join(ranks, names[card], networks[card], NULL));
	for (int card = 0; card < 3; card++) assert_true(namespaces_await(ranks, names[card]));
	atomic_store(&shared->go, 1);
}

/* The ends of both ranks' logs, for whoever must find out from this test's output alone. */
static void print_logs(void)
{
	for (int i = 0; i < 2; i++) {
		print_message("rank %d: %u rounds, result %d %s\n", i, shared->rounds[i], shared->result[i], shared->error[i]);
		fflush(stdout);
		shell("tail -n 60 %s/rank.%d | cut -c 1-600", logs, (int)ranks[i]);
	}
}

static bool more_rounds(unsigned more)
{
	unsigned from[2] = { atomic_load(&shared->rounds[0]), atomic_load(&shared->rounds[1]) };
	double until = now() + WAIT_S;

	for (int i = 0; i < 2; i++)
		while (atomic_load(&shared->rounds[i]) - from[i] < more) {
			if (now() > until || atomic_load(&shared->result[0]) >= 0 || atomic_load(&shared->result[1]) >= 0) {
				print_logs();
				return false;
			}
			usleep(2000);
		}
	return true;
}

/* How many lines of both ranks' logs say so. */
static int count_said(const char *what)
{
	char line[2048];
	int count = 0;

	for (int i = 0; i < 2; i++) {
		snprintf(line, sizeof(line), "%s/rank.%d", logs, (int)ranks[i]);
		FILE *log = fopen(line, "r");
		while (log && fgets(line, sizeof(line), log)) count += strstr(line, what) != NULL;
		if (log) fclose(log);
	}
	return count;
}

static bool is_said(const char *what, int times)
{
	for (double until = now() + WAIT_S; count_said(what) < times; usleep(20000))
		if (now() > until || atomic_load(&shared->result[0]) >= 0 || atomic_load(&shared->result[1]) >= 0) {
			print_message("'%s' is said %d times, not %d\n", what, count_said(what), times);
			print_logs();
			return false;
		}
	return true;
}

static void port(int rank, int card, const char *state)
{
	assert_true(shell("nsenter -t %d -n ip link set v%d %s", (int)ranks[rank], card, state));
}

static bool ended(int rank)
{
	if (ranks[rank] > 0 && waitpid(ranks[rank], NULL, WNOHANG) == 0) return false;
	ranks[rank] = 0;
	return true;
}

/* Within a time in which the queue pairs themselves give up nothing, busy as the machine may be. */
static void end(void)
{
	for (double until = now() + END_S; !ended(0) | !ended(1); usleep(2000))
		if (now() > until) {
			print_logs();
			fail_msg("the ranks have not ended in %d s", END_S);
		}
}

static int kill_what_is_left(void **state)
{
	(void)state;
	for (int i = 0; i < 2; i++)
		if (ranks[i] > 0 && kill(ranks[i], SIGKILL) == 0) waitpid(ranks[i], NULL, 0);
	memset(ranks, 0, sizeof(ranks));
	return 0;
}

static void a_job_goes_on_when_one_of_two_ports_dies_and_lives_again(void **state)
{
	(void)state;
	start("telpher");
	assert_true(more_rounds(ROUNDS));
	const int ends = count_said("] via NET/IB/");
	assert_true(ends > 0);
	for (int i = 0; i < 2; i++) {
		port(i, 1 + i, "down");
		assert_true(is_said("port has gone DOWN", 2 * (i + 1)) && more_rounds(ROUNDS));
		/* A busy machine may have left other paths, and taken them back. */
		const int before = count_said("lives again");
		port(i, 1 + i, "up");
		assert_true(is_said("lives again", before + ends) && more_rounds(ROUNDS));
	}
	atomic_store(&shared->stop, 1);
	end();
	assert_int_equal(shared->result[0], ncclSuccess);
	assert_int_equal(shared->result[1], ncclSuccess);
	assert_int_equal(shared->wrong, 0);
}

static void a_job_over_a_merged_device_goes_on_when_one_of_its_ports_dies(void **state)
{
	(void)state;
	setenv("NCCL_NET_FORCE_MERGE", "telpher0,telpher1", 1);
	start("telpher");
	unsetenv("NCCL_NET_FORCE_MERGE");
	assert_true(more_rounds(ROUNDS));
	assert_true(is_said("Using [0]telpher0:1+telpher1:1/RoCE", 2));
	port(1, 2, "down");
	assert_true(is_said("port has gone DOWN", 2) && is_said("is left (", 2) && more_rounds(ROUNDS));
	port(1, 2, "up");
	assert_true(is_said("is left for telpher0:1+telpher1:1", 2) && more_rounds(ROUNDS));
	atomic_store(&shared->stop, 1);
	end();
	assert_int_equal(shared->result[0], ncclSuccess);
	assert_int_equal(shared->result[1], ncclSuccess);
	assert_int_equal(shared->wrong, 0);
}

/* The ranks have ended; both with an error that names the same things. */
static void both_say(const char *first, const char *second)
{
	end();
	for (int i = 0; i < 2; i++) {
		print_message("rank %d: %s\n", i, shared->error[i]);
		assert_true(shared->result[i] > 0);
		assert_non_null(strstr(shared->error[i], first));
		assert_non_null(strstr(shared->error[i], second));
	}
}

static void with_one_port_the_error_names_it(void **state)
{
	double since;

	(void)state;
	start("=telpher0");
	assert_true(more_rounds(ROUNDS));
	port(1, 1, "down");
	since = now();
	both_say("telpher0:1", "DOWN");
	print_message("both ended after %.1f s\n", now() - since);
	assert_int_equal(shared->wrong, 0);
}

static void a_path_that_swallows_all_is_an_error_too(void **state)
{
	double since;

	(void)state;
	start("=telpher0");
	assert_true(more_rounds(ROUNDS));
	assert_true(shell("env LD_PRELOAD= %s verbs fault -p %d dead 2>/dev/null || nsenter -t %d -n env LD_PRELOAD= %s verbs fault -p %d dead,side=both", TELPHER, (int)ranks[1], (int)ranks[1], TELPHER,
		(int)ranks[1]));
	since = now();
	both_say("telpher0:1", "nothing got through");
	print_message("both ended after %.1f s\n", now() - since);
}

static void a_killed_peer_is_named(void **state)
{
	double since;

	(void)state;
	start("telpher");
	assert_true(more_rounds(ROUNDS));
	since = now();
	kill(ranks[1], SIGKILL);
	end();
	print_message("after %.1f s: %s\n", now() - since, shared->error[0]);
	assert_int_equal(shared->result[0], ncclRemoteError);
	assert_non_null(strstr(shared->error[0], "rank 1"));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_teardown(a_job_goes_on_when_one_of_two_ports_dies_and_lives_again, kill_what_is_left),
		cmocka_unit_test_teardown(a_job_over_a_merged_device_goes_on_when_one_of_its_ports_dies, kill_what_is_left),
		cmocka_unit_test_teardown(with_one_port_the_error_names_it, kill_what_is_left),
		cmocka_unit_test_teardown(a_path_that_swallows_all_is_an_error_too, kill_what_is_left),
		cmocka_unit_test_teardown(a_killed_peer_is_named, kill_what_is_left),
	};

	if (getuid() != 0 || access(CARD_LIBRARY, R_OK) != 0 || !shell("command -v ip nsenter >/dev/null 2>&1 && unshare -n true 2>/dev/null")) {
		fprintf(stderr, "skipped: needs root, ip, nsenter, network namespaces and the software card\n");
		return 77;
	}
	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (shared == MAP_FAILED || !mkdtemp(logs)) return 1;
	int failed = cmocka_run_group_tests(tests, NULL, NULL);
	return shell("rm -rf %s", logs) ? failed : 1;
}

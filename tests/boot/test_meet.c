/* Ranks meet: as processes, as threads, on one host and on several, over IPv4 and IPv6. */
#include "helper_boot.h"

static void gather_and_leave(struct helper_job *job)
{
	struct tp_boot *boot;
	helper_open(job, &boot);
	must(boot->rank == job->rank && boot->nranks == job->nranks && boot->nhosts == job->nhosts);
	must(boot->nlocal >= 1 && boot->local_ranks[boot->local] == boot->rank);
	for (int r = 0; r < boot->nranks; r++) {
		must(boot->peers[r].rank == r && boot->peers[r].device == r);
		must(boot->peers[r].host == (int)((int64_t)r * job->nhosts / job->nranks));
	}
	must(boot->peers[boot->rank].pid == getpid());
	helper_check_gather(boot, 20, 64);
	helper_check_gather(boot, 2, TP_BOOT_GATHER_MAX);
	for (int i = 0; i < 20; i++) must(tp_boot_barrier(boot) == ncclSuccess);
	struct tp_event event;
	must(!tp_boot_first_event(boot, &event));
	tp_boot_close(boot);
}

static void processes_of_one_host_meet(void **state) { (void)state; assert_int_equal(helper_run(4, 1, gather_and_leave, NULL), 0); }
static void one_rank_is_a_communicator(void **state) { (void)state; assert_int_equal(helper_run(1, 1, gather_and_leave, NULL), 0); }
static void two_hosts_meet(void **state) { (void)state; assert_int_equal(helper_run(5, 2, gather_and_leave, NULL), 0); }
static void seven_hosts_of_one_rank_meet(void **state) { (void)state; assert_int_equal(helper_run(7, 7, gather_and_leave, NULL), 0); }
static void five_hosts_of_unequal_size_meet(void **state) { (void)state; assert_int_equal(helper_run(13, 5, gather_and_leave, NULL), 0); }

static void share_and_leave(struct helper_job *job)
{
	struct tp_boot *boot;
	helper_open(job, &boot);
	for (int k = 0; k < 3; k++) {
		_Atomic int *words;
		void *base;
		must(tp_boot_share(boot, 1 << 20, "a test's", &base) == ncclSuccess);
		words = base;
		must(atomic_load(&words[boot->local]) == 0);
		must(tp_boot_barrier(boot) == ncclSuccess);
		atomic_store(&words[boot->local], boot->rank + 1);
		must(tp_boot_barrier(boot) == ncclSuccess);
		for (int i = 0; i < boot->nlocal; i++) must(atomic_load(&words[i]) == boot->local_ranks[i] + 1);
	}
	must(tp_boot_barrier(boot) == ncclSuccess);
	tp_boot_close(boot);
}

static void ranks_of_a_host_share_memory(void **state) { (void)state; assert_int_equal(helper_run(6, 2, share_and_leave, NULL), 0); }

static void thread_body(struct tp_boot *boot, void *arg)
{
	void *base;
	(void)arg;
	must(boot->nlocal == boot->nranks);
	helper_check_gather(boot, 3, 64);
	must(tp_boot_share(boot, 4096, "a test's", &base) == ncclSuccess);
	must(tp_boot_barrier(boot) == ncclSuccess);
}
static void threads_meet(void **state) { (void)state; helper_threads(8, thread_body, NULL); }
static void two_hundred_and_fifty_six_threads_meet(void **state) { (void)state; helper_threads(256, thread_body, NULL); }

static void use_ipv6(struct helper_job *job)
{
	struct tp_boot *boot;
	setenv("NCCL_SOCKET_FAMILY", "AF_INET6", 1);
	tp_param_reload();
	helper_open(job, &boot);
	must(boot->peers[0].service.sa.sa_family == AF_INET6);
	helper_check_gather(boot, 5, 64);
	tp_boot_close(boot);
}
static void hosts_meet_over_ipv6(void **state)
{
	(void)state;
	if (access("/proc/net/if_inet6", R_OK) != 0) skip();
	assert_int_equal(helper_run(3, 3, use_ipv6, NULL), 0);
}

int main(int argc, char **argv)
{
	if (argc > 1) cmocka_set_test_filter(argv[1]);
	setenv("NCCL_SOCKET_IFNAME", "lo", 1);
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(one_rank_is_a_communicator),
		cmocka_unit_test(processes_of_one_host_meet),
		cmocka_unit_test(two_hosts_meet),
		cmocka_unit_test(seven_hosts_of_one_rank_meet),
		cmocka_unit_test(five_hosts_of_unequal_size_meet),
		cmocka_unit_test(ranks_of_a_host_share_memory),
		cmocka_unit_test(threads_meet),
		cmocka_unit_test(two_hundred_and_fifty_six_threads_meet),
		cmocka_unit_test(hosts_meet_over_ipv6),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

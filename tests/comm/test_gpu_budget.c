/* How many blocks of a GPU a communicator gets: a function of what all ranks say. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <cmocka.h>

#include "comm/gpu.h"

enum { MOST_RANKS = 16 };
static struct tp_boot_peer peers[MOST_RANKS];
static struct tp_boot boot = { .peers = peers };
static struct ncclComm comm = { .boot = &boot };
static struct tp_gpu_budget all[MOST_RANKS];

/* n ranks, gpus of them to a GPU in order, each with a process of its own or all with one. */
static void set(int n, int ranks_a_gpu, bool one_process, int resident)
{
	comm.nranks = n;
	comm.rank = 0;
	for (int r = 0; r < n; r++) {
		all[r] = (struct tp_gpu_budget){ .process = one_process ? 1 : (uint64_t)r + 1, .resident = resident, .available = resident, .least = 1, .most = 64 };
		all[r].uuid[0] = (uint8_t)(1 + r / ranks_a_gpu);
		strcpy(peers[r].host_name, "somewhere");
	}
}

static int channels(void)
{
	int nchannels = 0, sharers, in_process, first = -1;
	for (comm.rank = 0; comm.rank < comm.nranks; comm.rank++) {
		assert_int_equal(tp_gpu_budget_judge(&comm, all, &nchannels, &sharers, &in_process), ncclSuccess);
		if (first < 0) first = nchannels;
		assert_int_equal(nchannels, first);     /* all ranks find the same */
	}
	return nchannels;
}

static void a_gpu_for_each_rank_has_all_that_is_of_use(void **state)
{
	(void)state;
	set(4, 1, false, 264);
	assert_int_equal(channels(), 64);
	set(4, 1, false, 40);
	assert_int_equal(channels(), 32);
	set(4, 1, false, 20);
	assert_int_equal(channels(), 17);
}

static void a_second_communicator_fits_beside_the_first(void **state)
{
	(void)state;
	for (int resident = 2; resident <= 300; resident++) {
		int free_blocks = resident;
		for (int i = 0; i < 2; i++) {
			set(2, 1, false, resident);
			for (int r = 0; r < 2; r++) all[r].available = free_blocks;
			free_blocks -= channels();
			assert_true(free_blocks >= 0);
		}
	}
}

static void kernels_that_wait_for_each_other_fit_at_once(void **state)
{
	(void)state;
	for (int n = 1; n <= MOST_RANKS; n++) {
		for (int resident = n; resident <= 300; resident += 7) {
			set(n, n, true, resident);
			assert_true(channels() * n <= resident);
		}
	}
	set(8, 8, true, 264);
	assert_in_range(channels(), 8, 33);
}

static void processes_take_turns_on_a_gpu_but_under_mps(void **state)
{
	(void)state;
	set(4, 4, false, 264);
	assert_int_equal(channels(), 64);
	for (int r = 0; r < 4; r++) all[r].mps = 1;
	assert_int_equal(channels(), 32);
}

static void later_communicators_get_less_but_never_nothing(void **state)
{
	(void)state;
	int free_blocks = 264, promised = 0;
	for (int i = 0; i < 40; i++) {
		set(2, 1, false, 264);
		for (int r = 0; r < 2; r++) all[r].available = free_blocks;
		int got = channels();
		assert_true(got >= 1);
		if (i < 3) assert_in_range(got, 32, 64);
		free_blocks -= got;
		promised += got;
	}
	assert_true(promised <= 264 + 40);
}

/* Several processes of a device under MPS, ranks_a_process ranks in each, make one communicator after the other. */
static int promised_under_mps(int processes, int ranks_a_process, int resident, int communicators)
{
	int taken = 0;
	for (int i = 0; i < communicators; i++) {
		set(processes * ranks_a_process, MOST_RANKS, false, resident);
		for (int r = 0; r < comm.nranks; r++) {
			all[r].process = (uint64_t)(r / ranks_a_process) + 1;
			all[r].mps = 1;
			all[r].available = resident - taken / processes;
		}
		int got = channels();
		taken += got * comm.nranks;
		/* A block for each rank is promised always. */
		assert_true(got == 1 || taken <= resident);
	}
	return taken;
}

static void all_communicators_of_processes_under_mps_fit_at_once(void **state)
{
	(void)state;
	for (int processes = 1; processes <= 8; processes++)
		for (int ranks = 1; ranks <= 2; ranks++)
			for (int resident = 32; resident <= 300; resident += 4)
				promised_under_mps(processes, ranks, resident, 6);
	assert_true(promised_under_mps(8, 1, 264, 3) <= 264);
	assert_true(promised_under_mps(4, 1, 264, 4) <= 264);
}

/* A process that has made communicators without the others, and processes beside MPS, which take turns with those under it. */
static void what_one_process_has_promised_the_others_cannot_have(void **state)
{
	(void)state;
	set(4, 4, false, 264);
	for (int r = 0; r < 4; r++) all[r].mps = 1;
	all[2].available = all[3].available = 164;
	assert_int_equal(channels(), 8);
	all[2].mps = all[3].mps = 0;
	assert_int_equal(channels(), 64);
}

static void wishes_are_kept_where_the_gpu_can_hold_them(void **state)
{
	(void)state;
	set(2, 1, false, 264);
	all[1].most = 8;
	assert_int_equal(channels(), 8);
	set(2, 1, false, 264);
	for (int r = 0; r < 2; r++) all[r].available = 10, all[r].least = 48;
	assert_int_equal(channels(), 48);
	set(8, 8, true, 64);
	for (int r = 0; r < 8; r++) all[r].least = 48;
	assert_int_equal(channels(), 8);
}

static void blocking_launches_and_ranks_of_one_process_are_an_error(void **state)
{
	(void)state;
	int nchannels, sharers, in_process;
	set(2, 1, true, 264);
	comm.rank = 1;
	all[0].launch_blocking = 1;
	assert_int_equal(tp_gpu_budget_judge(&comm, all, &nchannels, &sharers, &in_process), ncclInvalidUsage);
	assert_non_null(strstr(tp_log_last_error(), "CUDA_LAUNCH_BLOCKING"));
	set(2, 1, false, 264);
	comm.rank = 1;
	all[0].launch_blocking = 1;
	assert_int_equal(tp_gpu_budget_judge(&comm, all, &nchannels, &sharers, &in_process), ncclSuccess);
}

static void sharers_are_counted(void **state)
{
	(void)state;
	int nchannels, sharers, in_process;
	set(4, 2, false, 264);
	all[1].process = all[0].process;
	comm.rank = 0;
	assert_int_equal(tp_gpu_budget_judge(&comm, all, &nchannels, &sharers, &in_process), ncclSuccess);
	assert_int_equal(sharers, 2);
	assert_int_equal(in_process, 2);
	comm.rank = 3;
	assert_int_equal(tp_gpu_budget_judge(&comm, all, &nchannels, &sharers, &in_process), ncclSuccess);
	assert_int_equal(sharers, 2);
	assert_int_equal(in_process, 1);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_gpu_for_each_rank_has_all_that_is_of_use), cmocka_unit_test(a_second_communicator_fits_beside_the_first),
		cmocka_unit_test(kernels_that_wait_for_each_other_fit_at_once),
		cmocka_unit_test(processes_take_turns_on_a_gpu_but_under_mps), cmocka_unit_test(later_communicators_get_less_but_never_nothing),
		cmocka_unit_test(all_communicators_of_processes_under_mps_fit_at_once), cmocka_unit_test(what_one_process_has_promised_the_others_cannot_have),
		cmocka_unit_test(wishes_are_kept_where_the_gpu_can_hold_them),
		cmocka_unit_test(blocking_launches_and_ranks_of_one_process_are_an_error), cmocka_unit_test(sharers_are_counted),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

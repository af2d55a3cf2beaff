/* Deaths and other events reach every rank on every host, and a departure in good order is no death. */
#include "helper_boot.h"
#include <signal.h>
#include <pthread.h>
#include <sys/syscall.h>

#define EVENT_MS 30000      /* what is promised is 3 s, on a machine that is not busy with others' work */

enum { ALIVE, DYING, SEEN };
static int victims[2], nvictims;
static bool hold_sockets;

static void die(void)
{
	if (hold_sockets) {
		/* Not fork(): a child that no handler of ours has run in, so it holds every connection open. */
		if (syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0) == 0) {
			sleep(5);
			syscall(SYS_exit_group, 0);
		}
	}
	kill(getpid(), SIGKILL);
}

/* So that the death of a rank that is done isn't another event. */
static void leave_together(struct helper_job *job, struct tp_boot *boot, int survivors)
{
	helper_add(job, SEEN);
	helper_await(job, SEEN, survivors);
	tp_boot_close(boot);
}

static void lose_ranks(struct helper_job *job)
{
	struct tp_boot *boot;
	struct tp_event event;
	helper_open(job, &boot);
	must(tp_boot_barrier(boot) == ncclSuccess);
	uint32_t alarm_before = atomic_load(boot->alarm), bell_before = atomic_load(&boot->bells[boot->local].word);
	helper_add(job, ALIVE);
	helper_await(job, ALIVE, job->nranks);
	for (int i = 0; i < nvictims; i++)
		if (victims[i] == job->rank) die();
	must(helper_event(boot, EVENT_MS, &event));
	must(event.kind == TP_EVENT_DEAD && event.result == ncclRemoteError);
	must(event.rank == victims[0] || (nvictims == 2 && event.rank == victims[1]));
	char name[32];
	snprintf(name, sizeof(name), "rank %d ", event.rank);
	must(strstr(event.text, name));
	/* The event can be seen a moment before its bells. */
	while (atomic_load(boot->alarm) == alarm_before || atomic_load(&boot->bells[boot->local].word) == bell_before) usleep(1000);
	must(tp_boot_barrier(boot) == ncclRemoteError);
	must(strstr(tp_log_last_error(), name));
	leave_together(job, boot, job->nranks - nvictims);
}

static void lose(int nranks, int nhosts, int a, int b)
{
	int expected[16] = {0};
	victims[0] = a;
	victims[1] = b;
	nvictims = b >= 0 ? 2 : 1;
	expected[a] = SIGKILL;
	if (b >= 0) expected[b] = SIGKILL;
	assert_int_equal(helper_run(nranks, nhosts, lose_ranks, expected), 0);
}

static void a_rank_that_is_killed_is_named(void **state) { (void)state; lose(4, 1, 2, -1); }
static void the_first_rank_of_a_host_that_is_killed_is_named(void **state) { (void)state; lose(4, 1, 0, -1); }
static void two_neighbours_that_die_at_once_are_found(void **state) { (void)state; lose(5, 1, 1, 2); }
static void other_hosts_learn_of_a_death(void **state) { (void)state; lose(6, 3, 5, -1); }
static void other_hosts_learn_of_a_leaders_death(void **state) { (void)state; lose(6, 3, 2, -1); }
static void the_death_of_a_hosts_only_process_is_found(void **state) { (void)state; lose(3, 3, 1, -1); }
static void the_death_of_the_root_is_found(void **state) { (void)state; lose(3, 3, 0, -1); }
static void two_hosts_that_die_at_once_are_found(void **state) { (void)state; lose(5, 5, 2, 3); }
static void a_child_that_holds_the_sockets_hides_no_death(void **state)
{
	(void)state;
	hold_sockets = true;
	lose(4, 1, 2, -1);
	lose(4, 4, 2, -1);
	hold_sockets = false;
}

static void become_another_program(struct helper_job *job)
{
	struct tp_boot *boot;
	struct tp_event event;
	helper_open(job, &boot);
	must(tp_boot_barrier(boot) == ncclSuccess);
	helper_add(job, ALIVE);
	helper_await(job, ALIVE, job->nranks);
	if (job->rank == 2) execl("/bin/sleep", "sleep", "90", (char *)NULL);
	must(helper_event(boot, EVENT_MS, &event));
	must(event.kind == TP_EVENT_DEAD && event.rank == 2);
	helper_add(job, SEEN);
	helper_await(job, SEEN, job->nranks - 1);
	if (job->rank == 0) kill(boot->peers[2].pid, SIGKILL);
	tp_boot_close(boot);
}
static void a_rank_that_becomes_another_program_is_missed(void **state)
{
	int expected[4] = { 0, 0, -1, 0 };
	(void)state;
	assert_int_equal(helper_run(4, 1, become_another_program, expected), 0);
	assert_int_equal(helper_run(4, 4, become_another_program, expected), 0);
}

static void rank_in_barrier(struct helper_job *job)
{
	struct tp_boot *boot;
	helper_open(job, &boot);
	must(tp_boot_barrier(boot) == ncclSuccess);
	helper_add(job, ALIVE);
	helper_await(job, ALIVE, job->nranks);
	if (job->rank == 1) die();
	must(tp_boot_barrier(boot) == ncclRemoteError);
	must(strstr(tp_log_last_error(), "rank 1 "));
	leave_together(job, boot, job->nranks - 1);
}
static void a_barrier_ends_when_a_rank_dies(void **state)
{
	int expected[4] = { 0, SIGKILL, 0, 0 };
	(void)state;
	assert_int_equal(helper_run(4, 1, rank_in_barrier, expected), 0);
	assert_int_equal(helper_run(4, 2, rank_in_barrier, expected), 0);
	assert_int_equal(helper_run(4, 4, rank_in_barrier, expected), 0);
}

static int life_ms;
static void leave_early(struct helper_job *job)
{
	struct tp_boot *boot;
	struct tp_event event;
	helper_open(job, &boot);
	if (job->rank == 0 || job->rank == 2) {
		tp_boot_close(boot);
		helper_add(job, ALIVE);
		return;
	}
	helper_await(job, ALIVE, 2);
	must(!helper_event(boot, life_ms * 3 / 2, &event));
	leave_together(job, boot, job->nranks - 2);
}
static void run_leavers(int nhosts)
{
	/* A wrong verdict shall come soon; but one on a process that gets no processor for so long is right. */
	static const char *const limits[] = { "400", "6000" };
	int wrong = 1;
	for (int i = 0; i < 2 && wrong; i++) {
		setenv("TELPHER_LIFE_TIMEOUT", limits[i], 1);
		life_ms = atoi(limits[i]);
		tp_param_reload();
		wrong = helper_run(4, nhosts, leave_early, NULL);
	}
	unsetenv("TELPHER_LIFE_TIMEOUT");
	tp_param_reload();
	assert_int_equal(wrong, 0);
}
static void ranks_that_left_in_good_order_are_not_dead(void **state)
{
	(void)state;
	run_leavers(1);
	run_leavers(4);
	run_leavers(2);
}

static void leave_then_die(struct helper_job *job)
{
	struct tp_boot *boot;
	struct tp_event event;
	helper_open(job, &boot);
	if (job->rank == 1) {           /* it watched rank 2, and lives on */
		tp_boot_close(boot);
		helper_put(job, ALIVE, 1);
		helper_await(job, SEEN, job->nranks - 2);
		return;
	}
	if (job->rank == 2) {
		helper_await(job, ALIVE, 1);
		die();
	}
	must(helper_event(boot, EVENT_MS, &event));
	must(event.kind == TP_EVENT_DEAD && event.rank == 2);
	leave_together(job, boot, job->nranks - 2);
}
static void a_death_is_found_though_its_watcher_has_left(void **state)
{
	int expected[6] = { 0, 0, SIGKILL, 0, 0, 0 };
	(void)state;
	assert_int_equal(helper_run(4, 1, leave_then_die, expected), 0);
	assert_int_equal(helper_run(4, 4, leave_then_die, expected), 0);
	/* Here ranks 0 and 1 are one host, 2 and 3 the other. */
	assert_int_equal(helper_run(4, 2, leave_then_die, expected), 0);
}

static void speaker_leaves_then_host_dies(struct helper_job *job)
{
	struct tp_boot *boot;
	struct tp_event event;
	helper_open(job, &boot);
	if (job->rank == 2) {           /* first of the second host */
		tp_boot_close(boot);
		helper_put(job, ALIVE, 1);
		helper_await(job, SEEN, 2);
		return;
	}
	if (job->rank == 3) {
		helper_await(job, ALIVE, 1);
		usleep(700000);         /* the other host has found a new speaker */
		die();
	}
	must(helper_event(boot, EVENT_MS, &event));
	must(event.kind == TP_EVENT_DEAD && event.rank == 3);
	leave_together(job, boot, 2);
}
static void the_next_process_speaks_for_a_host_whose_first_has_left(void **state)
{
	int expected[4] = { 0, 0, 0, SIGKILL };
	(void)state;
	assert_int_equal(helper_run(4, 2, speaker_leaves_then_host_dies, expected), 0);
}

static void hear_of_an_abort(struct helper_job *job)
{
	struct tp_boot *boot;
	struct tp_event event = { .kind = TP_EVENT_ABORTED, .rank = job->rank, .result = ncclRemoteError, .text = "rank 4 was aborted" }, seen;
	helper_open(job, &boot);
	if (job->rank == 4) {
		tp_boot_post_event(boot, &event);
		tp_boot_close(boot);    /* at once: the news must get out all the same */
		helper_await(job, SEEN, job->nranks - 1);
		return;
	}
	must(helper_event(boot, EVENT_MS, &seen));
	must(seen.kind == TP_EVENT_ABORTED && seen.rank == 4 && strcmp(seen.text, "rank 4 was aborted") == 0);
	event.kind = TP_EVENT_FAILED;
	tp_boot_post_event(boot, &event);
	must(tp_boot_first_event(boot, &seen) && seen.kind == TP_EVENT_ABORTED);
	leave_together(job, boot, job->nranks - 1);
}
static void an_abort_reaches_all_ranks_and_the_first_event_stays(void **state)
{
	(void)state;
	assert_int_equal(helper_run(7, 1, hear_of_an_abort, NULL), 0);
	assert_int_equal(helper_run(7, 7, hear_of_an_abort, NULL), 0);
	assert_int_equal(helper_run(7, 3, hear_of_an_abort, NULL), 0);
}

static void abort_and_exit(struct helper_job *job)
{
	struct tp_boot *boot;
	struct tp_event event = { .kind = TP_EVENT_ABORTED, .rank = job->rank, .result = ncclRemoteError, .text = "aborted" }, seen;
	helper_open(job, &boot);
	if (job->rank == 1) {
		tp_boot_post_event(boot, &event);
		tp_boot_close(boot);
		return;
	}
	must(helper_event(boot, EVENT_MS, &seen));
	must(seen.rank == 1);
	leave_together(job, boot, job->nranks - 1);
}
static void a_rank_that_aborts_and_exits_at_once_is_missed(void **state)
{
	(void)state;
	assert_int_equal(helper_run(4, 4, abort_and_exit, NULL), 0);
	assert_int_equal(helper_run(4, 2, abort_and_exit, NULL), 0);
}

struct thread_rank { struct helper_job *job; int rank; };
static void *thread_of_rank(void *arg)
{
	struct thread_rank *t = arg;
	struct tp_boot *boot;
	struct tp_event event;
	must(helper_try_open(t->job, t->rank, 4, 30000, &boot) == ncclSuccess);
	helper_add(t->job, ALIVE);
	helper_await(t->job, ALIVE, 4);
	if (t->rank == 2) kill(getpid(), SIGKILL);
	must(helper_event(boot, EVENT_MS, &event));
	must(event.kind == TP_EVENT_DEAD && event.rank == 2);
	leave_together(t->job, boot, 2);
	return NULL;
}
static void two_ranks_a_process(struct helper_job *job)
{
	pthread_t threads[2];
	struct thread_rank args[2] = { { job, 2 * job->rank }, { job, 2 * job->rank + 1 } };
	for (int i = 0; i < 2; i++) must(pthread_create(&threads[i], NULL, thread_of_rank, &args[i]) == 0);
	for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
}
static void a_process_of_several_ranks_dies_as_its_lowest(void **state)
{
	int expected[2] = { 0, SIGKILL };
	(void)state;
	assert_int_equal(helper_run(2, 1, two_ranks_a_process, expected), 0);
	assert_int_equal(helper_run(2, 2, two_ranks_a_process, expected), 0);
}

int main(int argc, char **argv)
{
	if (argc > 1) cmocka_set_test_filter(argv[1]);
	setenv("NCCL_SOCKET_IFNAME", "lo", 1);
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_rank_that_is_killed_is_named),
		cmocka_unit_test(the_first_rank_of_a_host_that_is_killed_is_named),
		cmocka_unit_test(two_neighbours_that_die_at_once_are_found),
		cmocka_unit_test(other_hosts_learn_of_a_death),
		cmocka_unit_test(other_hosts_learn_of_a_leaders_death),
		cmocka_unit_test(the_death_of_a_hosts_only_process_is_found),
		cmocka_unit_test(the_death_of_the_root_is_found),
		cmocka_unit_test(two_hosts_that_die_at_once_are_found),
		cmocka_unit_test(a_child_that_holds_the_sockets_hides_no_death),
		cmocka_unit_test(a_rank_that_becomes_another_program_is_missed),
		cmocka_unit_test(a_barrier_ends_when_a_rank_dies),
		cmocka_unit_test(ranks_that_left_in_good_order_are_not_dead),
		cmocka_unit_test(a_death_is_found_though_its_watcher_has_left),
		cmocka_unit_test(the_next_process_speaks_for_a_host_whose_first_has_left),
		cmocka_unit_test(an_abort_reaches_all_ranks_and_the_first_event_stays),
		cmocka_unit_test(a_rank_that_aborts_and_exits_at_once_is_missed),
		cmocka_unit_test(a_process_of_several_ranks_dies_as_its_lowest),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Who runs what, and that waiting neither misses a ring nor burns a processor. */
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

#include "engine/engine.h"
#include "sanitizers.h"

/* Counts down what others put into `work`. */
struct job {
	struct tp_runnable runnable;
	struct tp_bell bell;
	_Atomic int work, done, stalls, looks;
	_Atomic uint64_t runner;
	int fds[2];
};

static enum tp_run run_job(struct tp_runnable *self)
{
	struct job *job = (struct job *)self;
	atomic_store(&job->runner, (uint64_t)pthread_self());
	atomic_fetch_add(&job->looks, 1);
	int left = atomic_load(&job->work);
	if (left <= 0) return atomic_load(&job->done) ? TP_RUN_IDLE : TP_RUN_WAITING;
	atomic_fetch_sub(&job->work, 1);
	atomic_fetch_add(&job->done, 1);
	return TP_RUN_MOVED;
}

static void count_stall(struct tp_runnable *self, uint64_t waited_ms)
{
	if (waited_ms >= 200) atomic_fetch_add(&((struct job *)self)->stalls, 1);
}

static void make_job(struct job *job, int work)
{
	memset(job, 0, sizeof(*job));
	job->runnable = (struct tp_runnable){ .run = run_job, .bell = &job->bell, .stalled = count_stall };
	atomic_store(&job->work, work);
}

static bool has_done_five(void *arg) { return atomic_load(&((struct job *)arg)->done) >= 5; }

static void a_waiting_caller_runs_the_work_itself(void **state)
{
	(void)state;
	struct job job;
	make_job(&job, 5);
	tp_engine_wait((struct tp_runnable *const[]){ &job.runnable }, 1, has_done_five, &job);
	assert_int_equal(atomic_load(&job.done), 5);
	assert_true(atomic_load(&job.runner) == (uint64_t)pthread_self());
}

static void the_run_lock_excludes(void **state)
{
	(void)state;
	struct job job;
	make_job(&job, 0);
	assert_true(tp_engine_try_lock(&job.runnable));
	assert_false(tp_engine_try_lock(&job.runnable));
	tp_engine_unlock(&job.runnable);
	assert_true(tp_engine_try_lock(&job.runnable));
	tp_engine_unlock(&job.runnable);
}

static void *feed_slowly(void *arg)
{
	struct job *job = arg;
	for (int i = 0; i < 5; i++) {
		usleep(60000);
		atomic_fetch_add(&job->work, 1);
		tp_bell_ring(&job->bell);
	}
	return NULL;
}

static void a_sleeping_caller_is_woken_by_the_bell(void **state)
{
	(void)state;
	struct job job;
	pthread_t thread;
	make_job(&job, 0);
	tp_engine_prepare();
	pthread_create(&thread, NULL, feed_slowly, &job);
	tp_engine_wait((struct tp_runnable *const[]){ &job.runnable }, 1, has_done_five, &job);
	pthread_join(thread, NULL);
	assert_int_equal(atomic_load(&job.done), 5);
	assert_int_equal(atomic_load(&job.bell.sleeping), 0);
}

static void a_set_of_several_is_woken_by_any_of_its_bells(void **state)
{
	(void)state;
	struct job jobs[3];
	pthread_t thread;
	for (int i = 0; i < 3; i++) make_job(&jobs[i], 0);
	pthread_create(&thread, NULL, feed_slowly, &jobs[2]);
	tp_engine_wait((struct tp_runnable *const[]){ &jobs[0].runnable, &jobs[1].runnable, &jobs[2].runnable }, 3, has_done_five, &jobs[2]);
	pthread_join(thread, NULL);
	assert_int_equal(atomic_load(&jobs[2].done), 5);
}

static int give_fd(struct tp_runnable *self, int *fds, uint32_t *events, int max)
{
	if (max < 1) return 0;
	fds[0] = ((struct job *)self)->fds[0];
	events[0] = 1;
	return 1;
}

static void make_job_of_pipe(struct job *job)
{
	make_job(job, 0);
	assert_int_equal(pipe(job->fds), 0);
	job->runnable.poll_fds = give_fd;
}

static void a_caller_that_sleeps_on_descriptors_still_hears_the_bell(void **state)
{
	(void)state;
	struct job job;
	pthread_t thread;
	make_job_of_pipe(&job);
	pthread_create(&thread, NULL, feed_slowly, &job);
	tp_engine_wait((struct tp_runnable *const[]){ &job.runnable }, 1, has_done_five, &job);
	pthread_join(thread, NULL);
	close(job.fds[0]);
	close(job.fds[1]);
	assert_int_equal(atomic_load(&job.done), 5);
}

static void *write_slowly(void *arg)
{
	struct job *job = arg;
	for (int i = 0; i < 5; i++) {
		usleep(20000);
		atomic_fetch_add(&job->work, 1);
		if (write(job->fds[1], "", 1) != 1) abort();
	}
	return NULL;
}

struct until { struct job *job; int wanted; };
static bool has_done_more(void *arg)
{
	struct until *until = arg;
	return atomic_load(&until->job->done) >= until->wanted;
}

static void who_waits_patiently_looks_when_it_comes_and_hardly_before(void **state)
{
	(void)state;
	struct job job;
	pthread_t thread;
	make_job_of_pipe(&job);
	atomic_store(&job.runnable.patient, 1);
	pthread_create(&thread, NULL, write_slowly, &job);
	char byte[5];
	for (int i = 0; i < 5; i++) {
		struct until until = { &job, i + 1 };
		tp_engine_wait((struct tp_runnable *const[]){ &job.runnable }, 1, has_done_more, &until);
		assert_int_equal(read(job.fds[0], byte, 1), 1);
	}
	pthread_join(thread, NULL);
	close(job.fds[0]);
	close(job.fds[1]);
	assert_int_equal(atomic_load(&job.done), 5);
	/* Two looks for each 5 ms of sleep; half a millisecond of yielding alone has hundreds. */
	assert_true(atomic_load(&job.looks) < 150);
}

static bool has_stalled_twice(void *arg) { return atomic_load(&((struct job *)arg)->stalls) >= 2; }

static void a_long_wait_reports_stalls_and_hardly_uses_the_processor(void **state)
{
	(void)state;
	struct job job;
	struct rusage before, after;
	make_job(&job, 0);
	getrusage(RUSAGE_THREAD, &before);
	tp_engine_wait((struct tp_runnable *const[]){ &job.runnable }, 1, has_stalled_twice, &job);
	getrusage(RUSAGE_THREAD, &after);
	/* 400 ms at 50 ms a sleep: some 8 wake-ups, or fewer on a busy machine, where a loop that doesn't sleep has none or a great many. */
	long switches = after.ru_nvcsw - before.ru_nvcsw;
	assert_true(switches >= 1 && switches < 400);
}

/* Such a turn costs what a few system calls do. One of shared memory costs a thousandth. */
static void who_waits_by_turns_that_cost_much_does_not_spin_thousands_of_them(void **state)
{
	(void)state;
	struct tp_wait wait;
	int turns = 0;
	tp_wait_begin(&wait, false);
	while (tp_wait_turn(&wait)) {
		uint64_t since = tp_clock_ns();
		while (tp_clock_ns() - since < 20000) tp_clock_relax();
		turns++;
	}
	assert_in_range(turns, 2, 500);
}

static void the_engine_thread_runs_what_is_submitted_until_it_is_idle(void **state)
{
	(void)state;
	struct job job;
	make_job(&job, 5);
	assert_int_equal(tp_engine_submit(&job.runnable), ncclSuccess);
	while (atomic_load(&job.done) < 5 || atomic_load(&job.runnable.queued)) usleep(1000);
	assert_true(atomic_load(&job.runner) != (uint64_t)pthread_self());
	atomic_store(&job.work, 3);
	assert_int_equal(tp_engine_submit(&job.runnable), ncclSuccess);
	while (atomic_load(&job.done) < 8) usleep(1000);
	tp_engine_forget(&job.runnable);
}

static void many_submits_from_many_threads_lose_nothing(void **state)
{
	(void)state;
	enum { JOBS = 150, TURNS = 20 };
	static struct job jobs[JOBS];
	for (int i = 0; i < JOBS; i++) make_job(&jobs[i], 0);
	for (int t = 0; t < TURNS; t++) {
		for (int i = 0; i < JOBS; i++) {
			atomic_fetch_add(&jobs[i].work, 1);
			assert_int_equal(tp_engine_submit(&jobs[i].runnable), ncclSuccess);
		}
	}
	for (int i = 0; i < JOBS; i++)
		while (atomic_load(&jobs[i].done) < TURNS) usleep(1000);
	for (int i = 0; i < JOBS; i++) tp_engine_forget(&jobs[i].runnable);
}

static void what_was_forgotten_is_not_run_again(void **state)
{
	(void)state;
	struct job *job = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	make_job(job, 0);
	assert_int_equal(tp_engine_submit(&job->runnable), ncclSuccess);
	usleep(20000);
	tp_engine_forget(&job->runnable);
	assert_int_equal(munmap(job, 4096), 0);
	usleep(20000);
}

static void a_forked_child_has_an_engine_of_its_own(void **state)
{
	(void)state;
	if (SANITIZED) skip();
	struct job job;
	make_job(&job, 1);
	assert_int_equal(tp_engine_submit(&job.runnable), ncclSuccess);
	while (atomic_load(&job.done) < 1 || atomic_load(&job.runnable.queued)) usleep(1000);
	pid_t pid = fork();
	if (!pid) {
		struct job own;
		alarm(60);
		make_job(&own, 5);
		if (tp_engine_submit(&own.runnable) != ncclSuccess) _exit(1);
		while (atomic_load(&own.done) < 5) usleep(1000);
		tp_engine_forget(&own.runnable);
		_exit(0);
	}
	int status;
	waitpid(pid, &status, 0);
	assert_int_equal(status, 0);
	tp_engine_forget(&job.runnable);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_waiting_caller_runs_the_work_itself),
		cmocka_unit_test(the_run_lock_excludes),
		cmocka_unit_test(a_sleeping_caller_is_woken_by_the_bell),
		cmocka_unit_test(a_set_of_several_is_woken_by_any_of_its_bells),
		cmocka_unit_test(a_caller_that_sleeps_on_descriptors_still_hears_the_bell),
		cmocka_unit_test(who_waits_patiently_looks_when_it_comes_and_hardly_before),
		cmocka_unit_test(a_long_wait_reports_stalls_and_hardly_uses_the_processor),
		cmocka_unit_test(who_waits_by_turns_that_cost_much_does_not_spin_thousands_of_them),
		cmocka_unit_test(the_engine_thread_runs_what_is_submitted_until_it_is_idle),
		cmocka_unit_test(many_submits_from_many_threads_lose_nothing),
		cmocka_unit_test(what_was_forgotten_is_not_run_again),
		cmocka_unit_test(a_forked_child_has_an_engine_of_its_own),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

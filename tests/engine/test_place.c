/* Where the engine thread runs, and what is said when it doesn't get to. */
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

#include "engine/internal.h"

static _Atomic int warnings, infos;
static char last_line[2048];
static pthread_mutex_t line_lock = PTHREAD_MUTEX_INITIALIZER;

static void sink(enum tp_log_level level, uint32_t subsys, const char *file, int line, const char *text)
{
	(void)subsys, (void)file, (void)line;
	pthread_mutex_lock(&line_lock);
	snprintf(last_line, sizeof(last_line), "%s", text);
	pthread_mutex_unlock(&line_lock);
	atomic_fetch_add(level == TP_LOG_WARN ? &warnings : &infos, 1);
}

struct job {
	struct tp_runnable runnable;
	struct tp_bell bell;
	_Atomic int stop, runs;
	_Atomic bool crowded;
	cpu_set_t seen;             /* written by the first run, read when runs > 0 */
};

static enum tp_run look_where(struct tp_runnable *self)
{
	struct job *job = (struct job *)self;
	if (!atomic_load(&job->runs)) sched_getaffinity(0, sizeof(job->seen), &job->seen);
	atomic_fetch_add(&job->runs, 1);
	return TP_RUN_IDLE;
}

/* Where the engine thread is now. */
static void find_engine(uint64_t mask[TP_CPU_WORDS])
{
	struct job job = { .runnable = { .run = look_where, .bell = &job.bell } };
	assert_int_equal(tp_engine_submit(&job.runnable), ncclSuccess);
	while (!atomic_load(&job.runs)) usleep(1000);
	tp_engine_forget(&job.runnable);
	memset(mask, 0, TP_CPU_WORDS * sizeof(*mask));
	memcpy(mask, &job.seen, sizeof(job.seen));
}

static void set_of(uint64_t mask[TP_CPU_WORDS], int cpu)
{
	memset(mask, 0, TP_CPU_WORDS * sizeof(*mask));
	mask[cpu / 64] |= UINT64_C(1) << (cpu % 64);
}

static int nth_cpu(int n)
{
	uint64_t own[TP_CPU_WORDS];
	tp_cpu_mask(own);
	for (int cpu = 0; cpu < TP_CPU_WORDS * 64; cpu++)
		if (own[cpu / 64] >> (cpu % 64) & 1 && n-- == 0) return cpu;
	return -1;
}

/* One process a case: a process has one engine thread, and what it was told stays. */
static void in_child(void (*body)(void))
{
	pid_t pid = fork();
	if (!pid) {
		alarm(120);
		tp_log_divert(sink);
		body();
		_exit(0);
	}
	int status;
	waitpid(pid, &status, 0);
	assert_int_equal(status, 0);
}

#define demand(what) do { if (!(what)) { fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what); _exit(1); } } while (0)

static void start_by_a_device(void)
{
	uint64_t near[TP_CPU_WORDS], at[TP_CPU_WORDS];
	set_of(near, nth_cpu(1));
	tp_engine_sit_by("NIC mlx5_0", near);
	find_engine(at);
	demand(memcmp(at, near, sizeof(at)) == 0);
}

static void it_starts_by_its_device(void **state)
{
	(void)state;
	if (nth_cpu(1) < 0) skip();
	in_child(start_by_a_device);
}

static void move_to_a_device(void)
{
	uint64_t near[2][TP_CPU_WORDS], at[TP_CPU_WORDS], own[TP_CPU_WORDS];
	tp_cpu_mask(own);
	find_engine(at);
	demand(memcmp(at, own, sizeof(at)) == 0);
	for (int i = 0; i < 2; i++) {
		set_of(near[i], nth_cpu(i));
		tp_engine_sit_by(i ? "NIC mlx5_1" : "NIC mlx5_0", near[i]);
	}
	find_engine(at);
	for (int w = 0; w < TP_CPU_WORDS; w++) demand(at[w] == (near[0][w] | near[1][w]));
}

static void it_moves_to_devices_that_are_named_later_and_serves_all_of_them(void **state)
{
	(void)state;
	if (nth_cpu(1) < 0) skip();
	in_child(move_to_a_device);
}

static void stay_with_the_job(void)
{
	uint64_t near[TP_CPU_WORDS], at[TP_CPU_WORDS], own[TP_CPU_WORDS];
	cpu_set_t set;
	CPU_ZERO(&set);
	CPU_SET(nth_cpu(0), &set);
	set_of(near, nth_cpu(1));
	sched_setaffinity(0, sizeof(set), &set);
	tp_cpu_mask(own);
	tp_engine_sit_by("NIC mlx5_0", near);
	find_engine(at);
	demand(memcmp(at, getenv("NCCL_IGNORE_CPU_AFFINITY") ? near : own, sizeof(at)) == 0);
}

static void it_stays_within_the_processors_of_its_job(void **state)
{
	(void)state;
	if (nth_cpu(1) < 0) skip();
	in_child(stay_with_the_job);
}

static void it_leaves_them_where_the_job_s_are_to_be_ignored(void **state)
{
	(void)state;
	if (nth_cpu(1) < 0) skip();
	setenv("NCCL_IGNORE_CPU_AFFINITY", "1", 1);
	tp_param_reload();
	in_child(stay_with_the_job);
	unsetenv("NCCL_IGNORE_CPU_AFFINITY");
	tp_param_reload();
}

static void obey_the_cpuset(void)
{
	uint64_t near[TP_CPU_WORDS], at[TP_CPU_WORDS], wanted[TP_CPU_WORDS];
	set_of(near, nth_cpu(0));
	tp_cpu_list_read(getenv("NCCL_PROXY_CPUSET"), wanted);
	tp_engine_sit_by("NIC mlx5_0", near);
	find_engine(at);
	demand(memcmp(at, wanted, sizeof(at)) == 0);
	demand(strstr(last_line, "NCCL_PROXY_CPUSET"));
}

static void it_runs_where_the_user_says(void **state)
{
	char text[32];
	(void)state;
	if (nth_cpu(1) < 0) skip();
	snprintf(text, sizeof(text), "%d", nth_cpu(1));
	setenv("NCCL_PROXY_CPUSET", text, 1);
	tp_param_reload();
	in_child(obey_the_cpuset);
	unsetenv("NCCL_PROXY_CPUSET");
	tp_param_reload();
}

static void run_all_the_same(void)
{
	uint64_t at[TP_CPU_WORDS], own[TP_CPU_WORDS];
	tp_cpu_mask(own);
	find_engine(at);
	demand(memcmp(at, own, sizeof(at)) == 0);
	demand(atomic_load(&warnings) == 1 && strstr(last_line, "NCCL_PROXY_CPUSET"));
	find_engine(at);
	demand(atomic_load(&warnings) == 1);
}

static void a_set_that_is_none_or_not_there_is_a_warning(void **state)
{
	(void)state;
	static const char *const sets[] = { "2,fast", "3-1", "1020-1023" };
	if (nth_cpu(1000) >= 0) skip();
	for (size_t i = 0; i < TP_ARRAY_LEN(sets); i++) {
		setenv("NCCL_PROXY_CPUSET", sets[i], 1);
		tp_param_reload();
		in_child(run_all_the_same);
	}
	unsetenv("NCCL_PROXY_CPUSET");
	tp_param_reload();
}

static void lost_time_is_judged(void **state)
{
	(void)state;
	const uint64_t ms = 1000000;
	struct tp_delay_window w = { .wall_ns = 500 * ms, .measured_ns = 200 * ms, .lost_ns = 100 * ms, .queue_ns = 90 * ms, .idle_ns = 600 * ms };
	assert_int_equal(tp_delay_judge(&w), TP_DELAY_MISPLACED);
	struct tp_delay_window full = w, ranks = w, sleepy = w, little = w, rare = w;
	full.idle_ns = 300 * ms;
	assert_int_equal(tp_delay_judge(&full), TP_DELAY_FULL);
	ranks.crowded = true;
	assert_int_equal(tp_delay_judge(&ranks), TP_DELAY_FULL);
	sleepy.queue_ns = 2 * ms;       /* it waited for something else */
	assert_int_equal(tp_delay_judge(&sleepy), TP_DELAY_NONE);
	little.lost_ns = 20 * ms;
	assert_int_equal(tp_delay_judge(&little), TP_DELAY_NONE);
	rare.measured_ns = 20 * ms;
	rare.lost_ns = 20 * ms;
	assert_int_equal(tp_delay_judge(&rare), TP_DELAY_NONE);
}

/* 100 us of work. */
static enum tp_run work(struct tp_runnable *self)
{
	struct job *job = (struct job *)self;
	uint64_t until = tp_clock_ns() + 100000;
	while (tp_clock_ns() < until) {}
	atomic_fetch_add(&job->runs, 1);
	return atomic_load(&job->stop) ? TP_RUN_IDLE : TP_RUN_MOVED;
}

static void *spin_beside_it(void *arg)
{
	struct job *job = arg;
	cpu_set_t set;
	CPU_ZERO(&set);
	CPU_SET(nth_cpu(0), &set);
	pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
	while (!atomic_load(&job->stop)) {}
	return NULL;
}

static void be_pushed_aside(void)
{
	static struct job job = { .runnable = { .run = work, .bell = &job.bell, .crowded = true } };
	uint64_t near[TP_CPU_WORDS];
	pthread_t others[3];
	set_of(near, nth_cpu(0));
	tp_engine_sit_by("NIC mlx5_0", near);
	for (int i = 0; i < 3; i++) demand(pthread_create(&others[i], NULL, spin_beside_it, &job) == 0);
	int before = atomic_load(&infos);
	demand(tp_engine_submit(&job.runnable) == ncclSuccess);
	for (;;) {
		pthread_mutex_lock(&line_lock);
		bool told = strstr(last_line, "got no processor for") && strstr(last_line, "by NIC mlx5_0");
		pthread_mutex_unlock(&line_lock);
		if (told) break;
		usleep(10000);
	}
	atomic_store(&job.stop, 1);
	for (int i = 0; i < 3; i++) pthread_join(others[i], NULL);
	demand(atomic_load(&infos) > before && atomic_load(&warnings) == 0);
}

static void a_thread_that_is_pushed_aside_is_told_of(void **state)
{
	(void)state;
	if (access("/proc/thread-self/schedstat", R_OK) != 0) skip();
	in_child(be_pushed_aside);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(it_starts_by_its_device),
		cmocka_unit_test(it_moves_to_devices_that_are_named_later_and_serves_all_of_them),
		cmocka_unit_test(it_stays_within_the_processors_of_its_job),
		cmocka_unit_test(it_leaves_them_where_the_job_s_are_to_be_ignored),
		cmocka_unit_test(it_runs_where_the_user_says),
		cmocka_unit_test(a_set_that_is_none_or_not_there_is_a_warning),
		cmocka_unit_test(lost_time_is_judged),
		cmocka_unit_test(a_thread_that_is_pushed_aside_is_told_of),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>
#include "base/helper_base.h"

static int clean(void **s)
{
	(void)s;
	test_clean_environment();
	return 0;
}

static void a_segment_is_zeros_and_one_address_in_a_process(void **s)
{
	(void)s;
	int fd, again;
	unsigned char *a, *b;
	assert_int_equal(tp_shm_create("test", 100000, &fd), ncclSuccess);
	again = dup(fd);
	assert_int_equal(tp_shm_map(fd, 100000, (void **)&a), ncclSuccess);
	assert_int_equal(tp_shm_map(again, 1, (void **)&b), ncclSuccess);
	assert_ptr_equal(a, b);
	for (int i = 0; i < 100000; i++)
		assert_int_equal(a[i], 0);
	a[99999] = 7;
	tp_shm_unmap(a);
	assert_int_equal(b[99999], 7);
	tp_shm_unmap(b);
	/* The last reference is gone, and the descriptor still holds the segment. */
	assert_int_equal(tp_shm_map(fd, 100000, (void **)&a), ncclSuccess);
	assert_int_equal(a[99999], 7);
	tp_shm_unmap(a);
	close(fd);
	close(again);
}

static void two_segments_are_two(void **s)
{
	(void)s;
	int fds[2];
	void *a, *b;
	for (int i = 0; i < 2; i++)
		assert_int_equal(tp_shm_create("test", 4096, &fds[i]), ncclSuccess);
	assert_int_equal(tp_shm_map(fds[0], 4096, &a), ncclSuccess);
	assert_int_equal(tp_shm_map(fds[1], 4096, &b), ncclSuccess);
	assert_ptr_not_equal(a, b);
	tp_shm_unmap(a);
	tp_shm_unmap(b);
	close(fds[0]);
	close(fds[1]);
}

static void processes_share_a_segment(void **s)
{
	(void)s;
	int fd;
	_Atomic uint32_t *words;
	assert_int_equal(tp_shm_create("test", 4096, &fd), ncclSuccess);
	assert_int_equal(tp_shm_map(fd, 4096, (void **)&words), ncclSuccess);
	pid_t child = fork();
	if (child == 0) {
		atomic_store(&words[1], 42);
		_exit(0);
	}
	waitpid(child, NULL, 0);
	assert_int_equal(atomic_load(&words[1]), 42);
	tp_shm_unmap((void *)words);
	close(fd);
}

static void what_could_shrink_or_is_too_small_is_refused(void **s)
{
	(void)s;
	void *base = NULL;
	int plain = memfd_create("plain", MFD_CLOEXEC | MFD_ALLOW_SEALING), pipes[2], fd;
	assert_int_equal(ftruncate(plain, 4096), 0);
	assert_int_equal(pipe(pipes), 0);
	assert_int_equal(tp_shm_create("test", 4096, &fd), ncclSuccess);
	assert_int_equal(tp_shm_map(plain, 4096, &base), ncclInvalidArgument);
	assert_int_equal(tp_shm_map(pipes[0], 4096, &base), ncclInvalidArgument);
	assert_int_equal(tp_shm_map(fd, 4097, &base), ncclInvalidArgument);
	assert_non_null(strstr(tp_log_last_error(), "has 4096 bytes, expected at least 4097"));
	assert_int_equal(tp_shm_map(fd, 0, &base), ncclInvalidArgument);
	assert_int_equal(tp_shm_map(-1, 4096, &base), ncclSystemError);
	assert_null(base);
	close(plain);
	close(pipes[0]);
	close(pipes[1]);
	close(fd);
}

static void a_segment_cannot_be_shrunk_or_grown(void **s)
{
	(void)s;
	int fd;
	assert_int_equal(tp_shm_create("test", 8192, &fd), ncclSuccess);
	assert_int_equal(ftruncate(fd, 0), -1);
	assert_int_equal(ftruncate(fd, 1 << 20), -1);
	assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), -1);
	assert_true(fcntl(fd, F_GETFD) & FD_CLOEXEC);
	close(fd);
}

static void sizes_that_cannot_be_are_errors(void **s)
{
	(void)s;
	int fd = -7;
	assert_int_equal(tp_shm_create("test", 0, &fd), ncclInvalidArgument);
	assert_int_equal(tp_shm_create("test", SIZE_MAX, &fd), ncclInvalidArgument);
	assert_int_equal(fd, -7);
}

static void an_enormous_segment_costs_nothing_until_touched_and_may_fail_to_map(void **s)
{
	(void)s;
	int fd = -1;
	unsigned char *base;
	assert_int_equal(tp_shm_create("test", (size_t)64 << 30, &fd), ncclSuccess);
	if (tp_shm_map(fd, 1, (void **)&base) == ncclSuccess) {
		base[((size_t)64 << 30) - 1] = 1;
		tp_shm_unmap(base);
	} else {
		assert_non_null(strstr(tp_log_last_error(), "can't map a shared segment"));
	}
	close(fd);
}

static void no_descriptor_left_is_a_clear_error(void **s)
{
	(void)s;
	struct rlimit limit, none;
	int fd = -7;
	getrlimit(RLIMIT_NOFILE, &limit);
	none = (struct rlimit){ 3, limit.rlim_max };
	setrlimit(RLIMIT_NOFILE, &none);
	ncclResult_t result = tp_shm_create("test", 4096, &fd);
	setrlimit(RLIMIT_NOFILE, &limit);
	assert_int_equal(result, ncclSystemError);
	assert_non_null(strstr(tp_log_last_error(), "ulimit -n"));
}

static void unmapping_what_is_not_mapped_is_a_warning_not_a_crash(void **s)
{
	(void)s;
	int local;
	tp_shm_unmap(NULL);
	tp_shm_unmap(&local);
	assert_non_null(strstr(tp_log_last_error(), "nothing is mapped"));
}

static void *map_and_unmap(void *arg)
{
	for (int i = 0; i < 300; i++) {
		_Atomic uint32_t *base;
		if (tp_shm_map(*(int *)arg, 4096, (void **)&base) != ncclSuccess)
			return arg;
		atomic_fetch_add(base, 1);
		tp_shm_unmap((void *)base);
	}
	return NULL;
}

static void threads_may_map_and_unmap_at_once(void **s)
{
	(void)s;
	int fd;
	pthread_t threads[4];
	_Atomic uint32_t *base;
	assert_int_equal(tp_shm_create("test", 4096, &fd), ncclSuccess);
	for (int i = 0; i < 4; i++)
		pthread_create(&threads[i], NULL, map_and_unmap, &fd);
	for (int i = 0; i < 4; i++) {
		void *failed;
		pthread_join(threads[i], &failed);
		assert_null(failed);
	}
	assert_int_equal(tp_shm_map(fd, 4096, (void **)&base), ncclSuccess);
	assert_int_equal(atomic_load(base), 1200);
	tp_shm_unmap((void *)base);
	close(fd);
}

static void a_futex_wait_ends_with_time_or_at_once_where_the_word_differs(void **s)
{
	(void)s;
	_Atomic uint32_t word = 5;
	uint64_t start = tp_clock_ns();
	assert_false(tp_futex_wait(&word, 5, 2000));
	assert_true(tp_clock_ns() - start >= 2000000);
	assert_true(tp_futex_wait(&word, 4, 0));
}

struct waker { _Atomic uint32_t *word; };

static void *change_and_wake(void *arg)
{
	struct waker *w = arg;
	usleep(5000);
	atomic_fetch_add_explicit(w->word, 1, memory_order_release);
	tp_futex_wake(w->word, INT_MAX);
	return NULL;
}

static void a_futex_wakes_a_thread(void **s)
{
	(void)s;
	_Atomic uint32_t word = 0;
	struct waker w = { &word };
	pthread_t thread;
	pthread_create(&thread, NULL, change_and_wake, &w);
	while (atomic_load(&word) == 0)
		assert_true(tp_futex_wait(&word, 0, 0));
	pthread_join(thread, NULL);
}

static void a_futex_wakes_another_process(void **s)
{
	(void)s;
	int fd, status;
	_Atomic uint32_t *words;
	assert_int_equal(tp_shm_create("test", 4096, &fd), ncclSuccess);
	assert_int_equal(tp_shm_map(fd, 4096, (void **)&words), ncclSuccess);
	pid_t child = fork();
	if (child == 0) {
		while (atomic_load(&words[0]) == 0)
			tp_futex_wait(&words[0], 0, 0);
		_exit(3);
	}
	usleep(5000);
	atomic_store(&words[0], 1);
	tp_futex_wake(&words[0], 1);
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_int_equal(WEXITSTATUS(status), 3);
	tp_shm_unmap((void *)words);
	close(fd);
}

static void any_of_several_futexes_wakes(void **s)
{
	(void)s;
	_Atomic uint32_t words[200];
	_Atomic uint32_t *list[200];
	uint32_t seen[200] = { 0 };
	/* 1 is a plain wait, 128 the most the kernel takes at once, beyond that naps. */
	static const int counts[] = { 1, 2, 128, 129, 200 };
	for (size_t c = 0; c < TP_ARRAY_LEN(counts); c++) {
		for (int i = 0; i < 200; i++) {
			atomic_store(&words[i], 0);
			list[i] = &words[i];
		}
		struct waker w = { &words[counts[c] - 1] };
		pthread_t thread;
		pthread_create(&thread, NULL, change_and_wake, &w);
		while (atomic_load(w.word) == 0)
			assert_true(tp_futex_wait_any(list, seen, counts[c], 0));
		pthread_join(thread, NULL);
		assert_true(tp_futex_wait_any(list, seen, counts[c], 0));
		atomic_store(w.word, 0);
		/* A nap may end without news: who waits on asks for the rest of the time, and that comes to its end. */
		uint64_t now = tp_clock_ns(), deadline = now + 3000000;
		while (now < deadline && tp_futex_wait_any(list, seen, counts[c], (deadline - now) / 1000 + 1))
			now = tp_clock_ns();
		assert_false(tp_futex_wait_any(list, seen, counts[c], 1));
	}
}

static void on_alarm(int number) { (void)number; }

static void signals_do_not_prolong_a_wait(void **s)
{
	(void)s;
	struct sigaction action = { .sa_handler = on_alarm }, before;
	struct itimerval often = { { 0, 500 }, { 0, 500 } }, never = { 0 };
	_Atomic uint32_t words[2] = { 0, 0 };
	_Atomic uint32_t *list[2] = { &words[0], &words[1] };
	uint32_t seen[2] = { 0, 0 };
	sigaction(SIGALRM, &action, &before);
	setitimer(ITIMER_REAL, &often, NULL);
	uint64_t start = tp_clock_ns();
	bool one = tp_futex_wait(&words[0], 0, 20000), any = tp_futex_wait_any(list, seen, 2, 20000);
	uint64_t took = tp_clock_ns() - start;
	setitimer(ITIMER_REAL, &never, NULL);
	sigaction(SIGALRM, &before, NULL);
	assert_false(one);
	assert_false(any);
	assert_true(took >= 40000000);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup(a_segment_is_zeros_and_one_address_in_a_process, clean),
		cmocka_unit_test_setup(two_segments_are_two, clean),
		cmocka_unit_test_setup(processes_share_a_segment, clean),
		cmocka_unit_test_setup(what_could_shrink_or_is_too_small_is_refused, clean),
		cmocka_unit_test_setup(a_segment_cannot_be_shrunk_or_grown, clean),
		cmocka_unit_test_setup(sizes_that_cannot_be_are_errors, clean),
		cmocka_unit_test_setup(an_enormous_segment_costs_nothing_until_touched_and_may_fail_to_map, clean),
		cmocka_unit_test_setup(no_descriptor_left_is_a_clear_error, clean),
		cmocka_unit_test_setup(unmapping_what_is_not_mapped_is_a_warning_not_a_crash, clean),
		cmocka_unit_test_setup(threads_may_map_and_unmap_at_once, clean),
		cmocka_unit_test_setup(a_futex_wait_ends_with_time_or_at_once_where_the_word_differs, clean),
		cmocka_unit_test_setup(a_futex_wakes_a_thread, clean),
		cmocka_unit_test_setup(a_futex_wakes_another_process, clean),
		cmocka_unit_test_setup(any_of_several_futexes_wakes, clean),
		cmocka_unit_test_setup(signals_do_not_prolong_a_wait, clean),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

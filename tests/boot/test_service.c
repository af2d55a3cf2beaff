/* The service thread comes and goes, leaks nothing, does without descriptors, and leaves a forked child alone. */
#include "helper_boot.h"
#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>

/* ThreadSanitizer can't start a thread in a child of a process with several. */
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define THREADS_AFTER_FORK 0
#endif
#endif
#if defined(__SANITIZE_THREAD__)
#define THREADS_AFTER_FORK 0
#endif
#ifndef THREADS_AFTER_FORK
#define THREADS_AFTER_FORK 1
#endif

static void open_alone(struct tp_boot **boot)
{
	ncclUniqueId id;
	must(tp_boot_unique_id(&id) == ncclSuccess);
	struct tp_boot_args args = { .rank = 0, .nranks = 1, .nids = 1, .ids = &id, .timeout_ms = 20000 };
	must(tp_boot_open(&args, boot) == ncclSuccess);
}

static void nothing(struct tp_boot *boot, void *arg) { (void)arg; must(tp_boot_barrier(boot) == ncclSuccess); }

static void a_thousand_opens_leave_nothing_behind(void **state)
{
	struct tp_boot *boot;
	(void)state;
	open_alone(&boot);
	tp_boot_close(boot);
	int fds = helper_count_fds(), threads = helper_count_threads();
	for (int i = 0; i < 1000; i++) {
		open_alone(&boot);
		void *base;
		if (i % 100 == 0) must(tp_boot_share(boot, 4096, "a test's", &base) == ncclSuccess);
		tp_boot_close(boot);
	}
	for (int i = 0; i < 20; i++) helper_threads(4, nothing, NULL);
	assert_true(helper_settle(fds, threads));
}

static void open_often(struct helper_job *job)
{
	struct tp_boot *boot, *child;
	ncclUniqueId id;
	int fds = 0, threads = 0;
	helper_open(job, &boot);
	for (int i = 0; i < 30; i++) {
		must(tp_boot_derive_id(boot, i % job->nranks, &i, sizeof(i), &id) == ncclSuccess);
		struct tp_boot_args args = { .rank = job->rank, .nranks = job->nranks, .nids = 1, .ids = &id, .timeout_ms = 20000 };
		must(tp_boot_open(&args, &child) == ncclSuccess);
		must(tp_boot_barrier(child) == ncclSuccess);
		tp_boot_close(child);
		must(tp_boot_barrier(boot) == ncclSuccess);
		if (i == 9) {
			usleep(100000);
			fds = helper_count_fds();
			threads = helper_count_threads();
		}
	}
	must(helper_settle(fds, threads));
	must(tp_boot_barrier(boot) == ncclSuccess);
	tp_boot_close(boot);
}
static void communicators_between_hosts_leave_nothing_behind(void **state) { (void)state; assert_int_equal(helper_run(4, 2, open_often, NULL), 0); }

static void be_short_of_descriptors(struct helper_job *job)
{
	struct tp_boot *boot;
	struct rlimit limit = { 64, 64 };
	if (job->rank == 0) must(setrlimit(RLIMIT_NOFILE, &limit) == 0);
	must(helper_try_open(job, job->rank, 200, 20000, &boot) == ncclSystemError);
	must(strstr(tp_log_last_error(), "file descriptors") && strstr(tp_log_last_error(), "64"));
	helper_add(job, 0);
	helper_await(job, 0, 2);
}
static void too_few_descriptors_are_named_with_limit_and_need(void **state) { (void)state; assert_int_equal(helper_run(2, 1, be_short_of_descriptors, NULL), 0); }

static void raise_the_limit(struct helper_job *job)
{
	struct tp_boot *boot;
	struct rlimit limit;
	must(getrlimit(RLIMIT_NOFILE, &limit) == 0);
	limit.rlim_cur = 48;
	if (job->rank == 0) must(setrlimit(RLIMIT_NOFILE, &limit) == 0);
	helper_open(job, &boot);
	must(tp_boot_barrier(boot) == ncclSuccess);
	tp_boot_close(boot);
}
static void a_low_soft_limit_is_raised(void **state) { (void)state; assert_int_equal(helper_run(40, 1, raise_the_limit, NULL), 0); }

static void no_descriptor_at_all(struct helper_job *job)
{
	struct rlimit limit = { 3, 3 };
	ncclUniqueId id;
	(void)job;
	must(setrlimit(RLIMIT_NOFILE, &limit) == 0);
	must(tp_boot_unique_id(&id) == ncclSystemError);
	must(strlen(tp_log_last_error()) > 10);
}
static void no_descriptor_is_an_error_and_no_crash(void **state) { (void)state; assert_int_equal(helper_run(1, 1, no_descriptor_at_all, NULL), 0); }

static void fork_and_go_on(struct helper_job *job)
{
	struct tp_boot *boot;
	struct tp_event event;
	helper_open(job, &boot);
	must(tp_boot_barrier(boot) == ncclSuccess);
	pid_t pid = fork();
	must(pid >= 0);
	if (pid == 0) {
		struct tp_boot *own;
		must(tp_boot_barrier(boot) == ncclInvalidUsage);
		must(strstr(tp_log_last_error(), "forked child"));
		tp_boot_close(boot);
		if (!THREADS_AFTER_FORK) _exit(0);
		open_alone(&own);       /* a communicator of its own */
		tp_boot_close(own);
		_exit(0);
	}
	int status;
	must(waitpid(pid, &status, 0) == pid && status == 0);
	for (int i = 0; i < 20; i++) must(tp_boot_barrier(boot) == ncclSuccess);
	must(!tp_boot_first_event(boot, &event));
	tp_boot_close(boot);
}
static void a_forked_child_disturbs_nothing(void **state) { (void)state; assert_int_equal(helper_run(4, 2, fork_and_go_on, NULL), 0); }

struct watched { int fd; _Atomic int calls; struct tp_service_watch *watch; bool unwatch; };
static void count_call(void *arg, uint32_t events)
{
	struct watched *w = arg;
	uint64_t value;
	must(events & EPOLLIN);
	must(read(w->fd, &value, sizeof(value)) == sizeof(value));
	atomic_fetch_add(&w->calls, 1);
}
static void watched_descriptors_are_called_until_they_are_unwatched(void **state)
{
	struct watched w = { .fd = eventfd(0, EFD_NONBLOCK) };
	uint64_t one = 1;
	(void)state;
	int fds = helper_count_fds(), threads = helper_count_threads();
	assert_int_equal(tp_service_watch_fd(w.fd, EPOLLIN, count_call, &w, &w.watch), ncclSuccess);
	for (int i = 0; i < 100; i++) {
		assert_int_equal(write(w.fd, &one, sizeof(one)), sizeof(one));
		while (atomic_load(&w.calls) == i) usleep(100);
	}
	tp_service_unwatch(w.watch);
	assert_int_equal(write(w.fd, &one, sizeof(one)), sizeof(one));
	assert_true(helper_settle(fds, threads));
	assert_int_equal(atomic_load(&w.calls), 100);
	close(w.fd);
}

static void signals_stay_with_the_application(void **state)
{
	struct tp_boot *boot;
	char path[64], line[256];
	unsigned long long blocked = 0;
	int others = 0, good = 0;   /* a sanitizer may have a thread too */
	(void)state;
	open_alone(&boot);
	DIR *tasks = opendir("/proc/self/task");
	assert_non_null(tasks);
	for (struct dirent *entry; (entry = readdir(tasks)) != NULL;) {
		if (entry->d_name[0] == '.' || atoi(entry->d_name) == getpid()) continue;
		snprintf(path, sizeof(path), "/proc/self/task/%.20s/status", entry->d_name);
		FILE *file = fopen(path, "r");
		if (!file) continue;
		while (fgets(line, sizeof(line), file))
			if (sscanf(line, "SigBlk: %llx", &blocked) == 1) others++;
		fclose(file);
		if (blocked & (1ull << (SIGUSR1 - 1)) && blocked & (1ull << (SIGTERM - 1))) good++;
	}
	closedir(tasks);
	assert_true(others >= 1 && good >= 1);
	tp_boot_close(boot);
}

int main(int argc, char **argv)
{
	if (argc > 1) cmocka_set_test_filter(argv[1]);
	setenv("NCCL_SOCKET_IFNAME", "lo", 1);
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_thousand_opens_leave_nothing_behind),
		cmocka_unit_test(communicators_between_hosts_leave_nothing_behind),
		cmocka_unit_test(too_few_descriptors_are_named_with_limit_and_need),
		cmocka_unit_test(a_low_soft_limit_is_raised),
		cmocka_unit_test(no_descriptor_is_an_error_and_no_crash),
		cmocka_unit_test(a_forked_child_disturbs_nothing),
		cmocka_unit_test(watched_descriptors_are_called_until_they_are_unwatched),
		cmocka_unit_test(signals_stay_with_the_application),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Links between hosts: connections that break with frames on their way lose nothing, slow processes are not dead, and whoever
 * has come through a barrier may leave at once. */
#include "helper_boot.h"
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include "boot/internal.h"

#define EVENT_MS 30000

enum { OPEN, DONE, SEEN, PID };

/* Breaks a connection between hosts and throws away what it had in its buffers. */
static bool break_one(unsigned *seed)
{
	char lost[4096];
	int count = 0;
	tp_service_lock();
	for (struct tp_conn *conn = tp_service.conns; conn; conn = conn->next) count += conn->state == TP_CONN_OPEN && conn->hello.kind == TP_WIRE_LINK;
	int which = count ? rand_r(seed) % count : -1;
	for (struct tp_conn *conn = tp_service.conns; conn && which >= 0; conn = conn->next) {
		if (conn->state != TP_CONN_OPEN || conn->hello.kind != TP_WIRE_LINK || which-- > 0) continue;
		while (recv(conn->source.fd, lost, sizeof(lost), MSG_DONTWAIT) > 0) {}
		shutdown(conn->source.fd, SHUT_RDWR);
	}
	tp_service_unlock();
	return count > 0;
}

struct saboteur { pthread_t thread; unsigned seed; _Atomic bool stop; _Atomic int broken; };
static void *sabotage(void *arg)
{
	struct saboteur *s = arg;
	/* So many, and the rest goes in peace: a slow machine must get through too. */
	while (!atomic_load(&s->stop) && s->broken < 12) {
		s->broken += break_one(&s->seed);
		usleep(5000 + (useconds_t)(rand_r(&s->seed) % 25000));
	}
	return NULL;
}

static void gather_while_links_break(struct helper_job *job)
{
	struct tp_boot *boot;
	struct tp_event event;
	struct saboteur s = { .seed = (unsigned)job->rank + 1 };
	helper_open(job, &boot);
	must(pthread_create(&s.thread, NULL, sabotage, &s) == 0);
	helper_check_gather(boot, 6, 64);
	/* The first one always has links; where the saboteur comes to run late, there must be something left for it. */
	while (job->rank == 0 && !atomic_load(&s.broken)) usleep(1000);
	helper_check_gather(boot, 2, TP_BOOT_GATHER_MAX);
	for (int i = 0; i < 5; i++) must(tp_boot_barrier(boot) == ncclSuccess);
	helper_add(job, DONE);
	helper_await(job, DONE, job->nranks);
	atomic_store(&s.stop, true);
	pthread_join(s.thread, NULL);
	must(!tp_boot_first_event(boot, &event));
	must(tp_boot_barrier(boot) == ncclSuccess);
	tp_boot_close(boot);
}
static void gathers_outlive_broken_connections(void **state)
{
	(void)state;
	assert_int_equal(helper_run(8, 8, gather_while_links_break, NULL), 0);
	assert_int_equal(helper_run(5, 3, gather_while_links_break, NULL), 0);
}

static void tell_while_links_break(struct helper_job *job)
{
	struct tp_boot *boot;
	struct tp_event event = { .kind = TP_EVENT_ABORTED, .rank = 3, .result = ncclRemoteError, .text = "rank 3 was aborted" }, seen;
	struct saboteur s = { .seed = (unsigned)job->rank + 1 };
	helper_open(job, &boot);
	must(tp_boot_barrier(boot) == ncclSuccess);
	helper_add(job, OPEN);
	helper_await(job, OPEN, job->nranks);
	must(pthread_create(&s.thread, NULL, sabotage, &s) == 0);
	usleep(50000);
	if (job->rank == 3) tp_boot_post_event(boot, &event);
	must(helper_event(boot, EVENT_MS, &seen));
	must(seen.kind == TP_EVENT_ABORTED && seen.rank == 3);
	helper_add(job, SEEN);
	helper_await(job, SEEN, job->nranks);
	atomic_store(&s.stop, true);
	pthread_join(s.thread, NULL);
	tp_boot_close(boot);
}
static void an_event_outlives_broken_connections(void **state) { (void)state; assert_int_equal(helper_run(12, 12, tell_while_links_break, NULL), 0); }

static void leave_after_one_barrier(struct helper_job *job)
{
	struct tp_boot *boot;
	helper_open(job, &boot);
	must(tp_boot_barrier(boot) == ncclSuccess);
	tp_boot_close(boot);
	_exit(0);
}
static void whoever_comes_through_a_barrier_may_leave_at_once(void **state)
{
	(void)state;
	for (int i = 0; i < 3; i++) assert_int_equal(helper_run(24, 24, leave_after_one_barrier, NULL), 0);
	assert_int_equal(helper_run(24, 12, leave_after_one_barrier, NULL), 0);
}

/* Each process loses the processor again and again, as on a machine with too much to do. */
static void *stutter(void *arg)
{
	_Atomic bool *stop = arg;
	while (!atomic_load(stop)) {
		tp_service_lock();      /* the service thread does nothing meanwhile */
		usleep(30000);
		tp_service_unlock();
		usleep(3000);
	}
	return NULL;
}
static void gather_slowly(struct helper_job *job)
{
	struct tp_boot *boot;
	struct tp_event event;
	_Atomic bool stop = false;
	pthread_t thread;
	must(pthread_create(&thread, NULL, stutter, &stop) == 0);
	helper_open(job, &boot);
	helper_check_gather(boot, 4, 256);
	must(!tp_boot_first_event(boot, &event));
	atomic_store(&stop, true);
	pthread_join(thread, NULL);
	must(tp_boot_barrier(boot) == ncclSuccess);
	tp_boot_close(boot);
}
static void slow_service_threads_only_take_time(void **state) { (void)state; assert_int_equal(helper_run(12, 12, gather_slowly, NULL), 0); }

static void many_hosts(struct helper_job *job)
{
	struct tp_boot *boot;
	helper_open(job, &boot);
	helper_check_gather(boot, 2, 64);
	must(tp_boot_barrier(boot) == ncclSuccess);
	tp_boot_close(boot);
}
static void sixty_four_hosts_meet(void **state) { (void)state; assert_int_equal(helper_run(64, 64, many_hosts, NULL), 0); }

static void fill_the_queue(struct helper_job *job)
{
	struct tp_boot *boot;
	if (job->rank == 0) {
		/* A queue of one: most of the callers are not even answered at first. */
		must(tp_boot_unique_id(job->id) == ncclSuccess);
		tp_service_lock();
		for (struct tp_listener *l = tp_service.listeners; l; l = l->next) must(listen(l->source.fd, 1) == 0);
		tp_service_unlock();
		helper_put(job, PID, 1);
	}
	helper_await(job, PID, 1);
	struct tp_boot_args args = { .rank = job->rank, .nranks = job->nranks, .nids = 1, .ids = job->id, .timeout_ms = 60000 };
	must(tp_boot_open(&args, &boot) == ncclSuccess);
	must(tp_boot_barrier(boot) == ncclSuccess);
	tp_boot_close(boot);
}
static void a_full_queue_of_callers_is_got_over(void **state) { (void)state; assert_int_equal(helper_run(10, 10, fill_the_queue, NULL), 0); }

static void stop_for_a_second(struct helper_job *job)
{
	struct tp_boot *boot;
	struct tp_event event;
	helper_open(job, &boot);
	must(tp_boot_barrier(boot) == ncclSuccess);
	if (job->rank == 2) helper_put(job, PID, getpid());
	if (job->rank == 0) {
		helper_await(job, PID, 1);
		must(kill(helper_get(job, PID), SIGSTOP) == 0);
		usleep(1000000);
		must(kill(helper_get(job, PID), SIGCONT) == 0);
	}
	for (int i = 0; i < 3; i++) must(tp_boot_barrier(boot) == ncclSuccess);
	must(!tp_boot_first_event(boot, &event));
	tp_boot_close(boot);
}
static void a_process_that_is_stopped_for_a_second_is_not_dead(void **state)
{
	(void)state;
	assert_int_equal(helper_run(4, 4, stop_for_a_second, NULL), 0);
}

static void be_idle(struct helper_job *job)
{
	struct tp_boot *boot;
	struct rusage before, after;
	helper_open(job, &boot);
	must(tp_boot_barrier(boot) == ncclSuccess);
	helper_add(job, OPEN);
	helper_await(job, OPEN, job->nranks);
	usleep(100000);
	must(getrusage(RUSAGE_SELF, &before) == 0);
	usleep(800000);
	must(getrusage(RUSAGE_SELF, &after) == 0);
	/* Four ticks a second, a few frames each; loosely, as the machine may have been busy. */
	must(after.ru_nvcsw - before.ru_nvcsw < 200);
	must(tp_boot_barrier(boot) == ncclSuccess);
	tp_boot_close(boot);
}
static void an_idle_communicator_sleeps(void **state)
{
	(void)state;
	assert_int_equal(helper_run(4, 4, be_idle, NULL), 0);
}

int main(int argc, char **argv)
{
	if (argc > 1) cmocka_set_test_filter(argv[1]);
	setenv("NCCL_SOCKET_IFNAME", "lo", 1);
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(gathers_outlive_broken_connections),
		cmocka_unit_test(an_event_outlives_broken_connections),
		cmocka_unit_test(whoever_comes_through_a_barrier_may_leave_at_once),
		cmocka_unit_test(slow_service_threads_only_take_time),
		cmocka_unit_test(sixty_four_hosts_meet),
		cmocka_unit_test(a_full_queue_of_callers_is_got_over),
		cmocka_unit_test(a_process_that_is_stopped_for_a_second_is_not_dead),
		cmocka_unit_test(an_idle_communicator_sleeps),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

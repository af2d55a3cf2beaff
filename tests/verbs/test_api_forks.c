/* Processes that fork while other threads are inside the library: whatever lock is held at that moment, the child can use the card. */
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "verbs/helper_api.h"

enum { CHILDREN = 40, THREADS = 2 };

static bool (*redirect)(const char *path, char *out, size_t bytes);
struct busy { struct pair pair; _Atomic bool over; };

/* What a thread does over and over, and a child once: true if it worked. */
static bool lists_devices(struct busy *busy)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	bool any = list && list[0];
	(void)busy;
	ibv_free_device_list(list);
	return any;
}
/* As the preload library asks: the file is written then, with its port's figures. */
static bool looks_into_sys(struct busy *busy)
{
	char path[4096];
	(void)busy;
	return redirect("/sys/class/infiniband/telpher0/ports/1/counters/port_xmit_data", path, sizeof(path)) && access(path, R_OK) == 0;
}
static bool writes(struct busy *busy)
{
	struct request request = { .opcode = IBV_WR_RDMA_WRITE, .bytes = 64, .remote = &busy->pair.b };
	return post(&busy->pair.a, &request) == 0 && next_wc(busy->pair.a.cq).status == IBV_WC_SUCCESS;
}

static struct { bool (*once)(struct busy *); struct pair_options options; int threads; } does;

static void *over_and_over(void *arg)
{
	struct busy *busy = arg;
	while (!atomic_load_explicit(&busy->over, memory_order_relaxed))
		does.once(busy);
	return NULL;
}

static void make_busy(struct busy *busy)
{
	atomic_init(&busy->over, false);
	pair_open(&busy->pair, &does.options);
}

/* Parameters are read once a process, so each case has a process of its own, which forks its children. */
static void children_live(const char *fault, const char *carrier)
{
	int status;
	pid_t parent = fork();
	if (parent == 0) {
		struct busy busy;
		pthread_t threads[THREADS];
		setenv("TELPHER_VERBS_FAULT", fault, 1);
		setenv("TELPHER_VERBS_CARRIER", carrier, 1);
		make_busy(&busy);
		for (int i = 0; i < does.threads; i++)
			pthread_create(&threads[i], NULL, over_and_over, &busy);
		int bad = 0;
		for (int i = 0; i < CHILDREN && !bad; i++) {
			usleep(1000);
			pid_t pid = fork();
			if (pid == 0) {
				struct busy own;
				alarm(60);
				make_busy(&own);
				_exit(does.once(&own) ? 0 : 1);
			}
			if (waitpid(pid, &bad, 0) != pid)
				bad = 1;
		}
		atomic_store_explicit(&busy.over, true, memory_order_relaxed);
		for (int i = 0; i < does.threads; i++)
			pthread_join(threads[i], NULL);
		_exit(bad ? 1 : 0);
	}
	assert_int_equal(waitpid(parent, &status, 0), parent);
	assert_int_equal(status, 0);
}

static void a_fork_while_faults_are_asked_for_leaves_a_child_that_works(void **state)
{
	(void)state;
	if (SANITIZED)
		skip();
	does.once = lists_devices;
	does.options = (struct pair_options){ 0 };
	does.threads = THREADS;
	children_live("missing=nobody", "auto");
}

static void a_fork_while_packets_are_struck_leaves_a_child_that_works(void **state)
{
	(void)state;
	if (SANITIZED)
		skip();
	does.once = writes;
	does.options = (struct pair_options){ .timeout = 14, .retry_cnt = 7 };
	does.threads = 1;
	children_live("duplicate=0.5", "wire");
	/* Those that wait for their time are the parent's; the child's have a clock of their own. */
	children_live("delay=1:100us", "wire");
}

static void a_fork_while_the_tree_in_sys_is_written_leaves_a_child_that_works(void **state)
{
	(void)state;
	void *found = dlsym(RTLD_DEFAULT, "tp_card_inner_sysfs_redirect");
	if (SANITIZED)
		skip();
	assert_non_null(found);
	memcpy(&redirect, &found, sizeof(redirect));
	does.once = looks_into_sys;
	does.options = (struct pair_options){ 0 };
	does.threads = THREADS;
	children_live("none", "auto");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_fork_while_faults_are_asked_for_leaves_a_child_that_works),
		cmocka_unit_test(a_fork_while_packets_are_struck_leaves_a_child_that_works),
		cmocka_unit_test(a_fork_while_the_tree_in_sys_is_written_leaves_a_child_that_works),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

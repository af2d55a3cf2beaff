/* Many threads at once: traffic both ways on shared queues, regions that go during traffic, errors under load, destruction. */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "verbs/helper_api.h"

enum { MESSAGES = 2000 };

/* Sends MESSAGES and receives MESSAGES on one side. */
static void *talk(void *arg)
{
	struct side *side = arg;
	int sent = 0, done = 0, got = 0;
	struct ibv_wc wc;
	for (int i = 0; i < 8; i++)
		post_recv(side, 0, 4096, 64);
	while (done < MESSAGES || got < MESSAGES) {
		if (sent < MESSAGES && post(side, &(struct request){ .opcode = IBV_WR_SEND, .bytes = 64 }) == 0)
			sent++;
		while (ibv_poll_cq(side->cq, 1, &wc) > 0) {
			if (wc.status != IBV_WC_SUCCESS)
				return (void *)(uintptr_t)wc.status;
			if (wc.opcode == IBV_WC_RECV) {
				got++;
				post_recv(side, 0, 4096, 64);
			} else {
				done++;
			}
		}
		if (sent == MESSAGES)
			sched_yield();
	}
	return NULL;
}

static void two_threads_talk_both_ways(void **state)
{
	(void)state;
	struct pair p;
	pthread_t threads[2];
	void *result;
	pair_open(&p, &(struct pair_options){ .rnr_retry = 7 });
	pthread_create(&threads[0], NULL, talk, &p.a);
	pthread_create(&threads[1], NULL, talk, &p.b);
	for (int i = 0; i < 2; i++) {
		pthread_join(threads[i], &result);
		assert_null(result);
	}
	pair_close(&p);
}

/* Adds to one counter at b from one of several QPs. */
struct adder { struct side side; struct side *target; };
static void *add(void *arg)
{
	struct adder *adder = arg;
	for (int i = 0; i < 500; i++) {
		struct ibv_wc wc;
		post(&adder->side, &(struct request){ .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .bytes = 8, .remote = adder->target, .compare_add = 1 });
		while (ibv_poll_cq(adder->side.cq, 1, &wc) == 0)
			;
		if (wc.status != IBV_WC_SUCCESS)
			return adder;
	}
	return NULL;
}

static void atomics_of_several_queue_pairs_lose_nothing(void **state)
{
	(void)state;
	enum { ADDERS = 4 };
	static const struct pair_options options;
	struct pair p[ADDERS];
	struct adder adders[ADDERS];
	pthread_t threads[ADDERS];
	void *result;
	memset(p, 0, sizeof(p));
	pair_open(&p[0], NULL);
	memset(p[0].b.data, 0, 8);
	for (int i = 0; i < ADDERS; i++) {
		if (i > 0) {
			p[i].context = p[0].context;
			side_open(&p[i].a, p[0].context, &options, false);
			struct ibv_qp_init_attr init = { .send_cq = p[0].b.cq, .recv_cq = p[0].b.cq, .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
			p[i].b = p[0].b;
			p[i].b.qp = ibv_create_qp(p[0].b.pd, &init);
			assert_non_null(p[i].b.qp);
			to_init(p[i].a.qp, 0);
			to_init(p[i].b.qp, IBV_ACCESS_REMOTE_ATOMIC);
			assert_int_equal(to_rtr(p[i].a.qp, p[i].b.qp->qp_num, 0, &options), 0);
			assert_int_equal(to_rtr(p[i].b.qp, p[i].a.qp->qp_num, 0, &options), 0);
			assert_int_equal(to_rts(p[i].a.qp, 0, &options), 0);
		}
		adders[i] = (struct adder){ p[i].a, &p[0].b };
		pthread_create(&threads[i], NULL, add, &adders[i]);
	}
	for (int i = 0; i < ADDERS; i++) {
		pthread_join(threads[i], &result);
		assert_null(result);
	}
	uint64_t total;
	memcpy(&total, p[0].b.data, 8);
	assert_int_equal(total, ADDERS * 500);
	for (int i = 1; i < ADDERS; i++) {
		ibv_destroy_qp(p[i].b.qp);
		side_close(&p[i].a);
	}
	pair_close(&p[0]);
}

struct writer { struct pair pair; uint32_t rkey; _Atomic int written; };
static void *write_on(void *arg)
{
	struct writer *writer = arg;
	struct ibv_wc wc;
	for (;;) {
		int error = post(&writer->pair.a, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .bytes = 4096, .remote = &writer->pair.b,
			.rkey = writer->rkey });
		(void)error;        /* full: what completes below makes room */
		while (ibv_poll_cq(writer->pair.a.cq, 1, &wc) > 0) {
			if (wc.status != IBV_WC_SUCCESS)
				return (void *)(uintptr_t)wc.status;
			atomic_fetch_add(&writer->written, 1);
		}
	}
	return NULL;
}

static void wait_for_traffic(struct writer *writer)
{
	while (atomic_load(&writer->written) < 10)
		sched_yield();
}

static void a_region_deregistered_during_traffic_is_never_touched_again(void **state)
{
	(void)state;
	struct writer writer = { .written = 0 };
	pthread_t thread;
	void *status;
	pair_open(&writer.pair, NULL);
	struct ibv_mr *mr = ibv_reg_mr(writer.pair.b.pd, writer.pair.b.data, 4096, SIDE_ACCESS);
	writer.rkey = mr->rkey;
	pthread_create(&thread, NULL, write_on, &writer);
	wait_for_traffic(&writer);
	assert_int_equal(ibv_dereg_mr(mr), 0);
	memset(writer.pair.b.data, 0x11, 4096);
	pthread_join(thread, &status);
	assert_int_equal((uintptr_t)status, IBV_WC_REM_ACCESS_ERR);
	for (int i = 0; i < 4096; i++)
		assert_int_equal(writer.pair.b.data[i], 0x11);
	pair_close(&writer.pair);
}

static void a_queue_pair_moved_to_error_under_load_flushes_the_rest(void **state)
{
	(void)state;
	struct writer writer = { .written = 0 };
	pthread_t thread;
	void *status;
	pair_open(&writer.pair, NULL);
	writer.rkey = writer.pair.b.mr->rkey;
	pthread_create(&thread, NULL, write_on, &writer);
	wait_for_traffic(&writer);
	to_error(writer.pair.a.qp);
	pthread_join(thread, &status);
	assert_int_equal((uintptr_t)status, IBV_WC_WR_FLUSH_ERR);
	pair_close(&writer.pair);
}

static void a_target_destroyed_under_load_is_a_peer_that_is_gone(void **state)
{
	(void)state;
	struct writer writer = { .written = 0 };
	pthread_t thread;
	void *status;
	pair_open(&writer.pair, NULL);
	writer.rkey = writer.pair.b.mr->rkey;
	pthread_create(&thread, NULL, write_on, &writer);
	wait_for_traffic(&writer);
	assert_int_equal(ibv_destroy_qp(writer.pair.b.qp), 0);
	pthread_join(thread, &status);
	assert_int_equal((uintptr_t)status, IBV_WC_RETRY_EXC_ERR);
	struct ibv_qp_init_attr init = { .send_cq = writer.pair.b.cq, .recv_cq = writer.pair.b.cq, .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
	writer.pair.b.qp = ibv_create_qp(writer.pair.b.pd, &init);
	pair_close(&writer.pair);
}

/* Whatever lock is held at that moment, the child can put away what it inherited, and use the card itself. */
static void a_fork_in_the_middle_of_traffic_leaves_a_child_that_works(void **state)
{
	(void)state;
	struct writer writer = { .written = 0 };
	pthread_t thread;
	void *status;
	if (SANITIZED)
		skip();
	pair_open(&writer.pair, NULL);
	writer.rkey = writer.pair.b.mr->rkey;
	pthread_create(&thread, NULL, write_on, &writer);
	wait_for_traffic(&writer);
	for (int i = 0; i < 20; i++) {
		int result;
		pid_t pid = fork();
		if (pid == 0) {
			struct pair own;
			alarm(60);
			ibv_destroy_qp(writer.pair.a.qp);
			ibv_destroy_cq(writer.pair.a.cq);
			ibv_dereg_mr(writer.pair.b.mr);
			ibv_dealloc_pd(writer.pair.a.pd);
			ibv_close_device(writer.pair.context);
			pair_open(&own, NULL);
			if (post(&own.a, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .bytes = 64, .remote = &own.b }) || next_wc(own.a.cq).status)
				_exit(1);
			pair_close(&own);
			_exit(0);
		}
		assert_int_equal(waitpid(pid, &result, 0), pid);
		assert_true(WIFEXITED(result) && WEXITSTATUS(result) == 0);
	}
	to_error(writer.pair.a.qp);
	pthread_join(thread, &status);
	assert_int_equal((uintptr_t)status, IBV_WC_WR_FLUSH_ERR);
	pair_close(&writer.pair);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(two_threads_talk_both_ways),
		cmocka_unit_test(atomics_of_several_queue_pairs_lose_nothing),
		cmocka_unit_test(a_region_deregistered_during_traffic_is_never_touched_again),
		cmocka_unit_test(a_queue_pair_moved_to_error_under_load_flushes_the_rest),
		cmocka_unit_test(a_target_destroyed_under_load_is_a_peer_that_is_gone),
		cmocka_unit_test(a_fork_in_the_middle_of_traffic_leaves_a_child_that_works),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

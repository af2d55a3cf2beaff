/* Many: a thousand queue pairs between two processes, and 64 processes of which each is connected to all others. All move data; then
 * they are idle, and use no processor. SCALE_REPORT=1 prints what each took. */
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "verbs/helper_api_two.h"

enum { QPS = SANITIZED ? 200 : 1000, PROCESSES = SANITIZED ? 12 : 64, MESSAGES = 4, BYTES = 64 };

/* ---- one process's queue pairs ---- */

struct many {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_mr *mr;
	uint8_t *data;                  /* of each queue pair: MESSAGES receives, and what it sends */
	struct ibv_qp *qps[QPS];
	int count;
	union ibv_gid gid;
};

static uint64_t at(const struct many *many, int qp, int slot)
{
	return (uintptr_t)many->data + ((size_t)qp * (MESSAGES + 1) + (size_t)slot) * BYTES;
}

static int open_many(struct many *many, int count)
{
	int devices;
	struct ibv_device **list = ibv_get_device_list(&devices);
	CHECK(list && devices >= 1);
	many->context = ibv_open_device(list[0]);
	CHECK(many->context);
	ibv_free_device_list(list);
	many->pd = ibv_alloc_pd(many->context);
	many->cq = ibv_create_cq(many->context, count * MESSAGES * 2 + 16, NULL, NULL, 0);
	size_t bytes = (size_t)count * (MESSAGES + 1) * BYTES;
	many->data = calloc(1, bytes);
	CHECK(many->pd && many->cq && many->data);
	many->mr = ibv_reg_mr(many->pd, many->data, bytes, SIDE_ACCESS);
	CHECK(many->mr && ibv_query_gid(many->context, 1, 0, &many->gid) == 0);
	for (many->count = 0; many->count < count; many->count++) {
		struct ibv_qp_init_attr init = { .send_cq = many->cq, .recv_cq = many->cq, .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
			.cap = { .max_send_wr = MESSAGES, .max_recv_wr = MESSAGES, .max_send_sge = 1, .max_recv_sge = 1 } };
		many->qps[many->count] = ibv_create_qp(many->pd, &init);
		CHECK(many->qps[many->count]);
		struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
		CHECK(ibv_modify_qp(many->qps[many->count], &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0);
	}
	return 0;
}

static int connect_one(struct many *many, int i, uint32_t qpn, const union ibv_gid *gid)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = qpn, .min_rnr_timer = 1,
		.ah_attr = { .is_global = 1, .port_num = 1, .grh = { .hop_limit = 64, .dgid = *gid } } };
	CHECK(ibv_modify_qp(many->qps[i], &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
		IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0);
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 20, .retry_cnt = 7, .rnr_retry = 7 };
	CHECK(ibv_modify_qp(many->qps[i], &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
		IBV_QP_MAX_QP_RD_ATOMIC) == 0);
	for (int m = 0; m < MESSAGES; m++) {
		struct ibv_sge sge = { at(many, i, m), BYTES, many->mr->lkey };
		struct ibv_recv_wr wr = { .wr_id = (uint64_t)i, .sg_list = &sge, .num_sge = 1 }, *bad;
		CHECK(ibv_post_recv(many->qps[i], &wr, &bad) == 0);
	}
	return 0;
}

/* Every queue pair sends MESSAGES and receives as many. tag: what the first byte of each is. */
static int exchange(struct many *many, int skip, uint8_t tag)
{
	struct ibv_wc wc[32];
	int wanted = 0, done = 0;
	for (int i = 0; i < many->count; i++) {
		if (i == skip)
			continue;
		struct ibv_sge sge = { at(many, i, MESSAGES), BYTES, many->mr->lkey };
		*(uint8_t *)(uintptr_t)sge.addr = tag;
		for (int m = 0; m < MESSAGES; m++, wanted += 2) {
			struct ibv_send_wr wr = { .wr_id = (uint64_t)i, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;
			CHECK(ibv_post_send(many->qps[i], &wr, &bad) == 0);
		}
	}
	for (time_t until = time(NULL) + 60; done < wanted && time(NULL) < until;) {
		int got = ibv_poll_cq(many->cq, 32, wc);
		for (int k = 0; k < got; k++)
			CHECK(wc[k].status == IBV_WC_SUCCESS);
		done += got;
	}
	CHECK(done == wanted);
	return 0;
}

static int close_many(struct many *many)
{
	for (int i = 0; i < many->count; i++)
		CHECK(ibv_destroy_qp(many->qps[i]) == 0);
	CHECK(ibv_dereg_mr(many->mr) == 0 && ibv_destroy_cq(many->cq) == 0 && ibv_dealloc_pd(many->pd) == 0);
	CHECK(ibv_close_device(many->context) == 0);
	free(many->data);
	return 0;
}

/* ---- what a process takes ---- */

static long status_of(const char *name)
{
	FILE *file = fopen("/proc/self/status", "r");
	char line[256];
	long value = -1;
	while (file && fgets(line, sizeof(line), file))
		if (!strncmp(line, name, strlen(name)))
			value = atol(line + strlen(name));
	if (file)
		fclose(file);
	return value;
}

static int descriptors(void)
{
	int count = 0;
	for (int fd = 0; fd < 4096; fd++)
		count += fcntl(fd, F_GETFD) >= 0;
	return count;
}

static double used_seconds(void)
{
	struct rusage usage;
	getrusage(RUSAGE_SELF, &usage);
	return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) + (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
}

/* Nothing is to do: a few thousandths of the time at most. What has just been done may have an end yet, on a busy machine a late one. */
static int be_idle(const char *who)
{
	const char *report = getenv("SCALE_REPORT");
	double used = 1;
	if (report)
		usleep(500000);
	for (int tries = 0; used >= 0.01 && tries < 40 && !SANITIZED; tries++) {        /* sanitizers have a thread of their own */
		double before = used_seconds();
		usleep(report ? 5000000 : 250000);
		used = used_seconds() - before;
		if (report)
			fprintf(stderr, "%s: %ld KiB, %d descriptors, %ld threads, %.4f s of processor in 5 s of idleness\n", who, status_of("VmRSS:"),
				descriptors(), status_of("Threads:"), used);
	}
	CHECK(SANITIZED || used < 0.01);
	return 0;
}

/* ---- a thousand queue pairs ---- */

struct numbers { uint32_t qpns[QPS]; union ibv_gid gid; };

static int swap_numbers(struct end *end, const struct many *many, struct numbers *theirs)
{
	struct numbers ours = { .gid = many->gid };
	for (int i = 0; i < many->count; i++)
		ours.qpns[i] = many->qps[i]->qp_num;
	CHECK(write(end->to_peer, &ours, sizeof(ours)) == (ssize_t)sizeof(ours));
	for (size_t got = 0; got < sizeof(*theirs);) {
		ssize_t bytes = read(end->to_peer, (uint8_t *)theirs + got, sizeof(*theirs) - got);
		CHECK(bytes > 0);
		got += (size_t)bytes;
	}
	return 0;
}

static int meet(struct end *end)
{
	char byte = 'x';
	CHECK(write(end->to_peer, &byte, 1) == 1 && read(end->to_peer, &byte, 1) == 1);
	return 0;
}

static int one_of_two(struct end *end)
{
	static struct many many;
	static struct numbers theirs;
	setenv("NCCL_DEBUG", "WARN", 1);
	CHECK(open_many(&many, QPS) == 0);
	CHECK(swap_numbers(end, &many, &theirs) == 0);
	for (int i = 0; i < QPS; i++)
		CHECK(connect_one(&many, i, theirs.qpns[i], &theirs.gid) == 0);
	CHECK(meet(end) == 0);
	CHECK(exchange(&many, -1, end->is_a ? 1 : 2) == 0);
	for (int i = 0; i < QPS; i++)
		for (int m = 0; m < MESSAGES; m++)
			CHECK(*(uint8_t *)(uintptr_t)at(&many, i, m) == (end->is_a ? 2 : 1));
	CHECK(meet(end) == 0);
	CHECK(be_idle("1,000 queue pairs") == 0);
	CHECK(meet(end) == 0);
	return close_many(&many);
}

static void a_thousand_queue_pairs_talk_by_the_short_way(void **state)
{
	(void)state;
	static struct outcome outcome;
	setenv("TELPHER_VERBS_CARRIER", "auto", 1);
	run_two(&outcome, one_of_two, one_of_two);
	assert_true(outcome.a_ok && outcome.b_ok);
}

static void a_thousand_queue_pairs_talk_by_the_wire(void **state)
{
	(void)state;
	static struct outcome outcome;
	setenv("TELPHER_VERBS_CARRIER", "wire", 1);
	run_two(&outcome, one_of_two, one_of_two);
	assert_true(outcome.a_ok && outcome.b_ok);
}

/* ---- 64 processes ---- */

struct table { _Atomic int here[8]; _Atomic bool failed; union ibv_gid gid[PROCESSES]; uint32_t qpns[PROCESSES][PROCESSES]; };
static struct table *table;

/* All have come to that point. */
static int gather(int point)
{
	atomic_fetch_add(&table->here[point], 1);
	for (time_t until = time(NULL) + 60; atomic_load(&table->here[point]) < PROCESSES && time(NULL) < until;) {
		CHECK(!atomic_load(&table->failed));
		usleep(2000);
	}
	CHECK(atomic_load(&table->here[point]) >= PROCESSES);
	return 0;
}

static int one_of_many(int rank)
{
	static struct many many;
	CHECK(open_many(&many, PROCESSES) == 0);
	table->gid[rank] = many.gid;
	for (int i = 0; i < PROCESSES; i++)
		table->qpns[rank][i] = many.qps[i]->qp_num;
	CHECK(gather(0) == 0);
	/* Each begins elsewhere: all of them at one would be a queue. */
	for (int k = 1; k < PROCESSES; k++) {
		int peer = (rank + k) % PROCESSES;
		CHECK(connect_one(&many, peer, table->qpns[peer][rank], &table->gid[peer]) == 0);
	}
	CHECK(gather(1) == 0);
	CHECK(exchange(&many, rank, (uint8_t)(rank + 1)) == 0);
	for (int peer = 0; peer < PROCESSES; peer++)
		for (int m = 0; m < MESSAGES; m++)
			CHECK(peer == rank || *(uint8_t *)(uintptr_t)at(&many, peer, m) == peer + 1);
	CHECK(gather(2) == 0);
	CHECK(rank != 0 || be_idle("one of 64 processes") == 0);
	CHECK(gather(3) == 0);
	return close_many(&many);
}

static void each_of_64_processes_talks_to_all_others(void **state)
{
	(void)state;
	pid_t children[PROCESSES];
	setenv("TELPHER_VERBS_CARRIER", "auto", 1);
	table = mmap(NULL, sizeof(*table), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	assert_ptr_not_equal(table, MAP_FAILED);
	for (int rank = 0; rank < PROCESSES; rank++) {
		children[rank] = fork();
		assert_true(children[rank] >= 0);
		if (children[rank] == 0) {
			alarm(250);
			int status = one_of_many(rank);
			if (status)
				atomic_store(&table->failed, true);
			fflush(NULL);
			exit(status);
		}
	}
	int failed = 0;
	for (int rank = 0; rank < PROCESSES; rank++) {
		int status = 0;
		waitpid(children[rank], &status, 0);
		failed += status != 0;
	}
	munmap(table, sizeof(*table));
	assert_int_equal(failed, 0);
}

int main(void)
{
	setenv("TELPHER_VERBS_HIDE_REAL", "1", 1);
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_thousand_queue_pairs_talk_by_the_short_way),
		cmocka_unit_test(a_thousand_queue_pairs_talk_by_the_wire),
		cmocka_unit_test(each_of_64_processes_talks_to_all_others),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

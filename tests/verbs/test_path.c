/* The parts of the short way: who waits for whom, requests that make no sense, faults. QPs of this process are connected to each other
 * by it, so that both ends can be looked at. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "verbs/internal.h"
#include "verbs/path.h"
#include "verbs/wire_fault.h"

enum { BYTES = 65536 };
struct half { struct ibv_cq *cq; struct ibv_qp *qp; struct ibv_mr *mr; uint8_t *data; };
static struct ibv_context *context;
static struct ibv_pd *pd;
static struct half a, b;

static void open_half(struct half *half)
{
	half->cq = tp_cq_create(context, 64, NULL, NULL, 0);
	struct ibv_qp_init_attr_ex attr = { .send_cq = half->cq, .recv_cq = half->cq, .qp_type = IBV_QPT_RC, .sq_sig_all = 1, .pd = pd,
		.comp_mask = IBV_QP_INIT_ATTR_PD, .cap = { .max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1 } };
	half->qp = tp_qp_create(context, &attr);
	half->data = calloc(1, BYTES);
	half->mr = tp_mr_reg(pd, half->data, BYTES, (uintptr_t)half->data, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
	assert_non_null(half->cq);
	assert_non_null(half->qp);
	assert_non_null(half->mr);
}

static void connect_half(struct half *half, const struct half *other)
{
	struct tp_gid gid;
	assert_true(tp_port_gid(tp_card_port(context, 1), 0, &gid));
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };
	assert_int_equal(tp_qp_modify(half->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), 0);
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = other->qp->qp_num, .max_dest_rd_atomic = 4,
		.min_rnr_timer = 1, .ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = gid.gid, .hop_limit = 1 } } };
	assert_int_equal(tp_qp_modify(half->qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
		IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER), 0);
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 8, .retry_cnt = 2, .rnr_retry = 7, .max_rd_atomic = 4 };
	assert_int_equal(tp_qp_modify(half->qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
		IBV_QP_MAX_QP_RD_ATOMIC), 0);
}

static int set_up(void **state)
{
	(void)state;
	struct tp_device *devices;
	assert_true(tp_card_devices(&devices) >= 1);
	context = tp_context_open(&devices[0]);
	pd = tp_pd_alloc(context);
	open_half(&a);
	open_half(&b);
	connect_half(&a, &b);
	connect_half(&b, &a);
	assert_string_equal(((struct tp_qp *)a.qp)->carrier->name, "path");
	return 0;
}

static void close_half(struct half *half)
{
	assert_int_equal(tp_qp_destroy(half->qp), 0);
	if (half->mr)
		assert_int_equal(tp_mr_dereg(half->mr), 0);
	assert_int_equal(tp_cq_destroy(half->cq), 0);
	free(half->data);
}

static int tear_down(void **state)
{
	(void)state;
	tp_fault_wire_set("none");
	close_half(&a);
	close_half(&b);
	assert_int_equal(tp_pd_dealloc(pd), 0);
	assert_int_equal(tp_context_close(tp_context_of(context)), 0);
	return 0;
}

static void write_to_b(uint32_t bytes)
{
	struct ibv_sge sge = { .addr = (uintptr_t)a.data, .length = bytes, .lkey = a.mr->lkey };
	struct ibv_send_wr wr = { .opcode = IBV_WR_RDMA_WRITE, .sg_list = &sge, .num_sge = 1,
		.wr.rdma = { .remote_addr = (uintptr_t)b.data, .rkey = b.mr->rkey } }, *bad;
	assert_int_equal(tp_qp_post_send(a.qp, &wr, &bad), 0);
}

static enum ibv_wc_status next_status(struct half *half)
{
	struct ibv_wc wc;
	uint64_t until = tp_clock_ms() + 20000;
	while (tp_clock_ms() < until)
		if (tp_cq_poll(half->cq, 1, &wc) == 1)
			return wc.status;
	fail_msg("no completion within 20 s");
	return IBV_WC_SUCCESS;
}

static struct tp_path_door *door_of(const struct half *half) { return &tp_path_own_yard->doors[TP_PATH_PLACE(half->qp->qp_num)]; }

/* ---- waiting for those who are inside ---- */

static _Atomic bool done;

static void *deregister(void *arg)
{
	(void)arg;
	tp_mr_dereg(b.mr);
	atomic_store(&done, true);
	return NULL;
}

static void a_region_stays_until_the_peer_in_it_has_left(void **state)
{
	(void)state;
	pthread_t thread;
	write_to_b(64);
	assert_int_equal(next_status(&a), IBV_WC_SUCCESS);
	atomic_store(&done, false);
	atomic_store(&door_of(&a)->keys[3], b.mr->rkey);    /* a copies, and is stopped */
	pthread_create(&thread, NULL, deregister, NULL);
	poll(NULL, 0, 1200);    /* it says so after a second */
	assert_false(atomic_load(&done));
	atomic_store(&door_of(&a)->keys[3], 0);
	pthread_join(thread, NULL);
	assert_true(atomic_load(&done));
	b.mr = NULL;
}

static void *to_error(void *arg)
{
	(void)arg;
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };
	tp_qp_modify(a.qp, &attr, IBV_QP_STATE);
	atomic_store(&done, true);
	return NULL;
}

static void a_queue_pair_ends_when_nobody_serves_it_any_more(void **state)
{
	(void)state;
	pthread_t thread;
	atomic_store(&done, false);
	atomic_store(&door_of(&b)->serving, atomic_load(&door_of(&a)->open));   /* b copies from a's memory */
	pthread_create(&thread, NULL, to_error, NULL);
	poll(NULL, 0, 100);
	assert_false(atomic_load(&done));
	atomic_store(&door_of(&b)->serving, 0);
	pthread_join(thread, NULL);
	assert_true(atomic_load(&done));
	assert_int_equal(atomic_load(&door_of(&a)->open), 0);
}

static void a_door_shows_what_the_queue_pair_allows(void **state)
{
	(void)state;
	struct tp_path_door *door = door_of(&b);
	assert_int_equal(door->peer_qpn, a.qp->qp_num);
	assert_int_equal(door->direct, 1);
	assert_int_equal(door->access, IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTS, .qp_access_flags = 0 };
	assert_int_equal(tp_qp_modify(b.qp, &attr, IBV_QP_STATE | IBV_QP_ACCESS_FLAGS), 0);
	assert_int_equal(door->access, 0);
	write_to_b(8);
	assert_int_equal(next_status(&a), IBV_WC_REM_INV_REQ_ERR);
	assert_int_equal(door->open, 0);        /* the error ended b too */
}

/* ---- nonsense ---- */

static void a_request_that_makes_no_sense_ends_the_connection_not_the_process(void **state)
{
	(void)state;
	struct tp_path_link *link = tp_path_of((struct tp_qp *)a.qp)->link;
	struct tp_path_request *request = tp_path_reserve(link, 128);
	assert_non_null(request);
	memset(request, 0xff, 128);
	tp_path_commit(link, 128);
	while (!atomic_load(&link->dead))
		tp_path_poll();
	write_to_b(8);
	assert_int_equal(next_status(&a), IBV_WC_RETRY_EXC_ERR);
}

/* ---- faults ---- */

static void faults_strike_without_packets(void **state)
{
	(void)state;
	assert_int_equal(tp_fault_wire_set("drop=0.02,delay=0.05:1ms,corrupt=0.01,duplicate=0.1,seed=9"), 0);
	for (uint32_t i = 0; i < 60; i++) {
		memset(a.data, (int)i, BYTES);
		write_to_b(i * 1000);
		assert_int_equal(next_status(&a), IBV_WC_SUCCESS);
		assert_memory_equal(a.data, b.data, i * 1000);
	}
	assert_int_equal(tp_fault_wire_set("mtu=700"), 0);
	write_to_b(300);
	assert_int_equal(next_status(&a), IBV_WC_SUCCESS);
	write_to_b(1024);
	assert_int_equal(next_status(&a), IBV_WC_RETRY_EXC_ERR);
}

static void a_dead_port_reaches_nobody(void **state)
{
	(void)state;
	assert_int_equal(tp_fault_wire_set("dead"), 0);
	write_to_b(8);
	assert_int_equal(next_status(&a), IBV_WC_RETRY_EXC_ERR);
	assert_int_equal(b.data[0], 0);
}

/* The port is shared with other tests: its keeper is beside the library, which isn't linked here. */
static void name_keeper(void)
{
	char path[4096];
	ssize_t length = readlink("/proc/self/exe", path, sizeof(path) - 64);
	if (length <= 0)
		return;
	path[length] = 0;
	for (int i = 0; i < 3; i++)
		*strrchr(path, '/') = 0;
	strcat(path, "/lib/telpher-verbs/telpher-verbs-keeper");
	setenv("TELPHER_VERBS_KEEPER", path, 1);
}

int main(void)
{
	setenv("TELPHER_VERBS_HIDE_REAL", "1", 1);
	setenv("TELPHER_VERBS_CARRIER", "path", 1);
	name_keeper();
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(a_region_stays_until_the_peer_in_it_has_left, set_up, tear_down),
		cmocka_unit_test_setup_teardown(a_queue_pair_ends_when_nobody_serves_it_any_more, set_up, tear_down),
		cmocka_unit_test_setup_teardown(a_door_shows_what_the_queue_pair_allows, set_up, tear_down),
		cmocka_unit_test_setup_teardown(faults_strike_without_packets, set_up, tear_down),
		cmocka_unit_test_setup_teardown(a_dead_port_reaches_nobody, set_up, tear_down),
		cmocka_unit_test_setup_teardown(a_request_that_makes_no_sense_ends_the_connection_not_the_process, set_up, tear_down),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

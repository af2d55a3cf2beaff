/* Credits of reliable connections: the code in acknowledgements, and what a sender makes of it. The QPs are connected by the wire, within
 * this process, so that both ends can be looked at. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "verbs/internal.h"
#include "verbs/rc.h"

static void each_code_stands_for_its_number(void **state)
{
	(void)state;
	static const uint32_t numbers[31] = { 0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072,
		4096, 6144, 8192, 12288, 16384, 24576, 32768 };
	for (uint8_t code = 0; code < 31; code++) {
		assert_int_equal(tp_wire_credits(code), numbers[code]);
		assert_int_equal(tp_wire_credits(TP_SYN_ACK | code), numbers[code]);
		assert_int_equal(tp_wire_credits_code(numbers[code]), code);
		/* Never more than there are. */
		if (numbers[code])
			assert_int_equal(tp_wire_credits_code(numbers[code] - 1), code - 1);
	}
	assert_int_equal(tp_wire_credits(31), UINT32_MAX);
	assert_int_equal(tp_wire_credits_code(UINT32_MAX), 30);
}

enum { BYTES = 4096, DEPTH = 64 };
struct half { struct ibv_cq *cq; struct ibv_qp *qp; struct ibv_mr *mr; uint8_t *data; };
static struct ibv_context *context;
static struct ibv_pd *pd;
static struct half a, b;

static void open_half(struct half *half, struct ibv_srq *srq)
{
	half->cq = tp_cq_create(context, 4 * DEPTH, NULL, NULL, 0);
	struct ibv_qp_init_attr_ex attr = { .send_cq = half->cq, .recv_cq = half->cq, .qp_type = IBV_QPT_RC, .sq_sig_all = 1, .pd = pd, .srq = srq,
		.comp_mask = IBV_QP_INIT_ATTR_PD, .cap = { .max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1 } };
	half->qp = tp_qp_create(context, &attr);
	half->data = calloc(1, BYTES);
	half->mr = tp_mr_reg(pd, half->data, BYTES, (uintptr_t)half->data, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
	assert_true(half->cq && half->qp && half->data && half->mr);
}

static void connect_half(struct half *half, const struct half *other)
{
	struct tp_gid gid;
	assert_true(tp_port_gid(tp_card_port(context, 1), 0, &gid));
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };
	assert_int_equal(tp_qp_modify(half->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), 0);
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = other->qp->qp_num, .max_dest_rd_atomic = 4,
		.min_rnr_timer = 16, .ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = gid.gid, .hop_limit = 1 } } };
	assert_int_equal(tp_qp_modify(half->qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
		IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER), 0);
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 20, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 4 };
	assert_int_equal(tp_qp_modify(half->qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
		IBV_QP_MAX_QP_RD_ATOMIC), 0);
}

static void open_both(struct ibv_srq *srq)
{
	struct tp_device *devices;
	assert_true(tp_card_devices(&devices) >= 1);
	if (!context) {
		context = tp_context_open(&devices[0]);
		pd = tp_pd_alloc(context);
	}
	open_half(&a, NULL);
	open_half(&b, srq);
	connect_half(&a, &b);
	connect_half(&b, &a);
	assert_string_equal(((struct tp_qp *)a.qp)->carrier->name, "wire");
}

static void close_half(struct half *half)
{
	assert_int_equal(tp_qp_destroy(half->qp), 0);
	assert_int_equal(tp_mr_dereg(half->mr), 0);
	assert_int_equal(tp_cq_destroy(half->cq), 0);
	free(half->data);
}

static void close_both(void)
{
	close_half(&a);
	close_half(&b);
}

static void receive(struct half *half, int count)
{
	struct ibv_sge sge = { (uintptr_t)half->data, BYTES, half->mr->lkey };
	for (int i = 0; i < count; i++) {
		struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;
		assert_int_equal(tp_qp_post_recv(half->qp, &wr, &bad), 0);
	}
}

static void request(enum ibv_wr_opcode opcode, uint32_t bytes, int count)
{
	struct ibv_sge sge = { (uintptr_t)a.data, bytes, a.mr->lkey };
	for (int i = 0; i < count; i++) {
		struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = opcode, .wr.rdma = { (uintptr_t)b.data, b.mr->rkey } }, *bad;
		assert_int_equal(tp_qp_post_send(a.qp, &wr, &bad), 0);
	}
}

static void complete(struct half *half, int count)
{
	time_t until = time(NULL) + 30;
	struct ibv_wc wc;
	while (count && time(NULL) < until) {
		int got = tp_cq_poll(half->cq, 1, &wc);
		assert_true(got >= 0 && (got == 0 || wc.status == IBV_WC_SUCCESS));
		count -= got;
	}
	assert_int_equal(count, 0);
}

/* Packets that were ever sent and aren't acknowledged; *waits: for a receive of the other side's. */
static int under_way(bool *waits, bool *limited)
{
	struct tp_qp *qp = (struct tp_qp *)a.qp;
	pthread_mutex_lock(&qp->lock);
	struct tp_rc *rc = tp_rc_of(qp);
	int packets = tp_psn_diff(rc->top, rc->una);
	*waits = rc->rnr_until_ns != 0;
	*limited = rc->limited;
	pthread_mutex_unlock(&qp->lock);
	return packets;
}

static void without_receives_only_one_send_goes_out(void **state)
{
	(void)state;
	bool waits = false, limited;
	struct ibv_wc wc;
	open_both(NULL);
	receive(&b, 3);
	request(IBV_WR_SEND, 8, 1);
	complete(&a, 1);
	complete(&b, 1);
	assert_true(under_way(&waits, &limited) == 0 && limited);
	/* Two find a receive; of the others one asks. */
	request(IBV_WR_SEND_WITH_IMM, 8, 20);
	complete(&b, 2);
	complete(&a, 2);
	time_t until = time(NULL) + 30;
	for (waits = false; !waits && time(NULL) < until;) {
		assert_in_range(under_way(&waits, &limited), 0, 1);
		assert_int_equal(tp_cq_poll(a.cq, 1, &wc), 0);
	}
	assert_true(waits);
	receive(&b, 18);
	complete(&b, 18);
	complete(&a, 18);
	close_both();
}

static void requests_that_take_no_receive_need_no_credit(void **state)
{
	(void)state;
	bool waits, limited;
	open_both(NULL);
	receive(&b, 1);
	request(IBV_WR_SEND, 0, 1);
	complete(&a, 1);
	complete(&b, 1);
	request(IBV_WR_RDMA_WRITE, 3000, 20);
	request(IBV_WR_RDMA_READ, 3000, 20);
	complete(&a, 40);
	assert_true(under_way(&waits, &limited) == 0 && !waits && limited);
	/* They don't use up any either; a WRITE with an immediate does. */
	receive(&b, 20);
	request(IBV_WR_RDMA_WRITE_WITH_IMM, 3000, 20);
	complete(&a, 20);
	complete(&b, 20);
	close_both();
}

static void receives_that_are_posted_again_are_told_of(void **state)
{
	(void)state;
	open_both(NULL);
	receive(&b, 4);
	for (int i = 0; i < 200; i++) {
		request(IBV_WR_SEND, 2000, 1);
		complete(&b, 1);
		receive(&b, 1);
		complete(&a, 1);
	}
	struct tp_rc *rc = tp_rc_of((struct tp_qp *)a.qp);
	assert_true(rc->limited && rc->takes_begun == 200 && rc->takes_ended == 200);
	assert_in_range(rc->takes_most, 203, 204);
	close_both();
}

static void who_shares_a_receive_queue_gives_no_number(void **state)
{
	(void)state;
	bool waits, limited;
	open_both(NULL);
	struct ibv_srq_init_attr attr = { .attr = { .max_wr = DEPTH, .max_sge = 1 } };
	struct ibv_srq *srq = tp_srq_create(pd, &attr);
	assert_non_null(srq);
	close_both();
	open_both(srq);
	struct ibv_sge sge = { (uintptr_t)b.data, BYTES, b.mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;
	assert_int_equal(tp_srq_post(srq, &wr, &bad), 0);
	request(IBV_WR_SEND, 8, 1);
	complete(&a, 1);
	complete(&b, 1);
	under_way(&waits, &limited);
	assert_false(limited);
	close_both();
	assert_int_equal(tp_srq_destroy(srq), 0);
}

/* The port is shared with other tests: its keeper is beside the library, which isn't linked here. */
static void find_keeper(const char *self)
{
	char path[PATH_MAX];
	const char *end = strstr(self, "/tests/verbs/");
	snprintf(path, sizeof(path), "%.*s/lib/telpher-verbs/telpher-verbs-keeper", end ? (int)(end - self) : 0, self);
	setenv("TELPHER_VERBS_KEEPER", path, 1);
}

int main(int argc, char **argv)
{
	char self[PATH_MAX];
	find_keeper(argc && realpath(argv[0], self) ? self : "");
	setenv("TELPHER_VERBS_HIDE_REAL", "1", 1);
	setenv("TELPHER_VERBS_CARRIER", "wire", 1);
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(each_code_stands_for_its_number),
		cmocka_unit_test(without_receives_only_one_send_goes_out),
		cmocka_unit_test(requests_that_take_no_receive_need_no_credit),
		cmocka_unit_test(receives_that_are_posted_again_are_told_of),
		cmocka_unit_test(who_shares_a_receive_queue_gives_no_number),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

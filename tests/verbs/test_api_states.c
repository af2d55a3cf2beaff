/* The state machine, and what posting accepts in which state and how much. */
#include <errno.h>
#include <string.h>
#include "verbs/helper_api.h"

static const struct pair_options unconnected = { .unconnected = true }, plain;

static int modify(struct ibv_qp *qp, enum ibv_qp_state state, int mask)
{
	struct ibv_qp_attr attr = { .qp_state = state, .cur_qp_state = state, .port_num = 1, .path_mtu = IBV_MTU_1024, .ah_attr = own_address(qp->context) };
	return ibv_modify_qp(qp, &attr, mask);
}

static void init_needs_port_pkey_and_rights(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &unconnected);
	assert_int_equal(modify(p.a.qp, IBV_QPS_INIT, IBV_QP_STATE), EINVAL);
	assert_int_equal(modify(p.a.qp, IBV_QPS_INIT, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT), EINVAL);
	assert_int_equal(modify(p.a.qp, IBV_QPS_INIT, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), 0);
	assert_int_equal(state_of(p.a.qp), IBV_QPS_INIT);
	assert_int_equal(p.a.qp->state, IBV_QPS_INIT);
	pair_close(&p);
}

static void an_attribute_that_a_transition_does_not_allow_is_refused(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &unconnected);
	assert_int_equal(modify(p.a.qp, IBV_QPS_INIT, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS | IBV_QP_SQ_PSN), EINVAL);
	assert_int_equal(modify(p.a.qp, IBV_QPS_INIT, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY), EINVAL);
	pair_close(&p);
}

static void states_can_not_be_skipped(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &unconnected);
	assert_int_equal(to_rtr(p.a.qp, p.b.qp->qp_num, 0, &plain), EINVAL);
	assert_int_equal(to_rts(p.a.qp, 0, &plain), EINVAL);
	to_init(p.a.qp, 0);
	assert_int_equal(to_rts(p.a.qp, 0, &plain), EINVAL);
	assert_int_equal(modify(p.a.qp, IBV_QPS_SQD, IBV_QP_STATE), EINVAL);
	pair_close(&p);
}

static void a_wrong_cur_state_is_refused(void **state)
{
	(void)state;
	struct pair p;
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTS, .cur_qp_state = IBV_QPS_RTR };
	pair_open(&p, NULL);
	assert_int_equal(ibv_modify_qp(p.a.qp, &attr, IBV_QP_STATE | IBV_QP_CUR_STATE), EINVAL);
	attr.cur_qp_state = IBV_QPS_RTS;
	assert_int_equal(ibv_modify_qp(p.a.qp, &attr, IBV_QP_STATE | IBV_QP_CUR_STATE), 0);
	pair_close(&p);
}

static void a_port_gid_mtu_or_count_that_does_not_exist_is_refused(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &unconnected);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 9 };
	assert_int_equal(ibv_modify_qp(p.a.qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), EINVAL);
	to_init(p.a.qp, 0);
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .ah_attr = own_address(p.context), .max_dest_rd_atomic = 4 };
	int mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
	attr.ah_attr.grh.sgid_index = 250;
	assert_int_equal(ibv_modify_qp(p.a.qp, &attr, mask), EINVAL);
	attr.ah_attr.grh.sgid_index = 0;
	attr.ah_attr.is_global = 0;
	assert_int_equal(ibv_modify_qp(p.a.qp, &attr, mask), EINVAL);
	attr.ah_attr.is_global = 1;
	attr.path_mtu = 6;
	assert_int_equal(ibv_modify_qp(p.a.qp, &attr, mask), EINVAL);
	attr.path_mtu = IBV_MTU_256;
	attr.max_dest_rd_atomic = 255;
	assert_int_equal(ibv_modify_qp(p.a.qp, &attr, mask), EINVAL);
	attr.max_dest_rd_atomic = 1;
	assert_int_equal(state_of(p.a.qp), IBV_QPS_INIT);
	assert_int_equal(ibv_modify_qp(p.a.qp, &attr, mask), 0);
	pair_close(&p);
}

static void queries_give_back_what_was_set(void **state)
{
	(void)state;
	struct pair p;
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	pair_open(&p, &(struct pair_options){ .rnr_retry = 5, .retry_cnt = 6, .timeout = 14, .wr = 33 });
	assert_int_equal(ibv_query_qp(p.a.qp, &attr, ~0, &init), 0);
	assert_int_equal(attr.timeout, 14);
	assert_int_equal(attr.retry_cnt, 6);
	assert_int_equal(attr.rnr_retry, 5);
	assert_int_equal(attr.sq_psn, 100);
	assert_int_equal(attr.rq_psn, 200);
	assert_int_equal(attr.path_mtu, IBV_MTU_1024);
	assert_int_equal(attr.dest_qp_num, p.b.qp->qp_num);
	assert_true(init.cap.max_send_wr >= 33);
	assert_ptr_equal(init.send_cq, p.a.cq);
	pair_close(&p);
}

static void sends_are_refused_before_rts_and_receives_before_init(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &unconnected);
	assert_int_equal(post_recv(&p.a, 1, 0, 8), EINVAL);
	assert_int_equal(post(&p.a, &(struct request){ .opcode = IBV_WR_SEND, .bytes = 8 }), EINVAL);
	to_init(p.a.qp, 0);
	assert_int_equal(post_recv(&p.a, 1, 0, 8), 0);
	to_rtr(p.a.qp, p.b.qp->qp_num, 0, &plain);
	assert_int_equal(post(&p.a, &(struct request){ .opcode = IBV_WR_SEND, .bytes = 8 }), EINVAL);
	pair_close(&p);
}

static void a_full_send_queue_is_enomem_until_completions_are_polled(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &(struct pair_options){ .wr = 4 });
	struct request write = { .opcode = IBV_WR_RDMA_WRITE, .bytes = 8, .remote = &p.b };
	for (int i = 0; i < 4; i++)
		assert_int_equal(post(&p.a, &write), 0);
	assert_int_equal(post(&p.a, &write), ENOMEM);
	next_wc(p.a.cq);
	assert_int_equal(post(&p.a, &write), 0);
	assert_int_equal(post(&p.a, &write), ENOMEM);
	pair_close(&p);
}

static void unsignaled_requests_are_freed_by_the_next_signaled_one(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &(struct pair_options){ .wr = 4, .unsignaled = true });
	struct request write = { .opcode = IBV_WR_RDMA_WRITE, .bytes = 8, .remote = &p.b };
	for (int i = 0; i < 3; i++)
		assert_int_equal(post(&p.a, &write), 0);
	expect_none(p.a.cq);
	write.flags = IBV_SEND_SIGNALED;
	write.id = 4;
	assert_int_equal(post(&p.a, &write), 0);
	assert_int_equal(post(&p.a, &write), ENOMEM);
	assert_int_equal(next_wc(p.a.cq).wr_id, 4);
	expect_none(p.a.cq);
	for (int i = 0; i < 4; i++)
		assert_int_equal(post(&p.a, &write), 0);
	pair_close(&p);
}

static void a_full_receive_queue_is_enomem(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &(struct pair_options){ .wr = 2 });
	assert_int_equal(post_recv(&p.b, 1, 0, 8), 0);
	assert_int_equal(post_recv(&p.b, 2, 0, 8), 0);
	assert_int_equal(post_recv(&p.b, 3, 0, 8), ENOMEM);
	pair_close(&p);
}

static void a_list_is_done_up_to_the_bad_request(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, NULL);
	struct ibv_sge sge = { (uintptr_t)p.a.data, 8, p.a.mr->lkey };
	struct ibv_send_wr wr[3] = {
		{ .wr_id = 1, .next = &wr[1], .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .wr.rdma = { (uintptr_t)p.b.data, p.b.mr->rkey } },
		{ .wr_id = 2, .next = &wr[2], .sg_list = &sge, .num_sge = 3, .opcode = IBV_WR_RDMA_WRITE },
		{ .wr_id = 3, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE },
	}, *bad;
	assert_int_equal(ibv_post_send(p.a.qp, wr, &bad), EINVAL);
	assert_ptr_equal(bad, &wr[1]);
	assert_int_equal(next_wc(p.a.cq).wr_id, 1);
	expect_none(p.a.cq);
	pair_close(&p);
}

static void too_much_inline_data_and_inline_reads_are_refused(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &(struct pair_options){ .inline_bytes = 16 });
	assert_int_equal(post(&p.a, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .bytes = 17, .remote = &p.b, .flags = IBV_SEND_INLINE }), EINVAL);
	assert_int_equal(post(&p.a, &(struct request){ .opcode = IBV_WR_RDMA_READ, .bytes = 8, .remote = &p.b, .flags = IBV_SEND_INLINE }), EINVAL);
	assert_int_equal(post(&p.a, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .bytes = 16, .remote = &p.b, .flags = IBV_SEND_INLINE }), 0);
	pair_close(&p);
}

static void in_sqd_requests_wait_and_in_rts_they_go_on(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, NULL);
	assert_int_equal(modify(p.a.qp, IBV_QPS_SQD, IBV_QP_STATE), 0);
	assert_int_equal(post(&p.a, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .bytes = 8, .remote = &p.b }), 0);
	for (int i = 0; i < 1000; i++)
		expect_none(p.a.cq);
	assert_int_equal(modify(p.a.qp, IBV_QPS_RTS, IBV_QP_STATE), 0);
	assert_int_equal(next_wc(p.a.cq).status, IBV_WC_SUCCESS);
	pair_close(&p);
}

static void going_to_error_flushes_both_queues_in_order(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &(struct pair_options){ .rnr_retry = 7 });
	for (uint64_t i = 0; i < 3; i++) {
		post_recv(&p.a, 10 + i, 0, 8);
		post(&p.a, &(struct request){ .opcode = IBV_WR_SEND, .id = 20 + i, .bytes = 8 });
	}
	to_error(p.a.qp);
	uint64_t recvs = 10, sends = 20;
	for (int i = 0; i < 6; i++) {
		struct ibv_wc wc = next_wc(p.a.cq);
		assert_int_equal(wc.status, IBV_WC_WR_FLUSH_ERR);
		assert_int_equal(wc.wr_id, wc.wr_id < 20 ? recvs++ : sends++);
	}
	post_recv(&p.a, 99, 0, 8);
	assert_int_equal(next_wc(p.a.cq).wr_id, 99);
	pair_close(&p);
}

static void queue_pairs_too_large_are_refused(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, NULL);
	struct ibv_qp_init_attr init = { .send_cq = p.a.cq, .recv_cq = p.a.cq, .qp_type = IBV_QPT_RC, .cap = { .max_send_wr = 1 << 20, .max_send_sge = 1 } };
	assert_null(ibv_create_qp(p.a.pd, &init));
	assert_int_equal(errno, EINVAL);
	init.cap = (struct ibv_qp_cap){ .max_send_wr = 1, .max_send_sge = 100 };
	assert_null(ibv_create_qp(p.a.pd, &init));
	init.cap = (struct ibv_qp_cap){ .max_send_wr = 1, .max_send_sge = 1 };
	init.qp_type = IBV_QPT_RAW_PACKET;
	assert_null(ibv_create_qp(p.a.pd, &init));
	assert_int_equal(errno, EOPNOTSUPP);
	pair_close(&p);
}

static void what_is_in_use_can_not_go(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, NULL);
	assert_int_equal(ibv_dealloc_pd(p.a.pd), EBUSY);
	assert_int_equal(ibv_destroy_cq(p.a.cq), EBUSY);
	pair_close(&p);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(init_needs_port_pkey_and_rights),
		cmocka_unit_test(an_attribute_that_a_transition_does_not_allow_is_refused),
		cmocka_unit_test(states_can_not_be_skipped),
		cmocka_unit_test(a_wrong_cur_state_is_refused),
		cmocka_unit_test(a_port_gid_mtu_or_count_that_does_not_exist_is_refused),
		cmocka_unit_test(queries_give_back_what_was_set),
		cmocka_unit_test(sends_are_refused_before_rts_and_receives_before_init),
		cmocka_unit_test(a_full_send_queue_is_enomem_until_completions_are_polled),
		cmocka_unit_test(unsignaled_requests_are_freed_by_the_next_signaled_one),
		cmocka_unit_test(a_full_receive_queue_is_enomem),
		cmocka_unit_test(a_list_is_done_up_to_the_bad_request),
		cmocka_unit_test(too_much_inline_data_and_inline_reads_are_refused),
		cmocka_unit_test(in_sqd_requests_wait_and_in_rts_they_go_on),
		cmocka_unit_test(going_to_error_flushes_both_queues_in_order),
		cmocka_unit_test(queue_pairs_too_large_are_refused),
		cmocka_unit_test(what_is_in_use_can_not_go),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

/* The extended interfaces: requests built in batches, completions read field by field. */
#include <errno.h>
#include <string.h>
#include "verbs/helper_api.h"

static const struct pair_options plain;

/* Gives a an extended QP with the operations, connected with b's. */
static struct ibv_qp_ex *extend(struct pair *p, uint64_t ops, uint32_t wr)
{
	struct ibv_qp_init_attr_ex init = { .send_cq = p->a.cq, .recv_cq = p->a.cq, .qp_type = IBV_QPT_RC, .sq_sig_all = 1, .pd = p->a.pd,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, .send_ops_flags = ops,
		.cap = { .max_send_wr = wr, .max_recv_wr = 4, .max_send_sge = 2, .max_recv_sge = 1, .max_inline_data = 16 } };
	ibv_destroy_qp(p->a.qp);
	p->a.qp = ibv_create_qp_ex(p->context, &init);
	assert_non_null(p->a.qp);
	to_init(p->a.qp, 0);
	to_init(p->b.qp, IBV_ACCESS_REMOTE_WRITE);
	assert_int_equal(to_rtr(p->a.qp, p->b.qp->qp_num, 0, &plain), 0);
	assert_int_equal(to_rtr(p->b.qp, p->a.qp->qp_num, 0, &plain), 0);
	assert_int_equal(to_rts(p->a.qp, 0, &plain), 0);
	return ibv_qp_to_qp_ex(p->a.qp);
}

static void write_one(struct pair *p, struct ibv_qp_ex *ex, uint64_t id)
{
	ex->wr_id = id;
	ex->wr_flags = 0;
	ibv_wr_rdma_write(ex, p->b.mr->rkey, (uintptr_t)p->b.data);
	ibv_wr_set_sge(ex, p->a.mr->lkey, (uintptr_t)p->a.data, 8);
}

static void a_batch_is_shown_all_at_once(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &(struct pair_options){ .unconnected = true });
	struct ibv_qp_ex *ex = extend(&p, IBV_QP_EX_WITH_RDMA_WRITE, 4);
	ibv_wr_start(ex);
	write_one(&p, ex, 1);
	write_one(&p, ex, 2);
	expect_none(p.a.cq);
	assert_int_equal(ibv_wr_complete(ex), 0);
	assert_int_equal(next_wc(p.a.cq).wr_id, 1);
	assert_int_equal(next_wc(p.a.cq).wr_id, 2);
	pair_close(&p);
}

static void an_aborted_batch_never_was(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &(struct pair_options){ .unconnected = true });
	struct ibv_qp_ex *ex = extend(&p, IBV_QP_EX_WITH_RDMA_WRITE, 4);
	ibv_wr_start(ex);
	write_one(&p, ex, 1);
	ibv_wr_abort(ex);
	ibv_wr_start(ex);
	write_one(&p, ex, 2);
	assert_int_equal(ibv_wr_complete(ex), 0);
	assert_int_equal(next_wc(p.a.cq).wr_id, 2);
	expect_none(p.a.cq);
	pair_close(&p);
}

static void a_batch_that_does_not_fit_fails_as_a_whole(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &(struct pair_options){ .unconnected = true });
	struct ibv_qp_ex *ex = extend(&p, IBV_QP_EX_WITH_RDMA_WRITE, 2);
	ibv_wr_start(ex);
	for (uint64_t i = 0; i < 3; i++)
		write_one(&p, ex, i);
	assert_int_equal(ibv_wr_complete(ex), ENOMEM);
	expect_none(p.a.cq);
	pair_close(&p);
}

static void inline_pieces_are_joined_and_too_many_fail(void **state)
{
	(void)state;
	struct pair p;
	char first[] = "abcd", second[] = "efgh", large[17] = { 0 };
	struct ibv_data_buf pieces[2] = { { first, 4 }, { second, 4 } };
	pair_open(&p, &(struct pair_options){ .unconnected = true });
	struct ibv_qp_ex *ex = extend(&p, IBV_QP_EX_WITH_RDMA_WRITE, 4);
	ibv_wr_start(ex);
	ibv_wr_rdma_write(ex, p.b.mr->rkey, (uintptr_t)p.b.data);
	ibv_wr_set_inline_data_list(ex, 2, pieces);
	assert_int_equal(ibv_wr_complete(ex), 0);
	assert_int_equal(next_wc(p.a.cq).status, IBV_WC_SUCCESS);
	assert_memory_equal(p.b.data, "abcdefgh", 8);
	ibv_wr_start(ex);
	ibv_wr_rdma_write(ex, p.b.mr->rkey, (uintptr_t)p.b.data);
	ibv_wr_set_inline_data(ex, large, sizeof(large));
	assert_int_not_equal(ibv_wr_complete(ex), 0);
	pair_close(&p);
}

static void only_the_operations_asked_for_are_there(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &(struct pair_options){ .unconnected = true });
	assert_null(ibv_qp_to_qp_ex(p.b.qp));
	struct ibv_qp_ex *ex = extend(&p, IBV_QP_EX_WITH_RDMA_WRITE, 4);
	assert_non_null(ex->wr_rdma_write);
	assert_null(ex->wr_send);
	assert_null(ex->wr_set_ud_addr);
	pair_close(&p);
}

static struct ibv_cq_ex *make_cq(struct pair *p, uint64_t fields, struct ibv_qp **qp)
{
	struct ibv_cq_init_attr_ex attr = { .cqe = 16, .wc_flags = fields };
	struct ibv_cq_ex *cq = ibv_create_cq_ex(p->context, &attr);
	assert_non_null(cq);
	struct ibv_qp_init_attr init = { .send_cq = ibv_cq_ex_to_cq(cq), .recv_cq = ibv_cq_ex_to_cq(cq), .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
		.cap = { 4, 4, 1, 1, 0 } };
	*qp = p->a.qp;
	p->a.qp = ibv_create_qp(p->a.pd, &init);
	assert_non_null(p->a.qp);
	to_init(p->a.qp, 0);
	to_init(p->b.qp, IBV_ACCESS_REMOTE_WRITE);
	assert_int_equal(to_rtr(p->a.qp, p->b.qp->qp_num, 0, &plain), 0);
	assert_int_equal(to_rtr(p->b.qp, p->a.qp->qp_num, 0, &plain), 0);
	assert_int_equal(to_rts(p->a.qp, 0, &plain), 0);
	return cq;
}
static void unmake_cq(struct pair *p, struct ibv_cq_ex *cq, struct ibv_qp *qp)
{
	ibv_destroy_qp(p->a.qp);
	p->a.qp = qp;
	assert_int_equal(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)), 0);
	pair_close(p);
}

static void completions_are_read_in_order_and_carry_rising_times(void **state)
{
	(void)state;
	struct pair p;
	struct ibv_qp *qp;
	struct ibv_poll_cq_attr attr = { 0 };
	pair_open(&p, &(struct pair_options){ .unconnected = true });
	struct ibv_cq_ex *cq = make_cq(&p, IBV_WC_EX_WITH_QP_NUM | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP, &qp);
	assert_int_equal(ibv_start_poll(cq, &attr), ENOENT);
	for (uint64_t id = 1; id <= 3; id++)
		post(&p.a, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .id = id, .bytes = 8, .remote = &p.b });
	uint64_t last = 0;
	assert_int_equal(ibv_start_poll(cq, &attr), 0);
	for (uint64_t id = 1; id <= 3; id++) {
		assert_int_equal(cq->wr_id, id);
		assert_int_equal(cq->status, IBV_WC_SUCCESS);
		assert_int_equal(ibv_wc_read_opcode(cq), IBV_WC_RDMA_WRITE);
		assert_int_equal(ibv_wc_read_qp_num(cq), p.a.qp->qp_num);
		assert_true(ibv_wc_read_completion_ts(cq) >= last);
		last = ibv_wc_read_completion_ts(cq);
		assert_int_equal(ibv_next_poll(cq), id < 3 ? 0 : ENOENT);
	}
	ibv_end_poll(cq);
	assert_null(cq->read_imm_data);
	unmake_cq(&p, cq, qp);
}

static void work_can_be_posted_in_the_middle_of_reading(void **state)
{
	(void)state;
	struct pair p;
	struct ibv_qp *qp;
	struct ibv_poll_cq_attr attr = { 0 };
	pair_open(&p, &(struct pair_options){ .unconnected = true });
	struct ibv_cq_ex *cq = make_cq(&p, 0, &qp);
	post(&p.a, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .id = 1, .bytes = 8, .remote = &p.b });
	assert_int_equal(ibv_start_poll(cq, &attr), 0);
	post(&p.a, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .id = 2, .bytes = 8, .remote = &p.b });
	assert_int_equal(ibv_next_poll(cq), 0);
	assert_int_equal(cq->wr_id, 2);
	ibv_end_poll(cq);
	unmake_cq(&p, cq, qp);
}

static void fields_that_need_hardware_are_refused(void **state)
{
	(void)state;
	struct ibv_context *context = open_first();
	struct ibv_cq_init_attr_ex attr = { .cqe = 16, .wc_flags = IBV_WC_EX_WITH_CVLAN };
	assert_null(ibv_create_cq_ex(context, &attr));
	assert_int_equal(errno, EOPNOTSUPP);
	ibv_close_device(context);
}

static void a_queue_resized_keeps_its_completions(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &(struct pair_options){ .cqe = 4 });
	for (uint64_t id = 1; id <= 3; id++)
		post(&p.a, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .id = id, .bytes = 8, .remote = &p.b });
	assert_int_equal(ibv_resize_cq(p.a.cq, 2), EINVAL);
	assert_int_equal(ibv_resize_cq(p.a.cq, 100), 0);
	for (uint64_t id = 1; id <= 3; id++)
		assert_int_equal(next_wc(p.a.cq).wr_id, id);
	pair_close(&p);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_batch_is_shown_all_at_once),
		cmocka_unit_test(an_aborted_batch_never_was),
		cmocka_unit_test(a_batch_that_does_not_fit_fails_as_a_whole),
		cmocka_unit_test(inline_pieces_are_joined_and_too_many_fail),
		cmocka_unit_test(only_the_operations_asked_for_are_there),
		cmocka_unit_test(completions_are_read_in_order_and_carry_rising_times),
		cmocka_unit_test(work_can_be_posted_in_the_middle_of_reading),
		cmocka_unit_test(fields_that_need_hardware_are_refused),
		cmocka_unit_test(a_queue_resized_keeps_its_completions),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

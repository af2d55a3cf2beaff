/* Shared receive queues, XRC, UC. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include "verbs/helper_api.h"

struct shared { struct pair pair; struct ibv_pd *pd; struct ibv_srq *srq; };

static void shared_open(struct shared *shared, uint32_t max_wr)
{
	struct ibv_context *context = open_first();
	shared->pd = ibv_alloc_pd(context);
	shared->srq = ibv_create_srq(shared->pd, &(struct ibv_srq_init_attr){ .attr = { .max_wr = max_wr, .max_sge = 1 } });
	assert_non_null(shared->srq);
	pair_open(&shared->pair, &(struct pair_options){ .srq = shared->srq });
}
static void shared_close(struct shared *shared)
{
	side_close(&shared->pair.a);
	assert_int_equal(ibv_destroy_srq(shared->srq), EBUSY);
	side_close(&shared->pair.b);
	assert_int_equal(ibv_destroy_srq(shared->srq), 0);
	assert_int_equal(ibv_dealloc_pd(shared->pd), 0);
	assert_int_equal(ibv_close_device(shared->pair.context), 0);
}
static int post_shared(struct ibv_srq *srq, struct side *side, uint64_t id)
{
	struct ibv_sge sge = { (uintptr_t)side->data, 64, side->mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1 }, *bad;
	return ibv_post_srq_recv(srq, &wr, &bad);
}

static void a_message_takes_the_next_shared_receive(void **state)
{
	(void)state;
	struct shared s;
	shared_open(&s, 4);
	for (uint64_t id = 1; id <= 2; id++) {
		assert_int_equal(post_shared(s.srq, &s.pair.b, id), 0);
		post(&s.pair.a, &(struct request){ .opcode = IBV_WR_SEND, .bytes = 8 });
		struct ibv_wc wc = next_wc(s.pair.b.cq);
		assert_int_equal(wc.wr_id, id);
		assert_int_equal(wc.qp_num, s.pair.b.qp->qp_num);
	}
	assert_int_equal(post_recv(&s.pair.b, 1, 0, 8), EINVAL);
	shared_close(&s);
}

static void a_full_shared_queue_is_enomem(void **state)
{
	(void)state;
	struct shared s;
	shared_open(&s, 2);
	assert_int_equal(post_shared(s.srq, &s.pair.b, 1), 0);
	assert_int_equal(post_shared(s.srq, &s.pair.b, 2), 0);
	assert_int_equal(post_shared(s.srq, &s.pair.b, 3), ENOMEM);
	shared_close(&s);
}

static void falling_below_the_limit_is_one_event(void **state)
{
	(void)state;
	struct shared s;
	struct ibv_srq_attr attr = { .srq_limit = 2 };
	shared_open(&s, 4);
	for (uint64_t id = 0; id < 3; id++)
		post_shared(s.srq, &s.pair.b, id);
	assert_int_equal(ibv_modify_srq(s.srq, &attr, IBV_SRQ_LIMIT), 0);
	post(&s.pair.a, &(struct request){ .opcode = IBV_WR_SEND, .bytes = 8 });
	assert_false(any_event(s.pair.context));
	post(&s.pair.a, &(struct request){ .opcode = IBV_WR_SEND, .bytes = 8 });
	struct ibv_async_event event = next_event(s.pair.context);
	assert_int_equal(event.event_type, IBV_EVENT_SRQ_LIMIT_REACHED);
	assert_ptr_equal(event.element.srq, s.srq);
	assert_int_equal(ibv_query_srq(s.srq, &attr), 0);
	assert_int_equal(attr.srq_limit, 0);
	post(&s.pair.a, &(struct request){ .opcode = IBV_WR_SEND, .bytes = 8 });
	assert_false(any_event(s.pair.context));
	shared_close(&s);
}

static void a_shared_queue_can_be_resized_with_its_receives(void **state)
{
	(void)state;
	struct shared s;
	struct ibv_srq_attr attr = { .max_wr = 8 };
	shared_open(&s, 2);
	post_shared(s.srq, &s.pair.b, 1);
	post_shared(s.srq, &s.pair.b, 2);
	assert_int_equal(ibv_modify_srq(s.srq, &attr, IBV_SRQ_MAX_WR), 0);
	assert_int_equal(post_shared(s.srq, &s.pair.b, 3), 0);
	for (uint64_t id = 1; id <= 3; id++) {
		post(&s.pair.a, &(struct request){ .opcode = IBV_WR_SEND, .bytes = 8 });
		assert_int_equal(next_wc(s.pair.b.cq).wr_id, id);
	}
	attr.max_wr = 0;
	assert_int_equal(ibv_modify_srq(s.srq, &attr, IBV_SRQ_MAX_WR), EINVAL);
	shared_close(&s);
}

static struct ibv_qp *xrc_qp(struct ibv_context *context, enum ibv_qp_type type, struct side *side, struct ibv_xrcd *xrcd)
{
	struct ibv_qp_init_attr_ex init = { .qp_type = type, .send_cq = side->cq, .recv_cq = side->cq, .pd = side->pd, .xrcd = xrcd, .sq_sig_all = 1,
		.comp_mask = type == IBV_QPT_XRC_SEND ? IBV_QP_INIT_ATTR_PD : IBV_QP_INIT_ATTR_XRCD, .cap = { .max_send_wr = 4, .max_send_sge = 1 } };
	struct ibv_qp *qp = ibv_create_qp_ex(context, &init);
	assert_non_null(qp);
	return qp;
}

static void xrc_delivers_to_the_shared_queue_that_the_request_names(void **state)
{
	(void)state;
	static const struct pair_options options;
	struct pair p;
	pair_open(&p, NULL);
	struct ibv_xrcd *xrcd = ibv_open_xrcd(p.context, &(struct ibv_xrcd_init_attr){ .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
		.fd = -1, .oflags = O_CREAT });
	assert_non_null(xrcd);
	struct ibv_srq_init_attr_ex attr = { .attr = { .max_wr = 4, .max_sge = 1 }, .srq_type = IBV_SRQT_XRC, .xrcd = xrcd, .cq = p.b.cq, .pd = p.b.pd,
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ | IBV_SRQ_INIT_ATTR_PD };
	struct ibv_srq *srq = ibv_create_srq_ex(p.context, &attr);
	assert_non_null(srq);
	uint32_t number;
	assert_int_equal(ibv_get_srq_num(srq, &number), 0);
	struct ibv_qp *from = xrc_qp(p.context, IBV_QPT_XRC_SEND, &p.a, NULL), *to = xrc_qp(p.context, IBV_QPT_XRC_RECV, &p.b, xrcd);
	to_init(from, 0);
	to_init(to, IBV_ACCESS_REMOTE_WRITE);
	assert_int_equal(to_rtr(from, to->qp_num, 0, &options), 0);
	assert_int_equal(to_rtr(to, from->qp_num, 0, &options), 0);
	assert_int_equal(to_rts(from, 0, &options), 0);
	post_shared(srq, &p.b, 3);
	struct ibv_sge sge = { (uintptr_t)p.a.data, 32, p.a.mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .qp_type.xrc.remote_srqn = number }, *bad;
	assert_int_equal(ibv_post_send(from, &wr, &bad), 0);
	assert_int_equal(next_wc(p.a.cq).status, IBV_WC_SUCCESS);
	assert_int_equal(next_wc(p.b.cq).wr_id, 3);
	assert_memory_equal(p.a.data, p.b.data, 32);
	wr.qp_type.xrc.remote_srqn = number ^ 1;
	assert_int_equal(ibv_post_send(from, &wr, &bad), 0);
	assert_int_equal(next_wc(p.a.cq).status, IBV_WC_REM_INV_REQ_ERR);
	struct ibv_qp_open_attr open = { .comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE, .qp_num = to->qp_num,
		.xrcd = xrcd, .qp_type = IBV_QPT_XRC_RECV };
	struct ibv_qp *again = ibv_open_qp(p.context, &open);
	assert_non_null(again);
	assert_int_equal(ibv_destroy_qp(to), 0);
	assert_int_equal(state_of(again), IBV_QPS_ERR);
	assert_int_equal(ibv_close_xrcd(xrcd), EBUSY);
	assert_int_equal(ibv_destroy_qp(again), 0);
	assert_int_equal(ibv_destroy_qp(from), 0);
	assert_int_equal(ibv_destroy_srq(srq), 0);
	assert_int_equal(ibv_close_xrcd(xrcd), 0);
	pair_close(&p);
}

static void an_unreliable_connection_drops_what_the_target_can_not_take(void **state)
{
	(void)state;
	struct pair p;
	pair_open(&p, &(struct pair_options){ .type = IBV_QPT_UC });
	assert_int_equal(post(&p.a, &(struct request){ .opcode = IBV_WR_RDMA_READ, .bytes = 8, .remote = &p.b }), EINVAL);
	post(&p.a, &(struct request){ .opcode = IBV_WR_SEND, .bytes = 8 });
	assert_int_equal(next_wc(p.a.cq).status, IBV_WC_SUCCESS);
	post(&p.a, &(struct request){ .opcode = IBV_WR_RDMA_WRITE, .bytes = 8, .remote = &p.b, .rkey = 1 });
	assert_int_equal(next_wc(p.a.cq).status, IBV_WC_SUCCESS);
	post_recv(&p.b, 1, 0, 64);
	post(&p.a, &(struct request){ .opcode = IBV_WR_SEND, .bytes = 65 });
	post(&p.a, &(struct request){ .opcode = IBV_WR_SEND, .bytes = 64 });
	struct ibv_wc wc = next_wc(p.b.cq);
	assert_int_equal(wc.status, IBV_WC_SUCCESS);
	assert_int_equal(wc.byte_len, 64);
	assert_int_equal(state_of(p.b.qp), IBV_QPS_RTS);
	pair_close(&p);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_message_takes_the_next_shared_receive),
		cmocka_unit_test(a_full_shared_queue_is_enomem),
		cmocka_unit_test(falling_below_the_limit_is_one_event),
		cmocka_unit_test(a_shared_queue_can_be_resized_with_its_receives),
		cmocka_unit_test(xrc_delivers_to_the_shared_queue_that_the_request_names),
		cmocka_unit_test(an_unreliable_connection_drops_what_the_target_can_not_take),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}

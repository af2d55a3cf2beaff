#include "verbs/helper_api.h"
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct ibv_context *open_first(void)
{
	int count;
	struct ibv_device **list = ibv_get_device_list(&count);
	assert_non_null(list);
	assert_true(count >= 1);
	struct ibv_context *context = ibv_open_device(list[0]);
	assert_non_null(context);
	ibv_free_device_list(list);
	return context;
}

struct ibv_ah_attr own_address(struct ibv_context *context)
{
	struct ibv_ah_attr attr = { .is_global = 1, .port_num = 1, .grh = { .hop_limit = 64 } };
	assert_int_equal(ibv_query_gid(context, 1, 0, &attr.grh.dgid), 0);
	return attr;
}

static enum ibv_qp_type type_of(const struct pair_options *options) { return options->type ? options->type : IBV_QPT_RC; }

int to_init(struct ibv_qp *qp, unsigned access)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 0x1111, .qp_access_flags = access };
	return ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
		(qp->qp_type == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS));
}

int to_rtr(struct ibv_qp *qp, uint32_t dest_qpn, uint32_t psn, const struct pair_options *options)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = dest_qpn, .rq_psn = psn,
		.max_dest_rd_atomic = options->no_atomics ? 0 : 4, .min_rnr_timer = options->rnr_timer ? options->rnr_timer : 1,
		.ah_attr = own_address(qp->context) };
	int mask = IBV_QP_STATE;
	attr.ah_attr.grh.traffic_class = options->traffic_class;
	attr.ah_attr.grh.sgid_index = options->gid_index;
	assert_int_equal(ibv_query_gid(qp->context, 1, options->gid_index, &attr.ah_attr.grh.dgid), 0);
	if (qp->qp_type != IBV_QPT_UD)
		mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
	if (qp->qp_type == IBV_QPT_RC || qp->qp_type == IBV_QPT_XRC_RECV)
		mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
	return ibv_modify_qp(qp, &attr, mask);
}

int to_rts(struct ibv_qp *qp, uint32_t psn, const struct pair_options *options)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTS, .sq_psn = psn, .timeout = options->timeout ? options->timeout : 8,
		.retry_cnt = options->retry_cnt ? options->retry_cnt : 1, .rnr_retry = options->rnr_retry, .max_rd_atomic = 4 };
	int mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
	if (qp->qp_type == IBV_QPT_RC || qp->qp_type == IBV_QPT_XRC_SEND)
		mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
	else if (qp->qp_type == IBV_QPT_XRC_RECV)
		mask |= IBV_QP_TIMEOUT;
	return ibv_modify_qp(qp, &attr, mask);
}

void to_error(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };
	assert_int_equal(ibv_modify_qp(qp, &attr, IBV_QP_STATE), 0);
}

enum ibv_qp_state state_of(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	assert_int_equal(ibv_query_qp(qp, &attr, IBV_QP_STATE, &init), 0);
	return attr.qp_state;
}

void side_open(struct side *side, struct ibv_context *context, const struct pair_options *options, bool is_b)
{
	side->pd = ibv_alloc_pd(context);
	assert_non_null(side->pd);
	side->cq = ibv_create_cq(context, options->cqe ? (int)options->cqe : 64, side, is_b ? options->channel : NULL, 0);
	assert_non_null(side->cq);
	struct ibv_qp_init_attr init = { .send_cq = side->cq, .recv_cq = side->cq, .srq = is_b ? options->srq : NULL, .qp_type = type_of(options),
		.sq_sig_all = !options->unsignaled, .cap = { .max_send_wr = options->wr ? options->wr : 16, .max_recv_wr = options->wr ? options->wr : 16,
		.max_send_sge = options->sge ? options->sge : 2, .max_recv_sge = options->sge ? options->sge : 2,
		.max_inline_data = options->inline_bytes } };
	side->qp = ibv_create_qp(init.srq ? init.srq->pd : side->pd, &init);
	assert_non_null(side->qp);
	side->data = aligned_alloc(4096, SIDE_BYTES);
	memset(side->data, is_b ? 0xbb : 0xaa, SIDE_BYTES);
	side->mr = ibv_reg_mr(init.srq ? init.srq->pd : side->pd, side->data, SIDE_BYTES, SIDE_ACCESS);
	assert_non_null(side->mr);
}

void side_close(struct side *side)
{
	assert_int_equal(ibv_destroy_qp(side->qp), 0);
	assert_int_equal(ibv_destroy_cq(side->cq), 0);
	assert_int_equal(ibv_dereg_mr(side->mr), 0);
	assert_int_equal(ibv_dealloc_pd(side->pd), 0);
	free(side->data);
}

void pair_open(struct pair *pair, const struct pair_options *given)
{
	static const struct pair_options plain;
	const struct pair_options *options = given ? given : &plain;
	unsigned access = options->access ? options->access : IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
	memset(pair, 0, sizeof(*pair));
	pair->context = options->srq ? options->srq->context : options->channel ? options->channel->context : open_first();
	side_open(&pair->a, pair->context, options, false);
	side_open(&pair->b, pair->context, options, true);
	if (options->unconnected)
		return;
	struct ibv_qp *a = pair->a.qp, *b = pair->b.qp;
	assert_int_equal(to_init(a, access), 0);
	assert_int_equal(to_init(b, access), 0);
	assert_int_equal(to_rtr(a, b->qp_num, 200, options), 0);
	assert_int_equal(to_rtr(b, a->qp_num, 100, options), 0);
	assert_int_equal(to_rts(a, 100, options), 0);
	assert_int_equal(to_rts(b, 200, options), 0);
}

void pair_close(struct pair *pair)
{
	side_close(&pair->a);
	side_close(&pair->b);
	assert_int_equal(ibv_close_device(pair->context), 0);
}

int post_recv(struct side *side, uint64_t id, uint32_t offset, uint32_t bytes)
{
	struct ibv_sge sge = { .addr = (uintptr_t)side->data + offset, .length = bytes, .lkey = side->mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1 }, *bad;
	return ibv_post_recv(side->qp, &wr, &bad);
}

int post(struct side *side, const struct request *request)
{
	struct ibv_sge sge = { .addr = (uintptr_t)side->data + request->offset, .length = request->bytes,
		.lkey = request->lkey ? request->lkey : side->mr->lkey };
	struct ibv_send_wr wr = { .wr_id = request->id, .sg_list = &sge, .num_sge = 1, .opcode = request->opcode, .send_flags = request->flags,
		.imm_data = request->imm }, *bad;
	uint64_t addr = request->remote ? (uintptr_t)request->remote->data + request->remote_offset : 0;
	uint32_t rkey = request->rkey ? request->rkey : request->remote ? request->remote->mr->rkey : 0;
	if (request->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || request->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		wr.wr.atomic.remote_addr = addr;
		wr.wr.atomic.rkey = rkey;
		wr.wr.atomic.compare_add = request->compare_add;
		wr.wr.atomic.swap = request->swap;
	} else {
		wr.wr.rdma.remote_addr = addr;
		wr.wr.rdma.rkey = rkey;
	}
	return ibv_post_send(side->qp, &wr, &bad);
}

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

struct ibv_wc next_wc(struct ibv_cq *cq)
{
	struct ibv_wc wc;
	for (double end = now() + 10; now() < end;) {
		int got = ibv_poll_cq(cq, 1, &wc);
		assert_true(got >= 0);
		if (got)
			return wc;
	}
	fail_msg("no completion within 10 s");
	return wc;
}

void expect_none(struct ibv_cq *cq)
{
	struct ibv_wc wc;
	assert_int_equal(ibv_poll_cq(cq, 1, &wc), 0);
}

bool any_event(struct ibv_context *context)
{
	struct pollfd fd = { .fd = context->async_fd, .events = POLLIN };
	return poll(&fd, 1, 0) == 1;
}

struct ibv_async_event next_event(struct ibv_context *context)
{
	struct ibv_async_event event;
	struct pollfd fd = { .fd = context->async_fd, .events = POLLIN };
	assert_int_equal(poll(&fd, 1, 10000), 1);
	assert_int_equal(ibv_get_async_event(context, &event), 0);
	ibv_ack_async_event(&event);
	return event;
}

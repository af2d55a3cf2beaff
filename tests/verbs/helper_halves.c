#include "verbs/helper_halves.h"
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

struct half a, b;
struct ibv_context *halves_context;
struct ibv_pd *halves_pd;

/* The port is shared with other tests: its keeper is beside the library, which isn't linked here. */
void halves_prepare(const char *self)
{
	char real[PATH_MAX], path[PATH_MAX];
	if (!realpath(self, real))
		real[0] = 0;
	const char *end = strstr(real, "/tests/verbs/");
	snprintf(path, sizeof(path), "%.*s/lib/telpher-verbs/telpher-verbs-keeper", end ? (int)(end - real) : 0, real);
	setenv("TELPHER_VERBS_KEEPER", path, 1);
	setenv("TELPHER_VERBS_HIDE_REAL", "1", 1);
	setenv("TELPHER_VERBS_CARRIER", "wire", 1);
}

void halves_open_device(void)
{
	struct tp_device *devices;
	assert_true(tp_card_devices(&devices) >= 1);
	if (!halves_context) {
		halves_context = tp_context_open(&devices[0]);
		halves_pd = tp_pd_alloc(halves_context);
	}
}

void half_open(struct half *half, const struct halves_options *options, struct ibv_srq *srq)
{
	half->cq = tp_cq_create(halves_context, 4 * HALF_DEPTH, NULL, NULL, 0);
	struct ibv_qp_init_attr_ex attr = { .send_cq = half->cq, .recv_cq = half->cq, .qp_type = options->type ? options->type : IBV_QPT_RC,
		.sq_sig_all = 1, .pd = halves_pd, .srq = srq, .comp_mask = IBV_QP_INIT_ATTR_PD,
		.cap = { .max_send_wr = HALF_DEPTH, .max_recv_wr = HALF_DEPTH, .max_send_sge = 1, .max_recv_sge = 1 } };
	half->qp = tp_qp_create(halves_context, &attr);
	half->data = calloc(1, HALF_BYTES);
	half->mr = tp_mr_reg(halves_pd, half->data, HALF_BYTES, (uintptr_t)half->data,
		IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
	assert_true(half->cq && half->qp && half->data && half->mr);
}

void half_connect(struct half *half, const struct half *other, const struct halves_options *options)
{
	struct tp_gid gid;
	bool reliable = half->qp->qp_type != IBV_QPT_UC;
	assert_true(tp_port_gid(tp_card_port(halves_context, 1), 0, &gid));
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };
	assert_int_equal(tp_qp_modify(half->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), 0);
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = other->qp->qp_num, .max_dest_rd_atomic = 4,
		.min_rnr_timer = 16, .ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = gid.gid, .hop_limit = 1 } } };
	int mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
	assert_int_equal(tp_qp_modify(half->qp, &attr, mask | (reliable ? IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER : 0)), 0);
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = options->timeout ? options->timeout : 20, .retry_cnt = 7, .rnr_retry = 7,
		.max_rd_atomic = 4 };
	mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
	assert_int_equal(tp_qp_modify(half->qp, &attr, mask | (reliable ? IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC : 0)), 0);
}

void halves_open(const struct halves_options *options)
{
	halves_open_device();
	half_open(&a, options, NULL);
	half_open(&b, options, options->srq);
	half_connect(&a, &b, options);
	half_connect(&b, &a, options);
	assert_string_equal(half_qp(&a)->carrier->name, "wire");
}

void half_close(struct half *half)
{
	if (half->qp)
		assert_int_equal(tp_qp_destroy(half->qp), 0);
	assert_int_equal(tp_mr_dereg(half->mr), 0);
	assert_int_equal(tp_cq_destroy(half->cq), 0);
	free(half->data);
}

void halves_close(void)
{
	half_close(&a);
	half_close(&b);
}

void half_receive(struct half *half, int count)
{
	struct ibv_sge sge = { (uintptr_t)half->data, HALF_BYTES, half->mr->lkey };
	for (int i = 0; i < count; i++) {
		struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;
		assert_int_equal(tp_qp_post_recv(half->qp, &wr, &bad), 0);
	}
}

void half_request(struct half *from, struct half *to, enum ibv_wr_opcode opcode, uint32_t bytes, int count)
{
	struct ibv_sge sge = { (uintptr_t)from->data, bytes, from->mr->lkey };
	for (int i = 0; i < count; i++) {
		struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = opcode, .wr.rdma = { (uintptr_t)to->data, to->mr->rkey } }, *bad;
		assert_int_equal(tp_qp_post_send(from->qp, &wr, &bad), 0);
	}
}

enum ibv_wc_status half_status(struct half *half)
{
	time_t until = time(NULL) + 30;
	struct ibv_wc wc;
	int got;
	while ((got = tp_cq_poll(half->cq, 1, &wc)) == 0 && time(NULL) < until)
		;
	assert_int_equal(got, 1);
	return wc.status;
}

void half_complete(struct half *half, int count)
{
	while (count--)
		assert_int_equal(half_status(half), IBV_WC_SUCCESS);
}

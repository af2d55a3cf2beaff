/* Queue pairs of an id, and their way through the states. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <rdma/rdma_verbs.h>
#include "verbs/rdmacm/cm.h"

#define UDP_QKEY 0x01234567u

static int init_attr(const struct cm_id *id, struct ibv_qp_attr *attr)
{
	attr->port_num = id->pub.port_num;
	attr->pkey_index = 0;
	if (id->ud) {
		attr->qkey = UDP_QKEY;
		return IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;
	}
	attr->qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
	return IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
}

static int rtr_attr(const struct cm_id *id, struct ibv_qp_attr *attr)
{
	if (id->ud)
		return IBV_QP_STATE;
	attr->ah_attr = (struct ibv_ah_attr){ .is_global = 1, .port_num = id->pub.port_num, .grh = { .dgid = id->pub.route.addr.addr.ibaddr.dgid,
		.sgid_index = id->sgid_index, .hop_limit = 64, .traffic_class = id->tos } };
	attr->path_mtu = (enum ibv_mtu)id->mtu;
	attr->dest_qp_num = id->remote_qpn;
	/* What a message calls its starting PSN is the one that its receiver is to begin with. */
	attr->rq_psn = id->psn;
	attr->max_dest_rd_atomic = id->responder_resources;
	attr->min_rnr_timer = 0;            /* 655 ms, as the kernel's connection manager has it */
	return IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
}

static int rts_attr(const struct cm_id *id, struct ibv_qp_attr *attr)
{
	attr->sq_psn = id->ud ? id->psn : id->remote_psn;
	if (id->ud)
		return IBV_QP_STATE | IBV_QP_SQ_PSN;
	attr->timeout = id->ack_timeout;
	attr->retry_cnt = id->retry_count;
	attr->rnr_retry = id->rnr_retry_count;
	attr->max_rd_atomic = id->initiator_depth;
	return IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
}

int rdma_init_qp_attr(struct rdma_cm_id *pub, struct ibv_qp_attr *attr, int *mask)
{
	struct cm_id *id = cm_of(pub);
	enum ibv_qp_state state = attr->qp_state;
	memset(attr, 0, sizeof(*attr));
	attr->qp_state = state;
	switch (state) {
	case IBV_QPS_INIT: *mask = init_attr(id, attr); return 0;
	case IBV_QPS_RTR: *mask = rtr_attr(id, attr); return 0;
	case IBV_QPS_RTS: *mask = rts_attr(id, attr); return 0;
	default: return cm_fail(EINVAL);
	}
}

int cm_qp_to(struct cm_id *id, enum ibv_qp_state state)
{
	struct ibv_qp_attr attr = { .qp_state = state };
	int mask = IBV_QP_STATE;
	if (state != IBV_QPS_ERR && rdma_init_qp_attr(&id->pub, &attr, &mask))
		return -1;
	struct ibv_qp *qp = tp_card_inner_qp_hold(id->qpn);
	if (!qp)
		return cm_fail(ENOENT);
	int error = ibv_modify_qp(qp, &attr, mask);
	tp_card_inner_qp_let_go(qp);
	return error ? cm_fail(error) : 0;
}

/* Queues that the program left to us: one completion queue for each direction, with a channel. */
static int make_cqs(struct rdma_cm_id *pub, uint32_t send, uint32_t receive)
{
	if (!pub->send_cq && (!(pub->send_cq_channel = ibv_create_comp_channel(pub->verbs)) ||
		!(pub->send_cq = ibv_create_cq(pub->verbs, (int)(send ? send : 1), pub, pub->send_cq_channel, 0))))
		return -1;
	if (!pub->recv_cq && (!(pub->recv_cq_channel = ibv_create_comp_channel(pub->verbs)) ||
		!(pub->recv_cq = ibv_create_cq(pub->verbs, (int)(receive ? receive : 1), pub, pub->recv_cq_channel, 0))))
		return -1;
	return 0;
}

static void destroy_cqs(struct rdma_cm_id *pub)
{
	if (pub->recv_cq)
		ibv_destroy_cq(pub->recv_cq);
	if (pub->recv_cq_channel)
		ibv_destroy_comp_channel(pub->recv_cq_channel);
	if (pub->send_cq)
		ibv_destroy_cq(pub->send_cq);
	if (pub->send_cq_channel)
		ibv_destroy_comp_channel(pub->send_cq_channel);
	pub->send_cq = pub->recv_cq = NULL;
	pub->send_cq_channel = pub->recv_cq_channel = NULL;
}

int rdma_create_qp_ex(struct rdma_cm_id *pub, struct ibv_qp_init_attr_ex *attr)
{
	struct cm_id *id = cm_of(pub);
	if (pub->qp || !pub->verbs)
		return cm_fail(EINVAL);
	if (!(attr->comp_mask & IBV_QP_INIT_ATTR_PD)) {
		attr->comp_mask |= IBV_QP_INIT_ATTR_PD;
		attr->pd = pub->pd;
	}
	if (!attr->pd || attr->pd->context != pub->verbs)
		return cm_fail(EINVAL);
	bool own = !attr->send_cq || !attr->recv_cq;
	if (own && make_cqs(pub, attr->cap.max_send_wr, attr->cap.max_recv_wr)) {
		destroy_cqs(pub);
		return -1;
	}
	attr->send_cq = attr->send_cq ? attr->send_cq : pub->send_cq;
	attr->recv_cq = attr->recv_cq ? attr->recv_cq : pub->recv_cq;
	attr->srq = attr->srq ? attr->srq : pub->srq;
	pub->qp = ibv_create_qp_ex(pub->verbs, attr);
	if (!pub->qp) {
		int error = errno;
		destroy_cqs(pub);
		return cm_fail(error);
	}
	pub->pd = attr->pd;
	id->qpn = pub->qp->qp_num;
	if (cm_qp_to(id, IBV_QPS_INIT) || (id->ud && (cm_qp_to(id, IBV_QPS_RTR) || cm_qp_to(id, IBV_QPS_RTS)))) {
		int error = errno;
		rdma_destroy_qp(pub);
		return cm_fail(error);
	}
	return 0;
}

int rdma_create_qp(struct rdma_cm_id *pub, struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	struct ibv_qp_init_attr_ex wide = { 0 };
	memcpy(&wide, attr, sizeof(*attr));
	wide.comp_mask = IBV_QP_INIT_ATTR_PD;
	wide.pd = pd ? pd : pub->pd;
	int result = rdma_create_qp_ex(pub, &wide);
	memcpy(attr, &wide, sizeof(*attr));
	return result;
}

void rdma_destroy_qp(struct rdma_cm_id *pub)
{
	pthread_mutex_lock(&cm_lock);
	struct ibv_qp *qp = pub->qp;
	pub->qp = NULL;
	pthread_mutex_unlock(&cm_lock);
	if (qp)
		ibv_destroy_qp(qp);
	destroy_cqs(pub);
}

int rdma_create_srq_ex(struct rdma_cm_id *pub, struct ibv_srq_init_attr_ex *attr)
{
	if (pub->srq || !pub->verbs)
		return cm_fail(EINVAL);
	if (!(attr->comp_mask & IBV_SRQ_INIT_ATTR_PD)) {
		attr->comp_mask |= IBV_SRQ_INIT_ATTR_PD;
		attr->pd = pub->pd;
	}
	pub->srq = ibv_create_srq_ex(pub->verbs, attr);
	return pub->srq ? 0 : -1;
}

int rdma_create_srq(struct rdma_cm_id *pub, struct ibv_pd *pd, struct ibv_srq_init_attr *attr)
{
	struct ibv_srq_init_attr_ex wide = { .srq_context = attr->srq_context, .attr = attr->attr, .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD,
		.srq_type = IBV_SRQT_BASIC, .pd = pd ? pd : pub->pd };
	int result = rdma_create_srq_ex(pub, &wide);
	attr->attr = wide.attr;
	return result;
}

void rdma_destroy_srq(struct rdma_cm_id *pub)
{
	if (pub->srq)
		ibv_destroy_srq(pub->srq);
	pub->srq = NULL;
}

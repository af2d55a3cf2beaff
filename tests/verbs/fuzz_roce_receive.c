/* Whatever packets come in, with a right ICRC and from the peer, in whatever order: nothing breaks, and memory outside of the
 * region that the QP may write stays as it was. Input: packets, each {length, opcode, distance of the PSN, flags, bytes}. */
#include <arpa/inet.h>
#include <endian.h>
#include <stdlib.h>
#include <string.h>
#include "verbs/internal.h"
#include "verbs/rc.h"
#include "verbs/wire_fault.h"

enum { REGION = 8192, GUARD = 64, PEER_QPN = 0x777777 };

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static uint8_t memory[GUARD + REGION + GUARD];

static void open_all(void)
{
	struct tp_device *devices;
	setenv("TELPHER_VERBS_SHARE", "0", 1);
	setenv("TELPHER_VERBS_IFNAME", "lo", 1);
	setenv("TELPHER_VERBS_CARRIER", "wire", 1);
	setenv("TELPHER_VERBS_FAULT", "dead", 1);   /* what is answered goes nowhere */
	if (tp_card_devices(&devices) < 1 || !(context = tp_context_open(&devices[0])))
		abort();
	pd = tp_pd_alloc(context);
	cq = tp_cq_create(context, 1024, NULL, NULL, 0);
	mr = tp_mr_reg(pd, memory + GUARD, REGION, 0x10000, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC);
	if (!pd || !cq || !mr)
		abort();
}

static struct ibv_qp *open_qp(enum ibv_qp_type type)
{
	struct ibv_qp_init_attr_ex init = { .qp_type = type, .send_cq = cq, .recv_cq = cq, .pd = pd, .comp_mask = IBV_QP_INIT_ATTR_PD,
		.cap = { .max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1 }, .sq_sig_all = 1 };
	struct ibv_qp *qp = tp_qp_create(context, &init);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC };
	if (!qp || tp_qp_modify(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
		abort();
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_256, .dest_qp_num = PEER_QPN, .rq_psn = 100, .max_dest_rd_atomic = 4,
		.min_rnr_timer = 1, .ah_attr = { .is_global = 1, .port_num = 1, .grh = { .hop_limit = 1 } } };
	struct tp_gid gid;
	if (!tp_port_gid(tp_card_port(context, 1), 0, &gid))
		abort();
	attr.ah_attr.grh.dgid = gid.gid;
	int rtr = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
	if (tp_qp_modify(qp, &attr, type == IBV_QPT_RC ? rtr | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER : rtr))
		abort();
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .sq_psn = 100, .timeout = 20, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 4 };
	int rts = IBV_QP_STATE | IBV_QP_SQ_PSN;
	if (tp_qp_modify(qp, &attr, type == IBV_QPT_RC ? rts | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC : rts))
		abort();
	return qp;
}

static void post_work(struct ibv_qp *qp, bool reliable)
{
	struct ibv_sge sge = { (uintptr_t)memory + GUARD, 1000, mr->lkey };
	struct ibv_recv_wr receive = { .sg_list = &sge, .num_sge = 1 }, *bad_receive;
	struct ibv_send_wr send = { .sg_list = &sge, .num_sge = 1, .opcode = reliable ? IBV_WR_RDMA_READ : IBV_WR_SEND }, *bad_send;
	sge.addr = 0x10000;
	for (int i = 0; i < 4; i++)
		tp_qp_post_recv(qp, &receive, &bad_receive);
	tp_qp_post_send(qp, &send, &bad_send);
	send.opcode = IBV_WR_RDMA_WRITE;
	send.wr.rdma.rkey = 1;
	tp_qp_post_send(qp, &send, &bad_send);
}

static void feed(struct ibv_qp *ibv, const uint8_t *bytes, size_t count)
{
	struct tp_rc *rc = tp_rc_of((struct tp_qp *)ibv);
	uint8_t data[600] = { 0 };
	if (!rc || count < 4)
		return;
	bool response = bytes[3] & 1;
	uint32_t psn = tp_psn_add(response ? 100 : ((struct tp_qp *)ibv)->recv_psn, (uint32_t)(int32_t)(int8_t)bytes[2]);
	size_t length = TP_MIN(count - 4, sizeof(data) - 16);
	data[0] = bytes[1];
	data[1] = (uint8_t)(bytes[3] & 0xf0);
	data[2] = data[3] = 0xff;
	uint32_t qpn = htobe32(ibv->qp_num), psn_field = htobe32(psn | (bytes[3] & 2 ? 0x80000000u : 0));
	memcpy(data + 4, &qpn, 4);
	memcpy(data + 8, &psn_field, 4);
	memcpy(data + 12, bytes + 4, length);
	/* Half of the packets name the region. */
	uint32_t rkey = htobe32(mr->rkey);
	if (bytes[3] & 4 && length >= 12) {
		uint64_t addr = htobe64(0x10000 + (bytes[0] & 0x7f) * 64u);
		memcpy(data + 12, &addr, 8);
		memcpy(data + 20, &rkey, 4);
	}
	struct tp_ingress in = { .endpoint = rc->endpoint, .from = rc->route.to, .to = rc->endpoint->addr, .data = data,
		.bytes = (uint32_t)(12 + length + TP_WIRE_ICRC_BYTES) };
	in.from.v4.sin_port = htons(50000);
	struct tp_icrc icrc;
	tp_icrc_prepare(&in.from, &in.to, &icrc);
	tp_icrc_store(data + 12 + length, tp_icrc_of(&icrc, 0, data, 12 + length));
	tp_wire_take(&in);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	if (!context)
		open_all();
	if (bytes < 1)
		return 0;
	bool reliable = data[0] & 1;
	struct ibv_qp *qp = open_qp(reliable ? IBV_QPT_RC : IBV_QPT_UC);
	post_work(qp, reliable);
	for (size_t at = 1; at + 4 < bytes;) {
		size_t length = TP_MIN((size_t)data[at] + 4, bytes - at);
		feed(qp, data + at, length);
		at += length;
	}
	tp_qp_destroy(qp);
	struct ibv_wc wc[32];
	while (tp_cq_poll(cq, 32, wc) > 0)
		;
	for (int i = 0; i < GUARD; i++)
		if (memory[i] || memory[GUARD + REGION + i])
			abort();
	return 0;
}

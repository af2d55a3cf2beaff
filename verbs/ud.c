/* Datagrams. A UD QP reaches this process's QPs directly and all others by the wire; a multicast goes both ways. */
#include <arpa/inet.h>
#include <errno.h>
#include <string.h>
#include "verbs/internal.h"

int (*tp_engine_wire_datagram)(struct tp_qp *qp, const struct tp_wqe *wqe, const struct tp_span *spans, int count);

int (*tp_engine_wire_listen)(struct tp_port *port);

/* ---- the target ---- */

static bool accepts_locked(struct tp_qp *qp, const struct tp_datagram *datagram)
{
	if (qp->ibv.qp_type != IBV_QPT_UD || !tp_target_receives(qp))
		return false;
	if (qp->attr.qkey == datagram->qkey)
		return true;
	tp_counter_add(qp->port, TP_CNT_PORT_RCV_ERRORS, 1);
	return false;
}

static void take_datagram_locked(struct tp_qp *qp, const struct tp_datagram *datagram)
{
	if (tp_target_begin_locked(qp, 0) != TP_REPLY_ACK)
		return;
	if (tp_target_place_locked(qp, 0, datagram->grh, 40) != TP_REPLY_ACK ||
		tp_target_place_spans_locked(qp, 40, datagram->spans, datagram->nspans) != TP_REPLY_ACK) {
		/* Too small a receive (the 40 bytes forgotten?), or a wrong key: its completion says which. */
		tp_qp_fail_locked(qp, IBV_QPS_ERR, -1);
		return;
	}
	struct tp_arrival arrival = { .opcode = IBV_WC_RECV, .byte_len = datagram->bytes + 40, .imm = datagram->imm,
		.wc_flags = IBV_WC_GRH | (datagram->has_imm ? IBV_WC_WITH_IMM : 0u), .src_qp = datagram->src_qp, .sl = datagram->sl,
		.solicited = datagram->solicited };
	tp_target_finish_locked(qp, &arrival);
	tp_counter_add(qp->port, TP_CNT_PORT_RCV_PACKETS, 1);
	tp_counter_add(qp->port, TP_CNT_PORT_RCV_DATA, datagram->bytes / 4);
}

void tp_target_datagram(struct tp_qp *qp, const struct tp_datagram *datagram)
{
	pthread_mutex_lock(&qp->lock);
	if (accepts_locked(qp, datagram))
		take_datagram_locked(qp, datagram);
	pthread_mutex_unlock(&qp->lock);
}

static uint16_t ip_checksum(const uint8_t *header)
{
	uint32_t sum = 0;
	for (int i = 0; i < 20; i += 2)
		sum += (uint32_t)header[i] << 8 | header[i + 1];
	while (sum >> 16)
		sum = (sum & 0xffff) + (sum >> 16);
	return htons((uint16_t)~sum);
}

void tp_engine_make_grh(const struct tp_av *av, uint32_t bytes, uint8_t grh[40])
{
	memset(grh, 0, 40);
	uint16_t length;
	if (av->to.sa.sa_family == AF_INET && av->type != IBV_GID_TYPE_ROCE_V1) {
		uint8_t *ip = grh + 20;
		length = htons((uint16_t)(20 + 8 + bytes));
		ip[0] = 0x45;
		ip[1] = av->traffic_class;
		memcpy(ip + 2, &length, 2);
		ip[6] = 0x40;
		ip[8] = av->hop_limit;
		ip[9] = IPPROTO_UDP;
		memcpy(ip + 12, av->sgid.raw + 12, 4);
		memcpy(ip + 16, av->dgid.raw + 12, 4);
		uint16_t sum = ip_checksum(ip);
		memcpy(ip + 10, &sum, 2);
		return;
	}
	uint32_t word = htonl(6u << 28 | (uint32_t)av->traffic_class << 20 | (av->flow_label & 0xfffff));
	length = htons((uint16_t)(8 + bytes));
	memcpy(grh, &word, 4);
	memcpy(grh + 4, &length, 2);
	grh[6] = av->type == IBV_GID_TYPE_ROCE_V1 ? 0x1b : IPPROTO_UDP;
	grh[7] = av->hop_limit;
	memcpy(grh + 8, av->sgid.raw, 16);
	memcpy(grh + 24, av->dgid.raw, 16);
}

/* ---- the sender ---- */

static int attach(struct tp_qp *qp) { return tp_engine_wire_listen ? tp_engine_wire_listen(qp->port) : 0; }
static void stop(struct tp_qp *qp) { (void)qp; }

static void deliver(struct tp_qp *qp, const struct tp_wqe *wqe, const struct tp_span *spans, int count)
{
	const struct tp_av *av = &wqe->ud.av;
	uint8_t grh[40];
	/* BTH, DETH, immediate, padding and ICRC are part of the length that the header gives. */
	uint32_t imm = wqe->opcode == IBV_WR_SEND_WITH_IMM ? 4 : 0;
	tp_engine_make_grh(av, 12 + 8 + imm + (uint32_t)tp_align_up(wqe->length, 4) + 4, grh);
	struct tp_datagram datagram = { .grh = grh, .spans = spans, .nspans = count, .bytes = wqe->length, .src_qp = qp->ibv.qp_num,
		.qkey = wqe->ud.qkey & 0x80000000u ? qp->attr.qkey : wqe->ud.qkey, .imm = imm ? wqe->imm : 0, .has_imm = imm != 0,
		.dest_qp = wqe->ud.qpn, .solicited = wqe->flags & IBV_SEND_SOLICITED, .sl = tp_engine_packet_kind(av) };
	struct tp_port *port = tp_card_port(qp->ibv.context, av->port);
	bool multicast = av->dgid.raw[0] == 0xff;
	if (multicast)
		tp_target_multicast(port, &av->dgid, qp, &datagram);
	if (!multicast && tp_engine_is_local(av, wqe->ud.qpn)) {
		struct tp_qp *target = tp_qp_get(wqe->ud.qpn);
		if (target) {
			tp_target_datagram(target, &datagram);
			tp_qp_put(target);
		}
	} else if (tp_engine_wire_datagram) {
		tp_engine_wire_datagram(qp, wqe, spans, count);
	}
	tp_counter_add(port, TP_CNT_PORT_XMIT_PACKETS, 1);
	tp_counter_add(port, multicast ? TP_CNT_MULTICAST_XMIT : TP_CNT_UNICAST_XMIT, 1);
	tp_counter_add(port, TP_CNT_PORT_XMIT_DATA, wqe->length / 4);
}

static void run(struct tp_qp *qp)
{
	while (tp_qp_sends(qp) && qp->sq.exec != qp->sq.head) {
		struct tp_wqe *wqe = tp_sq_at(&qp->sq, qp->sq.exec);
		struct tp_span spans[TP_CARD_SGE];
		enum ibv_wc_status status = IBV_WC_SUCCESS;
		int count = 0;
		if (wqe->length > tp_mtu_bytes(qp->port->mtu))
			status = IBV_WC_LOC_LEN_ERR;
		else if ((count = tp_wqe_enter(qp, wqe, 0, spans)) < 0)
			status = IBV_WC_LOC_PROT_ERR;
		qp->sq.exec++;
		if (status == IBV_WC_SUCCESS) {
			pthread_mutex_unlock(&qp->lock);
			deliver(qp, wqe, spans, count);
			pthread_mutex_lock(&qp->lock);
			tp_span_leave(spans, count);
		}
		tp_sq_complete_locked(qp, status, 0);
	}
}

const struct tp_carrier tp_datagrams = { .name = "datagrams", .attach = attach, .run = run, .stop = stop, .detach = stop };

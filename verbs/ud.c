/* Datagrams at their target, whatever way they came; and the header that their receives begin with. */
#include <arpa/inet.h>
#include <errno.h>
#include <string.h>
#include "verbs/internal.h"

static bool accepts_locked(struct tp_qp *qp, const struct tp_datagram *datagram)
{
	if (qp->ibv.qp_type != IBV_QPT_UD || !tp_target_receives(qp))
		return false;
	if (datagram->dgid && tp_port_find_gid(qp->port, datagram->dgid, (int)datagram->gid_type) < 0)
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

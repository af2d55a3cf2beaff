/* Faults and captures on the short way, where there are no packets: what would have happened to them, and what they would have been.
 *
 * While one of two processes captures, or has faults that strike packets, all their requests go through the ring, so that both
 * see each. A capture gets the packets that the wire would carry, with their answers. A packet that would be lost costs the time in
 * which the wire repairs that (UC: the message); where none would get through nobody is there. A pair that meets while there
 * are faults takes the wire, where they are real. */
#include <string.h>
#include <time.h>
#include "verbs/capture.h"
#include "verbs/fault.h"
#include "verbs/internal.h"
#include "verbs/path.h"
#include "verbs/wire_fault.h"

#define REPAIR_NS 30000u            /* of a packet that others follow */
#define PROBE_NS 1000000u           /* of the last one */
#define PORT_FIRST 49152u

/* ---- watched or not ---- */

static bool is_special(void) { return tp_capture_on() || tp_fault_wire() || tp_fault_on(TP_FAULT_SCATTER); }

bool tp_path_is_watched(const struct tp_path_link *link)
{
	return is_special() || atomic_load_explicit(&link->yard->watched, memory_order_relaxed);
}

void tp_path_watch(void)
{
	if (tp_path_own_yard)
		atomic_store_explicit(&tp_path_own_yard->watched, is_special(), memory_order_relaxed);
}

/* ---- faults ---- */

static struct tp_path_fate fate_of(struct tp_qp *qp, bool out, const struct tp_path_request *request)
{
	uint32_t mtu = tp_mtu_bytes(qp->attr.path_mtu), packets = tp_packets(request->length, qp->attr.path_mtu);
	bool read = request->opcode == IBV_WR_RDMA_READ;
	const union tp_addr *here = &qp->av.from, *there = &qp->av.to;
	/* BTH, RETH and ICRC, as the wire counts a packet. */
	struct tp_fault_stream request_way = { .from = out ? here : there, .to = out ? there : here, .tos = qp->av.traffic_class, .out = out,
		.packets = read ? 1 : packets, .bytes = (read ? 0 : TP_MIN(request->length, mtu)) + 12 + 16 + 4 };
	struct tp_fault_stream answer_way = { .from = request_way.to, .to = request_way.from, .tos = qp->av.traffic_class, .out = !out,
		.packets = read ? packets : 1, .bytes = (read ? TP_MIN(request->length, mtu) : 0) + 12 + 4 + 4 };
	struct tp_path_fate fate = { 0 };
	const struct tp_fault_stream *ways[] = { &request_way, &answer_way };
	int count = tp_qp_reliable(qp->ibv.qp_type) ? 2 : 1;
	for (int i = 0; i < count; i++) {
		struct tp_fault_toll toll = tp_fault_stream(ways[i]);
		fate.never |= toll.never;
		fate.lost |= toll.never || toll.lost;
		fate.delay_ns += toll.delay_ns + (uint64_t)toll.lost * REPAIR_NS + (toll.last_lost ? PROBE_NS : 0);
		if (toll.lost)
			tp_counter_add(qp->port, TP_CNT_ROCE_ADP_RETRANS, 1);
	}
	return fate;
}

struct tp_path_fate tp_path_fate(struct tp_qp *qp, bool out, const struct tp_path_request *request)
{
	return tp_fault_wire() ? fate_of(qp, out, request) : (struct tp_path_fate){ 0 };
}

void tp_path_be_slow(void)
{
	uint64_t slow_ns = tp_fault_slow_ns();
	if (slow_ns)
		nanosleep(&(struct timespec){ .tv_sec = (time_t)(slow_ns / 1000000000u), .tv_nsec = (long)(slow_ns % 1000000000u) }, NULL);
}

/* ---- packets ---- */

struct names { uint8_t first, middle, last, only; };
static struct names names_of(uint32_t opcode)
{
	switch (opcode) {
	case IBV_WR_SEND: return (struct names){ TP_OP_SEND_FIRST, TP_OP_SEND_MIDDLE, TP_OP_SEND_LAST, TP_OP_SEND_ONLY };
	case IBV_WR_SEND_WITH_IMM: return (struct names){ TP_OP_SEND_FIRST, TP_OP_SEND_MIDDLE, TP_OP_SEND_LAST_IMM, TP_OP_SEND_ONLY_IMM };
	case IBV_WR_SEND_WITH_INV: return (struct names){ TP_OP_SEND_FIRST, TP_OP_SEND_MIDDLE, TP_OP_SEND_LAST_INV, TP_OP_SEND_ONLY_INV };
	case IBV_WR_RDMA_WRITE: return (struct names){ TP_OP_WRITE_FIRST, TP_OP_WRITE_MIDDLE, TP_OP_WRITE_LAST, TP_OP_WRITE_ONLY };
	case IBV_WR_RDMA_WRITE_WITH_IMM: return (struct names){ TP_OP_WRITE_FIRST, TP_OP_WRITE_MIDDLE, TP_OP_WRITE_LAST_IMM, TP_OP_WRITE_ONLY_IMM };
	default: return (struct names){ TP_OP_READ_FIRST, TP_OP_READ_MIDDLE, TP_OP_READ_LAST, TP_OP_READ_ONLY };
	}
}

/* A port of the range that the wire's senders use, the same for all packets of a QP. */
static union tp_addr with_port(union tp_addr addr, uint32_t qpn)
{
	uint16_t port = (uint16_t)(PORT_FIRST + (qpn ^ qpn >> 14) % 16384u);
	addr.v4.sin_port = (uint16_t)(port << 8 | port >> 8);   /* at the same place in both families */
	return addr;
}

/* One packet; payload: bytes of the spans from offset on. */
static void write_packet(struct tp_qp *qp, bool out, struct tp_packet *packet, const struct tp_span *spans, int count, uint64_t offset)
{
	uint8_t data[TP_WIRE_PACKET_MAX];
	struct tp_capture capture = { .tos = qp->av.traffic_class, .ttl = qp->av.hop_limit, .out = out, .data = data };
	uint32_t sender = out ? qp->ibv.qp_num : qp->attr.dest_qp_num;
	union tp_addr here = qp->av.from, there = qp->av.to;
	here.v4.sin_port = there.v4.sin_port;
	capture.from = with_port(out ? here : there, sender);
	capture.to = out ? there : here;
	bool xrc = qp->ibv.qp_type == IBV_QPT_XRC_SEND || qp->ibv.qp_type == IBV_QPT_XRC_RECV;
	packet->opcode |= (uint8_t)((qp->ibv.qp_type == IBV_QPT_UC ? TP_WIRE_UC : xrc ? TP_WIRE_XRC : TP_WIRE_RC) << 5);
	packet->pkey = TP_CARD_PKEY;
	packet->qpn = out ? qp->attr.dest_qp_num : qp->ibv.qp_num;
	size_t used = tp_wire_build(packet, data);
	if (packet->bytes && tp_span_read(spans, count, offset, data + used, packet->bytes))
		memset(data + used, 0, packet->bytes);
	used += packet->bytes;
	while (used & 3)
		data[used++] = 0;
	struct tp_icrc icrc;
	tp_icrc_prepare(&capture.from, &capture.to, &icrc);
	tp_icrc_store(data + used, tp_icrc_of(&icrc, 0, data, used));
	capture.bytes = (uint32_t)used + TP_WIRE_ICRC_BYTES;
	tp_capture_packet(&capture);
}

static void write_stream(struct tp_qp *qp, bool out, const struct names *names, struct tp_packet packet, uint32_t length, const struct tp_span *spans,
	int count)
{
	uint32_t mtu = tp_mtu_bytes(qp->attr.path_mtu), packets = tp_packets(length, qp->attr.path_mtu), first_psn = packet.psn;
	for (uint32_t i = 0; i < packets; i++) {
		bool first = i == 0, last = i + 1 == packets;
		uint64_t offset = (uint64_t)i * mtu;
		struct tp_packet one = packet;
		one.opcode = first && last ? names->only : first ? names->first : last ? names->last : names->middle;
		one.psn = tp_psn_add(first_psn, i);
		one.bytes = (uint32_t)TP_MIN((uint64_t)mtu, length - offset);
		one.ack_request = last && tp_qp_reliable(qp->ibv.qp_type) && names->first != TP_OP_READ_FIRST;
		one.solicited = last && packet.solicited;
		write_packet(qp, out, &one, spans, count, offset);
	}
}

void tp_path_trace_request(struct tp_qp *qp, bool out, const struct tp_path_request *request, const struct tp_path_operands *operands,
	const struct tp_span *spans, int count)
{
	struct tp_packet packet = { .psn = request->psn, .addr = request->addr, .rkey = request->rkey, .length = request->length, .imm = request->imm,
		.srqn = request->srqn, .solicited = request->flags & TP_PATH_SOLICITED };
	if (!tp_capture_on())
		return;
	if (request->opcode == IBV_WR_SEND_WITH_INV)
		packet.rkey = request->imm;
	if (operands) {
		bool swap = request->opcode == IBV_WR_ATOMIC_CMP_AND_SWP;
		packet.opcode = swap ? TP_OP_COMPARE_SWAP : TP_OP_FETCH_ADD;
		packet.swap_add = swap ? operands->swap : operands->compare_add;
		packet.compare = swap ? operands->compare_add : 0;
		packet.ack_request = true;
		write_packet(qp, out, &packet, NULL, 0, 0);
	} else if (request->opcode == IBV_WR_RDMA_READ) {
		packet.opcode = TP_OP_READ_REQUEST;
		packet.ack_request = true;
		write_packet(qp, out, &packet, NULL, 0, 0);
	} else {
		struct names names = names_of(request->opcode);
		write_stream(qp, out, &names, packet, request->length, spans, count);
	}
}

static uint8_t syndrome_of(enum tp_reply reply, uint8_t rnr_timer)
{
	switch (reply) {
	case TP_REPLY_ACK: return TP_SYN_ACK | TP_WIRE_CREDITS_INVALID;
	case TP_REPLY_RNR: return (uint8_t)(TP_SYN_RNR | (rnr_timer & TP_SYN_VALUE));
	case TP_REPLY_INVALID_REQUEST: return TP_SYN_NAK | TP_NAK_INVALID_REQUEST;
	case TP_REPLY_REMOTE_ACCESS: return TP_SYN_NAK | TP_NAK_REMOTE_ACCESS;
	default: return TP_SYN_NAK | TP_NAK_REMOTE_OPERATION;
	}
}

void tp_path_trace_answer(struct tp_qp *qp, bool out, const struct tp_path_outcome *outcome, const struct tp_span *spans, int count)
{
	uint32_t packets = tp_packets(outcome->length, qp->attr.path_mtu);
	enum tp_reply reply = (enum tp_reply)outcome->reply;
	struct tp_packet packet = { .psn = outcome->psn, .syndrome = syndrome_of(reply, outcome->rnr_timer), .msn = outcome->msn };
	if (!tp_capture_on() || !tp_qp_reliable(qp->ibv.qp_type) || outcome->reply > TP_REPLY_REMOTE_OPERATION || reply == TP_REPLY_SEQUENCE)
		return;
	if (reply == TP_REPLY_ACK && outcome->opcode == IBV_WR_RDMA_READ) {
		struct names names = names_of(IBV_WR_RDMA_READ);
		write_stream(qp, out, &names, packet, outcome->length, spans, count);
		return;
	}
	bool atomic = outcome->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || outcome->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
	packet.opcode = reply == TP_REPLY_ACK && atomic ? TP_OP_ATOMIC_ACK : TP_OP_ACK;
	packet.original = outcome->value;
	if (reply == TP_REPLY_ACK && !atomic)
		packet.psn = tp_psn_add(outcome->psn, packets - 1);
	write_packet(qp, out, &packet, NULL, 0, 0);
}

/* Packets of RoCE v2: headers made and taken apart. */
#include <endian.h>
#include <string.h>
#include "verbs/wire.h"

/* By operation, for the connected transports; READ's, ACK's and atomics' exist for reliable ones alone. */
static const uint16_t connected[32] = {
	[TP_OP_SEND_FIRST] = TP_HAS_PAYLOAD, [TP_OP_SEND_MIDDLE] = TP_HAS_PAYLOAD, [TP_OP_SEND_LAST] = TP_HAS_PAYLOAD,
	[TP_OP_SEND_LAST_IMM] = TP_HAS_IMM | TP_HAS_PAYLOAD, [TP_OP_SEND_ONLY] = TP_HAS_PAYLOAD,
	[TP_OP_SEND_ONLY_IMM] = TP_HAS_IMM | TP_HAS_PAYLOAD, [TP_OP_WRITE_FIRST] = TP_HAS_RETH | TP_HAS_PAYLOAD,
	[TP_OP_WRITE_MIDDLE] = TP_HAS_PAYLOAD, [TP_OP_WRITE_LAST] = TP_HAS_PAYLOAD,
	[TP_OP_WRITE_LAST_IMM] = TP_HAS_IMM | TP_HAS_PAYLOAD, [TP_OP_WRITE_ONLY] = TP_HAS_RETH | TP_HAS_PAYLOAD,
	[TP_OP_WRITE_ONLY_IMM] = TP_HAS_RETH | TP_HAS_IMM | TP_HAS_PAYLOAD, [TP_OP_READ_REQUEST] = TP_HAS_RETH,
	[TP_OP_READ_FIRST] = TP_HAS_AETH | TP_HAS_PAYLOAD, [TP_OP_READ_MIDDLE] = TP_HAS_PAYLOAD,
	[TP_OP_READ_LAST] = TP_HAS_AETH | TP_HAS_PAYLOAD, [TP_OP_READ_ONLY] = TP_HAS_AETH | TP_HAS_PAYLOAD,
	[TP_OP_ACK] = TP_HAS_AETH, [TP_OP_ATOMIC_ACK] = TP_HAS_AETH | TP_HAS_ATOMIC_ACK,
	[TP_OP_COMPARE_SWAP] = TP_HAS_ATOMIC, [TP_OP_FETCH_ADD] = TP_HAS_ATOMIC,
	[TP_OP_SEND_LAST_INV] = TP_HAS_IETH | TP_HAS_PAYLOAD, [TP_OP_SEND_ONLY_INV] = TP_HAS_IETH | TP_HAS_PAYLOAD,
};

/* Each power of two, and the middle between it and the next from 4 on. */
static const uint16_t credits[TP_WIRE_CREDITS_INVALID] = { 0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536,
	2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768 };

uint32_t tp_wire_credits(uint8_t code)
{
	code &= TP_SYN_VALUE;
	return code == TP_WIRE_CREDITS_INVALID ? UINT32_MAX : credits[code];
}

uint8_t tp_wire_credits_code(uint32_t receives)
{
	uint8_t code = 0;
	while (code + 1 < TP_WIRE_CREDITS_INVALID && credits[code + 1] <= receives)
		code++;
	return code;
}

static bool is_response(uint8_t operation) { return operation >= TP_OP_READ_FIRST && operation <= TP_OP_ATOMIC_ACK; }

uint32_t tp_wire_parts(uint8_t opcode)
{
	uint8_t operation = tp_wire_operation(opcode);
	uint32_t parts = connected[operation];
	switch (tp_wire_transport(opcode)) {
	case TP_WIRE_RC:
		return parts ? parts | TP_IS_KNOWN : 0;
	case TP_WIRE_XRC:
		return parts ? parts | TP_IS_KNOWN | (is_response(operation) ? 0 : TP_HAS_XRCETH) : 0;
	case TP_WIRE_UC:
		/* An acknowledgement of UC is ours alone: it says what arrived, so that a socket isn't flooded. */
		return operation <= TP_OP_WRITE_ONLY_IMM || operation == TP_OP_ACK ? parts | TP_IS_KNOWN : 0;
	case TP_WIRE_UD:
		/* So is one of UD (flow.c). */
		if (operation != TP_OP_SEND_ONLY && operation != TP_OP_SEND_ONLY_IMM && operation != TP_OP_ACK)
			return 0;
		return parts | TP_HAS_DETH | TP_IS_KNOWN;
	default:
		return opcode == TP_WIRE_CNP_OPCODE ? TP_HAS_PAYLOAD | TP_IS_KNOWN : 0;
	}
}

size_t tp_wire_header_bytes(uint8_t opcode)
{
	uint32_t parts = tp_wire_parts(opcode);
	return sizeof(struct tp_bth) + (parts & TP_HAS_RETH ? sizeof(struct tp_reth) : 0) + (parts & TP_HAS_AETH ? sizeof(struct tp_aeth) : 0) +
		(parts & TP_HAS_DETH ? sizeof(struct tp_deth) : 0) + (parts & TP_HAS_IMM ? sizeof(struct tp_immdt) : 0) +
		(parts & TP_HAS_IETH ? sizeof(struct tp_ieth) : 0) + (parts & TP_HAS_ATOMIC ? sizeof(struct tp_atomiceth) : 0) +
		(parts & TP_HAS_ATOMIC_ACK ? sizeof(struct tp_atomicacketh) : 0) + (parts & TP_HAS_XRCETH ? sizeof(struct tp_xrceth) : 0);
}

static uint8_t *append(uint8_t *at, const void *part, size_t bytes)
{
	memcpy(at, part, bytes);
	return at + bytes;
}

size_t tp_wire_build(const struct tp_packet *packet, uint8_t *out)
{
	uint32_t parts = tp_wire_parts(packet->opcode);
	uint8_t pad = (uint8_t)(-packet->bytes & 3);
	struct tp_bth bth = {
		.opcode = packet->opcode, .flags = (uint8_t)((packet->solicited ? 0x80 : 0) | 0x40 | pad << 4), .pkey = htobe16(packet->pkey),
		.qpn = htobe32((packet->fecn ? 0x80000000u : 0) | (packet->becn ? 0x40000000u : 0) | packet->qpn),
		.psn = htobe32((packet->ack_request ? 0x80000000u : 0) | (packet->keeps ? TP_WIRE_KEEPS : 0) | packet->psn),
	};
	uint8_t *at = append(out, &bth, sizeof(bth));
	if (parts & TP_HAS_DETH) {
		struct tp_deth deth = { .qkey = htobe32(packet->qkey), .src_qpn = htobe32(packet->src_qpn) };
		at = append(at, &deth, sizeof(deth));
	}
	if (parts & TP_HAS_XRCETH) {
		struct tp_xrceth xrceth = { .srqn = htobe32(packet->srqn) };
		at = append(at, &xrceth, sizeof(xrceth));
	}
	if (parts & TP_HAS_RETH) {
		struct tp_reth reth = { .addr = htobe64(packet->addr), .rkey = htobe32(packet->rkey), .length = htobe32(packet->length) };
		at = append(at, &reth, sizeof(reth));
	}
	if (parts & TP_HAS_ATOMIC) {
		struct tp_atomiceth atomic = { .addr = htobe64(packet->addr), .rkey = htobe32(packet->rkey),
			.swap_add = htobe64(packet->swap_add), .compare = htobe64(packet->compare) };
		at = append(at, &atomic, sizeof(atomic));
	}
	if (parts & TP_HAS_AETH) {
		struct tp_aeth aeth = { .syndrome_msn = htobe32((uint32_t)packet->syndrome << 24 | (packet->msn & TP_WIRE_PSN_MASK)) };
		at = append(at, &aeth, sizeof(aeth));
	}
	if (parts & TP_HAS_ATOMIC_ACK) {
		struct tp_atomicacketh ack = { .original = htobe64(packet->original) };
		at = append(at, &ack, sizeof(ack));
	}
	if (parts & TP_HAS_IMM)
		at = append(at, &packet->imm, sizeof(packet->imm));
	if (parts & TP_HAS_IETH) {
		struct tp_ieth ieth = { .rkey = htobe32(packet->rkey) };
		at = append(at, &ieth, sizeof(ieth));
	}
	return (size_t)(at - out);
}

static const uint8_t *take(const uint8_t *at, void *part, size_t bytes)
{
	memcpy(part, at, bytes);
	return at + bytes;
}

/* The length was checked: header_bytes are there. */
static void parse_parts(const uint8_t *at, uint32_t parts, struct tp_packet *out)
{
	if (parts & TP_HAS_DETH) {
		struct tp_deth deth;
		at = take(at, &deth, sizeof(deth));
		out->qkey = be32toh(deth.qkey);
		out->src_qpn = be32toh(deth.src_qpn) & TP_WIRE_PSN_MASK;
	}
	if (parts & TP_HAS_XRCETH) {
		struct tp_xrceth xrceth;
		at = take(at, &xrceth, sizeof(xrceth));
		out->srqn = be32toh(xrceth.srqn) & TP_WIRE_PSN_MASK;
	}
	if (parts & TP_HAS_RETH) {
		struct tp_reth reth;
		at = take(at, &reth, sizeof(reth));
		out->addr = be64toh(reth.addr);
		out->rkey = be32toh(reth.rkey);
		out->length = be32toh(reth.length);
	}
	if (parts & TP_HAS_ATOMIC) {
		struct tp_atomiceth atomic;
		at = take(at, &atomic, sizeof(atomic));
		out->addr = be64toh(atomic.addr);
		out->rkey = be32toh(atomic.rkey);
		out->swap_add = be64toh(atomic.swap_add);
		out->compare = be64toh(atomic.compare);
	}
	if (parts & TP_HAS_AETH) {
		struct tp_aeth aeth;
		at = take(at, &aeth, sizeof(aeth));
		out->syndrome = (uint8_t)(be32toh(aeth.syndrome_msn) >> 24);
		out->msn = be32toh(aeth.syndrome_msn) & TP_WIRE_PSN_MASK;
	}
	if (parts & TP_HAS_ATOMIC_ACK) {
		struct tp_atomicacketh ack;
		at = take(at, &ack, sizeof(ack));
		out->original = be64toh(ack.original);
	}
	if (parts & TP_HAS_IMM)
		at = take(at, &out->imm, sizeof(out->imm));
	if (parts & TP_HAS_IETH) {
		struct tp_ieth ieth;
		take(at, &ieth, sizeof(ieth));
		out->rkey = be32toh(ieth.rkey);
	}
}

bool tp_wire_parse(const uint8_t *data, size_t bytes, struct tp_packet *out)
{
	struct tp_bth bth;
	if (bytes < sizeof(bth) + TP_WIRE_ICRC_BYTES || bytes > TP_WIRE_PACKET_MAX)
		return false;
	memcpy(&bth, data, sizeof(bth));
	uint32_t parts = tp_wire_parts(bth.opcode);
	uint8_t pad = bth.flags >> 4 & 3;
	if (!parts || (bth.flags & 0x0f) != 0)
		return false;
	size_t headers = tp_wire_header_bytes(bth.opcode);
	if (bytes < headers + pad + TP_WIRE_ICRC_BYTES)
		return false;
	*out = (struct tp_packet){
		.opcode = bth.opcode, .pad = pad, .solicited = bth.flags & 0x80, .pkey = be16toh(bth.pkey),
		.qpn = be32toh(bth.qpn) & TP_WIRE_PSN_MASK, .fecn = be32toh(bth.qpn) >> 31, .becn = be32toh(bth.qpn) >> 30 & 1,
		.psn = be32toh(bth.psn) & TP_WIRE_PSN_MASK, .ack_request = be32toh(bth.psn) >> 31, .keeps = be32toh(bth.psn) & TP_WIRE_KEEPS,
		.payload = data + headers, .bytes = (uint32_t)(bytes - headers - pad - TP_WIRE_ICRC_BYTES),
	};
	if (!(parts & TP_HAS_PAYLOAD) && out->bytes + pad > 0)
		return false;
	parse_parts(data + sizeof(bth), parts, out);
	return true;
}

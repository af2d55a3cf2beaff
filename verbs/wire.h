/* RoCE v2 on the wire: the formats. Every field is in network order; lengths are bytes. */
#ifndef TP_VERBS_WIRE_H
#define TP_VERBS_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include "base/base.h"

#define TP_WIRE_UDP_PORT 4791
#define TP_WIRE_PSN_MASK 0xffffffu
#define TP_WIRE_KEEPS 0x1000000u

/* Base transport header. */
struct tp_bth {
	uint8_t opcode;                 /* transport << 5 | operation */
	uint8_t flags;                  /* SE 0x80, M 0x40, pad count 0x30, version 0x0f */
	uint16_t pkey;
	uint32_t qpn;                   /* FECN 0x80000000, BECN 0x40000000, low 24 bits */
	uint32_t psn;                   /* A (ack wanted) 0x80000000, reserved 0x7f000000 (ours: 0x01000000, keeps), low 24 bits */
} __attribute__((packed));
struct tp_reth { uint64_t addr; uint32_t rkey, length; } __attribute__((packed));
struct tp_aeth { uint32_t syndrome_msn; } __attribute__((packed));
struct tp_deth { uint32_t qkey, src_qpn; } __attribute__((packed));
struct tp_immdt { uint32_t imm; } __attribute__((packed));
struct tp_ieth { uint32_t rkey; } __attribute__((packed));
struct tp_xrceth { uint32_t srqn; } __attribute__((packed));
struct tp_atomiceth { uint64_t addr; uint32_t rkey; uint64_t swap_add, compare; } __attribute__((packed));
struct tp_atomicacketh { uint64_t original; } __attribute__((packed));

enum tp_wire_transport { TP_WIRE_RC = 0, TP_WIRE_UC = 1, TP_WIRE_RD = 2, TP_WIRE_UD = 3, TP_WIRE_CNP = 4, TP_WIRE_XRC = 5 };
enum tp_wire_operation {
	TP_OP_SEND_FIRST, TP_OP_SEND_MIDDLE, TP_OP_SEND_LAST, TP_OP_SEND_LAST_IMM, TP_OP_SEND_ONLY, TP_OP_SEND_ONLY_IMM,
	TP_OP_WRITE_FIRST, TP_OP_WRITE_MIDDLE, TP_OP_WRITE_LAST, TP_OP_WRITE_LAST_IMM, TP_OP_WRITE_ONLY, TP_OP_WRITE_ONLY_IMM,
	TP_OP_READ_REQUEST, TP_OP_READ_FIRST, TP_OP_READ_MIDDLE, TP_OP_READ_LAST, TP_OP_READ_ONLY,
	TP_OP_ACK, TP_OP_ATOMIC_ACK, TP_OP_COMPARE_SWAP, TP_OP_FETCH_ADD,
	TP_OP_SEND_LAST_INV = 0x16, TP_OP_SEND_ONLY_INV = 0x17
};
#define TP_WIRE_CNP_OPCODE 0x81

/* AETH syndromes: the kind in bits 5 and 6, then credits, RNR timer code or NAK code. */
enum { TP_SYN_ACK = 0x00, TP_SYN_RNR = 0x20, TP_SYN_NAK = 0x60, TP_SYN_KIND = 0x60, TP_SYN_VALUE = 0x1f };
enum { TP_NAK_SEQUENCE, TP_NAK_INVALID_REQUEST, TP_NAK_REMOTE_ACCESS, TP_NAK_REMOTE_OPERATION, TP_NAK_INVALID_RD };
#define TP_WIRE_CREDITS_INVALID 0x1f
/* Credits: how many more receives are there, as an acknowledgement's code (rounded down) and back; UINT32_MAX: it doesn't say. */
uint8_t tp_wire_credits_code(uint32_t receives);
uint32_t tp_wire_credits(uint8_t code);

/* ---- packets (wire.c) ---- */

#define TP_WIRE_HEADERS_MAX 64      /* BTH and all that can follow it before the payload */
#define TP_WIRE_ICRC_BYTES 4
#define TP_WIRE_PACKET_MAX (TP_WIRE_HEADERS_MAX + 4096 + TP_WIRE_ICRC_BYTES)

/* A packet, taken apart, in host order. Which fields count follows from the opcode. */
struct tp_packet {
	uint8_t opcode;
	uint8_t pad;
	bool solicited, ack_request, fecn, becn;
	bool keeps;                     /* the sender keeps what comes early: a reserved bit */
	uint16_t pkey;
	uint32_t qpn, psn;
	uint64_t addr;                  /* RETH, AtomicETH */
	uint32_t rkey, length;          /* rkey: also IETH */
	uint64_t swap_add, compare;     /* AtomicETH */
	uint64_t original;              /* AtomicAckETH */
	uint8_t syndrome;               /* AETH */
	uint32_t msn;
	uint32_t qkey, src_qpn;         /* DETH */
	uint32_t srqn;                  /* XRCETH */
	uint32_t imm;                   /* ImmDt: as it is on the wire */
	const uint8_t *payload;         /* without pad */
	uint32_t bytes;
};
/* What follows BTH. */
enum {
	TP_HAS_RETH = 1, TP_HAS_AETH = 2, TP_HAS_DETH = 4, TP_HAS_IMM = 8, TP_HAS_IETH = 16, TP_HAS_ATOMIC = 32, TP_HAS_ATOMIC_ACK = 64,
	TP_HAS_XRCETH = 128, TP_HAS_PAYLOAD = 256, TP_IS_KNOWN = 512
};
uint32_t tp_wire_parts(uint8_t opcode);         /* 0: no such opcode */
size_t tp_wire_header_bytes(uint8_t opcode);    /* BTH included */
static inline uint8_t tp_wire_transport(uint8_t opcode) { return opcode >> 5; }
static inline uint8_t tp_wire_operation(uint8_t opcode) { return opcode & 0x1f; }
/* Writes the headers; returns their length. pad is taken from bytes. */
size_t tp_wire_build(const struct tp_packet *packet, uint8_t *out);
/* Takes a UDP payload (ICRC included, not checked) apart; false: it isn't one of ours: too short, unknown, another version. */
bool tp_wire_parse(const uint8_t *data, size_t bytes, struct tp_packet *out);

static inline uint32_t tp_psn_add(uint32_t psn, uint32_t n) { return (psn + n) & TP_WIRE_PSN_MASK; }
/* a - b as a signed distance of 24 bits. */
static inline int32_t tp_psn_diff(uint32_t a, uint32_t b) { return (int32_t)((a - b) << 8) >> 8; }

/* ---- ICRC (icrc.c) ---- */

/* What the ICRC covers before BTH: 8 bytes of ones, the IP header, the UDP header, with the fields that routers change set to
 * ones. Made once for two addresses. */
struct tp_icrc { uint8_t head[56]; uint8_t bytes; bool v6; };
void tp_icrc_prepare(const union tp_addr *from, const union tp_addr *to, struct tp_icrc *out);
/* Of a UDP payload without its ICRC, in host order; id: the IP header's identification (IPv4). */
uint32_t tp_icrc_of(const struct tp_icrc *icrc, uint16_t id, const uint8_t *data, size_t bytes);
/* IPv4: the identification that explains difference = ICRC received ^ ICRC made with identification 0, for a payload of bytes
 * (without ICRC); -1 where none does: the packet is damaged. The CRC is linear, so an identification changes it by a sum of
 * 16 known words; 16 of its 32 bits remain as a check. */
int tp_icrc_find_id(size_t bytes, uint32_t difference);
/* Puts the ICRC behind the payload. */
static inline void tp_icrc_store(uint8_t *at, uint32_t icrc)
{
	at[0] = (uint8_t)icrc; at[1] = (uint8_t)(icrc >> 8); at[2] = (uint8_t)(icrc >> 16); at[3] = (uint8_t)(icrc >> 24);
}
static inline uint32_t tp_icrc_load(const uint8_t *at)
{
	return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

/* One address, whatever the ports. */
static inline bool tp_wire_same_host(const union tp_addr *a, const union tp_addr *b)
{
	if (a->sa.sa_family != b->sa.sa_family)
		return false;
	return a->sa.sa_family == AF_INET6 ? !memcmp(&a->v6.sin6_addr, &b->v6.sin6_addr, 16) : a->v4.sin_addr.s_addr == b->v4.sin_addr.s_addr;
}

#endif

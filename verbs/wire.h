/* RoCE v2 on the wire: the formats. Every field is in network order; lengths are bytes. */
#ifndef TP_VERBS_WIRE_H
#define TP_VERBS_WIRE_H

#include <stdint.h>

#define TP_WIRE_UDP_PORT 4791
#define TP_WIRE_PSN_MASK 0xffffffu

/* Base transport header. */
struct tp_bth {
	uint8_t opcode;                 /* transport << 5 | operation */
	uint8_t flags;                  /* SE 0x80, M 0x40, pad count 0x30, version 0x0f */
	uint16_t pkey;
	uint32_t qpn;                   /* FECN 0x80000000, BECN 0x40000000, low 24 bits */
	uint32_t psn;                   /* A (ack wanted) 0x80000000, low 24 bits */
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

#endif

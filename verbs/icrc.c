/* The invariant CRC of RoCE v2. It covers the IP and UDP headers as they were sent, but for what routers change, so the sender
 * must know the IP identification that the kernel will write: 0 on an unconnected socket with DF, and 0, 1, 2, … in the
 * packets of one segmented send. A receiver never sees the identification and solves for it (tp_icrc_find_id). */
#include <string.h>
#include "verbs/crc.h"
#include "verbs/wire.h"

enum { ONES = 8, UDP_BYTES = 8, V4_BYTES = 20, V6_BYTES = 40, ID_AT = ONES + 4, CACHED = 4 };

void tp_icrc_prepare(const union tp_addr *from, const union tp_addr *to, struct tp_icrc *out)
{
	memset(out, 0, sizeof(*out));
	memset(out->head, 0xff, ONES);
	uint8_t *ip = out->head + ONES, *udp;
	out->v6 = to->sa.sa_family == AF_INET6;
	if (out->v6) {
		ip[0] = 0x6f;
		memset(ip + 1, 0xff, 3);
		ip[6] = IPPROTO_UDP;
		ip[7] = 0xff;
		memcpy(ip + 8, &from->v6.sin6_addr, 16);
		memcpy(ip + 24, &to->v6.sin6_addr, 16);
		udp = ip + V6_BYTES;
	} else {
		ip[0] = 0x45;
		ip[1] = 0xff;
		ip[6] = 0x40;
		ip[8] = 0xff;
		ip[9] = IPPROTO_UDP;
		memset(ip + 10, 0xff, 2);
		memcpy(ip + 12, &from->v4.sin_addr, 4);
		memcpy(ip + 16, &to->v4.sin_addr, 4);
		udp = ip + V4_BYTES;
	}
	/* The port lies at the same place in both. */
	memcpy(udp, &from->v4.sin_port, 2);
	memcpy(udp + 2, &to->v4.sin_port, 2);
	memset(udp + 6, 0xff, 2);
	out->bytes = (uint8_t)(udp + UDP_BYTES - out->head);
}

static void put16(uint8_t *at, size_t value)
{
	at[0] = (uint8_t)(value >> 8);
	at[1] = (uint8_t)value;
}

uint32_t tp_icrc_of(const struct tp_icrc *icrc, uint16_t id, const uint8_t *data, size_t bytes)
{
	uint8_t head[sizeof(icrc->head) + sizeof(struct tp_bth)];
	memcpy(head, icrc->head, sizeof(icrc->head));
	size_t udp_bytes = UDP_BYTES + bytes + TP_WIRE_ICRC_BYTES;
	if (icrc->v6) {
		put16(head + ONES + 4, udp_bytes);
	} else {
		put16(head + ONES + 2, udp_bytes + V4_BYTES);
		put16(head + ID_AT, id);
	}
	put16(head + icrc->bytes - 4, udp_bytes);
	memcpy(head + icrc->bytes, data, sizeof(struct tp_bth));
	head[icrc->bytes + 4] = 0xff;      /* BTH's reserved byte: FECN and BECN */
	uint32_t state = tp_crc_update(~0u, head, icrc->bytes + sizeof(struct tp_bth));
	return ~tp_crc_update(state, data + sizeof(struct tp_bth), bytes - sizeof(struct tp_bth));
}

/* What each bit of the identification adds to the CRC of a packet of so many bytes, in echelon form: word[i] has its highest
 * bit where no later word has one; ids[i] is the identification that makes it. */
struct basis { size_t bytes; uint32_t word[16], top[16]; uint16_t id[16]; };

static void make_basis(size_t bytes, struct basis *basis)
{
	static const uint8_t zeros[256];
	basis->bytes = bytes;
	size_t behind = ONES + V4_BYTES + UDP_BYTES + bytes - ID_AT - 2;
	for (int i = 0; i < 16; i++) {
		uint8_t field[2] = { (uint8_t)(1u << i >> 8), (uint8_t)(1u << i) };
		uint32_t word = tp_crc_update(0, field, 2);
		for (size_t left = behind; left > 0; left -= TP_MIN(left, sizeof(zeros)))
			word = tp_crc_update(word, zeros, TP_MIN(left, sizeof(zeros)));
		uint16_t id = (uint16_t)(1u << i);
		for (int k = 0; k < i; k++)
			if (word & basis->top[k]) {
				word ^= basis->word[k];
				id ^= basis->id[k];
			}
		basis->word[i] = word;
		basis->id[i] = id;
		basis->top[i] = 1u << (31 - __builtin_clz(word));
	}
}

int tp_icrc_find_id(size_t bytes, uint32_t difference)
{
	static _Thread_local struct basis cache[CACHED];
	static _Thread_local unsigned int next;
	struct basis *basis = NULL;
	for (int i = 0; i < CACHED && !basis; i++)
		if (cache[i].bytes == bytes)
			basis = &cache[i];
	if (!basis) {
		basis = &cache[next++ % CACHED];
		make_basis(bytes, basis);
	}
	uint16_t id = 0;
	for (int k = 0; k < 16; k++)
		if (difference & basis->top[k]) {
			difference ^= basis->word[k];
			id ^= basis->id[k];
		}
	return difference == 0 ? id : -1;
}

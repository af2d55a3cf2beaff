/* Is the ICRC of a packet that came in right? On IPv4 it covers the identification, which a socket doesn't show. */
#include "verbs/rc.h"

/* Per peer: how sure we are that it is one of our own, whose identifications are below 64. A count of its packets since one
 * that wasn't; from OWN_SURE on others are refused, each of them lowering the count. Peers that share a place are treated alike. */
enum { PEERS = 256, OWN_IDS = 64, OWN_SURE = 64, OWN_MAX = 80 };
static _Atomic uint8_t peers[PEERS];

static bool own_peer_allows(const union tp_addr *from, int id)
{
	uint32_t host = from->sa.sa_family == AF_INET ? ntohl(from->v4.sin_addr.s_addr) : 0;
	_Atomic uint8_t *count = &peers[(host ^ host >> 8 ^ host >> 16) % PEERS];
	uint8_t sure = atomic_load_explicit(count, memory_order_relaxed);
	if (id < OWN_IDS) {
		if (sure < OWN_MAX)
			atomic_store_explicit(count, (uint8_t)(sure + 1), memory_order_relaxed);
		return true;
	}
	atomic_store_explicit(count, sure >= OWN_SURE ? (uint8_t)(sure - 1) : 0, memory_order_relaxed);
	return sure < OWN_SURE;
}

bool tp_wire_icrc_fits(const struct tp_icrc *icrc, const struct tp_ingress *in)
{
	uint32_t bytes = in->bytes - TP_WIRE_ICRC_BYTES;
	uint32_t difference = tp_icrc_of(icrc, in->index, in->data, bytes) ^ tp_icrc_load(in->data + bytes);
	if (difference == 0)
		return true;
	if (icrc->v6)
		return false;
	int id = tp_icrc_find_id(bytes, difference);
	return id >= 0 && own_peer_allows(&in->from, id ^ in->index);
}

/* The connection manager's messages, built and taken apart. Every message has a fixed size, so a parser can't run past its end:
 * what remains to check is the header, and lengths that the message gives itself. */
#include <string.h>
#include "verbs/cm_mad.h"

enum { HEADER = 24, CLASS_CM = 0x07, CLASS_VERSION = 2, METHOD_SEND = 0x03 };

/* Where private data lies behind the header, and how much. */
static const struct { uint8_t at, bytes; } private_places[] = {
	[TP_CM_REQ - TP_CM_REQ] = { 140, 92 }, [TP_CM_MRA - TP_CM_REQ] = { 10, 222 }, [TP_CM_REJ - TP_CM_REQ] = { 84, 148 },
	[TP_CM_REP - TP_CM_REQ] = { 36, 196 }, [TP_CM_RTU - TP_CM_REQ] = { 8, 224 }, [TP_CM_DREQ - TP_CM_REQ] = { 12, 220 },
	[TP_CM_DREP - TP_CM_REQ] = { 8, 224 }, [TP_CM_SIDR_REQ - TP_CM_REQ] = { 16, 216 }, [TP_CM_SIDR_REP - TP_CM_REQ] = { 96, 136 },
};

static bool is_kind(unsigned kind) { return kind >= TP_CM_REQ && kind <= TP_CM_SIDR_REP; }

size_t tp_cm_private_room(enum tp_cm_kind kind) { return is_kind(kind) ? private_places[kind - TP_CM_REQ].bytes : 0; }

/* ---- numbers in network order ---- */

static void put(uint8_t *at, size_t bytes, uint64_t value)
{
	for (size_t i = bytes; i-- > 0; value >>= 8)
		at[i] = (uint8_t)value;
}

static uint64_t get(const uint8_t *at, size_t bytes)
{
	uint64_t value = 0;
	for (size_t i = 0; i < bytes; i++)
		value = value << 8 | at[i];
	return value;
}

/* ---- out ---- */

static void build_req(const struct tp_cm_mad *mad, uint8_t *b)
{
	put(b + 8, 8, mad->service_id);
	put(b + 16, 8, mad->ca_guid);
	put(b + 28, 4, mad->qkey);
	put(b + 32, 3, mad->qpn);
	b[35] = mad->responder_resources;
	b[39] = mad->initiator_depth;
	b[43] = (uint8_t)(mad->remote_timeout << 3 | ((mad->transport == TP_CM_XRC ? 3 : mad->transport) & 3) << 1 | mad->flow_control);
	put(b + 44, 3, mad->psn);
	b[47] = (uint8_t)(mad->local_timeout << 3 | (mad->retry_count & 7));
	put(b + 48, 2, mad->pkey);
	b[50] = (uint8_t)(mad->mtu << 4 | (mad->rnr_retry_count & 7));
	b[51] = (uint8_t)(mad->max_cm_retries << 4 | mad->srq << 3 | (mad->transport == TP_CM_XRC ? 1 : 0));
	put(b + 52, 4, 0xffffffff);         /* RoCE has no LIDs: the permissive one, twice */
	memcpy(b + 56, mad->local_gid, 16);
	memcpy(b + 72, mad->remote_gid, 16);
	put(b + 88, 4, (uint64_t)(mad->flow_label & 0xfffff) << 12 | (mad->packet_rate & 0x3f));
	b[92] = mad->traffic_class;
	b[93] = mad->hop_limit;
	b[94] = (uint8_t)(mad->sl << 4);
	b[95] = (uint8_t)(mad->ack_timeout << 3);
}

static void build_rep(const struct tp_cm_mad *mad, uint8_t *b)
{
	put(b + 8, 4, mad->qkey);
	put(b + 12, 3, mad->qpn);
	put(b + 20, 3, mad->psn);
	b[24] = mad->responder_resources;
	b[25] = mad->initiator_depth;
	b[26] = (uint8_t)(mad->target_ack_delay << 3 | mad->flow_control);
	b[27] = (uint8_t)((mad->rnr_retry_count & 7) << 5 | mad->srq << 4);
	put(b + 28, 8, mad->ca_guid);
}

static void build_rej(const struct tp_cm_mad *mad, uint8_t *b)
{
	uint8_t ari = mad->ari_bytes <= TP_MAD_ARI ? mad->ari_bytes : TP_MAD_ARI;
	b[8] = (uint8_t)(mad->about << 6);
	b[9] = (uint8_t)(ari << 1);
	put(b + 10, 2, mad->reason);
	memcpy(b + 12, mad->ari, ari);
}

void tp_cm_build(const struct tp_cm_mad *mad, uint8_t out[TP_MAD_BYTES])
{
	uint8_t *b = out + HEADER;
	memset(out, 0, TP_MAD_BYTES);
	out[0] = 1;
	out[1] = CLASS_CM;
	out[2] = CLASS_VERSION;
	out[3] = METHOD_SEND;
	put(out + 8, 8, mad->transaction);
	put(out + 16, 2, mad->kind);
	put(b, 4, mad->local_id);
	if (mad->kind != TP_CM_REQ && mad->kind != TP_CM_SIDR_REQ && mad->kind != TP_CM_SIDR_REP)
		put(b + 4, 4, mad->remote_id);
	switch (mad->kind) {
	case TP_CM_REQ: build_req(mad, b); break;
	case TP_CM_REP: build_rep(mad, b); break;
	case TP_CM_REJ: build_rej(mad, b); break;
	case TP_CM_MRA:
		b[8] = (uint8_t)(mad->about << 6);
		b[9] = (uint8_t)(mad->service_timeout << 3);
		break;
	case TP_CM_DREQ: put(b + 8, 3, mad->qpn); break;
	case TP_CM_SIDR_REQ:
		put(b + 4, 2, mad->pkey);
		put(b + 8, 8, mad->service_id);
		break;
	case TP_CM_SIDR_REP:
		b[4] = mad->status;
		put(b + 8, 3, mad->qpn);
		put(b + 12, 8, mad->service_id);
		put(b + 20, 4, mad->qkey);
		break;
	case TP_CM_RTU: case TP_CM_DREP: break;
	}
	size_t room = tp_cm_private_room(mad->kind);
	if (room)
		memcpy(b + private_places[mad->kind - TP_CM_REQ].at, mad->private_data, mad->private_bytes < room ? mad->private_bytes : room);
}

/* ---- in ---- */

static void parse_req(const uint8_t *b, struct tp_cm_mad *out)
{
	out->service_id = get(b + 8, 8);
	out->ca_guid = get(b + 16, 8);
	out->qkey = (uint32_t)get(b + 28, 4);
	out->qpn = (uint32_t)get(b + 32, 3);
	out->responder_resources = b[35];
	out->initiator_depth = b[39];
	out->remote_timeout = b[43] >> 3;
	out->transport = b[43] >> 1 & 3;
	out->flow_control = b[43] & 1;
	out->psn = (uint32_t)get(b + 44, 3);
	out->local_timeout = b[47] >> 3;
	out->retry_count = b[47] & 7;
	out->pkey = (uint16_t)get(b + 48, 2);
	out->mtu = b[50] >> 4;
	out->rnr_retry_count = b[50] & 7;
	out->max_cm_retries = b[51] >> 4;
	out->srq = b[51] >> 3 & 1;
	memcpy(out->local_gid, b + 56, 16);
	memcpy(out->remote_gid, b + 72, 16);
	out->flow_label = (uint32_t)get(b + 88, 4) >> 12;
	out->packet_rate = b[91] & 0x3f;
	out->traffic_class = b[92];
	out->hop_limit = b[93];
	out->sl = b[94] >> 4;
	out->ack_timeout = b[95] >> 3;
}

static void parse_rep(const uint8_t *b, struct tp_cm_mad *out)
{
	out->qkey = (uint32_t)get(b + 8, 4);
	out->qpn = (uint32_t)get(b + 12, 3);
	out->psn = (uint32_t)get(b + 20, 3);
	out->responder_resources = b[24];
	out->initiator_depth = b[25];
	out->target_ack_delay = b[26] >> 3;
	out->flow_control = b[26] & 1;
	out->rnr_retry_count = b[27] >> 5;
	out->srq = b[27] >> 4 & 1;
	out->ca_guid = get(b + 28, 8);
}

static bool parse_rej(const uint8_t *b, struct tp_cm_mad *out)
{
	out->about = b[8] >> 6;
	out->ari_bytes = b[9] >> 1;
	out->reason = (uint16_t)get(b + 10, 2);
	if (out->ari_bytes > TP_MAD_ARI)
		return false;
	memcpy(out->ari, b + 12, out->ari_bytes);
	return true;
}

bool tp_cm_parse(const uint8_t *data, size_t bytes, struct tp_cm_mad *out)
{
	memset(out, 0, sizeof(*out));
	if (bytes != TP_MAD_BYTES || data[0] != 1 || data[1] != CLASS_CM || data[2] != CLASS_VERSION || data[3] != METHOD_SEND)
		return false;
	unsigned kind = (unsigned)get(data + 16, 2);
	if (!is_kind(kind))
		return false;
	const uint8_t *b = data + HEADER;
	out->kind = (enum tp_cm_kind)kind;
	out->transaction = get(data + 8, 8);
	out->local_id = (uint32_t)get(b, 4);
	if (kind != TP_CM_REQ && kind != TP_CM_SIDR_REQ && kind != TP_CM_SIDR_REP)
		out->remote_id = (uint32_t)get(b + 4, 4);
	switch (out->kind) {
	case TP_CM_REQ: parse_req(b, out); break;
	case TP_CM_REP: parse_rep(b, out); break;
	case TP_CM_REJ:
		if (!parse_rej(b, out))
			return false;
		break;
	case TP_CM_MRA:
		out->about = b[8] >> 6;
		out->service_timeout = b[9] >> 3;
		break;
	case TP_CM_DREQ: out->qpn = (uint32_t)get(b + 8, 3); break;
	case TP_CM_SIDR_REQ:
		out->pkey = (uint16_t)get(b + 4, 2);
		out->service_id = get(b + 8, 8);
		break;
	case TP_CM_SIDR_REP:
		out->status = b[4];
		out->qpn = (uint32_t)get(b + 8, 3);
		out->service_id = get(b + 12, 8);
		out->qkey = (uint32_t)get(b + 20, 4);
		break;
	case TP_CM_RTU: case TP_CM_DREP: break;
	}
	out->private_bytes = (uint8_t)tp_cm_private_room(out->kind);
	memcpy(out->private_data, b + private_places[kind - TP_CM_REQ].at, out->private_bytes);
	return true;
}

/* ---- IP addresses in private data ---- */

void tp_cm_build_ip(const struct tp_cm_ip *ip, uint8_t out[TP_MAD_IP_BYTES])
{
	memset(out, 0, TP_MAD_IP_BYTES);
	out[1] = (uint8_t)((ip->v6 ? 6 : 4) << 4);
	put(out + 2, 2, ip->port);
	memcpy(out + 4, ip->from, 16);
	memcpy(out + 20, ip->to, 16);
}

bool tp_cm_parse_ip(const uint8_t *data, size_t bytes, struct tp_cm_ip *out)
{
	memset(out, 0, sizeof(*out));
	if (bytes < TP_MAD_IP_BYTES || data[0] != 0 || (data[1] >> 4 != 4 && data[1] >> 4 != 6))
		return false;
	out->v6 = data[1] >> 4 == 6;
	out->port = (uint16_t)get(data + 2, 2);
	memcpy(out->from, data + 4, 16);
	memcpy(out->to, data + 20, 16);
	return true;
}

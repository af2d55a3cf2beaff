/* The records of the control connection; see wire.h. */
#include <string.h>
#include "base/text.h"
#include "net/ib/wire.h"

static const uint8_t magic[4] = { 'T', 'p', 'I', 'b' }, refusal_magic[4] = { 'T', 'p', 'N', 'o' };

size_t tp_ib_record_bytes(int type)
{
	static const size_t bytes[TP_IB_RECORD_TYPES] = {
		[TP_IB_META] = sizeof(struct tp_ib_wire_meta), [TP_IB_READY] = sizeof(struct tp_ib_wire_revive), [TP_IB_REFUSED] = sizeof(struct tp_ib_wire_text),
		[TP_IB_PING] = 0, [TP_IB_PONG] = 0, [TP_IB_SWITCH] = sizeof(struct tp_ib_wire_switch),
		[TP_IB_REVIVE] = sizeof(struct tp_ib_wire_revive), [TP_IB_CONNECTED] = sizeof(struct tp_ib_wire_revive),
		[TP_IB_PROVEN] = sizeof(struct tp_ib_wire_revive), [TP_IB_GOODBYE] = sizeof(struct tp_ib_wire_text), [TP_IB_LEAVING] = sizeof(struct tp_ib_wire_switch),
		[TP_IB_WANT] = sizeof(struct tp_ib_wire_revive),
	};

	return type >= TP_IB_META && type < TP_IB_RECORD_TYPES ? sizeof(struct tp_ib_wire_head) + bytes[type] : 0;
}

void tp_ib_record_start(struct tp_ib_record *record, enum tp_ib_record_type type)
{
	memset(record, 0, sizeof(*record));
	memcpy(record->head.magic, magic, sizeof(magic));
	record->head.version = TP_IB_WIRE_VERSION;
	record->head.type = (uint16_t)type;
	record->head.bytes = (uint32_t)tp_ib_record_bytes(type);
}

long tp_ib_record_check(const void *data, size_t have, const char **why)
{
	struct tp_ib_wire_head head;

	if (memcmp(data, magic, have < sizeof(magic) ? have : sizeof(magic)) != 0) {
		*why = "what came is no record of the IB transport";
		return -1;
	}
	if (have < sizeof(head)) return 0;
	memcpy(&head, data, sizeof(head));
	if (head.version != TP_IB_WIRE_VERSION) {
		*why = "it speaks another version of the IB transport's protocol: all ranks must use the same library";
		return -1;
	}
	if (tp_ib_record_bytes(head.type) == 0 || head.bytes != tp_ib_record_bytes(head.type)) {
		*why = "a record of unknown type or wrong length";
		return -1;
	}
	return have < head.bytes ? 0 : (long)head.bytes;
}

static const char *check_path(struct tp_ib_wire_path *path)
{
	tp_text_clean(path->device, sizeof(path->device));
	if (path->way >= TP_IB_MAX_PATHS) return "a way that there isn't";
	if (path->port == 0) return NULL;
	if (path->mtu < 1 || path->mtu > 5) return "an MTU that verbs.h has no code for";
	if (path->link_layer != 1 && path->link_layer != 2) return "a link layer that is neither InfiniBand nor Ethernet";
	if (path->gid_type > 3) return "a GID of a type that there isn't";
	if (path->key >= TP_IB_MAX_KEYS) return "a key that FIFO entries don't have";
	return NULL;
}

const char *tp_ib_wire_check_meta(struct tp_ib_wire_meta *meta)
{
	int there = 0;

	tp_text_clean(meta->host, sizeof(meta->host));
	tp_text_clean(meta->set, sizeof(meta->set));
	if (meta->nqps < 1 || meta->nqps > TP_IB_MAX_QPS) return "the number of queue pairs is out of range";
	if (meta->npaths < 1 || meta->npaths > TP_IB_MAX_PATHS) return "the number of paths is out of range";
	if (meta->split > 1) return "a flag that is neither 0 nor 1";
	if (meta->connect > TP_IB_BY_RDMA_CM) return "a way to connect that there isn't";
	for (uint32_t i = 0; i < meta->npaths; i++) {
		const char *wrong = check_path(&meta->paths[i]);
		if (wrong) return wrong;
		there += meta->paths[i].port != 0;
	}
	return there > 0 ? NULL : "no path at all";
}

const char *tp_ib_wire_check_switch(struct tp_ib_wire_switch *change)
{
	tp_text_clean(change->why, sizeof(change->why));
	return change->dead >> TP_IB_MAX_PATHS ? "paths that there aren't" : NULL;
}

const char *tp_ib_wire_check_revive(const struct tp_ib_wire_revive *revive)
{
	if (revive->path >= TP_IB_MAX_PATHS) return "a path that there isn't";
	return revive->psn > 0xffffff ? "a packet number of more than 24 bits" : NULL;
}

void tp_ib_token_start(struct tp_ib_wire_token *token)
{
	memset(token, 0, sizeof(*token));
	memcpy(token->magic, magic, sizeof(magic));
	token->version = TP_IB_WIRE_VERSION;
}

const char *tp_ib_token_read(const void *data, size_t bytes, struct tp_ib_wire_token *out)
{
	if (!data || bytes < sizeof(*out) || memcmp(data, magic, sizeof(magic)) != 0) return "it brings no token of the IB transport";
	memcpy(out, data, sizeof(*out));
	if (out->version != TP_IB_WIRE_VERSION) return "it speaks another version of the IB transport's protocol: all ranks must use the same library";
	if (out->path >= TP_IB_MAX_PATHS || out->qp >= TP_IB_MAX_QPS) return "a path or queue pair that there isn't";
	return NULL;
}

void tp_ib_refusal_start(struct tp_ib_wire_refusal *refusal)
{
	memset(refusal, 0, sizeof(*refusal));
	memcpy(refusal->magic, refusal_magic, sizeof(refusal_magic));
}

bool tp_ib_refusal_read(const void *data, size_t bytes, struct tp_ib_wire_refusal *out)
{
	if (!data || bytes < sizeof(*out) || memcmp(data, refusal_magic, sizeof(refusal_magic)) != 0) return false;
	memcpy(out, data, sizeof(*out));
	tp_text_clean(out->text, sizeof(out->text));
	return true;
}

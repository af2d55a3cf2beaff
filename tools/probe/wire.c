/* Records of the probe's exchange; see wire.h. */
#include "probe/wire.h"

#include <stdio.h>
#include <string.h>

static const uint8_t magic[4] = { 'T', 'P', 'R', 'B' };

const char *probe_op_name(int op)
{
	static const char *const names[] = { "write", "read", "send" };
	return op >= 0 && op < PROBE_OPS ? names[op] : "?";
}

const char *probe_type_name(int type)
{
	static const char *const names[] = { "?", "HELLO", "READY", "STEP", "DONE", "FAILED" };
	return type > 0 && type < PROBE_TYPES ? names[type] : "?";
}

size_t probe_record_bytes(int type)
{
	size_t head = sizeof(struct probe_head);
	switch (type) {
	case PROBE_HELLO: return head + sizeof(struct probe_hello);
	case PROBE_READY: return head;
	case PROBE_STEP: return head + sizeof(struct probe_step);
	case PROBE_DONE: return head + sizeof(struct probe_done);
	case PROBE_FAILED: return head + sizeof(struct probe_text);
	default: return 0;
	}
}

void probe_record_start(struct probe_record *record, enum probe_type type)
{
	memset(record, 0, sizeof(*record));
	memcpy(record->head.magic, magic, sizeof(magic));
	record->head.version = PROBE_WIRE_VERSION;
	record->head.type = (uint16_t)type;
	record->head.bytes = (uint32_t)probe_record_bytes(type);
}

long probe_record_check(const void *data, size_t have, char *why, size_t why_bytes)
{
	struct probe_head head;
	size_t known = have < sizeof(magic) ? have : sizeof(magic);
	if (memcmp(data, magic, known) != 0) {
		snprintf(why, why_bytes, "what it says isn't the probe's exchange: is that port another program's?");
		return -1;
	}
	if (have < sizeof(head)) return 0;
	memcpy(&head, data, sizeof(head));
	if (head.version != PROBE_WIRE_VERSION) {
		snprintf(why, why_bytes, "it speaks version %u of the probe's exchange, this side version %d: use the same telpher on both", head.version,
			PROBE_WIRE_VERSION);
		return -1;
	}
	if (probe_record_bytes(head.type) == 0 || head.bytes != probe_record_bytes(head.type)) {
		snprintf(why, why_bytes, "it sent a record of type %u and %u bytes, which there isn't", head.type, head.bytes);
		return -1;
	}
	return (long)head.bytes;
}

/* What a stranger says ends up on a terminal. */
static void clean(char *text, size_t bytes)
{
	text[bytes - 1] = 0;
	for (; *text; text++)
		if ((unsigned char)*text < 32 || *text == 127) *text = '?';
}

static const char *wrong_with_hello(const struct probe_hello *h)
{
	if (h->op >= PROBE_OPS) return "an operation that there isn't";
	if (h->bytes < 1 || h->bytes > PROBE_MAX_BYTES) return "an impossible size";
	if (h->nqps < 1 || h->nqps > PROBE_MAX_QPS) return "an impossible number of queue pairs";
	if (h->max_message < 1) return "a port that takes no message";
	if (h->mtu < 1 || h->mtu > 5) return "an MTU that there isn't";
	if (h->psn > 0xffffff) return "a packet number of more than 24 bits";
	if (h->both_ways > 1 || h->sweep > 1) return "neither yes nor no";
	for (uint32_t q = 0; q < h->nqps; q++)
		if (h->qpns[q] > 0xffffff) return "a queue pair number of more than 24 bits";
	return NULL;
}

static const char *wrong_with_step(const struct probe_step *s)
{
	if (s->bytes < 1 || s->bytes > PROBE_MAX_BYTES) return "an impossible size";
	if (s->count < 1 || s->count > 10000000 || s->warmup > 10000000) return "an impossible number of repetitions";
	if (s->one_by_one > 1 || s->last > 1) return "neither yes nor no";
	return NULL;
}

bool probe_record_accept(struct probe_record *record, char *why, size_t why_bytes)
{
	const char *wrong = NULL;
	switch (record->head.type) {
	case PROBE_HELLO:
		clean(record->as.hello.host, sizeof(record->as.hello.host));
		clean(record->as.hello.port, sizeof(record->as.hello.port));
		wrong = wrong_with_hello(&record->as.hello);
		break;
	case PROBE_STEP: wrong = wrong_with_step(&record->as.step); break;
	case PROBE_DONE: clean(record->as.done.text, sizeof(record->as.done.text)); break;
	case PROBE_FAILED: clean(record->as.failed.text, sizeof(record->as.failed.text)); break;
	default: break;
	}
	if (wrong) snprintf(why, why_bytes, "its %s has %s", probe_type_name(record->head.type), wrong);
	return !wrong;
}

/* The wire's bytes: making, checking, proving. No state, no descriptors: what the fuzzer runs. */
#include "boot/wire.h"
#include "base/text.h"
#include <stdio.h>
#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire is little-endian and packed as it is");
_Static_assert(sizeof(struct tp_wire_hello) == 56, "a hello keeps its form for ever");
_Static_assert(sizeof(struct tp_wire_challenge) == 80, "a challenge keeps its form for ever");
_Static_assert(sizeof(struct tp_wire_frame) == 32, "a frame's header");

void tp_wire_hello_make(struct tp_wire_hello *hello, enum tp_wire_kind kind, uint8_t flags, uint64_t name)
{
	memset(hello, 0, sizeof(*hello));
	memcpy(hello->magic, TP_WIRE_MAGIC, sizeof(hello->magic));
	hello->format = TP_WIRE_FORMAT;
	hello->kind = (uint8_t)kind;
	hello->flags = flags;
	hello->name = name;
	tp_secret_random(hello->nonce, sizeof(hello->nonce));
}

static bool all_zero(const uint8_t *bytes, size_t count)
{
	for (size_t i = 0; i < count; i++)
		if (bytes[i]) return false;
	return true;
}

static bool starts_with(const uint8_t *bytes, size_t count, const char *word)
{
	size_t length = strlen(word);
	return count >= length && memcmp(bytes, word, length) == 0;
}

static const char *describe_stranger(const uint8_t *bytes, size_t count, char *text, size_t text_bytes)
{
	static const char *const methods[] = { "GET ", "POST ", "HEAD ", "PUT ", "OPTIONS ", "CONNECT ", "DELETE ", "PRI * HTTP" };
	for (size_t i = 0; i < TP_ARRAY_LEN(methods); i++)
		if (starts_with(bytes, count, methods[i])) return "sent an HTTP request";
	if (count == 0) return "sent nothing";
	if (all_zero(bytes, count)) return "sent zeros";
	if (count >= 3 && bytes[0] == 0x16 && bytes[1] == 3) return "sent a TLS hello";
	if (starts_with(bytes, count, "SSH-")) return "spoke SSH";
	int at = snprintf(text, text_bytes, "sent %zu bytes that are not ours (they begin with", count);
	for (size_t i = 0; i < count && i < 8 && at > 0 && (size_t)at < text_bytes; i++)
		at += snprintf(text + at, text_bytes - (size_t)at, " %02x", bytes[i]);
	if (at > 0 && (size_t)at < text_bytes) snprintf(text + at, text_bytes - (size_t)at, ")");
	return text;
}

const char *tp_wire_hello_check(const void *bytes, size_t count, char *text, size_t text_bytes)
{
	struct tp_wire_hello hello;
	size_t magic = sizeof(hello.magic);
	if (memcmp(bytes, TP_WIRE_MAGIC, TP_MIN(count, magic)) != 0 || count == 0)
		return describe_stranger(bytes, count, text, text_bytes);
	if (count < sizeof(hello)) {
		snprintf(text, text_bytes, "broke off its greeting after %zu of %zu bytes", count, sizeof(hello));
		return text;
	}
	memcpy(&hello, bytes, sizeof(hello));
	if (hello.format != TP_WIRE_FORMAT) {
		snprintf(text, text_bytes, "speaks version %u of the bootstrap's greeting, this process version %u", hello.format,
			TP_WIRE_FORMAT);
		return text;
	}
	if (hello.kind < TP_WIRE_JOIN || hello.kind > TP_WIRE_SEGMENT || hello.zero || (hello.flags & ~TP_WIRE_HOLD))
		return "sent a malformed greeting";
	return NULL;
}

void tp_wire_prove(const uint8_t secret[TP_SECRET_BYTES], enum tp_wire_side side, const struct tp_wire_hello *hello,
	const uint8_t nonce[TP_WIRE_NONCE], uint8_t out[TP_SECRET_BYTES])
{
	struct { uint8_t what[7]; uint8_t side; struct tp_wire_hello hello; uint8_t nonce[TP_WIRE_NONCE]; } __attribute__((packed))
		text = { .what = "proof", .side = (uint8_t)side, .hello = *hello };
	memcpy(text.nonce, nonce, sizeof(text.nonce));
	tp_secret_mac(secret, &text, sizeof(text), out);
}

void tp_wire_session(const uint8_t secret[TP_SECRET_BYTES], const struct tp_wire_hello *hello,
	const uint8_t nonce[TP_WIRE_NONCE], uint8_t keys[2][TP_SECRET_BYTES])
{
	struct { uint8_t what[7]; uint8_t side; uint8_t theirs[TP_WIRE_NONCE], ours[TP_WIRE_NONCE]; } __attribute__((packed))
		text = { .what = "frames" };
	memcpy(text.theirs, hello->nonce, sizeof(text.theirs));
	memcpy(text.ours, nonce, sizeof(text.ours));
	for (int way = 0; way < 2; way++) {
		text.side = (uint8_t)way;
		tp_secret_mac(secret, &text, sizeof(text), keys[way]);
	}
}

/* The payload is hashed first, so that header and payload need not be copied together. */
static void frame_mac(const struct tp_wire_frame *frame, const uint8_t key[TP_SECRET_BYTES], const void *payload,
	uint8_t out[TP_SECRET_BYTES])
{
	struct { struct tp_wire_frame head; uint8_t sum[TP_SECRET_BYTES]; } __attribute__((packed)) text = { .head = *frame };
	memset(text.head.mac, 0, sizeof(text.head.mac));
	if (frame->bytes) tp_secret_mac(key, payload, frame->bytes, text.sum);
	tp_secret_mac(key, &text, sizeof(text), out);
}

void tp_wire_seal(struct tp_wire_frame *frame, const uint8_t key[TP_SECRET_BYTES], enum tp_wire_type type, uint64_t number,
	const void *payload, size_t bytes)
{
	uint8_t mac[TP_SECRET_BYTES];
	*frame = (struct tp_wire_frame){ .bytes = (uint32_t)bytes, .type = (uint16_t)type, .number = number };
	frame_mac(frame, key, payload, mac);
	memcpy(frame->mac, mac, sizeof(frame->mac));
}

const char *tp_wire_frame_check(const struct tp_wire_frame *frame, uint64_t number, size_t limit)
{
	if (frame->type == 0 || frame->type >= TP_FRAME_TYPES || frame->zero) return "sent a frame of no known type";
	if (frame->number != number) return "sent a frame out of its order (a replay?)";
	if (frame->bytes > limit || frame->bytes > TP_WIRE_FRAME_MAX) return "announced a frame that is too long";
	return NULL;
}

bool tp_wire_frame_proven(const struct tp_wire_frame *frame, const uint8_t key[TP_SECRET_BYTES], const void *payload)
{
	uint8_t found[TP_SECRET_BYTES] = {0}, right[TP_SECRET_BYTES];
	frame_mac(frame, key, payload, right);
	memset(right + TP_WIRE_MAC, 0, sizeof(right) - TP_WIRE_MAC);
	memcpy(found, frame->mac, TP_WIRE_MAC);
	return tp_secret_equal(found, right);
}

void tp_wire_mask(const uint8_t key[TP_SECRET_BYTES], uint8_t bytes[TP_SECRET_BYTES])
{
	uint8_t stream[TP_SECRET_BYTES];
	tp_secret_mac(key, "mask", 4, stream);
	for (int i = 0; i < TP_SECRET_BYTES; i++) bytes[i] ^= stream[i];
}

void tp_wire_addr_put(struct tp_wire_addr *out, const union tp_addr *addr)
{
	memset(out, 0, sizeof(*out));
	if (addr->sa.sa_family == AF_INET6) {
		out->family = 6;
		out->port = ntohs(addr->v6.sin6_port);
		out->scope = addr->v6.sin6_scope_id;
		memcpy(out->ip, &addr->v6.sin6_addr, 16);
	} else {
		out->family = 4;
		out->port = ntohs(addr->v4.sin_port);
		memcpy(out->ip, &addr->v4.sin_addr, 4);
	}
}

bool tp_wire_addr_get(const struct tp_wire_addr *in, union tp_addr *out)
{
	if ((in->family != 4 && in->family != 6) || in->port == 0) return false;
	memset(out, 0, sizeof(*out));
	if (in->family == 6) {
		out->v6.sin6_family = AF_INET6;
		out->v6.sin6_port = htons(in->port);
		out->v6.sin6_scope_id = in->scope;
		memcpy(&out->v6.sin6_addr, in->ip, 16);
	} else {
		out->v4.sin_family = AF_INET;
		out->v4.sin_port = htons(in->port);
		memcpy(&out->v4.sin_addr, in->ip, 4);
	}
	return true;
}

const char *tp_wire_join_check(struct tp_wire_join *join, size_t bytes)
{
	union tp_addr addr;
	if (bytes != sizeof(*join)) return "a join of the wrong length";
	tp_text_clean(join->host_name, sizeof(join->host_name));
	if (join->nranks < 1 || join->nranks > (1 << 20)) return "a join with an impossible number of ranks";
	if (join->rank < 0 || join->rank >= join->nranks) return "a join with a rank out of range";
	if (join->nids < 1 || join->nids > join->nranks || join->group < 0 || join->group >= join->nids)
		return "a join with an impossible number of ids";
	if (!tp_wire_addr_get(&join->service, &addr)) return "a join without an address";
	if (join->group > 0 && !tp_wire_addr_get(&join->first, &addr)) return "a join without the first root's address";
	if (join->timeout_ms < 1) return "a join without a time limit";
	return NULL;
}

size_t tp_wire_table_bytes(int nhosts, int nranks)
{
	return sizeof(struct tp_wire_table) + (size_t)nhosts * sizeof(struct tp_wire_host) +
		(size_t)nranks * sizeof(struct tp_wire_peer);
}

const char *tp_wire_table_check(const void *payload, size_t bytes, int nranks)
{
	struct tp_wire_table head;
	if (bytes < sizeof(head)) return "a table that is too short";
	memcpy(&head, payload, sizeof(head));
	if (head.nranks != nranks || head.nhosts < 1 || head.nhosts > nranks) return "a table of another communicator";
	if (bytes != tp_wire_table_bytes(head.nhosts, nranks)) return "a table of the wrong length";
	const struct tp_wire_host *hosts = (const void *)((const char *)payload + sizeof(head));
	const struct tp_wire_peer *peers = (const void *)(hosts + head.nhosts);
	int seen = 0;
	for (int i = 0; i < head.nhosts; i++) {
		if (memchr(hosts[i].name, 0, sizeof(hosts[i].name)) == NULL) return "a table with an endless name";
		for (const char *c = hosts[i].name; *c; c += tp_text_char(c))
			if (tp_text_char(c) == 0) return "a table with a name that isn't text";
	}
	for (int i = 0; i < nranks; i++) {
		union tp_addr addr;
		if (peers[i].host < 0 || peers[i].host > seen || peers[i].host >= head.nhosts) return "a table with its hosts out of order";
		if (peers[i].host == seen) seen++;
		if (!tp_wire_addr_get(&peers[i].service, &addr)) return "a table without addresses";
	}
	return seen == head.nhosts ? NULL : "a table with an empty host";
}

void tp_wire_table_index(const void *table, int *first, int *ranks)
{
	const struct tp_wire_table *head = table;
	const struct tp_wire_peer *peers = tp_wire_table_peers(table);
	for (int h = 0; h <= head->nhosts; h++) first[h] = 0;
	for (int r = 0; r < head->nranks; r++) first[peers[r].host]++;
	for (int h = 1; h <= head->nhosts; h++) first[h] += first[h - 1];
	/* Each entry is its host's end now, and moves down to its beginning. */
	for (int r = head->nranks - 1; r >= 0; r--) ranks[--first[peers[r].host]] = r;
}

void tp_wire_fail_make(struct tp_wire_fail *out, ncclResult_t result, const char *text)
{
	memset(out, 0, sizeof(*out));
	out->result = (int32_t)result;
	snprintf(out->text, sizeof(out->text), "%s", text);
}

bool tp_wire_fail_read(struct tp_wire_fail *out, const void *payload, size_t bytes)
{
	if (bytes != sizeof(*out)) return false;
	memcpy(out, payload, sizeof(*out));
	tp_text_clean(out->text, sizeof(out->text));
	if (out->result <= ncclSuccess || out->result >= ncclNumResults) out->result = ncclInternalError;
	return true;
}

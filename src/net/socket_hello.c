/* The words of the handshake; see socket_hello.h. */
#include <arpa/inet.h>
#include <string.h>
#include "net/socket_hello.h"

static const uint8_t hello_magic[8] = { 'T', 'e', 'l', 'p', 'N', 'e', 't', 0xe5 };
static const uint8_t handle_magic[8] = { 'T', 'e', 'l', 'p', 'H', 'n', 'd', 0xe5 };

void tp_wire_fill_prefix(struct tp_wire_prefix *prefix, enum tp_wire_type type, size_t bytes, enum tp_wire_status status)
{
	memcpy(prefix->magic, hello_magic, sizeof(prefix->magic));
	prefix->version = TP_WIRE_VERSION;
	prefix->bytes = (uint16_t)bytes;
	prefix->type = (uint8_t)type;
	prefix->status = (uint8_t)status;
	prefix->zero = 0;
}

enum tp_wire_verdict tp_wire_check(const void *data, size_t have, enum tp_wire_type type, size_t bytes)
{
	struct tp_wire_prefix prefix;

	if (memcmp(data, hello_magic, TP_MIN(have, sizeof(hello_magic))) != 0) return TP_WIRE_STRANGER;
	if (have < sizeof(prefix)) return TP_WIRE_MORE;
	memcpy(&prefix, data, sizeof(prefix));
	if (prefix.version != TP_WIRE_VERSION) return TP_WIRE_OTHER_VERSION;
	if (prefix.type != type || prefix.bytes != bytes || prefix.zero != 0) return TP_WIRE_STRANGER;
	return have < bytes ? TP_WIRE_MORE : TP_WIRE_DONE;
}

const char *tp_wire_check_hello(const struct tp_wire_hello *hello)
{
	unsigned bulk;

	if (hello->nsockets == 0 || hello->nsockets > 65) return "the number of sockets is not 1 to 65";
	if (hello->socket >= hello->nsockets) return "the socket's index is not below their number";
	if (hello->nthreads > 16) return "the number of helper threads is above 16";
	if (hello->from < 0 || hello->to < 0) return "a rank is negative";
	if (hello->nthreads == 0) return NULL;
	bulk = hello->nsockets - 1u;
	if (bulk == 0 || bulk % hello->nthreads != 0) return "the sockets can't be shared out evenly to the helper threads";
	return NULL;
}

const char *tp_wire_describe_stranger(const void *data, size_t have)
{
	static const struct { const char *start; const char *what; } known[] = {
		{ "GET ", "an HTTP request" }, { "POST ", "an HTTP request" }, { "HEAD ", "an HTTP request" }, { "PUT ", "an HTTP request" },
		{ "OPTIONS ", "an HTTP request" }, { "CONNECT ", "an HTTP request" }, { "PRI * ", "an HTTP/2 client" },
		{ "HTTP/", "an HTTP server" }, { "\x16\x03", "a TLS hello" }, { "SSH-", "an SSH peer" }, { "\xff\xfb", "a telnet peer" },
	};
	const unsigned char *bytes = data;
	size_t zeros = 0;

	if (have == 0) return "somebody who says nothing";
	for (size_t i = 0; i < TP_ARRAY_LEN(known); i++) {
		size_t n = strlen(known[i].start);
		if (have >= n && memcmp(bytes, known[i].start, n) == 0) return known[i].what;
	}
	while (zeros < have && bytes[zeros] == 0) zeros++;
	if (zeros == have) return "zeros";
	if (memcmp(bytes, hello_magic, TP_MIN(have, sizeof(hello_magic))) == 0) return "an unfinished or malformed hello";
	return "bytes that are no hello of ours";
}

const char *tp_wire_status_text(enum tp_wire_status status)
{
	switch (status) {
	case TP_WIRE_OK: return "accepted";
	case TP_WIRE_BAD_VERSION: return "it speaks another version of the protocol (are all ranks using the same library?)";
	case TP_WIRE_BAD_LISTENER: return "its listener is a different one (has a port been taken over by another process?)";
	case TP_WIRE_BAD_COMM: return "it serves another communicator";
	case TP_WIRE_BAD_PROOF: return "our proof of the communicator's secret is wrong (same unique id, same TELPHER_JOB_SECRET?)";
	case TP_WIRE_BAD_SHAPE: return "it finds our hello contradictory";
	}
	return "it gives a reason that this version doesn't know";
}

void tp_wire_mac(const uint8_t secret[TP_SECRET_BYTES], bool connector, const struct tp_wire_hello *hello,
	const uint8_t acceptor_nonce[TP_WIRE_NONCE_BYTES], uint8_t out[TP_SECRET_BYTES])
{
	struct {
		char label[16];
		struct tp_wire_hello hello;
		uint8_t nonce[TP_WIRE_NONCE_BYTES];
	} __attribute__((packed)) text;

	memset(&text, 0, sizeof(text));
	memcpy(text.label, connector ? "socket connector" : "socket acceptor ", sizeof(text.label));
	text.hello = *hello;
	memcpy(text.nonce, acceptor_nonce, sizeof(text.nonce));
	tp_secret_mac(secret, &text, sizeof(text), out);
}

void tp_wire_write_handle(const union tp_addr *addr, uint64_t listener, void *handle)
{
	struct tp_wire_handle h = { .version = TP_WIRE_VERSION, .listener = listener };

	memcpy(h.magic, handle_magic, sizeof(h.magic));
	if (addr->sa.sa_family == AF_INET) {
		h.family = 4;
		h.port = ntohs(addr->v4.sin_port);
		memcpy(h.addr, &addr->v4.sin_addr, 4);
	} else {
		h.family = 6;
		h.port = ntohs(addr->v6.sin6_port);
		memcpy(h.addr, &addr->v6.sin6_addr, 16);
	}
	memset(handle, 0, TP_NET_HANDLE_BYTES);
	memcpy(handle, &h, sizeof(h));
}

ncclResult_t tp_wire_read_handle(const void *handle, union tp_addr *addr, uint64_t *listener)
{
	struct tp_wire_handle h;
	union tp_addr a;

	memcpy(&h, handle, sizeof(h));
	if (memcmp(h.magic, handle_magic, sizeof(h.magic)) != 0)
		return TP_FAIL(ncclInternalError, "NET/Socket : a peer's connect handle isn't one of the Socket transport (do all ranks use the same network?)");
	if (h.version != TP_WIRE_VERSION)
		return TP_FAIL(ncclInvalidUsage, "NET/Socket : a peer's connect handle has version %u, this library's is %u", h.version, TP_WIRE_VERSION);
	if ((h.family != 4 && h.family != 6) || h.port == 0)
		return TP_FAIL(ncclInternalError, "NET/Socket : a peer's connect handle has family %u and port %u; 4 or 6 and a port above 0 would be right",
			h.family, h.port);
	memset(&a, 0, sizeof(a));
	if (h.family == 4) {
		a.v4.sin_family = AF_INET;
		a.v4.sin_port = htons(h.port);
		memcpy(&a.v4.sin_addr, h.addr, 4);
	} else {
		a.v6.sin6_family = AF_INET6;
		a.v6.sin6_port = htons(h.port);
		memcpy(&a.v6.sin6_addr, h.addr, 16);
	}
	*addr = a;
	*listener = h.listener;
	return ncclSuccess;
}

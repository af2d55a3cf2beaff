/* What is said over a socket before data flows, and the header of each message. Pure functions over bytes: nothing here
 * reads a descriptor, so that all of it can be fuzzed.
 *
 *   connector                                  acceptor
 *   hello   {who, where to, fresh nonce}   ->
 *                                          <-  answer {status, fresh nonce, MAC over both}   the acceptor knows the secret
 *   proof   {MAC over both}                ->                                                and so does the connector
 *                                          <-  welcome {status}
 *
 * The secret keys the MACs and never travels; both nonces are under both MACs, with a different label each, so neither an
 * old nor a mirrored conversation proves anything. Integers are little-endian, as every machine that we run on is; on
 * another the version reads wrong and is refused with words. */
#ifndef TP_NET_SOCKET_HELLO_H
#define TP_NET_SOCKET_HELLO_H

#include "net/net.h"

#define TP_WIRE_VERSION 1
#define TP_WIRE_NONCE_BYTES 16
#define TP_WIRE_ID_BYTES 16

enum tp_wire_type { TP_WIRE_HELLO = 1, TP_WIRE_ANSWER, TP_WIRE_PROOF, TP_WIRE_WELCOME };
enum tp_wire_status { TP_WIRE_OK, TP_WIRE_BAD_VERSION, TP_WIRE_BAD_LISTENER, TP_WIRE_BAD_COMM, TP_WIRE_BAD_PROOF, TP_WIRE_BAD_SHAPE };

struct tp_wire_prefix {                 /* the same in every version, so that versions can tell each other apart */
	uint8_t magic[8];
	uint16_t version;
	uint16_t bytes;                     /* of the whole message, this prefix included */
	uint8_t type;                       /* enum tp_wire_type */
	uint8_t status;                     /* enum tp_wire_status; of answer and welcome */
	uint16_t zero;
} __attribute__((packed));

struct tp_wire_hello {
	struct tp_wire_prefix prefix;
	uint64_t listener;                  /* the id in the handle: a port that was reused is not mistaken */
	uint64_t comm_hash;
	uint8_t connection[TP_WIRE_ID_BYTES];   /* random: which sockets belong together */
	uint8_t nonce[TP_WIRE_NONCE_BYTES];
	int32_t from, to;
	uint8_t channel, lane_class;
	uint8_t socket, nsockets;           /* index; how many the connection has */
	uint8_t nthreads;                   /* helper threads a side; 0: none, and socket 0 carries bulk data too */
	uint8_t zero[3];
} __attribute__((packed));

struct tp_wire_answer { struct tp_wire_prefix prefix; uint8_t nonce[TP_WIRE_NONCE_BYTES]; uint8_t mac[TP_SECRET_BYTES]; } __attribute__((packed));
struct tp_wire_proof { struct tp_wire_prefix prefix; uint8_t mac[TP_SECRET_BYTES]; } __attribute__((packed));
struct tp_wire_welcome { struct tp_wire_prefix prefix; } __attribute__((packed));

#define TP_WIRE_MESSAGE 0x5450u
struct tp_wire_message {                /* in front of each message's data, on socket 0 */
	uint32_t kind;                      /* TP_WIRE_MESSAGE */
	int32_t tag;
	uint64_t bytes;
} __attribute__((packed));

/* What listen() hands out. */
struct tp_wire_handle {
	uint8_t magic[8];
	uint16_t version, family;           /* 4 or 6 */
	uint16_t port, zero;                /* host order */
	uint64_t listener;
	uint8_t addr[16];
} __attribute__((packed));
_Static_assert(sizeof(struct tp_wire_handle) <= TP_NET_HANDLE_BYTES, "the handle must fit");

enum tp_wire_verdict { TP_WIRE_MORE, TP_WIRE_DONE, TP_WIRE_STRANGER, TP_WIRE_OTHER_VERSION };

void tp_wire_fill_prefix(struct tp_wire_prefix *prefix, enum tp_wire_type type, size_t bytes, enum tp_wire_status status);
/* Looks at the first `have` bytes of a message that should be of this type and size. */
enum tp_wire_verdict tp_wire_check(const void *data, size_t have, enum tp_wire_type type, size_t bytes);
/* Checks what a whole hello says of itself; NULL: fine, else what is wrong. */
const char *tp_wire_check_hello(const struct tp_wire_hello *hello);
/* Plain words for what a stranger sent: "an HTTP request", "zeros". */
const char *tp_wire_describe_stranger(const void *data, size_t have);
const char *tp_wire_status_text(enum tp_wire_status status);
void tp_wire_mac(const uint8_t secret[TP_SECRET_BYTES], bool connector, const struct tp_wire_hello *hello,
	const uint8_t acceptor_nonce[TP_WIRE_NONCE_BYTES], uint8_t out[TP_SECRET_BYTES]);
ncclResult_t tp_wire_read_handle(const void *handle, union tp_addr *addr, uint64_t *listener);
void tp_wire_write_handle(const union tp_addr *addr, uint64_t listener, void *handle);

#endif

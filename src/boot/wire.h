/* What goes over the bootstrap's connections. Little-endian, packed; sizes are checked before anything is read.
 *
 * The caller sends HELLO (what it wants, the id's public name, a nonce), the service answers CHALLENGE (a nonce of its own and
 * a proof that it knows the secret too), the caller answers PROOF; then both send frames. Proofs and the frames' MACs are keyed
 * by the secret and cover both nonces and the frame's number, so nothing recorded earlier is of use. HELLO, CHALLENGE and
 * PROOF keep their form for ever; what may change between versions is told apart by `protocol` in JOIN. */
#ifndef TP_BOOT_WIRE_H
#define TP_BOOT_WIRE_H

#include "base/base.h"

#define TP_WIRE_MAGIC "TELPHER"
#define TP_WIRE_FORMAT 1            /* of the handshake */
#define TP_WIRE_PROTOCOL 1          /* of the frames */
#define TP_WIRE_LIBRARY 100         /* 0.1.0 */
#define TP_WIRE_NONCE 32
#define TP_WIRE_MAC 16
#define TP_WIRE_FRAME_MAX (64u << 20)

enum tp_wire_kind { TP_WIRE_JOIN = 1, TP_WIRE_GROUP, TP_WIRE_LINK, TP_WIRE_SEGMENT };
enum { TP_WIRE_HOLD = 1 };          /* hello flag: an id that is not known yet will be */

struct tp_wire_hello {
	char magic[8];
	uint16_t format;
	uint8_t kind, flags;
	uint32_t zero;
	uint64_t name;                  /* of the id: says which secret, tells nothing of it */
	uint8_t nonce[TP_WIRE_NONCE];
} __attribute__((packed));

enum tp_wire_verdict { TP_WIRE_GO_ON, TP_WIRE_UNKNOWN, TP_WIRE_FOREIGN };
struct tp_wire_challenge {
	char magic[8];
	uint16_t format;
	uint16_t verdict;               /* enum tp_wire_verdict */
	uint32_t zero;
	uint8_t nonce[TP_WIRE_NONCE];
	uint8_t proof[TP_SECRET_BYTES];
} __attribute__((packed));

struct tp_wire_proof { uint8_t proof[TP_SECRET_BYTES]; } __attribute__((packed));

enum tp_wire_type {
	TP_FRAME_JOIN = 1,              /* rank to root: struct tp_wire_join */
	TP_FRAME_GROUP,                 /* root to first root: joins of its ranks */
	TP_FRAME_TABLE,                 /* root to a host's first rank (and to other roots): seat, table */
	TP_FRAME_SEAT,                  /* root to the others: seat */
	TP_FRAME_READY,                 /* the host's segment exists: u32 host */
	TP_FRAME_DONE,                  /* rank to root, root to first root: attached */
	TP_FRAME_GO,                    /* everybody is attached */
	TP_FRAME_FAIL,                  /* either way: struct tp_wire_fail */
	TP_FRAME_HOST,                  /* first on a link: u32 host of the caller */
	TP_FRAME_EVENT,                 /* struct tp_wire_event */
	TP_FRAME_GATHER,                /* struct tp_wire_gather, blocks */
	TP_FRAME_CALL,                  /* struct tp_wire_call: a stalled rank's */
	TP_FRAME_WATCH,                 /* "send me life signs" */
	TP_FRAME_LIFE,
	TP_FRAME_LEFT,                  /* this process left in good order */
	TP_FRAME_ASK,                   /* u32: which shared segment */
	TP_FRAME_HAVE,                  /* u64 bytes; the descriptor follows with one byte */
	TP_FRAME_TYPES
};

struct tp_wire_frame {
	uint32_t bytes;                 /* of the payload that follows */
	uint16_t type;
	uint16_t zero;
	uint64_t number;                /* 0, 1, … each way */
	uint8_t mac[TP_WIRE_MAC];       /* of the fields above and the payload */
} __attribute__((packed));

struct tp_wire_addr {
	uint16_t family;                /* 4 or 6 */
	uint16_t port;
	uint32_t scope;
	uint8_t ip[16];
} __attribute__((packed));

struct tp_wire_join {
	uint32_t protocol, library;     /* these two stay first in every version */
	int32_t rank, nranks, nids, group;
	int32_t pid, device, timeout_ms;
	uint64_t host_hash, process_hash;
	struct tp_wire_addr service;
	char host_name[64];
	/* nids > 1: the first root, its secret masked by the connection's key. */
	struct tp_wire_addr first;
	uint8_t first_secret[TP_SECRET_BYTES];
} __attribute__((packed));

struct tp_wire_seat { uint8_t session[16]; int32_t host, nhosts, leader_rank, leader_pid; } __attribute__((packed));
/* A table: i32 nhosts, i32 nranks, nhosts of struct tp_wire_host, nranks of struct tp_wire_peer, in order of rank. */
struct tp_wire_table { int32_t nhosts, nranks; } __attribute__((packed));
struct tp_wire_host { uint64_t hash; char name[64]; } __attribute__((packed));
struct tp_wire_peer { int32_t host, pid, device; uint64_t process_hash; struct tp_wire_addr service; } __attribute__((packed));

#define TP_WIRE_TEXT 1000
struct tp_wire_fail { int32_t result; char text[TP_WIRE_TEXT]; } __attribute__((packed));
struct tp_wire_event { uint32_t kind; int32_t rank, result; char text[240]; } __attribute__((packed));
struct tp_wire_gather { uint64_t seq; uint32_t round, bytes_each, first_host, nhosts; } __attribute__((packed));
struct tp_wire_call { int32_t rank, root; uint64_t seq, count; uint32_t hash; uint8_t func, type, op, zero; } __attribute__((packed));

/* Who speaks in a proof: never the same bytes both ways. */
enum tp_wire_side { TP_WIRE_CALLER = 'c', TP_WIRE_SERVICE = 's' };

void tp_wire_hello_make(struct tp_wire_hello *hello, enum tp_wire_kind kind, uint8_t flags, uint64_t name);
/* NULL: a hello of ours. Else what the bytes (of any number) look like, in plain words, for the log; a foreign version too. */
const char *tp_wire_hello_check(const void *bytes, size_t count, char *text, size_t text_bytes);
void tp_wire_prove(const uint8_t secret[TP_SECRET_BYTES], enum tp_wire_side side, const struct tp_wire_hello *hello,
	const uint8_t nonce[TP_WIRE_NONCE], uint8_t out[TP_SECRET_BYTES]);
/* Keys of the frames: [0] caller to service, [1] back. */
void tp_wire_session(const uint8_t secret[TP_SECRET_BYTES], const struct tp_wire_hello *hello,
	const uint8_t nonce[TP_WIRE_NONCE], uint8_t keys[2][TP_SECRET_BYTES]);
void tp_wire_seal(struct tp_wire_frame *frame, const uint8_t key[TP_SECRET_BYTES], enum tp_wire_type type, uint64_t number,
	const void *payload, size_t bytes);
/* NULL: the header may be believed as far as its length goes. Else what is wrong with it. */
const char *tp_wire_frame_check(const struct tp_wire_frame *frame, uint64_t number, size_t limit);
bool tp_wire_frame_proven(const struct tp_wire_frame *frame, const uint8_t key[TP_SECRET_BYTES], const void *payload);
/* XORs 32 bytes with a key's stream. */
void tp_wire_mask(const uint8_t key[TP_SECRET_BYTES], uint8_t bytes[TP_SECRET_BYTES]);

void tp_wire_addr_put(struct tp_wire_addr *out, const union tp_addr *addr);
bool tp_wire_addr_get(const struct tp_wire_addr *in, union tp_addr *out);

/* NULL or what is wrong; rank, nranks, group and name are in range and terminated afterwards. */
const char *tp_wire_join_check(struct tp_wire_join *join, size_t bytes);
/* NULL or what is wrong: sizes, hosts in order of their first rank, addresses. */
const char *tp_wire_table_check(const void *payload, size_t bytes, int nranks);
size_t tp_wire_table_bytes(int nhosts, int nranks);
static inline const struct tp_wire_peer *tp_wire_table_peers(const void *table)
{
	const struct tp_wire_table *head = table;
	return (const void *)((const char *)(head + 1) + (size_t)head->nhosts * sizeof(struct tp_wire_host));
}
/* Ranks by host, of a checked table. first: [nhosts + 1], ranks: [nranks]; host h has ranks[first[h]] up to first[h + 1]. */
void tp_wire_table_index(const void *table, int *first, int *ranks);

void tp_wire_fail_make(struct tp_wire_fail *out, ncclResult_t result, const char *text);
/* False: of the wrong length. The result is an error and the text ends, whatever was sent. */
bool tp_wire_fail_read(struct tp_wire_fail *out, const void *payload, size_t bytes);

#endif

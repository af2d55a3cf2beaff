/* What the two ends of an IB connection say over its TCP connection, and the FIFO entry that is written by RDMA. Every record has
 * a type tag, a version and its length; nothing that comes in is believed before it was checked. Pure functions over bytes.
 * Integers are little-endian, as every machine that we run on is. */
#ifndef TP_NET_IB_WIRE_H
#define TP_NET_IB_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TP_IB_WIRE_VERSION 4
#define TP_IB_MAX_PATHS 16
#define TP_IB_MAX_MERGED 8                  /* ports of one device */
#define TP_IB_MAX_KEYS 8                    /* of a FIFO entry: cards that an end uses */
#define TP_IB_MAX_QPS 16                    /* of a path */
#define TP_IB_TOKEN_BYTES 16

enum tp_ib_connect { TP_IB_BY_TCP, TP_IB_BY_RDMA_CM };

enum tp_ib_record_type {
	TP_IB_META = 1,                         /* connector, then acceptor: who I am */
	TP_IB_READY,                            /* connector: my queue pairs can receive; path: the way in use, attempt: the paths that live, by bit */
	TP_IB_REFUSED,                          /* instead of META or READY: text says why */
	TP_IB_PING, TP_IB_PONG,
	TP_IB_SWITCH,                           /* I have left the way in use */
	TP_IB_REVIVE,                           /* a dead path's queue pairs are set up afresh */
	TP_IB_CONNECTED,                        /* … and can receive */
	TP_IB_PROVEN,                           /* … and a write went through */
	TP_IB_GOODBYE,                          /* the connection has failed here: text says why */
	TP_IB_LEAVING,                          /* at a good end. Receiver: what it has got; acknowledgements may be lost with its queue pairs. Sender: all is through */
	TP_IB_WANT,                             /* sender: path: a way that is better than the one in use, attempt: the paths that live, by bit */
	TP_IB_RECORD_TYPES
};

struct tp_ib_wire_head { uint8_t magic[4]; uint16_t version, type; uint32_t bytes; } __attribute__((packed));

struct tp_ib_wire_path {
	uint8_t gid[16];
	uint8_t gid_type;                       /* enum tp_ib_gid_type */
	uint8_t gid_index;
	uint8_t link_layer;                     /* IBV_LINK_LAYER_* */
	uint8_t port;                           /* 0: this path is not there */
	uint8_t mtu;                            /* enum ibv_mtu */
	uint8_t live;                           /* in the acceptor's answer: its queue pairs are connected */
	uint8_t index, place;                   /* of the device among this side's, of the port in the device */
	uint8_t way;                            /* that it belongs to */
	uint8_t key;                            /* which of a FIFO entry's keys is for it */
	uint8_t zero[2];
	uint16_t lid, flid;                     /* flid: of the routable GID; 0: none */
	uint32_t rkey;                          /* of the block */
	uint32_t psn;                           /* of queue pair 0; the next has the next */
	uint32_t ece_vendor, ece_options;       /* connector: what its card can beyond the standard; acceptor: what both use; vendor 0: nothing */
	uint32_t qpns[TP_IB_MAX_QPS];
	char device[32];
} __attribute__((packed));

struct tp_ib_wire_meta {
	uint64_t block;                         /* address of the FIFO and sizes */
	uint32_t nqps, npaths;
	uint32_t split;
	uint32_t ports;                         /* that this side could use in all, merged or not */
	uint64_t kinds;                         /* equal where these are of the same kinds and speeds */
	int32_t rank;
	uint8_t connect;                        /* enum tp_ib_connect, the same at both ends */
	uint8_t zero;
	uint16_t cm_port;                       /* acceptor: where its rdma_cm listens, for this connection alone */
	uint8_t cm_token[TP_IB_TOKEN_BYTES];    /* acceptor: what shows that a connect request is of this connection */
	char host[64];
	char set[256];                          /* these ports in words, for messages */
	struct tp_ib_wire_path paths[TP_IB_MAX_PATHS];
} __attribute__((packed));

struct tp_ib_wire_switch {                  /* SWITCH, LEAVING (below and ahead) */
	uint32_t epoch;
	uint32_t dead;                          /* paths that can't be used, by bit */
	uint64_t below, ahead;                  /* receiver: all messages below are here, and of those from there on these, by bit */
	char why[256];
} __attribute__((packed));

struct tp_ib_wire_revive { uint32_t path, attempt, psn; } __attribute__((packed));      /* READY, REVIVE, CONNECTED, PROVEN, WANT */

struct tp_ib_wire_text { char text[512]; } __attribute__((packed));

/* Private data of rdma_cm's connect request and of its answer: which queue pair of which connection it is. META says all else: of the
 * 56 bytes that a request takes it would need two thousand. */
struct tp_ib_wire_token {
	uint8_t magic[4];
	uint16_t version;
	uint8_t path, qp;
	uint32_t attempt;                       /* of setting this path up: an older one's is refused */
	uint32_t ece_vendor, ece_options;       /* in the answer: what both use; vendor 0: nothing */
	uint8_t token[TP_IB_TOKEN_BYTES];
} __attribute__((packed));
_Static_assert(sizeof(struct tp_ib_wire_token) <= 56, "a connect request takes no more");

struct tp_ib_wire_refusal { uint8_t magic[4]; char text[140]; } __attribute__((packed));    /* private data of rdma_cm's refusal */
_Static_assert(sizeof(struct tp_ib_wire_refusal) <= 148, "a refusal takes no more");

struct tp_ib_record {
	struct tp_ib_wire_head head;
	union {
		struct tp_ib_wire_meta meta;
		struct tp_ib_wire_switch change;
		struct tp_ib_wire_revive revive;
		struct tp_ib_wire_text text;
		unsigned char bytes[1];
	} as;
} __attribute__((packed));
#define TP_IB_RECORD_MAX sizeof(struct tp_ib_record)

/* Those that come once both ends have met. */
struct tp_ib_note {
	struct tp_ib_wire_head head;
	union {
		struct tp_ib_wire_switch change;
		struct tp_ib_wire_revive revive;
		struct tp_ib_wire_text text;
	} as;
} __attribute__((packed));

/* One receive of a group. The number comes last: it is what the sender waits for, and a card writes a small write in order. */
struct tp_ib_fifo {
	uint64_t addr;
	uint64_t bytes;
	uint32_t rkeys[TP_IB_MAX_KEYS];         /* by the receiver's cards */
	int32_t tag;
	uint32_t n;                             /* receives of the group */
	_Atomic uint64_t number;                /* of the message, plus one */
};
_Static_assert(sizeof(struct tp_ib_fifo) == 64, "a FIFO entry is a cache line");

/* Bytes of a whole record of this type, head included; 0: there is no such type. */
size_t tp_ib_record_bytes(int type);
void tp_ib_record_start(struct tp_ib_record *record, enum tp_ib_record_type type);
/* Looks at the first `have` bytes: 0: more are needed, the record's length where it is whole, -1: no record of ours (why). */
long tp_ib_record_check(const void *data, size_t have, const char **why);
/* NULL, or what is wrong with it. Makes all texts end, and takes out of them what a log must not hold. */
const char *tp_ib_wire_check_meta(struct tp_ib_wire_meta *meta);
const char *tp_ib_wire_check_switch(struct tp_ib_wire_switch *change);
const char *tp_ib_wire_check_revive(const struct tp_ib_wire_revive *revive);
void tp_ib_token_start(struct tp_ib_wire_token *token);
/* NULL, or what is wrong: of private data, which may be longer (it is padded on its way). */
const char *tp_ib_token_read(const void *data, size_t bytes, struct tp_ib_wire_token *out);
void tp_ib_refusal_start(struct tp_ib_wire_refusal *refusal);
/* false: it is nobody's of ours. Its text is cleaned. */
bool tp_ib_refusal_read(const void *data, size_t bytes, struct tp_ib_wire_refusal *out);

#endif

/* What the two ends of a probe say to each other over TCP. Every record has a tag, a version, a type and its length, and nothing that
 * comes in is believed before it was checked. Pure functions over bytes. Integers are little-endian, as every machine that we run on.
 *
 *   client          server
 *   HELLO      ->           what I want, my memory and queue pairs, which can receive
 *              <-   HELLO   mine
 *   READY      <->  READY   my queue pairs are connected
 *   STEP       ->           of a sweep, any number of times
 *              <-   READY   my receives are posted
 *   DONE       <->  DONE    my part is over, and how it was; after a STEP and at the end
 *   FAILED instead of any of them: why */
#ifndef TELPHER_PROBE_WIRE_H
#define TELPHER_PROBE_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PROBE_WIRE_VERSION 1
#define PROBE_MAX_QPS 64
#define PROBE_MAX_BYTES ((uint64_t)1 << 46)     /* what a transfer may be */

enum probe_op { PROBE_WRITE, PROBE_READ, PROBE_SEND, PROBE_OPS };
enum probe_type { PROBE_HELLO = 1, PROBE_READY, PROBE_STEP, PROBE_DONE, PROBE_FAILED, PROBE_TYPES };

struct probe_head { uint8_t magic[4]; uint16_t version, type; uint32_t bytes; } __attribute__((packed));

struct probe_hello {
	uint64_t bytes;                         /* client: of the transfer; server: what it has room for */
	uint64_t seed;                          /* of what this side's memory holds, where it sends */
	uint64_t addr;                          /* memory that the other side may write or read */
	uint64_t max_message;                   /* of the port */
	uint32_t rkey, psn;                     /* psn: of queue pair 0; the next has the next */
	uint32_t nqps;
	uint32_t qpns[PROBE_MAX_QPS];
	uint8_t op, both_ways, sweep;           /* client; the server answers the same */
	uint8_t link_layer, mtu, gid_type, rd_atomic, zero;
	uint16_t lid, zero16;
	uint8_t gid[16];
	char host[64], port[80];
} __attribute__((packed));

struct probe_step { uint64_t bytes; uint32_t count, warmup; uint8_t one_by_one, last, zero[6]; } __attribute__((packed));
struct probe_done { uint64_t ns, imm; uint32_t ok, zero; char text[256]; } __attribute__((packed));
struct probe_text { char text[512]; } __attribute__((packed));

struct probe_record {
	struct probe_head head;
	union {
		struct probe_hello hello;
		struct probe_step step;
		struct probe_done done;
		struct probe_text failed;
	} as;
} __attribute__((packed));

const char *probe_op_name(int op);          /* "write" */
const char *probe_type_name(int type);      /* "HELLO" */
/* Bytes of a whole record of this type, head included; 0: there is no such type. */
size_t probe_record_bytes(int type);
void probe_record_start(struct probe_record *record, enum probe_type type);
/* Looks at the first `have` bytes: 0: more are needed, the record's length where its head is ours, -1: no record of ours (why, of why_bytes). */
long probe_record_check(const void *data, size_t have, char *why, size_t why_bytes);
/* A whole record: false: it can't be meant so, why says what is wrong. Makes all texts end and printable. */
bool probe_record_accept(struct probe_record *record, char *why, size_t why_bytes);

#endif

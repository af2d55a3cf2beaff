/* Messages of the connection manager: MADs of 256 bytes that go from QP 1 to QP 1 (InfiniBand's annex on communication management,
 * as Linux's ib_cm writes them), and the 36 bytes by which rdma_cm says in a request's private data whose IP addresses it means. */
#ifndef TP_VERBS_CM_MAD_H
#define TP_VERBS_CM_MAD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TP_MAD_BYTES 256
#define TP_MAD_PRIVATE 224              /* the most that any message carries */
#define TP_MAD_IP_BYTES 36
#define TP_MAD_ARI 72

enum tp_cm_kind {
	TP_CM_REQ = 0x10, TP_CM_MRA = 0x11, TP_CM_REJ = 0x12, TP_CM_REP = 0x13, TP_CM_RTU = 0x14, TP_CM_DREQ = 0x15, TP_CM_DREP = 0x16,
	TP_CM_SIDR_REQ = 0x17, TP_CM_SIDR_REP = 0x18
};
/* Why a REJ came: those that we send. */
enum { TP_REJ_NO_QP = 1, TP_REJ_TIMEOUT = 4, TP_REJ_UNSUPPORTED = 5, TP_REJ_INVALID_COMM_ID = 6, TP_REJ_INVALID_SERVICE = 8,
	TP_REJ_STALE = 10, TP_REJ_INVALID_GID = 13, TP_REJ_CONSUMER = 28 };
/* What a MRA or REJ is about. */
enum { TP_CM_ABOUT_REQ = 0, TP_CM_ABOUT_REP = 1, TP_CM_ABOUT_OTHER = 2 };
enum { TP_CM_RC = 0, TP_CM_UC = 1, TP_CM_XRC = 3 };

/* One message, taken apart, in host order. Which fields count follows from the kind; reserved ones are written as zeros. */
struct tp_cm_mad {
	enum tp_cm_kind kind;
	uint64_t transaction;
	uint32_t local_id, remote_id;       /* the sender's number of the connection, and the receiver's; SIDR: the request's */
	uint64_t service_id, ca_guid;
	uint32_t qpn, qkey, psn;            /* DREQ: the receiver's QP */
	uint8_t responder_resources, initiator_depth;
	uint8_t retry_count, rnr_retry_count, max_cm_retries;
	uint8_t local_timeout, remote_timeout;  /* 4.096 us * 2^n: to answer a message */
	uint8_t ack_timeout, target_ack_delay;
	uint8_t transport, mtu;             /* TP_CM_RC …; enum ibv_mtu */
	bool flow_control, srq;
	uint16_t pkey;
	uint8_t local_gid[16], remote_gid[16];
	uint32_t flow_label;
	uint8_t traffic_class, hop_limit, sl, packet_rate;
	uint8_t about;                      /* REJ, MRA: TP_CM_ABOUT_* */
	uint8_t service_timeout;            /* MRA */
	uint16_t reason;                    /* REJ */
	uint8_t status;                     /* SIDR_REP: 0 fine, 1 unsupported service, 2 rejected, 3 no QP */
	uint8_t ari_bytes, ari[TP_MAD_ARI]; /* REJ: more on the reason */
	uint8_t private_bytes;              /* when built: at most tp_cm_private_room; when parsed: all of it */
	uint8_t private_data[TP_MAD_PRIVATE];
};
/* A REJ without our number is about a request: of ours, which the peer couldn't read, so that only the transaction tells which; or
 * of the peer's, who has given it up before it heard our number, and says its own. */
static inline bool tp_cm_rej_of_request(const struct tp_cm_mad *mad) { return mad->kind == TP_CM_REJ && !mad->remote_id && mad->reason != TP_REJ_TIMEOUT; }
static inline bool tp_cm_rej_of_peer(const struct tp_cm_mad *mad) { return mad->kind == TP_CM_REJ && !mad->remote_id && mad->reason == TP_REJ_TIMEOUT; }
/* Bytes of private data that a message of the kind has; 0: no such kind. */
size_t tp_cm_private_room(enum tp_cm_kind kind);
void tp_cm_build(const struct tp_cm_mad *mad, uint8_t out[TP_MAD_BYTES]);
/* False: not a message of the connection manager, or of another version. */
bool tp_cm_parse(const uint8_t *data, size_t bytes, struct tp_cm_mad *out);

/* The start of a REQ's or SIDR_REQ's private data. Addresses: 16 bytes, IPv4 in the last four. */
struct tp_cm_ip { bool v6; uint16_t port; uint8_t from[16], to[16]; };
void tp_cm_build_ip(const struct tp_cm_ip *ip, uint8_t out[TP_MAD_IP_BYTES]);
/* False: no such header, or of another version. */
bool tp_cm_parse_ip(const uint8_t *data, size_t bytes, struct tp_cm_ip *out);
/* The service that stands for a port of an RDMA port space (enum rdma_port_space). */
static inline uint64_t tp_cm_service(uint16_t space, uint16_t port) { return (uint64_t)space << 16 | port; }

#endif

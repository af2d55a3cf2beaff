/* Two queue pairs of one process, connected, with a buffer each: what most tests of the verbs need. Only public calls are used. */
#ifndef TP_TESTS_VERBS_HELPER_API_H
#define TP_TESTS_VERBS_HELPER_API_H

#include <infiniband/verbs.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "sanitizers.h"

#define SIDE_BYTES 65536
#define SIDE_ACCESS (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND)

struct side {
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	uint8_t *data;
};
struct pair { struct ibv_context *context; struct side a, b; };

/* How a pair is made; zeros mean: RC, 16 requests, 64 completions, timeout 8 (1 ms), retry_cnt 1, rnr_retry 0, MTU 1024. */
struct pair_options {
	enum ibv_qp_type type;
	uint32_t wr, cqe, sge, inline_bytes;
	struct ibv_srq *srq;                /* of b */
	struct ibv_comp_channel *channel;   /* of b's CQ */
	uint8_t timeout, retry_cnt, rnr_retry, rnr_timer;
	bool unsignaled;                    /* sq_sig_all 0 */
	bool unconnected;                   /* stays in RESET */
	bool no_atomics;                    /* max_dest_rd_atomic 0 at b */
	unsigned access;                    /* of the QPs; 0: all */
	uint8_t traffic_class, gid_index;
};
struct ibv_context *open_first(void);
void pair_open(struct pair *pair, const struct pair_options *options);
void pair_close(struct pair *pair);
void side_open(struct side *side, struct ibv_context *context, const struct pair_options *options, bool is_b);
void side_close(struct side *side);
int to_init(struct ibv_qp *qp, unsigned access);
int to_rtr(struct ibv_qp *qp, uint32_t dest_qpn, uint32_t psn, const struct pair_options *options);
int to_rts(struct ibv_qp *qp, uint32_t psn, const struct pair_options *options);
void to_error(struct ibv_qp *qp);
enum ibv_qp_state state_of(struct ibv_qp *qp);
struct ibv_ah_attr own_address(struct ibv_context *context);

/* Posts and says what the call gave. remote: the side whose memory is named. */
int post_recv(struct side *side, uint64_t id, uint32_t offset, uint32_t bytes);
struct request {
	enum ibv_wr_opcode opcode;
	uint64_t id;
	uint32_t offset, bytes, remote_offset, imm, rkey;   /* rkey 0: remote's */
	uint64_t compare_add, swap;
	unsigned flags;
	struct side *remote;
	uint32_t lkey;                                      /* 0: its own */
};
int post(struct side *side, const struct request *request);

/* Waits (10 s) for the next completion. */
struct ibv_wc next_wc(struct ibv_cq *cq);
void expect_none(struct ibv_cq *cq);
/* The next asynchronous event (10 s), acknowledged. */
struct ibv_async_event next_event(struct ibv_context *context);
bool any_event(struct ibv_context *context);

#endif

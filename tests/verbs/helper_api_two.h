/* Two processes, a and b, connected by a queue pair each, with a buffer each: what tests of the way between processes need. Each is
 * a child of the test, which never opens the card itself. Only public calls are used. */
#ifndef TP_TESTS_VERBS_HELPER_API_TWO_H
#define TP_TESTS_VERBS_HELPER_API_TWO_H

#include <sys/types.h>
#include "verbs/helper_api.h"

#define END_BYTES (4u << 20)

/* What one says to the other; all of it can be used for something else once they are connected. */
struct end_info { uint32_t qpn, psn, rkey; union ibv_gid gid; uint64_t addr, extra; pid_t pid; };
struct end {
	bool is_a;
	int to_peer;                    /* a socket to the other process */
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	uint8_t *data;                  /* END_BYTES */
	struct end_info own, peer;
};
/* Zeros mean: RC, malloc'd memory, timeout 20 (the wire must not give up on a busy machine), retry_cnt 7, rnr_retry 7. */
struct end_options { enum ibv_qp_type type; uint8_t *data; uint8_t timeout, rnr_retry; bool no_timeout; uint32_t wr; };

/* Runs both; 0, or the line at which one of them failed (as its exit status, cut to 8 bits, is not: it is printed). A role that
 * was killed by sig counts as well. log: what the library said (NET, INFO), of both. */
struct outcome { bool a_ok, b_ok; char log[1 << 16]; };
void run_two(struct outcome *outcome, int (*a)(struct end *end), int (*b)(struct end *end));
void run_two_killed(struct outcome *outcome, int (*a)(struct end *end), int (*b)(struct end *end));      /* b ends by SIGKILL */

/* In the roles: 0, or the line of what failed. */
#define CHECK(condition) do { if (!(condition)) return failed_at(__FILE__, __LINE__, #condition); } while (0)
int failed_at(const char *file, int line, const char *what);
int end_open(struct end *end, const struct end_options *options);      /* and connects */
int end_close(struct end *end);
int end_reconnect(struct end *end);         /* from whatever state, as end_open did without options; own is told anew */
int end_meet(struct end *end);              /* both have come here; own and peer are exchanged */
int end_recv(struct end *end, uint64_t id, uint32_t offset, uint32_t bytes);
/* request->remote is ignored: the peer's memory at remote_offset. */
int end_post(struct end *end, const struct request *request);
int end_wait(struct end *end, struct ibv_wc *wc);       /* 30 s */
int end_do(struct end *end, const struct request *request);        /* posts, waits, wants success */

#endif

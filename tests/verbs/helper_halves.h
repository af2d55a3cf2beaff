/* Two queue pairs of this process, connected by the wire, so that tests of its parts can look at both ends. */
#ifndef TP_TESTS_VERBS_HELPER_HALVES_H
#define TP_TESTS_VERBS_HELPER_HALVES_H

#include "verbs/internal.h"
#include "verbs/rc.h"

enum { HALF_BYTES = 1 << 20, HALF_DEPTH = 64 };
struct half { struct ibv_cq *cq; struct ibv_qp *qp; struct ibv_mr *mr; uint8_t *data; };
/* Zeros mean: RC, timeout 20. srq: b's. */
struct halves_options { enum ibv_qp_type type; struct ibv_srq *srq; uint8_t timeout; };
extern struct half a, b;
extern struct ibv_context *halves_context;
extern struct ibv_pd *halves_pd;

/* First of all; self: argv[0]. */
void halves_prepare(const char *self);
void halves_open_device(void);
void halves_open(const struct halves_options *options);
void halves_close(void);
void half_open(struct half *half, const struct halves_options *options, struct ibv_srq *srq);
void half_connect(struct half *half, const struct half *other, const struct halves_options *options);
void half_close(struct half *half);
void half_receive(struct half *half, int count);
/* From the beginning of from's memory to that of to's. */
void half_request(struct half *from, struct half *to, enum ibv_wr_opcode opcode, uint32_t bytes, int count);
/* Waits (30 s) for so many completions, all of them successes. */
void half_complete(struct half *half, int count);
/* The next completion's status, waited for (30 s). */
enum ibv_wc_status half_status(struct half *half);
static inline struct tp_qp *half_qp(struct half *half) { return (struct tp_qp *)half->qp; }
static inline struct tp_rc *half_rc(struct half *half) { return tp_rc_of(half_qp(half)); }

#endif

/* The states of a queue pair: which transitions there are, which attributes each needs and allows, and what it does. */
#include <errno.h>
#include "verbs/internal.h"

#define S(state) IBV_QPS_##state
#define CONN_BITS (IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN)
#define ALT IBV_QP_ALT_PATH
#define ACC IBV_QP_ACCESS_FLAGS
#define PKEY IBV_QP_PKEY_INDEX
#define CUR IBV_QP_CUR_STATE
#define MIG IBV_QP_PATH_MIG_STATE
#define RNR IBV_QP_MIN_RNR_TIMER

/* A QP heeds the remote rights alone, but programs hand it their regions' flags. */
#define QP_ACCESS_KNOWN ((1u << 10) - 1)

enum kind { KIND_UD, KIND_UC, KIND_RC, KIND_XS, KIND_XR, KINDS };
struct transition { enum ibv_qp_state from, to; int required[KINDS], optional[KINDS]; };

#define ALL(mask) { mask, mask, mask, mask, mask }
static const struct transition transitions[] = {
	{ S(RESET), S(INIT), .required = { PKEY | IBV_QP_PORT | IBV_QP_QKEY, PKEY | IBV_QP_PORT | ACC, PKEY | IBV_QP_PORT | ACC,
		PKEY | IBV_QP_PORT | ACC, PKEY | IBV_QP_PORT | ACC } },
	{ S(INIT), S(INIT), .optional = { PKEY | IBV_QP_PORT | IBV_QP_QKEY, PKEY | IBV_QP_PORT | ACC, PKEY | IBV_QP_PORT | ACC,
		PKEY | IBV_QP_PORT | ACC, PKEY | IBV_QP_PORT | ACC } },
	{ S(INIT), S(RTR),
		.required = { 0, CONN_BITS, CONN_BITS | IBV_QP_MAX_DEST_RD_ATOMIC | RNR, CONN_BITS, CONN_BITS | IBV_QP_MAX_DEST_RD_ATOMIC | RNR },
		.optional = { PKEY | IBV_QP_QKEY, ALT | ACC | PKEY, ALT | ACC | PKEY, ALT | ACC | PKEY, ALT | ACC | PKEY } },
	{ S(RTR), S(RTS),
		.required = { IBV_QP_SQ_PSN, IBV_QP_SQ_PSN,
			IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
			IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC, IBV_QP_TIMEOUT | IBV_QP_SQ_PSN },
		.optional = { CUR | IBV_QP_QKEY | IBV_QP_RATE_LIMIT, CUR | ALT | ACC | MIG | IBV_QP_RATE_LIMIT,
			CUR | ALT | ACC | RNR | MIG | IBV_QP_RATE_LIMIT, CUR | ALT | ACC | MIG | IBV_QP_RATE_LIMIT, CUR | ALT | ACC | RNR | MIG } },
	{ S(RTS), S(RTS), .optional = { CUR | IBV_QP_QKEY | IBV_QP_RATE_LIMIT, CUR | ACC | ALT | MIG | IBV_QP_RATE_LIMIT,
		CUR | ACC | ALT | MIG | RNR | IBV_QP_RATE_LIMIT, CUR | ACC | ALT | MIG | IBV_QP_RATE_LIMIT, CUR | ACC | ALT | MIG | RNR } },
	{ S(RTS), S(SQD), .optional = ALL(IBV_QP_EN_SQD_ASYNC_NOTIFY) },
	{ S(SQD), S(RTS), .optional = { CUR | IBV_QP_QKEY, CUR | ALT | ACC | MIG, CUR | ALT | ACC | RNR | MIG, CUR | ALT | ACC | MIG,
		CUR | ALT | ACC | RNR | MIG } },
	{ S(SQD), S(SQD), .optional = { PKEY | IBV_QP_QKEY, IBV_QP_AV | ALT | ACC | PKEY | MIG,
		IBV_QP_PORT | IBV_QP_AV | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC |
			IBV_QP_MAX_DEST_RD_ATOMIC | ALT | ACC | PKEY | RNR | MIG,
		IBV_QP_PORT | IBV_QP_AV | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC | ALT | ACC | PKEY | MIG,
		IBV_QP_PORT | IBV_QP_AV | IBV_QP_TIMEOUT | IBV_QP_MAX_DEST_RD_ATOMIC | ALT | ACC | PKEY | RNR | MIG } },
	{ S(SQE), S(RTS), .optional = { CUR | IBV_QP_QKEY, CUR | ACC, 0, 0, 0 } },
};

static const char *state_name(enum ibv_qp_state state)
{
	static const char *const names[] = { "RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR" };
	return (unsigned)state < TP_ARRAY_LEN(names) ? names[state] : "unknown";
}

static enum kind kind_of(enum ibv_qp_type type)
{
	switch (type) {
	case IBV_QPT_UD: return KIND_UD;
	case IBV_QPT_UC: return KIND_UC;
	case IBV_QPT_XRC_SEND: return KIND_XS;
	case IBV_QPT_XRC_RECV: return KIND_XR;
	default: return KIND_RC;
	}
}

int tp_qp_check_transition(enum ibv_qp_type type, enum ibv_qp_state from, enum ibv_qp_state to, int mask)
{
	enum kind kind = kind_of(type);
	if ((unsigned)to > IBV_QPS_ERR)
		return TP_CARD_FAIL(EINVAL, "there is no queue pair state %d", to);
	if (to == IBV_QPS_RESET || to == IBV_QPS_ERR)
		return mask & ~(IBV_QP_STATE | CUR) ? TP_CARD_FAIL(EINVAL, "going to %s takes no attributes (mask 0x%x)", state_name(to), (unsigned)mask) : 0;
	for (size_t i = 0; i < TP_ARRAY_LEN(transitions); i++) {
		const struct transition *t = &transitions[i];
		if (t->from != from || t->to != to)
			continue;
		if (from == IBV_QPS_SQE && kind > KIND_UC)
			break;
		int missing = t->required[kind] & ~mask, extra = mask & ~(t->required[kind] | t->optional[kind] | IBV_QP_STATE | CUR);
		if (missing || extra)
			return TP_CARD_FAIL(EINVAL, "%s to %s: the attributes 0x%x are missing and 0x%x aren't allowed (mask 0x%x, type %d)",
				state_name(from), state_name(to), (unsigned)missing, (unsigned)extra, (unsigned)mask, type);
		return 0;
	}
	return TP_CARD_FAIL(EINVAL, "a queue pair of type %d can't go from %s to %s", type, state_name(from), state_name(to));
}

/* Are the values of the attributes possible? */
static int check_values(const struct tp_qp *qp, const struct ibv_qp_attr *attr, int mask)
{
	struct ibv_context *context = qp->ibv.context;
	if ((mask & IBV_QP_PORT) && !tp_card_port(context, attr->port_num))
		return TP_CARD_FAIL(EINVAL, "%s has no port %u", context->device->name, attr->port_num);
	if ((mask & PKEY) && attr->pkey_index != 0)
		return TP_CARD_FAIL(EINVAL, "there is no P_Key at index %u: the table has one", attr->pkey_index);
	if ((mask & IBV_QP_PATH_MTU) && (attr->path_mtu < IBV_MTU_256 || attr->path_mtu > IBV_MTU_4096))
		return TP_CARD_FAIL(EINVAL, "there is no path MTU %d: IBV_MTU_256 (1) to IBV_MTU_4096 (5)", attr->path_mtu);
	if ((mask & IBV_QP_MAX_QP_RD_ATOMIC) && attr->max_rd_atomic > TP_CARD_RD_ATOMIC)
		return TP_CARD_FAIL(EINVAL, "max_rd_atomic %u is too many: %d at most", attr->max_rd_atomic, TP_CARD_RD_ATOMIC);
	if ((mask & IBV_QP_MAX_DEST_RD_ATOMIC) && attr->max_dest_rd_atomic > TP_CARD_RD_ATOMIC)
		return TP_CARD_FAIL(EINVAL, "max_dest_rd_atomic %u is too many: %d at most", attr->max_dest_rd_atomic, TP_CARD_RD_ATOMIC);
	if (((mask & IBV_QP_TIMEOUT) && attr->timeout > 31) || ((mask & IBV_QP_RETRY_CNT) && attr->retry_cnt > 7) ||
		((mask & IBV_QP_RNR_RETRY) && attr->rnr_retry > 7) || ((mask & RNR) && attr->min_rnr_timer > 31))
		return TP_CARD_FAIL(EINVAL, "timeout %u, retry_cnt %u, rnr_retry %u or min_rnr_timer %u is too large: 31, 7, 7, 31 at most",
			attr->timeout, attr->retry_cnt, attr->rnr_retry, attr->min_rnr_timer);
	if ((mask & ACC) && (attr->qp_access_flags & ~(unsigned)(QP_ACCESS_KNOWN | IBV_ACCESS_OPTIONAL_RANGE)))
		return TP_CARD_FAIL(EINVAL, "a queue pair can't have the access flags 0x%x", attr->qp_access_flags);
	return 0;
}

static void copy_attr(struct tp_qp *qp, const struct ibv_qp_attr *from, int mask)
{
	struct ibv_qp_attr *to = &qp->attr;
#define COPY(bit, field) do { if (mask & (bit)) to->field = from->field; } while (0)
	COPY(IBV_QP_ACCESS_FLAGS, qp_access_flags);
	COPY(IBV_QP_PKEY_INDEX, pkey_index);
	COPY(IBV_QP_PORT, port_num);
	COPY(IBV_QP_QKEY, qkey);
	COPY(IBV_QP_AV, ah_attr);
	COPY(IBV_QP_PATH_MTU, path_mtu);
	COPY(IBV_QP_TIMEOUT, timeout);
	COPY(IBV_QP_RETRY_CNT, retry_cnt);
	COPY(IBV_QP_RNR_RETRY, rnr_retry);
	COPY(IBV_QP_MAX_QP_RD_ATOMIC, max_rd_atomic);
	COPY(IBV_QP_MAX_DEST_RD_ATOMIC, max_dest_rd_atomic);
	COPY(IBV_QP_MIN_RNR_TIMER, min_rnr_timer);
	COPY(IBV_QP_DEST_QPN, dest_qp_num);
	COPY(IBV_QP_PATH_MIG_STATE, path_mig_state);
	COPY(IBV_QP_ALT_PATH, alt_ah_attr);
	COPY(IBV_QP_ALT_PATH, alt_pkey_index);
	COPY(IBV_QP_ALT_PATH, alt_port_num);
	COPY(IBV_QP_ALT_PATH, alt_timeout);
	COPY(IBV_QP_EN_SQD_ASYNC_NOTIFY, en_sqd_async_notify);
	COPY(IBV_QP_RATE_LIMIT, rate_limit);
#undef COPY
	if (mask & IBV_QP_PORT)
		qp->port = tp_card_port(qp->ibv.context, from->port_num);
	if (mask & IBV_QP_SQ_PSN)
		to->sq_psn = qp->send_psn = from->sq_psn & 0xffffff;
	if (mask & IBV_QP_RQ_PSN)
		to->rq_psn = qp->recv_psn = from->rq_psn & 0xffffff;
}

static void set_state_locked(struct tp_qp *qp, enum ibv_qp_state state)
{
	atomic_store_explicit(&qp->state, state, memory_order_relaxed);
	qp->ibv.state = state;
}

void tp_qp_leave_carrier_locked(struct tp_qp *qp)
{
	if (!qp->carrier)
		return;
	if (!qp->stopped)
		qp->carrier->stop(qp);
	qp->carrier->detach(qp);
	qp->carrier = NULL;
	qp->carrier_data = NULL;
	qp->stopped = false;
}

/* Back to how it was made: queues are empty, no completion is raised. */
static void reset_locked(struct tp_qp *qp)
{
	set_state_locked(qp, IBV_QPS_RESET);    /* a run that is in progress ends */
	while (qp->running)
		pthread_cond_wait(&qp->idle, &qp->lock);
	tp_qp_leave_carrier_locked(qp);
	tp_target_forget_locked(qp);
	qp->sq.head = qp->sq.exec = qp->sq.done = 0;
	pthread_mutex_lock(&qp->rq.lock);
	atomic_store_explicit(&qp->rq.head, 0, memory_order_relaxed);
	qp->rq.taken = 0;
	pthread_mutex_unlock(&qp->rq.lock);
	if (qp->send_cq)
		tp_cq_purge(qp->send_cq, qp);
	if (qp->recv_cq)
		tp_cq_purge(qp->recv_cq, qp);
	atomic_store_explicit(&qp->sq.tail, 0, memory_order_relaxed);
	atomic_store_explicit(&qp->rq.tail, 0, memory_order_relaxed);
	struct ibv_qp_cap cap = qp->attr.cap;
	qp->attr = (struct ibv_qp_attr){ .cap = cap };
	qp->established = qp->last_wqe = qp->drained_event = false;
}

static int to_rtr_locked(struct tp_qp *qp)
{
	int error = 0;
	if (tp_qp_connected(qp->ibv.qp_type))
		error = tp_av_resolve(qp->ibv.context, &qp->attr.ah_attr, qp->attr.port_num, &qp->av);
	if (error)
		return error;
	qp->carrier = tp_engine_choose(qp);
	if (!qp->carrier)
		return EHOSTUNREACH;
	error = qp->carrier->attach(qp);
	if (error)
		qp->carrier = NULL;
	qp->stopped = false;
	return error;
}

/* SQD: what was begun ends, the rest waits. */
static void check_drained_locked(struct tp_qp *qp)
{
	if (atomic_load_explicit(&qp->state, memory_order_relaxed) == IBV_QPS_SQD && qp->drained_event && !qp->running && qp->sq.done == qp->sq.exec) {
		qp->drained_event = false;
		tp_event_qp(qp, IBV_EVENT_SQ_DRAINED);
	}
}

static int modify_locked(struct tp_qp *qp, const struct ibv_qp_attr *attr, int mask)
{
	enum ibv_qp_state from = (enum ibv_qp_state)atomic_load_explicit(&qp->state, memory_order_relaxed);
	if ((mask & CUR) && attr->cur_qp_state != from && !(from == IBV_QPS_SQE && attr->cur_qp_state == IBV_QPS_RTS))
		return TP_CARD_FAIL(EINVAL, "the queue pair is in %s, not in %s as cur_qp_state says", state_name(from), state_name(attr->cur_qp_state));
	enum ibv_qp_state to = mask & IBV_QP_STATE ? attr->qp_state : from;
	int error = tp_qp_check_transition(qp->ibv.qp_type, from, to, mask);
	if (!error)
		error = check_values(qp, attr, mask);
	if (error)
		return error;
	if (to == IBV_QPS_RESET)
		reset_locked(qp);
	struct ibv_qp_attr before = qp->attr;
	copy_attr(qp, attr, mask);
	if (from == IBV_QPS_INIT && to == IBV_QPS_RTR && (error = to_rtr_locked(qp))) {
		qp->attr = before;
		return error;
	}
	if (from == IBV_QPS_SQD && (mask & IBV_QP_AV) && (error = tp_av_resolve(qp->ibv.context, &qp->attr.ah_attr, qp->attr.port_num, &qp->av))) {
		qp->attr = before;
		return error;
	}
	set_state_locked(qp, to);
	if (to == IBV_QPS_SQD && from == IBV_QPS_RTS)
		qp->drained_event = qp->attr.en_sqd_async_notify;
	if (to == IBV_QPS_RTS) {
		qp->established = true;
		qp->stopped = false;
		tp_qp_run_locked(qp);
	} else if (from != to) {
		tp_qp_settle_locked(qp);
	}
	if (qp->carrier && qp->carrier->changed && !qp->stopped)
		qp->carrier->changed(qp);
	check_drained_locked(qp);
	return 0;
}

/* As the kernel does: what only the other half of an XRC connection has is left out, for programs set both halves alike. */
static int meant_for(enum ibv_qp_type type, int mask)
{
	if (type == IBV_QPT_XRC_SEND)
		return mask & ~(IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
	if (type == IBV_QPT_XRC_RECV)
		return mask & ~(IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY);
	return mask;
}

int tp_qp_modify(struct ibv_qp *ibv, struct ibv_qp_attr *attr, int mask)
{
	struct tp_qp *qp = tp_qp_of(ibv);
	mask = meant_for(qp->ibv.qp_type, mask);
	if (!tp_context_mine(qp->ibv.context))
		return TP_CARD_FAIL(EINVAL, "a forked child can't use its parent's queue pairs");
	pthread_mutex_lock(&qp->lock);
	int error = modify_locked(qp, attr, mask);
	ibv->state = (enum ibv_qp_state)atomic_load_explicit(&qp->state, memory_order_relaxed);
	pthread_mutex_unlock(&qp->lock);
	return error;
}

void tp_qp_fail_locked(struct tp_qp *qp, enum ibv_qp_state state, int event)
{
	enum ibv_qp_state now = (enum ibv_qp_state)atomic_load_explicit(&qp->state, memory_order_relaxed);
	if (now == IBV_QPS_ERR || now == IBV_QPS_RESET || now == IBV_QPS_INIT || now == state)
		return;
	set_state_locked(qp, state);
	if (event >= 0)
		tp_event_qp(qp, (enum ibv_event_type)event);
	tp_qp_settle_locked(qp);
}

void tp_qp_run_locked(struct tp_qp *qp)
{
	if (qp->running) {
		qp->again = true;
		return;
	}
	if (!qp->carrier || !tp_qp_sends(qp)) {
		check_drained_locked(qp);
		return;
	}
	qp->running = true;
	do {
		qp->again = false;
		qp->carrier->run(qp);
	} while (qp->again && tp_qp_sends(qp));
	qp->running = false;
	tp_qp_settle_locked(qp);
	check_drained_locked(qp);
	pthread_cond_broadcast(&qp->idle);
}

void tp_qp_run_again(uint32_t qpn)
{
	struct tp_qp *qp = tp_qp_get(qpn);
	if (!qp)
		return;
	pthread_mutex_lock(&qp->lock);
	if (qp->carrier && !qp->stopped) {
		tp_qp_run_locked(qp);
		tp_qp_settle_locked(qp);
	}
	pthread_mutex_unlock(&qp->lock);
	tp_qp_put(qp);
}

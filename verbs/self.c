/* The carrier between QPs of one process: each request is executed at once, straight from memory to memory, by whoever posts it.
 *
 * The initiator's lock is let go of while the target's is held; qp->running keeps others off the send queue meanwhile. What can't
 * be done yet (no receive, nobody there) waits for a timer. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "verbs/internal.h"

#define LOOK_AGAIN_NS 1000000u      /* a silent target */

struct self {
	struct tp_timer *timer;
	uint64_t wait_until_ns;         /* 0: not waiting */
	uint64_t give_up_ns;            /* a silent target: when to complete with RETRY_EXC; 0: not silent, or for ever */
	bool silent;
	uint8_t rnr_tried;
};

/* What is needed of the initiator while its lock isn't held. */
struct attempt {
	struct tp_wqe *wqe;
	struct tp_span *spans;          /* TP_CARD_SGE; not cleared for each request */
	int count;
	uint32_t dest_qpn, src_qpn, psn, packets;
	enum ibv_mtu mtu;
	enum ibv_qp_type type;
	struct tp_av av;
	uint8_t rnr_timer;              /* the target's */
	bool local_fault;               /* the initiator's memory */
};

static void fire(struct tp_qp *qp)
{
	pthread_mutex_lock(&qp->lock);
	if (qp->carrier == &tp_self)
		tp_qp_run_locked(qp);
	pthread_mutex_unlock(&qp->lock);
}

static int attach(struct tp_qp *qp)
{
	struct self *self = tp_alloc(1, sizeof(*self), "a connection within the process");
	if (!self)
		return ENOMEM;
	self->timer = tp_timer_new(fire, qp);
	if (!self->timer) {
		free(self);
		return ENOMEM;
	}
	qp->carrier_data = self;
	return 0;
}

static void stop(struct tp_qp *qp)
{
	struct self *self = qp->carrier_data;
	tp_timer_arm(self->timer, 0);
	self->wait_until_ns = 0;
	self->silent = false;
	self->rnr_tried = 0;
}

static void detach(struct tp_qp *qp)
{
	struct self *self = qp->carrier_data;
	tp_timer_free(self->timer);
	free(self);
}

/* ---- at the target, its lock held ---- */

static bool fits_locked(const struct tp_qp *target, const struct attempt *attempt)
{
	return tp_target_receives(target) && target->attr.dest_qp_num == attempt->src_qpn &&
		!memcmp(&target->av.dgid, &attempt->av.sgid, sizeof(union ibv_gid)) && target->av.type == attempt->av.type;
}

static bool types_match(enum ibv_qp_type from, enum ibv_qp_type to)
{
	return from == IBV_QPT_XRC_SEND ? to == IBV_QPT_XRC_RECV : from == to;
}

static enum tp_reply finish_message(struct tp_qp *target, const struct attempt *attempt, enum ibv_wc_opcode opcode)
{
	const struct tp_wqe *wqe = attempt->wqe;
	bool imm = wqe->opcode == IBV_WR_SEND_WITH_IMM || wqe->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
	bool inv = wqe->opcode == IBV_WR_SEND_WITH_INV;
	struct tp_arrival arrival = { .opcode = opcode, .byte_len = wqe->length, .imm = imm || inv ? wqe->imm : 0,
		.wc_flags = imm ? IBV_WC_WITH_IMM : inv ? IBV_WC_WITH_INV : 0, .src_qp = attempt->src_qpn,
		.solicited = wqe->flags & IBV_SEND_SOLICITED };
	return tp_target_finish_locked(target, &arrival);
}

static enum tp_reply do_send(struct tp_qp *target, struct attempt *attempt)
{
	enum tp_reply reply = tp_target_begin_locked(target, attempt->wqe->srqn);
	if (reply == TP_REPLY_ACK)
		reply = tp_target_place_spans_locked(target, 0, attempt->spans, attempt->count);
	if (reply == TP_REPLY_ACK && attempt->wqe->opcode == IBV_WR_SEND_WITH_INV && tp_mw_invalidate_remote(target, attempt->wqe->imm))
		reply = TP_REPLY_REMOTE_ACCESS;
	return reply == TP_REPLY_ACK ? finish_message(target, attempt, IBV_WC_RECV) : reply;
}

static enum tp_reply do_write(struct tp_qp *target, struct attempt *attempt)
{
	const struct tp_wqe *wqe = attempt->wqe;
	bool imm = wqe->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
	struct tp_span to = { .bytes = wqe->length };
	enum tp_reply reply = imm ? tp_target_begin_locked(target, wqe->srqn) : TP_REPLY_ACK;
	if (reply == TP_REPLY_ACK)
		reply = tp_target_write_enter_locked(target, wqe->srqn, wqe->rdma.rkey, wqe->rdma.addr, wqe->length, &to.grip);
	if (reply != TP_REPLY_ACK)
		return reply;
	if (wqe->length && tp_span_move(&to, 1, 0, attempt->spans, attempt->count, &attempt->local_fault))
		reply = TP_REPLY_REMOTE_ACCESS;
	tp_key_leave(&to.grip);
	return reply == TP_REPLY_ACK && imm ? finish_message(target, attempt, IBV_WC_RECV_RDMA_WITH_IMM) : reply;
}

static enum tp_reply do_read(struct tp_qp *target, struct attempt *attempt)
{
	const struct tp_wqe *wqe = attempt->wqe;
	struct tp_span from = { .bytes = wqe->length };
	bool source = false;
	enum tp_reply reply = tp_target_read_enter_locked(target, wqe->srqn, wqe->rdma.rkey, wqe->rdma.addr, wqe->length, &from.grip);
	if (reply != TP_REPLY_ACK)
		return reply;
	if (wqe->length && tp_span_move(attempt->spans, attempt->count, 0, &from, 1, &source)) {
		attempt->local_fault = !source;
		reply = TP_REPLY_REMOTE_ACCESS;
	}
	tp_key_leave(&from.grip);
	return reply;
}

static enum tp_reply do_atomic(struct tp_qp *target, struct attempt *attempt)
{
	const struct tp_wqe *wqe = attempt->wqe;
	struct tp_atomic atomic = { .opcode = wqe->opcode, .rkey = wqe->atomic.rkey, .addr = wqe->atomic.addr,
		.compare_add = wqe->atomic.compare_add, .swap = wqe->atomic.swap };
	uint64_t result;
	enum tp_reply reply = tp_target_atomic_locked(target, wqe->srqn, &atomic, &result);
	if (reply == TP_REPLY_ACK && tp_span_write(attempt->spans, attempt->count, 0, &result, sizeof(result))) {
		attempt->local_fault = true;
		reply = TP_REPLY_REMOTE_ACCESS;
	}
	return reply;
}

static enum tp_reply execute_locked(struct tp_qp *target, struct attempt *attempt)
{
	bool reliable = tp_qp_reliable(attempt->type);
	if (!types_match(attempt->type, target->ibv.qp_type) || !fits_locked(target, attempt))
		return TP_REPLY_SILENT;
	/* A peer that counts from elsewhere drops what it doesn't expect. */
	if (reliable && target->recv_psn != attempt->psn)
		return TP_REPLY_SILENT;
	/* Packets of one size don't fit where another was agreed on. */
	if (target->attr.path_mtu != attempt->mtu && (attempt->packets > 1 || attempt->wqe->length > tp_mtu_bytes(target->attr.path_mtu)))
		return TP_REPLY_INVALID_REQUEST;
	tp_target_established_locked(target);
	switch (attempt->wqe->opcode) {
	case IBV_WR_RDMA_WRITE: case IBV_WR_RDMA_WRITE_WITH_IMM: return do_write(target, attempt);
	case IBV_WR_RDMA_READ: return do_read(target, attempt);
	case IBV_WR_ATOMIC_CMP_AND_SWP: case IBV_WR_ATOMIC_FETCH_AND_ADD: return do_atomic(target, attempt);
	default: return do_send(target, attempt);
	}
}

static enum tp_reply visit(struct attempt *attempt)
{
	struct tp_qp *target = tp_engine_is_local(&attempt->av, attempt->dest_qpn) ? tp_qp_get(attempt->dest_qpn) : NULL;
	if (!target)
		return TP_REPLY_SILENT;
	pthread_mutex_lock(&target->lock);
	enum tp_reply reply = execute_locked(target, attempt);
	attempt->rnr_timer = target->attr.min_rnr_timer;
	if (reply == TP_REPLY_ACK) {
		target->recv_psn = (attempt->psn + attempt->packets) & 0xffffff;
		tp_counter_add(target->port, TP_CNT_PORT_RCV_PACKETS, attempt->packets);
		tp_counter_add(target->port, TP_CNT_UNICAST_RCV, attempt->packets);
		tp_counter_add(target->port, TP_CNT_PORT_RCV_DATA, attempt->wqe->length / 4);
	} else if (reply >= TP_REPLY_INVALID_REQUEST && reply <= TP_REPLY_REMOTE_OPERATION && !attempt->local_fault) {
		tp_target_refuse_locked(target, reply);
	}
	pthread_mutex_unlock(&target->lock);
	tp_qp_put(target);
	return reply;
}

/* ---- at the initiator, its lock held ---- */

static uint32_t local_access(uint32_t opcode)
{
	return opcode == IBV_WR_RDMA_READ || opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD ? IBV_ACCESS_LOCAL_WRITE : 0;
}

static bool is_atomic(uint32_t opcode) { return opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD; }

/* What is wrong with the request before the target is asked; SUCCESS: nothing. The spans are pinned then. */
static enum ibv_wc_status prepare_locked(struct tp_qp *qp, struct attempt *attempt)
{
	struct tp_wqe *wqe = attempt->wqe;
	if (wqe->length > TP_CARD_MSG_BYTES || (is_atomic(wqe->opcode) && wqe->length != 8))
		return IBV_WC_LOC_LEN_ERR;
	if (local_access(wqe->opcode) && qp->attr.max_rd_atomic == 0)
		return IBV_WC_LOC_QP_OP_ERR;
	attempt->count = tp_wqe_enter(qp, wqe, local_access(wqe->opcode), attempt->spans);
	if (attempt->count < 0)
		return IBV_WC_LOC_PROT_ERR;
	attempt->dest_qpn = qp->attr.dest_qp_num;
	attempt->src_qpn = qp->ibv.qp_num;
	attempt->type = qp->ibv.qp_type;
	attempt->mtu = qp->attr.path_mtu;
	attempt->psn = qp->send_psn;
	attempt->packets = tp_packets(wqe->length, attempt->mtu);
	attempt->av = qp->av;
	return IBV_WC_SUCCESS;
}

static void complete_locked(struct tp_qp *qp, struct attempt *attempt, enum ibv_wc_status status)
{
	struct self *self = qp->carrier_data;
	self->rnr_tried = 0;
	self->silent = false;
	if (status == IBV_WC_SUCCESS) {
		qp->send_psn = (qp->send_psn + attempt->packets) & 0xffffff;
		tp_counter_add(qp->port, TP_CNT_PORT_XMIT_PACKETS, attempt->packets);
		tp_counter_add(qp->port, TP_CNT_UNICAST_XMIT, attempt->packets);
		tp_counter_add(qp->port, TP_CNT_PORT_XMIT_DATA, attempt->wqe->length / 4);
	}
	uint32_t bytes = attempt->wqe->length;
	qp->sq.exec++;
	tp_sq_complete_locked(qp, status, bytes);
}

/* The request must wait; false: it has waited long enough (status says why). */
static bool wait_locked(struct tp_qp *qp, const struct attempt *attempt, enum tp_reply reply, enum ibv_wc_status *status)
{
	struct self *self = qp->carrier_data;
	uint64_t now = tp_clock_ns(), delay = LOOK_AGAIN_NS;
	if (reply == TP_REPLY_RNR) {
		if (qp->attr.rnr_retry != 7 && self->rnr_tried++ >= qp->attr.rnr_retry) {
			*status = IBV_WC_RNR_RETRY_EXC_ERR;
			return false;
		}
		delay = tp_rnr_delay_ns(attempt->rnr_timer);
		self->silent = false;
	} else {
		uint64_t limit = tp_retry_limit_ns(qp->attr.timeout, qp->attr.retry_cnt);
		if (!self->silent) {
			self->silent = true;
			self->give_up_ns = limit ? now + limit : 0;
		} else if (self->give_up_ns && now >= self->give_up_ns) {
			*status = IBV_WC_RETRY_EXC_ERR;
			return false;
		}
		delay = self->give_up_ns ? TP_MIN(delay, self->give_up_ns - now) : delay;
		tp_counter_add(qp->port, TP_CNT_LOCAL_ACK_TIMEOUT_ERR, 1);
	}
	self->wait_until_ns = now + delay;
	tp_timer_arm(self->timer, self->wait_until_ns);
	return true;
}

/* false: it waits. */
static bool carry_locked(struct tp_qp *qp, struct tp_wqe *wqe)
{
	struct tp_span spans[TP_CARD_SGE];
	struct attempt attempt = { .wqe = wqe, .spans = spans };
	enum ibv_wc_status status = prepare_locked(qp, &attempt);
	enum tp_reply reply = TP_REPLY_ACK;
	if (status == IBV_WC_SUCCESS) {
		pthread_mutex_unlock(&qp->lock);
		reply = visit(&attempt);
		pthread_mutex_lock(&qp->lock);
		tp_span_leave(attempt.spans, attempt.count);
		if (attempt.local_fault)
			status = IBV_WC_LOC_PROT_ERR;
		else if (reply != TP_REPLY_ACK && tp_qp_reliable(attempt.type))
			status = tp_reply_status(reply);
		if (!attempt.local_fault && (reply == TP_REPLY_RNR || reply == TP_REPLY_SILENT) && tp_qp_reliable(attempt.type) &&
			(!tp_qp_sends(qp) || wait_locked(qp, &attempt, reply, &status)))
			return false;
	}
	complete_locked(qp, &attempt, status);
	return true;
}

static void local_locked(struct tp_qp *qp, struct tp_wqe *wqe)
{
	enum ibv_wc_status status = wqe->opcode == IBV_WR_BIND_MW ? tp_mw_bind(qp, wqe) : tp_mw_invalidate_local(qp, wqe->imm);
	qp->sq.exec++;
	tp_sq_complete_locked(qp, status, 0);
}

static void run(struct tp_qp *qp)
{
	struct self *self = qp->carrier_data;
	while (tp_qp_sends(qp) && qp->sq.exec != qp->sq.head) {
		struct tp_wqe *wqe = tp_sq_at(&qp->sq, qp->sq.exec);
		if (self->wait_until_ns && tp_clock_ns() < self->wait_until_ns)
			return;
		self->wait_until_ns = 0;
		if (wqe->opcode == IBV_WR_BIND_MW || wqe->opcode == IBV_WR_LOCAL_INV)
			local_locked(qp, wqe);
		else if (!carry_locked(qp, wqe))
			return;
	}
}

const struct tp_carrier tp_self = { .name = "self", .attach = attach, .run = run, .stop = stop, .detach = detach, .loopback = true };

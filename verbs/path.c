/* The carrier between processes of one machine: the initiator's side (path.h says what else there is).
 *
 * A QP's requests take effect in order: one that is done at once (path_direct.c) is only begun when none is in the ring; those in
 * the ring are served in order. Where a request can't be done yet (no receive, no such QP) those behind it are void too, and all
 * go out again once nothing is in flight. */
#include <errno.h>
#include <stdlib.h>
#include "verbs/capture.h"
#include "verbs/internal.h"
#include "verbs/path.h"

#define LOOK_AGAIN_NS 1000000u      /* a silent target */
#define LOOK_NS 1000000000u          /* something in flight is looked at so often */
#define PATIENCE_NS 10000000000u     /* and given up after this, or the QP's time */
#define LATE_NS 100000000u           /* who looks so much later than wanted got no processor, and the other process as little, perhaps: */
#define PUT_OFF_MOST 3               /* so often its time begins anew */

enum { P_DEATH };
static struct tp_param params[] = {
	[P_DEATH] = { .name = "TELPHER_VERBS_DEATH", .kind = TP_PARAM_ENUM, .fallback = "at-once", .choices = "at-once|timeout",
		.doc = "When requests to a process of this machine that has died end (RETRY_EXC_ERR): at once, or after the QP's timeout as with hardware" },
};
TP_PARAM_TABLE("verbs", params)

static bool is_dead(const struct tp_path *path) { return atomic_load_explicit(&path->link->dead, memory_order_relaxed); }

/* ---- attachment ---- */

static void fire(struct tp_qp *qp);

/* tp_engine_choose left the link, with a user for us. */
static int attach(struct tp_qp *qp)
{
	struct tp_path_link *link = qp->carrier_data;
	struct tp_path *path = tp_alloc(1, sizeof(*path), "a connection within the machine");
	struct tp_timer *timer = path ? tp_timer_new(fire, qp) : NULL;
	qp->carrier_data = NULL;
	if (!timer) {
		free(path);
		tp_path_release(link);
		return ENOMEM;
	}
	path->qp = qp;
	path->qpn = path->waiter.qpn = qp->ibv.qp_num;
	path->link = link;
	path->timer = timer;
	path->own = &tp_path_own_yard->doors[TP_PATH_PLACE(path->qpn)];
	path->peer = &link->yard->doors[TP_PATH_PLACE(qp->attr.dest_qp_num)];
	path->ends = tp_path_ends(&qp->av.sgid, &qp->av.dgid, (int)qp->av.type);
	qp->carrier_data = path;
	tp_path_open_door(path);
	tp_path_add_user(link, path);
	return 0;
}

static void disarm(struct tp_path *path)
{
	tp_timer_arm(path->timer, 0);
	path->wait_until_ns = 0;
	path->timed = false;
	path->silent = false;
	path->rnr_tried = 0;
	path->fated = path->fated_there = false;
}

static void stop(struct tp_qp *qp)
{
	struct tp_path *path = tp_path_of(qp);
	disarm(path);
	path->back = false;
	path->in_flight = 0;
	tp_path_forget_room(path->link, &path->waiter);
	tp_path_new_epoch(path, atomic_load_explicit(&qp->state, memory_order_relaxed) != IBV_QPS_SQE);
	tp_path_drop_bounce(path);
}

static void detach(struct tp_qp *qp)
{
	struct tp_path *path = tp_path_of(qp);
	tp_path_drop_user(path->link, path);
	tp_timer_free(path->timer);
	free(path);
	qp->carrier_data = NULL;
}

static void changed(struct tp_qp *qp) { tp_path_show_door(tp_path_of(qp)); }

/* ---- waiting ---- */

static void arm(struct tp_path *path)
{
	/* While void requests are in flight their answers say when to go on. */
	uint64_t when = path->back && path->in_flight ? 0 : path->wait_until_ns;
	if (path->timed && (!when || path->limit_at_ns < when))
		when = path->limit_at_ns;
	tp_timer_arm(path->timer, when);
}

/* The request at path->back_to must wait; false: it has waited long enough (status says why). */
static bool wait_locked(struct tp_qp *qp, enum tp_reply reply, uint8_t rnr_timer, enum ibv_wc_status *status)
{
	struct tp_path *path = tp_path_of(qp);
	uint64_t now = tp_clock_ns(), delay = LOOK_AGAIN_NS;
	if (reply == TP_REPLY_RNR) {
		if (qp->attr.rnr_retry != 7 && path->rnr_tried++ >= qp->attr.rnr_retry) {
			*status = IBV_WC_RNR_RETRY_EXC_ERR;
			return false;
		}
		delay = tp_rnr_delay_ns(rnr_timer);
		path->silent = false;
	} else {
		uint64_t limit = tp_retry_limit_ns(qp->attr.timeout, qp->attr.retry_cnt);
		if (!path->silent) {
			path->silent = true;
			path->give_up_ns = limit ? now + limit : 0;
		} else if (path->give_up_ns && now >= path->give_up_ns) {
			*status = IBV_WC_RETRY_EXC_ERR;
			return false;
		}
		delay = path->give_up_ns ? TP_MIN(delay, path->give_up_ns - now) : delay;
		tp_counter_add(qp->port, TP_CNT_LOCAL_ACK_TIMEOUT_ERR, 1);
	}
	path->wait_until_ns = now + delay;
	arm(path);
	return true;
}

void tp_path_watch_time(struct tp_qp *qp)
{
	struct tp_path *path = tp_path_of(qp);
	if (path->timed)
		return;
	path->timed = true;
	path->answered_seen = path->answered;
	path->unserved_ns = tp_clock_ns();
	path->limit_at_ns = path->unserved_ns + LOOK_NS;
	path->put_off = 0;
	path->told = false;
	arm(path);
}

/* Ends the oldest request; those behind it are flushed. */
static void give_up(struct tp_qp *qp, enum ibv_wc_status status)
{
	struct tp_path *path = tp_path_of(qp);
	bool reliable = tp_qp_reliable(qp->ibv.qp_type);
	if (qp->sq.done == qp->sq.head)
		return;
	if (qp->sq.exec == qp->sq.done)
		qp->sq.exec++;
	path->in_flight = 0;
	tp_sq_complete_locked(qp, reliable ? status : IBV_WC_SUCCESS, 0);
}

/* The other process has died. true: nothing more can be done now. */
static bool end_with_peer(struct tp_qp *qp)
{
	struct tp_path *path = tp_path_of(qp);
	uint64_t limit = tp_retry_limit_ns(qp->attr.timeout, qp->attr.retry_cnt), now;
	if (qp->sq.done == qp->sq.head)
		return true;
	if (tp_param_int(&params[P_DEATH]) == 0 || !tp_qp_reliable(qp->ibv.qp_type)) {
		TP_INFO(TP_NET, "QP 0x%06x: process %d, which had QP 0x%06x, has died", qp->ibv.qp_num, (int)path->link->pid, qp->attr.dest_qp_num);
		give_up(qp, IBV_WC_RETRY_EXC_ERR);
		return tp_qp_reliable(qp->ibv.qp_type);
	}
	now = tp_clock_ns();
	if (!path->silent) {
		path->silent = true;
		path->give_up_ns = limit ? now + limit : 0;
	}
	if (path->give_up_ns && now >= path->give_up_ns)
		give_up(qp, IBV_WC_RETRY_EXC_ERR);
	else if (path->give_up_ns)
		tp_timer_arm(path->timer, path->give_up_ns);
	return true;
}

/* Something has been in flight for a while. A process that is stopped, or gets no processor, is none that is gone: hardware would
 * answer for it. So it has more time than the QP gives. */
static void look_at_time(struct tp_qp *qp, uint64_t now)
{
	struct tp_path *path = tp_path_of(qp);
	uint64_t limit = tp_retry_limit_ns(qp->attr.timeout, qp->attr.retry_cnt), waited = now - path->unserved_ns;
	path->timed = false;
	if (!path->in_flight || is_dead(path))
		return;
	if (path->answered != path->answered_seen) {
		tp_path_watch_time(qp);
		return;
	}
	if (now - path->limit_at_ns >= LATE_NS && path->put_off < PUT_OFF_MOST) {
		path->put_off++;
		path->timed = true;
		path->unserved_ns = now;
		path->limit_at_ns = now + LOOK_NS;
		return;
	}
	if (!path->told)
		TP_WARN("QP 0x%06x: process %d has served nothing for %.1f s: has it been stopped?", qp->ibv.qp_num, (int)path->link->pid,
			(double)waited * 1e-9);
	path->told = true;
	if (limit && waited >= TP_MAX(limit, PATIENCE_NS)) {
		TP_INFO(TP_NET, "QP 0x%06x: process %d didn't serve it for %.1f s (timeout %u, retry_cnt %u)", qp->ibv.qp_num, (int)path->link->pid,
			(double)waited * 1e-9, qp->attr.timeout, qp->attr.retry_cnt);
		tp_counter_add(qp->port, TP_CNT_LOCAL_ACK_TIMEOUT_ERR, 1);
		give_up(qp, IBV_WC_RETRY_EXC_ERR);
		return;
	}
	path->timed = true;
	path->limit_at_ns = now + LOOK_NS;
}

static void fire(struct tp_qp *qp)
{
	pthread_mutex_lock(&qp->lock);
	struct tp_path *path = qp->carrier == &tp_path && !qp->stopped ? tp_path_of(qp) : NULL;
	uint64_t now = tp_clock_ns();
	if (path && !qp->running && path->timed && now >= path->limit_at_ns)
		look_at_time(qp, now);
	if (qp->carrier == &tp_path) {
		tp_qp_run_locked(qp);
		tp_qp_settle_locked(qp);
	}
	/* Called too early (a later time replaced an earlier one), or for one of two. */
	if (qp->carrier == &tp_path && !qp->stopped && (tp_path_of(qp)->wait_until_ns || tp_path_of(qp)->timed))
		arm(tp_path_of(qp));
	pthread_mutex_unlock(&qp->lock);
}

/* ---- the send queue ---- */

static void local_locked(struct tp_qp *qp, struct tp_wqe *wqe)
{
	tp_path_complete_at_once(qp, wqe->opcode == IBV_WR_BIND_MW ? tp_mw_bind(qp, wqe) : tp_mw_invalidate_local(qp, wqe->imm));
}

/* Those behind a request that must wait were void: they go out again with it. */
static bool go_back(struct tp_qp *qp)
{
	struct tp_path *path = tp_path_of(qp);
	if (path->in_flight)
		return false;
	path->back = false;
	qp->sq.exec = path->back_to;
	qp->send_psn = path->back_psn;
	return true;
}

/* Faults of this process: false where the request must wait for them, or has met its end. */
static bool meets_fate(struct tp_qp *qp, const struct tp_wqe *wqe)
{
	struct tp_path *path = tp_path_of(qp);
	struct tp_path_request request = { .opcode = (uint8_t)wqe->opcode, .length = wqe->length };
	enum ibv_wc_status status = IBV_WC_SUCCESS;
	if (path->fated)
		return true;
	struct tp_path_fate fate = tp_path_fate(qp, true, &request);
	if (fate.lost && !tp_qp_reliable(qp->ibv.qp_type)) {
		if (path->in_flight == 0)
			tp_path_complete_at_once(qp, IBV_WC_SUCCESS);
		return false;
	}
	if (fate.never && path->in_flight)
		return false;
	if (fate.never) {
		path->back = true;
		path->back_to = qp->sq.exec;
		path->back_psn = qp->send_psn;
		if (!wait_locked(qp, TP_REPLY_SILENT, 0, &status)) {
			path->back = false;
			tp_path_complete_at_once(qp, status);
		}
		return false;
	}
	path->fated = true;
	if (!fate.delay_ns)
		return true;
	path->wait_until_ns = tp_clock_ns() + fate.delay_ns;
	arm(path);
	return false;
}

static void run(struct tp_qp *qp)
{
	struct tp_path *path = tp_path_of(qp);
	bool asked = false, watched = tp_path_is_watched(path->link);
	if (is_dead(path) && end_with_peer(qp))
		return;
	if (path->back && !go_back(qp))
		return;
	while (tp_qp_sends(qp) && qp->sq.exec != qp->sq.head) {
		struct tp_wqe *wqe = tp_sq_at(&qp->sq, qp->sq.exec);
		if (path->wait_until_ns && tp_clock_ns() < path->wait_until_ns) {
			arm(path);
			break;
		}
		path->wait_until_ns = 0;
		if (is_dead(path)) {
			if (end_with_peer(qp))
				break;
			continue;
		}
		if (wqe->opcode == IBV_WR_BIND_MW || wqe->opcode == IBV_WR_LOCAL_INV) {
			if (path->in_flight)
				break;
			local_locked(qp, wqe);
			continue;
		}
		if (path->in_flight == 0 && !watched && tp_path_direct(qp))
			continue;
		if (watched && !meets_fate(qp, wqe)) {
			if (path->wait_until_ns || path->in_flight || path->back)
				break;
			continue;
		}
		if (!tp_path_request(qp, wqe))
			break;
		asked = true;
	}
	if (asked)
		tp_path_ring_bell(path->link);
}

/* ---- answers ---- */

/* The oldest request was done. false: what it brought can't be placed. */
static bool take_result(struct tp_qp *qp, struct tp_wqe *wqe, uint64_t value)
{
	struct tp_path *path = tp_path_of(qp);
	struct tp_span spans[TP_CARD_SGE];
	if (!tp_path_fetches(wqe->opcode) || wqe->length == 0)
		return true;
	const void *from = tp_path_is_atomic(wqe->opcode) ? (const void *)&value : path->bounce;
	int count = tp_wqe_enter(qp, wqe, IBV_ACCESS_LOCAL_WRITE, spans);
	bool placed = count >= 0 && from && tp_span_write(spans, count, 0, from, wqe->length) == 0;
	if (count > 0)
		tp_span_leave(spans, count);
	return placed;
}

static void trace_result(struct tp_qp *qp, const struct tp_wqe *wqe, uint8_t reply, uint8_t rnr_timer, uint64_t value)
{
	const struct tp_path *path = tp_path_of(qp);
	struct tp_path_outcome outcome = { .opcode = wqe->opcode, .length = wqe->length, .psn = (uint32_t)wqe->carrier[0], .msn = path->msn,
		.reply = reply, .rnr_timer = rnr_timer, .value = value };
	struct tp_span span = { .grip = { .addr = path->bounce }, .bytes = wqe->length };
	tp_path_trace_answer(qp, false, &outcome, &span, path->bounce ? 1 : 0);
}

static void complete_to(struct tp_qp *qp, uint32_t end, uint64_t value)
{
	struct tp_path *path = tp_path_of(qp);
	while (qp->sq.done != end && qp->sq.done != qp->sq.exec) {
		struct tp_wqe *wqe = tp_sq_at(&qp->sq, qp->sq.done);
		bool placed = take_result(qp, wqe, value);
		path->msn = (path->msn + 1) & 0xffffff;
		if (tp_capture_on() && qp->sq.done + 1 == end)
			trace_result(qp, wqe, TP_REPLY_ACK, 0, value);
		tp_path_drop_bounce(path);
		path->silent = false;
		path->rnr_tried = 0;
		tp_sq_complete_locked(qp, placed ? IBV_WC_SUCCESS : IBV_WC_LOC_PROT_ERR, tp_path_fetches(wqe->opcode) ? wqe->length : 0);
		int state = atomic_load_explicit(&qp->state, memory_order_relaxed);
		if (state != IBV_QPS_RTS && state != IBV_QPS_SQD)
			return;
	}
}

static void refused(struct tp_qp *qp, const struct tp_path_answer *answer)
{
	struct tp_path *path = tp_path_of(qp);
	enum ibv_wc_status status = answer->reply == TP_PATH_REPLY_LOCAL ? IBV_WC_LOC_PROT_ERR : tp_reply_status((enum tp_reply)answer->reply);
	if (tp_capture_on())
		trace_result(qp, tp_sq_at(&qp->sq, answer->seq), answer->reply, answer->rnr_timer, 0);
	tp_path_drop_bounce(path);
	if (answer->reply == TP_PATH_REPLY_LATER) {
		path->back = path->fated = path->fated_there = true;
		path->back_to = answer->seq;
		path->back_psn = (uint32_t)tp_sq_at(&qp->sq, answer->seq)->carrier[0];
		path->wait_until_ns = tp_clock_ns() + answer->value;
		arm(path);
		return;
	}
	if (answer->reply == TP_REPLY_RNR || answer->reply == TP_REPLY_SILENT || answer->reply == TP_REPLY_SEQUENCE) {
		path->back = true;
		path->back_to = answer->seq;
		path->back_psn = (uint32_t)tp_sq_at(&qp->sq, answer->seq)->carrier[0];
		if (wait_locked(qp, (enum tp_reply)answer->reply, answer->rnr_timer, &status))
			return;
	}
	path->in_flight = 0;
	path->back = false;
	tp_sq_complete_locked(qp, status, 0);
}

static void answered_locked(struct tp_qp *qp, const struct tp_path_answer *answer)
{
	struct tp_path *path = tp_path_of(qp);
	int state = atomic_load_explicit(&qp->state, memory_order_relaxed);
	path->in_flight -= TP_MIN(answer->covers, path->in_flight);
	path->answered++;
	if (state != IBV_QPS_RTS && state != IBV_QPS_SQD)
		return;
	/* Void: behind one that must wait; or nonsense. */
	if (path->back || answer->seq - qp->sq.done >= qp->sq.exec - qp->sq.done)
		return;
	bool reliable = tp_qp_reliable(qp->ibv.qp_type);
	if (answer->reply == TP_REPLY_ACK || (!reliable && answer->reply != TP_PATH_REPLY_LOCAL))
		complete_to(qp, answer->seq + 1, answer->value);
	else if (answer->seq == qp->sq.done)
		refused(qp, answer);
}

void tp_path_answered(struct tp_path_link *link, const struct tp_path_answer *answer)
{
	struct tp_qp *qp = tp_qp_get(answer->qpn);
	if (!qp)
		return;
	pthread_mutex_lock(&qp->lock);
	if (qp->carrier == &tp_path && !qp->stopped && tp_path_of(qp)->link == link && tp_path_of(qp)->epoch == answer->epoch) {
		answered_locked(qp, answer);
		tp_qp_run_locked(qp);
		tp_qp_settle_locked(qp);
	}
	pthread_mutex_unlock(&qp->lock);
	tp_qp_put(qp);
}

static void bury(struct tp_path_link *link, uint32_t qpn)
{
	struct tp_qp *qp = tp_qp_get(qpn);
	if (!qp)
		return;
	pthread_mutex_lock(&qp->lock);
	int state = atomic_load_explicit(&qp->state, memory_order_relaxed);
	if (qp->carrier == &tp_path && !qp->stopped && tp_path_of(qp)->link == link && (state == IBV_QPS_RTS || state == IBV_QPS_SQD)) {
		struct tp_path *path = tp_path_of(qp);
		path->in_flight = 0;
		path->wait_until_ns = 0;
		path->back = false;
		if (qp->running)
			qp->again = true;
		else
			while (!end_with_peer(qp) && qp->sq.done != qp->sq.head)
				;
		tp_qp_run_locked(qp);
		tp_qp_settle_locked(qp);
	}
	pthread_mutex_unlock(&qp->lock);
	tp_qp_put(qp);
}

void tp_path_peer_died(struct tp_path_link *link)
{
	uint32_t qpns[64];
	int count;
	for (uint32_t after = 0; (count = tp_path_users(link, after, qpns, (int)TP_ARRAY_LEN(qpns))) > 0; after += (uint32_t)count)
		for (int i = 0; i < count; i++)
			bury(link, qpns[i]);
	tp_path_rerun(link);
}

const struct tp_carrier tp_path = { .name = "path", .attach = attach, .run = run, .stop = stop, .detach = detach, .progress = tp_path_poll,
	.changed = changed };

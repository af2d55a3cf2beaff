/* The initiator's requests: cut by the path's MTU, numbered, sent while the window allows, sent again from where the other side
 * lost them (go-back-N). A READ takes as many numbers as its answer has packets and counts as those in the window, so that
 * answers can't flood us either. All under the QP's lock. */
#include <errno.h>
#include <string.h>
#include "verbs/internal.h"
#include "verbs/rc.h"

enum { PROBES_MIN = 4, ASK_EVERY = 16, BLOCKED_NS = 100000, BACKOFF_MAX = 7, FIRST_MOST_NS = 1000000000 };
/* Of the connections to one process that is silent one asks, then after twice that time another, up to 2^3 times; none waits longer. */
enum { GAP_DOUBLINGS = 3, WANT_MOST_NS = 64000000 };
enum { PUT_OFF_MOST = 64, LATE_FACTOR = 16 };
#define LATE_MOST_NS 4000000000u

/* Packets, as good as we know. */
uint32_t tp_rc_under_way(const struct tp_rc *rc)
{
	bool uc = rc->transport == TP_WIRE_UC;
	uint32_t out = uc && !rc->paced ? 0 : (uint32_t)tp_psn_diff(rc->next, uc ? rc->paced_psn : rc->una);
	return rc->repairing ? out - out / 2 : out;
}

/* Counts what is under way, and what was sent before it since the last word: it may be lost, or lie in the socket. */
void tp_rc_set_flow(struct tp_rc *rc)
{
	int64_t bytes = (int64_t)(tp_rc_under_way(rc) + rc->repeated) * TP_FLOW_PACKET_COST(rc->mtu);
	if (bytes == rc->flow_bytes)
		return;
	atomic_fetch_add_explicit(&rc->flow->bytes, bytes - rc->flow_bytes, memory_order_relaxed);
	rc->flow_bytes = bytes;
}

/* Packets that may go out now. One always may, else a QP could wait for ever behind others. */
static uint32_t room(struct tp_rc *rc)
{
	uint32_t out = tp_rc_under_way(rc);
	if (out >= rc->window)
		return 0;
	int64_t left = (int64_t)rc->endpoint->budget - tp_flow_bytes(rc->flow);
	uint32_t by_flow = left > 0 ? (uint32_t)left / TP_FLOW_PACKET_COST(rc->mtu) : 0;
	uint32_t packets = TP_MIN(rc->window - out, by_flow);
	return packets || out ? packets : 1;
}

/* ---- requests begun ---- */

static uint32_t packets_of(const struct tp_rc *rc, const struct tp_wqe *wqe)
{
	if (wqe->opcode == IBV_WR_BIND_MW || wqe->opcode == IBV_WR_LOCAL_INV)
		return 0;
	if (wqe->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || wqe->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD || wqe->length == 0)
		return 1;
	return (wqe->length + rc->mtu - 1) / rc->mtu;
}

static bool fetches_outstanding(struct tp_qp *qp, uint32_t before)
{
	for (uint32_t i = qp->sq.done; i != before; i++)
		if (tp_wqe_fetches(tp_sq_at(&qp->sq, i)))
			return true;
	return false;
}

void tp_rc_fail_at(struct tp_qp *qp, uint32_t count, enum ibv_wc_status status)
{
	struct tp_rc *rc = tp_rc_of(qp);
	if (rc->failed != IBV_WC_SUCCESS && (int32_t)(count - rc->failed_at) >= 0)
		return;
	rc->failed = status;
	rc->failed_at = count;
}

static bool takes_receive(const struct tp_wqe *wqe)
{
	return wqe->opcode == IBV_WR_SEND || wqe->opcode == IBV_WR_SEND_WITH_IMM || wqe->opcode == IBV_WR_SEND_WITH_INV ||
		wqe->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
}

/* Without a receive there a request is a probe: it goes once all before it were answered, as those answers may tell of new receives. */
static bool has_credit(const struct tp_rc *rc)
{
	return !rc->limited || (int32_t)(rc->takes_most - rc->takes_begun) > 0 || rc->una == rc->next;
}

/* The next request of the queue is looked at for the first time. false: it must wait, or it failed. */
static bool begin(struct tp_qp *qp)
{
	struct tp_rc *rc = tp_rc_of(qp);
	struct tp_wqe *wqe = tp_sq_at(&qp->sq, qp->sq.exec);
	if ((wqe->flags & IBV_SEND_FENCE) && fetches_outstanding(qp, qp->sq.exec))
		return false;
	if (takes_receive(wqe) && !has_credit(rc))
		return false;
	enum ibv_wc_status status = IBV_WC_SUCCESS;
	uint32_t packets = packets_of(rc, wqe);
	rc->takes_begun += takes_receive(wqe);
	if (packets == 0)
		status = wqe->opcode == IBV_WR_BIND_MW ? tp_mw_bind(qp, wqe) : tp_mw_invalidate_local(qp, wqe->imm);
	else if (wqe->length > TP_CARD_MSG_BYTES)
		status = IBV_WC_LOC_LEN_ERR;
	else if (tp_wqe_fetches(wqe) && qp->attr.max_rd_atomic == 0)
		status = IBV_WC_LOC_QP_OP_ERR;
	wqe->carrier[0] = rc->top;
	wqe->carrier[1] = packets;
	wqe->carrier[2] = 0;
	wqe->carrier[3] = rc->takes_begun;
	qp->sq.exec++;
	if (status != IBV_WC_SUCCESS) {
		wqe->carrier[1] = 0;
		tp_rc_fail_at(qp, qp->sq.exec - 1, status);
		return false;
	}
	return true;
}

/* ---- packets made ---- */

static uint8_t data_opcode(const struct tp_wqe *wqe, bool first, bool last)
{
	bool only = first && last;
	switch (wqe->opcode) {
	case IBV_WR_SEND:
		return only ? TP_OP_SEND_ONLY : first ? TP_OP_SEND_FIRST : last ? TP_OP_SEND_LAST : TP_OP_SEND_MIDDLE;
	case IBV_WR_SEND_WITH_IMM:
		return only ? TP_OP_SEND_ONLY_IMM : first ? TP_OP_SEND_FIRST : last ? TP_OP_SEND_LAST_IMM : TP_OP_SEND_MIDDLE;
	case IBV_WR_SEND_WITH_INV:
		return only ? TP_OP_SEND_ONLY_INV : first ? TP_OP_SEND_FIRST : last ? TP_OP_SEND_LAST_INV : TP_OP_SEND_MIDDLE;
	case IBV_WR_RDMA_WRITE_WITH_IMM:
		return only ? TP_OP_WRITE_ONLY_IMM : first ? TP_OP_WRITE_FIRST : last ? TP_OP_WRITE_LAST_IMM : TP_OP_WRITE_MIDDLE;
	default:
		return only ? TP_OP_WRITE_ONLY : first ? TP_OP_WRITE_FIRST : last ? TP_OP_WRITE_LAST : TP_OP_WRITE_MIDDLE;
	}
}

static struct tp_packet packet_for(struct tp_qp *qp, const struct tp_wqe *wqe, uint8_t operation)
{
	struct tp_rc *rc = tp_rc_of(qp);
	return (struct tp_packet){ .opcode = (uint8_t)(rc->transport << 5 | operation), .pkey = TP_CARD_PKEY, .qpn = qp->attr.dest_qp_num,
		.psn = rc->next, .srqn = wqe->srqn };
}

/* Packets of a SEND or WRITE, as many as may go; false: the burst or the memory failed. */
static bool send_data(struct tp_qp *qp, struct tp_burst *burst, struct tp_wqe *wqe, uint32_t allowed)
{
	struct tp_rc *rc = tp_rc_of(qp);
	struct tp_span spans[TP_CARD_SGE];
	int count = tp_wqe_enter(qp, wqe, 0, spans);
	enum ibv_wc_status status = count < 0 ? IBV_WC_LOC_PROT_ERR : IBV_WC_SUCCESS;
	uint32_t index = (uint32_t)tp_psn_diff(rc->next, tp_wqe_psn(wqe)), packets = tp_wqe_packets(wqe);
	bool reliable = rc->transport != TP_WIRE_UC, ok = true;
	for (; status == IBV_WC_SUCCESS && index < packets && allowed > 0; index++, allowed--) {
		bool first = index == 0, last = index + 1 == packets;
		struct tp_packet packet = packet_for(qp, wqe, data_opcode(wqe, first, last));
		uint64_t offset = (uint64_t)index * rc->mtu;
		packet.bytes = (uint32_t)TP_MIN((uint64_t)rc->mtu, wqe->length - offset);
		packet.solicited = last && (wqe->flags & IBV_SEND_SOLICITED);
		packet.ack_request = (reliable && last) || allowed == 1 || ++rc->unasked >= ASK_EVERY;
		packet.addr = wqe->rdma.addr;
		packet.rkey = wqe->opcode == IBV_WR_SEND_WITH_INV ? wqe->imm : wqe->rdma.rkey;
		packet.length = wqe->length;
		packet.imm = wqe->imm;
		uint8_t *payload = tp_burst_packet(burst, &packet);
		ok = payload != NULL;
		if (!ok)
			break;
		if (packet.bytes && tp_span_read(spans, count, offset, payload, packet.bytes)) {
			status = IBV_WC_LOC_PROT_ERR;
			break;
		}
		tp_burst_commit(burst, &packet);
		if (packet.ack_request)
			rc->unasked = 0;
		rc->next = tp_psn_add(rc->next, 1);
	}
	if (count > 0)
		tp_span_leave(spans, count);
	if (status != IBV_WC_SUCCESS)
		tp_rc_fail_at(qp, rc->current, status);
	return ok && status == IBV_WC_SUCCESS;
}

/* Packets of a READ's next piece. Pieces end at the same places each time: a repeated request must not reach beyond what the
 * other side took for a whole one. */
static uint32_t piece_of(const struct tp_rc *rc, const struct tp_wqe *wqe, uint32_t index)
{
	uint32_t size = TP_MIN(TP_MAX(TP_RC_READ_BYTES / rc->mtu, 1u), TP_RC_READ_PACKETS);
	return TP_MIN(tp_wqe_packets(wqe), (index / size + 1) * size) - index;
}

/* A READ's next piece, or an atomic; false: the other side has as many of them as it takes, the window has no room for it, or the
 * burst failed. */
static bool send_fetch(struct tp_qp *qp, struct tp_burst *burst, struct tp_wqe *wqe, uint32_t allowed)
{
	struct tp_rc *rc = tp_rc_of(qp);
	if (rc->reads_count >= qp->attr.max_rd_atomic)
		return false;
	uint32_t index = (uint32_t)tp_psn_diff(rc->next, tp_wqe_psn(wqe)), packets = 1;
	struct tp_packet packet = packet_for(qp, wqe, TP_OP_READ_REQUEST);
	packet.ack_request = true;
	if (wqe->opcode == IBV_WR_RDMA_READ) {
		uint64_t offset = (uint64_t)index * rc->mtu;
		packets = piece_of(rc, wqe, index);
		if (packets > allowed && rc->next != rc->una)
			return false;
		packet.addr = wqe->rdma.addr + offset;
		packet.rkey = wqe->rdma.rkey;
		packet.length = (uint32_t)TP_MIN((uint64_t)packets * rc->mtu, wqe->length - offset);
	} else {
		bool swap = wqe->opcode == IBV_WR_ATOMIC_CMP_AND_SWP;
		packet.opcode = (uint8_t)(rc->transport << 5 | (swap ? TP_OP_COMPARE_SWAP : TP_OP_FETCH_ADD));
		packet.addr = wqe->atomic.addr;
		packet.rkey = wqe->atomic.rkey;
		packet.swap_add = swap ? wqe->atomic.swap : wqe->atomic.compare_add;
		packet.compare = swap ? wqe->atomic.compare_add : 0;
	}
	if (!tp_burst_packet(burst, &packet))
		return false;
	tp_burst_commit(burst, &packet);
	rc->next = tp_psn_add(rc->next, packets);
	rc->read_ends[(rc->reads_first + rc->reads_count++) % TP_CARD_RD_ATOMIC] = rc->next;
	return true;
}

/* One step of the request that next lies in; false: nothing more can go now. */
static bool step(struct tp_qp *qp, struct tp_burst *burst)
{
	struct tp_rc *rc = tp_rc_of(qp);
	if (rc->failed != IBV_WC_SUCCESS && (int32_t)(rc->current - rc->failed_at) >= 0)
		return false;
	if (rc->current == qp->sq.exec && (!tp_qp_sends(qp) || qp->sq.exec == qp->sq.head || !begin(qp)))
		return false;
	struct tp_wqe *wqe = tp_sq_at(&qp->sq, rc->current);
	if (tp_psn_diff(rc->next, tp_wqe_psn(wqe)) < (int32_t)tp_wqe_packets(wqe)) {
		uint32_t allowed = rc->transport == TP_WIRE_UC && !rc->paced ? UINT32_MAX : rc->paced_held ? 0 : room(rc);
		bool more = allowed > 0 && (tp_wqe_fetches(wqe) ? send_fetch(qp, burst, wqe, allowed) : send_data(qp, burst, wqe, allowed));
		if (tp_psn_diff(rc->next, rc->top) > 0)
			rc->top = rc->next;
		tp_rc_set_flow(rc);
		if (!more)
			return false;
	}
	if (tp_psn_diff(rc->next, tp_wqe_psn(wqe)) >= (int32_t)tp_wqe_packets(wqe))
		rc->current++;
	return true;
}

static void explain_unsendable(struct tp_qp *qp, int error)
{
	struct tp_rc *rc = tp_rc_of(qp);
	char from[TP_ADDR_TEXT], to[TP_ADDR_TEXT];
	if (rc->warned)
		return;
	rc->warned = true;
	TP_WARN("QP 0x%06x: the network takes no packets from %s to %s: %s%s", qp->ibv.qp_num, tp_addr_format(&rc->endpoint->addr, from),
		tp_addr_format(&rc->route.to, to), strerror(error), error == EMSGSIZE ? " (the interface's MTU is below the QP's path MTU and headers)" : "");
}

/* The acknowledgement that was held goes with what is sent. Programs rely on a request's completion coming before the other
 * side's reply to it, so it goes first; but to an address of this machine it lies behind, in the same piece, whose receiver looks at it
 * first (split in port.c): one datagram less. */
static void add_ack(struct tp_qp *qp, struct tp_burst *burst)
{
	struct tp_packet packet;
	bool due = tp_rc_take_ack(qp, &packet);
	tp_rc_hold_paid(tp_rc_of(qp));
	/* Where the burst failed it is lost, as it may be on the way: the other side asks again. */
	if (!due || !tp_burst_packet(burst, &packet))
		return;
	tp_burst_commit(burst, &packet);
	if (burst->count > 0 && burst->packets[burst->count - 1] == 1)
		burst->psns[burst->count - 1] = tp_rc_of(qp)->next;     /* its own number is the other side's */
}

void tp_rc_push(struct tp_qp *qp)
{
	struct tp_rc *rc = tp_rc_of(qp);
	uint64_t wait = TP_MAX(rc->rnr_until_ns, rc->blocked_until_ns);
	tp_rc_set_flow(rc);       /* of what was acknowledged */
	if (wait && tp_clock_ns() < wait)
		return;
	rc->rnr_until_ns = rc->blocked_until_ns = 0;
	uint32_t before = rc->next;
	struct tp_burst *burst = tp_burst_start(qp->port, rc->endpoint, rc->sender, &rc->route, &rc->out);
	if (burst && rc->held_ns && (burst->whole || !rc->same_host) && (qp->sq.exec != qp->sq.head || rc->next != rc->top))
		add_ack(qp, burst);
	while (burst && step(qp, burst))
		;
	if (burst && rc->held_ns && rc->next != before)
		add_ack(qp, burst);
	if (burst && !tp_burst_flush(burst)) {
		if (burst->error == EAGAIN) {
			/* What the kernel had no room for goes out later. */
			tp_rc_go_back(qp, burst->lost_psn, false);
			rc->blocked_until_ns = tp_clock_ns() + BLOCKED_NS;
		} else {
			explain_unsendable(qp, burst->error);
		}
	}
	if (rc->transport == TP_WIRE_UC)
		tp_uc_pushed(qp);
	else if (!rc->timing && rc->next != before) {
		rc->timing = true;
		rc->timed_ns = tp_clock_ns();
		rc->timed_psn = tp_psn_add(rc->next, TP_WIRE_PSN_MASK);
	}
	tp_rc_complete(qp);
	tp_rc_arm(qp);
}

/* ---- ends ---- */

void tp_rc_complete(struct tp_qp *qp)
{
	struct tp_rc *rc = tp_rc_of(qp);
	struct tp_sq *sq = &qp->sq;
	while (sq->done != sq->exec) {
		struct tp_wqe *wqe = tp_sq_at(sq, sq->done);
		if (rc->failed != IBV_WC_SUCCESS && sq->done == rc->failed_at) {
			enum ibv_wc_status status = rc->failed;
			rc->failed = IBV_WC_SUCCESS;
			tp_sq_complete_locked(qp, status, 0);
			return;
		}
		uint32_t packets = tp_wqe_packets(wqe);
		if (sq->done == rc->current || (packets && tp_psn_diff(rc->una, tp_psn_add(tp_wqe_psn(wqe), packets)) < 0))
			return;
		rc->takes_ended = tp_wqe_takes(wqe);
		tp_sq_complete_locked(qp, IBV_WC_SUCCESS, tp_wqe_fetches(wqe) ? wqe->length : 0);
		int state = atomic_load_explicit(&qp->state, memory_order_relaxed);
		if (state != IBV_QPS_RTS && state != IBV_QPS_SQD)
			return;
	}
}

/* ---- loss ---- */

void tp_rc_congested(struct tp_qp *qp)
{
	struct tp_rc *rc = tp_rc_of(qp);
	rc->window = TP_MAX(rc->window / 2, TP_RC_WINDOW_MIN);
	rc->window_part = 0;
	rc->recover = rc->top;
}

/* By an eighth: our own limits keep sockets from overflowing, so most losses are chance. */
void tp_rc_lost(struct tp_rc *rc, uint32_t psn)
{
	if (tp_psn_diff(psn, rc->recover) < 0)
		return;
	rc->window = TP_MAX(rc->window * 7 / 8, TP_RC_WINDOW_MIN);
	rc->recover = rc->top;
}

/* The request that psn lies in, of those begun; exec: none. */
static uint32_t request_at(struct tp_qp *qp, uint32_t psn)
{
	uint32_t count = qp->sq.done;
	while (count != qp->sq.exec) {
		const struct tp_wqe *wqe = tp_sq_at(&qp->sq, count);
		if (tp_psn_diff(psn, tp_psn_add(tp_wqe_psn(wqe), tp_wqe_packets(wqe))) < 0)
			break;
		count++;
	}
	return count;
}

bool tp_rc_send_again(struct tp_qp *qp, uint32_t psn)
{
	struct tp_rc *rc = tp_rc_of(qp);
	uint32_t count = request_at(qp, psn), next = rc->next, current = rc->current, reads = rc->reads_count;
	if (rc->rnr_until_ns || rc->blocked_until_ns || count == qp->sq.exec || tp_psn_diff(psn, rc->una) < 0 || tp_psn_diff(psn, next) >= 0)
		return false;
	struct tp_wqe *wqe = tp_sq_at(&qp->sq, count);
	struct tp_burst *burst = tp_burst_start(qp->port, rc->endpoint, rc->sender, &rc->route, &rc->out);
	if (!burst || (tp_wqe_fetches(wqe) && reads == 0))
		return false;
	rc->next = psn;
	rc->current = count;
	rc->reads_count -= tp_wqe_fetches(wqe);     /* it is among those under way already */
	bool sent = tp_wqe_fetches(wqe) ? send_fetch(qp, burst, wqe, UINT32_MAX) : send_data(qp, burst, wqe, 1);
	sent = tp_burst_flush(burst) && sent;
	rc->next = next;
	rc->current = current;
	rc->reads_count = reads;
	rc->timing = false;
	rc->repeated += sent;
	tp_rc_set_flow(rc);
	return sent;
}

void tp_rc_go_back(struct tp_qp *qp, uint32_t psn, bool loss)
{
	struct tp_rc *rc = tp_rc_of(qp);
	if (tp_psn_diff(psn, rc->una) < 0)
		psn = rc->una;
	if (tp_psn_diff(psn, rc->next) >= 0)
		return;
	if (loss) {
		tp_rc_lost(rc, psn);
		rc->repeated += (uint32_t)tp_psn_diff(rc->next, psn);
	}
	rc->next = psn;
	rc->timing = rc->repairing = false;
	rc->unasked = 0;
	while (rc->reads_count && tp_psn_diff(rc->read_ends[(rc->reads_first + rc->reads_count - 1) % TP_CARD_RD_ATOMIC], psn) > 0)
		rc->reads_count--;
	rc->current = request_at(qp, psn);
	tp_rc_set_flow(rc);
}

/* ---- time ---- */

static uint64_t first_probe_after(const struct tp_qp *qp)
{
	/* Round trips of a time when nobody had a processor would make it later than any hardware is. */
	uint64_t after = TP_MAX(4 * tp_rc_of((struct tp_qp *)(uintptr_t)qp)->rtt_ns, (uint64_t)TP_RC_PROBE_MIN_NS);
	return qp->attr.timeout ? TP_MIN(after, TP_MAX(4096ull << qp->attr.timeout, (uint64_t)FIRST_MOST_NS)) : after;
}

static uint64_t probe_after(const struct tp_qp *qp, const struct tp_rc *rc)
{
	return first_probe_after(qp) << TP_MIN(rc->probes, (uint32_t)BACKOFF_MAX);
}

void tp_rc_arm(struct tp_qp *qp)
{
	struct tp_rc *rc = tp_rc_of(qp);
	uint64_t when = 0;
	if (rc->rnr_until_ns || rc->blocked_until_ns) {
		when = TP_MAX(rc->rnr_until_ns, rc->blocked_until_ns);
	} else if (rc->una != rc->next) {
		uint64_t now = tp_clock_ns();
		if (!rc->progress_ns)
			rc->progress_ns = now;
		if (!rc->probe_ns)
			rc->probe_ns = now + probe_after(qp, rc);
		when = rc->probe_ns;
	} else {
		rc->progress_ns = rc->probe_ns = 0;
	}
	if (rc->transport == TP_WIRE_UC && !when)
		when = tp_uc_waits_until(qp);
	if (rc->answer_ns && (!when || rc->answer_ns < when))
		when = rc->answer_ns;
	tp_timer_arm(rc->timer, when);
}

/* Nobody answered for as long as the QP's timeout and retries say; but who had no processor in that time, or whose peer had none,
 * must have asked a few times: timeouts of microseconds are for hardware. Where our own timers are late the machine is busy, and a peer on
 * it, or on one like it, needs more time than that to get a processor at all. */
static bool given_up(struct tp_qp *qp, uint64_t now)
{
	struct tp_rc *rc = tp_rc_of(qp);
	uint64_t limit = tp_retry_limit_ns(qp->attr.timeout, qp->attr.retry_cnt);
	uint64_t busy_ns = TP_MIN(rc->late_ns * LATE_FACTOR, (uint64_t)LATE_MOST_NS);
	return limit && rc->progress_ns && now - rc->progress_ns >= limit + busy_ns && rc->probes >= PROBES_MIN;
}

/* Who has asked a process in vain needn't be joined by all other connections to it: its socket may be full of what they sent. */
static bool may_ask(struct tp_qp *qp, uint64_t now)
{
	struct tp_rc *rc = tp_rc_of(qp);
	struct tp_flow *flow = rc->flow;
	uint64_t asked = atomic_load_explicit(&flow->asked_ns, memory_order_relaxed);
	uint32_t asks = atomic_load_explicit(&flow->asks, memory_order_relaxed);
	bool heard = atomic_load_explicit(&flow->heard_ns, memory_order_relaxed) >= asked;
	uint64_t until = asked + (first_probe_after(qp) << TP_MIN(asks, (uint32_t)GAP_DOUBLINGS));
	if (!rc->wants_ns)
		rc->wants_ns = now;
	if (!heard && now < until && now - rc->wants_ns < WANT_MOST_NS) {
		rc->probe_ns = TP_MIN(until, rc->wants_ns + WANT_MOST_NS);
		return false;
	}
	rc->wants_ns = 0;
	atomic_store_explicit(&flow->asked_ns, now, memory_order_relaxed);
	atomic_store_explicit(&flow->asks, heard ? 1 : asks + 1, memory_order_relaxed);
	return true;
}

/* Asks again: the oldest packet alone, which brings an answer whatever was lost. What follows goes out after that answer. */
static void probe(struct tp_qp *qp, uint64_t now)
{
	struct tp_rc *rc = tp_rc_of(qp);
	uint64_t limit = tp_retry_limit_ns(qp->attr.timeout, qp->attr.retry_cnt);
	tp_counter_add(qp->port, TP_CNT_ROCE_ADP_RETRANS, 1);
	rc->probes++;
	tp_rc_go_back(qp, rc->una, true);
	rc->window = rc->window > 1 && rc->probes > 1 ? TP_RC_WINDOW_MIN : rc->window;
	uint32_t window = rc->window;
	rc->window = 1;
	rc->probe_ns = 0;
	tp_rc_push(qp);
	rc->window = window;
	/* Not later than when it is given up. */
	if (limit && rc->probe_ns > rc->progress_ns + limit && rc->progress_ns + limit > now) {
		rc->probe_ns = rc->progress_ns + limit;
		tp_rc_arm(qp);
	}
}

void tp_rc_fire(struct tp_qp *qp)
{
	/* The answer may lie in the socket already, where this process had no processor for a while. */
	bool all = tp_wire_catch_up();
	pthread_mutex_lock(&qp->lock);
	struct tp_rc *rc = qp->carrier == &tp_wire ? tp_rc_of(qp) : NULL;
	int state = atomic_load_explicit(&qp->state, memory_order_relaxed);
	if (rc && !qp->stopped && (state == IBV_QPS_RTS || state == IBV_QPS_SQD) && !qp->running) {
		uint64_t now = tp_clock_ns();
		qp->running = true;
		if (rc->rnr_until_ns || rc->blocked_until_ns) {
			tp_rc_push(qp);
		} else if (rc->transport == TP_WIRE_UC && tp_uc_waits_until(qp) && now >= tp_uc_waits_until(qp)) {
			tp_uc_unanswered(qp, now);
		} else if (rc->una != rc->next && rc->probe_ns && now >= rc->probe_ns) {
			rc->late_ns += now - rc->probe_ns;
			if (given_up(qp, now) && !all && rc->put_off++ < PUT_OFF_MOST) {
				/* Another thread may have read the answer, and not have looked at it yet. */
				rc->probe_ns = now + TP_RC_PROBE_MIN_NS;
				tp_rc_arm(qp);
			} else if (given_up(qp, now)) {
				char text[TP_ADDR_TEXT];
				TP_INFO(TP_NET, "QP 0x%06x: no answer from QP 0x%06x at %s for %.3f s (timeout %u, retry_cnt %u): "
					"%d of %d packets sent are unanswered, %u times asked again", qp->ibv.qp_num, qp->attr.dest_qp_num,
					tp_addr_format(&rc->route.to, text), (double)(now - rc->progress_ns) * 1e-9, qp->attr.timeout, qp->attr.retry_cnt,
					tp_psn_diff(rc->next, rc->una), tp_psn_diff(rc->top, rc->una), rc->probes);
				tp_counter_add(qp->port, TP_CNT_LOCAL_ACK_TIMEOUT_ERR, 1);
				tp_rc_fail_at(qp, qp->sq.done, IBV_WC_RETRY_EXC_ERR);
				tp_rc_complete(qp);
			} else if (may_ask(qp, now)) {
				probe(qp, now);
			} else {
				tp_rc_arm(qp);
			}
		} else {
			tp_rc_arm(qp);
		}
		qp->running = false;
		tp_qp_settle_locked(qp);
		pthread_cond_broadcast(&qp->idle);
		if (qp->carrier == &tp_wire && qp->again)
			tp_qp_run_locked(qp);
	}
	if (rc && qp->carrier == &tp_wire && (rc->answers_count || rc->answer_ns))
		tp_rc_answer(qp);
	pthread_mutex_unlock(&qp->lock);
}

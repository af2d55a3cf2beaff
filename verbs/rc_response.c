/* The initiator: what comes back. An acknowledgement says that all before it arrived; a READ's data says so too, and an
 * acknowledgement beyond data that hasn't come means that the data was lost. All under the QP's lock. */
#include <string.h>
#include "verbs/internal.h"
#include "verbs/rc.h"

enum { WINDOW_MAX = 512, WINDOW_BYTES = 512 << 10, GROWTH = 8 };

/* The request that psn belongs to, among those begun; false where there is none. */
static bool find_request(struct tp_qp *qp, uint32_t psn, uint32_t *count)
{
	for (uint32_t i = qp->sq.done; i != qp->sq.exec; i++) {
		const struct tp_wqe *wqe = tp_sq_at(&qp->sq, i);
		int32_t distance = tp_psn_diff(psn, tp_wqe_psn(wqe));
		if (distance < 0)
			return false;
		if (distance < (int32_t)tp_wqe_packets(wqe)) {
			*count = i;
			return true;
		}
	}
	return false;
}

static void measure(struct tp_rc *rc, uint32_t acknowledged, uint64_t now)
{
	if (!rc->timing || tp_psn_diff(acknowledged, rc->timed_psn) <= 0)
		return;
	uint64_t rtt = now - rc->timed_ns;
	rc->rtt_ns = rc->rtt_ns ? rc->rtt_ns - rc->rtt_ns / 8 + rtt / 8 : rtt;
	rc->timing = false;
}

/* All before psn arrived, as far as fetched data allows; returns false where data is missing before psn. */
static bool advance(struct tp_qp *qp, uint32_t psn)
{
	struct tp_rc *rc = tp_rc_of(qp);
	bool whole = true;
	for (uint32_t i = qp->sq.done; i != qp->sq.exec && whole; i++) {
		const struct tp_wqe *wqe = tp_sq_at(&qp->sq, i);
		if (tp_psn_diff(tp_wqe_psn(wqe), psn) >= 0)
			break;
		if (tp_wqe_fetches(wqe) && tp_wqe_received(wqe) < tp_wqe_packets(wqe)) {
			uint32_t missing = tp_psn_add(tp_wqe_psn(wqe), tp_wqe_received(wqe));
			whole = tp_psn_diff(missing, psn) >= 0;
			if (!whole)
				psn = missing;
		}
	}
	int32_t moved = tp_psn_diff(psn, rc->una);
	if (moved <= 0)
		return whole;
	uint64_t now = tp_clock_ns();
	measure(rc, psn, now);
	rc->una = psn;
	if (tp_psn_diff(rc->next, psn) < 0) {       /* it had arrived already, and was about to be sent again */
		rc->next = psn;
		while (rc->current != qp->sq.exec) {
			const struct tp_wqe *wqe = tp_sq_at(&qp->sq, rc->current);
			if (tp_psn_diff(psn, tp_psn_add(tp_wqe_psn(wqe), tp_wqe_packets(wqe))) < 0)
				break;
			rc->current++;
		}
	}
	while (rc->reads_count && tp_psn_diff(rc->read_ends[rc->reads_first], psn) <= 0) {
		rc->reads_first = (rc->reads_first + 1) % TP_CARD_RD_ATOMIC;
		rc->reads_count--;
	}
	rc->progress_ns = rc->una == rc->next ? 0 : now;
	rc->probe_ns = 0;
	rc->probes = rc->put_off = 0;
	rc->wants_ns = rc->late_ns = 0;
	rc->rnr_tries = 0;
	rc->repairing = rc->repairing && tp_psn_diff(rc->back_psn, psn) >= 0;
	rc->window_part += (uint32_t)moved;
	uint32_t most = TP_MIN((uint32_t)WINDOW_MAX, TP_MAX(TP_MIN(rc->endpoint->budget / TP_FLOW_PACKET_COST(rc->mtu),
		(uint32_t)WINDOW_BYTES / rc->mtu), TP_RC_WINDOW_MIN));
	rc->window = TP_MIN(rc->window + rc->window_part / GROWTH, most);
	rc->window_part %= GROWTH;
	return whole;
}

/* An answer to the request that psn lies in says how many receives are left there, after all that came before it. An old one says
 * nothing, and what was promised once stays: receives don't go away. */
static void take_credits(struct tp_qp *qp, uint32_t psn, uint8_t syndrome)
{
	struct tp_rc *rc = tp_rc_of(qp);
	uint32_t credits = tp_wire_credits(syndrome), taken = rc->takes_ended;
	psn = tp_psn_add(psn, 1);
	if (tp_psn_diff(psn, rc->una) < 0)
		return;
	if (credits == UINT32_MAX) {
		rc->limited = false;
		return;
	}
	for (uint32_t i = qp->sq.done; i != qp->sq.exec; i++) {
		const struct tp_wqe *wqe = tp_sq_at(&qp->sq, i);
		if (tp_psn_diff(psn, tp_psn_add(tp_wqe_psn(wqe), tp_wqe_packets(wqe))) < 0)
			break;
		taken = tp_wqe_takes(wqe);
	}
	if (!rc->limited || (int32_t)(taken + credits - rc->takes_most) > 0)
		rc->takes_most = taken + credits;
	rc->limited = true;
}

/* psn is lost: it alone goes again where that suffices, else all from there on. Once a round trip. */
static void repair(struct tp_qp *qp, uint32_t psn, bool alone)
{
	struct tp_rc *rc = tp_rc_of(qp);
	uint64_t now = tp_clock_ns();
	if (psn == rc->back_psn && now - rc->back_ns < rc->rtt_ns + rc->rtt_ns / 4)
		return;
	rc->back_psn = psn;
	rc->back_ns = now;
	rc->repairing = alone && tp_rc_send_again(qp, psn);
	if (rc->repairing)
		tp_rc_lost(rc, psn);
	else
		tp_rc_go_back(qp, psn, true);
}

/* An answer shows that data before it was lost. What came is kept, so that data alone is asked for again. */
static void data_missing(struct tp_qp *qp)
{
	tp_counter_add(qp->port, TP_CNT_IMPLIED_NAK_SEQ_ERR, 1);
	repair(qp, tp_rc_of(qp)->una, true);
}

/* Acknowledged up to and with psn. */
static void acknowledged(struct tp_qp *qp, uint32_t psn)
{
	struct tp_rc *rc = tp_rc_of(qp);
	psn = tp_psn_add(psn, 1);
	if (tp_psn_diff(psn, rc->acked) > 0)
		rc->acked = psn;
	if (!advance(qp, psn)) {
		data_missing(qp);
	} else if (rc->probes == 0 && rc->una != rc->next && !rc->probe_ns) {
		tp_rc_arm(qp);
	}
}

static void refused(struct tp_qp *qp, const struct tp_packet *packet)
{
	uint32_t count;
	advance(qp, packet->psn);
	tp_rc_complete(qp);
	static const enum ibv_wc_status statuses[] = { [TP_NAK_INVALID_REQUEST] = IBV_WC_REM_INV_REQ_ERR,
		[TP_NAK_REMOTE_ACCESS] = IBV_WC_REM_ACCESS_ERR, [TP_NAK_REMOTE_OPERATION] = IBV_WC_REM_OP_ERR,
		[TP_NAK_INVALID_RD] = IBV_WC_REM_INV_RD_REQ_ERR };
	uint8_t code = packet->syndrome & TP_SYN_VALUE;
	if (code == TP_NAK_SEQUENCE) {
		tp_counter_add(qp->port, TP_CNT_PACKET_SEQ_ERR, 1);
		repair(qp, packet->psn, tp_rc_of(qp)->peer_keeps);
	} else if (code < TP_ARRAY_LEN(statuses) && find_request(qp, packet->psn, &count)) {
		tp_rc_fail_at(qp, count, statuses[code]);
	}
}

static void not_ready(struct tp_qp *qp, const struct tp_packet *packet)
{
	struct tp_rc *rc = tp_rc_of(qp);
	uint32_t count;
	advance(qp, packet->psn);
	if (!find_request(qp, packet->psn, &count) || tp_psn_diff(packet->psn, rc->next) >= 0)
		return;
	if (qp->attr.rnr_retry != 7 && rc->rnr_tries >= qp->attr.rnr_retry) {
		tp_rc_fail_at(qp, count, IBV_WC_RNR_RETRY_EXC_ERR);
		return;
	}
	rc->rnr_tries++;
	tp_rc_go_back(qp, packet->psn, false);
	rc->rnr_until_ns = tp_clock_ns() + tp_rnr_delay_ns(packet->syndrome & TP_SYN_VALUE);
	/* The other side is alive: its time starts anew. */
	rc->progress_ns = rc->probe_ns = 0;
	tp_rc_arm(qp);
}

/* A piece of what a READ fetches, or an atomic's result. */
static void fetched(struct tp_qp *qp, const struct tp_packet *packet)
{
	struct tp_rc *rc = tp_rc_of(qp);
	uint32_t count;
	if (!find_request(qp, packet->psn, &count))
		return;
	struct tp_wqe *wqe = tp_sq_at(&qp->sq, count);
	bool atomic = tp_wire_operation(packet->opcode) == TP_OP_ATOMIC_ACK;
	uint32_t index = (uint32_t)tp_psn_diff(packet->psn, tp_wqe_psn(wqe));
	/* What comes before was done: requests are served in order. */
	bool before = advance(qp, packet->psn);
	if (!before || index > tp_wqe_received(wqe)) {
		tp_early_keep(&rc->early_answers, packet, rc->una);
		data_missing(qp);
		return;
	}
	if (!tp_wqe_fetches(wqe) || (wqe->opcode == IBV_WR_RDMA_READ) == atomic) {
		tp_rc_fail_at(qp, count, IBV_WC_BAD_RESP_ERR);
		return;
	}
	if (index < tp_wqe_received(wqe))
		return;
	uint64_t offset = atomic ? 0 : (uint64_t)index * rc->mtu;
	uint32_t bytes = atomic ? 8 : (uint32_t)TP_MIN((uint64_t)rc->mtu, wqe->length - offset);
	const void *data = atomic ? (const void *)&packet->original : packet->payload;
	if (!atomic && packet->bytes != bytes) {
		tp_rc_fail_at(qp, count, IBV_WC_BAD_RESP_ERR);
		return;
	}
	struct tp_span spans[TP_CARD_SGE];
	int pinned = bytes ? tp_wqe_enter(qp, wqe, IBV_ACCESS_LOCAL_WRITE, spans) : 0;
	bool placed = pinned >= 0 && (bytes == 0 || tp_span_write(spans, pinned, offset, data, bytes) == 0);
	if (pinned > 0)
		tp_span_leave(spans, pinned);
	if (!placed) {
		tp_rc_fail_at(qp, count, IBV_WC_LOC_PROT_ERR);
		return;
	}
	wqe->carrier[2] = index + 1;
	advance(qp, tp_psn_add(packet->psn, 1));
}

/* And what was kept that follows; then acknowledgements count that were ahead of the data. */
static void fetched_in_turn(struct tp_qp *qp, const struct tp_packet *packet)
{
	struct tp_rc *rc = tp_rc_of(qp);
	uint32_t before;
	do {
		before = rc->una;
		fetched(qp, packet);
		tp_early_pass(rc->early_answers, before, rc->una);
		packet = tp_early_at(rc->early_answers, rc->una);
	} while (packet && before != rc->una);
	if (tp_psn_diff(rc->acked, rc->una) > 0 && !advance(qp, rc->acked) && before != rc->una)
		data_missing(qp);
}

void tp_rc_answered(struct tp_qp *qp, const struct tp_packet *packet)
{
	struct tp_rc *rc = tp_rc_of(qp);
	int state = atomic_load_explicit(&qp->state, memory_order_relaxed);
	if (state != IBV_QPS_RTS && state != IBV_QPS_SQD)
		return;
	/* Never sent, or long done: a stranger's guess, or late. */
	int32_t ahead = tp_psn_diff(packet->psn, rc->top);
	if (ahead >= 0 || tp_psn_diff(packet->psn, rc->una) < -1)
		return;
	bool data = tp_wire_operation(packet->opcode) != TP_OP_ACK;
	rc->peer_keeps |= packet->keeps;
	rc->repeated = 0;
	if (tp_wire_parts(packet->opcode) & TP_HAS_AETH && (packet->syndrome & TP_SYN_KIND) == TP_SYN_ACK)
		take_credits(qp, packet->psn, packet->syndrome);
	switch (data ? TP_SYN_ACK : packet->syndrome & TP_SYN_KIND) {
	case TP_SYN_ACK:
		if (data)
			fetched_in_turn(qp, packet);
		else
			acknowledged(qp, packet->psn);
		break;
	case TP_SYN_RNR:
		not_ready(qp, packet);
		break;
	case TP_SYN_NAK:
		refused(qp, packet);
		break;
	default:
		return;
	}
	tp_rc_complete(qp);
}

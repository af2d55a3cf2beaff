/* The responder: requests in the order of their numbers, each checked and placed by the target's functions; one NAK for a gap;
 * duplicates acknowledged, read again or answered from what was kept. Answers leave in the order of the requests: READ data and
 * atomics' results wait in a queue, an acknowledgement or NAK goes out when the queue is empty. All under the QP's lock. */
#include <string.h>
#include "verbs/internal.h"
#include "verbs/rc.h"
#include "verbs/scatter.h"
#include "verbs/tsan.h"

enum { ANSWER_EVERY = 24, GAP_EVERY = 16, ANSWER_PACKETS = 128, AGAIN_NS = 20000, CNP_NS = 50000, BLOCKED_NS = 100000, ANSWERS_AT_END = 64 };

static struct tp_packet answer_packet(struct tp_qp *qp, uint8_t operation, uint32_t psn, uint8_t syndrome, uint32_t msn)
{
	struct tp_rc *rc = tp_rc_of(qp);
	return (struct tp_packet){ .opcode = (uint8_t)(rc->transport << 5 | operation), .pkey = TP_CARD_PKEY, .qpn = qp->attr.dest_qp_num,
		.psn = psn, .syndrome = syndrome, .msn = msn, .keeps = true };
}

/* ---- answers ---- */

/* An acknowledgement's: how many receives there are, so that the other side needn't find out by sending. The message that is coming in has
 * its own. Who shares a queue can't say. */
static uint8_t ack_syndrome(struct tp_qp *qp)
{
	if (qp->ibv.qp_type != IBV_QPT_RC || qp->srq)
		return TP_SYN_ACK | TP_WIRE_CREDITS_INVALID;
	return TP_SYN_ACK | tp_wire_credits_code(tp_target_receives_posted(qp) + qp->recv.taken);
}

static struct tp_answer *answer_at(struct tp_rc *rc, uint32_t i) { return &rc->answers[(rc->answers_first + i) % TP_RC_ANSWERS]; }

static bool push_answer(struct tp_rc *rc, const struct tp_answer *answer)
{
	if (rc->answers_count == TP_RC_ANSWERS)
		return false;       /* more than we allow at a time: as if it were lost */
	*answer_at(rc, rc->answers_count++) = *answer;
	return true;
}

static uint8_t read_operation(const struct tp_answer *answer)
{
	bool first = answer->next == 0, last = answer->next + 1 == answer->packets;
	return first && last ? TP_OP_READ_ONLY : first ? TP_OP_READ_FIRST : last ? TP_OP_READ_LAST : TP_OP_READ_MIDDLE;
}

/* Packets of a READ's data, as many as budget allows; the keys are looked at anew each time: a region may have gone. */
static enum tp_reply send_read(struct tp_qp *qp, struct tp_burst *burst, struct tp_answer *answer, int *budget, bool *full)
{
	struct tp_rc *rc = tp_rc_of(qp);
	struct tp_grip grip = { 0 };
	enum tp_reply reply = TP_REPLY_ACK;
	if (answer->length) {
		reply = tp_target_read_enter_locked(qp, rc->srqn, answer->rkey, answer->addr, answer->length, &grip);
		if (reply != TP_REPLY_ACK)
			return reply;
	}
	uint8_t syndrome = ack_syndrome(qp);
	/* The program may have been told, by the other side, that the READ is done, and write there: then what we read now is dropped there. */
	if (answer->again)
		tp_tsan_ignore_reads();
	while (answer->next < answer->packets && *budget > 0 && reply == TP_REPLY_ACK) {
		struct tp_packet packet = answer_packet(qp, read_operation(answer), tp_psn_add(answer->psn, answer->next),
			syndrome, answer->msn);
		uint64_t offset = (uint64_t)answer->next * rc->mtu;
		packet.bytes = (uint32_t)TP_MIN((uint64_t)rc->mtu, answer->length - offset);
		uint8_t *payload = tp_burst_packet(burst, &packet);
		if (!payload) {
			*full = true;
			break;
		}
		if (packet.bytes && tp_grip_read(&grip, offset, payload, packet.bytes)) {
			reply = TP_REPLY_REMOTE_ACCESS;
			break;
		}
		tp_burst_commit(burst, &packet);
		answer->next++;
		--*budget;
	}
	if (answer->again)
		tp_tsan_heed_reads();
	if (answer->length)
		tp_key_leave(&grip);
	return reply;
}

static uint8_t nak_of(enum tp_reply reply)
{
	switch (reply) {
	case TP_REPLY_INVALID_REQUEST: return TP_SYN_NAK | TP_NAK_INVALID_REQUEST;
	case TP_REPLY_REMOTE_ACCESS: return TP_SYN_NAK | TP_NAK_REMOTE_ACCESS;
	case TP_REPLY_SEQUENCE: return TP_SYN_NAK | TP_NAK_SEQUENCE;
	default: return TP_SYN_NAK | TP_NAK_REMOTE_OPERATION;
	}
}

/* The acknowledgement or NAK that is due; nothing waits before it. */
static void send_verdict(struct tp_qp *qp)
{
	struct tp_rc *rc = tp_rc_of(qp);
	if (!rc->nak && !rc->ack_due)
		return;
	uint32_t psn = rc->nak ? qp->recv_psn : tp_psn_add(qp->recv_psn, TP_WIRE_PSN_MASK);
	uint8_t syndrome = rc->nak ? rc->nak : ack_syndrome(qp);
	struct tp_packet packet = answer_packet(qp, TP_OP_ACK, psn, syndrome, rc->msn);
	uint8_t nak = rc->nak;
	rc->nak = 0;
	rc->ack_due = false;
	rc->held_ns = 0;
	rc->unanswered = 0;
	if (!tp_burst_send_one(qp, &packet)) {
		rc->nak = nak;
		rc->ack_due = !nak;
		rc->answer_ns = tp_clock_ns() + BLOCKED_NS;
		tp_rc_arm(qp);
	}
}

bool tp_rc_take_ack(struct tp_qp *qp, struct tp_packet *packet)
{
	struct tp_rc *rc = tp_rc_of(qp);
	if (!rc->ack_due || rc->nak || rc->answers_count)
		return false;
	*packet = answer_packet(qp, TP_OP_ACK, tp_psn_add(qp->recv_psn, TP_WIRE_PSN_MASK), ack_syndrome(qp), rc->msn);
	rc->ack_due = false;
	rc->unanswered = 0;
	return true;
}

/* An error at the target that ends the connection: the NAK first, then the QP goes to ERR. */
static void refuse(struct tp_qp *qp, uint32_t psn, enum tp_reply reply)
{
	struct tp_rc *rc = tp_rc_of(qp);
	struct tp_packet packet = answer_packet(qp, TP_OP_ACK, psn, nak_of(reply), rc->msn);
	rc->answers_count = 0;
	rc->answer_ns = 0;
	rc->ack_due = false;
	rc->nak = 0;
	rc->last_word = packet.syndrome;
	rc->last_psn = psn;
	tp_burst_send_one(qp, &packet);
	tp_target_refuse_locked(qp, reply);
}

void tp_rc_answer(struct tp_qp *qp)
{
	struct tp_rc *rc = tp_rc_of(qp);
	rc->answer_ns = 0;
	if (rc->answers_count) {
		struct tp_burst *burst = tp_burst_start(qp->port, rc->endpoint, rc->sender, &rc->route, &rc->out);
		int budget = ANSWER_PACKETS;
		bool full = burst == NULL;
		while (rc->answers_count && budget > 0 && !full) {
			struct tp_answer *answer = answer_at(rc, 0);
			if (answer->atomic) {
				struct tp_packet packet = answer_packet(qp, TP_OP_ATOMIC_ACK, answer->psn, ack_syndrome(qp), answer->msn);
				packet.original = answer->value;
				full = tp_burst_packet(burst, &packet) == NULL;
				if (full)
					break;
				tp_burst_commit(burst, &packet);
				budget--;
			} else {
				enum tp_reply reply = send_read(qp, burst, answer, &budget, &full);
				if (reply != TP_REPLY_ACK) {
					uint32_t psn = tp_psn_add(answer->psn, answer->next);
					tp_burst_flush(burst);
					refuse(qp, psn, reply);
					return;
				}
				if (answer->next < answer->packets)
					break;
			}
			rc->answers_first = (rc->answers_first + 1) % TP_RC_ANSWERS;
			rc->answers_count--;
		}
		/* What the kernel had no room for is lost like any packet: the other side asks again. */
		if (burst)
			tp_burst_flush(burst);
		rc->answer_ns = rc->answers_count ? tp_clock_ns() + AGAIN_NS : 0;
		if (rc->answers_count) {
			tp_rc_arm(qp);
			return;
		}
	}
	send_verdict(qp);
}

void tp_rc_answer_all(struct tp_qp *qp)
{
	struct tp_rc *rc = tp_rc_of(qp);
	for (int i = 0; i < ANSWERS_AT_END && (rc->answers_count || rc->ack_due || rc->nak); i++)
		tp_rc_answer(qp);
}

void tp_rc_notify(struct tp_qp *qp)
{
	struct tp_rc *rc = tp_rc_of(qp);
	static const uint8_t reserved[16];
	uint64_t now = tp_clock_ns();
	tp_counter_add(qp->port, TP_CNT_NP_ECN_MARKED, 1);
	if (now - rc->cnp_sent_ns < CNP_NS)
		return;
	rc->cnp_sent_ns = now;
	struct tp_packet packet = { .opcode = TP_WIRE_CNP_OPCODE, .pkey = TP_CARD_PKEY, .qpn = qp->attr.dest_qp_num, .becn = true,
		.payload = reserved, .bytes = sizeof(reserved) };
	tp_burst_send_one(qp, &packet);
	tp_counter_add(qp->port, TP_CNT_NP_CNP_SENT, 1);
}

/* ---- requests ---- */

/* Which operation a packet is part of, and where in it. */
struct place { enum tp_rc_message message; bool first, last, imm, invalidate; };

static struct place place_of(uint8_t operation)
{
	switch (operation) {
	case TP_OP_SEND_FIRST: return (struct place){ TP_RC_SEND, .first = true };
	case TP_OP_SEND_MIDDLE: return (struct place){ TP_RC_SEND, .first = false };
	case TP_OP_SEND_LAST: return (struct place){ TP_RC_SEND, .last = true };
	case TP_OP_SEND_LAST_IMM: return (struct place){ TP_RC_SEND, .last = true, .imm = true };
	case TP_OP_SEND_LAST_INV: return (struct place){ TP_RC_SEND, .last = true, .invalidate = true };
	case TP_OP_SEND_ONLY: return (struct place){ TP_RC_SEND, .first = true, .last = true };
	case TP_OP_SEND_ONLY_IMM: return (struct place){ TP_RC_SEND, .first = true, .last = true, .imm = true };
	case TP_OP_SEND_ONLY_INV: return (struct place){ TP_RC_SEND, .first = true, .last = true, .invalidate = true };
	case TP_OP_WRITE_FIRST: return (struct place){ TP_RC_WRITE, .first = true };
	case TP_OP_WRITE_MIDDLE: return (struct place){ TP_RC_WRITE, .first = false };
	case TP_OP_WRITE_LAST: return (struct place){ TP_RC_WRITE, .last = true };
	case TP_OP_WRITE_LAST_IMM: return (struct place){ TP_RC_WRITE, .last = true, .imm = true };
	case TP_OP_WRITE_ONLY: return (struct place){ TP_RC_WRITE, .first = true, .last = true };
	case TP_OP_WRITE_ONLY_IMM: return (struct place){ TP_RC_WRITE, .first = true, .last = true, .imm = true };
	default: return (struct place){ TP_RC_NONE, .first = true };
	}
}

static enum tp_reply place_send(struct tp_qp *qp, const struct tp_packet *packet, const struct place *place)
{
	struct tp_rc *rc = tp_rc_of(qp);
	if (place->first) {
		enum tp_reply reply = tp_target_begin_locked(qp, packet->srqn);
		if (reply != TP_REPLY_ACK)
			return reply;
		rc->offset = 0;
	}
	enum tp_reply reply = packet->bytes ? tp_target_place_locked(qp, rc->offset, packet->payload, packet->bytes) : TP_REPLY_ACK;
	if (reply != TP_REPLY_ACK)
		return reply;
	rc->offset += packet->bytes;
	if (!place->last)
		return TP_REPLY_ACK;
	if (place->invalidate && tp_mw_invalidate_remote(qp, packet->rkey))
		return TP_REPLY_REMOTE_ACCESS;
	struct tp_arrival arrival = { .opcode = IBV_WC_RECV, .byte_len = rc->offset, .src_qp = qp->attr.dest_qp_num, .solicited = packet->solicited };
	if (place->imm) {
		arrival.imm = packet->imm;
		arrival.wc_flags = IBV_WC_WITH_IMM;
	} else if (place->invalidate) {
		arrival.imm = packet->rkey;
		arrival.wc_flags = IBV_WC_WITH_INV;
	}
	return tp_target_finish_locked(qp, &arrival);
}

/* One packet's bytes into the region; at the first packet the rights to all of the message are checked. */
static enum tp_reply write_bytes(struct tp_qp *qp, const struct tp_packet *packet, const struct place *place)
{
	struct tp_rc *rc = tp_rc_of(qp);
	struct tp_grip grip;
	uint64_t addr = rc->addr + rc->offset;
	uint64_t checked = place->first ? rc->length : packet->bytes;
	if (checked == 0 && !place->first)
		return TP_REPLY_ACK;
	enum tp_reply reply = tp_target_write_enter_locked(qp, rc->srqn, rc->rkey, addr, checked, &grip);
	if (reply != TP_REPLY_ACK || checked == 0)
		return reply;
	if (packet->bytes && !tp_scatter_keep(qp, addr, packet->payload, packet->bytes, place->first) &&
		tp_grip_write(&grip, 0, packet->payload, packet->bytes))
		reply = TP_REPLY_REMOTE_ACCESS;
	tp_key_leave(&grip);
	return place->last && reply == TP_REPLY_ACK ? tp_scatter_place(qp, rc->srqn, rc->rkey) : reply;
}

static enum tp_reply place_write(struct tp_qp *qp, const struct tp_packet *packet, const struct place *place)
{
	struct tp_rc *rc = tp_rc_of(qp);
	if (place->first) {
		rc->addr = packet->addr;
		rc->rkey = packet->rkey;
		rc->length = packet->length;
		rc->srqn = packet->srqn;
		rc->offset = 0;
	}
	if (packet->bytes > rc->length - rc->offset || (place->last && packet->bytes != rc->length - rc->offset))
		return TP_REPLY_INVALID_REQUEST;
	if (place->imm) {
		/* Before the data: where no receive is posted the packet comes again. */
		enum tp_reply reply = tp_target_begin_locked(qp, packet->srqn);
		if (reply != TP_REPLY_ACK)
			return reply;
	}
	enum tp_reply reply = write_bytes(qp, packet, place);
	if (reply != TP_REPLY_ACK)
		return reply;
	rc->offset += packet->bytes;
	if (!place->imm)
		return TP_REPLY_ACK;
	struct tp_arrival arrival = { .opcode = IBV_WC_RECV_RDMA_WITH_IMM, .byte_len = rc->length, .imm = packet->imm, .wc_flags = IBV_WC_WITH_IMM,
		.src_qp = qp->attr.dest_qp_num, .solicited = packet->solicited };
	return tp_target_finish_locked(qp, &arrival);
}

/* SEND and WRITE; also UC's. A packet that doesn't follow from the one before is an invalid request. */
static enum tp_reply place_data(struct tp_qp *qp, const struct tp_packet *packet, const struct place *place)
{
	struct tp_rc *rc = tp_rc_of(qp);
	if (place->first != (rc->message == TP_RC_NONE) || (!place->first && rc->message != place->message))
		return TP_REPLY_INVALID_REQUEST;
	if (packet->bytes > rc->mtu || (!place->last && packet->bytes != rc->mtu))
		return TP_REPLY_INVALID_REQUEST;
	enum tp_reply reply = place->message == TP_RC_SEND ? place_send(qp, packet, place) : place_write(qp, packet, place);
	if (reply == TP_REPLY_ACK)
		rc->message = place->last ? TP_RC_NONE : place->message;
	return reply;
}

static uint32_t read_packets(const struct tp_rc *rc, uint32_t length) { return length ? (length + rc->mtu - 1) / rc->mtu : 1; }

static enum tp_reply serve_read(struct tp_qp *qp, const struct tp_packet *packet, uint32_t msn, bool again)
{
	struct tp_rc *rc = tp_rc_of(qp);
	struct tp_grip grip = { 0 };
	rc->srqn = packet->srqn;
	if (packet->length > TP_CARD_MSG_BYTES)
		return TP_REPLY_INVALID_REQUEST;
	enum tp_reply reply = tp_target_read_enter_locked(qp, packet->srqn, packet->rkey, packet->addr, packet->length, &grip);
	if (reply != TP_REPLY_ACK)
		return reply;
	if (packet->length)
		tp_key_leave(&grip);
	struct tp_answer answer = { .again = again, .psn = packet->psn, .msn = msn, .packets = read_packets(rc, packet->length), .addr = packet->addr,
		.rkey = packet->rkey, .length = packet->length };
	return push_answer(rc, &answer) ? TP_REPLY_ACK : TP_REPLY_SILENT;
}

static enum tp_reply serve_atomic(struct tp_qp *qp, const struct tp_packet *packet, uint32_t msn)
{
	struct tp_rc *rc = tp_rc_of(qp);
	bool swap = tp_wire_operation(packet->opcode) == TP_OP_COMPARE_SWAP;
	struct tp_atomic atomic = { .opcode = swap ? IBV_WR_ATOMIC_CMP_AND_SWP : IBV_WR_ATOMIC_FETCH_AND_ADD, .rkey = packet->rkey,
		.addr = packet->addr, .compare_add = swap ? packet->compare : packet->swap_add, .swap = packet->swap_add };
	if (rc->answers_count == TP_RC_ANSWERS)
		return TP_REPLY_SILENT;
	struct tp_answer answer = { .atomic = true, .psn = packet->psn, .msn = msn };
	enum tp_reply reply = tp_target_atomic_locked(qp, packet->srqn, &atomic, &answer.value);
	if (reply != TP_REPLY_ACK)
		return reply;
	push_answer(rc, &answer);
	rc->atomics[rc->atomics_next++ % TP_CARD_RD_ATOMIC] = (struct tp_atomic_done){ .psn = packet->psn, .value = answer.value, .valid = true };
	return TP_REPLY_ACK;
}

/* A request that was served before: its answer was lost, or is on its way. */
static void serve_again(struct tp_qp *qp, const struct tp_packet *packet)
{
	struct tp_rc *rc = tp_rc_of(qp);
	uint8_t operation = tp_wire_operation(packet->opcode);
	tp_counter_add(qp->port, TP_CNT_DUPLICATE_REQUEST, 1);
	if (operation == TP_OP_READ_REQUEST) {
		/* What still waits to be sent needs no second answer. */
		for (uint32_t i = 0; i < rc->answers_count; i++) {
			struct tp_answer *answer = answer_at(rc, i);
			if (!answer->atomic && tp_psn_diff(packet->psn, tp_psn_add(answer->psn, answer->next)) >= 0 &&
				tp_psn_diff(packet->psn, tp_psn_add(answer->psn, answer->packets)) < 0)
				return;
		}
		enum tp_reply reply = serve_read(qp, packet, rc->msn, true);
		uint32_t end = tp_psn_add(packet->psn, read_packets(rc, packet->length));
		if (reply == TP_REPLY_ACK && tp_psn_diff(end, qp->recv_psn) > 0)
			qp->recv_psn = end;
		else if (reply != TP_REPLY_ACK && reply != TP_REPLY_SILENT)
			refuse(qp, packet->psn, reply);
	} else if (operation == TP_OP_COMPARE_SWAP || operation == TP_OP_FETCH_ADD) {
		for (uint32_t i = 0; i < TP_CARD_RD_ATOMIC; i++)
			if (rc->atomics[i].valid && rc->atomics[i].psn == packet->psn) {
				struct tp_answer answer = { .atomic = true, .psn = packet->psn, .msn = rc->msn, .value = rc->atomics[i].value };
				push_answer(rc, &answer);
				return;
			}
	} else {
		rc->ack_due = true;
	}
}

/* In order. Moves recv_psn on where it was accepted. */
static void serve(struct tp_qp *qp, const struct tp_packet *packet)
{
	struct tp_rc *rc = tp_rc_of(qp);
	uint8_t operation = tp_wire_operation(packet->opcode);
	struct place place = place_of(operation);
	bool fetch = operation == TP_OP_READ_REQUEST || operation == TP_OP_COMPARE_SWAP || operation == TP_OP_FETCH_ADD;
	bool ends = fetch || place.last;
	uint32_t packets = operation == TP_OP_READ_REQUEST ? read_packets(rc, packet->length) : 1;
	uint32_t msn = (rc->msn + (ends ? 1 : 0)) & TP_WIRE_PSN_MASK;
	enum tp_reply reply;
	rc->refused = rc->refused_gap = false;
	if (fetch && rc->message != TP_RC_NONE)
		reply = TP_REPLY_INVALID_REQUEST;
	else if (operation == TP_OP_READ_REQUEST)
		reply = serve_read(qp, packet, msn, false);
	else if (fetch)
		reply = serve_atomic(qp, packet, msn);
	else
		reply = place_data(qp, packet, &place);
	switch (reply) {
	case TP_REPLY_ACK:
		qp->recv_psn = tp_psn_add(qp->recv_psn, packets);
		rc->msn = msn;
		if (packet->ack_request && !fetch)
			rc->ack_due = true;
		break;
	case TP_REPLY_SILENT:
		break;
	case TP_REPLY_RNR:
		/* What follows is out of order until this one comes again, and isn't worth a NAK. */
		rc->nak = (uint8_t)(TP_SYN_RNR | (qp->attr.min_rnr_timer & TP_SYN_VALUE));
		rc->ack_due = false;
		rc->refused = true;
		break;
	default:
		tp_rc_answer(qp);
		refuse(qp, packet->psn, reply);
		break;
	}
}

static void tell_gap(struct tp_rc *rc)
{
	rc->nak = nak_of(TP_REPLY_SEQUENCE);
	rc->ack_due = false;
	rc->refused = rc->refused_gap = true;
	rc->gap_packets = 0;
}

/* A packet whose turn it is, and those kept that follow. */
static void serve_in_turn(struct tp_qp *qp, const struct tp_packet *packet)
{
	struct tp_rc *rc = tp_rc_of(qp);
	uint32_t before;
	do {
		before = qp->recv_psn;
		serve(qp, packet);
		if (qp->carrier != &tp_wire || !tp_target_receives(qp))
			return;
		tp_early_pass(rc->early, before, qp->recv_psn);
		packet = tp_early_at(rc->early, qp->recv_psn);
	} while (packet && before != qp->recv_psn);
	if (before != qp->recv_psn && tp_early_any(rc->early))
		tell_gap(rc);
}

/* Too early. The gap is told once, and again where the other side began again and the packet that is missing is missing once
 * more, or where it may have sent it again for long and that was lost. */
static void serve_early(struct tp_qp *qp, const struct tp_packet *packet)
{
	struct tp_rc *rc = tp_rc_of(qp);
	bool again = rc->refused_gap && (tp_psn_diff(packet->psn, rc->gap_psn) <= 0 || ++rc->gap_packets >= GAP_EVERY);
	/* What follows a request that found no receive comes again with it. */
	if (!rc->refused || rc->refused_gap)
		tp_early_keep(&rc->early, packet, qp->recv_psn);
	if (!rc->refused || again) {
		tp_counter_add(qp->port, TP_CNT_OUT_OF_SEQUENCE, 1);
		tell_gap(rc);
	}
	rc->gap_psn = packet->psn;
}

void tp_rc_request(struct tp_qp *qp, const struct tp_packet *packet)
{
	struct tp_rc *rc = tp_rc_of(qp);
	if (!tp_target_receives(qp)) {
		/* The NAK was lost: without it the other side would take us for gone. */
		if (rc->last_word && packet->psn == rc->last_psn) {
			struct tp_packet again = answer_packet(qp, TP_OP_ACK, rc->last_psn, rc->last_word, rc->msn);
			tp_burst_send_one(qp, &again);
		} else if (place_of(tp_wire_operation(packet->opcode)).message != TP_RC_NONE && tp_psn_diff(packet->psn, qp->recv_psn) < 0) {
			/* Nor must what was taken in before the error be taken for lost. */
			rc->ack_due = true;
		}
		return;
	}
	tp_target_established_locked(qp);
	int32_t distance = tp_psn_diff(packet->psn, qp->recv_psn);
	if (distance == 0)
		serve_in_turn(qp, packet);
	else if (distance < 0)
		serve_again(qp, packet);
	else
		serve_early(qp, packet);
	/* A NAK at once, an acknowledgement while a long batch is being served: the other side waits for them. */
	if (qp->carrier == &tp_wire && (rc->nak || (rc->ack_due && ++rc->unanswered >= ANSWER_EVERY)))
		tp_rc_answer(qp);
}

/* ---- UC: the same without answers; a gap drops the message it strikes ---- */

void tp_uc_request(struct tp_qp *qp, const struct tp_packet *packet)
{
	struct tp_rc *rc = tp_rc_of(qp);
	struct place place = place_of(tp_wire_operation(packet->opcode));
	if (!tp_target_receives(qp))
		return;
	tp_target_established_locked(qp);
	if (packet->ack_request) {
		struct tp_packet credit = answer_packet(qp, TP_OP_ACK, packet->psn, TP_SYN_ACK | TP_WIRE_CREDITS_INVALID, rc->msn);
		tp_burst_send_one(qp, &credit);
	}
	bool gap = packet->psn != qp->recv_psn;
	qp->recv_psn = tp_psn_add(packet->psn, 1);
	if (gap)
		tp_counter_add(qp->port, TP_CNT_OUT_OF_SEQUENCE, 1);
	if (place.first)
		rc->message = TP_RC_NONE;
	else if (gap || rc->message == TP_RC_NONE || rc->message == TP_RC_SKIP)
		rc->message = TP_RC_SKIP;
	if (rc->message == TP_RC_SKIP)
		return;
	if (place_data(qp, packet, &place) != TP_REPLY_ACK)
		rc->message = TP_RC_SKIP;
}

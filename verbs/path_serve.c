/* The target's side: a request that came by the ring is checked and done by the functions that all carriers use. Data that are
 * not in the ring are copied once, between the initiator's memory and where they belong; where that can't be done in one go
 * (pages that are missing, memory that is no memory) by way of a buffer, which shows whose fault it is. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "verbs/capture.h"
#include "verbs/internal.h"
#include "verbs/path.h"
#include "verbs/scatter.h"

struct visit {
	struct tp_path_link *link;
	struct tp_path *path;           /* of the target */
	const struct tp_path_request *request;
	const uint8_t *data;            /* in the ring */
	bool local_fault;               /* the initiator's memory */
	bool late;                      /* the initiator has given the request up */
	uint64_t value;
	uint64_t late_ns;               /* by a fault */
	uint8_t *buffer;                /* a READ's data, for the capture */
};

/* ---- the initiator's memory ---- */

/* Goes in: false where the initiator no longer wants it. */
static bool go_in(struct visit *visit)
{
	struct tp_path *path = visit->path;
	atomic_store_explicit(&path->own->serving, visit->request->epoch, memory_order_seq_cst);
	visit->late = atomic_load_explicit(&path->peer->open, memory_order_seq_cst) != visit->request->epoch;
	if (visit->late)
		atomic_store_explicit(&path->own->serving, 0, memory_order_release);
	return !visit->late;
}

static void go_out(struct visit *visit) { atomic_store_explicit(&visit->path->own->serving, 0, memory_order_release); }

static int remote_vectors(const struct visit *visit, struct iovec *out)
{
	const struct tp_path_span *spans = (const struct tp_path_span *)(const void *)visit->data;
	for (int i = 0; i < visit->request->spans; i++)
		out[i] = (struct iovec){ (void *)(uintptr_t)spans[i].addr, spans[i].bytes };
	return visit->request->spans;
}

/* Between memory here and the initiator's spans; 0 or an errno. */
static int exchange(struct visit *visit, bool write, const struct iovec *local, int locals)
{
	struct iovec remote[TP_CARD_SGE];
	int remotes = remote_vectors(visit, remote);
	if (!go_in(visit))
		return ECANCELED;
	int error = tp_path_copy(visit->link->pid, write, local, locals, remote, remotes);
	go_out(visit);
	return error;
}

/* All of the request's data in a buffer of their own; NULL: the initiator's memory is missing (or ours has run out). */
static uint8_t *fetch(struct visit *visit)
{
	uint8_t *buffer = malloc(visit->request->length);
	struct iovec local = { buffer, visit->request->length };
	if (buffer && exchange(visit, false, &local, 1) == 0)
		return buffer;
	free(buffer);
	visit->local_fault = true;
	return NULL;
}

/* ---- SEND ---- */

static int vectors_of(const struct tp_span *spans, int count, uint64_t bytes, struct iovec *out)
{
	int used = 0;
	for (int i = 0; i < count && bytes; i++) {
		size_t part = (size_t)TP_MIN((uint64_t)spans[i].bytes, bytes);
		if (spans[i].grip.flags & (TP_KEY_NULL | TP_KEY_APART))
			return -1;
		out[used++] = (struct iovec){ spans[i].grip.addr, part };
		bytes -= part;
	}
	return bytes ? -1 : used;
}

/* Straight into the receive's memory; false: it must be done carefully. */
static bool place_straight(struct tp_qp *qp, struct visit *visit)
{
	struct tp_span spans[TP_CARD_SGE];
	struct iovec local[TP_CARD_SGE];
	const struct tp_recv *recv = &qp->recv;
	if (visit->request->length > recv->length)
		return false;
	int count = tp_sge_enter(recv->pd, recv->sge, recv->num_sge, IBV_ACCESS_LOCAL_WRITE, spans);
	if (count < 0)
		return false;
	int locals = vectors_of(spans, count, visit->request->length, local);
	bool done = locals > 0 && exchange(visit, false, local, locals) == 0;
	tp_span_leave(spans, count);
	return done;
}

static enum tp_reply place(struct tp_qp *qp, struct visit *visit)
{
	const struct tp_path_request *request = visit->request;
	if (request->form == TP_PATH_NO_DATA)
		return TP_REPLY_ACK;
	if (request->form == TP_PATH_HERE)
		return tp_target_place_locked(qp, 0, visit->data, request->length);
	if (place_straight(qp, visit))
		return TP_REPLY_ACK;
	uint8_t *buffer = visit->late ? NULL : fetch(visit);
	enum tp_reply reply = buffer ? tp_target_place_locked(qp, 0, buffer, request->length) : TP_REPLY_REMOTE_OPERATION;
	free(buffer);
	return reply;
}

static enum tp_reply finish_message(struct tp_qp *qp, const struct tp_path_request *request, enum ibv_wc_opcode opcode)
{
	bool imm = request->opcode == IBV_WR_SEND_WITH_IMM || request->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
	bool inv = request->opcode == IBV_WR_SEND_WITH_INV;
	struct tp_arrival arrival = { .opcode = opcode, .byte_len = request->length, .imm = imm || inv ? request->imm : 0,
		.wc_flags = imm ? IBV_WC_WITH_IMM : inv ? IBV_WC_WITH_INV : 0, .src_qp = request->src_qpn,
		.solicited = request->flags & TP_PATH_SOLICITED };
	return tp_target_finish_locked(qp, &arrival);
}

static enum tp_reply do_send(struct tp_qp *qp, struct visit *visit)
{
	const struct tp_path_request *request = visit->request;
	enum tp_reply reply = tp_target_begin_locked(qp, request->srqn);
	if (reply == TP_REPLY_ACK)
		reply = place(qp, visit);
	if (reply == TP_REPLY_ACK && request->opcode == IBV_WR_SEND_WITH_INV && tp_mw_invalidate_remote(qp, request->imm))
		reply = TP_REPLY_REMOTE_ACCESS;
	return reply == TP_REPLY_ACK ? finish_message(qp, request, IBV_WC_RECV) : reply;
}

/* ---- RDMA and atomics ---- */

/* A fault: the message's packets land in some order, as by the wire. */
static int write_scattered(struct tp_qp *qp, const struct tp_grip *grip, const struct tp_path_request *request, const uint8_t *data)
{
	uint32_t mtu = tp_mtu_bytes(qp->attr.path_mtu);
	int error = 0;
	for (uint32_t at = 0; at < request->length && !error; at += mtu) {
		uint32_t bytes = TP_MIN(mtu, request->length - at);
		if (!tp_scatter_keep(qp, request->addr + at, data + at, bytes, at == 0))
			error = tp_grip_write(grip, at, data + at, bytes);
	}
	return tp_scatter_place(qp, request->srqn, request->rkey) == TP_REPLY_ACK ? error : EFAULT;
}

static int write_carefully(struct tp_qp *qp, const struct tp_grip *grip, struct visit *visit)
{
	const struct tp_path_request *request = visit->request;
	uint8_t *buffer = visit->late || request->form == TP_PATH_HERE ? NULL : fetch(visit);
	const uint8_t *data = request->form == TP_PATH_HERE ? visit->data : buffer;
	int error = EFAULT;
	if (data)
		error = tp_fault_on(TP_FAULT_SCATTER) ? write_scattered(qp, grip, request, data) : tp_grip_write(grip, 0, data, request->length);
	free(buffer);
	return error;
}

static int write_into(struct tp_qp *qp, const struct tp_grip *grip, struct visit *visit)
{
	const struct tp_path_request *request = visit->request;
	if (tp_fault_on(TP_FAULT_SCATTER))
		return write_carefully(qp, grip, visit);
	if (request->form == TP_PATH_HERE)
		return tp_grip_write(grip, 0, visit->data, request->length);
	struct iovec local = { grip->addr, request->length };
	if (!(grip->flags & (TP_KEY_NULL | TP_KEY_APART)) && exchange(visit, false, &local, 1) == 0)
		return 0;
	return write_carefully(qp, grip, visit);
}

static enum tp_reply do_write(struct tp_qp *qp, struct visit *visit)
{
	const struct tp_path_request *request = visit->request;
	bool imm = request->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
	struct tp_grip grip = { 0 };
	enum tp_reply reply = imm ? tp_target_begin_locked(qp, request->srqn) : TP_REPLY_ACK;
	if (reply == TP_REPLY_ACK)
		reply = tp_target_write_enter_locked(qp, request->srqn, request->rkey, request->addr, request->length, &grip);
	if (reply != TP_REPLY_ACK)
		return reply;
	if (request->length && !(request->flags & TP_PATH_PLACED) && write_into(qp, &grip, visit))
		reply = TP_REPLY_REMOTE_ACCESS;
	tp_key_leave(&grip);
	return reply == TP_REPLY_ACK && imm ? finish_message(qp, request, IBV_WC_RECV_RDMA_WITH_IMM) : reply;
}

static int read_out(const struct tp_grip *grip, struct visit *visit)
{
	const struct tp_path_request *request = visit->request;
	struct iovec local = { grip->addr, request->length };
	if (!(grip->flags & (TP_KEY_NULL | TP_KEY_APART)) && !tp_capture_on() && exchange(visit, true, &local, 1) == 0)
		return 0;
	uint8_t *buffer = visit->late ? NULL : malloc(request->length);
	int error = buffer ? tp_grip_read(grip, 0, buffer, request->length) : EFAULT;
	local.iov_base = buffer;
	if (!error && exchange(visit, true, &local, 1) != 0) {
		visit->local_fault = true;
		error = EFAULT;
	}
	visit->buffer = buffer;
	return error;
}

static enum tp_reply do_read(struct tp_qp *qp, struct visit *visit)
{
	const struct tp_path_request *request = visit->request;
	struct tp_grip grip = { 0 };
	enum tp_reply reply = tp_target_read_enter_locked(qp, request->srqn, request->rkey, request->addr, request->length, &grip);
	if (reply != TP_REPLY_ACK)
		return reply;
	if (request->length && read_out(&grip, visit))
		reply = TP_REPLY_REMOTE_ACCESS;
	tp_key_leave(&grip);
	return reply;
}

static enum tp_reply do_atomic(struct tp_qp *qp, struct visit *visit)
{
	const struct tp_path_request *request = visit->request;
	const struct tp_path_operands *operands = (const struct tp_path_operands *)(const void *)visit->data;
	struct tp_atomic atomic = { .opcode = request->opcode, .rkey = request->rkey, .addr = request->addr, .compare_add = operands->compare_add,
		.swap = operands->swap };
	return tp_target_atomic_locked(qp, request->srqn, &atomic, &visit->value);
}

/* ---- */

static bool types_match(uint8_t from, enum ibv_qp_type to)
{
	return from == IBV_QPT_XRC_SEND ? to == IBV_QPT_XRC_RECV : from == to;
}

static enum tp_reply execute_locked(struct tp_qp *qp, struct visit *visit)
{
	const struct tp_path_request *request = visit->request;
	bool reliable = tp_qp_reliable(qp->ibv.qp_type);
	uint32_t packets = tp_packets(request->length, (enum ibv_mtu)request->mtu);
	if (!types_match(request->type, qp->ibv.qp_type) || !tp_target_receives(qp) || qp->attr.dest_qp_num != request->src_qpn ||
		(request->mtu < IBV_MTU_256 || request->mtu > IBV_MTU_4096))
		return TP_REPLY_SILENT;
	/* What the initiator did alone has moved it on. */
	qp->recv_psn = atomic_load_explicit(&visit->path->own->recv_psn, memory_order_acquire);
	if (reliable && qp->recv_psn != request->psn)
		return TP_REPLY_SILENT;
	if (request->mtu != qp->attr.path_mtu && (packets > 1 || request->length > tp_mtu_bytes(qp->attr.path_mtu)))
		return TP_REPLY_INVALID_REQUEST;
	if (!qp->established) {
		tp_target_established_locked(qp);
		tp_path_show_door(visit->path);
	}
	switch (request->opcode) {
	case IBV_WR_RDMA_WRITE: case IBV_WR_RDMA_WRITE_WITH_IMM: return do_write(qp, visit);
	case IBV_WR_RDMA_READ: return do_read(qp, visit);
	case IBV_WR_ATOMIC_CMP_AND_SWP: case IBV_WR_ATOMIC_FETCH_AND_ADD: return do_atomic(qp, visit);
	default: return do_send(qp, visit);
	}
}

/* The fault that strikes the request, if one does. */
static bool is_struck(struct tp_qp *qp, struct visit *visit)
{
	if (visit->request->flags & TP_PATH_FATED)
		return false;
	struct tp_path_fate fate = tp_path_fate(qp, false, visit->request);
	bool reliable = tp_qp_reliable(qp->ibv.qp_type);
	visit->late_ns = reliable && !fate.never ? fate.delay_ns : 0;
	return reliable ? fate.never || fate.delay_ns : fate.lost;
}

/* The request as packets that come in. Data that are elsewhere are fetched first: from then on they are here. */
static bool trace_in(struct tp_qp *qp, struct visit *visit, struct tp_path_request *copy)
{
	bool atomic = copy->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || copy->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
	if (copy->form == TP_PATH_THERE && copy->opcode != IBV_WR_RDMA_READ) {
		visit->buffer = fetch(visit);
		if (!visit->buffer)
			return false;
		visit->data = visit->buffer;
		copy->form = TP_PATH_HERE;
		visit->request = copy;
	}
	struct tp_span span = { .grip = { .addr = (uint8_t *)(uintptr_t)visit->data }, .bytes = copy->length };
	tp_path_trace_request(qp, false, copy, atomic ? (const struct tp_path_operands *)(const void *)visit->data : NULL, &span,
		copy->form == TP_PATH_HERE ? 1 : 0);
	return true;
}

static void trace_out(struct tp_qp *qp, const struct visit *visit, enum tp_reply reply)
{
	struct tp_path_outcome outcome = { .opcode = visit->request->opcode, .length = visit->request->length, .psn = visit->request->psn,
		.msn = visit->path->served, .reply = (uint8_t)reply, .rnr_timer = qp->attr.min_rnr_timer, .value = visit->value };
	struct tp_span span = { .grip = { .addr = visit->buffer }, .bytes = visit->request->length };
	if (!visit->local_fault && !visit->late)
		tp_path_trace_answer(qp, true, &outcome, &span, visit->buffer ? 1 : 0);
}

static enum tp_reply serve_locked(struct tp_qp *qp, struct visit *visit)
{
	const struct tp_path_request *request = visit->request;
	struct tp_path_request copy;
	if (qp->carrier != &tp_path || tp_path_of(qp)->link != visit->link)
		return TP_REPLY_SILENT;
	visit->path = tp_path_of(qp);
	if (atomic_load_explicit(&visit->path->peer->ends, memory_order_relaxed) != visit->path->ends)
		return TP_REPLY_SILENT;
	if (is_struck(qp, visit))
		return TP_REPLY_SILENT;
	bool traced = tp_capture_on() && tp_target_receives(qp);
	copy = *request;
	if (traced && !trace_in(qp, visit, &copy))
		return TP_REPLY_REMOTE_OPERATION;
	enum tp_reply reply = execute_locked(qp, visit);
	if (reply == TP_REPLY_ACK)
		visit->path->served = (visit->path->served + 1) & 0xffffff;
	if (traced)
		trace_out(qp, visit, reply);
	if (reply == TP_REPLY_ACK) {
		uint32_t packets = tp_packets(request->length, (enum ibv_mtu)request->mtu);
		qp->recv_psn = (request->psn + packets) & 0xffffff;
		atomic_store_explicit(&visit->path->own->recv_psn, qp->recv_psn, memory_order_release);
		tp_counter_add(qp->port, TP_CNT_PORT_RCV_PACKETS, packets);
		tp_counter_add(qp->port, TP_CNT_UNICAST_RCV, packets);
		tp_counter_add(qp->port, TP_CNT_PORT_RCV_DATA, request->length / 4);
	} else if (reply >= TP_REPLY_INVALID_REQUEST && reply <= TP_REPLY_REMOTE_OPERATION && !visit->local_fault && !visit->late) {
		tp_target_refuse_locked(qp, reply);
	}
	return reply;
}

void tp_path_serve(struct tp_path_link *link, const struct tp_path_request *request, const uint8_t *data, struct tp_path_answer *answer)
{
	struct visit visit = { .link = link, .request = request, .data = data };
	struct tp_qp *qp = tp_qp_get(request->dest_qpn);
	enum tp_reply reply = TP_REPLY_SILENT;
	tp_path_be_slow();
	if (qp) {
		pthread_mutex_lock(&qp->lock);
		reply = serve_locked(qp, &visit);
		answer->rnr_timer = qp->attr.min_rnr_timer;
		pthread_mutex_unlock(&qp->lock);
		tp_qp_put(qp);
	}
	free(visit.buffer);
	answer->reply = visit.late_ns ? TP_PATH_REPLY_LATER : visit.local_fault ? TP_PATH_REPLY_LOCAL : visit.late ? TP_REPLY_SEQUENCE : (uint8_t)reply;
	answer->value = visit.late_ns ? visit.late_ns : visit.value;
	answer->single = request->opcode == IBV_WR_RDMA_READ || request->opcode == IBV_WR_ATOMIC_CMP_AND_SWP ||
		request->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

/* Datagrams out: the carrier of UD QPs. Each goes straight to a QP of this process, by the short way to another process of this
 * machine, or by the wire; a multicast goes to this process's members and by the wire, where the kernel copies it to all others. */
#include <errno.h>
#include <stdlib.h>
#include "verbs/internal.h"
#include "verbs/ud.h"

bool (*tp_engine_wire_datagram)(struct tp_qp *qp, const struct tp_wqe *wqe, const struct tp_span *spans, int count, uint32_t psn,
	uint64_t *until_ns);
void (*tp_engine_wire_flush)(void);
int (*tp_engine_wire_listen)(struct tp_port *port);

/* ---- attachment ---- */

static void fire(struct tp_qp *qp)
{
	pthread_mutex_lock(&qp->lock);
	if (qp->carrier == &tp_datagrams && !qp->stopped) {
		tp_qp_run_locked(qp);
		tp_qp_settle_locked(qp);
		/* Called too early: a later time replaced an earlier one. */
		if (qp->carrier == &tp_datagrams && !qp->stopped && !qp->running)
			tp_timer_arm(tp_ud_of(qp)->timer, tp_ud_of(qp)->wait_until_ns);
	}
	pthread_mutex_unlock(&qp->lock);
}

static int attach(struct tp_qp *qp)
{
	int error = tp_engine_wire_listen ? tp_engine_wire_listen(qp->port) : 0;
	if (error)
		return error;
	struct tp_ud *ud = tp_alloc(1, sizeof(*ud), "a UD queue pair's ways");
	if (ud)
		ud->timer = tp_timer_new(fire, qp);
	if (!ud || !ud->timer) {
		free(ud);
		return ENOMEM;
	}
	ud->waiter.qpn = qp->ibv.qp_num;
	qp->carrier_data = ud;
	return 0;
}

static void stop(struct tp_qp *qp)
{
	struct tp_ud *ud = tp_ud_of(qp);
	tp_path_stop_waiting(ud);
	ud->wait_until_ns = 0;
	tp_timer_arm(ud->timer, 0);
}

static void detach(struct tp_qp *qp)
{
	struct tp_ud *ud = tp_ud_of(qp);
	tp_timer_free(ud->timer);
	free(ud);
	qp->carrier_data = NULL;
}

/* ---- one datagram ---- */

static void count_sent(const struct tp_wqe *wqe, struct tp_port *port, bool multicast)
{
	tp_counter_add(port, TP_CNT_PORT_XMIT_PACKETS, 1);
	tp_counter_add(port, multicast ? TP_CNT_MULTICAST_XMIT : TP_CNT_UNICAST_XMIT, 1);
	tp_counter_add(port, TP_CNT_PORT_XMIT_DATA, wqe->length / 4);
}

/* To this process's QPs: all of a group, or the one. */
static void deliver_here(struct tp_qp *qp, const struct tp_wqe *wqe, const struct tp_span *spans, int count, struct tp_port *port, bool multicast)
{
	const struct tp_av *av = &wqe->ud.av;
	uint8_t grh[40];
	tp_engine_make_grh(av, tp_ud_wire_bytes(wqe), grh);
	bool has_imm = wqe->opcode == IBV_WR_SEND_WITH_IMM;
	struct tp_datagram datagram = { .grh = grh, .spans = spans, .nspans = count, .bytes = wqe->length, .src_qp = qp->ibv.qp_num,
		.qkey = tp_ud_qkey(qp, wqe), .imm = has_imm ? wqe->imm : 0, .has_imm = has_imm, .dest_qp = wqe->ud.qpn,
		.solicited = wqe->flags & IBV_SEND_SOLICITED, .sl = tp_engine_packet_kind(av) };
	if (multicast) {
		tp_target_multicast(port, &av->dgid, qp, &datagram);
		return;
	}
	struct tp_qp *target = tp_qp_get(wqe->ud.qpn);
	if (target) {
		tp_target_datagram(target, &datagram);
		tp_qp_put(target);
	}
}

/* false: it must wait. The lock isn't held. */
static bool deliver(struct tp_qp *qp, const struct tp_wqe *wqe, const struct tp_span *spans, int count)
{
	struct tp_port *port = tp_card_port(qp->ibv.context, wqe->ud.av.port);
	bool multicast = wqe->ud.av.dgid.raw[0] == 0xff;
	bool local = !multicast && !tp_engine_path_always && tp_engine_is_local(&wqe->ud.av, wqe->ud.qpn);
	enum tp_path_sent sent = local || multicast ? TP_PATH_ELSEWHERE : tp_path_send_datagram(qp, wqe, spans, count);
	if (sent == TP_PATH_WAITS)
		return false;
	struct tp_ud *ud = tp_ud_of(qp);
	if (!local && sent == TP_PATH_ELSEWHERE && tp_engine_wire_datagram) {
		if (!tp_engine_wire_datagram(qp, wqe, spans, count, ud->psn, &ud->wait_until_ns))
			return false;
		ud->psn = (ud->psn + 1) & 0xffffff;
	}
	if (local || multicast)
		deliver_here(qp, wqe, spans, count, port, multicast);
	count_sent(wqe, port, multicast);
	return true;
}

/* ---- the send queue ---- */

static void run(struct tp_qp *qp)
{
	struct tp_ud *ud = tp_ud_of(qp);
	tp_path_stop_waiting(ud);
	ud->wait_until_ns = 0;
	ud->psn = qp->send_psn;
	while (tp_qp_sends(qp) && qp->sq.exec != qp->sq.head) {
		struct tp_wqe *wqe = tp_sq_at(&qp->sq, qp->sq.exec);
		struct tp_span spans[TP_CARD_SGE];
		enum ibv_wc_status status = IBV_WC_SUCCESS;
		bool sent = true;
		int count = 0;
		if (wqe->length > tp_mtu_bytes(qp->port->mtu))
			status = IBV_WC_LOC_LEN_ERR;
		else if ((count = tp_wqe_enter(qp, wqe, 0, spans)) < 0)
			status = IBV_WC_LOC_PROT_ERR;
		if (status == IBV_WC_SUCCESS) {
			pthread_mutex_unlock(&qp->lock);
			sent = deliver(qp, wqe, spans, count);
			pthread_mutex_lock(&qp->lock);
			tp_span_leave(spans, count);
		}
		if (!sent)
			break;
		qp->sq.exec++;
		tp_sq_complete_locked(qp, status, 0);
	}
	qp->send_psn = ud->psn;
	if (tp_engine_wire_flush)
		tp_engine_wire_flush();
	if (ud->wait_until_ns)
		tp_timer_arm(ud->timer, ud->wait_until_ns);
}

const struct tp_carrier tp_datagrams = { .name = "datagrams", .attach = attach, .run = run, .stop = stop, .detach = detach };

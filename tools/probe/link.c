/* Queue pairs of a probe; see link.h. */
#include "probe/link.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define TIMEOUT 14                          /* 67 ms a try: a probe is to fail soon, where a job is to be patient */
#define RETRY 7
#define RNR_TIMER 12
#define RD_ATOMIC 16

int probe_link_create(const struct probe_port *port, int nqps, struct probe_link *out)
{
	const struct ibv_device_attr *attr = &port->ib->context->attr;
	struct probe_link link = { .port = port, .nqps = nqps, .depth = (uint32_t)TP_MIN(PROBE_DEPTH, TP_MAX(attr->max_qp_wr, 1)) };
	char hint[320];
	int entries = TP_MIN(2 * nqps * (int)link.depth, attr->max_cqe);
	errno = 0;
	link.cq = port->verbs->create_cq(port->ib->context->ibv, entries, NULL, NULL, 0);
	if (!link.cq) {
		int error = errno ? errno : ENOMEM;
		return probe_fail("%s: no completion queue of %d entries: %s%s", port->ib->text, entries, strerror(error), tp_ib_memlock_hint(error, hint, sizeof(hint)));
	}
	for (int q = 0; q < nqps; q++) {
		struct ibv_qp_init_attr init = { .send_cq = link.cq, .recv_cq = link.cq, .qp_type = IBV_QPT_RC,
			.cap = { .max_send_wr = link.depth, .max_recv_wr = link.depth, .max_send_sge = 1, .max_recv_sge = 1 } };
		errno = 0;
		link.qps[q] = port->verbs->create_qp(port->ib->context->pd, &init);
		if (link.qps[q]) continue;
		int error = errno ? errno : ENOMEM;
		probe_link_destroy(&link);
		return probe_fail("%s: queue pair %d of %d can't be made: %s%s", port->ib->text, q + 1, nqps, strerror(error),
			tp_ib_memlock_hint(error, hint, sizeof(hint)));
	}
	tp_secret_random(&link.psn, sizeof(link.psn));
	link.psn &= 0xffffff;
	*out = link;
	return 0;
}

void probe_link_destroy(struct probe_link *link)
{
	if (!link->port) return;
	for (int q = 0; q < link->nqps; q++)
		if (link->qps[q]) link->port->verbs->destroy_qp(link->qps[q]);
	if (link->cq) link->port->verbs->destroy_cq(link->cq);
	memset(link, 0, sizeof(*link));
}

int probe_link_to_init(struct probe_link *link)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .pkey_index = (uint16_t)link->port->params.pkey, .port_num = link->port->ib->number,
		.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };
	for (int q = 0; q < link->nqps; q++) {
		int error = link->port->verbs->modify_qp(link->qps[q], &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
		if (error)
			return probe_fail("%s: a queue pair can't be moved to INIT with partition key index %d (NCCL_IB_PKEY): %s; the port has %u", link->port->ib->text,
				link->port->params.pkey, strerror(error), link->port->ib->attr.pkey_tbl_len);
	}
	return 0;
}

void probe_link_describe(const struct probe_link *link, struct probe_hello *out)
{
	const struct probe_port *port = link->port;
	out->max_message = port->ib->attr.max_msg_sz;
	out->psn = link->psn;
	out->nqps = (uint32_t)link->nqps;
	for (int q = 0; q < link->nqps; q++) out->qpns[q] = link->qps[q]->qp_num;
	out->link_layer = port->ib->attr.link_layer;
	out->mtu = (uint8_t)port->ib->attr.active_mtu;
	out->gid_type = (uint8_t)port->gid.type;
	out->rd_atomic = (uint8_t)TP_MIN(RD_ATOMIC, TP_MAX(port->ib->context->attr.max_qp_rd_atom, 0));
	out->lid = port->ib->attr.lid;
	memcpy(out->gid, port->gid.raw, sizeof(out->gid));
	snprintf(out->host, sizeof(out->host), "%.63s", tp_host_name());
	snprintf(out->port, sizeof(out->port), "%s", port->ib->text);
}

int probe_link_learn(struct probe_link *link, const struct probe_hello *remote)
{
	char gid[48];
	if ((int)remote->nqps != link->nqps)
		return probe_fail("%s of %s has %u queue pairs, this side %d", remote->port, remote->host, remote->nqps, link->nqps);
	int status = probe_check_reach(link->port, remote);
	if (status) return status;
	link->remote = *remote;
	snprintf(link->remote_name, sizeof(link->remote_name), "%.63s (%.79s, GID %s, QP %u)", remote->host, remote->port,
		tp_ib_gid_format(remote->gid, gid), remote->qpns[0]);
	return 0;
}

static int cannot_connect(const struct probe_link *link, const char *state, int error)
{
	return probe_fail("%s, GID %d %s: a queue pair can't be moved to %s, towards %s: %s%s", link->port->ib->text, link->port->gid.index, link->port->gid.text, state,
		link->remote_name, strerror(error), error == ETIMEDOUT ? "; the kernel found no neighbour for that GID: is it of the same network (-g)?" : "");
}

int probe_link_to_rtr(struct probe_link *link)
{
	const struct probe_port *port = link->port;
	const struct probe_hello *remote = &link->remote;
	for (int q = 0; q < link->nqps; q++) {
		struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR, .path_mtu = (enum ibv_mtu)TP_MIN((int)port->ib->attr.active_mtu, (int)remote->mtu),
			.dest_qp_num = remote->qpns[q], .rq_psn = (remote->psn + (uint32_t)q) & 0xffffff, .min_rnr_timer = RNR_TIMER,
			.max_dest_rd_atomic = (uint8_t)TP_MIN(RD_ATOMIC, TP_MAX(port->ib->context->attr.max_qp_rd_atom, 0)) };
		attr.ah_attr = (struct ibv_ah_attr){ .port_num = port->ib->number, .dlid = remote->lid, .sl = (uint8_t)port->params.sl };
		/* Ethernet has no LIDs, and another InfiniBand subnet isn't reached by one. */
		if (port->ethernet || memcmp(port->gid.raw, remote->gid, 8) != 0) {
			attr.ah_attr.is_global = 1;
			memcpy(attr.ah_attr.grh.dgid.raw, remote->gid, 16);
			attr.ah_attr.grh.sgid_index = (uint8_t)port->gid.index;
			attr.ah_attr.grh.hop_limit = 64;
			attr.ah_attr.grh.traffic_class = (uint8_t)port->params.tc;
		}
		int error = port->verbs->modify_qp(link->qps[q], &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN
			| IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
		if (error) return cannot_connect(link, "RTR", error);
	}
	return 0;
}

int probe_link_to_rts(struct probe_link *link)
{
	int initiator = TP_MIN(RD_ATOMIC, TP_MAX(link->port->ib->context->attr.max_qp_init_rd_atom, 0));
	for (int q = 0; q < link->nqps; q++) {
		struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTS, .timeout = TIMEOUT, .retry_cnt = RETRY, .rnr_retry = 7,
			.sq_psn = (link->psn + (uint32_t)q) & 0xffffff, .max_rd_atomic = (uint8_t)TP_MIN(initiator, (int)link->remote.rd_atomic) };
		int error = link->port->verbs->modify_qp(link->qps[q], &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN
			| IBV_QP_MAX_QP_RD_ATOMIC);
		if (error) return cannot_connect(link, "RTS", error);
	}
	return 0;
}

int probe_link_failed(const struct probe_link *link, const struct ibv_wc *wc, const char *what)
{
	return probe_fail("%s of %s (GID %d %s, QP %u) to %s with an MTU of %d failed: %s(%d), vendor error %#x: %s", what, link->port->ib->text, link->port->gid.index,
		link->port->gid.text, wc->qp_num, link->remote_name, tp_verbs_mtu_bytes(TP_MIN((int)link->port->ib->attr.active_mtu, (int)link->remote.mtu)), tp_verbs_status_name((int)wc->status), (int)wc->status, wc->vendor_err, tp_verbs_status_advice((int)wc->status));
}

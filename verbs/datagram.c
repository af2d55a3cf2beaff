/* UD on the wire, and the IP groups behind multicast GIDs. A group's packets come to a socket of its own in every process that
 * is a member; what this process sent itself comes back there too and is left alone: its own QPs got it directly. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/fork.h"
#include "verbs/gsi.h"
#include "verbs/internal.h"
#include "verbs/rc.h"
#include "verbs/ud.h"

struct group { struct group *next; struct tp_port *port; union ibv_gid gid; struct tp_endpoint *endpoint; };

static struct group *groups;
static pthread_rwlock_t groups_lock = PTHREAD_RWLOCK_INITIALIZER;

/* ---- out ---- */

/* Datagrams of this thread to one address, on their way into the kernel together. */
struct batch {
	bool open;
	union tp_addr from;
	struct tp_route route;
	uint32_t sender;
	struct tp_endpoint *endpoint;
	struct tp_icrc icrc;
	struct tp_burst *burst;
	struct tp_flow *flow;           /* of the process that the last one went to; NULL: none yet */
	uint32_t slot;
};
static _Thread_local struct batch batch;

/* Its parent's memberships aren't a forked child's, nor may it keep them alive. */
static void fork_child(void)
{
	pthread_rwlock_init(&groups_lock, NULL);
	for (struct group *g = groups; g; g = g->next)
		close(g->endpoint->receive_fd);
	groups = NULL;
	batch.open = false;
}
TP_FORK_HOOK(TP_FORK_BASE, NULL, NULL, fork_child)

static void flush(void)
{
	if (!batch.open)
		return;
	batch.open = false;
	if (!tp_burst_flush(batch.burst) && batch.burst->error != EAGAIN) {
		char text[TP_ADDR_TEXT];
		TP_INFO(TP_NET, "datagrams to %s can't be sent: %s", tp_addr_format(&batch.route.to, text), strerror(batch.burst->error));
	}
}

static bool same_route(const struct tp_route *a, const struct tp_route *b)
{
	return !memcmp(&a->to, &b->to, sizeof(a->to)) && a->tos == b->tos && a->ttl == b->ttl && a->mute == b->mute;
}

/* false: nothing can be sent there; logged by who found out. */
static bool open_batch(const struct tp_av *av, uint32_t sender)
{
	bool multicast = av->dgid.raw[0] == 0xff;
	struct tp_route route = { .to = av->to, .tos = av->traffic_class, .ttl = multicast ? 0 : av->hop_limit, .mute = av->type == IBV_GID_TYPE_ROCE_V1 };
	union tp_addr from;
	if (batch.open && batch.sender == sender && same_route(&batch.route, &route) && !memcmp(&batch.from, &av->from, sizeof(av->from)))
		return true;
	flush();
	if (tp_wire_open(&av->from, &batch.endpoint) || tp_endpoint_sender(batch.endpoint, sender, &from))
		return false;
	batch.from = av->from;
	batch.route = route;
	batch.sender = sender;
	batch.flow = NULL;
	tp_icrc_prepare(&from, &route.to, &batch.icrc);
	batch.burst = tp_burst_start(NULL, batch.endpoint, sender, &batch.route, &batch.icrc);
	batch.open = batch.burst != NULL;
	return batch.open;
}

static enum tp_flow_word admit(const struct tp_wqe *wqe, const struct tp_flow_mark *mark, uint64_t *until_ns)
{
	uint32_t slot = tp_qpn_slot(wqe->ud.qpn);
	if (wqe->ud.av.dgid.raw[0] == 0xff || batch.route.mute)
		return TP_FLOW_GO;
	if (!batch.flow || batch.slot != slot)
		batch.flow = tp_flow_find(&batch.route.to, slot);
	batch.slot = slot;
	return batch.flow ? tp_flow_admit(batch.flow, batch.endpoint->budget, mark, tp_ud_wire_bytes(wqe), until_ns) : TP_FLOW_GO;
}

static bool send_datagram(struct tp_qp *qp, const struct tp_wqe *wqe, const struct tp_span *spans, int count, uint32_t psn, uint64_t *until_ns)
{
	bool multicast = wqe->ud.av.dgid.raw[0] == 0xff;
	struct tp_flow_mark mark = { .qpn = qp->ibv.qp_num, .psn = psn };
	if (!open_batch(&wqe->ud.av, qp->ibv.qp_num % TP_PORT_SENDERS))
		return true;
	enum tp_flow_word word = admit(wqe, &mark, until_ns);
	if (word == TP_FLOW_WAIT)
		return false;
	if (word == TP_FLOW_LOSE) {
		tp_counter_add(tp_card_port(qp->ibv.context, wqe->ud.av.port), TP_CNT_PORT_XMIT_DISCARDS, 1);
		return true;
	}
	struct tp_packet packet = { .opcode = TP_WIRE_UD << 5 | (wqe->opcode == IBV_WR_SEND_WITH_IMM ? TP_OP_SEND_ONLY_IMM : TP_OP_SEND_ONLY),
		.pkey = TP_CARD_PKEY, .qpn = multicast ? 0xffffff : wqe->ud.qpn, .src_qpn = qp->ibv.qp_num, .imm = wqe->imm, .bytes = wqe->length,
		.psn = psn, .qkey = tp_ud_qkey(qp, wqe), .solicited = wqe->flags & IBV_SEND_SOLICITED, .ack_request = word == TP_FLOW_ASK };
	uint8_t *payload = tp_burst_packet(batch.burst, &packet);
	if (!payload)
		flush();
	else if (!packet.bytes || tp_span_read(spans, count, 0, payload, packet.bytes) == 0)
		tp_burst_commit(batch.burst, &packet);
	return true;
}

/* ---- in ---- */

/* Gives the header that a receive begins with, returns the kind of packet. */
static uint8_t describe(const struct tp_ingress *in, uint8_t grh[40])
{
	struct tp_av av = { .type = IBV_GID_TYPE_ROCE_V2, .traffic_class = in->tos, .hop_limit = in->ttl, .from = in->from, .to = in->to };
	tp_gid_from_addr(&in->from, &av.sgid);
	tp_gid_from_addr(&in->to, &av.dgid);
	tp_engine_make_grh(&av, in->bytes, grh);
	return tp_engine_packet_kind(&av);
}

/* Bytes that may come: what our socket takes, but no more datagrams like this one than there are receives. qp: its target, or NULL. */
static uint32_t can_take(const struct tp_ingress *in, struct tp_qp *qp)
{
	return qp ? (uint32_t)TP_MIN((uint64_t)in->endpoint->budget, (uint64_t)tp_target_receives_posted(qp) * TP_FLOW_COST(in->bytes)) :
		in->endpoint->budget;
}

/* A sender that asks is told that this has come out of our socket. */
static void tell(const struct tp_ingress *in, const struct tp_packet *packet, uint32_t bytes)
{
	struct tp_route route = { .to = in->from };
	union tp_addr from;
	struct tp_icrc icrc;
	route.to.v4.sin_port = htons(TP_WIRE_UDP_PORT);
	if (in->endpoint->multicast || tp_endpoint_sender(in->endpoint, 0, &from))
		return;
	tp_icrc_prepare(&from, &route.to, &icrc);
	struct tp_packet word = { .opcode = TP_WIRE_UD << 5 | TP_OP_ACK, .pkey = TP_CARD_PKEY, .qpn = packet->src_qpn, .psn = packet->psn,
		.src_qpn = packet->qpn, .syndrome = TP_SYN_ACK | TP_WIRE_CREDITS_INVALID, .msn = bytes / TP_FLOW_UNIT };
	struct tp_burst *burst = tp_burst_start(NULL, in->endpoint, 0, &route, &icrc);
	if (!burst || !tp_burst_packet(burst, &word))
		return;
	tp_burst_commit(burst, &word);
	tp_burst_flush(burst);
}

static void to_group(const struct tp_ingress *in, const struct tp_datagram *datagram)
{
	struct { struct tp_port *port; union ibv_gid gid; } found[8];
	int count = 0;
	if (tp_endpoint_is_sender(&in->from))
		return;
	/* The groups' lock is below those of the members, which deliver: look first. */
	pthread_rwlock_rdlock(&groups_lock);
	for (struct group *g = groups; g && count < (int)TP_ARRAY_LEN(found); g = g->next)
		if (g->endpoint == in->endpoint) {
			found[count].port = g->port;
			found[count++].gid = g->gid;
		}
	pthread_rwlock_unlock(&groups_lock);
	for (int i = 0; i < count; i++)
		tp_target_multicast(found[i].port, &found[i].gid, NULL, datagram);
}

void tp_ud_arrive(const struct tp_ingress *in, const struct tp_packet *packet)
{
	struct tp_icrc icrc;
	uint8_t grh[40];
	if (packet->qpn == TP_GSI_QPN) {
		tp_gsi_route(in, true);     /* where no keeper does it */
		return;
	}
	if ((packet->pkey & 0x7fff) != (TP_CARD_PKEY & 0x7fff) || (packet->qpn == 0xffffff) != in->endpoint->multicast)
		return;
	tp_icrc_prepare(&in->from, &in->to, &icrc);
	if (!tp_wire_icrc_fits(&icrc, in))
		return;
	if (tp_wire_operation(packet->opcode) == TP_OP_ACK) {
		tp_flow_arrived(&in->from, tp_qpn_slot(packet->src_qpn), packet->qpn, packet->psn, packet->msn * TP_FLOW_UNIT);
		return;
	}
	uint8_t kind = describe(in, grh);
	struct tp_span span = { .grip = { .addr = (uint8_t *)(uintptr_t)packet->payload }, .bytes = packet->bytes };
	struct tp_datagram datagram = { .grh = grh, .spans = &span, .nspans = packet->bytes ? 1 : 0, .bytes = packet->bytes, .src_qp = packet->src_qpn,
		.qkey = packet->qkey, .imm = packet->imm, .has_imm = tp_wire_operation(packet->opcode) == TP_OP_SEND_ONLY_IMM,
		.dest_qp = packet->qpn, .solicited = packet->solicited, .sl = kind };
	if (in->endpoint->multicast) {
		to_group(in, &datagram);
		return;
	}
	struct tp_qp *qp = tp_qp_get(packet->qpn);
	if (qp)
		tp_target_datagram(qp, &datagram);
	if (packet->ack_request)
		tell(in, packet, can_take(in, qp));
	if (qp)
		tp_qp_put(qp);
}

/* ---- groups and listening ---- */

static bool is_usable(const struct tp_gid *gid) { return gid->addr.sa.sa_family != AF_UNSPEC && gid->type == IBV_GID_TYPE_ROCE_V2; }

/* The first GID of the port of the group's family: whence it is joined. */
static bool find_local(struct tp_port *port, int family, struct tp_gid *out)
{
	for (uint32_t i = 0; i < TP_CARD_GIDS; i++)
		if (tp_port_gid(port, i, out) && is_usable(out) && out->addr.sa.sa_family == family)
			return true;
	return false;
}

static void join(struct tp_port *port, const union ibv_gid *gid)
{
	union tp_addr addr;
	struct tp_gid local;
	tp_gid_to_addr(gid, 0, TP_WIRE_UDP_PORT, &addr);
	struct group *group = find_local(port, addr.sa.sa_family, &local) ? tp_alloc(1, sizeof(*group), "a multicast group") : NULL;
	if (!group)
		return;
	if (tp_endpoint_join(&addr, &local.addr, local.ifindex, &group->endpoint) != 0) {
		free(group);
		return;
	}
	group->port = port;
	group->gid = *gid;
	pthread_rwlock_wrlock(&groups_lock);
	group->next = groups;
	groups = group;
	pthread_rwlock_unlock(&groups_lock);
	tp_wire_watch(group->endpoint);
}

static void leave(struct tp_port *port, const union ibv_gid *gid)
{
	struct group *group = NULL;
	pthread_rwlock_wrlock(&groups_lock);
	for (struct group **at = &groups; *at; at = &(*at)->next)
		if ((*at)->port == port && !memcmp(&(*at)->gid, gid, sizeof(*gid))) {
			group = *at;
			*at = group->next;
			break;
		}
	pthread_rwlock_unlock(&groups_lock);
	if (!group)
		return;
	tp_progress_unwatch(group->endpoint->receive_fd);
	tp_endpoint_leave(group->endpoint);
	free(group);
}

static void on_group(struct tp_port *port, const union ibv_gid *gid, bool joined)
{
	if (joined)
		join(port, gid);
	else
		leave(port, gid);
}

/* A UD QP hears whatever comes to its port's addresses. One of them suffices: others may be on their way up or down. */
static int listen_at(struct tp_port *port)
{
	int first_error = 0, opened = 0;
	struct tp_gid gid;
	for (uint32_t i = 0; i < TP_CARD_GIDS; i++) {
		struct tp_endpoint *endpoint;
		if (!tp_port_gid(port, i, &gid) || !is_usable(&gid))
			continue;
		int error = tp_wire_open(&gid.addr, &endpoint);
		opened += error == 0;
		if (error && !first_error)
			first_error = error;
	}
	return opened ? 0 : first_error;
}

void tp_ud_init(void)
{
	tp_engine_wire_datagram = send_datagram;
	tp_engine_wire_flush = flush;
	tp_engine_wire_listen = listen_at;
	tp_engine_group_hook = on_group;
}

/* UD on the wire, and the IP groups behind multicast GIDs. A group's packets come to a socket of its own in every process that
 * is a member; what this process sent itself comes back there too and is left alone: its own QPs got it directly. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "verbs/gsi.h"
#include "verbs/internal.h"
#include "verbs/rc.h"

struct group { struct group *next; struct tp_port *port; union ibv_gid gid; struct tp_endpoint *endpoint; };

static struct group *groups;
static pthread_rwlock_t groups_lock = PTHREAD_RWLOCK_INITIALIZER;

/* ---- out ---- */

static void send_datagram(struct tp_qp *qp, const struct tp_wqe *wqe, const struct tp_span *spans, int count)
{
	const struct tp_av *av = &wqe->ud.av;
	bool multicast = av->dgid.raw[0] == 0xff;
	struct tp_endpoint *endpoint;
	union tp_addr from;
	uint32_t sender = qp->ibv.qp_num % TP_PORT_SENDERS;
	int error = tp_wire_open(&av->from, &endpoint);
	if (!error)
		error = tp_endpoint_sender(endpoint, sender, &from);
	if (error)
		return;
	struct tp_route route = { .to = av->to, .tos = av->traffic_class, .ttl = multicast ? 0 : av->hop_limit, .mute = av->type == IBV_GID_TYPE_ROCE_V1 };
	struct tp_icrc icrc;
	tp_icrc_prepare(&from, &route.to, &icrc);
	struct tp_packet packet = { .opcode = TP_WIRE_UD << 5 | (wqe->opcode == IBV_WR_SEND_WITH_IMM ? TP_OP_SEND_ONLY_IMM : TP_OP_SEND_ONLY),
		.pkey = TP_CARD_PKEY, .qpn = multicast ? 0xffffff : wqe->ud.qpn, .src_qpn = qp->ibv.qp_num, .imm = wqe->imm, .bytes = wqe->length,
		.qkey = wqe->ud.qkey & 0x80000000u ? qp->attr.qkey : wqe->ud.qkey, .solicited = wqe->flags & IBV_SEND_SOLICITED };
	struct tp_burst *burst = tp_burst_start(NULL, endpoint, sender, &route, &icrc);
	uint8_t *payload = burst ? tp_burst_packet(burst, &packet) : NULL;
	if (!payload)
		return;
	if (packet.bytes && tp_span_read(spans, count, 0, payload, packet.bytes))
		return;
	tp_burst_commit(burst, &packet);
	if (!tp_burst_flush(burst) && burst->error != EAGAIN) {
		char text[TP_ADDR_TEXT];
		TP_INFO(TP_NET, "a datagram to %s can't be sent: %s", tp_addr_format(&route.to, text), strerror(burst->error));
	}
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
	if (qp) {
		tp_target_datagram(qp, &datagram);
		tp_qp_put(qp);
	}
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
	tp_engine_wire_listen = listen_at;
	tp_engine_group_hook = on_group;
}

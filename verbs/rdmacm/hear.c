/* Connections: what the peer says, its end, and time that passes. */
#include <endian.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "verbs/rdmacm/cm.h"

#define BOUND_MS 2000               /* who has bound a port for less is taken to be about to listen */

static struct cm_id *find_listener(int port_fd)
{
	for (struct cm_id *id = cm_ids; id; id = id->next)
		if (id->port_fd == port_fd && id->state == CM_LISTENING)
			return id;
	return NULL;
}

/* Its program has bound the port and is about to listen: whoever asks is to come again. */
static bool is_about_to_listen(int port_fd)
{
	for (struct cm_id *id = cm_ids; id; id = id->next)
		if (id->port_fd == port_fd && id->state == CM_BOUND && cm_now_ms() - id->held_ms < BOUND_MS)
			return true;
	return false;
}

/* Could a message that came from there be of the one whom id speaks with? A stranger on the wire must not be heard. */
static bool comes_from_peer(const struct cm_id *id, const struct cm_target *from)
{
	return id->peer.wire == from->wire && (!from->wire || !memcmp(&id->peer.peer, &from->peer, sizeof(from->peer)));
}

static struct cm_id *find_request(const struct tp_cm_mad *mad, const struct cm_target *from)
{
	for (struct cm_id *id = cm_ids; id; id = id->next)
		if (id->listener && id->remote_id == mad->local_id && id->transaction == mad->transaction && comes_from_peer(id, from))
			return id;
	return NULL;
}

static void refuse_stranger(const struct tp_cm_mad *request, uint16_t reason, const struct cm_target *to)
{
	struct tp_cm_mad mad = { .kind = request->kind == TP_CM_SIDR_REQ ? TP_CM_SIDR_REP : TP_CM_REJ, .transaction = request->transaction,
		.local_id = request->kind == TP_CM_SIDR_REQ ? request->local_id : 0, .remote_id = request->local_id, .reason = reason,
		.status = 1, .service_id = request->service_id };
	uint8_t bytes[TP_MAD_BYTES];
	tp_cm_build(&mad, bytes);
	cm_bus_send(to, bytes);
}

/* An answer to a request that nobody waits for any more. */
static void refuse_reply(const struct tp_cm_mad *reply, const struct cm_target *to)
{
	struct tp_cm_mad mad = { .kind = TP_CM_REJ, .transaction = reply->transaction, .local_id = reply->remote_id, .remote_id = reply->local_id,
		.about = TP_CM_ABOUT_REP, .reason = TP_REJ_INVALID_COMM_ID };
	uint8_t bytes[TP_MAD_BYTES];
	tp_cm_build(&mad, bytes);
	cm_bus_send(to, bytes);
}

static void set_addr(struct sockaddr_storage *out, bool v6, const uint8_t raw[16], uint16_t port)
{
	struct sockaddr_in *v4_addr = (struct sockaddr_in *)(void *)out;
	struct sockaddr_in6 *v6_addr = (struct sockaddr_in6 *)(void *)out;
	memset(out, 0, sizeof(*out));
	out->ss_family = v6 ? AF_INET6 : AF_INET;
	v4_addr->sin_port = htons(port);
	if (v6)
		memcpy(&v6_addr->sin6_addr, raw, 16);
	else
		memcpy(&v4_addr->sin_addr, raw + 12, 4);
}

/* A request of a new peer becomes an id; NULL: refused. */
static struct cm_id *admit_locked(const struct tp_cm_mad *mad, struct cm_id *listener, const struct cm_target *from)
{
	struct tp_cm_ip ip;
	if (!listener || !tp_cm_parse_ip(mad->private_data, mad->private_bytes, &ip)) {
		refuse_stranger(mad, listener ? TP_REJ_UNSUPPORTED : TP_REJ_INVALID_SERVICE, from);
		return NULL;
	}
	union ibv_gid own = from->own, peer = from->peer;
	struct sockaddr_storage source, to;
	set_addr(&source, ip.v6, ip.from, ip.port);
	set_addr(&to, ip.v6, ip.to, cm_port_of(&listener->pub.route.addr.src_storage));
	if (!from->wire) {
		cm_gid_of((struct sockaddr *)&to, &own);
		cm_gid_of((struct sockaddr *)&source, &peer);
	}
	uint8_t port, index;
	struct ibv_context *verbs = cm_device_of(&own, &port, &index);
	bool elsewhere = verbs && listener->pub.verbs && memcmp(&listener->pub.route.addr.addr.ibaddr.sgid, &own, sizeof(own));
	/* Its context is the listener's when the program fetches the request. */
	struct cm_id *id = verbs && !elsewhere ? cm_new(&listener->channel->pub, NULL, listener->pub.ps) : NULL;
	if (!id) {
		refuse_stranger(mad, elsewhere ? TP_REJ_INVALID_SERVICE : verbs ? TP_REJ_NO_QP : TP_REJ_INVALID_GID, from);
		return NULL;
	}
	id->pub.verbs = verbs;
	id->pub.pd = cm_device_pd(verbs);
	id->pub.port_num = port;
	id->sgid_index = index;
	id->pub.route.addr.src_storage = to;
	id->pub.route.addr.dst_storage = source;
	id->pub.route.addr.addr.ibaddr.sgid = own;
	id->pub.route.addr.addr.ibaddr.dgid = peer;
	id->pub.route.addr.addr.ibaddr.pkey = htons(0xffff);
	return id;
}

/* Requests that came and that the program hasn't fetched yet. */
static int waiting_locked(const struct cm_id *listener)
{
	int count = 0;
	for (struct cm_event *event = listener->channel->first; event; event = event->next)
		count += event->owner == listener;
	return count;
}

static void on_request_locked(const struct tp_cm_mad *mad, int port_fd, const struct cm_target *from)
{
	struct cm_id *listener = find_listener(port_fd), *known = find_request(mad, from);
	if (known) {
		if (known->state != CM_PENDING && known->message[0])
			cm_bus_send(&known->peer, known->message);
		return;
	}
	/* As with TCP: it comes again. */
	if (listener ? waiting_locked(listener) >= listener->backlog : is_about_to_listen(port_fd))
		return;
	struct cm_id *id = admit_locked(mad, listener, from);
	if (!id)
		return;
	id->next = cm_ids;
	cm_ids = id;
	id->listener = listener;
	id->local_id = cm_bus_number();
	id->remote_id = mad->local_id;
	id->peer_guid = mad->ca_guid;
	id->transaction = mad->transaction;
	id->tos = mad->traffic_class;
	id->peer = *from;
	id->peer.tos = id->tos;
	cm_bus_watch_locked(from->pid);
	id->remote_qpn = mad->qpn;
	id->remote_psn = mad->psn;
	id->mtu = mad->mtu >= IBV_MTU_256 && mad->mtu <= IBV_MTU_4096 ? mad->mtu : IBV_MTU_1024;
	id->ack_timeout = mad->ack_timeout;
	id->retry_count = mad->retry_count;
	id->rnr_retry_count = mad->rnr_retry_count;
	/* What the peer can begin is what we must hold, and the other way round. */
	id->responder_resources = mad->initiator_depth;
	id->initiator_depth = mad->responder_resources;
	id->state = CM_PENDING;
	const uint8_t *data = mad->private_data + TP_MAD_IP_BYTES;
	uint8_t bytes = (uint8_t)(mad->private_bytes - TP_MAD_IP_BYTES);
	struct rdma_conn_param conn = { .private_data = data, .private_data_len = bytes, .responder_resources = mad->initiator_depth,
		.initiator_depth = mad->responder_resources, .flow_control = mad->flow_control, .retry_count = mad->retry_count,
		.rnr_retry_count = mad->rnr_retry_count, .srq = mad->srq, .qp_num = mad->qpn };
	struct rdma_ud_param ud = { .private_data = data, .private_data_len = bytes };
	cm_raise_locked(id, listener, RDMA_CM_EVENT_CONNECT_REQUEST, 0, id->ud ? NULL : &conn, id->ud ? &ud : NULL);
}

static void on_reply_locked(struct cm_id *id, const struct tp_cm_mad *mad, const struct cm_target *from)
{
	if (id->state == CM_ESTABLISHED)
		cm_bus_send(&id->peer, id->message);        /* our RTU was lost */
	if (id->state != CM_REQUESTED)
		return;
	id->remote_id = mad->local_id;
	if (!from->wire)
		id->peer = *from;
	cm_bus_watch_locked(from->pid);
	id->remote_qpn = mad->qpn;
	id->remote_psn = mad->psn;
	id->rnr_retry_count = mad->rnr_retry_count;
	id->responder_resources = mad->initiator_depth < id->responder_resources ? mad->initiator_depth : id->responder_resources;
	id->initiator_depth = mad->responder_resources < id->initiator_depth ? mad->responder_resources : id->initiator_depth;
	struct rdma_conn_param conn = { .private_data = mad->private_data, .private_data_len = mad->private_bytes,
		.responder_resources = mad->initiator_depth, .initiator_depth = mad->responder_resources, .flow_control = mad->flow_control,
		.rnr_retry_count = mad->rnr_retry_count, .srq = mad->srq, .qp_num = mad->qpn };
	id->resend_ms = id->give_up_ms = 0;
	id->state = CM_RESPONDED;
	cm_raise_locked(id, NULL, RDMA_CM_EVENT_CONNECT_RESPONSE, 0, &conn, NULL);
}

/* Nobody listens (yet): true where that is to be tried again. */
static bool tries_again_locked(struct cm_id *id)
{
	uint64_t now_ms = cm_now_ms();
	if (id->state != CM_REQUESTED || now_ms >= id->patience_ms)
		return false;
	id->resend_ms = now_ms + CM_AGAIN_MS;
	return true;
}

static void on_refusal_locked(struct cm_id *id, const struct tp_cm_mad *mad)
{
	if (id->state != CM_REQUESTED && id->state != CM_RESPONDED && id->state != CM_ANSWERED && id->state != CM_PENDING)
		return;
	/* Of a copy of the request that came too early: its answer has overtaken this. Who answers has nothing more to say of the request. */
	if (id->state == CM_RESPONDED && mad->about == TP_CM_ABOUT_REQ)
		return;
	if (mad->reason == TP_REJ_INVALID_SERVICE && tries_again_locked(id))
		return;
	struct rdma_conn_param conn = { .private_data = mad->private_data, .private_data_len = mad->private_bytes };
	id->resend_ms = id->give_up_ms = 0;
	id->state = CM_DONE;
	cm_raise_locked(id, NULL, RDMA_CM_EVENT_REJECTED, mad->reason, &conn, NULL);
}

static void on_parting_locked(struct cm_id *id, const struct tp_cm_mad *mad, const struct cm_target *from)
{
	struct tp_cm_mad reply = { .kind = TP_CM_DREP, .transaction = mad->transaction, .local_id = mad->remote_id, .remote_id = mad->local_id };
	uint8_t bytes[TP_MAD_BYTES];
	tp_cm_build(&reply, bytes);
	cm_bus_send(from, bytes);
	if (id && !from->wire)
		tp_card_inner_gsi_catch_up();
	if (id && id->state != CM_DONE && id->state >= CM_REQUESTED)
		cm_gone_locked(id, RDMA_CM_EVENT_DISCONNECTED, 0);
}

void cm_ended_locked(pid_t pid)
{
	bool any = false;
	for (struct cm_id *id = cm_ids; id; id = id->next) {
		if (id->ud || id->peer.wire || id->peer.pid != pid || id->state < CM_PENDING || id->state == CM_DONE)
			continue;
		if (!any)
			tp_card_inner_gsi_catch_up();
		any = true;
		bool connected = id->state == CM_ESTABLISHED || id->state == CM_LEAVING;
		cm_gone_locked(id, connected ? RDMA_CM_EVENT_DISCONNECTED : RDMA_CM_EVENT_UNREACHABLE, connected ? 0 : -ECONNRESET);
	}
}

static void on_sidr_reply_locked(struct cm_id *id, const struct tp_cm_mad *mad)
{
	if (id->state != CM_REQUESTED || !id->ud || (mad->status == 1 && tries_again_locked(id)))
		return;
	id->resend_ms = id->give_up_ms = 0;
	id->state = mad->status ? CM_DONE : CM_ESTABLISHED;
	struct rdma_ud_param ud = { .private_data = mad->private_data, .private_data_len = mad->private_bytes, .qp_num = mad->qpn, .qkey = mad->qkey,
		.ah_attr = { .is_global = 1, .port_num = id->pub.port_num, .grh = { .dgid = id->pub.route.addr.addr.ibaddr.dgid,
			.sgid_index = id->sgid_index, .hop_limit = 64, .traffic_class = id->tos } } };
	cm_raise_locked(id, NULL, mad->status ? RDMA_CM_EVENT_UNREACHABLE : RDMA_CM_EVENT_ESTABLISHED, mad->status, NULL, &ud);
}

void cm_established_locked(struct cm_id *id)
{
	if (id->state != CM_ANSWERED)
		return;
	id->resend_ms = id->give_up_ms = 0;
	id->state = CM_ESTABLISHED;
	cm_raise_locked(id, NULL, RDMA_CM_EVENT_ESTABLISHED, 0, NULL, NULL);
}

/* Who gave up says, in the reason's details, which card it is. */
static uint64_t guid_in(const struct tp_cm_mad *mad)
{
	uint64_t guid = 0;
	if (mad->ari_bytes >= sizeof(guid))
		memcpy(&guid, mad->ari, sizeof(guid));
	return be64toh(guid);
}

/* The connection that a message is of; a stranger's has none. */
static struct cm_id *find_connection(const struct tp_cm_mad *mad, const struct cm_target *from)
{
	uint32_t number = mad->kind == TP_CM_SIDR_REP ? mad->local_id : mad->remote_id;
	for (struct cm_id *id = cm_ids; id; id = id->next) {
		bool its = tp_cm_rej_of_request(mad) ? id->state == CM_REQUESTED && !id->ud && id->transaction == mad->transaction :
			tp_cm_rej_of_peer(mad) ? id->listener && id->remote_id == mad->local_id && id->peer_guid == guid_in(mad) :
			number && id->local_id == number;
		if (!its)
			continue;
		/* The number may be that of an earlier connection's peer. */
		bool other = id->remote_id && mad->kind != TP_CM_SIDR_REP && mad->local_id && id->remote_id != mad->local_id;
		return other || !comes_from_peer(id, from) ? NULL : id;
	}
	return NULL;
}

void cm_arrive_locked(const struct tp_cm_mad *mad, int port_fd, const struct cm_target *from)
{
	if (mad->kind == TP_CM_REQ || mad->kind == TP_CM_SIDR_REQ) {
		on_request_locked(mad, port_fd, from);
		return;
	}
	struct cm_id *id = find_connection(mad, from);
	if (mad->kind == TP_CM_DREQ)
		on_parting_locked(id, mad, from);
	if (mad->kind == TP_CM_REP && (!id || id->state == CM_DONE))
		refuse_reply(mad, from);
	if (!id)
		return;
	switch (mad->kind) {
	case TP_CM_REP: on_reply_locked(id, mad, from); break;
	case TP_CM_RTU:
		cm_established_locked(id);
		break;
	case TP_CM_REJ: on_refusal_locked(id, mad); break;
	case TP_CM_MRA:
		/* It was heard; the answer takes time. */
		if (id->give_up_ms) {
			id->give_up_ms = cm_now_ms() + CM_GIVE_UP_MS;
			id->resend_ms = cm_now_ms() + CM_MAX_RESEND_MS;
		}
		break;
	case TP_CM_DREP:
		if (id->state == CM_LEAVING)
			cm_gone_locked(id, RDMA_CM_EVENT_DISCONNECTED, 0);
		break;
	case TP_CM_SIDR_REP: on_sidr_reply_locked(id, mad); break;
	default: break;
	}
}

/* ---- time ---- */

void cm_reap_locked(void)
{
	for (struct cm_id **at = &cm_ids; *at;) {
		struct cm_id *id = *at;
		if (id->parting && id->state == CM_DONE) {
			*at = id->next;
			free(id);
		} else {
			at = &id->next;
		}
	}
}

bool cm_parting_locked(void)
{
	for (struct cm_id *id = cm_ids; id; id = id->next)
		if (id->parting && id->state != CM_DONE)
			return true;
	return false;
}

uint64_t cm_timers_locked(uint64_t now_ms)
{
	uint64_t next_ms = 0;
	for (struct cm_id *id = cm_ids; id; id = id->next) {
		if (!id->resend_ms)
			continue;
		if (now_ms >= id->give_up_ms) {
			cm_gone_locked(id, id->state == CM_LEAVING ? RDMA_CM_EVENT_DISCONNECTED : RDMA_CM_EVENT_UNREACHABLE,
				id->state == CM_LEAVING ? 0 : -ETIMEDOUT);
			continue;
		}
		if (now_ms >= id->resend_ms) {
			uint64_t whole_ms = id->parting ? CM_PART_MS : CM_GIVE_UP_MS, since_ms = now_ms - (id->give_up_ms - whole_ms);
			id->resend_ms = now_ms + (since_ms < CM_RESEND_MS ? CM_RESEND_MS : since_ms > CM_MAX_RESEND_MS ? CM_MAX_RESEND_MS : since_ms);
			if (cm_bus_send(&id->peer, id->message) == ECONNREFUSED && !tries_again_locked(id)) {
				/* Nobody listens, or the peer's process is gone. */
				if (id->state == CM_REQUESTED && id->peer.name.port)
					cm_gone_locked(id, RDMA_CM_EVENT_REJECTED, TP_REJ_INVALID_SERVICE);
				else
					cm_gone_locked(id, id->state == CM_LEAVING ? RDMA_CM_EVENT_DISCONNECTED : RDMA_CM_EVENT_UNREACHABLE,
					id->state == CM_LEAVING ? 0 : -ECONNREFUSED);
				continue;
			}
		}
		if (!next_ms || id->resend_ms < next_ms)
			next_ms = id->resend_ms;
	}
	return next_ms;
}

/* Connections: what a program asks for, and what is said to the peer. */
#include <endian.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "verbs/rdmacm/cm.h"

#define UDP_QKEY 0x01234567u        /* RDMA_UDP_QKEY */

void cm_say_locked(struct cm_id *id, struct tp_cm_mad *mad, bool awaits)
{
	mad->local_id = id->local_id;
	mad->remote_id = id->remote_id;
	mad->transaction = id->transaction;
	tp_cm_build(mad, id->message);
	id->resend_ms = id->give_up_ms = 0;
	if (awaits) {
		id->resend_ms = cm_now_ms() + CM_RESEND_MS;
		id->give_up_ms = cm_now_ms() + CM_GIVE_UP_MS;
		cm_bus_wake();
	}
}

/* Puts private data behind at bytes that are there already. */
static int add_private(struct tp_cm_mad *mad, size_t at, const void *data, size_t bytes)
{
	if (at + bytes > tp_cm_private_room(mad->kind))
		return EINVAL;
	if (bytes)
		memcpy(mad->private_data + at, data, bytes);
	mad->private_bytes = (uint8_t)(at + bytes);
	return 0;
}

void cm_gone_locked(struct cm_id *id, enum rdma_cm_event_type type, int status)
{
	id->resend_ms = id->give_up_ms = 0;
	id->state = CM_DONE;
	cm_raise_locked(id, NULL, type, status, NULL, NULL);
}

/* ---- the program's calls ---- */

static void ip_of(const struct cm_id *id, uint8_t out[TP_MAD_IP_BYTES])
{
	struct tp_cm_ip ip = { .v6 = id->pub.route.addr.src_addr.sa_family == AF_INET6, .port = cm_port_of(&id->pub.route.addr.src_storage) };
	const union ibv_gid *from = &id->pub.route.addr.addr.ibaddr.sgid, *to = &id->pub.route.addr.addr.ibaddr.dgid;
	memcpy(ip.from + (ip.v6 ? 0 : 12), from->raw + (ip.v6 ? 0 : 12), ip.v6 ? 16 : 4);
	memcpy(ip.to + (ip.v6 ? 0 : 12), to->raw + (ip.v6 ? 0 : 12), ip.v6 ? 16 : 4);
	tp_cm_build_ip(&ip, out);
}

static uint64_t guid_of(const struct cm_id *id) { return id->pub.verbs ? be64toh(ibv_get_device_guid(id->pub.verbs->device)) : 0; }

/* The way to the address that the id was resolved to: the bus for the card's own, the wire for all others. */
static struct cm_target way_to(const struct cm_id *id, uint16_t port)
{
	uint8_t number, index;
	const union ibv_gid *own = &id->pub.route.addr.addr.ibaddr.sgid, *peer = &id->pub.route.addr.addr.ibaddr.dgid;
	bool local = cm_device_of(peer, &number, &index) != NULL;
	return (struct cm_target){ .wire = !local || tp_card_inner_wire_always(), .name = { .port = true, .space = (uint16_t)id->pub.ps, .number = port },
		.own = *own, .peer = *peer, .tos = id->tos };
}

static int request_locked(struct cm_id *id, const struct rdma_conn_param *param)
{
	uint16_t port = cm_port_of(&id->pub.route.addr.dst_storage);
	struct tp_cm_mad mad = { .kind = id->ud ? TP_CM_SIDR_REQ : TP_CM_REQ, .service_id = tp_cm_service((uint16_t)id->pub.ps, port),
		.qpn = id->qpn, .psn = id->psn, .responder_resources = id->responder_resources, .initiator_depth = id->initiator_depth,
		.retry_count = id->retry_count, .rnr_retry_count = id->rnr_retry_count, .local_timeout = 20, .remote_timeout = 20, .max_cm_retries = 15,
		.mtu = id->mtu, .pkey = 0xffff, .ack_timeout = id->ack_timeout, .hop_limit = 64, .traffic_class = id->tos, .packet_rate = 2,
		.srq = param && param->srq, .ca_guid = guid_of(id) };
	memcpy(mad.local_gid, id->pub.route.addr.addr.ibaddr.sgid.raw, 16);
	memcpy(mad.remote_gid, id->pub.route.addr.addr.ibaddr.dgid.raw, 16);
	ip_of(id, mad.private_data);
	if (add_private(&mad, TP_MAD_IP_BYTES, param ? param->private_data : NULL, param ? param->private_data_len : 0))
		return EINVAL;
	id->local_id = cm_bus_number();
	/* So that a refusal by one who couldn't read our number finds its way (cm_name.c). */
	id->transaction = (uint64_t)(id->local_id >> 16) << 48 | id->transaction >> 16;
	id->peer = way_to(id, port);
	id->state = CM_REQUESTED;
	cm_say_locked(id, &mad, true);
	id->patience_ms = cm_now_ms() + CM_PATIENCE_MS;
	if (cm_bus_send(&id->peer, id->message) == ECONNREFUSED)
		id->resend_ms = cm_now_ms() + CM_AGAIN_MS;
	return 0;
}

static void take_param(struct cm_id *id, const struct rdma_conn_param *param)
{
	id->qpn = id->pub.qp ? id->pub.qp->qp_num : param ? param->qp_num : 0;
	id->responder_resources = param ? param->responder_resources : 16;
	id->initiator_depth = param ? param->initiator_depth : 16;
	/* 0xff: as much as the card has (RDMA_MAX_RESP_RES); ours has 128. */
	id->responder_resources = id->responder_resources > 128 ? 128 : id->responder_resources;
	id->initiator_depth = id->initiator_depth > 128 ? 128 : id->initiator_depth;
	id->rnr_retry_count = param && param->rnr_retry_count < 7 ? param->rnr_retry_count : 7;
}

int rdma_connect(struct rdma_cm_id *pub, struct rdma_conn_param *param)
{
	struct cm_id *id = cm_of(pub);
	if (!pub->verbs || id->state == CM_LISTENING || !pub->route.num_paths)
		return cm_fail(EINVAL);
	if (way_to(id, 0).wire) {
		/* So that answers are heard; it may wait for the keeper. */
		int error = tp_card_inner_gsi_listen(&pub->route.addr.addr.ibaddr.sgid);
		if (error)
			return cm_fail(error);
	}
	pthread_mutex_lock(&cm_lock);
	take_param(id, param);
	id->retry_count = param && param->retry_count < 7 ? param->retry_count : 7;
	int error = id->state == CM_BOUND ? request_locked(id, param) : EINVAL;
	pthread_mutex_unlock(&cm_lock);
	return error ? cm_fail(error) : cm_complete(id);
}

static int answer_locked(struct cm_id *id, const struct rdma_conn_param *param)
{
	struct tp_cm_mad mad = { .kind = id->ud ? TP_CM_SIDR_REP : TP_CM_REP, .qpn = id->qpn, .psn = id->psn, .target_ack_delay = 15,
		.responder_resources = id->responder_resources, .initiator_depth = id->initiator_depth, .rnr_retry_count = id->rnr_retry_count,
		.srq = param && param->srq, .qkey = id->ud ? UDP_QKEY : 0, .ca_guid = guid_of(id) };
	if (add_private(&mad, 0, param ? param->private_data : NULL, param ? param->private_data_len : 0))
		return EINVAL;
	if (id->ud) {
		mad.service_id = tp_cm_service((uint16_t)id->pub.ps, cm_port_of(&id->pub.route.addr.src_storage));
		uint32_t own = id->local_id;
		id->local_id = id->remote_id;       /* a SIDR answer carries the request's number */
		cm_say_locked(id, &mad, false);
		id->local_id = own;
	} else {
		if (id->pub.qp && (cm_qp_to(id, IBV_QPS_RTR) || cm_qp_to(id, IBV_QPS_RTS)))
			return errno;
		cm_say_locked(id, &mad, true);
	}
	id->state = id->ud ? CM_ESTABLISHED : CM_ANSWERED;
	cm_bus_send(&id->peer, id->message);
	return 0;
}

int rdma_accept(struct rdma_cm_id *pub, struct rdma_conn_param *param)
{
	struct cm_id *id = cm_of(pub);
	pthread_mutex_lock(&cm_lock);
	uint8_t offered_depth = id->initiator_depth, offered_resources = id->responder_resources;
	take_param(id, param);
	if (!param || param->initiator_depth == 0xff)
		id->initiator_depth = offered_depth;
	if (!param || param->responder_resources == 0xff)
		id->responder_resources = offered_resources;
	int error = id->state == CM_PENDING ? answer_locked(id, param) : EINVAL;
	pthread_mutex_unlock(&cm_lock);
	return error ? cm_fail(error) : id->ud ? 0 : cm_complete(id);
}

/* Says the last word and waits for nothing. */
static void say_last_locked(struct cm_id *id, struct tp_cm_mad *mad)
{
	cm_say_locked(id, mad, false);
	cm_bus_send(&id->peer, id->message);
}

static void establish_locked(struct cm_id *id)
{
	struct tp_cm_mad mad = { .kind = TP_CM_RTU };
	id->state = CM_ESTABLISHED;
	say_last_locked(id, &mad);
}

int rdma_establish(struct rdma_cm_id *pub)
{
	struct cm_id *id = cm_of(pub);
	pthread_mutex_lock(&cm_lock);
	int error = id->state == CM_RESPONDED && !pub->qp ? 0 : EINVAL;
	if (!error)
		establish_locked(id);
	pthread_mutex_unlock(&cm_lock);
	return error ? cm_fail(error) : 0;
}

static int refuse_locked(struct cm_id *id, uint16_t reason, const void *data, uint8_t bytes)
{
	struct tp_cm_mad mad = { .kind = id->ud ? TP_CM_SIDR_REP : TP_CM_REJ, .reason = reason,
		.about = id->state == CM_RESPONDED ? TP_CM_ABOUT_REP : TP_CM_ABOUT_REQ, .status = 2 };
	if (add_private(&mad, 0, data, bytes))
		return EINVAL;
	uint32_t own = id->local_id;
	if (id->ud)
		id->local_id = id->remote_id;
	cm_say_locked(id, &mad, false);
	id->local_id = own;
	id->state = CM_DONE;
	cm_bus_send(&id->peer, id->message);
	return 0;
}

int rdma_reject(struct rdma_cm_id *pub, const void *data, uint8_t bytes)
{
	struct cm_id *id = cm_of(pub);
	pthread_mutex_lock(&cm_lock);
	int error = id->state == CM_PENDING || id->state == CM_RESPONDED ? refuse_locked(id, TP_REJ_CONSUMER, data, bytes) : EINVAL;
	pthread_mutex_unlock(&cm_lock);
	return error ? cm_fail(error) : 0;
}

static void part_locked(struct cm_id *id)
{
	struct tp_cm_mad mad = { .kind = TP_CM_DREQ, .qpn = id->remote_qpn };
	id->state = CM_LEAVING;
	cm_say_locked(id, &mad, true);
	if (cm_bus_send(&id->peer, id->message) == ECONNREFUSED)
		cm_gone_locked(id, RDMA_CM_EVENT_DISCONNECTED, 0);
}

int rdma_disconnect(struct rdma_cm_id *pub)
{
	struct cm_id *id = cm_of(pub);
	pthread_mutex_lock(&cm_lock);
	int error = id->ud || id->state < CM_REQUESTED ? EINVAL : 0;
	if (!error && pub->qp)
		cm_qp_to(id, IBV_QPS_ERR);
	if (!error && (id->state == CM_ESTABLISHED || id->state == CM_ANSWERED || id->state == CM_RESPONDED))
		part_locked(id);
	/* One that is over already, and whose event the program has, has none to come. */
	bool over = id->state == CM_DONE && id->channel && !id->channel->first;
	pthread_mutex_unlock(&cm_lock);
	return error ? cm_fail(error) : over ? 0 : cm_complete(id);
}

/* On the wire the last message may be lost: a copy of the connection goes on until the peer has answered. */
static void go_on_parting_locked(const struct cm_id *id)
{
	struct cm_id *copy = malloc(sizeof(*copy));
	if (!copy)
		return;
	*copy = *id;
	copy->pub = (struct rdma_cm_id){ 0 };
	copy->channel = NULL;
	copy->listener = NULL;
	copy->groups = NULL;
	copy->for_requests = NULL;
	copy->resolved = NULL;
	copy->port_fd = -1;
	copy->state = CM_LEAVING;
	copy->give_up_ms = cm_now_ms() + CM_PART_MS;
	copy->parting = true;
	copy->next = cm_ids;
	cm_ids = copy;
	cm_bus_wake();
}

void cm_leave_locked(struct cm_id *id)
{
	struct tp_cm_mad mad = { .kind = TP_CM_DREQ, .qpn = id->remote_qpn };
	switch (id->state) {
	case CM_PENDING: case CM_RESPONDED: refuse_locked(id, TP_REJ_CONSUMER, NULL, 0); break;
	case CM_REQUESTED:
		if (id->ud)
			break;
		/* The peer's number isn't known yet: who we are is said by the card's number. */
		mad = (struct tp_cm_mad){ .kind = TP_CM_REJ, .about = TP_CM_ABOUT_OTHER, .reason = TP_REJ_TIMEOUT, .ari_bytes = 8 };
		uint64_t guid = htobe64(guid_of(id));
		memcpy(mad.ari, &guid, sizeof(guid));
		say_last_locked(id, &mad);
		break;
	case CM_ANSWERED: case CM_ESTABLISHED: case CM_LEAVING:
		if (id->ud)
			break;
		if (!id->peer.wire) {
			if (id->state != CM_LEAVING)
				say_last_locked(id, &mad);
			break;
		}
		if (id->state != CM_LEAVING) {
			cm_say_locked(id, &mad, true);
			cm_bus_send(&id->peer, id->message);
		}
		go_on_parting_locked(id);
		break;
	default: break;
	}
	id->state = CM_DONE;
	id->resend_ms = id->give_up_ms = 0;
}

/* ---- what the program is told ---- */

/* The peer has answered: the QP follows, the peer is told, and the event becomes what came of it. */
static void connect_locked(struct cm_id *id, struct rdma_cm_event *event)
{
	int error = id->state == CM_RESPONDED ? 0 : ECONNRESET;
	if (!error && (cm_qp_to(id, IBV_QPS_RTR) || cm_qp_to(id, IBV_QPS_RTS)))
		error = errno;
	if (!error) {
		establish_locked(id);
		event->event = RDMA_CM_EVENT_ESTABLISHED;
		return;
	}
	if (id->state == CM_RESPONDED)
		refuse_locked(id, TP_REJ_CONSUMER, NULL, 0);
	id->failed = true;
	event->event = RDMA_CM_EVENT_CONNECT_ERROR;
	event->status = -error;
}

bool cm_fetch_locked(struct cm_event *event)
{
	struct cm_id *id = cm_of(event->pub.id);
	switch (event->pub.event) {
	case RDMA_CM_EVENT_CONNECT_REQUEST:
		id->pub.context = event->pub.listen_id->context;
		return true;
	case RDMA_CM_EVENT_CONNECT_RESPONSE:
		if (id->pub.qp)
			connect_locked(id, &event->pub);
		return true;
	case RDMA_CM_EVENT_REJECTED:
		if (!id->failed && id->pub.qp && !id->ud)
			cm_qp_to(id, IBV_QPS_ERR);
		return !id->failed;
	case RDMA_CM_EVENT_DISCONNECTED: return !id->failed;
	default: return true;
	}
}

/* Connections: what is said to the peer, what it says, and what follows. */
#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include "verbs/rdmacm/cm.h"

#define RESEND_MS 100
/* Programs (perftest) close a listener, open it again and expect a peer that they let go of a moment before to come after that.
 * So who finds nobody listening tries again for as long before it says so. */
#define PATIENCE_MS 100
#define AGAIN_MS 10
#define BOUND_MS 2000
#define GIVE_UP_MS 60000
#define MAX_RESEND_MS 4000
#define PART_MS 10000               /* a parting connection waits for an answer so long */
#define UDP_QKEY 0x01234567u        /* RDMA_UDP_QKEY */

static uint16_t port_of(const struct sockaddr_storage *addr) { return ntohs(((const struct sockaddr_in *)(const void *)addr)->sin_port); }

static void say_locked(struct cm_id *id, struct tp_cm_mad *mad, bool awaits)
{
	mad->local_id = id->local_id;
	mad->remote_id = id->remote_id;
	mad->transaction = id->transaction;
	tp_cm_build(mad, id->message);
	id->resend_ms = id->give_up_ms = 0;
	if (awaits) {
		id->resend_ms = cm_now_ms() + RESEND_MS;
		id->give_up_ms = cm_now_ms() + GIVE_UP_MS;
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

static void gone_locked(struct cm_id *id, enum rdma_cm_event_type type, int status)
{
	id->resend_ms = id->give_up_ms = 0;
	id->state = CM_DONE;
	if (id->pub.qp && !id->ud)
		cm_qp_to(id, IBV_QPS_ERR);
	cm_raise_locked(id, NULL, type, status, NULL, NULL);
}

/* ---- the program's calls ---- */

static void ip_of(const struct cm_id *id, uint8_t out[TP_MAD_IP_BYTES])
{
	struct tp_cm_ip ip = { .v6 = id->pub.route.addr.src_addr.sa_family == AF_INET6, .port = port_of(&id->pub.route.addr.src_storage) };
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
	uint16_t port = port_of(&id->pub.route.addr.dst_storage);
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
	id->peer = way_to(id, port);
	id->state = CM_REQUESTED;
	say_locked(id, &mad, true);
	id->patience_ms = cm_now_ms() + PATIENCE_MS;
	if (cm_bus_send(&id->peer, id->message) == ECONNREFUSED)
		id->resend_ms = cm_now_ms() + AGAIN_MS;
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
		mad.service_id = tp_cm_service((uint16_t)id->pub.ps, port_of(&id->pub.route.addr.src_storage));
		uint32_t own = id->local_id;
		id->local_id = id->remote_id;       /* a SIDR answer carries the request's number */
		say_locked(id, &mad, false);
		id->local_id = own;
	} else {
		if (id->pub.qp && (cm_qp_to(id, IBV_QPS_RTR) || cm_qp_to(id, IBV_QPS_RTS)))
			return errno;
		say_locked(id, &mad, true);
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

int rdma_establish(struct rdma_cm_id *pub)
{
	struct cm_id *id = cm_of(pub);
	pthread_mutex_lock(&cm_lock);
	int error = id->state == CM_RESPONDED && !pub->qp ? 0 : EINVAL;
	if (!error) {
		struct tp_cm_mad mad = { .kind = TP_CM_RTU };
		say_locked(id, &mad, false);
		id->state = CM_ESTABLISHED;
		cm_bus_send(&id->peer, id->message);
	}
	pthread_mutex_unlock(&cm_lock);
	return error ? cm_fail(error) : 0;
}

static int refuse_locked(struct cm_id *id, uint16_t reason, const void *data, uint8_t bytes)
{
	struct tp_cm_mad mad = { .kind = id->ud ? TP_CM_SIDR_REP : TP_CM_REJ, .reason = reason, .about = TP_CM_ABOUT_REQ, .status = 2 };
	if (add_private(&mad, 0, data, bytes))
		return EINVAL;
	uint32_t own = id->local_id;
	if (id->ud)
		id->local_id = id->remote_id;
	say_locked(id, &mad, false);
	id->local_id = own;
	id->state = CM_DONE;
	cm_bus_send(&id->peer, id->message);
	return 0;
}

int rdma_reject(struct rdma_cm_id *pub, const void *data, uint8_t bytes)
{
	struct cm_id *id = cm_of(pub);
	pthread_mutex_lock(&cm_lock);
	int error = id->state == CM_PENDING ? refuse_locked(id, TP_REJ_CONSUMER, data, bytes) : EINVAL;
	pthread_mutex_unlock(&cm_lock);
	return error ? cm_fail(error) : 0;
}

static void part_locked(struct cm_id *id)
{
	struct tp_cm_mad mad = { .kind = TP_CM_DREQ, .qpn = id->remote_qpn };
	id->state = CM_LEAVING;
	say_locked(id, &mad, true);
	if (cm_bus_send(&id->peer, id->message) == ECONNREFUSED)
		gone_locked(id, RDMA_CM_EVENT_DISCONNECTED, 0);
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
	pthread_mutex_unlock(&cm_lock);
	return error ? cm_fail(error) : cm_complete(id);
}

/* Says the last word and waits for nothing. */
static void say_last_locked(struct cm_id *id, struct tp_cm_mad *mad)
{
	say_locked(id, mad, false);
	cm_bus_send(&id->peer, id->message);
}

/* On the wire the last message may be lost: a copy of the connection goes on until the peer has answered. */
static void go_on_parting_locked(const struct cm_id *id)
{
	struct cm_id *copy = malloc(sizeof(*copy));
	if (!copy)
		return;
	*copy = *id;
	copy->pub = (struct rdma_cm_id){ 0 };
	copy->listener = NULL;
	copy->groups = NULL;
	copy->for_requests = NULL;
	copy->resolved = NULL;
	copy->port_fd = -1;
	copy->state = CM_LEAVING;
	copy->give_up_ms = cm_now_ms() + PART_MS;
	copy->parting = true;
	copy->next = cm_ids;
	cm_ids = copy;
	cm_bus_wake();
}

void cm_leave_locked(struct cm_id *id)
{
	struct tp_cm_mad mad = { .kind = TP_CM_DREQ, .qpn = id->remote_qpn };
	switch (id->state) {
	case CM_PENDING: refuse_locked(id, TP_REJ_CONSUMER, NULL, 0); break;
	case CM_REQUESTED:
		if (id->ud || (!id->peer.wire && id->peer.name.port))
			break;
		/* The peer's number isn't known yet: who we are is said by the card's number. */
		mad = (struct tp_cm_mad){ .kind = TP_CM_REJ, .about = TP_CM_ABOUT_OTHER, .reason = TP_REJ_TIMEOUT, .ari_bytes = 8 };
		uint64_t guid = htobe64(guid_of(id));
		memcpy(mad.ari, &guid, sizeof(guid));
		say_last_locked(id, &mad);
		break;
	case CM_ANSWERED: case CM_RESPONDED: case CM_ESTABLISHED: case CM_LEAVING:
		if (id->ud)
			break;
		if (!id->peer.wire) {
			if (id->state != CM_LEAVING)
				say_last_locked(id, &mad);
			break;
		}
		if (id->state != CM_LEAVING) {
			say_locked(id, &mad, true);
			cm_bus_send(&id->peer, id->message);
		}
		go_on_parting_locked(id);
		break;
	default: break;
	}
	id->state = CM_DONE;
	id->resend_ms = id->give_up_ms = 0;
}

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

/* ---- what the peer says ---- */

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
	set_addr(&to, ip.v6, ip.to, port_of(&listener->pub.route.addr.src_storage));
	if (!from->wire) {
		cm_gid_of((struct sockaddr *)&to, &own);
		cm_gid_of((struct sockaddr *)&source, &peer);
	}
	uint8_t port, index;
	struct ibv_context *verbs = cm_device_of(&own, &port, &index);
	bool elsewhere = verbs && listener->pub.verbs && memcmp(&listener->pub.route.addr.addr.ibaddr.sgid, &own, sizeof(own));
	struct cm_id *id = verbs && !elsewhere ? cm_new(listener->pub.channel, listener->pub.context, listener->pub.ps) : NULL;
	if (!id) {
		refuse_stranger(mad, elsewhere ? TP_REJ_INVALID_SERVICE : verbs ? TP_REJ_NO_QP : TP_REJ_INVALID_GID, from);
		return NULL;
	}
	id->pub.verbs = verbs;
	id->pub.pd = listener->pub.pd && listener->pub.pd->context == verbs ? listener->pub.pd : cm_device_pd(verbs);
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
	for (struct cm_event *event = ((struct cm_channel *)listener->pub.channel)->first; event; event = event->next)
		count += event->owner == listener;
	return count;
}

static void on_request_locked(const struct tp_cm_mad *mad, int port_fd, const struct cm_target *from)
{
	struct cm_id *listener = find_listener(port_fd), *known = find_request(mad, from);
	if (known) {
		if (known->state != CM_PENDING)
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

static void send_rtu_locked(struct cm_id *id)
{
	struct tp_cm_mad mad = { .kind = TP_CM_RTU };
	say_locked(id, &mad, false);
	cm_bus_send(&id->peer, id->message);
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
	if (!id->pub.qp) {
		id->state = CM_RESPONDED;
		cm_raise_locked(id, NULL, RDMA_CM_EVENT_CONNECT_RESPONSE, 0, &conn, NULL);
		return;
	}
	if (cm_qp_to(id, IBV_QPS_RTR) || cm_qp_to(id, IBV_QPS_RTS)) {
		int error = errno;
		struct tp_cm_mad no = { .kind = TP_CM_REJ, .about = TP_CM_ABOUT_REP, .reason = TP_REJ_CONSUMER };
		say_locked(id, &no, false);
		cm_bus_send(&id->peer, id->message);
		gone_locked(id, RDMA_CM_EVENT_CONNECT_ERROR, -error);
		return;
	}
	id->state = CM_ESTABLISHED;
	send_rtu_locked(id);
	cm_raise_locked(id, NULL, RDMA_CM_EVENT_ESTABLISHED, 0, &conn, NULL);
}

/* Nobody listens (yet): true where that is to be tried again. */
static bool tries_again_locked(struct cm_id *id)
{
	uint64_t now_ms = cm_now_ms();
	if (id->state != CM_REQUESTED || now_ms >= id->patience_ms)
		return false;
	id->resend_ms = now_ms + AGAIN_MS;
	return true;
}

static void on_refusal_locked(struct cm_id *id, const struct tp_cm_mad *mad)
{
	if (id->state != CM_REQUESTED && id->state != CM_ANSWERED && id->state != CM_PENDING)
		return;
	if (mad->reason == TP_REJ_INVALID_SERVICE && tries_again_locked(id))
		return;
	struct rdma_conn_param conn = { .private_data = mad->private_data, .private_data_len = mad->private_bytes };
	id->resend_ms = id->give_up_ms = 0;
	bool asked = id->state == CM_REQUESTED;
	id->state = CM_DONE;
	if (id->pub.qp && !id->ud)
		cm_qp_to(id, IBV_QPS_ERR);
	cm_raise_locked(id, NULL, asked || mad->reason != TP_REJ_TIMEOUT ? RDMA_CM_EVENT_REJECTED : RDMA_CM_EVENT_UNREACHABLE, mad->reason, &conn, NULL);
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
		gone_locked(id, RDMA_CM_EVENT_DISCONNECTED, 0);
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
		gone_locked(id, connected ? RDMA_CM_EVENT_DISCONNECTED : RDMA_CM_EVENT_UNREACHABLE, connected ? 0 : -ECONNRESET);
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

/* The connection that a message is of; a stranger's has none. */
static struct cm_id *find_connection(const struct tp_cm_mad *mad, const struct cm_target *from)
{
	uint32_t number = mad->kind == TP_CM_SIDR_REP ? mad->local_id : mad->remote_id;
	/* A peer that gave up before it knew our number. */
	bool early = mad->kind == TP_CM_REJ && mad->reason == TP_REJ_TIMEOUT && !number;
	for (struct cm_id *id = cm_ids; id; id = id->next) {
		if (early ? !id->listener || id->remote_id != mad->local_id : id->local_id != number)
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
			id->give_up_ms = cm_now_ms() + GIVE_UP_MS;
			id->resend_ms = cm_now_ms() + MAX_RESEND_MS;
		}
		break;
	case TP_CM_DREP:
		if (id->state == CM_LEAVING)
			gone_locked(id, RDMA_CM_EVENT_DISCONNECTED, 0);
		break;
	case TP_CM_SIDR_REP: on_sidr_reply_locked(id, mad); break;
	default: break;
	}
}

/* ---- time ---- */

uint64_t cm_timers_locked(uint64_t now_ms)
{
	uint64_t next_ms = 0;
	for (struct cm_id *id = cm_ids; id; id = id->next) {
		if (!id->resend_ms)
			continue;
		if (now_ms >= id->give_up_ms) {
			gone_locked(id, id->state == CM_LEAVING ? RDMA_CM_EVENT_DISCONNECTED : RDMA_CM_EVENT_UNREACHABLE,
				id->state == CM_LEAVING ? 0 : -ETIMEDOUT);
			continue;
		}
		if (now_ms >= id->resend_ms) {
			uint64_t whole_ms = id->parting ? PART_MS : GIVE_UP_MS, since_ms = now_ms - (id->give_up_ms - whole_ms);
			id->resend_ms = now_ms + (since_ms < RESEND_MS ? RESEND_MS : since_ms > MAX_RESEND_MS ? MAX_RESEND_MS : since_ms);
			if (cm_bus_send(&id->peer, id->message) == ECONNREFUSED && !tries_again_locked(id)) {
				/* Nobody listens, or the peer's process is gone. */
				if (id->state == CM_REQUESTED && id->peer.name.port)
					gone_locked(id, RDMA_CM_EVENT_REJECTED, TP_REJ_INVALID_SERVICE);
				else
					gone_locked(id, id->state == CM_LEAVING ? RDMA_CM_EVENT_DISCONNECTED : RDMA_CM_EVENT_UNREACHABLE,
					id->state == CM_LEAVING ? 0 : -ECONNREFUSED);
				continue;
			}
		}
		if (!next_ms || id->resend_ms < next_ms)
			next_ms = id->resend_ms;
	}
	return next_ms;
}

/* Queue pairs connected by rdma_cm (TELPHER_IB_CONNECT=rdma_cm): the kernel's connection manager resolves addresses and routes, and says with
 * which attributes a queue pair is to be moved. The two ends have met over TCP and have told each other all that META holds; what rdma_cm carries
 * is a token that says which queue pair of which connection a request is for, so a stranger's request is refused.
 *
 *   connector, for each queue pair: address, route, request ->
 *                                                           <- answer      acceptor: its queue pair in RTR and RTS
 *   its queue pair in RTR and RTS, established              ->
 *
 * The acceptor listens on a port of its own for each connection, as long as it lives: paths are taken back so, too. Nothing here waits: events
 * come by a descriptor that doesn't block, and are acknowledged before anything is done for them, since ids can't be given back otherwise.
 * A connection's ids live as long as its queue pairs do. What a path needs beyond them (posted receives, generations, completion queues) is the
 * same as without rdma_cm, and so are the queue pairs that flush, which are joined to themselves. */
#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/socket.h"
#include "net/ib/ib.h"
#include "net/rdmacm_dl.h"

#define RESOLVE_MS 2000
#define LOST_GRACE_MS 300           /* the peer closes what it leaves, and says so over TCP */
#define BACKLOG 256
#define EVENTS_MAX 64               /* in one step */

enum end_state { IDLE, RESOLVING, ROUTING, REQUESTED, ANSWERED, UP };

struct end {                            /* of one queue pair */
	struct rdma_cm_id *id;
	enum end_state state;
	int path, qp;
};

struct ends {                           /* of one path */
	bool begun;
	uint64_t since_ms, lost_ms;     /* lost_ms: since when what had been there is lost; lost: why */
	char lost[704];
	struct end ends[TP_IB_MAX_QPS];
};

struct tp_ib_cm {
	const struct tp_rdmacm *lib;
	struct rdma_event_channel *channel;
	struct rdma_cm_id *listener;    /* of the acceptor */
	uint16_t port;                  /* of the listener, this side's or the peer's */
	uint8_t token[TP_IB_TOKEN_BYTES];
	bool told;                      /* of a request that was refused */
	struct ends paths[TP_IB_MAX_PATHS];
};

/* An event, copied: it is acknowledged by then. */
struct news { int event, status; struct rdma_cm_id *id; size_t bytes; uint8_t data[256]; };

static const struct tp_rdmacm *library;     /* set by tp_ib_cm_present, before there are connections */

static struct ends *ends_of(const struct tp_ib_comm *comm, const struct tp_ib_path *path) { return &comm->cm->paths[path - comm->paths]; }

/* ---- words ---- */

static void remote_text(const struct tp_ib_path *path, char text[48]) { tp_ib_gid_format(path->remote.gid, text); }

/* "from A (telpher0:1) to B (telpher0:1 of host), port 7" */
static void way_text(const struct tp_ib_comm *comm, const struct tp_ib_path *path, char *text, size_t bytes)
{
	char remote[48];

	remote_text(path, remote);
	snprintf(text, bytes, "%s %s (%s) %s %s (%s:%u of %s), port %u", comm->sending ? "from" : "to", path->gid.text, path->port->text, comm->sending ? "to" : "from", remote, path->remote.device,
		path->remote.port, comm->peer_host, comm->cm->port);
}

static void call_failed(struct tp_ib_comm *comm, struct tp_ib_path *path, const char *call, int error)
{
	char way[320];

	way_text(comm, path, way, sizeof(way));
	tp_ib_path_failed(comm, path, "Call to %s failed with %d %s, %s", call, error, strerror(error), way);
}

/* What an event means that is a failure. */
static void event_text(const struct tp_ib_comm *comm, const struct tp_ib_path *path, const struct news *news, char *text, size_t bytes)
{
	struct tp_ib_wire_refusal refusal = { .text = "" };
	char way[320], status[96];

	way_text(comm, path, way, sizeof(way));
	if (news->event == RDMA_CM_EVENT_REJECTED) tp_ib_refusal_read(news->data, news->bytes, &refusal);
	snprintf(text, bytes, "%s with status %s, %s: %s", tp_rdmacm_event_name(news->event), tp_rdmacm_status_text(news->event, news->status, status), way,
		refusal.text[0] ? refusal.text : tp_rdmacm_event_advice(news->event, news->status));
}

const char *tp_ib_cm_waits_for(const struct tp_ib_comm *comm, const struct tp_ib_path *path, char *text, size_t bytes)
{
	static const char *const what[] = { [IDLE] = "a connect request", [RESOLVING] = "the remote address to be resolved", [ROUTING] = "the route to be resolved",
		[REQUESTED] = "the answer to its connect request" };
	const struct ends *ends = ends_of(comm, path);
	enum end_state least = UP;
	char way[320];

	for (int q = 0; q < comm->nqps; q++) least = TP_MIN(least, ends->ends[q].state);
	way_text(comm, path, way, sizeof(way));
	snprintf(text, bytes, "rdma_cm has waited %llu ms for %s, %s: is that port up, and do packets of UDP port 4791 get there?", (unsigned long long)(tp_clock_ms() - ends->since_ms),
		least < ANSWERED ? what[least] : "nothing", way);
	return text;
}

/* ---- what there is ---- */

bool tp_ib_cm_present(const struct tp_verbs *verbs, char *why, size_t bytes)
{
	char reason[400];

	library = tp_rdmacm_open(verbs, reason, sizeof(reason));
	struct rdma_event_channel *channel = library ? library->create_event_channel() : NULL;
	if (library && !channel) snprintf(reason, sizeof(reason), "Call to rdma_create_event_channel failed: %s: is the module rdma_ucm loaded, and /dev/infiniband/rdma_cm in this container?",
		strerror(errno));
	if (!channel) {
		snprintf(why, bytes, "TELPHER_IB_CONNECT=rdma_cm: %s", reason);
		return false;
	}
	library->destroy_event_channel(channel);
	for (int i = 0; i < tp_ib_port_count(); i++) {
		if (tp_ib_port(i)->attr.link_layer == IBV_LINK_LAYER_ETHERNET) continue;
		snprintf(why, bytes, "TELPHER_IB_CONNECT=rdma_cm: port %s is InfiniBand, and connections by rdma_cm go over RoCE alone: leave it out by NCCL_IB_HCA, or set "
			"TELPHER_IB_CONNECT=tcp", tp_ib_port(i)->text);
		return false;
	}
	return true;
}

/* The address behind a GID of RoCE. */
static void address_of(const uint8_t gid[16], uint16_t port, struct sockaddr_storage *out)
{
	union tp_addr addr;

	memset(&addr, 0, sizeof(addr));
	memset(out, 0, sizeof(*out));
	if (gid[10] == 0xff && gid[11] == 0xff) {
		addr.v4.sin_family = AF_INET;
		addr.v4.sin_port = htons(port);
		memcpy(&addr.v4.sin_addr, gid + 12, 4);
	} else {
		addr.v6.sin6_family = AF_INET6;
		addr.v6.sin6_port = htons(port);
		memcpy(&addr.v6.sin6_addr, gid, 16);
	}
	memcpy(out, &addr, sizeof(addr));
}

static ncclResult_t listen_for(struct tp_ib_comm *comm)
{
	static const int families[] = { AF_INET6, AF_INET };       /* the first takes both, and isn't on every host */
	struct tp_ib_cm *cm = comm->cm;
	int error = 0;

	for (size_t i = 0; i < TP_ARRAY_LEN(families); i++) {
		struct sockaddr_storage any = { .ss_family = (sa_family_t)families[i] };
		if (cm->lib->create_id(cm->channel, &cm->listener, NULL, RDMA_PS_TCP) != 0) {
			cm->listener = NULL;
			return TP_FAIL(ncclSystemError, "NET/IB : Call to rdma_create_id failed: %s", strerror(errno));
		}
		if (cm->lib->bind_addr(cm->listener, (struct sockaddr *)&any) == 0 && cm->lib->listen(cm->listener, BACKLOG) == 0) {
			cm->port = ntohs(cm->lib->get_src_port(cm->listener));
			return ncclSuccess;
		}
		error = errno;
		cm->lib->destroy_id(cm->listener);
		cm->listener = NULL;
	}
	return TP_FAIL(ncclSystemError, "NET/IB : rank %d -> rank %d : rdma_cm can't listen for the connection (rdma_bind_addr, rdma_listen): %s", comm->from, comm->to, strerror(error));
}

ncclResult_t tp_ib_cm_create(struct tp_ib_comm *comm)
{
	struct tp_ib_cm *cm = tp_alloc(1, sizeof(*cm), "a connection's part in rdma_cm");

	if (!cm) return ncclSystemError;
	comm->cm = cm;
	cm->lib = library;
	for (int p = 0; p < TP_IB_MAX_PATHS; p++)
		for (int q = 0; q < TP_IB_MAX_QPS; q++) cm->paths[p].ends[q] = (struct end){ .path = p, .qp = q };
	cm->channel = cm->lib->create_event_channel();
	if (!cm->channel) return TP_FAIL(ncclSystemError, "NET/IB : Call to rdma_create_event_channel failed: %s", strerror(errno));
	TP_TRY(tp_socket_set_nonblocking(cm->channel->fd, true));
	if (comm->sending) return ncclSuccess;
	tp_secret_random(cm->token, sizeof(cm->token));
	return listen_for(comm);
}

void tp_ib_cm_destroy(struct tp_ib_comm *comm)
{
	struct tp_ib_cm *cm = comm->cm;

	if (!cm) return;
	for (int p = 0; p < comm->npaths; p++) tp_ib_cm_drop(comm, &comm->paths[p]);
	if (cm->listener) cm->lib->destroy_id(cm->listener);
	if (cm->channel) cm->lib->destroy_event_channel(cm->channel);
	free(cm);
	comm->cm = NULL;
}

void tp_ib_cm_abandon(struct tp_ib_comm *comm)
{
	if (comm->cm && comm->cm->channel) close(comm->cm->channel->fd);
	free(comm->cm);
	comm->cm = NULL;
}

void tp_ib_cm_describe(const struct tp_ib_comm *comm, struct tp_ib_wire_meta *out)
{
	out->connect = (uint8_t)comm->params.connect;
	if (!comm->cm || comm->sending) return;
	out->cm_port = comm->cm->port;
	memcpy(out->cm_token, comm->cm->token, sizeof(out->cm_token));
}

void tp_ib_cm_learn(struct tp_ib_comm *comm, const struct tp_ib_wire_meta *peer)
{
	if (!comm->cm || !comm->sending) return;
	comm->cm->port = peer->cm_port;
	memcpy(comm->cm->token, peer->cm_token, sizeof(comm->cm->token));
}

int tp_ib_cm_fd(const struct tp_ib_comm *comm) { return comm->cm->channel->fd; }

bool tp_ib_cm_has_begun(const struct tp_ib_comm *comm, const struct tp_ib_path *path) { return ends_of(comm, path)->begun; }

bool tp_ib_cm_is_up(const struct tp_ib_comm *comm, const struct tp_ib_path *path)
{
	const struct ends *ends = ends_of(comm, path);

	for (int q = 0; q < comm->nqps; q++)
		if (ends->ends[q].state < ANSWERED) return false;
	return true;
}

static void drop_end(struct tp_ib_cm *cm, struct end *end)
{
	if (end->id) cm->lib->destroy_id(end->id);
	end->id = NULL;
	end->state = IDLE;
}

void tp_ib_cm_drop(struct tp_ib_comm *comm, struct tp_ib_path *path)
{
	if (!comm->cm) return;
	struct ends *ends = ends_of(comm, path);

	ends->begun = false;
	ends->lost_ms = 0;
	for (int q = 0; q < comm->nqps; q++) drop_end(comm->cm, &ends->ends[q]);
}

/* ---- queue pairs ---- */

/* rdma_cm knows a port by its address; of several ports with one address (of the software card) it may mean another one. */
static const char *other_port(const struct tp_ib_path *path, const struct rdma_cm_id *id)
{
	static const uint8_t none[16];
	const uint8_t *own = id->route.addr.addr.ibaddr.sgid.raw;

	return memcmp(own, none, sizeof(none)) == 0 || memcmp(own, path->gid.raw, sizeof(path->gid.raw)) == 0 ? NULL : "rdma_cm takes another of this host's addresses";
}

static bool same_port(const struct tp_ib_path *path, const struct rdma_cm_id *id)
{
	const struct tp_verbs *v = path->port->context->verbs;

	return id->verbs && id->port_num == path->port->number && strcmp(v->get_device_name(id->verbs->device), path->port->context->name) == 0;
}

/* What the user has said counts more than what rdma_cm says. */
static void set_address(const struct tp_ib_comm *comm, struct tp_ib_path *path, const struct rdma_cm_id *id, struct ibv_ah_attr *ah)
{
	int tc = comm->sending ? comm->params.tc : comm->params.fifo_tc;

	if (!same_port(path, id)) {
		ah->port_num = path->port->number;
		ah->grh.sgid_index = (uint8_t)path->gid.index;
	} else if (ah->grh.sgid_index != path->gid.index) {
		TP_INFO(TP_NET, "NET/IB : %s : rdma_cm uses GID %u in the place of GID %d, for the same address", path->port->text, ah->grh.sgid_index, path->gid.index);
		path->gid.index = ah->grh.sgid_index;
	}
	if (comm->params.sl > 0) ah->sl = (uint8_t)comm->params.sl;
	if (tc > 0) ah->grh.traffic_class = (uint8_t)tc;
}

/* 0 or errno; *call: what failed. */
static int move(const struct tp_ib_comm *comm, struct tp_ib_path *path, const struct end *end, enum ibv_qp_state state, const char **call)
{
	struct ibv_qp_attr attr = { .qp_state = state };
	int mask = 0;

	*call = "rdma_init_qp_attr";
	if (comm->cm->lib->init_qp_attr(end->id, &attr, &mask) != 0) return errno ? errno : EINVAL;
	switch (state) {
	case IBV_QPS_INIT:
		attr.port_num = path->port->number;
		attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
		if (comm->params.pkey > 0) attr.pkey_index = (uint16_t)comm->params.pkey;
		break;
	case IBV_QPS_RTR:
		path->mtu = TP_MIN((int)attr.path_mtu, TP_MIN((int)path->port->attr.active_mtu, (int)path->remote.mtu));
		attr.path_mtu = (enum ibv_mtu)path->mtu;
		attr.min_rnr_timer = TP_IB_RNR_TIMER;
		attr.max_dest_rd_atomic = 1;
		set_address(comm, path, end->id, &attr.ah_attr);
		break;
	default:
		attr.timeout = (uint8_t)comm->params.timeout;
		attr.retry_cnt = (uint8_t)comm->params.retry_cnt;
		attr.rnr_retry = 7;
		attr.max_rd_atomic = 1;
	}
	*call = state == IBV_QPS_INIT ? "ibv_modify_qp (to INIT, as rdma_cm says)" : state == IBV_QPS_RTR ? "ibv_modify_qp (to RTR, as rdma_cm says)" : "ibv_modify_qp (to RTS, as rdma_cm says)";
	return tp_ib_qp_modify(comm, path, end->qp, &attr, mask);
}

/* To RTS; what both cards can beyond the standard is set before RTR. */
static int move_all(const struct tp_ib_comm *comm, struct tp_ib_path *path, const struct end *end, uint32_t ece_vendor, uint32_t ece_options, const char **call)
{
	int error = move(comm, path, end, IBV_QPS_INIT, call);

	if (error == 0) tp_ib_qp_set_ece(comm, path, end->qp, ece_vendor, ece_options);
	if (error == 0) error = move(comm, path, end, IBV_QPS_RTR, call);
	return error ? error : move(comm, path, end, IBV_QPS_RTS, call);
}

static void fill_param(const struct tp_ib_comm *comm, const struct tp_ib_path *path, const struct end *end, struct tp_ib_wire_token *token, struct rdma_conn_param *out)
{
	tp_ib_token_start(token);
	token->path = (uint8_t)end->path;
	token->qp = (uint8_t)end->qp;
	token->attempt = path->attempt;
	memcpy(token->token, comm->cm->token, sizeof(token->token));
	*out = (struct rdma_conn_param){ .private_data = token, .private_data_len = sizeof(*token), .responder_resources = 1, .initiator_depth = 1,
		.retry_count = (uint8_t)comm->params.retry_cnt, .rnr_retry_count = 7, .qp_num = path->qps[end->qp].ibv->qp_num };
}

/* ---- the connector ---- */

static void ask(struct tp_ib_comm *comm, struct tp_ib_path *path, struct end *end)
{
	struct tp_ib_cm *cm = comm->cm;
	struct sockaddr_storage from, to;
	uint8_t tos = (uint8_t)comm->params.tc;

	address_of(path->gid.raw, 0, &from);
	address_of(path->remote.gid, cm->port, &to);
	if (cm->lib->create_id(cm->channel, &end->id, end, RDMA_PS_TCP) != 0) {
		end->id = NULL;
		call_failed(comm, path, "rdma_create_id", errno);
	} else if (tos && cm->lib->set_option(end->id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &tos, sizeof(tos)) != 0) {
		call_failed(comm, path, "rdma_set_option (type of service, NCCL_IB_TC)", errno);
	} else if (cm->lib->resolve_addr(end->id, (struct sockaddr *)&from, (struct sockaddr *)&to, RESOLVE_MS) != 0) {
		call_failed(comm, path, "rdma_resolve_addr", errno);
	} else {
		end->state = RESOLVING;
	}
}

static void address_resolved(struct tp_ib_comm *comm, struct tp_ib_path *path, struct end *end)
{
	const char *wrong = other_port(path, end->id);
	char way[320];

	way_text(comm, path, way, sizeof(way));
	if (wrong) tp_ib_path_failed(comm, path, "%s than it was to take, %s", wrong, way);
	else if (comm->cm->lib->resolve_route(end->id, RESOLVE_MS) != 0) call_failed(comm, path, "rdma_resolve_route", errno);
	else end->state = ROUTING;
}

static void route_resolved(struct tp_ib_comm *comm, struct tp_ib_path *path, struct end *end)
{
	struct tp_ib_wire_token token;
	struct rdma_conn_param param;

	fill_param(comm, path, end, &token, &param);
	if (comm->cm->lib->connect(end->id, &param) != 0) call_failed(comm, path, "rdma_connect", errno);
	else end->state = REQUESTED;
}

static void refuse(struct tp_ib_comm *comm, struct rdma_cm_id *id, const char *why)
{
	struct tp_ib_wire_refusal refusal;

	tp_ib_refusal_start(&refusal);
	snprintf(refusal.text, sizeof(refusal.text), "%s", why);
	comm->cm->lib->reject(id, &refusal, sizeof(refusal));
}

static bool is_ours(const struct tp_ib_comm *comm, const struct tp_ib_wire_token *token)
{
	return memcmp(token->token, comm->cm->token, sizeof(token->token)) == 0;
}

static void answered(struct tp_ib_comm *comm, struct tp_ib_path *path, struct end *end, const struct news *news)
{
	struct tp_ib_wire_token token;
	const char *wrong = tp_ib_token_read(news->data, news->bytes, &token), *call;
	char way[320];

	if (!wrong && (!is_ours(comm, &token) || token.path != end->path || token.qp != end->qp || token.attempt != path->attempt)) wrong = "its token is of another connection";
	if (wrong) {
		refuse(comm, end->id, wrong);
		way_text(comm, path, way, sizeof(way));
		tp_ib_path_failed(comm, path, "somebody else answers rdma_cm's connect request (%s), %s", wrong, way);
		return;
	}
	int error = move_all(comm, path, end, token.ece_vendor, token.ece_options, &call);
	if (error) {
		refuse(comm, end->id, "the connector's queue pair can't be moved");
		call_failed(comm, path, call, error);
	} else if (comm->cm->lib->establish(end->id) != 0) {
		call_failed(comm, path, "rdma_establish", errno);
	} else {
		end->state = UP;
	}
}

/* ---- the acceptor ---- */

/* NULL, or why this request is not one that the connection waits for; *mine: it is by somebody who knows its token. */
static const char *look_at(struct tp_ib_comm *comm, const struct rdma_cm_id *id, const struct news *news, struct tp_ib_wire_token *token, bool *mine)
{
	const char *wrong = tp_ib_token_read(news->data, news->bytes, token);

	*mine = !wrong && is_ours(comm, token);
	if (wrong) return wrong;
	if (!*mine) return "its token is of another connection";
	if (token->path >= comm->npaths || token->qp >= comm->nqps || !comm->paths[token->path].port) return "it is for a queue pair that there isn't";
	const struct tp_ib_path *path = &comm->paths[token->path];
	const struct ends *ends = ends_of(comm, path);
	if (!ends->begun || path->state != TP_IB_PATH_REVIVING || token->attempt != path->attempt) return "it is late: that path isn't being connected any more";
	if (ends->ends[token->qp].state != IDLE) return "that queue pair is connected already";
	if (memcmp(id->route.addr.addr.ibaddr.dgid.raw, path->remote.gid, sizeof(path->remote.gid)) != 0) return "it comes from an address that isn't the path's";
	return other_port(path, id);
}

static void request_came(struct tp_ib_comm *comm, const struct news *news)
{
	struct tp_ib_cm *cm = comm->cm;
	struct tp_ib_wire_token token, answer;
	struct rdma_conn_param param;
	const char *call;
	bool mine;
	const char *wrong = look_at(comm, news->id, news, &token, &mine);

	if (wrong) {
		char from[48];
		tp_ib_gid_format(news->id->route.addr.addr.ibaddr.dgid.raw, from);
		refuse(comm, news->id, wrong);
		cm->lib->destroy_id(news->id);
		if (!cm->told || mine) TP_INFO(TP_NET, "NET/IB : rank %d -> rank %d : a connect request of rdma_cm from %s to port %u is refused: %s%s", comm->from, comm->to, from, cm->port, wrong,
			mine ? "" : " (a stranger; more won't be logged)");
		cm->told |= !mine;
		return;
	}
	struct tp_ib_path *path = &comm->paths[token.path];
	struct end *end = &ends_of(comm, path)->ends[token.qp];
	end->id = news->id;
	end->id->context = end;
	int error = move_all(comm, path, end, path->remote.ece_vendor, path->remote.ece_options, &call);
	if (error) {
		char why[128];
		snprintf(why, sizeof(why), "Call to %s failed there: %s", call, strerror(error));
		refuse(comm, end->id, why);
		call_failed(comm, path, call, error);
		return;
	}
	fill_param(comm, path, end, &answer, &param);
	if (path->ece.vendor_id) path->ece = tp_ib_qp_query_ece(comm, path, end->qp);
	answer.ece_vendor = path->ece.vendor_id;
	answer.ece_options = path->ece.options;
	if (cm->lib->accept(end->id, &param) != 0) call_failed(comm, path, "rdma_accept", errno);
	else end->state = ANSWERED;
}

/* ---- events ---- */

/* Of what had been there: the peer closes what it leaves, so that this is no failure yet. */
static void lose(struct tp_ib_comm *comm, struct tp_ib_path *path, const struct news *news)
{
	struct ends *ends = ends_of(comm, path);

	if (ends->lost_ms) return;
	ends->lost_ms = tp_clock_ms();
	event_text(comm, path, news, ends->lost, sizeof(ends->lost));
}

/* One that stands by isn't missed by anybody yet. */
static void fail(struct tp_ib_comm *comm, struct tp_ib_path *path, const char *text)
{
	if (path->state == TP_IB_PATH_LIVE && path->at < 0) TP_INFO(TP_NET, "NET/IB : rank %d -> rank %d : a path that stands by is lost: %s", comm->from, comm->to, text);
	tp_ib_path_failed(comm, path, "%s", text);
}

static void on_end(struct tp_ib_comm *comm, struct end *end, const struct news *news)
{
	struct tp_ib_path *path = &comm->paths[end->path];
	bool there = end->state >= ANSWERED;
	char text[704];

	switch (news->event) {
	case RDMA_CM_EVENT_ADDR_RESOLVED:
		if (end->state == RESOLVING) address_resolved(comm, path, end);
		return;
	case RDMA_CM_EVENT_ROUTE_RESOLVED:
		if (end->state == ROUTING) route_resolved(comm, path, end);
		return;
	case RDMA_CM_EVENT_CONNECT_RESPONSE:
		if (end->state == REQUESTED) answered(comm, path, end, news);
		return;
	case RDMA_CM_EVENT_ESTABLISHED:
		if (end->state == ANSWERED) end->state = UP;
		return;
	case RDMA_CM_EVENT_TIMEWAIT_EXIT: return;
	case RDMA_CM_EVENT_DISCONNECTED: case RDMA_CM_EVENT_ADDR_CHANGE: case RDMA_CM_EVENT_UNREACHABLE: case RDMA_CM_EVENT_CONNECT_ERROR: case RDMA_CM_EVENT_REJECTED:
		if (there) {
			lose(comm, path, news);
			return;
		}
		break;
	default: break;
	}
	event_text(comm, path, news, text, sizeof(text));
	fail(comm, path, text);
}

static void on_event(struct tp_ib_comm *comm, const struct news *news)
{
	struct end *end;

	if (news->event == RDMA_CM_EVENT_CONNECT_REQUEST) {
		request_came(comm, news);
		return;
	}
	if (news->id == comm->cm->listener) {
		TP_INFO(TP_NET, "NET/IB : rank %d -> rank %d : %s at the port where rdma_cm listens: %s", comm->from, comm->to, tp_rdmacm_event_name(news->event),
			tp_rdmacm_event_advice(news->event, news->status));
		return;
	}
	end = news->id->context;
	if (end && end->id == news->id && comm->paths[end->path].state != TP_IB_PATH_DEAD) on_end(comm, end, news);
}

void tp_ib_cm_step(struct tp_ib_comm *comm)
{
	struct tp_ib_cm *cm = comm->cm;
	struct rdma_cm_event *event;
	struct news news;

	for (int i = 0; i < EVENTS_MAX && cm->lib->get_cm_event(cm->channel, &event) == 0; i++) {
		const struct rdma_conn_param *conn = &event->param.conn;
		bool speaks = event->event == RDMA_CM_EVENT_CONNECT_REQUEST || event->event == RDMA_CM_EVENT_CONNECT_RESPONSE || event->event == RDMA_CM_EVENT_REJECTED;

		news = (struct news){ .event = (int)event->event, .status = event->status, .id = event->id };
		if (speaks && conn->private_data) {
			news.bytes = conn->private_data_len;
			memcpy(news.data, conn->private_data, news.bytes);
		}
		cm->lib->ack_cm_event(event);
		on_event(comm, &news);
	}
}

void tp_ib_cm_begin(struct tp_ib_comm *comm, struct tp_ib_path *path)
{
	struct ends *ends = ends_of(comm, path);

	tp_ib_cm_drop(comm, path);
	ends->begun = true;
	ends->since_ms = tp_clock_ms();
	for (int q = 0; q < comm->nqps && comm->sending && path->state == TP_IB_PATH_REVIVING; q++) ask(comm, path, &ends->ends[q]);
}

void tp_ib_cm_look(struct tp_ib_comm *comm)
{
	uint64_t now;

	tp_ib_cm_step(comm);
	now = tp_clock_ms();
	for (int p = 0; p < comm->npaths; p++) {
		struct ends *ends = &comm->cm->paths[p];
		bool over = atomic_load_explicit(&comm->control.closed, memory_order_acquire);      /* pairs with the watch thread's */
		if (!ends->lost_ms || over || now - ends->lost_ms < LOST_GRACE_MS) continue;
		ends->lost_ms = 0;
		fail(comm, &comm->paths[p], ends->lost);
	}
}

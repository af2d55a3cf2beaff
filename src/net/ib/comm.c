/* A connection: its registered block, its paths, its end. */
#include <errno.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "net/ib/ib.h"

#define QUEUE_DEPTH 128
#define CLOSE_MS 2000
#define CONNECT_MS 10000                    /* for rdma_cm to connect a path */
#define OTHERS_MS 5000                      /* the same, where there is one already */

ncclResult_t tp_ib_comm_create(bool sending, const struct tp_net_hello *who, int nqps, struct tp_ib_comm **out)
{
	struct tp_ib_comm *comm = tp_alloc(1, sizeof(*comm), "an RDMA connection");

	if (!comm) return ncclSystemError;
	/* Pages of its own: a card writes there, and a forked child must not share them. */
	comm->block = mmap(NULL, sizeof(*comm->block), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (comm->block == MAP_FAILED) {
		free(comm);
		return TP_FAIL(ncclSystemError, "NET/IB : no memory (%zu bytes) for a connection: %s", sizeof(*comm->block), strerror(errno));
	}
	tp_ib_params_read(&comm->params);
	comm->sending = sending;
	comm->from = who->from;
	comm->to = who->to;
	comm->any_order = who->any_order;
	comm->nqps = nqps;
	comm->sq_depth = QUEUE_DEPTH;
	comm->rq_depth = sending ? 1 : TP_IB_RING;
	comm->split = comm->params.split;
	comm->control.fd = -1;
	comm->switch_below = UINT64_MAX;            /* the first switch is no repetition, whatever message it is at */
	pthread_mutex_init(&comm->control.lock, NULL);
	snprintf(comm->peer_host, sizeof(comm->peer_host), "?");
	strcpy(comm->peer, "?");
	*out = comm;
	return ncclSuccess;
}

void tp_ib_comm_destroy(struct tp_ib_comm *comm)
{
	if (!comm) return;
	/* First, so that the peer doesn't take what comes now for a path that failed. */
	tp_ib_control_remove(&comm->control);
	tp_ib_flush_destroy(comm);
	for (int p = 0; p < comm->npaths; p++) tp_ib_qps_destroy(comm, &comm->paths[p]);
	tp_ib_cm_destroy(comm);
	for (int c = 0; c < comm->ncontexts; c++)
		if (comm->channels[c]) comm->contexts[c]->verbs->destroy_comp_channel(comm->channels[c]);
	pthread_mutex_destroy(&comm->control.lock);
	munmap(comm->block, sizeof(*comm->block));
	free(comm);
}

/* The card's place among those of the connection; where it is new, behind them. */
static int key_of(const struct tp_ib_comm *comm, const struct tp_ib_context *context)
{
	int key = 0;

	while (key < comm->ncontexts && comm->contexts[key] != context) key++;
	return key;
}

bool tp_ib_comm_has_room(const struct tp_ib_comm *comm, const struct tp_ib_port *port)
{
	return comm->npaths < TP_IB_MAX_PATHS && key_of(comm, port->context) < TP_IB_MAX_KEYS;
}

ncclResult_t tp_ib_comm_add_path(struct tp_ib_comm *comm, int way, struct tp_ib_port *port, const struct tp_ib_gid_choice *gid)
{
	struct tp_ib_path *path = &comm->paths[comm->npaths];

	path->way = way;
	path->at = -1;
	comm->nways = TP_MAX(comm->nways, way + 1);
	if (!port) {
		comm->npaths++;
		return ncclSuccess;
	}
	path->key = key_of(comm, port->context);
	if (path->key == comm->ncontexts) comm->contexts[comm->ncontexts++] = port->context;
	comm->sq_depth = (uint32_t)TP_MIN((int)comm->sq_depth, TP_MAX(port->context->attr.max_qp_wr, 1));
	path->port = port;
	path->gid = *gid;
	comm->npaths++;
	return tp_ib_qps_create(comm, path);
}

void tp_ib_describe_set(char *out, size_t bytes)
{
	size_t used = 0;

	out[0] = 0;
	for (int i = 0; i < tp_ib_port_count() && used < bytes; i++)
		used += (size_t)snprintf(out + used, bytes - used, "%s%s %s %g Gb/s", i ? ", " : "", tp_ib_port(i)->text,
			tp_ib_port(i)->attr.link_layer == IBV_LINK_LAYER_ETHERNET ? "RoCE" : "IB", tp_ib_port(i)->mbps / 1000.0);
}

/* What the ports are, whatever they are called. */
static uint64_t kinds(void)
{
	uint64_t hash = 0;

	for (int i = 0; i < tp_ib_port_count(); i++) {
		const uint32_t kind[] = { tp_ib_port(i)->attr.link_layer, tp_ib_port(i)->mbps };
		hash = tp_hash64(kind, sizeof(kind), hash);
	}
	return hash;
}

static uint16_t flid_of(const struct tp_ib_comm *comm, const struct tp_ib_port *port)
{
	const struct tp_ib_context *context = port->context;
	union ibv_gid gid;

	if (port->attr.link_layer != IBV_LINK_LAYER_INFINIBAND || comm->params.flid_gid_index >= port->attr.gid_tbl_len) return 0;
	if (context->verbs->query_gid(context->ibv, port->number, comm->params.flid_gid_index, &gid) != 0) return 0;
	/* A routable GID has the forwarding LID in bytes 4 and 5 of its prefix, under fec0::. */
	return gid.raw[0] == 0xfe && gid.raw[1] == 0xc0 ? (uint16_t)(gid.raw[4] << 8 | gid.raw[5]) : 0;
}

void tp_ib_comm_describe(struct tp_ib_comm *comm, struct tp_ib_wire_meta *out)
{
	memset(out, 0, sizeof(*out));
	out->block = (uint64_t)(uintptr_t)comm->block;
	out->nqps = (uint32_t)comm->nqps;
	out->npaths = (uint32_t)comm->npaths;
	out->split = comm->split;
	out->ports = (uint32_t)tp_ib_port_count();
	out->rank = comm->sending ? comm->from : comm->to;
	snprintf(out->host, sizeof(out->host), "%s", tp_host_name());
	out->kinds = kinds();
	tp_ib_describe_set(out->set, sizeof(out->set));
	tp_ib_cm_describe(comm, out);
	for (int p = 0; p < comm->npaths; p++) {
		const struct tp_ib_path *path = &comm->paths[p];
		struct tp_ib_wire_path *w = &out->paths[p];

		w->way = (uint8_t)path->way;
		if (!path->port) continue;
		memcpy(w->gid, path->gid.raw, sizeof(w->gid));
		w->gid_type = (uint8_t)path->gid.type;
		w->gid_index = (uint8_t)path->gid.index;
		w->link_layer = path->port->attr.link_layer;
		w->port = path->port->number;
		w->mtu = (uint8_t)path->port->attr.active_mtu;
		w->lid = path->port->attr.lid;
		w->flid = flid_of(comm, path->port);
		w->rkey = path->mr->rkey;
		w->psn = path->psn;
		w->ece_vendor = path->ece.vendor_id;
		w->ece_options = path->ece.options;
		for (int q = 0; q < comm->nqps; q++) w->qpns[q] = path->qps[q].ibv->qp_num;
		w->index = (uint8_t)path->port->device;
		w->place = (uint8_t)path->port->place;
		w->key = (uint8_t)path->key;
		w->live = path->state == TP_IB_PATH_LIVE;
		snprintf(w->device, sizeof(w->device), "%.31s", path->port->context->name);
	}
}

const char *tp_ib_apart(const struct tp_ib_path *path, char *text, size_t bytes)
{
	char reason[256];
	const char *why;
	bool ethernet = path->port->attr.link_layer == IBV_LINK_LAYER_ETHERNET;

	/* A port that is down has neither routes nor addresses, and that is news of its own; so is a card that has failed. */
	if (atomic_load_explicit(&path->port->state, memory_order_relaxed) != IBV_PORT_ACTIVE || atomic_load_explicit(&path->port->context->fatal, memory_order_relaxed)) return NULL;
	/* Nor does a connection live longer than its address does. */
	if (ethernet && !tp_ib_port_still_has(path->port, path->gid.raw)) {
		snprintf(text, bytes, "%s no longer has GID %d %s: its interface's address has changed or is gone. Give it back, or start the job again", path->port->text, path->gid.index, path->gid.text);
		return text;
	}
	why = tp_ib_gid_unreachable(path->gid.raw, path->gid.type, path->remote.gid, path->remote.gid_type, ethernet, reason, sizeof(reason));
	if (!why) return NULL;
	snprintf(text, bytes, "the two addresses can't reach each other: %s. Set NCCL_IB_GID_INDEX, NCCL_IB_ADDR_FAMILY or NCCL_IB_ADDR_RANGE, or choose devices of one network by "
		"NCCL_IB_HCA", why);
	return text;
}

static void warn_unreachable(struct tp_ib_comm *comm, struct tp_ib_path *path)
{
	char text[512], names[512];
	const char *why = tp_ib_apart(path, text, sizeof(text));

	/* Once for two ports, however many ways lead over them. */
	for (const struct tp_ib_path *other = comm->paths; other < path; other++)
		if (other->port == path->port && memcmp(other->remote.gid, path->remote.gid, sizeof(path->remote.gid)) == 0) return;
	if (why) TP_WARN("NET/IB : %s : %s", tp_ib_name(comm, path, 0, names, sizeof(names)), why);
}

/* ---- ways ---- */

uint32_t tp_ib_live_mask(const struct tp_ib_comm *comm)
{
	uint32_t mask = 0;

	for (int p = 0; p < comm->npaths; p++)
		if (comm->paths[p].state == TP_IB_PATH_LIVE) mask |= 1u << p;
	return mask;
}

int tp_ib_best_way(const struct tp_ib_comm *comm, uint32_t mask, int *worth)
{
	int best = 0;

	*worth = 0;
	for (int way = 0; way < comm->nways; way++) {
		int paths = 0, found;
		for (int p = 0; p < comm->npaths; p++) paths += comm->paths[p].way == way && (mask >> p & 1);
		/* More paths are more than the connector's own device, which was chosen for its place in the machine. */
		found = paths > 0 ? 2 * paths + (int)(comm->home >> way & 1) : 0;
		if (found <= *worth) continue;
		best = way;
		*worth = found;
	}
	return best;
}

void tp_ib_use(struct tp_ib_comm *comm, int way, uint32_t mask)
{
	for (int i = 0; i < comm->nused; i++) comm->used[i]->at = -1;
	comm->active = way;
	comm->nused = 0;
	comm->max_bytes = UINT32_MAX;
	for (int p = 0; p < comm->npaths && comm->nused < TP_IB_MAX_MERGED; p++) {
		struct tp_ib_path *path = &comm->paths[p];
		if (path->way != way || !(mask >> p & 1)) continue;
		path->at = comm->nused;
		path->moved_ms = 0;
		path->probing = false;
		comm->used[comm->nused++] = path;
		comm->max_bytes = TP_MIN(comm->max_bytes, path->port->attr.max_msg_sz);
	}
}

/* Which ways lead over the device that the connector took: both ends know it from what the connector said of itself. */
static void find_home(struct tp_ib_comm *comm)
{
	int first = -1;

	for (int p = 0; p < comm->npaths; p++) {
		const struct tp_ib_path *path = &comm->paths[p];
		int device = comm->sending ? (path->port ? path->port->device : -1) : path->remote.index;
		if (!path->port) continue;
		if (first < 0) first = device;
		if (device == first) comm->home |= 1u << path->way;
	}
}

static const char *ece_text(const struct tp_ib_path *path, char *text, size_t bytes)
{
	text[0] = 0;
	if (path->ece.vendor_id) snprintf(text, bytes, ", ECE vendor 0x%x options 0x%x", path->ece.vendor_id, path->ece.options);
	return text;
}

/* A warning where a path isn't there that would have been used, from the first connection that lacks it. */
static void tell_of_dead(struct tp_ib_comm *comm)
{
	char names[512], next[256];

	tp_ib_used_text(comm, next, sizeof(next));
	for (int p = 0; p < comm->npaths; p++) {
		struct tp_ib_path *path = &comm->paths[p];
		if (!path->port || path->state != TP_IB_PATH_DEAD) continue;
		bool missed = path->way == comm->active || (comm->home >> path->way & 1);
		tp_ib_name(comm, path, 0, names, sizeof(names));
		if (missed && tp_ib_port_may_warn(path->port))
			TP_WARN("NET/IB : %s can't be connected: %s. This connection begins over %s, and so may others; that path is tried again", names, path->why, next);
		else TP_INFO(TP_NET, "NET/IB : %s can't be connected: %s", names, path->why);
	}
}

ncclResult_t tp_ib_comm_learn(struct tp_ib_comm *comm, const struct tp_ib_wire_meta *peer)
{
	int live = 0;

	comm->remote_block = peer->block;
	tp_ib_cm_learn(comm, peer);
	snprintf(comm->peer_host, sizeof(comm->peer_host), "%s", peer->host);
	for (int p = 0; p < comm->npaths; p++) {
		struct tp_ib_path *path = &comm->paths[p];

		if (!path->port || p >= (int)peer->npaths || peer->paths[p].port == 0) {
			tp_ib_qps_destroy(comm, path);
			continue;
		}
		path->remote = peer->paths[p];
		path->since_ms = tp_clock_ms();
		warn_unreachable(comm, path);
		if (comm->cm) {
			path->state = TP_IB_PATH_REVIVING;
			tp_ib_cm_begin(comm, path);
			continue;
		}
		/* Of several, one that can't be had is no error: it may come to life later. */
		ncclResult_t result = ncclRemoteError;
		if (comm->sending && !path->remote.live) snprintf(path->why, sizeof(path->why), "%.64s can't connect its end", peer->host);
		else result = tp_ib_qps_connect(comm, path, live > 0 || p + 1 < comm->npaths);
		path->state = result == ncclSuccess ? TP_IB_PATH_LIVE : TP_IB_PATH_DEAD;
		live += result == ncclSuccess;
		if (result != ncclSuccess) path->next_ms = tp_clock_ms() + 1000;
	}
	return ncclSuccess;
}

void tp_ib_comm_connecting(struct tp_ib_comm *comm, bool *over)
{
	uint64_t now = tp_clock_ms();
	char text[704];

	*over = true;
	if (!comm->cm) return;
	tp_ib_cm_step(comm);
	for (int p = 0; p < comm->npaths; p++) {
		struct tp_ib_path *path = &comm->paths[p];
		if (path->state != TP_IB_PATH_REVIVING || !tp_ib_cm_is_up(comm, path)) continue;
		path->state = TP_IB_PATH_LIVE;
		path->since_ms = now;
	}
	for (int p = 0; p < comm->npaths; p++) {
		struct tp_ib_path *path = &comm->paths[p];
		if (path->state != TP_IB_PATH_REVIVING) continue;
		/* The acceptor waits for what the connector says, which may ask late. */
		if (!comm->sending || now - path->since_ms < (tp_ib_live_mask(comm) ? OTHERS_MS : CONNECT_MS)) *over = false;
		else tp_ib_path_failed(comm, path, "%s", tp_ib_cm_waits_for(comm, path, text, sizeof(text)));
	}
}

static ncclResult_t nothing_in_common(const struct tp_ib_comm *comm, const struct tp_ib_wire_meta *peer)
{
	struct tp_ib_gid_choice gid;
	bool any = false, meet = false;
	char own[256];

	for (int i = 0; i < tp_ib_port_count(); i++) {
		any |= tp_ib_port_has_gid(tp_ib_port(i), &gid);
		meet |= tp_ib_port(i)->attr.link_layer == peer->paths[0].link_layer;
	}
	/* It says why. An address that has come meanwhile is none that the peer was told of. */
	if (!any) TP_TRY(tp_ib_port_gid(tp_ib_port(0), &gid));
	tp_ib_describe_set(own, sizeof(own));
	return TP_FAIL(ncclInvalidUsage, "NET/IB : rank %d -> rank %d: the ports of %s (%s) and those of %s (%s) have no pair in common%s. NCCL_IB_HCA names the ports to use, "
		"NCCL_NET=Socket does without", comm->from, comm->to, tp_host_name(), own, peer->host, peer->set, meet ? "" : ": InfiniBand and RoCE don't meet");
}

ncclResult_t tp_ib_comm_connected(struct tp_ib_comm *comm, const struct tp_ib_wire_meta *peer)
{
	int worth;
	char names[512], ece[64];

	find_home(comm);
	tp_ib_use(comm, tp_ib_best_way(comm, tp_ib_live_mask(comm), &worth), tp_ib_live_mask(comm));
	for (int p = 0; p < comm->npaths; p++)
		if (comm->paths[p].state == TP_IB_PATH_LIVE)
			TP_INFO(TP_NET, "NET/IB : %s%s connected%s%s", tp_ib_name(comm, &comm->paths[p], 0, names, sizeof(names)), ece_text(&comm->paths[p], ece, sizeof(ece)),
				comm->cm ? " by rdma_cm" : "", comm->paths[p].at < 0 ? ", stands by" : "");
	/* The acceptor's are said once the connector has told of its own. */
	if (comm->nused > 0 && comm->sending) tell_of_dead(comm);
	if (comm->nused > 0) return ncclSuccess;
	for (int p = 0; p < comm->npaths; p++)
		if (comm->paths[p].port)
			return TP_FAIL(ncclSystemError, "NET/IB : rank %d -> rank %d: no path could be connected: %s", comm->from, comm->to, comm->paths[p].why);
	return nothing_in_common(comm, peer);
}

ncclResult_t tp_ib_comm_settle(struct tp_ib_comm *comm, const struct tp_ib_wire_revive *ready)
{
	uint32_t live = tp_ib_live_mask(comm) & ready->attempt;
	int worth, way = tp_ib_best_way(comm, live, &worth);

	if (tp_ib_wire_check_revive(ready) || worth == 0 || (int)ready->path != way)
		return TP_FAIL(ncclRemoteError, "NET/IB : rank %d -> rank %d: %s wants to use way %u, which isn't there", comm->from, comm->to, comm->peer_host, ready->path);
	for (int p = 0; p < comm->npaths; p++)
		if (!(ready->attempt >> p & 1)) tp_ib_path_failed(comm, &comm->paths[p], "%.64s can't connect its end", comm->peer_host);
	tp_ib_use(comm, way, live);
	tell_of_dead(comm);
	tp_ib_expect(comm);
	return ncclSuccess;
}

/* A good end: what was posted must be through before the queue pairs go, for the peer may still wait for it. */
static void finish_sending(struct tp_ib_comm *comm)
{
	uint64_t until = tp_clock_ms() + CLOSE_MS;

	while (comm->below < comm->head && comm->error == ncclSuccess && tp_clock_ms() < until) {
		if (atomic_load_explicit(&comm->control.closed, memory_order_acquire) || tp_ib_progress(comm) != ncclSuccess) return;
		if (comm->below < comm->head) sched_yield();
	}
}

ncclResult_t tp_ib_close(void *handle)
{
	struct tp_ib_comm *comm = handle;

	struct tp_ib_record record;

	/* A forked child has no part in it: what it closes stays open for its parent. */
	if (comm && tp_ib_control_is_inherited(&comm->control)) {
		close(comm->control.fd);
		tp_ib_cm_abandon(comm);
		munmap(comm->block, sizeof(*comm->block));
		free(comm);
		return ncclSuccess;
	}
	if (comm && comm->sending && comm->leaving) {
		finish_sending(comm);
		/* The receiver's posted receives are no data that it waits for. */
		tp_ib_record_start(&record, TP_IB_LEAVING);
		if (comm->error == ncclSuccess && comm->below == comm->head) tp_ib_control_send(&comm->control, &record);
	}
	/* The sender's card may still wait for acknowledgements that our queue pairs take with them. */
	if (comm && !comm->sending && comm->error == ncclSuccess) {
		tp_ib_record_start(&record, TP_IB_LEAVING);
		tp_ib_report(comm, &record.as.change);
		tp_ib_control_send(&comm->control, &record);
	}
	tp_ib_comm_destroy(comm);
	return ncclSuccess;
}

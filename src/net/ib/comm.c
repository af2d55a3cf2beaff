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
	comm->nqps = nqps;
	comm->sq_depth = QUEUE_DEPTH;
	comm->rq_depth = sending ? 1 : TP_IB_RING;
	comm->split = comm->params.split;
	comm->control.fd = -1;
	comm->moved_ms = tp_clock_ms();
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
	for (int p = 0; p < comm->npaths; p++) tp_ib_qps_destroy(comm, &comm->paths[p]);
	pthread_mutex_destroy(&comm->control.lock);
	munmap(comm->block, sizeof(*comm->block));
	free(comm);
}

ncclResult_t tp_ib_comm_add_path(struct tp_ib_comm *comm, struct tp_ib_port *port, const struct tp_ib_gid_choice *gid)
{
	struct tp_ib_path *path = &comm->paths[comm->npaths];

	comm->sq_depth = (uint32_t)TP_MIN((int)comm->sq_depth, TP_MAX(port->context->attr.max_qp_wr, 1));
	path->port = port;
	path->gid = *gid;
	comm->npaths++;
	return tp_ib_qps_create(comm, path);
}

/* The set of ports in words, for messages about two that differ. */
static void describe_set(char *out, size_t bytes)
{
	size_t used = 0;

	out[0] = 0;
	for (int i = 0; i < tp_ib_port_count() && used < bytes; i++) used += (size_t)snprintf(out + used, bytes - used, "%s%s", i ? "," : "", tp_ib_port(i)->text);
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
	describe_set(out->set, sizeof(out->set));
	for (int p = 0; p < comm->npaths; p++) {
		const struct tp_ib_path *path = &comm->paths[p];
		struct tp_ib_wire_path *w = &out->paths[p];

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
		for (int q = 0; q < comm->nqps; q++) w->qpns[q] = path->qps[q].ibv->qp_num;
		w->index = (uint8_t)(path->port - tp_ib_port(0));
		w->live = path->state == TP_IB_PATH_LIVE;
		snprintf(w->device, sizeof(w->device), "%.31s", path->port->context->name);
	}
}

static void warn_unreachable(struct tp_ib_comm *comm, struct tp_ib_path *path)
{
	char text[256], names[512];
	bool ethernet = path->port->attr.link_layer == IBV_LINK_LAYER_ETHERNET;
	const char *why = tp_ib_gid_unreachable(path->gid.raw, path->gid.type, path->remote.gid, path->remote.gid_type, ethernet, text, sizeof(text));

	if (why)
		TP_WARN("NET/IB : %s : the two addresses can't reach each other: %s. Set NCCL_IB_GID_INDEX, NCCL_IB_ADDR_FAMILY or NCCL_IB_ADDR_RANGE, or choose devices of one "
			"network by NCCL_IB_HCA", tp_ib_name(comm, path, 0, names, sizeof(names)), why);
}

ncclResult_t tp_ib_comm_learn(struct tp_ib_comm *comm, const struct tp_ib_wire_meta *peer)
{
	int live = 0;
	char names[512];

	comm->remote_block = peer->block;
	snprintf(comm->peer_host, sizeof(comm->peer_host), "%s", peer->host);
	for (int p = 0; p < comm->npaths; p++) {
		struct tp_ib_path *path = &comm->paths[p];

		if (!path->port || p >= (int)peer->npaths || peer->paths[p].port == 0) {
			tp_ib_qps_destroy(comm, path);
			continue;
		}
		path->remote = peer->paths[p];
		warn_unreachable(comm, path);
		/* Of several, one that can't be had is no error: it may come to life later. */
		ncclResult_t result = ncclRemoteError;
		if (comm->sending && !path->remote.live) snprintf(path->why, sizeof(path->why), "%.64s can't connect its end", peer->host);
		else result = tp_ib_qps_connect(comm, path, live > 0 || p + 1 < comm->npaths);
		path->since_ms = tp_clock_ms();
		path->state = result == ncclSuccess ? TP_IB_PATH_LIVE : TP_IB_PATH_DEAD;
		if (result == ncclSuccess && live++ == 0) comm->active = p;
		if (result != ncclSuccess) path->next_ms = tp_clock_ms() + 1000;
		if (result == ncclSuccess && !comm->sending) tp_ib_expect(comm, path);
		TP_INFO(TP_NET, "NET/IB : %s %s%s%s", tp_ib_name(comm, path, 0, names, sizeof(names)), result == ncclSuccess ? "connected" : "can't be connected: ",
			result == ncclSuccess ? "" : path->why, result == ncclSuccess && comm->active != p ? ", stands by" : "");
	}
	if (live > 0) return ncclSuccess;
	for (int p = 0; p < comm->npaths; p++)
		if (comm->paths[p].port)
			return TP_FAIL(ncclSystemError, "NET/IB : rank %d -> rank %d: no path could be connected: %s", comm->from, comm->to, comm->paths[p].why);
	return TP_FAIL(ncclInvalidUsage, "NET/IB : rank %d -> rank %d: this side's ports (%s) and those of %s (%s) have no pair in common", comm->from, comm->to,
		comm->paths[0].port ? comm->paths[0].port->text : "?", peer->host, peer->set);
}

ncclResult_t tp_ib_comm_settle(struct tp_ib_comm *comm, const struct tp_ib_wire_revive *ready)
{
	if (tp_ib_wire_check_revive(ready) || (int)ready->path >= comm->npaths || comm->paths[ready->path].state != TP_IB_PATH_LIVE)
		return TP_FAIL(ncclRemoteError, "NET/IB : rank %d -> rank %d: %s wants to use path %u, which isn't there", comm->from, comm->to, comm->peer_host, ready->path);
	comm->active = (int)ready->path;
	for (int p = 0; p < comm->npaths; p++)
		if (!(ready->attempt >> p & 1)) tp_ib_path_failed(comm, &comm->paths[p], "%.64s can't connect its end", comm->peer_host);
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
		munmap(comm->block, sizeof(*comm->block));
		free(comm);
		return ncclSuccess;
	}
	if (comm && comm->sending && comm->leaving) finish_sending(comm);
	/* The sender's card may still wait for acknowledgements that our queue pairs take with them. */
	if (comm && !comm->sending && comm->error == ncclSuccess) {
		tp_ib_record_start(&record, TP_IB_LEAVING);
		tp_ib_report(comm, &record.as.change);
		tp_ib_control_send(&comm->control, &record);
	}
	tp_ib_comm_destroy(comm);
	return ncclSuccess;
}

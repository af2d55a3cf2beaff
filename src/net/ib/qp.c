/* Queue pairs: made, moved through their states, posted to. */
#include <errno.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "net/ib/ib.h"

#define DRAIN_MS 200
#define DRAIN_LOOKS 30

/* count: how many requests are posted together with it; when the last is over, all are. */
uint64_t tp_ib_wr_id(enum tp_ib_kind kind, const struct tp_ib_path *path, int q, int count, uint64_t message)
{
	uint32_t position = path->qps[q].posted + (uint32_t)count;

	return (uint64_t)kind << 56 | (uint64_t)q << 48 | (uint64_t)(path->generation & 0xffff) << 32 | (uint64_t)(position & 0xffff) << 16 | (message & 0xffff);
}

static ncclResult_t create_one(struct tp_ib_comm *comm, struct tp_ib_path *path, int q)
{
	const struct tp_ib_context *context = path->port->context;
	struct ibv_qp_init_attr init = { .send_cq = path->cq, .recv_cq = path->cq, .qp_type = IBV_QPT_RC };
	char hint[320];

	init.cap.max_send_wr = comm->sq_depth;
	init.cap.max_recv_wr = comm->rq_depth;
	init.cap.max_send_sge = (uint32_t)TP_MIN(TP_NET_MAX_PARTS, TP_MAX(context->attr.max_sge, 1));
	init.cap.max_recv_sge = 1;
	init.cap.max_inline_data = comm->params.use_inline ? sizeof(struct tp_ib_fifo) : 0;
	errno = 0;
	path->qps[q].ibv = context->verbs->create_qp(context->pd, &init);
	if (path->qps[q].ibv) return ncclSuccess;
	int error = errno ? errno : ENOMEM;
	return TP_FAIL(ncclSystemError, "NET/IB : %s : Call to ibv_create_qp (%u send, %u receive requests) failed: %s%s", path->port->text, comm->sq_depth, comm->rq_depth,
		strerror(error), tp_ib_memlock_hint(error, hint, sizeof(hint)));
}

/* Enhanced connection establishment: the connector says what its card can beyond the standard, the acceptor's card takes of that
 * what it can too, and both use it. Where a card or the library can't, nothing is agreed. */
static bool may_use_ece(const struct tp_ib_comm *comm, const struct tp_ib_path *path)
{
	const struct tp_verbs *v = path->port->context->verbs;

	return comm->params.ece && v->query_ece && v->set_ece;
}

struct ibv_ece tp_ib_qp_query_ece(const struct tp_ib_comm *comm, const struct tp_ib_path *path, int q)
{
	struct ibv_ece ece = { 0 };

	if (may_use_ece(comm, path) && path->port->context->verbs->query_ece(path->qps[q].ibv, &ece) == 0 && ece.vendor_id)
		return (struct ibv_ece){ .vendor_id = ece.vendor_id, .options = ece.options };
	return (struct ibv_ece){ 0 };
}

void tp_ib_qp_set_ece(const struct tp_ib_comm *comm, struct tp_ib_path *path, int q, uint32_t vendor, uint32_t options)
{
	struct ibv_ece ece = { .vendor_id = vendor, .options = options };
	int error = 0;

	path->ece = (struct ibv_ece){ 0 };
	if (!vendor || !may_use_ece(comm, path)) return;
	error = path->port->context->verbs->set_ece(path->qps[q].ibv, &ece);
	if (!error) path->ece = (struct ibv_ece){ .vendor_id = vendor, .options = options };
	else TP_INFO(TP_NET, "NET/IB : %s : ECE vendor 0x%x options 0x%x of %s can't be used here: %s", path->port->text, vendor, options, comm->peer_host, strerror(error));
}

/* Before the queue pairs go to RTR. */
static void set_ece(const struct tp_ib_comm *comm, struct tp_ib_path *path)
{
	tp_ib_qp_set_ece(comm, path, 0, path->remote.ece_vendor, path->remote.ece_options);
	for (int q = 1; q < comm->nqps && path->ece.vendor_id; q++) tp_ib_qp_set_ece(comm, path, q, path->remote.ece_vendor, path->remote.ece_options);
}

ncclResult_t tp_ib_qps_create(struct tp_ib_comm *comm, struct tp_ib_path *path)
{
	const struct tp_verbs *v = path->port->context->verbs;
	struct ibv_context *ibv = path->port->context->ibv;
	int entries = comm->nqps * (int)(comm->sq_depth + comm->rq_depth);

	path->qps = tp_alloc((size_t)comm->nqps, sizeof(*path->qps), "queue pairs");
	if (!path->qps) return ncclSystemError;
	if (!comm->channels[path->key]) {
		comm->channels[path->key] = v->create_comp_channel(ibv);
		if (!comm->channels[path->key]) return TP_FAIL(ncclSystemError, "NET/IB : %s : Call to ibv_create_comp_channel failed: %s", path->port->text, strerror(errno));
		TP_TRY(tp_socket_set_nonblocking(comm->channels[path->key]->fd, true));
	}
	errno = 0;
	path->cq = v->create_cq(ibv, TP_MIN(entries, path->port->context->attr.max_cqe), path, comm->channels[path->key], 0);
	if (!path->cq) {
		char hint[320];
		int error = errno ? errno : ENOMEM;
		return TP_FAIL(ncclSystemError, "NET/IB : %s : Call to ibv_create_cq of %d entries failed: %s%s", path->port->text, entries, strerror(error),
			tp_ib_memlock_hint(error, hint, sizeof(hint)));
	}
	errno = 0;
	path->mr = v->reg_mr(path->port->context->pd, comm->block, sizeof(*comm->block), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	if (!path->mr) return tp_ib_reg_failed(path->port->context, sizeof(*comm->block), "a connection's FIFO", errno ? errno : ENOMEM);
	for (int q = 0; q < comm->nqps; q++) TP_TRY(create_one(comm, path, q));
	if (comm->sending) path->ece = tp_ib_qp_query_ece(comm, path, 0);
	return tp_ib_qps_prepare(comm, path, false);
}

void tp_ib_qps_destroy(struct tp_ib_comm *comm, struct tp_ib_path *path)
{
	if (!path->port) return;
	const struct tp_verbs *v = path->port->context->verbs;

	tp_ib_cm_drop(comm, path);
	for (int q = 0; path->qps && q < comm->nqps; q++)
		if (path->qps[q].ibv) v->destroy_qp(path->qps[q].ibv);
	if (path->cq && path->unacked_events) v->ack_cq_events(path->cq, path->unacked_events);
	if (path->cq) v->destroy_cq(path->cq);
	if (path->mr) v->dereg_mr(path->mr);
	free(path->qps);
	*path = (struct tp_ib_path){ .way = path->way, .at = -1 };
}

void tp_ib_qp_fill(struct tp_ib_comm *comm, struct tp_ib_path *path, int q)
{
	struct tp_ib_qp *qp = &path->qps[q];

	while (qp->receives < comm->rq_depth) {
		struct ibv_recv_wr wr = { .wr_id = tp_ib_wr_id(TP_IB_RECEIVE, path, q, 0, 0) }, *bad;
		int error = ibv_post_recv(qp->ibv, &wr, &bad);
		if (error) {
			tp_ib_path_failed(comm, path, "a receive can't be posted: %s", strerror(error));
			return;
		}
		qp->receives++;
	}
}

/* The kernel resolves the peer's address here, which may take its time; NCCL tries again, and so do we. */
static int modify(const struct tp_ib_comm *comm, const struct tp_ib_path *path, struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask, bool quiet)
{
	int error = 0;

	for (int tries = 0; ; tries++) {
		error = path->port->context->verbs->modify_qp(qp, attr, mask);
		if (error == 0 || quiet || tries >= comm->params.modify_retries || (error != ETIMEDOUT && !comm->params.modify_retry_all)) return error;
		if (tries == 0) TP_INFO(TP_NET, "NET/IB : %s : Call to ibv_modify_qp failed: %s, will retry", path->port->text, strerror(error));
		struct timespec pause = { comm->params.modify_retry_ms / 1000, comm->params.modify_retry_ms % 1000 * 1000000L };
		nanosleep(&pause, NULL);
	}
}

int tp_ib_qp_modify(const struct tp_ib_comm *comm, const struct tp_ib_path *path, int q, struct ibv_qp_attr *attr, int mask)
{
	return modify(comm, path, path->qps[q].ibv, attr, mask, true);
}

ncclResult_t tp_ib_qps_prepare(struct tp_ib_comm *comm, struct tp_ib_path *path, bool quiet)
{
	path->open = true;
	for (int q = 0; q < comm->nqps; q++) {
		struct tp_ib_qp *qp = &path->qps[q];
		struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RESET };
		int error = qp->ibv->state != IBV_QPS_RESET ? modify(comm, path, qp->ibv, &attr, IBV_QP_STATE, quiet) : 0;

		if (error == 0) {
			attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_INIT, .pkey_index = (uint16_t)comm->params.pkey, .port_num = path->port->number,
				.qp_access_flags = IBV_ACCESS_REMOTE_WRITE };
			error = modify(comm, path, qp->ibv, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, quiet);
		}
		if (error)
			return TP_FAIL(ncclSystemError, "NET/IB : %s : Call to ibv_modify_qp failed: %s, to INIT with partition key index %d (NCCL_IB_PKEY); the port has %u",
				path->port->text, strerror(error), comm->params.pkey, path->port->attr.pkey_tbl_len);
		qp->posted = qp->freed = qp->receives = qp->since_signal = 0;
		if (!comm->sending) tp_ib_qp_fill(comm, path, q);
	}
	tp_secret_random(&path->psn, sizeof(path->psn));
	path->psn &= 0xffffff;
	return ncclSuccess;
}

static void fill_address(const struct tp_ib_comm *comm, const struct tp_ib_path *path, struct ibv_ah_attr *ah)
{
	bool ethernet = path->port->attr.link_layer == IBV_LINK_LAYER_ETHERNET;
	/* Other subnets of InfiniBand are reached by GID. */
	bool routed = !ethernet && memcmp(path->gid.raw, path->remote.gid, 8) != 0;

	*ah = (struct ibv_ah_attr){ .sl = (uint8_t)comm->params.sl, .port_num = path->port->number, .dlid = path->remote.lid };
	if (routed && path->remote.flid) ah->dlid = path->remote.flid;
	if (!ethernet && !routed) return;
	ah->is_global = 1;
	memcpy(ah->grh.dgid.raw, path->remote.gid, 16);
	ah->grh.sgid_index = (uint8_t)path->gid.index;
	ah->grh.hop_limit = 255;
	/* Flow label 0: the kernel makes the UDP source port from both queue pairs' numbers, so that each takes its own way through the fabric. */
	/* The receiving side sends nothing but control messages. */
	ah->grh.traffic_class = (uint8_t)(comm->sending ? comm->params.tc : comm->params.fifo_tc);
}

static ncclResult_t connect_failed(struct tp_ib_comm *comm, struct tp_ib_path *path, int q, const char *to, int error, bool quiet)
{
	char text[512], remote[48];

	tp_ib_gid_format(path->remote.gid, remote);
	snprintf(path->why, sizeof(path->why), "Call to ibv_modify_qp failed with %d %s, on dev %s, next state %s, local GID index %d, local GID %s, remote GID %s%s", error,
		strerror(error), path->port->text, to, path->gid.index, path->gid.text, remote, error == ETIMEDOUT
		? ": the kernel could not resolve the remote address; do the two belong together, and are they routed to each other (NCCL_IB_GID_INDEX, NCCL_IB_HCA)?" : "");
	if (quiet) return ncclSystemError;
	return TP_FAIL(ncclSystemError, "NET/IB : %s : %s", tp_ib_name(comm, path, q, text, sizeof(text)), path->why);
}

ncclResult_t tp_ib_qps_connect(struct tp_ib_comm *comm, struct tp_ib_path *path, bool quiet)
{
	path->mtu = TP_MIN((int)path->port->attr.active_mtu, (int)path->remote.mtu);
	set_ece(comm, path);
	for (int q = 0; q < comm->nqps; q++) {
		struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR, .path_mtu = (enum ibv_mtu)path->mtu, .dest_qp_num = path->remote.qpns[q],
			.rq_psn = (path->remote.psn + (uint32_t)q) & 0xffffff, .max_dest_rd_atomic = 1, .min_rnr_timer = TP_IB_RNR_TIMER };
		int error;

		fill_address(comm, path, &attr.ah_attr);
		error = modify(comm, path, path->qps[q].ibv, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN
			| IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER, quiet);
		if (error) return connect_failed(comm, path, q, "RTR", error, quiet);
		attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = (uint8_t)comm->params.timeout, .retry_cnt = (uint8_t)comm->params.retry_cnt,
			.rnr_retry = 7, .sq_psn = (path->psn + (uint32_t)q) & 0xffffff, .max_rd_atomic = 1 };
		error = modify(comm, path, path->qps[q].ibv, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC, quiet);
		if (error) return connect_failed(comm, path, q, "RTS", error, quiet);
	}
	/* What is left of it. */
	if (!comm->sending && path->ece.vendor_id) path->ece = tp_ib_qp_query_ece(comm, path, 0);
	return ncclSuccess;
}

static bool is_drained(const struct tp_ib_comm *comm, const struct tp_ib_path *path)
{
	for (int q = 0; q < comm->nqps; q++)
		if (path->qps[q].receives > 0 || path->qps[q].posted != path->qps[q].freed) return false;
	return true;
}

/* FIFO writes complete only now and then, so that the last ones are never heard of: one more, which is flushed behind them. */
static void mark_end(struct tp_ib_comm *comm, struct tp_ib_path *path, int q)
{
	struct tp_ib_qp *qp = &path->qps[q];
	struct ibv_send_wr wr = { .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED, .wr_id = tp_ib_wr_id(TP_IB_FIFO, path, q, 1, 0) }, *bad;

	if (comm->sending || qp->posted == qp->freed) return;
	wr.wr.rdma.remote_addr = comm->remote_block;
	wr.wr.rdma.rkey = path->remote.rkey;
	if (ibv_post_send(qp->ibv, &wr, &bad) == 0) qp->posted++;
}

void tp_ib_qps_close(struct tp_ib_comm *comm, struct tp_ib_path *path)
{
	uint64_t until = tp_clock_ms() + DRAIN_MS;
	struct timespec nap = { 0, 1000000 };
	int empty = 0;

	if (!path->open) return;
	for (int q = 0; q < comm->nqps; q++) {
		struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };
		path->port->context->verbs->modify_qp(path->qps[q].ibv, &attr, IBV_QP_STATE);
		mark_end(comm, path, q);
	}
	/* What came in before is known only by its completion. On a busy machine time passes without a look, so looks count too. */
	while (tp_ib_poll_path(comm, path), !is_drained(comm, path) && (tp_clock_ms() < until || empty < DRAIN_LOOKS)) {
		if (empty++ < 5) sched_yield();
		else nanosleep(&nap, NULL);
	}
	if (!is_drained(comm, path)) TP_INFO(TP_NET, "NET/IB : %s : not all requests came back in %d ms after their queue pair was closed", path->port->text, DRAIN_MS);
	/* What a broken card still delivers is not of this life. */
	path->generation++;
	path->open = false;
	tp_ib_cm_drop(comm, path);
}

bool tp_ib_post(struct tp_ib_comm *comm, struct tp_ib_path *path, int q, struct ibv_send_wr *wr, int count)
{
	struct ibv_send_wr *bad = NULL;
	int error = ibv_post_send(path->qps[q].ibv, wr, &bad);

	if (error) {
		tp_ib_path_failed(comm, path, "Call to ibv_post_send failed: %s", strerror(error));
		return false;
	}
	path->qps[q].posted += (uint32_t)count;
	return true;
}

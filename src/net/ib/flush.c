/* Flushing. A completion says that a message has been handed to the GPU's side of PCIe, which before compute capability 9.0 (and on some machines after it)
 * doesn't mean that a kernel sees it. A READ from the same memory by the same card can't be answered before that is so. Each path in use has a
 * queue pair for it that is joined to itself, with a completion queue of its own, since such a READ belongs to no message. Nor does it need the
 * peer: what has landed is flushed although the connection has failed since. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include "net/ib/ib.h"

enum { LOOP_TIMEOUT = 17 };                 /* half a second a try: it leaves the card for nowhere but the card */

struct loop {
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct ibv_mr *mr;                      /* of the words */
	uint32_t out;                           /* READs under way */
	bool broken;                            /* made anew once they are over */
};

struct held { uint32_t paths; const void *data; const struct tp_ib_memory *memory; };   /* paths, by bit, whose READ waits for a loop that is made anew */

struct tp_ib_flush {
	struct loop loops[TP_IB_MAX_PATHS];     /* by path */
	struct tp_ib_request requests[TP_NET_MAX_REQUESTS];
	uint32_t left[TP_NET_MAX_REQUESTS];     /* READs of each that are under way */
	struct held held[TP_NET_MAX_REQUESTS];
	ncclResult_t error;                     /* of a flush; it stays */
	uint32_t next, under_way;
	uint64_t *words;                        /* a page of them: a READ's data ends at one that nobody looks at */
};

static void destroy_loop(const struct tp_ib_path *path, struct loop *loop)
{
	const struct tp_verbs *v = path->port ? path->port->context->verbs : NULL;

	if (v && loop->qp) v->destroy_qp(loop->qp);
	if (v && loop->cq) v->destroy_cq(loop->cq);
	if (v && loop->mr) v->dereg_mr(loop->mr);
	*loop = (struct loop){ 0 };
}

void tp_ib_flush_destroy(struct tp_ib_comm *comm)
{
	struct tp_ib_flush *flush = comm->flush;

	if (!flush) return;
	for (int p = 0; p < comm->npaths; p++) destroy_loop(&comm->paths[p], &flush->loops[p]);
	munmap(flush->words, 4096);
	free(flush);
	comm->flush = NULL;
}

static ncclResult_t create_flush(struct tp_ib_comm *comm)
{
	struct tp_ib_flush *flush = tp_alloc(1, sizeof(*flush), "flushes of GPU memory");

	if (!flush) return ncclSystemError;
	/* A page of its own: a card writes there, and a forked child must not share it. */
	flush->words = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (flush->words == MAP_FAILED) {
		free(flush);
		return TP_FAIL(ncclSystemError, "NET/IB : no memory for flushes of GPU memory: %s", strerror(errno));
	}
	comm->flush = flush;
	return ncclSuccess;
}

static int to_itself(const struct tp_ib_comm *comm, const struct tp_ib_path *path, struct ibv_qp *qp)
{
	const struct tp_verbs *v = path->port->context->verbs;
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .pkey_index = (uint16_t)comm->params.pkey, .port_num = path->port->number, .qp_access_flags = IBV_ACCESS_REMOTE_READ };
	int error = v->modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);

	if (error) return error;
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = path->port->attr.active_mtu, .dest_qp_num = qp->qp_num, .max_dest_rd_atomic = 1, .min_rnr_timer = 12,
		.ah_attr = { .sl = (uint8_t)comm->params.sl, .port_num = path->port->number, .dlid = path->port->attr.lid } };
	if (path->port->attr.link_layer == IBV_LINK_LAYER_ETHERNET) {
		attr.ah_attr.is_global = 1;
		memcpy(attr.ah_attr.grh.dgid.raw, path->gid.raw, 16);
		attr.ah_attr.grh.sgid_index = (uint8_t)path->gid.index;
		attr.ah_attr.grh.hop_limit = 255;
	}
	error = v->modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
	if (error) return error;
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = LOOP_TIMEOUT, .retry_cnt = (uint8_t)comm->params.retry_cnt, .rnr_retry = 7, .max_rd_atomic = 1 };
	return v->modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
}

static ncclResult_t create_loop(struct tp_ib_comm *comm, const struct tp_ib_path *path, struct loop *loop)
{
	const struct tp_ib_context *context = path->port->context;
	const struct tp_verbs *v = context->verbs;
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { .max_send_wr = TP_NET_MAX_REQUESTS, .max_send_sge = 1, .max_recv_wr = 1, .max_recv_sge = 1 } };

	errno = 0;
	loop->mr = v->reg_mr(context->pd, comm->flush->words, 4096, IBV_ACCESS_LOCAL_WRITE);
	loop->cq = loop->mr ? v->create_cq(context->ibv, TP_NET_MAX_REQUESTS, NULL, NULL, 0) : NULL;
	init.send_cq = init.recv_cq = loop->cq;
	loop->qp = loop->cq ? v->create_qp(context->pd, &init) : NULL;
	int error = loop->qp ? to_itself(comm, path, loop->qp) : errno ? errno : ENOMEM;
	if (!error) return ncclSuccess;
	destroy_loop(path, loop);
	return TP_FAIL(ncclSystemError, "NET/IB : %s : the queue pair that flushes GPU memory can't be made: %s. NCCL_NET_GDR_LEVEL=LOC does without GPU memory", path->port->text,
		strerror(error));
}

static ncclResult_t fail(struct tp_ib_comm *comm, const char *why)
{
	comm->flush->error = ncclSystemError;
	tp_ib_fail(comm, ncclSystemError, "%s", why);
	return ncclSystemError;
}

static bool has_died(const struct tp_ib_path *path)
{
	const struct tp_ib_port *port = path->port;

	return path->state != TP_IB_PATH_LIVE || atomic_load_explicit(&port->context->fatal, memory_order_relaxed) ||
		atomic_load_explicit(&port->state, memory_order_relaxed) != IBV_PORT_ACTIVE;
}

/* What was being flushed when its path died is not held up: it had arrived long before that was noticed. */
static void take(struct tp_ib_comm *comm, const struct tp_ib_path *path, struct loop *loop, const struct ibv_wc *wc)
{
	char why[800];

	loop->out--;
	comm->flush->left[wc->wr_id]--;
	if (wc->status == IBV_WC_SUCCESS || loop->broken) return;
	loop->broken = true;
	if (has_died(path)) return;
	snprintf(why, sizeof(why), "the READ that flushes GPU memory failed on %s: %s(%d), vendor error 0x%x: %s. Do ACS or an IOMMU stand between GPU and NIC? "
		"NCCL_NET_GDR_LEVEL=LOC does without GPU memory", path->port->text, tp_verbs_status_name((int)wc->status), (int)wc->status, wc->vendor_err,
		tp_verbs_status_advice((int)wc->status));
	fail(comm, why);
}

static ncclResult_t poll_loop(struct tp_ib_comm *comm, const struct tp_ib_path *path, struct loop *loop)
{
	struct ibv_wc wcs[8];
	int count = loop->out ? ibv_poll_cq(loop->cq, (int)TP_ARRAY_LEN(wcs), wcs) : 0;

	if (count < 0) return fail(comm, "Call to ibv_poll_cq failed (flushes of GPU memory)");
	for (int i = 0; i < count; i++) take(comm, path, loop, &wcs[i]);
	return ncclSuccess;
}

/* One that broke is made anew when all of its READs are over; until then it stays broken. */
static ncclResult_t ready_loop(struct tp_ib_comm *comm, const struct tp_ib_path *path, struct loop *loop)
{
	if (loop->broken) TP_TRY(poll_loop(comm, path, loop));
	if (loop->broken && !loop->out) destroy_loop(path, loop);
	return loop->qp ? ncclSuccess : create_loop(comm, path, loop);
}

static struct tp_ib_request *new_request(struct tp_ib_comm *comm, uint32_t *number)
{
	struct tp_ib_flush *flush = comm->flush;

	for (int i = 0; i < TP_NET_MAX_REQUESTS; i++) {
		*number = flush->next++ % TP_NET_MAX_REQUESTS;
		struct tp_ib_request *r = &flush->requests[*number];
		if (r->busy) continue;
		*r = (struct tp_ib_request){ .comm = comm, .busy = true, .is_flush = true };
		return r;
	}
	return NULL;
}

static ncclResult_t post(struct tp_ib_comm *comm, const struct tp_ib_path *path, uint32_t number, const void *data, const struct tp_ib_memory *memory)
{
	char why[128];
	struct tp_ib_flush *flush = comm->flush;
	struct loop *loop = &flush->loops[path - comm->paths];
	struct ibv_sge sge = { .addr = (uint64_t)(uintptr_t)&flush->words[number], .length = 1, .lkey = loop->mr->lkey };
	struct ibv_send_wr wr = { .wr_id = number, .opcode = IBV_WR_RDMA_READ, .send_flags = IBV_SEND_SIGNALED, .sg_list = &sge, .num_sge = 1 }, *bad;

	wr.wr.rdma.remote_addr = (uint64_t)(uintptr_t)data;
	wr.wr.rdma.rkey = memory->mrs[path->key]->rkey;
	int error = ibv_post_send(loop->qp, &wr, &bad);
	if (error) {
		snprintf(why, sizeof(why), "a READ that flushes GPU memory can't be posted: %s", strerror(error));
		return fail(comm, why);
	}
	loop->out++;
	flush->left[number]++;
	return ncclSuccess;
}

/* A path that is no more, or whose loop can't be made anew: what it had brought landed long before that was known. */
static bool is_over(const struct tp_ib_path *path, const struct loop *loop) { return path->at < 0 || (loop->broken && has_died(path)); }

/* What waits for a loop. */
static ncclResult_t post_held(struct tp_ib_comm *comm, uint32_t number)
{
	struct held *held = &comm->flush->held[number];

	for (int p = 0; p < comm->npaths; p++) {
		struct loop *loop = &comm->flush->loops[p];
		if (!(held->paths >> p & 1)) continue;
		if (!is_over(&comm->paths[p], loop)) {
			TP_TRY(ready_loop(comm, &comm->paths[p], loop));
			if (loop->broken) continue;
			TP_TRY(post(comm, &comm->paths[p], number, held->data, held->memory));
		}
		held->paths &= ~(1u << p);
	}
	return ncclSuccess;
}

ncclResult_t tp_ib_iflush(void *handle, int n, void *const *data, const size_t *bytes, void *const *mhandles, void **out)
{
	struct tp_ib_comm *comm = handle;
	struct tp_ib_request *request;
	uint32_t number;
	int last = n - 1;

	*out = NULL;
	if (!comm->flush) TP_TRY(create_flush(comm));
	for (int p = 0; p < comm->npaths; p++)
		if (comm->paths[p].port && (n == 0 || !is_over(&comm->paths[p], &comm->flush->loops[p]))) TP_TRY(ready_loop(comm, &comm->paths[p], &comm->flush->loops[p]));
	/* One answer stands for all that came before. */
	while (last >= 0 && bytes[last] == 0) last--;
	if (last < 0) return ncclSuccess;
	request = new_request(comm, &number);
	if (!request) return TP_FAIL(ncclInternalError, "NET/IB : a flush while %d are under way", TP_NET_MAX_REQUESTS);
	comm->flush->held[number] = (struct held){ .data = data[last], .memory = mhandles[last] };
	for (int i = 0; i < comm->nused; i++) comm->flush->held[number].paths |= 1u << (comm->used[i] - comm->paths);
	comm->flush->under_way++;
	*out = request;
	return post_held(comm, number);
}

/* Of a card that has failed nothing may come any more. */
static bool waits_in_vain(const struct tp_ib_comm *comm)
{
	for (int p = 0; p < comm->npaths; p++)
		if (comm->flush->loops[p].out && atomic_load_explicit(&comm->paths[p].port->context->fatal, memory_order_relaxed)) return true;
	return false;
}

ncclResult_t tp_ib_test_flush(struct tp_ib_request *request, bool *done)
{
	struct tp_ib_comm *comm = request->comm;
	struct tp_ib_flush *flush = comm->flush;
	uint32_t number = (uint32_t)(request - flush->requests);

	for (int p = 0; p < comm->npaths && flush->left[number]; p++) TP_TRY(poll_loop(comm, &comm->paths[p], &flush->loops[p]));
	if (flush->held[number].paths) TP_TRY(post_held(comm, number));
	*done = flush->left[number] == 0 && !flush->held[number].paths;
	if (!*done) return flush->error != ncclSuccess || !waits_in_vain(comm) ? flush->error : comm->error;
	request->busy = false;
	flush->under_way--;
	return ncclSuccess;
}

bool tp_ib_flush_is_under_way(const struct tp_ib_comm *comm) { return comm->flush && comm->flush->under_way > 0; }

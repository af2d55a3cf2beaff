/* The receiving side: says where messages belong, and takes the ends that come in. */
#include <arpa/inet.h>
#include <string.h>
#include "net/ib/ib.h"

#define SIGNAL_EVERY 16             /* FIFO writes: one in so many completes, so that the queue is known to drain */

static uint64_t first_at(const struct tp_ib_comm *comm, int q, uint64_t from)
{
	uint64_t step = comm->split ? 1 : (uint64_t)comm->nqps, number = from;

	if (!comm->split) number += ((uint64_t)q + step - number % step) % step;
	while (number < comm->head && comm->messages[number % TP_IB_RING].done) number += step;
	return number;
}

void tp_ib_expect(struct tp_ib_comm *comm, struct tp_ib_path *path)
{
	for (int q = 0; q < comm->nqps; q++) path->qps[q].next = first_at(comm, q, comm->below);
}

void tp_ib_announce(struct tp_ib_comm *comm, uint64_t number)
{
	struct tp_ib_path *path = &comm->paths[comm->active];
	struct tp_ib_message *m = &comm->messages[number % TP_IB_RING];
	uint64_t slot = number % TP_IB_RING;
	int q = (int)(number % (uint64_t)comm->nqps);
	struct ibv_sge sge = { .addr = (uint64_t)(uintptr_t)comm->block->fifo[slot], .length = (uint32_t)m->n * sizeof(struct tp_ib_fifo), .lkey = 0 };
	struct ibv_send_wr wr = { .opcode = IBV_WR_RDMA_WRITE, .sg_list = &sge, .num_sge = 1 };

	if (comm->switching || path->state != TP_IB_PATH_LIVE) return;
	sge.lkey = path->mr->lkey;
	wr.wr_id = tp_ib_wr_id(TP_IB_FIFO, path, q, 1, number);
	wr.wr.rdma.remote_addr = comm->remote_block + offsetof(struct tp_ib_block, fifo) + slot * sizeof(comm->block->fifo[0]);
	wr.wr.rdma.rkey = path->remote.rkey;
	if (comm->params.use_inline && m->n == 1) wr.send_flags |= IBV_SEND_INLINE;
	if (++path->qps[q].since_signal >= SIGNAL_EVERY) {
		wr.send_flags |= IBV_SEND_SIGNALED;
		path->qps[q].since_signal = 0;
	}
	tp_ib_post(comm, path, q, &wr, 1);
}

ncclResult_t tp_ib_irecv(void *handle, int n, void *const *data, const size_t *bytes, const int *tags, void *const *mhandles, void **out)
{
	struct tp_ib_comm *comm = handle;
	struct tp_ib_path *path = &comm->paths[comm->active];
	uint64_t number = comm->head, slot = number % TP_IB_RING;
	struct tp_ib_qp *qp = &path->qps[number % (uint64_t)comm->nqps];
	struct tp_ib_message *m = &comm->messages[slot];
	struct tp_ib_request *request;

	*out = NULL;
	TP_TRY(comm->error);
	if (n < 1 || n > TP_NET_MAX_RECVS) return TP_FAIL(ncclInternalError, "NET/IB : a grouped receive of %d, 1 to %d are possible", n, TP_NET_MAX_RECVS);
	if (comm->head - comm->below >= TP_NET_MAX_REQUESTS || qp->posted - qp->freed + 2 > comm->sq_depth) {
		TP_TRY(tp_ib_progress(comm));
		if (comm->head - comm->below >= TP_NET_MAX_REQUESTS || qp->posted - qp->freed + 2 > comm->sq_depth) return ncclSuccess;
	}
	request = tp_ib_new_request(comm);
	if (!request) return ncclSuccess;
	request->message = number;
	request->n = n;
	memset(m, 0, sizeof(*m));
	m->n = n;
	m->left = comm->split ? (uint32_t)comm->nqps : 1;
	m->requests[0] = request;
	for (int r = 0; r < n; r++) {
		struct tp_ib_fifo *entry = &comm->block->fifo[slot][r];
		const struct tp_ib_memory *memory = mhandles[r];
		m->capacity[r] = bytes[r];
		entry->addr = (uint64_t)(uintptr_t)data[r];
		entry->bytes = bytes[r];
		for (int p = 0; p < comm->npaths; p++) entry->rkeys[p] = memory && memory->mrs[p] ? memory->mrs[p]->rkey : 0;
		entry->tag = tags[r];
		entry->n = (uint32_t)n;
		atomic_store_explicit(&entry->number, number + 1, memory_order_relaxed);
	}
	comm->head++;
	tp_ib_announce(comm, number);
	*out = request;
	return ncclSuccess;
}

static bool take_sizes(struct tp_ib_comm *comm, struct tp_ib_message *m, uint64_t number)
{
	struct tp_ib_request *request = m->requests[0];

	for (int r = 0; r < m->n; r++) {
		size_t bytes = m->n == 1 ? m->imm : comm->block->sizes[number % TP_IB_RING][r];
		if (bytes > m->capacity[r]) {
			tp_ib_fail(comm, ncclInvalidUsage, "%zu bytes came for a receive of at most %zu", bytes, m->capacity[r]);
			return false;
		}
		request->sizes[r] = bytes;
	}
	return true;
}

void tp_ib_arrived(struct tp_ib_comm *comm, int q, uint32_t imm)
{
	struct tp_ib_qp *qp = &comm->paths[comm->active].qps[q];
	uint64_t number = qp->next;
	struct tp_ib_message *m = &comm->messages[number % TP_IB_RING];

	if (number >= comm->head || m->done || m->left == 0) {
		tp_ib_fail(comm, ncclInternalError, "a message came that no receive was posted for (queue pair %d, message %llu of %llu)", q, (unsigned long long)number,
			(unsigned long long)comm->head);
		return;
	}
	m->imm = ntohl(imm);
	if (--m->left == 0) {
		if (!take_sizes(comm, m, number)) return;
		tp_ib_message_done(comm, number);
	}
	qp->next = first_at(comm, q, number + 1);
}

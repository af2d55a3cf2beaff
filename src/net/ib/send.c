/* The sending side: the FIFO's next entries say where a message belongs; it is cut over the queue pairs and each piece ends with
 * a write that carries an immediate. Only that last one completes here. */
#include <arpa/inet.h>
#include <string.h>
#include "net/ib/ib.h"

enum { WRS_MAX = TP_NET_MAX_RECVS + 2 };

struct chain {
	struct ibv_send_wr wrs[WRS_MAX];
	struct ibv_sge sges[WRS_MAX][TP_NET_MAX_PARTS];
	int count;
};

static struct ibv_send_wr *add(struct chain *chain, enum ibv_wr_opcode opcode, uint64_t remote, uint32_t rkey)
{
	struct ibv_send_wr *wr = &chain->wrs[chain->count];

	memset(wr, 0, sizeof(*wr));
	wr->opcode = opcode;
	wr->sg_list = chain->sges[chain->count];
	wr->wr.rdma.remote_addr = remote;
	wr->wr.rdma.rkey = rkey;
	if (chain->count > 0) chain->wrs[chain->count - 1].next = wr;
	chain->count++;
	return wr;
}

/* The bytes [offset, offset + bytes) of what the request sends. */
static void slice(const struct tp_ib_request *r, int key, size_t offset, size_t bytes, struct ibv_send_wr *wr)
{
	for (int i = 0; i < r->nparts && bytes > 0; i++) {
		size_t have = r->parts[i].iov_len;
		if (offset >= have) {
			offset -= have;
			continue;
		}
		size_t take = TP_MIN(have - offset, bytes);
		wr->sg_list[wr->num_sge++] = (struct ibv_sge){ .addr = (uint64_t)(uintptr_t)r->parts[i].iov_base + offset, .length = (uint32_t)take,
			.lkey = r->memory[i]->mrs[key]->lkey };
		offset = 0;
		bytes -= take;
	}
}

/* Queue pairs' pieces: multiples of 128 bytes, so that no two of them write to one cache line (LL128 needs its lines whole). */
static size_t piece(size_t total, int nqps, int q, size_t *offset)
{
	size_t each = tp_align_up(tp_div_up(total, (size_t)nqps), 128);

	*offset = TP_MIN((size_t)q * each, total);
	return TP_MIN(each, total - *offset);
}

static bool post_part(struct tp_ib_comm *comm, struct tp_ib_path *path, int q, int part, int parts, uint64_t number)
{
	struct tp_ib_message *m = &comm->messages[number % TP_IB_RING];
	size_t offset, bytes, total = m->requests[0]->bytes;
	struct chain chain = { .count = 0 };
	struct ibv_send_wr *last = NULL;
	uint64_t slot = number % TP_IB_RING;
	bool apart = m->n > 1 || (comm->adaptive && total > (size_t)comm->params.ar_threshold);

	for (int r = 0; r < m->n; r++) {
		const struct tp_ib_request *request = m->requests[r];
		bytes = piece(request->bytes, parts, part, &offset);
		if (bytes == 0 && apart) continue;
		last = add(&chain, IBV_WR_RDMA_WRITE, m->entries[r].addr + offset, m->entries[r].rkeys[path->remote.key]);
		slice(request, path->key, offset, bytes, last);
	}
	if (m->n > 1 && part == 0) {
		last = add(&chain, IBV_WR_RDMA_WRITE, comm->remote_block + offsetof(struct tp_ib_block, sizes) + slot * sizeof(comm->block->sizes[0]), path->remote.rkey);
		last->sg_list[0] = (struct ibv_sge){ .addr = (uint64_t)(uintptr_t)comm->block->sizes[slot], .length = (uint32_t)m->n * sizeof(uint32_t), .lkey = path->mr->lkey };
		last->num_sge = 1;
	}
	if (apart || !last) last = add(&chain, IBV_WR_RDMA_WRITE_WITH_IMM, comm->remote_block, path->remote.rkey);
	last->opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
	last->imm_data = htonl(m->n == 1 ? (uint32_t)total : 0);
	last->send_flags = IBV_SEND_SIGNALED;
	for (int i = 0; i < chain.count; i++) chain.wrs[i].wr_id = tp_ib_wr_id(TP_IB_DATA, path, q, chain.count, number);
	return tp_ib_post(comm, path, q, chain.wrs, chain.count);
}

void tp_ib_send_message(struct tp_ib_comm *comm, uint64_t number)
{
	struct tp_ib_message *m = &comm->messages[number % TP_IB_RING];
	int first, ends = tp_ib_ends(comm, number, &first);

	m->left = (uint32_t)ends;
	/* Between two ways: it goes out with those that the peer doesn't have. */
	if (comm->switching || tp_ib_culprit(comm)) return;
	for (int part = 0, q; part < ends; part++) {
		struct tp_ib_path *path = tp_ib_path_at(comm, first + part, &q);
		if (!post_part(comm, path, q, part, ends, number)) return;
	}
}

bool tp_ib_queues_have_room(const struct tp_ib_comm *comm)
{
	for (int g = 0, q; g < tp_ib_qps_in_use(comm); g++) {
		const struct tp_ib_path *path = tp_ib_path_at(comm, g, &q);
		if (path->qps[q].posted - path->qps[q].freed + WRS_MAX + 1 > comm->sq_depth) return false;
	}
	return true;
}

/* Nothing overtakes what is still to be sent again. */
static bool may_begin(const struct tp_ib_comm *comm)
{
	return comm->head - comm->below < TP_NET_MAX_REQUESTS && !comm->resending && tp_ib_queues_have_room(comm);
}

/* A receiver whose connection changes ways writes its entries once more, the same bytes, while they may be read here: tests/tsan.supp knows this
 * function, and nothing else of the sender's. */
static void copy_entry(const struct tp_ib_fifo *from, struct tp_ib_fifo *to) { memcpy(to, from, sizeof(*to)); }

/* The receiver's entries for the next message; false: not all are there yet. */
static bool take_entries(struct tp_ib_comm *comm, struct tp_ib_message *m)
{
	struct tp_ib_fifo *fifo = comm->block->fifo[comm->head % TP_IB_RING], first;
	size_t room = 0;

	if (m->n > 0) return true;
	/* The card stores an entry's number last; this acquire orders our reading behind it. */
	if (atomic_load_explicit(&fifo[0].number, memory_order_acquire) != comm->head + 1) return false;
	copy_entry(fifo, &first);
	if (first.n < 1 || first.n > TP_NET_MAX_RECVS) {
		tp_ib_fail(comm, ncclInternalError, "the receiver wants %u messages at once; 1 to %d are possible", first.n, TP_NET_MAX_RECVS);
		return false;
	}
	for (uint32_t r = 1; r < first.n; r++)
		if (atomic_load_explicit(&fifo[r].number, memory_order_acquire) != comm->head + 1) return false;
	memset(m, 0, sizeof(*m));
	m->n = (int)first.n;
	m->entries[0] = first;
	for (int r = 1; r < m->n; r++) copy_entry(&fifo[r], &m->entries[r]);
	for (int r = 0; r < m->n; r++) room += m->entries[r].bytes;
	m->large = tp_ib_is_large(room);
	return true;
}

static int match(struct tp_ib_comm *comm, struct tp_ib_message *m, size_t bytes, int tag)
{
	for (int r = 0; r < m->n; r++) {
		if (m->requests[r] || m->entries[r].tag != tag) continue;
		if (bytes <= m->entries[r].bytes) return r;
		tp_ib_fail(comm, ncclInvalidUsage, "a message of %zu bytes with tag %d for a receive of at most %llu bytes", bytes, tag, (unsigned long long)m->entries[r].bytes);
		return -1;
	}
	if (m->n == 1 && !comm->any_order) tp_ib_fail(comm, ncclInvalidUsage, "a message of %zu bytes with tag %d, but the receive is for tag %d", bytes, tag, m->entries[0].tag);
	return -1;
}

ncclResult_t tp_ib_isendv(void *handle, const struct iovec *parts, int n, int tag, void *const *mhandles, void **out)
{
	struct tp_ib_comm *comm = handle;
	struct tp_ib_message *m = &comm->messages[comm->head % TP_IB_RING];
	struct tp_ib_request *request;
	size_t bytes = 0;
	bool whole = true;
	int r;

	*out = NULL;
	if (n < 0 || n > TP_NET_MAX_PARTS) return TP_FAIL(ncclInternalError, "NET/IB : a message of %d parts, at most %d are possible", n, TP_NET_MAX_PARTS);
	for (int i = 0; i < n; i++) bytes += parts[i].iov_len;
	if (bytes > comm->max_bytes)
		return TP_FAIL(ncclInvalidArgument, "NET/IB : a message of %zu bytes; port %s takes %u at most", bytes, comm->used[0]->port->text, comm->max_bytes);
	if (n > comm->used[0]->port->context->attr.max_sge)
		return TP_FAIL(ncclInvalidUsage, "NET/IB : %s sends from %d places at a time, and a buffer that is sent from where it lies needs %d: TELPHER_NET_LEND=0 copies it instead",
			comm->used[0]->port->text, comm->used[0]->port->context->attr.max_sge, n);
	TP_TRY(comm->error);
	if (!may_begin(comm) || (m->n == 0 && !take_entries(comm, m))) {
		TP_TRY(tp_ib_progress(comm));
		if (atomic_load_explicit(&comm->control.closed, memory_order_acquire)) return tp_ib_peer_gone(comm);    /* pairs with the watch thread's */
		if (!may_begin(comm) || !take_entries(comm, m)) return comm->error;
	}
	r = match(comm, m, bytes, tag);
	TP_TRY(comm->error);
	request = r >= 0 ? tp_ib_new_request(comm) : NULL;
	if (!request) {
		TP_TRY(tp_ib_progress(comm));
		return atomic_load_explicit(&comm->control.closed, memory_order_acquire) ? tp_ib_peer_gone(comm) : ncclSuccess;   /* as above */
	}
	request->message = comm->head;
	request->bytes = bytes;
	request->nparts = n;
	for (int i = 0; i < n; i++) {
		request->parts[i] = parts[i];
		request->memory[i] = mhandles[i];
	}
	m->requests[r] = request;
	comm->block->sizes[comm->head % TP_IB_RING][r] = (uint32_t)bytes;
	for (int i = 0; i < m->n; i++) whole &= m->requests[i] != NULL;
	if (whole) tp_ib_send_message(comm, comm->head++);
	*out = request;
	return ncclSuccess;
}

ncclResult_t tp_ib_isend(void *comm, const void *data, size_t bytes, int tag, void *mhandle, void **out)
{
	struct iovec part = { .iov_base = (void *)(uintptr_t)data, .iov_len = bytes };

	return tp_ib_isendv(comm, &part, bytes > 0, tag, &mhandle, out);
}

void tp_ib_sent(struct tp_ib_comm *comm, uint64_t number)
{
	struct tp_ib_message *m = &comm->messages[number % TP_IB_RING];

	if (m->done || m->left == 0) return;
	if (--m->left == 0) tp_ib_message_done(comm, number);
}

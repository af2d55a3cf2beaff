/* The initiator acts alone: WRITEs and READs straight into and out of the target's memory, by process_vm_* (requests that were
 * posted together in one call) or, where the memory was born shared, by plain stores and loads; there atomics too.
 *
 * Rights are those of the target's QP (its door) and of its key, checked for each request. Whatever isn't plainly right is left
 * to the ring: the target finds the error, and its QP and ours get the states that belong to it. */
#include <errno.h>
#include <string.h>
#include <unistd.h>
#include "verbs/internal.h"
#include "verbs/path.h"

enum { BATCH = TP_PATH_KEYS, SPANS = 64, BATCH_BYTES = 256 << 10, UNLOCK_BYTES = 16 << 10, CALL_BYTES = 64 << 20 };

struct batch {
	uint32_t opcode;
	int count, spans_used, locals, remotes, keys;
	uint64_t bytes, packets;
	uint32_t last_key;
	struct tp_span spans[SPANS];
	struct iovec local[SPANS], remote[BATCH];
	uint32_t lengths[BATCH];
};

/* ---- copying between processes ---- */

/* The part of the vectors from offset on, at most CALL_BYTES. Returns its bytes. */
static size_t cut(const struct iovec *from, int count, uint64_t offset, struct iovec *out, int *out_count)
{
	size_t total = 0;
	*out_count = 0;
	for (int i = 0; i < count && total < CALL_BYTES; i++) {
		if (offset >= from[i].iov_len) {
			offset -= from[i].iov_len;
			continue;
		}
		size_t part = TP_MIN(from[i].iov_len - (size_t)offset, CALL_BYTES - total);
		out[(*out_count)++] = (struct iovec){ (uint8_t *)from[i].iov_base + offset, part };
		total += part;
		offset = 0;
	}
	return total;
}

static ssize_t call(pid_t pid, bool write, const struct iovec *local, int locals, const struct iovec *remote, int remotes)
{
	return write ? process_vm_writev(pid, local, (unsigned long)locals, remote, (unsigned long)remotes, 0) :
		process_vm_readv(pid, local, (unsigned long)locals, remote, (unsigned long)remotes, 0);
}

/* Returns the bytes that were copied before the first that couldn't be. */
static uint64_t copy_bytes(pid_t pid, bool write, const struct iovec *local, int locals, const struct iovec *remote, int remotes, uint64_t bytes)
{
	uint64_t done = 0;
	if (bytes <= CALL_BYTES) {
		ssize_t got = call(pid, write, local, locals, remote, remotes);
		return got < 0 ? 0 : (uint64_t)got;
	}
	while (done < bytes) {
		struct iovec here[SPANS], there[SPANS];
		int here_count, there_count;
		size_t part = cut(local, locals, done, here, &here_count);
		if (cut(remote, remotes, done, there, &there_count) != part)
			break;
		ssize_t got = call(pid, write, here, here_count, there, there_count);
		if (got <= 0)
			break;
		done += (uint64_t)got;
	}
	return done;
}

int tp_path_copy(pid_t pid, bool write, const struct iovec *local, int locals, const struct iovec *remote, int remotes)
{
	uint64_t bytes = 0;
	for (int i = 0; i < remotes; i++)
		bytes += remote[i].iov_len;
	errno = 0;
	return copy_bytes(pid, write, local, locals, remote, remotes, bytes) == bytes ? 0 : errno ? errno : EFAULT;
}

/* ---- rights ---- */

#define SHOWN(field) atomic_load_explicit(&door->field, memory_order_relaxed)

/* Does the peer's door let us in? What it shows holds as long as we are inside. */
static bool is_let_in(const struct tp_path *path)
{
	const struct tp_path_door *door = path->peer;
	const struct tp_qp *qp = path->qp;
	return atomic_load_explicit(&door->open, memory_order_seq_cst) && SHOWN(qpn) == qp->attr.dest_qp_num && SHOWN(peer_qpn) == path->qpn &&
		SHOWN(direct) && SHOWN(type) == qp->ibv.qp_type && SHOWN(mtu) == qp->attr.path_mtu && SHOWN(ends) == path->ends &&
		(!tp_qp_reliable(qp->ibv.qp_type) || SHOWN(recv_psn) == qp->send_psn);
}

/* Goes into the peer's region: from now on it isn't taken away. NULL: not ours to enter, or to be asked about. */
static const struct tp_key *enter_key(struct tp_path *path, struct batch *batch, uint32_t rkey, uint64_t addr, uint64_t bytes, uint32_t access)
{
	const struct tp_path_door *door = path->peer;
	const struct tp_key *key = &path->link->keys[TP_KEY_PLACE(rkey)];
	if (rkey == 0 || !(SHOWN(access) & access))
		return NULL;
	if (batch->keys == 0 || rkey != batch->last_key) {
		/* Sequentially consistent, as is the look at the key: see path_doors.c. */
		atomic_store_explicit(&path->own->keys[batch->keys++], rkey, memory_order_seq_cst);
		batch->last_key = rkey;
	}
	if (atomic_load_explicit(&key->key, memory_order_seq_cst) != rkey || key->pd != SHOWN(pd) || (access & ~key->access))
		return NULL;
	if (key->kind == TP_KEY_MW2 && key->qpn != SHOWN(qpn))
		return NULL;
	uint64_t offset = addr - key->iova;
	return addr >= key->iova && offset <= key->length && bytes <= key->length - offset ? key : NULL;
}

static void leave_all(struct tp_path *path, struct batch *batch)
{
	/* Release: pairs with the loads in path_doors.c; what was copied is over before the region goes. */
	for (int i = 0; i < batch->keys; i++)
		atomic_store_explicit(&path->own->keys[i], 0, memory_order_release);
	tp_span_leave(batch->spans, batch->spans_used);
	batch->keys = batch->spans_used = 0;
}

/* ---- requests gathered ---- */

static uint32_t access_of(uint32_t opcode) { return opcode == IBV_WR_RDMA_READ ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE; }

static void add_iov(struct iovec *list, int *count, void *base, size_t bytes)
{
	if (*count && (uint8_t *)list[*count - 1].iov_base + list[*count - 1].iov_len == base)
		list[*count - 1].iov_len += bytes;
	else
		list[(*count)++] = (struct iovec){ base, bytes };
}

/* Between memory that is mapped here and the request's own. */
static bool copy_mapped(uint32_t opcode, uint8_t *mapped, uint32_t bytes, const struct tp_span *spans, int count)
{
	struct tp_span there = { .grip = { .addr = mapped }, .bytes = bytes };
	bool source;
	if (opcode == IBV_WR_RDMA_READ)
		return tp_span_move(spans, count, 0, &there, 1, &source) == 0;
	return tp_span_move(&there, 1, 0, spans, count, &source) == 0;
}

enum gathered { ADDED, DONE_AT_ONCE, NOT_NOW };

/* One more request. DONE_AT_ONCE: its memory is mapped, and the data are there. */
static enum gathered gather(struct tp_qp *qp, struct batch *batch, struct tp_wqe *wqe)
{
	struct tp_path *path = tp_path_of(qp);
	uint32_t sges = wqe->inline_bytes ? 1 : wqe->num_sge;
	if (wqe->length > TP_CARD_MSG_BYTES || (uint32_t)batch->spans_used + sges > SPANS || batch->keys == TP_PATH_KEYS)
		return NOT_NOW;
	struct tp_span *spans = &batch->spans[batch->spans_used];
	int count = wqe->length ? tp_wqe_enter(qp, wqe, wqe->opcode == IBV_WR_RDMA_READ ? IBV_ACCESS_LOCAL_WRITE : 0, spans) : 0;
	if (count < 0)
		return NOT_NOW;
	batch->spans_used += count;
	if (wqe->length == 0)
		return atomic_load_explicit(&path->peer->access, memory_order_relaxed) & access_of(wqe->opcode) ? ADDED : NOT_NOW;
	const struct tp_key *key = enter_key(path, batch, wqe->rdma.rkey, wqe->rdma.addr, wqe->length, access_of(wqe->opcode));
	if (!key)
		return NOT_NOW;
	if (key->flags & TP_KEY_APART)
		return NOT_NOW;
	uint64_t addr = key->addr + (wqe->rdma.addr - key->iova);
	if (key->flags & TP_KEY_SHARED) {
		uint8_t *mapped = tp_path_map(path, key, addr, wqe->length);
		if (mapped)
			return batch->remotes ? NOT_NOW : copy_mapped(wqe->opcode, mapped, wqe->length, spans, count) ? DONE_AT_ONCE : NOT_NOW;
	}
	for (int i = 0; i < count; i++) {
		if (spans[i].grip.flags & (TP_KEY_NULL | TP_KEY_APART))
			return NOT_NOW;
		add_iov(batch->local, &batch->locals, spans[i].grip.addr, spans[i].bytes);
	}
	add_iov(batch->remote, &batch->remotes, (void *)(uintptr_t)addr, wqe->length);
	return ADDED;
}

static void gather_all(struct tp_qp *qp, struct batch *batch)
{
	bool mapped = false;
	while (batch->count < BATCH && qp->sq.exec + (uint32_t)batch->count != qp->sq.head) {
		struct tp_wqe *wqe = tp_sq_at(&qp->sq, qp->sq.exec + (uint32_t)batch->count);
		if (wqe->opcode != batch->opcode || (batch->count && batch->bytes + wqe->length > BATCH_BYTES))
			break;
		enum gathered gathered = gather(qp, batch, wqe);
		if (gathered == NOT_NOW || (mapped && gathered == ADDED && wqe->length)) {
			if (gathered == ADDED)
				batch->remotes = batch->locals = 0;     /* after those that are done: the next batch */
			break;
		}
		mapped |= gathered == DONE_AT_ONCE;
		batch->lengths[batch->count++] = wqe->length;
		batch->bytes += wqe->length;
		batch->packets += tp_packets(wqe->length, qp->attr.path_mtu);
	}
	if (mapped) {
		batch->bytes = batch->remotes ? batch->bytes : 0;
		atomic_fetch_add_explicit(&tp_path_of(qp)->link->mapped_ops, (uint64_t)batch->count, memory_order_relaxed);
	}
}

/* Copies; cuts the batch down to the requests whose data are all there. */
static void move(struct tp_qp *qp, struct batch *batch)
{
	uint64_t bytes = 0;
	bool unlock = batch->bytes > UNLOCK_BYTES;
	for (int i = 0; i < batch->remotes; i++)
		bytes += batch->remote[i].iov_len;
	if (!bytes)
		return;
	if (unlock)
		pthread_mutex_unlock(&qp->lock);
	uint64_t done = copy_bytes(tp_path_of(qp)->link->pid, batch->opcode != IBV_WR_RDMA_READ, batch->local, batch->locals, batch->remote,
		batch->remotes, bytes);
	if (unlock)
		pthread_mutex_lock(&qp->lock);
	atomic_fetch_add_explicit(&tp_path_of(qp)->link->direct_ops, (uint64_t)batch->count, memory_order_relaxed);
	if (done == bytes)
		return;
	int whole = 0;
	uint64_t end = 0;
	batch->packets = 0;
	while (whole < batch->count && end + batch->lengths[whole] <= done) {
		end += batch->lengths[whole];
		batch->packets += tp_packets(batch->lengths[whole++], qp->attr.path_mtu);
	}
	batch->count = whole;
	batch->bytes = end;
}

static _Atomic uint64_t *counters_of(const struct tp_path_door *door)
{
	struct tp_device *devices;
	uint32_t count = (uint32_t)tp_card_devices(&devices), device = atomic_load_explicit(&door->device, memory_order_relaxed);
	uint32_t port = atomic_load_explicit(&door->port, memory_order_relaxed);
	return device < count && port >= 1 && port <= (uint32_t)devices[device].nports ? devices[device].ports[port - 1].counters : NULL;
}

static void count_all(struct tp_qp *qp, const struct batch *batch, uint64_t bytes)
{
	struct tp_path *path = tp_path_of(qp);
	uint64_t requests = batch->opcode == IBV_WR_RDMA_READ ? (uint64_t)batch->count : batch->packets;
	tp_counter_add(qp->port, TP_CNT_PORT_XMIT_PACKETS, requests);
	tp_counter_add(qp->port, TP_CNT_UNICAST_XMIT, requests);
	tp_counter_add(qp->port, TP_CNT_PORT_XMIT_DATA, bytes / 4);
	if (!path->peer_counters)
		path->peer_counters = counters_of(path->peer);
	if (!path->peer_counters)
		return;
	static const enum tp_counter names[] = { TP_CNT_PORT_RCV_PACKETS, TP_CNT_UNICAST_RCV };
	for (size_t i = 0; i < TP_ARRAY_LEN(names); i++)
		atomic_fetch_add_explicit(&path->peer_counters[names[i]], requests, memory_order_relaxed);
	atomic_fetch_add_explicit(&path->peer_counters[TP_CNT_PORT_RCV_DATA], bytes / 4, memory_order_relaxed);
	atomic_fetch_add_explicit(&path->peer_counters[batch->opcode == IBV_WR_RDMA_READ ? TP_CNT_RX_READ_REQUESTS : TP_CNT_RX_WRITE_REQUESTS],
		(uint64_t)batch->count, memory_order_relaxed);
}

static void finish(struct tp_qp *qp, struct batch *batch)
{
	struct tp_path *path = tp_path_of(qp);
	uint64_t bytes = 0;
	for (int i = 0; i < batch->count; i++)
		bytes += batch->lengths[i];
	if (batch->count) {
		qp->send_psn = (qp->send_psn + (uint32_t)batch->packets) & 0xffffff;
		atomic_store_explicit(&path->peer->recv_psn, qp->send_psn, memory_order_release);
		count_all(qp, batch, bytes);
		path->silent = false;
		path->rnr_tried = 0;
	}
	leave_all(path, batch);
	for (int i = 0; i < batch->count; i++) {
		qp->sq.exec++;
		tp_sq_complete_locked(qp, IBV_WC_SUCCESS, batch->opcode == IBV_WR_RDMA_READ ? batch->lengths[i] : 0);
	}
}

/* ---- atomics on a mapping ---- */

static uint64_t operate(uint64_t *at, const struct tp_wqe *wqe)
{
	if (wqe->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD)
		return __atomic_fetch_add(at, wqe->atomic.compare_add, __ATOMIC_SEQ_CST);
	uint64_t was = wqe->atomic.compare_add;
	__atomic_compare_exchange_n(at, &was, wqe->atomic.swap, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
	return was;
}

static uint32_t atomic_direct(struct tp_qp *qp, struct batch *batch, struct tp_wqe *wqe)
{
	struct tp_path *path = tp_path_of(qp);
	const struct tp_key *key = NULL;
	uint8_t *mapped = NULL;
	bool fits = wqe->length == 8 && !(wqe->atomic.addr & 7);
	int count = fits ? tp_wqe_enter(qp, wqe, IBV_ACCESS_LOCAL_WRITE, batch->spans) : 0;
	batch->spans_used = TP_MAX(count, 0);
	if (fits && count >= 0)
		key = enter_key(path, batch, wqe->atomic.rkey, wqe->atomic.addr, 8, IBV_ACCESS_REMOTE_ATOMIC);
	if (key && (key->flags & TP_KEY_SHARED))
		mapped = tp_path_map(path, key, key->addr + (wqe->atomic.addr - key->iova), 8);
	if (mapped && !((uintptr_t)mapped & 7)) {
		uint64_t was = operate((uint64_t *)(void *)mapped, wqe);
		bool placed = tp_span_write(batch->spans, count, 0, &was, 8) == 0;
		atomic_fetch_add_explicit(&path->link->mapped_ops, 1, memory_order_relaxed);
		batch->lengths[0] = 8;
		batch->count = 1;
		batch->packets = 1;
		qp->send_psn = (qp->send_psn + 1) & 0xffffff;
		atomic_store_explicit(&path->peer->recv_psn, qp->send_psn, memory_order_release);
		if (path->peer_counters)
			atomic_fetch_add_explicit(&path->peer_counters[TP_CNT_RX_ATOMIC_REQUESTS], 1, memory_order_relaxed);
		leave_all(path, batch);
		qp->sq.exec++;
		tp_sq_complete_locked(qp, placed ? IBV_WC_SUCCESS : IBV_WC_LOC_PROT_ERR, 8);
		return 1;
	}
	leave_all(path, batch);
	return 0;
}

/* ---- */

uint32_t tp_path_direct(struct tp_qp *qp)
{
	struct tp_path *path = tp_path_of(qp);
	struct tp_wqe *wqe = tp_sq_at(&qp->sq, qp->sq.exec);
	struct batch batch;
	bool fetches = wqe->opcode == IBV_WR_RDMA_READ, atomic = wqe->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || wqe->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
	if (wqe->opcode != IBV_WR_RDMA_WRITE && !fetches && !atomic)
		return 0;
	if ((fetches || atomic) && (qp->attr.max_rd_atomic == 0 || atomic_load_explicit(&path->peer->rd_atomic, memory_order_relaxed) == 0))
		return 0;
	batch.opcode = wqe->opcode;
	batch.count = batch.spans_used = batch.locals = batch.remotes = batch.keys = 0;
	batch.bytes = batch.packets = 0;
	/* Inside before the door is looked at: the first region's key says so. */
	uint32_t rkey = atomic ? wqe->atomic.rkey : wqe->rdma.rkey;
	batch.last_key = rkey ? rkey : UINT32_MAX;
	batch.keys = 1;
	atomic_store_explicit(&path->own->keys[0], batch.last_key, memory_order_seq_cst);
	if (!is_let_in(path)) {
		leave_all(path, &batch);
		return 0;
	}
	if (atomic)
		return atomic_direct(qp, &batch, wqe);
	gather_all(qp, &batch);
	if (batch.count)
		move(qp, &batch);
	finish(qp, &batch);
	return (uint32_t)batch.count;
}

bool tp_path_place(struct tp_qp *qp, struct tp_wqe *wqe)
{
	struct tp_path *path = tp_path_of(qp);
	struct batch batch;
	batch.opcode = IBV_WR_RDMA_WRITE;
	batch.count = batch.spans_used = batch.locals = batch.remotes = 0;
	batch.bytes = batch.packets = 0;
	batch.last_key = wqe->rdma.rkey ? wqe->rdma.rkey : UINT32_MAX;
	batch.keys = 1;
	atomic_store_explicit(&path->own->keys[0], batch.last_key, memory_order_seq_cst);
	enum gathered gathered = is_let_in(path) ? gather(qp, &batch, wqe) : NOT_NOW;
	if (gathered == ADDED) {
		batch.lengths[0] = wqe->length;
		batch.count = 1;
		batch.bytes = wqe->length;
		move(qp, &batch);
	}
	bool placed = gathered == DONE_AT_ONCE || (gathered == ADDED && batch.count == 1);
	leave_all(path, &batch);
	return placed;
}

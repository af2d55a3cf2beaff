/* Groups of sends and receives to launches, without memory of the group's size on the device: all is in kernel arguments.
 *
 * A large group is cut into launches by what both ends of a transfer know: its distance (to - from, modulo ranks) and its
 * place among the transfers of the same two ranks in that direction. Every rank launches the cuts in the same order, so a
 * kernel waits only for the same cut of its peers, which comes before whatever waits for a later one. */
#include <stdlib.h>

#include "exec/cuda/internal.h"

enum {
	/* A cut: so many distances, so many transfers of each two ranks and direction. */
	CUT_DISTANCES = 40, CUT_PLACES = 8,
	PART_BYTES = 64 << 10,          /* what is worth another block */
	CHUNK_LEAST = 32 << 10, CHUNKS_A_PART = 4, SELF_CHUNK_BYTES = 1 << 20,
	FAR_CHUNK_LEAST = 128 << 10     /* between hosts: each costs the proxy some microseconds */
};
_Static_assert(2 * CUT_DISTANCES * CUT_PLACES <= TP_DEV_TRANSFERS_MORE, "a cut must fit one launch");
_Static_assert(2 * CUT_DISTANCES + CUT_PLACES <= TP_DEV_TRANSFER_LANES, "a cut's lanes must fit a block");

struct cutting {
	struct tp_cuda_exec *exec;
	const struct tp_exec_call *call;
	size_t chunk_limit;
	struct tp_dev_transfers_more *args;
	uint32_t *last;                 /* [2 * rank + is_send]: number + 1 of the last transfer in args on these links; 0: none */
	unsigned blocks;
	struct tp_link_loan loan;       /* the last that was found: sends of one buffer are asked for once */
	uint32_t loan_number;
};

uint32_t tp_cuda_transfer_distance(const struct tp_cuda_exec *exec, const struct tp_exec_transfer *t)
{
	int d = t->is_send ? t->peer - exec->boot->rank : exec->boot->rank - t->peer;
	return (uint32_t)(d < 0 ? d + exec->boot->nranks : d);
}

static unsigned parts_of(const struct tp_cuda_exec *exec, size_t bytes)
{
	return (unsigned)TP_MAX(TP_MIN(tp_div_up(bytes, PART_BYTES), (size_t)exec->nchannels), 1);
}

/* Peers at different distances begin on different channels, so that small transfers meet in no block. */
static unsigned base_of(const struct tp_cuda_exec *exec, uint32_t distance)
{
	unsigned step = (unsigned)TP_MAX(exec->nchannels / exec->boot->nranks, 1);
	return distance * step % (unsigned)exec->nchannels;
}

static uint32_t chunk_of(const struct cutting *c, int peer, size_t bytes, unsigned nparts)
{
	const struct tp_boot *boot = c->exec->boot;
	size_t least = boot->peers[peer].host == boot->host ? CHUNK_LEAST : FAR_CHUNK_LEAST, chunk = TP_MAX(tp_align_up(bytes / nparts / CHUNKS_A_PART, 128), least);
	return (uint32_t)TP_MIN(chunk, c->chunk_limit);
}

static ncclResult_t find_ends(struct tp_cuda_exec *exec, const struct tp_exec_transfer *t, unsigned base, unsigned nparts, uint64_t *links)
{
	int rank = exec->boot->rank, from = t->is_send ? rank : t->peer, to = t->is_send ? t->peer : rank;
	size_t which = 2 * (size_t)t->peer + t->is_send;
	uint64_t all = exec->nchannels == 64 ? UINT64_MAX : (1ull << exec->nchannels) - 1, need = nparts == 64 ? all : (1ull << nparts) - 1;
	need = (need << base | (base ? need >> ((unsigned)exec->nchannels - base) : 0)) & all;
	uint64_t end = 0;
	for (int channel = 0; (exec->transfer_ends[which] & need) != need && channel < exec->nchannels; channel++) {
		if (!(need >> channel & 1)) continue;
		TP_TRY(tp_cuda_link_end(exec, channel, TP_LINK_P2P, from, to, &end));
		exec->transfer_ends[which] |= 1ull << channel;
		exec->transfer_uploads = true;
	}
	TP_TRY(tp_cuda_link_end(exec, (int)base, TP_LINK_P2P, from, to, &end));
	*links = end - base * sizeof(struct tp_dev_link);
	return ncclSuccess;
}

static uint32_t find_loan(struct cutting *c, const void *buf, size_t bytes)
{
	uintptr_t at = (uintptr_t)buf;
	if (c->loan_number && at >= c->loan.begin && at <= c->loan.end && bytes <= c->loan.end - at) return c->loan_number;
	return c->loan_number = tp_cuda_find_loan(c->exec, buf, bytes, &c->loan);
}

static ncclResult_t add_transfer(struct cutting *c, const struct tp_cuda_ordered *o)
{
	struct tp_cuda_exec *exec = c->exec;
	const struct tp_exec_transfer *t = &c->call->transfers[o->index];
	struct tp_dev_transfer *out = &c->args->transfers[c->args->head.ntransfers];
	bool self = t->peer == exec->boot->rank;
	unsigned nparts = parts_of(exec, t->bytes), base = base_of(exec, tp_cuda_transfer_distance(exec, t));
	*out = (struct tp_dev_transfer){ .buf = (uint64_t)(uintptr_t)t->buf, .bytes = t->bytes, .base = (uint16_t)base, .nparts = (uint16_t)nparts,
		.chunk_bytes = self ? SELF_CHUNK_BYTES : chunk_of(c, t->peer, t->bytes, nparts), .is_send = t->is_send, .is_first = 1 };
	uint32_t number = ++c->args->head.ntransfers;
	c->blocks = TP_MAX(c->blocks, base + nparts > (unsigned)exec->nchannels ? (unsigned)exec->nchannels : base + nparts);
	if (self) {
		out->from = (uint64_t)(uintptr_t)c->call->transfers[o->from].buf;
		return ncclSuccess;
	}
	uint32_t *last = &c->last[2 * (size_t)t->peer + t->is_send];
	if (*last) {
		c->args->transfers[*last - 1].next = (uint16_t)number;
		out->is_first = 0;
	}
	*last = number;
	TP_TRY(find_ends(exec, t, base, nparts, &out->links));
	/* Parts end in whatever is left. */
	if (t->is_send && t->bytes >= TP_DEV_LEND_BYTES && tp_cuda_link_lends(exec, (int)base, TP_LINK_P2P, exec->boot->rank, t->peer)) out->lend = find_loan(c, t->buf, t->bytes);
	c->args->head.lends |= out->lend != 0;
	return ncclSuccess;
}

static ncclResult_t launch_cut(struct cutting *c, CUstream stream, const struct tp_cuda_ordered *order, int count)
{
	struct tp_cuda_exec *exec = c->exec;
	const struct tp_cuda_kernels *k = exec->kernels;
	bool usual = count <= TP_DEV_TRANSFERS;
	ncclResult_t result = ncclSuccess;
	c->args->head = (struct tp_dev_transfers_head){ .comm = exec->comm, .nchannels = (uint16_t)exec->nchannels };
	c->blocks = 1;
	for (int i = 0; i < count && result == ncclSuccess; i++) result = add_transfer(c, &order[i]);
	for (int i = 0; i < count; i++) {
		const struct tp_exec_transfer *t = &c->call->transfers[order[i].index];
		c->last[2 * (size_t)t->peer + t->is_send] = 0;
	}
	if (exec->transfer_uploads) {
		exec->transfer_uploads = false;
		ncclResult_t waited = tp_cuda_upload_wait(exec);
		if (result == ncclSuccess) result = waited;
	}
	TP_TRY(result);
	return tp_cuda_exec_run(exec, stream, usual ? k->transfers : k->transfers_more, c->blocks, TP_DEV_THREADS, c->args);
}

/* A self-receive takes the send of the same place; the sends themselves need no launch. */
static ncclResult_t pair_selves(const struct tp_cuda_exec *exec, const struct tp_exec_call *call, struct tp_cuda_ordered *order, int *count)
{
	int rank = exec->boot->rank, nsends = 0, nreceives = 0, next = 0, kept = 0;
	for (int i = 0; i < call->ntransfers; i++) {
		nsends += call->transfers[i].peer == rank && call->transfers[i].is_send;
		nreceives += call->transfers[i].peer == rank && !call->transfers[i].is_send;
	}
	if (nsends != nreceives)
		return TP_FAIL(ncclInvalidUsage, "Rank %d sends to itself %d times in this group and receives from itself %d times", rank, nsends, nreceives);
	for (int i = 0; i < *count; i++) {
		const struct tp_exec_transfer *t = &call->transfers[order[i].index];
		if (t->peer == rank && t->is_send) continue;
		order[kept] = order[i];
		if (t->peer == rank) {
			while (call->transfers[next].peer != rank || !call->transfers[next].is_send) next++;
			order[kept].from = next;
			if (call->transfers[next].bytes != t->bytes)
				return TP_FAIL(ncclInvalidUsage, "rank %d receives %zu bytes from rank %d, which sends %zu: both sides of a send and receive must say the same "
					"size", rank, t->bytes, rank, call->transfers[next].bytes);
			next++;
		}
		kept++;
	}
	*count = kept;
	return ncclSuccess;
}

/* The transfers in the order of the caller, with their cuts. *cuts: more than one. */
static ncclResult_t order_transfers(struct cutting *c, struct tp_cuda_ordered *order, bool *cuts)
{
	const struct tp_cuda_exec *exec = c->exec;
	uint64_t windows = tp_div_up((size_t)exec->boot->nranks, CUT_DISTANCES);
	*cuts = false;
	for (int i = 0; i < c->call->ntransfers; i++) {
		const struct tp_exec_transfer *t = &c->call->transfers[i];
		if (t->peer < 0 || t->peer >= exec->boot->nranks)
			return TP_FAIL(ncclInvalidArgument, "Rank %d %s rank %d, but there are %d ranks", exec->boot->rank,
				t->is_send ? "sends to" : "receives from", t->peer, exec->boot->nranks);
	}
	for (int i = 0; i < c->call->ntransfers; i++) {
		const struct tp_exec_transfer *t = &c->call->transfers[i];
		uint64_t place = c->last[2 * (size_t)t->peer + t->is_send]++;
		order[i] = (struct tp_cuda_ordered){ place / CUT_PLACES * windows + tp_cuda_transfer_distance(exec, t) / CUT_DISTANCES, i, -1 };
		*cuts |= order[i].cut > 0;
	}
	for (int i = 0; i < c->call->ntransfers; i++) {
		const struct tp_exec_transfer *t = &c->call->transfers[i];
		c->last[2 * (size_t)t->peer + t->is_send] = 0;
	}
	return ncclSuccess;
}

static int compare_cuts(const void *left, const void *right)
{
	const struct tp_cuda_ordered *a = left, *b = right;
	if (a->cut != b->cut) return a->cut < b->cut ? -1 : 1;
	return a->index < b->index ? -1 : a->index > b->index;
}

/* Memory that is kept, so that a group of a size seen before needs none. */
static ncclResult_t grow_memory(struct tp_cuda_exec *exec, int ntransfers)
{
	size_t ends = 2 * (size_t)exec->boot->nranks;
	if (!exec->transfer_ends) exec->transfer_ends = tp_alloc(ends, sizeof(*exec->transfer_ends), "ends of links for transfers");
	if (!exec->transfer_last) exec->transfer_last = tp_alloc(ends, sizeof(*exec->transfer_last), "places of transfers");
	if (!exec->transfer_args) exec->transfer_args = tp_alloc(1, sizeof(*exec->transfer_args), "arguments of transfers");
	if (!exec->transfer_ends || !exec->transfer_last || !exec->transfer_args) return ncclSystemError;
	if (ntransfers <= exec->transfer_room) return ncclSuccess;
	struct tp_cuda_ordered *order = tp_alloc((size_t)ntransfers, sizeof(*order), "a group's transfers");
	if (!order) return ncclSystemError;
	free(exec->transfer_order);
	exec->transfer_order = order;
	exec->transfer_room = ntransfers;
	return ncclSuccess;
}

ncclResult_t tp_cuda_transfers_launch(struct tp_cuda_exec *exec, CUstream stream, const struct tp_exec_call *call)
{
	int count = call->ntransfers;
	bool cuts;
	TP_TRY(grow_memory(exec, count));
	struct tp_cuda_ordered *order = exec->transfer_order;
	struct cutting c = { .exec = exec, .call = call, .args = exec->transfer_args, .last = exec->transfer_last,
		.chunk_limit = TP_MAX(TP_MIN(call->chunk_bytes, exec->chunk_limit) / 128 * 128, 128) };
	TP_TRY(order_transfers(&c, order, &cuts));
	TP_TRY(pair_selves(exec, call, order, &count));
	if (cuts) qsort(order, (size_t)count, sizeof(*order), compare_cuts);
	for (int i = 0, n; i < count; i += n) {
		for (n = 1; i + n < count && order[i + n].cut == order[i].cut; n++) { }
		if (exec->streams.usable) TP_TRY(tp_cuda_streams_launch(exec, stream, call, &order[i], n));
		else TP_TRY(launch_cut(&c, stream, &order[i], n));
	}
	return ncclSuccess;
}

int tp_cuda_transfers_blocks(const struct tp_cuda_exec *exec, const struct tp_exec_call *call)
{
	unsigned blocks = 1;
	if (exec->streams.usable) return tp_cuda_streams_blocks(exec, call);
	for (int i = 0; i < call->ntransfers; i++) {
		unsigned nparts = parts_of(exec, call->transfers[i].bytes), base = base_of(exec, tp_cuda_transfer_distance(exec, &call->transfers[i]));
		blocks = TP_MAX(blocks, TP_MIN(base + nparts, (unsigned)exec->nchannels));
	}
	return (int)blocks;
}

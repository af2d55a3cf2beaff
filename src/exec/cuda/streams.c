/* Sends and receives by lines (streams.h): where rings lie, and cuts of groups to launches. Gather and scatter are nothing but
 * that and go the same way. (All-gather and all-to-all do better in step with each other, as fused kernels.)
 *
 * What of them goes through pipes is told by a transfer's size alone, which is all that both its ends know. One kernel moves both kinds: were they two, one
 * rank's first could wait for what the other gives in its second. */
#include "exec/cuda/internal.h"

enum {
	PART_UNITS = 32,                /* what is worth another block: a look of eight warps */
	RINGS_MOST = 8 << 20,           /* bytes of all rings together, where slots of the least size allow it */
	SLOT_UNITS = 64, SLOT_UNITS_LEAST = TP_DEV_STREAM_PIPED_UNITS,
	PIPED_LEAST = 2 * TP_DEV_STREAM_PIPED_UNITS * TP_DEV_STREAM_UNIT,       /* some of it must be left for pipes */
};
_Static_assert(TP_DEV_STREAM_PIPED_UNITS * TP_DEV_STREAM_UNIT % 128 == 0, "what is left for pipes must be aligned as all of it is");

static uint32_t slot_units(int nlocal, int nchannels)
{
	size_t rings = (size_t)(nlocal - 1) * (size_t)nchannels;
	uint32_t units = SLOT_UNITS;
	while (units > SLOT_UNITS_LEAST && rings * TP_DEV_STREAM_SLOTS * units * 128 > RINGS_MOST) units /= 2;
	return units;
}

static size_t ring_bytes(uint32_t units) { return 128 + (size_t)TP_DEV_STREAM_SLOTS * units * 128; }

size_t tp_cuda_streams_region_bytes(int nlocal, int nchannels)
{
	if (nlocal < 2 || nlocal > TP_DEV_STREAM_RANKS) return 0;
	return (size_t)(nlocal - 1) * (size_t)nchannels * ring_bytes(slot_units(nlocal, nchannels));
}

uint64_t tp_cuda_streams_pipes_from(const struct tp_fused *f)
{
	return f->pipes.level == TP_CUDA_PIPES_NONE ? UINT64_MAX : TP_MAX(f->table.transfers, PIPED_LEAST);
}

ncclResult_t tp_cuda_streams_init(struct tp_cuda_exec *exec)
{
	struct tp_cuda_streams *s = &exec->streams;
	int n = exec->boot->nranks;
	if (!exec->fused.usable || !exec->fused.table.allows_128 || n > TP_DEV_STREAM_RANKS) return ncclSuccess;
	TP_TRY(tp_cuda_take_memory(exec, (size_t)n * 2 * (size_t)exec->nchannels * sizeof(uint64_t), "counters of sends and receives", &s->counters));
	s->slot_units = slot_units(n, exec->nchannels);
	s->rings_at = tp_align_up(tp_fused_region_bytes(n, exec->nchannels), 4096);
	s->args.lines.head = (struct tp_dev_streams_head){ .comm = exec->comm, .counters = s->counters, .slot_units = s->slot_units, .rank = (int16_t)exec->boot->rank,
		.nranks = (int16_t)n, .nchannels = (uint16_t)exec->nchannels, .gives_way = exec->shared_gpu, .counts = exec->fused.counts };
	s->args.lines.head.pipes_from = tp_cuda_streams_pipes_from(&exec->fused);
	if (exec->fused.pipes.level != TP_CUDA_PIPES_NONE) tp_pipes_fill_transfers(&exec->fused, &s->args.pipe);
	for (int r = 0; r < n; r++) s->args.lines.head.rings[r] = exec->fused.region[r] + s->rings_at;
	s->usable = true;
	return ncclSuccess;
}

/* Peers at different distances begin on different channels, so that small transfers meet in no block. */
static unsigned base_of(const struct tp_cuda_exec *exec, const struct tp_exec_transfer *t)
{
	unsigned step = (unsigned)TP_MAX(exec->nchannels / exec->boot->nranks, 1);
	return tp_cuda_transfer_distance(exec, t) * step % (unsigned)exec->nchannels;
}
static uint32_t units_of(size_t bytes) { return (uint32_t)TP_MAX(tp_div_up(bytes, TP_DEV_STREAM_UNIT), 1); }
static unsigned parts_of(const struct tp_cuda_exec *exec, size_t bytes)
{ return (unsigned)TP_MIN(tp_div_up(units_of(bytes), PART_UNITS), (size_t)exec->nchannels); }

static bool is_piped(const struct tp_cuda_exec *exec, const struct tp_exec_transfer *t)
{ return t->bytes >= exec->streams.args.lines.head.pipes_from && t->peer != exec->boot->rank; }

bool tp_cuda_streams_are_piped(const struct tp_cuda_exec *exec, const struct tp_exec_call *call)
{
	for (int i = 0; i < call->ntransfers; i++)
		if (is_piped(exec, &call->transfers[i])) return true;
	return false;
}

/* Channels that a transfer uses, as bits. */
static uint64_t channels_of(const struct tp_cuda_exec *exec, const struct tp_exec_transfer *t)
{
	unsigned nparts = parts_of(exec, t->bytes), base = base_of(exec, t), n = (unsigned)exec->nchannels;
	uint64_t all = n == 64 ? UINT64_MAX : (1ull << n) - 1;
	if (is_piped(exec, t)) return all;
	uint64_t bits = nparts == 64 ? UINT64_MAX : (1ull << nparts) - 1;
	return (bits << base | (base ? bits >> (n - base) : 0)) & all;
}

ncclResult_t tp_cuda_streams_launch(struct tp_cuda_exec *exec, CUstream stream, const struct tp_exec_call *call, const struct tp_cuda_ordered *order,
	int count)
{
	struct tp_dev_streams_more *args = &exec->streams.args.lines;
	uint64_t channels = 0;
	unsigned blocks = 0;
	int n = 0;
	bool more = count > TP_DEV_STREAMS, piped = false;
	if (count > TP_DEV_STREAMS_MORE)
		return TP_FAIL(ncclInternalError, "rank %d: %d sends and receives in one launch: %d are possible", exec->boot->rank, count, TP_DEV_STREAMS_MORE);
	for (int i = 0; i < count; i++) {
		const struct tp_exec_transfer *t = &call->transfers[order[i].index];
		bool self = t->peer == exec->boot->rank;
		if (self && !t->bytes) continue;
		bool through_pipes = is_piped(exec, t);
		uint32_t units = through_pipes ? TP_DEV_STREAM_PIPED_UNITS : units_of(t->bytes), nparts = through_pipes ? 1 : parts_of(exec, t->bytes);
		args->streams[n] = (struct tp_dev_stream){ .buf = (uint64_t)(uintptr_t)t->buf, .bytes = t->bytes, .units = units, .units_each = units / nparts,
			.units_more = units % nparts, .base = (uint16_t)base_of(exec, t), .nparts = (uint16_t)nparts, .is_send = t->is_send, .is_first = 1,
			.peer = (int16_t)t->peer };
		channels |= channels_of(exec, t);
		if (self) args->streams[n].from = (uint64_t)(uintptr_t)call->transfers[order[i].from].buf;
		bool offers = !self && exec->buffers.table && t->bytes >= args->head.offers_from;
		more |= offers;
		piped |= through_pipes;
		if (offers && !t->is_send) {
			struct tp_dev_offer offer = tp_cuda_find_offer(exec, t->buf, t->bytes);
			args->streams[n].offset = offer.offset;
			args->streams[n].index = (uint16_t)offer.index;
		}
		uint32_t *last = &exec->transfer_last[2 * (size_t)t->peer + t->is_send];
		if (*last) {
			args->streams[*last - 1].next = (uint16_t)(n + 1);
			args->streams[n].is_first = 0;
		}
		*last = (uint32_t)++n;
	}
	for (int i = 0; i < count; i++) {
		const struct tp_exec_transfer *t = &call->transfers[order[i].index];
		exec->transfer_last[2 * (size_t)t->peer + t->is_send] = 0;
	}
	for (unsigned c = 0; c < (unsigned)exec->nchannels; c++)
		if (channels >> c & 1) args->head.channels[blocks++] = (uint8_t)c;
	args->head.ntransfers = (uint32_t)n;
	if (!n) return ncclSuccess;
	if (piped) return tp_cuda_exec_run_shared(exec, stream, exec->kernels->streams_piped, blocks, TP_DEV_THREADS, exec->fused.pipes.shared, args);
	return tp_cuda_exec_run(exec, stream, more ? exec->kernels->streams_more : exec->kernels->streams, blocks, TP_DEV_THREADS, args);
}

int tp_cuda_streams_blocks(const struct tp_cuda_exec *exec, const struct tp_exec_call *call)
{
	uint64_t channels = 0;
	for (int i = 0; i < call->ntransfers; i++) channels |= channels_of(exec, &call->transfers[i]);
	return (int)__builtin_popcountll(channels);
}

static void add(struct tp_exec_call *group, struct tp_exec_transfer *all, int peer, bool is_send, const void *buf, size_t at, size_t bytes)
{
	all[group->ntransfers++] = (struct tp_exec_transfer){ peer, is_send, (char *)(uintptr_t)buf + at, bytes };
}

bool tp_cuda_streams_take(const struct tp_cuda_exec *exec, const struct tp_exec_call *call, struct tp_exec_transfer *transfers,
	struct tp_exec_call *out)
{
	if (!exec->streams.usable || !call->plan || call->block_bytes < exec->fused.table.stream) return false;
	enum tp_coll coll = call->plan->spec.coll;
	int n = exec->boot->nranks, rank = exec->boot->rank, root = call->plan->spec.root;
	size_t b = call->block_bytes;
	bool gathers = coll == TP_GATHER;
	if (!gathers && coll != TP_SCATTER) return false;
	*out = (struct tp_exec_call){ .transfers = transfers, .tag = call->tag, .chunk_bytes = call->chunk_bytes };
	for (int i = 0; i < n; i++) {
		int to = (rank + i) % n, from = (rank + n - i) % n;
		if (gathers ? to == root : rank == root) add(out, transfers, to, true, call->input, gathers ? 0 : (size_t)to * b, b);
		if (gathers ? rank == root : from == root) add(out, transfers, from, false, call->output, gathers ? (size_t)from * b : 0, b);
	}
	return true;
}

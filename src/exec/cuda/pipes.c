/* Large messages through pipes: where they lie, and how calls run through them. */
#include <string.h>

#include "exec/cuda/fused.h"
#include "exec/cuda/internal.h"

enum { LINE = 128, HEADS = 3 * LINE };

/* All pipes of a block together hold about as much, whatever the number of peers: what a block moves while a chunk goes and its news
 * comes back. What reduces has smaller chunks where one peer has all: its sources, and what it makes of them, share a block's memory.
 * Measured on two H200: chunks of 32 KB carry 2 % more than those of 16, each flag having its price; of rings of 4, 8 and 16 MB in all those of
 * 8 MB carry most, the larger ones less and less as messages grow; and two or three chunks under way in a block are as good as more. */
enum { SLOTS = 4, MOVERS_OF_TWO = 3 };
static uint32_t chunk_of(int nlocal, bool reduces) { return nlocal == 2 ? (reduces ? 16 << 10 : 32 << 10) : nlocal <= 4 ? 8 << 10 : 4 << 10; }
/* What only moves has one phase; two share what one has, where chunks are smaller then. */
static uint32_t ring_bytes(enum tp_cuda_pipes level, int nlocal)
{
	const uint32_t one = SLOTS * chunk_of(nlocal, false);
	return level < TP_CUDA_PIPES_ALL ? one : TP_MAX(one, 2 * SLOTS * chunk_of(nlocal, true));
}

size_t tp_pipes_region_bytes(enum tp_cuda_pipes level, int nlocal, int nchannels)
{
	if (level == TP_CUDA_PIPES_NONE || nlocal < 2 || nlocal > TP_PIPE_RANKS) return 0;
	return (size_t)(nlocal - 1) * (size_t)nchannels * (HEADS + ring_bytes(level, nlocal));
}

size_t tp_pipes_counter_bytes(int nchannels) { return (size_t)nchannels * 2 * TP_PIPE_RANKS * 2 * sizeof(uint32_t); }

/* What a kernel has of its own, and what the driver keeps of each block, are left out. */
uint32_t tp_pipes_shared(int most)
{
	const int rest = most - (4 << 10);
	return rest < TP_PIPE_SHARED ? TP_PIPE_SHARED : (uint32_t)TP_MIN(rest, TP_PIPE_SHARED_MOST);
}

void tp_pipes_init(enum tp_cuda_pipes level, int nranks, int nchannels, int shared_most, uint64_t counters, const uint64_t *rings, struct tp_pipes *out)
{
	*out = (struct tp_pipes){ .level = level, .nchannels = nchannels, .chunk = { chunk_of(nranks, false), chunk_of(nranks, true) },
		.pipe_bytes = HEADS + ring_bytes(level, nranks), .shared = level == TP_CUDA_PIPES_TRANSFER ? TP_PIPE_SHARED : tp_pipes_shared(shared_most),
		.counters = counters };
	memcpy(out->rings, rings, (size_t)nranks * sizeof(*rings));
}

static uint8_t bit(int rank) { return (uint8_t)(1u << rank); }

/* Who gives what to whom. */
static void fill_roles(int n, int rank, int root, const struct tp_fused_shape *s, struct tp_pipe_args *a)
{
	const uint8_t all = (uint8_t)((1u << n) - 1), others = (uint8_t)(all & ~bit(rank)), owners = (uint8_t)(all & ~bit(root < 0 ? 0 : root));
	const bool is_root = rank == root;
	for (int p = 0; p < n; p++) a->slice_of[p] = (int8_t)(s->owners ? p - (p > root) : s->pattern != TP_FUSED_TO_ROOT && s->in_stride ? p : 0);
	if (s->owners && s->reduces) {
		a->push_to = owners & others;
		a->sources = is_root ? 0 : all;
		a->send_to = is_root ? 0 : bit(root);
		a->collect_from = is_root ? owners : 0;
	} else if (s->owners) {
		a->push_to = is_root ? owners : 0;
		a->sources = is_root ? 0 : bit(root);
		a->send_to = a->collect_from = is_root ? 0 : owners & others;
		a->keeps = is_root ? (uint8_t)(n - 1) : 0;
	} else if (s->reduces) {
		const bool to_root = s->pattern == TP_FUSED_TO_ROOT;
		a->push_to = !to_root ? others : is_root ? 0 : bit(root);
		a->sources = !to_root || is_root ? all : 0;
		a->send_to = a->collect_from = s->gathers ? others : 0;
	} else {
		const bool from_root = s->pattern == TP_FUSED_FROM_ROOT, to_root = s->pattern == TP_FUSED_TO_ROOT;
		a->push_to = from_root ? (is_root ? others : 0) : to_root ? (is_root ? 0 : bit(root)) : others;
		a->collect_from = from_root ? (is_root ? 0 : bit(root)) : to_root ? (is_root ? others : 0) : others;
		a->keeps = (!from_root && !to_root) || is_root;
		a->keep_slice = (int8_t)(s->in_stride ? rank : 0);
		a->keep_place = (int8_t)(s->out_stride ? rank : 0);
		a->fans = s->in_stride == 0 && a->push_to == others;
	}
	a->gathers = s->gathers;
	a->stores = !(s->owners && s->reduces);     /* then only the root has an OUTPUT */
}

/* Warps, and chunks of shared memory. What isn't aligned is collected by threads. */
static void share_out_moves(int n, uint32_t chunks, struct tp_pipe_args *a)
{
	const uint32_t peers = (uint32_t)n - 1, warps = TP_DEV_THREADS / 32;
	a->collectors = !a->collect_from || !a->aligned ? 0 : n <= 4 && chunks >= 4 * peers ? 2 : 1;
	a->pushers = (uint8_t)TP_MIN((chunks - peers * a->collectors) / (a->fans ? 1 : peers), n == 2 ? MOVERS_OF_TWO : TP_PIPE_PUSHERS);
	if (a->collect_from && !a->collectors) a->collect_warps = (uint8_t)((warps - a->pushers) / (uint32_t)n);
}

/* The first way that leaves room for two who push, and two who reduce. */
static void share_out_reductions(int n, uint32_t chunks, struct tp_pipe_args *a)
{
	static const struct { uint8_t feeders, tiles, collectors; } ways[] = { { 2, 3, 2 }, { 2, 2, 1 }, { 1, 2, 1 } };
	const uint32_t peers = (uint32_t)n - 1, warps = TP_DEV_THREADS / 32, pushers = a->push_to ? 2 : 0, reducers = 2;
	uint32_t used = 0, rest = 0;
	if (a->collect_from && !a->aligned) a->collect_warps = peers == 1 ? 4 : peers == 2 ? 2 : 1;
	for (size_t i = 0; i < TP_ARRAY_LEN(ways); i++) {
		a->feeders = a->sources ? ways[i].feeders : 0;
		a->tiles = a->sources ? ways[i].tiles : 0;
		a->collectors = !a->collect_from || !a->aligned ? 0 : n <= 4 ? ways[i].collectors : 1;
		used = (uint32_t)n * a->feeders + a->tiles + peers * a->collectors;
		rest = warps - a->feeders - a->tiles - peers * (uint32_t)(a->collectors + a->collect_warps);
		if (used + pushers * peers <= chunks && rest >= pushers + reducers) break;
	}
	/* With one peer, two who push beside those who send leave more to those who reduce: measured on H200. */
	const uint32_t most = n == 2 && a->send_to ? pushers : TP_PIPE_PUSHERS;
	a->pushers = (uint8_t)(a->push_to ? TP_MIN(TP_MIN((chunks - used) / peers, most), rest - reducers) : 0);
	a->reduce_warps = (uint8_t)(rest - a->pushers);
}

/* What all that goes through pipes has in common. */
static struct tp_pipe_args args_of(const struct tp_fused *f)
{
	const struct tp_pipes *pipes = &f->pipes;
	struct tp_pipe_args args = { .comm = f->comm, .counters = pipes->counters, .chunk = pipes->chunk[0], .slots = SLOTS,
		.pipe_bytes = pipes->pipe_bytes, .rank = (int16_t)f->rank, .nranks = (int16_t)f->nranks, .nchannels = (uint16_t)pipes->nchannels,
		.gives_way = f->shared_gpu, .counts = f->counts };
	memcpy(args.rings, pipes->rings, sizeof(args.rings));
	return args;
}

void tp_pipes_fit(const struct tp_fused *f, const struct tp_exec_call *call, const struct tp_fused_shape *shape, struct tp_pipe_launch *out)
{
	const struct tp_pipes *pipes = &f->pipes;
	struct tp_fused_shape s = *shape;
	const int n = f->nranks;
	if (s.gathers) s.slice = s.in_stride = s.out_stride = tp_align_up(tp_div_up(s.slice, (size_t)n - s.owners), LINE);
	out->kind = s.reduces || s.owners ? TP_FUSED_PIPE : TP_FUSED_PUSH;
	out->reduces = s.reduces;
	out->name = s.name[TP_FUSED_BY_PIPES];
	out->shared = pipes->shared;
	struct tp_pipe_args *a = &out->args;
	*a = args_of(f);
	a->input = (uint64_t)(uintptr_t)call->input;
	a->output = (uint64_t)(uintptr_t)call->output;
	a->slice_bytes = s.slice;
	a->total_bytes = s.total;
	a->in_stride = s.in_stride;
	a->out_stride = s.out_stride;
	a->chunk = pipes->chunk[out->kind == TP_FUSED_PIPE];
	a->tag = call->tag;
	a->aligned = (a->input | a->output | s.in_stride | s.out_stride) % 16 == 0;
	fill_roles(n, f->rank, call->plan->spec.root, &s, a);
	if (out->kind == TP_FUSED_PUSH) share_out_moves(n, out->shared / a->chunk, a);
	else share_out_reductions(n, out->shared / a->chunk, a);
	/* Less than 4 KB isn't worth another block. */
	const size_t lines = tp_div_up(s.slice, LINE);
	out->blocks = (unsigned)TP_MIN(tp_div_up(s.slice, TP_MIN(a->chunk / 4, 4u << 10)), (size_t)f->table.max_blocks);
	a->lines_each = lines / out->blocks;
	a->lines_more = lines % out->blocks;
	if (s.reduces) tp_cuda_fill_reduce(call, &a->reduce);
}

void tp_pipes_fill_transfers(const struct tp_fused *f, struct tp_pipe_args *out)
{
	*out = args_of(f);
	out->stages = (uint16_t)TP_MIN(f->pipes.shared / out->chunk, UINT16_MAX);
	out->pushers = f->nranks == 2 ? MOVERS_OF_TWO : TP_PIPE_PUSHERS;
	out->collectors = 2;
}
